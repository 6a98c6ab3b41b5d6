"""Continuations of several sources that are merged into one trie.

Shapes: P occurrences, D tokens after each, S sources, N nodes, E estimates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .suffixes import TEXT_END


class MergedCopies(NamedTuple):
    """A trie of continuations, the root first, parents before children, and the estimates of its
    sources.
    """

    tokens: np.ndarray  # [N]; the root's token and parent are meaningless
    parents: np.ndarray  # [N]
    depths: np.ndarray  # [N]
    nodes: np.ndarray  # [E] the node of each estimate
    sources: np.ndarray  # [E]
    # [E] matching tokens before the node, of the source's first continuation that contains it
    lengths: np.ndarray
    counts: np.ndarray  # [E] continuations of the source that contain the node
    shares: np.ndarray  # [E] float64: the weight of the node over that of its parent


def merge_continuations_reference(
    lengths: np.ndarray, tokens: np.ndarray, sources: np.ndarray, num_sources: int, min_share: float
) -> MergedCopies:
    """Merge continuations [P, D], padded with TEXT_END, of texts that match `lengths` [P] tokens,
    into one trie.

    `sources` [P] ascend. A copy weighs 2 to the power of its length. Paths with a share below
    `min_share` of their source's weight are left out. Nodes are ordered by the first continuation
    that contains them, of a source that has them often enough.
    """
    if not len(tokens):
        root = np.zeros(1, dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        return MergedCopies(root - 1, root, root, none, none, none, none, np.zeros(0))
    order = np.lexsort(tokens.T[::-1])
    rows = SortedTrie(tokens[order])
    is_own = sources[order] == np.arange(num_sources)[:, None]
    # 1. Weights and counts [S, N] of every node per source; copies of longer matches weigh more.
    weights = rows.sum_rows(np.where(is_own, 2.0 ** lengths[order], 0.0))
    counts = rows.sum_rows(is_own.astype(np.int64))
    # 2. Nodes that some source has often enough, ordered by the first continuation that contains
    #    them.
    first_rows = rows.min_rows(np.where(is_own, order, len(order)))
    is_large = (weights > 0) & (weights >= min_share * weights[:, :1]) & (rows.tokens != TEXT_END)
    is_large[:, 0] = False
    creation_order = np.where(is_large, first_rows, len(order)).min(axis=0)
    creation_order[0] = -1
    nodes = np.flatnonzero(creation_order < len(order))
    nodes = nodes[np.lexsort((rows.depths[nodes], creation_order[nodes]))]
    new_ids = np.zeros(len(creation_order), dtype=np.int64)
    new_ids[nodes] = np.arange(len(nodes))
    # 3. An estimate for every node of every source.
    entries = np.flatnonzero(is_large)
    entry_sources, entry_nodes = np.divmod(entries, len(creation_order))
    parents = rows.parents.take(entry_nodes)
    shares = weights.take(entries) / weights.take(entry_sources * len(creation_order) + parents)
    match_lengths = lengths.take(first_rows.take(entries)) + rows.depths.take(parents)
    return MergedCopies(
        rows.tokens[nodes],
        new_ids[rows.parents[nodes]],
        rows.depths[nodes],
        new_ids.take(entry_nodes),
        entry_sources,
        match_lengths,
        counts.take(entries),
        shares,
    )


class SortedTrie:
    """Sorted continuations [P, D] as a trie: a node is a range of rows with a common prefix.
    Nodes are ordered by depth.
    """

    def __init__(self, rows: np.ndarray) -> None:
        # [1 + D, P] whether a node begins
        begins = np.ones((rows.shape[1] + 1, len(rows)), dtype=bool)
        begins[0, 1:] = False
        begins[1:, 1:] = np.logical_or.accumulate(rows.T[:, 1:] != rows.T[:, :-1], axis=0)
        self.size = begins.size
        self.starts = np.flatnonzero(begins)
        self.depths, self.lows = np.divmod(self.starts, len(rows))
        # a node has the rows low to high
        self.highs = np.append(self.starts[1:], self.size) - self.depths * len(rows)
        # The root's token and parent are meaningless.
        self.tokens = rows[self.lows, self.depths - 1]
        self.parents = np.cumsum(begins)[self.starts - len(rows)] - 1

    def sum_rows(self, values: np.ndarray) -> np.ndarray:
        """Sum values [S, P], which must add up without rounding, over the rows of every node:
        [S, N].
        """
        totals = np.zeros((len(values), values.shape[1] + 1), dtype=values.dtype)
        values.cumsum(axis=1, out=totals[:, 1:])
        sums: np.ndarray = totals.take(self.highs, axis=1) - totals.take(self.lows, axis=1)
        return sums

    def min_rows(self, values: np.ndarray) -> np.ndarray:
        """Take the minimum of values [S, P] over the rows of every node: [S, N]."""
        minima: np.ndarray = np.minimum.reduceat(
            np.tile(values, self.size // values.shape[1]), self.starts, axis=1
        )
        return minima
