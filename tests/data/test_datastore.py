"""A store finds what a search of all its texts finds, and refuses what is not its own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.config.build import GroupSpec
from spectrain.copying.suffixes import MAX_MATCH, TEXT_END
from spectrain.data.chat import tokenize_conversation
from spectrain.data.datastore import (
    Datastore,
    build_suffix_array,
    hash_phrases,
    hash_text,
    hash_vocabulary,
    load_array,
    write_store,
)
from spectrain.data.index import index_command
from spectrain.errors import UserError
from spectrain.models.target import Target


class DigitTokenizer:
    """A tokenizer of eight tokens."""

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(8)}

    def __len__(self) -> int:
        return 8


def write_and_load(
    folder: Path,
    texts: list[list[int]],
    questions: tuple[str, ...] = (),
    answers: tuple[str, ...] = (),
) -> Datastore:
    write_store(folder, texts, questions, answers, {"tokenizer": hash_vocabulary(DigitTokenizer())})
    return Datastore(str(folder), DigitTokenizer())


@pytest.mark.parametrize("size, kinds", [(1, 1), (2, 1), (40, 1), (200, 2), (300, 50)])
def test_suffixes_are_sorted(size: int, kinds: int) -> None:
    """Suffixes are sorted by their first 16 tokens, an end before everything, and then by
    position.
    """
    tokens = torch.randint(-1, kinds, (size,)).numpy().astype(np.int32)
    values = tokens.tolist()
    assert build_suffix_array(tokens).tolist() == sorted(
        range(size), key=lambda at: (values[at : at + MAX_MATCH], at)
    )


@pytest.mark.parametrize("most, enough", [(200, 1), (200, 8), (5, 64), (1, 1)])
def test_a_store_equals_a_search(tmp_path: Path, most: int, enough: int) -> None:
    """The longest matches come first, shorter ones until there are enough, each position once,
    and none past a text's end.
    """
    texts = [torch.randint(0, 3, (30,)).tolist() for _ in range(4)]
    store = write_and_load(tmp_path / "store", texts)
    tokens = [token for text in texts for token in (*text, TEXT_END)]
    for _ in range(40):
        text = torch.randint(0, 4, (6,)).tolist()
        match_lengths: dict[int, int] = {}
        for length in range(6, 0, -1):
            ends = [
                end
                for end in range(length, len(tokens) + 1)
                if tokens[end - length : end] == text[-length:]
            ]
            if len(match_lengths) < enough:
                match_lengths |= {end: length for end in ends if end not in match_lengths}
        actual = [
            (n, [t for t in rest if t != TEXT_END])
            for n, rest in zip(
                *map(np.ndarray.tolist, store.find_continuations(text, 3, most, enough))
            )
        ]
        expected = [(length, tokens[end : end + 3]) for end, length in match_lengths.items()]
        expected = [
            (length, rest[: rest.index(TEXT_END)] if TEXT_END in rest else rest)
            for length, rest in expected
        ]
        expected = [(length, rest) for length, rest in expected if rest]
        assert len(actual) <= most and all(item in expected for item in actual)
        if most == 200:
            assert sorted(actual) == sorted(expected) and [n for n, _ in actual] == sorted(
                (n for n, _ in actual), reverse=True
            )


def test_longer_texts_are_found_completely(tmp_path: Path) -> None:
    text = torch.randint(0, 3, (60,)).tolist()
    store = write_and_load(tmp_path / "store", [text, text[:20]])
    assert (
        store.contains_tokens(text)
        and store.contains_tokens(text[5:50])
        and not store.contains_tokens([*text[:59], 7])
    )
    assert store.match_length([7, *text[10:40]]) == MAX_MATCH and store.match_length([7]) == 0


def test_words_are_hashed() -> None:
    """Case, spaces and signs make no difference; a phrase has five words."""
    assert hash_text("What is  a Bee?") == hash_text("what is a bee") != hash_text("what is a bea")
    assert len(hash_phrases("one two three four five six")) == 2 and len(hash_phrases("one")) == 1


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    """A missing folder, another tokenizer's texts, arrays of wrong types or positions, and
    pickles are refused.
    """
    folder = tmp_path / "store"
    write_and_load(folder, [[1, 2, 3]])
    with pytest.raises(UserError, match="there is no store"):
        Datastore(str(tmp_path / "other"), DigitTokenizer())

    def check_refused(name: str, content: Any) -> None:
        path = folder / name
        content_before = path.read_bytes()
        if isinstance(content, str):
            path.write_text(content)
        else:
            np.save(path, content, allow_pickle=True)
        with pytest.raises(UserError):
            Datastore(str(folder), DigitTokenizer())
        path.write_bytes(content_before)

    check_refused("index.json", json.dumps({"tokenizer": "another"}))
    check_refused("index.json", "[]")
    check_refused("tokens.npy", np.array([1, 2, 9, -1], dtype=np.int32))
    check_refused("suffixes.npy", np.array([0, 1, 2, 4], dtype=np.int32))
    check_refused("suffixes.npy", np.array([0, 1], dtype=np.int32))
    check_refused("suffixes.npy", np.array([0, 1, 2, 3], dtype=np.int64))
    check_refused("answers.npy", np.array([{"a": 1}], dtype=object))
    check_refused("phrases.npy", "no array")
    Datastore(str(folder), DigitTokenizer())


HEADERS = (
    "{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (SIZE,), }".replace("SIZE", str(10**30)),
    "{'descr': '<i4', 'fortran_order': False, 'shape': (True,), }",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (0, SIZE), }".replace("SIZE", str(10**19)),
    "{'descr': '<i4', 'fortran_order': ",
    "-" * 9000 + "1",
    "[" * 9000,
)


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header[:70])
def test_a_header_that_lies_is_refused(header: str, tmp_path: Path) -> None:
    """It is a literal of Python, by which numpy counts, reserves memory and nests."""
    path = tmp_path / "tokens.npy"
    size = len(header).to_bytes(2, "little")
    path.write_bytes(b"\x93NUMPY\x01\x00" + size + header.encode() + bytes(16))
    with pytest.raises(
        UserError, match=r"tokens.npy: it cannot be read .*; index it again"
    ) as error:
        load_array(path, "index it again")
    assert "\n" not in str(error.value)


def test_an_archive_is_no_array(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    with path.open("wb") as file:
        np.savez(file, a=np.arange(3))
    for content in (path.read_bytes(), b"PK\x03\x04" + bytes(40)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokens.npy: it cannot be read .*; index it again"):
            load_array(path, "index it again")


def test_data_becomes_a_store(shallow: Target, shallow_folder: Path, tmp_path: Path) -> None:
    """A store has the answers with the tokens before them, hashes of questions and answers, and
    the source of the data.
    """
    chats = [("What is a bee?", "A bee is an insect."), ("And a fly?", "That is one too.")]
    lines = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in chats
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = GroupSpec("target", "hf", {"model": str(shallow_folder)})
    data = GroupSpec("data", "jsonl", {"path": str(tmp_path / "chats.jsonl")})
    index_command(model, data, str(tmp_path / "store"))
    store = Datastore(str(tmp_path / "store"), shallow.tokenizer)
    assert sorted(store.questions.tolist()) == sorted(hash_text(question) for question, _ in chats)
    assert sorted(store.answers.tolist()) == sorted(hash_text(answer) for _, answer in chats)
    (example,) = tokenize_conversation(shallow.template, lines[0]["messages"])
    first = example.mask.index(True)
    assert store.contains_tokens(example.tokens[first - MAX_MATCH :]) and not store.contains_tokens(
        example.tokens[first - MAX_MATCH - 1 :]
    )
    assert (
        store.facts["conversations"] == 2
        and store.facts["tokens"] == len(store.tokens)
        and "spectrain" in str(store.facts)
    )
    for out, words in {str(tmp_path / "store"): "there already", "": "say where"}.items():
        with pytest.raises(UserError, match=words):
            index_command(model, data, out)


def test_token_ids_become_a_store(shallow: Target, shallow_folder: Path, tmp_path: Path) -> None:
    """The answers are stored as they are; the tokens without loss, as text, count as a question
    in the search for leaks.
    """
    question = "What is the name of the small insect that makes honey?"
    answer = "It is called a bee."
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    (example,) = tokenize_conversation(shallow.template, messages)
    row = {"input_ids": example.tokens, "loss_mask": list(map(int, example.mask))}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    model = GroupSpec("target", "hf", {"model": str(shallow_folder)})
    index_command(
        model,
        GroupSpec("data", "tokens", {"path": str(tmp_path / "rows.jsonl")}),
        str(tmp_path / "store"),
    )
    store = Datastore(str(tmp_path / "store"), shallow.tokenizer)
    stored_phrases = set(store.phrases.tolist())
    assert store.contains_tokens(
        [token for token, supervised in zip(example.tokens, example.mask) if supervised]
    )
    assert hash_phrases(question) <= stored_phrases and not hash_phrases(answer) & stored_phrases


def test_a_stream_becomes_no_store(shallow_folder: Path, tmp_path: Path) -> None:
    """A stream reads a sample of its rows, and a store of a sample looks like one of all rows."""
    model = GroupSpec("target", "hf", {"model": str(shallow_folder)})
    with pytest.raises(
        UserError, match="a store needs all conversations, a stream reads data.sample rows"
    ):
        index_command(
            model,
            GroupSpec("data", "stream", {"path": str(tmp_path / "a.jsonl")}),
            str(tmp_path / "store"),
        )
