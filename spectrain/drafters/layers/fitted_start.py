"""Initial weights of EAGLE's layers by least squares, so that training starts from a drafter that
drafts already.

The target's head computes its logits from the state after its final norm. Divided by the scale of
that norm, the state z_t is what a drafter's last layer has to return under the same norm and head.
Each linear module is fitted by ridge regression, one after another, to what the modules before it
leave of z:

    fc                 the fused features at t            ->  z_t
    v_proj, o_proj     the inputs of attention at t       ->  z_(t+1) - residual stream
    down_proj          random gated units of the stream   ->  z_(t+1) - stream after attention

Half of the query heads of every key head, or the only one, attend to their own position, so
attention passes on a linear map of its inputs, of at most as many dimensions as there are values.
`down_proj` over random units is an extreme learning machine (Huang et al., 2006). Then the scale of
the norm is set to the sharpness with the smallest KL divergence from the target.

Shapes: B batch, T tokens, D target width, R rows, I inputs, O outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.drafters.base import TrainingState
from spectrain.drafters.capabilities import FitOperations, FitSeconds
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import restrict_target
from spectrain.models.device import synchronize_device
from spectrain.models.target import Target

from .eagle_unrolled import UnrolledEagle
from .llama_layer import final_norm_scale
from .vocabulary import shift_labels

# Size of the residual stream relative to a state of the target. It is about the size of the
# predictions, so that a later draft step, which reads a prediction, finds what the first one finds.
# Fitting down_proj over two steps gained nothing (SmolLM2).
RESIDUAL = 0.8
# Ridge penalties, relative to inputs of unit variance.
FC_PENALTY = 1e-4
ATTENTION_PENALTY = 0.01
UNITS_PENALTY = 0.03
SHARPNESS = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
SHARPNESS_ROWS = 2048
# Width of the products that the speed of a fit is estimated by.
PROBE_SIZE = 768
# Seconds that they go on for each type.
PROBE_SECONDS = 0.5
# How much longer the operations of a fit take: sums over regressions of 2,432 inputs took 1.6 times
# as long as those products, and solving them 1.4 times.
OVERHEAD = 1.6


class RidgeRegression:
    """The sums of a linear regression from inputs [R, I] to outputs [R, O], with a penalty on
    the weights.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        # Sums of x x^T [I, I] and of x y^T [I, O].
        self.products = torch.zeros(())
        self.targets = torch.zeros(())

    def add_rows(self, inputs: Tensor, outputs: Tensor) -> None:
        """Add rows, whose sums are accumulated in float64."""
        x = inputs.float()
        y = outputs.float()
        if not self.num_rows:
            self.products, self.targets = (
                torch.zeros(x.shape[1], size, dtype=torch.float64, device=x.device)
                for size in (x.shape[1], y.shape[1])
            )
        self.num_rows += len(x)
        self.products += x.T @ x
        self.targets += x.T @ y

    def solve(self, penalty: float) -> Tensor:
        """Return the weights [O, I], in float64; inputs are scaled to unit variance for the
        penalty.
        """
        size = self.products.diagonal().clamp(min=torch.finfo(torch.float64).tiny).sqrt()
        scaled = self.products / size[:, None] / size
        scaled.diagonal().add_(penalty)
        # The penalty makes the matrix positive definite.
        factor = torch.linalg.cholesky(scaled)
        return (torch.cholesky_solve(self.targets / size[:, None], factor) / size[:, None]).T

    def predicted_covariance(self, weight: Tensor) -> Tensor:
        """Return the second moments [O, O] of the outputs that weights [O, I] predict."""
        return weight @ self.products @ weight.T / self.num_rows


def count_fit(drafter: UnrolledEagle, num_tokens: float) -> FitOperations:
    """Return the operations of `fit_eagle` for a drafter and a number of tokens."""
    modules: Any = drafter
    fc, o_proj, down_proj = modules.fc, modules.self_attn.o_proj, modules.mlp.down_proj
    width = fc.out_features
    # Inputs and outputs of the three regressions.
    shapes = [
        (fc.in_features, width),
        (modules.self_attn.v_proj.in_features, o_proj.out_features),
        (down_proj.in_features, down_proj.out_features),
    ]
    layers = sum(p.numel() for p in (*modules.self_attn.parameters(), *modules.mlp.parameters()))
    vocab_size = len(modules.draft_ids)
    # fc runs for every regression, and the layers for the last one.
    row = 2 * (3 * fc.weight.numel() + layers)
    row += sum(2 * inputs * (inputs + outputs) for inputs, outputs in shapes)
    # The products of the head, and of each row of the sharpness with fc, the layers and both output
    # layers.
    fixed = 2 * vocab_size * width**2
    outputs = width * (vocab_size + modules.head.vocab_size)
    fixed += 2 * min(SHARPNESS_ROWS, num_tokens) * (fc.weight.numel() + layers + outputs)
    exact = sum(inputs**3 / 3 + 2 * inputs**2 * outputs for inputs, outputs in shapes)
    # The covariance of the predictions, and eigenvectors of the size of a state.
    exact += 2 * width * shapes[1][0] ** 2 + 10 * width**3
    return FitOperations(row, fixed, exact)


