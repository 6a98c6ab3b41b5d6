"""Mixtures: several sources with weights, read before training, whose held-out examples keep the
name of their source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from itertools import chain, zip_longest
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from spectrain.config.build import GroupSpec
from spectrain.config.check import check_value, find_setting, settings_by_name
from spectrain.config.choices import list_constructors
from spectrain.errors import UserError, suggest_nearest

from .chat import Example
from .chat_template import ChatTemplate
from .dataset import Dataset
from .image_processor import ImageProcessor
from .messages import Conversation
from .readers import ConversationReader, DataSource

# Choices that are no source of a mixture, and why.
REFUSED = {
    "mix": "a mixture holds no mixture; list its sources here",
    "stream": (
        "a mixture is read before training; use data=jsonl or data=hub, or train on the "
        "stream alone"
    ),
}
MAX_WEIGHT = 100.0


@dataclass
class MixReader(ConversationReader):
    """Several sources, each seen `weight` times in an epoch.

    The general settings, such as `limit` and `held_out`, hold for each source that does not name
    its own. Duplicates are left out across all sources; the first source keeps the conversation.
    """

    # The sources, as in [{data: jsonl, path: a.jsonl, weight: 2}, {data: embedded, weight: 0.5}]: a
    # choice of the group data with its settings, and how often its conversations are seen in an
    # epoch (1 if it is not given).
    sources: list[dict[str, Any]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sources:
            raise UserError(
                "data.sources=[]: name at least one, as in [{data: embedded, weight: 1}]"
            )
        self.readers: list[ConversationReader] = []
        self.weights: list[float] = []
        for number, entry in enumerate(self.sources):
            self.weights.append(parse_weight(entry, f"data.sources[{number}]"))
            with_general = {**self._general_settings(), **entry}
            self.readers.append(build_reader(with_general, f"data.sources[{number}]"))
        for reader in self.readers:
            if self.drop_duplicates != "none":
                reader.duplicate_index = self.duplicate_index

    def _general_settings(self) -> dict[str, Any]:
        """Return the settings of every reader that differ from their defaults."""
        changed = {}
        for entry in fields(ConversationReader):
            default = entry.default if entry.default_factory is MISSING else entry.default_factory()
            if (value := getattr(self, entry.name)) != default:
                changed[entry.name] = value
        return changed

    @property
    def name(self) -> str:
        return " + ".join(self.source_names)

    @property
    def source_names(self) -> list[str]:
        """The names of the sources in reports; a repeated name has its number."""
        names = [reader.name for reader in self.readers]
        return [
            name if names.count(name) == 1 else f"{name} ({number})"
            for number, name in enumerate(names)
        ]

    def list_sources(self) -> list[DataSource]:
        return list(map(DataSource, self.source_names, self.weights, self.readers))

    def limit_lines(self) -> list[str]:
        return [line for reader in self.readers for line in reader.limit_lines()]

    def num_bytes(self) -> float:
        return sum(reader.num_bytes() for reader in self.readers)

    def read_conversations(self) -> Iterator[Conversation]:
        for number, reader in enumerate(self.readers):
            reader.allows_unanswered = self.allows_unanswered
            with locate_errors(f"data.sources[{number}]"):
                conversations = reader.load_conversations()
            for conversation in conversations:
                yield add_template_arguments(conversation, reader.template_kwargs or {})

    def load_conversations(self) -> list[Conversation]:
        if not self.loaded_conversations:
            self.loaded_conversations = list(self.read_conversations())
            self.num_left_out = sum(reader.num_left_out for reader in self.readers)
            self.num_duplicates = sum((reader.num_duplicates for reader in self.readers), Counter())
            self.unread = sum((reader.unread for reader in self.readers), Counter())
        return self.loaded_conversations

    def extra_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        return [text for reader in self.readers for text in reader.extra_texts(tokenizer)]

    def make_dataset(self, template: ChatTemplate, vision: ImageProcessor | None = None) -> Dataset:
        self.load_conversations()
        datasets = []
        for number, reader in enumerate(self.readers):
            with locate_errors(f"data.sources[{number}]"):
                datasets.append(reader.make_dataset(template, vision))
        return mix_datasets(datasets, self.weights, self.source_names)


@contextmanager
def locate_errors(location: str) -> Iterator[None]:
    """Name the source in the errors of its reader, in place of the group."""
    try:
        yield
    except UserError as error:
        text = str(error)
        rest = text.removeprefix("data.")
        raise UserError(f"{location}: {text}" if rest == text else f"{location}.{rest}") from error


def add_template_arguments(
    conversation: Conversation, arguments: Mapping[str, Any]
) -> Conversation:
    """Return a conversation that brings the template arguments of its source along; its own take
    precedence.
    """
    if not arguments or not isinstance(conversation, Conversation):
        return conversation
    return replace(
        conversation, template_arguments={**arguments, **conversation.template_arguments}
    )


def parse_weight(entry: Mapping[str, Any], location: str) -> float:
    """Return the weight of a source."""
    weight = entry.get("weight", 1.0)
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not 0 < weight <= MAX_WEIGHT
    ):
        raise UserError(f"{location}.weight={weight}: use a number above 0, up to {MAX_WEIGHT:g}")
    return float(weight)


def build_reader(entry: Mapping[str, Any], location: str) -> ConversationReader:
    """Build the reader of a source; a UserError names the entry and the key that is wrong."""
    choices = list_constructors("data")
    choice = entry.get("data")
    if choice is None:
        raise UserError(
            f"{location}: it names no choice of data; write {{data: jsonl, path: FILE, weight: 1}}"
        )
    if choice in REFUSED:
        raise UserError(f"{location}.data={choice}: {REFUSED[choice]}")
    if choice not in choices:
        raise UserError(
            f"{location}.data={choice}: there is no such choice; "
            f"{suggest_nearest(str(choice), set(choices) - REFUSED.keys())}"
        )
    settings = {str(key): value for key, value in entry.items() if key not in ("data", "weight")}
    allowed_keys = settings_by_name(choices[choice])
    for name, value in settings.items():
        check_value(f"{location}.{name}", value, find_setting(location, name, allowed_keys))
    for name, key in allowed_keys.items():
        if key.default is None and name not in settings:
            raise UserError(
                f"{location}.{name}: it must be given, as in {{data: {choice}, {name}: VALUE}}"
            )
    with locate_errors(location):
        reader: ConversationReader = GroupSpec("data", choice, settings).build()
    return reader


def mix_datasets(datasets: list[Dataset], weights: list[float], names: list[str]) -> Dataset:
    """Return the mixture of data sets, with the training examples of each repeated by its weight.

    What one source holds out, no source trains on. Held-out examples of the sources take turns, so
    that the first few of them cover all sources.
    """
    held_out = {example.content_hash for dataset in datasets for example in dataset.held_out}
    examples: list[Example] = []
    lines = []
    for number, (dataset, weight) in enumerate(zip(datasets, weights)):
        own = [example for example in dataset.examples if example.content_hash not in held_out]
        repeated = repeat_examples(own, weight)
        if not repeated:
            raise UserError(
                f"data.sources[{number}].weight={weight:g}: it leaves none of {len(own)} "
                "examples; raise it"
            )
        examples += repeated
        lines.append(
            f"{names[number]}, weight {weight:g}: {len(repeated)} examples an epoch; "
            f"{dataset.summary_line()}"
        )
    named = [
        [(example, name) for example in dataset.held_out] for dataset, name in zip(datasets, names)
    ]
    in_turn = [pair for pairs in zip_longest(*named) for pair in pairs if pair is not None]
    return Dataset(
        examples,
        sum(dataset.num_conversations for dataset in datasets),
        sum(dataset.num_cut for dataset in datasets),
        sum(dataset.num_dropped for dataset in datasets),
        num_short=sum(dataset.num_short for dataset in datasets),
        held_out=[example for example, _ in in_turn],
        held_out_sources=[name for _, name in in_turn],
        source_lines=lines if len(datasets) > 1 else [],
        extra_texts=lambda: list(
            chain.from_iterable(dataset.extra_texts() for dataset in datasets)
        ),
        unread=sum((dataset.unread for dataset in datasets), Counter()),
    )


def repeat_examples(examples: list[Example], weight: float) -> list[Example]:
    """Return every example as often as the whole part of `weight` says, and the remaining share of
    them once more.

    A hash of the content selects this share, so that it is the same in every epoch and every order.
    """
    times, share = divmod(weight, 1)
    draws = [Random(f"weight/{example.content_hash}").random() for example in examples]
    ranked = sorted(range(len(examples)), key=draws.__getitem__)
    selected = sorted(ranked[: round(share * len(examples))])
    return examples * int(times) + [examples[index] for index in selected]
