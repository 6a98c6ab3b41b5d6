"""The fastest tiles of tree attention: those that it chooses against others, on the same
tensors, interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import describe_error
from spectrain.kernels import tree_attention as kernels
from spectrain.kernels.tree_attention import AttentionTiles, is_hopper

from .attention import (
    MAX_DIFFERENCE,
    AttentionCell,
    AttentionProblem,
    Geometry,
    candidate_work,
    count_cost,
    time_bounds,
)
from .measure import (
    ResultFile,
    TimedWork,
    Work,
    check_alive,
    paired_ratio,
    relative_error,
    summarize_times,
    time_interleaved,
)

MIN_BLOCK_ROWS = 16
"""The fewest rows of a block that tensor cores accept."""


def tiles_name(tiles: AttentionTiles) -> str:
    """Return the name of tiles in a row: rows x keys (keys of the prefix), warps, stages."""
    return (
        f"{tiles.block_m}x{tiles.block_n} ({tiles.block_p}) {tiles.num_warps} warps "
        f"{tiles.num_stages} stages"
    )


def list_candidates(chosen: AttentionTiles) -> list[AttentionTiles]:
    """Return the chosen tiles, then blocks of as many rows and of half as many with every promising
    number of keys, warps and stages.

    Half as many rows take four warps; four warps cannot hold more than 64 rows.
    """
    half = max(MIN_BLOCK_ROWS, chosen.block_m // 2)
    rows = [
        (chosen.block_m, 8),
        *([(chosen.block_m, 4)] if chosen.block_m <= 64 else []),
        (half, 4),
    ]
    combinations = product(rows, (32, 64), (2, 3), (64, 128))
    alternatives = (
        AttentionTiles(block_m, keys, warps, stages, prefix_keys)
        for (block_m, warps), keys, stages, prefix_keys in combinations
    )
    return list(dict.fromkeys([chosen, *alternatives]))


@contextmanager
def use_tiles(tiles: AttentionTiles) -> Iterator[None]:
    """Let tree attention use these tiles in the context."""
    before = kernels.choose_tiles
    kernels.choose_tiles = lambda *sizes, **options: tiles
    try:
        yield
    finally:
        kernels.choose_tiles = before


def with_tiles(work: Work, tiles: AttentionTiles) -> Work:
    """Return work whose launches use these tiles."""

    def launch(i: int) -> Any:
        with use_tiles(tiles):
            return work(i)

    return launch


@torch.no_grad()
def tuning_row(
    cell: AttentionCell,
    geometry: Geometry,
    results: ResultFile,
    ceilings: dict[str, float],
    launches: int,
    repeats: int,
) -> dict[str, Any]:
    """Measure every candidate that compiles, agrees with the chosen tiles and has ended no process
    before.

    The row has microseconds of each, the fastest, and its time over the chosen one's. Without a
    kernel all take the reference's time.
    """
    problem = AttentionProblem(cell, geometry)
    name = f"tuning/{cell.name}"
    rows = geometry.num_heads // geometry.num_kv_heads * cell.nodes
    chosen = kernels.choose_tiles(
        rows, geometry.head_size, geometry.dtype, is_hopper(geometry.device)
    )
    replays: dict[str, TimedWork] = {}
    failed: dict[str, str] = {}
    for tiles in list_candidates(chosen):
        attempt = f"{name}/{tiles_name(tiles)}"
        if results.attempts.get(attempt):
            failed[tiles_name(tiles)] = "the process ended while it ran"
            continue
        results.begin_attempt(attempt)
        try:
            replays[tiles_name(tiles)] = _prepare_tiles(problem, tiles, launches)
        except Exception as error:
            failed[tiles_name(tiles)] = describe_error(error)
            check_alive(geometry.device)
        results.end_attempt(attempt)
    samples = time_interleaved(replays, repeats)
    row: dict[str, Any] = {
        "chosen": tiles_name(chosen),
        "us": {tiles: summarize_times(seconds) for tiles, seconds in samples.items()},
    }
    row |= {"not_run": failed, "repeats": repeats, "buffers": problem.num_buffers}
    row["bytes"], row["flops"] = count_cost(cell, geometry)
    row["floor_us"], row["goal_us"] = time_bounds(cell, geometry, ceilings)
    if tiles_name(chosen) not in samples:
        return {**row, "failed": failed[tiles_name(chosen)]}
    fastest = min(samples, key=lambda tiles: median(samples[tiles]))
    return {
        **row,
        "fastest": fastest,
        "times_chosen": paired_ratio(samples[tiles_name(chosen)], samples[fastest]),
    }


def _prepare_tiles(problem: AttentionProblem, tiles: AttentionTiles, launches: int) -> TimedWork:
    """Return a launch with these tiles, ready to be timed; raise where it cannot run or computes
    something else.
    """
    work = with_tiles(candidate_work(problem, {}), tiles)
    output: Tensor = work(0)
    error = relative_error(output, problem.candidate_output)
    if error > MAX_DIFFERENCE:
        raise ValueError(f"its output differs from the chosen one's by {error:.2g} of its size")
    return TimedWork(work, problem.geometry.device, launches)
