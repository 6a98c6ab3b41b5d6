"""The family of DFlash and its relatives as files hold them. Spectrain's `blocks.N.` are
`layers.N.`, `markov.` is `markov_head.`.

Embedding and output layer are the target's. Two numberings of the fused layers exist:
`target_layer_ids` names a layer by its output, one less than the stream entering the next layer,
which `aux_hidden_state_layer_ids` and spectrain name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spectrain.drafters.layers.block_drafter import default_layers
from spectrain.errors import UserError

from .container import Finding
from .drafter_files import DrafterFiles
from .eagle3 import drafter_layer_config
from .fused import FOREIGN_PARTS, Export, FusedFamily, FusedFiles, FusedLayout
from .fused_config import (
    HEAD,
    SIZE_KEYS,
    equal_when_rounded,
    flatten_config,
    require_keys,
)
from .fused_findings import common_findings, common_target_findings, find_common_obstacle
from .layout import DrafterCheckpoint, ExpectedTensors, MissingTarget
from .table import list_packages
from .targets import TargetFiles

BLOCK_FOREIGN_PARTS = {
    "candidate_selector": "a selector of candidates, which DFlash2 has",
    "attention_conv": "a convolution over the block, which DFlash2 has",
    "mlp_conv": "a convolution over the block, which DFlash2 has",
    "markov_head": "a Markov head, which DSpark has",
    "confidence_head": "a confidence head, which DSpark has",
    "lilicorr.": "a correction by a lattice of candidates, which LiLiCorr has",
    "mask_hidden": "a hidden state for masks, which P-EAGLE has",
    "attention_sink": "an attention sink, which our layers lack",
    **{
        part: meaning
        for package in list_packages()
        for part, meaning in package.foreign_parts.items()
    },
    **FOREIGN_PARTS,
}
BLOCK_FIXED_VALUES = {
    "attention_bias": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "hidden_act": "silu",
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "attention_value_scale": 1.0,
    "logit_scale": 1.0,
}
NAME_PREFIXES = {"blocks.": "layers.", "markov.": "markov_head."}
"""Prefix of a tensor's name in spectrain -> in most layouts."""


