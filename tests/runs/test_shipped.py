"""The drafters that come with the package: theirs is a target, and its output stays its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from safetensors.torch import load_file

from spectrain.config.build import GroupSpec
from spectrain.config.saved import read_json_object
from spectrain.config.spec import RunSpec
from spectrain.data.chat import tokenize_prompt
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.eval.prompts import read_prompts
from spectrain.models.target import Target
from spectrain.runs.drafters import SHIPPED_BY_TARGET, build_drafter, find_shipped_drafter, init_drafter, load_shipped_drafter
from spectrain.runs.folder import SHIPPED_FOLDER, find_drafter_directory
from spectrain.trees import Chain, Eagle2

EACH = sorted(path.name for path in SHIPPED_FOLDER.iterdir())
LIMIT = 14


def composed(*overrides: str) -> Any:
    with initialize_config_module(version_base="1.3", config_module="spectrain.conf"):
        return compose("train", overrides=list(overrides))


@pytest.mark.parametrize("name", EACH)
def test_files_are_small_and_say_where_they_come_from(name: str) -> None:
    """Below 25 MB each, every weight finite; what the training took and read is told; a choice of conf/drafter names it."""
    files = list((SHIPPED_FOLDER / name).iterdir())
    assert {file.name for file in files} == {"config.json", "model.safetensors", "provenance.json"}
    assert sum(file.stat().st_size for file in files) < 25e6
    assert all(tensor.isfinite().all() for tensor in load_file(SHIPPED_FOLDER / name / "model.safetensors").values())
    told, origin = (
        read_json_object(SHIPPED_FOLDER / name / "config.json"),
        read_json_object(SHIPPED_FOLDER / name / "provenance.json"),
    )
    assert told["training"]["tokens"] > 0 and told["target"]["choice"] == name.partition("-")[0]
    assert origin["data"]["fingerprint"] and origin["commit"] and "=/" not in json.dumps(origin)
    assert (Path(__file__).parents[2] / "conf" / "drafter" / f"{name}.yaml").exists() and name in SHIPPED_BY_TARGET.values()


def test_a_name_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a drafter's directory is asked for the name will do; a folder of that name comes first."""
    monkeypatch.chdir(tmp_path)
    assert find_drafter_directory(Path(EACH[0])) == SHIPPED_FOLDER / EACH[0]
    assert find_drafter_directory(Path("other")) is None and find_drafter_directory(Path(".")) is None
    own = tmp_path / EACH[0]
    own.mkdir()
    (own / "config.json").write_text("{}")
    (own / "model.safetensors").touch()
    assert find_drafter_directory(Path(EACH[0])) == Path(EACH[0])


def test_another_target_is_refused(tiny: Target) -> None:
    """Its name says for which target it is; no other is given it."""
    with pytest.raises(UserError, match="it is for target=smollm2, and tiny is another model"):
        load_shipped_drafter("smollm2-eagle3", tiny)
    assert find_shipped_drafter(tiny) is None


def test_it_is_not_trained_anew(tiny: Target) -> None:
    """What is trained goes on by drafter.init."""
    with pytest.raises(UserError, match="drafter.init=smollm2-eagle3"):
        init_drafter(RunSpec.from_nodes(composed("drafter=smollm2-eagle3")), tiny, Dataset([], 0, 0, 0))


def test_its_output_is_the_targets(smollm2: Target) -> None:
    """A chain and a tree: greedy decoding's answers to questions that it was not trained on, more than a token a forward."""
    drafter = build_drafter(GroupSpec.from_node("drafter", composed("drafter=smollm2-eagle3").drafter), smollm2).eval()
    prompts = [tokenize_prompt(smollm2.template, prompt.opening_conversation) for prompt in read_prompts(None, 2).prompts]
    plain = decode(smollm2, prompts, Greedy(), LIMIT)
    for builder in (Chain(3), Eagle2(4, 12)):
        found = decode(smollm2, prompts, Greedy(), LIMIT, drafter, builder)
        assert [one.output for one in found] == [one.output for one in plain]
        assert sum(sum(one.round_lengths) for one in found) > 1.15 * sum(len(one.round_lengths) for one in found)


def test_training_goes_on_from_it(smollm2: Target) -> None:
    """drafter.init takes weights and shape."""
    config = composed("recipe=eagle3", "+drafter.init=smollm2-eagle3")
    drafter = init_drafter(RunSpec.from_nodes(config), smollm2, Dataset([], 0, 0, 0))
    for name, tensor in load_file(SHIPPED_FOLDER / "smollm2-eagle3" / "model.safetensors").items():
        assert torch.equal(drafter.state_dict()[name], tensor.to(drafter.state_dict()[name].dtype))
