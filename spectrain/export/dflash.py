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

from spectrain.drafters.shared.block_drafter import default_layers
from spectrain.errors import UserError

from .block_families import DFLASH, BlockFamily, cell_from_the_anchor
from .block_settings import RENAMED, BlockConfig, plain, settings_from, spread, theirs
from .eagle3 import IGNORED, same
from .fused_settings import Settings
from .layout import Expected, Files, Finding, Layout, Portable
from .targets import TargetFiles

OTHERS = {
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
USUAL: dict[str, Any] = {
    "attention_bias": False, "attention_sink_bias": False, "add_swa_attention_sink_bias": False, "hidden_act": "silu",
    "is_neox_style": True, "rope_is_neox_style": True, "attention_value_scale": 1.0, "logit_scale": 1.0,
}  # fmt: skip
"""Keys of config.json -> the only value that our classes can represent."""
NUMBERINGS = {"target_layer_ids": 1, "aux_hidden_state_layer_ids": 0, "eagle_aux_hidden_state_layer_ids": 0}
"""Keys that may say the fused layers -> what their ids lack to ours."""
NEVER = "every engine would serve it as a DFlash block, one token off"


class DFlashLayout(Layout):
    """A layout of a block drafter: `settings` says what config.json means, the rest is the same for all."""

    families = ("dflash",)
    family: ClassVar[BlockFamily] = DFLASH
    shift: ClassVar[int]  # what ids of layers lack to ours
    renamed: ClassVar[dict[str, str]] = RENAMED  # how names of tensors begin, ours and the layout's

    @property
    def says(self) -> tuple[str, ...]:
        return tuple(self.family.keys)

    @abstractmethod
    def settings(self, files: Files) -> BlockConfig:
        """What config.json says, in our terms; a KeyError names what is missing."""

    def held(self, files: Files) -> tuple[Settings, dict[str, Tensor]] | None:
        return self.settings(files), self.view(files)

    def view(self, files: Files) -> dict[str, Tensor]:
        """The tensors under our names."""
        return {plain(name, self.renamed): tensor for name, tensor in files.tensors.items()}

    def written(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors under the layout's names."""
        return {theirs(name, self.renamed): tensor for name, tensor in tensors.items()}

    def shapes(self, said: BlockConfig) -> dict[str, tuple[int | None, ...]]:
        """The tensors that the family always has, under our names."""
        return said.shapes | self.family.shapes(said)

    def others(self, files: Files) -> dict[str, str]:
        """Tensors that the family has no place for -> what they are."""
        mine = self.shapes(self.settings(files))
        parts = {part: what for part, what in OTHERS.items() if part not in self.family.own}
        strange = [name for name in files.tensors if plain(name, self.renamed) not in mine]
        told = {name: [what for part, what in parts.items() if part in name] for name in strange}
        return {name: what[0] for name, what in told.items() if what}

    def expected(self, files: Files) -> Expected:
        said, present = self.settings(files), {plain(name, self.renamed): name for name in files.tensors}
        required, head = self.shapes(said), {"lm_head.weight": (said.rows, said.width), "d2t": (said.rows,)}
        optional: dict[str, tuple[int | None, ...]] = {"embed_tokens.weight": (said.vocab_size, said.width)}
        if said.is_cropped:
            required, optional = required | head, optional | {"t2d": (said.vocab_size,)}
        else:
            optional["lm_head.weight"] = head["lm_head.weight"]
        others = {name: (None,) * files.tensors[name].dim() for name in self.others(files)}
        named = (
            {present.get(name, theirs(name, self.renamed)): shape for name, shape in group.items()}
            for group in (required, optional)
        )
        required, optional = named
        return Expected(required, {**others, **optional}, IGNORED)

    def unsupported(self, files: Files) -> str | None:
        """What our class cannot represent, by the name of a tensor, a key or a file; None where it can all of it."""
        config, drafter = spread(files.config), f"drafter={self.family.name}"
        for name, what in self.others(files).items():
            return f"{name} is {what}"
        for key, usual in USUAL.items():
            if config.get(key, usual) not in (usual, None):
                return f"{key}={config[key]}: {drafter} has {key}={usual}"
        if config.get("enable_confidence_head") and config.get("confidence_head_with_markov") is False:
            return f"confidence_head_with_markov=False: the confidence head of {drafter} reads the token before, too"
        if len(kinds := sorted(set(config.get("layer_types") or []))) > 1:
            return f"layer_types mixes {' and '.join(kinds)}, and layers of {drafter} all see alike"
        wide = config.get("target_hidden_size")
        if wide is not None and wide != config["hidden_size"]:
            return f"target_hidden_size={wide}: {drafter} is as wide as its target, not {config['hidden_size']}"
        said = self.settings(files)
        if why := cell_from_the_anchor({**said.parts, "sample_from_anchor": said.sample_from_anchor}):
            return why
        if (files.directory / "mask_embedding.pt").exists():
            return f"mask_embedding.pt is an embedding of the mask alone, for which {drafter} has no place"
        return None

    def findings(self, files: Files) -> Iterator[Finding]:
        why = self.unsupported(files)
        if why is not None:
            yield Finding("not-representable", "warning", why, "spectrain cannot score or fine-tune it", "nothing, to serve it")
            return
        said = self.settings(files)
        if said.sample_from_anchor and not self.family.is_shifted:
            yield Finding(
                "shifted-block", "error", "slot 0 of its blocks drafts too (sample_from_anchor, as DeepSpec trains)", NEVER,
                "train with drafter.sample_from_anchor=false, or serve it as DSpark without a Markov head",
            )  # fmt: skip
        if said.is_cropped and not self.family.is_cropped:
            yield Finding(
                "cut-vocabulary", "error", f"draft_vocab_size={said.rows} of {said.vocab_size} tokens",
                f"every reader of {self.family.title} wants the whole vocabulary", "train with drafter.vocab_size=null",
            )  # fmt: skip
        if not 0 <= said.mask_token_id < said.vocab_size:
            yield Finding(
                "mask-token-range", "error", f"mask_token_id={said.mask_token_id}: the embedding has {said.vocab_size} rows",
                "engines put that token where drafts are asked for", "write the id that it was trained with",
            )  # fmt: skip
        config = spread(files.config)
        ids = {key: config[key] for key in NUMBERINGS if config.get(key)}
        if len({tuple(id + NUMBERINGS[key] for id in said) for key, said in ids.items()}) > 1:
            yield Finding(
                "layer-ids-numbering", "error",
                f"{' and '.join(f'{key}={said}' for key, said in ids.items())} are not the same layers",
                "target_layer_ids counts what a layer gives, one less than the stream that the others name; engines differ in "
                "which they read", "write one of them, as it was trained",
            )  # fmt: skip

    def beside(self, files: Files, target: TargetFiles) -> Iterator[Finding]:
        said = self.settings(files)
        assert said.layers is not None
        usual = default_layers(target.num_layers, len(said.layers))
        mistaken = [layer + (1 if self.shift else -1) for layer in usual]
        if said.layers == mistaken:
            ids = [layer - self.shift for layer in said.layers]
            yield Finding(
                "layer-ids-numbering", "warning", f"layer ids are {ids}, which look like the other layout's numbers",
                "target_layer_ids counts what a layer gives, one less than aux_hidden_state_layer_ids, the stream entering the "
                "next", f"write {[layer - self.shift for layer in usual]}, unless it was trained on these",
            )  # fmt: skip
        if is_heard(target.tokenizer, said.mask_token_id):
            token = target.tokenizer.convert_ids_to_tokens(said.mask_token_id)
            yield Finding(
                "mask-token-heard", "warning", f"mask_token_id={said.mask_token_id} is {token!r}, which texts hold",
                "where a text holds it, what was trained as a mask is read as a word",
                "write the id that it was trained with; train with one that no text holds",
            )  # fmt: skip

    def read(self, files: Files, target: TargetFiles | None) -> Portable:
        said, tensors = self.settings(files), self.view(files)
        why = self.unsupported(files)
        if why is not None:
            raise UserError(f"{files.directory}: {why}")
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(IGNORED)}
        embedding, head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
        if embedding is not None and target is not None and same(embedding, target.embedding()):
            del tensors["embed_tokens.weight"]
        if head is not None and not said.is_cropped:
            if target is None or not same(head, target.head()):
                raise UserError(
                    f"{files.directory}: lm_head.weight has all {len(head)} rows, and over the whole vocabulary "
                    f"drafter={self.family.name} takes the target's"
                    f"{'; where it is the same, give --target' if target is None else ''}"
                )
            del tensors["lm_head.weight"]
        tensors["d2t"] = tensors.get("d2t", torch.zeros(said.rows)).to(torch.int64)
        ids = tensors["d2t"] + torch.arange(said.rows)
        marks = torch.zeros(said.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        tensors["t2d"] = tensors.get("t2d", marks).to(torch.bool)
        kept = files.kept()
        drafter = {"_target_": self.family.constructor, **kept.drafter, **settings_from(said, "embed_tokens.weight" in tensors)}
        return Portable(drafter, tensors, self.target_name(files), description=kept.description)

    def target_name(self, files: Files) -> str | None:
        """The target that the files name."""
        return files.kept().said

    def refuse(self, drafter: Portable) -> None:
        """Stop at what no layout can hold."""
        if drafter.drafter["sample_from_anchor"] and not self.family.is_shifted:
            raise UserError(
                f"sample_from_anchor: in a shifted block slot 0 drafts too, and {NEVER}; score it with spectrain eval, or "
                "train with drafter.sample_from_anchor=false"
            )
        if "lm_head.bias" in drafter.tensors:
            raise UserError(
                f"lm_head.bias: output layers of engines' {self.family.title} have no bias, and the target's has one; train "
                "with drafter.vocab_size=null"
            )
        if why := cell_from_the_anchor(drafter.drafter):
            raise UserError(f"{why}; train with drafter.markov_head=gated")
        if not self.family.is_cropped and len(drafter.tensors["d2t"]) < len(drafter.tensors["t2d"]):
            raise UserError(
                f"d2t: it drafts {len(drafter.tensors['d2t'])} of {len(drafter.tensors['t2d'])} tokens, and every reader of "
                f"{self.family.title} wants the whole vocabulary; train with drafter.vocab_size=null"
            )


def is_heard(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether texts may hold a token: an ordinary one, one that ends them, or one of the chat template."""
    if token >= len(tokenizer) or token == tokenizer.mask_token_id:
        return False
    added = tokenizer.added_tokens_decoder.get(token)
    if added is None or not added.special or token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        return True
    return isinstance(tokenizer.chat_template, str) and str(added) in tokenizer.chat_template
