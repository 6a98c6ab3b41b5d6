"""A training run: its progress, its steps and its checkpoints."""

import signal
import socket
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from spectrain.data.chat import Example
from spectrain.data.dataset import BatchQueue, BatchStream, Dataset
from spectrain.drafters.base import Drafter, TrainingState, stage_at
from spectrain.drafters.capabilities import ContextParallelDrafter
from spectrain.errors import RunError, RunInterrupted
from spectrain.features.base import BatchRequest, Source, SourceError
from spectrain.features.batch import Batch
from spectrain.features.loss_window import sample_loss_windows
from spectrain.models.fast import pack_linears
from spectrain.models.target import Target
from spectrain.models.threads import make_tuner

from .adapters import merge_adapters
from .checkpoints import (
    Tally,
    TrainingResult,
    ValidationHistory,
    WeightAverages,
    best_weights_path,
    checkpoint_path,
    delete_best_except,
    get_random_state,
    latest_checkpoint,
    load_best,
    load_checkpoint,
    load_trained_weights,
    save_best,
    save_checkpoint,
    select_trained_groups,
    set_random_state,
)  # fmt: skip
from .parallel import WAITING, ParallelStrategy, ProcessMonitor, summarize_processes
from .settings import Budget, TimeSpent, TrainerSettings
from .validation import measure_acceptance

TRIAL_STEPS = 2  # steps that each number of threads is timed by, twice as many at the start


