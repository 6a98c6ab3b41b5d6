"""The settings of `eval` that vary one drafter over an axis, and what they add to a score."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from spectrain.errors import UserError
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.parts import EvalPart
from spectrain.eval.selection import EngineEvaluation
from spectrain.eval.settings import refuse_empty
from spectrain_studies.axes.grid import BatchContextSweep
from spectrain_studies.axes.sweep import (
    CONTEXT_LENGTHS,
    BatchSweep,
    ContextSweep,
    TemperatureSweep,
)
from spectrain_studies.axes.tables import section_axis


@dataclass
class SweepSettings:
    """What is varied for one drafter."""

    part: ClassVar[str] = "axes"

    # What to vary for one drafter; null varies nothing. With batch, context, grid and temperature,
    # this is the number of prompts at once, the length of prompts, both of these in one table, and
    # the temperature.
    sweep: Literal["batch", "context", "grid", "temperature"] | None = None
    # Numbers of prompts at once of eval.sweep=batch and grid.
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    # Temperatures of eval.sweep=temperature; 0 takes the most likely token.
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.6, 1.0)


@dataclass
class AxisPart(EvalPart, SweepSettings):
    """Sweeps over an axis."""

    def prepare(self, evaluation: EngineEvaluation) -> None:
        self.takes_default_lengths = (
            self.sweep in ("context", "grid") and evaluation.context is None
        )
        if self.takes_default_lengths:
            evaluation.context = CONTEXT_LENGTHS

    def check(self, evaluation: EngineEvaluation) -> None:
        # Lengths beyond the target's context are left out where nobody named them.
        if self.takes_default_lengths and evaluation.context_filler is not None:
            evaluation.context_filler = replace(evaluation.context_filler, leaves_out_long=True)
        refuse_empty("batches", self.batches)
        if not self.temperatures or min(self.temperatures) < 0:
            raise UserError(
                f"eval.temperatures={list(self.temperatures)}: give temperatures of 0 or more"
            )

    @property
    def leaves_out_baselines(self) -> bool:
        return self.sweep is not None

    def extensions(self, evaluation: EngineEvaluation) -> list[EvalExtension]:
        shared = (
            evaluation.max_new_tokens,
            evaluation.bound_ms,
            evaluation.engine,
            evaluation.batch_size,
        )
        if self.sweep == "batch":
            return [BatchSweep("batch", *shared, self.batches)]
        if self.sweep == "context":
            return [ContextSweep("context", *shared)]
        if self.sweep == "grid":
            return [BatchContextSweep("batch", *shared, self.batches)]
        if self.sweep == "temperature":
            return [TemperatureSweep("temperature", *shared, self.temperatures)]
        return []

    @classmethod
    def draw_axis(cls, axes: Sequence[dict[str, Any]], id: str) -> dict[str, Any]:
        return section_axis(axes, id)
