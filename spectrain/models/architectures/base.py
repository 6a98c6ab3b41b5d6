"""The contract of an architecture: what a forward needs of it. Shapes: B batch, N tokens or nodes.

`standard.py` is the default. A kind of target that differs derives from it and overrides what
differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.attention import AttentionRange
from spectrain.models.cache_arguments import CACHE_ARGUMENTS
from spectrain.models.cache_types import KeyValueShape
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.model_parts import ModelParts
from spectrain.models.positions import TokenVisibility

from .probe import Probe


@dataclass
class ForwardCall:
    """A forward over tokens [B, N], with their positions and with what each of them sees."""

    parts: ModelParts
    plan: ForwardPlan
    tokens: Tensor
    positions: Tensor  # [B, N]
    # What the tokens see, images aside.
    visibility: TokenVisibility
    # The inputs of the decoder, where texts have images.
    image_inputs: dict[str, Any] | None = None
    # What the tokens see by layer, where image tokens see later ones.
    layer_visibility: list[TokenVisibility] = field(default_factory=list)

    @property
    def attention_visibility(self) -> TokenVisibility:
        """What the tokens see in attention layers, images included."""
        return self.layer_visibility[-1] if self.layer_visibility else self.visibility


@dataclass(frozen=True)
class LayerAttention:
    """The keys and values that an attention layer stores per token, and how far back it attends."""

    shape: KeyValueShape
    range: AttentionRange


@dataclass(frozen=True)
class Architecture(ABC):
    """What differs between targets, as one forward at load shows it. The defaults are those of
    ordinary layers.
    """

    # Name in transformers of the attention that computes for the layers.
    attention_name: ClassVar[str]
    # Whether layers keep a state, which committed tokens cannot be taken out of.
    keeps_state: ClassVar[bool] = False
    # Whether layers compute attention themselves, by masks that they are passed.
    attends_by_masks: ClassVar[bool] = False

    output_tuple_size: int = 0  # size of the tuple that a layer returns; 0 is a tensor
    has_single_stream: bool = True  # one residual stream enters each layer
    # Argument of the decoder for its cache: that of `CACHE_ARGUMENTS` which its signature has.
    # Where it has another name, an architecture overrides `from_probe`: return
    # super().from_probe(replace(probe, cache_argument="memory")).
    cache_argument: str = CACHE_ARGUMENTS[1]
    accepts_use_cache: bool = True  # False: with it, only a cache of its own class would do
    # cache indices by layer; None: one each
    attention_indices: tuple[tuple[int, ...], ...] | None = None
    # by attention layer, where shapes differ or not all layers attend
    kv_shapes: dict[int, KeyValueShape] | None = None
    # of layers that do not pass their own range
    attention_ranges: dict[int, AttentionRange] | None = None
    attention_layers: dict[int, LayerAttention] = field(default_factory=dict)  # by attention layer

    @classmethod
    @abstractmethod
    def matches(cls, probe: Probe) -> bool:
        """Tell whether a target whose forward was recorded is of this kind."""

    @classmethod
    @abstractmethod
    def from_probe(cls, probe: Probe) -> Architecture:
        """Build the architecture of a target of this kind; raise UserError where trees cannot be
        verified with it.
        """

    @abstractmethod
    def resolve_call(self, parts: ModelParts, tokens: Tensor, plan: ForwardPlan) -> ForwardCall:
        """Resolve a plan over tokens [B, N]: their positions, and what each of them sees."""

    @abstractmethod
    def decoder_arguments(self, call: ForwardCall) -> dict[str, Any]:
        """Return the arguments of the decoder: tokens, positions or embeddings, cache, and what
        attention needs.
        """

    @abstractmethod
    def forward_contexts(self, call: ForwardCall) -> Iterator[AbstractContextManager[Any]]:
        """Yield the contexts to enter around a forward, each after the one before it was
        entered.
        """

    @abstractmethod
    def capture_blocker(self, parts: ModelParts) -> str | None:
        """Return why rounds over the target cannot be captured as CUDA graphs, or None where
        they can.
        """

    @abstractmethod
    def set_attention(self, model: Any, implementation: str) -> None:
        """Make a model of this kind attend by an implementation that transformers has under this
        name.
        """

    def check_single_stream(self, name: str) -> None:
        """Raise UserError where a layer reads more than one state per token."""
        if not self.has_single_stream:
            raise UserError(
                f"target {name}: several residual streams run through its layers, so only its "
                "final features can be captured; use drafter.layers=[final] or a drafter without "
                "features"
            )

    def cache_slice_below(self, layer: int) -> slice:
        """Return the slice of cache layers that the layers before this one write."""
        indices = self.attention_indices
        return slice(0, layer if indices is None else sum(map(len, indices[:layer])))
