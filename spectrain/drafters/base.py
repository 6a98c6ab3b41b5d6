"""The contract that every family of drafters fulfils. Shapes: B batch, T tokens, K draft steps.

A family is one class in one file: `loss` trains it, `draft` decodes with it, side by side so that
they agree. What the contract only names in signatures (the target, a batch, a tree builder) is
imported for type checkers alone, so a reader and an interpreter need few files to know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.errors import UserError
from spectrain.models.features import Features, Layer
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .capabilities import Capabilities, DraftingCost, SavedFiles
from .context import Context
from .step_cost import BatchShape, Judged, Run, StepCost

if TYPE_CHECKING:
    from spectrain.data.datastore import Datastore
    from spectrain.features.batch import Batch
    from spectrain.models.target import Target


@dataclass(frozen=True)
class TrainingState:
    """The progress of a training run, which the trainer passes to every loss."""

    # Number of optimiser steps done.
    step: int = 0
    # Share of the training that is done, from 0 to 1.
    progress: float = 0.0
    # Whether gradient checkpointing is on.
    recompute: bool = False

    def run_checkpointed(self, part: Callable[..., Any], *inputs: Any) -> Any:
        """Return part(*inputs); with gradient checkpointing only the inputs are stored and the
        backward pass runs it again.

        A family calls each repeated part of its loss, a draft step or a layer, through this method.
        torch's `checkpoint_wrapper` would rename the module; a draft step is a function and is
        recomputed in training only.
        """
        if not self.recompute or not torch.is_grad_enabled():
            return part(*inputs)
        return checkpoint(part, *inputs, use_reentrant=False)


@dataclass(frozen=True)
class Stage:
    """One stage of a training: the parameters that it updates and the features that its loss
    reads.
    """

    # Parameter groups; each has `params` and optionally `lr_scale`.
    groups: list[dict[str, Any]]
    # Features that the loss reads from a batch; empty if it runs the target itself.
    layers: tuple[Layer, ...]
    # Share of the training steps.
    share: float = 1.0
    # The loss reads "final" only at positions whose next token is supervised, and up to this many
    # before them; None reads it anywhere.
    final_reach: int | None = None

    @classmethod
    def single(
        cls, module: nn.Module, layers: tuple[Layer, ...], final_reach: int | None = None
    ) -> Stage:
        """Return a single stage that trains all parameters of a module that require gradients."""
        return cls(
            [{"params": [p for p in module.parameters() if p.requires_grad]}],
            layers,
            final_reach=final_reach,
        )


def stage_at(stages: Sequence[Stage], step: int, num_steps: float) -> int:
    """Return the index of the stage that a training step belongs to."""
    return sum(step >= end * num_steps for end in accumulate(stage.share for stage in stages[:-1]))


@dataclass
class Losses:
    """Sums over supervised tokens, so that batches of any size add up; the trainer divides by
    the tokens of a step.
    """

    terms: dict[str, Tensor]  # name -> scalar, already weighted
    hits: Tensor  # [K] draft tokens equal to the target's most likely one, by draft step
    counts: Tensor  # [K] draft tokens judged

    @classmethod
    def by_depth(
        cls, terms: dict[str, Tensor], right: Tensor, depths: Tensor, num_steps: int
    ) -> Losses:
        """Sum correct drafts and judged drafts per draft step, from R supervised rows."""
        hits = torch.zeros(num_steps, device=right.device).index_add(0, depths, right.float())
        counts = torch.zeros_like(hits).index_add(
            0, depths, torch.ones_like(right, dtype=hits.dtype)
        )
        return cls(terms, hits, counts)

    @property
    def total(self) -> Tensor:
        return sum(self.terms.values())  # type: ignore[return-value]


class Drafts(Protocol):
    """The methods of a drafter, or of a wrapper around one, that a round calls."""

    def draft(self, context: Context) -> Draft: ...

    def verify(self, context: Context, tree: TokenTree) -> Features: ...

    def commit(self, context: Context, accepted: AcceptedPath) -> None: ...


class Drafter(nn.Module, ABC):
    """A model that proposes its target's next tokens. The constructor takes runtime objects by one
    keyword, `target`.

    A family declares what only some can do in `capabilities` (drafters/capabilities.py).
    """

    # Features that it reads in training and decoding; empty for an independent model.
    layers: tuple[Layer, ...] = ()
    # Whether its weights had a meaning before the training: they are fitted, copied from the target
    # as layers that follow each other, or those of a trained model.
    starts_trained: bool = False
    capabilities = Capabilities()
    saved = SavedFiles()

    @property
    def stages(self) -> Sequence[Stage]:
        """The training stages in order; by default one stage for the drafter's own parameters,
        on the features in `layers`.
        """
        return [Stage.single(self, self.layers)]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return what a training step computes, for the plan: by default every module of the
        drafter once over every token, and the logits of the supervised tokens under the target's
        vocabulary.
        """
        return StepCost(
            [Run(self, batch.tokens, batch.length)],
            Judged(batch.supervised, target.head.vocab_size, batch.supervised),
        )

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return the training losses of a batch with the stage's features. A training-free
        family raises UserError.
        """
        # Only this sentence needs the names of choices.
        from spectrain.config.choices import find_choice

        name = (
            find_choice("drafter", f"{type(self).__module__}.{type(self).__name__}")
            or type(self).__name__
        )
        raise UserError(
            f"drafter={name}: it has nothing to train; score it with spectrain eval drafter={name}"
        )

    @abstractmethod
    def draft(self, context: Context) -> Draft:
        """Return a rollout from `context.root`, or continuations of it. Caches are reset when
        `context.round` is 0.
        """

    def verify(self, context: Context, tree: TokenTree) -> Features:
        """Return the target's logits and features at every node."""
        return context.verify(tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        """Discard rejected nodes; the context already holds the accepted tokens and their
        features.
        """

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Initialise a new training, given how often each token [V] occurs in the assistant's
        turns; called once.
        """

    def forward(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return the loss; data-parallel wrappers call `forward`."""
        return self.loss(batch, target, state)


def drafting_cost(drafter: Drafter) -> DraftingCost:
    """Return what drafting with this drafter takes."""
    return drafter.capabilities.cost(drafter)


def has_weights(drafter: Drafter) -> bool:
    """Return whether the drafter has parameters of its own."""
    return any(True for _ in drafter.parameters())


def prefill_prompts(
    drafter: nn.Module | None, context: Context, tokens: Tensor, lengths: Tensor
) -> Features:
    """Run prompts [B, T] into the empty cache, as the drafter does it or else without additions."""
    if isinstance(drafter, Drafter) and (prefill := drafter.capabilities.prefill) is not None:
        return prefill(drafter, context, tokens, lengths)
    return context.prefill(tokens, lengths)


def adapts_layers(drafter: nn.Module) -> bool:
    """Tell whether the drafter, or one that it contains, changes what single layers of the
    target compute.
    """
    return any(
        module.capabilities.adapts_layers
        for module in drafter.modules()
        if isinstance(module, Drafter)
    )


def find_datastore(drafter: nn.Module) -> Datastore | None:
    """Return the first datastore that the drafter, or one that it contains, copies from."""
    stores = (
        module.capabilities.datastore for module in drafter.modules() if isinstance(module, Drafter)
    )
    return next((store for store in stores if store is not None), None)
