"""Operations of a training step and of its frozen forwards, from closed formulas."""

from collections.abc import Sequence
from dataclasses import dataclass

from spectrain.drafters.step_cost import BatchShape
from spectrain.models.target import Target

from .footprint import Models, stage_cost


@dataclass(frozen=True)
class TokenFlops:
    """Operations of a padded token, on average over stages and batches."""

    # Of its features, and of the rest of a step.
    features: float
    step: float
    # Of the results that a drafter keeps for later epochs.
    cached: float


def flops_per_token(models: Models, batches: Sequence[BatchShape]) -> TokenFlops:
    """Return the operations of a padded token of these batches."""
    sampled = sample_batches(batches)
    features = step = cached = 0.0
    for number, share in models.stage_shares.items():
        features += share * sum(feature_flops(models, number, batch) for batch in sampled)
        step += share * sum(step_flops(models, number, batch) for batch in sampled)
        stage = models.stages[number]
        cached += share * sum(
            forward_flops(models, stage_cost(models, stage, batch).cached_rows, batch)
            for batch in sampled
        )
    tokens = sum(batch.tokens for batch in sampled)
    return TokenFlops(features / tokens, step / tokens, cached / tokens)


def sample_batches(batches: Sequence[BatchShape]) -> Sequence[BatchShape]:
    """Return at most about 64 of the batches, evenly spaced."""
    return batches[:: max(1, len(batches) // 64)]


def feature_flops(models: Models, stage: int, batch: BatchShape) -> float:
    """Return the operations of the target's forward that computes the features of a batch in the
    stage of this index.
    """
    cost = models.row_cost(models.target.layers)
    layers = models.stages[stage].layers
    depth = max(
        (models.target.num_layers if layer == "final" else int(layer) for layer in layers),
        default=0,
    )
    products = 2 * cost.weights + 4 * cost.attention * mean_keys(models.target, batch.length)
    return batch.tokens * products * depth / models.target.num_layers


def mean_keys(target: Target, length: float) -> float:
    """Return the keys that a row of a text attends to, on average over layers, some of which may
    have a sliding window.
    """
    kinds = getattr(target.config, "layer_types", None)
    window = getattr(target.config, "sliding_window", None)
    if not kinds or not window:
        return length
    share = kinds.count("sliding_attention") / len(kinds)
    return share * min(length, window) + (1 - share) * length


def step_flops(models: Models, stage: int, batch: BatchShape) -> float:
    """Return the operations of a training step on a batch in the stage of this index: two for every
    product of the forward, its inputs' gradients and the gradients of trained weights, and seven
    halves of the forward for attention, nine halves where the backward pass computes it again.
    """
    cost = stage_cost(models, models.stages[stage], batch)
    total = 0.0
    for run in cost.runs:
        row = models.row_cost(run.module, stage)
        in_chunks = models.is_cpu and run.chunk_keys > 0
        attended = 18 * run.chunk_keys if in_chunks else 14 * run.keys
        products = 2 * (2 * row.weights + row.trained) + row.attention * attended
        total += run.calls * run.rows * products
    judged = cost.judged
    logits = (judged.width or models.target.width) * judged.vocab_size * judged.rows
    total += (6 if judged.is_trained else 4) * logits * judged.layers
    total += 2 * models.target.width * judged.vocab_size * (judged.label_rows + judged.other_rows)
    return total + forward_flops(models, cost.forward_rows, batch)


def forward_flops(models: Models, rows: float, batch: BatchShape) -> float:
    """Return the operations of the target's layers over rows of a batch, without gradients."""
    layers = models.row_cost(models.target.layers)
    return rows * (
        2 * layers.weights + 4 * layers.attention * mean_keys(models.target, batch.length)
    )


def drafting_weights(models: Models) -> tuple[float, float, float]:
    """Return the weights that a row is multiplied with: of the target's layers, its output
    layer, and the drafter.
    """
    target = models.target
    drafter = sum(p.numel() for p in models.drafter.parameters())
    return models.row_cost(target.layers).weights, target.head.output.weight.numel(), drafter
