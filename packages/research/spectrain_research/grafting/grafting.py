"""Grafting: nodes that the target's first layers expect join a tree while it is verified (FOLD).

Shapes: B batch, N nodes, G grafts of a row, V vocabulary, D target width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.loop import EagerRunner
from spectrain.decoding.session import RoundChange, Session
from spectrain.drafters.base import Drafts
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.partial_forward import PartialForward
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.shared.early_head import EarlyHead
from spectrain_research.shared.path_scores import score_nodes, score_paths


class Grafting(RoundChange):
    """After the first `layer` layers, put the likeliest missing nodes into a tree in place of its
    least likely leaves.

    An early exit at every node names its likeliest next token. Where no child has this token, the
    node could get it as a child. The `count` of these whose paths the exit finds most likely are
    added and run through the first layers. With more `steps`, this is repeated on the tree with its
    grafts, which become sequences. As many leaves, those whose paths it finds least likely, are
    dropped, and all nodes that are left go on together: the other layers run as many as before.
    Rules that fix the target's choice beforehand stay exact: a tree shapes rounds and never changes
    tokens.
    """

    part = "tree"
    setting_name = "eval.graft_layer"

    def __init__(self, layer: int, count: int, steps: int = 1) -> None:
        for key, value in (("graft_layer", layer), ("graft_nodes", count), ("graft_steps", steps)):
            if value < 1:
                raise UserError(f"eval.{key}={value}: use 1 or more")
        self.layer, self.count, self.steps = layer, count, steps
        self.head: EarlyHead | None = None  # None: the target's own
        self.num_grafted = self.num_rounds = self.num_accepted = 0
        self.grafted: Tensor | None = None  # [B, N] nodes of this round that are grafts

    def check_settings(self, rule: AcceptanceRule, target: Target) -> None:
        """Raise a UserError where grafting would change the output's distribution, or where the
        target has no such layer.
        """
        if self.layer >= target.num_layers:
            raise UserError(
                f"eval.graft_layer={self.layer}: {target.name} has {target.num_layers} layers; "
                "use fewer"
            )
        if not rule.fixes_choice:
            raise UserError(
                f"acceptance={rule.name}: it is not valid for grafted trees; use "
                "acceptance=greedy or match"
            )

    def select_top(self, logits: Tensor) -> Tensor:
        """Return the likeliest token [.., 1] of logits [.., V]."""
        return logits.argmax(-1, keepdim=True)

    def __call__(self, context: Context, tree: TokenTree) -> TokenTree:
        """Return the grafted tree. `context.partial` then holds its nodes, run through the first
        layers.
        """
        if not tree.can_emit.all():
            raise UserError(
                f"eval.graft_layer={self.layer}: trees of this drafter hold nodes that only "
                "draft; use another drafter, such as causal or eagle3"
            )
        partial = context.partial or PartialForward(
            context.target, context.cache, self.layer, layers=context.layers
        )
        if self.count * self.steps > context.builder.depth:
            raise UserError(
                f"eval.graft_nodes={self.count}: with eval.graft_steps={self.steps} the cache has "
                f"room for {context.builder.depth} grafts of this tree; use as many or fewer, or "
                "a larger tree.depth"
            )
        if self.layer < partial.exit_layer:
            raise UserError(
                f"eval.graft_layer={self.layer}: this drafter has run the first "
                f"{partial.exit_layer} layers to draft; use {partial.exit_layer} or more"
            )
        partial.run_to_layer(tree, self.layer)
        context.partial = partial
        larger = tree
        is_graft = torch.zeros_like(tree.valid)
        for _ in range(self.steps):
            log_p = self._exit_log_probs(context, partial)
            # The nodes that have run are still in the cache; the grafts follow them.
            context.cache.add_uncommitted(larger.tokens.shape[1])
            context.cache.set_positions(context.positions(larger))
            larger, is_new = add_grafts(larger, log_p, self.count)
            is_graft = torch.cat([is_graft, is_new], dim=1)
            partial.align_to_tree(larger)
        keep = drop_leaves(
            larger, score_paths(larger, score_nodes(larger, log_p)), is_graft, tree.valid.sum(1)
        )
        grafted = larger.select_nodes(keep)
        partial.align_to_tree(grafted)
        self.grafted = is_graft.gather(1, node_order(keep))
        self.num_grafted += int((self.grafted & grafted.valid).sum())
        self.num_rounds += len(tree.tokens)
        return grafted

    def _exit_log_probs(self, context: Context, partial: PartialForward) -> Tensor:
        """Return log p [B, N, V] of the early exit at every node that the first layers have run."""
        assert partial.hidden is not None
        states = context.target.apply_final_norm(partial.hidden[:, :, -1])
        return (self.head or context.target.head.logits)(states).float().log_softmax(-1)

    def record_path(self, accepted: AcceptedPath) -> None:
        """Count the accepted grafts."""
        if self.grafted is not None:
            steps = torch.arange(accepted.path.shape[1], device=accepted.path.device)
            is_real = steps < accepted.counts[:, None]
            self.num_accepted += int((self.grafted.gather(1, accepted.path) & is_real).sum())
            self.grafted = None

    def connect(self, session: Session) -> Callable[[EagerRunner], EagerRunner]:
        """Return what lets a runner verify grafted trees."""
        self.check_settings(session.rule, session.target)

        def wrap_drafter(runner: EagerRunner) -> EagerRunner:
            runner.round_drafter = GraftedDrafter(runner.round_drafter, self)
            return runner

        return wrap_drafter

    def summarize_grafts(self) -> dict[str, Any]:
        """Return the settings and the number of grafts and of accepted grafts per round, warm-up
        included.
        """
        rounds = max(self.num_rounds, 1)
        return {
            "layer": self.layer,
            "graft_nodes": self.count,
            "graft_steps": self.steps,
            "rank": 0 if self.head is None else self.head.down.shape[1],
            "grafts_per_round": round(self.num_grafted / rounds, 4),
            "accepted_per_round": round(self.num_accepted / rounds, 4),
        }


def add_grafts(tree: TokenTree, log_p: Tensor, count: int) -> tuple[TokenTree, Tensor]:
    """Append the likeliest missing children [B, G] to a tree, by log p [B, N, V] of an early
    exit; mark the real ones.
    """
    best = log_p.max(-1)
    parents = tree.parents.clamp(min=0)
    is_child = tree.valid & (tree.parents >= 0)
    is_best = is_child & (tree.tokens == best.indices.gather(1, parents))
    has_best = torch.zeros_like(tree.tokens).scatter_add(1, parents, is_best.long()) > 0
    scores = (score_paths(tree, score_nodes(tree, log_p)) + best.values).masked_fill(
        has_best | ~tree.valid, float("-inf")
    )
    above = scores.topk(min(count, scores.shape[1]), dim=1)
    above_nodes = above.indices
    is_real = above.values > float("-inf")
    tokens = torch.cat([tree.tokens, best.indices.gather(1, above_nodes)], dim=1)
    larger = TokenTree.from_parents(
        tokens,
        torch.cat([tree.parents, above_nodes], dim=1),
        torch.cat([tree.valid, is_real], dim=1),
    )
    if tree.scores is not None:
        child_scores = tree.scores + best.values
        larger = replace(
            larger, scores=torch.cat([tree.scores, child_scores.gather(1, above_nodes)], dim=1)
        )
    return replace(
        larger, height=None if tree.height is None else tree.height + 1, draft_ids=tree.draft_ids
    ), is_real


def drop_leaves(tree: TokenTree, scores: Tensor, is_graft: Tensor, sizes: Tensor) -> Tensor:
    """Mark the nodes [B, N] that stay: all but the least likely drafted leaves, so many that
    `sizes` [B] nodes are left.

    A node goes only after all that hang below it; a graft stays if its parent does.
    """
    keep = tree.valid.clone()
    for _ in range(int((tree.valid.sum(1) - sizes).max())):
        too_large = keep.sum(1) > sizes
        has_child = torch.zeros_like(tree.tokens).scatter_add(
            1, tree.parents.clamp(min=0), (keep & (tree.parents >= 0)).long()
        )
        is_leaf = keep & (has_child == 0) & (tree.parents >= 0)
        drafted = scores.masked_fill(~(is_leaf & ~is_graft), float("inf"))
        any_leaf = scores.masked_fill(~is_leaf, float("inf"))
        has_drafted = (drafted < float("inf")).any(1)
        worst = torch.where(has_drafted, drafted.argmin(1), any_leaf.argmin(1))
        keep[torch.arange(len(keep), device=keep.device)[too_large], worst[too_large]] = False
    return keep


def node_order(keep: Tensor) -> Tensor:
    """Return the indices [B, N'] that `TokenTree.select_nodes` takes the nodes from."""
    return keep.long().argsort(dim=1, descending=True, stable=True)[:, : int(keep.sum(1).max())]


class GraftedDrafter:
    """Wraps a drafter and grafts its trees before the rest of the target runs."""

    def __init__(self, drafter: Drafts, grafting: Grafting) -> None:
        self.drafter, self.grafting = drafter, grafting

    def draft(self, context: Context) -> Draft:
        draft = self.drafter.draft(context)

        def graft_tree(tree: TokenTree) -> TokenTree:
            return self.grafting(
                context, tree if draft.add_mask_nodes is None else draft.add_mask_nodes(tree)
            )

        return replace(draft, add_mask_nodes=graft_tree)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return self.drafter.verify(context, tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        self.grafting.record_path(accepted)
        self.drafter.commit(context, accepted)
