"""A dry run of a training: its own steps, on fake tensors, which have no data, so that any family is planned by no formula.

What is built is what `spectrain train` builds, and what runs is the trainer's own step: the target's features, the drafter's
loss, gradients, clipping, the optimiser. So a new family, a new loss or another trainer setting is planned as it is.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, Losses, Stage, TrainingState, stage_at
from spectrain.drafters.capabilities import adapts_layers
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.fast import pack_linears
from spectrain.models.features import Layer
from spectrain.models.loading import build_untrained_network
from spectrain.models.target import Target
from spectrain.training.parallel import ReplicatedStrategy
from spectrain.training.run import TrainingRun
from spectrain.training.trainer import Trainer

from .memory_tracker import MemoryTracker

TARGET, STEP = "target", "training step"  # what FLOPs are counted under
SAMPLES = 5  # batches whose FLOPs stand for all


@dataclass
class DryRun:
    """What was seen."""

    trained: int = 0  # parameters
    drafter: int = 0
    target: int = 0
    layers: int = 0  # of the target's
    output: int = 0  # of its output layer
    memory: dict[str, int] = field(default_factory=dict)  # bytes at the worst moment of the worst step, by part
    flops: dict[str, float] = field(default_factory=dict)  # of a padded token, by phase
    features: tuple[Layer, ...] = ()  # what is captured of every token
    width: int = 0
    longest: int = 0  # tokens of a text that the target takes
    dtype: torch.dtype = torch.float32  # of features
    layer_bytes: int = 0  # of the largest piece of the target that is gathered at once where it is sharded
    lent_bytes: int = 0  # of the target's embedding and output layer, which drafters borrow
    checkpoint_bytes: int = 0  # of the last stage
    checkpoints: list[int] = field(default_factory=list)  # bytes of each that is kept
    drafter_bytes: int = 0
    trained_target_bytes: int = 0
    adapts_layers: bool = False  # the family changes what layers of the target compute
    assumed: int = 0  # how often a size or a branch hung on values that nobody knows

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


def dry_run(spec: RunSpec, device: torch.device, dataset: Dataset, batches: list[list[Example]], num_steps: int) -> DryRun:
    """Build target and drafter of fake tensors on `device`, and train for a few steps on the heaviest and on some batches."""
    trainer = Trainer.from_spec(spec)
    found = DryRun()
    tracker = MemoryTracker(device)
    with tracker, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real run will say them
        target, drafter = built(spec, tracker, dataset)
        shared = _OneProcess(drafter, target, trainer.autocast_dtype(target, device))
        job = TrainingRun(trainer, drafter, target, _Tracked(tracker), shared, num_steps)
        stages = [stage_at(drafter.stages, step, num_steps) for step in range(num_steps)]
        flops: Counter[str] = Counter()
        for stage, count in sorted(Counter(stages).items()):
            job.step = stages.index(stage) + count // 2
            memory, a_token = run_stage(tracker, job, stage, batches)
            flops.update({phase: number * count / num_steps for phase, number in a_token.items()})
            found.memory = max(found.memory, memory, key=lambda parts: sum(parts.values()))
        found.flops = dict(flops)
        measure_sizes(found, drafter, target, drafter.stages[stages[-1]])
        saved = range(trainer.save_every, num_steps, trainer.save_every) if trainer.save_every else range(0)
        kept = saved[-trainer.keep_checkpoints :]
        found.checkpoints = [checkpoint_bytes(drafter, drafter.stages[stages[step - 1]]) for step in kept]
    found.assumed = tracker.assumed
    return found


def built(spec: RunSpec, tracker: MemoryTracker, dataset: Dataset) -> tuple[Target, Drafter]:
    """Target and drafter as a training begins with them."""
    with tracker.counting("building", "target weights"):
        target: Target = spec.target.build(network=build_untrained_network, device=str(tracker.device))
    with tracker.counting("building", "drafter weights"):
        drafter: Drafter = spec.drafter.build(target=target)
        drafter.prepare(target, dataset.token_counts(target.head.vocab_size))
    target.pack_weights()  # on a GPU it gives weights other memory, so parts are named behind it
    pack_linears(drafter)
    for part, module in (("target weights", target), ("drafter weights", drafter)):
        for parameter in module.parameters():
            tracker.name(parameter, part)
    tracker.vocabularies = vocabularies(target, drafter)
    return target, drafter


def run_stage(
    tracker: MemoryTracker, job: TrainingRun, stage: int, batches: list[list[Example]]
) -> tuple[dict[str, int], dict[str, float]]:
    """Memory at the worst moment of a stage, and FLOPs of a padded token."""
    trainer, step = job.trainer, job.step
    job.enter_stage(stage, step)
    optimizer = job.parallel.optimizer
    if tracker.device.type == "cuda":
        for group in optimizer.param_groups:
            group["foreach"] = True  # torch's own choice on a GPU
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    handles = [p.register_post_accumulate_grad_hook(lambda p: tracker.name(p.grad, "gradients")) for p in trained]

    def train_on(examples: list[Example]) -> None:
        job.step = step  # the same again, whatever is drawn or scheduled
        with tracker.counting(STEP, "activations"):
            job.train_step([examples] * trainer.accumulate)

    heaviest, sampled = choose(batches, trainer.packing)
    train_on(batches[heaviest[0]])  # the first step makes the optimiser's state
    for entry in optimizer.state.values():
        for tensor in entry.values():
            tracker.name(tensor, "optimiser state")
    began, flops = len(tracker.events), Counter[str]()
    for number in sorted({*heaviest, *sampled}):
        before = Counter(tracker.flops)
        train_on(batches[number])
        flops += Counter(tracker.flops - before if number in sampled else {})
    for handle in handles:
        handle.remove()
    tokens = trainer.accumulate * sum(slots(batches[number], trainer.packing) for number in sampled)
    return tracker.peak(began), {phase: flops[phase] / tokens for phase in (TARGET, STEP)}


def choose(batches: list[list[Example]], packed: bool) -> tuple[list[int], list[int]]:
    """Which batches may take most memory, and which stand for all, evenly by size."""
    order = sorted(range(len(batches)), key=lambda number: slots(batches[number], packed))
    supervised = [sum(sum(example.mask) for example in batch) for batch in batches]
    longest = [max(map(length, batch)) for batch in batches]
    documents = [(len(batch), tokens) for batch, tokens in zip(batches, supervised)]  # some families take so much of each
    heaviest = [
        order[-1], supervised.index(max(supervised)), longest.index(max(longest)), documents.index(max(documents)),
    ]  # fmt: skip
    count = min(SAMPLES, len(order))
    return heaviest, [order[int((number + 0.5) * len(order) / count)] for number in range(count)]


def length(example: Example) -> int:
    return len(example.tokens)


def slots(batch: list[Example], packed: bool) -> int:
    """Places for tokens in a batch, padding included."""
    return sum(map(length, batch)) if packed else len(batch) * max(map(length, batch))


def vocabularies(target: Target, drafter: Drafter) -> set[int]:
    """How wide logits are."""
    wide = {target.head.vocab_size}
    for module in drafter.modules():
        if isinstance(module, nn.Linear) and module.out_features > 4 * target.width:
            wide.add(module.out_features)
    return wide - {parameter.shape[-1] for parameter in target.layers.parameters()}


def measure_sizes(found: DryRun, drafter: Drafter, target: Target, stage: Stage) -> None:
    """Counts and bytes of what is kept; those of a checkpoint are of the last stage."""
    own = {id(parameter) for parameter in drafter.parameters()}
    trained = [p for group in stage.groups for p in group["params"]]
    theirs = [p for p in target.parameters() if id(p) not in own]
    found.adapts_layers = adapts_layers(drafter)
    found.trained = sum(p.numel() for p in trained)
    found.drafter = sum(p.numel() for p in drafter.parameters())
    found.target = sum(p.numel() for p in theirs)
    found.features, found.width, found.dtype = drafter.stages[0].layers, target.width, target.dtype
    found.longest, found.output = target.max_length, target.head.output.weight.numel()
    found.layers = sum(p.numel() for p in target.layers.parameters())
    pieces = [*target.layers, target.head.embedding, target.head.output]
    found.layer_bytes = max(size_of(*piece.parameters()) for piece in pieces)
    found.lent_bytes = size_of(*target.head.embedding.parameters(), *target.head.output.parameters())
    found.drafter_bytes = size_of(*drafter.state_dict().values())
    found.checkpoint_bytes = checkpoint_bytes(drafter, stage)
    if drafter.capabilities.target_training:
        adapters = {id(p) for name, p in target.named_parameters() if ".lora_" in name}  # merged when it is saved
        kept = [p for p in theirs if id(p) not in adapters]
        found.trained_target_bytes = sum({p.data_ptr(): p.numel() for p in kept}.values()) * target.dtype.itemsize


def checkpoint_bytes(drafter: Drafter, stage: Stage) -> int:
    """Of the drafter, of what is trained of the target, and of Adam's two means and a count for everything trained."""
    trained = [p for group in stage.groups for p in group["params"]]
    return size_of(*drafter.state_dict().values(), *trained) + sum(2 * p.numel() * p.element_size() + 4 for p in trained)


