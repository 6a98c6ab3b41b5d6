"""What block drafters are held against: their block behind a text, every score written out, one
slot at a time.

Shapes: S slots, K drafts, W width.
"""

import math
from typing import Any

import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.layers.block_drafter import BlockDrafter
from spectrain.drafters.layers.llama_layer import apply_rotary
from spectrain.models.target import Target


def dataset(count: int = 4) -> Dataset:
    """Sequences of unequal length, with assistant tokens in two spans."""
    torch.manual_seed(5)
    rows = torch.randint(3, 2000, (count, 26)).tolist()
    masks = [[i in (4, 5, 6) or i >= 11 for i in range(26 - 3 * n)] for n in range(count)]
    return Dataset([Example(row[: len(mask)], mask) for row, mask in zip(rows, masks)], count, 0, 0)


def compute_attention(
    drafter: BlockDrafter, layer: Any, context: Tensor, normed: Tensor, anchor: int
) -> Tensor:
    """[S, W] what attention gives the slots of a block behind the context of the tokens before
    the anchor.
    """
    attn = layer.self_attn
    slots = len(normed)
    q = attn.q_norm(attn.q_proj(normed).unflatten(-1, (-1, attn.head_dim)))  # [S, H, D]
    keys = attn.k_norm(attn.k_proj(torch.cat([context, normed])).unflatten(-1, (-1, attn.head_dim)))
    values = attn.v_proj(torch.cat([context, normed])).unflatten(-1, (-1, attn.head_dim))
    cos, sin = drafter.rotary(normed, torch.arange(anchor + slots)[None])
    keys = apply_rotary(keys.transpose(0, 1)[None], (cos, sin))[0].transpose(0, 1)
    q = apply_rotary(q.transpose(0, 1)[None], (cos[:, anchor:], sin[:, anchor:]))[0].transpose(0, 1)
    group = q.shape[1] // keys.shape[1]
    out = torch.zeros_like(q)
    for s in range(slots):
        visible = [
            position
            for position in range(anchor + slots)
            if (drafter.window is None or position > anchor + s - drafter.window)
            and (position < anchor or not drafter.causal or position - anchor <= s)
        ]
        for head in range(q.shape[1]):
            scores = keys[visible, head // group] @ q[s, head] / math.sqrt(attn.head_dim)
            out[s, head] = scores.softmax(0) @ values[visible, head // group]
    output: Tensor = attn.o_proj(out.flatten(1))
    return output


@torch.no_grad()
def block_states(
    drafter: BlockDrafter, target: Target, text: list[int], every: bool = False
) -> Tensor:
    """[K, W] the normed states of the drafting slots, or of all, behind a text whose last token
    is not run.
    """
    features = target.features(torch.tensor([text[:-1]]), drafter.layers)
    context = drafter.hidden_norm(drafter.fc(features.fuse_layers(drafter.fused_layers)))[0]
    embed = drafter.head.embedding if drafter.embed_tokens is None else drafter.embed_tokens
    x: Tensor = embed(torch.tensor([text[-1], *[drafter.mask_token_id] * (drafter.block_size - 1)]))
    for layer in drafter.blocks:
        for norm, conv, part in (
            (
                layer.input_layernorm,
                "attention_conv",
                lambda y: compute_attention(drafter, layer, context, y, len(text) - 1),  # noqa: B023
            ),
            (layer.post_attention_layernorm, "mlp_conv", layer.mlp),
        ):
            normed, convolution = norm(x), getattr(layer, conv, None)  # type: ignore[operator]
            if convolution is None:
                x = x + part(normed)  # type: ignore[operator]
            else:
                x = x + apply_convolution(
                    convolution, part(apply_convolution(convolution, normed, normed, 0)), normed, 1
                )  # type: ignore[operator]
    states: Tensor = drafter.norm(x)[0 if every else drafter.first_draft_slot :]
    return states


def apply_convolution(convolution: Any, x: Tensor, normed: Tensor, side: int) -> Tensor:
    """[S, W] y_t = sum over taps of (base + delta_t) x_{t - tap}, one channel at a time."""
    slots, width = x.shape
    deltas = convolution.kernel_projection(normed).view(
        slots, 2, convolution.taps, width // convolution.group
    )
    out = torch.zeros_like(x)
    for t in range(slots):
        for tap in range(min(convolution.taps, t + 1)):
            kernel = convolution.base_kernel[side, tap] + deltas[t, side, tap].repeat_interleave(
                convolution.group
            )
            out[t] += kernel * x[t - tap]
    return out
