"""Sequences that somebody tokenized: token ids with loss masks, in files or in a folder that
speculators prepared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from spectrain.errors import UserError

from .chat import Example
from .chat_template import ChatTemplate
from .dataset import Dataset
from .files import FileRow
from .image_processor import ImageProcessor
from .messages import MAX_TOKEN_ID
from .readers import FileReader

MASK_KEYS = ("loss_mask", "labels", "assistant_masks")
"""The columns that say which tokens carry loss; labels are -100 where there is none."""
SEGMENT_KEYS = ("seq_idx", "sequence_ids", "segment_ids", "document_ids", "doc_ids")
"""The columns in which a row that packs several texts gives each token the number of its text."""
LENGTH_KEYS = ("seq_lengths", "seq_lens", "sequence_lengths")
"""The columns in which such a row lists the lengths of its texts."""
DESCRIPTION_KEYS = ("id", "num_tokens")
"""Columns that only describe a row."""


@dataclass
class TokensReader(FileReader):
    """Token ids (`input_ids`) with `loss_mask`, `labels` or `assistant_masks`, one sequence per
    row.
    """

    def parse_row(self, row: FileRow) -> Example:
        return parse_tokens(row.content, row.location, self.unread)

    def make_dataset(self, template: ChatTemplate, vision: ImageProcessor | None = None) -> Dataset:
        size = template.vocab_size
        examples: list[Any] = self.load_conversations()
        for example in examples:
            check_vocabulary(example, size)
        return super().make_dataset(template, vision)


@dataclass
class PreparedReader(TokensReader):
    """Sequences that the speculators project tokenized, beside its cache of features."""

    # Number of tokens at which a sequence is cut.
    max_length: int = field(default=1_000_000, kw_only=True)


def check_vocabulary(example: Example, size: int) -> None:
    """Raise a UserError if a token id is not below the size of the target's vocabulary."""
    if (largest := max(example.tokens)) >= size:
        raise UserError(
            f"{example.origin}: it holds the token id {largest}, and the target has {size} tokens; "
            "tokenize the data with the target's own tokenizer"
        )


def parse_tokens(row: Any, location: str, unread: Counter[str] | None = None) -> Example:
    """Return the example of a row, without its padding; a UserError if its ids or its masks cannot
    be used.

    Padding is what has an attention_mask of 0, whatever its labels are. `unread` counts columns
    that nothing reads.
    """
    if not isinstance(row, dict) or row.get("input_ids") is None:
        raise UserError(f"{location}: it holds no input_ids; write a list of token ids")
    ids = _parse_integers(row["input_ids"], "input_ids", location)
    if not ids or min(ids) < 0 or max(ids) >= MAX_TOKEN_ID:
        raise UserError(
            f"{location}: its input_ids are empty, below 0 or above {MAX_TOKEN_ID - 1}; write "
            "token ids"
        )
    key = next((name for name in MASK_KEYS if row.get(name) is not None), None)
    if key is None:
        raise UserError(
            f"{location}: nothing says which tokens carry loss; add one of {', '.join(MASK_KEYS)}"
        )
    text = find_text(row, len(ids), location)
    tokens = ids[text]
    values = _parse_column(row, key, len(ids), location)[text]
    check_single_text(row, len(ids), text, location)
    if unread is not None:
        read = {"input_ids", "attention_mask", key, *DESCRIPTION_KEYS}
        unread.update(
            f"column {name!r} of a row"
            for name, value in row.items()
            if name not in read and value is not None
        )
    if key == "labels":
        if wrong := [token for token, label in zip(tokens, values) if label not in (-100, token)]:
            raise UserError(
                f"{location}: a label is neither -100 nor the token at its position ({wrong[0]}); "
                "do not shift labels"
            )
        return Example(tokens, [label != -100 for label in values], origin=location)
    if set(values) - {0, 1}:
        raise UserError(
            f"{location}: {key} holds other values than 0 and 1; write 1 where the loss counts a "
            "token"
        )
    return Example(tokens, [value == 1 for value in values], origin=location)


def find_text(row: dict[str, Any], length: int, location: str) -> slice:
    """Return the tokens of a row that are no padding, by its attention_mask; all of them where
    there is none.
    """
    if row.get("attention_mask") is None:
        return slice(0, length)
    mask = _parse_column(row, "attention_mask", length, location)
    if set(mask) - {0, 1}:
        raise UserError(
            f"{location}: attention_mask holds other values than 0 and 1; write 0 for padding, "
            "and one text a row"
        )
    if 1 not in mask:
        raise UserError(
            f"{location}: its attention_mask is 0 everywhere, so it holds no text; drop the row"
        )
    first = mask.index(1)
    last = length - mask[::-1].index(1)
    if 0 in mask[first:last]:
        raise UserError(
            f"{location}: its attention_mask is 0 within the text; mask padding at its ends "
            "alone, one text a row"
        )
    return slice(first, last)


def check_single_text(row: dict[str, Any], length: int, text: slice, location: str) -> None:
    """Raise a UserError for a row that packs several texts: its positions do not count up by one,
    or another column tells its texts apart.

    Training counts the positions of a row itself, and lets every token read all before it.
    """
    sign = None
    if row.get("position_ids") is not None:
        positions = _parse_column(row, "position_ids", length, location)[text]
        if positions != list(range(positions[0], positions[0] + len(positions))):
            sign = "position_ids do not count up by one"
    for key in SEGMENT_KEYS:
        values = row.get(key)
        if isinstance(values, (list, tuple)) and len({*map(str, values[text])}) > 1:
            sign = f"{key} name several texts"
    for key in LENGTH_KEYS:
        values = row.get(key)
        if isinstance(values, (list, tuple)) and len(values) > 1:
            sign = f"{key} names several texts"
    if sign is not None:
        raise UserError(
            f"{location}: its {sign}, as where a row packs several texts; write one text a row, "
            "and pack them with trainer.packing=true"
        )


def _parse_column(row: dict[str, Any], name: str, length: int, location: str) -> list[int]:
    """Return the integers of a column with one for each token."""
    values = _parse_integers(row[name], name, location)
    if len(values) != length:
        raise UserError(
            f"{location}: it has {length} input_ids and {len(values)} {name}; both need the same "
            "length"
        )
    return values


def _parse_integers(values: Any, name: str, location: str) -> list[int]:
    listed = (
        list(values) if isinstance(values, (list, tuple)) or hasattr(values, "tolist") else None
    )
    if listed is None or not all(
        hasattr(value, "__index__") and (name != "input_ids" or not isinstance(value, bool))
        for value in listed
    ):
        raise UserError(f"{location}: {name} is no list of integers; write a flat list")
    return [int(value) for value in listed]
