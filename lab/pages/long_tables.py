"""Tables of drafters in long texts."""

from collections.abc import Sequence
from typing import Any

from lab.pages.render import format_interval, format_table

CHANGES = {
    "full": "none",
    "window": "`drafter.window=512`",
    "sinks": "the first 4 and the newest 508 positions of the prompt, numbered anew",
    "linear": "positions of the drafter divided by 16",
    "ntk": "base of the drafter's rotary embedding for 16 times the length (NTK)",
}
"""What the names of systems stand for."""


REMEDIES = {
    "512": ("none", ""),
    "window": ("`drafter.window=512`", ""),
    "sinks": ("the first 4 and the newest 508 positions of the prompt, numbered anew", ""),
    "rope-linear": ("positions of the drafter divided by 16", ""),
    "rope-ntk": ("NTK base for 16 times the length", ""),
    "more-512": ("training continued on texts of 512", "more"),
    "more-4096": ("training continued on texts of 4,096", "more"),
    "more-window": ("the same with `drafter.window=512`", "more"),
    "4096": ("training on texts of 4,096 from the start", "anew"),
}
"""What the names of systems of a family stand for, and what training they take."""


def target_tables(families: dict[str, Any], target: dict[str, Any], _: Any) -> str:
    """Return perplexity by position and by length of the context, and the share of words of
    repeated facts that are right.
    """
    names = {"all": "all tokens", "repeated": "repeated passages", "new": "new passages"}
    cells = [
        [title, *(f"{value:.2f}" for value in target["perplexity"][kind].values())]
        for kind, title in names.items()
    ]
    starts = [int(start) for start in target["lookups"]]
    titles = [f"{start:,}-{end:,}" for start, end in zip(starts, [*starts[1:], 8192])]
    shares = [
        f"{entry['right'] / entry['words']:.2f} of {entry['words']}"
        for entry in target["lookups"].values()
    ]
    limited = families["perplexity"]["last_tokens_by_context"]
    contexts = ["all" if length == "8192" else f"{int(length):,}" for length in limited]
    tables = [
        (["perplexity", *target["perplexity"]["all"]], cells),
        (
            ["tokens of context", *contexts],
            [
                [
                    "perplexity of the last 256 tokens",
                    *(f"{value:.2f}" for value in limited.values()),
                ]
            ],
        ),
        (["distance to the fact, tokens", *titles], [["words predicted", *shares]]),
    ]
    return "\n\n".join(format_table(*table) for table in tables)


def lengths_table(results: dict[str, Any]) -> str:
    """Return tokens per forward by position of each family and training length, all seeds of it
    in one cell.
    """
    cells = []
    for family in dict.fromkeys(row["family"] for row in results["rows"]):
        for length in ("512", "4096"):
            rows = [row for row in results["rows"] if row["name"] == f"{family}-{length}"]
            ratio = ", ".join(format_relative(row) for row in rows) if length == "4096" else "1"
            seconds = ", ".join(f"{row['training_cpu_seconds']:.0f}" for row in rows)
            cells.append(
                [
                    f"`{family}`",
                    f"{int(length):,}",
                    *format_positions(rows),
                    ratio,
                    str(rows[0]["steps"]),
                    seconds,
                ]
            )
    positions = results["perplexity"]["by_position"]
    return format_table(
        [
            "family",
            "trained on",
            *positions,
            "beyond 1k, relative to 512",
            "steps",
            "training, CPU s",
        ],
        cells,
    )


def remedies_tables(results: dict[str, Any]) -> str:
    """Return the remedies of each family that they were tried with."""
    remedied = dict.fromkeys(
        row["family"]
        for row in results["rows"]
        if row["name"].endswith("-window") and row["seed"] == 0
    )
    return "\n\n".join(remedies_table(results, family) for family in remedied)


def remedies_table(results: dict[str, Any], family: str) -> str:
    """Return tokens per forward by position with each remedy, its effect beyond 1k, and its
    cost.
    """
    cells = []
    rows = [row for row in results["rows"] if row["family"] == family]
    base = sum(row["training_cpu_seconds"] for row in rows if row["name"] == f"{family}-512")
    for key, (title, cost) in REMEDIES.items():
        same = [row for row in rows if row["name"] == f"{family}-{key}"]
        if not same:
            continue  # not tried with this family
        seconds = sum(row["training_cpu_seconds"] for row in same) / len(same)
        spent = {
            "": "0",
            "more": f"{seconds:.0f}",
            "anew": f"{seconds:.0f} instead of {base / len(same):.0f}",
        }[cost]
        time = sum(row["cpu_ms_per_token"]["4-8k"] for row in same) / len(same)
        ratio = ", ".join(format_relative(row) for row in same) if key != "512" else "1"
        cells.append([title, *format_positions(same), ratio, f"{time:.1f}", spent])
    times = ["CPU ms per token, 4-8k", "training, CPU s"]
    return format_table(
        [
            f"`{family}`: remedy",
            *results["perplexity"]["by_position"],
            "beyond 1k, relative to none",
            *times,
        ],
        cells,
    )


def format_positions(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return tokens per forward of each range of positions, one number for each seed, and the
    interval of a single one.
    """
    cells = []
    for name in rows[0]["by_position"]:
        numbers = [row["by_position"][name]["all"] for row in rows]
        interval = f" {format_interval(numbers[0]['ci95'])}" if len(rows) == 1 else ""
        cells.append(", ".join(f"{entry['acceptance_length']:.2f}" for entry in numbers) + interval)
    return cells


def format_relative(row: dict[str, Any]) -> str:
    """Return the ratio to another drafter beyond 1k, with its interval."""
    return f"{row['relative']['ratio']:.2f} {format_interval(row['relative']['ci95'])}"


def long_drafters_table(results: dict[str, Any]) -> str:
    """Return tokens per forward by position of each change, and relative to none, with the
    number of prompts.
    """
    rows = results["rows"]
    cells = []
    for row in rows:
        lengths = [
            f"{entry['all']['acceptance_length']:.2f}" for entry in row["by_position"].values()
        ]
        relative = f"{row['relative']['ratio']:.3f} {format_interval(row['relative']['ci95'])}"
        cells.append([CHANGES[row["name"]], *lengths, relative if row is not rows[0] else "1"])
    counts = [str(entry["all"]["prompts"]) for entry in rows[0]["by_position"].values()]
    perplexity = [f"{value:.2f}" for value in results["target"]["by_position"].values()]
    cells += [
        ["prompts", *counts, str(rows[0]["relative"]["prompts"])],
        ["perplexity of the target", *perplexity, ""],
    ]
    return format_table(["change", *rows[0]["by_position"], "beyond 1k, relative to none"], cells)
