"""What runs code, starts a process, sends, writes elsewhere or downloads is set by a command
alone, whatever a file says.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import ones

from spectrain.cli.interface import compose_config, hydra_context
from spectrain.config import command_only
from spectrain.config.build import GroupSpec, save_groups
from spectrain.config.choices import (
    choice_files,
    conf_folders,
    list_constructors,
    load_yaml,
)
from spectrain.config.command_only import (
    ALL,
    CommandOnlySetting,
    find_command_only,
    list_command_only,
    list_downloaded,
)
from spectrain.config.saved import parse_groups
from spectrain.config.signatures import list_keys
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.file_checks import check_command_only
from spectrain.export.targets import TargetFiles
from spectrain.features.store import FeatureStore
from spectrain.features.store_contents import StoreContents
from spectrain.models.checkpoint_files import INDEX_FILE, CheckpointFiles
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.runs.drafters import load_description

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
# Choices whose group a value can be saved in.
CHOICES = {
    "target": "tiny",
    "eval": "default",
    "tree": "radar",
    "drafter": "bigrams",
    "server": "vllm",
    "tracker": "wandb",
}
BASE: dict[str, Any] = {
    "drafter": {"choice": "ngram"},
    "target": {"choice": "tiny"},
    "tree": {"choice": "chain"},
    "acceptance": {"choice": "greedy"},
}
ACTING_NAME = re.compile(
    r"(^|_)(url|host|port|python|command|program|listen|push|folder|path|paths|store|table|policy|execute|serve|trust|"
    r"arguments|extra|entity|project|prompts|documents|assistant|template|codebook|init|sources|revision)(_|$)|"
    r"^(out|model|start|calibration)$"
)
READ_ONLY = {
    "target": {"chat_template", "template", "template_kwargs"},
    "drafter": {"store", "init", "start", "paths", "sources"},
    "acceptance": {"path", "codebook"},
    "eval": {"documents", "store"},
    "tree": {"paths"},
    "data": {"template_kwargs"},
}
"""Settings that read a local file as data, or that are no files at all, such as the paths of a
tree and the layers that a prediction reads.
"""
COMPARED = {"source"}
"""Groups that a run folder keeps for the comparison on a resume; no reader constructs them."""


def node_of(setting: CommandOnlySetting) -> dict[str, Any]:
    """Return a saved group that sets a setting."""
    choice = {"choice": CHOICES[setting.group]} if setting.group in CHOICES else {}
    return {**choice, "url" if setting.key == ALL else setting.key: "x"}


def settings_of_files() -> list[CommandOnlySetting]:
    """Return the table without what the check of directives refuses before."""
    return [setting for setting in list_command_only() if setting.key != "trust_remote_code"]


def without(content: dict[str, Any]) -> bool:
    """Tell whether nothing in saved or loaded groups is command-only."""
    return not list(find_command_only(content))


@pytest.mark.parametrize("setting", settings_of_files(), ids=lambda setting: setting.name)
def test_no_file_sets_it_and_lint_reports_it(
    setting: CommandOnlySetting,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run folder, drafter's description, metadata of an export and saved nodes: ignored with one
    line, and an error of lint.
    """
    monkeypatch.setattr(command_only, "_reported", set())
    run = tmp_path / "run"
    node = node_of(setting)
    (run / "drafter").mkdir(parents=True)
    groups = {**BASE, setting.group: node}
    (run / "config.yaml").write_text(yaml.dump(groups))
    (run / "drafter" / "config.json").write_text(json.dumps(groups))
    (run / "drafter" / "spectrain.json").write_text(json.dumps({"description": groups}))
    files = DrafterFiles(run / "drafter", {}, {})
    readers: dict[str, Any] = {
        "config.yaml": lambda: RunSpec.load(run / "config.yaml").to_nodes(),
        "config.json": lambda: load_description(run / "drafter", None).to_nodes(),
        "spectrain.json": lambda: files.read_metadata().description,
    }
    for name, read in readers.items():
        for _ in range(2):
            assert without(read())
        lines = capsys.readouterr().err.splitlines()
        assert (
            len(lines) == 1
            and name in lines[0]
            and setting.name in lines[0]
            and "is ignored" in lines[0]
        )
    # Constructed nodes are saved without it too.
    assert without(save_groups({setting.group: {"_target_": "x.Y", **node}}))
    if setting.group in CHOICES:
        settings = {key: value for key, value in node.items() if key != "choice"}
        assert without({setting.group: GroupSpec(setting.group, node["choice"], settings).save()})
    found = [finding for finding in check_command_only(run / "drafter") if finding.level == "error"]
    assert [finding.name for finding in found] == ["command-only"] * 3
    assert all(setting.name in finding.problem for finding in found)


