"""What a round emits, written behind each text, and whether the text goes on: what else a commit does than moving keys.

Shapes: B batch, N nodes of a tree, P steps of the longest path, T slots of a text, S stop tokens. The reference in torch, some
twenty operations on a few numbers each, comes first; it is also the path on a CPU. The kernel is one launch, a program a text.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dispatch import jit, runs_on

try:
    import triton
    import triton.language as tl
except ImportError:  # no triton for this platform
    triton = None


class TextBatch(NamedTuple):
    """The texts of a batch, of which a commit changes all but the lengths and the stop tokens."""

    tokens: Tensor  # [B, T] int64, the committed ones and, behind them, the root
    lengths: Tensor  # [B] int64, the root left out
    active: Tensor  # [B] bool, False where a text is done
    tokens_left: Tensor  # [B] int64, tokens that it may still emit
    stop_ids: Tensor  # [S] int64


def gather_emitted(nodes: Tensor, path: Tensor, counts: Tensor, bonus: Tensor) -> Tensor:
    """[B, P] the tokens of a round: of the kept nodes [B, N] after the root, then the bonus [B], then padding."""
    following = torch.cat([path[:, 1:], path[:, -1:]], dim=1)
    return nodes.gather(1, following).scatter(1, (counts - 1)[:, None], bonus[:, None])


def token_commit_reference(
    nodes: Tensor, path: Tensor, counts: Tensor, bonus: Tensor, texts: TextBatch
) -> tuple[Tensor, Tensor]:
    """Write the first `counts` [B] of the tokens [B, P] along `path` [B, P], and the bonus, behind every text that is not done.

    What was emitted, [B, P], and how much of it counts, [B]: nothing of a text that is done. One that has emitted a stop token
    or its last one is done from then on.
    """
    emitted, kept = gather_emitted(nodes, path, counts, bonus), counts * texts.active
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    slots = (texts.lengths[:, None] + 1 + steps).clamp(max=texts.tokens.shape[1] - 1)
    real = steps < kept[:, None]
    texts.tokens.scatter_(1, slots, torch.where(real, emitted, texts.tokens.gather(1, slots)))
    stopped = ((emitted[..., None] == texts.stop_ids).any(-1) & real).any(-1)
    texts.tokens_left.sub_(kept)
    texts.active.logical_and_(~stopped & (texts.tokens_left > 0))
    return emitted, kept


@jit
def _emit_kernel(  # type: ignore[no-untyped-def]
    nodes_ptr, path_ptr, counts_ptr, bonus_ptr, tokens_ptr, lengths_ptr, active_ptr, left_ptr, stops_ptr, emitted_ptr, kept_ptr,
    num_nodes, num_steps, num_slots, num_stops, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One text; grid [B]."""
    batch = tl.cast(tl.program_id(0), tl.int64)
    step, stop = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    inside = step < num_steps
    following = tl.minimum(step + 1, num_steps - 1)
    node = tl.load(path_ptr + batch * num_steps + following, mask=inside, other=0)
    token = tl.load(nodes_ptr + batch * num_nodes + node, mask=inside, other=0)
    count = tl.load(counts_ptr + batch)
    token = tl.where(step == count - 1, tl.load(bonus_ptr + batch), token)
    tl.store(emitted_ptr + batch * num_steps + step, token, mask=inside)
    going = tl.load(active_ptr + batch) != 0
    kept = tl.where(going, count, 0)
    tl.store(kept_ptr + batch, kept)
    real = inside & (step < kept)
    slot = tl.minimum(tl.load(lengths_ptr + batch) + 1 + step, num_slots - 1)
    tl.store(tokens_ptr + batch * num_slots + slot, token, mask=real)
    ends = tl.load(stops_ptr + stop, mask=stop < num_stops, other=0)
    hits = (token[:, None] == ends[None, :]) & real[:, None] & (stop < num_stops)[None, :]
    stopped = tl.max(tl.max(hits.to(tl.int32), 1), 0)
    left = tl.load(left_ptr + batch) - kept
    tl.store(left_ptr + batch, left)
    tl.store(active_ptr + batch, going & (stopped == 0) & (left > 0))


@torch.library.custom_op("spectrain::token_commit", mutates_args={"tokens", "active", "left"})
def _launch_emit(
    nodes: Tensor,
    path: Tensor,
    counts: Tensor,
    bonus: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    active: Tensor,
    left: Tensor,
    stops: Tensor,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel."""
    (batch, num_steps), num_stops = path.shape, len(stops)
    assert tokens.is_contiguous() and active.is_contiguous() and left.is_contiguous()
    emitted, kept = _empty_outputs(nodes, path, counts)
    with torch.cuda.device_of(tokens):
        _emit_kernel[(batch,)](
            nodes, path, counts, bonus, tokens, lengths, active, left, stops, emitted, kept,
            nodes.shape[1], num_steps, tokens.shape[1], num_stops,
            BLOCK_P=triton.next_power_of_2(num_steps), BLOCK_S=triton.next_power_of_2(max(1, num_stops)), num_warps=1,
        )  # fmt: skip
    return emitted, kept


@_launch_emit.register_fake
def _empty_outputs(nodes: Tensor, path: Tensor, counts: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return path.new_empty(path.shape), counts.new_empty(counts.shape)


def token_commit(nodes: Tensor, path: Tensor, counts: Tensor, bonus: Tensor, texts: TextBatch) -> tuple[Tensor, Tensor]:
    """What `token_commit_reference` does, in place and without waiting for the device, in one launch where the kernel runs."""
    if not runs_on(texts.tokens.device):
        return token_commit_reference(nodes, path, counts, bonus, texts)
    found: tuple[Tensor, Tensor] = _launch_emit(*(x.contiguous() for x in (nodes, path, counts, bonus)), *texts)
    return found
