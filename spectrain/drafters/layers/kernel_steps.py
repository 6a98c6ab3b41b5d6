"""The steps of an EAGLE drafter on a GPU: one launch for what lies between two matrix products.

A later step takes 15 launches: five products (queries, keys and values; the attention's output;
gate and up; down; the output layer), and ten kernels: the inputs, the rotation, two of attention,
two sums with their norms, the gated unit, two that find the children, and one that picks the next
nodes. Shapes: B batch, P new positions, F new nodes, C rows for the root and all nodes of a round,
D width, V draft vocabulary, T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spectrain.drafters.context import Context
from spectrain.kernels.add_norm import add_norm, store_states
from spectrain.kernels.dispatch import runs_on
from spectrain.kernels.draft_input import (
    DraftedRows,
    DraftInput,
    InputLayers,
    accepted_input,
    node_input,
)
from spectrain.kernels.gated_unit import gated_unit
from spectrain.kernels.tree_masks import count_words
from spectrain.models.cached_attention import rotate_and_attend
from spectrain.models.kv_cache import TreeCache
from spectrain.trees.rollout import Rollout

from .llama_layer import Attention, Mlp
from .output_layer import project_down

MAX_WIDTH = 16384
"""Width of a state that a program of the kernels holds."""


def can_step(drafter: Any, cache: TreeCache) -> bool:
    """Tell whether the kernels compute a drafter's layers over a cache."""
    embedding = _find_embedding(drafter)
    weight = drafter.fc.weight
    # The interpreter computes bfloat16 wrongly.
    is_wrong = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return (
        runs_on(weight.device)
        and not is_wrong
        and not torch.is_grad_enabled()
        and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and weight.shape[0] <= MAX_WIDTH
        and embedding is not None
        and cache.lends_storage(weight.dtype)
        and drafter.window is None
        and not drafter.has_dynamic_rope
        and type(drafter.self_attn) is Attention
        and type(drafter.mlp) is Mlp
    )


def _find_embedding(drafter: Any) -> Tensor | None:
    """Return the embedding [V, D] of tokens; None where it is not a plain look-up."""
    module = drafter.head.embedding if drafter.embed_tokens is None else drafter.embed_tokens
    is_plain = type(module) is nn.Embedding and "forward" not in vars(module)
    return module.weight if isinstance(module, nn.Embedding) and is_plain else None


