"""Falcon (Gao et al., 2024, arXiv 2412.12639): a layer that drafts blocks of k tokens, one block
after another.

Shapes: B batch, T tokens, P new positions, D target width, V vocabulary, S slots of a block (k), R
supervised rows. Entry t pairs the target's feature at t with token t + 1. A block of S entries that
ends at t predicts the features at t + 1 to t + S, and from these the tokens t + 2 to t + 1 + S;
entry e of it predicts feature e + S.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from spectrain.config.values import LayerCount, NotNegative, Seed, Share, Steps
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capabilities, DraftingCost
from spectrain.drafters.context import Context
from spectrain.drafters.layers.llama_layer import (
    Attention,
    Mlp,
    Rotary,
    append_and_attend,
    llama_config,
)
from spectrain.drafters.layers.vocabulary import Supervision, VocabularyDrafter, embed_as_target
from spectrain.drafters.step_cost import BatchShape, Judged, Run, StepCost
from spectrain.features.batch import Batch, pad_or_pack
from spectrain.kernels.fused_attention import fused_attention
from spectrain.kernels.linear_divergence import argmax_and_log_z
from spectrain.models.features import Layer
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.randomness import ANCHORS, NOISE, sequence_generator, unpadded_length
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath
from spectrain_research.shared.on_policy import find_on_policy

from .rollout import BlockRollout

LstmState = tuple[Tensor, Tensor]  # hidden and cell state, [layers, B, D] each


class FalconCost(DraftingCost):
    drafter: Falcon

    def num_passes(self, depth: float) -> float:
        return max(1.0, depth / self.drafter.block_size) if depth else 0.0

    def weights(self, target: Target) -> nn.Module:
        return nn.ModuleList([self.drafter, self.drafter.head.output])


@dataclass(frozen=True)
class Blocks:
    """How the entries of a batch are cut into blocks."""

    positions: Tensor  # [1, T] of every entry in its document
    number: Tensor  # [B, T] of every entry's block in its document
    slot: Tensor  # [B, T] of every entry in its block

    @classmethod
    def draw(cls, batch: Batch, size: int, seed: int, step: int) -> Blocks:
        """Cut every document into blocks of `size` entries, the first of a random size."""
        rows = []
        for tokens, _ in batch.split_documents():
            source = sequence_generator(ANCHORS, seed, tokens, step)
            rows.append(
                torch.arange(len(tokens)) + int(torch.randint(size, (1,), generator=source))
            )
        shifted = pad_or_pack(rows, batch.lengths is not None).to(batch.tokens.device)
        return cls(batch.positions, shifted // size, shifted % size)

    def see_blocks(self) -> Tensor:
        """Return the relaxed causal mask [B, T, T]: an entry sees those of its document up to
        the end of its block.
        """
        index = torch.arange(self.positions.shape[1], device=self.positions.device)
        start = index - self.positions
        same_document = start[..., None] == start[:, None]
        return same_document & (self.number[:, None] <= self.number[..., None])


class Falcon(VocabularyDrafter):
    """One fused input per token, an LSTM over the text, and an attention layer whose k x k blocks
    on the diagonal are open.

        z_t = W [h_t; E(x_(t+1))]        u = z + LSTM(z)        f_(t+k) = layer(u)[t]

    Entries of a block see each other, so one pass predicts k features at once. Below them the tree
    grows by another block per pass, from the predicted features and the drafted tokens. Coupled
    sequential glancing distillation: a first pass over the true inputs predicts every feature and
    token; N = `glance` x (the number of wrong tokens) random entries keep the true inputs, the
    others take the predicted ones, and a second pass learns from these. Its loss is SmoothL1(f, h),
    per feature element, + `ce` x KL(p || q). `first_pass` also trains the first pass, which the
    authors do not.
    """

    layers: tuple[Layer, ...] = ("final",)
    capabilities = Capabilities(cost=FalconCost)
    divergence = "forward_kl"

    def __init__(
        self,
        target: Target,
        # Number of tokens that one pass drafts (the paper's k).
        block_size: Steps = 2,
        # Number of LSTM layers.
        num_lstm_layers: LayerCount = 2,
        # Share of wrong predictions, as a number of random entries, that keep the true inputs in
        # the second pass.
        glance: Share = 0.5,
        # Weight of the divergence from the target's distribution, next to the regression of
        # features.
        ce: NotNegative = 0.1,
        # Weight of the same losses of the first pass, which reads the true inputs.
        first_pass: NotNegative = 0.0,
        # Seed of the random choices in training.
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.glance = glance
        self.ce = ce
        self.first_pass = first_pass
        self.seed = seed
        self.head = target.head
        width = target.width
        config = llama_config(target)
        self.fuse = nn.Linear(2 * width, width, bias=False)
        with torch.no_grad():
            self.fuse.weight.mul_(0.1)
            self.fuse.weight[:, :width] += torch.eye(width)
        self.lstm = nn.LSTM(width, width, num_lstm_layers, batch_first=True)
        self.input_norm, self.mlp_norm = (
            nn.RMSNorm(width, eps=config.rms_norm_eps) for _ in range(2)
        )
        self.attention = Attention(config, width)
        self.mlp = Mlp(config)
        self.rotary = Rotary(config)
        rows = target.head.vocab_size
        self.register_buffer("d2t", torch.zeros(rows, dtype=torch.int64), persistent=False)
        self.register_buffer("t2d", torch.ones(rows, dtype=torch.bool), persistent=False)
        self.cache: TreeCache | None = None

    @property
    def stages(self) -> list[Stage]:
        return [Stage.single(self, self.layers)]

    @property
    def dtype(self) -> torch.dtype:
        return self.fuse.weight.dtype

    def fuse_inputs(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Return the inputs z [.., D] of entries from features [.., D] and the tokens [..] after
        them.
        """
        return self.fuse(
            torch.cat([features.to(self.dtype), embed_as_target(self, tokens)], dim=-1)
        )

    def project_inputs(
        self, states: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values of entries u [B, P, D]."""
        return self.attention.project_qkv(self.input_norm(states), rope)

    def finish_features(self, states: Tensor, attended: Tensor) -> Tensor:
        """Return the predicted features [B, P, D] from u and the output of the attention [B, H,
        P, head size].
        """
        states = states + self.attention.project_output(attended)
        return states + self.mlp(self.mlp_norm(states))

    def log_q(self, features: Tensor) -> Tensor:
        """Compute log q, [.., D] -> [.., V]."""
        return self.head.logits(features.to(self.head.output.weight.dtype)).float().log_softmax(-1)

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of two passes over all tokens, and of the logits of the predicted
        tokens, which are judged after each trained pass and read between the passes.
        """
        trains_first = self.first_pass > 0
        passes = Run(
            self,
            batch.tokens,
            batch.length,
            calls=2,
            mask=batch.tokens * batch.length,
            # The sum of the fused input and the LSTM's output.
            extra=target.width,
            stored_share=1.0 if trains_first else 0.5,
        )
        other_rows = batch.tokens + batch.supervised * trains_first
        judged = Judged(
            batch.supervised, target.head.vocab_size, batch.supervised, other_rows=other_rows
        )
        return StepCost([passes], judged)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        assert batch.features is not None
        final = batch.features.at_layer("final").to(self.dtype)
        tokens = batch.tokens.roll(-1, dims=1)
        blocks = Blocks.draw(batch, self.block_size, self.seed, state.step)
        supervision = Supervision(self, batch)
        grad = torch.is_grad_enabled() and self.first_pass > 0
        with torch.set_grad_enabled(grad):
            first = self.predict_features(final, tokens, batch, blocks)
        features, drafted = self.mix_predictions(first.detach(), final, tokens, batch, state.step)
        second = state.run_checkpointed(self.predict_features, features, drafted, batch, blocks)
        losses = self.judge_features(second, final, supervision, blocks, 1.0, "")
        if self.first_pass:
            losses.terms.update(
                self.judge_features(
                    first, final, supervision, blocks, self.first_pass, "first_"
                ).terms
            )
        return losses

    def predict_features(
        self, features: Tensor, tokens: Tensor, batch: Batch, blocks: Blocks
    ) -> Tensor:
        """Return the features [B, T, D] that every entry predicts, `block_size` positions
        further on.
        """
        z = self.fuse_inputs(features, tokens)
        states = z + self.run_lstm(z, batch)
        q, k, v = self.project_inputs(states, self.rotary(states, batch.positions))
        return self.finish_features(states, fused_attention(q, k, v, blocks.see_blocks()[:, None]))

    def run_lstm(self, z: Tensor, batch: Batch) -> Tensor:
        """Run the LSTM over every document of a batch from its beginning, [B, T, D]."""
        if batch.lengths is None:
            outputs: Tensor = self.lstm(z)[0]
            return outputs
        padded = nn.utils.rnn.pad_sequence(list(z[0].split(batch.lengths)), batch_first=True)
        rows = self.lstm(padded)[0]
        return torch.cat([row[:length] for row, length in zip(rows, batch.lengths)])[None]

    @torch.no_grad()
    def mix_predictions(
        self, first: Tensor, final: Tensor, tokens: Tensor, batch: Batch, step: int
    ) -> tuple[Tensor, Tensor]:
        """Return features [B, T, D] and next tokens [B, T] of the second pass: predicted ones but
        where it glances.

        Entry t has a prediction, by entry t - k, from position k of its document on.
        """
        shift = self.block_size
        predicted = torch.where(
            (batch.positions >= shift)[..., None], first.roll(shift, dims=1), final
        )
        states = predicted.flatten(0, 1).to(self.head.output.weight.dtype)
        # By chunks: the logits of all entries are never in memory at one time.
        likeliest = argmax_and_log_z(states, self.head.projection)[0].view_as(tokens)
        drafted = torch.where(batch.positions >= shift, likeliest, tokens)
        rows = []
        for wrong, (text, _) in zip(batch.split_values(drafted != tokens), batch.split_documents()):
            source = sequence_generator(NOISE, self.seed, text, step)
            # No token of the text follows its last entry.
            num_entries = max(0, unpadded_length(text) - 1)
            count = int(self.glance * int(wrong[:num_entries].sum()))
            glanced = torch.zeros(len(text), dtype=torch.bool)
            glanced[torch.randperm(num_entries, generator=source)[:count]] = True
            rows.append(glanced)
        glances = pad_or_pack(rows, batch.lengths is not None).to(tokens.device)
        return torch.where(glances[..., None], final, predicted), torch.where(
            glances, tokens, drafted
        )

    def judge_features(
        self,
        predicted: Tensor,
        final: Tensor,
        supervision: Supervision,
        blocks: Blocks,
        weight: float,
        prefix: str,
    ) -> Losses:
        """Return the losses of predicted features [B, T, D] at the entries whose token is
        supervised.
        """
        shift = self.block_size
        label_rows = F.pad(supervision.row_index[:, shift:], (0, shift), value=-1)
        inside = F.pad((blocks.positions >= shift)[:, shift:], (0, shift))
        judged = (label_rows >= 0) & inside
        rows = label_rows[judged]
        hidden = predicted[judged]
        result = supervision.judge_with_head(self.head.projection, hidden, rows)
        error = (
            F.smooth_l1_loss(
                hidden.float(), final.roll(-shift, dims=1)[judged].float(), reduction="none"
            )
            .mean(-1)
            .sum()
        )
        terms = {
            f"{prefix}feature": weight * error,
            f"{prefix}{self.divergence}": weight * self.ce * result.loss,
        }
        correct = result.predictions == supervision.labels[rows]
        return Losses.by_depth(terms, correct, blocks.slot[judged], shift)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the features of the tokens accepted last, then run the block that ends with the
        newest token.
        """
        size = self.block_size
        builder = context.builder
        self.cache = cache = context.drafting_cache(self.cache, 1, size * (builder.max_drafted + 2))
        final = context.new_features.at_layer("final")
        z = self.fuse_inputs(final, context.next_tokens)
        states = self.continue_lstm(z, context)
        rope = self.rotary(states, cache.next_slots(states.shape[1]))
        _, keys, values = self.project_inputs(states, rope)
        cache.write(0, keys, values)
        cache.add_uncommitted(states.shape[1])
        cache.commit(None, context.num_new)
        return Draft(BlockRollout(self, cache, self._run_last_block(cache), self.lstm_state))

    def continue_lstm(self, z: Tensor, context: Context) -> Tensor:
        """Continue the LSTM over new entries [B, P, D]; return u of them, and store its state
        and u of the last entries.
        """
        counts = context.num_new.cpu()
        if context.round == 0:
            zeros = z.new_zeros(self.lstm.num_layers, len(z), z.shape[-1])
            self.lstm_state: LstmState = (zeros, zeros)
            self.recent = z.new_zeros(len(z), 0, z.shape[-1])
        packed = pack_padded_sequence(
            z, counts.clamp(min=1), batch_first=True, enforce_sorted=False
        )
        outputs, after = self.lstm(packed, self.lstm_state)
        is_read = (context.num_new > 0)[None, :, None]
        self.lstm_state = (
            torch.where(is_read, after[0], self.lstm_state[0]),
            torch.where(is_read, after[1], self.lstm_state[1]),
        )
        states = z + pad_packed_sequence(outputs, batch_first=True, total_length=z.shape[1])[0]
        # The last entries of every text; a shorter text repeats its first one.
        joined = torch.cat([self.recent, states], dim=1)
        before = self.recent.shape[1]
        index = (
            before
            + context.num_new[:, None]
            - self.block_size
            + torch.arange(self.block_size, device=z.device)
        )
        self.recent = joined.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, z.shape[-1]))
        return states

    def _run_last_block(self, cache: TreeCache) -> Tensor:
        """Return the features [B, S, D] that the committed block which ends at the newest entry
        predicts.
        """
        offsets = torch.arange(1 - self.block_size, 1, device=self.recent.device)
        positions = (cache.lengths[:, None] - 1 + offsets).clamp(min=0)
        queries, keys, values = self.project_inputs(
            self.recent, self.rotary(self.recent, positions)
        )
        # The keys of these entries are committed already: they are written once more where nothing
        # sees them.
        nothing = torch.zeros(
            len(queries), self.block_size, self.block_size, dtype=torch.bool, device=queries.device
        )
        attended = append_and_attend(queries, keys, values, cache, nothing, 0)
        cache.roll_back()
        return self.finish_features(self.recent, attended)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        """Remove the draft's uncommitted entries from the cache."""
        assert self.cache is not None
        self.cache.roll_back()


find_on_policy.register(Falcon, lambda drafter: None)
