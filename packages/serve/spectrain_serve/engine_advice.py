"""The advice by engine times that plans, model cards and comparisons of the core give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from spectrain.config.spec import RunSpec
from spectrain.servers.advice import EngineAdvice, Launches, Scores


class MeasuredAdvice(EngineAdvice):
    """Advice by the measurements of `spectrain bench engine`."""

    def advise_plan(self, spec: RunSpec, rates: Sequence[float] | None) -> list[str]:
        from .times.recommendations import advise_plan

        return advise_plan(spec, rates)

    def advise_target(
        self, target: str, engines: Iterable[str], rates: Sequence[float] | None, run: str
    ) -> list[str]:
        from .times.row_times import advise_target

        return advise_target(target, rates, run, engines)

    def recommend_drafters(self, runs: Sequence[Any]) -> list[dict[str, str]]:
        from .times.recommendations import advise_engines

        return advise_engines(runs)

    def describe_schedules(
        self, scores: Scores, launches: Launches, format_commands: Callable[[Launches], list[str]]
    ) -> list[str]:
        from .times.engine_schedules import describe_schedules, find_schedules, schedule_launches

        schedules = find_schedules(scores)
        if schedules is None:
            return []
        return describe_schedules(
            schedules, format_commands(schedule_launches(launches, schedules))
        )

    def write_schedules(self, folder: Path, scores: Scores, launches: Launches) -> list[str]:
        from .times.engine_schedules import write_schedules

        return write_schedules(folder, scores, launches)
