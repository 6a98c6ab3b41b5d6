"""`python -m lab.benchmarks.systems`: the speed of every system of docs/systems.md on the tiny
target, drafted and plain in turn.

The rows stand in lab/benchmarks/systems.yaml, each with the arguments of `spectrain eval` that
decode with the system. Drafters are trained with few steps first. What was trained or scored before
is not done again, and every row is written at once, so an interrupted run goes on where it stopped.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lab.benchmarks.measure_ways import SCORING, TRAINING
from spectrain.cli.main import dispatch_command
from spectrain.errors import UserError
from spectrain.files import write_text
from spectrain.provenance import collect_provenance

from .command import list_defaults, run_benchmark

SYSTEMS = Path(__file__).with_name("systems.yaml")
SURVEY_NAMES = Path(__file__).with_name("survey_names.yaml")
SURVEY_SYSTEMS = Path(__file__).with_name("survey_systems.yaml")
SIZE = ["eval.limit=16", "eval.max_new_tokens=48", "eval.repeats=1"]
RECORDED = (
    "acceptance_length",
    "acceptance_by_depth",
    "speedup",
    "time_share",
    "noise",
    "memory",
    "drift",
    "beams",
)


def read_systems() -> dict[str, Any]:
    """Return the trainings, the scored rows and the described systems of
    lab/benchmarks/systems.yaml.
    """
    systems: dict[str, Any] = yaml.safe_load(SYSTEMS.read_text())
    return systems


def read_survey_names() -> dict[str, Any]:
    """Return the names of the surveys by group, and other names, each with its state, its command
    or reason, and the choices that it needs.
    """
    names: dict[str, Any] = yaml.safe_load(SURVEY_NAMES.read_text())
    return names


@dataclass
class SystemsBench:
    """Train the drafters that the rows need, score all rows, and write what was measured."""

    # Folder of the trained drafters and of the scores.
    work: str = "runs/systems"
    # Names of the rows to measure; null measures all that the file of results lacks.
    rows: tuple[str, ...] | None = None
    # JSON file of the results.
    out: str = "lab/results/systems.json"

    def run(self) -> None:
        self.systems, self.folder = read_systems(), Path(self.work).absolute()
        out = Path(self.out)
        rows: dict[str, Any] = json.loads(out.read_text())["rows"] if out.exists() else {}
        for name in self.rows or [name for name in self.systems["rows"] if name not in rows]:
            if name not in self.systems["rows"]:
                raise UserError(
                    f"rows={name}: {SYSTEMS.name} has no such row; choose from "
                    f"{', '.join(self.systems['rows'])}"
                )
            rows[name] = self.measure_row(name)
            setting = {
                "target": "tiny",
                "training": TRAINING,
                "scoring": [*SIZE, *SCORING],
                **collect_provenance(),
            }
            write_text(out, json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")

    def measure_row(self, name: str) -> dict[str, Any]:
        """Score one row and return what was measured."""
        words = self.systems["rows"][name].split()
        for run in self.systems["runs"]:
            if any(names_run(word, run) for word in words):
                self.train(run)
        arguments = self.fill_folder(words)
        defaults = list_defaults([*SIZE, *SCORING], words)
        folder = self.folder / "scores" / "".join(sign if sign.isalnum() else "-" for sign in name)
        scored = list_defaults([f"run={folder}"], words)
        dispatch_command(["eval", *arguments, *scored, *defaults, f"eval.name={folder.name}"])
        parent = next(
            (
                Path(word.removeprefix("run="))
                for word in [*arguments, *scored]
                if word.startswith("run=")
            ),
            folder,
        )
        return self.read_summary(
            parent / "eval" / folder.name / "summary.json", [*words, *defaults]
        )

    def read_summary(self, path: Path, words: list[str]) -> dict[str, Any]:
        """Return the recorded parts of a summary with the command and the commit."""
        summary = json.loads(path.read_text())
        return {
            "command": " ".join(["eval", *words]).replace("WORK", "runs"),
            "commit": summary["setting"]["commit"],
            "prompts": summary["setting"]["prompts"],
            **{key: summary[key] for key in RECORDED if key in summary},
            "lossless": {key: summary["lossless"][key] for key in ("rule", "checked", "identical")},
        }

    def train(self, run: str) -> None:
        """Train a drafter, after the one that it starts from."""
        words = self.systems["runs"][run].split()
        for other in self.systems["runs"]:
            if f"drafter.init=WORK/{other}" in words:
                self.train(other)
        if not (self.folder / run / "drafter").exists():
            defaults = list_defaults(TRAINING, words)
            dispatch_command(
                ["train", *self.fill_folder(words), *defaults, f"run={self.folder / run}"]
            )

    def fill_folder(self, words: list[str]) -> list[str]:
        """Return arguments in which WORK is the folder of the trained drafters."""
        return [word.replace("WORK", str(self.folder)) for word in words]


def names_run(word: str, run: str) -> bool:
    """Tell whether an argument names the folder of a training."""
    return any(
        part in (f"WORK/{run}", f"WORK/{run}/target")
        for part in word.partition("=")[2].strip("[]").split(",")
    )


if __name__ == "__main__":
    run_benchmark(SystemsBench)
