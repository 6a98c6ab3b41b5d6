"""Train a small masked language model (LLaDA) on the embedded conversations, in minutes on a CPU.

    python -m lab.small_targets.make_masked_model --out DIR [--steps 1500]

It starts from the weights of the tiny target, which is causal, and opens its attention to both
directions (DiffuLLaMA). Answers are cut into pieces of up to `--answer` tokens. The first half of
the steps learns masked diffusion alone, the second half also to recover from the model's own tokens
(DMax) and the edits (ME-DLM). Then the indicator (NI) is fitted to trajectories of one token per
forward. Every 100 steps a line shows the loss.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from lab.small_targets.tiny_training import take_step
from spectrain.data.chat import Example, tokenize_conversation
from spectrain.data.readers import EmbeddedReader
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain_research.diffusion.model import MaskedLM
from spectrain_research.diffusion.training import (
    MaskedBatch,
    collect_indications,
    edit_loss,
    masked_loss,
)

BATCH = 16
PROMPT = 64  # tokens of a prompt at most


def read_examples(target: Target, answer_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts with their answers, cut to size: every piece of an answer follows the
    tokens before it.
    """
    pairs: list[tuple[list[int], list[int]]] = []
    for conversation in EmbeddedReader().load_conversations():
        for example in tokenize_conversation(target.template, conversation)[:1]:
            pairs += split_example(example, answer_tokens)
    return [pair for pair in pairs if len(pair[1]) > 4]


def split_example(example: Example, answer_tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the pieces of all answers of an example, each with up to `PROMPT` tokens before it."""
    starts = [
        at
        for at, is_answer in enumerate(example.mask)
        if is_answer and not (at and example.mask[at - 1])
    ]
    for first in starts:
        end = next(
            (at for at in range(first, len(example.mask)) if not example.mask[at]),
            len(example.mask),
        )
        for start in range(first, end, answer_tokens):
            yield (
                example.tokens[max(0, start - PROMPT) : start],
                example.tokens[start : min(end, start + answer_tokens)],
            )


def make_batch(pairs: list[tuple[list[int], list[int]]]) -> MaskedBatch:
    rows = [torch.tensor(prompt + answer) for prompt, answer in pairs]
    flags = [torch.tensor([False] * len(prompt) + [True] * len(answer)) for prompt, answer in pairs]
    pad = torch.nn.utils.rnn.pad_sequence
    return MaskedBatch(
        pad(rows, batch_first=True),
        pad(flags, batch_first=True),
        torch.tensor([len(row) for row in rows]),
    )


def train_model(model: MaskedLM, pairs: list[tuple[list[int], list[int]]], steps: int) -> None:
    """Train the diffusion and the edit heads."""
    source = torch.Generator().manual_seed(0)
    begin = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-3, total_steps=steps, pct_start=0.1
    )
    for step in range(steps):
        chosen = torch.randint(len(pairs), (BATCH,), generator=source).tolist()
        batch = make_batch([pairs[number] for number in chosen])
        loss = masked_loss(model, batch, source, on_policy=step > steps // 2)
        if step > steps // 2:
            loss = loss + edit_loss(model, batch, source)
        take_step(model, optimizer, loss)
        schedule.step()
        if step % 100 == 0 or step + 1 == steps:
            print(
                f"step {step}: loss {float(loss.detach()):.3f}, {time.perf_counter() - begin:.0f} "
                "s",
                flush=True,
            )


def train_indicator(model: MaskedLM, prompts: list[list[int]], answer_tokens: int) -> None:
    """Fit the indicator to the trajectories of one token per forward."""
    source = torch.Generator().manual_seed(1)
    states, logits, labels = collect_indications(model, prompts, answer_tokens, 16, source)
    optimizer = torch.optim.AdamW(model.indicator.parameters(), lr=3e-3)
    for _ in range(300):
        loss = F.binary_cross_entropy_with_logits(
            model.indicate_final(states, logits), labels.float()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(
        f"indicator: loss {float(loss.detach()):.3f}, {float(labels.float().mean()):.2f} of "
        f"{len(labels)} tokens final"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--answer", type=int, default=48)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    target = load_tiny(device="cpu")
    pairs = read_examples(target, arguments.answer)
    model = MaskedLM.from_causal(target.model)
    train_model(model, pairs, arguments.steps)
    model.eval()
    train_indicator(
        model, [prompt for prompt, _ in pairs[:: max(1, len(pairs) // 48)][:48]], arguments.answer
    )
    model.save(arguments.out)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
