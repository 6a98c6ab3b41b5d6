"""The draft vocabulary, and what the target says in it. Shapes: B batch, T tokens, V draft vocabulary, R supervised rows.

Index t of a drafter that reads features has seen the target's state at t and predicts token t + 2 at its first draft step,
for token t + 1 is the target's own; at step k (from 0) it predicts token t + 2 + k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from spectrain.drafters.abilities import Abilities, DraftingCost, OnPolicy
from spectrain.drafters.base import Drafter, Losses
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import DivergenceResult, Projection, restrict_target

from .losses import ACCEPTANCE_LOSSES, TargetLogProbs, head_loss
from .output_layer import init_output_layer

if TYPE_CHECKING:
    from spectrain.models.head import Head
    from spectrain.models.target import Target


class VocabularyDrafter(Drafter):
    """A drafter whose head covers the tokens that the assistant uses most. The others cannot be drafted."""

    abilities = Abilities(on_policy=OnPolicy(learns_replays=True))
    d2t: Tensor
    t2d: Tensor
    divergence: str
    head: Head

    def add_vocabulary(self, size: int, target_size: int) -> None:
        """Buffers d2t [V], target id = draft id + d2t[draft id], and t2d [target vocabulary], True where it can be drafted."""
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(target_size, dtype=torch.bool))
        self.use_vocabulary(torch.arange(size))
        self.register_load_state_dict_post_hook(_check_vocabulary)

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

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings of tokens [..], in the drafter's own dtype: [.., D]."""
        with torch.no_grad():
            return self.head.embed(tokens).to(next(self.parameters()).dtype)


def _check_vocabulary(drafter: Any, _: Any) -> None:
    """Loaded ids are the target's: a stranger's files may say others, and a lookup would fail far from here."""
    ids = drafter.draft_ids
    if bool(((ids < 0) | (ids >= len(drafter.t2d))).any()):
        raise UserError(f"d2t: it leads outside of the target's {len(drafter.t2d)} tokens; copy the drafter's files again")


class SharedHeadDrafter(VocabularyDrafter):
    """Slots or heads that all speak through one output layer (`lm_down`, `lm_head`), which starts as the target's."""

    lm_down: Any  # nn.Linear | None
    lm_head: Any  # nn.Linear

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and copy the target's output layer."""
        ids = self.choose_vocabulary(token_counts)
        init_output_layer(self.lm_down, self.lm_head, self.head.output.weight[ids])


