"""The GGUF layout of EAGLE-3 for llama.cpp (--spec-type draft-eagle3)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from spectrain.drafters.layers.eagle_layers import default_layers
from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .eagle3 import (
    NUM_FUSED_LAYERS,
    Eagle3Layout,
    check_layer_count,
    drafter_layer_config,
    unnamed_layers,
    variant_flags,
)
from .fused import EMBEDDING, HEAD, FusedConfig
from .gguf_layout import (
    LAYER_NAMES,
    GgufFusedLayout,
    convert_heads,
    find_foreign_rope,
    layer_config,
    rope_tensors,
    size_keys,
    unpermuted_interpretation,
)
from .layout import (
    CHAIN_TOKENS,
    DrafterCheckpoint,
    DrafterFiles,
    Finding,
    Interpretation,
    require_target,
)
from .targets import TargetFiles
from .vocabulary import drop_full_maps, target_ids

TENSOR_NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    HEAD: "output.weight",
    EMBEDDING: "token_embd.weight",
    "hidden_norm.weight": "blk.0.attn_norm_2.weight",
    **{f"{ours}.weight": f"blk.0.{name}.weight" for ours, name in LAYER_NAMES.items()},
}
NATIVE_NAMES = {name: ours for ours, name in TENSOR_NAMES.items()}


class GgufEagle3(GgufFusedLayout, Eagle3Layout):
    """EAGLE-3 as llama.cpp reads it: layer ids name the layer that a stream enters, and d2t
    holds ids of the target.
    """

    title = "EAGLE-3, GGUF"
    architecture = "eagle3"
    prefix = ""
    architectures = ()

    def native_name(self, name: str) -> str:
        return NATIVE_NAMES.get(name, name)

    def layout_name(self, name: str) -> str:
        return TENSOR_NAMES.get(name, name)

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        keys = files.config
        variants = {
            name: bool(keys.get(f"eagle3.{name}", False))
            for name in ("norm_before_residual", "norm_before_fc")
        }
        rows = files.tensors["d2t"].shape[0] if "d2t" in files.tensors else None
        return FusedConfig(layer_config(keys), list(keys["eagle3.target_layers"]), variants, rows)

    def native_tensors(self, files: DrafterFiles) -> dict[str, Tensor]:
        return convert_heads(
            super().native_tensors(files), layer_config(files.config), to_file=False
        )

    def find_unsupported(self, files: DrafterFiles) -> str | None:
        keys = files.config
        width = keys["eagle3.embedding_length"]
        target_width = keys.get("eagle3.target_hidden_size")
        if target_width not in (None, width):
            return (
                f"eagle3.target_hidden_size={target_width}: {self.choice} has its target's "
                f"width, not {width}"
            )
        return super().find_unsupported(files) or find_foreign_rope(files)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        ids = files.tensors.get("d2t")
        if (
            ids is not None
            and len(ids.unique()) < len(ids)
            and len(target_ids(ids).unique()) == len(ids)
        ):
            yield Finding(
                "d2t-offsets",
                "error",
                "d2t holds offsets from draft ids where ids of the target belong",
                "llama.cpp reads them as ids, so almost every draft is another token",
                "add 0, 1, 2 and so on to it: spectrain convert the original files --to gguf",
            )
            return
        yield from super().findings(files)
        layers = files.config["eagle3.target_layers"]
        if len(layers) != NUM_FUSED_LAYERS:
            yield Finding(
                "layer-ids-count",
                "error",
                f"eagle3.target_layers={layers} has {len(layers)} entries",
                f"llama.cpp stops unless there are {NUM_FUSED_LAYERS}",
                "train it on three layers",
            )

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        yield from super().findings_with_target(files, target)
        layers = list(files.config["eagle3.target_layers"])
        default = default_layers(target.num_layers)
        if layers == [layer - 1 for layer in default]:
            yield Finding(
                "layer-ids-numbering",
                "warning",
                f"eagle3.target_layers={layers} look like SGLang's numbers of the default layers",
                "llama.cpp numbers the layer that a stream enters, one more than the layer that "
                "it leaves",
                f"write {default}, unless it was trained on these",
            )

    def interpretations(self, drafter: DrafterCheckpoint) -> Iterator[Interpretation]:
        yield unpermuted_interpretation(
            drafter, "llama.cpp rotates neighbours: write their rows in pairs"
        )

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        variants = variant_flags(drafter)
        for flag in ("norm_output", "fc_norm", "qk_norm"):
            if variants.get(flag):
                raise UserError(
                    f"{flag}: llama.cpp's EAGLE-3 has no such norm; train with "
                    f"drafter.architecture.{flag}=false"
                )
        if drafter.drafter["num_layers"] > 1:
            raise UserError(
                f"drafter.num_layers={drafter.drafter['num_layers']}: llama.cpp's EAGLE-3 has one "
                "layer; train with drafter.num_layers=1"
            )
        if drafter.drafter.get("window") is not None:
            raise UserError(
                f"drafter.window={drafter.drafter['window']}: llama.cpp's EAGLE-3 attends to all "
                "positions; train with drafter.window=null"
            )
        check_layer_count(drafter, target, "llama.cpp's EAGLE-3")
        unknown = sorted(
            name
            for name in drafter.tensors
            if name not in TENSOR_NAMES and name not in ("d2t", "t2d")
        )
        if unknown:
            raise UserError(
                f"{unknown[0]}: llama.cpp's EAGLE-3 has no such tensor; train without it, or use "
                "--to vllm"
            )

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        target = require_target(target, "the file holds its tokenizer and its layers")
        self.check_writable(drafter, target)
        config = drafter_layer_config(drafter)
        variants = variant_flags(drafter)
        layers = drafter.drafter["layers"]
        keys = {
            "general.name": f"EAGLE-3 for {target.name}",
            **size_keys("eagle3", config),
            "eagle3.target_layers": unnamed_layers(target) if layers is None else list(layers),
            "eagle3.target_hidden_size": config["hidden_size"],
            "eagle3.norm_before_residual": variants["norm_before_residual"],
            "eagle3.norm_before_fc": variants["norm_before_fc"],
        }
        tensors = convert_heads(drop_full_maps(drafter.tensors), config, to_file=True)
        self.write_file(
            directory, keys, self.layout_tensors(tensors) | rope_tensors(config), target
        )

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"llamacpp": DrafterLaunch("draft-eagle3", path, CHAIN_TOKENS)}
