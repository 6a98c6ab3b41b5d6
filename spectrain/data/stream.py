"""Conversations that are read, tokenized and batched during training, for data sets that do not fit
into memory.

The rows of every epoch are cut into windows of `window` rows, which are numbered across epochs.
Window w belongs to shard w % S of S shards. A shard takes its windows in order: it shuffles one and
makes batches of it. Batch k of the run is the next batch of shard k % S. The order of batches
therefore depends only on the settings, not on the number of processes. A process tokenizes only the
windows of the shards whose batches it takes, every n-th window where n processes divide S. S
windows are open at a time, which mixes their rows.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from spectrain.config.values import Count
from spectrain.errors import RunError, UserError

from .chat import Example
from .chat_template import ChatTemplate
from .dataset import (
    Batching,
    BatchStream,
    Dataset,
    StreamState,
    group_by_length,
    is_too_short,
    make_examples,
)
from .files import keep_media_closed, list_table_rows, load_saved_rows, open_table_files
from .image_processor import ImageProcessor
from .messages import Conversation, drop_nulls, parse_conversation
from .readers import HubReader
from .text import parse_document
from .text_rows import parse_line
from .tokens import check_vocabulary, parse_tokens

if TYPE_CHECKING:
    import datasets
    import pyarrow

# Number of consecutive windows without a usable conversation that ends the run.
MAX_EMPTY_WINDOWS = 64


@dataclass
class StreamReader(HubReader):
    """Any data set that `datasets` can stream: a name on the hub, a directory, or .jsonl, .jsonl.gz
    or .parquet files, by path or pattern.

    Rows without a usable conversation are skipped and counted. Whatever reads the data before
    training, such as the choice of a draft vocabulary, reads the first `sample` conversations.
    """

    # Name of a data set on the Hugging Face hub, a directory, or a file or pattern of .jsonl,
    # .jsonl.gz or .parquet files.
    path: str
    # Number of shards whose windows are read in turn; use a multiple of the number of processes.
    shards: Count = 16
    # Number of conversations that are shuffled and batched together.
    window: Count = 512
    # Number of first conversations that are read before training, for example to choose a draft
    # vocabulary.
    sample: Count = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drop_duplicates != "none":
            raise UserError(
                f"data.drop_duplicates={self.drop_duplicates}: a stream is never read whole; use "
                "data=jsonl or data=hub, or leave it out"
            )
        # Whether each row is a line of JSON, in the column `text`.
        self.reads_lines = True
        # The reason for the first skipped row.
        self.first_skip_reason = ""

    def limit_lines(self) -> list[str]:
        return (
            []
            if self.limit is None
            else [f"{self.name}: {self.limit} rows at most (data.limit; data.limit=null takes all)"]
        )

    def require_all(self, purpose: str) -> None:
        raise UserError(
            f"data: {purpose} needs all conversations, a stream reads data.sample rows; use "
            "data=jsonl or data=hub"
        )

    def open_rows(self) -> datasets.IterableDataset:
        """Open the rows without reading any of them."""
        import datasets

        local = Path(self.path).expanduser()
        self.reads_lines = False
        if local.is_dir() and (local / "dataset_info.json").exists():
            return load_saved_rows(str(local)).to_iterable_dataset()
        files = [] if local.is_dir() else list(map(str, self.local_files()))
        if not files:
            if has_magic(self.path) or local.suffix in (".jsonl", ".gz", ".parquet"):
                raise FileNotFoundError("there is no such file")
            return keep_media_closed(
                datasets.load_dataset(self.path, self.subset, split=self.split, streaming=True)
            )
        kinds = {"parquet" if file.endswith(".parquet") else "text" for file in files}
        if len(kinds) > 1 or not all(
            file.endswith((".jsonl", ".jsonl.gz", ".parquet")) for file in files
        ):
            raise ValueError(
                "files are read that end in .jsonl or .jsonl.gz, or all of them in .parquet"
            )
        self.reads_lines = kinds == {"text"}
        return open_table_files(kinds.pop(), files)

    def local_files(self) -> list[Path]:
        """Return the files on this machine that the path names, or those of a directory; none
        for a name on the hub.
        """
        local = Path(self.path).expanduser()
        if local.is_dir():
            return sorted(path for path in local.rglob("*") if path.is_file())
        names = sorted(glob(str(local), recursive=True)) if has_magic(self.path) else [str(local)]
        return [path for path in map(Path, names) if path.is_file()]

    def iterate_tables(self, size: int, skip: int = 0) -> Iterator[pyarrow.Table]:
        """Yield the rows of an epoch from row `skip` on, `size` at a time; skipped rows are not
        decoded.
        """
        try:
            rows = self.open_rows() if self.limit is None else self.open_rows().take(self.limit)
            yield from rows.skip(skip).with_format("arrow").iter(batch_size=size)
        except UserError:
            raise
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            mend = (
                f", or name its files, as in data.path='{self.path}/*.jsonl'"
                if Path(self.path).expanduser().is_dir()
                else ""
            )
            raise UserError(
                f"data.path={self.path}: it cannot be read ({reason}); check path, split and "
                f"subset{mend}"
            ) from error

    def try_parse(self, row: dict[str, Any], number: int) -> Conversation | Example | None:
        """Return the conversation, the document or the tokens of a row, which may be a line of
        JSON; None if it has none.

        `number` is that of the row in an epoch, from 0 on.
        """
        location = f"row {number + 1}"
        try:
            return parse_row(
                parse_line(row["text"], location) if self.reads_lines else row,
                location,
                self.unread,
            )
        except (UserError, ValueError) as error:
            self._report_first(error)
            return None

    def try_tokenize(
        self, template: ChatTemplate, conversation: Conversation | Example | None
    ) -> tuple[list[Example], int, int] | None:
        """Return a conversation's examples, the number cut and the number dropped; None if it is
        unusable.
        """
        if conversation is None:
            return None
        try:
            if isinstance(conversation, Example):
                check_vocabulary(conversation, template.vocab_size)
            result = make_examples(template, conversation, self.max_length, None, self.train_on)
        except UserError as error:
            self._report_first(error)
            return None
        return None if is_too_short(result[0], self.min_length) else result

    def _report_first(self, error: Exception) -> None:
        """Print the reason for the first skipped row; further rows are only counted."""
        if self.row_errors is not None:
            self.row_errors.append(UserError(str(error)))
        if not self.first_skip_reason:
            self.first_skip_reason = str(error)
            print(
                f"data.path={self.path}: rows are left out and counted; the first: {error}",
                file=sys.stderr,
                flush=True,
            )

    def read_conversations(self) -> Iterator[Any]:
        """Yield the usable conversations among the first `sample` rows."""
        for table in islice(self.iterate_tables(self.sample), 1):
            for number, row in enumerate(list_table_rows(table)):
                conversation = self.try_parse(row, number)
                if conversation is not None:
                    yield conversation
                else:
                    self.num_left_out += 1

    def load_conversations(self) -> list[Conversation]:
        try:
            return super().load_conversations()
        except UserError as error:
            if not self.first_skip_reason:
                raise
            read = f"data.path={self.path}: none of its first {self.num_left_out} rows is of use"
            raise UserError(f"{read}; of the first: {self.first_skip_reason}") from error

    def make_dataset(
        self, template: ChatTemplate, vision: ImageProcessor | None = None
    ) -> StreamedDataset:
        """Return the stream with a sample of its content; conversations with images are skipped."""
        conversations = self.load_conversations()
        template = self.apply_arguments(template)
        results = [self.try_tokenize(template, conversation) for conversation in conversations]
        usable = [result for result in results if result is not None]
        examples, apart = self.split_examples([row_examples for row_examples, _, _ in usable])
        if not examples:
            reason = self.first_skip_reason or self.explain_no_loss(
                any(cut for _, cut, _ in usable)
            )
            raise UserError(
                f"data.path={self.path}: its first {len(conversations)} conversations teach "
                f"nothing; {reason}"
            )
        self.num_left_out += len(results) - len(usable)
        cut = sum(cut for _, cut, _ in usable)
        dropped = sum(dropped for _, _, dropped in usable)
        return StreamedDataset(
            examples, len(usable), cut, dropped, self, template, held_out=apart, unread=self.unread
        )


def parse_row(row: Any, location: str, unread: Counter[str]) -> Conversation | Example:
    """Return what a row holds: a conversation, plain text, or tokens."""
    row = drop_nulls(row)
    if isinstance(row, dict) and not {"messages", "conversations"} & row.keys():
        if "input_ids" in row:
            return parse_tokens(row, location, unread)
        if "text" in row or {"prompt", "completion"} <= row.keys():
            return parse_document(row, location)
    return parse_conversation(row, location, unread=unread)


@dataclass(frozen=True)
class StreamedDataset(Dataset):
    """A sample of a stream, and the stream to train on."""

    data: StreamReader
    template: ChatTemplate = field(repr=False)

    is_sample: ClassVar[bool] = True

    @property
    def max_text_length(self) -> int:
        """The length that texts are cut to, in tokens."""
        return self.data.max_length

    def num_batches(self, batching: Batching) -> int:
        raise UserError(
            "trainer.max_steps: a stream does not know how much it holds; say how many steps to "
            "train"
        )

    def stream_batches(
        self,
        batching: Batching,
        rank: int = 0,
        num_processes: int = 1,
        state: StreamState | None = None,
        batches_per_step: int | None = None,
    ) -> ShardBatchStream:
        return ShardBatchStream(self, batching, rank, num_processes, state, batches_per_step)

    def summary_line(self) -> str:
        return (
            f"a stream of {self.data.name}; its first rows, which the draft vocabulary is "
            f"taken from: {super().summary_line()}"
        )

    def provenance_facts(self) -> dict[str, Any]:
        sizes = [path.stat().st_size for path in self.data.local_files()]
        files = {"files": len(sizes), "bytes": sum(sizes)} if sizes else {}
        return {
            **super().provenance_facts(),
            "sampled_conversations": self.num_conversations,
            **files,
        }


class WindowReader:
    """The windows of a stream in order, decoded only where they are needed.

    A window that is read early because another shard is ahead stays in the buffer until it is
    taken.
    """

    def __init__(
        self,
        data: StreamReader,
        start: int,
        is_needed: Callable[[int], bool],
        per_epoch: int | None,
    ) -> None:
        self.data, self.is_needed, self.per_epoch = data, is_needed, per_epoch
        # The next window to read, and the first one.
        self.next_window = self.start = start
        # Its index in the epoch.
        self.epoch_window = start % per_epoch if per_epoch else start
        self.table_iterator = data.iterate_tables(data.window, self.epoch_window * data.window)
        self.buffered_tables: dict[int, pyarrow.Table] = {}

    def first_row(self, window: int) -> int:
        """Return the number of a window's first row in its epoch, from 0 on."""
        return (window % self.per_epoch if self.per_epoch else window) * self.data.window

    def take_rows(self, window: int) -> list[dict[str, Any]]:
        while window not in self.buffered_tables:
            self._read_table()
        return list_table_rows(self.buffered_tables.pop(window))

    def _read_table(self) -> None:
        table = next(self.table_iterator, None)
        if table is None:
            self._begin_epoch()
            return
        if self.is_needed(self.next_window):
            self.buffered_tables[self.next_window] = table
        self.next_window = self.next_window + 1
        self.epoch_window = self.epoch_window + 1

    def _begin_epoch(self) -> None:
        """Begin the next epoch; a reader that began past the end of its first one counts the
        windows of an epoch.
        """
        size = self.data.window
        has_read = self.next_window > self.start
        self.per_epoch = (
            self.epoch_window if has_read else sum(1 for _ in self.data.iterate_tables(size))
        )
        if not self.per_epoch:
            raise UserError(
                f"data.path={self.data.path}: it holds no row; give a set with at least one "
                "conversation"
            )
        self.epoch_window = 0 if has_read else self.start % self.per_epoch
        self.table_iterator = self.data.iterate_tables(size, self.epoch_window * size)