def test_settings_that_do_nothing_are_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What earlier versions saved of groups that were not chosen prints nothing."""
    old = {
        "eval": {"choice": "default", "execute": False, "serve_in": None},
        "server": {},
        "tracker": {},
        "run": "runs/x",
    }
    assert without(old) and "execute" not in parse_groups(old, tmp_path)["eval"]
    assert capsys.readouterr().err == ""
    (tmp_path / "config.yaml").write_text(yaml.dump(old))
    assert RunSpec.load(tmp_path / "config.yaml").run is None


def test_code_beside_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="trust_remote_code leads to code"):
        parse_groups(
            {"target": {"choice": "hf", "model": "x", "trust_remote_code": True}}, tmp_path
        )


def test_a_score_takes_execute_from_its_command_alone(tmp_path: Path) -> None:
    """The saved evaluation is taken over, but for what runs the programs of its prompts."""
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(BASE))
    save_file({"x": ones(1)}, tmp_path / "drafter" / "model.safetensors")
    saved = {
        "eval": {
            "choice": "default",
            "execute": True,
            "serve_in": "auto",
            "limit": 3,
            "prompts": "humaneval",
        }
    }
    (tmp_path / "config.yaml").write_text(yaml.dump(saved))
    with hydra_context():
        specs = [
            resolve_eval_spec(compose_config("eval", {"run": tmp_path, **settings})[0])[0]
            for settings in ({}, {"eval.execute": "true"}, {"eval.prompts": "x.jsonl"})
        ]
    assert [spec.eval.settings.get("execute") for spec in specs] == [None, True, None]
    assert [spec.eval.settings.get("limit") for spec in specs[:2]] == [3, 3] and specs[
        0
    ].eval.settings.get("serve_in") is None
    # What the file names is not downloaded; what the command names is.
    assert [spec.eval.origin for spec in specs] == [str(tmp_path), str(tmp_path), None]


def test_every_setting_that_may_act_is_decided() -> None:
    """A new setting with such a name stands in the table, in DOWNLOADED, or among those that
    only read a file.
    """
    undecided = []
    whole = {setting.group for setting in list_command_only() if setting.key == ALL}
    for group in RunSpec.__dataclass_fields__:
        for path in set(list_constructors(group).values()) if group not in whole | COMPARED else ():
            for key in list_keys(path):
                decided = {setting.key for setting in list_command_only() if setting.group == group}
                decided |= {*list_downloaded(group), *READ_ONLY.get(group, ())}
                if ACTING_NAME.search(key.name) and key.name not in decided:
                    undecided.append(f"{group}.{key.name}")
    assert not undecided, sorted(set(undecided))
    for setting in list_command_only():
        if setting.key != ALL:
            keys = {
                key.name
                for path in list_constructors(setting.group).values()
                for key in list_keys(path)
            }
            assert setting.key in keys, f"{setting.name} is no setting any more"


def test_recipes_of_the_package_set_none_of_them() -> None:
    for folder in ("recipe", *CHOICES):
        for path in choice_files(folder, conf_folders()).values():
            content = load_yaml(path)
            groups = (
                content
                if folder == "recipe"
                else {folder: {k: v for k, v in content.items() if k != "_target_"}}
            )
            assert without({key: value for key, value in groups.items() if key != "defaults"}), path


# Names of other things in files


def test_what_a_file_names_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client is offline while such a group is constructed, and no longer."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    seen = []

    class OfflineModeIsEnabled(ConnectionError):
        """Stands for the hub's error."""

    def construct(**settings: Any) -> None:
        seen.append(constants.is_offline_mode())
        raise OfflineModeIsEnabled("no network")

    monkeypatch.setattr(GroupSpec, "load_constructor", lambda self: construct)
    for spec in (
        GroupSpec("target", "hf", {"model": "someone/model"}).named_by("x/config.json"),
        GroupSpec("target", "hf", {"model": "someone/model"}),
    ):
        with pytest.raises((UserError, OfflineModeIsEnabled)) as caught:
            spec.build()
        assert isinstance(caught.value, UserError) is (spec.origin is not None)
    assert seen == [True, False] and not constants.is_offline_mode()


@pytest.mark.parametrize(
    "group, choice, settings",
    [
        ("target", "smollm2", {"path": "someone/model"}),
        ("drafter", "hybrid", {"inner": {"choice": "causal", "model": "someone/model"}}),
        ("drafter", "chosen", {"inner": [{"choice": "causal", "model": "someone/model"}]}),
        ("data", "mix", {"sources": [{"choice": "hub", "path": "someone/rows"}]}),
    ],
)
def test_what_a_choice_within_a_file_names_is_not_downloaded_either(
    group: str, choice: str, settings: dict[str, Any]
) -> None:
    of_file = GroupSpec(group, choice, settings).named_by("x/config.yaml")
    assert of_file.origin == "x/config.yaml"
    assert GroupSpec(group, choice, settings).origin is None
    # A file that names nothing on the hub leaves the hub to what the command names.
    assert GroupSpec(group, choice, {"store": None}).named_by("x/config.yaml").origin is None


def test_a_target_that_a_drafter_names_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    files = TargetFiles("someone/model-that-is-nowhere", may_download=False)
    for read in (lambda: files.directory, lambda: files.full_config):
        with pytest.raises(
            UserError, match="what a file names is not downloaded; name it in the command"
        ):
            read()


def test_an_index_of_weights_stays_in_its_folder(tmp_path: Path) -> None:
    for name in ("../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", 3):
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(UserError, match="names no file beside it"):
            CheckpointFiles(tmp_path)


def test_an_index_of_a_store_names_its_own_shard(tmp_path: Path) -> None:
    """Repair deletes damaged shards, so that a name must not lead elsewhere."""
    store = tmp_path / "store"
    victim = tmp_path / "victim.safetensors"
    store.mkdir()
    victim.write_text("mine")
    index = {"name": "../victim", "bytes": 4, "sha256": "x", "sequences": {"a": 1}}
    (store / "features-0.json").write_text(json.dumps(index))
    FeatureStore(store, StoreContents.__new__(StoreContents), repair=True)
    assert victim.read_text() == "mine"
