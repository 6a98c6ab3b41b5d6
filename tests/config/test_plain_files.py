"""Files of plain values: a key has one value, whoever reads it."""

from pathlib import Path
from typing import Any

import pytest

from spectrain.config.plain_files import check_choice_file, read_json, read_yaml
from spectrain.errors import UserError

READERS: dict[str, Any] = {"json": read_json, "yaml": read_yaml}
CONTRADICTIONS = ['{"a": 1, "a": 2}', '{"x": {"a": [1], "a": [2]}}', '{"x": [{"a": {}, "a": 0}]}']
AGREEMENTS = {
    '{"a": 1, "a": 1}': {"a": 1},
    '{"x": {"a": [1], "a": [1]}, "b": 3}': {"x": {"a": [1]}, "b": 3},
    '{"a": {"a": 1}}': {"a": {"a": 1}},
}


@pytest.mark.parametrize("form", READERS)
@pytest.mark.parametrize("text", CONTRADICTIONS)
def test_a_key_with_two_values_is_refused(tmp_path: Path, form: str, text: str) -> None:
    path = tmp_path / f"settings.{form}"
    path.write_text(text)
    with pytest.raises(
        UserError, match=rf"settings\.{form}: a is given twice.*; leave one of them"
    ):
        READERS[form](path)


@pytest.mark.parametrize("form", READERS)
def test_a_value_that_is_repeated_is_one(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"settings.{form}"
    for text, settings in AGREEMENTS.items():
        path.write_text(text)
        assert READERS[form](path) == settings


def test_lines_of_a_yaml_are_compared_like_groups(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("trainer:\n  lr: 1.0e-3\ntarget: tiny\ntrainer:\n  max_steps: 5\n")
    with pytest.raises(UserError, match="trainer is given twice"):
        read_yaml(path)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdef", "bcdefg")
)
MALFORMED = {
    "nested lists": ("[" * 2_000, "nested too deeply"),
    "nested mappings": ("".join(f"{' ' * depth}a:\n" for depth in range(600)), "nested"),
    "a call": ("a: !!python/object/apply:os.getcwd []\n", "this is not YAML"),
    "a NUL": ("a: 1\0\n", "this is not YAML"),
    "two documents": ("a: 1\n---\na: 2\n", "this is not YAML"),
    "a list as a key": ("? [1, 2]\n: 3\n", "this is not YAML"),
    "half a character": ('a: "\\ud800"\n', "half of a character"),
    "a long number": (f"a: {'9' * 5_000}\n", "this is not YAML"),
    "a long number in base 60": (f"a: 1{':59' * 400}\n", "more than 300 digits"),
    "a long number in base 16": (f"a: 0x{'f' * 4_000}\n", "more than 300 digits"),
    "many bytes": ("# " + "x" * 500_000, "more than 0.5 MB"),
}


@pytest.mark.parametrize("read", [read_yaml, check_choice_file])
@pytest.mark.parametrize("case", MALFORMED)
def test_a_yaml_that_cannot_be_read_is_named(case: str, read: Any, tmp_path: Path) -> None:
    content, words = MALFORMED[case]
    path = tmp_path / "my.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"my\.yaml: .*{words}") as refused:
        read(path)
    assert "\n" not in str(refused.value)


def test_aliases_are_those_of_choices_alone(tmp_path: Path) -> None:
    """A file of --config-dir may name a value twice, but not so often that a few lines fill the
    memory.
    """
    path = tmp_path / "my.yaml"
    path.write_text("base: &base {lr: 1}\ntrainer: {<<: *base, max_steps: 2}\n")
    check_choice_file(path)
    with pytest.raises(UserError, match="refers to a value by an alias"):
        read_yaml(path)
    for content in (BOMB, "a: &a [*a]\n"):
        path.write_text(content)
        with pytest.raises(UserError, match=r"my\.yaml: .*more than 50000 values.*correct it"):
            check_choice_file(path)
