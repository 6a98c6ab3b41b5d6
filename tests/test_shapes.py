"""Tree builders equal a plain Python construction over random probability tables."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.shapes import Chain, Eagle2, Rollout
from spectrain.tree import TokenTree

Path = tuple[int, ...]
VOCAB, BATCH = 6, 2
ROOT = torch.tensor([101, 102])


def to_target(draft_id: int) -> int:
    """The target id of a draft id: the two vocabularies differ."""
    return 7 * draft_id + 3


def random_scores(row: int, path: Path) -> list[float]:
    """Log-probabilities that depend on the whole path."""
    draw = random.Random(f"{row} {path}")
    return torch.tensor([draw.gauss(0, 2) for _ in range(VOCAB)]).log_softmax(-1).tolist()


def tied_scores(row: int, path: Path) -> list[float]:
    """The same few scores after every path, 0 among them: path scores tie across nodes and levels, siblings do not."""
    scores = [-0.5 * v for v in range(VOCAB)]
    random.Random(f"{row} {path}").shuffle(scores)
    return scores


class Table(Rollout):
    """A drafter that is a table from paths, in target ids, to log-probabilities."""

    def __init__(self, scores: Callable[[int, Path], list[float]]) -> None:
        self.scores = scores
        self.given: list[list[Path]] = [[()] for _ in range(BATCH)]

    def start(self) -> Tensor:
        return torch.tensor([[self.scores(row, ())] for row in range(BATCH)])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        new = [
            [self.given[row][parent] + (token,) for token, parent in zip(tokens[row].tolist(), parents[row].tolist())]
            for row in range(BATCH)
        ]
        for row in range(BATCH):
            self.given[row] += new[row]
        return torch.tensor([[self.scores(row, path) for path in new[row]] for row in range(BATCH)])

    def to_target(self, ids: Tensor) -> Tensor:
        return 7 * ids + 3


def paths(tree: TokenTree, row: int) -> list[Path]:
    """The path of every node, without the root's token."""
    found: list[Path] = [()]
    for token, parent in list(zip(tree.tokens[row].tolist(), tree.parents[row].tolist()))[1:]:
        found.append(found[parent] + (token,))
    return found


def eagle2(scores: Callable[[int, Path], list[float]], row: int, depth: int, budget: int, top_k: int) -> list[Path]:
    """EAGLE-2 in plain Python: the paths of the nodes that it keeps, level by level; earlier nodes win ties."""
    frontier: list[tuple[Path, float]] = [((), 0.0)]
    nodes = list(frontier)
    for _ in range(depth):
        children = []
        for path, score in frontier:
            log_q = scores(row, path)
            best = sorted(range(VOCAB), key=lambda v: -log_q[v])[:top_k]
            children += [(path + (to_target(v),), score + log_q[v]) for v in best]
        nodes += children
        frontier = sorted(children, key=lambda child: -child[1])[:top_k]
    keep = sorted(range(len(nodes)), key=lambda n: -nodes[n][1])[:budget]
    return [nodes[n][0] for n in sorted(keep)]


@pytest.mark.parametrize("scores", [random_scores, tied_scores])
@pytest.mark.parametrize(
    "depth, budget, top_k", [(1, 2, 1), (1, 4, 6), (2, 5, 2), (3, 12, 3), (5, 16, 4), (6, 6, 9), (4, 40, 5)]
)
def test_eagle2_equals_plain_python(scores: Callable[[int, Path], list[float]], depth: int, budget: int, top_k: int) -> None:
    """The nodes, in order, are those of the plain construction, every parent is there, and the tree is well formed."""
    tree = Eagle2(depth, budget, top_k).grow(ROOT, Table(scores))
    tree.check()
    assert tree.tokens[:, 0].tolist() == ROOT.tolist()
    assert tree.valid.all() and tree.emitted.all() and tree.tokens.shape[1] <= budget
    for row in range(BATCH):
        assert paths(tree, row) == eagle2(scores, row, depth, budget, top_k)


@pytest.mark.parametrize("budget", [2, 7, 20])
def test_eagle2_keeps_the_best_paths(budget: int) -> None:
    """Where nothing is pruned on the way, the nodes are the best-scored of all paths."""
    tree = Eagle2(depth=2, budget=budget, top_k=VOCAB).grow(ROOT, Table(random_scores))
    for row in range(BATCH):
        score = {(): 0.0}
        for first, second in itertools.product(range(VOCAB), repeat=2):
            one = (to_target(first),)
            score[one] = random_scores(row, ())[first]
            score[(*one, to_target(second))] = score[one] + random_scores(row, one)[second]
        assert set(paths(tree, row)) == set(sorted(score, key=lambda path: -score[path])[:budget])


def test_eagle2_smaller_than_its_budget() -> None:
    """A drafter that offers fewer nodes than the budget gets them all verified."""
    tree = Eagle2(depth=2, budget=50, top_k=3).grow(ROOT, Table(random_scores))
    assert tree.tokens.shape == (BATCH, 1 + 3 + 9)
    tree.check()


def test_eagle2_certain_drafter_becomes_a_chain() -> None:
    """Where one token is certain, ties with the root and with impossible tokens still give a well formed tree."""
    tree = Eagle2(depth=4, budget=5, top_k=3).grow(ROOT, Table(lambda row, path: [0.0] + [float("-inf")] * (VOCAB - 1)))
    tree.check()
    assert paths(tree, 0) == [(to_target(0),) * depth for depth in range(5)]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_chain_follows_the_argmax(depth: int) -> None:
    """Each token is the likeliest after the ones before it."""
    builder = Chain(depth)
    tree = builder.grow(ROOT, Table(random_scores))
    tree.check()
    assert tree.tokens.shape == (BATCH, depth + 1) and builder.budget == depth + 1
    for row in range(BATCH):
        path: Path = ()
        for _ in range(depth):
            log_q = random_scores(row, path)
            path += (to_target(log_q.index(max(log_q))),)
        assert paths(tree, row) == [path[:n] for n in range(depth + 1)]


@pytest.mark.parametrize(
    "build, said",
    [
        (lambda: Chain(0), "tree.depth=0"),
        (lambda: Eagle2(depth=0), "tree.depth=0"),
        (lambda: Eagle2(budget=1), "tree.budget=1"),
        (lambda: Eagle2(top_k=0), "tree.top_k=0"),
    ],
)
def test_builders_refuse_empty_trees(build: Callable[[], object], said: str) -> None:
    """A tree that can't draft is refused under the key that asked for it."""
    with pytest.raises(UserError, match=said):
        build()
