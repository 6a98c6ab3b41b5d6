"""The training loop. It knows no family: it asks a drafter for losses and for parameter groups."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.data.dataset import Batches, Batching, Dataset
from spectrain.drafters.base import Drafter, TrainingState, stage_at
from spectrain.errors import RunError, Stopped, UserError
from spectrain.features.base import BatchRequest, Source
from spectrain.models.features import Layer
from spectrain.models.prepacked import pack_linears
from spectrain.models.target import Target
from spectrain.runs.tracking import MetricsFile, Tracker
from spectrain.settings.values import Below1, NotNegative, Positive, Share

from .checkpoints import checkpoint_path, latest_checkpoint, load_checkpoint, load_tensors, save_checkpoint
from .parallel import Parallel, Sharding, connect, parallel
from .progress import Progress
from .watch import WAITING, Watch


@dataclass
class Tally:
    """What a logging interval added up on one process."""

    loss: float = 0.0
    steps: int = 0
    tokens: int = 0
    supervised: int = 0
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0
    seconds: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)  # each named loss
    hits: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Join what another one added up."""
        for name in ("loss", "steps", "tokens", "supervised", "target_seconds", "drafter_seconds", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, value in other.terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + value
        self.hits = [mine + more for mine, more in zip_longest(self.hits, other.hits, fillvalue=0.0)]
        self.counts = [mine + more for mine, more in zip_longest(self.counts, other.counts, fillvalue=0.0)]


@dataclass(frozen=True)
class Trained:
    """What a training took, of all its parts where it was resumed, and where the drafter is now."""

    steps: int
    tokens: int  # seen, on all processes, padding left out
    seconds: float  # of steps, until the end of the last
    parameters: int  # that learnt, in any stage
    in_place: bool  # the main process holds the drafter whole in its place


@dataclass
class Job:
    """What one training works on."""

    drafter: Drafter
    target: Target
    source: Source
    shared: Parallel
    watch: Watch
    run: Path
    tally: Tally = field(default_factory=Tally)
    step: int = 0  # steps done
    num_steps: int = 0  # of the whole run
    batches_a_step: int = 0  # on all processes
    saved: int = 0  # the step of the newest checkpoint
    position: dict[str, Any] | None = None  # where this process stands in the data
    skipped: int = 0  # steps that changed nothing, because something was not finite
    skipped_in_a_row: int = 0
    tokens: int = 0  # up to the last line of metrics, on all processes
    seconds: float = 0.0  # up to there
    learning: set[int] = field(default_factory=set)  # parameters of this stage and those before it,
    num_learning: int = 0  # and their numbers


@dataclass
class Trainer:
    """AdamW with warm-up and cosine decay over `epochs` of the data, or `max_steps` steps where that is given.

    A step sees `accumulate` batches of up to `batch_tokens` tokens on each process, and its loss is divided by the number
    of supervised tokens in all of them, so neither depends on the number of processes or on how sequences were batched: padded,
    in buckets of like length, or with `packing` one after another in one row, where they do not see each other. A step whose
    gradient is not finite is left out; `max_skipped` of them in a row stop the run.
    """

    lr: float = 1e-4  # the highest learning rate, reached after the warm-up
    epochs: float = 1.0  # times that the data is seen; a fraction is allowed
    max_steps: int | None = None  # optimiser steps, instead of epochs
    batch_tokens: int = 4096  # tokens of a batch at most, on each process
    packing: bool = False  # sequences one after another in one row, without padding
    accumulate: int = 1  # batches of a step, on each process
    warmup: Share = 0.05  # the share of the steps in which the rate rises
    min_lr: Share = 0.0  # the share of lr that the rate falls to
    clip: Positive = 0.5  # the largest norm of the gradient
    betas: tuple[Below1, Below1] = (0.9, 0.95)  # AdamW's
    weight_decay: NotNegative = 0.0  # AdamW's
    seed: int = 0  # of the first weights, the order of the data and what is drawn
    save_every: int | None = None  # steps between two checkpoints; null: only where a run is stopped or ends
    keep_checkpoints: int = 2  # how many of the newest stay
    log_every: int = 10  # steps between two lines of metrics.jsonl
    mixed_precision: str = "auto"  # bf16 or no; auto: bf16 on a GPU
    sharding: Sharding = "auto"  # how processes hold the drafter and its optimiser together
    gradient_checkpointing: bool = False  # less memory for more time: parts are run again in the backward pass
    max_skipped: int = 5  # steps in a row whose gradient is not finite, before the run stops
    patience: float = 60.0  # seconds that processes wait for one of them before it is named
    resume: str | None = None  # auto: start the run in run=DIR, or go on with it

    def __post_init__(self) -> None:
        for key in ("lr", "epochs", "batch_tokens", "accumulate", "log_every", "keep_checkpoints", "max_skipped", "patience"):
            if getattr(self, key) <= 0:
                raise UserError(f"trainer.{key}={getattr(self, key)}: use a number above 0")
        for key in ("max_steps", "save_every"):
            whole = getattr(self, key)
            if whole is not None and whole < 1:
                raise UserError(f"trainer.{key}={whole}: use 1 or more, or null")
        if self.mixed_precision not in ("auto", "no", "bf16"):
            raise UserError(f"trainer.mixed_precision={self.mixed_precision}: use auto, no or bf16")
        if self.resume not in (None, "auto"):
            raise UserError(f"trainer.resume={self.resume}: use auto, or leave it out")

    def accelerator(self) -> Accelerator:
        """bf16 autocast on a GPU, float32 on a CPU, unless `mixed_precision` says otherwise."""
        precision = self.mixed_precision
        if precision == "auto":  # what accelerate's file says, else what the device is good at
            launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "bf16")
            precision = launched if torch.cuda.is_available() else "no"
        return connect(precision, self.sharding)

    @property
    def batching(self) -> Batching:
        """How the data becomes batches."""
        return Batching(self.batch_tokens, self.seed, self.packing)

    def num_steps(self, dataset: Dataset, num_processes: int = 1) -> int:
        """Optimiser steps of the whole run."""
        if self.max_steps is not None:
            return self.max_steps
        batches = dataset.num_batches(self.batching)
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
    ) -> Trained:
        """Train `drafter` in place; go on from the run's newest checkpoint where there is one.

        Afterwards the main process holds it whole, but in its place only where the result says so. SIGTERM and SIGINT let the
        step end, save a checkpoint and raise `Stopped`.
        """
        run.mkdir(parents=True, exist_ok=True)
        accelerator = accelerator or self.accelerator()
        same_data = accelerator.num_processes if target.sharding == "tensor" else 1
        shared = parallel(accelerator, self.sharding, same_data)
        num_steps, accumulate = self.num_steps(dataset, shared.data_count), self.accumulate
        torch.manual_seed(self.seed)
        if source.asks_drafter and not shared.whole:
            raise UserError(
                f"trainer.sharding={shared.name}: the drafter writes text here, and no process has all of it; use ddp, zero2 "
                "or source.by=target"
            )
        if self.gradient_checkpointing and drafter.abilities.adapts_layers:
            raise UserError(
                "trainer.gradient_checkpointing=true: this family adds to the target's layers while they run, so they cannot "
                "be run again; leave it out and lower trainer.batch_tokens"
            )
        begun = latest_checkpoint(run)
        job = Job(drafter, target, source, shared, Watch(shared, self.patience), run)
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, float] = {}
        if begun is not None:
            weights, tensors, progress = load_checkpoint(begun)
            _load_weights(drafter, target, weights)
            job.step, job.position, job.skipped = progress["step"], progress["stream"], progress["skipped"]
            num_steps = num_steps if self.max_steps is not None else progress["num_steps"]
            accumulate = self._as_before(progress["batches_a_step"], shared)
            numbers = progress["optimizer"]
            job.tally = _tally_of(progress["tallies"], shared)
            _set_random_state({name: tensors.pop(name) for name in list(tensors) if name.startswith("rng.")}, shared.rank)
            job.saved, job.tokens, job.seconds = job.step, progress["tokens"], progress["seconds"]
        job.num_steps, job.batches_a_step = num_steps, accumulate * shared.data_count
        stages = drafter.stages
        stage = stage_at(stages, max(0, job.step - 1), num_steps)  # that of the optimiser in the checkpoint
        stage_began = next(earlier for earlier in range(job.step + 1) if stage_at(stages, earlier, num_steps) == stage)
        pack_linears(drafter)
        shared.share(drafter, target)
        self._begin_stage(job, stage)
        if begun is not None:
            shared.load_optimizer(tensors, numbers)
        process = shared.data_rank, shared.data_count
        stream = dataset.stream(self.batching, *process, job.position)
        job.position = stream.state()
        if shared.is_main and begun is None:
            how = f"{shared.count} processes, {shared.name}; " if shared.count > 1 else ""
            print(how + self._efficiency(dataset), flush=True)
        elif shared.is_main and begun is not None:
            print(f"going on from {begun}", flush=True)
        metrics_file = MetricsFile(run / "metrics.jsonl", job.step) if shared.is_main else None
        with (
            Progress(num_steps, job.step, enabled=shared.is_main) as progress_line,
            StopSignals() as stop,
            job.watch as watch,
        ):
            while job.step < num_steps:
                step, began = job.step, time.perf_counter()
                if stage_at(stages, step, num_steps) != stage:
                    stage, stage_began = stage_at(stages, step, num_steps), step
                    self._begin_stage(job, stage)
                lr = self.lr_at(step, num_steps, stage_began)
                for group in shared.optimizer.param_groups:
                    group["lr"] = lr * group["lr_scale"]
                state = TrainingState(step, step / num_steps, self.gradient_checkpointing)
                watch.at(step, "reading data")
                share = list(islice(stream, accumulate))
                try:
                    stopped = self._step(job, share, stages[stage].layers, state, stop)
                except RuntimeError as error:
                    raise _explained(error, job) from error
                if stopped:
                    self._stop(job, stream, stop)
                job.position = stream.state()
                job.step = step = step + 1
                job.tally.seconds += time.perf_counter() - began
                if job.skipped_in_a_row >= self.max_skipped:
                    self._give_up(job)
                if step % self.log_every == 0 or step == num_steps or step == 1:
                    metrics = self._metrics(job, lr) | stream.counts(self._position(job, stream))
                    job.tally = Tally()
                    if metrics_file is not None:
                        metrics_file.write(metrics)
                        if tracker is not None:
                            tracker.log({k: v for k, v in metrics.items() if k != "step"}, step)
                    progress_line.update(step, metrics)
                if self.save_every is not None and step % self.save_every == 0 and step < num_steps:
                    self._save(job, stream)
                    if shared.is_main and tracker is not None:
                        tracker.checkpoint(checkpoint_path(run, step), step)
                if on_step is not None:
                    on_step(step)
        shared.release()
        changes = drafter.abilities.target_training
        if changes is not None and (shared.in_place or shared.is_main):
            changes.finish(target)
        return Trained(job.step, job.tokens, job.seconds, job.num_learning, shared.in_place)

    def _as_before(self, batches: int, shared: Parallel) -> int:
        """How many batches each process accumulates, so that a step goes on taking so many in all."""
        if batches % shared.data_count:
            raise UserError(
                f"trainer.resume=auto: a step of this run takes {batches} batches, which {shared.data_count} processes cannot "
                "share equally; start a number of processes that divides it"
            )
        accumulate = batches // shared.data_count
        if accumulate != self.accumulate and shared.is_main:
            print(
                f"{shared.data_count} processes accumulate {accumulate} batches each, so that a step takes {batches} as before"
            )
        return accumulate

    def _efficiency(self, dataset: Dataset) -> str:
        """How full batches are, padded and packed."""
        ways = {True: "packed", False: "padded"}
        used, other = (
            f"{ways[way]} {dataset.efficiency(replace(self.batching, packed=way))}" for way in (self.packing, not self.packing)
        )
        return f"batches of up to {self.batch_tokens} tokens: {used} ({other})"

    def _position(self, job: Job, stream: Batches) -> dict[str, Any]:
        """Where the run stands in the data, from what all processes say; every process must call this."""
        return stream.merged(job.shared.gathered(job.position)[:: job.shared.copies])

    def _begin_stage(self, job: Job, stage: int) -> None:
        """AdamW over what a stage trains; every other parameter is frozen."""
        groups = trained_groups(job.drafter, job.target, stage)
        new = [p for group in groups for p in group["params"] if id(p) not in job.learning]
        job.learning |= {id(parameter) for parameter in new}
        job.num_learning += sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in new)
        job.shared.optimise(groups, self.clip, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)

    def _step(
        self, job: Job, share: list[list[Example]], layers: tuple[Layer, ...], state: TrainingState, stop: "StopSignals"
    ) -> bool:
        """One optimiser step over this process's share of batches; nothing but True where a process was asked to stop."""
        shared, drafter, target = job.shared, job.drafter, job.target
        now, began = Tally(steps=1), time.perf_counter()
        batches = [
            job.source.batch(BatchRequest(examples, target, layers, self.packing, job.step, drafter)) for examples in share
        ]
        now.target_seconds = time.perf_counter() - began
        job.watch.at(job.step, WAITING)
        supervised, stops = shared.sums(sum(batch.num_supervised for batch in batches), float(stop.asked is not None))
        if stops:
            return True
        job.watch.at(job.step, "computing")
        began = time.perf_counter()
        scale = shared.data_count / max(1, supervised)  # gradients are averaged over processes
        drafter.train()
        for number, batch in enumerate(batches):
            last = number + 1 == len(batches)
            losses = shared.loss(batch, state, last)
            total = losses.total * scale
            if last:
                job.watch.at(job.step, WAITING)
            shared.backward(total, last)
            terms = {name: float(term.detach()) * scale / shared.data_count for name, term in losses.terms.items()}
            tokens = sum(len(example.tokens) for example in share[number])
            hits, counts = losses.hits.detach().float().tolist(), losses.counts.detach().float().tolist()
            now.add(Tally(float(total.detach()) / shared.data_count, tokens=tokens, terms=terms, hits=hits, counts=counts))
        finite = shared.step()
        now.drafter_seconds = time.perf_counter() - began
        now.supervised = int(supervised)
        job.skipped_in_a_row = 0 if finite else job.skipped_in_a_row + 1
        if finite:
            job.tally.add(now)
        else:
            job.skipped += 1
            if shared.is_main:
                print(f"spectrain: training: step {job.step + 1} is left out: its gradient is not finite", file=sys.stderr)
        return False

    def _metrics(self, job: Job, lr: float) -> dict[str, Any]:
        """The means of an interval over all processes."""
        shared, tally = job.shared, job.tally
        names, depths = sorted(tally.terms), len(tally.hits)
        own = tally.target_seconds + tally.drafter_seconds
        values = [tally.loss, tally.tokens, own, tally.target_seconds, *(tally.terms[name] for name in names), *tally.hits]
        loss, tokens, busy, target_busy, *rest = shared.sums(*values, *tally.counts)
        hits, counts = rest[len(names) : len(names) + depths], rest[len(names) + depths :]
        steps, seconds = max(1, tally.steps), max(tally.seconds, 1e-9)
        terms = {name: value / steps for name, value in zip(names, rest)}
        busy /= shared.data_count
        target_busy /= shared.data_count
        job.tokens += int(tokens)
        job.seconds += tally.seconds
        return {
            "step": job.step,
            "loss": loss / steps if tally.steps else None,
            **({"losses": terms} if len(terms) > 1 else {}),
            "agreement": [round(hit / max(1.0, count), 4) for hit, count in zip(hits, counts)],
            "lr": lr,
            "skipped": job.skipped,
            "tokens": job.tokens,
            "seconds": round(job.seconds, 3),
            "tokens_per_second": tokens / seconds,
            "supervised_per_second": tally.supervised / seconds,
            "time_share": {
                "target": round(target_busy / seconds, 3),
                "drafter": round((busy - target_busy) / seconds, 3),
                "rest": round(max(0.0, 1 - busy / seconds), 3),
            },
        }

    def _save(self, job: Job, stream: Batches) -> None:
        """A checkpoint of the whole run, written by the main process; every process must call this."""
        shared = job.shared
        job.source.flush()
        weights = _weights(job)
        state, numbers = shared.optimizer_state()
        tallies = shared.gathered(asdict(job.tally))
        states = shared.gathered(_random_state())
        position = self._position(job, stream)
        if shared.is_main:
            for rank, own in enumerate(states):
                state |= {f"rng.{name}.{rank}": tensor for name, tensor in own.items()}
            progress = {"step": job.step, "stream": position, "skipped": job.skipped, "tallies": tallies}
            progress |= {
                "tokens": job.tokens,
                "seconds": job.seconds,
                "optimizer": numbers,
                "num_steps": job.num_steps,
                "batches_a_step": job.batches_a_step,
            }
            save_checkpoint(checkpoint_path(job.run, job.step), weights, state, progress, self.keep_checkpoints)
        job.saved = job.step
        shared.wait()

    def _stop(self, job: Job, stream: Batches, stop: "StopSignals") -> None:
        """Save and leave, because a signal asked for it."""
        if job.step > job.saved:
            self._save(job, stream)
        signals = [number for number in job.shared.gathered(stop.asked) if number is not None]
        name = signal.Signals(signals[0]).name
        how = f"stopped by {name} after step {job.step}, which is saved" if job.step else f"stopped by {name} in the first step"
        how += "; go on with the same command, trainer.resume=auto"
        status = 0 if signals[0] == signal.SIGTERM else 1
        raise Stopped(f"{how} run={job.run}" if job.shared.is_main else "", status)

    def _give_up(self, job: Job) -> None:
        kept = latest_checkpoint(job.run)
        where = f"the last good checkpoint is {kept}" if kept is not None else "no checkpoint was saved yet"
        raise RunError(
            f"training: the gradient was not finite in {job.skipped_in_a_row} steps in a row, up to step {job.step}; {where}; "
            "lower trainer.lr or trainer.clip"
        )


