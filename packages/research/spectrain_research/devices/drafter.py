"""A drafter on another device than its target (Dovetail, Zhang et al., 2024, arXiv 2412.18934).

Shapes: B batch, P new positions, F frontier nodes, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.inner_drafters import DrafterWrapper, wrapper_capabilities
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.kv_cache import TreeCache
from spectrain.models.loading import check_device
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import AcceptedPath
from spectrain_research.shared.nested_rollout import NestedRollout
from spectrain_research.shared.nesting import build_nestable
from spectrain_research.shared.on_policy import find_on_policy


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; nothing else of this module crosses devices."""
    return tensor.to(device, copy=True)


class OtherDevice(DrafterWrapper):
    """Drafts with `inner` on `device`, while the target stays where it is.

    New tokens and features go to the drafter's device once per round, and log q comes back once per
    draft step. An inner drafter that reads the target's embedding or output layer gets a copy of
    these on its device. Training is unchanged.
    """

    saved = SavedFiles(inner=("inner",))

    def __init__(
        self,
        target: Target,
        # Drafter to place: a run folder, a drafter directory, or a choice, alone or with settings.
        inner: str | dict[str, Any] = "causal",
        # Device of the drafter, such as cuda:0 or cpu.
        device: str = "cpu",
    ) -> None:
        super().__init__()
        try:
            self.device = torch.device(device)
        except RuntimeError as error:
            raise UserError(
                f"drafter.device={device}: there is no such device; use cpu or cuda:0"
            ) from error
        if self.device.type != "meta":
            check_device(str(self.device))
        self.inner, description = build_nestable(inner, "inner", target)
        self.layers = self.inner.layers
        self.saved = replace(self.saved, settings={"inner": description})
        self.capabilities = wrapper_capabilities(self.inner)
        self.cache: TreeCache | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OtherDevice:
        """Follow a change of type, and keep the drafter on its device."""
        super()._apply(fn, recurse)
        self.place_inner()
        return self

    def place_inner(self) -> None:
        """Move the inner drafter to its device, with copies of the layers that it borrows of the
        target.
        """
        nn.Module._apply(self.inner, lambda tensor: tensor.to(self.device))
        for module in self.inner.modules():
            if isinstance(module, Drafter) and "head" in vars(module):
                module.head = copy_head(vars(module)["head"], self.device)

    def draft(self, context: Context) -> Draft:
        own = self.copy_context(context)
        draft = self.inner.draft(own)
        if draft.rollout is None:
            return draft
        return replace(
            draft, rollout=CopiedRollout(draft.rollout, self.device, context.tokens.device)
        )

    def copy_context(self, context: Context) -> Context:
        """Return the context on the drafter's device. Its cache has the target's lengths and no
        keys.
        """
        device = self.device
        if (
            context.round == 0
            or self.cache is None
            or self.cache.max_length != context.cache.max_length
        ):
            self.cache = TreeCache(0, len(context.num_new), context.cache.max_length, device)
        self.cache.lengths = copy_to_device(context.cache.lengths, device)
        self.cache.longest = context.cache.longest
        features = context.new_features
        new = Features(
            copy_to_device(features.tokens, device),
            features.layers,
            copy_to_device(features.hidden, device),
        )
        moved: dict[str, Any] = {
            name: copy_to_device(getattr(context, name), device)
            for name in ("tokens", "sequence_ids", "num_new", "active", "tokens_left", "stops")
        }
        return replace(context, cache=self.cache, new_features=new, **moved)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        path, counts, bonus = (
            copy_to_device(part, self.device)
            for part in (accepted.path, accepted.counts, accepted.bonus)
        )
        self.inner.commit(
            self.copy_context(context), replace(accepted, path=path, counts=counts, bonus=bonus)
        )


find_on_policy.register(OtherDevice, lambda drafter: None)


def copy_head(head: Any, device: torch.device) -> Any:
    """Return the target's head, or on another device one with copies of its embedding and output
    layer.
    """
    if head.output.weight.device == device:
        return head
    other = copy(head)
    other.embedding = deepcopy(head.embedding).to(device)
    other.output = deepcopy(head.output).to(device)
    return other


class CopiedRollout(NestedRollout):
    """A rollout on another device, whose inputs and results are copied."""

    def __init__(self, inner: Rollout, device: torch.device, home: torch.device) -> None:
        super().__init__(inner)
        self.device, self.home = device, home
        self.draft_ids = None if inner.draft_ids is None else copy_to_device(inner.draft_ids, home)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return super().extend(
            copy_to_device(tokens, self.device), copy_to_device(parents, self.device)
        )

    def extend_path(self, tokens: Tensor, parents: Tensor, num_given: int) -> Tensor:
        copies = copy_to_device(tokens, self.device), copy_to_device(parents, self.device)
        return super().extend_path(*copies, num_given)

    def take_estimates(self, log_q: Tensor) -> Tensor:
        super().take_estimates(log_q)
        probs = self.accept_probs
        stops = self.stop_mask
        self.accept_probs = None if probs is None else copy_to_device(probs, self.home)
        self.stop_mask = None if stops is None else copy_to_device(stops, self.home)
        return copy_to_device(log_q, self.home)
