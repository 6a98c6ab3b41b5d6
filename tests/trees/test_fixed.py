"""Fixed trees: the search equals brute force over all trees, and drawing over them a plain
Python draw.
"""

import math
import random
from functools import cache

import pytest
import torch

from spectrain.errors import UserError
from spectrain.trees import Static
from spectrain.trees.measurements import Calibration
from spectrain.trees.token_tree import Children
from tests.installed import load_cases
from tests.trees.tables import (
    ROWS,
    VOCAB,
    Path,
    Table,
    assert_rows_alone,
    check_structure,
    context,
    grow_tree,
    node_noise,
    paths,
    random_scores,
    soft_scores,
    to_target,
)

CHILDREN = ("deterministic", "sampled", "without_replacement")
SHAPES = (
    [[0]],
    [[0], [0, 0], [0, 0, 0]],
    [[0], [1], [2], [0, 0], [0, 1], [2, 0], [2, 0, 0], [2, 0, 1]],
    [[v] for v in range(9)] + [[3, 0], [8, 0]],  # more choices than there are tokens
)
CHANCES = (
    [0.6, 0.2, 0.1],
    [0.5, 0.5, 0.0, 0.0],
    [0.0, 0.3],
    [0.0, 0.0],
    [0.1, 0.4, 0.3, 0.1],
    [1.0],
    [0.9, 0.05, 0.03, 0.02],
)


@cache
def all_trees(nodes: int, depth: int, width: int) -> frozenset[frozenset[Path]]:
    """Return every tree of this many nodes, the root included, in which a sibling has all those
    before it.
    """
    if nodes == 1:
        return frozenset([frozenset()])
    grown_trees = set()
    for tree in all_trees(nodes - 1, depth, width):
        for path in {(), *tree}:
            child = (*path, sum(other[:-1] == path for other in tree))
            if len(child) <= depth and child[-1] < width:
                grown_trees.add(tree | {child})
    return frozenset(grown_trees)


def tree_value(tree: frozenset[Path] | list[Path], hits: list[list[float]]) -> float:
    """Return the summed products of the chances along each path, the root being 1."""
    return 1 + sum(
        math.prod(hits[depth][choice] for depth, choice in enumerate(path)) for path in tree
    )


def draw_tree(row: int, builder: Static) -> list[Path]:
    """Draw the nodes of a shape in plain Python: noise is a node's own, whose number counts all
    nodes ever drafted.
    """
    numbers: dict[Path, int] = {(): 0}
    newest = 1
    shape = [path for path in builder.paths if max(path) < VOCAB]
    shape = [path for path in shape if all(path[:n] in shape for n in range(1, len(path)))]
    result: dict[Path, Path] = {(): ()}
    for depth in range(1, max(map(len, shape)) + 1):
        level = [path for path in shape if len(path) == depth]
        frontier = list(dict.fromkeys(path[:-1] for path in level))
        width = max(path[-1] for path in level) + 1
        scores = torch.tensor([random_scores(row, result[path]) for path in frontier])
        log_q = (scores / builder.temperature).log_softmax(-1)
        if builder.children == "sampled":
            own_values = [
                [node_noise(row, builder.seed, numbers[path], number) for number in range(width)]
                for path in frontier
            ]
            ids = torch.stack(
                [
                    torch.stack([(q + z).argmax() for z in each])
                    for q, each in zip(log_q, own_values)
                ]
            )
        else:
            if builder.children == "without_replacement":
                log_q = log_q + torch.stack(
                    [node_noise(row, builder.seed, numbers[path]) for path in frontier]
                )
            ids = log_q.sort(dim=-1, descending=True).indices
        numbers |= {path: newest + frontier.index(path[:-1]) * width + path[-1] for path in level}
        newest += len(frontier) * width
        for path in level:
            result[path] = result[path[:-1]] + (
                to_target(int(ids[frontier.index(path[:-1]), path[-1]])),
            )
    return list(result.values())


@pytest.mark.sweep(10)
@pytest.mark.parametrize("children", CHILDREN)
@pytest.mark.parametrize("shape", SHAPES, ids=len)
@pytest.mark.parametrize("temperature, seed", [(1.0, 0), (0.6, 4)])
def test_static_equals_plain_python(
    shape: list[list[int]], children: Children, temperature: float, seed: int
) -> None:
    """A path of choices names the likeliest or drawn tokens; choices beyond the vocabulary are
    left out.
    """
    builder = Static(paths=shape, children=children, temperature=temperature, seed=seed)
    tree = grow_tree(lambda: builder)
    assert (
        tree.valid.all()
        and builder.budget == len(shape) + 1
        and builder.depth == max(map(len, shape))
    )
    for row in ROWS:
        assert paths(tree, row) == draw_tree(row, builder)
    assert_rows_alone(lambda: builder)


