"""What the files of DSpark and DFlash2 hold beside DFlash's layers: tensors, and keys of config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .block_settings import BlockConfig
from .layout import DrafterCheckpoint, DrafterFiles, Finding

Shapes = dict[str, tuple[int | None, ...]]


@dataclass(frozen=True)
class BlockFamily:
    """One of them."""

    name: str  # as `drafter` and `speculators_model_type` say it
    title: str
    constructor: str
    config_keys: dict[str, str]  # our settings of its own parts -> keys of config.json
    name_markers: tuple[str, ...]  # how the names of its own tensors are told
    extra_shapes: Callable[[BlockConfig], Shapes]  # of these, under our names
    is_shifted: bool = False  # what sample_from_anchor is where it trains as its authors do
    allows_draft_vocabulary: bool = True  # whether readers take a part of the vocabulary

    def read_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """Our settings of its own parts; a KeyError names what is missing."""
        missing = [key for key in self.config_keys.values() if config.get(key) is None]
        if missing:
            raise KeyError(", ".join(missing))
        return {mine: config[key] for mine, key in self.config_keys.items()}

    def config_entries(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The keys of config.json for our settings."""
        return {key: settings[mine] for mine, key in self.config_keys.items()}


def markov_shapes(said: BlockConfig) -> Shapes:
    """Of DSpark's Markov head and its confidence head."""
    rank, width = said.extra_settings["rank"], said.width
    shapes: Shapes = {"markov.markov_w1.weight": (said.vocab_size, rank), "markov.markov_w2.weight": (said.draft_rows, rank)}
    if said.extra_settings["markov_head"] == "gated":
        shapes |= {"markov.gate_proj.weight": (rank, width + rank), "markov.gate_proj.bias": (rank,)}
    if said.extra_settings["markov_head"] == "rnn":
        shapes |= {"markov.joint_proj.weight": (3 * rank, 2 * rank + width), "markov.joint_proj.bias": (3 * rank,)}
    if said.extra_settings["confidence"]:
        shapes |= {"confidence_head.proj.weight": (1, None), "confidence_head.proj.bias": (1,)}
    return shapes


def selector_shapes(said: BlockConfig) -> Shapes:
    """Of DFlash2's convolutions and its selector."""
    width, taps, rank = said.width, said.extra_settings["conv_kernel_size"], said.extra_settings["selector_rank"]
    kernels = 2 * taps * width // said.extra_settings["conv_group_size"]
    shapes: Shapes = {
        "candidate_selector.predecessor_codebook": (said.vocab_size, rank),
        "candidate_selector.successor_codebook": (said.vocab_size, rank),
        "candidate_selector.hidden_projection.weight": (rank, width),
    }
    for conv in (f"blocks.{number}.{part}_conv" for number in range(said.num_layers) for part in ("attention", "mlp")):
        shapes |= {f"{conv}.base_kernel": (2, taps, width), f"{conv}.kernel_projection.weight": (kernels, width)}
    return shapes


def dspark_config(drafter: DrafterCheckpoint) -> dict[str, Any]:
    """DSpark's heads, as both of its layouts say them."""
    return {**DSPARK.config_entries(drafter.drafter), "confidence_head_with_markov": True}


def find_cell_conflict(said: dict[str, Any]) -> str | None:
    """What is wrong with a Markov head's cell in blocks whose anchor drafts nothing; None where nothing is."""
    if said.get("markov_head") == "rnn" and not said["sample_from_anchor"]:
        return (
            "markov_head=rnn and sample_from_anchor=false: the speculators library runs the cell over slot 0 too, which drafts "
            "nothing, and drafter=dspark does not"
        )
    return None


def markov_findings(files: DrafterFiles) -> Iterator[Finding]:
    """What readers of DSpark take differently."""
    kind = files.config.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        yield Finding(
            "markov-head", "warning", f"markov_head_type is {kind}", "vLLM has the vanilla one alone; SGLang has all three",
            "serve it with SGLang, in the flat layout, or train with drafter.markov_head=vanilla",
        )  # fmt: skip
    if files.config.get("enable_confidence_head") and files.config.get("confidence_head_with_markov") is None:
        yield Finding(
            "confidence-implicit", "error", "config.json does not say confidence_head_with_markov",
            "vLLM takes false where it is missing and the speculators library true, so the head reads another input",
            "write the value that it was trained with",
        )  # fmt: skip


DFLASH = BlockFamily("dflash", "DFlash", "spectrain.drafters.dflash.DFlash", {}, (), lambda said: {})
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
