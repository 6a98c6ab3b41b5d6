"""The plot of a day of traffic: tokens per forward over time by kind of traffic, a panel for
each seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

NUM_AVERAGED = 8
"""Requests of one kind that a point of the plot averages."""
EVENTS = {
    "drift": "drift noticed",
    "training": "training begins",
    "promoted": "better drafter serves",
    "rolled back": "rolled back",
}
KINDS = {"chat": "first kind", "questions": "second kind"}


def average_requests(answers: list[list[Any]], kind: str) -> tuple[list[float], list[float]]:
    """Return the times and the tokens per forward of a kind, each the average of some requests
    after one another.
    """
    chosen = [answer for answer in answers if answer[1] == kind and answer[3]]
    times = list[float]()
    rates = list[float]()
    for start in range(0, len(chosen) - NUM_AVERAGED + 1, NUM_AVERAGED):
        group = chosen[start : start + NUM_AVERAGED]
        times.append(sum(answer[0] for answer in group) / len(group))
        rates.append(1 + sum(answer[2] for answer in group) / sum(answer[3] for answer in group))
    return times, rates


def plot_days(path: Path, days: list[dict[str, Any]]) -> None:
    """Plot the days, with a line where traffic changes and where follow acts."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "follow", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        panels = figure.subplots(1, len(days), sharey=True, squeeze=False)[0]
        for axes, day in zip(panels, days):
            for kind, marker in zip(KINDS, "o^"):
                times, rates = average_requests(day["answers"], kind)
                axes.plot(
                    times, rates, marker=marker, markersize=4, linestyle=":", label=KINDS[kind]
                )
            axes.axvline(0, color="0.3", linewidth=0.8, label="traffic changes")
            for number, (event, label) in enumerate(EVENTS.items()):
                if event in day["seconds"]:
                    axes.axvline(
                        day["seconds"][event],
                        color=f"C{number + 2}",
                        linewidth=0.8,
                        linestyle="--",
                        label=label,
                    )
            axes.set(title=f"seed {day['seed']}", xlabel="seconds after the change")
        panels[0].set(ylabel="tokens per forward")
        panels[0].legend(fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
