"""Which way a launch shares the drafter, and the processes that accelerate or torchrun has started.

What a launch file asks for is read from where accelerate leaves it, and is done here with torch's `fully_shard` or
`deepspeed.initialize` on any device: accelerate itself does neither without a GPU, and training that is not shared as was asked
would go unnoticed.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator

from spectrain.errors import RunError, UserError

from .base import ParallelStrategy
from .ddp import ReplicatedStrategy
from .deepspeed import ZeroStrategy
from .fsdp2 import FullyShardedStrategy

Sharding = Literal["auto", "ddp", "fsdp2", "zero2", "zero3"]
# What an accelerate file may say of these; anything else would not be done.
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
            raise UserError(f"launch: {variable}={setting} would not be followed; use {instead}")
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
    """The processes of this launch; stops where they were started but cannot find one another."""
    resolve_sharding(sharding)
    if "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        raise UserError(
            "launch: several processes are asked for but this one has no rank, as when accelerate launches on CPUs; use "
            "torchrun --nproc-per-node N -m spectrain train ..."
        )
    with _hide_variables("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):  # or accelerate would set out to do it itself
        accelerator = Accelerator(mixed_precision="no", cpu=not torch.cuda.is_available())  # autocast is the trainer's
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != expected:
        raise RunError(f"launch: {expected} processes were started, {accelerator.num_processes} are connected; use torchrun")
    return accelerator


def make_strategy(
    accelerator: Accelerator, sharding: Sharding, num_copies: int = 1, autocast: torch.dtype | None = None
) -> ParallelStrategy:
    """The way to share that was asked for; `copies` neighbouring processes see the same data; products are in `autocast`."""
    way = resolve_sharding(sharding)
    if autocast is not None:  # norms in float32 take half-precision states, of which torch warns that it is slower
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    if way != "ddp" and not dist.is_initialized():  # a single process that was started by hand
        _init_single_process(accelerator.device)
    if way == "fsdp2":
        return FullyShardedStrategy(accelerator, num_copies, autocast)
    return (
        ReplicatedStrategy(accelerator, num_copies, autocast)
        if way == "ddp"
        else ZeroStrategy(accelerator, int(way[-1]), num_copies, autocast)
    )


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


@contextmanager
def _hide_variables(*names: str) -> Iterator[None]:
    """Hide these environment variables for a while."""
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
