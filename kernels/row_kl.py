"""Row kernels of a loss on logits: KL(p || q) with its gradient, and the argmax with the
log-sum-exp, one launch each.

Shapes: r rows, V vocabulary. The kernels read products of states and
an output layer, which are scaled and capped on the way. The reference in torch comes first; it is
also the path without a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dispatch import jit, kernels_enabled, tl


def scale_and_cap(product: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return softcap * tanh(scale * product / softcap), in float32 or in float64."""
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    logits = logits if scale == 1 else logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


SOFTMAX_ROWS = 256  # rows of one in-place softmax


class TargetLogits(NamedTuple):
    """Unnormalised products of a target's states and output layer.

    z = cap(scale * product), and log p = z - log_z, or z - log sum exp z without `log_z`.
    """

    products: Tensor  # [p, V]
    scale: float = 1.0
    softcap: float | None = None
    log_z: Tensor | None = None  # [p]
    # [r] rows of the products and of log_z, which may repeat; None takes all of them.
    rows: Tensor | None = None

    def select_rows(self, rows: slice | Tensor) -> TargetLogits:
        """Select these rows, which may repeat."""
        assert self.rows is None, "rows are chosen already"
        return self._replace(
            products=self.products[rows], log_z=None if self.log_z is None else self.log_z[rows]
        )

    def choose_rows(self, rows: Tensor) -> TargetLogits:
        """Select these rows, which may repeat, without a copy where a kernel reads them."""
        if can_run_kernel(self.products):
            return self._replace(rows=rows)
        return self.select_rows(rows)

    def log_p(self, spent: bool = False) -> Tensor:
        """Return log p [r, V] in float32, or float64. With `spent`, the products may be
        overwritten.
        """
        if self.rows is not None:
            return self._replace(rows=None).select_rows(self.rows).log_p(spent=True)
        logits = scale_and_cap(self.products, self.scale, self.softcap)
        spent = spent or logits is not self.products
        if self.log_z is not None:
            return logits.sub_(self.log_z[:, None]) if spent else logits - self.log_z[:, None]
        if not spent:
            return logits.log_softmax(-1)
        # in place: a second [r, V] would be a fifth of a step's memory
        for block in logits.split(SOFTMAX_ROWS):
            block.copy_(block.log_softmax(-1))
        return logits


