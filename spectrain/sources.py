"""Where features come from. Shapes: B batch, T tokens, L layers, D target width."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Literal

from torch import Tensor

from .acceptance import Greedy, Interleaved, Match
from .data.chat import Example
from .data.dataset import collate
from .decode import decode
from .drafters.base import Drafter
from .errors import UserError
from .features import Batch, Features, Layer, laid_out
from .replay import KEPT, Recorder, Replay, collate_replays, replays
from .shapes import Chain
from .target import Target


class Source(ABC):
    """Turns examples into batches that hold the features a drafter reads."""

    asks_drafter = False  # it lets the drafter write

    @abstractmethod
    def batch(
        self,
        examples: list[Example],
        target: Target,
        layers: tuple[Layer, ...],
        drafter: Drafter | None = None,
        step: int = 0,
        packed: bool = False,
    ) -> Batch:
        """These examples with their features, padded or packed; without features where `layers` is empty. Some sources ask
        the drafter too."""


class Live(Source):
    """Runs the target while training and keeps up to `keep_gb` of features in memory for later epochs."""

    def __init__(self, keep_gb: float = 0.0) -> None:
        self.keep_bytes = int(keep_gb * 1e9)
        self.kept: dict[str, Tensor] = {}  # an example's key -> [T, L, D]
        self.bytes = 0

    def batch(
        self,
        examples: list[Example],
        target: Target,
        layers: tuple[Layer, ...],
        drafter: Drafter | None = None,
        step: int = 0,
        packed: bool = False,
    ) -> Batch:
        batch = collate(examples, packed).to(target.device)
        if not layers:
            return batch
        if all(example.key in self.kept for example in examples) and not target.in_step:
            hidden = laid_out([self.kept[example.key] for example in examples], packed)
            features = Features(batch.tokens, layers, hidden.to(target.device))
        else:
            features = target.features(batch.tokens, layers, batch.lengths)
            self._keep(examples, features.hidden if batch.lengths is None else features.hidden[0].split(batch.lengths))
        return replace(batch, features=features)

    def _keep(self, examples: list[Example], hidden: Iterable[Tensor]) -> None:
        for row, example in zip(hidden, examples):
            kept = row[: len(example.tokens)]
            size = kept.numel() * kept.element_size()
            if example.key not in self.kept and self.bytes + size <= self.keep_bytes:
                self.kept[example.key] = kept.to("cpu", copy=True)
                self.bytes += size


class Generated(Source):
    """Sequences written anew while training: of each batch, a `fraction` (GKD's lambda), drawn for each sequence by itself.

    `by` the drafter (on-policy), the target, or interleaved (speculative knowledge distillation, Xu et al., 2024): the drafter
    writes and the target replaces what is not among its `top_k` likeliest tokens, checked `block` tokens at a time. An
    answer is written for the first prompt of a conversation, at most `max_new_tokens` long and no longer than the data's own; a
    prompt that leaves no room for two tokens keeps the data's. By replay, the target decodes greedily with chains of `block`
    drafts, and a draft of that is learnt from with Draft-OPD's split loss.
    """

    asks_drafter = True

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
        examples: list[Example],
        target: Target,
        layers: tuple[Layer, ...],
        drafter: Drafter | None = None,
        step: int = 0,
        packed: bool = False,
    ) -> Batch:
        if target.sharding == "fsdp2":
            raise UserError(
                "source=generated: answers take their time, and a target with sharding=fsdp2 runs in step; use tensor"
            )
        draws = [Random(f"{self.seed}/{step}/{example.key}") for example in examples]  # whatever is batched with what
        anew = [
            index
            for index, example in enumerate(examples)
            if draws[index].random() < self.fraction and self._fits(example, target, drafter)
        ]
        if self.by == "replay":
            batch = self._replay(examples, anew, target, drafter, draws, packed)
        else:
            if anew:
                assert drafter is not None
                written = dict(zip(anew, self._write([examples[index] for index in anew], target, drafter, step)))
                examples = [written.get(index, example) for index, example in enumerate(examples)]
            batch = collate(examples, packed)
        batch = batch.to(target.device)
        return batch if not layers else replace(batch, features=target.features(batch.tokens, layers, batch.lengths))

    def _fits(self, example: Example, target: Target, drafter: Drafter | None) -> bool:
        """Whether an answer of two tokens has room behind the prompt."""
        writer = drafter.writer() if drafter is not None and self.by == "drafter" else None
        return len(example.prompt) + 2 <= min(target.max_length, (writer or target).max_length)

    def _limit(self, writer: Target, prompts: list[list[int]]) -> int:
        """How many tokens may be written behind these prompts."""
        return max(2, min(self.max_new_tokens, writer.max_length - max(map(len, prompts))))

    def _replay(
        self,
        examples: list[Example],
        anew: list[int],
        target: Target,
        drafter: Drafter | None,
        draws: list[Random],
        packed: bool,
    ) -> Batch:
        """The data's sequences, nothing of them rejected, and replayed drafts in place of some."""
        found = [Replay(example, [KEPT] * len(example.tokens)) for example in examples]
        if anew:
            assert drafter is not None
            if not drafter.learns_replays:
                raise UserError("source.by=replay: this family does not learn from replayed drafts; use source.by=target")
            prompts = [examples[index].prompt for index in anew]
            recorder = Recorder(Chain(self.block))
            with evaluating(drafter):
                written = decode(target, prompts, Greedy(), self._limit(target, prompts), drafter, recorder)
            for index, generation, rounds in zip(anew, written, recorder.rounds):
                for replay in replays(generation, rounds, 1, draws[index]):
                    found[index] = replay
        return collate_replays(found, packed)

    def _write(self, examples: list[Example], target: Target, drafter: Drafter, step: int) -> list[Example]:
        """New answers to the same prompts, each drawn by its example's key, so that no batching changes it."""
        rows = [int(example.key[:7], 16) for example in examples]
        prompts = [example.prompt for example in examples]
        most = [max(2, len(example.tokens) - len(prompt)) for example, prompt in zip(examples, prompts)]
        writer = target if self.by != "drafter" else drafter.writer()
        if writer is None:
            raise UserError("source.by=drafter: this family cannot write by itself; use source.by=target or interleaved")
        limit = max(2, min(max(most), self._limit(writer, prompts)))
        seed = self.seed + 1_000_003 * step
        with evaluating(drafter):
            if self.by == "interleaved":
                rule = Interleaved(self.temperature, top_k=self.top_k, seed=seed)
                chain = Chain(self.block, "sampled", self.temperature, seed)
                found = decode(target, prompts, rule, limit, drafter, chain, rows)
            else:
                found = decode(writer, prompts, Match(self.temperature, seed=seed), limit, rows=rows)
        answers = [one.output[:length] for one, length in zip(found, most)]
        return [
            Example(prompt + answer, [False] * len(prompt) + [True] * len(answer)) for prompt, answer in zip(prompts, answers)
        ]


@contextmanager
def evaluating(drafter: Drafter) -> Iterator[None]:
    """The drafter as it decodes, in the middle of its training."""
    training = drafter.training
    drafter.eval()
    try:
        yield
    finally:
        drafter.train(training)
