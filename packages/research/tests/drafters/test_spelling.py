"""Tokens as bytes, and texts that are re-encoded in the tokens of another tokenizer."""

import random
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain_research.cross_vocabulary.spelling import (
    ByteTokenizer,
    RetokenizedText,
    map_shared_tokens,
    map_special_tokens,
    trim_partial_character,
)
from spectrain_research.cross_vocabulary.warping import (
    align_tokens,
    carry_probabilities,
    uncovered_bytes,
)
from tests.drafters.bilingual import TEXT, byte_level, sentencepiece

BYTES = [
    b"the bees",
    b" find the  hive\n\n again",
    "\u00c4pfel, \u65e5\u672c \U0001f600!".encode(),
    b"",
    b"a\xffb\xe6\x97",
    b"\x97\xa5 b",
    b"<|im_end|> is text here, and <s> too",
    b"\n\nx",
    b" ",
    b"   12",
]


@cache
def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    if kind == "sentencepiece":
        return sentencepiece(340, TEXT)
    return byte_level({"coarse": 340, "fine": 280}[kind], TEXT)


@cache
def make_byte_tokenizer(kind: str) -> ByteTokenizer:
    return ByteTokenizer(make_tokenizer(kind), kind)


KINDS = ("coarse", "fine", "sentencepiece")


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_spells_the_same_bytes(kind: str) -> None:
    """Encoded bytes decode to themselves and hold no special token; real texts are encoded as the
    tokenizer does, apart from its prefix."""
    tokenizer = make_byte_tokenizer(kind)
    for data in BYTES:
        tokens = tokenizer.encode_bytes(data)
        assert tokenizer.decode_bytes(tokens) == data and not {*tokens} & {
            *tokenizer.special_tokens
        }
    for text in TEXT:
        reference = make_tokenizer(kind)(text, add_special_tokens=False)["input_ids"]
        actual = tokenizer.encode_bytes(text.encode())
        assert (
            actual == reference
            if kind != "sentencepiece"
            else tokenizer.decode_bytes(reference) == b" " + text.encode()
        )


