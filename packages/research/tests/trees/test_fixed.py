"""The tests of tests/trees/test_fixed.py that are about ideas."""

import numpy as np
import pytest

from spectrain.trees.measurements import Calibration, Latency
from spectrain.trees.token_tree import Children
from spectrain_research.sequoia.builder import Sequoia, sequoia_paths, sequoia_table
from tests.trees.tables import ROWS, assert_rows_alone, grow_tree, paths
from tests.trees.test_fixed import CHANCES, CHILDREN, all_trees, draw_tree, tree_value


@pytest.mark.sweep(8)
@pytest.mark.parametrize("chances", CHANCES, ids=str)
@pytest.mark.parametrize("levels", [1, 2, 3, 4, 7])
def test_sequoia_table_equals_brute_force(chances: list[float], levels: int) -> None:
    """T[m][l][b] is the best value among all trees of m nodes, at most l levels and b children
    of the root.
    """
    table = sequoia_table(chances, 7, levels)
    for nodes in range(1, 8):
        for level in range(1, levels + 1):
            result = dict.fromkeys(range(len(chances) + 1), -np.inf)
            for tree in all_trees(nodes, level - 1, len(chances)):
                children = sum(len(path) == 1 for path in tree)
                result[children] = max(result[children], tree_value(tree, [chances] * level))
            np.testing.assert_allclose(table[nodes, level], list(result.values()), atol=1e-7)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("chances", CHANCES, ids=str)
@pytest.mark.parametrize("nodes", range(2, 8))
@pytest.mark.parametrize("levels", [2, 3, 7])
def test_sequoia_paths_reach_the_best_value(chances: list[float], nodes: int, levels: int) -> None:
    """The paths are a tree of the most nodes that are possible, and no tree of that many keeps
    more.
    """
    result = sequoia_paths(chances, nodes, levels)
    possible = [
        trees for n in range(1, nodes + 1) if (trees := all_trees(n, levels - 1, len(chances)))
    ][-1]
    assert frozenset(result) in possible and len(result) == len(set(result))
    best = max(tree_value(tree, [chances] * levels) for tree in possible)
    assert tree_value(result, [chances] * levels) == pytest.approx(best, abs=1e-7)


@pytest.mark.parametrize("children", CHILDREN)
def test_sequoia_grows_the_searched_paths(children: Children) -> None:
    """Prepared by measured hits, whose mean over depths weighs by places, its tree is that of
    their chances.
    """
    builder = Sequoia(depth=3, budget=7, children=children)
    builder.prepare(Calibration([[0.6, 0.2, 0.1], [0.3, 0.3, 0.1]], [30, 10]))
    assert set(builder.paths) == set(sequoia_paths([0.525, 0.225, 0.1], 7, 4))
    tree = grow_tree(lambda: builder)
    for row in ROWS:
        assert paths(tree, row) == draw_tree(row, builder)
    assert_rows_alone(lambda: builder)


@pytest.mark.parametrize("chances", CHANCES[:2] + CHANCES[4:], ids=str)
@pytest.mark.parametrize(
    "start, step, base, node", [(0.1, 0.1, 1.0, 0.01), (0.5, 0.3, 1.0, 0.2), (0.0, 0.0, 1.0, 0.5)]
)
def test_sequoia_chooses_its_size_by_measured_time(
    chances: list[float], start: float, step: float, base: float, node: float
) -> None:
    """The size is the one whose best tree takes the least predicted seconds a token, by brute
    force.
    """
    latency = Latency({0: {1: base + node, 9: base + 9 * node}}, {0: {1: step, 9: 9 * step}}, start)
    builder = Sequoia(depth=4, budget=7, measured=True)
    builder.prepare(Calibration([chances], [1], latency))
    best = {}
    for nodes in range(2, 8):
        for levels in range(2, 6):
            if trees := all_trees(nodes, levels - 1, len(chances)):
                tokens = max(tree_value(tree, [chances] * 4) for tree in trees)
                seconds = (
                    start + (levels - 1 - 1) * step * max(1, nodes // levels) + base + node * nodes
                )
                best[nodes, levels] = (seconds / tokens, tokens)
    nodes, levels = min(best, key=lambda size: best[size])
    assert builder.budget == nodes and builder.depth <= levels - 1
    assert tree_value(builder.paths, [chances] * 4) == pytest.approx(
        best[nodes, levels][1], abs=1e-7
    )


def test_measured_sequoia_minimises_seconds_per_token() -> None:
    """Dear nodes give a smaller tree, dear steps a shallower one, than free ones."""
    sizes = []
    for step, node in ((1e-6, 1e-6), (1e-6, 1.0), (3.0, 1e-6)):
        builder = Sequoia(depth=4, budget=7, measured=True)
        latency = Latency({0: {1: 1 + node, 9: 1 + 9 * node}}, {0: {1: step, 9: step}}, 0.1)
        builder.prepare(Calibration([[0.6, 0.2, 0.1]], [1], latency))
        sizes.append((builder.budget, builder.depth))
    assert sizes[0][0] == 7 and sizes[1][0] < sizes[0][0] and sizes[2][1] < sizes[0][1]


def test_level_costs_make_a_static_tree_shallower() -> None:
    """Where layers keep a state, a level takes a step of theirs."""
    depths = []
    for level in (0.0, 3.0):
        builder = Sequoia(depth=4, budget=7, measured=True)
        builder.prepare(
            Calibration(
                [[0.6, 0.2, 0.1]],
                [1],
                Latency({0: {1: 1.0, 9: 1.0}}, {0: {1: 0.0, 9: 0.0}}, 0.1, level),
            )
        )
        depths.append(builder.depth)
    assert depths[1] < depths[0]
