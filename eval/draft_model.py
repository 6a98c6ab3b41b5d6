"""How good a draft model is by itself, beside its acceptance: a language model that predicts text
better need not be accepted more often.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spectrain.decoding.generation import Generation
from spectrain.drafters.base import Drafter
from spectrain.eval.drift import own_answers, quality
from spectrain.eval.metrics import Turn
from spectrain.eval.tasks import Reference, task_score
from spectrain.models.target import Target


def score_draft_model(
    drafter: Drafter,
    target: Target,
    turns: Sequence[Turn],
    references: Mapping[str, Reference],
    max_new_tokens: int,
    execute: bool,
) -> dict[str, Any] | None:
    """Measure the perplexity of a draft model and of its target on the scored prompts and on the
    target's answers to them and, where answers have references, how many its own greedy answers get
    right. None for a drafter that is no language model.
    """
    if drafter.capabilities.draft_model is None:
        return None
    model = drafter.capabilities.draft_model(drafter)
    prompts = [turn.autoregressive.prompt for turn in turns if len(turn.autoregressive.prompt) > 1]
    texts = {
        "prompts": [(prompt[:1], prompt[1:]) for prompt in prompts],
        "answers": [(turn.autoregressive.prompt, turn.autoregressive.output) for turn in turns],
    }
    perplexity = {
        name: {
            "drafter": quality(model, part)["perplexity"],
            "target": quality(target, part)["perplexity"],
        }
        for name, part in texts.items()
        if part
    }
    return {
        "perplexity": perplexity,
        "task": score_own_answers(model, turns, references, max_new_tokens, execute),
    }


def score_own_answers(
    model: Target,
    turns: Sequence[Turn],
    references: Mapping[str, Reference],
    max_new_tokens: int,
    execute: bool,
) -> dict[str, Any] | None:
    """Count the right answers of a draft model alone (`drafter`) and of its target (`target`); None
    without references.
    """
    judged = [turn for turn in turns if turn.id in references]
    if not judged:
        return None
    prompts = [turn.autoregressive.prompt for turn in judged]
    answers = own_answers(model, prompts, max_new_tokens)
    # Its answers stand where drafted ones do, beside the target's.
    pairs = [
        replace(turn, drafted=Generation(prompt, answer))
        for turn, (prompt, answer) in zip(judged, answers, strict=True)
    ]
    task = task_score(model, references, pairs, execute)
    assert task is not None
    return {
        "checked": task["checked"],
        "drafter": task["drafted"],
        "target": task["autoregressive"],
    }


def describe_draft_model(entry: Mapping[str, Any]) -> str:
    """Say how good the draft model is by itself."""
    parts = [
        f"{numbers['drafter']:.2f} on the {subject} (the target {numbers['target']:.2f})"
        for key, subject in (("answers", "target's answers"), ("prompts", "prompts"))
        if (numbers := entry["perplexity"].get(key))
    ]
    text = f"The draft model alone: perplexity {' and '.join(parts)}"
    if (task := entry["task"]) and task["checked"]:
        text += (
            f"; {task['drafter']} of {task['checked']} greedy answers right (the target "
            f"{task['target']})"
        )
    return f"{text}."
