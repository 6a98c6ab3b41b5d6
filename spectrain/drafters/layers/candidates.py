"""Drafting from the most likely tokens of each slot, the candidates, which a head ranks: DFlash2
and LiLiCorr.

Shapes: B batch, K drafts of a block, C candidates of a slot, V draft vocabulary, F frontier nodes,
W width.
"""

from __future__ import annotations

from abc import abstractmethod

import torch.nn.functional as F
from torch import Tensor

from spectrain.kernels.linear_divergence import Projection
from spectrain.kernels.row_kl import scale_and_cap
from spectrain.trees.rollout import DepthRollout, gather_by_depth

# Log-probability of tokens that are no candidates; finite, so that 0 times it is 0.
IMPOSSIBLE = -1e4


def candidate_logits(head: Projection, states: Tensor, candidates: Tensor) -> Tensor:
    """Return the logits [.., C] of candidates [.., C], rows of an output layer, at states [..,
    W].
    """
    rows = F.embedding(candidates, head.weight)
    products = (rows @ states.to(rows.dtype)[..., None])[..., 0].float()
    if head.bias is not None:
        products = products + head.bias[candidates]
    return scale_and_cap(products, head.scale, head.softcap)


class CandidateRollout(DepthRollout):
    """A rollout whose distributions have the candidates [B, K, C] of each depth, in draft ids,
    and no other tokens.
    """

    def __init__(self, root: Tensor, candidates: Tensor, draft_ids: Tensor) -> None:
        super().__init__(root, candidates.shape[1])
        self.candidates = candidates
        self.ids = draft_ids
        self.draft_ids = draft_ids
        self.vocab_size = len(draft_ids)

    @abstractmethod
    def score_candidates(self, depth: Tensor, tokens: Tensor) -> Tensor:
        """Return the scores [B, F, C] of the candidates after nodes of depths and tokens [B, F]."""

    def log_probs_at(self, depth: Tensor, tokens: Tensor) -> Tensor:
        log_q = self.score_candidates(depth, tokens).log_softmax(-1)
        every_log_q = log_q.new_full((*tokens.shape, self.vocab_size), IMPOSSIBLE)
        return every_log_q.scatter(-1, gather_by_depth(self.candidates, depth), log_q)
