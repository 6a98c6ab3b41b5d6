"""CTC drafting (Wen et al., 2024, arXiv 2412.00061): slots predict tokens or blanks, which collapse
to the drafted text.

Shapes: B batch, T tokens, R rows, N nodes, F new ones of them, D target width, V draft vocabulary,
U drafts, K slots. At index t all slots read the target's states up to t and the embedding of token
t + 1. Their predictions, with repeats merged and blanks removed, are tokens t + 2 to t + 1 + U.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.config.values import OptionalLayers, Steps, VocabularySize, Width
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capture, OnePassCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.heads import ResBlock
from spectrain.drafters.layers.output_layer import make_output_layer, project_down
from spectrain.drafters.layers.vocabulary import Supervision, embed_as_target
from spectrain.drafters.step_cost import BatchShape, Judged, Run, StepCost
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.host_copies import chosen_rows, select_rows
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, Rollout
from spectrain_research.shared.head_layers import HeadMixer, SharedHeadDrafter, StagedAdapter
from spectrain_research.shared.on_policy import find_on_policy

LOG_ZERO = -1e30  # the logarithm of probability 0; finite, so that differences are no NaN
MAX_LOGITS = 2**26  # logits that training holds at a time


@dataclass(frozen=True)
class Prefixes:
    """Log-probabilities that the first t slots, t from 0 to K, collapse to each node's path (Graves
    et al., 2006).

    They are separate for slots that end in the path's last token and for those that end in a blank.
    """

    slots: Tensor  # [B, K, V + 1] log-probabilities, the blank's last
    in_token: Tensor  # [B, N, K + 1]
    in_blank: Tensor  # [B, N, K + 1]
    last: Tensor  # [B, N] the last token, -1 of an empty path

    @classmethod
    def from_slots(cls, slots: Tensor) -> Prefixes:
        """Make the prefixes of the root, whose path is empty: only blanks collapse to it."""
        blanks = F.pad(slots[:, None, :, -1].cumsum(-1), (1, 0))
        return cls(
            slots,
            torch.full_like(blanks, LOG_ZERO),
            blanks,
            torch.full_like(slots[:, :1, 0], -1, dtype=torch.int64),
        )

    def _prefix_log_probs(self, repeated: Tensor) -> Tensor:
        """Return [B, N, K], the log-probability that the slots before each one collapse to the
        path.

        A next token may begin at that slot. One that repeats the path's last token can begin only
        after a blank.
        """
        blank = self.in_blank[..., :-1]
        token = self.in_token[..., :-1]
        return torch.where(repeated[..., None], blank, torch.logaddexp(blank, token))

    def next_log_probs(self) -> Tensor:
        """Return log-probabilities [B, N, V] of the token after every path, given that there is
        one.
        """
        token_log_probs = self.slots[..., :-1]
        prefix = self._prefix_log_probs(torch.zeros_like(self.last, dtype=torch.bool))
        largest = prefix.amax(-1, keepdim=True)
        log_probs = ((prefix - largest).exp() @ token_log_probs.exp()).clamp(
            min=1e-38
        ).log() + largest
        at_last = self._token_log_probs(self.last.clamp(min=0))
        repeated = torch.logsumexp(
            self._prefix_log_probs(torch.ones_like(self.last, dtype=torch.bool)) + at_last, dim=-1
        )
        log_probs = torch.where(
            (
                self.last[..., None]
                == torch.arange(token_log_probs.shape[-1], device=token_log_probs.device)
            ),
            repeated[..., None],
            log_probs,
        )
        return log_probs.log_softmax(-1)

    def _token_log_probs(self, tokens: Tensor) -> Tensor:
        """Return the slots' log-probabilities [B, N, K] of one token per node [B, N]."""
        indices = tokens[:, None].expand(-1, self.slots.shape[1], -1)
        return self.slots.gather(2, indices).transpose(1, 2)

    def full_log_probs(self) -> Tensor:
        """Return [B, N], the log-probability that all slots together collapse to exactly the
        path.
        """
        return torch.logaddexp(self.in_token[..., -1], self.in_blank[..., -1])

    def extend_paths(self, tokens: Tensor, parents: Tensor) -> Prefixes:
        """Return the prefixes of new nodes, given their tokens [B, F] in draft ids and their
        parents [B, F].
        """
        rows = parents[..., None].expand(-1, -1, self.in_token.shape[-1])
        above = replace(
            self,
            in_token=self.in_token.gather(1, rows),
            in_blank=self.in_blank.gather(1, rows),
            last=self.last.gather(1, parents),
        )
        prefix = above._prefix_log_probs(tokens == above.last)
        token_log_probs = self._token_log_probs(tokens)
        in_token = [torch.full_like(prefix[..., 0], LOG_ZERO)]
        in_blank = [torch.full_like(prefix[..., 0], LOG_ZERO)]
        for slot in range(prefix.shape[-1]):
            in_blank.append(
                torch.logaddexp(in_token[-1], in_blank[-1]) + self.slots[:, None, slot, -1]
            )
            in_token.append(
                torch.logaddexp(in_token[-1], prefix[..., slot]) + token_log_probs[..., slot]
            )
        return Prefixes(
            self.slots, torch.stack(in_token, dim=-1), torch.stack(in_blank, dim=-1), tokens
        )

    def concat_nodes(self, others: Prefixes) -> Prefixes:
        """Concatenate these nodes and other nodes of the same slots."""
        pairs = (
            (self.in_token, others.in_token),
            (self.in_blank, others.in_blank),
            (self.last, others.last),
        )
        in_token, in_blank, last = (torch.cat(pair, dim=1) for pair in pairs)
        return Prefixes(self.slots, in_token, in_blank, last)


