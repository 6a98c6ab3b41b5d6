"""Decoding of a masked language model: policies that unmask, and PSD, which verifies several steps
in one forward.

A step runs the model on a partly masked text and unmasks some positions with their likeliest
tokens. Plain decoding makes one step per forward. Shapes: T tokens, K rows of a forward, V
vocabulary, D width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .model import MaskedLM


@dataclass(frozen=True)
class Prediction:
    """What one forward says of a text: the likeliest token of every position, its probability,
    and whether it is final.
    """

    tokens: Tensor  # [T]
    confidence: Tensor  # [T]
    # [T] estimated probability that the token is final, for policies that read it
    final: Tensor | None = None


Policy = Callable[[Prediction, Tensor], Tensor]
"""(prediction, masked positions of the current block [T] bool) -> the positions to unmask [T]
bool, at least one of them.
"""


def take_count(count: int) -> Policy:
    """Unmask the `count` most confident positions of every step."""

    def choose(prediction: Prediction, is_open: Tensor) -> Tensor:
        return mark_best(prediction.confidence, is_open, count)

    return choose


def take_confident(threshold: float) -> Policy:
    """Unmask all positions whose confidence exceeds a threshold, and the most confident one in
    any case (Fast-dLLM).
    """

    def choose(prediction: Prediction, is_open: Tensor) -> Tensor:
        return (is_open & (prediction.confidence > threshold)) | mark_best(
            prediction.confidence, is_open, 1
        )

    return choose


def take_final(threshold: float) -> Policy:
    """Unmask all positions that the neural indicator calls final, and the most confident one in
    any case (NI).
    """

    def choose(prediction: Prediction, is_open: Tensor) -> Tensor:
        assert prediction.final is not None
        return (is_open & (prediction.final > threshold)) | mark_best(
            prediction.confidence, is_open, 1
        )

    return choose


def mark_best(values: Tensor, is_open: Tensor, count: int) -> Tensor:
    """Mark the open positions [T] of the `count` largest values."""
    best = values.masked_fill(~is_open, -1.0).topk(min(count, int(is_open.sum()))).indices
    return torch.zeros_like(is_open).index_fill(0, best, True)


@dataclass
class Decoded:
    """The result of decoding a text."""

    tokens: list[int]
    num_forwards: int = 0
    num_rows: int = 0  # rows of all forwards
    num_steps: int = 0
    seconds: float = 0.0
    states: list[list[int]] = field(default_factory=list)  # the text after every step


class MaskedDecoder:
    """Decodes texts block by block with a policy; with `depth` above 1, several steps per
    forward (PSD).
    """

    def __init__(
        self,
        model: MaskedLM,
        policy: Policy,
        block_size: int,
        depth: int = 1,
        reads_indicator: bool = False,
    ) -> None:
        self.model = model
        self.policy = policy
        self.block_size = block_size
        self.depth = depth
        self.reads_indicator = reads_indicator

    @torch.inference_mode()
    def decode(self, prompt: list[int], num_tokens: int) -> Decoded:
        """Fill `num_tokens` masks after a prompt.

        From the confidences of one forward the policy makes the next step, which is certain, and
        further steps, which are drafts. The next forward runs all these texts as a batch. The step
        after text j is certain if text j is; where it equals text j + 1, that one is certain too.
        So the texts, and the answer, are those of one step per forward.
        """
        begin = time.perf_counter()
        text = torch.tensor([*prompt, *[self.model.mask_id] * num_tokens])
        result = Decoded([])
        drafts = [text]
        while bool((drafts[0] == self.model.mask_id).any()):
            predictions = self.predict(torch.stack(drafts))
            result.num_forwards, result.num_rows = (
                result.num_forwards + 1,
                result.num_rows + len(drafts),
            )
            for number, prediction in enumerate(predictions):
                step = self.make_step(drafts[number], prediction, len(prompt))
                result.num_steps += 1
                result.states.append(step.tolist())
                if number + 1 == len(drafts) or not torch.equal(step, drafts[number + 1]):
                    break
            drafts = self.draft_steps(step, prediction, len(prompt))
        result.tokens = drafts[0][len(prompt) :].tolist()
        result.seconds = time.perf_counter() - begin
        return result

    def predict(self, texts: Tensor) -> list[Prediction]:
        """Run texts [K, T] and return what is said of each."""
        states = self.model.run(texts)
        logits = self.model.logits(states)
        best = logits.float().softmax(-1).max(-1)
        final = (
            self.model.indicate_final(states, logits).sigmoid()
            if self.reads_indicator
            else [None] * len(texts)
        )
        return [Prediction(*parts) for parts in zip(best.indices, best.values, final)]

    def make_step(self, text: Tensor, prediction: Prediction, start: int) -> Tensor:
        """Return the text [T] after the policy's next step, in the first block that has a mask."""
        masked = text == self.model.mask_id
        block = (int(masked.nonzero()[0]) - start) // self.block_size
        first = start + block * self.block_size
        is_open = torch.zeros_like(masked)
        is_open[first : first + self.block_size] = masked[first : first + self.block_size]
        return torch.where(self.policy(prediction, is_open), prediction.tokens, text)

    def draft_steps(self, text: Tensor, prediction: Prediction, start: int) -> list[Tensor]:
        """Return the text and up to `depth` - 1 further steps by the same prediction; the last
        one has a mask.
        """
        drafts = [text]
        while len(drafts) < self.depth:
            masked = drafts[-1] == self.model.mask_id
            if not bool(masked.any()):
                break
            drafts.append(self.make_step(drafts[-1], prediction, start))
        if len(drafts) > 1 and not bool((drafts[-1] == self.model.mask_id).any()):
            # A text without a mask needs no forward: the step before it says whether it is right.
            drafts.pop()
        return drafts


