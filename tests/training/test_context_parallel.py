"""Processes that share texts compute the loss and the gradients of one process, for every family,
method and kind of batch.

test_processes.py has the quick proof through the trainer; this matrix is slow. Shapes: see the
modules.
"""

import json
import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.drafters.base import Drafter, Losses, TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.medusa import Medusa
from spectrain.errors import UserError
from spectrain.features.batch import Batch, collate
from spectrain.features.context_piece import ContextGroup
from spectrain.features.live_source import LiveSource
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain.servers.ports import find_free_port
from spectrain.training.parallel.context import check_context, choose_method
from tests import commands
from tests.factories import make_drafter
from tests.training import worker

BLOCKS = {"num_layers": 2, "block_size": 4, "num_anchors": 6, "mask_token_id": 0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("drafters.eagle3.Eagle3", {"ttt_steps": 3, "vocab_size": 1500}),
    "eagle3_window": (
        "drafters.eagle3.Eagle3",
        {"ttt_steps": 3, "vocab_size": 1500, "num_layers": 2, "window": 9},
    ),
    "mtp": ("drafters.mtp.Mtp", {"num_steps": 3}),
    "peagle": (
        "drafters.peagle.PEagle",
        {"num_layers": 2, "num_drafts": 3, "vocab_size": 1500, "mask_token_id": 0},
    ),
    "dflash": ("drafters.dflash.DFlash", {**BLOCKS, "slot_weights": "dpace"}),
    "dflash2": ("drafters.dflash2.DFlash2", {**BLOCKS, "vocab_size": 1500}),
    "dspark": ("drafters.dspark.DSpark", BLOCKS),
}
# Lengths of padded or packed texts; the last texts carry loss only at the end, so that some
# processes have none.
KINDS: dict[str, tuple[list[int], bool, int]] = {
    "one": ([37], False, 4),
    "padded": ([26, 21, 17], False, 4),
    "packed": ([9, 26, 13, 5], True, 3),
    "tail": ([40], False, 34),
}
REACH = 8


def make_batch(kind: str, drafter: Drafter, target: Target) -> Batch:
    lengths, packed, prompt = KINDS[kind]
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, 2000, (length,), generator=generator).tolist() for length in lengths]
    examples = [Example(row, [i >= prompt and i != 11 for i in range(len(row))]) for row in rows]
    batch = collate(examples, packed)
    return replace(batch, features=target.features(batch.tokens, drafter.layers, batch.lengths))


def compute_gradients(drafter: Drafter, losses: Losses) -> dict[str, Tensor]:
    """Return the gradient of every trained parameter; each needs one on every process, because data
    parallelism waits for it."""
    drafter.zero_grad(set_to_none=True)
    losses.total.backward()
    return {
        name: p.grad.clone()
        for name, p in drafter.named_parameters()
        if p.requires_grad and p.grad is not None
    }


def compare_gradients(family: str, kind: str, group: ContextGroup, target: Target) -> str | None:
    """Compare a shared batch with the complete one; return the difference, if there is one."""
    path, options = FAMILIES[family]
    torch.manual_seed(0)
    drafter = make_drafter(worker.get_object(f"spectrain.{path}"), target, **options)
    drafter.prepare(target, torch.arange(2048).flip(0) * (torch.arange(2048) > 0))
    batch = make_batch(kind, drafter, target)
    state = TrainingState(step=3, recompute=kind == "padded")
    full = drafter.loss(batch, target, state)
    expected = compute_gradients(drafter, full)
    part = drafter.loss(batch.split_context(group, REACH), target, state)
    shared = compute_gradients(drafter, part)
    missing: list[Any] = [None] * group.size
    dist.all_gather_object(missing, sorted(expected.keys() ^ shared.keys()))
    if any(missing):
        return f"no gradient of {missing}"
    judged = torch.stack([part.hits, part.counts])
    for tensor in (
        loss := part.total.detach().clone(),
        judged,
        *(shared[name] for name in sorted(shared)),
    ):
        dist.all_reduce(tensor)
    scale = max(float(value.abs().max()) for value in expected.values())
    error = max(float((shared[name] - expected[name]).abs().max()) / scale for name in expected)
    error = max(error, abs(float(loss / full.total.detach() - 1)))
    return (
        None
        if error < 3e-5 and torch.equal(judged, torch.stack([full.hits, full.counts]))
        else f"error {error}"
    )


def as_rank(rank: int, size: int, port: int, jobs: list[tuple[str, str, str]], model: str) -> None:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ |= variables
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    target = load_hf(model, dtype="float32")
    assert world is not None
    for family, method, kind in jobs:
        wrong = compare_gradients(family, kind, ContextGroup(world, rank, size, method), target)  # type: ignore[arg-type]
        if rank == 0:
            print(f"{family} {method} {kind}: {wrong or 'same'}", flush=True)
    dist.destroy_process_group()


def launch_processes() -> None:
    size, jobs, model = json.loads(sys.argv[1])
    port = find_free_port()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=as_rank, args=(rank, size, port, jobs, model))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "methods"), [(2, ["ulysses", "gather"]), (3, ["gather"]), (4, ["ulysses", "gather"])]
)
def test_shared_texts_have_the_same_gradients(
    shallow_folder: Path, size: int, methods: list[str]
) -> None:
    """The loss, the gradients (3e-5 of the largest) and the counts of drafts of 2, 3 and 4
    processes add up to those of one. With 4 processes the two key-value heads are repeated; 37 and
    53 columns divide by none of these numbers."""
    jobs = [(family, method, kind) for family in FAMILIES for method in methods for kind in KINDS]
    status, stdout, err = commands.start(
        [json.dumps([size, jobs, str(shallow_folder)])], program=launch_processes
    ).wait(900)
    assert status == 0, err[-4000:]
    assert stdout.splitlines() == [
        f"{family} {method} {kind}: same" for family, method, kind in jobs
    ]


def test_what_processes_cannot_share_is_refused(shallow: Target) -> None:
    """Group sizes that do not divide the processes or heads, and families that read other
    positions, are refused.
    """
    eagle = make_drafter(Eagle3, shallow, vocab_size=64)
    for size, count, drafter, message in (
        (3, 4, eagle, "4 processes cannot form groups of 3"),
        (2, 1, eagle, "1 process cannot form groups of 2; start a multiple of 2, as in torchrun"),
        (2, 2, make_drafter(Medusa, shallow, vocab_size=64), "use eagle3, peagle, mtp"),
    ):
        with pytest.raises(UserError, match=message):
            check_context(size, drafter, LiveSource(), shallow, count)
    shared = eagle.capabilities.context_parallel
    assert shared is not None and shared.num_heads == 4
    with pytest.raises(UserError, match="3 processes cannot share 4 attention heads"):
        choose_method("ulysses", 3, 4)
    assert [choose_method("auto", size, 4) for size in (2, 3, 4)] == [
        "ulysses",
        "gather",
        "ulysses",
    ]
