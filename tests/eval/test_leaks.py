"""A store that holds what is scored is refused, and what is much like it is counted."""

from pathlib import Path

import pytest

from spectrain.data.datastore import Datastore, hash_vocabulary, write_store
from spectrain.decoding.generation import Generation
from spectrain.errors import UserError
from spectrain.eval.leaks import refuse_answers, refuse_prompts
from spectrain.eval.metrics import Turn
from spectrain.eval.prompts import Prompt
from spectrain.models.target import Target


@pytest.fixture
def store(shallow: Target, tmp_path: Path) -> Datastore:
    answer = list(range(40, 80))
    questions = ["Why do bees dance in the hive at noon?"]
    answers = [shallow.tokenizer.decode(answer[:20])]
    write_store(
        tmp_path / "store",
        [[1, *answer]],
        questions,
        answers,
        {"tokenizer": hash_vocabulary(shallow.tokenizer)},
    )
    return Datastore(str(tmp_path / "store"), shallow.tokenizer)


def test_copied_prompts_are_refused(store: Datastore) -> None:
    """The same words are refused, most of the phrases are counted, and others pass."""
    texts = {"far": "What is a kite?", "near": "Say why do bees dance in the hive at noon"}
    prompts = [Prompt(name, "all", [text], []) for name, text in texts.items()]
    assert refuse_prompts(store, prompts)["near_duplicates"] == 1
    same = Prompt("same", "all", ["Hi!", "why do bees dance in the hive, at noon"], [])
    with pytest.raises(UserError, match="holds the question of prompt same"):
        refuse_prompts(store, [*prompts, same])


def test_copied_answers_are_refused(store: Datastore, shallow: Target) -> None:
    """An answer that the store holds from beginning to end is refused, by its tokens or its
    words; a short one is no sign.
    """

    def make_turn(output: list[int]) -> Turn:
        generation = Generation([5], output=output)
        return Turn("one", 0, "all", generation, generation)

    refuse_answers(
        store, [make_turn(list(range(40, 79)) + [9]), make_turn([40, 41, 42])], shallow.tokenizer
    )
    for output in (list(range(41, 70)), list(range(40, 60))):
        with pytest.raises(UserError, match="holds the answer to prompt one"):
            refuse_answers(store, [make_turn(output)], shallow.tokenizer)
