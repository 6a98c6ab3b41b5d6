"""DFlash, DSpark and DFlash2 as the speculators library writes them and vLLM reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from spectrain.errors import UserError

from .block_families import DFLASH2, DSPARK, dspark_config, markov_findings
from .block_settings import BlockConfig, flatten_config, qwen3_layer, require_keys
from .dflash import DFlashLayout
from .layout import DrafterCheckpoint, DrafterFiles, Finding, require_target, write_json, write_tensors
from .serving import serve_vllm
from .speculators import SPECULATORS_VERSION, common_layer_config, proposal_config, proposal_findings, verifier_name
from .targets import TargetFiles


class SpeculatorsDFlash(DFlashLayout):
    """The layer under `transformer_layer_config`, the target under `speculators_config`."""

    name = "vllm"
    title = "DFlash, speculators layout"
    layer_id_offset = 0
    architecture: ClassVar[str] = "DFlashSpeculator"
    method: ClassVar[str] = "dflash"  # as vLLM calls it

    def matches_files(self, files: DrafterFiles) -> bool:
        return files.config.get("speculators_model_type") == self.family.name

    def parse_config(self, files: DrafterFiles) -> BlockConfig:
        config = files.config
        require_keys(
            flatten_config(config), ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "transformer_layer_config")
        )
        layer = config["transformer_layer_config"]
        slides = "sliding_attention" in (layer.get("layer_types") or [])
        shifted = config.get("sample_from_anchor", self.family.is_shifted)
        return BlockConfig(
            layer, config["aux_hidden_state_layer_ids"], {}, config.get("draft_vocab_size"), config["block_size"],
            config["mask_token_id"], bool(shifted), slides and self.trains_causal(config),
            layer["sliding_window"] if slides else None, self.family.read_settings(config),
        )  # fmt: skip

    def trains_causal(self, config: dict[str, Any]) -> bool:
        """Whether the library trains layers with a window causal inside the block."""
        return not config.get("sliding_window_non_causal", True)

    def target_name(self, files: DrafterFiles) -> str | None:
        return verifier_name(files) or super().target_name(files)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        yield from proposal_findings(files)
        yield from self.num_tokens_findings(files)
        yield from self.causality_findings(files)

    def num_tokens_findings(self, files: DrafterFiles) -> Iterator[Finding]:
        """Whether an engine is told to draft more than a block has slots for."""
        methods = (files.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        said = self.parse_config(files)
        asked, slots = methods[0].get("speculative_tokens") or 0, said.block_size - (0 if said.sample_from_anchor else 1)
        if asked > slots:
            yield Finding(
                "too-many-tokens", "error", f"speculative_tokens is {asked}, and a block of {said.block_size} drafts {slots}",
                "engines run longer blocks than it was trained on", f"write {slots}",
            )  # fmt: skip

    def causality_findings(self, files: DrafterFiles) -> Iterator[Finding]:
        """Whether slots see in an engine what they saw in training."""
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

    def write(self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path) -> None:
        target = require_target(target, "the files name it")
        self.check_writable(drafter)
        said, tensors = drafter.drafter, dict(drafter.tensors)
        rows, vocab = len(tensors["d2t"]), len(tensors["t2d"])
        if rows == vocab:
            del tensors["d2t"], tensors["t2d"]
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "speculators_model_type": self.family.name,
            "speculators_version": SPECULATORS_VERSION,
            "dtype": drafter.dtype,
            "tie_word_embeddings": False,
            "draft_vocab_size": rows,
            "block_size": said["block_size"],
            "aux_hidden_state_layer_ids": said["layers"],
            "mask_token_id": said["mask_token_id"],
            "sample_from_anchor": said["sample_from_anchor"],
            "sliding_window_non_causal": not said["causal"],
            **self.family_config(drafter),
            "target_hidden_size": None,
            "transformer_layer_config": {
                **qwen3_layer(drafter),
                "architectures": ["Qwen3ForCausalLM"],
                **common_layer_config(target),
            },
            "speculators_config": proposal_config(self.family.name, num_drafts(drafter), target),
        }
        write_json(directory / "config.json", config)
        write_tensors(directory / "model.safetensors", self.layout_tensors(tensors))

    def family_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        """Keys of what the family has beside DFlash's layers."""
        return self.family.config_entries(drafter.drafter)

    def check_writable(self, drafter: DrafterCheckpoint) -> None:
        super().check_writable(drafter)
        if drafter.drafter["causal"] and drafter.drafter["window"] is None:
            raise UserError(
                "drafter.causal=true: the speculators library trains layers without a window both ways and vLLM serves them as "
                "the file says, so it cannot be said to both; train with drafter.window too"
            )

    def serve_commands(self, drafter: DrafterCheckpoint, files: TargetFiles, target: str, drafter_path: str) -> dict[str, str]:
        drafting = {"method": self.method, "model": drafter_path, "num_speculative_tokens": num_drafts(drafter)}
        return {"vLLM": serve_vllm(target, drafting)}


class SpeculatorsDFlash2(SpeculatorsDFlash):
    """The same with convolutions and a selector."""

    title = "DFlash2, speculators layout"
    families = ("dflash2",)
    family = DFLASH2
    architecture = "DFlash2DraftModel"

    def causality_findings(self, files: DrafterFiles) -> Iterator[Finding]:
        found = super().causality_findings(files)
        return (finding for finding in found if finding.name != "block-causality-implicit")  # here both take true


class SpeculatorsDSpark(SpeculatorsDFlash):
    """The same with a Markov head and a confidence head. vLLM reads no causality here: layers with a window are causal to it,
    others not."""

    title = "DSpark, speculators layout"
    families = ("dspark",)
    family = DSPARK
    architecture = "DSparkSpeculator"
    method = "dspark"

    def trains_causal(self, config: dict[str, Any]) -> bool:
        return not config.get("sliding_window_non_causal", False)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        yield from markov_findings(files)
        if files.config.get("sample_from_anchor") is None:
            yield Finding(
                "anchor-implicit", "error", "config.json does not say sample_from_anchor",
                "vLLM takes false where it is missing and the speculators library true, so every draft is one token off",
                "write the value that it was trained with",
            )  # fmt: skip

    def causality_findings(self, files: DrafterFiles) -> Iterator[Finding]:
        said = self.parse_config(files)
        if said.slot_window is not None and not said.causal:
            yield Finding(
                "block-causality", "error", "layers with a window and sliding_window_non_causal is true",
                "the speculators library trains them both ways, and vLLM serves a DSpark with a window as causal",
                "train with sliding_window_non_causal: false, or without a window",
            )  # fmt: skip

    def family_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        return dspark_config(drafter)

    def check_writable(self, drafter: DrafterCheckpoint) -> None:
        super().check_writable(drafter)
        if drafter.drafter["window"] is not None and not drafter.drafter["causal"]:
            raise UserError(
                f"drafter.window={drafter.drafter['window']}: vLLM serves a DSpark with a window as causal; train with "
                "drafter.causal=true too, or without a window"
            )

    def serve_commands(self, drafter: DrafterCheckpoint, files: TargetFiles, target: str, drafter_path: str) -> dict[str, str]:
        return (
            super().serve_commands(drafter, files, target, drafter_path) if drafter.drafter["markov_head"] == "vanilla" else {}
        )


def num_drafts(drafter: DrafterCheckpoint) -> int:
    """Tokens that a block drafts."""
    said = drafter.drafter
    return int(said["block_size"]) - (0 if said["sample_from_anchor"] else 1)
