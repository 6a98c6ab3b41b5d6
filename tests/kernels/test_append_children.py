"""The end of a draft level: kernels = reference, on rows with ties, masked tokens and any size, and
the kernels compile for sm_90.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spectrain.kernels.append_children import (
    BLOCK,
    Nodes,
    append_children,
    append_children_reference,
)
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain.trees.rollout import Rollout
from tests.kernels import aot

pytest.importorskip("triton", reason="triton is not installed, so there is no kernel to interpret")

NEG_INF = float("-inf")


def make_nodes(batch: int, count: int) -> Nodes:
    """Nodes of a tree that has grown for a while."""
    tokens = torch.randint(0, 50, (batch, count))
    parents = torch.arange(count).sub(1).expand(batch, -1).contiguous()
    return Nodes(tokens, parents, -torch.rand(batch, count))


def make_logits(kind: str, shape: tuple[int, int, int]) -> Tensor:
    """Rows that a careless kernel gets wrong."""
    logits = torch.randn(shape) * 3
    if kind == "ties":
        return logits.round()
    if kind == "equal":
        return torch.zeros(shape)
    if kind == "zeros":  # of both signs
        return torch.where(logits > 0, 0.0, -0.0)
    if kind == "masked":  # whole parts, the first among them, and all but one token
        logits[..., : shape[2] - 1] = NEG_INF
    if kind == "first part masked":
        logits[..., : min(BLOCK, shape[2] - 20)] = NEG_INF
    if kind == "large":
        return logits * 1e30
    if kind == "half":
        return logits.to(torch.bfloat16)
    return logits


def assert_equal(logits: Tensor, width: int, draft_ids: Tensor | None, count: int) -> None:
    batch, num_frontier = logits.shape[:2]
    nodes = make_nodes(batch, count)
    frontier = torch.stack([torch.randperm(count)[:num_frontier] for _ in range(batch)])
    expected = append_children_reference(logits, width, draft_ids, frontier, nodes)
    actual = append_children(logits, width, draft_ids, frontier, nodes)
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.parents, expected.parents)
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    assert torch.randn(1).device.type == "cpu"


@pytest.mark.parametrize(
    "kind",
    ["plain", "ties", "equal", "zeros", "masked", "first part masked", "large", "half"],
)
def test_children_are_those_of_the_reference(kind: str) -> None:
    """Tokens, parents and scores, with a vocabulary that is no multiple of a part."""
    logits = make_logits(kind, (2, 3, 2 * BLOCK + 37))
    assert_equal(logits, 4, torch.randperm(logits.shape[-1]), count=7)


@pytest.mark.parametrize("vocabulary", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1])
def test_any_vocabulary(vocabulary: int) -> None:
    """From one token, all of which are children, to one more than a part."""
    for width in sorted({1, min(10, vocabulary)}):
        assert_equal(torch.randn(1, 2, vocabulary), width, None, count=2)


def test_the_root_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first level of a chain."""
    assert_equal(torch.randn(3, 1, 100), 1, None, count=1)


def test_normalised_logits_stay() -> None:
    """log q in place of logits gives the same children and scores."""
    logits = torch.randn(2, 2, 300)
    nodes = make_nodes(2, 3)
    frontier = torch.tensor([[1, 2], [0, 2]])
    raw = append_children(logits, 3, None, frontier, nodes)
    normalised = append_children(logits.log_softmax(-1), 3, None, frontier, nodes)
    assert torch.equal(raw.tokens, normalised.tokens)
    torch.testing.assert_close(raw.scores, normalised.scores)


MODULE = "spectrain.kernels.append_children"
LONG = dict.fromkeys(
    (
        "keys_ptr",
        "draft_ids_ptr",
        "frontier_ptr",
        "tokens_ptr",
        "parents_ptr",
        "new_tokens_ptr",
        "new_parents_ptr",
    ),
    "*i64",
)
FLOATS = dict.fromkeys(("maxima_ptr", "masses_ptr", "scores_ptr", "new_scores_ptr"), "*fp32")


@pytest.mark.sweep(2, free=("width", "dtype"))
@pytest.mark.parametrize("width", [1, 4, 10, 16])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_parts_fit_sm90(width: int, dtype: str) -> None:
    """A part spills nothing and reads 16 bytes at a time."""
    types = {**LONG, **FLOATS, "logits_ptr": dtype}
    constants = {"WIDTH": width, "BLOCK": BLOCK}
    request = aot.Request(
        MODULE, "_likeliest_kernel", types, constants, 8, 3, multiples=("vocabulary",)
    )
    usage = aot.compile_for(request)
    assert usage.stack == 0 and usage.wide > 0, usage


@pytest.mark.sweep(1, free=("width",))
@pytest.mark.parametrize("width", [1, 4, 10, 16])
def test_the_merge_fits_sm90(width: int) -> None:
    """Merging the parts of a vocabulary of 128,256 tokens spills nothing."""
    parts = -(-128256 // BLOCK)
    constants = {
        "WIDTH": width,
        "BLOCK_P": 64,
        "BLOCK_C": 1 << (parts * width - 1).bit_length(),
        "BLOCK_M": 64,
    }
    request = aot.Request(MODULE, "_append_children_kernel", {**LONG, **FLOATS}, constants, 4, 3)
    usage = aot.compile_for(request)
    assert usage.stack == 0, usage


class TableRollout(Rollout):
    """A rollout whose logits after a token are a row of a table [V, V]."""

    def __init__(self, table: Tensor, root: Tensor) -> None:
        self.table, self.root = table, root
        self.draft_ids = torch.arange(len(table)).flip(0)
        self.gives_logits = False

    def request_logits(self) -> bool:
        self.gives_logits = True
        return True

    def start(self) -> Tensor:
        return self._outputs_after(self.root[:, None])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._outputs_after(tokens)

    def _outputs_after(self, tokens: Tensor) -> Tensor:
        logits = self.table[tokens]
        return logits if self.gives_logits else logits.log_softmax(-1)


@pytest.mark.parametrize("builder", [Chain(3), Eagle2(3, 10, 3)], ids=["chain", "eagle2"])
def test_a_tree_is_that_without_kernels(
    builder: TreeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of two texts from logits that kernels normalise are those from log q by torch."""
    root = torch.tensor([3, 8])
    table = torch.randn(60, 60) * 3
    prefix = SimpleNamespace(root=root)
    trees = []
    for mode in ("triton", "reference"):
        monkeypatch.setenv("SPECTRAIN_KERNELS", mode)
        rollout = TableRollout(table, root)
        trees.append(builder.expand(prefix, rollout))  # type: ignore[arg-type]
        assert rollout.gives_logits == (mode == "triton")
    by_kernels, by_torch = trees
    assert torch.equal(by_kernels.tokens, by_torch.tokens)
    assert torch.equal(by_kernels.parents, by_torch.parents)
    assert by_kernels.scores is not None and by_torch.scores is not None
    torch.testing.assert_close(by_kernels.scores, by_torch.scores)
