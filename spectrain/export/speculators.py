"""The layout of EAGLE-3 that the speculators library writes and vLLM reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from spectrain.errors import UserError

from .eagle3 import Eagle3Layout, drafter_layer_config, drop_full_maps, layout_name, variant_flags
from .fused_settings import FusedConfig
from .layout import DrafterCheckpoint, DrafterFiles, Finding, require_target, write_json, write_tensors
from .serving import serve_vllm
from .targets import TargetFiles

SPECULATORS_VERSION = "0.9.0"  # of the library, whose files these match
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class SpeculatorsEagle3(Eagle3Layout):
    """The speculators layout of EAGLE-3: its layer in `transformer_layer_config`, its target in `speculators_config`."""

    title = "EAGLE-3, speculators layout"
    prefix = "layers.0."
    model_type = "eagle3"
    architecture = "Eagle3DraftModel"
    flags: tuple[str, ...] = NORM_FLAGS
    implied_flags: tuple[str, ...] = ("norm_before_residual",)  # flags whose default is true in vLLM
    trains_embedding = False

    def matches_files(self, files: DrafterFiles) -> bool:
        return files.config.get("speculators_model_type") == self.model_type

    def num_drafts(self, drafter: DrafterCheckpoint) -> int:
        """Return the number of tokens that an engine is configured to draft."""
        return 3

    def extra_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        """Return further entries of config.json."""
        return {}

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        config = files.config
        layer = config["transformer_layer_config"]
        variants = {key: bool(config.get(key, key in self.implied_flags)) for key in self.flags}
        variants["qk_norm"] = layer.get("model_type", "qwen3") == "qwen3"  # the library's default
        return FusedConfig(
            layer,
            config.get("eagle_aux_hidden_state_layer_ids"),
            variants,
            config.get("draft_vocab_size"),
        )

    def target_name(self, files: DrafterFiles) -> str | None:
        return verifier_name(files) or super().target_name(files)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        config = files.config
        for flag in (flag for flag in self.implied_flags if flag not in config):
            yield Finding(
                "norm-flag-implicit", "error", f"config.json lacks {flag}",
                "the default is true in vLLM and false in the speculators library, so one of them drafts from another "
                "residual stream", "write the value that it was trained with",
            )  # fmt: skip
        if config.get("norm_before_fc") and config.get("fc_norm"):
            yield Finding(
                "norm-flags-exclusive", "error", "norm_before_fc and fc_norm are both on", "engines refuse the file",
                "leave on the flag whose tensors the files hold",
            )  # fmt: skip
        yield from proposal_findings(files)
        if config.get("eagle_aux_hidden_state_layer_ids") is None:
            yield Finding(
                "layer-ids-missing", "warning", "eagle_aux_hidden_state_layer_ids is missing",
                "every engine uses its own default", "write the layers that it was trained on",
            )  # fmt: skip
        embedding = files.tensors.get("embed_tokens.weight")
        if embedding is None:
            yield Finding(
                "missing-embed-tokens", "error", "embed_tokens.weight is missing",
                "vLLM uses the target's, but the speculators library silently loads zeros",
                "write the target's embedding: spectrain convert DIR OUT --to vllm --target TARGET", is_repairable=True,
            )  # fmt: skip

    def write(self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path) -> None:
        target = require_target(target, "the files name it and hold its embedding")
        layer, variants = drafter_layer_config(drafter), variant_flags(drafter)
        tensors = dict(drafter.tensors)
        if "embed_tokens.weight" not in tensors:
            tensors["embed_tokens.weight"] = target.load_embedding().to(tensors["fc.weight"].dtype)
        if tensors["embed_tokens.weight"].shape[0] != layer["vocab_size"]:
            raise UserError(
                f"{target.reference}: its embedding has {tensors['embed_tokens.weight'].shape[0]} rows and t2d "
                f"{layer['vocab_size']}; this drafter is for another target"
            )
        model = "Qwen3ForCausalLM" if variants["qk_norm"] else "LlamaForCausalLM"
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "speculators_model_type": self.model_type,
            "speculators_version": SPECULATORS_VERSION,
            "dtype": drafter.dtype,
            "tie_word_embeddings": False,
            "draft_vocab_size": len(tensors["d2t"]),
            **{key: variants[key] for key in NORM_FLAGS},
            **self.extra_config(drafter),
            "embed_requires_grad": self.trains_embedding,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": drafter.drafter["layers"],
            "transformer_layer_config": {**layer, "architectures": [model], **common_layer_config(target)},
            "speculators_config": proposal_config(self.model_type, self.num_drafts(drafter), target),
        }
        write_json(directory / "config.json", config)
        tensors["t2d"] = tensors["t2d"].to(torch.bool)
        renamed = {layout_name(name, self.prefix): tensor for name, tensor in drop_full_maps(tensors).items()}
        write_tensors(directory / "model.safetensors", renamed)

    def serve_commands(self, drafter: DrafterCheckpoint, files: TargetFiles, target: str, drafter_path: str) -> dict[str, str]:
        return {"vLLM": serve_vllm(target, {"method": "eagle3", "model": drafter_path, "num_speculative_tokens": 3})}


def common_layer_config(target: TargetFiles) -> dict[str, Any]:
    """Return the entries that the library writes for a layer and that do not shape it."""
    return {
        "attention_dropout": 0.0,
        "initializer_range": getattr(target.config, "initializer_range", 0.02),
        "use_cache": True,
        **{key: getattr(target.config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def proposal_config(algorithm: str, num_tokens: int, target: TargetFiles) -> dict[str, Any]:
    """Return `speculators_config`: the number of drafts a round, and the target."""
    method = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": target.engine_path, "architectures": target.full_config.architectures},
    }


def verifier_name(files: DrafterFiles) -> str | None:
    """Return the target that `speculators_config` names, or None."""
    name: str | None = ((files.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    return name


def proposal_findings(files: DrafterFiles) -> Iterator[Finding]:
    """Yield the entries without which vLLM refuses a file."""
    methods = (files.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    for key, value in (
        ("speculators_config.verifier.name_or_path", verifier_name(files)),
        ("speculators_config.proposal_methods[0].speculative_tokens", methods[0].get("speculative_tokens")),
    ):
        if not value:
            yield Finding("speculators-config", "error", f"{key} is missing", "vLLM refuses the file", "write it")