@torch.no_grad()
def measure_fit(
    drafter: nn.Module,
    clock: Callable[[], float] = time.perf_counter,
    count: Callable[[Any, float], FitOperations] = count_fit,
) -> FitSeconds:
    """Estimate the seconds of `fit_eagle`, or of another fit with a `count` of its own, for a
    drafter, from its number of operations and the speed of small ones.
    """
    operations = count(drafter, SHARPNESS_ROWS)
    device = next(drafter.parameters()).device
    single, double = (
        OVERHEAD * _seconds_per_operation(dtype, device, clock)
        for dtype in (torch.float32, torch.float64)
    )
    return FitSeconds(
        operations.per_token * single, operations.single * single + operations.double * double
    )


def _seconds_per_operation(
    dtype: torch.dtype, device: torch.device, clock: Callable[[], float]
) -> float:
    """Time products of a type after a first one, and return the seconds of an operation.

    A single product may fall into a moment in which no other process runs.
    """
    rows = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype, device=device)
    rows @ rows
    synchronize_device(device)
    start = clock()
    num_products = 0
    while not num_products or clock() - start < PROBE_SECONDS:
        rows @ rows
        synchronize_device(device)
        num_products += 1
    return (clock() - start) / (num_products * 2 * PROBE_SIZE**3)


@torch.no_grad()
def fit_eagle(drafter: UnrolledEagle, batches: Sequence[Batch], target: Target) -> None:
    """Fit the initial weights of a drafter to the target's states in these batches, which hold the
    drafter's features.

    Rows whose next token carries loss count. Without them the drafter stays as it is, and does not
    start trained.
    """
    drafter.starts_trained = any(bool(label_positions(batch, 0).any()) for batch in batches)
    if drafter.starts_trained:
        fitter = EagleFitter(
            drafter, batches, state_scale(target, batches).to(drafter.fc.weight.device)
        )
        fitter.clear_outputs()
        fitter.fit_fc()
        fitter.fit_attention()
        fitter.fit_mlp()
        fitter.fit_sharpness()


def state_scale(target: Target, batches: Sequence[Batch]) -> Tensor:
    """Return the scale [D] that the final norm gives to states of unit size, or the mean size
    where it is another norm.
    """
    scale = final_norm_scale(target)
    if scale is None:
        final = [
            batch.features.at_layer("final")[batch.next_is_supervised]
            for batch in batches
            if batch.features is not None
        ]
        return torch.cat(final).float().square().mean().sqrt().expand(target.width)
    smallest = 1e-3 * scale.abs().mean()
    return torch.where(scale.abs() < smallest, smallest, scale)


