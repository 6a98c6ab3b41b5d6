"""The faster matrix product on a CPU is the same product, and gives gradients where they are
required.
"""

import pytest
import torch
import torch.nn.functional as F

from spectrain.kernels.onednn import fast_linear


@pytest.mark.sweep(10)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "out"), [(1, 1, 1), (7, 16, 5), (130, 33, 96), (0, 4, 3), (3, 4, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_onednn_product_equals_torch(
    dtype: torch.dtype, rows: int, width: int, out: int, bias: bool
) -> None:
    """Products are equal for any dtype, also for no rows, with operands that are transposed
    views.
    """
    x = torch.randn(width, rows, dtype=dtype).t()
    weight = torch.randn(width, out, dtype=dtype).t()
    added = torch.randn(out, dtype=dtype) if bias else None
    for left in (x, x.contiguous()):
        for right in (weight, weight.contiguous()):
            expected = F.linear(
                left.double(), right.double(), None if added is None else added.double()
            ).to(dtype)
            torch.testing.assert_close(
                fast_linear(left, right, added),
                expected,
                rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-4,
                atol=1e-4 if dtype != torch.bfloat16 else 1e-1,
            )


@pytest.mark.parametrize("learns", range(3))
def test_onednn_gradients_reach_trainable_inputs(learns: int) -> None:
    """The result has the gradients of the plain product where gradients are required, and none
    where they are not.
    """
    operands = [torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)]
    operands[learns].requires_grad_()
    (result,) = torch.autograd.grad(fast_linear(*operands).square().sum(), operands[learns])
    (expected,) = torch.autograd.grad(F.linear(*operands).square().sum(), operands[learns])
    torch.testing.assert_close(result, expected)
    with torch.no_grad():
        assert not fast_linear(*operands).requires_grad
