"""Attention of tree nodes over a committed prefix and their own ancestors.

Shapes: B batch, N query nodes, T key slots, H query heads, K key-value heads, D head size.
This is the reference in torch, which is also the path on a CPU.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Visibility:
    """What each of N new nodes sees: the committed prefix, and the appended nodes that `tree` marks."""

    lengths: Tensor  # [B] committed tokens a row
    longest: int  # the largest of them
    tree: Tensor  # [B, N, M] bool over the M appended nodes, the N new ones last
    query_positions: Tensor  # [B, N] position ids of the new nodes
    key_positions: Tensor | None  # [B, M] position ids of the appended nodes; needed by sliding windows only
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """[B, 1, N, T] bool, or None where every new node sees every slot; built once and shared by all layers."""
        if window not in self._masks:
            self._masks[window] = self._build(window)
        return self._masks[window]

    def _build(self, window: int | None) -> Tensor | None:
        batch, num_new, num_appended = self.tree.shape
        num_slots = self.longest + num_appended
        if batch == 1:
            prefix = self.tree.new_ones(1, num_new, self.longest)
            mask = torch.cat([prefix, self.tree], dim=2)
        else:
            slots = torch.arange(num_slots, device=self.tree.device)
            offset = (slots - self.lengths[:, None]).clamp(0, num_appended - 1)  # [B, T] node held by each slot
            mask = self.tree.gather(2, offset[:, None].expand(-1, num_new, -1))
            mask &= (slots < self.lengths[:, None] + num_appended)[:, None]
            mask |= (slots < self.lengths[:, None])[:, None]
        if window is not None and num_slots > window:
            assert self.key_positions is not None
            slots = torch.arange(num_slots, device=self.tree.device)
            offset = (slots - self.lengths[:, None]).clamp(0, num_appended - 1)
            positions = torch.where(slots < self.lengths[:, None], slots, self.key_positions.gather(1, offset))
            mask = mask & (self.query_positions[:, :, None] - positions[:, None] < window)
        return None if num_new == 1 and bool(mask.all()) else mask[:, None]


def tree_attention_reference(
    q_BHND: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    visibility: Visibility,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over the slots that each node sees, [B, H, N, D]."""
    mask = visibility.mask(window)
    if softcap is None:
        return F.scaled_dot_product_attention(q_BHND, k_BKTD, v_BKTD, attn_mask=mask, scale=scale, enable_gqa=True)
    return attend_softcapped(q_BHND, k_BKTD, v_BKTD, mask, scale, softcap)


def attend_softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Attention whose scores pass through softcap * tanh(score / softcap), as in Gemma 2."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.tanh(q.float() @ k.float().transpose(-1, -2) * scale / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(q.dtype)
