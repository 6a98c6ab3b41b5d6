"""The settings that this package adds to `eval`: those that only the score of a running server
reads, and the calibration of a drafter's estimates.
"""

from dataclasses import dataclass
from typing import ClassVar

from spectrain.config.values import Count
from spectrain.errors import UserError
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.parts import EvalPart
from spectrain.eval.selection import PromptedEvaluation

from .confidence import ConfidenceCalibration


@dataclass
class LoadSettings:
    """How a running server is asked, and what its times are compared with."""

    part: ClassVar[str] = "server"

    # With a server: numbers of requests at the same time, each of which is measured with every
    # prompt.
    concurrency: tuple[Count, ...] = (1,)
    # With a server: limits of the time to the first token and of the time per later token, as in
    # {ttft: 500ms, itl: 50ms}. The share of requests within them is reported. Null reports none.
    slo: dict[str, str] | None = None


@dataclass
class ConfidenceSettings:
    """Whether the drafter's estimates of acceptance are calibrated."""

    part: ClassVar[str] = "statistics"

    # Fit a temperature for each position to the drafter's own estimates of acceptance, and measure
    # their calibration error before and after, for engines that choose lengths by them.
    confidence: bool = False


@dataclass
class LoadPart(EvalPart, LoadSettings, ConfidenceSettings):
    """Refuses the settings of a running server where this engine is scored, and calibrates."""

    def check(self, evaluation: PromptedEvaluation) -> None:
        for key, is_given in (
            ("concurrency", self.concurrency != (1,)),
            ("slo", self.slo is not None),
        ):
            if is_given:
                raise UserError(
                    f"eval.{key}: it is about a running server; add server=vllm server.url=.., or "
                    "leave it out"
                )

    def extensions(self, evaluation: PromptedEvaluation) -> list[EvalExtension]:
        return [ConfidenceCalibration(evaluation.max_new_tokens)] if self.confidence else []
