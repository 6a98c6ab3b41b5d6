"""Several drafters whose trees are verified together (SpecInfer, Miao et al., 2024, section 3).
Shapes: B batch.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from spectrain.drafters.base import Drafter, drafting_cost
from spectrain.drafters.capabilities import Capabilities, DraftingCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder, WrappedBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.shared.copy_rollout import as_rollout
from spectrain_research.shared.nesting import build_several, union_layers

from .tree import merge_trees

# Distance between the seeds of two drafters, whose draws must be independent.
SEED_STEP = 1_000_003


class UnionCost(DraftingCost):
    drafter: UnionDrafter

    def extra_nodes(self, builder: TreeBuilder) -> int:
        inner: Any = self.drafter.inner
        return (len(inner) - 1) * builder.budget + int(
            max(drafting_cost(drafter).extra_nodes(builder) for drafter in inner)
        )

    def num_passes(self, depth: float) -> float:
        inner: Any = self.drafter.inner
        return float(sum(drafting_cost(drafter).num_passes(depth) for drafter in inner))


class UnionDrafter(Drafter):
    """Each of several drafters grows a tree, and the merged tree is verified.

    A tree with a free shape has `tree.budget` / K nodes of each of K drafters, so that the target
    verifies no more than with one drafter; a chain or a fixed shape is grown by each drafter, so
    that it verifies up to K times as many. Where paths begin alike, they share nodes. Most likely
    children need no new rule; sampled ones need acceptance=specinfer, because the children of a
    node come from several q's.
    """

    saved = SavedFiles(inner=("inner",))
    capabilities = Capabilities(nestable=False, cost=UnionCost)

    def __init__(
        self,
        target: Target,
        # Drafters whose trees are merged: run folders, drafter directories or choices, alone or
        # with settings; null uses ngram and causal.
        inner: list[Any] | None = None,
    ) -> None:
        super().__init__()
        built = build_several(inner, target, "merge")
        self.inner = nn.ModuleList([drafter for drafter, _ in built]).requires_grad_(False)
        self.saved = replace(
            self.saved, settings={"inner": [description for _, description in built]}
        )
        self.layers = union_layers([drafter for drafter, _ in built])

    def draft(self, context: Context) -> Draft:
        builders = [
            self.share_builder(context.builder, number) for number in range(len(self.inner))
        ]
        views = [replace(context, builder=builder, deferred=[]) for builder in builders]
        rollouts = [
            as_rollout(drafter.draft(view), view)  # type: ignore[operator]
            for drafter, view in zip(self.inner, views)
        ]

        def grow_all(root: TokenTree) -> TokenTree:
            trees = [
                builder.expand(context, rollout) for builder, rollout in zip(builders, rollouts)
            ]
            return merge_trees(trees, context.target.head.vocab_size)

        return Draft(add_mask_nodes=grow_all)

    def share_builder(self, builder: TreeBuilder, number: int) -> TreeBuilder:
        """Return the builder of one drafter, with its share of the budget and a seed of its own."""
        while isinstance(builder, WrappedBuilder):
            builder = builder.builder
        if builder.requirements or builder.children not in ("deterministic", "sampled"):
            raise UserError(
                f"tree={builder.name}: drafter=union grows trees of several drafters, which it "
                "cannot measure; use tree=eagle2, or tree=chain with tree.children=sampled and "
                "acceptance=specinfer"
            )
        shared = copy.copy(builder)
        shared.seed = builder.seed + SEED_STEP * number
        if not (builder.traits.is_chain or builder.traits.verifies_all):
            count = len(self.inner)
            shared.budget = (
                1 + (builder.budget - 1) // count + (number < (builder.budget - 1) % count)
            )
        return shared

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        for drafter in self.inner:
            drafter.commit(context, accepted)  # type: ignore[operator]
