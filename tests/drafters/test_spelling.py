"""Tokens as bytes, and texts followed in the tokens of another tokenizer."""

import random
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from spectrain.errors import UserError
from spectrain.experimental.cross_vocabulary.spelling import (
    ByteTokenizer,
    RetokenizedText,
    map_shared_tokens,
    map_special_tokens,
    trim_partial_character,
)
from spectrain.experimental.cross_vocabulary.warping import align_tokens, carry_probabilities, uncovered_bytes
from spectrain.models.target import Target

from .bilingual import TEXT, byte_level, sentencepiece

BYTES = [
    b"the bees", b" find the  hive\n\n again", "\u00c4pfel, \u65e5\u672c \U0001f600!".encode(), b"", b"a\xffb\xe6\x97",
    b"\x97\xa5 b",
    b"<|im_end|> is text here, and <s> too", b"\n\nx", b" ", b"   12",
]  # fmt: skip


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    if kind == "sentencepiece":
        return sentencepiece(340, TEXT)
    return byte_level({"coarse": 340, "fine": 280}[kind], TEXT)


@cache
def spelling(kind: str) -> ByteTokenizer:
    return ByteTokenizer(tokenizer(kind), kind)


KINDS = ("coarse", "fine", "sentencepiece")


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_spells_the_same_bytes(kind: str) -> None:
    """What encodes bytes spells them, whatever they are, and special tokens are never among it; real texts are encoded as the
    tokenizer does, but for what it puts before them."""
    spells = spelling(kind)
    for data in BYTES:
        tokens = spells.encode_bytes(data)
        assert spells.decode_bytes(tokens) == data and not {*tokens} & {*spells.special_tokens}
    for text in TEXT:
        theirs = tokenizer(kind)(text, add_special_tokens=False)["input_ids"]
        mine = spells.encode_bytes(text.encode())
        assert mine == theirs if kind != "sentencepiece" else spells.decode_bytes(theirs) == b" " + text.encode()


