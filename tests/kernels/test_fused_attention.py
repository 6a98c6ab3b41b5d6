"""Fused attention without cuDNN's plans: the same numbers, and on a planned GPU no path stores
all scores.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectrain.drafters.layers import unrolled_attention as unrolled
from spectrain.drafters.layers.chunked_attention import attend_chunks
from spectrain.drafters.layers.unrolled_attention import is_mergeable, unrolled_attention
from spectrain.kernels.fused_attention import sdpa_without_cudnn, supports_documents
from spectrain.kernels.tree_attention import tree_attention_reference
from spectrain.models import attention
from spectrain.models.attention import causal_attention
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.positions import uncached_visibility
from tests.memory_tracker import MemoryTracker

GPU = torch.device("cuda", 0)
HEADS = 8
KEY_HEADS = 2
LENGTH = 96
SIZE = 16


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_path_equals_torch(dtype: torch.dtype, masked: bool) -> None:
    """Whether heads are repeated for a kernel or grouped by it, values and gradients are
    torch's.
    """
    q, k, v = (torch.randn(2, heads, 9, 8, dtype=dtype).requires_grad_() for heads in (4, 2, 2))
    options: dict[str, Any] = {"is_causal": not masked, "scale": 0.3}
    mask = torch.rand(9, 9) < 0.5 if masked else None
    mask = None if mask is None else mask | torch.eye(9, dtype=torch.bool)
    result = sdpa_without_cudnn(q, k, v, mask, **options)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    weight = torch.randn_like(result)
    for item, other in zip(
        *(torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (result, expected))
    ):
        torch.testing.assert_close(item, other, rtol=tolerance, atol=tolerance)


class OperationRecorder(TorchDispatchMode):
    """Records which operations run, and the most elements that one of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.most = 0

    @property
    def names(self) -> set[str]:
        return {*self.count}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count[func.name()] += 1
        self.most = max(
            [self.most, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))]
        )
        return out


def attend_over_trees(q: Tensor, k: Tensor, v: Tensor, chunk: int | None = None) -> Tensor:
    length = q.shape[2]
    tree = torch.ones(1, length, length, dtype=torch.bool, device=q.device).tril()
    visibility = uncached_visibility(tree, torch.arange(length, device=q.device)[None], None)
    return tree_attention_reference(
        q, k, v, visibility if chunk is None else visibility.in_chunks(chunk), 0.3
    )


@torch.no_grad()
def attend_drafting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    indices = torch.arange(LENGTH, device=q.device)
    full = [(slice(0, LENGTH), slice(0, LENGTH))]
    return attend_chunks((q, k, v), (k, v), full, (indices, torch.zeros_like(indices)))


