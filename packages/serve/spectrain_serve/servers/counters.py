"""Counters of drafts at /metrics, which vLLM and llama.cpp print with the same names behind
their own.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from .base import DraftCounters

if TYPE_CHECKING:
    from .client import HttpClient

COUNTER_LINE = re.compile(r"^(\w+):spec_decode_num_(\w+)_total(?:\{(.*)\})? (\S+)$", re.MULTILINE)
# Seconds between two readings of counters, which lag behind the answers.
SETTLE_SECONDS = 0.3


async def read_settled_counters(client: HttpClient, engine: str) -> DraftCounters | None:
    """Return what a server has counted, once it stands still; None if it counts no drafts."""
    before = None
    while True:
        counters = parse_counters(await client.get(f"{client.root}/metrics"), engine)
        if counters is None or counters == before:
            return counters
        before = counters
        await asyncio.sleep(SETTLE_SECONDS)


def parse_counters(text: str, engine: str) -> DraftCounters | None:
    """Return the counters of drafts in the text of /metrics, added over the lines of an engine;
    None if there are none.
    """
    totals: dict[str, float] = {}
    by_position: dict[int, float] = {}
    for prefix, name, labels, number in COUNTER_LINE.findall(text):
        if prefix != engine:
            continue
        if position := re.search(r'position="(\d+)"', labels):
            by_position[int(position[1])] = by_position.get(int(position[1]), 0.0) + float(number)
        else:
            totals[name] = totals.get(name, 0.0) + float(number)
    if "drafts" not in totals:
        return None
    accepted = tuple(
        int(by_position.get(position, 0)) for position in range(max(by_position, default=-1) + 1)
    )
    return DraftCounters(int(totals["drafts"]), int(totals["draft_tokens"]), accepted)
