"""Kernels of token trees on a CPU give what small operations of torch give, in all bits."""

import pytest
import torch
from torch import Tensor

from spectrain.kernels import dispatch
from spectrain.kernels.token_commit import TextBatch, token_commit
from spectrain.kernels.tree_verify import tree_greedy
from spectrain.kernels.tree_walks import TreeNodes
from spectrain.models.accelerator import accelerator
from spectrain.trees import Chain, Eagle2
from spectrain.trees.rollout import MarginalRollout
from spectrain.trees.token_tree import TokenTree
from spectrain_cpu import trees as cpu_trees
from spectrain_cpu.available import has_cpu_kernels
from tests.trees.tables import context

pytestmark = pytest.mark.skipif(
    not has_cpu_kernels(torch.bfloat16, torch.device("cpu")),
    reason="Numba is not installed or switched off",
)


def run_round(seed: int, batch: int) -> list[Tensor]:
    """Grow trees, verify them by logits that often agree with them, and commit what is accepted."""
    torch.manual_seed(seed)
    prefix = context(range(batch))
    roots = prefix.root
    results: list[Tensor] = []
    for builder in (Chain(3), Eagle2(4, 12, 3)):
        log_q = torch.randn(batch, 5, 200).log_softmax(-1)
        ids = torch.arange(200).flip(0).contiguous() if seed % 2 else None
        tree = builder.expand(prefix, MarginalRollout(roots, log_q, ids))
        results += [tree.tokens, tree.parents, tree.valid, tree.scores, tree.ancestors, tree.depths]  # type: ignore[list-item]
        logits = torch.randn(batch, tree.tokens.shape[1], 3000)
        children = tree.tokens[:, 1:]
        logits.scatter_(2, torch.cat([children, children[:, :1]], dim=1)[..., None], 9.0)
        logits[:, 0].scatter_(1, tree.tokens[:, 1:2], 9.0)
        allowed = tree.valid & (torch.rand(tree.tokens.shape) < 0.9)
        verdict = tree_greedy(
            TreeNodes(tree.tokens, tree.parents, allowed, tree.max_path_nodes - 1, 3), logits
        )
        texts = TextBatch(
            torch.randint(0, 60, (batch, 20)),
            torch.randint(1, 14, (batch,)),
            torch.rand(batch) < 0.8,
            torch.randint(1, 6, (batch,)),
            verdict.bonus[:1].clone(),
        )
        results += [*verdict, *token_commit(tree.tokens, *verdict, texts), *texts]
    return results


def test_rounds_are_those_of_small_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, ancestors, accepted paths and texts of one and of several texts are equal with and
    without kernels.
    """
    accelerator().prepare(torch.bfloat16, torch.device("cpu"))
    for seed in range(6):
        with_kernels = run_round(seed, 1 + seed // 2)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "cpu_kernel_sources", lambda: ())
            without = run_round(seed, 1 + seed // 2)
        assert all(
            torch.equal(actual, expected)
            for actual, expected in zip(with_kernels, without, strict=True)
        )


def test_equal_numbers_are_taken_in_their_order() -> None:
    """The first of equal children and the first of equal logits win."""
    accelerator().prepare(torch.bfloat16, torch.device("cpu"))
    log_q = torch.full((1, 1, 300), -5.0)
    log_q[0, 0, [7, 90, 250]] = -1.0
    zeros = torch.zeros(1, 1, dtype=torch.int64)
    tokens, _, scores = cpu_trees.append_children(
        log_q, 4, None, zeros, (zeros, zeros - 1, torch.zeros(1, 1))
    )
    assert tokens.tolist() == [[0, 7, 90, 250, 0]] and scores.tolist() == [[0, -1, -1, -1, -5]]
    tree = TokenTree.from_parents(torch.tensor([[3, 7]]), torch.tensor([[-1, 0]]))
    logits = torch.zeros(1, 2, 5000)
    logits[0, :, [7, 4999]] = 1.0
    path, counts, bonus = cpu_trees.accept_greedy(tree.tokens, tree.parents, tree.valid, 1, logits)
    assert (path.tolist(), counts.tolist(), bonus.tolist()) == ([[0, 1]], [2], [7])
