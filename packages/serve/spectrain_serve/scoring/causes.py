"""What may be wrong where a server does not draft as our own chain does, each as a decoding to
compare with the server's.

A fault of an export or of an engine is another interpretation of the same tensors
(`spectrain.export.measure`): layers off by one, a flipped norm flag. Those here are faults of
serving: number types, windows, the order of rotary dimensions, the draft vocabulary's map.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from spectrain.drafters.base import Drafter
from spectrain.export.layout import DrafterCheckpoint, Interpretation
from spectrain.export.measure import (
    INTERPRETATIONS,
    build_drafter,
    eagle3_interpretations,
    load_drafter,
    with_changes,
)
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from spectrain.training.checkpoints import find_mismatches

from ..layouts.gguf_layout import convert_heads
from .search import Cause

READINGS = {**INTERPRETATIONS, "peagle": eagle3_interpretations}
DEFAULT_THETA = 10000.0
REMEDY = (
    "correct the drafter's files (spectrain lint DIR finds such faults), or export again with "
    "spectrain export"
)


class CauseFinder:
    """Lists the causes for one drafter: the checkpoint as the run holds it, on the target that
    our chain decodes with.
    """

    def __init__(self, checkpoint: DrafterCheckpoint, files: TargetFiles, target: Target) -> None:
        self.checkpoint = checkpoint
        self.files = files
        self.target = target

    def list_causes(self, position: int) -> Iterator[Cause]:
        """Yield the causes; `position` is where in a sequence the first round differs."""
        for reading in self._list_interpretations(position):
            if self._is_loadable(reading.drafter):
                yield Cause(
                    reading.finding_name,
                    reading.description,
                    REMEDY,
                    partial(self._load, reading),
                )
        for dtype in ("bfloat16", "float16", "float32"):
            if str(self.target.dtype) != f"torch.{dtype}":
                remedy = (
                    f"score with target.dtype={dtype}, or serve in "
                    f"{str(self.target.dtype).removeprefix('torch.')}"
                )
                yield Cause(
                    "dtype",
                    f"numbers of type {dtype}",
                    remedy,
                    partial(self._load_in, dtype),
                )

    def _list_interpretations(self, position: int) -> Iterator[Interpretation]:
        if self.checkpoint.family in READINGS:
            yield from READINGS[self.checkpoint.family](self.checkpoint, self.files)
        yield from permuted_interpretations(self.checkpoint)
        yield from vocabulary_interpretations(self.checkpoint)
        yield from architecture_interpretations(self.checkpoint)
        yield from window_interpretations(self.checkpoint, position)

    def _is_loadable(self, checkpoint: DrafterCheckpoint) -> bool:
        return not list(find_mismatches(build_drafter(checkpoint, self.target), checkpoint.tensors))

    def _load(self, reading: Interpretation) -> tuple[Target, Drafter]:
        return self.target, load_drafter(reading.drafter, self.target)

    def _load_in(self, dtype: str) -> tuple[Target, Drafter]:
        target: Target = self.files.spec.with_settings(dtype=dtype).build()
        return target, load_drafter(self.checkpoint, target)


def permuted_interpretations(drafter: DrafterCheckpoint) -> Iterator[Interpretation]:
    """Yield queries and keys whose rotary dimensions are neighbours instead of halves, and the
    reverse.
    """
    architecture: dict[str, Any] = drafter.drafter.get("architecture") or {}
    if "num_attention_heads" not in architecture:
        return
    for description, to_file in (("neighbours", True), ("halves", False)):
        permuted = convert_heads(drafter.tensors, architecture, to_file=to_file)
        yield Interpretation(
            "heads-permuted",
            f"the rows of queries and keys permuted, as if rotary dimensions were {description}",
            "write q_proj and k_proj in transformers' order",
            with_changes(drafter, {}, permuted),
        )


def vocabulary_interpretations(drafter: DrafterCheckpoint) -> Iterator[Interpretation]:
    """Yield d2t, offsets from draft ids to target ids, read as ids, and ids read as offsets."""
    d2t = drafter.tensors.get("d2t")
    if d2t is None or not bool(d2t.any()):
        return
    count = len(drafter.tensors["t2d"])
    ids = torch.arange(len(d2t))
    remedy = "write d2t as offsets: target id minus draft id"
    for description, read in (
        ("offsets of d2t read as ids", d2t),
        ("ids of d2t read as offsets", d2t + 2 * ids),
    ):
        # An id outside of the vocabulary is never accepted, as is the last one.
        changed = with_changes(drafter, {}, {"d2t": read.clamp(0, count - 1) - ids})
        yield Interpretation("d2t-as-ids", description, remedy, changed)


def architecture_interpretations(drafter: DrafterCheckpoint) -> Iterator[Interpretation]:
    """Yield a missing base of the rotary embedding, and a missing norm before fc."""
    architecture: dict[str, Any] = drafter.drafter.get("architecture") or {}
    rope = architecture.get("rope_parameters")
    if rope and float(rope.get("rope_theta", DEFAULT_THETA)) != DEFAULT_THETA:
        plain = {"rope_type": "default", "rope_theta": DEFAULT_THETA}
        changed = with_changes(drafter, {"architecture": {"rope_parameters": plain}}, {})
        yield Interpretation(
            "rope", f"a rotary base of {DEFAULT_THETA:.0f}", "write rope_theta", changed
        )
    for flag, dropped in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm")):
        if architecture.get(flag):
            changed = with_changes(drafter, {"architecture": {flag: False}}, {})
            kept = {
                name: tensor
                for name, tensor in changed.tensors.items()
                if not name.startswith(dropped)
            }
            yield Interpretation(
                f"{flag}-dropped",
                f"{flag}=false",
                f"write {flag}=true",
                replace(changed, tensors=kept),
            )


def window_interpretations(drafter: DrafterCheckpoint, position: int) -> Iterator[Interpretation]:
    """Yield a window that the server ignores, or one that begins to matter where the first round
    differs.
    """
    if "layers" not in drafter.drafter or drafter.family == "medusa":
        return
    if drafter.drafter.get("window") is not None:
        changed = with_changes(drafter, {"window": None}, {})
        yield Interpretation(
            "context-window", "no sliding window", "write the sliding window", changed
        )
        return
    # A window shows where it first matters, which may be later than where it begins; most sizes are
    # powers of two.
    power = 1 << max(0, position.bit_length() - 1)
    for window in sorted(
        {position, power * 3 // 2, power, power * 3 // 4, power // 2}, reverse=True
    ):
        if 1 < window <= position:
            changed = with_changes(drafter, {"window": window}, {})
            yield Interpretation(
                "context-window",
                f"a window of {window} positions",
                "write no sliding window",
                changed,
            )
