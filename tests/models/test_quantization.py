"""Targets in few bits: decoded as `generate` decodes them where their packages are there, named
in a sentence where not.
"""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.session import Session
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.models.architectures.quantized import QUANTIZERS, quantization_method
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.loading import build_meta_network, load_hf, load_tokenizer
from spectrain.models.lora import TargetTraining
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.sharding import load_network
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from tests.models.checkpoints import save_compressed, save_fp8, save_gguf_file, save_mxfp4
from tests.targets import cut_tiny

NEW_TOKENS = 16


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights, a multiple of 64 wide, as NF4 asks on a CPU."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=2,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    load_tokenizer(str(TINY_DIRECTORY), False, True).save_pretrained(folder)
    return folder


def has_package(way: str) -> bool:
    return find_spec(QUANTIZERS[way][0]) is not None


def assert_decodes_as_generate(target: Target) -> None:
    """Chains and trees against the quantised model itself, alone and in a batch."""
    target.pack_weights()
    prompts = [torch.randint(3, 60, (length,)).tolist() * 2 for length in (9, 6)]
    with reference_model(target) as model:
        expected = [generate(model, prompt, NEW_TOKENS, target.stop_ids) for prompt in prompts]
    for builder in (Chain(3), Eagle2(3, 8)):
        session = Session(target, Greedy(), Ngram(target), builder)
        assert [generation.output for generation in session.decode(prompts, NEW_TOKENS)] == expected
        assert session.decode(prompts[:1], NEW_TOKENS)[0].output == expected[0]


@pytest.mark.parametrize("way", QUANTIZERS)
def test_quantized_decoding_equals_generate_or_names_the_missing_package(
    way: Any, small: Path
) -> None:
    if not has_package(way):
        with pytest.raises(UserError, match=f"pip install {QUANTIZERS[way][0]}"):
            load_hf(str(small), device="cpu", dtype="float32", quantization=way)
        return
    assert_decodes_as_generate(load_hf(str(small), device="cpu", dtype="float32", quantization=way))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("save", [save_fp8, save_mxfp4, save_compressed])
def test_quantized_checkpoints_decode_as_generate(
    save: Callable[[Path], None], dtype: str, tmp_path: Path
) -> None:
    """Weights that are dequantised on loading have the requested type, and decode as the model
    that transformers loads.
    """
    save(tmp_path)
    if save is save_compressed and not find_spec("compressed_tensors"):
        with pytest.raises(UserError, match="pip install compressed-tensors"):
            load_hf(str(tmp_path), device="cpu", dtype=dtype)
        return
    target = load_hf(str(tmp_path), device="cpu", dtype=dtype)
    assert {weight.dtype for weight in target.parameters()} == {getattr(torch, dtype)}
    if dtype == "float32":  # in half precision random weights have too many ties
        assert_decodes_as_generate(target)


def test_a_gguf_file_loads_as_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted once, its weights are what the blocks come to."""
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))
    path, weights = save_gguf_file(tmp_path)
    target = load_hf(str(path), device="cpu", dtype="float32")
    assert target.name == path.stem and Path(target.path).parent == tmp_path / "cache"
    for name, weight in target.model.state_dict().items():
        torch.testing.assert_close(weight, weights[name], atol=0.02, rtol=0)
    assert_decodes_as_generate(target)
    written = (Path(target.path) / "model.safetensors").stat().st_mtime_ns
    assert (
        Path(load_hf(str(path), device="cpu").path) / "model.safetensors"
    ).stat().st_mtime_ns == written
    with pytest.raises(UserError, match="no such file"):
        load_hf(str(tmp_path / "missing.gguf"))


@pytest.mark.parametrize("way", [way for way in QUANTIZERS if has_package(way)])
def test_adapters_merge_into_dequantized_weights(way: Any, small: Path) -> None:
    """The merged target has the outputs that it had with its adapters, and is an ordinary model
    again.
    """
    target = load_hf(str(small), device="cpu", dtype="float32", quantization=way)
    training = TargetTraining("lora", 2, 4.0)
    training.start_training(target)
    for parameter in training.parameters:
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(3, 60, (1, 12))
    before = target.features(tokens, ("final",)).hidden
    training.finish_training(target)
    assert quantization_method(target.model.config) is None and all(
        p.is_floating_point() for p in target.parameters()
    )
    gap = (target.features(tokens, ("final",)).hidden - before).norm() / before.norm()
    # LLM.int8 rounds what enters a layer as well, and on a CPU NF4 is multiplied in bfloat16.
    assert gap < {"8bit": 0.1, "4bit": 0.05, "int8": 0.01}[way]


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "hqq"])
def test_a_quantized_checkpoint_names_its_package(method: str, small: Path, tmp_path: Path) -> None:
    if find_spec(method.replace("-", "_")):
        pytest.skip("its package is there")
    folder = tmp_path / "checkpoint"
    shutil.copytree(small, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method,
        "bits": 4,
        "group_size": 32,
        "format": "pack-quantized",
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="pip install") as error:
        load_hf(str(folder), device="cpu")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=f"already quantized .{method}"):
        load_hf(str(folder), device="cpu", quantization="4bit")


@pytest.mark.parametrize("settings", [{"quant_method": "fp9000"}, {"bits": 4}])
@pytest.mark.parametrize("network", [build_meta_network, load_network])
def test_an_unknown_method_is_refused_by_plans_too(
    network: Any, settings: Any, small: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(small, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(UserError, match=r"^target.model=\S+: .*quant") as error:
        load_hf(str(folder), device="cpu", network=network)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "adapt", "message"),
    [("bitsandbytes", "full", "adapt=lora"), ("gptq", "lora", "cannot be added")],
)
def test_quantized_weights_cannot_be_trained(method: str, adapt: Any, message: str) -> None:
    target = cut_tiny(1)
    target.config.quantization_config = {"quant_method": method}
    with pytest.raises(UserError, match=message):
        TargetTraining(adapt, 2, 4.0).start_training(target)


def test_sharded_weights_cannot_be_quantized() -> None:
    with pytest.raises(UserError, match="leave out target.sharding"):
        load_hf(str(TINY_DIRECTORY), sharding="fsdp2", quantization="8bit")


def test_layers_narrower_than_a_block_are_refused() -> None:
    """The tiny target's feed-forward is 352 wide."""
    with pytest.raises(UserError, match="multiples of 64"):
        load_hf(str(TINY_DIRECTORY), device="cpu", quantization="4bit")
