"""Acceptance by kind of token and by position: every counted token belongs to one kind and one
range.
"""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from spectrain.data.chat import KIND_CODES, token_kinds, tokenize_conversation
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.messages import Conversation
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.drafters.ngram import Ngram
from spectrain.eval.columns import KIND_COLUMNS, tracked_values
from spectrain.eval.kinds import TEXT_POSITIONS, kind_runs, opening_kind, position_range
from spectrain.eval.metrics import (
    Turn,
    acceptance_interval,
    group_rounds,
)
from spectrain.eval.page import write_report
from spectrain.eval.report import print_table
from spectrain.eval.run import Evaluation
from spectrain.models.target import Target
from spectrain.output.verbosity import command_output
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain
from tests.data.chat_templates import SOURCES, make_template

FUNCTION = {
    "name": "find",
    "description": "Find.",
    "parameters": {"type": "object", "properties": {}},
}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "find", "arguments": {"of": "bees"}},
}
QUESTION = Conversation([{"role": "user", "content": "Why?"}])
ANSWER = (
    "<think>\nBees \U0001f41d\U0001f41d dance.\n</think>\n\nA waggle \u4e2d\u6587.\n"
    '<tool_call>\n{"name": "find", "arguments": {"of": "bees"}}\n</tool_call><|im_end|>'
)


def encode_text(template: ChatTemplate, text: str) -> list[int]:
    return list(template.tokenizer(text, add_special_tokens=False)["input_ids"])


def make_turn(template: ChatTemplate, text: str, lengths: dict[str, int]) -> Turn:
    """Return a turn whose rounds have the length of the kind of their first token; the last
    round may be cut.
    """
    output = encode_text(template, text)
    kinds = token_kinds(template, output, opening_kind(template, QUESTION))
    rounds: list[int] = []
    while 1 + sum(rounds) < len(output):
        rounds.append(lengths[kinds[1 + sum(rounds)]])
    drafted = Generation([1], output, round_lengths=rounds, is_cut=1 + sum(rounds) > len(output))
    return Turn("a", 0, "all", drafted, drafted, opening_kind(template, QUESTION))


def test_the_markers_separate_the_kinds() -> None:
    """Tokens of one kind join to the text of that kind, although characters of several tokens
    stand before the markers.
    """
    template = make_template("qwen3")
    output = encode_text(template, ANSWER)
    kinds = token_kinds(template, output, opening_kind(template, QUESTION))
    texts = {
        kind: template.tokenizer.decode(
            [token for token, other in zip(output, kinds) if other == kind]
        )
        for kind in kinds
    }
    assert [run["kind"] for run in kind_runs(kinds)] == ["reasoning", "content", "tool_calls"]
    assert sum(run["tokens"] for run in kind_runs(kinds)) == len(output)
    assert texts["reasoning"].strip() == ANSWER[: ANSWER.index("</think>") + 8]
    assert texts["content"].strip() == "A waggle \u4e2d\u6587."
    assert texts["tool_calls"] == ANSWER[ANSWER.index("<tool_call>") :]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_template_counts_each_token_once(name: str) -> None:
    """Rounds and tokens by kind and by position add up to those of the acceptance length,
    whatever the template.
    """
    template = make_template(name)
    turns = [
        make_turn(template, text, {"reasoning": 2, "content": 3, "tool_calls": 4})
        for text in (ANSWER, "Hi. " * 300)
    ]
    rounds = [length for turn in turns for length in turn.drafted.complete_round_lengths]
    groupings = group_rounds(turns, template)
    assert list(groupings) == ["by_kind", "by_position", "by_text_position", "by_turn"]
    for groups in groupings.values():
        assert sum(group.tokens for group in groups.values()) == sum(rounds)
        assert sum(group.rounds for group in groups.values()) == len(rounds)
        for group in groups.values():
            assert group.acceptance_length == pytest.approx(group.tokens / group.rounds, abs=1e-4)


