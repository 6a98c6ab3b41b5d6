"""llama.cpp's server as benchmarks use it: started for a measurement, and asked over HTTP."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch, EngineLaunch, to_options
from spectrain_serve.engines.llamacpp_command import model_options

SERVER_SECONDS = 300
"""Seconds that the server may take to load its models, or to answer."""


class LlamaCppProcess:
    """A running server, which ends with the block that enters it."""

    def __init__(self, program: str, launch: EngineLaunch, threads: int, context: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = model_options(launch) | {"-c": context, "-np": 1, "-t": threads, "-tb": threads}
        if launch.drafter is not None:
            options["-td"] = threads
        words = to_options(options | {"--host": "127.0.0.1", "--port": self.port})
        self.process = subprocess.Popen(
            [program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> LlamaCppProcess:
        deadline = time.monotonic() + SERVER_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.request("/health", None)
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self.__exit__()
        raise UserError(f"llama-server does not answer within {SERVER_SECONDS} s; start it by hand")

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait()

    def request(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SERVER_SECONDS) as answer:
            return json.load(answer)


def launch_pair(target: str, drafter: str | None, num_tokens: int) -> EngineLaunch:
    """Return the launch of a GGUF file, alone or with another one that drafts so many tokens."""
    drafts = None if drafter is None else DrafterLaunch("draft-simple", drafter, num_tokens)
    return EngineLaunch(target, drafter=drafts)
