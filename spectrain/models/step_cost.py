"""The memory and arithmetic of a training step in closed form: which modules run over how many
rows, and which logits exist.

A row is a token that a module runs over, or a state that an output layer reads. Shapes: R rows, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

OUTPUT_LAYERS = ("lm_head", "lm_down")
"""Linears whose outputs are logits, which a step does not store; the formula of the logits
counts them.
"""


@dataclass(frozen=True)
class BatchShape:
    """The sizes of a batch: texts, tokens of the longest one, tokens with padding, and tokens
    that carry loss.
    """

    texts: float
    length: int
    tokens: int
    supervised: int
    # Largest number of consecutive tokens of a text that carry loss in a step; None if all may.
    loss_tokens: int | None = None

    def split_columns(self, parts: int) -> BatchShape:
        """Return the sizes of the piece of the columns that has most supervised tokens, of `parts`
        pieces. Draft steps run over a complete piece, and its share of the texts counts what is
        drawn of each text."""
        if parts == 1:
            return self
        tokens = math.ceil(self.tokens / parts)
        supervised = min(self.supervised, tokens)
        texts = self.texts * supervised / max(1, self.supervised)
        return replace(self, texts=texts, tokens=tokens, supervised=supervised, loss_tokens=None)

    def window_rows(self, num_steps: int) -> int:
        """Count the positions at which `num_steps` draft steps predict the tokens of the
        windows: all tokens without any.
        """
        if self.loss_tokens is None:
            return self.tokens
        return min(self.tokens, int(self.texts) * (self.loss_tokens + num_steps + 1))


@dataclass(frozen=True)
class Run:
    """A module that a training step runs, whose intermediate results its backward pass reads."""

    module: nn.Module
    # Rows of one call.
    rows: float
    # Keys that a row attends to.
    keys: float
    # Calls of the module.
    calls: float = 1
    # Values of the masks that every attention layer of a call stores.
    mask: float = 0
    # Further values that a row stores.
    extra: float = 0


@dataclass(frozen=True)
class Judged:
    """The logits [R, V] that a step's loss computes in chunks of rows."""

    # Rows of the drafter's logits, of one output layer at a time, and their vocabulary.
    rows: float
    vocab_size: int
    # Rows of the target's logits; 0 if the labels are tokens.
    label_rows: float = 0
    # Matrices of the drafter's rows, and of the labels' rows, that exist at the same time.
    copies: float = 2
    label_copies: float = 2
    # Number of output layers that are judged one after another, and the width that they read; 0 is
    # the target's.
    layers: int = 1
    width: int = 0
    # Rows whose logits are computed without gradients, besides the labels.
    other_rows: float = 0


@dataclass(frozen=True)
class StepCost:
    """What a training step computes beyond the target's features."""

    runs: list[Run]
    judged: Judged
    # Values that exist in the backward pass only, after the logits.
    backward_values: float = 0
    # Rows of the target's forwards without gradients in the loss.
    forward_rows: float = 0


@dataclass(frozen=True)
class RowCost:
    """What one row costs in a module."""

    # Outputs of linears and of attention, which autocast stores in half precision.
    products: float = 0
    # Results of norms, which stay in the type of the weights.
    states: float = 0
    # Weights that the row is multiplied with, and those of them that are trained.
    weights: float = 0
    trained: float = 0
    # Summed width of what attention layers return, and their number.
    attention: float = 0
    num_attentions: float = 0

    def __add__(self, other: RowCost) -> RowCost:
        # `dataclasses.astuple` copies every value, which took four fifths of a plan.
        return RowCost(
            self.products + other.products,
            self.states + other.states,
            self.weights + other.weights,
            self.trained + other.trained,
            self.attention + other.attention,
            self.num_attentions + other.num_attentions,
        )


def row_cost(module: nn.Module, trained: Collection[int] = ()) -> RowCost:
    """Return the cost of a row in a module; `trained` holds the ids of the trained parameters.

    The backward pass reads the output of every linear, what a norm normalised and what it returned,
    the activation and the product of a gated feed-forward, and what attention returned. A mixture
    of experts costs its share of the experts. A module that stores more has the attribute
    `stored_values`: values a row.
    """
    if isinstance(module, nn.Linear):
        weight = module.weight
        return RowCost(
            module.out_features, 0, weight.numel(), weight.numel() if id(weight) in trained else 0
        )
    if is_norm(module):
        return RowCost(states=2 * next(module.parameters()).numel())
    parts: list[Any] = [module, *module.children()]
    top_k = next((part.top_k for part in parts if isinstance(getattr(part, "top_k", None), int)), 1)
    cost = RowCost()
    for name, child in module.named_children():
        if name not in OUTPUT_LAYERS and not isinstance(child, nn.Embedding):
            part = (
                experts_cost(child, top_k, trained)
                if is_experts(child)
                else row_cost(child, trained)
            )
            # What LoRA adds to a linear's output is not stored by itself.
            cost += replace(part, products=0) if name == "lora_B" else part
    cost += RowCost(products=getattr(module, "stored_values", 0))
    inner, attended = (
        getattr(getattr(module, name, None), "in_features", 0) for name in ("down_proj", "o_proj")
    )
    for norm, linear in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        if is_norm(getattr(module, norm, None)) and isinstance(
            read := getattr(module, linear, None), nn.Linear
        ):
            # A norm of heads has one head's weights for all of them.
            cost += RowCost(
                states=2 * (read.out_features - next(getattr(module, norm).parameters()).numel())
            )
    cost += RowCost(
        products=2 * inner + attended, attention=attended, num_attentions=int(attended > 0)
    )
    return cost


def experts_cost(experts: Any, top_k: int, trained: Collection[int]) -> RowCost:
    """Return the cost of a row in its `top_k` experts, whose weights are stacked [E, .., ..]."""
    share = top_k / len(experts.down_proj)
    weights, tuned = (
        share
        * sum(
            p.numel() for p in experts.parameters() if p.dim() == 3 and (every or id(p) in trained)
        )
        for every in (True, False)
    )
    width = getattr(experts, "hidden_dim", None) or getattr(experts, "hidden_size", 1)
    inner = experts.down_proj[0].numel() / width
    return RowCost(products=top_k * (4 * inner + width), weights=weights, trained=tuned)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds the stacked weights of experts."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.dim() == 3


def is_norm(module: nn.Module | None) -> bool:
    """Return whether a module normalises: it has a weight vector, and "Norm" in the name of its
    class.
    """
    return (
        module is not None
        and "Norm" in type(module).__name__
        and any(True for _ in module.parameters(recurse=False))
    )
