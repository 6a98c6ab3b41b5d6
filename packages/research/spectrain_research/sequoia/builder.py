"""Sequoia: the best static tree of a size, found by dynamic programming over measured
acceptance.
"""

from __future__ import annotations

import numpy as np

from spectrain.trees.fixed import NodePath, Static
from spectrain.trees.measurements import Calibration
from spectrain.trees.token_tree import Children


class Sequoia(Static):
    """Sequoia (Chen et al., 2024, section 4.1): the best tree of a given size, by dynamic
    programming.

    p_j is the measured probability that the j-th child is accepted, pooled over depths. T[m][l][b],
    the expected tokens of the best tree of m nodes and at most l levels whose root has b children,
    is max over y of T[y][l][b-1] + p_b T[m-y][l-1]. With `measured` the size and depth are also
    chosen, by the measured time of drafting l - 1 levels and verifying m nodes.
    """

    name = "sequoia"

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 5,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 16,
        # How the children of a node are chosen: deterministic, sampled, without_replacement or
        # top_and_sampled; acceptance rules depend on it.
        children: Children = "deterministic",
        # Temperature of the distribution that sampled children are drawn from.
        temperature: float = 1.0,
        # Seed of the random draws of children.
        seed: int = 0,
        # Whether size and depth are also chosen, within budget and depth, by the measured times of
        # drafting and verifying.
        measured: bool = False,
    ) -> None:
        super().__init__(depth, budget, None, children, temperature, seed)
        self.measured = measured
        self.requirements = ("hits", "latency") if measured else ("hits",)

    def search_paths(self, calibration: Calibration) -> list[NodePath]:
        chances = calibration.pooled_hits
        if not self.measured:
            return sequoia_paths(chances, self.budget, self.depth + 1)
        latency = calibration.latency
        assert latency is not None
        sizes = [
            (nodes, levels)
            for nodes in range(2, self.budget + 1)
            for levels in range(2, self.depth + 2)
        ]
        table = sequoia_table(chances, self.budget, self.depth + 1)

        def seconds_a_token(size: tuple[int, int]) -> float:
            nodes, levels = size
            tokens = table[nodes, levels].max()
            seconds = latency.estimate_verify(nodes) + latency.estimate_levels(levels - 1)
            return (latency.estimate_draft(levels - 1, max(1, nodes // levels)) + seconds) / max(
                float(tokens), 1e-9
            )

        return sequoia_paths(chances, *min(sizes, key=seconds_a_token))


def sequoia_table(chances: list[float], nodes: int, levels: int) -> np.ndarray:
    """Compute T [nodes + 1, levels + 1, children + 1]; impossible trees are -inf."""
    chances = [max(chance, 1e-9) for chance in chances]  # 0 times -inf would be NaN
    table = np.full((nodes + 1, levels + 1, len(chances) + 1), -np.inf)
    table[1, 1:, 0] = 1
    for size in range(2, nodes + 1):
        for level in range(2, levels + 1):
            below = table[1:size, level - 1].max(-1)[::-1]  # of size - y nodes, y from 1
            for child, chance in enumerate(chances, 1):
                table[size, level, child] = (table[1:size, level, child - 1] + chance * below).max()
    return table


def sequoia_paths(chances: list[float], nodes: int, levels: int) -> list[NodePath]:
    """Return the paths of the best tree of at most `nodes` nodes and `levels` levels, the root
    included.
    """
    chances = [max(chance, 1e-9) for chance in chances]
    table = sequoia_table(chances, nodes, levels)
    paths: list[NodePath] = []

    def build(root: NodePath, size: int, level: int, child: int) -> None:
        if child == 0:
            return
        below = table[1:size, level - 1].max(-1)[::-1]
        split = 1 + int((table[1:size, level, child - 1] + chances[child - 1] * below).argmax())
        paths.append((*root, child - 1))
        build(
            (*root, child - 1),
            size - split,
            level - 1,
            int(table[size - split, level - 1].argmax()),
        )
        build(root, split, level, child - 1)

    largest = int(np.isfinite(table[:, levels].max(-1)).nonzero()[0].max())
    build((), largest, levels, int(table[largest, levels].argmax()))
    return paths
