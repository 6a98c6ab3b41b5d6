"""The tests of tests/settings/test_damaged_files.py that are about ideas."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spectrain.errors import UserError
from spectrain_research.controllers.tree_policy import TreePolicy
from spectrain_research.next_token_tables.bigrams import _load_array
from tests.settings.test_damaged_files import ODD, TEXT, write_no_keys


@pytest.mark.parametrize("damage", [*TEXT, write_no_keys])
def test_a_tree_policy(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"depth": 3, "top_k": 2, "weights": [[1.0], [2.0]]}))
    damage(path)
    with pytest.raises(UserError, match=r"policy\.json: [^\n]*; [^\n]*$"):
        TreePolicy(depth=3, top_k=2, policy=str(path))


@pytest.mark.parametrize(
    "weights",
    ["x", [["a"]], [[[1.0]]], [[1.0] * 4], [[1.0], [2.0]], [[float("nan")] * 4] * 2, 3],
)
def test_the_weights_of_a_tree_policy(tmp_path: Path, weights: object) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"depth": 3, "top_k": 2, "weights": weights}))
    with pytest.raises(
        UserError,
        match=r"policy\.json: its? [^\n]*weights[^\n]*; delete it, and the next run fits one anew",
    ):
        TreePolicy(depth=3, top_k=2, policy=str(path))


@pytest.mark.parametrize("damage", ODD)
def test_a_table_of_bigrams(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(100))
    assert _load_array(path, "iu")[-1] == 99
    with pytest.raises(UserError, match=r"its numbers are of the type int64\); delete the folder"):
        _load_array(path, "f")
    damage(path)
    with pytest.raises(
        UserError, match=r"tokens\.npy: it cannot be read [^\n]*; delete the folder"
    ):
        _load_array(path, "iu")
