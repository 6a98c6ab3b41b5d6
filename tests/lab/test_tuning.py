"""Tree attention by other tiles than it chooses: each is really taken, gives the same, and is
timed beside the others.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.benchmarks import measure, tuning
from lab.benchmarks.attention import H200_CEILINGS, AttentionCell, Geometry
from lab.benchmarks.measure import ResultFile
from spectrain.kernels import tree_attention as kernels
from spectrain.kernels.tree_attention import HOPPER_TILE_CONFIGS, TILE_CONFIGS, AttentionTiles

CPU = torch.device("cpu")
TINY = Geometry(4, 2, 16, torch.float32, CPU)
CELL = AttentionCell(1, 40, 5)


def measure_row(path: Path, **attempts: int) -> dict[str, Any]:
    results = ResultFile(path, measure.describe_setting(CPU, torch.float32, True))
    results.attempts |= attempts
    row = tuning.tuning_row(CELL, TINY, results, H200_CEILINGS, launches=1, repeats=3)
    assert results.attempts == attempts
    return row


ALL_TILES = {
    tiles
    for table in (TILE_CONFIGS, HOPPER_TILE_CONFIGS)
    for of_size in table.values()
    for tiles in of_size
}


@pytest.mark.parametrize("chosen", sorted(ALL_TILES, key=str), ids=tuning.tiles_name)
def test_candidates_are_few_and_hold_their_rows(chosen: AttentionTiles) -> None:
    """The chosen tiles are first, none occur twice, and at most 25; of the others, four warps
    have at most 64 rows a block.
    """
    first, *others = tuning.list_candidates(chosen)
    assert first == chosen and len({chosen, *others}) == 1 + len(others) <= 25 and len(others) >= 15
    assert all(tiles.block_m in (chosen.block_m, max(16, chosen.block_m // 2)) for tiles in others)
    assert all(tiles.num_warps == 8 or tiles.block_m <= 64 for tiles in others)
    assert all(tiles.block_p % tiles.block_n == 0 and 64 % tiles.block_n == 0 for tiles in others)


def test_every_candidate_is_launched_and_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Triton's interpreter: a launch is cut by its candidate, all compute the same, and the
    choice is as before.
    """
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    candidates = [
        AttentionTiles(16, 16, 4, 2, 16),
        AttentionTiles(16, 32, 4, 2, 64),
        AttentionTiles(32, 32, 8, 3, 128),
    ]
    monkeypatch.setattr(tuning, "list_candidates", lambda chosen: [chosen, *candidates[1:]])
    cuts = []
    split = kernels.choose_splits
    choose = kernels.choose_tiles

    def record_tiles(config: AttentionTiles, *sizes: Any) -> int:
        cuts.append(config)
        return split(config, *sizes)

    monkeypatch.setattr(kernels, "choose_splits", record_tiles)
    row = measure_row(tmp_path / "kernels.json")
    assert set(cuts) == {*candidates} and kernels.choose_tiles is choose
    assert (
        row["chosen"] == tuning.tiles_name(candidates[0])
        and list(row["us"]) == [*map(tuning.tiles_name, candidates)]
        and not row["not_run"]
    )
    medians = {tiles: times["median"] for tiles, times in row["us"].items()}
    assert (
        row["fastest"] in medians and row["times_chosen"] > 0 and row["floor_us"] < row["goal_us"]
    )


def test_what_fails_or_differs_is_named_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that do not compile, compute something else or ended a process have a reason each;
    the choice is restored.
    """
    monkeypatch.setattr(
        tuning,
        "list_candidates",
        lambda chosen: [chosen, *(AttentionTiles(16, 32, 4, n, 64) for n in range(5, 9))],
    )
    ready = tuning.candidate_work
    names = [tuning.tiles_name(AttentionTiles(16, 32, 4, n, 64)) for n in range(5, 9)]
    choose = kernels.choose_tiles

    def make_work(problem: Any, notes: dict[str, Any]) -> Any:
        work = ready(problem, notes)

        def launch(i: int) -> Any:
            stages = kernels.choose_tiles(20, 16, torch.float32).num_stages
            if stages == 5:
                raise RuntimeError("out of resource:\nshared memory")
            return work(i) + (stages == 6)

        return launch

    monkeypatch.setattr(tuning, "candidate_work", make_work)
    row = measure_row(tmp_path / "kernels.json", **{f"tuning/{CELL.name}/{names[2]}": 1})
    assert row["not_run"][names[0]] == "RuntimeError: out of resource: shared memory"
    assert (
        "differs from the chosen one's" in row["not_run"][names[1]]
        and "the process ended" in row["not_run"][names[2]]
    )
    assert list(row["us"]) == [row["chosen"], names[3]] and kernels.choose_tiles is choose


def test_without_the_chosen_tiles_there_is_nothing_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row has failed then, and says why."""

    def fail_to_prepare(problem: Any, notes: dict[str, Any]) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(tuning, "candidate_work", fail_to_prepare)
    assert measure_row(tmp_path / "kernels.json")["failed"] == "RuntimeError: no kernel image"
