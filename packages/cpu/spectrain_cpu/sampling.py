"""Sampling by the Gumbel-max trick over a large vocabulary on a CPU, compiled by Numba: an argmax
of logits plus noise.

Shapes: R rows, V vocabulary. The noise is that of `counter.gumbel_noise`. Few tokens need its
logarithms: with u uniform, it is at most -log(u), and -log2(u) is at most a linear function of the
bits of u as a float32. The logarithms are computed for tokens whose bound reaches the largest sum.
A row whose two largest sums are so close that rounding decides is left to torch.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from spectrain.kernels.counter import gumbel_noise

from .available import are_kernels_loaded, working_memory
from .vectors import compile_cached, compile_inline, float_bits, to_floats, to_longs

BLOCK = 64  # tokens whose bounds are compared at a time
UNDECIDED = -1
BOUND_MARGIN = 0.01  # above the rounding errors of a bound
# a difference of two sums up to which rounding may decide, absolute and as a share of the sum
CLOSE = 1e-3
CLOSE_SHARE = 1e-5
UNIT = np.float32(2.0**-32)
LARGEST = np.float32(1 - 2**-24)
LN2 = np.float32(math.log(2))
MANTISSA = np.float32(2.0**-23)
EXPONENT_BIAS = np.float32(127)
MIN_VOCABULARY = 8192
"""Vocabulary from which on a kernel is worth its compilation."""


@compile_inline
def _uniform(key: Any, index: int) -> Any:
    """Return number `index` of a key as a uniform float32: Squares with four rounds, as in
    `counter.uniform_noise`.
    """
    half = np.uint64(32)
    start = np.uint64(index) * key
    other = start + key
    x = start * start + start
    x = (x >> half) | (x << half)
    x = x * x + other
    x = (x >> half) | (x << half)
    x = x * x + start
    x = (x >> half) | (x << half)
    x = (x * x + other) >> half
    return min((np.float32(x) + np.float32(0.5)) * UNIT, LARGEST)


@compile_inline
def _find_reaching(bounds: Any, size: int, least: Any, first: int) -> int:
    """Return the first index from `first` on whose bound is at least this, or `size`."""
    while first < size:
        if first % BLOCK == 0:
            count = 0
            part = bounds[first : first + BLOCK]
            for i in range(BLOCK):
                count += part[i] >= least
            if count == 0:
                first += BLOCK
                continue
        if bounds[first] >= least:
            return first
        first += 1
    return size


@compile_inline
def _sum_exactly(x: Any, temperature: Any, key: Any, index: int) -> float:
    """Return a logit over the temperature plus its noise, in float64."""
    return float(x[index] / temperature) - math.log(-math.log1p(-float(_uniform(key, index))))


@compile_inline
def _choose(x: Any, size: int, key: Any, temperature: Any, bounds: Any) -> int:
    padded = (size + BLOCK - 1) // BLOCK * BLOCK
    largest = np.full(BLOCK, -np.inf, np.float32)
    bounds[size:padded] = -np.inf
    # 1. Bounds of all sums.
    for start in range(0, size, BLOCK):
        part = bounds[start : start + BLOCK]
        count = min(BLOCK, size - start)
        for i in range(count):
            log2 = np.float32(float_bits(_uniform(key, start + i))) * MANTISSA - EXPONENT_BIAS
            part[i] = x[start + i] / temperature - log2 * LN2
        for i in range(BLOCK):
            largest[i] = part[i] if part[i] > largest[i] else largest[i]
    top = largest.max()
    if not np.isfinite(top):
        return UNDECIDED
    # 2. The sum of the token with the largest bound, which no token with a smaller bound reaches.
    total = _sum_exactly(x, temperature, key, _find_reaching(bounds, size, top, 0))
    least = np.float32(total - BOUND_MARGIN - 2 * CLOSE_SHARE * abs(total))
    # 3. The largest sum among the others, and the next.
    best = -np.inf
    second = -np.inf
    chosen = UNDECIDED
    index = _find_reaching(bounds, size, least, 0)
    while index < size:
        total = _sum_exactly(x, temperature, key, index)
        if total > best:
            best, second, chosen = total, best, index
        elif total > second:
            second = total
        index = _find_reaching(bounds, size, least, index + 1)
    return chosen if best - second > CLOSE + CLOSE_SHARE * abs(best) else UNDECIDED


@compile_cached
def _choose_rows(
    logits: int, keys: int, chosen: int, rows: int, size: int, temperature: float, scratch: int
) -> None:
    """Store the token [R] with the largest sum of noise and logits [R, V] over the temperature, in
    float32; UNDECIDED where rounding may decide or the sum is infinite. Keys are int64 [R];
    `scratch` holds V + BLOCK float32."""
    padded = (size + BLOCK - 1) // BLOCK * BLOCK
    bounds = carray(to_floats(scratch), (padded,))
    all_keys = carray(to_longs(keys), (rows,))
    tokens = carray(to_longs(chosen), (rows,))
    for row in range(rows):
        x = carray(to_floats(logits + 4 * row * size), (size,))
        tokens[row] = _choose(x, size, np.uint64(all_keys[row]), np.float32(temperature), bounds)


def can_choose_by_noise(logits: Tensor) -> bool:
    """Return whether a compiled kernel draws from these logits [..., V]."""
    if logits.device.type != "cpu" or logits.shape[-1] < MIN_VOCABULARY or not logits.numel():
        return False
    return os.environ.get("SPECTRAIN_KERNELS") != "reference" and are_kernels_loaded()


def choose_if_served(logits: Tensor, keys: Tensor, temperature: float) -> Tensor | None:
    """Compute `choose_by_noise` where the kernel draws from these logits."""
    return choose_by_noise(logits, keys, temperature) if can_choose_by_noise(logits) else None


def choose_by_noise(logits: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """Return the tokens [...] with the largest sums of logits [..., V] over the temperature and the
    Gumbel noise of keys [...]: those that torch finds in all sums."""
    size = logits.shape[-1]
    rows = logits.reshape(-1, size).float().contiguous()
    flat_keys = keys.reshape(-1).contiguous()
    assert len(rows) == len(flat_keys)
    chosen = torch.empty(len(rows), dtype=torch.int64)
    memory = working_memory((size + BLOCK) // 2 + 1)
    addresses = rows.data_ptr(), flat_keys.data_ptr(), chosen.data_ptr()
    _choose_rows(*addresses, len(rows), size, temperature, memory.data_ptr())
    for row in (chosen == UNDECIDED).nonzero()[:, 0].tolist():
        chosen[row] = (rows[row] / temperature + gumbel_noise(flat_keys[row], size)).argmax()
    return chosen.view(logits.shape[:-1])
