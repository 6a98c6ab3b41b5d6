"""Where features come from. Shapes: B batch, T tokens, L layers, D target width."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Literal

import torch
from torch import Tensor

from .acceptance import Greedy, Interleaved, Match
from .data.chat import Example
from .data.dataset import Dataset, collate
from .decode import decode
from .drafters.base import Drafter
from .errors import UserError
from .features import Batch, Features, Layer
from .replay import KEPT, Recorder, Replay, collate_replays, replays
from .shapes import Chain
from .target import Target


class Source(ABC):
    """Turns examples into batches that hold the features a drafter reads."""

    @abstractmethod
    def batch(
        self,
        dataset: Dataset,
        indices: list[int],
        target: Target,
        layers: tuple[Layer, ...],
        drafter: Drafter | None = None,
        step: int = 0,
    ) -> Batch:
        """These examples with their features; without features where `layers` is empty. Some sources ask the drafter too."""


class Live(Source):
    """Runs the target while training and keeps up to `keep_gb` of features in memory for later epochs."""

    def __init__(self, keep_gb: float = 0.0) -> None:
        self.keep_bytes = int(keep_gb * 1e9)
        self.kept: dict[int, Tensor] = {}  # example -> [T, L, D]
        self.bytes = 0

    def batch(
        self,
        dataset: Dataset,
        indices: list[int],
        target: Target,
        layers: tuple[Layer, ...],
        drafter: Drafter | None = None,
        step: int = 0,
    ) -> Batch:
        batch = dataset.batch(indices).to(target.device)
        if not layers:
            return batch
        if all(index in self.kept for index in indices):
            width = batch.tokens.shape[1]
            rows = [self.kept[index] for index in indices]
            hidden = torch.stack([torch.nn.functional.pad(row, (0, 0, 0, 0, 0, width - len(row))) for row in rows])
            features = Features(batch.tokens, layers, hidden.to(target.device))
        else:
            features = target.features(batch.tokens, layers)
            self._keep(dataset, indices, features.hidden)
        return Batch(batch.tokens, batch.loss_mask, features)

    def _keep(self, dataset: Dataset, indices: list[int], hidden: Tensor) -> None:
        for row, index in enumerate(indices):
            kept = hidden[row, : len(dataset.examples[index].tokens)]
            size = kept.numel() * kept.element_size()
            if index not in self.kept and self.bytes + size <= self.keep_bytes:
                self.kept[index] = kept.to("cpu", copy=True)
                self.bytes += size


class Generated(Source):
    """Sequences written anew while training: of each batch, a `fraction` (GKD's lambda), drawn for each sequence by itself.

    `by` the drafter (on-policy), the target, or interleaved (speculative knowledge distillation, Xu et al., 2024): the drafter
    writes and the target replaces what is not among its `top_k` likeliest tokens, checked `block` tokens at a time. An
    answer is written for the first prompt of a conversation, at most `max_new_tokens` long and no longer than the longest of
    the data's that it is written with; a prompt that leaves no room for two tokens keeps the data's. By replay,
    the target decodes greedily with chains of `block` drafts, and a draft of that is learnt from with Draft-OPD's split loss.
    """

    def __init__(
        self,
        fraction: float = 0.5,
        by: Literal["drafter", "target", "interleaved", "replay"] = "drafter",
        temperature: float = 1.0,
        max_new_tokens: int = 128,
        top_k: int = 25,
        block: int = 4,
        seed: int = 0,
    ) -> None:
        if not 0 <= fraction <= 1:
            raise UserError(f"source.fraction={fraction}: use 0 to 1")
        for key, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k), ("block", block)):
            if value < 1:
                raise UserError(f"source.{key}={value}: use 1 or more")
        if not temperature > 0:
            raise UserError(f"source.temperature={temperature}: use more than 0")
        self.fraction, self.by, self.temperature = fraction, by, temperature
        self.max_new_tokens, self.top_k, self.block, self.seed = max_new_tokens, top_k, block, seed

    def batch(
        self,
        dataset: Dataset,
        indices: list[int],
        target: Target,
        layers: tuple[Layer, ...],
        drafter: Drafter | None = None,
        step: int = 0,
    ) -> Batch:
        examples = {index: dataset.examples[index] for index in indices}
        random = Random(f"{self.seed}/{step}/{indices}")
        anew = [index for index in indices if random.random() < self.fraction and self._fits(examples[index], target, drafter)]
        if self.by == "replay":
            batch = self._replay(examples, anew, target, drafter, random)
        else:
            if anew:
                assert drafter is not None
                examples |= self._write({index: examples[index] for index in anew}, target, drafter, step)
            batch = collate(list(examples.values()))
        batch = batch.to(target.device)
        return batch if not layers else replace(batch, features=target.features(batch.tokens, layers))

    def _fits(self, example: Example, target: Target, drafter: Drafter | None) -> bool:
        """Whether an answer of two tokens has room behind the prompt."""
        writer = drafter.writer() if drafter is not None and self.by == "drafter" else None
        return len(example.prompt) + 2 <= min(target.max_length, (writer or target).max_length)

    def _limit(self, writer: Target, prompts: list[list[int]]) -> int:
        """How many tokens may be written behind these prompts."""
        return max(2, min(self.max_new_tokens, writer.max_length - max(map(len, prompts))))

    def _replay(
        self, examples: dict[int, Example], anew: list[int], target: Target, drafter: Drafter | None, random: Random
    ) -> Batch:
        """The data's sequences, nothing of them rejected, and replayed drafts in place of some."""
        found = {index: Replay(example, [KEPT] * len(example.tokens)) for index, example in examples.items()}
        if anew:
            assert drafter is not None
            if not drafter.learns_replays:
                raise UserError("source.by=replay: this family does not learn from replayed drafts; use source.by=target")
            prompts = [examples[index].prompt for index in anew]
            recorder = Recorder(Chain(self.block))
            with evaluating(drafter):
                written = decode(target, prompts, Greedy(), self._limit(target, prompts), drafter, recorder)
            for index, generation, rounds in zip(anew, written, recorder.rounds):
                for replay in replays(generation, rounds, 1, random):
                    found[index] = replay
        return collate_replays(list(found.values()))

    def _write(self, examples: dict[int, Example], target: Target, drafter: Drafter, step: int) -> dict[int, Example]:
        """New answers to the same prompts, by the examples' numbers."""
        rows = list(examples)
        prompts = [example.prompt for example in examples.values()]
        longest = max(len(example.tokens) - len(prompt) for example, prompt in zip(examples.values(), prompts))
        writer = target if self.by != "drafter" else drafter.writer()
        if writer is None:
            raise UserError("source.by=drafter: this family cannot write by itself; use source.by=target or interleaved")
        limit = max(2, min(longest, self._limit(writer, prompts)))
        seed = self.seed + 1_000_003 * step
        with evaluating(drafter):
            if self.by == "interleaved":
                rule = Interleaved(self.temperature, top_k=self.top_k, seed=seed)
                chain = Chain(self.block, "sampled", self.temperature, seed)
                found = decode(target, prompts, rule, limit, drafter, chain, rows)
            else:
                found = decode(writer, prompts, Match(self.temperature, seed=seed), limit, rows=rows)
        return {
            row: Example(prompt + one.output, [False] * len(prompt) + [True] * len(one.output))
            for row, prompt, one in zip(rows, prompts, found)
        }


@contextmanager
def evaluating(drafter: Drafter) -> Iterator[None]:
    """The drafter as it decodes, in the middle of its training."""
    training = drafter.training
    drafter.eval()
    try:
        yield
    finally:
        drafter.train(training)
