"""A tokenizer that multiplies texts, adds to them without measure, draws at random or searches them
without end is refused before it is loaded; what published tokenizers do is accepted.
"""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from spectrain.errors import UserError
from spectrain.models.bundled import TINY_DIRECTORY, load_tiny_tokenizer
from spectrain.models.loading import load_hf
from spectrain.models.tokenizer_files import (
    MAX_PARTS,
    check_loaded_tokenizer,
    check_tokenizer_file,
    check_tokenizer_settings,
    iterate_steps,
)
from tests.models.checkpoints import save_unquantized


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def in_sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [*steps]}


def make_table(longest: int) -> dict[str, Any]:
    table = struct.pack("<I", 4) + bytes(4) + b"a\0" + b"b" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def make_template(num_pieces: int, num_ids: int) -> dict[str, Any]:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    piece = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [text] + [piece] * num_pieces,
        "pair": [text],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * num_ids, "tokens": []}},
    }


def split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"type": "Sequence", "pretokenizers": [split]}


A = {"String": "a"}
REFUSED = {
    "a letter becomes 100,000": ({"normalizer": replace({"Regex": "a"}, "a" * 100_000)}, "more"),
    "three steps by ten": (
        {"normalizer": in_sequence(*[replace(A, "a" * 10)] * 3)},
        "more than 64",
    ),
    "sequences in sequences": (
        {"normalizer": in_sequence(*[in_sequence(*[replace({"Regex": "."}, "xy")] * 3)] * 3)},
        "more than 64",
    ),
    "a long beginning": ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}}, "adds more"),
    "a table of characters": ({"normalizer": make_table(1000)}, "puts 1000 bytes in place"),
    "a decoder": ({"decoder": replace(A, "b" * 100)}, "may turn one character"),
    "many steps": ({"normalizer": in_sequence(*[{"type": "NFC"}] * 300)}, "more than 256 steps"),
    "a long template": ({"post_processor": make_template(300, 1)}, "adds more than 256 tokens"),
    "a long special token": (
        {"post_processor": make_template(1, 300)},
        "adds more than 256 tokens",
    ),
    "merges at random": ({"model": {"dropout": 0.1}}, "at random"),
    "nested repeats": ({"pre_tokenizer": split_by("(a+)+$")}, "takes more than 5 ms"),
    "nested choices": ({"pre_tokenizer": split_by("(x|xx|xxx){1,14}y")}, "takes more than 5 ms"),
    "repeats of classes": (
        {"normalizer": replace({"Regex": r"(\w+\s?)+$"}, "")},
        "takes more than",
    ),
    "a character that no trial text has": (
        {"pre_tokenizer": split_by("(#+)+$")},
        "takes more than 5 ms",
    ),
    "a class of characters": (
        {"pre_tokenizer": split_by(r"(\p{Cherokee}+)+q")},
        "takes more than 5 ms",
    ),
    "characters by their numbers": (
        {"pre_tokenizer": split_by(r"([\x{3b1}-\x{3c9}]+)+\u0023")},
        "takes more than 5 ms",
    ),
    "words that begin alike": (
        {"pre_tokenizer": split_by("(?:foo|fo|o)+z")},
        "takes more than 5 ms",
    ),
    "no end but that of the text": (
        {"pre_tokenizer": split_by(r"(\s+)+\S")},
        "takes more than 5 ms",
    ),
    "time by the third power": (
        {"pre_tokenizer": split_by("[^ ]*[^ ]*[^ ]*;")},
        "takes more than 5 ms",
    ),
    "an open bracket": ({"pre_tokenizer": split_by("(((")}, "cannot be read"),
}
"""Settings of a tokenizer, and what a refusal says of them."""
PUBLISHED_PATTERNS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    r" {2,}",
    r"\s+$",
    r"(?=(\d{3})+(?!\d))",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)",
)


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_would_not_end_is_refused(name: str) -> None:
    settings, reason = REFUSED[name]
    with pytest.raises(UserError, match=f"^x: its .*{reason}"):
        check_tokenizer_settings(settings, "x")


@pytest.mark.parametrize("is_escaped", [False, True])
def test_the_file_is_refused_before_it_is_loaded(is_escaped: bool, tmp_path: Path) -> None:
    """Whatever else the file holds, and however its key is written."""
    save_unquantized(tmp_path, vocab_size=2048)
    settings = json.loads((TINY_DIRECTORY / "tokenizer.json").read_text())
    settings["normalizer"] = replace({"Regex": "a"}, "a" * 100_000)
    text = json.dumps(settings, ensure_ascii=False)
    if is_escaped:
        text = text.replace('"normalizer"', r'"\u006eormalizer"')
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer\.json: its normalizer may turn one character"):
        load_hf(str(tmp_path), "grows", device="cpu")


def test_random_merges_are_found_beside_a_token_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"dropout": null, "vocab": {"dropout": 7, "decoder": 8}}}')
    check_tokenizer_file(path)
    path.write_text('{"model": {"vocab": {"dropout": 7}, "dropout": 1e-1}}')
    with pytest.raises(UserError, match=r"at random \(dropout=0\.1\)"):
        check_tokenizer_file(path)


def test_a_file_that_is_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (b'{"normalizer": {"type": ', b'{"decoder": ' + b"[" * 10**5, b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer\.json: it cannot be read .*copy the file"):
            check_tokenizer_file(path)


@pytest.mark.parametrize("pattern", PUBLISHED_PATTERNS)
def test_published_patterns_are_accepted(pattern: str) -> None:
    check_tokenizer_settings({"pre_tokenizer": split_by(pattern)}, "x")


def test_published_steps_are_accepted() -> None:
    """The normalizers of Llama 2, ALBERT and T5, and the parts of a loaded tokenizer."""
    space = replace({"String": " "}, "\u2581")
    quotes = [replace({"String": "``"}, '"'), replace({"String": "''"}, '"')]
    for steps in (
        [{"type": "Prepend", "prepend": "\u2581"}, space],
        [*quotes, {"type": "NFKD"}, {"type": "StripAccents"}, make_table(33)],
        [make_table(33), replace({"Regex": " {2,}"}, "\u2581")],
    ):
        check_tokenizer_settings({"normalizer": in_sequence(*steps)}, "x")
    check_tokenizer_settings({"post_processor": make_template(2, 1)}, "x")
    check_tokenizer_file(TINY_DIRECTORY / "tokenizer.json")
    check_loaded_tokenizer(load_tiny_tokenizer(), "x")


class LoadedTokenizer:
    """A tokenizer of `transformers`, as far as the check looks at it."""

    def __init__(self) -> None:
        self.backend_tokenizer = Tokenizer(BPE())
        self.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        self.backend_tokenizer.decoder = decoders.ByteLevel()
        self.backend_tokenizer.post_processor = processors.ByteLevel()


def test_a_loaded_tokenizer_is_refused_like_its_file() -> None:
    tokenizer = LoadedTokenizer()
    check_loaded_tokenizer(tokenizer, "x")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("a"), "a" * 1000)
    with pytest.raises(UserError, match="x: its normalizer may turn one character into more"):
        check_loaded_tokenizer(tokenizer, "x")


def test_steps_that_hold_themselves_in_depth_end() -> None:
    step: dict[str, Any] = {"type": "NFC"}
    for _ in range(10_000):
        step = {"type": "Sequence", "normalizers": [step, step]}
    assert len([*iterate_steps(step)]) == MAX_PARTS + 1
