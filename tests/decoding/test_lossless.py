"""The acceptance rules in exact arithmetic: what a lossless one emits has the target's
distribution, and wrong variants differ.

The rules' own code runs on fractions. Every tree that can be drawn, and every outcome of judging
it, is enumerated with its probability; the output, continued by the target, is compared as a joint
distribution of tokens. V vocabulary.
"""

import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from spectrain.config.build import GroupSpec
from spectrain.config.choices import list_constructors
from spectrain.decoding.acceptance import (
    AcceptanceRule,
    Greedy,
    Match,
    OpenSampling,
    SamplingRule,
    Siblings,
)
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.acceptance.sequential import RandomSource, SequentialRule, VerifiedTree
from spectrain.decoding.acceptance.typical import TypicalAcceptance
from spectrain.errors import UserError
from spectrain.trees.token_tree import AcceptedPath, Children, TokenTree
from tests.decoding.rounds import emitted_tokens
from tests.decoding.walking import walk
from tests.installed import load_cases
from tests.trees.tables import check_structure

Path = tuple[int, ...]
Vector = Any  # [V] numpy array of fractions
Model = dict[Path, Vector]  # the distribution of the token after each path
Joint = dict[Path, Fraction]
T = TypeVar("T")


# Enumeration


class Script:
    """Dice that replay the first outcomes, then take the first possible one each, and know the
    chance of it all.
    """

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[tuple[int, int]] = []  # which of how many possible outcomes, at every turn
        self.chance = Fraction(1)

    def flip_coin(self, chance: Any, node: int, number: int = 0) -> bool:
        assert isinstance(chance, (int, Fraction))
        falls = min(max(Fraction(chance), Fraction(0)), Fraction(1))
        return bool(self._take_outcome([(1, falls), (0, 1 - falls)]))

    def draw_token(self, weights: Vector, node: int = 0) -> int:
        assert sum(weights) == 1 and min(weights) >= 0
        return self._take_outcome(list(enumerate(weights)))

    def _take_outcome(self, outcomes: list[tuple[int, Any]]) -> int:
        possible = [(outcome, chance) for outcome, chance in outcomes if chance > 0]
        turn = len(self.taken)
        choice = self.script[turn] if turn < len(self.script) else 0
        self.taken.append((choice, len(possible)))
        self.chance *= possible[choice][1]
        return possible[choice][0]


def every(play: Callable[[RandomSource], T]) -> Iterator[tuple[Fraction, T]]:
    """What `play` returns for every outcome of its dice, with the probability."""
    script: list[int] = []
    while True:
        dice = Script(script)
        result = play(dice)
        yield dice.chance, result
        taken = dice.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        script = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]


# Models and trees


def random_distribution(draw: random.Random, vocab: int, least: int) -> Vector:
    """Random fractions; with `least` 0 some are zero."""
    weights = [draw.randint(least, 4) for _ in range(vocab)]
    if not any(weights):
        weights[draw.randrange(vocab)] = 1
    return np.array([Fraction(weight, sum(weights)) for weight in weights], dtype=object)


def scaled(weights: Vector) -> Vector:
    """The weights as a distribution."""
    return weights / sum(weights)


def taken_out(weights: Vector, token: int) -> Vector:
    """The distribution once `token` is drawn for good; all zeros where it was the last one."""
    rest = np.where(np.arange(len(weights)) == token, Fraction(0), weights)
    return scaled(rest) if sum(rest) > 0 else rest


def models(kind: str, vocab: int, length: int, seed: int = 0) -> tuple[Model, Model]:
    """The target's p and the drafter's q after every path that is shorter than `length`."""
    draw = random.Random(f"{kind} {vocab} {length} {seed}")
    paths = [
        path for size in range(length) for path in itertools.product(range(vocab), repeat=size)
    ]
    p = {path: random_distribution(draw, vocab, int(kind == "dense")) for path in paths}
    q = (
        p
        if kind == "equal"
        else {path: random_distribution(draw, vocab, int(kind == "dense")) for path in paths}
    )
    if kind == "apart":  # after the empty path and some others, p and q share no token
        for path in paths:
            if not path or draw.random() < 0.4:
                cut = draw.randrange(1, vocab)
                q[path] = np.array(
                    [Fraction(1, cut) if token < cut else Fraction(0) for token in range(vocab)],
                    dtype=object,
                )
                p[path] = scaled(np.where(q[path] > 0, Fraction(0), p[path] + Fraction(1, 7)))
    return p, q


KINDS = ("dense", "sparse", "equal", "apart")


@dataclass
class Drawn:
    """A tree: node 0 is the root, `paths` are the tokens from it to every node."""

    paths: list[Path] = field(default_factory=lambda: [()])
    children: list[list[int]] = field(default_factory=lambda: [[]])
    # what one child was drawn from, where that is not all of q
    offered: dict[int, Vector] = field(default_factory=dict)

    def add(self, parent: int, token: int) -> int:
        self.paths.append((*self.paths[parent], token))
        self.children.append([])
        self.children[parent].append(len(self.paths) - 1)
        return len(self.paths) - 1

    @property
    def tokens(self) -> list[int]:
        return [path[-1] if path else 0 for path in self.paths]

    def as_tree(self, children: Children, batch: int = 1) -> TokenTree:
        """Return the same tree as decoding has it, `batch` times."""
        parents = [-1] * len(self.paths)
        for node, below in enumerate(self.children):
            for child in below:
                parents[child] = node
        tree = TokenTree.from_parents(
            torch.tensor([self.tokens]).expand(batch, -1), torch.tensor([parents]).expand(batch, -1)
        )
        return replace(tree, children=children)


