"""Acceptance rules: the walk equals a loop over nodes, sample-and-match emits the target's own
distribution.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.acceptance.sequential import SequentialRule
from spectrain.kernels.tree_walks import shape_logits
from spectrain.randomness import ACCEPT, DRAFT, SAMPLE, gumbel_noise, keyed_generator
from spectrain.trees.token_tree import Children, TokenTree
from tests.decoding.rounds import emitted_tokens
from tests.decoding.walking import walk
from tests.trees.tables import check_structure

Path = tuple[int, ...]
VOCAB = 4


def draw_tree(
    shape: str, num_nodes: int, draw: random.Random
) -> tuple[list[int], list[int], list[bool], list[bool]]:
    """Draw tokens, parents, valid and emitted of one tree; valid siblings carry distinct tokens,
    padding carries any.
    """
    vocab = num_nodes if shape == "star" else VOCAB
    tokens = [0]
    parents = [-1]
    valid = [True]
    emitted = [True]
    for node in range(1, num_nodes):
        parent = {"star": 0, "chain": node - 1}.get(shape, draw.randrange(node))
        taken = {tokens[n] for n in range(node) if parents[n] == parent and valid[n]}
        free = [token for token in range(vocab) if token not in taken]
        real = bool(free) and draw.random() < 0.85
        tokens.append(draw.choice(free) if real else draw.randrange(vocab))
        parents.append(parent)
        valid.append(real)
        emitted.append(draw.random() < 0.9)
    return tokens, parents, valid, emitted


def draw_choice(tokens: list[int], parents: list[int], draw: random.Random) -> list[int]:
    """A token after each node, mostly that of one of its children, so that paths grow long."""
    children = [
        [tokens[n] for n in range(len(tokens)) if parents[n] == node] for node in range(len(tokens))
    ]
    return [
        draw.choice(below) if below and draw.random() < 0.9 else draw.randrange(VOCAB)
        for below in children
    ]


def walk_by_loop(
    tokens: list[int], parents: list[int], usable: list[bool], choice: list[int]
) -> list[int]:
    """Return the path that is accepted by following `choice` from the root."""
    path = [0]
    while True:
        below = [
            n
            for n in range(len(tokens))
            if parents[n] == path[-1] and usable[n] and tokens[n] == choice[path[-1]]
        ]
        if not below:
            return path
        path.append(below[0])


@pytest.mark.sweep(8)
@pytest.mark.parametrize("shape", ["random", "star", "chain"])
@pytest.mark.parametrize("num_nodes", [1, 2, 9, 70])
@pytest.mark.parametrize("seed", range(4))
def test_tree_walk_equals_a_loop(shape: str, num_nodes: int, seed: int) -> None:
    """Path, count, bonus and emitted tokens are those of a loop over nodes, row by row."""
    draw = random.Random(f"{shape} {num_nodes} {seed}")
    rows = [draw_tree(shape, num_nodes, draw) for _ in range(4)]
    choices = [draw_choice(tokens, parents, draw) for tokens, parents, _, _ in rows]
    tree = TokenTree(*(torch.tensor(column) for column in zip(*rows)))
    check_structure(tree)
    accepted = walk(tree, torch.tensor(choices))
    emitted = emitted_tokens(tree, accepted)
    paths = [
        walk_by_loop(tokens, parents, [v and e for v, e in zip(valid, emits)], choice)
        for (tokens, parents, valid, emits), choice in zip(rows, choices)
    ]
    assert accepted.counts.tolist() == [len(path) for path in paths]
    assert accepted.path.shape == emitted.shape == (4, max(map(len, paths)))
    for b, path in enumerate(paths):
        padding = [path[-1]] * (accepted.path.shape[1] - len(path))
        assert accepted.path[b].tolist() == path + padding
        assert accepted.bonus[b] == choices[b][path[-1]]
        assert emitted[b, : len(path)].tolist() == [rows[b][0][n] for n in path[1:]] + [
            choices[b][path[-1]]
        ]


def test_greedy_follows_the_argmax() -> None:
    """A greedy round is the walk along the target's most likely tokens."""
    tokens = torch.tensor([[5, 1, 2, 3], [5, 1, 2, 3]])
    tree = TokenTree.from_chain(tokens)
    expected = torch.tensor([[1, 2, 0, 4], [1, 2, 3, 4]])
    logits = torch.nn.functional.one_hot(expected, 6).float()
    accepted = Greedy()(tree, logits, torch.arange(2), tree.depths)
    assert accepted.counts.tolist() == [3, 4]
    emitted = emitted_tokens(tree, accepted).tolist()
    assert emitted[0][:3] == [1, 2, 0] and emitted[1] == [1, 2, 3, 4]


# Sample-and-match in exact arithmetic

Outcomes = list[tuple[Fraction, list[int]]]
TREES: dict[str, list[Path]] = {
    "bushy": [(), (0,), (2,), (0, 1), (0, 0), (2, 2)],
    "chain": [(), (1,), (1, 1)],
    "star": [(), (0,), (1,), (2,)],
}


