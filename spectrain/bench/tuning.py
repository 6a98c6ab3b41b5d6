"""Which tiles tree attention takes least time with: those that it chooses, and others, on the same tensors and in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import reason
from spectrain.kernels import tree_attention as kernels
from spectrain.kernels.tree_attention import AttentionTiles, is_roomy

from .attention import AGREES, Cell, Geometry, Problem, bounds, cost, ours
from .measure import Rows, TimedWork, Work, check_alive, interleaved, paired_ratio, relative_error, spread

FEWEST_ROWS = 16  # of a block: tensor cores take no fewer


def named(tiles: AttentionTiles) -> str:
    """As a row of the results says it: rows x keys (keys where every row sees all), warps, stages."""
    return f"{tiles.block_m}x{tiles.block_n} ({tiles.block_p}) {tiles.warps} warps {tiles.stages} stages"


def candidates(chosen: AttentionTiles) -> list[AttentionTiles]:
    """The chosen tiles first, then blocks of as many rows and, by four warps, of half as many, with every number of keys, warps
    and stages that may pay; four warps cannot hold more than 64 rows."""
    half = max(FEWEST_ROWS, chosen.block_m // 2)
    rows = [(chosen.block_m, 8), *([(chosen.block_m, 4)] if chosen.block_m <= 64 else []), (half, 4)]
    every = product(rows, (32, 64), (2, 3), (64, 128))
    others = (AttentionTiles(block_m, keys, warps, stages, seen) for (block_m, warps), keys, stages, seen in every)
    return list(dict.fromkeys([chosen, *others]))


@contextmanager
def taken(tiles: AttentionTiles) -> Iterator[None]:
    """For so long tree attention is cut so."""
    before, kernels.choose_config = kernels.choose_config, lambda *sizes, **options: tiles
    try:
        yield
    finally:
        kernels.choose_config = before


def cut(work: Work, tiles: AttentionTiles) -> Work:
    """A launch with these tiles."""

    def launch(i: int) -> Any:
        with taken(tiles):
            return work(i)

    return launch


@torch.no_grad()
def tuning_row(
    cell: Cell, geometry: Geometry, results: Rows, ceilings: dict[str, float], launches: int, repeats: int
) -> dict[str, Any]:
    """Microseconds of every candidate that compiles, gives what the chosen one gives and has ended no process before; the
    fastest, and its time over the chosen one's. Where no kernel runs all take the reference's time."""
    problem, name = Problem(cell, geometry), f"tuning/{cell.name}"
    rows = geometry.num_heads // geometry.num_kv_heads * cell.nodes
    chosen = kernels.choose_config(rows, geometry.head_size, geometry.dtype, is_roomy(geometry.device))
    replays: dict[str, TimedWork] = {}
    failed: dict[str, str] = {}
    for tiles in candidates(chosen):
        attempt = f"{name}/{named(tiles)}"
        if results.attempts.get(attempt):
            failed[named(tiles)] = "a process ended while it ran"
            continue
        results.begin(attempt)
        try:
            replays[named(tiles)] = _ready(problem, tiles, launches)
        except Exception as error:
            failed[named(tiles)] = reason(error)
            check_alive(geometry.device)
        results.end(attempt)
    samples = interleaved(replays, repeats)
    row: dict[str, Any] = {"chosen": named(chosen), "us": {tiles: spread(seconds) for tiles, seconds in samples.items()}}
    row |= {"not_run": failed, "repeats": repeats, "buffers": problem.num_buffers}
    row["bytes"], row["flops"] = cost(cell, geometry)
    row["floor_us"], row["goal_us"] = bounds(cell, geometry, ceilings)
    if named(chosen) not in samples:
        return {**row, "failed": failed[named(chosen)]}
    fastest = min(samples, key=lambda tiles: median(samples[tiles]))
    return {**row, "fastest": fastest, "times_chosen": paired_ratio(samples[named(chosen)], samples[fastest])}


def _ready(problem: Problem, tiles: AttentionTiles, launches: int) -> TimedWork:
    """A launch with these tiles, ready to be timed; raises where it cannot run, or computes something else."""
    work = cut(ours(problem, {}), tiles)
    found: Tensor = work(0)
    error = relative_error(found, problem.answer)
    if error > AGREES:
        raise ValueError(f"its output differs from the chosen one's by {error:.2g} of its size")
    return TimedWork(work, problem.geometry.device, launches)
