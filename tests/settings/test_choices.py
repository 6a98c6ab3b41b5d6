"""Files name choices: what is written is read again, and what earlier versions wrote too."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from safetensors.torch import load_file

from spectrain.config.build import build
from spectrain.config.choices import FORMER_NAMES, by_choice_name, list_constructors, resolve_choice, set_choice_folders
from spectrain.config.saved import parse_groups
from spectrain.config.schema import conf_folders
from spectrain.config.signatures import PACKAGE_ROOT
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.runs.drafter_files import load_drafter

BEFORE = Path(__file__).parent / "before"
SAVED = sorted([*BEFORE.glob("*.json"), BEFORE / "kangaroo" / "drafter" / "config.json"])


@pytest.fixture(autouse=True)
def our_choices_alone() -> None:
    """Whatever folder of choices a command of another test has named."""
    set_choice_folders([PACKAGE_ROOT / "conf"])


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem if path.stem != "config" else "kangaroo")
def test_a_drafter_saved_before_is_read(path: Path, tiny: Target) -> None:
    """Descriptions that named constructors where they then stood become the choices of today, which can be built."""
    content = json.loads(path.read_text())
    found = parse_groups(content, path)
    assert by_choice_name(found)["drafter"]["choice"] == {"gkd": "causal", "layerskip": "early_exit", "medusa1": "medusa",
                                                "medusa2": "medusa"}.get(content["recipe"], content["recipe"])  # fmt: skip
    for group in ("drafter", "target", "tree", "acceptance"):
        kept = {key: value for key, value in content[group].items() if key != "_target_"}
        assert {key: value for key, value in found[group].items() if key != "_target_"} == kept
    for group in ("tree", "acceptance"):
        assert type(build(found[group])).__name__ == content[group]["_target_"].rpartition(".")[2]
    assert type(build(found["drafter"], target=tiny)).__name__ == content["drafter"]["_target_"].rpartition(".")[2]


def test_a_run_of_before_loads_whole(tiny: Target) -> None:
    """A run folder of the time before: its settings and its weights."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        spec, folder = resolve_eval_spec(compose("eval", overrides=[f"run={BEFORE / 'kangaroo'}"]))
    assert (spec.trainer.get("lr"), spec.data.get("limit"), spec.tree.get("stop_on")) == (0.002, 48, "token")
    drafter = load_drafter(spec, folder, tiny)
    weights = load_file(folder / "drafter" / "model.safetensors")
    assert weights and all(drafter.state_dict()[name].equal(tensor) for name, tensor in weights.items())


def test_every_former_name_is_a_choice() -> None:
    """The table of former names knows choices of today only."""
    for group, names in FORMER_NAMES.items():
        assert set(names.values()) <= set(list_constructors(group)), group


def test_a_configuration_is_saved_and_loaded(tmp_path: Path) -> None:
    """A whole configuration as config.yaml keeps it, and back; no import path is left in it."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("train", overrides=["recipe=eagle3", "target=tiny"])
    spec = RunSpec.from_config(config)
    saved = spec.save()
    assert "spectrain." not in json.dumps(saved) and saved["tree"]["choice"] == "eagle2" and saved["tracker"] == {}
    (tmp_path / "config.yaml").write_text(spec.to_yaml())
    assert RunSpec.load(tmp_path / "config.yaml") == spec


def test_that_code_may_run_is_never_saved() -> None:
    """The consent to run a target's code is the command's alone."""
    node = resolve_choice("target", {"choice": "hf", "model": "a/b", "trust_remote_code": True}, "here")
    assert by_choice_name({"target": node}) == {"target": {"choice": "hf", "model": "a/b"}}


def test_a_choice_of_the_user_s_own_folder(tmp_path: Path) -> None:
    """A family outside the project is saved by its name, and read where --config-dir names its folder."""
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "mine.yaml").write_text("_target_: mine.Drafter\n")
    saved = by_choice_name({"drafter": {"_target_": "spectrain.drafters.ngram.Ngram"}, "tree": None})
    assert saved == {"drafter": {"choice": "ngram"}, "tree": None}
    with pytest.raises(UserError, match="drafter=mine: there is no such choice; .*--config-dir"):
        resolve_choice("drafter", {"choice": "mine"}, "config.json")
    try:
        set_choice_folders(conf_folders(["--config-dir", str(tmp_path)]))
        node = {"_target_": "mine.Drafter", "size": 3}
        assert by_choice_name({"drafter": node})["drafter"] == {"choice": "mine", "size": 3}
        assert resolve_choice("drafter", {"choice": "mine", "size": 3}, "config.json") == node
        assert resolve_choice("drafter", node, "config.json") == node  # as it was saved before
        with pytest.raises(UserError, match="mine.Drafter is not found; PYTHONPATH"):
            build(node)
    finally:
        set_choice_folders([PACKAGE_ROOT / "conf"])
