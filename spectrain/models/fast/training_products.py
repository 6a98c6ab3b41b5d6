"""What a training computes in one launch on a GPU: one product for the linears that read the same
input, with their gradients, and norms.

The weights of linears are copied side by side once for a batch, in the type of the products, and
every draft step multiplies by that copy. Each product hands the weight on to the next one, so that
the backward pass of a step adds its gradient of the weight to that of the steps after it, in the
product itself. Shapes: D input width, O output widths of all linears,
side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.kernels import norm_gradients
from spectrain.kernels.dispatch import takes_gradients

from .shared_product import find_shared_linears

OUTPUT_NAMES = ("o_proj", "down_proj")

_merged: ContextVar[dict[nn.Module, StepWeight] | None] = ContextVar("merged", default=None)


def needs_gradients(x: Tensor) -> bool:
    """Tell whether the kernels with gradients compute what follows from a tensor."""
    return torch.is_grad_enabled() and x.requires_grad and takes_gradients(x)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a product of a tensor is computed, autocast included."""
    kind = x.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else x.dtype


class _SideBySide(torch.autograd.Function):
    """Copies weights [O, D] side by side."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.rows = [len(weight) for weight in weights]
        ctx.dtype = weights[0].dtype
        merged = weights[0].new_empty(sum(ctx.rows), weights[0].shape[1], dtype=dtype)
        for part, weight in zip(merged.split(ctx.rows), weights):
            part.copy_(weight)
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(part.to(ctx.dtype) for part in grad.split(ctx.rows))


class _ChainedProduct(torch.autograd.Function):
    """Multiplies by a weight, and returns it for the next product. Its gradient is added to that of
    the products that follow, which nothing else holds.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight), weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, total: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if grad is None:
            return None, total
        left, right = grad.flatten(0, -2).t(), x.flatten(0, -2)
        total = left @ right if total is None else total.addmm_(left, right)
        return grad @ weight if ctx.needs_input_grad[0] else None, total


class StepWeight:
    """A weight [O, D] by which every draft step multiplies. Where steps are not computed again in
    the backward pass, their gradients of it add up in their products.
    """

    def __init__(self, weight: Tensor, is_chained: bool) -> None:
        self.weight = weight
        self.is_chained = is_chained

    def multiply(self, x: Tensor) -> Tensor:
        """Return the products [.., O] of inputs [.., D]."""
        x = x.to(self.weight.dtype)
        if not self.is_chained:
            return F.linear(x, self.weight)
        product: Tensor
        product, self.weight = _ChainedProduct.apply(x, self.weight)
        return product


def merge_for_training(module: nn.Module, is_chained: bool = True) -> dict[nn.Module, StepWeight]:
    """Return the weights of linears that read the same input, side by side, by the module that
    calls `find_merged`, and those of output linears, by the linear. Sharded weights, and those of
    linears that compute something else, such as adapters, are left out.
    """
    merged: dict[nn.Module, StepWeight] = {}
    for parent in module.modules():
        if not hasattr(parent, "merges_products"):
            continue
        outputs = [getattr(parent, name, None) for name in OUTPUT_NAMES]
        groups: list[tuple[nn.Module, list[nn.Linear]]]
        groups = [(linear, [linear]) for linear in outputs if type(linear) is nn.Linear]
        if parent.merges_products:
            groups += [(parent, linears) for linears in find_shared_linears(parent)]
        for owner, linears in groups:
            weights = [linear.weight for linear in linears]
            if all(_is_plain(linear) for linear in linears) and weights[0].requires_grad:
                dtype = product_dtype(weights[0])
                joined = weights[0].to(dtype)
                if len(weights) > 1:
                    joined = _SideBySide.apply(dtype, *weights)
                merged[owner] = StepWeight(joined, is_chained)
    return merged


def _is_plain(linear: nn.Linear) -> bool:
    """Tell whether a linear has its whole weight, no bias, and nothing that runs in its place."""
    hooks = (*linear._forward_hooks, *linear._forward_pre_hooks)
    return (
        type(linear.weight) is nn.Parameter
        and linear.weight.shape == (linear.out_features, linear.in_features)
        and linear.bias is None
        and "forward" not in vars(linear)
        and not hooks
    )


@contextmanager
def use_merged(merged: dict[nn.Module, StepWeight]) -> Iterator[None]:
    """Multiply by merged weights while the context is open."""
    token = _merged.set(merged)
    try:
        yield
    finally:
        _merged.reset(token)


def find_merged(module: nn.Module) -> StepWeight | None:
    """Return the merged weights of a module's linears; None where each multiplies for itself."""
    merged = None if torch.compiler.is_compiling() else _merged.get()
    return None if merged is None else merged.get(module)


class _Split(torch.autograd.Function):
    """Splits a product; gradients that lie side by side are joined without a copy."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        return product.split(list(sizes), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shape = *grads[0].shape[:-1], sum(grad.shape[-1] for grad in grads)
        strides = torch.empty(shape, device="meta").stride()
        if not _lie_side_by_side(grads, strides):
            return torch.cat(grads, dim=-1), None
        return grads[0].as_strided(shape, strides), None


def _lie_side_by_side(parts: Sequence[Tensor], strides: tuple[int, ...]) -> bool:
    """Tell whether parts are consecutive columns of one tensor of these strides."""
    storage = parts[0].untyped_storage()._cdata
    column = parts[0].storage_offset()
    for part in parts:
        is_next = part.untyped_storage()._cdata == storage and part.storage_offset() == column
        if not is_next or part.stride() != strides:
            return False
        column += part.shape[-1]
    return True


def multiply_output(x: Tensor, linear: nn.Linear) -> Tensor:
    """Return the outputs of the last linear of a block, [.., D] -> [.., O]."""
    merged = find_merged(linear)
    output: Tensor = linear(x) if merged is None else merged.multiply(x)
    return output


def multiply_parts(
    x: Tensor, merged: StepWeight, linears: Sequence[nn.Linear]
) -> tuple[Tensor, ...]:
    """Return the outputs of linears for inputs [.., D], which are parts of one product."""
    sizes = [linear.out_features for linear in linears]
    parts: tuple[Tensor, ...] = _Split.apply(merged.multiply(x), sizes)
    return parts


def join_norms(parts: list[Tensor], norms: list[nn.RMSNorm]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norms of tensors [.., D] side by side, the last of these norms, and the last
    tensor, to be read further.
    """
    last = parts[-1]
    if _takes_norms(last, norms):
        weights: list[Tensor] = [norm.weight for norm in norms]
        eps = [norm.eps or 0.0 for norm in norms]
        joined, last = norm_gradients.join_norms(parts, weights, eps, product_dtype(last))
        return joined, joined[..., -last.shape[-1] :], last
    normed = [norm(part) for norm, part in zip(norms, parts)]
    return torch.cat(normed, dim=-1), normed[-1], last


def norm_stream(x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """Return the norm of a tensor [.., D], and the tensor, to be read further."""
    if _takes_norms(x, [norm]):
        return norm_gradients.join_norms([x], [norm.weight], [norm.eps or 0.0], product_dtype(x))
    return norm(x), x


def _takes_norms(x: Tensor, norms: Sequence[nn.RMSNorm]) -> bool:
    return (
        needs_gradients(x)
        and norm_gradients.can_norm(x.shape[-1])
        and all(type(norm) is nn.RMSNorm and norm.eps is not None for norm in norms)
        and not any("forward" in vars(norm) for norm in norms)
    )
