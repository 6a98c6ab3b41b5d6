"""What a feature store's types cost: bytes a token, error of features, acceptance length after
training EAGLE-3 from it.

    python -m lab.benchmarks.measure_store [--work DIR] [--out lab/results/store.json] [--seeds 2]

The tiny target, 160 conversations, 2 epochs, 20 held-out prompts of 64 tokens, greedy, chain of 4;
a minute a training.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from spectrain.data.dataset import Dataset
from spectrain.data.readers import EmbeddedReader
from spectrain.features.store import FeatureStore
from spectrain.models.loading import load_tiny
from spectrain.provenance import collect_provenance

SETTINGS = [
    "recipe=eagle3",
    "target=tiny",
    "data.limit=160",
    "data.max_length=512",
    "trainer.epochs=2",
    "tree=chain",
    "tree.depth=4",
    "eval.limit=20",
    "eval.max_new_tokens=64",
    "eval.baselines=[]",
    "eval.oracle=false",
]


def spectrain(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "spectrain", *arguments], check=True)


def train_and_score(run: Path, seed: int, source: list[str]) -> dict[str, Any]:
    """Train and score, unless an earlier call did; return the acceptance length and the time
    share of features.
    """
    summary = run / "eval" / "heldout" / "summary.json"
    if not summary.exists():
        spectrain(
            "train", *SETTINGS, f"trainer.seed={seed}", f"run={run}", "trainer.resume=auto", *source
        )
    scores = json.loads(summary.read_text())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    length = scores["acceptance_length"]
    return {
        "seed": seed,
        "acceptance_length": length["pooled"],
        "ci95": length["ci95"],
        "loss": last["loss"],
        "target_time_share": last["time_share"]["target"],
        "identical": scores["lossless"]["identical"],
    }


def measure_errors(path: Path, data: Dataset) -> dict[str, float]:
    """Return for every layer the mean relative error of a token's stored features against the
    exact ones.
    """
    target = load_tiny()
    target.pack_weights()
    store = FeatureStore(path)
    layer_errors: dict[str, list[float]] = {str(layer): [] for layer in store.layers}
    for example in data.examples:
        exact = target.features(torch.tensor([example.tokens]), store.layers).hidden[0]
        read = store.read_states(example, store.layers, exact)
        assert read is not None
        error = (read - exact).norm(dim=-1) / exact.norm(dim=-1)
        for layer, column in zip(store.layers, error.unbind(1)):
            layer_errors[str(layer)] += column[~column.isnan()].tolist()
    return {layer: mean(values) for layer, values in layer_errors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/store"))
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[2] / "lab" / "results" / "store.json"
    )
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    work = options.work.absolute()
    target = load_tiny()
    data = EmbeddedReader(limit=160, max_length=512).make_dataset(target.template)
    rows: list[dict[str, Any]] = [
        {
            "features": "live",
            "trainings": [
                train_and_score(work / f"live-{s}", s, ["source=live"])
                for s in range(options.seeds)
            ],
        }
    ]
    for thrifty in (False, True):
        for dtype in ("int8", "fp8", "bfloat16", "float32"):
            name = f"{dtype}-{'supervised' if thrifty else 'all'}"
            path = work / "stores" / name
            source = [f"source.path={path}"]
            spectrain(
                "data",
                "store",
                *SETTINGS,
                *source,
                f"source.dtype={dtype}",
                f"source.supervised_only={str(thrifty).lower()}",
            )
            store = FeatureStore(path)
            trains = (
                dtype == "int8" if thrifty else dtype != "float32"
            )  # what is read is the same, so the others train the same
            seeds = (1 if thrifty else options.seeds) if trains else 0
            rows.append(
                {
                    "features": dtype,
                    "supervised_only": thrifty,
                    "bytes_per_token": sum(map(store.contents.num_bytes, data.examples))
                    / data.num_tokens,
                    "bytes_on_disk": store.num_bytes,
                    "layers": list(store.layers),
                    "width": target.width,
                    "relative_error": measure_errors(path, data),
                    "trainings": [
                        train_and_score(work / f"{name}-{s}", s, ["source=store", *source])
                        for s in range(seeds)
                    ],
                }
            )
    setting = {
        "target": target.name,
        "settings": SETTINGS,
        "tokens": data.num_tokens,
        "supervised": data.num_supervised,
        "dtype": "float32",
        **collect_provenance(),
    }
    options.out.write_text(json.dumps({"setting": setting, "stores": rows}, indent=1) + "\n")
    for row in rows:
        lengths = [run["acceptance_length"] for run in row["trainings"]]
        print(
            row["features"],
            row.get("supervised_only"),
            row.get("bytes_per_token"),
            row.get("relative_error"),
            lengths,
        )


if __name__ == "__main__":
    main()
