"""The settings of a training run: its length, batches, learning rate, when it saves and validates.

The choices of `optimizer=` and `schedule=` are here too. Peak learning rate, betas and weight decay
are the trainer's, the same for all of them; schedules fall to `trainer.min_lr` of the peak.
"""

import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from spectrain.config.values import Below1, Count, Epochs, NotNegative, Positive, Seed, Share
from spectrain.data.dataset import Batching, Dataset
from spectrain.errors import UserError
from spectrain.models.target import Target

from .parallel.base import ParameterGroups
from .parallel.launch import Sharding


class UpdateRule(ABC):
    """Makes the optimizer of a stage."""

    name: str
    # it reads a weight as the matrix that it is, so no process may hold only a part of it
    needs_matrices = False

    @abstractmethod
    def make_optimizer(
        self, groups: ParameterGroups, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> torch.optim.Optimizer:
        """Make an optimizer over these parameter groups; it keeps their other keys."""


def _can_fuse(groups: ParameterGroups) -> bool:
    """Tell whether all parameters are plain ones on a CPU or on NVIDIA's or AMD's GPUs, where one
    pass over memory updates them: on a CPU in a sixth of the time.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(
        type(parameter) is nn.Parameter and parameter.device.type in ("cpu", "cuda")
        for parameter in parameters
    )


def _count_versions(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count a new version of every parameter, by which packed copies of weights notice a change;
    a fused step does not.
    """
    torch.autograd.graph.increment_version(
        [parameter for group in optimizer.param_groups for parameter in group["params"]]
    )


class AdamW(UpdateRule):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    name = "adamw"

    def make_optimizer(
        self, groups: ParameterGroups, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> torch.optim.Optimizer:
        is_fused = _can_fuse(groups)
        optimizer = torch.optim.AdamW(
            groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=is_fused or None
        )
        if is_fused:
            optimizer.register_step_post_hook(_count_versions)
        return optimizer


class Muon(UpdateRule):
    """Muon (Jordan et al., 2024) for matrices, which orthogonalizes their momentum, and AdamW for
    all other parameters.

    Steps have the size of AdamW's (Liu et al., 2025), so similar learning rates suit both. A matrix
    with one side more than `longest` times the other is a head or an embedding, and AdamW updates
    it.
    """

    name = "muon"
    needs_matrices = True

    def __init__(
        self,
        # Momentum of the gradients of matrices, with Nesterov's step.
        momentum: Below1 = 0.95,
        # Largest ratio of a matrix's longer side to its shorter one; AdamW updates matrices above
        # it.
        longest: Positive = 8.0,
        # Learning rate of matrices as a multiple of trainer.lr, which the other parameters have.
        lr_ratio: Positive = 1.0,
    ) -> None:
        self.momentum, self.longest, self.lr_ratio = momentum, longest, lr_ratio

    def make_optimizer(
        self, groups: ParameterGroups, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> torch.optim.Optimizer:
        matrices, others = [self._select_groups(groups, matrices) for matrices in (True, False)]
        matrices = [
            {**group, "lr_scale": self.lr_ratio * group.get("lr_scale", 1.0)} for group in matrices
        ]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(
                torch.optim.Muon(
                    matrices,
                    lr=lr,
                    weight_decay=weight_decay,
                    momentum=self.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if others:
            parts.append(AdamW().make_optimizer(others, lr, betas, weight_decay))
        return CombinedOptimizer(parts)

    def _select_groups(self, groups: ParameterGroups, matrices: bool) -> ParameterGroups:
        chosen = [
            {**group, "params": [p for p in group["params"] if self._is_matrix(p) == matrices]}
            for group in groups
        ]
        return [group for group in chosen if group["params"]]

    def _is_matrix(self, parameter: torch.Tensor) -> bool:
        return parameter.ndim == 2 and max(parameter.shape) <= self.longest * min(parameter.shape)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one: their groups, and their states in a checkpoint, follow one
    another.
    """

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.optimizers = parts
        super().__init__(
            [
                {**group, "part": number}
                for number, part in enumerate(parts)
                for group in part.param_groups
            ],
            {},
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there before a step"
        # linked anew, for loading a state replaces the groups
        for number, part in enumerate(self.optimizers):
            part.param_groups = [group for group in self.param_groups if group["part"] == number]
            part.state = self.state
            part.step()


class Schedule(ABC):
    """A curve that starts at 1 at the end of the warm-up."""

    @abstractmethod
    def rate_at(self, progress: float) -> float:
        """Return the rate, from 0 (`trainer.min_lr` of the peak) to 1 (the peak), at a progress
        of 0 to 1.
        """


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
    """Warm-up, stable, decay (Hu et al., 2024): the peak for most of the training, then 1 - sqrt
    (Haegele et al., 2024).
    """

    def __init__(
        self,
        # Share of the training after the warm-up in which the learning rate falls.
        decay: Share = 0.2,
    ) -> None:
        self.decay = decay

    def rate_at(self, progress: float) -> float:
        falling = max(0.0, progress - (1 - self.decay))
        return 1 - math.sqrt(min(1.0, falling / self.decay)) if falling else 1.0


@dataclass
class TrainerSettings:
    """The settings of a training run.

    The learning rate warms up and decays over `epochs` of the data or, where they are given, over
    `max_steps` steps or `max_minutes` minutes, whichever end first. A step takes `accumulate`
    batches of up to `batch_tokens` tokens on each process and divides the loss by the number of
    supervised tokens in all of them, so the loss depends neither on the number of processes nor on
    batching: padded, in buckets of similar length, or packed. A step with a gradient that is not
    finite is skipped; `max_skipped` of them in a row stop the run.
    """

    # Peak learning rate, reached at the end of the warm-up; auto gives every weight a rate in
    # proportion to its size, which changes its outputs by the same share whatever the width of the
    # model.
    lr: float | Literal["auto"] = "auto"
    # Number of passes over the data; a fraction is allowed.
    epochs: Epochs = 1.0
    # Number of optimizer steps, used instead of epochs; null trains for trainer.epochs.
    max_steps: int | None = None
    # Training time in minutes, used instead of epochs; warm-up and schedule follow it. Null sets no
    # limit.
    max_minutes: Positive | None = None
    # Largest number of tokens in a batch, on each process.
    batch_tokens: int = 4096
    # Concatenate sequences in one row, without padding, with attention kept within each.
    packing: bool = False
    # Number of consecutive tokens of each text that carry loss in a step, at a random place, with
    # all tokens before them as context; null trains on all. It takes less memory and time per step
    # of long texts.
    loss_tokens: Count | None = None
    # Number of batches in an optimizer step, on each process.
    accumulate: int = 1
    # Share of the steps in which the learning rate rises.
    warmup: Share = 0.05
    # Share of trainer.lr that the schedule falls to.
    min_lr: Share = 0.0
    # Largest norm of the gradient; larger gradients are scaled down to it.
    clip: Positive = 0.5
    # Decay rates of AdamW's means of the gradients and of their squares.
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    # Decoupled weight decay: the share of a weight, times the learning rate, that a step subtracts.
    weight_decay: NotNegative = 0.0
    # Seed of the initial weights, of the order of the data and of random draws.
    seed: Seed = 0
    # Number of steps between two checkpoints; null saves only when the run stops or ends.
    save_every: Count | None = None
    # Number of steps between two validations on held-out data; null validates with every
    # checkpoint, at the end, and between them as often as fits into 5 % of the measured time.
    eval_every: Count | None = None
    # Take the weights with the best validation as the result, those of the start included, instead
    # of the last ones; null takes them where the last ones are below the start, or below the best
    # by more than chance.
    keep_best: bool | None = None
    # Number of validations in a row without improvement after which the run ends; null never ends
    # it early.
    stop_after: Count | None = None
    # Decay of a moving average of the weights, as in 0.999, which is validated and saved; null
    # keeps no average.
    ema: Below1 | None = None
    # Number of the newest checkpoints to keep.
    keep_checkpoints: int = 2
    # Number of steps between two lines of metrics.jsonl.
    log_every: int = 10
    # Type of matrix products: bf16, no, or auto, which is bf16 on a GPU and on a CPU with a
    # bfloat16 target.
    mixed_precision: str = "auto"
    # How processes share the drafter and its optimizer: ddp, fsdp2, zero2 or zero3; auto takes what
    # the launcher asks for.
    sharding: Sharding = "auto"
    # Number of neighbouring processes that share the texts of a batch, each running a piece of
    # every text; it divides the number of processes.
    context_parallel: Count = 1
    # How attention reads the pieces of other processes: their heads are exchanged (ulysses), keys
    # and values are gathered (gather), or the first where the number of heads allows it (auto).
    context_method: Literal["auto", "ulysses", "gather"] = "auto"
    # Recompute activations in the backward pass, which saves memory and costs time.
    gradient_checkpointing: bool = False
    # Number of steps in a row with a gradient that is not finite after which the run stops.
    max_skipped: int = 5
    # Seconds that processes wait for a slow one before a message names it.
    patience: float = 60.0
    # Minutes that processes wait for one another at the start, while data and models load, before
    # the run fails.
    timeout: Positive = 30.0
    # Use auto to start the run in run=DIR or to continue it from its newest checkpoint, and changed
    # to continue it although data, target or template have changed since it began; null refuses a
    # folder that holds a run.
    resume: str | None = None
    # Optimizer that updates the weights.
    optimizer: UpdateRule = field(default_factory=AdamW)
    # Schedule of the learning rate after the warm-up.
    schedule: Schedule = field(default_factory=Cosine)

    def __post_init__(self) -> None:
        for key in (
            "lr",
            "epochs",
            "batch_tokens",
            "accumulate",
            "log_every",
            "keep_checkpoints",
            "max_skipped",
            "patience",
        ):
            if getattr(self, key) != "auto" and getattr(self, key) <= 0:
                raise UserError(f"trainer.{key}={getattr(self, key)}: use a number above 0")
        if self.max_steps is not None and self.max_steps < 1:
            raise UserError(f"trainer.max_steps={self.max_steps}: use 1 or more, or null")
        if self.mixed_precision not in ("auto", "no", "bf16"):
            raise UserError(f"trainer.mixed_precision={self.mixed_precision}: use auto, no or bf16")
        if self.resume not in (None, "auto", "changed"):
            raise UserError(f"trainer.resume={self.resume}: use auto or changed, or leave it out")

    def autocast_dtype(self, target: Target, device: torch.device) -> torch.dtype | None:
        """Return the type of matrix products, None for the weights' own. Auto is bfloat16 on a GPU,
        unless accelerate's file sets another type, and on a CPU with a bfloat16 target."""
        precision = self.mixed_precision
        if precision == "auto" and device.type == "cuda":
            precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "bf16")
        if precision == "auto":
            precision = "bf16" if target.dtype == torch.bfloat16 else "no"
        return torch.bfloat16 if precision == "bf16" else None

    @property
    def batch_settings(self) -> Batching:
        """Return how the data becomes batches."""
        return Batching(self.batch_tokens, self.seed, self.packing)

    def num_steps(self, dataset: Dataset, num_processes: int = 1) -> int | None:
        """Count the optimizer steps of the run; None where only the clock ends it."""
        if self.max_steps is not None or self.max_minutes is not None:
            return self.max_steps
        batches = dataset.num_batches(self.batch_settings)
        return max(1, math.ceil(self.epochs * batches / (self.accumulate * num_processes)))

    @property
    def peak_lr(self) -> float:
        """The peak learning rate, which the `lr_scale` of a parameter group multiplies; 1 where
        each group has its own rate.
        """
        return 1.0 if self.lr == "auto" else self.lr

    def lr_at(self, step: int, num_steps: float, stage_start: int = 0) -> float:
        """Return the learning rate of a step: linear warm-up in every stage, then the schedule
        down to `min_lr` of the peak.
        """
        warm = max(1, round(self.warmup * num_steps))
        progress = max(0, step - warm) / max(1, num_steps - warm)
        decayed = self.peak_lr * (
            self.min_lr + (1 - self.min_lr) * self.schedule.rate_at(min(1.0, progress))
        )
        return decayed * min(1.0, (step - stage_start + 1) / warm)

    def make_optimizer(self, groups: ParameterGroups) -> torch.optim.Optimizer:
        """Make the optimizer of a stage."""
        return self.optimizer.make_optimizer(groups, self.peak_lr, self.betas, self.weight_decay)
