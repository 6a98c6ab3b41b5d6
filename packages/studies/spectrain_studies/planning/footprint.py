"""What a training run takes, from closed formulas: parameters, bytes of a device by part, bytes on
disk.

Target and drafter are built on torch's device "meta", so only config.json is read. The formulas of
modules are in row_cost.py, and those of families in `Drafter.step_cost`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.config.spec import RunSpec
from spectrain.drafters.base import Drafter, Stage, adapts_layers, stage_at
from spectrain.drafters.step_cost import BatchShape, Judged, Run, StepCost
from spectrain.kernels.dispatch import run_on_cpu
from spectrain.kernels.linear_divergence import STORED_BYTES, count_chunk_rows
from spectrain.models.fast.packed_linears import MAX_PANEL_THREADS, SMALL_WEIGHTS
from spectrain.models.fast.shared_product import find_shared_linears
from spectrain.models.target import Target
from spectrain.runs.drafters import build_without_weights
from spectrain.runs.init_drafter import adapt_drafter
from spectrain.training.adapters import select_stage_groups
from spectrain.training.parallel.deepspeed import bucket_values
from spectrain.training.trainer import Trainer

from .row_cost import RowCost, row_cost
from .weights import count_weight_bytes, find_format_name

FLOAT_BYTES = 4
CHUNK_ROWS = 2048
"""Rows of the logits that the loss computes at the same time on a CPU."""
TILE_ROWS = 64
TILE_COPIES = 6
"""On a CPU: rows of a chunk that the loss compares at the same time, and the matrices that this
takes.
"""


@dataclass(frozen=True)
class Models:
    """Target and drafter without weights, and the trainer's settings."""

    target: Target
    drafter: Drafter
    trainer: Trainer
    device: torch.device
    num_steps: int
    # Format of the target's quantized weights (`weights.FORMATS`); None if they are dense.
    weight_format: str | None = None
    # Number of devices that train together.
    num_devices: int = 1

    @classmethod
    def from_spec(
        cls,
        spec: RunSpec,
        device: torch.device,
        num_steps: int,
        num_devices: int = 1,
        target: Target | None = None,
    ) -> "Models":
        """Build target and drafter as a training begins with them, or the drafter alone for a
        `target` that is built.
        """
        target, drafter = build_without_weights(spec, str(device), target)
        if (training := drafter.capabilities.target_training) is not None:
            with torch.device("meta"):
                training.start_training(target)
        with torch.device("meta"):
            adapt_drafter(spec, drafter, target)
        weight_format = find_format_name(target, spec.target.settings.get("quantization"))
        return cls(
            target, drafter, Trainer.from_spec(spec), device, num_steps, weight_format, num_devices
        )

    @cached_property
    def stage_shares(self) -> dict[int, float]:
        """The share of the steps that each stage has, by its index."""
        ends = accumulate(stage.share for stage in self.drafter.stages[:-1])
        # The first step of each later stage; as `stage_at` decides, which reads a single step.
        starts = [0, *(min(math.ceil(end * self.num_steps), self.num_steps) for end in ends)]
        counts = [end - start for start, end in zip(starts, [*starts[1:], self.num_steps])]
        return {number: count / self.num_steps for number, count in enumerate(counts) if count}

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of the training, which update only the adapters of a drafter that has some."""
        return [
            replace(stage, groups=select_stage_groups(self.drafter, stage))
            for stage in self.drafter.stages
        ]

    @property
    def last_stage(self) -> Stage:
        return self.stages[max(self.stage_shares)]

    @property
    def changes_target(self) -> bool:
        """Whether the drafter trains the target or adds to its layers."""
        return self.drafter.capabilities.target_training is not None or adapts_layers(self.drafter)

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def has_gradient_buckets(self) -> bool:
        """Whether devices hold a second copy of the drafter's gradients, in which DDP averages
        them.
        """
        return self.num_devices > 1 and self.trainer.sharding in ("auto", "ddp")

    @property
    def gradient_buffers(self) -> int:
        """Number of buffers in which DeepSpeed sums gradients; on a GPU ZeRO-2 fills one while it
        sends another.
        """
        if self.num_devices == 1:
            return 0
        return {"zero2": 1 if self.is_cpu else 2, "zero3": 1}.get(self.trainer.sharding, 0)

    @cached_property
    def product_bytes(self) -> int:
        """Bytes of a value that a linear returns in training."""
        dtype = self.trainer.autocast_dtype(self.target, self.device)
        return FLOAT_BYTES if dtype is None else dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of a value that a norm returns in training; autocast stores a copy in its own
        type too.
        """
        return (
            FLOAT_BYTES if self.product_bytes == FLOAT_BYTES else FLOAT_BYTES + self.product_bytes
        )

    @property
    def own_ids(self) -> set[int]:
        """The ids of the drafter's parameters, which may be some of the target's."""
        return {id(p) for p in self.drafter.parameters()}

    @property
    def target_parameters(self) -> list[Tensor]:
        own = self.own_ids
        return [p for p in self.target.parameters() if id(p) not in own]

    @property
    def loaded_parameters(self) -> list[Tensor]:
        """The target's parameters that a training holds: with target.parts=head, those that
        drafters read.
        """
        return self.target_parameters if self.target.has_layers else lent_parameters(self.target)

    @property
    def features(self) -> tuple[Any, ...]:
        """The layers whose states are captured of every token."""
        return tuple(self.stages[0].layers)

    @cached_property
    def row_costs(self) -> dict[tuple[nn.Module, int | None], RowCost]:
        """The costs of rows that `row_cost` has counted, by module and stage."""
        return {}

    def row_cost(self, module: nn.Module, stage: int | None = None) -> RowCost:
        """Return the cost of a row in a module, with the weights that the stage of this index
        trains; each is counted once.
        """
        key = (module, stage)
        if key not in self.row_costs:
            trained = (
                ()
                if stage is None
                else {id(parameter) for parameter in trained_parameters(self.stages[stage])}
            )
            self.row_costs[key] = row_cost(module, trained)
        return self.row_costs[key]


