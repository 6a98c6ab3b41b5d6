"""What drafting can gain in engines whose forwards were measured on this machine. An installed
package says it; its entry point is in `spectrain.engine_advice`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spectrain.config.installed import load_entry_points


class EngineAdvice(ABC):
    """Advice by the times of engines."""

    @abstractmethod
    def advise_target(
        self,
        target: str,
        engines: Iterable[str],
        rates: Sequence[float] | None,
        facts: Mapping[str, Any],
        run: str | None,
    ) -> list[str]:
        """Return the sentences of the measurements of a target in these engines; [] if there are
        none.

        With acceptance rates, the share of rounds that accept all draft tokens up to each position,
        they say what these are worth: those of the run, or planned ones without a run. Facts that
        are not None, such as the type or the number of threads, must be those of a measurement.
        """

    @abstractmethod
    def recommend_drafters(self, runs: Sequence[Any]) -> list[dict[str, str]]:
        """Return a recommendation for each measurement of the target of scored runs
        (`spectrain.eval.comparison.ScoredRun`); [] if there are none.
        """


def list_engine_advice() -> list[EngineAdvice]:
    """Return the advice of installed packages."""
    return [make() for make in load_entry_points("engine_advice")]
