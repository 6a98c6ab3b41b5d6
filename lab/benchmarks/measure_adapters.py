"""Adapters against all weights: a drafter of one domain continues its training on another one, for
the same tokens.

    python -m lab.benchmarks.measure_adapters [--work DIR] [--out lab/results/adapters-tiny.json]
    [--trainings N]

EAGLE-3 on tiny, one thread, float32. The first domain is the embedded conversations without code,
the second one code. Prompts were never trained on. What the folder holds already is not done again;
--trainings ends the command after so many new ones.
"""

import argparse
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from safetensors.torch import load_file

from spectrain.cli.main import dispatch_command
from spectrain.data.chat import tokenize_prompt
from spectrain.data.readers import DATA_FOLDER
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.files import write_text
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.runs.drafters import (
    build_drafter,
    load_description,
    load_facts,
    load_weights,
)
from spectrain.trees import Chain

RESULTS = Path(__file__).parents[2] / "lab" / "results" / "adapters-tiny.json"
SEEDS = (0, 1, 2)
DEPTH = 4
ANSWER_TOKENS = 48
CONVERSATIONS = 320
DOMAIN_CONVERSATIONS = 80
PROMPTS = 24
SHARED = [
    "recipe=eagle3",
    "target=tiny",
    "data=jsonl",
    "data.limit=null",
    "data.held_out=0",
    "trainer.resume=auto",
    "data.max_length=512",
    "trainer.batch_tokens=512",
    "eval=none",
]
FIRST = ("drafter.vocab_size=2048", "trainer.epochs=2")
SECOND = ("trainer.epochs=1",)
WAYS = {
    "all weights": ("trainer.lr=1e-3",),
    "`adapter=lora adapter.rank=8`": ("adapter=lora", "trainer.lr=4e-3"),
}


def write_domains(folder: Path) -> None:
    """Write first.jsonl and second.jsonl, and the prompts of each domain that neither holds."""
    lines = (
        gzip.decompress((DATA_FOLDER / "conversations.jsonl.gz").read_bytes()).decode().splitlines()
    )
    rows = [json.loads(line) for line in lines]
    second = [row for row in rows if row["category"] == "code"]
    first = [row for row in rows if row["category"] != "code"]
    # Every kind of the first domain occurs.
    first = first[:: max(1, len(first) // (CONVERSATIONS + PROMPTS))]
    for name, domain, count in (
        ("first", first, CONVERSATIONS),
        ("second", second, DOMAIN_CONVERSATIONS),
    ):
        assert len(domain) >= count + PROMPTS, f"{name} has {len(domain)} conversations"
        # Prompts are spread over the domain.
        step = len(domain) // PROMPTS
        prompts = domain[::step][:PROMPTS]
        questions = {row["messages"][0]["content"] for row in prompts}
        training = [row for row in domain if row["messages"][0]["content"] not in questions][:count]
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in training))
        write_text(
            folder / f"{name}-prompts.json", json.dumps([row["messages"][:1] for row in prompts])
        )


@dataclass(frozen=True)
class Training:
    """A training of the comparison: of a drafter on the first domain, or of one that continues
    on the second one.
    """

    name: str
    seed: int
    settings: tuple[str, ...]
    begins_with: str | None = None

    def run(self, work: Path) -> Path:
        """Train, unless the folder holds the drafter already, and return the run."""
        folder = work / f"{self.name}-{self.seed}"
        if self.begins_with is None:
            settings = [f"data.path={work / 'first.jsonl'}"]
        else:
            settings = [
                f"data.path={work / 'second.jsonl'}",
                f"drafter.init={work / self.begins_with}",
            ]
        settings += [*SHARED, *self.settings, f"trainer.seed={self.seed}", f"run={folder}"]
        if not (folder / "drafter").exists():
            dispatch_command(["train", *settings])
        return folder


def list_trainings() -> dict[str, list[Training]]:
    """Return the trainings of every row: one drafter, which continues with every seed."""
    rows = {"before": [Training("first", 0, FIRST)]}
    for number, (name, settings) in enumerate(WAYS.items()):
        rows[name] = [
            Training(f"way{number}", seed, (*SECOND, *settings), "first-0") for seed in SEEDS
        ]
    return rows


def load_run(run: Path, target: Target) -> Drafter:
    """Load the drafter of a run."""
    directory = run / "drafter"
    spec = load_description(directory, None).drafter
    drafter = build_drafter(spec, target)
    load_weights(drafter, directory, target)
    return drafter.eval()


def measure_acceptance(run: Path, target: Target, work: Path) -> dict[str, float]:
    """Return the tokens per forward of greedy chains on the prompts of each domain, measured
    once.
    """
    path = run / "lengths.json"
    lengths = {}
    if path.exists():
        measured: dict[str, float] = json.loads(path.read_text())
        return measured
    drafter = load_run(run, target)
    for domain in ("first", "second"):
        chats = json.loads((work / f"{domain}-prompts.json").read_text())
        prompts = [tokenize_prompt(target.template, chat) for chat in chats]
        answers = [
            decode(target, [prompt], Greedy(), ANSWER_TOKENS, drafter, Chain(DEPTH))[0]
            for prompt in prompts
        ]
        rounds = [length for answer in answers for length in answer.complete_round_lengths]
        lengths[domain] = sum(rounds) / len(rounds)
    write_text(path, json.dumps(lengths))
    return lengths


def count_sizes(run: Path) -> dict[str, int]:
    """Return the tokens of a run, the parameters that it trained and has, and the bytes of
    gradients and optimiser state.
    """
    facts = load_facts(run, "training") or {}
    drafter = sum(
        tensor.numel() for tensor in load_file(run / "drafter" / "model.safetensors").values()
    )
    # Two means in float32 of every trained parameter, and its gradient.
    return {
        "tokens": facts["tokens"],
        "trained": facts["parameters"],
        "drafter": drafter,
        "state_bytes": 12 * facts["parameters"],
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean and the standard deviation over seeds of each domain's tokens per forward."""
    spread = {
        domain: {
            "mean": mean(row[domain] for row in rows),
            "deviation": stdev(row[domain] for row in rows) if rows[1:] else None,
        }
        for domain in ("first", "second")
    }
    return {**spread, "seeds": rows}


def main() -> None:
    """Train and measure what is missing, and write the results when nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/adapters"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--trainings", type=int, default=None)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    write_domains(options.work)
    target = load_tiny()
    target.pack_weights()
    rows = list_trainings()
    missing = [
        training
        for row in rows.values()
        for training in row
        if not (options.work / f"{training.name}-{training.seed}/lengths.json").exists()
    ]
    for training in missing[: options.trainings]:
        print(
            training.name,
            measure_acceptance(training.run(options.work), target, options.work),
            flush=True,
        )
    if options.trainings is not None and len(missing) > options.trainings:
        return
    results = []
    for name, trainings in rows.items():
        runs = [training.run(options.work) for training in trainings]
        lengths = [measure_acceptance(run, target, options.work) for run in runs]
        results.append({"name": name, **count_sizes(runs[0]), **summarize(lengths)})
    write_text(
        options.out,
        json.dumps({"rows": results, "provenance": collect_provenance()}, indent=1) + "\n",
    )


if __name__ == "__main__":
    main()
