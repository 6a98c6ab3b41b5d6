"""The flat layouts of block drafters for SGLang and vLLM: DFlash and DFlash2 as z-lab publishes them, DSpark as DeepSpec does.

Layer ids number a layer's output, one less than the stream entering the next layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from spectrain.errors import UserError

from .block_families import DFLASH2, DSPARK, dspark_config, markov_findings
from .block_settings import BlockConfig, flatten_config, qwen3_layer, require_keys
from .dflash import DFlashLayout
from .eagle3 import equal_when_rounded
from .fused_settings import flat_rope
from .layout import DrafterCheckpoint, DrafterFiles, Finding, require_target, write_json, write_tensors
from .serving import serve_sglang_block, serve_sglang_dspark, serve_vllm
from .targets import TargetFiles

DEEPSPEC_ARCHITECTURE = "Qwen3DSparkModel"  # DeepSpec's DFlash has it, too, with markov_rank 0


class FlatDFlash(DFlashLayout):
    """The flat layout of DFlash: `dflash_config` in a flat Qwen3 configuration.

    Full-attention layers attend to the block in both directions, sliding ones causally.
    """

    title = "DFlash, flat layout"
    layer_id_offset = 1
    architecture: ClassVar[str] = "DFlashDraftModel"

    def matches_files(self, files: DrafterFiles) -> bool:
        has_architecture = any(
            name.startswith("DFlash") or name == DEEPSPEC_ARCHITECTURE for name in files.config.get("architectures") or []
        )
        return (has_architecture or "dflash_config" in files.config) and "speculators_model_type" not in files.config

    def parse_config(self, files: DrafterFiles) -> BlockConfig:
        config = flatten_config(files.config)
        require_keys(config, ("block_size", "mask_token_id", "target_layer_ids"))
        slides, window = "sliding_attention" in (config.get("layer_types") or []), None
        if slides or config.get("use_swa"):
            window = config.get("swa_window_size") or config["sliding_window"]
        causal = next(value for value in (config.get("is_causal"), config.get("causal"), slides) if value is not None)
        shifted = config.get("sample_from_anchor", DEEPSPEC_ARCHITECTURE in (config.get("architectures") or []))
        layers = [layer + 1 for layer in config["target_layer_ids"]]
        return BlockConfig(
            config, layers, {}, config.get("draft_vocab_size"),
            config["block_size"], config["mask_token_id"], bool(shifted), bool(causal), window,
                self.family.read_settings(config),
        )  # fmt: skip

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        names = files.config.get("architectures") or []
        if not any(name.startswith("DFlash") or name == DEEPSPEC_ARCHITECTURE for name in names):
            yield Finding(
                "architecture", "error", f"architectures={names}",
                f"engines choose the class by it: they expect {self.architecture}", f'write ["{self.architecture}"]',
            )  # fmt: skip
        ignored = [name for name in ("lm_head.weight", "embed_tokens.weight") if name in self.native_tensors(files)]
        if ignored and DEEPSPEC_ARCHITECTURE not in names:
            yield Finding(
                "ignored-head", "error", f"the files hold {' and '.join(ignored)}",
                "SGLang silently uses the target's instead; only vLLM reads them",
                "serve it with vLLM: spectrain convert DIR OUT --to vllm --target TARGET", is_repairable=True,
            )  # fmt: skip

    def write(self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path) -> None:
        self.check_flat_writable(drafter, target)
        tensors = {
            name: tensor for name, tensor in drafter.tensors.items() if name not in ("d2t", "t2d", "embed_tokens.weight")
        }
        layer = qwen3_layer(drafter)
        rope = layer.pop("rope_parameters")
        config = {
            "architectures": [self.architecture],
            **layer,
            **flat_rope(rope),
            "num_target_layers": None if target is None else target.num_layers,
            "block_size": drafter.drafter["block_size"],
            **self.extra_config(drafter),
            "torch_dtype": drafter.dtype,
            "use_cache": True,
        }
        write_json(directory / "config.json", config)
        tensors |= self.borrowed_tensors(drafter, target)
        write_tensors(directory / "model.safetensors", self.layout_tensors(tensors))

    def check_flat_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        """Raise UserError where this layout has no key for a setting."""
        self.check_writable(drafter)
        settings, tensors = drafter.drafter, drafter.tensors
        if len(tensors["d2t"]) < len(tensors["t2d"]):
            raise UserError(
                f"d2t: it drafts {len(tensors['d2t'])} of {len(tensors['t2d'])} tokens, and SGLang uses the target's full "
                "output layer; use --to vllm, or train with drafter.vocab_size=null"
            )
        embedding = tensors.get("embed_tokens.weight")
        if embedding is not None and (target is None or not equal_when_rounded(embedding, target.load_embedding())):
            raise UserError(
                "embed_tokens.weight: SGLang uses the target's embedding, and this drafter has its own; use --to vllm"
            )
        if settings["causal"] != (settings["window"] is not None):
            raise UserError(
                f"drafter.causal={str(settings['causal']).lower()}, drafter.window={settings['window']}: SGLang treats "
                "layers with a window as causal and others as not; use --to vllm"
            )
        if min(settings["layers"]) < 1:
            raise UserError("layers: target_layer_ids cannot number the stream entering layer 0; use --to vllm")

    def extra_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        """Return the entries of config.json that do not describe the layers."""
        return {"dflash_config": {**self.mask_and_layers(drafter), **self.family.config_entries(drafter.drafter)}}

    def mask_and_layers(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        """Return the mask token and the fused layers."""
        settings = drafter.drafter
        return {"mask_token_id": settings["mask_token_id"], "target_layer_ids": [layer - 1 for layer in settings["layers"]]}

    def borrowed_tensors(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> dict[str, Tensor]:
        """Return the target's tensors that the files hold."""
        return {}

    def serve_commands(self, drafter: DrafterCheckpoint, files: TargetFiles, target: str, drafter_path: str) -> dict[str, str]:
        size = drafter.drafter["block_size"]
        drafting = {"method": "dflash", "model": drafter_path, "num_speculative_tokens": size - 1}
        return {"SGLang": serve_sglang_block(target, "DFLASH", drafter_path, size), "vLLM": serve_vllm(target, drafting)}


