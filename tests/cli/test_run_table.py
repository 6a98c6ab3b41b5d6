"""`spectrain runs` says of every run folder what its files say, and breaks at none."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectrain.cli.main import dispatch_command
from spectrain.cli.run_table import RunRow, format_table
from spectrain.errors import UserError


def make_run(folder: Path, tokens: int, speedup: dict[str, Any] | None, date: str) -> None:
    """Write what a training of a tiny drafter leaves, without its weights."""
    (folder / "drafter").mkdir(parents=True)
    (folder / "drafter" / "config.json").write_text("{}")
    (folder / "drafter" / "model.safetensors").touch()
    (folder / "config.yaml").write_text("target: {choice: tiny}\nrecipe_name: medusa1\n")
    (folder / "provenance.json").write_text(json.dumps({"date": date}))
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "tokens": {tokens}}}\n{{"step": 2, "tok')
    if speedup is not None:
        summary = {"acceptance_length": {"pooled": 1.5}, "speedup": speedup}
        (folder / "eval" / "heldout").mkdir(parents=True)
        (folder / "eval" / "heldout" / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make four runs, two of them of a comparison, and one that is broken."""
    monkeypatch.chdir(tmp_path)
    reliable = {"ratio": 1.3, "ci95": [1.2, 1.4], "quotable": True, "reason": None}
    noisy = {"ratio": 1.4, "ci95": [0.9, 2.0], "quotable": True, "reason": None}
    refused = {"ratio": 2.0, "ci95": [1.5, 2.5], "quotable": False, "reason": "too fast"}
    make_run(tmp_path / "runs/a", 300, reliable, "2026-01-02T00:00:00+00:00")
    make_run(tmp_path / "runs/compare/b", 100, noisy, "2026-01-03T00:00:00+00:00")
    make_run(tmp_path / "runs/compare/c", 200, refused, "2026-01-01T00:00:00+00:00")
    make_run(tmp_path / "runs/d", 50, None, "2026-01-04T00:00:00+00:00")
    make_run(tmp_path / "runs/e", 20, reliable, "2026-01-05T00:00:00+00:00")
    (tmp_path / "runs/e/eval/heldout/summary.json").write_text("{")
    return tmp_path / "runs"


def list_runs(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    dispatch_command(["runs", *words, "--json"])
    return [*json.loads(capsys.readouterr().out)]


def test_rows_say_what_the_files_say(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {Path(row["run"]).name: row for row in list_runs(capsys)}
    assert [*rows] == ["e", "d", "b", "a", "c"]
    assert rows["a"] == {
        "run": "runs/a",
        "recipe": "medusa1",
        "target": "tiny",
        "tokens": 300,
        "acceptance": 1.5,
        "speedup": 1.3,
        "speedup_interval": [1.2, 1.4],
        "quotable": True,
        "reason": None,
        "date": "2026-01-02T00:00:00+00:00",
        "state": "scored",
    }
    assert rows["c"]["reason"] == "too fast" and rows["c"]["quotable"] is False
    assert rows["d"]["state"] == "trained" and rows["d"]["speedup"] is None
    assert rows["e"]["state"].startswith("broken: eval/heldout/summary.json: this is not JSON")
    assert rows["e"]["tokens"] == 20


@pytest.mark.parametrize(
    ("key", "order"), [("speedup", "cbade"), ("tokens", "acbde"), ("run", "abcde")]
)
def test_rows_are_sorted_and_unknown_values_are_last(
    key: str, order: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "".join(Path(row["run"]).name for row in list_runs(capsys, f"sort={key}"))
    assert names == order


def test_the_table_marks_unreliable_speedups(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dispatch_command(["runs", "runs/compare", "sort=run"])
    head, noisy, refused, *notes = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "run recipe target tokens accept speedup date state"
    assert (
        " ".join(noisy.split()) == "runs/compare/b medusa1 tiny 100 1.50 1.40 ~ 2026-01-03 scored"
    )
    assert refused.split()[5:7] == ["2.00", "?"]
    assert [note.strip().partition(":")[0] for note in notes] == ["accept", "?", "~"]


@pytest.mark.parametrize("content", ["[]", "a: [", "target: text", "drafter: [1]"])
def test_a_damaged_config_is_a_row(
    content: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "a" / "config.yaml").write_text(content)
    (row,) = list_runs(capsys, "runs/a")
    assert row["state"].startswith("broken: ") and row["acceptance"] == 1.5


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("sort=sped",), ("sort=sped", "speedup")),
        (("--jsn",), ("--jsn", "--json")),
        (("none",), ("runs none", "no such folder")),
        (("a", "b"), ("one folder",)),
    ],
)
def test_mistakes_are_one_sentence(words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        dispatch_command(["runs", *words])
    assert all(part in str(error.value) for part in parts)


def test_a_narrow_terminal_leaves_out_columns() -> None:
    """Every line of a table of common names fits 80 columns, and it says what a wider one shows."""
    row = RunRow(
        run="runs/eagle3-smollm2",
        recipe="eagle3",
        target="smollm2",
        tokens=1_234_567,
        acceptance=1.75,
        speedup=1.41,
        quotable=False,
        date="2026-01-02T00:00:00+00:00",
    )
    broken = replace(row, run="runs/b", state=f"broken: {'long ' * 30}")
    full = format_table([row])
    assert max(map(len, full)) > 80 and "date" in full[0].split()
    narrow = format_table([row, broken], 80)
    assert narrow[0].split() == ["run", "recipe", "target", "tokens", "accept", "speedup", "state"]
    assert max(len(line) for line in narrow if "broken" not in line) <= 80
    assert "  a wider terminal also shows date" in narrow
    narrower = format_table([row], 60)
    assert narrower[0].split() == ["run", "tokens", "accept", "speedup", "state"]
    assert max(map(len, narrower)) <= 60
