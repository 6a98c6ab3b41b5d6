"""What a tokenizer.json may do with a text: one that multiplies texts, cuts or fills them, draws at
random or searches them without end is refused before it is loaded.
"""

import base64
import json
import math
import re
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from spectrain.errors import RUST_FAILURE, UserError, first_line

MAX_ADDED_TOKENS = 50_000
"""Tokens that are added to a vocabulary one by one; a million of them load for more than a
minute."""
MAX_GROWTH = 64.0
"""Characters that one character of a text may become by all replacements together; those of
published tokenizers are of one to three characters."""
MAX_PARTS = 256
"""Steps of a normalizer or another part, tokens that a template adds to a text, and characters that
are put before it."""
MAX_MAPPED_BYTES = 256
"""Bytes that a table of characters may put in place of one; the compatibility forms of Unicode have
33 at most."""
MAX_PATTERN_SECONDS = 0.005
"""Seconds that a pattern may search a text of at most `PROBE_LENGTHS[-1]` characters; those of
published tokenizers take less than a fiftieth."""
PROBE_LENGTHS = (8, 12, 16, 20, 28, 40, 60, 100, 400)
"""Lengths of the trial texts, so that the first one that takes long ends soon. At the last one,
time that grows with the cube is found; the square is that of published patterns, as of \\s+$."""
PROBE_CHARACTERS = "aA1 \n!_.\t-'\u00e9\u4e2d"
MAX_WORDS = 32
MAX_UNITS = 256
"""Words and classes that are taken from a pattern, and all that is repeated to trial texts."""
MAX_CHARACTER = 0x110000
SAMPLE_RANGES = (range(9, 0x3400, 7), range(0x3400, 0xD800, 61), range(0xE000, 0x20000, 31))
SAMPLES = "".join(map(chr, (*chain(*SAMPLE_RANGES), 0x20000, 0xE0100, 0xF0000, 0x10FFFD)))
"""Characters of every script that is written today."""
ESCAPED_CHARACTER = re.compile(r"\\x\{([0-9a-fA-F]{1,8})\}|\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})")
ESCAPE = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[\[:[^]]*:\]\]?")
WORD = re.compile(r"[^\W_]{2,16}")
CLASS = re.compile(r"\\[pP]\{\^?\w{1,40}\}|\[\[:\^?\w{1,20}:\]\]|\\[a-zA-Z]")
STEPS = ("normalizers", "pretokenizers", "decoders", "processors")
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
DROPOUT = re.compile(r'"dropout"\s*:\s*([0-9]*(?:\.[0-9]+(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+))')
ESCAPED_LETTER = "\\u00"
ADVICE = "no model needs that; copy the file again"


def check_tokenizer_file(path: Path) -> None:
    """Raise a UserError for a tokenizer.json that may turn a short text into a long one, or search
    it without end. What is no such file, the library refuses.
    """
    if path.is_file():
        stat = path.stat()
        _check_content(path, stat.st_mtime_ns, stat.st_size)


# A command may look at a model several times, and a file may have 40 MB.
@lru_cache(maxsize=8)
def _check_content(path: Path, changed: int, size: int) -> None:
    content = path.read_bytes()
    # Each added token says whether it is a single word, which nothing else in the file does.
    number = content.count(b'"single_word"')
    if number > MAX_ADDED_TOKENS:
        raise UserError(
            f"{path}: it has {number} added tokens, and no model needs more than "
            f"{MAX_ADDED_TOKENS}; copy the file again"
        )
    try:
        for settings in read_parts(content.decode()):
            check_tokenizer_settings(settings, str(path))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: it cannot be read ({first_line(error)}); copy the file again"
        ) from error


