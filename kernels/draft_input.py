"""What the first layer of an EAGLE drafter reads, for nodes of a tree or for accepted tokens, in
one launch: embedding, norms, positions and the nodes that each one sees.

Shapes: B batch, F new nodes, P new positions, C rows for the root and all nodes of a round, W words
of 64 of them, T slots of a text, V vocabulary, D width. The references in torch come first. They
take some thirty small operations; a kernel takes one launch, with a program for each new row. A
node's visibility is its parent's with its own bit, so no mask is built.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dispatch import jit, runs_on, tl, triton
from .rms_norm import count_row_warps, norm_row, rms_norm_reference
from .tree_masks import count_words, pack_words


class DraftedRows(NamedTuple):
    """What new nodes read of earlier ones, by the order in which these were drafted; row 0 is the
    root, of which only the state is read."""

    states: Tensor  # [B, C, D]
    words: Tensor  # [B, C, W] int64, bit n - 1 is set where row n is seen
    depths: Tensor  # [B, C] int64


class InputLayers(NamedTuple):
    """The weights that the inputs pass through."""

    embedding: Tensor  # [V, D]
    token_norm: Tensor  # [D]
    state_norm: Tensor  # [D]
    eps: float
    # whether the normed state is the residual stream too
    has_normed_residual: bool


class DraftInput(NamedTuple):
    """The inputs of a layer: x [B, F, 2 D], the residual stream [B, F, D], positions [B, F] and
    visibility words [B, F, W] over the appended nodes."""

    x: Tensor
    residual: Tensor
    positions: Tensor
    words: Tensor


def _join_reference(tokens: Tensor, states: Tensor, layers: InputLayers) -> tuple[Tensor, Tensor]:
    """Return x and the residual stream of rows with these tokens and states [B, F, D]."""
    normed = rms_norm_reference(states, layers.state_norm, layers.eps)
    embedded = layers.embedding[tokens].to(states.dtype)
    x = torch.cat([rms_norm_reference(embedded, layers.token_norm, layers.eps), normed], dim=-1)
    return x, normed if layers.has_normed_residual else states


def node_input_reference(
    tokens: Tensor,
    parents: Tensor,
    lengths: Tensor,
    rows: DraftedRows,
    num_rows: int,
    layers: InputLayers,
) -> DraftInput:
    """Return the inputs of new nodes with `tokens` [B, F] below the rows `parents` [B, F], after
    `num_rows` rows; their words and depths are added to `rows`. The drafter's cache has `lengths`
    [B] tokens, the last of which is the root's.
    """
    new = torch.arange(num_rows, num_rows + tokens.shape[1], device=tokens.device)
    is_root = parents == 0
    depths = rows.depths.gather(1, parents).masked_fill(is_root, 0) + 1
    index = parents[..., None]
    words = rows.words.gather(1, index.expand(-1, -1, rows.words.shape[2]))
    words = words.masked_fill(is_root[..., None], 0)
    own = torch.zeros_like(words[0])
    own[torch.arange(len(new)), (new - 1) // 64] = torch.ones_like(new) << (new - 1) % 64
    words = words | own
    rows.words[:, new] = words
    rows.depths[:, new] = depths
    states = rows.states.gather(1, index.expand(-1, -1, rows.states.shape[2]))
    x, residual = _join_reference(tokens, states, layers)
    num_words = count_words(num_rows - 1 + tokens.shape[1])
    positions = lengths[:, None] - 1 + depths
    return DraftInput(x, residual, positions, words[..., :num_words].contiguous())


def accepted_input_reference(
    text: Tensor,
    text_lengths: Tensor,
    num_new: Tensor,
    lengths: Tensor,
    states: Tensor,
    layers: InputLayers,
) -> DraftInput:
    """Return the inputs of the newest accepted tokens: states [B, P, D], of which `num_new` [B] are
    real, end at the last of the `text_lengths` [B] committed tokens of `text` [B, T], and each is
    read with the token that follows it. They take the places after `lengths` [B]; each sees those
    up to itself.
    """
    batch, count, _ = states.shape
    steps = torch.arange(count, device=text.device)
    following = (text_lengths - num_new)[:, None] + 1 + steps
    tokens = text.gather(1, following.clamp(max=text.shape[1] - 1))
    x, residual = _join_reference(tokens, states, layers)
    causal = torch.ones(count, count, dtype=torch.bool, device=text.device).tril()
    words = pack_words(causal.expand(batch, -1, -1))
    return DraftInput(x, residual, lengths[:, None] + steps, words)


@jit
def _write_row(  # type: ignore[no-untyped-def]
    token,
    state_ptr,
    embedding_ptr,
    token_norm_ptr,
    state_norm_ptr,
    x_ptr,
    residual_ptr,
    eps,
    NORMED_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write x and the residual stream of one row from its token and its state."""
    dims = tl.arange(0, BLOCK)
    inside = dims < WIDTH
    raw = tl.load(state_ptr + dims, mask=inside, other=0.0)
    normed = norm_row(raw.to(tl.float32), state_norm_ptr, eps, WIDTH, BLOCK).to(
        x_ptr.dtype.element_ty
    )
    tl.store(x_ptr + WIDTH + dims, normed, mask=inside)
    tl.store(residual_ptr + dims, normed if NORMED_RESIDUAL else raw, mask=inside)
    embedded = tl.load(embedding_ptr + token * WIDTH + dims, mask=inside, other=0.0)
    # rounded as a drafter's module reads it
    embedded = embedded.to(x_ptr.dtype.element_ty).to(tl.float32)
    normed = norm_row(embedded, token_norm_ptr, eps, WIDTH, BLOCK).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + dims, normed, mask=inside)


