"""Floors: no forward is promised to be faster than reading its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from spectrain.drafters.ngram import Ngram
from spectrain.models.device import capture_graph, forward_weights, measure_bandwidth, measure_flops, roofline_seconds
from spectrain.models.target import Target

CPU = torch.device("cpu")


def test_shared_weights_are_read_once() -> None:
    """A tied embedding is the output layer and read once; one of its own is looked up and not read."""
    model = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)])
    assert [weight is model[1].weight for weight in forward_weights(model)] == [True]
    model[1].weight = model[0].weight
    assert [weight.numel() for weight in forward_weights(model)] == [15]


def test_roofline_is_memory_or_arithmetic(tiny: Target) -> None:
    """A few rows cost the reading of the weights, very many their arithmetic; a drafter without weights costs nothing."""
    parameters = sum(weight.numel() for weight in forward_weights(tiny.model))
    few, many = (roofline_seconds(tiny.model, rows, CPU, torch.float32) for rows in (1e-9, 1e9))
    assert few == 4 * parameters / measure_bandwidth(CPU)
    assert many == 2 * parameters * 1e9 / measure_flops(CPU, torch.float32)
    assert roofline_seconds(Ngram(tiny), 16, CPU, torch.float32) == 0


def test_a_failed_capture_restores_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own context does not: where its end raises, its stream stays the current one. Both errors are told."""
    current = ["before"]

    @contextmanager
    def graph(recorded: Any, pool: Any) -> Iterator[None]:
        current.append("capturing")
        try:
            yield
        finally:
            raise RuntimeError("capture_end")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    with pytest.raises(RuntimeError, match="capture_end") as failed, capture_graph(None):
        raise ValueError("not permitted while capturing")
    assert current == ["before", "capturing", "before"] and isinstance(failed.value.__context__, ValueError)
