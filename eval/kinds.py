"""Tokens per forward by kind of token and by position in the answer.

The kinds are reasoning, content and tool calls, and the markers of the chat template separate them. A round counts for the
kind and the position of the first token that it emits, with all of its tokens, so the rounds and tokens of the groups add up
to those of the acceptance length. Position 0 is the token of the prefill, which belongs to no round.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from spectrain.data.chat import render_chat
from spectrain.data.messages import Conversation
from spectrain.decoding.generation import Generation
from spectrain.models.chat_template import ChatTemplate, Kind, common_length

POSITIONS = {"0-256": 256, "256-1k": 1024, "1k-4k": 4096, "4k+": None}
"""Ranges of positions in an answer, in tokens -> the first position after the range."""


@dataclass(frozen=True)
class RoundNumbers:
    """The complete rounds of one kind or range of positions."""

    # Tokens per forward pass of the target.
    acceptance_length: float
    rounds: int
    tokens: int


def position_range(position: int) -> str:
    """Return the name of the range that holds a position."""
    return next(name for name, end in POSITIONS.items() if end is None or position < end)


def round_starts(generation: Generation) -> list[tuple[int, int]]:
    """Return the position of the first token of each complete round, after the prefill's token, and its number of tokens.

    Rounds that begin after the answer are those of other answers, where a server only counts all of them together.
    """
    lengths, end = generation.complete_round_lengths, len(generation.output)
    return [(1 + start, length) for start, length in zip(accumulate(lengths, initial=0), lengths) if 1 + start < end]


def average_rounds(names: Iterable[str], rounds: Iterable[tuple[str, int]]) -> dict[str, RoundNumbers]:
    """Average rounds, each a group and its number of tokens, by group in this order; groups without a round are left out."""
    lengths: dict[str, list[int]] = {name: [] for name in names}
    for name, length in rounds:
        lengths[name].append(length)
    return {
        name: RoundNumbers(round(sum(counts) / len(counts), 4), len(counts), sum(counts))
        for name, counts in lengths.items()
        if counts
    }


def opening_kind(template: ChatTemplate, conversation: Conversation) -> Kind:
    """Return the kind of the first token after a prompt: a generation prompt may open the reasoning itself."""
    if conversation.text is not None or template.markers.reasoning is None:
        return "content"
    opening = render_chat(template, conversation, for_generation=True)
    return template.markers.last_kind(opening[common_length(opening, render_chat(template, conversation)) :])


def kind_runs(kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """Return consecutive tokens of one kind as {"kind", "tokens"}, in the order of the answer."""
    return [{"kind": kind, "tokens": len(list(group))} for kind, group in groupby(kinds)]
