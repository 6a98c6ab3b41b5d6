"""Trees whose shape is fixed before decoding, by settings or by search. Shapes: B batch, V draft
vocabulary.

A shape is a list of paths: (0, 2) is the third choice below the first choice below the root.
"""

from __future__ import annotations

import heapq
from copy import copy

import torch

from spectrain.errors import UserError

from .base import Prefix, TreeBuilder, TreeTraits, check_settings
from .growing import GrowingTree
from .measurements import Calibration
from .rollout import Rollout
from .token_tree import Children, TokenTree

NodePath = tuple[int, ...]


class Static(TreeBuilder):
    """Medusa's static sparse tree (Cai et al., 2024, section 3.3.3): the nodes most likely to be
    accepted, chosen once.

    The probability of a node is the product of the measured acceptance of its choices, a_d^(i) at
    depth d for the i-th choice. Without `paths` the tree is searched when the builder is prepared.
    """

    name = "static"
    traits = TreeTraits(verifies_all=True, is_fixed=True)

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 5,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 16,
        # Paths of the tree as lists of choices, such as [0, 2] for the third choice below the
        # first; null searches them by measured acceptance.
        paths: list[list[int]] | None = None,
        # How the children of a node are chosen: deterministic, sampled, without_replacement or
        # top_and_sampled; acceptance rules depend on it.
        children: Children = "deterministic",
        # Temperature of the distribution that sampled children are drawn from.
        temperature: float = 1.0,
        # Seed of the random draws of children.
        seed: int = 0,
    ) -> None:
        self.depth = depth
        self.budget = budget
        self.children = children
        self.temperature = temperature
        self.seed = seed
        check_settings(self, depth=(depth, 1), budget=(budget, 2))
        self.max_drafted = budget
        self.paths: list[NodePath] = []
        # by vocabulary, depth and device
        self.levels_by_shape: dict[tuple[int, int, torch.device], list[TreeLevel]] = {}
        if paths is not None:
            self._set_paths([tuple(path) for path in paths])
        self.requirements = () if self.paths else ("hits",)

    def _set_paths(self, paths: list[NodePath]) -> None:
        if not paths:
            raise UserError(
                "tree.paths: there is none; give at least [[0]], or null to search for them"
            )
        all_paths = {(), *paths}
        for path in paths:
            misses_sibling = (
                path
                and path[-1] > 0
                and self.children != "deterministic"
                and (*path[:-1], path[-1] - 1) not in all_paths
            )
            if not path or min(path) < 0 or path[:-1] not in all_paths or misses_sibling:
                raise UserError(
                    f"tree.paths: {list(path)} has a parent or, where children are drawn, an "
                    "earlier sibling that is not a path itself; add it, or leave the path out"
                )
        self.paths = sorted(all_paths - {()}, key=lambda path: (len(path), path))
        self.depth = max((len(path) for path in self.paths), default=1)
        self.levels_by_shape = {}
        self.budget = len(self.paths) + 1
        self.max_drafted = len({path[:-1] for path in self.paths}) - 1

    def sampled_variant(self, temperature: float) -> Static | None:
        if not self.requirements and any(
            path[-1] and (*path[:-1], path[-1] - 1) not in self.paths for path in self.paths
        ):
            return None  # the paths omit an earlier sibling
        other = copy(self)
        other.children = "without_replacement"
        other.temperature = temperature
        other.levels_by_shape = {}
        return other

    def prepare(self, calibration: Calibration) -> None:
        if "hits" in self.requirements:
            self._set_paths(self.search_paths(calibration))

    def search_paths(self, calibration: Calibration) -> list[NodePath]:
        """Return the `budget` - 1 most probable paths; a sibling enters after those before it."""
        hits = calibration.hits[: self.depth]  # limited by the drafter's depth
        paths: list[NodePath] = []
        heap: list[tuple[float, NodePath]] = [(-hits[0][0], (0,))]
        while heap and len(paths) + 1 < self.budget:
            value, path = heapq.heappop(heap)
            paths.append(path)
            rates = hits[len(path) - 1]
            if path[-1] + 1 < len(rates) and rates[path[-1]] > 0:
                heapq.heappush(
                    heap,
                    (value / rates[path[-1]] * rates[path[-1] + 1], (*path[:-1], path[-1] + 1)),
                )
            if len(path) < len(hits):
                heapq.heappush(heap, (value * hits[len(path)][0], (*path, 0)))
        return paths

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        if not self.paths:
            raise UserError(
                f"tree={self.name}: its shape is not searched yet; call prepare with a "
                "Calibration, or give tree.paths"
            )
        tree = GrowingTree(self, prefix, rollout)
        batch = prefix.root.shape[0]
        device = prefix.root.device
        keep = [torch.zeros(1, dtype=torch.int64, device=device)]
        shape_key = tree.outputs.shape[-1], rollout.limit_depth(self.depth), device
        # built in an uncaptured round: it copies from the host
        if shape_key not in self.levels_by_shape:
            self.levels_by_shape[shape_key] = _plan_levels(self.paths, *shape_key)
        for width, nodes, inner, counts in self.levels_by_shape[shape_key]:
            tree.add_children(width, counts=counts)
            keep.append(tree.level_start + nodes)
            if len(inner):
                tree.extend_frontier(inner.expand(batch, -1))
        return tree.select_nodes(torch.cat(keep).expand(batch, -1))

    def report_settings(self) -> dict[str, object]:
        return {**super().report_settings(), "paths": [list(path) for path in self.paths]}


TreeLevel = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]
"""Children drawn per frontier node, which of them are in the tree, which of these have children,
and how many each node has.
"""


def _plan_levels(
    paths: list[NodePath], vocab_size: int, depth: int, device: torch.device
) -> list[TreeLevel]:
    """Plan the levels of a tree; paths beyond the draft vocabulary or the drafter's depth are
    omitted.
    """
    possible = [path for path in paths if max(path) < vocab_size and len(path) <= depth]
    levels = []
    frontier: list[NodePath] = [()]
    while frontier:
        parents = {path: index for index, path in enumerate(frontier)}
        nodes = [path for path in possible if path[:-1] in parents]
        if not nodes:
            break
        width = max(path[-1] for path in nodes) + 1
        index = {path: parents[path[:-1]] * width + path[-1] for path in nodes}
        counts = [sum(path[:-1] == parent for path in nodes) for parent in frontier]
        frontier = [path for path in nodes if any(other[:-1] == path for other in possible)]
        selected, inner, of_each = (
            torch.tensor(numbers, dtype=torch.int64, device=device)
            for numbers in (
                sorted(index.values()),
                sorted(index[path] for path in frontier),
                counts,
            )
        )
        levels.append((width, selected, inner, of_each))
    return levels