class KernelSteps:
    """The steps of one drafter over one cache."""

    def __init__(self, drafter: Any, cache: TreeCache) -> None:
        self.drafter, self.cache = drafter, cache
        embedding = _find_embedding(drafter)
        eps = drafter.hidden_norm.eps
        assert embedding is not None and eps is not None
        self.eps = eps
        self.inputs = InputLayers(
            embedding.detach(),
            drafter.input_layernorm.weight.detach(),
            drafter.hidden_norm.weight.detach(),
            eps,
            drafter.norm_before_residual,
        )
        # In the type in which a step of modules has them.
        self.table = drafter.rotary.tabulate(drafter.fc.weight.detach(), cache.max_length)

    def new_rows(self, batch: int, num_nodes: int) -> DraftedRows:
        """Return rows for the root and `num_nodes` nodes of every text, which nothing has
        written.
        """
        weight = self.drafter.fc.weight
        words = max(1, count_words(num_nodes))
        count = 1 + num_nodes
        return DraftedRows(
            weight.new_empty(batch, count, weight.shape[0]),
            weight.new_empty(batch, count, words, dtype=torch.int64),
            weight.new_empty(batch, count, dtype=torch.int64),
        )

    def read_accepted(self, context: Context, rows: DraftedRows) -> Tensor:
        """Run the layers over the features of the last accepted tokens and commit them; return the
        normed state [B, 1, D] of the root, whose own state is row 0. A prompt is read by the
        modules: their attention over a text has no mask.
        """
        drafter, cache = self.drafter, self.cache
        if cache.is_empty:
            root, _ = drafter.read_accepted(context)
            rows.states[:, :1] = root
            normed_root: Tensor = root if drafter.norm_output else drafter.norm(root)
            return normed_root
        states = drafter.fuse_features(context.new_features)
        inputs = accepted_input(
            context.tokens,
            context.cache.lengths,
            context.num_new,
            cache.lengths,
            states,
            self.inputs,
        )
        normed = self._run_layers(inputs, rows, 0, context.num_new)
        cache.commit(None, context.num_new)
        return normed

    def run_nodes(
        self, tokens: Tensor, parents: Tensor, rows: DraftedRows, num_rows: int
    ) -> Tensor:
        """Run the layers over nodes below rows `parents` [B, F]; return their normed states [B, F,
        D]. They become the rows from `num_rows` on.
        """
        lengths = self.cache.lengths
        inputs = node_input(tokens, parents, lengths, rows, num_rows, self.inputs)
        return self._run_layers(inputs, rows, num_rows, None)

    def logits(self, normed: Tensor) -> Tensor:
        """Compute logits [B, F, V] from normed states [B, F, D]."""
        logits: Tensor = self.drafter.lm_head(project_down(self.drafter.lm_down, normed))
        return logits

    def _run_layers(
        self, inputs: DraftInput, rows: DraftedRows, first_row: int, counts: Tensor | None
    ) -> Tensor:
        """Run all layers, store states in rows from `first_row` on, and return them normed. With
        `counts` [B] only the last real state of each text is stored and returned.
        """
        drafter = self.drafter
        attended = self._attend(drafter.self_attn, inputs.x, inputs, 0)
        norm = drafter.post_attention_layernorm
        hidden, normed = add_norm(attended, inputs.residual, norm.weight, self.eps)
        change = _feed_forward(drafter.mlp, normed)
        for number, layer in enumerate(drafter.later, 1):
            norm = layer.input_layernorm
            hidden, normed = add_norm(change, hidden, norm.weight, self.eps)
            attended = self._attend(layer.self_attn, normed, inputs, number)
            norm = layer.post_attention_layernorm
            hidden, normed = add_norm(attended, hidden, norm.weight, self.eps)
            change = _feed_forward(layer.mlp, normed)
        normed = store_states(
            rows.states,
            change,
            hidden,
            drafter.norm.weight,
            self.eps,
            first_row,
            counts,
            drafter.norm_output,
        )
        self.cache.add_uncommitted(inputs.positions.shape[1])
        return normed

    def _attend(self, attention: Any, x: Tensor, inputs: DraftInput, layer: int) -> Tensor:
        """Return the output [B, F, D] of one layer's attention."""
        q, k, v = (linear(x) for linear in attention.input_linears)
        attended = rotate_and_attend(
            q, k, v, self.table, inputs.positions, inputs.words, self.cache, layer
        )
        output: Tensor = attention.o_proj(attended)
        return output


def _feed_forward(mlp: Any, x: Tensor) -> Tensor:
    output: Tensor = mlp.down_proj(gated_unit(mlp.gate_proj(x), mlp.up_proj(x)))
    return output


class KernelRollout(Rollout):
    """A rollout by kernels from the last accepted token."""

    def __init__(
        self,
        steps: KernelSteps,
        rows: DraftedRows,
        normed_root: Tensor,
        draft_ids: Tensor | None = None,
    ) -> None:
        self.steps, self.rows, self.draft_ids = steps, rows, draft_ids
        self.normed_root = normed_root  # [B, 1, D]
        self.num_rows = 1
        self.gives_logits = False

    def request_logits(self) -> bool:
        self.gives_logits = True
        return True

    def start(self) -> Tensor:
        return self._outputs_of(self.normed_root)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        normed = self.steps.run_nodes(tokens, parents, self.rows, self.num_rows)
        self.num_rows += tokens.shape[1]
        return self._outputs_of(normed)

    def _outputs_of(self, normed: Tensor) -> Tensor:
        """Return log q [B, F, V] of normed states [B, F, D], or logits where these were
        requested.
        """
        logits = self.steps.logits(normed)
        return logits if self.gives_logits else logits.float().log_softmax(-1)


def draft_by_kernels(drafter: Any, context: Context) -> KernelRollout | None:
    """Let an EAGLE drafter read the features of the last accepted tokens, and return its rollout
    from the last of them by the kernels of a GPU; None where its modules run.
    """
    if not runs_on(drafter.fc.weight.device):
        return None
    cache = drafter.open_cache(context)
    if not can_step(drafter, cache):
        return None
    steps = KernelSteps(drafter, cache)
    rows = steps.new_rows(len(context.num_new), context.builder.max_drafted)
    return KernelRollout(steps, rows, steps.read_accepted(context, rows), drafter.draft_ids)
