"""The data of a run: its batches, how often the run reads them, and how often the target runs
over them.
"""

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.dataset import Dataset
from spectrain.drafters.step_cost import BatchShape
from spectrain.errors import UserError
from spectrain.models.bundled import load_tiny_tokenizer
from spectrain.models.target import Target
from spectrain.training.initial_fit import choose_batches
from spectrain.training.trainer import Trainer
from spectrain.training.validation import DRAFT_DEPTH, SelectedPrompts, select_prompts
from spectrain.training.validation_schedule import MAX_VALIDATIONS, count_affordable

from .footprint import Models
from .operations import drafting_weights, flops_per_token

QUICK_BYTES = 256e6
"""Bytes of data up to which its tokens are counted; for more, plan.tokens is required."""


@dataclass
class Workload:
    """The data of a run."""

    # Conversations, those held out from training included.
    dataset: Dataset
    # Batches of an epoch.
    batches: list[BatchShape]
    num_steps: int
    epochs: float
    # Tokens of an epoch with padding, and without it.
    padded: float
    tokens: float
    # Whether the tokens were counted; otherwise plan.tokens says how many there are.
    is_counted: bool

    @property
    def total_padded(self) -> float:
        """Tokens of all epochs with padding."""
        return self.padded * self.epochs


def read_workload(
    spec: RunSpec,
    target: Target,
    num_tokens: int | None,
    num_devices: int,
    dataset: Dataset | None = None,
) -> Workload:
    """Return the workload of the data, or of full batches of `num_tokens` tokens that are all
    supervised.

    A `dataset` that was read with the same settings is not read again.
    """
    trainer = Trainer.from_spec(spec)
    data = spec.data.build()
    if num_tokens is not None:
        dataset = full_batch(min(data.max_length, trainer.batch_tokens), trainer)
    elif dataset is None:
        dataset = count_data(data, target)
    indices = dataset.make_batches(0, trainer.batch_settings)
    batches = [
        batch_shape(dataset[numbers], trainer.packing, trainer.loss_tokens) for numbers in indices
    ]
    epoch = float(sum(batch.tokens for batch in batches))
    tokens = float(dataset.num_tokens if num_tokens is None else num_tokens)
    padded = epoch if num_tokens is None else tokens
    per_step = trainer.accumulate * num_devices / trainer.context_parallel * epoch / len(batches)
    num_steps = trainer.max_steps or max(1, math.ceil(trainer.epochs * padded / per_step))
    return Workload(
        dataset,
        batches,
        num_steps,
        num_steps * per_step / padded,
        padded,
        tokens,
        num_tokens is None,
    )


def count_data(data: Any, target: Target) -> Dataset:
    """Read the data with the target's tokenizer, or with that of target=tiny if it has none or
    no chat template.
    """
    if data.num_bytes() > QUICK_BYTES:
        raise UserError(
            "plan.tokens: this data is too large to be read for a plan; write its size, as in "
            "plan.tokens=4e8"
        )
    template = target.template if target.template.exists else ChatTemplate(load_tiny_tokenizer())
    dataset: Dataset = data.make_dataset(template, target.vision)
    return dataset


