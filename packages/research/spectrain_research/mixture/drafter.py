"""Mixture of Attentions (Zimmer et al., 2024, arXiv 2410.03804): attention over layers, over
drafted tokens, and across them.

Shapes: B batch, T tokens, P new positions, L layers of the target that are read, D target width, V
draft vocabulary, F nodes. Entry t pairs the target's states at t with token t + 1. A draft step k
after the cut t reads token t + 1 + k, sees the states up to t, and predicts token t + 2 + k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectrain.config.values import Seed, Share, Steps, VocabularySize, Width
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.llama_layer import (
    Mlp,
    NormedAttention,
    Rotary,
    append_and_attend,
    apply_rotary,
    final_norm_scale,
    llama_config,
)
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.output_layer import make_output_layer, project_down
from spectrain.drafters.layers.state_rollout import StateDrafter, StateRollout
from spectrain.drafters.layers.vocabulary import Supervision, embed_as_target, judge_rows
from spectrain.drafters.step_cost import OUTPUT_LAYERS, BatchShape, Run, StepCost
from spectrain.errors import UserError
from spectrain.features.batch import Batch, pad_or_pack
from spectrain.kernels.fused_attention import fused_attention
from spectrain.models.features import Features, Layer
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.randomness import ANCHORS, sequence_generator
from spectrain.trees.rollout import Draft
from spectrain_research.shared.head_layers import HeadAttention, SharedHeadDrafter
from spectrain_research.shared.on_policy import find_on_policy

Rope = tuple[Tensor, Tensor]


class MixtureOfAttentions(SharedHeadDrafter, StateDrafter):
    """Three attentions, one after another:

        a_t = mean over layers of LSA(RMSNorm(h_t^1), .., RMSNorm(h_t^L))       layer
        self-attention, once per verified token x_j = SA(E(token 1), .., E(token j))
                           causal self-attention over the tokens s_j = CA(x_j; a_1, .., a_t) for the
        cut t < j                           cross-attention to the verified tokens

    Within a round the keys of the cross-attention do not change, and no predicted state is fed
    back, so drafting reads what training reads: every token of the text is trained after a cut that
    lies a random number of steps below `num_steps` before it (the T-step bounded mask). The authors
    read the keys and values of the target's layers; this class reads the states that enter them,
    from which they follow.
    """

    saved = SavedFiles(shape=("layers", "vocab_size", "head_rank"))
    capabilities = SharedHeadDrafter.capabilities
    # Self-attention and cross-attention.
    num_layers = 2

    def __init__(
        self,
        target: Target,
        # Number of draft steps that are trained.
        num_steps: Steps = 5,
        # Layers of the target whose hidden states are read; null reads those of all layers.
        layers: list[int] | None = None,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Loss of each draft step: a cross-entropy with the data or a divergence from the target.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive draft steps.
        step_decay: Share = 0.9,
        # Rank of the factorised output layer (SlimSpec); null uses a full-rank layer.
        head_rank: Width | None = None,
        # Seed of the cuts in training.
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        read = list(range(1, target.num_layers + 1)) if layers is None else sorted(set(layers))
        if not read:
            raise UserError("drafter.layers=[]: name at least one layer, or leave it out")
        target.check_layers(read)
        self.read_layers: tuple[Layer, ...] = tuple(read)
        self.layers = (*self.read_layers, "final")
        self.num_steps = num_steps
        self.divergence = loss
        self.step_decay = step_decay
        self.seed = seed
        self.head = target.head
        width = target.width
        config = llama_config(target)
        norms = [nn.RMSNorm(width, eps=config.rms_norm_eps) for _ in range(6)]
        (
            self.layer_norm,
            self.input_norm,
            self.query_norm,
            self.context_norm,
            self.mlp_norm,
            self.norm,
        ) = norms
        self.layer_attention = HeadAttention(target)
        self.self_attention, self.cross_attention = (
            NormedAttention(config, width) for _ in range(2)
        )
        self.mlp = Mlp(config)
        self.lm_down, self.lm_head = make_output_layer(
            width, min(vocab_size, target.head.vocab_size), head_rank
        )
        self.add_vocabulary(min(vocab_size, target.head.vocab_size), target.head.vocab_size)
        self.rotary = Rotary(config)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary, copy the target's output layer, and start the last norm
        as the target's.
        """
        super().prepare(target, token_counts)
        scale = final_norm_scale(target)
        if scale is not None:
            with torch.no_grad():
                self.norm.weight.copy_(scale)

    @property
    def stages(self) -> list[Stage]:
        return [Stage.single(self, self.layers, final_reach=0)]

    def stack_layers(self, features: Features) -> Tensor:
        """Return the states [B, T, L, D] of the layers that are read."""
        return features.fuse_layers(self.read_layers).unflatten(-1, (len(self.read_layers), -1))

    def fuse_features(self, features: Features) -> Tensor:
        """Return a [B, P, D] from the target's features."""
        return self.mix_layers(self.stack_layers(features))

    def mix_layers(self, states: Tensor) -> Tensor:
        """Return a [.., D] from the states [.., L, D] of the target's layers."""
        normed = self.layer_norm(states.to(self.norm.weight.dtype))
        return self.layer_attention(normed.flatten(0, -3)).mean(1).unflatten(0, states.shape[:-2])

    def project_context(self, mixed: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the cross-attention from a [B, P, D]."""
        return self.cross_attention.project_kv(self.context_norm(mixed), rope)

    def project_queries(self, x: Tensor, rope: Rope) -> Tensor:
        """Return the queries [B, H, F, head size] of the cross-attention."""
        attention = self.cross_attention
        queries = attention.q_norm(
            attention.q_proj(self.query_norm(x)).unflatten(-1, (-1, attention.head_dim))
        )
        return apply_rotary(queries.transpose(1, 2), rope)

    def finish_states(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the states [B, F, D] after the output of the cross-attention, [B, H, F, head
        size].
        """
        x = x + self.cross_attention.project_output(attended)
        return self.norm(x + self.mlp(self.mlp_norm(x)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [B, F, V] from states [B, F, D]."""
        logits: Tensor = self.lm_head(project_down(self.lm_down, hidden))
        return logits

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the attention over layers for every layer that is read, and of the
        other modules once over all tokens.
        """
        layers = len(self.read_layers)
        runs = [
            Run(self.layer_norm, layers * batch.tokens, 0),
            Run(self.layer_attention, layers * batch.tokens, layers),
        ]
        mask = batch.tokens * batch.length
        for name, part in self.named_children():
            if name not in ("layer_norm", "layer_attention", *OUTPUT_LAYERS):
                # Only the cross-attention has a mask.
                is_masked = part is self.cross_attention
                runs.append(Run(part, batch.tokens, batch.length, mask=mask * is_masked))
        return StepCost(runs, judge_rows(self, batch, batch.supervised))

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Run every entry once, after a cut that lies a random number of draft steps before it."""
        assert batch.features is not None
        supervision = Supervision(self, batch)
        steps = sample_steps(batch, self.num_steps, self.seed, state.step)
        mixed = state.run_checkpointed(self.mix_layers, self.stack_layers(batch.features))
        tokens = batch.tokens.roll(-1, dims=1)
        context_rope, rope = (self.rotary(mixed, batch.positions + shift) for shift in (0, 1))
        x = embed_as_target(self, tokens)
        attention = self.self_attention
        x = x + attention.attend_causal(
            *attention.project_qkv(self.input_norm(x), rope), batch.lengths
        )
        visible = see_before_cuts(batch.positions, steps)
        attended = fused_attention(
            self.project_queries(x, rope),
            *self.project_context(mixed, context_rope),
            visible[:, None],
        )
        hidden = self.finish_states(x, attended)
        # Entry t predicts the token after position t + 1.
        label_rows = nn.functional.pad(supervision.row_index[:, 1:], (0, 1), value=-1)
        judged = label_rows >= 0
        rows = label_rows[judged]
        step = steps[judged]
        states = project_down(self.lm_down, hidden[judged])
        loss, correct = supervision.judge_states(states, self.lm_head, rows, self.step_decay**step)
        return Losses.by_depth({self.divergence: loss}, correct, step, self.num_steps)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the states of the tokens accepted last, then draft from the newest token."""
        builder = context.builder
        self.cache = cache = context.drafting_cache(
            self.cache, self.num_layers, builder.max_drafted + 2
        )
        mixed = self.fuse_features(context.new_features)
        slots = cache.next_slots(mixed.shape[1])
        num_new = context.num_new[:, None]
        context_rope, rope = (self.rotary(mixed, slots + shift) for shift in (0, 1))
        x = embed_as_target(self, context.next_tokens)
        attention = self.self_attention
        x = x + attention.attend_cached(
            *attention.project_qkv(self.input_norm(x), rope), cache, None, 0
        )
        last = context.last_state(x)
        last_rope = self.rotary(last, cache.lengths[:, None] + num_new)
        is_new = torch.arange(mixed.shape[1], device=x.device) < num_new
        queries = self.project_queries(last, last_rope)
        attended = append_and_attend(
            queries, *self.project_context(mixed, context_rope), cache, is_new[:, None], 1
        )
        cache.add_uncommitted(mixed.shape[1])
        cache.commit(None, context.num_new)
        return Draft(StateRollout(self, cache, self.finish_states(last, attended), self.draft_ids))

    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: TreeCache,
        visible: Tensor | None,
    ) -> Tensor:
        """Run new nodes [B, F], append them to the cache, and return their states; `hidden` is
        of their parents, not read.
        """
        assert visible is not None
        x = embed_as_target(self, tokens)
        rope = self.rotary(x, positions + 1)
        attention = self.self_attention
        x = x + attention.attend_cached(
            *attention.project_qkv(self.input_norm(x), rope), cache, visible, 0
        )
        # Nodes have no key in the cross-attention: its slots stay empty and nothing sees them.
        heads = self.cross_attention.k_proj.out_features // self.cross_attention.head_dim
        empty = x.new_zeros(len(x), heads, x.shape[1], self.cross_attention.head_dim)
        nothing = torch.zeros_like(visible)
        attended = append_and_attend(self.project_queries(x, rope), empty, empty, cache, nothing, 1)
        cache.add_uncommitted(tokens.shape[1])
        return self.finish_states(x, attended)


find_on_policy.register(MixtureOfAttentions, lambda drafter: None)


def sample_steps(batch: Batch, num_steps: int, seed: int, step: int) -> Tensor:
    """Return the draft step [B, T] of every entry: texts are cut into windows of 1 to
    `num_steps` entries at random.
    """
    rows = []
    for tokens, _ in batch.split_documents():
        source = sequence_generator(ANCHORS, seed, tokens, step)
        index = torch.arange(len(tokens))
        sizes = torch.randint(1, num_steps + 1, (len(tokens),), generator=source)
        ends = sizes.cumsum(0)
        window = torch.searchsorted(ends, index, right=True)
        rows.append(index - (ends - sizes)[window])
    return pad_or_pack(rows, batch.lengths is not None).to(batch.tokens.device)


def see_before_cuts(positions: Tensor, steps: Tensor) -> Tensor:
    """Return which entries [B, T, T] each entry sees: those of its document up to its cut,
    `steps` [B, T] before it.
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    start = index - positions
    return (index <= (index - steps)[..., None]) & (index >= start[..., None])
