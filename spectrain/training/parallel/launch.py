"""The processes that accelerate or torchrun has started: how they connect and share the drafter, and a monitor that names a
process which dies or falls behind.

What a launch file asks for is read from where accelerate leaves it, and is done here with torch's `fully_shard` or
`deepspeed.initialize` on any device: accelerate itself does neither without a GPU, and training that is not shared as was asked
would go unnoticed.
"""

import json
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator

from spectrain.errors import RunError, UserError

from .base import ParallelStrategy, ReplicatedStrategy
from .deepspeed import ZeroStrategy
from .fsdp2 import FullyShardedStrategy

# Seconds between heartbeats.
HEARTBEAT_SECONDS = 2.0
# Seconds without a heartbeat after which a process counts as dead.
SILENCE_SECONDS = 30.0
WAITING = "waiting"
Sharding = Literal["auto", "ddp", "fsdp2", "zero2", "zero3"]
# The supported values of variables that an accelerate file sets, and what a message suggests instead of others.
SUPPORTED_VALUES: dict[str, tuple[tuple[str, ...], str]] = {
    "ACCELERATE_MIXED_PRECISION": (("no", "bf16"), "mixed_precision: bf16"),
    "ACCELERATE_DYNAMO_BACKEND": (("NO",), "dynamo_backend: 'NO'"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (("1", "auto"), "trainer.accumulate instead"),
    "ACCELERATE_GRADIENT_CLIPPING": (("none", "auto"), "trainer.clip instead"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (("none",), "none"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (("none",), "none"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": (("none",), "zero_stage in the accelerate file itself"),
    "FSDP_OFFLOAD_PARAMS": (("false",), "fsdp_offload_params: false"),
    "FSDP_ACTIVATION_CHECKPOINTING": (("false",), "trainer.gradient_checkpointing instead"),
}


def resolve_sharding(sharding: Sharding) -> Sharding:
    """Return the sharding that launcher and `trainer.sharding` request; raise a UserError for a conflict."""
    for variable, (allowed, instead) in SUPPORTED_VALUES.items():
        if (setting := os.environ.get(variable)) is not None and setting.lower() not in [value.lower() for value in allowed]:
            raise UserError(f"launch: {variable}={setting} is not supported; use {instead}")
    launched: Sharding | None = None
    if _is_set("ACCELERATE_USE_FSDP"):
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise UserError("launch: the accelerate file asks for FSDP 1; write fsdp_version: 2 below fsdp_config")
        launched = "fsdp2"
    elif _is_set("ACCELERATE_USE_DEEPSPEED"):
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
        if stage not in ("2", "3"):
            raise UserError(f"launch: the accelerate file asks for ZeRO stage {stage or 'none'}; write zero_stage: 2 or 3")
        launched = "zero2" if stage == "2" else "zero3"
    if launched is not None and sharding not in ("auto", launched):
        raise UserError(f"trainer.sharding={sharding}: the launch asks for {launched}; leave one of them out")
    return launched or ("ddp" if sharding == "auto" else sharding)


def connect_processes(sharding: Sharding) -> Accelerator:
    """Connect the processes of this launch; raise an error if they were started but cannot reach one another."""
    resolve_sharding(sharding)
    if "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        raise UserError(
            "launch: several processes are asked for but this one has no rank, as when accelerate launches on CPUs; use "
            "torchrun --nproc-per-node N -m spectrain train ..."
        )
    # Otherwise accelerate would shard the drafter itself. Autocast belongs to the trainer.
    with _hide_variables("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        accelerator = Accelerator(mixed_precision="no", cpu=not torch.cuda.is_available())
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != expected:
        raise RunError(f"launch: {expected} processes were started, {accelerator.num_processes} are connected; use torchrun")
    return accelerator


def make_strategy(
    accelerator: Accelerator, sharding: Sharding, num_copies: int = 1, autocast: torch.dtype | None = None
) -> ParallelStrategy:
    """Return the strategy. `num_copies` neighbouring processes see the same data; matrix products run in `autocast`."""
    strategy = resolve_sharding(sharding)
    # Norms in float32 take half-precision states, and torch warns that this is slower.
    if autocast is not None:
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    # A single process without a launcher.
    if strategy != "ddp" and not dist.is_initialized():
        _init_single_process(accelerator.device)
    if strategy == "fsdp2":
        return FullyShardedStrategy(accelerator, num_copies, autocast)
    return (
        ReplicatedStrategy(accelerator, num_copies, autocast)
        if strategy == "ddp"
        else ZeroStrategy(accelerator, int(strategy[-1]), num_copies, autocast)
    )


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


@contextmanager
def _hide_variables(*names: str) -> Iterator[None]:
    """Remove these environment variables, and restore them at the end."""
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)


def _init_single_process(device: torch.device) -> None:
    """Initialize a process group of one process."""
    os.environ.setdefault("LOCAL_RANK", "0")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)


class ProcessMonitor:
    """Exchanges heartbeats of all processes through a store, which a thread writes and reads.

    A process is dead if its thread sends no heartbeats. It is slow if all others have waited for it for `patience` seconds in
    the same step; a message names it once for each step.
    """

    def __init__(self, parallel: ParallelStrategy, patience: float) -> None:
        self.rank, self.num_processes, self.patience = parallel.rank, parallel.num_processes, patience
        self.step, self.status_time, self.activity = 0, time.monotonic(), "starting"
        self.stop_event = threading.Event()
        self.reported_slow: set[tuple[int, int]] = set()
        self.num_beats = 0
        # Of every process: its newest heartbeat, and when that was first read here.
        self.last_beats: dict[int, tuple[int, float]] = {}
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

    def explain_failure(self, error: RuntimeError, run: Path) -> Exception:
        """Return the error, or one that names the process which failed first."""
        text = str(error)
        if isinstance(error, (UserError, RunError)) or self.num_processes == 1:
            return error
        if not any(sign in text for sign in ("onnection", "peer", "NCCL", "gloo", "Gloo", "imed out", "imeout", "ocket")):
            return error
        message = self.find_dead_process()
        return error if message is None else RunError(f"training: {message}; go on with trainer.resume=auto run={run}")

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


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
