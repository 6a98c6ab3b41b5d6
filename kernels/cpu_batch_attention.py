"""Attention of several texts in one call on a CPU, compiled by Numba: each text attends to its own slots, as many as it has.

Shapes: B texts, N nodes of each, M appended nodes of each, H query heads, K key-value heads, d head size. Each text is one call
of the kernel of single texts (`cpu_attention`), so its bits do not depend on the others. Save this file after a change of
cpu_attention.py, cpu_single_attention.py or cpu_vectors.py, because Numba keeps the compiled code until this file changes.
"""

from __future__ import annotations

from numba import carray

from .cpu_attention import _attend, _rotate_append
from .cpu_single_attention import COLUMNS, MAX_GROUP, attend_single
from .cpu_vectors import compile_cached, to_bytes, to_halves, to_longs


@compile_cached
def rotate_attend_texts_half(
    heads: int, cos: int, sin: int, keys: int, values: int, slot_stride: int, starts: int, lengths: int, num_texts: int,
    num_appended: int, masks: int, num_nodes: int, num_heads: int, num_key_heads: int, head_size: int, out: int, scale: float,
    scratch: int,
) -> None:  # fmt: skip
    """Rotate heads [B, N, H + 2 K, d] in bfloat16, append their keys and values to the slots of each text, which begin with
    number `starts` [B] of all slots [.., K d] and of which `lengths` [B] are committed, and attend by masks [B, N, M]."""
    width = (num_heads + 2 * num_key_heads) * head_size
    first_slots, num_committed = carray(to_longs(starts), (num_texts,)), carray(to_longs(lengths), (num_texts,))
    # A token that sees itself and every slot before it.
    is_single = num_appended == 1 and num_heads // num_key_heads <= MAX_GROUP and head_size % COLUMNS == 0
    for text in range(num_texts):
        node, length = text * num_nodes, num_committed[text]
        shift = 2 * slot_stride * first_slots[text]
        new = shift + 2 * slot_stride * (length + num_appended - num_nodes)
        angle = 2 * node * head_size
        _rotate_append(
            to_halves(heads + 2 * node * width), to_halves(cos + angle), to_halves(sin + angle), to_halves(keys + new),
            to_halves(values + new), slot_stride, num_nodes, num_heads, num_key_heads, head_size,
        )  # fmt: skip
        if is_single:
            following = min(text + 1, num_texts - 1)
            attend_single(
                to_halves(heads + 2 * node * width), keys + shift, values + shift, 2 * slot_stride, length + 1, num_heads,
                num_key_heads, head_size, to_halves(out + 2 * node * num_heads * head_size), scale, scratch,
                keys + 2 * slot_stride * first_slots[following], num_committed[following],
            )  # fmt: skip
            continue
        _attend(
            to_halves(heads + 2 * node * width), width, head_size, to_halves(keys + shift), to_halves(values + shift),
            slot_stride, length, num_appended, to_bytes(masks + node * num_appended), num_nodes, num_heads, num_key_heads,
            head_size, to_halves(out + 2 * node * num_heads * head_size), scale, scratch,
        )  # fmt: skip
