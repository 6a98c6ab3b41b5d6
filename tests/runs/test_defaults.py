"""What an evaluation leaves unsaid comes from the run that it names, then from the defaults of training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from safetensors.torch import save_file

from spectrain.config.check import check_config
from spectrain.config.keys import TRAIN_KEYS
from spectrain.errors import UserError
from spectrain.runs.defaults import resolve_eval_config


def completed(*overrides: str) -> Any:
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        whole, folder = resolve_eval_config(compose("eval", overrides=list(overrides)))
        return check_config(whole, TRAIN_KEYS), folder


def saved(folder: Path) -> Path:
    """A drafter directory with settings unlike the defaults."""
    folder.mkdir()
    node = {"_target_": "spectrain.drafters.ngram.Ngram", "longest": 5}
    tree = {"_target_": "spectrain.trees.Chain", "depth": 7}
    description = {
        "drafter": node,
        "target": {"_target_": "spectrain.models.loading.load_tiny"},
        "tree": tree,
        "recipe": "mine",
    }
    (folder / "config.json").write_text(json.dumps(description))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("inside", [True, False], ids=["run folder", "drafter directory"])
def test_eval_takes_the_settings_of_the_run(tmp_path: Path, inside: bool) -> None:
    """Without a word on them, drafter, target and tree are those that were trained; the rest are the defaults."""
    run = tmp_path / "run"
    if inside:
        run.mkdir()
    saved(run / "drafter" if inside else run)
    config, folder = completed(f"run={run}")
    assert folder == run
    assert (config.drafter.longest, config.tree.depth, config.recipe_name) == (5, 7, "mine")
    assert config.target._target_.endswith("load_tiny")
    assert config.acceptance._target_.endswith("Greedy") and config.eval._target_.endswith("Evaluation")


def test_eval_settings_of_the_command_win(tmp_path: Path) -> None:
    """A chosen group replaces the run's; a single key changes it and keeps its neighbours."""
    run = saved(tmp_path / "run")
    assert completed(f"run={run}", "++tree.depth=2")[0].tree == {"_target_": "spectrain.trees.Chain", "depth": 2}
    chosen = completed(f"run={run}", "tree=eagle2")[0].tree
    assert chosen._target_ == "spectrain.trees.Eagle2" and chosen.depth == 5
    with pytest.raises(UserError, match=r"tree\.depht.*depth"):
        completed(f"run={run}", "++tree.depht=2")


def test_eval_is_named_after_its_prompts(tmp_path: Path) -> None:
    """Another set of prompts gets a folder of its own unless it is named."""
    run = saved(tmp_path / "run")
    assert completed(f"run={run}", "++eval.prompts=some/maths.jsonl")[0].eval.name == "maths"
    assert completed(f"run={run}", "++eval.prompts=some/maths.jsonl", "++eval.name=mine")[0].eval.name == "mine"


def test_eval_of_a_drafter_without_training_needs_no_run() -> None:
    """drafter=ngram is enough; the results go below runs/eval."""
    config, folder = completed("drafter=ngram", "target=tiny")
    assert folder == Path("runs") / "eval"
    assert config.drafter._target_.endswith("Ngram") and config.target._target_.endswith("load_tiny")


@pytest.mark.parametrize("text", ["{", "[]", '{"drafter": {}}'], ids=["not JSON", "not an object", "no target"])
def test_eval_refuses_what_describes_no_drafter(tmp_path: Path, text: str) -> None:
    """A damaged config.json is named."""
    run = saved(tmp_path / "run")
    (run / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json: (this is not|it holds no settings)"):
        completed(f"run={run}")
