"""DFlash between engines: published configurations, the drafts of every layout, and each trap's
name.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.dflash import DFlash, DFlashConfig
from spectrain.errors import UserError
from spectrain.export.converter import convert, read_drafter
from spectrain.export.dflash import occurs_in_text
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.layout import DrafterCheckpoint
from spectrain.export.layouts import detect_layout
from spectrain.export.linter import lint
from spectrain.export.measure import load_drafter
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from spectrain.runs.drafters import load_weights
from spectrain.runs.init_drafter import apply_init_shape
from spectrain.trees import Chain

from . import foreign
from .test_converter import CASES
from .test_linter import Change, change_files, find_faults, train_drafter, transpose_tensors

TINY = TargetFiles("tiny")

# Published configurations


QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 5,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "layer_types": ["full_attention"] * 5,
}
ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
ZLAB: dict[str, Any] = {
    **QWEN3_8B,
    "architectures": ["DFlashDraftModel"],
    "num_target_layers": 36,
    "block_size": 16,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
DEEPSPEC: dict[str, Any] = {
    **QWEN3_8B,
    "architectures": ["Qwen3DSparkModel"],
    "num_target_layers": 36,
    "block_size": 7,
    "rope_parameters": ROPE,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "num_anchors": 512,
    "markov_rank": 0,
    "enable_confidence_head": False,
    "tie_word_embeddings": False,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "block_size": 16,
    "mask_token_id": 151669,
    "aux_hidden_state_layer_ids": [2, 18, 33],
    "draft_vocab_size": 151936,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "transformer_layer_config": {
        **QWEN3_8B,
        "rope_parameters": ROPE,
        "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 2048,
        "use_sliding_window": True,
    },
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 15}],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
}
SIZES = {
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_parameters": ROPE,
}


def make_files(config: dict[str, Any], fused: int, directory: Path) -> DrafterFiles:
    """Make files with this configuration and tensors that have shapes and no data."""
    return DrafterFiles(directory, config, foreign.dflash_tensors(QWEN3_8B, fused, empty=True))


def test_z_labs_checkpoint_is_accepted(tmp_path: Path) -> None:
    """Qwen3-8B's file has the paper's settings, our constructor's defaults, and layer ids one
    lower than ours.
    """
    files = make_files(ZLAB, 5, tmp_path)
    layout = detect_layout(files)
    assert layout.title == "DFlash, flat layout" and not list(layout.findings(files))
    assert layout.expected_tensors(files).required == {
        name: tuple(tensor.shape) for name, tensor in files.tensors.items()
    }
    checkpoint = layout.read(files, None)
    assert checkpoint.family == "dflash"
    assert checkpoint.drafter == {
        "block_size": 16,
        "num_layers": 5,
        "layers": [2, 10, 18, 26, 34],
        "vocab_size": 151936,
        "sample_from_anchor": False,
        "causal": False,
        "window": None,
        "mask_token_id": 151669,
        "own_embedding": False,
        "architecture": SIZES,
    }


def test_speculators_defaults_are_accepted(tmp_path: Path) -> None:
    """Layer ids are as ours; all layers have a window, and blocks are causal within it."""
    files = make_files(SPECULATORS, 3, tmp_path)
    layout = detect_layout(files)
    assert layout.title == "DFlash, speculators layout" and not list(layout.findings(files))
    checkpoint = layout.read(files, None)
    settings = {
        key: checkpoint.drafter[key]
        for key in ("block_size", "layers", "causal", "window", "architecture", "mask_token_id")
    }
    assert settings == {
        "block_size": 16,
        "layers": [2, 18, 33],
        "causal": True,
        "window": 2048,
        "architecture": SIZES,
        "mask_token_id": 151669,
    }
    assert checkpoint.target == "Qwen/Qwen3-8B"


def test_deepspecs_dflash_is_refused_by_name(tiny: Target, tmp_path: Path) -> None:
    """Its blocks are shifted: the same tensors draft one token off."""
    files = make_files(DEEPSPEC, 5, tmp_path)
    assert [finding.name for finding in detect_layout(files).findings(files)] == ["shifted-block"]
    start = foreign.write_zlab(
        tmp_path / "start", tiny, architectures=["Qwen3DSparkModel"], markov_rank=0
    )
    with pytest.raises(
        UserError,
        match=r"sample_from_anchor, as DeepSpec trains\) \(shifted-block\); train with drafter",
    ):
        read_drafter(start, TINY)


UNLIKE: dict[str, tuple[Change, str]] = {
    "DFlash2": (
        lambda config,
        tensors: tensors.update({"candidate_selector.hidden_projection.weight": torch.ones(8,
            128)}),
        "candidate_selector.*DFlash2"),
    "DFlash2's convolutions": (
        lambda config,
        tensors: tensors.update({"layers.0.mlp_conv.base_kernel": torch.ones(2, 2, 128)}),
        "mlp_conv.*DFlash2"),
    "DSpark": (
        lambda config, tensors: (
            config.update(markov_rank=4),
            tensors.update({"markov_head.markov_w1.weight": torch.ones(2048, 4)}),
        ), "markov_head.*DSpark"),
    "P-EAGLE": (lambda config, tensors: tensors.update(mask_hidden=torch.ones(1, 1, 256)),
        "mask_hidden.*P-EAGLE"),
    "a bias": (lambda config,
        tensors: tensors.update({"layers.0.self_attn.q_proj.bias": torch.ones(128)}), "bias"),
    "a bias that is said": (lambda config, tensors: config.update(attention_bias=True),
        "attention_bias=True"),
    "attention sinks": (lambda config,
        tensors: config["dflash_config"].update(attention_sink_bias=True), "sink_bias=True"),
    "mixed layers": (
        lambda config,
        tensors: config.update(layer_types=["sliding_attention", "full_attention"],
            sliding_window=16),
        "layer_types mixes full_attention and sliding_attention"),
    "gelu": (lambda config, tensors: config.update(hidden_act="gelu"), "hidden_act=gelu"),
    "interleaved rotation": (lambda config, tensors: config.update(is_neox_style=False),
        "is_neox_style=False"),
    "a wider target": (lambda config, tensors: config.update(target_hidden_size=512),
        "target_hidden_size=512"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLIKE)
def test_what_our_class_cannot_represent_is_named(case: str, tiny: Target, tmp_path: Path) -> None:
    """A drafter of another family or shape is refused by its tensor or key; its files alone have
    only a warning.
    """
    change, words = UNLIKE[case]
    start = change_files(foreign.write_zlab(tmp_path / "start", tiny), change)
    with pytest.raises(UserError, match=words):
        convert(start, tmp_path / "out", "spectrain", TINY)
    assert {name: finding.level for name, finding in find_faults(start).items()} == {
        "not-representable": "warning"
    }


def test_missing_keys_are_named_in_a_single_sentence(tiny: Target, tmp_path: Path) -> None:
    """All missing keys are named, wherever they belong."""
    start = foreign.write_zlab(tmp_path / "start", tiny)
    change_files(
        start,
        lambda config, tensors: [
            config.pop(key) for key in ("block_size", "head_dim", "rope_theta")
        ],
    )
    with pytest.raises(
        UserError, match="lacks 'block_size, head_dim, rope_theta' \\(missing-key\\)"
    ):
        read_drafter(start, TINY)


def test_settings_are_read_wherever_they_are(tiny: Target, tmp_path: Path) -> None:
    """`block_size` in dflash_config, `target_layer_ids` and mask at the top, rope as parameters:
    the same drafter.
    """
    start = foreign.write_zlab(tmp_path / "start", tiny)
    other = foreign.write_zlab(tmp_path / "other", tiny)

    def move_keys(config: dict[str, Any], tensors: Any) -> None:
        nested = config.pop("dflash_config")
        config.update(nested, dflash_config={"block_size": config.pop("block_size")})
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}

    assert (
        read_drafter(change_files(other, move_keys), TINY).drafter
        == read_drafter(start, TINY).drafter
    )


# Drafts


def decode_with(drafter: DrafterCheckpoint, tiny: Target) -> Generation:
    return decode(
        tiny, [[5, 9, 200, 31, 7]], Greedy(), 16, load_drafter(drafter, tiny), Chain(depth=3)
    )[0]


@pytest.mark.sweep(2, free=("case",))
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.startswith(("dflash", "dspark", "peagle"))]
)
def test_every_layout_drafts_the_same(case: str, tiny: Target, tmp_path: Path) -> None:
    """Every layout gives the same output in the same rounds, with its windows, causality and
    layers.
    """
    make, forms = CASES[case]
    start = make(tmp_path / "start", tiny)
    ours = decode_with(read_drafter(start, TINY), tiny)
    for form in forms:
        convert(start, tmp_path / form, form, TINY)
        converted = decode_with(read_drafter(tmp_path / form, TINY), tiny)
        assert (converted.output, converted.round_lengths) == (ours.output, ours.round_lengths)


def test_training_goes_on_from_a_foreign_checkpoint(tiny: Target, tmp_path: Path) -> None:
    """`drafter.init` takes what its weights were trained for: layers, window, causality, mask,
    vocabulary.
    """
    start = foreign.write_speculators_dflash(tmp_path / "start", tiny)
    drafter = {
        **GroupSpec("drafter", "dflash").node,
        "init": str(start),
        "block_size": 4,
    }
    spec = apply_init_shape(RunSpec.from_nodes({"drafter": drafter, "target": TINY.settings}))
    module = spec.drafter.build(target=tiny)
    load_weights(module, start, tiny)
    assert (module.block_size, module.fused_layers, module.window, module.causal) == (
        4,
        (2, 4, 5),
        16,
        True,
    )
    tensors = DrafterFiles.from_directory(start).tensors
    assert torch.equal(module.d2t, tensors["d2t"]) and torch.equal(
        module.fc.weight, tensors["fc.weight"]
    )
    assert torch.equal(module.blocks[1].mlp.up_proj.weight, tensors["layers.1.mlp.up_proj.weight"])


def test_names_are_those_that_engines_read(tiny: Target, tmp_path: Path) -> None:
    """Layers are `layers.N.`, and there is no map and no head if the full vocabulary is drafted."""
    start = CASES["dflash"][0](tmp_path / "start", tiny)
    for form in ("vllm", "sglang"):
        convert(start, tmp_path / form, form, TINY)
        files = DrafterFiles.from_directory(tmp_path / form)
        names = {re.sub(r"layers\.\d\.", "layers.N.", name) for name in files.tensors}
        assert len(names) == 14 and not any(
            name.startswith(("blocks", "model", "lm_head", "d2t", "t2d")) for name in names
        )
    flat, other = (
        json.loads((tmp_path / form / "config.json").read_text()) for form in ("sglang", "vllm")
    )
    assert (
        flat["dflash_config"] == {"mask_token_id": 0, "target_layer_ids": [1, 5]}
        and flat["block_size"] == 5
    )
    assert (
        other["aux_hidden_state_layer_ids"] == [2, 6] and other["sliding_window_non_causal"] is True
    )
    assert other["sample_from_anchor"] is False and "sample_from_anchor" not in flat


# Traps


def set_dflash_keys(**changes: Any) -> Change:
    return lambda config, tensors: config["dflash_config"].update(changes)


def remove_windows(**changes: Any) -> Change:
    """Return a change that removes windows."""

    def change_config(config: dict[str, Any], tensors: Any) -> None:
        config["transformer_layer_config"].update(
            layer_types=["full_attention"] * 2, sliding_window=None
        )
        config.update(sliding_window_non_causal=True)
        config.update(changes)

    return change_config


def add_head(target: Target) -> Change:
    return lambda config, tensors: tensors.update(
        {"lm_head.weight": target.head.output.weight.detach() * 1.01}
    )


FLAT: dict[str, tuple[str, Any]] = {
    "ids of what enters a layer": ("layer-ids-numbering", set_dflash_keys(target_layer_ids=[2, 6])),
    "two keys that say one number": (
        "layer-ids-numbering",
        lambda config, tensors: config.update(aux_hidden_state_layer_ids=[1, 5]),
    ),
    "layers out of order": ("layer-ids-order", set_dflash_keys(target_layer_ids=[5, 1])),
    "layers beyond the target": ("layer-ids-range", set_dflash_keys(target_layer_ids=[1, 8])),
    "a shifted block": (
        "shifted-block",
        lambda config, tensors: config.update(sample_from_anchor=True),
    ),
    "a head": ("ignored-head", add_head),
    "a word for a mask": ("mask-token-heard", set_dflash_keys(mask_token_id=300)),
    "the end of a turn for a mask": ("mask-token-heard", set_dflash_keys(mask_token_id=2)),
    "no row for a mask": ("mask-token-range", set_dflash_keys(mask_token_id=2048)),
    "another architecture": (
        "architecture",
        lambda config, tensors: config.update(architectures=["Qwen3ForCausalLM"]),
    ),
    "no norm of queries": (
        "missing-tensor",
        lambda config, tensors: tensors.pop("layers.1.self_attn.q_norm.weight"),
    ),
    "another rope": ("rope", lambda config, tensors: config.update(rope_theta=1e6)),
    "another target": ("vocab-size", lambda config, tensors: config.update(vocab_size=1024)),
}


@pytest.mark.parametrize("case", FLAT)
def test_traps_of_the_flat_layout(case: str, tiny: Target, tmp_path: Path) -> None:
    """Each trap is the only finding, by its name, and the unchanged file has none."""
    name, change = FLAT[case]
    start = foreign.write_zlab(tmp_path / "start", tiny)
    assert not find_faults(start) and not find_faults(start, None)
    assert list(
        find_faults(change_files(start, change(tiny) if change is add_head else change))
    ) == [name]


def set_keys(**changes: Any) -> Change:
    return lambda config, tensors: config.update(changes)


OTHER: dict[str, tuple[str, Change, Change]] = {
    "full layers that are not said to see both ways": (
        "block-causality", remove_windows(), remove_windows(sliding_window_non_causal=False)),
    "windows that are not said to be causal": (
        "block-causality-implicit", set_keys(), lambda config,
        tensors: config.pop("sliding_window_non_causal")),
    "a shifted block": ("shifted-block", set_keys(), set_keys(sample_from_anchor=True)),
    "z-lab's ids": (
        "layer-ids-numbering",
        set_keys(aux_hidden_state_layer_ids=[2, 4, 6]),
        set_keys(aux_hidden_state_layer_ids=[1, 3, 5])),
    "two keys that say one number": (
        "layer-ids-numbering", set_keys(target_layer_ids=[1, 3, 4]),
        set_keys(target_layer_ids=[2, 4, 5])),
    "a word for a mask": ("mask-token-heard", set_keys(), set_keys(mask_token_id=300)),
    "no verifier": ("speculators-config", set_keys(), lambda config,
        tensors: config["speculators_config"].pop("verifier")),
    "no map": ("missing-d2t", set_keys(), lambda config, tensors: tensors.pop("d2t")),
    "absolute ids": ("d2t-absolute", set_keys(), lambda config,
        tensors: tensors["d2t"].add_(torch.arange(256))),
    "an id twice": ("d2t-repeated", set_keys(), lambda config,
        tensors: tensors["d2t"][1:2].copy_(tensors["d2t"][:1] - 1)),
    "the wrong count": ("head-rows", set_keys(), set_keys(draft_vocab_size=512)),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER)
def test_traps_of_the_speculators_layout(case: str, tiny: Target, tmp_path: Path) -> None:
    """Each trap is the only finding, by its name, and the right file has none."""
    name, right, wrong = OTHER[case]
    start = change_files(foreign.write_speculators_dflash(tmp_path / "start", tiny), right)
    assert not find_faults(start) and not find_faults(start, None)
    assert list(find_faults(change_files(start, wrong))) == [name]


@pytest.mark.slow
def test_measured_faults(tiny: Target, tmp_path: Path) -> None:
    """Faults that no shape shows are found by name in a trained drafter, and the unchanged
    drafter has no finding.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "block_size": 5,
        "num_layers": 1,
        "vocab_size": 1024,
        "loss": "forward_kl",
        "num_anchors": 64,
    }
    start = train_drafter(
        tmp_path,
        tiny,
        DFlash(tiny, DFlashConfig(layers=[2, 4, 6], **options)),
        "dflash",
        300,
        layers=[2, 4, 6],
        **options,
    )
    assert not lint(start, TINY)
    rope = {"rope_type": "default", "rope_theta": 50.0}
    faults: dict[str, Change] = {
        "transposed-tensor": transpose_tensors("o_proj.weight"),
        "rope": lambda config, tensors: config["transformer_layer_config"].update(
            rope_parameters=rope
        ),
        "head-order": lambda config, tensors: tensors.update(
            {"lm_head.weight": tensors["lm_head.weight"].roll(7, dims=0)}
        ),
    }
    for name, change in faults.items():
        convert(start, tmp_path / name, "vllm", TINY)
        assert [finding.name for finding in lint(change_files(tmp_path / name, change), TINY)] == [
            name
        ]


