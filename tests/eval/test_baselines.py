"""The baselines of a drafter: itself with measured trees and with retrieval, and retrieval alone."""

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
from spectrain.eval.columns import list_systems
from spectrain.eval.run import Evaluation
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Auto, Chain, Eagle2

SETTING = {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"}
LIMIT = 24
QUESTIONS = ("What is a kite made of?", "Why do bees dance?")
Stored = Callable[..., Datastore]


@pytest.fixture
def stored(shallow: Target, tmp_path: Path) -> Stored:
    """Makes stores of given texts, asked by given questions."""

    def make(texts: list[list[int]], *asked: str) -> Datastore:
        folder = tmp_path / f"store{len(list(tmp_path.iterdir()))}"
        write_store(folder, texts, asked, [], {"tokenizer": hash_vocabulary(shallow.tokenizer)})
        return Datastore(str(folder), shallow.tokenizer)

    return make


def scored(target: Target, folder: Path, own: Datastore | None, **options: Any) -> dict[str, Any]:
    """An early exit on two short prompts, beside copies; `own` is what the run says that it was trained on."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    settings: dict[str, Any] = {"baselines": ("auto", "copies", "retrieval"), "calibration": str(file), **options}
    evaluation = Evaluation(prompts=str(file), max_new_tokens=LIMIT, oracle=False, report=False, repeats=1, **settings)
    candidate = Candidate(target, EarlyExit(target, 1), Eagle2(3, 8, 2), Greedy(), {**SETTING}, open_store=lambda: own)
    return evaluation.score(candidate, folder / "out")


def answers(target: Target) -> list[list[int]]:
    prompts = [tokenize_prompt(target.template, [{"role": "user", "content": text}]) for text in QUESTIONS]
    return [one.output for one in decode(target, prompts, Greedy(), LIMIT)]


def test_copies_and_measured_trees_are_shown(shallow: Target, tmp_path: Path, stored: Stored) -> None:
    """Each row is the target's own output, the one with retrieval first; the setting names the store; measured trees stay in
    their budget."""
    texts = [[3, *said[4:]] for said in answers(shallow)]  # what the target says, but for the beginning
    summary = scored(shallow, tmp_path, stored(texts, "How are you?"))
    assert list(summary["compared"]) == ["copies", "auto", "retrieval"] and summary["recommended"] == "copies"
    for entry in summary["compared"].values():
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == 2 and entry["tree"]["name"] == "auto"
    assert summary["setting"]["store"]["near_duplicates"] == 0
    assert summary["setting"]["store"]["tokens"] == sum(len(text) + 1 for text in texts)
    first, second, *others = (entry["label"] for entry in list_systems(summary).values())
    assert first == "drafter + retrieval, auto, up to 64 nodes" and second.startswith("drafter, ")
    assert [*others] == ["the same, auto, up to 64 nodes", "retrieval alone"]


def test_a_runs_own_store_that_holds_a_question_is_left_out(
    shallow: Target, tmp_path: Path, stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies are then of the text alone; a store that was asked for by name is refused."""
    store = stored([[5, 6, 7]], QUESTIONS[1])
    summary = scored(shallow, tmp_path, store, baselines=("copies",))
    assert "Retrieval copies from the text only" in capsys.readouterr().out and "store" not in summary["setting"]
    with pytest.raises(UserError, match="it holds the question of prompt"):
        scored(shallow, tmp_path, None, baselines=("copies",), store=str(store.folder))


@pytest.mark.slow
def test_who_copied_a_scored_answer_is_left_out(
    shallow: Target, tmp_path: Path, stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that a run's own store gave away are dropped with a sentence, the others stay; without a store all stay."""
    first = scored(shallow, tmp_path, None, baselines=("copies", "retrieval"))
    assert list(first["compared"]) == ["copies", "retrieval"]
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    known = stored([json.loads(line)["output_tokens"] for line in lines], "How are you?")
    summary = scored(shallow, tmp_path, known, baselines=("auto", "copies", "retrieval"))
    assert list(summary["compared"]) == ["auto"] and "+ retrieval, auto, up to 64 nodes: left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="it holds the answer to prompt"):
        scored(shallow, tmp_path, None, baselines=("retrieval",), store=str(known.folder))


def test_what_is_asked_for_is_not_shown_twice(shallow: Target, tmp_path: Path) -> None:
    """A drafter that is scored with auto's tree has no second such row."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": QUESTIONS[0]}) + "\n")
    part = Evaluation(prompts=str(file), baselines=("auto", "copies")).extensions()[-1]
    for builder, names in ((Auto(3, 8, 2), ["auto"]), (Chain(3), ["auto", "auto"])):
        candidate = Candidate(shallow, EarlyExit(shallow, 1), builder, Greedy(), {**SETTING})
        assert [system.builder.name for system in part.systems(candidate, None)] == names  # type: ignore[arg-type]
