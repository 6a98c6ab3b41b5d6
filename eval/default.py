"""The evaluation that `eval=default` constructs: with sweeps over an axis, and with the parts of
installed packages.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from spectrain.errors import UserError
from spectrain.eval.axes.grid import BatchContextSweep
from spectrain.eval.axes.sweep import (
    CONTEXT_LENGTHS,
    BatchSweep,
    ContextSweep,
    TemperatureSweep,
)
from spectrain.eval.baselines import TRANSFORMERS
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.run import Evaluation
from spectrain.eval.settings import refuse_empty


@dataclass
class SweepSettings:
    """What is varied for one drafter."""

    part: ClassVar[str] = "axes"

    # What to vary for one drafter: the number of prompts at once (batch), the length of prompts
    # (context), both of these in one table (grid), or the temperature; null varies nothing.
    sweep: Literal["batch", "context", "grid", "temperature"] | None = None
    # Numbers of prompts at once of eval.sweep=batch and grid.
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    # Temperatures of eval.sweep=temperature; 0 takes the most likely token.
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.6, 1.0)


@dataclass
class DefaultEvaluation(SweepSettings, Evaluation):
    """Scores drafters as the settings of `eval` say."""

    # The entry points whose settings join these; see config/parts.py.
    part_group: ClassVar[str] = "eval"

    def __post_init__(self) -> None:
        # Lengths beyond the target's context are left out where nobody named them.
        takes_default_lengths = self.sweep in ("context", "grid") and self.context is None
        if takes_default_lengths:
            self.context = CONTEXT_LENGTHS
        super().__post_init__()
        if takes_default_lengths and self.context_filler is not None:
            self.context_filler = replace(self.context_filler, leaves_out_long=True)
        if self.sweep is not None:
            # A sweep compares systems, so the baselines of this engine are left out.
            self.baselines = tuple(name for name in self.baselines if name in TRANSFORMERS)
        refuse_empty("batches", self.batches)
        if not self.temperatures or min(self.temperatures) < 0:
            raise UserError(
                f"eval.temperatures={list(self.temperatures)}: give temperatures of 0 or more"
            )
        for part in self.parts:
            part.check(self)

    def extensions(self) -> list[EvalExtension]:
        *added, baselines = super().extensions()
        return [*added, *make_sweep(self), baselines]


def make_sweep(evaluation: DefaultEvaluation) -> list[EvalExtension]:
    """Return the extension that varies what eval.sweep names."""
    shared = (
        evaluation.max_new_tokens,
        evaluation.bound_ms,
        evaluation.engine,
        evaluation.batch_size,
    )
    if evaluation.sweep == "batch":
        return [BatchSweep("batch", *shared, evaluation.batches)]
    if evaluation.sweep == "context":
        return [ContextSweep("context", *shared)]
    if evaluation.sweep == "grid":
        return [BatchContextSweep("batch", *shared, evaluation.batches)]
    if evaluation.sweep == "temperature":
        return [TemperatureSweep("temperature", *shared, evaluation.temperatures)]
    return []
