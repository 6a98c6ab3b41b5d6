"""ViSpec (arXiv 2509.15235): EAGLE for targets of text and images, which reads an image as a few
vectors.

Shapes: B batch, T tokens, N rows of the sequence without the other rows of images, D target width,
P new positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.config.values import NotNegative, Steps, Width
from spectrain.drafters.base import Losses, TrainingState
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.eagle1 import Eagle1
from spectrain.drafters.layers.feature_layer import StepKeysValues
from spectrain.drafters.layers.losses import acceptance_rate
from spectrain.drafters.layers.state_rollout import StateRollout
from spectrain.drafters.layers.unrolled_attention import unrolled_attention
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.drafters.step_cost import BatchShape, StepCost
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import linear_divergence
from spectrain.models.host_copies import select_joined
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft

from .images import ImageAdaptor, ImageSpans


@dataclass(frozen=True, kw_only=True)
class ViSpecConfig:
    """Settings of ViSpec."""

    # Number of vectors of an image: the last one is mixed into the later text, and the others
    # replace its tokens; 2 or more.
    num_queries: Width = 2
    # Number of draft steps that are unrolled in training.
    num_steps: Steps = 2
    # Weight of the sum of |p - q| over the vocabulary.
    token_weight: NotNegative = 10.0
    # Weight of ListMLE, the likelihood of the order of the target's ten most likely tokens.
    order_weight: NotNegative = 0.1
    # Whether fc has a bias.
    bias: bool = False
    # Configuration keys of the layer that differ from the target's; null copies the target's.
    architecture: dict[str, Any] | None = None


class ViSpec(Eagle1):
    """EAGLE's layer. An image enters as `num_queries` vectors that learned queries read from the
    target's embeddings of its tokens: all but the last replace the image's rows, at its last
    positions, and the last one, g, joins the feature of every later row, fc [E(x); img_fc [f; g]].

    At first img_fc passes on f, so that text is read as EAGLE reads it. Steps are aligned with
    decoding, as HASS aligns them.
    """

    layers = (0, "final")
    saved = SavedFiles(shape=("bias", "architecture", "num_queries"))
    capabilities = replace(Eagle1.capabilities, capture=None)
    image_vector: Tensor  # [B, 1, D] of the latest image of each text

    def __init__(self, target: Target, config: ViSpecConfig) -> None:
        super().__init__(
            target,
            num_steps=config.num_steps,
            loss="total_variation",
            regression_weight=0.0,
            noise=0.0,
            bias=config.bias,
            token_weight=config.token_weight,
            architecture=config.architecture,
        )
        self.order_weight = config.order_weight
        self.num_queries = max(2, config.num_queries)
        self.img_adaptor = ImageAdaptor(self.num_queries, self.self_attn.num_heads, target.width)
        self.img_fc = nn.Linear(2 * target.width, target.width, bias=False)
        self.placeholder_id = target.vision.placeholder_id if target.vision.has_vision else -1

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start fc and img_fc to pass on the target's feature."""
        super().prepare(target, token_counts)
        with torch.no_grad():
            self.img_fc.weight.zero_()
            self.img_fc.weight[:, : target.width].fill_diagonal_(1.0)

    def mix_image(self, hidden: Tensor, image_vectors: Tensor) -> Tensor:
        """Join features and the vectors of the images before them, [B, T, D] each."""
        return self.img_fc(torch.cat([hidden.to(self.img_fc.weight.dtype), image_vectors], dim=-1))

    def read_images(
        self, spans: ImageSpans, embedded: Tensor, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what stands at the rows of images, and the image vector of every row, [B, T, D]
        each; `embedded` [B, T, D] are the target's embeddings of the rows' tokens."""
        dtype = self.img_fc.weight.dtype
        vectors = [
            self.img_adaptor(embedded[row, first:end].to(dtype))
            for row, first, end, _ in spans.spans
        ]
        return spans.place_vectors(vectors, like)

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of EAGLE's layer. The adaptor runs over images, which a plan does not
        count.
        """
        cost = super().step_cost(target, batch)
        [layer] = cost.runs
        runs = [
            replace(layer, module=part, extra=layer.extra if part is self.fc else 0)
            for part in self.children()
            if part is not self.img_adaptor
        ]
        return replace(cost, runs=runs)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Unroll the layer; without images, the adaptor still takes part, because other
        processes wait for its gradients.
        """
        losses = super().loss(batch, target, state)
        unused = 0.0 * sum(parameter.sum() for parameter in self.img_adaptor.parameters())
        return replace(
            losses, terms={**losses.terms, "distance": losses.terms["distance"] + unused}
        )

    def run_step(
        self, batch: Batch, hidden: Tensor, step: int, earlier_kv: list[StepKeysValues]
    ) -> tuple[Tensor, StepKeysValues]:
        assert batch.features is not None
        is_image = batch.tokens.roll(-1, dims=1) == self.placeholder_id
        is_image[:, -1] = False
        positions = batch.positions.expand_as(is_image)
        spans = ImageSpans.find(is_image, positions == 0, self.num_queries - 1)
        placed, vectors = self.read_images(
            spans, batch.features.at_layer(0).roll(-1, dims=1), hidden.to(self.fc.weight.dtype)
        )
        x = self.inputs(batch.tokens.roll(-1 - step, dims=1), self.mix_image(hidden, vectors))
        x = torch.where(is_image[..., None], placed, x)
        positions = positions + step
        lengths = batch.lengths
        index = None
        if not spans.is_empty:
            index = spans.shorten_rows()
            lengths = spans.shorten_lengths(batch.lengths)
            x = x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
            positions = positions.gather(1, index)
        q, k, v = self.self_attn.project_qkv(x, self.rotary(x, positions))
        keys, values = ([kv[part] for kv in (*earlier_kv, (k, v))] for part in (0, 1))
        output = self.outputs(
            x, self.self_attn.project_output(unrolled_attention(q, keys, values, lengths))
        )
        if index is not None:
            output = torch.zeros_like(placed).scatter(
                1, index[..., None].expand_as(output), output.to(placed.dtype)
            )
        return output, (k, v)

    def _judge_steps(
        self, supervision: Supervision, final: Tensor, states_by_step: list[Tensor]
    ) -> Losses:
        """Compute token_weight |p - q| + order_weight ListMLE of every step's supervised
        indices, each step alike.
        """
        label_index, order, step = supervision.join_steps(len(states_by_step))
        hidden = select_joined(states_by_step, order)
        assert supervision.target_log_probs is not None
        judged = linear_divergence(
            hidden,
            self.head.projection,
            supervision.target_log_probs.select_rows(label_index),
            self._row_loss,
            torch.full((len(label_index),), 1 / len(states_by_step), device=hidden.device),
        )
        correct = judged.predictions == supervision.labels[label_index]
        return Losses.by_depth({"distance": judged.loss}, correct, step, self.num_steps)

    def _row_loss(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        distance = 2 * (1 - acceptance_rate(log_p, log_q))
        return self.token_weight * distance + self.order_weight * list_mle(log_p, log_q)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the features of the last accepted tokens, images as their vectors, and draft from
        the last of them.
        """
        self.cache = context.drafting_cache(self.cache, 1, context.builder.max_drafted)
        features = context.new_features
        count = context.num_new[:, None]
        final = features.at_layer("final")
        tokens = context.next_tokens
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = (context.lengths[:, None] - count) + steps
        vectors = (
            self.image_vector.expand_as(final)
            if context.round
            else torch.zeros_like(final).to(self.fc.weight.dtype)
        )
        placed = torch.zeros_like(vectors)
        is_image = (tokens == self.placeholder_id) & (steps < count - 1)
        spans = ImageSpans.find(is_image, torch.zeros_like(is_image), self.num_queries - 1)
        if not spans.is_empty:
            placed, vectors = self.read_images(spans, features.at_layer(0).roll(-1, dims=1), placed)
        x = torch.where(
            is_image[..., None], placed, self.inputs(tokens, self.mix_image(final, vectors))
        )
        self.image_vector = context.last_state(vectors)
        is_read = spans.remaining & (steps < count)
        index = ImageSpans([], is_read).shorten_rows()
        x = x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
        positions = positions.gather(1, index)
        output = self._run_rows(x, positions, self.cache, None)
        num_read = is_read.sum(1)
        self.cache.commit(None, num_read)
        root = output.gather(
            1, (num_read - 1).clamp(min=0)[:, None, None].expand(-1, 1, output.shape[-1])
        )
        self.num_skipped = (context.lengths - self.cache.lengths)[:, None]
        return Draft(StateRollout(self, self.cache, root))

    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: TreeCache,
        visible: Tensor | None,
    ) -> Tensor:
        """Append new nodes to the cache; their positions count the rows of images that the cache
        lacks.
        """
        x = self.inputs(tokens, self.mix_image(hidden, self.image_vector.expand_as(hidden)))
        return self._run_rows(x, positions + self.num_skipped, cache, visible)

    def _run_rows(
        self, x: Tensor, positions: Tensor, cache: TreeCache, visible: Tensor | None
    ) -> Tensor:
        projected = self.self_attn.project_qkv(x, self.rotary(x, positions))
        output = self.outputs(x, self.self_attn.attend_cached(*projected, cache, visible))
        cache.add_uncommitted(x.shape[1])
        return output


def list_mle(log_p: Tensor, log_q: Tensor, count: int = 10) -> Tensor:
    """Return ListMLE (Xia et al., 2008) of each row: -log of the chance that q, drawn without
    replacement among p's `count` most likely tokens, gives them in p's order."""
    scores = log_q.gather(-1, log_p.topk(min(count, log_p.shape[-1]), dim=-1).indices)
    remaining = scores.flip(-1).logcumsumexp(-1).flip(-1)
    return (remaining - scores).sum(-1)
