"""The tests of tests/trees/test_dynamic.py that are about ideas."""

import heapq
import itertools
import math
from typing import Literal

import pytest
import torch

from spectrain.randomness import gumbel_noise
from spectrain.trees import Chain
from spectrain_research.dyspec.builder import DySpec
from spectrain_research.entropy_tree.builder import Entropy
from spectrain_research.opt_tree.builder import OptTree
from spectrain_research.redrafter.beam import Beam
from tests.trees.tables import (
    ROWS,
    VOCAB,
    Path,
    Scores,
    Table,
    assert_rows_alone,
    context,
    grow_tree,
    make_generator,
    paths,
    random_scores,
    select_best,
    soft_scores,
    tied_scores,
    to_target,
)
from tests.trees.test_dynamic import (
    BEAMS,
    EAGLE2,
    build_eagle2,
    list_paths,
    rounded_perplexity,
    search_beams,
)


@pytest.mark.parametrize("scores", [random_scores, soft_scores])
@pytest.mark.parametrize("depth, budget, top_k", [*EAGLE2, (2, 100, 6), (3, 100, 3)])
def test_entropy_equals_plain_python(scores: Scores, depth: int, budget: int, top_k: int) -> None:
    """A node has as many children as its perplexity says, `top_k` at most; the best nodes are
    kept.
    """
    builder = Entropy(depth, budget, top_k)
    tree = grow_tree(lambda: builder, scores)
    for row in ROWS:
        assert paths(tree, row) == build_eagle2(scores, row, builder, rounded_perplexity)
    assert_rows_alone(lambda: builder, scores)


def test_entropy_counts_children() -> None:
    """With room for all, the root and its children have min(top_k, round(exp(H))) children, of
    more than one number.
    """
    tree = grow_tree(lambda: Entropy(depth=2, budget=50, top_k=5))
    counts = set()
    for row in ROWS:
        result = paths(tree, row)
        for path in [path for path in result if len(path) < 2]:
            counts.add(sum(child[:-1] == path for child in result if child))
            assert sum(child[:-1] == path for child in result if child) == min(
                5, rounded_perplexity(random_scores, row, path)
            )
    assert len(counts) > 2


def build_opt_tree(scores: Scores, row: int, builder: OptTree) -> set[Path]:
    """Return the best nodes of all paths down to the first level that adds at most `threshold`
    expected tokens.
    """
    expected = 1.0
    accepted = {()}
    for depth in range(1, builder.depth + 1):
        nodes = list_paths(scores, row, depth)
        accepted = set(select_best(nodes, builder.budget))
        total = sum(math.exp(score) for path, score in nodes if path in accepted)
        if total - expected <= builder.threshold:
            break
        expected = total
    return accepted


@pytest.mark.parametrize("scores", [random_scores, soft_scores])
@pytest.mark.parametrize("depth, budget", [(1, 2), (1, 5), (2, 4), (3, 9), (4, 16), (2, 60)])
def test_opt_tree_keeps_the_best_paths(scores: Scores, depth: int, budget: int) -> None:
    """Without a threshold the nodes are those of the largest probability among all paths."""
    tree = grow_tree(lambda: OptTree(depth, budget, threshold=0), scores)
    for row in ROWS:
        assert set(paths(tree, row)) == set(select_best(list_paths(scores, row, depth), budget))
    assert_rows_alone(lambda: OptTree(depth, budget, threshold=0), scores)


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.3, 0.5, 0.9])
def test_opt_tree_stops_where_a_level_adds_little(threshold: float) -> None:
    """Each row ends with the first level that adds at most `threshold` expected tokens."""
    builder = OptTree(depth=5, budget=8, threshold=threshold)
    tree = grow_tree(lambda: builder)
    for row in ROWS:
        assert set(paths(tree, row)) == build_opt_tree(random_scores, row, builder)
    assert_rows_alone(lambda: builder)


def test_opt_tree_rows_stop_independently() -> None:
    """The thresholds above do end one row of a batch before the other."""
    result = [
        [max(map(len, build_opt_tree(random_scores, row, OptTree(5, 8, t)))) for row in ROWS]
        for t in (0.05, 0.2, 0.3, 0.5, 0.9)
    ]
    assert any(item != other for item, other in result)


