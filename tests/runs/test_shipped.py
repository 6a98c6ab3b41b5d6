"""The drafters that come with the package: each is for its own target, whose output they do not
change.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from safetensors.torch import load_file

from spectrain.config.build import GroupSpec
from spectrain.config.plain_files import read_json_object
from spectrain.config.spec import RunSpec
from spectrain.data.chat import tokenize_prompt
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.eval.prompts import read_prompts
from spectrain.models.target import Target
from spectrain.runs.drafters import (
    build_drafter,
    find_shipped_drafter,
    load_description,
    load_drafter,
    load_shipped_drafter,
)
from spectrain.runs.folder import OWN_DRAFTERS, find_drafter_directory
from spectrain.runs.init_drafter import init_drafter
from spectrain.trees import Chain, Eagle2

FOLDERS = {drafter.name: drafter.folder for drafter in OWN_DRAFTERS}
NAMES = sorted(FOLDERS)
LIMIT = 14


def compose_train(*overrides: str) -> Any:
    with initialize_config_module(version_base="1.3", config_module="spectrain.conf"):
        return compose("train", overrides=list(overrides))


@pytest.mark.parametrize("name", NAMES)
def test_files_are_small_and_say_where_they_come_from(name: str) -> None:
    """Each is below 25 MB with finite weights, records its training and data, and is named by a
    choice of conf/drafter.
    """
    files = list(FOLDERS[name].iterdir())
    assert {file.name for file in files} == {"config.json", "model.safetensors", "provenance.json"}
    assert sum(file.stat().st_size for file in files) < 25e6
    assert all(
        tensor.isfinite().all()
        for tensor in load_file(FOLDERS[name] / "model.safetensors").values()
    )
    config = read_json_object(FOLDERS[name] / "config.json")
    origin = read_json_object(FOLDERS[name] / "provenance.json")
    assert config["training"]["tokens"] > 0 and config["target"]["choice"] == name.partition("-")[0]
    assert origin["data"]["fingerprint"] and origin["commit"] and "=/" not in json.dumps(origin)
    assert (Path(__file__).parents[2] / "conf" / "drafter" / f"{name}.yaml").exists()
    assert sorted(path.name for path in FOLDERS[name].parent.iterdir()) == NAMES


def test_a_name_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a drafter's directory is asked for the name will do; a folder of that name comes
    first.
    """
    monkeypatch.chdir(tmp_path)
    assert find_drafter_directory(Path(NAMES[0])) == FOLDERS[NAMES[0]]
    assert (
        find_drafter_directory(Path("other")) is None and find_drafter_directory(Path(".")) is None
    )
    own = tmp_path / NAMES[0]
    own.mkdir()
    (own / "config.json").write_text("{}")
    (own / "model.safetensors").touch()
    assert find_drafter_directory(Path(NAMES[0])) == Path(NAMES[0])


def test_another_target_is_refused(tiny: Target) -> None:
    """Its name says for which target it is; no other is given it."""
    with pytest.raises(UserError, match="it is for target=smollm2, and tiny is another model"):
        load_shipped_drafter("smollm2-eagle3", tiny)
    assert find_shipped_drafter(tiny) is None


def test_a_folder_of_another_target_is_refused(tiny: Target) -> None:
    """The drafter of a folder whose weights do not fit is refused by its target, where that is
    another than the requested one, and else by the tensor.
    """
    folder = FOLDERS["smollm2-eagle3"]
    description = load_description(folder, None)
    spec = RunSpec(drafter=description.drafter, target=GroupSpec("target", "tiny"))
    with pytest.raises(UserError) as caught:
        load_drafter(spec, folder, tiny)
    assert "its drafter is for target=smollm2, and tiny is another model" in str(caught.value)
    assert "leave out target=tiny" in str(caught.value)
    own = RunSpec(drafter=description.drafter, target=description.target)
    with pytest.raises(UserError, match="d2t has another shape"):
        load_drafter(own, folder, tiny)


def test_it_is_not_trained_anew(tiny: Target) -> None:
    """What is trained goes on by drafter.init."""
    with pytest.raises(UserError, match="drafter.init=smollm2-eagle3"):
        init_drafter(
            RunSpec.from_nodes(compose_train("drafter=smollm2-eagle3")), tiny, Dataset([], 0, 0, 0)
        )


def test_its_output_is_the_targets(smollm2: Target) -> None:
    """A chain and a tree give greedy decoding's answers to unseen questions, with more than 1.15
    tokens per forward.
    """
    drafter = build_drafter(
        GroupSpec.from_node("drafter", compose_train("drafter=smollm2-eagle3").drafter), smollm2
    ).eval()
    prompts = [
        tokenize_prompt(smollm2.template, prompt.opening_conversation)
        for prompt in read_prompts(None, 2).prompts
    ]
    plain = decode(smollm2, prompts, Greedy(), LIMIT)
    for builder in (Chain(3), Eagle2(4, 12)):
        drafted = decode(smollm2, prompts, Greedy(), LIMIT, drafter, builder)
        assert [generation.output for generation in drafted] == [
            generation.output for generation in plain
        ]
        assert sum(sum(generation.round_lengths) for generation in drafted) > 1.15 * sum(
            len(generation.round_lengths) for generation in drafted
        )


def test_training_goes_on_from_it(smollm2: Target) -> None:
    """drafter.init takes weights and shape."""
    # The recipe's own draft vocabulary depends on the machine.
    words = ("+drafter.init=smollm2-eagle3", "drafter.vocab_size=8192")
    config = compose_train("recipe=eagle3", *words)
    drafter = init_drafter(RunSpec.from_nodes(config), smollm2, Dataset([], 0, 0, 0))
    for name, tensor in load_file(FOLDERS["smollm2-eagle3"] / "model.safetensors").items():
        assert torch.equal(drafter.state_dict()[name], tensor.to(drafter.state_dict()[name].dtype))
