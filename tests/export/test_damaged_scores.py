"""A score of another form is named before a card is written of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from spectrain.errors import UserError
from spectrain.export.card import read_shown_scores
from tests.installed import load_cases

RATIO = {"pooled": 2.0, "ci95": [1.9, 2.1]}
SCORE: dict[str, Any] = {
    "acceptance_length": RATIO,
    "acceptance_by_depth": [0.5, 0.25],
    "tree": {"name": "chain", "depth": 2},
    "speedup": {"ratio": 1.5, "ci95": [1.4, 1.6], "quotable": True},
    "lossless": {"rule": "greedy", "checked": 1, "identical": 1},
    "setting": {"target": "tiny", "prompts": 1, "max_new_tokens": 8, "rule": "greedy"},
    "acceptance": {},
    "headline": [],
}
DAMAGES: list[dict[str, Any]] = [
    {"headline": None},
    {"setting": None},
    {"setting": [1]},
    {"speedup": True},
    {"acceptance": {"chain": 5}},
    {"acceptance_length": [1]},
    {"acceptance_length": {"pooled": "x", "ci95": None}},
    {"acceptance_by_depth": ["x"]},
    {"acceptance_by_depth": [-1, 5]},
    {"compared": {"auto": [None]}},
    *load_cases(__name__).get("DAMAGES", ()),
]


def save_score(run: Path, **changes: Any) -> None:
    folder = run / "eval" / "heldout"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({**SCORE, **changes}))


def test_a_score_is_shown(tmp_path: Path) -> None:
    save_score(tmp_path)
    assert read_shown_scores(tmp_path) == {"heldout": SCORE}


@pytest.mark.parametrize("change", DAMAGES)
def test_a_score_of_another_form_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    save_score(tmp_path, **change)
    with pytest.raises(UserError, match="summary.json: it has another form than a score") as raised:
        read_shown_scores(tmp_path)
    assert "\n" not in str(raised.value)
