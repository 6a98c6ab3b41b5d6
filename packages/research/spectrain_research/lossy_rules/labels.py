"""Given labels of a judge: which tokens of an answer may not be accepted, from a column of a data
file (Judge decoding, Bachmann et al., 2025, arXiv 2501.19309, section 4). Shapes: T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectrain.data.chat import decode_with_starts, tokenize_conversation
from spectrain.data.files import read_rows
from spectrain.data.messages import parse_conversation
from spectrain.errors import UserError
from spectrain.models.target import Target

COLUMN = "wrong"


class GivenLabels:
    """The labels of the texts in a file, by their tokens."""

    def __init__(self, path: str, target: Target) -> None:
        self.path = path
        # Tokens of a text, and whether each is right.
        self.texts: list[tuple[list[int], list[bool]]] = []
        for row in read_rows(path):
            self._add_row(row.content, row.location, target)
        if not any(False in is_right for _, is_right in self.texts):
            raise UserError(
                f"drafter.labels={path}: no row has a wrong piece in its column {COLUMN!r}; name "
                "the wrong pieces of each answer there, as a list of texts"
            )

    def _add_row(self, content: Any, location: str, target: Target) -> None:
        pieces = content.get(COLUMN) or [] if isinstance(content, dict) else []
        if not isinstance(pieces, list) or not all(
            isinstance(piece, str) and piece for piece in pieces
        ):
            raise UserError(f'{location}: {COLUMN!r} is no list of texts; write [] or ["piece"]')
        conversation = parse_conversation(
            {key: value for key, value in content.items() if key != COLUMN}, location
        )
        examples = tokenize_conversation(target.template, conversation)
        for number, example in enumerate(examples):
            wanted = pieces if number == len(examples) - 1 else []
            tokens = list(example.tokens)
            wrong = find_pieces(target.tokenizer, tokens, list(example.mask), wanted, location)
            self.texts.append((tokens, [not is_wrong for is_wrong in wrong]))

    def find(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return for each token [T] of a document, which may be cut or padded, whether it is right;
        raise UserError for a document that is not in the file.
        """
        positions = mask.nonzero().flatten()
        end = int(positions[-1]) + 1 if len(positions) else 0
        document = tokens[:end].tolist()
        for own, is_right in self.texts:
            if own[:end] == document:
                return torch.tensor(is_right[:end] + [True] * (len(tokens) - end))
        raise UserError(
            f"drafter.labels={self.path}: a text of the training data is not in it; train on the "
            f"same file, with data=jsonl data.path={self.path}"
        )


def find_pieces(
    tokenizer: Any, tokens: list[int], mask: list[bool], pieces: list[str], location: str
) -> list[bool]:
    """Return for each token of a text whether it overlaps one of the pieces of its last answer."""
    wrong = [False] * len(tokens)
    text, starts = decode_with_starts(tokenizer, tokens)
    ends = [*starts[1:], len(text)]
    first = last_answer_start(mask)
    for piece in pieces:
        position = text.find(piece, starts[first] if first < len(starts) else len(text))
        if position < 0:
            raise UserError(
                f"{location}: {COLUMN!r} has {piece!r}, which is not in the last answer; copy the "
                "piece from there"
            )
        while position >= 0:
            for index in range(first, len(tokens)):
                if starts[index] < position + len(piece) and ends[index] > position:
                    wrong[index] = True
            position = text.find(piece, position + 1)
    return wrong


def last_answer_start(mask: list[bool]) -> int:
    """Return the position of the first token of the last answer."""
    last = max((index for index, carries in enumerate(mask) if carries), default=len(mask) - 1)
    while last > 0 and mask[last - 1]:
        last -= 1
    return last
