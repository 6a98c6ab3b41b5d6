"""Texts in two tokenizers: the bytes of every token, and a text of one tokenizer in the tokens of
the other.

All conversions go through bytes, not decoded text, because a token may hold a part of a character,
or no text at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError

# bytes that are not UTF-8, as Python's surrogateescape decodes them
INVALID_UTF8 = re.compile("([\udc80-\udcff]+)")
# One of these precedes a text that is encoded, so that the tokenizer adds its space before this
# prefix.
GUARD_PREFIXES = ("\n", ".", "a", "0")
MIN_OPEN_BYTES = 96  # bytes at the end of a text whose tokens may still change


def byte_alphabet() -> dict[str, int]:
    """Map each letter of a byte-level vocabulary (GPT-2) to its byte: printable bytes are their own
    letters, the others have letters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + offset): byte for offset, byte in enumerate(others)
    }


class ByteTokenizer:
    """Converts between the tokens of a tokenizer and bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, setting: str) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # None for a slow tokenizer
        decoder = {} if backend is None else json.loads(backend.to_str())["decoder"] or {}
        kinds = {
            kind
            for kind in ("ByteLevel", "ByteFallback", "Metaspace")
            if kind in decoder_types(decoder)
        }
        if not kinds:
            raise UserError(
                f"{setting}: the bytes of its tokens are unknown; use a model with a fast "
                "tokenizer that is a byte-level BPE or comes from sentencepiece"
            )
        self.backend = Tokenizer.from_str(backend.to_str())
        # The names of special tokens inside a text are plain text; real special tokens are known by
        # their ids.
        self.backend.encode_special_tokens = True
        self.backend.no_truncation()
        self.backend.no_padding()
        added = tokenizer.added_tokens_decoder
        self.special_tokens = {
            token: str(content) for token, content in added.items() if content.special
        }
        letters = byte_alphabet() if "ByteLevel" in kinds else None
        # None for special tokens
        self.pieces: list[bytes | None] = [None] * (1 + max(tokenizer.get_vocab().values()))
        for name, token in tokenizer.get_vocab().items():
            if token not in self.special_tokens:
                self.pieces[token] = name.encode() if token in added else piece_bytes(name, letters)
        self.eos_token: int | None = tokenizer.eos_token_id
        starts = tokenizer("")["input_ids"]
        # added before every text
        self.start_tokens = [token for token in starts if token == tokenizer.bos_token_id]

    @cached_property
    def token_of_piece(self) -> dict[bytes, int]:
        """Map each piece of bytes to its token; of several tokens, one that is no byte fallback."""
        tokens: dict[bytes, int] = {}
        for token, piece in enumerate(self.pieces):
            if piece and (piece not in tokens or self._is_fallback(tokens[piece])):
                tokens[piece] = token
        return tokens

    @cached_property
    def adds_space(self) -> bool:
        """Whether the tokenizer adds a space before every text."""
        return self.decode_bytes(self.backend.encode("a", add_special_tokens=False).ids) != b"a"

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.pieces[token] or b"" for token in tokens)

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return the tokens of these bytes. A byte outside any character has a token of its own,
        or is left out.
        """
        tokens: list[int] = []
        for part in INVALID_UTF8.split(data.decode("utf-8", "surrogateescape")):
            if INVALID_UTF8.match(part):
                byte_tokens = [
                    self.token_of_piece.get(bytes([byte]))
                    for byte in part.encode("utf-8", "surrogateescape")
                ]
                tokens += [token for token in byte_tokens if token is not None]
            elif part:
                tokens += self._encode_text(part)
        return tokens

    def encode_after(self, before: bytes, data: bytes) -> list[int]:
        """Return the tokens of `data` after the text `before`; if a token spans the border,
        those of `data` alone.
        """
        tokens = self.encode_bytes(before + data)
        num_bytes = 0
        for number, token in enumerate(tokens):
            if num_bytes == len(before):
                return tokens[number:]
            num_bytes += len(self.pieces[token] or b"")
        return self.encode_bytes(data)

    def _encode_text(self, text: str) -> list[int]:
        if not self.adds_space:
            return list(self.backend.encode(text, add_special_tokens=False).ids)
        for guard in GUARD_PREFIXES:
            tokens = list(self.backend.encode(guard + text, add_special_tokens=False).ids)
            num_bytes = len(text.encode()) - len(self.decode_bytes(tokens))
            for number, token in enumerate(tokens):
                if num_bytes == 0:
                    return tokens[number:]
                num_bytes += len(self.pieces[token] or b"")
        # No guard stays apart from the text, so the tokens include the added space.
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def _is_fallback(self, token: int) -> bool:
        return str(self.backend.id_to_token(token)).startswith("<0x")


def decoder_types(decoder: dict[str, Any]) -> Iterator[str]:
    """Yield the types of a decoder and of its parts."""
    yield decoder.get("type", "")
    for part in decoder.get("decoders", ()):
        yield from decoder_types(part)