class FlatDFlash2(FlatDFlash):
    """The flat layout of DFlash2, with the settings of convolutions and selector in `dflash_config`."""

    title = "DFlash2, flat layout"
    family = DFLASH2
    architecture = "DFlash2DraftModel"

    def matches_files(self, files: DrafterFiles) -> bool:
        return self.architecture in (files.config.get("architectures") or [])


class FlatDSpark(FlatDFlash):
    """The flat layout of DSpark: all keys at the top level, and the target's embedding and output layer among the tensors."""

    title = "DSpark, flat layout"
    family = DSPARK
    architecture = DEEPSPEC_ARCHITECTURE

    def matches_files(self, files: DrafterFiles) -> bool:
        has_architecture = self.architecture in (files.config.get("architectures") or [])
        return has_architecture and files.config.get("markov_rank") != 0 and "speculators_model_type" not in files.config

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        yield from markov_findings(files)

    def check_flat_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        if not drafter.drafter["sample_from_anchor"]:
            raise UserError(
                "drafter.sample_from_anchor=false: DeepSpec's layout of DSpark has no key for it, and in engines every slot "
                "drafts the token after its own position; use --to vllm"
            )
        super().check_flat_writable(drafter, target)

    def extra_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        num_anchors = drafter.drafter.get("num_anchors", 512)
        return {**self.mask_and_layers(drafter), "num_anchors": num_anchors, **dspark_config(drafter)}

    def borrowed_tensors(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> dict[str, Tensor]:
        target, dtype = (
            require_target(target, "the files hold its embedding and output layer"),
            drafter.tensors["fc.weight"].dtype,
        )
        return {"embed_tokens.weight": target.load_embedding().to(dtype), "lm_head.weight": target.load_head().to(dtype)}

    def serve_commands(self, drafter: DrafterCheckpoint, files: TargetFiles, target: str, drafter_path: str) -> dict[str, str]:
        size = drafter.drafter["block_size"]
        commands = {"SGLang": serve_sglang_dspark(target, drafter_path, size)}
        if drafter.drafter["markov_head"] == "vanilla":
            commands["vLLM"] = serve_vllm(target, {"method": "dspark", "model": drafter_path, "num_speculative_tokens": size})
        return commands
