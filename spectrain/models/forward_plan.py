"""The plan of one forward of the target. Shapes: B batch, N tokens or nodes, D width."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from .cache_types import AttentionOptions
from .features import Layer
from .kv_cache import TreeCache

LayerAttentionFn = Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]
"""(queries, keys, values [B, H, N, ..] of a layer, its options) -> attention outputs [B, H, N,
..].
"""
SublayerKind = Literal["attention", "mlp"]
SUBLAYER_KINDS: tuple[SublayerKind, ...] = ("attention", "mlp")


class Sublayer(NamedTuple):
    """The attention or the feed-forward half of a layer."""

    layer: int
    kind: SublayerKind


SkippedLayer = int | Sublayer  # a layer by its index, or one half of it


def layer_index(skipped: SkippedLayer) -> int:
    return skipped.layer if isinstance(skipped, Sublayer) else skipped


@dataclass(frozen=True)
class LayerSpan:
    """The layers that run: `first` to `last` (excluded) without those `skipped`, and for which
    sequences.

    A skipped layer, or half of one, passes its input on. Layer l does the same for sequence b where
    `dropped` [layers, B] is True (in training, without cache and mask). Neither costs the work of
    the layer.
    """

    first: int = 0
    last: int | None = None  # None is the last layer
    # [B, N, D] what enters layer `first`, instead of the embedded tokens
    hidden: Tensor | None = None
    skipped: Collection[SkippedLayer] = ()
    dropped: Tensor | None = None

    def active_layers(self, num_layers: int) -> list[int]:
        """Return the layers that run, in order."""
        return [
            layer
            for layer in range(num_layers)[self.first : self.last]
            if layer not in self.skipped
        ]

    def attention_layers(self, num_layers: int) -> list[int]:
        """Return the active layers whose attention runs."""
        return [
            layer
            for layer in self.active_layers(num_layers)
            if Sublayer(layer, "attention") not in self.skipped
        ]


ALL_LAYERS = LayerSpan()


@dataclass(frozen=True)
class ForwardPlan:
    """One forward over tokens [B, N]: which features it returns, what each token sees, and which
    layers run.

    Without a cache, `mask` [B, N, N] says what each token sees. With a cache, it marks the appended
    nodes that each new node sees, [B, N, uncommitted + N]. None is causal. With `lengths`, the one
    row [1, N] holds packed documents that do not see each other: positions start anew in each,
    `span.dropped` is [layers, documents], and `mask` has one [1, n, n] per document.
    """

    # The features to return; "final" is the final norm of the layer that ran last.
    layers: tuple[Layer, ...] = ()
    logits: bool = False
    # Whether logits are in float32; else they have the output layer's type, where float32 would
    # hold the same numbers.
    upcast: bool = True
    grad: bool = False
    # Gradient checkpointing: layers that train run again in the backward pass.
    recompute: bool = False
    positions: Tensor | None = None  # [B, N]; None: in the order of the tokens
    mask: Tensor | tuple[Tensor, ...] | None = None
    cache: TreeCache | None = None
    lengths: tuple[int, ...] | None = None
    # Rows or documents as texts, where any has images.
    texts: Sequence[Sequence[int]] = ()
    span: LayerSpan = ALL_LAYERS
    # Computes the attention of every layer, as in training a drafter that runs the target's layers
    # over states of its own; called layer by layer. None: the target's own attention.
    attends: LayerAttentionFn | None = None

    def __post_init__(self) -> None:
        dropped = self.span.dropped is not None
        assert not dropped or (self.cache is None and self.mask is None), (
            "layers are dropped in training only"
        )
        assert self.lengths is None or self.cache is None, "documents are packed in training only"
        assert self.cache is None or not isinstance(self.mask, tuple), (
            "a mask for each document is for packed ones"
        )


DEFAULT_PLAN = ForwardPlan()
