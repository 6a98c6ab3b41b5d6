"""Continuous batching of regenerated answers, in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.data.chat import tokenize_prompt
from spectrain.data.messages import Conversation
from spectrain.decoding.acceptance import Match
from spectrain.models.target import Target
from spectrain_cpu import continuous_batch, prompts
from spectrain_cpu.continuous_batch import ContinuousBatch, RunningText
from tests.decoding.known_target import Batch, Case, Outputs, outputs_of
from tests.decoding.test_known_distribution import LEVEL
from tests.regeneration.test_regenerate import ListReader, load_poolable, regenerate

# Its tokens occur before, so that they are copied.
REPEATING = (1, 2, 0, 2, 0, 0, 1, 0)


def test_later_turns_run_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous batching runs the first prompt of a conversation whole, and of later ones what
    follows the earlier answer's last token but one; keys, values and logits are those of the whole
    prompt, up to the rounding of bfloat16."""
    target = load_poolable()
    prefill = Target.prefill
    extend = prompts.extend_text
    sizes = []

    def prefill_counted(self: Target, tokens: Any, *rest: Any) -> Any:
        sizes.append(("whole", tokens.shape[1]))
        return prefill(self, tokens, *rest)

    def extend_counted(target: Target, tokens: Any, *rest: Any) -> Any:
        sizes.append(("rest", tokens.shape[1]))
        return extend(target, tokens, *rest)

    monkeypatch.setattr(Target, "prefill", prefill_counted)
    monkeypatch.setattr(continuous_batch, "extend_text", extend_counted)
    questions = ["Why is the sky blue?", "And at night?", "Say it in one word."]
    chat = [{"role": role, "content": text} for text in questions for role in ("user", "assistant")]
    (row,) = regenerate(tmp_path / "out", target, ListReader([chat])).values()
    chat_prompts = []
    ids = {}
    for at, output in zip((1, 3, 5), row.answer_ids or [], strict=True):
        chat_prompts.append(
            tokenize_prompt(
                target.template, Conversation(row.messages, answer_ids=dict(ids)).up_to(at)
            )
        )
        ids[at] = output
    shared = [len(prompt) + size - 1 for prompt, size in zip(chat_prompts, row.num_tokens)]
    assert sizes == [("whole", len(chat_prompts[0]))] + [
        ("rest", len(chat_prompts[turn]) - shared[turn - 1]) for turn in (1, 2)
    ]

    tokens = torch.tensor([chat_prompts[2]])
    cuts = len(chat_prompts[1])
    full_cache = target.new_cache(1, tokens.shape[1])
    split_cache = target.new_cache(1, tokens.shape[1])
    expected = prefill(target, tokens, torch.tensor([tokens.shape[1]]), full_cache, ()).logits
    prefill(target, tokens[:, :cuts], torch.tensor([cuts]), split_cache, ())
    actual = extend(target, tokens[:, cuts:], split_cache).logits
    assert (
        expected is not None
        and actual is not None
        and full_cache.storage is not None
        and split_cache.storage is not None
    )
    assert full_cache.longest == split_cache.longest == tokens.shape[1]
    torch.testing.assert_close(actual, expected, atol=0.1, rtol=0.05)
    torch.testing.assert_close(split_cache.storage, full_cache.storage, atol=0.1, rtol=0.05)


def decode_continuously(batch: Batch) -> Outputs:
    """Let prompts join a running batch one after another; every other one begins with the tokens
    of a finished text.
    """
    if not prompts.runs_texts_alone(batch.target):
        pytest.skip("this processor has no kernels that give a text the bits that it has alone")
    slots = 6 * (len(batch.prompt) + batch.length)
    running = ContinuousBatch(batch.target, batch.rule, batch.length, slots)
    texts = list[RunningText]()
    waiting = list(batch.keys)
    while waiting or running.texts:
        if waiting and running.has_room(batch.prompt):
            key = waiting.pop(0)
            prefix = texts[-8].prefix if key % 2 and len(texts) >= 8 else None
            texts.append(running.add(batch.prompt, key, prefix))
        if running.texts:
            running.step()
    return outputs_of([text.generation for text in texts], batch.length)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_texts_that_join_a_batch_have_the_targets_distribution(seed: int) -> None:
    case = Case(
        "match, continuous batch",
        Match,
        lambda seed: None,
        prompt=REPEATING,
        decode=decode_continuously,
        dtype=torch.bfloat16,
    )
    fit = case.test(case.sample(10_000, seed))
    assert fit.p_value > LEVEL, fit
