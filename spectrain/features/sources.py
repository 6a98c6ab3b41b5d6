"""Where features come from. Shapes: B batch, T tokens, L layers, D target width."""

import hashlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.decoding.acceptance import Greedy, Interleaved, Match
from spectrain.decoding.loop import decode
from spectrain.decoding.replay import KEPT, Recorder, Replay, collate_replays, replays
from spectrain.drafters.base import Drafter
from spectrain.errors import RunError, UserError
from spectrain.models.features import Features, Layer
from spectrain.models.target import Target
from spectrain.trees import Chain

from .batch import Batch, collate, laid_out
from .speculators import SpeculatorsCache, hidden_states_folder
from .store import PLACE, Contents, FeatureStore, fingerprint, names, read_manifest


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

    def prepare(self, drafter: Drafter, target: Target, examples: list[Example] | None) -> str | None:
        """Called once before training, before anything is written; what the user should know of what is to come.

        `examples` are all there will be, or None where they come as a stream.
        """
        return None

    def flush(self) -> None:
        """Write down what would be lost: called before a checkpoint, so that a resumed run finds it, and at the end."""


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
        if self.keep_bytes and not target.in_step:
            hidden = laid_out([self._features(example, target, layers) for example in examples], packed)
            return replace(batch, features=Features(batch.tokens, layers, hidden.to(target.device)))
        return replace(batch, features=target.features(batch.tokens, layers, batch.lengths))

    def _features(self, example: Example, target: Target, layers: tuple[Layer, ...]) -> Tensor:
        """[T, L, D] of one example, kept where there is room. It is run alone: its last bits would depend on its company, so a
        resumed run, which has kept nothing yet, would not have the same features as an undisturbed one."""
        if example.key in self.kept:
            return self.kept[example.key]
        hidden = target.features(torch.tensor([example.tokens], device=target.device), layers).hidden[0]
        size = hidden.numel() * hidden.element_size()
        if self.bytes + size <= self.keep_bytes:
            self.kept[example.key] = hidden = hidden.to("cpu", copy=True)
            self.bytes += size
        return hidden.to("cpu")


