"""The parts of a checkpoint: sums of metrics, random states and trained weights."""

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.models.target import Target

from .checkpoints import load_tensors
from .parallel import ParallelStrategy


@dataclass(frozen=True)
class TrainingResult:
    """The totals of a training run, over all resumed parts, and the state of its drafter."""

    num_steps: int
    # Tokens of all processes, without padding.
    num_tokens: int
    # Seconds of steps, until the end of the last one.
    seconds: float
    # Parameters that were trained in any stage.
    num_parameters: int
    # The drafter of the main process holds all of its weights.
    is_reusable: bool
    # The step whose weights are the result.
    result_step: int


@dataclass
class Tally:
    """The sums of a logging interval on one process."""

    loss: float = 0.0
    steps: int = 0
    tokens: int = 0
    supervised: int = 0
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0
    seconds: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)  # each named loss
    hits: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)

    def add_tally(self, other: "Tally") -> None:
        """Add another tally."""
        for name in ("loss", "steps", "tokens", "supervised", "target_seconds", "drafter_seconds", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, value in other.terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + value
        self.hits = [own + more for own, more in zip_longest(self.hits, other.hits, fillvalue=0.0)]
        self.counts = [own + more for own, more in zip_longest(self.counts, other.counts, fillvalue=0.0)]

    @classmethod
    def from_saved(cls, saved: list[dict[str, Any]], rank: int, count: int) -> "Tally":
        """Restore the tally of this process. With another number of processes, rank 0 takes all sums."""
        tallies = [cls(**sums) for sums in saved]
        if len(tallies) == count:
            return tallies[rank]
        total = cls()
        for tally in tallies:
            total.add_tally(tally)
        if rank:  # the same names and depths, of which nothing is this one's
            zeros = [0.0] * len(total.hits)
            total = cls(terms=dict.fromkeys(total.terms, 0.0), hits=zeros, counts=zeros)
        total.steps, total.supervised, total.seconds = tallies[0].steps, tallies[0].supervised, tallies[0].seconds
        return total


def get_random_state() -> dict[str, Tensor]:
    """Return the states of torch's random generators."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def set_random_state(saved: dict[str, Tensor], rank: int) -> None:
    """Undo `get_random_state`, from "rng.DEVICE.RANK"; a process that was not there before keeps what its seed gave it."""
    if f"rng.cpu.{rank}" in saved:
        torch.set_rng_state(saved[f"rng.cpu.{rank}"])
    if f"rng.cuda.{rank}" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved[f"rng.cuda.{rank}"])


def gather_trained_weights(drafter: Drafter, target: Target, parallel: ParallelStrategy) -> dict[str, Tensor]:
    """Gather, on the main process, the drafter and the trained parameters of the target."""
    own = {id(parameter) for parameter in drafter.parameters()}
    weights = {f"drafter.{name}": tensor for name, tensor in parallel.gather_weights(drafter).items()}
    trained = {name for name, parameter in target.named_parameters() if parameter.requires_grad and id(parameter) not in own}
    if trained:
        weights |= {f"target.{name}": tensor for name, tensor in parallel.gather_weights(target).items() if name in trained}
    return weights


def load_trained_weights(drafter: Drafter, target: Target, weights: dict[str, Tensor]) -> None:
    load_tensors(drafter, {k.removeprefix("drafter."): v for k, v in weights.items() if k.startswith("drafter.")})
    trained = {k.removeprefix("target."): v for k, v in weights.items() if k.startswith("target.")}
    parameters = dict(target.named_parameters())
    with torch.no_grad():
        for name, value in trained.items():
            parameters[name].copy_(value)


def select_trained_groups(drafter: Drafter, target: Target, stage: int) -> list[dict[str, Any]]:
    """Return the parameter groups of a stage, each with its `lr_scale`; freeze all other parameters of drafter and target."""
    groups = [{"lr_scale": 1.0, **group} for group in drafter.stages[stage].groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    for parameter in [*drafter.parameters(), *target.parameters()]:
        parameter.requires_grad_(id(parameter) in trained)
    return groups
