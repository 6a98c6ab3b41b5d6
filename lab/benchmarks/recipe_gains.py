"""What the training of each recipe adds to its start: validation before the first step and after
the last one.

    python -m lab.benchmarks.recipe_gains
    python -m lab.benchmarks.recipe_gains 'recipes=["eagle3"]' 'seeds=[0,1,2]' steps=300

The first command trains every recipe on tiny with its own rate and with trainer.lr=auto.

Each training is a command of its own. Validations judge the drafts at the same places of held-out
answers in all of them, so the difference of two rows is one of the drafters. Rows that the file of
the results holds already are not measured again.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from spectrain.errors import RunError
from spectrain.files import write_text
from spectrain.provenance import collect_provenance

from .command import run_benchmark

RECIPES = Path(__file__).parents[2] / "recipes"
OWN_RATE = "recipe"


class RecipeGains:
    """Train recipes for a number of steps, and write the tokens per forward of chains before and
    after to a JSON file.
    """

    def __init__(
        self,
        # Recipes; all of them if none is named.
        recipes: tuple[str, ...] = (),
        # Learning rates: recipe for the recipe's own, or values of trainer.lr.
        rates: tuple[str, ...] = (OWN_RATE, "auto"),
        seeds: tuple[int, ...] = (0,),
        # Steps of each training.
        steps: int = 150,
        # Choice of the target.
        target: str = "tiny",
        # Most conversations that are read; null for all.
        conversations: int | None = None,
        out: str = "lab/results/recipe-gains.json",
    ) -> None:
        self.recipes = recipes or tuple(sorted(path.stem for path in RECIPES.glob("*.yaml")))
        self.rates = rates
        self.seeds = seeds
        self.steps = steps
        self.target = target
        self.conversations = conversations
        self.out = Path(out)

    def run(self) -> None:
        """Measure the missing rows and write the file after each."""
        results = json.loads(self.out.read_text()) if self.out.exists() else {"rows": []}
        keys = ("recipe", "rate", "seed", "steps", "target", "conversations")
        for seed in self.seeds:
            for recipe in self.recipes:
                for rate in self.rates:
                    key = (recipe, rate, seed, self.steps, self.target, self.conversations)
                    if any(tuple(row[name] for name in keys) == key for row in results["rows"]):
                        continue
                    row = dict(zip(keys, key)) | self._measure(recipe, rate, seed)
                    print(json.dumps(row), flush=True)
                    results["rows"].append(row)
                    results["provenance"] = collect_provenance()
                    write_text(self.out, json.dumps(results, indent=1) + "\n")

    def _measure(self, recipe: str, rate: str, seed: int) -> dict[str, Any]:
        """Train once; return the two validations, the highest rate and the seconds of the whole
        command.
        """
        limit = "null" if self.conversations is None else self.conversations
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            words = [
                f"recipe={recipe}",
                f"target={self.target}",
                f"data.limit={limit}",
                f"trainer.max_steps={self.steps}",
                f"trainer.seed={seed}",
                "trainer.save_every=null",
                "trainer.keep_best=false",
                "eval=none",
                f"run={run}",
            ]
            if rate != OWN_RATE:
                words.append(f"trainer.lr={rate}")
            began = time.monotonic()
            command = [sys.executable, "-m", "spectrain", "train", *words]
            process = subprocess.run(command, capture_output=True, text=True)
            seconds = time.monotonic() - began
            if process.returncode:
                return {
                    "error": process.stderr.strip().splitlines()[-1]
                    if process.stderr.strip()
                    else "it failed"
                }
            lines = (run / "metrics.jsonl").read_text().splitlines()
            return summarize_run([json.loads(line) for line in lines]) | {
                "seconds": round(seconds, 1)
            }


def summarize_run(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the first and the last validation of a run say, and its highest rate."""
    first = next(
        (line["held_out_at_start"] for line in metrics if "held_out_at_start" in line), None
    )
    last = metrics[-1].get("held_out")
    if first is None or last is None:
        raise RunError(
            "metrics.jsonl: it has no validation at the start and the end; hold conversations out "
            "(data.held_out)"
        )
    measures = ("forecast", "forecast_interval", "agreement", "places")
    return {
        "start": {name: first.get(name) for name in measures},
        "end": {name: last.get(name) for name in measures},
        "gain_interval": metrics[-1].get("gain_interval"),
        "lr": max(line["lr"] for line in metrics),
    }


if __name__ == "__main__":
    run_benchmark(RecipeGains)
