"""Optimizers, the choices of `optimizer=`, and learning rate schedules after the warm-up, the choices of `schedule=`.

Peak learning rate, betas and weight decay are the trainer's, the same for all. Schedules fall to `trainer.min_lr` of the peak.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from spectrain.config.values import Below1, Positive, Share

ParameterGroups = list[dict[str, Any]]  # each has `params`
OptimizerFactory = Callable[[ParameterGroups], torch.optim.Optimizer]


class UpdateRule(ABC):
    """Makes the optimizer of a stage."""

    name: str
    needs_matrices = False  # it reads a weight as the matrix that it is, so no process may hold only a part of it

    @abstractmethod
    def make_optimizer(
        self, groups: ParameterGroups, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> torch.optim.Optimizer:
        """Make an optimizer over these parameter groups; it keeps their other keys."""


class AdamW(UpdateRule):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    name = "adamw"

    def make_optimizer(
        self, groups: ParameterGroups, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay)


class Muon(UpdateRule):
    """Muon (Jordan et al., 2024) for matrices, which orthogonalizes their momentum, and AdamW for all other parameters.

    Steps have the size of AdamW's (Liu et al., 2025), so similar learning rates suit both. A matrix with one side more than
    `longest` times the other is a head or an embedding, and AdamW updates it.
    """

    name = "muon"
    needs_matrices = True

    def __init__(
        self,
        # Momentum of the gradients of matrices, with Nesterov's step.
        momentum: Below1 = 0.95,
        # Largest ratio of a matrix's longer side to its shorter one; AdamW updates matrices above it.
        longest: Positive = 8.0,
    ) -> None:
        self.momentum, self.longest = momentum, longest

    def make_optimizer(
        self, groups: ParameterGroups, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> torch.optim.Optimizer:
        matrices, others = [self._select_groups(groups, matrices) for matrices in (True, False)]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(
                torch.optim.Muon(
                    matrices, lr=lr, weight_decay=weight_decay, momentum=self.momentum, adjust_lr_fn="match_rms_adamw"
                )
            )
        if others:
            parts.append(torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay))
        return CombinedOptimizer(parts)

    def _select_groups(self, groups: ParameterGroups, matrices: bool) -> ParameterGroups:
        chosen = [{**group, "params": [p for p in group["params"] if self._is_matrix(p) == matrices]} for group in groups]
        return [group for group in chosen if group["params"]]

    def _is_matrix(self, parameter: torch.Tensor) -> bool:
        return parameter.ndim == 2 and max(parameter.shape) <= self.longest * min(parameter.shape)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one: their groups, and their states in a checkpoint, follow one another."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.optimizers = parts
        super().__init__([{**group, "part": number} for number, part in enumerate(parts) for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there before a step"
        for number, part in enumerate(self.optimizers):  # linked anew, for loading a state replaces the groups
            part.param_groups, part.state = [group for group in self.param_groups if group["part"] == number], self.state
            part.step()


class Schedule(ABC):
    """A curve that starts at 1 at the end of the warm-up."""

    @abstractmethod
    def rate_at(self, progress: float) -> float:
        """Return the rate, from 0 (`trainer.min_lr` of the peak) to 1 (the peak), at a progress of 0 to 1."""


class Cosine(Schedule):
    """Half a cosine (Loshchilov and Hutter, 2017)."""

    def rate_at(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


class Linear(Schedule):
    """A straight line down."""

    def rate_at(self, progress: float) -> float:
        return 1 - progress


class Constant(Schedule):
    """A constant rate, for further training or for averaged weights (`trainer.ema`)."""

    def rate_at(self, progress: float) -> float:
        return 1.0


class Wsd(Schedule):
    """Warm-up, stable, decay (Hu et al., 2024): the peak for most of the training, then 1 - sqrt (Haegele et al., 2024)."""

    def __init__(
        self,
        # Share of the training after the warm-up in which the learning rate falls.
        decay: Share = 0.2,
    ) -> None:
        self.decay = decay

    def rate_at(self, progress: float) -> float:
        falling = max(0.0, progress - (1 - self.decay))
        return 1 - math.sqrt(min(1.0, falling / self.decay)) if falling else 1.0
