"""What the worker of a package and the program that asks it say to each other.

A worker runs in the environment of its package. It reads a request per line of stdin and writes an
answer per line of stdout, both as JSON. This module needs the standard library alone, so that every
environment can import it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """What every worker gets: the target, what drafts for it, and the threads."""

    target: str  # a folder in transformers format
    target_name: str  # the same target as spectrain names it
    dtype: str
    threads: int
    is_block_target: bool = False  # whether spectrain keeps the 4-bit blocks of a GGUF file
    # Folders of an EAGLE-3 export and of a draft model; null leaves out what needs them.
    eagle3: str | None = None
    assistant: str | None = None
    gguf: str | None = None  # the target as one file, for llama.cpp
    assistant_gguf: str | None = None


@dataclass(frozen=True)
class Decoding:
    """The tokens that a system made."""

    output: list[int]
    # Forwards of the target behind the prompt; None where the package does not count them.
    forwards: int | None = None


Decode = Callable[[list[int], int], Decoding]
"""Continues a prompt greedily by so many tokens, past any stop token."""


def read_setting() -> Setting:
    """Return the setting that the program gave as the only argument."""
    return Setting(**json.loads(sys.argv[1]))


def serve(version: str, systems: dict[str, Decode]) -> None:
    """Answer requests until stdin ends. The first system decodes without a drafter."""
    answers = os.fdopen(os.dup(1), "w")
    # Whatever a library prints goes to stderr.
    os.dup2(2, 1)

    def say(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    say({"version": version, "systems": list(systems)})
    for line in sys.stdin:
        request = json.loads(line)
        decode = systems[request["system"]]
        start = time.perf_counter()
        decoding = decode(request["prompt"], request["tokens"])
        say({"seconds": time.perf_counter() - start, **asdict(decoding)})
