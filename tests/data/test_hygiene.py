"""Duplicates: exactly what was planted is found, and the library's pairs are
those of all comparisons.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from spectrain.data.chat import Example
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.hygiene import (
    DuplicateIndex,
    hash_phrases,
    jaccard,
    list_texts,
    split_words,
)
from spectrain.data.messages import Conversation
from spectrain.data.readers import EmbeddedReader, JsonlReader
from spectrain.data.stream import StreamReader
from spectrain.errors import UserError
from tests.data.chat_templates import base_tokenizer

WORDS = sorted(
    {
        word
        for chat in EmbeddedReader(limit=300).load_conversations()
        for word in split_words(list_texts(chat)[-1])
    }
)


def make_text(seed: int, length: int) -> str:
    return " ".join(Random(seed).choices(WORDS, k=length))


def make_chat(answer: str, question: str = "Go on") -> Conversation:
    return Conversation(
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    )


def write_chats(path: Path, *chats: Conversation) -> str:
    path.write_text("".join(json.dumps(chat.to_row()) + "\n" for chat in chats))
    return str(path)


def test_exact_duplicates_are_those_that_were_planted() -> None:
    """Repeated conversations, whatever stands between; one more tool call or another role makes
    another conversation.
    """
    chats = EmbeddedReader(limit=60).load_conversations()
    planted = {7: 3, 20: 3, 45: 0}
    sequence = list(chats)
    for position, original in sorted(planted.items()):
        sequence.insert(position, Conversation(list(chats[original].messages)))
    index = DuplicateIndex("exact", 0.8)
    assert [position for position, chat in enumerate(sequence) if index.add(chat)] == sorted(
        planted
    )
    question, answer = chats[0].messages
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "the sea"}}}
    others = [
        {**answer, "tool_calls": [call]},
        {**answer, "reasoning_content": "Hm."},
        {**answer, "content": "No."},
    ]
    assert [index.add(Conversation([question, other])) for other in others] == [None] * 3
    assert [index.add(Conversation([question, other])) for other in others] == ["exact"] * 3


def test_near_duplicates_are_those_that_were_planted() -> None:
    """One word of sixty replaced is found at 0.8; unrelated texts, and copies with every tenth
    word replaced, are not.
    """
    originals = [make_text(seed, 60) for seed in range(80)]
    index = DuplicateIndex("near", 0.8)
    assert [index.add(make_chat(text)) for text in originals] == [None] * 80
    for seed in range(0, 80, 4):
        words = originals[seed].split()
        changed = [*words[: seed % 60], "otherwise", *words[seed % 60 + 1 :]]
        assert index.add(make_chat(" ".join(changed))) == "near"
        assert index.add(make_chat(originals[seed].upper())) == "near"
        distant = ["otherwise" if at % 10 == 0 else word for at, word in enumerate(words)]
        assert index.add(make_chat(" ".join(distant))) is None
    assert index.add(make_chat(originals[0])) == "exact"


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_near_duplicates_equal_a_comparison_of_all_pairs(threshold: float) -> None:
    """On a chain of ever more changed texts the index decides as a comparison with every
    retained conversation does.
    """
    chats = []
    for seed in range(12):
        words = make_text(seed, 50).split()
        for _ in range(8):
            chats.append(make_chat(" ".join(words)))
            words[Random(len(chats)).randrange(50)] = f"new{len(chats)}"
    index = DuplicateIndex("near", threshold)
    retained = list[set[int]]()
    for chat in chats:
        phrases = hash_phrases(chat)
        is_near = any(jaccard(phrases, other) >= threshold for other in retained)
        assert (index.add(chat) is not None) == is_near
        retained += [] if is_near else [phrases]
    assert 12 <= len(retained) < len(chats)


def test_sequences_of_tokens_have_duplicates_too() -> None:
    tokens = Random(0).choices(range(1000), k=80)
    index = DuplicateIndex("near", 0.8)
    assert index.add(Example(tokens, [True] * 80)) is None
    assert index.add(Example(list(tokens), [False] * 80)) == "exact"
    assert index.add(Example([*tokens[:40], 1001, *tokens[41:]], [True] * 80)) == "near"
    assert index.add(Example(tokens[::-1], [True] * 80)) is None


@pytest.mark.parametrize(
    "mode, expected, counts",
    [("none", 6, {}), ("exact", 5, {"exact": 1}), ("near", 4, {"exact": 1, "near": 1})],
)
def test_readers_leave_duplicates_out_and_count_them(
    tmp_path: Path, mode: str, expected: int, counts: dict[str, int]
) -> None:
    """The first of a group stays; `limit` counts what is used."""
    texts = [make_text(seed, 60) for seed in range(4)]
    chats = [make_chat(text) for text in (*texts[:2], texts[0], f"{texts[1]} indeed", *texts[2:])]
    path = write_chats(tmp_path / "chats.jsonl", *chats)
    reader = JsonlReader(path, drop_duplicates=mode)  # type: ignore[arg-type]
    assert len(reader.load_conversations()) == expected and reader.num_duplicates == counts
    assert [chat for chat in chats if chat in reader.load_conversations()][:2] == chats[:2]
    assert all(
        f"{count} {kind} duplicates left out" in reader.describe_omissions()
        for kind, count in counts.items()
    )
    limited = JsonlReader(path, drop_duplicates=mode, limit=3)  # type: ignore[arg-type]
    assert len(limited.load_conversations()) == 3


def test_short_conversations_are_left_out_and_counted(tmp_path: Path) -> None:
    """min_length counts the tokens of the rendered conversation."""
    path = write_chats(
        tmp_path / "chats.jsonl", *(make_chat(make_text(seed, 10 * seed)) for seed in range(1, 9))
    )
    template = ChatTemplate(base_tokenizer())
    lengths = [len(example.tokens) for example in JsonlReader(path).make_dataset(template).examples]
    bound = sorted(lengths)[4]
    dataset = JsonlReader(path, min_length=bound).make_dataset(template)
    assert [len(example.tokens) for example in dataset.examples] == [
        length for length in lengths if length >= bound
    ]
    assert (
        dataset.num_short == 4
        and "4 shorter than data.min_length left out" in dataset.summary_line()
    )
    streamed = StreamReader(path, min_length=bound).make_dataset(template)
    assert [example.tokens for example in streamed.examples] == [
        example.tokens for example in dataset.examples
    ]
    with pytest.raises(UserError, match=r"data\.min_length=2000: every conversation is shorter"):
        JsonlReader(path, min_length=2000).make_dataset(template)
    with pytest.raises(
        UserError, match=r"data\.min_length=3000: use data\.max_length \(2048\) or less"
    ):
        JsonlReader(path, min_length=3000)
    with pytest.raises(
        UserError, match=r"data\.drop_duplicates=near: a stream is never read whole"
    ):
        StreamReader(path, drop_duplicates="near")
