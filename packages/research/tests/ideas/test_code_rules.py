"""Rules for codes: LANTERN in exact fractions, interchangeable states and near actions by plain
Python.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.acceptance.sequential import VerifiedTree
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.trees.token_tree import TokenTree
from spectrain_research.interchangeable.rule import InterchangeableStates
from spectrain_research.lantern.rule import NearbyCodes
from spectrain_research.robot_actions.rule import NearActions
from spectrain_research.shared.codebook import Codebook
from tests.decoding.test_lossless import every

VOCABULARY = 4
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5, 6]


@pytest.fixture(scope="module")
def codebook(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Codes on a line, in another order than their ids."""
    path = tmp_path_factory.mktemp("codes") / "codebook.safetensors"
    positions = torch.tensor([0.0, 3.0, 1.0, 2.1, 9.0, 4.2, 7.0, 5.0, 6.1, 8.0])
    save_file({"tokens": torch.arange(len(positions)), "vectors": positions[:, None]}, path)
    return str(path)


def random_fractions(draw: random.Random) -> Any:
    weights = [draw.randint(1, 5) for _ in range(VOCABULARY)]
    return np.array([Fraction(weight, sum(weights)) for weight in weights], dtype=object)


def output_chances(rule: Any, p: Any, q: Any, number: int) -> dict[int, Fraction]:
    """The exact chance of each first token where `number` siblings are drawn from q."""
    chances: dict[int, Fraction] = defaultdict(Fraction)
    for tokens in itertools.product(range(VOCABULARY), repeat=number):
        drawn = Fraction(1)
        for token in tokens:
            drawn *= q[token]
        children = [[*range(1, number + 1)], *[[] for _ in tokens]]
        tree = VerifiedTree([0, *tokens], children, lambda node: p, lambda node: q)
        for chance, (path, bonus) in every(partial(rule.select_path, tree)):
            first = tree.tokens[path[1]] if len(path) > 1 else bonus
            chances[first] += drawn * chance
    return chances


def test_lantern_without_neighbours_is_lossless_and_moves_at_most_its_bound(tmp_path: Path) -> None:
    """With no neighbours or bound 0 the target's distribution, exactly; otherwise p' is within the
    bound, more is accepted, and chances are those of the enumeration."""
    save_file(
        {"tokens": torch.arange(4), "vectors": torch.tensor([[0.0], [3.0], [1.0], [2.1]])},
        tmp_path / "codes",
    )
    codebook = str(tmp_path / "codes")
    draw = random.Random(0)
    gains = Fraction(0)
    for trial in range(6):
        p = random_fractions(draw)
        q = random_fractions(draw)
        for strict in (
            NearbyCodes(codebook, neighbours=0),
            NearbyCodes(codebook, neighbours=3, bound=0.0),
        ):
            assert output_chances(strict, p, q, 1 + trial % 2) == dict(enumerate(p))
        rule = NearbyCodes(codebook, neighbours=2, bound=Fraction(1, 2))  # type: ignore[arg-type]
        for token in range(VOCABULARY):
            moved = rule.move_mass(p, token)
            assert (
                sum(moved) == 1
                and sum(abs(moved - p)) / 2 <= rule.bound
                and moved[token] >= p[token]
            )
            accept = min(Fraction(1), moved[token] / q[token])
            tree = VerifiedTree([0, token], [[1], []], lambda node, p=p: p, lambda node, q=q: q)
            chance_accepted = sum(
                chance
                for chance, (path, _) in every(partial(rule.select_path, tree))
                if len(path) > 1
            )
            assert chance_accepted == accept
            gains += q[token] * (accept - min(Fraction(1), p[token] / q[token]))
        assert sum(output_chances(rule, p, q, 2).values()) == 1
    assert gains > Fraction(1, 2)
    assert (
        rule.near == {0: [2, 3], 1: [3, 2], 2: [0, 3], 3: [1, 2]}
        and not rule.lossless
        and RecursiveRejection.lossless
    )


def random_trees() -> Iterator[tuple[TokenTree, Tensor, Tensor]]:
    """Trees with distinct siblings, logits and states, some of which are alike."""
    for seed in range(30):
        torch.manual_seed(seed)
        tokens = torch.randperm(10)[: len(PARENTS)][None]
        logits = torch.randn(1, len(PARENTS), 10)
        states = torch.randn(1, len(PARENTS), 3)
        for node, parent in enumerate(PARENTS[1:], 1):
            if torch.rand(()) < 0.6 or node == 1:
                logits[0, parent, tokens[0, node]] = 9.0 + node / 10
        yield TokenTree.from_parents(tokens, torch.tensor([PARENTS])), logits, states


