"""The counted round: bytes by hand for single operations, and committed rows counted again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lab.benchmarks import round_counts
from lab.benchmarks.models import MODELS, ModelGeometry
from lab.benchmarks.round_counts import (
    BATCHES,
    LAUNCH_SECONDS,
    PREFIX,
    ROUNDS,
    Traffic,
    TrafficCounter,
    attention_work,
    count_row,
)

pytest.importorskip("triton", reason="triton is not installed, so there are no kernels")
COMMITTED = Path(__file__).parents[2] / "lab" / "results" / "round-counts.json"
SMALL = ModelGeometry(3, 64, 96, 4, 2, 16, 320, 200, 2048)


def count_small(name: str, batch: int, **changes: Any) -> dict[str, Any]:
    with patch.dict(MODELS, small=replace(SMALL, **changes)):
        return count_row("small", name, batch)


def committed_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(COMMITTED.read_text())["rows"]
    return rows


def test_every_round_is_committed() -> None:
    rows = [(row["model"], row["round"], row["texts"]) for row in committed_rows()]
    assert rows == [
        (m, name, batch) for m in ("1.5b", "8b") for name in ROUNDS for batch in BATCHES
    ]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(24))
def test_committed_rows_are_counted_again(index: int) -> None:
    row = committed_rows()[index]
    assert count_row(row["model"], row["round"], row["texts"]) == row


def test_bytes_of_single_operations() -> None:
    """A product reads both operands; an embedding reads the rows that it returns; a copy reads as
    much as it writes."""
    weight = torch.empty(100, 8, dtype=torch.bfloat16, device="meta")
    with TrafficCounter() as counter:
        x = torch.nn.functional.embedding(torch.empty(3, dtype=torch.int64, device="meta"), weight)
        product = x @ weight.t()
        product.copy_(product.clone())
    assert counter.bytes_by_name["aten::embedding"] == 2 * 3 * 8 * 2 + 3 * 8
    assert counter.bytes_by_name["aten::mm"] == 2 * (3 * 8 + 100 * 8 + 3 * 100)
    assert counter.bytes_by_name["aten::copy_"] == 2 * 2 * 3 * 100
    assert counter.traffic.flops == 2 * 3 * 8 * 100
    assert counter.traffic.floor_seconds == pytest.approx(4 * LAUNCH_SECONDS)


@pytest.mark.parametrize(("batch", "num_launches"), [(1, 2), (64, 1)])
def test_attention_reads_the_prefix_once(batch: int, num_launches: int) -> None:
    """Queries, keys and values of a prefix and its nodes, the output, and the parts of split keys,
    which enough texts do not need."""
    q = torch.empty(batch, 8, 4, 16, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, 2, 4096, 16, dtype=torch.bfloat16, device="meta")
    operands = {"q": q, "k": k, "num_appended": 4, "num_keys": 4096}
    with patch.object(round_counts, "choose_splits", lambda *_: 3 if batch == 1 else 1):
        work = attention_work(operands, q)
    parts = 2 * 4 * 3 * q.numel() if batch == 1 else 0
    keys = batch * 2 * (PREFIX + 4) * 16
    assert work == Traffic(
        num_launches,
        2 * 2 * q.numel() + 2 * 2 * keys + parts,
        4 * batch * 8 * 4 * (PREFIX + 4) * 16,
    )


def test_a_layer_of_the_target_adds_eleven_nodes() -> None:
    """Four products, rotation with the append, attention in two launches and four fused ones; and
    bytes of its weights and of its keys and values."""
    rows = [count_small("autoregressive", 1, layers=layers) for layers in (3, 4)]
    assert rows[1]["num_nodes"] - rows[0]["num_nodes"] == 11
    # Queries, keys, values and output; gate, up and down.
    weights = 2 * SMALL.width * 16 * (4 + 2) + 3 * SMALL.width * SMALL.inner
    prefix = 2 * PREFIX * 2 * 16
    added = rows[1]["bytes"] - rows[0]["bytes"]
    # The parts of split keys are less than a fifth of it.
    assert 2 * (weights + prefix) < added < 2.4 * (weights + prefix)


def test_a_round_has_no_more_nodes_for_more_texts() -> None:
    """Launches do not grow with texts or nodes, and bytes do."""
    rows = {key: count_small(*key) for key in [("tree of 16", 1), ("tree of 16", 8)]}
    single, eight = rows.values()
    assert eight["num_nodes"] <= single["num_nodes"] + 4
    assert single["bytes"] < eight["bytes"] < 8 * single["bytes"]
    assert single["least_us"] < single["floor_us"]
