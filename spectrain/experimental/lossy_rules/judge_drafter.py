"""A judge of drafts (Judge decoding, Bachmann et al., 2025, arXiv 2501.19309): a linear probe on the target's last state.

Shapes: B batch, T tokens, P places of a document, A alternatives at each, W tokens of a window, R alternatives of a batch, D
width. acceptance=judge decodes with what is trained here, beside any drafter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.drafters.base import Drafter, Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.context import Context
from spectrain.drafters.layers.copies import GrowingTexts, build_trie
from spectrain.drafters.layers.masks import MaskBlocks, add_blocks
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import argmax_and_log_z
from spectrain.models.features import Layer
from spectrain.models.forward_plan import ForwardPlan
from spectrain.randomness import JUDGED, sequence_generator
from spectrain.trees.base import Draft

if TYPE_CHECKING:
    from spectrain.models.target import Target


class DraftJudge(Drafter):
    """sigma(w h + b) of the state h that the target has after reading a token: whether the text may go on from it.

    The paper's labels are corrected answers. For lack of them, here a token is right where it leaves the rest of the answer as
    it is: at `places` tokens of every document each of the target's `alternatives` likeliest other tokens stands in place of
    the text's own, and is right if the target's likeliest token at it and at each of the `window` tokens behind it is the one
    that it is in the text. On the target's own greedy answers (spectrain data regenerate) that is: the rest of the greedy
    answer stays. The loss is binary cross-entropy, `wrong_weight` times as much for what is wrong (with 1, sigma is a
    probability); agreement is how often sigma > 1/2 is right. What it drafts by itself are copies of the text, for a drafter
    it is not.
    """

    layers: tuple[Layer, ...] = ()
    capabilities = Capabilities(is_copier=True, is_acceptance_probe=True)

    def __init__(
        self,
        target: Target,
        window: int = 4,  # tokens behind an alternative that must stay as they are
        places: int = 16,  # of each document at a step
        alternatives: int = 3,  # at a place
        wrong_weight: float = 1.0,  # what keeping a wrong token costs, where losing a right one costs 1
        seed: int = 0,
    ) -> None:
        super().__init__()
        for key, value in (("window", window), ("places", places), ("alternatives", alternatives)):
            if value < 1:
                raise UserError(f"drafter.{key}={value}: use 1 or more")
        if alternatives >= target.head.vocab_size:
            raise UserError(f"drafter.alternatives={alternatives}: the target has {target.head.vocab_size} tokens; use fewer")
        if not wrong_weight > 0:
            raise UserError(f"drafter.wrong_weight={wrong_weight}: use more than 0")
        self.window, self.places, self.alternatives, self.seed = window, places, alternatives, seed
        self.wrong_weight = wrong_weight
        self.probe = nn.Linear(target.width, 1)
        nn.init.zeros_(self.probe.weight)
        nn.init.zeros_(self.probe.bias)
        self.texts = GrowingTexts(3)

    # Training

    @property
    def stages(self) -> list[Stage]:
        """The alternatives are the target's, which is asked at the text's own tokens; what follows them runs in the loss."""
        return [Stage.whole(self, ("final",), final_reach=0)]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        states, right, weights = self.judged(batch, target, state)
        logits = self.probe(states.to(self.probe.weight.dtype))[:, 0].float()
        weights = weights * torch.where(right, 1.0, self.wrong_weight)
        terms = {"judge": (weights * F.binary_cross_entropy_with_logits(logits, right.float(), reduction="none")).sum()}
        if not len(states):  # nothing to learn from: other processes still wait for gradients
            terms["judge"] = 0 * (self.probe.weight.sum() + self.probe.bias.sum())
        depths = torch.zeros_like(right, dtype=torch.int64)
        return Losses.by_depth(terms, (logits > 0) == right, depths, 1)

    @torch.no_grad()
    def judged(self, batch: Batch, target: Target, state: TrainingState) -> tuple[Tensor, Tensor, Tensor]:
        """The target's states at alternatives [R, D], whether each is right [R], and what each counts [R]."""
        blocks = self.blocks(batch, target, state)
        plan = ForwardPlan(layers=("final",), positions=blocks.positions, mask=blocks.visible, lengths=blocks.lengths)
        final = target.run(blocks.tokens, plan).at_layer("final")
        best = argmax_and_log_z(final.flatten(0, 1), target.head.projection)[0].view_as(blocks.tokens)
        same = F.pad(best == best.gather(1, blocks.anchor_index), (0, self.window))
        right, first = same.unfold(1, 1 + self.window, 1).all(-1), blocks.mask_index == 0
        return final[first], right[first], blocks.loss_weights(first, batch)

    def blocks(self, batch: Batch, target: Target, state: TrainingState) -> MaskBlocks:
        """The batch with alternatives behind some of its prefixes, each with the text's own next tokens behind it."""
        assert batch.features is not None
        final = batch.features.at_layer("final")
        rows = list(final) if batch.lengths is None else list(final[0].split(batch.lengths))
        prefixes, said, others = [], [], []
        for (tokens, mask), states in zip(batch.split_documents(), rows):
            ends = self.ends(tokens, mask, state.step)
            others.append(self.others(target.head.logits(states[ends.to(states.device)]), tokens[ends + 1].to(states.device)))
            prefixes.append([(end, 1 + self.window) for end in ends.tolist() for _ in range(self.alternatives)])
            said.append([word for end, size in prefixes[-1] for word in tokens[end + 1 : end + 1 + size].tolist()])
        blocks = add_blocks(batch, prefixes, said)
        return replace(blocks, tokens=blocks.tokens.masked_scatter(blocks.mask_index == 0, torch.cat(others)))

    def others(self, logits: Tensor, own: Tensor) -> Tensor:
        """The likeliest tokens [P, A] by `logits` [P, V] that are not the text's `own` [P]."""
        ranked = logits.topk(self.alternatives + 1).indices
        order = (ranked == own[:, None]).long().argsort(dim=1, stable=True)
        return ranked.gather(1, order)[:, : self.alternatives]

    def ends(self, tokens: Tensor, mask: Tensor, step: int) -> Tensor:
        """Positions [P] that prefixes end at: random ones, for the document's own tokens and the step, of those whose next
        token and the window behind it are all the assistant's."""
        whole = mask[1:].unfold(0, 1 + self.window, 1).all(-1) if len(mask) > 1 + self.window else mask[:0]
        found = whole.nonzero()[:, 0]
        source = sequence_generator(JUDGED, self.seed, tokens, step)
        return found[torch.randperm(len(found), generator=source)[: self.places]].sort().values

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Prompt lookup, as drafter=ngram."""
        self.texts.append_committed(context)
        depth = context.builder.depth
        return Draft(continuations=[build_trie(row.find_occurrences(depth, 64, 1)) for row in self.texts.rows])
