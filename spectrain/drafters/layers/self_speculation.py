"""The base of drafters that run a part of the target. Shapes: B batch, F frontier nodes, V
vocabulary, D target width.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities, Capture, DraftingCost
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.forward_plan import (
    SUBLAYER_KINDS,
    LayerSpan,
    SkippedLayer,
    Sublayer,
    layer_index,
)
from spectrain.models.head import Head
from spectrain.models.partial_forward import NodeLevel, PartialForward
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, Rollout


class SelfDraftingCost(DraftingCost):
    drafter: SelfDrafter

    def weights(self, target: Target) -> nn.Module:
        return self.drafter.drafting_layers(target)

    def first_verified_layer(self) -> int:
        return min((self.drafter.exit_layer, *map(layer_index, self.drafter.skipped)))


class SelfDrafter(Drafter):
    """Drafts with the target without some of its layers, in the target's own cache, and verifies
    from the first skipped layer.

    A round with a chain of d drafts calls every layer before the first skipped one d + 1 times over
    one node, and every other drafting layer d times. Verification is one call over d + 1 nodes of
    the layers from the first skipped one on.
    """

    # A draft step runs the layers before this one.
    exit_layer: int
    # Layers, or sublayers of them, that a draft step skips.
    skipped: Collection[SkippedLayer] = ()
    head: Head
    capabilities = Capabilities(
        capture=Capture(needs_all_drafts=True), nestable=False, cost=SelfDraftingCost
    )

    def draft(self, context: Context) -> Draft:
        context.partial = PartialForward(
            context.target, context.cache, self.exit_layer, self.skipped, context.layers
        )
        return Draft(SelfRollout(self, context.partial, context.root))

    def log_q(self, level: NodeLevel) -> Tensor:
        """Compute log q [B, F, V] after nodes: by default by the target's norm and head on the
        last drafting layer's output.
        """
        return self.head.logits(level.features.at_layer("final")).log_softmax(-1)

    def drafting_layers(self, target: Target) -> nn.Module:
        """Return the modules whose weights a draft step reads."""
        layers = []
        for index in LayerSpan(last=self.exit_layer, skipped=self.skipped).active_layers(
            target.num_layers
        ):
            sublayers = [
                kind for kind in SUBLAYER_KINDS if Sublayer(index, kind) not in self.skipped
            ]
            modules = (
                [target.get_sublayer(index, kind) for kind in sublayers]
                if len(sublayers) < len(SUBLAYER_KINDS)
                else [target.layers[index]]
            )
            layers += modules
        return nn.ModuleList([*layers, self.head.output, *self.children()])


class SelfRollout(Rollout):
    """A rollout that runs every node through the drafting layers once."""

    def __init__(self, drafter: SelfDrafter, partial: PartialForward, root: Tensor) -> None:
        self.drafter, self.partial, self.root = drafter, partial, root

    def start(self) -> Tensor:
        return self.drafter.log_q(self.partial.run_root(self.root))

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.drafter.log_q(self.partial.run_children(tokens, parents))


def resolve_exit_layer(target: Target, exit_layer: int | None, share: float) -> int:
    """Return the given exit layer, or by default the one after this share of the layers; raise
    `UserError` if it is invalid.
    """
    if target.num_layers < 2:
        raise UserError(
            f"drafter.exit_layer: {target.name} has one layer, so no part of it can draft"
        )
    if exit_layer is None:
        return max(1, round(share * target.num_layers))
    if not 1 <= exit_layer < target.num_layers:
        raise UserError(
            f"drafter.exit_layer={exit_layer}: {target.name} has {target.num_layers} layers; use "
            f"1 to {target.num_layers - 1}"
        )
    return exit_layer
