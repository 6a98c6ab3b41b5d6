"""The base of the layouts of DFlash, DSpark and DFlash2.

Embedding and output layer are the target's. Two numberings of the fused layers exist: `target_layer_ids` names a layer by its
output, one less than the stream entering the next layer, which `aux_hidden_state_layer_ids` and spectrain name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spectrain.drafters.layers.block_drafter import default_layers
from spectrain.errors import UserError

from .block_families import DFLASH, BlockFamily, find_cell_conflict
from .block_settings import NAME_PREFIXES, BlockConfig, drafter_settings, flatten_config, layout_name, native_name
from .eagle3 import IGNORED_TENSORS, equal_when_rounded
from .fused_settings import FusedConfig
from .layout import DrafterCheckpoint, DrafterFiles, ExpectedTensors, Finding, Layout
from .targets import TargetFiles

FOREIGN_TENSORS = {
    "candidate_selector": "a selector of candidates, which DFlash2 has",
    "attention_conv": "a convolution over the block, which DFlash2 has",
    "mlp_conv": "a convolution over the block, which DFlash2 has",
    "markov_head": "a Markov head, which DSpark has",
    "confidence_head": "a confidence head, which DSpark has",
    "mask_hidden": "a hidden state for masks, which P-EAGLE has",
    "attention_sink": "an attention sink, which our layers lack",
    ".bias": "a bias, which our linears lack",
}
"""Part of a tensor's name -> what the tensor is; a family holds only those that its `name_markers` list."""
FIXED_VALUES: dict[str, Any] = {
    "attention_bias": False, "attention_sink_bias": False, "add_swa_attention_sink_bias": False, "hidden_act": "silu",
    "is_neox_style": True, "rope_is_neox_style": True, "attention_value_scale": 1.0, "logit_scale": 1.0,
}  # fmt: skip
"""Key of config.json -> the only value that spectrain's classes can represent."""
LAYER_ID_OFFSETS = {"target_layer_ids": 1, "aux_hidden_state_layer_ids": 0, "eagle_aux_hidden_state_layer_ids": 0}
"""Key of the fused layers -> what to add to its ids for spectrain's numbering."""
SHIFTED_BLOCK_REASON = "every engine would serve it as a DFlash block, one token off"


