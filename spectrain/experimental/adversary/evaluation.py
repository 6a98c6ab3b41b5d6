"""Prompts made to slow a drafter down: `eval.adversary=N` tries N small edits of every prompt (Mistletoe, 2026, attacks so).

An edit puts words of the other prompts between the words of a prompt, a few at most. It stays where the target goes on saying
the same and the drafter's tokens are kept less often. What is found is decoded like any other prompt, with the guard and
without: how much acceptance hangs on the wording, and what the guard saves where it is lost. The loop decodes all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.generation import Generation
from spectrain.decoding.guard import Guard
from spectrain.errors import UserError
from spectrain.eval import metrics
from spectrain.eval.columns import format_interval
from spectrain.eval.drift import logits
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.identity import check_identity
from spectrain.eval.intervals import interval
from spectrain.eval.metrics import SystemNumbers, Turn, measure_system
from spectrain.eval.notes import EXTENSION_NOTES
from spectrain.eval.prompts import Prompt
from spectrain.eval.summary import write_lines
from spectrain.eval.systems import Decoder, System
from spectrain.eval.turns import Interleaving
from spectrain.models.target import Target

GUARDED = "guarded"
Insertions = list[tuple[int, str]]  # words, each before so many of the prompt's own


@dataclass(frozen=True)
class Search:
    """How prompts are looked for."""

    tries: int  # edits of each prompt
    words: int = 4  # at most so many are put in
    same: float = 0.9  # of the answer's tokens so many stay the target's likeliest, in their places
    seed: int = 0

    def __post_init__(self) -> None:
        for key, value in (("adversary", self.tries), ("adversary_words", self.words)):
            if value < 1:
                raise UserError(f"eval.{key}={value}: use 1 or more")
        if not 0 <= self.same <= 1:
            raise UserError(f"eval.adversary_same={self.same}: use 0 to 1, a share of the answer's tokens")


@dataclass(frozen=True)
class Found:
    """A prompt as it is after the search, beside what it was."""

    prompt: Prompt  # the first turn alone, edited
    start: Generation  # the drafted answer to the prompt as it was
    end: Generation  # and to what was found
    same: float  # of the first one's tokens, how many are the target's likeliest after the edited prompt
    edits: int  # words that were put in


class Adversary(EvalExtension):
    """Searches after everything else was decoded, by decoding with the drafter's own tree and rule."""

    def __init__(self, search: Search, prompts: Sequence[Prompt], max_new_tokens: int, checks: bool = True) -> None:
        self.search, self.checks, self.max_new_tokens = search, checks, max_new_tokens
        self.prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts if isinstance(prompt.turns[0], str)]
        if not self.prompts:
            raise UserError("eval.adversary: it edits words, and no prompt is text alone; give eval.prompts that are")

    def report(self, results: Results) -> dict[str, Any]:
        target, first = results.candidate.target, replace(results.systems[0], guard=None)
        decoder = Decoder(target, first.rule.matching_rule())
        pool = sorted({word for prompt in self.prompts for word in str(prompt.turns[0]).split()})
        found = [self._find(target, decoder, first, prompt, pool, row) for row, prompt in enumerate(self.prompts, 1)]
        guarded = replace(first, name=GUARDED, label=f"{first.label}, guarded", guard=Guard())
        decoding = Interleaving(decoder, [first, guarded], [], None, self.max_new_tokens, 1)
        decoding.run([one.prompt for one in found])
        write_lines(
            results.folder / "adversary.jsonl",
            [{"id": one.prompt.id, "category": one.prompt.category, "turns": one.prompt.turns} for one in found],
        )
        return {"adversary": self._summary(target, found, decoding)}

    def _find(self, target: Target, decoder: Decoder, system: System, prompt: Prompt, pool: list[str], row: int) -> Found:
        """The edit that lowers the tokens a forward most, by trying one change after another."""
        draw = Random(f"{self.search.seed} {prompt.id}")
        best: Found | None = None
        words: Insertions = []
        for number in range(self.search.tries + 1):
            tried = self._changed(words, str(prompt.turns[0]), pool, draw) if number else words
            edited = replace(prompt, turns=[inserted(str(prompt.turns[0]), tried)])
            tokens = tokenize_prompt(target.template, edited.opening)
            if len(tokens) + self.max_new_tokens > target.max_length:
                continue
            same = 1.0 if best is None else still_likeliest(target, tokens, best.start.output)
            if same < self.search.same:
                continue
            (answer,) = decoder(system, [tokens], self.max_new_tokens, [row])
            if best is None:
                best = Found(edited, answer, answer, same, 0)
            elif tokens_a_forward(answer) < tokens_a_forward(best.end):
                best, words = replace(best, prompt=edited, end=answer, same=same, edits=len(tried)), tried
        assert best is not None, "the prompt as it was fits"
        return best

    def _changed(self, words: Insertions, text: str, pool: list[str], draw: Random) -> Insertions:
        """One word more or, where there are enough, another one in the place of one of them."""
        left = list(words)
        if len(left) == self.search.words:
            left.pop(draw.randrange(len(left)))
        return sorted([*left, (draw.randint(0, len(text.split(" "))), draw.choice(pool))])

    def _summary(self, target: Target, found: list[Found], decoding: Interleaving) -> dict[str, Any]:
        """Tokens a forward before and after, how much else changed, and the speed at what was found, guarded or not."""
        columns = metrics.acceptance_columns([turn_of(one, one.end) for one in found])
        before = metrics.acceptance_columns([turn_of(one, one.start) for one in found])
        ratio = (columns[:, 0].sum() / columns[:, 1].sum()) / (before[:, 0].sum() / before[:, 1].sum())
        entries = {name: SystemNumbers(**measure_system(turns, False)).to_json() for name, turns in decoding.turns.items()}
        identity = check_identity(target, decoding.systems, decoding.turns, self.max_new_tokens) if self.checks else {}
        return {
            **vars(self.search),
            "prompts": len(found),
            "edited": sum(one.edits > 0 for one in found),
            "same_tokens": round(sum(one.same for one in found) / len(found), 4),
            "same_answers": sum(one.start.output == one.end.output for one in found),
            "before": {"pooled": round(float(before[:, 0].sum() / before[:, 1].sum()), 4)},
            "after": {name: entry["acceptance_length"] for name, entry in entries.items()},
            "ratio": round(float(ratio), 4),
            "ratio_ci95": interval(np.concatenate([columns, before], axis=1), (1, -1, -1, 1)),
            "speedup": {name: entry["speedup"] for name, entry in entries.items()},
            "lossless": {name: one.summary() for name, one in identity.items()},
        }


