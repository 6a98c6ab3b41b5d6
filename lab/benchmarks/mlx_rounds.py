"""MLX decodes our exports: the same texts as our decoding, and the same tokens in each round.

    python -m venv MLX && MLX/bin/pip install mlx-cpu mlx-lm mlx-dspark    # mlx on an Apple machine
    python -m lab.benchmarks.mlx_rounds python=MLX/bin/python run=runs/dspark-tiny [out=FILE]

The run's drafter is a DSpark, a DFlash or a distilled draft model. It is exported as its users
export it, and held-out prompts are decoded greedily in float32 with the exported files, by our
chain here and by mlx-dspark or mlx-lm in its own process, on a CPU. A round is decided by the text
before it. So all rounds that begin at the same token must emit the same number of tokens; the first
and last ones of mlx-lm begin or end elsewhere, because it drafts the first token too.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.benchmarks.command import run_benchmark
from spectrain.cli.export import export_command
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.errors import RunError, UserError
from spectrain.eval.prompts import read_prompts
from spectrain.export.converter import read_drafter, resolve_target
from spectrain.export.measure import load_drafter
from spectrain.files import write_text
from spectrain.models.loading import load_hf
from spectrain.output.console import make_console
from spectrain.provenance import collect_provenance
from spectrain.runs.folder import require_drafter_directory
from spectrain.trees import Chain

# Family -> the format that MLX reads, and the draft tokens of a round.
FORMATS = {"dspark": ("flat", 7), "dflash": ("flat", 7), "causal": ("hf", 4)}
WORKER = Path(__file__).with_name("mlx_worker.py")


@dataclass
class Agreement:
    """How the decoding of another engine agrees with ours, over all prompts."""

    prompts: int = 0
    same_texts: int = 0
    # Complete rounds of ours, those of the other engine that begin at the same token, and those of
    # them that emit as many.
    rounds: int = 0
    shared: int = 0
    same: int = 0
    # Prompts whose texts or rounds differ.
    differing: list[int] = field(default_factory=list)

    def add(self, ours: Generation, answer: dict[str, Any]) -> None:
        """Compare an answer, which may be cut at the end of a round of ours."""
        lengths = ours.complete_round_lengths
        own, other = begin_rounds(1, lengths), begin_rounds(answer["start"], answer["rounds"])
        shared = own.keys() & other.keys()
        same = sum(own[start] == other[start] for start in shared)
        is_same_text = answer["tokens"] == ours.output[: 1 + sum(lengths)]
        self.prompts += 1
        self.same_texts += is_same_text
        self.rounds += len(lengths)
        self.shared += len(shared)
        self.same += same
        if not is_same_text or same < len(shared):
            self.differing.append(self.prompts - 1)


def begin_rounds(start: int, lengths: Sequence[int]) -> dict[int, int]:
    """Return position of its first token -> tokens, of each round."""
    return dict(zip(accumulate(lengths, initial=start), lengths))


class MlxRounds:
    """Compares texts and rounds of MLX with ours, of one drafter."""

    def __init__(
        self,
        python: str,
        run: str,
        prompts: int = 8,
        tokens: int = 48,
        drafted: int | None = None,
        out: str | None = None,
    ) -> None:
        self.python = python
        self.run_name = run
        self.num_prompts = prompts
        self.tokens = tokens
        self.drafted = drafted
        self.out = out

    def run(self) -> None:
        checkpoint = read_drafter(require_drafter_directory("run", self.run_name), None)
        if checkpoint.family not in FORMATS:
            raise UserError(
                f"run={self.run_name}: MLX reads {', '.join(FORMATS)}, not {checkpoint.family}"
            )
        format_name, default = FORMATS[checkpoint.family]
        drafted = self.drafted or default
        files = resolve_target(checkpoint)
        target = load_hf(files.engine_path, dtype="float32")
        prompts = [
            prompt.tokenize_for(target) for prompt in read_prompts(None, self.num_prompts).prompts
        ]
        with TemporaryDirectory() as scratch:
            folder = export_command(self.run_name, format_name, str(Path(scratch) / "export"))
            drafter = load_drafter(read_drafter(folder, files), target)
            ours = [
                decode(target, [prompt], Greedy(), self.tokens, drafter, Chain(drafted))[0]
                for prompt in prompts
            ]
            answers = self.decode_there(
                {
                    "target": target.path,
                    "drafter": str(folder),
                    "family": checkpoint.family,
                    "drafted": drafted,
                    "prompts": prompts,
                    "limits": [1 + sum(each.complete_round_lengths) for each in ours],
                }
            )
        agreement = Agreement()
        for generation, answer in zip(ours, answers["answers"], strict=True):
            agreement.add(generation, answer)
        self.report(checkpoint.family, drafted, agreement, answers["versions"])

    def decode_there(self, job: dict[str, Any]) -> Any:
        """Return the worker's answers to a job."""
        process = subprocess.run(
            [self.python, str(WORKER)],
            input=json.dumps(job),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if process.returncode:
            raise RunError(
                f"python={self.python}: MLX ended with status {process.returncode}; its own words "
                "are above"
            )
        return json.loads(process.stdout)

    def report(
        self, family: str, drafted: int, agreement: Agreement, versions: dict[str, str]
    ) -> None:
        make_console().print(
            f"{family}, drafts of {drafted}: {agreement.same_texts} of {agreement.prompts} texts, "
            f"{agreement.rounds} rounds of ours, {agreement.shared} of MLX begin where one of ours "
            f"does, {agreement.same} of them emit as many tokens; differing prompts: "
            f"{agreement.differing or 'none'}",
            highlight=False,
        )
        if self.out is not None:
            result = {
                "setting": {
                    "run": self.run_name,
                    "family": family,
                    "drafted": drafted,
                    "tokens": self.tokens,
                    "versions": versions,
                },
                "agreement": vars(agreement),
                "provenance": collect_provenance(),
            }
            write_text(Path(self.out), json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_benchmark(MlxRounds)
