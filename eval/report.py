"""The table that an evaluation prints."""

from typing import Any

from rich.console import Console
from rich.table import Table

ROWS = {"chain": "the same, chain", "untrained": "untrained", "ngram": "n-gram lookup"}


def print_table(summary: dict[str, Any]) -> None:
    """Acceptance length and speed of every system with 95 % intervals, then where the time went and what was checked."""
    setting = summary["setting"]
    tree = setting["tree"]
    console = Console(width=None if Console().is_terminal else 110)
    table = Table(
        title=f"{setting['recipe']} on {setting['target']}: {setting['prompts']} prompts, {setting['max_new_tokens']} tokens"
    )
    table.add_column("", no_wrap=True)
    for title in ("tokens per forward", "95 %", "tokens/s", "speedup", "95 %", "identical"):
        table.add_column(title, justify="right")
    base = summary["tokens_per_second"]["autoregressive"]
    table.add_row("autoregressive", "1.00", "", f"{base:.1f}", "1.00", "", "")
    nodes = f"{tree['name']}, {tree['budget']} nodes" if tree["name"] != "chain" else f"chain of {tree['depth']}"
    rows = {f"drafter, {nodes}": summary}
    rows |= {ROWS[name]: entry for name, entry in summary["compared"].items()}
    for name, entry in rows.items():
        length, speed, lossless = entry["acceptance_length"], entry["speedup"], entry["lossless"]
        table.add_row(
            name, f"{length['pooled']:.2f}", "{:.2f} to {:.2f}".format(*length["ci95"]),
            f"{entry['tokens_per_second']['drafted']:.1f}", f"{speed['ratio']:.2f}", "{:.2f} to {:.2f}".format(*speed["ci95"]),
            "" if lossless is None else f"{lossless['identical']} of {lossless['checked']}",
        )  # fmt: skip
    console.print(table)
    share = ", ".join(f"{part} {value:.0%}" for part, value in summary["time_share"].items())
    console.print(f"time of a drafted round: {share}; speedup predicted from the parts {summary['speedup']['predicted']:.2f}")
    depths = " ".join(f"{value:.2f}" for value in summary["acceptance_by_depth"])
    console.print(f"kept by depth: {depths}; device {setting['device']}, {setting['dtype']}, batch 1")
    lossless = summary["lossless"]
    if lossless is not None and lossless["differences"]:
        console.print(f"NOT LOSSLESS: {len(lossless['differences'])} outputs differ from {lossless['reference']}")
    elif lossless is not None:
        ties = len(lossless["near_ties"])
        console.print(f"output identical to {lossless['reference']}, rule {lossless['rule']}; near ties: {ties}")
