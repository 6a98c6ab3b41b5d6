"""Tokenised conversations, how they become batches, and the order in which these are trained on."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError
from spectrain.models.images import ImageProcessor, has_complete_images

from .chat import Example, Message, tokenize_conversation

if TYPE_CHECKING:
    from .readers import ConversationReader

StreamState = dict[str, Any]  # of a stream of batches, as a checkpoint keeps it


@dataclass(frozen=True)
class Batching:
    """How examples become batches."""

    batch_tokens: int  # of a batch at most, with padding where there is any
    seed: int  # of the order
    packed: bool = False  # one after another in one row, without padding


@dataclass(frozen=True)
class Dataset:
    """Examples to train on, and what was left out."""

    examples: list[Example]
    num_conversations: int
    num_cut: int  # examples cut to max_length
    num_dropped: int  # examples without a supervised token after the cut
    held_out: list[Example] = field(default_factory=list, kw_only=True)  # not to be trained on, but measured meanwhile
    extra_texts: Callable[[], list[list[int]]] = field(
        default=list, kw_only=True
    )  # answers that only a vocabulary is chosen from

    is_sample: ClassVar[bool] = False  # there is more to train on than the examples

    @classmethod
    def from_data(
        cls, data: ConversationReader, tokenizer: PreTrainedTokenizerBase, vision: ImageProcessor | None = None
    ) -> Dataset:
        """Tokenise every conversation; images are read by a target's `sight`."""
        conversations = data.load_conversations()
        tokenized = [make_examples(tokenizer, messages, data.max_length, vision) for messages in conversations]
        examples, held_out = split_held_out([found for found, _, _ in tokenized], data.held_out)
        if not examples:
            raise UserError(f"data.max_length={data.max_length}: it cuts off every answer; raise it")
        cut, dropped = sum(cut for _, cut, _ in tokenized), sum(none for _, _, none in tokenized)
        return cls(
            examples, len(conversations), cut, dropped, held_out=held_out, extra_texts=partial(data.extra_texts, tokenizer)
        )

    @property
    def num_tokens(self) -> int:
        return sum(len(example.tokens) for example in self.examples)

    @property
    def num_supervised(self) -> int:
        return sum(sum(example.mask) for example in self.examples)

    @property
    def fingerprint(self) -> str:
        """A hash of every token and mask."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(repr((example.tokens, example.mask)).encode())
        return digest.hexdigest()[:16]

    def token_counts(self, vocab_size: int) -> Tensor:
        """[V] how often each token is the assistant's, in the examples and in what lies beyond them."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for example in self.examples:
            kept = torch.tensor(example.tokens)[torch.tensor(example.mask)]
            counts += torch.bincount(kept, minlength=vocab_size)
        beyond = [token for answer in self.extra_texts() for token in answer]
        return counts + torch.bincount(torch.tensor(beyond, dtype=torch.int64), minlength=vocab_size)

    def __getitem__(self, indices: list[int]) -> list[Example]:
        """The examples of these numbers."""
        return [self.examples[index] for index in indices]

    def make_batches(self, epoch: int, batching: Batching) -> list[list[int]]:
        """The batches of one epoch, shuffled, by the numbers of their examples."""
        random = Random(f"{batching.seed}/{epoch}")
        order = list(range(len(self.examples)))
        random.shuffle(order)
        batches: list[list[int]] = []
        size = PACKED_BATCHING_WINDOW if batching.packed else BATCHING_WINDOW
        for start in range(0, len(order), size):
            window = order[start : start + size]
            lengths = [len(self.examples[index].tokens) for index in window]
            batches += [[window[place] for place in batch] for batch in group_by_length(lengths, batching)]
        random.shuffle(batches)
        return batches

    def num_batches(self, batching: Batching) -> int:
        """Batches of the first epoch."""
        return len(self.make_batches(0, batching))

    def measure_efficiency(self, batching: Batching) -> BatchingEfficiency:
        """How well batches of the first epoch are used."""
        batches = [[len(example.tokens) for example in self[batch]] for batch in self.make_batches(0, batching)]
        run = [sum(lengths) if batching.packed else len(lengths) * max(lengths) for lengths in batches]
        room = sum(max(batching.batch_tokens, slots) for slots in run)  # an example longer than a batch has one of its own
        return BatchingEfficiency(len(batches), self.num_tokens / room, self.num_tokens / sum(run))

    def stream_batches(
        self, batching: Batching, rank: int = 0, num_processes: int = 1, state: StreamState | None = None
    ) -> BatchStream:
        """One process's batches, of one epoch after another without end, from a saved `state` on where there is one."""
        return EpochBatchStream(self, batching, rank, num_processes, state)

    def summary_line(self) -> str:
        """What there is, and what of it was cut or left out, for the run's opening line."""
        return (
            f"{self.num_conversations} conversations, {self.num_tokens} tokens, {self.num_supervised} supervised"
            + (f", {self.num_cut} cut to data.max_length" if self.num_cut else "")
            + (f", {self.num_dropped} without an answer left out" if self.num_dropped else "")
            + (f", {len(self.held_out)} held out" if self.held_out else "")
        )

    def provenance_facts(self) -> dict[str, Any]:
        """What the run's provenance says of its data."""
        return {"fingerprint": self.fingerprint, "tokens": self.num_tokens}