@torch.inference_mode()
def decode_soft(
    model: MaskedLM,
    prompt: list[int],
    num_tokens: int,
    block_size: int,
    threshold: float,
    soft: bool = True,
    revises: bool = True,
) -> Decoded:
    """Decode with DMax's soft parallel decoding (Chen et al., 2026, arXiv 2604.08302).

    In a block, every position whose confidence c exceeds `threshold`, and the most confident one
    that was masked, is promoted: its next input is c E(token) + (1 - c) E(mask), and later forwards
    may change its token. A block ends when all of its positions are promoted and a forward changes
    none of them, or after twice as many forwards as positions. Without `soft` and `revises` this is
    decoding by `take_confident`.
    """
    begin = time.perf_counter()
    start = len(prompt)
    text = torch.tensor([*prompt, *[model.mask_id] * num_tokens])
    confidence = torch.ones(len(text))
    result = Decoded([])
    for first in range(start, len(text), block_size):
        block = slice(first, min(first + block_size, len(text)))
        for _ in range(2 * block_size):
            masked = text[block] == model.mask_id
            embedded = model.embedding(text)
            mask = model.embedding.weight[model.mask_id]
            inputs = (
                confidence[:, None] * embedded + (1 - confidence[:, None]) * mask
                if soft
                else embedded
            )
            best = model.logits(model.run(inputs[None]))[0, block].float().softmax(-1).max(-1)
            result.num_forwards = result.num_forwards + 1
            result.num_rows = result.num_rows + 1
            result.num_steps = result.num_steps + 1
            promoted = masked & (best.values > threshold)
            if bool(masked.any()):
                promoted |= mark_best(best.values, masked, 1)
            if revises:
                promoted |= ~masked
            changed = torch.where(promoted, best.indices, text[block])
            is_done = (
                torch.equal(changed, text[block])
                if revises
                else not bool((changed == model.mask_id).any())
            )
            confidence[block] = torch.where(
                promoted, best.values.to(confidence.dtype), confidence[block]
            )
            text[block] = changed
            if is_done and not bool((changed == model.mask_id).any()):
                break
        confidence[block] = 1.0
    result.tokens = text[start:].tolist()
    result.seconds = time.perf_counter() - begin
    return result
