"""States of places that have no token yet, made of the last known one's inside the target.

Shapes: B batch, N tokens or nodes, D width, K masks behind a place, R masks of all B N places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spectrain.errors import UserError

if TYPE_CHECKING:
    from spectrain.models.target import Target


class HiddenTransfer(nn.Module):
    """What enters a layer at the j-th mask behind place t, from what enters it there, h_t; all are h_t at first.

    Hidden Transfer (Wu et al., 2024, arXiv 2404.12022, section 3.1): W_j h_t, a map for each mask.
    Speculative Streaming (Bhendawade et al., 2024, arXiv 2402.11131, equation 3): W h_t + P_j, one map and a vector a stream.
    """

    def __init__(self, width: int, num_masks: int, streams: bool) -> None:
        super().__init__()
        self.maps = nn.Parameter(torch.eye(width).repeat(1 if streams else num_masks, 1, 1))  # [K or 1, D, D]
        self.places = nn.Parameter(torch.zeros(num_masks, width)) if streams else None

    def forward(self, states: Tensor, numbers: Tensor) -> Tensor:
        """[R, D] of masks by these numbers [R], from the states [R, D] before them."""
        made = torch.einsum("kde,re->rkd", self.maps, states.to(self.maps.dtype))
        made = made.gather(1, (numbers % made.shape[1])[:, None, None].expand(-1, 1, made.shape[-1]))[:, 0]
        if self.places is not None:
            made = made + nn.functional.embedding(numbers, self.places)
        return made.to(states.dtype)


@contextmanager
def transfer_states(
    target: Target, layer: int, transfer: HiddenTransfer, mask_index: Tensor, hosts: Tensor, rows: Tensor
) -> Iterator[None]:
    """Run the target with what `transfer` makes entering a layer at masks: `numbers` and `hosts` [B, N] say which mask a place
    is and behind which place of its row, `rows` [R] which of all B N places are masks. Layers before it run there for
    nothing."""
    starts = torch.arange(len(hosts), device=hosts.device)[:, None] * hosts.shape[1]
    sources, asked = (starts + hosts).flatten().index_select(0, rows), mask_index.flatten().index_select(0, rows)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        flat = hidden.flatten(0, 1)
        flat = flat.index_copy(0, rows, transfer(flat.index_select(0, sources), asked))
        if args:
            return (flat.view_as(hidden), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": flat.view_as(hidden)}

    target.check_single_stream()
    handle = target.layers[layer].register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def resolve_transfer_layer(target: Target, layer: int | None) -> int:
    """The layer that was asked for, or the one in the middle."""
    if target.num_layers < 2:
        raise UserError(f"drafter.transfer_layer: {target.name} has one layer, so nothing can enter between layers")
    if layer is None:
        return target.num_layers // 2
    if not 1 <= layer < target.num_layers:
        raise UserError(
            f"drafter.transfer_layer={layer}: {target.name} has {target.num_layers} layers; use 1 to {target.num_layers - 1}"
        )
    return layer
