"""The answers of Qwen2.5-Coder-1.5B to the tasks of tasks.yaml and to questions about functions of
this project, as token ids in this repository, so that sessions on machines that keep nothing add
up.

    python -m lab.coder.answers prompts=prompts.jsonl  # writes the tasks that have no answer yet
    python -m lab.coder.answers answered=DIR           # adds a part with the answers of a set
    python -m lab.coder.answers                        # checks every part, and counts

Every part is a Parquet file of training sequences, which `data=tokens` reads: `id`, a hash of the
prompt; `input_ids`, the chat with the token ids as they were generated; and `loss_mask`. Its
metadata say how it was made.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from lab.benchmarks.command import run_benchmark
from spectrain.data.chat import tokenize_conversation
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.messages import parse_conversation
from spectrain.data.shards import Row, ShardSet, read_rows
from spectrain.errors import UserError
from spectrain.files import atomic_write, write_text
from spectrain.models.loading import build_meta_network, load_hf

from .make_prompts import (
    TASKS,
    group_task_prompts,
    iterate_functions,
    list_evaluation_phrases,
    list_phrases,
    make_function_prompt,
)

PARTS = Path(__file__).with_name("answers")
TARGET = "qwen2.5-coder-1.5b"
METADATA = b"spectrain"
SCHEMA = pa.schema(
    [("id", pa.string()), ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_()))]
)
SOURCES = tuple(PARTS.parents[2] / name for name in ("spectrain", "packages"))
"""Folders of this project's functions. Where one changes, the answer to its old text stays."""
LEFT_OUT = ("data", "target.model", "regenerate.shard_size")
"""Settings of a set that name files of one machine or change no answer."""


@dataclass(frozen=True)
class Answer:
    """The training sequence of an answered prompt, whose hash is `id`."""

    id: str
    tokens: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class Part:
    """A file of answers."""

    path: Path
    answers: list[Answer]
    # The settings that determine the answers.
    settings: dict[str, Any]

    @property
    def num_generated(self) -> int:
        return sum(sum(answer.mask) for answer in self.answers)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)


