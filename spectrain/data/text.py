"""Plain text as data: documents, prompts with completions, and folders of texts or source files,
without a chat template.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from spectrain.config.values import Share
from spectrain.errors import UserError
from spectrain.files import MAX_TEXT_BYTES, read_text

from .files import FileRow, is_row_file
from .messages import Conversation, check_text
from .readers import FileReader


@dataclass
class TextReader(FileReader):
    """Documents in files of rows, with `text` or with `prompt` and `completion`, or a folder of
    texts or source files.

    Every token of a document carries loss, or only the completion does. A document that is longer
    than `max_length` becomes several sequences. With trainer.packing=true short ones share a row.
    """

    # Column that holds the documents.
    column: str = "text"
    # Endings of the files to read in a folder of texts, as in [.py,.md]; null reads every file that
    # is UTF-8 text.
    suffixes: list[str] | None = None
    # Share of the documents that is trained on as fill-in-the-middle, by the tokenizer's own
    # tokens.
    infill: Share = 0.0
    # Seed that chooses these documents and where they are cut.
    seed: int = field(default=0, kw_only=True)

    @property
    def text_folder(self) -> Path | None:
        """The folder whose files are documents; None where the path names files of rows."""
        folder = Path(self.path).expanduser()
        return (
            folder
            if folder.is_dir() and (self.suffixes is not None or not has_data_files(folder))
            else None
        )

    def num_bytes(self) -> float:
        folder = self.text_folder
        return (
            super().num_bytes()
            if folder is None
            else float(sum(path.stat().st_size for path in self._list_texts(folder)))
        )

    def read_conversations(self) -> Iterator[Conversation]:
        folder = self.text_folder
        for number, document in enumerate(
            super().read_conversations() if folder is None else self._read_folder(folder)
        ):
            if (
                self.infill
                and document.completion is None
                and Random(f"{self.seed}/{number}").random() < self.infill
            ):
                document = replace(document, infill_seed=self.seed * 1_000_003 + number)
            yield document

    def count_conversations(self) -> int | None:
        # A folder of texts has no lines that are rows.
        return None if Path(self.path).expanduser().is_dir() else super().count_conversations()

    def _list_texts(self, folder: Path) -> list[Path]:
        suffixes = None if self.suffixes is None else tuple(self.suffixes)
        files = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
            and (suffixes is None or path.name.endswith(suffixes))
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        ]
        if not files:
            raise UserError(
                f"data.path={self.path}: it holds no file to read; name another folder or other "
                "data.suffixes"
            )
        return files

    def _read_folder(self, folder: Path) -> Iterator[Conversation]:
        for path in self._list_texts(folder):
            if path.stat().st_size > MAX_TEXT_BYTES:
                self.unread[f"file of more than {MAX_TEXT_BYTES // 1_000_000} MB"] += 1
                continue
            try:
                text = read_text(path)
            except (UnicodeDecodeError, UserError):
                self.unread["file that is no UTF-8 text"] += 1
                continue
            if not text.strip():
                self.unread["empty file"] += 1
                continue
            try:
                check_text(text, str(path))
            except UserError as error:
                self.handle_row_error(error)
                continue
            yield Conversation([], text=text, origin=str(path))

    def parse_row(self, row: FileRow) -> Conversation:
        return parse_document(row.content, row.location, self.column, self.allows_unanswered)


def has_data_files(folder: Path) -> bool:
    """Tell whether a folder holds files of rows."""
    return any(map(is_row_file, folder.iterdir()))


def parse_document(
    row: Any, location: str, column: str = "text", allows_unanswered: bool = False
) -> Conversation:
    """Return the document of a row, or its prompt and completion."""
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        prompt = row["prompt"]
        completion = row.get("completion", "" if allows_unanswered else None)
        if not isinstance(completion, str) or not (completion or allows_unanswered):
            raise UserError(f"{location}: its prompt has no completion; write a text")
        check_text(prompt, location)
        check_text(completion, location)
        return Conversation([], text=prompt, completion=completion, origin=location)
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            f'{location}: it holds no text in {column!r}; write {{"{column}": ".."}} or '
            f'{{"prompt": "..", "completion": ".."}}'
        )
    check_text(text, location)
    return Conversation([], text=text, origin=location)