# paths of ranks, as tree=static has them: (0, 1) is the second child of the first child
Shape = tuple[Path, ...]
Draft = Callable[[Model, RandomSource], Drawn]


def widths(*counts: int) -> Shape:
    """The tree in which every node of depth d has counts[d] children."""
    return tuple(
        path
        for size in range(1, len(counts) + 1)
        for path in itertools.product(*map(range, counts[:size]))
    )


CHAINS = {"1": widths(1), "1-1": widths(1, 1), "1-1-1": widths(1, 1, 1)}
BRANCHING: dict[str, Shape] = {
    "2": widths(2),
    "3": widths(3),
    "2-1": widths(2, 1),
    "1-2": widths(1, 2),
    "2-2": widths(2, 2),
    "lopsided": ((0,), (1,), (0, 0), (0, 1), (0, 0, 0)),
}
SHAPES = {**CHAINS, **BRANCHING}


def drawn(shape: Shape, children: Children) -> Draft:
    """Draw a tree of this shape; without replacement a node has no more children than q has
    tokens.
    """

    def draft(q: Model, dice: RandomSource) -> Drawn:
        tree = Drawn()
        nodes = {(): 0}
        left = {}
        for ranks in sorted(shape, key=lambda ranks: (len(ranks), ranks)):
            if (parent := nodes.get(ranks[:-1])) is None:
                continue
            weights = left.get(parent, q[tree.paths[parent]])
            if sum(weights) == 0:
                continue
            token = dice.draw_token(weights)
            nodes[ranks] = tree.add(parent, token)
            if children == "without_replacement":
                left[parent] = taken_out(weights, token)
        return tree

    return draft


def likeliest(shape: Shape) -> Draft:
    """Return a draft of the same shape with the most likely tokens for children: nothing is
    drawn.
    """

    def draft(q: Model, dice: RandomSource) -> Drawn:
        tree = Drawn()
        nodes = {(): 0}
        for ranks in sorted(shape, key=lambda ranks: (len(ranks), ranks)):
            if (parent := nodes.get(ranks[:-1])) is None:
                continue
            weights = q[tree.paths[parent]]
            token = sorted(range(len(weights)), key=lambda token: (-weights[token], token))[
                ranks[-1]
            ]
            if weights[token] > 0:
                nodes[ranks] = tree.add(parent, token)
        return tree

    return draft


def top_and_sampled(shape: Shape) -> Draft:
    """Return a draft of the same shape: all children of a node but the last are its most likely
    tokens, and the last is drawn from the rest of q."""
    counts: dict[Path, int] = defaultdict(int)
    for ranks in shape:
        counts[ranks[:-1]] += 1

    def draft(q: Model, dice: RandomSource) -> Drawn:
        tree = Drawn()
        nodes = {(): 0}
        for ranks in sorted(shape, key=lambda ranks: (len(ranks), ranks)):
            if (parent := nodes.get(ranks[:-1])) is None:
                continue
            weights = q[tree.paths[parent]]
            top = counts[ranks[:-1]] - 1
            order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
            if ranks[-1] < top:
                if weights[token := order[ranks[-1]]] > 0:
                    nodes[ranks] = tree.add(parent, token)
                continue
            tree.offered[parent] = rest = np.array(
                [Fraction(0) if x in order[:top] else w for x, w in enumerate(weights)]
            )
            if sum(rest) > 0:
                tree.offered[parent] = scaled(rest)
                nodes[ranks] = tree.add(parent, dice.draw_token(tree.offered[parent]))
        return tree

    return draft


def best_first(budget: int, depth: int) -> Draft:
    """DySpec's growth: the open position with the largest value is drawn next, without
    replacement.
    """

    def draft(q: Model, dice: RandomSource) -> Drawn:
        tree = Drawn()
        left = {}
        indices = [(Fraction(-1), 0)]
        while indices and len(tree.paths) <= budget:
            value, parent = heapq.heappop(indices)
            weights = left.get(parent, q[tree.paths[parent]])
            token = dice.draw_token(weights)
            node = tree.add(parent, token)
            if len(tree.paths[node]) < depth:
                heapq.heappush(indices, (value * weights[token], node))
            if weights[token] < 1:
                left[parent] = taken_out(weights, token)
                heapq.heappush(indices, (value * (1 - weights[token]), parent))
        return tree

    return draft


def stopping_chain(depth: int, least: Fraction) -> Draft:
    """A chain that ends before a token is drawn from a q without a likely token, as tree=chain
    with `stop` does.
    """

    def draft(q: Model, dice: RandomSource) -> Drawn:
        tree = Drawn()
        while len(tree.paths) <= depth and max(q[tree.paths[-1]]) >= least:
            tree.add(len(tree.paths) - 1, dice.draw_token(q[tree.paths[-1]]))
        return tree

    return draft


# The proof


def as_row(tree: Drawn, p: Model, q: Model, without_replacement: bool) -> VerifiedTree:
    """The tree as a rule walks it."""

    def drawn_from(node: int) -> Vector:
        return tree.offered.get(node, q[tree.paths[node]])

    return VerifiedTree(
        tree.tokens,
        tree.children,
        lambda node: p[tree.paths[node]],
        drawn_from,
        without_replacement,
    )


def round_outcomes(
    rule: SequentialRule, draft: Draft, p: Model, q: Model, without_replacement: bool
) -> Iterator[tuple[Fraction, Path, int]]:
    """Yield of every outcome of a round its probability, the tokens of the accepted nodes, and
    the token after them.
    """
    for chance, tree in every(partial(draft, q)):
        for share, (path, bonus) in every(
            partial(rule.select_path, as_row(tree, p, q, without_replacement))
        ):
            assert (
                all(child in tree.children[node] for node, child in zip(path, path[1:]))
                and path[0] == 0
            )
            yield chance * share, tree.paths[path[-1]], bonus