def list_ordered_prompts(
    tasks: dict[str, list[str]] | None = None, folders: Iterable[Path] = SOURCES
) -> list[str]:
    """Return the prompts in the order in which they are answered: every task, concept and problem
    once, with as many functions, before any of them twice, each time in a language and wording
    that its hash decides.

    The order depends on the texts alone. Prompts that repeat a phrase of an evaluation are left
    out.
    """
    tasks = tasks or yaml.safe_load(TASKS.read_text(encoding="utf-8"))
    excluded = list_evaluation_phrases()

    def sort_usable(prompts: Iterable[str]) -> list[str]:
        usable = {prompt for prompt in prompts if not excluded & list_phrases(prompt)}
        return sorted(usable, key=hash_text)

    groups = group_task_prompts(tasks)
    ranks = {prompt: rank for group in groups for rank, prompt in enumerate(sort_usable(group))}
    questions = sort_usable(list_own_questions(tasks, folders))
    ranks.update({prompt: at // len(groups) for at, prompt in enumerate(questions)})
    return sorted(ranks, key=lambda prompt: (ranks[prompt], hash_text(prompt)))


def list_own_questions(tasks: dict[str, list[str]], folders: Iterable[Path]) -> Iterator[str]:
    """Yield a question about every function of the folders, which the function's text decides."""
    for text, opening in iterate_functions(folders):
        yield make_function_prompt(tasks, text, opening, random.Random(hash_text(text)))


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_id(prompt: str) -> str:
    """Return what identifies a prompt in every part, also where tasks are added."""
    return hash_text(prompt)[:16]


def hash_part(answers: Iterable[Answer], facts: dict[str, Any]) -> str:
    return hash_text(json.dumps([*map(asdict, answers), facts]))


def write_part(path: Path, answers: list[Answer], facts: dict[str, Any]) -> None:
    """Write answers with `facts`, among them the `settings` that determine them."""
    columns = [
        [answer.id for answer in answers],
        [answer.tokens for answer in answers],
        [answer.mask for answer in answers],
    ]
    description = json.dumps({"sha256": hash_part(answers, facts), **facts}).encode()
    table = pa.table(columns, SCHEMA.with_metadata({METADATA: description}))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as scratch:
        pq.write_table(
            table, scratch, compression="zstd", compression_level=19, use_dictionary=False
        )


def read_part(path: Path) -> Part:
    """Read a part; raise a UserError that names it where it is damaged."""
    try:
        table = pq.read_table(path, schema=SCHEMA)
        facts = json.loads(pq.read_schema(path).metadata[METADATA])
        answers = [
            Answer(row["id"], row["input_ids"], row["loss_mask"]) for row in table.to_pylist()
        ]
        if facts.pop("sha256") == hash_part(answers, facts):
            return Part(path, answers, facts["settings"])
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException):
        # Whatever a library raises that reads bytes of another meaning.
        pass
    raise UserError(
        f"{path}: this part is damaged, or no part; restore it from git, or remove it and answer "
        "its prompts again"
    )


def read_parts(folder: Path) -> list[Part]:
    """Read every part of a folder; raise a UserError where one is damaged, two answer a prompt,
    or their settings differ.
    """
    parts = [read_part(path) for path in sorted(folder.glob("*.parquet"))]
    origins: dict[str, Path] = {}
    for part in parts:
        if part.settings != parts[0].settings:
            raise UserError(
                f"{part.path}: its settings are not those of {parts[0].path}; remove one of them"
            )
        for answer in part.answers:
            other = origins.setdefault(answer.id, part.path)
            if other != part.path:
                raise UserError(
                    f"{part.path}: {other} answers its prompt {answer.id} too; remove one of them"
                )
    return parts


def read_answered_rows(shards: ShardSet) -> Iterator[Row]:
    """Yield the finished rows of a set that is complete, in progress or was stopped."""
    faults = shards.find_faults()
    for name in shards.shard_names:
        fault = faults.get(name)
        if fault is None:
            yield from shards.read_shard(name)
        elif fault == "unfinished":
            # The process that writes it may have finished it meanwhile.
            rows = list(read_rows(shards.folder / "unfinished" / name))
            yield from rows or shards.read_shard(name)
        else:
            raise UserError(
                f"{shards.folder / name}: this shard is {fault}; run the command that made it again"
            )


def make_answer(row: Row, template: ChatTemplate) -> Answer:
    """Return the training sequence of a row, whose supervised tokens are those that were
    generated.
    """
    content = {key: value for key, value in asdict(row).items() if value is not None}
    (example,) = tokenize_conversation(template, parse_conversation(content, f"row {row.id}"))
    generated = [token for token, is_counted in zip(example.tokens, example.mask) if is_counted]
    if row.answer_ids != [generated]:
        raise UserError(f"row {row.id}: its tokens are not those that were generated; leave it out")
    return Answer(make_id(row.messages[0]["content"]), example.tokens, example.mask)


def describe_origin(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what a part says about the set that it was made of, without paths of the machine."""
    made_with = dict(manifest["made_with"])
    made_with["command"] = re.sub(r"=/\S*/", "=", made_with["command"])
    settings = {key: value for key, value in manifest["settings"].items() if key not in LEFT_OUT}
    return {"settings": settings, "made_with": made_with}


def load_template() -> ChatTemplate:
    """Return the chat template of the target, without its weights."""
    return load_hf(TARGET, network=build_meta_network).template


class PackAnswers:
    """List the tasks without an answer, add a part of answers, or check the parts and count."""

    def __init__(
        self,
        # File to write with the prompts that no part answers, in their order.
        prompts: str | None = None,
        # Folder that spectrain data regenerate writes, of which a part is made.
        answered: str | None = None,
        # Folder of the parts.
        parts: str = str(PARTS),
    ) -> None:
        self.prompts = None if prompts is None else Path(prompts)
        self.answered = None if answered is None else Path(answered)
        self.folder = Path(parts)

    def run(self) -> None:
        order = {make_id(prompt): prompt for prompt in list_ordered_prompts()}
        parts = read_parts(self.folder)
        answered = {answer.id for part in parts for answer in part.answers}
        if self.prompts is not None:
            left = [prompt for identifier, prompt in order.items() if identifier not in answered]
            rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in left)
            self.prompts.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.prompts, rows)
            print(f"{self.prompts}: {len(left)} prompts without an answer")
        if self.answered is not None:
            parts.append(self._add_part(ShardSet(self.answered), list(order), answered))
        numbers = {identifier: number for number, identifier in enumerate(order)}
        for part in parts:
            print(describe_part(part, numbers))
        tokens = sum(part.num_generated for part in parts)
        size = sum(part.path.stat().st_size for part in parts)
        print(
            f"{self.folder}: {sum(len(part.answers) for part in parts)} answers to the "
            f"{len(order)} prompts, {tokens} tokens, {size} bytes"
        )

    def _add_part(self, shards: ShardSet, order: list[str], answered: set[str]) -> Part:
        """Write the answers of a set that no part has as a part of their own."""
        template = load_template()
        position = {identifier: number for number, identifier in enumerate(order)}
        answers = []
        for row in read_answered_rows(shards):
            identifier = make_id(row.messages[0]["content"])
            if identifier not in position:
                raise UserError(
                    f"{shards.folder}: conversation {row.id} is no prompt of this order; answer "
                    "the prompts that prompts=FILE writes"
                )
            if identifier not in answered:
                answers.append(make_answer(row, template))
        if not answers:
            raise UserError(
                f"answered={shards.folder}: it has no answer that no part has; let spectrain data "
                "regenerate go on"
            )
        answers.sort(key=lambda answer: position[answer.id])
        paths = (self.folder / f"part-{number:03d}.parquet" for number in count())
        path = next(path for path in paths if not path.exists())
        write_part(path, answers, describe_origin(shards.manifest))
        return read_part(path)


def describe_part(part: Part, numbers: dict[str, int]) -> str:
    """Return a line with the counts of a part; `numbers` has the position of each id in the
    order.
    """
    positions = sorted(numbers[answer.id] for answer in part.answers if answer.id in numbers)
    size = part.path.stat().st_size
    covered = f"prompts {positions[0]} to {positions[-1]}" if positions else "prompts of no task"
    return (
        f"{part.path.name}: {len(part.answers)} answers, {covered}; {part.num_generated} tokens, "
        f"{part.num_tokens} with the prompts; {size} bytes, {size / part.num_generated:.2f} a token"
    )


if __name__ == "__main__":
    run_benchmark(PackAnswers)
