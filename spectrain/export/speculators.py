"""The container of the speculators library, which vLLM reads: the layer in
`transformer_layer_config`, the target in `speculators_config`; and EAGLE-3's layout in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.errors import UserError

from .container import Container, Finding, Rename
from .drafter_files import DrafterFiles
from .eagle3 import EAGLE3, drafter_layer_config, eagle3_names, variant_flags
from .fused import Export, FusedFiles, FusedLayout, launch_with
from .fused_config import EMBEDDING, FusedConfig
from .fused_findings import common_findings, common_target_findings, find_common_obstacle
from .layout import DrafterCheckpoint, require_target
from .targets import TargetFiles
from .vocabulary import drop_full_maps

SPECULATORS_VERSION = "0.9.0"  # of the library, whose files these match
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER = "transformer_layer_config"
NUM_TOKENS = "speculative_tokens"
"""The setting of a drafter that the container holds as part of the proposal method."""


@dataclass(frozen=True)
class Speculators(Container):
    """The library's config.json, and model.safetensors."""

    model_type: str
    architecture: str

    def holds(self, files: DrafterFiles) -> bool:
        return files.config.get("speculators_model_type") == self.model_type

    def target_name(self, files: DrafterFiles) -> str | None:
        return verifier_name(files)

    def write(
        self,
        directory: Path,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        to_file: Rename,
        target: TargetFiles | None,
    ) -> None:
        assert target is not None
        outer = {
            "architectures": [self.architecture],
            "speculators_model_type": self.model_type,
            "speculators_version": SPECULATORS_VERSION,
            **{key: value for key, value in config.items() if key not in (LAYER, NUM_TOKENS)},
            LAYER: {**config[LAYER], **common_layer_config(target)},
            "speculators_config": proposal_config(self.model_type, config[NUM_TOKENS], target),
        }
        super().write(directory, outer, tensors, to_file, target)


def speculators_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield the entries of the container that are missing."""
    for key, value in (
        ("speculators_config.verifier.name_or_path", verifier_name(source.files)),
        (
            "speculators_config.proposal_methods[0].speculative_tokens",
            read_method(source.files).get("speculative_tokens"),
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


def require_named_target(export: Export) -> None:
    """Raise MissingTarget where the target is not known, because the files name it."""
    require_target(export.target, "the files name the target")


def common_entries(drafter: DrafterCheckpoint) -> dict[str, Any]:
    """Return the entries of config.json that every family has."""
    return {
        "dtype": drafter.dtype,
        "tie_word_embeddings": False,
        "draft_vocab_size": len(drafter.tensors["d2t"]),
    }


def parse_eagle3(
    files: DrafterFiles,
    flags: tuple[str, ...] = NORM_FLAGS,
    implied_flags: tuple[str, ...] = ("norm_before_residual",),
) -> FusedConfig:
    """Translate config.json; the default of implied flags is true in vLLM."""
    config = files.config
    layer = config[LAYER]
    variants = {key: bool(config.get(key, key in implied_flags)) for key in flags}
    variants["qk_norm"] = layer.get("model_type", "qwen3") == "qwen3"  # the library's default
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids")
    return FusedConfig(layer, layer_ids, variants, config.get("draft_vocab_size"))


def implied_flag_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a fault where the flag whose default differs between readers is missing."""
    if "norm_before_residual" not in source.files.config:
        yield Finding(
            "norm-flag-implicit",
            "error",
            "config.json lacks norm_before_residual",
            "the default is true in vLLM and false in the speculators library, so one of them "
            "drafts from another residual stream",
            "write the value that it was trained with",
        )


def eagle3_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield the faults of flags, layers and the embedding of EAGLE-3 and P-EAGLE."""
    config = source.files.config
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
    if EMBEDDING in source.files.tensors:
        return
    if source.files.config.get("embed_requires_grad"):
        yield Finding(
            "missing-embed-tokens",
            "error",
            f"{EMBEDDING} is missing, and by config.json (embed_requires_grad) it was trained",
            "engines read the target's in its place, or zeros",
            "copy the files again",
        )
        return
    yield Finding(
        "missing-embed-tokens",
        "error",
        f"{EMBEDDING} is missing",
        "vLLM uses the target's, but the speculators library silently loads zeros",
        "write the target's embedding: spectrain convert DIR OUT --to vllm --target TARGET",
        is_repairable=True,
    )


def with_embedding(export: Export) -> dict[str, Tensor]:
    """Return the tensors with an embedding, the drafter's own or the target's."""
    target = export.known_target
    tensors = dict(export.tensors)
    vocab = len(export.tensors["t2d"])
    if EMBEDDING not in tensors:
        tensors[EMBEDDING] = target.load_embedding().to(tensors["fc.weight"].dtype)
    if len(tensors[EMBEDDING]) != vocab:
        raise UserError(
            f"{target.reference}: its embedding has {len(tensors[EMBEDDING])} rows and t2d "
            f"{vocab}; this drafter is for another target"
        )
    return drop_full_maps(tensors)


def eagle3_config(
    drafter: DrafterCheckpoint,
    num_tokens: int = 3,
    extra: dict[str, Any] | None = None,
    trains_embedding: bool = False,
) -> dict[str, Any]:
    """Return the settings of EAGLE-3 or, with its `extra` ones, P-EAGLE."""
    variants = variant_flags(drafter)
    model = "Qwen3ForCausalLM" if variants["qk_norm"] else "LlamaForCausalLM"
    return {
        **common_entries(drafter),
        **{key: variants[key] for key in NORM_FLAGS},
        **(extra or {}),
        "embed_requires_grad": trains_embedding,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": drafter.drafter["layers"],
        LAYER: {**drafter_layer_config(drafter), "architectures": [model]},
        NUM_TOKENS: num_tokens,
    }


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


SPECULATORS_EAGLE3 = FusedLayout(
    title="EAGLE-3, speculators layout",
    family=EAGLE3,
    container=Speculators("eagle3", "Eagle3DraftModel"),
    names=eagle3_names("layers.0."),
    parse=lambda source: parse_eagle3(source.files),
    make_config=lambda export: eagle3_config(export.drafter),
    select_tensors=with_embedding,
    obstacles=(find_common_obstacle,),
    target_checks=(common_target_findings,),
    file_checks=(common_findings, speculators_findings, implied_flag_findings, eagle3_findings),
    write_checks=(require_named_target,),
    launches=launch_with({"vllm": "eagle3"}),
)
