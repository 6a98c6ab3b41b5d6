"""ReSpec's verification by source: copies are judged less strictly, drafted tokens as before."""

import numpy as np
import pytest
import torch

from spectrain.copying.estimates import Proposal
from spectrain.copying.occurrences import Copies
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Eagle2
from spectrain.trees.token_tree import TokenTree
from spectrain_research.respec.drafter import ReSpec
from spectrain_research.respec.relaxed import CopiedTree, RelaxedCopies, mark_copies
from tests.decoding.rounds import Keeping
from tests.drafters.test_contract import EAGLE3

PROMPTS = [[5, 7, 9, 5, 7, 9, 5, 7], [40, 50, 60, 40]]
PARENTS = torch.tensor([[-1, 0, 0, 1, 2]])
TREE = TokenTree.from_parents(torch.tensor([[0, 1, 2, 3, 4]]), PARENTS)
# Logarithms of the target's probabilities of 5 tokens after each node; token 0 is the likeliest
# after the root.
LOGITS = torch.tensor(
    [
        [
            [0.4, 0.3, 0.25, 0.05, 0.0],
            [0, 0, 0, 0.2, 0.8],
            [0, 0, 0, 0.9, 0.1],
            *[[1.0, 0, 0, 0, 0]] * 2,
        ]
    ]
).log()


def accept_path(is_copied: list[bool], rule: RelaxedCopies) -> tuple[list[int], int]:
    """The accepted path of the tree with these copies, and the token after it."""
    tree = CopiedTree(
        TREE.tokens, TREE.parents, TREE.valid, TREE.can_emit, is_copied=torch.tensor([is_copied])
    )
    accepted = rule(tree, LOGITS, torch.zeros(1, dtype=torch.int64), tree.depths)
    return accepted.path[0, : accepted.counts[0]].tolist(), int(accepted.bonus)


@pytest.mark.parametrize(
    "copied, top_k, ratio, path",
    [
        # the likelier copy; 3 after it has a quarter of the likeliest one's probability
        ([1, 2, 3, 4], 2, 0.3, [0, 1]),
        ([1, 2, 3, 4], 2, 0.2, [0, 1, 3]),
        ([2, 4], 2, 0.3, [0]),  # token 2 is the third
        ([2, 4], 3, 0.3, [0, 2]),  # and 4 after it is unlikely
        ([2, 4], 3, 0.1, [0, 2, 4]),
        ([3, 4], 5, 0.0, [0]),  # a drafted token is judged strictly
        ([1, 2, 3, 4], 1, 0.0, [0]),
        ([1, 2, 3, 4], 5, 1.0, [0]),
    ],
)
def test_likely_copies_are_accepted(
    copied: list[int], top_k: int, ratio: float, path: list[int]
) -> None:
    """Copies are accepted by rank and share, drafted tokens never; the target's most likely
    token follows.
    """
    rule = RelaxedCopies(top_k, ratio)
    assert accept_path([node in copied for node in range(5)], rule) == (
        path,
        int(LOGITS[0, path[-1]].argmax()),
    )
    with pytest.raises(UserError, match="use drafter=respec"):
        rule(TREE, LOGITS, torch.zeros(1, dtype=torch.int64), TREE.depths)


def test_a_node_of_both_sources_counts_as_drafted() -> None:
    """Marks follow the path of a node among the copies, not its token."""
    proposal = Proposal.from_copies([Copies(np.array([3, 2]), np.array([[1, 3], [2, 4]]))], 0.0)
    proposal.add_draft([9, 2, 3], [-1, 0, 1], [0.0, -0.1, -0.2], [True] * 3)
    tree = TokenTree.from_parents(
        torch.tensor([[9, 1, 2, 3, 4, 3]]), torch.tensor([[-1, 0, 0, 1, 2, 2]])
    )
    marked = mark_copies(tree, [proposal], [1]).is_copied
    assert marked is not None and marked.tolist() == [[False, True, False, True, True, False]]


def test_strict_settings_give_the_greedy_output(shallow: Target) -> None:
    """With ratio 1 decoding is greedy, and trees are marked; looser settings emit other text in
    fewer rounds.
    """
    torch.manual_seed(0)
    drafter = ReSpec(shallow, {"choice": "eagle3", **EAGLE3}, entropy=None).eval()
    plain = [row.output for row in decode(shallow, PROMPTS, Greedy(), 24)]
    builder = Keeping(Eagle2(4, 10, 3))
    assert [
        row.output
        for row in decode(shallow, PROMPTS, RelaxedCopies(ratio=1.0), 24, drafter, builder)
    ] == plain
    assert any(bool(tree.is_copied.any()) for tree in builder.trees if isinstance(tree, CopiedTree))
    loose = decode(
        shallow, PROMPTS, RelaxedCopies(top_k=2048, ratio=0.0), 24, drafter, Eagle2(4, 10, 3)
    )
    assert [row.output for row in loose] != plain
