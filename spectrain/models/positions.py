"""The positions of the tokens of a forward, and which tokens each of them sees. Shapes: B batch,
N tokens or nodes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.kernels.tree_attention import Visibility

from .features import document_positions
from .forward_plan import ForwardPlan
from .model_parts import ModelParts

TokenVisibility = Visibility | list[Visibility] | None
"""What tokens see, in each of packed documents; None is causal: the text before them."""


def limit_positions(parts: ModelParts, tokens: Tensor, plan: ForwardPlan) -> ForwardPlan:
    """Clamp positions to those that the model has, and to those before its rotary embedding
    switches. Nodes past the end of the longest text are never emitted."""
    switch = parts.rope_switch
    cache = plan.cache
    if (
        switch is not None
        and cache is None
        and (longest := max(plan.lengths or (tokens.shape[1],))) > switch
    ):
        raise UserError(
            f"target {parts.name}: a text of {longest} tokens is longer than the {switch} up to "
            f"which its rotary embedding is one; use data.max_length={switch} or less"
        )
    last = parts.max_length if switch is None else switch
    if switch is None and (
        cache is None or cache.longest + cache.uncommitted + tokens.shape[1] <= last
    ):
        return plan
    if plan.positions is None and cache is not None and not cache.is_empty:
        plan = replace(plan, positions=cache.next_slots(tokens.shape[1]))
    return (
        plan
        if plan.positions is None
        else replace(plan, positions=plan.positions.clamp(max=last - 1))
    )


def resolve_visibility(
    parts: ModelParts, tokens: Tensor, plan: ForwardPlan
) -> tuple[Tensor, TokenVisibility]:
    """Return the positions of tokens [B, N], and their visibility where it is not plain causal
    attention.
    """
    positions, mask, cache = plan.positions, plan.mask, plan.cache
    batch, num_new = tokens.shape
    if cache is None:
        if positions is None:
            positions = document_positions(plan.lengths or (num_new,), tokens.device).expand(
                batch, -1
            )
        return positions, None if mask is None else uncached_visibility(
            mask, positions, plan.lengths
        )
    if cache.is_empty and positions is None and mask is None:
        # Past the maximum there are only mask tokens or padding.
        cache.positions = cache.next_slots(num_new).clamp(max=parts.max_length - 1)
        return cache.positions, None
    positions = cache.next_slots(num_new) if positions is None else positions
    if mask is None:
        ones = torch.ones(
            num_new, cache.uncommitted + num_new, dtype=torch.bool, device=positions.device
        )
        mask = ones.tril(cache.uncommitted).expand(batch, -1, -1)
    assert isinstance(mask, Tensor)
    cache.set_positions(positions)
    return positions, cache.visibility(mask, positions, cache.positions)


def uncached_visibility(
    mask: Tensor | tuple[Tensor, ...], positions: Tensor, lengths: tuple[int, ...] | None
) -> TokenVisibility:
    """Return the visibility of tree tokens without committed tokens: one, or one for each packed
    document.
    """
    if lengths is None:
        assert isinstance(mask, Tensor)
        return Visibility(positions.new_zeros(len(positions)), 0, mask, positions, positions)
    parts = positions.split(lengths, dim=1)
    return [Visibility(part.new_zeros(1), 0, tree, part, part) for tree, part in zip(mask, parts)]
