"""The layouts that the speculators library writes and vLLM reads: what all of them have, and
EAGLE-3's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .eagle3 import Eagle3Layout, drafter_layer_config, variant_flags
from .fused import EMBEDDING, FusedConfig, FusedLayout
from .layout import (
    CHAIN_TOKENS,
    DrafterCheckpoint,
    DrafterFiles,
    Finding,
    require_target,
    write_json,
    write_tensors,
)
from .targets import TargetFiles
from .vocabulary import drop_full_maps

SPECULATORS_VERSION = "0.9.0"  # of the library, whose files these match
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class SpeculatorsLayout(FusedLayout):
    """The base of the library's layouts: the layer in `transformer_layer_config`, the target in
    `speculators_config`.
    """

    model_type: ClassVar[str]

    def matches_files(self, files: DrafterFiles) -> bool:
        return files.config.get("speculators_model_type") == self.model_type

    def target_name(self, files: DrafterFiles) -> str | None:
        return verifier_name(files) or super().target_name(files)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        for key, value in (
            ("speculators_config.verifier.name_or_path", verifier_name(files)),
            (
                "speculators_config.proposal_methods[0].speculative_tokens",
                read_method(files).get("speculative_tokens"),
            ),
        ):
            if not value:
                yield Finding(
                    "speculators-config",
                    "error",
                    f"{key} is missing",
                    "vLLM refuses the file",
                    "write it",
                )

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        target = require_target(target, "the files name the target")
        self.check_writable(drafter, target)
        tensors = self.layout_tensors(drop_full_maps(self.file_tensors(drafter, target)))
        config: dict[str, Any] = {
            "architectures": [self.architectures[0]],
            "speculators_model_type": self.model_type,
            "speculators_version": SPECULATORS_VERSION,
            "dtype": drafter.dtype,
            "tie_word_embeddings": False,
            "draft_vocab_size": len(drafter.tensors["d2t"]),
            **self.family_entries(drafter),
            "transformer_layer_config": {
                **self.layer_entries(drafter),
                **common_layer_config(target),
            },
            "speculators_config": proposal_config(
                self.model_type, self.num_drafts(drafter), target
            ),
        }
        write_json(directory / "config.json", config)
        write_tensors(directory / "model.safetensors", tensors)

    def file_tensors(self, drafter: DrafterCheckpoint, target: TargetFiles) -> dict[str, Tensor]:
        """Return the tensors that the files hold, under spectrain's names; maps of the full
        vocabulary are left out.
        """
        return drafter.tensors

    @abstractmethod
    def layer_entries(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        """Return the configuration of the drafter's layers."""

    @abstractmethod
    def family_entries(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        """Return the entries of config.json that only the family has."""

    @abstractmethod
    def num_drafts(self, drafter: DrafterCheckpoint) -> int:
        """Return the number of tokens that an engine is configured to draft."""


class SpeculatorsEagle3(SpeculatorsLayout, Eagle3Layout):
    """The speculators layout of EAGLE-3."""

    title = "EAGLE-3, speculators layout"
    prefix = "layers.0."
    model_type = "eagle3"
    architectures = ("Eagle3DraftModel",)
    flags: ClassVar[tuple[str, ...]] = NORM_FLAGS
    # flags whose default is true in vLLM
    implied_flags: ClassVar[tuple[str, ...]] = ("norm_before_residual",)
    trains_embedding: ClassVar[bool] = False

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        config = files.config
        layer = config["transformer_layer_config"]
        variants = {key: bool(config.get(key, key in self.implied_flags)) for key in self.flags}
        variants["qk_norm"] = layer.get("model_type", "qwen3") == "qwen3"  # the library's default
        layer_ids = config.get("eagle_aux_hidden_state_layer_ids")
        return FusedConfig(layer, layer_ids, variants, config.get("draft_vocab_size"))

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        config = files.config
        for flag in (flag for flag in self.implied_flags if flag not in config):
            yield Finding(
                "norm-flag-implicit",
                "error",
                f"config.json lacks {flag}",
                "the default is true in vLLM and false in the speculators library, so one of them "
                "drafts from another residual stream",
                "write the value that it was trained with",
            )
        if config.get("norm_before_fc") and config.get("fc_norm"):
            yield Finding(
                "norm-flags-exclusive",
                "error",
                "norm_before_fc and fc_norm are both on",
                "engines refuse the file",
                "leave on the flag whose tensors the files hold",
            )
        if config.get("eagle_aux_hidden_state_layer_ids") is None:
            yield Finding(
                "layer-ids-missing",
                "warning",
                "eagle_aux_hidden_state_layer_ids is missing",
                "every engine uses its own default",
                "write the layers that it was trained on",
            )
        if EMBEDDING not in files.tensors:
            yield Finding(
                "missing-embed-tokens",
                "error",
                f"{EMBEDDING} is missing",
                "vLLM uses the target's, but the speculators library silently loads zeros",
                "write the target's embedding: spectrain convert DIR OUT --to vllm --target TARGET",
                is_repairable=True,
            )

    def file_tensors(self, drafter: DrafterCheckpoint, target: TargetFiles) -> dict[str, Tensor]:
        tensors = dict(drafter.tensors)
        vocab = len(drafter.tensors["t2d"])
        if EMBEDDING not in tensors:
            tensors[EMBEDDING] = target.load_embedding().to(tensors["fc.weight"].dtype)
        if len(tensors[EMBEDDING]) != vocab:
            raise UserError(
                f"{target.reference}: its embedding has {len(tensors[EMBEDDING])} rows and t2d "
                f"{vocab}; this drafter is for another target"
            )
        return tensors

    def layer_entries(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        model = "Qwen3ForCausalLM" if variant_flags(drafter)["qk_norm"] else "LlamaForCausalLM"
        return {**drafter_layer_config(drafter), "architectures": [model]}

    def family_entries(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        variants = variant_flags(drafter)
        return {
            **{key: variants[key] for key in NORM_FLAGS},
            **self.extra_entries(drafter),
            "embed_requires_grad": self.trains_embedding,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": drafter.drafter["layers"],
        }

    def extra_entries(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        """Return the entries of config.json that P-EAGLE adds to EAGLE-3's."""
        return {}

    def num_drafts(self, drafter: DrafterCheckpoint) -> int:
        return 3

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"vllm": DrafterLaunch("eagle3", path, CHAIN_TOKENS)}


def common_layer_config(target: TargetFiles) -> dict[str, Any]:
    """Return the entries that the library writes for a layer and that do not shape it."""
    return {
        "attention_dropout": 0.0,
        "initializer_range": getattr(target.config, "initializer_range", 0.02),
        "use_cache": True,
        **target.special_token_ids,
    }


def proposal_config(algorithm: str, num_tokens: int, target: TargetFiles) -> dict[str, Any]:
    """Return `speculators_config`: the number of drafts a round, and the target."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {
            "name_or_path": target.engine_path,
            "architectures": target.full_config.architectures,
        },
    }


def verifier_name(files: DrafterFiles) -> str | None:
    """Return the target that `speculators_config` names, or None."""
    name: str | None = ((files.config.get("speculators_config") or {}).get("verifier") or {}).get(
        "name_or_path"
    )
    return name


def read_method(files: DrafterFiles) -> dict[str, Any]:
    """Return the first of the files' proposal methods."""
    methods = (files.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return dict(methods[0])