def row_kl_reference(
    product: Tensor,
    log_p: Tensor | None,
    tokens: Tensor | None,
    row_weight: Tensor,
    scale: float,
    softcap: float | None,
    with_grad: bool,
    target_scale: float | None = None,
    target_softcap: float | None = None,
    target_log_z: Tensor | None = None,
    target_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL(p || q) of every row times its weight, and the drafter's and the target's most
    likely entries, each [r].

    q is the softmax of the products [r, V] of states and weight, scaled and capped. p is that of
    log_p [r, V], or has all mass on tokens [r]. With `target_scale`, `log_p` holds the target's
    products instead, as in `TargetLogits`, and row r is its row `target_rows[r]` where these are
    given. With `with_grad` the gradient with respect to the logits, (sum p) q - p, overwrites the
    products.
    """
    if log_p is not None and target_scale is not None:
        log_p = (
            TargetLogits(log_p, target_scale, target_softcap, target_log_z, target_rows)
            .log_p()
            .to(torch.promote_types(product.dtype, torch.float32))
        )
    logits = scale_and_cap(product, scale, softcap)
    log_q = logits.log_softmax(-1)
    best = log_q.argmax(-1)
    if log_p is not None:
        p = log_p.exp()
        labels = log_p.argmax(-1)
        # p log p is 0 where p is 0. Autograd would add six passes.
        losses = (p * (log_p.clamp(min=torch.finfo(log_p.dtype).min) - log_q)).sum(-1)
    else:
        assert tokens is not None
        labels = tokens
        losses = -log_q.gather(-1, tokens[:, None])[:, 0]
    counts = row_weight != 0
    if with_grad:
        weight = row_weight[:, None]
        if log_p is not None:
            grad = log_q.exp_().mul_(p.sum(-1, keepdim=True) * weight)
            grad.addcmul_(p.to(grad.dtype), weight.to(grad.dtype), value=-1)
        else:
            grad = log_q.exp_().mul_(weight)
            grad.scatter_add_(-1, labels[:, None], -weight)
        if scale != 1:
            grad *= scale
        if softcap is not None:
            grad *= 1 - (logits / softcap).square()
        product.copy_(grad).masked_fill_(~counts[:, None], 0)  # also where it is not finite
    return torch.where(counts, losses * row_weight, 0.0), best, labels


@jit
def _scale_and_cap_in_kernel(product, scale, softcap, SOFTCAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the logits of products and their slope; tanh(x) is 2 sigmoid(2 x) - 1."""
    z = product.to(tl.float32) * scale
    slope = scale
    if SOFTCAPPED:
        tanh = 2 * tl.sigmoid(2 * z / softcap) - 1
        z = softcap * tanh
        slope = scale * (1 - tanh * tanh)
    return z, slope


@jit
def _fold_block(  # type: ignore[no-untyped-def]
    product_ptr,
    start,
    scale,
    softcap,
    top,
    total,
    best,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
):
    """Fold a block of products into the running maximum of their logits, the sum of exp(z - top)
    and the argmax; return its logits too.
    """
    columns = start + tl.arange(0, BLOCK)
    is_entry = columns < VOCAB
    product = tl.load(product_ptr + columns, mask=is_entry, other=0.0)
    z, _ = _scale_and_cap_in_kernel(product, scale, softcap, SOFTCAPPED)
    z = tl.where(is_entry, z, float("-inf"))
    block_top = tl.max(z, 0)
    best = tl.where(block_top > top, start + tl.argmax(z, 0), best)
    new_top = tl.maximum(top, block_top)
    total = total * tl.exp(top - new_top) + tl.sum(tl.exp(z - new_top), 0)
    return new_top, total, best, z


@jit
def _row_kl_kernel(  # type: ignore[no-untyped-def]
    product_ptr,
    log_p_ptr,
    tokens_ptr,
    row_weight_ptr,
    loss_ptr,
    best_ptr,
    labels_ptr,
    product_stride,
    log_p_stride,
    scale,
    softcap,
    target_scale,
    target_softcap,
    target_log_z_ptr,
    target_rows_ptr,
    # as a constant: the interpreter of triton 3.6 cannot loop to a runtime bound
    VOCAB: tl.constexpr,
    HAS_TOKENS: tl.constexpr,  # p has all mass on a token
    BLOCK: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    TARGET_SOFTCAPPED: tl.constexpr,
    HAS_PRODUCTS: tl.constexpr,  # log_p_ptr holds the target's unnormalised products
    WITH_GRAD: tl.constexpr,
):
    """Compute loss, argmaxes and gradient of one row: sweep its blocks for log-sum-exp and
    loss, then for the gradient.

    For unnormalised target logits zt, running sums of exp(zt - top) and exp(zt - top) (zt - z)
    are rescaled whenever their running maximum `top_log_p` rises, as in an online softmax. Grid
    [r].
    """
    # Locate the row.
    row = tl.program_id(0).to(tl.int64)
    product_ptr += row * product_stride
    target_row = row
    if target_rows_ptr is not None:
        target_row = tl.load(target_rows_ptr + row)
    if not HAS_TOKENS:
        log_p_ptr += target_row * log_p_stride
    row_weight = tl.load(row_weight_ptr + row).to(tl.float32)
    mass = 0.0  # sum p
    divergence = 0.0  # sum p (log p - z)
    labels = 0
    # 1. Tokens: their terms and the label need no sweep.
    if HAS_TOKENS:
        labels = tl.load(tokens_ptr + row)
        token_product = tl.load(product_ptr + labels)
        token_z, _ = _scale_and_cap_in_kernel(token_product, scale, softcap, SOFTCAPPED)
        mass = 1.0
        divergence = -token_z
    # 2. First sweep: online log-sum-exp and argmax of the drafter and, of dense targets, of p,
    #    with sum p (log p - z).
    # A running maximum begins at a finite floor: where a whole first block is masked, the
    # difference of two infinities would not be a number.
    top = -1e30
    top_log_p = -1e30
    total = 0.0  # sum exp(z - top)
    best = 0
    for start in range(0, VOCAB, BLOCK):
        # 2a. The drafter's block.
        top, total, best, z = _fold_block(
            product_ptr, start, scale, softcap, top, total, best, VOCAB, BLOCK, SOFTCAPPED
        )
        # 2b. The target's block; products are rescaled to their running maximum.
        if not HAS_TOKENS:
            columns = start + tl.arange(0, BLOCK)
            is_entry = columns < VOCAB
            log_p = tl.load(log_p_ptr + columns, mask=is_entry, other=float("-inf")).to(tl.float32)
            if HAS_PRODUCTS:
                log_p, _ = _scale_and_cap_in_kernel(
                    log_p, target_scale, target_softcap, TARGET_SOFTCAPPED
                )
                log_p = tl.where(is_entry, log_p, float("-inf"))
            is_possible = log_p > float("-inf")
            block_top_log_p = tl.max(log_p, 0)
            labels = tl.where(block_top_log_p > top_log_p, start + tl.argmax(log_p, 0), labels)
            new_top_log_p = tl.maximum(top_log_p, block_top_log_p)
            if HAS_PRODUCTS:
                rescale = tl.exp(top_log_p - new_top_log_p)
                mass = mass * rescale
                divergence = divergence * rescale
                p = tl.exp(log_p - new_top_log_p)
            else:
                p = tl.exp(log_p)
            mass += tl.sum(p, 0)
            divergence += tl.sum(
                p * (tl.where(is_possible, log_p, 0.0) - tl.where(is_possible, z, 0.0)), 0
            )
            top_log_p = new_top_log_p
    # 3. Normalise: subtract both log-sum-exps, or the target's given one.
    log_z = top + tl.log(total)
    target_log_z = 0.0
    if HAS_PRODUCTS:
        target_log_z = top_log_p + tl.log(mass)
        if target_log_z_ptr is not None:
            target_log_z = tl.load(target_log_z_ptr + target_row).to(tl.float32)
        mass *= tl.exp(top_log_p - target_log_z)
        divergence = divergence * tl.exp(top_log_p - target_log_z) - mass * target_log_z
    tl.store(
        loss_ptr + row, tl.where(row_weight != 0, row_weight * (divergence + mass * log_z), 0.0)
    )
    tl.store(best_ptr + row, best)
    tl.store(labels_ptr + row, labels)
    # 4. Second sweep: overwrite the products by the gradient, weight * slope * ((sum p) q - p).
    if WITH_GRAD:
        if HAS_TOKENS:
            tl.debug_barrier()  # every thread has read the product of the token
        for start in range(0, VOCAB, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            is_entry = columns < VOCAB
            product = tl.load(product_ptr + columns, mask=is_entry, other=0.0)
            z, slope = _scale_and_cap_in_kernel(product, scale, softcap, SOFTCAPPED)
            grad = mass * tl.exp(z - log_z)
            if HAS_TOKENS:
                grad -= tl.where(columns == labels, 1.0, 0.0)
            else:
                log_p = tl.load(log_p_ptr + columns, mask=is_entry, other=float("-inf")).to(
                    tl.float32
                )
                if HAS_PRODUCTS:
                    log_p, _ = _scale_and_cap_in_kernel(
                        log_p, target_scale, target_softcap, TARGET_SOFTCAPPED
                    )
                grad -= tl.exp(log_p - target_log_z)
            grad = tl.where(row_weight != 0, row_weight * slope * grad, 0.0)
            tl.store(product_ptr + columns, grad.to(product_ptr.dtype.element_ty), mask=is_entry)


KERNEL_BLOCKS = ((1024, 1024, 4), (1 << 31, 4096, 8))
"""(largest vocabulary, entries a block, warps). Compiled for sm_90 the larger block takes 89
registers and no stack with dense p, so that two rows share a multiprocessor; of 8,192 entries with
16 warps one row fills it. Neither has been timed."""


@torch.library.custom_op("spectrain::row_kl", mutates_args={"product"})
def row_kl(
    product: Tensor,
    log_p: Tensor | None,
    tokens: Tensor | None,
    row_weight: Tensor,
    scale: float,
    softcap: float | None,
    with_grad: bool,
    target_scale: float | None = None,
    target_softcap: float | None = None,
    target_log_z: Tensor | None = None,
    target_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `row_kl_reference` in float32 and in one launch."""
    rows, vocab = product.shape
    assert product.stride(1) == 1
    log_p, tokens = (None if x is None else x.contiguous() for x in (log_p, tokens))
    loss = product.new_empty(rows, dtype=torch.float32)
    best, labels = (product.new_empty(rows, dtype=torch.int64) for _ in range(2))
    block, warps = next(
        (block, warps) for largest, block, warps in KERNEL_BLOCKS if vocab <= largest
    )
    with torch.cuda.device_of(product):
        _row_kl_kernel[(rows,)](
            product,
            log_p,
            tokens,
            row_weight.contiguous(),
            loss,
            best,
            labels,
            product.stride(0),
            0 if log_p is None else log_p.stride(0),
            scale,
            softcap or 1.0,
            target_scale or 1.0,
            target_softcap or 1.0,
            *(None if x is None else x.contiguous() for x in (target_log_z, target_rows)),
            VOCAB=vocab,
            HAS_TOKENS=tokens is not None,
            BLOCK=block,
            SOFTCAPPED=softcap is not None,
            TARGET_SOFTCAPPED=target_softcap is not None,
            HAS_PRODUCTS=target_scale is not None,
            WITH_GRAD=with_grad,
            num_warps=warps,
        )
    return loss, best, labels


@row_kl.register_fake
def _(product: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = product.shape[0]
    return (
        product.new_empty(rows, dtype=torch.float32),
        product.new_empty(rows, dtype=torch.int64),
        product.new_empty(rows, dtype=torch.int64),
    )


@jit
def _row_best_kernel(  # type: ignore[no-untyped-def]
    product_ptr,
    best_ptr,
    log_z_ptr,
    product_stride,
    scale,
    softcap,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
):
    """Find the most likely entry and the log-sum-exp of one row in one sweep; grid [r]."""
    row = tl.program_id(0).to(tl.int64)
    product_ptr += row * product_stride
    top = -1e30  # finite: see _row_kl_kernel
    total = 0.0
    best = 0
    for start in range(0, VOCAB, BLOCK):
        top, total, best, _ = _fold_block(
            product_ptr, start, scale, softcap, top, total, best, VOCAB, BLOCK, SOFTCAPPED
        )
    tl.store(best_ptr + row, best)
    tl.store(log_z_ptr + row, top + tl.log(total))


@torch.library.custom_op("spectrain::row_best", mutates_args=())
def row_argmax(product: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return the most likely entries and log-sum-exps [r] of products [r, V], scaled and capped,
    in float32, in one launch.
    """
    rows, vocab = product.shape
    assert product.stride(1) == 1
    best, log_z = _empty_argmax(product)
    block, warps = next(
        (block, warps) for largest, block, warps in KERNEL_BLOCKS if vocab <= largest
    )
    with torch.cuda.device_of(product):
        _row_best_kernel[(rows,)](
            product,
            best,
            log_z,
            product.stride(0),
            scale,
            softcap or 1.0,
            VOCAB=vocab,
            BLOCK=block,
            SOFTCAPPED=softcap is not None,
            num_warps=warps,
        )
    return best, log_z


@row_argmax.register_fake
def _empty_argmax(product: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    rows = product.shape[0]
    return product.new_empty(rows, dtype=torch.int64), product.new_empty(rows, dtype=torch.float32)


def can_run_kernel(product: Tensor) -> bool:
    """Tell whether the kernel is enabled; unlike attention it runs on older GPUs too."""
    return kernels_enabled(product.device) and product.dtype != torch.float64
