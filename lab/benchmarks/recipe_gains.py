"""What the training of each recipe adds to its start: tokens per forward and loss on held-out text,
before the first step and after the last one.

    python -m lab.benchmarks.recipe_gains
    python -m lab.benchmarks.recipe_gains 'recipes=["gkd"]' 'rates=["auto*0.5","auto","auto*2"]'

Tokens per forward are those of a greedy chain of 3, forecast by the share of right drafts at every
token of the target's answers to held-out prompts. All trainings are judged at the same places, so
the interval of a gain is that of the paired differences of conversations, and of the seeds. The
loss is the recipe's own, per supervised token of held-out conversations. Trainings that the file of
the results holds already are not repeated, so an interrupted run goes on where it stopped.

Shapes: S seeds, C held-out conversations.
"""

import json
import math
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from scipy.special import stdtrit

import spectrain.training.trainer as trainer_module
from spectrain.cli.main import dispatch_command
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import TrainingState
from spectrain.errors import RunError, UserError
from spectrain.features.base import BatchRequest
from spectrain.files import write_text
from spectrain.provenance import collect_provenance
from spectrain.training import rates, validation
from spectrain.training.run import TrainingRun

from .command import run_benchmark

ROOT = Path(__file__).parents[2]
CORE_RECIPES = ROOT / "recipes"
RESEARCH_RECIPES = ROOT / "packages" / "research" / "spectrain_research" / "conf" / "recipe"
OWN_RATE = "recipe"
CHAIN_DEPTH = 3
CONVERSATIONS = 320
"""Embedded conversations that are read, of which the same are held out in every training."""
MEANS = (
    *("start", "end", "sampled_at_start", "sampled_at_end"),
    *("loss_at_start", "loss_at_end", "tokens", "lr"),
)
"""What a row holds the mean over seeds of."""
LOSS_TOKENS = 2048
"""Tokens of held-out conversations whose loss is measured, at least."""


class RecipeGains:
    """Train recipes for a number of steps, and write the tokens per forward of a chain of 3 and the
    held-out loss, before and after, to a JSON file.
    """

    def __init__(
        self,
        # Recipes, each with further words of the command behind it, as in "eagle3
        # drafter.loss=forward_kl"; those of the core and then those of research if none is named.
        recipes: tuple[str, ...] = (),
        # Learning rates: recipe for the recipe's own, values of trainer.lr, or auto*FACTOR for a
        # multiple of the rates that trainer.lr=auto chooses.
        rates: tuple[str, ...] = (OWN_RATE,),
        # Seeds of the training. The held-out conversations are the same for all of them.
        seeds: tuple[int, ...] = (0, 1, 2),
        # Steps of each training.
        steps: int = 40,
        # Choice of the target.
        target: str = "tiny",
        out: str = "lab/results/recipe-gains.json",
    ) -> None:
        self.recipes = recipes or tuple(list_recipes())
        self.rates = rates
        self.seeds = seeds
        self.steps = steps
        self.target = target
        self.out = Path(out)

    def run(self) -> None:
        """Measure the missing trainings and write the file after each."""
        rows = json.loads(self.out.read_text())["trainings"] if self.out.exists() else []
        for seed in self.seeds:
            for recipe in self.recipes:
                for rate in self.rates:
                    key = {
                        "recipe": recipe,
                        "rate": rate,
                        "target": self.target,
                        "steps": self.steps,
                        "seed": seed,
                    }
                    if any(key.items() <= row.items() for row in rows):
                        continue
                    row = key | self._measure(recipe, rate, seed)
                    print({name: row[name] for name in row if name != "influences"}, flush=True)
                    rows.append(row)
                    self._write(rows)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        """Write all trainings and what they say together."""
        setting = {
            "target": self.target,
            "steps": self.steps,
            "conversations": CONVERSATIONS,
            "loss_tokens": LOSS_TOKENS,
            **collect_provenance(),
        }
        results = {"setting": setting, "rows": summarize_trainings(rows)}
        # One line for each training, whose many influences would fill a page each.
        lines = ",\n  ".join(map(json.dumps, rows))
        head = json.dumps(results, indent=1).removesuffix("\n}")
        write_text(self.out, f'{head},\n "trainings": [\n  {lines}\n ]\n}}\n')

    def _measure(self, recipe: str, rate: str, seed: int) -> dict[str, Any]:
        """Train once; return what was measured at both ends, the training's tokens and highest
        rate, and the seconds of the whole command; or the error that refused it.
        """
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            words = [
                *f"recipe={recipe}".split(),
                f"target={self.target}",
                f"data.limit={CONVERSATIONS}",
                f"trainer.max_steps={self.steps}",
                f"trainer.eval_every={self.steps}",
                f"trainer.seed={seed}",
                "trainer.save_every=null",
                "trainer.keep_best=false",
                "eval=none",
                f"run={run}",
            ]
            name, _, factor = rate.partition("*")
            if rate != OWN_RATE:
                words.append(f"trainer.lr={name}")
            began = time.monotonic()
            try:
                ends = measure_training(words, float(factor or 1))
            except (RunError, UserError) as error:
                return {"error": str(error)}
            seconds = round(time.monotonic() - began, 1)
            lines = (run / "metrics.jsonl").read_text().splitlines()
            metrics = [json.loads(line) for line in lines]
            return {
                **ends,
                "tokens": metrics[-1]["tokens"],
                "lr": max(line["lr"] for line in metrics),
                "seconds": seconds,
            }