def test_what_converting_mends(tiny: Target, tmp_path: Path) -> None:
    """Full layers that were trained both ways but marked causal are written as trained; a head that
    SGLang drops is written where vLLM reads it."""
    start = change_files(
        foreign.write_speculators_dflash(tmp_path / "start", tiny),
        remove_windows(sliding_window_non_causal=False),
    )
    convert(start, tmp_path / "out", "vllm", TINY)
    assert (
        not find_faults(tmp_path / "out") and not read_drafter(tmp_path / "out").drafter["causal"]
    )
    cut = foreign.write_zlab(tmp_path / "cut", tiny, draft_vocab_size=256)
    change_files(
        cut,
        lambda config, tensors: tensors.update(
            {
                "lm_head.weight": tiny.head.output.weight[:256].detach().clone(),
                "d2t": torch.arange(256),
            }
        ),
    )
    assert set(find_faults(cut)) == {"ignored-head"}
    convert(cut, tmp_path / "whole", "vllm", TINY)
    assert (
        not find_faults(tmp_path / "whole")
        and read_drafter(tmp_path / "whole").drafter["vocab_size"] == 256
    )


def test_a_head_that_is_the_targets_is_left_out(tiny: Target, tmp_path: Path) -> None:
    """A copy of the target's output layer is dropped; any other head over the full vocabulary is
    refused.
    """
    start = foreign.write_zlab(tmp_path / "start", tiny)
    plain = read_drafter(start, TINY)
    change_files(
        start,
        lambda config, tensors: tensors.update(
            {"lm_head.weight": TINY.load_head(), "embed_tokens.weight": TINY.load_embedding()}
        ),
    )
    assert read_drafter(start, TINY).tensors.keys() == plain.tensors.keys()
    with pytest.raises(UserError, match="lm_head.weight.*give --target"):
        read_drafter(start)
    with pytest.raises(UserError, match="lm_head.weight has all 2048 rows"):
        read_drafter(change_files(start, add_head(tiny)), TINY)


def test_which_tokens_texts_hold(tiny: Target) -> None:
    """Words, ends and tokens of the template occur in texts; ids beyond the tokenizer and our
    special token do not.
    """
    actual = [
        occurs_in_text(tiny.tokenizer, token) for token in (0, 1, 2, 3, 2047, len(tiny.tokenizer))
    ]
    assert actual == [False, True, True, True, True, False]
