"""The collectives of a training, recorded for single ranks of eight: all ranks exchange the same in
the same order, although their batches differ, or a real cluster would hang or exchange rubbish.

It covers uneven last batches, accumulation, checkpoints and validation, and what FSDP2 gathers: one
block after another, in the type of autocast.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.loading import load_hf
from spectrain.models.sharding import _check_heads
from spectrain.training.parallel.fsdp2 import find_blocks
from tests import commands
from tests.training import recorded, worker
from tests.training.test_processes import FAMILIES

UNEVEN = {"batch_tokens": 32, "max_steps": None, "epochs": 1.0, "save_every": 1}
# Three batches for each rank in a step, of which the last step lacks some.
ACCUMULATED = {**UNEVEN, "accumulate": 3}
# The exchange of heads between ranks that share a text, and torch's mark of its gradients.
HEAD_EXCHANGE = ("all_to_all_single", "_wrap_tensor_autograd")


@dataclass
class Records:
    """What the ranks of one training did."""

    by_rank: dict[str, dict[str, Any]]

    @property
    def first(self) -> dict[str, Any]:
        return next(iter(self.by_rank.values()))

    def select(self, operation: str) -> list[list[Any]]:
        """Return the type and the size of the first tensor of every collective of a name."""
        return [sizes[0] for name, sizes in self.first["collectives"] if name == operation]

    def assert_equal(self, family: str = "") -> None:
        """Check that every rank of a family's training ran the same steps and exchanged the
        same.
        """
        assert self.first["steps"] and len(self.by_rank) > 1
        for rank, record in self.by_rank.items():
            assert record["steps"] == self.first["steps"], (family, rank)
            pairs = zip(record["collectives"], self.first["collectives"], strict=True)
            for index, (own, other) in enumerate(pairs):
                assert own == other, (family, rank, index)


def record(jobs: list[dict[str, Any]]) -> list[Records]:
    """Record jobs in a process of their own, which may change what torch and accelerate hold."""
    for job in jobs:
        Path(job["out"]).mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [json.dumps(jobs)]
    status, _, stderr = commands.start(arguments, environment, program=recorded.record_jobs).wait(
        3000
    )
    assert status == 0, stderr[-4000:]
    return [Records(json.loads((Path(job["out"]) / "records.json").read_text())) for job in jobs]


def make_job(
    folder: Path, model: Path, family: str, ranks: list[int], options: dict[str, Any], **more: Any
) -> dict[str, Any]:
    number = len(list(folder.iterdir())) if folder.exists() else 0
    name = f"{family}-{number}-{abs(hash(json.dumps(options, sort_keys=True)))}"
    return {
        "family": family,
        "model": str(model),
        "out": str(folder / name),
        "ranks": ranks,
        "options": options,
        **more,
    }


def assert_exchanges_match(ranks: list[list[Any]]) -> None:
    """Check that each rank of a group receives from every other one as many rows as that one sends,
    of the same type and size, in every exchange.
    """
    for own_exchanges in zip(*ranks, strict=True):
        rows, received, given = zip(*own_exchanges)
        assert all(row == rows[0] for row in rows)
        assert [*zip(*received)] == [tuple(counts) for counts in given]


def count_bytes(drafter: Drafter) -> tuple[int, list[int]]:
    """Return the bytes of all weights in float32, and of every block."""
    sizes = [4 * sum(p.numel() for p in block.parameters()) for block in find_blocks(drafter)]
    return 4 * sum(parameter.numel() for parameter in drafter.parameters()), sizes


@pytest.fixture(scope="module")
def quick_records(shallow_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Records]:
    """Record EAGLE-3 and DFlash for two ranks; on bfloat16 one rank and step are enough."""
    folder = tmp_path_factory.mktemp("collectives")
    fsdp2 = {**UNEVEN, "sharding": "fsdp2"}
    return record(
        [
            make_job(folder, shallow_folder, "eagle3", [0, 7], {**ACCUMULATED, **fsdp2}),
            make_job(folder, shallow_folder, "dflash", [0, 7], fsdp2),
            make_job(
                folder,
                shallow_folder,
                "eagle3",
                [0],
                {
                    "batch_tokens": 32,
                    "max_steps": 1,
                    "sharding": "fsdp2",
                    "mixed_precision": "bf16",
                },
            ),
        ]
    )


def test_ranks_exchange_the_same(quick_records: list[Records]) -> None:
    """A rank with full batches and one that lacks some in the last step exchange the same."""
    for records in quick_records[:2]:
        records.assert_equal()


def test_draft_steps_share_what_is_gathered(
    quick_records: list[Records], shallow_folder: Path
) -> None:
    """EAGLE-3 gathers its layers once for all draft steps of a batch, fc and the output layer for
    the forward and the backward pass, and sums gradients once a step."""
    records = quick_records[0]
    drafter = worker.make("eagle3", load_hf(str(shallow_folder)))
    total, blocks = count_bytes(drafter)
    # The projection of features and the output layer.
    assert len(blocks) == 2
    steps = len(records.first["steps"])
    # A rank that lacks batches runs its last one again, with a weight of 0.
    batches = ACCUMULATED["accumulate"] * steps
    assert len(records.select("_allgather_base_")) == (1 + 2 * len(blocks)) * batches
    assert len(records.select("_reduce_scatter_base_")) == (len(blocks) + 1) * steps
    assert records.first["gathered"] <= total


def test_a_layer_is_gathered_while_it_runs(
    quick_records: list[Records], shallow_folder: Path
) -> None:
    """DFlash holds two blocks at one time, the one that runs and the next one, beside what is
    none; a block is gathered for the forward and for the backward pass."""
    records = quick_records[1]
    drafter = worker.make("dflash", load_hf(str(shallow_folder)))
    total, blocks = count_bytes(drafter)
    rest = total - sum(blocks)
    assert len(blocks) == 1 + len(drafter.blocks)  # type: ignore[arg-type]
    assert records.first["gathered"] <= rest + 2 * max(blocks)
    assert rest + 2 * max(blocks) < total
    steps = len(records.first["steps"])
    assert len(records.select("_allgather_base_")) == (1 + 2 * len(blocks)) * steps


def test_weights_are_gathered_in_half_precision(quick_records: list[Records]) -> None:
    """With autocast weights travel in bfloat16, and gradients are summed in float32."""
    records = quick_records[2]
    assert {dtype for dtype, _ in records.select("_allgather_base_")} == {"torch.bfloat16"}
    assert {dtype for dtype, _ in records.select("_reduce_scatter_base_")} == {"torch.float32"}


def test_an_exchange_of_other_sizes_fails() -> None:
    """A rank that waits for more than the other one sends, or for another type."""
    row = ["torch.float32", 4]
    exchange = [[[row, [2, 3], [2, 1]]], [[row, [1, 5], [3, 5]]]]
    assert_exchanges_match(exchange)
    for other in ([row, [2, 5], [3, 5]], [["torch.bfloat16", 4], [1, 5], [3, 5]]):
        with pytest.raises(AssertionError):
            assert_exchanges_match([exchange[0], [other]])


def test_a_difference_between_ranks_fails() -> None:
    """The comparison sees another order, size, type and number of collectives."""
    own = [["allreduce_", [["torch.float32", [2]]]], ["broadcast_", [["torch.float32", [3]]]]]
    for other in (own[::-1], own[:1], [own[0], ["broadcast_", [["torch.bfloat16", [3]]]]]):
        records = Records(
            {
                "0": {"steps": [1], "collectives": own},
                "7": {"steps": [1], "collectives": other},
            }
        )
        with pytest.raises((AssertionError, ValueError)):
            records.assert_equal()


@pytest.mark.slow
def test_every_rank_of_eight_exchanges_the_same(shallow_folder: Path, tmp_path: Path) -> None:
    """All eight ranks with DDP and FSDP2, checkpoints included; two of them also validate."""
    ranks = list(range(recorded.NUM_RANKS))
    jobs = [
        make_job(tmp_path, shallow_folder, family, ranks, {**ACCUMULATED, "sharding": sharding})
        for sharding in ("ddp", "fsdp2")
        for family in ("eagle3", "causal")
    ]
    for sharding in ("ddp", "fsdp2"):
        validated = {**ACCUMULATED, "sharding": sharding, "save_every": 2}
        jobs.append(make_job(tmp_path, shallow_folder, "eagle3", [0, 7], validated, held_out=1))
    for records in record(jobs):
        records.assert_equal()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2", "zero2", "zero3"])
def test_a_rank_makes_tensors_where_its_model_is(
    shallow_folder: Path, tmp_path: Path, sharding: str
) -> None:
    """A rank of eight that lacks batches in the last step makes nothing on the default device, in
    losses, gradients, exchanged numbers and gathered weights, and every buffer stays in place."""
    if sharding.startswith("zero"):
        pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    options = {**ACCUMULATED, "sharding": sharding}
    jobs = [
        make_job(tmp_path, shallow_folder, family, [7], options, elsewhere=True)
        for family in ("eagle3", "dflash")
    ]
    for records in [record([job])[0] for job in jobs]:
        assert len(records.first["steps"]) > 1
        assert records.first["devices"] == ["cpu"]
        names = [name for name, _ in records.first["collectives"]]
        assert any("reduce" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_ranks_of_zero_exchange_the_same(
    shallow_folder: Path, tmp_path: Path, sharding: str
) -> None:
    """DeepSpeed's ranks, one with full batches and one that lacks some in the last step, sum
    gradients and gather weights in the same order and sizes, checkpoints included."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    options = {**ACCUMULATED, "sharding": sharding}
    (records,) = record([make_job(tmp_path, shallow_folder, "eagle3", [0, 7], options)])
    records.assert_equal()
    names = {name for name, _ in records.first["collectives"]}
    # Gradients are sums of all ranks in both; with ZeRO-3 weights are gathered too.
    assert any(name.startswith(("reduce_", "allreduce_", "_reduce_scatter")) for name in names)
    assert any("allgather" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_ranks_that_share_texts_exchange_the_same(
    shallow_folder: Path, tmp_path: Path, sharding: str
) -> None:
    """Of four groups of two ranks, both ranks of a group exchange heads in the same order, each
    receives what the other one sends, and all ranks gather weights and sum gradients in the same
    order and sizes."""
    options = {**ACCUMULATED, "sharding": sharding, "context_parallel": 2}
    job = make_job(tmp_path, shallow_folder, "eagle3", [0, 1, 6, 7], options)
    by_rank = record([job])[0].by_rank
    names = {rank: [name for name, _ in own["collectives"]] for rank, own in by_rank.items()}
    assert names["0"] == names["1"] and names["6"] == names["7"]
    assert names["0"].count("all_to_all_single") > len(by_rank["0"]["steps"])
    for pair in (("0", "1"), ("6", "7")):
        assert_exchanges_match([by_rank[rank]["exchanges"] for rank in pair])
    for own in by_rank.values():
        # Groups have texts of other lengths, so only they know the sizes of their exchange.
        own["collectives"] = [call for call in own["collectives"] if call[0] not in HEAD_EXCHANGE]
    Records(by_rank).assert_equal()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["fsdp2", "tensor"])
