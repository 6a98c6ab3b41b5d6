"""Tables of the sweeps over batch size, context and temperature."""

from typing import Any

from lab.pages.results_tables import list_facts
from spectrain.eval.axes.tables import axis_markdown

TITLES = {
    "batch": "Prompts at once, and simulated load",
    "context": "Tokens of the prompt",
    "temperature": "Temperature",
}
TARGETS = {"tiny": "the tiny target", "smollm2": "SmolLM2-135M"}


def axes_tables(results: dict[str, Any]) -> str:
    """Return the tables of every axis and target, with the sentences about each drafter."""
    parts = []
    for over, title in TITLES.items():
        for target, label in TARGETS.items():
            named = [
                (name, axes[over])
                for name, axes in results["rows"].get(target, {}).items()
                if over in axes
            ]
            if named:
                parts += [f"## {title}: {label}", axis_markdown(named), *describe_later(named)]
    return "\n\n".join(parts)


def describe_later(named: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return a list of the sweeps that were measured apart from the others, with their settings;
    empty where there are none.
    """
    lines = [f"- {name}: {list_facts(axis)}." for name, axis in named if "commit" in axis]
    is_apart = 0 < len(lines) < len(named)
    return ["Measured later than the other rows:\n\n" + "\n".join(lines)] if is_apart else []