def test_a_drafter_of_content_gives_a_token_per_forward_of_reasoning() -> None:
    """Rounds belong to the kind of their first token; the acceptance of one kind does not change
    that of another.
    """
    template = make_template("qwen3")
    turn = make_turn(template, ANSWER, {"reasoning": 1, "content": 3, "tool_calls": 1})
    groups = group_rounds([turn], template)["by_kind"]
    assert list(groups) == ["content", "reasoning", "tool_calls"]
    assert groups["reasoning"].acceptance_length == groups["tool_calls"].acceptance_length == 1.0
    assert groups["content"].acceptance_length == 3.0


def test_a_generation_prompt_opens_the_reasoning() -> None:
    """A template that writes <think> itself makes the answer begin with reasoning; plain text
    begins with content.
    """
    opening = make_template("deepseek_r1")
    assert opening_kind(opening, QUESTION) == "reasoning"
    assert (
        opening_kind(make_template("qwen3"), QUESTION)
        == opening_kind(opening, Conversation([], text="<think>"))
        == "content"
    )
    kinds = token_kinds(opening, encode_text(opening, "So.\n</think>\n\nYes."), "reasoning")
    assert (kinds[0], kinds[-1]) == ("reasoning", "content")


@pytest.mark.parametrize(
    "position, name",
    [
        (1, "0-256"),
        (255, "0-256"),
        (256, "256-1k"),
        (1023, "256-1k"),
        (1024, "1k-4k"),
        (4096, "4k+"),
    ],
)
def test_positions_have_ranges(position: int, name: str) -> None:
    assert position_range(position) == name


@pytest.mark.parametrize(
    "length, name",
    [(1, "0-1k"), (1022, "0-1k"), (1023, "1k-2k"), (4096, "4k-8k"), (40_000, "32k+")],
)
def test_a_text_position_includes_the_prompt(length: int, name: str) -> None:
    """The first round begins after the prompt and the prefill's token; a prompt of unknown
    length has no position.
    """
    turns = [
        Turn(str(n), 0, "all", answer, answer)
        for n, size in enumerate((2, 3))
        for answer in [make_answer(length, size)]
    ]
    (group,) = group_rounds(turns)["by_text_position"].items()
    assert group[0] == name and (group[1].acceptance_length, group[1].rounds, group[1].tokens) == (
        2.5,
        2,
        5,
    )
    assert group[1].ci95 == acceptance_interval(turns)
    unknown = make_answer(0, 2)
    assert group_rounds([Turn("a", 0, "all", unknown, unknown)])["by_text_position"] == {}
    assert position_range(4095, TEXT_POSITIONS) == "2k-4k"


def make_answer(prompt_length: int, round_length: int) -> Generation:
    """Return an answer of one round to a prompt of this length."""
    return Generation([1] * prompt_length, [1] * (1 + round_length), round_lengths=[round_length])


