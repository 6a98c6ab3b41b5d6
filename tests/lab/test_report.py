"""The report: ratios follow from the rows, goals are judged, and what no file holds is not
measured.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks.command import run_benchmark
from lab.benchmarks.correctness import CHECKS, iterate_cases
from lab.benchmarks.kernels import KernelSizes
from lab.benchmarks.report import (
    GOALS_PATH,
    Evidence,
    Report,
    gather_evidence,
    line_values,
    meets_goal,
    render_goals,
    render_markdown,
)

SETTING = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "driver": "570",
    "toy": False,
    "date": "2026-01-01",
}
SHARES = {64: 0.5, 32: 0.4, 16: 0.3, 8: 0.2, 1: 0.1}


def complete_rows() -> dict[str, Any]:
    """Return every row of a full run, written by hand."""
    rows: dict[str, Any] = {
        "ceilings/copy": {"bytes_per_second": 4.2e12},
        "ceilings/product": {"flops_per_second": 7.5e14},
    }
    for name, *_ in iterate_cases():
        rows[name] = {"within": True, "by_kernel": True}
    for cell in KernelSizes().table_cells():
        share = SHARES[cell.nodes]
        rows[cell.name] = {
            "floor_us": 10.0,
            "goal_us": 25.0,
            "share_of_floor": share,
            "share_of_constant_floor": share / 2,
            "not_run": {},
            "us": {"ours": {"median": 10 / share, "p10": 9 / share, "p90": 11 / share}},
            "times_ours": {"sdpa": 9.0, "sdpa_repeated": 4.0, "flex": 1 + share, "unmasked": 0.5},
        }
    for loss in KernelSizes().loss_shapes():
        us = {"fused": {"median": 9000.0}, "unfused": {"median": 12000.0}}
        peaks = {"fused": 3_000_000_000, "unfused": 12_000_000_000}
        rows[loss.name] = {
            "time_ratio": 0.75,
            "memory_ratio": 0.25,
            "us": us,
            "peak_bytes": peaks,
            "not_run": {},
        }
    return rows


def write_results(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps({"setting": SETTING, **content}))


def read_goals() -> dict[str, dict[str, Any]]:
    return {goal["name"]: goal for goal in json.loads(GOALS_PATH.read_text())}


def parse_tables(text: str) -> dict[str, list[str]]:
    """Return the other cells of every table line by its first cell."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return {row[0]: row[1:] for row in rows}


def test_nothing_is_measured_yet(tmp_path: Path) -> None:
    """Without a file every goal, every cell and every loss is there, and not measured."""
    cells = parse_tables(render_markdown(tmp_path))
    assert all(cells[name][1] == "not measured" for name in read_goals())
    assert all(cells[cell.title][2] == "not measured" for cell in KernelSizes().table_cells())
    assert "Missed" not in render_markdown(tmp_path)
    assert all(
        cells[f"{loss.rows} / {loss.vocab}"][0] == "not measured"
        for loss in KernelSizes().loss_shapes()
    )


def test_every_line_follows_from_the_rows(tmp_path: Path) -> None:
    """Ceilings, shares, the faster of torch's two ways, the least of FlexAttention's ratios, and
    the fused loss's.
    """
    write_results(tmp_path, "kernels.json", rows=complete_rows())
    (evidence,) = gather_evidence(tmp_path)
    values = line_values(evidence)
    assert values["copy bandwidth"] == 4.2 and values["bf16 product, 8192 wide"] == 750
    assert values["tree attention, B=8 prefix=8192 N=64: share of its floor"] == 0.5
    assert (
        values["tree attention, B=1 prefix=1024 N=64: time of SDPA with a dense mask over ours"]
        == 4
    )
    assert values["tree attention, the least of all rows: time of FlexAttention over ours"] == 1.1
    assert values["fused loss, 8192 rows, vocabulary 128256: peak memory over unfused"] == 0.25
    assert values["fused loss, 2048 rows, vocabulary 32000: time over unfused"] == 0.75
    unmeasured = {name for name in read_goals() if values.get(name) is None}
    assert unmeasured == {name for name in read_goals() if name.startswith(("engine", "training,"))}


