"""The training loop. It knows no drafter family: a drafter provides its losses and its parameter
groups.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, adapts_layers
from spectrain.errors import UserError
from spectrain.features.base import Source
from spectrain.models.target import Target

from .checkpoints import TrainingResult, checkpoint_path
from .metrics import MetricsFile, Tracker, TrainingProgress
from .parallel import (
    ParallelStrategy,
    check_context,
    choose_method,
    connect_processes,
    make_context_group,
    make_strategy,
)
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
        self._validate(drafter, source, shared)
        self._validate_held_out(shared, dataset, target)
        job = TrainingRun(
            self, drafter, target, source, shared, self.num_steps(dataset, shared.num_data_ranks)
        )
        if can_validate(job, dataset):
            job.record_held_out(dataset)
        torch.manual_seed(self.seed)
        begun = job.restore_or_start(run, dataset)
        if shared.is_main:
            how = (
                f"{shared.num_processes} processes, {shared.name}; "
                if shared.num_processes > 1
                else ""
            )
            how += (
                ""
                if shared.context is None
                else f"{shared.context.size} share a text ({shared.context.method}); "
            )
            print(
                how + self._describe_batches(dataset)
                if begun is None
                else f"going on from {begun}",
                flush=True,
            )
        with TrainingReport(job, tracker) as report, StopSignals() as stop, job.monitor:
            try:
                report.show_status("measuring the start on held-out text")
                at_start = self._measure_start(job)
                while not job.is_done:
                    self._run_step(job, stop)
                    report.record_step(self._step_metrics(job, at_start))
                    if self._is_save_due(job) and not job.is_done:
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

    def _measure_start(self, job: TrainingRun) -> dict[str, Any] | None:
        """Return a validation before the first step, which shows whether training makes the
        drafter better; None without.
        """
        if job.step or job.is_done or job.held_out is None:
            return None
        metrics = job.validate()
        history = job.validation_history
        if job.parallel.is_main and history.num_places:
            bounds = metrics.get("forecast_interval")
            interval = (
                "" if bounds is None else f" (95 % interval {bounds[0]:.3f} to {bounds[1]:.3f})"
            )
            print(
                f"start, before step 1: {history.start:.3f} tokens per forward over "
                f"{history.num_places:,} held-out places{interval}, measured in "
                f"{history.newest_seconds:.1f} s",
                flush=True,
            )
        return metrics

    def _step_metrics(
        self, job: TrainingRun, at_start: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Return the metrics of the last step where they are due, with a validation where one is
        due, and after the first step with that before it."""
        is_end = job.is_done
        if job.held_out is not None and not is_end:
            self._plan_validations(job)
        measures = job.held_out is not None and (is_end or self._is_validation_due(job))
        if not (is_end or job.step == 1 or job.step % self.log_every == 0 or measures):
            return None
        metrics = job.collect_metrics()
        if job.step == 1 and at_start is not None:
            metrics["held_out_at_start"] = at_start
        if measures:
            metrics["held_out"] = job.validate()
            history = job.validation_history
            metrics["validation_seconds"] = round(job.recording_seconds + history.seconds, 2)
            if history.start is not None:
                metrics["forecast_at_start"] = history.start
                metrics["gain_interval"] = history.compare("start", "newest")
        return metrics

    def _plan_validations(self, job: TrainingRun) -> None:
        """Plan the next validation anew from time to time, at steps of which all processes know,
        unless a setting says when.
        """
        if self.eval_every is None and (job.step == 2 or job.step % self.log_every == 0):
            job.plan_validations()

    def _is_validation_due(self, job: TrainingRun) -> bool:
        """Tell whether a validation is due before the end."""
        if self.eval_every is not None:
            return job.step % self.eval_every == 0
        return self._is_save_due(job) or job.step >= job.validation_schedule.next_step

    def _is_save_due(self, job: TrainingRun) -> bool:
        """Tell whether a checkpoint is due."""
        return self.save_every is not None and job.step % self.save_every == 0

    def _validate(self, drafter: Drafter, source: Source, shared: ParallelStrategy) -> None:
        """Raise a UserError where the drafter family does not support these settings."""
        if source.uses_drafter and not shared.unsharded:
            raise UserError(
                f"trainer.sharding={shared.name}: the drafter writes text here, and no process "
                "has all of it; use ddp, zero2 or source.by=target"
            )
        if self.loss_tokens is not None and source.generates_text:
            raise UserError(
                f"trainer.loss_tokens={self.loss_tokens}: this source writes text and has loss on "
                "what it writes; leave it out"
            )
        if self.optimizer.needs_matrices and not shared.full_parameters:
            raise UserError(
                f"optimizer={self.optimizer.name}: with trainer.sharding={shared.name} no process "
                "holds a weight as the matrix that it is; use trainer.sharding=ddp or "
                "optimizer=adamw"
            )
        if self.gradient_checkpointing and adapts_layers(drafter):
            raise UserError(
                "trainer.gradient_checkpointing=true: this family adds to the target's layers "
                "while they run, so they cannot be run again; leave it out and lower "
                "trainer.batch_tokens"
            )

    def _validate_held_out(
        self, shared: ParallelStrategy, dataset: Dataset, target: Target
    ) -> None:
        """Raise a UserError where a setting lacks held-out data, a target and a drafter that
        decode, or full parameters.
        """
        for key in ("keep_best", "stop_after", "eval_every"):
            value = getattr(self, key)
            if value:
                target.require_layers(f"trainer.{key}={value}")
            if value and not dataset.held_out:
                raise UserError(
                    f"trainer.{key}={value}: nothing is held out to look at; raise the share, as "
                    "in data.held_out=0.1"
                )
            if value and not shared.unsharded:
                raise UserError(
                    f"trainer.{key}={value}: with trainer.sharding={shared.name} no process can "
                    "draft while it trains; use ddp or zero2, or leave it out"
                )
        if self.ema is not None and not shared.full_parameters:
            raise UserError(
                f"trainer.ema={self.ema}: with trainer.sharding={shared.name} no process holds "
                "all weights; use ddp, or leave it out"
            )

    def _run_step(self, job: TrainingRun, stop: StopSignals) -> None:
        """Run one step on this process's share of the data. On a stop signal to any process,
        save and exit.
        """
        began = time.perf_counter()
        job.monitor.report_status(job.step, "reading data")
        share = list(islice(job.batches, max(1, job.num_own_batches)))
        done = job.train_step(share, stop.stop_signal, time.perf_counter() - began)
        if not done:
            job.save_and_stop(stop)
        job.data_position = job.batches.state_dict()
        job.tally.seconds += time.perf_counter() - began
        job.budget.record_time(job.parallel)
        if job.skipped_in_a_row >= self.max_skipped:
            job.abort()

    def _describe_batches(self, dataset: Dataset) -> str:
        """Describe how full batches are, padded and packed."""
        ways = {True: "packed", False: "padded"}
        used, other = (
            f"{ways[way]} {dataset.measure_efficiency(replace(self.batch_settings, packed=way))}"
            for way in (self.packing, not self.packing)
        )
        return f"batches of up to {self.batch_tokens} tokens: {used} ({other})"


