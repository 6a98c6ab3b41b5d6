"""Faster linears on a CPU, through oneDNN instead of the default BLAS.

Decoding is bound by reading weights. The default path reorders them at every call; here they are
reordered once. The linears of a layer that read the same input (queries, keys and values; gate and
up) are one product. Measured on two cores (AMD EPYC, AVX-512), 90 linears of 1536x576: 1 row 20 ->
6 ms, 16 rows 38 -> 11 ms. The three products of training (forward, input and weight gradient; 1024
rows) run 2 to 4 times as fast. Both sides of every comparison in this project, autoregressive and
drafted, run on these linears.
"""

import copy
import warnings
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.kernels.dispatch import run_on_cpu
from spectrain.kernels.onednn import onednn_linear
from spectrain.models.architectures.quantized import has_dense_weight, is_in_blocks
from spectrain.models.forward_override import set_forward
from spectrain.models.weight_block import BlockLinear

from .batch_invariance import (
    CONSISTENT_ROWS,
    batch_invariant,
    has_bfloat16,
    multiply_paired,
    packable_dtypes,
)
from .shared_product import SharedProduct, find_shared_linears

SMALL_WEIGHTS = 1 << 18
"""Number of weights up to which the default BLAS, over few rows, is done before oneDNN has begun
(Xeon: 8 us against 25).
"""
FEW_ROWS = 64
MAX_PANEL_THREADS = 8
"""Number of threads up to which a few rows are multiplied by panels of weights."""


