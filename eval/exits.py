"""The quality of the target at every exit. Shapes: T tokens, R supervised rows, D target width, V
vocabulary.

Exit E reads the residual stream entering layer E through the final norm and the head; the last one
is the model's own.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.eval.drift import Text, own_answers, target_drift
from spectrain.eval.metrics import Turn
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate


def judge_target(
    candidate: Candidate, turns: Sequence[Turn], max_new_tokens: int, folder: Path
) -> dict[str, Any]:
    """Measure what training changed in the target, and the quality of early exits, both on the
    untrained target's answers.
    """
    target = candidate.target
    result: dict[str, Any] = {}
    texts = [(turn.autoregressive.prompt, turn.autoregressive.output) for turn in turns]
    original = None if candidate.load_original is None else candidate.load_original()
    if original is not None:
        texts = own_answers(original, [prompt for prompt, _ in texts], max_new_tokens)
        result["target_drift"] = target_drift(original, target, texts, max_new_tokens)
    if candidate.drafter.capabilities.at_exit is not None:
        models = (
            {"target": target} if original is None else {"original": original, "trained": target}
        )
        result["exits"] = {name: exit_quality(model, texts) for name, model in models.items()}
        plot_exits(folder / "exits.svg", result["exits"])
    return result


@torch.no_grad()
def exit_quality(target: Target, texts: Sequence[Text]) -> dict[str, list[float]]:
    """Compute the perplexity of answers at every exit from 1 on, and how often the last exit has
    the same most likely token.
    """
    count = target.num_layers
    losses = torch.zeros(count, dtype=torch.float64)
    agreed = torch.zeros(count, dtype=torch.float64)
    judged = 0
    for prompt, answer in texts:
        tokens = torch.tensor([prompt + answer], device=target.device)
        features = target.features(tokens, tuple(range(1, count + 1)), texts=[prompt + answer])
        states = features.hidden[0, len(prompt) - 1 : -1]  # [R, exits, D]
        following = tokens[0, len(prompt) :, None]
        best: Tensor | None = None
        for exit in reversed(range(count)):
            log_p = target.head.logits(
                target.apply_final_norm(states[None, :, exit])[0]
            ).log_softmax(-1)
            best = log_p.argmax(-1) if best is None else best
            losses[exit] -= log_p.gather(-1, following).double().sum().cpu()
            agreed[exit] += (log_p.argmax(-1) == best).sum().cpu()
        judged += len(answer)
    return {
        "perplexity": [round(math.exp(loss / judged), 4) for loss in losses.tolist()],
        "agreement": [round(hits / judged, 4) for hits in agreed.tolist()],
    }


def plot_exits(path: Path, quality: dict[str, dict[str, list[float]]]) -> None:
    """Plot perplexity and agreement by exit, with a curve for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, values in quality.items():
        exits = range(1, len(values["perplexity"]) + 1)
        left.plot(exits, values["perplexity"], marker="o", label=name)
        right.plot(exits, values["agreement"], marker="o", label=name)
    left.set(xlabel="layers run", ylabel="perplexity of the answers", yscale="log")
    right.set(
        xlabel="layers run", ylabel="same most likely token as the last layer", ylim=(0, 1.02)
    )
    left.legend()
    figure.savefig(path)
