"""The flat layouts of block drafters: DFlash and DFlash2 as z-lab publishes them and DSpark as
DeepSpec does, which SGLang and vLLM read, and DFlash for transformers.

Layer ids number a layer's output, one less than the stream entering the next layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .dflash import (
    DFLASH2,
    DSPARK,
    LILICORR,
    DFlashLayout,
    qwen3_layer,
    refuse_draft_vocabulary,
    require_block_keys,
)
from .fused import EMBEDDING, HEAD, FusedConfig, equal_when_rounded, flat_rope, flatten_config
from .huggingface import generate_snippet
from .layout import (
    DrafterCheckpoint,
    DrafterFiles,
    Finding,
    require_target,
    write_json,
    write_tensors,
)
from .targets import TargetFiles

CAUSAL_KEYS = ("causal", "causal_head")
"""Keys that say that a block attends causally: the one that vLLM reads, and JetSpec's own."""
DEEPSPEC_ARCHITECTURE = "Qwen3DSparkModel"  # DeepSpec's DFlash has it, too, with markov_rank 0


class FlatDFlash(DFlashLayout):
    """The flat layout of DFlash: `dflash_config` in a flat Qwen3 configuration.

    Full-attention layers attend to the block in both directions, sliding ones causally.
    """

    title = "DFlash, flat layout"
    engine: ClassVar[str] = "SGLang"  # that refusals name
    layer_id_offset = 1
    architectures: ClassVar[tuple[str, ...]] = ("DFlashDraftModel", DEEPSPEC_ARCHITECTURE)

    def matches_files(self, files: DrafterFiles) -> bool:
        is_block = self.has_architecture(files) or "dflash_config" in files.config
        return is_block and "speculators_model_type" not in files.config

    def has_architecture(self, files: DrafterFiles) -> bool:
        has_prefix = any(
            name.startswith("DFlash") for name in files.config.get("architectures") or []
        )
        return has_prefix or super().has_architecture(files)

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        config = flatten_config(files.config)
        require_block_keys(config, ("block_size", "mask_token_id", "target_layer_ids"))
        slides = "sliding_attention" in (config.get("layer_types") or [])
        window = None
        if slides or config.get("use_swa"):
            window = config.get("swa_window_size") or config["sliding_window"]
        flags = [config.get(key) for key in ("is_causal", *CAUSAL_KEYS)]
        causal = next(value for value in (*flags, slides) if value is not None)
        shifted = config.get(
            "sample_from_anchor", DEEPSPEC_ARCHITECTURE in (config.get("architectures") or [])
        )
        settings = {
            "block_size": config["block_size"],
            "mask_token_id": config["mask_token_id"],
            "sample_from_anchor": bool(shifted),
            "causal": bool(causal),
            "window": window,
            **self.family.read_settings(config),
        }
        layers = [layer + self.layer_id_offset for layer in config["target_layer_ids"]]
        return FusedConfig(config, layers, {}, config.get("draft_vocab_size"), settings)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        yield from self.architecture_findings(files)
        ignored = [name for name in (HEAD, EMBEDDING) if name in self.native_tensors(files)]
        if ignored and DEEPSPEC_ARCHITECTURE not in (files.config.get("architectures") or []):
            yield Finding(
                "ignored-head",
                "error",
                f"the files hold {' and '.join(ignored)}",
                "SGLang silently uses the target's instead; only vLLM reads them",
                "serve it with vLLM: spectrain convert DIR OUT --to vllm --target TARGET",
                is_repairable=True,
            )

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        self.check_writable(drafter, target)
        write_json(directory / "config.json", self.make_config(drafter, target))
        own = {
            name: tensor
            for name, tensor in drafter.tensors.items()
            if name not in ("d2t", "t2d", EMBEDDING)
        }
        tensors = self.layout_tensors(own | self.borrowed_tensors(drafter, target))
        write_tensors(directory / "model.safetensors", tensors)

    def make_config(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> dict[str, Any]:
        """Return config.json."""
        layer = qwen3_layer(drafter)
        rope = layer.pop("rope_parameters")
        return {
            "architectures": [self.architectures[0]],
            **layer,
            **flat_rope(rope),
            "num_target_layers": None if target is None else target.num_layers,
            "block_size": drafter.drafter["block_size"],
            **self.extra_config(drafter),
            "torch_dtype": drafter.dtype,
            "use_cache": True,
        }

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        super().check_writable(drafter, target)
        settings = drafter.drafter
        refuse_draft_vocabulary(
            drafter, f"{self.engine} uses the target's full output layer; use --to vllm, or train"
        )
        embedding = drafter.tensors.get(EMBEDDING)
        if embedding is not None and (
            target is None or not equal_when_rounded(embedding, target.load_embedding())
        ):
            raise UserError(
                f"{EMBEDDING}: {self.engine} uses the target's embedding, and this drafter has "
                "its own; use --to vllm"
            )
        self.check_causality(settings)
        if min(settings["layers"]) < 1:
            raise UserError(
                "layers: target_layer_ids cannot number the stream entering layer 0; use --to vllm"
            )

    def check_causality(self, settings: dict[str, Any]) -> None:
        """Raise UserError where readers would attend to other slots of a block than in training."""
        if settings["causal"] != (settings["window"] is not None):
            raise UserError(
                f"drafter.causal={str(settings['causal']).lower()}, "
                f"drafter.window={settings['window']}: SGLang treats layers with a window as "
                "causal and others as not; use --to vllm"
            )

    def extra_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        """Return the entries of config.json that do not describe the layers."""
        return {
            "dflash_config": {
                **self.mask_and_layers(drafter),
                **self.family.config_entries(drafter),
            }
        }

    def mask_and_layers(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        """Return the mask token and the fused layers."""
        settings = drafter.drafter
        return {
            "mask_token_id": settings["mask_token_id"],
            "target_layer_ids": [layer - 1 for layer in settings["layers"]],
        }

    def borrowed_tensors(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None
    ) -> dict[str, Tensor]:
        """Return the target's tensors that the files hold."""
        return {}

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        num_tokens = drafter.drafter["block_size"] - 1
        return {
            "sglang": DrafterLaunch("DFLASH", path, num_tokens),
            "vllm": DrafterLaunch("dflash", path, num_tokens),
        }


class FlatDFlash2(FlatDFlash):
    """The flat layout of DFlash2, with the settings of convolutions and selector in
    `dflash_config`.
    """

    title = "DFlash2, flat layout"
    family = DFLASH2
    architectures = ("DFlash2DraftModel",)

    def matches_files(self, files: DrafterFiles) -> bool:
        return self.architectures[0] in (files.config.get("architectures") or [])


class FlatLiLiCorr(FlatDFlash2):
    """The flat layout of LiLiCorr, with the settings of the correction in `dflash_config`;
    engines draft whole blocks.
    """

    title = "LiLiCorr, flat layout"
    family = LILICORR
    architectures = ("LiLiCorrDraftModel",)

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        super().check_writable(drafter, target)
        if drafter.drafter["top_k"] not in (1, 2, 4, 8, 16):
            raise UserError(
                f"drafter.top_k={drafter.drafter['top_k']}: engines need a power of two up to 16"
            )


class FlatDSpark(FlatDFlash):
    """The flat layout of DSpark: all keys at the top level, and the target's embedding and
    output layer among the tensors.
    """

    title = "DSpark, flat layout"
    family = DSPARK
    architectures = (DEEPSPEC_ARCHITECTURE,)
    replaced_tensors = (EMBEDDING, HEAD)

    def matches_files(self, files: DrafterFiles) -> bool:
        has_architecture = self.architectures[0] in (files.config.get("architectures") or [])
        return (
            has_architecture
            and files.config.get("markov_rank") != 0
            and "speculators_model_type" not in files.config
        )

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        if not drafter.drafter["sample_from_anchor"]:
            raise UserError(
                "drafter.sample_from_anchor=false: DeepSpec's layout of DSpark has no key for it, "
                "and in engines every slot drafts the token after its own position; use --to vllm"
            )
        super().check_writable(drafter, target)

    def extra_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        num_anchors = drafter.drafter.get("num_anchors", 512)
        return {
            **self.mask_and_layers(drafter),
            "num_anchors": num_anchors,
            **self.family.config_entries(drafter),
        }

    def borrowed_tensors(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None
    ) -> dict[str, Tensor]:
        target = require_target(target, "the files hold its two layers of tokens")
        dtype = drafter.tensors["fc.weight"].dtype
        return {EMBEDDING: target.load_embedding().to(dtype), HEAD: target.load_head().to(dtype)}

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        size = drafter.drafter["block_size"]
        launches = {"sglang": DrafterLaunch("DSPARK", path, size)}
        if drafter.drafter["markov_head"] == "vanilla":
            launches["vllm"] = DrafterLaunch("dspark", path, size)
        return launches


class TransformersDFlash(FlatDFlash):
    """The layout of DFlash for transformers, whose class for it is MuseGlimmerAssistantModel: all
    keys at the top level.

    A block attends in both directions, and embedding and output layer are always the target's.
    """

    title = "DFlash, transformers"
    architectures = ("MuseGlimmerAssistantModel",)
    model_type: ClassVar[str] = "muse_glimmer_assistant"
    name_prefixes: ClassVar[dict[str, str]] = {
        **DFlashLayout.name_prefixes,
        "fc.": "encoder.fc.",
        "hidden_norm.": "encoder.output_norm_enc.",
    }

    def matches_files(self, files: DrafterFiles) -> bool:
        return files.config.get("model_type") == self.model_type

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from DFlashLayout.findings(self, files)

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        super().check_writable(drafter, target)
        if drafter.drafter["window"] is not None:
            raise UserError(
                f"drafter.window={drafter.drafter['window']}: transformers applies a window to "
                "both sides of a slot; use --to vllm, or train with drafter.window=null"
            )

    def make_config(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> dict[str, Any]:
        return {
            **{key: value for key, value in qwen3_layer(drafter).items() if "sliding" not in key},
            "model_type": self.model_type,
            "architectures": [self.architectures[0]],
            "block_size": drafter.drafter["block_size"],
            **self.mask_and_layers(drafter),
            "dtype": drafter.dtype,
            **({} if target is None else target.special_token_ids),
        }

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {}

    def python_snippets(self, drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
        assistant = (
            f'assistant_model=AutoModel.from_pretrained("{path}"), speculation_type="dflash"'
        )
        return {
            "transformers": generate_snippet(
                target, assistant, "AutoModel, AutoModelForCausalLM, AutoTokenizer"
            )
        }
