"""Tokens per forward by kind of token, by position in the answer, and by position in the text:
prompt and answer.

The kinds are reasoning, content and tool calls, and the markers of the chat template separate them.
A round counts for the kind and the position of the first token that it emits, with all of its
tokens, so the rounds and tokens of the groups add up to those of the acceptance length. Position 0
of an answer is the token of the prefill, which belongs to no round.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from spectrain.data.chat import render_chat
from spectrain.data.chat_template import KINDS, ChatTemplate, Kind, common_length
from spectrain.data.messages import Conversation
from spectrain.decoding.generation import Generation
from spectrain.eval.intervals import Interval, rounds_interval

POSITIONS = {"0-256": 256, "256-1k": 1024, "1k-4k": 4096, "4k+": None}
"""Ranges of positions in an answer, in tokens -> the first position after the range."""
TEXT_POSITIONS = {
    "0-1k": 1024,
    "1k-2k": 2048,
    "2k-4k": 4096,
    "4k-8k": 8192,
    "8k-16k": 16384,
    "16k-32k": 32768,
    "32k+": None,
}
"""Ranges of positions in a text, its prompt included, in tokens -> the first position after the
range.
"""

TURNS = {"turn 1": 1, "turn 2": 2, "turn 3": 3, "turn 4": 4, "turn 5+": None}
"""Turns of a conversation, counted from 0 -> the first turn after these."""

ROUND_GROUPS: dict[str, Iterable[str]] = {
    "by_kind": KINDS,
    "by_position": POSITIONS,
    "by_text_position": TEXT_POSITIONS,
    "by_turn": TURNS,
}
"""Key of a system's entry in summary.json -> the groups of rounds in it, in their order."""


@dataclass(frozen=True)
class GroupedRound:
    """A complete round: its group, the prompt that it belongs to, and the number of tokens that
    it emitted.
    """

    group: str
    prompt_id: str
    tokens: int


@dataclass(frozen=True)
class RoundNumbers:
    """The complete rounds of one kind or range of positions."""

    # Tokens per forward pass of the target.
    acceptance_length: float
    rounds: int
    tokens: int
    # 95 % interval of the acceptance length over prompts.
    ci95: Interval


def position_range(position: int, ranges: Mapping[str, int | None] = POSITIONS) -> str:
    """Return the name of the range that holds a position."""
    return next(name for name, end in ranges.items() if end is None or position < end)


def round_starts(generation: Generation) -> list[tuple[int, int]]:
    """Return the position of the first token of each complete round, after the prefill's token, and
    its number of tokens.

    Rounds that begin after the answer are those of other answers, where a server only counts all of
    them together.
    """
    lengths = generation.complete_round_lengths
    end = len(generation.output)
    return [
        (1 + start, length)
        for start, length in zip(accumulate(lengths, initial=0), lengths)
        if 1 + start < end
    ]


def average_rounds(names: Iterable[str], rounds: Iterable[GroupedRound]) -> dict[str, RoundNumbers]:
    """Average rounds by group, in this order of names; groups without a round are left out."""
    groups: dict[str, list[GroupedRound]] = {name: [] for name in names}
    for item in rounds:
        groups[item.group].append(item)
    return {name: summarize_rounds(members) for name, members in groups.items() if members}


def summarize_rounds(rounds: Sequence[GroupedRound]) -> RoundNumbers:
    """Return the numbers of one group, with an interval over its prompts."""
    sums: dict[str, list[int]] = {}
    for item in rounds:
        tokens, count = sums.get(item.prompt_id, (0, 0))
        sums[item.prompt_id] = [tokens + item.tokens, count + 1]
    ends = rounds_interval(np.array([sums[name] for name in sorted(sums)], dtype=np.float64))
    total = sum(item.tokens for item in rounds)
    return RoundNumbers(round(total / len(rounds), 4), len(rounds), total, ends)


def opening_kind(template: ChatTemplate, conversation: Conversation) -> Kind:
    """Return the kind of the first token after a prompt: a generation prompt may open the
    reasoning itself.
    """
    if conversation.text is not None or template.markers.reasoning is None:
        return "content"
    opening = render_chat(template, conversation, for_generation=True)
    return template.markers.last_kind(
        opening[common_length(opening, render_chat(template, conversation)) :]
    )


def kind_runs(kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """Return consecutive tokens of one kind as {"kind", "tokens"}, in the order of the answer."""
    return [{"kind": kind, "tokens": len(list(group))} for kind, group in groupby(kinds)]
