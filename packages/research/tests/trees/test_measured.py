"""The tests of tests/trees/test_measured.py that are about ideas."""

import random

import numpy as np
import pytest
import torch

from spectrain.trees import Eagle2
from spectrain_research.cast.builder import Cast, choose_size
from tests.trees.tables import (
    ROWS,
    Path,
    Scores,
    Table,
    check_structure,
    context,
    grow_tree,
    list_likeliest,
    paths,
    random_scores,
    select_best,
    soft_scores,
)
from tests.trees.test_measured import apply_cast_rule, prepare_builder, sum_gains


@pytest.mark.parametrize("least", [0.0, 0.3, 1.0, 4.0])
def test_choose_size_equals_the_rule_of_cast(least: float) -> None:
    """Over random gains and costs, steps in cost included, as many nodes are taken as the rule
    says.
    """
    source = random.Random(0)
    sizes = set()
    for _ in range(200):
        gains = np.cumsum([source.random() for _ in range(12)]).tolist()
        costs = np.cumsum([source.choice([0.01, 0.5, 2.0]) for _ in range(12)]).tolist()
        assert choose_size(gains, costs, least) == apply_cast_rule(gains, costs, least)
        sizes.add(choose_size(gains, costs, least))
    assert len(sizes) > 1 or least == 0


def build_cast(builder: Cast, history: list[list[float]], scores: Scores) -> list[list[Path]]:
    """Build CAST's trees in plain Python over the rows of a batch; `history` holds how u changed
    by level in earlier rounds.
    """
    latency = builder.require_latency()
    unit = latency.estimate_verify(1, 9)
    nodes: list[list[tuple[Path, float]]] = [[((), 0.0)] for _ in ROWS]
    frontier = nodes
    last = 0.0
    for level in range(builder.depth):
        children = [
            [
                (child, score + log_q)
                for path, score in frontier[row]
                for child, log_q in list_likeliest(scores, row, path, builder.top_k)
            ]
            for row in ROWS
        ]
        nodes = [nodes[row] + children[row] for row in ROWS]
        ranked = [sorted(level, key=lambda child: -child[1]) for level in children]
        gains = sum_gains(ranked, builder.top_k)
        costs = [latency.estimate_step(k, 9) / unit for k in range(1, len(gains) + 1)]
        width = apply_cast_rule(gains, costs, builder.breadth_gain)
        if level:
            history[level - 1].append(gains[width - 1] / last)
        last = gains[width - 1]
        recent = history[level][-builder.memory :]
        alpha = sum(recent) / len(recent) if recent else 1.0
        if level + 1 == builder.depth or alpha * last / costs[width - 1] < builder.depth_gain:
            break
        frontier = [row[:width] for row in ranked]
    gains = sum_gains([sorted(row, key=lambda node: -node[1]) for row in nodes], builder.budget)
    size = apply_cast_rule(
        gains,
        [latency.estimate_verify(k, 9) / unit for k in range(1, len(gains) + 1)],
        builder.size_gain,
    )
    return [select_best(row, max(2, size)) for row in nodes]


@pytest.mark.parametrize(
    "step, node", [(0.01, 0.01), (0.05, 0.05), (0.1, 0.02), (0.3, 0.1), (0.02, 0.3)]
)
@pytest.mark.parametrize(
    "depth, budget, top_k, memory", [(1, 5, 3, 1), (4, 16, 4, 2), (6, 40, 6, 3)]
)
def test_cast_equals_plain_python(
    step: float, node: float, depth: int, budget: int, top_k: int, memory: int
) -> None:
    """Round after round, with what it remembers of earlier ones, the nodes are those of the
    plain construction.
    """
    builder = prepare_builder(Cast(depth, budget, top_k, memory=memory), step, 1.0, node, context=9)
    history: list[list[float]] = [[] for _ in range(depth)]
    for turn in range(5):

        def scores(row: int, path: Path, turn: int = turn) -> list[float]:
            return random_scores(10 * turn + row, path)

        table = Table(scores)
        tree = builder.expand(context(), table)
        check_structure(tree)
        assert (
            tree.valid.all()
            and tree.tokens.shape[1] <= budget
            and len(table.evaluated_paths[0]) - 1 <= builder.max_drafted
        )
        assert [paths(tree, row) for row in ROWS] == build_cast(builder, history, scores)
    assert [list(level) for level in builder.level_ratios] == [
        pytest.approx(level[-memory:]) for level in history
    ]


@pytest.mark.parametrize("depth, budget, top_k", [(1, 4, 3), (2, 11, 3), (3, 30, 4)])
def test_cast_takes_all_nodes_that_cost_nothing(depth: int, budget: int, top_k: int) -> None:
    """Where steps and nodes cost nothing more, its tree is EAGLE-2's."""
    tree = grow_tree(lambda: prepare_builder(Cast(depth, budget, top_k)), soft_scores)
    eagle2 = grow_tree(lambda: Eagle2(depth, budget, top_k), soft_scores)
    assert torch.equal(tree.tokens, eagle2.tokens) and torch.equal(tree.parents, eagle2.parents)


def test_cast_stays_small_where_nodes_cost_more_than_a_token() -> None:
    """No node is worth its cost: one is drafted, since a tree has one, and the drafter takes no
    further step.
    """
    builder = prepare_builder(Cast(), step=2.0, base=0.0, node=1.0)
    table = Table(random_scores)
    tree = builder.expand(context(), table)
    assert tree.tokens.shape[1] == 2 and len(table.evaluated_paths[0]) == 1


def test_cast_depth_stops_where_a_level_gains_less_than_it_costs() -> None:
    """A tree is shallower the more a step costs; where no level pays, it is one level deep."""
    depths = []
    for step in (0.001, 0.1, 0.3, 5.0):
        tree = grow_tree(lambda step=step: prepare_builder(Cast(depth=8, top_k=1), step))  # type: ignore[misc]
        depths.append(int(tree.depths.max()))
    assert (
        depths[0] == 8
        and depths[-1] == 1
        and depths == sorted(depths, reverse=True)
        and len(set(depths)) > 2
    )
