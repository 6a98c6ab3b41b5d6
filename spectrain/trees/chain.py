"""A tree of width one. Shapes: B batch, V draft vocabulary."""

from __future__ import annotations

from typing import Literal

import torch

from spectrain.errors import UserError

from .base import GrowingTree, Prefix, Rollout, TreeBuilder
from .token_tree import Children, TokenTree


class Chain(TreeBuilder):
    """The drafter's continuation, up to `depth` tokens: its most likely one, or with children=sampled a drawn one.

    With `stop`, a row ends before a token whose chance of being kept is below it: the product of the likeliest q along the
    path or, with stop_on=token, the likeliest q after the path alone (the second exit of Kangaroo, Liu et al., 2024). The
    token itself is not looked at, so drawn chains stay lossless; drawing one and then discarding it would not.
    """

    name = "chain"
    is_chain = True
    keeps_drafted = True

    def __init__(
        self,
        depth: int = 3,
        children: Children = "deterministic",
        temperature: float = 1.0,
        seed: int = 0,
        stop: float = 0.0,
        stop_on: Literal["path", "token"] = "path",
    ) -> None:
        self.depth, self.children, self.temperature, self.seed, self.stop = depth, children, temperature, seed, stop
        self.stop_on = stop_on
        self._check(depth=(depth, 1))
        if not 0 <= stop < 1:
            raise UserError(f"tree.stop={stop}: use 0 or more and less than 1")
        self.budget, self.drafted = depth + 1, depth - 1
        self.is_fixed = not stop

    def drawn(self, temperature: float) -> Chain:
        return Chain(self.depth, "sampled", temperature, self.seed, self.stop, self.stop_on)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        draft = GrowingTree(self, prefix, rollout)
        confidence = torch.ones(len(prefix.root), device=prefix.root.device)
        going = torch.ones_like(prefix.root, dtype=torch.bool)
        depth = self.reach(rollout)
        for level in range(depth):
            likeliest = (draft.log_q[:, 0] / self.temperature).softmax(-1).amax(-1)
            going = going & ((likeliest if self.stop_on == "token" else confidence * likeliest) >= self.stop)
            confidence = confidence * likeliest
            if rollout.closed is not None:
                going = going & ~rollout.closed[:, 0]
            if (self.stop or rollout.closed is not None) and not going.any():
                break
            draft.branch(1, going[:, None, None] if self.stop else None)
            if level + 1 < depth:
                draft.extend(torch.zeros_like(prefix.root)[:, None])
        return draft.subset(torch.arange(draft.tokens.shape[1], device=prefix.root.device).expand_as(draft.tokens))
