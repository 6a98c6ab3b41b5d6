"""Fused attention without cuDNN's plans: the same numbers, and on a planned GPU no path stores all scores."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectrain.drafters.shared.chunks import attend_chunks
from spectrain.kernels.fused_attention import unplanned
from spectrain.kernels.tree_attention import tree_attention_reference
from spectrain.models.attention import causal_attention, trees_alone, unrolled_attention
from spectrain.models.kv_cache import Rules
from spectrain.planning.memory_tracker import MemoryTracker

GPU = torch.device("cuda", 0)
HEADS, KEY_HEADS, LENGTH, SIZE = 8, 2, 96, 16


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_gpu_runs_equals_torch(dtype: torch.dtype, masked: bool) -> None:
    """Whether heads are repeated for a kernel or grouped by it, values and gradients are torch's."""
    q, k, v = (torch.randn(2, heads, 9, 8, dtype=dtype).requires_grad_() for heads in (4, 2, 2))
    options: dict[str, Any] = {"is_causal": not masked, "scale": 0.3}
    mask = torch.rand(9, 9) < 0.5 if masked else None
    mask = None if mask is None else mask | torch.eye(9, dtype=torch.bool)
    found = unplanned(q, k, v, mask, **options)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    weight = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (found, expected))):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class Made(TorchDispatchMode):
    """What operations run, and the most elements that one of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func.name())
        self.most = max([self.most, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


def over_trees(q: Tensor, k: Tensor, v: Tensor, chunk: int | None = None) -> Tensor:
    length = q.shape[2]
    tree = torch.ones(1, length, length, dtype=torch.bool, device=q.device).tril()
    seen = trees_alone(tree, torch.arange(length, device=q.device)[None], None)
    return tree_attention_reference(q, k, v, seen if chunk is None else seen.in_chunks(chunk), 0.3)


@torch.no_grad()
def drafting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(LENGTH, device=q.device)
    whole = [(slice(0, LENGTH), slice(0, LENGTH))]
    return attend_chunks((q, k, v), (k, v), whole, (places, torch.zeros_like(places)))


def unrolled(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    return unrolled_attention(q, [k] * 3, [v] * 3, None, Rules(window=window))


PATHS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "causal": causal_attention,
    "causal, window": partial(causal_attention, window=20),
    "packed": partial(causal_attention, lengths=(40, 56)),
    "unrolled": unrolled,
    "unrolled, window": partial(unrolled, window=20),
    "trees": over_trees,
    "trees in chunks": partial(over_trees, chunk=32),
    "drafting places": drafting,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", PATHS)
def test_no_path_stores_all_scores(path: str, dtype: torch.dtype) -> None:
    """Forward and backward on a planned GPU, counted on tensors without data: nothing is as large as [H, T, T], and no plan is
    made for the shape. Softcaps and sinks outside the tree kernel are not among these paths: torch fuses neither."""
    with MemoryTracker(GPU), Made() as made:
        q, k, v = (torch.empty(1, heads, LENGTH, SIZE, device=GPU, dtype=dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
        for part in (q, k, v):
            part.requires_grad_()
        attended = PATHS[path](q, k, v)
        if attended.requires_grad:  # all but drafting places, whose forward is run again in the backward pass
            attended.sum().backward()
    assert made.most < HEADS * LENGTH * LENGTH, made.names
    assert any("attention" in name for name in made.names) and not any("cudnn" in name for name in made.names)


def test_a_mask_with_grouped_heads_would_store_them() -> None:
    """The proof can fail: torch without its kernels makes [H, T, T]."""
    with MemoryTracker(GPU), Made() as made:
        q, k = (torch.empty(1, heads, LENGTH, SIZE, device=GPU) for heads in (HEADS, KEY_HEADS))
        (q @ k.repeat_interleave(HEADS // KEY_HEADS, 1).transpose(-1, -2)).softmax(-1)
    assert made.most >= HEADS * LENGTH * LENGTH
