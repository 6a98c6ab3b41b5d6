"""Decodings that may not draft are those without a drafter, and what copies of unknown
probability are worth is learned.
"""

import math
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spectrain.copying.trie import Trie
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import EagerRunner, decode, make_request
from spectrain.decoding.selective import PlannedDrafter, plan_rounds
from spectrain.decoding.session import Session
from spectrain.drafters.causal import Causal
from spectrain.drafters.context import Context
from spectrain.drafters.medusa import Medusa
from spectrain.drafters.ngram import Ngram
from spectrain.models.features import Layer
from spectrain.models.target import Target
from spectrain.trees import Auto
from spectrain.trees.base import WITHOUT_DRAFTER, RoundPlan, RoundResult, merge_tries
from spectrain.trees.copy_tree import FIRST_RATE, PRIOR_TEXTS, CopyRanks
from spectrain.trees.draft_choice import TRIAL_ALLOWANCE, DraftChoice
from spectrain.trees.measured_policy import MeasuredPolicy
from spectrain.trees.measurements import Calibration, Latency
from spectrain.trees.token_tree import TokenTree
from tests.trees.tables import context

PROMPTS = [[5, 7, 9, 5, 7, 9, 5, 7], [40, 50, 60, 40]]
SIZES = (1, 2, 4, 8, 16)


class TimedPolicy(MeasuredPolicy):
    """Takes the seconds of a round from a table, by the size of its tree."""

    times: dict[int, float]

    def record(self, plan: RoundPlan, round: RoundResult) -> None:
        size = int(round.tree.num_drafted.max())
        seconds = {
            "draft": 0.01 * (size > 1),
            "verify": float(np.interp(size, [*self.times], [*self.times.values()])),
        }
        super().record(plan, replace(round, seconds={**seconds, "accept": 0.0, "other": 0.0}))


def make_builder(node: float) -> Auto:
    """A builder for which a node costs this many plain steps, whatever the clock says."""
    builder = Auto(depth=4, budget=16, top_k=2)
    builder.round_policy = policy = TimedPolicy(4, 16, 2, memory=64, refit=False)
    times = {size: 1 + node * (size - 1) for size in SIZES}
    builder.prepare(
        Calibration(latency=Latency({0: times}, {0: dict.fromkeys(SIZES, 0.1)}, 0.1, batch=2))
    )
    # nothing is timed anew
    policy.times = times
    builder.round_policy.costs.timing_seconds = 1e9
    return builder


@pytest.mark.parametrize("reading", [0.0, 0.1])
@pytest.mark.parametrize("savings", [0.0, 0.2, 0.39])
def test_a_choice_knows_whether_it_can_draft(savings: float, reading: float) -> None:
    """`may_draft` is true exactly where one of that many plain rounds, one after another, would
    draft.
    """
    for num_rounds in (1, 10, 20, 30, 60):
        choice = DraftChoice(1.0, 1.4)
        choice.savings = savings
        expected = choice.may_draft(num_rounds, reading)
        drafts = []
        for _ in range(num_rounds):
            drafts.append(choice.should_draft(reading))
            choice.record_plain()
        assert expected == any(drafts)
    assert DraftChoice(2.0, 1.4).may_draft(1)


def test_decodings_without_drafts_are_plain(shallow: Target) -> None:
    """Where no round may draft, the runner has no drafter, records no features and counts its
    rounds; else it may draft.
    """
    drafter = Causal(shallow, num_layers=1).eval()
    builder = make_builder(10.0)
    builder.round_policy.costs.choice = DraftChoice(1.0, 5.0)
    session = Session(shallow, Greedy(), drafter, builder)
    generations = session.decode(PROMPTS, 12, ignore_eos=True)
    assert [row.output for row in generations] == [
        row.output for row in decode(shallow, PROMPTS, Greedy(), 12, ignore_eos=True)
    ]
    assert (
        builder.round_policy.num_plain == builder.round_policy.num_rounds == 11
        and builder.round_policy.costs.choice.savings == pytest.approx(11 * TRIAL_ALLOWANCE)
    )
    # What they were left out for, before any of these rounds added to the savings.
    weighed = replace(WITHOUT_DRAFTER, gain=-4.0, savings=0.0)
    assert all(row.plans == [weighed] * 11 for row in generations)
    runner = EagerRunner(shallow, Greedy(), drafter, builder)
    plan_rounds(runner, make_request(shallow, PROMPTS, 12))
    assert runner.drafter is None and runner.plan.reason == "no drafter"
    assert runner.plan.savings == builder.round_policy.costs.choice.savings
    for prompts, num_rounds in (
        (PROMPTS, 1200),
        (PROMPTS * 2, 12),
    ):  # enough savings; a number of texts that nothing is known of
        runner = EagerRunner(shallow, Greedy(), drafter, builder)
        plan_rounds(runner, make_request(shallow, prompts, num_rounds))
        assert runner.drafter is drafter and isinstance(runner.round_drafter, PlannedDrafter)