def count_parameters(models: Models) -> dict[str, int]:
    """Return the numbers of trained, of the drafter's and of the target's parameters."""
    return {
        "trained": sum(p.numel() for p in trained_parameters(models.last_stage)),
        "drafter": sum(p.numel() for p in models.drafter.parameters()),
        "target": sum(p.numel() for p in models.target_parameters),
    }


def trained_parameters(stage: Stage) -> list[Tensor]:
    return [parameter for group in stage.groups for parameter in group["params"]]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, of the same one once."""
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def peak_memory(
    models: Models, batches: Sequence[BatchShape], validates: bool = True
) -> dict[str, int]:
    """Return the bytes of each part at the worst moment of the worst batch and stage, in a run
    that drafts for held-out texts or does not.
    """
    worst: dict[str, float] = {}
    for number in models.stage_shares:
        stage = models.stages[number]
        largest = largest_batches(batches)
        runs_output = validates or any(
            stage_cost(models, stage, batch).judged.other_rows for batch in largest
        )
        resident = resident_bytes(models, stage, runs_output)
        for batch in largest:
            for moment in step_moments(models, stage, batch):
                worst = max(worst, resident | moment, key=lambda parts: sum(parts.values()))
    return {
        part: int(size) for part, size in sorted(worst.items(), key=lambda item: -item[1]) if size
    }


def largest_batches(batches: Sequence[BatchShape]) -> set[BatchShape]:
    """Return the batches that may take most memory: those with the most of something."""
    return {
        max(batches, key=lambda batch: getattr(batch, name))
        for name in ("texts", "length", "tokens", "supervised")
    }


def split_columns(batch: BatchShape, parts: int) -> BatchShape:
    """Return the sizes of the piece of the columns that has most supervised tokens, of `parts`
    pieces. Draft steps run over a complete piece, and its share of the texts counts what is
    drawn of each text.
    """
    if parts == 1:
        return batch
    tokens = math.ceil(batch.tokens / parts)
    supervised = min(batch.supervised, tokens)
    texts = batch.texts * supervised / max(1, batch.supervised)
    return replace(batch, texts=texts, tokens=tokens, supervised=supervised, loss_tokens=None)


def step_moments(models: Models, stage: Stage, batch: BatchShape) -> list[dict[str, float]]:
    """Return the bytes by part while logits exist, after them, in the optimiser's step, and in a
    forward without gradients.

    All but the target's forward are those of the piece of the texts that a device runs.
    """
    piece = split_columns(batch, models.trainer.context_parallel)
    all_features = float(feature_bytes(models, stage, batch))
    trained = trained_parameters(stage)
    cost = stage_cost(models, stage, piece)
    judged = cost.judged
    features = {"features": float(feature_bytes(models, stage, piece))}
    stored = sum(stored_bytes(models, run) for run in cost.runs) + cast_bytes(models, cost)
    # the gradient of an output layer
    width = judged.width or models.target.width
    head = FLOAT_BYTES * judged.vocab_size * width if judged.is_trained else 0
    after = stored + judged.layers * head + cost.backward_values * FLOAT_BYTES
    scratch = max((FLOAT_BYTES * p.numel() for p in trained), default=0)
    forward_rows = max(
        cost.forward_rows, batch.tokens if stage.layers and models.target.has_layers else 0
    )
    return [
        features
        | {
            "activations": stored + (judged.layers - 1) * head,
            "logits": logits_bytes(models, judged),
        },
        features | {"activations": after},
        features | {"activations": scratch, "gradients": bytes_of(trained)},
        {"features": all_features, "target activations": forward_bytes(models, forward_rows)},
    ]


def stage_cost(models: Models, stage: Stage, batch: BatchShape) -> StepCost:
    """Return the cost of a stage's step: one that reads features does not train the target's
    layers in its loss.
    """
    cost = models.drafter.step_cost(models.target, batch)
    others = [run for run in cost.runs if run.module is not models.target.layers]
    return (
        replace(cost, runs=others, forward_rows=0) if stage.layers and others != cost.runs else cost
    )


def resident_bytes(models: Models, stage: Stage, runs_output: bool) -> dict[str, float]:
    """Return the bytes that a stage holds all the time; the target's output layer is packed where
    it runs, and the loss reads its weights as they are.
    """
    trained = trained_parameters(stage)
    own = models.own_ids
    training = models.drafter.capabilities.target_training
    original = training.original if training is not None else None
    frozen = models.target if original is None else original
    copy = [] if original is None else [*original.parameters()]
    return {
        "target weights": target_bytes(models, models.loaded_parameters),
        "drafter weights": bytes_of(
            [*models.drafter.parameters(), *models.drafter.buffers(), *copy]
        ),
        "packed copies of weights": packed_bytes(frozen, {id(p) for p in trained}, runs_output)
        if models.is_cpu
        else 0,
        "optimiser state": 2 * bytes_of(trained),
        "gradient buckets": models.gradient_buffers * FLOAT_BYTES * bucket_values(trained)
        if models.gradient_buffers
        else bytes_of(p for p in trained if id(p) in own)
        if models.has_gradient_buckets
        else 0,
    }


def packed_bytes(target: Target, trained: set[int], runs_output: bool) -> int:
    """Return the bytes of the copies that make frozen linears of a CPU faster: joined ones,
    reordered large ones, and the panels of an installed package. A linear is packed when it first
    runs, the output layer with `runs_output` alone.
    """
    model = target.model if target.has_layers else target.head.output
    groups = [group for module in model.modules() for group in find_shared_linears(module)]
    shared = {linear for group in groups for linear in group}
    singles = [
        [module]
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and module not in shared
        and (runs_output or module is not target.head.output)
    ]
    total = 0
    for linears in [*groups, *singles]:
        weights = [linear.weight for linear in linears if id(linear.weight) not in trained]
        if len(weights) < len(linears):
            continue
        # Weights in the blocks of a GGUF file are multiplied where they are.
        if any(getattr(weight, "block_bytes", None) is not None for weight in weights):
            continue
        outputs = sum(len(weight) for weight in weights)
        shape = weights[0].dtype, outputs, weights[0].shape[1]
        has_panels = torch.get_num_threads() <= MAX_PANEL_THREADS
        if has_panels:
            total += run_on_cpu("panel_bytes", *shape) or 0
        if has_panels and run_on_cpu("panels_suffice", *shape):
            continue
        if len(weights) > 1 or weights[0].numel() > SMALL_WEIGHTS:
            total += bytes_of(weights)
    return total


def feature_bytes(models: Models, stage: Stage, batch: BatchShape) -> int:
    return batch.tokens * len(stage.layers) * models.target.width * models.target.dtype.itemsize


def stored_bytes(models: Models, run: Run) -> float:
    """Return the bytes that the backward pass reads of a run; gradient checkpointing keeps the
    inputs of its calls only.
    """
    cost = models.row_cost(run.module)
    values = run.rows * (cost.products + run.extra) + cost.num_attentions * run.mask
    stored = values * models.product_bytes + run.rows * cost.states * models.state_bytes
    stored *= run.stored_share
    if models.trainer.gradient_checkpointing:
        inputs = run.rows * models.target.width * FLOAT_BYTES
        layers = max(1.0, cost.num_attentions)
        return run.calls * layers * inputs + stored / layers
    return run.calls * stored


def cast_bytes(models: Models, cost: StepCost) -> float:
    """Return the bytes of the copies that autocast makes of weights in float32."""
    if models.product_bytes == FLOAT_BYTES:
        return 0.0
    weights = {
        id(p): p.numel()
        for run in cost.runs
        for p in run.module.parameters()
        if p.dim() > 1 and p.itemsize == FLOAT_BYTES
    }
    return models.product_bytes * sum(weights.values())


def logits_bytes(models: Models, judged: Judged) -> float:
    """Return the bytes of logits in the loss: matrices of the rows of a chunk, and of a tile
    that a CPU works on.
    """
    if not models.is_cpu:
        row_bytes = models.product_bytes * judged.vocab_size
        chunk = count_chunk_rows(judged.vocab_size, models.product_bytes)
        # The labels' logits of all rows are kept where they are few.
        stored = row_bytes * judged.label_rows
        labels = stored if stored <= STORED_BYTES else row_bytes * min(judged.label_rows, chunk)
        return row_bytes * min(judged.rows, chunk) + labels
    rows = min(judged.rows, CHUNK_ROWS)
    label_rows = min(judged.label_rows, CHUNK_ROWS)
    tile = TILE_COPIES * min(TILE_ROWS, judged.rows)
    return (
        FLOAT_BYTES
        * judged.vocab_size
        * (judged.copies * rows + judged.label_copies * label_rows + tile)
    )


def forward_bytes(models: Models, rows: float) -> float:
    """Return the bytes of one layer's results while the target runs without gradients."""
    cost = models.row_cost(models.target.layers[-1])
    return rows * (cost.products + cost.states) * models.target.dtype.itemsize