class Stored(Source):
    """Reads features from a folder, which `spectrain data store` fills; what it lacks is captured at first use.

    A new folder holds the layers that the drafter reads, in `dtype` (auto: the target's; fp8 and int8 have a scale a token and
    layer), with `supervised_only` the last state only where the drafter reads it. No more than `max_gb` are written, in shards
    of `shard_mb`. With capture=false nothing is, and what is missing stops the training. A cache of the speculators project is
    read as it is.
    """

    def __init__(
        self,
        path: str,
        dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = "auto",
        supervised_only: bool | None = None,
        max_gb: float = 100.0,
        shard_mb: float = 512.0,
        capture: bool = True,
    ) -> None:
        for key, value in (("max_gb", max_gb), ("shard_mb", shard_mb)):
            if not value > 0:
                raise UserError(f"source.{key}={value}: use more than 0")
        self.path, self.dtype, self.supervised_only = Path(path).expanduser(), dtype, supervised_only
        self.max_gb, self.shard_mb, self.capture = max_gb, shard_mb, capture
        self.store: FeatureStore | SpeculatorsCache | None = None

    def prepare(self, drafter: Drafter, target: Target, examples: list[Example] | None) -> str:
        """Open the store, and stop where what is missing would not fit the budget or the disk."""
        layers = drafter.features_in(0)
        if not layers:
            raise UserError("source=store: this family reads no features, it runs the target itself; use source=live")
        store = self._open(target, layers, drafter)
        if examples is None:
            return f"{self.path}: layers {names(store.layers)}; what it lacks of a stream is captured, up to {self.max_gb:g} GB"
        distinct = list({store.key(example): example for example in examples}.values())
        missing = [example for example in distinct if example not in store]
        if missing and not self.capture:
            raise UserError(
                f"source.path={self.path}: {len(missing)} of {len(distinct)} sequences are not in it; capture them first with "
                "spectrain data store, or say source.capture=true"
            )
        if isinstance(store, SpeculatorsCache):
            if len(missing) == len(distinct):
                raise UserError(
                    f"source.path={self.path}: none of the {len(distinct)} sequences is in it, made from other data or with "
                    "another chat template; read that data"
                )
            told = f"{self.path}: layers {names(store.layers)}, {len(distinct) - len(missing)} of {len(distinct)} sequences"
            for name, reason in store.damaged.items():
                told += f"; {name} cannot be read ({reason})"
            return told + (f"; the target is run for the other {len(missing)}" if missing else "")
        return self._budget(store, distinct, missing)

    def _budget(self, store: FeatureStore, distinct: list[Example], missing: list[Example]) -> str:
        """What the store will take, in a sentence."""
        contents = store.contents
        tokens = sum(len(example.tokens) for example in distinct)
        a_token = sum(map(contents.num_bytes, distinct)) / tokens
        to_come = sum(map(contents.num_bytes, missing))
        total = store.num_bytes + to_come + PLACE * len(missing)
        where = next(folder for folder in (self.path.absolute(), *self.path.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(where).free
        told = f"{tokens} tokens of {a_token:.0f} bytes, {total / 1e9:.3g} GB in {contents.dtype}"
        less = "ask for less: source.dtype=int8 in a new folder, source.supervised_only=true, data.limit"
        if total > self.max_gb * 1e9:
            raise UserError(f"source.max_gb={self.max_gb:g}: the store needs {told}; raise it, or {less}")
        if to_come > free:
            raise UserError(
                f"source.path={self.path}: the store needs {told}, and only {free / 1e9:.3g} GB are free; choose another disk, "
                f"or {less}"
            )
        return (
            f"{self.path}: {len(distinct)} sequences, {told}; {len(distinct) - len(missing)} are stored, "
            f"{to_come / 1e9:.3g} GB to capture; {free / 1e9:.3g} GB free"
        )

    def _open(self, target: Target, layers: tuple[Layer, ...], drafter: Drafter | None) -> FeatureStore | SpeculatorsCache:
        if self.store is not None:
            return self.store
        folder = hidden_states_folder(self.path)
        if folder is not None:
            cache = SpeculatorsCache(folder, target)
            lacking = [layer for layer in layers if layer not in cache.layers]
            if lacking:
                raise UserError(
                    f"source.path={self.path}: it holds layers {names(cache.layers)}, and the drafter reads "
                    f"{names(tuple(lacking))} too; give it those of the cache with drafter.layers"
                )
            self.store = cache
            return cache
        manifest = self.path / "manifest.json"
        stored = read_manifest(manifest) if manifest.exists() else None
        wanted = self._wanted(target, layers, drafter, stored)
        if stored is not None:
            stored.refuse_unless(wanted, self.path)
        self.store = FeatureStore(self.path, wanted, self.max_gb * 1e9, self.shard_mb * 1e6, mend=self.capture)
        if target.sharding == "tensor" and dist.get_rank():
            self.store.writes = False  # every process of it sees the same data, and the first keeps them
        return self.store

    def _wanted(self, target: Target, layers: tuple[Layer, ...], drafter: Drafter | None, stored: Contents | None) -> Contents:
        """What is asked of the store; what is left open is as it is stored."""
        reach = None if drafter is None else drafter.final_reach
        if self.supervised_only and (reach is None or "final" not in layers):
            raise UserError("source.supervised_only=true: this family reads every position; leave it out")
        thrifty = self.supervised_only or (
            self.supervised_only is None and stored is not None and stored.final_reach is not None
        )
        dtype: Any = self.dtype
        if dtype == "auto":
            dtype = str(target.dtype).removeprefix("torch.") if stored is None else stored.dtype
        template = hashlib.sha256(str(target.tokenizer.chat_template).encode()).hexdigest()[:16]
        facts = target.name, target.path, fingerprint(target.model), template
        return Contents(*facts, layers, target.width, dtype, reach if thrifty else None)

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
        store = self._open(target, layers, drafter)
        rows = [store.read(example, layers, target) for example in examples]
        absent = sum(row is None for row in rows)
        if _anywhere(absent > 0, target):
            if absent and not self.capture:
                raise RunError(f"source.path={self.path}: {absent} sequences of a batch are not in it; say source.capture=true")
            # The whole batch, as source=live runs it: the last bits of a product depend on what is batched with what.
            hidden = target.features(batch.tokens, store.layers, batch.lengths).hidden
            parts = hidden if batch.lengths is None else hidden[0].split(batch.lengths)
            rows = [
                store.take(example, states[: len(example.tokens)], layers) if row is None else row
                for example, row, states in zip(examples, rows, parts)
            ]
        found = laid_out([row for row in rows if row is not None], packed)
        return replace(batch, features=Features(batch.tokens, layers, found))

    def flush(self) -> None:
        if self.store is not None:
            self.store.flush()


def _anywhere(missing: bool, target: Target) -> bool:
    """Whether something is missing, on any process where all of them must run the target together."""
    if not target.in_step or not dist.is_initialized():
        return missing
    found = torch.tensor(float(missing), device=target.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


class Generated(Source):
    """Sequences written anew while training: of each batch, a `fraction` (GKD's lambda), drawn for each sequence by itself.

    `by` the drafter (on-policy), the target, or interleaved (speculative knowledge distillation, Xu et al., 2024): the drafter
    writes and the target replaces what is not among its `top_k` likeliest tokens, checked `block` tokens at a time. An
    answer is written for the first prompt of a conversation, at most `max_new_tokens` long and no longer than the data's own; a
    prompt that leaves no room for two tokens keeps the data's. By replay, the target decodes greedily with chains of `block`
    drafts, and a draft of that is learnt from with Draft-OPD's split loss.
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
        self.asks_drafter = by != "target"
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
