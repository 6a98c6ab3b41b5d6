"""The layouts of EAGLE's first drafter by its authors, vLLM and SGLang: fc, and one Llama layer without its first norm.

All have `layers.0.` names, `fc.weight` and a flat config.json. They differ in the class that `architectures` names, in fc's
bias, and in whether they hold the target's embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from spectrain.errors import UserError

from .eagle3 import IGNORED_TENSORS, LAYER_PARTS, equal_when_rounded, layer_shapes
from .fused_settings import FusedConfig, flat_rope
from .layout import DrafterCheckpoint, DrafterFiles, ExpectedTensors, Finding, Layout, require_target, write_json, write_tensors
from .serving import serve_sglang, serve_vllm
from .targets import TargetFiles

EAGLE1_CLASS = "spectrain.drafters.eagle1.Eagle1"
EMBEDDING, FC_BIAS, LAYER_PREFIX = "embed_tokens.weight", "fc.bias", "layers.0."


class OriginalEagle1(Layout):
    """The authors' layout: it holds the target's embedding, and a bias of fc unless config.json has bias=false."""

    title = "EAGLE, original layout"
    architecture: ClassVar[str] = "LlamaForCausalLM"
    holds_embedding: ClassVar[bool] = True

    def matches_files(self, files: DrafterFiles) -> bool:
        shape = files.tensors["fc.weight"].shape if "fc.weight" in files.tensors else ()
        is_other_layout = "drafter" in files.config or "speculators_model_type" in files.config
        is_eagle3 = any("hidden_norm" in name or name.startswith("midlayer.") for name in files.tensors)
        has_architecture = self.architecture in (files.config.get("architectures") or [])
        return has_architecture and not (is_other_layout or is_eagle3) and len(shape) == 2 and shape[1] == 2 * shape[0]

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        """Translate config.json into spectrain's terms."""
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
            if key not in files.config:
                raise UserError(f"{files.directory / 'config.json'}: {key} is missing; copy it from where it was trained")
        return FusedConfig(files.config, None, {}, None)

    def needs_bias(self, files: DrafterFiles) -> bool:
        """Tell whether its readers expect a bias of fc."""
        return bool(files.config.get("bias", True))

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        config = self.parse_config(files)
        width, prefix = config.width, "model." if "model.fc.weight" in files.tensors else ""
        layer = layer_shapes(config.architecture, width, width)
        del layer["input_layernorm.weight"]
        shapes: dict[str, tuple[int | None, ...]] = {LAYER_PREFIX + name: shape for name, shape in layer.items()}
        shapes["fc.weight"] = (width, 2 * width)
        optional: dict[str, tuple[int | None, ...]] = {EMBEDDING: (int(files.config["vocab_size"]), width)}
        (shapes if self.needs_bias(files) else optional)[FC_BIAS] = (width,)
        renamed = [{prefix + name: shape for name, shape in group.items()} for group in (shapes, optional)]
        return ExpectedTensors(renamed[0], renamed[1], IGNORED_TENSORS)

    def native_tensors(self, files: DrafterFiles) -> dict[str, Tensor]:
        """Return the tensors under spectrain's names."""
        names = {name: name.removeprefix("model.").removeprefix(LAYER_PREFIX) for name in files.tensors}
        return {native: files.tensors[name] for name, native in names.items() if not native.endswith(IGNORED_TENSORS)}

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        problem = find_unsupported(files, self.native_tensors(files))
        if problem is not None:
            yield Finding(
                "not-representable", "warning", problem, "spectrain cannot score or fine-tune it", "nothing, to serve it"
            )

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        config, tensors = self.parse_config(files), self.native_tensors(files)
        problem = find_unsupported(files, tensors)
        if problem is not None:
            raise UserError(f"{files.directory}: {problem}")
        embedding = tensors.pop(EMBEDDING, None)
        if embedding is not None and not equal_when_rounded(
            embedding, require_target(target, f"{EMBEDDING} should be the target's own").load_embedding()
        ):
            raise UserError(f"{files.directory}: {EMBEDDING} is not the target's, and drafter=eagle1 uses the target's")
        if FC_BIAS in tensors and not tensors[FC_BIAS].any():  # SGLang's layout has one, even an untrained one
            del tensors[FC_BIAS]
        metadata = files.read_metadata()
        drafter = {
            "_target_": EAGLE1_CLASS,
            **metadata.drafter,
            "bias": FC_BIAS in tensors,
            "architecture": config.architecture,
        }
        return DrafterCheckpoint(drafter, tensors, metadata.target, description=metadata.description)

    def write(self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path) -> None:
        tensors = self.select_tensors(drafter)
        renamed = {LAYER_PREFIX + name if name.startswith(LAYER_PARTS) else name: tensor for name, tensor in tensors.items()}
        target_files = require_target(target, "this layout holds the size of the target's vocabulary")
        if self.holds_embedding:
            renamed[EMBEDDING] = target_files.load_embedding().to(renamed["fc.weight"].dtype)
        write_tensors(directory / "model.safetensors", renamed)
        write_json(directory / "config.json", self._make_config(drafter, target_files.vocab_size, FC_BIAS in tensors))

    def _make_config(self, drafter: DrafterCheckpoint, vocab: int, bias: bool) -> dict[str, Any]:
        layer = dict(drafter.drafter["architecture"])
        rope = layer.pop("rope_parameters")
        return {
            "architectures": [self.architecture],
            "model_type": "llama",
            "hidden_size": drafter.tensors["fc.weight"].shape[0],
            **layer,
            **flat_rope(rope),
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
    """SGLang's layout: its fc always has a bias, which stays uninitialized where the file lacks it, so zeros are written."""

    title = "EAGLE, SGLang layout"
    architecture = "LlamaForCausalLMEagle"
    holds_embedding = False

    def needs_bias(self, files: DrafterFiles) -> bool:
        return True

    def select_tensors(self, drafter: DrafterCheckpoint) -> dict[str, Tensor]:
        fc = drafter.tensors["fc.weight"]
        return {FC_BIAS: fc.new_zeros(len(fc)), **drafter.tensors}

    def serve_commands(self, drafter: DrafterCheckpoint, files: TargetFiles, target: str, drafter_path: str) -> dict[str, str]:
        return {"SGLang": serve_sglang(target, "EAGLE", drafter_path, 3)}


class VllmEagle1(OriginalEagle1):
    """vLLM's layout: its fc has no bias."""

    title = "EAGLE, vLLM layout"
    architecture = "EagleLlamaForCausalLM"
    holds_embedding = False

    def needs_bias(self, files: DrafterFiles) -> bool:
        return False

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        bias = self.native_tensors(files).get(FC_BIAS)
        if bias is not None and bias.any():
            yield Finding(
                "fc-bias", "error", f"{FC_BIAS} is not zero", "vLLM's fc has none and ignores it",
                "train it with drafter.bias=false, or serve it with SGLang",
            )  # fmt: skip

    def select_tensors(self, drafter: DrafterCheckpoint) -> dict[str, Tensor]:
        if FC_BIAS in drafter.tensors:
            raise UserError(f"{FC_BIAS}: vLLM's EAGLE has no bias; use --to sglang, or train with drafter.bias=false")
        return dict(drafter.tensors)

    def serve_commands(self, drafter: DrafterCheckpoint, files: TargetFiles, target: str, drafter_path: str) -> dict[str, str]:
        return {"vLLM": serve_vllm(target, {"method": "eagle", "model": drafter_path, "num_speculative_tokens": 3})}


def find_unsupported(files: DrafterFiles, tensors: dict[str, Tensor]) -> str | None:
    """Describe the first key or tensor that spectrain's class cannot represent; return None where there is none."""
    if files.config.get("num_hidden_layers", 1) != 1:
        return f"num_hidden_layers={files.config['num_hidden_layers']}: drafter=eagle1 has one layer"
    if files.config.get("hidden_act", "silu") != "silu":
        return f"hidden_act={files.config['hidden_act']}: drafter=eagle1 has silu"
    for name in sorted(tensors):
        if name.endswith(".bias") and name != FC_BIAS:
            return f"{name}: drafter=eagle1 has no bias except fc's"
        if name.startswith(("input_layernorm", "norm", "embedding_layernorm", "hidden_states_layernorm")):
            return f"{name}: drafter=eagle1 has no norm before or after its layer"
    return None
