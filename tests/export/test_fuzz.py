"""Random changes of a drafter's small files and of the headers of its weights: lint and load accept
them or say one sentence.

Every change is also loaded as eval loads it, so that lint passes nothing that eval refuses. The
seeds are fixed.
"""

import copy
import json
import random
import shutil
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spectrain.config.build import GroupSpec
from spectrain.config.choices import list_constructors
from spectrain.config.spec import RunSpec
from spectrain.decoding.session import prepare_for_decoding
from spectrain.errors import RunError, UserError
from spectrain.export.converter import convert
from spectrain.export.layouts import FORMATS, detect_layout, read_files
from spectrain.export.linter import check_files, lint
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from spectrain.runs.defaults import load_saved_settings
from spectrain.runs.drafters import load_drafter

from .test_converter import ours

TINY = TargetFiles("tiny")
MAX_SECONDS = 10
ESCAPES = "\x1b[31mred\x1b[0m\n\r\x07"
NASTY: tuple[Any, ...] = (
    None, -1, 0, 1, 3, 10**6, 10**9, 10**18, 10**40, -(10**18), float("inf"), float("nan"), 1e300,
    0.5, -0.5, True, False, "",
    "x", "../x", ESCAPES, "1", "float99", "${x}", "a" * 100_000, [], [[10**9]], [{"a": 1}], {},
    {"a": 1}, [0.5], ["x"], [None],
    [-1], [10**9], [1, 1], [ESCAPES], list(range(20_000)), {"_target_": "os.system"},
    {ESCAPES: ESCAPES}, [[[[[]]]]],
)  # fmt: skip
LAYOUTS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "native": ("eagle3", {"vocab_size": 64}, None),
    "native medusa": ("medusa", {"vocab_size": 64, "num_heads": 2}, None),
    "native dflash": ("dflash", {"num_layers": 1, "block_size": 4}, None),
    "native lora": ("gated_lora", {"num_masks": 2, "rank": 2}, None),
    "vllm": ("eagle3", {"vocab_size": 64}, "vllm"),
    "sglang": ("eagle3", {"vocab_size": 64}, "sglang"),
    "eagle": ("eagle1", {}, "eagle"),
    "medusa": ("medusa", {"vocab_size": 2048, "num_heads": 2}, "medusa"),
    "vllm medusa": ("medusa", {"vocab_size": 64, "num_heads": 2}, "vllm"),
    "dflash": ("dflash", {"num_layers": 1, "block_size": 4}, "hf"),
    "vllm dspark": ("dspark", {"num_layers": 1, "block_size": 4, "rank": 4}, "vllm"),
    "peft": ("gated_lora", {"num_masks": 2, "rank": 2}, "peft"),
    "uno": ("uno", {"num_masks": 2, "rank": 2}, "uno"),
    "causal": ("causal", {"num_layers": 1}, "hf"),
    "gguf": ("eagle3", {"vocab_size": 64}, "gguf"),
    "openvino": ("eagle3", {"vocab_size": 64}, "openvino"),
}
"""Name -> family, its settings, and the format; None is our own."""
INSTALLED = {
    name: layout
    for name, layout in LAYOUTS.items()
    if layout[0] in list_constructors("drafter") and layout[2] in (None, *FORMATS)
}
"""Those whose families and formats this package or an installed one has."""


class Endless(BaseException):
    """A call that did not end in time; no handler of errors catches it."""


@contextmanager
def limit_seconds(seconds: int) -> Iterator[None]:
    """Raise `Endless` in a block that takes more seconds of this process's own time, whatever
    else the machine does.
    """

    def stop(*_: object) -> None:
        raise Endless

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def classify(call: Callable[[], Any]) -> str:
    """Run a call: "accepted", "refused" in one sentence, or else what it did."""
    try:
        with limit_seconds(MAX_SECONDS):
            call()
    except (UserError, RunError) as error:
        text = str(error)
        return (
            "refused"
            if text.isprintable() and len(text) < 2000
            else f"not one sentence: {text[:300]!r}"
        )
    except Endless:
        return "endless"
    except Exception as error:
        return f"traceback: {type(error).__name__}: {str(error)[:200]!r}"
    return "accepted"