@dataclass(frozen=True)
class BlockFamily(FusedFamily):
    """A family of block drafters, as its files differ from DFlash's."""

    title: str  # also the name of its class; in small letters, that of its choice
    config_keys: dict[str, str]  # setting of the family -> key of config.json
    own_parts: tuple[str, ...]  # parts of the names of its own tensors
    fixed_entries: dict[str, Any] = field(default_factory=dict)  # further entries of config.json
    is_shifted: bool = False  # its authors train with sample_from_anchor
    allows_draft_vocabulary: bool = True  # its readers accept a draft vocabulary
    foreign_parts = BLOCK_FOREIGN_PARTS
    fixed_values = BLOCK_FIXED_VALUES

    @property
    def choice(self) -> str:  # type: ignore[override]
        """The value of `drafter` and of `speculators_model_type`."""
        return self.title.lower()

    @property
    def covers(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.config_keys)

    def read_keys(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the family's own settings from config.json; raise KeyError naming the keys that
        are missing.
        """
        require_keys(config, tuple(self.config_keys.values()))
        return {setting: config[key] for setting, key in self.config_keys.items()}

    def config_entries(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        """Return the entries of config.json for the family's own settings."""
        return {
            **{key: drafter.drafter[setting] for setting, key in self.config_keys.items()},
            **self.fixed_entries,
        }

    def read_settings(self, source: FusedFiles, own_embedding: bool) -> dict[str, Any]:
        config = source.config
        values = {
            **config.settings,
            "num_layers": config.num_layers,
            "layers": config.layers,
            "vocab_size": config.draft_rows,
            "own_embedding": own_embedding,
            "architecture": config.architecture,
        }
        return {key: values[key] for key in (*BLOCK_SETTINGS, *self.config_keys)}

    def adjust_expected(self, source: FusedFiles, expected: ExpectedTensors) -> ExpectedTensors:
        if CONFIDENCE_WEIGHT in expected.required:
            # Some confidence heads do not read the preceding token; `find_block_obstacle` names
            # them.
            expected.required[CONFIDENCE_WEIGHT] = (1, None)
        return expected

    def read_head(
        self, source: FusedFiles, tensors: dict[str, Tensor], target: TargetFiles | None
    ) -> None:
        config = source.config
        if HEAD not in tensors or config.has_draft_vocabulary:
            return
        problem = (
            f"{source.files.directory}: {HEAD} has all {config.vocab_size} rows, and "
            f"drafter={self.choice} then uses the target's"
        )
        if target is None:
            raise MissingTarget(f"{problem}; if they are equal, give --target")
        if not equal_when_rounded(tensors[HEAD], target.load_head()):
            raise UserError(f"{problem}; train it with a draft vocabulary")
        del tensors[HEAD]


DFLASH = BlockFamily("DFlash", {}, ())
DSPARK = BlockFamily(
    "DSpark",
    {
        "markov_head": "markov_head_type",
        "rank": "markov_rank",
        "confidence": "enable_confidence_head",
    },
    ("markov_head", "confidence_head", "conf_proj"),
    {"confidence_head_with_markov": True},
    is_shifted=True,
)
DFLASH2 = BlockFamily(
    "DFlash2",
    {
        key: key
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    },
    ("candidate_selector", "attention_conv", "mlp_conv"),
    allows_draft_vocabulary=False,
)
LILICORR = BlockFamily(
    "LiLiCorr",
    {
        "top_k": "lilicorr_candidate_topk",
        "correction_width": "lilicorr_hidden_size",
        "correction_layers": "lilicorr_num_layers",
        "correction_heads": "lilicorr_num_heads",
        "correction_mlp_ratio": "lilicorr_mlp_ratio",
        "factor_width": "lilicorr_factor_dim",
        "vector_eps": "lilicorr_vector_eps",
        "logit_scale": "lilicorr_logit_scale",
    },
    ("lilicorr",),
    {"lilicorr_enabled": True},
    allows_draft_vocabulary=False,
)
FAMILIES = {family.choice: family for family in (DFLASH, DSPARK, DFLASH2, LILICORR)}

BLOCK_SETTINGS = (
    "block_size",
    "num_layers",
    "layers",
    "vocab_size",
    "sample_from_anchor",
    "causal",
    "window",
    "mask_token_id",
    "own_embedding",
    "architecture",
)
"""Settings of every block drafter that the files determine."""
LAYER_KEYS = (*SIZE_KEYS, "num_hidden_layers", "num_key_value_heads", "head_dim")
LAYER_ID_OFFSETS = {
    "target_layer_ids": 1,
    "aux_hidden_state_layer_ids": 0,
    "eagle_aux_hidden_state_layer_ids": 0,
}
"""Key of the fused layers -> what to add to its ids for spectrain's numbering."""
SHIFTED_BLOCK_REASON = "every engine would serve it as a DFlash block, one token off"
CONFIDENCE_WEIGHT = "confidence_head.proj.weight"


def block_family(layout: FusedLayout) -> BlockFamily:
    """Return the family of a layout of block drafters."""
    assert isinstance(layout.family, BlockFamily)
    return layout.family


def find_block_obstacle(source: FusedFiles) -> str | None:
    """Describe what no block drafter or not this one can represent."""
    config = flatten_config(source.files.config)
    conflict = find_cell_conflict(source.config.settings)
    if conflict is not None:
        return conflict
    if config.get("enable_confidence_head") and config.get("confidence_head_with_markov") is False:
        return (
            f"confidence_head_with_markov=False: the confidence head of {source.layout.choice} "
            "reads the preceding token, too"
        )
    if (source.files.directory / "mask_embedding.pt").exists():
        return (
            "mask_embedding.pt is a separate embedding of the mask, which "
            f"{source.layout.choice} lacks"
        )
    return None


OBSTACLES = (find_common_obstacle, find_block_obstacle)


def block_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield the faults of every layout of block drafters."""
    yield from common_findings(source)
    if source.obstacle is not None:
        return
    family = block_family(source.layout)
    config = source.config
    mask_token = config.settings["mask_token_id"]
    if config.settings["sample_from_anchor"] and not family.is_shifted:
        yield Finding(
            "shifted-block",
            "error",
            "slot 0 of its blocks drafts too (sample_from_anchor, as DeepSpec trains)",
            SHIFTED_BLOCK_REASON,
            "train with drafter.sample_from_anchor=false, or serve it as DSpark without a "
            "Markov head",
        )
    if config.has_draft_vocabulary and not family.allows_draft_vocabulary:
        yield Finding(
            "cut-vocabulary",
            "error",
            f"draft_vocab_size={config.draft_rows} of {config.vocab_size} tokens",
            f"every reader of {family.title} needs the full vocabulary",
            "train with drafter.vocab_size=null",
        )
    if not 0 <= mask_token < config.vocab_size:
        yield Finding(
            "mask-token-range",
            "error",
            f"mask_token_id={mask_token}: the embedding has {config.vocab_size} rows",
            "engines put that token into every slot to draft",
            "write the id that it was trained with",
        )
    values = flatten_config(source.files.config)
    ids = {key: values[key] for key in LAYER_ID_OFFSETS if values.get(key)}
    streams = {
        tuple(id + LAYER_ID_OFFSETS[key] for id in layer_ids) for key, layer_ids in ids.items()
    }
    if len(streams) > 1:
        yield Finding(
            "layer-ids-numbering",
            "error",
            f"{' and '.join(f'{key}={layer_ids}' for key, layer_ids in ids.items())} are not "
            "the same layers",
            "target_layer_ids numbers a layer's output, one less than the stream that the "
            "others number; engines differ in which they read",
            "keep the key that it was trained with",
        )
    yield from markov_findings(source.files)


def block_target_findings(source: FusedFiles, target: TargetFiles) -> Iterator[Finding]:
    """Yield what contradicts the target: settings, the numbering of layers and the mask token."""
    yield from common_target_findings(source, target)
    config = source.config
    assert config.layers is not None
    default = default_layers(target.num_layers, len(config.layers))
    mask_token = config.settings["mask_token_id"]
    offset = source.layout.layer_id_offset
    if config.layers == [layer + (1 if offset else -1) for layer in default]:
        yield Finding(
            "layer-ids-numbering",
            "warning",
            f"layer ids {[layer - offset for layer in config.layers]} look like "
            "the other layout's numbers",
            "target_layer_ids numbers a layer's output, one less than "
            "aux_hidden_state_layer_ids, the stream entering the next",
            f"write {[layer - offset for layer in default]}, unless it was trained on these",
        )
    if occurs_in_text(target.tokenizer, mask_token):
        yield Finding(
            "mask-token-heard",
            "warning",
            f"mask_token_id={mask_token} is "
            f"{target.tokenizer.convert_ids_to_tokens(mask_token)!r}, which occurs in texts",
            "a drafter that was trained to read it as a mask reads it as text, too",
            "write the id that it was trained with; train with a token that no text holds",
        )


def check_block(export: Export) -> None:
    """Raise UserError where no layout can hold the drafter."""
    family = block_family(export.layout)
    if export.settings["sample_from_anchor"] and not family.is_shifted:
        raise UserError(
            "sample_from_anchor: in a shifted block slot 0 drafts too, and "
            f"{SHIFTED_BLOCK_REASON}; score it with spectrain eval, or train with "
            "drafter.sample_from_anchor=false"
        )
    if "lm_head.bias" in export.tensors:
        raise UserError(
            f"lm_head.bias: output layers of engines' {family.title} have no bias, and "
            "the target's has one; train with drafter.vocab_size=null"
        )
    if conflict := find_cell_conflict(export.settings):
        raise UserError(f"{conflict}; train with drafter.markov_head=gated")
    if not family.allows_draft_vocabulary:
        refuse_draft_vocabulary(
            export.drafter, f"every reader of {family.title} needs the full vocabulary; train"
        )


def require_block_keys(config: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Raise KeyError naming every missing key, those of the layers included."""
    has_rope = any(config.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling"))
    require_keys(config, (*keys, *LAYER_KEYS, *(() if has_rope else ("rope_theta",))))


def qwen3_layer(drafter: DrafterCheckpoint) -> dict[str, Any]:
    """Return the drafter's layers as a Qwen3 configuration."""
    count = drafter.drafter["num_layers"]
    window = drafter.drafter["window"]
    layer = {
        key: value for key, value in drafter_layer_config(drafter).items() if key != "mlp_bias"
    }
    return {
        **layer,
        "model_type": "qwen3",
        "num_hidden_layers": count,
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * count,
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


def refuse_draft_vocabulary(drafter: DrafterCheckpoint, reason: str) -> None:
    """Raise UserError where the drafter drafts a part of the vocabulary."""
    rows = len(drafter.tensors["d2t"])
    vocab = len(drafter.tensors["t2d"])
    if rows < vocab:
        raise UserError(
            f"d2t: it drafts {rows} of {vocab} tokens, and {reason} with drafter.vocab_size=null"
        )


def num_drafts(drafter: DrafterCheckpoint) -> int:
    """Return the number of tokens that a block drafts."""
    return int(drafter.drafter["block_size"]) - (0 if drafter.drafter["sample_from_anchor"] else 1)


def find_cell_conflict(settings: dict[str, Any]) -> str | None:
    """Describe the fault of an RNN Markov head in blocks whose anchor drafts nothing; return
    None where there is none.
    """
    if settings.get("markov_head") == "rnn" and not settings["sample_from_anchor"]:
        return (
            "markov_head=rnn and sample_from_anchor=false: the speculators library runs the cell "
            "over slot 0 too, which drafts nothing, and drafter=dspark does not"
        )
    return None


def markov_findings(files: DrafterFiles) -> Iterator[Finding]:
    """Yield the keys of DSpark that its readers interpret differently."""
    kind = files.config.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        yield Finding(
            "markov-head",
            "warning",
            f"markov_head_type is {kind}",
            "vLLM supports only vanilla; SGLang supports all three",
            "serve it with SGLang, in the flat layout, or train with drafter.markov_head=vanilla",
        )
    if (
        files.config.get("enable_confidence_head")
        and files.config.get("confidence_head_with_markov") is None
    ):
        yield Finding(
            "confidence-implicit",
            "error",
            "config.json lacks confidence_head_with_markov",
            "the default is false in vLLM and true in the speculators library, so the head may "
            "read another input",
            "write the value that it was trained with",
        )


def occurs_in_text(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Tell whether texts may hold a token: an ordinary token, an end token, or one of the chat
    template.
    """
    if token >= len(tokenizer) or token == tokenizer.mask_token_id:
        return False
    added = tokenizer.added_tokens_decoder.get(token)
    if (
        added is None
        or not added.special
        or token in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    ):
        return True
    return isinstance(tokenizer.chat_template, str) and str(added) in tokenizer.chat_template
