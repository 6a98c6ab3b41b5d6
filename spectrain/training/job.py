"""A training under way: where it stands, its steps, and what is saved of it."""

import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from spectrain.data.chat import Example
from spectrain.data.dataset import Batches, Dataset
from spectrain.drafters.base import Drafter, TrainingState, stage_at
from spectrain.errors import RunError, Stopped, UserError
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch
from spectrain.models.prepacked import pack_linears
from spectrain.models.target import Target

from .averages import Averages
from .best import Looks, best_path, drop_all_but, load_best, save_best
from .budget import Budget, Spent
from .checkpoints import checkpoint_path, latest_checkpoint, load_checkpoint, save_checkpoint
from .held_out import held_out_acceptance
from .parallel import Parallel
from .state import Tally, load_trained_weights, random_state, set_random_state, trained_groups, trained_weights
from .watch import WAITING, Watch

if TYPE_CHECKING:
    from .trainer import Trainer


class Job:
    """What one training works on, and how far it is. `begin` shares the drafter; then one `train_step` follows another."""

    run: Path
    stream: Batches  # of the data, on this process

    def __init__(
        self, trainer: "Trainer", drafter: Drafter, target: Target, source: Source, shared: Parallel, num_steps: int | None
    ) -> None:
        self.trainer, self.drafter, self.target = trainer, drafter, target
        self.source, self.shared, self.watch = source, shared, Watch(shared, trainer.patience)
        self.budget = Budget(num_steps, trainer.max_minutes)
        self.accumulate = trainer.accumulate  # batches of a step, on this process
        self.step = 0  # steps done
        self.stage = self.stage_began = 0  # the stage of the optimiser, and its first step
        self.averages = None if trainer.ema is None else Averages(trainer.ema)
        self.looks = Looks()  # at held-out data
        self.saved = self.saved_best = 0  # the step of the newest checkpoint, and of the best look up to there
        self.skipped = self.skipped_in_a_row = 0  # steps that changed nothing, because something was not finite
        self.tally = Tally()  # since the last line of metrics
        self.tokens, self.seconds = 0, 0.0  # up to there, on all processes
        self.position: dict[str, Any] | None = None  # where this process stands in the data
        self.learning: set[int] = set()  # parameters of this stage and those before it,
        self.num_learning = 0  # and their numbers

    @property
    def num_steps(self) -> float:
        """Steps of the whole run; by the clock, as many as the time will do for."""
        return self.budget.num_steps(self.step)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do, or nothing is gained any more."""
        stop_after = self.trainer.stop_after
        return self.budget.is_done(self.step) or (stop_after is not None and self.looks.without_gain >= stop_after)

    # Beginning

    def begin(self) -> None:
        """Share the drafter between the processes, with the optimiser of the stage of the last step."""
        pack_linears(self.drafter)
        self.shared.share(self.drafter, self.target)
        self.enter_stage(self.stage, self.stage_began)

    def restore(self, run: Path, dataset: Dataset) -> Path | None:
        """Begin, with the newest checkpoint of a run where there is one, and open the data; that checkpoint."""
        self.run, checkpoint = run, latest_checkpoint(run)
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, float] = {}
        if checkpoint is not None:
            weights, tensors, progress = load_checkpoint(checkpoint)
            load_trained_weights(self.drafter, self.target, weights)
            tensors, numbers = self._restore_progress(progress, tensors), progress["optimizer"]
        self.begin()
        if checkpoint is not None:
            self.shared.load_optimizer(tensors, numbers)
        self.stream = dataset.stream(self.trainer.batching, self.shared.data_rank, self.shared.data_count, self.position)
        self.position = self.stream.state()
        return checkpoint

    def _restore_progress(self, progress: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Where a checkpoint stood; of its tensors those of the optimiser."""
        shared = self.shared
        self.stage, self.stage_began = progress["stage"], progress["stage_began"]
        self.budget.start(Spent(**progress["spent"]))
        self.looks = Looks(**progress["looks"])
        if self.trainer.keep_best and not best_path(self.run, self.looks.best_step).exists():
            self.looks = Looks()  # its weights are gone
        self.saved_best = self.looks.best_step
        if shared.is_main:
            drop_all_but(self.run, {self.saved_best})
        self.step, self.position, self.skipped = progress["step"], progress["stream"], progress["skipped"]
        if self.trainer.max_steps is None and self.trainer.max_minutes is None:
            self.budget.steps = progress["num_steps"]
        self.accumulate = self._as_before(progress["batches_a_step"])
        self.tally = Tally.restored(progress["tallies"], shared.rank, shared.count)
        self.saved, self.tokens, self.seconds = self.step, progress["tokens"], progress["seconds"]
        drawn = {name for name in tensors if name.startswith("rng.")}
        set_random_state({name: tensors[name] for name in drawn}, shared.rank)
        averaged = {name for name in tensors if name.startswith("ema.")}
        if self.averages is not None:
            self.averages.load({name.removeprefix("ema."): tensors[name] for name in averaged}, shared.device)
        return {name: tensor for name, tensor in tensors.items() if name not in drawn | averaged}

    def _as_before(self, batches: int) -> int:
        """How many batches each process accumulates, so that a step goes on taking so many in all."""
        count = self.shared.data_count
        if batches % count:
            raise UserError(
                f"trainer.resume=auto: a step of this run takes {batches} batches, which {count} processes cannot share "
                "equally; start a number of processes that divides it"
            )
        if batches // count != self.accumulate and self.shared.is_main:
            print(f"{count} processes accumulate {batches // count} batches each, so that a step takes {batches} as before")
        return batches // count

    # Steps

    def train_step(self, share: list[list[Example]], asked: int | None = None) -> bool:
        """One optimiser step over this process's share of batches; False, and no step, where a process was `asked` to stop."""
        self._enter_stage_of_step()
        now, began = Tally(steps=1), time.perf_counter()
        batches = [self._batch(examples) for examples in share]
        now.target_seconds = time.perf_counter() - began
        self.watch.at(self.step, WAITING)
        supervised, stops = self.shared.sums(sum(batch.num_supervised for batch in batches), float(asked is not None))
        if stops:
            return False
        self.watch.at(self.step, "computing")
        began = time.perf_counter()
        scale = self.shared.data_count / max(1, supervised)  # gradients are averaged over processes
        self.drafter.train()
        for number, (batch, examples) in enumerate(zip(batches, share), 1):
            now.add(self._learn(batch, examples, scale, last=number == len(batches)))
        finite = self.shared.step()
        now.drafter_seconds = time.perf_counter() - began
        now.supervised = int(supervised)
        self._count(now, finite)
        return True

    def _stage_of(self, step: int) -> int:
        return stage_at(self.drafter.stages, step, self.num_steps)

    def enter_stage(self, stage: int, began: int) -> None:
        """An optimiser of what a stage trains; every other parameter is frozen."""
        self.stage, self.stage_began = stage, began
        groups = trained_groups(self.drafter, self.target, stage)
        new = [p for group in groups for p in group["params"] if id(p) not in self.learning]
        self.learning |= {id(parameter) for parameter in new}
        self.num_learning += sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in new)
        self.shared.optimise(groups, self.trainer.clip, self.trainer.made)

    def _enter_stage_of_step(self) -> None:
        """The stage, learning rate and state of the step to come."""
        stage = self._stage_of(self.step)
        if stage != self.stage:
            self.enter_stage(stage, self.step)
        self.lr = self.trainer.lr_at(self.step, self.num_steps, self.stage_began)
        for group in self.shared.optimizer.param_groups:
            group["lr"] = self.lr * group["lr_scale"]

    def _batch(self, examples: list[Example]) -> Batch:
        layers = self.drafter.stages[self.stage].layers
        return self.source.batch(BatchRequest(examples, self.target, layers, self.trainer.packing, self.step, self.drafter))

    def _learn(self, batch: Batch, examples: list[Example], scale: float, last: bool) -> Tally:
        """Add a batch to the gradients, as the `last` of a step or not; what it adds to the tally."""
        state = TrainingState(self.step, self.step / self.num_steps, self.trainer.gradient_checkpointing)
        losses = self.shared.loss(batch, state, last)
        total = losses.total * scale
        if last:
            self.watch.at(self.step, WAITING)
        self.shared.backward(total, last)
        share = self.shared.data_count
        terms = {name: float(term.detach()) * scale / share for name, term in losses.terms.items()}
        tokens = sum(len(example.tokens) for example in examples)
        hits, counts = losses.hits.detach().float().tolist(), losses.counts.detach().float().tolist()
        return Tally(float(total.detach()) / share, tokens=tokens, terms=terms, hits=hits, counts=counts)

    def _count(self, now: Tally, finite: bool) -> None:
        """A step is done, or left out because its gradient is not finite."""
        self.step += 1
        if finite:
            self.skipped_in_a_row = 0
            if self.averages is not None:
                self.averages.add(self.parameters(), self.step)
            self.tally.add(now)
            return
        self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
        if self.shared.is_main:
            print(f"spectrain: training: step {self.step} is left out: its gradient is not finite", file=sys.stderr)

    def parameters(self) -> dict[str, nn.Parameter]:
        """All of drafter and target, by the names that a checkpoint gives them."""
        named = {f"drafter.{name}": parameter for name, parameter in self.drafter.named_parameters()}
        own = {id(parameter) for parameter in named.values()}
        theirs = {f"target.{name}": p for name, p in self.target.named_parameters() if id(p) not in own}
        return named | theirs

    def look(self, held_out: list[Example]) -> dict[str, Any]:
        """What the drafter, of averaged weights where there are any, promises and does on held-out data."""
        self.watch.at(self.step, "drafting for what was held out")
        with nullcontext() if self.averages is None else self.averages.in_place(self.parameters()):
            seen = held_out_acceptance(self.drafter, self.target, held_out)
            is_best = self.looks.add(self.shared.gathered(seen["forecast"])[0], self.step)
            if is_best and self.trainer.keep_best:
                weights = trained_weights(self.drafter, self.target, self.shared)
                if self.shared.is_main:
                    save_best(self.run, self.step, weights)
                    drop_all_but(self.run, {self.step, self.saved_best})
        return seen

    def metrics(self) -> dict[str, Any]:
        """The means since the last time over all processes, and where the run is in the data; every process must call this."""
        shared, tally = self.shared, self.tally
        self.tally = Tally()
        names, depths = sorted(tally.terms), len(tally.hits)
        own = tally.target_seconds + tally.drafter_seconds
        values = [tally.loss, tally.tokens, own, tally.target_seconds, *(tally.terms[name] for name in names), *tally.hits]
        loss, tokens, busy, target_busy, *rest = shared.sums(*values, *tally.counts)
        hits, counts = rest[len(names) : len(names) + depths], rest[len(names) + depths :]
        if tally.steps and counts and not any(counts) and shared.is_main:
            print(f"spectrain: training: nothing was judged up to step {self.step}: the answers are shorter than what the "
                  "drafter is trained on; use longer ones, or let it look less far ahead", file=sys.stderr)  # fmt: skip
        steps, seconds = max(1, tally.steps), max(tally.seconds, 1e-9)
        terms = {name: value / steps for name, value in zip(names, rest)}
        self.tokens += int(tokens)
        self.seconds += tally.seconds
        target, drafter = target_busy / shared.data_count / seconds, (busy - target_busy) / shared.data_count / seconds
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
                "target": round(target, 3), "drafter": round(drafter, 3), "rest": round(max(0.0, 1 - target - drafter), 3),
            },
            **self.stream.counts(self._position()),
        }  # fmt: skip

    def _position(self) -> dict[str, Any]:
        """Where the run stands in the data, from what all processes say; every process must call this."""
        return self.stream.merged(self.shared.gathered(self.position)[:: self.shared.copies])

    # Ending

    def save(self) -> None:
        """A checkpoint of the whole run, written by the main process; every process must call this."""
        shared = self.shared
        self.source.flush()
        weights = trained_weights(self.drafter, self.target, shared)
        tensors, numbers = shared.optimizer_state()
        tallies, drawn = shared.gathered(asdict(self.tally)), shared.gathered(random_state())
        position = self._position()
        if shared.is_main:
            for rank, own in enumerate(drawn):
                tensors |= {f"rng.{name}.{rank}": tensor for name, tensor in own.items()}
            if self.averages is not None:
                tensors |= {f"ema.{name}": tensor.cpu() for name, tensor in self.averages.kept.items()}
            progress = {
                "step": self.step, "stream": position, "skipped": self.skipped, "tallies": tallies, "tokens": self.tokens,
                "seconds": self.seconds, "optimizer": numbers, "num_steps": self.num_steps,
                "stage": self.stage, "stage_began": self.stage_began, "spent": asdict(self.budget.spent),
                "looks": asdict(self.looks),
                "batches_a_step": self.accumulate * shared.data_count,
            }  # fmt: skip
            place = checkpoint_path(self.run, self.step)
            save_checkpoint(place, weights, tensors, progress, self.trainer.keep_checkpoints)
            drop_all_but(self.run, {self.looks.best_step})
        self.saved, self.saved_best = self.step, self.looks.best_step
        shared.wait()

    def stop(self, asked: int | None) -> NoReturn:
        """Save and leave, because a signal asked for it, on this process or another."""
        if self.step > self.saved:
            self.save()
        signals = [number for number in self.shared.gathered(asked) if number is not None]
        name = signal.Signals(signals[0]).name
        after = f"after step {self.step}, which is saved" if self.step else "in the first step"
        how = f"stopped by {name} {after}; go on with the same command, trainer.resume=auto run={self.run}"
        raise Stopped(how if self.shared.is_main else "", 0 if signals[0] == signal.SIGTERM else 1)

    def give_up(self) -> NoReturn:
        """Leave, because too many steps in a row changed nothing."""
        kept = latest_checkpoint(self.run)
        where = f"the last good checkpoint is {kept}" if kept is not None else "no checkpoint was saved yet"
        raise RunError(
            f"training: the gradient was not finite in {self.skipped_in_a_row} steps in a row, up to step {self.step}; {where}"
            "; lower trainer.lr or trainer.clip"
        )

    def finish(self) -> "Trained":
        """The drafter whole on the main process, and the target an ordinary model again."""
        if self.averages is not None:
            self.averages.put(self.parameters())
        self.shared.release()
        best = self.looks.best_step if self.trainer.keep_best else 0
        if best and (self.shared.in_place or self.shared.is_main):
            load_trained_weights(self.drafter, self.target, load_best(self.run, best))
        changes = self.drafter.abilities.target_training
        if changes is not None and (self.shared.in_place or self.shared.is_main):
            changes.finish(self.target)
        return Trained(self.step, self.tokens, self.seconds, self.num_learning, self.shared.in_place, best or self.step)

    def explained(self, error: RuntimeError) -> Exception:
        """The error, or where another process is what failed, one that says which."""
        text = str(error)
        if isinstance(error, (UserError, RunError)) or self.shared.count == 1:
            return error
        if not any(sign in text for sign in ("onnection", "peer", "NCCL", "gloo", "Gloo", "imed out", "imeout", "ocket")):
            return error
        gone = self.watch.lost()
        return error if gone is None else RunError(f"training: {gone}; go on with trainer.resume=auto run={self.run}")


@dataclass(frozen=True)
class Trained:
    """What a training took, of all its parts where it was resumed, and where the drafter is now."""

    steps: int
    tokens: int  # seen, on all processes, padding left out
    seconds: float  # of steps, until the end of the last
    parameters: int  # that learnt, in any stage
    in_place: bool  # the main process holds the drafter whole in its place
    taken: int  # the step whose weights are the result
