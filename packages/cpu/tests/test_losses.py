"""Compiled kernels of a loss over the vocabulary give what torch gives."""

import math

import pytest
import torch

from spectrain.kernels.row_kl import TargetLogits, row_kl_reference
from spectrain_cpu.losses import argmax_logits, compare_logits, has_loss_kernels


@pytest.mark.parametrize("own_mass", [False, True])
def test_cpu_kernels_equal_torch(own_mass: bool) -> None:
    """Results for bfloat16 products are equal on vocabularies that are not full blocks; a row
    without weight adds nothing.
    """
    scale = 0.7
    weight = torch.tensor([1.0, 0.0, 2.5])
    product, products = (3 * torch.randn(3, vocab).bfloat16() for vocab in (300, 700))
    target = TargetLogits(
        products[:, :300], 1.3, None, products.float().logsumexp(-1) if own_mass else None
    )
    if not has_loss_kernels(product):
        pytest.skip("no kernels of a CPU")
    actual = product.clone()
    expected = product.float()
    outputs = compare_logits(actual, target, weight, scale, True)
    wide = target._replace(products=target.products.float())
    arguments = wide.products, None, weight, scale, None, True, *wide[1:]
    torch.testing.assert_close(
        outputs, row_kl_reference(expected, *arguments), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(actual.float(), expected, atol=1e-6, rtol=2**-8)
    logits = TargetLogits(products, scale)
    best, log_z = argmax_logits(logits, with_log_z=True)
    torch.testing.assert_close(
        (best, log_z), (products.argmax(-1), (scale * products.float()).logsumexp(-1))
    )
    # A number that is not finite makes the gradient so, and the step is left out.
    product[2, 5] = math.nan
    assert (
        not compare_logits(product, target, weight, scale, True)[0].isfinite().all()
        and not product[2].isfinite().any()
    )
