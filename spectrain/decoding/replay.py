"""Training sequences from drafts: rejected drafts (Draft-OPD, 2026) and windows with their rewards (PPOW, 2026). Shapes: B
batch, T tokens.

A rejected draft continues after its first wrong token. The target's distribution there depends on the drafted tokens, so the
draft is replayed: the text so far and the draft become one sequence, and each drafted token has its distance from the first
wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from statistics import mean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.features.batch import Batch, collate, pad_or_pack
from spectrain.trees.base import RoundResult, TreeBuilder, WrappedBuilder

if TYPE_CHECKING:
    from .generation import Generation

NOT_PAST_ERROR = -1  # the distance of a token that was kept, or never drafted


@dataclass(frozen=True)
class Replay:
    """A sequence that ends with a draft."""

    example: Example  # the answer so far and the draft carry loss
    tokens_past_error: list[int]  # of each token behind the first wrong one of the draft; KEPT for all others


@dataclass(frozen=True)
class BranchedAnswer:
    """An answer, followed by the wrong part of each of its drafts, which attends to the text before that draft."""

    replay: Replay
    position_ids: list[int]  # of every token in its text
    branches: list[tuple[int, int]]  # tokens of each wrong part, and how many of the text's it sees

    @property
    def visibility(self) -> Tensor:
        """Return the mask [T, T]: a token attends to the text before it, and in a branch to that branch's earlier tokens."""
        length = len(self.position_ids)
        found = torch.ones(length, length, dtype=torch.bool).tril()
        end = length - sum(size for size, _ in self.branches)
        for size, seen in self.branches:
            found[end : end + size, seen:end] = False
            end += size
        return found


@dataclass(frozen=True)
class DraftWindow:
    """A sequence that ends with the accepted part of a sampled draft and its first rejected token."""

    example: Example  # all but the prompt carry loss
    advantage: list[float]  # of each token of the draft, what it brought beyond what was to be expected; 0 for all others
    start: int = 0  # tokens before the draft


