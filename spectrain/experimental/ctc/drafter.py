"""CTC drafting (Wen et al., 2024, arXiv 2412.00061): slots that say tokens or blanks, and what they collapse to.

Shapes: B batch, T tokens, R rows, N nodes, F new ones of them, D target width, V draft vocabulary, U drafts, K slots.
At index t all slots read the target's states up to t and the embedding of token t + 1; what they say, repeats merged and blanks
left out, are tokens t + 2 to t + 1 + U.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.config.values import Count, Number, Steps, VocabularySize
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capture, OnePassCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.heads import HeadMixer, StagedAdapter
from spectrain.drafters.layers.layers import ResBlock
from spectrain.drafters.layers.output_layer import make_output_layer, project_down
from spectrain.drafters.layers.vocabulary import SharedHeadDrafter, Supervision
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.kv_cache import TreeCache
from spectrain.trees.base import Draft, Rollout

if TYPE_CHECKING:
    from spectrain.models.target import Target

NEVER = -1e30  # the logarithm of a chance of nothing; finite, so that differences stay numbers
ENTRIES = 2**26  # of the matrices of logits that a training holds at a time


@dataclass(frozen=True)
class Prefixes:
    """Of every node's path, what the slots so far have said of it (Graves et al., 2006): the log-chance that the first t of
    them, t from 0 to K, collapse to it and end in its last token, or in a blank."""

    slots: Tensor  # [B, K, V + 1] log-probabilities, the blank's last
    in_token: Tensor  # [B, N, K + 1]
    in_blank: Tensor  # [B, N, K + 1]
    last: Tensor  # [B, N] the last token, -1 of an empty path

    @classmethod
    def empty(cls, slots: Tensor) -> Prefixes:
        """Of one node, whose path is empty: blanks alone collapse to it."""
        blanks = F.pad(slots[:, None, :, -1].cumsum(-1), (1, 0))
        return cls(slots, torch.full_like(blanks, NEVER), blanks, torch.full_like(slots[:, :1, 0], -1, dtype=torch.int64))

    def _before(self, repeated: Tensor) -> Tensor:
        """[B, N, K] the chance that the slots before each have said the path, so that a next token may begin there; one that
        repeats the path's last begins behind a blank alone."""
        blank, token = self.in_blank[..., :-1], self.in_token[..., :-1]
        return torch.where(repeated[..., None], blank, torch.logaddexp(blank, token))

    def next(self) -> Tensor:
        """[B, N, V] log-probabilities of the token after every path, given that there is one."""
        said = self.slots[..., :-1]
        before = self._before(torch.zeros_like(self.last, dtype=torch.bool))
        most = before.amax(-1, keepdim=True)
        chance = ((before - most).exp() @ said.exp()).clamp(min=1e-38).log() + most
        at_last = self._of(self.last.clamp(min=0))
        repeated = torch.logsumexp(self._before(torch.ones_like(self.last, dtype=torch.bool)) + at_last, dim=-1)
        chance = torch.where(
            (self.last[..., None] == torch.arange(said.shape[-1], device=said.device)), repeated[..., None], chance
        )
        return chance.log_softmax(-1)

    def _of(self, tokens: Tensor) -> Tensor:
        """[B, N, K] what the slots say of one token a node [B, N]."""
        places = tokens[:, None].expand(-1, self.slots.shape[1], -1)
        return self.slots.gather(2, places).transpose(1, 2)

    def whole(self) -> Tensor:
        """[B, N] the log-chance that all slots together collapse to a path and to no more."""
        return torch.logaddexp(self.in_token[..., -1], self.in_blank[..., -1])

    def extended(self, tokens: Tensor, parents: Tensor) -> Prefixes:
        """Of new nodes: their tokens [B, F] in draft ids, and their parents [B, F]."""
        rows = parents[..., None].expand(-1, -1, self.in_token.shape[-1])
        above = replace(
            self,
            in_token=self.in_token.gather(1, rows),
            in_blank=self.in_blank.gather(1, rows),
            last=self.last.gather(1, parents),
        )
        begins, said = above._before(tokens == above.last), self._of(tokens)
        token, blank = [torch.full_like(begins[..., 0], NEVER)], [torch.full_like(begins[..., 0], NEVER)]
        for slot in range(begins.shape[-1]):
            blank.append(torch.logaddexp(token[-1], blank[-1]) + self.slots[:, None, slot, -1])
            token.append(torch.logaddexp(token[-1], begins[..., slot]) + said[..., slot])
        return Prefixes(self.slots, torch.stack(token, dim=-1), torch.stack(blank, dim=-1), tokens)

    def joined(self, others: Prefixes) -> Prefixes:
        """These nodes and others of the same slots."""
        pairs = ((self.in_token, others.in_token), (self.in_blank, others.in_blank), (self.last, others.last))
        token, blank, last = (torch.cat(pair, dim=1) for pair in pairs)
        return Prefixes(self.slots, token, blank, last)


