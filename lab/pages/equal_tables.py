"""Tables of drafters and ways to train them beside their bases, after the same tokens."""

from typing import Any

from lab.pages.results_tables import format_interval, format_length, format_speed, format_table

TITLES = (
    "tokens per forward",
    "by seed",
    "relative to the base",
    "speed",
    "speed relative to the base",
)


def equal_tables(results: dict[str, Any]) -> str:
    """Return one table for each group, the base in its first row."""
    parts = []
    for group, rows in results["groups"].items():
        name = f"## {group[0].upper()}{group[1:]}"
        parts += [name, format_table(("drafter", *TITLES), [describe_row(row) for row in rows])]
    return "\n\n".join(parts)


def describe_row(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row; a ratio in bold excludes 1 for all prompts, and lies on one
    side of it for every seed.
    """
    by_seed = ", ".join(f"{value:.2f}" for value in row["by_seed"])
    ratios = (row.get("tokens_ratio"), row.get("speed_ratio"))
    tokens, speed = map(describe_ratio, ratios)
    return [row["name"], format_length(row), by_seed, tokens, format_speed(row), speed]


def describe_ratio(ratio: dict[str, Any] | None) -> str:
    """Return a ratio to the base with its interval; the base itself has none."""
    if ratio is None:
        return "1"
    text = f"{ratio['ratio']:.2f} {format_interval(ratio['ci95'])}"
    return f"**{text}**" if ratio["differs"] else text
