"""Tokens per forward of several trainings, and their intervals over seeds and prompts.

A run holds tokens and rounds of each prompt, [P, 2], by the name of a tree. Shapes: S seeds, P
prompts, N resamples.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Run = dict[str, Any]
Floats = NDArray[np.float64]
DRAWS = 4000


def resample_lengths(runs: list[Run], tree: str, prompts: NDArray[np.int64]) -> Floats:
    """Return tokens per forward [N] of resampled seeds and of the resampled prompts [N, P].

    Both are drawn with replacement (the pigeonhole bootstrap of Owen, 2007), which errs on the side
    of wide intervals. Prompts are the caller's, so that two groups of runs are compared over the
    same ones.
    """
    # [S, P, 2]
    columns = np.array(
        [run[tree] for run in sorted(runs, key=lambda run: run["seed"])], dtype=np.float64
    )
    seeds = np.random.default_rng(len(runs)).integers(len(runs), size=(len(prompts), len(runs)))
    sums = columns[seeds[:, :, None], prompts[:, None, :]].sum((1, 2))
    return sums[:, 0] / sums[:, 1]


def resample_prompts(runs: list[Run], tree: str) -> NDArray[np.int64]:
    """Draw indices of prompts with replacement: [N, P], the same for all runs over as many
    prompts.
    """
    count = len(runs[0][tree])
    return np.random.default_rng(0).integers(count, size=(DRAWS, count))


def pool_lengths(runs: list[Run], tree: str) -> float:
    """Compute tokens per forward over all rounds of all runs."""
    tokens, rounds = np.array([run[tree] for run in runs]).sum((0, 1))
    return float(tokens / rounds)


def quantiles(values: Floats) -> list[float]:
    """Return the ends of the middle 95 %."""
    return [float(end) for end in np.quantile(values, [0.025, 0.975])]
