"""Tokenized conversations, the batches that they form, and the order in which training reads
these batches.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from spectrain.config.values import Below1

from .chat import Example, tokenize_conversation
from .chat_template import KINDS, ChatTemplate, Kind
from .image_processor import ImageProcessor, get_images, has_complete_images
from .messages import Conversation, describe_row_key

# A share of the conversations, or "auto": see `choose_held_out_share`.
HeldOutShare = Below1 | Literal["auto"]
NUM_HELD_OUT = 24  # conversations, as many as a validation reads
MIN_HELD_OUT_SHARE = 0.02
MAX_HELD_OUT_SHARE = 0.1
MIN_CONVERSATIONS_TO_RAISE_SHARE = 100

# The state of a stream of batches in a checkpoint.
StreamState = dict[str, Any]


@dataclass(frozen=True)
class Batching:
    """How examples form batches."""

    # Maximum number of tokens in a batch, padding included.
    batch_tokens: int
    seed: int  # of the order
    # Whether examples share one row without padding.
    packed: bool = False


@dataclass(frozen=True)
class Dataset:
    """The examples to train on, with counts of what was cut or left out."""

    examples: list[Example]
    num_conversations: int
    # Number of examples cut to max_length.
    num_cut: int
    # Number of examples without a supervised token after the cut.
    num_dropped: int
    # Number of conversations left out because they are shorter than min_length.
    num_short: int = field(default=0, kw_only=True)
    # Examples for validation.
    held_out: list[Example] = field(default_factory=list, kw_only=True)
    # The source of each of them in a mixture; empty for a single source.
    held_out_sources: list[str] = field(default_factory=list, kw_only=True)
    # A line for each source of a mixture, which says what of it is trained on.
    source_lines: list[str] = field(default_factory=list, kw_only=True)
    extra_texts: Callable[[], list[list[int]]] = field(
        default=list, kw_only=True
    )  # answers that only a vocabulary is chosen from

    # Counts of what the rows say and nothing reads.
    unread: Counter[str] = field(default_factory=Counter, kw_only=True)

    # Whether the examples are only a sample of the training data.
    is_sample: ClassVar[bool] = False

    @property
    def num_tokens(self) -> int:
        return sum(len(example.tokens) for example in self.examples)

    @property
    def num_supervised(self) -> int:
        return sum(sum(example.mask) for example in self.examples)

    @property
    def max_text_length(self) -> int:
        """The length of the longest text to train on, in tokens."""
        return max((len(example.tokens) for example in self.examples), default=0)

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens, masks and images."""
        return hash_examples(self.examples)

    def token_counts(self, vocab_size: int) -> Tensor:
        """Count how often each token occurs in assistant turns, those of `extra_texts` included:
        [V].
        """
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for example in self.examples:
            supervised = torch.tensor(example.tokens)[torch.tensor(example.mask)]
            counts += torch.bincount(supervised, minlength=vocab_size)
        beyond = [token for answer in self.extra_texts() for token in answer]
        return counts + torch.bincount(
            torch.tensor(beyond, dtype=torch.int64), minlength=vocab_size
        )

    def __getitem__(self, indices: list[int]) -> list[Example]:
        """Return the examples at these indices."""
        return [self.examples[index] for index in indices]

    def make_batches(self, epoch: int, batching: Batching) -> list[list[int]]:
        """Return the shuffled batches of an epoch, each a list of example indices."""
        random = Random(f"{batching.seed}/{epoch}")
        order = list(range(len(self.examples)))
        random.shuffle(order)
        batches: list[list[int]] = []
        size = PACKED_BATCHING_WINDOW if batching.packed else BATCHING_WINDOW
        for start in range(0, len(order), size):
            window = order[start : start + size]
            lengths = [len(self.examples[index].tokens) for index in window]
            batches += [
                [window[position] for position in batch]
                for batch in group_by_length(lengths, batching)
            ]
        random.shuffle(batches)
        return batches

    def num_batches(self, batching: Batching) -> int:
        """Return the number of batches in the first epoch."""
        return len(self.make_batches(0, batching))

    def measure_efficiency(self, batching: Batching) -> BatchingEfficiency:
        """Measure how well the batches of the first epoch are filled."""
        batches = [
            [len(example.tokens) for example in self[batch]]
            for batch in self.make_batches(0, batching)
        ]
        run = [
            sum(lengths) if batching.packed else len(lengths) * max(lengths) for lengths in batches
        ]
        # An example longer than a batch forms a batch of its own.
        room = sum(max(batching.batch_tokens, slots) for slots in run)
        return BatchingEfficiency(len(batches), self.num_tokens / room, self.num_tokens / sum(run))

    def stream_batches(
        self,
        batching: Batching,
        rank: int = 0,
        num_processes: int = 1,
        state: StreamState | None = None,
        batches_per_step: int | None = None,
    ) -> BatchStream:
        """Return the batches of one process over endless epochs; a saved `state` continues where it
        was saved.

        `batches_per_step` is needed where processes do not share the batches of a step equally.
        """
        return EpochBatchStream(self, batching, rank, num_processes, state, batches_per_step)

    def unread_lines(self, row_keys: Collection[str] = ()) -> list[str]:
        """Return a line for each thing that the rows say and nothing reads, with its count; the
        drafter reads `row_keys`.
        """
        read = {*map(describe_row_key, row_keys)}
        return [
            f"not used: {count} x {name}"
            for name, count in sorted(self.unread.items())
            if name not in read
        ]

    def summary_line(self) -> str:
        """Describe the data, and what of it was cut or left out, for the first line that a run
        prints.
        """
        return (
            f"{self.num_conversations} conversations, {self.num_tokens} tokens, "
            f"{self.num_supervised} supervised"
            + (f", {self.num_cut} cut to data.max_length" if self.num_cut else "")
            + (f", {self.num_dropped} without an answer left out" if self.num_dropped else "")
            + (
                f", {self.num_short} shorter than data.min_length left out"
                if self.num_short
                else ""
            )
            + (f", {len(self.held_out)} held out" if self.held_out else "")
        )

    def provenance_facts(self) -> dict[str, Any]:
        """Return the facts about the data that provenance.json holds."""
        held_out = {"held_out": hash_examples(self.held_out)} if self.held_out else {}
        return {"fingerprint": self.fingerprint, "tokens": self.num_tokens, **held_out}


