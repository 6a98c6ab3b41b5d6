"""Tables of trainings by spectrain and by the speculators library, with intervals over seeds and
prompts.
"""

from collections import defaultdict
from typing import Any

from lab.benchmarks.pooled_lengths import (
    Run,
    pool_lengths,
    quantiles,
    resample_lengths,
    resample_prompts,
)
from lab.pages.render import format_interval, format_table

TREES = {"chain": "chain of 3", "tree": "16 nodes, 5 deep"}
# The first two have drafter.start=fitted; the fourth had no heads that attend to their own position
# at the start.
SIDES = (
    "spectrain, fitted start",
    "spectrain, fitted start, frozen output layer",
    "spectrain",
    "spectrain, random heads",
    "speculators",
)


def describe_length(runs: list[Run], tree: str) -> str:
    """Return tokens per forward with the interval over seeds and prompts, and those of each
    seed.
    """
    interval = format_interval(
        quantiles(resample_lengths(runs, tree, resample_prompts(runs, tree)))
    )
    seeds = ", ".join(
        f"{pool_lengths([run], tree):.2f}" for run in sorted(runs, key=lambda run: run["seed"])
    )
    return f"{pool_lengths(runs, tree):.3f} {interval} ({seeds})"


def describe_ratio(runs: list[Run], baseline: list[Run], tree: str) -> str:
    """Return the ratio of tokens per forward over the same prompts, with its interval."""
    prompts = resample_prompts(runs, tree)
    interval = quantiles(
        resample_lengths(runs, tree, prompts) / resample_lengths(baseline, tree, prompts)
    )
    return (
        f"{pool_lengths(runs, tree) / pool_lengths(baseline, tree):.3f} {format_interval(interval)}"
    )


def describe_rates(rates: str) -> str:
    """Return an optimizer and its rates, as in Muon, 4e-3 and 2e-2."""
    optimizer, *values = rates.split(":")
    return f"{ {'adamw': 'AdamW', 'muon': 'Muon'}[optimizer] }, {' and '.join(values)}"


def group_runs(runs: list[Run]) -> dict[tuple[str, str], list[Run]]:
    """Group runs by side and rates."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run["side"], run["rates"]].append(run)
    return groups


def comparison_table(runs: list[Run]) -> str:
    """Return each side's best rates of each optimizer, among those with the most seeds, and the
    ratio of the best.
    """
    rows = []
    best = {}
    for side in SIDES:
        chosen = [choose_best(runs, side, optimizer) for optimizer in ("adamw", "muon")]
        groups = [group for group in chosen if group]
        rows += [
            [
                side,
                describe_rates(group[0]["rates"]),
                *(describe_length(group, tree) for tree in TREES),
            ]
            for group in groups
        ]
        best[side] = max(groups, key=lambda group: pool_lengths(group, "chain"), default=[])
    *own_sides, library = (best[side] for side in SIDES)
    own: list[Run] = next(filter(None, own_sides), [])
    if own and library:
        rows.append(
            [
                "ratio",
                "best of the first by best of the last",
                *(describe_ratio(own, library, tree) for tree in TREES),
            ]
        )
    return format_table(["trained by", "optimizer, rates", *TREES.values()], rows)


def choose_best(runs: list[Run], side: str, optimizer: str) -> list[Run]:
    """Return the runs of a side's best rates of an optimizer: those with the most seeds, then
    with the longest chains.
    """
    groups = [
        group
        for (by, rates), group in group_runs(runs).items()
        if by == side and rates.startswith(optimizer)
    ]
    return max(groups, key=lambda group: (len(group), pool_lengths(group, "chain")), default=[])


def grid_table(runs: list[Run]) -> str:
    """Return the runs of seed 0 at every rate of the grid."""
    groups = group_runs([run for run in runs if run["seed"] == 0])
    sides = [side for side in SIDES if any(by == side for by, _ in groups)]
    rows = []
    for rates in sorted({rates for _, rates in groups}):
        cells = [
            f"{pool_lengths(group, 'chain'):.2f}, {pool_lengths(group, 'tree'):.2f}"
            if group
            else "not run"
            for group in (groups.get((side, rates)) for side in sides)
        ]
        rows.append([describe_rates(rates), *cells])
    return format_table(["optimizer, rates", *(f"{side}: chain, tree" for side in sides)], rows)


def trials_table(result: dict[str, Any]) -> str:
    """Return changes of a training, each against the same training without it, paired by seeds
    and prompts.
    """
    rows = []
    for trial in result["trials"]:
        runs = [run for run in result["runs"] if run["name"] == trial["name"]]
        baseline = [run for run in result["runs"] if run["name"] == trial["against"]]
        if baseline:
            seeds = {run["seed"] for run in runs} & {run["seed"] for run in baseline}
            runs, baseline = (
                [run for run in group if run["seed"] in seeds] for group in (runs, baseline)
            )
        cells = [f"{pool_lengths(runs, tree):.3f}" for tree in TREES]
        if baseline:
            cells = [
                f"{cell}, {describe_ratio(runs, baseline, tree)}"
                for cell, tree in zip(cells, TREES)
            ]
        rows.append([trial["description"], str(len(runs)), *cells])
    return format_table(["change", "seeds", "chain of 3, ratio", "tree, ratio"], rows)


def budget_tables(result: dict[str, Any]) -> str:
    """Return the comparison by target and budget, and the grid of rates."""
    parts = []
    budgets = sorted(
        {(run["target"] != "tiny", run["passes"], run["target"]) for run in result["runs"]}
    )
    for _, passes, target in budgets:
        runs = [run for run in result["runs"] if (run["target"], run["passes"]) == (target, passes)]
        parts.append(
            f"## {target}, {runs[0]['tokens'] / 1e3:,.0f} thousand "
            f"tokens\n\n{comparison_table(runs)}"
        )
        if len({run["rates"] for run in runs}) > 4:
            parts.append(
                "### Rates\n\nSeed 0; rates of Muon are those of AdamW's part and of the "
                f"matrices.\n\n{grid_table(runs)}"
            )
    return "\n\n".join(parts)


def pace_table(pace: dict[str, Any]) -> str:
    """Return the seconds of a step of both sides."""
    seconds = pace["seconds_a_step"]
    speed = pace["tokens_a_second_from_features"]
    rows = [
        [label, f"{seconds[key]:.2f}", f"{speed[key]:,.0f}"]
        for label, key in (("spectrain", "ours"), ("speculators", "theirs"))
    ]
    rows.append(
        [
            "ratio",
            f"{pace['ratio_from_features']:.2f}",
            f"{pace['ratio_with_the_target']:.2f} with the target's forward",
        ]
    )
    titles = ["trained by", "seconds per step from given features", "tokens per second"]
    return format_table(titles, rows)
