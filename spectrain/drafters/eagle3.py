"""EAGLE-3 (Li et al., 2025): one decoder layer that rolls over its own hidden states.

Shapes: B batch, T tokens, D target width, V draft vocabulary, R supervised rows, P fresh positions, F frontier nodes.
Index t pairs the target's features at t with the embedding of token t + 1, and predicts token t + 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.attention import unrolled_attention
from spectrain.models.features import Features, Layer
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.settings.values import Share, Steps, VocabularySize
from spectrain.trees.base import Branches, Draft, Rollout
from spectrain.trees.token_tree import Accepted

from .abilities import Capture, SavedFiles
from .base import Losses, Stage, TrainingState
from .context import Context
from .shared.layers import Attention, Mlp, llama_config, norm_scale, rotary
from .shared.losses import Loss
from .shared.vocabulary import Supervision, VocabularyDrafter

LAYER = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters",
    "max_position_embeddings",
)  # fmt: skip
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "own_embedding")


def default_layers(num_layers: int) -> list[int]:
    """The layers that engines fuse where nothing is said: the residual stream entering these."""
    return sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})


class Eagle3(VocabularyDrafter):
    """EAGLE-3 with training-time test (section 3.2): `ttt_steps` unrolled drafts share one backward pass.

    Three layers of the target are fused into the first hidden state; each further draft step reads the un-normed output of
    the step before. The head is the drafter's own, over the `vocab_size` tokens that the assistant uses most.

    `architecture` says what differs from the target's layer: keys of a Llama configuration in LAYER, or variants that other
    projects train, each false unless it is said. norm_before_residual: the normed state is the residual stream too;
    norm_before_fc: one norm over the fused features; fc_norm: one for each layer's; norm_output: the normed output is what
    the next step reads (EAGLE-3.1); own_embedding: the drafter keeps its input embedding, which is not trained.
    """

    saved = SavedFiles(shape=("vocab_size", "layers", "architecture"))
    abilities = replace(VocabularyDrafter.abilities, capture=Capture(carried=("cache",)))

    def __init__(
        self,
        target: Target,
        ttt_steps: Steps = 7,
        vocab_size: VocabularySize = 32000,
        layers: list[int] | None = None,
        loss: Loss = "forward_kl",
        step_decay: Share = 0.8,  # weight of each draft step's loss against the one before it
        start: Literal["target", "random"] = "target",  # the layer starts as a copy of the target's, or at random
        architecture: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        asked = check_architecture(architecture or {})
        config = llama_config(target, {key: value for key, value in asked.items() if key in LAYER})
        chosen = default_layers(target.num_layers) if layers is None else sorted(set(layers))
        if not chosen:
            raise UserError("drafter.layers=[]: name at least one layer, or leave it out")
        target.check_layers(chosen)
        self.fused: tuple[Layer, ...] = tuple(chosen)
        self.layers = (*self.fused, "final")
        self.ttt_steps, self.divergence, self.step_decay, self.start = ttt_steps, loss, step_decay, start
        width, vocab_size = target.width, min(vocab_size, target.head.vocab_size)
        self.head = target.head
        self.norm_before_residual, self.norm_output = asked["norm_before_residual"], asked["norm_output"]
        self.input_norm = nn.RMSNorm(len(self.fused) * width, eps=config.rms_norm_eps) if asked["norm_before_fc"] else None
        norms = [nn.RMSNorm(width, eps=config.rms_norm_eps) for _ in self.fused] if asked["fc_norm"] else None
        self.fc_norm = None if norms is None else nn.ModuleList(norms)
        self.embed_tokens = None
        if asked["own_embedding"]:
            self.embed_tokens = nn.Embedding(target.head.vocab_size, width).requires_grad_(False)
        self.fc = nn.Linear(len(self.fused) * width, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.rotary = rotary(config)
        self.add_vocabulary(vocab_size, target.head.vocab_size)
        self.cache: TreeCache | None = None

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and, unless `start` is random, start from the target's own head and features.

        The head and its norm are the target's, and fc passes the last fused layer on, so the first logits are near the
        target's own. The layer itself starts at random: copied from the target's last layer it learns slower (measured on
        SmolLM2, 46k tokens: agreement 0.24 against 0.30), for that layer predicts the token that is already known.
        """
        ids = self.choose_vocabulary(token_counts)
        if self.embed_tokens is not None:
            with torch.no_grad():
                every = torch.arange(self.head.vocab_size, device=target.device)
                self.embed_tokens.weight.copy_(self.head.embed(every))
        if self.start == "random":
            return
        with torch.no_grad():
            self.lm_head.weight.copy_(self.head.output.weight[ids])
            self.fc.weight.zero_()
            self.fc.weight[:, -target.width :].fill_diagonal_(1.0)
            scale = norm_scale(target)
            if scale is not None:
                self.norm.weight.copy_(scale)

    # Training

    @property
    def stages(self) -> list[Stage]:
        return [Stage.whole(self, self.layers, final_reach=0)]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Unroll the drafter over its own hidden states, with the true tokens as input; gradients flow through it all.

        Step i at index t is supervised where token t + 2 + i is the assistant's, so the padded tail never is. The sum of
        the steps is weighted by step_decay^i.
        """
        assert batch.features is not None
        supervision = Supervision(self, batch)
        hidden = self.fuse(batch.features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states: list[Tensor] = []  # of the supervised indices of every step
        for step in range(max(1, min(self.ttt_steps, batch.longest - 2))):
            hidden, k, v = state.checkpointed(self._unroll, batch, hidden, step, keys[:], values[:])
            keys.append(k)
            values.append(v)
            states.append(hidden[supervision.rows(step)])
        return self._judge(supervision, states)

    def _unroll(
        self, batch: Batch, hidden: Tensor, step: int, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One draft step over hidden states [B, T, D], behind the keys and values of the steps before; its own with it."""
        tokens = batch.tokens.roll(-1 - step, dims=1)  # what a document takes from beyond its end is never supervised
        x, residual = self.inputs(tokens, hidden)
        q, k, v = self.self_attn.project(x, self.rotary(x, batch.positions + step))
        attended = unrolled_attention(q, [*keys, k], [*values, v], batch.lengths)
        return self.outputs(residual + self.self_attn.output(attended)), k, v

    def _judge(self, supervision: Supervision, states: list[Tensor]) -> Losses:
        """All steps at once, ordered by the answers that they share, so that the target is asked once for each of these."""
        answers = [supervision.answers(step) for step in range(len(states))]
        answer, order = torch.cat(answers).sort(stable=True)
        step = torch.cat([torch.full_like(found, number) for number, found in enumerate(answers)])[order]
        hidden = self.read_by_head(torch.cat(states).index_select(0, order))
        loss, right = supervision.judge(hidden, self.lm_head, answer, self.step_decay**step)
        hits = torch.zeros(self.ttt_steps, device=hidden.device).index_add(0, step, right.float())
        counts = torch.zeros_like(hits).index_add(0, step, torch.ones_like(right, dtype=hits.dtype))
        return Losses({self.divergence: loss}, hits, counts)

    def fuse(self, features: Features) -> Tensor:
        """The first hidden state [B, T, D]: the fused layers of the target through fc."""
        fused = features.fused(self.fused).to(self.fc.weight.dtype)
        if self.input_norm is not None:
            fused = self.input_norm(fused)
        if self.fc_norm is not None:
            parts = fused.chunk(len(self.fc_norm), dim=-1)
            fused = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(fused)

    def inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [B, T, 2 D], and the residual stream [B, T, D]."""
        with torch.no_grad():
            embed = self.head.embed if self.embed_tokens is None else self.embed_tokens
            embedded = embed(tokens).to(self.fc.weight.dtype)
        normed = self.hidden_norm(hidden)
        return torch.cat([self.input_layernorm(embedded), normed], dim=-1), normed if self.norm_before_residual else hidden

    def outputs(self, hidden: Tensor) -> Tensor:
        """The state [B, T, D] that the next draft step reads, from the residual stream behind attention."""
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return self.norm(hidden) if self.norm_output else hidden

    def read_by_head(self, hidden: Tensor) -> Tensor:
        return hidden if self.norm_output else self.norm(hidden)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the features of what was just accepted, then roll on from the last of them."""
        if context.round == 0 or self.cache is None:
            self.cache = context.new_cache(self.cache, 1, context.builder.drafted)
        num_new = context.fresh.tokens.shape[1]
        hidden = self.fuse(context.fresh)
        output = self.run(context.following, hidden, self.cache.slots(num_new), self.cache, None)
        self.cache.commit(None, context.counts)
        last = output.gather(1, (context.counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, output.shape[-1]))
        return Draft(_Eagle3Rollout(self, self.cache, last))

    def commit(self, context: Context, accepted: Accepted) -> None:
        assert self.cache is not None
        self.cache.forget()

    def run(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: TreeCache, visible: Tensor | None) -> Tensor:
        """The output state [B, F, D] of new nodes, appended to the cache behind what it holds."""
        x, residual = self.inputs(tokens, hidden)
        q, k, v = self.self_attn.project(x, self.rotary(x, positions))
        attended = self.self_attn.cached(q, k, v, cache, visible)
        cache.advance(tokens.shape[1])
        return self.outputs(residual + attended)

    def log_q(self, hidden: Tensor) -> Tensor:
        """[B, F, D] -> [B, F, V]"""
        return self.lm_head(self.read_by_head(hidden)).float().log_softmax(-1)


