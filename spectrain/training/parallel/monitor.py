"""A monitor of the processes of a run, which names one that dies, freezes, loses its network or
falls behind.

A thread exchanges heartbeats through a store on rank 0. A store that no longer answers blocks this
thread, so a second one only reads the clock and what the first has left. Silence is judged by
heartbeats alone: what a process does says nothing about it, because the others may wait in any
exchange, and the frozen one never enters it. Clocks of two processes are never compared.
"""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from spectrain.errors import RunError, UserError
from spectrain.output.streams import print_warning
from spectrain.servers.ports import find_free_port

from .base import ParallelStrategy

# Seconds between heartbeats.
HEARTBEAT_SECONDS = 1.0
# Seconds without a heartbeat after which a process is named as silent. A message follows within 3
# more heartbeats.
SILENT_SECONDS = 5.0
# Seconds without a heartbeat after which a process counts as dead while others wait for it.
SILENCE_SECONDS = 30.0
# The same after an error of the connection, which proves that something is gone.
SILENCE_AFTER_ERROR_SECONDS = 10.0
WAITING = "waiting"
# What is in the messages of torch's errors if a connection has failed.
CONNECTION_SIGNS = ("onnection", "peer", "NCCL", "gloo", "Gloo", "imed out", "imeout", "ocket")


@dataclass
class Heartbeat:
    """The newest heartbeat of a process, and when this process first read it."""

    beat: int
    step: int
    activity: str
    # Seconds that the activity had lasted when the heartbeat was sent.
    seconds: float
    host: str
    pid: int
    # Why the process has ended: "" after its last step, None while it runs.
    farewell: str | None
    # Whether the farewell is about another process.
    is_about_another: bool
    read_time: float = 0.0


