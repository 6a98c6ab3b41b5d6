"""The progress of a training run: its steps, its budget, its position in the data, and its
metrics since the last line.
"""

import socket
from abc import ABC, abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.data.dataset import BatchStream
from spectrain.features.base import Source
from spectrain.output.streams import print_warning

from .budget import Budget, TimeSpent
from .checkpoints import (
    Tally,
    WeightAverages,
    best_weights_path,
    delete_best_except,
    set_random_state,
)
from .parallel.base import ParallelStrategy
from .parallel.step_timer import summarize_processes
from .settings import TrainerSettings
from .validation_history import ValidationHistory


class RunProgress(ABC):
    """What a run has done so far, which a checkpoint keeps."""

    run: Path
    stream: BatchStream  # of the data, on this process

    def __init__(
        self,
        trainer: TrainerSettings,
        source: Source,
        parallel: ParallelStrategy,
        num_steps: int | None,
    ) -> None:
        self.trainer, self.source, self.parallel = trainer, source, parallel
        self.budget = Budget(num_steps, trainer.max_minutes)
        self.batches_per_step = trainer.accumulate * parallel.num_data_ranks
        self.step = 0  # steps done
        self.first_step = 0  # of this launch
        self.stage = self.stage_start = 0  # the stage of the optimiser, and its first step
        self.lr = 0.0  # of the newest step
        # Factors of the learning rates of the stage's parameter groups, as they were when it began.
        self.lr_scales: list[float] = []
        # Peak learning rates of the parameters by name, as their sizes were before the first step;
        # empty with a fixed rate.
        self.rates: dict[str, float] = {}
        self.averages = None if trainer.ema is None else WeightAverages(trainer.ema)
        self.validation_history = ValidationHistory()  # at held-out data
        # step of the newest checkpoint, step of the best validation saved with it
        self.saved_step = self.saved_best_step = 0
        # steps that changed nothing, because something was not finite
        self.skipped = self.skipped_in_a_row = 0
        self.tally = Tally()  # since the last line of metrics
        # up to there, on all processes
        self.tokens = 0
        self.seconds = 0.0
        self.max_text_length = 0  # of the data, in tokens
        self.data_position: dict[str, Any] | None = None  # where this process stands in the data

    @property
    def num_steps(self) -> float:
        """Return the steps of the run; with a time limit, an estimate."""
        return self.budget.num_steps(self.step)

    @property
    def is_done(self) -> bool:
        """Tell whether the budget is used up or validation has stopped improving."""
        stop_after = self.trainer.stop_after
        return self.budget.is_done(self.step) or (
            stop_after is not None and self.validation_history.without_gain >= stop_after
        )

    # Checkpoints

    def state_dict(
        self, position: dict[str, Any], tallies: list[dict[str, Any]], numbers: dict[str, float]
    ) -> dict[str, Any]:
        """Return the progress of all processes with their merged position in the data and the
        optimizer's numbers.
        """
        return {
            "step": self.step,
            "stream": position,
            "skipped": self.skipped,
            "tallies": tallies,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "optimizer": numbers,
            "num_steps": self.num_steps,
            "stage": self.stage,
            "stage_began": self.stage_start,
            "lr_scales": self.lr_scales,
            "rates": self.rates,
            "spent": asdict(self.budget.time_spent),
            "looks": asdict(self.validation_history),
            "batches_a_step": self.batches_per_step,
            "copies": self.parallel.num_copies,
        }

    def restore_progress(
        self, progress: dict[str, Any], tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Restore the progress of a checkpoint; return the tensors of the optimizer."""
        shared = self.parallel
        self.stage = progress["stage"]
        self.stage_start = progress["stage_began"]
        self.lr_scales = progress.get("lr_scales", [])
        self.rates = progress.get("rates", {})
        self.budget.resume_from(TimeSpent(**progress["spent"]))
        self.validation_history = ValidationHistory(**progress["looks"])
        self.budget.reserved = self.validation_history.newest_seconds
        best = best_weights_path(self.run, self.validation_history.best_step)
        if self.trainer.keep_best is not False and not best.exists():
            if self.validation_history.best and shared.is_main:
                print_warning(f"{best}: it is missing, so the best validation is looked for anew")
            self.validation_history = replace(
                self.validation_history, best=0.0, best_step=0, without_gain=0
            )
        self.saved_best_step = self.validation_history.best_step
        if shared.is_main:
            delete_best_except(self.run, {self.saved_best_step})
        self.step = progress["step"]
        self.data_position = progress["stream"]
        self.skipped = progress["skipped"]
        if self.trainer.max_steps is None and self.trainer.max_minutes is None:
            self.budget.max_steps = progress["num_steps"]
        self._share_batches(progress["batches_a_step"])
        copies = shared.num_copies / progress.get("copies", 1)
        self.tally = Tally.from_saved(
            progress["tallies"], shared.rank, shared.num_processes
        ).scale_sums(copies)
        self.saved_step = self.step
        self.tokens = progress["tokens"]
        self.seconds = progress["seconds"]
        self.first_step = self.step
        drawn = {name for name in tensors if name.startswith("rng.")}
        set_random_state({name: tensors[name] for name in drawn}, shared.rank)
        averaged = {name for name in tensors if name.startswith("ema.")}
        if self.averages is not None:
            self.averages.load(
                {name.removeprefix("ema."): tensors[name] for name in averaged}, shared.device
            )
        return {name: tensor for name, tensor in tensors.items() if name not in drawn | averaged}

    def _share_batches(self, batches: int) -> None:
        """Let a step take as many batches as before, by however many processes."""
        count = self.parallel.num_data_ranks
        if batches != self.batches_per_step and self.parallel.is_main:
            equally = (
                f"{batches // count} each"
                if batches % count == 0
                else f"up to {-(-batches // count)} each"
            )
            print(
                f"{count} processes share the {batches} batches that a step takes as before, "
                f"{equally}"
            )
        self.batches_per_step = batches

    # Metrics

    @abstractmethod
    def settle_step(self) -> None:
        """Add the newest step to the tally, if its numbers are not read yet."""

    def collect_metrics(self) -> dict[str, Any]:
        """Return the means over all processes since the last call, and the data position. Every
        process must call this.
        """
        self.settle_step()
        shared = self.parallel
        tally = self.tally
        self.take_times(with_newest=True)
        self.tally = Tally()
        names = sorted(tally.terms)
        depths = len(tally.hits)
        values = [tally.loss, tally.tokens, self.source.take_waited_seconds()]
        values += [*(tally.terms[name] for name in names), *tally.hits]
        loss, tokens, waited, *rest = shared.all_reduce(*values, *tally.counts)
        hits = rest[len(names) : len(names) + depths]
        counts = rest[len(names) + depths :]
        if tally.steps and counts and not any(counts) and shared.is_main:
            print_warning(
                f"training: no supervised draft position up to step {self.step}; "
                "use longer answers or fewer draft steps"
            )
        steps = max(1, tally.steps)
        seconds = max(tally.seconds, 1e-9)
        terms = {name: value / steps for name, value in zip(names, rest)}
        self.tokens += int(tokens)
        self.seconds += tally.seconds
        position, processes = self.gather_progress(tally)
        shares = {
            part: processes["step_seconds"].get(part, 0.0) * steps / seconds
            for part in ("data", "target", "drafter", "others")
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
                **(
                    {"server": round(waited / shared.num_data_ranks / seconds, 3)}
                    if self.source.needs_server
                    else {}
                ),
            },
            **processes,
            **self.stream.data_metrics(position),
        }

    def gather_progress(self, tally: Tally) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the merged data position and what the time of the processes went to. Every
        process must call this.
        """
        gathered = self.parallel.all_gather((self.data_position, tally.times, socket.gethostname()))
        positions, times, hosts = zip(*gathered)
        merged = self.stream.merge_states(list(positions[:: self.parallel.num_copies]))
        return merged, summarize_processes(list(times), list(hosts), tally.steps)

    def take_times(self, with_newest: bool) -> None:
        """Add the times of steps that have ended to the tally."""
        self.tally.add_tally(Tally(times=self.parallel.timer.take_times(with_newest)))
