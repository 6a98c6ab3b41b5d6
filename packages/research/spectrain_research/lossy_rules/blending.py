"""Rules that sample from a distribution between the target's p and the drafter's q, to accept more.
None is lossless.

Speculative sampling with any distribution pi instead of p emits pi exactly: each child drawn from q
is accepted with probability min(1, pi / q), else the next one is judged by the normalised max(pi -
q, 0). A rule chooses pi at nodes with drafted children; after a node without children the token is
the target's. V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from spectrain.decoding.acceptance.base import DRAWN_CHILDREN, Siblings, Vector
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.acceptance.sequential import (
    RandomSource,
    SequentialRule,
    VerifiedTree,
    acceptance_ratio,
    normalize_weights,
)
from spectrain.errors import UserError
from spectrain_research.shared.divergence import jensen_shannon

Criterion = Literal["chow", "diff", "opt", "token"]


@dataclass(eq=False)
class BlendingRule(SequentialRule):
    """Recursive rejection sampling towards `blend(p, q)`."""

    lossless = False
    children = DRAWN_CHILDREN

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rejection_rule = RecursiveRejection(*self.sampling_settings)

    @abstractmethod
    def blend_distributions(self, p: Vector, q: Vector) -> Vector:
        """Return the distribution [V] to sample from, between the target's p and the drafter's
        q.
        """

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        def pi(node: int) -> Vector:
            return (
                self.blend_distributions(tree.p(node), tree.q(node))
                if tree.children[node]
                else tree.p(node)
            )

        return self.rejection_rule.select_path(replace(tree, p=pi), random)

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        return self.rejection_rule.acceptance_chances(
            replace(siblings, p=self.blend_distributions(siblings.p, siblings.q)), rate
        )


def total_variation(p: Vector, q: Vector) -> Any:
    """Return TV(p, q), the sum of max(p - q, 0)."""
    return (p - q).clip(0).sum()


@dataclass(eq=False)
class Deferral(BlendingRule):
    """Speculative cascades (Narasimhan et al., 2025, arXiv 2405.19261): q where the drafter can be
    trusted, else p.

    NOT lossless. The rule defers to the target, pi = p, where
      chow:  max q < 1 - alpha
      diff:  max q < max p - alpha
      opt:   max q < max p - alpha TV(p, q), their plug-in estimate of the optimal rule
    and elsewhere pi = q. Token by token (their equation 15), v is the drafter's where p(v) >= (1 -
    alpha) max p:
      token: pi(v) = q(v) [v is the drafter's] + p(v) sum of q over the others.
    A larger alpha leaves more to the drafter; with alpha < -1 the first three criteria leave
    nothing. Both p and q are the sampled distributions: at the rule's temperature, top-k and top-p,
    and at the tree's temperature.
    """

    name = "deferral"

    # Criterion that decides when the target is used instead of the drafter: chow, diff or opt
    # for a whole position, token for each token.
    defer: Criterion = "opt"
    # How much worse than the target the drafter may be; larger values leave more to the
    # drafter.
    alpha: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.alpha):
            raise UserError(
                f"acceptance.alpha={self.alpha}: use a number, as in acceptance.alpha=0.3"
            )

    def blend_distributions(self, p: Vector, q: Vector) -> Vector:
        if self.defer == "token":
            drafted = q * (p >= p.max() * (1 - self.alpha))
            return drafted + p * (1 - drafted.sum())
        if self.defer == "chow":
            least = 1 - self.alpha
        elif self.defer == "diff":
            least = p.max() - self.alpha
        else:
            least = p.max() - self.alpha * total_variation(p, q)
        return q if q.max() >= least else p


@dataclass(eq=False)
class BoundedSampling(BlendingRule):
    """Sampling within a bounded distance of the target (Yin et al., 2024, arXiv 2411.00841). NOT
    lossless.

    pi = p + min(1, bias / TV(p, q)) (q - p), so that TV(pi, p) = min(bias, TV(p, q)) at every
    position, whatever was drafted. A single child is rejected with probability TV(p, q) - TV(pi,
    p). No rule rejects less often with the same bias, because rejection and bias add up to at least
    TV(p, q).
    """

    name = "bounded"

    # Largest total variation distance, from 0 to 1, between the sampled and the target's
    # distribution at a position.
    bias: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.bias <= 1:
            raise UserError(f"acceptance.bias={self.bias}: it is a total variation; use 0 to 1")

    def blend_distributions(self, p: Vector, q: Vector) -> Vector:
        distance = total_variation(p, q)
        share = 1 if distance <= self.bias else self.bias / distance
        return (1 - share) * p + share * q


@dataclass(eq=False)
class Fuzzy(BlendingRule):
    """Fuzzy speculative decoding (Holsman et al., 2025, arXiv 2502.20704), the second stage of
    PyramidSD (Byun et al., 2025, arXiv 2510.12966). NOT lossless.

    pi = q where the Jensen-Shannon divergence of p and q is at most `divergence`, so that every
    draft is accepted there, else pi = p. Where it is larger, the authors reject the draft and draw
    from p; speculative sampling draws from p too, and accepts some drafts. With a divergence of 0
    the output is the target's, with one of log 2 = 0.693 nats, the largest that there is, the
    drafter's wherever it drafts.
    """

    name = "fuzzy"

    # Largest Jensen-Shannon divergence of the target and the drafter, in nats, at which every
    # draft is accepted.
    divergence: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.divergence >= 0:
            raise UserError(f"acceptance.divergence={self.divergence}: use 0 nats or more")

    def blend_distributions(self, p: Vector, q: Vector) -> Vector:
        return q if jensen_shannon(as_tensor(p), as_tensor(q)) <= self.divergence else p


def as_tensor(vector: Vector) -> Tensor:
    """Return a distribution [V] as a tensor; exact fractions are rounded."""
    return vector if isinstance(vector, Tensor) else torch.from_numpy(vector.astype(float))


@dataclass(eq=False)
class Sigmoid(SequentialRule):
    """Speculative sampling with a sigmoid of each logit instead of the softmax (Wagner et al.,
    2024, arXiv 2406.11016).

    NOT lossless, because p' and q' are not normalised. p' = sigmoid((log p - low) / (high - low)),
    q' in the same way. A draft x is accepted with probability min(1, p'(x) / q'(x)); otherwise the
    next token is drawn from the normalised max(p' - q', 0), or from p where that is 0 everywhere.
    With low = 0 and high = 1, p' = p / (1 + p). A larger `high` makes p' and q' more alike and
    accepts more: with the authors' range, -1000 to 1000, nearly everything. low far above 0 with
    high = low + 1 is the lossless limit, where p' is p up to a factor. The authors use the models'
    logits, which equal log p and log q up to a constant. This rule shows the effect on the output;
    the time that the method saves needs a fused kernel.
    """

    name = "sigmoid"
    lossless = False
    children = DRAWN_CHILDREN
    chains_only = True

    # Log-probability that the sigmoid maps to 1/2.
    low: float = 0.0
    # Log-probability that the sigmoid maps to 0.73; it must be above acceptance.low.
    high: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high < math.inf:
            raise UserError(f"acceptance.high={self.high}: use more than acceptance.low={self.low}")

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path = [0]
        while tree.children[path[-1]]:
            node = path[-1]
            (child,) = tree.children[node]
            p = self._apply_sigmoid(tree.p(node))
            q = self._apply_sigmoid(tree.q(node))
            if not random.flip_coin(
                acceptance_ratio(p[tree.tokens[child]], q[tree.tokens[child]]), node
            ):
                return path, random.draw_token(
                    normalize_weights((p - q).clip(0), tree.p(node)), node
                )
            path.append(child)
        return path, random.draw_token(tree.p(path[-1]), path[-1])

    def _apply_sigmoid(self, weights: Tensor) -> Tensor:
        return ((weights.log() - self.low) / (self.high - self.low)).sigmoid()

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        """Return the chance of the first sibling; a chain has only one."""
        p = self._apply_sigmoid(siblings.p)
        q = self._apply_sigmoid(siblings.q)
        return [
            acceptance_ratio(p[token], q[token]) if index == 0 else 0
            for index, token in enumerate(siblings.tokens)
        ]
