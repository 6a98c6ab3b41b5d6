"""The results of the Python interface: of a training, of an evaluation and of a question."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectrain.config.plain_files import read_json_object
from spectrain.training.metrics import read_last_step, read_metrics

if TYPE_CHECKING:
    from spectrain.decoding.generation import Generation
    from spectrain.models.target import Target


@dataclass(frozen=True, eq=False, repr=False)
class EvalResult(Mapping[str, Any]):
    """What an evaluation measured. It is a mapping too: of the content of summary.json."""

    # Tokens per forward of the target, over all rounds, the bonus token included; None where none
    # were counted.
    acceptance_length: float | None
    # Its 95 % interval over prompts; None where there were too few.
    acceptance_interval: list[float] | None
    # Speedup over plain decoding; None where none was measured.
    speedup: float | None
    # Its 95 % interval over prompts; None where there were too few.
    speedup_interval: list[float] | None
    # Why the speedup is not to be quoted; None where it is.
    speedup_reason: str | None
    # Whether the answers are those of the target; None where this was not checked.
    lossless: bool | None
    # The content of summary.json.
    summary: dict[str, Any]

    @classmethod
    def from_summary(cls, summary: dict[str, Any]) -> EvalResult:
        """Return the numbers of a summary.json."""
        length = summary.get("acceptance_length") or {}
        speedup = summary.get("speedup") or {}
        return cls(
            length.get("pooled"),
            known_interval(length.get("ci95")),
            speedup.get("ratio"),
            known_interval(speedup.get("ci95")),
            speedup.get("reason"),
            (summary.get("lossless") or {}).get("lossless"),
            summary,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        return dict(self.summary)

    def __getitem__(self, key: str) -> Any:
        return self.summary[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary)

    def __len__(self) -> int:
        return len(self.summary)

    def __repr__(self) -> str:
        numbers = [
            format_number(self.acceptance_length, self.acceptance_interval, " tokens per forward"),
            format_number(self.speedup, self.speedup_interval, " times as fast"),
        ]
        label = self.summary.get("label")
        return f"EvalResult({f'{label}: ' if label else ''}{', '.join(filter(None, numbers))})"


@dataclass(frozen=True, repr=False)
class TrainResult(os.PathLike[str]):
    """A finished training. It is a path too, that of the run folder: `result / "drafter"`."""

    # The run folder.
    folder: Path
    # Finished steps.
    steps: int
    # Loss and the other measures of the last step; empty where nothing was logged.
    metrics: dict[str, Any]
    # The score of the drafter; None with eval="none".
    evaluation: EvalResult | None = None

    @classmethod
    def from_folder(cls, folder: Path, evaluation_name: str | None) -> TrainResult:
        """Read the result of a finished run; `evaluation_name` is that of its score, or None."""
        path = folder / "metrics.jsonl"
        steps = read_last_step(path)
        rows = read_metrics(path, steps)
        summary = folder / "eval" / str(evaluation_name) / "summary.json"
        is_scored = evaluation_name is not None and summary.is_file()
        return cls(
            folder,
            steps,
            rows[-1] if rows else {},
            EvalResult.from_summary(read_json_object(summary)) if is_scored else None,
        )

    @property
    def drafter(self) -> Path:
        """Return the directory of the trained drafter."""
        return self.folder / "drafter"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values, which JSON holds."""
        return {
            "folder": str(self.folder),
            "steps": self.steps,
            "metrics": dict(self.metrics),
            "evaluation": None if self.evaluation is None else self.evaluation.to_dict(),
        }

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return str(self.folder)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.folder / name

    def __getattr__(self, name: str) -> Any:
        # What a path has: `iterdir`, `name`, `glob` and others.
        if name.startswith("__") or name == "folder":
            raise AttributeError(name)
        return getattr(self.folder, name)

    def __repr__(self) -> str:
        loss = self.metrics.get("loss")
        shown = "" if loss is None else f", loss {loss:.3f}"
        score = "" if self.evaluation is None else f", {self.evaluation!r}"
        return f"TrainResult({str(self.folder)!r}, {self.steps} steps{shown}{score})"


@dataclass(frozen=True, repr=False)
class Answer:
    """The result of decoding one prompt."""

    text: str  # without what ends it
    # The tokens of the answer, the stop token included.
    tokens: list[int]
    statistics: dict[str, float]  # rounds, acceptance_length, tokens_per_second

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:60]}.."
        return (
            f"Answer({text!r}, {len(self.tokens)} tokens, "
            f"{self.statistics['acceptance_length']:.2f} per forward)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain values, which JSON holds."""
        return {"text": self.text, "tokens": [*self.tokens], "statistics": {**self.statistics}}

    @classmethod
    def from_generation(cls, generation: Generation, target: Target) -> Answer:
        """Return a generation as text, with the statistics of its rounds."""
        tokens = [token for token in generation.output if token not in target.stop_ids]
        rounds = generation.complete_round_lengths
        seconds = generation.finish_seconds
        statistics = {
            "rounds": float(len(generation.round_lengths)),
            "acceptance_length": sum(rounds) / len(rounds) if rounds else 1.0,
            "tokens_per_second": (len(generation.output) - 1) / seconds if seconds else 0.0,
        }
        return cls(str(target.tokenizer.decode(tokens)), generation.output, statistics)


def known_interval(bounds: list[float | None] | None) -> list[float] | None:
    """Return the bounds of an interval; None where one of them is unknown."""
    known = [bound for bound in bounds or () if bound is not None]
    return known if len(known) == 2 else None


def format_number(number: float | None, bounds: list[float] | None, unit: str) -> str:
    """Format a number with its interval and its unit; return "" for one that was not measured."""
    if number is None:
        return ""
    interval = "" if bounds is None else f" [{bounds[0]:.2f}, {bounds[1]:.2f}]"
    return f"{number:.2f}{interval}{unit}"
