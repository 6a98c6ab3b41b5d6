"""Prompts made to slow a drafter down: `eval.adversary=N` tries N small edits of every prompt
(Mistletoe, 2026, attacks so).

An edit inserts a few words of other prompts into a prompt. It is retained where the target's answer
stays the same and the drafter's tokens are accepted less often. The edited prompts are then decoded
with and without the guard, which shows how much acceptance depends on the wording and what the
guard saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from spectrain.decoding.generation import Generation
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
from spectrain_research.shared.guard import Guard

GUARDED = "guarded"
# words, each with the number of the prompt's own words before it
Insertions = list[tuple[int, str]]


@dataclass(frozen=True)
class Search:
    """The settings of the search; a report shows all of them."""

    tries: int  # edits of each prompt
    words: int = 4  # largest number of inserted words
    same: float = 0.9  # share of the answer's tokens that must stay the most likely ones
    seed: int = 0

    def __post_init__(self) -> None:
        for key, value in (("adversary", self.tries), ("adversary_words", self.words)):
            if value < 1:
                raise UserError(f"eval.{key}={value}: use 1 or more")
        if not 0 <= self.same <= 1:
            raise UserError(
                f"eval.adversary_same={self.same}: use 0 to 1, a share of the answer's tokens"
            )


@dataclass(frozen=True)
class EditedPrompt:
    """A prompt after the search, with the answers before and after it."""

    prompt: Prompt  # the edited first turn
    original_answer: Generation  # the drafted answer to the original prompt
    edited_answer: Generation  # the drafted answer to the edited prompt
    # share of the original answer's tokens that are the most likely ones after the edited prompt
    unchanged_share: float
    num_edits: int  # inserted words


def prompt_row(prompt: Prompt) -> dict[str, Any]:
    """Return the columns of a prompt of one turn, with everything that its chat template reads."""
    return {"turns": prompt.turns} if prompt.is_simple else prompt.opening_conversation.to_row()


class Adversary(EvalExtension):
    """Searches after all other decoding, with the drafter's own tree and rule."""

    def __init__(
        self, search: Search, prompts: Sequence[Prompt], max_new_tokens: int, checks: bool = True
    ) -> None:
        self.search, self.checks, self.max_new_tokens = search, checks, max_new_tokens
        self.prompts = [
            replace(prompt, turns=prompt.turns[:1])
            for prompt in prompts
            if prompt.turns and isinstance(prompt.turns[0], str)
        ]
        if not self.prompts:
            raise UserError(
                "eval.adversary: no prompt is plain text, whose words could be edited; give "
                "others as eval.prompts"
            )

    def report(self, results: Results) -> dict[str, Any]:
        target = results.candidate.target
        first = results.systems[0]
        unguarded = tuple(change for change in first.changes if change.part != "plan")
        system = replace(first, changes=unguarded)
        decoder = Decoder(target, system.rule.matching_rule())
        all_words = sorted(
            {word for prompt in self.prompts for word in str(prompt.turns[0]).split()}
        )
        edited_prompts = [
            self._search_edit(target, decoder, system, prompt, all_words, row)
            for row, prompt in enumerate(self.prompts, 1)
        ]
        guarded = replace(
            system,
            name=GUARDED,
            label=f"{system.label}, guarded",
            changes=(Guard(), *system.changes),
        )
        decoding = Interleaving(decoder, [system, guarded], [], None, self.max_new_tokens, 1)
        decoding.run([edited.prompt for edited in edited_prompts])
        write_lines(
            results.folder / "adversary.jsonl",
            [
                {
                    "id": edited.prompt.id,
                    "category": edited.prompt.category,
                    **prompt_row(edited.prompt),
                }
                for edited in edited_prompts
            ],
        )
        return {"adversary": self._summarize(target, edited_prompts, decoding)}

    def _search_edit(
        self,
        target: Target,
        decoder: Decoder,
        system: System,
        prompt: Prompt,
        all_words: list[str],
        row: int,
    ) -> EditedPrompt:
        """Find the edit that lowers the tokens per forward most, by trying one change after
        another.
        """
        random = Random(f"{self.search.seed} {prompt.id}")
        best: EditedPrompt | None = None
        words: Insertions = []
        for attempt in range(self.search.tries + 1):
            candidate = (
                self._change_words(words, str(prompt.turns[0]), all_words, random)
                if attempt
                else words
            )
            edited = replace(prompt, turns=[insert_words(str(prompt.turns[0]), candidate)])
            tokens = edited.tokenize_for(target)
            if len(tokens) + self.max_new_tokens > target.max_length:
                continue
            share = (
                1.0
                if best is None
                else share_of_likeliest(target, tokens, best.original_answer.output)
            )
            if share < self.search.same:
                continue
            (answer,) = decoder(system, [tokens], self.max_new_tokens, [row])
            if best is None:
                best = EditedPrompt(edited, answer, answer, share, 0)
            elif tokens_per_forward(answer) < tokens_per_forward(best.edited_answer):
                best = replace(
                    best,
                    prompt=edited,
                    edited_answer=answer,
                    unchanged_share=share,
                    num_edits=len(candidate),
                )
                words = candidate
        assert best is not None, "the original prompt fits"
        return best

    def _change_words(
        self, words: Insertions, text: str, all_words: list[str], random: Random
    ) -> Insertions:
        """Insert one more word or, at the largest number of words, replace one of them."""
        remaining = list(words)
        if len(remaining) == self.search.words:
            remaining.pop(random.randrange(len(remaining)))
        return sorted(
            [*remaining, (random.randint(0, len(text.split(" "))), random.choice(all_words))]
        )

    def _summarize(
        self, target: Target, prompts: list[EditedPrompt], decoding: Interleaving
    ) -> dict[str, Any]:
        """Summarize tokens per forward before and after, the changed answers, and the speed with
        and without the guard.
        """
        columns = metrics.acceptance_columns(
            [make_turn(prompt, prompt.edited_answer) for prompt in prompts]
        )
        before = metrics.acceptance_columns(
            [make_turn(prompt, prompt.original_answer) for prompt in prompts]
        )
        ratio = (columns[:, 0].sum() / columns[:, 1].sum()) / (
            before[:, 0].sum() / before[:, 1].sum()
        )
        entries = {
            name: SystemNumbers(**measure_system(turns, False, target.template)).to_json()
            for name, turns in decoding.turns.items()
        }
        identity = (
            check_identity(target, decoding.systems, decoding.turns, self.max_new_tokens)
            if self.checks
            else {}
        )
        return {
            **vars(self.search),
            "prompts": len(prompts),
            "edited": sum(prompt.num_edits > 0 for prompt in prompts),
            "same_tokens": round(
                sum(prompt.unchanged_share for prompt in prompts) / len(prompts), 4
            ),
            "same_answers": sum(
                prompt.original_answer.output == prompt.edited_answer.output for prompt in prompts
            ),
            "before": {"pooled": round(float(before[:, 0].sum() / before[:, 1].sum()), 4)},
            "after": {name: entry["acceptance_length"] for name, entry in entries.items()},
            "ratio": round(float(ratio), 4),
            "ratio_ci95": interval(np.concatenate([columns, before], axis=1), (1, -1, -1, 1)),
            "speedup": {name: entry["speedup"] for name, entry in entries.items()},
            "lossless": {name: prompt.summary() for name, prompt in identity.items()},
        }


