"""Tables of drafters in long texts, of the time of a training step by length, and of adapters."""

from typing import Any

from scripts.results_tables import format_interval, format_table

CHANGES = {
    "full": "none",
    "window": "`drafter.window=512`",
    "sinks": "the first 4 and the newest 508 positions of the prompt, numbered anew",
    "linear": "positions of the drafter divided by 16",
    "ntk": "base of the drafter's rotary embedding for 16 times the length (NTK)",
}
"""What the names of systems stand for."""


def long_drafters_tables(results: dict[str, Any], times: dict[str, Any]) -> str:
    """Return the tables of the target, of the changes of its drafter, and of the time of a training step."""
    parts = [
        "## The target uses its context", perplexity_tables(results["target"]),
        "## The drafter by position, and what helps it", changes_table(results["rows"]),
        "## Time of a training step by length", times_table(times),
    ]  # fmt: skip
    return "\n\n".join(parts)


def perplexity_tables(target: dict[str, Any]) -> str:
    """Return the perplexity of the target by position, and of the last tokens of long prompts by the length of the context."""
    by_position, limited = target["by_position"], target["last_tokens_by_context"]
    first = format_table(["at positions", *by_position], [["perplexity", *(f"{value:.2f}" for value in by_position.values())]])
    titles = ["tokens of context", *(f"{int(length):,}" for length in list(limited)[:-1]), "all"]
    return f"{first}\n\n{format_table(titles, [['perplexity', *(f'{value:.2f}' for value in limited.values())]])}"


def changes_table(rows: list[dict[str, Any]]) -> str:
    """Return tokens per forward by position of each change, and how many prompts were scored."""
    cells = []
    for row in rows:
        parts = [entry["all"] for entry in row["by_position"].values()]
        lengths = [f"{part['acceptance_length']:.2f} {format_interval(part['ci95']) if part['ci95'] else ''}" for part in parts]
        cells.append([CHANGES[row["name"]], *lengths])
    counts = [str(entry["all"]["prompts"]) for entry in rows[0]["by_position"].values()]
    return format_table(["change", *rows[0]["by_position"]], [*cells, ["prompts", *counts]])


def times_table(times: dict[str, Any]) -> str:
    """Return the CPU time per token of the parts of a training step by the length of a text."""
    names = {"target": "target's forward", "all tokens": "drafter, loss on all tokens",
             "window": f"drafter, `trainer.loss_tokens={times['loss_tokens']}`"}  # fmt: skip
    cells = [[f"{row['length']:,}", *(f"{row['ms_per_token'][key]:.3f}" if key in row["ms_per_token"] else "" for key in names)]
             for row in times["rows"]]  # fmt: skip
    return format_table(["tokens", *(f"{title}, ms per token" for title in names.values())], cells)


def adapters_table(results: dict[str, Any]) -> str:
    """Return tokens per forward on both domains, and what is trained, before and after each way to continue."""
    cells = []
    for row in results["rows"]:
        lengths = [format_spread(row[domain], [seed[domain] for seed in row["seeds"]]) for domain in ("second", "first")]
        cells.append([row["name"], *lengths, f"{row['trained']:,}", f"{row['state_bytes'] / 1e6:.2f} MB"])
    titles = ["training", "new domain", "first domain", "trained parameters", "gradients and optimiser state"]
    return format_table(titles, cells)


def format_spread(numbers: dict[str, Any], seeds: list[float]) -> str:
    """Return a mean over seeds, and each seed's number where there are several."""
    single = "" if numbers["deviation"] is None else f" ({', '.join(f'{value:.2f}' for value in seeds)})"
    return f"{numbers['mean']:.2f}{single}"
