"""Trees shaped by confidence equal a plain Python construction over random probability tables."""

import math
from collections.abc import Callable

import pytest

from spectrain.errors import UserError
from spectrain.trees import Eagle2, TreeBuilder
from tests.installed import load_cases
from tests.trees.tables import (
    ROWS,
    VOCAB,
    Path,
    Scores,
    Table,
    assert_rows_alone,
    check_structure,
    context,
    grow_tree,
    list_likeliest,
    paths,
    random_scores,
    select_best,
    tied_scores,
    to_target,
)

EAGLE2 = [(1, 2, 1), (1, 4, 6), (2, 5, 2), (3, 12, 3), (5, 16, 4), (6, 6, 9), (4, 40, 5)]


def rounded_perplexity(scores: Scores, row: int, path: Path) -> int:
    """Return exp(H), rounded."""
    return round(math.exp(-sum(math.exp(log_q) * log_q for log_q in scores(row, path))))


def build_eagle2(
    scores: Scores,
    row: int,
    builder: Eagle2,
    limit: Callable[[Scores, int, Path], int] | None = None,
) -> list[Path]:
    """Build EAGLE-2's tree in plain Python: return the paths of its nodes, level by level;
    `limit` bounds children.
    """
    nodes: list[tuple[Path, float]] = [((), 0.0)]
    frontier = nodes
    for _ in range(builder.depth):
        children = []
        for path, score in frontier:
            width = builder.top_k if limit is None else min(builder.top_k, limit(scores, row, path))
            children += [
                (child, score + log_q) for child, log_q in list_likeliest(scores, row, path, width)
            ]
        nodes = nodes + children
        frontier = sorted(children, key=lambda child: -child[1])[: builder.top_k]
    return select_best(nodes, builder.budget)


@pytest.mark.parametrize("scores", [random_scores, tied_scores])
@pytest.mark.parametrize("depth, budget, top_k", EAGLE2)
def test_eagle2_equals_plain_python(scores: Scores, depth: int, budget: int, top_k: int) -> None:
    """The nodes, in order, are those of the plain construction, alone as in a batch, and none of
    them is padding.
    """
    builder = Eagle2(depth, budget, top_k)
    tree = grow_tree(lambda: builder, scores)
    assert tree.valid.all()
    for row in ROWS:
        assert paths(tree, row) == build_eagle2(scores, row, builder)
    assert_rows_alone(lambda: builder, scores)


@pytest.mark.parametrize("budget", [2, 7, 20])
def test_eagle2_keeps_the_best_paths(budget: int) -> None:
    """Where nothing is pruned on the way, the nodes are the best-scored of all paths."""
    tree = grow_tree(lambda: Eagle2(depth=2, budget=budget, top_k=VOCAB))
    for row in ROWS:
        assert set(paths(tree, row)) == set(select_best(list_paths(random_scores, row, 2), budget))


def test_eagle2_tree_may_be_smaller_than_its_budget() -> None:
    """A drafter that offers fewer nodes than the budget gets them all verified."""
    assert grow_tree(lambda: Eagle2(depth=2, budget=50, top_k=3)).tokens.shape == (
        len(ROWS),
        1 + 3 + 9,
    )


# Cases of installed packages.
CASES = load_cases(__name__)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Eagle2(depth=4, budget=5, top_k=3),
        *CASES.get("test_certain_drafter_becomes_a_chain", ()),
    ],
)
def test_certain_drafter_becomes_a_chain(make: Callable[[], TreeBuilder]) -> None:
    """Where one token is certain, ties with the root and with impossible tokens still give a
    well formed tree.
    """
    tree = make().expand(context(), Table(lambda row, path: [0.0] + [float("-inf")] * (VOCAB - 1)))
    check_structure(tree)
    for row in ROWS:
        assert paths(tree, row) == [(to_target(0),) * depth for depth in range(5)]


def list_paths(scores: Scores, row: int, depth: int) -> list[tuple[Path, float]]:
    """Return all paths down to a depth with their scores, level by level."""
    result: list[tuple[Path, float]] = [((), 0.0)]
    for level in range(depth):
        above = [node for node in result if len(node[0]) == level]
        result += [
            (child, score + log_q)
            for path, score in above
            for child, log_q in list_likeliest(scores, row, path)
        ]
    return result


@pytest.mark.parametrize(
    "build, key",
    [
        (lambda: Eagle2(depth=0), "tree.depth=0"),
        (lambda: Eagle2(budget=1), "tree.budget=1"),
        (lambda: Eagle2(top_k=0), "tree.top_k=0"),
        *CASES.get("test_builders_refuse_empty_trees", ()),
    ],
)
def test_builders_refuse_empty_trees(build: Callable[[], object], key: str) -> None:
    """A tree that can't draft is refused under the key that asked for it."""
    with pytest.raises(UserError, match=key):
        build()


BEAMS = [(1, 2, 1), (3, 4, 1), (2, 5, 2), (3, 12, 3), (4, 8, 4), (4, 40, 6)]


def search_beams(scores: Scores, row: int, depth: int, width: int) -> list[tuple[Path, float]]:
    """Search beams over full paths, in plain Python; return the last beams, the best first,
    without merged prefixes.
    """
    result: list[tuple[Path, float]] = [((), 0.0)]
    for _ in range(depth):
        longer = [
            (child, score + log_q)
            for path, score in result
            for child, log_q in list_likeliest(scores, row, path, width)
        ]
        result = sorted(longer, key=lambda beam: -beam[1])[:width]
    return result
