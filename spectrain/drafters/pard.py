"""PARD (An et al., 2025): a small causal LM that drafts all its tokens in one forward, through mask tokens.

Shapes: B batch, T tokens, N packed tokens, K drafts, V vocabulary, R supervised places, F frontier nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget, most_likely
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.randomness import MASKED_PREFIXES, sequence_generator
from spectrain.settings.values import Steps
from spectrain.trees.base import Draft, Marginals

from .abilities import Abilities, Capture, DraftingCost, SavedFiles
from .base import Drafter, Losses, Stage, TrainingState
from .context import Context
from .shared.losses import Loss, head_loss
from .shared.masks import add_blocks, mask_embeddings, prefix_ends, start_masks
from .shared.small_models import small_model

if TYPE_CHECKING:
    from spectrain.models.target import Target


class Pard(Drafter):
    """A small LM and one mask vector: behind the root stand `num_drafts` - 1 masks, and each place says one more token.

    Trained on blocks of masks behind the data's prefixes, and on the ordinary places as well. Conditional drop (section 3.2):
    a share max(keep^b, keep_least) of the prefixes has b masks or more, so that every mask sees the chain of masks before it,
    and a forward sees at most T (1 + sum_b max(keep^b, keep_least)) tokens of a sequence. `loss` is the data's token or a
    divergence from what the target says there.
    """

    saved = SavedFiles(shape=("architecture", "num_layers", "model"), settings=lambda drafter: drafter.description())
    abilities = Abilities(capture=Capture(carried=("cache",)))
    cost = DraftingCost(passes=lambda drafter, depth: min(1.0, depth))

    def __init__(
        self,
        target: Target,
        num_drafts: Steps = 8,
        num_layers: int | None = None,
        model: str | None = None,
        architecture: dict[str, Any] | None = None,
        loss: Loss = "cross_entropy",
        keep: float = 0.7,  # share of the prefixes that each further mask is trained behind
        keep_least: float = 0.2,  # the least such share
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_drafts < 2:
            raise UserError(f"drafter.num_drafts={num_drafts}: use 2 or more; drafter=causal drafts one by one")
        for key, value in (("keep", keep), ("keep_least", keep_least)):
            if not 0 < value <= 1:
                raise UserError(f"drafter.{key}={value}: use more than 0 and at most 1")
        self.num_drafts, self.divergence, self.seed = num_drafts, loss, seed
        self.keep, self.keep_least = keep, keep_least
        self.model = small_model(target, num_layers, model, architecture)
        self.mask = nn.Parameter(torch.zeros(1, self.model.width))
        self.head = target.head
        self.vocab_size = min(self.model.head.vocab_size, target.head.vocab_size)
        self.cache: TreeCache | None = None

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """The mask starts near the mean embedding."""
        with torch.no_grad():
            self.mask.copy_(start_masks(self.model.head.embedding, 1))

    def description(self) -> dict[str, Any]:
        """The architecture itself, so that the saved drafter needs neither the target's layers nor another directory."""
        return {"architecture": self.model.config.to_diff_dict(), "num_layers": None, "model": None}

    # Training

    @property
    def stages(self) -> list[Stage]:
        """On what the target's head reads; decoding needs no features."""
        return [Stage.whole(self, ("final",), final_reach=0)]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        assert batch.features is not None
        blocks = add_blocks(batch, self.prefixes(batch, state.step))
        with mask_embeddings(self.model.head.embedding, self.mask, blocks.numbers):
            seen = self.model.run(
                blocks.tokens,
                ForwardPlan(
                    layers=("final",),
                    grad=torch.is_grad_enabled(),
                    recompute=state.recompute,
                    positions=blocks.positions,
                    mask=blocks.visible,
                    lengths=blocks.lengths,
                ),
            )
        asked = blocks.supervised | (blocks.ordinary & batch.predicts.gather(1, blocks.places))
        answers, depths = blocks.answers[asked], blocks.numbers[asked] + 1
        final = batch.features.at("final")
        final = final.gather(1, blocks.places[..., None].expand(-1, -1, final.shape[-1]))[asked]
        mine, theirs = (head.projection.entries(slice(self.vocab_size)) for head in (self.model.head, self.head))
        weights = blocks.weights(asked, batch)
        judged = head_loss(
            self.divergence, seen.at("final")[asked], mine, answers, HeadTarget(final, theirs), row_weight=weights
        )
        tokens = self.divergence == "cross_entropy"
        likeliest = most_likely(final, theirs)[0] if tokens else judged.labels
        right = judged.best == likeliest
        return Losses.by_depth({self.divergence: judged.loss}, right, depths, self.num_drafts)

    def prefixes(self, batch: Batch, step: int) -> list[list[tuple[int, int]]]:
        """Every prefix with an answer for one of its masks, with as many of these as the conditional drop leaves it."""
        rows = []
        for tokens, mask in batch.sequences():
            ends = prefix_ends(mask, self.num_drafts - 1)
            source = sequence_generator(MASKED_PREFIXES, self.seed, tokens, step)
            rank = torch.randperm(len(ends), generator=source)
            kept = [max(self.keep**depth, self.keep_least) * len(ends) for depth in range(1, self.num_drafts)]
            sizes = sum(((rank < count).long() for count in kept), start=torch.zeros_like(rank))
            rows.append([(end, size) for end, size in zip(ends.tolist(), sizes.tolist()) if size])
        return rows

    # Decoding

    def draft(self, context: Context) -> Draft:
        """One forward over the committed tokens that are new to it, the root and the masks."""
        lengths, device = context.cache.lengths, context.tokens.device
        if context.round == 0 or self.cache is None:
            self.cache = context.new_cache(self.cache, self.model.num_layers, 1 + self.num_drafts)
        behind = lengths - self.cache.lengths  # the root comes after so many
        width = context.fresh.tokens.shape[1] + self.num_drafts
        places = torch.arange(width, device=device)
        numbers = places - behind[:, None] - 1
        numbers = torch.where(numbers < self.num_drafts - 1, numbers.clamp(min=-1), -1)
        index = (self.cache.lengths[:, None] + places).clamp(max=context.tokens.shape[1] - 1)
        tokens = torch.where(places <= behind[:, None], context.tokens.gather(1, index), 0)
        with mask_embeddings(self.model.head.embedding, self.mask, numbers):
            seen = self.model.run(tokens, ForwardPlan(layers=("final",), cache=self.cache))
        self.cache.commit(None, behind)
        asked = behind[:, None] + torch.arange(self.num_drafts, device=device)
        final = seen.at("final").gather(1, asked[..., None].expand(-1, -1, self.model.width))
        log_q = self.model.head.logits(final)[..., : self.vocab_size].log_softmax(-1)
        return Draft(Marginals(context.root, log_q))
