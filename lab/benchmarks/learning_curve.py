"""Learning curve of a drafter: tokens per forward of its checkpoints on the prompts of one score.

    python -m lab.benchmarks.learning_curve score=runs/NAME/eval/heldout
    'drafters=["smollm2-eagle3","runs/NAME"]' 'seen=[3,5]'

A checkpoint is a choice of `drafter=`, a run or a directory. The prompts, with the answers before
later turns, and the answers that the target gives are those of the score's samples.jsonl, so
nothing is decoded without a draft.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

import spectrain
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.session import Session, prepare_for_decoding
from spectrain.errors import RunError, UserError
from spectrain.eval.intervals import interval
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.trees import Chain, Eagle2, TreeBuilder

from .command import run_benchmark

TREES: dict[str, TreeBuilder] = {
    "chain of 3": Chain(depth=3),
    "16 nodes": Eagle2(depth=5, budget=16, top_k=4),
}


class LearningCurve:
    """Decode the prompts of a score with every checkpoint of a drafter, greedy, and add a row
    for each to a JSON file.
    """

    def __init__(
        self,
        # Folder of a score of the same target with the greedy rule, which holds samples.jsonl.
        score: str,
        # Checkpoints, in the order of training.
        drafters: tuple[str, ...],
        # Number of tokens that each of them was trained on, all trainings together.
        seen: tuple[int, ...],
        # Choice of the target.
        target: str = "smollm2",
        # Name of the prompts in the rows.
        prompts: str = "held-out",
        # File of the results; rows that it holds already are replaced.
        out: str = "lab/results/learning-curve.json",
    ) -> None:
        if len(drafters) != len(seen):
            raise UserError(
                f"seen: it names {len(seen)} numbers of tokens for {len(drafters)} drafters; name "
                "one for each"
            )
        if not (Path(score) / "samples.jsonl").is_file():
            raise UserError(
                f"score={score}: no samples.jsonl is there; name a folder that spectrain eval wrote"
            )
        self.samples = [
            json.loads(line) for line in (Path(score) / "samples.jsonl").read_text().splitlines()
        ]
        self.checkpoints = dict(zip(drafters, seen))
        self.target = Target.from_pretrained(target, "bfloat16")
        self.prompts = prompts
        self.out = Path(out)

    def run(self) -> None:
        """Score every checkpoint and write the file after each."""
        self.target.pack_weights()
        for name, seen in self.checkpoints.items():
            drafter = prepare_for_decoding(
                spectrain.Drafter.from_pretrained(name, self.target).module, self.target
            )
            row: dict[str, Any] = {
                "drafter": Path(name).name,
                "tokens_seen": seen,
                "prompts": self.prompts,
            }
            for tree, builder in TREES.items():
                row[tree] = self._score(Session(self.target, Greedy(), drafter, builder))
            print(json.dumps(row), flush=True)
            self._add_row(row)

    def _score(self, session: Session) -> dict[str, Any]:
        """Return tokens per forward over all prompts, with an interval over questions."""
        counts: dict[str, list[int]] = {}
        for sample in self.samples:
            (answer,) = session.decode([sample["prompt_tokens"]], len(sample["output_tokens"]))
            if answer.output != sample["output_tokens"]:
                raise RunError(
                    f"prompt {sample['id']}: the answer is not that of the score; use the score's "
                    "target and dtype"
                )
            tokens, rounds = counts.setdefault(sample["id"], [0, 0])
            counts[sample["id"]] = [tokens + len(answer.output), rounds + len(answer.round_lengths)]
        columns = np.array(list(counts.values()), dtype=np.float64)
        tokens, rounds = columns.sum(0)
        return {
            "acceptance_length": round(tokens / rounds, 4),
            "ci95": interval(columns, (1, -1)),
            "tokens": int(tokens),
        }

    def _add_row(self, row: dict[str, Any]) -> None:
        results = json.loads(self.out.read_text()) if self.out.exists() else {"rows": []}
        keys = ("drafter", "prompts")
        others = [entry for entry in results["rows"] if any(entry[key] != row[key] for key in keys)]
        setting = {"target": self.target.name, "dtype": str(self.target.dtype), "rule": "greedy"}
        results = {"setting": setting, "rows": [*others, row], "provenance": collect_provenance()}
        write_text(self.out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_benchmark(LearningCurve)
