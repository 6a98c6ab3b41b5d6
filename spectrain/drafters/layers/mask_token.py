"""The token that stands at masks of drafters with an embedding of tokens."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError
from spectrain.models.target import Target


def resolve_mask_token(target: Target, mask_token_id: int | None) -> int:
    """Return the mask token's id: the given one, or if it is None, one that no text of the
    target holds.
    """
    rows = target.head.vocab_size
    if mask_token_id is None:
        return find_unused_token(target.tokenizer, rows)
    if not 0 <= mask_token_id < rows:
        raise UserError(f"drafter.mask_token_id={mask_token_id}: use an id below {rows}")
    return mask_token_id


def check_mask_unused(mask: int, token_counts: Tensor) -> None:
    """Raise `UserError` if the data holds the mask token."""
    if token_counts[mask]:
        raise UserError(
            f"drafter.mask_token_id={mask}: the data holds this token; use a token that no text "
            "holds"
        )


def find_unused_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Return the id of an embedding row that no text holds.

    This is the tokenizer's mask token, a row beyond its tokens, or the last special token that
    neither begins nor ends a text nor occurs in the chat template.
    """
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    boundaries = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    special = [id for id, token in tokenizer.added_tokens_decoder.items() if token.special]
    candidates = [
        id
        for id in special
        if id not in boundaries and str(tokenizer.added_tokens_decoder[id]) not in template
    ]
    if not candidates:
        raise UserError(
            "drafter.mask_token_id: the target has no token that texts never hold; use the id of "
            "the rarest one"
        )
    return int(max(candidates))
