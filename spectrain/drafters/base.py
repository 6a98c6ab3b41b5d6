"""The contract that every family of drafters fulfils. Shapes: B batch, T tokens, K draft steps.

A family is one class in one file: `loss` trains it, `draft` decodes with it, side by side so that they agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.features import Features, Layer
from spectrain.models.target import Target
from spectrain.trees.base import Draft, TreeBuilder
from spectrain.trees.token_tree import Accepted, TokenTree

from .context import Context


@dataclass
class Losses:
    """Sums over supervised tokens, so that batches of any size add up; the trainer divides by the tokens of a step."""

    terms: dict[str, Tensor]  # name -> scalar, already weighted
    hits: Tensor  # [K] draft tokens equal to the target's most likely one, by draft step
    counts: Tensor  # [K] draft tokens judged

    @property
    def total(self) -> Tensor:
        return sum(self.terms.values())  # type: ignore[return-value]


@dataclass(frozen=True)
class Capture:
    """Drafting without a host-device synchronisation, so that a CUDA graph can hold a round."""

    carried: tuple[str, ...] = ()  # attributes that one round leaves to the next: a cache, or tensors
    keeps_drafts: bool = False  # it verifies from where its drafts stopped, so trees must hold all of them


@dataclass(frozen=True)
class Exits:
    """Drafting from any layer of the target."""

    at: Callable[[Any, int, Target], Drafter]  # (drafter, exit, target): the same, sharing its weights, with another early exit


@dataclass(frozen=True)
class Tuning:
    """A search of settings before decoding, on the target's own greedy answers to prompts that are not scored."""

    is_open: Callable[[Any], bool]  # (drafter): whether there is something to search
    answer_tokens: Callable[[Any], int]  # (drafter): of each answer
    search: Callable[[Any, Target, list[tuple[list[int], list[int]]], int], None]  # (drafter, target, texts, depth of trees)


@dataclass(frozen=True)
class Abilities:
    """What a family can do beyond drafting; None or False where it cannot."""

    capture: Capture | None = None
    exits: Exits | None = None
    tuning: Tuning | None = None
    adapts_layers: bool = False  # it changes what single layers of the target compute, so no compilation serves them all
    copies_text: bool = False  # it looks drafts up and asks no distribution: a builder shapes nothing, and nothing is drawn


@dataclass(frozen=True)
class DraftingCost:
    """What drafting takes, for the room of caches and the floor of its time."""

    extra_nodes: Callable[[Any, TreeBuilder], int] = lambda drafter, builder: 0  # of a tree, beyond the budget
    passes: Callable[[Any, float], float] = lambda drafter, depth: depth  # how often drafting so deep reads all of the weights
    weights: Callable[[Any, Target], nn.Module] = lambda drafter, target: drafter  # what a draft step reads
    verified_from: Callable[[Any], int] = lambda drafter: 0  # the first layer that drafting leaves to verification


@dataclass(frozen=True)
class SavedFiles:
    """How a drafter lies on the disk. `settings` are what its description takes from it instead of from the command, so that
    it loads alone; `layout` says where tensors go that do not stay in model.safetensors: name -> (file, name there);
    `sidecars` are further files, for tools that read its layout: name -> text."""

    shape: tuple[str, ...] = ()  # settings that saved weights fix; drafter.init takes them from the directory it names
    settings: Callable[[Any], dict[str, Any]] = lambda drafter: {}
    layout: Callable[[Any], dict[str, tuple[str, str]]] = lambda drafter: {}
    sidecars: Callable[[Any], dict[str, str]] = lambda drafter: {}


class Drafts(Protocol):
    """What a round asks of a drafter, or of what is wrapped around one."""

    def draft(self, context: Context) -> Draft: ...

    def verify(self, context: Context, tree: TokenTree) -> Features: ...

    def commit(self, context: Context, accepted: Accepted) -> None: ...


class Drafter(nn.Module, ABC):
    """Guesses what its target will say next. Runtime objects enter the constructor by one keyword, `target`.

    What only some families have is declared as an object: a value of the class, or of an instance where it depends on its
    settings.
    """

    layers: tuple[Layer, ...] = ()  # the features it reads, in training and decoding; none for an independent model
    abilities = Abilities()
    cost = DraftingCost()
    saved = SavedFiles()

    final_reach: int | None = None  # its loss reads "final" where the next token carries loss and so far before; None: anywhere
    progress: float = 0.0  # how much of the training is done, from 0 to 1; the trainer keeps it, for schedules
    step: int = 0  # optimiser steps done; the trainer keeps it too
    recompute: bool = False  # gradient checkpointing: `remembered` parts of the loss are run again in the backward pass
    trains_target: bool = False  # its parameter groups hold parameters of the target: the run then saves the target too
    learns_replays: bool = False  # its loss tells what a replayed draft got wrong (Batch.distance)

    def loss(self, batch: Batch, target: Target) -> Losses:
        """Training losses of a batch, which holds the features named by `layers`. Training-free families have none."""
        name = type(self).__name__.lower()
        raise UserError(f"drafter={name}: it has nothing to train; score it with spectrain eval drafter={name}")

    @abstractmethod
    def draft(self, context: Context) -> Draft:
        """How to draft from `context.root` on, or what may follow it. Caches are renewed where `context.round` is 0."""

    def verify(self, context: Context, tree: TokenTree) -> Features:
        """The target's logits and features at every node."""
        return context.verify(tree)

    def commit(self, context: Context, accepted: Accepted) -> None:
        """Forget what was rejected; the context already holds the accepted tokens and their features."""

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Called once before a fresh training, with how often each token [V] is the assistant's in the data."""

    def stage_at(self, step: int, num_steps: int) -> int:
        """The stage that a training step belongs to; a family that trains in stages overrides it."""
        return 0

    def features_in(self, stage: int) -> tuple[Layer, ...]:
        """The features that the loss wants of a batch in a stage: none where the family runs the target itself."""
        return self.layers

    def param_groups(self, stage: int = 0) -> list[dict[str, Any]]:
        """Who learns in a stage. Each group holds `params` and, where it differs, `lr_scale`."""
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def writer(self) -> Target | None:
        """The drafter as a model that writes text by itself, where it is one."""
        return None

    def finish(self, target: Target) -> None:
        """Called once after training; a family that adapted the target merges its adapters here."""

    def remembered(self, part: Callable[..., Any], *inputs: Any) -> Any:
        """part(*inputs); with gradient checkpointing only the inputs are kept until the backward pass, which runs it again.

        A family calls what repeats in its loss, a draft step or a layer, through this.
        """
        if not self.recompute or not torch.is_grad_enabled():
            return part(*inputs)
        return checkpoint(part, *inputs, use_reentrant=False)

    def forward(self, batch: Batch, target: Target) -> Losses:
        """What a data-parallel wrapper calls: the loss."""
        return self.loss(batch, target)


def has_weights(drafter: Drafter) -> bool:
    """Whether it has parameters of its own."""
    return any(True for _ in drafter.parameters())
