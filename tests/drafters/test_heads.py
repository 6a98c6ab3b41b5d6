"""Families of heads through the same runs: a resumed one is the uninterrupted one, and an empty
batch still has gradients.
"""

from pathlib import Path

import pytest
import torch

from spectrain.drafters.base import TrainingState
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer
from tests.installed import select_installed
from tests.training.worker import dataset, make

FAMILIES = select_installed(
    "drafter", ("amphista", "ctc", "gumiho", "transformer_heads", "redrafter", "eagle1")
)


class Killed(Exception):
    pass


@pytest.mark.sweep(1, free=("family",))
@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_equals_uninterrupted(family: str, shallow: Target, tmp_path: Path) -> None:
    """A run killed after step 3 and resumed from step 2 ends in the same weights, bit by bit."""

    def kill(at: int) -> None:
        if at == 3:
            raise Killed

    def make_trainer() -> Trainer:
        return Trainer(lr=1e-3, max_steps=4, batch_tokens=64, save_every=2)

    uninterrupted, interrupted, resumed = (make(family, shallow) for _ in range(3))
    make_trainer().fit(uninterrupted, shallow, dataset(), LiveSource(), tmp_path / "whole")
    with pytest.raises(Killed):
        make_trainer().fit(
            interrupted, shallow, dataset(), LiveSource(), tmp_path / "cut", on_step=kill
        )
    make_trainer().fit(resumed, shallow, dataset(), LiveSource(), tmp_path / "cut")
    for key, value in uninterrupted.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_supervision_costs_nothing(family: str, shallow: Target) -> None:
    """The loss is zero, and every parameter has a gradient of zero, which other processes wait
    for.
    """
    drafter = make(family, shallow)
    tokens = torch.randint(3, 2000, (2, 12))
    batch = Batch(
        tokens, torch.zeros_like(tokens, dtype=torch.bool), shallow.features(tokens, drafter.layers)
    )
    losses = drafter.loss(batch, shallow, TrainingState())
    losses.total.backward()
    assert losses.total == 0 and losses.counts.sum() == 0
    assert all(
        parameter.grad is not None and not parameter.grad.any()
        for parameter in drafter.parameters()
    )
