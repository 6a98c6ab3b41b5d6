"""Trees by measured cost equal a literal reading of their rules over random probability tables."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.copying.trie import Trie
from spectrain.errors import UserError
from spectrain.trees import Auto
from spectrain.trees.base import RoundPlan, RoundResult
from spectrain.trees.copy_tree import CopyTree
from spectrain.trees.draft_choice import ROUNDS_PER_READING
from spectrain.trees.estimates import VerifyFit
from spectrain.trees.measurements import Calibration, Latency
from spectrain.trees.round_costs import SETTLED_ROUNDS, RoundCosts
from spectrain.trees.token_tree import TokenTree
from tests.installed import load_cases
from tests.trees.tables import (
    ROWS,
    VOCAB,
    Path,
    Scores,
    Table,
    assert_rows_alone,
    context,
    grow_tree,
    list_likeliest,
    paths,
    random_scores,
    shared_scores,
    soft_scores,
)

SIZES = (1, 2, 3, 5, 8, 16, 64)


def prepare_builder(
    builder: Any,
    step: float = 0.0,
    base: float = 1.0,
    node: float = 0.0,
    start: float = 0.0,
    context: int = 0,
) -> Any:
    """Prepare a builder with the cost of a step over n nodes, step n, and of verifying them,
    base + node n.
    """
    verify = {n: base + node * n for n in SIZES}
    steps = {n: step * n for n in SIZES}
    # behind a context that is longer than the rows'
    other = {40: dict.fromkeys(SIZES, 100.0)} if context else {}
    builder.prepare(
        Calibration(
            latency=Latency({context: verify, **other}, {context: steps, **other}, start, batch=2)
        )
    )
    return builder


def apply_cast_rule(gains: list[float], costs: list[float], least: float) -> int:
    """Apply CAST's rule by definition: k is taken if (u_k - u_k') / (c_k - c_k') > least, with
    k' the last size taken.
    """
    u = {0: math.nan, **dict(enumerate(gains, 1))}
    c = dict(enumerate(costs, 1))
    last = 1
    for k in range(2, len(gains) + 1):
        if (u[k] - u[last]) / (c[k] - c[last]) > least:
            last = k
    return last


def sum_gains(ranked: list[list[tuple[Path, float]]], count: int) -> list[float]:
    """Return u_k, the summed probabilities of the k best nodes, on average over rows."""
    return np.cumsum(
        [np.mean([math.exp(score) for _, score in rank]) for rank in list(zip(*ranked))[:count]]
    ).tolist()


# Cases of installed packages.
CASES = load_cases(__name__)


@pytest.mark.parametrize(
    "name", [Auto, *CASES.get("test_measured_trees_have_a_valid_structure", ())]
)
@pytest.mark.parametrize("step, node", [(0.0, 0.0), (0.02, 0.03), (0.3, 0.3)])
def test_measured_trees_have_a_valid_structure(name: type[Auto], step: float, node: float) -> None:
    """Trees are well formed, and equal rows have the tree that each has alone."""

    def make() -> Any:
        return prepare_builder(name(depth=4, budget=16, top_k=3), step, 1.0, node, 0.01)  # type: ignore[call-arg]

    grow_tree(make)
    assert_rows_alone(make, shared_scores)


@pytest.mark.parametrize("name", [Auto, *CASES.get("test_untimed_builders_are_refused", ())])
def test_untimed_builders_are_refused(name: type[Auto]) -> None:
    """A builder that nothing was timed for says so."""
    builder = name()
    with pytest.raises(UserError, match=f"tree={builder.name}: nothing is timed yet"):
        builder.expand(context(), Table(random_scores))


@pytest.mark.parametrize(
    "name", [Auto, *CASES.get("test_level_costs_make_measured_trees_shallower", ())]
)
def test_level_costs_make_measured_trees_shallower(name: type[Auto]) -> None:
    """Where layers keep a state, every level of a tree takes another step of theirs: the dearer,
    the shallower.
    """
    depths = []
    for level in (0.0, 0.1, 10.0):
        builder: Any = name(depth=6, top_k=1)  # type: ignore[call-arg]
        latency = Latency(
            {0: dict.fromkeys(SIZES, 1.0)}, {0: dict.fromkeys(SIZES, 0.001)}, 0.001, level
        )
        builder.prepare(Calibration(latency=latency))
        depths.append(int(builder.expand(context(), Table(shared_scores)).depths.max()))
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[-1] == 1


def list_scores(scores: Scores, row: int, depth: int) -> list[float]:
    """Return the scores of all paths down to a depth, the best first."""
    level = [((), 0.0)]
    result = [0.0]
    for _ in range(depth):
        level = [
            (child, score + log_q)
            for path, score in level
            for child, log_q in list_likeliest(scores, row, path)
        ]
        result += [score for _, score in level]
    return sorted(result, reverse=True)


@pytest.mark.parametrize("scores", [random_scores, soft_scores])
@pytest.mark.parametrize(
    "start, base, node", [(0.1, 1.0, 0.01), (0.0, 1.0, 0.05), (0.3, 0.5, 0.15), (0.0, 0.1, 1.0)]
)
@pytest.mark.parametrize("depth", [1, 2])
def test_auto_maximises_expected_speed(
    scores: Scores, start: float, base: float, node: float, depth: int
) -> None:
    """Where steps are free and nothing is pruned, the size is the best of all by brute force."""
    tree = grow_tree(
        lambda: prepare_builder(Auto(depth, 40, VOCAB), 0.0, base, node, start), scores
    )
    ranked = [list_scores(scores, row, depth)[:40] for row in ROWS]
    tokens = np.cumsum(np.exp(ranked).mean(0))
    speed = [tokens[n - 1] / (start + base + node * n) for n in range(1, len(tokens) + 1)]
    assert tree.tokens.shape[1] == max(2, int(np.argmax(speed)) + 1)


def test_auto_drafts_a_single_level_where_steps_are_expensive() -> None:
    """Where a further step takes longer than the tokens it promises, none is taken; free steps
    go all the way.
    """
    for step, num_drafted in ((10.0, 0), (0.0, 9)):
        table = Table(random_scores)
        prepare_builder(Auto(depth=4, budget=30, top_k=3), step).expand(context(), table)
        assert len(table.evaluated_paths[0]) - 1 == num_drafted


def observe_round(builder: Auto, tree: TokenTree, counts: list[int], node: float) -> None:
    """Let a builder observe the result of its round, at the costs that it was prepared with."""
    seconds = {
        "draft": builder.round_policy.costs.estimate_drafting(builder.round_policy.num_levels),
        "accept": 0.0,
    }
    seconds["verify"] = 1 + node * tree.tokens.shape[1]
    builder.round_policy.record(
        RoundPlan(), RoundResult(tree, torch.zeros(0), torch.tensor(counts), seconds)
    )


def test_auto_shrinks_where_nothing_is_accepted() -> None:
    """Once its drafts keep failing the tree falls to its least size, and grows back when they
    hold.
    """
    builder = prepare_builder(Auto(depth=4, budget=40, top_k=4, memory=8), 0.01, 1.0, 0.03, 0.01)
    sizes = []
    for turn in range(240):
        tree = builder.expand(context(), Table(random_scores))
        sizes.append(tree.tokens.shape[1])
        observe_round(
            builder, tree, [1, 1] if turn < 80 else [int(tree.depths.max()) + 1] * 2, 0.03
        )
    assert sizes[0] > 4 and sizes[79] == 2 and sizes[-1] > 4


def test_auto_learns_the_acceptance_of_each_depth() -> None:
    """With a memory of one round the means are the last row's: its predicted and its kept nodes;
    done rows teach nothing.
    """
    builder = prepare_builder(Auto(depth=3, budget=16, top_k=3, memory=1), 0.001, 1.0, 1e-4)
    tree = builder.expand(context(), Table(soft_scores))
    assert builder.round_policy.num_levels == 3
    observe_round(builder, tree, [2, 0], 1e-4)
    expected = np.zeros(4)
    accepted = paths(tree, 0)
    for path in accepted:
        log_q = [
            dict(list_likeliest(soft_scores, 0, path[:n]))[path[: n + 1]] for n in range(len(path))
        ]
        expected[len(path)] += math.exp(sum(log_q))
    assert set(map(len, accepted)) == {0, 1, 2, 3}
    acceptance = builder.round_policy.acceptance
    assert acceptance.predicted == pytest.approx(expected[1:]) and acceptance.observed.tolist() == [
        1,
        0,
        0,
    ]


def make_copies(chances: list[float]) -> Trie:
    """Make a trie with a single path of these chances, each given the one before."""
    trie = Trie()
    weight = 1.0
    trie.weights[0], trie.is_calibrated = 1.0, True
    for node, chance in zip(trie.add_continuation([7] * len(chances), 0.0), chances):
        trie.weights[node] = weight = weight * chance
    return trie


@pytest.mark.parametrize("node", [0.001, 0.02, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("name", [Auto, *CASES.get("test_copies_are_verified_while_they_gain", ())])
def test_copies_are_verified_while_they_gain(name: type[Auto], node: float) -> None:
    """The size is the best by brute force (auto), or CAST's rule over the chances. Of mere weights
    auto takes the best by rates of ranks, and CAST everything."""
    builder = prepare_builder(name(depth=6, budget=7), 0.0, 1.0, node)
    tries = [make_copies([0.9, 0.8, 0.5, 0.5, 0.1, 0.9]), make_copies([0.5, 0.5])]
    chances = np.zeros((2, 7))
    for row, trie in zip(chances, tries):
        row[: len(trie)] = sorted(trie.weights, reverse=True)
    tokens = np.cumsum(chances.mean(0)).tolist()
    # as rounds with a drafter do before copies are joined
    builder.expand(context(), Table(random_scores))
    builder.levels = 0
    costs = [1 + node * size for size in range(1, 8)]
    best = 1 + int(np.argmax([gain / cost for gain, cost in zip(tokens, costs)]))
    unit = costs[0]
    assert builder.copy_budget(context(), tries) == (
        best if name is Auto else apply_cast_rule(tokens, [cost / unit for cost in costs], 1.0)
    )
    tries[0].is_calibrated = False
    by_rank = np.cumsum([1.0, *(0.5 / rank for rank in range(1, 7))]).tolist()
    best = 1 + int(np.argmax([gain / cost for gain, cost in zip(by_rank, costs)]))
    assert builder.copy_budget(context(), tries) == (max(2, best) if name is Auto else 7)


def run_round(builder: Auto, tries: list[Trie], drafted: list[float], accepted: int) -> bool:
    """Run a round with these copies and, if the drafter is used, drafts of these chances, and
    accept so many tokens; return whether the drafter was used."""
    requested = builder.round_policy.needs_drafter(context(), tries)
    tokens = [[7] * len(drafted), [8] * len(drafted)]
    for path in tokens:
        tries[0].add_continuation(path, 0.0)
    if requested:
        builder.round_policy.num_levels = 2
        merged = make_copies(drafted)
        tries[0].weights = merged.weights + [0.0] * (len(tries[0]) - len(merged))
    builder.copy_budget(context(), tries)
    tree = TokenTree.from_chain(torch.tensor([[101, *tokens[0]]]))
    seconds = {
        "draft": 0.4 if requested else 0.0,
        "verify": 1 + 0.01 * len(tree.tokens[0]),
        "accept": 0.0,
    }
    path = torch.arange(accepted)[None]
    builder.round_policy.record(
        RoundPlan(), RoundResult(tree, torch.zeros(0), torch.tensor([accepted]), seconds, path)
    )
    return requested


def test_auto_runs_a_drafter_while_it_gains() -> None:
    """Where copies promise much and the drafter adds nothing, it is left out but for a look now and
    then, more and more rarely; where they promise nothing, it is asked."""
    builder = prepare_builder(Auto(depth=4, budget=12, top_k=3), 0.2, 1.0, 0.01, 0.2)
    requested: dict[bool, list[bool]] = {True: [], False: []}
    for turn in range(1000):
        sure = turn % 2 == 0
        drafted = [0.9, 0.9, 0.9] if sure else [0.9, 0.9]
        requested[sure].append(
            run_round(builder, [make_copies(drafted if sure else [])], drafted, len(drafted) + 1)
        )
    assert all(requested[False]) and all(requested[True][:4])
    trial_rounds = np.flatnonzero(requested[True][4:]) + 1
    assert (
        np.diff([0, *trial_rounds]).tolist()
        == [16 * trials for trials in range(4, 4 + len(trial_rounds))]
        and len(trial_rounds) >= 3
    )


@pytest.mark.parametrize("accepted", [1, 3])
def test_auto_skips_a_drafter_whose_tokens_are_rejected(accepted: int) -> None:
    """It goes on promising 1.6 more than copies, which would pay."""
    builder = prepare_builder(Auto(depth=4, budget=12, top_k=3, memory=8), 0.2, 1.0, 0.01, 0.2)
    requested = [run_round(builder, [make_copies([])], [0.9, 0.8], accepted) for _ in range(60)]
    assert requested[-20:].count(True) == (20 if accepted == 3 else 0)


def test_tokens_that_copies_contain_are_no_gain() -> None:
    """A drafter that is right where copies are right as well is worth nothing beside them,
    whatever it promises.
    """
    for shared, num_requested in ((True, 0), (False, 20)):
        builder = prepare_builder(Auto(depth=4, budget=12, top_k=3, memory=8), 0.2, 1.0, 0.01, 0.2)
        requested = []
        for _ in range(60):
            trie = make_copies([0.3, 0.9])
            if not shared:
                trie.tokens[1:], trie.child_index = [9, 9], {}  # another path
            requested.append(run_round(builder, [trie], [0.95, 0.95], 3))
        assert requested[-20:].count(True) == num_requested


@pytest.mark.parametrize("counts", [[3, 1], [1, 2]])
def test_drafter_gain_counts_tokens_that_copies_lack(counts: list[int]) -> None:
    """The gain is the accepted tokens of a round less those on a path of the copies' own nodes,
    on average over rows.
    """
    tries = [make_copies([0.9, 0.9, 0.9]), make_copies([0.5])]
    # of the first row one, of the second none
    ready = CopyTree(3, 2.0, 1.0, np.zeros((2, 5)), tries, [{0, 1}, {0}])
    tree = TokenTree.from_chain(torch.tensor([[101, 7, 7, 7], [102, 7, 7, 7]]))
    path = torch.arange(4).repeat(2, 1)
    result = ready.drafter_gain(RoundResult(tree, torch.zeros(0), torch.tensor(counts), {}, path))
    assert result == ((counts[0] - 1 - min(counts[0] - 1, 1)) + (counts[1] - 1)) / 2


def test_auto_counts_the_cost_of_a_larger_tree() -> None:
    """Half a token more is worth half a round."""
    for verifying, needs_drafter in ((0.0, True), (0.25, True), (0.4, False)):
        builder = prepare_builder(Auto(), 0.2, 1.0, 0.0, 0.2)
        for _ in range(4):
            builder.round_policy.costs.copies.gains[2].record_trial(0.5, 1, verifying, 1)
        assert builder.round_policy.needs_drafter(context(), [make_copies([])]) is needs_drafter


@pytest.mark.parametrize(
    "reading, ratio, needs_drafter",
    [(0.0, 1.0, True), (0.0, 1.3, False), (0.2, 1.0, True), (2.0, 1.0, False)],
)
def test_auto_counts_unread_tokens_and_observed_times(
    reading: float, ratio: float, needs_drafter: bool
) -> None:
    """A gain of half a round is lost if rounds with the drafter take longer than modelled, or it
    has to read for too long.
    """
    builder = prepare_builder(Auto(), 0.2, 1.0, 0.0, 0.2)
    for _ in range(4):
        builder.round_policy.costs.copies.gains[2].record_trial(0.5, 1, 0.0, 1)
    prefix = context()
    builder.round_policy.costs.time_ratios.copy_rounds[True].extend([ratio] * 8)
    builder.round_policy.costs.reading_seconds.value = reading * ROUNDS_PER_READING / prefix.longest
    builder.round_policy.last_draft_length = 0
    builder.round_policy.depth = 1
    assert builder.round_policy.needs_drafter(prefix, [make_copies([])]) is needs_drafter
    assert bool(builder.round_policy.num_unread) is needs_drafter


def test_numbers_of_threads_share_the_choice_to_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another number, rounds of the same kinds follow; with more prompts, the choice begins
    anew.
    """
    builder = prepare_builder(Auto(), 0.2, 1.0, 0.0, 0.2)
    choices = list[RoundCosts]()
    threads = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    for number, rows in ((2, [0]), (1, [0]), (1, [0, 1, 2])):
        threads[0] = number
        builder.round_policy._plan_draft(context(rows))
        choices.append(builder.round_policy.costs)
    first, second, third = choices
    assert first is not second and first.choice is second.choice and first.copies is second.copies
    assert first.time_ratios is not second.time_ratios
    assert third.choice is not first.choice and third.copies is not first.copies


@pytest.mark.parametrize("is_timed", [True, False])
def test_timing_waits_until_rounds_took_a_hundred_times_as_long(is_timed: bool) -> None:
    """Sizes up to the first one beyond two and a half times the smallest one's time are counted,
    three times each.
    """
    latency = Latency({0: {1: 1.0, 2: 1.0, 4: 1.0, 8: 2.5, 16: 5.0, 32: 10.0}}, {0: {1: 0.1}}, 0.1)
    builder = Auto(budget=32)
    builder.prepare(Calibration(latency=latency))
    costs = builder.round_policy.costs
    assert costs.timing_seconds == 3 * (1.0 + 1.0 + 1.0 + 2.5 + 5.0)
    costs.is_timed = is_timed
    costs.choice.comparisons.extend([1.5] * 9)
    for share, is_due in ((0.99, False), (1.01, True)):
        costs.round_seconds = share * 100 * costs.timing_seconds
        assert costs.needs_timing(10, SETTLED_ROUNDS) is is_due
        assert not costs.needs_timing(10, SETTLED_ROUNDS - 1)


def test_slow_rounds_do_not_change_auto_trees() -> None:
    """Where drafting and verifying take four times as long for a while, trees are those of the
    steady machine.
    """
    sizes: list[list[int]] = []
    for slow in (1.0, 4.0):
        builder = prepare_builder(Auto(depth=4, budget=40, top_k=4, memory=8), 0.05, 1.0, 0.03, 0.1)
        sizes.append([])
        for turn in range(60):
            tree = builder.expand(context(), Table(random_scores))
            sizes[-1].append(tree.tokens.shape[1])
            factor = slow if 20 <= turn < 40 else 1.0
            draft = 0.1 + (builder.round_policy.num_levels - 1) * 0.05
            verify = 1 + 0.03 * tree.tokens.shape[1]
            seconds = {"draft": factor * draft, "verify": factor * verify, "accept": 0.0}
            builder.round_policy.record(
                RoundPlan(), RoundResult(tree, torch.zeros(0), torch.tensor([2, 1]), seconds)
            )
    assert sizes[0] == sizes[1] and len(set(sizes[0])) > 1


@pytest.mark.parametrize(("slope", "fitted"), [(1.3, 1.3), (9.0, 2.0), (0.1, 0.5)])
def test_fitted_times_are_weighted_least_squares(slope: float, fitted: float) -> None:
    """The fit is that of numpy with weights exp(-age / memory); its slope stays within half and
    twice the calibrated one, and trees of `refit` are those of a machine whose calibration had the
    fitted times."""
    fit = VerifyFit(memory=20)
    rows = [(1 + 0.03 * n, 0.4 + slope * (1 + 0.03 * n) + 0.01 * math.sin(n)) for n in range(2, 40)]
    for row in rows:
        fit.record(*row)
    x, t = torch.tensor(rows, dtype=torch.float64).T
    weight = (-torch.arange(len(x) - 1, -1, -1) / 20).exp().double().sqrt()
    least = torch.linalg.lstsq(
        (torch.stack([torch.ones_like(x), x]) * weight).T, (t * weight)[:, None]
    ).solution[:, 0]
    if slope == fitted:
        assert fit.coefficients() == pytest.approx(tuple(least.tolist()), rel=1e-6)
    assert fit.coefficients()[1] == pytest.approx(fitted, abs=0.02)
    sizes = []
    for builder in (
        prepare_builder(Auto(4, 40, 4, refit=True), 0.05, 1, 0.03),
        prepare_builder(Auto(4, 40, 4), 0.05, *fitted_line(fit)),
    ):
        if builder.round_policy.costs.fit is not None:
            builder.round_policy.costs.fit = fit
        sizes.append(builder.expand(context(), Table(random_scores)).tokens.shape)
    # With a base below 0, no size takes less than half of its calibrated time.
    assert sizes[0] == sizes[1] or fit.coefficients()[0] < 0


def fitted_line(fit: VerifyFit) -> tuple[float, float]:
    """Return the fit of 1 + 0.03 n: a base and the seconds of a node."""
    base, slope = fit.coefficients()
    return base + slope, 0.03 * slope
