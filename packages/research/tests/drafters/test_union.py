"""Trees of several drafters are merged by path and judged so that the output is the target's,
whoever drew a token.
"""

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch

from spectrain.config.build import build
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.sequential import RandomSource
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Auto, Chain, Eagle2
from spectrain.trees.token_tree import TokenTree
from spectrain_research.union.rule import DrawnTree, MultiStepSampling
from spectrain_research.union.tree import MergedRow, UnionTree, merge_trees
from tests.decoding.rounds import begun, proposed
from tests.decoding.test_lossless import (
    KINDS,
    Draft,
    Model,
    continued,
    drawn,
    every,
    models,
    target_joint,
    widths,
)
from tests.trees.tables import check_structure

INNER: list[Any] = [
    "ngram",
    {"choice": "causal", "num_layers": 1},
    {"choice": "medusa", "num_heads": 3},
]
SHAPES = [widths(1), widths(1, 1), widths(2)]


def draw_merged_tree(
    p: Model, qs: list[Model], drafts: list[Draft], dice: RandomSource
) -> tuple[DrawnTree, list[tuple[int, ...]]]:
    """Return the union of trees that drafters draw from their own q, and the path of every node."""
    row = MergedRow([0])
    paths: list[tuple[int, ...]] = [()]
    drawn_trees = [draft(q, dice) for draft, q in zip(drafts, qs)]
    for tree in drawn_trees:
        row.add_tree(tree.as_tree("sampled"), 0)
    for node in range(1, len(row.tokens)):
        paths.append((*paths[row.parents[node]], row.tokens[node]))
    children = [
        [child for child, parent in enumerate(row.parents) if parent == node]
        for node in range(len(paths))
    ]

    def list_draws(node: int) -> list[tuple[int, Any]]:
        return [(child, qs[drafter][paths[node]]) for child, drafter in row.draws.get(node, [])]

    return DrawnTree(
        row.tokens,
        children,
        lambda node: p[paths[node]],
        lambda node: qs[0][paths[node]],
        draws=list_draws,
    ), paths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_two_drafters_draw_and_the_output_is_the_targets(kind: str, shape: Any) -> None:
    """Summed over all pairs of trees and all outcomes of judging their union, the joint
    distribution is the target's, though the two q differ."""
    length = max(map(len, shape)) + 1
    for seed in range(2):
        p, first = models(kind, 2, length, seed)
        _, second = models(kind, 2, length, seed + 7)
        joint: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
        draft = partial(draw_merged_tree, p, [first, second], [drawn(shape, "sampled")] * 2)
        for chance, (tree, paths) in every(draft):
            for share, (path, bonus) in every(partial(MultiStepSampling().select_path, tree)):
                joint[(*paths[path[-1]], bonus)] += chance * share
        assert continued(joint, p, length) == target_joint(p, length)


def test_paths_are_merged() -> None:
    """Nodes with the same path are one node that both drafters drew, and each drafter's q is at
    the merged node.
    """
    first = TokenTree.from_chain(torch.tensor([[9, 1, 2]]))
    second = TokenTree.from_parents(torch.tensor([[9, 3, 1, 4]]), torch.tensor([[-1, 0, 0, 2]]))
    plain = merge_trees([first, second], 6)
    assert plain.tokens.tolist() == [[9, 1, 2, 3, 4]] and plain.parents.tolist() == [
        [-1, 0, 1, 0, 1]
    ]
    trees = [
        replace(tree, children="sampled", q=torch.rand(1, tree.tokens.shape[1], 6))
        for tree in (first, second)
    ]
    union = merge_trees(trees, 6)
    assert isinstance(union, UnionTree) and union.draws == (
        {0: [(1, 0), (3, 1), (1, 1)], 1: [(2, 0), (4, 1)]},
    )
    for tree, q, nodes in zip(trees, union.drafter_q, ([0, 1, 2], [0, 3, 1, 4])):
        assert tree.q is not None and torch.equal(q[0, nodes], tree.q[0])


@pytest.fixture(scope="module")
def prompts(shallow: Target) -> list[list[int]]:
    texts = (
        "one two three four one two three four one two",
        "The bees find the hive. The bees",
        "What is it?",
    )
    return [shallow.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def make_union(target: Target, inner: list[Any] = INNER) -> Any:
    torch.manual_seed(0)
    return build(
        {"_target_": "spectrain_research.union.drafter.UnionDrafter", "inner": inner}, target=target
    ).eval()


@pytest.mark.parametrize("rule", [Greedy(), Match(seed=3)], ids=lambda rule: rule.name)
def test_output_is_the_targets(shallow: Target, prompts: list[list[int]], rule: Any) -> None:
    """Chains and dynamic trees give the target's output, and the union stays within its budget."""
    expected = [row.output for row in decode(shallow, prompts, rule, 16, ignore_eos=True)]
    drafter = make_union(shallow)
    for builder in (Chain(3), Eagle2(3, 10, 3)):
        assert [
            row.output
            for row in decode(shallow, prompts, rule, 16, drafter, builder, ignore_eos=True)
        ] == expected
    context = begun(shallow, prompts, drafter, Eagle2(3, 10, 3))
    tree = proposed(drafter, context, Eagle2(3, 10, 3))
    check_structure(tree)
    assert tree.tokens.shape[1] <= 10


def test_drawn_chains_are_judged_by_their_own_q(shallow: Target, prompts: list[list[int]]) -> None:
    """Sampled chains of two drafters are verified as one tree; drafters with the same q draw
    independently.
    """
    drafter = make_union(shallow, INNER[1:2] * 2)
    builder = Chain(3, "sampled")
    drafter.inner[1].load_state_dict(drafter.inner[0].state_dict())
    generations = decode(
        shallow, prompts, MultiStepSampling(), 12, drafter, builder, ignore_eos=True
    )
    assert all(len(row.output) == 12 for row in generations)
    tree = proposed(drafter, begun(shallow, prompts, drafter, builder), builder)
    assert isinstance(tree, UnionTree) and tree.tokens.shape[1] > 4
    torch.testing.assert_close(tree.drafter_q[0][:, 0], tree.drafter_q[1][:, 0])


def test_a_union_refuses(shallow: Target, prompts: list[list[int]]) -> None:
    with pytest.raises(UserError, match="drafter.inner: name two drafters or more to merge"):
        make_union(shallow, ["ngram"])
    drafter = make_union(shallow)
    with pytest.raises(UserError, match="tree=auto: drafter=union grows trees"):
        decode(shallow, prompts, Greedy(), 8, drafter, Auto())
