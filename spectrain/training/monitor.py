"""A monitor of the processes of a run. It names a process that dies or falls behind, so that no one waits in silence."""

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from .parallel import ParallelStrategy

HEARTBEAT_SECONDS = 2.0  # seconds between heartbeats
SILENCE_SECONDS = 30.0  # seconds without a heartbeat after which a process counts as dead


class ProcessMonitor:
    """Exchanges heartbeats of all processes through a store, which a thread writes and reads.

    A process is dead where its thread is silent too; it is slow where it alone has not reached a step that all others wait
    in for `patience` seconds: of that it is told once for each step.
    """

    def __init__(self, parallel: ParallelStrategy, patience: float) -> None:
        self.rank, self.num_processes, self.patience = parallel.rank, parallel.num_processes, patience
        self.step, self.status_time, self.activity = 0, time.monotonic(), "starting"
        self.stop_event = threading.Event()
        self.reported_slow: set[tuple[int, int]] = set()
        self.num_beats = 0
        self.last_beats: dict[
            int, tuple[int, float]
        ] = {}  # of every process: its newest beat, and when that was first read here
        self.exit_message: str | None = None
        if self.num_processes == 1:
            return
        port = parallel.all_gather(_find_free_port() if self.rank == 0 else 0)[0]
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, self.num_processes, self.rank == 0, timedelta(seconds=SILENCE_SECONDS), wait_for_workers=False
        )
        self.thread = threading.Thread(target=self._monitor_processes, daemon=True)

    def __enter__(self) -> "ProcessMonitor":
        if self.num_processes > 1:
            self._send_heartbeat()
            self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop_event.set()
        if self.num_processes == 1:
            return
        self.exit_message = "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:300]
        with suppress(RuntimeError):  # the process that keeps the store may have gone
            self._send_heartbeat()

    def report_status(self, step: int, activity: str) -> None:
        """Report the step and the activity of this process, which may be waiting for the others."""
        self.step, self.activity, self.status_time = step, activity, time.monotonic()

    def find_dead_process(self) -> str | None:
        """Describe the process that has died; wait until one is known to have, or return None."""
        if self.num_processes == 1:
            return None
        deadline = time.monotonic() + SILENCE_SECONDS + 2 * HEARTBEAT_SECONDS
        while time.monotonic() < deadline:
            message = self._find_dead()
            if message is not None:
                return message
            time.sleep(HEARTBEAT_SECONDS / 4)
        return None

    def _send_heartbeat(self) -> None:
        self.num_beats += 1
        sign = {
            "beat": self.num_beats,
            "step": self.step,
            "doing": self.activity,
            "for": time.monotonic() - self.status_time,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "farewell": self.exit_message,
        }
        self.store.set(f"{self.rank}", json.dumps(sign))

    def _read_heartbeats(self) -> dict[int, dict[str, Any]]:
        """Return the last heartbeat of every process that has sent one."""
        ranks = [rank for rank in range(self.num_processes) if self.store.check([f"{rank}"])]
        signs: dict[int, dict[str, Any]] = {rank: json.loads(self.store.get(f"{rank}")) for rank in ranks}
        for rank, sign in signs.items():
            if self.last_beats.get(rank, (0, 0.0))[0] != sign["beat"]:
                self.last_beats[rank] = (sign["beat"], time.monotonic())
        return signs

    def _find_dead(self) -> str | None:
        try:
            signs = self._read_heartbeats()
        except RuntimeError:
            return "rank 0, which keeps the signs of life, no longer answers"
        for rank, sign in signs.items():
            who = f"rank {rank} ({sign['host']}, process {sign['pid']})"
            if rank != self.rank and sign["farewell"]:
                return f"{who} stopped at step {sign['step'] + 1}: {sign['farewell']}"
            if rank != self.rank and sign["farewell"] is None and not self._is_alive(rank, sign):
                return f"{who} died in step {self.step + 1}"  # this process's step: the other's last sign may be older
        return None

    def _is_alive(self, rank: int, sign: dict[str, Any]) -> bool:
        """Tell whether a process is alive: on this machine by its id, on another by a recent heartbeat."""
        if sign["host"] == socket.gethostname():
            try:
                os.kill(sign["pid"], 0)
                with open(f"/proc/{sign['pid']}/stat") as stat:
                    return stat.read().rsplit(")", 1)[1].split()[0] != "Z"  # ended, though nobody has asked how
            except ProcessLookupError:
                return False
            except OSError:
                return True
        return time.monotonic() - self.last_beats[rank][1] < SILENCE_SECONDS

    def _monitor_processes(self) -> None:
        while not self.stop_event.wait(HEARTBEAT_SECONDS):
            try:
                self._send_heartbeat()
                signs = self._read_heartbeats()
            except RuntimeError:
                continue  # whoever waits for it will hear; see `find_dead_process`
            self._report_slow(signs)
            if (
                self.activity == WAITING
                and time.monotonic() - self.status_time > SILENCE_SECONDS
                and (message := self._find_dead())
            ):
                print(f"spectrain: training: {message}; go on with trainer.resume=auto", file=sys.stderr, flush=True)
                os._exit(1)  # a collective that waits for a dead process never returns

    def _report_slow(self, signs: dict[int, dict[str, Any]]) -> None:
        """On the first waiting process, print which processes keep the others waiting."""
        waiting = [rank for rank, sign in signs.items() if sign["doing"] == WAITING and sign["farewell"] is None]
        if not waiting or waiting[0] != self.rank or time.monotonic() - self.status_time < self.patience:
            return
        for rank, sign in signs.items():
            if sign["doing"] != WAITING and sign["for"] > self.patience and (rank, sign["step"]) not in self.reported_slow:
                self.reported_slow.add((rank, sign["step"]))
                print(
                    f"spectrain: training: rank {rank} ({sign['host']}, process {sign['pid']}) keeps the others waiting at "
                    f"step {sign['step'] + 1}: {sign['for']:.0f} s of {sign['doing']}",
                    file=sys.stderr,
                    flush=True,
                )


WAITING = "waiting"


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
