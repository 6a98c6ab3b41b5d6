"""Whether a measured speedup can be believed: other work on the machine shows in the times.

A drafted round takes at least the time of an autoregressive step, because it runs the same layers
over at least as many tokens. So a speedup above the tokens per forward is impossible: something
slowed the steps that it is measured against.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spectrain.decoding.generation import Generation
from spectrain.eval import metrics
from spectrain.eval.metrics import JudgedSpeedup, Speedup, Turn

# jitter of the steps' times from turn to turn above which every pair is decoded again
UNSTEADY = 0.15
DISTURBED = 0.3  # jitter above which the speedup is not to be quoted
BUSY = 1.25  # load per core above which the speedup is not to be quoted
ENOUGH = 8  # turns below which jitter means little, and an interval is wide for want of prompts
SLACK = 1.01  # a ratio of times is not exact


@dataclass(frozen=True)
class Noise:
    """How steady the times of an evaluation were, and how busy the machine was."""

    # Jitter of the autoregressive steps' mean time from turn to turn, in logarithms: 0.1 is about
    # 10 %.
    jitter: float
    # Processes that were ready to run in the last minute over the machine's cores; None on an
    # accelerator.
    load: float | None
    # How often every pair was decoded; from 2 on, the speedup is made of pairs whose rounds
    # alternate.
    repeats: int = 1
    # Pairs that were disturbed and decoded again, of all.
    repeated_pairs: int = 0

    @property
    def reasons(self) -> list[str]:
        """List the reasons not to quote any speedup of this evaluation."""
        reasons = []
        if self.jitter > DISTURBED:
            reasons.append(
                f"the times of autoregressive steps differ by {self.jitter:.0%} from answer to "
                "answer"
            )
        if self.load is not None and self.load > BUSY:
            reasons.append(f"{self.load:.1f} processes per core were ready to run")
        return reasons

    def summary(self) -> dict[str, Any]:
        """Return the entry `noise` of summary.json."""
        load = None if self.load is None else round(self.load, 2)
        return {
            "baseline_spread": round(self.jitter, 4),
            "load": load,
            "repeats": self.repeats,
            "repeated_pairs": self.repeated_pairs,
        }


def machine_load(device: torch.device) -> float | None:
    """Return the load of the last minute over the cores, this process left out; None where it
    matters little.
    """
    if device.type != "cpu" or not hasattr(os, "getloadavg"):
        return None
    return max(0.0, os.getloadavg()[0] - 1) / (os.cpu_count() or 1)


def baseline_jitter(turns: Sequence[Turn]) -> float:
    """Compute the standard deviation, over turns, of the logarithm of the mean time of an
    autoregressive step.
    """
    runs = [turn.autoregressive for turn in turns if turn.autoregressive.round_seconds]
    steps = [run.finish_seconds / len(run.round_seconds) for run in runs]
    return float(np.std(np.log(steps))) if len(steps) > 1 and min(steps) > 0 else 0.0


def largest_speedup(turns: Sequence[Turn]) -> float:
    """Return the speedup if a drafted round took the time of an autoregressive step: decoded tokens
    per round.

    If several prompts share a batch, the round that ends it counts, so it is the largest of any
    prompt.
    """
    tokens = [
        (len(turn.drafted.output) - 1, len(turn.drafted.round_lengths))
        for turn in turns
        if turn.drafted.round_lengths
    ]
    if not tokens:
        return 1.0
    if turns[0].drafted.batch_size > 1:
        return max(count / rounds for count, rounds in tokens)
    return sum(count for count, _ in tokens) / sum(rounds for _, rounds in tokens)


def judge_speedup(speedup: Speedup, turns: Sequence[Turn], noise: Noise) -> JudgedSpeedup:
    """Add to a speedup the largest possible one, and whether it can be quoted."""
    at_most = largest_speedup(turns)
    reasons = list(noise.reasons)
    if not is_possible({"ratio": speedup.ratio, "at_most": round(at_most, 4)}):
        reasons.insert(
            0,
            f"the measured speedup exceeds the tokens per forward ({at_most:.2f}), which is "
            "impossible; the baseline was disturbed",
        )
    return JudgedSpeedup(
        **vars(speedup),
        at_most=round(at_most, 4),
        quotable=not reasons,
        reason="; ".join(reasons) or None,
    )


def is_possible(speedup: Mapping[str, Any]) -> bool:
    """Tell whether a speedup is within its tokens per forward; an entry that does not name them
    counts as possible.
    """
    return bool(speedup["ratio"] <= SLACK * speedup.get("at_most", float("inf")))


def is_unsteady(turns: Sequence[Sequence[Turn]]) -> bool:
    """Tell whether pairs should be decoded again: the steps are unsteady, or a system's speedup
    is impossible.
    """
    if not turns or len(turns[0]) < ENOUGH:
        return False
    impossible = any(metrics.speedup(system) > SLACK * largest_speedup(system) for system in turns)
    return baseline_jitter(turns[0]) > UNSTEADY or impossible


def find_disturbed(turns: Sequence[Turn]) -> list[int]:
    """Return the turns whose pair of runs was disturbed: a step or a round took longer than in
    quiet turns, or the pair's speedup is impossible.
    """
    slow_steps = _find_slow([_round_seconds(turn.autoregressive) for turn in turns])
    slow_rounds = _find_slow([_round_seconds(turn.drafted) for turn in turns])
    return [
        number
        for number, turn in enumerate(turns)
        if number in slow_steps
        or number in slow_rounds
        or metrics.speedup([turn]) > SLACK * largest_speedup([turn])
    ]


def _round_seconds(generation: Generation) -> float:
    """Return the mean time of a round, in seconds; 0 without one."""
    rounds = len(generation.round_seconds)
    return generation.finish_seconds / rounds if rounds else 0.0


def _find_slow(values: Sequence[float]) -> set[int]:
    """Return the positions of times above the lower quartile by more than steady times differ:
    other work on a machine slows steps down and never speeds them up.
    """
    quiet = float(np.quantile([value for value in values if value > 0] or [0.0], 0.25))
    return {number for number, value in enumerate(values) if value > quiet * math.exp(UNSTEADY)}


def median_pairs(repeats: Sequence[Sequence[Turn]]) -> list[Turn]:
    """Select, for every turn, the pair of runs whose ratio of times is the median of all repeats.

    An even number of pairs has two in the middle: turns take the lower and the upper one in turn,
    so that neither a smaller nor a larger speedup is preferred.
    """
    medians = []
    for number, pairs in enumerate(zip(*repeats, strict=True)):
        ranked = sorted(
            pairs,
            key=lambda pair: (
                pair.autoregressive.decode_seconds / max(pair.drafted.decode_seconds, 1e-9)
            ),
        )
        medians.append(ranked[(len(ranked) - 1 + number % 2) // 2])
    return medians
