"""EAGLE's layer over a few nodes of one text on a CPU, compiled by Numba: from tokens to
log-probabilities in one call.

It computes what the modules of the drafter compute on 8-bit weights. Attention is that of
`attention`. Shapes: F new nodes, M appended nodes (the new ones last), N nodes of a draft (the
root first, which is no appended node), D width, H query heads, K key-value heads, d head size, I
inner width, V draft vocabulary. Tensors are passed by address; numbers are float32 where nothing
else is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from numba import carray
from torch import Tensor

from spectrain_cpu.block_weights import BlockWeight

from .attention import attend_text, attention_size, rotate_append
from .available import working_memory
from .floats import gate_rows, norm_row, normalize_row
from .int8 import ByteLinear, ByteWeights, TeamProduct, multiply_bytes_part, multiply_rounded
from .linear import working_sums
from .team import count_members, current_team
from .vectors import (
    advance,
    compile_cached,
    compile_inline,
    to_bytes,
    to_floats,
    to_halves,
    to_longs,
    widen,
)

MIN_ROWS = 16
"""Nodes that the working memory of a drafter has room for at least."""
FLOAT_BYTES = 4


class EagleLayer(NamedTuple):
    """The weights of the layer and the output layer of a drafter."""

    embedding: int  # of the tokens, or of those that are read
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


class EagleShape(NamedTuple):
    """The heads of a layer, and the epsilon of its norms."""

    num_heads: int
    num_key_heads: int
    head_size: int
    eps: float


class EagleKernels:
    """The kernels of EAGLE's layer with its weights: `norms` are input, hidden, later and final,
    `linears` qkv, output, gate_up, down and head."""

    def __init__(
        self,
        embedding: Tensor,
        norms: Mapping[str, Tensor],
        linears: Mapping[str, ByteWeights],
        shape: EagleShape,
    ) -> None:
        self.shape = shape
        self.embedding = embedding.detach()
        # Rows of an embedding in blocks that the kernels are reading.
        self.looked_up = torch.empty(0)
        self.linears = linears
        self.norms = {f"{name}_norm": norm.detach().float() for name, norm in norms.items()}
        self.vocab_size = linears["head"].sizes[1]
        self.width = linears["output"].sizes[1]
        self.num_positions = self.num_rows = self.num_slots = self.num_members = 0

    def use_angles(self, cos: Tensor, sin: Tensor) -> None:
        """Use the cosines and sines [1, positions, d] of all positions of a text."""
        self.angles = torch.cat([cos, sin]).float()
        self.num_positions = cos.shape[1]
        shape = self.shape
        parts: dict[str, Any] = {name: weights.linear for name, weights in self.linears.items()}
        parts |= {name: norm.data_ptr() for name, norm in self.norms.items()}
        self.layer = EagleLayer(
            embedding=0 if isinstance(self.embedding, BlockWeight) else self.embedding.data_ptr(),
            is_half=self.embedding.dtype == torch.bfloat16,
            **shape._asdict(),
            **parts,
            cos=self.angles[0].data_ptr(),
            sin=self.angles[1].data_ptr(),
        )

    def find_embeddings(self, tokens: Tensor) -> tuple[EagleLayer, Tensor]:
        """Return the layer and the rows [1, F] of its embedding that belong to tokens [1, F].

        An embedding in the blocks of a GGUF file is no memory that a kernel could read: its rows
        are looked up here.
        """
        if not isinstance(self.embedding, BlockWeight):
            return self.layer, tokens.contiguous()
        self.looked_up = self.embedding.take_rows(tokens[0]).contiguous()
        layer = self.layer._replace(embedding=self.looked_up.data_ptr())
        return layer, torch.arange(tokens.shape[1])[None]

    def read_tokens(
        self, tokens: Tensor, hidden: Tensor, slots: Tensor, num_committed: int
    ) -> Tensor:
        """Run the next tokens [1, P] of a text with hidden states [1, P, D], and return their
        states. `slots` [2, T, K, d] are those of the text."""
        count = tokens.shape[1]
        layer, rows = self.find_embeddings(tokens)
        states = hidden.float().contiguous()
        states = states.clone() if states is hidden else states
        self._reserve(count, count)
        viewed = self._view_slots(slots, num_committed, count, count)
        no_nodes = EagleNodes(0, 0, 0, 0)
        run_nodes(
            layer,
            self.memory,
            viewed,
            no_nodes,
            rows.data_ptr(),
            0,
            count,
            states.data_ptr(),
            0,
        )
        return states

    def score_states(self, states: Tensor) -> Tensor:
        """Return the log-probabilities [1, F, V] after nodes with states [1, F, D]."""
        count = states.shape[1]
        self._reserve(count, 1)
        log_q = torch.empty(1, count, self.vocab_size)
        states = states.contiguous()
        no_slots = EagleSlots(0, 0, 0, 0, 0)
        no_nodes = EagleNodes(0, 0, 0, 0)
        run_nodes(
            self.layer,
            self.memory,
            no_slots,
            no_nodes,
            0,
            0,
            count,
            states.data_ptr(),
            log_q.data_ptr(),
        )
        return log_q

    def _view_slots(
        self, slots: Tensor, num_committed: int, num_appended: int, num_new: int
    ) -> Any:
        """Return what kernels are told of the slots and of the working memory of attention."""
        num_heads, num_key_heads, size, _ = self.shape
        rows = num_new * (num_heads // num_key_heads)
        length = num_committed + num_appended
        memory = working_memory(attention_size(rows, length, size))
        keys = slots.data_ptr()
        values = keys + slots.stride(0) * FLOAT_BYTES
        return EagleSlots(keys, values, num_committed, num_appended, memory.data_ptr())

    def _reserve(self, num_rows: int, num_slots: int) -> None:
        """Make the working memory large enough for calls over so many nodes, of so many that are
        appended, by as many threads as torch uses."""
        members = count_members()
        if (
            num_rows <= self.num_rows
            and num_slots <= self.num_slots
            and members == self.num_members
        ):
            return
        self.num_members = members
        rows = max(MIN_ROWS, num_rows, self.num_rows)
        self.num_slots = max(MIN_ROWS, num_slots, self.num_slots)
        self.num_rows = rows
        linears = self.linears
        widest = max(weights.sizes[0] for weights in linears.values())
        floats = {
            "hidden": self.width,
            "inputs": widest,
            "heads": linears["qkv"].sizes[1],
            "attended": linears["output"].sizes[0],
            "summed": self.width,
            "inner": linears["gate_up"].sizes[1],
            "angles": 2 * self.shape.head_size,
        }
        self.buffers = {name: torch.empty(rows, size) for name, size in floats.items()}
        self.buffers["positions"] = torch.empty(rows, dtype=torch.int64)
        self.buffers["mask"] = torch.empty(rows, self.num_slots, dtype=torch.uint8)
        self.rounded = torch.empty(rows * widest, dtype=torch.uint8)
        self.sums = working_sums()
        function = multiply_bytes_part().address
        team = current_team().address
        product = TeamProduct(
            function, self.rounded.data_ptr(), self.sums.data_ptr(), team, members
        )
        self.memory = EagleMemory(
            **{name: buffer.data_ptr() for name, buffer in self.buffers.items()}, product=product
        )


class EagleDraft:
    """The nodes of one draft of one text, which kernels extend. The root is the first."""

    def __init__(
        self, kernels: EagleKernels, root: Tensor, slots: Tensor, num_committed: int, capacity: int
    ) -> None:
        """Start from the root's state [1, 1, D], with room for `capacity` nodes, the root
        included.
        """
        self.kernels = kernels
        self.slots = slots
        self.num_committed = num_committed
        self.capacity = capacity
        self.num_nodes = 1
        self.states = torch.empty(capacity, kernels.width)
        self.states[0] = root[0, 0]
        self.depths = torch.zeros(capacity, dtype=torch.int64)
        self.ancestors = torch.empty(capacity, capacity, dtype=torch.uint8)
        parts = self.states, self.depths, self.ancestors
        states, depths, ancestors = (part.data_ptr() for part in parts)
        self.nodes = EagleNodes(states, depths, ancestors, capacity)

    def score_root(self) -> Tensor:
        """Return the log-probabilities [1, 1, V] after the root."""
        return self.kernels.score_states(self.states[None, :1])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Add nodes with tokens [1, F] below `parents` [1, F], and return the log-probabilities
        [1, F, V] after them.
        """
        kernels = self.kernels
        count = tokens.shape[1]
        num_appended = self.num_nodes - 1 + count
        assert num_appended < self.capacity, f"a draft of {self.capacity} nodes is full"
        kernels._reserve(count, num_appended)
        layer, rows = kernels.find_embeddings(tokens)
        parents = parents.contiguous()
        log_q = torch.empty(1, count, kernels.vocab_size)
        slots = kernels._view_slots(self.slots, self.num_committed, num_appended, count)
        states = self.states[self.num_nodes].data_ptr()
        run_nodes(
            layer,
            kernels.memory,
            slots,
            self.nodes,
            rows.data_ptr(),
            parents.data_ptr(),
            count,
            states,
            log_q.data_ptr(),
        )
        self.num_nodes += count
        return log_q
