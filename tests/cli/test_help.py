"""Help teaches what is true: its examples compose, its keys and defaults are the constructors'
own.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import save_file

from spectrain.cli import help
from spectrain.cli import main as cli
from spectrain.cli.overrides import check_words, to_settings, write_overrides
from spectrain.cli.recipe_list import describe_recipe
from spectrain.config.check import check_config
from spectrain.config.choices import (
    choice_files,
    conf_folders,
    find_owners,
    load_schema,
    load_yaml,
    read_header,
    settings_by_group,
)
from spectrain.config.missing import find_missing_package
from spectrain.config.signatures import PACKAGE_ROOT, list_keys
from spectrain.config.spec import RUN_KEYS
from spectrain.runs.defaults import resolve_eval_spec

CONFIGS = {
    name: command.config for name, command in help.COMMANDS.items() if command.config is not None
}
GROUPS = sorted(
    {
        group
        for config in CONFIGS.values()
        for group in load_schema(config).groups
        if group != "recipe"
    }
)
CHOICES = [(group, choice) for group in GROUPS for choice in choice_files(group, conf_folders())]
EVALUATION = "spectrain.eval.default.DefaultEvaluation"
TARGETS = sorted(
    {
        load_yaml(choice_files(group, conf_folders())[choice]).get("_target_")
        for group, choice in CHOICES
    }.union(target for config in CONFIGS.values() for target in load_schema(config).nodes.values())
    - {None}
)


def names_missing_choice(words: str) -> bool:
    """Return whether an example of the core names a choice of a package that is not installed,
    which the command answers in a sentence (tests/test_core_alone.py).
    """
    pairs = [word.split("=", 1) for word in shlex.split(words) if "=" in word]
    return any(
        name not in choice_files(group) and find_missing_package(group, name) is not None
        for group, name in pairs
    )


EXAMPLES = [
    (name, words)
    for name in CONFIGS
    for words in help.COMMANDS[name].examples
    if not names_missing_choice(words)
]


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a working directory with the run that the examples name."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "NAME"
    folder.mkdir(parents=True)
    description = {
        "drafter": {"_target_": "spectrain.drafters.ngram.Ngram"},
        "target": {"_target_": "spectrain.models.loading.load_tiny"},
        "tree": {"_target_": "spectrain.trees.Chain"},
    }
    (folder / "config.json").write_text(json.dumps(description))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    with initialize_config_dir(str(PACKAGE_ROOT / "conf"), version_base="1.3"):
        yield tmp_path


def test_every_command_has_help() -> None:
    """What can be run is explained, with three to five examples where there is so much to say,
    and the overview lists it.
    """
    assert set(cli.COMMAND_TASKS) == set(help.COMMANDS)
    for name, command in help.COMMANDS.items():
        assert re.search(rf"^  {name}  +{command.about[:20]}", help.format_overview(), re.MULTILINE)
        assert 2 <= len(command.examples) <= 5 and command.about and command.results


@pytest.mark.sweep(20, free=("words",))
@pytest.mark.parametrize("name, words", EXAMPLES)
def test_every_example_composes(name: str, words: str, run_folder: Path) -> None:
    """An example passes the check that the command makes."""
    config = CONFIGS[name]
    split_words = [word for word in shlex.split(words) if word not in help.COMMANDS[name].output]
    rest = [word for word in to_settings(name, split_words) if word != "-m"]
    check_words(name, to_settings(name, split_words))
    rest = [word.split(",")[0] if words.startswith("-m") else word for word in rest]
    composed = compose(config, overrides=write_overrides(rest))
    if name in ("eval", "chat"):
        OmegaConf.set_struct(composed, False)
        composed.pop("chat", None)
        assert resolve_eval_spec(composed)[0].drafter
        return
    schema = load_schema(config)
    allowed = {*schema.groups, *schema.nodes, *(key.name for key in schema.keys)}
    if "recipe" in allowed:
        allowed |= {*RUN_KEYS}
    check_config(composed, allowed - {"recipe"})


@pytest.mark.parametrize("name, config", CONFIGS.items())
def test_help_shows_every_group_and_key(
    name: str, config: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Nothing that can be set is left out, nothing is without a word on it, and no configuration
    is composed for it.
    """
    monkeypatch.setattr(sys, "argv", ["spectrain", *name.split(), "--help", "all"])
    monkeypatch.setattr(cli, "compose_and_call", None)
    cli.main()
    shown = capsys.readouterr().out
    schema = load_schema(config)
    assert shown.index("Examples") < min(
        shown.find(title) for title in ("Groups", "Keys", "KEY=VALUE") if title in shown
    )
    for group in schema.groups:
        assert f"\n  {group}=" in shown
        assert all(f"\n    {choice} " in shown for choice in choice_files(group, conf_folders()))
    for group, keys in settings_by_group(schema, to_settings(name, [])).items():
        assert all(f"\n  {group}.{key.name}=" in shown for key in keys)
    assert all(f"\n  {key.name}={key.default}" in shown and key.description for key in schema.keys)


