"""The advice by engine times that plans, model cards and comparisons of the core give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spectrain.servers.advice import EngineAdvice


class MeasuredAdvice(EngineAdvice):
    """Advice by the measurements of `spectrain bench engine`."""

    def advise_target(
        self,
        target: str,
        engines: Iterable[str],
        rates: Sequence[float] | None,
        facts: Mapping[str, Any],
        run: str | None,
    ) -> list[str]:
        from .times.row_times import advise_plan, advise_target

        if run is None:
            return advise_plan(target, engines, rates, facts)
        return advise_target(target, rates, run, engines)

    def recommend_drafters(self, runs: Sequence[Any]) -> list[dict[str, str]]:
        from .times.recommendations import advise_engines

        return advise_engines(runs)