class ProcessMonitor:
    """Exchanges heartbeats of all processes through a store, which a thread writes and reads.

    A process is silent if its thread sends no heartbeats for `SILENT_SECONDS`, and dead after
    `SILENCE_SECONDS`; a process that waits for a dead one ends itself. It is slow if the others
    have waited for it for `patience` seconds in the same step; a message names it once for each
    step.
    """

    def __init__(self, parallel: ParallelStrategy, patience: float) -> None:
        self.rank = parallel.rank
        self.num_processes = parallel.num_processes
        self.patience = patience
        self.step = 0
        self.status_time = time.monotonic()
        self.activity = "starting"
        self.stop_event = threading.Event()
        self.reported_slow: set[tuple[int, int]] = set()
        # Seconds of silence of the processes that a message has named and that are still silent.
        self.reported_silent: dict[int, float] = {}
        self.num_beats = 0
        self.heartbeats: dict[int, Heartbeat] = {}
        # When the store last answered.
        self.answer_time = time.monotonic()
        self.exit_message: str | None = None
        # The message of `explain_failure`, which is about another process.
        self.explanation: str | None = None
        if self.num_processes == 1:
            return
        port = parallel.all_gather(find_free_port() if self.rank == 0 else 0)[0]
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        try:
            self.store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                self.num_processes,
                self.rank == 0,
                timedelta(seconds=SILENCE_SECONDS),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise RunError(
                f"launch: rank {self.rank} on {socket.gethostname()} does not reach port {port} "
                f"of {host}, where processes exchange heartbeats; let the machines of a run "
                "connect to one another on all ports"
            ) from error
        self.exchange_thread = threading.Thread(target=self._exchange_heartbeats, daemon=True)
        self.watch_thread = threading.Thread(target=self._watch_processes, daemon=True)

    def __enter__(self) -> "ProcessMonitor":
        if self.num_processes > 1:
            self.exchange_thread.start()
            self.watch_thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        own = "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.exit_message = self.explanation or own
        self.stop_event.set()
        if self.num_processes > 1:
            # The last heartbeat says farewell; it blocks if rank 0 is out of reach. A thread that
            # is still in the store when the interpreter ends would abort the process.
            self.exchange_thread.join(SILENCE_AFTER_ERROR_SECONDS)

    def report_status(self, step: int, activity: str) -> None:
        """Report the step and the activity of this process, which may be waiting for the others."""
        self.step = step
        self.activity = activity
        self.status_time = time.monotonic()

    def explain_failure(self, error: RuntimeError, run: Path) -> Exception:
        """Return the error, or one that names the process which failed first."""
        text = str(error)
        if isinstance(error, (UserError, RunError)) or self.num_processes == 1:
            return error
        if not any(sign in text for sign in CONNECTION_SIGNS):
            return error
        self.explanation = self._wait_for_dead()
        if self.explanation is None:
            return error
        return RunError(
            f"training: {self.explanation}; go on with the same command, trainer.resume=auto "
            f"run={run}"
        )

    def _wait_for_dead(self) -> str | None:
        """Describe the process that has died; wait until one is known to have, or return None."""
        deadline = time.monotonic() + SILENCE_AFTER_ERROR_SECONDS + 2 * HEARTBEAT_SECONDS
        while time.monotonic() < deadline:
            message = self.find_dead(SILENCE_AFTER_ERROR_SECONDS)
            if message is not None:
                return message
            time.sleep(HEARTBEAT_SECONDS / 4)
        return None

    # The first thread

    def _exchange_heartbeats(self) -> None:
        while True:
            with suppress(RuntimeError):  # rank 0 may have gone, which the watch sees
                self._send_heartbeat()
                self._read_heartbeats()
                self.answer_time = time.monotonic()
            if self.exit_message is not None:
                return
            self.stop_event.wait(HEARTBEAT_SECONDS)

    def _send_heartbeat(self) -> None:
        self.num_beats += 1
        sign = {
            "beat": self.num_beats,
            "step": self.step,
            "activity": self.activity,
            "seconds": time.monotonic() - self.status_time,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "farewell": self.exit_message,
            "is_about_another": self.explanation is not None,
        }
        self.store.set(f"{self.rank}", json.dumps(sign))

    def _read_heartbeats(self) -> None:
        """Read the last heartbeat of every process that has sent one."""
        for rank in range(self.num_processes):
            if self.store.check([f"{rank}"]):
                sign = Heartbeat(
                    **json.loads(self.store.get(f"{rank}")), read_time=time.monotonic()
                )
                if rank not in self.heartbeats or self.heartbeats[rank].beat != sign.beat:
                    self.heartbeats = {**self.heartbeats, rank: sign}

    # What the heartbeats mean

    def find_dead(self, silence: float) -> str | None:
        """Describe a process that has ended or has been silent for so many seconds; None if
        there is none.
        """
        now = time.monotonic()
        others = {rank: sign for rank, sign in self.heartbeats.items() if rank != self.rank}
        if self.rank and now - self.answer_time > silence:
            first = self.heartbeats.get(0)
            who = "rank 0" if first is None else _describe(0, first)
            return f"{who} has not answered for {silence:.0f} s, so it died or the network is cut"
        dead = [
            rank
            for rank, sign in others.items()
            if sign.farewell is None and not _is_alive(sign, now, silence)
        ]
        if (
            len(dead) > 1
            and len(dead) == len(others)
            and len({sign.host for sign in self.heartbeats.values()}) > 2
        ):
            return (
                f"no other process has answered for {silence:.0f} s, so "
                f"{socket.gethostname()} is cut off from the network"
            )
        if dead:
            return (
                f"{_describe(dead[0], others[dead[0]])} died in step {self.step + 1}, or the "
                "network to it is cut"
            )
        ended = [(rank, sign) for rank, sign in others.items() if sign.farewell]
        for rank, sign in ended:
            if not sign.is_about_another:
                return f"{_describe(rank, sign)} stopped at step {sign.step + 1}: {sign.farewell}"
        return next((sign.farewell for _, sign in ended), None)

    def _running_others(self) -> dict[int, Heartbeat]:
        """Return the heartbeats of the other processes that have not ended."""
        return {
            rank: sign
            for rank, sign in self.heartbeats.items()
            if sign.farewell is None and rank != self.rank
        }

    def _silent_processes(self) -> dict[int, float]:
        """Return the seconds of silence of other processes that are frozen or out of reach."""
        now = time.monotonic()
        running = self._running_others()
        if self.rank and now - self.answer_time > SILENT_SECONDS:
            # Without the store of rank 0 nothing is known about the others.
            return {0: now - self.answer_time} if 0 in running else {}
        ages = {rank: now - sign.read_time for rank, sign in running.items()}
        return {rank: age for rank, age in ages.items() if age > SILENT_SECONDS}

    def _slow_processes(self) -> dict[int, Heartbeat]:
        """Return the heartbeats of the processes that keep this one waiting for longer than
        `patience`.
        """
        return {
            rank: sign
            for rank, sign in self._running_others().items()
            if sign.activity != WAITING and sign.seconds > self.patience
        }

    # The second thread

    def _watch_processes(self) -> None:
        last = time.monotonic()
        while not self.stop_event.wait(HEARTBEAT_SECONDS):
            now = time.monotonic()
            self._forgive_pause(now - last - HEARTBEAT_SECONDS)
            last = now
            silent = self._silent_processes()
            self._report_silent(silent)
            unchanged = now - self.status_time
            if self.activity == WAITING and unchanged >= self.patience and not silent:
                self._report_slow()
            if unchanged > SILENCE_SECONDS and (message := self.find_dead(SILENCE_SECONDS)):
                _print_message(
                    f"{message}; go on with the same command and trainer.resume=auto run=DIR"
                )
                os._exit(1)  # a collective that waits for a dead process never returns

    def _forgive_pause(self, pause: float) -> None:
        """Count none of the time in which this process itself did not run as silence of the
        others.
        """
        if pause < HEARTBEAT_SECONDS:
            return
        now = time.monotonic()
        self.answer_time = min(now, self.answer_time + pause)
        for sign in self.heartbeats.values():
            sign.read_time = min(now, sign.read_time + pause)
        if pause > SILENT_SECONDS:
            _print_message(
                f"this process, rank {self.rank} ({socket.gethostname()}), did not run for "
                f"{pause:.0f} s"
            )

    def _report_silent(self, silent: dict[int, float]) -> None:
        """On the first process that runs, print which processes are silent, and which are so no
        longer.
        """
        for rank in [rank for rank in self.reported_silent if rank not in silent]:
            seconds = self.reported_silent.pop(rank)
            if self.heartbeats[rank].farewell is None:
                _print_message(
                    f"{_describe(rank, self.heartbeats[rank])} sends heartbeats again, after "
                    f"about {seconds:.0f} s"
                )
        running = [
            rank
            for rank, sign in self.heartbeats.items()
            if sign.farewell is None and rank not in silent
        ]
        if min(running, default=None) != self.rank:
            return
        for rank, seconds in silent.items():
            if rank not in self.reported_silent:
                sign = self.heartbeats[rank]
                _print_message(
                    f"{_describe(rank, sign)} has sent no heartbeat for {seconds:.0f} s in step "
                    f"{self.step + 1}, so it is frozen or its network is cut"
                )
        self.reported_silent = silent

    def _report_slow(self) -> None:
        """On the first waiting process, print which processes keep the others waiting."""
        waiting = [
            rank
            for rank, sign in self.heartbeats.items()
            if sign.activity == WAITING and sign.farewell is None
        ]
        if min(waiting, default=None) != self.rank:
            return
        for rank, sign in self._slow_processes().items():
            if (rank, sign.step) not in self.reported_slow:
                self.reported_slow.add((rank, sign.step))
                _print_message(
                    f"{_describe(rank, sign)} keeps the others waiting at step {sign.step + 1}: "
                    f"{sign.seconds:.0f} s of {sign.activity}"
                )


def _print_message(message: str) -> None:
    print_warning(f"training: {message}")


def _describe(rank: int, sign: Heartbeat) -> str:
    return f"rank {rank} ({sign.host}, process {sign.pid})"


def _is_alive(sign: Heartbeat, now: float, silence: float) -> bool:
    """Tell whether a process is alive: on this machine by its id, on another by a recent
    heartbeat.
    """
    if sign.host != socket.gethostname():
        return now - sign.read_time < silence
    try:
        os.kill(sign.pid, 0)
        with open(f"/proc/{sign.pid}/stat") as stat:
            # ended, though nobody has asked how
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True
