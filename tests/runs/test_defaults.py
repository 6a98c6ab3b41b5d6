"""What an evaluation leaves unsaid comes from the run that it names, then from the defaults of
training.
"""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from safetensors.torch import save_file

from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.runs.defaults import resolve_eval_spec


def resolve_eval(*overrides: str) -> tuple[RunSpec, Path]:
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        return resolve_eval_spec(compose("eval", overrides=list(overrides)))


def save_drafter_config(folder: Path) -> Path:
    """Write a drafter directory with settings unlike the defaults."""
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
    """Without a word on them, drafter, target and tree are those that were trained; the rest are
    the defaults.
    """
    run = tmp_path / "run"
    if inside:
        run.mkdir()
    save_drafter_config(run / "drafter" if inside else run)
    config, folder = resolve_eval(f"run={run}")
    assert folder == run
    assert (
        config.drafter.settings.get("longest"),
        config.tree.settings.get("depth"),
        config.recipe_name,
    ) == (
        5,
        7,
        "mine",
    )
    assert (config.target.choice, config.acceptance.choice, config.eval.choice) == (
        "tiny",
        "greedy",
        "default",
    )


def test_eval_settings_of_the_command_win(tmp_path: Path) -> None:
    """A chosen group replaces the run's; a single key changes it and keeps its neighbours."""
    run = save_drafter_config(tmp_path / "run")
    assert resolve_eval(f"run={run}", "++tree.depth=2")[0].tree == GroupSpec(
        "tree", "chain", {"depth": 2}
    )
    chosen = resolve_eval(f"run={run}", "tree=eagle2")[0].tree
    assert chosen.choice == "eagle2" and chosen.settings.get("depth") == 5
    with pytest.raises(UserError, match=r"tree\.depht.*depth"):
        resolve_eval(f"run={run}", "++tree.depht=2")


def test_eval_is_named_after_its_prompts(tmp_path: Path) -> None:
    """Another set of prompts gets a folder of its own unless it is named."""
    run = save_drafter_config(tmp_path / "run")
    assert (
        resolve_eval(f"run={run}", "++eval.prompts=some/maths.jsonl")[0].eval.settings.get("name")
        == "maths"
    )
    assert (
        resolve_eval(f"run={run}", "++eval.prompts=some/maths.jsonl", "++eval.name=mine")[
            0
        ].eval.settings.get("name")
        == "mine"
    )


def test_eval_of_a_drafter_without_training_needs_no_run() -> None:
    """drafter=ngram is enough; the results go below runs/eval."""
    config, folder = resolve_eval("drafter=ngram", "target=tiny")
    assert folder == Path("runs") / "eval"
    assert (config.drafter.choice, config.target.choice) == ("ngram", "tiny")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"drafter": {}}'], ids=["not JSON", "not an object", "no target"]
)
def test_eval_refuses_what_describes_no_drafter(tmp_path: Path, text: str) -> None:
    """A damaged config.json is named."""
    run = save_drafter_config(tmp_path / "run")
    (run / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json: (this is not|it holds no settings)"):
        resolve_eval(f"run={run}")
