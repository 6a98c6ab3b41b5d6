"""What a run goes over: its batches, how often, and how often its target runs over them."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.errors import UserError
from spectrain.models.chat_template import ChatTemplate
from spectrain.models.loading import build_untrained_network, load_tokenizer
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer
from spectrain.training.validation import count_validation_rows, select_prompts

from .dry_run import STEP, TARGET, DryRun, slots
from .memory_tracker import MemoryTracker

if TYPE_CHECKING:
    from .plan import Plan

QUICK_BYTES = 256e6  # of data whose tokens are counted rather than options for


@dataclass
class Workload:
    """What a run goes over."""

    dataset: Dataset
    batches: list[list[Example]]  # of an epoch
    num_steps: int
    epochs: float
    padded: float  # tokens of an epoch, padding included
    tokens: float  # without it
    counted: bool  # or said by plan.tokens
    batch_tokens: int  # of the largest batch, padding included

    @property
    def padded_in_all(self) -> float:
        return self.padded * self.epochs


def read_workload(spec: RunSpec, options: "Plan") -> Workload:
    """The batches of a run: the data's own where it is quick to read, else full ones."""
    trainer = Trainer.from_spec(spec)
    data = spec.data.build()
    if options.tokens is None:
        if data.num_bytes() > QUICK_BYTES:
            raise UserError("plan.tokens: this data is not read for a plan; say how many tokens it has, as in plan.tokens=4e8")
        dataset = data.make_dataset(ChatTemplate(tokenizer(spec)))
    else:
        length = min(data.max_length, trainer.batch_tokens)
        count = max(1, trainer.batch_tokens // length)
        example = Example([1] * length, [False] + [True] * (length - 1))
        dataset = Dataset([example] * count, count, 0, 0)
    batches = [dataset[indices] for indices in dataset.make_batches(0, trainer.batch_settings)]
    sizes = [slots(batch, trainer.packing) for batch in batches]
    once, largest = float(sum(sizes)), max(sizes)
    tokens = float(dataset.num_tokens if options.tokens is None else options.tokens)
    all_padded = once if options.tokens is None else tokens
    per_step = trainer.accumulate * options.devices * once / len(batches)
    num_steps = trainer.max_steps or max(1, math.ceil(trainer.epochs * all_padded / per_step))
    return Workload(
        dataset, batches, num_steps, num_steps * per_step / all_padded, all_padded, tokens, options.tokens is None, largest
    )


def tokenizer(spec: RunSpec) -> Any:
    """The target's, without its weights."""
    if spec.target.get("model"):
        return load_tokenizer(spec.target.get("model"), bool(spec.target.get("trust_remote_code", False)), required=True)
    with MemoryTracker(torch.device("cpu")):
        target: Target = spec.target.build(network=build_untrained_network, device="cpu")
    return target.tokenizer


def cached_features(spec: RunSpec, sizes: DryRun, work: Workload) -> float:
    """Bytes of features that the live source keeps in the host's memory."""
    keep = spec.source.build().max_cached_bytes
    total = work.tokens * len(sizes.features) * sizes.width * sizes.dtype.itemsize
    return float(min(keep, total)) if work.epochs > 0 and sizes.features else 0.0


def target_epochs(spec: RunSpec, sizes: DryRun, work: Workload) -> float:
    """How often the target runs over the data: of what is cached once only, where all of a batch is."""
    total = work.tokens * len(sizes.features) * sizes.width * sizes.dtype.itemsize
    cached = cached_features(spec, sizes, work) / total if total else 0.0
    rows = (work.dataset.examples and len(work.dataset.examples) / len(work.batches)) or 1.0
    return min(1.0, work.epochs) + max(0.0, work.epochs - 1) * (1 - cached**rows)


def total_flops(spec: RunSpec, sizes: DryRun, work: Workload) -> float:
    times = 0.0 if spec.source.build().stores_features else target_epochs(spec, sizes, work)
    trained = work.padded * (sizes.flops.get(TARGET, 0.0) * times + sizes.flops.get(STEP, 0.0) * work.epochs)
    return trained + num_looks(spec, work) * look_flops(sizes, work)


def num_looks(spec: RunSpec, work: Workload) -> int:
    """How often what is held out is drafted for: with each checkpoint or as often as is options for, and at the end."""
    trainer = Trainer.from_spec(spec)
    every = trainer.save_every if trainer.eval_every is None else trainer.eval_every
    return math.ceil(work.num_steps / every) if every else 1


def look_flops(sizes: DryRun, work: Workload) -> float:
    """Two for every weight that a row of a look is multiplied with; attention, behind texts so short, is left out, and so is
    what a drafter does beside drafting."""
    rows = count_validation_rows(select_prompts(work.dataset.held_out, sizes.longest))
    return 2.0 * (
        (rows.num_prompt + rows.num_verified) * sizes.layers
        + rows.num_verified * sizes.output
        + rows.num_drafted * sizes.drafter
    )
