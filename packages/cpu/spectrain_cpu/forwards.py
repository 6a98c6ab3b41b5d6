"""Which modules of a decoder run in few calls, and by which forwards. N nodes, B texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from spectrain.models.fast import has_batch_invariance
from spectrain.models.forward_override import Forward

from .blockers import (
    AttentionFunction,
    find_call_blocker,
    find_decoder_blocker,
    find_fusion_blocker,
    find_layer_blocker,
)
from .fused_layers import CachedRotation, FusedLayer

if TYPE_CHECKING:
    from .compiled_decoder import CompiledDecoder

_decoders: WeakKeyDictionary[nn.Module, CompiledDecoder] = WeakKeyDictionary()


def fuse_forwards(
    decoder: nn.Module,
    layers: nn.ModuleList,
    attend: AttentionFunction,
    tokens: Tensor | None,
    arguments: dict[str, Any],
) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield the decoder with its compiled forward where that serves tokens [B, N] with these
    arguments of attention, else the layers that can be fused, each with its fused forward. Without
    `tokens` not all layers run, or on other inputs."""
    compiled = None
    if tokens is not None and find_call_blocker(arguments) is None:
        compiled = find_compiled(decoder, layers, attend)
    if compiled is not None:
        yield decoder, compiled
    else:
        yield from fuse_layers(layers, attend)


def runs_rows_alone(decoder: Any, layers: nn.ModuleList, attend: AttentionFunction) -> bool:
    """Return whether kernels run a whole decoder, and give a row the same bits whatever the other
    rows and the number of threads are: in bfloat16. Linears of float32 sum in another order on
    several threads."""
    is_half = next(decoder.parameters()).dtype == torch.bfloat16
    return is_half and has_batch_invariance() and find_compiled(decoder, layers, attend) is not None


def find_compiled(
    decoder: Any, layers: nn.ModuleList, attend: AttentionFunction
) -> CompiledDecoder | None:
    """Return the compiled forward of a decoder, or None where kernels do not compute it
    (`find_decoder_blocker`).
    """
    compiled = _decoders.get(decoder)
    if compiled is not None and compiled.is_current(attend):
        return compiled
    _decoders.pop(decoder, None)
    if find_decoder_blocker(decoder, layers, attend) is not None:
        return None
    # Kernels can run here, so Numba is imported.
    from .compiled_decoder import CompiledDecoder

    compiled = _decoders[decoder] = CompiledDecoder(decoder, attend)
    return compiled


def fuse_layers(
    layers: Iterable[nn.Module], attend: AttentionFunction
) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield the layers that can be fused, each with its fused forward: those on packed linears,
    without hooks inside. They attend by `attend`, where their configuration chooses its
    implementation."""
    rotation = CachedRotation()
    for layer in layers:
        if find_fusion_blocker(layer, attend) is None:
            yield layer, _fuse_layer(layer, rotation, attend)


def _fuse_layer(layer: nn.Module, rotation: CachedRotation, attend: AttentionFunction) -> Forward:
    if find_layer_blocker(layer, attend) is not None:
        return FusedLayer(layer, rotation, attend)
    from .compiled_layers import CompiledLayer

    return CompiledLayer(layer, rotation, attend)