def test_goals_are_judged(tmp_path: Path) -> None:
    """A line that reaches its goal is met, another is missed, one without a goal is only shown."""
    write_results(tmp_path, "kernels.json", rows=complete_rows())
    cells = parse_tables(render_markdown(tmp_path))
    assert cells["tree attention, B=1 prefix=8192 N=64: share of its floor"] == [
        ">= 0.45",
        "0.5",
        "met",
    ]
    assert cells["tree attention, B=1 prefix=32768 N=64: share of its floor"] == [
        ">= 0.55",
        "0.5",
        "missed",
    ]
    assert cells["fused loss, 8192 rows, vocabulary 128256: peak memory over unfused"] == [
        "<= 0.2 x",
        "0.25 x",
        "missed",
    ]
    assert cells["fused loss, 2048 rows, vocabulary 32000: peak memory over unfused"] == [
        "",
        "0.25 x",
        "",
    ]
    assert cells["copy bandwidth"] == ["", "4.2 TB/s", ""]
    assert cells["1 / 1024 / 64"][:7] == [
        "10.0",
        "25.0",
        "20.0",
        "met",
        "18.0 to 22.0",
        "50%",
        "25%",
    ]
    assert cells["1 / 1024 / 64"][7:] == ["9.00x", "4.00x", "1.50x", "not run", "0.50x"]
    assert cells["1 / 1024 / 32"][:4] == ["10.0", "25.0", "25.0", "met"]
    assert cells["1 / 1024 / 16"][:4] == ["10.0", "25.0", "33.3", "missed"]
    assert cells["8192 / 128256"] == ["9.0 ms, 3.0 GB", "12.0 ms, 12.0 GB", "not run"]
    for sense, (below, equal, above) in {
        "at least": (False, True, True),
        "above": (False, False, True),
        "at most": (True, True, False),
    }.items():
        assert [meets_goal(value, {"goal": 1, "sense": sense}) for value in (0.5, 1, 2)] == [
            below,
            equal,
            above,
        ]


def test_every_miss_is_named(tmp_path: Path) -> None:
    """Each line and each cell that missed its goal has a sentence with its value and its goal,
    and no other has one.
    """
    write_results(tmp_path, "kernels.json", rows=complete_rows())
    named_misses = [
        line for line in render_goals(tmp_path).splitlines() if line.startswith("Missed: ")
    ]
    cells = parse_tables(render_markdown(tmp_path))
    assert len(named_misses) == sum("missed" in row for row in cells.values()) > 18
    assert (
        "Missed: tree attention, B=1 prefix=32768 N=64: share of its floor, 0.5 for >= 0.55."
        in named_misses
    )
    slow = [cell.title for cell in KernelSizes().table_cells() if cell.nodes < 32]
    misses = {
        f"Missed: tree attention, {cell} (B / prefix / N), {cells[cell][2]} us for 25.0."
        for cell in slow
    }
    assert misses == {line for line in named_misses if "(B / prefix / N)" in line}
    assert all(line in render_markdown(tmp_path).splitlines() for line in named_misses)


def test_a_cell_without_a_row_goes_by_the_ceilings_that_are_there(tmp_path: Path) -> None:
    """An H200's before a card was measured, and then the card's own: at half the rates the floor
    is twice as long.
    """
    assert parse_tables(render_markdown(tmp_path))["1 / 32768 / 64"][:3] == [
        "43.6",
        "77.6",
        "not measured",
    ]
    half = {
        "ceilings/copy": {"bytes_per_second": 2.15e12},
        "ceilings/product": {"flops_per_second": 395e12},
    }
    write_results(tmp_path, "kernels.json", rows=half)
    assert parse_tables(render_markdown(tmp_path))["1 / 32768 / 64"][:3] == [
        "87.2",
        "150.3",
        "not measured",
    ]


def test_heads_outside_the_tables_need_no_flex_attention() -> None:
    """The line over all rows is over those of the table's heads."""
    rows = complete_rows()
    for cell in KernelSizes().table_cells():
        if cell.heads is not None:
            del rows[cell.name]["times_ours"]["flex"]
    assert (
        line_values(Evidence("GPU", rows=rows))[
            "tree attention, the least of all rows: time of FlexAttention over ours"
        ]
        == 1.1
    )