class DFlashLayout(Layout):
    """The base of a block drafter's layouts: `parse_config` translates config.json, all else is shared."""

    family: ClassVar[BlockFamily] = DFLASH
    layer_id_offset: ClassVar[int]  # spectrain's layer ids minus the layout's
    name_prefixes: ClassVar[dict[str, str]] = NAME_PREFIXES  # spectrain's -> the layout's

    @property
    def covers(self) -> tuple[str, ...]:
        return tuple(self.family.config_keys)

    @abstractmethod
    def parse_config(self, files: DrafterFiles) -> BlockConfig:
        """Translate config.json into spectrain's terms; raise KeyError naming the keys that are missing."""

    def as_fused(self, files: DrafterFiles) -> tuple[FusedConfig, dict[str, Tensor]] | None:
        return self.parse_config(files), self.native_tensors(files)

    def native_tensors(self, files: DrafterFiles) -> dict[str, Tensor]:
        """Return the tensors under spectrain's names."""
        return {native_name(name, self.name_prefixes): tensor for name, tensor in files.tensors.items()}

    def layout_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under the layout's names."""
        return {layout_name(name, self.name_prefixes): tensor for name, tensor in tensors.items()}

    def native_shapes(self, config: BlockConfig) -> dict[str, tuple[int | None, ...]]:
        """Return the shapes of the tensors that the family always has, under spectrain's names."""
        return config.dflash_shapes | self.family.extra_shapes(config)

    def foreign_tensors(self, files: DrafterFiles) -> dict[str, str]:
        """Return the tensors that the family cannot hold, each with a description."""
        shapes = self.native_shapes(self.parse_config(files))
        parts = {part: what for part, what in FOREIGN_TENSORS.items() if part not in self.family.name_markers}
        unknown = [name for name in files.tensors if native_name(name, self.name_prefixes) not in shapes]
        matches = {name: [what for part, what in parts.items() if part in name] for name in unknown}
        return {name: descriptions[0] for name, descriptions in matches.items() if descriptions}

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        config, present = self.parse_config(files), {native_name(name, self.name_prefixes): name for name in files.tensors}
        required = self.native_shapes(config)
        head = {"lm_head.weight": (config.draft_rows, config.width), "d2t": (config.draft_rows,)}
        optional: dict[str, tuple[int | None, ...]] = {"embed_tokens.weight": (config.vocab_size, config.width)}
        if config.has_draft_vocabulary:
            required, optional = required | head, optional | {"t2d": (config.vocab_size,)}
        else:
            optional["lm_head.weight"] = head["lm_head.weight"]
        foreign = {name: (None,) * files.tensors[name].dim() for name in self.foreign_tensors(files)}
        renamed = (
            {present.get(name, layout_name(name, self.name_prefixes)): shape for name, shape in group.items()}
            for group in (required, optional)
        )
        required, optional = renamed
        return ExpectedTensors(required, {**foreign, **optional}, IGNORED_TENSORS)

    def find_unsupported(self, files: DrafterFiles) -> str | None:
        """Describe the first tensor, key or file that spectrain's class cannot represent; return None where there is none."""
        config, drafter = flatten_config(files.config), f"drafter={self.family.name}"
        for name, what in self.foreign_tensors(files).items():
            return f"{name} is {what}"
        for key, fixed in FIXED_VALUES.items():
            if config.get(key, fixed) not in (fixed, None):
                return f"{key}={config[key]}: {drafter} has {key}={fixed}"
        if config.get("enable_confidence_head") and config.get("confidence_head_with_markov") is False:
            return f"confidence_head_with_markov=False: the confidence head of {drafter} reads the preceding token, too"
        if len(kinds := sorted(set(config.get("layer_types") or []))) > 1:
            return f"layer_types mixes {' and '.join(kinds)}, and all layers of {drafter} attend alike"
        target_width = config.get("target_hidden_size")
        if target_width is not None and target_width != config["hidden_size"]:
            return f"target_hidden_size={target_width}: {drafter} has its target's width, not {config['hidden_size']}"
        block_config = self.parse_config(files)
        if conflict := find_cell_conflict(
            {**block_config.extra_settings, "sample_from_anchor": block_config.sample_from_anchor}
        ):
            return conflict
        if (files.directory / "mask_embedding.pt").exists():
            return f"mask_embedding.pt is a separate embedding of the mask, which {drafter} lacks"
        return None

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        problem = self.find_unsupported(files)
        if problem is not None:
            yield Finding(
                "not-representable", "warning", problem, "spectrain cannot score or fine-tune it", "nothing, to serve it"
            )
            return
        config = self.parse_config(files)
        if config.sample_from_anchor and not self.family.is_shifted:
            yield Finding(
                "shifted-block", "error", "slot 0 of its blocks drafts too (sample_from_anchor, as DeepSpec trains)",
                SHIFTED_BLOCK_REASON,
                "train with drafter.sample_from_anchor=false, or serve it as DSpark without a Markov head",
            )  # fmt: skip
        if config.has_draft_vocabulary and not self.family.allows_draft_vocabulary:
            yield Finding(
                "cut-vocabulary", "error", f"draft_vocab_size={config.draft_rows} of {config.vocab_size} tokens",
                f"every reader of {self.family.title} needs the full vocabulary", "train with drafter.vocab_size=null",
            )  # fmt: skip
        if not 0 <= config.mask_token_id < config.vocab_size:
            yield Finding(
                "mask-token-range", "error",
                f"mask_token_id={config.mask_token_id}: the embedding has {config.vocab_size} rows",
                "engines put that token into every slot to draft", "write the id that it was trained with",
            )  # fmt: skip
        values = flatten_config(files.config)
        ids = {key: values[key] for key in LAYER_ID_OFFSETS if values.get(key)}
        if len({tuple(id + LAYER_ID_OFFSETS[key] for id in layer_ids) for key, layer_ids in ids.items()}) > 1:
            yield Finding(
                "layer-ids-numbering", "error",
                f"{' and '.join(f'{key}={layer_ids}' for key, layer_ids in ids.items())} are not the same layers",
                "target_layer_ids numbers a layer's output, one less than the stream that the others number; engines differ in "
                "which they read", "keep the key that it was trained with",
            )  # fmt: skip

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        config = self.parse_config(files)
        assert config.layers is not None
        default = default_layers(target.num_layers, len(config.layers))
        misnumbered = [layer + (1 if self.layer_id_offset else -1) for layer in default]
        if config.layers == misnumbered:
            ids = [layer - self.layer_id_offset for layer in config.layers]
            yield Finding(
                "layer-ids-numbering", "warning", f"layer ids {ids} look like the other layout's numbers",
                "target_layer_ids numbers a layer's output, one less than aux_hidden_state_layer_ids, the stream entering "
                "the next", f"write {[layer - self.layer_id_offset for layer in default]}, unless it was trained on these",
            )  # fmt: skip
        if occurs_in_text(target.tokenizer, config.mask_token_id):
            token = target.tokenizer.convert_ids_to_tokens(config.mask_token_id)
            yield Finding(
                "mask-token-heard", "warning", f"mask_token_id={config.mask_token_id} is {token!r}, which occurs in texts",
                "a drafter that was trained to read it as a mask reads it as text, too",
                "write the id that it was trained with; train with a token that no text holds",
            )  # fmt: skip

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        config, tensors = self.parse_config(files), self.native_tensors(files)
        problem = self.find_unsupported(files)
        if problem is not None:
            raise UserError(f"{files.directory}: {problem}")
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(IGNORED_TENSORS)}
        embedding, head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
        if embedding is not None and target is not None and equal_when_rounded(embedding, target.load_embedding()):
            del tensors["embed_tokens.weight"]
        if head is not None and not config.has_draft_vocabulary:
            if target is None or not equal_when_rounded(head, target.load_head()):
                raise UserError(
                    f"{files.directory}: lm_head.weight has all {len(head)} rows, and with the full vocabulary "
                    f"drafter={self.family.name} uses the target's"
                    f"{'; if they are equal, give --target' if target is None else ''}"
                )
            del tensors["lm_head.weight"]
        tensors["d2t"] = tensors.get("d2t", torch.zeros(config.draft_rows)).to(torch.int64)
        ids = tensors["d2t"] + torch.arange(config.draft_rows)
        mask = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        tensors["t2d"] = tensors.get("t2d", mask).to(torch.bool)
        metadata = files.read_metadata()
        drafter = {
            "_target_": self.family.constructor,
            **metadata.drafter,
            **drafter_settings(config, "embed_tokens.weight" in tensors),
        }
        return DrafterCheckpoint(drafter, tensors, self.target_name(files), description=metadata.description)

    def target_name(self, files: DrafterFiles) -> str | None:
        """Return the target that the files name."""
        return files.read_metadata().target

    def check_writable(self, drafter: DrafterCheckpoint) -> None:
        """Raise UserError where no layout can hold the drafter."""
        if drafter.drafter["sample_from_anchor"] and not self.family.is_shifted:
            raise UserError(
                f"sample_from_anchor: in a shifted block slot 0 drafts too, and {SHIFTED_BLOCK_REASON}; "
                "score it with spectrain eval, or train with drafter.sample_from_anchor=false"
            )
        if "lm_head.bias" in drafter.tensors:
            raise UserError(
                f"lm_head.bias: output layers of engines' {self.family.title} have no bias, and the target's has one; train "
                "with drafter.vocab_size=null"
            )
        if conflict := find_cell_conflict(drafter.drafter):
            raise UserError(f"{conflict}; train with drafter.markov_head=gated")
        if not self.family.allows_draft_vocabulary and len(drafter.tensors["d2t"]) < len(drafter.tensors["t2d"]):
            raise UserError(
                f"d2t: it drafts {len(drafter.tensors['d2t'])} of {len(drafter.tensors['t2d'])} tokens, and every reader of "
                f"{self.family.title} needs the full vocabulary; train with drafter.vocab_size=null"
            )


def occurs_in_text(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Tell whether texts may hold a token: an ordinary token, an end token, or one of the chat template."""
    if token >= len(tokenizer) or token == tokenizer.mask_token_id:
        return False
    added = tokenizer.added_tokens_decoder.get(token)
    if added is None or not added.special or token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        return True
    return isinstance(tokenizer.chat_template, str) and str(added) in tokenizer.chat_template
