"""The model of a training step against counted operations: torch's FLOP counter over a real step,
and the operations and bytes of a step on tensors without data."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lab.benchmarks.models import ModelGeometry, random_drafter, random_target
from lab.benchmarks.step_model import (
    BETWEEN,
    GPUS,
    VALUE,
    PartCounter,
    StepShape,
    Work,
    count_step,
    count_target_layer,
    model_step,
    modules_only,
    product_work,
    render_step,
    target_layer,
    trained_weights,
)
from lab.benchmarks.training import count_flops, random_batch, unfused_loss
from spectrain.kernels import linear_divergence

TINY = ModelGeometry(3, 48, 80, 4, 2, 16, 320, 200, 64)
SHAPE = StepShape(TINY, tokens=48, length=16, steps=3)
PRODUCTS = ("fc", "products of attention", "MLP", "output layer and loss")


def count_tiny() -> PartCounter:
    target = random_target(TINY, torch.device("cpu"), torch.bfloat16)
    drafter = random_drafter(target, TINY, torch.bfloat16, SHAPE.steps)
    target.to("meta")
    return count_step(drafter.to("meta"), target, SHAPE)


@pytest.fixture(scope="module")
def counted() -> PartCounter:
    """A step by modules alone, which needs no kernels."""
    with modules_only():
        return count_tiny()


@pytest.fixture(scope="module")
def by_kernels() -> PartCounter:
    pytest.importorskip("triton", reason="triton is not installed, so there are no kernels")
    return count_tiny()


def test_the_flop_counter_agrees_over_a_real_step() -> None:
    """Products and attention of a step on the CPU, whose loss is computed from full matrices; it
    computes the target's logits at every token."""
    target = random_target(TINY, torch.device("cpu"), torch.float32)
    drafter = random_drafter(target, TINY, torch.float32, SHAPE.steps)
    batch = random_batch(target, drafter, SHAPE.texts, SHAPE.length)
    flops = count_flops(lambda: unfused_loss(drafter, batch), drafter, SHAPE.texts, SHAPE.length)
    parts = model_step(SHAPE)
    own = sum(work.flops for name, work in parts.items() if not name.startswith("target"))
    unread = SHAPE.tokens - SHAPE.label_rows
    assert flops == own + 2 * unread * TINY.width * TINY.vocab


def test_products_of_every_part_are_those_of_the_step(counted: PartCounter) -> None:
    parts = model_step(SHAPE)
    for name in PRODUCTS:
        assert counted.flops[name] == parts[name].flops, name


def test_bytes_of_products_are_counted(counted: PartCounter) -> None:
    """Every product reads its inputs and its weight and writes its output once; queries, keys and
    values, and gate and up, are separate products by modules."""
    rows, width, inner = SHAPE.tokens, TINY.width, TINY.inner
    up = product_work(rows, width, inner, training=True)
    down = product_work(rows, inner, width, training=True)
    assert counted.bytes["fc"] == model_step(SHAPE)["fc"].bytes
    assert counted.bytes["MLP"] == ((up + up + down) * SHAPE.steps).bytes


def test_merged_products_move_what_the_model_says(by_kernels: PartCounter) -> None:
    """With kernels, queries, keys and values are one product, and so are gate and up: bytes of the
    products are the fewest that there are, and operations the same. The product that is a gradient
    of a weight reads that of the later steps, and nothing else adds them up."""
    parts = model_step(SHAPE)
    attention = (TINY.heads + 2 * TINY.kv_heads) * TINY.head_size * 2 * TINY.width
    attention += TINY.heads * TINY.head_size * TINY.width
    weights = {"products of attention": attention, "MLP": 3 * TINY.width * TINY.inner}
    for name in PRODUCTS[:3]:
        sums = VALUE * (SHAPE.steps - 1) * weights.get(name, 0)
        assert by_kernels.bytes[name] == parts[name].bytes + sums, name
        assert by_kernels.flops[name] == parts[name].flops, name


def test_kernels_move_a_third_of_what_modules_do(
    counted: PartCounter, by_kernels: PartCounter
) -> None:
    """Between the products of draft steps; and no less than the model says."""
    before, after = (sum(c.bytes[part] for part in BETWEEN) for c in (counted, by_kernels))
    least = model_step(SHAPE)["norms, rotation, gate"].bytes
    assert least < after < before / 3


def test_the_draft_vocabulary_is_multiplied_once(by_kernels: PartCounter) -> None:
    """Labels in several chunks keep the products of the draft vocabulary; where they are too many,
    they are computed again, those at borders of chunks more than once."""
    with (
        patch.object(linear_divergence, "CHUNK_ROWS", 10),
        patch.object(linear_divergence, "CHUNK_BYTES", 0),
    ):
        chunked = count_tiny()
        with patch.object(linear_divergence, "STORED_BYTES", 0):
            again = count_tiny()
    name = "output layer and loss"
    repeated = 2 * SHAPE.label_rows * TINY.width * TINY.draft_vocab
    assert chunked.flops[name] == by_kernels.flops[name] == model_step(SHAPE)[name].flops
    assert again.flops[name] >= chunked.flops[name] + repeated
    # Every chunk reads the output layer and adds to its gradient.
    chunks = -(-SHAPE.judged_rows // 10)
    output_layer = TINY.width * TINY.draft_vocab
    assert chunked.bytes[name] > by_kernels.bytes[name] + 8 * (chunks - 1) * output_layer


def test_nothing_moves_less_than_the_model_says(counted: PartCounter) -> None:
    parts = model_step(SHAPE)
    for name in PRODUCTS[1:]:
        assert counted.bytes[name] >= parts[name].bytes, name
    between = counted.bytes["norms, residuals, gate, embedding"]
    assert between > parts["norms, rotation, gate"].bytes


def test_a_layer_of_the_target_is_counted() -> None:
    """Its products; flash attention is counted without a mask, as twice the causal pairs and one
    query in each row."""
    target = random_target(TINY, torch.device("cpu"), torch.bfloat16)
    target.to("meta")
    work = count_target_layer(target, SHAPE)
    parts = target_layer(SHAPE)
    pairs = SHAPE.texts * SHAPE.length**2
    assert work.flops == parts["products"].flops + 4 * SHAPE.attended * pairs
    assert work.bytes > sum(part.bytes for part in parts.values())


def test_trained_weights_are_the_drafters() -> None:
    target = random_target(TINY, torch.device("cpu"), torch.float32)
    drafter = random_drafter(target, TINY, torch.float32)
    matrices = [p for p in drafter.parameters() if p.requires_grad and p.dim() == 2]
    assert trained_weights(TINY) == sum(map(torch.numel, matrices))


def test_a_part_takes_the_longer_of_products_and_bytes() -> None:
    gpu = GPUS[1]
    assert Work(gpu.flops, 0).seconds(gpu) == pytest.approx(1)
    assert Work(0, 2 * gpu.bytes).seconds(gpu) == pytest.approx(2)
    assert Work(gpu.flops, 2 * gpu.bytes).share_of_peak(gpu) == pytest.approx(
        gpu.flops / gpu.peak_flops / 2
    )
    assert replace(SHAPE, tokens=96).judged_rows == 2 * SHAPE.judged_rows


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_command() -> None:
    """docs/results/speed.md shows what the command prints for the 8B geometry."""
    page = (Path(__file__).parents[2] / "docs" / "results" / "speed.md").read_text()
    shape = StepShape(ModelGeometry())
    assert "\n".join(render_step(shape)) in page
