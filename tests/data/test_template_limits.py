"""Chat templates: rows cannot choose them, foreign ones end within limits, and
valid ones render as before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from spectrain.data import template_limits
from spectrain.data.chat_template import PROBE_CALL, PROBE_TOOL, ChatTemplate
from spectrain.data.messages import Conversation, parse_conversation
from spectrain.data.template_arguments import check_template_arguments, reserved_names
from spectrain.errors import UserError
from spectrain.eval.prompts import read_prompts
from spectrain.models.target import Target
from tests.data.chat_templates import SOURCES, make_tokenizer

MESSAGES = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello to you too."},
]
NAMES = (
    "chat_template",
    "tokenize",
    "return_dict",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "messages",
    "documents",
    "conversation",
    "return_assistant_tokens_mask",
    "bos_token",
    "eos_token",
    "raise_exception",
    "strftime_now",
)

HOSTILE = {
    "nested ranges": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    ),
    "nested lists": (
        "{% set l = range(9999)|list %}{% for i in l %}{% for j in l %}{% endfor %}{% endfor %}"
    ),
    "recursive loop": "{% for x in [1] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "branching macro": (
        "{% macro f(n) %}{% if n %}{% set a = f(n-1) %}{% set b = f(n-1) %}{% endif %}{% "
        "endmacro %}{{ f(60) }}"
    ),
    "product": "{{ 'a' * 20000000000 }}",
    "list product": "{{ [1] * 20000000000 }}",
    "power": "{{ 9 ** 99999999 }}",
    "squares": (
        "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% "
        "endfor %}{{ ns.x }}"
    ),
    "doubled sum": (
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s "
        "%}{% endfor %}"
    ),
    "doubled join": (
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s "
        "%}{% endfor %}"
    ),
    "doubled block": (
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set x %}{{ ns.s }}{{ ns.s "
        "}}{% endset %}{% set ns.s = x %}{% endfor %}"
    ),
    "shared lists": (
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] "
        "%}{% endfor %}{{ ns.s }}"
    ),
    "shared dicts": (
        "{% set ns = namespace(s=1) %}{% for i in range(60) %}{% set ns.s = {1: ns.s, 2: "
        "ns.s} %}{% endfor %}{{ ns.s|tojson }}"
    ),
    "shared varargs": (
        "{% macro f(n) %}{% if n %}{{ f(n-1, varargs, varargs) }}{% else %}{{ {varargs: 1} "
        "}}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "printf": "{{ '%20000000000d' % 1 }}",
    "printf with an argument": "{{ '%*d'|format(20000000000, 1) }}",
    "format": "{{ '{:>20000000000}'.format(1) }}",
    "format with an argument": "{{ '{:{}}'.format(1, 20000000000) }}",
    "format map": "{{ '{a:>20000000000}'.format_map({'a': 1}) }}",
    "center": "{{ 'a'|center(20000000000) }}",
    "filter block": "{% filter center(20000000000) %}x{% endfilter %}",
    "ljust": "{{ 'a'.ljust(20000000000) }}",
    "indent": "{{ 'a\n'|indent(20000000000) }}",
    "indented json": "{{ messages|tojson(indent=20000000000) }}",
    "batch": "{{ [1]|batch(20000000000, 'x')|list }}",
    "bytes": "{{ (1).to_bytes(20000000000, 'big') }}",
    "replace": "{{ ('a' * 50000).replace('', 'b' * 50000) }}",
    "replace filter": "{{ ('a' * 50000)|replace('a', 'b' * 50000) }}",
    "join": "{{ ('a' * 50000).join('a' * 50000) }}",
    "translate": "{{ ('a' * 50000).translate({97: 'b' * 50000}) }}",
    "lorem ipsum": "{{ lipsum(n=20000000000) }}",
    "strip tags": "{{ ('<!--' * 200000)|striptags }}",
    "long output": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "long literal": "{% set x %}{% for i in range(9999) %}"
    + "x" * 9999
    + "{% endfor %}{% endset %}",
    "source": "x" * 2_000_000,
}
"""Templates of a stranger that run without end, or that take gigabytes."""


UNSTABLE = {
    "random filter": ("{{ ['a', 'b']|random }}", "random"),
    "random text": ("{{ lipsum(n=1) }}", "lorem_ipsum"),
    "random part": ("{% set x = ([1, 2]|random) ~ 'a' %}{{ x }}", "random"),
    "generator": ("{{ messages|map(attribute='role') }}", "generator"),
    "generator in a list": ("{{ [messages|map('upper')] }}", "generator"),
    "generator in a text": ("{{ 'a' ~ (messages|map('upper')) }}", "generator"),
    "generator in a format": ("{{ '%s'|format(messages|map('upper')) }}", "generator"),
    "method": ("{{ 'a'.upper }}", "method"),
    "object": ("{{ cycler('a') }}", "Cycler"),
}
"""Templates whose text differs from process to process, and what the sentence names."""


@pytest.mark.parametrize("name", NAMES)
def test_a_row_names_no_argument_of_the_renderer(name: str, tmp_path: Path, tiny: Target) -> None:
    row = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": True, name: "x"}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x"}) + "\n" + json.dumps(row) + "\n")
    readers: list[tuple[str, Callable[[], object]]] = [
        ("rows.jsonl:7", lambda: parse_conversation(row, "rows.jsonl:7")),
        (r".*rows\.jsonl, line 2", lambda: read_prompts(str(path), None, None)),
        ("template_kwargs", lambda: ChatTemplate(tiny.tokenizer, row["chat_template_kwargs"])),
        ("template_kwargs", lambda: tiny.template.with_arguments(row["chat_template_kwargs"])),
        ("data", lambda: tiny.template.render(MESSAGES, arguments=row["chat_template_kwargs"])),
    ]
    for location, read in readers:
        with pytest.raises(
            UserError,
            match=rf"^{location}: chat_template_kwargs\.{name} is an argument of the renderer",
        ):
            read()


def test_variables_of_a_template_stay_allowed() -> None:
    arguments = {"enable_thinking": False, "date_string": "today"}
    assert (
        check_template_arguments(arguments, "x") == arguments
        and check_template_arguments(None, "x") == {}
    )
    assert set(NAMES) <= reserved_names() and not reserved_names() & arguments.keys()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_one_sentence(
    name: str, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are those of a rendering, but for fewer steps, so that the test is quick."""
    monkeypatch.setattr(template_limits, "BASE_STEPS", 100_000)
    monkeypatch.setattr(template_limits, "BASE_SIZE", 100_000)
    monkeypatch.setattr(tiny.tokenizer, "chat_template", HOSTILE[name])
    with pytest.raises(
        UserError, match=r"^(target|data): .*; (use another model|mend or drop it)"
    ) as caught:
        ChatTemplate(tiny.tokenizer).render(MESSAGES)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", UNSTABLE)