def hash_examples(examples: Sequence[Example]) -> str:
    """Hash the tokens, masks and images of examples, in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.tokens, example.mask)).encode())
        images = get_images(example.tokens)
        digest.update(b"" if images is None else images.digest)
    return digest.hexdigest()[:16]


def make_examples(
    template: ChatTemplate,
    conversation: Conversation | Example,
    max_length: int,
    vision: ImageProcessor | None = None,
    train_on: Sequence[Kind] = KINDS,
    unread: Counter[str] | None = None,
) -> tuple[list[Example], int, int]:
    """Return a conversation's examples, the number that were cut to `max_length`, and the number
    that were dropped because the cut left no answer or only a part of an image. A plain document is
    not cut: it becomes several examples."""
    tokenized = tokenize_conversation(template, conversation, vision, train_on, unread)
    if isinstance(conversation, Conversation) and conversation.is_document:
        tokenized = [part for example in tokenized for part in example.split(max_length)]
    cut = [example.cut(max_length) for example in tokenized]
    usable = [
        example for example in cut if any(example.mask) and has_complete_images(example.tokens)
    ]
    return (
        usable,
        sum(len(example.tokens) > max_length for example in tokenized),
        len(cut) - len(usable),
    )


def is_too_short(examples: list[Example], min_length: int) -> bool:
    """Tell whether all examples of a conversation are shorter than `min_length` tokens."""
    return bool(examples) and max(len(example.tokens) for example in examples) < min_length


def choose_held_out_share(draws: Sequence[float]) -> float:
    """Return the share that `held_out=auto` holds out, for one draw from 0 to 1 a conversation.

    Validation reads 24 conversations, and fewer make its interval too wide to decide, so the share
    takes in 24 draws. More than a tenth of the data is not given up for it. A tenth of fewer than
    100 conversations would decide nothing either, so these stay in the training, but for the
    smallest share.
    """
    if len(draws) < MIN_CONVERSATIONS_TO_RAISE_SHARE:
        return MIN_HELD_OUT_SHARE
    wanted = math.nextafter(sorted(draws)[NUM_HELD_OUT - 1], 1)
    return min(max(wanted, MIN_HELD_OUT_SHARE), MAX_HELD_OUT_SHARE)


def split_held_out(
    conversations: list[list[Example]], share: HeldOutShare
) -> tuple[list[Example], list[Example]]:
    """Split the examples into those to train on and those held out for validation.

    A draw keyed by a hash of a conversation's first example is compared with the share, so its side
    depends neither on the order nor on what else is in the data, and a duplicate never lands in
    both parts; with "auto" the other draws decide the share (`choose_held_out_share`). Of a few
    conversations none may be held out, and with "auto" never all of them.
    """
    groups = [group for group in conversations if group]
    draws = [Random(f"held out/{group[0].content_hash}").random() for group in groups]
    limit = choose_held_out_share(draws) if share == "auto" else share
    training: list[Example] = []
    apart: list[Example] = []
    for group, draw in zip(groups, draws):
        (apart if draw < limit else training).extend(group)
    if share == "auto" and not training:
        return apart, []
    return training, apart


# How examples become batches

BATCHING_WINDOW, PACKED_BATCHING_WINDOW = (
    256,
    2048,
)  # examples that are batched together: more of them waste less, fewer keep the order random


def group_by_length(lengths: list[int], batching: Batching) -> list[list[int]]:
    """Group the examples of a window into batches, by index.

    Padded batches are buckets of similar length, which keeps padding low. Packed batches fill
    `batch_tokens` by best fit
    decreasing: the longest example first, each into the batch where it leaves the least room.
    """
    if not batching.packed:
        buckets: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
            if not buckets or (len(buckets[-1]) + 1) * lengths[index] > batching.batch_tokens:
                buckets.append([])
            buckets[-1].append(index)
        return buckets
    packs: list[list[int]] = []
    # Free tokens of each batch, ascending, and its index.
    rooms: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        position = bisect_left(rooms, (lengths[index], 0))
        if position < len(rooms):
            room, number = rooms.pop(position)
        else:
            room = batching.batch_tokens
            number = len(packs)
            packs.append([])
        packs[number].append(index)
        insort(rooms, (room - lengths[index], number))
    return packs


@dataclass(frozen=True)
class BatchingEfficiency:
    """How well batches are filled."""

    num_batches: int
    # Tokens divided by the capacity of the batches.
    filled_share: float
    # Tokens divided by the computed positions, padding included.
    real_share: float

    def __str__(self) -> str:
        padding = f"{1 - self.real_share:.1%} padding" if self.real_share < 1 else "no padding"
        return f"{self.num_batches} batches, {self.filled_share:.1%} full, {padding}"


# The order in which they are trained on


class BatchStream(ABC, Iterator[list[Example]]):
    """One process's share of the batches; their numbers and order do not depend on the number of
    processes.

    Of the `batches_per_step` batches of a step, the j-th goes to process j % num_processes.
    """

    def __init__(
        self,
        rank: int,
        num_processes: int,
        state: StreamState | None,
        batches_per_step: int | None = None,
    ) -> None:
        self.rank, self.num_processes = rank, num_processes
        self.batches_per_step = batches_per_step or num_processes
        self.batches_done: int = state["batches_done"] if state else 0  # by all processes
        self.step_start = self.batches_done

    def __next__(self) -> list[Example]:
        # A process without a batch of its own gets that of another one.
        number = self.batches_done + self.rank % self.batches_per_step
        end = self.step_start + self.batches_per_step
        is_last = number + self.num_processes >= end
        self.batches_done = end if is_last else self.batches_done + self.num_processes
        self.step_start = end if is_last else self.step_start
        return self.take_batch(number)

    @abstractmethod
    def take_batch(self, number: int) -> list[Example]:
        """Return the batch of this number; numbers only increase from call to call."""

    def state_dict(self) -> StreamState:
        """Return the position of this process in JSON types; `merge_states` makes one state for
        any number of processes.
        """
        return {"batches_done": self.batches_done}

    @staticmethod
    def merge_states(states: list[StreamState]) -> StreamState:
        """Merge the states of all processes, which have taken equally many batches."""
        return states[0]

    @staticmethod
    def data_metrics(state: StreamState) -> dict[str, int]:
        """Return the metrics of the data read so far, from the merged state of all processes."""
        return {}


class BatchQueue(Iterator[list[Example]]):
    """The batches of a stream, each of which `on_batch` receives `count` batches before it is
    taken.
    """

    def __init__(
        self, stream: BatchStream, count: int, on_batch: Callable[[list[Example]], None]
    ) -> None:
        self.stream, self.count, self.on_batch = stream, count, on_batch
        # Coming batches, each with the position behind it.
        self.coming: deque[tuple[list[Example], StreamState]] = deque()
        self.position = stream.state_dict()

    def __next__(self) -> list[Example]:
        while len(self.coming) <= self.count:
            batch = next(self.stream)
            self.on_batch(batch)
            self.coming.append((batch, self.stream.state_dict()))
        batch, self.position = self.coming.popleft()
        return batch

    def state_dict(self) -> StreamState:
        """Return the position behind the last batch that was taken."""
        return self.position


class EpochBatchStream(BatchStream):
    """The batches of a data set in memory, one epoch after another."""

    def __init__(
        self,
        dataset: Dataset,
        batching: Batching,
        rank: int,
        num_processes: int,
        state: StreamState | None,
        batches_per_step: int | None = None,
    ) -> None:
        super().__init__(rank, num_processes, state, batches_per_step)
        self.dataset, self.batching = dataset, batching
        # The current epoch, and the number of its first batch.
        self.epoch = 0
        self.first_batch = 0
        self.batches = dataset.make_batches(0, batching)

    def take_batch(self, number: int) -> list[Example]:
        while number - self.first_batch >= len(self.batches):
            self.epoch, self.first_batch = self.epoch + 1, self.first_batch + len(self.batches)
            self.batches = self.dataset.make_batches(self.epoch, self.batching)
        return self.dataset[self.batches[number - self.first_batch]]
