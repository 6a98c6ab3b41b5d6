"""DFlash as z-lab publishes it and SGLang and vLLM read it: one flat config.json, with `dflash_config` beside the layer's keys.

Layer ids are of what a layer gives here, one less than the stream that enters the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spectrain.errors import UserError

from .block_settings import BlockConfig, needed, qwen3_layer, spread, theirs
from .dflash import DFlashLayout
from .eagle3 import same
from .fused_settings import theta_and_scaling
from .layout import Files, Finding, Portable, write_json, write_tensors
from .serving import serve_sglang_block, serve_vllm
from .targets import TargetFiles

DSPARK = "Qwen3DSparkModel"  # DeepSpec's DFlash, too: with no Markov head


class FlatDFlash(DFlashLayout):
    """`dflash_config` beside a flat Qwen3 configuration. Full layers see the block both ways, sliding ones up to themselves."""

    name = "sglang"
    title = "DFlash, flat layout"
    shift = 1

    def recognises(self, files: Files) -> bool:
        named = any(name.startswith("DFlash") or name == DSPARK for name in files.config.get("architectures") or [])
        return (named or "dflash_config" in files.config) and "speculators_model_type" not in files.config

    def settings(self, files: Files) -> BlockConfig:
        config = spread(files.config)
        needed(config, ("block_size", "mask_token_id", "target_layer_ids"))
        slides, window = "sliding_attention" in (config.get("layer_types") or []), None
        if slides or config.get("use_swa"):
            window = config.get("swa_window_size") or config["sliding_window"]
        causal = next(said for said in (config.get("is_causal"), config.get("causal"), slides) if said is not None)
        shifted = config.get("sample_from_anchor", DSPARK in (config.get("architectures") or []))
        layers = [layer + 1 for layer in config["target_layer_ids"]]
        return BlockConfig(
            config, layers, {}, config.get("draft_vocab_size"),
            config["block_size"], config["mask_token_id"], bool(shifted), bool(causal), window,
        )  # fmt: skip

    def findings(self, files: Files) -> Iterator[Finding]:
        yield from super().findings(files)
        names = files.config.get("architectures") or []
        if not any(name.startswith("DFlash") or name == DSPARK for name in names):
            yield Finding(
                "architecture", "error", f"architectures={names}", "engines choose the class by it: they know DFlashDraftModel",
                'write ["DFlashDraftModel"]',
            )  # fmt: skip
        ignored = [name for name in ("lm_head.weight", "embed_tokens.weight") if name in self.view(files)]
        if ignored and DSPARK not in names:
            yield Finding(
                "ignored-head", "error", f"{' and '.join(ignored)} lie beside the layers",
                "SGLang drops them without a word and takes the target's; only vLLM reads them",
                "serve it with vLLM: spectrain convert DIR OUT --to vllm --target TARGET",
            )  # fmt: skip

    def write(self, drafter: Portable, target: TargetFiles | None, directory: Path) -> None:
        self.refuse(drafter)
        said, tensors = drafter.drafter, dict(drafter.tensors)
        marks, offsets = tensors.pop("t2d"), tensors.pop("d2t")
        if len(offsets) < len(marks):
            raise UserError(
                f"d2t: it drafts {len(offsets)} of {len(marks)} tokens, and SGLang takes the target's whole output layer; use "
                "--to vllm, or train with drafter.vocab_size=null"
            )
        embedding = tensors.pop("embed_tokens.weight", None)
        if embedding is not None and (target is None or not same(embedding, target.embedding())):
            raise UserError(
                "embed_tokens.weight: SGLang takes the target's embedding, and this drafter has its own; use --to vllm"
            )
        if said["causal"] != (said["window"] is not None):
            raise UserError(
                f"drafter.causal={str(said['causal']).lower()}, drafter.window={said['window']}: SGLang takes layers with a "
                "window for causal and others not; use --to vllm"
            )
        if min(said["layers"]) < 1:
            raise UserError("layers: target_layer_ids has no number for the stream that enters layer 0; use --to vllm")
        layer = qwen3_layer(drafter)
        rope = layer.pop("rope_parameters")
        config = {
            "architectures": ["DFlashDraftModel"],
            **layer,
            **theta_and_scaling(rope),
            "num_target_layers": None if target is None else target.num_layers,
            "block_size": said["block_size"],
            "dflash_config": {
                "mask_token_id": said["mask_token_id"],
                "target_layer_ids": [layer - 1 for layer in said["layers"]],
            },
            "torch_dtype": drafter.dtype,
            "use_cache": True,
        }
        write_json(directory / "config.json", config)
        write_tensors(directory / "model.safetensors", {theirs(name): tensor for name, tensor in tensors.items()})

    def serve(self, drafter: Portable, files: TargetFiles, target: str, place: str) -> dict[str, str]:
        size = drafter.drafter["block_size"]
        drafting = {"method": "dflash", "model": place, "num_speculative_tokens": size - 1}
        return {"SGLang": serve_sglang_block(target, "DFLASH", place, size), "vLLM": serve_vllm(target, drafting)}
