"""Whether a measured speedup can be believed: what else ran on the machine shows in the times.

A drafted round takes no less time than an autoregressive step, for it runs the same layers over no fewer tokens. So a speedup
above the tokens a forward cannot be: something slowed the steps that it is measured against.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spectrain.eval import metrics
from spectrain.eval.metrics import Turn

UNSTEADY = 0.15  # spread of the steps' times from turn to turn above which every pair is decoded again
DISTURBED = 0.3  # spread above which the speedup is not to be quoted
ENOUGH = 8  # turns below which a spread says little, and an interval is wide for want of prompts
SLACK = 1.01  # a ratio of times is not exact


@dataclass(frozen=True)
class Noise:
    """What the times of an evaluation, and the machine, say about each other."""

    spread: float  # of the autoregressive steps' mean time from turn to turn, in logarithms: 0.1 is about 10 %
    load: float | None  # processes that wanted to run in the last minute, over the machine's cores; None on an accelerator
    repeats: int = 1  # how often every pair was decoded; from 2 on the speedup is made of pairs decoded round by round in turn

    @property
    def reasons(self) -> list[str]:
        """Why no speedup of this evaluation is to be quoted."""
        found = []
        if self.spread > DISTURBED:
            found.append(f"autoregressive steps took times that spread by {self.spread:.0%} from answer to answer")
        if self.load is not None and self.load > 1.25:
            found.append(f"{self.load:.1f} processes a core wanted to run")
        return found

    def summary(self) -> dict[str, Any]:
        load = None if self.load is None else round(self.load, 2)
        return {"baseline_spread": round(self.spread, 4), "load": load, "repeats": self.repeats}


def load_of(device: torch.device) -> float | None:
    """The machine's load of the last minute over its cores, one process of slack left out; None where it decides little."""
    if device.type != "cpu" or not hasattr(os, "getloadavg"):
        return None
    return max(0.0, os.getloadavg()[0] - 1) / (os.cpu_count() or 1)


def spread(turns: Sequence[Turn]) -> float:
    """How much the mean time of an autoregressive step differs from turn to turn: the standard deviation of its logarithm."""
    steps = [
        one.autoregressive.finish_seconds / len(one.autoregressive.round_seconds)
        for one in turns
        if one.autoregressive.round_seconds
    ]
    return float(np.std(np.log(steps))) if len(steps) > 1 and min(steps) > 0 else 0.0


def most_possible(turns: Sequence[Turn]) -> float:
    """The speedup if a drafted round took the time of an autoregressive step: decoded tokens a round. Where several prompts
    share a batch the round that ends it counts, so it is the most of any prompt."""
    tokens = [(len(turn.drafted.output) - 1, len(turn.drafted.round_lengths)) for turn in turns if turn.drafted.round_lengths]
    if not tokens:
        return 1.0
    if turns[0].drafted.batch_size > 1:
        return max(count / rounds for count, rounds in tokens)
    return sum(count for count, _ in tokens) / sum(rounds for _, rounds in tokens)


def judge(speedup: dict[str, Any], turns: Sequence[Turn], noise: Noise) -> dict[str, Any]:
    """A system's speedup with what it is at most and whether it can be quoted."""
    most = most_possible(turns)
    found = {**speedup, "at_most": round(most, 4)}
    reasons = list(noise.reasons)
    if not is_possible(found):
        reasons.insert(0, f"it is above {most:.2f} tokens a forward, so something slowed the steps that it is measured against")
    return {**found, "quotable": not reasons, "reason": "; ".join(reasons) or None}


def is_possible(speedup: dict[str, Any]) -> bool:
    """Whether a speedup is no more than its tokens a forward allow; earlier versions did not say what those are."""
    return bool(speedup["ratio"] <= SLACK * speedup.get("at_most", float("inf")))


def is_unsteady(turns: Sequence[Sequence[Turn]]) -> bool:
    """Whether pairs should be decoded again: steps are unsteady or a system's speedup cannot be."""
    if not turns or len(turns[0]) < ENOUGH:
        return False
    return spread(turns[0]) > UNSTEADY or any(metrics.speedup(one) > SLACK * most_possible(one) for one in turns)


def median_pairs(repeats: Sequence[Sequence[Turn]]) -> list[Turn]:
    """Of every turn the pair of runs, decoded one after the other, whose ratio of times is the median."""
    found = []
    for pairs in zip(*repeats, strict=True):
        ranked = sorted(pairs, key=lambda pair: pair.autoregressive.decode_seconds / max(pair.drafted.decode_seconds, 1e-9))
        found.append(ranked[(len(ranked) - 1) // 2])
    return found