def attend_unrolled(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    return unrolled_attention(q, [k] * 3, [v] * 3, None, AttentionOptions(window=window))


PATHS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "causal": causal_attention,
    "causal, window": partial(causal_attention, options=AttentionOptions(window=20)),
    "packed": partial(causal_attention, lengths=(40, 56)),
    "unrolled": attend_unrolled,
    "unrolled, window": partial(attend_unrolled, window=20),
    "trees": attend_over_trees,
    "trees in chunks": partial(attend_over_trees, chunk=32),
    "drafting places": attend_drafting,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", PATHS)
def test_no_path_stores_all_scores(path: str, dtype: torch.dtype) -> None:
    """Forward and backward on a planned GPU, counted on tensors without data: nothing is as large
    as [H, T, T], and no plan is made for the shape. Softcaps and sinks outside the tree kernel are
    not among these paths: torch fuses neither."""
    with MemoryTracker(GPU), OperationRecorder() as recorder:
        q, k, v = (
            torch.empty(1, heads, LENGTH, SIZE, device=GPU, dtype=dtype)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        for part in (q, k, v):
            part.requires_grad_()
        attended = PATHS[path](q, k, v)
        # all but drafting places, whose forward is run again in the backward pass
        if attended.requires_grad:
            attended.sum().backward()
    assert recorder.most < HEADS * LENGTH * LENGTH, recorder.names
    assert any("attention" in name for name in recorder.names) and not any(
        "cudnn" in name for name in recorder.names
    )


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's flash attention on a CPU, in its own words: a stand-in by the definition, so that
    torch's own schema and derivative are what calls it."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", standing_in, "CPU")
    library.impl("_flash_attention_backward", standing_in_backward, "CPU")
    for module in (attention, unrolled):
        monkeypatch.setattr(module, "supports_documents", lambda q, v: True)
    yield
    library._destroy()


@pytest.mark.parametrize(
    ("size", "capability", "hip", "taken"),
    [
        (128, (9, 0), None, True),
        (80, (8, 6), None, True),
        (512, (9, 0), None, False),
        (100, (9, 0), None, False),
        (128, (7, 5), None, False),
        (128, (9, 4), "6.4", False),
    ],
)
def test_flash_attention_is_called_where_available(
    size: int,
    capability: tuple[int, int],
    hip: str | None,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads of 512, of a size that 8 does not divide, GPUs before Ampere and AMD's go the way
    that stores what it must.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    for dtype in (torch.bfloat16, torch.float32):
        q: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 8, 16, size))
        assert supports_documents(q, q) == is_mergeable(q, q) == (taken and dtype == torch.bfloat16)


def score_documents(
    q: Tensor,
    k: Tensor,
    starts: Tensor | None,
    scale: float | None,
    back: int | None,
    ahead: int | None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield scores [H, T, T] of every document of queries [T, H, D] and keys [T, K, D], -inf
    where nothing is visible.
    """
    ends = [0, len(q)] if starts is None else starts.tolist()
    for first, last in itertools.pairwise(ends):
        index = torch.arange(last - first)
        part = slice(first, last)
        keys = k[part].repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("thd,shd->hts", q[part], keys) * (
            q.shape[-1] ** -0.5 if scale is None else scale
        )
        distance = index[:, None] - index
        visible = (distance >= -(ahead or 0)) & ((distance <= back) if back is not None else True)
        yield part, scores.masked_fill(~visible, float("-inf"))


def standing_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    starts_k: Tensor | None,
    most: int,
    most_k: int,
    dropout: float,
    is_causal: bool,
    debug: bool,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    assert (
        is_causal and not dropout and (starts is None or most == most_k == int(starts.diff().max()))
    )
    if q.dim() == 4:
        rows = [
            standing_in(*row, None, None, most, most, 0.0, True, False, scale, window_size_left)
            for row in zip(q, k, v)
        ]
        return *(torch.stack(parts) for parts in zip(*(row[:2] for row in rows))), *rows[0][2:]
    out = torch.empty_like(q)
    logs = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for part, scores in score_documents(q, k, starts, scale, window_size_left, window_size_right):
        values = v[part].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[part] = torch.einsum("hts,shd->thd", scores.softmax(-1), values)
        logs[:, part] = scores.logsumexp(-1)
    nothing = torch.zeros(2)
    return out, logs, nothing, nothing, nothing


def standing_in_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    starts: Tensor | None,
    starts_k: Tensor | None,
    most: int,
    most_k: int,
    dropout: float,
    is_causal: bool,
    seed: Tensor,
    offset: Tensor,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """P = exp(S - L), dS = P (dP - rowsum(dO O)), from nothing but the output and its
    log-sum-exps.
    """
    if q.dim() == 4:
        options = None, None, most, most, 0.0, True, seed, offset, scale, window_size_left
        rows = [standing_in_backward(*row, *options) for row in zip(grad, q, k, v, out, logs)]
        return tuple(torch.stack(parts) for parts in zip(*rows))
    groups = q.shape[1] // k.shape[1]
    size = q.shape[-1]
    result = [torch.zeros_like(x) for x in (q, k, v)]
    for part, scores in score_documents(q, k, starts, scale, window_size_left, window_size_right):
        keys, values = (x[part].repeat_interleave(groups, 1) for x in (k, v))
        chances = (scores - logs[:, part, None]).exp()
        of_chances = (
            torch.einsum("thd,shd->hts", grad[part], values)
            - (grad[part] * out[part]).sum(-1).t()[..., None]
        )
        of_scores = chances * of_chances * (size**-0.5 if scale is None else scale)
        result[0][part] = torch.einsum("hts,shd->thd", of_scores, keys)
        result[1][part] = (
            torch.einsum("hts,thd->shd", of_scores, q[part]).unflatten(1, (-1, groups)).sum(2)
        )
        result[2][part] = (
            torch.einsum("hts,thd->shd", chances, grad[part]).unflatten(1, (-1, groups)).sum(2)
        )
    return tuple(result)


Attending = Callable[[Tensor, Tensor, Tensor], Tensor]
DOCUMENTS: dict[str, Attending] = {
    "packed": partial(causal_attention, lengths=(5, 1, 14)),
    "packed, window": partial(
        causal_attention, lengths=(5, 1, 14), options=AttentionOptions(0.4, 6)
    ),
    "window": partial(causal_attention, options=AttentionOptions(window=6)),
    "unrolled": lambda q, k, v: unrolled_attention(
        q, [k, 2 * k, k - 1], [v, v + 1, v * v], (5, 1, 14), AttentionOptions(scale=0.3)
    ),
    "unrolled, wide window": lambda q, k, v: unrolled_attention(
        q, [k, 2 * k], [v, v + 1], (5, 1, 14), AttentionOptions(window=15)
    ),
}


@pytest.mark.parametrize("path", DOCUMENTS)
def test_single_launch_equals_a_launch_per_document(
    path: str, request: pytest.FixtureRequest
) -> None:
    """Values and gradients of grouped heads are equal, by what a GPU launches and by what a CPU
    runs.
    """
    torch.manual_seed(0)
    batch = 2 if path == "window" else 1
    parts = [torch.randn(batch, heads, 20, 8, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(batch, 4, 20, 8)
    result = []
    for fixture in (None, "flash"):
        if fixture is not None:
            request.getfixturevalue(fixture)
        with OperationRecorder() as recorder:
            out = DOCUMENTS[path](*parts)
            result.append((out, *torch.autograd.grad((out * weight).sum(), parts)))
        assert ("aten::_flash_attention_forward" in recorder.names) == (fixture is not None)
    for item, other in zip(*result):
        torch.testing.assert_close(item, other, rtol=1e-5, atol=1e-5)


def test_documents_take_a_single_launch() -> None:
    """On a planned GPU eight of them launch what one does, and nothing joins their outputs or
    gradients.
    """
    counts = []
    for lengths in ((96,), (12,) * 8):
        with MemoryTracker(GPU), OperationRecorder() as recorder:
            q, k, v = (
                torch.empty(
                    1, heads, LENGTH, SIZE, device=GPU, dtype=torch.bfloat16, requires_grad=True
                )
                for heads in (8, 2, 2)
            )
            for attended in (
                causal_attention(q, k, v, lengths),
                unrolled_attention(q, [k] * 3, [v] * 3, lengths),
            ):
                attended.sum().backward()
        counts.append(
            sum(count for name, count in recorder.count.items() if "flash_attention" in name)
        )
    assert counts == [4, 4], recorder.count


def test_grouped_heads_with_a_mask_store_all_scores() -> None:
    """The proof can fail: torch without its kernels makes [H, T, T]."""
    with MemoryTracker(GPU), OperationRecorder() as recorder:
        q, k = (torch.empty(1, heads, LENGTH, SIZE, device=GPU) for heads in (HEADS, KEY_HEADS))
        (q @ k.repeat_interleave(HEADS // KEY_HEADS, 1).transpose(-1, -2)).softmax(-1)
    assert recorder.most >= HEADS * LENGTH * LENGTH