def inserted(text: str, words: Insertions) -> str:
    """A text with words between its own."""
    own = text.split(" ")
    for place, word in sorted(words, reverse=True):
        own.insert(place, word)
    return " ".join(own)


def still_likeliest(target: Target, prompt: list[int], answer: list[int]) -> float:
    """How many of an answer's tokens are the target's likeliest after this prompt and the tokens before them."""
    likeliest = logits(target, (prompt, answer)).argmax(-1).tolist()
    return sum(one == other for one, other in zip(likeliest, answer)) / len(answer)


def tokens_a_forward(answer: Generation) -> float:
    """The mean of its whole rounds; 1 where there is none, which no edit lowers."""
    return sum(answer.complete_round_lengths) / len(answer.complete_round_lengths) if answer.complete_round_lengths else 1.0


def turn_of(found: Found, answer: Generation) -> Turn:
    """An answer as metrics take it."""
    return Turn(found.prompt.id, 0, found.prompt.category, answer, answer)


def describe_adversary(result: dict[str, Any]) -> Iterator[str]:
    """Say what an edit of a few words takes from the drafter, and how much of it the guard restores."""
    before, after, speedup = result["before"]["pooled"], result["after"]["drafter"]["pooled"], result["speedup"]
    ratio = f"{result['ratio']:.2f} [{format_interval(result['ratio_ci95'])}]"
    yield (
        f"Adversary: {result['edited']} of {result['prompts']} prompts edited by at most {result['words']} words, "
        f"{before:.2f} tokens per forward before and {after:.2f} after, {ratio} times as many; {result['same_tokens']:.1%} of "
        f"the answers' tokens stay the most likely ones, {result['same_answers']} answers are the same."
    )
    yield (
        f"Speedup at the edited prompts: {speedup['drafter']['ratio']:.2f} [{format_interval(speedup['drafter']['ci95'])}], "
        f"with the guard {speedup['guarded']['ratio']:.2f} [{format_interval(speedup['guarded']['ci95'])}]."
    )


EXTENSION_NOTES["adversary"] = describe_adversary
