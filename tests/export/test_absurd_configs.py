"""Configurations of drafters with absurd sizes: refused by lint and by whoever reads them,
before anything is built.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_MODELS,
)

from spectrain.errors import UserError
from spectrain.export.converter import convert, read_drafter
from spectrain.export.linter import lint
from spectrain.export.targets import TargetFiles
from spectrain.models.loading import load_hf
from spectrain.models.model_sizes import check_named_sizes
from spectrain.models.rope import check_rope
from spectrain.models.target import Target

from .test_converter import ours

LONG = list(range(20_000))
Edit = Callable[[dict[str, Any]], Any]


def set_value(*keys: str, value: Any) -> Edit:
    """Return an edit that sets a value in nested groups."""

    def edit(config: dict[str, Any]) -> dict[str, Any]:
        node = config
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = value
        return config

    return edit


LONG_LIST = "20000 values, and no setting has more than 10000"
EVERYWHERE: dict[str, tuple[Edit, str]] = {
    "an unknown list": (set_value("x", value=LONG), LONG_LIST),
    "a list of classes": (set_value("architectures", value=["x"] * 20_000), LONG_LIST),
    "a large group": (set_value("x", value={str(number): 1 for number in LONG}), LONG_LIST),
    "a list in a list": (set_value("x", value=[[LONG]]), LONG_LIST),
    "10^6 layers": (
        set_value("num_hidden_layers", value=10**6),
        "num_hidden_layers=1000000: use 256 or less",
    ),
    "10^9 wide": (
        set_value("x", "hidden_size", value=10**9),
        "hidden_size=1000000000: use 131072 or less",
    ),
    "deep brackets": (
        lambda config: '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "nested too deeply",
    ),
    "deep groups": (lambda config: '{"x":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    "a long number": (lambda config: '{"x": ' + "9" * 5000 + "}", "this is not JSON"),
    "a large epsilon": (
        set_value("rms_norm_eps", value=0.5),
        "rms_norm_eps=0.5: use a number above 0 that is 0.01 or less",
    ),
    "an epsilon of zero": (set_value("x", "norm_eps", value=0), "norm_eps=0: use a number above 0"),
    "a fraction of a head": (
        set_value("x", "num_attention_heads", value=1.5),
        "1.5: use a whole number from 1 to 65536",
    ),
    "a negative width": (
        set_value("hidden_size", value=-1),
        "hidden_size=-1: use a whole number from 1 to 131072",
    ),
    "no width": (
        set_value("hidden_size", value=0),
        "hidden_size=0: use a whole number from 1 to 131072",
    ),
    "true layers": (
        set_value("num_hidden_layers", value=True),
        "True: use a whole number from 1 to 256",
    ),
    "NaN tokens": (
        set_value("vocab_size", value=float("nan")),
        "vocab_size=nan: use a whole number from 1 to 10000000",
    ),
    "a size in a list": (
        set_value("x", value=[{"hidden_size": 10**9}]),
        "hidden_size=1000000000: use 131072 or less",
    ),
    "a list as a flag": (
        set_value("attention_bias", value=[[1]]),
        "attention_bias=[[1]]: use true or false",
    ),
    "a text as a flag": (
        set_value("norm_before_residual", value="no"),
        "norm_before_residual=no: use true or false",
    ),
    "a number as a type": (set_value("torch_dtype", value=1), "torch_dtype=1: use a text"),
    "a class in a list": (
        set_value("architectures", value=[["x"]]),
        "architectures=[['x']]: use a list of texts",
    ),
    "half a token": (
        set_value("eos_token_id", value=[0.5]),
        "eos_token_id=[0.5]: use a whole number from 0 to 10000000",
    ),
    "no drafts": (
        set_value("x", value=[{"speculative_tokens": 0}]),
        "speculative_tokens=0: use a whole number from 1 to 4096",
    ),
    "a text as layers": (
        set_value("eagle_aux_hidden_state_layer_ids", value="a" * 100_000),
        "a: use a list of at most 256 layers",
    ),
    "no settings": (lambda config: [1], "it holds no settings"),
    "nothing": (lambda config: "", "this is not JSON"),
    "half of it": (lambda config: json.dumps(config)[:100], "this is not JSON"),
}
OWN: dict[str, tuple[Edit, str]] = {
    "fused layers": (set_value("drafter", "layers", value=LONG), LONG_LIST),
    "a tree": (set_value("tree", "x", value=LONG), LONG_LIST),
    "300 layers": (set_value("drafter", "num_layers", value=300), "use 256 or less"),
    "a wide head": (set_value("drafter", "head_rank", value=10**9), "use 65536 or less"),
    "true": (set_value("drafter", "ttt_steps", value=True), "write a number"),
    "a tree without a choice": (
        set_value("tree", value=0.5),
        "tree is not a choice with its settings",
    ),
    "a rule without a choice": (
        set_value("acceptance", value={"x": 1}),
        "acceptance is not a choice with its settings",
    ),
    "a deep tree": (set_value("tree", "depth", value=10**9), "use 4096 or less"),
    "a recipe": (set_value("recipe", value=[1]), "recipe is not a recipe's name"),
    "another family's sizes": (
        set_value("drafter", "architecture", value={"model_type": "llama"}),
        "drafter.architecture.model_type: there is no such key",
    ),
}
CASES = [(layout, name) for layout in ("own", "vllm", "sglang", "medusa") for name in EVERYWHERE]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory, tiny: Target) -> dict[str, Path]:
    """Return drafters by layout."""
    folder = tmp_path_factory.mktemp("layouts")
    own = ours(folder / "own", tiny, "eagle3", vocab_size=64)
    medusa = ours(folder / "heads", tiny, "medusa", vocab_size=2048, num_heads=1)
    target = TargetFiles("tiny")
    sources = {"vllm": own, "sglang": own, "medusa": medusa}
    return {
        "own": own,
        **{name: convert(source, folder / name, name, target) for name, source in sources.items()},
    }


def copy_with(source: Path, folder: Path, edit: Edit) -> Path:
    """Return a folder with links to the files of another, and a changed config.json."""
    folder.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    content = edit(json.loads((source / "config.json").read_text()))
    (folder / "config.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return folder


def lint_errors(folder: Path) -> list[str]:
    """Return the errors that lint finds, or the sentence with which it refuses to read the
    files.
    """
    try:
        return [finding.problem for finding in lint(folder, None) if finding.level == "error"]
    except UserError as error:
        return [str(error)]


def check_refused(folder: Path, problem: str) -> None:
    """Check that lint and whoever reads the drafter name the problem."""
    errors = lint_errors(folder)
    assert any(problem in error for error in errors), errors
    with pytest.raises(UserError) as refused:
        read_drafter(folder)
    assert problem in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("layout, name", CASES)
def test_absurd_configurations_are_refused(
    layouts: dict[str, Path], tmp_path: Path, layout: str, name: str
) -> None:
    edit, problem = EVERYWHERE[name]
    check_refused(copy_with(layouts[layout], tmp_path / "drafter", edit), problem)


@pytest.mark.parametrize("name", OWN)
def test_absurd_settings_of_our_own_layout_are_refused(
    layouts: dict[str, Path], tmp_path: Path, name: str
) -> None:
    edit, problem = OWN[name]
    check_refused(copy_with(layouts["own"], tmp_path / "drafter", edit), problem)


METADATA: dict[str, tuple[Edit, str]] = {
    "a tree": (
        set_value("description", "tree", value=0.5),
        "description.tree is not a choice with its settings",
    ),
    "a recipe": (
        set_value("description", "recipe", value=1),
        "description.recipe is not a recipe's name",
    ),
    "a target": (set_value("target", "said", value=-0.5), "target.said=-0.5: use a text"),
    "an unknown setting": (set_value("drafter", "x", value=1), "drafter.x: there is no such key"),
    "a setting of a wrong type": (
        set_value("drafter", "ttt_steps", value="x"),
        "drafter.ttt_steps=x",
    ),
    "a setting that the layout has": (
        set_value("drafter", "vocab_size", value=7),
        "drafter.vocab_size=7, and the other files",
    ),
}


@pytest.mark.parametrize("name", METADATA)
def test_absurd_values_beside_an_export_are_refused(
    layouts: dict[str, Path], tmp_path: Path, name: str
) -> None:
    edit, problem = METADATA[name]
    folder = copy_with(layouts["vllm"], tmp_path / "drafter", lambda config: config)
    path = folder / "spectrain.json"
    content = edit(json.loads(path.read_text()))
    path.unlink()
    path.write_text(json.dumps(content))
    check_refused(folder, problem)


def test_files_of_many_tensors_are_not_read(layouts: dict[str, Path], tmp_path: Path) -> None:
    """A header of 100,000 entries is refused with a few of their names before any of them is
    read.
    """
    folder = copy_with(layouts["vllm"], tmp_path / "drafter", lambda config: config)
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    end = len(content) - 8 - size
    header |= {
        f"a.{number}": {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}
        for number in range(100_000)
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + content[8 + size :]
    )
    check_refused(
        folder,
        "it holds a.0, a.1, a.10 and 100013 more tensors, and no such file has more than 32768",
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_pipes_and_huge_files_are_not_read(
    layouts: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """A pipe would never end, and a sparse file of 10 GB takes as much memory; neither is
    opened.
    """
    folder = copy_with(layouts["vllm"], tmp_path / "drafter", lambda config: config)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    check_refused(folder, "this is no file")
    if name.endswith(".json"):
        (folder / name).unlink()
        (folder / name).touch()
        os.truncate(folder / name, 10**10)
        check_refused(folder, "MB, which no")


LINEAR = {"rope_type": "linear", "factor": 2.0}
# transformers loads models with these and only warns of some.
WRONG_ROPE: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "linear", "factor": -2}, "factor=-2 must be a number of 1 or more"),
    ({"rope_theta": 0}, "rope_theta=0 must be a number above 1"),
    ({"rope_type": "yarn"}, "factor is missing"),
    ({"ropetype": "yarn", "factor": 2.0}, "ropetype: no reader has a key of this spelling"),
    ({**LINEAR, "type": "yarn"}, "rope_type=linear and type=yarn contradict each other"),
]


@pytest.mark.parametrize(
    "names", [["nemotron_h", "xlm"], pytest.param([*CAUSAL_MODELS], marks=pytest.mark.slow)]
)
def test_what_transformers_saves_names_its_sizes(names: list[str]) -> None:
    """A size may be called otherwise, or follow from a list of layers."""
    configs = []
    for name in names:
        # Defaults of some are no valid configuration, and some need another package.
        with suppress(Exception):
            configs.append(CONFIG_MAPPING[name]().to_dict())
    assert len(configs) >= 0.9 * len(names)
    for config in configs:
        check_named_sizes(config, Path(config["model_type"]))


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000: use 4096 or less"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000: use 10000000 or less"),
        ({"hidden_size": 0}, "hidden_size=0: use a whole number from 1 to 131072"),
        ({"hidden_size": 10**6}, "hidden_size=1000000: use 131072 or less"),
        ({"head_dim": -8}, "head_dim=-8: use a whole number from 1 to 65536"),
        ({"hidden_size": 16}, r"The hidden size \(16\) is not a multiple of the number"),
        ({"dtype": 3}, "dtype=3: use a text"),
        ({"num_key_value_heads": 5}, "=32 is no multiple of num_key_value_heads=5"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"sliding_window": "4"}, "sliding_window=4: use a whole number from 0 to 1073741824"),
        ({"sliding_window": [1]}, r"sliding_window=\[1\]: use one whole number"),
        ({"sliding_window": {"a": 1}}, "sliding_window=.*: use one whole number"),
        ({"vocab_size": None}, "vocab_size is missing"),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 99},
            "num_experts_per_tok=99 is more than num_local_experts=8",
        ),
        *(({"rope_parameters": rope}, problem) for rope, problem in WRONG_ROPE),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}},
            "rope_theta=500000.0 and rope_parameters.rope_theta=10000.0 contradict each other",
        ),
        (
            {"rope_parameters": LINEAR, "rope_scaling": {**LINEAR, "factor": 4.0}},
            "rope_scaling and rope_parameters contradict each other",
        ),
    ],
)
def test_targets_of_impossible_sizes_are_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000}
    config = {"model_type": "llama", **sizes, **change}
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=problem):
        TargetFiles(str(tmp_path)).full_config  # noqa: B018
    with pytest.raises(UserError, match=problem):
        load_hf(str(tmp_path))
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="this is no file"):
        load_hf(str(tmp_path))


@pytest.mark.parametrize("kinds", [("main", "compress"), ("compress", "main")])
def test_kinds_of_layers_have_bases_of_their_own(kinds: tuple[str, str]) -> None:
    """A base of the model beside one for each kind of layer, as DeepSeek V4 has, contradicts none
    of them.
    """
    bases = {"main": 1e4, "compress": 1.6e5}
    groups = {kind: {"rope_type": "default", "rope_theta": bases[kind]} for kind in kinds}
    check_rope({"rope_theta": 1e4, "rope_parameters": groups})
