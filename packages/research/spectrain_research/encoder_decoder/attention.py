"""The attention of a decoder with an encoder: over its own tokens, where a tree may follow them,
and over the source.

The slots of the source's tokens in the cache are not seen by the decoder. Shapes: B batch, N
decoder tokens or nodes, S slots, E source positions, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from spectrain.kernels.fused_attention import fused_attention
from spectrain.models.kv_cache import TreeCache

ENCODER_DECODER = "spectrain_encoder_decoder"  # name in transformers


@dataclass
class DecoderCall:
    """One forward of the decoder, in which its layers attend."""

    query_positions: Tensor  # [B, N] positions of the tokens in the decoder's text
    key_positions: Tensor  # [B, S] positions of the keys there
    visible: Tensor  # [B or 1, 1, N, S] the keys that each token sees
    # [B, 1, 1, E] real positions of the source; None where all are real
    source_visible: Tensor | None
    cache: TreeCache | None = None
    # Writes the keys and values of the decoder's tokens to their slots, and returns those that are
    # attended to.
    store: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        self._biases: dict[nn.Module, Tensor] = {}
        self._bias_module: nn.Module | None = None

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, has_bias: bool
    ) -> Tensor:
        """Return the attention [B, H, N, D] of a layer to its own tokens, or to the source where
        its keys are the source's.
        """
        if not module.is_causal:
            return fused_attention(query, key, value, self.source_visible, scale=scale)
        if self.store is not None:
            key, value = self.store(module.layer_idx, key, value)
        mask = self.visible
        if has_bias:
            bias = self._position_bias(module)
            mask = bias.masked_fill(~self.visible, torch.finfo(bias.dtype).min)
        return fused_attention(query, key, value, mask, scale=scale)

    def _position_bias(self, module: Any) -> Tensor:
        """Return T5's bias [B, H, N, S] by the distance of positions; layers without a table of
        their own take the first's.
        """
        if module.has_relative_attention_bias:
            self._bias_module = module
        owner: Any = self._bias_module
        if owner not in self._biases:
            distance = self.key_positions[:, None] - self.query_positions[:, :, None]
            bucket = owner._relative_position_bucket(
                distance,
                bidirectional=False,
                num_buckets=owner.relative_attention_num_buckets,
                max_distance=owner.relative_attention_max_distance,
            )
            self._biases[owner] = owner.relative_attention_bias(bucket).permute(0, 3, 1, 2)
        return self._biases[owner]


_calls: list[DecoderCall] = []


@contextmanager
def run_decoder_call(call: DecoderCall) -> Iterator[None]:
    """Let the decoder's layers attend as this call says while the context is open."""
    _calls.append(call)
    try:
        yield
    finally:
        _calls.pop()


def attend_layer(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Any]:
    """Compute the attention of a layer: the decoder's by the open call, and the encoder's as
    transformers does.
    """
    if not _calls:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            position_bias=position_bias,
            **others,
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = _calls[-1].attend(module, query, key, value, scale, position_bias is not None)
    return attended.transpose(1, 2).contiguous(), None


def make_layer_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Answer a mask request: None for the decoder, whose masks are in the call, and
    transformers' own for the encoder.
    """
    return None if _calls else sdpa_mask(*args, **kwargs)


AttentionInterface.register(ENCODER_DECODER, attend_layer)
AttentionMaskInterface.register(ENCODER_DECODER, make_layer_mask)