def test_the_tiny_target_is_spelled(tiny: Target) -> None:
    """With the tokenizer that ships, pieces join to the text, every ordinary token has one, and
    a piece names its token.
    """
    tokenizer = ByteTokenizer(tiny.tokenizer, "tiny")
    text = "Hello, it's 2024: caf\u00e9 \u65e5\n\n  done"
    assert (
        tokenizer.decode_bytes(tiny.tokenizer(text, add_special_tokens=False)["input_ids"])
        == text.encode()
    )
    assert {token for token, piece in enumerate(tokenizer.pieces) if piece is None} == {
        *tokenizer.special_tokens
    }
    assert all(
        tokenizer.pieces[token] == piece for piece, token in tokenizer.token_of_piece.items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_at_its_border(kind: str) -> None:
    """Tokens behind other bytes spell the rest, and are those of the full text if it has a token
    border there.
    """
    tokenizer = make_byte_tokenizer(kind)
    data = b"the bees find the hive again, \xc3\x84pfel"
    full = tokenizer.encode_bytes(data)
    ends = np.cumsum([len(tokenizer.pieces[token] or b"") for token in full]).tolist()
    for cut in range(len(data) + 1):
        tokens = tokenizer.encode_after(data[:cut], data[cut:])
        assert tokenizer.decode_bytes(tokens) == data[cut:]
        if cut in ends:
            assert tokens == full[ends.index(cut) + 1 :]


@pytest.mark.parametrize(
    ("target_kind", "drafter_kind"), [(a, b) for a in KINDS for b in KINDS if a != b]
)
def test_shared_tokens_stand_for_the_same(target_kind: str, drafter_kind: str) -> None:
    """Every pair spells the same bytes, no token is in two pairs, and no piece of both
    vocabularies is missing.
    """
    target = make_byte_tokenizer(target_kind)
    drafter = make_byte_tokenizer(drafter_kind)
    pairs = map_shared_tokens(target, drafter)
    ordinary = {a: b for a, b in pairs.items() if a not in drafter.special_tokens}
    assert len({*pairs.values()}) == len(pairs)
    assert all(target.pieces[b] == drafter.pieces[a] for a, b in ordinary.items())
    assert len(ordinary) == len({*filter(None, target.pieces)} & {*filter(None, drafter.pieces)})
    assert pairs[drafter.eos_token] == target.eos_token  # whatever their names are


@pytest.mark.parametrize("kind", KINDS)
def test_a_growing_text_is_encoded_as_at_once(kind: str) -> None:
    """A text read in pieces of any size has the tokens of the full text; shared special tokens
    stay, others are dropped.
    """
    source = make_byte_tokenizer("coarse" if kind != "coarse" else "fine")
    destination = make_byte_tokenizer(kind)
    draw = random.Random(0)
    words = [
        source.encode_bytes(b" " + word) for word in b"the bees find a tree of tokens again".split()
    ]
    tokens = [token for _ in range(400) for token in draw.choice(words)]
    text = RetokenizedText(destination, source, map_special_tokens(destination, source))
    lengths = []
    while text.num_read < len(tokens):
        text.append_tokens(tokens[text.num_read : text.num_read + draw.randint(1, 9)])
        assert text.encode_text(10**6) == destination.start_tokens + destination.encode_bytes(
            source.decode_bytes(tokens[: text.num_read])
        )
        lengths.append(len(text.open_bytes))
    assert max(lengths) < 1000  # the part that is re-encoded in every round does not grow
    assert source.eos_token is not None and destination.eos_token is not None
    before = len(text.encode_text(10**6))
    text.append_tokens([source.eos_token])
    assert text.encode_text(10**6)[before:] == [destination.eos_token]
    text.special_map = {}
    text.append_tokens([source.eos_token])
    assert len(text.encode_text(10**6)) == before + 1


def test_a_long_text_is_cut_seldom() -> None:
    """A text longer than the context keeps its newest part, which mostly stays the same from
    round to round.
    """
    source = make_byte_tokenizer("coarse")
    destination = make_byte_tokenizer("fine")
    text = RetokenizedText(destination, source, {})
    encodings = []
    for number in range(300):
        text.append_tokens(source.encode_bytes(b" tree %d of bees" % number))
        encodings.append(text.encode_text(400))
        assert len(encodings[-1]) <= 400 and destination.decode_bytes(encodings[-1]).endswith(
            b" of bees"
        )
    stable = [new[: len(old) // 2] == old[: len(old) // 2] for old, new in pairwise(encodings)]
    assert 0 < stable.count(False) < 0.2 * len(stable)


def test_characters_that_are_not_complete_are_cut_off() -> None:
    """The beginning of a character at the end is cut off, also of one that began earlier; all
    else stays.
    """
    text = "a\u00e9\u65e5\U0001f600b".encode()
    for end in range(len(text) + 1):
        for cut in range(end + 1):
            complete = text[:end].decode("utf-8", "ignore").encode()
            assert trim_partial_character(text[:cut], text[cut:end]) == complete[cut:]
    assert trim_partial_character(b"", b"a\x80\x80\x80") == b"a\x80\x80\x80"


def test_a_tokenizer_without_bytes_is_refused() -> None:
    """A tokenizer whose tokens cannot be turned into bytes is refused under its setting."""
    tokenizer = byte_level(280, TEXT)
    tokenizer.backend_tokenizer.decoder = None
    with pytest.raises(UserError, match=r"drafter\.model=DIR: the bytes of its tokens are unknown"):
        ByteTokenizer(tokenizer, "drafter.model=DIR")


# Warping


def list_alignments(rows: int, columns: int) -> list[list[tuple[int, int]]]:
    """Return every alignment from the first pair to the last one."""
    if rows == 1 or columns == 1:
        return [[(i, j) for i in range(rows) for j in range(columns)]]
    steps = [
        *list_alignments(rows - 1, columns - 1),
        *list_alignments(rows - 1, columns),
        *list_alignments(rows, columns - 1),
    ]
    return [[*alignment, (rows - 1, columns - 1)] for alignment in steps]


def test_warping_is_the_cheapest_way() -> None:
    """The alignment has the least cost of all; of two encodings of a text, tokens that cover the
    same bytes are always paired."""
    draw = random.Random(1)
    for _ in range(60):
        bytes_ = draw.randint(4, 9)
        sizes, others = (
            [
                b - a
                for a, b in pairwise(
                    [0, *sorted(draw.sample(range(1, bytes_), draw.randint(0, 3))), bytes_]
                )
            ]
            for _ in "ab"
        )
        costs = uncovered_bytes(sizes, others)
        pairs = align_tokens(costs)
        least = min(
            sum(costs[pair] for pair in alignment)
            for alignment in list_alignments(len(sizes), len(others))
        )
        assert sum(costs[pair] for pair in pairs) == least and pairs[0] == (0, 0)
        assert {*zip(*map(list, np.nonzero(costs == 0)))} <= {*pairs}
        chances = [draw.random() for _ in sizes]
        assert np.isclose(
            np.prod(carry_probabilities(chances, pairs, len(others))), np.prod(chances)
        )
    assert carry_probabilities([0.5, 0.25], align_tokens(uncovered_bytes([2, 3], [2, 3])), 2) == [
        0.5,
        0.25,
    ]
