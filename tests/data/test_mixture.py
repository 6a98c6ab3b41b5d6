"""Mixtures: weights repeat and thin out sources exactly, and what a source holds out keeps its
name.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectrain.config.build import GroupSpec
from spectrain.data.chat import Example
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.dataset import Batching, Dataset
from spectrain.data.messages import Conversation
from spectrain.data.mixture import MixReader, repeat_examples
from spectrain.data.readers import EmbeddedReader, JsonlReader
from spectrain.errors import UserError
from tests.data.chat_templates import base_tokenizer

TEMPLATE = ChatTemplate(base_tokenizer())


def write_chats(path: Path, chats: list[Conversation]) -> str:
    path.write_text("".join(json.dumps(chat.to_row()) + "\n" for chat in chats))
    return str(path)


@pytest.fixture
def halves(tmp_path: Path) -> tuple[str, str]:
    """Write two files of 40 different conversations each."""
    chats = EmbeddedReader(limit=80).load_conversations()
    return write_chats(tmp_path / "a.jsonl", chats[:40]), write_chats(
        tmp_path / "b.jsonl", chats[40:]
    )


def make_mixture(*sources: dict[str, Any], **settings: Any) -> MixReader:
    reader = GroupSpec("data", "mix", {"sources": list(sources), **settings}).build()
    assert isinstance(reader, MixReader)
    return reader


def count_examples(examples: list[Example]) -> Counter[str]:
    return Counter(example.content_hash for example in examples)


def test_weights_give_twice_and_half_of_the_examples(halves: tuple[str, str]) -> None:
    """An epoch has each example of weight 2 twice and half of those of weight 0.5 once, and its
    batches hold just these.
    """
    first, second = (JsonlReader(path).make_dataset(TEMPLATE).examples for path in halves)
    mixture = make_mixture(
        {"data": "jsonl", "path": halves[0], "weight": 2},
        {"data": "jsonl", "path": halves[1], "weight": 0.5},
    )
    dataset = mixture.make_dataset(TEMPLATE)
    counts = count_examples(dataset.examples)
    assert [counts[example.content_hash] for example in first] == [2] * 40
    chosen = [example for example in second if counts[example.content_hash]]
    assert len(chosen) == 20 and len(dataset.examples) == 100 and dataset.num_conversations == 80
    for epoch in range(2):
        batches = dataset.make_batches(epoch, Batching(512, seed=0))
        assert (
            count_examples([dataset.examples[index] for batch in batches for index in batch])
            == counts
        )
    again = make_mixture({"data": "jsonl", "path": halves[1], "weight": 1.5}).make_dataset(TEMPLATE)
    assert count_examples(again.examples) == count_examples(second) + count_examples(chosen)


def test_a_share_depends_on_content_alone() -> None:
    """The same examples in any order, and a larger share holds the smaller one."""
    examples = [Example([number, number + 1], [False, True]) for number in range(100)]
    part = count_examples(repeat_examples(examples, 0.3))
    assert part == count_examples(repeat_examples(examples[::-1], 0.3)) and part.total() == 30
    assert not part - count_examples(repeat_examples(examples, 0.31))
    assert repeat_examples(examples, 1.0) == examples


def test_a_single_source_of_weight_1_is_that_source(halves: tuple[str, str]) -> None:
    """The same examples in the same order, the same held-out ones, and the same draft
    vocabulary.
    """
    plain = JsonlReader(halves[0], held_out=0.1, max_length=64).make_dataset(TEMPLATE)
    mixed = make_mixture(
        {"data": "jsonl", "path": halves[0]}, held_out=0.1, max_length=64
    ).make_dataset(TEMPLATE)
    assert mixed.fingerprint == plain.fingerprint and mixed.held_out == plain.held_out
    assert mixed.token_counts(len(base_tokenizer())).equal(
        plain.token_counts(len(base_tokenizer()))
    )
    assert mixed.summary_line() == plain.summary_line()


def test_held_out_examples_keep_their_sources(halves: tuple[str, str]) -> None:
    """Per source as many as the source alone holds out, in turn; weights do not change them, and
    none is trained on.
    """
    own = {path: JsonlReader(path, held_out=0.2).make_dataset(TEMPLATE).held_out for path in halves}
    mixture = make_mixture(
        {"data": "jsonl", "path": halves[0], "weight": 3},
        {"data": "jsonl", "path": halves[1], "weight": 0.5},
        held_out=0.2,
    )
    dataset = mixture.make_dataset(TEMPLATE)
    by_source = {
        path: [e for e, name in zip(dataset.held_out, dataset.held_out_sources) if name == path]
        for path in halves
    }
    assert by_source == own and sum(map(len, by_source.values())) == len(dataset.held_out) == len(
        dataset.held_out_sources
    )
    assert set(dataset.held_out_sources[:2]) == set(halves)
    assert not count_examples(dataset.examples) & count_examples(dataset.held_out)


def test_what_a_source_holds_out_no_other_trains_on(halves: tuple[str, str]) -> None:
    """Where the same file is read twice with other shares, the part held out is never in the
    training examples.
    """
    dataset = make_mixture(
        {"data": "jsonl", "path": halves[0], "held_out": 0.3},
        {"data": "jsonl", "path": halves[0], "held_out": 0.0},
    ).make_dataset(TEMPLATE)
    assert dataset.held_out and not count_examples(dataset.examples) & count_examples(
        dataset.held_out
    )
    assert set(dataset.held_out_sources) == {f"{halves[0]} (0)"}


def test_general_settings_hold_for_sources_without_their_own(halves: tuple[str, str]) -> None:
    mixture = make_mixture(
        {"data": "embedded", "limit": 3},
        {"data": "jsonl", "path": halves[0]},
        limit=5,
        max_length=48,
    )
    assert [(reader.limit, reader.max_length) for reader in mixture.readers] == [(3, 48), (5, 48)]
    assert len(mixture.load_conversations()) == 8
    assert all(len(example.tokens) <= 48 for example in mixture.make_dataset(TEMPLATE).examples)


def test_template_arguments_of_a_source_come_with_its_conversations(tmp_path: Path) -> None:
    """What reads the mixture's conversations, such as a regeneration, renders each as its source
    does; a row's own stay.
    """
    chat = EmbeddedReader(limit=1).load_conversations()[0]
    path = write_chats(
        tmp_path / "c.jsonl", [chat, replace(chat, template_arguments={"enable_thinking": True})]
    )
    mixture = make_mixture(
        {"data": "jsonl", "path": path, "template_kwargs": {"enable_thinking": False}},
        {"data": "embedded", "limit": 1},
    )
    arguments = [conversation.template_arguments for conversation in mixture.load_conversations()]
    assert arguments == [{"enable_thinking": False}, {"enable_thinking": True}, {}]


def test_each_source_has_its_line(halves: tuple[str, str]) -> None:
    """A run says how many examples of each source it sees in an epoch; a single source needs no
    such line.
    """
    sources = [
        {"data": "jsonl", "path": halves[0], "weight": 2},
        {"data": "jsonl", "path": halves[1], "weight": 0.5},
    ]
    lines = make_mixture(*sources).make_dataset(TEMPLATE).source_lines
    assert [line.partition(";")[0] for line in lines] == [
        f"{halves[0]}, weight 2: 80 examples an epoch",
        f"{halves[1]}, weight 0.5: 20 examples an epoch",
    ]
    assert not make_mixture(sources[0]).make_dataset(TEMPLATE).source_lines


def test_duplicates_are_left_out_across_sources(halves: tuple[str, str]) -> None:
    """The first source keeps the conversation; a source of nothing but duplicates is refused."""
    sources = [{"data": "jsonl", "path": halves[0]}, {"data": "embedded", "limit": 50}]
    mixture = make_mixture(*sources, drop_duplicates="exact")
    assert len(mixture.load_conversations()) == 90 and mixture.num_duplicates == {"exact": 40}
    dataset: Dataset = mixture.make_dataset(TEMPLATE)
    assert max(count_examples(dataset.examples).values()) == 1
    again = make_mixture(sources[0], sources[0], drop_duplicates="exact")
    with pytest.raises(
        UserError,
        match=r"data\.sources\[1\]: data .*a\.jsonl: every conversation repeats an earlier one",
    ):
        again.load_conversations()


def test_a_source_may_keep_its_duplicates(tmp_path: Path) -> None:
    """Its own drop_duplicates=none wins over the mixture's; later sources still leave out what
    it holds.
    """
    chats = EmbeddedReader(limit=40).load_conversations()
    path = write_chats(tmp_path / "doubled.jsonl", chats * 2)
    mixture = make_mixture(
        {"data": "jsonl", "path": path, "drop_duplicates": "none"},
        {"data": "embedded", "limit": 50},
        drop_duplicates="exact",
    )
    assert len(mixture.load_conversations()) == 80 + 50 and mixture.num_duplicates == {"exact": 40}


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"data": "jsonl", "pth": "a.jsonl"},
            r"^data\.sources\[1\]\.pth: there is no such key; the nearest is path$"),
        ({"data": "jsonnl"},
            r"^data\.sources\[1\]\.data=jsonnl: there is no such choice; the nearest is jsonl$"),
        ({"data": "stream", "path": "x"},
            r"^data\.sources\[1\]\.data=stream: a mixture is read before training"),
        ({"data": "mix", "sources": []},
            r"^data\.sources\[1\]\.data=mix: a mixture holds no mixture"),
        ({"path": "x"}, r"^data\.sources\[1\]: it names no choice of data"),
        ({"data": "jsonl"}, r"^data\.sources\[1\]\.path: it must be given"),
        ({"data": "embedded", "weight": 0},
            r"^data\.sources\[1\]\.weight=0: use a number above 0, up to 100$"),
        ({"data": "embedded", "weight": "two"},
            r"^data\.sources\[1\]\.weight=two: use a number above 0"),
        ({"data": "embedded", "limit": "x"},
            r"^data\.sources\[1\]\.limit=x: write a whole number"),
        ({"data": "embedded", "limit": 0}, r"^data\.sources\[1\]\.limit=0: use 1 or more"),
        ({"data": "jsonl", "path": "/nowhere.jsonl"},
            r"^data\.sources\[1\]\.path=/nowhere\.jsonl: there is no such file"),
        ({"data": "embedded", "limit": 5, "weight": 0.01},
            r"^data\.sources\[1\]\.weight=0\.01: it leaves none of 5 examples"),
    ],
)  # fmt: skip
def test_a_wrong_source_is_a_single_sentence(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make_mixture({"data": "embedded", "limit": 2}, entry).make_dataset(TEMPLATE)
    assert "\n" not in str(error.value)


def test_a_mixture_needs_a_source() -> None:
    with pytest.raises(UserError, match=r"data\.sources=\[\]: name at least one"):
        make_mixture()
