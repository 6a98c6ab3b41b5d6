"""Chains whose length is decided while decoding: the decisions are those of plain Python, and
they are learnt from rounds.
"""

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from spectrain.errors import UserError
from spectrain.trees import Chain, Eagle2
from spectrain.trees.base import RoundResult
from spectrain.trees.measurements import Calibration, Latency
from spectrain.trees.token_tree import Children, TokenTree
from spectrain_research.controllers.builders import AdaptiveChain, Episode, Policy, Thompson
from spectrain_research.controllers.tree_policy import TreePolicy, fit_stopping
from tests.trees.tables import ROWS, Table, context, grow_tree, paths, random_scores

SIZES = (1, 2, 64)
RATES = [0.9, 0.8, 0.5, 0.3, 0.2, 0.1]  # that a token is accepted where those before it are


def prepare_builder(
    builder: AdaptiveChain, step: float = 0.3, base: float = 1.0, node: float = 0.02
) -> AdaptiveChain:
    """Prepare a builder with the costs of a draft step and of a node of verification."""
    latency = Latency(
        {0: {n: base + node * n for n in SIZES}}, {0: {n: step * n for n in SIZES}}, step
    )
    builder.prepare(Calibration(latency=latency))
    return builder


def chain_speed(
    length: int, rates: list[float], step: float = 0.3, base: float = 1.0, node: float = 0.02
) -> float:
    """Return the tokens per second of a chain of this length, by definition."""
    tokens = 1.0
    chance = 1.0
    for rate in rates[:length]:
        chance *= rate
        tokens += chance
    return tokens / (base + node * (length + 1) + step * length)


def observe_round(builder: AdaptiveChain, lengths: list[int], accepted: list[int]) -> None:
    """Let a builder observe a round with these drafted lengths and accepted tokens by row."""
    width = 1 + max(lengths)
    valid = torch.tensor([[n <= length for n in range(width)] for length in lengths])
    tree = TokenTree.from_chain(torch.zeros(len(lengths), width, dtype=torch.int64), valid)
    builder.observe(RoundResult(tree, torch.zeros(0), torch.tensor(accepted) + 1, {}))


def make_thompson(children: Children, seed: int) -> AdaptiveChain:
    return prepare_builder(Thompson(6, children, seed=seed))


def draw_accepted(draw: random.Random, rates: list[float]) -> int:
    """Draw how many tokens a round accepts."""
    return next((depth for depth, rate in enumerate(rates) if draw.random() >= rate), len(rates))


@pytest.mark.parametrize("children", ["deterministic", "sampled"])
def test_thompson_chain_has_the_chosen_length(children: Children) -> None:
    """Its tokens are those of a fixed chain of the length that the drawn chances make fastest,
    and no step is run in vain.
    """
    for seed in range(6):
        tree = grow_tree(partial(make_thompson, children, seed))
        chances = np.random.default_rng(seed).beta(np.ones(6), np.ones(6)).tolist()
        fastest = max(range(1, 7), key=lambda length: chain_speed(length, chances))
        builder = make_thompson(children, seed)
        table = Table(random_scores)
        builder.expand(context(), table)
        fixed = Chain(fastest, children, seed=seed).expand(context(), Table(random_scores))
        assert [paths(tree, row) for row in ROWS] == [paths(fixed, row) for row in ROWS]
        assert len(table.evaluated_paths[0]) == fastest


def test_thompson_finds_the_fastest_length() -> None:
    """Of a drafter whose depths are kept at fixed rates, nine of ten later chains have a length
    within 2 % of the fastest.
    """
    draw = random.Random(0)
    builder = prepare_builder(Thompson(6, memory=2000))
    fastest = max(chain_speed(length, RATES) for length in range(1, 7))
    chosen = []
    for _ in range(1500):
        builder.begin_round(context())
        chosen.append(builder.round_length)
        observe_round(
            builder, [builder.round_length], [min(builder.round_length, draw_accepted(draw, RATES))]
        )
    late = chosen[500:]
    assert sum(chain_speed(length, RATES) > 0.98 * fastest for length in late) > 0.9 * len(late)
    assert len(set(chosen[:50])) > 2, "it must have tried others"


def test_finished_rows_are_not_learned_from() -> None:
    """A row that emitted nothing, and a token that was not drafted, are no evidence."""
    builder = prepare_builder(Thompson(4, memory=4096))
    observe_round(builder, [2, 4], [2, -1])
    assert builder.accepted_counts.tolist() == [
        1,
        1,
        0,
        0,
    ] and builder.rejected_counts.tolist() == [0, 0, 0, 0]
    observe_round(builder, [3], [1])
    assert builder.rejected_counts[1] == 1 and builder.rejected_counts[2] == 0


