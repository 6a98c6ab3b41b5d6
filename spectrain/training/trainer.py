"""The training loop. It knows no drafter family: a drafter provides its losses and its parameter groups."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from spectrain.config.spec import RunSpec
from spectrain.config.values import Below1, Count, NotNegative, Positive, Seed, Share
from spectrain.data.dataset import Batching, Dataset
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import adapts_layers
from spectrain.errors import UserError
from spectrain.features.base import Source
from spectrain.models.target import Target

from .checkpoints import checkpoint_path
from .metrics import MetricsFile, Tracker
from .optimizers import AdamW, ParameterGroups, UpdateRule
from .parallel import Sharding, connect_processes, make_strategy
from .progress import TrainingProgress
from .run import TrainingResult, TrainingRun
from .schedules import Cosine, Schedule
from .signals import StopSignals


@dataclass
class Trainer:
    """The settings of a training run, and the loop that runs it.

    The learning rate warms up and decays over `epochs` of the data or, where they are given, over `max_steps` steps or
    `max_minutes` minutes, whichever end first. A step takes `accumulate` batches of up to `batch_tokens` tokens on each process
    and divides the loss by the number of supervised tokens in all of them, so the loss depends neither on the number of
    processes nor on batching: padded, in buckets of similar length, or packed. A step with a gradient that is not finite is
    skipped; `max_skipped` of them in a row stop the run.
    """

    # Peak learning rate, reached at the end of the warm-up.
    lr: float = 1e-4
    # Number of passes over the data; a fraction is allowed.
    epochs: float = 1.0
    # Number of optimizer steps, used instead of epochs; null trains for trainer.epochs.
    max_steps: int | None = None
    # Training time in minutes, used instead of epochs, by which warm-up and schedule go too; null sets no limit.
    max_minutes: Positive | None = None
    # Largest number of tokens in a batch, on each process.
    batch_tokens: int = 4096
    # Concatenate sequences in one row, without padding and without seeing each other.
    packing: bool = False
    # Number of batches in an optimizer step, on each process.
    accumulate: int = 1
    # Share of the steps in which the learning rate rises.
    warmup: Share = 0.05
    # Share of trainer.lr that the schedule falls to.
    min_lr: Share = 0.0
    # Largest norm of the gradient; larger gradients are scaled down to it.
    clip: Positive = 0.5
    # Decay rates of AdamW's means of the gradients and of their squares.
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    # Decoupled weight decay: the share of a weight, times the learning rate, that a step subtracts.
    weight_decay: NotNegative = 0.0
    # Seed of the initial weights, of the order of the data and of random draws.
    seed: Seed = 0
    # Number of steps between two checkpoints; null saves only when the run stops or ends.
    save_every: Count | None = None
    # Number of steps between two validations on held-out data; null validates with every checkpoint and at the end.
    eval_every: Count | None = None
    # Save the weights with the best validation as the result instead of the last ones.
    keep_best: bool = False
    # Number of validations in a row without improvement after which the run ends; null never ends it early.
    stop_after: Count | None = None
    # Decay of a moving average of the weights, as in 0.999, which is validated and saved; null keeps no average.
    ema: Below1 | None = None
    # Number of the newest checkpoints to keep.
    keep_checkpoints: int = 2
    # Number of steps between two lines of metrics.jsonl.
    log_every: int = 10
    # Type of matrix products: bf16, no, or auto, which is bf16 on a GPU and on a CPU with a bfloat16 target.
    mixed_precision: str = "auto"
    # How processes share the drafter and its optimizer: ddp, fsdp2, zero2 or zero3; auto takes what the launcher asks for.
    sharding: Sharding = "auto"
    # Recompute activations in the backward pass, which saves memory and costs time.
    gradient_checkpointing: bool = False
    # Number of steps in a row with a gradient that is not finite after which the run stops.
    max_skipped: int = 5
    # Seconds that processes wait for a slow one before a message names it.
    patience: float = 60.0
    # Use auto to start the run in run=DIR or to continue it from its newest checkpoint; null refuses a folder that holds a run.
    resume: str | None = None
    # Optimizer that updates the weights.
    optimizer: UpdateRule = field(default_factory=AdamW)
    # Schedule of the learning rate after the warm-up.
    schedule: Schedule = field(default_factory=Cosine)

    @classmethod
    def from_spec(cls, spec: RunSpec) -> "Trainer":
        """Build the trainer of a run, with its optimizer and its schedule."""
        parts = {group.group: group.build() for group in (spec.optimizer, spec.schedule) if group}
        trainer: Trainer = spec.trainer.build(**parts)
        return trainer

    def __post_init__(self) -> None:
        for key in ("lr", "epochs", "batch_tokens", "accumulate", "log_every", "keep_checkpoints", "max_skipped", "patience"):
            if getattr(self, key) <= 0:
                raise UserError(f"trainer.{key}={getattr(self, key)}: use a number above 0")
        if self.max_steps is not None and self.max_steps < 1:
            raise UserError(f"trainer.max_steps={self.max_steps}: use 1 or more, or null")
        if self.mixed_precision not in ("auto", "no", "bf16"):
            raise UserError(f"trainer.mixed_precision={self.mixed_precision}: use auto, no or bf16")
        if self.resume not in (None, "auto"):
            raise UserError(f"trainer.resume={self.resume}: use auto, or leave it out")

    def make_trial(self, steps: int) -> "Trainer":
        """Return this trainer for a few steps of a measurement, without checkpoints and validation."""
        return replace(
            self,
            max_steps=steps,
            max_minutes=None,
            save_every=None,
            eval_every=None,
            keep_best=False,
            stop_after=None,
            resume=None,
        )

    def make_accelerator(self) -> Accelerator:
        """Connect the processes of this launch."""
        return connect_processes(self.sharding)

    def autocast_dtype(self, target: Target, device: torch.device) -> torch.dtype | None:
        """Return the type of matrix products, None for the weights' own. Auto is bfloat16 on a GPU, unless accelerate's file
        sets another type, and on a CPU with a bfloat16 target."""
        precision = self.mixed_precision
        if precision == "auto" and device.type == "cuda":
            precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "bf16")
        if precision == "auto":
            precision = "bf16" if target.dtype == torch.bfloat16 else "no"
        return torch.bfloat16 if precision == "bf16" else None

    @property
    def batch_settings(self) -> Batching:
        """Return how the data becomes batches."""
        return Batching(self.batch_tokens, self.seed, self.packing)

    def num_steps(self, dataset: Dataset, num_processes: int = 1) -> int | None:
        """Count the optimizer steps of the run; None where only the clock ends it."""
        if self.max_steps is not None or self.max_minutes is not None:
            return self.max_steps
        batches = dataset.num_batches(self.batch_settings)
        return max(1, math.ceil(self.epochs * batches / (self.accumulate * num_processes)))

    def lr_at(self, step: int, num_steps: float, stage_start: int = 0) -> float:
        """Return the learning rate of a step: linear warm-up in every stage, then the schedule down to `min_lr` of the peak."""
        warm = max(1, round(self.warmup * num_steps))
        progress = max(0, step - warm) / max(1, num_steps - warm)
        decayed = self.lr * (self.min_lr + (1 - self.min_lr) * self.schedule.rate_at(min(1.0, progress)))
        return decayed * min(1.0, (step - stage_start + 1) / warm)

    def make_optimizer(self, groups: ParameterGroups) -> torch.optim.Optimizer:
        """Make the optimizer of a stage."""
        return self.optimizer.make_optimizer(groups, self.lr, self.betas, self.weight_decay)

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

        Afterwards the main process holds all of its tensors; the object itself is usable only where the result is reusable.
        SIGTERM and SIGINT let the step end, save a checkpoint and raise `Stopped`.
        """
        run.mkdir(parents=True, exist_ok=True)
        accelerator = self.make_accelerator()
        copies = accelerator.num_processes if target.sharding == "tensor" else 1
        shared = make_strategy(accelerator, self.sharding, copies, self.autocast_dtype(target, accelerator.device))
        job = TrainingRun(self, drafter, target, source, shared, self.num_steps(dataset, shared.num_data_ranks))
        torch.manual_seed(self.seed)
        self._validate(job)
        self._validate_held_out(job, dataset)
        begun = job.restore_or_start(run, dataset)
        if shared.is_main:
            how = f"{shared.num_processes} processes, {shared.name}; " if shared.num_processes > 1 else ""
            print(how + self._describe_batches(dataset) if begun is None else f"going on from {begun}", flush=True)
        with TrainingReport(job, tracker) as report, StopSignals() as stop, job.monitor:
            while not job.is_done:
                self._run_step(job, stop)
                report.record_step(self._step_metrics(job, dataset))
                if self._is_save_due(job) and not job.is_done:
                    job.save()
                    report.record_checkpoint(checkpoint_path(run, job.step))
                if on_step is not None:
                    on_step(job.step)
        return job.finish()

    def _step_metrics(self, job: TrainingRun, dataset: Dataset) -> dict[str, Any] | None:
        """Return the metrics of the last step where they are due, with a validation where one is due."""
        is_end = job.is_done
        due = self._is_save_due(job) if self.eval_every is None else job.step % self.eval_every == 0
        measures = (due or is_end) and bool(dataset.held_out) and job.parallel.unsharded  # drafting takes the whole drafter
        if not (is_end or job.step == 1 or job.step % self.log_every == 0 or measures):
            return None
        metrics = job.collect_metrics()
        if measures:
            metrics["held_out"] = job.validate(dataset.held_out)
        return metrics

    def _is_save_due(self, job: TrainingRun) -> bool:
        """Tell whether a checkpoint is due."""
        return self.save_every is not None and job.step % self.save_every == 0

    def _validate(self, job: TrainingRun) -> None:
        """Raise a UserError where the drafter family does not support these settings."""
        if job.source.uses_drafter and not job.parallel.unsharded:
            raise UserError(
                f"trainer.sharding={job.parallel.name}: the drafter writes text here, and no process has all of it; use ddp, "
                "zero2 or source.by=target"
            )
        if self.optimizer.needs_matrices and not job.parallel.full_parameters:
            raise UserError(
                f"optimizer={self.optimizer.name}: with trainer.sharding={job.parallel.name} no process holds a weight as the "
                "matrix that it is; use trainer.sharding=ddp or optimizer=adamw"
            )
        if self.gradient_checkpointing and adapts_layers(job.drafter):
            raise UserError(
                "trainer.gradient_checkpointing=true: this family adds to the target's layers while they run, so they cannot "
                "be run again; leave it out and lower trainer.batch_tokens"
            )

    def _validate_held_out(self, job: TrainingRun, dataset: Dataset) -> None:
        """Raise a UserError where a setting lacks held-out data, a drafter that can draft in training, or full parameters."""
        for key in ("keep_best", "stop_after", "eval_every"):
            value = getattr(self, key)
            if value and not dataset.held_out:
                raise UserError(
                    f"trainer.{key}={value}: nothing is held out to look at; say how much, as in data.held_out=0.02"
                )
            if value and not job.parallel.unsharded:
                raise UserError(
                    f"trainer.{key}={value}: with trainer.sharding={job.parallel.name} no process can draft "
                    f"while it trains; use "
                    "ddp or zero2, or leave it out"
                )
        if self.ema is not None and not job.parallel.full_parameters:
            raise UserError(
                f"trainer.ema={self.ema}: with trainer.sharding={job.parallel.name} no process holds all weights; use ddp, or "
                "leave it out"
            )

    def _run_step(self, job: TrainingRun, stop: StopSignals) -> None:
        """Run one step on this process's share of the data. On a stop signal to any process, save and exit."""
        began = time.perf_counter()
        job.monitor.report_status(job.step, "reading data")
        share = list(islice(job.stream, job.accumulate))
        try:
            done = job.train_step(share, stop.stop_signal)
        except RuntimeError as error:
            raise job.explain_failure(error) from error
        if not done:
            job.save_and_stop(stop.stop_signal)
        job.data_position = job.stream.state_dict()
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


class TrainingReport:
    """Writes the metrics of a training on its main process: to metrics.jsonl, the terminal and a tracker."""

    def __init__(self, job: TrainingRun, tracker: Tracker | None) -> None:
        self.job, self.tracker = job, tracker or Tracker()
        self.metrics_file = MetricsFile(job.run / "metrics.jsonl", job.step) if job.parallel.is_main else None
        self.progress = TrainingProgress(round(job.num_steps), job.step, enabled=job.parallel.is_main)

    def __enter__(self) -> "TrainingReport":
        self.progress.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.progress.__exit__(*raised)

    def record_step(self, metrics: dict[str, Any] | None) -> None:
        """Report a finished step, with `metrics` where it is logged."""
        if self.metrics_file is not None and metrics is not None:
            self.metrics_file.write(metrics)
            self.tracker.log_metrics({key: value for key, value in metrics.items() if key != "step"}, self.job.step)
        self.progress.set_num_steps(self.job.step if self.job.is_done else round(self.job.num_steps))
        self.progress.update(self.job.step, metrics)

    def record_checkpoint(self, checkpoint: Path) -> None:
        if self.metrics_file is not None:
            self.tracker.log_checkpoint(checkpoint, self.job.step)
