"""Kangaroo (Liu et al., 2024): drafts with the target's first layers and an adapter that replaces
the others.

Shapes: B batch, T tokens, D target width, V vocabulary, R supervised rows, P new positions, F
frontier nodes. Index t of the adapter reads the residual stream entering layer `exit_layer` at t
and predicts token t + 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capture, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.llama_layer import (
    Attention,
    Rotary,
    final_norm_scale,
    llama_config,
)
from spectrain.drafters.layers.losses import LossName, head_loss
from spectrain.drafters.layers.self_speculation import SelfDrafter, resolve_exit_layer
from spectrain.drafters.step_cost import BatchShape, Judged, Run, StepCost
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget
from spectrain.models.features import Layer
from spectrain.models.host_copies import select_rows
from spectrain.models.kv_cache import TreeCache
from spectrain.models.partial_forward import NodeLevel
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath
from spectrain_research.shared.on_policy import OnPolicy, find_on_policy


class Kangaroo(SelfDrafter):
    """One attention block with its norms, x + attention(norm(x)), between an exit of the frozen
    target and its output layer.

    It learns the target's distribution at every token of the assistant (equation 4). The second
    exit, which stops a draft where its most likely token is unlikely, is a setting of the tree:
    tree=chain with stop and stop_on=token.
    """

    saved = SavedFiles(shape=("exit_layer",))
    capabilities = replace(
        SelfDrafter.capabilities,
        capture=Capture(state_names=("cache",), needs_all_drafts=True),
    )

    def __init__(
        self,
        target: Target,
        # Number of target layers before the adapter; null uses a fourteenth of them, at least one,
        # like the authors' 2 of 32.
        exit_layer: int | None = None,
        # Divergence between the target's and the drafter's token distributions.
        loss: LossName = "forward_kl",
    ) -> None:
        super().__init__()
        config = llama_config(target)
        self.exit_layer = resolve_exit_layer(target, exit_layer, 1 / 14)
        self.divergence = loss
        self.saved = replace(self.saved, settings={"exit_layer": self.exit_layer})
        self.layers: tuple[Layer, ...] = (self.exit_layer,)
        self.head = target.head
        self.input_layernorm = nn.RMSNorm(target.width, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, target.width)
        self.norm = nn.RMSNorm(target.width, eps=config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.cache: TreeCache | None = None

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start as the target's own early exit: its norm, where that is an RMS norm, and an
        attention that adds nothing.
        """
        scale = final_norm_scale(target)
        if scale is not None:
            with torch.no_grad():
                self.norm.weight.copy_(scale)
        nn.init.zeros_(self.self_attn.o_proj.weight)

    # Training

    @property
    def stages(self) -> list[Stage]:
        """One stage, which also reads the input of the target's head, for the loss."""
        return [Stage.single(self, (self.exit_layer, "final"), final_reach=0)]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """The adapter runs over all tokens; its states are judged by the target's output layer."""
        judged = Judged(
            batch.supervised, target.head.vocab_size, batch.supervised, copies=1, label_copies=1
        )
        return StepCost([Run(self, batch.tokens, batch.length)], judged)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return the divergence from the target after every position whose next token is the
        assistant's.
        """
        assert batch.features is not None
        predicts = batch.next_is_supervised
        x = batch.features.at_layer(self.exit_layer).to(self.norm.weight.dtype)
        normed = self.input_layernorm(x)
        q, k, v = self.self_attn.project_qkv(normed, self.rotary(normed, batch.positions))
        states = self.norm(x + self.self_attn.attend_causal(q, k, v, batch.lengths))
        states = select_rows(states, predicts)
        following = select_rows(batch.tokens.roll(-1, dims=1), predicts)
        head = self.head.projection
        rows = batch.row_loss(predicts)
        target_log_probs = HeadTarget(select_rows(batch.features.at_layer("final"), predicts), head)
        result = head_loss(
            self.divergence,
            states,
            head,
            following,
            target_log_probs,
            rows,
            row_weight=rows.weight,
        )
        hits = (result.predictions == result.labels).sum()[None].float()
        return Losses({self.divergence: result.loss}, hits, torch.full_like(hits, len(following)))

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the exit states of the tokens accepted last, then draft from the root on."""
        self.cache = context.drafting_cache(self.cache, 1, 1 + context.builder.max_drafted)
        num_new = context.new_features.tokens.shape[1]
        self._run_adapter(
            context.new_features.at_layer(self.exit_layer), self.cache.next_slots(num_new), None
        )
        self.cache.commit(None, context.num_new)
        return super().draft(context)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        assert self.cache is not None
        self.cache.roll_back()

    def log_q(self, level: NodeLevel) -> Tensor:
        adapted = self._run_adapter(
            level.features.at_layer(self.exit_layer), level.positions, level.visible
        )
        return self.head.logits(self.norm(adapted).to(self.head.output.weight.dtype)).log_softmax(
            -1
        )

    def _run_adapter(self, x: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        """Run the adapter, [B, F, D] -> [B, F, D], and append to its cache."""
        assert self.cache is not None
        x = x.to(self.norm.weight.dtype)
        normed = self.input_layernorm(x)
        q, k, v = self.self_attn.project_qkv(normed, self.rotary(normed, positions))
        attended = self.self_attn.attend_cached(q, k, v, self.cache, visible)
        self.cache.add_uncommitted(x.shape[1])
        return x + attended


find_on_policy.register(Kangaroo, lambda drafter: OnPolicy())
