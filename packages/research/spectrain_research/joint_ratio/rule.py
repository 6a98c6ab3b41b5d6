"""Rules of recommenders and of joint decoding that accept more than the most likely token. Neither
is lossless.

Shapes: B batch, N nodes, P path, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.shared.path_scores import score_nodes, score_paths
from spectrain_research.shared.relaxed_rule import LossyGreedyRule


class DeepestPathRule(LossyGreedyRule):
    """Accepts the deepest node that a subclass marks, and of equally deep ones the likeliest path;
    the target's most likely token follows. All tokens before an accepted node are accepted."""

    on_device = True

    @abstractmethod
    def mark_nodes(self, tree: TokenTree, log_p: Tensor, path_log_p: Tensor) -> Tensor:
        """Mark the nodes [B, N] that a path may end in, from log p [B, N] of every node and of
        the path to it.
        """

    def __call__(
        self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        log_p = score_nodes(tree, logits.float().log_softmax(-1))
        path_log_p = score_paths(tree, log_p)
        is_real = (tree.valid & tree.can_emit)[:, None].logical_or(~tree.ancestors).all(-1)
        marked = self.mark_nodes(tree, log_p, path_log_p) & is_real
        marked[:, 0] = True
        depths = tree.depths.masked_fill(~marked, -1)
        is_deepest = depths == depths.amax(1, keepdim=True)
        last = path_log_p.masked_fill(~is_deepest, -math.inf).argmax(1)
        on_path = tree.ancestors.gather(1, last[:, None, None].expand(-1, 1, tree.tokens.shape[1]))[
            :, 0
        ]
        counts = on_path.sum(1)
        path = on_path.long().argsort(dim=1, descending=True, stable=True)[:, : tree.max_path_nodes]
        steps = torch.arange(path.shape[1], device=path.device)
        path = torch.where(steps < counts[:, None], path, last[:, None])
        choice = self.choose_tokens(logits, sequence_ids, positions)
        return AcceptedPath(path, counts, choice.gather(1, last[:, None])[:, 0])


class JointRatio(DeepestPathRule):
    """The joint-ratio rule of MTAD (Qin et al., 2024, arXiv 2407.09722): NOT lossless.

    Accept the longest draft x_1..x_i whose joint probability under the target is at least
    `threshold` of the drafter's: prod p(x_j) / q(x_j) > threshold. A later token can make up for an
    unlikely one. The authors draft by beam search of the drafter, which is tree=beam.
    """

    name = "joint"

    def __init__(
        self,
        # Ratio of the target's joint probability to the drafter's above which a draft is accepted.
        threshold: float = 0.5,
    ) -> None:
        super().__init__()
        if not threshold > 0:
            raise UserError(f"acceptance.threshold={threshold}: use more than 0")
        self.threshold = threshold

    def mark_nodes(self, tree: TokenTree, log_p: Tensor, path_log_p: Tensor) -> Tensor:
        if tree.tokens.shape[1] == 1:
            return torch.ones_like(tree.valid)
        if tree.scores is None:
            raise UserError(
                "acceptance=joint: it weighs the target's probability of a draft against the "
                "drafter's, and copies have none; use drafter=causal, eagle3 or medusa"
            )
        return path_log_p - tree.scores > math.log(self.threshold)


class RankMatch(DeepestPathRule):
    """Relaxed verification of DARE (Xi et al., 2024, arXiv 2408.05676): NOT lossless.

    A draft is accepted if it is among the target's `top_k` most likely tokens and at least `least`
    likely, and all drafts before it are. With a top_k of 1 and a least of 0 the output is the
    greedy one.
    """

    name = "rank"

    def __init__(
        self,
        # Number of the target's most likely tokens that a draft must be among.
        top_k: int = 3,
        # Probability that the target must give a draft.
        least: float = 0.05,
    ) -> None:
        super().__init__()
        if top_k < 1:
            raise UserError(f"acceptance.top_k={top_k}: use 1 or more")
        if not 0 <= least < 1:
            raise UserError(
                f"acceptance.least={least}: it is a probability; use 0 or more and less than 1"
            )
        self.top_k, self.least = top_k, least

    def __call__(
        self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        likely = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).indices
        after_parent = likely.gather(
            1, tree.parents.clamp(min=0)[..., None].expand(-1, -1, likely.shape[-1])
        )
        self.is_likely = (after_parent == tree.tokens[..., None]).any(-1)
        return super().__call__(tree, logits, sequence_ids, positions)

    def mark_nodes(self, tree: TokenTree, log_p: Tensor, path_log_p: Tensor) -> Tensor:
        is_allowed = self.is_likely & (log_p.exp() >= self.least)
        is_allowed[:, 0] = True
        return (is_allowed[:, None] | ~tree.ancestors).all(-1)
