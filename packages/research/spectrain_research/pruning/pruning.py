"""Early pruning (ProPD, Zhong et al., 2024): unlikely branches are dropped from a tree during
verification.

Shapes: B batch, N nodes, V vocabulary, D target width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import EagerRunner
from spectrain.decoding.session import RoundChange, Session
from spectrain.drafters.base import Drafts
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.partial_forward import PartialForward
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, PruningStats, TokenTree
from spectrain_research.shared.early_head import EarlyHead


class Pruning(RoundChange):
    """Drop nodes after the first `layer` layers whose token is not among the `top_k` of an early
    exit at their parent.

    All descendants of such a node are dropped too. Which nodes stay depends on their tokens, so a
    rule that weighs p against q would be wrong about them. Rules that fix the target's choice
    beforehand stay exact: losing a node can shorten a round and never changes its tokens.
    """

    part = "tree"
    setting_name = "eval.prune_layer"

    def __init__(self, layer: int, top_k: int) -> None:
        for key, value in (("prune_layer", layer), ("prune_top", top_k)):
            if value < 1:
                raise UserError(f"eval.{key}={value}: use 1 or more")
        self.layer, self.top_k = layer, top_k
        self.head: EarlyHead | None = None  # None: the target's own

    def check_settings(self, rule: AcceptanceRule, target: Target) -> None:
        """Raise a UserError where pruning would change the output's distribution, or where the
        target has no such layer.
        """
        if self.layer >= target.num_layers:
            raise UserError(
                f"eval.prune_layer={self.layer}: {target.name} has {target.num_layers} layers; "
                "use fewer"
            )
        if not rule.fixes_choice:
            raise UserError(
                f"acceptance={rule.name}: it is not valid for pruned trees; use acceptance=greedy "
                "or match"
            )

    def __call__(self, context: Context, tree: TokenTree) -> TokenTree:
        """Return the pruned tree. `context.partial` then holds its nodes, run through the first
        layers.
        """
        if not tree.can_emit.all():
            raise UserError(
                f"eval.prune_layer={self.layer}: trees of this drafter hold nodes that only "
                "draft, which that layer runs too; use another drafter, or an earlier layer with "
                "drafters whose masks start inside the target"
            )
        partial = context.partial or PartialForward(
            context.target, context.cache, self.layer, layers=context.layers
        )
        if self.layer < partial.exit_layer:
            raise UserError(
                f"eval.prune_layer={self.layer}: this drafter has run the first "
                f"{partial.exit_layer} layers to draft; use {partial.exit_layer} or more"
            )
        partial.run_to_layer(tree, self.layer)
        context.partial = partial
        assert partial.hidden is not None
        likely, num_judged = self._likely_children(context.target, tree, partial.hidden[:, :, -1])
        above = tree.parents.clamp(min=0)
        after_parent = likely.gather(1, above[..., None].expand(-1, -1, likely.shape[-1]))
        keep = (after_parent == tree.tokens[..., None]).any(-1)
        keep[:, 0] = True
        pruned = tree.select_nodes((keep[:, None] | ~tree.ancestors).all(-1) & tree.valid)
        partial.align_to_tree(pruned)
        depth = (tree.depths * (tree.valid & tree.can_emit)).amax(1)
        return replace(
            pruned, pruning=PruningStats(depth, tree.valid.sum(1) - pruned.valid.sum(1), num_judged)
        )

    def _likely_children(
        self, target: Target, tree: TokenTree, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens [B, N, K] after nodes that have children, by an early exit
        from their states [B, N, D].

        Also returns the number of these nodes [B]. The head runs on them only: it can cost as much
        as several layers.
        """
        above = tree.parents.clamp(min=0)
        has_children = (
            torch.zeros_like(tree.tokens).scatter_add(
                1, above, (tree.valid & (tree.parents >= 0)).long()
            )
            > 0
        )
        judged = has_children.sum(1)
        order = has_children.long().argsort(dim=1, descending=True, stable=True)[
            :, : max(1, int(judged.max()))
        ]
        parent_states = states.gather(1, order[..., None].expand(-1, -1, target.width))
        likely = self.select_top(
            (self.head or target.head.logits)(target.apply_final_norm(parent_states))
        )
        index = torch.zeros_like(above).scatter(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        return likely.gather(1, index[..., None].expand(-1, -1, likely.shape[-1])), judged

    def select_top(self, logits: Tensor) -> Tensor:
        """Return the tokens [.., K] that are not pruned, from logits [.., V]."""
        return logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).indices

    def count_multiply_adds(self, target: Target) -> int:
        """Count the multiply-adds of the early exit at one node."""
        own = target.head.output.weight.numel()
        return own if self.head is None else self.head.down.numel() + self.head.up.numel()

    def connect(self, session: Session) -> Callable[[EagerRunner], EagerRunner]:
        """Return what lets a runner verify pruned trees."""
        self.check_settings(session.rule, session.target)

        def wrap_drafter(runner: EagerRunner) -> EagerRunner:
            runner.round_drafter = PrunedDrafter(runner.round_drafter, self)
            return runner

        return wrap_drafter

    def summarize(self, answers: Sequence[Generation], target: Target) -> dict[str, Any]:
        """Compute what early pruning saves of verification.

        `node_layers_saved` is the share of node-layers (a node run through one layer), `work_saved`
        the share of all multiply-adds: the head of every node counts, and the early exit's head is
        subtracted.
        """
        pruned = sum(sum(answer.pruned_counts) for answer in answers)
        nodes = pruned + sum(sum(answer.node_counts) for answer in answers)
        judged = sum(sum(answer.judged_counts) for answer in answers)
        count = target.num_layers
        head = target.head.output.weight.numel()
        layer = sum(parameter.numel() for parameter in target.layers.parameters()) / count
        saved = pruned * ((count - self.layer) * layer + head) - judged * self.count_multiply_adds(
            target
        )
        return {
            **self.report_settings(),
            "nodes_pruned": round(pruned / max(nodes, 1), 4),
            "node_layers_saved": round(pruned * (count - self.layer) / max(nodes * count, 1), 4),
            "work_saved": round(saved / max(nodes * (count * layer + head), 1), 4),
        }

    def report_settings(self) -> dict[str, int]:
        """Return the settings for a report."""
        return {
            "layer": self.layer,
            "top_k": self.top_k,
            "rank": 0 if self.head is None else self.head.down.shape[1],
        }


class PrunedDrafter:
    """Wraps a drafter and prunes its trees before the rest of the target runs."""

    def __init__(self, drafter: Drafts, pruning: Pruning) -> None:
        self.drafter, self.pruning = drafter, pruning

    def draft(self, context: Context) -> Draft:
        draft = self.drafter.draft(context)

        def prune_tree(tree: TokenTree) -> TokenTree:
            if draft.add_mask_nodes is None:
                return self.pruning(context, tree)
            if draft.mask_layer >= self.pruning.layer:
                return draft.add_mask_nodes(self.pruning(context, tree))
            return self.pruning(context, draft.add_mask_nodes(tree))

        return replace(draft, add_mask_nodes=prune_tree)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return self.drafter.verify(context, tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        self.drafter.commit(context, accepted)
