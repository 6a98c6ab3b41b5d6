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

NOT_TEXT = re.compile("([\udc80-\udcff]+)")  # bytes that are no UTF-8, as Python's surrogateescape reads them
GUARDS = ("\n", ".", "a", "0")  # one of these goes before a text where a tokenizer would put a space
OPEN = 96  # bytes at a text's end whose tokens may still change, at least


def byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2): printable ones for themselves, the others for
    letters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Spelling:
    """What the tokens of a tokenizer spell, and which tokens spell a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, setting: str) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # a slow one has none
        decoder = {} if backend is None else json.loads(backend.to_str())["decoder"] or {}
        kinds = {kind for kind in ("ByteLevel", "ByteFallback", "Metaspace") if kind in kinds_of(decoder)}
        if not kinds:
            raise UserError(f"{setting}: its tokens do not say which bytes they stand for; use a model with a byte-level BPE "
                            "tokenizer, or one of sentencepiece, in its fast form")  # fmt: skip
        self.backend = Tokenizer.from_str(backend.to_str())
        self.backend.encode_special_tokens = True  # in a text they are text: real ones are told apart by their ids
        self.backend.no_truncation()
        self.backend.no_padding()
        added = tokenizer.added_tokens_decoder
        self.special = {token: str(one) for token, one in added.items() if one.special}
        letters = byte_letters() if "ByteLevel" in kinds else None
        self.pieces: list[bytes | None] = [None] * (1 + max(tokenizer.get_vocab().values()))  # None: not text
        for name, token in tokenizer.get_vocab().items():
            if token not in self.special:
                self.pieces[token] = name.encode() if token in added else spelled(name, letters)
        self.end: int | None = tokenizer.eos_token_id
        starts = tokenizer("")["input_ids"]
        self.start = [token for token in starts if token == tokenizer.bos_token_id]  # what it puts before every text

    @cached_property
    def tokens(self) -> dict[bytes, int]:
        """The token of a piece; of several, one that is not a byte for want of a better one."""
        found: dict[bytes, int] = {}
        for token, piece in enumerate(self.pieces):
            if piece and (piece not in found or self._is_fallback(found[piece])):
                found[piece] = token
        return found

    @cached_property
    def prefixes(self) -> bool:
        """Whether it puts a space before every text."""
        return self.spell(self.backend.encode("a", add_special_tokens=False).ids) != b"a"

    def spell(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.pieces[token] or b"" for token in tokens)

    def encode(self, data: bytes) -> list[int]:
        """The tokens that spell these bytes. A byte that is no part of a character is a token by itself; where there is none
        for it, it is left out."""
        found: list[int] = []
        for part in NOT_TEXT.split(data.decode("utf-8", "surrogateescape")):
            if NOT_TEXT.match(part):
                alone = [self.tokens.get(bytes([byte])) for byte in part.encode("utf-8", "surrogateescape")]
                found += [token for token in alone if token is not None]
            elif part:
                found += self._encode_text(part)
        return found

    def continued(self, before: bytes, data: bytes) -> list[int]:
        """The tokens that spell `data` where `before` comes before it, if none of them reaches over the border; otherwise those
        of `data` by itself."""
        tokens = self.encode(before + data)
        place = 0
        for number, token in enumerate(tokens):
            if place == len(before):
                return tokens[number:]
            place += len(self.pieces[token] or b"")
        return self.encode(data)

    def _encode_text(self, text: str) -> list[int]:
        if not self.prefixes:
            return list(self.backend.encode(text, add_special_tokens=False).ids)
        for guard in GUARDS:
            tokens = list(self.backend.encode(guard + text, add_special_tokens=False).ids)
            place = len(text.encode()) - len(self.spell(tokens))
            for number, token in enumerate(tokens):
                if place == 0:
                    return tokens[number:]
                place += len(self.pieces[token] or b"")
        return list(self.backend.encode(text, add_special_tokens=False).ids)  # with its space

    def _is_fallback(self, token: int) -> bool:
        return str(self.backend.id_to_token(token)).startswith("<0x")


def kinds_of(decoder: dict[str, Any]) -> Iterator[str]:
    """The types of a decoder and of those that it consists of."""
    yield decoder.get("type", "")
    for part in decoder.get("decoders", ()):
        yield from kinds_of(part)


def spelled(name: str, letters: dict[str, int] | None) -> bytes:
    """The bytes of an ordinary token, by the letters of a byte-level vocabulary or as sentencepiece writes them."""
    if letters is not None:
        return bytes(letters[letter] for letter in name) if all(letter in letters for letter in name) else name.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", name):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()


def shared_tokens(mine: Spelling, theirs: Spelling) -> dict[int, int]:
    """Tokens of `theirs` -> tokens of `mine` that stand for the same: equal bytes, special tokens with the same name, the ends
    of a text. One to one."""
    found = {token: mine.tokens[piece] for piece, token in theirs.tokens.items() if piece in mine.tokens}
    return found | shared_specials(mine, theirs)


def shared_specials(mine: Spelling, theirs: Spelling) -> dict[int, int]:
    """The special ones among them."""
    names = {name: token for token, name in mine.special.items()}
    found = {token: names[name] for token, name in theirs.special.items() if name in names}
    ends = theirs.end in theirs.special and mine.end in mine.special
    if ends and theirs.end not in found and mine.end not in found.values():
        found[theirs.end] = mine.end
    return found


def whole_characters(before: bytes, data: bytes) -> bytes:
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


class Retokenised:
    """A text of the tokenizer `theirs`, in tokens of `mine`, which grows: but for the newest, they stay what they were.

    `special` says what stands for special tokens; others are left out.
    """

    def __init__(self, mine: Spelling, theirs: Spelling, special: dict[int, int]) -> None:
        self.mine, self.theirs, self.special = mine, theirs, special
        self.num_read = 0  # tokens of `theirs`
        self.closed = list(mine.start)  # tokens of `mine` that stay
        self.open = b""  # what comes after them
        self.recent: list[bytes] = []  # what the newest tokens of `theirs` spell, special ones left out

    def read(self, tokens: Sequence[int]) -> None:
        """Add tokens of `theirs`."""
        self.num_read += len(tokens)
        for token in tokens:
            piece = self.theirs.pieces[token] if token < len(self.theirs.pieces) else None
            if piece is not None:
                self.open += piece
                self.recent = [*self.recent[-3:], piece]
                continue
            self.closed += self.mine.encode(self.open)
            self.open, self.recent = b"", []
            if token in self.special and [self.special[token]] != self.closed:  # not a second start of the text
                self.closed.append(self.special[token])

    def tokens(self, longest: int) -> list[int]:
        """The text's tokens; of one that has more than `longest`, the newest half as many or a little more."""
        newest = self.mine.encode(self.open)
        if len(self.open) > 4 * OPEN:
            newest = self._close(newest)
        if len(self.closed) + len(newest) > longest:
            del self.closed[: max(0, len(self.closed) + len(newest) - longest // 2)]
        return [*self.closed, *newest][-longest:]

    def _close(self, newest: list[int]) -> list[int]:
        """Keep for good what lies before the last word that begins `OPEN` bytes before the end or earlier; the rest."""
        place, cut = 0, (0, 0)
        for number, token in enumerate(newest):
            piece = self.mine.pieces[token] or b""
            if place > len(self.open) - OPEN:
                break
            if re.match(rb" [A-Za-z]", piece) and not self.open[:place].endswith((b" ", b"\n")):
                cut = number, place
            place += len(piece)
        number, place = cut
        self.closed += newest[:number]
        self.open = self.open[place:]
        return newest[number:]