def list_paths(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys of every value in a JSON file, at most eight of each list."""
    entries = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content[:8])
        if isinstance(content, list)
        else ()
    )
    return [
        found
        for key, value in entries
        for found in [(*path, key), *list_paths(value, (*path, key))]
    ]


def change_content(content: Any, draw: random.Random) -> tuple[Any, str]:
    """Return the content with one value replaced, deleted, added or nested, and what was done."""
    changed = copy.deepcopy(content)
    paths = list_paths(content)
    if not paths:
        return draw.choice(NASTY), "all of it"
    path = draw.choice(paths)
    node = changed
    for key in path[:-1]:
        node = node[key]
    key = path[-1]
    value = draw.choice(NASTY)
    action = draw.choice(("replace", "replace", "replace", "replace", "delete", "add", "nest"))
    if action == "delete":
        del node[key]
    elif action == "add" and isinstance(node, dict):
        node[draw.choice((f"{key}_new", ESCAPES, "x" * 1000))] = value
    elif action == "nest":
        node[key] = draw.choice(
            ([node[key]], {key: node[key]} if isinstance(key, str) else [[node[key]]])
        )
    else:
        node[key] = value
    return changed, f"{action} {'.'.join(map(str, path))} = {str(value)[:40]!r}"


def change_text(text: str, draw: random.Random) -> tuple[str, str]:
    """Return the text of a JSON file with one change, and what was done."""
    action = draw.choice(("value",) * 12 + ("truncate", "duplicate", "byte"))
    content = json.loads(text)
    if action == "truncate":
        return text[: draw.randrange(len(text))], "truncated"
    if action == "duplicate" and isinstance(content, dict) and content:
        key = draw.choice(sorted(content))
        value = draw.choice(NASTY)
        return (
            f"{text.rstrip()[:-1]}, {json.dumps(key)}: {json.dumps(value)}}}",
            f"duplicate {key} = {str(value)[:40]!r}",
        )
    if action == "byte":
        place = draw.randrange(len(text))
        letter = draw.choice('x"[]{}:,\\\x00')
        return f"{text[:place]}{letter}{text[place + 1 :]}", f"{letter!r} at {place}"
    changed, done = change_content(content, draw)
    return json.dumps(changed), done


def change_tensors(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return a safetensors file with one change of its header or its numbers, and what was done."""
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    numbers = bytearray(data[8 + size :])
    names = sorted(name for name in header if name != "__metadata__")
    name = draw.choice(names)
    entry = header[name]
    action = draw.choice(
        (
            "delete",
            "rename",
            "dtype",
            "shape",
            "transpose",
            "offsets",
            "extra",
            "truncate",
            "size",
            "nan",
            "value",
            "swap",
        )
    )
    if action == "delete":
        del header[name]
    elif action == "rename":
        header[
            draw.choice((f"{name}_new", ESCAPES, "layers.10000000000.x", "later.0.x", "fc.weight"))
        ] = header.pop(name)
    elif action == "dtype":
        same = {
            "F32": ("I32", "U32"),
            "I64": ("F64", "U64"),
            "BOOL": ("U8", "I8"),
            "BF16": ("F16", "I16", "U16"),
        }
        entry["dtype"] = draw.choice((*same.get(entry["dtype"], ()), "F8_E4M3", "X", 7))
    elif action == "shape":
        count = 1
        for length in entry["shape"]:
            count *= length
        entry["shape"] = draw.choice(
            ([count], [1, count], [count, 1, 1], [], [0], [-1], [2**63], [2**40, 2**40], "x", [0.5])
        )
    elif action == "transpose":
        entry["shape"] = entry["shape"][::-1]
    elif action == "offsets":
        entry["data_offsets"] = draw.choice(
            ([0, 0], [-1, 4], [0, 2**63], ["a", "b"], entry["data_offsets"][::-1], [0])
        )
    elif action == "extra":
        end = len(numbers)
        numbers += bytes(16)
        extra = draw.choice(
            (
                "x",
                ESCAPES,
                "later.5.x",
                "layers.3.mlp.x",
                "d2t",
                "t2d",
                "fc.bias",
                "heads.9.x",
                "masks",
                "9.9.x",
            )
        )
        header[extra] = {
            "dtype": "F32",
            "shape": draw.choice(([4], [2, 2], [4, 1, 1])),
            "data_offsets": [end, end + 16],
        }
    elif action == "truncate":
        return data[: draw.randrange(len(data))], "truncated"
    elif action == "size":
        return struct.pack("<Q", draw.choice((0, 1, size - 1, size + 1, 2**62))) + data[
            8:
        ], "length of the header"
    elif action in ("nan", "value"):
        start, end = entry["data_offsets"]
        numbers[start:end] = (b"\xff" if action == "nan" else bytes([draw.randrange(256)])) * (
            end - start
        )
    else:
        other = draw.choice(names)
        header[name], header[other] = header[other], header[name]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(
        numbers
    ), f"{action} {name}: {json.dumps(header.get(name))[:80]}"


def change_bytes(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return a file with one change in its first 4 kB, where a GGUF file has its keys, and what
    was done.
    """
    place = draw.randrange(min(len(data), 4096))
    value = draw.choice((b"\x00", b"\xff" * 4, b"\x7f", b"\x01", bytes(8)))
    if draw.random() < 0.1:
        return data[:place], f"truncated to {place}"
    return data[:place] + value + data[place + len(value) :], f"{value!r} at {place}"


def change_file(path: Path, draw: random.Random) -> str:
    """Change a file at random; return what was done."""
    if path.suffix == ".json":
        text, done = change_text(path.read_text(), draw)
        path.write_text(text)
    else:
        change = change_tensors if path.suffix == ".safetensors" else change_bytes
        data, done = change(path.read_bytes(), draw)
        path.write_bytes(data)
    return f"{path.name}: {done}"


def lint_strictly(folder: Path) -> None:
    """Raise a RunError, as the command does, where lint has an error, or says that spectrain
    cannot read the drafter.
    """
    findings = lint(folder, None)
    for finding in findings:
        assert finding.problem and finding.consequence and finding.remedy
    if any(finding.level == "error" or finding.name == "not-representable" for finding in findings):
        raise RunError("an error")


def compare_with_target(folder: Path) -> None:
    """Compare a drafter's files with those of the target, as lint with a target does before it
    decodes.
    """
    files = read_files(folder)
    list(check_files(files, detect_layout(files), TINY))


def load(folder: Path, target: Target) -> None:
    """Load a drafter with its tree and its rule, as eval does."""
    saved = load_saved_settings(folder, GroupSpec("target", "tiny"))
    spec = RunSpec.from_config(
        {key: value for key, value in saved.items() if key in ("drafter", "tree", "acceptance")}
    )
    spec.tree.build()
    spec.acceptance.build()
    prepare_for_decoding(load_drafter(spec, folder, target), target)


@dataclass
class Faults:
    """What a fuzz found."""

    counts: Counter[str] = field(default_factory=Counter)
    # tracebacks, endless calls, several lines, and what lint passes wrongly
    wrong: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    strict: list[str] = field(default_factory=list)  # lint refuses what eval loads


def fuzz_layout(folder: Path, target: Target, count: int, seed: int) -> Faults:
    """Change one of a folder's files at a time, `count` times."""
    faults = Faults()
    draw = random.Random(seed)
    small = [
        path
        for path in sorted(folder.glob("*.json"))
        if not path.name.startswith(("tokenizer", "special_tokens"))
    ]
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    for _ in range(count):
        file = draw.choice(small if small and draw.random() < 0.7 else weights)
        original = file.read_bytes()
        done = change_file(file, draw)
        linted = classify(lambda: lint_strictly(folder))
        compared = classify(lambda: compare_with_target(folder))
        loaded = classify(lambda: load(folder, target))
        file.write_bytes(original)
        faults.counts[f"lint {linted.split(':')[0]}, load {loaded.split(':')[0]}"] += 1
        for command, outcome in (
            ("lint", linted),
            ("lint with a target", compared),
            ("load", loaded),
        ):
            faults.wrong += (
                [f"{command} {done}: {outcome}"] if outcome not in ("accepted", "refused") else []
            )
        faults.wrong += (
            [f"lint passes {done}"] if (linted, loaded) == ("accepted", "refused") else []
        )
        faults.accepted += [done] if (linted, loaded) == ("accepted", "accepted") else []
        faults.strict += [done] if (linted, loaded) == ("refused", "accepted") else []
    return faults


def make_layout(name: str, tiny: Target, folder: Path) -> Path:
    """Return the folder of a saved drafter whose weights carry no checksum, as another tool
    would write them.
    """
    family, options, format_name = LAYOUTS[name]
    start = ours(folder / "start", tiny, family, **options)
    if format_name is None:
        return convert(start, folder / "out", "spectrain", None)
    return convert(start, folder / "out", format_name, TINY)


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
def test_changed_files_end_in_a_sentence(name: str, tiny: Target, tmp_path: Path) -> None:
    """200 changes of each layout: no traceback, nothing endless, and lint passes nothing that eval
    refuses.

    A GGUF file is changed less often, because its library takes half a second to read the
    vocabulary.
    """
    folder = make_layout(name, tiny, tmp_path)
    shutil.rmtree(tmp_path / "start")
    assert (
        classify(lambda: lint_strictly(folder))
        == classify(lambda: load(folder, tiny))
        == "accepted"
    )
    assert fuzz_layout(folder, tiny, 40 if name == "gguf" else 200, seed=7).wrong == []
