"""The flat layout of EAGLE-3 that SpecForge, ModelOpt and EAGLE write and SGLang reads: one
config.json, no embedding.

Layer ids are SGLang's: k names the output of layer k, one less than the layer that this stream
enters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from spectrain.drafters.layers.eagle_layers import engine_layers
from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .eagle3 import (
    NUM_FUSED_LAYERS,
    Eagle3Layout,
    check_layer_count,
    drafter_layer_config,
    variant_flags,
)
from .fused import EMBEDDING, SIZE_KEYS, FusedConfig, equal_when_rounded, flat_rope, require_keys
from .layout import (
    CHAIN_TOKENS,
    DrafterCheckpoint,
    DrafterFiles,
    Finding,
    write_json,
    write_tensors,
)
from .targets import TargetFiles
from .vocabulary import drop_full_maps

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm")


class FlatEagle3(Eagle3Layout):
    """The flat layout of EAGLE-3, with `midlayer.` names.

    It holds ids of the fused layers only where they are not the default, because vLLM's numbers are
    one higher.
    """

    title = "EAGLE-3, flat layout"
    engine: ClassVar[str] = "SGLang"  # that refusals name
    prefix = "midlayer."
    architectures = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
    layer_id_offset: ClassVar[int] = 1  # spectrain's layer ids minus the layout's
    replaced_tensors: ClassVar[tuple[str, ...]] = (EMBEDDING,)
    # whether d2t and t2d are written for a full draft vocabulary, too
    keeps_full_maps: ClassVar[bool] = False

    def matches_files(self, files: DrafterFiles) -> bool:
        has_tensors = "fc.weight" in files.tensors or any(
            "hidden_norm" in name for name in files.tensors
        )
        is_other_layout = "speculators_model_type" in files.config or "drafter" in files.config
        return not is_other_layout and (self.has_architecture(files) or has_tensors)

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        config = files.config
        require_keys(config, SIZE_KEYS)
        layer_ids = self._layer_ids(config)
        return FusedConfig(
            config,
            None if layer_ids is None else [layer + self.layer_id_offset for layer in layer_ids],
            {key: bool(config.get(key, False)) for key in NORM_FLAGS}
            | {"qk_norm": any(".q_norm." in name for name in files.tensors)},
            config.get("draft_vocab_size"),
        )

    def _layer_ids(self, config: dict[str, Any]) -> list[int] | None:
        nested = config.get("eagle_config") or {}
        return nested.get("eagle_aux_hidden_state_layer_ids") or config.get(
            "eagle_aux_hidden_state_layer_ids"
        )

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        config = files.config
        yield from self.architecture_findings(files)
        if config.get("norm_output") is False:
            yield Finding(
                "norm-output-ambiguous",
                "error",
                "norm_output is false: SpecForge means no norm before the output layer",
                "other readers interpret it as the feedback of normed states, and apply the norm",
                "train it with the norm",
            )
        yield from self.numbering_findings(files)

    def numbering_findings(self, files: DrafterFiles) -> Iterator[Finding]:
        """Yield the faults that the ids of the fused layers show without a target."""
        ids = self._layer_ids(files.config)
        if ids is not None and ids == engine_layers(max(ids) + 3):
            yield Finding(
                "layer-ids-numbering",
                "warning",
                f"eagle_aux_hidden_state_layer_ids={ids} look like vLLM's numbers: 2, the middle, "
                "three before the end",
                "SGLang adds one to them, so it would fuse the layers after those; vLLM uses them "
                "unchanged",
                "leave them out, because they are the default of both",
            )
        if ids is not None and len(ids) != NUM_FUSED_LAYERS:
            yield Finding(
                "layer-ids-count",
                "warning",
                f"eagle_aux_hidden_state_layer_ids={ids} names {len(ids)} layers",
                "SGLang fuses three",
                "serve it with vLLM: spectrain convert DIR OUT --to vllm --target TARGET",
            )

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        yield from super().findings_with_target(files, target)
        default = engine_layers(target.num_layers)
        if default is not None and self._layer_ids(files.config) == default:
            yield Finding(
                "layer-ids-numbering",
                "error",
                f"layer ids are {default}, the default in vLLM's numbers",
                "SGLang adds one to them and fuses the layers after those",
                "leave them out: it is the default of both",
            )

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        self.check_writable(drafter, target)
        variants = variant_flags(drafter)
        tensors = self.file_tensors(drafter)
        layer = drafter_layer_config(drafter)
        rope = layer.pop("rope_parameters")
        config = {
            "architectures": [self.architectures[2 if variants["qk_norm"] else 0]],
            **layer,
            **flat_rope(rope),
            "draft_vocab_size": len(tensors["d2t"]),
            **{key: variants[key] for key in NORM_FLAGS},
            "torch_dtype": drafter.dtype,
            "use_cache": True,
        }
        if target is not None:
            config |= target.special_token_ids
        write_json(directory / "config.json", config | self.extra_config(drafter, target))
        tensors = tensors if self.keeps_full_maps else drop_full_maps(tensors)
        write_tensors(directory / "model.safetensors", self.layout_tensors(tensors))

    def file_tensors(self, drafter: DrafterCheckpoint) -> dict[str, Tensor]:
        """Return the tensors that the files hold."""
        return {name: tensor for name, tensor in drafter.tensors.items() if name != EMBEDDING}

    def extra_config(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None
    ) -> dict[str, Any]:
        """Return further entries of config.json: here the fused layers where they are not the
        default.
        """
        layers = drafter.drafter.get("layers")
        if layers is None or (target is not None and layers == engine_layers(target.num_layers)):
            return {}
        ids = [layer - self.layer_id_offset for layer in layers]
        return {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        }

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        """Raise UserError where this layout has no key for a setting."""
        variants = variant_flags(drafter)
        if variants["norm_output"]:
            raise UserError(
                "norm_output: in the flat layout this flag means a norm before the output layer, "
                "so it cannot describe a drafter that feeds normed states back; use --to vllm"
            )
        unsupported = {
            "num_layers": drafter.drafter["num_layers"] > 1,
            "window": drafter.drafter.get("window") is not None,
        }
        for key, is_used in (unsupported | {"qk_norm": variants["qk_norm"]}).items():
            if is_used:
                raise UserError(
                    f"drafter.{key}: {self.engine}'s EAGLE-3 is one full-attention layer without "
                    "head norms; use --to vllm"
                )
        check_layer_count(drafter, target, self.engine)
        embedding = drafter.tensors.get(EMBEDDING)
        if embedding is not None and (
            target is None or not equal_when_rounded(embedding, target.load_embedding())
        ):
            raise UserError(
                f"embed_tokens.weight: {self.engine} uses the target's embedding, and this "
                "drafter has its own"
                + ("; if they are equal, give --target" if target is None else "; use --to vllm")
            )
        if min(drafter.drafter.get("layers") or [1]) < 1 and self.extra_config(drafter, target):
            raise UserError(
                f"layers: {self.engine} cannot fuse the stream that enters layer 0; use the "
                "format vllm"
            )

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        launches = {"sglang": DrafterLaunch("EAGLE3", path, CHAIN_TOKENS)}
        # vLLM's numbers of other layers are one higher.
        if drafter.drafter.get("layers") in (None, engine_layers(files.num_layers)):
            launches["vllm"] = DrafterLaunch("eagle3", path, CHAIN_TOKENS)
        return launches