def test_a_template_whose_text_differs_by_process_is_refused(
    name: str, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, word = UNSTABLE[name]
    monkeypatch.setattr(tiny.tokenizer, "chat_template", source)
    with pytest.raises(UserError, match=rf"^target: its chat template .*{word}.* in every process"):
        ChatTemplate(tiny.tokenizer).render(MESSAGES)


def test_an_address_in_a_text_is_only_text(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation about a traceback is rendered as it is."""
    text = "<generator object f at 0x7f00>"
    monkeypatch.setattr(tiny.tokenizer, "chat_template", "{{ '' ~ messages[0].content }}")
    assert ChatTemplate(tiny.tokenizer).render([{"role": "user", "content": text}]) == text


@pytest.mark.parametrize("name", SOURCES)
def test_templates_of_families_render_as_without_limits(name: str) -> None:
    """The text and the spans are those of `transformers` for every family, with tools, reasoning
    and many turns.
    """
    call = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm",
        "tool_calls": [PROBE_CALL],
    }
    result = {
        "role": "tool",
        "name": "probe_tool",
        "tool_call_id": "probe0001",
        "content": '{"x": [1, "é<b>"]}',
    }
    conversations: list[tuple[list[Any], Any]] = [
        (MESSAGES, None),
        ([{"role": "system", "content": "Be brief."}, *MESSAGES * 30], None),
        ([MESSAGES[0], call, result, MESSAGES[1]], [PROBE_TOOL]),
    ]
    tokenizer = make_tokenizer(name)
    for messages, tools in conversations:
        for opens in (False, True):
            texts = []
            for compile_template in (
                template_limits._compile_unlimited,
                template_limits.compile_limited,
            ):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(chat_template_utils, "_compile_jinja_template", compile_template)
                    try:
                        text: Any = tokenizer.apply_chat_template(
                            messages,
                            tools=tools,
                            tokenize=False,
                            add_generation_prompt=opens,
                            date_string="today",
                        )
                    except Exception as error:
                        text = f"{type(error).__name__}: {error}"
                    texts.append(text)
            assert texts[0] == texts[1]


def test_forms_of_jinja_render_as_without_limits() -> None:
    """Loops with length and filters, slices, comparisons, formats, macros and marks of
    generation keep their meaning.
    """
    source = (
        "{% for m in messages if m.role != 'x' %}{{ loop.index }}/{{ loop.length }}{{ loop.last "
        "}}{{ loop.changed(m.role) }}{% if 1 <= loop.index < 3 and m.role in ('user', 'tool') "
        "%}{{ m.content[1:4] ~ m['content'][::-1] ~ 3 }}{% else %}{% generation %}{{ "
        "'%-5s|%05.1f' % (m.role, 2.5) }}{% endgeneration %}{% endif %}{% endfor %}{% for k, v in "
        "{'a': 1, 'b': [1, 2]}.items() recursive %}{{ k }}{{ v }}{% else %}none{% endfor %}{% "
        "macro f(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call f(2 ** 5) %}{{ "
        "'{:>6}'.format('é') }}{% endcall %}{{ [1, 2, 3]|map('string')|join(', ') }}{{ "
        "messages|tojson(indent=2) }}{{ 'a,b'.split(',')|last|upper }}{{ "
        "messages|selectattr('role', 'equalto', 'user')|list|length }}{{ none is none }}{{ x is "
        "defined }}{% for i in [] %}{% else %}empty{% endfor %}{{ dict(a=1)|items|list }}{{ 7 // "
        "2 * 3 - 1 }}{{ 'x' * 3 }}{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ "
        "i }}{% endfor %}{{ '<&' }}{{ {(1, 2): 3}[(1, 2)] }}"
    )
    rendered = []
    for compile_template in (template_limits._compile_unlimited, template_limits.compile_limited):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chat_template_utils, "_compile_jinja_template", compile_template)
            rendered.append(
                chat_template_utils.render_jinja_template(
                    [MESSAGES], chat_template=source, return_assistant_tokens_mask=True
                )
            )
    assert rendered[0] == rendered[1] and rendered[0][1][0]


def test_a_conversation_of_a_thousand_turns_renders() -> None:
    messages = [
        {"role": role, "content": "word " * 20}
        for _ in range(500)
        for role in ("user", "assistant")
    ]
    template = ChatTemplate(make_tokenizer("qwen3"))
    assert template.render(messages).count("<|im_end|>") == 1000
    assert Conversation(messages).messages == messages
