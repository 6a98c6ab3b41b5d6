"""A tree of width one. Shapes: B batch, V draft vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.errors import UserError

from .base import Prefix, TreeBuilder, TreeTraits, check_settings
from .growing import GrowingTree
from .rollout import Rollout
from .token_tree import Children, TokenTree


class Chain(TreeBuilder):
    """A chain of up to `depth` draft tokens: the most likely ones or, with children=sampled,
    sampled ones.

    With `stop`, a row ends before a token whose acceptance probability is below it. That is the
    product of the largest q along the path or, with stop_on=token, the largest q after the path
    alone (the second exit of Kangaroo, Liu et al., 2024; the fallback of BiLD, Kim et al., 2023).
    With stop_on=path, a drafter that predicts the acceptance probability c itself gives c instead
    of the largest q, so that stop=1-h is the rule of SpecDec++ (Huang et al., 2024): the chain ends
    where 1 - prod(c) > h. The decision does not depend on the token, so sampled chains stay
    lossless; discarding a sampled token would not.
    """

    name = "chain"
    traits = TreeTraits(is_chain=True, verifies_all=True)

    def __init__(
        self,
        # Draft tokens of a chain at most.
        depth: int = 3,
        # How tokens are chosen: deterministic takes the most likely one, sampled draws one.
        children: Children = "deterministic",
        # Temperature of the distribution that sampled children are drawn from.
        temperature: float = 1.0,
        # Seed of the random draws of children.
        seed: int = 0,
        # A chain ends before a token whose acceptance probability is below this threshold; 0 always
        # drafts the full depth.
        stop: float = 0.0,
        # What the threshold stop is compared with: the product of acceptance probabilities along
        # the path (path), or the drafter's largest probability of the next token alone (token).
        stop_on: Literal["path", "token"] = "path",
    ) -> None:
        self.depth = depth
        self.children = children
        self.temperature = temperature
        self.seed = seed
        self.stop = stop
        self.stop_on = stop_on
        check_settings(self, depth=(depth, 1))
        if not 0 <= stop < 1:
            raise UserError(f"tree.stop={stop}: use 0 or more and less than 1")
        self.budget = depth + 1
        self.max_drafted = depth - 1
        self.decides_length = bool(stop)  # whether a row may end before its depth
        self.traits = replace(self.traits, is_fixed=not self.decides_length)
        self.confidence = torch.ones(0)  # [B] of this round's paths

    def sampled_variant(self, temperature: float) -> Chain:
        return Chain(self.depth, "sampled", temperature, self.seed, self.stop, self.stop_on)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        tree = GrowingTree(self, prefix, rollout)
        depth = rollout.limit_depth(self.depth)
        is_open = torch.ones_like(tree.tokens[:, 0], dtype=torch.bool)
        if self.decides_length:
            self.begin_round(prefix)
        for level in range(depth):
            if self.decides_length:
                is_open = is_open & self.should_draw(tree, level)
            if rollout.stop_mask is not None:
                is_open = is_open & ~rollout.stop_mask[:, 0]
            if (self.decides_length or rollout.stop_mask is not None) and not is_open.any():
                break
            tree.add_children(1, is_open[:, None, None] if self.decides_length else None)
            if self.decides_length:
                is_open = is_open & self.should_run(tree, level)
            if level + 1 == depth or (self.decides_length and not is_open.any()):
                break
            tree.extend_best(1)
        return tree.select_all()

    def begin_round(self, prefix: Prefix) -> None:
        """Reset the state of a round; called before its first token."""
        self.confidence = torch.ones(len(prefix.root), device=prefix.root.device)

    def should_draw(self, draft: GrowingTree, level: int) -> Tensor:
        """Mark the rows [B] that draft one more token after `level` others; decided before it is
        drawn.
        """
        accept_probs = draft.rollout.accept_probs
        if accept_probs is not None and self.stop_on == "path":
            self.confidence = self.confidence * accept_probs[:, 0]
            return self.confidence >= self.stop
        largest = (draft.log_q[:, 0] / self.temperature).softmax(-1).amax(-1)
        self.confidence = largest if self.stop_on == "token" else self.confidence * largest
        return self.confidence >= self.stop

    def should_run(self, draft: GrowingTree, level: int) -> Tensor:
        """Mark the rows [B] whose newest token, after `level` others, the drafter runs to draft
        another one.
        """
        return torch.ones_like(self.confidence, dtype=torch.bool)
