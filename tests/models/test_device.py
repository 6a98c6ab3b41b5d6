"""Floors: no forward is promised to be faster than reading its weights."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from spectrain.drafters.ngram import Ngram
from spectrain.models.device import (
    DeviceLimits,
    capture_graph,
    choose_work_clock,
    forward_weights,
    roofline_seconds,
)
from spectrain.models.target import Target

CPU = torch.device("cpu")


def test_shared_weights_are_read_once() -> None:
    """A tied embedding is the output layer and read once; one of its own is looked up and not
    read.
    """
    model = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)])
    assert [weight is model[1].weight for weight in forward_weights(model)] == [True]
    model[1].weight = model[0].weight
    assert [weight.numel() for weight in forward_weights(model)] == [15]


def test_roofline_is_memory_or_arithmetic(tiny: Target) -> None:
    """A few rows cost the reading of the weights, very many their arithmetic; a drafter without
    weights costs nothing.
    """
    parameters = sum(weight.numel() for weight in forward_weights(tiny.model))
    limits = DeviceLimits(1e9, 1e12)
    few, many = (roofline_seconds(tiny.model, rows, limits) for rows in (1e-9, 1e9))
    assert few == pytest.approx(4 * parameters / 1e9)
    assert many == pytest.approx(2 * parameters * 1e9 / 1e12)
    assert roofline_seconds(Ngram(tiny), 16, limits) == 0


def test_experts_are_read_where_a_row_chooses_them() -> None:
    """Of 4 experts with 2 chosen by a row, one row reads 2 and two rows read 3 on average; each
    row computes 2.
    """
    layer = nn.Module()
    layer.top_k = 2  # type: ignore[assignment]
    layer.experts = nn.Module()
    layer.experts.down_proj = nn.Parameter(torch.zeros(4, 5, 5))
    seconds = [roofline_seconds(layer, rows, DeviceLimits(4.0, 1e9)) for rows in (1, 2)]
    assert seconds == [2 * 25, 3 * 25]
    assert roofline_seconds(layer, 10, DeviceLimits(1e9, 2.0)) == 10 * 2 * 25


def test_a_failed_capture_restores_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the end of a capture raises, the former stream is current again, unlike with torch's
    own context; both errors are reported."""
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
    assert current == ["before", "capturing", "before"] and isinstance(
        failed.value.__context__, ValueError
    )


@pytest.mark.parametrize(
    ("device", "threads", "clock"),
    [("cpu", 1, "thread_time"), ("cpu", 2, "perf_counter"), ("cuda", 1, "perf_counter")],
)
def test_only_one_thread_on_a_cpu_is_timed_by_its_work(
    monkeypatch: pytest.MonkeyPatch, device: str, threads: int, clock: str
) -> None:
    """Several threads, and a GPU, are waited for, which takes no processor time."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert choose_work_clock(torch.device(device)) is getattr(time, clock)