def full_batch(length: int, trainer: Trainer) -> Dataset:
    """Return data that fills one batch with texts of `length` tokens, all supervised but the
    first.
    """
    count = max(1, trainer.batch_tokens // length)
    return Dataset([Example([1] * length, [False] + [True] * (length - 1))] * count, count, 0, 0)


def batch_shape(
    examples: list[Example], packed: bool, loss_tokens: int | None = None
) -> BatchShape:
    """Return the sizes of a batch, of which windows of the loss, if there are any, are taken to
    lie at the end of each text.
    """
    lengths = [len(example.tokens) for example in examples]
    supervised = [sum(example.mask) for example in examples]
    if loss_tokens is not None:
        supervised = [min(count, loss_tokens) for count in supervised]
    num_tokens = sum(lengths) if packed else len(lengths) * max(lengths)
    return BatchShape(len(lengths), max(lengths), num_tokens, sum(supervised), loss_tokens)


def token_feature_bytes(models: Models) -> int:
    """Return the bytes of one token's features."""
    return len(models.features) * models.target.width * models.target.dtype.itemsize


def cached_features(spec: RunSpec, models: Models, work: Workload) -> float:
    """Return the bytes of features that the live source keeps in the host's memory."""
    limit = spec.source.build().max_cached_bytes
    return float(min(limit, work.tokens * token_feature_bytes(models))) if work.epochs > 0 else 0.0


def reads_features(spec: RunSpec) -> bool:
    """Tell whether features come from a store or a server, so that these devices do not compute
    them.
    """
    source = spec.source.build()
    return bool(source.stores_features or source.needs_server)


def target_epochs(spec: RunSpec, models: Models, work: Workload) -> float:
    """Return how often the target runs over the data: once over batches whose features are all
    cached, on every device of those that share a text.
    """
    total = work.tokens * token_feature_bytes(models)
    cached = cached_features(spec, models, work) / total if total else 0.0
    rows = len(work.dataset.examples) / len(work.batches) or 1.0
    once = min(1.0, work.epochs) + max(0.0, work.epochs - 1) * (1 - cached**rows)
    return once * models.trainer.context_parallel


def fitted_epochs(spec: RunSpec, models: Models, work: Workload) -> float:
    """Return the part of the data to which initial weights are fitted: at most the batches of the
    run, each text once."""
    num_tokens = fitted_tokens(spec, models)
    return min(num_tokens / work.tokens, work.epochs, 1.0)


def fitted_tokens(spec: RunSpec, models: Models) -> int:
    """Return the tokens to which initial weights are fitted, where the data has as many."""
    fit = models.drafter.capabilities.initial_fit
    is_left_out = models.num_devices > 1 and spec.source.build().stores_features
    return 0 if fit is None or is_left_out else fit.num_tokens


def trained_batches(spec: RunSpec, models: Models, work: Workload) -> list[BatchShape]:
    """Return the batches of the first steps, at most as many as an epoch has. The steps begin
    behind the batches to which initial weights are fitted.
    """
    trainer = models.trainer
    per_step = trainer.accumulate * models.num_devices // trainer.context_parallel
    num_batches = work.num_steps * per_step
    batching, dataset = trainer.batch_settings, work.dataset
    fitted = choose_batches(
        dataset.stream_batches(batching), fitted_tokens(spec, models), num_batches
    )
    stream = dataset.stream_batches(batching, state=fitted[-1].position if fitted else None)
    return [
        batch_shape(examples, trainer.packing, trainer.loss_tokens)
        for examples in islice(stream, min(num_batches, len(work.batches)))
    ]


def fit_flops(models: Models, num_tokens: float) -> float:
    """Return the operations of fitting initial weights to this many tokens, without features."""
    fit = models.drafter.capabilities.initial_fit
    if fit is None or not num_tokens:
        return 0.0
    operations = fit.count(models.drafter, num_tokens)
    return num_tokens * operations.per_token + operations.single + operations.double


@dataclass(frozen=True)
class Operations:
    """Floating-point operations: of a padded token's features, of the rest of its step, and of
    the run.
    """

    target_per_token: float
    step_per_token: float
    run: float


def count_operations(spec: RunSpec, models: Models, work: Workload) -> Operations:
    """Return the operations of a run, those of its fit and its validations included."""
    flops = flops_per_token(models, work.batches)
    fitted = fitted_epochs(spec, models, work)
    read = replace(work, epochs=work.epochs + fitted)
    epochs = 0.0 if reads_features(spec) else target_epochs(spec, models, read)
    trained = work.padded * (flops.features * epochs + flops.step * work.epochs)
    trained += work.padded * flops.cached * min(1.0, work.epochs)
    trained += fit_flops(models, work.tokens * fitted)
    each = validation_flops(models, work)
    recorded = recording_flops(models, work)
    during = count_affordable(trained, recorded + each, each) if each else 0
    return Operations(
        flops.features,
        flops.step,
        trained + recorded + count_validations(models, work, during) * each,
    )


def count_validations(models: Models, work: Workload, affordable: int) -> int:
    """Return how often the run drafts for the held-out data: before the first step, after some
    steps, and at the end.

    `affordable` of them between start and end fit into the share of the time that they may take.
    """
    trainer = models.trainer
    last = work.num_steps
    if trainer.eval_every is not None:
        return 1 + math.ceil(last / trainer.eval_every)
    saved = (last - 1) // trainer.save_every if trainer.save_every else 0
    return 2 + max(saved, min(affordable, MAX_VALIDATIONS - 2, last - 1))


def has_validation(models: Models, work: Workload) -> bool:
    """Return whether the run drafts for held-out texts; data that is not read is taken to have
    some.
    """
    selected = select_prompts(work.dataset.held_out, models.target.max_length)
    return bool(selected.prompts) or not work.is_counted


class ValidationRows(NamedTuple):
    """The largest numbers of rows that recording the answers runs through the target, and each
    validation.
    """

    num_recorded: int  # tokens of prompts and answers, once before the training
    num_answered: int  # of these, the tokens whose logits are needed
    num_judged: int  # rows of the target's output layer in each validation
    num_drafted: int  # rows of the drafter in each validation, which reads the prompts too


def count_validation_rows(selected: SelectedPrompts) -> ValidationRows:
    """Count the rows of a validation over prompts from `select_prompts`."""
    count = len(selected.prompts)
    roots = selected.answer_tokens - 1
    prompts = sum(map(len, selected.prompts))
    recorded = prompts + count * roots
    drafted = prompts + count * roots * DRAFT_DEPTH
    return ValidationRows(recorded, count * (roots + 1), count * roots, drafted)


def recording_flops(models: Models, work: Workload) -> float:
    """Return the operations by which the target answers the held-out prompts, once before the
    training.
    """
    rows = count_validation_rows(select_prompts(work.dataset.held_out, models.target.max_length))
    layers, output, _ = drafting_weights(models)
    return 2.0 * (rows.num_recorded * layers + rows.num_answered * output)


def validation_flops(models: Models, work: Workload) -> float:
    """Return the operations of one validation: two for every weight that a row is multiplied with.
    Attention over such short texts, and what a drafter does beyond drafting, are left out.
    """
    rows = count_validation_rows(select_prompts(work.dataset.held_out, models.target.max_length))
    layers, output, drafter = drafting_weights(models)
    rerun = 0 if models.drafter.capabilities.drafts_from_features else rows.num_recorded
    return 2.0 * (rerun * layers + rows.num_judged * output + rows.num_drafted * drafter)
