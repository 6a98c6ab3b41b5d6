"""A small model with a tokenizer of its own. Shapes: B batch, F frontier nodes, D width, V its
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from spectrain.drafters.layers.small_models import load_model_files, wrap_model
from spectrain.models.bundled import TINY_DIRECTORY, convert_smollm2
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.rollout import BranchVisibility, Rollout


class ModelRollout(Rollout):
    """A rollout of a small model, whose cache holds the committed tokens and the root.

    It begins with `root_log_q` [B, 1, V], log q after the root. `compute_log_q` returns log q [B,
    F, V] of final states [B, F, D].
    """

    def __init__(
        self,
        model: Target,
        cache: TreeCache,
        root_log_q: Tensor,
        compute_log_q: Callable[[Tensor], Tensor],
    ) -> None:
        self.model = model
        self.cache = cache
        self.root_log_q = root_log_q
        self.compute_log_q = compute_log_q
        self.branches = BranchVisibility(len(root_log_q), root_log_q.device)

    def start(self) -> Tensor:
        return self.root_log_q

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        depth, visible = self.branches.add_nodes(parents)
        positions = self.cache.lengths[:, None] - 1 + depth
        plan = ForwardPlan(layers=("final",), positions=positions, mask=visible, cache=self.cache)
        return self.compute_log_q(self.model.run(tokens, plan).at_layer("final"))


def load_foreign_model(name: str) -> Target:
    """Load a frozen model with its own tokenizer: one that ships (tiny, smollm2), a directory,
    or a name on the hub.
    """
    shipped: dict[str, Callable[[], Path]] = {
        "tiny": lambda: TINY_DIRECTORY,
        "smollm2": convert_smollm2,
    }
    path = str(shipped[name]()) if name in shipped else name
    return wrap_model(*load_model_files(path), path)
