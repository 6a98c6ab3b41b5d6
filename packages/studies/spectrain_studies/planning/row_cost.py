"""What one row costs in a module: the values that its backward pass reads, and the weights that it
is multiplied with.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from spectrain.drafters.step_cost import OUTPUT_LAYERS
from spectrain.models.device import is_experts

STATES_OF_CELLS = {"LSTM": 16, "GRU": 8, "RNN_TANH": 3, "RNN_RELU": 3}
"""Values that a recurrent cell keeps of a position, its output included, in its widths. Measured
with torch 2.13 on a CPU at widths 128 and 256: oneDNN's workspace of an LSTM has 15, the operations
of a GRU store 8.
"""


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
    if isinstance(module, nn.RNNBase):
        return recurrent_cost(module, trained)
    if isinstance(module, nn.MultiheadAttention):
        return heads_cost(module, trained)
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
    # A layer adds what these return to its stream, which a trained norm stores twice: as it is and
    # normalised. Beside adapters norms are frozen, and store it once.
    returned: list[Any] = [getattr(module, name, None) for name in ("o_proj", "down_proj")]
    adapted = [linear for linear in returned if hasattr(linear, "lora_A")]
    cost += RowCost(products=-sum(linear.out_features for linear in adapted))
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


def recurrent_cost(cells: nn.RNNBase, trained: Collection[int]) -> RowCost:
    """Return the cost of a row in recurrent cells, which keep their gates of every position."""
    directions = 2 if cells.bidirectional else 1
    stored = STATES_OF_CELLS[cells.mode] * cells.num_layers * directions * cells.hidden_size
    return replace(count_matrices(cells, trained), products=stored)


def heads_cost(attention: nn.MultiheadAttention, trained: Collection[int]) -> RowCost:
    """Return the cost of a row in torch's own attention, of which queries, keys, values and what
    attention returned are stored.
    """
    width = attention.embed_dim
    return replace(
        count_matrices(attention, trained),
        products=4 * width,
        attention=width,
        num_attentions=1,
    )


def count_matrices(module: nn.Module, trained: Collection[int]) -> RowCost:
    """Return the weights of all matrices of a module, and those of them that are trained."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    return RowCost(
        weights=sum(matrix.numel() for matrix in matrices),
        trained=sum(matrix.numel() for matrix in matrices if id(matrix) in trained),
    )


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


def is_norm(module: nn.Module | None) -> bool:
    """Return whether a module normalises: it has a weight vector, and "Norm" in the name of its
    class.
    """
    return (
        module is not None
        and "Norm" in type(module).__name__
        and any(True for _ in module.parameters(recurse=False))
    )
