"""Jump drafting: the state that the target has in the middle at the next token is predicted, and
the target's own later layers finish it.

Shapes: B batch, T tokens, W width of the target, S sources, V draft vocabulary, R supervised rows,
F frontier nodes, M nodes so far. Index t pairs the target's states at t with the embedding of token
t + 1, and predicts token t + 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import Count, Share, Steps, VocabularySize
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capabilities, DraftingCost, InitialFit, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.fitted_start import label_positions, measure_fit
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.unrolled_attention import unrolled_attention
from spectrain.drafters.layers.vocabulary import (
    Supervision,
    VocabularyDrafter,
    embed_as_target,
    judge_rows,
)
from spectrain.drafters.step_cost import BatchShape, Run, StepCost
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import Projection
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.features import Features, Layer
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.host_copies import select_joined
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import TokenTree

from .predictor import StatePredictor, count_fit, fit_predictor

LayerKeysValues = list[tuple[Tensor, Tensor]]  # keys and values [B, K, T, D] per layer


class JumpCost(DraftingCost):
    def weights(self, target: Target) -> nn.Module:
        later = list(target.layers)[self.drafter.jump_layer :]
        return nn.ModuleList([self.drafter, *later])


class Jump(VocabularyDrafter):
    """Predicts the state that enters layer m of the target at the next token, from that token's
    embedding and from states of the target at the token before it, and runs the target's frozen
    layers from m on over it (economize, 2026).

    A draft step skips the layers before m. The later ones attend to the target's own keys and
    values of the text, and to those of earlier predictions. Their states at a drafted token are the
    sources of the next step; so sources are states that enter a layer from m on, or leave the last
    one. The output layer is the target's, over the draft vocabulary. What drafting appends to the
    target's cache is discarded before verification, which runs all layers.

    Training unrolls `num_steps` steps. Step i at index t sees the target's keys up to t and those
    of its own earlier steps. Gradients flow through the frozen layers; only the prediction learns.
    """

    saved = SavedFiles(shape=("jump_layer", "sources", "num_units", "vocab_size"))
    capabilities = Capabilities(nestable=False, cost=JumpCost, repeated_parts=("predictor",))

    def __init__(
        self,
        target: Target,
        # Layer of the target whose input is predicted; null uses the middle one.
        jump_layer: Count | None = None,
        # Layers of the target whose inputs are read at the token before; the number of layers names
        # the output of the last one. Null uses jump_layer and that.
        sources: list[int] | None = None,
        # Number of gated units of the prediction; null uses twice the target's width.
        num_units: Count | None = None,
        # Number of draft steps that are unrolled in training.
        num_steps: Steps = 3,
        # Draft vocabulary in tokens; null uses the target's whole vocabulary.
        vocab_size: VocabularySize | None = None,
        # Divergence between the target's and the drafter's token distributions.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive draft steps.
        step_decay: Share = 0.8,
        # Initial values of the prediction: fitted to the target's states by least squares (fitted),
        # or random ones (random).
        start: Literal["fitted", "random"] = "fitted",
        # Number of tokens, of the first batches of the training, that start=fitted reads.
        fit_tokens: Count = 65536,
    ) -> None:
        super().__init__()
        self.jump_layer = resolve_jump_layer(target, jump_layer)
        self.sources = resolve_sources(target, self.jump_layer, sources)
        self.num_units = 2 * target.width if num_units is None else num_units
        self.num_steps = num_steps
        self.divergence = loss
        self.step_decay = step_decay
        self.layers: tuple[Layer, ...] = (*sorted({self.jump_layer, *self.sources}), "final")
        self.saved = replace(
            self.saved,
            settings={"jump_layer": self.jump_layer, "sources": list(self.sources)},
        )
        self.head = target.head
        rows = target.head.vocab_size
        eps = getattr(target.config, "rms_norm_eps", None) or 1e-6
        self.predictor = StatePredictor(target.width, len(self.sources), self.num_units, eps)
        size = rows if vocab_size is None else min(vocab_size, rows)
        self.lm_head: nn.Linear | None = None
        if size < rows:
            bias = target.head.output.bias is not None
            self.lm_head = nn.Linear(target.width, size, bias=bias).requires_grad_(False)
        self.add_vocabulary(size, rows)
        if start == "fitted" and fit_tokens:
            fit = InitialFit(
                fit_tokens, type(self).fit_start, partial(measure_fit, count=count_fit), count_fit
            )
            self.capabilities = replace(self.capabilities, initial_fit=fit)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and copy its rows of the target's output layer."""
        ids = self.choose_vocabulary(token_counts)
        if self.lm_head is None:
            return
        with torch.no_grad():
            for parameter, whole in zip(self.lm_head.parameters(), self.head.output.parameters()):
                parameter.copy_(whole[ids])

    def fit_start(self, batches: Sequence[Batch], target: Target) -> None:
        """Fit the prediction to the target's states by least squares."""
        device = next(self.predictor.parameters()).device
        pairs = [self._read_pairs(batch.to(device)) for batch in batches]
        self.starts_trained = fit_predictor(self.predictor, pairs)

    @torch.no_grad()
    def _read_pairs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the embeddings [R, W] and sources [R, S W] that the first draft step of a batch
        reads, and the states [R, W] that it predicts.
        """
        rows = label_positions(batch, 0)
        features = batch.input_features
        embedded = embed_as_target(self, batch.tokens.roll(-1, dims=1))
        states = features.at_layer(self.jump_layer).roll(-1, dims=1)
        return embedded[rows], self.read_sources(features)[rows], states[rows]

    @property
    def stages(self) -> list[Stage]:
        return [Stage.single(self, self.layers, final_reach=0)]

    @property
    def projection(self) -> Projection:
        """The target's output layer over the draft vocabulary, with its scale and cap."""
        whole = self.head.projection
        if self.lm_head is None:
            return whole
        return replace(whole, weight=self.lm_head.weight, bias=self.lm_head.bias)

    def read_sources(self, features: Features) -> Tensor:
        """Return the states [B, T, S W] of the sources."""
        return torch.cat([features.at_layer(layer) for layer in self.sources], dim=-1)

    def predict_states(self, tokens: Tensor, sources: Tensor) -> Tensor:
        """Return the predicted states [B, T, W] at tokens [B, T], from the sources [B, T, S W] at
        the tokens before them.
        """
        states: Tensor = self.predictor(embed_as_target(self, tokens), sources)
        return states

    def run_later_layers(
        self, target: Target, tokens: Tensor, predicted: Tensor, plan: ForwardPlan
    ) -> tuple[Tensor, Tensor]:
        """Run the target's layers over predicted states [B, N, W]; return the final states [B, N,
        W], and the sources [B, N, S W] of the next step.
        """
        later: list[Layer] = [layer for layer in self.sources if layer != self.jump_layer]
        span = LayerSpan(first=self.jump_layer, hidden=predicted.to(target.dtype))
        features = target.run(tokens, replace(plan, layers=(*later, "final"), span=span))
        states = [
            predicted if layer == self.jump_layer else features.at_layer(layer).to(predicted.dtype)
            for layer in self.sources
        ]
        return features.at_layer("final"), torch.cat(states, dim=-1)

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """The prediction and the later layers run once for each draft step over all tokens; the
        later layers once more without a gradient, for the keys of the text.
        """
        layers = nn.ModuleList(list(target.layers)[self.jump_layer :])
        runs = [
            Run(self.predictor, batch.tokens, 0, self.num_steps),
            Run(layers, batch.tokens, batch.length, self.num_steps),
        ]
        judged = replace(
            judge_rows(self, batch, self.num_steps * batch.supervised), is_trained=False
        )
        share = len(layers) / target.num_layers
        return StepCost(runs, judged, forward_rows=batch.tokens * share)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Unroll the prediction and the target's later layers over their own states, with the true
        tokens as input.
        """
        supervision = Supervision(self, batch)
        features = batch.input_features
        text_kv = self.record_keys(batch, features.at_layer(self.jump_layer), target)
        sources = self.read_sources(features)
        step_kv = list[LayerKeysValues]()
        states = list[Tensor]()
        for step in range(max(1, min(self.num_steps, batch.max_document_length - 2))):
            final, sources, new_kv = state.run_checkpointed(
                self.run_step, batch, target, sources, step, [text_kv, *step_kv]
            )
            step_kv.append(new_kv)
            states.append(final[supervision.is_supervised(step)])
        label_index, order, steps = supervision.join_steps(len(states))
        hidden = select_joined(states, order)
        weight = self.step_decay**steps
        judged = supervision.judge_with_head(self.projection, hidden, label_index, weight)
        correct = self.draft_ids[judged.predictions] == supervision.labels[label_index]
        return Losses.by_depth({self.divergence: judged.loss}, correct, steps, self.num_steps)

    @torch.no_grad()
    def record_keys(self, batch: Batch, hidden: Tensor, target: Target) -> LayerKeysValues:
        """Return the target's keys and values of the text in its layers from `jump_layer` on, from
        the states [B, T, W] that enter that layer.
        """
        recorded: LayerKeysValues = []

        def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            recorded.append((k, v))
            return unrolled_attention(q, [k], [v], batch.lengths, options)

        span = LayerSpan(first=self.jump_layer, hidden=hidden.to(target.dtype))
        positions = batch.positions.expand(len(batch.tokens), -1)
        target.run(batch.tokens, ForwardPlan(positions=positions, span=span, attends=attend))
        if len(recorded) != target.num_layers - self.jump_layer:
            raise UserError(
                f"drafter=jump: not every layer of {target.name} from {self.jump_layer} on has "
                "attention with keys of its own; use recipe=eagle3"
            )
        return recorded

    def run_step(
        self,
        batch: Batch,
        target: Target,
        sources: Tensor,
        step: int,
        earlier_kv: list[LayerKeysValues],
    ) -> tuple[Tensor, Tensor, LayerKeysValues]:
        """Run one draft step over sources [B, T, S W], after the keys and values of the text and of
        earlier steps; return final states [B, T, W], the next sources, and its own keys and
        values.
        """
        # Tokens that roll in from beyond the end of a document are never supervised.
        tokens = batch.tokens.roll(-1 - step, dims=1)
        new_kv: LayerKeysValues = []

        def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            number = len(new_kv)
            new_kv.append((k, v))
            layers = [*(kv[number] for kv in earlier_kv), (k, v)]
            keys, values = ([kv[part] for kv in layers] for part in (0, 1))
            return unrolled_attention(q, keys, values, batch.lengths, options)

        plan = ForwardPlan(
            grad=torch.is_grad_enabled(),
            positions=(batch.positions + 1 + step).expand(len(tokens), -1),
            attends=attend,
        )
        final, next_sources = self.run_later_layers(
            target, tokens, self.predict_states(tokens, sources), plan
        )
        return final, next_sources, new_kv

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Draft from the root, in the target's own cache."""
        sources = context.last_state(self.read_sources(context.new_features))
        return Draft(JumpRollout(self, context, sources))

    def verify(self, context: Context, tree: TokenTree) -> Features:
        """Discard what drafting appended to the cache, and run the tree through all layers."""
        context.cache.roll_back()
        return context.verify(tree)

    def log_q(self, final: Tensor) -> Tensor:
        """Compute log q [B, F, V] from final states [B, F, W]."""
        if self.lm_head is None:
            return self.head.logits(final.to(self.head.output.weight.dtype)).log_softmax(-1)
        product = self.lm_head(final.to(self.lm_head.weight.dtype)).float()
        return self.head.scale_and_cap(product).log_softmax(-1)


