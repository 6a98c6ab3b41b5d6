"""EAGLE's layer over a few nodes of one text on a CPU, compiled by Numba: from tokens to
log-probabilities in one call.

It computes what the modules of the drafter compute on 8-bit weights. Attention is that of
`cpu_attention`. Shapes: F new nodes, M appended nodes (the new ones last), N nodes of a draft (the
root first, which is no appended node), D width, H query heads, K key-value heads, d head size, I
inner width, V draft vocabulary. Tensors are passed by address; numbers are float32 where nothing
else is said.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import carray

from .cpu_attention import attend_text, rotate_append
from .cpu_floats import gate_rows, norm_row, normalize_row
from .cpu_int8 import ByteLinear, TeamProduct, multiply_rounded
from .cpu_vectors import (
    advance,
    compile_cached,
    compile_inline,
    to_bytes,
    to_floats,
    to_halves,
    to_longs,
    widen,
)


class EagleLayer(NamedTuple):
    """The weights of the layer and the output layer of a drafter."""

    embedding: int  # of the tokens
    is_half: bool  # whether the embedding is bfloat16
    input_norm: int
    hidden_norm: int
    later_norm: int
    final_norm: int
    eps: float
    qkv: ByteLinear
    output: ByteLinear
    gate_up: ByteLinear
    down: ByteLinear
    head: ByteLinear
    num_heads: int
    num_key_heads: int
    head_size: int
    cos: int  # [positions, d]
    sin: int


class EagleMemory(NamedTuple):
    """The working memory of a call over F nodes."""

    hidden: int  # [F, D]
    inputs: int  # [F, 2 D] or [F, I]
    heads: int  # [F, H + 2 K, d]
    attended: int  # [F, H d]
    summed: int  # [F, D]
    inner: int  # [F, 2 I]
    angles: int  # [2, F, d]
    positions: int  # int64 [F]
    mask: int  # bytes [F, M]
    product: TeamProduct


class EagleSlots(NamedTuple):
    """The slots [T, K d] of the drafter's cache."""

    keys: int
    values: int
    num_committed: int
    num_appended: int  # with the new nodes
    attention: int  # working memory of `attend_text`


class EagleNodes(NamedTuple):
    """The nodes of a draft, at most N."""

    states: int  # [N, D]
    depths: int  # int64 [N]
    # bytes [N, N]: whether a node is one of a node's ancestors or itself, without the root
    ancestors: int
    capacity: int


@compile_inline
def _prepare_inputs(
    layer: EagleLayer, tokens: int, hidden: int, num_nodes: int, width: int, out: int
) -> None:
    """Store the normed embeddings of tokens [F] and the normed hidden states [F, D], side by
    side.
    """
    ids = carray(to_longs(tokens), (num_nodes,))
    for n in range(num_nodes):
        first = to_floats(out + 8 * n * width)
        embedded = carray(first, (width,))
        if layer.is_half:
            halves = carray(to_halves(layer.embedding + 2 * ids[n] * width), (width,))
            for i in range(width):
                embedded[i] = widen(halves[i])
        else:
            floats = carray(to_floats(layer.embedding + 4 * ids[n] * width), (width,))
            for i in range(width):
                embedded[i] = floats[i]
        norm_row(first, to_floats(layer.input_norm), first, width, layer.eps)
        norm_row(
            to_floats(hidden + 4 * n * width),
            to_floats(layer.hidden_norm),
            advance(first, width),
            width,
            layer.eps,
        )


@compile_inline
def _select_angles(layer: EagleLayer, memory: EagleMemory, num_nodes: int) -> None:
    """Store the cosines and sines of the nodes' positions."""
    size = layer.head_size
    positions = carray(to_longs(memory.positions), (num_nodes,))
    for n in range(num_nodes):
        for table, part in ((layer.cos, 0), (layer.sin, 1)):
            source = carray(to_floats(table + 4 * positions[n] * size), (size,))
            angles = carray(to_floats(memory.angles + 4 * (part * num_nodes + n) * size), (size,))
            for i in range(size):
                angles[i] = source[i]


@compile_inline
def _attend_nodes(
    layer: EagleLayer, memory: EagleMemory, slots: EagleSlots, num_nodes: int
) -> None:
    """Rotate the heads, append keys and values to the slots, and attend."""
    _select_angles(layer, memory, num_nodes)
    size = layer.head_size
    stride = layer.num_key_heads * layer.head_size
    shift = 4 * stride * (slots.num_committed + slots.num_appended - num_nodes)
    sines = memory.angles + 4 * num_nodes * size
    rotate_append(
        to_floats(memory.heads),
        to_floats(memory.angles),
        to_floats(sines),
        to_floats(slots.keys + shift),
        to_floats(slots.values + shift),
        stride,
        num_nodes,
        layer.num_heads,
        layer.num_key_heads,
        size,
    )
    attend_text(
        to_floats(memory.heads),
        (layer.num_heads + 2 * layer.num_key_heads) * size,
        size,
        to_floats(slots.keys),
        to_floats(slots.values),
        stride,
        slots.num_committed,
        slots.num_appended,
        to_bytes(memory.mask),
        num_nodes,
        layer.num_heads,
        layer.num_key_heads,
        size,
        to_floats(memory.attended),
        size**-0.5,
        slots.attention,
        0,
    )


