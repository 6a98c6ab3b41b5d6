"""A target with 8,192 positions that uses its context: `tiny` with a larger base of its rotary embedding, trained further on
long documents that repeat themselves (`long_documents`), first of 2,048 tokens, then of 4,096 and 8,192."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from spectrain.files import write_text
from spectrain.models.fast import pack_linears, unpack_linears
from spectrain.models.loading import TINY_DIRECTORY, load_tokenizer

from .long_documents import Document, DocumentWriter, read_passages

MAX_POSITIONS, ROPE_THETA = 8192, 200_000.0
PHASES = ((2048, 70), (4096, 20), (8192, 8))
"""(tokens of a document, steps) of the training."""
BATCH_TOKENS, LR, WARMUP_STEPS = 4096, 1e-3, 10
RANGES = ((0, 1024), (1024, 2048), (2048, 4096), (4096, 8192))
SCORED_DOCUMENTS, LIMITED_CONTEXTS, PIECE = 3, (512, 1024, 2048, 4096), 512


def load_long_model() -> Any:
    """Return tiny in float32 with 8,192 positions and the base of the rotary embedding that they need."""
    model = LlamaForCausalLM.from_pretrained(TINY_DIRECTORY, dtype=torch.float32)
    config = model.config
    config.max_position_embeddings = MAX_POSITIONS
    config.rope_parameters = {"rope_type": "default", "rope_theta": ROPE_THETA}
    return LlamaForCausalLM.from_pretrained(TINY_DIRECTORY, config=config, dtype=torch.float32)


def train_target(folder: Path) -> None:
    """Train the target and write it with its perplexity by position, unless the folder holds it already."""
    if (folder / "perplexity.json").exists():
        return
    torch.manual_seed(0)
    model, tokenizer = load_long_model(), load_tokenizer(str(TINY_DIRECTORY), False, True)
    writer = DocumentWriter(tokenizer, read_passages(tokenizer, held_out=False), seed=0)
    before, start = measure_perplexity(model, tokenizer), time.process_time()
    pack_linears(model)
    num_tokens = train_phases(model.train(), writer)
    unpack_linears(model.eval())
    facts = {"tokens": num_tokens, "cpu_seconds": round(time.process_time() - start, 1), "phases": PHASES}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    results = {"training": facts, "before": before, "after": measure_perplexity(model, tokenizer)}
    write_text(folder / "perplexity.json", json.dumps(results, indent=1) + "\n")


def train_phases(model: Any, writer: DocumentWriter) -> int:
    """Train on documents of rising length with a cosine over all steps; return the number of tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.05)
    total, step, num_tokens = sum(steps for _, steps in PHASES), 0, 0
    for length, steps in PHASES:
        for _ in range(steps):
            rows = [writer.write_document(length).tokens for _ in range(max(1, BATCH_TOKENS // length))]
            rate = min((step + 1) / WARMUP_STEPS, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / total)))
            for group in optimizer.param_groups:
                group["lr"] = LR * rate
            loss = token_losses(model, rows).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step, num_tokens = step + 1, num_tokens + length * len(rows)
            if step % 10 == 0:
                print(f"target: step {step} of {total}, {length} tokens, {loss.item():.3f} nats a token", flush=True)
    return num_tokens


def token_losses(model: Any, rows: Sequence[list[int]]) -> Tensor:
    """Return the loss in nats [B, T - 1] of every token but the first of texts of equal length."""
    tokens = torch.tensor(rows)
    logits = model(tokens, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def iterate_test_documents(tokenizer: Any) -> Iterator[Document]:
    """Yield documents of 8,192 tokens from conversations that nothing was trained on, without end."""
    writer = DocumentWriter(tokenizer, read_passages(tokenizer, held_out=True), seed=1)
    while True:
        yield writer.write_document(MAX_POSITIONS)


@dataclass
class NatsSum:
    """The sum of losses in nats and the number of tokens."""

    nats: float = 0.0
    count: int = 0

    def add(self, losses: Tensor) -> None:
        self.nats, self.count = self.nats + float(losses.sum()), self.count + losses.numel()

    @property
    def perplexity(self) -> float:
        return round(math.exp(self.nats / max(1, self.count)), 3)


@torch.inference_mode()
def measure_perplexity(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the perplexity by position, in repetitions and in new text, and of the last half of the positions with less
    context."""
    documents = [document for document, _ in zip(iterate_test_documents(tokenizer), range(SCORED_DOCUMENTS))]
    by_position = {f"{low // 1024}-{high // 1024}k": {"all": NatsSum(), "new": NatsSum(), "repeated": NatsSum()}
                   for low, high in RANGES}  # fmt: skip
    limited = {str(context): NatsSum() for context in (*LIMITED_CONTEXTS, "all")}
    for document in documents:
        losses = torch.cat([torch.zeros(1), token_losses(model, [document.tokens])[0]])
        repeated = mark_repetitions(document)
        for (low, high), sums in zip(RANGES, by_position.values()):
            part, marks = losses[max(1, low) : high], repeated[max(1, low) : high]
            sums["all"].add(part)
            sums["new"].add(part[~marks])
            sums["repeated"].add(part[marks])
        limited["all"].add(losses[MAX_POSITIONS // 2 :])
        for context in LIMITED_CONTEXTS:
            for start in range(MAX_POSITIONS // 2, MAX_POSITIONS, PIECE):
                piece = document.tokens[start - context : start + PIECE]
                limited[str(context)].add(token_losses(model, [piece])[0, -PIECE:])
    table = {name: {kind: total.perplexity for kind, total in sums.items()} for name, sums in by_position.items()}
    return {"by_position": table, "last_half_by_context": {name: total.perplexity for name, total in limited.items()}}


def mark_repetitions(document: Document) -> Tensor:
    """Return which tokens [T] belong to repetitions."""
    marks = torch.zeros(len(document.tokens), dtype=torch.bool)
    for segment in document.segments:
        marks[segment.start : segment.end] = segment.source is not None
    return marks
