"""Numbers of an evaluation, each defined once.

A round is one draft, one target forward and its acceptance. Acceptance length is the mean number of tokens that a target
forward emits, the bonus token included, pooled over rounds; the token of the prefill belongs to no round, and a last round
that EOS or the limit cut short is left out. Rows decoded together share their batch's seconds: the share of each is the
batch's over the number of rows. A prompt is all turns of one id.
Shapes: P prompts, C columns, R resamples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from spectrain.decoding.generation import ROUND_PARTS, Generation

Floats = NDArray[np.float64]
Interval = list[float] | None
TINY = 1e-9  # a standard error of a log below this is rounding


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
    rounds = [count for turn in turns for count in turn.drafted.complete_round_lengths]
    return float(np.mean(rounds)) if rounds else 1.0


def per_prompt_acceptance(turns: Sequence[Turn]) -> float:
    """The mean over prompts of each prompt's tokens per target forward; a prompt without a whole round has none."""
    return _mean_of_ratios(acceptance_columns(turns))


def histogram(turns: Sequence[Turn]) -> list[int]:
    """Entry k is the number of whole rounds that emitted k + 1 tokens: k drafted ones and the bonus."""
    rounds = [count for turn in turns for count in turn.drafted.complete_round_lengths]
    return [int(number) for number in np.bincount(rounds)[1:]] if rounds else []


def acceptance_by_depth(turns: Sequence[Turn]) -> list[float]:
    """For depth k: of the rounds whose first k - 1 drafted tokens were kept and that drafted a k-th, how many kept it."""
    kept: list[int] = []
    tried: list[int] = []
    for turn in turns:
        generation = turn.drafted
        for count, depth in list(zip(generation.round_lengths, generation.depths))[: len(generation.complete_round_lengths)]:
            for level in range(1, min(depth, count) + 1):
                while len(tried) < level:
                    tried.append(0)
                    kept.append(0)
                tried[level - 1] += 1
                kept[level - 1] += count > level
    return [round(k / n, 4) for k, n in zip(kept, tried)]


def tau_by_convention(turns: Sequence[Turn], chain: bool) -> dict[str, float | None]:
    """Other projects' definitions under their names; all count every round, the cut last one untrimmed, unlike ours.

    spec_bench: tokens per round, bonus in, pooled; ours (pooled) where no round is cut.
    eagle, medusa: the same number, there called tau (new tokens per target forward) and acceleration rate.
    hass: the mean over prompts of accepted + 1; our per-prompt mean where no round is cut.
    gpt_fast: spec_bench's without the bonus, thus 1 less.
    layerskip: drafted tokens kept over tokens drafted, of a `chain` only: of a tree at most one of each depth can be kept.
    """
    tokens = sum(sum(turn.drafted.round_lengths) for turn in turns)
    rounds = sum(len(turn.drafted.round_lengths) for turn in turns)
    drafted = sum(sum(turn.drafted.depths) for turn in turns)
    per_round = round(tokens / rounds, 4) if rounds else 1.0
    every_round = _per_prompt(turns, lambda turn: (sum(turn.drafted.round_lengths), len(turn.drafted.round_lengths)))
    return {
        "spec_bench": per_round,
        "eagle": per_round,
        "medusa": per_round,
        "hass": round(_mean_of_ratios(every_round), 4),
        "gpt_fast": round(per_round - 1, 4),
        "layerskip": round((tokens - rounds) / drafted, 4) if chain and drafted else None,
    }


def tokens_per_second(generations: Sequence[Generation]) -> float:
    """Decoded tokens of all rows, up to EOS or the limit and without the prefill's, over decoding time."""
    seconds = sum(_decode_share(generation) for generation in generations)
    return sum(_decoded(generation) for generation in generations) / seconds if seconds else 0.0


def per_user_tokens_per_second(generations: Sequence[Generation]) -> float:
    """The mean over rows of a row's own decoded tokens over the undivided time until its last round ended."""
    rates = [_decoded(generation) / generation.finish_seconds for generation in generations if generation.finish_seconds]
    return float(np.mean(rates)) if rates else 0.0


def speedup(turns: Sequence[Turn]) -> float:
    """Drafted over autoregressive tokens/s of the same engine on the same prompts."""
    base = tokens_per_second([turn.autoregressive for turn in turns])
    return tokens_per_second([turn.drafted for turn in turns]) / base if base else 0.0


def predicted_speedup(turns: Sequence[Turn]) -> float:
    """Acceptance length times a row's share of an autoregressive step over that of a round's draft, verify and accept."""
    steps = sum(len(turn.autoregressive.round_lengths) for turn in turns)
    rounds = sum(len(turn.drafted.round_lengths) for turn in turns)
    if not steps or not rounds:
        return 0.0
    step = sum(_decode_share(turn.autoregressive) for turn in turns) / steps
    cycle = sum(_share(turn.drafted, part) for turn in turns for part in ("draft", "verify", "accept")) / rounds
    return pooled_acceptance(turns) * step / cycle


