"""Loss masks on chat templates in the style of the models people train for: the supervised text
is the assistant's part.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import spectrain
from spectrain.data.chat import Example, render_chat, tokenize_conversation
from spectrain.data.chat_template import ChatTemplate, Message
from spectrain.errors import UserError


@dataclass(frozen=True)
class Style:
    """A chat template, its special tokens, and what ends an assistant turn."""

    template: str
    specials: tuple[str, ...]
    end: str
    before: str = ""  # what the template itself writes between the role and the answer
    after_strip: bool = False  # the special tokens swallow the white space that follows them


STYLES = {
    "llama3": Style(
        "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
        "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if "
        "add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% "
        "endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "qwen3": Style(
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% "
        "set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set content "
        "= m['content'] %}{% set thought = '' %}{% if m['role'] == 'assistant' and '</think>' in "
        "content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') "
        "%}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ "
        "'<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.index0 > "
        "ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ content + "
        "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
        "}}{% endif %}",
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        "<|im_end|>",
    ),
    "mistral": Style(
        "{{ '<s>' }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) "
        "%}{{ raise_exception('Conversation roles must alternate "
        "user/assistant/user/assistant/...') }}{% endif %}{% if m['role'] == 'user' %}{{ '[INST] "
        "' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% "
        "endfor %}",
        ("<s>", "</s>"),
        "</s>",
        before=" ",
    ),
    "gemma": Style(
        "{{ '<bos>' }}{% for m in messages %}"
        "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n'"
        " + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "smollm2": Style(
        "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
        "'<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif "
        "%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}{% "
        "if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "deepseek_r1": Style(
        "{{ '<bos>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + "
        "m['content'] }}{% else %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + "
        "'<eos>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<|Assistant|><think>\n' }}{% endif %}",
        ("<bos>", "<eos>", "<|User|>", "<|Assistant|>", "<think>", "</think>"),
        "<eos>",
    ),
    "phi3": Style(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% "
        "endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        after_strip=True,
    ),
}
ANSWERS = {
    "plain": ("The answer is 4.", "Yes, it is even."),
    "line breaks and indents": (
        "def f(x):\n    return x\n\n\nDone:  two  spaces",
        "- one\n\t- two",
    ),
    "beyond ascii": ("caf\u00e9 \U0001f389 na\u00efve", "\u4e2d\u6587 \u03b1\u03b2"),
    "the question again": ("What is 2 + 2?", "Is it even?"),
    "starts like a tag": ("<table> is a tag", "<think is not a tag"),
}


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        Path(spectrain.__file__).parent / "data" / "tiny"
    )
    return tokenizer


def apply_style(tokenizer: PreTrainedTokenizerBase, style: Style) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer with the template of this style."""
    other = copy.deepcopy(tokenizer)
    tokens: list[Any] = [
        AddedToken(name, rstrip=style.after_strip, special=True) for name in style.specials
    ]
    other.add_special_tokens({"additional_special_tokens": tokens})
    other.chat_template = style.template
    return other


def make_chat(*contents: str) -> list[Message]:
    """Return a conversation of user and assistant in turn."""
    return [
        {"role": "assistant" if n % 2 else "user", "content": text}
        for n, text in enumerate(contents)
    ]


def decode_supervised(tokenizer: Any, example: Example) -> list[str]:
    """Return the text of each run of supervised tokens."""
    runs: list[list[int]] = []
    for n, (token, is_supervised) in enumerate(zip(example.tokens, example.mask)):
        if is_supervised:
            if n == 0 or not example.mask[n - 1]:
                runs.append([])
            runs[-1].append(token)
    return [
        tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for run in runs
    ]


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=list(ANSWERS))
@pytest.mark.parametrize("name", [name for name in STYLES if name != "qwen3"])
def test_supervised_text_is_the_answers_with_their_end_of_turn(
    plain: PreTrainedTokenizerBase, name: str, answers: tuple[str, str]
) -> None:
    """One example holds both turns; its masked tokens are both answers, each with its end of
    turn, and nothing else.
    """
    style = STYLES[name]
    tokenizer = apply_style(plain, style)
    examples = tokenize_conversation(
        ChatTemplate(tokenizer), make_chat("What is 2 + 2?", answers[0], "Is it even?", answers[1])
    )
    assert len(examples) == 1
    assert [text.rstrip("\n") for text in decode_supervised(tokenizer, examples[0])] == [
        style.before + answer + style.end for answer in answers
    ]


@pytest.mark.parametrize("name", STYLES)
def test_tokens_are_the_rendered_conversation(plain: PreTrainedTokenizerBase, name: str) -> None:
    """The tokens of the last example spell what the template renders, so no token is added or
    lost.
    """
    tokenizer: Any = apply_style(plain, STYLES[name])
    messages = make_chat("Hi", "Hello!", "Bye", "See you.")
    example = tokenize_conversation(ChatTemplate(tokenizer), messages)[-1]
    assert (
        example.tokens
        == tokenizer(render_chat(ChatTemplate(tokenizer), messages), add_special_tokens=False)[
            "input_ids"
        ]
    )
    assert len(example.mask) == len(example.tokens)


def test_qwen3_makes_an_example_of_each_turn(plain: PreTrainedTokenizerBase) -> None:
    """Where history drops thoughts, each assistant turn is an example of its own, with its own
    thoughts alone.
    """
    tokenizer: Any = apply_style(plain, STYLES["qwen3"])
    first = "<think>\nTwo and two.\n</think>\n\nIt is 4."
    second = "<think>\n4 = 2 * 2.\n</think>\n\nYes."
    examples = tokenize_conversation(
        ChatTemplate(tokenizer), make_chat("What is 2 + 2?", first, "Is it even?", second)
    )
    assert [decode_supervised(tokenizer, example) for example in examples] == [
        [first + "<|im_end|>"],
        [second + "<|im_end|>"],
    ]
    texts = [tokenizer.decode(example.tokens) for example in examples]
    assert "Is it even?" not in texts[0]
    assert "It is 4." in texts[1] and "Two and two." not in texts[1]


