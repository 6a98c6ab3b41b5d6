"""Nothing in a training step waits for the device in its middle.

Target and drafter are on the device "meta", whose tensors have shapes and no values, as in
`lab.benchmarks.launches`; tokens, loss masks and indices are on the CPU. Whatever asked a tensor of
the device for a value, chose rows by its mask, or copied it to the host would have none to get and
fail.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spectrain.drafters.base import TrainingState
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.host_copies import copy_to_device, on_host, select_joined, select_rows
from spectrain.models.target import Target
from spectrain.training.parallel.base import ReplicatedStrategy
from spectrain.training.parallel.launch import STRATEGIES
from spectrain.training.run import TrainingRun
from spectrain.training.settings import AdamW
from spectrain.training.trainer import Trainer
from tests.targets import cut_tiny
from tests.training import worker
from tests.training.test_processes import FAMILIES


def make_batch(target: Target, layers: Any, packed: bool) -> Batch:
    request = BatchRequest(worker.dataset().examples, target, layers, packed)
    return LiveSource().make_batch(request)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_every_family_asks_the_device_for_nothing(family: str, packed: bool) -> None:
    """Features, losses and gradients of a batch, padded and packed, in every stage."""
    target = cut_tiny(4)
    drafter = worker.make(family, target)
    drafter.to("meta")
    target.to("meta")
    training = drafter.capabilities.target_training
    if training is not None and training.original is not None:
        training.original = copy.deepcopy(target)
    if training is not None:
        # On another device its parameters are new objects.
        target.requires_grad_(True)
    for stage in drafter.stages:
        batch = make_batch(target, stage.layers, packed)
        losses = drafter.loss(batch, target, TrainingState(1, 0.9))
        assert losses.total.is_meta and losses.hits.is_meta
        losses.total.backward()
        assert any(parameter.grad is not None for parameter in target.parameters()) or any(
            parameter.grad is not None for parameter in drafter.parameters()
        )


@pytest.mark.parametrize("question", [Tensor.item, Tensor.tolist, Tensor.cpu, bool, Tensor.nonzero])
def test_a_question_to_the_device_fails(question: Any) -> None:
    """The proof can fail: a tensor of the stand-in answers nothing."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        question(torch.zeros((), device="meta"))


def test_rows_chosen_on_the_device_fail() -> None:
    values = torch.zeros(2, 3, 4, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        values[torch.ones(2, 3, dtype=torch.bool, device="meta")]
    chosen = torch.tensor([[True, False, True], [False, True, False]])
    assert select_rows(values, copy_to_device(chosen, "meta")).shape == (3, 4)


def test_selected_rows_are_those_of_the_mask() -> None:
    """Values and gradients, of views too."""
    values = torch.randn(2, 5, 3, 4, dtype=torch.float64)[:, :, 1].requires_grad_()
    chosen = torch.rand(2, 5) < 0.5
    weight = torch.randn(int(chosen.sum()), 4, dtype=torch.float64)
    rows = select_rows(values, chosen)
    assert torch.equal(rows, values[chosen])
    gradients = [
        torch.autograd.grad((part * weight).sum(), values)[0] for part in (rows, values[chosen])
    ]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("sizes", [(3,), (2, 0, 4), (0, 0)])
def test_joined_rows_are_those_of_the_parts_in_their_order(sizes: tuple[int, ...]) -> None:
    """Values and gradients are bit by bit those of the concatenated parts, empty ones too."""
    parts = [torch.randn(size, 5, requires_grad=True) for size in sizes]
    order = torch.randperm(sum(sizes))
    weight = torch.randn(sum(sizes), 5)
    expected, joined = torch.cat(parts).index_select(0, order), select_joined(parts, order)
    assert torch.equal(joined, expected)
    gradients = [torch.autograd.grad((rows * weight).sum(), parts) for rows in (joined, expected)]
    assert all(torch.equal(*pair) for pair in zip(*gradients))
    on_device = [torch.zeros(size, 5, device="meta") for size in sizes]
    assert select_joined(on_device, copy_to_device(order, "meta")).shape == (sum(sizes), 5)


def test_a_copy_is_remembered_as_long_as_it_lives() -> None:
    host = torch.arange(3)
    copy = copy_to_device(host, "meta")
    assert on_host(copy) is host and on_host(host) is host
    with pytest.raises((RuntimeError, NotImplementedError)):
        on_host(copy + 1)


class LateStrategy(ReplicatedStrategy):
    """A CPU that is treated as a GPU: the optimizer leaves steps out by itself."""

    steps_without_host = True


def train(
    folder: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any, spoiled: tuple[int, ...]
) -> tuple[dict[str, Tensor], list[str]]:
    """Train for six steps, of which some have a gradient that is not finite; return the weights
    and the lines of metrics."""
    target = cut_tiny(4)
    drafter = worker.make("eagle3", target)
    monkeypatch.setitem(STRATEGIES, "ddp", strategy)
    add_gradients = TrainingRun._add_gradients

    def spoil(run: TrainingRun, *arguments: Any) -> Any:
        result = add_gradients(run, *arguments)
        if run.step + 1 in spoiled:
            run.drafter.fc.weight.grad[0, 0] = float("nan")
        return result

    monkeypatch.setattr(TrainingRun, "_add_gradients", spoil)
    Trainer(max_steps=6, batch_tokens=48, save_every=4, log_every=3, lr=1e-3).fit(
        drafter, target, worker.dataset(), LiveSource(), folder
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return drafter.state_dict(), lines


def without_times(lines: list[str]) -> list[dict[str, Any]]:
    names = ("step", "loss", "agreement", "lr", "skipped", "tokens")
    return [{name: json.loads(line)[name] for name in names} for line in lines]


def test_a_step_that_is_read_late_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose numbers are read after the next one has started, two of which are left out by
    the optimizer itself, give the same weights and metrics as steps that the host leaves out."""
    spoiled = (2, 5)
    weights, lines = train(tmp_path / "read", monkeypatch, ReplicatedStrategy, spoiled)
    monkeypatch.undo()
    late_weights, late_lines = train(tmp_path / "late", monkeypatch, LateStrategy, spoiled)
    assert all(torch.equal(late_weights[name], weight) for name, weight in weights.items())
    assert without_times(late_lines) == without_times(lines)
    assert without_times(lines)[-1]["skipped"] == len(spoiled)


def test_adamw_is_fused_where_a_device_computes_it() -> None:
    """On a GPU too, in whose place a device without values stands."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamW().make_optimizer([{"params": [parameter]}], 1e-3, (0.9, 0.95), 0.0)
    assert optimizer.defaults["fused"]