def test_scoring_writes_kinds_and_positions(
    shallow: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the template opens the reasoning and the target never ends it, all tokens are
    reasoning, in table, page and files; a plain chat has content alone, and nothing is printed
    about it."""
    thinking = copy.copy(shallow)
    thinking.tokenizer = copy.deepcopy(shallow.tokenizer)
    thinking.tokenizer.chat_template = str(SOURCES["deepseek_r1"])
    thinking.template = ChatTemplate(thinking.tokenizer)
    for target, kind in ((thinking, "reasoning"), (shallow, "content")):
        with command_output("notes"):
            summary = score_prompts(
                target, tmp_path / kind, [{"prompt": "one two three one two three one"}]
            )
        counted = sum(count * length for length, count in enumerate(summary["tokens_by_round"], 1))
        assert {name: group["tokens"] for name, group in summary["by_kind"].items()} == {
            kind: counted
        }
        assert {name: group["tokens"] for name, group in summary["by_position"].items()} == {
            "0-256": counted
        }
        assert (
            summary["by_kind"][kind]["acceptance_length"] == summary["acceptance_length"]["pooled"]
        )
        (line,) = map(
            json.loads, (tmp_path / kind / "out" / "samples.jsonl").read_text().splitlines()
        )
        assert line["kinds"] == [{"kind": kind, "tokens": len(line["output_tokens"])}]
        printed = capsys.readouterr().out
        page = (tmp_path / kind / "out" / "report.html").read_text()
        assert ("by kind of token: reasoning" in printed.replace("\n", " ")) == (
            kind == "reasoning"
        )
        assert ("By kind of token" in page) == (kind == "reasoning")
        assert (f"acceptance_of/{kind}" in tracked_values(summary)) == (kind == "reasoning")


def score_prompts(
    target: Target, folder: Path, rows: list[dict[str, Any]], **settings: Any
) -> dict[str, Any]:
    folder.mkdir()
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = Evaluation(
        prompts=str(file),
        max_new_tokens=12,
        repeats=1,
        measured=False,
        **{"baselines": (), "oracle": False, **settings},
    )
    setting = {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"}
    return evaluation.score(
        Candidate(target, Ngram(target), Chain(3), Greedy(), setting), folder / "out"
    )


def test_kinds_stand_in_the_table_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind and range that occurs is printed once with its tokens per forward."""
    from tests.eval.test_report import make_entry

    template = make_template("qwen3")
    turns = [
        make_turn(template, text, {"reasoning": 2, "content": 3, "tool_calls": 4})
        for text in (ANSWER, "Hi. " * 300)
    ]
    groups = group_rounds(turns, template)
    numbers = {
        key: {name: asdict(group) for name, group in groups[key].items()}
        for key in ("by_kind", "by_position")
    }
    setting = {
        "recipe": "eagle3",
        "target": "tiny",
        "prompts": 1,
        "max_new_tokens": 9,
        "batch_size": 1,
        "device": "cpu",
        "dtype": "float32",
        "drafter": {},
    }
    summary = {
        **make_entry("drafter"),
        "compared": {},
        "setting": setting,
        "time_share": {},
        "acceptance_by_depth": [],
        **numbers,
    }
    with command_output("notes"):
        print_table(summary)
    printed = capsys.readouterr().out.replace("\n", " ")
    lengths = ", ".join(f"{column.title} {column.cell(summary)}" for column in KIND_COLUMNS)
    assert (
        f"by kind of token: {lengths}." in printed
        and "by position in the answer, in tokens: 0-256 " in printed
    )
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    write_report(tmp_path / "report.html", [tmp_path])
    page = (tmp_path / "report.html").read_text()
    assert all(
        f">{title}</th>" in page
        for title in ("reasoning", "content", "tool calls", "0-256", "256-1k")
    )


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_scoring_and_training_agree_on_the_kinds(name: str) -> None:
    """The kinds of an answer's tokens in scoring are those that loss masks have for the same
    tokens in training.
    """
    template = make_template(name)
    question = {"role": "user", "content": "Where are bees?"}
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": "In the hive."},
        {"role": "assistant", "content": "In the hive.", "reasoning_content": "I know."},
    ]
    if template.renders_tool_calls:
        answers.append({"role": "assistant", "content": None, "tool_calls": [CALL]})
    for answer in answers:
        conversation = Conversation([question, answer], [TOOL] if "tool_calls" in answer else None)
        (example,) = tokenize_conversation(template, conversation)
        begin = len(example.prompt)
        output = [
            token for token, counts in zip(example.tokens[begin:], example.mask[begin:]) if counts
        ]
        first = opening_kind(template, conversation.up_to(1))
        if first == "reasoning" and "reasoning_content" not in answer:
            # Training on such a row begins without the reasoning that the generation prompt opens.
            continue
        scored = token_kinds(template, output, first)
        assert [KIND_CODES[kind] for kind in scored] == [code for code in example.kinds if code], (
            answer
        )
