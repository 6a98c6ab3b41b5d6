"""Files name choices: what is written is read again."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from spectrain.config.build import GroupSpec, build, save_groups
from spectrain.config.choices import (
    named_folders,
    set_choice_folders,
)
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError


@pytest.fixture(autouse=True)
def our_choices_alone() -> None:
    """Whatever folder of choices a command of another test has named."""
    set_choice_folders([])


def test_a_configuration_is_saved_and_loaded(tmp_path: Path) -> None:
    """A full configuration is saved as config.yaml and loaded again; no import path is left in
    it.
    """
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("train", overrides=["recipe=eagle3", "target=tiny"])
    spec = RunSpec.from_config(config)
    saved = spec.save()
    assert (
        "spectrain." not in json.dumps(saved)
        and saved["tree"]["choice"] == "eagle2"
        and saved["tracker"] == {}
    )
    (tmp_path / "config.yaml").write_text(spec.to_yaml())
    assert RunSpec.load(tmp_path / "config.yaml") == spec


@pytest.mark.parametrize("node", ["eagle2", "[1]", "3"])
def test_a_group_that_is_no_group_is_named(node: str, tmp_path: Path) -> None:
    """A config.yaml that ends inside of a word holds a text where settings belong."""
    path = tmp_path / "config.yaml"
    path.write_text(f"drafter:\n  choice: ngram\ntree: {node}\n")
    with pytest.raises(UserError, match="config.yaml: tree is no group of settings"):
        RunSpec.load(path)


def test_that_code_may_run_is_never_saved() -> None:
    """The consent to run a target's code is the command's alone."""
    saved = {"choice": "hf", "model": "a/b", "trust_remote_code": True}
    spec = GroupSpec.from_saved("target", saved, "here")
    assert spec.save() == {"choice": "hf", "model": "a/b"}


def test_a_choice_of_the_user_s_own_folder(tmp_path: Path) -> None:
    """A family outside the project is saved by its name, and read where --config-dir names its
    folder.
    """
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "mine.yaml").write_text("_target_: mine.Drafter\n")
    saved = save_groups({"drafter": {"_target_": "spectrain.drafters.ngram.Ngram"}, "tree": None})
    assert saved == {"drafter": {"choice": "ngram"}, "tree": None}
    with pytest.raises(UserError, match="drafter=mine: there is no such choice; .*--config-dir"):
        GroupSpec.from_saved("drafter", {"choice": "mine"}, "config.json")
    try:
        set_choice_folders(named_folders(["--config-dir", str(tmp_path)]))
        node = {"_target_": "mine.Drafter", "size": 3}
        saved = {"choice": "mine", "size": 3}
        spec = GroupSpec.from_saved("drafter", saved, "config.json")
        assert (spec.node, spec.save()) == (node, saved)
        assert GroupSpec.from_saved("drafter", node, "config.json") == spec
        with pytest.raises(UserError, match="mine.Drafter is not found; PYTHONPATH"):
            build(node)
    finally:
        set_choice_folders([])
