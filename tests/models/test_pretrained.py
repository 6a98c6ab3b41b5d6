"""Weights that are not in a checkpoint: every load of every kind of model names the first one,
and nothing is invented.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from spectrain.drafters.layers.small_models import load_model_files
from spectrain.errors import UserError
from spectrain.eval.transformers_baselines import _load_assistant
from spectrain.models.bundled import convert_gguf, converted_directory
from spectrain.models.checkpoint_files import INDEX_FILE
from spectrain.models.loading import build_meta_network, load_hf
from spectrain.models.model_sizes import check_model_directory
from spectrain.models.pretrained import load_pretrained
from spectrain.models.target import Target
from tests.models.checkpoints import save_gguf_file, save_unquantized

Weights = dict[str, Tensor]
UP = "model.layers.1.mlp.up_proj.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_experts": 4,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that copies a small saved model with changed weights; each kind is made
    once.
    """
    made: dict[str, Path] = {}

    def copy(
        folder: Path, change: Callable[[Weights], Any], kind: str = "llama", **settings: Any
    ) -> Path:
        key = f"{kind}{sorted(settings)}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("saved")
            save_unquantized(made[key], kind, **settings)
        shutil.copytree(made[key], folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return copy


def remove(*parts: str) -> Callable[[Weights], None]:
    """Remove the weights whose names contain one of these parts."""

    def change(weights: Weights) -> None:
        for name in [name for name in weights if any(part in name for part in parts)]:
            del weights[name]

    return change


def lengthen(name: str) -> Callable[[Weights], None]:
    """Add a row to a weight."""
    return lambda weights: weights.update({name: torch.cat([weights[name], weights[name][:1]])})


REFUSED: dict[str, tuple[Callable[[Weights], Any], str, dict[str, Any]]] = {
    "a matrix": (remove(UP), f"{UP} is not among its weights, and", {}),
    "an untied output layer": (remove(HEAD), f"{HEAD} is not among", {}),
    "both of two tied": (
        remove("embed_tokens", HEAD),
        "1 more are missing too",
        {"tie_word_embeddings": True},
    ),
    "a layer": (
        remove("layers.1."),
        r"model.layers.1.input_layernorm.weight is not among its weights \(8 more",
        {},
    ),
    "a norm": (remove(NORM), f"{NORM} is not among", {}),
    "a shape": (
        lengthen(UP),
        rf"{UP} has the shape \[129, 64\] in its files and \[128, 64\] by its config.json;",
        {},
    ),
    "an expert": (
        remove("experts.3."),
        r"experts.down_proj has the shape \[3, ",
        {"kind": "qwen3_moe", **EXPERTS},
    ),
    "a layer that config.json does not count": (
        lambda weights: weights.update(
            {
                name.replace("layers.1.", "layers.2."): weight.clone()
                for name, weight in weights.items()
                if "layers.1." in name
            }
        ),
        "model.layers.2.input_layernorm.weight is among its weights, and by its config.json the "
        "model has no such layer",
        {},
    ),
    "integers": (
        lambda weights: weights.update({UP: (100 * weights[UP]).to(torch.int8)}),
        rf"{UP} holds no real numbers \(I8\) in its files",
        {},
    ),
    "8-bit floats": (
        lambda weights: weights.update({UP: weights[UP].to(torch.float8_e4m3fn)}),
        rf"{UP} holds rounded numbers \(F8_E4M3\) without their scales",
        {},
    ),
    "truth values": (
        lambda weights: weights.update({UP: weights[UP] > 0}),
        rf"{UP} holds no real numbers \(BOOL\)",
        {},
    ),
    "scales that config.json does not mention": (
        lambda weights: weights.update({f"{UP}_scale_inv": torch.ones(1, 1)}),
        f"{UP}_scale_inv is among its weights, and its config.json does not say how",
        {},
    ),
    "a bias that config.json leaves out": (
        lambda weights: weights.update({BIAS: torch.ones(64)}),
        f"{BIAS} is among its weights, and by its config.json the model has no such bias",
        {},
    ),
    "a matrix of an expert": (
        remove("experts.0.w1"),
        "mlp.experts.gate_up_proj cannot be made",
        {"kind": "mixtral", **EXPERTS},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_target_without_a_weight_is_refused(
    case: str, saved: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The report of transformers is not printed in addition to the sentence."""
    change, sentence, settings = REFUSED[case]
    folder = saved(tmp_path / "target", change, **settings)
    capfd.readouterr()
    with pytest.raises(UserError, match=f"^target.model={folder}: .*{sentence}") as raised:
        load_hf(str(folder), device="cpu")
    assert "\n" not in str(raised.value) and "REPORT" not in capfd.readouterr().err


ACCEPTED: dict[str, tuple[Callable[[Weights], Any], dict[str, Any]]] = {
    "a tied output layer is absent": (remove(HEAD), {"tie_word_embeddings": True}),
    "others are there": (
        lambda weights: weights.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
                "visual.x": torch.ones(2),
                "mtp.y": torch.ones(2),
            }
        ),
        {},
    ),
    "a bias of zeros": (lambda weights: weights.update({BIAS: torch.zeros(64)}), {}),
    "a layer for drafting follows": (
        lambda weights: weights.update(
            {
                "model.layers.2.enorm.weight": torch.ones(64),
                "model.layers.2.input_layernorm.weight": torch.ones(64),
            }
        ),
        {},
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_tied_and_unknown_weights_are_no_fault(
    case: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    change, settings = ACCEPTED[case]
    assert (
        load_hf(str(saved(tmp_path / "target", change, **settings)), device="cpu").num_layers == 2
    )


def test_a_gguf_file_without_a_tensor_is_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file names another tensor in place of the one of a layer."""
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))
    path, _ = save_gguf_file(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(UserError, match=f"^target.model={path}: {UP} is not among"):
        convert_gguf(path, torch.float32)
    with pytest.raises(UserError, match=f"^target.model={path}: {UP} is not among"):
        load_hf(str(path), network=build_meta_network)  # as plan does
    assert not converted_directory(path, torch.float32).exists()


UNFIT_VALUES: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "a matrix of NaN": (
        lambda weights: weights[UP].fill_(torch.nan),
        f"its weight {UP} holds NaN or infinity",
    ),
    "infinity for a token that no sample holds": (
        lambda weights: weights["model.embed_tokens.weight"][-1].fill_(torch.inf),
        "its weight model.embed_tokens.weight holds NaN or infinity",
    ),
    "an output layer of zeros": (
        lambda weights: weights[HEAD].zero_(),
        f"every token the same logit, and its weight {HEAD} is zero throughout",
    ),
    "a norm of zeros": (
        lambda weights: weights[NORM].zero_(),
        f"every token the same logit, and its weight {NORM} is zero throughout",
    ),
}


def test_an_output_layer_of_nan_is_refused_without_the_layers_too(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "target", lambda weights: weights[HEAD].fill_(torch.nan))
    with pytest.raises(UserError, match=f"^target target: its weight {HEAD} holds NaN or inf"):
        load_hf(str(folder), device="cpu", parts="head")


@pytest.mark.parametrize("case", UNFIT_VALUES)
def test_a_weight_whose_values_are_unfit_is_named(
    case: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    change, sentence = UNFIT_VALUES[case]
    folder = saved(tmp_path / "target", change)
    with pytest.raises(UserError, match=f"^target target: .*{sentence}; copy its files again"):
        load_hf(str(folder), device="cpu")


@pytest.mark.parametrize(
    "name",
    ["generation_config", "tokenizer_config", "special_tokens_map", "added_tokens", "config"],
)
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "this is not JSON"),
        (b"[1]", "it holds no settings"),
        (b"\xef\xbb\xbf{}", "it begins with a byte-order mark"),
        ("{}".encode("utf-16"), "it is UTF-16 text"),
        (b"[" * 50_000, "its values are nested too deeply"),
    ],
)
def test_a_damaged_file_of_settings_is_named(
    name: str, content: bytes, sentence: str, tmp_path: Path
) -> None:
    """transformers passes over a damaged generation_config.json, and names none of the others."""
    (tmp_path / f"{name}.json").write_bytes(content)
    with pytest.raises(
        UserError, match=rf"{name}\.json: {sentence}[^\n]*(again|without one|UTF-8)$"
    ):
        check_model_directory(tmp_path)


