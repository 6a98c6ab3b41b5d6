"""States of masks, computed inside the target from the states of their hosts.

Shapes: B batch, N tokens or nodes, D width, K masks after a host, R masks among all B N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.models.target import Target


class StateTransfer(nn.Module):
    """Maps the state h_t that enters a layer at a host to the states that enter it at its masks; at
    first, all are h_t.

    Hidden Transfer (Wu et al., 2024, arXiv 2404.12022, section 3.1) computes W_j h_t, with a map
    per mask. Speculative Streaming (Bhendawade et al., 2024, arXiv 2402.11131, equation 3) computes
    W h_t + P_j, with one map and a vector per stream.
    """

    def __init__(self, width: int, num_masks: int, streams: bool) -> None:
        super().__init__()
        # [K or 1, D, D]
        self.maps = nn.Parameter(torch.eye(width).repeat(1 if streams else num_masks, 1, 1))
        self.places = nn.Parameter(torch.zeros(num_masks, width)) if streams else None

    def forward(self, states: Tensor, mask_index: Tensor) -> Tensor:
        """Return the states [R, D] of masks with these indices [R], from the states [R, D] of
        their hosts.
        """
        states_out = torch.einsum("kde,re->rkd", self.maps, states.to(self.maps.dtype))
        states_out = states_out.gather(
            1, (mask_index % states_out.shape[1])[:, None, None].expand(-1, 1, states_out.shape[-1])
        )[:, 0]
        if self.places is not None:
            states_out = states_out + nn.functional.embedding(mask_index, self.places)
        return states_out.to(states.dtype)


@contextmanager
def transfer_states(
    target: Target,
    layer: int,
    transfer: StateTransfer,
    mask_index: Tensor,
    hosts: Tensor,
    rows: Tensor,
) -> Iterator[None]:
    """Replace the inputs of a layer at masks by those that `transfer` computes, inside the context.

    `mask_index` and `hosts` [B, N] hold every token's mask index, and its host's index in the row.
    `rows` [R] are the masks' indices among all B N tokens. Earlier layers run at the masks too, but
    their outputs are unused; verification spares that.
    """
    starts = torch.arange(len(hosts), device=hosts.device)[:, None] * hosts.shape[1]
    sources = (starts + hosts).flatten().index_select(0, rows)
    masks = mask_index.flatten().index_select(0, rows)

    def replace_states(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        flat = hidden.flatten(0, 1)
        flat = flat.index_copy(0, rows, transfer(flat.index_select(0, sources), masks))
        if args:
            return (flat.view_as(hidden), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": flat.view_as(hidden)}

    target.architecture.check_single_stream(target.name)
    handle = target.layers[layer].register_forward_pre_hook(
        replace_states, with_kwargs=True, prepend=True
    )
    try:
        yield
    finally:
        handle.remove()


def resolve_transfer_layer(target: Target, layer: int | None) -> int:
    """Return the given layer, or by default the middle one; raise `UserError` if it is invalid."""
    if target.num_layers < 2:
        raise UserError(
            f"drafter.transfer_layer: {target.name} has one layer, so there is no input between "
            "layers"
        )
    if layer is None:
        return target.num_layers // 2
    if not 1 <= layer < target.num_layers:
        raise UserError(
            f"drafter.transfer_layer={layer}: {target.name} has {target.num_layers} layers; use 1 "
            f"to {target.num_layers - 1}"
        )
    return layer