def test_an_incomplete_run_proves_nothing_about_all_rows(tmp_path: Path) -> None:
    """One row without FlexAttention, one kernel's case missing: the lines over all of them are
    not measured.
    """
    rows = complete_rows()
    del rows[KernelSizes().table_cells()[-1].name]["times_ours"]["flex"]
    del rows[next(name for name, *_ in iterate_cases())]
    rows[KernelSizes().table_cells()[0].name] = {"failed": "RuntimeError: out of memory"}
    write_results(tmp_path, "kernels.json", rows=rows)
    cells = parse_tables(render_markdown(tmp_path))
    assert (
        cells["tree attention, the least of all rows: time of FlexAttention over ours"][1]
        == "not measured"
    )
    assert (
        cells[f"{next(iter(CHECKS))}: cases beyond tolerance in float64, or not run by the kernel"][
            1
        ]
        == "not measured"
    )
    assert cells["1 / 1024 / 64"][2] == "not measured" and "out of memory" in render_markdown(
        tmp_path
    )


@pytest.mark.parametrize("change", [{"within": False}, {"by_kernel": False}])
def test_a_wrong_case_is_counted(change: dict[str, bool]) -> None:
    """A case beyond tolerance, or one that the reference answered, is a fault of its kernel and
    of no other.
    """
    rows = complete_rows()
    rows[next(name for name, check, *_ in iterate_cases() if check is CHECKS["kv_commit"])] |= (
        change
    )
    values = line_values(Evidence("GPU", rows=rows))
    faults = {
        kernel: values[f"{kernel}: cases beyond tolerance in float64, or not run by the kernel"]
        for kernel in CHECKS
    }
    assert faults == {kernel: int(kernel == "kv_commit") for kernel in CHECKS}


def test_other_files_bring_their_lines(tmp_path: Path) -> None:
    """The engine's numbers come by name from a file of their own; the later of two files counts."""
    name = "engine: host synchronisations a round"
    write_results(tmp_path, "a.json", lines={name: 0})
    later = {**SETTING, "date": "2026-02-01"}
    (tmp_path / "0.json").write_text(json.dumps({"setting": later, "lines": {name: 3}}))
    assert parse_tables(render_markdown(tmp_path))[name] == ["<= 0", "3", "missed"]


def test_only_gpus_at_full_size_count(tmp_path: Path) -> None:
    """Toy runs, runs without a GPU and files of other kinds are no evidence; each GPU has a
    section of its own.
    """
    for number, change in enumerate([{"toy": True}, {"gpu": None}]):
        (tmp_path / f"{number}.json").write_text(
            json.dumps({"setting": {**SETTING, **change}, "rows": complete_rows()})
        )
    (tmp_path / "summary.json").write_text(
        json.dumps({"setting": {"target": "tiny"}, "speedup": 1})
    )
    (tmp_path / "goals.json").write_text("[]")
    assert gather_evidence(tmp_path) == []
    write_results(tmp_path, "a.json", rows=complete_rows())
    (tmp_path / "b.json").write_text(
        json.dumps({"setting": {**SETTING, "gpu": "NVIDIA H100"}, "rows": {}})
    )
    sections = render_markdown(tmp_path).split("## ")[1:]
    assert [section.split(" (")[0] for section in sections] == ["NVIDIA H200", "NVIDIA H100"]
    assert "4.2 TB/s" in sections[0] and "4.2 TB/s" not in sections[1]


def test_goals_name_what_the_report_knows() -> None:
    """Rows can fill every goal that the engine has no line for, and every checked kernel has a
    goal.
    """
    values = line_values(Evidence("GPU", rows=complete_rows()))
    named_goals = {name for name in read_goals() if not name.startswith(("engine", "training,"))}
    assert named_goals <= set(values)
    assert {name for name in values if not name.startswith("tree attention, B=")} <= named_goals
    assert all(goal["sense"] in ("at least", "above", "at most") for goal in read_goals().values())


def test_command_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """results names the folder; one that is not there, or that holds a broken file, is the
    user's mistake.
    """
    monkeypatch.setattr(sys, "argv", ["report", f"results={tmp_path}"])
    run_benchmark(Report)
    assert "not measured" in capsys.readouterr().out
    (tmp_path / "broken.json").write_text("{")
    for folder in (tmp_path, tmp_path / "none"):
        monkeypatch.setattr(sys, "argv", ["report", f"results={folder}"])
        with pytest.raises(SystemExit) as stopped:
            run_benchmark(Report)
        assert stopped.value.code == 2 and str(folder) in capsys.readouterr().err


def test_the_page_holds_what_was_measured() -> None:
    """Its table is the one that `lab.benchmarks.report` prints of the committed results, goals
    without data included.
    """
    text = (Path(__file__).parents[2] / "docs" / "results" / "speed.md").read_text()
    assert render_goals(GOALS_PATH.parent) in text
