"""Texts in two tokenizers: tokens as the bytes that they stand for, and a text that is followed in the tokens of another.

Everything goes by bytes, not by decoded text: a token may hold a part of a character, or no text at all.
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

INVALID_UTF8 = re.compile("([\udc80-\udcff]+)")  # bytes that are no UTF-8, as Python's surrogateescape reads them
GUARD_PREFIXES = ("\n", ".", "a", "0")  # one of these goes before a text where a tokenizer would put a space
MIN_OPEN_BYTES = 96  # bytes at a text's end whose tokens may still change, at least


def byte_alphabet() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2): printable ones for themselves, the others for
    letters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class ByteTokenizer:
    """What the tokens of a tokenizer spell, and which tokens spell a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, setting: str) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # a slow one has none
        decoder = {} if backend is None else json.loads(backend.to_str())["decoder"] or {}
        kinds = {kind for kind in ("ByteLevel", "ByteFallback", "Metaspace") if kind in decoder_types(decoder)}
        if not kinds:
            raise UserError(f"{setting}: its tokens do not say which bytes they stand for; use a model with a byte-level BPE "
                            "tokenizer, or one of sentencepiece, in its fast form")  # fmt: skip
        self.backend = Tokenizer.from_str(backend.to_str())
        self.backend.encode_special_tokens = True  # in a text they are text: real ones are told apart by their ids
        self.backend.no_truncation()
        self.backend.no_padding()
        added = tokenizer.added_tokens_decoder
        self.special_tokens = {token: str(one) for token, one in added.items() if one.special}
        letters = byte_alphabet() if "ByteLevel" in kinds else None
        self.pieces: list[bytes | None] = [None] * (1 + max(tokenizer.get_vocab().values()))  # None: not text
        for name, token in tokenizer.get_vocab().items():
            if token not in self.special_tokens:
                self.pieces[token] = name.encode() if token in added else piece_bytes(name, letters)
        self.eos_token: int | None = tokenizer.eos_token_id
        starts = tokenizer("")["input_ids"]
        self.start_tokens = [token for token in starts if token == tokenizer.bos_token_id]  # what it puts before every text

    @cached_property
    def token_of_piece(self) -> dict[bytes, int]:
        """The token of a piece; of several, one that is not a byte for want of a better one."""
        found: dict[bytes, int] = {}
        for token, piece in enumerate(self.pieces):
            if piece and (piece not in found or self._is_fallback(found[piece])):
                found[piece] = token
        return found

    @cached_property
    def adds_space(self) -> bool:
        """Whether it puts a space before every text."""
        return self.decode_bytes(self.backend.encode("a", add_special_tokens=False).ids) != b"a"

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.pieces[token] or b"" for token in tokens)

    def encode_bytes(self, data: bytes) -> list[int]:
        """The tokens that spell these bytes. A byte that is no part of a character is a token by itself; where there is none
        for it, it is left out."""
        found: list[int] = []
        for part in INVALID_UTF8.split(data.decode("utf-8", "surrogateescape")):
            if INVALID_UTF8.match(part):
                alone = [self.token_of_piece.get(bytes([byte])) for byte in part.encode("utf-8", "surrogateescape")]
                found += [token for token in alone if token is not None]
            elif part:
                found += self._encode_text(part)
        return found

    def encode_after(self, before: bytes, data: bytes) -> list[int]:
        """The tokens that spell `data` where `before` comes before it, if none of them reaches over the border; otherwise those
        of `data` by itself."""
        tokens = self.encode_bytes(before + data)
        place = 0
        for number, token in enumerate(tokens):
            if place == len(before):
                return tokens[number:]
            place += len(self.pieces[token] or b"")
        return self.encode_bytes(data)

    def _encode_text(self, text: str) -> list[int]:
        if not self.adds_space:
            return list(self.backend.encode(text, add_special_tokens=False).ids)
        for guard in GUARD_PREFIXES:
            tokens = list(self.backend.encode(guard + text, add_special_tokens=False).ids)
            place = len(text.encode()) - len(self.decode_bytes(tokens))
            for number, token in enumerate(tokens):
                if place == 0:
                    return tokens[number:]
                place += len(self.pieces[token] or b"")
        return list(self.backend.encode(text, add_special_tokens=False).ids)  # with its space

    def _is_fallback(self, token: int) -> bool:
        return str(self.backend.id_to_token(token)).startswith("<0x")


def decoder_types(decoder: dict[str, Any]) -> Iterator[str]:
    """The types of a decoder and of those that it consists of."""
    yield decoder.get("type", "")
    for part in decoder.get("decoders", ()):
        yield from decoder_types(part)


