"""EAGLE-3 trained by economize on the rows that `lab.benchmarks.against_speculators` trains on.

    make side-by-side                                       # creates .venv-peers
    python -m lab.side_by_side.train_economize [target=tiny] [passes=1] [out=FILE]

Both sides get the same batches of the same conversations, fused layers, draft vocabulary and
unrolled steps; optimizer, schedule and initial weights are their own. Each rate is trained with
seed 0, and the best one, by the chain, with the other seeds too. Both are scored by this project:
chains of three and trees of 16 nodes over held-out prompts, whose output must equal autoregressive
decoding. FILE of runs= holds a line per finished run; a second start trains only what is missing.
Its `cpu_seconds` are those of this process, without economize's own.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import spectrain
from lab.benchmarks.against_speculators import (
    BATCH,
    NEW_TOKENS,
    TREES,
    UNROLLED,
    Comparison,
    RunList,
    write_result,
)
from lab.benchmarks.command import run_benchmark
from lab.benchmarks.pooled_lengths import pool_lengths
from spectrain.cli.export import export_command
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.drafters.base import Drafter
from spectrain.errors import RunError, UserError
from spectrain.output.console import make_console
from spectrain.provenance import collect_provenance
from spectrain.runs.drafters import save_drafter

WORKER = Path(__file__).with_name("economize_trainer.py")
ECONOMIZE = "economize"
# Rates of AdamW: the recipe's, and a grid of which the first is economize's default, which is made
# for long trainings.
RATES = {
    "spectrain": ("adamw:2e-3",),
    ECONOMIZE: ("adamw:1e-4", "adamw:1e-3", "adamw:4e-3"),
}


class EconomizeComparison(Comparison):
    """Trains the other side with economize."""

    def __init__(self, python: Path, target: str, limit: int, num_prompts: int) -> None:
        super().__init__(target, limit, num_prompts)
        self.python = python

    def train_library(
        self, spec: RunSpec, drafter: Any, batches: list[list[Example]], rates: str
    ) -> Drafter:
        """Train economize's drafter, with the fused layers and the draft vocabulary of ours."""
        with TemporaryDirectory() as scratch:
            folder = Path(scratch)
            save_drafter(folder / "start", drafter, spec)
            export_command(str(folder / "start"), "sglang", str(folder / "export"))
            job = {
                "target": self.target.path,
                "export": str(folder / "export"),
                "layers": list(drafter.fused_layers),
                "draft_ids": drafter.draft_ids.tolist(),
                "unrolled": UNROLLED,
                "lr": float(rates.split(":")[1]),
                "seed": spec.trainer.settings.get("seed", 0),
                "batches": [
                    [{"tokens": row.tokens, "mask": row.mask} for row in rows] for rows in batches
                ],
                "out": str(folder / "trained"),
            }
            self.run_worker(job)
            return spectrain.Drafter.from_pretrained(str(folder / "trained"), self.target).module

    def run_worker(self, job: dict[str, Any]) -> None:
        process = subprocess.run(
            [str(self.python), str(WORKER)], input=json.dumps(job), text=True, check=False
        )
        if process.returncode:
            raise RunError(
                f"economize ended with status {process.returncode}; its own words are above"
            )


class SameRows:
    """Trains EAGLE-3 by economize and by spectrain on the same rows, and scores both."""

    def __init__(
        self,
        environment: str = ".venv-peers",
        target: str = "tiny",
        passes: int = 1,
        seeds: int = 3,
        limit: int = 320,
        prompts: int = 24,
        runs: str = "runs/train-economize.jsonl",
        out: str | None = None,
    ) -> None:
        self.python = Path(environment).absolute() / "bin" / "python"
        self.target = target
        self.passes = passes
        self.seeds = seeds
        self.limit = limit
        self.prompts = prompts
        self.runs = Path(runs)
        self.out = None if out is None else Path(out)
        if not self.python.exists():
            raise UserError(f"environment={environment}: it does not exist; run make side-by-side")

    def run(self) -> None:
        torch.set_num_threads(1)
        comparison = EconomizeComparison(self.python, self.target, self.limit, self.prompts)
        runs = RunList(self.runs, comparison, self.passes)
        lines = []
        for side, rates in RATES.items():
            first = {rate: runs.train(side, rate, 0) for rate in rates}
            best = max(rates, key=lambda rate: pool_lengths([first[rate]], "chain"))
            seeds = [runs.train(side, best, seed) for seed in range(self.seeds)]
            lengths = ", ".join(f"{tree} {pool_lengths(seeds, tree):.3f}" for tree in TREES)
            lines.append(f"{side}, {best}, {self.seeds} seeds: {lengths} tokens per forward")
        setting = {
            "target": self.target,
            "prompts": self.prompts,
            "new_tokens": NEW_TOKENS,
            "batch_tokens": BATCH,
            "unrolled": UNROLLED,
        }
        write_result(
            {"setting": setting, "runs": runs.runs, "provenance": collect_provenance()}, self.out
        )
        make_console().print("\n".join(lines), highlight=False)


if __name__ == "__main__":
    run_benchmark(SameRows)
