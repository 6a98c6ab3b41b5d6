"""Rules by joint probability and by rank, against a search over all paths of a tree."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from spectrain.decoding.acceptance import AcceptanceRule, Greedy
from spectrain.errors import UserError
from spectrain.trees.token_tree import TokenTree
from spectrain_research.joint_ratio.rule import JointRatio, RankMatch

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5, 7]


def random_tree(seed: int) -> tuple[TokenTree, torch.Tensor]:
    """A tree of nine nodes with distinct siblings and drafter scores, and the target's logits."""
    torch.manual_seed(seed)
    tokens = torch.tensor(
        [[0, *torch.randperm(6)[:2].tolist(), *torch.randperm(6)[:2].tolist(), 3, 1, 4, 2]]
    )
    tree = TokenTree.from_parents(tokens, torch.tensor([PARENTS]))
    log_q = -torch.rand(1, 9) * 3
    log_q[:, 0] = 0
    scores = torch.einsum("bij,bj->bi", tree.ancestors.float(), log_q)
    return replace(tree, scores=scores), torch.randn(1, 9, 6) * 2


def path_to(node: int) -> list[int]:
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    return path


def search_path(
    tree: TokenTree, logits: torch.Tensor, may_end: Callable[[list[int], list[float]], bool]
) -> list[int]:
    """The longest path that may end where it does, of equally long ones the likeliest."""
    p = logits[0].softmax(-1)
    best = [0]
    best_value = 0.0
    for node in range(1, len(PARENTS)):
        path = path_to(node)
        chances = [float(p[above, tree.tokens[0, at]]) for above, at in zip(path, path[1:])]
        value = math.prod(chances)
        if may_end(path, chances) and (len(path), value) > (len(best), best_value):
            best = path
            best_value = value
    return best


def accept_path(
    rule: AcceptanceRule, tree: TokenTree, logits: torch.Tensor
) -> tuple[list[int], int]:
    result = rule(tree, logits, torch.zeros(1, dtype=torch.int64), tree.depths)
    return result.path[0, : int(result.counts)].tolist(), int(result.bonus)


@pytest.mark.parametrize("threshold", [0.05, 0.5, 2.0])
def test_joint_ratio_accepts_the_longest_likely_draft(threshold: float) -> None:
    """The longest draft is accepted also where a token before the last one would be rejected by
    itself.
    """
    sizes = set()
    for seed in range(30):
        tree, logits = random_tree(seed)
        assert tree.scores is not None
        scores = tree.scores[0].tolist()
        expected = search_path(
            tree,
            logits,
            lambda path, chances, q=scores: math.prod(chances) / math.exp(q[path[-1]]) > threshold,
        )  # type: ignore[misc]
        path, bonus = accept_path(JointRatio(threshold), tree, logits)
        assert path == expected and bonus == int(logits[0, path[-1]].argmax())
        sizes.add(len(path))
    assert len(sizes) > 1


def test_rank_accepts_likely_tokens_only() -> None:
    """Every token of the path is among the likeliest and likely enough; with a top_k of 1 the
    rule is greedy.
    """
    deeper = 0
    for seed, top_k, least in product(range(20), (1, 2, 4), (0.0, 0.2)):
        tree, logits = random_tree(seed)
        p = logits[0].softmax(-1)

        def may_end(
            path: list[int], chances: list[float], p=p, tree=tree, top_k=top_k, least=least
        ) -> bool:  # type: ignore[no-untyped-def]
            ranks = [
                int((p[above] > p[above, tree.tokens[0, at]]).sum())
                for above, at in zip(path, path[1:])
            ]
            return max(ranks) < top_k and min(chances) >= least

        path, bonus = accept_path(RankMatch(top_k, least), tree, logits)
        assert path == search_path(tree, logits, may_end)
        if top_k == 1 and least == 0:
            assert (path, bonus) == accept_path(Greedy(), tree, logits)
        deeper += top_k == 4 and len(path) > 2
    assert deeper > 0


def test_joint_ratio_refuses_copies() -> None:
    tree, logits = random_tree(0)
    with pytest.raises(UserError, match="^acceptance=joint: .*use drafter=causal"):
        accept_path(JointRatio(), replace(tree, scores=None), logits)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: JointRatio(0.0), "acceptance.threshold=0.0"),
        (lambda: RankMatch(0), "acceptance.top_k=0"),
        (lambda: RankMatch(2, 1.0), "acceptance.least=1.0"),
    ],
)
def test_invalid_settings_are_refused(make: Callable[[], AcceptanceRule], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
