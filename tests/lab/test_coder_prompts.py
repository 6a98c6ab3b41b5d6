"""Prompts of the coding model: mixed in an order that the seed decides, none of an evaluation."""

import json
import random
from pathlib import Path

import pytest

from lab.benchmarks.coding_questions import QUESTIONS
from lab.coder.make_prompts import (
    MakePrompts,
    list_phrases,
    mix_prompts,
    read_functions,
)

SOURCE = '''
def clip_values(values, low, high):
    """Return the values, each moved to the nearer end of a range where it lies outside of it, and
    unchanged where it lies inside; both ends belong to the range."""
    return [min(max(value, low), high) for value in values]


def short():
    return 1
'''


def test_a_function_is_read_with_its_opening(tmp_path: Path) -> None:
    path = tmp_path / "clip.py"
    path.write_text(SOURCE)
    ((text, opening),) = read_functions(path)
    assert text in SOURCE and opening is not None
    assert text.startswith(opening) and opening.endswith('belong to the range."""')


def test_kinds_take_turns_until_they_end() -> None:
    kinds = {"a": ["a1", "a2", "a3"], "b": ["b1"]}
    mixed = mix_prompts(kinds, 10, random.Random(0))
    assert mixed[0][0] + mixed[1][0] == "ab" and sorted(mixed) == ["a1", "a2", "a3", "b1"]
    assert mix_prompts(kinds, 2, random.Random(0))[1] == "b1"


def test_no_prompt_repeats_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What shares a phrase of eight words with an evaluation prompt is left out and counted."""
    evaluation = [json.loads(line)["prompt"] for line in QUESTIONS.open()]
    copied = f"Please: {evaluation[2]}"
    own = "Explain what this code does, line by line, to a new colleague of mine."
    monkeypatch.setattr("lab.coder.make_prompts.list_function_prompts", lambda *_: [copied, own])
    out = tmp_path / "prompts.jsonl"
    MakePrompts(str(out), sharegpt=False, count=6).run()
    assert "functions: 1 prompts, 1 left out" in capsys.readouterr().out
    first = out.read_text()
    rows = [json.loads(line)["prompt"] for line in first.splitlines()]
    assert len(rows) == 6 and own in rows and copied not in rows
    phrases = set().union(*map(list_phrases, evaluation))
    assert not any(phrases & list_phrases(row) for row in rows)
    MakePrompts(str(out), sharegpt=False, count=6).run()
    assert out.read_text() == first
