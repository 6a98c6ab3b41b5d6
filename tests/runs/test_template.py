"""The chat template of a run: a file and arguments apply everywhere, are saved with the drafter,
and a change is said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spectrain.cli.interface import train
from spectrain.config.spec import RunSpec
from spectrain.data.chat import render_chat
from spectrain.errors import UserError
from spectrain.models.loading import load_tiny
from spectrain.runs.defaults import read_template_arguments
from spectrain.runs.drafters import load_facts
from spectrain.runs.score import describe_template

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + "
    "('<think>' if enable_thinking else '') }}{% endif %}"
)


def test_a_file_replaces_the_template_and_arguments_reach_it(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    target = load_tiny(chat_template=str(path), template_kwargs={"enable_thinking": True})
    assert render_chat(target.template, [{"role": "user", "content": "Hi"}], True).endswith(
        "<|im_start|>assistant\n<think>"
    )


@pytest.mark.parametrize(
    "content, sentence", [(None, "it cannot be read"), ("{% if", "line 1 is no Jinja")]
)
def test_a_file_that_is_no_template_is_refused(
    tmp_path: Path, content: str | None, sentence: str
) -> None:
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=rf"target\.chat_template=.*{sentence}"):
        load_tiny(chat_template=str(path))


def test_arguments_are_saved_with_the_drafter(tmp_path: Path) -> None:
    """data.template_kwargs becomes the target's, stands in config.json with the template's hash,
    and is read back.
    """
    settings: dict[str, Any] = {
        "target": "tiny",
        "data.limit": 8,
        "trainer.max_steps": 1,
        "eval": "none",
        "data.template_kwargs": "{enable_thinking: true}",
    }
    run = train("medusa1", tmp_path / "run", **settings)
    facts = load_facts(run, "chat_template")
    assert facts == json.loads((run / "drafter" / "config.json").read_text())["chat_template"]
    assert facts is not None and facts["arguments"] == {"enable_thinking": True}
    assert RunSpec.load(run / "config.yaml").target.settings.get("template_kwargs") == {
        "enable_thinking": True
    }
    target = load_tiny(template_kwargs={"enable_thinking": True})
    assert target.template.facts() == facts and load_tiny().template.facts() != facts
    assert describe_template(facts).endswith("and enable_thinking=True")


def test_a_score_takes_arguments_of_the_template_and_no_data() -> None:
    assert read_template_arguments({"template_kwargs": {"enable_thinking": False}}) == {
        "enable_thinking": False
    }
    with pytest.raises(UserError, match=r"data\.limit: a score and a chat read no data"):
        read_template_arguments({"limit": 3})
