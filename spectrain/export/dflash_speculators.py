"""DFlash as the speculators library writes it and vLLM reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spectrain.errors import UserError

from .block_settings import BlockConfig, needed, qwen3_layer, spread, theirs
from .dflash import DFlashLayout
from .layout import Files, Finding, Portable, need, write_json, write_tensors
from .serving import serve_vllm
from .speculators import VERSION, around, proposal, proposal_findings, verifier_of
from .targets import TargetFiles


class SpeculatorsDFlash(DFlashLayout):
    """The layer under `transformer_layer_config`, the target under `speculators_config`."""

    name = "vllm"
    title = "DFlash, speculators layout"
    shift = 0

    def recognises(self, files: Files) -> bool:
        return files.config.get("speculators_model_type") == "dflash"

    def settings(self, files: Files) -> BlockConfig:
        config = files.config
        needed(spread(config), ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "transformer_layer_config"))
        layer = config["transformer_layer_config"]
        slides = "sliding_attention" in (layer.get("layer_types") or [])
        causal = slides and not config.get("sliding_window_non_causal", True)
        return BlockConfig(
            layer, config["aux_hidden_state_layer_ids"], {}, config.get("draft_vocab_size"),
            config["block_size"], config["mask_token_id"], bool(config.get("sample_from_anchor", False)), causal,
            layer["sliding_window"] if slides else None,
        )  # fmt: skip

    def target_name(self, files: Files) -> str | None:
        return verifier_of(files) or super().target_name(files)

    def findings(self, files: Files) -> Iterator[Finding]:
        yield from super().findings(files)
        yield from proposal_findings(files)
        both, types = files.config.get("sliding_window_non_causal"), files.config["transformer_layer_config"].get("layer_types")
        if both is None and "sliding_attention" in (types or []):
            yield Finding(
                "block-causality-implicit", "error", "config.json does not say sliding_window_non_causal",
                "vLLM takes true where it is missing and the speculators library false, so a slot sees other slots than it was "
                "trained on", "write the value that it was trained with",
            )  # fmt: skip
        if both is False and "sliding_attention" not in (types or []):
            yield Finding(
                "block-causality", "error", "full-attention layers and sliding_window_non_causal is false",
                "the speculators library trains such layers both ways whatever it says, and vLLM serves them causal",
                'write "sliding_window_non_causal": true, or spectrain convert DIR OUT --to vllm --target TARGET',
            )  # fmt: skip

    def write(self, drafter: Portable, target: TargetFiles | None, directory: Path) -> None:
        target = need(target, "the files name it")
        self.refuse(drafter)
        said, tensors = drafter.drafter, dict(drafter.tensors)
        if said["causal"] and said["window"] is None:
            raise UserError(
                "drafter.causal=true: the speculators library trains layers without a window both ways and vLLM serves them as "
                "the file says, so it cannot be said to both; train with drafter.window too"
            )
        rows, vocab = len(tensors["d2t"]), len(tensors["t2d"])
        if rows == vocab:
            del tensors["d2t"], tensors["t2d"]
        config: dict[str, Any] = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "speculators_version": VERSION,
            "dtype": drafter.dtype,
            "tie_word_embeddings": False,
            "draft_vocab_size": rows,
            "block_size": said["block_size"],
            "aux_hidden_state_layer_ids": said["layers"],
            "mask_token_id": said["mask_token_id"],
            "sample_from_anchor": False,
            "sliding_window_non_causal": not said["causal"],
            "target_hidden_size": None,
            "transformer_layer_config": {**qwen3_layer(drafter), "architectures": ["Qwen3ForCausalLM"], **around(target)},
            "speculators_config": proposal("dflash", said["block_size"] - 1, target),
        }
        write_json(directory / "config.json", config)
        write_tensors(directory / "model.safetensors", {theirs(name): tensor for name, tensor in tensors.items()})

    def serve(self, drafter: Portable, files: TargetFiles, target: str, place: str) -> dict[str, str]:
        tokens = drafter.drafter["block_size"] - 1
        return {"vLLM": serve_vllm(target, {"method": "dflash", "model": place, "num_speculative_tokens": tokens})}