def can_validate(job: TrainingRun, dataset: Dataset) -> bool:
    """Tell whether there is held-out data, and a whole drafter and the target's layers to draft
    with.
    """
    return bool(dataset.held_out) and job.parallel.unsharded and job.target.has_layers


class TrainingReport:
    """Writes the metrics of a training on its main process: to metrics.jsonl, the terminal and a
    tracker.
    """

    def __init__(self, job: TrainingRun, tracker: Tracker | None) -> None:
        self.job = job
        self.tracker = tracker or Tracker()
        self.metrics_file = (
            MetricsFile(job.run / "metrics.jsonl", job.step) if job.parallel.is_main else None
        )
        self.progress = TrainingProgress(
            round(job.num_steps), job.step, enabled=job.parallel.is_main
        )

    def __enter__(self) -> "TrainingReport":
        self.progress.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.progress.__exit__(*raised)

    def show_status(self, text: str) -> None:
        """Show what happens before the first step, with the time that a limit leaves. Every
        process must call this.
        """
        left = self.job.budget.seconds_until(1, self.job.parallel)
        seconds_left = None if math.isinf(left) else max(0.0, left)
        self.progress.bar.update(self.job.step, text, seconds_left=seconds_left)

    def record_step(self, metrics: dict[str, Any] | None) -> None:
        """Report a finished step, with `metrics` where it is logged."""
        if self.metrics_file is not None and metrics is not None:
            self.metrics_file.write(metrics)
            self.tracker.log_metrics(
                {key: value for key, value in metrics.items() if key != "step"}, self.job.step
            )
        budget = self.job.budget
        self.progress.set_num_steps(
            self.job.step if self.job.is_done else round(self.job.num_steps)
        )
        self.progress.update(self.job.step, metrics, budget.seconds_left, budget.is_paced)

    def record_checkpoint(self, checkpoint: Path) -> None:
        if self.metrics_file is not None:
            self.tracker.log_checkpoint(checkpoint, self.job.step)
