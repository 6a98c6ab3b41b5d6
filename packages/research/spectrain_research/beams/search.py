"""Beam search over one text, as transformers' `generate(num_beams=K)` runs it. Shapes: K beams, V
vocabulary, C candidates.

The class knows no model: it takes the log-probabilities after every beam and says which
continuations go on. Plain and drafted decoding take the same steps through it, so that they cannot
differ in anything but the forwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Score of beams and hypotheses that do not exist.
MISSING = -1e9

Constraint = Callable[[list[int]], list[int]]
"""Returns the tokens that may follow the answer so far."""
Chooser = Callable[[Tensor], Tensor]
"""Chooses candidates [C] of all continuations, from their accumulated log-probabilities [K V]."""


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a beam search, with the meaning that they have in transformers."""

    num_beams: int
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    constraint: Constraint | None = None

    @property
    def num_candidates(self) -> int:
        """The number of best continuations of a step, so many that K of them go on even if
        others stop.
        """
        return max(2, 1 + len(self.stop_ids)) * self.num_beams


class BeamSearch:
    """The beams of one text and the hypotheses that have ended, the best first."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        count = settings.num_beams
        self.beams: list[list[int]] = [[] for _ in range(count)]
        # All beams are equal before the first step, so that only the first one counts.
        self.scores = torch.full((count,), MISSING)
        self.scores[0] = 0.0
        self.finished: list[list[int]] = [[] for _ in range(count)]
        self.finished_scores = torch.full((count,), MISSING)
        self.is_finished = torch.zeros(count, dtype=torch.bool)
        self.num_steps = 0
        self.can_improve = True
        self.is_done = False

    def accumulate_scores(self, log_probs: Tensor) -> Tensor:
        """Add the beams' scores to log-probabilities [K, V] of the next token, which the
        constraint restricts; [K V].
        """
        if self.settings.constraint is not None:
            log_probs = restrict_tokens(log_probs, self.beams, self.settings.constraint)
        return (log_probs.cpu() + self.scores[:, None]).flatten()

    def take_step(self, log_probs: Tensor, choose: Chooser | None = None) -> list[tuple[int, int]]:
        """Take one step from log-probabilities [K, V] after every beam; return the beam and the
        token that each beam is now.

        `choose` chooses the candidates; by default they are the most likely ones.
        """
        totals = self.accumulate_scores(log_probs)
        count = self.settings.num_beams
        chosen = self._choose_best(totals) if choose is None else choose(totals)
        sources = chosen // log_probs.shape[-1]
        tokens = chosen % log_probs.shape[-1]
        sequences = [
            [*self.beams[beam], token] for beam, token in zip(sources.tolist(), tokens.tolist())
        ]
        self.num_steps += 1
        ends = torch.tensor([self._has_ended(sequence) for sequence in sequences])
        values = totals[chosen]
        self._add_hypotheses(sequences, values, ends)
        running = values + ends * MISSING
        order = running.topk(min(count, len(running))).indices
        order = torch.cat([order, order[-1:].expand(count - len(order))])
        self.scores = running[order]
        self.scores[len(running) :] = MISSING
        self.beams = [sequences[index] for index in order.tolist()]
        self._check_end(bool(ends.all()))
        return list(zip(sources[order].tolist(), tokens[order].tolist()))

    @property
    def is_alive(self) -> list[bool]:
        """Whether each beam exists; the others fill the batch."""
        return [score > MISSING / 2 for score in self.scores.tolist()]

    @property
    def hypotheses(self) -> list[list[int]]:
        """The sequences that have ended, the best first."""
        return [tokens for tokens, done in zip(self.finished, self.is_finished.tolist()) if done]

    def _choose_best(self, totals: Tensor) -> Tensor:
        """Choose the most likely candidates [C] of all continuations."""
        return totals.topk(min(self.settings.num_candidates, len(totals))).indices

    def _has_ended(self, sequence: list[int]) -> bool:
        return (
            sequence[-1] in self.settings.stop_ids or len(sequence) >= self.settings.max_new_tokens
        )

    def _add_hypotheses(self, sequences: list[list[int]], values: Tensor, ends: Tensor) -> None:
        """Merge the candidates that have ended, of the first K, with earlier hypotheses; the
        best K remain.
        """
        count = self.settings.num_beams
        is_new = ends & (torch.arange(len(ends)) < count) & (values > MISSING / 2)
        scores = values / self.num_steps**self.settings.length_penalty
        if not self.can_improve:
            scores = scores + MISSING
        scores = scores.masked_fill(~is_new, MISSING)
        merged = torch.cat([self.finished_scores, scores])
        best = merged.topk(count).indices
        candidates = [*self.finished, *sequences]
        self.finished = [candidates[index] for index in best.tolist()]
        self.finished_scores = merged[best]
        self.is_finished = torch.cat([self.is_finished, is_new])[best]

    def _check_end(self, all_ended: bool) -> None:
        """Stop where no beam goes on, or where none can be better than the worst hypothesis at
        the present length.
        """
        best_running = self.scores[0] / self.num_steps**self.settings.length_penalty
        worst = torch.where(self.is_finished, self.finished_scores.min(), torch.tensor(MISSING))
        self.can_improve = self.can_improve and bool((best_running > worst).any())
        self.is_done = all_ended or not self.can_improve or not any(self.is_alive)


def restrict_tokens(
    log_probs: Tensor, sequences: list[list[int]], constraint: Constraint
) -> Tensor:
    """Return log-probabilities [K, V] after sequences, -inf for tokens that the constraint
    forbids.
    """
    restricted = torch.full_like(log_probs, float("-inf"))
    for row, sequence in enumerate(sequences):
        allowed = torch.tensor(constraint(sequence), device=log_probs.device)
        restricted[row, allowed] = log_probs[row, allowed]
    return restricted
