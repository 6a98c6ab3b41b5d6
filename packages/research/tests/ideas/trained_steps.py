"""Distributions of EAGLE's draft steps as training computes them. Not a test itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.features.batch import Batch
from spectrain.models.target import Target


def training_log_q(
    drafter: Any, target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> list[dict[Any, Tensor]]:
    """Return log q of every step at every (row, index), out of the training loss."""
    states: list[Tensor] = []
    judge = type(drafter).judge_steps
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(
            type(drafter),
            "judge_steps",
            lambda self, s, steps: states.extend(steps) or judge(self, s, steps),
        )
        drafter.loss(batch, target, TrainingState())
        supervision = Supervision(drafter, batch)
        positions = [
            [(int(b), int(t)) for b, t in supervision.is_supervised(step).nonzero()]
            for step in range(len(states))
        ]
        return [
            dict(zip(keys, drafter.log_q(state), strict=True))
            for keys, state in zip(positions, states)
        ]