def train_policy(step: float = 0.3, hint: float = 1.0) -> Policy:
    """Train a policy on episodes in which the second number of a state says, in a share `hint` of
    the positions, whether a token is accepted."""
    draw = random.Random(1)
    builder = prepare_builder(Policy(4, memory=1024), step)
    builder.begin_round(context())
    for _ in range(600):
        accepted = draw_accepted(draw, [0.6] * 4)
        builder.episodes.append(
            Episode(
                np.stack([make_state(draw, level < accepted, hint) for level in range(4)]), accepted
            )
        )
    builder.fit_policy()
    return builder


def make_state(draw: random.Random, is_accepted: bool, hint: float) -> np.ndarray:
    return np.array([1.0, float(is_accepted) if draw.random() < hint else draw.random()])


def test_policy_continues_where_it_gains() -> None:
    """Where the state tells what is kept, a token is drawn exactly where it is kept, as long as
    drafting is cheap; where a step costs more than any token is worth, nothing is run."""
    cheap = train_policy(step=0.05)
    dear = train_policy(step=3.0)
    for level in range(4):
        assert (
            np.array([1.0, 1.0]) @ cheap.draw_weights[level]
            > 0
            > np.array([1.0, 0.0]) @ cheap.draw_weights[level]
        )
    assert all(np.array([1.0, 1.0]) @ cheap.run_weights[level] > 0 for level in range(3))
    assert all(np.array([1.0, 1.0]) @ dear.run_weights[level] < 0 for level in range(3))


def simulate_policy(hint: float, rounds: int = 4000, step: float = 0.3) -> float:
    """Return tokens per second of the learnt decisions on new rounds, whose states have the same
    hints.
    """
    builder = train_policy(step, hint)
    draw = random.Random(2)
    tokens = 0.0
    seconds = 0.0
    for _ in range(rounds):
        accepted = draw_accepted(draw, [0.6] * 4)
        length = 0
        seconds += step
        while length < 4:
            visited = make_state(draw, length < accepted, hint)
            if visited @ builder.draw_weights[length] <= 0:
                break
            length += 1
            if length == 4 or visited @ builder.run_weights[length - 1] <= 0:
                break
            seconds += step
        tokens += 1 + min(length, accepted)
        seconds += 1.0 + 0.02 * (length + 1)
    return tokens / seconds


def test_policy_is_faster_than_any_fixed_length() -> None:
    """Where the state tells what is kept, and no slower where it tells nothing: within 2 % of
    the best fixed length.
    """
    fixed = max(chain_speed(length, [0.6] * 4) for length in range(1, 5))
    assert simulate_policy(hint=1.0) > 1.05 * fixed
    assert simulate_policy(hint=0.0) > 0.98 * fixed


@pytest.mark.parametrize("children", ["deterministic", "sampled"])
def test_policy_explores_before_it_decides(children: Children) -> None:
    """Rounds are drafted to their full depth until enough was seen; afterwards a chain is the
    beginning of that chain.
    """
    builder = prepare_builder(Policy(4, children))
    builder.min_episodes = 8
    full = [paths(Chain(4, children).expand(context(), Table(random_scores)), row) for row in ROWS]
    for _ in range(4):
        tree = builder.expand(context(), Table(random_scores))
        assert [paths(tree, row) for row in ROWS] == full
        observe_round(builder, [4, 4], [1, 0])
    assert builder.draw_weights
    tree = builder.expand(context(), Table(random_scores))
    result = [paths(tree, row) for row in ROWS]
    assert result != full and all(short == long[: len(short)] for short, long in zip(result, full))


def test_policy_learns_nothing_from_copied_text() -> None:
    """A round whose drafter extended no rollout has no states; it leaves no episode."""
    builder = prepare_builder(Policy(3))
    observe_round(builder, [2, 0], [1, 0])
    assert isinstance(builder, Policy) and not builder.episodes


def test_policy_decides_with_a_short_memory() -> None:
    """A policy that remembers less than it would first look at decides once its memory is full."""
    builder = prepare_builder(Policy(3, memory=4))
    for _ in range(2):
        builder.expand(context(), Table(random_scores))
        observe_round(builder, [3, 3], [1, 0])
    assert builder.draw_weights


