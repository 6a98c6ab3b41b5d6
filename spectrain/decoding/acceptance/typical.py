"""Typical acceptance, a lossy rule: its output does not have the distribution of the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import UserError

from .base import Siblings
from .sequential import RandomSource, SequentialRule, VerifiedTree


def lossy_warning(rule: str) -> str:
    """Return the warning that tables, model cards and chat print for a lossy rule."""
    return f"LOSSY: acceptance={rule} changes the distribution of the target's output"


@dataclass(eq=False)
class TypicalAcceptance(SequentialRule):
    """Typical acceptance (Cai et al., 2024, section 3.3.1): accept tokens that are likely enough to
    the target. NOT lossless.

    A child is accepted where p(x) > min(epsilon, delta exp(-H(p))), H the entropy; the longest
    accepted path wins, then the likeliest. The next token is drawn from p.
    """

    name = "typical"
    lossless = False

    # Probability above which the target always accepts a token.
    epsilon: float = 0.09
    # Factor on exp(-entropy) of the target, which lowers that threshold where the target is
    # unsure.
    delta: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not 0 < value <= 1:
                raise UserError(f"acceptance.{key}={value}: use more than 0 and at most 1")

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        best = (1, 0.0, [0])
        open_paths = [(0.0, [0])]
        while open_paths:
            likelihood, path = open_paths.pop()
            best = max(best, (len(path), likelihood, path))
            p = tree.p(path[-1])
            least = self._min_probability(p)
            for child in tree.children[path[-1]]:
                if (chance := float(p[tree.tokens[child]])) > least:
                    open_paths.append(
                        (likelihood + torch.tensor(chance).log().item(), [*path, child])
                    )
        path = best[2]
        return path, random.draw_token(tree.p(path[-1]), path[-1])

    def _min_probability(self, p: Tensor) -> float:
        """Return the threshold that a token's probability must exceed."""
        entropy = -(p * (p + 1e-5).log()).sum()
        return min(self.epsilon, self.delta * float((-entropy).exp()))

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        """Return 1 for the most likely sibling above the threshold, of equal ones the last, and
        0 for all others.
        """
        chances = [float(siblings.p[token]) for token in siblings.tokens]
        best = max(range(len(chances)), key=lambda index: (chances[index], index))
        return [
            float(index == best and chances[index] > self._min_probability(siblings.p))
            for index in range(len(chances))
        ]
