"""Greedy decoding that forgives some drafts which are not the target's likeliest token. None is lossless.

Shapes: B batch, N nodes, V vocabulary, W tokens of a window.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.decoding.acceptance.base import AcceptanceRule, Siblings
from spectrain.decoding.acceptance.matching import Greedy
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.trees.token_tree import AcceptedPath, TokenTree


class RelaxedRule(AcceptanceRule):
    """Of a node's children the one is kept that equals the target's likeliest token, else the most forgivable one, if any is
    forgiven; the likeliest token after the last kept node follows. Where nothing is forgiven the output is the greedy one."""

    lossless = False
    on_device = True

    def __init__(self) -> None:
        self.greedy = Greedy()

    @abstractmethod
    def forgiveness_scores(self, tree: TokenTree, features: Features, is_correct: Tensor) -> Tensor:
        """How forgivable each node [B, N] is, not at all at 0 or below. `right` [B, N] says which equal the likeliest token
        after their parent; of these nothing is asked."""

    def accept(self, tree: TokenTree, features: Features, sequence_ids: Tensor, positions: Tensor) -> AcceptedPath:
        if tree.tokens.shape[1] > 1:
            self.check_children(tree.children, not self.chains_only or tree.is_chain)
        assert features.logits is not None
        choice = self.choose_tokens(features.logits, sequence_ids, positions)
        real, above = tree.valid & tree.can_emit, tree.parents.clamp(min=0)
        right = real & (tree.parents >= 0) & (tree.tokens == choice.gather(1, above))
        merit = self.forgiveness_scores(tree, features, right).masked_fill(~real, 0).masked_fill(right, math.inf)
        path, going = [torch.zeros_like(choice[:, 0])], torch.ones_like(choice[:, 0], dtype=torch.bool)
        counts = torch.ones_like(choice[:, 0])
        for _ in range(tree.max_path_nodes - 1):
            best, child = merit.masked_fill(tree.parents != path[-1][:, None], 0).max(1)
            going = going & (best > 0)
            path.append(torch.where(going, child, path[-1]))
            counts = counts + going
        return AcceptedPath(torch.stack(path, 1), counts, choice.gather(1, path[-1][:, None])[:, 0])

    def __call__(self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> AcceptedPath:
        return self.accept(tree, Features(tree.tokens, (), logits[..., None, :0], logits), sequence_ids, positions)

    def choose_tokens(self, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        return self.greedy.choose_tokens(logits, sequence_ids, positions)

    def target_distribution(self, logits: Tensor) -> Tensor:
        return self.greedy.target_distribution(logits)

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        """Those of the greedy rule, which are the least that they can be: what is forgiven hangs on more than siblings tell."""
        return self.greedy.acceptance_chances(siblings, rate)

    def matching_rule(self) -> AcceptanceRule:
        return self.greedy


class Rollback(RelaxedRule):
    """BiLD's rollback (Kim et al., 2023): back to the first draft that is too far from the target. NOT lossless.

    A draft x stays while the cross-entropy of what the drafter said, -log p(x), is at most `rollback` nats; the first beyond
    is replaced by the target's likeliest token, and what was drafted behind it is dropped. At 0 the output is the greedy one.
    Their fallback, to ask the target once the drafter's likeliest token has less than a chance, is tree=chain tree.stop=CHANCE
    tree.stop_on=token. A draft that is the likeliest token always stays: they would write it anew.
    """

    name = "bild"

    def __init__(
        self,
        # Largest cross-entropy of a draft under the target, in nats, at which the draft is accepted; 0 gives the greedy output.
        rollback: float = 2.0,
    ) -> None:
        super().__init__()
        if not rollback >= 0:
            raise UserError(f"acceptance.rollback={rollback}: use 0 nats or more")
        self.rollback = rollback

    def forgiveness_scores(self, tree: TokenTree, features: Features, is_correct: Tensor) -> Tensor:
        assert features.logits is not None
        above = tree.parents.clamp(min=0)
        log_p = features.logits.float().log_softmax(-1)[
            torch.arange(len(above), device=above.device)[:, None], above, tree.tokens
        ]
        return log_p.exp() * (-log_p <= self.rollback)


class LooseMatch(RelaxedRule):
    """Training-free loose acceptance (FLy, Li et al., 2026, arXiv 2511.22972): what the target says next shows whether a draft
    was wrong. NOT lossless.

    A draft that is not the likeliest token is forgiven where the target was unsure, H(p) / log V > `entropy`, and agrees with
    what follows: the next `window` drafts, which must all be there, are each its likeliest token behind the deviation. With
    entropy 1 nothing is forgiven, and no more than a chain of `window` + 1 drafts can show anything to be.
    """

    name = "loose"
    chains_only = True

    def __init__(
        self,
        # Entropy of the target, as a share of the largest possible, above which a deviating draft may be accepted.
        entropy: float = 0.3,
        # Number of correct drafts that must follow a deviating draft before it is accepted.
        window: int = 6,
    ) -> None:
        super().__init__()
        if not 0 <= entropy <= 1:
            raise UserError(f"acceptance.entropy={entropy}: it is a share; use 0 to 1")
        if window < 1:
            raise UserError(f"acceptance.window={window}: use 1 or more")
        self.entropy, self.window = entropy, window

    def forgiveness_scores(self, tree: TokenTree, features: Features, is_correct: Tensor) -> Tensor:
        assert features.logits is not None
        log_p = features.logits.float().log_softmax(-1)
        doubt = torch.special.entr(log_p.exp()).sum(-1) / math.log(log_p.shape[-1])  # [B, N] after each node
        unsure = doubt.gather(1, tree.parents.clamp(min=0)) > self.entropy
        agreed = (
            F.pad(is_correct[:, 1:], (0, self.window)).unfold(1, self.window, 1).all(-1)
        )  # [B, N] the next W nodes are right
        return (unsure & agreed).float()
