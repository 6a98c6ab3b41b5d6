"""Conversations that are read, tokenised and batched while training: for sets that are never there whole.

The rows of every epoch are cut into windows of `window` rows, numbered on through the epochs. Window w belongs to shard w % S
of S, which takes its windows one by one: it shuffles one, and makes batches of it. Batch k of the run is the next of
shard k % S. So the order of batches depends on no process, only on the settings; a process tokenises the windows of the shards
whose batches are its own, every n-th where n processes divide S; and S windows are open at a time, which mixes their rows.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedTokenizerBase

from spectrain.config.values import Below1
from spectrain.errors import RunError, UserError
from spectrain.models.images import ImageProcessor

from .chat import Example, Message
from .dataset import Batching, BatchStream, Dataset, StreamState, group_by_length, make_examples, split_held_out
from .readers import ConversationReader, parse_conversation

if TYPE_CHECKING:
    import datasets
    import pyarrow

MAX_EMPTY_WINDOWS = 64  # one after another without a usable conversation end the run


class StreamReader(ConversationReader):
    """Any data set that `datasets` can stream: a name on the hub, a directory, or .jsonl, .jsonl.gz or .parquet files, by
    path or pattern.

    A row without a usable conversation is left out and counted. What wants to know the data beforehand, such as a draft
    vocabulary, is given the first `sample` conversations; a share of these is `held_out`. Use a multiple of the number of
    processes as `shards`.
    """

    def __init__(
        self,
        path: str,
        split: str = "train",
        subset: str | None = None,
        limit: int | None = None,
        max_length: int = 2048,
        shards: int = 16,
        window: int = 512,  # conversations that are shuffled together
        sample: int = 2000,
        held_out: Below1 = 0.0,
    ) -> None:
        super().__init__(limit, max_length, held_out)
        for key, value in (("shards", shards), ("window", window), ("sample", sample)):
            if value < 1:
                raise UserError(f"data.{key}={value}: use 1 or more")
        self.path, self.split, self.subset = path, split, subset
        self.shards, self.window, self.sample = shards, window, sample
        self.name = path
        self.first_skip_reason = ""  # why the first row was left out that was

    def num_bytes(self) -> float:
        return math.inf

    def open_rows(self) -> datasets.IterableDataset:
        """The rows, none of them read yet."""
        import datasets

        local = Path(self.path).expanduser()
        if local.is_dir() and (local / "dataset_info.json").exists():
            return datasets.load_from_disk(str(local)).to_iterable_dataset()
        files = sorted(glob(str(local), recursive=True)) if has_magic(self.path) else [str(local)] * local.is_file()
        if not files:
            if has_magic(self.path) or local.suffix in (".jsonl", ".gz", ".parquet"):
                raise FileNotFoundError("there is no such file")
            return datasets.load_dataset(self.path, self.subset, split=self.split, streaming=True)
        kinds = {"parquet" if file.endswith(".parquet") else "text" for file in files}
        if len(kinds) > 1 or not all(file.endswith((".jsonl", ".jsonl.gz", ".parquet")) for file in files):
            raise ValueError("files are read that end in .jsonl or .jsonl.gz, or all of them in .parquet")
        return datasets.load_dataset(kinds.pop(), data_files=files, split="train", streaming=True)

    def iterate_tables(self, size: int, skip: int = 0) -> Iterator[pyarrow.Table]:
        """The rows of an epoch from row `skip` on, `size` at a time; what is passed over is not decoded."""
        try:
            rows = self.open_rows() if self.limit is None else self.open_rows().take(self.limit)
            yield from rows.skip(skip).with_format("arrow").iter(batch_size=size)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            mend = (
                f", or name its files, as in data.path='{self.path}/*.jsonl'" if Path(self.path).expanduser().is_dir() else ""
            )
            raise UserError(
                f"data.path={self.path}: it cannot be read ({reason}); check path, split and subset{mend}"
            ) from error

    def try_parse(self, row: dict[str, Any]) -> list[Message] | None:
        """The conversation of a row, a line of JSON where files hold lines; None where there is none to use."""
        try:
            return parse_conversation(json.loads(row["text"]) if row.keys() == {"text"} else row, "the row")
        except (UserError, ValueError) as error:
            self._report_first(error)
            return None

    def try_tokenize(
        self, tokenizer: PreTrainedTokenizerBase, messages: list[Message] | None
    ) -> tuple[list[Example], int, int] | None:
        """A conversation's examples, how many were cut, and how many had no answer left; None where it is of no use."""
        try:
            return None if messages is None else make_examples(tokenizer, messages, self.max_length)
        except UserError as error:
            self._report_first(error)
            return None

    def _report_first(self, error: Exception) -> None:
        """Tell of the first row that is left out; the others are counted."""
        if not self.first_skip_reason:
            self.first_skip_reason = str(error)
            print(f"data.path={self.path}: rows are left out and counted; the first: {error}", file=sys.stderr, flush=True)

    def read_conversations(self) -> Iterator[list[Message]]:
        """The usable conversations among the first `sample` rows."""
        for table in islice(self.iterate_tables(self.sample), 1):
            for row in table.to_pylist():
                messages = self.try_parse(row)
                if messages is not None:
                    yield messages
                else:
                    self.num_left_out += 1

    def load_conversations(self) -> list[list[Message]]:
        try:
            return super().load_conversations()
        except UserError as error:
            if not self.first_skip_reason:
                raise
            read = f"data.path={self.path}: none of its first {self.num_left_out} rows is of use"
            raise UserError(f"{read}; of the first: {self.first_skip_reason}") from error

    def make_dataset(self, tokenizer: PreTrainedTokenizerBase, vision: ImageProcessor | None = None) -> StreamedDataset:
        """The stream, with a sample of what it holds; conversations with images are left out of it."""
        conversations = self.load_conversations()
        found = [self.try_tokenize(tokenizer, messages) for messages in conversations]
        usable = [one for one in found if one is not None]
        examples, apart = split_held_out([kept for kept, _, _ in usable], self.held_out)
        if not examples:
            reason = self.first_skip_reason or f"data.max_length={self.max_length} cuts off every answer"
            raise UserError(f"data.path={self.path}: its first {len(conversations)} conversations teach nothing; {reason}")
        self.num_left_out += len(found) - len(usable)
        cut, dropped = sum(cut for _, cut, _ in usable), sum(dropped for _, _, dropped in usable)
        return StreamedDataset(examples, len(usable), cut, dropped, self, tokenizer, held_out=apart)


