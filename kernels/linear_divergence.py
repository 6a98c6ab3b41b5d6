"""The divergence of a drafter from its target, straight from hidden states: output layer, loss and
gradients in one.

Shapes: R rows, r of them at a time, D width, V vocabulary, K stored tokens of a target.
Logits exist for one chunk of rows at a time. Their gradient is computed in the forward pass, so
only [R, D] for the states and [V, D] for the weight stay in memory. The matrix products are
torch's. Between them a GPU runs one row kernel: log-sum-exp and argmax of the target's and the
drafter's products, KL(p || q), and the gradient, which overwrites the logits. Other devices run
autograd on the chunk.

Why not Liger's fused losses (0.8.5): on an H100 those of cross-entropy and Jensen-Shannon
divergence cut rows into 1/32, small products that made a step of 1,024 rows 4.3 times slower than
torch without fusion by Liger's own benchmark (of 0.3.1; a chunk of 2,048 rows keeps products
large); its KL divergence needs all of p, [R, V]; none returns the most likely entries, weighs rows
or reads a target's products. docs/results/speed.md compares launches and bytes, also with
cut-cross-entropy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dispatch import run_on_cpu, runs_on
from .onednn import fast_linear
from .row_kl import (
    TargetLogits,
    can_run_kernel,
    row_argmax,
    row_kl,
    row_kl_reference,
    scale_and_cap,
)

CHUNK_ROWS = 2048
"""Rows whose logits exist at one time by default."""
CHUNK_BYTES = 1 << 29
"""Bytes of the products that exist at one time where a kernel computes the loss. Every chunk reads
the output layer twice and adds to its gradient in float32: with a draft vocabulary of 32,000,
chunks of 8,192 rows move a quarter of the bytes that those of 2,048 rows move there.
"""

MAX_CPU_PRODUCTS = 1 << 23
"""Products that exist at one time on a CPU where few of them are used. For more, the C library
returns the memory each time, and the page faults of a new allocation take longer than the
computation."""
STORED_BYTES = 1 << 30
"""Bytes of the target's products with the draft vocabulary that a GPU keeps for all rows of a
batch. Beyond that they are computed again, chunk by chunk.
"""
GPU_BLOCK_ROWS = 512
"""Rows of a chunk that torch processes at one time on a GPU without the kernel; temporary copies
are that much smaller.
"""
CPU_BLOCK_LOGITS = 1 << 17
"""Logits of a chunk that torch processes at one time on a CPU; they stay in its cache and in
allocated memory.
"""


@dataclass(frozen=True)
class Projection:
    """An output layer: cap(scale * (x weight^T + bias)), cap(z) = softcap * tanh(z / softcap)."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    def select_entries(self, chosen: Tensor | slice) -> "Projection":
        """Return the projection onto these vocabulary entries only."""
        return replace(
            self, weight=self.weight[chosen], bias=None if self.bias is None else self.bias[chosen]
        )

    def at_temperature(self, temperature: float) -> "Projection":
        """Return the projection with its logits divided by a temperature."""
        softcap = None if self.softcap is None else self.softcap / temperature
        return replace(self, scale=self.scale / temperature, softcap=softcap)

    def compute_products(self, x: Tensor) -> Tensor:
        """Compute x weight^T + bias, [r, D] -> [r, V], in the weight's dtype or autocast's."""
        dtype = _product_dtype(self.weight)
        bias = None if self.bias is None else self.bias.to(dtype)
        return fast_linear(x.to(dtype), self.weight.to(dtype), bias)

    def logits(self, x: Tensor) -> Tensor:
        """Compute the logits of states, [r, D] -> [r, V], in float32, or in float64 for float64
        weights.
        """
        return scale_and_cap(self.compute_products(x), self.scale, self.softcap)


