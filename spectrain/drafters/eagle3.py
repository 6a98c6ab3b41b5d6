"""EAGLE-3 (Li et al., 2025): one decoder layer that rolls over its own hidden states.

Shapes: B batch, T tokens, D target width, V draft vocabulary, R supervised rows, P fresh positions, F frontier nodes.
Index t pairs the target's features at t with the embedding of token t + 1, and predicts token t + 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ..attention import unrolled_attention
from ..cache import TreeCache
from ..features import Batch, Layer
from ..losses import Loss
from ..shapes.base import Branches, Rollout, TreeBuilder
from ..tree import TokenTree
from .base import Losses
from .layers import Attention, Mlp, llama_config, norm_scale, rotary
from .vocabulary import Supervision, VocabularyDrafter

if TYPE_CHECKING:
    from ..decode import Context
    from ..target import Target


class Eagle3(VocabularyDrafter):
    """EAGLE-3 with training-time test (section 3.2): `ttt_steps` unrolled drafts share one backward pass.

    Three layers of the target are fused into the first hidden state; each further draft step reads the un-normed output of
    the step before. The head is the drafter's own, over the `vocab_size` tokens that the assistant uses most.
    """

    final_reach = 0
    shape = ("vocab_size", "layers")
    is_captured = True
    carried = ("cache",)

    def __init__(
        self,
        target: Target,
        ttt_steps: int = 7,
        vocab_size: int = 32000,
        layers: list[int] | None = None,
        loss: Loss = "forward_kl",
        step_decay: float = 0.8,
        start: Literal["target", "random"] = "target",
    ) -> None:
        super().__init__()
        config = llama_config(target)
        count = target.num_layers
        chosen = sorted({min(2, count), count // 2, max(count - 3, 0)}) if layers is None else sorted(set(layers))
        self.fused: tuple[Layer, ...] = tuple(chosen)
        self.layers = (*self.fused, "final")
        self.ttt_steps, self.divergence, self.step_decay, self.start = ttt_steps, loss, step_decay, start
        width, vocab_size = target.width, min(vocab_size, target.head.vocab_size)
        self.head = target.head
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

    def loss(self, batch: Batch, target: Target) -> Losses:
        """Unroll the drafter over its own hidden states, with the true tokens as input; gradients flow through it all.

        Step i at index t is supervised where token t + 2 + i is the assistant's, so the padded tail never is. The sum of
        the steps is weighted by step_decay^i.
        """
        assert batch.features is not None
        wanted = Supervision(self, batch)
        hidden = self.fc(batch.features.fused(self.fused).to(self.fc.weight.dtype))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states: list[Tensor] = []  # of the supervised indices of every step
        for step in range(max(1, min(self.ttt_steps, batch.longest - 2))):
            hidden, k, v = self.remembered(self._unroll, batch, hidden, step, keys[:], values[:])
            keys.append(k)
            values.append(v)
            states.append(hidden[wanted.rows(step)])
        return self._judge(wanted, states)

    def _unroll(
        self, batch: Batch, hidden: Tensor, step: int, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One draft step over hidden states [B, T, D], behind the keys and values of the steps before; its own with it."""
        tokens = batch.tokens.roll(-1 - step, dims=1)  # what a document takes from beyond its end is never supervised
        x = torch.cat([self.input_layernorm(self._embed(tokens)), self.hidden_norm(hidden)], dim=-1)
        q, k, v = self.self_attn.project(x, self.rotary(x, batch.positions + step))
        attended = unrolled_attention(q, [*keys, k], [*values, v], batch.lengths)
        return self._feed_forward(hidden + self.self_attn.output(attended)), k, v

    def _judge(self, wanted: Supervision, states: list[Tensor]) -> Losses:
        """All steps at once, ordered by the answers that they share, so that the target is asked once for each of these."""
        answers = [wanted.answers(step) for step in range(len(states))]
        answer, order = torch.cat(answers).sort(stable=True)
        step = torch.cat([torch.full_like(found, number) for number, found in enumerate(answers)])[order]
        hidden = self.norm(torch.cat(states).index_select(0, order))
        loss, right = wanted.judge(hidden, self.lm_head, answer, self.step_decay**step)
        hits = torch.zeros(self.ttt_steps, device=hidden.device).index_add(0, step, right.float())
        counts = torch.zeros_like(hits).index_add(0, step, torch.ones_like(right, dtype=hits.dtype))
        return Losses({self.divergence: loss}, hits, counts)

    def _embed(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return self.head.embed(tokens).to(self.fc.weight.dtype)

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    # Decoding

    def propose(self, context: Context, budget: TreeBuilder) -> TokenTree:
        """Read the features of what was just accepted, then roll on from the last of them."""
        if context.round == 0 or self.cache is None:
            self.cache = context.new_cache(self.cache, 1, budget.drafted)
        num_new = context.fresh.tokens.shape[1]
        hidden = self.fc(context.fresh.fused(self.fused).to(self.fc.weight.dtype))
        output = self.decode(context.following, hidden, self.cache.slots(num_new), self.cache, None)
        self.cache.commit(None, context.counts)
        last = output.gather(1, (context.counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, output.shape[-1]))
        tree = budget.grow(context, _Eagle3Rollout(self, self.cache, last))
        self.cache.forget()
        return tree

    def decode(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: TreeCache, visible: Tensor | None) -> Tensor:
        """The un-normed output [B, F, D] of new nodes, appended to the cache behind what it holds."""
        x = torch.cat([self.input_layernorm(self._embed(tokens)), self.hidden_norm(hidden)], dim=-1)
        q, k, v = self.self_attn.project(x, self.rotary(x, positions))
        attended = self.self_attn.cached(q, k, v, cache, visible)
        cache.advance(tokens.shape[1])
        return self._feed_forward(hidden + attended)

    def log_q(self, hidden: Tensor) -> Tensor:
        """[B, F, D] -> [B, F, V]"""
        return self.lm_head(self.norm(hidden)).float().log_softmax(-1)


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
        output = self.drafter.decode(tokens, hidden, positions, self.cache, visible)
        self.hidden = torch.cat([self.hidden, output], dim=1)
        return self.drafter.log_q(output)
