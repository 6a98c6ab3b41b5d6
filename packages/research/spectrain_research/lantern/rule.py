"""LANTERN: speculative sampling that counts a code's neighbours as the code itself. Shapes: V
vocabulary.
"""

from __future__ import annotations

from typing import Any

from spectrain.decoding.acceptance.base import Vector
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.acceptance.sequential import SequentialRule
from spectrain.errors import UserError
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.shared.codebook import Codebook


class NearbyCodes(RecursiveRejection):
    """Relaxed speculative sampling (Jang et al., 2024, LANTERN, section 4). NOT lossless.

    Before a draft x is judged, the mass of its nearest codes moves to it, the nearest first, as
    long as the moved mass stays at most `bound`: p'(x) = p(x) + sum p(neighbours), and p' = 0 at
    these. x is accepted with chance min(1, p'(x) / q(x)), and after a rejection the rest of max(p'
    - q, 0) is judged. p' is within `bound` of p in total variation. With no neighbours, or bound 0,
    this is recursive rejection, which is lossless.
    """

    name = "nearby"
    lossless = False
    on_device = False

    def __init__(
        self,
        # File with the tensors tokens and vectors, or a model's directory, whose embeddings are
        # compared.
        codebook: str,
        # Number of nearest codes whose mass may count for a draft; 0 is lossless.
        neighbours: int = 16,
        # Largest mass that may move to a draft, from 0 to 1.
        bound: float = 0.2,
        # Temperature of the target's distribution; it must be above 0.
        temperature: float = 1.0,
        # Number of most likely target tokens to sample from; 0 uses the whole vocabulary.
        top_k: int = 0,
        # Share of the probability mass to sample from, the most likely tokens first; 1 uses all of
        # it.
        top_p: float = 1.0,
        # Seed of the random draws.
        seed: int = 0,
    ) -> None:
        super().__init__(temperature, top_k, top_p, seed)
        if neighbours < 0 or not 0 <= bound <= 1:
            raise UserError(
                f"acceptance.neighbours={neighbours} bound={bound}: use 0 or more, and a bound "
                "from 0 to 1"
            )
        self.bound = bound
        self.near = (
            Codebook.read(codebook, "acceptance.codebook").nearest_tokens(neighbours)
            if neighbours
            else {}
        )

    def __call__(
        self, tree: TokenTree, logits: Any, sequence_ids: Any, positions: Any
    ) -> AcceptedPath:
        return SequentialRule.__call__(self, tree, logits, sequence_ids, positions)

    def move_mass(self, p: Vector, token: int) -> Vector:
        """Return p with the mass of the token's nearest codes moved to it."""
        moved = p + 0
        mass = 0
        for other in self.near.get(token, ()):
            if mass + p[other] > self.bound:
                break
            mass = mass + p[other]
            moved[other] = 0
        moved[token] = p[token] + mass
        return moved
