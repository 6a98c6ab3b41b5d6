"""Chains of one length for the whole batch, which follows the best row (BASS, Qian et al., 2024,
arXiv 2404.15778).

Shapes: B batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spectrain.trees.base import Prefix, RoundResult, check_settings
from spectrain.trees.chain import Chain
from spectrain.trees.growing import GrowingTree
from spectrain.trees.token_tree import Children


class BatchLengthChain(Chain):
    """A chain whose length l all rows share. It moves after every round by the numbers x of drafts
    that the rows accepted (BASS, algorithm 1):

        l <- min(l + increase, depth)                       if max(x) = l
        l <- max(1, max(x), l - ceil(l / shrink) - s)       else

    s is 1 if the round before shrank l too, and 0 otherwise, so that a run of bad rounds shrinks it
    faster. Every decoding begins with `first`. Where the drafter or a text's end allows fewer
    tokens, l is the number that was drafted. A length depends on finished rounds alone, so sampled
    chains stay lossless. The rule is written from memory; the paper's text was not at hand.
    """

    name = "bass"

    def __init__(
        self,
        # Draft tokens of a chain at most.
        depth: int = 32,
        # How tokens are chosen: deterministic takes the most likely one, sampled draws one.
        children: Children = "deterministic",
        # Temperature of the distribution that sampled children are drawn from.
        temperature: float = 1.0,
        # Seed of the random draws of children.
        seed: int = 0,
        # Draft tokens of the first round.
        first: int = 7,
        # Tokens added after a round in which a row accepted all drafts.
        increase: int = 2,
        # Part of the length that another round takes away: one token of so many, rounded up.
        shrink: int = 10,
    ) -> None:
        super().__init__(depth, children, temperature, seed)
        check_settings(self, first=(first, 1), increase=(increase, 1), shrink=(shrink, 1))
        self.first = first
        self.increase = increase
        self.shrink = shrink
        self.decides_length = True
        self.traits = replace(self.traits, is_fixed=False)
        self.length = min(first, depth)
        self.has_shrunk = False

    def sampled_variant(self, temperature: float) -> BatchLengthChain:
        return BatchLengthChain(
            self.depth, "sampled", temperature, self.seed, self.first, self.increase, self.shrink
        )

    def report_settings(self) -> dict[str, object]:
        return {**super().report_settings(), "first": self.first}

    def begin_round(self, prefix: Prefix) -> None:
        super().begin_round(prefix)
        if prefix.begins:
            self.length = min(self.first, self.depth)
            self.has_shrunk = False

    def should_draw(self, draft: GrowingTree, level: int) -> Tensor:
        return torch.full_like(self.confidence, level < self.length, dtype=torch.bool)

    def should_run(self, draft: GrowingTree, level: int) -> Tensor:
        return self.should_draw(draft, level + 1)

    def observe(self, round: RoundResult) -> None:
        is_decoding = round.counts > 0
        if bool(is_decoding.any()):
            accepted = int((round.counts - 1)[is_decoding].max())
            drafted = int((round.tree.valid.sum(1) - 1)[is_decoding].max())
            self.move_length(accepted, drafted)

    def move_length(self, accepted: int, drafted: int) -> None:
        """Move the length after a round of so many drafts, of which the best row accepted so
        many.
        """
        if not drafted:
            return
        if accepted == drafted:
            self.length = min(drafted + self.increase, self.depth)
            self.has_shrunk = False
        else:
            shrunk = drafted - -(-drafted // self.shrink) - int(self.has_shrunk)
            self.length = max(1, accepted, shrunk)
            self.has_shrunk = True
