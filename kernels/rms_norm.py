"""The RMS norm of a row, as kernels compute it whose programs hold whole rows.

Shapes: D width. The reference in torch comes first.
"""

from __future__ import annotations

from torch import Tensor

from .dispatch import jit, tl


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight in the type of x, computed in float32."""
    wide = x.float()
    scale = (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.float()).to(x.dtype)


@jit
def norm_row(  # type: ignore[no-untyped-def]
    x,
    weight_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the norm of a float32 row [BLOCK], which is 0 from WIDTH on, times the weights."""
    dims = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + dims, mask=dims < WIDTH, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight


def count_row_warps(block: int) -> int:
    """Return the warps of a program that holds rows of so many numbers: 16 numbers a thread, from 4
    to 16 warps."""
    return min(16, max(4, block // 512))