class Ctc(SharedHeadDrafter):
    """Slots over a draft vocabulary and a blank, trained by CTC to predict the next `num_drafts`
    tokens (section 3.2).

    A layer over the target's states and attention over the slots precede them. With y the tokens
    and a the slots' predictions, L = -log sum over all a that collapse to y of prod_k p_k(a_k).

    The authors collapse raw candidates and verify the results (section 3.3). Here the tree grows by
    the exact probabilities of collapsed texts, summed over all predictions of the slots, as in
    prefix search.
    """

    layers: tuple[Layer, ...] = ("final",)
    saved = SavedFiles(
        shape=(
            "num_slots",
            "num_layers",
            "attention_layers",
            "adaptation_layers",
            "vocab_size",
            "head_rank",
        ),
    )
    capabilities = replace(
        SharedHeadDrafter.capabilities,
        capture=Capture(state_names=("cache",)),
        cost=OnePassCost,
    )

    def __init__(
        self,
        target: Target,
        # Number of drafts, which is the number of tokens that the slots are trained to predict.
        num_drafts: Steps = 4,
        # Number of slots: at least one for each draft, and more for blanks.
        num_slots: Steps = 8,
        # Number of residual blocks per slot.
        num_layers: OptionalLayers = 1,
        # Number of attention layers over the slots of one position.
        attention_layers: OptionalLayers = 1,
        # Number of adaptation layers over the target's states.
        adaptation_layers: OptionalLayers = 1,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Rank of the factorised output layer (SlimSpec); null uses a full-rank layer.
        head_rank: Width | None = None,
    ) -> None:
        super().__init__()
        if num_slots < num_drafts:
            raise UserError(
                f"drafter.num_slots={num_slots}: {num_drafts} drafts need a slot each; use "
                f"{num_drafts} or more"
            )
        self.num_drafts = num_drafts
        self.divergence = "cross_entropy"
        self.head = target.head
        vocab_size = min(vocab_size, target.head.vocab_size)
        self.adaptation = StagedAdapter(target, adaptation_layers)
        self.slots = nn.ModuleList(
            nn.Sequential(*(ResBlock(target.width) for _ in range(num_layers)))
            for _ in range(num_slots)
        )
        self.exchange = HeadMixer(target, num_slots, attention_layers)
        self.lm_down, self.lm_head = make_output_layer(target.width, vocab_size, head_rank)
        self.blank = nn.Linear(target.width, 1)
        self.add_vocabulary(vocab_size, target.head.vocab_size)
        self.cache: TreeCache | None = None

    @property
    def stages(self) -> list[Stage]:
        """One stage. The loss reads only the data, so the target's states are needed at the
        supervised positions alone.
        """
        return [Stage.single(self, self.layers)]

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """The slots run over the supervised tokens; all their logits, the blank's too, exist
        until the backward pass.
        """
        slots = len(self.slots) * batch.supervised
        logits = 4 * slots * (len(self.d2t) + 1)
        runs = [
            Run(self.exchange, slots, len(self.slots), extra=logits / slots),
            Run(self.slots, batch.supervised, 0),
        ]
        return StepCost(
            [*runs, Run(self.adaptation, batch.tokens, batch.length)],
            Judged(slots, len(self.d2t), copies=0),
        )

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return -log P(the slots collapse to the next tokens), summed over positions before the
        assistant's tokens.
        """
        assert batch.features is not None
        final = batch.features.at_layer("final").to(self.lm_head.weight.dtype)
        stage = self.adaptation(
            final,
            embed_as_target(self, batch.tokens.roll(-1, dims=1)),
            batch.positions,
            lengths=batch.lengths,
        )[-1]
        supervision = Supervision(self, batch)
        labels, supervised, draftable = self.make_labels(supervision)
        # Those with a supervised first token.
        rows = supervision.is_supervised(0)
        size = max(1, MAX_LOGITS // (len(self.slots) * (len(self.d2t) + 1)))
        parts = list(
            zip(*(select_rows(x, rows).split(size) for x in (stage, labels, supervised, draftable)))
        )
        terms = [
            self._judge_rows(*part)
            if len(parts) == 1
            else checkpoint(self._judge_rows, *part, use_reentrant=False)
            for part in parts
        ]
        loss, hits, counts = (sum(part) for part in zip(*terms))
        return Losses({"ctc": loss}, hits, counts)

    def make_labels(self, supervision: Supervision) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next tokens of every index in draft ids [B, T, U], and two counts [B, T] of
        them.

        They count the consecutive tokens of the assistant, and those before the first token outside
        the draft vocabulary.
        """
        none = supervision.row_index.new_zeros(supervision.row_index.numel())
        columns: dict[str, list[Tensor]] = {"labels": [], "in_vocabulary": [], "supervised": []}
        for step in range(self.num_drafts):
            is_supervised = supervision.is_supervised(step)
            rows = chosen_rows(is_supervised, none.device)
            label_index = supervision.label_index(step)
            for name, values in (
                ("labels", supervision.label_ids[label_index]),
                ("in_vocabulary", supervision.in_vocabulary[label_index].long()),
            ):
                columns[name].append(none.index_copy(0, rows, values).view_as(is_supervised))
            columns["supervised"].append(is_supervised.long())
        labels, in_vocabulary, supervised = (torch.stack(part, -1) for part in columns.values())
        supervised = supervised.cumprod(-1)
        return labels, supervised.sum(-1), (supervised * in_vocabulary.cumprod(-1)).sum(-1)

    def _judge_rows(
        self, stage: Tensor, labels: Tensor, supervised: Tensor, draftable: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the summed loss of rows [R, D], and per draft the correct and judged ones,
        given the true earlier tokens.
        """
        prefix = Prefixes.from_slots(self.slot_log_probs(stage))
        predictions = []
        log_probs = []
        for step in range(self.num_drafts):
            log_probs.append(prefix.full_log_probs())
            with torch.no_grad():
                predictions.append(prefix.next_log_probs()[:, 0].argmax(-1))
            prefix = prefix.extend_paths(labels[:, step, None], torch.zeros_like(labels[:, :1]))
        log_prob = torch.cat([*log_probs, prefix.full_log_probs()], dim=1).gather(
            1, draftable[:, None]
        )
        steps = torch.arange(self.num_drafts, device=labels.device)
        correct = (torch.stack(predictions, dim=1) == labels) & (steps < draftable[:, None])
        # 0 where slots are too few for the repeats
        loss = -torch.where(log_prob > LOG_ZERO / 2, log_prob, 0.0).sum()
        return loss, correct.sum(0).float(), (steps < supervised[:, None]).sum(0).float()

    def slot_log_probs(self, stage: Tensor) -> Tensor:
        """Compute the log-probabilities of every slot, the blank's last, [R, D] -> [R, K, V +
        1].
        """
        states = self.exchange(torch.stack([slot(stage) for slot in self.slots], dim=1))
        logits = torch.cat(
            [self.lm_head(project_down(self.lm_down, states)), self.blank(states)], dim=-1
        )
        return logits.float().log_softmax(-1)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the states of the tokens accepted last; all slots then predict from the last
        state.
        """
        self.cache = context.drafting_cache(self.cache, len(self.adaptation.layers), 0)
        final = context.new_features.at_layer("final").to(self.lm_head.weight.dtype)
        stage = self.adaptation(
            final,
            embed_as_target(self, context.next_tokens),
            self.cache.next_slots(final.shape[1]),
            self.cache,
        )[-1]
        self.cache.commit(None, context.num_new)
        return Draft(_Collapsed(self, self.slot_log_probs(context.last_state(stage)[:, 0])))


find_on_policy.register(Ctc, lambda drafter: None)


class _Collapsed(Rollout):
    """One round: the distribution after a path, summed over all predictions of the slots."""

    def __init__(self, drafter: Ctc, slots: Tensor) -> None:
        self.draft_ids = drafter.draft_ids
        self.depth_limit = drafter.num_drafts
        self.prefixes = Prefixes.from_slots(slots)

    def start(self) -> Tensor:
        return self.prefixes.next_log_probs()

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        assert self.draft_ids is not None
        draft_tokens = torch.searchsorted(self.draft_ids, tokens).clamp(max=len(self.draft_ids) - 1)
        new = self.prefixes.extend_paths(draft_tokens, parents)
        self.prefixes = self.prefixes.concat_nodes(new)
        return new.next_log_probs()
