"""Kernels of a loss over the vocabulary on a CPU, compiled by Numba: KL(p || q) with its gradient,
and the most likely entry.

Shapes: r rows, V vocabulary, K stored tokens of a target. Tensors are passed by address; products
are bfloat16. A row stays in the cache while it is read for its largest entry, for its exponentials
and for its gradient, which overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from torch import Tensor

from spectrain.kernels.row_kl import TargetLogits

from .available import has_cpu_kernels
from .vectors import (
    WORD,
    compile_cached,
    intrinsic,
    narrow,
    to_floats,
    to_halves,
    to_longs,
    widen,
)

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
# adding it leaves a float32 rounded to an integer, in the low bits of the sum
ROUNDER = np.float32(1.5 * 2.0**23)
LOWEST = np.float32(-87.0)  # exp of less is below the smallest normal float32
# Coefficients of e^r, |r| <= ln(2) / 2, of Cephes' expf.
TERMS = tuple(
    map(
        np.float32,
        (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5),
    )
)
BLOCK = 256  # entries that are compared at one time
ONE = np.float32(1)
ZERO = np.float32(0)
MAX_THREADS = 4
"""Threads up to which the kernels, which run on one, are faster than torch on all."""


def _compile_sum(function: Any) -> Any:
    """Compile a function of sums, which vectors may add in any order, into those that call it."""
    return numba.njit(
        function, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "nnan"}
    )


def _compile_exact(function: Any) -> Any:
    return numba.njit(function, error_model="numpy", fastmath={"contract"})


@intrinsic
def _scale_by_power(context: Any, value: Any, shifted: Any) -> Any:
    """Return value 2^n, where `shifted` is n + ROUNDER."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = builder.shl(builder.bitcast(args[1], WORD), WORD(23))
        return builder.bitcast(
            builder.add(builder.bitcast(args[0], WORD), exponent), ir.FloatType()
        )

    return types.float32(types.float32, types.float32), generate


@_compile_exact
def exp_negative(x: Any) -> Any:
    """Return e^x of float32 numbers up to 0."""
    shifted = x * LOG2_E + ROUNDER
    n = shifted - ROUNDER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    series = TERMS[0]
    series = series * r + TERMS[1]
    series = series * r + TERMS[2]
    series = series * r + TERMS[3]
    series = series * r + TERMS[4]
    series = series * r + TERMS[5]
    value = _scale_by_power(series * (r * r) + r + ONE, shifted)
    return value if x > LOWEST else ZERO