def test_settings_of_a_part_stand_together() -> None:
    """The title of a section says how its keys are written with their part."""
    shown = help.explain_command("train", ["recipe=eagle3"], "all")
    _, _, rest = shown.partition("eval.KEY=VALUE, or eval.dataset.KEY=VALUE (eval=default)\n")
    section, _, _ = rest.partition("\n\n")
    names = [line.split("=")[0].strip() for line in section.splitlines() if "  eval." in line[:7]]
    expected = [key.name for key in list_keys(EVALUATION) if key.part == "dataset"]
    assert names == [f"eval.{name}" for name in expected]


@pytest.mark.parametrize("target", TARGETS)
def test_every_key_is_explained(target: str) -> None:
    """No setting of any constructor is shown without a word on it, or with a default that is a
    Python expression.
    """
    for key in list_keys(target):
        assert key.description
        assert not re.search(r"[()*]|\b(list|dict|tuple)\b", key.default or ""), key.name


def test_a_recipe_and_choices_say_whose_keys_are_shown() -> None:
    """Values of the recipe stand in for defaults, and the keys of its drafter are there."""
    shown = help.explain_command("train", ["recipe=medusa1", "tree=chain"], "all")
    assert "drafter=medusa" in shown and "drafter.num_heads=3 (GPU: 5)" in shown
    assert "tree.stop=" in shown and "trainer.save_every=200" in shown
    assert "tree.depth=3 (GPU: 5) " in help.explain_command(
        "train", ["recipe=medusa1"], "all"
    )  # the recipe takes it from drafter.num_heads
    assert "target.model=???" in help.explain_command("train", ["target=hf"], "all")


@pytest.mark.parametrize("name", ["train", "data store"])
def test_without_a_recipe_the_first_examples_values_are_shown(name: str) -> None:
    """Nobody trains with the constructor's rate where every recipe has another; of a drafter
    alone its own are shown.
    """
    shown = help.explain_command(name, [], "all")
    assert (
        "Values are those of recipe=eagle3;" in " ".join(shown.split())
        and "drafter.ttt_steps=3 (GPU: 7)" in shown
    )
    assert "trainer.epochs=3 (GPU: 10)" in shown and "data.limit=320 (GPU: null)" in shown
    drafter_help, (rate, *_) = (
        help.explain_command(name, ["drafter=ngram"], "all"),
        list_keys("spectrain.training.trainer.Trainer"),
    )
    assert (
        "Values are those" not in drafter_help
        and f"trainer.lr={rate.default} " in drafter_help
        and "drafter.longest=" in drafter_help
    )


def test_choices_have_a_first_comment() -> None:
    """Every yaml of a group, and every recipe, begins by saying what it is."""
    for group in [*GROUPS, "recipe"]:
        for choice, path in choice_files(group, conf_folders()).items():
            assert read_header(path), f"{group}={choice}"


