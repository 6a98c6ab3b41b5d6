"""Prompts as plain text, and prompts with tools, reasoning and arguments: all of a row reaches
the target.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from spectrain.data.chat import render_chat, tokenize_prompt
from spectrain.data.chat_template import ChatTemplate
from spectrain.errors import UserError
from spectrain.eval.prompts import TurnAnswer, read_prompts
from spectrain.eval.run import Evaluation, load_calibration_prompts
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from tests.data.chat_templates import make_template
from tests.eval.test_kinds import CALL, TOOL, score_prompts
from tests.eval.test_prompts import catch_refusal, write_lines

USED = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": "Where are bees?"},
    {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "In the hive."},
]


@pytest.fixture
def base(shallow: Target) -> Target:
    """The shallow target without a chat template."""
    target = copy.copy(shallow)
    target.tokenizer = copy.deepcopy(shallow.tokenizer)
    target.tokenizer.chat_template = None
    target.template = ChatTemplate(target.tokenizer)
    return target


def test_plain_text_is_continued_without_a_template(base: Target, tmp_path: Path) -> None:
    """Outputs are those of transformers' generate after the text's own tokens; later turns
    follow the answers so far.
    """
    rows: list[dict[str, Any]] = [
        {"text": "one two three one two"},
        {"prompt": "The bee said"},
        {"turns": ["A bear", "and a fox"]},
    ]
    summary = score_prompts(base, tmp_path / "plain", rows, baselines=("generate", "ngram"))
    lines = [
        json.loads(line)
        for line in (tmp_path / "plain" / "out" / "samples.jsonl").read_text().splitlines()
    ]

    def encode(text):
        return list(base.tokenizer(text)["input_ids"])

    decode = base.tokenizer.decode
    answer = decode([token for token in lines[2]["output_tokens"] if token not in base.stop_ids])
    texts = [
        *(next(iter(row.values())) for row in rows[:2]),
        "A bear",
        f"A bear{answer}\n\nand a fox",
    ]
    assert [line["prompt_tokens"] for line in lines] == [encode(text) for text in texts]
    with reference_model(base) as model:
        for line in lines:
            assert line["output_tokens"] == generate(
                model, line["prompt_tokens"], 12, base.stop_ids
            )
    assert summary["lossless"]["identical"] == summary["lossless"]["checked"] == 4
    assert summary["transformers"]["generate"]["checked"] == 4 and list(summary["by_kind"]) == [
        "content"
    ]


def test_trees_are_calibrated_without_a_template(base: Target, tmp_path: Path) -> None:
    """The conversations that ship are plain text to a target without a chat template."""
    prompts = load_calibration_prompts(Evaluation(calibration_limit=2), base)
    assert len(prompts) == 2 and all(prompts)


def test_messages_need_a_template(base: Target, tmp_path: Path) -> None:
    """Roles cannot be continued as plain text."""
    (prompt,) = read_prompts(write_lines(tmp_path, {"messages": USED, "tools": [TOOL]})).prompts
    with pytest.raises(UserError, match="no chat template"):
        prompt.tokenize_for(base)


def test_a_text_stays_plain_for_a_chat_model(shallow: Target, tmp_path: Path) -> None:
    """Only {"text": ..} is continued where there is a template; {"prompt": ..} is a question."""
    text, question = read_prompts(
        write_lines(tmp_path, {"text": " def f(x):\n"}, {"prompt": "Hi"})
    ).prompts
    assert text.tokenize_for(shallow) == list(shallow.tokenizer(" def f(x):\n")["input_ids"])
    assert question.tokenize_for(shallow) == tokenize_prompt(
        shallow.template, [{"role": "user", "content": "Hi"}]
    )
    assert text.questions == [" def f(x):\n"] and text.num_answers == 1


@pytest.mark.parametrize("name", ["qwen3", "llama31", "glm45", "kimi_k2", "deepseek_v31"])
def test_tools_and_results_reach_the_template(tmp_path: Path, name: str) -> None:
    """A prompt that ends with a tool's result renders as the template renders the same
    conversation.
    """
    row = {"messages": USED, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    (prompt,) = read_prompts(write_lines(tmp_path, row)).prompts
    template = make_template(name)
    rendered = template.render(USED, [TOOL], None, {"enable_thinking": False}, for_generation=True)
    assert render_chat(template, prompt.opening_conversation, for_generation=True) == rendered
    assert "find" in rendered and "In the hive." in rendered
    assert (prompt.turns, prompt.num_answers, prompt.questions) == ([], 1, ["Where are bees?"])


def test_tools_stay_with_later_turns(tmp_path: Path) -> None:
    """Every turn is rendered with the tools and arguments of the row, and its prompt has the
    generated tokens of answers.
    """
    row = {
        "turns": ["Hi", "And?"],
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    (prompt,) = read_prompts(write_lines(tmp_path, row)).prompts
    template = make_template("llama31")
    tokens = [
        token
        for word in ("H", "e", "l", "l", "o")
        for token in template.tokenizer(word)["input_ids"]
    ]
    later = prompt.continue_with([TurnAnswer("Hello", tokens)])
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
    ]
    assert (later.messages, later.tools, later.template_arguments) == (
        messages,
        [TOOL],
        {"enable_thinking": False},
    )
    prompt_ids = tokenize_prompt(template, later)
    assert any(prompt_ids[at : at + len(tokens)] == tokens for at in range(len(prompt_ids)))


def test_what_nothing_reads_is_counted(shallow: Target, tmp_path: Path) -> None:
    """Keys of messages that nothing reads, and what the chat template does not render, stand in
    the summary.
    """
    messages = [
        {"role": "system", "content": "Be short.", "weight": 1},
        {"role": "user", "content": "Hi"},
    ]
    rows = [
        {"messages": messages, "tools": [TOOL], "chat_template_kwargs": {"depth": 1}},
        {"prompt": "Hi"},
    ]
    path = write_lines(tmp_path, *rows)
    assert read_prompts(path).skipped == {"key 'weight' of a message": 1}
    evaluation = Evaluation(prompts=path)
    for _ in range(2):  # a comparison checks the prompts for each recipe
        evaluation.check_prompts(shallow)
    assert evaluation.skipped == {
        "key 'weight' of a message": 1,
        "tools of a row, which the chat template does not render": 1,
        "template argument 'depth' of a row, which the chat template does not read": 1,
    }


@pytest.mark.parametrize(
    "row, words",
    [
        ({"messages": USED[:2] + USED[3:]}, "answers no call before it"),
        (
            {"messages": [{"role": "critic", "content": "Hi"}]},
            "message 1: it has an unknown role ('critic')",
        ),
        ({"prompt": "Hi", "tools": "{"}, "tools hold no valid JSON"),
        ({"prompt": "Hi", "documents": [1]}, "documents is no list of objects"),
        ({"prompt": "Hi", "chat_template_kwargs": [1]}, "chat_template_kwargs is no object"),
        ({"text": "Hi", "tools": [TOOL]}, "a plain text takes no tools"),
        ({"text": 3}, "it holds no prompt"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(
    tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    """One sentence names the line."""
    path = write_lines(tmp_path, {"prompt": "fine"}, row)
    assert f"{path}, line 2: " in catch_refusal(path) and words in catch_refusal(path)


def test_empty_texts_are_counted(tmp_path: Path) -> None:
    """Empty texts are counted as empty turns are."""
    read = read_prompts(write_lines(tmp_path, {"text": "a"}, {"text": " \n"}))
    assert len(read.prompts) == 1 and read.skipped == {"empty": 1}
