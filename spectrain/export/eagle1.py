"""EAGLE's first drafter as its authors, vLLM and SGLang lay it down: one Llama layer without its first norm, and fc.

All have `layers.0.` names beside `fc.weight` and a flat config.json. They differ in the class that `architectures` names, in
the bias of fc, and in whether the target's embedding lies beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from spectrain.errors import UserError

from .eagle3 import IGNORED, IN_LAYER, layer_shapes, same
from .fused_settings import Settings, theta_and_scaling
from .layout import Expected, Files, Finding, Layout, Portable, need, write_json, write_tensors
from .serving import serve_sglang, serve_vllm
from .targets import TargetFiles

EAGLE1 = "spectrain.drafters.eagle1.Eagle1"
EMBEDDING, BIAS, PREFIX = "embed_tokens.weight", "fc.bias", "layers.0."


class OriginalEagle1(Layout):
    """What its authors' checkpoints hold: the target's embedding too, and a bias of fc unless config.json has bias=false."""

    name = "eagle"
    title = "EAGLE, original layout"
    families = ("eagle1",)
    architecture: ClassVar[str] = "LlamaForCausalLM"
    holds_embedding: ClassVar[bool] = True

    def recognises(self, files: Files) -> bool:
        shape = files.tensors["fc.weight"].shape if "fc.weight" in files.tensors else ()
        ours = "drafter" in files.config or "speculators_model_type" in files.config
        fused = any("hidden_norm" in name or name.startswith("midlayer.") for name in files.tensors)  # EAGLE-3's
        is_it = self.architecture in (files.config.get("architectures") or [])
        return is_it and not ours and not fused and len(shape) == 2 and shape[1] == 2 * shape[0]

    def settings(self, files: Files) -> Settings:
        """What config.json says, in our terms."""
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
            if key not in files.config:
                raise UserError(f"{files.directory / 'config.json'}: {key} is missing; copy it from where it was trained")
        return Settings(files.config, None, {}, None)

    def needs_bias(self, files: Files) -> bool:
        """Whether its readers look for one."""
        return bool(files.config.get("bias", True))

    def expected(self, files: Files) -> Expected:
        said = self.settings(files)
        width, prefix = said.width, "model." if "model.fc.weight" in files.tensors else ""
        layer = layer_shapes(said.architecture, width, width)
        del layer["input_layernorm.weight"]
        shapes: dict[str, tuple[int | None, ...]] = {PREFIX + name: shape for name, shape in layer.items()}
        shapes["fc.weight"] = (width, 2 * width)
        optional: dict[str, tuple[int | None, ...]] = {EMBEDDING: (int(files.config["vocab_size"]), width)}
        (shapes if self.needs_bias(files) else optional)[BIAS] = (width,)
        named = [{prefix + name: shape for name, shape in group.items()} for group in (shapes, optional)]
        return Expected(named[0], named[1], IGNORED)

    def view(self, files: Files) -> dict[str, Tensor]:
        """The tensors under our names."""
        names = {name: name.removeprefix("model.").removeprefix(PREFIX) for name in files.tensors}
        return {mine: files.tensors[name] for name, mine in names.items() if not mine.endswith(IGNORED)}

    def findings(self, files: Files) -> Iterator[Finding]:
        why = unsupported(files, self.view(files))
        if why is not None:
            yield Finding("not-representable", "warning", why, "spectrain cannot score or fine-tune it", "nothing, to serve it")

    def read(self, files: Files, target: TargetFiles | None) -> Portable:
        said, tensors = self.settings(files), self.view(files)
        why = unsupported(files, tensors)
        if why is not None:
            raise UserError(f"{files.directory}: {why}")
        embedding = tensors.pop(EMBEDDING, None)
        if embedding is not None and not same(embedding, need(target, f"{EMBEDDING} should be the target's own").embedding()):
            raise UserError(f"{files.directory}: {EMBEDDING} is not the target's, and drafter=eagle1 drafts through that one")
        if BIAS in tensors and not tensors[BIAS].any():  # SGLang's has one, whether it was trained or not
            del tensors[BIAS]
        kept = files.kept()
        drafter = {"_target_": EAGLE1, **kept.drafter, "bias": BIAS in tensors, "architecture": said.architecture}
        return Portable(drafter, tensors, kept.said, description=kept.description)

    def write(self, drafter: Portable, target: TargetFiles | None, directory: Path) -> None:
        tensors = self.fitting(drafter)
        named = {PREFIX + name if name.startswith(IN_LAYER) else name: tensor for name, tensor in tensors.items()}
        found = need(target, "this layout says how many tokens the target has")
        if self.holds_embedding:
            named[EMBEDDING] = found.embedding().to(named["fc.weight"].dtype)
        write_tensors(directory / "model.safetensors", named)
        write_json(directory / "config.json", self._config(drafter, found.vocab_size, BIAS in tensors))

    def _config(self, drafter: Portable, vocab: int, bias: bool) -> dict[str, Any]:
        layer = dict(drafter.drafter["architecture"])
        rope = layer.pop("rope_parameters")
        return {
            "architectures": [self.architecture],
            "model_type": "llama",
            "hidden_size": drafter.tensors["fc.weight"].shape[0],
            **layer,
            **theta_and_scaling(rope),
            "num_hidden_layers": 1,
            "vocab_size": vocab,
            "hidden_act": "silu",
            "attention_bias": False,
            "bias": bias,
            "tie_word_embeddings": False,
            "torch_dtype": drafter.dtype,
            "use_cache": True,
        }

    def fitting(self, drafter: Portable) -> dict[str, Tensor]:
        """The tensors that the files hold beside an embedding."""
        return dict(drafter.tensors)


class SglangEagle1(OriginalEagle1):
    """SGLang's fc always has a bias, which would stay as memory was: here it is zero where none was trained."""

    name = "sglang"
    title = "EAGLE, SGLang layout"
    architecture = "LlamaForCausalLMEagle"
    holds_embedding = False

    def needs_bias(self, files: Files) -> bool:
        return True

    def fitting(self, drafter: Portable) -> dict[str, Tensor]:
        fc = drafter.tensors["fc.weight"]
        return {BIAS: fc.new_zeros(len(fc)), **drafter.tensors}

    def serve(self, drafter: Portable, files: TargetFiles, target: str, place: str) -> dict[str, str]:
        return {"SGLang": serve_sglang(target, "EAGLE", place, 3)}


