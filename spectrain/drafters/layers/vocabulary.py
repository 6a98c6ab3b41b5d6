"""The draft vocabulary, and a drafter's labels in it. Shapes: B batch, T tokens, V draft
vocabulary, R supervised rows.

A drafter that reads features predicts token t + 2 from the target's state at position t in its
first draft step, because the target itself predicts token t + 1. At step k, counted from 0, it
predicts token t + 2 + k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spectrain.drafters.base import Drafter, Losses
from spectrain.drafters.capabilities import Capabilities, DraftingCost
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import DivergenceResult, Projection, restrict_target
from spectrain.models.head import Head
from spectrain.models.host_copies import copy_to_device, on_host, select_joined, select_rows
from spectrain.models.target import Target
from spectrain.models.weight_block import apply_output_layer

from ..step_cost import OUTPUT_LAYERS, BatchShape, Judged, Run, StepCost
from .losses import ACCEPTANCE_LOSSES, TargetLogProbs, head_loss
from .output_layer import init_output_layer


class VocabularyDrafter(Drafter):
    """A drafter whose head covers only the tokens that the assistant uses most; it cannot draft
    the others.
    """

    capabilities = Capabilities(drafts_from_features=True)
    d2t: Tensor
    t2d: Tensor
    # The loss between the target's distribution and the drafter's; a constructor sets it.
    divergence: str
    # The target's embedding and output layer, which `target.head` lends; a constructor sets it.
    head: Head

    def add_vocabulary(self, size: int, target_size: int) -> None:
        """Add buffers d2t [V], target id - draft id of every draft id, and t2d [target
        vocabulary], True for draft tokens.
        """
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(target_size, dtype=torch.bool))
        # Until a vocabulary is chosen, its ids are the first ones.
        self.t2d[:size] = True
        self.register_load_state_dict_post_hook(_check_range)

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of every module over all tokens, and of the logits of the draft
        vocabulary.
        """
        return StepCost(
            [Run(self, batch.tokens, batch.length)], judge_rows(self, batch, batch.supervised)
        )

    def choose_vocabulary(self, token_counts: Tensor) -> Tensor:
        """Set the draft vocabulary to the most frequent tokens, and return their ids [V]."""
        ids = (
            token_counts.argsort(descending=True, stable=True)[: len(self.d2t)].sort().values.cpu()
        )
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True
        return ids

    @property
    def draft_ids(self) -> Tensor:
        """The target id [V] of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


def embed_as_target(drafter: VocabularyDrafter, tokens: Tensor) -> Tensor:
    """Embed tokens [..] with the target's embedding, in the drafter's type: [.., D]."""
    with torch.no_grad():
        return drafter.head.embed(tokens).to(next(drafter.parameters()).dtype)


def judge_rows(
    drafter: VocabularyDrafter, batch: BatchShape, rows: float, layers: int = 1
) -> Judged:
    """Return the logits of `rows` states under each of `layers` output layers, and of their
    labels.
    """
    labels = 0 if drafter.divergence == "cross_entropy" else batch.supervised
    # On a CPU the gradient of a trained output layer takes a transposed copy of the logits'
    # gradient, after the labels' logits are gone.
    is_trained = any(
        name.rpartition(".")[2] in OUTPUT_LAYERS
        and any(parameter.requires_grad for parameter in module.parameters())
        for name, module in drafter.named_modules()
    )
    copies = 2 if labels or is_trained else 1
    return Judged(
        rows, len(drafter.d2t), labels, copies=copies, layers=layers, is_trained=is_trained
    )


def _check_range(drafter: Any, _: Any) -> None:
    """Raise `UserError` if loaded ids are outside of the target's vocabulary, where later
    lookups would fail.
    """
    ids = drafter.draft_ids
    size = len(drafter.t2d)
    if bool(((ids < 0) | (ids >= size)).any()):
        raise UserError(
            f"d2t: some ids are not among the target's {size} tokens; copy the drafter's files "
            "again"
        )


def find_vocabulary_fault(weights: Mapping[str, Tensor]) -> str | None:
    """Describe how the draft vocabularies of a drafter's weights contradict themselves: two drafts
    are one token, or t2d marks other tokens than d2t names. Return None if they do not.
    """
    for name, offsets in weights.items():
        marks = weights.get(name.removesuffix("d2t") + "t2d")
        if name.rpartition(".")[2] != "d2t" or marks is None:
            continue
        ids = offsets + torch.arange(len(offsets))
        # Ids of no token are refused where they are loaded.
        if bool(((ids < 0) | (ids >= len(marks))).any()):
            continue
        if len(ids.unique()) < len(ids):
            return f"{name}: two of its drafts are the same token"
        if not is_marked(ids, marks):
            return f"{name.removesuffix('d2t')}t2d: it marks other tokens than those that d2t names"
    return None


def is_marked(ids: Tensor, marks: Tensor) -> bool:
    """Tell whether t2d is True at exactly these ids."""
    in_range = bool(((ids >= 0) & (ids < len(marks))).all())
    return in_range and int(marks.sum()) == len(ids) and bool(marks[ids].all())


class HeadsCost(DraftingCost):
    def num_passes(self, depth: float) -> float:
        return min(1.0, depth / len(self.drafter.heads))


class HeadsDrafter(VocabularyDrafter):
    """A drafter with a head for every draft step, each whose output layer (`lm_down`, `lm_head`)
    starts as the target's.
    """

    heads: Any  # nn.ModuleList
    head_decay: float
    capabilities = replace(VocabularyDrafter.capabilities, cost=HeadsCost)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and copy the target's output layer into every head."""
        ids = self.choose_vocabulary(token_counts)
        first, *others = self.heads
        init_output_layer(first.lm_down, first.lm_head, self.head.output.weight[ids])
        for head in others:
            head.lm_head.load_state_dict(first.lm_head.state_dict())
            if first.lm_down is not None:
                head.lm_down.load_state_dict(first.lm_down.state_dict())

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of every head, with an output layer of its own, over the supervised
        tokens.
        """
        heads = [Run(head, batch.supervised, 0) for head in self.heads]
        others = [
            Run(part, batch.tokens, batch.length)
            for name, part in self.named_children()
            if name != "heads"
        ]
        return StepCost(
            [*heads, *others], judge_rows(self, batch, batch.supervised, len(self.heads))
        )

    def heads_loss(
        self, supervision: Supervision, head_inputs: Callable[[int], Tensor]
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the losses of all heads, weighted by head_decay^k (k from 1), and their hits and
        counts [K].

        `head_inputs` returns the inputs of a head's output layer at its supervised positions.
        """
        terms = {}
        hits = torch.zeros(len(self.heads), device=supervision.labels.device)
        counts = torch.zeros_like(hits)
        draft_term = supervision.draft_term
        further_losses = []
        for k, head in enumerate(self.heads):
            inputs = head_inputs(k)
            label_index = supervision.label_index(k)
            loss, correct = supervision.judge_states(inputs, head.lm_head, label_index)
            terms[f"head{k}"] = self.head_decay ** (k + 1) * loss
            if draft_term is not None:
                further_losses.append(draft_term.loss(inputs, head.lm_head, label_index, k))
            hits[k], counts[k] = correct.sum(), len(correct)
        if draft_term is not None:
            terms[draft_term.name] = torch.stack(further_losses).sum()
        return terms, hits, counts


