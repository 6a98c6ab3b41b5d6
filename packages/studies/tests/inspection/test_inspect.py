"""Inspection colours every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrain.config.build import GroupSpec
from spectrain.data.chat import Example, tokenize_conversation
from spectrain.data.chat_template import KINDS
from spectrain.data.messages import Conversation
from spectrain.errors import UserError
from spectrain_studies.inspection.inspect import (
    STYLES,
    format_example,
    format_legend,
    select_conversation,
    token_styles,
)
from tests.data.chat_templates import make_template
from tests.data.rows import THINKING, write_lines


def test_inspection_colours_every_kind() -> None:
    """Each character of an answer has the colour of its kind; what is generated and carries no
    loss is underlined.
    """
    template = make_template("qwen3")
    for train_on in (KINDS, ("content",)):
        for example in tokenize_conversation(template, THINKING, None, train_on):
            text = format_example(example, template.tokenizer)
            assert text.plain == template.tokenizer.decode(example.tokens)
            styles = [""] * len(text.plain)
            for span in text.spans:
                styles[span.start : span.end] = [str(span.style)] * (span.end - span.start)
            expected = {
                "What is a tide?": "dim",
                "The rise and fall": "dim",
                "I look it up.": "cyan",
                "Now I know": "cyan",
                "look_up": "magenta",
                "It is the rise": "green",
            }
            for phrase, style in expected.items():
                if (at := text.plain.find(phrase)) >= 0:
                    is_trained = style in ("dim", "green") or len(train_on) == 3
                    assert set(styles[at : at + len(phrase)]) == {
                        style + " underline" * (not is_trained)
                    }, phrase
    assert all(kind.replace("_", " ") in format_legend().plain for kind in STYLES)


def test_inspection_of_texts_and_tokens() -> None:
    """Without kinds, tokens with loss are shown as content and the others as context."""
    assert token_styles(Example([1, 2, 3], [False, True, True])) == ["dim", "green", "green"]


def test_inspection_takes_the_reader_of_the_source(tmp_path: Path) -> None:
    """Numbers run over all sources, and each conversation has its own source's settings."""
    path = write_lines(tmp_path / "chats.jsonl", {"messages": THINKING})
    sources = [
        {"data": "embedded", "limit": 2},
        {"data": "jsonl", "path": path, "train_on": ["content"]},
    ]
    reader = GroupSpec("data", "mix", {"sources": sources}).build()
    source, conversation = select_conversation(reader, 2)
    assert source.train_on == ["content"] and isinstance(conversation, Conversation)
    assert conversation.messages[0]["content"] == "What is a tide?" and select_conversation(
        reader, 1
    )[0].train_on == list(KINDS)
    with pytest.raises(UserError, match=r"index=3: the data holds 3 conversations; use 0 to 2"):
        select_conversation(reader, 3)