class _TrainableLinear(torch.autograd.Function):
    """A linear whose forward and backward products run through oneDNN in `dtype`; gradients have
    the types of their operands."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.types = input.dtype, weight.dtype
        ctx.has_bias = bias is not None
        input = input.to(dtype)
        weight = weight.to(dtype)
        ctx.save_for_backward(input, weight)
        return onednn_linear(input, weight, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        input_dtype, weight_dtype = ctx.types
        gradient = gradients[0].reshape(-1, weight.shape[0]).contiguous()
        for_input = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_input = onednn_linear(gradient, weight.t()).view(input.shape).to(input_dtype)
        if ctx.needs_input_grad[1]:
            # The input must be contiguous: oneDNN multiplies rows with gaps between them a hundred
            # times slower.
            for_weight = onednn_linear(
                gradient.t(), input.reshape(-1, weight.shape[1]).contiguous().t()
            ).to(weight_dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            for_bias = gradient.sum(0, dtype=weight_dtype)
        return for_input, for_weight, for_bias, None


class FeatureLinear(BlockLinear):
    """A linear that reads target features. A few features are so large that 8 bits would hold
    little of the others, so packed weights of this class are never rounded to integers."""


class Panels(Protocol):
    """Weights [O, D] in the form in which an installed package multiplies a few rows by them."""

    @property
    def is_enabled(self) -> bool:
        """Whether the package's kernels are switched on."""

    @property
    def serve_many_rows(self) -> bool:
        """Whether many rows are multiplied by them as fast as by reordered weights, which are then
        not kept.
        """

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [.., D] times the weights plus the bias, [.., O]."""


class PackedWeights:
    """The stacked weights of some linears, reordered for one product.

    The copy is made at the first use and again when a weight was written to or replaced, so
    training a target and then decoding with it is safe. With `low_precision`, large weights are
    copied as 8-bit integers where the processor multiplies these, and else as bfloat16 where it
    multiplies that.
    """

    def __init__(self, linears: Sequence[nn.Linear], low_precision: bool = False) -> None:
        self.linears, self.low_precision = linears, low_precision
        # copied weights and their versions
        self.packed_versions: list[tuple[weakref.ref[Tensor], int]] = []
        self.packed: Tensor | None = None
        self.packed_int8: Any = None  # FBGEMM weights, used instead
        # for a few rows; False where they do not serve
        self.panels: Panels | Literal[False] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedWeights":
        """Return weights that are packed anew from the copied linears."""
        return PackedWeights(copy.deepcopy(self.linears, memo), self.low_precision)

    def product(self, input: Tensor) -> Tensor:
        """Return the outputs of all linears side by side, [.., D] -> [.., O]."""
        self.refresh()
        assert self.packed is not None
        bias = self.join_biases()
        if self.packed_int8 is not None:
            output = torch.ops.quantized.linear_dynamic(input.float(), self.packed_int8).to(
                input.dtype
            )
            return output if bias is None else output + bias
        if self.packed.dtype == input.dtype and (panels := self._serving_panels(input)) is not None:
            return panels.product(input, bias)
        if self._is_small(self.packed) and input.numel() <= FEW_ROWS * input.shape[-1]:
            return F.linear(input, self.packed, bias)
        if self.packed.dtype == input.dtype:
            if input.dtype == torch.bfloat16:
                return self._bfloat16_product(input, self.packed, bias)
            return onednn_linear(input, self.packed, bias)
        output = onednn_linear(input.to(self.packed.dtype), self.packed).to(input.dtype)
        return output if bias is None else output + bias

    def refresh(self) -> None:
        """Pack the weights where they are not packed, or were written to or replaced since."""
        weights: list[Tensor] = [linear.weight for linear in self.linears]
        is_current = len(self.packed_versions) == len(weights) and all(
            copied() is weight and version == weight._version
            for (copied, version), weight in zip(self.packed_versions, weights)
        )
        if self.packed is None or not is_current or self._misses_kernels:
            self._pack_weights()
            self.packed_versions = [(weakref.ref(weight), weight._version) for weight in weights]

    @property
    def _misses_kernels(self) -> bool:
        """Whether panels are all there is, and their kernels are switched off."""
        panels = self.panels or None
        return panels is not None and panels.serve_many_rows and not panels.is_enabled

    @property
    def _are_blocks(self) -> bool:
        """Whether weights stay in the blocks of a GGUF file, of which panels are no copies."""
        return is_in_blocks(self.linears[0].weight)

    def _stack_weights(self) -> Tensor:
        weights = [linear.weight.detach() for linear in self.linears]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def find_panels(self) -> Panels | None:
        """Return the packed weights in panels where a few rows are multiplied by them faster: in
        bfloat16 with the bits of oneDNN, in float32 with bits that do not depend on the other rows.
        """
        if self.panels and self.panels.serve_many_rows:
            return self.panels
        if torch.get_num_threads() > MAX_PANEL_THREADS:
            return None
        if self.panels is None:
            self.panels = self._make_panels() or False
        return self.panels or None

    def _serving_panels(self, input: Tensor) -> Panels | None:
        """Return the panels by which to multiply an input [.., D]: that of a step of decoding."""
        is_decoding = input.numel() <= CONSISTENT_ROWS * input.shape[-1] or batch_invariant.get()
        is_alone = self.panels and self.panels.serve_many_rows
        panels = self.find_panels() if is_decoding or is_alone else None
        return panels if panels is not None and panels.is_enabled else None

    def _make_panels(self) -> Panels | None:
        weights = [linear.weight.detach() for linear in self.linears]
        dtype = weights[0].dtype
        panels: Panels | None = None
        if self._are_blocks:
            panels = run_on_cpu("join_blocks", weights)
        elif self.packed_dtype == dtype and not (self.low_precision and dtype == torch.float32):
            panels = run_on_cpu("pack_panels", *weights)
        return panels

    def join_biases(self) -> Tensor | None:
        """Return the biases of all linears side by side, [O]."""
        biases: list[Tensor] = [linear.bias for linear in self.linears if linear.bias is not None]
        return torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None

    def _pack_weights(self) -> None:
        """Store the stacked weights [O, D] in the forms in which they are multiplied."""
        self.packed_int8 = None
        self.panels = None
        # At once, so that no step that is timed makes them.
        if torch.get_num_threads() <= MAX_PANEL_THREADS or self._are_blocks:
            self.panels = self._make_panels() or False
        first = self.linears[0].weight
        # What is multiplied by them alone; a new tensor shows that they were packed anew.
        self.packed = torch.empty(0, first.shape[1], dtype=first.dtype, device=first.device)
        if self.panels and self.panels.serve_many_rows:
            return
        weight = self._stack_weights()
        dtype = self.packed_dtype
        if dtype == torch.int8:
            self.packed_int8 = pack_int8(weight)
        elif self._is_small(weight):
            self.packed = weight
        else:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype))

    @property
    def packed_dtype(self) -> torch.dtype:
        """Return the type in which the stacked weights are multiplied."""
        dtype = self.linears[0].weight.dtype
        size = sum(linear.weight.numel() for linear in self.linears)
        if self._are_blocks or not self.low_precision:
            return dtype
        if dtype == torch.float32 and not is_large_weight(size):
            return dtype
        reads_features = any(isinstance(linear, FeatureLinear) for linear in self.linears)
        if is_large_weight(size) and has_int8() and not reads_features:
            return torch.int8
        return torch.bfloat16 if dtype == torch.float32 and has_bfloat16() else dtype

    def _bfloat16_product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply in bfloat16, in pieces small enough that the bits of a row do not depend on
        the others.
        """
        rows = input.reshape(-1, input.shape[-1])
        if len(rows) <= CONSISTENT_ROWS or not batch_invariant.get():
            return multiply_paired(input, lambda rows: onednn_linear(rows, weight, bias))
        parts = [
            multiply_paired(part, lambda rows: onednn_linear(rows, weight, bias))
            for part in rows.split(CONSISTENT_ROWS)
        ]
        return torch.cat(parts).view(*input.shape[:-1], -1)

    @staticmethod
    def _is_small(weight: Tensor) -> bool:
        return weight.dtype == torch.float32 and not is_large_weight(weight.numel())


