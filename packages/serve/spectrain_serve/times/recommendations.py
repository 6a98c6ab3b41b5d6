"""What the drafters of a comparison, or a planned one, can gain in the engines that `spectrain
bench engine` has measured on this machine.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from spectrain.config.spec import RunSpec
from spectrain.export.card import chain_rates
from spectrain.export.targets import TargetFiles
from spectrain.servers.engines import ENGINES
from spectrain_studies.comparison.scored_runs import ScoredRun

from .row_times import EngineTimes, advise_engine, find_times, predict_speedups


def advise_plan(spec: RunSpec, rates: Sequence[float] | None) -> list[str]:
    """Return what drafting can gain in the engine of server=, if it was measured on this machine,
    or else the command that measures it."""
    if not spec.server or not spec.server.build().capabilities.has_lookup:
        return []
    engine = str(spec.server.choice)
    target = TargetFiles.from_settings(spec.target.node).short_name
    dtype = spec.server.settings.get("dtype")
    threads = spec.server.settings.get("threads")
    if measured := find_times(target, engine, dtype=dtype, threads=threads):
        acceptance = f"plan.acceptance_rates={rates}"
        return [advise_engine(times, rates, acceptance=acceptance) for times in measured]
    words = [
        word.lstrip("+") for word in spec.overrides if re.match(r"\+*(target|server)[.=]", word)
    ]
    command = shlex.join(["spectrain", "bench", "engine", *words])
    return [
        f"what drafting can gain for this target in {ENGINES[engine].title} was not measured on "
        f"this machine: {command}"
    ]


def advise_engines(runs: Sequence[ScoredRun]) -> list[dict[str, str]]:
    """Return a recommendation for each measurement of the target; [] if there are none."""
    return [advise_drafter(times, runs) for times in find_times(runs[0].target)]


def advise_drafter(times: EngineTimes, runs: Sequence[ScoredRun]) -> dict[str, str]:
    """Return the drafter whose chain gains most in an engine, or none if none is faster than
    decoding without one.
    """
    ratios = times.ratios(times.lengths[0])
    speedups: dict[str, tuple[float, Sequence[float], dict[int, float] | None]] = {}
    for run in runs:
        by_position = chain_rates(run.summary)
        own_ratios = times.own_ratios(find_run(run.folder))
        if predicted := predict_speedups(own_ratios or ratios, by_position):
            speedups[run.name] = (max(predicted.values()), by_position, own_ratios)
    goal = f"in {ENGINES[times.engine].title}"
    if not speedups:
        return {"goal": goal, "choice": "unknown", "because": advise_engine(times)}
    name, (speedup, rates, own) = max(speedups.items(), key=lambda item: item[1][0])
    text = advise_engine(times, rates, own, f"the measured acceptance of {name}'s chain")
    return {"goal": goal, "choice": name if speedup > 1 else "no drafter", "because": text}


def find_run(folder: Path) -> str:
    """Return the run folder of an evaluation's folder."""
    return str(folder.parents[1])
