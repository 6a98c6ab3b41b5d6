"""Settings by part: both ways to write a setting mean the same, in words, files and saved runs."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from spectrain.cli.interface import compose_spec, hydra_context
from spectrain.cli.overrides import to_settings
from spectrain.cli.print_config import format_settings
from spectrain.cli.settings_file import read_settings
from spectrain.config.build import GroupSpec
from spectrain.config.choices import list_constructors
from spectrain.config.grouped import (
    drop_part,
    flatten_settings,
    group_settings,
    list_part_keys,
)
from spectrain.config.signatures import list_keys
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError

TARGET = "spectrain.eval.default.DefaultEvaluation"


def test_a_name_is_unique_and_no_part_is_named_like_a_setting() -> None:
    """So a part may be left out, and a mapping in a file is known to be a part."""
    for target in list_constructors("eval").values():
        keys = list_keys(target)
        assert max(Counter(key.name for key in keys).values()) == 1
        assert not {key.part for key in keys} & {key.name for key in keys}
        assert all(key.part for key in keys), target


def test_every_setting_is_written_in_both_ways() -> None:
    for key in list_keys(TARGET):
        full = f"eval.{key.part}.{key.name}"
        assert drop_part(f"{full}=[1,2]") == f"eval.{key.name}=[1,2]"
        assert drop_part(f"++{full}=x=y") == f"++eval.{key.name}=x=y"
        inside = {key.part: {key.name: 1}}
        assert flatten_settings("eval", inside) == {key.name: 1}
        assert flatten_settings("eval", {key.full_name: 1}) == {key.name: 1}
        assert group_settings({key.name: 1}, TARGET) == inside


@pytest.mark.parametrize(
    "word",
    [
        "eval.limit=3",
        "eval.other_device.tflops=3",
        "eval.decoding.limit=3",
        "drafter.init.limit=3",
        "eval.dataset={limit: 3}",
        "runs/eval.dataset.limit",
    ],
)
def test_other_words_stay(word: str) -> None:
    assert drop_part(word) == word


def test_a_setting_outside_of_its_part_counts() -> None:
    """A word of a command stands outside, and a recipe below it inside."""
    settings = {"limit": 3, "dataset": {"limit": 20, "context": "4k"}, "slo": {"ttft": "1s"}}
    assert flatten_settings("eval", settings) == {
        "limit": 3,
        "context": "4k",
        "slo": {"ttft": "1s"},
    }
    assert flatten_settings("drafter", {"dataset": {"limit": 20}}) == {"dataset": {"limit": 20}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoding": {"limit": 3}}, r"^eval\.decoding\.limit: .*write eval\.dataset\.limit$"),
        ({"dataset": {"limits": 3}}, r"^eval\.dataset\.limits: .*nearest is limit"),
    ],
)
def test_a_setting_that_its_part_does_not_have(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        flatten_settings("eval", settings)


def compose_training(words: list[str]) -> RunSpec:
    """Compose a training of these words as the command line does."""
    settings = dict(word.split("=", 1) for word in to_settings("train", words))
    with hydra_context():
        return compose_spec(settings)


def test_words_with_and_without_parts_make_the_same_run() -> None:
    """The recipe's own values, which it holds by part, are replaced by both."""
    words = ["recipe=eagle3", "target=tiny"]
    specs = [
        compose_training([*words, "eval.limit=7", "eval.report=false"]),
        compose_training([*words, "eval.dataset.limit=7", "eval.output.report=false"]),
    ]
    assert specs[0].eval == specs[1].eval
    assert specs[0].eval.settings.get("limit") == 7 and specs[0].eval.settings.get(
        "max_new_tokens"
    ) in (64, 128)
    for spec in specs:
        assert spec.eval.find_layer("limit") == "command"
        assert spec.eval.find_layer("max_new_tokens") == "recipe"
    lines = [*format_settings(specs[1])]
    printed = yaml.safe_load("\n".join(lines))["eval"]
    assert printed["dataset"]["limit"] == 7 and "limit" not in printed
    assert "    limit: 7" in next(line for line in lines if "limit: 7" in line)


def test_saved_runs_of_both_forms_are_the_same_run(tmp_path: Path) -> None:
    """A run of an earlier version has no parts in its config.yaml; what is saved now has them."""
    spec = compose_training(["recipe=eagle3", "target=tiny", "eval.limit=7", "eval.quality=true"])
    text = spec.to_yaml()
    saved = yaml.safe_load(text)
    assert saved["eval"]["dataset"] == {"limit": 7}
    assert saved["eval"]["statistics"] == {"quality": True}
    earlier = {**saved, "eval": {"choice": "default", **spec.eval.settings}}
    paths = [tmp_path / "new.yaml", tmp_path / "old.yaml"]
    paths[0].write_text(text)
    paths[1].write_text(yaml.dump(earlier))
    loaded = [RunSpec.load(path) for path in paths]
    assert loaded[0] == loaded[1]
    assert loaded[0].eval == spec.eval
    assert loaded[0].save() == loaded[1].save() == saved


@pytest.mark.parametrize(
    "content",
    ["eval: {limit: 7, quality: true}", "eval: {dataset: {limit: 7}, statistics: {quality: true}}"],
)
def test_a_settings_file_may_write_both(content: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"recipe: eagle3\n{content}\n")
    assert read_settings(path) == ["recipe=eagle3", "eval.limit=7", "eval.quality=true"]


@pytest.mark.parametrize("name", ["execute", "serve_in"])
def test_what_only_a_command_sets_is_dropped_from_its_part_too(name: str, tmp_path: Path) -> None:
    part = next(key.part for key in list_part_keys("eval").values() if key.name == name)
    path = tmp_path / "config.yaml"
    saved = {"eval": {"choice": "default", part: {name: "vllm" if name == "serve_in" else True}}}
    path.write_text(yaml.dump(saved))
    assert name not in RunSpec.load(path).eval.settings
    assert GroupSpec("eval", "default", {name: "vllm"}).save() == {"choice": "default"}