def target_p(path: Path) -> list[Fraction]:
    """The target's distribution over three tokens after a path."""
    weights = [
        1 + (3 * len(path) + sum((i + 2) * t for i, t in enumerate(path)) + 5 * v) % 7
        for v in range(3)
    ]
    return [Fraction(weight, sum(weights)) for weight in weights]


def independent_draws(nodes: list[Path]) -> Outcomes:
    """Every way to draw a token at each node on its own."""
    outcomes = []
    for choice in itertools.product(range(3), repeat=len(nodes)):
        outcomes.append(
            (
                math.prod((target_p(n)[c] for n, c in zip(nodes, choice)), start=Fraction(1)),
                list(choice),
            )
        )
    return outcomes


def draws_shared_by_depth(nodes: list[Path]) -> Outcomes:
    """Every way to draw with one random number a position, as Match does, through the inverse
    distribution function.
    """
    levels = sorted({len(node) for node in nodes})
    cuts = {
        level: sorted(
            {
                sum(target_p(n)[: v + 1], Fraction(0))
                for n in nodes
                if len(n) == level
                for v in range(3)
            }
        )
        for level in levels
    }
    outcomes = []
    for tops in itertools.product(*(cuts[level] for level in levels)):
        below = {
            level: max([c for c in cuts[level] if c < top], default=Fraction(0))
            for level, top in zip(levels, tops)
        }
        top_of = dict(zip(levels, tops))
        choice = [
            next(v for v in range(3) if sum(target_p(n)[: v + 1], Fraction(0)) >= top_of[len(n)])
            for n in nodes
        ]
        outcomes.append(
            (math.prod((top_of[k] - below[k] for k in levels), start=Fraction(1)), choice)
        )
    return outcomes


@pytest.mark.parametrize("draws", [independent_draws, draws_shared_by_depth])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("hidden", [None, "valid", "emitted"])
def test_sample_and_match_is_lossless(
    draws: Callable[[list[Path]], Outcomes], name: str, hidden: str | None
) -> None:
    """Summed over all draws, what a round emits, continued by the target, has exactly the
    target's distribution.
    """
    nodes = TREES[name]
    outcomes = draws(nodes)
    assert sum(weight for weight, _ in outcomes) == 1
    item = TokenTree.from_parents(
        torch.tensor([[node[-1] if node else 0 for node in nodes]]),
        torch.tensor([[nodes.index(node[:-1]) if node else -1 for node in nodes]]),
    )
    masks = {"valid": item.valid.clone(), "emitted": item.can_emit.clone()}
    if hidden is not None:
        masks[hidden][0, 1] = False
    batch = len(outcomes)
    tree = TokenTree(
        *(
            t.expand(batch, -1)
            for t in (item.tokens, item.parents, masks["valid"], masks["emitted"])
        )
    )
    accepted = walk(tree, torch.tensor([choice for _, choice in outcomes]))
    emitted = emitted_tokens(tree, accepted)
    result: dict[Path, Fraction] = defaultdict(Fraction)
    for (weight, _), count, tokens in zip(outcomes, accepted.counts.tolist(), emitted.tolist()):
        head = tuple(tokens[:count])
        for tail in itertools.product(range(3), repeat=3 - count):
            rest = head + tail
            result[rest] += weight * math.prod(
                (target_p(rest[:i])[rest[i]] for i in range(count, 3)), start=Fraction(1)
            )
    expected = {
        path: math.prod((target_p(path[:i])[path[i]] for i in range(3)), start=Fraction(1))
        for path in itertools.product(range(3), repeat=3)
    }
    assert dict(result) == expected


# Match draws

CHI_SQUARED_7 = 24.32  # exceeded once in a thousand with 7 degrees of freedom


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("seed", [0, 1])
def test_match_draws_from_the_tempered_target(temperature: float, seed: int) -> None:
    """Draws over many sequences and positions pass a chi-squared test against softmax(logits /
    temperature).
    """
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.3, -0.5, -1.0, -1.5])
    rows = torch.arange(150)
    positions = torch.arange(100).expand(150, -1)
    drawn = Match(temperature, seed=seed).choose_tokens(
        logits.expand(150, 100, -1), rows, positions
    )
    expected = (logits.double() / temperature).softmax(-1) * drawn.numel()
    observed = drawn.flatten().bincount(minlength=8)
    assert float(((observed - expected) ** 2 / expected).sum()) < CHI_SQUARED_7


def test_match_neighbouring_draws_are_independent() -> None:
    """Draws at neighbouring positions and in neighbouring sequences pass a chi-squared test of
    independence.
    """
    rows = torch.arange(120)
    positions = torch.arange(120).expand(120, -1)
    drawn = Match().choose_tokens(torch.zeros(120, 120, 3), rows, positions)
    for first, second in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):
        observed = (3 * first + second).flatten().bincount(minlength=9)
        expected = first.numel() / 9
        # the same level with 8 degrees of freedom
        assert float(((observed - expected) ** 2 / expected).sum()) < 26.12