class TrainingRun:
    """The objects and the progress of one training run. Call `start_training`, then `train_step` repeatedly."""

    run: Path
    stream: BatchStream  # of the data, on this process
    batches: BatchQueue  # of this stream, as the source receives them ahead

    def __init__(
        self,
        trainer: TrainerSettings,
        drafter: Drafter,
        target: Target,
        source: Source,
        parallel: ParallelStrategy,
        num_steps: int | None,
    ) -> None:
        self.trainer, self.drafter, self.target = trainer, drafter, target
        self.source, self.parallel, self.monitor = source, parallel, ProcessMonitor(parallel, trainer.patience)
        self.budget = Budget(num_steps, trainer.max_minutes)
        self.batches_per_step = trainer.accumulate * parallel.num_data_ranks
        self.step = 0  # steps done
        self.stage = self.stage_start = 0  # the stage of the optimiser, and its first step
        self.averages = None if trainer.ema is None else WeightAverages(trainer.ema)
        self.validation_history = ValidationHistory()  # at held-out data
        self.saved_step = self.saved_best_step = 0  # step of the newest checkpoint, step of the best validation saved with it
        self.skipped = self.skipped_in_a_row = 0  # steps that changed nothing, because something was not finite
        self.tally = Tally()  # since the last line of metrics
        self.tokens, self.seconds = 0, 0.0  # up to there, on all processes
        self.max_text_length = 0  # of the data, in tokens
        self.data_position: dict[str, Any] | None = None  # where this process stands in the data
        self.threads = make_tuner(parallel.device, TRIAL_STEPS) if parallel.num_processes == 1 else None
        self.source_failure: str | None = None  # why the source gives no more batches
        self.trained_ids: set[int] = set()  # parameters of this stage and those before it,
        self.num_trained = 0  # and their numbers

    @property
    def num_steps(self) -> float:
        """Return the steps of the run; with a time limit, an estimate."""
        return self.budget.num_steps(self.step)

    @property
    def is_done(self) -> bool:
        """Tell whether the budget is used up or validation has stopped improving."""
        stop_after = self.trainer.stop_after
        return self.budget.is_done(self.step) or (stop_after is not None and self.validation_history.without_gain >= stop_after)

    # Beginning

    def start_training(self) -> None:
        """Distribute the drafter over the processes and make the optimizer of the current stage."""
        pack_linears(self.drafter)
        self.parallel.set_drafter(self.drafter, self.target)
        self.enter_stage(self.stage, self.stage_start)

    def restore_or_start(self, run: Path, dataset: Dataset) -> Path | None:
        """Start from the newest checkpoint of a run, if any, open the data, and return that checkpoint."""
        self.run, checkpoint = run, latest_checkpoint(run)
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, float] = {}
        if checkpoint is not None:
            weights, tensors, progress = load_checkpoint(checkpoint)
            load_trained_weights(self.drafter, self.target, weights)
            tensors, numbers = self._restore_progress(progress, tensors), progress["optimizer"]
        self.start_training()
        self.max_text_length = dataset.max_text_length
        if checkpoint is not None:
            self.parallel.load_optimizer(tensors, numbers)
        shared = self.parallel
        self.stream = dataset.stream_batches(
            self.trainer.batch_settings, shared.data_rank, shared.num_data_ranks, self.data_position, self.batches_per_step
        )
        self.batches = BatchQueue(self.stream, self.source.num_ahead, self.source.request_ahead)
        self.data_position = self.batches.state_dict()
        return checkpoint

    def _restore_progress(self, progress: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Restore the progress of a checkpoint; return the tensors of the optimizer."""
        shared = self.parallel
        self.stage, self.stage_start = progress["stage"], progress["stage_began"]
        self.budget.resume_from(TimeSpent(**progress["spent"]))
        self.validation_history = ValidationHistory(**progress["looks"])
        if self.trainer.keep_best and not best_weights_path(self.run, self.validation_history.best_step).exists():
            self.validation_history = ValidationHistory()  # its weights are gone
        self.saved_best_step = self.validation_history.best_step
        if shared.is_main:
            delete_best_except(self.run, {self.saved_best_step})
        self.step, self.data_position, self.skipped = progress["step"], progress["stream"], progress["skipped"]
        if self.trainer.max_steps is None and self.trainer.max_minutes is None:
            self.budget.max_steps = progress["num_steps"]
        self._share_batches(progress["batches_a_step"])
        copies = shared.num_copies / progress.get("copies", 1)
        self.tally = Tally.from_saved(progress["tallies"], shared.rank, shared.num_processes).scale_sums(copies)
        self.saved_step, self.tokens, self.seconds = self.step, progress["tokens"], progress["seconds"]
        drawn = {name for name in tensors if name.startswith("rng.")}
        set_random_state({name: tensors[name] for name in drawn}, shared.rank)
        averaged = {name for name in tensors if name.startswith("ema.")}
        if self.averages is not None:
            self.averages.load({name.removeprefix("ema."): tensors[name] for name in averaged}, shared.device)
        return {name: tensor for name, tensor in tensors.items() if name not in drawn | averaged}

    def _share_batches(self, batches: int) -> None:
        """Let a step take as many batches as before, by however many processes."""
        count = self.parallel.num_data_ranks
        if batches != self.batches_per_step and self.parallel.is_main:
            equally = f"{batches // count} each" if batches % count == 0 else f"up to {-(-batches // count)} each"
            print(f"{count} processes share the {batches} batches that a step takes as before, {equally}")
        self.batches_per_step = batches

    @property
    def num_own_batches(self) -> int:
        """The batches of a step that are this process's own. Processes may differ by one; one may have none."""
        return len(range(self.parallel.data_rank, self.batches_per_step, self.parallel.num_data_ranks))

    @property
    def num_batches_run(self) -> int:
        """The batches that every process runs in a step: where parameters are sharded, all run equally many forwards."""
        return -(-self.batches_per_step // self.parallel.num_data_ranks)

    # Steps

    def train_step(
        self, example_batches: list[list[Example]], stop_signal: int | None = None, data_seconds: float = 0.0
    ) -> bool:
        """Run an optimiser step over this process's share of batches, which took `data_seconds` to read.

        A process with fewer batches than others runs its last one again with a weight of 0. Return False, and take no step,
        where a process was asked to stop.
        """
        example_batches = example_batches + example_batches[-1:] * (self.num_batches_run - len(example_batches))
        self._prepare_step()
        if self.threads is not None:
            self.threads.set_threads()
        now, began, timer = Tally(steps=1), time.perf_counter(), self.parallel.timer
        timer.start(data_seconds)
        batches = self._make_batches(example_batches)
        timer.mark("features")
        self.monitor.report_status(self.step, WAITING)
        supervised, stops = self.parallel.all_reduce(
            sum(batch.num_supervised for batch in batches[: self.num_own_batches]),
            float(stop_signal is not None or self.source_failure is not None),
        )
        if stops:
            return False
        timer.mark("together")
        self.monitor.report_status(self.step, "computing")
        scale = self.parallel.num_loss_parts / max(1, supervised)  # gradients are averaged over processes
        self.drafter.train()
        for number, (batch, examples) in enumerate(zip(batches, example_batches), 1):
            is_last, is_own = number == len(batches), number <= self.num_own_batches
            added = self._add_gradients(batch, examples, scale if is_own else 0.0, is_last)
            now.add_tally(added if is_own else added.without_counts())
        finite = self.parallel.step()
        timer.end()
        self._take_times(with_newest=False)
        self._record_threads(time.perf_counter() - began, now.tokens)
        now.supervised = int(supervised)
        self._finish_step(now, finite)
        return True

    def _record_threads(self, seconds: float, tokens: int) -> None:
        """Record the time of a step by its tokens, and print the first choice of a number of threads."""
        if self.threads is None:
            return
        was_chosen = self.threads.is_chosen
        self.threads.record_step(seconds, max(1, tokens))
        if self.threads.is_chosen and not was_chosen:
            print(f"threads of a training step, by measured times per token: {self.threads.describe()}", flush=True)

    def _stage_number(self, step: int) -> int:
        return stage_at(self.drafter.stages, step, self.num_steps)

    def enter_stage(self, stage: int, first_step: int) -> None:
        """Make an optimizer of the parameters that a stage trains; all others are frozen."""
        self.stage, self.stage_start = stage, first_step
        groups = select_trained_groups(self.drafter, self.target, stage)
        new = [p for group in groups for p in group["params"] if id(p) not in self.trained_ids]
        self.trained_ids |= {id(parameter) for parameter in new}
        self.num_trained += sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in new)
        self.parallel.start_stage(groups, self.trainer.clip, self.trainer.make_optimizer)

    def _prepare_step(self) -> None:
        """Enter the stage of the next step and set its learning rate."""
        stage = self._stage_number(self.step)
        if stage != self.stage:
            self.enter_stage(stage, self.step)
        self.lr = self.trainer.lr_at(self.step, self.num_steps, self.stage_start)
        for group in self.parallel.optimizer.param_groups:
            group["lr"] = self.lr * group["lr_scale"]

    def _make_batches(self, example_batches: list[list[Example]]) -> list[Batch]:
        """Return the batches of a step; none where the source fails, which stops the training on all processes."""
        try:
            return [self._make_batch(examples) for examples in example_batches]
        except SourceError as error:
            self.source_failure = str(error)
            return []

    def _make_batch(self, examples: list[Example]) -> Batch:
        layers = self.drafter.stages[self.stage].layers
        batch = self.source.make_batch(
            BatchRequest(examples, self.target, layers, self.trainer.packing, self.step, self.drafter)
        )
        num_tokens, context = self.trainer.loss_tokens, self.parallel.context
        if num_tokens is not None:
            batch = sample_loss_windows(batch, num_tokens, self.trainer.seed, self.step)
        if context is not None and isinstance(self.drafter, ContextParallelDrafter):
            batch = batch.split_context(context, self.drafter.label_reach)
        return batch

    def _add_gradients(self, batch: Batch, examples: list[Example], scale: float, is_last: bool) -> Tally:
        """Add a batch to the gradients, as the last of a step or not; what it adds to the tally."""
        state = TrainingState(self.step, self.step / self.num_steps, self.trainer.gradient_checkpointing)
        losses = self.parallel.loss(batch, state, is_last)
        total = losses.total * scale
        if is_last:
            self.monitor.report_status(self.step, WAITING)
        self.parallel.backward(total, is_last)
        share = self.parallel.num_data_ranks
        terms = {name: float(term.detach()) * scale / share for name, term in losses.terms.items()}
        tokens = sum(len(example.tokens) for example in examples)
        parts = self.parallel.num_loss_parts / share
        hits, counts = ((part.detach().float() * parts).tolist() for part in (losses.hits, losses.counts))
        return Tally(float(total.detach()) / share, tokens=tokens, terms=terms, hits=hits, counts=counts)

    def _finish_step(self, step_tally: Tally, is_finite: bool) -> None:
        """Count a step as done, or as skipped because its gradient is not finite."""
        self.step += 1
        if is_finite:
            self.skipped_in_a_row = 0
            if self.averages is not None:
                self.averages.update_averages(self.named_parameters(), self.step)
            self.tally.add_tally(step_tally)
            return
        self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
        if self.parallel.is_main:
            print(f"spectrain: training: step {self.step} is left out: its gradient is not finite", file=sys.stderr)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of drafter and target by their names in a checkpoint."""
        named = {f"drafter.{name}": parameter for name, parameter in self.drafter.named_parameters()}
        own = {id(parameter) for parameter in named.values()}
        target_parameters = {f"target.{name}": p for name, p in self.target.named_parameters() if id(p) not in own}
        return named | target_parameters

    def validate(self, held_out: list[Example], sources: list[str]) -> dict[str, Any]:
        """Validate the drafter, with averaged weights where there are any, on held-out data; return the measures.

        `sources` names the source of each held-out example of a mixture.
        """
        self.monitor.report_status(self.step, "drafting for what was held out")
        parameters = self.named_parameters()
        with nullcontext() if self.averages is None else self.averages.swap_weights(parameters):
            metrics = measure_acceptance(self.drafter, self.target, held_out, sources)
            is_best = self.validation_history.add_forecast(self.parallel.all_gather(metrics["forecast"])[0], self.step)
            if is_best and self.trainer.keep_best:
                weights = self.parallel.gather_trained_weights(self.drafter, self.target)
                if self.parallel.is_main:
                    save_best(self.run, self.step, weights)
                    delete_best_except(self.run, {self.step, self.saved_best_step})
        return metrics

    def collect_metrics(self) -> dict[str, Any]:
        """Return the means over all processes since the last call, and the data position. Every process must call this."""
        shared, tally = self.parallel, self.tally
        self._take_times(with_newest=True)
        self.tally = Tally()
        names, depths = sorted(tally.terms), len(tally.hits)
        values = [tally.loss, tally.tokens, self.source.take_waited_seconds()]
        values += [*(tally.terms[name] for name in names), *tally.hits]
        loss, tokens, waited, *rest = shared.all_reduce(*values, *tally.counts)
        hits, counts = rest[len(names) : len(names) + depths], rest[len(names) + depths :]
        if tally.steps and counts and not any(counts) and shared.is_main:
            print(f"spectrain: training: no supervised draft position up to step {self.step}; use longer answers or "
                  "fewer draft steps", file=sys.stderr)  # fmt: skip
        steps, seconds = max(1, tally.steps), max(tally.seconds, 1e-9)
        terms = {name: value / steps for name, value in zip(names, rest)}
        self.tokens += int(tokens)
        self.seconds += tally.seconds
        position, processes = self._gather_progress(tally)
        shares = {
            part: processes["step_seconds"].get(part, 0.0) * steps / seconds for part in ("data", "target", "drafter", "others")
        }
        return {
            "step": self.step,
            "loss": loss / steps if tally.steps else None,
            **({"losses": terms} if len(terms) > 1 else {}),
            "agreement": [round(hit / max(1.0, count), 4) for hit, count in zip(hits, counts)],
            "lr": self.lr,
            "skipped": self.skipped,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": tokens / seconds,
            "supervised_per_second": tally.supervised / seconds,
            "time_share": {
                **{part: round(share, 3) for part, share in shares.items()},
                "rest": round(max(0.0, 1 - sum(shares.values())), 3),
                # This is a part of the target's share.
                **({"server": round(waited / shared.num_data_ranks / seconds, 3)} if self.source.needs_server else {}),
            },
            **processes,
            **self.stream.data_metrics(position),
        }  # fmt: skip

    def _gather_progress(self, tally: Tally) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the merged data position and what the time of the processes went to. Every process must call this."""
        gathered = self.parallel.all_gather((self.data_position, tally.times, socket.gethostname()))
        positions, times, hosts = zip(*gathered)
        merged = self.stream.merge_states(list(positions[:: self.parallel.num_copies]))
        return merged, summarize_processes(list(times), list(hosts), tally.steps)

    def _take_times(self, with_newest: bool) -> None:
        """Add the times of steps that have ended to the tally."""
        self.tally.add_tally(Tally(times=self.parallel.timer.take_times(with_newest)))

    # Ending

    def save(self) -> None:
        """Save a checkpoint of the run from the main process. Every process must call this."""
        shared = self.parallel
        self.source.flush()
        weights = shared.gather_trained_weights(self.drafter, self.target)
        tensors, numbers = shared.gather_optimizer_state()
        self._take_times(with_newest=True)
        tallies, drawn = shared.all_gather(asdict(self.tally)), shared.all_gather(get_random_state())
        position = self._gather_progress(self.tally)[0]
        if shared.is_main:
            for rank, own in enumerate(drawn):
                tensors |= {f"rng.{name}.{rank}": tensor for name, tensor in own.items()}
            if self.averages is not None:
                tensors |= {f"ema.{name}": tensor.cpu() for name, tensor in self.averages.averages.items()}
            progress = {
                "step": self.step, "stream": position, "skipped": self.skipped, "tallies": tallies, "tokens": self.tokens,
                "seconds": self.seconds, "optimizer": numbers, "num_steps": self.num_steps,
                "stage": self.stage, "stage_began": self.stage_start, "spent": asdict(self.budget.time_spent),
                "looks": asdict(self.validation_history),
                "batches_a_step": self.batches_per_step, "copies": shared.num_copies,
            }  # fmt: skip
            path = checkpoint_path(self.run, self.step)
            save_checkpoint(path, weights, tensors, progress, self.trainer.keep_checkpoints)
            delete_best_except(self.run, {self.validation_history.best_step})
        self.saved_step, self.saved_best_step = self.step, self.validation_history.best_step
        shared.wait_for_all()

    def save_and_stop(self, stop_signal: int | None) -> NoReturn:
        """Save and raise RunInterrupted, after a stop signal to this process or another, or RunError if a source failed."""
        if self.step > self.saved_step:
            self.save()
        failures = [failure for failure in self.parallel.all_gather(self.source_failure) if failure is not None]
        if failures:
            where = f"step {self.step} is saved" if self.step else "no step was finished"
            raise RunError(f"{failures[0]}; {where}; go on with the same command, trainer.resume=auto run={self.run}")
        signals = [number for number in self.parallel.all_gather(stop_signal) if number is not None]
        name = signal.Signals(signals[0]).name
        after = f"after step {self.step}, which is saved" if self.step else "in the first step"
        how = f"stopped by {name} {after}; go on with the same command, trainer.resume=auto run={self.run}"
        raise RunInterrupted(how if self.parallel.is_main else "", 0 if signals[0] == signal.SIGTERM else 1)

    def abort(self) -> NoReturn:
        """Raise a RunError after too many skipped steps in a row."""
        checkpoint = latest_checkpoint(self.run)
        where = f"the last good checkpoint is {checkpoint}" if checkpoint is not None else "no checkpoint was saved yet"
        raise RunError(
            f"training: the gradient was not finite in {self.skipped_in_a_row} steps in a row, up to step {self.step}; {where}"
            "; lower trainer.lr or trainer.clip"
        )

    def finish(self) -> TrainingResult:
        """Restore the full drafter on the main process and the target as an ordinary model; return the result."""
        parameters = self.named_parameters()
        if self.averages is not None:
            self.averages.copy_to(parameters)
        self.parallel.restore_tensors()
        best = self.validation_history.best_step if self.trainer.keep_best else 0
        if best and (self.parallel.is_reusable or self.parallel.is_main):
            load_trained_weights(self.drafter, self.target, load_best(self.run, best))
        changes = self.drafter.capabilities.target_training
        if self.parallel.is_reusable or self.parallel.is_main:
            merge_adapters(self.drafter)
            if changes is not None:
                changes.finish_training(self.target)
        return TrainingResult(
            self.step,
            self.tokens,
            self.seconds,
            self.num_trained,
            self.parallel.is_reusable,
            best or self.step,
            self.max_text_length,
        )