@jit
def _node_input_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    parents_ptr,
    lengths_ptr,
    states_ptr,
    words_ptr,
    depths_ptr,
    embedding_ptr,
    token_norm_ptr,
    state_norm_ptr,
    x_ptr,
    residual_ptr,
    positions_ptr,
    visible_ptr,
    num_rows,
    num_capacity,
    num_row_words,
    num_words,
    eps,
    NORMED_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the inputs of one new node, and its words and depth; grid [F, B]."""
    node = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    row = batch * tl.num_programs(0) + node
    first = batch * num_capacity
    parent = tl.load(parents_ptr + row)
    is_node = parent > 0
    # Row 0 has neither depth nor words.
    depth = tl.where(is_node, tl.load(depths_ptr + first + parent), 0) + 1
    new = first + num_rows + node
    tl.store(depths_ptr + new, depth)
    tl.store(positions_ptr + row, tl.load(lengths_ptr + batch) - 1 + depth)
    word = tl.arange(0, BLOCK_W)
    is_word = word < num_row_words
    visible = tl.load(words_ptr + (first + parent) * num_row_words + word, mask=is_word, other=0)
    visible = tl.where(is_node, visible, 0)
    own = num_rows - 1 + node
    bit = tl.full([BLOCK_W], 1, tl.int64) << (own % 64)
    visible = visible | tl.where(word == own // 64, bit, 0)
    tl.store(words_ptr + new * num_row_words + word, visible, mask=is_word)
    tl.store(visible_ptr + row * num_words + word, visible, mask=word < num_words)
    _write_row(
        tl.load(tokens_ptr + row),
        states_ptr + (first + parent) * WIDTH,
        embedding_ptr,
        token_norm_ptr,
        state_norm_ptr,
        x_ptr + row * 2 * WIDTH,
        residual_ptr + row * WIDTH,
        eps,
        NORMED_RESIDUAL,
        WIDTH,
        BLOCK,
    )


@jit
def _accepted_input_kernel(  # type: ignore[no-untyped-def]
    text_ptr,
    text_lengths_ptr,
    new_ptr,
    lengths_ptr,
    states_ptr,
    embedding_ptr,
    token_norm_ptr,
    state_norm_ptr,
    x_ptr,
    residual_ptr,
    positions_ptr,
    visible_ptr,
    text_stride_b,
    num_slots,
    num_words,
    eps,
    NORMED_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the inputs of one accepted token; grid [P, B]."""
    step = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    row = batch * tl.num_programs(0) + step
    following = tl.load(text_lengths_ptr + batch) - tl.load(new_ptr + batch) + 1 + step
    following = tl.minimum(following, num_slots - 1)
    tl.store(positions_ptr + row, tl.load(lengths_ptr + batch) + step)
    word = tl.arange(0, BLOCK_W)
    # All bits of earlier words, and of the own word those up to the own one.
    up_to = tl.full([BLOCK_W], -1, tl.int64) ^ (tl.full([BLOCK_W], -2, tl.int64) << (step % 64))
    visible = tl.where(word < step // 64, -1, tl.where(word == step // 64, up_to, 0))
    tl.store(visible_ptr + row * num_words + word, visible, mask=word < num_words)
    _write_row(
        tl.load(text_ptr + batch * text_stride_b + following),
        states_ptr + row * WIDTH,
        embedding_ptr,
        token_norm_ptr,
        state_norm_ptr,
        x_ptr + row * 2 * WIDTH,
        residual_ptr + row * WIDTH,
        eps,
        NORMED_RESIDUAL,
        WIDTH,
        BLOCK,
    )


def _empty_inputs(like: Tensor, batch: int, count: int, num_words: int) -> tuple[Tensor, ...]:
    width = like.shape[-1]
    integers = torch.int64
    return (
        like.new_empty(batch, count, 2 * width),
        like.new_empty(batch, count, width),
        like.new_empty(batch, count, dtype=integers),
        like.new_empty(batch, count, num_words, dtype=integers),
    )


@torch.library.custom_op("spectrain::node_input", mutates_args={"words", "depths"})
def _launch_node_input(
    tokens: Tensor,
    parents: Tensor,
    lengths: Tensor,
    states: Tensor,
    words: Tensor,
    depths: Tensor,
    num_rows: int,
    embedding: Tensor,
    token_norm: Tensor,
    state_norm: Tensor,
    eps: float,
    has_normed_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel."""
    batch, count = tokens.shape
    num_words = count_words(num_rows - 1 + count)
    outputs = _empty_inputs(states, batch, count, num_words)
    width = states.shape[-1]
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(states):
        _node_input_kernel[(count, batch)](
            tokens,
            parents,
            lengths,
            states,
            words,
            depths,
            embedding,
            token_norm,
            state_norm,
            *outputs,
            num_rows,
            states.shape[1],
            words.shape[2],
            num_words,
            eps,
            NORMED_RESIDUAL=has_normed_residual,
            WIDTH=width,
            BLOCK=block,
            BLOCK_W=triton.next_power_of_2(words.shape[2]),
            num_warps=count_row_warps(block),
        )
    return outputs  # type: ignore[return-value]


@_launch_node_input.register_fake
def _(tokens: Tensor, *args: Any) -> tuple[Tensor, ...]:
    states, num_rows = args[2], args[5]
    num_words = count_words(num_rows - 1 + tokens.shape[1])
    batch, count = tokens.shape
    return _empty_inputs(states, batch, count, num_words)


@torch.library.custom_op("spectrain::accepted_input", mutates_args=())
def _launch_accepted_input(
    text: Tensor,
    text_lengths: Tensor,
    num_new: Tensor,
    lengths: Tensor,
    states: Tensor,
    embedding: Tensor,
    token_norm: Tensor,
    state_norm: Tensor,
    eps: float,
    has_normed_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel."""
    batch, count, width = states.shape
    outputs = _empty_inputs(states, batch, count, count_words(count))
    num_words = outputs[3].shape[2]
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(states):
        _accepted_input_kernel[(count, batch)](
            text,
            text_lengths,
            num_new,
            lengths,
            states,
            embedding,
            token_norm,
            state_norm,
            *outputs,
            text.stride(0),
            text.shape[1],
            num_words,
            eps,
            NORMED_RESIDUAL=has_normed_residual,
            WIDTH=width,
            BLOCK=block,
            BLOCK_W=triton.next_power_of_2(num_words),
            num_warps=count_row_warps(block),
        )
    return outputs  # type: ignore[return-value]


@_launch_accepted_input.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    states = args[4]
    batch, count, _ = states.shape
    return _empty_inputs(states, batch, count, count_words(count))


def node_input(
    tokens: Tensor,
    parents: Tensor,
    lengths: Tensor,
    rows: DraftedRows,
    num_rows: int,
    layers: InputLayers,
) -> DraftInput:
    """Do what `node_input_reference` does, in one launch where the kernel runs."""
    if not runs_on(tokens.device):
        return node_input_reference(tokens, parents, lengths, rows, num_rows, layers)
    tokens, parents = tokens.contiguous(), parents.contiguous()
    return DraftInput(*_launch_node_input(tokens, parents, lengths, *rows, num_rows, *layers))


def accepted_input(
    text: Tensor,
    text_lengths: Tensor,
    num_new: Tensor,
    lengths: Tensor,
    states: Tensor,
    layers: InputLayers,
) -> DraftInput:
    """Do what `accepted_input_reference` does, in one launch where the kernel runs."""
    if not runs_on(text.device):
        return accepted_input_reference(text, text_lengths, num_new, lengths, states, layers)
    states = states.contiguous()
    return DraftInput(
        *_launch_accepted_input(text, text_lengths, num_new, lengths, states, *layers)
    )
