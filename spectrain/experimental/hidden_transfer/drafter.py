"""Hidden Transfer and Speculative Streaming: masks whose states are made inside the frozen target.

Shapes: B batch, K masks, D target width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from spectrain.config.values import Count
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.layers.gated_masks import GatedMasks, MaskConfig

from .transfer import StateTransfer, resolve_transfer_layer, transfer_states

if TYPE_CHECKING:
    from spectrain.models.target import Target


@dataclass(frozen=True, kw_only=True)
class TransferConfig(MaskConfig):
    """Settings of masks with transferred states."""

    # Layer of the target at which the masks' states are created; null uses the middle layer.
    transfer_layer: Count | None = None


class TransferDrafter(GatedMasks):
    """Masks without an embedding: `transfer` computes their states at `transfer_layer` from the newest token's state there.

    Earlier layers run at the masks without effect, so LoRA is in the later ones.
    """

    saved = SavedFiles(shape=("num_masks", "rank", "alpha", "sampler", "transfer_layer"))
    transfer: StateTransfer
    has_stream_vectors: bool

    def __init__(self, target: Target, config: TransferConfig) -> None:
        self.transfer_layer = resolve_transfer_layer(target, config.transfer_layer)
        super().__init__(target, config, self.transfer_layer)
        self.adapts_layers = True

    def add_inputs(self, target: Target) -> None:
        self.transfer = StateTransfer(target.width, self.num_masks, self.has_stream_vectors)

    def insert_states(self, target: Target, mask_index: Tensor, hosts: Tensor, rows: Tensor) -> AbstractContextManager[None]:
        return transfer_states(target, self.transfer_layer, self.transfer, mask_index, hosts, rows)


class HiddenTransfer(TransferDrafter):
    """Hidden Transfer (Wu et al., 2024, arXiv 2404.12022): a map for each mask."""

    has_stream_vectors = False


class SpeculativeStreaming(TransferDrafter):
    """Speculative Streaming (Bhendawade et al., 2024, arXiv 2402.11131), whose target stays frozen here: one map for all
    streams, and a vector for each."""

    has_stream_vectors = True