class SharedInput(SharedProduct):
    """Packed linears that read the same input."""

    def __init__(self, linears: Sequence[nn.Linear], low_precision: bool = False) -> None:
        super().__init__(linears)
        self.weights = PackedWeights(linears, low_precision)

    def product(self, input: Tensor) -> Tensor:
        return self.weights.product(input)


class PackedLinear:
    """The forward of one `nn.Linear` on a reordered copy of its weight, or a differentiable one
    where a gradient is needed.
    """

    def __init__(
        self, linear: nn.Linear, shared: SharedInput | None = None, low_precision: bool = False
    ) -> None:
        self.linear, self.shared = linear, shared
        self.weights = PackedWeights([linear], low_precision)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedLinear":
        """Return a forward that packs the weight of the copied linear."""
        return PackedLinear(
            copy.deepcopy(self.linear, memo), low_precision=self.weights.low_precision
        )

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        cast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if cast else weight.dtype
        if dtype not in packable_dtypes() or weight.device.type != "cpu" or not input.numel():
            return F.linear(input, weight, bias)
        learns = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (input, weight, bias)
        )
        if learns and (cast or input.dtype == weight.dtype):
            # An optimizer may be about to change the weight.
            self.discard_packed()
            return _TrainableLinear.apply(input, weight, bias, dtype)
        if learns or input.dtype != weight.dtype:
            return F.linear(input, weight, bias)
        if self.shared is not None:
            return self.shared.take_output(self.shared.linears.index(self.linear), input)
        return self.weights.product(input)

    def discard_packed(self) -> None:
        """Pack the weights anew at the next use."""
        self.weights.packed = None
        if self.shared is not None:
            self.shared.weights.packed = None


def is_large_weight(num_weights: int) -> bool:
    """Return whether a product with so many weights takes longer than its launch."""
    return num_weights > SMALL_WEIGHTS


@cache
def has_int8() -> bool:
    """Return whether the processor multiplies 8-bit integers, which are half the bytes of
    bfloat16, and torch brings FBGEMM.
    """
    if not (
        torch.cpu._is_vnni_supported() and "fbgemm" in torch.backends.quantized.supported_engines
    ):
        return False
    try:
        pack_int8(torch.ones(8, 8))
    # Later versions of torch may have no quantized tensors.
    except (AttributeError, RuntimeError):
        return False
    return True