def piece_bytes(name: str, letters: dict[str, int] | None) -> bytes:
    """Return the bytes of an ordinary token, from the letters of a byte-level vocabulary or in
    sentencepiece's notation.
    """
    if letters is not None:
        return (
            bytes(letters[letter] for letter in name)
            if all(letter in letters for letter in name)
            else name.encode()
        )
    if re.fullmatch("<0x[0-9A-F]{2}>", name):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()


def map_shared_tokens(
    drafter_tokenizer: ByteTokenizer, target_tokenizer: ByteTokenizer
) -> dict[int, int]:
    """Map target tokens one to one to the drafter's tokens with the same bytes or, if special,
    the same name or role.
    """
    shared = {
        token: drafter_tokenizer.token_of_piece[piece]
        for piece, token in target_tokenizer.token_of_piece.items()
        if piece in drafter_tokenizer.token_of_piece
    }
    return shared | map_special_tokens(drafter_tokenizer, target_tokenizer)


def map_special_tokens(
    drafter_tokenizer: ByteTokenizer, target_tokenizer: ByteTokenizer
) -> dict[int, int]:
    """Map the target's special tokens to the drafter's: those with the same name, and the end of
    a text.
    """
    names = {name: token for token, name in drafter_tokenizer.special_tokens.items()}
    shared = {
        token: names[name]
        for token, name in target_tokenizer.special_tokens.items()
        if name in names
    }
    both_end = (
        target_tokenizer.eos_token in target_tokenizer.special_tokens
        and drafter_tokenizer.eos_token in drafter_tokenizer.special_tokens
    )
    if (
        both_end
        and target_tokenizer.eos_token not in shared
        and drafter_tokenizer.eos_token not in shared.values()
    ):
        shared[target_tokenizer.eos_token] = drafter_tokenizer.eos_token
    return shared


def trim_partial_character(before: bytes, data: bytes) -> bytes:
    """Return `data`, which follows `before`, without an incomplete character at its end."""
    text = before + data
    for size in range(1, min(3, len(text)) + 1):
        byte = text[-size]
        if byte >= 0xC0:  # begins a character of two bytes or more
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[: max(0, len(data) - size)] if needed > size else data
        if byte < 0x80:
            break
    return data


class RetokenizedText:
    """A growing text of the target, in the drafter's tokens, of which only the last ones may still
    change.

    `special_map` holds the drafter's token for special tokens of the target; others are left out.
    """

    def __init__(
        self,
        drafter_tokenizer: ByteTokenizer,
        target_tokenizer: ByteTokenizer,
        special_map: dict[int, int],
    ) -> None:
        self.drafter_tokenizer, self.target_tokenizer, self.special_map = (
            drafter_tokenizer,
            target_tokenizer,
            special_map,
        )
        self.num_read = 0  # target tokens
        # drafter tokens that will not change
        self.fixed_tokens = list(drafter_tokenizer.start_tokens)
        self.open_bytes = b""  # the text after them
        self.recent_pieces: list[bytes] = []  # bytes of the last ordinary target tokens

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Append tokens of the target."""
        self.num_read += len(tokens)
        for token in tokens:
            piece = (
                self.target_tokenizer.pieces[token]
                if token < len(self.target_tokenizer.pieces)
                else None
            )
            if piece is not None:
                self.open_bytes += piece
                self.recent_pieces = [*self.recent_pieces[-3:], piece]
                continue
            self.fixed_tokens += self.drafter_tokenizer.encode_bytes(self.open_bytes)
            self.open_bytes = b""
            self.recent_pieces = []
            # A text has only one start token.
            if token in self.special_map and [self.special_map[token]] != self.fixed_tokens:
                self.fixed_tokens.append(self.special_map[token])

    def encode_text(self, max_length: int) -> list[int]:
        """Return the text's drafter tokens; of more than `max_length` tokens, about the last
        `max_length` / 2.
        """
        newest = self.drafter_tokenizer.encode_bytes(self.open_bytes)
        if len(self.open_bytes) > 4 * MIN_OPEN_BYTES:
            newest = self._fix_tokens(newest)
        if len(self.fixed_tokens) + len(newest) > max_length:
            del self.fixed_tokens[: max(0, len(self.fixed_tokens) + len(newest) - max_length // 2)]
        return [*self.fixed_tokens, *newest][-max_length:]

    def _fix_tokens(self, newest: list[int]) -> list[int]:
        """Fix the tokens before the last word that begins at least `MIN_OPEN_BYTES` before the
        end; return the others.
        """
        num_bytes = 0
        cut = (0, 0)
        for number, token in enumerate(newest):
            piece = self.drafter_tokenizer.pieces[token] or b""
            if num_bytes > len(self.open_bytes) - MIN_OPEN_BYTES:
                break
            if re.match(rb" [A-Za-z]", piece) and not self.open_bytes[:num_bytes].endswith(
                (b" ", b"\n")
            ):
                cut = number, num_bytes
            num_bytes += len(piece)
        number, num_bytes = cut
        self.fixed_tokens += newest[:number]
        self.open_bytes = self.open_bytes[num_bytes:]
        return newest[number:]
