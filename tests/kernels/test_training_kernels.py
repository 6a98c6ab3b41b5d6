"""The kernels of a training equal their references in float64, forwards and backwards, on
adversarial shapes, and each passes opcheck.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.kernels import gated_unit, later_keys, norm_gradients, rotate_heads
from spectrain.kernels.rms_norm import rms_norm_reference

pytest.importorskip("triton", reason="triton is not installed, so there is no kernel to interpret")
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels through Triton's interpreter."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")


def compare(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: list[Tensor],
    dtype: torch.dtype,
) -> None:
    """Compare outputs and gradients of the same numbers, in a type and in float64. Every output has
    a random gradient.
    """
    outputs, grads = run(function, inputs)
    exact, exact_grads = run(reference, [x.double() for x in inputs])
    tolerance = TOLERANCES[dtype]
    for result, other in zip((*outputs, *grads), (*exact, *exact_grads), strict=True):
        assert result.dtype == dtype
        scale = float(other.detach().abs().max()) or 1.0
        torch.testing.assert_close(result.double(), other, rtol=tolerance, atol=tolerance * scale)


def run(function: Callable[..., Any], inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
    """Return outputs, and gradients for the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = function(*leaves)
    outputs = [result] if isinstance(result, Tensor) else [*result]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(part.shape, generator=generator).to(part.dtype) for part in outputs]
    return outputs, torch.autograd.grad(outputs, leaves, weights, allow_unused=True)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("shape", "size"), [((1, 1), 1), ((2, 3), 8), ((3, 100), 24), ((1, 2), 1025)]
)
def test_norms(
    shape: tuple[int, ...], size: int, parts: int, dtype: torch.dtype, monkeypatch: Any
) -> None:
    """One norm, and two side by side, whose last input is read further; fewer programs than rows,
    and more."""
    torch.manual_seed(size)
    monkeypatch.setattr(norm_gradients, "PROGRAMS", 7)
    inputs = [torch.randn(*shape, size).to(dtype) * 3**part for part in range(parts)]
    weights = [torch.rand(size).to(dtype) + 0.5 for _ in range(parts)]

    def by_kernel(*tensors: Tensor) -> Any:
        eps = [1e-5] * parts
        return norm_gradients.join_norms([*tensors[:parts]], [*tensors[parts:]], eps, dtype)

    def by_torch(*tensors: Tensor) -> Any:
        normed = [
            x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
            for x, weight in zip(tensors[:parts], tensors[parts:])
        ]
        return torch.cat(normed, dim=-1), tensors[parts - 1]

    compare(by_kernel, by_torch, [*inputs, *weights], dtype)


def test_norms_of_unused_outputs_and_frozen_inputs() -> None:
    """Only the stream is read, or the input needs no gradient; and no rows have no gradient."""
    torch.manual_seed(1)
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    _, stream = norm_gradients.join_norms([x], [weight], [1e-5], torch.float32)
    assert torch.equal(torch.autograd.grad(stream.sum(), x)[0], torch.ones(3, 8))
    frozen = x.detach()
    normed, _ = norm_gradients.join_norms([frozen], [weight], [1e-5], torch.float32)
    (grad,) = torch.autograd.grad(normed.sum(), weight)
    unit = norm_gradients.norm_rows(frozen, torch.ones(8), 1e-5)
    torch.testing.assert_close(grad, unit.sum(0))
    torch.testing.assert_close(unit, rms_norm_reference(frozen, torch.ones(8), 1e-5))
    empty = torch.zeros(0, 8, requires_grad=True)
    normed, _ = norm_gradients.join_norms([empty], [weight], [1e-5], torch.float32)
    assert torch.equal(torch.autograd.grad(normed.sum(), weight)[0], torch.zeros(8))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("width", [1, 8, 1025])
@pytest.mark.parametrize("merged", [True, False])
def test_gated_units(merged: bool, width: int, dtype: torch.dtype) -> None:
    """The halves of one product, and tensors of their own; large negative and positive gates."""
    torch.manual_seed(width)
    product = (torch.randn(2, 3, 2 * width) * 4).to(dtype)
    product[0, 0] *= 20

    def exact(gate: Tensor, up: Tensor) -> Tensor:
        return gate * gate.sigmoid() * up

    if merged:
        compare(
            lambda x: gated_unit.gated_unit(*x.chunk(2, dim=-1)),
            lambda x: exact(*x.chunk(2, dim=-1)),
            [product],
            dtype,
        )
    else:
        compare(gated_unit.gated_unit, exact, [*product.chunk(2, dim=-1)], dtype)