def read_parts(text: str) -> Iterator[dict[str, Any]]:
    """Yield what a tokenizer.json says besides its vocabulary, which takes a second to parse:
    every value of a key that may be one of these, wherever it stands.
    """
    if ESCAPED_LETTER in text:
        # A key may be written with escapes.
        settings = json.loads(text)
        yield settings if isinstance(settings, dict) else {}
        return
    decoder = json.JSONDecoder()
    for part in PARTS:
        for match in re.finditer(rf'"{part}"\s*:\s*', text):
            yield {part: decoder.raw_decode(text, match.end())[0]}
    # The id of a token with this name is a whole number.
    if (rate := DROPOUT.search(text)) is not None:
        yield {"model": {"dropout": float(rate[1])}}


def check_loaded_tokenizer(tokenizer: Any, name: str) -> None:
    """Raise a UserError for a loaded tokenizer whose file would be refused."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    parts = {part: getattr(backend, part, None) for part in PARTS}
    settings = {
        part: json.loads(value.__getstate__()) for part, value in parts.items() if value is not None
    }
    settings["model"] = {"dropout": getattr(backend.model, "dropout", None)}
    check_tokenizer_settings(settings, name)


def check_tokenizer_settings(settings: Mapping[str, Any], name: str) -> None:
    """Raise a UserError for the settings of a tokenizer, as tokenizer.json holds them; `name` says
    where they come from.
    """
    for part in PARTS:
        steps = [*iterate_steps(settings.get(part))]
        if len(steps) > MAX_PARTS:
            raise UserError(f"{name}: its {part} has more than {MAX_PARTS} steps; {ADVICE}")
        growth = 1.0
        for step in steps:
            growth *= find_growth(step, f"{name}: its {part}")
            if growth > MAX_GROWTH:
                raise UserError(
                    f"{name}: its {part} may turn one character into more than {MAX_GROWTH:g}; "
                    f"{ADVICE}"
                )
            pattern = find_pattern(step)
            if pattern is not None:
                check_pattern(pattern, f"{name}: its {part}")
    model = settings.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise UserError(
            f"{name}: its model leaves out merges at random (dropout={model['dropout']}), so a "
            'text is other tokens each time; write "dropout": null'
        )


def iterate_steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of a tokenizer, of sequences within it too, up to one more than any
    part may have."""
    waiting = [part]
    number = 0
    while waiting and number <= MAX_PARTS:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        inner = [entry for key in STEPS if isinstance(step.get(key), list) for entry in step[key]]
        waiting += reversed(inner)
        number += 1
        yield step


def find_growth(step: Mapping[str, Any], name: str) -> float:
    """Return how many characters a step may make of one; raise a UserError for one that adds too
    many to a text, however short.
    """
    kind = step.get("type")
    if kind == "Replace":
        content = step.get("content")
        if not isinstance(content, str):
            return 1.0
        text = (
            step["pattern"].get("String")
            if isinstance(step.get("pattern"), dict)
            else step.get("pattern")
        )
        # A regular expression may match one character, or the place beside it.
        return max(1.0, len(content) / max(1, len(text) if isinstance(text, str) else 1))
    added = sum(len(text) for text in step.values() if isinstance(text, str))
    if kind == "TemplateProcessing":
        added = _count_template_tokens(step)
    elif kind == "Precompiled":
        added = 0
        if (longest := _find_longest_mapping(step.get("precompiled_charsmap"))) > MAX_MAPPED_BYTES:
            raise UserError(f"{name} puts {longest} bytes in place of a character; {ADVICE}")
    elif find_pattern(step) is not None or kind in ("Split", "BPEDecoder"):
        added = 0
    if added > MAX_PARTS:
        raise UserError(f"{name} adds more than {MAX_PARTS} tokens or characters; {ADVICE}")
    return 1.0


def _count_template_tokens(step: Mapping[str, Any]) -> int:
    """Return an upper bound of the tokens that a template adds to a text."""
    special = step.get("special_tokens")
    ids = max(
        (
            len(token["ids"])
            for token in (special.values() if isinstance(special, dict) else ())
            if isinstance(token, dict) and isinstance(token.get("ids"), list)
        ),
        default=1,
    )
    pieces = max(
        (len(step[key]) for key in ("single", "pair") if isinstance(step.get(key), list)), default=0
    )
    return max(1, ids) * pieces


