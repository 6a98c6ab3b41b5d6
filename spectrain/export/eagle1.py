"""The layouts of EAGLE's first drafter by its authors, vLLM and SGLang: fc, and one Llama layer
without its first norm.

All have `layers.0.` names, `fc.weight` and a flat config.json. They differ in the class that
`architectures` names, in fc's bias, and in whether they hold the target's embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .eagle3 import LAYER_PARTS
from .fused import (
    EMBEDDING,
    HEAD,
    SIZE_KEYS,
    FusedConfig,
    FusedLayout,
    flat_rope,
    is_close_to,
    layer_rope,
    require_keys,
)
from .layout import (
    CHAIN_TOKENS,
    DrafterCheckpoint,
    DrafterFiles,
    ExpectedTensors,
    Finding,
    require_target,
    write_json,
    write_tensors,
)
from .targets import TargetFiles

FC_BIAS = "fc.bias"
LAYER_PREFIX = "layers.0."


class OriginalEagle1(FusedLayout):
    """The authors' layout: it holds the target's embedding, and a bias of fc unless config.json
    has bias=false.
    """

    title = "EAGLE, original layout"
    constructor = "spectrain.drafters.eagle1.Eagle1"
    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM",)
    holds_embedding: ClassVar[bool] = True
    replaced_tensors: ClassVar[tuple[str, ...]] = (EMBEDDING,)
    own_parts: tuple[str, ...] = (FC_BIAS, "post_attention_layernorm")
    foreign_parts: ClassVar[dict[str, str]] = {
        "norm": "a norm before or after the layer, which our layer lacks",
        **FusedLayout.foreign_parts,
    }
    fixed_values: ClassVar[dict[str, Any]] = {**FusedLayout.fixed_values, "num_hidden_layers": 1}

    def matches_files(self, files: DrafterFiles) -> bool:
        shape = files.tensors["fc.weight"].shape if "fc.weight" in files.tensors else ()
        is_other_layout = "drafter" in files.config or "speculators_model_type" in files.config
        is_eagle3 = any(
            "hidden_norm" in name or name.startswith("midlayer.") for name in files.tensors
        )
        return (
            self.has_architecture(files)
            and not (is_other_layout or is_eagle3)
            and len(shape) == 2
            and shape[1] == 2 * shape[0]
        )

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        require_keys(files.config, SIZE_KEYS)
        return FusedConfig(files.config, None, {}, None)

    def native_name(self, name: str) -> str:
        return name.removeprefix("model.").removeprefix(LAYER_PREFIX)

    def layout_name(self, name: str) -> str:
        return LAYER_PREFIX + name if name.startswith(LAYER_PARTS) else name

    def class_settings(
        self, config: FusedConfig, files: DrafterFiles, own_embedding: bool
    ) -> dict[str, Any]:
        bias = self.native_tensors(files).get(FC_BIAS)
        # SGLang's layout has one, even an untrained one.
        return {"bias": bias is not None and bool(bias.any()), "architecture": config.architecture}

    def needs_bias(self, files: DrafterFiles) -> bool:
        """Tell whether its readers expect a bias of fc."""
        return bool(files.config.get("bias", True))

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        expected = super().expected_tensors(files)
        prefix = "model." if "model.fc.weight" in files.tensors else ""
        required = {
            name: shape for name, shape in expected.required.items() if name != prefix + FC_BIAS
        }
        optional = {
            name: shape
            for name, shape in expected.optional.items()
            if name not in (HEAD, "d2t", "t2d")
        }
        group = required if self.needs_bias(files) else optional
        group[prefix + FC_BIAS] = (self.parse_config(files).width,)
        return ExpectedTensors(required, optional, expected.ignored)

    def read_head(
        self,
        files: DrafterFiles,
        config: FusedConfig,
        tensors: dict[str, Tensor],
        target: TargetFiles | None,
    ) -> None:
        if EMBEDDING in tensors:
            require_target(target, f"{EMBEDDING} should be the target's own")
            raise UserError(
                f"{files.directory}: {EMBEDDING} is not the target's, and {self.choice} uses the "
                "target's"
            )
        if FC_BIAS in tensors and not tensors[FC_BIAS].any():
            del tensors[FC_BIAS]

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        drafter = super().read(files, target)
        return replace(
            drafter,
            tensors={
                name: drafter.tensors[name]
                for name in drafter.tensors
                if name not in ("d2t", "t2d")
            },
        )

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        tensors = self.select_tensors(drafter)
        target = require_target(target, "this layout holds the size of the target's vocabulary")
        if self.holds_embedding:
            tensors[EMBEDDING] = target.load_embedding().to(tensors["fc.weight"].dtype)
        write_tensors(directory / "model.safetensors", self.layout_tensors(tensors))
        write_json(
            directory / "config.json",
            self._make_config(drafter, target.vocab_size, FC_BIAS in tensors),
        )

    def _make_config(self, drafter: DrafterCheckpoint, vocab: int, bias: bool) -> dict[str, Any]:
        architecture = drafter.drafter["architecture"]
        layer = {key: value for key, value in architecture.items() if key != "rope_parameters"}
        return {
            "architectures": [self.architectures[0]],
            "model_type": "llama",
            "hidden_size": drafter.tensors["fc.weight"].shape[0],
            **layer,
            **flat_rope(layer_rope(architecture)),
            "num_hidden_layers": 1,
            "vocab_size": vocab,
            "hidden_act": "silu",
            "attention_bias": False,
            "bias": bias,
            "tie_word_embeddings": False,
            "torch_dtype": drafter.dtype,
            "use_cache": True,
        }

    def select_tensors(self, drafter: DrafterCheckpoint) -> dict[str, Tensor]:
        """Return the tensors that the files hold, apart from an embedding."""
        return dict(drafter.tensors)


class SglangEagle1(OriginalEagle1):
    """SGLang's layout: its fc always has a bias, which stays uninitialized where the file lacks
    it, so zeros are written.
    """

    title = "EAGLE, SGLang layout"
    architectures = ("LlamaForCausalLMEagle",)
    holds_embedding = False

    def needs_bias(self, files: DrafterFiles) -> bool:
        return True

    def select_tensors(self, drafter: DrafterCheckpoint) -> dict[str, Tensor]:
        fc = drafter.tensors["fc.weight"]
        return {FC_BIAS: fc.new_zeros(len(fc)), **drafter.tensors}

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"sglang": DrafterLaunch("EAGLE", path, CHAIN_TOKENS)}


class VllmEagle1(OriginalEagle1):
    """vLLM's layout: its fc has no bias."""

    title = "EAGLE, vLLM layout"
    architectures = ("EagleLlamaForCausalLM",)
    holds_embedding = False

    def needs_bias(self, files: DrafterFiles) -> bool:
        return False

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        bias = self.native_tensors(files).get(FC_BIAS)
        if bias is not None and bias.any():
            yield Finding(
                "fc-bias",
                "error",
                f"{FC_BIAS} is not zero",
                "vLLM's fc has none and ignores it",
                "train it with drafter.bias=false, or serve it with SGLang",
            )

    def select_tensors(self, drafter: DrafterCheckpoint) -> dict[str, Tensor]:
        if FC_BIAS in drafter.tensors:
            raise UserError(
                f"{FC_BIAS}: vLLM's EAGLE has no bias; use --to sglang, or train with "
                "drafter.bias=false"
            )
        return dict(drafter.tensors)

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"vllm": DrafterLaunch("eagle", path, CHAIN_TOKENS)}