class EagleFitter:
    """Fits one module of a drafter after another to the target's states."""

    def __init__(self, drafter: UnrolledEagle, batches: Sequence[Batch], scale: Tensor) -> None:
        self.drafter: Any = drafter
        self.batches, self.scale = batches, scale

    def read_batches(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yield every batch on the drafter's device, with the states [B, T, D] of the target
        that a norm of scale 1 gives.
        """
        for batch in self.batches:
            moved = batch.to(self.scale.device)
            assert moved.features is not None
            yield moved, moved.features.at_layer("final").float() / self.scale

    def clear_outputs(self) -> None:
        """Let the layers pass on the residual stream, with the norms and random units that the
        fits assume.
        """
        drafter = self.drafter
        layers = [
            (drafter.self_attn, drafter.mlp),
            *((layer.self_attn, layer.mlp) for layer in drafter.later),
        ]
        for attention, mlp in layers:
            attention.o_proj.weight.zero_()
            mlp.down_proj.weight.zero_()
        for linear in (drafter.mlp.gate_proj, drafter.mlp.up_proj):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        # The normed state is the residual stream, or only what attention reads.
        read_size = RESIDUAL if drafter.norm_before_residual else 1.0
        drafter.hidden_norm.weight.fill_(read_size)
        drafter.norm.weight.copy_(self.scale)
        # Its inputs are smaller then, and products of queries and keys with them.
        drafter.self_attn.init_self(strength=1.2 * (2 / (1 + read_size**2)) ** 0.5)

    def fit_fc(self) -> None:
        """Fit fc to the states that the next draft step reads in place of its outputs."""
        drafter = self.drafter
        fit = RidgeRegression()
        with record_inputs(drafter.fc) as inputs:
            for batch, states in self.read_batches():
                drafter.fuse_features(batch.input_features)
                rows = batch.next_is_supervised & (batch.positions > 0)
                fit.add_rows(
                    inputs.pop()[rows],
                    (states * self.scale if drafter.norm_output else states)[rows],
                )
        size = 1.0 if drafter.norm_before_residual else RESIDUAL
        drafter.fc.weight.copy_(size * fit.solve(FC_PENALTY))

    def fit_attention(self) -> None:
        """Fit values and outputs of the heads that attend to their own position."""
        drafter = self.drafter
        fit = RidgeRegression()
        for batch, states in self.read_batches():
            hidden = drafter.fuse_features(batch.input_features)
            x, residual = drafter.attention_inputs(batch.tokens.roll(-1, dims=1), hidden)
            rows = label_positions(batch, 0)
            fit.add_rows(x[rows], (states.roll(-1, dims=1) - residual)[rows])
        weight = fit.solve(ATTENTION_PENALTY)
        attention = drafter.self_attn
        head_size = attention.head_dim
        num_heads = attention.num_heads
        values, outputs = factorize(
            weight,
            fit.predicted_covariance(weight),
            self.logit_products(),
            attention.v_proj.out_features,
        )
        attention.v_proj.weight[: len(values)] = values.to(attention.v_proj.weight.dtype)
        shared = num_heads // (attention.v_proj.out_features // head_size)
        num_own = (shared + 1) // 2
        own = outputs.unflatten(1, (-1, 1, head_size)).expand(-1, -1, num_own, -1) / num_own
        attention.o_proj.weight.unflatten(1, (-1, shared, head_size))[:, :, :num_own] = own.to(
            attention.o_proj.weight.dtype
        )

    def logit_products(self) -> Tensor:
        """Return W^T W [D, D] of the output layer over the draft vocabulary, which weighs errors
        of states by their logits.
        """
        drafter = self.drafter
        weight = drafter.head.output.weight[drafter.draft_ids.to(drafter.head.output.weight.device)]
        scaled = weight.float().to(self.scale.device) * self.scale
        return (scaled.T @ scaled).double()

    def fit_mlp(self) -> None:
        """Fit down_proj over the first draft step."""
        drafter = self.drafter
        fit = RidgeRegression()
        with (
            record_inputs(drafter.post_attention_layernorm) as streams,
            record_inputs(drafter.mlp.down_proj) as units,
        ):
            for batch, states in self.read_batches():
                next(drafter.unroll_steps(batch, 1, TrainingState()))
                rows = label_positions(batch, 0)
                fit.add_rows(units.pop()[rows], (states.roll(-1, dims=1) - streams.pop())[rows])
        drafter.mlp.down_proj.weight.copy_(fit.solve(UNITS_PENALTY))

    def fit_sharpness(self) -> None:
        """Scale the norm so that KL(p || q) of the first draft step is smallest, over some rows."""
        drafter = self.drafter
        num_rows = 0
        totals = torch.zeros(len(SHARPNESS))
        # The target's logits are scaled where its family does that.
        candidates = [sharpness * drafter.head.scale for sharpness in SHARPNESS]
        for batch, _ in self.read_batches():
            rows = label_positions(batch, 0)
            hidden = next(drafter.unroll_steps(batch, 1, TrainingState()))[rows]
            assert batch.features is not None
            final = batch.features.at_layer("final").roll(-1, dims=1)[rows]
            if len(final):
                _, log_probs = restrict_target(
                    final, drafter.head.projection, drafter.draft_ids, False
                )
                log_p = log_probs(slice(0, len(final)))
                logits = drafter.lm_head(drafter.head_inputs(hidden)).float()
                for number, sharpness in enumerate(candidates):
                    totals[number] += float(
                        (log_p.exp() * (log_p - (sharpness * logits).log_softmax(-1))).sum()
                    )
            num_rows += len(final)
            if num_rows >= SHARPNESS_ROWS:
                break
        drafter.norm.weight.mul_(candidates[int(totals.argmin())])


def label_positions(batch: Batch, step: int) -> Tensor:
    """Return [B, T] bool: the positions t where draft step `step` has a label, the target's
    state at t + 1 + step.
    """
    return shift_labels(batch.next_is_supervised.int(), batch.positions, step, 0).bool()


@contextmanager
def record_inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list to which the module's first argument is appended whenever it runs."""
    inputs: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        yield inputs
    finally:
        handle.remove()


def factorize(
    weight: Tensor, covariance: Tensor, metric: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Return A [rank, I] and B [O, rank], whose product B A is nearest to a weight [O, I] in its
    predictions.

    Errors e of predictions, which have second moments `covariance` [O, O], count as e^T `metric` e
    (reduced-rank regression, Izenman, 1975). The rows of A have the size of random weights. With a
    rank above O, A has O rows and B columns of zeros.
    """
    size = metric.diagonal().mean()
    root = torch.linalg.cholesky(
        metric / size + 1e-3 * torch.eye(len(metric), dtype=metric.dtype, device=metric.device)
    )
    # by ascending eigenvalue
    vectors = torch.linalg.eigh(root.T @ covariance @ root).eigenvectors[:, -rank:]
    inner = vectors.T @ root.T @ weight
    outer = torch.linalg.solve_triangular(root.T, vectors, upper=True)
    norms = inner.norm(dim=1).clamp(min=torch.finfo(inner.dtype).tiny)
    inner = inner / norms[:, None]
    outer = outer * norms
    return inner, nn.functional.pad(outer, (0, rank - len(inner)))
