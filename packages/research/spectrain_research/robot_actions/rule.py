"""Acceptance of actions near the target's own: a bin beside the right one moves the arm almost
alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.trees.token_tree import TokenTree
from spectrain_research.shared.codebook import Codebook
from spectrain_research.shared.relaxed_rule import RelaxedRule


class NearActions(RelaxedRule):
    """Relaxed acceptance by distance (Spec-VLA; KERV). NOT lossless.

    A draft is accepted where its vector in the codebook is at most `radius` from that of the
    target's most likely token; bins have their own number as vector. The right token wins over near
    ones, and nearer ones over others. At radius 0 the output is the greedy one.
    """

    name = "near"

    def __init__(
        self,
        # File with the tensors tokens and vectors, or a model's directory, whose embeddings are
        # compared.
        codebook: str,
        # Largest distance of a draft from the target's most likely token, in the codebook's units.
        radius: float = 1.0,
    ) -> None:
        super().__init__()
        if not radius >= 0:
            raise UserError(f"acceptance.radius={radius}: use 0 or more")
        self.radius = radius
        self.book = Codebook.read(codebook, "acceptance.codebook")

    def forgiveness_scores(self, tree: TokenTree, features: Features, is_correct: Tensor) -> Tensor:
        assert features.logits is not None
        vocabulary = features.logits.shape[-1]
        index = torch.full((vocabulary,), -1, device=tree.tokens.device)
        has_row = self.book.tokens < vocabulary
        index[self.book.tokens[has_row]] = torch.arange(len(has_row))[has_row]
        choice = features.logits.argmax(-1).gather(1, tree.parents.clamp(min=0))
        own = index[tree.tokens]
        best = index[choice]
        vectors = self.book.vectors.to(tree.tokens.device)
        distance = (vectors[own.clamp(min=0)] - vectors[best.clamp(min=0)]).norm(dim=-1)
        return ((own >= 0) & (best >= 0) & (distance <= self.radius) & (self.radius > 0)) / (
            1 + distance
        )