class NestedEagle1(VllmEagle1):
    """The layout of vLLM's first EAGLE conversion: a Llama configuration below `model`, and the
    target's output layer.

    It is read only; `fc` has a bias where config.json has eagle_fc_bias or bias.
    """

    title = "EAGLE, vLLM's nested layout"

    def matches_files(self, files: DrafterFiles) -> bool:
        return files.config.get("model_type") == "eagle" and isinstance(
            files.config.get("model"), dict
        )

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        return super().parse_config(unnest_config(files))

    def native_name(self, name: str) -> str:
        return super().native_name(name.removeprefix("model."))

    def needs_bias(self, files: DrafterFiles) -> bool:
        return bool(files.config.get("eagle_fc_bias") or files.config.get("bias"))

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        expected = super().expected_tensors(files)
        config = self.parse_config(files)
        names = [name for name in files.tensors if self.native_name(name) == HEAD]
        expected.optional.update(dict.fromkeys(names, (config.vocab_size, config.width)))
        return expected

    def find_unsupported(self, files: DrafterFiles) -> str | None:
        if "token_map" in files.tensors:
            return "token_map is a map of a part of the vocabulary, which drafter=eagle1 lacks"
        return super().find_unsupported(unnest_config(files))

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        # Unlike today's, the class of this layout has a bias.
        yield from OriginalEagle1.findings(self, files)
        yield Finding(
            "nested-config",
            "warning",
            ("config.json holds the layer's configuration below model, as vLLM's first EAGLE did"),
            "other engines look for it at the top level",
            "spectrain convert DIR OUT --to vllm --target TARGET",
        )

    def read_head(
        self,
        files: DrafterFiles,
        config: FusedConfig,
        tensors: dict[str, Tensor],
        target: TargetFiles | None,
    ) -> None:
        if HEAD in tensors:
            target = require_target(target, f"{HEAD} should be the target's own")
            if not is_close_to(tensors.pop(HEAD), target.load_head()):
                raise UserError(
                    f"{files.directory}: {HEAD} is not the target's, and {self.choice} uses the "
                    "target's"
                )
        super().read_head(files, config, tensors, target)


def unnest_config(files: DrafterFiles) -> DrafterFiles:
    """Return the files with the configuration below `model` moved to the top level."""
    return replace(files, config={**files.config, **files.config["model"]})
