"""The settings of `spectrain follow`."""

from pathlib import Path
from typing import Any

import pytest

from spectrain.cli.interface import compose_config, hydra_context
from spectrain_serve.follow.command import resolve_follow_spec
from tests.config.test_resolve import run

__all__ = ["run"]


@pytest.mark.parametrize(
    "setting, group, choice, expected",
    [
        ({}, "optimizer", "muon", {}),
        ({"optimizer": "adamw"}, "optimizer", "adamw", {}),
        ({"trainer.epochs": 3}, "trainer", "default", {"lr": 0.1, "epochs": 3}),
        ({"tree": "chain"}, "tree", "chain", {"depth": 3}),
        ({"tree.depth": 2}, "tree", "chain", {"depth": 2}),
    ],
    ids=["nothing", "a choice", "a setting", "the same choice", "a tree's setting"],
)
def test_a_candidate_is_trained_as_its_run_was(
    run: Path, setting: dict[str, Any], group: str, choice: str, expected: dict[str, Any]
) -> None:
    """What conf/ chooses for `spectrain follow` stands below the run's own settings."""
    with hydra_context():
        config, words = compose_config("follow", {"run": run, "server": "vllm", **setting})
        spec, _ = resolve_follow_spec(config, words)
    assert (getattr(spec, group).choice, getattr(spec, group).settings) == (choice, expected)
