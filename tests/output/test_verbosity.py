"""What a quiet command prints, and one that prints JSON."""

from __future__ import annotations

import io
import json
import shutil
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrain.cli import main as cli
from spectrain.export.layouts import read_files
from spectrain.export.linter import lint_files
from spectrain.output.console import is_live, make_console
from spectrain.output.verbosity import (
    command_output,
    print_json,
    read_level,
    result_output,
    shows_notes,
)
from spectrain.runs.folder import require_drafter_directory


def work() -> None:
    """Print as a command does: progress, a warning, a table, and the result as JSON."""
    print("progress")
    make_console().print("more progress")
    print("warning", file=sys.stderr)
    with result_output():
        make_console().print("table")
    print_json({"a": 1})


@pytest.mark.parametrize(
    ("flags", "printed", "errors"),
    [
        ((), ["progress", "more progress", "table"], ["warning"]),
        (("--quiet",), ["table"], ["warning"]),
        (("--json",), ["{", '  "a": 1', "}"], ["progress", "more progress", "warning", "table"]),
        (("--json", "--quiet"), ["{", '  "a": 1', "}"], ["warning"]),
    ],
)
def test_each_level_prints_its_share(
    flags: tuple[str, ...],
    printed: list[str],
    errors: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A quiet command prints results and warnings; with --json the result alone is on stdout."""
    stream = sys.stdout
    with command_output(read_level(flags), "--json" in flags):
        work()
    captured = capsys.readouterr()
    assert captured.out.splitlines() == printed
    assert sorted(captured.err.splitlines()) == sorted(errors)
    assert sys.stdout is stream
    if "--json" in flags:
        assert json.loads(captured.out) == {"a": 1}


def test_a_command_that_prints_results_only_is_not_muted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a command has no progress beside its result, quiet leaves the result."""
    monkeypatch.setenv("SPECTRAIN_LOG", "quiet")
    monkeypatch.setattr(sys, "argv", ["spectrain", "recipes", "eagle3"])
    cli.main()
    assert "recipe=eagle3" in capsys.readouterr().out


def test_results_of_logged_work_go_to_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    """A comparison logs the scores that it is made of, a quiet one too."""
    log = io.StringIO()
    with command_output("quiet"):
        with redirect_stdout(log):
            work()
        with result_output():
            print("compared")
    assert capsys.readouterr().out.splitlines() == ["compared"]
    assert "table" in log.getvalue()


def test_the_environment_sets_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPECTRAIN_LOG is a flag for every command; a flag comes before it."""
    assert read_level() == "normal"
    monkeypatch.setenv("SPECTRAIN_LOG", "notes")
    with command_output(read_level()):
        assert shows_notes() and is_live(make_console(force_terminal=True))
    with command_output(read_level(("--quiet",))):
        assert not shows_notes() and not is_live(make_console(force_terminal=True))


def test_a_linter_prints_its_findings_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are those of `lint_files`, and the sentence is on the error stream."""
    folder = tmp_path / "drafter"
    shutil.copytree(require_drafter_directory("run", "smollm2-eagle3"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["unknown.weight"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr(sys, "argv", ["spectrain", "lint", str(folder), "--json"])
    with suppress(SystemExit):
        cli.main()
    captured = capsys.readouterr()
    findings = [asdict(finding) for finding in lint_files(read_files(folder), None)]
    assert json.loads(captured.out) == findings and findings
    assert "error" in captured.err


def test_json_has_no_infinite_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with command_output("quiet", as_json=True):
        print_json({"a": [float("inf"), 1.5, True], 2: Path("b"), "c": (float("nan"),)})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, True], "2": "b", "c": [None]}


def test_an_unknown_level_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECTRAIN_LOG", "loud")
    monkeypatch.setattr(sys, "argv", ["spectrain", "recipes"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "SPECTRAIN_LOG=loud: choose from quiet, normal, notes" in capsys.readouterr().err
