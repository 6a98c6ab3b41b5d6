"""The advice by engine times that plans, model cards and comparisons of the core give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from spectrain.config.spec import RunSpec
from spectrain.servers.advice import EngineAdvice


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