def test_qwen3_single_turn_is_a_single_example(plain: PreTrainedTokenizerBase) -> None:
    """A conversation of one turn keeps its thoughts, and the empty ones that the template writes
    are learnt.
    """
    tokenizer = apply_style(plain, STYLES["qwen3"])
    for content, expected in (
        ("<think>\nEasy.\n</think>\n\nIt is 4.", "<think>\nEasy.\n</think>\n\nIt is 4.<|im_end|>"),
        ("It is 4.", "<think>\n\n</think>\n\nIt is 4.<|im_end|>"),
    ):
        (example,) = tokenize_conversation(
            ChatTemplate(tokenizer), make_chat("What is 2 + 2?", content)
        )
        assert decode_supervised(tokenizer, example) == [expected]


def test_deepseek_r1_trains_on_reasoning_that_its_template_drops(
    plain: PreTrainedTokenizerBase,
) -> None:
    """The model writes its thoughts behind the <think> of the generation prompt, which itself
    carries no loss.
    """
    tokenizer: Any = apply_style(plain, STYLES["deepseek_r1"])
    (example,) = tokenize_conversation(
        ChatTemplate(tokenizer), make_chat("What is 2 + 2?", "<think>\nEasy.\n</think>\n\nIt is 4.")
    )
    assert decode_supervised(tokenizer, example) == ["Easy.\n</think>\n\nIt is 4.<eos>"]
    assert "<|Assistant|><think>\nEasy." in tokenizer.decode(example.tokens)


def test_phi3_end_of_turn_that_swallows_the_line_break_is_supervised(
    plain: PreTrainedTokenizerBase,
) -> None:
    """A special token that takes the following white space into its offsets is still the end of
    the answer.
    """
    tokenizer: Any = apply_style(plain, STYLES["phi3"])
    (example,) = tokenize_conversation(ChatTemplate(tokenizer), make_chat("Hi", "Hello!"))
    supervised = [
        token for token, is_supervised in zip(example.tokens, example.mask) if is_supervised
    ]
    assert supervised[-1] == tokenizer.convert_tokens_to_ids("<|end|>")


def test_trimmed_offsets_keep_white_space_supervised(plain: PreTrainedTokenizerBase) -> None:
    """A tokenizer that reports white space as empty spans supervises the same tokens as one that
    does not.
    """
    style = STYLES["llama3"]
    messages = make_chat("Hi", "Done:  two  spaces")
    tokenizer: Any = apply_style(plain, style)
    expected = tokenize_conversation(ChatTemplate(tokenizer), messages)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert tokenize_conversation(ChatTemplate(tokenizer), messages) == expected


@pytest.mark.parametrize("name", ["llama3", "smollm2", "gemma"])
def test_system_turn_carries_no_loss(plain: PreTrainedTokenizerBase, name: str) -> None:
    """A system turn, given or injected, and a trailing question are context only."""
    tokenizer = apply_style(plain, STYLES[name])
    messages = [{"role": "system", "content": "Be brief."}, *make_chat("Hi", "Hello!", "Bye")]
    (example,) = tokenize_conversation(ChatTemplate(tokenizer), messages)
    assert decode_supervised(tokenizer, example) == ["Hello!" + STYLES[name].end]


@pytest.mark.parametrize("roles", [("user", "user", "assistant"), ("system", "user", "assistant")])
def test_mistral_refuses_roles_that_do_not_alternate(
    plain: PreTrainedTokenizerBase, roles: tuple[str, ...]
) -> None:
    """What the template raises becomes one sentence that names the roles and the template's
    reason.
    """
    messages = [{"role": role, "content": "text"} for role in roles]
    with pytest.raises(UserError, match=rf"{', '.join(roles)}.*must alternate"):
        tokenize_conversation(ChatTemplate(apply_style(plain, STYLES["mistral"])), messages)


@pytest.mark.parametrize(
    "template, reason",
    [
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% "
            "endfor %}",
            "no token",
        ),
        ("{% if false %}{% endif %}", "no token"),
        (
            "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}{% endif "
            "%}{% endfor %}",
            "every token",
        ),
    ],
    ids=["answers left out", "nothing rendered", "questions left out"],
)
def test_masks_of_zeros_or_of_ones_stop(
    plain: PreTrainedTokenizerBase, template: str, reason: str
) -> None:
    """A mask without a supervised token, or with no other, means a wrong template."""
    with pytest.raises(UserError, match=reason):
        tokenize_conversation(
            ChatTemplate(apply_style(plain, Style(template, (), ""))), make_chat("Hi", "Hello!")
        )


def test_tokenizer_without_template_or_offsets_is_refused(plain: PreTrainedTokenizerBase) -> None:
    """Both are named as the target's fault, with what to do."""
    without_template = copy.deepcopy(plain)
    without_template.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        tokenize_conversation(ChatTemplate(without_template), make_chat("Hi", "Hello!"))
    slow: Any = SimpleNamespace(chat_template="{{ messages }}", is_fast=False)
    with pytest.raises(UserError, match="fast tokenizer"):
        tokenize_conversation(ChatTemplate(slow), make_chat("Hi", "Hello!"))
