"""Prompts of chosen lengths: the lengths are those that are named, and scores are grouped by
them.
"""

import json
from pathlib import Path
from typing import get_args

import pytest

from spectrain.decoding.acceptance import Greedy
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.context import ContextFiller, ContextMethod, format_length, parse_length
from spectrain.eval.notes import explain_numbers
from spectrain.eval.prompts import Prompt, read_prompts
from spectrain.eval.run import Evaluation
from spectrain.export.card import warn_of_long_texts
from spectrain.export.trained_length import describe_trained_length, range_start
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain


def fill_prompts(
    target: Target, lengths: list[int | str], method: ContextMethod, path: str | None = None
) -> list[Prompt]:
    filler = ContextFiller.parse(lengths, method, path)
    assert filler is not None
    return filler.fill_prompts(read_prompts(None, 2).prompts, target)[0]


@pytest.mark.parametrize(
    "value, tokens", [(4096, 4096), ("4096", 4096), ("4k", 4096), ("1K", 1024)]
)
def test_lengths_are_numbers_or_words(value: int | str, tokens: int) -> None:
    assert parse_length(value) == tokens
    assert parse_length(format_length(tokens)) == tokens


@pytest.mark.parametrize("value", ["4 M", "-1", 0, "k", "1.5k"])
def test_other_lengths_are_refused(value: int | str) -> None:
    with pytest.raises(UserError, match="eval.context=.*as in 4096 or 4k"):
        parse_length(value)


@pytest.mark.parametrize("method", get_args(ContextMethod))
def test_prompts_have_the_lengths_that_are_named(tiny: Target, method: ContextMethod) -> None:
    """Every prompt has its length to the token, and ends with its question."""
    prompts = fill_prompts(tiny, [300, "1k"], method)
    assert [len(prompt.tokenize_for(tiny)) for prompt in prompts] == [300, 300, 1024, 1024]
    assert [prompt.category for prompt in prompts] == ["300", "300", "1k", "1k"]
    assert len({prompt.id for prompt in prompts}) == 4
    for prompt, question in zip(prompts, read_prompts(None, 2).prompts * 2):
        text = str(prompt.turns[0])
        if method == "needle":
            assert text.count("The number of the ") == 1 and text.endswith("?")
            assert prompt.reference is not None and prompt.reference.is_right(
                text.partition("The number of the ")[2][:40]
            )
        else:
            assert text.endswith(str(question.turns[0]))


def test_a_single_length_needs_no_list(tmp_path: Path) -> None:
    filler = ContextFiller.parse("4k", "repeated", str(tmp_path))
    assert filler is not None and filler.lengths == (4096,)


def test_documents_come_from_a_file(tiny: Target, tmp_path: Path) -> None:
    """A repeated document stands there again and again; concatenated ones follow one another."""
    file = tmp_path / "texts.jsonl"
    file.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("One bee.", "Two hives."))
    )
    repeated, concatenated = (
        str(fill_prompts(tiny, [200], method, str(file))[0].turns[0])
        for method in ("repeated", "concatenated")
    )
    assert "One bee.\n\nOne bee." in repeated and "hives" not in repeated
    assert "One bee.\n\nTwo hives.\n\nOne bee." in concatenated


def test_a_length_beyond_the_target_is_refused(tiny: Target) -> None:
    evaluation = Evaluation(context=("1k",), max_new_tokens=16, limit=1)
    with pytest.raises(
        UserError,
        match=r"eval.context=1k: tiny takes 1024 tokens, 16 of them .*use lengths of up to 1008",
    ):
        evaluation.check_prompts(tiny)


def test_scores_are_grouped_by_length(
    shallow: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A score has a category for each length; its notes name the method and have tokens per forward
    by position in the text.
    """
    monkeypatch.setattr(shallow.config, "max_position_embeddings", 2048)
    evaluation = Evaluation(
        context=(64, "1k"),
        limit=1,
        max_new_tokens=6,
        repeats=1,
        baselines=(),
        oracle=False,
        report=False,
        check=False,
    )
    evaluation.check_prompts(shallow)
    setting = {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"}
    summary = evaluation.score(
        Candidate(shallow, Ngram(shallow), Chain(3), Greedy(), setting), tmp_path / "out"
    )
    assert [*summary["by_category"]] == ["1k", "64"] and [*summary["by_text_position"]] == [
        "0-1k",
        "1k-2k",
    ]
    assert (
        summary["setting"]["context"]["lengths"] == [64, 1024]
        and summary["setting"]["prompts"] == 2
    )
    rounds = sum(group["rounds"] for group in summary["by_text_position"].values())
    assert rounds == sum(summary["tokens_by_round"])
    notes = " ".join(explain_numbers(summary))
    assert "Prompts of 64, 1k tokens: different documents in sequence before each question" in notes
    assert "by position in the text, in tokens: 0-1k " in notes


def test_a_drop_beyond_the_trained_length_is_stated() -> None:
    """Ranges that begin at the longest trained text or later stand against all rounds before, in
    notes and on the card.
    """
    groups = {
        name: {"acceptance_length": length, "rounds": rounds, "tokens": length * rounds}
        for name, length, rounds in (
            ("0-1k", 3.0, 2),
            ("1k-2k", 2.0, 2),
            ("2k-4k", 1.25, 4),
            ("32k+", 1.0, 1),
        )
    }
    assert [range_start(name) for name in groups] == [0, 1024, 2048, 32768]
    sentence = (
        "Trained on texts of up to 2,048 tokens. Tokens per forward beyond: 1.25 in 2k-4k, 1.00 "
        "in 32k+, against 2.50 before. A drafter with attention of its own may do better with "
        "drafter.window=2048."
    )
    assert describe_trained_length({"max_length": 2048}, groups) == sentence
    steady = {name: {"acceptance_length": 2.3, "rounds": 2, "tokens": 4.6} for name in groups}
    assert str(describe_trained_length({"max_length": 2048}, steady)).endswith(
        "2.30 in 32k+, against 2.30 before."
    )
    assert (
        describe_trained_length({"max_length": 65536}, groups)
        is describe_trained_length(None, groups)
        is None
    )
    summary = {"setting": {"training": {"max_length": 2048}}, "by_text_position": groups}
    assert warn_of_long_texts({"a": summary}) == ["", f"**Long texts.** {sentence}"]
    short = {**summary, "by_text_position": {"0-1k": groups["0-1k"]}}
    warning = warn_of_long_texts({"a": short})[1]
    assert "not scored beyond" in warning and "eval.context=[4096]" in warning
    assert warn_of_long_texts({"a": {"setting": {"training": None}}}) == []