def continued(heads: Joint, p: Model, length: int) -> Joint:
    """The joint distribution of the first tokens where the target goes on after each of `heads`."""
    joint: Joint = defaultdict(Fraction)
    waiting = list(heads.items())
    while waiting:
        path, chance = waiting.pop()
        if len(path) == length:
            joint[path] += chance
        else:
            waiting += [
                ((*path, token), chance * weight)
                for token, weight in enumerate(p[path])
                if weight > 0
            ]
    return dict(joint)


def emitted(
    rule: SequentialRule, draft: Draft, p: Model, q: Model, without_replacement: bool, length: int
) -> Joint:
    """Return the joint distribution of the first tokens of a round and of the target's tokens
    after it.
    """
    heads: Joint = defaultdict(Fraction)
    for chance, accepted, bonus in round_outcomes(rule, draft, p, q, without_replacement):
        heads[(*accepted, bonus)] += chance
    return continued(heads, p, length)


def target_joint(p: Model, length: int) -> Joint:
    """The joint distribution of the target's first tokens."""
    return continued({(): Fraction(1)}, p, length)


def accepted_lengths(
    rule: SequentialRule, draft: Draft, p: Model, q: Model, without_replacement: bool
) -> dict[int, Fraction]:
    """Return how many drafted tokens a round accepts, with the probability of each number."""
    lengths: dict[int, Fraction] = defaultdict(Fraction)
    for chance, accepted, _ in round_outcomes(rule, draft, p, q, without_replacement):
        lengths[len(accepted)] += chance
    return dict(lengths)


def expected_value(lengths: dict[int, Fraction]) -> Fraction:
    """The expected number."""
    return sum((length * chance for length, chance in lengths.items()), start=Fraction(0))


def random_trials(kind: str, shape: Shape) -> Iterator[tuple[Model, Model, int]]:
    """Random p, q and the tokens that a round can emit, over vocabularies of 2 to 4: more of
    them for smaller trees.
    """
    length = max(map(len, shape)) + 1
    seeds = (
        {2: 2, 3: 1, 4: 0}
        if len(shape) > 4
        else {2: 4, 3: 4, 4: 0}
        if len(shape) > 2
        else {2: 6, 3: 6, 4: 6}
    )
    for vocab, count in seeds.items():
        for seed in range(count):
            yield *models(kind, vocab, length, seed), length


# What is lossless


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list_constructors("acceptance"))
def test_every_lossless_choice_has_an_enumeration_proof(name: str, kind: str) -> None:
    """Whatever conf/acceptance names, a new rule by itself, with each kind of children that it
    takes: of a path, or of a pair with one child each. Those that fix the target's tokens
    beforehand are proven below by their names, for want of coins."""
    rule_class: Any = GroupSpec("acceptance", name).load_constructor()
    assert rule_class.name == name
    if not rule_class.lossless:
        return
    if rule_class.fixes_choice:
        assert rule_class in (Greedy, Match, OpenSampling), (
            f"{name}: prove it, as sample-and-match is"
        )
        return
    shape = SHAPES["1-1" if rule_class.chains_only else "2-1"]
    for children in rule_class.children:
        draft = {"top_and_sampled": top_and_sampled, "deterministic": likeliest}.get(
            children, partial(drawn, children=children)
        )
        for p, q, length in itertools.islice(random_trials(kind, shape), 4):
            joint = emitted(
                rule_class(), draft(shape), p, q, children == "without_replacement", length
            )
            assert joint == target_joint(p, length), children


def tamper_draft(draft: Draft, change: Callable[[Drawn, Model], None]) -> Draft:
    """A draft whose tree is tampered with after the draws."""

    def draw_tampered(q: Model, dice: RandomSource) -> Drawn:
        tree = draft(q, dice)
        change(tree, q)
        return tree

    return draw_tampered


def sort_siblings(tree: Drawn, q: Model) -> None:
    """Siblings by q, not in the order they were drawn."""
    for node, children in enumerate(tree.children):
        children.sort(key=lambda child: -q[tree.paths[node]][tree.paths[child][-1]])


def skip_duplicates(tree: Drawn, q: Model) -> None:
    """Keep only the first of equal siblings."""
    for children in tree.children:
        first = {tree.paths[child]: child for child in reversed(children)}
        children[:] = [child for child in children if first[tree.paths[child]] == child]


def leave_unnormalised(weights: Vector, otherwise: Vector) -> Vector:
    """A residual that is not normalised: what it lacks goes to the distribution before it."""
    return weights + (1 - weights.sum()) * otherwise


def leave_as_is(q: Vector, token: int) -> Vector:
    """q without the token, not normalised."""
    left = q + 0
    left[token] = 0
    return left


def rate_itself(mass: Any, rate: Any) -> Any:
    """Return b in place of h for the coin of a middle token of block verification."""
    return rate


def not_divided(p: Vector, q: Vector, count: int) -> Any:
    """K-SEQ's division factor, 1 for any number of drafts."""
    return Fraction(1)


@dataclass(frozen=True)
class Wrong:
    """A rule, the draft that it judges and what is replaced in the rule's module, one of them
    wrong.
    """

    name: str
    rule: SequentialRule
    draft: Draft
    without_replacement: bool = False
    patch: tuple[str, Callable[..., Any]] | None = None