def insert_words(text: str, words: Insertions) -> str:
    """Insert words into a text."""
    text_words = text.split(" ")
    for position, word in sorted(words, reverse=True):
        text_words.insert(position, word)
    return " ".join(text_words)


def share_of_likeliest(target: Target, prompt: list[int], answer: list[int]) -> float:
    """Return the share of an answer's tokens that are the target's most likely ones after this
    prompt.
    """
    likeliest = logits(target, (prompt, answer)).argmax(-1).tolist()
    return sum(token == answer_token for token, answer_token in zip(likeliest, answer)) / len(
        answer
    )


def tokens_per_forward(answer: Generation) -> float:
    """Return the mean tokens of an answer's complete rounds; 1 without any."""
    return (
        sum(answer.complete_round_lengths) / len(answer.complete_round_lengths)
        if answer.complete_round_lengths
        else 1.0
    )


def make_turn(edited: EditedPrompt, answer: Generation) -> Turn:
    """Make a turn of an answer, for metrics."""
    return Turn(edited.prompt.id, 0, edited.prompt.category, answer, answer)


def describe_adversary(result: dict[str, Any]) -> Iterator[str]:
    """Say what an edit of a few words takes from the drafter, and how much of it the guard
    restores.
    """
    before = result["before"]["pooled"]
    after = result["after"]["drafter"]["pooled"]
    speedup = result["speedup"]
    ratio = f"{result['ratio']:.2f} [{format_interval(result['ratio_ci95'])}]"
    yield (
        f"Adversary: {result['edited']} of {result['prompts']} prompts edited by at most "
        f"{result['words']} words, {before:.2f} tokens per forward before and {after:.2f} after, "
        f"{ratio} times as many; {result['same_tokens']:.1%} of the answers' tokens stay the most "
        f"likely ones, {result['same_answers']} answers are the same."
    )
    yield (
        f"Speedup at the edited prompts: {speedup['drafter']['ratio']:.2f} "
        f"[{format_interval(speedup['drafter']['ci95'])}], with the guard "
        f"{speedup['guarded']['ratio']:.2f} [{format_interval(speedup['guarded']['ci95'])}]."
    )


EXTENSION_NOTES["adversary"] = describe_adversary
