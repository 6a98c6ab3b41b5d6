"""Axes: a crossover that is known is found, and batch 1 has the numbers of the evaluation."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.ngram import Ngram
from spectrain.eval import metrics
from spectrain.eval.extensions import Results
from spectrain.eval.metrics import Turn
from spectrain.eval.page import write_report
from spectrain.eval.summary import predict_device
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain
from spectrain_studies.axes import sweep
from spectrain_studies.axes.grid import describe_grid, grid_cells, grid_titles
from spectrain_studies.axes.points import Crossover, find_crossover, measure_point
from spectrain_studies.axes.sweep import BatchSweep, ContextSweep, TemperatureSweep, choose_batches
from spectrain_studies.axes.tables import axis_markdown, describe_crossover
from tests.eval.test_run import SETTING, make_evaluation
from tests.eval.test_user_times import make_timed_generation


def paired_turn(
    name: str, lengths: list[int], step: float = 0.02, cycle: float = 0.03, batch: int = 1
) -> Turn:
    """A turn whose plain steps and drafted rounds take so many seconds."""
    count = sum(lengths)
    pair = (
        make_timed_generation([1] * count, [step] * count, count + 1),
        make_timed_generation(lengths, [cycle] * len(lengths), count + 1),
    )
    for generation in pair:
        generation.batch_size = batch
        generation.node_counts, generation.depths = [[4] * len(generation.round_lengths)] * 2
    return Turn(name, 0, "all", *pair)


def test_crossover_is_interpolated() -> None:
    """Speedups 2, 1.5 and 2/3 at 1, 4 and 16 cross 1 halfway between the logarithms of 4 and 16."""
    crossover = find_crossover([1, 4, 16], [2, 1.5, 1 / 1.5], [[1.5, 3], [0.9, 2], [0.5, 0.8]])
    assert crossover == Crossover("crosses", 8.0, 1)
    assert find_crossover([0, 0.5], [2, 0.5]) == Crossover("crosses", 0.25)
    assert find_crossover([1, 2], [1.2, 1.1], [[1.1, 1.3], None]) == Crossover("always", None, 1)
    assert find_crossover([1, 2], [0.9, 0.8]) == Crossover("never")
    # The last value that pays counts, also behind one that does not.
    assert find_crossover([1, 2, 4], [1.2, 0.9, 1.1]).kind == "always"


def test_a_value_without_rounds_is_left_out_of_the_crossover() -> None:
    """Where every answer is its first token alone, nothing was timed: its speedup is 0, and the
    others decide.
    """
    assert find_crossover([1, 4, 16, 64], [2, 1.5, 1 / 1.5, 0]) == Crossover("crosses", 8.0)
    assert find_crossover([1, 4, 16], [2, 0, 0.5]) == Crossover("crosses", 4.0)
    assert find_crossover([512, 1024], [0, 0]) == Crossover("never")
    point = measure_point(1024, [[paired_turn(name, [])] for name in "ab"], "chain", "greedy", 50)
    assert point.speedup == 0 and point.ci95 is None
    points = [{"value": 512, "speedup": 1.5, "ci95": None}, asdict(point)]
    axis = {
        "over": "context",
        "points": points,
        "crossover": vars(find_crossover([512, 1024], [1.5, 0.0])),
    }
    assert (
        describe_crossover(axis)
        == "Drafting pays up to 512 tokens of the prompt, the largest measured"
    )


def test_a_point_at_batch_1_has_the_numbers_of_the_evaluation() -> None:
    turns = [
        paired_turn("a", [3, 1, 4]),
        paired_turn("b", [2, 2], step=0.03),
        paired_turn("c", [1, 1, 5]),
    ]
    point = measure_point(
        1,
        [[turn] for turn in turns],
        "chain",
        "greedy",
        50,
        [turn.drafted.output for turn in turns],
    )
    assert point.speedup == round(metrics.speedup(turns), 4)
    assert point.ci95 == metrics.speedup_interval(turns) and point.units == 3
    assert point.acceptance_length == round(metrics.pooled_acceptance(turns), 4)
    assert point.identical == point.checked == 3


def test_target_efficiency_and_units_of_a_batch() -> None:
    """Forwards are half of every round here: T(B, 1) / T(B, n) is step over cycle, and two
    batches are two units.
    """
    batches = [[paired_turn(name, [2, 2], batch=2) for name in pair] for pair in ("ab", "cd")]
    point = measure_point(2, batches, "chain", "greedy", 50)
    assert point.units == 2 and point.identical is None
    assert point.target_efficiency == pytest.approx(0.02 / 0.03, abs=1e-4)
    assert point.draft_share == pytest.approx(0.5)
    assert point.speedup == pytest.approx(2 * 0.02 / 0.03, abs=1e-4)
    assert point.tokens_per_second.autoregressive == pytest.approx(2 / 0.02)
    assert point.per_user.autoregressive == pytest.approx(1 / 0.02)


@pytest.mark.parametrize(
    ("count", "size", "has_interval"),
    [(8, 2, True), (8, 4, False), (32, 32, False), (40, 32, False)],
)
def test_batches_that_share_prompts_have_no_interval(
    count: int, size: int, has_interval: bool
) -> None:
    """Four identical batches differ in the noise of times alone; the table, the sentences and
    the crossover say no more.
    """
    turns = [
        paired_turn(f"p{number:02}", [2 + number % 3, 2], batch=size) for number in range(count)
    ]
    batches = [[turns[row] for row in rows] for rows in choose_batches(count, size)]
    point = measure_point(size, batches, "chain", "greedy", 50)
    assert (point.ci95 is not None) == has_interval and point.units == len(batches)
    crossover = find_crossover([1, size], [1.5, point.speedup], [[1.2, 1.8], point.ci95])
    assert crossover.certain == (size if has_interval else 1)
    axis: dict[str, Any] = {
        "over": "batch",
        "system": "chain",
        "points": [asdict(point)],
        "crossover": vars(crossover),
    }
    axis |= {"load": None, "left_out": []}
    table = axis_markdown([axis])
    assert (
        ("| none |" in table)
        == (f"No 95 % interval at {size}: batches share prompts" in table)
        == (not has_interval)
    )


def test_turns_of_a_prompt_form_a_unit() -> None:
    """Turns that are decoded alone are drawn with their prompt; in batches they bind the batches
    together.
    """
    turns = [
        replace(paired_turn(name, [2, 3 + number + row]), turn=number)
        for row, name in enumerate("abc")
        for number in range(2)
    ]
    assert measure_point(
        1, [[turn] for turn in turns], "chain", "greedy", 50
    ).ci95 == metrics.speedup_interval(turns)
    assert (
        measure_point(2, [turns[:2], turns[2:4], turns[4:]], "chain", "greedy", 50).ci95 is not None
    )
    assert measure_point(2, [turns[::2], turns[1::2]], "chain", "greedy", 50).ci95 is None


def test_another_device_is_not_predicted_without_rounds() -> None:
    """Where every answer is its first token alone, there is no round whose time another device
    could change.
    """
    turns = [paired_turn(name, []) for name in "ab"]
    nothing = cast(Any, None)
    assert predict_device(nothing, nothing, turns, {"bandwidth": 100.0, "tflops": 1.0}) == {}


def test_sweeps_are_decoded_and_written(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every point has the target's own answers, the first batch has the tokens of the evaluation,
    and a comparison and the report take the sweep from the folder."""
    recorded: list[Results] = []
    monkeypatch.setattr(sweep, "simulate_load", lambda *arguments: None)
    report = BatchSweep.report
    monkeypatch.setattr(
        BatchSweep,
        "report",
        lambda sweep, results: [recorded.append(results), report(sweep, results)][1],
    )
    evaluation = make_evaluation(
        tmp_path,
        check=False,
        sweep="batch",
        batches=(1, 2, 64),
        context=(48,),
        other_device={"bandwidth": 100.0, "tflops": 1e6},
    )
    evaluation.check_prompts(shallow)
    folder = tmp_path / "run" / "eval" / "batch"
    summary = evaluation.score(
        Candidate(shallow, Ngram(shallow), Chain(3), Greedy(), SETTING), folder
    )
    axis = summary["axis"]
    assert [point["value"] for point in axis["points"]] == [1, 2] and axis["left_out"]
    assert axis["load"] is None
    assert axis["points"][0]["acceptance_length"] == summary["acceptance_length"]["pooled"]
    assert all(point["identical"] == point["checked"] for point in axis["points"])
    assert (folder / "axis.md").read_text().count("\n") > 4 and "<svg" in (
        folder / "axis.svg"
    ).read_text()
    # Where only memory counts and drafting reads nothing, the speedup is the tokens per forward.
    assert summary["other_device"]["by_batch"][1] == pytest.approx(
        summary["acceptance_length"]["pooled"], abs=1e-3
    )
    axes = {"batch": [{"name": "one", **axis}]}
    write_report(tmp_path / "report.html", [], {"rows": [], "axes": axes})
    assert (tmp_path / "report.html").read_text().count('class="axis stack"') == 1
    (point,) = ContextSweep("context", 6, 50.0).measure_points(recorded[0])
    assert point.value == 48 and point.speedup == summary["by_category"]["48"]["speedup"]
    warmer = TemperatureSweep("temperature", 6, 50.0, temperatures=(0.0, 0.7))
    warmer.prepare_systems(shallow, [], list)
    cold, warm = warmer.measure_points(recorded[0])
    assert (
        (cold.rule, warm.rule) == ("greedy", "match")
        and cold.identical == cold.checked
        and warm.identical == warm.checked
    )


