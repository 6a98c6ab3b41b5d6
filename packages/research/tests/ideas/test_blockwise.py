"""Refined blocks: the best paths of a lattice are those of an exhaustive search, and drafted =
greedy.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain_research.blockwise.drafter import Blockwise
from spectrain_research.blockwise.ngrams import NgramModel, find_best_paths
from tests.decoding.rounds import Keeping

TEXT = [0, 1, 2, 0, 1, 3, -1, 0, 1, 2, 2, 3]


def score_by_counting(context: tuple[int, ...], token: int) -> float:
    """Stupid backoff by counting the text anew."""
    if not context:
        return (sum(other == token for other in TEXT) + 1) / (sum(other >= 0 for other in TEXT) + 4)
    gram = [*context, token]
    count = sum(TEXT[i : i + len(gram)] == gram for i in range(len(TEXT)))
    total = sum(TEXT[i : i + len(context)] == list(context) for i in range(len(TEXT)))
    return count / total if count else 0.4 * score_by_counting(context[1:], token)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_best_paths_equal_an_exhaustive_search(order: int, weight: float) -> None:
    model = NgramModel(np.array(TEXT), order, 4)
    torch.manual_seed(order)
    log_q = torch.randn(4, 4).log_softmax(-1).tolist()
    lattice = [list(enumerate(row)) for row in log_q]
    context = [3, 0, 1]
    every = []
    for path in product(range(4), repeat=4):
        score = 0.0
        before = context
        for row, token in zip(log_q, path):
            history = tuple(before[len(before) - order + 1 :])
            assert model.log_score(before, token) == pytest.approx(
                math.log(score_by_counting(history, token))
            )
            score += row[token] + weight * math.log(score_by_counting(history, token))
            before = [*before, token]
        every.append((score, path))
    expected = sorted(every, reverse=True)[:6]
    best_paths = find_best_paths(lattice, context, model, weight, 6)
    assert [path for _, path in best_paths] == [path for _, path in expected]
    assert [score for score, _ in best_paths] == pytest.approx([score for score, _ in expected])


def test_refined_drafts_are_verified(shallow: Target) -> None:
    """The output is greedy; without the n-gram model a chain of one path is the drafter's own;
    drafters that read drafts are refused."""
    prompts = [[5, 6, 7, 5, 6], [9, 10, 9]]
    inner = {"choice": "medusa", "vocab_size": 512}
    expected = [
        generation.output for generation in decode(shallow, prompts, Greedy(), 12, ignore_eos=True)
    ]
    torch.manual_seed(0)
    plain = Blockwise(shallow, inner, weight=0.0, paths=1).eval()
    builders = Keeping(Chain(3)), Keeping(Chain(3))
    for drafter, builder in ((plain, builders[0]), (plain.inner, builders[1])):
        assert [
            generation.output
            for generation in decode(
                shallow, prompts, Greedy(), 12, drafter, builder, ignore_eos=True
            )
        ] == expected
    assert all(
        torch.equal(a.tokens, b.tokens)
        for a, b in zip(builders[0].trees, builders[1].trees, strict=True)
    )
    wide = Keeping(Eagle2(3, 9, 3))
    generations = decode(
        shallow, prompts, Greedy(), 12, Blockwise(shallow, inner, order=3), wide, ignore_eos=True
    )
    assert [generation.output for generation in generations] == expected and max(
        int(tree.valid.sum(1).max()) for tree in wide.trees
    ) > 4
    with pytest.raises(UserError, match="depend on each other"):
        decode(
            shallow,
            prompts,
            Greedy(),
            4,
            Blockwise(shallow, {"choice": "causal", "num_layers": 1}),
            Chain(2),
        )
