"""An EAGLE drafter's steps by the kernels of a GPU, interpreted: what they draft is what the
modules draft.
"""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.loop import Request
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.kernel_steps import KernelRollout, can_step
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain.trees.base import Prefix
from spectrain.trees.rollout import Rollout
from spectrain.trees.token_tree import TokenTree
from tests.targets import cut_tiny

pytest.importorskip("triton", reason="triton is not installed, so there is no kernel to interpret")

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [9, 10], [100, 3, 44, 8]]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "variants": {
        "architecture": {
            "norm_before_residual": True,
            "norm_output": True,
            "own_embedding": True,
            "norm_before_fc": True,
        },
        "head_rank": 8,
    },
}
BUILDERS: dict[str, TreeBuilder] = {"chain": Chain(3), "eagle2": Eagle2(3, 10, 3)}


def make_drafter(target: Target, name: str) -> Eagle3:
    torch.manual_seed(1)
    drafter = Eagle3(target, vocab_size=512, **VARIANTS[name]).eval()
    drafter.prepare(target, torch.arange(target.head.vocab_size))
    for parameter in drafter.parameters():
        parameter.requires_grad_(False)
    return drafter


class Recorded(TreeBuilder):
    """A builder that records the trees of another one."""

    def __init__(self, builder: TreeBuilder) -> None:
        vars(self).update(vars(builder))
        self.name, self.traits = builder.name, builder.traits
        self.builder = builder
        self.trees: list[TokenTree] = []
        self.rollouts: list[Rollout] = []

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        self.trees.append(self.builder.expand(prefix, rollout))
        self.rollouts.append(rollout)
        return self.trees[-1]


def draft_rounds(
    target: Target,
    drafter: Eagle3,
    builder: TreeBuilder,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    backend: str | None = None,
) -> tuple[Recorded, Any]:
    """Decode three rounds of ragged texts, whose drafts are computed by kernels or by modules, and
    all else by modules; return what was recorded, and the log.
    """
    recorded = Recorded(builder)
    monkeypatch.setenv("SPECTRAIN_KERNELS", "reference")
    engine = CapturedRunner(
        target, Greedy(), drafter, recorded if backend is None else builder, backend=backend
    )
    with torch.inference_mode():
        engine.start_batch(Request(PROMPTS, 12, [0, 1, 2], frozenset()))
        for _ in range(3):
            parts = engine.run_parts()
            monkeypatch.setenv("SPECTRAIN_KERNELS", mode)
            next(parts)
            monkeypatch.setenv("SPECTRAIN_KERNELS", "reference")
            next(parts)
            next(parts)
    assert engine.state.context.log is not None
    return recorded, engine.state.context.log.lines


@pytest.mark.sweep(2)
@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_by_kernels_equal_drafts_by_modules(
    variant: str, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged texts have the same trees, scores and rounds."""
    target = cut_tiny(2)
    drafter = make_drafter(target, variant)
    records = [
        draft_rounds(target, drafter, BUILDERS[builder], mode, monkeypatch)
        for mode in ("reference", "triton")
    ]
    (modules, log), (kernels, other_log) = records
    assert all(isinstance(rollout, KernelRollout) for rollout in kernels.rollouts)
    assert not any(isinstance(rollout, KernelRollout) for rollout in modules.rollouts)
    for tree, other in zip(modules.trees, kernels.trees, strict=True):
        assert torch.equal(tree.tokens, other.tokens) and torch.equal(tree.parents, other.parents)
        assert tree.scores is not None and other.scores is not None
        torch.testing.assert_close(tree.scores, other.scores)
    assert torch.equal(log, other_log)


@pytest.mark.slow
@pytest.mark.parametrize("builder", BUILDERS)
def test_drafts_by_kernels_can_be_compiled(builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as on a GPU, where kernels are opaque operations: one graph, the same rounds."""
    target = cut_tiny(2)
    drafter = make_drafter(target, "plain")
    _, log = draft_rounds(target, drafter, BUILDERS[builder], "reference", monkeypatch)
    counters.clear()
    _, other = draft_rounds(
        target, drafter, BUILDERS[builder], "triton", monkeypatch, backend="aot_eager"
    )
    assert torch.equal(log, other)
    assert not counters["graph_break"]


def test_what_kernels_do_not_compute_runs_by_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, norms of heads and gradients are left to the modules."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    target = cut_tiny(2)
    cache = TreeCache(1, 1, 20, "cpu")
    with torch.no_grad():
        assert can_step(make_drafter(target, "plain"), cache)
        for settings in ({"window": 4}, {"architecture": {"qk_norm": True}}):
            assert not can_step(Eagle3(target, vocab_size=512, **settings), cache)  # type: ignore[arg-type]
        monkeypatch.setenv("SPECTRAIN_KERNELS", "reference")
        assert not can_step(make_drafter(target, "plain"), cache)
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    assert not can_step(make_drafter(target, "plain"), cache)


def test_a_derived_class_runs_by_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that changes a step drafts by what it changed."""

    class Other(Eagle3):
        pass

    target = cut_tiny(2)
    recorded, _ = draft_rounds(
        target, Other(target, vocab_size=512).eval(), Chain(1), "triton", monkeypatch
    )
    assert not any(isinstance(rollout, KernelRollout) for rollout in recorded.rollouts)
