"""Which drafter of a comparison to take for what, and why; and the comparison as a table."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spectrain.eval.columns import format_interval, is_quotable
from spectrain.eval.intervals import Interval, interval
from spectrain.servers.advice import list_engine_advice
from spectrain_studies.axes.tables import describe_crossover, name_value

from .scored_runs import (
    SPEED_COLUMNS,
    ScoredRun,
    check_same,
    collect_axes,
    describe_setting,
    list_differences,
    make_row,
    ranking_engine,
)

SPEED_SIGNS = (1, -1, -1, 1)  # drafted tokens per second over autoregressive ones
SCENARIOS = {"batch": "many users", "context": "long context", "temperature": "high temperature"}
"""Setting eval.sweep -> the scenario that its largest value stands for."""


@dataclass
class Variant:
    """A drafter with one of its trees, which a recommendation names."""

    run: ScoredRun
    system: str
    entry: dict[str, Any]
    row: dict[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.run.name} ({self.entry['label']})"

    @property
    def speedup(self) -> float:
        return float(self.entry["speedup"]["ratio"])

    @property
    def length(self) -> float:
        """Tokens per forward of the target, with the forwards that draft counted too."""
        return float(self.entry["acceptance_length"]["pooled"]) / self.run.forwards

    @property
    def is_quotable(self) -> bool:
        """Whether its speedup may be quoted: the machine was quiet, and it is within its tokens
        per forward.
        """
        return is_quotable(self.entry["speedup"]) and not self.run.is_noisy

    def equals(self, other: "Variant") -> bool | None:
        """Tell whether the 95 % interval of the ratio of the two speedups holds 1; None where
        there is no interval.
        """
        ends = ratio_interval(self, other)
        return None if ends is None else ends[0] <= 1 <= ends[1]


def ratio_interval(variant: Variant, other: Variant) -> Interval:
    """Return the 95 % interval of one speedup over the other, prompt by prompt on the same prompts.

    Returns None where either speedup has no interval, for example because prompts that are decoded
    together share their time.
    """
    if any(each.entry["speedup"]["ci95"] is None for each in (variant, other)):
        return None
    first = variant.run.columns(variant.system)
    second = other.run.columns(other.system)
    if len(first["tokens"]) != len(second["tokens"]):
        return None
    columns = np.stack([part[key] for part in (first, second) for key in SPEED_COLUMNS], axis=-1)
    return interval(columns, (*SPEED_SIGNS, *(-sign for sign in SPEED_SIGNS)))


def compare_runs(
    runs: Sequence[ScoredRun], folder: Path, budget: str | None = None
) -> dict[str, Any]:
    """Return the content of comparison.json; paths in it are relative to `folder`. Raise
    UserError for unlike runs.
    """
    check_same(runs)
    rows = [make_row(run, folder) for run in runs]
    variants = [
        Variant(run, system, entry, row)
        for run, row in zip(runs, rows)
        for system, entry in run.systems().items()
    ]
    axes = collect_axes(runs)
    advice = complete_scenarios(recommend(variants), variants, axes)
    by_engine = [
        entry for advice in list_engine_advice() for entry in advice.recommend_drafters(runs)
    ]
    return {
        "setting": describe_setting(runs, budget),
        "rows": rows,
        "axes": axes,
        "recommendations": [*advice, *advise_sampling(runs), *by_engine],
        "caveats": list_differences(runs),
    }


def recommend(variants: Sequence[Variant]) -> list[dict[str, str]]:
    """Say for each goal that a user may have which variant to take, and why."""
    engine = ranking_engine([variant.run for variant in variants])
    untrained = [
        variant
        for variant in variants
        if variant.row["lossless_to"] == "target" and not variant.row["trained"]
    ]
    variants = [variant for variant in variants if variant.run.engine == engine]
    exact = [variant for variant in variants if variant.row["lossless_to"] == "target"]
    if exact and not any(variant.entry["speedup"] for variant in exact):
        return [make_advice("tokens per forward", advise_length(exact))]
    variants, exact = (
        [each for each in part if each.entry["speedup"]] for part in (variants, exact)
    )
    if not exact:
        return [
            make_advice(
                "any", ("none", "No drafter leaves the target's output unchanged under this rule.")
            )
        ]
    quotable = [variant for variant in exact if variant.is_quotable]
    if not quotable:
        return [
            make_advice("one user", refuse_noisy(exact)),
            make_advice("tokens per forward", advise_length(exact)),
        ]
    advice = [
        make_advice(
            "one user",
            advise_latency(quotable, [variant for variant in variants if variant.is_quotable]),
        )
    ]
    if any(variant.row["batched"] for variant in exact):
        advice.append(make_advice("many users", advise_throughput(exact)))
    if any(variant.row["extra_memory"] is not None for variant in exact):
        advice.append(make_advice("little memory", advise_memory(quotable)))
    if untrained and any(variant.row["trained"] for variant in exact):
        without = [
            variant for variant in untrained if variant.entry["speedup"] and variant.is_quotable
        ]
        advice.append(
            make_advice(
                "no training",
                advise_latency(without, without) if without else refuse_noisy(untrained),
            )
        )
    return advice


def refuse_noisy(variants: Sequence[Variant]) -> tuple[str, str]:
    """Recommend none of drafters whose speedups may not be quoted, and say why they may not."""
    reasons = [
        (variant.run.summary.get("speedup") or variant.entry["speedup"] or {}).get("reason")
        for variant in variants
    ]
    reason = next(filter(None, reasons), "none was measured")
    return "none", f"No speedup of them may be quoted: {reason}."


def complete_scenarios(
    advice: list[dict[str, str]], variants: Sequence[Variant], axes: dict[str, list[dict[str, Any]]]
) -> list[dict[str, str]]:
    """Add the scenarios that sweeps and categories decide, and name those that nothing was
    measured for.
    """
    exact = {
        variant.run.name
        for variant in variants
        if variant.row["lossless_to"] == "target" and not variant.run.is_noisy
    }
    swept = {}
    for over, scenario in SCENARIOS.items():
        if lines := [axis for axis in axes.get(over, []) if axis["name"] in exact]:
            swept[scenario] = make_advice(scenario, advise_axis(lines))
    if "many users" in swept:
        advice = [item for item in advice if item["goal"] != "many users"]
    if domains := advise_domains([variant for variant in variants if variant.run.name in exact]):
        swept["changing domain"] = make_advice("changing domain", domains)
    advice = [*advice, *swept.values()]
    missing = describe_missing({item["goal"] for item in advice}) if exact else None
    return [*advice, *([] if missing is None else [make_advice("not measured", missing)])]


def advise_domains(exact: Sequence[Variant]) -> tuple[str, str] | None:
    """Choose the drafter whose worst category of prompts is fastest; None if there is one
    category only.
    """

    def worst(variant: Variant) -> tuple[str, float]:
        categories = variant.entry.get("by_category") or {}
        return min(
            ((name, float(numbers["speedup"])) for name, numbers in categories.items()),
            key=lambda pair: pair[1],
        )

    # With eval.context, categories are lengths.
    exact = [variant for variant in exact if not variant.run.eval_setting.get("context")]
    measured = [variant for variant in exact if variant.entry["speedup"] and variant.is_quotable]
    judged = [variant for variant in measured if len(variant.entry.get("by_category") or {}) > 1]
    if not judged:
        return None
    best = max(judged, key=lambda variant: worst(variant)[1])
    category, speedup = worst(best)
    text = (
        f"Its worst category, {category}, runs at {speedup:.2f}x, the most of all drafters' "
        "worst ones."
    )
    return (
        ("no drafter", f"{best.name} is best: {text[0].lower()}{text[1:]}")
        if speedup <= 1
        else (best.name, text)
    )


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


def make_advice(goal: str, choice: tuple[str, str]) -> dict[str, str]:
    """Return an entry of the recommendations from a choice and its reason."""
    return {"goal": goal, "choice": choice[0], "because": choice[1]}


def advise_sampling(runs: Sequence[ScoredRun]) -> list[dict[str, str]]:
    """Advise acceptance=sample if calibration measured that sampling the children accepts more
    than sample-and-match.
    """
    rules = {run.name: run.summary["rules"] for run in runs if run.summary.get("rules")}
    better = {
        name: forecast for name, forecast in rules.items() if forecast["better"] == "recursive"
    }
    if not better or runs[0].eval_setting["rule"] == "sample":
        return []
    lengths = ", ".join(
        f"{name} {forecast['match']['forecast']:.2f} to {forecast['recursive']['forecast']:.2f}"
        for name, forecast in better.items()
    )
    reason = (
        "It samples children without replacement where that accepts more. By calibration, tokens "
        f"per forward rise where drafters are unsure: {lengths}."
    )
    return [make_advice("sampling", ("acceptance=sample", reason))]


def advise_latency(exact: Sequence[Variant], variants: Sequence[Variant]) -> tuple[str, str]:
    """Choose the fastest of the variants whose output is the target's, or none if none is
    faster.
    """
    best = max(exact, key=lambda variant: variant.speedup)
    if best.speedup <= 1:
        longest = max(exact, key=lambda variant: variant.length)
        return "no drafter", (
            f"No drafter is faster than decoding without one here: the best, {best.name}, reaches "
            f"{best.speedup:.2f}x. If verifying several tokens costs little more than one, "
            f"{longest.name} gains most: {longest.length:.2f} tokens per forward."
        )
    ends = best.entry["speedup"]["ci95"]
    predicted = best.entry["speedup"]["predicted"]
    prediction = "" if predicted is None else f"{predicted:.2f}x predicted, "
    text = (
        f"{best.speedup:.2f}x measured{format_ends(ends)}, {prediction}{best.length:.2f} tokens "
        "per forward."
    )
    if ends is None:
        text += (
            " The gain has no interval: score more prompts, one at a time, before relying on it."
        )
    elif ends[0] <= 1:
        text += " The gain is uncertain: score more prompts before relying on it."
    rivals = [
        variant.name for variant in exact if variant.run is not best.run and best.equals(variant)
    ]
    if rivals:
        text += f" Not significantly different on these prompts: {', '.join(rivals)}."
    changed = [variant for variant in variants if variant.row["lossless_to"] == "trained target"]
    fastest = max(changed, key=lambda variant: variant.speedup, default=None)
    if fastest is not None and fastest.speedup > best.speedup and not fastest.equals(best):
        text += (
            f" {fastest.name} is faster still, {fastest.speedup:.2f}x, but changes the "
            "target's output."
        )
    return best.name, text


def advise_length(exact: Sequence[Variant]) -> tuple[str, str]:
    """Choose the drafter with most tokens per forward, where no speedup was measured or none may
    be quoted.
    """
    longest = max(exact, key=lambda variant: variant.length)
    was_measured = any(variant.entry["speedup"] for variant in exact)
    missing = (
        "no speedup may be quoted" if was_measured else "nothing was measured without a drafter"
    )
    return longest.name, f"{longest.length:.2f} tokens per forward; {missing}."


def advise_throughput(exact: Sequence[Variant]) -> tuple[str, str]:
    """Choose the fastest drafter for several prompts at once."""
    batches = [variant for variant in exact if variant.row["batched"]]
    rows = {
        variant.run.name: variant.row
        for variant in batches
        if not variant.run.is_noisy and variant.row["batched"]["speedup"].get("quotable", True)
    }
    if not rows:
        size = batches[0].row["batched"]["batch_size"]
        return (
            "none",
            f"No speedup with {size} prompts at once may be quoted: the machine was not quiet.",
        )
    name, row = max(rows.items(), key=lambda item: item[1]["batched"]["speedup"]["ratio"])
    batched = row["batched"]
    ratio = batched["speedup"]["ratio"]
    size = batched["batch_size"]
    label = batched["label"]
    if ratio <= 1:
        return "no drafter", (
            f"With {size} prompts at once no drafter is faster than decoding without one: the "
            f"best, {name} ({label}), reaches {ratio:.2f}x."
        )
    return f"{name} ({label})", f"{ratio:.2f}x with {size} prompts at once."


def advise_memory(exact: Sequence[Variant]) -> tuple[str, str]:
    """Choose the drafter that adds least memory of those that are faster than decoding without one,
    and have at least half of the longest's gain in tokens per forward."""
    faster = [variant for variant in exact if variant.speedup > 1]
    if not faster:
        return (
            "none",
            "No drafter is faster than decoding without one, so none is worth its memory.",
        )
    longest = max(variant.length for variant in faster)
    good = [
        variant
        for variant in faster
        if variant.length - 1 >= (longest - 1) / 2 and variant.row["extra_memory"] is not None
    ]
    if not good:
        return (
            "unknown",
            "The drafters with the most tokens per forward were scored without their memory.",
        )
    best = min(good, key=lambda variant: (variant.row["extra_memory"], -variant.length))
    return best.name, (
        f"{best.row['extra_memory'] / 1e6:.1f} MB more than decoding without it, and "
        f"{best.length:.2f} tokens per forward; the most of all is {longest:.2f}."
    )


def format_ends(ends: Interval) -> str:
    """Format the ends of an interval in parentheses; "" without one."""
    return "" if ends is None else f" (95 % {ends[0]:.2f} to {ends[1]:.2f})"
