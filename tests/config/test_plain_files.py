"""Files of plain values: a key has one value, whoever reads it."""

from pathlib import Path
from typing import Any

import pytest

from spectrain.config.plain_files import read_json, read_yaml
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
