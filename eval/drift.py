"""How far an output is from the original target's own. Shapes: T tokens, V vocabulary."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.eval.metrics import Turn
from spectrain.models.target import Target

Text = tuple[list[int], list[int]]  # a prompt and its answer


def rule_drift(target: Target, turns: Sequence[Turn], follows: bool = False) -> dict[str, Any]:
    """Measure what a lossy rule changes: the target's judgement of drafted answers and of its own.

    `follows` says that a lossless rule would give the target's own answers; then their agreement is
    measured as well.
    """
    drift: dict[str, Any] = {
        "autoregressive": quality(
            target, [(turn.autoregressive.prompt, turn.autoregressive.output) for turn in turns]
        ),
        "drafted": quality(target, [(turn.drafted.prompt, turn.drafted.output) for turn in turns]),
    }
    pairs = [(turn.autoregressive.output, turn.drafted.output) for turn in turns]
    return drift | agreement(pairs) if follows else drift


def agreement(answers: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Compare pairs of answers.

    `agreement` is the share of the first answers' tokens that stand before the first difference,
    `same_answers` how many of `checked` are equal.
    """
    same = sum(
        next((n for n, (a, b) in enumerate(zip(*pair)) if a != b), min(map(len, pair)))
        for pair in answers
    )
    return {
        "agreement": round(same / max(1, sum(len(own) for own, _ in answers)), 4),
        "same_answers": sum(own == other for own, other in answers),
        "checked": len(answers),
    }


def own_answers(target: Target, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Text]:
    """Return prompts with the target's greedy answers."""
    target.pack_weights()
    return [
        (prompt, decode(target, [prompt], Greedy(), max_new_tokens)[0].output) for prompt in prompts
    ]


def target_drift(
    original: Target, trained: Target, texts: Sequence[Text], max_new_tokens: int
) -> dict[str, Any]:
    """Measure what training changed in a target: how the original and the trained one judge the
    original's own answers.

    `agreement` is how often both have the same most likely token, `kl` the mean KL(original ||
    trained) over the positions, in nats, which also shows changes that greedy text hides;
    `same_answers` how many greedy answers are equal.
    """
    agreed = judged = same = 0
    divergence = 0.0
    for prompt, answer in texts:
        log_p, log_q = (
            logits(target, (prompt, answer)).log_softmax(-1) for target in (original, trained)
        )
        agreed += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        divergence += float((log_p.exp() * (log_p - log_q)).sum())
        judged += len(answer)
        same += decode(trained, [prompt], Greedy(), max_new_tokens)[0].output == answer
    return {
        "original": quality(original, texts),
        "trained": quality(trained, texts),
        "agreement": round(agreed / judged, 4),
        "kl": round(divergence / judged, 4),
        "same_answers": same,
        "checked": len(texts),
    }


def quality(target: Target, texts: Sequence[Text]) -> dict[str, float]:
    """Compute the target's perplexity of answers, and the share of their tokens that are its
    most likely ones.
    """
    loss = best = count = 0.0
    for prompt, answer in texts:
        log_p = logits(target, (prompt, answer)).log_softmax(-1)
        tokens = torch.tensor(answer, device=log_p.device)
        loss -= float(log_p.gather(-1, tokens[:, None]).sum())
        best += float((log_p.argmax(-1) == tokens).sum())
        count += len(answer)
    return {"perplexity": round(math.exp(loss / count), 4), "most_likely": round(best / count, 4)}


@torch.no_grad()
def logits(target: Target, text: Text) -> Tensor:
    """Return the target's logits before every token of an answer [T, V]."""
    prompt, answer = text
    tokens = torch.tensor([prompt + answer], device=target.device)
    final = target.features(tokens, ("final",), texts=[prompt + answer]).at_layer("final")[
        0, len(prompt) - 1 : -1
    ]
    return target.head.logits(final)
