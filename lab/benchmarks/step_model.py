"""A model of an EAGLE-3 training step by part: operations, bytes, and the share of a GPU's peak
that each part can reach. Nothing here needs a GPU, and no number was measured on one.

    python -m lab.benchmarks.step_model [model=8b] [tokens=8192] [length=2048] [steps=7]

Operations and the fewest bytes follow from shapes: every matrix product and every other kernel
reads its inputs and writes its outputs once, in bfloat16, with queries, keys and values as one
product, gate and up as another, and one kernel each for what lies between products. The bytes by
modules and by kernels are counted: the step runs on the device "meta", and every operation reads
what it is given and writes what it makes. Autocast adds to them: its copies of weights are not
counted, because weights are in bfloat16 here, and neither are the norms in float32 of its modules.

Shapes: T tokens of a batch in texts of equal length, W width, H query heads, K key-value heads, D
head size, I inner width, V draft vocabulary, R rows of the output layer, S draft steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.kernels import later_keys, linear_divergence
from spectrain.models import attention as attention_module
from spectrain.models.fast import (
    fuse_text_layers,
    merge_linears,
    text_kernels,
    training_products,
)
from spectrain.models.target import Target

from .command import run_benchmark
from .launches import SILENT
from .models import MODELS, ModelGeometry, build_meta_target, random_drafter
from .training import random_batch

VALUE = 2
"""Bytes of a value in bfloat16."""
OPTIMIZER_BYTES = {
    # Weight, gradient and two means are read; weight and means are written.
    "fused": 28,
    # torch's foreach: mul, lerp, mul, addcmul, sqrt, div, add and addcdiv, each over all weights.
    "foreach": 8 + 12 + 8 + 16 + 8 + 8 + 8 + 16,
}
"""Bytes that AdamW moves for a weight in float32, by how it is computed."""
BETWEEN = ("norms, residuals, gate, embedding", "rotation and later keys")
"""Counted parts of draft steps between their products."""
aten = torch.ops.aten
SUMS = (aten.addmm, aten.addmm_)
"""Products that are added to something."""
ROWS = (aten.embedding, aten.index_copy_)
"""Operations that read or write chosen rows."""
FILLS = (aten.zeros_like, aten.new_zeros)
"""Operations that do not read what they are given."""
CLIP_BYTES = 4 + 8
"""Bytes of a gradient's norm and of its scaling."""
CAST_BYTES = 4 + 2 + 2 + 4
"""Bytes of a weight that becomes bfloat16, and of its gradient that becomes float32."""


@dataclass(frozen=True)
class Gpu:
    """Peaks of a GPU's data sheet, and the rates of large products and copies of an H200."""

    name: str
    peak_flops: float
    peak_bytes: float

    @property
    def flops(self) -> float:
        """The rate of a large product of random numbers: 790 of an H200's 989 TFLOP/s."""
        return self.peak_flops * 790 / 989

    @property
    def bytes(self) -> float:
        """The rate of a large copy: 4.3 of an H200's 4.8 TB/s."""
        return self.peak_bytes * 4.3 / 4.8


GPUS = (Gpu("H100", 989e12, 3.35e12), Gpu("H200", 989e12, 4.8e12))


@dataclass(frozen=True)
class Work:
    """The operations of a part of a step, and the bytes that it moves."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, factor: float) -> Work:
        return Work(self.flops * factor, self.bytes * factor)

    def seconds(self, gpu: Gpu) -> float:
        """Return the least time: of the products or of the bytes, whichever is longer."""
        return max(self.flops / gpu.flops, self.bytes / gpu.bytes)

    def share_of_peak(self, gpu: Gpu) -> float:
        """Return the reached share of the data sheet's operations a second."""
        seconds = self.seconds(gpu)
        return self.flops / seconds / gpu.peak_flops if seconds else 0.0


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step. Every token is supervised."""

    model: ModelGeometry
    tokens: int = 8192
    length: int = 2048
    steps: int = 7

    @property
    def texts(self) -> int:
        return self.tokens // self.length

    @property
    def label_rows(self) -> int:
        """Rows of the target's distribution: of tokens 2 and later."""
        return self.texts * (self.length - 2)

    @property
    def judged_rows(self) -> int:
        """Rows of the drafter's output layer: step i predicts tokens i + 2 and later."""
        return self.texts * sum(self.length - 2 - step for step in range(self.steps))

    @property
    def causal_pairs(self) -> int:
        """Pairs of a query and a key that it sees in one causal attention."""
        return self.texts * self.length * (self.length + 1) // 2

    @property
    def attended(self) -> int:
        """Width of queries: H D."""
        return self.model.heads * self.model.head_size

    @property
    def keys(self) -> int:
        """Width of keys: K D."""
        return self.model.kv_heads * self.model.head_size


