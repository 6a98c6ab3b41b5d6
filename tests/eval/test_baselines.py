"""The baselines of a drafter: itself with measured trees and with retrieval, and retrieval
alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrain.data.chat import tokenize_prompt
from spectrain.data.datastore import Datastore, hash_vocabulary, write_store
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.early_exit import EarlyExit
from spectrain.errors import UserError
from spectrain.eval.columns import choose_fastest, list_systems
from spectrain.eval.run import Evaluation
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Auto, Chain, Eagle2

SETTING = {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"}
LIMIT = 24
QUESTIONS = ("What is a kite made of?", "Why do bees dance?")
MakeStore = Callable[..., Datastore]


@pytest.fixture
def make_store(shallow: Target, tmp_path: Path) -> MakeStore:
    """Makes stores of given texts, asked by given questions."""

    def write_datastore(texts: list[list[int]], *questions: str) -> Datastore:
        folder = tmp_path / f"store{len(list(tmp_path.iterdir()))}"
        write_store(folder, texts, questions, [], {"tokenizer": hash_vocabulary(shallow.tokenizer)})
        return Datastore(str(folder), shallow.tokenizer)

    return write_datastore


def score_early_exit(
    target: Target, folder: Path, own: Datastore | None, **options: Any
) -> dict[str, Any]:
    """Score an early exit on two short prompts with its baselines; `own` is the datastore of the
    run's training data.
    """
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    settings: dict[str, Any] = {
        "baselines": ("auto", "copies", "retrieval"),
        "calibration": str(file),
        **options,
    }
    evaluation = Evaluation(
        prompts=str(file), max_new_tokens=LIMIT, oracle=False, report=False, repeats=1, **settings
    )
    candidate = Candidate(
        target, EarlyExit(target, 1), Eagle2(3, 8, 2), Greedy(), {**SETTING}, open_store=lambda: own
    )
    return evaluation.score(candidate, folder / "out")


def decode_answers(target: Target) -> list[list[int]]:
    prompts = [
        tokenize_prompt(target.template, [{"role": "user", "content": text}]) for text in QUESTIONS
    ]
    return [generation.output for generation in decode(target, prompts, Greedy(), LIMIT)]


def test_copies_and_measured_trees_are_shown(
    shallow: Target, tmp_path: Path, make_store: MakeStore
) -> None:
    """Each row is the target's own output, the one with retrieval first; the setting names the
    store; measured trees stay in their budget."""
    # what the target says, but for the beginning
    texts = [[3, *answer[4:]] for answer in decode_answers(shallow)]
    summary = score_early_exit(shallow, tmp_path, make_store(texts, "How are you?"))
    assert list(summary["compared"]) == ["copies", "auto", "retrieval"] and summary[
        "recommended"
    ] == choose_fastest(summary)
    for entry in summary["compared"].values():
        assert (
            entry["lossless"]["identical"] == entry["lossless"]["checked"] == 2
            and entry["tree"]["name"] == "auto"
        )
    assert summary["setting"]["store"]["near_duplicates"] == 0
    assert summary["setting"]["store"]["tokens"] == sum(len(text) + 1 for text in texts)
    first, second, *others = (entry["label"] for entry in list_systems(summary).values())
    assert first == "drafter + retrieval, auto, up to 64 nodes" and second.startswith("drafter, ")
    assert [*others] == ["drafter, auto, up to 64 nodes", "retrieval alone"]


def test_a_runs_own_store_that_holds_a_question_is_left_out(
    shallow: Target, tmp_path: Path, make_store: MakeStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies then come from the text alone; a store that is requested by name is refused."""
    store = make_store([[5, 6, 7]], QUESTIONS[1])
    summary = score_early_exit(shallow, tmp_path, store, baselines=("copies",))
    assert (
        "Retrieval copies from the text only" in capsys.readouterr().out
        and "store" not in summary["setting"]
    )
    with pytest.raises(UserError, match="it holds the question of prompt"):
        score_early_exit(shallow, tmp_path, None, baselines=("copies",), store=str(store.folder))


@pytest.mark.slow
def test_who_copied_a_scored_answer_is_left_out(
    shallow: Target, tmp_path: Path, make_store: MakeStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that a run's own store gave away are dropped with a sentence, the others stay;
    without a store all stay.
    """
    first = score_early_exit(shallow, tmp_path, None, baselines=("copies", "retrieval"))
    assert list(first["compared"]) == ["copies", "retrieval"]
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    store = make_store([json.loads(line)["output_tokens"] for line in lines], "How are you?")
    summary = score_early_exit(shallow, tmp_path, store, baselines=("auto", "copies", "retrieval"))
    assert (
        list(summary["compared"]) == ["auto"]
        and "+ retrieval, auto, up to 64 nodes: left out" in capsys.readouterr().out
    )
    with pytest.raises(UserError, match="it holds the answer to prompt"):
        score_early_exit(shallow, tmp_path, None, baselines=("retrieval",), store=str(store.folder))


def test_the_requested_tree_is_not_shown_twice(shallow: Target, tmp_path: Path) -> None:
    """A drafter that is scored with auto's tree has no second such row."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": QUESTIONS[0]}) + "\n")
    part = Evaluation(prompts=str(file), baselines=("auto", "copies")).extensions()[-1]
    for builder, names in ((Auto(3, 8, 2), ["auto"]), (Chain(3), ["auto", "auto"])):
        candidate = Candidate(shallow, EarlyExit(shallow, 1), builder, Greedy(), {**SETTING})
        assert [system.builder.name for system in part.systems(candidate, None)] == names  # type: ignore[arg-type]
