"""Attention of several texts in one call on a CPU, compiled by Numba: each text attends to its own slots, as many as it has.

Shapes: B texts, N nodes of each, M appended nodes of each, H query heads, K key-value heads, d head size. Each text is one call
of the kernel of single texts (`cpu_attention`), so its bits do not depend on the others. Save this file after a change of
cpu_attention.py or cpu_vectors.py, because Numba keeps the compiled code until this file changes.
"""

from __future__ import annotations

from typing import Any

from numba import carray

from .cpu_attention import _attend, _rotate_append
from .cpu_vectors import advance, compile_cached, compile_inline, to_bytes, to_floats, to_halves, to_longs


@compile_inline
def _rotate_attend_texts(
    heads: Any, cos: Any, sin: Any, keys: Any, values: Any, slot_stride: int, starts: int, lengths: int, num_texts: int,
    num_appended: int, masks: int, num_nodes: int, num_heads: int, num_key_heads: int, head_size: int, out: Any, scale: float,
    scratch: int,
) -> None:  # fmt: skip
    width = (num_heads + 2 * num_key_heads) * head_size
    first_slots, num_committed = carray(to_longs(starts), (num_texts,)), carray(to_longs(lengths), (num_texts,))
    for text in range(num_texts):
        node, length = text * num_nodes, num_committed[text]
        shift = slot_stride * first_slots[text]
        new = shift + slot_stride * (length + num_appended - num_nodes)
        angle = node * head_size
        _rotate_append(
            advance(heads, node * width), advance(cos, angle), advance(sin, angle), advance(keys, new), advance(values, new),
            slot_stride, num_nodes, num_heads, num_key_heads, head_size,
        )  # fmt: skip
        _attend(
            advance(heads, node * width), width, head_size, advance(keys, shift), advance(values, shift), slot_stride, length,
            num_appended, to_bytes(masks + node * num_appended), num_nodes, num_heads, num_key_heads, head_size,
            advance(out, node * num_heads * head_size), scale, scratch,
        )  # fmt: skip


@compile_cached
def rotate_attend_texts_half(
    heads: int, cos: int, sin: int, keys: int, values: int, slot_stride: int, starts: int, lengths: int, num_texts: int,
    num_appended: int, masks: int, num_nodes: int, num_heads: int, num_key_heads: int, head_size: int, out: int, scale: float,
    scratch: int,
) -> None:  # fmt: skip
    """Rotate heads [B, N, H + 2 K, d] in bfloat16, append their keys and values to the slots of each text, which begin with
    number `starts` [B] of all slots [.., K d] and of which `lengths` [B] are committed, and attend by masks [B, N, M]."""
    _rotate_attend_texts(
        to_halves(heads), to_halves(cos), to_halves(sin), to_halves(keys), to_halves(values), slot_stride, starts, lengths,
        num_texts, num_appended, masks, num_nodes, num_heads, num_key_heads, head_size, to_halves(out), scale, scratch,
    )  # fmt: skip


@compile_cached
def rotate_attend_texts_float(
    heads: int, cos: int, sin: int, keys: int, values: int, slot_stride: int, starts: int, lengths: int, num_texts: int,
    num_appended: int, masks: int, num_nodes: int, num_heads: int, num_key_heads: int, head_size: int, out: int, scale: float,
    scratch: int,
) -> None:  # fmt: skip
    """Compute the same in float32."""
    _rotate_attend_texts(
        to_floats(heads), to_floats(cos), to_floats(sin), to_floats(keys), to_floats(values), slot_stride, starts, lengths,
        num_texts, num_appended, masks, num_nodes, num_heads, num_key_heads, head_size, to_floats(out), scale, scratch,
    )  # fmt: skip
