"""Tables of trainings by spectrain and by the speculators library, with intervals over seeds and
prompts.
"""

import textwrap
from collections import defaultdict
from typing import Any

from lab.benchmarks.pooled_lengths import (
    Run,
    pool_lengths,
    quantiles,
    resample_lengths,
    resample_prompts,
)
from lab.pages.results_tables import describe_setting, format_interval, format_table, training_table

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


def methods_tables(ways: dict[str, Any], trials: dict[str, Any]) -> str:
    """Return the tables of the page of training methods."""
    note = (
        "EAGLE-3 on tiny, 81 thousand tokens in batches of 512, three unrolled steps. A row holds "
        "tokens per forward and the ratio to the row that it changes, paired by seeds and "
        "prompts, with its interval over both. Lengths are computed over the target's answers to "
        "72 held-out prompts of 64 tokens: every round starts where the last one ended, and the "
        "tree is a fixed one of 16 nodes (4, 6, 4 and 1 by depth). A ratio of one seed says "
        "little about other seeds."
    )
    return (
        f"{training_table(ways)}\n\n## Changes of EAGLE-3's "
        f"training\n\n{fill_text(note)}\n\n{trials_table(trials)}"
    )


def fill_text(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 128, break_long_words=False, break_on_hyphens=False))


def held_out_table(rows: list[dict[str, Any]]) -> str:
    """Return what drafters draft right on held-out text, by their start and training."""
    cells = [
        [
            row["start"],
            f"{row['chain']:.3f}",
            f"{row['top3']:.3f}",
            *(" ".join(f"{x:.2f}" for x in row[key]) for key in ("agreement", "kl")),
        ]
        for row in rows
    ]
    return format_table(
        ["start and training", "chain of 3", "any of 3", "right by step", "KL by step"], cells
    )


def fitted_tables(fitted: dict[str, Any]) -> str:
    """Return what drafters of SmolLM2 draft right on two sets of held-out text, by their start
    and training.
    """
    later = fitted["later"]
    note = (
        "SmolLM2, 69 thousand tokens, seed 0, on 13,036 positions of 80 held-out conversations, "
        "with the true tokens as input: tokens per forward of chains of three, the same where any "
        "of the three likeliest tokens of each step counts, and by draft step the share of right "
        "tokens and KL(p || q). Rows with a frozen output layer, and the one with AdamW at 5e-4, "
        "were run when the feed-forward block was fitted over two draft steps, which changes an "
        "untrained drafter by less than 1 %. A script that is not part of the project measured "
        "them."
    )
    note_later = (
        f"Later changes, on {later['positions']:,} positions of 80 held-out conversations, which "
        "are chosen otherwise, so only rows of this table can be compared. Those with Muon have "
        "`drafter.step_decay=1`, `schedule=linear`, `trainer.clip=1`."
    )
    tables = [held_out_table(part["rows"]) for part in (fitted, later)]
    settings = [describe_setting(part) for part in (fitted, later)]
    return "\n\n".join(
        [
            "## Fitted initial weights",
            settings[0],
            fill_text(note),
            tables[0],
            fill_text(note_later),
            settings[1],
            tables[1],
        ]
    )


def speculators_tables(
    result: dict[str, Any], fitted: dict[str, Any], trials: dict[str, Any], pace: dict[str, Any]
) -> str:
    """Return the comparison by target and budget, the grid of rates, the fitted start, changes of
    spectrain's training, and the pace of both."""
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
    note = (
        "All but `start=random` start as `drafter.start=target`. One run each, seed 0. A row "
        "holds tokens per forward and the ratio to the heading row above it, over the same "
        "prompts; other seeds differ by up to 4 %. The three norms are `norm_before_fc`, "
        "`norm_before_residual` and `norm_output` of `drafter.architecture`, which the library "
        "has by default. `--changes` of the benchmark gives these settings. The output layer was "
        "frozen by hand, before `drafter.freeze_output` did that."
    )
    changes = (
        "## Changes of spectrain's "
        f"training\n\n{describe_setting(trials)}\n\n{fill_text(note)}\n\n{trials_table(trials)}"
    )
    return "\n\n".join([*parts, fitted_tables(fitted), changes, pace_table(pace)])


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
    table = format_table(
        ["trained by", "seconds per step from given features", "tokens per second"], rows
    )
    note = f"The target's forward takes {seconds['target']:.2f} seconds in both."
    heading = (
        "## Pace at SmolLM2's size\n\n```sh\npython -m lab.benchmarks.against_speculators --pace "
        "10\n```"
    )
    return f"{heading}\n\n{describe_setting(pace)}\n\n{table}\n\n{note}"