@dataclass(frozen=True)
class StreamedDataset(Dataset):
    """A sample of a stream, and the stream to train on."""

    data: StreamReader
    tokenizer: PreTrainedTokenizerBase = field(repr=False)

    is_sample: ClassVar[bool] = True

    def num_batches(self, batching: Batching) -> int:
        raise UserError("trainer.max_steps: a stream does not know how much it holds; say how many steps to train")

    def stream_batches(
        self, batching: Batching, rank: int = 0, num_processes: int = 1, state: StreamState | None = None
    ) -> ShardBatchStream:
        return ShardBatchStream(self, batching, rank, num_processes, state)

    def summary_line(self) -> str:
        return (
            f"a stream of {self.data.name}; its first rows, which the draft vocabulary is taken from: {super().summary_line()}"
        )

    def provenance_facts(self) -> dict[str, Any]:
        return {**super().provenance_facts(), "sampled_conversations": self.num_conversations}


class WindowReader:
    """The windows of a stream, in their order and decoded only where they are wanted.

    One that is passed over because another shard is ahead is kept until it is asked for.
    """

    def __init__(self, data: StreamReader, start: int, is_needed: Callable[[int], bool], per_epoch: int | None) -> None:
        self.data, self.is_needed, self.per_epoch = data, is_needed, per_epoch
        self.next_window = start  # the window that is read next
        self.epoch_window = start % per_epoch if per_epoch else start  # and where it lies in its epoch
        self.table_iterator = data.iterate_tables(data.window, self.epoch_window * data.window)
        self.buffered_tables: dict[int, pyarrow.Table] = {}

    def take_rows(self, window: int) -> list[dict[str, Any]]:
        while window not in self.buffered_tables:
            self._read_table()
        found: list[dict[str, Any]] = self.buffered_tables.pop(window).to_pylist()
        return found

    def _read_table(self) -> None:
        table = next(self.table_iterator, None)
        if table is None:
            if not self.epoch_window:
                raise UserError(f"data.path={self.data.path}: it holds no row; give a set with at least one conversation")
            self.per_epoch, self.epoch_window = self.epoch_window, 0
            self.table_iterator = self.data.iterate_tables(self.data.window)
            return
        if self.is_needed(self.next_window):
            self.buffered_tables[self.next_window] = table
        self.next_window, self.epoch_window = self.next_window + 1, self.epoch_window + 1


