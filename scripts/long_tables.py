"""Tables of drafters in long texts, of the time of a training step by length, and of adapters."""

from typing import Any

from scripts.results_tables import format_interval, format_table

CHANGES = {
    "512": "trained on 512 tokens: nothing changed",
    "window": "`drafter.window=512`",
    "sinks": "the first 4 and the newest 508 positions, numbered anew",
    "linear": "positions of the drafter divided by 16",
    "ntk": "base of the drafter's rotary embedding for 16 times the length (NTK)",
    "continued": "training continued on texts of 4,096 tokens",
    "4096": "trained on 4,096 tokens",
}
"""What the names of systems stand for, after the family."""
KINDS = {"all": "all prompts", "repeated": "prompts that end in a repetition", "new": "prompts that end in new text"}


def long_drafters_tables(results: dict[str, Any], times: dict[str, Any]) -> str:
    """Return the tables of target, families, changes for long texts, and of the time of a training step."""
    rows = {row["name"]: row for row in results["rows"]}
    first = results["rows"][0]["name"].partition("-")[0]
    families = [row for name, row in rows.items() if name.partition("-")[2].isdigit()]
    changed = [rows[f"{first}-{name}"] for name in CHANGES]
    parts = [
        "## The target uses its context", target_tables(results["target"]),
        "## Trained on 512 and on 4,096 tokens", families_table(families, "all"),
        "The same, where the answer continues a passage that stands somewhere before it, and where it continues new text:",
        families_table(families, "repeated"), families_table(families, "new"),
        "## What helps a drafter that was trained on short texts", changes_table(changed),
        "## Time of a training step by length", times_table(times),
    ]  # fmt: skip
    return "\n\n".join(parts)


def target_tables(target: dict[str, Any]) -> str:
    """Return the perplexity of the target by position, and of its last half of positions by the length of the context."""
    by_position, limited = target["after"]["by_position"], target["after"]["last_half_by_context"]
    names = {"all": "all tokens", "repeated": "tokens of repetitions", "new": "tokens of new text"}
    rows = [[title, *(f"{entry[kind]:.2f}" for entry in by_position.values())] for kind, title in names.items()]
    before = [f"{entry['all']:.2f}" for entry in target["before"]["by_position"].values()]
    table = format_table(["perplexity at positions", *by_position], [*rows, ["all tokens, before the training", *before]])
    titles = ["tokens of context", *(name if name == "all" else f"{int(name):,}" for name in limited)]
    return f"{table}\n\n{format_table(titles, [['perplexity at 4-8k', *(f'{value:.2f}' for value in limited.values())]])}"


def families_table(rows: list[dict[str, Any]], kind: str) -> str:
    """Return tokens per forward by position of each training, for one kind of prompts."""
    titles = [f"{KINDS[kind]}: recipe", "trained on", *rows[0]["by_position"]]
    cells = [[f"`{row['name'].partition('-')[0]}`", f"{row['training']['max_length']:,}", *format_positions(row, kind)]
             for row in rows]  # fmt: skip
    return format_table(titles, cells)


def format_positions(row: dict[str, Any], kind: str) -> list[str]:
    """Return tokens per forward with their intervals by position."""
    parts = [entry[kind] for entry in row["by_position"].values()]
    return [f"{part['acceptance_length']:.2f} {format_interval(part['ci95'])}" for part in parts]


def changes_table(rows: list[dict[str, Any]]) -> str:
    """Return tokens per forward by position, the time of a draft at 4-8k and the training of each change."""
    cells = []
    for row, title in zip(rows, CHANGES.values()):
        training, draft = row["training"], row["by_position"]["4-8k"]["draft_ms"]
        cost = f"{training['tokens'] / 1e3:.0f} k tokens, {training['cpu_seconds']:.0f} s"
        cells.append([title, *format_positions(row, "all"), f"{draft:.1f} ms", cost])
    return format_table(["change", *rows[0]["by_position"], "draft at 4-8k", "its training"], cells)


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
