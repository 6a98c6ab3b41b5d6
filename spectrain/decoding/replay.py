"""What was drafted and rejected, as sequences to learn from (Draft-OPD, 2026). Shapes: B batch, T tokens.

A rejected draft goes on for a while behind its first wrong token. What the target would have said there depends on the
drafted tokens, so the draft is replayed: the text so far and the whole draft become one sequence, and each drafted token
knows how far behind the first wrong one it lies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import torch

from spectrain.data.chat import Example
from spectrain.features.batch import Batch, collate, laid_out
from spectrain.trees.base import Round, TreeBuilder, WrappedBuilder

if TYPE_CHECKING:
    from .generation import Generation

KEPT = -1  # the distance of a token that was kept, or never drafted


@dataclass(frozen=True)
class Replay:
    """A sequence whose last tokens are a draft."""

    example: Example  # the answer so far and the draft carry loss
    distance: list[int]  # of each token behind the first wrong one of the draft; KEPT for all others


class Recorder(WrappedBuilder):
    """Another builder, whose chains are remembered with how much of them was kept."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder)
        self.rounds: list[list[tuple[list[int], int]]] = []  # of every row: drafted tokens, and tokens emitted

    def observe(self, round: Round) -> None:
        self.builder.observe(round)
        self.rounds = self.rounds or [[] for _ in round.counts]
        for b, count in enumerate(round.counts.tolist()):
            if count:
                drafted = round.tree.tokens[b, 1:][(round.tree.valid & round.tree.emitted)[b, 1:]].tolist()
                self.rounds[b].append((drafted, count))


def replays(generation: Generation, rounds: list[tuple[list[int], int]], limit: int, random: Random) -> list[Replay]:
    """Up to `limit` drafts of one decoding, rejected ones first."""
    found = []
    drafts = iter([drafted for drafted, _ in rounds if drafted])
    end = 1  # the answer's tokens before the round, root included
    for count, depth in zip(generation.accepted, generation.depths):
        drafted = next(drafts) if depth else []  # a guard may have let the round pass without a draft
        answer = generation.output[:end]
        kept = count - 1
        if drafted and len(answer) == end:
            tokens = generation.prompt + answer + drafted
            distance = [KEPT] * (len(tokens) - len(drafted) + kept) + list(range(len(drafted) - kept))
            mask = [False] * len(generation.prompt) + [True] * (len(answer) + len(drafted))
            found.append((kept == len(drafted), random.random(), Replay(Example(tokens, mask), distance)))
        end += count
    return [replay for _, _, replay in sorted(found, key=lambda item: item[:2])[:limit]]


def collate_replays(found: list[Replay], packed: bool = False) -> Batch:
    """Replays as one batch, padded on the right or packed."""
    batch = collate([replay.example for replay in found], packed)
    return replace(batch, distance=laid_out([torch.tensor(replay.distance) for replay in found], packed, padding=KEPT))
