"""The training loop, on accelerate. It knows no family: it asks a drafter for losses and for parameter groups."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from ..data.chat import Example
from ..data.dataset import Dataset
from ..drafters.base import Drafter
from ..errors import RunError, UserError
from ..features import Layer
from ..packing import pack_linears
from ..sources import Source
from ..target import Target
from .checkpoints import checkpoint_path, latest_checkpoint, load_checkpoint, load_tensors, save_checkpoint, tensors_of
from .progress import Progress
from .tracking import MetricsFile, Tracker


@dataclass
class Tally:
    """What a logging interval added up."""

    loss: float = 0.0
    terms: dict[str, Tensor] = field(default_factory=dict)  # each named loss
    hits: Tensor | None = None
    counts: Tensor | None = None
    steps: int = 0
    tokens: int = 0
    supervised: int = 0
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0
    began: float = 0.0


@dataclass
class Job:
    """What one training works on."""

    drafter: Drafter
    target: Target
    dataset: Dataset
    source: Source
    accelerator: Accelerator
    model: nn.Module  # the drafter, as accelerate wraps it
    optimizer: torch.optim.Optimizer


@dataclass
class Trainer:
    """AdamW with warm-up and cosine decay over `epochs` of the data, or `max_steps` steps where that is given.

    A step sees `accumulate` batches of up to `batch_tokens` tokens on each process, and its loss is divided by the number
    of supervised tokens in all of them, so neither depends on how sequences were batched: padded, in buckets of like length,
    or with `packing` one after another in one row, where they do not see each other.
    """

    lr: float = 1e-4
    epochs: float = 1.0
    max_steps: int | None = None
    batch_tokens: int = 4096
    packing: bool = False
    accumulate: int = 1
    warmup: float = 0.05
    min_lr: float = 0.0
    clip: float = 0.5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    seed: int = 0
    save_every: int | None = None
    keep_checkpoints: int = 2
    log_every: int = 10
    mixed_precision: str = "auto"
    resume: str | None = None

    def __post_init__(self) -> None:
        for key in ("lr", "epochs", "batch_tokens", "accumulate", "log_every", "keep_checkpoints"):
            if getattr(self, key) <= 0:
                raise UserError(f"trainer.{key}={getattr(self, key)}: use a number above 0")
        for key in ("max_steps", "save_every"):
            whole = getattr(self, key)
            if whole is not None and whole < 1:
                raise UserError(f"trainer.{key}={whole}: use 1 or more, or null")
        if self.resume not in (None, "auto"):
            raise UserError(f"trainer.resume={self.resume}: use auto, or leave it out")

    def accelerator(self) -> Accelerator:
        """bf16 autocast on a GPU, float32 on a CPU, unless `mixed_precision` says otherwise."""
        precision = self.mixed_precision
        if precision == "auto":
            precision = "bf16" if torch.cuda.is_available() else "no"
        return Accelerator(mixed_precision=precision, cpu=not torch.cuda.is_available())

    def num_steps(self, dataset: Dataset, num_processes: int = 1) -> int:
        """Optimiser steps of the whole run."""
        if self.max_steps is not None:
            return self.max_steps
        batches = dataset.num_batches(self.batch_tokens, self.seed, self.packing)
        return max(1, math.ceil(self.epochs * batches / (self.accumulate * num_processes)))

    def lr_at(self, step: int, num_steps: int, stage_began: int = 0) -> float:
        """The learning rate of a step: linear warm-up, anew in every stage, and half a cosine down to `min_lr` of the peak."""
        warm = max(1, round(self.warmup * num_steps))
        progress = max(0, step - warm) / max(1, num_steps - warm)
        decayed = self.lr * (self.min_lr + (1 - self.min_lr) * 0.5 * (1 + math.cos(math.pi * progress)))
        return decayed * min(1.0, (step - stage_began + 1) / warm)

    def fit(
        self,
        drafter: Drafter,
        target: Target,
        dataset: Dataset,
        source: Source,
        run: Path,
        tracker: Tracker | None = None,
        accelerator: Accelerator | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        """Train `drafter` in place; go on from the run's newest checkpoint where there is one."""
        run.mkdir(parents=True, exist_ok=True)
        accelerator = accelerator or self.accelerator()
        num_steps = self.num_steps(dataset, accelerator.num_processes)
        torch.manual_seed(self.seed)
        step, begun = 0, latest_checkpoint(run)
        stage = drafter.stage_at(0, num_steps)
        if begun is not None:
            step = int(begun.name.split("-")[1])
            stage = drafter.stage_at(max(0, step - 1), num_steps)
        stage_began = next(earlier for earlier in range(step + 1) if drafter.stage_at(earlier, num_steps) == stage)
        optimizer = self._optimizer(drafter, target, stage)
        position = None
        if begun is not None:
            weights, progress = load_checkpoint(begun, optimizer)
            _load_weights(drafter, target, weights)
            position = progress["stream"]
        pack_linears(drafter)
        own = any(parameter.requires_grad for parameter in drafter.parameters())  # what wraps a model wants something to train
        model = accelerator.prepare_model(drafter.to(accelerator.device), evaluation_mode=not own)
        optimizer = accelerator.prepare(optimizer)
        job = Job(drafter, target, dataset, source, accelerator, model, optimizer)
        processes = accelerator.process_index, accelerator.num_processes
        stream = dataset.stream(self.batch_tokens, self.seed, self.packing, *processes, position)
        if accelerator.is_main_process and begun is None:
            print(self._efficiency(dataset), flush=True)
        metrics_file = MetricsFile(run / "metrics.jsonl", step) if accelerator.is_main_process else None
        tally = Tally(began=time.perf_counter())
        with Progress(num_steps, step, enabled=accelerator.is_main_process) as progress_line:
            while step < num_steps:
                if drafter.stage_at(step, num_steps) != stage:
                    stage, stage_began = drafter.stage_at(step, num_steps), step
                    job.optimizer = accelerator.prepare(self._optimizer(drafter, target, stage))
                lr = self.lr_at(step, num_steps, stage_began)
                for group in job.optimizer.param_groups:
                    group["lr"] = lr * group["lr_scale"]
                drafter.progress, drafter.step = step / num_steps, step
                share = list(islice(stream, self.accumulate))
                self._step(job, share, tally, step, drafter.features_in(stage))
                step += 1
                if step % self.log_every == 0 or step == num_steps or step == 1:
                    metrics = self._metrics(accelerator, tally, step, lr)
                    metrics |= stream.counts(stream.merged(gather_object([stream.state()])))
                    tally = Tally(began=time.perf_counter())
                    if metrics_file is not None:
                        metrics_file.write(metrics)
                        if tracker is not None:
                            tracker.log({k: v for k, v in metrics.items() if k != "step"}, step)
                    progress_line.update(step, metrics)
                if self.save_every is not None and step % self.save_every == 0 and step < num_steps:
                    source.flush()
                    position = stream.merged(gather_object([stream.state()]))
                    if accelerator.is_main_process:
                        self._save(job, run, step, position)
                    accelerator.wait_for_everyone()
                if on_step is not None:
                    on_step(step)
        drafter.finish(target)

    def _efficiency(self, dataset: Dataset) -> str:
        """How full batches are, padded and packed."""
        ways = {True: "packed", False: "padded"}
        used, other = (
            f"{ways[way]} {dataset.efficiency(self.batch_tokens, self.seed, way)}" for way in (self.packing, not self.packing)
        )
        return f"batches of up to {self.batch_tokens} tokens: {used} ({other})"

    def _optimizer(self, drafter: Drafter, target: Target, stage: int) -> torch.optim.Optimizer:
        """AdamW over what a stage trains; every other parameter is frozen."""
        groups = drafter.param_groups(stage)
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        for parameter in [*drafter.parameters(), *target.parameters()]:
            parameter.requires_grad_(id(parameter) in trained)
        groups = [{"lr_scale": 1.0, **group} for group in groups]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)

    def _step(self, job: Job, share: list[list[Example]], tally: Tally, step: int, layers: tuple[Layer, ...]) -> None:
        """One optimiser step over this process's share of batches."""
        accelerator, model, optimizer = job.accelerator, job.model, job.optimizer
        began = time.perf_counter()
        source = job.source
        batches = [source.batch(examples, job.target, layers, job.drafter, step, self.packing) for examples in share]
        tally.target_seconds += time.perf_counter() - began
        began = time.perf_counter()
        supervised = torch.tensor(sum(batch.num_supervised for batch in batches), device=accelerator.device)
        everywhere = int(accelerator.reduce(supervised, reduction="sum"))
        scale = accelerator.num_processes / max(1, everywhere)  # data-parallel wrappers average gradients
        model.train()
        for number, batch in enumerate(batches):
            last = number + 1 == len(batches)
            with nullcontext() if last else accelerator.no_sync(model):
                losses = model(batch, job.target)
                total = losses.total * scale
                if not torch.isfinite(total):
                    raise RunError(f"training: the loss is {total.item()} at step {step + 1}; lower trainer.lr or trainer.clip")
                accelerator.backward(total)
            tally.loss += float(total.detach()) / accelerator.num_processes
            for name, term in losses.terms.items():
                tally.terms[name] = term.detach().float() * scale / accelerator.num_processes + tally.terms.get(name, 0.0)
            tally.hits = losses.hits.detach().float() + (0 if tally.hits is None else tally.hits)
            tally.counts = losses.counts.detach().float() + (0 if tally.counts is None else tally.counts)
            tally.tokens += sum(len(example.tokens) for example in share[number])
        self._share_target_gradients(job)
        norm = accelerator.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], self.clip)
        if norm is not None and not torch.isfinite(torch.as_tensor(norm)):
            raise RunError(f"training: the gradient is not finite at step {step + 1}; lower trainer.lr or trainer.clip")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tally.supervised += everywhere
        tally.steps += 1
        tally.drafter_seconds += time.perf_counter() - began

    def _share_target_gradients(self, job: Job) -> None:
        """Average the gradients of the target's own parameters over processes: they are not in what accelerate wraps.

        A parameter that no sequence of this process went through, its layer dropped, has a gradient of zero.
        """
        own = {id(parameter) for parameter in job.drafter.parameters()}
        theirs = [p for group in job.optimizer.param_groups for p in group["params"] if id(p) not in own]
        for parameter in theirs:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if job.accelerator.num_processes == 1 or not theirs:
            return
        flat = torch.cat([parameter.grad.flatten() for parameter in theirs])  # one exchange instead of hundreds
        flat = job.accelerator.reduce(flat, reduction="mean")
        for parameter, mean in zip(theirs, flat.split([parameter.numel() for parameter in theirs])):
            parameter.grad = mean.view_as(parameter)

    def _metrics(self, accelerator: Accelerator, tally: Tally, step: int, lr: float) -> dict[str, Any]:
        """The means of an interval over all processes."""
        assert tally.hits is not None and tally.counts is not None
        seconds = time.perf_counter() - tally.began
        sums = torch.tensor([tally.loss, tally.tokens], dtype=torch.float64, device=accelerator.device)
        sums = accelerator.reduce(sums, reduction="sum")
        hits = accelerator.reduce(tally.hits.float(), reduction="sum")
        counts = accelerator.reduce(tally.counts.float(), reduction="sum")
        terms = {name: float(accelerator.reduce(term, reduction="sum")) / tally.steps for name, term in tally.terms.items()}
        return {
            "step": step,
            "loss": float(sums[0]) / tally.steps,
            **({"losses": terms} if len(terms) > 1 else {}),
            "agreement": [round(value, 4) for value in (hits / counts.clamp(min=1)).tolist()],
            "lr": lr,
            "tokens_per_second": float(sums[1]) / seconds,
            "supervised_per_second": tally.supervised / seconds,
            "time_share": {
                "target": round(tally.target_seconds / seconds, 3),
                "drafter": round(tally.drafter_seconds / seconds, 3),
                "rest": round(max(0.0, 1 - (tally.target_seconds + tally.drafter_seconds) / seconds), 3),
            },
        }

    def _save(self, job: Job, run: Path, step: int, position: dict[str, Any]) -> None:
        inner: Any = getattr(job.optimizer, "optimizer", job.optimizer)
        progress = {"step": step, "stream": position}
        save_checkpoint(checkpoint_path(run, step), _weights(job.drafter, job.target), inner, progress, self.keep_checkpoints)


def _weights(drafter: Drafter, target: Target) -> dict[str, Tensor]:
    """What a checkpoint keeps: the drafter, and the parameters of the target that are being trained."""
    own = {id(parameter) for parameter in drafter.parameters()}
    weights = {f"drafter.{name}": tensor for name, tensor in tensors_of(drafter).items()}
    for name, parameter in target.named_parameters():
        if parameter.requires_grad and id(parameter) not in own:
            weights[f"target.{name}"] = parameter.detach().cpu()
    return weights


def _load_weights(drafter: Drafter, target: Target, weights: dict[str, Tensor]) -> None:
    load_tensors(drafter, {k.removeprefix("drafter."): v for k, v in weights.items() if k.startswith("drafter.")})
    trained = {k.removeprefix("target."): v for k, v in weights.items() if k.startswith("target.")}
    parameters = dict(target.named_parameters())
    with torch.no_grad():
        for name, value in trained.items():
            parameters[name].copy_(value)
