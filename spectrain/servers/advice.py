"""What drafting can gain in engines whose forwards were measured on this machine, and how many
tokens to draft there. An installed package says it; its entry point is in
`spectrain.engine_advice`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spectrain.config.installed import load_entry_points
from spectrain.config.spec import RunSpec

from .commands import EngineLaunch

Scores = Mapping[str, dict[str, Any]]
"""The summaries of a run's evaluations by name."""
Launches = Mapping[str, EngineLaunch]


class EngineAdvice(ABC):
    """Advice by the times of engines. Acceptance rates are the shares of rounds that accept all
    draft tokens up to each position; sentences say what they are worth.
    """

    @abstractmethod
    def advise_plan(self, spec: RunSpec, rates: Sequence[float] | None) -> list[str]:
        """Return what drafting can gain in the engine of server= with planned acceptance rates, or
        the command that measures it; [] without an engine that can be measured.
        """

    @abstractmethod
    def advise_target(
        self, target: str, engines: Iterable[str], rates: Sequence[float] | None, run: str
    ) -> list[str]:
        """Return the sentences of the measurements of a target in these engines, with the
        acceptance rates of a run; [] if there are none.
        """

    @abstractmethod
    def recommend_drafters(self, runs: Sequence[Any]) -> list[dict[str, str]]:
        """Return a recommendation for each measurement of the target of scored runs
        that `spectrain compare` reads; [] if there are none.
        """

    @abstractmethod
    def describe_schedules(
        self, scores: Scores, launches: Launches, format_commands: Callable[[Launches], list[str]]
    ) -> list[str]:
        """Return the section of a model card on how many tokens to draft under which load, with the
        commands of the engines that read such a schedule; [] where the scores or engines say
        nothing.
        """

    @abstractmethod
    def write_schedules(self, folder: Path, scores: Scores, launches: Launches) -> list[str]:
        """Write the files of such a schedule that engines read into an export; return their
        names.
        """


def list_engine_advice() -> list[EngineAdvice]:
    """Return the advice of installed packages."""
    return [make() for make in load_entry_points("engine_advice")]
