"""How many tokens to draft under which load, in the forms that engines read: on the model card, and
in files beside the drafter.

Measured numbers come from the run's evaluations: `eval.sweep=batch` of a chain, and
`eval.confidence=true`.

vLLM reads a key of its options. The files are SGLang's. Their forms were read in SGLang's source
(`adaptive_spec_params.py`, `dspark_sps_table.py`, `dspark_sts.py`) and were not run here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spectrain.export.drafter_files import write_json
from spectrain.servers.advice import Scores
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain.servers.sglang_command import COSTS_OPTION

SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
"""vLLM's setting for draft tokens by the number of requests."""
ADAPTIVE_METHODS = ("EAGLE", "EAGLE3")
"""SGLang's methods whose draft tokens may differ from round to round."""
STEPS_FILE = "sglang_steps.json"
COSTS_FILE = "sglang_costs.json"
TEMPERATURES_FILE = "sglang_temperatures.json"
TEMPERATURES_OPTION = "--speculative-dspark-confidence-sts-path"


@dataclass(frozen=True)
class Schedules:
    """What the evaluations of a run say about lengths, each with the name of its evaluation; None
    where nothing was measured.
    """

    # Of a sweep over batch sizes: draft tokens by number of texts, gains, times of forwards.
    load: tuple[str, dict[str, Any]] | None
    # Temperatures of the drafter's estimates by position, and the calibration errors.
    confidence: tuple[str, dict[str, Any]] | None


def find_schedules(scores: Scores) -> Schedules | None:
    """Return what the evaluations say about lengths; None where they say nothing."""
    load = confidence = None
    for name, summary in scores.items():
        schedule = ((summary.get("axis") or {}).get("load") or {}).get("schedule")
        if load is None and schedule and any(length for _, _, length in schedule["ranges"]):
            load = name, schedule
        if confidence is None and summary.get("confidence"):
            confidence = name, summary["confidence"]
    return Schedules(load, confidence) if load or confidence else None


def schedule_launches(
    launches: Mapping[str, EngineLaunch], schedules: Schedules
) -> dict[str, EngineLaunch]:
    """Return the launches of the engines that read a schedule, with it."""
    scheduled = {}
    for name, launch in launches.items():
        if launch.drafter is not None and (
            drafter := _add_options(name, launch.drafter, schedules)
        ):
            scheduled[name] = replace(launch, drafter=drafter)
    return scheduled


def _add_options(engine: str, drafter: DrafterLaunch, schedules: Schedules) -> DrafterLaunch | None:
    if engine == "vllm" and schedules.load:
        options = {SCHEDULE_KEY: schedules.load[1]["ranges"]}
        return replace(drafter, num_tokens=schedules.load[1]["num_tokens"], options=options)
    if engine != "sglang" or drafter.path is None:
        return None
    files = {file: f"{drafter.path}/{file}" for file in list_files(drafter, schedules)}
    if STEPS_FILE in files:
        assert schedules.load is not None
        options = {
            "--speculative-adaptive": True,
            "--speculative-adaptive-config": files[STEPS_FILE],
        }
        return replace(drafter, num_tokens=schedules.load[1]["num_tokens"], options=options)
    options = {
        TEMPERATURES_OPTION: files.get(TEMPERATURES_FILE),
        COSTS_OPTION: files.get(COSTS_FILE),
    }
    given = {option: path for option, path in options.items() if path}
    return replace(drafter, options={**drafter.options, **given}) if given else None


def list_files(drafter: DrafterLaunch, schedules: Schedules) -> dict[str, Any]:
    """Return file -> content of what SGLang reads for this drafter."""
    load = None if schedules.load is None else schedules.load[1]
    if drafter.method in ADAPTIVE_METHODS and load is not None:
        return {STEPS_FILE: list_steps(load["ranges"])}
    # A cost table makes SGLang choose lengths by confidence, which its drafter must have.
    if drafter.method != "DSPARK" or schedules.confidence is None:
        return {}
    name, content = schedules.confidence
    if len(content["temperatures"]) != drafter.num_tokens:
        # SGLang drafts a whole block and needs a temperature for each of its tokens.
        return {}
    files: dict[str, Any] = {
        TEMPERATURES_FILE: {
            **{key: content[key] for key in ("temperatures", "ece_before", "ece_after")},
            "num_samples": content["rounds"],
            "dataset": name,
        }
    }
    if load is not None and load.get("costs"):
        files[COSTS_FILE] = load["costs"]
    return files


def list_steps(ranges: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return SGLang's form of ranges [first number of requests, last one, draft tokens]: from each
    number of requests on, one number of draft steps, so that the engine keeps to it.
    """
    return {str(first): {"candidate_steps": [length]} for first, _, length in ranges}


def write_schedules(
    folder: Path, scores: Scores, launches: Mapping[str, EngineLaunch]
) -> list[str]:
    """Write the files that SGLang reads into an export; return their names."""
    schedules = find_schedules(scores)
    launch = launches.get("sglang")
    if schedules is None or launch is None or launch.drafter is None or launch.drafter.path is None:
        return []
    files = list_files(launch.drafter, schedules)
    for name, content in files.items():
        write_json(folder / name, content)
    return [*files]


def describe_schedules(schedules: Schedules, commands: Sequence[str]) -> list[str]:
    """Return the card's section on lengths by load, with the engines' commands; [] where no engine
    reads the layout and a schedule.
    """
    if not commands:
        return []
    lines = ["## Draft tokens by load", ""]
    if schedules.load is not None:
        name, content = schedules.load
        gains = content["gains"]
        lines += [
            f"The evaluation {name} measured times of several numbers of texts at once. By these, "
            "an engine should draft so many tokens, as [first number of requests, last one, draft "
            f"tokens]: {content['ranges']}. Simulated at {len(gains)} rates of arrivals, always "
            f"{content['num_tokens']} draft tokens take {min(gains):.2f} to {max(gains):.2f} times "
            "the time per token of this schedule. The times are those of spectrain's own engine; "
            "measure again on the machine that serves.",
            "",
        ]
    if schedules.confidence is not None:
        name, content = schedules.confidence
        lines += [describe_confidence(f"The evaluation {name}", content), ""]
    return [*lines, *commands]


def describe_confidence(source: str, content: Mapping[str, Any]) -> str:
    """Say what calibration does to the drafter's estimates of acceptance."""
    temperatures, before, after = (
        " ".join(format(value, digits) for value in content[key])
        for key, digits in (("temperatures", ".2f"), ("ece_before", ".3f"), ("ece_after", ".3f"))
    )
    return (
        f"The drafter estimates how many of its tokens are accepted. {source} fitted "
        f"temperatures by position to {content['rounds']} rounds: {temperatures}. On "
        f"{content['judged_rounds']} rounds of other prompts the expected calibration error of "
        f"accepting all tokens up to a position is {before} without them and {after} with them."
    )