def make_examples(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], max_length: int, vision: ImageProcessor | None = None
) -> tuple[list[Example], int, int]:
    """A conversation's examples, how many were cut to `max_length`, and how many of these had no answer left, or not all of an
    image."""
    found = tokenize_conversation(tokenizer, messages, vision)
    cut = [Example(example.tokens[:max_length], example.mask[:max_length]) for example in found]
    kept = [example for example in cut if any(example.mask) and has_complete_images(example.tokens)]
    return kept, sum(len(example.tokens) > max_length for example in found), len(cut) - len(kept)


def split_held_out(conversations: list[list[Example]], share: float) -> tuple[list[Example], list[Example]]:
    """The examples to train on, and those held out: a share of the conversations, at least one where there are two.

    They are chosen by a hash of what they say, so in any order the same, and one that occurs twice is never in both.
    """
    chance = {found[0].content_hash: Random(f"held out/{found[0].content_hash}").random() for found in conversations if found}
    count = min(max(1, sum(drawn < share for drawn in chance.values())), len(chance) - 1) if share else 0
    chosen = set(sorted(chance, key=chance.__getitem__)[: max(0, count)])
    kept: list[Example] = []
    apart: list[Example] = []
    for found in conversations:
        (apart if found and found[0].content_hash in chosen else kept).extend(found)
    return kept, apart


# How examples become batches

BATCHING_WINDOW, PACKED_BATCHING_WINDOW = (
    256,
    2048,
)  # examples that are batched together: more of them waste less, fewer keep the order random


def group_by_length(lengths: list[int], batching: Batching) -> list[list[int]]:
    """Groups of a window's examples, by number. Padded, these are buckets of like length, which keeps padding low; packed, they
    fill up `batch_tokens` (best fit decreasing: the longest first, each where it leaves the least room)."""
    if not batching.packed:
        buckets: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
            if not buckets or (len(buckets[-1]) + 1) * lengths[index] > batching.batch_tokens:
                buckets.append([])
            buckets[-1].append(index)
        return buckets
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # what is left of each, ascending, and its number
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(rooms, (lengths[index], 0))
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = batching.batch_tokens, len(packs)
            packs.append([])
        packs[number].append(index)
        insort(rooms, (room - lengths[index], number))
    return packs


@dataclass(frozen=True)
class BatchingEfficiency:
    """How well batches are used."""

    num_batches: int
    filled_share: float  # tokens over the tokens that the batches may hold
    real_share: float  # tokens over the places that are computed, padding included

    def __str__(self) -> str:
        padding = f"{1 - self.real_share:.1%} padding" if self.real_share < 1 else "no padding"
        return f"{self.num_batches} batches, {self.filled_share:.1%} full, {padding}"


# The order in which they are trained on


class BatchStream(ABC, Iterator[list[Example]]):
    """One process's share of the batches, which have the same numbers and order on any number of processes.

    Of the batches that follow those done, the j-th goes to process j % processes, whether a step takes one of them or more.
    """

    def __init__(self, rank: int, num_processes: int, state: StreamState | None) -> None:
        self.rank, self.num_processes = rank, num_processes
        self.batches_done: int = state["batches_done"] if state else 0  # by all processes

    def __next__(self) -> list[Example]:
        number = self.batches_done + self.rank
        self.batches_done += self.num_processes
        return self.take_batch(number)

    @abstractmethod
    def take_batch(self, number: int) -> list[Example]:
        """The batch of this number, which is larger than any before."""

    def state_dict(self) -> StreamState:
        """Where this process stands, in JSON's types; `merged` with those of the others it serves any number of processes."""
        return {"batches_done": self.batches_done}

    @staticmethod
    def merge_states(states: list[StreamState]) -> StreamState:
        """The state of all processes, which have taken equally many batches."""
        return states[0]

    @staticmethod
    def data_metrics(state: StreamState) -> dict[str, int]:
        """What metrics say of the data read so far, from the state of all processes."""
        return {}


class EpochBatchStream(BatchStream):
    """The batches of a data set that is there whole: the next epoch's follow those of the one before."""

    def __init__(self, dataset: Dataset, batching: Batching, rank: int, num_processes: int, state: StreamState | None) -> None:
        super().__init__(rank, num_processes, state)
        self.dataset, self.batching = dataset, batching
        self.epoch, self.first_batch = 0, 0  # the epoch that was last asked for, and the number of its first batch
        self.batches = dataset.make_batches(0, batching)

    def take_batch(self, number: int) -> list[Example]:
        while number - self.first_batch >= len(self.batches):
            self.epoch, self.first_batch = self.epoch + 1, self.first_batch + len(self.batches)
            self.batches = self.dataset.make_batches(self.epoch, self.batching)
        return self.dataset[self.batches[number - self.first_batch]]