class DraftRecorder(WrappedBuilder):
    """Wraps a builder and records its chains with the number of tokens that each round emitted."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder)
        self.rounds: list[list[tuple[list[int], int]]] = []  # of every row: drafted tokens, and tokens emitted

    def observe(self, round: RoundResult) -> None:
        self.builder.observe(round)
        self.rounds = self.rounds or [[] for _ in round.counts]
        for b, count in enumerate(round.counts.tolist()):
            if count:
                drafted = round.tree.tokens[b, 1:][(round.tree.valid & round.tree.can_emit)[b, 1:]].tolist()
                self.rounds[b].append((drafted, count))


@dataclass(frozen=True)
class DraftedRound:
    """One round of a decoding."""

    text: list[int]  # before it, the root the last of it
    answer_length: int  # how many tokens of the text are the answer's
    draft: list[int]
    num_accepted: int  # tokens of the draft

    def make_example(self, draft: list[int]) -> Example:
        """Make an example of the text and these draft tokens; all but the prompt carry loss."""
        prompt = len(self.text) - self.answer_length
        return Example(self.text + draft, [False] * prompt + [True] * (self.answer_length + len(draft)))


def iterate_drafts(generation: Generation, rounds: list[tuple[list[int], int]]) -> Iterator[DraftedRound]:
    """Yield the drafts of one decoding in order, as long as the text before them is in its output."""
    drafts = iter([drafted for drafted, _ in rounds if drafted])
    end = 1  # the answer's tokens before the round, root included
    for count, depth in zip(generation.round_lengths, generation.depths):
        drafted = next(drafts) if depth else []  # a guard may have let the round pass without a draft
        answer = generation.output[:end]
        if drafted and len(answer) == end:
            yield DraftedRound(generation.prompt + answer, end, drafted, count - 1)
        end += count


def select_replays(generation: Generation, rounds: list[tuple[list[int], int]], limit: int, random: Random) -> list[Replay]:
    """Return up to `limit` drafts of one decoding as replays, rejected ones first."""
    found = []
    for one in iterate_drafts(generation, rounds):
        wrong = len(one.draft) - one.num_accepted
        replay = Replay(one.make_example(one.draft), [NOT_PAST_ERROR] * (len(one.text) + one.num_accepted) + list(range(wrong)))
        found.append((not wrong, random.random(), replay))
    return [replay for _, _, replay in sorted(found, key=lambda item: item[:2])[:limit]]


def join_branches(generation: Generation, rounds: list[tuple[list[int], int]], max_length: int) -> BranchedAnswer:
    """A whole answer with all its rejected drafts (Draft-OPD's error replays), for one forward.

    What was rejected is judged where it was drafted: the first wrong token in the text, whose next token is the target's, and
    the others in its branch, of which the first token has nothing to be judged by and the last nothing to say. Texts have
    `max_length` tokens at most.
    """
    text, answer = generation.prompt + generation.output, len(generation.output)
    distance, tokens, places = [NOT_PAST_ERROR] * len(text), list(text), list(range(len(text)))
    mask = [False] * (len(text) - answer) + [True] * answer
    branches = []
    for one in iterate_drafts(generation, rounds):
        seen = len(one.text) + one.num_accepted
        wrong = one.draft[one.num_accepted :][: max_length - seen]
        if not wrong or seen >= len(text):
            continue
        distance[seen] = 0
        if len(wrong) > 1:
            tokens += wrong
            places += range(seen, seen + len(wrong))
            mask += [False] + [True] * (len(wrong) - 1)
            distance += [NOT_PAST_ERROR, *range(1, len(wrong))]
            branches.append((len(wrong), seen))
    return BranchedAnswer(Replay(Example(tokens, mask), distance), places, branches)


def make_unbranched(example: Example) -> BranchedAnswer:
    """Make an answer without branches and without rejected tokens."""
    return BranchedAnswer(Replay(example, [NOT_PAST_ERROR] * len(example.tokens)), list(range(len(example.tokens))), [])


def balance_weights(replay: Replay) -> list[float]:
    """Return the weight of every token where accepted and rejected tokens carry half of the loss each, as in Draft-OPD."""
    wrong = sum(place != NOT_PAST_ERROR for place in replay.tokens_past_error)
    supervised = sum(replay.example.mask)
    right = supervised - wrong
    return [supervised / (wrong if place != NOT_PAST_ERROR else right) if on else 0.0
            for place, on in zip(replay.tokens_past_error, replay.example.mask)]  # fmt: skip


def round_reward(num_accepted: int, num_drafted: int, draft_cost: float) -> float:
    """Return PPOW's reward: tokens emitted by a round, the bonus included, over its time in forwards of the target."""
    return (num_accepted + 1) / (1 + draft_cost * num_drafted)


def make_windows(generation: Generation, rounds: list[tuple[list[int], int]], draft_cost: float) -> list[DraftWindow]:
    """The drawn drafts of one decoding, but the first of them.

    The token at place d of a draft counts where the d before it were right, so its baseline is the mean reward of the answer's
    earlier drafts that came so far, or of all of them: known before it was drawn, it leaves the gradient's expectation as it
    is. Tokens behind the first wrong one bring nothing, and are left out.
    """
    reached: list[list[float]] = []  # at every place, the rewards of earlier drafts that came so far
    found = []
    for one in iterate_drafts(generation, rounds):
        brought, drawn = round_reward(one.num_accepted, len(one.draft), draft_cost), one.draft[: one.num_accepted + 1]
        is_first = not reached
        reached += [[] for _ in range(len(drawn) - len(reached))]
        if not is_first:
            gains = [brought - mean(before or reached[0]) for before in reached[: len(drawn)]]
            found.append(DraftWindow(one.make_example(drawn), [0.0] * len(one.text) + gains, len(one.text)))
        for before in reached[: len(drawn)]:
            before.append(brought)
    return found


def collate_replays(replays: list[Replay], packed: bool = False, balanced: bool = False) -> Batch:
    """Collate replays into one batch, padded on the right or packed."""
    batch = collate([replay.example for replay in replays], packed)
    weight = pad_or_pack([torch.tensor(balance_weights(replay)) for replay in replays], packed) if balanced else None
    distance = pad_or_pack([torch.tensor(replay.tokens_past_error) for replay in replays], packed, padding=NOT_PAST_ERROR)
    return replace(batch, tokens_past_error=distance, weight=weight)


def collate_branched(answers: list[BranchedAnswer], packed: bool = False, balanced: bool = False) -> Batch:
    """Collate answers with their branches into one batch, padded on the right or packed."""
    batch = collate_replays([one.replay for one in answers], packed, balanced)
    places = pad_or_pack([torch.tensor(one.position_ids) for one in answers], packed)
    if packed:
        return replace(batch, position_ids=places, visible=tuple(one.visibility[None] for one in answers))
    count = batch.tokens.shape[1]
    visible = torch.ones(count, count, dtype=torch.bool).tril().repeat(len(answers), 1, 1)  # padding sees anything
    for row, one in zip(visible, answers):
        row[: len(one.position_ids), : len(one.position_ids)] = one.visibility
    return replace(batch, position_ids=places, visible=visible)


def collate_windows(windows: list[DraftWindow], packed: bool = False) -> Batch:
    """Collate windows into one batch, padded on the right or packed."""
    batch = collate([window.example for window in windows], packed)
    return replace(batch, advantage=pad_or_pack([torch.tensor(window.advantage) for window in windows], packed))
