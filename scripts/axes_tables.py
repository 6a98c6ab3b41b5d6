"""Tables of the sweeps over batch size, context and temperature."""

from typing import Any

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
            named = [(name, axes[over]) for name, axes in results["rows"].get(target, {}).items() if over in axes]
            if named:
                parts += [f"## {title}: {label}", axis_markdown(named)]
    return "\n\n".join(parts)