def shift_labels(labels: Tensor, positions: Tensor, step: int, none: int) -> Tensor:
    """Return labels [B, T], which stand at the states that a draft step predicts, at the positions
    t that predict them.

    Step `step` predicts the state at t + 1 + step. Where that is in another document, or nowhere,
    the label is `none`.
    """
    shift = step + 1
    # Position t must lie in the document of position t + shift.
    later = torch.where(positions >= shift, labels, none)[:, shift:]
    return torch.nn.functional.pad(later, (0, labels.shape[1] - later.shape[1]), value=none)


class Supervision:
    """Labels of a drafter at every position whose next token is supervised, computed once for all
    draft steps.

    A label is the target's distribution, from its `final` features, or for cross_entropy the token
    of the data. A source of batches may weigh and compare rows in its own way.
    """

    def __init__(
        self,
        drafter: VocabularyDrafter,
        batch: Batch,
        final: Tensor | None = None,
        # Labels of a cross-entropy: the data's tokens, or the target's most likely ones.
        label_source: Literal["data", "target"] = "data",
    ) -> None:
        self.drafter, self.piece = drafter, batch.piece
        self.device = batch.tokens.device
        self.positions = on_host(batch.positions)
        # The earliest prediction is that of token 2, at position 0. Rows are numbered on the host.
        chosen = batch.select_labels(on_host(batch.next_is_supervised) & (self.positions > 0))
        is_predicted = copy_to_device(chosen, self.device)
        rows = torch.full(chosen.shape, -1, dtype=torch.int64, device="cpu")
        rows[chosen] = torch.arange(int(chosen.sum()), device="cpu")
        self.row_index = copy_to_device(rows, self.device)
        self.rows = batch.row_loss(is_predicted)
        self.target_log_probs: TargetLogProbs | None = None
        if (
            drafter.divergence == "cross_entropy"
            and label_source == "data"
            and self.rows.divergence is None
        ):
            self.labels = select_rows(batch.tokens.roll(-1, dims=1), is_predicted)
        else:
            if final is None:
                assert batch.features is not None
                final = batch.features.at_layer("final")
            uses_target_mass = drafter.divergence in ACCEPTANCE_LOSSES
            self.labels, log_probs = restrict_target(
                select_rows(final, chosen[:, batch.feature_columns]),
                drafter.head.projection,
                drafter.draft_ids,
                uses_target_mass,
            )
            self.target_log_probs = TargetLogProbs(log_probs)
        # A label outside the draft vocabulary has an arbitrary id; it has no loss and counts as a
        # miss.
        self.label_ids = torch.searchsorted(drafter.draft_ids, self.labels).clamp(
            max=len(drafter.draft_ids) - 1
        )
        self.draft_term = batch.draft_term(is_predicted, drafter.draft_ids)
        in_vocabulary = drafter.t2d[self.labels]
        self.in_vocabulary = (
            torch.ones_like(in_vocabulary)
            if drafter.divergence in ACCEPTANCE_LOSSES
            else in_vocabulary
        )

    def _row_index_at(self, step: int) -> Tensor:
        """Return the row [B, t] of the label of every position that this process runs at a step,
        on the host; -1 where nothing is supervised.
        """
        labels = shift_labels(on_host(self.row_index), self.positions, step, -1)
        return self.piece.cut_columns(labels)

    def is_supervised(self, step: int) -> Tensor:
        """Return [B, T] bool: the positions that are supervised at a step, of those that this
        process runs.
        """
        return copy_to_device(self._row_index_at(step) >= 0, self.device)

    def label_index(self, step: int) -> Tensor:
        """Return the rows [R] of the labels of a step's supervised positions."""
        rows = self._row_index_at(step)
        return copy_to_device(rows[rows >= 0], self.device)

    def join_steps(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Join the labels of the first `count` steps, ordered by row, so that labels which steps
        share are computed once.

        Returns the rows [R] of the labels, their indices in the concatenated steps, and their
        steps.
        """
        step_labels = [on_host(self.label_index(step)) for step in range(count)]
        label_index, order = torch.cat(step_labels).sort(stable=True)
        steps = [torch.full_like(labels, step) for step, labels in enumerate(step_labels)]
        label_index, order, step = (
            copy_to_device(part, self.device)
            for part in (label_index, order, torch.cat(steps)[order])
        )
        return label_index, order, step

    def judge_states(
        self,
        hidden: Tensor,
        lm_head: nn.Linear,
        label_index: Tensor,
        row_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss of states [R, D] under a drafter's output layer, and which
        predictions are correct [R].

        State r has the label `label_index[r]`. The indices ascend, so draft steps that share labels
        are best joined.
        """
        result = apply_output_layer(
            lm_head,
            hidden,
            lambda head, states: self.judge_with_head(head, states, label_index, row_weight),
        )
        return result.loss, self.drafter.draft_ids[result.predictions] == self.labels[label_index]

    def judge_steps(
        self, states: list[Tensor], lm_head: nn.Linear, decay: float, num_steps: int
    ) -> Losses:
        """Return the losses of up to `num_steps` draft steps under one output layer, step i
        weighted by decay^i.

        `states` holds the states [R, D] at the supervised positions of every step that was run.
        """
        label_index, order, step = self.join_steps(len(states))
        hidden = select_joined(states, order)
        loss, correct = self.judge_states(hidden, lm_head, label_index, decay**step)
        terms = {self.drafter.divergence: loss}
        if self.draft_term is not None:
            terms[self.draft_term.name] = self.draft_term.loss(hidden, lm_head, label_index, step)
        return Losses.by_depth(terms, correct, step, num_steps)

    def judge_with_head(
        self,
        head: Projection,
        hidden: Tensor,
        label_index: Tensor,
        row_weight: Tensor | None = None,
    ) -> DivergenceResult:
        """Return the summed loss, predictions and labels of states [R, D] under any output layer
        over the draft vocabulary.
        """
        rows = self.rows.select_rows(label_index)
        weight = self.in_vocabulary[label_index]
        if rows.weight is not None:
            weight = weight * rows.weight
        if row_weight is not None:
            weight = weight * row_weight
        target_log_probs = (
            None
            if self.target_log_probs is None
            else self.target_log_probs.select_rows(label_index)
        )
        return head_loss(
            self.drafter.divergence,
            hidden,
            head,
            self.label_ids[label_index],
            target_log_probs,
            rows,
            row_weight=weight,
        )