@intrinsic
def _order(context: Any, number: Any) -> Any:
    """Return an integer that sorts as this bfloat16 does; NaN is the largest."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = ir.IntType(16)
        sign = builder.ashr(args[0], half(15))
        return builder.xor(args[0], builder.and_(sign, half(0x7FFF)))

    return types.int16(number), generate


@_compile_exact
def _is_in(z: Any, first: int, order: Any) -> Any:
    """Tell whether one of BLOCK entries from the first on has this order; without an early exit,
    for vectors.
    """
    is_in = False
    for i in range(BLOCK):
        is_in |= _order(z[first + i]) == order
    return is_in


@_compile_exact
def _find_largest(z: Any) -> Any:
    """Return the first of the largest products z [V]."""
    largest = _order(z[0])
    for i in range(len(z)):
        order = _order(z[i])
        largest = order if order > largest else largest
    start = 0
    while start + BLOCK <= len(z) and not _is_in(z, start, largest):
        start += BLOCK
    for i in range(start, len(z)):
        if _order(z[i]) == largest:
            return i
    return 0


@_compile_sum
def _exponentials(z: Any, largest: Any, scale: Any, powers: Any) -> Any:
    """Store e^(scale (z - largest)) [V], and return their sum."""
    total = ZERO
    for i in range(len(z)):
        powers[i] = exp_negative((widen(z[i]) - largest) * scale)
        total += powers[i]
    return total


@_compile_sum
def _divergence(
    powers: Any,
    target: Any,
    target_largest: Any,
    target_scale: Any,
    z: Any,
    largest: Any,
    scale: Any,
) -> Any:
    """Return the sum of e_i ((t_i - largest t) - (z_i - largest z)) over scaled products."""
    total = ZERO
    for i in range(len(z)):
        total += powers[i] * (
            (widen(target[i]) - target_largest) * target_scale - (widen(z[i]) - largest) * scale
        )
    return total


@_compile_exact
def _store_gradient(
    z: Any, powers: Any, factor: Any, target_powers: Any, target_factor: Any
) -> None:
    """Overwrite the products by factor e^z - target factor e^t."""
    for i in range(len(z)):
        z[i] = narrow(powers[i] * factor - target_powers[i] * target_factor, z[i])


@compile_cached
def row_kl(
    products: int,
    target: int,
    log_z: int,
    weights: int,
    losses: int,
    best: int,
    labels: int,
    rows: int,
    vocab: int,
    scale: float,
    target_scale: float,
    with_grad: bool,
    scratch: int,
) -> None:
    """Compute `row_kl_reference` of products [r, V] and a target's products, or of its log-sum-exps
    where `log_z` is not 0.

    `scratch` holds 2 V float32.
    """
    factor = np.float32(scale)
    target_factor = np.float32(target_scale)
    row_weights = carray(to_floats(weights), (rows,))
    row_losses = carray(to_floats(losses), (rows,))
    row_best = carray(to_longs(best), (rows,))
    row_labels = carray(to_longs(labels), (rows,))
    powers = carray(to_floats(scratch), (vocab,))
    target_powers = carray(to_floats(scratch + 4 * vocab), (vocab,))
    for row in range(rows):
        z = carray(to_halves(products + 2 * row * vocab), (vocab,))
        t = carray(to_halves(target + 2 * row * vocab), (vocab,))
        row_best[row], row_labels[row] = _find_largest(z), _find_largest(t)
        weight = row_weights[row]
        largest = widen(z[row_best[row]])
        target_largest = widen(t[row_labels[row]])
        if weight == ZERO:
            row_losses[row] = ZERO
            if with_grad:
                z[:] = 0
            continue
        total = _exponentials(z, largest, factor, powers)
        target_total = _exponentials(t, target_largest, target_factor, target_powers)
        divergence = _divergence(
            target_powers, t, target_largest, target_factor, z, largest, factor
        )
        log_total = np.log(target_total)
        if log_z != 0:
            log_total = carray(to_floats(log_z), (rows,))[row] - target_largest * target_factor
        share = np.exp(-log_total)
        mass = target_total * share
        loss = divergence * share + mass * (np.log(total) - log_total)
        row_losses[row] = loss * weight
        if with_grad:
            slope = weight * factor if np.isfinite(loss) else loss
            _store_gradient(z, powers, slope * mass / total, target_powers, slope * share)


@compile_cached
def row_argmax(
    products: int, best: int, log_z: int, rows: int, vocab: int, scale: float, scratch: int
) -> None:
    """Store the most likely entries [r] of products [r, V] and, where `log_z` is not 0, their
    log-sum-exps; `scratch` holds V float32."""
    factor = np.float32(scale)
    row_best = carray(to_longs(best), (rows,))
    powers = carray(to_floats(scratch), (vocab,))
    for row in range(rows):
        z = carray(to_halves(products + 2 * row * vocab), (vocab,))
        row_best[row] = _find_largest(z)
        if log_z != 0:
            largest = widen(z[row_best[row]])
            carray(to_floats(log_z), (rows,))[row] = (
                np.log(_exponentials(z, largest, factor, powers)) + largest * factor
            )


def has_loss_kernels(products: Tensor, softcap: float | None = None) -> bool:
    """Return whether the kernels take these products [r, V] and logits that are capped so."""
    if (
        softcap is not None
        or products.dtype != torch.bfloat16
        or torch.get_num_threads() > MAX_THREADS
    ):
        return False
    return has_cpu_kernels(products.dtype, products.device)


def compare_logits(
    product: Tensor, target: TargetLogits, row_weight: Tensor, scale: float, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `row_kl_reference` of bfloat16 products [r, V], which are contiguous, with the
    logits of a target.
    """
    rows, vocab = product.shape
    target_products = target.products.to(product.dtype).contiguous()
    weight = row_weight.float().contiguous()
    log_z = None if target.log_z is None else target.log_z.float().contiguous()
    losses = weight.new_empty(rows)
    scratch = weight.new_empty(2 * vocab)
    best, labels = (torch.empty(rows, dtype=torch.int64) for _ in range(2))
    row_kl(
        product.data_ptr(),
        target_products.data_ptr(),
        0 if log_z is None else log_z.data_ptr(),
        weight.data_ptr(),
        losses.data_ptr(),
        best.data_ptr(),
        labels.data_ptr(),
        rows,
        vocab,
        scale,
        target.scale,
        with_grad,
        scratch.data_ptr(),
    )
    return losses, best, labels


def argmax_logits(target: TargetLogits, with_log_z: bool) -> tuple[Tensor, Tensor]:
    """Return the most likely entries [r] of bfloat16 logits, and their log-sum-exps where these
    are requested.
    """
    products = target.products.contiguous()
    rows, vocab = products.shape
    best = torch.empty(rows, dtype=torch.int64)
    log_z = torch.empty(rows)
    scratch = torch.empty(vocab)
    row_argmax(
        products.data_ptr(),
        best.data_ptr(),
        log_z.data_ptr() if with_log_z else 0,
        rows,
        vocab,
        target.scale,
        scratch.data_ptr(),
    )
    return best, log_z


class LossKernels(NamedTuple):
    """The two functions of a loss over the vocabulary."""

    compare: Callable[..., tuple[Tensor, Tensor, Tensor]]
    argmax: Callable[..., tuple[Tensor, Tensor]]


LOSS_KERNELS = LossKernels(compare_logits, argmax_logits)


def find_loss_kernels(products: Tensor, softcap: float | None) -> LossKernels | None:
    """Return the functions where `has_loss_kernels` is true."""
    return LOSS_KERNELS if has_loss_kernels(products, softcap) else None
