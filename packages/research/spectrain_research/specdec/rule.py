"""SpecDec's verification: drafts among the target's likeliest tokens, close to the best one, are
accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.trees.token_tree import TokenTree
from spectrain_research.shared.relaxed_rule import RelaxedRule


class TopCandidates(RelaxedRule):
    """SpecDec's verification (Xia et al., 2023, section 3.2). NOT lossless.

    A draft x is accepted where it is one of the target's `candidates` most likely tokens and log
    p(best) - log p(x) is at most `tolerance`. With one candidate, or tolerance 0, the output is the
    greedy one.
    """

    name = "specdec"

    def __init__(
        self,
        # Number of the target's most likely tokens that a draft may be one of.
        candidates: int = 3,
        # Largest distance of a draft from the target's most likely token, in nats.
        tolerance: float = 1.0,
    ) -> None:
        super().__init__()
        if candidates < 1:
            raise UserError(f"acceptance.candidates={candidates}: use 1 or more")
        if not tolerance >= 0:
            raise UserError(f"acceptance.tolerance={tolerance}: use 0 nats or more")
        self.candidates, self.tolerance = candidates, tolerance

    def forgiveness_scores(self, tree: TokenTree, features: Features, is_correct: Tensor) -> Tensor:
        assert features.logits is not None
        rows = torch.arange(len(tree.parents), device=tree.parents.device)[:, None]
        logits = features.logits.float()
        parent_logits = logits[rows, tree.parents.clamp(min=0)]  # [B, N, V]
        best = parent_logits.topk(min(self.candidates, logits.shape[-1]), dim=-1)
        own = parent_logits.gather(-1, tree.tokens[..., None])
        is_close = (own >= best.values[..., -1:]) & (own >= best.values[..., :1] - self.tolerance)
        return ((own - best.values[..., :1]).exp() * is_close)[..., 0]
