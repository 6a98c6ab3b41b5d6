"""The steps of an EAGLE drafter of one layer: by compiled kernels where they serve, else in few
calls of torch. Shapes: B batch, F nodes, D width, V draft vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from spectrain.models.kv_cache import TreeCache

from . import fused_eagle
from .available import has_drafting_kernels

if TYPE_CHECKING:
    from .compiled_eagle import CompiledEagle

MAX_READ = 64
"""Tokens that are read by kernels at most: products of more rows are faster by libraries."""
_compiled: WeakKeyDictionary[Any, CompiledEagle] = WeakKeyDictionary()


def find_steps(drafter: Any) -> EagleSteps | None:
    """Return the steps of a drafter without variants on packed linears, outside of training."""
    return EagleSteps(drafter) if fused_eagle.uses_fused_cpu(drafter) else None


def find_compiled(drafter: Any) -> CompiledEagle | None:
    """Return the compiled layer of a drafter outside of training, or None where kernels do not
    compute it.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    compiled = _compiled.get(drafter)
    if compiled is not None and compiled.is_current():
        return compiled
    _compiled.pop(drafter, None)
    if not has_drafting_kernels() or not fused_eagle.uses_fused_cpu(drafter):
        return None
    # Kernels can run here, so Numba is imported.
    from .compiled_eagle import CompiledEagle

    if not CompiledEagle.supports(drafter):
        return None
    compiled = _compiled[drafter] = CompiledEagle(drafter)
    return compiled


class EagleSteps:
    """The steps of one drafter (`accelerator.DrafterSteps`)."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter

    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: TreeCache,
        visible: Tensor | None,
    ) -> Tensor:
        """Compute `EagleDrafter.run`: [B, F, D]."""
        is_short = visible is None and tokens.shape[1] <= MAX_READ
        compiled = find_compiled(self.drafter) if is_short else None
        if compiled is not None and compiled.can_run(cache):
            return compiled.read_tokens(tokens, hidden, cache)
        return fused_eagle.run_layer(self.drafter, tokens, hidden, positions, cache, visible)

    def log_q(self, hidden: Tensor) -> Tensor:
        """Compute `EagleDrafter.log_q`: [B, F, V]."""
        return fused_eagle.log_q(self.drafter, hidden)

    def start_rollout(self, cache: TreeCache, root: Tensor, capacity: int) -> Any | None:
        """Return a rollout by kernels from the root's state [1, 1, D], with room for `capacity`
        nodes below it; None where they do not serve.
        """
        compiled = find_compiled(self.drafter)
        if compiled is None or not compiled.can_run(cache):
            return None
        return compiled.start_rollout(cache, root, capacity, self.drafter.draft_ids)

    def warm_up(self) -> None:
        """Run every kernel once."""
        compiled = find_compiled(self.drafter)
        if compiled is not None:
            compiled.warm_up()
