"""Early pruning (ProPD, Zhong et al., 2024): branches leave a tree while it is verified.

Shapes: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spectrain.errors import UserError
from spectrain.models.features import Layer
from spectrain.models.partial_forward import PartialForward
from spectrain.trees.token_tree import TokenTree

from .acceptance import AcceptanceRule

if TYPE_CHECKING:
    from spectrain.models.target import Target

    from .loop import Context


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
        self.judged = torch.zeros(0)  # [B] nodes whose children the early exit judged in the last round

    def check(self, rule: AcceptanceRule, target: Target) -> None:
        """Raise where a pruned tree would change the output's distribution, or there is no such layer."""
        if self.layer >= target.num_layers:
            raise UserError(f"eval.prune_layer={self.layer}: {target.name} has {target.num_layers} layers; use fewer")
        if not rule.fixes_choice:
            raise UserError(f"acceptance={rule.name}: it is not valid for pruned trees; use acceptance=greedy or match")

    def __call__(self, context: Context, tree: TokenTree, layers: tuple[Layer, ...]) -> TokenTree:
        """The tree that is left; `context.shallow` then holds its nodes, run through the first layers."""
        if not tree.emitted.all():
            raise UserError("eval.prune_layer: trees of this drafter hold nodes that only draft, which pruning would break")
        shallow = context.shallow or PartialForward(context.target, context.cache, self.layer, layers=layers)
        if self.layer < shallow.exit:
            raise UserError(
                f"eval.prune_layer={self.layer}: this drafter has run the first {shallow.exit} layers to draft; use "
                f"{shallow.exit} or more"
            )
        shallow.deepen(tree, self.layer)
        context.shallow = shallow
        assert shallow.hidden is not None
        above = tree.parents.clamp(min=0)
        hosts = torch.zeros_like(tree.tokens).scatter_add(1, above, (tree.valid & (tree.parents >= 0)).long()) > 0
        self.judged = hosts.sum(1)  # the head is asked there only: it can cost as much as several layers
        order = hosts.long().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(self.judged.max()))]
        states = shallow.hidden[:, :, -1].gather(1, order[..., None].expand(-1, -1, context.target.width))
        logits = context.target.head.logits(context.target.normed(states))
        likely = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).indices
        places = torch.zeros_like(above).scatter(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
        after_parent = likely.gather(1, places.gather(1, above)[..., None].expand(-1, -1, likely.shape[-1]))
        stays = (after_parent == tree.tokens[..., None]).any(-1)
        stays[:, 0] = True
        pruned = tree.select((stays[:, None] | ~tree.ancestors).all(-1) & tree.valid)
        shallow.settle(pruned)
        return pruned

    def settings(self) -> dict[str, int]:
        """What a report says about it."""
        return {"layer": self.layer, "top_k": self.top_k}
