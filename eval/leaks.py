"""Whether a store that a drafter copies from holds what is scored: that would measure memory."""

from collections.abc import Sequence
from typing import Any

from spectrain.data.datastore import Datastore, hash_phrases, hash_text
from spectrain.data.images import content_text
from spectrain.errors import UserError
from spectrain.eval.metrics import Turn
from spectrain.eval.prompts import Prompt

TELLING = 16  # tokens of an answer from which on saying the same is no chance
ALIKE = 0.5  # of a prompt's phrases


def asked_in(prompt: Prompt) -> list[str]:
    """The questions, in words."""
    return [content_text(turn) for turn in prompt.turns]


def refuse_prompts(store: Datastore, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Refuse a store that holds a prompt's questions, word by word; what the store is, and how many prompts are much like
    what it holds."""
    known, phrases = set(store.questions.tolist()), set(store.phrases.tolist())
    near = 0
    for prompt in prompts:
        if any(hash_text(turn) in known for turn in asked_in(prompt)):
            raise UserError(
                f"store {store.folder}: it holds the question of prompt {prompt.id}, which is to be scored; score "
                "other prompts, or index the data without them"
            )
        asked = set().union(*map(hash_phrases, asked_in(prompt)))
        near += len(asked & phrases) >= ALIKE * len(asked)
    return {**store.facts, "near_duplicates": near}


def admit(store: Datastore, prompts: Sequence[Prompt], setting: dict[str, Any]) -> None:
    """Refuse a store that holds a scored question; else say what it is, in the setting, and how much alike they are."""
    found = refuse_prompts(store, prompts)
    print(f"{found['near_duplicates']} of {len(prompts)} prompts are much like a question in {store.folder}")
    setting["store"] = found


def refuse_answers(store: Datastore, turns: Sequence[Turn], tokenizer: Any) -> None:
    """Refuse a store that holds a scored answer from its first token to its last."""
    known = set(store.answers.tolist())
    for turn in turns:
        tokens = turn.autoregressive.output
        said = hash_text(tokenizer.decode(tokens, skip_special_tokens=True))
        if len(tokens) >= TELLING and (said in known or store.contains_tokens(tokens)):
            raise UserError(
                f"store {store.folder}: it holds the answer to prompt {turn.id}, which is scored; score other prompts, "
                "or index the data without them"
            )
