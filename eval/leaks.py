"""Whether a store that a drafter copies from holds scored prompts or answers, which would
measure memory.
"""

from collections.abc import Sequence
from typing import Any

from spectrain.data.datastore import Datastore, hash_phrases, hash_text
from spectrain.errors import UserError
from spectrain.eval.metrics import Turn
from spectrain.eval.prompts import Prompt
from spectrain.output.streams import print_text

MIN_ANSWER = 16  # tokens of an answer from which on an equal one is no chance
NEAR_DUPLICATE = 0.5  # share of a prompt's phrases in the store


def refuse_prompts(store: Datastore, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Refuse a store that holds a prompt's question; return the store's facts and the number of
    near duplicates.
    """
    stored_questions = set(store.questions.tolist())
    stored_phrases = set(store.phrases.tolist())
    near = 0
    for prompt in prompts:
        if any(hash_text(turn) in stored_questions for turn in prompt.questions):
            raise UserError(
                f"store {store.folder}: it holds the question of prompt {prompt.id}, which is to "
                "be scored; score other prompts, or index the data without them"
            )
        phrases = set().union(*map(hash_phrases, prompt.questions))
        near += len(phrases & stored_phrases) >= NEAR_DUPLICATE * len(phrases)
    return {**store.facts, "near_duplicates": near}


def check_no_leak(store: Datastore, prompts: Sequence[Prompt], setting: dict[str, Any]) -> None:
    """Refuse a store that holds a scored question; else add its facts to the setting and print
    the near duplicates.
    """
    facts = refuse_prompts(store, prompts)
    print_text(
        f"check for leaks: {facts['near_duplicates']} of {len(prompts)} prompts resemble a "
        f"question of the answers that retrieval copies from ({store.folder})"
    )
    setting["store"] = facts


def refuse_answers(store: Datastore, turns: Sequence[Turn], tokenizer: Any) -> None:
    """Refuse a store that holds a scored answer from its first token to its last."""
    stored_answers = set(store.answers.tolist())
    for turn in turns:
        tokens = turn.autoregressive.output
        text_hash = hash_text(tokenizer.decode(tokens, skip_special_tokens=True))
        if len(tokens) >= MIN_ANSWER and (
            text_hash in stored_answers or store.contains_tokens(tokens)
        ):
            raise UserError(
                f"store {store.folder}: it holds the answer to prompt {turn.id}, which is scored; "
                "score other prompts, or index the data without them"
            )
