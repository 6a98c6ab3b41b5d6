"""The maps of a draft vocabulary: d2t [Vd], offsets from draft ids to the target's ids, and t2d
[V], which ids are drafted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spectrain.drafters.layers.vocabulary import is_marked

from .container import Finding


def target_ids(d2t: Tensor) -> Tensor:
    """Return the target's id of every draft token."""
    return d2t + torch.arange(len(d2t))


def add_maps(tensors: dict[str, Tensor], rows: int, vocab: int) -> None:
    """Add d2t [Vd], the offsets from draft ids to ids of the target, and t2d [V] where they are
    missing.
    """
    tensors["d2t"] = tensors.get("d2t", torch.zeros(rows)).to(torch.int64)
    if "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(
            0, target_ids(tensors["d2t"]), True
        )
    tensors["t2d"] = tensors["t2d"].to(torch.bool)


def drop_full_maps(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop d2t and t2d where the draft vocabulary is the full one, because vLLM expects no map
    there.
    """
    is_full = len(tensors["d2t"]) == len(tensors["t2d"])
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not is_full or name not in ("d2t", "t2d")
    }


def check_vocabulary(vocab: int, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Yield the faults of d2t, which holds offsets from draft ids to target ids, and of t2d."""
    offsets = tensors.get("d2t")
    flags = tensors.get("t2d")
    if offsets is None:
        return
    if offsets.is_floating_point():
        yield Finding(
            "d2t-dtype", "error", f"d2t is {offsets.dtype}", "ids are rounded", "save it as int64"
        )
        return
    ids = offsets.long() + torch.arange(len(offsets))
    marks = None if flags is None else flags.bool()
    is_absolute = (
        marks is not None
        and bool(((offsets >= 0) & (offsets < len(marks))).all())
        and bool(marks[offsets.long()].all())
    )
    is_absolute = is_absolute and len(offsets.unique()) == len(offsets)
    if is_absolute and marks is not None and not is_marked(ids, marks):
        yield Finding(
            "d2t-absolute",
            "error",
            "d2t holds ids of the target where offsets belong",
            "engines add the draft id to it, so every draft is another token",
            "subtract 0, 1, 2 and so on from it",
        )
        return
    if bool(((ids < 0) | (ids >= vocab)).any()):
        yield Finding(
            "d2t-range",
            "error",
            f"d2t points outside the target's {vocab} tokens",
            "engines fail while they decode, or read other memory",
            "write target id - draft id, in draft order",
        )
        return
    if len(ids.unique()) < len(ids):
        yield Finding(
            "d2t-repeated",
            "error",
            "d2t maps two draft ids to the same token",
            "either offsets and ids were confused, or rows were lost",
            "write target id - draft id, in draft order",
        )
        return
    if marks is not None and not is_marked(ids, marks):
        yield Finding(
            "t2d-mismatch",
            "error",
            "t2d marks other tokens than d2t maps to",
            "trainers ignore the wrong tokens; either d2t or t2d is from another run",
            "make t2d from d2t: spectrain convert",
        )
    elif len(ids) < vocab and not offsets.any():
        yield Finding(
            "d2t-identity",
            "warning",
            f"the draft vocabulary is the first {len(ids)} ids of the target",
            "this is usually a default that was never replaced, not what was trained",
            "take d2t from the training run",
        )
