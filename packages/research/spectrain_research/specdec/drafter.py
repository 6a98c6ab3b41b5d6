"""SpecDec (Xia et al., 2023): a drafter of its own for sequence-to-sequence targets, which drafts a
block by queries.

Shapes: B texts, E source tokens, T prefix tokens, A anchors, K drafts, R judged drafts, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spectrain.config.values import Count, LayerCount, Seed, Steps, Width
from spectrain.drafters.base import Drafter, Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capabilities, OnePassCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.anchors import sample_anchors
from spectrain.drafters.layers.losses import LossName, head_loss
from spectrain.drafters.step_cost import BatchShape, Judged, Run, StepCost
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget, argmax_and_log_z
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, MarginalRollout

from .network import QueryNetwork


@dataclass(frozen=True, kw_only=True)
class SpecDecConfig:
    """Settings of SpecDec."""

    # Number of drafts, each with a query of its own.
    num_drafts: Steps = 6
    # Number of layers that read the source, both ways.
    num_encoder_layers: LayerCount = 4
    # Number of layers that read the answer so far and draft.
    num_layers: LayerCount = 1
    # Width of all layers; null takes the target's.
    width: Width | None = None
    # Number of attention heads.
    num_heads: Width = 4
    # Number of anchors that are trained per text.
    num_anchors: Count = 16
    # Loss of each draft: a cross-entropy with the data or a divergence from the target.
    loss: LossName = "cross_entropy"
    # Seed of the anchors.
    seed: Seed = 0


class SpecDec(Drafter):
    """A deep encoder reads the source, and a shallow decoder the answer so far; K queries, each a
    vector of its own, then draft the next K tokens in one pass. Embedding and output layer are the
    target's and stay frozen.

    With a target that has no encoder, the whole text is the answer so far. The answer is read anew
    in every round.
    """

    saved = SavedFiles(
        shape=("num_drafts", "num_encoder_layers", "num_layers", "width", "num_heads")
    )
    capabilities = Capabilities(cost=OnePassCost)

    def __init__(self, target: Target, config: SpecDecConfig) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, rewind=type(self).rewind)
        if not getattr(target, "reads_tokens", True):
            raise UserError(
                "drafter=specdec: its encoder reads text, and the target's sources are sounds; "
                "use recipe=eagle3"
            )
        self.find_start = getattr(target, "find_start", None)
        self.head = target.head
        self.divergence = config.loss
        self.seed = config.seed
        self.num_drafts, self.num_anchors = config.num_drafts, config.num_anchors
        width = config.width or target.width
        if width % config.num_heads:
            raise UserError(
                f"drafter.num_heads={config.num_heads}: the width {width} is no multiple of it; "
                "use another number"
            )
        encoder_layers = 0 if self.find_start is None else config.num_encoder_layers
        self.network = QueryNetwork(
            target.width,
            width,
            config.num_heads,
            encoder_layers,
            config.num_layers,
            config.num_drafts,
        )
        self.sources: tuple[Tensor | None, Tensor | None] = None, None
        self.starts: list[int] = []

    def split_texts(self, texts: Sequence[Tensor]) -> list[int]:
        """Return the index of each text's first token that is no source."""
        return [0 if self.find_start is None else self.find_start(text.tolist()) for text in texts]

    def embed(self, rows: list[Tensor]) -> Tensor:
        """Return the target's embeddings of rows of unequal length, padded on the right."""
        with torch.no_grad():
            embedded = self.head.embed(pad_sequence(rows, batch_first=True))
        return embedded.to(self.network.output.weight.dtype)

    def encode_sources(self, sources: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Return the states [B, E, W] of sources and which of them are real; nothing where a
        target has no encoder.
        """
        if self.find_start is None:
            return None, None
        is_real = pad_sequence(
            [torch.ones_like(source, dtype=torch.bool) for source in sources], batch_first=True
        )
        states: Tensor = self.network.encode(self.embed(sources), is_real)
        return states, is_real

    # Training

    @property
    def stages(self) -> list[Stage]:
        """One stage on the input of the target's head; decoding needs no features."""
        return [Stage.single(self, ("final",), final_reach=0)]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the network over all tokens and the drafts after every anchor, and of
        the drafts' logits.
        """
        drafts = min(batch.supervised, batch.texts * self.num_anchors) * self.num_drafts
        labels = 0 if self.divergence == "cross_entropy" else drafts
        judged = Judged(
            drafts,
            target.head.vocab_size,
            labels,
            copies=2 if labels else 1,
            other_rows=drafts,
        )
        return StepCost([Run(self.network, batch.tokens + drafts, batch.length)], judged)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return the loss of K drafts after every anchor, as far as the answer goes."""
        assert batch.features is not None
        texts = [tokens for tokens, _ in batch.split_documents()]
        anchors = sample_anchors(batch, self.num_anchors, self.seed, state.step)
        counts = [count for count, _ in anchors.document_sizes]
        starts = self.split_texts(texts)
        own = [part - start for part, start in zip(anchors.positions.split(counts), starts)]
        padded_anchors = pad_sequence([part.clamp(min=0) for part in own], batch_first=True)
        sources = self.encode_sources([text[:start] for text, start in zip(texts, starts)])
        prefixes = self.embed(
            [text[start:] if start < len(text) else text[-1:] for text, start in zip(texts, starts)]
        )
        states = state.run_checkpointed(
            self.network.draft_states, prefixes, padded_anchors, *sources
        )
        is_anchor = pad_sequence(
            [torch.ones_like(part, dtype=torch.bool) for part in own], batch_first=True
        )
        steps = torch.arange(self.num_drafts, device=batch.tokens.device)
        index = anchors.token_indices[:, None] + steps  # [A, K] the token before each draft
        inside = (
            anchors.positions[:, None] + steps
            < torch.tensor([*map(len, texts)])
            .repeat_interleave(torch.tensor(counts))[:, None]
            .to(index.device)
            - 1
        )
        index = index.clamp(max=batch.tokens.numel() - 1)
        judged = inside & batch.next_is_supervised.flatten()[index]
        final = batch.features.at_layer("final").flatten(0, 1)[index[judged]]
        labels = batch.tokens.roll(-1, dims=1).flatten()[index[judged]]
        depths = steps.expand_as(index)[judged]
        result = head_loss(
            self.divergence,
            states[is_anchor][judged],
            self.head.projection,
            labels,
            HeadTarget(final, self.head.projection),
        )
        scale = float(batch.loss_mask.sum()) / max(1, len(labels))
        best = argmax_and_log_z(final, self.head.projection)[0]
        return Losses.by_depth(
            {self.divergence: scale * result.loss},
            result.predictions == best,
            depths,
            self.num_drafts,
        )

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the sources in the first round, and the answers so far in every round; draft
        after the root.
        """
        lengths = context.lengths.tolist()
        texts = [row[: length + 1] for row, length in zip(context.tokens, lengths)]
        if context.begins:
            self.starts = self.split_texts(texts)
            self.sources = self.encode_sources(
                [text[:start] for text, start in zip(texts, self.starts)]
            )
        prefixes = [text[min(start, len(text) - 1) :] for text, start in zip(texts, self.starts)]
        anchors = torch.tensor(
            [[len(prefix) - 1] for prefix in prefixes], device=context.tokens.device
        )
        states = self.network.draft_states(self.embed(prefixes), anchors, *self.sources)[:, 0]
        log_q = self.head.logits(states.to(self.head.output.weight.dtype)).float().log_softmax(-1)
        return Draft(MarginalRollout(context.root, log_q))

    def rewind(self, lengths: Tensor) -> None:
        """Do nothing: every round reads the text anew."""