class Ctc(SharedHeadDrafter):
    """`num_slots` slots over a draft vocabulary and a blank, trained by CTC to say the next `num_drafts` tokens of the data in
    whichever of them (section 3.2); a layer over the target's states and attention over the slots stand before them. With y the
    tokens and a what the slots say, L = -log sum over all a that collapse to y of prod_k p_k(a_k).

    The authors collapse raw candidates and verify what is left (section 3.3); here the tree is grown of the exact chances of
    collapsed texts, which sum over all that slots could say, as in prefix search.
    """

    layers: tuple[Layer, ...] = ("final",)
    saved = SavedFiles(
        shape=("num_slots", "num_layers", "attention_layers", "adaptation_layers", "vocab_size", "head_rank"),
    )
    capabilities = replace(SharedHeadDrafter.capabilities, capture=Capture(state_names=("cache",)), on_policy=None)
    _cost_type = OnePassCost

    def __init__(
        self,
        target: Target,
        num_drafts: Steps = 4,
        num_slots: Steps = 8,  # one for each draft, and room for blanks
        num_layers: Number = 1,  # residual blocks of a slot
        attention_layers: Number = 1,  # over the slots of one index
        adaptation_layers: Number = 1,  # over the target's states
        vocab_size: VocabularySize = 32000,
        head_rank: Count | None = None,  # of the output layer (SlimSpec); None: full
    ) -> None:
        super().__init__()
        if num_slots < num_drafts:
            raise UserError(f"drafter.num_slots={num_slots}: {num_drafts} drafts want a slot each; use {num_drafts} or more")
        self.num_drafts, self.divergence, self.head = num_drafts, "cross_entropy", target.head
        vocab_size = min(vocab_size, target.head.vocab_size)
        self.adaptation = StagedAdapter(target, adaptation_layers)
        self.slots = nn.ModuleList(
            nn.Sequential(*(ResBlock(target.width) for _ in range(num_layers))) for _ in range(num_slots)
        )
        self.exchange = HeadMixer(target, num_slots, attention_layers)
        self.lm_down, self.lm_head = make_output_layer(target.width, vocab_size, head_rank)
        self.blank = nn.Linear(target.width, 1)
        self.add_vocabulary(vocab_size, target.head.vocab_size)
        self.cache: TreeCache | None = None

    @property
    def stages(self) -> list[Stage]:
        """The data alone is learnt: the target's states are read where something is said."""
        return [Stage.whole(self, self.layers)]

    # Training

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """-log of the chance that the slots collapse to the data's next tokens, at every index before an assistant's."""
        assert batch.features is not None
        final = batch.features.at_layer("final").to(self.lm_head.weight.dtype)
        stage = self.adaptation(final, self.embed(batch.tokens.roll(-1, dims=1)), batch.positions, lengths=batch.lengths)[-1]
        labels, told, inside = self.labels(Supervision(self, batch))
        rows = told > 0
        size = max(1, ENTRIES // (len(self.slots) * (len(self.d2t) + 1)))
        parts = list(zip(*(x[rows].split(size) for x in (stage, labels, told, inside))))
        terms = [
            self._judged(*part) if len(parts) == 1 else checkpoint(self._judged, *part, use_reentrant=False) for part in parts
        ]
        loss, hits, counts = (sum(part) for part in zip(*terms))
        return Losses({"ctc": loss}, hits, counts)

    def labels(self, supervision: Supervision) -> tuple[Tensor, Tensor, Tensor]:
        """Of every index: the next tokens in draft ids [B, T, U], how many of these are the assistant's, one behind another,
        and how many until the first that cannot be drafted [B, T]."""
        shape = (*supervision.row_index.shape, self.num_drafts)
        labels, right = supervision.row_index.new_zeros(shape), torch.zeros(shape, dtype=torch.bool, device=self.d2t.device)
        told = torch.zeros_like(right)
        for step in range(self.num_drafts):
            rows, answers = supervision.is_supervised(step), supervision.label_index(step)
            labels[..., step][rows], told[..., step][rows] = supervision.label_ids[answers], True
            right[..., step][rows] = supervision.in_vocabulary[answers]
        told = told.cumprod(-1)
        return labels, told.sum(-1), (told * right.cumprod(-1)).sum(-1)

    def _judged(self, stage: Tensor, labels: Tensor, told: Tensor, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The summed loss of rows [R, D], and of all drafts how many are right behind the true ones, of how many."""
        prefix, best, chances = Prefixes.empty(self.said(stage)), [], []
        for step in range(self.num_drafts):
            chances.append(prefix.whole())
            with torch.no_grad():
                best.append(prefix.next()[:, 0].argmax(-1))
            prefix = prefix.extended(labels[:, step, None], torch.zeros_like(labels[:, :1]))
        chance = torch.cat([*chances, prefix.whole()], dim=1).gather(1, inside[:, None])
        steps = torch.arange(self.num_drafts, device=labels.device)
        right = (torch.stack(best, dim=1) == labels) & (steps < inside[:, None])
        loss = -torch.where(chance > NEVER / 2, chance, 0.0).sum()  # too few slots for so many repeats: nothing to learn
        return loss, right.sum(0).float(), (steps < told[:, None]).sum(0).float()

    def said(self, stage: Tensor) -> Tensor:
        """[R, D] -> [R, K, V + 1] log-probabilities of every slot, the blank's last."""
        states = self.exchange(torch.stack([slot(stage) for slot in self.slots], dim=1))
        logits = torch.cat([self.lm_head(project_down(self.lm_down, states)), self.blank(states)], dim=-1)
        return logits.float().log_softmax(-1)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the states of what was just accepted; then all slots speak at the last of them."""
        self.cache = context.drafting_cache(self.cache, len(self.adaptation.layers), 0)
        final = context.fresh.at_layer("final").to(self.lm_head.weight.dtype)
        stage = self.adaptation(final, self.embed(context.following), self.cache.next_slots(final.shape[1]), self.cache)[-1]
        self.cache.commit(None, context.counts)
        return Draft(_Collapsed(self, self.said(context.newest(stage)[:, 0])))


class _Collapsed(Rollout):
    """One round: what may follow a path, by all that the slots could say."""

    def __init__(self, drafter: Ctc, slots: Tensor) -> None:
        self.draft_ids, self.depth_limit = drafter.draft_ids, drafter.num_drafts
        self.prefixes = Prefixes.empty(slots)

    def start(self) -> Tensor:
        return self.prefixes.next()

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        assert self.draft_ids is not None
        own = torch.searchsorted(self.draft_ids, tokens).clamp(max=len(self.draft_ids) - 1)
        new = self.prefixes.extended(own, parents)
        self.prefixes = self.prefixes.joined(new)
        return new.next()
