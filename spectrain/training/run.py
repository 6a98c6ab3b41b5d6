"""A training run: its steps, its checkpoints and its end."""

import signal
import socket
import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from spectrain.data.chat import Example
from spectrain.data.dataset import BatchQueue, Dataset
from spectrain.drafters.base import Drafter, TrainingState, stage_at
from spectrain.errors import SIGNAL_STATUS, RunError, RunInterrupted
from spectrain.features.base import BatchRequest, Source, SourceError
from spectrain.features.batch import Batch
from spectrain.features.loss_window import sample_loss_windows
from spectrain.models.accelerator import accelerator
from spectrain.models.fast import pack_linears
from spectrain.models.target import Target
from spectrain.output.streams import print_text, print_warning

from .adapters import merge_adapters, select_stage_groups
from .checkpoint_writer import CheckpointWriter
from .checkpoints import (
    Tally,
    TrainingResult,
    checkpoint_path,
    delete_best_except,
    get_random_state,
    latest_checkpoint,
    load_best,
    load_checkpoint,
    load_trained_weights,
    save_best,
    save_checkpoint,
    save_start,
    select_trained_groups,
)
from .initial_fit import fit_initial_weights
from .parallel.base import ParallelStrategy
from .parallel.monitor import WAITING, ProcessMonitor
from .progress import RunProgress
from .rates import choose_rates, describe_rates, split_by_rate
from .run_files import describe_files
from .settings import TrainerSettings
from .step_sums import BatchSums, Shares, StepSums, join_numbers
from .stop_signals import StopSignals
from .validation import HeldOutTexts, measure_acceptance, record_held_out
from .validation_schedule import ValidationSchedule, count_affordable

TRIAL_STEPS = 2  # steps that each number of threads is timed by, twice as many at the start


