"""The fused output layer and divergence equal autograd over the full matrix of logits, of which
they hold one chunk at a time."""

import math
import os
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spectrain.kernels.linear_divergence as module
from lab.benchmarks.divergence import loss_systems
from spectrain.drafters.layers.losses import (
    ACCEPTANCE_LOSSES,
    DIVERGENCES,
    forward_kl,
    get_divergence,
    jensen_shannon,
)
from spectrain.kernels.linear_divergence import (
    DivergenceResult,
    HeadTarget,
    Projection,
    argmax_and_log_z,
    linear_divergence,
    restrict_target,
    total_entropy,
)
from spectrain.kernels.row_kl import TargetLogits, row_argmax, row_kl, row_kl_reference

ROWS = 7
WIDTH = 5
VOCAB = 11
TARGET_VOCAB = 17
NAMES = ["cross_entropy", *DIVERGENCES]
CHUNKS = [1, 3, ROWS, ROWS + 5]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": {"bias": True},
    "scaled": {"scale": 0.7},
    "capped": {"softcap": 1.5},
    "all": {"bias": True, "scale": 1.3, "softcap": 2.0},
}
EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}


def make_layer(
    width: int, vocab: int, dtype: torch.dtype, bias: bool = False, **others: Any
) -> Projection:
    """A random output layer whose weight and bias learn."""
    weight = torch.randn(vocab, width, dtype=dtype).requires_grad_()
    return Projection(
        weight, torch.randn(vocab, dtype=dtype).requires_grad_() if bias else None, **others
    )


def full_logits(x: Tensor, head: Projection) -> Tensor:
    """All logits at once."""
    logits = F.linear(x, head.weight, head.bias) * head.scale
    return logits if head.softcap is None else torch.tanh(logits / head.softcap) * head.softcap


class Case:
    """States, an output layer, a target's own, and a draft vocabulary."""

    def __init__(
        self, dtype: torch.dtype = torch.float64, rows: int = ROWS, width: int = WIDTH, **shape: Any
    ) -> None:
        self.hidden = torch.randn(rows, width, dtype=dtype).requires_grad_()
        self.head = make_layer(width, VOCAB, dtype, **shape)
        self.final = torch.randn(rows, width + 1, dtype=dtype)
        self.target = make_layer(width + 1, TARGET_VOCAB, dtype, **shape)
        self.ids = torch.randperm(TARGET_VOCAB)[:VOCAB].sort().values
        self.tokens = torch.randint(VOCAB, (rows,))

    def head_target(self, own_mass: bool) -> HeadTarget:
        log_z = argmax_and_log_z(self.final, self.target, chunk=2)[1] if own_mass else None
        return HeadTarget(self.final, self.target.select_entries(self.ids), log_z)

    def log_p(self, own_mass: bool) -> Tensor:
        logits = full_logits(self.final, self.target).detach()
        chosen = logits[:, self.ids]
        return chosen - torch.logsumexp(logits if own_mass else chosen, -1, keepdim=True)

    def log_q(self) -> Tensor:
        return full_logits(self.hidden, self.head).log_softmax(-1)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        inputs = [x for x in (self.hidden, self.head.weight, self.head.bias) if x is not None]
        return list(torch.autograd.grad(loss, inputs))


def compute_fused(case: Case, name: str, **arguments: Any) -> DivergenceResult:
    """Compute the fused loss by its name, as a family of drafters would call it."""
    if name == "cross_entropy":
        return linear_divergence(case.hidden, case.head, case.tokens, **arguments)
    chosen = None if name == "forward_kl" else get_divergence(name, 0.3)
    return linear_divergence(
        case.hidden, case.head, case.head_target(name in ACCEPTANCE_LOSSES), chosen, **arguments
    )


def compute_unfused(case: Case, name: str) -> tuple[Tensor, Tensor]:
    """Return the losses [R] from the full matrix, and the target's most likely entries."""
    log_q = case.log_q()
    if name == "cross_entropy":
        return F.nll_loss(log_q, case.tokens, reduction="none"), case.tokens
    log_p = case.log_p(name in ACCEPTANCE_LOSSES)
    return get_divergence(name, 0.3)(log_p, log_q), log_p.argmax(-1)


