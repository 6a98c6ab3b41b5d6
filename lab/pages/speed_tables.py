"""Tables of speeds that a declaration cannot compute: sweeps, engines, neighbours, goals."""

from collections.abc import Iterable
from typing import Any

from lab.benchmarks.report import GOALS_PATH, render_goals
from lab.pages.render import format_interval, format_table, list_facts
from spectrain.servers.engines import ENGINES
from spectrain_serve.times.row_times import CONTENT, SPEEDUPS, EngineTimes
from spectrain_serve.times.table import format_requirement
from spectrain_studies.axes.tables import axis_markdown

AXES = {
    "batch": "Prompts at once, and simulated load",
    "context": "Tokens of the prompt",
    "temperature": "Temperature",
}
TARGETS = {"tiny": "the tiny target", "smollm2": "SmolLM2-135M"}
NEIGHBOURS = {
    "none": "none",
    "one": "one",
    "two": "two",
    "changing": "one, every other five seconds",
}
SCORED_SYSTEMS = {
    "copies": "drafter + retrieval",
    "drafter": "drafter",
    "retrieval": "retrieval alone",
    "ngram": "n-gram lookup",
}
THREAD_POLICIES = {
    "fixed": "two, which spin",
    "spin": "measured, which spin",
    "sleep": "measured, which sleep",
}


def axes_tables(results: dict[str, Any]) -> str:
    """Return the tables of every axis and target, with the sentences about each drafter."""
    parts = []
    for over, title in AXES.items():
        for target, label in TARGETS.items():
            named = [
                {"name": name, **axes[over]}
                for name, axes in results["rows"].get(target, {}).items()
                if over in axes
            ]
            if named:
                parts += [f"## {title}: {label}", axis_markdown(named), *describe_later(named)]
    return "\n\n".join(parts)


def describe_later(named: list[dict[str, Any]]) -> list[str]:
    """Return a list of the sweeps that were measured apart from the others, with their settings;
    empty where there are none.
    """
    lines = [f"- {axis['name']}: {list_facts(axis)}." for axis in named if "commit" in axis]
    is_apart = 0 < len(lines) < len(named)
    return ["Measured later than the other rows:\n\n" + "\n".join(lines)] if is_apart else []


def engine_table(result: dict[str, Any]) -> str:
    """Return the forwards of each engine with the acceptance that they need."""
    measured = [CONTENT.validate_python(each) for each in result["measurements"]]
    titles = ["engine", "text", "drafted", "forward, ms", "quartiles", "ratio to one row"]
    titles += [f"tokens for {speedup:g}x" for speedup in SPEEDUPS]
    return format_table(titles, (row for each in measured for row in engine_rows(each)))


def check_table(result: dict[str, Any]) -> str:
    """Return predicted and measured speedups of the shipped drafter."""
    titles = [
        "engine",
        "drafted",
        "round, ratio to one row",
        "tokens per forward",
        "predicted",
        "measured",
        "predicted / measured",
    ]
    checks = (
        (
            each["engine"],
            str(each["drafts"]),
            f"{each['round_ratio']:.2f}",
            f"{each['tokens']:.2f}",
            f"{each['predicted']:.2f}x",
            f"{each['measured']:.2f}x {format_interval(each['ci95'])}",
            f"{each['predicted'] / each['measured']:.2f}",
        )
        for each in result["checks"]
    )
    return format_table(titles, checks)


def engine_rows(times: EngineTimes) -> Iterable[Iterable[str]]:
    """Return the rows of one measurement."""
    for length in times.lengths:
        ratios = {0: 1.0, **times.ratios(length)}
        for forward in (each for each in times.forwards if each.length == length):
            count = forward.rows - 1
            spread = forward.seconds
            yield [
                f"{ENGINES[times.engine].title}, {times.dtype}, {times.threads} "
                f"thread{'s' * (times.threads != 1)}",
                str(length),
                str(count),
                f"{1000 * spread.median:.1f}",
                f"{1000 * spread.low:.1f} to {1000 * spread.high:.1f}",
                f"{ratios[count]:.2f}",
                *(format_requirement(speedup * ratios[count], count) for speedup in SPEEDUPS),
            ]


def neighbours_table(result: dict[str, Any]) -> str:
    """Return plain and drafted decoding beside each load, by prompts and by policy for threads."""
    cases = {(case["questions"], case["load"], case["policy"]): case for case in result["cases"]}
    measured = {row["name"] for case in cases.values() for row in case["rows"]}
    names = [name for name in SCORED_SYSTEMS if name in measured]
    rows = []
    prompts = list(dict.fromkeys(case["questions"] for case in result["cases"]))
    for key in [
        (name, load, policy)
        for name in prompts
        for load in NEIGHBOURS
        for policy in THREAD_POLICIES
    ]:
        if key not in cases:
            continue
        case = cases[key]
        words = [key[0], NEIGHBOURS[key[1]], THREAD_POLICIES[key[2]]]
        systems = {row["name"]: row for row in case["rows"]}
        if not systems:
            rows.append([*words, f"not done in {case['seconds']:.0f} s", "", *("" for _ in names)])
            continue
        cells = [
            f"{row['speedup']:.2f} {format_interval(row['ci95'])}, {row['tokens_per_forward']:.2f}"
            if row
            else ""
            for row in (systems.get(name) for name in names)
        ]
        plain = case["plain_tokens_per_second"]
        drafted = systems["copies"]["tokens_per_second"]
        rows.append([*words, f"{plain:.1f}", f"{drafted:.1f}", *cells])
    speeds = ["plain, tokens per second", "drafter + retrieval, tokens per second"]
    table = format_table(
        ["prompts", "neighbours", "threads", *speeds, *(SCORED_SYSTEMS[name] for name in names)],
        rows,
    )
    lines = dict.fromkeys(
        f"- {case['questions']}: {list_facts(case['setting'])}."
        for case in result["cases"]
        if "setting" in case
    )
    return f"{table}\n\nSettings:\n\n" + "\n".join(lines)


def goals_table(_: Any) -> str:
    """Return the goals on a GPU, with what was measured of them."""
    return render_goals(GOALS_PATH.parent)
