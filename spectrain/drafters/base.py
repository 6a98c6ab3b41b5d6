"""The contract that every family of drafters fulfils. Shapes: B batch, T tokens, K draft steps.

A family is one class in one file: `loss` trains it, `draft` decodes with it, side by side so that they agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.config.choices import find_choice
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.features import Features, Layer
from spectrain.models.target import Target
from spectrain.trees.base import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .abilities import Abilities, DraftingCost, SavedFiles
from .context import Context


@dataclass(frozen=True)
class TrainingState:
    """Where a training stands: what the trainer says to every loss."""

    step: int = 0  # optimiser steps done
    progress: float = 0.0  # how much of the training is done, from 0 to 1
    recompute: bool = False  # gradient checkpointing

    def checkpointed(self, part: Callable[..., Any], *inputs: Any) -> Any:
        """part(*inputs); with gradient checkpointing only the inputs are kept until the backward pass, which runs it again.

        A family calls what repeats in its loss, a draft step or a layer, through this. torch's `checkpoint_wrapper` does the
        same for a whole module and for good, renaming it; a draft step is a function, and is run again in training only.
        """
        if not self.recompute or not torch.is_grad_enabled():
            return part(*inputs)
        return checkpoint(part, *inputs, use_reentrant=False)


@dataclass(frozen=True)
class Stage:
    """A part of a training: who learns in it, and from which features."""

    groups: list[dict[str, Any]]  # each has `params` and, where it differs, `lr_scale`
    layers: tuple[Layer, ...]  # features that the loss wants of a batch: none where it runs the target itself
    share: float = 1.0  # of the training's steps
    final_reach: int | None = None  # the loss reads "final" where the next token carries loss and so far before; None: anywhere

    @classmethod
    def whole(cls, module: nn.Module, layers: tuple[Layer, ...], final_reach: int | None = None) -> Stage:
        """A training of one stage, in which all open parameters of a module learn."""
        return cls([{"params": [p for p in module.parameters() if p.requires_grad]}], layers, final_reach=final_reach)


def stage_at(stages: Sequence[Stage], step: int, num_steps: float) -> int:
    """The number of the stage that a training step belongs to."""
    return sum(step >= end * num_steps for end in accumulate(stage.share for stage in stages[:-1]))


@dataclass
class Losses:
    """Sums over supervised tokens, so that batches of any size add up; the trainer divides by the tokens of a step."""

    terms: dict[str, Tensor]  # name -> scalar, already weighted
    hits: Tensor  # [K] draft tokens equal to the target's most likely one, by draft step
    counts: Tensor  # [K] draft tokens judged

    @classmethod
    def by_depth(cls, terms: dict[str, Tensor], right: Tensor, depths: Tensor, num_steps: int) -> Losses:
        """Of drafts [R] of these draft steps, which are right or not."""
        hits = torch.zeros(num_steps, device=right.device).index_add(0, depths, right.float())
        counts = torch.zeros_like(hits).index_add(0, depths, torch.ones_like(right, dtype=hits.dtype))
        return cls(terms, hits, counts)

    @property
    def total(self) -> Tensor:
        return sum(self.terms.values())  # type: ignore[return-value]


class Drafts(Protocol):
    """What a round asks of a drafter, or of what is wrapped around one."""

    def draft(self, context: Context) -> Draft: ...

    def verify(self, context: Context, tree: TokenTree) -> Features: ...

    def commit(self, context: Context, accepted: AcceptedPath) -> None: ...


class Drafter(nn.Module, ABC):
    """Guesses what its target will say next. Runtime objects enter the constructor by one keyword, `target`.

    What only some families have is declared as an object: a value of the class, or of an instance where it depends on its
    settings.
    """

    layers: tuple[Layer, ...] = ()  # the features it reads, in training and decoding; none for an independent model
    abilities = Abilities()
    cost = DraftingCost()
    saved = SavedFiles()

    @property
    def stages(self) -> Sequence[Stage]:
        """What is trained, one stage after another; by default the drafter's own parameters, on the features in `layers`."""
        return [Stage.whole(self, self.layers)]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Training losses of a batch, which holds the features that the stage names. Training-free families have none."""
        name = find_choice("drafter", f"{type(self).__module__}.{type(self).__name__}") or type(self).__name__
        raise UserError(f"drafter={name}: it has nothing to train; score it with spectrain eval drafter={name}")

    @abstractmethod
    def draft(self, context: Context) -> Draft:
        """How to draft from `context.root` on, or what may follow it. Caches are renewed where `context.round` is 0."""

    def verify(self, context: Context, tree: TokenTree) -> Features:
        """The target's logits and features at every node."""
        return context.verify(tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        """Forget what was rejected; the context already holds the accepted tokens and their features."""

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Called once before a fresh training, with how often each token [V] is the assistant's in the data."""

    def forward(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """What a data-parallel wrapper calls: the loss."""
        return self.loss(batch, target, state)


def has_weights(drafter: Drafter) -> bool:
    """Whether it has parameters of its own."""
    return any(True for _ in drafter.parameters())
