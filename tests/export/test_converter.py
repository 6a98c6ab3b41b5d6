"""Converting: a drafter has the same numbers in every layout that can hold it, and is refused in
one sentence elsewhere.
"""

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, open_dict
from safetensors.torch import load_file, save_file

from spectrain.config.build import build
from spectrain.config.spec import RunSpec
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.export.converter import convert, read_drafter
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.layouts import detect_layout
from spectrain.export.linter import check_files
from spectrain.export.targets import TargetFiles
from spectrain.files import refuse_nonempty
from spectrain.models.target import Target
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.runs.drafters import load_weights, save_drafter
from spectrain.trees import Chain
from tests.installed import load_cases

from . import foreign

TINY = TargetFiles("tiny")


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    """A link to a folder, full or empty, is neither followed nor turned into a folder of files."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(UserError, match="link: it is a link"):
        refuse_nonempty(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()


def settings_for(drafter: str, **options: Any) -> DictConfig:
    """Compose a configuration with these settings of a drafter."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("train", overrides=[f"drafter={drafter}", "target=tiny", "tree=chain"])
    with open_dict(config):
        config.drafter.update(options)
    return config


def ours(directory: Path, tiny: Target, drafter: str, **options: Any) -> Path:
    """Save a drafter with random weights, as training would."""
    config = settings_for(drafter, **options)
    module: Drafter = build(config.drafter, target=tiny)
    counts = torch.randint(0, 1000, (tiny.head.vocab_size,))
    counts[tiny.tokenizer.all_special_ids] = 0  # a mask among them
    module.prepare(tiny, counts)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    save_drafter(directory, module, RunSpec.from_nodes(config))
    return directory


