"""Learning while decoding (online speculative decoding, Liu et al., 2024): the target's
corrections train the drafter.
"""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch

from spectrain.data.chat import Example
from spectrain.data.image_processor import refuse_images
from spectrain.decoding.generation import Generation
from spectrain.drafters.base import Drafter, TrainingState, has_weights
from spectrain.errors import RunError, UserError
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.metrics import Turn
from spectrain.eval.notes import EXTENSION_NOTES
from spectrain.eval.systems import System
from spectrain.features.batch import Batch, collate
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain_research.shared.draft_replay import (
    DraftRecorder,
    DraftWindow,
    Replay,
    collate_replays,
    select_replays,
)
from spectrain_research.shared.on_policy import find_on_policy

from .signals import DviSignals

LearnFrom = Literal["corrections", "answers", "split", "dvi"]


class Learner:
    """Updates a drafter after every `every` answers, from what was decoded since.

    learn: corrections, the tokens by which the target replaced a wrong draft; answers, every token
    of the answers; split, replayed drafts with Draft-OPD's loss; or dvi, drafts up to their first
    rejected token with DVI's loss. The time of the updates is measured apart and is no part of a
    speedup. Construct it before the drafter is rounded to the target's dtype, so that it starts
    from the saved weights.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        lr: float,
        every: int,
        learn: LearnFrom,
        save: Callable[[Drafter], None],
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.every = every
        self.learn = learn
        self.save = save
        self.parameters = [
            parameter for group in drafter.stages[0].groups for parameter in group["params"]
        ]
        # Steps are taken in float32: rounding to bfloat16 would lose a small one.
        self.masters = [
            parameter.detach().to(target.device, torch.float32, copy=True)
            for parameter in self.parameters
        ]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.random = Random(0)
        self.examples: list[Example] = []
        self.replays: list[Replay] = []
        self.windows: list[DraftWindow] = []
        self.signals = DviSignals()
        # Answers since the last update, and updates.
        self.num_answers = self.updates = 0
        self.seconds = 0.0

    def read_answers(self, generations: list[Generation], recorder: DraftRecorder) -> None:
        """Read answers; after every `every` of them, learn from those since the last update."""
        refuse_images([generation.prompt for generation in generations], "eval.online")
        for generation, rounds in zip(generations, recorder.rounds):
            if self.learn == "split":
                self.replays += select_replays(
                    generation, rounds, 4, self.random, drafts_from_root(self.drafter)
                )
            elif self.learn == "dvi":
                self.windows += self.signals.select_windows(generation, rounds, 4, self.random)
            else:
                self.examples.append(make_example(generation, self.learn == "corrections"))
        recorder.rounds = []
        self.num_answers += len(generations)
        if self.num_answers >= self.every:
            self.num_answers = 0
            start = time.perf_counter()
            self._update_drafter()
            self.seconds += time.perf_counter() - start

    def _update_drafter(self) -> None:
        """Take one optimizer step on all collected rows."""
        self.updates += 1
        examples = [row for row in self.examples if any(row.mask)]
        rows: list[Any] = [*self.replays, *self.windows, *examples]
        self.examples = []
        self.replays = []
        self.windows = []
        self.signals.num_updates = self.updates - 1
        count = 0
        self.drafter.train()
        for start in range(0, len(rows), 4):
            part = rows[start : start + 4]
            collates: dict[str, Callable[[list[Any]], Batch]] = {
                "split": collate_replays,
                "dvi": self.signals.collate,
            }
            batch = collates.get(self.learn, collate)(part).to(self.target.device)
            if layers := self.drafter.stages[0].layers:
                batch = replace(batch, features=self.target.features(batch.tokens, layers))
            losses = self.drafter.loss(batch, self.target, TrainingState())
            if not torch.isfinite(losses.total):
                raise RunError(
                    f"eval.online: the loss is not finite at update {self.updates}; lower "
                    "eval.online_lr"
                )
            count += batch.num_supervised
            losses.total.backward()
        self.drafter.eval()
        if count:
            for parameter, master in zip(self.parameters, self.masters):
                master.grad = None if parameter.grad is None else parameter.grad.float() / count
            torch.nn.utils.clip_grad_norm_(self.masters, 0.5)
            self.optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(self.parameters, self.masters):
                    parameter.copy_(master)
        for parameter in self.parameters:
            parameter.grad = None
        self._save_drafter()

    def _save_drafter(self) -> None:
        """Save the drafter with its weights before rounding, so that learning can continue from
        them later.
        """
        rounded = [parameter.data for parameter in self.parameters]
        for parameter, master in zip(self.parameters, self.masters):
            parameter.data = master
        self.save(self.drafter)
        for parameter, data in zip(self.parameters, rounded):
            parameter.data = data

    def summary(self) -> dict[str, Any]:
        """Return what the updates took, for the entry `online` of summary.json."""
        return {
            "updates": self.updates,
            "every": self.every,
            "learn": self.learn,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class Online(EvalExtension):
    """Lets the drafter learn while it is scored, next to a copy that does not learn."""

    lr: float
    every: int
    learn: LearnFrom

    changes_drafter = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"eval.online_every={self.every}: use 1 or more")
        if not self.lr > 0:
            raise UserError(f"eval.online_lr={self.lr}: use more than 0")

    def check(self, candidate: Candidate) -> None:
        drafter = candidate.drafter
        if self.learn in ("split", "dvi") and not candidate.builder.traits.is_chain:
            raise UserError(
                f"eval.online_learn={self.learn}: it replays chains, and this tree branches; use "
                "tree=chain"
            )
        if not has_weights(drafter) or drafter.capabilities.target_training:
            raise UserError(
                "eval.online: this drafter has no weights of its own to learn with; use one that "
                "was trained"
            )
        if self.learn == "split" and find_on_policy(drafter) is None:
            raise UserError(
                "eval.online_learn=split: this family does not learn from replayed drafts; use "
                "corrections or answers"
            )
        if self.learn == "dvi" and not weighs_drafts(drafter):
            raise UserError(
                "eval.online_learn=dvi: this family does not weigh the tokens that it drafts; use "
                "corrections or answers, or a drafter of recipe=gkd, eagle3 or hydra"
            )

    def snapshot(self, candidate: Candidate) -> None:
        save = candidate.save_learned or (lambda learnt: None)
        self.learner = Learner(
            candidate.drafter, candidate.target, self.lr, self.every, self.learn, save
        )

    def adapt_system(self, candidate: Candidate, first: System) -> System:
        self.recorder = DraftRecorder(first.builder)
        return replace(first, builder=self.recorder)

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        still = copy.deepcopy(candidate.drafter)
        builder = copy.deepcopy(candidate.builder)
        return [System("static_drafter", "the same, not learning", still, builder, candidate.rule)]

    def begin(self) -> None:
        self.recorder.rounds = []

    def on_answers(self, answers: list[Generation]) -> None:
        self.learner.read_answers(answers, self.recorder)

    def report(self, results: Results) -> dict[str, Any]:
        curves = {
            name: acceptance_curve(results.turns[name], self.every)
            for name in ("drafter", "static_drafter")
        }
        plot_curves(results.folder / "online.svg", curves, self.every)
        return {"online": {**self.learner.summary(), "curves": curves}}


def drafts_from_root(drafter: Drafter) -> bool:
    """Tell whether replayed drafts are judged after their roots only."""
    on_policy = find_on_policy(drafter)
    return on_policy is not None and on_policy.drafts_from_root


def weighs_drafts(drafter: Drafter) -> bool:
    """Tell whether the loss weighs the tokens of a draft by their advantage."""
    on_policy = find_on_policy(drafter)
    return on_policy is not None and (
        on_policy.language_model is not None or on_policy.learns_windows
    )


def make_example(generation: Generation, corrections: bool) -> Example:
    """Turn an answer into a training sequence; with `corrections`, only tokens that replaced a
    wrong draft carry loss.
    """
    tokens = generation.prompt + generation.output
    mask = [False] * len(generation.prompt) + [not corrections] * len(generation.output)
    if corrections:
        end = len(generation.prompt) + 1
        for count, depth in zip(generation.round_lengths, generation.depths):
            end += count
            if count <= depth and end <= len(tokens):
                mask[end - 1] = True
    return Example(tokens, mask)


def acceptance_curve(turns: list[Turn], window: int) -> list[float]:
    """Compute the acceptance length over the last `window` turns, at every turn of a stream."""
    rounds = [turn.drafted.complete_round_lengths for turn in turns]
    lengths = []
    for end in range(1, len(rounds) + 1):
        counts = [count for turn in rounds[max(0, end - window) : end] for count in turn]
        lengths.append(round(float(np.mean(counts)), 4) if counts else 1.0)
    return lengths


def plot_curves(path: Path, curves: dict[str, list[float]], window: int) -> None:
    """Plot the curves into an SVG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, label=name)
    axes.set(xlabel="prompts", ylabel=f"tokens per forward, last {window} prompts")
    axes.legend()
    figure.savefig(path)


def describe_online(online: dict[str, Any]) -> Iterator[str]:
    """Say how often the drafter learned, and what that gained."""
    ends = ", ".join(f"{name} {values[-1]:.2f}" for name, values in online["curves"].items())
    yield (
        f"Online: {online['updates']} updates in {online['seconds']:.1f} s, learning from "
        f"{online['learn']}; tokens per forward over the last {online['every']} prompts: {ends}."
    )


EXTENSION_NOTES["online"] = describe_online
