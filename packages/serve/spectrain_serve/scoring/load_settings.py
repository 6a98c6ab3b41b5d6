"""The settings of `eval` that only the score of a running server reads."""

from dataclasses import dataclass
from typing import ClassVar

from spectrain.config.values import Count
from spectrain.errors import UserError
from spectrain.eval.parts import EvalPart
from spectrain.eval.selection import PromptedEvaluation


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
class LoadPart(EvalPart, LoadSettings):
    """Refuses these settings where this engine is scored."""

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