def plain_best(
    tree: TokenTree, logits: Tensor, states: Tensor, similarity: float, horizon: int
) -> tuple[int, int]:
    """The length of the longest accepted path and its right nodes, by trying all paths."""
    tokens = tree.tokens[0].tolist()
    children = [[n for n, p in enumerate(PARENTS) if p == node] for node in range(len(PARENTS))]

    def nodes_below(node: int, depth: int) -> list[int]:
        return (
            [node]
            if depth == 0
            else [leaf for child in children[node] for leaf in nodes_below(child, depth - 1)]
        )

    def judge_node(node: int) -> tuple[bool, bool]:
        best = int(logits[0, PARENTS[node]].argmax())
        right = next((child for child in children[PARENTS[node]] if tokens[child] == best), None)
        alike = right is not None and any(
            float(torch.cosine_similarity(states[0, a], states[0, b], dim=0)) >= similarity
            for depth in range(horizon + 1)
            for a in nodes_below(node, depth)
            for b in nodes_below(right, depth)
        )
        return node == right or alike, node == right

    def find_longest(node: int) -> tuple[int, int]:
        options = [(find_longest(child), judge_node(child)) for child in children[node]]
        return max(
            [
                (1, 0),
                *[
                    (1 + length, count + right)
                    for (length, count), (is_accepted, right) in options
                    if is_accepted
                ],
            ]
        )

    return find_longest(0)


@pytest.mark.parametrize("horizon", [0, 2])
def test_interchangeable_states_equal_plain_python(horizon: int) -> None:
    """The longest path by trying all; with an impossible similarity, and in chains, the greedy
    output.
    """
    rule = InterchangeableStates(similarity=0.5, horizon=horizon)
    longer = 0
    sequences = torch.zeros(1, dtype=torch.int64)
    for tree, logits, states in random_trees():
        features = Features(tree.tokens, ("final",), states[:, :, None], logits)
        accepted = rule.accept(tree, features, sequences, tree.depths)
        greedy = Greedy()(tree, logits, sequences, tree.depths)
        length, _ = plain_best(tree, logits, states, 0.5, horizon)
        assert int(accepted.counts[0]) == length >= int(greedy.counts[0])
        assert int(accepted.bonus[0]) == int(logits[0, accepted.path[0, length - 1]].argmax())
        longer += length > int(greedy.counts[0])
        strict = InterchangeableStates(similarity=1.1, horizon=horizon).accept(
            tree, features, sequences, tree.depths
        )
        assert torch.equal(strict.counts, greedy.counts) and torch.equal(strict.bonus, greedy.bonus)
    assert longer > 1


def test_near_actions_equal_plain_python(codebook: str) -> None:
    """The right node wins, then the nearest within the radius; at radius 0 the output is the
    greedy one.
    """
    rule = NearActions(codebook, radius=1.5)
    positions = Codebook.read(codebook, "").vectors[:, 0]
    sequences = torch.zeros(1, dtype=torch.int64)
    forgiven = 0
    for tree, logits, _ in random_trees():
        accepted = rule(tree, logits, sequences, tree.depths)
        node = 0
        path = [0]
        while True:
            best = int(logits[0, node].argmax())
            options = [
                (abs(float(positions[tree.tokens[0, child]] - positions[best])), child)
                for child, parent in enumerate(PARENTS)
                if parent == node
            ]
            near = min((option for option in options if option[0] <= 1.5), default=None)
            if near is None:
                break
            forgiven += near[0] > 0
            node = near[1]
            path.append(node)
        assert accepted.path[0, : int(accepted.counts[0])].tolist() == path
        greedy = Greedy()(tree, logits, sequences, tree.depths)
        strict = NearActions(codebook, radius=0.0)(tree, logits, sequences, tree.depths)
        assert torch.equal(strict.counts, greedy.counts) and torch.equal(strict.bonus, greedy.bonus)
    assert forgiven > 2


def test_codebooks_are_read_from_files_and_models(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no codebook"):
        Codebook.read(str(tmp_path), "acceptance.codebook")
    save_file({"model.embed_tokens.weight": torch.eye(3)}, tmp_path / "model.safetensors")
    assert Codebook.read(str(tmp_path), "").nearest_tokens(9) == {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    save_file({"other": torch.eye(3)}, tmp_path / "codebook.safetensors")
    with pytest.raises(UserError, match="neither"):
        Codebook.read(str(tmp_path), "acceptance.codebook")
