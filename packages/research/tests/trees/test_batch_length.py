"""BASS's chains: one length for all rows, moved as the paper's algorithm moves it."""

import math
import random

import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.ngram import Ngram
from spectrain.trees.base import RoundResult
from spectrain.trees.token_tree import TokenTree
from spectrain_research.controllers.batch_length import BatchLengthChain
from spectrain_research.exits.drafter import Exits
from tests.targets import make_random_target
from tests.trees.tables import Table, context, random_scores


def follow_paper(
    rounds: list[list[int]], first: int, increase: int, shrink: int, limit: int
) -> list[int]:
    """Return the length of every round by algorithm 1, whose rounds accepted these drafts by row;
    no row accepts more than the length.
    """
    length = first
    state = 0
    lengths = []
    for accepted in rounds:
        lengths.append(length)
        best = max(min(count, length) for count in accepted)
        if best == length:
            length = min(length + increase, limit)
            state = 0
        else:
            length = max(1, best, length - math.ceil(length / shrink) - state)
            state = 1
    return lengths


@pytest.mark.parametrize(("increase", "shrink", "limit"), [(2, 10, 32), (3, 2, 12)])
def test_lengths_are_those_of_the_algorithm(increase: int, shrink: int, limit: int) -> None:
    """Over 300 rounds of three rows; the runs have good and bad stretches, so that both bounds are
    met.
    """
    draw = random.Random(1)
    rounds = [
        [draw.randrange(limit + 1) if number % 60 < 30 else draw.randrange(3) for _ in range(3)]
        if number % 100 < 80
        else [limit] * 3
        for number in range(300)
    ]
    builder = BatchLengthChain(limit, first=7, increase=increase, shrink=shrink)
    builder.begin_round(context())
    lengths = []
    for accepted in rounds:
        lengths.append(builder.length)
        tree = TokenTree.from_chain(torch.zeros(3, builder.length + 1, dtype=torch.int64))
        counts = torch.tensor([min(count, builder.length) + 1 for count in accepted])
        builder.observe(RoundResult(tree, torch.zeros(0), counts, {}))
    expected = follow_paper(rounds, 7, increase, shrink, limit)
    assert lengths == expected
    assert {1, limit} <= {*expected}


def test_finished_rows_do_not_move_the_length() -> None:
    """A row that emitted nothing has a count of 0, and its padding is no draft."""
    builder = BatchLengthChain()
    builder.begin_round(context())
    tree = TokenTree.from_chain(torch.zeros(2, 8, dtype=torch.int64))
    builder.observe(RoundResult(tree, torch.zeros(0), torch.tensor([0, 8]), {}))
    assert builder.length == 9
    builder.observe(RoundResult(tree, torch.zeros(0), torch.tensor([0, 0]), {}))
    assert builder.length == 9


def test_no_draft_step_is_run_in_vain() -> None:
    """A chain of the first length takes as many runs of the drafter, the root's included."""
    builder = BatchLengthChain(first=4)
    table = Table(random_scores)
    tree = builder.expand(context(), table)
    assert tree.tokens.shape[1] == 5 and len(table.evaluated_paths[0]) == 4


class RecordingChain(BatchLengthChain):
    """Records, of every round, what was drafted and the best row's accepted drafts."""

    def __init__(self) -> None:
        super().__init__(12, first=3)
        self.rounds: list[tuple[int, int, int]] = []

    def observe(self, round: RoundResult) -> None:
        before = self.length
        drafted = int((round.tree.valid.sum(1) - 1).max())
        self.rounds.append((before, drafted, int(round.counts.max()) - 1))
        super().observe(round)


@torch.no_grad()
def test_batches_of_texts_share_the_length_and_keep_their_output() -> None:
    """Three texts at once, drafted by the target's own early exit; each decoding begins anew."""
    target = make_random_target(16, num_layers=4, sharpness=4.0)
    prompts = [[5, 3, 9, 1, 14, 2], [7, 7, 2], [1, 4, 4, 8]]
    plain = decode(target, prompts, Greedy(), 30, ignore_eos=True)
    builder = RecordingChain()
    for _ in range(2):
        start = len(builder.rounds)
        drafted = decode(
            target,
            prompts,
            Greedy(),
            30,
            Exits(target, (3,), threshold=0.0),
            builder,
            ignore_eos=True,
        )
        assert [text.output for text in drafted] == [text.output for text in plain]
        rounds = builder.rounds[start:]
        assert rounds[0][0] == 3
        assert {best == size for _, size, best in rounds} == {True, False}
        assert all(size == length for length, size, _ in rounds[:-3])


@torch.no_grad()
def test_copies_as_drafts_take_the_length_that_they_had() -> None:
    """A copy is as long as what was found; the length goes on from there."""
    target = make_random_target(16, num_layers=2, sharpness=4.0)
    builder = RecordingChain()
    prompts = [[1, 2, 3, 4] * 4]
    drafted = decode(target, prompts, Greedy(), 20, Ngram(target), builder, ignore_eos=True)
    plain = decode(target, prompts, Greedy(), 20, ignore_eos=True)
    assert drafted[0].output == plain[0].output
    assert builder.rounds
