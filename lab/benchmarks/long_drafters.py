"""The drafter that ships by position in texts of up to 8,192 tokens, and what helps it without
training.

    python -m lab.benchmarks.long_drafters [work=DIR] [out=lab/results/long-drafters.json]

SmolLM2 reads 8,192 tokens and uses them: its perplexity by position, and with less context, is
measured on the same prompts. The shipped drafter was trained on texts of up to 512 tokens. Prompts
that the folder has scores of are not scored again. `long_families` trains families on short and on
long texts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.runs.folder import require_drafter_directory

from .command import run_benchmark
from .long_documents import DocumentWriter, read_passages
from .long_scoring import (
    RANGES,
    LongPrompt,
    System,
    compare_scores,
    make_prompts,
    read_scores,
    score_systems,
    summarize_scores,
)

SHORT = 512
SCORED_LENGTH = 8192
SCALE = SCORED_LENGTH // SHORT
CONTEXTS = (512, 2048)
LAST_TOKENS = 256
"""Lengths of the context that the target gets for the last tokens of the longest prompts."""


@dataclass
class LongDrafters:
    """Score the drafter with every change, and write the results."""

    # Folder of all scores.
    work: str = "runs/long-drafters"
    # JSON file of the results; null writes none.
    out: str | None = "lab/results/long-drafters.json"
    # Number of documents that prompts are cut from: two for each range of positions.
    documents: int = 3

    def run(self) -> None:
        self.folder = Path(self.work).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        target = Target.from_pretrained("smollm2")
        target.pack_weights()
        writer = DocumentWriter(
            target.tokenizer, read_passages(target.tokenizer, held_out=True), seed=1
        )
        documents = [writer.write_document(SCORED_LENGTH) for _ in range(self.documents)]
        prompts = make_prompts(documents)
        systems = list_shipped(target)
        score_systems(systems, self.folder, target, prompts)
        limited = measure_limited(
            target,
            self.folder,
            [prompt for prompt in prompts if len(prompt.tokens) > RANGES[-1][0]],
        )
        if self.out is not None:
            perplexity = {
                "by_position": pool_nats(read_scores(self.folder, systems[0])),
                "last_tokens_by_context": limited,
            }
            rows = [self._describe_system(system, systems[0]) for system in systems]
            results = {
                "dtype": str(target.dtype),
                "target": perplexity,
                "rows": rows,
                "provenance": collect_provenance(),
            }
            write_text(Path(self.out), json.dumps(results, indent=1) + "\n")

    def _describe_system(self, system: System, reference: System) -> dict[str, Any]:
        """Return the settings and the numbers of a system, relative to another one too."""
        scores = read_scores(self.folder, system)
        numbers = {
            **summarize_scores(scores),
            "relative": compare_scores(scores, read_scores(self.folder, reference)),
        }
        return {"name": system.name, "changes": system.changes, "sinks": system.sinks, **numbers}


def list_shipped(target: Target) -> list[System]:
    """Return the shipped drafter as it is and with each change."""
    run = str(require_drafter_directory("run", "smollm2-eagle3").absolute())
    ropes = scale_rope(target)
    return [
        System("full", run),
        System("window", run, {"window": SHORT}),
        System("sinks", run, sinks=4, window=SHORT - 4),
        *(
            System(name, run, {"architecture": {"rope_parameters": rope}})
            for name, rope in ropes.items()
        ),
    ]


def scale_rope(target: Target) -> dict[str, dict[str, Any]]:
    """Return rotary settings of a drafter of short texts for long ones: positions divided, and
    NTK's larger base.
    """
    rope = dict(target.config.rope_parameters)
    head = (
        getattr(target.config, "head_dim", None)
        or target.config.hidden_size // target.config.num_attention_heads
    )
    # For the base of "NTK" scaling see YaRN (Peng et al., 2023), section 3.1.
    ntk = {**rope, "rope_theta": rope["rope_theta"] * SCALE ** (head / (head - 2))}
    return {"linear": {**rope, "rope_type": "linear", "factor": float(SCALE)}, "ntk": ntk}


def pool_nats(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the perplexity by position, over all prompts."""
    sums: dict[str, torch.Tensor] = {}
    for row in rows:
        for name, total in row["nats"].items():
            sums[name] = sums.get(name, torch.zeros(2, dtype=torch.float64)) + torch.tensor(
                total, dtype=torch.float64
            )
    return {name: round(float((nats / count).exp()), 3) for name, (nats, count) in sums.items()}


@torch.inference_mode()
def measure_limited(target: Target, folder: Path, prompts: list[LongPrompt]) -> dict[str, float]:
    """Return the perplexity of the last tokens of long prompts by the length of the context
    before them.
    """
    path = folder / "limited.json"
    nats = dict[str, float]()
    if not path.exists():
        for context in (*CONTEXTS, SCORED_LENGTH):
            parts = [prompt.tokens[-context - LAST_TOKENS :] for prompt in prompts]
            nats[str(context)] = sum(measure_last(target, tokens) for tokens in parts) / len(parts)
        write_text(
            path,
            json.dumps(
                {name: round(float(torch.tensor(value).exp()), 3) for name, value in nats.items()}
            ),
        )
    limited: dict[str, float] = json.loads(path.read_text())
    return limited


def measure_last(target: Target, tokens: list[int]) -> float:
    """Return the mean loss in nats of the last tokens of a text."""
    final = target.features(torch.tensor([tokens]), ("final",)).at_layer("final")[
        0, -LAST_TOKENS - 1 : -1
    ]
    labels = torch.tensor(tokens[-LAST_TOKENS:])
    return float(torch.nn.functional.cross_entropy(target.head.logits(final).float(), labels))


if __name__ == "__main__":
    run_benchmark(LongDrafters)