def product_work(
    rows: float, inputs: int, outputs: int, training: bool, grad_inputs: bool = True
) -> Work:
    """Return the work of a product of `rows` with a weight [outputs, inputs], with its gradients
    where it is trained.
    """
    weight = inputs * outputs
    moved = rows * (inputs + outputs) + weight
    passes = 1 + training + (training and grad_inputs)
    return Work(2 * rows * weight, VALUE * moved) * passes


def attention_work(shape: StepShape, later: int, training: bool) -> Work:
    """Return the work of attention over causal keys and those of `later` earlier draft steps."""
    q, kv = shape.attended, 2 * shape.keys
    pairs = shape.causal_pairs + later * shape.tokens
    forward = Work(4 * q * pairs, VALUE * shape.tokens * (2 * q + (1 + later) * kv))
    if not training:
        return forward
    # Queries, outputs and their gradient are read, the gradient of queries is written; keys and
    # values are read, and their gradients written.
    backward = Work(10 * q * pairs, VALUE * shape.tokens * (4 * q + 2 * (1 + later) * kv))
    return forward + backward


def between_products(shape: StepShape, training: bool, norms: int, rotates: bool = True) -> Work:
    """Return the work between the products of a layer, one kernel each: norms with their residual
    sums, the gated unit, and rotation, unless it is in the launch that appends keys.
    """
    norm = 4 * shape.model.width
    rotation = rotates * 2 * (shape.attended + shape.keys)
    gate = 3 * shape.model.inner
    forward = norms * norm + rotation + gate
    # The backward pass reads the inputs again, beside the gradient.
    backward = norms * (norm + shape.model.width) + rotation + 5 * shape.model.inner
    return Work(0, VALUE * shape.tokens * (forward + training * backward))


def target_layer(shape: StepShape) -> dict[str, Work]:
    """Return the work of a layer of the target, by part."""
    m = shape.model
    qkv = product_work(shape.tokens, m.width, shape.attended + 2 * shape.keys, training=False)
    out = product_work(shape.tokens, shape.attended, m.width, training=False)
    up = product_work(shape.tokens, m.width, 2 * m.inner, training=False)
    down = product_work(shape.tokens, m.inner, m.width, training=False)
    return {
        "products": qkv + out + up + down,
        "attention": attention_work(shape, 0, training=False),
        "between products": between_products(shape, training=False, norms=2),
    }


def draft_step(shape: StepShape, step: int) -> dict[str, Work]:
    """Return the work of a draft step of EAGLE-3, with its gradients, by part."""
    m = shape.model
    qkv = product_work(shape.tokens, 2 * m.width, shape.attended + 2 * shape.keys, training=True)
    out = product_work(shape.tokens, shape.attended, m.width, training=True)
    up = product_work(shape.tokens, m.width, 2 * m.inner, training=True)
    down = product_work(shape.tokens, m.inner, m.width, training=True)
    return {
        "attention": attention_work(shape, step, training=True),
        "products of attention": qkv + out,
        "MLP": up + down,
        # Norms of the embedding, of the state, before the MLP and before the output layer.
        "norms, rotation, gate": between_products(shape, training=True, norms=4),
    }


def output_layer(shape: StepShape) -> Work:
    """Return the work of the drafter's output layer, its loss, and the target's distribution."""
    m = shape.model
    judged = product_work(shape.judged_rows, m.width, m.draft_vocab, training=True)
    labels = product_work(shape.label_rows, m.width, m.vocab, training=False)
    # A kernel reads both models' logits and writes the gradient; another finds the target's
    # first choices, and the entries of the draft vocabulary are copied.
    kernel = 3 * shape.judged_rows * m.draft_vocab
    chosen = shape.label_rows * (m.vocab + 2 * m.draft_vocab)
    return judged + labels + Work(0, VALUE * (kernel + chosen))


def trained_weights(model: ModelGeometry) -> int:
    """Return the number of an EAGLE-3 drafter's trained weights, without those of its norms."""
    attended = model.heads * model.head_size
    keys = model.kv_heads * model.head_size
    layer = 2 * model.width * (attended + 2 * keys) + attended * model.width
    return layer + 3 * model.width * (model.inner + model.width) + model.width * model.draft_vocab


