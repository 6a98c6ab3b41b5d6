"""Evaluation prompts: every format reads, every bad line is named."""

import json
from pathlib import Path

import pytest

from spectrain.errors import UserError
from spectrain.eval.prompts import Prompt, read_prompts

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Why?"},
]


def written(folder: Path, *lines: object) -> str:
    """A file of these lines, objects as JSON."""
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return str(path)


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"id": "x", "category": "math", "turns": ["1 + 1?", "And 2?"]}, Prompt("x", "math", ["1 + 1?", "And 2?"], [])),
        ({"question_id": 81, "category": "qa", "turns": ["Who?"]}, Prompt("81", "qa", ["Who?"], [])),
        ({"prompt": "Say hi"}, Prompt("1", "all", ["Say hi"], [])),
        ({"id": 5, "messages": MESSAGES}, Prompt("5", "all", ["Why?"], MESSAGES[:-1])),
        ({"messages": MESSAGES[:3]}, Prompt("1", "all", ["Hi"], MESSAGES[:1])),
    ],
)
def test_every_format_is_read(tmp_path: Path, row: dict, prompt: Prompt) -> None:
    """Spec-Bench turns, messages (a final answer dropped) and plain prompts give the same kind of object."""
    assert read_prompts(written(tmp_path, row), None) == [prompt]


def test_blank_lines_are_skipped_and_still_counted(tmp_path: Path) -> None:
    """A nameless prompt is named after its line."""
    prompts = read_prompts(written(tmp_path, {"prompt": "a"}, "", {"prompt": "b"}), None)
    assert [(prompt.id, prompt.turns) for prompt in prompts] == [("1", ["a"]), ("3", ["b"])]


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\u2029"])
def test_a_line_ends_at_a_newline_only(tmp_path: Path, separator: str) -> None:
    """Characters that JSON allows unescaped, and that Unicode calls line breaks, stay inside their prompt."""
    line = json.dumps({"prompt": f"one{separator}two"}, ensure_ascii=False)
    assert read_prompts(written(tmp_path, line), None)[0].turns == [f"one{separator}two"]


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        '["a list"]',
        '"a string"',
        "{}",
        '{"turns": []}',
        '{"turns": [1]}',
        '{"turns": "text"}',
        '{"prompt": 3}',
        '{"messages": []}',
        '{"messages": [{"role": "assistant", "content": "only an answer"}]}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": ["text"]}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    """The error names the file and the line."""
    path = written(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(UserError) as caught:
        read_prompts(path, None)
    assert f"{path}, line 2" in str(caught.value)


@pytest.mark.parametrize("lines", [[], ["", " "]])
def test_an_empty_file_is_refused(tmp_path: Path, lines: list[str]) -> None:
    """A file without prompts says so."""
    path = written(tmp_path, *lines)
    with pytest.raises(UserError, match="holds no prompt"):
        read_prompts(path, None)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The error names the key and the path."""
    with pytest.raises(UserError, match=r"eval\.prompts=.*nowhere\.jsonl"):
        read_prompts(str(tmp_path / "nowhere.jsonl"), None)


@pytest.mark.parametrize(
    "limit, ids",
    [
        (1, ["0"]),
        (2, ["0", "3"]),
        (3, ["0", "3", "5"]),
        (4, ["0", "1", "3", "5"]),
        (5, ["0", "1", "3", "4", "5"]),
        (99, list("012345")),
    ],
)
def test_a_limit_spreads_over_categories(tmp_path: Path, limit: int, ids: list[str]) -> None:
    """Categories are taken in turn; the prompts keep the order of the file."""
    rows = [{"id": str(i), "category": category, "prompt": "?"} for i, category in enumerate("aaabbc")]
    assert [prompt.id for prompt in read_prompts(written(tmp_path, *rows), limit)] == ids


def test_shipped_prompts() -> None:
    """Held-out prompts ship with the project; their ids are distinct, and a limit covers every category."""
    prompts = read_prompts(None, None)
    categories = {prompt.category for prompt in prompts}
    assert len({prompt.id for prompt in prompts}) == len(prompts) > 1 and len(categories) > 1
    assert {prompt.category for prompt in read_prompts(None, len(categories))} == categories
