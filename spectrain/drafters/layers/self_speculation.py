"""Families that draft with a part of the target itself. Shapes: B batch, F frontier nodes, V vocabulary, D target width."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import Tensor, nn

from spectrain.drafters.abilities import Abilities, Capture, DraftingCost
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.forward_plan import SUBLAYER_KINDS, LayerSpan, SkippedLayer, Sublayer, layer_index
from spectrain.models.partial_forward import NodeLevel, PartialForward
from spectrain.trees.base import Draft, Rollout

if TYPE_CHECKING:
    from spectrain.models.head import Head
    from spectrain.models.target import Target


class SelfDrafter(Drafter):
    """Runs the target without some of its layers to draft, in the target's own cache, and verifies from the first of them.

    A round with a chain of d drafts calls every layer below that one d + 1 times, over one node each, and every other layer
    that drafts d times for drafting; verifying is one call over d + 1 nodes of the layers from there on.
    """

    exit_layer: int  # layers that a draft step runs lie before it
    skipped: Collection[SkippedLayer] = ()  # but not these, or halves of them
    head: Head
    abilities = Abilities(capture=Capture(keeps_drafts=True), plain=False)
    cost = DraftingCost(
        weights=lambda drafter, target: drafter.drafting_layers(target),
        verified_from=lambda drafter: min((drafter.exit_layer, *map(layer_index, drafter.skipped))),
    )

    def draft(self, context: Context) -> Draft:
        context.partial = PartialForward(context.target, context.cache, self.exit_layer, self.skipped, context.layers)
        return Draft(SelfRollout(self, context.partial, context.root))

    def log_q(self, level: NodeLevel) -> Tensor:
        """[B, F, V] what is drafted after nodes: here the target's own head, on the final norm of the last layer run."""
        return self.head.logits(level.features.at_layer("final")).log_softmax(-1)

    def drafting_layers(self, target: Target) -> nn.Module:
        """What a draft step reads."""
        layers = []
        for index in LayerSpan(last=self.exit_layer, skipped=self.skipped).active_layers(target.num_layers):
            left = [part for part in SUBLAYER_KINDS if Sublayer(index, part) not in self.skipped]
            halves = (
                [target.get_sublayer(index, part) for part in left]
                if len(left) < len(SUBLAYER_KINDS)
                else [target.layers[index]]
            )
            layers += halves
        return nn.ModuleList([*layers, self.head.output, *self.children()])


class SelfRollout(Rollout):
    """One round: every node goes through the drafting layers once."""

    def __init__(self, drafter: SelfDrafter, partial: PartialForward, root: Tensor) -> None:
        self.drafter, self.partial, self.root = drafter, partial, root

    def start(self) -> Tensor:
        return self.drafter.log_q(self.partial.run_root(self.root))

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.drafter.log_q(self.partial.run_children(tokens, parents))


def resolve_exit_layer(target: Target, exit_layer: int | None, share: float) -> int:
    """The exit that was asked for, or one behind this share of the layers."""
    if target.num_layers < 2:
        raise UserError(f"drafter.exit_layer: {target.name} has one layer, so no part of it can draft")
    if exit_layer is None:
        return max(1, round(share * target.num_layers))
    if not 1 <= exit_layer < target.num_layers:
        raise UserError(
            f"drafter.exit_layer={exit_layer}: {target.name} has {target.num_layers} layers; use 1 to {target.num_layers - 1}"
        )
    return exit_layer
