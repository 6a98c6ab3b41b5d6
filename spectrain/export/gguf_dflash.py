"""The GGUF layouts of DFlash, DFlash2 and DSpark for llama.cpp (--spec-type draft-dflash and
draft-dspark).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .dflash import DFLASH2, DSPARK, DFlashLayout, num_drafts, qwen3_layer
from .fused import EMBEDDING, HEAD, FusedConfig
from .gguf_layout import (
    LAYER_NAMES,
    GgufFusedLayout,
    find_foreign_rope,
    layer_config,
    rope_tensors,
    size_keys,
    unpermuted_interpretation,
)
from .layout import DrafterCheckpoint, DrafterFiles, Interpretation, require_target
from .targets import TargetFiles
from .vocabulary import drop_full_maps

TENSOR_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    HEAD: "output.weight",
    EMBEDDING: "token_embd.weight",
    "markov.markov_w1.weight": "markov_w1.weight",
    "markov.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
BLOCK_NAMES = {
    **{f"{ours}.weight": f"{name}.weight" for ours, name in LAYER_NAMES.items()},
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
"""Rest of a tensor's name behind `blocks.N.` -> behind `blk.N.`."""
NATIVE_NAMES = {name: ours for ours, name in (TENSOR_NAMES | BLOCK_NAMES).items()}