@dataclass(frozen=True)
class HeadTarget:
    """A target given by its final states; logits are computed for the requested rows only.

    `head` holds the entries that the drafter has. p is renormalised over them. With `log_z`, the
    log-sum-exp over the full vocabulary from `argmax_and_log_z`, p keeps the target's own mass.
    """

    final: Tensor  # [R, D]
    head: Projection
    log_z: Tensor | None = None  # [R]

    @torch.no_grad()
    def __call__(self, rows: slice) -> Tensor:
        """Return log p [r, V] of these rows."""
        return self.target_logits(rows).log_p(spent=True)

    @torch.no_grad()
    def target_logits(self, rows: slice) -> TargetLogits:
        """Return the unnormalised logits of these rows."""
        log_z = None if self.log_z is None else self.log_z[rows]
        return TargetLogits(
            self.head.compute_products(self.final[rows]), self.head.scale, self.head.softcap, log_z
        )

    def select_rows(self, rows: Tensor) -> "HeadTarget":
        """Select these rows, which may repeat."""
        return replace(
            self, final=self.final[rows], log_z=None if self.log_z is None else self.log_z[rows]
        )


class DivergenceResult(NamedTuple):
    """The loss and both models' most likely entries."""

    loss: Tensor  # scalar, the sum over rows; the only one with a gradient
    predictions: Tensor  # [R] the drafter's most likely entry
    labels: Tensor  # [R] the target's most likely of the same entries, or the token


TargetChunk = tuple[Tensor | None, Tensor | None]
"""The target's distribution for a chunk: log p [r, V], or tokens [r]."""
Labels = Tensor | Callable[[slice], Tensor]
"""The target's distribution: tokens [R], or a function from a slice of rows to log p [r, V], such
as a `HeadTarget`. Where that object also has a method `target_logits`, the kernel reads its
unnormalised products.
"""


def _product_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of a matrix product: the weight's, or autocast's."""
    kind = weight.device.type
    cast = (
        torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
        and weight.dtype != torch.float64
    )
    return torch.get_autocast_dtype(kind) if cast else weight.dtype


def _differentiate_rows(
    product: Tensor,
    losses_of: Callable[[Tensor], Tensor],
    row_weight: Tensor,
    scale: float,
    softcap: float | None,
    with_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return weighted losses [r] and the most likely entries [r] of products [r, V], which their
    gradient overwrites.
    """
    leaf = product.detach().requires_grad_(with_grad)
    with torch.set_grad_enabled(with_grad):
        log_q = scale_and_cap(leaf, scale, softcap).log_softmax(-1)
        # 0 even where the loss is not finite
        losses = torch.where(row_weight != 0, losses_of(log_q) * row_weight, 0.0)
        total = losses.sum()
    if with_grad:
        (grad,) = torch.autograd.grad(total, leaf)
        product.copy_(grad.masked_fill_(row_weight[:, None] == 0, 0.0))
    return losses.detach(), log_q.detach().argmax(-1)


def _argmax_and_log_z(target: TargetLogits) -> tuple[Tensor, Tensor]:
    """Return the most likely entries and log-sum-exps [r] of a target's logits."""
    if can_run_kernel(target.products):
        outputs: tuple[Tensor, Tensor] = row_argmax(target.products, target.scale, target.softcap)
        return outputs
    on_cpu = run_on_cpu("loss", target.products, target.softcap)
    if on_cpu is not None:
        outputs = on_cpu.argmax(target, with_log_z=True)
        return outputs
    best, log_z = zip(
        *((logits.argmax(-1), logits.logsumexp(-1)) for logits in _iterate_blocks(target))
    )
    return torch.cat(best), torch.cat(log_z)


def _argmax_rows(target: TargetLogits) -> Tensor:
    """Return the most likely entries [r] of a target's logits; without the kernel, log-sum-exps
    are not computed.
    """
    if can_run_kernel(target.products):
        return _argmax_and_log_z(target)[0]
    on_cpu = run_on_cpu("loss", target.products, target.softcap)
    if on_cpu is not None:
        best: Tensor = on_cpu.argmax(target, with_log_z=False)[0]
        return best
    return torch.cat([logits.argmax(-1) for logits in _iterate_blocks(target)])


def _iterate_blocks(target: TargetLogits) -> Iterator[Tensor]:
    """Yield a target's logits [r, V] by as many rows as torch processes at one time."""
    for product in target.products.split(_block_rows(target.products)):
        yield scale_and_cap(product, target.scale, target.softcap)