def test_recipes_are_listed_and_described(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """All of them, or one with its settings; an unknown one is a mistake."""
    monkeypatch.setattr(sys, "argv", ["spectrain", "recipes"])
    cli.main()
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in choice_files("recipe", conf_folders()))
    monkeypatch.setattr(sys, "argv", ["spectrain", "recipes", "eagle3"])
    cli.main()
    assert "trainer.save_every=200" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["help"],
        ["train", "recipe=eagle3", "-h"],
        ["help", "runs"],
        ["data", "--help"],
        ["--version"],
    ],
)
def test_help_is_no_mistake(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Wherever it is asked for, it is shown with status 0."""
    monkeypatch.setattr(sys, "argv", ["spectrain", *words])
    try:
        cli.main()
    except SystemExit as stopped:
        assert stopped.code == 0
    assert "spectrain" in capsys.readouterr().out


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is wrapped to the width of the terminal, and so are examples, as lines of a shell."""
    monkeypatch.setenv("COLUMNS", "80")
    for topic in (None, "all"):
        for line in help.explain_command("train", ["recipe=eagle3"], topic).splitlines():
            assert len(line) <= 80, line


@pytest.mark.sweep(10, free=("name",))
@pytest.mark.parametrize("name", help.COMMANDS)
def test_help_fits_two_screens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a topic it has at most 48 lines of 80 columns, two screens, with the examples, every
    flag, and the keys that the command's entry names.
    """
    monkeypatch.setenv("COLUMNS", "80")
    command = help.COMMANDS[name]
    words = to_settings(name, [])
    shown = help.explain_command(name, words)
    assert len(shown.splitlines()) <= 48
    assert all(len(line) <= 80 for line in shown.splitlines())
    joined = shown.replace(" \\\n      ", " ")
    assert all(f"spectrain {name} {words}".rstrip() in joined for words in command.examples)
    assert all(f"\n  {flag}" in shown for flag in command.flags)
    everything = help.explain_command(name, words, "all")
    for key in command.keys:
        assert f"\n  {key}=" in shown or f"\n  {key}=" not in everything


@pytest.mark.parametrize(
    "name, start",
    [
        ("train", "recipe=eagle3 | medusa1 | "),
        ("train", "target=smollm2 | hf | "),
        ("plan", "recipe=eagle3 | "),
        ("export", "target=smollm2 | "),
    ],
)
def test_choices_of_a_line_begin_with_what_readers_want(
    name: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is cut begins with the default and the examples' choices; those of the core
    stand before those of packages.
    """
    monkeypatch.setenv("COLUMNS", "80")
    lines = help.explain_command(name, to_settings(name, [])).splitlines()
    line = next(line for line in lines if line.startswith(f"  {start}"))
    assert "target" not in start or " tiny" in line


@pytest.mark.parametrize("group", [None, "data", "bench"])
def test_the_overview_fits_two_screens(group: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns it has at most 48 lines; that of a group lists the commands of this group."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = help.format_overview(group).splitlines()
    assert len(lines) <= 48 and all(len(line) <= 80 for line in lines)
    for name in help.COMMANDS:
        is_listed = any(line.startswith(f"  {name} ") for line in lines)
        assert is_listed == (group is None or name.startswith(f"{group} "))


def test_help_shows_one_group(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The word after --help is a group; a wrong one names the nearest."""
    monkeypatch.setattr(sys, "argv", ["spectrain", "train", "tree=chain", "--help", "tree"])
    cli.main()
    shown = capsys.readouterr().out
    assert "tree.depth=" in shown and "trainer." not in shown
    monkeypatch.setattr(sys, "argv", ["spectrain", "train", "--help", "trainers"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2 and "trainer" in capsys.readouterr().err


@pytest.mark.parametrize("name", CONFIGS)
def test_the_keys_used_most_exist(name: str) -> None:
    """Help leaves out a key that no choice of its group has."""
    schema = load_schema(str(CONFIGS[name]))
    own = {key.name for key in schema.keys}
    for key in help.COMMANDS[name].keys:
        group, _, setting = key.rpartition(".")
        of_node = [entry.name for entry in list_keys(schema.nodes.get(group, ""))] if group else []
        has_owner = key in own or setting in of_node or find_owners(group, setting)
        assert has_owner or key == "drafter.init", key


@pytest.mark.parametrize("name", sorted(choice_files("recipe", conf_folders())))
def test_a_recipe_is_described_by_values(name: str) -> None:
    """Values are shown as a user writes them, not as references to the machine or to other keys."""
    assert "${" not in describe_recipe(name)
