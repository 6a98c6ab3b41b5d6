"""Sequences that somebody tokenized: token ids with loss masks, in files or in a folder that speculators prepared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from spectrain.errors import UserError
from spectrain.models.chat_template import ChatTemplate
from spectrain.models.images import ImageProcessor

from .chat import Example
from .dataset import Dataset
from .files import read_rows
from .readers import FileReader

MASK_KEYS = ("loss_mask", "labels", "assistant_masks")
"""The columns that say which tokens carry loss; labels are -100 where there is none."""


@dataclass
class TokensReader(FileReader):
    """Token ids (`input_ids`) with `loss_mask`, `labels` or `assistant_masks`, one sequence per row."""

    def read_conversations(self) -> Iterator[Any]:
        rows = read_rows(self.path, self.handle_row_error)
        yield from self.parse_rows(rows, lambda row: parse_tokens(row.content, row.location))

    def make_dataset(self, template: ChatTemplate, vision: ImageProcessor | None = None) -> Dataset:
        size = template.vocab_size
        examples: list[Any] = self.load_conversations()
        for number, example in enumerate(examples, 1):
            check_vocabulary(example, size, f"data.path={self.path}: sequence {number}")
        return super().make_dataset(template, vision)


@dataclass
class PreparedReader(TokensReader):
    """Sequences that the speculators project tokenized, beside its cache of features."""

    # Number of tokens at which a sequence is cut.
    max_length: int = field(default=1_000_000, kw_only=True)


def check_vocabulary(example: Example, size: int, location: str) -> None:
    """Raise a UserError if a token id is not below the size of the target's vocabulary."""
    if (largest := max(example.tokens)) >= size:
        raise UserError(
            f"{location} holds the token id {largest}, and the target has {size} tokens; tokenize the data with "
            "the target's own tokenizer"
        )


def parse_tokens(row: Any, location: str) -> Example:
    """Return the example of a row; a UserError if its ids or its mask cannot be used."""
    if not isinstance(row, dict) or row.get("input_ids") is None:
        raise UserError(f"{location}: it holds no input_ids; write a list of token ids")
    tokens = _parse_integers(row["input_ids"], "input_ids", location)
    if not tokens or min(tokens) < 0:
        raise UserError(f"{location}: its input_ids are empty or below 0; write token ids")
    key = next((name for name in MASK_KEYS if row.get(name) is not None), None)
    if key is None:
        raise UserError(f"{location}: nothing says which tokens carry loss; add one of {', '.join(MASK_KEYS)}")
    values = _parse_integers(row[key], key, location)
    if len(values) != len(tokens):
        raise UserError(f"{location}: it has {len(tokens)} input_ids and {len(values)} {key}; both need the same length")
    if key == "labels":
        if wrong := [token for token, label in zip(tokens, values) if label not in (-100, token)]:
            raise UserError(
                f"{location}: a label is neither -100 nor the token at its position ({wrong[0]}); do not shift labels"
            )
        return Example(tokens, [label != -100 for label in values])
    if set(values) - {0, 1}:
        raise UserError(f"{location}: {key} holds other values than 0 and 1; write 1 where the loss counts a token")
    return Example(tokens, [value == 1 for value in values])


def _parse_integers(values: Any, name: str, location: str) -> list[int]:
    listed = list(values) if isinstance(values, (list, tuple)) or hasattr(values, "tolist") else None
    if listed is None or not all(isinstance(value, (int, bool)) or hasattr(value, "__index__") for value in listed):
        raise UserError(f"{location}: {name} is no list of integers; write a flat list")
    return [int(value) for value in listed]
