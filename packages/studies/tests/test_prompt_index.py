"""Contamination: exactly the prompts that conversations overlap with are found."""

from __future__ import annotations

import pytest

from spectrain_studies.prompt_index import PromptIndex
from tests.data.test_hygiene import make_text


@pytest.mark.parametrize("shared", [12, 13, 14])
def test_contamination_is_reported_from_thirteen_shared_words_on(shared: int) -> None:
    """Thirteen words in a row, with other case and punctuation, are contamination; twelve are
    not.
    """
    prompts = [make_text(seed, 40) for seed in range(5)]
    words = prompts[3].split()[10 : 10 + shared]
    planted = f"zebra {', '.join(words).upper()}! zebra"
    index = PromptIndex(prompts)
    assert index.find_overlap([planted]) == ({3} if shared >= 13 else set())
    assert (
        index.find_overlap([f"{planted[: len(planted) // 2]} zebra {planted[len(planted) // 2 :]}"])
        == set()
    )
    assert index.find_overlap([make_text(seed, 60) for seed in range(10, 20)]) == set()


def test_a_short_prompt_counts_where_it_is_repeated_alone() -> None:
    index = PromptIndex(["What is a bee?", make_text(0, 20)])
    assert index.find_overlap(["what is a BEE"]) == {0}
    assert index.find_overlap(["Tell me: what is a bee?", "What is a bee hive?"]) == set()
