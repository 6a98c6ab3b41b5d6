"""The audit counts what was planted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from spectrain.cli.main import main
from spectrain.config.build import GroupSpec
from spectrain.data.chat_template import KINDS, ChatTemplate
from spectrain.data.readers import EmbeddedReader, JsonlReader
from spectrain.data.stream import StreamReader
from spectrain.data.text import TextReader
from spectrain.data.tokens import TokensReader, parse_tokens
from spectrain.errors import UserError
from spectrain.output.verbosity import command_output
from spectrain_studies.audit import ROWS, SourceAudit, audit_command, audit_sources
from spectrain_studies.prompt_index import PromptIndex
from tests.data.chat_templates import base_tokenizer, make_template
from tests.data.rows import THINKING, write_lines

PROMPT = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle on the beach."
)
PLAIN = ChatTemplate(base_tokenizer())


def embedded_rows(count: int) -> list[dict[str, Any]]:
    return [chat.to_row() for chat in EmbeddedReader(limit=count).load_conversations()]


def run_audit(
    reader: Any, template: ChatTemplate = PLAIN, prompts: tuple[str, ...] = (PROMPT,)
) -> list[SourceAudit]:
    return audit_sources(reader, template, None, PromptIndex(prompts))


def test_the_counts_are_those_that_were_planted(tmp_path: Path) -> None:
    """Duplicates, contamination, unread keys and four kinds of unusable rows have a line each in
    the table.
    """
    rows = embedded_rows(20)
    words = rows[1]["messages"][1]["content"].split()
    near = [
        {"role": "user", "content": rows[1]["messages"][0]["content"]},
        {"role": "assistant", "content": " ".join([*words[:9], "otherwise", *words[10:]])},
    ]
    contaminated = [
        {"role": "user", "content": f"Please: {PROMPT.lower()}"},
        {"role": "assistant", "content": "No."},
    ]
    path = write_lines(
        tmp_path / "chats.jsonl",
        *rows,
        rows[3],
        rows[4],
        {"messages": near},
        {"messages": contaminated, "grade": 5},
        "{no JSON",
        [1],
        {"messages": [{"role": "wizard", "content": "Hi"}]},
        {"messages": THINKING},
    )
    (source,) = run_audit(JsonlReader(path))
    counts = source.counts
    assert (counts["conversations"], counts["exact"], counts["near"], counts["contaminated"]) == (
        25,
        2,
        1,
        1,
    )
    assert (
        source.prompts == {0}
        and source.unread == {"key 'grade' of a row": 1}
        and counts["unread"] == 1
    )
    assert counts["unusable"] == len(source.reasons) == 4
    for line, reason in zip((25, 26, 27), source.reasons):
        assert f"line {line}:" in reason and "\n" not in reason
    assert source.reasons[3].startswith(f"{path}, line 28: a conversation has tool calls")


def test_tokens_are_those_of_a_training(tmp_path: Path) -> None:
    """Their kinds add up to the tokens of the data set that is trained on, cut as there."""
    path = write_lines(tmp_path / "chats.jsonl", {"messages": THINKING}, *embedded_rows(10))
    template = make_template("qwen3")
    for train_on in (list(KINDS), ["content"]):
        reader = JsonlReader(path, max_length=120, train_on=train_on)  # type: ignore[arg-type]
        dataset = JsonlReader(path, max_length=120, train_on=train_on).make_dataset(template)  # type: ignore[arg-type]
        (source,) = run_audit(reader, template)
        counts = source.counts
        assert (
            counts["tokens"]
            == dataset.num_tokens
            == sum(counts[kind] for kind in (*KINDS, "context"))
        )
        assert (
            counts["supervised"] == dataset.num_supervised == sum(counts[kind] for kind in train_on)
        )
        assert (counts["cut"], counts["dropped"]) == (
            dataset.num_cut,
            dataset.num_dropped,
        ) and counts["cut"]
        assert all(counts[kind] for kind in KINDS)


def test_every_kind_of_source_is_audited(tmp_path: Path) -> None:
    """Texts, tokens and streams; an id beyond the vocabulary and a broken line are unusable
    rows.
    """
    texts = write_lines(
        tmp_path / "texts.jsonl",
        {"text": f"Once upon a time: {PROMPT}"},
        {"text": " "},
        {"prompt": "a", "completion": "b"},
    )
    (source,) = run_audit(TextReader(texts))
    assert (
        source.counts["conversations"],
        source.counts["contaminated"],
        source.counts["unusable"],
    ) == (2, 1, 1)
    ids = base_tokenizer()(PROMPT)["input_ids"]
    rows = [
        {"input_ids": ids, "loss_mask": [1] * len(ids)},
        {"input_ids": [1, 10**6], "loss_mask": [0, 1]},
        {"input_ids": [1]},
    ]
    (source,) = run_audit(TokensReader(write_lines(tmp_path / "tokens.jsonl", *rows)))
    assert (
        source.counts["conversations"],
        source.counts["contaminated"],
        source.counts["unusable"],
    ) == (2, 1, 2)
    assert source.counts["tokens"] == source.counts["content"] == len(ids)
    (source,) = run_audit(
        StreamReader(write_lines(tmp_path / "stream.jsonl", *embedded_rows(3), "{broken"))
    )
    assert (source.counts["conversations"], source.counts["unusable"]) == (3, 1)
    (source,) = run_audit(JsonlReader(write_lines(tmp_path / "nothing.jsonl", "{broken", [])))
    assert (source.counts["conversations"], source.counts["unusable"]) == (0, 2)
    with pytest.raises(UserError, match="there is no such file"):
        run_audit(JsonlReader(str(tmp_path / "nowhere.jsonl")))


def test_a_mixture_is_audited_by_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each source has a column, duplicates count where they repeat an earlier source, and the
    JSON has the same numbers.
    """
    path = write_lines(tmp_path / "chats.jsonl", *embedded_rows(5))
    sources = [
        {"data": "embedded", "limit": 8, "weight": 2},
        {"data": "jsonl", "path": path, "weight": 0.5},
    ]
    data = GroupSpec("data", "mix", {"sources": sources, "drop_duplicates": "exact"})
    target = GroupSpec("target", "tiny")
    with command_output("normal", as_json=True):
        audit_command(target, data, [PROMPT])
    printed = json.loads(capsys.readouterr().out)
    assert [source["weight"] for source in printed["sources"]] == [2, 0.5] and printed[
        "prompts"
    ] == 1
    assert [source["exact"] for source in printed["sources"]] == [0, 5]
    assert all(
        printed["total"][key] == sum(source[key] for source in printed["sources"]) for key in ROWS
    )
    audit_command(target, data, [PROMPT])
    shown = capsys.readouterr().out
    assert (
        all(label.strip() in shown for label in ROWS.values()) and "times seen in an epoch" in shown
    )
    assert "0 of 1 scored prompts share text with a conversation" in shown