class TrainingRun(RunProgress):
    """The objects and the progress of one training run. Call `start_training`, then `train_step`
    repeatedly.
    """

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
        super().__init__(trainer, source, parallel, num_steps)
        self.drafter, self.target = drafter, target
        self.monitor = ProcessMonitor(parallel, trainer.patience)
        self.threads = (
            accelerator().make_tuner(parallel.device, TRIAL_STEPS)
            if parallel.num_processes == 1
            else None
        )
        self.writer = CheckpointWriter(in_background=parallel.device.type != "cpu")
        # The step of the checkpoint that is being written, and that of its best validation.
        self.unfinished: tuple[int, int] | None = None
        # The newest step, until its numbers are read.
        self.unread: StepSums | None = None
        self.source_failure: str | None = None  # why the source gives no more batches
        self.trained_ids: set[int] = set()  # parameters of this stage and those before it,
        self.num_trained = 0  # and their numbers
        # The places of validations; None where nothing is validated.
        self.held_out: HeldOutTexts | None = None
        self.recording_seconds = 0.0  # that the target took to answer the held-out prompts
        self.validation_schedule = ValidationSchedule()

    # Beginning

    def start_training(self) -> None:
        """Distribute the drafter over the processes and make the optimizer of the current stage."""
        pack_linears(self.drafter)
        self.parallel.set_drafter(self.drafter, self.target)
        self.enter_stage(self.stage, self.stage_start)

    def restore_or_start(self, run: Path, dataset: Dataset) -> Path | None:
        """Start from the newest checkpoint of a run, if any, open the data, and return that
        checkpoint.
        """
        self.run = run
        checkpoint = latest_checkpoint(run)
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, float] = {}
        if checkpoint is not None:
            weights, tensors, progress = load_checkpoint(checkpoint)
            load_trained_weights(self.drafter, self.target, weights)
            tensors = self.restore_progress(progress, tensors)
            numbers = progress["optimizer"]
        else:
            stream = dataset.stream_batches(
                self.trainer.batch_settings, batches_per_step=self.trainer.accumulate
            )
            self.data_position = fit_initial_weights(self, self.drafter, self.target, stream)
            if self.data_position is not None and self.parallel.is_main:
                save_start(run, self.drafter)
            if self.trainer.lr == "auto":
                self.choose_rates()
        self.start_training()
        self.max_text_length = dataset.max_text_length
        if checkpoint is not None:
            self.parallel.load_optimizer(tensors, numbers)
        shared = self.parallel
        self.stream = dataset.stream_batches(
            self.trainer.batch_settings,
            shared.data_rank,
            shared.num_data_ranks,
            self.data_position,
            self.batches_per_step,
        )
        self.batches = BatchQueue(self.stream, self.source.num_ahead, self.source.request_ahead)
        self.data_position = self.batches.state_dict()
        return checkpoint

    def choose_rates(self) -> None:
        """Choose the learning rate of every parameter that a stage trains, by its size before
        the first step.
        """
        groups = [
            group
            for stage in self.drafter.stages
            for group in select_stage_groups(self.drafter, stage)
        ]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        named = {name: p for name, p in self.named_parameters().items() if id(p) in trained}
        self.rates = choose_rates(named, {name for name in named if self._is_trained_before(name)})
        if self.rates and self.parallel.is_main:
            print_text(describe_rates(self.rates))

    def _is_trained_before(self, name: str) -> bool:
        """Tell whether a parameter had a meaning before this training: the target's, and those
        of a drafter that drafts.
        """
        is_adapter = ".lora_" in name
        return not is_adapter and (name.startswith("target.") or self.drafter.starts_trained)

    @property
    def num_own_batches(self) -> int:
        """The batches of a step that are this process's own. Processes may differ by one; one
        may have none.
        """
        return len(
            range(self.parallel.data_rank, self.batches_per_step, self.parallel.num_data_ranks)
        )

    @property
    def num_batches_run(self) -> int:
        """The batches that every process runs in a step: where parameters are sharded, all run
        equally many forwards.
        """
        return -(-self.batches_per_step // self.parallel.num_data_ranks)

    @property
    def is_save_due(self) -> bool:
        """Whether a checkpoint is due."""
        save_every = self.trainer.save_every
        return save_every is not None and self.step % save_every == 0

    @property
    def is_validation_due(self) -> bool:
        """Whether a validation is due before the end."""
        if self.trainer.eval_every is not None:
            return self.step % self.trainer.eval_every == 0
        return self.is_save_due or self.step >= self.validation_schedule.next_step

    # Steps

    def run_step(self, stop: StopSignals) -> None:
        """Run one step on this process's share of the data. On a stop signal to any process,
        save and exit.
        """
        began = time.perf_counter()
        self.monitor.report_status(self.step, "reading data")
        share = list(islice(self.batches, max(1, self.num_own_batches)))
        if not self.train_step(share, stop.stop_signal, time.perf_counter() - began):
            self.save_and_stop(stop)
        self.data_position = self.batches.state_dict()
        self.tally.seconds += time.perf_counter() - began
        self.budget.record_time(self.parallel)
        if self.skipped_in_a_row >= self.trainer.max_skipped:
            self.abort()

    def train_step(
        self,
        example_batches: list[list[Example]],
        stop_signal: int | None = None,
        data_seconds: float = 0.0,
    ) -> bool:
        """Run an optimiser step over this process's share of batches, which took `data_seconds` to
        read.

        A process with fewer batches than others runs its last one again with a weight of 0. Return
        False, and take no step, where a process was asked to stop.
        """
        example_batches = example_batches + example_batches[-1:] * (
            self.num_batches_run - len(example_batches)
        )
        self._prepare_step()
        if self.threads is not None:
            self.threads.set_threads()
        began = time.perf_counter()
        timer = self.parallel.timer
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
        # gradients are averaged over processes
        scale = self.parallel.num_loss_parts / max(1, supervised)
        self.drafter.train()
        now = StepSums(self.step + 1, Tally(steps=1, supervised=int(supervised)))
        for number, (batch, examples) in enumerate(zip(batches, example_batches), 1):
            is_last = number == len(batches)
            is_own = number <= self.num_own_batches
            shares = Shares(
                scale if is_own else 0.0, self.parallel.num_data_ranks, self.parallel.num_loss_parts
            )
            tokens = sum(len(example.tokens) for example in examples)
            numbers, terms = self._add_gradients(batch, shares, is_last)
            now.batches.append(BatchSums(numbers, terms, shares, tokens, is_own))
        now.start_reading(self.parallel.step())
        timer.end()
        self.take_times(with_newest=False)
        self._record_threads(time.perf_counter() - began, sum(b.tokens for b in now.batches))
        self.settle_step()
        self.step += 1
        self.unread = now
        if not self.reads_late:
            self.settle_step()
        return True

    @property
    def reads_late(self) -> bool:
        """Whether the numbers of a step are read after the next one has started. Averages of the
        weights have to know at once whether a step was left out.
        """
        return self.averages is None and self.parallel.steps_without_host

    def _record_threads(self, seconds: float, tokens: int) -> None:
        """Record the time of a step by its tokens, and print the first choice of a number of
        threads.
        """
        if self.threads is None:
            return
        was_chosen = self.threads.is_chosen
        self.threads.record_step(seconds, max(1, tokens))
        if self.threads.is_chosen and not was_chosen:
            print_text(
                "threads of a training step, by measured times per token: "
                f"{self.threads.describe()}",
            )

    def _stage_number(self, step: int) -> int:
        return stage_at(self.drafter.stages, step, self.num_steps)

    def enter_stage(self, stage: int, first_step: int) -> None:
        """Make an optimizer of the parameters that a stage trains; all others are frozen."""
        self.stage = stage
        self.stage_start = first_step
        groups = select_trained_groups(self.drafter, self.target, stage)
        if self.rates:
            named = self.named_parameters()
            groups = split_by_rate(
                groups, {id(named[name]): rate for name, rate in self.rates.items()}
            )
        # They are there where the stage is resumed.
        for group, lr_scale in zip(groups, self.lr_scales):
            group["lr_scale"] = lr_scale
        self.lr_scales = [group["lr_scale"] for group in groups]
        new = [p for group in groups for p in group["params"] if id(p) not in self.trained_ids]
        self.trained_ids |= {id(parameter) for parameter in new}
        self.num_trained += sum(
            getattr(parameter, "ds_numel", parameter.numel()) for parameter in new
        )
        self.parallel.start_stage(groups, self.trainer.clip, self.trainer.make_optimizer)

    def _prepare_step(self) -> None:
        """Enter the stage of the next step and set its learning rate."""
        stage = self._stage_number(self.step)
        if stage != self.stage:
            self.lr_scales = []
            self.enter_stage(stage, self.step)
        self.lr = self.trainer.lr_at(self.step, self.num_steps, self.stage_start)
        for group in self.parallel.optimizer.param_groups:
            group["lr"] = self.lr * group["lr_scale"]
        if self.rates:
            self.lr *= max(self.lr_scales)

    def _make_batches(self, example_batches: list[list[Example]]) -> list[Batch]:
        """Return the batches of a step; none where the source fails, which stops the training on
        all processes.
        """
        try:
            return [self._make_batch(examples) for examples in example_batches]
        except SourceError as error:
            self.source_failure = str(error)
            return []

    def _make_batch(self, examples: list[Example]) -> Batch:
        layers = self.drafter.stages[self.stage].layers
        request = BatchRequest(
            examples, self.target, layers, self.trainer.packing, self.step, self.drafter
        )
        batch = self.source.make_batch(request)
        num_tokens = self.trainer.loss_tokens
        context = self.parallel.context
        if num_tokens is not None:
            batch = sample_loss_windows(batch, num_tokens, self.trainer.seed, self.step)
        shared_loss = self.drafter.capabilities.context_parallel
        if context is not None and shared_loss is not None:
            batch = batch.split_context(context, shared_loss.label_reach)
        return batch

    def _add_gradients(
        self, batch: Batch, shares: Shares, is_last: bool
    ) -> tuple[Tensor, tuple[str, ...]]:
        """Add a batch to the gradients, as the last of a step or not; return its numbers, on the
        device, and the names of its losses.
        """
        state = TrainingState(
            self.step, self.step / self.num_steps, self.trainer.gradient_checkpointing
        )
        losses = self.parallel.loss(batch, state, is_last)
        total = losses.total * shares.scale
        if is_last:
            self.monitor.report_status(self.step, WAITING)
        self.parallel.backward(total, is_last)
        return join_numbers(losses, total, shares), tuple(losses.terms)

    def settle_step(self) -> None:
        """Count the step whose numbers are not read yet, if there is one, as done, or as skipped
        because its gradient is not finite.
        """
        if self.unread is None:
            return
        unread, self.unread = self.unread, None
        step_tally, is_finite = unread.read_numbers()
        if is_finite:
            self.skipped_in_a_row = 0
            if self.averages is not None:
                self.averages.update_averages(self.named_parameters(), unread.step)
            self.tally.add_tally(step_tally)
            return
        self.skipped = self.skipped + 1
        self.skipped_in_a_row = self.skipped_in_a_row + 1
        if self.parallel.is_main:
            print_warning(f"training: step {unread.step} is left out: its gradient is not finite")

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of drafter and target by their names in a checkpoint."""
        named = {
            f"drafter.{name}": parameter for name, parameter in self.drafter.named_parameters()
        }
        own = {id(parameter) for parameter in named.values()}
        target_parameters = {
            f"target.{name}": p for name, p in self.target.named_parameters() if id(p) not in own
        }
        return named | target_parameters

    def record_held_out(self, dataset: Dataset) -> None:
        """Let the target answer the held-out prompts, before anything has trained it."""
        began = time.perf_counter()
        self.held_out = record_held_out(
            self.target,
            self.drafter.layers,
            dataset.held_out,
            dataset.held_out_sources,
            self.parallel.is_main,
        )
        self.recording_seconds = time.perf_counter() - began
        if self.held_out is not None and self.parallel.is_main:
            print_text(
                f"validation: up to {self.held_out.num_places:,} drafts after "
                f"{self.held_out.num_roots:,} tokens of {len(self.held_out.sources)} held-out "
                f"answers, which the target wrote in {self.recording_seconds:.1f} s",
            )

    def plan_validations(self) -> None:
        """Plan the next validation by the times measured so far. Every process must call this."""
        history = self.validation_history
        total = self.budget.total_seconds(self.step)
        affordable = 0
        if total is not None:
            affordable = count_affordable(
                total, self.recording_seconds + history.seconds, history.newest_seconds
            )
        affordable = self.parallel.all_gather(affordable)[0]
        self.validation_schedule.update(
            history.newest_step, self.num_steps, history.count, affordable
        )

    def validate(self) -> dict[str, Any]:
        """Validate the drafter, with averaged weights where there are any, on held-out data;
        return the measures.
        """
        assert self.held_out is not None
        self.monitor.report_status(self.step, "drafting for what was held out")
        parameters = self.named_parameters()
        with nullcontext() if self.averages is None else self.averages.swap_weights(parameters):
            began = time.perf_counter()
            measured = self.parallel.all_gather(
                measure_acceptance(self.drafter, self.target, self.held_out)
            )[0]
            forecast = measured.metrics["forecast"]
            self.finish_checkpoint()
            is_best = self.validation_history.add_forecast(forecast, self.step, measured)
            seconds = self.parallel.all_gather(time.perf_counter() - began)[0]
            self.validation_history.add_seconds(seconds)
            # It never falls, so that a training that has ended stays so.
            self.budget.reserved = max(self.budget.reserved, seconds)
            # Until the next one is planned.
            self.validation_schedule = ValidationSchedule()
            if is_best and self.trainer.keep_best is not False:
                weights = self.parallel.gather_trained_weights(self.drafter, self.target)
                if self.parallel.is_main:
                    save_best(self.run, self.step, weights)
                    delete_best_except(self.run, {self.step, self.saved_best_step})
        return measured.metrics

    # Ending

    def save(self) -> None:
        """Save a checkpoint of the run from the main process, on a GPU beside the next steps. Every
        process must call this.
        """
        shared = self.parallel
        self.settle_step()
        self.finish_checkpoint()
        self.source.flush()
        weights = shared.gather_trained_weights(self.drafter, self.target)
        tensors, numbers = shared.gather_optimizer_state()
        self.take_times(with_newest=True)
        tallies = shared.all_gather(asdict(self.tally))
        drawn = shared.all_gather(get_random_state())
        position = self.gather_progress(self.tally)[0]
        if shared.is_main:
            for rank, own in enumerate(drawn):
                tensors |= {f"rng.{name}.{rank}": tensor for name, tensor in own.items()}
            if self.averages is not None:
                tensors |= {
                    f"ema.{name}": tensor.cpu() for name, tensor in self.averages.averages.items()
                }
            if self.writer.in_background and shared.device.type == "cpu":
                # Those on a GPU have been copied.
                weights, tensors = (
                    {name: tensor.clone() for name, tensor in part.items()}
                    for part in (weights, tensors)
                )
            progress = self.state_dict(position, tallies, numbers)
            progress |= describe_files(self.run, self.validation_history.best_step)
            path = checkpoint_path(self.run, self.step)
            self.monitor.report_status(self.step, "saving a checkpoint")
            keep = self.trainer.keep_checkpoints
            self.writer.start_write(
                partial(save_checkpoint, path, weights, tensors, progress, keep)
            )
        self.unfinished = (self.step, self.validation_history.best_step)
        if not self.writer.in_background:
            self.finish_checkpoint()
        self.monitor.report_status(self.step, WAITING)
        shared.wait_for_all()

    def finish_checkpoint(self) -> None:
        """Wait until the newest checkpoint is written, and delete the best weights that it
        surpasses; until then those of the checkpoint before it are kept.
        """
        if self.unfinished is None:
            return
        if self.parallel.is_main:
            self.writer.wait_for_write()
            delete_best_except(self.run, {self.unfinished[1]})
        self.saved_step, self.saved_best_step = self.unfinished
        self.unfinished = None

    def save_and_stop(self, stop: StopSignals) -> NoReturn:
        """Save and raise RunInterrupted, after a stop signal to this process or another, or
        RunError if a source failed.

        Where the signal did not arrive the exit status is 1, so that a launcher neither takes the
        run for finished nor waits for launchers that the signal has ended: torchrun waits for them
        after a status of 0, for five minutes.
        """
        self.finish_checkpoint()
        if self.step > self.saved_step:
            self.save()
            self.finish_checkpoint()
        failures = [
            failure
            for failure in self.parallel.all_gather(self.source_failure)
            if failure is not None
        ]
        if failures:
            where = f"step {self.step} is saved" if self.step else "no step was finished"
            raise RunError(
                f"{failures[0]}; {where}; go on with the same command, trainer.resume=auto "
                f"run={self.run}"
            )
        signals = self.parallel.all_gather((stop.stop_signal, socket.gethostname()))
        rank, number, host = next(
            (rank, number, host)
            for rank, (number, host) in enumerate(signals)
            if number is not None
        )
        name = signal.Signals(number).name + (
            f" to rank {rank} ({host})" if len(signals) > 1 else ""
        )
        after = f"after step {self.step}, which is saved" if self.step else "in the first step"
        how = (
            f"stopped by {name} {after}; go on with the same command, trainer.resume=auto "
            f"run={self.run}"
        )
        raise RunInterrupted(
            how if self.parallel.is_main else "",
            0 if stop.stop_signal == signal.SIGTERM else SIGNAL_STATUS + signal.SIGINT,
        )

    def abort(self) -> NoReturn:
        """Raise a RunError after too many skipped steps in a row."""
        self.finish_checkpoint()
        checkpoint = latest_checkpoint(self.run)
        where = (
            f"the last good checkpoint is {checkpoint}"
            if checkpoint is not None
            else "no checkpoint was saved yet"
        )
        raise RunError(
            f"training: the gradient was not finite in {self.skipped_in_a_row} steps in a row, up "
            f"to step {self.step}; {where}; lower trainer.lr or trainer.clip"
        )

    def require_changes(self) -> None:
        """Raise a RunError if every step was left out, or every step of a resumed training of
        two steps or more.
        """
        self.settle_step()
        num_steps = self.step - self.first_step
        if self.skipped_in_a_row == num_steps > 0 and (num_steps > 1 or self.first_step == 0):
            rest = f" after step {self.first_step}" if self.first_step else ""
            raise RunError(
                f"training: none of {num_steps} steps{rest} had a finite gradient, so nothing was "
                "learned and no drafter is saved; lower trainer.lr or trainer.clip, or check "
                "data and target"
            )

    def finish(self) -> TrainingResult:
        """Restore the full drafter on the main process and the target as an ordinary model;
        return the result.
        """
        self.finish_checkpoint()
        parameters = self.named_parameters()
        if self.averages is not None:
            self.averages.copy_to(parameters)
        self.parallel.restore_tensors()
        history = self.validation_history
        takes_best = history.takes_best(self.trainer.keep_best)
        if takes_best and (self.parallel.is_reusable or self.parallel.is_main):
            load_trained_weights(self.drafter, self.target, load_best(self.run, history.best_step))
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
            history.best_step if takes_best else self.step,
            self.max_text_length,
            history.measure_gain(takes_best, self.step),
        )
