"""The choices of `optimizer=`: each parameter is updated as by torch's own optimiser, and
resuming changes nothing.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from spectrain.data.dataset import Dataset
from spectrain.errors import UserError
from spectrain.training.checkpoints import flatten_optimizer, unflatten_optimizer
from spectrain.training.checks import check_family, check_validations
from spectrain.training.settings import Constant, Muon, Schedule, Wsd
from spectrain.training.trainer import Trainer


def make_network() -> nn.Sequential:
    """Make two matrices, a norm, and a head whose rows outnumber its columns ten to one."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6, bias=False), nn.Linear(6, 60, bias=False)
    )


def run_steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 6)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


def make_muon(model: nn.Module) -> torch.optim.Optimizer:
    return Trainer(lr=0.01, weight_decay=0.1, optimizer=Muon()).make_optimizer(
        [{"params": [*model.parameters()], "lr_scale": 1.0}]
    )


def test_muon_moves_matrices_and_adamw_all_else() -> None:
    """Updates equal torch's Muon on matrices and AdamW on the rest, bit by bit; the head is not
    Muon's.
    """
    actual_model = make_network()
    expected_model = make_network()
    matrices = [expected_model[0].weight, expected_model[2].weight]
    rest = [
        parameter
        for parameter in expected_model.parameters()
        if all(parameter is not matrix for matrix in matrices)
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), fused=True),
    ]
    run_steps(actual_model, [make_muon(actual_model)], range(4))
    run_steps(expected_model, optimizers, range(4))
    assert all(
        torch.equal(actual, expected)
        for actual, expected in zip(
            actual_model.parameters(), expected_model.parameters(), strict=True
        )
    )


def test_a_rate_that_is_changed_reaches_both_parts() -> None:
    """With a rate of zero and no decay nothing moves, also after loading a state; the matrices'
    rate is a multiple.
    """
    model = make_network()
    faster = Trainer(optimizer=Muon(lr_ratio=5.0)).make_optimizer(
        [{"params": [*model.parameters()], "lr_scale": 0.5}]
    )
    assert [group["lr_scale"] for group in faster.param_groups] == [2.5, 0.5]
    optimizer = make_muon(model)
    run_steps(model, [optimizer], range(2))
    for load in (False, True):
        if load:
            unflatten_optimizer(optimizer, *flatten_optimizer(optimizer))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = [parameter.detach().clone() for parameter in model.parameters()]
        run_steps(model, [optimizer], range(2, 3))
        assert all(
            torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
        )


def test_muon_goes_on_from_its_saved_state() -> None:
    """Three steps, saved and loaded into a new optimiser, and three more equal six steps."""
    uninterrupted = make_network()
    resumed = make_network()
    run_steps(uninterrupted, [make_muon(uninterrupted)], range(6))
    first = make_muon(resumed)
    run_steps(resumed, [first], range(3))
    second = make_muon(resumed)
    unflatten_optimizer(second, *flatten_optimizer(first))
    run_steps(resumed, [second], range(3, 6))
    assert all(
        torch.equal(actual, expected)
        for actual, expected in zip(uninterrupted.parameters(), resumed.parameters(), strict=True)
    )


@pytest.mark.parametrize("sharding", ["fsdp2", "zero2", "zero3"])
def test_muon_is_refused_where_weights_are_in_parts(sharding: str, tmp_path: Path) -> None:
    """Every sharding that holds or updates parts of weights is refused before the first step."""
    shared: Any = SimpleNamespace(full_parameters=False, unsharded=True, name=sharding)
    drafter = nn.Identity()
    source = SimpleNamespace(uses_drafter=False)
    with pytest.raises(
        UserError,
        match=f"optimizer=muon: .*sharding={sharding}.*use trainer.sharding=ddp or optimizer=adamw",
    ):
        check_family(Trainer(optimizer=Muon()), cast(Any, drafter), cast(Any, source), shared)


def test_averages_are_refused_where_weights_are_in_parts() -> None:
    shared: Any = SimpleNamespace(full_parameters=False, unsharded=True, name="zero2")
    with pytest.raises(UserError, match=r"trainer.ema=0.9: .*sharding=zero2.*use ddp"):
        check_validations(
            Trainer(ema=0.9),
            shared,
            Dataset([], 0, 0, 0),
            cast(Any, SimpleNamespace(has_layers=True)),
        )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(), [1.0, 1.0, 1.0, 1.0]),
        (Wsd(decay=0.4), [1.0, 1.0, 1 - 0.5**0.5, 0.0]),
        (Wsd(decay=0.0), [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_schedules_by_their_formula(schedule: Schedule, expected: list[float]) -> None:
    """Rates at progress 0, 0.5, 0.8 and 1 equal the formula."""
    assert [schedule.rate_at(progress) for progress in (0.0, 0.5, 0.8, 1.0)] == pytest.approx(
        expected
    )


def test_a_schedule_ends_at_the_smallest_rate() -> None:
    """The rate warms up to the peak, follows the schedule, and ends at `min_lr`."""
    trainer = Trainer(lr=2.0, warmup=0.1, min_lr=0.25, schedule=Wsd(decay=0.5))
    rates = [trainer.lr_at(step, 100) for step in (0, 9, 10, 54, 100)]
    assert rates == pytest.approx([0.2, 2.0, 2.0, 2.0, 0.5])
