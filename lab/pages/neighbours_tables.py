"""The table of decoding beside other processes."""

from typing import Any

from lab.pages.results_tables import format_interval, format_table, list_facts

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
    measured = [case for case in result["cases"] if "setting" in case]
    lines = dict.fromkeys(
        f"- {case['questions']}: {list_facts(case['setting'])}." for case in measured
    )
    return f"{table}\n\nSettings:\n\n" + "\n".join(lines)
