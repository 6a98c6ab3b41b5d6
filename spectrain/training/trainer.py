"""The training loop. It knows no family: it asks a drafter for losses and for parameter groups."""

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from spectrain.config.build import build
from spectrain.config.values import Below1, Count, NotNegative, Positive, Seed, Share
from spectrain.data.dataset import Batching, Dataset
from spectrain.drafters.base import Drafter
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
    """Warm-up and decay of the learning rate over `epochs` of the data, or where they are given over `max_steps` steps or
    `max_minutes` minutes, whichever are over first.

    A step sees `accumulate` batches of up to `batch_tokens` tokens on each process, and its loss is divided by the number
    of supervised tokens in all of them, so neither depends on the number of processes or on how sequences were batched: padded,
    in buckets of like length, or with `packing` one after another in one row, where they do not see each other. A step whose
    gradient is not finite is left out; `max_skipped` of them in a row stop the run.
    """

    lr: float = 1e-4  # the highest learning rate, reached after the warm-up
    epochs: float = 1.0  # times that the data is seen; a fraction is allowed
    max_steps: int | None = None  # optimiser steps, instead of epochs
    max_minutes: Positive | None = None  # of training, instead of epochs: warm-up and schedule go by the time that is used
    batch_tokens: int = 4096  # tokens of a batch at most, on each process
    packing: bool = False  # sequences one after another in one row, without padding
    accumulate: int = 1  # batches of a step, on each process
    warmup: Share = 0.05  # the share of the steps in which the rate rises
    min_lr: Share = 0.0  # the share of lr that the rate falls to
    clip: Positive = 0.5  # the largest norm of the gradient
    betas: tuple[Below1, Below1] = (0.9, 0.95)  # AdamW's, of the means of gradients and of their squares
    weight_decay: NotNegative = 0.0  # how much of a weight a step takes away, times the rate
    seed: Seed = 0  # of the first weights, the order of the data and what is drawn
    save_every: Count | None = None  # steps between two checkpoints; null: where a run stops or ends
    eval_every: Count | None = None  # steps between two looks at held-out data; null: with each checkpoint and at the end
    keep_best: bool = False  # the result is the weights that promised most at a look, instead of the last
    stop_after: Count | None = None  # looks in a row without gain, after which the run ends
    ema: Below1 | None = None  # average weights over steps, as in 0.999: the average is measured and saved
    keep_checkpoints: int = 2  # how many of the newest stay
    log_every: int = 10  # steps between two lines of metrics.jsonl
    mixed_precision: str = "auto"  # bf16 or no; auto: bf16 on a GPU, and on a CPU where the target is in bfloat16
    sharding: Sharding = "auto"  # how processes hold the drafter and its optimiser together
    gradient_checkpointing: bool = False  # less memory for more time: parts are run again in the backward pass
    max_skipped: int = 5  # steps in a row whose gradient is not finite, before the run stops
    patience: float = 60.0  # seconds that processes wait for one of them before it is named
    resume: str | None = None  # auto: start the run in run=DIR, or go on with it
    optimizer: UpdateRule = field(default_factory=AdamW)
    schedule: Schedule = field(default_factory=Cosine)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Trainer":
        """The trainer of a configuration, with the optimiser and the schedule that it names."""
        named = {group: build(config[group]) for group in ("optimizer", "schedule") if config.get(group)}
        made: Trainer = build(config["trainer"], **named)
        return made

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
        """The same for a few steps, by which something is measured: it saves nothing and looks at nothing meanwhile."""
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
        """The processes of this launch."""
        return connect_processes(self.sharding)

    def autocast_dtype(self, target: Target, device: torch.device) -> torch.dtype | None:
        """What products are computed in, None for the weights' own type: bfloat16 on a GPU, unless accelerate's file says
        otherwise, and on a CPU beside a target in bfloat16; `mixed_precision` may say otherwise."""
        precision = self.mixed_precision
        if precision == "auto" and device.type == "cuda":
            precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "bf16")
        if precision == "auto":
            precision = "bf16" if target.dtype == torch.bfloat16 else "no"
        return torch.bfloat16 if precision == "bf16" else None

    @property
    def batch_settings(self) -> Batching:
        """How the data becomes batches."""
        return Batching(self.batch_tokens, self.seed, self.packing)

    def num_steps(self, dataset: Dataset, num_processes: int = 1) -> int | None:
        """Optimiser steps of the whole run; None where the clock alone ends it."""
        if self.max_steps is not None or self.max_minutes is not None:
            return self.max_steps
        batches = dataset.num_batches(self.batch_settings)
        return max(1, math.ceil(self.epochs * batches / (self.accumulate * num_processes)))

    def lr_at(self, step: int, num_steps: float, stage_start: int = 0) -> float:
        """The learning rate of a step: linear warm-up, anew in every stage, and the schedule down to `min_lr` of the peak."""
        warm = max(1, round(self.warmup * num_steps))
        progress = max(0, step - warm) / max(1, num_steps - warm)
        decayed = self.lr * (self.min_lr + (1 - self.min_lr) * self.schedule.rate_at(min(1.0, progress)))
        return decayed * min(1.0, (step - stage_start + 1) / warm)

    def make_optimizer(self, groups: ParameterGroups) -> torch.optim.Optimizer:
        """The optimiser of a stage."""
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
        """Train `drafter` in place; go on from the run's newest checkpoint where there is one.

        Afterwards the main process holds it whole, but in its place only where the result says so. SIGTERM and SIGINT let the
        step end, save a checkpoint and raise `Stopped`.
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
        """What is logged of the step that was done, if anything; with a look at what was held out where one is due."""
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
        """Whether a checkpoint is due."""
        return self.save_every is not None and job.step % self.save_every == 0

    def _validate(self, job: TrainingRun) -> None:
        """Stop where the family and these settings do not go together."""
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
        if self.gradient_checkpointing and job.drafter.abilities.adapts_layers:
            raise UserError(
                "trainer.gradient_checkpointing=true: this family adds to the target's layers while they run, so they cannot "
                "be run again; leave it out and lower trainer.batch_tokens"
            )

    def _validate_held_out(self, job: TrainingRun, dataset: Dataset) -> None:
        """Stop where what is asked for needs what is not there: text to look at, or a drafter that can draft or be averaged."""
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
        """Read this process's share of the data and learn from it; where a process was asked to stop, save and leave."""
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
        """How full batches are, padded and packed."""
        ways = {True: "packed", False: "padded"}
        used, other = (
            f"{ways[way]} {dataset.measure_efficiency(replace(self.batch_settings, packed=way))}"
            for way in (self.packing, not self.packing)
        )
        return f"batches of up to {self.batch_tokens} tokens: {used} ({other})"


class TrainingReport:
    """Where a training's numbers go, on its main process: metrics.jsonl, the terminal and a tracker."""

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
        """A step is done; `metrics` where it was one that is logged."""
        if self.metrics_file is not None and metrics is not None:
            self.metrics_file.write(metrics)
            self.tracker.log_metrics({key: value for key, value in metrics.items() if key != "step"}, self.job.step)
        self.progress.set_num_steps(self.job.step if self.job.is_done else round(self.job.num_steps))
        self.progress.update(self.job.step, metrics)

    def record_checkpoint(self, checkpoint: Path) -> None:
        if self.metrics_file is not None:
            self.tracker.log_checkpoint(checkpoint, self.job.step)