def test_features_are_recorded_while_a_draft_may_come(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the only trial that the savings cover, a decoding goes on without the drafter and
    its features.
    """
    drafter = Medusa(shallow, num_heads=2).eval()
    builder = make_builder(10.0)
    builder.round_policy.costs.choice = DraftChoice(1.0, 1.4)
    builder.round_policy.costs.choice.savings = 0.41
    recorded: list[tuple[Layer, ...]] = []
    verify = Context.verify
    monkeypatch.setattr(
        Context, "verify", lambda self, tree: recorded.append(self.layers) or verify(self, tree)
    )
    generations = Session(shallow, Greedy(), drafter, builder).decode(PROMPTS, 20, ignore_eos=True)
    plain = decode(shallow, PROMPTS, Greedy(), 20, ignore_eos=True)
    assert [row.output for row in generations] == [row.output for row in plain]
    # The round after the trial still records them.
    assert recorded[:19] == [drafter.layers] * 2 + [()] * 17 and drafter.layers
    assert builder.round_policy.num_rounds == 19 and builder.round_policy.num_plain == 18


@pytest.mark.parametrize("waits_for", ["a third of the rounds", "all rounds"])
def test_waiting_for_a_draft_ends_where_none_may_come(shallow: Target, waits_for: str) -> None:
    """A drafter that reads features is waited for while a trial is due within a third of the rounds
    left, another one while one is due within all of them."""
    reads_features = waits_for == "a third of the rounds"
    drafter = (
        Medusa(shallow, num_heads=2).eval()
        if reads_features
        else Causal(shallow, num_layers=1).eval()
    )
    builder = make_builder(10.0)
    for rounds_left in (1, 30, 31, 90):
        builder.round_policy.costs.choice = DraftChoice(1.0, 1.4)
        selective = PlannedDrafter(
            EagerRunner(shallow, Greedy(), drafter, builder),
            make_request(shallow, PROMPTS, rounds_left),
        )
        num_waited = math.ceil(rounds_left / 3) if reads_features else rounds_left
        for missing in (0.001, -0.001):
            builder.round_policy.costs.choice.savings = (
                0.4 - TRIAL_ALLOWANCE * (num_waited - 1) - missing
            )
            assert selective.is_worth_waiting(2, 8) == (missing < 0)


def test_what_may_draft_is_what_drafts(shallow: Target) -> None:
    """A decoding whose next round drafts is never said to be one that may not, however many
    tokens the drafter has skipped.
    """
    builder = make_builder(10.0)
    lengths = torch.zeros(2)
    answers = []
    for unread in range(9):
        for savings in (0.39, 0.41, 0.7, 1.2):
            builder.round_policy.costs.choice = DraftChoice(1.0, 1.4)
            builder.round_policy.costs.choice.savings = savings
            builder.round_policy.costs.reading_seconds.value = 0.1
            builder.round_policy.last_draft_length = 50
            may = builder.round_policy.may_draft(2, 50 + unread, 1, begins=False)
            prefix = SimpleNamespace(lengths=lengths, longest=50 + unread, begins=False)
            plan = builder.round_policy._plan_draft(prefix)  # type: ignore[arg-type]
            assert plan.runs_drafter == may
            answers.append(may)
    assert 0 < sum(answers) < len(answers)


def test_copies_are_skipped_where_they_do_not_pay(shallow: Target) -> None:
    """Where nodes cost nothing copies are verified, and where they cost much only in few trials."""
    shares = []
    for node in (0.0, 5.0):
        drafter = Ngram(shallow).eval()
        builder = make_builder(node)
        session = Session(shallow, Greedy(), drafter, builder)
        plain = decode(shallow, PROMPTS, Greedy(), 40, ignore_eos=True)
        for _ in range(3):
            assert [row.output for row in session.decode(PROMPTS, 40, ignore_eos=True)] == [
                row.output for row in plain
            ]
        shares.append(len(builder.round_policy.tree_sizes) / builder.round_policy.num_rounds)
    assert shares[0] > 0.4 > 0.1 > shares[1]


def test_reading_a_prompt_is_no_part_of_copying(shallow: Target) -> None:
    """First rounds of texts, which read the prompt, are a hundred times slower; the time of copying
    is that of the others. The very first one, in which code is loaded, says nothing about reading.
    """
    builder = make_builder(0.0)
    for begins, reading in ((True, 500.0), (False, 0.0), (False, 0.0), (True, 5.0), (False, 0.0)):
        builder.round_policy.num_unread = 50 if begins else 0
        tree = TokenTree.from_chain(torch.tensor([[1, 2], [1, 2]]))
        seconds = {"draft": 0.05 + reading, "verify": 1.0, "accept": 0.0, "other": 0.0}
        MeasuredPolicy.record(
            builder.round_policy,
            RoundPlan(),
            RoundResult(tree, torch.zeros(0), torch.tensor([1, 1]), seconds),
        )
    assert builder.round_policy.costs.copies.draft_seconds.value == pytest.approx(0.05)
    assert builder.round_policy.costs.reading_seconds.value == pytest.approx(0.1, rel=0.02)


def test_the_shortest_unfinished_text_decides() -> None:
    """A batch ends with its last text: its unfinished texts with the fewest tokens so far count."""
    builder = make_builder(0.0)
    tree = TokenTree.from_chain(torch.tensor([[1, 2]] * 3))
    recorded: list[float] = []
    builder.round_policy.costs.choice.record_draft = lambda tokens, *_: recorded.append(tokens)  # type: ignore[method-assign]
    for counts in ([2, 1, 1], [2, 2, 1], [1, 2, 2], [2, 1, 0], [1, 1, 0]):
        builder.round_policy.record(
            RoundPlan(),
            RoundResult(
                tree,
                torch.zeros(0),
                torch.tensor(counts),
                {"draft": 0.1, "verify": 1.0, "accept": 0.0},
            ),
        )
    assert recorded == pytest.approx([4 / 3, 1.5, 2, 1.5, 1])


def make_trie(source: Random) -> Trie:
    """Make some continuations with random weights."""
    trie = Trie()
    for _ in range(source.randint(0, 5)):
        trie.add_continuation([source.randint(1, 3) for _ in range(3)], source.random())
    return trie


def test_ranks_equal_plain_python() -> None:
    """Rates are means by rank over the texts whose tree had room for it; the size is the best by
    brute force.
    """
    source = Random(0)
    ranks = CopyRanks(8, 10_000)
    seconds = [1 + 0.2 * n for n in range(8)]
    outcomes: list[list[float]] = [[FIRST_RATE / rank] * PRIOR_TEXTS for rank in range(1, 8)]
    for _ in range(40):
        tries = [make_trie(source), make_trie(source)]
        size = ranks.choose_size(tries, 3, seconds, 0.1)
        means = [sum(values) / len(values) for values in outcomes]
        ranked = [trie.rank_nodes(3, 8) for trie in tries]
        speeds = [
            (1 + sum(means[: n - 1])) / (0.1 + seconds[n - 1])
            for n in range(2, max(map(len, ranked)) + 1)
        ]
        assert size == (
            2 + int(np.argmax(speeds)) if speeds else 1
        ) and ranks.rates == pytest.approx(means)
        builder = Auto(depth=3, budget=8)
        builder.copy_budget = lambda prefix, tries, size=size: size  # type: ignore[method-assign]
        tree = merge_tries(context(), tries, builder)
        path = torch.zeros(2, 4, dtype=torch.int64)
        counts = []
        for row in range(2):
            nodes = [0]
            while len(nodes) < 4:
                children = (
                    ((tree.parents[row] == nodes[-1]) & tree.valid[row]).nonzero()[:, 0].tolist()
                )
                if not children or source.random() < 0.3:
                    break
                nodes.append(source.choice(children))
            counts.append(len(nodes))
            path[row, : len(nodes)] = torch.tensor(nodes)
        ranks.observe(RoundResult(tree, torch.zeros(0), torch.tensor(counts), {}, path))
        for row, (nodes, count) in enumerate(zip(path.tolist(), counts)):
            accepted = {
                (int(tree.tokens[row, node]), int(tree.depths[row, node]))
                for node in nodes[1:count]
            }
            for rank in range(1, size):
                node = ranked[row][rank] if rank < len(ranked[row]) else None
                chosen = (
                    set() if node is None else {(tries[row].tokens[node], tries[row].depths[node])}
                )
                on_path = node is not None and is_on_path(
                    tries[row], node, tree.tokens[row].tolist(), nodes[:count]
                )
                outcomes[rank - 1].append(float(on_path))
                assert not on_path or chosen <= accepted


def is_on_path(trie: Trie, node: int, tokens: list[int], path: list[int]) -> bool:
    """Tell whether a trie's node is on the accepted path, by the tokens from the root to it."""
    tokens_to_node = []
    while node > 0:
        tokens_to_node.append(trie.tokens[node])
        node = trie.parents[node]
    return [tokens[at] for at in path[1 : len(tokens_to_node) + 1]] == tokens_to_node[::-1]
