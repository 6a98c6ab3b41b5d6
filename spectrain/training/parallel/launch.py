"""The processes that accelerate or torchrun has started: how they connect and share the drafter.

What a launch file asks for is read from where accelerate leaves it, and is done here with torch's
`fully_shard` or `deepspeed.initialize` on any device: accelerate itself does neither without a GPU,
and training that is not shared as was asked would go unnoticed.
"""

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list

from spectrain.errors import RunError, UserError, first_line
from spectrain.features.context_piece import ContextGroup
from spectrain.output.streams import print_warning

from .base import ParallelStrategy, ReplicatedStrategy
from .deepspeed import Zero2Strategy, Zero3Strategy
from .fsdp2 import FullyShardedStrategy

Decision = TypeVar("Decision")
Sharding = Literal["auto", "ddp", "fsdp2", "zero2", "zero3"]
STRATEGIES: dict[Sharding, type[ParallelStrategy]] = {
    "ddp": ReplicatedStrategy,
    "fsdp2": FullyShardedStrategy,
    "zero2": Zero2Strategy,
    "zero3": Zero3Strategy,
}
# The supported values of variables that an accelerate file sets, and what a message suggests
# instead of others.
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
    """Return the sharding that launcher and `trainer.sharding` request; raise a UserError for a
    conflict.
    """
    for variable, (allowed, instead) in SUPPORTED_VALUES.items():
        if (setting := os.environ.get(variable)) is not None and setting.lower() not in [
            value.lower() for value in allowed
        ]:
            raise UserError(f"launch: {variable}={setting} is not supported; use {instead}")
    launched: Sharding | None = None
    if _is_set("ACCELERATE_USE_FSDP"):
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise UserError(
                "launch: the accelerate file asks for FSDP 1; write fsdp_version: 2 below "
                "fsdp_config"
            )
        launched = "fsdp2"
    elif _is_set("ACCELERATE_USE_DEEPSPEED"):
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
        if stage not in ("2", "3"):
            raise UserError(
                f"launch: the accelerate file asks for ZeRO stage {stage or 'none'}; write "
                "zero_stage: 2 or 3"
            )
        launched = "zero2" if stage == "2" else "zero3"
    if launched is not None and sharding not in ("auto", launched):
        raise UserError(
            f"trainer.sharding={sharding}: the launch asks for {launched}; leave one of them out"
        )
    return launched or ("ddp" if sharding == "auto" else sharding)


def connect_processes(sharding: Sharding, timeout: float = 30.0) -> Accelerator:
    """Connect the processes of this launch; raise an error if they were started but cannot reach
    one another.

    Where one of them waits for another for more than `timeout` minutes, while data and models load,
    it gives up.
    """
    resolve_sharding(sharding)
    if "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        raise UserError(
            "launch: several processes are asked for but this one has no rank, as when accelerate "
            "launches on CPUs; use torchrun --nproc-per-node N -m spectrain train ..."
        )
    # Otherwise accelerate would shard the drafter itself. Autocast belongs to the trainer.
    with _hide_variables("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        limit = InitProcessGroupKwargs(timeout=timedelta(minutes=timeout))
        try:
            accelerator = Accelerator(
                mixed_precision="no", cpu=not torch.cuda.is_available(), kwargs_handlers=[limit]
            )
        except RuntimeError as error:
            raise RunError(explain_no_connection(error)) from error
    warn_of_shared_store()
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != expected:
        raise RunError(
            f"launch: {expected} processes were started, {accelerator.num_processes} are "
            "connected; use torchrun"
        )
    return accelerator


def wait_for_loading(accelerator: Accelerator, run: Path) -> None:
    """Wait until all processes have loaded data and models; raise a RunError if one of them has
    gone.
    """
    try:
        accelerator.wait_for_everyone()
    except RuntimeError as error:
        raise RunError(
            "launch: another process stopped while data and models were loaded "
            f"({first_line(error)[:200]}); its own message says why; then use the same command "
            f"with trainer.resume=auto run={run}"
        ) from error


def decide_once(accelerator: Accelerator, decide: Callable[[], Decision]) -> Decision:
    """Return what `decide` returns on the main process, which alone calls it; a UserError that it
    raises there is raised on every process, so that all of a launch end alike.
    """
    outcome: list[Decision | UserError | None] = [None]
    if accelerator.is_main_process:
        try:
            outcome[0] = decide()
        except UserError as error:
            outcome[0] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    decision = outcome[0]
    if isinstance(decision, UserError):
        raise decision
    assert decision is not None
    return decision


def disconnect_processes() -> None:
    """End the connections of several processes, so that none is in use while the interpreter
    ends.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and dist.is_initialized():
        dist.destroy_process_group()


def explain_no_connection(error: RuntimeError) -> str:
    """Describe in a sentence that the processes of this launch did not connect, and what to
    check.
    """
    world, rank = (os.environ.get(name, "?") for name in ("WORLD_SIZE", "RANK"))
    address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    return (
        f"launch: rank {rank} of {world} on {socket.gethostname()} did not connect to the others, "
        f"which meet at {address} ({first_line(error)[:200]}); check that all of them were "
        "started and that each machine resolves and reaches the addresses of the others "
        "(GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name a network interface)"
    )


def warn_of_shared_store() -> None:
    """Warn where torchrun would connect restarted workers by the addresses of those before them,
    which torch does not clear.
    """
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    has_restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    has_machines = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    if is_shared and has_restarts and has_machines and os.environ.get("RANK") == "0":
        print_warning(
            "launch: a restart on several machines can fail to connect; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun or accelerate"
        )


def make_strategy(
    accelerator: Accelerator,
    sharding: Sharding,
    num_copies: int = 1,
    autocast: torch.dtype | None = None,
    context: ContextGroup | None = None,
) -> ParallelStrategy:
    """Return the strategy. `num_copies` neighbouring processes see the same data, and those of
    `context` share its columns; matrix products run in `autocast`."""
    strategy = resolve_sharding(sharding)
    # Norms in float32 take half-precision states, and torch warns that this is slower.
    if autocast is not None:
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    # A single process without a launcher.
    if strategy != "ddp" and not dist.is_initialized():
        _init_single_process(accelerator.device)
    return STRATEGIES[strategy](accelerator, num_copies, autocast, context)


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


@contextmanager
def restore_variables(*names: str) -> Iterator[None]:
    """Give these environment variables back their values at the end, and unset those that had
    none.
    """
    saved = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _hide_variables(*names: str) -> Iterator[None]:
    """Remove these environment variables, and restore them at the end."""
    with restore_variables(*names):
        for name in names:
            os.environ.pop(name, None)
        yield


def _init_single_process(device: torch.device) -> None:
    """Initialize a process group of one process. DeepSpeed reads the variable while it trains; the
    trainer unsets it, because accelerate takes a process that has it for one of several.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
    )
