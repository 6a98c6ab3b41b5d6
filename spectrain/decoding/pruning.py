"""Early pruning (ProPD, Zhong et al., 2024): unlikely branches are dropped from a tree during verification.

Shapes: B batch, N nodes, V vocabulary, D target width, T tokens, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectrain.drafters.base import Drafts
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.partial_forward import PartialForward
from spectrain.models.target import Target
from spectrain.trees.base import Draft
from spectrain.trees.token_tree import AcceptedPath, PruningStats, TokenTree

from .acceptance import AcceptanceRule, Greedy
from .loop import decode

ANSWER_TOKENS = 64  # tokens of the target's own answer to each prompt that an early head is fitted on


@dataclass(frozen=True)
class EarlyHead:
    """Predicts the target's logits from a layer's states through rank r: r (D + V) multiply-adds per node instead of D V."""

    down: Tensor  # [D, r]
    up: Tensor  # [V, r]
    bias: Tensor | None  # [V]

    def __call__(self, normed: Tensor) -> Tensor:
        """Return logits [.., V] of normed states [.., D], without the head's scale and cap: only their order is used."""
        logits = normed @ self.down @ self.up.T
        return logits if self.bias is None else logits + self.bias

    @classmethod
    def from_states(cls, normed: Tensor, final: Tensor, head: Tensor, bias: Tensor | None, rank: int) -> EarlyHead:
        """By least squares from normed states [T, D] to what the head [V, D] reads, [T, D]; of that map the `rank` directions
        that move the logits most (reduced-rank regression). The ridge is the states' own mean square: it draws the map to
        the identity, the early exit as it is, where the few tokens do not say otherwise."""
        x, y, width = normed.double(), final.double(), normed.shape[-1]
        one = torch.eye(width, dtype=x.dtype, device=x.device)
        learnt = one + torch.linalg.solve(x.T @ x + x.pow(2).mean() * len(x) * one, x.T @ (y - x))
        gram = (head.float().T @ head.float()).double()
        root = torch.linalg.cholesky(gram + 1e-6 * gram.diagonal().mean() * one)
        best = torch.linalg.svd(x @ learnt @ root, full_matrices=False).Vh[:rank].T
        back = torch.linalg.solve(root.T, best)  # undoes the root
        return cls((learnt @ root @ best).to(head.dtype), head @ back.to(head.dtype), bias)