def test_ranks_that_share_a_target_exchange_the_same(
    shallow_folder: Path, tmp_path: Path, target: str
) -> None:
    """Rank 0, which reads the weights, and one that lacks batches in the last step load a target
    that all share, and run its layers in the same order and sizes, checkpoints included."""
    target_folder = shallow_folder
    if target == "tensor":
        # Heads of which each rank has one.
        target_folder = tmp_path / "heads"
        shutil.copytree(shallow_folder, target_folder)
        config = AutoConfig.from_pretrained(shallow_folder)
        config.num_attention_heads = config.num_key_value_heads = recorded.NUM_RANKS
        AutoModelForCausalLM.from_config(config).save_pretrained(target_folder)
    options = {**UNEVEN, "batch_tokens": 64, "sharding": "ddp", "save_every": 2}
    # Every token of a validation would be sums of all layers.
    held_out = int(target == "fsdp2")
    job = make_job(
        tmp_path, target_folder, "eagle3", [0, 7], options, target=target, held_out=held_out
    )
    (records,) = record([job])
    records.assert_equal()
    # Each of three layers is gathered once in a forward, or summed after attention and MLP.
    operation, calls = {"fsdp2": ("_allgather_base_", 3), "tensor": ("allreduce_", 6)}[target]
    count = len(records.select(operation))
    assert count >= calls * len(records.first["steps"])


def test_a_head_is_not_cut() -> None:
    """Two processes share two key-value heads, and eight cannot."""
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2)
    _check_heads(config, 2)
    with pytest.raises(UserError, match="8 processes cannot share the model's 2 key-value heads"):
        _check_heads(config, recorded.NUM_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_every_family_exchanges_the_same(
    shallow_folder: Path, tmp_path: Path, recompute: bool
) -> None:
    """Every family that FSDP2 shards, for a full and a lacking rank, with and without gradient
    checkpointing."""
    torch.manual_seed(0)
    families = [
        family
        for family in FAMILIES
        if family != "early_exit" and not (recompute and adapts_target(family, shallow_folder))
    ]
    options = {**UNEVEN, "sharding": "fsdp2", "gradient_checkpointing": recompute}
    jobs = [make_job(tmp_path, shallow_folder, family, [0, 7], options) for family in families]
    for family, records in zip(families, record(jobs)):
        records.assert_equal(family)


def adapts_target(family: str, folder: Path) -> bool:
    """Tell whether a family adds to the target's layers, which cannot be run again."""
    # A target of its own, because such a family changes it.
    drafter: Drafter = worker.make(family, load_hf(str(folder)))
    return drafter.capabilities.adapts_layers
