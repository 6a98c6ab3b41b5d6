"""The contract of acceptance rules. Shapes: B batch, N nodes, V vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spectrain.errors import UserError
from spectrain.kernels.tree_walks import TreeNodes
from spectrain.models.features import Features, Layer
from spectrain.trees.token_tree import AcceptedPath, Children, TokenTree

# [V] a distribution over the vocabulary: a tensor or, in a proof, a numpy array of fractions
Vector = Any
DRAWN_CHILDREN: tuple[Children, ...] = ("sampled", "without_replacement")
ALL_CHILDREN: tuple[Children, ...] = ("deterministic", *DRAWN_CHILDREN, "top_and_sampled")
DESCRIPTION: dict[Children, str] = {
    "deterministic": "the most likely ones, not drawn",
    "sampled": "drawn independently of each other",
    "without_replacement": "drawn without replacement",
    "top_and_sampled": "the most likely ones and one that is drawn",
}


def describe_construction(rule: str) -> str:
    """Say why sampled output is the target's, and how a score shows it."""
    return (
        f"Rule {rule}: the output has the target's distribution by construction; the rule is "
        "tested statistically, and these answers were not checked. eval.check=distribution "
        "compares distributions on this model"
    )


def is_declared_lossless(lossless: Mapping[str, Any]) -> bool:
    """Tell from the entry `lossless` of a summary whether its rule is lossless by declaration."""
    return bool(lossless.get("declared", lossless.get("lossless", True)))


def make_nodes(tree: TokenTree) -> TreeNodes:
    """Make the nodes of a tree as kernels take them."""
    most_children = tree.tokens.shape[1] - 1 if tree.max_children is None else tree.max_children
    return TreeNodes(
        tree.tokens,
        tree.parents,
        tree.can_accept,
        tree.max_path_nodes - 1,
        most_children,
    )


@dataclass(frozen=True)
class Siblings:
    """Children of one node in the order in which they were chosen or drawn, with the
    distributions that decide about them.
    """

    tokens: list[int]
    p: Vector  # the target's distribution after the node
    q: Vector  # what they, or the one of them that is, were drawn from; None where none was
    without_replacement: bool = False


class AcceptanceRule(ABC):
    """Decides which path of a verified tree is accepted and which token follows it."""

    name: str
    lossless: bool
    children: tuple[Children, ...] = ALL_CHILDREN  # how the children of a node may have been chosen
    chains_only = False
    on_device = False  # it judges without a host-device synchronisation
    is_random = False  # it draws tokens, by keys of seed, sequence and position
    # it leaves to a measurement by which rule the target is sampled; until then it is
    # sample-and-match
    is_unresolved = False
    # features of the target at every node that it reads beside the logits
    layers: tuple[Layer, ...] = ()
    # the target's token after a node does not depend on what was drafted, so drafting changes no
    # token
    fixes_choice = False

    @abstractmethod
    def choose_tokens(self, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        """Choose the target's own token [B, N] after nodes at `positions` [B, N] of the
        sequences `sequence_ids` [B].
        """

    @abstractmethod
    def __call__(
        self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        """Accept a path of a tree by `logits` [B, N, V]. Raises a UserError for a tree that the
        rule is not valid for. A rule that draws reads the `positions` [B, N] that follow the nodes.
        """

    def accept(
        self, tree: TokenTree, features: Features, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        """Accept a path of a tree by the target's features at its nodes; most rules read the
        logits only.
        """
        assert features.logits is not None
        return self(tree, features.logits, sequence_ids, positions)

    @abstractmethod
    def target_distribution(self, logits: Tensor) -> Tensor:
        """Return the target's distribution [..., V], in float64, from which tokens are chosen."""

    @abstractmethod
    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        """Return the chance of each sibling to be accepted, given that its parent is, over the
        rule's random outcomes.

        For rules that decide on a path as a unit, `rate` is the result of `child_rate` along the
        path to the parent. Averaged over the draws below, the chances are exact for the first child
        of every node on it.
        """

    def child_rate(self, p: Vector, q: Vector, token: int, rate: Any = 1) -> Any:
        """Return the rate of a node's first child from the node's own `rate`; 1 for rules that
        decide node by node.
        """
        return 1

    @property
    def sampling_settings(self) -> tuple[float, int, float, int] | None:
        """Return temperature, top-k, top-p and seed of the draws; None for a rule that draws
        nothing.
        """
        return None

    def matching_rule(self) -> AcceptanceRule:
        """Return the rule that gives each position one fixed token of the same distribution.
        Decoding without a drafter uses it, and so do deterministic drafts."""
        return self

    def check_children(self, children: Children, is_chain: bool) -> None:
        """Raise a UserError where the rule is not valid for such trees."""
        if children not in self.children:
            raise UserError(
                f"acceptance={self.name}: it weighs p against the q that a child was drawn from, "
                f"and the children of this tree are {DESCRIPTION[children]}; use "
                f"tree.children={' or '.join(self.children)} with it, or acceptance=match"
            )
        if self.chains_only and not is_chain:
            raise UserError(
                f"acceptance={self.name}: it judges one path and this tree branches; use "
                "tree=chain or acceptance=recursive"
            )
