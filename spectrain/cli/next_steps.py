"""The commands that a user may want next, printed below a result."""

from __future__ import annotations

from pathlib import Path

from spectrain.output.console import make_console
from spectrain.runs.folder import find_results_folder


def print_after_training(run: Path, evaluation_name: str | None) -> None:
    """Print the next three commands after a training: chat, look at the score, export; or score,
    where there is no score yet.
    """
    steps = {f"spectrain chat run={run}": "chats through the drafter"}
    page = None if evaluation_name is None else run / "eval" / evaluation_name / "report.html"
    if page is not None and page.exists():
        steps[str(page)] = "the page shows the score, round by round"
    else:
        steps[f"spectrain eval run={run}"] = "scores it"
    steps[f"spectrain export run={run} format=vllm out=DIR"] = "writes it for an engine"
    print_steps(steps)


def print_after_score(folder: Path, evaluation_name: str) -> None:
    """Print where the page of a score is."""
    page = find_results_folder(folder) / "eval" / evaluation_name / "report.html"
    if page.exists():
        print_steps({str(page): "the page shows texts round by round, and notes (also --notes)"})


def print_steps(steps: dict[str, str]) -> None:
    """Print commands with what each does."""
    console = make_console(highlight=False, soft_wrap=True)
    width = max(map(len, steps)) + 2
    console.print("Next:")
    for command, meaning in steps.items():
        gap = width if width + len(meaning) < 78 else len(command) + 2
        console.print(f"  {command:{gap}}# {meaning}")
