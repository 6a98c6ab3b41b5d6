"""CASCADE: nodes whose states are those of the right node count as right. Shapes: B batch, N
nodes, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.features import Features, Layer
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.shared.relaxed_rule import LossyGreedyRule


class InterchangeableStates(LossyGreedyRule):
    """Acceptance of interchangeable and of converging nodes (CASCADE). NOT lossless.

    A node is right where its token is the target's most likely one after its parent. A sibling of a
    right node is accepted too where its final state has a cosine of at least `similarity` with the
    right one's (interchangeable), or where within `horizon` further nodes each has a descendant, at
    the same depth, whose states are that similar (converging). The longest path of accepted nodes
    wins, of equal ones that with more right nodes. In chains nothing is forgiven: the right sibling
    is not verified there. At similarity above 1 the output is the greedy one.
    """

    name = "interchangeable"
    layers: tuple[Layer, ...] = ("final",)

    def __init__(
        self,
        # Cosine of two final states from which on their nodes are interchangeable; above 1 nothing
        # is forgiven.
        similarity: float = 0.95,
        # Number of further nodes within which two branches may converge; 0 compares the nodes
        # themselves alone.
        horizon: int = 1,
    ) -> None:
        if not similarity > 0 or horizon < 0:
            raise UserError(
                f"acceptance.similarity={similarity} horizon={horizon}: use more than 0, and 0 or "
                "more nodes"
            )
        super().__init__()
        self.similarity, self.horizon = similarity, horizon

    def accept(
        self, tree: TokenTree, features: Features, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        assert features.logits is not None
        if "final" not in features.layers:
            return self.greedy(tree, features.logits, sequence_ids, positions)
        choice = features.logits.argmax(-1)
        states = F.normalize(features.at_layer("final").float(), dim=-1)
        alike = states @ states.transpose(1, 2) >= self.similarity  # [B, N, N]
        paths = [
            self._select_path(*row)
            for row in zip(
                tree.tokens.tolist(),
                tree.parents.tolist(),
                (tree.valid & tree.can_emit).tolist(),
                choice.tolist(),
                alike.tolist(),
            )
        ]
        width = max(map(len, paths))
        padded = torch.tensor(
            [path + path[-1:] * (width - len(path)) for path in paths], device=choice.device
        )
        counts = torch.tensor([*map(len, paths)], device=choice.device)
        return AcceptedPath(padded, counts, choice.gather(1, padded[:, -1:])[:, 0])

    def _select_path(
        self,
        tokens: list[int],
        parents: list[int],
        real: list[bool],
        choice: list[int],
        alike: list[list[bool]],
    ) -> list[int]:
        """Return the longest path of accepted nodes of one tree."""
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents):
            if parent >= 0 and real[node]:
                children[parent].append(node)
        right = {
            node
            for node, parent in enumerate(parents)
            if parent >= 0 and tokens[node] == choice[parent]
        }
        # Best path below each node as (length, right nodes, path), from the leaves up.
        best: list[tuple[int, int, list[int]]] = [(1, 0, [node]) for node in range(len(tokens))]
        for node in reversed(range(len(tokens))):
            correct = next((child for child in children[node] if child in right), None)
            for child in children[node]:
                if child == correct or (
                    correct is not None and self._are_alike(child, correct, children, alike)
                ):
                    length, count, path = best[child]
                    best[node] = max(
                        best[node], (1 + length, count + (child == correct), [node, *path])
                    )
        return best[0][2]

    def _are_alike(
        self, node: int, other: int, children: list[list[int]], alike: list[list[bool]]
    ) -> bool:
        """Return whether two nodes, or descendants of both at one depth, have similar states."""
        level = [node]
        other_level = [other]
        for _ in range(self.horizon + 1):
            if any(alike[a][b] for a in level for b in other_level):
                return True
            level = [child for parent in level for child in children[parent]]
            other_level = [child for parent in other_level for child in children[parent]]
        return False
