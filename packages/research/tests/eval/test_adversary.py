"""Prompts that slow a drafter down: found by the seed, never worse than the start, and decoded
as losslessly as any.
"""

from pathlib import Path
from typing import Any

import pytest

from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.notes import explain_numbers
from spectrain.eval.prompts import read_prompts
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain
from spectrain_research.adversary.evaluation import insert_words
from tests.eval.test_run import ROWS, SETTING, make_evaluation


def run_adversary(target: Target, folder: Path, name: str, **more: Any) -> dict[str, Any]:
    """Score n-gram lookup with an adversary, because what it copies depends on the wording."""
    candidate = Candidate(target, Ngram(target), Chain(3), Greedy(), SETTING)
    evaluation = make_evaluation(folder, adversary=5, **more)
    evaluation.max_new_tokens = 20  # enough for copies to be accepted
    return evaluation.score(candidate, folder / name)


@pytest.mark.slow
def test_edited_prompts_are_drafted_worse_and_answered_losslessly(
    shallow: Target, tmp_path: Path
) -> None:
    """Whatever the answer becomes, fewer tokens per forward are emitted, with the guard and without
    the output is generate's, the prompts can be scored by themselves, and the same seed finds them
    again."""
    summary = run_adversary(shallow, tmp_path, "one", adversary_same=0.0)
    result = summary["adversary"]
    assert (
        result["edited"] > 0
        and result["ratio"] < 1
        and result["after"]["drafter"]["pooled"] < result["before"]["pooled"]
    )
    for name in ("drafter", "guarded"):
        assert (
            result["lossless"][name]["identical"]
            == result["lossless"][name]["checked"]
            == len(ROWS)
        )
    assert any("prompts edited by at most 4 words" in line for line in explain_numbers(summary))
    prompts = read_prompts(str(tmp_path / "one" / "adversary.jsonl")).prompts
    for prompt, row in zip(prompts, ROWS, strict=True):
        words = str(prompt.turns[0]).split(" ")
        own = str(row["turns"][0]).split(" ")
        assert prompt.id == row["id"] and len(own) <= len(words) <= len(own) + 4
        rest = iter(words)
        assert all(word in rest for word in own), "the prompt's own words stay, in their order"
    again = run_adversary(shallow, tmp_path, "two", adversary_same=0.0, check=False)["adversary"]
    assert (tmp_path / "two" / "adversary.jsonl").read_text() == (
        tmp_path / "one" / "adversary.jsonl"
    ).read_text()
    assert again["ratio"] == result["ratio"]


def test_equal_output_is_required(shallow: Target, tmp_path: Path) -> None:
    """Where every token of the answer has to stay the likeliest, no answer changes, however many
    edits are tried.
    """
    result = run_adversary(
        shallow, tmp_path, "out", adversary_same=1.0, adversary_words=1, check=False
    )["adversary"]
    assert (
        result["same_tokens"] == 1
        and result["same_answers"] == result["prompts"] == len(ROWS)
        and result["ratio"] <= 1
    )


def test_words_go_between_words() -> None:
    """Several words inserted at one position keep their order; the text's own spaces and lines
    stay.
    """
    assert (
        insert_words("one  two\nthree", [(0, "a"), (0, "b"), (3, "c")]) == "a b one  two\nthree c"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"adversary": 0},
        {"adversary": 1, "adversary_words": 0},
        {"adversary": 1, "adversary_same": 1.5},
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A search that cannot be is refused under its setting, with what to use."""
    with pytest.raises(UserError, match=r"^eval\.adversary\w*=\S+: use "):
        make_evaluation(tmp_path, **settings)