def check_architecture(asked: dict[str, Any]) -> dict[str, Any]:
    """The architecture with every variant said; refuses unknown keys and norms that exclude each other."""
    for key in asked:
        if key not in (*LAYER, *VARIANTS):
            raise UserError(f"drafter.architecture.{key}: there is no such key; valid are {', '.join((*LAYER, *VARIANTS))}")
    whole = {**dict.fromkeys(VARIANTS, False), **asked}
    if whole["norm_before_fc"] and whole["fc_norm"]:
        raise UserError("drafter.architecture.fc_norm: norm_before_fc norms the fused features already; use one of them")
    return whole


class _Eagle3Rollout(Rollout):
    """One round: the root's output, then one level of nodes after another behind the committed pairs."""

    def __init__(self, drafter: Eagle3, cache: TreeCache, root: Tensor) -> None:
        self.drafter, self.cache = drafter, cache
        self.draft_ids = drafter.draft_ids
        self.hidden = root  # [B, nodes given so far, D]
        self.branches = Branches(len(root), root.device)  # the root itself is committed

    def start(self) -> Tensor:
        return self.drafter.log_q(self.hidden)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        hidden = self.hidden.gather(1, parents[..., None].expand(-1, -1, self.hidden.shape[-1]))
        depth, visible = self.branches.add(parents)
        positions = self.cache.lengths[:, None] - 1 + depth
        output = self.drafter.run(tokens, hidden, positions, self.cache, visible)
        self.hidden = torch.cat([self.hidden, output], dim=1)
        return self.drafter.log_q(output)
