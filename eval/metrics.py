"""Numbers of an evaluation, each defined once.

A round is one draft, one target forward and its acceptance. Acceptance length is the mean number of tokens that a target
forward emits, the bonus token included, pooled over rounds; the token of the prefill belongs to no round, and a last round
that EOS or the limit cut short is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.decode import Generation


@dataclass(frozen=True)
class Turn:
    """One prompt's turn, decoded autoregressively and by a drafter."""

    id: str
    turn: int
    category: str
    autoregressive: Generation
    drafted: Generation


def pooled_acceptance(turns: Sequence[Turn]) -> float:
    """Tokens per target forward over all rounds."""
    rounds = [count for turn in turns for count in turn.drafted.whole_rounds]
    return float(np.mean(rounds)) if rounds else 1.0


def per_prompt_acceptance(turns: Sequence[Turn]) -> float:
    """The mean over prompts of each prompt's acceptance length: the definition some papers use."""
    means = [np.mean(turn.drafted.whole_rounds) for turn in turns if turn.drafted.whole_rounds]
    return float(np.mean(means)) if means else 1.0


def acceptance_by_depth(turns: Sequence[Turn]) -> list[float]:
    """For depth k: of the rounds whose first k - 1 drafted tokens were kept and that drafted a k-th, how many kept it."""
    kept: list[int] = []
    tried: list[int] = []
    for turn in turns:
        generation = turn.drafted
        for count, depth in list(zip(generation.accepted, generation.nodes))[: len(generation.whole_rounds)]:
            for level in range(1, min(depth, count) + 1):
                while len(tried) < level:
                    tried.append(0)
                    kept.append(0)
                tried[level - 1] += 1
                kept[level - 1] += count > level
    return [round(k / n, 4) for k, n in zip(kept, tried)]


def tokens_per_second(generations: Sequence[Generation]) -> float:
    """Decoded tokens, up to EOS or the limit and without the prefill's, over decoding time."""
    seconds = sum(generation.decode_seconds for generation in generations)
    return sum(len(generation.output) - 1 for generation in generations) / seconds if seconds else 0.0


def speedup(turns: Sequence[Turn]) -> float:
    """Drafted over autoregressive tokens/s of the same engine on the same prompts."""
    base = tokens_per_second([turn.autoregressive for turn in turns])
    return tokens_per_second([turn.drafted for turn in turns]) / base if base else 0.0


def predicted_speedup(turns: Sequence[Turn]) -> float:
    """Acceptance length times an autoregressive step's time over a round's draft, verify and accept times."""
    steps = sum(len(turn.autoregressive.accepted) for turn in turns)
    rounds = sum(len(turn.drafted.accepted) for turn in turns)
    if not steps or not rounds:
        return 0.0
    step = sum(turn.autoregressive.decode_seconds for turn in turns) / steps
    parts = ("draft", "verify", "accept")
    cycle = sum(turn.drafted.seconds[part] for turn in turns for part in parts) / rounds
    return pooled_acceptance(turns) * step / cycle


def time_share(turns: Sequence[Turn]) -> dict[str, float]:
    """What part of the drafted decoding time each step of a round took."""
    parts = ("draft", "verify", "accept", "other")
    seconds = {part: sum(turn.drafted.seconds[part] for turn in turns) for part in parts}
    total = sum(seconds.values()) or 1.0
    return {part: round(value / total, 4) for part, value in seconds.items()}


def bootstrap(turns: Sequence[Turn], statistic: Callable[[Sequence[Turn]], float], draws: int = 1000) -> list[float]:
    """The 95 % confidence interval of a statistic, by resampling prompts."""
    names = sorted({turn.id for turn in turns})
    by_name = {name: [turn for turn in turns if turn.id == name] for name in names}
    random = np.random.default_rng(0)
    values = []
    for _ in range(draws):
        drawn = random.choice(len(names), len(names))
        values.append(statistic([turn for index in drawn for turn in by_name[names[index]]]))
    low, high = np.percentile(values, [2.5, 97.5])
    return [round(float(low), 4), round(float(high), 4)]