@dataclass
class StreamShard:
    """The position of a shard."""

    # The current window.
    window: int
    # Number of batches from earlier windows.
    first_batch: int
    # Number of unusable rows in earlier windows.
    num_left_out: int
    # Number of unusable rows in the current window.
    num_unusable: int
    # The batches of the current window: tokens and loss masks in compact form.
    batches: list[list[tuple[array[int], bytes]]] | None = None


class ShardBatchStream(BatchStream):
    """The batches of a stream; a process reads only its own shards."""

    def __init__(
        self,
        dataset: StreamedDataset,
        batching: Batching,
        rank: int,
        num_processes: int,
        state: StreamState | None,
        batches_per_step: int | None = None,
    ) -> None:
        super().__init__(rank, num_processes, state, batches_per_step)
        self.dataset, self.data, self.batching = dataset, dataset.data, batching
        self.held_out = {example.content_hash for example in dataset.held_out}
        count = self.data.shards
        self.shard_states: list[list[int]] = (
            state["shards"] if state else [[number, 0, 0, 0] for number in range(count)]
        )
        own_shards = {
            (self.batches_done + rank + taken * num_processes) % count for taken in range(count)
        }
        if self.batches_per_step % num_processes:
            # The number of its first batch in a step moves through all shards.
            own_shards = set(range(count))
        self.shards = {
            number: StreamShard(*self.shard_states[number]) for number in sorted(own_shards)
        }
        start = min(shard.window for shard in self.shards.values())
        self.windows = WindowReader(
            self.data, start, self._is_needed, state["windows"] if state else None
        )

    def _is_needed(self, window: int) -> bool:
        shard = self.shards.get(window % self.data.shards)
        return shard is not None and window >= shard.window

    def take_batch(self, number: int) -> list[Example]:
        """Return the next batch of the shard that this number belongs to."""
        shard = self.shards[number % self.data.shards]
        position = number // self.data.shards
        if shard.batches is None:
            shard.batches = self._read_window(shard)
        empty = 0
        while position - shard.first_batch >= len(shard.batches):
            empty = 0 if shard.batches else empty + 1
            if empty == MAX_EMPTY_WINDOWS:
                raise RunError(
                    f"data.path={self.data.path}: {empty * self.data.window} of its rows in a row "
                    "hold nothing to learn from; of the first left out: "
                    f"{self.data.first_skip_reason or 'its answers were cut off'}"
                )
            shard.first_batch = shard.first_batch + len(shard.batches)
            shard.num_left_out = shard.num_left_out + shard.num_unusable
            shard.window += self.data.shards
            shard.batches = self._read_window(shard)
        return [
            Example(list(tokens), list(map(bool, mask)))
            for tokens, mask in shard.batches[position - shard.first_batch]
        ]

    def _read_window(self, shard: StreamShard) -> list[list[tuple[array[int], bytes]]]:
        """Return the batches of a shard's current window."""
        try:
            rows = self.windows.take_rows(shard.window)
        except UserError as error:
            raise RunError(f"{error}, and go on with trainer.resume=auto") from error
        first = self.windows.first_row(shard.window)
        parsed = [self.data.try_parse(row, number) for number, row in enumerate(rows, first)]
        results = [
            self.data.try_tokenize(self.dataset.template, conversation) for conversation in parsed
        ]
        shard.num_unusable = sum(item is None for item in results)
        examples = [
            example
            for item in results
            if item is not None
            for example in item[0]
            if example.content_hash not in self.held_out
        ]
        random = Random(f"{self.batching.seed}/{shard.window}")
        random.shuffle(examples)
        small = [(array("i", example.tokens), bytes(example.mask)) for example in examples]
        lengths = [len(example.tokens) for example in examples]
        batches = [
            [small[index] for index in batch] for batch in group_by_length(lengths, self.batching)
        ]
        random.shuffle(batches)
        return batches

    def state_dict(self) -> StreamState:
        shard_states = [list(shard_state) for shard_state in self.shard_states]
        for number, shard in self.shards.items():
            shard_states[number] = [
                shard.window,
                shard.first_batch,
                shard.num_left_out,
                shard.num_unusable,
            ]
        return {**super().state_dict(), "windows": self.windows.per_epoch, "shards": shard_states}

    @staticmethod
    def merge_states(states: list[StreamState]) -> StreamState:
        """Merge the states: every shard is as far as any process has read it."""
        per_epoch = max(state["windows"] or 0 for state in states) or None
        shards = [max(shard_states) for shard_states in zip(*(state["shards"] for state in states))]
        return {**states[0], "windows": per_epoch, "shards": shards}

    @staticmethod
    def data_metrics(merged: StreamState) -> dict[str, int]:
        """Return the number of unusable rows in the windows read so far."""
        return {"left_out": sum(before + here for _, _, before, here in merged["shards"])}
