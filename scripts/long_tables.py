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


def long_drafters_table(results: dict[str, Any]) -> str:
    """Return tokens per forward by position of each change, and relative to none, with the number of prompts."""
    rows = results["rows"]
    cells = []
    for row in rows:
        lengths = [f"{entry['all']['acceptance_length']:.2f}" for entry in row["by_position"].values()]
        relative = f"{row['relative']['ratio']:.3f} {format_interval(row['relative']['ci95'])}"
        cells.append([CHANGES[row["name"]], *lengths, relative if row is not rows[0] else "1"])
    counts = [str(entry["all"]["prompts"]) for entry in rows[0]["by_position"].values()]
    perplexity = [f"{value:.2f}" for value in results["target"]["by_position"].values()]
    cells += [["prompts", *counts, str(rows[0]["relative"]["prompts"])], ["perplexity of the target", *perplexity, ""]]
    return format_table(["change", *rows[0]["by_position"], "beyond 1k, relative to none"], cells)


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
