"""The draft vocabulary, and what the target says in it. Shapes: B batch, T tokens, V draft vocabulary, R supervised rows.

Index t of a drafter that reads features has seen the target's state at t and predicts token t + 2 at its first draft step,
for token t + 1 is the target's own; at step k (from 0) it predicts token t + 2 + k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..features import Batch
from ..losses import UNNORMALISED, row_losses
from .base import Drafter

if TYPE_CHECKING:
    from ..target import Head, Target


class VocabularyDrafter(Drafter):
    """A drafter whose head covers the tokens that the assistant uses most. The others cannot be drafted."""

    learns_replays = True
    d2t: Tensor
    t2d: Tensor
    divergence: str
    head: Head

    def add_vocabulary(self, size: int, target_size: int) -> None:
        """Buffers d2t [V], target id = draft id + d2t[draft id], and t2d [target vocabulary], True where it can be drafted."""
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(target_size, dtype=torch.bool))
        self.use_vocabulary(torch.arange(size))

    def use_vocabulary(self, ids: Tensor) -> None:
        """Draft these target ids, ascending."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def choose_vocabulary(self, token_counts: Tensor) -> Tensor:
        """Take the most frequent tokens; their ids [V]."""
        ids = token_counts.argsort(descending=True, stable=True)[: len(self.d2t)].sort().values.cpu()
        self.use_vocabulary(ids)
        return ids

    @property
    def draft_ids(self) -> Tensor:
        """[V] the target id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


class HeadsDrafter(VocabularyDrafter):
    """A drafter with a head for every draft step, each with an output layer `lm_head` that starts as the target's own."""

    heads: Any  # nn.ModuleList
    head_decay: float

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and copy the target's output layer into every head."""
        ids = self.choose_vocabulary(token_counts)
        with torch.no_grad():
            for head in self.heads:
                head.lm_head.weight.copy_(self.head.output.weight[ids])

    def draft_passes(self, depth: float) -> float:
        return min(1.0, depth / len(self.heads))

    def heads_loss(self, wanted: Supervision, inputs: Callable[[int], Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Each head's loss on `inputs` of its supervised indices, weighted by head_decay^k, k from 1; hits and counts [K]."""
        terms = {}
        hits = torch.zeros(len(self.heads), device=wanted.best.device)
        counts = torch.zeros_like(hits)
        for k, head in enumerate(self.heads):
            log_q = head(inputs(k).to(head.lm_head.weight.dtype)).float().log_softmax(-1)
            loss, hits[k], counts[k] = wanted.judge(k, log_q)
            terms[f"head{k}"] = self.head_decay ** (k + 1) * loss
        return terms, hits, counts


class Supervision:
    """What a drafter should say at every position whose next token is supervised, worked out once for all draft steps.

    Either the target's distribution there, from its `final` features, or with cross_entropy the token of the data. Replayed
    drafts are judged by Draft-OPD's split loss.
    """

    def __init__(self, drafter: VocabularyDrafter, batch: Batch, final: Tensor | None = None) -> None:
        self.drafter, self.length = drafter, batch.tokens.shape[1]
        predicts = batch.predicts.clone()
        predicts[:, 0] = False  # the earliest prediction a drafter can make is from index 0, for token 2
        self.row_of = torch.full(batch.tokens.shape, -1, dtype=torch.int64, device=batch.tokens.device)
        self.row_of[predicts] = torch.arange(int(predicts.sum()), device=batch.tokens.device)
        self.log_p: Tensor | None = None
        self.distance = None if batch.distance is None else batch.distance.roll(-1, dims=1)[predicts]
        if drafter.divergence == "cross_entropy" and self.distance is None:
            self.best = batch.tokens.roll(-1, dims=1)[predicts]
            inside = drafter.t2d[self.best]
        else:
            if final is None:
                assert batch.features is not None
                final = batch.features.at("final")
            self.log_p, self.best, inside = self._ask(final[predicts])
        # Outside the draft vocabulary there is nothing right to say, so no loss; it counts as a miss.
        self.inside = torch.ones_like(inside) if drafter.divergence in UNNORMALISED else inside

    @torch.no_grad()
    def _ask(self, final: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log p over the draft vocabulary [R, V], the target's most likely token [R], and whether it can be drafted [R]."""
        ids = self.drafter.draft_ids
        log_p, best = [final.new_zeros(0, len(ids))], [final.new_zeros(0, dtype=torch.int64)]
        for rows in final.split(2048):  # bounds the [rows, target vocabulary] logits
            logits = self.drafter.head.logits(rows)
            chosen = logits[:, ids]
            whole = self.drafter.divergence in UNNORMALISED
            log_p.append(chosen - torch.logsumexp(logits if whole else chosen, -1, keepdim=True))
            best.append(logits.argmax(-1))
        found = torch.cat(best)
        return torch.cat(log_p), found, self.drafter.t2d[found]

    def _positions(self, step: int) -> Tensor:
        """[B, T] the row of what index t predicts at a step; -1 where nothing is supervised."""
        shift = step + 1
        rows = torch.full_like(self.row_of, -1)
        rows[:, : max(0, self.length - shift)] = self.row_of[:, shift:]
        return rows

    def rows(self, step: int) -> Tensor:
        """[B, T] bool, the indices supervised at a step."""
        return self._positions(step) >= 0

    def answers(self, step: int) -> Tensor:
        """[R] which rows answer the supervised indices of a step."""
        positions = self._positions(step)
        return positions[positions >= 0]

    def judge(self, step: int, log_q: Tensor) -> tuple[Tensor, Tensor, int]:
        """The loss of log q [R, V] at the supervised indices of a step, summed; how many first choices are right; R."""
        rows = self.answers(step)
        best, inside = self.best[rows], self.inside[rows]
        if self.log_p is None:
            slots = torch.searchsorted(self.drafter.draft_ids, best).clamp(max=log_q.shape[-1] - 1)  # any, where outside
            losses = -log_q.gather(-1, slots[:, None])[:, 0]
        else:
            distance = None if self.distance is None else self.distance[rows]
            losses = row_losses(self.drafter.divergence, self.log_p[rows], log_q, distance)
        hits = (self.drafter.draft_ids[log_q.argmax(-1)] == best).sum()
        return torch.where(inside, losses, 0.0).sum(), hits, len(best)
