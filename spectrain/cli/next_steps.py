"""The commands that a user may want next, printed below a result."""

from __future__ import annotations

from pathlib import Path

from spectrain.config.choices import list_constructors
from spectrain.export.layouts import list_formats
from spectrain.output.console import make_console
from spectrain.runs.folder import find_results_folder


def print_after_training(run: Path, family: str, evaluation_name: str | None, recipe: str) -> None:
    """Print the next three commands after a training: chat, look at the score, or score where
    there is no score yet, and export where an engine serves the family. What was trained for the
    acceptance rule of the recipe's name drafts nothing, so a drafter is scored with that rule.
    """
    if recipe in list_constructors("acceptance"):
        rule = f"acceptance={recipe} acceptance.path={run}"
        score = f"spectrain eval run=runs/NAME {rule} eval.name={recipe}"
        print_steps({score: "score a drafter of yours with it"})
        return
    steps = {f"spectrain chat run={run}": "chat through it"}
    page = None if evaluation_name is None else run / "eval" / evaluation_name / "report.html"
    if page is not None and page.exists():
        steps[str(page)] = "the score, round by round"
    else:
        steps[f"spectrain eval run={run}"] = "score it"
    if formats := sorted(list_formats(family), key=lambda name: name != "vllm"):
        steps[f"spectrain export run={run} format={formats[0]} out=DIR"] = "for an engine"
    print_steps(steps)


def print_after_score(folder: Path, evaluation_name: str) -> None:
    """Print where the page of a score is."""
    page = find_results_folder(folder) / "eval" / evaluation_name / "report.html"
    if page.exists():
        print_steps({str(page): "texts round by round, and notes (also --notes)"})


def print_steps(steps: dict[str, str]) -> None:
    """Print commands with what each does."""
    console = make_console(highlight=False, soft_wrap=True)
    console.print("Next:")
    for command, meaning in steps.items():
        console.print(f"  {command}  # {meaning}")