def test_the_command_compares_data_with_scored_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the words of the command to the numbers: the prompt that was planted is counted, and
    a broken row ends nothing.
    """
    contaminated = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "No."}]
    path = write_lines(
        tmp_path / "chats.jsonl", *embedded_rows(3), {"messages": contaminated}, "{broken"
    )
    prompts = write_lines(
        tmp_path / "prompts.jsonl", {"prompt": "Name a colour of the sea."}, {"prompt": PROMPT}
    )
    words = [
        "data",
        "audit",
        "target=tiny",
        "data=jsonl",
        f"data.path={path}",
        f"eval.prompts={prompts}",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["spectrain", *words])
    main()
    (source,) = json.loads(capsys.readouterr().out)["sources"]
    assert (source["conversations"], source["contaminated"], source["contaminated_prompts"]) == (
        4,
        1,
        [1],
    )
    assert source["unusable"] == 1 and "line 5" in source["reasons"][0]


def test_an_unusable_row_is_counted_and_named(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    path = write_lines(tmp_path / "ids.jsonl", row, {**row, "input_ids": [5, 10**6, 7]})
    (audit,) = audit_sources(TokensReader(path), PLAIN, None, PromptIndex([]))
    assert audit.counts["unusable"] == 1 and "line 2: it holds the token id" in audit.reasons[0]


def test_columns_that_nothing_reads_are_counted(tmp_path: Path) -> None:
    """Positions that count up are right and not used; those of padding may be anything."""
    row = {
        "input_ids": [0, 5, 6],
        "attention_mask": [0, 1, 1],
        "labels": [-100, 5, 6],
        "position_ids": [1, 0, 1],
        "weight": 2,
    }
    reader = TokensReader(
        write_lines(
            tmp_path / "rows.jsonl", row, {**row, "token_type_ids": [0, 0, 0], "weight": None}
        )
    )
    (audit,) = audit_sources(reader, PLAIN, None, PromptIndex([]))
    names = {"position_ids": 2, "weight": 1, "token_type_ids": 1}
    assert audit.unread == {f"column '{name}' of a row": count for name, count in names.items()}
    assert audit.counts["tokens"] == 4 and parse_tokens(row, "row 1").tokens == [5, 6]