@dataclass
class StreamShard:
    """Where a shard stands."""

    window: int  # the one it takes batches from
    first_batch: int  # how many batches the windows before it gave
    num_left_out: int  # and how many of their rows were of no use
    num_unusable: int  # and of this one, once it is read
    batches: list[list[tuple[array[int], bytes]]] | None = None  # of this window: tokens and loss masks, kept small


class ShardBatchStream(BatchStream):
    """The batches of a stream; a process reads on in its own shards only."""

    def __init__(
        self, dataset: StreamedDataset, batching: Batching, rank: int, num_processes: int, state: StreamState | None
    ) -> None:
        super().__init__(rank, num_processes, state)
        self.dataset, self.data, self.batching = dataset, dataset.data, batching
        self.held_out = {example.content_hash for example in dataset.held_out}
        count = self.data.shards
        self.shard_states: list[list[int]] = state["shards"] if state else [[number, 0, 0, 0] for number in range(count)]
        mine = {(self.batches_done + rank + taken * num_processes) % count for taken in range(count)}
        self.shards = {number: StreamShard(*self.shard_states[number]) for number in sorted(mine)}
        start = min(shard.window for shard in self.shards.values())
        self.windows = WindowReader(self.data, start, self._is_needed, state["windows"] if state else None)

    def _is_needed(self, window: int) -> bool:
        shard = self.shards.get(window % self.data.shards)
        return shard is not None and window >= shard.window

    def take_batch(self, number: int) -> list[Example]:
        """The next batch of its shard."""
        shard, place = self.shards[number % self.data.shards], number // self.data.shards
        if shard.batches is None:
            shard.batches = self._read_window(shard)
        empty = 0
        while place - shard.first_batch >= len(shard.batches):
            empty = 0 if shard.batches else empty + 1
            if empty == MAX_EMPTY_WINDOWS:
                raise RunError(
                    f"data.path={self.data.path}: {empty * self.data.window} of its rows in a row hold nothing to learn from; "
                    f"of the first left out: {self.data.first_skip_reason or 'its answers were cut off'}"
                )
            shard.first_batch, shard.num_left_out = (
                shard.first_batch + len(shard.batches),
                shard.num_left_out + shard.num_unusable,
            )
            shard.window += self.data.shards
            shard.batches = self._read_window(shard)
        return [Example(list(tokens), list(map(bool, mask))) for tokens, mask in shard.batches[place - shard.first_batch]]

    def _read_window(self, shard: StreamShard) -> list[list[tuple[array[int], bytes]]]:
        """The batches of a shard's window."""
        try:
            rows = self.windows.take_rows(shard.window)
        except UserError as error:
            raise RunError(f"{error}, and go on with trainer.resume=auto") from error
        found = [self.data.try_tokenize(self.dataset.tokenizer, self.data.try_parse(row)) for row in rows]
        shard.num_unusable = sum(one is None for one in found)
        kept = [example for one in found if one is not None for example in one[0] if example.content_hash not in self.held_out]
        random = Random(f"{self.batching.seed}/{shard.window}")
        random.shuffle(kept)
        small = [(array("i", example.tokens), bytes(example.mask)) for example in kept]
        lengths = [len(example.tokens) for example in kept]
        batches = [[small[index] for index in batch] for batch in group_by_length(lengths, self.batching)]
        random.shuffle(batches)
        return batches

    def state_dict(self) -> StreamState:
        places = [list(place) for place in self.shard_states]
        for number, shard in self.shards.items():
            places[number] = [shard.window, shard.first_batch, shard.num_left_out, shard.num_unusable]
        return {**super().state_dict(), "windows": self.windows.per_epoch, "shards": places}

    @staticmethod
    def merge_states(states: list[StreamState]) -> StreamState:
        """Every shard as far as any process has read in it."""
        per_epoch = max(state["windows"] or 0 for state in states) or None
        shards = [max(places) for places in zip(*(state["shards"] for state in states))]
        return {**states[0], "windows": per_epoch, "shards": shards}

    @staticmethod
    def data_metrics(merged: StreamState) -> dict[str, int]:
        """Rows of no use in the windows read so far."""
        return {"left_out": sum(before + here for _, _, before, here in merged["shards"])}
