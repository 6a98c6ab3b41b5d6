"""Greedy rules that also accept some drafts that are not the target's most likely token. None is
lossless.

Shapes: B batch, N nodes, V vocabulary, W tokens of a window.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.trees.token_tree import TokenTree
from spectrain_research.shared.relaxed_rule import RelaxedRule


class Rollback(RelaxedRule):
    """BiLD's rollback (Kim et al., 2023): roll back to the first draft that is too far from the
    target. NOT lossless.

    A draft x is accepted while its cross-entropy -log p(x) is at most `rollback` nats. The first
    other draft is replaced by the target's most likely token, and all drafts after it are dropped.
    At 0 the output is the greedy one. The authors' fallback, which calls the target where the
    drafter's most likely token is unlikely, is tree=chain tree.stop=CHANCE tree.stop_on=token.
    Unlike theirs, this rule always accepts the most likely token.
    """

    name = "bild"

    def __init__(
        self,
        # Largest cross-entropy of a draft under the target, in nats, at which the draft is
        # accepted; 0 gives the greedy output.
        rollback: float = 2.0,
    ) -> None:
        super().__init__()
        if not rollback >= 0:
            raise UserError(f"acceptance.rollback={rollback}: use 0 nats or more")
        self.rollback = rollback

    def forgiveness_scores(self, tree: TokenTree, features: Features, is_correct: Tensor) -> Tensor:
        assert features.logits is not None
        parents = tree.parents.clamp(min=0)
        log_p = features.logits.float().log_softmax(-1)[
            torch.arange(len(parents), device=parents.device)[:, None], parents, tree.tokens
        ]
        return log_p.exp() * (-log_p <= self.rollback)


class LooseMatch(RelaxedRule):
    """Training-free loose acceptance (FLy, Li et al., 2026, arXiv 2511.22972): later tokens show
    whether a draft was wrong.

    NOT lossless. A draft that is not the most likely token is forgiven where the target is
    uncertain, H(p) / log V > `entropy`, and agrees with the next `window` drafts, which must exist:
    each is its most likely token after the deviation. With entropy 1 nothing is forgiven, nor in
    chains of `window` drafts or fewer.
    """

    name = "loose"
    chains_only = True

    def __init__(
        self,
        # Entropy of the target, as a share of the largest possible, above which a deviating draft
        # may be accepted.
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
        # [B, N] after each node
        entropy = torch.special.entr(log_p.exp()).sum(-1) / math.log(log_p.shape[-1])
        is_uncertain = entropy.gather(1, tree.parents.clamp(min=0)) > self.entropy
        window_is_correct = (
            F.pad(is_correct[:, 1:], (0, self.window)).unfold(1, self.window, 1).all(-1)
        )  # [B, N] the next W nodes are right
        return (is_uncertain & window_is_correct).float()