class StopSignals:
    """While it is entered, SIGTERM and the first SIGINT are only noted, so that the step that runs can end."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked is not None:
            raise KeyboardInterrupt  # a second time: at once
        self.asked = self.asked or number


def trained_groups(drafter: Drafter, target: Target, stage: int) -> list[dict[str, Any]]:
    """What a stage trains, each group with its `lr_scale`; every other parameter of drafter and target is frozen."""
    groups = [{"lr_scale": 1.0, **group} for group in drafter.stages[stage].groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    for parameter in [*drafter.parameters(), *target.parameters()]:
        parameter.requires_grad_(id(parameter) in trained)
    return groups


def _explained(error: RuntimeError, job: Job) -> Exception:
    """The error, or where another process is what failed, one that says which."""
    text = str(error)
    if isinstance(error, (UserError, RunError)) or job.shared.count == 1:
        return error
    if not any(sign in text for sign in ("onnection", "peer", "NCCL", "gloo", "Gloo", "imed out", "imeout", "ocket")):
        return error
    gone = job.watch.lost()
    return error if gone is None else RunError(f"training: {gone}; go on with trainer.resume=auto run={job.run}")


def _random_state() -> dict[str, Tensor]:
    """The state of torch's own generators, for what a family may draw from them."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _set_random_state(saved: dict[str, Tensor], rank: int) -> None:
    """Undo `_random_state`; a process that was not there before keeps what its seed gave it."""
    if f"rng.cpu.{rank}" in saved:
        torch.set_rng_state(saved[f"rng.cpu.{rank}"])
    if f"rng.cuda.{rank}" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved[f"rng.cuda.{rank}"])


