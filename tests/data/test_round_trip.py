"""Every template end to end on tiny: rows are regenerated, trained on for 20 steps, and the
drafter is scored.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from spectrain.cli.interface import train
from spectrain.data.chat import tokenize_conversation, tokenize_prompt
from spectrain.data.readers import JsonlReader
from spectrain.models.loading import load_tiny
from spectrain.regeneration.regenerate import Regeneration
from spectrain.regeneration.sampling import Sampling
from spectrain.regeneration.writers import EngineWriter
from tests.data.chat_templates import SOURCES, make_template
from tests.data.test_templates import ROWS

FOLDER = Path(__file__).parent / "templates"


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_a_template_end_to_end(name: str, tmp_path: Path) -> None:
    """Training uses the generated ids of every answer; the loss is finite, and drafted output is
    generate's.
    """
    names = [
        "chat",
        "two turns",
        "reasoning",
        *(["tool call"] if make_template(name).renders_tool_calls else []),
    ]
    rows = [ROWS[row] for row in names] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = load_tiny(chat_template=str(FOLDER / f"{name}.jinja"))
    sampling = Sampling(temperature=0.0, max_new_tokens=24)
    out = tmp_path / "regenerated"
    Regeneration().run(
        out, JsonlReader(str(tmp_path / "rows.jsonl")), sampling, EngineWriter(sampling, target)
    )
    conversations = JsonlReader(str(out)).load_conversations()
    assert len(conversations) == len(rows) and all(
        conversation.answer_ids for conversation in conversations
    )
    for conversation in conversations:
        examples = tokenize_conversation(target.template, conversation)
        for index, ids in conversation.answer_ids.items():
            prompt = tokenize_prompt(target.template, conversation.up_to(index))
            learnt = [example.tokens[len(prompt) : len(prompt) + len(ids)] for example in examples]
            assert ids in learnt, (index, target.tokenizer.decode(ids))
    settings: dict[str, Any] = {
        "target": "tiny",
        "target.chat_template": FOLDER / f"{name}.jinja",
        "data": "jsonl",
        "data.path": out,
        "data.held_out": 0,
        "trainer.max_steps": 20,
        "eval.limit": 2,
        "eval.max_new_tokens": 16,
        "eval.repeats": 1,
    }
    run = train("medusa1", tmp_path / "run", **settings)
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses and all(map(math.isfinite, losses))
    summary = json.loads((run / "eval" / "heldout" / "summary.json").read_text())
    assert summary["lossless"]["identical"] == summary["lossless"]["checked"] > 0
    assert summary["setting"]["chat_template"]["sha256"] == target.template.facts()["sha256"]
