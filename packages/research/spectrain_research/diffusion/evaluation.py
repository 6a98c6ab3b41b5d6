"""Scores ways to decode a masked language model: `spectrain eval eval=diffusion eval.model=DIR
drafter=ngram target=tiny`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from rich.table import Table

from spectrain.config.values import Count
from spectrain.errors import UserError
from spectrain.eval.intervals import interval
from spectrain.eval.run import Evaluation
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.output.console import make_console
from spectrain.provenance import collect_provenance
from spectrain.runs.candidate import Candidate

from .decoding import Decoded, MaskedDecoder, decode_soft, take_confident, take_count, take_final
from .edits import refine_answer
from .model import MaskedLM

Way = Callable[[list[int], int], Decoded]


@dataclass
class DiffusionEvaluation(Evaluation):
    """Decodes prompts with a masked language model in several ways, in turn, and compares them with
    one token per forward.

    The target of the command gives the tokenizer and judges the answers: `log_p` is its mean
    log-probability of their tokens. Its drafter is not used.
    """

    part: ClassVar[str] = "diffusion"

    # Folder of the masked language model, which lab/small_targets/make_masked_model.py trains.
    model: str | None = None
    # Number of positions that are decoded before those after them.
    block_size: Count = 16
    # Number of steps that PSD verifies in one forward.
    depth: Count = 4
    # Confidence from which positions are unmasked together.
    threshold: float = 0.9
    # Number of passes of ME-DLM over a complete answer.
    edit_passes: Count = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold < 1:
            raise UserError(f"eval.threshold={self.threshold}: use more than 0 and less than 1")

    def score(self, candidate: Candidate, folder: Path) -> dict[str, Any]:
        if self.model is None:
            raise UserError(
                "eval.model: name the folder of a masked language model; "
                "lab/small_targets/make_masked_model.py trains one"
            )
        target = candidate.target
        model = MaskedLM.load(self.model)
        if model.config.vocab_size != target.head.vocab_size:
            raise UserError(
                f"eval.model={self.model}: it has {model.config.vocab_size} tokens, and "
                f"{target.name} has {target.head.vocab_size}; use the target whose tokenizer it "
                "was trained with"
            )
        room = model.config.max_length - self.max_new_tokens
        prompts = [
            prompt
            for prompt in (conversation.tokenize_for(target) for conversation in self.chosen)
            if len(prompt) <= room
        ]
        ways = list_ways(self, model)
        decoded: dict[str, list[Decoded]] = {name: [] for name in ways}
        for number, prompt in enumerate(prompts):
            # The first prompt is decoded once more before, so that nothing is measured cold.
            for name, decode in [*(ways.items() if not number else ()), *ways.items()]:
                answer = decode(prompt, self.max_new_tokens)
                decoded[name] = [*decoded[name][:number], answer]
        rows = {
            name: summarize_way(target, prompts, answers, decoded["one"])
            for name, answers in decoded.items()
        }
        # An exact way has a base, whose texts it must repeat.
        for name, base in (("psd", "one"), ("psd, two", "two"), ("psd, confident", "confident")):
            same = [
                answer.tokens == other.tokens
                for answer, other in zip(decoded[name], decoded[base], strict=True)
            ]
            rows[name]["lossless"] = {"to": base, "checked": len(same), "identical": sum(same)}
        setting = {
            **collect_provenance(),
            "model": self.model,
            "prompts": len(prompts),
            "tokens": self.max_new_tokens,
        }
        setting |= {
            "block_size": self.block_size,
            "depth": self.depth,
            "threshold": self.threshold,
            "target": target.name,
        }
        summary = {"diffusion": rows, "setting": setting}
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        print_ways(rows)
        return summary

    def tabulate(self, summary: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"system": name, "tokens_per_forward": row["tokens_per_forward"][0]}
            for name, row in summary["diffusion"].items()
        ]


def list_ways(evaluation: DiffusionEvaluation, model: MaskedLM) -> dict[str, Way]:
    """Return the ways to decode that these settings describe, by name."""
    size = evaluation.block_size
    confident = take_confident(evaluation.threshold)
    decoders = {
        "one": MaskedDecoder(model, take_count(1), size),
        "psd": MaskedDecoder(model, take_count(1), size, evaluation.depth),
        "two": MaskedDecoder(model, take_count(2), size),
        "psd, two": MaskedDecoder(model, take_count(2), size, evaluation.depth),
        "confident": MaskedDecoder(model, confident, size),
        "psd, confident": MaskedDecoder(model, confident, size, evaluation.depth),
        "ni": MaskedDecoder(model, take_final(evaluation.threshold), size, reads_indicator=True),
    }
    ways: dict[str, Way] = {name: decoder.decode for name, decoder in decoders.items()}
    fast = MaskedDecoder(model, take_count(4), size)
    ways["four"] = fast.decode
    ways["me-dlm"] = lambda prompt, count: refine_answer(
        model, prompt, fast.decode(prompt, count), evaluation.edit_passes
    )
    ways["dmax"] = lambda prompt, count: decode_soft(
        model, prompt, count, size, evaluation.threshold / 2
    )
    return ways


def summarize_way(
    target: Target, prompts: list[list[int]], answers: list[Decoded], base: list[Decoded]
) -> dict[str, Any]:
    """Return tokens per forward and speed with intervals, rows per forward, agreement with
    the base, and log p.
    """
    numbers = np.array(
        [[len(answer.tokens), answer.num_forwards, answer.seconds] for answer in answers],
        dtype=np.float64,
    )
    others = np.array([[len(answer.tokens), answer.seconds] for answer in base], dtype=np.float64)
    speed = np.concatenate([numbers[:, [0, 2]], others], axis=1)
    same = [
        a == b for answer, other in zip(answers, base) for a, b in zip(answer.tokens, other.tokens)
    ]
    return {
        "tokens_per_forward": with_interval(numbers[:, :2], (1, -1)),
        "speedup": with_interval(speed, (1, -1, -1, 1)),
        "rows_per_forward": round(
            sum(answer.num_rows for answer in answers)
            / sum(answer.num_forwards for answer in answers),
            3,
        ),
        "agreement": round(sum(same) / max(1, len(same)), 4),
        "log_p": round(measure_log_p(target, prompts, answers), 4),
    }


def with_interval(columns: np.ndarray, signs: tuple[int, ...]) -> list[float]:
    """Return the product of the columns' sums to the powers `signs`, and its interval if there
    is one.
    """
    value = float(np.prod(columns.sum(0) ** np.array(signs)))
    bounds = interval(columns, signs)
    return [round(number, 4) for number in (value, *(bounds or ()))]


@torch.inference_mode()
def measure_log_p(target: Target, prompts: list[list[int]], answers: list[Decoded]) -> float:
    """Return the mean log-probability of the answers' tokens under a causal target."""
    total = 0.0
    count = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer.tokens]], device=target.device)
        final = target.features(tokens, ("final",)).at_layer("final")[0, len(prompt) - 1 : -1]
        log_p = target.head.logits(final).log_softmax(-1)
        total += float(log_p.gather(1, tokens[0, len(prompt) :, None]).sum())
        count += len(answer.tokens)
    return total / max(1, count)


def print_ways(rows: dict[str, dict[str, Any]]) -> None:
    """Print a row for each way to decode."""
    table = Table(
        "decoding",
        "tokens per forward",
        "speed",
        "rows",
        "same tokens",
        "log p of the target",
        "exact",
    )
    for name, row in rows.items():
        tokens, speed = (
            f"{value[0]:.2f}" + (f" [{value[1]:.2f}, {value[2]:.2f}]" if len(value) > 2 else "")
            for value in (row["tokens_per_forward"], row["speedup"])
        )
        check = row.get("lossless")
        exact = (
            "" if check is None else f"{check['identical']} of {check['checked']} as {check['to']}"
        )
        values = (
            tokens,
            f"{speed}x",
            f"{row['rows_per_forward']:.2f}",
            f"{row['agreement']:.2f}",
            f"{row['log_p']:.2f}",
            exact,
        )
        table.add_row(name, *values)
    make_console().print(table)