@pytest.mark.parametrize("children", ["sampled", "without_replacement"])
def test_drawn_siblings_are_distributed_as_q(children: Children) -> None:
    """Over many rows, pairs of siblings come as often as q times q, or q without the first, say;
    by chi-squared.
    """
    rows = range(4000)
    q = torch.tensor(soft_scores(0, ())).softmax(-1)
    tree = Static(paths=[[0], [1]], children=children).expand(
        context(rows), Table(lambda row, path: soft_scores(0, path), rows)
    )
    observed = torch.zeros(VOCAB, VOCAB)
    for first, second in ((tree.tokens[:, 1:] - 3) // 7).tolist():
        observed[first, second] += 1
    expected = len(rows) * q[:, None] * q
    if children == "without_replacement":
        expected = expected.fill_diagonal_(0) / (1 - q[:, None])
    real = expected > 0
    assert observed[~real].sum() == 0
    # 29 or 35 degrees of freedom
    assert ((observed - expected)[real] ** 2 / expected[real]).sum() < 67


def test_top_and_sampled_children_equal_plain_python() -> None:
    """Nodes of three, two and one children have the likeliest tokens and, last, one of the rest of
    q, which is what the tree says it was drawn from; over many rows it comes as often as that."""
    rows = range(4000)
    shape = [[0], [1], [2], [0, 0], [0, 1], [1, 0]]
    table = Table(lambda row, path: soft_scores(0, path), rows)
    tree = Static(paths=shape, children="top_and_sampled", temperature=0.7).expand(
        context(rows), table
    )
    check_structure(tree)
    assert tree.q is not None and tree.valid.all()
    tokens = (tree.tokens[:, 1:] - 3) // 7
    for row in (0, 7, 1234):
        result = paths(tree, row)
        for node, count in ((0, 3), (1, 2), (2, 1)):
            q = (torch.tensor(soft_scores(0, result[node])) / 0.7).softmax(-1)
            order = q.argsort(descending=True)[: count - 1]
            children = [
                child for child, parent in enumerate(tree.parents[row].tolist()) if parent == node
            ]
            assert (
                len(children) == count
                and tokens[row, [child - 1 for child in children[:-1]]].tolist() == order.tolist()
            )
            rest = q.scatter(0, order, 0)
            torch.testing.assert_close(tree.q[row, node], rest / rest.sum())
    expected = len(rows) * tree.q[0, 0]
    observed = tokens[:, 2].bincount(minlength=VOCAB)
    real = expected > 0
    assert observed[~real].sum() == 0 and real.sum() == VOCAB - 2
    assert ((observed - expected)[real] ** 2 / expected[real]).sum() < 22  # 3 degrees of freedom


def test_top_children_stay_where_the_residual_is_empty() -> None:
    """A q that has one token only leaves one child, and beside it padding."""
    sure = [0.0] + [-1e4] * (VOCAB - 1)
    tree = Static(paths=[[0], [1]], children="top_and_sampled").expand(
        context(), Table(lambda row, path: sure)
    )
    assert (
        tree.valid.tolist() == [[True, True, False]] * 2
        and tree.q is not None
        and not tree.q[:, 0].any()
    )


@pytest.mark.sweep(8)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "budget, depth, width", [(2, 1, 3), (4, 2, 2), (5, 5, 5), (7, 3, 2), (7, 6, 6), (7, 2, 3)]
)
def test_search_equals_exhaustive_search(budget: int, depth: int, width: int, seed: int) -> None:
    """No connected tree of the budget keeps more than the one that is found; hits fall with the
    rank, zeros among them.
    """
    source = random.Random(seed)
    hits = []
    for _ in range(depth):
        row = sorted((source.random() for _ in range(width)), reverse=True)
        accepted = source.random() / sum(row)
        hits.append([chance * accepted for chance in row[: width - seed % 2]] + [0.0] * (seed % 2))
    builder = Static(depth, budget)
    builder.prepare(Calibration(hits, [1] * depth))
    best = max(tree_value(tree, hits) for tree in all_trees(budget, depth, width))
    assert tree_value(builder.paths, hits) == pytest.approx(best)
    assert (
        frozenset(builder.paths) in all_trees(builder.budget, depth, width)
        and builder.budget <= budget
    )
    grow_tree(lambda: builder)


@pytest.mark.parametrize(
    "shape, children, path",
    [
        ([[0], [1, 0]], "deterministic", "[1, 0]"),
        ([[0, 0]], "deterministic", "[0, 0]"),
        ([[]], "deterministic", "[]"),
        ([[-1]], "deterministic", "[-1]"),
        ([[1]], "sampled", "[1]"),
        ([[0], [1], [1, 1]], "without_replacement", "[1, 1]"),
    ],
)
def test_paths_without_their_parents_are_refused(
    shape: list[list[int]], children: Children, path: str
) -> None:
    """A path without its parent, or without an earlier sibling where children are drawn, is
    named.
    """
    with pytest.raises(UserError) as refused:
        Static(paths=shape, children=children)
    assert f"tree.paths: {path} has a parent" in str(refused.value)


def test_deterministic_children_may_skip_a_rank() -> None:
    """Children that are not drawn need no earlier sibling: the second choice alone is a tree."""
    tree = grow_tree(lambda: Static(paths=[[1], [1, 2]]))
    ranked = sorted(range(VOCAB), key=lambda v: -random_scores(0, ())[v])
    assert paths(tree, 0)[1] == (to_target(ranked[1]),)


# Cases of installed packages.
CASES = load_cases(__name__)


@pytest.mark.parametrize(
    "builder",
    [Static(), *CASES.get("test_unprepared_trees_are_refused", ())],
    ids=lambda builder: builder.name,
)
def test_unprepared_trees_are_refused(builder: Static) -> None:
    """A shape that is still to be searched says that it is."""
    with pytest.raises(UserError, match=f"tree={builder.name}: its shape is not searched yet"):
        builder.expand(context(), Table(random_scores))
