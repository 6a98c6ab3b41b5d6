"""Drafters by position in texts of up to 8,192 tokens: the one that ships, what helps it, and families that are trained here.

    python -m benchmarks.long_drafters [work=DIR] [out=eval/results/long-drafters.json]
    python -m benchmarks.long_drafters 'families=["eagle3","dflash","mtp","peagle","gkd"]' steps=400 documents=24

SmolLM2 reads 8,192 tokens and uses them: its perplexity by position, and with less context, is measured on the same prompts.
The shipped drafter was trained on texts of up to 512 tokens. `families` are trained on long documents and on the same documents
in pieces of 512 tokens: the same tokens, as many in a batch, as many steps. What the folder holds already is not done again.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spectrain.cli.main import dispatch_command
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.runs.folder import SHIPPED_FOLDER

from .command import run_benchmark
from .long_documents import Document, DocumentWriter, read_passages
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

SHORT, LONG, SCORED_LENGTH = 512, 4096, 8192
SCALE = SCORED_LENGTH // SHORT
ANCHORS = 64
"""Anchors of dflash in every 512 tokens of a text."""
CONTEXTS, LAST_TOKENS = (512, 2048), 256
"""Lengths of the context that the target gets for the last tokens of the longest prompts."""
TRAINING = [
    "target=smollm2", "data=tokens", "data.limit=null", "data.held_out=0", "eval=none", "trainer.resume=auto",
    f"trainer.batch_tokens={LONG}", "trainer.save_every=null", "trainer.epochs=1",
]  # fmt: skip


@dataclass
class LongDrafters:
    """Train the drafters that are missing, score all, and write the results."""

    # Folder of the drafters and of all scores.
    work: str = "runs/long-drafters"
    # JSON file of the results; null writes none.
    out: str | None = "eval/results/long-drafters.json"
    # Recipes to train on texts of 512 and of 4,096 tokens.
    families: tuple[str, ...] = ()
    # Steps of each training, of 4,096 tokens.
    steps: int = 400
    # Number of documents that prompts are cut from: two for each range of positions.
    documents: int = 3

    def run(self) -> None:
        self.folder = Path(self.work).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        target = Target.from_pretrained("smollm2")
        if self.families:
            self._write_data(target)
        for family in self.families:
            for length in (SHORT, LONG):
                self._train(family, length)
        target.pack_weights()
        writer = DocumentWriter(target.tokenizer, read_passages(target.tokenizer, held_out=True), seed=1)
        documents = [writer.write_document(SCORED_LENGTH) for _ in range(self.documents)]
        prompts, systems = make_prompts(documents), [*list_shipped(target), *self._list_trained()]
        score_systems(systems, self.folder, target, prompts)
        limited = measure_limited(target, self.folder, [prompt for prompt in prompts if len(prompt.tokens) > RANGES[-1][0]])
        if self.out is not None:
            perplexity = {"by_position": pool_nats(read_scores(self.folder, systems[0])), "last_tokens_by_context": limited}
            rows = [self._describe_system(system, systems[0]) for system in systems]
            results = {"dtype": str(target.dtype), "target": perplexity, "rows": rows, "provenance": collect_provenance()}
            write_text(Path(self.out), json.dumps(results, indent=1) + "\n")

    def _list_trained(self) -> list[System]:
        names = [f"{family}-{length}" for family in self.families for length in (SHORT, LONG)]
        return [System(name, name) for name in names]

    def _write_data(self, target: Target) -> None:
        """Write documents of 4,096 tokens, and the same ones in pieces of 512."""
        if (self.folder / f"{LONG}.jsonl").exists():
            return
        writer = DocumentWriter(target.tokenizer, read_passages(target.tokenizer, held_out=False), seed=2)
        documents: list[Document] = [writer.write_document(LONG) for _ in range(self.steps)]
        for length in (SHORT, LONG):
            rows = [document.tokens[start : start + length] for document in documents for start in range(0, LONG, length)]
            lines = [json.dumps({"input_ids": row, "loss_mask": [1] * len(row)}) for row in rows]
            write_text(self.folder / f"{length}.jsonl", "\n".join(lines) + "\n")

    def _train(self, family: str, length: int) -> None:
        """Train a drafter unless its folder holds one, and note the CPU seconds that it took."""
        run = self.folder / f"{family}-{length}"
        if (run / "cpu_seconds.json").exists():
            return
        anchors = [f"drafter.num_anchors={ANCHORS * length // SHORT}"] if family == "dflash" else []
        data, start = self.folder / f"{length}.jsonl", time.process_time()
        settings = [f"recipe={family}", f"data.path={data}", f"data.max_length={length}", f"run={run}", *anchors]
        dispatch_command(["train", *settings, *TRAINING])
        write_text(run / "cpu_seconds.json", json.dumps(round(time.process_time() - start, 1)))

    def _describe_system(self, system: System, reference: System) -> dict[str, Any]:
        """Return the settings and the numbers of a system, relative to another one too."""
        path = self.folder / system.run / "cpu_seconds.json"
        seconds = json.loads(path.read_text()) if path.exists() else None
        scores = read_scores(self.folder, system)
        numbers = {**summarize_scores(scores), "relative": compare_scores(scores, read_scores(self.folder, reference))}
        return {"name": system.name, "changes": system.changes, "sinks": system.sinks, "cpu_seconds": seconds, **numbers}


def list_shipped(target: Target) -> list[System]:
    """Return the shipped drafter as it is and with each change."""
    run, rope = str(SHIPPED_FOLDER.absolute() / "smollm2-eagle3"), dict(target.config.rope_parameters)
    head = target.config.hidden_size // target.config.num_attention_heads
    # For the base of "NTK" scaling see YaRN (Peng et al., 2023), section 3.1.
    ntk = {**rope, "rope_theta": rope["rope_theta"] * SCALE ** (head / (head - 2))}
    linear = {**rope, "rope_type": "linear", "factor": float(SCALE)}
    return [
        System("full", run),
        System("window", run, {"window": SHORT}),
        System("sinks", run, sinks=4, window=SHORT - 4),
        System("linear", run, {"architecture": {"rope_parameters": linear}}),
        System("ntk", run, {"architecture": {"rope_parameters": ntk}}),
    ]


def pool_nats(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the perplexity by position, over all prompts."""
    sums: dict[str, torch.Tensor] = {}
    for row in rows:
        for name, total in row["nats"].items():
            sums[name] = sums.get(name, torch.zeros(2, dtype=torch.float64)) + torch.tensor(total, dtype=torch.float64)
    return {name: round(float((nats / count).exp()), 3) for name, (nats, count) in sums.items()}


@torch.inference_mode()
def measure_limited(target: Target, folder: Path, prompts: list[LongPrompt]) -> dict[str, float]:
    """Return the perplexity of the last tokens of long prompts by the length of the context before them."""
    path, nats = folder / "limited.json", dict[str, float]()
    if not path.exists():
        for context in (*CONTEXTS, SCORED_LENGTH):
            parts = [prompt.tokens[-context - LAST_TOKENS :] for prompt in prompts]
            nats[str(context)] = sum(measure_last(target, tokens) for tokens in parts) / len(parts)
        write_text(path, json.dumps({name: round(float(torch.tensor(value).exp()), 3) for name, value in nats.items()}))
    limited: dict[str, float] = json.loads(path.read_text())
    return limited


def measure_last(target: Target, tokens: list[int]) -> float:
    """Return the mean loss in nats of the last tokens of a text."""
    final = target.features(torch.tensor([tokens]), ("final",)).at_layer("final")[0, -LAST_TOKENS - 1 : -1]
    labels = torch.tensor(tokens[-LAST_TOKENS:])
    return float(torch.nn.functional.cross_entropy(target.head.logits(final).float(), labels))


if __name__ == "__main__":
    run_benchmark(LongDrafters)