def assert_agrees(
    case: Case, result: DivergenceResult, losses: Tensor, labels: Tensor, tolerance: float
) -> None:
    """Equal loss, equal gradients of 3 times the loss, equal choices."""
    torch.testing.assert_close(result.loss, losses.sum(), rtol=tolerance, atol=tolerance)
    expected = case.gradients(3 * losses.sum())
    gradients = case.gradients(3 * result.loss)
    assert any(gradient.abs().max() > 1e-3 for gradient in expected) or not len(case.hidden)
    torch.testing.assert_close(gradients, expected, rtol=tolerance, atol=10 * tolerance)
    assert torch.equal(result.predictions, case.log_q().argmax(-1)) and torch.equal(
        result.labels, labels
    )


@pytest.mark.sweep(20)
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_equal_the_unchunked_computation(
    name: str, shape: str, chunk: int, dtype: torch.dtype
) -> None:
    """Fused = unfused for every loss, over a draft vocabulary smaller than the target's, however
    rows are cut.
    """
    case = Case(dtype, **SHAPES[shape])
    losses, labels = compute_unfused(case, name)
    assert_agrees(case, compute_fused(case, name, chunk=chunk), losses, labels, EXACT[dtype])


@pytest.mark.sweep(10)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_weighted(name: str, chunk: int) -> None:
    """Fused = sum of weight times loss; rows of weight 0 change no gradient, even where their
    loss is not a number.
    """
    case = Case(bias=True)
    weight = torch.tensor([1.0, 0.0, 0.25, 2.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    losses, labels = compute_unfused(case, name)
    assert_agrees(
        case,
        compute_fused(case, name, chunk=chunk, row_weight=weight),
        losses * weight,
        labels,
        1e-10,
    )
    expected = case.gradients(compute_fused(case, name, chunk=chunk, row_weight=weight).loss)
    case.final[1] = float("nan")
    result = compute_fused(case, name, chunk=chunk, row_weight=weight).loss
    assert result.isfinite()
    torch.testing.assert_close(case.gradients(result), expected)


@pytest.mark.parametrize("name", NAMES)
def test_empty_input_has_zero_loss(name: str) -> None:
    """R = 0: a loss of 0, gradients of 0, and no choices."""
    case = Case(rows=0, bias=True)
    result = compute_fused(case, name)
    assert result.loss == 0 and result.predictions.shape == result.labels.shape == (0,)
    assert all(gradient.eq(0).all() for gradient in case.gradients(result.loss))


def decay_kl(log_p: Tensor, log_q: Tensor, distance: Tensor) -> Tensor:
    """Return forward KL that decays with the distance of a row."""
    return 0.8 ** distance.clamp(min=0) * forward_kl(log_p, log_q)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_per_row_arguments_reach_the_divergence(chunk: int) -> None:
    """A divergence that reads the distance of each row equals the unfused one."""
    case = Case()
    distance = torch.tensor([-1, 0, 2, -1, 5, 1, -1])
    result = linear_divergence(
        case.hidden,
        case.head,
        case.head_target(False),
        decay_kl,
        per_row=(distance,),
        chunk=chunk,
    )
    log_p = case.log_p(False)
    assert_agrees(case, result, decay_kl(log_p, case.log_q(), distance), log_p.argmax(-1), 1e-10)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_temperature_divides_the_finished_logits(temperature: float, softcap: float | None) -> None:
    """A head at a temperature = its logits, capped first, over the temperature."""
    case = Case(bias=True, scale=0.8, softcap=softcap)
    target_values = HeadTarget(
        case.final, case.target.select_entries(case.ids).at_temperature(temperature)
    )
    result = linear_divergence(
        case.hidden, case.head.at_temperature(temperature), target_values, chunk=3
    )
    log_p = (case.log_p(False) / temperature).log_softmax(-1)
    log_q = (full_logits(case.hidden, case.head) / temperature).log_softmax(-1)
    assert_agrees(case, result, forward_kl(log_p, log_q), log_p.argmax(-1), 1e-10)


def test_function_of_rows_is_a_valid_target() -> None:
    """A function may return log p, a chunk at a time and each row once; p = 0 adds nothing to
    forward KL.
    """
    case = Case()
    computed_rows = []
    log_p = case.log_p(False)
    log_p[:, 2] = float("-inf")

    def target_rows(rows: slice) -> Tensor:
        computed_rows.extend(range(ROWS)[rows])
        return log_p[rows]

    result = linear_divergence(case.hidden, case.head, target_rows, chunk=3)
    assert computed_rows == list(range(ROWS))
    terms = log_p.exp() * (log_p - case.log_q())
    assert_agrees(
        case, result, terms[:, [v for v in range(VOCAB) if v != 2]].sum(-1), log_p.argmax(-1), 1e-10
    )


@pytest.mark.parametrize("chunk", CHUNKS)
def test_argmax_and_log_z_equal_the_unchunked_computation(chunk: int) -> None:
    """One pass a chunk at a time = argmax and log-sum-exp of all logits; a target at rows = its
    rows.
    """
    case = Case(bias=True, softcap=2.0)
    best, log_z = argmax_and_log_z(case.final, case.target, chunk)
    logits = full_logits(case.final, case.target)
    assert torch.equal(best, logits.argmax(-1)) and not log_z.requires_grad
    torch.testing.assert_close(log_z, logits.logsumexp(-1).detach())
    rows = torch.tensor([4, 0, 4])
    target_values = HeadTarget(case.final, case.target.select_entries(case.ids), log_z)
    torch.testing.assert_close(target_values.select_rows(rows)(slice(None)), case.log_p(True)[rows])


@pytest.mark.parametrize("own_mass", [True, False])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_restricted_target_equals_the_selected_entries(chunk: int, own_mass: bool) -> None:
    """In one chunk or in several: the most likely token of all, log p of the entries for any
    rows, and no gradient.
    """
    case = Case(bias=True, softcap=2.0)
    best, log_p_at = restrict_target(case.final, case.target, case.ids, own_mass, chunk)
    assert torch.equal(best, full_logits(case.final, case.target).argmax(-1))
    for rows in (slice(0, ROWS), slice(2, 5), slice(6, 7)):
        torch.testing.assert_close(log_p_at(rows).detach(), case.log_p(own_mass)[rows])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_total_entropy_equals_the_sum_over_rows(chunk: int) -> None:
    """-sum p log p over all rows; tokens of p = 0 add nothing."""
    log_p = Case().log_p(False)
    log_p[:, 2] = float("-inf")
    log_p = log_p.log_softmax(-1)
    expected = torch.distributions.Categorical(logits=log_p).entropy().sum()
    torch.testing.assert_close(total_entropy(log_p.__getitem__, ROWS, chunk), expected)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("block", [1, 2 * VOCAB, 3 * VOCAB + 1])
@pytest.mark.parametrize("name", [*NAMES, "per_row"])
def test_blocks_of_a_chunk_change_nothing(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, choices and gradients are the same to the bit, however few rows torch works on at
    one time.
    """
    case = Case(bias=True)
    weight = torch.rand(ROWS)
    distance = torch.arange(ROWS) - 3
    results = []
    for size in (1 << 16, block):
        monkeypatch.setattr("spectrain.kernels.linear_divergence.CPU_BLOCK_LOGITS", size)
        if name == "per_row":
            result = linear_divergence(
                case.hidden, case.head, case.head_target(False), decay_kl, weight, (distance,)
            )
        else:
            result = compute_fused(case, name, row_weight=weight, chunk=5)
        results.append([*result, *case.gradients(result.loss)])
    assert all(torch.equal(left, right) for left, right in zip(*results))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("softcap", [None, 1.5])
# which holds its weight constant
@pytest.mark.parametrize("name", [name for name in NAMES if name != "lk_hybrid"])
def test_gradients_equal_numeric_ones(name: str, softcap: float | None) -> None:
    """gradcheck, with rows of unlike weight."""
    case = Case(rows=3, bias=True, softcap=softcap, scale=0.9)
    weight = torch.tensor([1.0, 0.0, 0.3], dtype=torch.float64)

    def loss(hidden: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        case.hidden, case.head = hidden, Projection(matrix, bias, case.head.scale, softcap)
        return compute_fused(case, name, chunk=2, row_weight=weight).loss

    assert torch.autograd.gradcheck(loss, (case.hidden, case.head.weight, case.head.bias))


@pytest.mark.parametrize(
    "learns",
    [(True, False, False), (False, True, False), (False, False, True), (False, False, False)],
)
@pytest.mark.parametrize("name", ["cross_entropy", "forward_kl", "total_variation"])
def test_only_trainable_inputs_get_gradients(name: str, learns: tuple[bool, bool, bool]) -> None:
    """A frozen head, or frozen states, leave the other's gradient unchanged; the target never
    gets one.
    """
    case = Case(bias=True)
    assert case.head.bias is not None
    parts = (case.hidden, case.head.weight, case.head.bias)
    expected = case.gradients(compute_fused(case, name).loss)
    for part, asks in zip(parts, learns):
        part.requires_grad_(asks)
    result = compute_fused(case, name)
    assert result.loss.requires_grad == any(learns)
    if any(learns):
        result.loss.backward()
    for part, gradient, asks in zip(parts, expected, learns):
        assert torch.equal(part.grad, gradient) if asks else part.grad is None
    assert case.target.weight.grad is None and not result.predictions.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(compute_fused(case, name).loss, result.loss.detach())


@pytest.mark.parametrize("name", ["cross_entropy", "forward_kl", "reverse_kl"])
def test_retained_graph_allows_two_backward_passes(name: str) -> None:
    """The gradients of a second backward pass equal those of the first: neither changes what is
    stored.
    """
    case = Case()
    loss = 2 * compute_fused(case, name).loss
    first = torch.autograd.grad(loss, case.head.weight, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(loss, case.head.weight)[0], first)


def test_second_derivative_is_refused() -> None:
    """Gradients are computed in the forward pass, so there is nothing to differentiate again,
    and the error says so.
    """
    case = Case()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(compute_fused(case, "forward_kl").loss, case.hidden, create_graph=True)


def test_invalid_arguments_are_refused() -> None:
    """Chunks of no rows; a divergence of tokens."""
    case = Case()
    with pytest.raises(ValueError, match="chunk=0"):
        compute_fused(case, "forward_kl", chunk=0)
    with pytest.raises(ValueError, match="divergence=None"):
        linear_divergence(case.hidden, case.head, case.tokens, jensen_shannon)


@pytest.mark.parametrize("name", ["cross_entropy", "forward_kl", "jensen_shannon"])
@pytest.mark.parametrize("weights_in_bf16", [True, False])
def test_low_precision_equals_the_unfused_loss_in_it(name: str, weights_in_bf16: bool) -> None:
    """Under autocast, and of bf16 weights without it, products are bf16, losses float32,
    gradients the parameters' dtype.
    """
    case = Case(torch.bfloat16 if weights_in_bf16 else torch.float32)
    weight = case.head.weight
    with torch.autocast("cpu", torch.bfloat16, enabled=not weights_in_bf16):
        result = compute_fused(case, name, chunk=4)
        log_q = F.linear(case.hidden, weight).float().log_softmax(-1)
        target_values = F.linear(case.final, case.target.weight[case.ids]).float().log_softmax(-1)
        losses = F.nll_loss(log_q, case.tokens, reduction="none")
        if name != "cross_entropy":
            losses = get_divergence(name, 0.3)(target_values.detach(), log_q)
    torch.testing.assert_close(result.loss, losses.sum(), rtol=1e-5, atol=1e-5)
    assert result.loss.dtype == torch.float32
    for actual, expected in zip(case.gradients(result.loss), case.gradients(losses.sum())):
        assert actual.dtype == expected.dtype == weight.dtype
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_chunks_of_low_precision_add_up_in_float32() -> None:
    """256 equal rows one by one: the weight's gradient is 256 times that of one, where sums in
    bf16 would stall at half.
    """
    hidden = torch.randn(1, WIDTH).expand(256, -1)
    head = make_layer(WIDTH, VOCAB, torch.float32)
    tokens = torch.zeros(256, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        item = linear_divergence(hidden[:1], head, tokens[:1]).loss
        every = linear_divergence(hidden, head, tokens, chunk=1).loss
    (item,), (every,) = (torch.autograd.grad(loss, head.weight) for loss in (item, every))
    torch.testing.assert_close(every, 256 * item)


def test_fused_wide_sums_equal_separate_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum that a GPU adds to float32 at once, here by a stand-in for torch's own schema, is the
    sum of the products, rounded less: gradients of chunks in bfloat16 are nearer to those of
    float32."""
    library = torch.library.Library("aten", "IMPL")
    calls: list[str] = []

    def multiply_wide(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        calls.append("mm")
        return (left.double() @ right.double()).to(out_dtype)

    def add_wide(
        total: Tensor,
        left: Tensor,
        right: Tensor,
        out_dtype: torch.dtype,
        *,
        out: Tensor,
        **others: Any,
    ) -> Tensor:
        calls.append("addmm")
        return out.copy_(total + multiply_wide(left, right, out_dtype))

    library.impl("mm.dtype", multiply_wide, "CPU")
    library.impl("addmm.dtype_out", add_wide, "CPU")
    hidden = torch.randn(24, WIDTH).bfloat16()
    head = make_layer(WIDTH, VOCAB, torch.bfloat16)
    tokens = torch.randint(0, VOCAB, (24,))
    errors = []
    exact = Projection(head.weight.detach().float().requires_grad_())
    (expected,) = torch.autograd.grad(
        linear_divergence(hidden.float(), exact, tokens).loss, exact.weight
    )
    for wide in (False, True):
        monkeypatch.setattr(module, "_adds_wide", lambda left, dtype, wide=wide: wide)
        (result,) = torch.autograd.grad(
            linear_divergence(hidden, head, tokens, chunk=8).loss, head.weight
        )
        torch.testing.assert_close(result.float(), expected, rtol=3e-2, atol=3e-2)
        errors.append(float((result.float() - expected).abs().mean()))
    library._destroy()
    assert calls == ["mm", "addmm", "mm", "addmm", "mm"] and errors[1] <= errors[0]


@pytest.mark.parametrize(
    "version, takes",
    [("2.9.1+cu128", False), ("2.10.0", True), ("2.13.0+cpu", True), ("3.0.0a0", True)],
)
def test_old_torch_adds_in_a_separate_call(
    version: str, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.9, which we take too, refuses a total in float32 with factors in half precision on
    a GPU: it gets a sum.
    """
    monkeypatch.setattr(torch, "__version__", version)
    left = torch.zeros(4, 3, dtype=torch.bfloat16, device="meta")
    total = torch.zeros(3, 5, device="meta")
    with OperationRecorder() as recorder:
        module._add_product(
            total, left, torch.zeros(4, 5, dtype=torch.bfloat16, device="meta"), torch.float32
        )
    wide = "aten.addmm.dtype_out" if module._counts_wide_totals() else "aten.addmm_.default"
    assert (wide in recorder.names) == takes and ("aten.add_.Tensor" in recorder.names) != takes


class OperationRecorder(TorchDispatchMode):
    """The size of the largest tensor that any operation returned, and which operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.names = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        self.names.add(str(func))
        return result


@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_is_larger_than_a_chunk_of_logits(name: str) -> None:
    """Forward and backward return nothing over chunk x V; the unfused loss, recorded the same
    way, R x V.
    """
    # with V = 11 no state or weight is as large
    rows = 40
    chunk = 8
    case = Case(rows=rows, width=2, softcap=2.0)
    target_values = case.head_target(name in ACCEPTANCE_LOSSES)
    loss_target = case.tokens if name == "cross_entropy" else target_values
    chosen = None if name in ("cross_entropy", "forward_kl") else get_divergence(name, 0.5)
    with OperationRecorder() as recorder:
        linear_divergence(case.hidden, case.head, loss_target, chosen, chunk=chunk).loss.backward()
    assert recorder.largest == chunk * VOCAB
    with OperationRecorder() as recorder:
        compute_unfused(case, name)[0].sum().backward()
    assert recorder.largest >= rows * VOCAB


def test_target_pass_holds_a_single_chunk() -> None:
    """most_likely returns nothing over chunk x target vocabulary."""
    case = Case(rows=40, width=2)
    with OperationRecorder() as recorder:
        argmax_and_log_z(case.final, case.target, chunk=8)
    assert recorder.largest == 8 * TARGET_VOCAB


TARGETS = ["tokens", "dense", "dense, of some mass"]


def make_target_values(which: str, rows: int, vocab: int) -> tuple[Tensor | None, Tensor | None]:
    """log_p and tokens of a kind of target, as the row kernel reads them."""
    log_p = (3 * torch.randn(rows, vocab)).log_softmax(-1) + math.log(
        0.7 if "mass" in which else 1.0
    )
    if which == "tokens":
        return None, torch.randint(vocab, (rows,))
    log_p[:, 1:2] = float("-inf")
    return log_p, None


@pytest.mark.sweep(12)
@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.7, None), (1.3, 4.0)])
@pytest.mark.parametrize("vocab", [3, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("which", TARGETS)
def test_row_kl_kernel_equals_its_reference(
    which: str, dtype: torch.dtype, vocab: int, scale: float, softcap: float | None, with_grad: bool
) -> None:
    """The interpreted kernel has the reference's losses, choices and gradient in place, in one
    block and over its end, with masked rows."""
    product = (3 * torch.randn(4, vocab)).to(dtype)
    weight = torch.tensor([1.0, 0.0, 0.3, 2.0])
    target_values = make_target_values(which, 4, vocab)
    expected = product.clone()
    result = product.clone()
    by_torch = row_kl_reference(expected, *target_values, weight, scale, softcap, with_grad)
    by_kernel = row_kl(result, *target_values, weight, scale, softcap, with_grad)
    torch.testing.assert_close(by_kernel[0], by_torch[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(by_kernel[1], by_torch[1]) and torch.equal(by_kernel[2], by_torch[2])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(result, product) != with_grad


@pytest.mark.sweep(4, free=("dtype", "vocab", "rules", "own_mass"))
@pytest.mark.parametrize("own_mass", [True, False])
@pytest.mark.parametrize("rules", [(1.0, None), (0.7, None), (1.3, 4.0)])
@pytest.mark.parametrize("vocab", [3, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_row_kl_kernel_normalises_target_logits(
    dtype: torch.dtype, vocab: int, rules: tuple[float, float | None], own_mass: bool
) -> None:
    """Given products instead of log p, scaled and capped, of all its mass or a part: the same
    loss, gradient and labels.
    """
    product = (3 * torch.randn(4, vocab)).to(dtype)
    target_values = (3 * torch.randn(4, vocab)).to(dtype)
    weight = torch.rand(4)
    target_values[0, 1] = float("-inf") if rules[1] is None else 0.0
    target_logits = TargetLogits(target_values, *rules)
    if own_mass:  # of a larger vocabulary
        target_logits = target_logits._replace(
            log_z=target_logits._replace(log_z=torch.zeros(4)).log_p().logsumexp(-1) + torch.rand(4)
        )
    expected, by_log_p, actual = (product.clone() for _ in range(3))
    arguments = None, weight, 0.9, 2.0, True
    results = (
        row_kl_reference(expected, target_logits.log_p(), *arguments),
        row_kl(by_log_p, target_logits.log_p(), *arguments),
        row_kl(actual, target_logits.products, *arguments, *target_logits[1:]),
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for result, gradient in zip(results[1:], (by_log_p, actual)):
        torch.testing.assert_close(result[0], results[0][0], rtol=2e-5, atol=2e-5)
        assert torch.equal(result[1], results[0][1]) and torch.equal(result[2], results[0][2])
        torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(
        row_kl_reference(product.clone(), target_logits.products, *arguments, *target_logits[1:])[
            0
        ],
        results[0][0],
    )


@pytest.mark.parametrize("own_mass", [True, False])
def test_row_kl_kernel_reads_chosen_rows(own_mass: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that several drafts share, in any order, are read where they are: without a copy, the
    kernel has the losses, labels and gradients of copied rows."""
    products = 3 * torch.randn(3, 1500)
    rows = torch.tensor([2, 0, 0, 1, 2])
    log_z = products.logsumexp(-1) + 0.3 if own_mass else None
    target_logits = TargetLogits(products, 0.7, None, log_z)
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    chosen = target_logits.choose_rows(rows)
    assert chosen.products is products
    torch.testing.assert_close(chosen.log_p(), target_logits.select_rows(rows).log_p())
    product, weight = torch.randn(5, 1500), torch.rand(5)
    results = []
    for target in (chosen, target_logits.select_rows(rows)):
        for compute in (row_kl, row_kl_reference):
            gradient = product.clone()
            outputs = compute(gradient, target[0], None, weight, 0.9, 2.0, True, *target[1:])
            results.append((*outputs, gradient))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2e-5, atol=2e-5)
    monkeypatch.setenv("SPECTRAIN_KERNELS", "reference")
    assert target_logits.choose_rows(rows).products.shape == product.shape


def test_a_kernel_compares_larger_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel computes the loss, a chunk has more rows where the vocabulary is small, never
    fewer than elsewhere, and the bytes that it may take; the results are the same."""
    for vocab_size, value_bytes in ((32000, 2), (151936, 2), (49152, 4), (1 << 22, 4)):
        rows = module.count_chunk_rows(vocab_size, value_bytes)
        assert rows % module.GPU_BLOCK_ROWS == 0
        assert rows * vocab_size * value_bytes <= module.CHUNK_BYTES or rows == module.CHUNK_ROWS
    assert module.count_chunk_rows(32000, 2) == 4 * module.CHUNK_ROWS
    case = Case(torch.float32, bias=True)
    monkeypatch.setattr(module, "CHUNK_ROWS", 3)
    results = []
    for setting in ("triton", "reference"):
        monkeypatch.setenv("SPECTRAIN_KERNELS", setting)
        with OperationRecorder() as recorder:
            result = compute_fused(case, "forward_kl")
        results.append((recorder.largest, result.loss, case.gradients(result.loss)))
    by_kernel, by_torch = results
    assert by_torch[0] < ROWS * VOCAB == by_kernel[0]
    torch.testing.assert_close(by_kernel[1:], by_torch[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rules", [(1.0, None), (1.3, 4.0)])
def test_argmax_kernel_equals_torch(rules: tuple[float, float | None]) -> None:
    """One sweep over several blocks gives the most likely entry, of equal ones the first, and
    the log-sum-exp.
    """
    product = (2 * torch.randn(3, 1500)).half()
    product[1] = 0.5
    best, log_z = row_argmax(product, *rules)
    logits = TargetLogits(product, *rules, log_z=torch.zeros(3)).log_p()
    assert torch.equal(best, logits.argmax(-1))
    torch.testing.assert_close(log_z, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.library.opcheck(
        row_argmax, (product, *rules), test_utils=("test_schema", "test_faketensor")
    )


def test_kernels_take_a_first_block_of_impossible_tokens() -> None:
    """Where a bias masks all tokens of a row's first block, losses, log-sum-exps and gradients are
    those of the other tokens.
    """
    product = torch.randn(1, 8192)
    masked = torch.randn(1, 8192)
    masked[:, :4096] = float("-inf")
    weight = torch.ones(1)
    expected = product.clone()
    computed = product.clone()
    arguments = (None, weight, 1.0, None, True, 1.0)
    losses, _, labels = row_kl(computed, masked, *arguments)
    best, log_z = row_argmax(masked, 1.0, None)
    by_torch, _, expected_labels = row_kl_reference(expected, masked, *arguments)
    torch.testing.assert_close((losses, computed), (by_torch, expected))
    assert labels.equal(expected_labels) and best.equal(masked.argmax(-1))
    torch.testing.assert_close(log_z, masked.logsumexp(-1))


@pytest.mark.parametrize("own_mass", [True, False])
def test_target_products_in_pieces_are_equal(
    own_mass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a target restricted to few entries, a CPU makes the products of a few rows at a time."""
    case = Case(torch.float32, scale=0.7)
    results = []
    for products in (1, 3 * len(case.target.weight), 1 << 23):
        monkeypatch.setattr(module, "MAX_CPU_PRODUCTS", products)
        best, target = restrict_target(case.final, case.target, case.ids, own_mass)
        results.append((best, target(slice(0, len(case.final)))))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("own_mass", [True, False])
@pytest.mark.parametrize("chunk", [3, 100])
def test_unnormalised_target_gives_the_same_gradients(
    chunk: int, own_mass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target of more entries than the drafter has: by the kernels no log p is ever made, and
    loss, labels and gradients are those of torch, whether its rows are one chunk or several."""
    case = Case(torch.float32, scale=0.7)
    results = []
    for setting in ("triton", "reference"):
        monkeypatch.setenv("SPECTRAIN_KERNELS", setting)
        with OperationRecorder() as recorder:
            best, target = restrict_target(case.final, case.target, case.ids, own_mass, chunk)
            result = linear_divergence(case.hidden, case.head, target, chunk=chunk)
        by_kernel = setting == "triton"
        assert ("spectrain.row_best.default" in recorder.names) == by_kernel
        asks_mass = own_mass or chunk < len(case.final)  # torch leaves out what nobody reads
        assert ("aten.logsumexp.default" in recorder.names) == (asks_mass and not by_kernel)
        results.append((best, result.labels, result.loss, case.gradients(result.loss)))
    for left, right in zip(*results):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["tokens", "dense"])
@pytest.mark.parametrize("vocab", [1024, 1025, 9000])
def test_kernel_blocks_cover_every_vocabulary(vocab: int, which: str) -> None:
    """The same holds at the ends of the block table, and over a vocabulary of several blocks."""
    product = torch.randn(2, vocab)
    target_values = make_target_values(which, 2, vocab)
    expected = product.clone()
    result = product.clone()
    by_torch = row_kl_reference(expected, *target_values, torch.ones(2), 1.0, None, True)
    by_kernel = row_kl(result, *target_values, torch.ones(2), 1.0, None, True)
    for left, right in zip((*by_kernel, result), (*by_torch, expected)):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["cross_entropy", "forward_kl"])
def test_loss_with_the_kernel_equals_torch(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function gives the same with SPECTRAIN_KERNELS=triton, which runs the kernel, and
    without, which does not.
    """
    case = Case(dtype, bias=True, softcap=3.0)
    results = []
    for setting in ("triton", "reference"):
        monkeypatch.setenv("SPECTRAIN_KERNELS", setting)
        with OperationRecorder() as recorder:
            result = compute_fused(case, name, chunk=3)
        assert ("spectrain.row_kl.default" in recorder.names) == (setting == "triton")
        results.append((result, case.gradients(result.loss)))
    (by_kernel, left), (by_torch, right) = results
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(by_kernel.loss, by_torch.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
    assert torch.equal(by_kernel.predictions, by_torch.predictions) and torch.equal(
        by_kernel.labels, by_torch.labels
    )


def test_float64_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel computes in float32, so float64 does not reach it."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    with OperationRecorder() as recorder:
        compute_fused(Case(torch.float64), "forward_kl")
    assert "spectrain.row_kl.default" not in recorder.names


@pytest.mark.parametrize("which", TARGETS)
def test_fake_kernel_has_the_real_shapes(which: str) -> None:
    """torch.library.opcheck: schema, which argument is overwritten, and shapes, types and
    devices of the results.
    """
    arguments = (torch.randn(3, 9), *make_target_values(which, 3, 9), torch.ones(3), 0.5, 2.0, True)
    torch.library.opcheck(row_kl, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="compares the compiled kernel with torch: needs a GPU"
)
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: nothing is compiled"
)
@pytest.mark.parametrize("which", TARGETS)
@pytest.mark.parametrize("vocab", [1000, 5000, 32000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernel_equals_its_reference(which: str, vocab: int, dtype: torch.dtype) -> None:
    """On a GPU the kernel equals float64 on the same inputs."""
    product = torch.randn(64, vocab).to(dtype).cuda()
    target_values = tuple(
        None if x is None else x.cuda() for x in make_target_values(which, 64, vocab)
    )
    weight = torch.rand(64).cuda()
    expected = product.double()
    by_torch = row_kl_reference(expected, *target_values, weight.double(), 0.7, 3.0, True)
    by_kernel = row_kl(product, *target_values, weight, 0.7, 3.0, True)
    torch.testing.assert_close(by_kernel[0].double(), by_torch[0], rtol=1e-4, atol=1e-4)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(product.double(), expected, rtol=tolerance, atol=tolerance)


class Live(TorchDispatchMode):
    """Tracks the most bytes of tensors that are alive at one time, without those that were there
    before.
    """

    def __init__(self, *before: Tensor) -> None:
        super().__init__()
        self.counted = {tensor.untyped_storage()._cdata for tensor in before}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.counted:
                storage = tensor.untyped_storage()
                self.counted.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        return out

    def forget(self, key: int, size: int) -> None:
        self.counted.discard(key)
        self.now -= size


def test_peak_memory_is_a_fifth() -> None:
    """At 8,192 rows and a vocabulary of 128,256, counted on tensors without data by the path of
    a GPU; gradients included.
    """
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    hidden, final = (torch.empty(8192, 4096, **options) for _ in range(2))
    weight, target_values = (torch.empty(128256, 4096, **options) for _ in range(2))
    hidden.requires_grad_(), weight.requires_grad_()
    peaks = []
    for work in ("fused", "unfused"):
        with Live(hidden, final, weight, target_values) as live:
            loss_systems(hidden, weight, final, target_values)[work](0)
        peaks.append(live.peak)
    assert peaks[0] <= peaks[1] / 5, peaks
