"""Drafters that contain other drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from spectrain.config.build import GroupSpec
from spectrain.drafters.base import Drafter, Losses, Stage, TrainingState, drafting_cost
from spectrain.drafters.capabilities import Capabilities, DraftingCost
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder


class InnerCost(DraftingCost):
    """The cost of the drafter `inner` of another one."""

    def extra_nodes(self, builder: TreeBuilder) -> int:
        return int(drafting_cost(self.drafter.inner).extra_nodes(builder))

    def num_passes(self, depth: float) -> float:
        return float(drafting_cost(self.drafter.inner).num_passes(depth))

    def weights(self, target: Target) -> nn.Module:
        weights: nn.Module = drafting_cost(self.drafter.inner).weights(target)
        return weights

    def first_verified_layer(self) -> int:
        return int(drafting_cost(self.drafter.inner).first_verified_layer())


def wrapper_capabilities(inner: Drafter) -> Capabilities:
    """Return what a drafter around `inner` can do: how it drafts and is trained is the inner
    drafter's; what the inner drafter does by itself, outside of rounds, is not passed on.
    """
    return replace(
        inner.capabilities,
        nestable=False,
        repeated_parts=(),
        draft_model=None,
        prepare_kernels=None,
        capture=None,
        initial_fit=None,
        context_parallel=None,
        search=None,
        datastore=None,
        prefill=None,
        rewind=None,
        at_exit=None,
        cost=InnerCost,
    )


class DrafterWrapper(Drafter):
    """A drafter around another one, `inner`, which its training trains."""

    inner: Drafter

    @property
    def stages(self) -> Sequence[Stage]:
        return self.inner.stages

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        return self.inner.loss(batch, target, state)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        self.inner.prepare(target, token_counts)


def build_inner(
    choice: str | dict[str, Any], key: str, target: Target
) -> tuple[Drafter, dict[str, Any]]:
    """Build the drafter that `drafter.KEY` names, a choice with or without settings, and its
    description for a file.
    """
    settings: dict[str, Any] = {"choice": choice} if isinstance(choice, str) else choice
    spec = GroupSpec.from_saved("drafter", settings, f"drafter.{key}")
    drafter: Drafter = spec.build(target=target)
    return drafter, {**settings, **drafter.saved.settings}
