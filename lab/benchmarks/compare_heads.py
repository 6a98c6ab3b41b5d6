"""Heads, masks, blocks and their cousins on the tiny target: each trained on the same tokens and
scored on the same prompts.

    python -m lab.benchmarks.compare_heads [--work DIR] [--out lab/results/heads-tiny.json]
    [RECIPE[+drafter.KEY=VALUE ..] ..]

300 steps of at most 512 tokens of the embedded data, the recipe's own rate, one seed; 40 held-out
prompts of 64 tokens, greedy, eight at once. One to three minutes a recipe with one thread. A
finished run is not trained again, nor scored; rows of other names stay in the file. Without names:
those of RECIPES. `python -m lab.pages.make_pages` then writes docs/results/.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from spectrain.cli.main import dispatch_command
from spectrain.files import write_text
from spectrain.provenance import collect_provenance

RECIPES = (
    "medusa1", "medusa1+drafter.head_rank=32", "amphista", "ctc", "transformer_heads", "hydra",
    "hydra+drafter.head_rank=32",
    "eagle3", "eagle3+drafter.head_rank=32", "gumiho", "mtp", "pard", "gated_lora", "ppd",
    "hidden_transfer",
    "speculative_streaming", "uno", "dflash", "dspark", "dflash2", "peagle",
)  # fmt: skip
RESULTS = Path(__file__).parents[2] / "lab" / "results" / "heads-tiny.json"
STEPS = 300
DEPTH = 4
TRAINING = [
    "target=tiny",
    "data.limit=null",
    "data.max_length=512",
    "trainer.batch_tokens=512",
    f"trainer.max_steps={STEPS}",
    "trainer.seed=0",
    "trainer.resume=auto",
    "eval=none",
]
SCORING = [
    "eval.limit=40",
    "eval.max_new_tokens=64",
    "eval.batch_size=8",
    "eval.repeats=1",
    "eval.baselines=[]",
    "eval.oracle=false",
    "eval.report=false",
    "acceptance=greedy",
]
TREES = {
    "chain": ["tree=chain", f"tree.depth={DEPTH}"],
    "tree": ["tree=eagle2", f"tree.depth={DEPTH}", "tree.budget=16"],
}


def spectrain(*arguments: str) -> None:
    """Run a command in this process, so that libraries are loaded once; the process ends where
    the command fails.
    """
    dispatch_command([*arguments])


def score(run: Path, name: str, tree: list[str]) -> dict[str, Any]:
    """Return how a finished run decodes with a tree; measure it unless that was done before."""
    path = run / "eval" / name / "summary.json"
    if not path.exists():
        spectrain("eval", f"run={run}", f"eval.name={name}", *tree, *SCORING)
    summary = json.loads(path.read_text())
    length = summary["acceptance_length"]
    lossless = summary["lossless"]
    return {
        "acceptance_length": length["pooled"],
        "ci95": length["ci95"],
        "acceptance_by_depth": summary["acceptance_by_depth"],
        "nodes_per_round": summary["nodes_per_round"],
        "drafting_nodes_per_round": summary["drafting_nodes_per_round"],
        "identical": lossless["identical"],
        "checked": lossless["checked"],
    }


def measure(name: str, work: Path) -> dict[str, Any]:
    """Train a recipe, with its changes, and score it."""
    recipe, *changes = name.split("+")
    run = work / name.replace("drafter.", "").replace("+", "-").replace("=", "-")
    spectrain("train", f"recipe={recipe}", *TRAINING, *changes, f"run={run}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "name": name,
        "commit": collect_provenance()["commit"],
        "steps": lines[-1]["step"],
        "tokens": lines[-1].get("tokens"),
        "seconds": lines[-1].get("seconds"),
        **{kind: score(run, kind, tree) for kind, tree in TREES.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/heads"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    options = parser.parse_args()
    rows = (
        {row["name"]: row for row in json.loads(options.out.read_text())["rows"]}
        if options.out.exists()
        else {}
    )
    for name in options.recipes:
        rows[name] = measure(name, options.work.absolute())
        setting = {
            "target": "tiny",
            "training": TRAINING,
            "scoring": SCORING,
            "trees": TREES,
            **collect_provenance(),
            "command": "python -m lab.benchmarks.compare_heads",
        }
        write_text(
            options.out,
            json.dumps({"setting": setting, "rows": list(rows.values())}, indent=1) + "\n",
        )


if __name__ == "__main__":
    main()