def _find_longest_mapping(encoded: Any) -> int:
    """Return the bytes of the longest text in a table of SentencePiece: the size of its search
    tree, the tree, and the texts, each of which ends with a zero.
    """
    try:
        table = base64.b64decode(encoded)
        size = struct.unpack("<I", table[:4])[0]
    except (TypeError, ValueError, struct.error):
        return 0
    return max(map(len, table[4 + size :].split(b"\0")), default=0)


def find_pattern(step: Mapping[str, Any]) -> str | None:
    """Return the regular expression of a step; None for one without."""
    pattern = step.get("pattern")
    found = pattern.get("Regex") if isinstance(pattern, dict) else None
    return found if isinstance(found, str) else None


def check_pattern(pattern: str, name: str) -> None:
    """Raise a UserError for a regular expression that searches one of some trial texts for long,
    which means that the time grows with a power of their length.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    shown = repr(pattern[:60])
    try:
        search = Split(Regex(pattern), "isolated")
    except Exception as error:
        raise UserError(
            f"{name} has the pattern {shown}, which cannot be read ({first_line(error)}); copy "
            "the file again"
        ) from error
    for text in make_probes(pattern):
        # A machine that pauses makes one search slow, not three.
        if all(time_search(search, text) > MAX_PATTERN_SECONDS for _ in range(3)):
            raise UserError(
                f"{name} has the pattern {shown}, which takes more than "
                f"{1000 * MAX_PATTERN_SECONDS:g} ms for {len(text)} characters; {ADVICE}"
            )


def time_search(search: Any, text: str) -> float:
    """Return the seconds of this thread's processor time that a search of the text takes; infinity
    where the library gives it up.
    """
    began = time.thread_time()
    try:
        search.pre_tokenize_str(text)
    except BaseException as error:
        if type(error).__name__ != RUST_FAILURE:
            raise
        return math.inf
    return time.thread_time() - began


def make_probes(pattern: str) -> Iterator[str]:
    """Yield texts that a regular expression may search for long, shortest first: repeated
    characters and words, among them those that the expression names.
    """
    written = ESCAPED_CHARACTER.sub(lambda match: read_character(*match.groups()), pattern)
    written = ESCAPE.sub("", written)
    words = WORD.findall(written)[:MAX_WORDS]
    characters = [*PROBE_CHARACTERS, *written, *find_members(pattern)]
    letters = "".join(filter(str.isalnum, dict.fromkeys(written)))
    # Without a letter that the expression needs, it is not even tried.
    needed = "".join(dict.fromkeys(written))[:MAX_UNITS]
    ends = "", f"!{needed}", f"\n{needed}"
    distinct = dict.fromkeys([*characters, *words, letters[:4], "a1", "a "])
    units = [*filter(None, distinct)][:MAX_UNITS]
    for length in PROBE_LENGTHS:
        for unit in units:
            yield from ((unit * length)[:length] + end for end in ends)


def read_character(*digits: str | None) -> str:
    """Return the character whose number an escape writes; nothing for one that does not exist."""
    number = int(next(filter(None, digits)), 16)
    return chr(number) if number < MAX_CHARACTER and not 0xD800 <= number < 0xE000 else ""


def find_members(pattern: str) -> list[str]:
    """Return a character of each class that a regular expression names, as \\p{Greek}, if the
    samples have one.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    members = []
    for name in list(dict.fromkeys(CLASS.findall(pattern)))[:MAX_WORDS]:
        # A name that does not exist is an error of the whole expression, which says so.
        with suppress(Exception):
            pieces = Split(Regex(name), "removed", invert=True).pre_tokenize_str(SAMPLES)
            members.append(pieces[0][0])
    return members