def make_angles(batch: int, length: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    half = torch.rand(batch, length, size // 2) * 9
    return [part.repeat(1, 1, 2).to(dtype) for part in (half.cos(), half.sin())]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "size"),
    [(1, 1, 1, 2), (5, 6, 3, 16), (3, 14, 2, 80), (2, 5, 5, 6), (3, 4, 1, 96), (2, 2, 1, 256)],
)
def test_rotations(
    length: int, heads: int, kv_heads: int, size: int, rows: int, dtype: torch.dtype
) -> None:
    """Products of their own and parts of one, all kinds of heads, and angles of every text or the
    same for all."""
    torch.manual_seed(size)
    angles = make_angles(rows, length, size, dtype)
    widths = [count * size for count in (heads, kv_heads, kv_heads)]
    product = torch.randn(2, length, sum(widths)).to(dtype)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return rotate_heads.rotate_heads_reference(q, k, v, *(part.double() for part in angles))

    def by_kernel(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return rotate_heads.rotate_heads(q, k, v, *angles)

    compare(by_kernel, exact, [*product.split(widths, dim=-1)], dtype)
    compare(
        lambda x: by_kernel(*x.split(widths, dim=-1)),
        lambda x: exact(*x.split(widths, dim=-1)),
        [product],
        dtype,
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "size"),
    [(1, 1, 1, 1, 8), (2, 5, 6, 3, 16), (1, 3, 14, 2, 80), (2, 2, 4, 4, 6), (1, 2, 8, 1, 128)],
)
def test_later_keys(
    batch: int, length: int, heads: int, kv_heads: int, size: int, steps: int, dtype: torch.dtype
) -> None:
    """Softmax over causal keys whose part is given and over later ones, in float64 by one softmax
    over all; one score of hundreds among them. Gradients include those through the given part."""
    torch.manual_seed(size)
    shape = batch, heads, length, size
    q = torch.randn(shape).to(dtype)
    keys, values = torch.randn(2, batch, kv_heads, steps, length, size).to(dtype)
    keys[:, :, 0, 0] *= 30
    earlier, earlier_values = torch.randn(2, batch, heads, length, 4, size).to(dtype)
    grad = torch.randn(shape).to(dtype)
    scale = size**-0.5

    wide = [x.double() for x in (q, keys, values, earlier, earlier_values, grad)]
    exact_q, exact_keys, exact_values = (x.requires_grad_() for x in wide[:3])
    own_scores = (exact_q[..., None, :] * wide[3]).sum(-1) * scale  # [B, H, T, 4]
    lse = own_scores.logsumexp(-1)
    first = (own_scores.softmax(-1)[..., None] * wide[4]).sum(-2)
    group = heads // kv_heads
    all_keys, all_values = (
        torch.cat([given, later.transpose(2, 3).repeat_interleave(group, dim=1)], dim=3)
        for given, later in ((wide[3], exact_keys), (wide[4], exact_values))
    )
    scores = (exact_q[..., None, :] * all_keys).sum(-1) * scale
    exact = (scores.softmax(-1)[..., None] * all_values).sum(-2)
    gradients = torch.autograd.grad(exact, (exact_q, exact_keys, exact_values), wide[5])
    # What reaches the queries through the given part.
    share = (own_scores - scores.logsumexp(-1, keepdim=True)).exp()
    own = (wide[5][..., None, :] * wide[4]).sum(-1) - (wide[5] * exact).sum(-1, keepdim=True)
    through = ((share * own * scale)[..., None] * wide[3]).sum(-2).detach()

    given = first.detach().to(dtype), lse.detach().float()
    out, total, shares = later_keys.add_later_keys(q, *given, keys, values, scale)
    assert shares is None and out.transpose(1, 2).is_contiguous()
    results = later_keys.later_gradients(
        grad, q, out, (total, None), keys, values, through.to(dtype), scale
    )
    tolerance = 10 * TOLERANCES[dtype]
    torch.testing.assert_close(total.double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
    for result, other in zip((out, *results), (exact, *gradients), strict=True):
        scale_of = float(other.abs().max())
        torch.testing.assert_close(
            result.double(), other, rtol=tolerance, atol=tolerance * scale_of
        )


@pytest.mark.parametrize("group", [1, 3])
def test_the_references_of_later_keys_agree_with_the_kernels(group: int) -> None:
    torch.manual_seed(group)
    q, first, grad, grad_q = torch.randn(4, 2, 2 * group, 5, 8)
    lse = torch.randn(2, 2 * group, 5)
    keys, values = torch.randn(2, 2, 2, 3, 5, 8)
    out, total, _ = later_keys.add_later_keys(q, first, lse, keys, values, 0.4)
    expected = later_keys.add_later_keys_reference(q, first, lse, keys, values, 0.4)
    torch.testing.assert_close((out, total), expected[:2])
    rest = keys, values, grad_q, 0.4
    gradients = later_keys.later_gradients_reference(grad, q, out, expected[2], *rest)
    results = later_keys.later_gradients(
        grad, q, out, (total, None), keys, values, grad_q.clone(), 0.4
    )
    torch.testing.assert_close(results, gradients)


def list_launches() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """List every operator with arguments for it."""
    x, weight = torch.randn(3, 8), torch.ones(8)
    wide = torch.randn(3, 16)
    q, k = torch.randn(1, 3, 2, 4).transpose(1, 2), torch.randn(1, 3, 1, 4).transpose(1, 2)
    angles = torch.rand(1, 3, 4)
    later, lse = torch.randn(1, 1, 2, 3, 4), torch.randn(1, 2, 3)
    return {
        "norm": (norm_gradients._launch_norm, (x, weight, wide[:, 8:], 1e-5)),
        "norm_gradient": (
            norm_gradients._launch_norm_gradient,
            (wide[:, 8:], x, x, weight, torch.zeros(3, 8), 1e-5),
        ),
        "gated_gradient": (gated_unit._launch_gated_gradient, (x, wide[:, :8], wide[:, 8:])),
        "gated_unit": (
            gated_unit._launch_gated_unit,
            tuple(part.clone().requires_grad_() for part in wide.chunk(2, dim=1)),
        ),
        "rotate_heads": (
            rotate_heads._launch_rotate_heads,
            (q, k, k, angles, angles, *(torch.zeros(3, n) for n in (8, 4, 4)), True),
        ),
        "add_later_keys": (
            later_keys._launch_add_later_keys,
            (q, q.clone(), lse, later, later.clone(), 0.5),
        ),
        "later_gradients": (
            later_keys._launch_later_gradients,
            (q, q.clone(), q.clone(), lse, later, later.clone(), torch.zeros(1, 2, 3, 4), 0.5),
        ),
    }


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", list_launches())
def test_operators_pass_opcheck(name: str) -> None:
    launch, arguments = list_launches()[name]
    torch.library.opcheck(launch, arguments)