def test_the_tiny_target_is_spelled(tiny: Target) -> None:
    """Of the tokenizer that ships: pieces join to the text, every ordinary token has one, and a piece names its token."""
    spells = ByteTokenizer(tiny.tokenizer, "tiny")
    text = "Hello, it's 2024: caf\u00e9 \u65e5\n\n  done"
    assert spells.decode_bytes(tiny.tokenizer(text, add_special_tokens=False)["input_ids"]) == text.encode()
    assert {token for token, piece in enumerate(spells.pieces) if piece is None} == {*spells.special_tokens}
    assert all(spells.pieces[token] == piece for piece, token in spells.token_of_piece.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_at_its_border(kind: str) -> None:
    """Behind other bytes the tokens spell the same bytes, and are those of the whole where it has a border there."""
    spells = spelling(kind)
    data = b"the bees find the hive again, \xc3\x84pfel"
    whole = spells.encode_bytes(data)
    ends = np.cumsum([len(spells.pieces[token] or b"") for token in whole]).tolist()
    for cut in range(len(data) + 1):
        found = spells.encode_after(data[:cut], data[cut:])
        assert spells.decode_bytes(found) == data[cut:]
        if cut in ends:
            assert found == whole[ends.index(cut) + 1 :]


@pytest.mark.parametrize(("mine", "theirs"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_shared_tokens_stand_for_the_same(mine: str, theirs: str) -> None:
    """Every pair spells the same bytes, no token is in two pairs, and no piece of both vocabularies is missing."""
    ours, others = spelling(mine), spelling(theirs)
    pairs = map_shared_tokens(ours, others)
    ordinary = {a: b for a, b in pairs.items() if a not in others.special_tokens}
    assert len({*pairs.values()}) == len(pairs)
    assert all(ours.pieces[b] == others.pieces[a] for a, b in ordinary.items())
    assert len(ordinary) == len({*filter(None, ours.pieces)} & {*filter(None, others.pieces)})
    assert pairs[others.eos_token] == ours.eos_token  # whatever their names are


@pytest.mark.parametrize("kind", KINDS)
def test_a_growing_text_is_encoded_as_a_whole(kind: str) -> None:
    """Read in pieces of any size, over hundreds of bytes, a text has the tokens that it has read at once; special tokens that
    both have stay, others are left out."""
    theirs, mine = spelling("coarse" if kind != "coarse" else "fine"), spelling(kind)
    draw = random.Random(0)
    words = [theirs.encode_bytes(b" " + word) for word in b"the bees find a tree of tokens again".split()]
    tokens = [token for _ in range(400) for token in draw.choice(words)]
    text = RetokenizedText(mine, theirs, map_special_tokens(mine, theirs))
    lengths = []
    while text.num_read < len(tokens):
        text.append_tokens(tokens[text.num_read : text.num_read + draw.randint(1, 9)])
        assert text.encode_text(10**6) == mine.start_tokens + mine.encode_bytes(theirs.decode_bytes(tokens[: text.num_read]))
        lengths.append(len(text.open_bytes))
    assert max(lengths) < 1000  # what is encoded anew in every round does not grow
    assert theirs.eos_token is not None and mine.eos_token is not None
    before = len(text.encode_text(10**6))
    text.append_tokens([theirs.eos_token])
    assert text.encode_text(10**6)[before:] == [mine.eos_token]
    text.special_map = {}
    text.append_tokens([theirs.eos_token])
    assert len(text.encode_text(10**6)) == before + 1


def test_a_long_text_is_cut_seldom() -> None:
    """A text that is longer than the drafter can see keeps its newest part, which mostly stays as it is from round to round."""
    theirs, mine = spelling("coarse"), spelling("fine")
    text, found = RetokenizedText(mine, theirs, {}), []
    for number in range(300):
        text.append_tokens(theirs.encode_bytes(b" tree %d of bees" % number))
        found.append(text.encode_text(400))
        assert len(found[-1]) <= 400 and mine.decode_bytes(found[-1]).endswith(b" of bees")
    kept = [new[: len(old) // 2] == old[: len(old) // 2] for old, new in pairwise(found)]
    assert 0 < kept.count(False) < 0.2 * len(kept)


def test_characters_that_are_not_complete_are_cut_off() -> None:
    """The beginning of a character at the end is left out, also of one that began before; all else stays."""
    text = "a\u00e9\u65e5\U0001f600b".encode()
    for end in range(len(text) + 1):
        for cut in range(end + 1):
            complete = text[:end].decode("utf-8", "ignore").encode()
            assert trim_partial_character(text[:cut], text[cut:end]) == complete[cut:]
    assert trim_partial_character(b"", b"a\x80\x80\x80") == b"a\x80\x80\x80"


def test_a_tokenizer_without_bytes_is_refused() -> None:
    """One whose tokens cannot be turned to bytes is named with its setting."""
    made = byte_level(280, TEXT)
    made.backend_tokenizer.decoder = None
    with pytest.raises(UserError, match=r"drafter\.model=DIR: the bytes of its tokens are unknown"):
        ByteTokenizer(made, "drafter.model=DIR")


# Warping


def ways(rows: int, columns: int) -> list[list[tuple[int, int]]]:
    """Every way from the first pair to the last one."""
    if rows == 1 or columns == 1:
        return [[(i, j) for i in range(rows) for j in range(columns)]]
    steps = [*ways(rows - 1, columns - 1), *ways(rows - 1, columns), *ways(rows, columns - 1)]
    return [[*way, (rows - 1, columns - 1)] for way in steps]


def test_warping_is_the_cheapest_way() -> None:
    """Held to all ways by enumeration; of two encodings of one text, tokens that cover the same bytes are always paired."""
    draw = random.Random(1)
    for _ in range(60):
        bytes_ = draw.randint(4, 9)
        sizes, others = (
            [b - a for a, b in pairwise([0, *sorted(draw.sample(range(1, bytes_), draw.randint(0, 3))), bytes_])] for _ in "ab"
        )
        costs = uncovered_bytes(sizes, others)
        pairs = align_tokens(costs)
        least = min(sum(costs[pair] for pair in way) for way in ways(len(sizes), len(others)))
        assert sum(costs[pair] for pair in pairs) == least and pairs[0] == (0, 0)
        assert {*zip(*map(list, np.nonzero(costs == 0)))} <= {*pairs}
        chances = [draw.random() for _ in sizes]
        assert np.isclose(np.prod(carry_probabilities(chances, pairs, len(others))), np.prod(chances))
    assert carry_probabilities([0.5, 0.25], align_tokens(uncovered_bytes([2, 3], [2, 3])), 2) == [0.5, 0.25]