class GgufDFlash(GgufFusedLayout, DFlashLayout):
    """DFlash as llama.cpp reads it. Queries and keys stay in transformers' order, which this
    model rotates.
    """

    title = "DFlash, GGUF"
    architecture = "dflash"
    architectures = ()
    layer_id_offset = 0
    spec_type: ClassVar[str] = "draft-dflash"
    foreign_parts: ClassVar[dict[str, str]] = {
        ".bias": "a bias, which our linears lack",
        "attn_sinks": "an attention sink, which our layers lack",
        "post_attention_norm": "a norm behind the attention, which our layers lack",
        "post_ffw_norm": "a norm behind the MLP, which our layers lack",
    }

    def matches_files(self, files: DrafterFiles) -> bool:
        own_tensor = {"dflash2": "selector_hidden.weight", "dspark": "markov_w1.weight"}
        names = {family for family, tensor in own_tensor.items() if tensor in files.tensors}
        return super().matches_files(files) and (names or {"dflash"}) == {self.family.name}

    def native_name(self, name: str) -> str:
        prefix, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        return (
            f"blocks.{number}.{NATIVE_NAMES.get(part, part)}"
            if prefix == "blk"
            else NATIVE_NAMES.get(name, name)
        )

    def layout_name(self, name: str) -> str:
        prefix, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        return (
            f"blk.{number}.{BLOCK_NAMES.get(part, part)}"
            if prefix == "blocks"
            else TENSOR_NAMES.get(name, name)
        )

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        keys = files.config
        windowed = keys.get("dflash.attention.sliding_window_pattern") or []
        settings = {
            "block_size": keys["dflash.block_size"],
            "mask_token_id": keys["tokenizer.ggml.mask_token_id"],
            "sample_from_anchor": self.reads_shifted_blocks(keys),
            "causal": bool(keys.get("dflash.attention.causal", False)),
            "window": keys["dflash.attention.sliding_window"] if any(windowed) else None,
            **self.read_family_settings(files),
        }
        rows = files.tensors["d2t"].shape[0] if "d2t" in files.tensors else None
        return FusedConfig(
            layer_config(keys), list(keys["dflash.target_layers"]), {}, rows, settings
        )

    def reads_shifted_blocks(self, keys: dict[str, Any]) -> bool:
        """Tell whether slot 0 of a block drafts too."""
        return False

    def read_family_settings(self, files: DrafterFiles) -> dict[str, Any]:
        """Return the family's own settings from keys and tensors."""
        keys = {key: f"dflash.{key}" for key in self.family.config_keys.values()}
        return self.family.read_settings(
            {key: files.config.get(name) for key, name in keys.items()}
        )

    def find_unsupported(self, files: DrafterFiles) -> str | None:
        windowed = files.config.get("dflash.attention.sliding_window_pattern") or []
        if len(set(windowed)) > 1:
            return (
                f"dflash.attention.sliding_window_pattern={windowed}: all layers of "
                f"{self.choice} attend alike"
            )
        for key in ("logit_scale", "final_logit_softcapping", "embedding_scale"):
            if f"dflash.{key}" in files.config:
                return (
                    f"dflash.{key}={files.config[f'dflash.{key}']}: {self.choice} has no such scale"
                )
        return super().find_unsupported(files) or find_foreign_rope(files)

    def interpretations(self, drafter: DrafterCheckpoint) -> Iterator[Interpretation]:
        remedy = "write their rows as in transformers, because llama.cpp's DFlash rotates those"
        yield unpermuted_interpretation(drafter, remedy, to_file=False)

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        super().check_writable(drafter, target)
        unknown = sorted(
            name
            for name in drafter.tensors
            if name not in ("d2t", "t2d") and self.native_name(self.layout_name(name)) != name
        )
        if unknown:
            raise UserError(
                f"{unknown[0]}: llama.cpp's {self.family.title} has no such tensor; train without "
                "it, or use --to vllm"
            )

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        target = require_target(target, "the file holds its tokenizer")
        self.check_writable(drafter, target)
        config = qwen3_layer(drafter)
        settings = drafter.drafter
        window = settings["window"]
        windows = (
            {}
            if window is None
            else {
                "dflash.attention.sliding_window": window,
                "dflash.attention.sliding_window_pattern": [True] * config["num_hidden_layers"],
            }
        )
        keys = {
            "general.name": f"{self.family.title} for {target.name}",
            **size_keys("dflash", config),
            "dflash.block_size": settings["block_size"],
            "dflash.target_layers": list(settings["layers"]),
            "dflash.attention.causal": bool(settings["causal"]),
            **windows,
            **self.family_keys(drafter),
            "tokenizer.ggml.mask_token_id": settings["mask_token_id"],
        }
        tensors = drop_full_maps(drafter.tensors)
        self.write_file(
            directory, keys, self.layout_tensors(tensors) | rope_tensors(config), target
        )

    def family_keys(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        """Return the keys of the family's own settings."""
        return {
            f"dflash.{key}": drafter.drafter[setting]
            for setting, key in self.family.config_keys.items()
        }

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {
            "llamacpp": DrafterLaunch(self.spec_type, path, num_drafts(drafter), is_parallel=True)
        }


class GgufDFlash2(GgufDFlash):
    """DFlash2 as llama.cpp reads it: a DFlash with convolutions over the block and a selector of
    candidates.
    """

    title = "DFlash2, GGUF"
    family = DFLASH2

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        super().check_writable(drafter, target)
        top_k = drafter.drafter["selector_top_k"]
        width = drafter.tensors["fc.weight"].shape[0]
        if width < top_k * (top_k + 1):
            raise UserError(
                f"drafter.selector_top_k={top_k}: llama.cpp needs a width of "
                f"{top_k * (top_k + 1)}, and the drafter has {width}; train with a lower one"
            )


class GgufDSpark(GgufDFlash):
    """DSpark as llama.cpp reads it: a DFlash with a vanilla Markov head and, where it has one, a
    confidence head.
    """

    title = "DSpark, GGUF"
    family = DSPARK
    spec_type = "draft-dspark"

    def __init__(self) -> None:
        super().__init__()
        self.own_parts = ("conf_proj",)

    def reads_shifted_blocks(self, keys: dict[str, Any]) -> bool:
        return bool(keys.get("dflash.sample_from_anchor", True))

    def read_family_settings(self, files: DrafterFiles) -> dict[str, Any]:
        rank = files.tensors["markov_w1.weight"].shape[1]
        return {
            "markov_head": "vanilla",
            "rank": rank,
            "confidence": "conf_proj.weight" in files.tensors,
        }

    def family_keys(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        return {
            "dflash.sample_from_anchor": bool(drafter.drafter["sample_from_anchor"]),
            "dflash.has_confidence_head": bool(drafter.drafter["confidence"]),
        }

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        if drafter.drafter["markov_head"] != "vanilla":
            raise UserError(
                f"drafter.markov_head={drafter.drafter['markov_head']}: llama.cpp's DSpark has "
                "only a vanilla Markov head; train with drafter.markov_head=vanilla"
            )
        super().check_writable(drafter, target)