def _tally_of(saved: list[dict[str, Any]], shared: Parallel) -> Tally:
    """What this process had added up; with another number of processes the first takes all sums over."""
    tallies = [Tally(**one) for one in saved]
    if len(tallies) == shared.count:
        return tallies[shared.rank]
    whole = Tally()
    for tally in tallies:
        whole.add(tally)
    if shared.rank:  # the same names and depths, of which nothing is this one's
        zeros = [0.0] * len(whole.hits)
        whole = Tally(terms=dict.fromkeys(whole.terms, 0.0), hits=zeros, counts=zeros)
    whole.steps, whole.supervised, whole.seconds = tallies[0].steps, tallies[0].supervised, tallies[0].seconds
    return whole


def _weights(job: Job) -> dict[str, Tensor]:
    """What a checkpoint keeps: the drafter, and the parameters of the target that are being trained."""
    own = {id(parameter) for parameter in job.drafter.parameters()}
    weights = {f"drafter.{name}": tensor for name, tensor in job.shared.weights(job.drafter).items()}
    trained = [name for name, p in job.target.named_parameters() if p.requires_grad and id(p) not in own]
    if trained:
        theirs = job.shared.weights(job.target)
        weights |= {f"target.{name}": theirs[name] for name in trained}
    return weights


def _load_weights(drafter: Drafter, target: Target, weights: dict[str, Tensor]) -> None:
    load_tensors(drafter, {k.removeprefix("drafter."): v for k, v in weights.items() if k.startswith("drafter.")})
    trained = {k.removeprefix("target."): v for k, v in weights.items() if k.startswith("target.")}
    parameters = dict(target.named_parameters())
    with torch.no_grad():
        for name, value in trained.items():
            parameters[name].copy_(value)
