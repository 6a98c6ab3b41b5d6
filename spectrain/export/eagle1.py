"""The layouts of EAGLE's first drafter by its authors, vLLM and SGLang: fc, and one Llama layer
without its first norm.

All have `layers.0.` names, `fc.weight` and a flat config.json. They differ in the class that
`architectures` names, in fc's bias, and in whether they hold the target's embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from spectrain.errors import UserError

from .container import Finding
from .drafter_files import DrafterFiles
from .eagle3 import LAYER_PARTS
from .fused import (
    FIXED_VALUES,
    FOREIGN_PARTS,
    Export,
    FusedFamily,
    FusedFiles,
    FusedLayout,
    TensorNames,
    launch_with,
)
from .fused_config import (
    EMBEDDING,
    HEAD,
    SIZE_KEYS,
    FusedConfig,
    flat_rope,
    is_close_to,
    layer_rope,
    require_keys,
)
from .fused_findings import common_findings, common_target_findings, find_common_obstacle
from .layout import DrafterCheckpoint, ExpectedTensors, require_target
from .targets import TargetFiles

FC_BIAS = "fc.bias"
LAYER_PREFIX = "layers.0."


@dataclass(frozen=True, kw_only=True)
class Eagle1Family(FusedFamily):
    """EAGLE, whose embedding and output layer are the target's."""

    needs_bias: Callable[[DrafterFiles], bool]  # whether readers of the files expect a bias of fc
    choice = "eagle1"
    own_parts: tuple[str, ...] = (FC_BIAS, "post_attention_layernorm")
    foreign_parts = {  # noqa: RUF012  (the contract has a Mapping)
        "norm": "a norm before or after the layer, which our layer lacks",
        **FOREIGN_PARTS,
    }
    fixed_values = {**FIXED_VALUES, "num_hidden_layers": 1}  # noqa: RUF012

    def read_settings(self, source: FusedFiles, own_embedding: bool) -> dict[str, Any]:
        bias = source.tensors.get(FC_BIAS)
        # SGLang's layout has one, even an untrained one.
        return {
            "bias": bias is not None and bool(bias.any()),
            "architecture": source.config.architecture,
        }

    def adjust_expected(self, source: FusedFiles, expected: ExpectedTensors) -> ExpectedTensors:
        prefix = "model." if "model.fc.weight" in source.files.tensors else ""
        required = {
            name: shape for name, shape in expected.required.items() if name != prefix + FC_BIAS
        }
        optional = {
            name: shape
            for name, shape in expected.optional.items()
            if name not in (HEAD, "d2t", "t2d")
        }
        group = required if self.needs_bias(source.files) else optional
        group[prefix + FC_BIAS] = (source.config.width,)
        return ExpectedTensors(required, optional, expected.ignored)

    def read_head(
        self, source: FusedFiles, tensors: dict[str, Tensor], target: TargetFiles | None
    ) -> None:
        if EMBEDDING in tensors:
            require_target(target, f"{EMBEDDING} should be the target's own")
            self.refuse(source.files, EMBEDDING)
        if FC_BIAS in tensors and not tensors[FC_BIAS].any():
            del tensors[FC_BIAS]

    def refuse(self, files: DrafterFiles, name: str) -> None:
        """Raise UserError for a tensor that is not the target's."""
        raise UserError(
            f"{files.directory}: {name} is not the target's, and drafter={self.choice} uses the "
            "target's"
        )

    def complete(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> DrafterCheckpoint:
        maps = ("d2t", "t2d")
        kept = {name: tensor for name, tensor in drafter.tensors.items() if name not in maps}
        return replace(drafter, tensors=kept)


class NestedEagle1Family(Eagle1Family):
    """EAGLE in files that also hold the target's output layer."""

    def adjust_expected(self, source: FusedFiles, expected: ExpectedTensors) -> ExpectedTensors:
        expected = super().adjust_expected(source, expected)
        config = source.config
        to_native = source.layout.names.to_native
        names = [name for name in source.files.tensors if to_native(name) == HEAD]
        expected.optional.update(dict.fromkeys(names, (config.vocab_size, config.width)))
        return expected

    def read_head(
        self, source: FusedFiles, tensors: dict[str, Tensor], target: TargetFiles | None
    ) -> None:
        if HEAD in tensors:
            target = require_target(target, f"{HEAD} should be the target's own")
            if not is_close_to(tensors.pop(HEAD), target.load_head()):
                self.refuse(source.files, HEAD)
        super().read_head(source, tensors, target)


def is_eagle1(source: FusedFiles) -> bool:
    """Tell whether config.json names one of the layout's classes, and fc reads two streams."""
    tensors = source.files.tensors
    shape = tensors["fc.weight"].shape if "fc.weight" in tensors else ()
    is_other_layout = not {"drafter", "speculators_model_type"}.isdisjoint(source.files.config)
    is_eagle3 = any("hidden_norm" in name or name.startswith("midlayer.") for name in tensors)
    return (
        source.has_architecture
        and not (is_other_layout or is_eagle3)
        and len(shape) == 2
        and shape[1] == 2 * shape[0]
    )


def parse_eagle1(source: FusedFiles) -> FusedConfig:
    """Translate the flat config.json."""
    require_keys(source.files.config, SIZE_KEYS)
    return FusedConfig(source.files.config, None, {}, None)


def eagle1_config(export: Export) -> dict[str, Any]:
    """Return the flat config.json."""
    vocab = require_target(export.target, "this layout holds the size of the target's vocabulary")
    architecture = export.settings["architecture"]
    layer = {key: value for key, value in architecture.items() if key != "rope_parameters"}
    return {
        "architectures": [export.layout.architectures[0]],
        "model_type": "llama",
        "hidden_size": export.tensors["fc.weight"].shape[0],
        **layer,
        **flat_rope(layer_rope(architecture)),
        "num_hidden_layers": 1,
        "vocab_size": vocab.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "bias": FC_BIAS in export.tensors,
        "tie_word_embeddings": False,
        "torch_dtype": export.drafter.dtype,
        "use_cache": True,
    }


def with_embedding(export: Export) -> dict[str, Tensor]:
    """Return the tensors with the target's embedding."""
    embedding = export.known_target.load_embedding().to(export.tensors["fc.weight"].dtype)
    return {**export.tensors, EMBEDDING: embedding}


def with_bias(export: Export) -> dict[str, Tensor]:
    """Return the tensors with a bias of fc, which SGLang leaves uninitialized where the file lacks
    it.
    """
    fc = export.tensors["fc.weight"]
    return {FC_BIAS: fc.new_zeros(len(fc)), **export.tensors}


def bias_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a bias that vLLM ignores."""
    bias = source.tensors.get(FC_BIAS)
    if bias is not None and bias.any():
        yield Finding(
            "fc-bias",
            "error",
            f"{FC_BIAS} is not zero",
            "vLLM's fc has none and ignores it",
            "train it with drafter.bias=false, or serve it with SGLang",
        )


def refuse_bias(export: Export) -> None:
    """Raise UserError where fc has a bias."""
    if FC_BIAS in export.tensors:
        raise UserError(
            f"{FC_BIAS}: vLLM's EAGLE has no bias; use --to sglang, or train with "
            "drafter.bias=false"
        )


ORIGINAL_EAGLE1 = FusedLayout(
    title="EAGLE, original layout",
    family=Eagle1Family(needs_bias=lambda files: bool(files.config.get("bias", True))),
    names=TensorNames(
        lambda name: name.removeprefix("model.").removeprefix(LAYER_PREFIX),
        lambda name: LAYER_PREFIX + name if name.startswith(LAYER_PARTS) else name,
    ),
    matches=is_eagle1,
    parse=parse_eagle1,
    make_config=eagle1_config,
    select_tensors=with_embedding,
    architectures=("LlamaForCausalLM",),
    replaced_tensors=(EMBEDDING,),
    obstacles=(find_common_obstacle,),
    file_checks=(common_findings,),
    target_checks=(common_target_findings,),
)
SGLANG_EAGLE1 = replace(
    ORIGINAL_EAGLE1,
    title="EAGLE, SGLang layout",
    family=Eagle1Family(needs_bias=lambda files: True),
    make_config=lambda export: eagle1_config(export) | {"bias": True},
    select_tensors=with_bias,
    architectures=("LlamaForCausalLMEagle",),
    launches=launch_with({"sglang": "EAGLE"}),
)
VLLM_EAGLE1 = replace(
    ORIGINAL_EAGLE1,
    title="EAGLE, vLLM layout",
    family=Eagle1Family(needs_bias=lambda files: False),
    select_tensors=lambda export: export.tensors,
    architectures=("EagleLlamaForCausalLM",),
    file_checks=(common_findings, bias_findings),
    write_checks=(refuse_bias,),
    launches=launch_with({"vllm": "eagle"}),
)


def unnest_config(source: FusedFiles) -> FusedFiles:
    """Return the files with the configuration below `model` moved to the top level."""
    files = source.files
    return replace(source, files=replace(files, config={**files.config, **files.config["model"]}))


def find_nested_obstacle(source: FusedFiles) -> str | None:
    if "token_map" in source.files.tensors:
        return "token_map is a map of a part of the vocabulary, which drafter=eagle1 lacks"
    return find_common_obstacle(unnest_config(source))


def nested_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield that engines of today do not look for the configuration there."""
    yield Finding(
        "nested-config",
        "warning",
        "config.json holds the layer's configuration below model, as vLLM's first EAGLE did",
        "other engines look for it at the top level",
        "spectrain convert DIR OUT --to vllm --target TARGET",
    )


# The layout of vLLM's first EAGLE conversion: a Llama configuration below `model`, and the target's
# output layer. It is read only; `fc` has a bias where config.json has eagle_fc_bias or bias.
NESTED_EAGLE1 = replace(
    VLLM_EAGLE1,
    title="EAGLE, vLLM's nested layout",
    family=NestedEagle1Family(
        needs_bias=lambda files: bool(files.config.get("eagle_fc_bias") or files.config.get("bias"))
    ),
    names=TensorNames(
        lambda name: name.removeprefix("model.").removeprefix("model.").removeprefix(LAYER_PREFIX),
        ORIGINAL_EAGLE1.names.to_file,
    ),
    matches=lambda source: (
        source.files.config.get("model_type") == "eagle"
        and isinstance(source.files.config.get("model"), dict)
    ),
    parse=lambda source: parse_eagle1(unnest_config(source)),
    obstacles=(find_nested_obstacle,),
    # Unlike today's, the class of this layout has a bias.
    file_checks=(common_findings, nested_findings),
)