@compile_inline
def _run_layer(
    layer: EagleLayer,
    memory: EagleMemory,
    slots: EagleSlots,
    tokens: int,
    hidden: int,
    num_nodes: int,
    out: int,
) -> None:
    """Run nodes with hidden states [F, D] and store their states [F, D]; their positions and
    mask lie in memory.
    """
    width = layer.output.num_outputs
    inner = layer.down.width
    _prepare_inputs(layer, tokens, hidden, num_nodes, width, memory.inputs)
    multiply_rounded(memory.inputs, num_nodes, layer.qkv, memory.heads, memory.product)
    _attend_nodes(layer, memory, slots, num_nodes)
    multiply_rounded(memory.attended, num_nodes, layer.output, memory.summed, memory.product)
    sums = carray(to_floats(memory.summed), (num_nodes * width,))
    residual = carray(to_floats(hidden), (num_nodes * width,))
    for i in range(num_nodes * width):
        sums[i] += residual[i]
    for n in range(num_nodes):
        shift = 4 * n * width
        norm_row(
            to_floats(memory.summed + shift),
            to_floats(layer.later_norm),
            to_floats(memory.inputs + shift),
            width,
            layer.eps,
        )
    multiply_rounded(memory.inputs, num_nodes, layer.gate_up, memory.inner, memory.product)
    gate_rows(to_floats(memory.inner), to_floats(memory.inputs), num_nodes, inner)
    multiply_rounded(memory.inputs, num_nodes, layer.down, out, memory.product)
    states = carray(to_floats(out), (num_nodes * width,))
    for i in range(num_nodes * width):
        states[i] += sums[i]


@compile_inline
def _score_states(
    layer: EagleLayer, memory: EagleMemory, states: int, num_nodes: int, out: int
) -> None:
    """Store the log-probabilities [F, V] after nodes with states [F, D]."""
    width = layer.output.num_outputs
    for n in range(num_nodes):
        shift = 4 * n * width
        norm_row(
            to_floats(states + shift),
            to_floats(layer.final_norm),
            to_floats(memory.inputs + shift),
            width,
            layer.eps,
        )
    multiply_rounded(memory.inputs, num_nodes, layer.head, out, memory.product)
    for n in range(num_nodes):
        normalize_row(to_floats(out + 4 * n * layer.head.num_outputs), layer.head.num_outputs)


@compile_inline
def _add_nodes(
    layer: EagleLayer,
    memory: EagleMemory,
    slots: EagleSlots,
    nodes: EagleNodes,
    parents: int,
    num_nodes: int,
) -> None:
    """Store the depths and ancestors of new nodes, and in memory their parents' states, their
    positions and their mask.
    """
    width = layer.output.num_outputs
    capacity = nodes.capacity
    above = carray(to_longs(parents), (num_nodes,))
    first = slots.num_appended - num_nodes + 1
    appended = slots.num_appended
    depths = carray(to_longs(nodes.depths), (capacity,))
    ancestors = carray(to_bytes(nodes.ancestors), (capacity * capacity,))
    positions = carray(to_longs(memory.positions), (num_nodes,))
    mask = carray(to_bytes(memory.mask), (num_nodes * appended,))
    for n in range(num_nodes):
        node = first + n
        parent = above[n]
        depths[node] = depths[parent] + 1
        positions[n] = slots.num_committed - 1 + depths[node]
        for m in range(1, appended + 1):
            is_ancestor = m == node or (m < first and ancestors[parent * capacity + m] != 0)
            ancestors[node * capacity + m] = mask[n * appended + m - 1] = is_ancestor
        source = carray(to_floats(nodes.states + 4 * parent * width), (width,))
        hidden = carray(to_floats(memory.hidden + 4 * n * width), (width,))
        for i in range(width):
            hidden[i] = source[i]


@compile_inline
def _store_positions(memory: EagleMemory, num_committed: int, num_tokens: int) -> None:
    """Store the positions and the mask of the next tokens of the text."""
    positions = carray(to_longs(memory.positions), (num_tokens,))
    mask = carray(to_bytes(memory.mask), (num_tokens * num_tokens,))
    for n in range(num_tokens):
        positions[n] = num_committed + n
        for m in range(num_tokens):
            mask[n * num_tokens + m] = m <= n


@compile_cached
def run_nodes(
    layer: EagleLayer,
    memory: EagleMemory,
    slots: EagleSlots,
    nodes: EagleNodes,
    tokens: int,
    parents: int,
    num_nodes: int,
    states: int,
    out: int,
) -> None:
    """Run new nodes with tokens [F] below `parents` [F], store their states [F, D] and the
    log-probabilities [F, V] after them.

    Where `parents` is 0, the tokens are the next ones of the text, and `states` are the hidden
    states that they are run with; where `tokens` is 0, `states` are there. Where `out` is 0,
    nothing is scored. All this is one function, because each that ran the layer would be compiled
    with a copy of it.
    """
    if tokens != 0:
        hidden = states
        if parents == 0:
            _store_positions(memory, slots.num_committed, num_nodes)
        else:
            _add_nodes(layer, memory, slots, nodes, parents, num_nodes)
            hidden = memory.hidden
        _run_layer(layer, memory, slots, tokens, hidden, num_nodes, states)
    if out != 0:
        _score_states(layer, memory, states, num_nodes, out)