class HeadsDrafter(VocabularyDrafter):
    """A drafter with a head for every draft step, each whose output layer (`lm_down`, `lm_head`) starts as the target's."""

    heads: Any  # nn.ModuleList
    head_decay: float
    cost = DraftingCost(passes=lambda drafter, depth: min(1.0, depth / len(drafter.heads)))

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and copy the target's output layer into every head."""
        ids = self.choose_vocabulary(token_counts)
        first, *others = self.heads
        init_output_layer(first.lm_down, first.lm_head, self.head.output.weight[ids])
        for head in others:
            head.lm_head.load_state_dict(first.lm_head.state_dict())
            if first.lm_down is not None:
                head.lm_down.load_state_dict(first.lm_down.state_dict())

    def heads_loss(
        self, supervision: Supervision, head_inputs: Callable[[int], Tensor]
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Each head's loss on what its output layer reads at its supervised indices, weighted by head_decay^k, k from 1; hits
        and counts [K]."""
        terms = {}
        hits = torch.zeros(len(self.heads), device=supervision.labels.device)
        counts = torch.zeros_like(hits)
        for k, head in enumerate(self.heads):
            loss, right = supervision.judge_states(head_inputs(k), head.lm_head, supervision.label_index(k))
            terms[f"head{k}"] = self.head_decay ** (k + 1) * loss
            hits[k], counts[k] = right.sum(), len(right)
        return terms, hits, counts


class Supervision:
    """What a drafter should say at every position whose next token is supervised, worked out once for all draft steps.

    Either the target's distribution there, from its `final` features, or with cross_entropy the token of the data. Replayed
    drafts are judged by Draft-OPD's split loss.
    """

    def __init__(
        self,
        drafter: VocabularyDrafter,
        batch: Batch,
        final: Tensor | None = None,
        label_source: Literal["data", "target"] = "data",  # of a cross-entropy: the data's tokens, or the target's likeliest
    ) -> None:
        self.drafter, self.positions = drafter, batch.positions
        predicts = batch.next_is_supervised & (batch.positions > 0)  # the earliest prediction is made at index 0, for token 2
        self.row_index = torch.full(batch.tokens.shape, -1, dtype=torch.int64, device=batch.tokens.device)
        self.row_index[predicts] = torch.arange(int(predicts.sum()), device=batch.tokens.device)
        self.tokens_past_error, self.weight = (
            None if part is None else part.roll(-1, dims=1)[predicts] for part in (batch.tokens_past_error, batch.weight)
        )
        self.target_log_probs: TargetLogProbs | None = None
        if drafter.divergence == "cross_entropy" and label_source == "data" and self.tokens_past_error is None:
            self.labels = batch.tokens.roll(-1, dims=1)[predicts]
        else:
            if final is None:
                assert batch.features is not None
                final = batch.features.at_layer("final")
            own_mass = drafter.divergence in ACCEPTANCE_LOSSES
            self.labels, log_probs = restrict_target(final[predicts], drafter.head.projection, drafter.draft_ids, own_mass)
            self.target_log_probs = TargetLogProbs(log_probs)
        self.label_ids = torch.searchsorted(drafter.draft_ids, self.labels).clamp(
            max=len(drafter.draft_ids) - 1
        )  # any, if outside
        # Outside the draft vocabulary there is nothing right to say, so no loss; it counts as a miss.
        inside = drafter.t2d[self.labels]
        self.in_vocabulary = torch.ones_like(inside) if drafter.divergence in ACCEPTANCE_LOSSES else inside

    def _row_index_at(self, step: int) -> Tensor:
        """[B, T] the row of what index t predicts at a step; -1 where nothing is supervised."""
        shift = step + 1
        later = torch.where(self.positions >= shift, self.row_index, -1)[:, shift:]  # index t lies in the document of t + shift
        return torch.nn.functional.pad(later, (0, self.row_index.shape[1] - later.shape[1]), value=-1)

    def is_supervised(self, step: int) -> Tensor:
        """[B, T] bool, the indices supervised at a step."""
        return self._row_index_at(step) >= 0

    def label_index(self, step: int) -> Tensor:
        """[R] which rows answer the supervised indices of a step."""
        positions = self._row_index_at(step)
        return positions[positions >= 0]

    def join_steps(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """[R] the answers of the first `count` steps together in the order of the answers, where each comes from among the
        steps one after another, and its step. In this order the target is asked once for an answer that steps share."""
        answers = [self.label_index(step) for step in range(count)]
        answer, order = torch.cat(answers).sort(stable=True)
        return answer, order, torch.cat([torch.full_like(found, step) for step, found in enumerate(answers)])[order]

    def judge_states(
        self, hidden: Tensor, lm_head: nn.Linear, label_index: Tensor, row_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of states [R, D] under a drafter's output layer, and [R] which first choices are right.

        Row r is judged by answers[r], which ascend: draft steps that share answers are best judged together.
        """
        judged = self.judge_with_head(Projection(lm_head.weight, lm_head.bias), hidden, label_index, row_weight)
        return judged.loss, self.drafter.draft_ids[judged.predictions] == self.labels[label_index]

    def judge_steps(self, states: list[Tensor], lm_head: nn.Linear, decay: float, num_steps: int) -> Losses:
        """What `num_steps` draft steps under one output layer cost together, step i weighted by decay^i: of those that are made
        the states [R, D] at their supervised indices."""
        answer, order, step = self.join_steps(len(states))
        loss, right = self.judge_states(torch.cat(states).index_select(0, order), lm_head, answer, decay**step)
        return Losses.by_depth({self.drafter.divergence: loss}, right, step, num_steps)

    def judge_with_head(
        self, head: Projection, hidden: Tensor, label_index: Tensor, row_weight: Tensor | None = None
    ) -> DivergenceResult:
        """The same under any output layer over the draft vocabulary."""
        counted = self.in_vocabulary if self.weight is None else self.in_vocabulary * self.weight
        weight = counted[label_index] if row_weight is None else counted[label_index] * row_weight
        distance = None if self.tokens_past_error is None else self.tokens_past_error[label_index]
        theirs = None if self.target_log_probs is None else self.target_log_probs.select_rows(label_index)
        return head_loss(
            self.drafter.divergence, hidden, head, self.label_ids[label_index], theirs, distance, row_weight=weight
        )
