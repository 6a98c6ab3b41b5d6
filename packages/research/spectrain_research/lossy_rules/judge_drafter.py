"""A judge of drafts (Judge decoding, Bachmann et al., 2025, arXiv 2501.19309): a linear probe on
the target's last state.

Shapes: B batch, T tokens, P positions of a document, A alternatives at each, W tokens of a window,
R alternatives of a batch, D width. acceptance=judge uses the trained probe, with any drafter.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.copying.occurrences import build_trie
from spectrain.drafters.base import Drafter, Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capabilities, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.copies import GrowingTexts
from spectrain.drafters.layers.mask_blocks import MaskBlocks, add_blocks
from spectrain.drafters.step_cost import BatchShape, Judged, StepCost
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import argmax_and_log_z
from spectrain.models.features import Layer
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.randomness import sequence_generator
from spectrain.trees.rollout import Draft
from spectrain_research.lossy_rules.channel import draw_training_cost
from spectrain_research.lossy_rules.labels import COLUMN, GivenLabels
from spectrain_research.shared.purposes import JUDGED


class DraftJudge(Drafter):
    """sigma(w h + b) of the target's state h after a token: whether the text may continue from this
    token.

    The paper's labels are corrected answers. Here a token is right where it does not change the
    rest of the answer: at `places` tokens of every document, each of the target's `alternatives`
    likeliest other tokens replaces the text's token. It is right if the target's most likely tokens
    at it and at each of the `window` tokens after it are the same as in the text. On the target's
    greedy answers (spectrain data regenerate) this means that the rest of the greedy answer is
    unchanged. With `labels`, a file names the wrong pieces of answers, as in the paper. The loss is
    binary cross-entropy, `wrong_weight` times as large for wrong tokens (with 1, sigma is a
    probability); agreement is how often sigma > 1/2 is right. By itself it drafts copies of the
    text.

    With `channel` the judge also reads c, the logarithm of the time of an exchange over a radio
    channel, which is drawn anew for each text and step: sigma(w h + b + a c). The loss of rejecting
    a right token is exp(c) times as large. For the best weights sigma is P exp(c) / (P exp(c) +
    (1 - P) wrong_weight), P being the probability that the token is right.
    """

    saved = SavedFiles(shape=("channel",))
    layers: tuple[Layer, ...] = ()
    capabilities = Capabilities(is_copier=True, is_acceptance_probe=True)

    def __init__(
        self,
        target: Target,
        # Number of tokens after an alternative whose predictions must not change.
        window: int = 4,
        # Number of positions per document and step that are judged.
        places: int = 16,
        # Number of alternative tokens at each position.
        alternatives: int = 3,
        # Cost of accepting a wrong token, relative to that of rejecting a right one.
        wrong_weight: float = 1.0,
        # Seed of the random positions.
        seed: int = 0,
        # File of the training conversations whose rows have a column wrong: a list of the pieces of
        # the last answer that may not be accepted. All other tokens of the answers are right. Null
        # takes the labels from the target.
        labels: str | None = None,
        # Whether the judge also reads the state of a radio channel to the drafter
        # (acceptance.snr_db), by which rejecting a right token costs more where the channel is bad.
        channel: bool = False,
    ) -> None:
        super().__init__()
        for key, value in (("window", window), ("places", places), ("alternatives", alternatives)):
            if value < 1:
                raise UserError(f"drafter.{key}={value}: use 1 or more")
        if alternatives >= target.head.vocab_size:
            raise UserError(
                f"drafter.alternatives={alternatives}: the target has {target.head.vocab_size} "
                "tokens; use fewer"
            )
        if not wrong_weight > 0:
            raise UserError(f"drafter.wrong_weight={wrong_weight}: use more than 0")
        self.window = window
        self.num_positions = places
        self.alternatives = alternatives
        self.seed = seed
        self.wrong_weight = wrong_weight
        self.labels_path = labels
        self.given: GivenLabels | None = None
        self.probe = nn.Linear(target.width, 1)
        nn.init.zeros_(self.probe.weight)
        nn.init.zeros_(self.probe.bias)
        self.channel = nn.Parameter(torch.zeros(1)) if channel else None
        self.texts = GrowingTexts(3)

    # Training

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Read the given labels. Raise UserError for a target that cannot run the alternatives,
        and for labels that cannot be used.
        """
        target.require_layers("drafter=draft_judge, whose loss runs the target,")
        if self.labels_path is not None:
            self.given = GivenLabels(self.labels_path, target)
            self.capabilities = replace(self.capabilities, row_keys=(COLUMN,))

    @property
    def stages(self) -> list[Stage]:
        """One stage. The features yield the alternatives; the target runs them and the tokens
        after them in the loss.
        """
        return [Stage.single(self, ("final",), final_reach=0)]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Only the probe learns; the target runs over the text and its alternatives without
        gradients.
        """
        alternatives = self.num_positions * self.alternatives * (1 + self.window) * batch.texts
        rows = batch.tokens + alternatives
        return StepCost([], Judged(0, target.head.vocab_size, other_rows=rows), forward_rows=rows)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        states, is_right, weights = (
            self.judge_alternatives(batch, target, state)
            if self.given is None
            else self.judge_given(batch, self.given)
        )
        logits = self.probe(states.to(self.probe.weight.dtype))[:, 0].float()
        rejection_cost = torch.ones_like(logits)
        if self.channel is not None:
            costs = self.draw_channel_costs(batch, state.step).to(logits.device)
            logits = logits + self.channel * costs
            rejection_cost = costs.exp()
        weights = weights * torch.where(is_right, rejection_cost, self.wrong_weight)
        terms = {
            "judge": (
                weights
                * F.binary_cross_entropy_with_logits(logits, is_right.float(), reduction="none")
            ).sum()
        }
        if not len(states):  # no labels, but other processes wait for gradients
            terms["judge"] = 0 * torch.stack([part.sum() for part in self.parameters()]).sum()
        depths = torch.zeros_like(is_right, dtype=torch.int64)
        return Losses.by_depth(terms, (logits > 0) == is_right, depths, 1)

    def draw_channel_costs(self, batch: Batch, step: int) -> Tensor:
        """Draw a channel for each text, and return the logarithms [R] of the time of an exchange
        at what is judged of it.
        """
        costs = []
        for tokens, mask in batch.split_documents():
            if self.given is None:
                count = len(self.sample_ends(tokens, mask, step)) * self.alternatives
            else:
                count = int(is_judged(mask).sum())
            costs.append(torch.full((count,), draw_training_cost(self.seed, tokens, step)))
        return torch.cat(costs)

    @torch.no_grad()
    def judge_alternatives(
        self, batch: Batch, target: Target, state: TrainingState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the target's states at alternatives [R, D], whether each is right [R], and the
        weight of each [R].
        """
        blocks = self.make_blocks(batch, target, state)
        plan = ForwardPlan(
            layers=("final",),
            positions=blocks.positions,
            mask=blocks.visible,
            lengths=blocks.lengths,
        )
        final = target.run(blocks.tokens, plan).at_layer("final")
        predictions = argmax_and_log_z(final.flatten(0, 1), target.head.projection)[0].view_as(
            blocks.tokens
        )
        is_unchanged = F.pad(
            predictions == predictions.gather(1, blocks.anchor_index), (0, self.window)
        )
        is_right = is_unchanged.unfold(1, 1 + self.window, 1).all(-1)
        is_alternative = blocks.mask_index == 0
        return (
            final[is_alternative],
            is_right[is_alternative],
            blocks.loss_weights(is_alternative, batch),
        )

    def judge_given(self, batch: Batch, given: GivenLabels) -> tuple[Tensor, Tensor, Tensor]:
        """Return the target's states at the tokens of answers [R, D], whether each is right by the
        given labels [R], and equal weights [R].

        The last token of an answer is left out: no feature is read after it.
        """
        assert batch.features is not None
        final = batch.features.at_layer("final")
        rows = list(final) if batch.lengths is None else list(final[0].split(batch.lengths))
        states = []
        labels = []
        for (tokens, mask), own in zip(batch.split_documents(), rows):
            judged = is_judged(mask)
            states.append(own[judged.to(own.device)])
            labels.append(given.find(tokens, mask)[judged])
        is_right = torch.cat(labels).to(final.device)
        return torch.cat(states), is_right, torch.ones(len(is_right), device=final.device)

    def make_blocks(self, batch: Batch, target: Target, state: TrainingState) -> MaskBlocks:
        """Make the batch with alternatives after some of its prefixes, each followed by the
        text's next tokens.
        """
        assert batch.features is not None
        final = batch.features.at_layer("final")
        rows = list(final) if batch.lengths is None else list(final[0].split(batch.lengths))
        prefixes = []
        next_tokens = []
        alternatives = []
        for (tokens, mask), states in zip(batch.split_documents(), rows):
            ends = self.sample_ends(tokens, mask, state.step)
            alternatives.append(
                self.likeliest_others(
                    target.head.logits(states[ends.to(states.device)]),
                    tokens[ends + 1].to(states.device),
                )
            )
            prefixes.append(
                [(end, 1 + self.window) for end in ends.tolist() for _ in range(self.alternatives)]
            )
            next_tokens.append(
                [
                    token
                    for end, size in prefixes[-1]
                    for token in tokens[end + 1 : end + 1 + size].tolist()
                ]
            )
        blocks = add_blocks(batch, prefixes, next_tokens)
        return replace(
            blocks,
            tokens=blocks.tokens.masked_scatter(blocks.mask_index == 0, torch.cat(alternatives)),
        )

    def likeliest_others(self, logits: Tensor, own: Tensor) -> Tensor:
        """Return the likeliest tokens [P, A] by `logits` [P, V] without the text's `own` [P]."""
        ranked = logits.topk(self.alternatives + 1).indices
        order = (ranked == own[:, None]).long().argsort(dim=1, stable=True)
        return ranked.gather(1, order)[:, : self.alternatives]

    def sample_ends(self, tokens: Tensor, mask: Tensor, step: int) -> Tensor:
        """Sample the positions [P] at which prefixes end, keyed by the document's tokens and the
        step.

        The next token and the window after it are the assistant's.
        """
        is_supervised = (
            mask[1:].unfold(0, 1 + self.window, 1).all(-1)
            if len(mask) > 1 + self.window
            else mask[:0]
        )
        candidates = is_supervised.nonzero()[:, 0]
        source = sequence_generator(JUDGED, self.seed, tokens, step)
        return (
            candidates[
                torch.randperm(len(candidates), generator=source, device="cpu")[
                    : self.num_positions
                ]
            ]
            .sort()
            .values
        )

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Draft by prompt lookup, as drafter=ngram does."""
        self.texts.append_committed(context)
        depth = context.builder.depth
        return Draft(
            continuations=[
                build_trie(row.find_occurrences(depth, 64, 1)) for row in self.texts.rows
            ]
        )


def is_judged(mask: Tensor) -> Tensor:
    """Mark the tokens of answers by their mask [T], without the last one of each, after which no
    feature is read.
    """
    return mask.bool() & F.pad(mask.bool()[1:], (0, 1))