DFLASH = {"block_size": 5, "num_layers": 2}
DSPARK = {**DFLASH, "rank": 8}
LILICORR = {
    **DFLASH,
    "top_k": 4,
    "correction_width": 16,
    "correction_layers": 1,
    "correction_heads": 2,
    "factor_width": 12,
}
DFLASH2 = {**DFLASH, "selector_rank": 8}
LATENT = {
    "latent_attention": True,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
# Cases of installed packages.
INSTALLED = load_cases(__name__)
CASES: dict[str, tuple[Callable[[Path, Target], Path], tuple[str, ...]]] = {
    "eagle3": (lambda path, tiny: ours(path, tiny, "eagle3", vocab_size=256),
        ("vllm", "sglang", "spectrain")),
    "eagle3, other layers": (
        lambda path, tiny: ours(path, tiny, "eagle3", vocab_size=256, layers=[1, 3, 6]),
        ("vllm", "sglang", "spectrain"),
    ),
    "eagle3, whole vocabulary": (
        lambda path, tiny: ours(path, tiny, "eagle3", vocab_size=2048),
        ("vllm", "sglang", "spectrain")),
    "eagle3, all norms": (
        lambda path, tiny: ours(
            path, tiny, "eagle3", vocab_size=256,
            architecture={"norm_before_residual": True, "norm_before_fc": True,
                "norm_output": True},
        ),
        ("vllm", "spectrain"),
    ),
    "eagle3, latent attention": (
        lambda path, tiny: ours(
            path, tiny, "eagle3", vocab_size=256, num_layers=2,
            architecture={**LATENT, "fc_norm": True, "q_lora_rank": 24},
        ),
        ("mla", "spectrain"),
    ),
    "eagle3, grown up": (
        lambda path, tiny: ours(
            path, tiny, "eagle3", vocab_size=256, num_layers=3, window=64,
            architecture={"qk_norm": True, "fc_norm": True}
        ),
        ("vllm", "spectrain"),
    ),
    "peagle": (lambda path, tiny: ours(path, tiny, "peagle", vocab_size=256, num_layers=2),
        ("vllm", "flat", "spectrain")),
    "peagle, other settings": (
        lambda path, tiny: ours(
            path, tiny, "peagle", vocab_size=256, num_layers=1, num_drafts=4, own_embedding=False,
            window=32, layers=[1, 3],
            architecture={"qk_norm": True, "norm_before_residual": True, "fc_norm": True},
        ),
        ("vllm", "flat", "spectrain"),
    ),
    "eagle1": (lambda path, tiny: ours(path, tiny, "eagle1"),
        ("vllm", "sglang", "eagle", "spectrain")),
    "eagle1, fc with a bias": (
        lambda path, tiny: ours(path, tiny, "eagle1", bias=True, num_steps=3),
        ("sglang", "eagle", "spectrain")),
    
    "EAGLE's own": (foreign.write_eagle1, ("sglang", "eagle", "spectrain")),
    "medusa": (lambda path, tiny: ours(path, tiny, "medusa", vocab_size=2048),
        ("vllm", "medusa", "spectrain")),
    "medusa, cut vocabulary": (lambda path, tiny: ours(path, tiny, "medusa", vocab_size=256),
        ("vllm", "spectrain")),
    "causal": (lambda path, tiny: ours(path, tiny, "causal", num_layers=2), ("hf", "spectrain")),
    "pard": (lambda path, tiny: ours(path, tiny, "pard", num_layers=2), ("hf", "spectrain")),
    
    
    "SpecForge": (foreign.write_specforge, ("vllm", "sglang", "spectrain")),
    "ModelOpt": (lambda path, tiny: foreign.write_specforge(path, tiny, prefix="layers.0."),
        ("vllm", "sglang", "spectrain")),
    "speculators": (foreign.write_speculators, ("vllm", "sglang", "spectrain")),
    "speculators, its defaults": (
        lambda path, tiny: foreign.write_speculators(
            path, tiny, norm_before_residual=True, norm_before_fc=True, norm_output=True
        ),
        ("vllm", "spectrain"),
    ),
    "FasterDecoding": (foreign.write_medusa, ("vllm", "medusa", "spectrain")),
    "vLLM's Medusa": (foreign.write_medusa_vllm, ("vllm", "spectrain")),
    "dflash": (lambda path, tiny: ours(path, tiny, "dflash", **DFLASH),
        ("vllm", "sglang", "hf", "spectrain")),
    "dflash, causal in a window": (
        lambda path, tiny: ours(path, tiny, "dflash", causal=True, window=12, layers=[1, 3, 8],
            **DFLASH),
        ("vllm", "sglang", "spectrain"),
    ),
    "dflash, cut vocabulary": (lambda path,
        tiny: ours(path, tiny, "dflash", vocab_size=256, **DFLASH), ("vllm", "spectrain")),
    "dflash, own embedding": (
        lambda path, tiny: ours(path, tiny, "dflash", own_embedding=True, window=12, **DFLASH),
        ("vllm", "spectrain")),
    "dspark": (lambda path, tiny: ours(path, tiny, "dspark", **DSPARK),
        ("vllm", "sglang", "spectrain")),
    "dspark, gated, in a window": (
        lambda path, tiny: ours(
            path, tiny, "dspark", markov_head="gated", causal=True, window=12, layers=[1, 3, 8],
            confidence=False, **DSPARK
        ),
        ("vllm", "sglang", "spectrain"),
    ),
    "dspark, a cell": (
        lambda path, tiny: ours(path, tiny, "dspark", markov_head="rnn", **DSPARK),
        ("vllm", "sglang", "spectrain")),
    "dspark, cut vocabulary": (
        lambda path, tiny: ours(path, tiny, "dspark", sample_from_anchor=False, vocab_size=256,
            own_embedding=True, **DSPARK),
        ("vllm", "spectrain"),
    ),
    "dflash2": (lambda path, tiny: ours(path, tiny, "dflash2", **DFLASH2),
        ("vllm", "sglang", "spectrain")),
    "dflash2, other settings": (
        lambda path, tiny: ours(
            path, tiny, "dflash2", own_embedding=True, window=12, conv_kernel_size=3,
            selector_top_k=5, **DFLASH2
        ),
        ("vllm", "spectrain"),
    ),
    
    "lilicorr": (lambda path, tiny: ours(path, tiny, "lilicorr", **LILICORR),
        ("vllm", "spectrain")),
    "lilicorr, as wide as its target": (
        lambda path, tiny: ours(path, tiny, "lilicorr",
            **{**LILICORR, "correction_width": 0, "correction_layers": 2}),
        ("sglang", "spectrain"),
    ),
    
    
    
    
    "medusa for TensorRT-LLM": (
        lambda path, tiny: ours(path, tiny, "medusa", vocab_size=2048, num_layers=2),
        ("tensorrt", "medusa", "spectrain")),
    
    "a flat P-EAGLE": (foreign.write_peagle, ("vllm", "flat", "spectrain")),
    "DeepSpec's DSpark": (foreign.write_deepspec_dspark, ("vllm", "sglang", "spectrain")),
    "speculators' DSpark": (foreign.write_speculators_dspark, ("vllm", "spectrain")),
    "z-lab's DFlash2": (foreign.write_zlab_dflash2, ("vllm", "sglang", "spectrain")),
    "speculators' DFlash2": (foreign.write_speculators_dflash2, ("vllm", "spectrain")),
    "z-lab": (foreign.write_zlab, ("vllm", "sglang", "spectrain")),
    "speculators' DFlash": (foreign.write_speculators_dflash, ("vllm", "spectrain")),
    **INSTALLED.get("CASES", {}),
}  # fmt: skip


@pytest.mark.sweep(9, free=("case", "pair"))
@pytest.mark.parametrize(
    ("case", "pair"), [(case, pair) for case in CASES for pair in permutations(CASES[case][1], 2)]
)
def test_round_trips_are_bit_identical(
    case: str, pair: tuple[str, str], tiny: Target, tmp_path: Path
) -> None:
    """Through every pair of layouts that hold it, a drafter comes back with the same settings
    and the same bits.
    """
    start, first, second, back = (tmp_path / name for name in ("start", "first", "there", "back"))
    read = read_drafter(CASES[case][0](start, tiny), TINY)
    convert(start, first, pair[0], TINY)
    convert(first, second, pair[1], TINY)
    convert(second, back, pair[0], TINY)
    last = read_drafter(back, TINY)
    assert last.family == read.family
    assert {key: last.drafter.get(key) for key in read.drafter if key != "architecture"} == {
        key: value for key, value in read.drafter.items() if key != "architecture"
    }
    assert last.tensors.keys() == read.tensors.keys()
    for name, tensor in read.tensors.items():
        assert last.tensors[name].dtype == tensor.dtype and torch.equal(
            last.tensors[name], tensor
        ), name
    assert read_content(back) == read_content(first)


def read_content(directory: Path) -> dict[str, bytes]:
    """Return every file that an engine reads, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))} | {
        "config.json": json.dumps(
            DrafterFiles.from_directory(directory).config, sort_keys=True
        ).encode()
    }


def test_bfloat16_stays(tiny: Target, tmp_path: Path) -> None:
    """Weights keep their type, and the written configuration names it."""
    start = foreign.write_specforge(tmp_path / "start", tiny)
    tensors = load_file(start / "model.safetensors")
    save_file(
        {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()},
        start / "model.safetensors",
    )
    convert(start, tmp_path / "out", "vllm", TINY)
    written = DrafterFiles.from_directory(tmp_path / "out")
    assert {tensor.dtype for tensor in written.tensors.values()} == {
        torch.bfloat16,
        torch.int64,
        torch.bool,
    }
    assert written.config["dtype"] == "bfloat16"


REFUSED: dict[str, tuple[Callable[[Path, Target], Path], str, tuple[str, ...]]] = {
    "a map the original has no place for": (
        lambda path, tiny: ours(path, tiny, "medusa", vocab_size=256), "medusa",
        ("d2t", "drafter.vocab_size=2048")),
    "normed feedback in the flat layout": (
        lambda path, tiny: foreign.write_speculators(path, tiny, norm_output=True), "sglang",
        ("norm_output",)),
    "two layers for SGLang": (
        lambda path, tiny: ours(path, tiny, "eagle3", vocab_size=256, num_layers=2), "sglang",
        ("num_layers", "vllm")),
    "a window for SGLang": (
        lambda path, tiny: ours(path, tiny, "eagle3", vocab_size=256, window=8), "sglang",
        ("window", "vllm")),
    "head norms for SGLang": (
        lambda path, tiny: ours(path, tiny, "eagle3", vocab_size=256,
            architecture={"qk_norm": True}), "sglang", ("qk_norm",)),
    "P-EAGLE for SGLang": (
        lambda path, tiny: ours(path, tiny, "peagle", vocab_size=256), "sglang",
        ("peagle", "format=vllm or format=flat")),
    "EAGLE's bias for vLLM": (foreign.write_eagle1, "vllm",
        ("fc.bias", "--to sglang", "drafter.bias=false")),
    "Medusa for SGLang": (foreign.write_medusa, "sglang", ("medusa", "vllm")),
    
    
    
    "PARD-2 with features": (
        lambda path, tiny: ours(path, tiny, "pard", num_layers=2, layers=[2, 6]), "hf",
        ("drafter.layers=[2, 6]", "no engine")),
    
    
    "a window for transformers": (
        lambda path, tiny: ours(path, tiny, "dflash", causal=True, window=12, **DFLASH), "hf",
        ("window=12", "--to vllm")),
    "a shifted block for vLLM": (
        lambda path, tiny: ours(path, tiny, "dflash", sample_from_anchor=True, **DFLASH), "vllm",
        ("sample_from_anchor", "one token off", "spectrain eval")),
    "a shifted block for SGLang": (
        lambda path, tiny: ours(path, tiny, "dflash", sample_from_anchor=True, **DFLASH), "sglang",
        ("sample_from_anchor",)),
    "a cut vocabulary for SGLang": (
        lambda path, tiny: ours(path, tiny, "dflash", vocab_size=256, **DFLASH), "sglang",
        ("d2t", "256 of 2048", "--to vllm", "drafter.vocab_size=null")),
    "DFlash's own embedding for SGLang": (
        lambda path, tiny: ours(path, tiny, "dflash", own_embedding=True, **DFLASH), "sglang",
        ("embed_tokens", "--to vllm")),
    "a window both ways for SGLang": (
        lambda path, tiny: ours(path, tiny, "dflash", window=12, **DFLASH), "sglang",
        ("drafter.window=12", "--to vllm")),
    "a causal block without a window": (
        lambda path, tiny: ours(path, tiny, "dflash", causal=True, **DFLASH), "vllm",
        ("drafter.causal", "drafter.window")),
    "a causal block without a window for SGLang": (
        lambda path, tiny: ours(path, tiny, "dflash", causal=True, **DFLASH), "sglang",
        ("drafter.causal",)),
    "the embedding as a layer for SGLang": (
        lambda path, tiny: ours(path, tiny, "dflash", layers=[0, 4], **DFLASH), "sglang",
        ("target_layer_ids", "--to vllm")),
    "a shifted DFlash2": (
        lambda path, tiny: ours(path, tiny, "dflash2", sample_from_anchor=True, **DFLASH2), "vllm",
        ("sample_from_anchor",)),
    "a cut DFlash2": (
        lambda path, tiny: ours(path, tiny, "dflash2", vocab_size=256, **DFLASH2), "vllm",
        ("256 of 2048", "DFlash2")),
    "a DSpark whose anchor drafts nothing, for SGLang": (
        lambda path, tiny: ours(path, tiny, "dspark", sample_from_anchor=False, **DSPARK), "sglang",
        ("sample_from_anchor=false", "--to vllm")),
    "a DSpark with a window both ways": (
        lambda path, tiny: ours(path, tiny, "dspark", window=12, **DSPARK), "vllm",
        ("window=12", "causal=true")),
    "a DSpark whose cell would begin at the anchor": (
        lambda path, tiny: ours(path, tiny, "dspark", sample_from_anchor=False, markov_head="rnn",
            **DSPARK), "vllm",
        ("markov_head=rnn", "slot 0")),
    "latent attention for SGLang": (
        lambda path, tiny: ours(path, tiny, "eagle3", vocab_size=256,
            architecture=LATENT), "sglang",
        ("latent_attention", "Llama's or Qwen3's layers")),
    "Llama's layers as latent ones": (
        lambda path, tiny: ours(path, tiny, "eagle3", vocab_size=256), "mla",
        ("no latent attention", "format=vllm")),
    "DSpark for transformers": (
        lambda path, tiny: ours(path, tiny, "dspark", **DSPARK), "hf",
        ("dspark", "vllm or format=sglang or format=flat")),
    "an untrained early exit": (lambda path, tiny: ours(path, tiny, "early_exit"), "hf",
        ("assistant_early_exit",)),
    **INSTALLED.get("REFUSED", {}),
}  # fmt: skip


@pytest.mark.sweep(14, free=("case",))
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_layout_cannot_hold_is_named(case: str, tiny: Target, tmp_path: Path) -> None:
    """Nothing is written, and the sentence names the tensor, flag or family and what can be
    done.
    """
    make, form, words = REFUSED[case]
    start = make(tmp_path / "start", tiny)
    with pytest.raises(UserError) as error:
        convert(start, tmp_path / "out", form, TINY)
    assert all(word in str(error.value) for word in words) and not (tmp_path / "out").exists()


def test_own_embedding_is_not_for_sglang(tiny: Target, tmp_path: Path) -> None:
    """A drafter whose embedding is not its target's is refused where its embedding would be
    lost.
    """
    start = foreign.write_speculators(tmp_path / "start", tiny)
    tensors = load_file(start / "model.safetensors")
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] + 0.01
    save_file(tensors, start / "model.safetensors")
    assert read_drafter(start, TINY).drafter["architecture"]["own_embedding"]
    with pytest.raises(UserError, match="embed_tokens.weight"):
        convert(start, tmp_path / "out", "sglang", TINY)


UNLIKE: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "half of the head norms": (
        lambda config, tensors: tensors.update(
            {"midlayer.self_attn.q_norm.weight": torch.ones(32)}
        ),
        "k_norm",
    ),
    "bias": (
        lambda config, tensors: tensors.update({"midlayer.self_attn.q_proj.bias": torch.ones(128)}),
        "bias",
    ),
    "a layer that is missing": (
        lambda config, tensors: config.update(num_hidden_layers=2),
        r"layers\.1\.",
    ),
    "gelu": (lambda config, tensors: config.update(hidden_act="gelu"), "hidden_act"),
    "windows that differ": (
        lambda config, tensors: config.update(layer_types=["sliding_attention", "full_attention"]),
        "layer_types",
    ),
    "a wider target": (
        lambda config, tensors: config.update(target_hidden_size=512),
        "target_hidden_size",
    ),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_what_our_class_cannot_represent_is_named(case: str, tiny: Target, tmp_path: Path) -> None:
    """A foreign drafter of another shape is refused by its tensor or flag."""
    change, word = UNLIKE[case]
    start = foreign.write_specforge(tmp_path / "start", tiny)
    config = json.loads((start / "config.json").read_text())
    tensors = load_file(start / "model.safetensors")
    change(config, tensors)
    foreign.write_checkpoint(start, config, tensors)
    with pytest.raises(UserError, match=word):
        convert(start, tmp_path / "out", "spectrain", TINY)


def test_pickled_files_are_not_opened(tiny: Target, tmp_path: Path) -> None:
    """A .pt file is refused with the line that makes it safetensors, which then is read."""
    start = foreign.write_medusa(tmp_path / "start", tiny)
    tensors = load_file(start / "medusa_lm_head.safetensors")
    (start / "medusa_lm_head.safetensors").unlink()
    torch.save(tensors, start / "medusa_lm_head.pt")
    with pytest.raises(UserError, match=r"medusa_lm_head.pt.*save_file"):
        read_drafter(start)


def test_version_two_heads_take_the_targets_output_layer(tiny: Target, tmp_path: Path) -> None:
    """Medusa's version 2 has no output layer in its heads, which become copies of the target's;
    without a target it is refused."""
    start = foreign.write_medusa(tmp_path / "start", tiny, version=2)
    with pytest.raises(UserError, match=r"0\.1\.weight"):
        read_drafter(start)
    checkpoint = read_drafter(start, TINY)
    assert all(
        torch.equal(checkpoint.tensors[f"heads.{head}.lm_head.weight"], tiny.head.output.weight)
        for head in range(3)
    )


@pytest.mark.sweep(2, free=("case",))
@pytest.mark.parametrize(
    "case",
    [
        "SpecForge",
        "speculators, its defaults",
        "FasterDecoding",
        "vLLM's Medusa",
        "z-lab",
        "speculators' DFlash",
        "EAGLE's own",
    ],
)
def test_evaluation_takes_foreign_directories(case: str, tiny: Target, tmp_path: Path) -> None:
    """`eval run=DIR` composes the same drafter from another project's files as from their
    conversion, and drafts the same.
    """
    start = CASES[case][0](tmp_path / "start", tiny)
    convert(start, tmp_path / "own", "spectrain", TINY)
    generations = []
    for directory in (start, tmp_path / "own"):
        with initialize_config_module("spectrain.conf", version_base="1.3"):
            spec, _ = resolve_eval_spec(
                compose("eval", overrides=[f"run={directory}", "target=tiny"])
            )
        drafter = spec.drafter.build(target=tiny)
        load_weights(drafter, directory, tiny)
        prompt = [5, 9, 200, 31, 7]
        generations.append(decode(tiny, [prompt], Greedy(), 8, drafter.eval(), Chain(depth=3))[0])
    assert (
        generations[0].output
        == generations[1].output
        == decode(tiny, [prompt], Greedy(), 8)[0].output
    )
    assert generations[0].round_lengths == generations[1].round_lengths


EAGLE1_UNLIKE: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "two layers": (
        lambda config, tensors: config.update(num_hidden_layers=2),
        "num_hidden_layers=2",
    ),
    "Qwen2's biases": (
        lambda config, tensors: tensors.update({"layers.0.self_attn.q_proj.bias": torch.ones(128)}),
        "q_proj.bias",
    ),
    "a first norm": (
        lambda config, tensors: tensors.update(
            {"layers.0.input_layernorm.weight": torch.ones(128)}
        ),
        "input_layernorm",
    ),
    "gelu": (lambda config, tensors: config.update(hidden_act="gelu"), "hidden_act"),
    "another embedding": (
        lambda config, tensors: tensors["embed_tokens.weight"].add_(0.01),
        "embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("case", EAGLE1_UNLIKE)
def test_an_eagle_of_another_shape_is_refused(case: str, tiny: Target, tmp_path: Path) -> None:
    """An EAGLE that our class cannot hold is refused by its tensor or key."""
    change, word = EAGLE1_UNLIKE[case]
    start = foreign.write_eagle1(tmp_path / "start", tiny)
    config = json.loads((start / "config.json").read_text())
    tensors = load_file(start / "model.safetensors")
    change(config, tensors)
    foreign.write_checkpoint(start, config, tensors)
    with pytest.raises(UserError, match=word):
        read_drafter(start, TINY)


def test_an_eagle_of_sglang_has_a_bias_and_that_of_vllm_none(tiny: Target, tmp_path: Path) -> None:
    """For SGLang a missing bias is written as zero; a file without it, and one with a bias for
    vLLM, are errors.
    """
    start = ours(tmp_path / "start", tiny, "eagle1")
    exports = {
        form: load_file(convert(start, tmp_path / form, form, TINY) / "model.safetensors")
        for form in ("vllm", "sglang")
    }
    assert "fc.bias" not in exports["vllm"] and not exports["sglang"]["fc.bias"].any()
    for form, bias, word in (("sglang", None, "fc.bias"), ("vllm", torch.ones(128), "fc-bias")):
        tensors = {k: v for k, v in exports[form].items() if k != "fc.bias"} | (
            {} if bias is None else {"fc.bias": bias}
        )
        save_file(tensors, tmp_path / form / "model.safetensors")
        files = DrafterFiles.from_directory(tmp_path / form)
        assert any(
            word in (finding.name, *finding.problem.split())
            for finding in check_files(files, detect_layout(files), None)
            if finding.level == "error"
        )


def test_vllm_finds_no_map_over_the_full_vocabulary(tiny: Target, tmp_path: Path) -> None:
    """vLLM refuses such a map, so a file with one has a finding, and converting the file drops
    it.
    """
    start = ours(tmp_path / "start", tiny, "peagle", vocab_size=2048, num_layers=1)
    for form in ("vllm", "flat"):
        convert(start, tmp_path / form, form, TINY)
        files = DrafterFiles.from_directory(tmp_path / form)
        assert not {"d2t", "t2d"} & files.tensors.keys() and "lm_head.weight" in files.tensors
        assert not list(check_files(files, detect_layout(files), TINY))
        save_file(
            files.tensors | {"d2t": torch.zeros(2048, dtype=torch.int64)},
            tmp_path / form / "model.safetensors",
        )
        files = DrafterFiles.from_directory(tmp_path / form)
        assert [finding.name for finding in check_files(files, detect_layout(files), TINY)] == [
            "d2t-of-all"
        ]
        convert(tmp_path / form, tmp_path / f"{form}-mended", form, TINY)
        assert "d2t" not in DrafterFiles.from_directory(tmp_path / f"{form}-mended").tensors


def test_medusa_for_vllm_has_full_heads_that_draft_the_same(tiny: Target, tmp_path: Path) -> None:
    """vLLM reads heads over the full vocabulary: the likeliest token of a cut head is also that
    of the filled head.
    """
    start = ours(tmp_path / "start", tiny, "medusa", vocab_size=256)
    convert(start, tmp_path / "out", "vllm", TINY)
    cut = read_drafter(start, TINY).tensors
    exported = DrafterFiles.from_directory(tmp_path / "out").tensors
    hidden = torch.randn(500, tiny.width)
    for head in range(3):
        expected = (hidden @ cut[f"heads.{head}.lm_head.weight"].T).argmax(-1)
        assert exported[f"lm_heads.{head}.weight"].shape[0] == tiny.head.vocab_size
        assert torch.equal(
            (hidden @ exported[f"lm_heads.{head}.weight"].T).argmax(-1),
            expected + cut["d2t"][expected],
        )


def test_cut_heads_of_vllm_are_mended(tiny: Target, tmp_path: Path) -> None:
    """Separate heads over a part of the vocabulary, which vLLM cannot load, are read and written
    over the full vocabulary.
    """
    start = foreign.write_medusa_vllm(tmp_path / "start", tiny)
    config = json.loads((start / "config.json").read_text())
    tensors = load_file(start / "model.safetensors")
    shared = tensors.pop("lm_head.weight")
    save_file(
        tensors | {f"lm_heads.{head}.weight": shared.clone() for head in range(3)},
        start / "model.safetensors",
    )
    (start / "config.json").write_text(json.dumps(config | {"original_lm_head": False}))
    convert(start, tmp_path / "out", "vllm", TINY)
    written = DrafterFiles.from_directory(tmp_path / "out")
    assert {written.tensors[f"lm_heads.{head}.weight"].shape[0] for head in range(3)} == {
        tiny.head.vocab_size
    }
    assert torch.equal(
        read_drafter(tmp_path / "out", TINY).tensors["heads.1.lm_head.weight"], shared
    )
