"""What a draft model is worth by itself."""

from pathlib import Path

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.causal import Causal
from spectrain.drafters.ngram import Ngram
from spectrain.eval.draft_model import describe_draft_model, score_draft_model
from spectrain.eval.metrics import Turn
from spectrain.eval.tasks import Number, Reference
from spectrain.models.target import Target

TOKENS = 8


def answer_prompts(target: Target) -> list[Turn]:
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
    runs = decode(target, prompts, Greedy(), TOKENS)
    return [Turn(str(number), 0, "all", run, run) for number, run in enumerate(runs)]


class AnyAnswer(Number):
    """Takes every answer for right."""

    def is_right(self, answer: str) -> bool:
        return True


class NoAnswer(Number):
    """Takes every answer for wrong."""

    def is_right(self, answer: str) -> bool:
        return False


def test_a_copy_of_the_target_is_as_good_as_the_target(
    shallow: Target, shallow_folder: Path
) -> None:
    """A copy of the target as draft model has its perplexity and its right answers; one
    with fewer has a larger perplexity on the target's own answers.
    """
    turns = answer_prompts(shallow)
    references: dict[str, Reference] = {"0": AnyAnswer(1), "1": NoAnswer(1)}  # type: ignore[arg-type]
    copy = Causal(shallow, model=str(shallow_folder))
    entry = score_draft_model(copy, shallow, turns, references, TOKENS, execute=False)
    assert entry is not None
    for numbers in entry["perplexity"].values():
        assert abs(numbers["drafter"] / numbers["target"] - 1) < 1e-3
    assert entry["task"] == {"checked": 2, "drafter": 1, "target": 1}
    assert "1 of 2 greedy answers right (the target 1)" in describe_draft_model(entry)
    cut = score_draft_model(
        Causal(shallow, num_layers=1), shallow, turns, {}, TOKENS, execute=False
    )
    assert cut is not None and cut["task"] is None
    answers = cut["perplexity"]["answers"]
    assert answers["drafter"] > answers["target"]


def test_other_families_have_no_language_model(shallow: Target) -> None:
    turns = answer_prompts(shallow)
    assert score_draft_model(Ngram(shallow), shallow, turns, {}, TOKENS, execute=False) is None
