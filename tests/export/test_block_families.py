"""DSpark, DFlash2 and flat P-EAGLE between projects: published configurations, resumed training,
and each trap's name.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.export.converter import convert, read_drafter
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.layouts import detect_layout
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from spectrain.runs.drafters import load_weights
from spectrain.runs.init_drafter import apply_init_shape

from . import foreign
from .test_dflash import DEEPSPEC, QWEN3_8B, SIZES, SPECULATORS, ZLAB
from .test_linter import Change, change_files, find_faults

TINY = TargetFiles("tiny")

# Published configurations


def make_empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_deepspecs_dspark_is_accepted(tmp_path: Path) -> None:
    """Qwen3-8B's file has our constructor's defaults, layer ids one lower than ours, and copies
    of the target's weights.
    """
    config = {
        **DEEPSPEC,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
    }
    config["confidence_head_with_markov"] = True
    tensors = foreign.dflash_tensors(QWEN3_8B, 5, empty=True)
    tensors |= {
        "markov_head.markov_w1.weight": make_empty(151936, 256),
        "markov_head.markov_w2.weight": make_empty(151936, 256),
    }
    tensors |= {
        "confidence_head.proj.weight": make_empty(1, 4352),
        "confidence_head.proj.bias": make_empty(1),
    }
    files = DrafterFiles(tmp_path, config, tensors)
    layout = detect_layout(files)
    assert layout.title == "DSpark, flat layout" and not list(layout.findings(files))
    expected = layout.expected_tensors(files).required
    assert expected.keys() == tensors.keys()
    assert all(
        size in (None, actual)
        for name, shape in expected.items()
        for size, actual in zip(shape, tensors[name].shape)
    )
    checkpoint = layout.read(files, None)
    assert checkpoint.family == "dspark"
    assert checkpoint.drafter == {
        "block_size": 7,
        "num_layers": 5,
        "layers": [2, 10, 18, 26, 34],
        "vocab_size": 151936,
        "sample_from_anchor": True,
        "causal": False,
        "window": None,
        "mask_token_id": 151669,
        "own_embedding": False,
        "architecture": SIZES,
        "markov_head": "vanilla",
        "rank": 256,
        "confidence": True,
    }


def test_z_labs_dflash2_is_accepted(tmp_path: Path) -> None:
    """The file has the paper's sizes in `dflash_config`, which are our constructor's defaults."""
    parts = {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    }
    config = {
        **ZLAB,
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {**ZLAB["dflash_config"], **parts},
    }
    tensors = foreign.dflash_tensors(QWEN3_8B, 5, empty=True)
    tensors |= {
        f"candidate_selector.{name}_codebook": make_empty(151936, 256)
        for name in ("predecessor", "successor")
    }
    tensors["candidate_selector.hidden_projection.weight"] = make_empty(256, 4096)
    for conv in (
        f"layers.{number}.{part}_conv" for number in range(5) for part in ("attention", "mlp")
    ):
        tensors |= {
            f"{conv}.base_kernel": make_empty(2, 2, 4096),
            f"{conv}.kernel_projection.weight": make_empty(1024, 4096),
        }
    files = DrafterFiles(tmp_path, config, tensors)
    layout = detect_layout(files)
    assert layout.title == "DFlash2, flat layout" and not list(layout.findings(files))
    assert layout.expected_tensors(files).required == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    checkpoint = layout.read(files, None)
    assert checkpoint.family == "dflash2"
    assert {key: checkpoint.drafter[key] for key in parts} == parts


@pytest.mark.parametrize(
    "kind, class_name", [("dspark", "dspark.DSpark"), ("dflash2", "dflash2.DFlash2")]
)
def test_a_configuration_without_the_parts_is_refused(
    kind: str, class_name: str, tmp_path: Path
) -> None:
    """Every key that is missing is named."""
    config = {**SPECULATORS, "speculators_model_type": kind}
    with pytest.raises(
        KeyError, match="markov_head_type, markov_rank" if kind == "dspark" else "conv_kernel_size"
    ):
        detect_layout(DrafterFiles(tmp_path, config, {})).expected_tensors(
            DrafterFiles(tmp_path, config, {})
        )


# Resumed training


@pytest.mark.parametrize(
    "family, make",
    [
        ("dspark", foreign.write_speculators_dspark),
        ("dflash2", foreign.write_zlab_dflash2),
        ("peagle", foreign.write_peagle),
    ],
)
def test_training_goes_on_from_a_foreign_checkpoint(
    family: str, make: Any, tiny: Target, tmp_path: Path
) -> None:
    """`drafter.init` takes everything that its weights fix, whatever the constructor's defaults
    are.
    """
    start = make(tmp_path / "start", tiny)
    drafter = {**GroupSpec("drafter", family).node, "init": str(start)}
    spec = apply_init_shape(RunSpec.from_nodes({"drafter": drafter, "target": TINY.settings}))
    module = spec.drafter.build(target=tiny)
    load_weights(module, start, tiny)
    read = read_drafter(start, TINY)
    state = module.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in read.tensors.items())
    assert module.mask_token_id == 0


# Traps


def set_keys(**changes: Any) -> Change:
    return lambda config, tensors: config.update(changes)


def drop_keys(*keys: str) -> Change:
    return lambda config, tensors: [config.pop(key) for key in keys]


def drop_tensors(*names: str) -> Change:
    return lambda config, tensors: [tensors.pop(name) for name in names]


def set_layer_keys(**changes: Any) -> Change:
    return lambda config, tensors: config["transformer_layer_config"].update(changes)


def set_num_tokens(count: int) -> Change:
    return lambda config, tensors: config["speculators_config"]["proposal_methods"][0].update(
        speculative_tokens=count
    )


def set_dflash_keys(**changes: Any) -> Change:
    return lambda config, tensors: config["dflash_config"].update(changes)


Make = Any
TRAPS: dict[str, tuple[Make, str, Change]] = {
    "nothing about the anchor": (foreign.write_speculators_dspark, "anchor-implicit",
        drop_keys("sample_from_anchor")),
    "a window both ways": (foreign.write_speculators_dspark, "block-causality",
        set_keys(sliding_window_non_causal=True)),
    "nothing about the confidence head's input": (
        foreign.write_speculators_dspark, "confidence-implicit",
        drop_keys("confidence_head_with_markov")),
    "a Markov head that vLLM lacks": (foreign.write_speculators_dspark, "missing-tensor",
        set_keys(markov_head_type="gated")),
    "longer than its blocks": (foreign.write_speculators_dspark, "too-many-tokens",
        set_num_tokens(9)),
    "no Markov head": (foreign.write_speculators_dspark, "missing-tensor",
        drop_tensors("markov_head.markov_w2.weight")),
    "another rank": (foreign.write_deepspec_dspark, "wrong-shape", set_keys(markov_rank=16)),
    "a confidence head without the token": (
        foreign.write_deepspec_dspark, "not-representable",
        set_keys(confidence_head_with_markov=False)),
    "ids of what enters a layer": (foreign.write_deepspec_dspark, "layer-ids-numbering",
        set_keys(target_layer_ids=[2, 6])),
    "a word for a mask": (foreign.write_deepspec_dspark, "mask-token-heard",
        set_keys(mask_token_id=300)),
    "a shifted DFlash2": (foreign.write_speculators_dflash2, "shifted-block",
        set_keys(sample_from_anchor=True)),
    "full layers that are not said to see both ways": (
        foreign.write_speculators_dflash2, "block-causality", lambda config, tensors: (
            config.update(sliding_window_non_causal=False),
            set_layer_keys(layer_types=["full_attention"] * 2)(config, tensors))),
    "a drafter of more than its blocks": (foreign.write_speculators_dflash2, "too-many-tokens",
        set_num_tokens(8)),
    "no convolution": (foreign.write_zlab_dflash2, "missing-tensor",
        drop_tensors("layers.1.mlp_conv.base_kernel")),
    "other groups": (foreign.write_zlab_dflash2, "wrong-shape",
        set_dflash_keys(conv_group_size=32)),
    "no mask": (foreign.write_peagle, "mask-token", drop_keys("ptd_token_id")),
    "a mask beyond the vocabulary": (foreign.write_peagle, "mask-token",
        set_keys(ptd_token_id=2048)),
    "SGLang's ids": (foreign.write_peagle, "layer-ids-numbering",
        set_keys(eagle_aux_hidden_state_layer_ids=[1, 3, 4])),
    "no ids": (foreign.write_peagle, "layer-ids-missing",
        drop_keys("eagle_aux_hidden_state_layer_ids")),
    "no state for masks": (foreign.write_peagle, "missing-tensor", drop_tensors("mask_hidden")),
    "half of a second layer": (foreign.write_peagle, "missing-tensor",
        drop_tensors("layers.1.mlp.up_proj.weight")),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAPS)
def test_traps(case: str, tiny: Target, tmp_path: Path) -> None:
    """Each trap is found by its name, and the unchanged file has no fault."""
    make, name, change = TRAPS[case]
    start = make(tmp_path / "start", tiny)
    assert not find_faults(start)
    names = set(find_faults(change_files(start, change)))
    assert names == {name} or (case.startswith("a Markov head") and names == {name, "markov-head"})


def test_norms_that_vllm_drops_have_a_name(tiny: Target, tmp_path: Path) -> None:
    """vLLM reads `fc_norm` from the speculators layout for EAGLE-3 alone; the flat layout gives
    it to both.
    """
    plain = foreign.write_peagle(tmp_path / "start", tiny)
    norms = {f"fc_norm.{index}.weight": torch.ones(tiny.width) for index in range(3)}
    start = change_files(
        plain, lambda config, tensors: (config.update(fc_norm=True), tensors.update(norms))
    )
    assert not find_faults(start)
    convert(start, tmp_path / "vllm", "vllm", TINY)
    assert {name: finding.level for name, finding in find_faults(tmp_path / "vllm").items()} == {
        "fc-norm-dropped": "warning"
    }
    convert(tmp_path / "vllm", tmp_path / "flat", "flat", TINY)
    assert not find_faults(tmp_path / "flat")


def test_names_are_those_that_engines_read(tiny: Target, tmp_path: Path) -> None:
    """Heads, selector and convolutions have their authors' names, and each layout has the keys
    that its readers need.
    """
    for make, form, names in (
        (
            foreign.write_deepspec_dspark,
            "vllm",
            {"markov_head.markov_w1.weight", "confidence_head.proj.bias"},
        ),
        (
            foreign.write_zlab_dflash2,
            "vllm",
            {"layers.0.attention_conv.base_kernel", "candidate_selector.predecessor_codebook"},
        ),
        (
            foreign.write_peagle,
            "flat",
            {"midlayer.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight", "mask_hidden", "d2t"},
        ),
    ):
        out = tmp_path / make.__name__
        convert(make(tmp_path / f"{make.__name__}-start", tiny), out, form, TINY)
        written = DrafterFiles.from_directory(out)
        assert names <= written.tensors.keys() and not any(
            name.startswith(("blocks", "markov.")) for name in written.tensors
        )
    config = DrafterFiles.from_directory(tmp_path / "write_peagle").config
    assert config["pard_token"] == 0 and config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert (
        config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 2
    )
    config = DrafterFiles.from_directory(tmp_path / "write_deepspec_dspark").config
    assert config["sample_from_anchor"] is True and config["confidence_head_with_markov"] is True
    assert (
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        == config["block_size"]
        == 5
    )
    config = DrafterFiles.from_directory(tmp_path / "write_zlab_dflash2").config
    assert (
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        == config["block_size"] - 1
        == 5
    )


def test_heads_of_another_kind_are_not_guessed(tiny: Target, tmp_path: Path) -> None:
    """DSpark's heads in a DFlash file, and DFlash2's in a DSpark file, are refused by their
    names.
    """
    start = change_files(
        foreign.write_speculators_dspark(tmp_path / "start", tiny), set_num_tokens(7)
    )
    with pytest.raises(UserError, match="(markov|confidence)_head.*DSpark"):
        read_drafter(
            change_files(
                start, set_keys(speculators_model_type="dflash", sample_from_anchor=False)
            ),
            TINY,
        )
    other = foreign.write_deepspec_dspark(tmp_path / "other", tiny)
    more = {"layers.0.mlp_conv.base_kernel": torch.ones(2, 2, tiny.width)}
    with pytest.raises(UserError, match="mlp_conv.*DFlash2"):
        read_drafter(change_files(other, lambda config, tensors: tensors.update(more)), TINY)
