"""Starting an engine, waiting until it answers, and stopping all of its processes, also after
the death of this one.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import httpx

from spectrain.config.environment import inherited_environment
from spectrain.errors import RunError, UserError
from spectrain.output.text import mask_secrets
from spectrain.servers.commands import EngineCommand, EngineLaunch

from ..servers.base import Server
from ..servers.settings import EngineSettings
from .process_group import run_group
from .starters import find_starter

# Seconds between two attempts to reach a starting engine, and for an attempt.
POLL_SECONDS = 0.25
ATTEMPT_SECONDS = 5.0
# An exception or an error of a program, with its text, in a line of a log.
FAILURE_LINE = re.compile(r"\b(?:\w*(?:Error|Exception)|error): \S.*")
# vLLM's last exception, which only points to the one before it.
POINTER = "Engine core initialization failed"
# Longest explanation of a failed start, in characters.
MAX_EXPLANATION = 400


@dataclass
class RunningEngine:
    """A started engine that answers."""

    # A client of it.
    server: Server
    command: EngineCommand
    process: subprocess.Popen[bytes]
    # File with what it prints.
    log: Path

    @property
    def url(self) -> str:
        return self.server.clients[0].url

    def check_running(self) -> None:
        """Raise a RunError if the engine has ended."""
        if self.process.poll() is not None:
            raise RunError(describe_end(self.server.name, self.process, self.log))

    def wait(self) -> None:
        """Wait until the engine ends, which is a RunError.

        A wait without a limit would miss a signal that arrives just before it, and never end.
        """
        while True:
            self.check_running()
            time.sleep(POLL_SECONDS)


@contextmanager
def start_engine(server: Server, launch: EngineLaunch | EngineCommand) -> Iterator[RunningEngine]:
    """Start an engine for a launch, or by a command, and yield it once it answers. All of its
    processes end with the block, and with this process.

    A RunError says why it did not start; its log is kept then.
    """
    assert isinstance(server.settings, EngineSettings)
    if isinstance(launch, EngineCommand):
        check_port(server.settings)
        command = launch
    else:
        starter = find_starter(server)
        starter.check_installed()
        check_port(server.settings)
        command = starter.make_command(launch)
        starter.prepare_start(launch)
    environment = {**inherited_environment(), **command.environment}
    with (
        open_log(server.name) as output,
        run_group(command.arguments, environment, output) as process,
    ):
        log = Path(output.name)
        print(f"{server.name} starts; its log is {log}", file=sys.stderr, flush=True)
        client = type(server)(replace(server.settings, url=server.settings.started_url))
        engine = RunningEngine(client, command, process, log)
        wait_until_ready(engine, server.settings)
        yield engine
        engine.check_running()


@contextmanager
def open_log(name: str) -> Iterator[IO[bytes]]:
    """Yield a new file for what an engine prints. It stays only if a RunError ends the block,
    which names it.
    """
    with tempfile.NamedTemporaryFile(
        prefix=f"spectrain-{name}-", suffix=".log", delete=False
    ) as output:
        keeps_log = False
        try:
            yield output
        except RunError:
            keeps_log = True
            raise
        finally:
            if not keeps_log:
                Path(output.name).unlink(missing_ok=True)


def check_port(settings: EngineSettings) -> None:
    """Raise a UserError if the port or the address is not free."""
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as probe:
        # As servers do, so that the connections of one that has just ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise UserError(
                f"server.port={settings.port}: {settings.host} cannot be listened at "
                f"({error.strerror}); give another port"
            ) from error


def wait_until_ready(engine: RunningEngine, settings: EngineSettings) -> None:
    """Wait until the engine answers; raise a RunError if it ends before that, or takes too long."""
    began = time.monotonic()
    with httpx.Client(timeout=ATTEMPT_SECONDS, trust_env=False) as client:
        while time.monotonic() - began < settings.start_seconds:
            engine.check_running()
            with suppress(httpx.TransportError):
                if client.get(f"{engine.url}/models").status_code < 500:
                    break
            time.sleep(POLL_SECONDS)
        else:
            raise RunError(
                f"{engine.server.name} does not answer after {settings.start_seconds:g} seconds; "
                f"see {engine.log}, or give it longer with server.start_seconds"
            )
    print(
        f"{engine.server.name} answers at {engine.url} after {time.monotonic() - began:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def describe_end(name: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """Return a sentence on an engine that has ended: its status, what its log says of the
    reason, and where the log is.
    """
    status = process.returncode
    if -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        return (
            f"{name} was ended by {signal.Signals(-status).name} from outside, as when memory "
            f"runs out; its log is {log}"
        )
    how = f"exit status {status}" if status >= 0 else f"signal {-status}"
    return (
        f"{name} has ended ({how}): {explain_log(log.read_text(errors='replace'))}; its log "
        f"is {log}"
    )


def explain_log(text: str) -> str:
    """Return the last error in a log, or else its last lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "it printed nothing"
    failures = [
        number
        for number, line in enumerate(lines)
        if FAILURE_LINE.search(line) and POINTER not in line
    ]
    if failures:
        match = FAILURE_LINE.search(lines[failures[-1]])
        assert match is not None
        # A validation error is explained in the line after it.
        count = 1 if "validation error" in match[0] else 0
        shown = [match[0], *lines[failures[-1] + 1 : failures[-1] + 1 + count]]
    else:
        shown = lines[-3:]
    explanation = mask_secrets(" ".join(shown))
    return (
        explanation
        if len(explanation) <= MAX_EXPLANATION
        else f"{explanation[:MAX_EXPLANATION]} .."
    )
