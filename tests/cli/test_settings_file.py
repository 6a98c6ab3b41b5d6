"""A settings file is a layer below the command's words, and sets nothing that only they may set."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from spectrain.cli.overrides import write_overrides
from spectrain.cli.print_config import format_settings
from spectrain.cli.settings_file import split_settings_file
from spectrain.config.build import register_resolvers
from spectrain.config.command_only import list_command_only
from spectrain.config.spec import RunSpec, read_run
from spectrain.errors import UserError

TEXT = """
recipe: eagle3
target: tiny
data: chats.jsonl
trainer: {max_steps: 7, lr: 1e-3}
tree: {choice: chain, depth: 2}
tracker: {}
run: runs/mine
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(TEXT)
    return Path("my.yaml")


def read_spec(*words: str) -> RunSpec:
    """Return the settings of a training with my.yaml and these words, as hydra composes them."""
    file, own = split_settings_file("train", ["my.yaml", *words])
    assert file is not None
    every = [*file.words, *own]
    GlobalHydra.instance().clear()
    register_resolvers()
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        composed = compose("train", overrides=write_overrides(every))
    return read_run(composed, (), every, "eagle3", file=file)[0]


def test_the_file_is_a_layer_between_the_recipe_and_the_command(file: Path) -> None:
    spec = read_spec("trainer.max_steps=9")
    assert (spec.target.choice, spec.data.choice, spec.tree.choice) == ("tiny", "jsonl", "chain")
    assert spec.data.settings.get("path") == "chats.jsonl" and spec.run == "runs/mine"
    assert spec.trainer.settings.get("max_steps") == 9 and spec.trainer.settings.get("lr") == 1e-3
    assert spec.trainer.find_layer("max_steps") == "command"
    assert spec.trainer.find_layer("lr") == "file" and spec.tree.find_layer("depth") == "file"
    assert spec.drafter.find_layer("ttt_steps") in ("recipe", "config", "default")
    # What the file names on the hub is not downloaded.
    assert spec.data.origin == "my.yaml" and spec.target.origin is None


def test_a_choice_of_the_command_replaces_the_group_of_the_file(file: Path) -> None:
    spec = read_spec("data=embedded", "tree=eagle2")
    assert spec.data.choice == "embedded" and spec.data.origin is None
    assert spec.data.settings.get("path") is None and spec.tree.layer == "command"


def test_a_path_that_the_command_names_may_be_downloaded(file: Path) -> None:
    assert read_spec("data.path=other.jsonl").data.origin is None


@pytest.mark.parametrize("setting", list_command_only(), ids=lambda setting: setting.name)
def test_a_file_sets_nothing_that_only_a_command_sets(setting: Any, file: Path) -> None:
    key = "url" if setting.key == "*" else setting.key
    file.write_text(f"recipe: eagle3\n{setting.group}: {{{key}: x}}\n")
    with pytest.raises(UserError) as error:
        split_settings_file("train", ["my.yaml"])
    # What would run code is refused before the table is read.
    assert f"my.yaml: {setting.group}" in str(error.value)
    assert setting.effect == "runs code" or setting.example in str(error.value)


MISTAKES = {
    "tracker: wandb": ("tracker", "tracker=CHOICE"),
    "run: ../elsewhere": ("run", "working directory"),
    "run: /tmp/elsewhere": ("run", "working directory"),
    "source: {choice: store, path: /tmp/elsewhere}": ("source.path", "working directory"),
    "trainer: {lrr: 1}": ("my.yaml", "trainer.lrr", "lr"),
    "recipe: eagel3": ("my.yaml", "eagel3", "eagle3"),
    "trainr: {lr: 1}": ("my.yaml", "trainr", "trainer"),
    "drafter: {_target_: os.system}": ("_target_",),
    "run: ${oc.env:HOME}": ("${..}",),
    "'~tracker': x": ("no name",),
    "[1]": ("no settings",),
    "a: [": ("not YAML",),
    "trainer: {lr: 2020-01-01}": ("trainer.lr", "quotes"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_one_sentence(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(UserError) as error:
        split_settings_file("train", ["my.yaml"])
    assert all(part in str(error.value) for part in ("my.yaml", *MISTAKES[text]))


def test_a_missing_file_and_two_files_are_mistakes(file: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: there is no such file"):
        split_settings_file("train", ["none.yaml"])
    with pytest.raises(UserError, match="takes one settings file"):
        split_settings_file("train", ["my.yaml", "my.yaml"])


def test_the_settings_of_a_run_folder_are_a_settings_file(file: Path) -> None:
    (file.parent / "config.yaml").write_text(read_spec().to_yaml())
    saved, _ = split_settings_file("train", ["config.yaml"])
    assert saved is not None and "recipe=eagle3" in saved.words
    assert {"trainer.max_steps=7", "tree=chain", "data.path='chats.jsonl'"} <= {*saved.words}


def test_every_setting_is_printed_with_its_layer(file: Path) -> None:
    lines = [*format_settings(read_spec("trainer.max_steps=9"))]
    rows = [" ".join(line.split()) for line in lines]
    assert {"max_steps: 9 # command", "lr: 0.001 # file", 'choice: "chain" # file'} <= {*rows}
    printed = yaml.safe_load("\n".join(lines))
    assert printed["run"] == "runs/mine" and printed["data"]["path"] == "chats.jsonl"
