"""Beam search with and without drafts: `eval.beams=K` decodes every prompt both ways, in turn.
Shapes: P prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from spectrain.eval.columns import format_interval
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.intervals import interval
from spectrain.eval.notes import EXTENSION_NOTES
from spectrain.models.reference_model import reference_model
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate

from .items import read_items
from .rows import check_drafter
from .search import SearchSettings
from .session import BeamAnswer, BeamSession, Method


@dataclass(frozen=True)
class BeamSettings:
    """The settings `eval.beams`, `eval.beam_method`, `eval.beam_drafts`, `eval.beam_threshold`
    and `eval.items`.
    """

    num_beams: int
    method: Method
    num_drafts: int | None
    threshold: float
    items: str | None


class Beams(EvalExtension):
    """Decodes the prompts with beams, without a drafter and with it, and compares both with
    `generate(num_beams=K)`.
    """

    def __init__(self, settings: BeamSettings, max_new_tokens: int, check: bool) -> None:
        self.settings = settings
        self.max_new_tokens = max_new_tokens
        self.compares = check

    def check(self, candidate: Candidate) -> None:
        check_drafter(candidate.drafter)
        self.make_session(candidate)

    def make_session(self, candidate: Candidate) -> BeamSession:
        """Make the session of the drafter."""
        settings, target = self.settings, candidate.target
        trie = None if settings.items is None else read_items(settings.items, target.stop_ids)
        # An answer is one item.
        limit = self.max_new_tokens if trie is None else min(trie.longest, self.max_new_tokens)
        search = SearchSettings(settings.num_beams, limit, target.stop_ids, constraint=trie)
        width = 2 * settings.num_beams if settings.num_drafts is None else settings.num_drafts
        sampling = candidate.rule.sampling_settings
        temperature, seed = (
            (1.0, 0)
            if sampling is None or settings.method == "strict"
            else (sampling[0], sampling[3])
        )
        return BeamSession(
            target,
            search,
            settings.method,
            candidate.drafter,
            candidate.builder.depth,
            width,
            temperature,
            settings.threshold,
            seed,
        )

    def report(self, results: Results) -> dict[str, Any]:
        drafted = self.make_session(replace(results.candidate, drafter=results.systems[0].drafter))
        plain = replace(drafted, drafter=None)
        prompts = [turn.drafted.prompt for turn in results.turns["drafter"]]
        # The first answers of both compile and allocate what later ones use.
        for session in (plain, drafted):
            session.decode(prompts[0], 0)
        answers: list[tuple[BeamAnswer, BeamAnswer]] = []
        for row, prompt in enumerate(prompts):
            order = (plain, drafted) if row % 2 == 0 else (drafted, plain)
            pair = [session.decode(prompt, row) for session in order]
            answers.append((pair[row % 2], pair[1 - row % 2]))
        section = {**self.describe_settings(drafted), **summarize_answers(answers)}
        if self.settings.method == "strict":
            section["identical"] = sum(
                drafted.hypotheses == plain.hypotheses for drafted, plain in answers
            )
            if self.compares:
                outputs = [
                    generate_beams(drafted.target, prompt, drafted.settings) for prompt in prompts
                ]
                section["same_as_generate"] = sum(
                    output == answer.hypotheses[: len(output)]
                    for output, (_, answer) in zip(outputs, answers)
                )
        return {"beams": section}

    def describe_settings(self, session: BeamSession) -> dict[str, Any]:
        """Return the settings that a report shows."""
        return {
            "num_beams": session.settings.num_beams,
            "method": session.method,
            "drafts": session.width,
            "depth": session.depth,
            "items": self.settings.items is not None,
            "temperature": session.temperature,
        }


def summarize_answers(answers: list[tuple[BeamAnswer, BeamAnswer]]) -> dict[str, Any]:
    """Return steps per forward and the speed of drafted beams relative to plain ones, with
    intervals over prompts.

    The first step, which the prompt's forward allows, belongs to no round.
    """
    steps = np.array(
        [[drafted.num_steps - 1, drafted.num_forwards] for _, drafted in answers], dtype=np.float64
    )
    speeds = np.array(
        [
            [drafted.num_steps, drafted.seconds, plain.num_steps, plain.seconds]
            for plain, drafted in answers
        ],
        dtype=np.float64,
    )
    totals = speeds.sum(0)
    return {
        "prompts": len(answers),
        "acceptance_length": {
            "pooled": round(float(steps[:, 0].sum() / max(steps[:, 1].sum(), 1)), 4),
            "ci95": interval(steps, (1, -1)),
        },
        "speedup": {
            "ratio": round(float(totals[0] / totals[1] / (totals[2] / totals[3])), 4),
            "ci95": interval(speeds, (1, -1, -1, 1)),
        },
        "steps_per_second": {
            "plain": round(float(totals[2] / totals[3]), 2),
            "drafted": round(float(totals[0] / totals[1]), 2),
        },
    }


def generate_beams(target: Target, prompt: list[int], settings: SearchSettings) -> list[list[int]]:
    """Return the hypotheses of transformers' `generate`, the best first, without padding."""
    stops = sorted(settings.stop_ids)
    constraint = settings.constraint
    options: dict[str, Any] = {}
    if constraint is not None:
        options["prefix_allowed_tokens_fn"] = lambda batch, tokens: constraint(
            tokens[len(prompt) :].tolist()
        )
    with torch.inference_mode(), reference_model(target) as model:
        output = model.generate(
            torch.tensor([prompt], device=target.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=target.device),
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            num_beams=settings.num_beams,
            num_return_sequences=settings.num_beams,
            length_penalty=settings.length_penalty,
            max_new_tokens=settings.max_new_tokens,
            eos_token_id=stops or None,
            pad_token_id=(stops or [0])[0],
            **options,
        )
    answers = [row[len(prompt) :].tolist() for row in output]
    ends = [
        next((at + 1 for at, token in enumerate(row) if token in stops), len(row))
        for row in answers
    ]
    return [row[:end] for row, end in zip(answers, ends)]


def describe_beams(section: dict[str, Any]) -> Iterator[str]:
    """Say what drafting gains with beams, and whether the hypotheses are the same."""
    length = section["acceptance_length"]
    speed = section["speedup"]
    yield (
        f"With {section['num_beams']} beams ({section['method']}), {section['drafts']} drafts at "
        f"each of {section['depth']} depths allow {length['pooled']:.2f} "
        f"{format_interval(length['ci95'])} steps per forward, and drafted beams have "
        f"{speed['ratio']:.2f}x {format_interval(speed['ci95'])} the speed of plain ones."
    )
    if "identical" in section:
        same = section.get("same_as_generate")
        reference = "" if same is None else f", and {same} those of transformers' generate"
        yield (
            f"Of {section['prompts']} prompts, {section['identical']} have the hypotheses of "
            f"plain beam search{reference}."
        )


EXTENSION_NOTES["beams"] = describe_beams
