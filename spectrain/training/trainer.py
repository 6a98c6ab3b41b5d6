"""The training loop. It knows no drafter family: a drafter provides its losses and its parameter
groups.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator

from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter
from spectrain.features.base import Source
from spectrain.models.target import Target

from .checkpoints import TrainingResult, checkpoint_path
from .checks import check_family, check_validations
from .metrics import Tracker
from .parallel.base import ParallelStrategy
from .parallel.context import check_context, choose_method, make_context_group
from .parallel.launch import connect_processes, make_strategy, restore_variables
from .report import TrainingReport
from .run import TrainingRun
from .settings import TrainerSettings
from .stop_signals import StopSignals


@dataclass
class Trainer(TrainerSettings):
    """The loop of a training run, with its settings."""

    @classmethod
    def from_spec(cls, spec: RunSpec) -> "Trainer":
        """Build the trainer of a run, with its optimizer and its schedule."""
        parts = {group.group: group.build() for group in (spec.optimizer, spec.schedule) if group}
        trainer: Trainer = spec.trainer.build(**parts)
        return trainer

    def make_accelerator(self) -> Accelerator:
        """Connect the processes of this launch."""
        return connect_processes(self.sharding, self.timeout)

    @restore_variables("LOCAL_RANK")
    def fit(
        self,
        drafter: Drafter,
        target: Target,
        dataset: Dataset,
        source: Source,
        run: Path,
        tracker: Tracker | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> TrainingResult:
        """Train `drafter` in place, from the newest checkpoint of the run where there is one.

        Afterwards the main process holds all of its tensors; the object itself is usable only where
        the result is reusable. SIGTERM and SIGINT let the step end, save a checkpoint and raise
        `RunInterrupted`.
        """
        run.mkdir(parents=True, exist_ok=True)
        accelerator = self.make_accelerator()
        shared = self._share_drafter(accelerator, drafter, target, source)
        check_family(self, drafter, source, shared)
        check_validations(self, shared, dataset, target)
        job = TrainingRun(
            self, drafter, target, source, shared, self.num_steps(dataset, shared.num_data_ranks)
        )
        if can_validate(job, dataset):
            job.record_held_out(dataset)
        torch.manual_seed(self.seed)
        begun = job.restore_or_start(run, dataset)
        if shared.is_main:
            started = "" if begun is not None else describe_start(self, shared, dataset)
            print(started or f"going on from {begun}", flush=True)
        with TrainingReport(job, tracker) as report, StopSignals() as stop, job.monitor:
            try:
                report.measure_start()
                while not job.is_done:
                    job.run_step(stop)
                    report.record_step()
                    if job.is_save_due and not job.is_done:
                        job.save()
                        report.record_checkpoint(checkpoint_path(run, job.step))
                    if on_step is not None:
                        on_step(job.step)
            except RuntimeError as error:
                raise job.monitor.explain_failure(error, run) from error
        job.require_changes()
        return job.finish()

    def _share_drafter(
        self, accelerator: Accelerator, drafter: Drafter, target: Target, source: Source
    ) -> ParallelStrategy:
        """Return how the processes share the drafter and their batches; only one of those that
        see the same data stores it.
        """
        size = self.context_parallel
        context = None
        check_context(size, drafter, source, target, accelerator.num_processes)
        shared_loss = drafter.capabilities.context_parallel
        if size > 1 and shared_loss is not None:
            method = choose_method(self.context_method, size, shared_loss.num_heads)
            context = make_context_group(accelerator, size, method)
        copies = accelerator.num_processes if target.sharding == "tensor" else size
        autocast = self.autocast_dtype(target, accelerator.device)
        shared = make_strategy(accelerator, self.sharding, copies, autocast, context)
        if shared.rank % copies:
            source.leave_writing()
        return shared


def describe_start(trainer: TrainerSettings, shared: ParallelStrategy, dataset: Dataset) -> str:
    """Describe how several processes share a training, and how full batches are, padded and
    packed.
    """
    parts = []
    if shared.num_processes > 1:
        parts.append(f"{shared.num_processes} processes, {shared.name}")
    if shared.context is not None:
        parts.append(f"{shared.context.size} share a text ({shared.context.method})")
    ways = {True: "packed", False: "padded"}
    used, other = (
        f"{ways[way]} {dataset.measure_efficiency(replace(trainer.batch_settings, packed=way))}"
        for way in (trainer.packing, not trainer.packing)
    )
    parts.append(f"batches of up to {trainer.batch_tokens} tokens: {used} ({other})")
    return "; ".join(parts)


def can_validate(job: TrainingRun, dataset: Dataset) -> bool:
    """Tell whether there is held-out data, and a whole drafter and the target's layers to draft
    with.
    """
    return bool(dataset.held_out) and job.parallel.unsharded and job.target.has_layers