def test_match_draws_depend_on_their_keys_only() -> None:
    """The same keys give the same draws, in any batch order and node order; another seed gives
    others.
    """
    logits = torch.randn(5, 12, 20)
    rows = torch.tensor([3, 0, 7, 11, 4])
    positions = torch.randint(0, 50, (5, 12))
    drawn = Match(seed=1).choose_tokens(logits, rows, positions)
    batch = torch.randperm(5)
    nodes = torch.randperm(12)
    assert torch.equal(drawn, Match(seed=1).choose_tokens(logits, rows, positions))
    assert torch.equal(
        drawn[batch], Match(seed=1).choose_tokens(logits[batch], rows[batch], positions[batch])
    )
    assert torch.equal(
        drawn[:, nodes], Match(seed=1).choose_tokens(logits[:, nodes], rows, positions[:, nodes])
    )
    assert torch.equal(
        drawn[2:3], Match(seed=1).choose_tokens(logits[2:3], rows[2:3], positions[2:3])
    )
    assert not torch.equal(drawn, Match(seed=2).choose_tokens(logits, rows, positions))


def test_noise_differs_between_keys() -> None:
    """No two nearby keys of purpose, seed, row and position share their noise, and a key always
    has the same.
    """
    keys = list(itertools.product((DRAFT, ACCEPT, SAMPLE), range(3), range(15), range(15)))
    noise = [tuple(gumbel_noise((4,), keyed_generator(*key)).tolist()) for key in keys]
    assert len(set(noise)) == len(keys)
    assert noise == [tuple(gumbel_noise((4,), keyed_generator(*key)).tolist()) for key in keys]


# Shaping


def shape_plainly(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, then top-k, then top-p over what top-k left, in plain Python."""
    scores = [value / temperature for value in logits]
    ranked = sorted(range(len(scores)), key=lambda v: -scores[v])[: top_k or len(scores)]
    total = sum(math.exp(scores[v]) for v in ranked)
    accepted = []
    mass = 0.0
    for v in ranked:
        if mass < top_p or top_p == 1:
            accepted.append(v)
        mass += math.exp(scores[v]) / total
    return [score if v in accepted else -math.inf for v, score in enumerate(scores)]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4, 1e-6])
def test_shaping_equals_plain_python(temperature: float, top_k: int, top_p: float) -> None:
    """Temperature, top-k and top-p keep the tokens, and the scores, of a plain Python loop."""
    logits = 2 * torch.randn(6, 30)
    expected: Tensor = torch.tensor(
        [shape_plainly(row.tolist(), temperature, top_k, top_p) for row in logits]
    )
    torch.testing.assert_close(shape_logits(logits, temperature, top_k, top_p), expected)


def test_match_never_draws_what_shaping_cut() -> None:
    """With top_k=2 only the two likeliest tokens are drawn, and both are."""
    logits = torch.tensor([0.0, 3.0, 1.0, 2.5, -1.0]).expand(1, 200, -1)
    drawn = Match(top_k=2).choose_tokens(
        logits, torch.zeros(1, dtype=torch.int64), torch.arange(200)[None]
    )
    assert set(drawn.flatten().tolist()) == {1, 3}


@pytest.mark.parametrize("children", ["sampled", "without_replacement"])
@pytest.mark.parametrize("cut", [(1.0, 0, 1.0), (0.7, 9, 0.9)])
def test_recursive_on_the_device_equals_select_path(
    children: Children, cut: tuple[float, int, float]
) -> None:
    """The decision for all rows at once is that of `judge`, which is proven lossless, with the
    same random numbers.
    """
    batch = 64
    vocab = 16
    drafted = 12
    parents = [-1, 0, 0, 0, 1, 1, 2, 4, 4]
    draft_ids = torch.arange(drafted) + 2
    logits = torch.randn(batch, 9, vocab)
    q = torch.randn(batch, 9, drafted).softmax(-1)
    tokens = torch.zeros(batch, 9, dtype=torch.int64)
    for node in range(9):
        below = [child for child, parent in enumerate(parents) if parent == node]
        if below:
            drawn = torch.multinomial(q[:, node], len(below), replacement=children == "sampled")
            tokens[:, below] = draft_ids[drawn]
    valid = torch.rand(batch, 9) < 0.95
    valid[:, 0] = True
    every = torch.ones_like(valid)
    tree = TokenTree(
        tokens, torch.tensor(parents).expand(batch, -1), valid, every, children, q, draft_ids
    )
    rows = torch.randperm(batch)
    positions = 30 + torch.arange(batch)[:, None] + tree.depths
    rule = RecursiveRejection(*cut, seed=4)
    item = rule(tree, logits, rows, positions).trim_padding()
    other = SequentialRule.__call__(rule, tree, logits, rows, positions)
    assert torch.equal(item.path, other.path) and torch.equal(item.counts, other.counts)
    assert torch.equal(item.bonus, other.bonus) and len(set(item.counts.tolist())) > 2
