"""What the layouts of DFlash, DSpark and DFlash2 share.

The embedding and the output layer are the target's. One layout numbers layers by what they give (`target_layer_ids`), one less
than the stream that enters the next, which the other (`aux_hidden_state_layer_ids`) and we name.
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
    "attention_sink": "an attention sink, which our layers have not",
    ".bias": "a bias, which our linears have not",
}
"""Parts of tensors' names -> what this is that a class of ours may have no place for."""
FIXED_VALUES: dict[str, Any] = {
    "attention_bias": False, "attention_sink_bias": False, "add_swa_attention_sink_bias": False, "hidden_act": "silu",
    "is_neox_style": True, "rope_is_neox_style": True, "attention_value_scale": 1.0, "logit_scale": 1.0,
}  # fmt: skip
"""Keys of config.json -> the only value that our classes can represent."""
LAYER_ID_OFFSETS = {"target_layer_ids": 1, "aux_hidden_state_layer_ids": 0, "eagle_aux_hidden_state_layer_ids": 0}
"""Keys that may say the fused layers -> what their ids lack to ours."""
SHIFTED_BLOCK_REASON = "every engine would serve it as a DFlash block, one token off"


class DFlashLayout(Layout):
    """A layout of a block drafter: `settings` says what config.json means, the rest is the same for all."""

    families = ("dflash",)
    family: ClassVar[BlockFamily] = DFLASH
    layer_id_offset: ClassVar[int]  # what ids of layers lack to ours
    name_prefixes: ClassVar[dict[str, str]] = NAME_PREFIXES  # how names of tensors begin, ours and the layout's

    @property
    def covers(self) -> tuple[str, ...]:
        return tuple(self.family.config_keys)

    @abstractmethod
    def parse_config(self, files: DrafterFiles) -> BlockConfig:
        """What config.json says, in our terms; a KeyError names what is missing."""

    def as_fused(self, files: DrafterFiles) -> tuple[FusedConfig, dict[str, Tensor]] | None:
        return self.parse_config(files), self.native_tensors(files)

    def native_tensors(self, files: DrafterFiles) -> dict[str, Tensor]:
        """The tensors under our names."""
        return {native_name(name, self.name_prefixes): tensor for name, tensor in files.tensors.items()}

    def layout_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors under the layout's names."""
        return {layout_name(name, self.name_prefixes): tensor for name, tensor in tensors.items()}

    def native_shapes(self, said: BlockConfig) -> dict[str, tuple[int | None, ...]]:
        """The tensors that the family always has, under our names."""
        return said.dflash_shapes | self.family.extra_shapes(said)

    def foreign_tensors(self, files: DrafterFiles) -> dict[str, str]:
        """Tensors that the family has no place for -> what they are."""
        mine = self.native_shapes(self.parse_config(files))
        parts = {part: what for part, what in FOREIGN_TENSORS.items() if part not in self.family.name_markers}
        strange = [name for name in files.tensors if native_name(name, self.name_prefixes) not in mine]
        told = {name: [what for part, what in parts.items() if part in name] for name in strange}
        return {name: what[0] for name, what in told.items() if what}

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        said, present = self.parse_config(files), {native_name(name, self.name_prefixes): name for name in files.tensors}
        required, head = self.native_shapes(said), {"lm_head.weight": (said.draft_rows, said.width), "d2t": (said.draft_rows,)}
        optional: dict[str, tuple[int | None, ...]] = {"embed_tokens.weight": (said.vocab_size, said.width)}
        if said.has_draft_vocabulary:
            required, optional = required | head, optional | {"t2d": (said.vocab_size,)}
        else:
            optional["lm_head.weight"] = head["lm_head.weight"]
        others = {name: (None,) * files.tensors[name].dim() for name in self.foreign_tensors(files)}
        named = (
            {present.get(name, layout_name(name, self.name_prefixes)): shape for name, shape in group.items()}
            for group in (required, optional)
        )
        required, optional = named
        return ExpectedTensors(required, {**others, **optional}, IGNORED_TENSORS)

    def find_unsupported(self, files: DrafterFiles) -> str | None:
        """What our class cannot represent, by the name of a tensor, a key or a file; None where it can all of it."""
        config, drafter = flatten_config(files.config), f"drafter={self.family.name}"
        for name, what in self.foreign_tensors(files).items():
            return f"{name} is {what}"
        for key, usual in FIXED_VALUES.items():
            if config.get(key, usual) not in (usual, None):
                return f"{key}={config[key]}: {drafter} has {key}={usual}"
        if config.get("enable_confidence_head") and config.get("confidence_head_with_markov") is False:
            return f"confidence_head_with_markov=False: the confidence head of {drafter} reads the token before, too"
        if len(kinds := sorted(set(config.get("layer_types") or []))) > 1:
            return f"layer_types mixes {' and '.join(kinds)}, and layers of {drafter} all see alike"
        wide = config.get("target_hidden_size")
        if wide is not None and wide != config["hidden_size"]:
            return f"target_hidden_size={wide}: {drafter} is as wide as its target, not {config['hidden_size']}"
        said = self.parse_config(files)
        if why := find_cell_conflict({**said.extra_settings, "sample_from_anchor": said.sample_from_anchor}):
            return why
        if (files.directory / "mask_embedding.pt").exists():
            return f"mask_embedding.pt is an embedding of the mask alone, for which {drafter} has no place"
        return None

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        why = self.find_unsupported(files)
        if why is not None:
            yield Finding("not-representable", "warning", why, "spectrain cannot score or fine-tune it", "nothing, to serve it")
            return
        said = self.parse_config(files)
        if said.sample_from_anchor and not self.family.is_shifted:
            yield Finding(
                "shifted-block", "error", "slot 0 of its blocks drafts too (sample_from_anchor, as DeepSpec trains)",
                    SHIFTED_BLOCK_REASON,
                "train with drafter.sample_from_anchor=false, or serve it as DSpark without a Markov head",
            )  # fmt: skip
        if said.has_draft_vocabulary and not self.family.allows_draft_vocabulary:
            yield Finding(
                "cut-vocabulary", "error", f"draft_vocab_size={said.draft_rows} of {said.vocab_size} tokens",
                f"every reader of {self.family.title} wants the whole vocabulary", "train with drafter.vocab_size=null",
            )  # fmt: skip
        if not 0 <= said.mask_token_id < said.vocab_size:
            yield Finding(
                "mask-token-range", "error", f"mask_token_id={said.mask_token_id}: the embedding has {said.vocab_size} rows",
                "engines put that token where drafts are asked for", "write the id that it was trained with",
            )  # fmt: skip
        config = flatten_config(files.config)
        ids = {key: config[key] for key in LAYER_ID_OFFSETS if config.get(key)}
        if len({tuple(id + LAYER_ID_OFFSETS[key] for id in said) for key, said in ids.items()}) > 1:
            yield Finding(
                "layer-ids-numbering", "error",
                f"{' and '.join(f'{key}={said}' for key, said in ids.items())} are not the same layers",
                "target_layer_ids counts what a layer gives, one less than the stream that the others name; engines differ in "
                "which they read", "write one of them, as it was trained",
            )  # fmt: skip

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        said = self.parse_config(files)
        assert said.layers is not None
        usual = default_layers(target.num_layers, len(said.layers))
        mistaken = [layer + (1 if self.layer_id_offset else -1) for layer in usual]
        if said.layers == mistaken:
            ids = [layer - self.layer_id_offset for layer in said.layers]
            yield Finding(
                "layer-ids-numbering", "warning", f"layer ids are {ids}, which look like the other layout's numbers",
                "target_layer_ids counts what a layer gives, one less than aux_hidden_state_layer_ids, the stream entering the "
                "next", f"write {[layer - self.layer_id_offset for layer in usual]}, unless it was trained on these",
            )  # fmt: skip
        if occurs_in_text(target.tokenizer, said.mask_token_id):
            token = target.tokenizer.convert_ids_to_tokens(said.mask_token_id)
            yield Finding(
                "mask-token-heard", "warning", f"mask_token_id={said.mask_token_id} is {token!r}, which texts hold",
                "where a text holds it, what was trained as a mask is read as a word",
                "write the id that it was trained with; train with one that no text holds",
            )  # fmt: skip

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        said, tensors = self.parse_config(files), self.native_tensors(files)
        why = self.find_unsupported(files)
        if why is not None:
            raise UserError(f"{files.directory}: {why}")
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(IGNORED_TENSORS)}
        embedding, head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
        if embedding is not None and target is not None and equal_when_rounded(embedding, target.load_embedding()):
            del tensors["embed_tokens.weight"]
        if head is not None and not said.has_draft_vocabulary:
            if target is None or not equal_when_rounded(head, target.load_head()):
                raise UserError(
                    f"{files.directory}: lm_head.weight has all {len(head)} rows, and over the whole vocabulary "
                    f"drafter={self.family.name} takes the target's"
                    f"{'; where it is the same, give --target' if target is None else ''}"
                )
            del tensors["lm_head.weight"]
        tensors["d2t"] = tensors.get("d2t", torch.zeros(said.draft_rows)).to(torch.int64)
        ids = tensors["d2t"] + torch.arange(said.draft_rows)
        marks = torch.zeros(said.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        tensors["t2d"] = tensors.get("t2d", marks).to(torch.bool)
        kept = files.read_metadata()
        drafter = {
            "_target_": self.family.constructor,
            **kept.drafter,
            **drafter_settings(said, "embed_tokens.weight" in tensors),
        }
        return DrafterCheckpoint(drafter, tensors, self.target_name(files), description=kept.description)

    def target_name(self, files: DrafterFiles) -> str | None:
        """The target that the files name."""
        return files.read_metadata().target

    def check_writable(self, drafter: DrafterCheckpoint) -> None:
        """Stop at what no layout can hold."""
        if drafter.drafter["sample_from_anchor"] and not self.family.is_shifted:
            raise UserError(
                f"sample_from_anchor: in a shifted block slot 0 drafts too, and {SHIFTED_BLOCK_REASON}; score "
                f"it with spectrain eval, or "
                "train with drafter.sample_from_anchor=false"
            )
        if "lm_head.bias" in drafter.tensors:
            raise UserError(
                f"lm_head.bias: output layers of engines' {self.family.title} have no bias, and the target's has one; train "
                "with drafter.vocab_size=null"
            )
        if why := find_cell_conflict(drafter.drafter):
            raise UserError(f"{why}; train with drafter.markov_head=gated")
        if not self.family.allows_draft_vocabulary and len(drafter.tensors["d2t"]) < len(drafter.tensors["t2d"]):
            raise UserError(
                f"d2t: it drafts {len(drafter.tensors['d2t'])} of {len(drafter.tensors['t2d'])} tokens, and every reader of "
                f"{self.family.title} wants the whole vocabulary; train with drafter.vocab_size=null"
            )


def occurs_in_text(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether texts may hold a token: an ordinary one, one that ends them, or one of the chat template."""
    if token >= len(tokenizer) or token == tokenizer.mask_token_id:
        return False
    added = tokenizer.added_tokens_decoder.get(token)
    if added is None or not added.special or token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        return True
    return isinstance(tokenizer.chat_template, str) and str(added) in tokenizer.chat_template