PAIR = widths(2)
TWO_LEVELS = widths(2, 1)
CHAIN = widths(1, 1)


# Cases of installed packages.
CASES = load_cases(__name__)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(
    "rule",
    [
        SpeculativeSampling(),
        RecursiveRejection(),
        Block(),
        *CASES.get("test_drawn_chains_are_lossless", ()),
    ],
    ids=lambda rule: rule.name,
)
def test_drawn_chains_are_lossless(rule: SequentialRule, name: str, kind: str) -> None:
    """Judging a drawn chain, then going on with the target, gives the target's joint
    distribution exactly.
    """
    for p, q, length in random_trials(kind, CHAINS[name]):
        for children in ("sampled", "without_replacement"):
            result = emitted(
                rule, drawn(CHAINS[name], children), p, q, children == "without_replacement", length
            )
            assert result == target_joint(p, length)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("children", ["sampled", "without_replacement"])
@pytest.mark.parametrize("name", BRANCHING)
@pytest.mark.parametrize(
    "rule",
    [RecursiveRejection(), *CASES.get("test_drawn_trees_are_lossless", ())],
    ids=lambda rule: rule.name,
)
def test_drawn_trees_are_lossless(
    rule: SequentialRule, name: str, children: Children, kind: str
) -> None:
    """Judging a drawn tree, then going on with the target, gives the target's joint distribution
    exactly.
    """
    for p, q, length in random_trials(kind, BRANCHING[name]):
        result = emitted(
            rule, drawn(BRANCHING[name], children), p, q, children == "without_replacement", length
        )
        assert result == target_joint(p, length)


SEVERAL = {"1": widths(1), "1-1": widths(1, 1), **BRANCHING}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [2, 3, 4])
@pytest.mark.parametrize(
    "rule",
    [RecursiveRejection(), *CASES.get("test_trees_grown_best_first_are_lossless", ())],
    ids=lambda rule: rule.name,
)
def test_trees_grown_best_first_are_lossless(rule: SequentialRule, budget: int, kind: str) -> None:
    """A tree whose shape follows the tokens drawn so far, as DySpec's does, leaves the target's
    joint distribution exact.
    """
    for seed in range(6):
        p, q = models(kind, 3, 3, seed)
        assert emitted(rule, best_first(budget, 2), p, q, True, 3) == target_joint(p, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rule",
    [
        SpeculativeSampling(),
        RecursiveRejection(),
        Block(),
        *CASES.get("test_chains_that_stop_before_a_draw_are_lossless", ()),
    ],
    ids=lambda rule: rule.name,
)
def test_chains_that_stop_before_a_draw_are_lossless(rule: SequentialRule, kind: str) -> None:
    """Ending a chain for what q looks like, before its token is drawn, leaves the target's joint
    distribution exact.
    """
    draft = stopping_chain(2, Fraction(1, 2))
    depths = set()
    for seed in range(10):
        p, q = models(kind, 3, 3, seed)
        assert emitted(rule, draft, p, q, False, 3) == target_joint(p, 3)
        depths |= {len(tree.paths) for _, tree in every(partial(draft, q))}
    assert len(depths) > 1, "some chains must have stopped and some not"


def policy_chain(depth: int, seed: int) -> Draft:
    """A chain that a policy ends: whether another token is drawn is any function of the tokens
    drawn so far.
    """

    def draft(q: Model, dice: RandomSource) -> Drawn:
        tree = Drawn()
        while len(tree.paths) <= depth and random.Random(f"{seed} {tree.paths[-1]}").random() < 0.6:
            tree.add(len(tree.paths) - 1, dice.draw_token(q[tree.paths[-1]]))
        return tree

    return draft


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rule",
    [
        SpeculativeSampling(),
        RecursiveRejection(),
        Block(),
        *CASES.get("test_chains_that_a_policy_ends_are_lossless", ()),
    ],
    ids=lambda rule: rule.name,
)
def test_chains_that_a_policy_ends_are_lossless(rule: SequentialRule, kind: str) -> None:
    """Whatever decides before every draw, by the tokens drawn before it, leaves the target's
    joint distribution exact.
    """
    depths = set()
    for seed in range(10):
        p, q = models(kind, 3, 3, seed)
        draft = policy_chain(2, seed)
        assert emitted(rule, draft, p, q, False, 3) == target_joint(p, 3)
        depths |= {len(tree.paths) for _, tree in every(partial(draft, q))}
    assert depths == {1, 2, 3}


def model_after(model: Model, head: Path) -> Model:
    """Return a model after some tokens."""
    return {
        path[len(head) :]: weights for path, weights in model.items() if path[: len(head)] == head
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rule",
    [
        SpeculativeSampling(),
        RecursiveRejection(),
        Block(),
        *CASES.get("test_lengths_learned_from_earlier_rounds_are_lossless", ()),
    ],
    ids=lambda rule: rule.name,
)
def test_lengths_learned_from_earlier_rounds_are_lossless(rule: SequentialRule, kind: str) -> None:
    """A second round as long as the first accepted path, its length thus learned from what was
    accepted and rejected, leaves the joint distribution of both rounds' tokens exact."""
    for seed in range(3):
        p, q = models(kind, 2, 6, seed)
        heads: Joint = defaultdict(Fraction)
        for chance, accepted, bonus in round_outcomes(
            rule, drawn(CHAINS["1-1"], "sampled"), p, q, False
        ):
            head = (*accepted, bonus)
            second = (
                drawn(CHAINS["1-1"] if len(accepted) == 2 else CHAINS["1"], "sampled")
                if accepted
                else drawn((), "sampled")
            )
            for share, more, last in round_outcomes(
                rule, second, model_after(p, head), model_after(q, head), False
            ):
                heads[(*head, *more, last)] += chance * share
        assert continued(heads, p, 6) == target_joint(p, 6)


