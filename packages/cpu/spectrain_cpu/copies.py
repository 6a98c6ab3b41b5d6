"""Kernels of copied drafts on a CPU, compiled by Numba: a search in a store, and the trie of what
it found.

Shapes: T tokens of a store, L last tokens of a text, P occurrences, D tokens after each, S sources,
N nodes, E estimates. Numbers are int64 where nothing else is said.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spectrain.copying.suffixes import MAX_MATCH, TEXT_END

from .vectors import compile_cached, compile_inline

NO_NODE = -1


@compile_inline
def _compare(tokens: Any, start: int, query: Any, first: int) -> int:
    """Return -1, 0 or 1 as the tokens from `start` on come before, begin with, or come after those
    of a query from `first` on."""
    for i in range(first, len(query)):
        at = start + i - first
        if at >= len(tokens) or tokens[at] < query[i]:
            return -1
        if tokens[at] > query[i]:
            return 1
    return 0


@compile_inline
def _find_suffixes(tokens: Any, suffixes: Any, query: Any, first: int) -> Any:
    """Return the range of suffixes that begin with the query from `first` on."""
    low = 0
    high = len(suffixes)
    while low < high:
        middle = (low + high) // 2
        if _compare(tokens, suffixes[middle], query, first) < 0:
            low = middle + 1
        else:
            high = middle
    begin = low
    high = len(suffixes)
    while low < high:
        middle = (low + high) // 2
        if _compare(tokens, suffixes[middle], query, first) <= 0:
            low = middle + 1
        else:
            high = middle
    return begin, low


@compile_inline
def _match_length(tokens: Any, suffixes: Any, tail: Any) -> int:
    """Return how many of the last tokens occur together in the store."""
    low = 0
    high = len(tail)
    while low < high:
        middle = (low + high + 1) // 2
        begin, end = _find_suffixes(tokens, suffixes, tail, len(tail) - middle)
        if begin < end:
            low = middle
        else:
            high = middle - 1
    return low


@compile_cached
def _find_continuations_kernel(
    tokens: Any, suffixes: Any, tail: Any, depth: int, max_matches: int, min_matches: int
) -> Any:
    """Compute `Datastore.find_continuations` for the last tokens [L] of a text and the tokens and
    suffixes [T] of a store, int32 each."""
    ends = np.empty(max_matches, np.int64)
    lengths = np.empty(max_matches, np.int64)
    length = _match_length(tokens, suffixes, tail)
    count = 0
    while length > 0 and count < min_matches:
        begin, end = _find_suffixes(tokens, suffixes, tail, len(tail) - length)
        room = max_matches - count
        found = end - begin
        before = count
        step = (found - 1) / (room - 1) if room > 1 else 0.0
        for i in range(min(found, room)):
            # As numpy spaces them, whose last one is exact.
            index = (
                begin + i
                if found <= room
                else (end - 1 if 0 < i == room - 1 else int(i * step + begin))
            )
            position = suffixes[index] + length
            is_new = True
            for j in range(before):
                is_new = is_new and ends[j] != position
            if is_new:
                ends[count], lengths[count] = position, length
                count += 1
        ends[before:count] = np.sort(ends[before:count])
        length -= 1
    continuations = np.full((count, depth), TEXT_END, np.int64)
    num_real = 0
    for i in range(count):
        for j in range(depth):
            at = ends[i] + j
            if at >= len(tokens) or tokens[at] == TEXT_END:
                break
            continuations[num_real, j] = tokens[at]
        if continuations[num_real, 0] != TEXT_END:
            lengths[num_real] = lengths[i]
            num_real += 1
    return lengths[:num_real].copy(), continuations[:num_real].copy()


@compile_cached
def _merge_continuations_kernel(
    lengths: Any, tokens: Any, sources: Any, num_sources: int, min_share: float
) -> Any:
    """Compute `merge_continuations_reference` for occurrences of `sources` [P]."""
    num_rows, depth = tokens.shape
    size = 1 + num_rows * depth
    num_nodes = 1
    ids = np.empty(size, np.int64)
    parents = np.zeros(size, np.int64)
    depths = np.zeros(size, np.int64)
    ids[0] = TEXT_END
    # The newest child of a node, and the child of the same node before a node.
    newest = np.full(size, NO_NODE, np.int64)
    previous = np.full(size, NO_NODE, np.int64)
    weights = np.zeros((num_sources, size))
    counts = np.zeros((num_sources, size), np.int64)
    first_rows = np.zeros((num_sources, size), np.int64)
    # 1. A trie of all continuations, with weights and counts by source.
    for row in range(num_rows):
        source = sources[row]
        weight = 2.0 ** lengths[row]
        node = 0
        weights[source, 0] += weight
        for level in range(depth):
            token = tokens[row, level]
            if token == TEXT_END:
                break
            child = newest[node]
            while child != NO_NODE and ids[child] != token:
                child = previous[child]
            if child == NO_NODE:
                child = num_nodes
                ids[child], parents[child], depths[child] = token, node, level + 1
                previous[child], newest[node] = newest[node], child
                num_nodes += 1
            if counts[source, child] == 0:
                first_rows[source, child] = row
            weights[source, child] += weight
            counts[source, child] += 1
            node = child
    # 2. Nodes that some source has often enough, ordered by the first continuation of such a source
    #    that contains them.
    is_large = np.zeros((num_sources, num_nodes), np.bool_)
    order_keys = np.empty(num_nodes, np.int64)
    num_entries = 0
    last = (num_rows + 1) * (depth + 1)
    for node in range(num_nodes):
        order_keys[node] = last
        for source in range(num_sources):
            weight = weights[source, node]
            if node > 0 and weight > 0 and weight >= min_share * weights[source, 0]:
                is_large[source, node] = True
                order_keys[node] = min(
                    order_keys[node], first_rows[source, node] * (depth + 1) + depths[node]
                )
                num_entries += 1
    order_keys[0] = -1
    order = np.argsort(order_keys)
    num_kept = 0
    new_ids = np.zeros(num_nodes, np.int64)
    while num_kept < num_nodes and order_keys[order[num_kept]] < last:
        new_ids[order[num_kept]] = num_kept
        num_kept += 1
    kept = order[:num_kept]
    # 3. An estimate for every node of every source.
    entries = np.empty((4, num_entries), np.int64)
    shares = np.empty(num_entries)
    entry = 0
    for node in range(1, num_nodes):
        for source in range(num_sources):
            if is_large[source, node]:
                matched = lengths[first_rows[source, node]] + depths[node] - 1
                entries[0, entry], entries[1, entry] = new_ids[node], source
                entries[2, entry], entries[3, entry] = matched, counts[source, node]
                shares[entry] = weights[source, node] / weights[source, parents[node]]
                entry += 1
    return ids[kept], new_ids[parents[kept]], depths[kept], entries, shares


def prepare_copy_kernels() -> None:
    """Load the kernels, or compile them where this machine has not. Each is called once with the
    types of its arguments in a round.
    """
    store = np.asarray([0, TEXT_END], dtype=np.int32)
    suffixes = np.asarray([1, 0], dtype=np.int32)
    for array in (store, suffixes):
        array.setflags(write=False)  # as those of a store are
    search_store(store, suffixes, [0], 1, 1, 1)
    tokens = np.zeros((1, 1), dtype=np.int64)
    merge_continuations(np.ones(1, dtype=np.int64), tokens, np.zeros(1, dtype=np.int64), 1, 0.0)


def search_store(
    tokens: np.ndarray,
    suffixes: np.ndarray,
    text: list[int],
    depth: int,
    max_matches: int,
    min_matches: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `Datastore.find_continuations` does for the tokens and suffixes [T] of a
    store.
    """
    tail = np.asarray(text[-MAX_MATCH:], dtype=np.int64)
    lengths, continuations = _find_continuations_kernel(
        tokens, suffixes, tail, depth, max_matches, min_matches
    )
    return lengths, continuations


def merge_continuations(
    lengths: np.ndarray, tokens: np.ndarray, sources: np.ndarray, num_sources: int, min_share: float
) -> tuple[np.ndarray, ...]:
    """Return the fields of `merge_continuations_reference`."""
    ids, parents, depths, estimates, shares = _merge_continuations_kernel(
        np.ascontiguousarray(lengths), np.ascontiguousarray(tokens), sources, num_sources, min_share
    )
    return ids, parents, depths, *estimates, shares
