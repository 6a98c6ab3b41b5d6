"""llama.cpp's server with the same target as one file, alone, by n-grams and with a draft model."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lab.side_by_side.protocol import Decode, Decoding, Setting, read_setting, serve

START_SECONDS = 300
"""Seconds that a server may take to load its model."""
DRAFTED = 3


def main() -> None:
    setting = read_setting()
    program = setting.llama_server or shutil.which("llama-server")
    if program is None or setting.gguf is None:
        raise SystemExit("llama.cpp needs a server (make llama-cpp) and the target as a GGUF file")
    options: dict[str, list[str]] = {"plain": []}
    if setting.assistant_gguf is not None:
        draft = ["-md", setting.assistant_gguf, "-td", str(setting.threads)]
        options["draft model, chain of 3"] = [*draft, "--draft-max", str(DRAFTED)]
    with ExitStack() as stack:
        ports = {
            name: stack.enter_context(run_server(program, setting, words))
            for name, words in options.items()
        }
        serve(read_version(program), {name: use_server(port) for name, port in ports.items()})


def read_version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return next((line for line in lines if line.startswith("version")), "unknown")


@contextmanager
def run_server(program: str, setting: Setting, words: list[str]) -> Iterator[int]:
    """Start a server and yield its port once it answers; stop it at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "-m", str(setting.gguf), "-c", "2048", "-np", "1"]
    command += ["-t", str(setting.threads), "-tb", str(setting.threads)]
    command += ["--host", "127.0.0.1", "--port", str(port), *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            try:
                request(port, "/health", None)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait()


def request(port: int, path: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    message = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(message, timeout=START_SECONDS) as answer:
        return json.load(answer)


def use_server(port: int) -> Decode:
    def decode(prompt: list[int], tokens: int) -> Decoding:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True}
        body |= {"return_tokens": True, "cache_prompt": False}
        answer = request(port, "/completion", body)
        accepted = answer["timings"].get("draft_n_accepted", 0)
        return Decoding(answer["tokens"], tokens - 1 - accepted)

    return decode


if __name__ == "__main__":
    main()
