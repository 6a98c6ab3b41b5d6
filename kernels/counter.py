"""Counter-based random numbers: number i of a key depends on the key and i alone, in torch and
inside kernels.

A key of 64 bits is mixed from integers such as purpose, seed, sequence and position, each folded in
by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014); its numbers are those of Squares with
four rounds (Widynski, 2020), 32 bits each. So a run is reproducible for any batching. Integers and
uniform numbers are bit for bit the same on every device; Gumbel noise goes through logarithms and
is the same up to their rounding. Torch has no uint64 arithmetic and uses int64 instead: products
and sums wrap alike, right shifts are masked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .dispatch import jit, tl

WEYL = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MAX_UNIT = 1 - 2**-24  # the float32 below 1


def to_int64(number: int) -> int:
    """Convert an unsigned 64-bit number to the int64 of the same bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def fold_key(key: Tensor | int, part: Tensor | int) -> Tensor:
    """Derive the keys of `part` from `key`; int64, broadcast."""
    # A number is added as it is: a tensor of it would lie on the default device.
    is_host = isinstance(key, int) and isinstance(part, int)
    state: Any = (torch.as_tensor(key) if is_host else key) + part + to_int64(WEYL)
    for shift, factor in ((30, to_int64(MIX_1)), (27, to_int64(MIX_2))):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    odd: Tensor = (state ^ ((state >> 31) & ((1 << 33) - 1))) | 1  # Squares needs odd keys
    return odd


def fold_host(key: int, part: int) -> int:
    """Compute `fold_key` of integers on the host."""
    state = (key + part + WEYL) % (1 << 64)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        state = (state ^ (state >> shift)) * factor % (1 << 64)
    return to_int64((state ^ (state >> 31)) | 1)


def host_key(*parts: int) -> int:
    """Derive a key from integers, as an integer that kernels and `fold_key` can fold further."""
    key = 0
    for part in parts:
        key = fold_host(key, part)
    return key


def make_key(*parts: int | Tensor) -> Tensor:
    """Derive the key of these parts in this order; int64, broadcast, on the device of the
    tensors.
    """
    num_host = next(
        (index for index, part in enumerate(parts) if isinstance(part, Tensor)), len(parts)
    )
    key: int | Tensor = host_key(*(part for part in parts[:num_host] if isinstance(part, int)))
    for part in parts[num_host:]:
        key = fold_key(key, part)
    return torch.as_tensor(key) if isinstance(key, int) else key


def random_bits(key: Tensor, counter: Tensor) -> Tensor:
    """Return number `counter` of `key`, broadcast: integers from 0 to 2^32 - 1 in int64, by
    Squares with four rounds.
    """
    start = counter * key
    other = start + key
    x = start
    for step, summand in enumerate((start, other, start, other)):
        x = (x * x).add_(summand)
        high = (x >> 32).bitwise_and_(0xFFFFFFFF)
        x = high if step == 3 else high.bitwise_or_(x.bitwise_left_shift_(32))
    return x


def to_unit(bits: Tensor) -> Tensor:
    """Map integers below 2^32 to float32 in (0, 1); small ones retain all 32 bits."""
    return bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=MAX_UNIT)


def host_uniform(key: int, counter: int) -> float:
    """Compute `uniform_noise` of integers on the host, bit for bit."""
    key %= 1 << 64
    start = counter * key % (1 << 64)
    other = (start + key) % (1 << 64)
    x = start
    for summand in (start, other, start):
        x = (x * x + summand) % (1 << 64)
        x = x >> 32 | (x << 32) % (1 << 64)
    bits = ((x * x + other) % (1 << 64)) >> 32
    return min(float((np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32)), MAX_UNIT)


def uniform_noise(key: Tensor, counter: Tensor) -> Tensor:
    """Return number `counter` of `key`, broadcast, as uniform float32 in (0, 1)."""
    return to_unit(random_bits(key, counter))


def gumbel_noise(key: Tensor, size: int) -> Tensor:
    """Return the first `size` numbers of `key` [...] as standard Gumbel noise [..., size].

    It is -log(-log1p(-u)), so that large noise, which decides the argmax, comes from small u, which
    has fine steps: up to 22.9.
    """
    counter = torch.arange(size, device=key.device)
    return uniform_noise(key[..., None], counter).neg_().log1p_().neg_().log_().neg_()


@jit
def fold_in_kernel(key, part):  # type: ignore[no-untyped-def]
    """Compute `fold_key` in uint64."""
    state = tl.cast(key, tl.uint64) + tl.cast(part, tl.uint64) + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return (state ^ (state >> 31)) | 1


@jit
def bits_in_kernel(key, counter):  # type: ignore[no-untyped-def]
    """Compute `random_bits` in uint32."""
    key = tl.cast(key, tl.uint64)
    start = tl.cast(counter, tl.uint64) * key
    other = start + key
    x = start * start + start
    x = (x >> 32) | (x << 32)
    x = x * x + other
    x = (x >> 32) | (x << 32)
    x = x * x + start
    x = (x >> 32) | (x << 32)
    return ((x * x + other) >> 32).to(tl.uint32)


@jit
def unit_in_kernel(bits):  # type: ignore[no-untyped-def]
    """Compute `to_unit`."""
    return tl.minimum(
        (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375
    )


@jit
def uniform_in_kernel(key, counter):  # type: ignore[no-untyped-def]
    """Compute `uniform_noise`."""
    return unit_in_kernel(bits_in_kernel(key, counter))


@jit
def gumbel_in_kernel(key, counter):  # type: ignore[no-untyped-def]
    """Return number `counter` of `gumbel_noise`. log1p(-u) = log(w) u / (1 - w) with w = 1 - u
    as rounded (Kahan).
    """
    u = uniform_in_kernel(key, counter)
    rest = 1 - u
    gap = 1 - rest
    exponential = tl.where(gap == 0, u, -tl.log(rest) * u / tl.where(gap == 0, 1, gap))
    return -tl.log(exponential)
