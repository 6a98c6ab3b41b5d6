"""The layouts of block drafters that the speculators library writes and vLLM reads: DFlash,
DSpark and DFlash2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .dflash import DFLASH2, DSPARK, DFlashLayout, num_drafts, qwen3_layer, require_block_keys
from .fused import FusedConfig, flatten_config
from .layout import DrafterCheckpoint, DrafterFiles, Finding
from .speculators import SpeculatorsLayout, read_method
from .targets import TargetFiles


class SpeculatorsDFlash(SpeculatorsLayout, DFlashLayout):
    """The speculators layout of DFlash: its layer in `transformer_layer_config`, its target in
    `speculators_config`.
    """

    title = "DFlash, speculators layout"
    layer_id_offset = 0
    model_type = "dflash"
    architectures = ("DFlashSpeculator",)
    method: ClassVar[str] = "dflash"  # vLLM's name of it

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        config = files.config
        require_block_keys(
            flatten_config(config),
            (
                "block_size",
                "mask_token_id",
                "aux_hidden_state_layer_ids",
                "transformer_layer_config",
            ),
        )
        layer = config["transformer_layer_config"]
        slides = "sliding_attention" in (layer.get("layer_types") or [])
        settings = {
            "block_size": config["block_size"],
            "mask_token_id": config["mask_token_id"],
            "sample_from_anchor": bool(config.get("sample_from_anchor", self.family.is_shifted)),
            "causal": slides and self.trains_causal(config),
            "window": layer["sliding_window"] if slides else None,
            **self.family.read_settings(config),
        }
        return FusedConfig(
            layer,
            config["aux_hidden_state_layer_ids"],
            {},
            config.get("draft_vocab_size"),
            settings,
        )

    def trains_causal(self, config: dict[str, Any]) -> bool:
        """Tell whether the library trains layers with a window causally inside the block."""
        return not config.get("sliding_window_non_causal", True)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        yield from self.causality_findings(files)
        settings = self.parse_config(files).settings
        num_tokens = read_method(files).get("speculative_tokens") or 0
        num_slots = settings["block_size"] - (0 if settings["sample_from_anchor"] else 1)
        if num_tokens > num_slots:
            yield Finding(
                "too-many-tokens",
                "error",
                f"speculative_tokens is {num_tokens}, and a block of {settings['block_size']} "
                f"drafts {num_slots}",
                "engines run longer blocks than it was trained on",
                f"write {num_slots}",
            )

    def causality_findings(self, files: DrafterFiles) -> Iterator[Finding]:
        """Yield a fault where slots attend to other slots in an engine than in training."""
        non_causal = files.config.get("sliding_window_non_causal")
        types = files.config["transformer_layer_config"].get("layer_types")
        if non_causal is None and "sliding_attention" in (types or []):
            yield Finding(
                "block-causality-implicit",
                "error",
                "config.json lacks sliding_window_non_causal",
                "the default is true in vLLM and false in the speculators library, so a slot may "
                "attend to other slots than in training",
                "write the value that it was trained with",
            )
        if non_causal is False and "sliding_attention" not in (types or []):
            yield Finding(
                "block-causality",
                "error",
                "full-attention layers and sliding_window_non_causal is false",
                "the speculators library trains such layers in both directions regardless, and "
                "vLLM serves them causally",
                'write "sliding_window_non_causal": true, or spectrain convert DIR OUT --to vllm '
                "--target TARGET",
                is_repairable=True,
            )

    def layer_entries(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        return {**qwen3_layer(drafter), "architectures": ["Qwen3ForCausalLM"]}

    def family_entries(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        settings = drafter.drafter
        return {
            "block_size": settings["block_size"],
            "aux_hidden_state_layer_ids": settings["layers"],
            "mask_token_id": settings["mask_token_id"],
            "sample_from_anchor": settings["sample_from_anchor"],
            "sliding_window_non_causal": not settings["causal"],
            **self.family.config_entries(drafter),
            "target_hidden_size": None,
        }

    def num_drafts(self, drafter: DrafterCheckpoint) -> int:
        return num_drafts(drafter)

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        super().check_writable(drafter, target)
        if drafter.drafter["causal"] and drafter.drafter["window"] is None:
            raise UserError(
                "drafter.causal=true: the speculators library trains layers without a window in "
                "both directions and vLLM serves them as the file says, so no value suits both; "
                "train with drafter.window too"
            )

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"vllm": DrafterLaunch(self.method, path, num_drafts(drafter))}


class SpeculatorsDFlash2(SpeculatorsDFlash):
    """The speculators layout of DFlash2, with convolutions and a candidate selector."""

    title = "DFlash2, speculators layout"
    family = DFLASH2
    model_type = "dflash2"
    architectures = ("DFlash2DraftModel",)

    def causality_findings(self, files: DrafterFiles) -> Iterator[Finding]:
        # The default is true in both readers.
        findings = super().causality_findings(files)
        return (finding for finding in findings if finding.name != "block-causality-implicit")


class SpeculatorsDSpark(SpeculatorsDFlash):
    """The speculators layout of DSpark, with a Markov head and a confidence head.

    vLLM reads no causality from it: it serves layers with a window causally and others not.
    """

    title = "DSpark, speculators layout"
    family = DSPARK
    model_type = "dspark"
    architectures = ("DSparkSpeculator",)
    method = "dspark"

    def trains_causal(self, config: dict[str, Any]) -> bool:
        return not config.get("sliding_window_non_causal", False)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        if files.config.get("sample_from_anchor") is None:
            yield Finding(
                "anchor-implicit",
                "error",
                "config.json lacks sample_from_anchor",
                "the default is false in vLLM and true in the speculators library, so every draft "
                "may be one token off",
                "write the value that it was trained with",
            )

    def causality_findings(self, files: DrafterFiles) -> Iterator[Finding]:
        settings = self.parse_config(files).settings
        if settings["window"] is not None and not settings["causal"]:
            yield Finding(
                "block-causality",
                "error",
                "layers with a window and sliding_window_non_causal is true",
                "the speculators library trains them in both directions, and vLLM serves a DSpark "
                "with a window causally",
                "train with sliding_window_non_causal: false, or without a window",
                is_repairable=True,
            )

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        super().check_writable(drafter, target)
        if drafter.drafter["window"] is not None and not drafter.drafter["causal"]:
            raise UserError(
                f"drafter.window={drafter.drafter['window']}: vLLM serves a DSpark with a window "
                "causally; train with drafter.causal=true too, or without a window"
            )

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return (
            super().drafter_launches(drafter, files, path)
            if drafter.drafter["markov_head"] == "vanilla"
            else {}
        )
