"""The contract that every family of drafters fulfils. Shapes: B batch, T tokens, K draft steps.

A family is one class in one file: `loss` trains it, `propose` decodes with it, side by side so that they agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.features import Features, Layer
from spectrain.trees.base import TreeBuilder
from spectrain.trees.token_tree import TokenTree

if TYPE_CHECKING:
    from spectrain.decoding.acceptance import Accepted
    from spectrain.decoding.loop import Context
    from spectrain.models.lora import TargetTraining
    from spectrain.models.target import Target


@dataclass(frozen=True)
class TrainingState:
    """Where a training stands: what the trainer says to every loss."""

    step: int = 0  # optimiser steps done
    progress: float = 0.0  # how much of the training is done, from 0 to 1
    recompute: bool = False  # gradient checkpointing

    def checkpointed(self, part: Callable[..., Any], *inputs: Any) -> Any:
        """part(*inputs); with gradient checkpointing only the inputs are kept until the backward pass, which runs it again.

        A family calls what repeats in its loss, a draft step or a layer, through this.
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


def stage_at(stages: Sequence[Stage], step: int, num_steps: int) -> int:
    """The number of the stage that a training step belongs to."""
    return sum(step >= end * num_steps for end in accumulate(stage.share for stage in stages[:-1]))


@dataclass(frozen=True)
class OnPolicy:
    """What lets a family learn from drafts or texts that were made while it trains."""

    writer: Target | None = None  # the drafter as a model that writes text by itself, where it is one
    learns_replays: bool = False  # its loss tells what a replayed draft got wrong (Batch.distance)


@dataclass(frozen=True)
class Abilities:
    """What only some families can do, beyond the contract."""

    target_training: TargetTraining | None = None  # it changes the target in training: the run then saves the target too
    on_policy: OnPolicy = OnPolicy()


@dataclass
class Losses:
    """Sums over supervised tokens, so that batches of any size add up; the trainer divides by the tokens of a step."""

    terms: dict[str, Tensor]  # name -> scalar, already weighted
    hits: Tensor  # [K] draft tokens equal to the target's most likely one, by draft step
    counts: Tensor  # [K] draft tokens judged

    @property
    def total(self) -> Tensor:
        return sum(self.terms.values())  # type: ignore[return-value]


class Drafter(nn.Module, ABC):
    """Guesses what its target will say next. Runtime objects enter the constructor by one keyword, `target`."""

    layers: tuple[Layer, ...] = ()  # the features it reads, in training and decoding; none for an independent model
    abilities = Abilities()  # of the class, or of an instance where they depend on its settings
    shape: tuple[str, ...] = ()  # settings that saved weights fix; drafter.init takes them from the directory it names

    verified_from: int = 0  # the first layer that drafting leaves to verification, where it runs layers of the target
    has_exits: bool = False  # it can draft from any layer: `at_exit`
    is_captured: bool = False  # it drafts without asking the device for anything, so that a CUDA graph can hold a round
    settles_drafts: bool = (
        False  # it verifies from where its drafts stopped, so trees must keep them for a round to be captured
    )
    adapts_layers: bool = False  # it changes what single layers of the target compute, so no compilation serves them all
    carried: tuple[str, ...] = ()  # attributes that one round leaves to the next: its cache, or tensors
    copies_text: bool = False  # it looks drafts up and asks no distribution: a builder shapes nothing, and drafts are not drawn

    @property
    def has_weights(self) -> bool:
        """Whether it has parameters of its own."""
        return any(True for _ in self.parameters())

    @property
    def stages(self) -> Sequence[Stage]:
        """What is trained, one stage after another; by default the drafter's own parameters, on the features in `layers`."""
        return [Stage.whole(self, self.layers)]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Training losses of a batch, which holds the features that the stage names. Training-free families have none."""
        name = type(self).__name__.lower()
        raise UserError(f"drafter={name}: it has nothing to train; score it with spectrain eval drafter={name}")

    @abstractmethod
    def propose(self, context: Context, budget: TreeBuilder) -> TokenTree:
        """One round's draft, rooted at `context.root`, most simply `budget.grow(context, rollout)`.

        Keeps its own cache, renewed where `context.round` is 0.
        """

    def verify(self, context: Context, tree: TokenTree) -> Features:
        """The target's logits and features at every node, from where `context.shallow` left them if something ran a part."""
        if context.shallow is not None:
            return context.shallow.finish(tree)
        return context.target.verify(tree, context.cache, self.layers)

    def commit(self, context: Context, accepted: Accepted) -> None:
        """Forget what was rejected; the context already holds the accepted tokens and their features."""

    def extra_nodes(self, budget: TreeBuilder) -> int:
        """Nodes that its trees may hold beyond the builder's budget, such as nodes that only draft."""
        return 0

    def draft_passes(self, depth: float) -> float:
        """How often drafting so deep reads all of `drafting_weights`, for the floor of its time."""
        return depth

    def drafting_weights(self, target: Target) -> nn.Module:
        """What a draft step reads: the drafter's own weights, unless it runs a part of the target."""
        return self

    def calibrate(self, target: Target, prompts: Callable[[], list[list[int]]], depth: int) -> None:
        """Called once before scoring, with prompts that are not scored, read when asked for, and the depth of the trees to
        come; a training-free family searches its settings here."""

    def at_exit(self, exit_layer: int, target: Target) -> Drafter:
        """The same drafter, sharing its weights, with another early exit; for families with `has_exits`."""
        raise NotImplementedError

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Called once before a fresh training, with how often each token [V] is the assistant's in the data."""

    def settings(self) -> dict[str, Any]:
        """Settings that the saved description takes from the drafter instead of from the command, so that it loads alone."""
        return {}

    def layout(self) -> dict[str, tuple[str, str]]:
        """Where saved tensors go that do not stay in model.safetensors: name -> (file, name there)."""
        return {}

    def sidecars(self) -> dict[str, str]:
        """Further files of a saved drafter, for tools that read its layout: name -> text."""
        return {}

    def forward(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """What a data-parallel wrapper calls: the loss."""
        return self.loss(batch, target, state)
