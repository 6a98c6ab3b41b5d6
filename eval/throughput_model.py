"""The throughput model of the surveys (Leviathan et al., 2023, theorem 3.8): what a chain promises
from the rate at which its tokens are accepted and from the time of a draft token.

With alpha, the rate at which a draft token is accepted whose predecessors were; gamma, the draft
tokens of a round; and c, the time of a draft token in steps of the target, a round emits

    E[N] = (1 - alpha^(gamma + 1)) / (1 - alpha)

tokens, and takes gamma c + 1 steps if verifying costs what a step costs:

    V_SD = E[N] / (gamma c + 1).

Where drafts have several lengths, E[N] is averaged over the rounds, and gamma is their mean. Then
no length is called the best: something else decides how much a round drafts, such as what can be
copied or the drafter's confidence, and alpha holds for the drafts that it chose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from spectrain.eval.metrics import Turn, count_judged_tokens, measure_step, sum_shares

MAX_LENGTH = 32
"""Longest chain that is searched for the best length, in tokens."""
RARE = 0.05
"""Share of rounds that may draft nothing in a chain of one length."""


@dataclass(frozen=True)
class ThroughputModel:
    """The model's numbers of one chain, and the length that it recommends."""

    # Rate at which a draft token is accepted, of those whose predecessors were.
    alpha: float
    # Seconds of a draft token over those of an autoregressive step.
    c: float
    # Draft tokens of a round, averaged over rounds.
    gamma: float
    # Tokens of a round, E[N], and the speedup V_SD, both by the model.
    expected_tokens: float
    speedup: float
    # The length with the largest V_SD, and that V_SD; 0 and 1 where no length gains, and None where
    # drafts have several lengths.
    best_gamma: int | None
    best_speedup: float | None


def expect_tokens(alpha: float, gamma: int) -> float:
    """Return E[N], the tokens that a round emits, the bonus token included."""
    return sum(alpha**k for k in range(gamma + 1))


def expect_speedup(alpha: float, c: float, gamma: int) -> float:
    """Return V_SD, the speedup of a chain of `gamma` tokens over decoding without a drafter."""
    return expect_tokens(alpha, gamma) / (gamma * c + 1)


def choose_length(alpha: float, c: float) -> tuple[int, float]:
    """Return the length of a chain with the largest V_SD, and that V_SD; no draft at all is a chain
    of length 0.
    """
    speedups = [expect_speedup(alpha, c, gamma) for gamma in range(MAX_LENGTH + 1)]
    best = max(range(len(speedups)), key=speedups.__getitem__)
    return best, speedups[best]


def have_equal_lengths(depths: Sequence[int]) -> bool:
    """Tell whether all drafts have the same length, but for a few rounds that drafted nothing."""
    drafted = [depth for depth in depths if depth]
    return len({*drafted}) == 1 and len(drafted) >= (1 - RARE) * len(depths)


def fit_throughput_model(turns: Sequence[Turn]) -> ThroughputModel | None:
    """Return the model's numbers of a chain; None where nothing was drafted, or where the parts
    of a round were not timed, as by a server.

    alpha is pooled over all depths: accepted tokens over tokens that were judged.
    """
    accepted, tried = map(sum, count_judged_tokens(turns))
    step = measure_step(turns)
    draft = sum_shares(turns, "draft")
    if not tried or not step or not draft:
        return None
    depths = [depth for turn in turns for depth in turn.drafted.depths]
    alpha = accepted / tried
    c = draft / sum(depths) / step
    gamma = sum(depths) / len(depths)
    tokens = sum(expect_tokens(alpha, depth) for depth in depths) / len(depths)
    best, best_speedup = choose_length(alpha, c) if have_equal_lengths(depths) else (None, None)
    return ThroughputModel(
        round(alpha, 4),
        round(c, 4),
        round(gamma, 4),
        round(tokens, 4),
        round(tokens / (gamma * c + 1), 4),
        best,
        None if best_speedup is None else round(best_speedup, 4),
    )
