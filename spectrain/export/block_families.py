"""What the files of DSpark and DFlash2 hold in addition to DFlash's layers: tensors and keys of config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .block_settings import BlockConfig
from .layout import DrafterCheckpoint, DrafterFiles, Finding

Shapes = dict[str, tuple[int | None, ...]]


@dataclass(frozen=True)
class BlockFamily:
    """A family of block drafters, as its files differ from DFlash's."""

    name: str  # value of `drafter` and of `speculators_model_type`
    title: str
    constructor: str
    config_keys: dict[str, str]  # setting of the family -> key of config.json
    name_markers: tuple[str, ...]  # parts of the names of its own tensors
    extra_shapes: Callable[[BlockConfig], Shapes]  # of its own tensors, under spectrain's names
    is_shifted: bool = False  # its authors train with sample_from_anchor
    allows_draft_vocabulary: bool = True  # its readers accept a draft vocabulary

    def read_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the family's own settings from config.json; raise KeyError naming the keys that are missing."""
        missing = [key for key in self.config_keys.values() if config.get(key) is None]
        if missing:
            raise KeyError(", ".join(missing))
        return {setting: config[key] for setting, key in self.config_keys.items()}

    def config_entries(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of config.json for the family's own settings."""
        return {key: settings[setting] for setting, key in self.config_keys.items()}


def markov_shapes(config: BlockConfig) -> Shapes:
    """Return the shapes of DSpark's Markov head and confidence head."""
    rank, width = config.extra_settings["rank"], config.width
    shapes: Shapes = {
        "markov.markov_w1.weight": (config.vocab_size, rank),
        "markov.markov_w2.weight": (config.draft_rows, rank),
    }
    if config.extra_settings["markov_head"] == "gated":
        shapes |= {"markov.gate_proj.weight": (rank, width + rank), "markov.gate_proj.bias": (rank,)}
    if config.extra_settings["markov_head"] == "rnn":
        shapes |= {"markov.joint_proj.weight": (3 * rank, 2 * rank + width), "markov.joint_proj.bias": (3 * rank,)}
    if config.extra_settings["confidence"]:
        shapes |= {"confidence_head.proj.weight": (1, None), "confidence_head.proj.bias": (1,)}
    return shapes


def selector_shapes(config: BlockConfig) -> Shapes:
    """Return the shapes of DFlash2's convolutions and candidate selector."""
    width, taps, rank = config.width, config.extra_settings["conv_kernel_size"], config.extra_settings["selector_rank"]
    kernels = 2 * taps * width // config.extra_settings["conv_group_size"]
    shapes: Shapes = {
        "candidate_selector.predecessor_codebook": (config.vocab_size, rank),
        "candidate_selector.successor_codebook": (config.vocab_size, rank),
        "candidate_selector.hidden_projection.weight": (rank, width),
    }
    for conv in (f"blocks.{number}.{part}_conv" for number in range(config.num_layers) for part in ("attention", "mlp")):
        shapes |= {f"{conv}.base_kernel": (2, taps, width), f"{conv}.kernel_projection.weight": (kernels, width)}
    return shapes


def dspark_config(drafter: DrafterCheckpoint) -> dict[str, Any]:
    """Return the entries of config.json for DSpark's heads, which both of its layouts hold."""
    return {**DSPARK.config_entries(drafter.drafter), "confidence_head_with_markov": True}


def find_cell_conflict(settings: dict[str, Any]) -> str | None:
    """Describe the fault of an RNN Markov head in blocks whose anchor drafts nothing; return None where there is none."""
    if settings.get("markov_head") == "rnn" and not settings["sample_from_anchor"]:
        return (
            "markov_head=rnn and sample_from_anchor=false: the speculators library runs the cell over slot 0 too, which drafts "
            "nothing, and drafter=dspark does not"
        )
    return None


def markov_findings(files: DrafterFiles) -> Iterator[Finding]:
    """Yield the keys of DSpark that its readers interpret differently."""
    kind = files.config.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        yield Finding(
            "markov-head", "warning", f"markov_head_type is {kind}", "vLLM supports only vanilla; SGLang supports all three",
            "serve it with SGLang, in the flat layout, or train with drafter.markov_head=vanilla",
        )  # fmt: skip
    if files.config.get("enable_confidence_head") and files.config.get("confidence_head_with_markov") is None:
        yield Finding(
            "confidence-implicit", "error", "config.json lacks confidence_head_with_markov",
            "the default is false in vLLM and true in the speculators library, so the head may read another input",
            "write the value that it was trained with",
        )  # fmt: skip


DFLASH = BlockFamily("dflash", "DFlash", "spectrain.drafters.dflash.DFlash", {}, (), lambda config: {})
DSPARK = BlockFamily(
    "dspark", "DSpark", "spectrain.drafters.dspark.DSpark",
    {"markov_head": "markov_head_type", "rank": "markov_rank", "confidence": "enable_confidence_head"},
    ("markov_head", "confidence_head"), markov_shapes, is_shifted=True,
)  # fmt: skip
SELECTOR_SETTINGS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DFLASH2 = BlockFamily(
    "dflash2", "DFlash2", "spectrain.drafters.dflash2.DFlash2", {key: key for key in SELECTOR_SETTINGS},
    ("candidate_selector", "attention_conv", "mlp_conv"), selector_shapes, allows_draft_vocabulary=False,
)  # fmt: skip
FAMILIES = {family.name: family for family in (DFLASH, DSPARK, DFLASH2)}