def size_of(*tensors: Tensor) -> int:
    """Bytes of these tensors, of shared ones once."""
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


class _Tracked(Source):
    """The live target, counted by itself."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker, self.live = tracker, LiveSource()

    def make_batch(self, request: BatchRequest) -> Batch:
        with self.tracker.counting(TARGET, "target activations"):
            batch = self.live.make_batch(request)
        if batch.features is not None:
            self.tracker.name(batch.features.hidden, "features")
        return batch


@contextmanager
def autocasting(dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast of a GPU that need not be here: a CPU's does the work, and code that asks hears that the GPU's is on."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with torch.autocast("cpu", dtype):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


class _OneProcess(ReplicatedStrategy):
    """One process that shares with nobody: any number of them hold the same, unless they shard."""

    def __init__(self, drafter: Drafter, target: Target, autocast: torch.dtype | None) -> None:
        self.rank = self.data_rank = 0
        self.num_processes = self.num_data_ranks = self.num_copies = 1
        self.is_main, self.device = False, torch.device("cpu")  # not the main one, which would talk
        self.drafter, self.target, self.model, self.autocast = drafter, target, drafter, autocast

    def loss(self, batch: Batch, state: TrainingState, last: bool) -> Losses:
        with autocasting(self.autocast):
            losses: Losses = self.drafter(batch, self.target, state)
        return losses

    def backward(self, loss: Tensor, last: bool) -> None:
        """The engine itself, for `torch.autograd.backward` leaves the tracker's redirection while what is run again in it, with
        gradient checkpointing, needs that."""
        engine: Any = torch.autograd.Variable._execution_engine
        gradient = torch.ones_like(loss)
        engine.run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