def _block_rows(product: Tensor) -> int:
    """Return how many rows of products [r, V] torch processes at one time."""
    return (
        GPU_BLOCK_ROWS
        if product.device.type in ("cuda", "meta")
        else max(1, CPU_BLOCK_LOGITS // product.shape[1])
    )


def argmax_and_log_z(
    final: Tensor, head: Projection, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the most likely token of every state [R, D] and the log-sum-exp of its logits, each
    [R], by chunks.
    """
    best = torch.empty(len(final), dtype=torch.int64, device=final.device)
    log_z = torch.empty(
        len(final), dtype=torch.promote_types(head.weight.dtype, torch.float32), device=final.device
    )
    with torch.no_grad():
        for rows in split_rows(len(final), chunk):
            best[rows], log_z[rows] = _argmax_and_log_z(
                TargetLogits(head.compute_products(final[rows]), head.scale, head.softcap)
            )
    return best, log_z


@torch.no_grad()
def restrict_target(
    final: Tensor, head: Projection, entries: Tensor, own_mass: bool, chunk: int | None = None
) -> tuple[Tensor, "HeadTarget | CachedTarget"]:
    """Return the most likely token [R] of a target's full vocabulary, and the target restricted to
    these entries.

    The restricted target is renormalised, or keeps its own mass with `own_mass`. The products that
    decide the most likely token contain those of the entries; they are multiplied once where all
    rows are one chunk, and on a GPU where those of the entries fit into `STORED_BYTES`.
    """
    is_cpu = final.device.type == "cpu"
    dtype = _product_dtype(head.weight)
    fits = not is_cpu and len(final) * len(entries) * dtype.itemsize <= STORED_BYTES
    if len(split_rows(len(final), chunk)) > 1 and not fits:
        best, log_z = argmax_and_log_z(final, head, chunk)
        return best, HeadTarget(final, head.select_entries(entries), log_z if own_mass else None)
    block_rows = MAX_CPU_PRODUCTS // len(head.weight) if is_cpu else chunk or CHUNK_ROWS
    entry_products = final.new_empty(len(final), len(entries), dtype=dtype)
    labels = []
    log_zs = []
    for states, products in zip(
        *(rows.split(max(1, block_rows)) for rows in (final, entry_products))
    ):
        logits = TargetLogits(head.compute_products(states), head.scale, head.softcap)
        if own_mass:
            block_labels, block_log_z = _argmax_and_log_z(logits)
            log_zs.append(block_log_z)
        else:
            block_labels = _argmax_rows(logits)
        labels.append(block_labels)
        torch.index_select(logits.products, 1, entries, out=products)
    restricted = TargetLogits(
        entry_products, head.scale, head.softcap, torch.cat(log_zs) if own_mass else None
    )
    return torch.cat(labels), CachedTarget(restricted)


@dataclass(frozen=True)
class CachedTarget:
    """A target whose products are computed for all rows."""

    logits: TargetLogits

    @torch.no_grad()
    def __call__(self, rows: slice) -> Tensor:
        """Return log p [r, V] of these rows."""
        return self.target_logits(rows).log_p()

    def target_logits(self, rows: slice) -> TargetLogits:
        return self.logits.select_rows(rows)


@torch.no_grad()
def total_entropy(
    log_probs: Callable[[slice], Tensor], count: int, chunk: int | None = None
) -> Tensor | float:
    """Sum -p log p over the `count` rows of a target, a chunk of log p [r, V] at a time."""
    total: Tensor | float = 0.0
    for rows in split_rows(count, chunk):
        log_p = log_probs(rows)
        total = total - (log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum()
    return total


def count_chunk_rows(vocab_size: int, value_bytes: int) -> int:
    """Return the rows whose products [r, V] of these bytes a value exist at one time where a
    kernel computes the loss.
    """
    rows = CHUNK_BYTES // (vocab_size * value_bytes) // GPU_BLOCK_ROWS * GPU_BLOCK_ROWS
    return max(CHUNK_ROWS, rows)


def split_rows(count: int, chunk: int | None = None) -> list[slice]:
    """Split `count` rows into slices whose logits may exist at one time."""
    chunk = CHUNK_ROWS if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: use 1 or more")
    return [slice(start, min(count, start + chunk)) for start in range(0, count, chunk)]


def linear_divergence(
    hidden: Tensor,
    head: Projection,
    labels: Labels,
    divergence: Callable[..., Tensor] | None = None,
    row_weight: Tensor | None = None,
    per_row: tuple[Tensor, ...] = (),
    chunk: int | None = None,
) -> DivergenceResult:
    """Compute sum_r row_weight[r] divergence(p_r, q_r), q = softmax(head(hidden)), and the most
    likely entries.

    Without a `divergence` this is KL(p || q), which for tokens is their cross-entropy. Otherwise it
    is a function (log p, log q, *per_row) of a chunk, [r, V] and the rows' own [r, ...], to losses
    [r]. Gradients reach hidden [R, D] and the head's weight and bias, where these require any. Rows
    of weight 0 add nothing to the loss or to a gradient.
    """
    if divergence is not None and not callable(labels):
        raise ValueError("a divergence needs the full log p: labels=tokens is for divergence=None")
    assert row_weight is None or not row_weight.requires_grad, "row weights are constants"
    if chunk is None and divergence is None and can_run_kernel(hidden):
        chunk = count_chunk_rows(len(head.weight), _product_dtype(head.weight).itemsize)
    job = _DivergenceTask(
        head,
        labels,
        divergence,
        row_weight,
        per_row,
        split_rows(len(hidden), chunk),
        torch.is_grad_enabled(),
    )
    return DivergenceResult(*_LinearDivergence.apply(hidden, head.weight, head.bias, job))


@dataclass(frozen=True)
class _DivergenceTask:
    head: Projection
    labels: Labels
    divergence: Callable[..., Tensor] | None
    row_weight: Tensor | None
    per_row: tuple[Tensor, ...]
    chunks: list[slice]
    grad_enabled: bool

    def compare_chunk(
        self, product: Tensor, target: TargetChunk | TargetLogits, rows: slice, with_grad: bool
    ) -> tuple[Tensor, ...]:
        """Return losses and both models' most likely entries [r]; the gradient overwrites the
        products [r, V].
        """
        dtype = torch.promote_types(product.dtype, torch.float32)
        weight = (
            product.new_ones(len(product), dtype=dtype)
            if self.row_weight is None
            else self.row_weight[rows].to(dtype)
        )
        if isinstance(target, TargetLogits) and not can_run_kernel(product):
            on_cpu = run_on_cpu("loss", product, self.head.softcap)
            return on_cpu.compare(product, target, weight, self.head.scale, with_grad)
        settings = self.head.scale, self.head.softcap, with_grad
        if isinstance(target, TargetLogits):
            return row_kl(product, target.products, None, weight, *settings, *target[1:])
        if self.divergence is None and can_run_kernel(product):
            return row_kl(product, *target, weight, *settings)
        parts: list[Tensor | None] = [product, weight, *target, *(x[rows] for x in self.per_row)]
        size = _block_rows(product)
        blocks: list[list[Any]] = [
            [x if x is None else x[start : start + size] for x in parts]
            for start in range(0, len(product), size)
        ]
        results = [self._compare_block(with_grad, *block) for block in blocks]
        return tuple(torch.cat(column) for column in zip(*results))

    def read_target(self, rows: slice, hidden: Tensor) -> TargetChunk | TargetLogits:
        """Return log p [r, V], or tokens [r], or the unnormalised logits that the kernel reads."""
        if isinstance(self.labels, Tensor):
            return None, self.labels[rows]
        if self.divergence is None and hasattr(self.labels, "target_logits"):
            by_cpu_kernel = run_on_cpu("loss", hidden, self.head.softcap) is not None
            if can_run_kernel(hidden) or by_cpu_kernel:
                logits: TargetLogits = self.labels.target_logits(rows)
                if not by_cpu_kernel or run_on_cpu("loss", logits.products, logits.softcap):
                    return logits
                return logits.log_p(), None
        return self.labels(rows), None

    def _compare_block(
        self,
        with_grad: bool,
        product: Tensor,
        weight: Tensor,
        log_p: Tensor | None,
        tokens: Tensor | None,
        *others: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale, softcap, divergence = self.head.scale, self.head.softcap, self.divergence
        if divergence is None:
            return row_kl_reference(product, log_p, tokens, weight, scale, softcap, with_grad)
        assert log_p is not None
        losses, best = _differentiate_rows(
            product,
            lambda log_q: divergence(log_p, log_q, *others),
            weight,
            scale,
            softcap,
            with_grad,
        )
        return losses, best, log_p.argmax(-1)


class _LinearDivergence(torch.autograd.Function):
    """Stores the gradients that its forward pass computes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _DivergenceTask
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = [
            job.grad_enabled and x is not None and x.requires_grad for x in (hidden, weight, bias)
        ]
        dtype = _product_dtype(weight)
        wide_dtype = torch.promote_types(dtype, torch.float32)
        w = weight.to(dtype)
        b = None if bias is None else bias.to(dtype)
        loss = torch.zeros((), dtype=wide_dtype, device=hidden.device)
        best, labels = (
            torch.empty(len(hidden), dtype=torch.int64, device=hidden.device) for _ in range(2)
        )
        hidden_grad = torch.empty_like(hidden) if needs_grad[0] else None
        weight_grad: Tensor | None = None
        bias_grad = (
            torch.zeros_like(bias, dtype=wide_dtype) if bias is not None and needs_grad[2] else None
        )
        for rows in job.chunks:
            h = hidden[rows].to(dtype)
            target = job.read_target(rows, h)  # first, because it needs temporary memory
            product = fast_linear(h, w, b)  # [r, V]
            losses, best[rows], labels[rows] = job.compare_chunk(
                product, target, rows, any(needs_grad)
            )
            del target
            loss += losses.sum()
            if hidden_grad is not None:
                # the products are their gradients now
                _write_product(hidden_grad[rows], product, w)
            if needs_grad[1]:
                weight_grad = _add_product(weight_grad, product, h, wide_dtype)
            if bias_grad is not None:
                bias_grad += product.sum(0, dtype=wide_dtype)
            del product  # before the next one is made
        if needs_grad[1] and weight_grad is None:  # of no rows
            weight_grad = torch.zeros_like(weight)
        weight_grad, bias_grad = (
            g if g is None else g.to(weight.dtype) for g in (weight_grad, bias_grad)
        )
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.mark_non_differentiable(best, labels)
        return loss, best, labels

    @staticmethod
    def backward(ctx: Any, incoming: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_divergence has no second derivative: it computes its gradients in the "
                "forward pass"
            )
        return (*(g if g is None else g * incoming for g in ctx.saved_tensors), None)


def _write_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write left right to `out`; on a GPU without a copy where their types agree."""
    if left.device.type != "cpu" and out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(fast_linear(left, right.t()))


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total + left^T right in this dtype, in place where there is a total."""
    if _adds_wide(left, dtype):  # no second [V, D], and no sum is rounded on the way
        if total is None:
            return torch.mm(left.t(), right, out_dtype=dtype)
        if left.is_meta and not _counts_wide_totals():
            return total.addmm_(left.t(), right)
        return torch.addmm(total, left.t(), right, out_dtype=dtype, out=total)
    if total is None:
        return fast_linear(left.t(), right.t()).to(dtype)
    if left.dtype == dtype and left.is_cuda:
        return total.addmm_(left.t(), right)
    return total.add_(fast_linear(left.t(), right.t()))


def _adds_wide(left: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a product of half precision is added to a total of float32 in one call."""
    return (
        left.device.type != "cpu"
        and left.dtype in (torch.bfloat16, torch.float16)
        and dtype == torch.float32
        and runs_on(left.device)
        and _takes_wide_totals(torch.__version__)
    )


@cache
def _counts_wide_totals() -> bool:
    """Tell whether this torch computes such a product of meta tensors; 2.11 does not, although
    it does on a GPU.
    """
    left = torch.zeros(1, 1, dtype=torch.bfloat16, device="meta")
    try:
        torch.addmm(left.float(), left, left, out_dtype=torch.float32)
    except TypeError:
        return False
    return True


def _takes_wide_totals(version: str) -> bool:
    """Tell whether this torch adds to a total of wider dtype; before 2.10 a GPU needed the dtype
    of the factors.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) >= (2, 10)