def test_the_grid_has_every_batch_at_every_length(shallow: Target, tmp_path: Path) -> None:
    """Each cell has the target's own answers, and the smallest batch the tokens of the evaluation;
    the line of each length is the crossover of its row.
    """
    evaluation = make_evaluation(
        tmp_path, check=False, sweep="grid", batches=(1, 2, 64), context=(24, 48)
    )
    evaluation.check_prompts(shallow)
    folder = tmp_path / "run" / "eval" / "grid"
    summary = evaluation.score(
        Candidate(shallow, Ngram(shallow), Chain(3), Greedy(), SETTING), folder
    )
    grid = summary["grid"]
    assert [row["context"] for row in grid["rows"]] == [24, 48]
    for row in grid["rows"]:
        first = row["points"][0]
        numbers = summary["by_category"][str(row["context"])]
        assert first["acceptance_length"] == numbers["acceptance_length"]
        assert [point["value"] for point in row["points"]] == [1, 2]
        assert all(point["identical"] == point["checked"] for point in row["points"])
        speedups = [point["speedup"] for point in row["points"]]
        assert row["crossover"] == asdict(
            find_crossover([1, 2], speedups, [point["ci95"] for point in row["points"]])
        )
    titles = grid_titles(grid)
    assert titles == ["context", "1 at once", "2 at once", "pays up to"]
    assert all(len(cells) == len(titles) for cells in grid_cells(grid))
    sentences = " ".join(describe_grid(grid))
    assert "24: " in sentences and "48: " in sentences and "Batches of 64 need" in sentences
    assert (folder / "grid.md").read_text().startswith("| context | 1 at once")
    # Speedups of 1.3 alone and 1.1 for two, of which the first is certain; at 48 no speedup is.
    for row, speedups, ends in zip(
        grid["rows"], ((1.3, 1.1), (0.9, 0.8)), (([1.1, 1.5], [0.9, 1.2]), (None, None))
    ):
        for point, speedup, interval in zip(row["points"], speedups, ends):
            point |= {"speedup": speedup, "ci95": interval}
        row["crossover"] = asdict(find_crossover([1, 2], speedups, ends))
    sentences = " ".join(describe_grid(grid))
    assert "24: 2 or more, 48: none." in sentences
    assert "All intervals lie above 1 up to so many at once: 24: 1, 48: none." in sentences