def pack_int8(weight: Tensor) -> Any:
    """Return weights [O, D] in 8 bits with one scale per output, ready for FBGEMM, which rounds the
    inputs to 8 bits as well."""
    weight = weight.float()
    scales = (weight.abs().amax(1) / 127).clamp(min=1e-12)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            rounded = torch.quantize_per_channel(
                weight, scales, torch.zeros_like(scales, dtype=torch.int64), 0, torch.qint8
            )
        return torch.ops.quantized.linear_prepack(rounded, None)
    finally:
        torch.backends.quantized.engine = before


def pack_linears(module: nn.Module, low_precision: bool = False) -> None:
    """Give every `nn.Linear` in `module` the packed forward; do nothing off the CPU or without
    oneDNN. Draft models may use `low_precision` weights, as `PackedWeights` describes. Linears that
    are packed already pack their weights anew, because a write through `.data` leaves the version
    of a weight unchanged."""
    if not packable_dtypes():
        return
    groups = [
        SharedInput(linears, low_precision)
        for parent in module.modules()
        for linears in find_shared_linears(parent)
    ]
    shared = {linear: group for group in groups for linear in group.linears}
    for child in module.modules():
        if is_packed(child):
            child.forward.discard_packed()  # type: ignore[attr-defined]
        elif (
            isinstance(child, nn.Linear)
            and (type(child) is nn.Linear or isinstance(child, BlockLinear))
            and _is_on_cpu(child)
        ):
            set_forward(child, PackedLinear(child, shared.get(child), low_precision))


def _is_on_cpu(linear: nn.Linear) -> bool:
    return has_dense_weight(linear) and linear.weight.device.type == "cpu"


def cut_output(linear: nn.Linear, count: int) -> nn.Linear:
    """Return a linear of the first `count` outputs, or a few more, whose weights share the memory
    of the linear's; it is packed as that is.
    """
    weight: Any = linear.weight.detach()
    weight = weight.first_rows(count) if is_in_blocks(weight) else weight[:count]
    cut = nn.Linear(1, 1, bias=False, device="meta")
    cut.out_features, cut.in_features = weight.shape
    cut.weight = nn.Parameter(weight, requires_grad=False)
    if linear.bias is not None:
        cut.bias = nn.Parameter(linear.bias.detach()[: len(weight)], requires_grad=False)
    if is_packed(linear):
        forward: Any = linear.forward
        pack_linears(cut, forward.weights.low_precision)
    return cut


def unpack_linears(module: nn.Module) -> None:
    """Undo `pack_linears`."""
    for child in module.modules():
        if is_packed(child):
            set_forward(child, None)


def lowest_precision(module: nn.Module) -> str | None:
    """Return the type of the fewest bits in which weights of a module are multiplied, as in
    int8; None without weights.
    """
    types = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    packed: list[Any] = [child.forward for child in module.modules() if is_packed(child)]
    types |= {(forward.shared or forward).weights.packed_dtype for forward in packed}
    return (
        str(min(types, key=lambda dtype: dtype.itemsize)).removeprefix("torch.") if types else None
    )


def is_packed(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), PackedLinear)


def packed_product(linear: Any, input: Tensor) -> Tensor:
    """Return the output [.., O] of a packed linear."""
    weights: PackedWeights = linear.forward.weights
    return weights.product(input)


def shared_input(linear: Any) -> SharedInput | None:
    """Return the linears that read the same input as a packed one; None where it is not packed
    or is alone.
    """
    return linear.forward.shared if is_packed(linear) else None


def packed_weights(linear: Any) -> PackedWeights:
    """Return the up-to-date packed weights of a packed linear, with those of the linears that
    read the same input.
    """
    weights: PackedWeights = (linear.forward.shared or linear.forward).weights
    weights.refresh()
    return weights
