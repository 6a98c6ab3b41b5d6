"""Trains a drafter as one rank of many, without the others, and records what it would exchange.

torch's fake process group exchanges nothing. Here every rank receives copies of what it sends
itself, so that a training runs to its end on values that are finite. Not a test itself.
"""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.features.live_source import LiveSource
from spectrain.models import check
from spectrain.models.target import Target
from spectrain.training import run as training_run
from spectrain.training.parallel.launch import STRATEGIES
from spectrain.training.parallel.monitor import ProcessMonitor
from spectrain.training.trainer import Trainer
from tests.training import worker
from tests.training.test_placement import run_elsewhere

NUM_RANKS = 8
# Texts that do not divide by the ranks of a step.
NUM_TEXTS = 61
# One of a collective's name, and the type and size of each tensor.
Collective = list[Any]
NAMESPACES = ("c10d", "_c10d_functional")


class CollectiveRecorder(TorchDispatchMode):
    """Records collectives, and lets a rank receive copies of its own tensors from the others."""

    def __init__(self) -> None:
        super().__init__()
        # There is none while a target is loaded.
        self.drafter: nn.Module | None = None
        self.collectives: list[Collective] = []
        # Of exchanges between ranks that share a text: the type and size of a row, and the rows
        # that arrive from each rank and that go to each.
        self.exchanges: list[list[Any]] = []
        # The largest number of bytes of weights that were gathered at one time.
        self.gathered_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        namespace, _, operation = name.partition("::")
        if namespace not in NAMESPACES or operation in ("wait_tensor", "barrier"):
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # The sizes of pickled objects, such as host names, may differ.
        sizes = [
            [str(tensor.dtype), None if tensor.dtype == torch.uint8 else list(tensor.shape)]
            for tensor in tensors
        ]
        self.collectives.append([operation, sizes])
        if operation == "all_to_all_single":
            _, received, given, _ = args
            row = [str(args[0].dtype), *args[0].shape[1:]]
            self.exchanges.append([row, [*received], [*given]])
        self._receive_copies(operation, tensors, result)
        if self.drafter is not None:
            self.gathered_bytes = max(self.gathered_bytes, count_gathered_bytes(self.drafter))
        return result

    def _receive_copies(self, operation: str, tensors: list[Tensor], result: Any) -> None:
        if operation == "_allgather_base_":
            output, own = tensors
            output.view(-1, own.numel()).copy_(own.reshape(1, -1).clone())
        elif operation == "all_gather_into_tensor":
            result.view(-1, tensors[0].numel()).copy_(tensors[0].reshape(1, -1))
        elif operation == "_reduce_scatter_base_":
            output, own = tensors
            output.copy_(own.view(-1, output.numel())[dist.get_rank()].view_as(output))
        elif operation == "all_to_all_single":
            # Pieces of a text may differ in size, so what arrives may be larger than what is sent.
            own = tensors[0].reshape(-1)
            result.view(-1).copy_(own.repeat(-(-result.numel() // own.numel()))[: result.numel()])
        elif operation == "broadcast_" and self.drafter is None and dist.get_rank():
            # A rank that reads no weights receives some that are finite.
            for tensor in tensors:
                tensor.copy_(torch.arange(tensor.numel()).sin().view_as(tensor) / 10)
        elif operation == "allgather_":
            *outputs, own = tensors
            for output in outputs:
                output.copy_(own)


def count_gathered_bytes(drafter: nn.Module) -> int:
    """Return the bytes of the weights that are gathered now, beside the shards of this rank."""
    groups = [
        group
        for module in drafter.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups  # type: ignore[attr-defined]
    ]
    return sum(
        parameter._unsharded_param.untyped_storage().size()
        for group in groups
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    )


class RecordedDataParallel(nn.parallel.DistributedDataParallel):
    """DDP whose sums of gradients return at once; torch's own hook wants a result that a fake
    process group does not give."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, sum_gradients)


def sum_gradients(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Exchange a bucket of gradients as DDP does without a hook."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@contextmanager
def act_as_rank(rank: int) -> Iterator[None]:
    """Let this process be a rank of `NUM_RANKS` for accelerate and torch."""
    init_process_group = dist.init_process_group
    monitor: Any = training_run.ProcessMonitor
    data_parallel = nn.parallel.DistributedDataParallel

    def init_fake(*_: Any, **__: Any) -> None:
        init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)

    def monitor_nothing(parallel: Any, patience: float) -> ProcessMonitor:
        # Nobody answers its heartbeats.
        return ProcessMonitor(SimpleNamespace(rank=rank, num_processes=1), patience)  # type: ignore[arg-type]

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group = init_fake
    nn.parallel.DistributedDataParallel = RecordedDataParallel  # type: ignore[misc]
    training_run.ProcessMonitor = monitor_nothing  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        dist.init_process_group = init_process_group
        training_run.ProcessMonitor = monitor
        nn.parallel.DistributedDataParallel = data_parallel  # type: ignore[misc]
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()


def make_dataset(held_out: int = 0) -> Dataset:
    """Texts of unequal lengths, some so short that a drafter unrolls fewer draft steps, as many as
    do not divide by the batches of a step."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 24, (NUM_TEXTS,), generator=generator).tolist()
    rows = [torch.randint(3, 2000, (size,), generator=generator).tolist() for size in lengths]
    examples = []
    for number, row in enumerate(rows):
        # Every fifth text carries loss at its last token only, which few draft steps reach.
        start = len(row) - 1 if number % 5 == 0 else min(3, len(row) - 1)
        examples.append(Example(row, [index >= start for index in range(len(row))]))
    return Dataset(examples, len(examples), 0, 0, held_out=examples[:held_out])


def record_training(job: dict[str, Any], rank: int, sent: list[list[Any]]) -> dict[str, Any]:
    """Train as one rank; return its collectives, its steps and the most bytes that it gathered.
    `sent` holds what rank 0 sends while a target is loaded.
    """
    sharding = job.get("target", "none")
    steps: list[int] = []
    options = {"lr": 1e-3, "warmup": 0.0, "log_every": 1, **job["options"]}
    elsewhere = make_elsewhere(options["sharding"]) if job.get("elsewhere") else nullcontext()
    with act_as_rank(rank), elsewhere, CollectiveRecorder() as recorder:
        if sharding == "none":
            target = worker.target_of(job["model"], sharding)
        else:
            target = load_shared_target(job["model"], sharding, sent)
        drafter = worker.make(job["family"], target)
        recorder.drafter = drafter
        Trainer(**options).fit(
            drafter,
            target,
            make_dataset(job.get("held_out", 0)),
            LiveSource(),
            Path(job["out"]) / f"rank{rank}",
            on_step=steps.append,
        )
    return {
        "collectives": recorder.collectives,
        "exchanges": recorder.exchanges,
        "gathered": recorder.gathered_bytes,
        "steps": steps,
        "devices": sorted({tensor.device.type for tensor in drafter.state_dict().values()}),
    }


def load_shared_target(model: str, sharding: str, sent: list[list[Any]]) -> Target:
    """Load a target that all ranks share. Rank 0, which comes first, adds the objects that it sends
    to a list, and every other rank receives them from there.
    """
    unread = iter(sent)

    def broadcast_objects(objects: list[Any], **_: Any) -> None:
        if dist.get_rank() == 0:
            sent.append(copy.deepcopy(objects))
        else:
            objects[:] = copy.deepcopy(next(unread))

    dist.init_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast_object_list", broadcast_objects)
        # Nobody sends the parts of the logits that other ranks compute.
        patch.setattr(check, "check_varied", lambda target, logits: None)
        return worker.target_of(model, sharding)


@contextmanager
def make_elsewhere(sharding: str) -> Iterator[None]:
    """Let a strategy compute losses and gradients, and exchange numbers, while nothing may be made
    on the default device."""
    strategy = STRATEGIES[sharding]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("loss", "backward", "all_reduce"):
            run_elsewhere(patch, strategy, name)
        yield


def record_jobs() -> None:
    """Record every job of the first argument for each of its ranks, and write what they did."""
    torch.set_num_threads(1)
    for job in json.loads(sys.argv[1]):
        records = record_ranks(job)
        (Path(job["out"]) / "records.json").write_text(json.dumps(records))


def receive_own_lists() -> None:
    """Let DeepSpeed receive from rank 0 the list that this rank has: it checks that all have the
    same parameters, by a broadcast into a list that is not filled, which nobody answers here."""
    from deepspeed.runtime.zero import utils

    utils.get_lst_from_rank0 = lambda own: own
    utils.assert_lst_len_same_as_other_ranks = lambda own: None


def record_ranks(job: dict[str, Any]) -> dict[Any, Any]:
    """Return what every rank of a job did. DeepSpeed holds the groups of its process, so with ZeRO
    each rank has a process of its own."""
    is_zero = job["options"].get("sharding", "").startswith("zero")
    if is_zero:
        receive_own_lists()
    if not is_zero or len(job["ranks"]) == 1:
        sent: list[list[Any]] = []
        return {rank: record_training(job, rank, sent) for rank in job["ranks"]}
    records: dict[Any, Any] = {}
    for rank in job["ranks"]:
        folder = Path(job["out"]) / f"process{rank}"
        folder.mkdir()
        alone = json.dumps([{**job, "ranks": [rank], "out": str(folder)}])
        command = [sys.executable, "-W", "ignore", "-m", "tests.training.recorded", alone]
        subprocess.run(command, check=True)
        records |= json.loads((folder / "records.json").read_text())
    return records


if __name__ == "__main__":
    record_jobs()
