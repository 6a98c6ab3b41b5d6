"""Losses of a masked language model and of its selectors. Shapes: B batch, T tokens, D width, V
vocabulary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .decoding import MaskedDecoder, take_count
from .edits import find_edits
from .model import MaskedLM


@dataclass(frozen=True)
class MaskedBatch:
    """Texts padded on the right, and which of their tokens may be masked."""

    tokens: Tensor  # [B, T]
    is_answer: Tensor  # [B, T] bool
    lengths: Tensor  # [B]


def mask_answers(
    batch: MaskedBatch, mask_id: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Mask every answer's tokens with a rate t of its own, uniform in (0, 1]; return the texts,
    the masks and t [B].
    """
    rates = torch.rand(len(batch.tokens), generator=generator).clamp(min=0.05)
    masked = batch.is_answer & (
        torch.rand(batch.tokens.shape, generator=generator) < rates[:, None]
    )
    return batch.tokens.masked_fill(masked, mask_id), masked, rates


def masked_loss(
    model: MaskedLM, batch: MaskedBatch, generator: torch.Generator, on_policy: bool = False
) -> Tensor:
    """Return the mean over answer tokens of CE / t at masked positions, the bound of a masked
    diffusion (LLaDA).

    With `on_policy`, a second forward reads the model's own tokens in place of half of the masks
    and learns to recover the text at all of these positions, weighed alike (DMax's on-policy
    uniform training).
    """
    texts, masked, rates = mask_answers(batch, model.mask_id, generator)
    logits = model.logits(model.run(texts, batch.lengths))
    each = F.cross_entropy(logits[masked], batch.tokens[masked], reduction="none")
    loss = (each / rates[:, None].expand_as(masked)[masked]).sum() / batch.is_answer.sum()
    if not on_policy:
        return loss
    shown = masked & (torch.rand(masked.shape, generator=generator) < 0.5)
    own = torch.where(shown, logits.detach().argmax(-1), texts)
    again = model.logits(model.run(own, batch.lengths))[masked]
    return (
        loss + F.cross_entropy(again, batch.tokens[masked], reduction="sum") / batch.is_answer.sum()
    )


def edit_loss(model: MaskedLM, batch: MaskedBatch, generator: torch.Generator) -> Tensor:
    """Return the mean loss of the edit heads on answers that the model filled in one step, randomly
    cut and extended.

    Labels are the shortest script from such an answer to the text's.
    """
    texts, masked, _ = mask_answers(batch, model.mask_id, generator)
    with torch.no_grad():
        filled = torch.where(
            masked, model.logits(model.run(texts, batch.lengths)).argmax(-1), texts
        )
    draw = random.Random(int(torch.randint(1 << 30, (1,), generator=generator)))
    rows = []
    labels = []
    for tokens, source, is_answer, length in zip(
        batch.tokens, filled, batch.is_answer, batch.lengths.tolist()
    ):
        first = int(is_answer.nonzero()[0])
        wrong = corrupt_tokens(source[first:length].tolist(), model.config.vocab_size, draw)
        prompt = tokens[:first].tolist()
        rows.append([*prompt, *wrong])
        edits = find_edits([prompt[-1], *wrong], [prompt[-1], *tokens[first:length].tolist()])
        labels.append([(-1, 0)] * (first - 1) + edits)
    size = max(map(len, rows))
    sources = torch.tensor([row + [0] * (size - len(row)) for row in rows])
    operations, written = torch.tensor(
        [row + [(-1, 0)] * (size - len(row)) for row in labels]
    ).unbind(-1)
    states = model.run(sources, torch.tensor([len(row) for row in rows]))
    edit_logits, token_logits = model.edit_logits(states)
    writes = (operations == 1) | (operations == 3)
    judged = operations >= 0
    loss = F.cross_entropy(edit_logits[judged], operations[judged])
    if bool(writes.any()):
        loss = (
            loss
            + F.cross_entropy(token_logits[writes], written[writes], reduction="sum") / judged.sum()
        )
    return loss


def corrupt_tokens(tokens: list[int], vocab_size: int, draw: random.Random) -> list[int]:
    """Delete some tokens, and insert random ones after some others."""
    result = []
    for token in tokens:
        if draw.random() > 0.05:
            result.append(token)
        if draw.random() < 0.03:
            result.append(draw.randrange(vocab_size))
    return result


@torch.no_grad()
def collect_indications(
    model: MaskedLM,
    prompts: list[list[int]],
    num_tokens: int,
    block_size: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return states [R, D] and logits [R, V] at masks of partly decoded answers, and whether the
    likeliest token is final [R].

    Final are the tokens of decoding one by one (the trajectory that the indicator preserves).
    Answers are masked at random.
    """
    states = []
    logits = []
    labels = []
    for prompt in prompts:
        answer = MaskedDecoder(model, take_count(1), block_size).decode(prompt, num_tokens).tokens
        text = torch.tensor([*prompt, *answer])
        for _ in range(4):
            rate = float(torch.rand((), generator=generator))
            masked = torch.rand(len(text), generator=generator) < rate
            masked[: len(prompt)] = False
            hidden = model.run(text.masked_fill(masked, model.mask_id)[None])[0, masked]
            states.append(hidden)
            logits.append(model.logits(hidden))
            labels.append(logits[-1].argmax(-1) == text[masked])
    return torch.cat(states), torch.cat(logits), torch.cat(labels)