def of_a_pass(knows: str, vocab: int, length: int, seed: int) -> tuple[Model, Model]:
    """Return p of any kind, and q as drafters have it that draft in one pass: by a token's position
    alone (DFlash, P-EAGLE), by it and the token before (DSpark), with zeros for what is no
    candidate (DFlash2)."""
    p, other = models("dense", vocab, length, seed)
    draw = random.Random(f"{knows} {seed}")
    distributions = {}
    for path in other:
        key = (len(path), path[-1:] if knows != "place" else ())
        if key not in distributions:
            weights = random_distribution(draw, vocab, 1)
            cut = np.where(np.arange(vocab) == draw.randrange(vocab), Fraction(0), weights)
            distributions[key] = scaled(cut) if knows == "candidates" else weights
        other[path] = distributions[key]
    return p, other


def choice_tables(tree: Drawn, p: Model) -> tuple[list[Fraction], torch.Tensor]:
    """Every way to draw the target's token after each path, with its probability; nodes of one
    path share the draw.
    """
    distinct = sorted(set(tree.paths))
    possible = [[token for token, weight in enumerate(p[path]) if weight > 0] for path in distinct]
    tables = list(itertools.product(*possible))
    weights = [
        math.prod((p[path][token] for path, token in zip(distinct, table)), start=Fraction(1))
        for table in tables
    ]
    return weights, torch.tensor(tables)[:, [distinct.index(path) for path in tree.paths]]


