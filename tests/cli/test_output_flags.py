"""--json and --quiet of the core's commands, one row a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrain.cli import main as cli
from spectrain.cli.help import COMMANDS

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, you!"}]
TINY = ("target=tiny", "data=jsonl", "data.path=chats.jsonl")
OUTPUTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("train", "recipe=medusa1", *TINY, "trainer.max_steps=1", "eval=none", "run=run"): (
        "folder", "steps", "metrics", "evaluation"
    ),
    ("train", "recipe=medusa1", "target=tiny", "--print-config"): ("target", "trainer.lr", "run"),
    ("eval", "drafter=ngram", "target=tiny", "eval.limit=1", "eval.max_new_tokens=4"): (
        "acceptance_length", "speedup", "lossless"
    ),
    ("chat", "drafter=ngram", "target=tiny", "--once", "Hi", "chat.max_new_tokens=2"): (
        "target", "answers"
    ),
    ("data", "index", *TINY, "out=index"): ("out", "data", "conversations", "tokens"),
    ("data", "regenerate", *TINY, "sampling.max_new_tokens=2", "out=answers"): (
        "out", "conversations", "written", "shards", "cut", "ended", "lost", "unfinished"
    ),
    ("data", "regenerate", "out=answers", "check=true"): ("out", "faults"),
    ("data", "store", "recipe=medusa1", *TINY, "source.path=store"): ("path", "sequences"),
    ("data", "verify", "path=store"): ("path", "sequences", "layers", "damaged"),
    ("export", "run=run", "format=medusa", "out=exported"): ("out", "layout", "address"),
    ("convert", "run", "converted", "--to", "vllm"): ("out", "layout"),
    ("lint", "run"): (),
    ("recipes",): ("eagle3", "medusa1"),
    ("recipes", "eagle3"): ("recipe", "about", "settings"),
    ("runs", "."): (),
}  # fmt: skip
"""Commands, which run in this order, and keys of the objects that they print; a list has none."""
RESULTS_ONLY = ("data verify", "lint", "recipes", "runs")


def run_command(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[str, str]:
    """Return what a command prints on its two streams."""
    capsys.readouterr()
    try:
        cli.run_command([*words, *flags])
    except SystemExit as stopped:
        assert not stopped.code, capsys.readouterr().err
    captured = capsys.readouterr()
    return captured.out, captured.err


def check_json(
    words: tuple[str, ...], keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> Any:
    """Check that a command prints one JSON document on stdout and nothing else there; with
    --quiet, nothing but warnings on the other stream.
    """
    out, err = run_command(words, capsys, "--json", "--quiet")
    result = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert {*keys} <= {*result} if keys else isinstance(result, list)
    # Of tiny a chat warns that it writes nonsense.
    assert not [line for line in err.splitlines() if "nonsense" not in line], err
    return result


def list_named(commands: Callable[[str], bool], rows: dict[tuple[str, ...], Any]) -> set[str]:
    """Return the commands of a table that are among some."""
    names = [" ".join(words[:count]) for words in rows for count in (1, 2)]
    return {name for name in names if name in COMMANDS and commands(name)}


def test_every_command_is_in_the_table() -> None:
    """A command of the core that takes --json has a row, and those without it take no --json."""
    core = {name for name in cli.CORE_TASKS if "--json" in COMMANDS[name].flags}
    assert list_named(lambda name: name in core, OUTPUTS) == core
    assert {*cli.CORE_TASKS} - core == {"completion"}


def test_json_is_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    for words, keys in OUTPUTS.items():
        result = check_json(words, keys, capsys)
        if words[:2] == ("runs", "."):
            assert [row["run"] for row in result] == ["run"]
        if " ".join(words[:2]) in RESULTS_ONLY or words[0] in RESULTS_ONLY:
            normal, _ = run_command(words, capsys)
            assert run_command(words, capsys, "--quiet") == (normal, "")


@pytest.mark.parametrize(
    "words, parts",
    [
        (("train", "-m", "recipe=medusa1,eagle3", "--json"), ("--json", "sweep", "-m")),
        (("completion", "bash", "--json"), ("--json",)),
        (("recipes", "--jsn"), ("--jsn", "--json")),
        (("recipes", "eagle3", "gkd"), ("eagle3 gkd", "recipes eagle3")),
        (("runs", "run=runs"), ("run", "sort=COLUMN")),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    words: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.run_command([*words])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    assert all(part in error for part in parts), error