def time_share(turns: Sequence[Turn]) -> dict[str, float]:
    """What part of the drafted decoding time each step of a round took."""
    seconds = {part: sum(_share(turn.drafted, part) for turn in turns) for part in ROUND_PARTS}
    total = sum(seconds.values()) or 1.0
    return {part: round(value / total, 4) for part, value in seconds.items()}


def acceptance_interval(turns: Sequence[Turn]) -> Interval:
    """The 95 % confidence interval of `pooled_acceptance`, over draws of prompts."""
    found = interval(acceptance_columns(turns), (1, -1))
    return None if found is None else [max(1.0, end) for end in found]  # a forward emits a token at least


def speedup_interval(turns: Sequence[Turn]) -> Interval:
    """The 95 % confidence interval of `speedup`, over draws of prompts."""
    return interval(speed_columns(turns), (1, -1, -1, 1))


def speed_columns(turns: Sequence[Turn]) -> Floats:
    """Each prompt's decoded tokens and seconds, drafted, then autoregressive [P, 4]."""

    def row(turn: Turn) -> tuple[float, ...]:
        pair = (turn.drafted, turn.autoregressive)
        return tuple(value for generation in pair for value in (_decoded(generation), _decode_share(generation)))

    return _per_prompt(turns, row)


def interval(columns: Floats, signs: Sequence[int], draws: int = 2000) -> Interval:
    """The 95 % confidence interval of the product over columns [P, C] of (the column's sum) ** (its sign, 1 or -1).

    Bootstrap-t on the log scale (Efron and Tibshirani, 1993, section 12.5): prompts are resampled with a fixed seed and each
    resample's error is measured in its own standard error. scipy.stats.bootstrap has no such interval, and its BCa covers too
    little: of 300 evaluations of 8, 20 and 40 prompts 90, 90 and 96 %, where this one covers 94, 95 and 97 %. Below 8 prompts,
    or where resamples have no spread, Student's t takes its place. It never leaves the range of the resamples, as it would
    where one prompt took most of the time: something else ran on the machine then, and no interval mends that. None below 2
    prompts or where a sum is 0; the value itself where prompts do not differ.
    A prompt of zeros only (without a round) says nothing and is not counted.
    """
    columns = columns[columns.any(-1)]
    prompts = len(columns)
    if prompts < 2 or not columns.sum(0).all():
        return None
    sign = np.asarray(signs, dtype=np.float64)
    value, error = (float(part[0]) for part in _log_statistic(columns, sign, np.ones((1, prompts))))
    low = high = float(stdtrit(prompts - 1, 0.975))
    least, most = -np.inf, np.inf
    if prompts >= 8 and error > TINY:
        weights = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), draws).astype(np.float64)
        values, errors = _log_statistic(columns, sign, weights[(weights @ columns).all(1)])
        if np.mean(errors > TINY) > 0.99:
            scores = (values - value)[errors > TINY] / errors[errors > TINY]
            high, low = np.quantile(scores, [0.975, 0.025]) * (1, -1)
            least, most = values.min(), values.max()
    # a resample that errs upwards says that the truth lies below, so the upper score gives the lower end
    ends = np.clip([value - high * error, value + low * error], least, most)
    return [round(float(np.exp(end)), 4) for end in ends]


def _log_statistic(columns: Floats, sign: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """The log statistic and its standard error [R] of resamples that take prompts `weights` [R, P] times."""
    prompts = len(columns)
    means = weights @ columns / prompts  # [R, C]
    influence = (sign / means) @ columns.T - sign.sum()  # [R, P]
    variance = (weights * influence**2).sum(1) / (prompts * (prompts - 1))
    return np.log(means) @ sign, np.sqrt(variance)


def _per_prompt(turns: Sequence[Turn], row: Callable[[Turn], tuple[float, ...]]) -> Floats:
    """The sum of each prompt's rows [P, C], in the order of ids: turns of one prompt are not independent."""
    rows: dict[str, list[tuple[float, ...]]] = {}
    for turn in turns:
        rows.setdefault(turn.id, []).append(row(turn))
    return np.array([np.sum(rows[name], axis=0) for name in sorted(rows)], dtype=np.float64)


def acceptance_columns(turns: Sequence[Turn]) -> Floats:
    """Tokens and number of each prompt's whole rounds [P, 2]."""
    return _per_prompt(turns, lambda turn: (sum(turn.drafted.complete_round_lengths), len(turn.drafted.complete_round_lengths)))


def _mean_of_ratios(columns: Floats) -> float:
    """The mean over prompts that have a round of tokens per round."""
    columns = columns[columns[:, 1] > 0] if len(columns) else columns
    return float(np.mean(columns[:, 0] / columns[:, 1])) if len(columns) else 1.0


def _decoded(generation: Generation) -> int:
    """Tokens kept, without the prefill's."""
    return len(generation.output) - 1


def _share(generation: Generation, part: str) -> float:
    """One row's share of its batch's seconds in a part of the round."""
    return generation.seconds[part] / generation.batch_size


def _decode_share(generation: Generation) -> float:
    """One row's share of its batch's decoding time, the prefill left out."""
    return generation.decode_seconds / generation.batch_size
