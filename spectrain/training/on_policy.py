"""Sequences that are written while training: by the drafter that learns, its target, or both (on-policy distillation)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Literal

from spectrain.data.chat import Example
from spectrain.decoding.acceptance import Greedy, Interleaved, Match
from spectrain.decoding.loop import decode
from spectrain.decoding.replay import KEPT, Recorder, Replay, collate_replays, replays
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch, collate
from spectrain.models.images import refuse_images
from spectrain.models.target import Target
from spectrain.trees import Chain


class Generated(Source):
    """Sequences written anew while training: of each batch, a `fraction` (GKD's lambda), drawn for each sequence by itself.

    `by` the drafter (on-policy), the target, or interleaved (speculative knowledge distillation, Xu et al., 2024): the drafter
    writes and the target replaces what is not among its `top_k` likeliest tokens, checked `block` tokens at a time. An
    answer is written for the first prompt of a conversation, `max_new_tokens` long at most, whatever the data's own length: a
    batch may grow beyond `batch_tokens`. A prompt that leaves no room for two tokens keeps the data's. By replay, the target
    decodes greedily with chains of `block` drafts, and a draft of that is learnt from with Draft-OPD's split loss.
    """

    writes_text = True

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
        self.asks_drafter = by != "target"
        self.max_new_tokens, self.top_k, self.block, self.seed = max_new_tokens, top_k, block, seed

    def batch(self, request: BatchRequest) -> Batch:
        target, layers, examples = request.target, request.layers, request.examples
        if target.sharding == "fsdp2":
            raise UserError(
                "source=generated: answers take their time, and a target with sharding=fsdp2 runs in step; use tensor"
            )
        drafter = request.drafter
        refuse_images(request.texts, "source=generated")
        assert drafter is None or isinstance(drafter, Drafter), "what learns is a drafter"
        draws = [Random(f"{self.seed}/{request.step}/{example.key}") for example in examples]  # whatever is batched with what
        anew = [
            index
            for index, example in enumerate(examples)
            if draws[index].random() < self.fraction and self._fits(example, target, drafter)
        ]
        if self.by == "replay":
            found = [Replay(example, [KEPT] * len(example.tokens)) for example in examples]  # of the data nothing is rejected
            if anew:
                assert drafter is not None
                prompts = [examples[index].prompt for index in anew]
                for index, replay in zip(anew, self._replays(prompts, [draws[index] for index in anew], target, drafter)):
                    found[index] = replay or found[index]
            batch = collate_replays(found, request.packed)
        else:
            if anew:
                assert drafter is not None
                asked = [examples[index] for index in anew]
                written = dict(zip(anew, self._write(asked, target, drafter, request.step)))
                examples = [written.get(index, example) for index, example in enumerate(examples)]
            batch = collate(examples, request.packed)
        batch = batch.to(target.device)
        return batch if not layers else replace(batch, features=target.features(batch.tokens, layers, batch.lengths))

    def _fits(self, example: Example, target: Target, drafter: Drafter | None) -> bool:
        """Whether an answer of two tokens has room behind the prompt."""
        writer = drafter.abilities.on_policy.writer if drafter is not None and self.by == "drafter" else None
        return len(example.prompt) + 2 <= min(target.max_length, (writer or target).max_length)

    def _limit(self, writer: Target, prompts: list[list[int]]) -> int:
        """How many tokens may be written behind these prompts."""
        return max(2, min(self.max_new_tokens, writer.max_length - max(map(len, prompts))))

    def _replays(self, prompts: list[list[int]], draws: list[Random], target: Target, drafter: Drafter) -> list[Replay | None]:
        """A replayed draft of an answer to each prompt; None where nothing was drafted."""
        if not drafter.abilities.on_policy.learns_replays:
            raise UserError("source.by=replay: this family does not learn from replayed drafts; use source.by=target")
        recorder = Recorder(Chain(self.block))
        with evaluating(drafter):
            written = decode(target, prompts, Greedy(), self._limit(target, prompts), drafter, recorder)
        found = [replays(one, rounds, 1, draw) for one, rounds, draw in zip(written, recorder.rounds, draws)]
        return [some[0] if some else None for some in found]

    def _write(self, examples: list[Example], target: Target, drafter: Drafter, step: int) -> list[Example]:
        """New answers to the same prompts, each drawn by its example's key, so that no batching changes it."""
        rows = [int(example.key[:7], 16) for example in examples]
        prompts = [example.prompt for example in examples]
        writer = target if self.by != "drafter" else drafter.abilities.on_policy.writer
        if writer is None:
            raise UserError("source.by=drafter: this family cannot write by itself; use source.by=target or interleaved")
        limit = self._limit(writer, prompts)
        seed = self.seed + 1_000_003 * step
        with evaluating(drafter):
            if self.by == "interleaved":
                rule = Interleaved(self.temperature, top_k=self.top_k, seed=seed)
                chain = Chain(self.block, "sampled", self.temperature, seed)
                found = decode(target, prompts, rule, limit, drafter, chain, rows)
            else:
                found = decode(writer, prompts, Match(self.temperature, seed=seed), limit, sequence_ids=rows)
        return [Example(prompt + one.output, [False] * len(prompt) + [True] * len(one.output))
                for prompt, one in zip(prompts, found)]  # fmt: skip


@contextmanager
def evaluating(drafter: Drafter) -> Iterator[None]:
    """The drafter as it decodes, in the middle of its training."""
    training = drafter.training
    drafter.eval()
    try:
        yield
    finally:
        drafter.train(training)