def simulate_trees(hint: float, step: float) -> tuple[float, float]:
    """Return tokens per second of trees of four levels on new rounds, whose states tell in a share
    `hint` whether the next level is reached, and of the best fixed depth."""
    draw = random.Random(4)

    def draw_rounds(count: int) -> tuple[np.ndarray, np.ndarray]:
        accepted = np.array([draw_accepted(draw, [0.6] * 4) for _ in range(count)])
        states = np.array(
            [
                [make_state(draw, level < num_accepted, hint) for level in (1, 2, 3)]
                for num_accepted in accepted
            ]
        )
        return states, accepted

    def measure_speed(drafted: np.ndarray, accepted: np.ndarray) -> float:
        levels = 1 + np.logical_and.accumulate(drafted, axis=1).sum(1)
        return float((1 + np.minimum(accepted, levels)).sum() / (1.0 + step * levels).sum())

    states, accepted = draw_rounds(600)
    speed = max(
        measure_speed(np.arange(1, 4) < np.full((600, 1), depth), accepted) for depth in range(1, 5)
    )
    for _ in range(4):
        weights, drafted = fit_stopping(
            states, accepted[:, None] > np.arange(1, 4), np.full(3, speed * step)
        )
        speed = measure_speed(drafted, accepted)
    states, accepted = draw_rounds(4000)
    fixed = max(
        measure_speed(np.arange(1, 4) < np.full((4000, 1), depth), accepted)
        for depth in range(1, 5)
    )
    decided = np.stack([states[:, level] @ weights[level] > 0 for level in range(3)], axis=1)
    return measure_speed(decided, accepted), fixed


def test_tree_policy_is_faster_than_any_fixed_depth() -> None:
    """Where the state tells what is reached, and no slower where it tells nothing: within 2 % of
    the best fixed depth.
    """
    (informed_speed, fixed), (blind_speed, blind_fixed) = (
        simulate_trees(1.0, 0.3),
        simulate_trees(0.0, 0.3),
    )
    assert informed_speed > 1.05 * fixed and blind_speed > 0.98 * blind_fixed


def test_tree_policy_is_fitted_once_and_saved(tmp_path: Path) -> None:
    """Trees are EAGLE-2's of full depth until the policy is fitted; a builder that reads its file
    decides the same and asks for no measurement, and refuses another depth."""
    file = tmp_path / "policy.json"
    latency = Latency(
        {0: {n: 1.0 + 0.02 * n for n in SIZES}}, {0: {n: 0.3 * n for n in SIZES}}, 0.3
    )
    builder = TreePolicy(4, 12, 3, str(file))
    builder.prepare(Calibration(latency=latency))
    builder.min_episodes = 8
    full = Eagle2(4, 12, 3).expand(context(), Table(random_scores))
    for _ in range(4):
        tree = builder.expand(context(), Table(random_scores))
        assert [paths(tree, row) for row in ROWS] == [paths(full, row) for row in ROWS]
        assert not file.exists()
        builder.observe(RoundResult(tree, torch.zeros(0), torch.tensor([2, 1]), {}))
    assert file.exists()
    again = TreePolicy(4, 12, 3, str(file))
    assert again.requirements == () and TreePolicy(4, 12, 3).requirements
    trees = [chooser.expand(context(), Table(random_scores)) for chooser in (builder, again)]
    assert (
        torch.equal(trees[0].tokens, trees[1].tokens) and builder.depths[-1] == again.depths[-1] < 4
    )
    with pytest.raises(UserError, match="it was fitted with tree.depth=4"):
        TreePolicy(5, 12, 3, str(file))


def test_chain_ends_by_the_drafters_own_estimate() -> None:
    """Where the rollout says how likely tokens are kept, `stop` weighs that: the chain ends
    where 1 - prod(c) > 1 - stop.
    """
    reported = {0: 0.9, 1: 0.8, 2: 0.5, 3: 0.9, 4: 0.9}

    class EstimatingTable(Table):
        def start(self) -> torch.Tensor:
            self.accept_probs = torch.full((len(self.rows), 1), reported[0])
            return super().start()

        def extend(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
            result = super().extend(tokens, parents)
            self.accept_probs = torch.full(tokens.shape, reported[len(self.evaluated_paths[0]) - 1])
            return result

    lengths = {
        stop: len(paths(Chain(5, stop=stop).expand(context(), EstimatingTable(random_scores)), 0))
        - 1
        for stop in (0.1, 0.3, 0.5, 0.7, 0.8)
    }
    assert lengths == {0.1: 5, 0.3: 4, 0.5: 2, 0.7: 2, 0.8: 1}