def model_step(shape: StepShape, optimizer: str = "fused") -> dict[str, Work]:
    """Return the work of a training step with its target's forward, by part, in the fewest bytes.
    Attention is given by draft step.
    """
    m = shape.model
    parts = {f"target: {name}": work * m.layers for name, work in target_layer(shape).items()}
    parts["fc"] = product_work(shape.tokens, 3 * m.width, m.width, training=True, grad_inputs=False)
    steps = [draft_step(shape, step) for step in range(shape.steps)]
    for step, work in enumerate(steps):
        parts[f"attention, step {step + 1}"] = work["attention"]
    for name in ("products of attention", "MLP", "norms, rotation, gate"):
        parts[name] = sum((work[name] for work in steps), start=Work())
    parts["output layer and loss"] = output_layer(shape)
    moved = OPTIMIZER_BYTES[optimizer] + CLIP_BYTES + CAST_BYTES
    parts["optimizer"] = Work(0, moved * trained_weights(m))
    return parts


class PartCounter(TorchDispatchMode):
    """Counts the operations and bytes of every operation that runs, by part of a step."""

    def __init__(self, drafter: Eagle3) -> None:
        super().__init__()
        head = drafter.head.output.weight
        self.device = head.device
        self.vocabularies = {len(drafter.d2t), len(head)}
        self.tracker = ModuleTracker()
        self.flops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __enter__(self) -> PartCounter:
        self.tracker.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.tracker.__exit__(*error)

    def part_work(self, part: str) -> Work:
        return Work(self.flops[part], self.bytes[part])

    @property
    def total(self) -> Work:
        return Work(sum(self.flops.values()), sum(self.bytes.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not any(tensor.device == self.device for tensor in (*inputs, *outputs)):
            return out
        packet = func._overloadpacket
        part = self._find_part(packet, [*inputs, *outputs])
        if packet in SUMS:
            # torch's formula knows no sum in another type, and none in place.
            left, right = inputs[-2:] if len(inputs) == 3 else inputs[1:3]
            self.flops[part] += 2 * left.numel() * right.shape[-1]
        elif packet in flop_registry:
            self.flops[part] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        self.bytes[part] += moved_bytes(func, args, inputs, outputs)
        return out

    def _find_part(self, packet: Any, tensors: list[Tensor]) -> str:
        if packet is aten.embedding:
            return BETWEEN[0]
        if any(self.vocabularies & {*tensor.shape} for tensor in tensors if tensor.dim() == 2):
            return "output layer and loss"
        modules = ".".join(self.tracker.parents)
        is_product = packet in flop_registry or packet in SUMS
        if "attention" in str(packet):
            return "attention"
        if "self_attn" in modules:
            return "products of attention" if is_product else BETWEEN[1]
        if "mlp" in modules:
            return "MLP" if is_product else BETWEEN[0]
        if is_product:
            return "fc"
        return BETWEEN[0]


def moved_bytes(func: Any, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes. Parts of one tensor are different
    tensors; an operation that writes to its input does not read it, unless it adds to it.
    """
    packet = func._overloadpacket
    if packet in ROWS or (packet is aten.index_select and args[1] == 0):
        # It reads and writes these rows, and no others.
        rows = inputs[-1] if packet is aten.index_copy_ else outputs[0]
        return 2 * count_bytes(rows) + count_bytes(inputs[1])
    if packet in FILLS:
        return sum(map(count_bytes, outputs))
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    made = [leaf for leaf in outputs if leaf.untyped_storage()._cdata not in storages]
    writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
    if not (made or writes) or func.name().split(".")[0] in SILENT:
        return 0
    operands = inputs[1:] if packet is aten.copy_ else inputs
    if func.name().endswith(".out"):
        operands = [tensor for tensor in inputs if all(tensor is not out for out in outputs)]
    read = {
        (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape): tensor
        for tensor in operands
    }
    return sum(map(count_bytes, [*read.values(), *(made or outputs)]))


def count_bytes(tensor: Tensor) -> int:
    """Return the bytes that reading a tensor takes; of one that repeats its memory, that once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@contextmanager
def flash_attention() -> Iterator[None]:
    """Let causal attention be the kernel that a GPU chooses; for tensors without data torch would
    choose products that store all scores.
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        assert mask is None, "a step has no masks"
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        output: Tensor = flash(q, k, v, 0.0, is_causal, False, scale=scale)[0]
        return output

    with patch.object(attention_module, "fused_attention", attend):
        yield


def count_step(drafter: Eagle3, target: Target, shape: StepShape) -> PartCounter:
    """Count loss and gradients of a step on the device of the drafter, which may be "meta"."""
    batch = random_batch(target, drafter, shape.texts, shape.length)
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    counter = PartCounter(drafter)
    with counter, flash_attention():
        total = drafter(batch, target, TrainingState()).total
        torch.autograd.grad(total, trained, allow_unused=True)
    return counter


def count_target_layer(target: Target, shape: StepShape) -> Work:
    """Count the target's forward over the batch, per layer."""
    tokens = torch.zeros(shape.texts, shape.length, dtype=torch.int64, device=target.device)
    drafter = random_drafter(target, shape.model, target.dtype, 1)
    counter = PartCounter(drafter)
    with counter, flash_attention(), torch.no_grad():
        target.features(tokens, (1,))
    work = counter.total
    return work * (1 / target.num_layers)


class StepModel:
    """Print the model of an EAGLE-3 training step by part."""

    def __init__(
        self,
        # Geometry of the target: 8b, 1.5b or 135m.
        model: Literal["8b", "1.5b", "135m"] = "8b",
        # Tokens of a batch.
        tokens: int = 8192,
        # Tokens of each text.
        length: int = 2048,
        # Unrolled draft steps.
        steps: int = 7,
    ) -> None:
        self.shape = StepShape(MODELS[model], tokens, length, steps)

    def run(self) -> None:
        for line in render_step(self.shape):
            print(line)


@contextmanager
def modules_only() -> Iterator[None]:
    """Run a step without the kernels that have gradients, with separate products of the drafter, in
    small chunks of the loss, and without what is kept of the target's logits.
    """
    with ExitStack() as stack:
        for module in (training_products, text_kernels, later_keys):
            stack.enter_context(patch.object(module, "takes_gradients", lambda x: False))
        for name in ("STORED_BYTES", "CHUNK_BYTES"):
            stack.enter_context(patch.object(linear_divergence, name, 0))
        yield


def count_parts(shape: StepShape) -> dict[str, Work]:
    """Count the step's operations one by one, in bfloat16, as a GPU would run them."""
    target = build_meta_target(replace(shape.model, layers=3), torch.bfloat16)
    merge_linears(target.model)
    fuse_text_layers(target.model)
    drafter = random_drafter(target, shape.model, torch.bfloat16, shape.steps)
    counter = count_step(drafter, target, shape)
    parts = {name: counter.part_work(name) for name in sorted(counter.bytes)}
    parts["target"] = count_target_layer(target, shape) * shape.model.layers
    return parts


def least_parts(shape: StepShape) -> dict[str, Work]:
    """Return the fewest operations and bytes of the parts that are counted."""
    totals: dict[str, Work] = {}
    for name, work in model_step(shape).items():
        part = name
        if name.startswith(("target", "attention")):
            part = name.split(":")[0].split(",")[0]
        elif name == "norms, rotation, gate":
            part = BETWEEN[0]
        totals[part] = totals.get(part, Work()) + work
    return totals


def render_step(shape: StepShape) -> Iterator[str]:
    """Yield the lines of the tables: the step by part, and what is counted of it."""
    yield "| part | TFLOP | GB | ms, H100 | of peak | ms, H200 | of peak |"
    yield "|---|---|---|---|---|---|---|"
    parts = model_step(shape)
    for name, work in [*parts.items(), ("all", sum(parts.values(), start=Work()))]:
        cells = [name, f"{work.flops / 1e12:.1f}", f"{work.bytes / 1e9:.1f}"]
        for gpu in GPUS:
            seconds = work.seconds(gpu)
            share = work.share_of_peak(gpu)
            if name == "all":
                seconds = sum(part.seconds(gpu) for part in parts.values())
                share = work.flops / seconds / gpu.peak_flops
            cells += [f"{seconds * 1e3:.1f}", f"{share:.0%}"]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield from render_counts(shape)


def render_counts(shape: StepShape) -> Iterator[str]:
    """Yield the lines of the table of counted operations and bytes, by modules and by kernels."""
    yield (
        "| counted | TFLOP, modules | TFLOP, kernels | GB, modules | GB, kernels | GB at least "
        "| ms saved, H200 |"
    )
    yield "|---|---|---|---|---|---|---|"
    with modules_only():
        before = count_parts(shape)
    now = count_parts(shape)
    least = least_parts(shape)
    columns = [*before, "all of these"]
    for part in columns:
        works = [
            sum(parts.values(), start=Work()) if part == columns[-1] else parts.get(part, Work())
            for parts in (before, now, {name: least.get(name, Work()) for name in before})
        ]
        saved = Work(works[0].flops - works[1].flops, 0).seconds(GPUS[1])
        saved += Work(0, works[0].bytes - works[1].bytes).seconds(GPUS[1])
        flops = [f"{work.flops / 1e12:.1f}" for work in works[:2]]
        moved = [f"{work.bytes / 1e9:.1f}" for work in works]
        yield "| " + " | ".join([part, *flops, *moved, f"{saved * 1e3:.1f}"]) + " |"


if __name__ == "__main__":
    run_benchmark(StepModel)
