"""LiLiCorr (arXiv 2608.20530): DFlash, whose candidates of all slots are read as a lattice that
scores every transition.

Shapes: B batch, A blocks, K drafts of a block, C candidates of a slot, N = K C nodes of a lattice,
W width of the target, H width of the correction, M width of factors, V draft vocabulary, F frontier
nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.config.values import Count, LayerCount, NotNegative, Number, Positive, Width
from spectrain.drafters.layers.block_drafter import BlockConfig, BlockDrafter
from spectrain.drafters.layers.candidates import CandidateRollout, candidate_logits
from spectrain.drafters.layers.judged_drafts import JudgedDrafts, SlotStates
from spectrain.drafters.layers.vocabulary import embed_as_target
from spectrain.errors import UserError
from spectrain.kernels import linear_divergence
from spectrain.models.host_copies import copy_to_device, on_host
from spectrain.models.target import Target
from spectrain.trees.rollout import Rollout

from .base import Losses
from .context import Context
from .step_cost import BatchShape, Run, StepCost

NUM_FEATURES = 5


@dataclass(frozen=True, kw_only=True)
class LiLiCorrConfig(BlockConfig):
    """Settings of LiLiCorr."""

    # Number of candidate tokens of each slot.
    top_k: Count = 8
    # Width of the correction; 0 is the target's width.
    correction_width: Number = 1024
    # Number of layers of the correction.
    correction_layers: LayerCount = 2
    # Number of attention heads of the correction; it must divide its width.
    correction_heads: Width = 8
    # Inner width of the correction's feed-forward parts, in its widths.
    correction_mlp_ratio: Count = 2
    # Width of the vectors whose products score transitions.
    factor_width: Width = 1024
    # Smallest length of these vectors before they are normalised.
    vector_eps: Positive = 1e-4
    # Factor of their products.
    logit_scale: Positive = 8.0
    # Weight of the cross-entropy of the data's token among the candidates.
    candidate_weight: NotNegative = 0.25
    # Weight of the expected loss of the target's logit against the data's token.
    penalty_weight: NotNegative = 0.25


class CorrectionLayer(nn.Module):
    """A bidirectional layer over the nodes of a lattice: attention with an additive bias, then a
    feed-forward part.
    """

    def __init__(self, width: int, num_heads: int, mlp_ratio: int, eps: float) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(width, eps=eps)
        self.attn = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.mlp_norm = nn.RMSNorm(width, eps=eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_ratio * width), nn.SiLU(), nn.Linear(mlp_ratio * width, width)
        )
        # Per row: the activation and one of the two sums; the other replaces the output of `mlp`.
        self.stored_values = (mlp_ratio + 1) * width

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Transform nodes [A, N, H] with an attention bias [heads, N, N]."""
        projected = F.linear(self.attn_norm(x), self.attn.in_proj_weight, self.attn.in_proj_bias)
        q, k, v = (
            part.unflatten(-1, (self.attn.num_heads, -1)).transpose(1, 2)
            for part in projected.chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].to(q.dtype))
        x = x + self.attn.out_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class LatticeCorrection(nn.Module):
    """Scores the candidates of each slot after each candidate of the slot before it, all in one
    pass over the lattice.
    """

    def __init__(self, config: LiLiCorrConfig, width: int, eps: float) -> None:
        super().__init__()
        size = config.correction_width or width
        if size % config.correction_heads:
            raise UserError(
                f"drafter.correction_heads={config.correction_heads}: use a divisor of the "
                f"correction's width, {size}"
            )
        slots = config.block_size - 1
        heads = config.correction_heads
        factors = config.factor_width
        self.num_slots = slots
        self.num_heads = heads
        self.eps = config.vector_eps
        self.scale = config.logit_scale
        self.token_proj = nn.Identity() if size == width else nn.Linear(width, size)
        self.pass_hidden_proj = nn.Linear(width, size)
        self.context_proj = nn.Linear(width, size)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(NUM_FEATURES),
            nn.Linear(NUM_FEATURES, size),
            nn.SiLU(),
            nn.Linear(size, size),
        )
        self.slot_embedding = nn.Parameter(0.02 * torch.randn(1, 1, slots, 1, size))
        self.rank_embedding = nn.Parameter(0.02 * torch.randn(1, 1, 1, config.top_k, size))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * config.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.layers = nn.ModuleList(
            CorrectionLayer(size, heads, config.correction_mlp_ratio, eps)
            for _ in range(config.correction_layers)
        )
        self.output_norm = nn.RMSNorm(size, eps=eps)
        self.anchor_norm = nn.RMSNorm(size, eps=eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head, self.anchor_out_head = (
            nn.Linear(size, factors) for _ in range(3)
        )

    def forward(
        self, embedded: Tensor, log_probs: Tensor, states: Tensor, context: Tensor
    ) -> Tensor:
        """Return scores [A, K, C, C]: entry (k, i, j) scores candidate j of draft k after candidate
        i of the draft before; all i of the first draft are alike. Takes the target's embeddings [A,
        K, C, W] and log q [A, K, C] of the candidates, the slots' states [A, K, W] and the context
        [A, W] of the position before the block."""
        slots, size = log_probs.shape[1:]
        x = self.token_proj(embedded) + self.pass_hidden_proj(states)[:, :, None]
        x = (
            x
            + self.feature_mlp(self._describe(log_probs).to(x.dtype))
            + self.slot_embedding[0]
            + self.rank_embedding[0]
        )
        x = x.flatten(1, 2)
        bias = self._attention_bias(size)
        if not len(x):
            # Attention over no rows gives its bias no gradient, for which other processes wait.
            x = x + 0 * bias.sum()
        for layer in self.layers:
            x = layer(x, bias)
        h = self.output_norm(x).unflatten(1, (slots, size))
        a = self.anchor_norm(self.context_proj(context))
        around = a[:, None, None].expand_as(h)
        f = F.silu(self.factor_input_proj(torch.cat([h, around, h * around], dim=-1)))
        incoming, outgoing = (
            F.normalize(head(f), dim=-1, eps=self.eps) for head in (self.in_head, self.out_head)
        )
        start = F.normalize(self.anchor_out_head(a), dim=-1, eps=self.eps)[:, None, None].expand(
            -1, 1, size, -1
        )
        before = torch.cat([start, outgoing[:, :-1]], dim=1)
        return self.scale * (before @ incoming.transpose(-1, -2)).float()

    def _describe(self, log_probs: Tensor) -> Tensor:
        """Return the features [A, K, C, 5] of candidates in the order of their probability."""
        size = log_probs.shape[-1]
        rank = torch.arange(size, device=log_probs.device)
        best = log_probs.amax(-1, keepdim=True)
        features = [
            log_probs,
            log_probs.exp(),
            log_probs - best,
            rank / max(size - 1, 1),
            (rank == 0).float(),
        ]
        return torch.stack([feature.expand_as(log_probs) for feature in features], dim=-1)

    def _attention_bias(self, size: int) -> Tensor:
        """Return the attention bias [heads, N, N] of nodes by the distance of their slots."""
        slots = torch.arange(self.num_slots, device=self.same_slot_bias.device).repeat_interleave(
            size
        )
        distance = slots[:, None] - slots
        bias = self.relative_slot_bias[:, distance + self.num_slots]
        return bias + (distance == 0) * self.same_slot_bias[:, None, None]


class LiLiCorr(BlockDrafter):
    """Drafts among the `top_k` most likely tokens of each slot, by the lattice's scores after the
    draft before.

    The loss is DFlash's cross-entropy of the data, weighted by exp(-d / decay). In blocks whose
    drafts all carry loss, as long as the data's tokens are candidates, the correction adds the
    cross-entropy of the data's token among the candidates, and the expected difference of the
    target's logits, sum_i q_i max(0, t(data's token) - t(candidate i)). Candidates have no
    gradient, their log-probabilities have.
    """

    saved = replace(
        BlockDrafter.saved,
        shape=(
            *BlockDrafter.saved.shape,
            "block_size",
            "top_k",
            "correction_width",
            "correction_layers",
            "correction_heads",
            "correction_mlp_ratio",
            "factor_width",
            "vector_eps",
            "logit_scale",
        ),
    )
    label_source = "data"

    def __init__(self, target: Target, config: LiLiCorrConfig) -> None:
        super().__init__(target, config)
        if config.sample_from_anchor:
            raise UserError(
                "drafter.sample_from_anchor=true: the lattice has no nodes for slot 0; leave it out"
            )
        self.divergence = "cross_entropy"
        self.top_k = min(config.top_k, len(self.d2t))
        self.candidate_weight, self.penalty_weight = config.candidate_weight, config.penalty_weight
        eps = float(self.norm.eps or 1e-6)
        self.lilicorr = LatticeCorrection(replace(config, top_k=self.top_k), target.width, eps)

    def score_lattice(
        self, candidates: Tensor, log_probs: Tensor, states: Tensor, context: Tensor
    ) -> Tensor:
        """Return the scores [A, K, C, C] of transitions between candidates, in draft ids [A, K,
        C].
        """
        return self.lilicorr(
            embed_as_target(self, self.draft_ids[candidates]), log_probs, states, context
        )

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return DFlash's cost with the correction over all candidates and the logits that rank
        them.
        """
        cost = super().step_cost(target, batch)
        # Only blocks whose drafts all carry loss have a lattice: not those near the end of a text.
        incomplete = batch.texts * (self.num_drafts - 1) / max(1, batch.supervised)
        drafts = cost.judged.rows * max(0.0, 1 - incomplete)
        chunk = min(drafts, linear_divergence.CHUNK_ROWS)
        rows = drafts * self.top_k
        nodes = self.num_drafts * self.top_k
        size = self.lilicorr.output_norm.weight.numel()
        run = Run(
            self.lilicorr,
            rows,
            nodes,
            # Attention with a trained bias stores its weights.
            mask=rows * nodes * self.lilicorr.num_heads,
            # The embedding of the candidate, and the sum of the inputs.
            extra=target.width + size,
            stored_share=chunk / max(1.0, drafts),
        )
        # The log-probabilities that rank the candidates, and gradients of the nodes' vectors.
        backward_values = chunk * (cost.judged.vocab_size + 5 * size * self.top_k)
        return replace(
            cost,
            runs=[*cost.runs, run],
            # Candidates are selected, then ranked before and in the backward pass, with gradients.
            judged=replace(cost.judged, other_rows=4 * drafts),
            backward_values=cost.backward_values + backward_values,
        )

    def judge_drafts(self, drafts: JudgedDrafts) -> Losses:
        """Return DFlash's loss and those of the correction, in chunks of blocks."""
        if not drafts.piece.is_whole:
            raise UserError(
                "trainer.context_parallel: LiLiCorr reads the state before each block; leave it out"
            )
        weights = drafts.decayed_weights(self.decay)
        judged = drafts.judge(self.projection, weights)
        losses = {"cross_entropy": judged.loss}
        is_complete = on_host(drafts.is_judged).all(1)
        complete = copy_to_device(is_complete.nonzero()[:, 0], drafts.states.device)
        features = drafts.batch.input_features.fuse_layers(self.fused_layers).flatten(0, 1)
        context = self.project_fused(features[drafts.anchors.token_indices[complete] - 1])
        # Without blocks, the correction still needs gradients, because other processes wait for
        # them.
        chunk = max(1, linear_divergence.CHUNK_ROWS // self.num_drafts)
        chunks = [*linear_divergence.split_rows(len(complete), chunk)] or [slice(0, 0)]
        candidates, lattice_weights = self._select_candidates(drafts, complete, chunks)
        parts = [
            self._judge_lattices(
                drafts, complete[rows], context[rows], candidates[rows], lattice_weights[rows]
            )
            for rows in chunks
        ]
        for name, weight, terms in zip(
            ("candidates", "penalty"), (self.candidate_weight, self.penalty_weight), zip(*parts)
        ):
            losses[name] = weight * torch.stack(terms).sum()
        return drafts.sum_losses(losses, judged.predictions)

    @torch.no_grad()
    def _select_candidates(
        self, drafts: JudgedDrafts, blocks: Tensor, chunks: list[slice]
    ) -> tuple[Tensor, Tensor]:
        """Return the candidates [a, K, C] of blocks, and the loss weights [a, K] of their slots:
        those up to the first slot whose token is no candidate share the weight of the document."""
        candidates = torch.cat(
            [
                self.compute_products(drafts.states[blocks[rows]]).topk(self.top_k, dim=-1).indices
                for rows in chunks
            ]
        )
        among = (self.draft_ids[candidates] == drafts.tokens[blocks][..., None]).any(-1)
        is_scored = torch.zeros(drafts.is_judged.shape, device=among.device)
        is_scored[blocks] = among.long().cumprod(1).to(is_scored.dtype)
        return candidates, drafts.fill_judged(drafts.normalize_weights(is_scored))[blocks]

    def _judge_lattices(
        self,
        drafts: JudgedDrafts,
        blocks: Tensor,
        context: Tensor,
        candidates: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the summed losses of the correction over blocks; the backward pass computes
        their logits again.
        """
        gaps = logit_gaps(self.head.projection, drafts, blocks, self.draft_ids[candidates])
        weights_and_gaps = weights, gaps
        inputs = drafts.states[blocks], context, candidates, drafts.tokens[blocks], weights_and_gaps
        losses: tuple[Tensor, Tensor] = checkpoint(
            self._lattice_losses, *inputs, use_reentrant=False
        )
        return losses

    def _lattice_losses(
        self,
        states: Tensor,
        context: Tensor,
        candidates: Tensor,
        tokens: Tensor,
        weights_and_gaps: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy among candidates and the penalty, after the data's tokens [a,
        K].
        """
        weights, gaps = weights_and_gaps
        log_probs = self.log_q(self.compute_products(states)).gather(-1, candidates)
        scores = self.score_lattice(candidates, log_probs, states, context)
        label = (self.draft_ids[candidates] == tokens[..., None]).long().argmax(-1)  # [a, K]
        before = F.pad(label[:, :-1], (1, 0))
        rows = scores.gather(2, before[..., None, None].expand(-1, -1, 1, scores.shape[-1]))[
            :, :, 0
        ].log_softmax(-1)
        cross_entropy = -rows.gather(-1, label[..., None])[..., 0]
        return (weights * cross_entropy).sum(), (weights * (rows.exp() * gaps).sum(-1)).sum()

    # Decoding

    def make_rollout(self, context: Context, slots: SlotStates) -> Rollout:
        states = slots.draft_states
        log_probs, candidates = self.log_q(self.compute_products(states)).topk(self.top_k, dim=-1)
        fused = context.last_state(context.new_features.fuse_layers(self.fused_layers))[:, 0]
        scores = self.score_lattice(candidates, log_probs, states, self.project_fused(fused))
        return _Walk(context.root, candidates, self.draft_ids, scores)


@torch.no_grad()
def logit_gaps(
    projection: linear_divergence.Projection,
    drafts: JudgedDrafts,
    blocks: Tensor,
    candidates: Tensor,
) -> Tensor:
    """Return max(0, t(data's token) - t(candidate)) [a, K, C] of the target's logits, for
    candidates [a, K, C] in its ids.
    """
    assert drafts.batch.features is not None
    final = drafts.batch.features.at_layer("final").flatten(0, 1)[drafts.token_indices[blocks]]
    tokens = torch.cat([drafts.tokens[blocks][..., None], candidates], dim=-1)
    logits = candidate_logits(projection, final, tokens)
    return (logits[..., :1] - logits[..., 1:]).clamp(min=0)


class _Walk(CandidateRollout):
    """Drafts one round: a node's children are scored by the lattice's row of its own token."""

    def __init__(self, root: Tensor, candidates: Tensor, draft_ids: Tensor, scores: Tensor) -> None:
        super().__init__(root, candidates, draft_ids)
        self.scores = scores.flatten(2)  # [B, K, C C]

    def score_candidates(self, depth: Tensor, tokens: Tensor) -> Tensor:
        size = self.candidates.shape[-1]
        before = self.ids[
            self.candidates.gather(1, (depth - 1).clamp(min=0)[..., None].expand(-1, -1, size))
        ]
        # the root's is arbitrary, and its rows are alike
        index = (before == tokens[..., None]).long().argmax(-1)
        rows = self.scores.gather(1, depth[..., None].expand(-1, -1, size * size)).unflatten(
            -1, (size, size)
        )
        return rows.gather(2, index[..., None, None].expand(-1, -1, 1, size))[:, :, 0]
