"""Tokens per forward by kind of token, for drafters that saw all kinds and chat alone.

`python -m lab.benchmarks.token_kinds FOLDER [STEPS]` writes rows of chat, reasoning and tool calls,
trains the tiny target on them with a template that has all three kinds, answers the rows with it,
trains two EAGLE-3 drafters, one on all rows and one on chat alone, and scores both on prompts of
each kind. Everything is made by this script; it takes some minutes of CPU time.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from spectrain.cli.interface import train
from spectrain.data.chat import tokenize_conversation
from spectrain.data.messages import Conversation, parse_conversation
from spectrain.data.readers import load_embedded
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import load_tiny

TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\nTools: ' }}\
{%- for tool in tools %}{{- tool.function.name + ' ' }}\
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}\
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}\
{{- call.function.arguments | tojson }}\
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
CITIES = [
    "Quito",
    "Lima",
    "Oslo",
    "Cairo",
    "Perth",
    "Delhi",
    "Paris",
    "Tokyo",
    "Accra",
    "Sofia",
    "Milan",
    "Seoul",
]
PROMPT_CITIES = [
    "Bern",
    "Lyon",
    "Turin",
    "Osaka",
    "Dakar",
    "Hanoi",
    "Tunis",
    "Porto",
    "Miami",
    "Leeds",
    "Ghent",
    "Split",
]
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy"]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": {}},
    }
]


def reasoning_row(draw: random.Random) -> dict[str, Any]:
    first = draw.randrange(10, 60)
    second = draw.randrange(10, 40)
    tens = (first // 10 + second // 10) * 10
    ones = first % 10 + second % 10
    steps = (
        f"The tens are {tens}. The ones are {ones}. Together {tens} and {ones} make "
        f"{first + second}."
    )
    answer = {
        "role": "assistant",
        "content": f"The sum is {first + second}.",
        "reasoning_content": steps,
    }
    return {"messages": [{"role": "user", "content": f"What is {first} plus {second}?"}, answer]}


def tool_row(draw: random.Random, cities: list[str] = CITIES) -> dict[str, Any]:
    city = draw.choice(cities)
    sky = draw.choice(SKIES)
    degrees = draw.randrange(5, 35)
    call = {"function": {"name": "get_weather", "arguments": {"city": city, "unit": "celsius"}}}
    return {
        "messages": [
            {"role": "user", "content": f"How is the weather in {city}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": f"{sky}, {degrees} degrees", "name": "get_weather"},
            {"role": "assistant", "content": f"In {city} it is {sky} and {degrees} degrees warm."},
        ],
        "tools": TOOLS,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_rows(folder: Path, count: int = 240) -> dict[str, list[dict[str, Any]]]:
    """Write training rows and prompts of every kind, and return the training rows; the prompts
    hold other numbers.
    """
    draw = random.Random(0)
    rows = {
        "chat": [conversation.to_row() for conversation in load_embedded()[:count]],
        "reasoning": [reasoning_row(draw) for _ in range(count)],
        "tool_calls": [tool_row(draw) for _ in range(count)],
    }
    write_rows(folder / "all.jsonl", [row for triple in zip(*rows.values()) for row in triple])
    write_rows(folder / "chat.jsonl", rows["chat"])
    draw = random.Random(1)
    questions = {row["messages"][0]["content"] for row in rows["reasoning"]}
    unseen = [
        row
        for row in (reasoning_row(draw) for _ in range(200))
        if row["messages"][0]["content"] not in questions
    ]
    prompts = [{"messages": row["messages"][:1], "category": "reasoning"} for row in unseen[:12]]
    for _ in range(12):
        row = tool_row(draw, PROMPT_CITIES)
        prompts.append({"messages": row["messages"][:1], "tools": TOOLS, "category": "tool_calls"})
    prompts += [{**row.to_row(), "category": "chat"} for row in load_embedded()[count : count + 12]]
    write_rows(
        folder / "prompts.jsonl",
        [{**prompt, "messages": prompt["messages"][:1]} for prompt in prompts],
    )
    return rows


def train_target(folder: Path, rows: dict[str, list[dict[str, Any]]], steps: int) -> Path:
    """Train the tiny target on all rows and return its directory, with the template inside."""
    target = load_tiny(dtype="float32", device="cpu")
    target.tokenizer.chat_template = TEMPLATE
    conversations: list[Conversation] = [
        parse_conversation(row, "row") for kind in rows.values() for row in kind
    ]
    tokenized = [
        tokenize_conversation(target.template, conversation) for conversation in conversations
    ]
    examples = [
        example.cut(320) for group in tokenized for example in group if any(example.cut(320).mask)
    ]
    model: Any = target.model
    model.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = random.Random(2)
    for step in range(steps):
        batch = draw.sample(examples, 8)
        longest = max(len(example.tokens) for example in batch)
        tokens = torch.tensor(
            [example.tokens + [0] * (longest - len(example.tokens)) for example in batch]
        )
        labels = torch.full_like(tokens, -100)
        for row, example in enumerate(batch):
            labels[row, : len(example.tokens)] = torch.where(
                torch.tensor(example.mask), torch.tensor(example.tokens), -100
            )
        states = target.run(tokens, ForwardPlan(layers=("final",), grad=True)).at_layer("final")
        logits = target.head.logits(states)[:, :-1].float()
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"target step {step}: loss {float(loss):.3f}", flush=True)
    model.eval().requires_grad_(False)
    target.save(folder / "target")
    return folder / "target"


def main(folder: Path, steps: int, drafter_steps: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = make_rows(folder)
    # A target that an earlier call trained is used again.
    target = (
        folder / "target"
        if (folder / "target" / "config.json").exists()
        else train_target(folder, rows, steps)
    )
    results = {}
    for name in ("all", "chat"):
        settings: dict[str, Any] = {
            "target": "hf",
            "target.model": target,
            "target.dtype": "float32",
            "data": "jsonl",
            "data.path": folder / f"{name}.jsonl",
            "trainer.max_steps": drafter_steps,
            "eval.prompts": folder / "prompts.jsonl",
            "eval.max_new_tokens": 48,
            "eval.repeats": 1,
            "eval.name": "kinds",
            "tree": "chain",
        }
        shutil.rmtree(folder / f"run-{name}", ignore_errors=True)
        run = train("eagle3", folder / f"run-{name}", **settings)
        summary = json.loads((run / "eval" / "kinds" / "summary.json").read_text())
        results[name] = {
            key: summary.get(key)
            for key in ("acceptance_length", "by_kind", "by_position", "by_category")
        }
        results[name]["lossless"] = summary["lossless"]
    text = (
        json.dumps({"steps": steps, "drafter_steps": drafter_steps, "results": results}, indent=2)
        + "\n"
    )
    (folder / "result.json").write_text(text)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(word) for word in [*sys.argv[2:], "400", "300"][:2]))
