"""A drafter that is a table, and what holds for every tree that a builder grows over it."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spectrain.kernels.counter import gumbel_noise, make_key
from spectrain.randomness import DRAFT, keyed_generator
from spectrain.trees import Rollout, TreeBuilder
from spectrain.trees.token_tree import TokenTree

Path = tuple[int, ...]
Scores = Callable[[int, Path], list[float]]
VOCAB = 6
ROWS = (0, 1)


def to_target(draft_id: int) -> int:
    """Return the target id of a draft id: the two vocabularies differ."""
    return 7 * draft_id + 3


def random_scores(row: int, path: Path) -> list[float]:
    """Return log-probabilities that depend on the full path."""
    draw = random.Random(f"{row} {path}")
    return torch.tensor([draw.gauss(0, 2) for _ in range(VOCAB)]).log_softmax(-1).tolist()


def soft_scores(row: int, path: Path) -> list[float]:
    """Return flatter scores, so that path probabilities fall slowly."""
    return (torch.tensor(random_scores(row, path)) / 3).log_softmax(-1).tolist()


def shared_scores(row: int, path: Path) -> list[float]:
    """Return scores that are the same in every row."""
    return random_scores(5, path)


def tied_scores(row: int, path: Path) -> list[float]:
    """Return the same few scores after every path, 0 among them: path scores tie across nodes
    and levels, siblings do not.
    """
    scores = [-0.5 * v for v in range(VOCAB)]
    random.Random(f"{row} {path}").shuffle(scores)
    return scores


def context(rows: Sequence[int] = ROWS) -> Any:
    """Make the context of a round of these rows: their roots, keys and lengths."""
    lengths = torch.tensor([committed_length(row) for row in rows])
    root = torch.tensor([101 + row for row in rows])
    keys = torch.tensor(rows)
    return SimpleNamespace(
        root=root, sequence_ids=keys, lengths=lengths, longest=int(lengths.max()), begins=False
    )


def committed_length(row: int) -> int:
    """Return how many tokens a row has committed."""
    return 9 - 5 * (row % 2)


def make_generator(row: int, seed: int = 0) -> torch.Generator:
    """Return the generator of a row's children, where they are drawn one by one."""
    return keyed_generator(DRAFT, seed, row, committed_length(row))


def node_noise(row: int, seed: int, node: int, number: int | None = None) -> Tensor:
    """Return the noise of a node's children, or of its `number`-th child where they are drawn
    with replacement.
    """
    keys = [DRAFT, seed, row, committed_length(row), node] + ([] if number is None else [number])
    return gumbel_noise(make_key(*keys), VOCAB)


class Table(Rollout):
    """A drafter that is a table from paths, in target ids, to log-probabilities."""

    def __init__(self, scores: Scores, rows: Sequence[int] = ROWS) -> None:
        self.scores, self.rows = scores, rows
        self.draft_ids = 7 * torch.arange(VOCAB) + 3
        self.evaluated_paths: list[list[Path]] = [[()] for _ in rows]

    def start(self) -> Tensor:
        return torch.tensor([[self.scores(row, ())] for row in self.rows])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        new = [
            [row_paths[parent] + (token,) for token, parent in zip(*row)]
            for row_paths, *row in zip(self.evaluated_paths, tokens.tolist(), parents.tolist())
        ]
        for row_paths, new_paths in zip(self.evaluated_paths, new):
            row_paths += new_paths
        return torch.tensor(
            [
                [self.scores(row, path) for path in new_paths]
                for row, new_paths in zip(self.rows, new)
            ]
        )


def paths(tree: TokenTree, row: int) -> list[Path]:
    """Return the path of every node that is not padding, without the root's token."""
    result: list[Path] = [()]
    for token, parent in list(zip(tree.tokens[row].tolist(), tree.parents[row].tolist()))[1:]:
        result.append(result[parent] + (token,))
    return [path for path, valid in zip(result, tree.valid[row].tolist()) if valid]


