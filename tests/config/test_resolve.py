"""A merge of settings remembers the layer that sets each value, and a later layer replaces an
earlier one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from spectrain.cli.interface import compose_config, compose_spec, hydra_context
from spectrain.config.build import LAYERS
from spectrain.config.choices import load_schema
from spectrain.config.resolve import default_group, find_named_keys, merge_layers, split_command
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError

CHAIN = {"_target_": "spectrain.trees.Chain", "depth": 7}


def test_later_layers_win_and_settings_alone_change_the_group_below() -> None:
    merged, layers = merge_layers(
        {
            "config": {"tree": {"_target_": "spectrain.trees.Eagle2", "budget": 9}, "run": None},
            "run": {"tree": CHAIN, "eval": {"_target_": "x.Y", "limit": 3, "kwargs": {"a": 1}}},
            "command": {"tree": None, "eval": {"kwargs": {"b": 2}}, "run": "runs/x"},
        }
    )
    assert merged["tree"] == CHAIN
    assert layers["tree"] == {"choice": "run", "depth": "run"}
    assert merged["eval"] == {"_target_": "x.Y", "limit": 3, "kwargs": {"a": 1, "b": 2}}
    assert layers["eval"] == {"choice": "run", "limit": "run", "kwargs": "command"}
    assert merged["run"] == "runs/x"


def test_words_name_choices_and_settings() -> None:
    words = ["tree=chain", "++tree.depth=2", "~data.limit", "+eval.a.b=3", "tracker@x=none", "-m"]
    assert find_named_keys(words) == {
        "tree": {"choice", "depth"},
        "data": {"limit"},
        "eval": {"a"},
        "tracker": {"choice"},
        "-m": {"choice"},
    }


def test_a_chosen_group_is_the_commands_and_a_named_setting_alone_is_too() -> None:
    composed = {"tree": CHAIN, "trainer": {"_target_": "x.Y", "lr": 1, "epochs": 2}, "run": "x"}
    config, command = split_command(composed, ["tree=chain", "++trainer.lr=1", "run=x"])
    assert command == {"tree": CHAIN, "trainer": {"lr": 1}, "run": "x"}
    assert config == {"trainer": {"_target_": "x.Y", "epochs": 2}}


def test_a_spec_knows_who_set_a_value() -> None:
    """Of the recipe, of conf/, of the command, or of nobody but the constructor."""
    with hydra_context():
        spec = compose_spec({"recipe": "eagle3", "target": "tiny", "trainer.lr": 0.1})
    assert spec.target.layer == "command"
    assert spec.trainer.find_layer("lr") == "command"
    assert spec.trainer.find_layer("epochs") == "recipe"
    assert spec.trainer.find_layer("betas") == "default"
    assert spec.trainer.find_layer("choice") == "config"
    assert spec.drafter.find_layer("choice") == "recipe"
    assert spec.source.layer == "config"


@pytest.mark.parametrize("group, key", [("adapter", "rank"), ("tracker", "project")])
def test_a_setting_that_nothing_reads_is_refused(group: str, key: str) -> None:
    """A group without a choice has no constructor that would read it; a group that the command
    empties itself may have some.
    """
    words = {"recipe": "eagle3", "target": "tiny", f"{group}.{key}": 4}
    with hydra_context():
        with pytest.raises(UserError, match=f"{group}.{key} is read by nothing, .* {group}="):
            compose_spec(words)
        emptied = {"recipe": "eagle3", "target": "tiny", "tracker": "none", "tracker.project": 4}
        assert not compose_spec(emptied).tracker


@pytest.mark.parametrize("group", ["target", "tree", "acceptance", "eval", "trainer"])
def test_defaults_are_those_that_hydra_composes(group: str) -> None:
    with hydra_context():
        composed, _ = compose_config("train", {"drafter": "ngram"})
    assert default_group(group) == getattr(RunSpec.from_config(composed), group)


def test_a_group_without_a_default_is_empty() -> None:
    empty = [group for group, choice in load_schema("train").groups.items() if choice is None]
    assert "server" in empty
    assert not any(default_group(group) for group in empty)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder with an optimizer and a schedule unlike the defaults of training."""
    folder = tmp_path / "run"
    (folder / "drafter").mkdir(parents=True)
    groups: dict[str, Any] = {
        "target": {"choice": "tiny"},
        "drafter": {"choice": "ngram", "longest": 5},
        "tree": {"choice": "chain", "depth": 7},
        "acceptance": {"choice": "greedy"},
    }
    (folder / "drafter" / "config.json").write_text(json.dumps({**groups, "recipe": "mine"}))
    save_file({"x": torch.zeros(1)}, folder / "drafter" / "model.safetensors")
    trained = {
        **groups,
        "trainer": {"choice": "default", "lr": 0.1},
        "optimizer": {"choice": "muon"},
        "schedule": {"choice": "wsd"},
    }
    (folder / "config.yaml").write_text(yaml.dump(trained))
    return folder


def test_the_layers_are_in_the_order_in_which_they_win() -> None:
    assert LAYERS == ("default", "config", "recipe", "run", "file", "command")
