"""What each recipe needs in training, planned for one target: what it trains and learns from, its
parameters, minutes and memory.

    python -m lab.benchmarks.training_needs [--out lab/results/training-needs.json]

Every row is what `spectrain plan` writes for its settings; a test compares a row with the command.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spectrain.cli.main import dispatch_command
from spectrain.config.choices import choice_files
from spectrain.errors import UserError
from spectrain.files import write_text
from spectrain.provenance import collect_provenance

RESULTS = Path(__file__).parents[2] / "lab" / "results" / "training-needs.json"
SHARED = (
    "target=hf",
    "target.model=lab/target_configs/llama-3.1-8b",
    "data=hub",
    "data.path=NAME",
    "data.max_length=2048",
    "trainer.epochs=1",
    "trainer.batch_tokens=4096",
    "trainer.gradient_checkpointing=true",
    "plan.device=cuda",
    "plan.device_gb=80",
    "plan.tokens=10000000",
)
"""What all rows have in common: the geometry of a target of 8 billion parameters, 10 million tokens
and an H100.
"""


def list_recipes() -> list[str]:
    """Return all recipes that are installed."""
    return sorted(choice_files("recipe"))


def plan_recipe(name: str) -> dict[str, Any]:
    """Return what the command plans for a recipe; why not, where a recipe cannot be planned for
    this target.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        try:
            dispatch_command(["plan", f"recipe={name}", *SHARED, f"plan.out={path}"])
        except UserError as error:
            return {"recipe": name, "refused": str(error)}
        return {"recipe": name, **select_numbers(json.loads(path.read_text()))}


def select_numbers(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a plan that a row shows."""
    return {
        **summary["training"],
        "trained": summary["parameters"]["trained"],
        "tokens": summary["tokens"]["epoch"],
        "minutes": 60 * summary["hours"]["value"],
        "peak_bytes": summary["memory"]["peak_bytes"],
        "fits": summary["fits"],
    }


def list_rows() -> Iterator[dict[str, Any]]:
    """Yield the row of every recipe."""
    for name in list_recipes():
        row = plan_recipe(name)
        print(json.dumps(row), flush=True)
        yield row


def main() -> None:
    """Plan every recipe and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    # A dispatched command replaces the arguments of this one.
    out = parser.parse_args().out
    results = {"shared": SHARED, "rows": [*list_rows()], "provenance": collect_provenance()}
    write_text(out, json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
