"""Early pruning (ProPD, Zhong et al., 2024): branches leave a tree while it is verified.

Shapes: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spectrain.drafters.base import Drafts
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.partial_forward import PartialForward
from spectrain.models.target import Target
from spectrain.trees.base import Draft
from spectrain.trees.token_tree import Accepted, Pruned, TokenTree

from .acceptance import AcceptanceRule


class Pruning:
    """Drop what the first `layer` layers find unlikely before the other layers run: a node whose token is not among the
    `top_k` that an early exit there names after its parent, and all below it.

    Which nodes stay depends on their tokens, so a rule that weighs p against q would be wrong about them. Rules that fix
    the target's own choice beforehand are not: losing a node can shorten a round and never changes its tokens.
    """

    def __init__(self, layer: int, top_k: int) -> None:
        for key, value in (("prune_layer", layer), ("prune_top", top_k)):
            if value < 1:
                raise UserError(f"eval.{key}={value}: use 1 or more")
        self.layer, self.top_k = layer, top_k

    def check(self, rule: AcceptanceRule, target: Target) -> None:
        """Raise where a pruned tree would change the output's distribution, or there is no such layer."""
        if self.layer >= target.num_layers:
            raise UserError(f"eval.prune_layer={self.layer}: {target.name} has {target.num_layers} layers; use fewer")
        if not rule.fixes_choice:
            raise UserError(f"acceptance={rule.name}: it is not valid for pruned trees; use acceptance=greedy or match")

    def __call__(self, context: Context, tree: TokenTree) -> TokenTree:
        """The tree that is left; `context.partial` then holds its nodes, run through the first layers."""
        if not tree.emitted.all():
            raise UserError("eval.prune_layer: trees of this drafter hold nodes that only draft, which pruning would break")
        partial = context.partial or PartialForward(context.target, context.cache, self.layer, layers=context.layers)
        if self.layer < partial.exit:
            raise UserError(
                f"eval.prune_layer={self.layer}: this drafter has run the first {partial.exit} layers to draft; use "
                f"{partial.exit} or more"
            )
        partial.deepen(tree, self.layer)
        context.partial = partial
        assert partial.hidden is not None
        likely, judged = self._likely(context.target, tree, partial.hidden[:, :, -1])
        above = tree.parents.clamp(min=0)
        after_parent = likely.gather(1, above[..., None].expand(-1, -1, likely.shape[-1]))
        stays = (after_parent == tree.tokens[..., None]).any(-1)
        stays[:, 0] = True
        left = tree.select((stays[:, None] | ~tree.ancestors).all(-1) & tree.valid)
        partial.settle(left)
        depth = (tree.depths * (tree.valid & tree.emitted)).amax(1)
        return replace(left, pruned=Pruned(depth, tree.valid.sum(1) - left.valid.sum(1), judged))

    def _likely(self, target: Target, tree: TokenTree, states: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, K] the tokens that an early exit names after nodes that have children, from their states [B, N, D], and [B]
        how many nodes these are: the head is asked there only, for it can cost as much as several layers."""
        above = tree.parents.clamp(min=0)
        hosts = torch.zeros_like(tree.tokens).scatter_add(1, above, (tree.valid & (tree.parents >= 0)).long()) > 0
        judged = hosts.sum(1)
        order = hosts.long().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(judged.max()))]
        asked = states.gather(1, order[..., None].expand(-1, -1, target.width))
        logits = target.head.logits(target.normed(asked))
        likely = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).indices
        places = torch.zeros_like(above).scatter(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
        return likely.gather(1, places[..., None].expand(-1, -1, likely.shape[-1])), judged

    def settings(self) -> dict[str, int]:
        """What a report says about it."""
        return {"layer": self.layer, "top_k": self.top_k}


class PrunedDrafter:
    """A drafter whose trees are pruned before the rest of the target runs."""

    def __init__(self, drafter: Drafts, pruning: Pruning) -> None:
        self.drafter, self.pruning = drafter, pruning

    def draft(self, context: Context) -> Draft:
        draft = self.drafter.draft(context)

        def complete(tree: TokenTree) -> TokenTree:
            return self.pruning(context, tree if draft.complete is None else draft.complete(tree))

        return replace(draft, complete=complete)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return self.drafter.verify(context, tree)

    def commit(self, context: Context, accepted: Accepted) -> None:
        self.drafter.commit(context, accepted)