def list_likeliest(
    scores: Scores, row: int, path: Path, count: int = VOCAB
) -> list[tuple[Path, float]]:
    """Return the best children of a path with their log q."""
    log_q = scores(row, path)
    return [
        (path + (to_target(v),), log_q[v])
        for v in sorted(range(VOCAB), key=lambda v: -log_q[v])[:count]
    ]


def select_best(nodes: list[tuple[Path, float]], budget: int) -> list[Path]:
    """Return the paths of the `budget` best-scored nodes in their own order; earlier nodes win
    ties.
    """
    keep = sorted(range(len(nodes)), key=lambda n: -nodes[n][1])[:budget]
    return [nodes[n][0] for n in sorted(keep)]


def assert_q(tree: TokenTree, row: int, key: int, scores: Scores, temperature: float) -> None:
    """Check that q at every node with children is the table's distribution, or that the likelier
    sibling is first.
    """
    real = tree.valid[row].nonzero()[:, 0].tolist()
    result = dict(zip(real, paths(tree, row)))
    for node, path in result.items():
        children = [result[child] for child in real if tree.parents[row, child] == node]
        if children and tree.q is not None:
            expected = (torch.tensor(scores(key, path)) / temperature).softmax(-1)
            torch.testing.assert_close(tree.q[row, node], expected)
        elif children:
            log_q = [scores(key, path)[(child[-1] - 3) // 7] for child in children]
            assert log_q == sorted(log_q, reverse=True)


def check_structure(tree: TokenTree) -> None:
    """Raise AssertionError where the tree breaks an invariant of the kernels and acceptance
    rules.
    """
    index = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    assert (tree.parents[:, 0] == -1).all(), "node 0 must be the root"
    assert (tree.parents[:, 1:] >= 0).all() and (tree.parents < index).all(), (
        "parents must come before children"
    )
    if tree.children != "sampled":
        same = (tree.parents[:, :, None] == tree.parents[:, None]) & (
            tree.tokens[:, :, None] == tree.tokens[:, None]
        )
        real = tree.valid & tree.can_emit
        twins = (
            same
            & real[:, :, None]
            & real[:, None]
            & ~torch.eye(len(index), dtype=torch.bool, device=index.device)
        )
        assert not twins.any(), "siblings must carry distinct tokens"


def grow_tree(make_builder: Callable[[], TreeBuilder], scores: Scores = random_scores) -> TokenTree:
    """Return the tree that a new builder grows, after checking what holds for all trees."""
    builder = make_builder()
    table = Table(scores)
    tree = builder.expand(context(), table)
    check_structure(tree)
    assert (
        tree.can_emit.all() and tree.valid[:, 0].all() and tree.tokens[:, 0].tolist() == [101, 102]
    )
    assert (
        tree.tokens.shape[1] <= builder.budget and (tree.depths * tree.valid).max() <= builder.depth
    )
    assert len(table.evaluated_paths[0]) - 1 <= builder.max_drafted
    assert tree.valid.gather(1, tree.parents.clamp(min=0))[tree.valid].all()
    assert tree.draft_ids is not None and set(
        tree.tokens[:, 1:][tree.valid[:, 1:]].tolist()
    ) <= set(tree.draft_ids.tolist())
    assert tree.children == builder.children and (tree.q is None) == (
        builder.children == "deterministic"
    )
    again = make_builder().expand(context(), Table(scores))
    assert torch.equal(again.tokens, tree.tokens) and torch.equal(again.parents, tree.parents)
    for row in ROWS:
        assert_q(tree, row, row, scores, builder.temperature)
    return tree


def assert_rows_alone(
    make_builder: Callable[[], TreeBuilder], scores: Scores = random_scores
) -> None:
    """Check that every row has the tree that it has alone, or in a batch of equal rows where
    times depend on the rows.
    """
    tree = make_builder().expand(context(), Table(scores))
    for row in ROWS:
        builder = make_builder()
        rows = [row] * (len(ROWS) if builder.round_policy.decides_to_draft else 1)
        single = builder.expand(context(rows), Table(scores, rows))
        assert paths(single, 0) == paths(tree, row)
        assert_q(single, 0, row, scores, make_builder().temperature)
