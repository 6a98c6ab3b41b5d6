"""Numbers from a counter: torch, kernels and plain integers agree, and the numbers are as random
as they should be.
"""

import pytest
import torch
from torch import Tensor

from spectrain.kernels.counter import (
    bits_in_kernel,
    fold_in_kernel,
    fold_key,
    gumbel_in_kernel,
    gumbel_noise,
    host_key,
    host_uniform,
    make_key,
    random_bits,
    to_unit,
    uniform_noise,
    unit_in_kernel,
)

triton = pytest.importorskip(
    "triton", reason="triton is not installed, so there are no kernels to interpret"
)
tl = triton.language

PARTS = (0, 1, 2, -1, -7, 2**31, 2**40 + 3, -(2**63), 2**63 - 1)
WORD = 1 << 64


def python_key(*parts: int) -> int:
    """The key by the definition of SplitMix64, in unbounded integers."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) % WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB % WORD
        state = (state ^ state >> 31) | 1
    return state


def python_bits(key: int, counter: int) -> int:
    """Squares by its definition, in unbounded integers."""
    x = y = counter * key % WORD
    z = (y + key) % WORD
    for summand in (y, z, y):
        x = (x * x + summand) % WORD
        x = (x >> 32 | x << 32) % WORD
    return (x * x + z) % WORD >> 32


def python_signed(number: int) -> int:
    return number - WORD if number >= WORD // 2 else number


def chi_squared_excess(counts: Tensor, expected: Tensor) -> float:
    """Return by how many standard deviations chi-squared exceeds its mean; cells that expect
    less than 5 are pooled.
    """
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    free = len(counts) - 1
    return float(((counts - expected).square() / expected).sum() - free) / (2 * free) ** 0.5


@triton.jit
def _numbers_kernel(
    key, parts_ptr, keys_ptr, bits_ptr, unit_ptr, noise_ptr, num_numbers, BLOCK: tl.constexpr
):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    row_key = fold_in_kernel(key, tl.load(parts_ptr + row))
    tl.store(keys_ptr + row, row_key.to(tl.int64))
    index = tl.arange(0, BLOCK)
    indices = row * num_numbers + index
    inside = index < num_numbers
    result = bits_in_kernel(row_key, index)
    tl.store(bits_ptr + indices, result.to(tl.int64), mask=inside)
    tl.store(unit_ptr + indices, unit_in_kernel(result), mask=inside)
    tl.store(noise_ptr + indices, gumbel_in_kernel(row_key, index), mask=inside)


def test_torch_equals_integers() -> None:
    """Keys and numbers in torch, and keys on the host, are what unbounded integers give."""
    for part in PARTS:
        expected = python_signed(python_key(5, part))
        assert host_key(5, part) == expected
        assert (
            int(make_key(5, part))
            == int(make_key(5, torch.tensor(part)))
            == int(fold_key(host_key(5), torch.tensor(part)))
            == expected
        )
    counters = torch.tensor([0, 1, 2, 1000, 2**31, -1])
    for part in PARTS:
        expected_bits = [
            python_bits(python_key(part), counter % WORD) for counter in counters.tolist()
        ]
        assert random_bits(make_key(part), counters).tolist() == expected_bits
        assert uniform_noise(make_key(part), counters[:-1]).tolist() == [
            host_uniform(host_key(part), counter) for counter in counters[:-1].tolist()
        ]


def test_kernel_equals_torch() -> None:
    """In a kernel, keys, integers and uniform numbers are bit for bit those of torch, Gumbel
    noise to 1e-6.
    """
    parts = torch.tensor(PARTS)
    size = 3000
    keys = torch.empty_like(parts)
    integers = torch.empty(len(parts), size, dtype=torch.int64)
    units = torch.empty(len(parts), size)
    noise = torch.empty(len(parts), size)
    _numbers_kernel[(len(parts),)](
        host_key(3, 7), parts, keys, integers, units, noise, size, BLOCK=4096
    )
    expected = random_bits(make_key(3, 7, parts)[:, None], torch.arange(size))
    assert (
        torch.equal(keys, make_key(3, 7, parts))
        and torch.equal(integers, expected)
        and torch.equal(units, to_unit(expected))
    )
    torch.testing.assert_close(noise, gumbel_noise(keys, size), atol=1e-6, rtol=1e-6)


@triton.jit
def _unit_kernel(bits_ptr, unit_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, BLOCK)
    tl.store(unit_ptr + index, unit_in_kernel(tl.load(bits_ptr + index).to(tl.uint32)))


def test_uniform_numbers_lie_strictly_inside_the_interval() -> None:
    """The least and the largest integers lie strictly between 0 and 1, in torch and in kernels,
    and noise is finite.
    """
    extremes = torch.tensor([0, 1, 2, 2**24, 2**32 - 2**9, 2**32 - 2**7, 2**32 - 2, 2**32 - 1])
    units = to_unit(extremes)
    result = torch.empty(len(extremes))
    _unit_kernel[(1,)](extremes, result, BLOCK=len(extremes))
    assert torch.equal(units, result)
    assert (
        units.min() > 0
        and units.max() < 1
        and (units.diff() >= 0).all()
        and units[0] < units[1] < units[2]
    )
    assert (-(-torch.log1p(-units)).log()).isfinite().all()


def test_numbers_depend_on_their_key_only() -> None:
    """A row's noise is the same alone, in a batch and in a longer row; order and number of parts
    matter.
    """
    keys = make_key(1, torch.arange(3)[:, None], torch.arange(4))
    together = gumbel_noise(keys, 50)
    assert together.shape == (3, 4, 50)
    assert torch.equal(together[1, 2, :20], gumbel_noise(make_key(1, 1, 2), 20))
    assert (
        len(
            {
                int(make_key(*parts))
                for parts in ((1, 2), (2, 1), (1,), (1, 2, 0), (0, 1, 2), (3, 0), (0, 3))
            }
        )
        == 7
    )


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_integers_are_uniform(shift: int) -> None:
    """Every byte of a key's first 2^18 numbers, and of the first numbers of 2^18 keys in a row,
    is uniform: chi-squared.
    """
    along = random_bits(make_key(1, 2), torch.arange(1 << 18))
    across = [
        random_bits(make_key(1, torch.arange(1 << 18)), torch.tensor(counter)) for counter in (0, 1)
    ]
    for integers in (along, *across):
        counts = torch.bincount(integers >> shift & 255, minlength=256).double()
        assert abs(chi_squared_excess(counts, torch.full_like(counts, 1024))) < 4.5


def test_neighbours_are_independent() -> None:
    """Streams whose keys or parts differ in one bit, and a stream and itself later on, do not
    correlate.
    """
    size = 1 << 14
    counter = torch.arange(size)
    base = to_unit(random_bits(make_key(9), counter)) - 0.5
    others = [int(make_key(9)) ^ python_signed(1 << bit) for bit in range(1, 64)]
    streams = [random_bits(torch.tensor(others)[:, None], counter)]
    streams.append(
        random_bits(make_key(torch.tensor([9 ^ 1 << bit for bit in range(60)]))[:, None], counter)
    )
    streams.append(random_bits(make_key(9), counter + torch.tensor([1, 2, 3, 64, size])[:, None]))
    correlation = 12 * ((to_unit(torch.cat(streams)) - 0.5) * base).mean(1)
    assert correlation.abs().max() < 5 / size**0.5
    pairs = random_bits(make_key(torch.arange(1 << 16)), torch.tensor(0)) >> 28
    following = torch.bincount(16 * pairs[:-1] + pairs[1:], minlength=256).double()
    assert (
        abs(chi_squared_excess(following, torch.full_like(following, (len(pairs) - 1) / 256))) < 4.5
    )


def test_noise_draws_from_softmax() -> None:
    """The argmax of logits plus noise is a draw from their softmax, rare tokens included:
    chi-squared.
    """
    logits = torch.linspace(0, -7, 12)
    num_draws = 1 << 18
    drawn = (logits + gumbel_noise(make_key(4, torch.arange(num_draws)), 12)).argmax(-1)
    assert (
        abs(
            chi_squared_excess(
                torch.bincount(drawn, minlength=12).double(), num_draws * logits.double().softmax(0)
            )
        )
        < 4.5
    )