MATCHED: dict[str, Shape] = {
    name: SHAPES[name] for name in ("1-1-1", "2", "3", "2-1", "1-2", "2-2", "lopsided")
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("children", ["deterministic", "sampled", "without_replacement"])
@pytest.mark.parametrize("name", MATCHED)
def test_sample_and_match_is_lossless(name: str, children: Children, kind: str) -> None:
    """Following the target's own draws through any tree, drawn or not, gives the target's joint
    distribution exactly.
    """
    shape = MATCHED[name]
    length = max(map(len, shape)) + 1
    p, q = models(kind, 2 if len(shape) > 4 else 3, length)
    heads: Joint = defaultdict(Fraction)
    draft = likeliest(shape) if children == "deterministic" else drawn(shape, children)
    for chance, tree in every(partial(draft, q)):
        weights, choice = choice_tables(tree, p)
        batch = tree.as_tree(children, len(weights))
        check_structure(batch)
        accepted = walk(batch, choice)
        for weight, count, tokens in zip(
            weights, accepted.counts.tolist(), emitted_tokens(batch, accepted).tolist()
        ):
            heads[tuple(tokens[:count])] += chance * weight
    assert continued(heads, p, length) == target_joint(p, length)


@pytest.mark.parametrize("children", ["deterministic", "sampled", "without_replacement"])
@pytest.mark.parametrize("name", MATCHED)
def test_greedy_emits_the_greedy_continuation(name: str, children: Children) -> None:
    """Every tree accepts as much of the target's greedy continuation as it holds, and the next
    token of it follows.
    """
    shape = MATCHED[name]
    length = max(map(len, shape)) + 1
    for seed in range(3):
        p, q = models("dense", 2 if len(shape) > 4 else 3, length, seed)
        logits = {
            path: torch.tensor(weights.astype(float)) + 1e-3 * torch.rand(len(weights))
            for path, weights in p.items()
        }
        greedy: Path = ()
        while len(greedy) < length:
            greedy = (*greedy, int(logits[greedy].argmax()))
        draft = likeliest(shape) if children == "deterministic" else drawn(shape, children)
        for _, tree in every(partial(draft, q)):
            batch = tree.as_tree(children)
            node_logits = torch.stack([logits[path] for path in tree.paths])[None]
            accepted = Greedy()(
                batch, node_logits, torch.zeros(1, dtype=torch.int64), batch.depths
            ).trim_padding()
            depth = max(len(path) for path in tree.paths if path == greedy[: len(path)])
            assert tuple(emitted_tokens(batch, accepted)[0].tolist()) == greedy[: depth + 1]


# Acceptance chances


def siblings_of(tree: Drawn, node: int, p: Model, q: Model, without_replacement: bool) -> Siblings:
    """The children of a node with what they are judged by."""
    tokens = [tree.tokens[child] for child in tree.children[node]]
    path = tree.paths[node]
    return Siblings(tokens, p[path], tree.offered.get(node, q[path]), without_replacement)


def acceptance_by_node(
    rule: SequentialRule, tree: Drawn, p: Model, q: Model, without_replacement: bool
) -> dict[int, Fraction]:
    """Return the probability of every node to be accepted, over the rule's own outcomes."""
    accepted: dict[int, Fraction] = defaultdict(Fraction)
    for chance, (path, _) in every(
        partial(rule.select_path, as_row(tree, p, q, without_replacement))
    ):
        for node in path:
            accepted[node] += chance
    return accepted


DEEP = {name: SHAPES[name] for name in ("1-1", "1-2", "2-1")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("children", ["sampled", "without_replacement"])
@pytest.mark.parametrize("name", ["1", "2", "3", *DEEP])
@pytest.mark.parametrize(
    "rule",
    [
        SpeculativeSampling(),
        RecursiveRejection(),
        Block(),
        *CASES.get("test_acceptance_chances_equal_enumeration", ()),
    ],
    ids=lambda rule: rule.name,
)
def test_acceptance_chances_equal_enumeration(
    rule: SequentialRule, name: str, children: Children, kind: str
) -> None:
    """A rule's acceptance chances of siblings are how often it accepts each, over all of its
    outcomes: exactly for the deepest ones, drawn as they are, and for those above them over all
    that is drawn below."""
    if rule.chains_only and name not in CHAINS:
        pytest.skip("it judges chains")
    shape = SHAPES[name]
    drop = children == "without_replacement"
    for p, q, length in itertools.islice(random_trials(kind, shape), 3):
        # what is left to be accepted at depth 1, by what is drawn there
        above: dict[Path, Fraction] = defaultdict(Fraction)
        for chance, tree in every(partial(drawn(shape, children), q)):
            accepted = acceptance_by_node(rule, tree, p, q, drop)
            siblings = siblings_of(tree, 0, p, q, drop)
            first = rule.acceptance_chances(siblings, Fraction(1))
            for index, child in enumerate(tree.children[0]):
                if length == 2:
                    assert accepted[child] == first[index]
                above[(*siblings.tokens, index)] += chance * (accepted[child] - first[index])
            if length == 3 and tree.children[0]:
                child = tree.children[0][0]
                rate = Fraction(rule.child_rate(p[()], q[()], siblings.tokens[0]))
                for node, result in zip(
                    tree.children[child],
                    rule.acceptance_chances(siblings_of(tree, child, p, q, drop), rate),
                ):
                    assert accepted[node] == first[0] * result
        assert not any(above.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("children", ["deterministic", "sampled", "without_replacement"])
@pytest.mark.parametrize("name", ["1", "2", "3"])
def test_acceptance_chances_of_fixed_choices_equal_the_targets_draws(
    name: str, children: Children, kind: str
) -> None:
    """Sample-and-match accepts a child as often as the target draws it, and of equal ones the
    first; greedy likewise, with the most likely token for a draw."""
    shape = SHAPES[name]
    p, q = models(kind, 3, 2)
    draft = likeliest(shape) if children == "deterministic" else drawn(shape, children)
    logits = torch.tensor(p[()].astype(float)).log()
    for _, tree in every(partial(draft, q)):
        weights, choice = choice_tables(tree, p)
        retained: dict[int, Fraction] = defaultdict(Fraction)
        accepted = walk(tree.as_tree(children, len(weights)), choice)
        for weight, path, count in zip(weights, accepted.path.tolist(), accepted.counts.tolist()):
            retained[path[count - 1]] += weight
        siblings = siblings_of(tree, 0, p, q, False)
        assert Match().acceptance_chances(siblings) == [
            retained[child] for child in tree.children[0]
        ]
        greedy = Greedy()(
            tree.as_tree(children),
            logits.expand(1, len(tree.paths), -1),
            torch.zeros(1),
            torch.zeros(1),
        )
        last = int(greedy.path[0, int(greedy.counts) - 1])
        result = Greedy().acceptance_chances(
            replace(siblings, p=Greedy().target_distribution(logits))
        )
        assert [float(chance) for chance in result] == [
            float(child == last) for child in tree.children[0]
        ]


@pytest.mark.parametrize(
    "rule",
    [
        TypicalAcceptance(),
        TypicalAcceptance(epsilon=0.9, delta=0.9),
        *CASES.get("test_acceptance_chances_of_lossy_rules_equal_their_verdicts", ()),
    ],
    ids=lambda rule: rule.name,
)
def test_acceptance_chances_of_lossy_rules_equal_their_verdicts(rule: SequentialRule) -> None:
    """Rules that draw no lots keep a child surely or not at all; siblings that may be equal are
    judged as they judge them.
    """
    values = set()
    for tokens in itertools.product(range(4), repeat=1 if rule.chains_only else 3):
        for p in ([0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25], [0.02, 0.03, 0.05, 0.9]):
            tree = Drawn()
            for token in tokens:
                tree.add(0, token)
            target = torch.tensor(p, dtype=torch.float64)
            verified = VerifiedTree(
                tree.tokens,
                tree.children,
                dict.fromkeys(range(4), target).__getitem__,
                lambda node: None,
            )
            path, bonus = rule.select_path(verified, Likeliest())
            result = rule.acceptance_chances(Siblings(list(tokens), target, None))
            if rule.chains_only:  # a chain that is accepted completely ends with its last token
                assert (result == [1.0]) == (
                    bonus == tokens[0] and (target > target[tokens[0]]).sum() < 2
                )
            else:
                assert result == [float(child == path[-1]) for child in tree.children[0]]
            values |= set(result)
    assert values == {0.0, 1.0}


# Which rule accepts more


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHAINS)
def test_block_accepts_at_least_as_much_as_the_chain_rule(name: str, kind: str) -> None:
    """Block verification never expects fewer accepted tokens; on paths of two or more it
    sometimes expects more.
    """
    gains = []
    for seed in range(12 if len(CHAINS[name]) < 3 else 4):
        p, q = models(kind, 3, len(CHAINS[name]) + 1, seed)
        draft = drawn(CHAINS[name], "sampled")
        block, chain = (
            expected_value(accepted_lengths(rule, draft, p, q, False))
            for rule in (Block(), SpeculativeSampling())
        )
        gains.append(block - chain)
    assert min(gains) >= 0
    if len(CHAINS[name]) == 1 or kind == "equal":
        assert max(gains) == 0
    elif kind == "dense":
        assert max(gains) > 0


# The proof catches what is wrong


def discard_unlikely(tree: Drawn, q: Model) -> None:
    """A chain is cut where the drawn token turned out unlikely."""
    for node, children in enumerate(tree.children):
        children[:] = [
            child
            for child in children
            if q[tree.paths[node]][tree.paths[child][-1]] >= Fraction(1, 4)
        ]


class SharpBonus(RecursiveRejection):
    """The token after a complete path is drawn at another temperature than the rest."""

    def select_path(self, row: VerifiedTree, dice: RandomSource) -> tuple[list[int], int]:
        def p(node: int) -> Vector:
            return row.p(node) if row.children[node] else scaled(row.p(node) ** 2)

        return super().select_path(replace(row, p=p), dice)


WRONG = [
    Wrong("likeliest-child-chain", SpeculativeSampling(), likeliest(CHAIN)),
    Wrong("likeliest-child-block", Block(), likeliest(CHAIN)),
    Wrong("likeliest-children-recursive", RecursiveRejection(), likeliest(PAIR), True),
    Wrong(
        "sorted-siblings-recursive-without",
        RecursiveRejection(),
        tamper_draft(drawn(PAIR, "without_replacement"), sort_siblings),
        True,
    ),
    Wrong(
        "sorted-siblings-recursive-with",
        RecursiveRejection(),
        tamper_draft(drawn(PAIR, "sampled"), sort_siblings),
    ),
    Wrong(
        "residual-not-normalised-chain",
        SpeculativeSampling(),
        drawn(CHAIN, "sampled"),
        patch=("normalize_weights", leave_unnormalised),
    ),
    Wrong(
        "residual-not-normalised-recursive",
        RecursiveRejection(),
        drawn(PAIR, "sampled"),
        patch=("normalize_weights", leave_unnormalised),
    ),
    Wrong(
        "residual-not-normalised-block",
        Block(),
        drawn(CHAIN, "sampled"),
        patch=("normalize_weights", leave_unnormalised),
    ),
    Wrong(
        "q-keeps-the-drawn-recursive",
        RecursiveRejection(),
        drawn(PAIR, "without_replacement"),
        False,
    ),
    Wrong(
        "q-not-normalised-recursive",
        RecursiveRejection(),
        drawn(PAIR, "without_replacement"),
        True,
        ("remove_token", leave_as_is),
    ),
    Wrong("q-loses-the-replaced-recursive", RecursiveRejection(), drawn(PAIR, "sampled"), True),
    Wrong(
        "duplicates-skipped-recursive",
        RecursiveRejection(),
        tamper_draft(drawn(PAIR, "sampled"), skip_duplicates),
    ),
    Wrong("bonus-at-another-temperature", SharpBonus(), drawn(PAIR, "sampled")),
    Wrong(
        "unlikely-draw-discarded-chain",
        SpeculativeSampling(),
        tamper_draft(drawn(CHAIN, "sampled"), discard_unlikely),
    ),
    Wrong(
        "unlikely-draw-discarded-block",
        Block(),
        tamper_draft(drawn(CHAIN, "sampled"), discard_unlikely),
    ),
    Wrong(
        "middle-h-is-b-block",
        Block(),
        drawn(CHAIN, "sampled"),
        patch=("residual_rate", rate_itself),
    ),
    *CASES.get("WRONG", ()),
]


# Refusals

LIKELIEST = TokenTree.from_chain(torch.tensor([[0, 1, 2]]))
BRANCHED = TokenTree(
    torch.tensor([[0, 1, 2]]),
    torch.tensor([[-1, 0, 0]]),
    *[torch.ones(1, 3, dtype=torch.bool)] * 2,
    children="sampled",
    q=torch.full((1, 3, 3), 1 / 3),
)


def judge_uniform(rule: AcceptanceRule, tree: TokenTree) -> AcceptedPath:
    """A round at a uniform target."""
    return rule(tree, torch.zeros(1, 3, 3), torch.zeros(1, dtype=torch.int64), tree.depths)


@pytest.mark.parametrize(
    "rule",
    [
        SpeculativeSampling(),
        RecursiveRejection(),
        Block(),
        *CASES.get("test_rules_that_need_drawn_children_refuse_others", ()),
    ],
    ids=lambda rule: rule.name,
)
def test_rules_that_need_drawn_children_refuse_others(rule: SequentialRule) -> None:
    """Deterministic children are refused under the rule's name, with two ways out; the same
    chain, drawn, is judged.
    """
    with pytest.raises(
        UserError,
        match=rf"^acceptance={rule.name}: .*use tree\.children=sampled .*acceptance=match",
    ):
        judge_uniform(rule, LIKELIEST)
    sampled = replace(LIKELIEST, children="sampled", q=torch.full((1, 3, 3), 1 / 3))
    assert judge_uniform(rule, sampled).counts.tolist() == [3]


@pytest.mark.parametrize("rule", [SpeculativeSampling(), Block()], ids=lambda rule: rule.name)
def test_chain_rules_refuse_branches(rule: SequentialRule) -> None:
    """A tree that branches is refused under the rule's name, with two ways out."""
    with pytest.raises(
        UserError, match=rf"^acceptance={rule.name}: .*use tree=chain or acceptance=recursive"
    ):
        judge_uniform(rule, BRANCHED)


@pytest.mark.parametrize(
    "rule",
    [
        RecursiveRejection(),
        Match(),
        Greedy(),
        TypicalAcceptance(),
        *CASES.get("test_tree_rules_accept_branches", ()),
    ],
    ids=lambda rule: rule.name,
)
def test_tree_rules_accept_branches(rule: AcceptanceRule) -> None:
    """A drawn tree that branches is judged by every other rule."""
    assert 1 <= judge_uniform(rule, BRANCHED).counts.item() <= 2


@pytest.mark.parametrize(
    "key, value",
    [
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-320),
        ("top_p", 0.0),
        ("top_p", 1e-320),
        ("top_p", 1.5),
        ("top_k", -1),
    ],
)
@pytest.mark.parametrize(
    "rule",
    [
        Match,
        SpeculativeSampling,
        RecursiveRejection,
        Block,
        TypicalAcceptance,
        *CASES.get("test_bad_settings_are_refused", ()),
    ],
)
def test_bad_settings_are_refused(rule: type[SamplingRule], key: str, value: float) -> None:
    """A setting that means nothing is refused under its own name, with what to use."""
    with pytest.raises(UserError, match=rf"^acceptance\.{key}={value}: use "):
        rule(**{key: value})


@pytest.mark.parametrize("key", ["epsilon", "delta"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.01, math.nan])
def test_typical_refuses_bad_thresholds(key: str, value: float) -> None:
    """Both thresholds are more than 0 and at most 1."""
    with pytest.raises(
        UserError, match=rf"^acceptance\.{key}={value}: use more than 0 and at most 1"
    ):
        TypicalAcceptance(**{key: value})


# Typical acceptance


class Likeliest:
    """Dice that draw the likeliest token and have no coin."""

    def flip_coin(self, chance: Any, node: int, number: int = 0) -> bool:
        raise AssertionError("typical acceptance tosses no coin")

    def draw_token(self, weights: torch.Tensor, node: int) -> int:
        return int(weights.argmax())


def typical_path(
    paths: list[Path], p: dict[Path, list[float]], rule: TypicalAcceptance
) -> tuple[Path, int]:
    """Return the tokens that typical acceptance accepts of a tree, and the one after them."""
    tree = Drawn()
    for path in sorted(paths, key=len):
        tree.add(tree.paths.index(path[:-1]), path[-1])
    row = VerifiedTree(
        tree.tokens,
        tree.children,
        lambda node: torch.tensor(p[tree.paths[node]], dtype=torch.float64),
        lambda node: None,
    )
    accepted, bonus = rule.select_path(row, Likeliest())
    return tree.paths[accepted[-1]], bonus


@pytest.mark.parametrize(
    "p, epsilon, delta, accepted",
    [
        pytest.param([0.5, 0.3, 0.1, 0.06, 0.04], 0.09, 1.0, {0, 1, 2}, id="epsilon-binds"),
        pytest.param([0.5, 0.3, 0.1, 0.06, 0.04], 0.9, 0.4, {0, 1}, id="entropy-binds"),
        pytest.param([0.5, 0.3, 0.1, 0.06, 0.04], 0.05, 0.3, {0, 1, 2, 3}, id="low-epsilon"),
        pytest.param([0.2, 0.2, 0.2, 0.2, 0.2], 0.9, 1.0, set(), id="uniform-is-its-own-threshold"),
        pytest.param([0.2, 0.2, 0.2, 0.2, 0.2], 0.9, 0.9, {0, 1, 2, 3, 4}, id="uniform"),
    ],
)
def test_typical_accepts_likely_tokens(
    p: list[float], epsilon: float, delta: float, accepted: set[int]
) -> None:
    """Of single children exactly those with p(x) > min(epsilon, delta exp(-H)) are accepted."""
    threshold = min(epsilon, delta * math.exp(sum(x * math.log(x + 1e-5) for x in p)))
    assert {token for token, chance in enumerate(p) if chance > threshold} == accepted
    rule = TypicalAcceptance(epsilon=epsilon, delta=delta)
    after = {(): p, **{(token,): [0.0, 0.0, 0.0, 0.0, 1.0] for token in range(5)}}
    for token in range(5):
        assert typical_path([(token,)], after, rule) == (
            ((token,), 4) if token in accepted else ((), 0)
        )


def test_typical_accepts_the_longest_then_likeliest_path() -> None:
    """A longer accepted path wins over a likelier one; of two equally long ones the likelier
    wins, in any order of siblings.
    """
    p = {
        (): [0.5, 0.4, 0.1],
        (0,): [0.02, 0.03, 0.95],
        (1,): [0.3, 0.6, 0.1],
        (1, 0): [0.0, 0.0, 1.0],
        (1, 1): [0.0, 1.0, 0.0],
    }
    rule = TypicalAcceptance()
    assert typical_path([(0,), (1,)], p, rule) == ((0,), 2)
    assert typical_path([(1,), (0,)], p, rule) == ((0,), 2)
    assert typical_path([(0,), (1,), (0, 0), (1, 0)], p, rule) == ((1, 0), 2)
    assert typical_path([(0,), (1,), (1, 0), (1, 1)], p, rule) == ((1, 1), 1)
    assert typical_path([(0,), (1,), (1, 1), (1, 0)], p, rule) == ((1, 1), 1)


def test_typical_is_greedy_where_the_target_is_certain() -> None:
    """At a low temperature it accepts what greedy acceptance accepts, and the same token
    follows.
    """
    tokens = torch.randint(0, 4, (50, 4))
    tree = TokenTree.from_chain(tokens)
    logits = torch.stack(
        [torch.stack([torch.randperm(4) for _ in range(4)]) for _ in range(50)]
    ).float()
    rows = torch.arange(50)
    greedy, typical = (
        rule(tree, logits, rows, tree.depths)
        for rule in (Greedy(), TypicalAcceptance(temperature=0.05))
    )
    assert len(set(greedy.counts.tolist())) > 1
    assert torch.equal(typical.counts, greedy.counts) and torch.equal(typical.bonus, greedy.bonus)
    assert torch.equal(emitted_tokens(tree, typical), emitted_tokens(tree, greedy))