def piece_bytes(name: str, letters: dict[str, int] | None) -> bytes:
    """The bytes of an ordinary token, by the letters of a byte-level vocabulary or as sentencepiece writes them."""
    if letters is not None:
        return bytes(letters[letter] for letter in name) if all(letter in letters for letter in name) else name.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", name):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()


def map_shared_tokens(drafter_tokenizer: ByteTokenizer, target_tokenizer: ByteTokenizer) -> dict[int, int]:
    """Tokens of `theirs` -> tokens of `mine` that stand for the same: equal bytes, special tokens with the same name, the ends
    of a text. One to one."""
    found = {
        token: drafter_tokenizer.token_of_piece[piece]
        for piece, token in target_tokenizer.token_of_piece.items()
        if piece in drafter_tokenizer.token_of_piece
    }
    return found | map_special_tokens(drafter_tokenizer, target_tokenizer)


def map_special_tokens(drafter_tokenizer: ByteTokenizer, target_tokenizer: ByteTokenizer) -> dict[int, int]:
    """The special ones among them."""
    names = {name: token for token, name in drafter_tokenizer.special_tokens.items()}
    found = {token: names[name] for token, name in target_tokenizer.special_tokens.items() if name in names}
    ends = (
        target_tokenizer.eos_token in target_tokenizer.special_tokens
        and drafter_tokenizer.eos_token in drafter_tokenizer.special_tokens
    )
    if ends and target_tokenizer.eos_token not in found and drafter_tokenizer.eos_token not in found.values():
        found[target_tokenizer.eos_token] = drafter_tokenizer.eos_token
    return found


def trim_partial_character(before: bytes, data: bytes) -> bytes:
    """`data` behind `before`, without the beginning of a character that is not complete."""
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
    """A text of the tokenizer `theirs`, in tokens of `mine`, which grows: but for the newest, they stay what they were.

    `special` says what stands for special tokens; others are left out.
    """

    def __init__(self, drafter_tokenizer: ByteTokenizer, target_tokenizer: ByteTokenizer, special_map: dict[int, int]) -> None:
        self.drafter_tokenizer, self.target_tokenizer, self.special_map = drafter_tokenizer, target_tokenizer, special_map
        self.num_read = 0  # tokens of `theirs`
        self.fixed_tokens = list(drafter_tokenizer.start_tokens)  # tokens of `mine` that stay
        self.open_bytes = b""  # what comes after them
        self.recent_pieces: list[bytes] = []  # what the newest tokens of `theirs` spell, special ones left out

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Add tokens of `theirs`."""
        self.num_read += len(tokens)
        for token in tokens:
            piece = self.target_tokenizer.pieces[token] if token < len(self.target_tokenizer.pieces) else None
            if piece is not None:
                self.open_bytes += piece
                self.recent_pieces = [*self.recent_pieces[-3:], piece]
                continue
            self.fixed_tokens += self.drafter_tokenizer.encode_bytes(self.open_bytes)
            self.open_bytes, self.recent_pieces = b"", []
            if token in self.special_map and [self.special_map[token]] != self.fixed_tokens:  # not a second start of the text
                self.fixed_tokens.append(self.special_map[token])

    def encode_text(self, max_length: int) -> list[int]:
        """The text's tokens; of one that has more than `longest`, the newest half as many or a little more."""
        newest = self.drafter_tokenizer.encode_bytes(self.open_bytes)
        if len(self.open_bytes) > 4 * MIN_OPEN_BYTES:
            newest = self._fix_tokens(newest)
        if len(self.fixed_tokens) + len(newest) > max_length:
            del self.fixed_tokens[: max(0, len(self.fixed_tokens) + len(newest) - max_length // 2)]
        return [*self.fixed_tokens, *newest][-max_length:]

    def _fix_tokens(self, newest: list[int]) -> list[int]:
        """Keep for good what lies before the last word that begins `OPEN` bytes before the end or earlier; the rest."""
        place, cut = 0, (0, 0)
        for number, token in enumerate(newest):
            piece = self.drafter_tokenizer.pieces[token] or b""
            if place > len(self.open_bytes) - MIN_OPEN_BYTES:
                break
            if re.match(rb" [A-Za-z]", piece) and not self.open_bytes[:place].endswith((b" ", b"\n")):
                cut = number, place
            place += len(piece)
        number, place = cut
        self.fixed_tokens += newest[:number]
        self.open_bytes = self.open_bytes[place:]
        return newest[number:]
