"""Plans of EAGLE-3 for six large targets, from their configurations in lab/target_configs/ alone.

    python -m lab.benchmarks.large_targets [--out lab/results/large-targets.json]

Every row is what `spectrain plan` writes for its settings; a test compares the rows with the
command.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spectrain.cli.main import dispatch_command
from spectrain.files import write_text
from spectrain.provenance import collect_provenance

RESULTS = Path(__file__).parents[2] / "lab" / "results" / "large-targets.json"
TARGETS = (
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gpt-oss-120b",
    "deepseek-v3",
)
SHARED = (
    "recipe=eagle3",
    "target=hf",
    "data=hub",
    "data.path=NAME",
    "trainer.epochs=1",
    "trainer.gradient_checkpointing=true",
    "plan.device=cuda",
    "plan.device_gb=80",
    "plan.tokens=100000000",
)
"""What all rows have in common; a batch is one text of the largest length."""
HEAD = ("target.parts=head", "source=server", "server=vllm")
SETTINGS: tuple[tuple[str, ...], ...] = (
    ("plan.devices=8", "data.max_length=2048", "trainer.batch_tokens=8192"),
    (*HEAD, "plan.devices=1", "data.max_length=2048", "trainer.batch_tokens=8192"),
    (*HEAD, "plan.devices=1", "data.max_length=32768", "trainer.batch_tokens=32768"),
)


def list_rows() -> list[list[str]]:
    """Return the settings of each row beside those that all share."""
    return [
        [f"target.model=lab/target_configs/{name}", *settings]
        for name in TARGETS
        for settings in SETTINGS
    ]


def plan_row(words: list[str]) -> dict[str, Any]:
    """Return what the command plans for a row."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        dispatch_command(["plan", *SHARED, *words, f"plan.out={path}"])
        return {"settings": words, **select_numbers(json.loads(path.read_text()))}


def select_numbers(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a plan that a row shows."""
    memory = summary["memory"]
    return {
        "target": summary["parameters"]["target"],
        "trained": summary["parameters"]["trained"],
        "target_bytes": memory["parts"].get("target weights", 0),
        "activation_bytes": memory["parts"].get("activations", 0),
        "peak_bytes": memory["peak_bytes"],
        "sharded_bytes": memory["sharded"].get("drafter and target"),
        "fits": summary["fits"],
        "target_flops": summary["flops"]["target_per_token"],
        "step_flops": summary["flops"]["step_per_token"],
        "hours": summary["hours"]["value"],
        "store_bytes": summary["disk"]["store_bytes"]["fp8"],
    }


def main() -> None:
    """Plan every row and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    # A dispatched command replaces the arguments of this one.
    out = parser.parse_args().out
    rows = [plan_row(words) for words in list_rows()]
    results = {"shared": SHARED, "rows": rows, "provenance": collect_provenance()}
    write_text(out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
