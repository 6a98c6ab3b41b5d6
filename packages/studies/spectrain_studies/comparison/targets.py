"""Finished runs of several targets in one comparison: each target's drafters among themselves, and
what each kind of drafter gains on each target.

Answers of different targets are different texts in different tokens, so their speeds are not ranked
against each other. A speedup is over the same target without a drafter, so speedups stand side by
side.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrain.eval.columns import format_number

from .recommendations import compare_runs
from .scored_runs import ScoredRun, check_same, describe_setting


def group_by_target(runs: Sequence[ScoredRun]) -> dict[str, list[ScoredRun]]:
    """Return the runs of each target, in the order in which targets are named first."""
    groups: dict[str, list[ScoredRun]] = {}
    for run in runs:
        groups.setdefault(run.target, []).append(run)
    return groups


def compare_targets(runs: Sequence[ScoredRun], folder: Path) -> dict[str, Any]:
    """Return the content of comparison.json about runs of several targets; paths in it are relative
    to `folder`.
    """
    check_same(runs, has_one_target=False)
    groups = group_by_target(runs)
    parts = {target: compare_runs(group, folder) for target, group in groups.items()}
    rows = [
        {**row, "target": target, "label": f"{row['label']} on {target}"}
        for target, part in parts.items()
        for row in part["rows"]
    ]
    caveats = [
        "Tokens per second of different targets count different tokens of different answers, so "
        "only speedups and tokens per forward stand side by side.",
        *(
            f"{target}: {sentence}"
            for target, part in parts.items()
            for sentence in part["caveats"]
        ),
    ]
    advice = [
        {**entry, "goal": f"{entry['goal']} on {target}"}
        for target, part in parts.items()
        for entry in part["recommendations"]
        if entry["goal"] == "one user"
    ]
    types = ", ".join(dict.fromkeys(str(run.eval_setting["dtype"]) for run in runs))
    return {
        "setting": {
            **describe_setting(runs, None),
            "target": ", ".join(groups),
            "targets": [*groups],
            "dtype": types,
        },
        "rows": rows,
        "axes": {},
        "recommendations": [*advice, *describe_families(rows)],
        "caveats": caveats,
    }


def describe_families(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Say what each family of drafters that several targets have makes on each of them."""
    families: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        best = families.setdefault(str(row["family"]), {})
        if row["target"] not in best or measure_length(best[row["target"]]) < measure_length(row):
            best[row["target"]] = row
    return [
        {
            "goal": f"{family} by target",
            "choice": max(best, key=lambda target: measure_length(best[target])),
            "because": "Tokens per forward: "
            + ", ".join(
                f"{format_number(measure_length(row))} on {target}" for target, row in best.items()
            )
            + ".",
        }
        for family, best in families.items()
        if len(best) > 1
    ]


def measure_length(row: dict[str, Any]) -> float:
    """Return the tokens per forward of a row's first system."""
    return float(row["systems"][0]["acceptance_length"]["pooled"])