def fit_early_heads(target: Target, prunings: Sequence[Pruning], prompts: list[list[int]], rank: int) -> None:
    """Fit a head of this rank for each pruning on the target's own answers to prompts. The target's head stays in use where it
    predicts the target's token more often, on every fourth answer, which is left out of the fit."""
    answers = decode(target, prompts, Greedy(), ANSWER_TOKENS)
    layers = tuple({pruning.layer for pruning in prunings})
    read: list[tuple[dict[int, Tensor], Tensor]] = []
    for answer in answers:
        seen = target.features(torch.tensor([answer.prompt + answer.output], device=target.device), (*layers, "final"))
        read.append(({layer: target.apply_final_norm(seen.at_layer(layer))[0] for layer in layers}, seen.at_layer("final")[0]))
    taught = [pair for number, pair in enumerate(read) if number % 4 or len(read) == 1]
    final, projection = torch.cat([final for _, final in taught]), target.head.projection
    heads = {
        layer: EarlyHead.from_states(
            torch.cat([states[layer] for states, _ in taught]), final, projection.weight, projection.bias, rank
        )
        for layer in layers
    }
    apart = read[::4]
    wanted = target.head.logits(torch.cat([final for _, final in apart])).argmax(-1, keepdim=True)
    for pruning in prunings:
        states = torch.cat([states[pruning.layer] for states, _ in apart])

        def named(logits_of: Callable[[Tensor], Tensor], pruning: Pruning = pruning, states: Tensor = states) -> int:
            return int((pruning.select_top(logits_of(states)) == wanted).any(-1).sum())

        head = heads[pruning.layer]
        pruning.head = head if named(head) >= named(target.head.logits) else None


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
        self.head: EarlyHead | None = None  # None: the target's own

    def check_settings(self, rule: AcceptanceRule, target: Target) -> None:
        """Raise a UserError where pruning would change the output's distribution, or where the target has no such layer."""
        if self.layer >= target.num_layers:
            raise UserError(f"eval.prune_layer={self.layer}: {target.name} has {target.num_layers} layers; use fewer")
        if not rule.fixes_choice:
            raise UserError(f"acceptance={rule.name}: it is not valid for pruned trees; use acceptance=greedy or match")

    def __call__(self, context: Context, tree: TokenTree) -> TokenTree:
        """Return the pruned tree. `context.partial` then holds its nodes, run through the first layers."""
        if not tree.can_emit.all():
            raise UserError("eval.prune_layer: trees of this drafter hold nodes that only draft, which pruning would break")
        partial = context.partial or PartialForward(context.target, context.cache, self.layer, layers=context.layers)
        if self.layer < partial.exit_layer:
            raise UserError(
                f"eval.prune_layer={self.layer}: this drafter has run the first {partial.exit_layer} layers to draft; use "
                f"{partial.exit_layer} or more"
            )
        partial.run_to_layer(tree, self.layer)
        context.partial = partial
        assert partial.hidden is not None
        likely, judged = self._likely_children(context.target, tree, partial.hidden[:, :, -1])
        above = tree.parents.clamp(min=0)
        after_parent = likely.gather(1, above[..., None].expand(-1, -1, likely.shape[-1]))
        stays = (after_parent == tree.tokens[..., None]).any(-1)
        stays[:, 0] = True
        left = tree.select_nodes((stays[:, None] | ~tree.ancestors).all(-1) & tree.valid)
        partial.align_to_tree(left)
        depth = (tree.depths * (tree.valid & tree.can_emit)).amax(1)
        return replace(left, pruning=PruningStats(depth, tree.valid.sum(1) - left.valid.sum(1), judged))

    def _likely_children(self, target: Target, tree: TokenTree, states: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, K] the tokens that an early exit names after nodes that have children, from their states [B, N, D], and [B]
        how many nodes these are: the head is asked there only, for it can cost as much as several layers."""
        above = tree.parents.clamp(min=0)
        hosts = torch.zeros_like(tree.tokens).scatter_add(1, above, (tree.valid & (tree.parents >= 0)).long()) > 0
        judged = hosts.sum(1)
        order = hosts.long().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(judged.max()))]
        asked = states.gather(1, order[..., None].expand(-1, -1, target.width))
        likely = self.select_top((self.head or target.head.logits)(target.apply_final_norm(asked)))
        places = torch.zeros_like(above).scatter(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
        return likely.gather(1, places[..., None].expand(-1, -1, likely.shape[-1])), judged

    def select_top(self, logits: Tensor) -> Tensor:
        """Return the tokens [.., K] that are not pruned, from logits [.., V]."""
        return logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).indices

    def count_multiply_adds(self, target: Target) -> int:
        """Count the multiply-adds of the early exit at one node."""
        own = target.head.output.weight.numel()
        return own if self.head is None else self.head.down.numel() + self.head.up.numel()

    def report_settings(self) -> dict[str, int]:
        """Return the settings for a report."""
        return {"layer": self.layer, "top_k": self.top_k, "rank": 0 if self.head is None else self.head.down.shape[1]}


class PrunedDrafter:
    """Wraps a drafter and prunes its trees before the rest of the target runs."""

    def __init__(self, drafter: Drafts, pruning: Pruning) -> None:
        self.drafter, self.pruning = drafter, pruning

    def draft(self, context: Context) -> Draft:
        draft = self.drafter.draft(context)

        def complete(tree: TokenTree) -> TokenTree:
            return self.pruning(context, tree if draft.add_mask_nodes is None else draft.add_mask_nodes(tree))

        return replace(draft, add_mask_nodes=complete)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return self.drafter.verify(context, tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        self.drafter.commit(context, accepted)