def test_a_directory_of_pickles_is_refused_by_the_name_of_the_file(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "target", lambda weights: None)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="its weights are in pytorch_model.bin, which is a pickle"):
        load_hf(str(folder), device="cpu")


def test_a_directory_without_a_tokenizer_is_refused(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "target", lambda weights: None)
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(UserError, match="the directory holds no tokenizer"):
        load_hf(str(folder), device="cpu")


@pytest.mark.parametrize("token", [999_999, -1])
def test_a_stop_token_beyond_the_embedding_is_named(
    token: int, saved: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "target", lambda weights: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": token}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    load_hf(str(folder), device="cpu")
    assert f"its stop token {token} has no embedding" in capfd.readouterr().err


@pytest.mark.parametrize("token", ["2", 2.5, [[2]], True, {}])
def test_a_stop_token_that_is_no_number_is_refused(
    token: Any, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "target", lambda weights: None)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    with pytest.raises(UserError, match="eos_token_id=.* is no token; write a whole number"):
        load_hf(str(folder), device="cpu")


def test_tokens_that_share_an_id_are_named(
    saved: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "target", lambda weights: None)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [*vocabulary][:2]
    vocabulary[second] = vocabulary[first]
    path.write_text(json.dumps(content))
    load_hf(str(folder), device="cpu")
    assert "1 tokens of its tokenizer have the id of another one" in capfd.readouterr().err


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no JSON": (lambda index: "{", "this is not JSON"),
    "a list": (lambda index: "[]", "it holds no settings"),
    "no map": (lambda index: "{}", "weight_map names no file"),
    "numbers": (lambda index: json.dumps({"weight_map": {UP: 1}}), "weight_map names no file"),
    "another folder": (
        lambda index: json.dumps({"weight_map": {UP: "../model.safetensors"}}),
        "weight_map names no file",
    ),
}


@pytest.mark.parametrize("parts", ["all", "head"])
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_index_is_named(
    case: str, parts: Any, saved: Callable[..., Path], tmp_path: Path
) -> None:
    change, sentence = DAMAGED[case]
    folder = saved(tmp_path / "target", lambda weights: None)
    (folder / INDEX_FILE).write_text(change({}))
    with pytest.raises(UserError, match=f"^{folder / INDEX_FILE}: {sentence}"):
        load_hf(str(folder), parts=parts, device="cpu")


def split_in_two(folder: Path) -> None:
    """Save the weights in two files, of which the second also holds other values of one weight."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({NORM: weights[NORM] + 1}, folder / "b.safetensors", {"format": "pt"})
    save_file(weights, folder / "a.safetensors", {"format": "pt"})
    weight_map = dict.fromkeys(weights, "a.safetensors") | {NORM: "b.safetensors"}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


UNFIT_FILES: dict[str, tuple[Callable[[Weights], Any], Callable[[Path], Any], str]] = {
    "NaN": (
        lambda weights: weights[UP].fill_(torch.nan),
        lambda folder: None,
        f"its weight {UP} holds NaN or infinity",
    ),
    "a weight in two files": (
        lambda weights: None,
        split_in_two,
        f"a.safetensors holds {NORM} too",
    ),
    "a pipe": (
        lambda weights: None,
        lambda folder: os.mkfifo(folder / "x.json"),
        "this is no file",
    ),
    "an adapter that names another model": (
        lambda weights: None,
        lambda folder: (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/other"})
        ),
        "it holds a LoRA adapter beside a model",
    ),
    "damaged settings": (
        lambda weights: None,
        lambda folder: (folder / "generation_config.json").write_text("{"),
        "generation_config.json: this is not JSON",
    ),
}
LOADERS: dict[str, Callable[[str, Target], Any]] = {
    "target.model": lambda path, target: load_hf(path, device="cpu"),
    "drafter.model": lambda path, target: load_model_files(path),
    "eval.assistant": lambda path, target: _load_assistant(target, path),
}


@pytest.mark.parametrize("key", LOADERS)
@pytest.mark.parametrize("case", UNFIT_FILES)
def test_every_kind_of_model_is_checked_alike(
    case: str, key: str, saved: Callable[..., Path], tiny: Target, tmp_path: Path
) -> None:
    change_weights, change_files, sentence = UNFIT_FILES[case]
    folder = saved(tmp_path / "target", change_weights)
    change_files(folder)
    with pytest.raises(UserError, match=sentence):
        LOADERS[key](str(folder), tiny)


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_cut_file_is_named(size: int, saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved(tmp_path / "target", lambda weights: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(
        UserError,
        match=f"^target.model={folder}: its weights cannot be read .*; copy its files again",
    ):
        load_hf(str(folder), device="cpu")


def test_a_report_is_found_where_transformers_is_silent(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    """Weights that others are made of, as those of experts are, stand in its report alone, which
    a user may have silenced.
    """
    folder = saved(tmp_path / "target", remove("experts.0.w1"), "mixtral", **EXPERTS)
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with pytest.raises(
            UserError, match="experts.gate_up_proj cannot be made of the weights in its files"
        ):
            load_pretrained(AutoModelForCausalLM, folder, "target.model")
    finally:
        logger.setLevel(level)


WITHOUT_WEIGHTS = {
    "AutoConfig",
    "AutoTokenizer",
    "AutoProcessor",
    "AutoFeatureExtractor",
    GenerationConfig.__name__,
    "Target",
    "Drafter",
}
"""Classes whose `from_pretrained` loads no weights of a model, and those of this project, which
go through the door.
"""
DOOR = "spectrain/models/pretrained.py"
# Programs of other packages' environments, where this project is not.
PEERS = "lab/side_by_side"


@pytest.mark.parametrize("folder", ["spectrain", "eval", "kernels", "scripts", "lab"])
def test_no_other_code_loads_a_model_of_transformers(folder: str) -> None:
    root = Path(__file__).parents[2]
    for path in sorted((root / folder).rglob("*.py")):
        text = path.read_text()
        name_here = path.relative_to(root).as_posix()
        if "from_pretrained" not in text or name_here == DOOR or name_here.startswith(PEERS):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr == "from_pretrained":
                owner = node.value
                name = (
                    owner.attr
                    if isinstance(owner, ast.Attribute)
                    else getattr(owner, "id", "an expression")
                )
                assert name in WITHOUT_WEIGHTS, (
                    f"{path}:{node.lineno}: {name} must be loaded by load_pretrained"
                )
