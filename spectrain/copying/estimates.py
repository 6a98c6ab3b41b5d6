"""Copies of several sources, and the acceptance probabilities that are learned for them.

Shapes: P occurrences, S sources or estimates, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import NamedTuple

import numpy as np

from .merging import MergedCopies, merge_continuations_reference
from .occurrences import Copies
from .trie import Trie

# Smallest share of a copied node, as a multiple of 1 / budget: rarer nodes are seldom accepted, and
# hundreds of them cost 1 ms.
MIN_SHARE = 0.5
SOURCES = ("context", "store", "drafter")
# The class of a match by the number of its tokens; the last class holds all longer matches.
LENGTH_CLASSES = np.array([0, 1, 2, 3, 4, 4, 5, 5, 5, 6])
# Numbers of classes of an estimate, by source, match length, share of the occurrences, and their
# count up to 3.
CLASS_SHAPE = (len(SOURCES), 7, 9, 4)


Merge = Callable[[np.ndarray, np.ndarray, np.ndarray, int, float], MergedCopies]
"""A function that computes `merge_continuations_reference`."""


class SourceEstimates(NamedTuple):
    """The sources' own estimates [S] that tokens are accepted, before calibration."""

    classes: np.ndarray  # flat index into CLASS_SHAPE, by which outcomes are counted
    estimates: np.ndarray  # uncalibrated acceptance probabilities

    @classmethod
    def from_counts(
        cls, source: np.ndarray | int, length: np.ndarray, share: np.ndarray, count: np.ndarray
    ) -> SourceEstimates:
        """Estimate from the source, the match length (0 for a drafter), the share of the source's
        continuations, and their number."""
        share_classes = np.where(
            share > 0.97,
            0,
            1 + np.minimum(7, (-1.5 * np.log2(np.maximum(share, 1e-3))).astype(np.int64)),
        )
        length_classes = LENGTH_CLASSES[np.minimum(length, len(LENGTH_CLASSES) - 1)]
        count_classes = np.minimum(count, CLASS_SHAPE[3] - 1)
        classes = (
            (source * CLASS_SHAPE[1] + length_classes) * CLASS_SHAPE[2] + share_classes
        ) * CLASS_SHAPE[3] + count_classes
        return cls(classes, 0.02 + 0.9 * share * np.where(length > 0, length / (length + 1), 1.0))


class AcceptanceEstimator:
    """Learns acceptance probabilities per class of estimates during decoding.

    The probability of a class is the share of its tokens that were accepted. It starts as the
    source's own estimate, which weighs as much as `prior` observations. Where sources agree on a
    token, the highest probability counts.
    """

    def __init__(self, prior: float = 4.0) -> None:
        self.prior = prior
        self.hits = np.zeros(CLASS_SHAPE, dtype=np.int64)
        self.trials = np.zeros(CLASS_SHAPE, dtype=np.int64)

    def __call__(self, estimates: SourceEstimates) -> np.ndarray:
        hits = self.hits.take(estimates.classes)
        trials = self.trials.take(estimates.classes)
        return np.minimum(1.0, (hits + self.prior * estimates.estimates) / (trials + self.prior))

    def update_counts(self, proposal: Proposal, next_tokens: list[int]) -> None:
        """Count hits and trials of a proposal's nodes along the tokens that followed, as far as
        it contains them.
        """
        if not next_tokens or not proposal.entries:
            return
        trie, nodes, (classes, _) = proposal.trie, proposal.nodes, proposal.estimates
        parents = np.asarray(trie.parents)[nodes]
        node: int | None = 0
        for token in next_tokens:
            if node is None:
                break
            judged = np.flatnonzero(parents == node)
            node = trie.find_child(node, token)
            np.add.at(self.trials.reshape(-1), classes[judged], 1)
            np.add.at(self.hits.reshape(-1), classes[judged[nodes[judged] == node]], 1)


class Proposal:
    """The continuations of a text that several sources propose, merged into one trie."""

    def __init__(self) -> None:
        self.trie = Trie()
        # nodes with a source's estimates
        self.entries: list[tuple[np.ndarray, SourceEstimates]] = []

    @classmethod
    def from_copies(
        cls,
        copies: list[Copies],
        min_share: float,
        merge: Merge = merge_continuations_reference,
    ) -> Proposal:
        """Merge the continuations of each source, in the order of SOURCES.

        Paths with a share below `min_share` of their source's continuations are left out. The match
        length of a copy grows with every token.
        """
        proposal = cls()
        lengths, tokens = (np.concatenate(parts) for parts in zip(*copies))
        if not len(tokens):
            return proposal
        sources = np.repeat(
            np.arange(len(copies)), [len(source_copies.lengths) for source_copies in copies]
        )
        merged = merge(lengths, tokens, sources, len(copies), min_share)
        proposal.trie = Trie.from_arrays(merged.tokens, merged.parents, merged.depths)
        estimates = SourceEstimates.from_counts(
            merged.sources, merged.lengths, merged.shares, merged.counts
        )
        proposal.entries = [(merged.nodes, estimates)]
        return proposal

    @property
    def nodes(self) -> np.ndarray:
        """The node [S] of every estimate."""
        return np.concatenate([nodes for nodes, _ in self.entries])

    @property
    def estimates(self) -> SourceEstimates:
        """The estimates [S] of all sources."""
        return SourceEstimates(
            *(
                np.concatenate(fields)
                for fields in zip(*(estimates for _, estimates in self.entries))
            )
        )

    def add_draft(
        self, tokens: list[int], parents: list[int], scores: list[float], valid: list[bool]
    ) -> None:
        """Add a drafter's nodes, the root first, with the log-probability of the path to each."""
        node_ids = {0: 0}
        shares = []
        for node in range(1, len(tokens)):
            if valid[node]:
                node_ids[node] = self.trie.ensure_child(node_ids[parents[node]], tokens[node])
                shares.append(exp(min(0.0, scores[node] - scores[parents[node]])))
        ones = np.ones(len(shares), dtype=np.int64)
        estimates = SourceEstimates.from_counts(
            SOURCES.index("drafter"), 0 * ones, np.asarray(shares), ones
        )
        self.entries.append((np.asarray(list(node_ids.values())[1:], dtype=np.int64), estimates))

    def weigh_trie(self, estimator: AcceptanceEstimator) -> Trie:
        """Weigh every node of the trie by its acceptance probability, and return the trie."""
        best = np.zeros(len(self.trie))
        if self.entries:
            np.maximum.at(best, self.nodes, estimator(self.estimates))
        weights, parents = self.trie.weights, self.trie.parents
        weights[0], self.trie.is_calibrated = 1.0, True
        for node, probability in enumerate(best.tolist()[1:], 1):
            weights[node] = weights[parents[node]] * probability
        return self.trie
