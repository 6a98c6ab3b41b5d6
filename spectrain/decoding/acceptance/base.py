"""What every acceptance rule says and gives. Shapes: B batch, N nodes, V vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spectrain.errors import UserError
from spectrain.kernels.tree_verify import TreeNodes
from spectrain.models.features import Features, Layer
from spectrain.trees.token_tree import AcceptedPath, Children, TokenTree

Vector = Any  # [V] a distribution over the vocabulary: a tensor or, in a proof, a numpy array of fractions
DRAWN_CHILDREN: tuple[Children, ...] = ("sampled", "without_replacement")
ALL_CHILDREN: tuple[Children, ...] = ("deterministic", *DRAWN_CHILDREN, "top_and_sampled")
DESCRIPTION: dict[Children, str] = {
    "deterministic": "the likeliest ones, not drawn",
    "sampled": "drawn independently of each other",
    "without_replacement": "drawn without replacement",
    "top_and_sampled": "the likeliest ones and one that is drawn",
}


def make_nodes(tree: TokenTree) -> TreeNodes:
    """The tree as kernels take it."""
    most_children = tree.tokens.shape[1] - 1 if tree.max_children is None else tree.max_children
    return TreeNodes(tree.tokens, tree.parents, tree.valid & tree.can_emit, tree.max_path_nodes - 1, most_children)


@dataclass(frozen=True)
class Siblings:
    """Children of one node in the order they were chosen or drawn, and what they are judged by."""

    tokens: list[int]
    p: Vector  # the target's distribution after the node
    q: Vector  # what they, or the one of them that is, were drawn from; None where none was
    without_replacement: bool = False


class AcceptanceRule(ABC):
    """What every rule does: judge a tree by the target's logits."""

    name: str
    lossless: bool
    children: tuple[Children, ...] = ALL_CHILDREN  # how the children of a node may have been chosen
    chains_only = False
    on_device = False  # it judges without a host-device synchronisation
    is_random = False  # it draws tokens, by keys of seed, sequence and position
    is_unresolved = False  # it leaves to a measurement by which rule the target is sampled; until then it is sample-and-match
    layers: tuple[Layer, ...] = ()  # features of the target at every node that it reads beside the logits
    fixes_choice = False  # the target's token after a node does not depend on what was drafted, so drafting changes no token

    @abstractmethod
    def choose_tokens(self, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        """The target's own token [B, N] after nodes at `positions` [B, N] of the sequences `sequence_ids` [B]."""

    @abstractmethod
    def __call__(self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> AcceptedPath:
        """Judge a tree by `logits` [B, N, V]; a tree that the rule is not valid for is a UserError."""

    def accept(self, tree: TokenTree, features: Features, sequence_ids: Tensor, positions: Tensor) -> AcceptedPath:
        """Judge a tree by all that the target said at its nodes, of which most rules read the logits alone."""
        assert features.logits is not None
        return self(tree, features.logits, sequence_ids, positions)

    @abstractmethod
    def target_distribution(self, logits: Tensor) -> Tensor:
        """The target's distribution [..., V], in float64, that tokens are chosen from."""

    @abstractmethod
    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        """The chance of each sibling to be the one kept where their parent is, over the rule's own random outcomes.

        For rules that judge a path as a whole, `rate` is what `rate_after` gave along the path to the parent; averaged over
        what is drawn below, the chances are exact for the first child of every node on it.
        """

    def child_rate(self, p: Vector, q: Vector, token: int, rate: Any = 1) -> Any:
        """What the path to a node's first child says of its chance to be kept, the node's own being `rate`; 1 for rules that
        judge node by node."""
        return 1

    @property
    def sampling_settings(self) -> tuple[float, int, float, int] | None:
        """Temperature, top-k, top-p and seed of its draws, where it draws."""
        return None

    def matching_rule(self) -> AcceptanceRule:
        """The rule that gives each place of a sequence one fixed token of the same distribution: how decoding without a
        drafter draws, and what deterministic drafts are judged by."""
        return self

    def check_children(self, children: Children, is_chain: bool) -> None:
        """Raise where the rule would be wrong about such trees."""
        if children not in self.children:
            raise UserError(
                f"acceptance={self.name}: it weighs p against the q that a child was drawn from, and the children of this tree "
                f"are {DESCRIPTION[children]}; use tree.children={' or '.join(self.children)} with it, or acceptance=match"
            )
        if self.chains_only and not is_chain:
            raise UserError(
                f"acceptance={self.name}: it judges one path and this tree branches; use tree=chain or acceptance=recursive"
            )