def build_dyspec(row: int, builder: DySpec) -> list[Path]:
    """Build DySpec's tree from the full table: always fill the best open slot."""
    source = make_generator(row, builder.seed)
    result: list[Path] = [()]
    left = {(): table_q((), row, builder)}
    indices: list[tuple[float, int]] = [(-1.0, 0)]
    while indices and len(result) < builder.budget and -indices[0][0] >= builder.threshold:
        value, parent = heapq.heappop(indices)
        path = result[parent]
        noise = (
            [0.0] * VOCAB
            if builder.children == "deterministic"
            else gumbel_noise((VOCAB,), source).tolist()
        )
        open_ids = [v for v in range(VOCAB) if left[path][v] > 0]
        choice = max(open_ids, key=lambda v: math.log(left[path][v]) + noise[v])
        chance = left[path][choice]
        child = path + (to_target(choice),)
        result.append(child)
        left[child] = table_q(child, row, builder)
        if len(child) < builder.depth:
            heapq.heappush(indices, (value * chance, len(result) - 1))
        if len(open_ids) > 1:
            rest = [0.0 if v == choice else chance for v, chance in enumerate(left[path])]
            left[path] = [chance / sum(rest) for chance in rest]
            heapq.heappush(indices, (value * (1 - chance), parent))
    return result


def table_q(path: Path, row: int, builder: DySpec) -> list[float]:
    """Return the tempered distribution after a path."""
    return (torch.tensor(random_scores(row, path)) / builder.temperature).softmax(-1).tolist()


@pytest.mark.sweep(10)
@pytest.mark.parametrize("children", ["deterministic", "without_replacement"])
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3])
@pytest.mark.parametrize(
    "depth, budget, temperature, seed",
    [(1, 9, 1.0, 0), (2, 5, 0.7, 3), (5, 16, 1.0, 1), (9, 30, 1.5, 2)],
)
def test_dyspec_equals_plain_python(
    children: Literal["deterministic", "without_replacement"],
    threshold: float,
    depth: int,
    budget: int,
    temperature: float,
    seed: int,
) -> None:
    """Running the drafter as late as possible changes nothing: nodes and draws are those of the
    plain heap, in order.
    """
    builder = DySpec(depth, budget, threshold, children, temperature, seed)
    tree = grow_tree(lambda: builder)
    for row in ROWS:
        assert paths(tree, row) == build_dyspec(row, builder)
    assert_rows_alone(lambda: builder)


def test_dyspec_draws_without_replacement() -> None:
    """Over many rows the first two children come as often as q, and q without the first, say; by
    chi-squared.
    """
    rows = range(4000)
    q = torch.tensor(soft_scores(0, ())).softmax(-1)
    tree = DySpec(depth=1, budget=3).expand(
        context(rows), Table(lambda row, path: soft_scores(0, path), rows)
    )
    observed = torch.zeros(VOCAB, VOCAB)
    expected = torch.zeros(VOCAB, VOCAB)
    for first, second in ((tree.tokens[:, 1:] - 3) // 7).tolist():
        observed[first, second] += 1
    for first, second in itertools.permutations(range(VOCAB), 2):
        expected[first, second] = len(rows) * q[first] * q[second] / (1 - q[first])
    real = expected > 0
    assert observed[~real].sum() == 0
    # 29 degrees of freedom, 1 in 10,000
    assert ((observed - expected)[real] ** 2 / expected[real]).sum() < 67


@pytest.mark.parametrize("scores", [random_scores, tied_scores])
@pytest.mark.parametrize("depth, budget, top_k", BEAMS)
def test_beam_tree_equals_the_unmerged_beams(
    scores: Scores, depth: int, budget: int, top_k: int
) -> None:
    """Its paths are the prefixes of the beams that a search without a tree ends with, as many as
    have room, each once.
    """
    builder = Beam(depth, budget, top_k)
    tree = grow_tree(lambda: builder, scores)
    for row in ROWS:
        merged: set[Path] = {()}
        for path, _ in search_beams(scores, row, depth, top_k):
            longer = merged | {path[:length] for length in range(depth + 1)}
            if len(longer) > budget:
                break
            merged = longer
        result = paths(tree, row)
        assert set(result) == merged and len(result) == len(merged)
    assert_rows_alone(lambda: builder, scores)


def test_single_beam_equals_the_greedy_chain() -> None:
    """With top_k=1 the tree is the chain of likeliest tokens."""
    beam = grow_tree(lambda: Beam(4, 5, 1))
    chain = grow_tree(lambda: Chain(4))
    assert (
        torch.equal(beam.tokens, chain.tokens)
        and torch.equal(beam.parents, chain.parents)
        and beam.valid.all()
    )
