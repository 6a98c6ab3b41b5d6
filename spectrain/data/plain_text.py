"""Plain text as training sequences: documents, prompts with completions, and fill-in-the-middle,
without a chat template.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError

INFILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
"""What the tokenizers of code models call the tokens before the prefix, the suffix and the
middle.
"""


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of a text, and which of them carry loss."""

    tokens: list[int]
    mask: list[bool]


def tokenize_text_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text that a model continues, with the token that begins a text
    where the tokenizer has one.
    """
    tokens = list(tokenizer(text)["input_ids"])
    # Some tokenizers end every text, which would leave nothing to continue.
    return tokens[:-1] if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id else tokens


def tokenize_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    completion: str | None = None,
    infill_seed: int | None = None,
) -> TokenizedText:
    """Return a document, of which every token but the first carries loss, or a prompt with the
    completion that carries it.

    The end-of-text token follows where the tokenizer has one. With `infill_seed` the middle of the
    document, cut out at two random characters, is what carries loss (Bavarian et al., 2022, PSM
    order).
    """
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if infill_seed is not None:
        return tokenize_infill(tokenizer, text, infill_seed, end)
    prompt = tokenize_text_prompt(tokenizer, text)
    if completion is None:
        tokens = prompt + end
        return TokenizedText(tokens, [False, *[True] * (len(tokens) - 1)] if tokens else [])
    answer = _encode(tokenizer, completion) + end
    return TokenizedText(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def tokenize_infill(
    tokenizer: PreTrainedTokenizerBase, text: str, seed: int, end: list[int]
) -> TokenizedText:
    """Return prefix, suffix and middle of a text between the tokenizer's own tokens; the middle
    carries loss.
    """
    prefix_id, suffix_id, middle_id = find_infill_ids(tokenizer)
    low, high = sorted(Random(f"infill/{seed}/{len(text)}").choices(range(len(text) + 1), k=2))
    context = [
        prefix_id,
        *_encode(tokenizer, text[:low]),
        suffix_id,
        *_encode(tokenizer, text[high:]),
        middle_id,
    ]
    middle = _encode(tokenizer, text[low:high]) + end
    return TokenizedText(context + middle, [False] * len(context) + [True] * len(middle))


def find_infill_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int, int]:
    """Return the tokens that begin prefix, suffix and middle; a UserError if the tokenizer has
    none.
    """
    vocabulary = tokenizer.get_vocab()
    for names in INFILL_TOKENS:
        if all(name in vocabulary for name in names):
            prefix, suffix, middle = (int(vocabulary[name]) for name in names)
            return prefix, suffix, middle
    raise UserError(
        "data.infill: the target's tokenizer has no tokens for fill-in-the-middle; use "
        "data.infill=0"
    )


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    encoded: Any = tokenizer(text, add_special_tokens=False)
    return list(encoded["input_ids"])