class MeasuredRun(TrainingRun):
    """A training that also measures the loss of held-out conversations in every validation."""

    # The validations of the newest training: forecasts of greedy and sampled drafts, places, loss,
    # and the influences of the conversations on the error of the first.
    validations: ClassVar[list[dict[str, Any]]] = []
    held_out_examples: list[Example]

    def record_held_out(self, dataset: Dataset) -> None:
        self.held_out_examples = dataset.held_out
        super().record_held_out(dataset)

    def validate(self) -> dict[str, Any]:
        metrics = super().validate()
        self.validations.append(
            {
                "forecast": metrics["forecast"],
                "sampled": metrics["forecast_sampled"],
                "places": sum(metrics["places"]),
                "loss": self._held_out_loss(),
                "influences": self.validation_history.influences["newest"],
            }
        )
        return metrics

    def _held_out_loss(self) -> float:
        """Return the loss of the first stage per supervised token of held-out conversations, with
        the random numbers of step 0.
        """
        total = 0.0
        supervised = 0
        tokens = 0
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for example in self.held_out_examples:
                layers = self.drafter.stages[0].layers
                request = BatchRequest([example], self.target, layers, False, 0, self.drafter)
                batch = self.source.make_batch(request)
                total += float(self.parallel.loss(batch, TrainingState(), True).total)
                supervised += batch.num_supervised
                tokens += len(example.tokens)
                if tokens >= LOSS_TOKENS:
                    break
        return total / supervised


def measure_training(words: list[str], factor: float = 1.0) -> dict[str, Any]:
    """Run `spectrain train` with these words; return forecast, loss and influences of the start
    and the end, which are its only validations. The rates of `trainer.lr=auto` are multiplied by
    `factor`.
    """
    MeasuredRun.validations.clear()
    with (
        patch.object(validation, "DRAFT_DEPTH", CHAIN_DEPTH),
        patch.object(trainer_module, "TrainingRun", MeasuredRun),
        patch.object(rates, "NEW_SHARE", factor * rates.NEW_SHARE),
        patch.object(rates, "KEPT_SHARE", factor * rates.KEPT_SHARE),
    ):
        dispatch_command(["train", *words])
    start, end = MeasuredRun.validations
    return {
        "start": start["forecast"],
        "end": end["forecast"],
        "sampled_at_start": start["sampled"],
        "sampled_at_end": end["sampled"],
        "loss_at_start": round(start["loss"], 4),
        "loss_at_end": round(end["loss"], 4),
        "places": start["places"],
        "influences": [
            round(late - early, 7)
            for early, late in zip(start["influences"], end["influences"], strict=True)
        ],
    }


def list_recipes() -> list[str]:
    """Return the names of all recipes, those of the core first."""
    folders = (CORE_RECIPES, RESEARCH_RECIPES)
    return [path.stem for folder in folders for path in sorted(folder.glob("*.yaml"))]


def summarize_trainings(trainings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each drafting recipe, rate, target and number of steps, over its seeds."""
    names = ("recipe", "rate", "target", "steps")
    order = {recipe: number for number, recipe in enumerate(list_recipes())}
    measured = sorted(
        # Recipes without drafts, such as a judge's, have nothing to count.
        (row for row in trainings if "error" not in row and row["places"]),
        key=lambda row: (order[row["recipe"].split()[0]], *(row[name] for name in names)),
    )
    rows = []
    for key, group in groupby(measured, key=lambda row: tuple(row[name] for name in names)):
        seeds = list(group)
        gains = [row["end"] - row["start"] for row in seeds]
        low, high = gain_interval(gains, [row["influences"] for row in seeds])
        means = {name: round(float(np.mean([row[name] for row in seeds])), 4) for name in MEANS}
        percent = 100 / means["start"]
        rows.append(
            dict(zip(names, key))
            | means
            | {
                "seeds": len(seeds),
                "places": seeds[0]["places"],
                "gain": round(percent * float(np.mean(gains)), 2),
                "gain_interval": [round(percent * low, 2), round(percent * high, 2)],
                "gains": [round(100 * gain / row["start"], 2) for gain, row in zip(gains, seeds)],
                "core": (CORE_RECIPES / f"{key[0].split()[0]}.yaml").exists(),
            }
        )
    return rows


def gain_interval(gains: list[float], influences: list[list[float]]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of the gains [S], from the influences [S, C] of
    conversations on the error of each.

    The variances of conversations and of seeds add up, which is more than the truth, as the gains
    of seeds differ by conversations too. Degrees of freedom are Welch's and Satterthwaite's.
    """
    by_conversation = np.mean(influences, axis=0)
    num_conversations = len(by_conversation)
    parts = [
        (
            num_conversations / (num_conversations - 1) * float(np.sum(by_conversation**2)),
            num_conversations - 1,
        )
    ]
    if len(gains) > 1:
        parts.append((float(np.var(gains, ddof=1)) / len(gains), len(gains) - 1))
    total = sum(part for part, _ in parts)
    freedom = total**2 / sum(part**2 / degrees for part, degrees in parts) if total else 1.0
    margin = float(stdtrit(freedom, 0.975)) * math.sqrt(total)
    mean = float(np.mean(gains))
    return mean - margin, mean + margin


if __name__ == "__main__":
    run_benchmark(RecipeGains)