class JumpRollout(Rollout):
    """One round: every node's state is predicted from the states at its parent."""

    def __init__(self, drafter: Jump, context: Context, sources: Tensor) -> None:
        self.drafter, self.context = drafter, context
        self.draft_ids = drafter.draft_ids
        self.root_sources = sources  # [B, 1, S W] at the last token of the text
        self.sources = sources[:, :0]  # [B, M, S W] at every node, the root first
        batch = len(sources)
        device = sources.device
        self.depths = torch.zeros(batch, 0, dtype=torch.int64, device=device)  # [B, M]
        self.visible = torch.zeros(batch, 0, 0, dtype=torch.bool, device=device)  # [B, M, M]

    def start(self) -> Tensor:
        root = self.context.root[:, None]
        none = self.visible.new_zeros(len(root), 1, 0)
        return self._run(root, self.root_sources, torch.zeros_like(root), none)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self.visible.gather(1, parents[..., None].expand(-1, -1, self.visible.shape[-1]))
        sources = self.sources.gather(1, parents[..., None].expand(-1, -1, self.sources.shape[-1]))
        return self._run(tokens, sources, self.depths.gather(1, parents) + 1, above)

    def _run(self, tokens: Tensor, sources: Tensor, depths: Tensor, above: Tensor) -> Tensor:
        """Run new nodes [B, F], which read their parents' sources and see the nodes `above` [B, F,
        M] and themselves; return log q [B, F, V].
        """
        batch, num_new = tokens.shape
        itself = torch.eye(num_new, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        visible = torch.cat([above, itself], dim=2)
        cache = self.context.cache
        plan = ForwardPlan(positions=cache.lengths[:, None] + depths, mask=visible, cache=cache)
        predicted = self.drafter.predict_states(tokens, sources)
        final, states = self.drafter.run_later_layers(self.context.target, tokens, predicted, plan)
        self.visible = torch.cat([F.pad(self.visible, (0, num_new)), visible], dim=1)
        self.depths = torch.cat([self.depths, depths], dim=1)
        self.sources = torch.cat([self.sources, states], dim=1)
        return self.drafter.log_q(final)


def resolve_jump_layer(target: Target, layer: int | None) -> int:
    """Return the given layer, or by default the middle one; raise `UserError` if it is invalid."""
    if target.num_layers < 2:
        raise UserError(
            f"drafter.jump_layer: {target.name} has one layer, so there is no input between layers"
        )
    if layer is None:
        return target.num_layers // 2
    if not 1 <= layer < target.num_layers:
        raise UserError(
            f"drafter.jump_layer={layer}: {target.name} has {target.num_layers} layers; use 1 to "
            f"{target.num_layers - 1}"
        )
    return layer


def resolve_sources(target: Target, jump_layer: int, sources: list[int] | None) -> tuple[int, ...]:
    """Return the sources, ascending; raise `UserError` for a layer that no draft step has."""
    if sources is None:
        return (jump_layer, target.num_layers)
    last = target.num_layers
    for layer in sources or [-1]:
        if not jump_layer <= layer <= last:
            raise UserError(
                f"drafter.sources={sources}: name layers from drafter.jump_layer={jump_layer} to "
                f"{last}, because a draft step runs no others"
            )
    return tuple(sorted({*sources}))
