"""The drafter that ships, trained on texts of up to 512 tokens, by position in texts of up to 8,192 tokens, and what helps it.

    python -m benchmarks.long_shipped [work=DIR] [out=eval/results/long-shipped.json] [documents=N]

SmolLM2 reads 8,192 tokens and uses them: its perplexity by position, and with less context, is measured on the same prompts.
What the folder holds already is not done again.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.runs.folder import SHIPPED_FOLDER

from .command import run_benchmark
from .long_documents import DocumentWriter, read_passages
from .long_scoring import LongPrompt, System, make_prompts, read_scores, score_systems, summarize_scores
from .long_target import MAX_POSITIONS, NatsSum

TRAINED_LENGTH, SCALE = 512, 16
CONTEXTS, LAST_TOKENS = (512, 2048), 256
"""Lengths of the context that the target gets for the last tokens of the longest prompts."""


@dataclass
class LongShipped:
    """Score the shipped drafter as it is, and with a window, sinks and scaled positions."""

    # Folder of the scores.
    work: str = "runs/long-shipped"
    # JSON file of the results; null writes none.
    out: str | None = "eval/results/long-shipped.json"
    # Number of documents that prompts are cut from: two for each range of positions.
    documents: int = 3

    def run(self) -> None:
        folder = Path(self.work).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        target = Target.from_pretrained("smollm2")
        target.pack_weights()
        writer = DocumentWriter(target.tokenizer, read_passages(target.tokenizer, held_out=False), seed=3)
        prompts = make_prompts([writer.write_document(MAX_POSITIONS) for _ in range(self.documents)])
        systems = list_systems(target)
        score_systems(systems, folder, target, prompts)
        limited = measure_limited(target, folder, [prompt for prompt in prompts if len(prompt.tokens) > MAX_POSITIONS // 2])
        rows = [{"name": system.name, "changes": system.changes, "sinks": system.sinks,
                 **summarize_scores(read_scores(folder, system))} for system in systems]  # fmt: skip
        perplexity = {"by_position": pool_nats(read_scores(folder, systems[0])), "last_tokens_by_context": limited}
        if self.out is not None:
            results = {"dtype": str(target.dtype), "target": perplexity, "rows": rows, "provenance": collect_provenance()}
            write_text(Path(self.out), json.dumps(results, indent=1) + "\n")


def list_systems(target: Target) -> list[System]:
    """Return the shipped drafter as it is and with each change."""
    run, rope = str(SHIPPED_FOLDER.absolute() / "smollm2-eagle3"), dict(target.config.rope_parameters)
    head = target.config.hidden_size // target.config.num_attention_heads
    # For the base of "NTK" scaling see YaRN (Peng et al., 2023), section 3.1.
    ntk = {**rope, "rope_theta": rope["rope_theta"] * SCALE ** (head / (head - 2))}
    linear = {**rope, "rope_type": "linear", "factor": float(SCALE)}
    return [
        System("full", run),
        System("window", run, {"window": TRAINED_LENGTH}),
        System("sinks", run, sinks=4, window=TRAINED_LENGTH - 4),
        System("linear", run, {"architecture": {"rope_parameters": linear}}),
        System("ntk", run, {"architecture": {"rope_parameters": ntk}}),
    ]


def pool_nats(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the perplexity by position, over all prompts."""
    sums: dict[str, NatsSum] = {}
    for row in rows:
        for name, (nats, count) in row["nats"].items():
            total = sums.setdefault(name, NatsSum())
            total.nats, total.count = total.nats + nats, total.count + count
    return {name: total.perplexity for name, total in sums.items()}


@torch.inference_mode()
def measure_limited(target: Target, folder: Path, prompts: list[LongPrompt]) -> dict[str, float]:
    """Return the perplexity of the last tokens of long prompts by the length of the context before them."""
    path = folder / "limited.json"
    sums = {str(context): NatsSum() for context in (*CONTEXTS, "all")}
    for prompt in prompts if not path.exists() else []:
        labels = torch.tensor(prompt.tokens[-LAST_TOKENS:])
        for name, total in sums.items():
            tokens = prompt.tokens if name == "all" else prompt.tokens[-int(name) - LAST_TOKENS :]
            final = target.features(torch.tensor([tokens]), ("final",)).at_layer("final")[0, -LAST_TOKENS - 1 : -1]
            total.add(torch.nn.functional.cross_entropy(target.head.logits(final).float(), labels, reduction="none"))
    if not path.exists():
        write_text(path, json.dumps({name: total.perplexity for name, total in sums.items()}))
    limited: dict[str, float] = json.loads(path.read_text())
    return limited


if __name__ == "__main__":
    run_benchmark(LongShipped)