class VllmEagle1(OriginalEagle1):
    """vLLM's fc has no bias and would leave one out."""

    name = "vllm"
    title = "EAGLE, vLLM layout"
    architecture = "EagleLlamaForCausalLM"
    holds_embedding = False

    def needs_bias(self, files: Files) -> bool:
        return False

    def findings(self, files: Files) -> Iterator[Finding]:
        yield from super().findings(files)
        bias = self.view(files).get(BIAS)
        if bias is not None and bias.any():
            yield Finding(
                "fc-bias", "error", f"{BIAS} is there and not zero", "vLLM's fc has none and reads past it",
                "train it with drafter.bias=false, or serve it by SGLang",
            )  # fmt: skip

    def fitting(self, drafter: Portable) -> dict[str, Tensor]:
        if BIAS in drafter.tensors:
            raise UserError(f"{BIAS}: vLLM's EAGLE has no bias; use --to sglang, or train with drafter.bias=false")
        return dict(drafter.tensors)

    def serve(self, drafter: Portable, files: TargetFiles, target: str, place: str) -> dict[str, str]:
        return {"vLLM": serve_vllm(target, {"method": "eagle", "model": place, "num_speculative_tokens": 3})}


def unsupported(files: Files, tensors: dict[str, Tensor]) -> str | None:
    """What our class cannot represent; None where it can all of it."""
    if files.config.get("num_hidden_layers", 1) != 1:
        return f"num_hidden_layers={files.config['num_hidden_layers']}: drafter=eagle1 has one layer"
    if files.config.get("hidden_act", "silu") != "silu":
        return f"hidden_act={files.config['hidden_act']}: drafter=eagle1 has silu"
    for name in sorted(tensors):
        if name.endswith(".bias") and name != BIAS:
            return f"{name}: linears of drafter=eagle1 have no bias but that of fc"
        if name.startswith(("input_layernorm", "norm", "embedding_layernorm", "hidden_states_layernorm")):
            return f"{name}: drafter=eagle1 has no norm before its layer and none behind it"
    return None