@dataclass(frozen=True)
class DiskSizes:
    """Bytes of what a run saves."""

    # Bytes of each checkpoint that is kept, the last of them first in the plan.
    checkpoints: list[int]
    checkpoint: int
    drafter: int
    # Bytes of the trained target, 0 if it stays as it is.
    target: int

    @classmethod
    def from_models(cls, models: Models) -> "DiskSizes":
        trainer, drafter = models.trainer, models.drafter
        every = trainer.save_every
        steps = (
            range(every, models.num_steps, every)[-trainer.keep_checkpoints :]
            if every
            else range(0)
        )
        stages = [
            models.stages[stage_at(models.stages, step - 1, models.num_steps)] for step in steps
        ]
        return cls(
            [checkpoint_bytes(drafter, stage) for stage in stages],
            checkpoint_bytes(drafter, models.last_stage),
            # Adapters are merged.
            bytes_of(
                tensor
                for name, tensor in drafter.state_dict(keep_vars=True).items()
                if ".lora_" not in name
            ),
            trained_target_bytes(models),
        )


def checkpoint_bytes(drafter: Drafter, stage: Stage) -> int:
    """Return the bytes of a checkpoint: the drafter, what is trained of the target, and Adam's
    two means and a count each.
    """
    trained = trained_parameters(stage)
    weights = bytes_of([*drafter.state_dict(keep_vars=True).values(), *trained])
    return weights + sum(2 * p.numel() * p.element_size() + 4 for p in trained)


def trained_target_bytes(models: Models) -> int:
    """Return the bytes of the target that a run saves, without adapters, which are merged."""
    if models.drafter.capabilities.target_training is None:
        return 0
    adapters = {id(p) for name, p in models.target.named_parameters() if ".lora_" in name}
    weights = {id(p): p.numel() for p in models.target_parameters if id(p) not in adapters}
    return sum(weights.values()) * models.target.dtype.itemsize


def target_bytes(models: Models, parameters: Iterable[Tensor]) -> int:
    """Return the bytes of parameters of the target as the device holds them."""
    return count_weight_bytes(models.target, [*parameters], models.weight_format, models.is_cpu)


def largest_piece_bytes(models: Models) -> int:
    """Return the bytes of the largest part that a sharded target gathers at the same time."""
    target = models.target
    pieces = [*target.layers, target.head.embedding, target.head.output]
    # A decoder's layers have few sizes.
    largest = max(pieces, key=lambda piece: sum(p.numel() for p in piece.parameters()))
    return target_bytes(models, largest.parameters())


def lent_parameters(target: Target) -> list[Tensor]:
    """Return the parameters of the target's embedding and output layer, which drafters read."""
    return [*target.head.embedding.parameters(), *target.head.output.parameters()]
