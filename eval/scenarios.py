"""Which drafter to take where a setting grows: the number of users, the length of the context,
or the temperature.
"""

from collections.abc import Collection, Sequence
from typing import Any

from spectrain.eval.axes.tables import describe_crossover, name_value
from spectrain.eval.columns import format_interval

SCENARIOS = {"batch": "many users", "context": "long context", "temperature": "high temperature"}
"""Setting eval.sweep -> the scenario that its largest value stands for."""


def advise_axis(axes: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Choose the fastest drafter at the largest value that all of these sweeps measured, and say
    where each stops to pay.
    """
    over = axes[0]["over"]
    shared = set.intersection(*({point["value"] for point in axis["points"]} for axis in axes))
    if not shared:
        return "unknown", "The sweeps have no value in common; repeat them with the same values."
    value = max(shared)
    points = {
        axis["name"]: next(point for point in axis["points"] if point["value"] == value)
        for axis in axes
    }
    best = max(points, key=lambda name: float(points[name]["speedup"]))
    point = points[best]
    ends = format_interval(point["ci95"])
    measured = (
        f"{point['speedup']:.2f}x{f' (95 % {ends})' if ends else ''} at {name_value(over, value)}"
    )
    limits = " ".join(f"{axis['name']}: {describe_crossover(axis)}." for axis in axes)
    if point["speedup"] <= 1:
        return "no drafter", f"The best, {best}, reaches {measured}. {limits}"
    return best, f"{measured}. {limits}"


def describe_missing(goals: Collection[str]) -> tuple[str, str] | None:
    """Name the scenarios without a recommendation, and the command that measures the first of
    them; None if all have one.
    """
    missing = {scenario: over for over, scenario in SCENARIOS.items() if scenario not in goals}
    if not missing:
        return None
    sweep = next(iter(missing.values()))
    return ", ".join(
        missing
    ), f"Measure it for each run with spectrain eval run=RUN eval.sweep={sweep} eval.name={sweep}."
