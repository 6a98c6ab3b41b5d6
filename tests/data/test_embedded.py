"""The embedded conversations are many, unlike each other, and apart from the held-out prompts."""

import gzip
import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import spectrain
from spectrain.data.readers import EmbeddedReader

FOLDER = Path(spectrain.__file__).parent / "data"
RESERVED = (
    r"\b(bees?|beehives?|honey\w*|chess\w*|volcan\w*|lava|origami|sail\w*|glacier\w*|jazz\w*"
    r"|cheese\w*|silk road|penguin\w*|pottery|tennis|lighthouse\w*|mushroom\w*|dinosaur\w*"
    r"|violin\w*|marathon\w*|submarine\w*|roller ?coaster\w*|vineyard\w*|wines?)\b"
)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    text = gzip.decompress((FOLDER / "conversations.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.strip().split("\n")]


@pytest.fixture(scope="module")
def heldout() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "heldout.jsonl").read_text().strip().split("\n")]


def list_grams(text: str, size: int = 5) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9']+", text.lower())
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)} or {tuple(words)}


def list_questions(rows: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][0]["content"] for row in rows]


def test_there_are_many_over_different_tasks(rows: list[dict[str, Any]]) -> None:
    """At least 2,000 conversations, every task with at least 60, some of several turns, all
    answered.
    """
    tasks = Counter(row["category"] for row in rows)
    assert len(rows) >= 2000 and len({row["id"] for row in rows}) == len(rows)
    for task in (
        "chat",
        "explanation",
        "code",
        "arithmetic",
        "summary",
        "rewriting",
        "list",
        "creative",
    ):
        assert tasks[task] >= 60, task
    assert sum(len(row["messages"]) > 2 for row in rows) >= 100
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * (
            len(row["messages"]) // 2
        )
        assert all(
            message["content"].strip() for message in row["messages"] if message["role"] == "user"
        )


def test_no_two_prompts_share_half_of_their_words(
    rows: list[dict[str, Any]], heldout: list[dict[str, Any]]
) -> None:
    """No two prompts, held-out ones included, share more than half of their 5-grams."""
    prompts = [
        list_grams(text) for text in [*list_questions(rows), *(row["turns"][0] for row in heldout)]
    ]
    prompts_by_gram: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, grams in enumerate(prompts):
        for gram in grams:
            prompts_by_gram[gram].append(number)
    for number, grams in enumerate(prompts):
        shared = Counter(
            other for gram in grams for other in prompts_by_gram[gram] if other != number
        )
        for other, count in shared.items():
            assert count <= 0.5 * min(len(grams), len(prompts[other])), (number, other)


def test_most_prompts_share_no_frame(rows: list[dict[str, Any]]) -> None:
    """Well over 600 prompts share no 5-gram with any other prompt and open with three words of
    their own.
    """
    texts = list_questions(rows)
    counts = Counter(gram for text in texts for gram in list_grams(text))
    openings = Counter(" ".join(text.lower().split()[:3]) for text in texts)
    unique = [
        t
        for t in texts
        if all(counts[g] == 1 for g in list_grams(t))
        and openings[" ".join(t.lower().split()[:3])] == 1
    ]
    assert len(unique) >= 600


def test_heldout_prompts_are_on_other_subjects(
    rows: list[dict[str, Any]], heldout: list[dict[str, Any]]
) -> None:
    """The sixty held-out prompts cover the tasks, each on a subject that no user of the training
    set mentions.
    """
    assert len(heldout) == 60 == len({row["id"] for row in heldout})
    assert len({row["category"] for row in heldout}) >= 7
    for row in heldout:
        assert re.search(RESERVED, row["turns"][0], re.IGNORECASE), row["id"]
    for row in rows:
        for message in row["messages"]:
            assert message["role"] != "user" or not re.search(
                RESERVED, message["content"], re.IGNORECASE
            ), row["id"]


def test_a_prefix_covers_every_subject() -> None:
    """Reading with a limit gives a mixture of subjects, not the first file."""
    first = EmbeddedReader(limit=80).load_conversations()
    assert len(first) == 80 and len({len(chat.messages) for chat in first}) >= 2
