"""Files of other projects that are easily taken for something else, and what lint says of
untrained drafters.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.config.build import GroupSpec
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.llama_layer import LAYER_KEYS, llama_layer_settings
from spectrain.errors import UserError
from spectrain.export import measure
from spectrain.export.converter import convert, read_drafter
from spectrain.export.layout import DrafterCheckpoint
from spectrain.export.layouts import detect_layout, read_files
from spectrain.export.linter import check_files, lint
from spectrain.export.measure import find_misinterpretation
from spectrain.export.native import NATIVE
from spectrain.export.targets import TargetFiles, read_tokenizer
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.loading import load_hf
from spectrain.models.target import Target

from . import foreign
from .test_converter import ours

TINY = TargetFiles("tiny")


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Change a folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def names_of(folder: Path) -> set[str]:
    """Return the names of a folder's findings with the target, without decoding."""
    files = read_files(folder)
    return {finding.name for finding in check_files(files, detect_layout(files), TINY)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_that_sglang_ignores_is_reported(
    dtype: torch.dtype, tiny: Target, tmp_path: Path
) -> None:
    """Only one that differs from the target's by more than rounding is reported, in EAGLE-3's
    flat layout and in EAGLE's.
    """
    embedding = TINY.load_embedding().float()
    for number, write in enumerate((foreign.write_specforge, foreign.write_eagle1)):
        folder = write(tmp_path / str(number), tiny)
        change_tensors(
            folder,
            lambda tensors: tensors.update({"embed_tokens.weight": embedding.to(dtype).float()}),
        )
        assert "ignored-tensor" not in names_of(folder)
        change_tensors(
            folder, lambda tensors: tensors.update({"embed_tokens.weight": embedding + 0.1})
        )
        assert "ignored-tensor" in names_of(folder)


def nest_config(folder: Path, tiny: Target, with_head: bool) -> None:
    """Write the configuration of an EAGLE drafter as vLLM's first conversion did, which also
    copied the target's head.
    """
    path = folder / "config.json"
    inner = json.loads(path.read_text())
    has_bias = inner.pop("bias")
    inner |= {"model_type": "eagle", "architectures": ["LlamaForCausalLM"]}
    path.write_text(
        json.dumps(
            {"model_type": "eagle", "model": inner, **({"eagle_fc_bias": True} if has_bias else {})}
        )
    )
    if with_head:
        change_tensors(
            folder, lambda tensors: tensors.update({"lm_head.weight": TINY.load_head().float()})
        )


@pytest.mark.parametrize("bias", [False, True])
def test_a_nested_configuration_of_vllms_eagle_is_read(
    bias: bool, tiny: Target, tmp_path: Path
) -> None:
    """It is the same drafter as in the flat layout, whether the files hold the target's head or
    not.
    """
    convert(ours(tmp_path / "run", tiny, "eagle1", bias=bias), tmp_path / "flat", "eagle", TINY)
    expected = read_drafter(tmp_path / "flat", TINY)
    (tmp_path / "flat" / "spectrain.json").unlink()
    nest_config(tmp_path / "flat", tiny, with_head=bias)
    assert names_of(tmp_path / "flat") == {"nested-config"}
    drafter = read_drafter(tmp_path / "flat", TINY)
    assert drafter.family == "eagle1" and drafter.drafter["bias"] == bias
    assert drafter.drafter["architecture"] == expected.drafter["architecture"]
    assert drafter.tensors.keys() == expected.tensors.keys()
    assert all(
        torch.equal(drafter.tensors[name], expected.tensors[name]) for name in drafter.tensors
    )
    convert(tmp_path / "flat", tmp_path / "again", "sglang", TINY)
    assert not lint(tmp_path / "again", TINY)
    if bias:
        change_tensors(tmp_path / "flat", lambda tensors: tensors["lm_head.weight"].add_(1.0))
        with pytest.raises(UserError, match="lm_head.weight is not the target's"):
            read_drafter(tmp_path / "flat", TINY)


def test_an_adapter_alone_says_that_it_is_one(tmp_path: Path) -> None:
    """As a drafter and as a target, a LoRA adapter is named with its base model and the remedy."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "org/base", "r": 2, "lora_alpha": 4})
    )
    save_file(
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 8)},
        folder / "adapter_model.safetensors",
    )
    message = "it holds a LoRA adapter for org/base and no model; merge it"
    readers: tuple[Callable[[], Any], ...] = (
        lambda: lint(folder, None),
        lambda: read_drafter(folder),
        lambda: load_hf(str(folder)),
        lambda: TargetFiles(str(folder)).config,
    )
    for read in readers:
        with pytest.raises(UserError, match=message):
            read()
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(UserError, match="a LoRA adapter for a model that it does not name"):
        lint(folder, None)


@pytest.mark.slow
def test_untrained_drafters_are_not_reported(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drafters with random matrices, other interpretations are closer to the target by chance,
    and none is reported.

    The thresholds without the comparison with shuffled copies reported 12 of 28 such drafters.
    """
    architecture = {
        key: value for key, value in llama_layer_settings(tiny.config).items() if key in LAYER_KEYS
    }
    settings = {
        "layers": [2, 4, 5],
        "num_layers": 1,
        "vocab_size": 256,
        "start": "random",
        "architecture": architecture,
    }
    counts = torch.arange(tiny.head.vocab_size, 0, -1)
    monkeypatch.setattr(measure, "NUM_PROMPTS", 6)
    for seed in range(6):
        torch.manual_seed(seed)
        spec = GroupSpec("drafter", "eagle3", settings)
        module: Eagle3 = spec.build(target=tiny)
        module.prepare(tiny, counts)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.dim() == 2 and name != "lm_head.weight":
                    parameter.copy_(0.05 * torch.randn_like(parameter))
        tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        checkpoint = DrafterCheckpoint("eagle3", settings, tensors)
        assert not [
            finding
            for finding in find_misinterpretation(checkpoint, TINY, NATIVE)
            if finding.level == "error"
        ]


TOKENIZER_FILES = {
    "nothing in it": ("tokenizer.json", "{}"),
    "a list": ("tokenizer.json", "[]"),
    "a cut file": ("tokenizer.json", '{"model": {'),
    "a vocabulary of another type": (
        "tokenizer.json",
        '{"model": {"type": "BPE", "vocab": [1], "merges": 3}}',
    ),
    "added tokens of another type": (
        "tokenizer_config.json",
        '{"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": [1]}',
    ),
    "a class of another type": ("tokenizer_config.json", '{"tokenizer_class": 3}'),
    "settings of another type": ("tokenizer_config.json", "[]"),
    "a pattern without end": (
        "tokenizer.json",
        '{"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(#+)+$"}}}',
    ),
}


@pytest.mark.parametrize("case", TOKENIZER_FILES)
def test_a_damaged_tokenizer_of_a_drafter_is_a_sentence(case: str, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_DIRECTORY / name, tmp_path)
    name, content = TOKENIZER_FILES[case]
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        read_tokenizer(tmp_path, "x")
    assert "\n" not in str(error.value) and "copy " in str(error.value)
