"""Texts that are copied from: where what a text ends with stood before, and what followed it there.

Shapes: P places, D tokens that followed each, S sayings or sources, N nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

import numpy as np

from spectrain.data.datastore import TEXT_END, Datastore
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.trees.trie import Trie

MIN_SHARE = 0.5  # of the mean share of a node: what is rarer is seldom kept, and hundreds of nodes take a millisecond
SOURCES = ("context", "store", "drafter")
LENGTH_CLASSES = np.array([0, 1, 2, 3, 4, 4, 5, 5, 5, 6])  # the class of a match, by its tokens; the last for longer ones
CLASS_SHAPE = (
    len(SOURCES),
    7,
    9,
    4,
)  # classes of sayings: source, tokens that match, share of the places, and their number, to 3


@dataclass(frozen=True)
class Occurrence:
    """An earlier place that reads like the text's end."""

    length: int  # tokens before it that are those at the text's end
    tokens: list[int]  # what followed there


class Copies(NamedTuple):
    """What followed in many places."""

    lengths: np.ndarray  # [P] tokens before each that are those at the text's end
    tokens: np.ndarray  # [P, D], END behind the end of what followed

    @classmethod
    def from_occurrences(cls, found: list[Occurrence], depth: int) -> Copies:
        """Of continuations that are all so deep."""
        tokens = np.asarray([one.tokens for one in found], dtype=np.int64).reshape(-1, depth)
        return cls(np.asarray([one.length for one in found], dtype=np.int64), tokens)


class IndexedText:
    """A text that grows, and where each of its n-grams of up to `longest` tokens stood with a token behind it."""

    def __init__(self, tokens: list[int], max_length: int) -> None:
        self.tokens, self.max_length = tokens, max_length
        self.ngram_ends: dict[tuple[int, ...], list[int]] = defaultdict(list)  # n-gram -> positions of the token behind it
        self.num_indexed = 1  # the n-grams that end with the newest token have nothing behind them

    def find_occurrences(self, depth: int, max_matches: int, min_length: int = 1, path: Sequence[int] = ()) -> list[Occurrence]:
        """Where the last tokens of the text, and of a `path` behind it, stood before: the longest match first, of equal ones
        the newest, each place once.

        A copy that reaches the text's end goes on with what it has copied, so that a text which repeats itself does so.
        """
        self._index_tokens()
        tokens, places = [*self.tokens[-self.max_length :], *path], dict[int, int]()
        for length in range(min(self.max_length, len(self.tokens) + len(path) - 1), min_length - 1, -1):
            for end in reversed(self.ngram_ends.get(tuple(tokens[-length:]), ())):
                if len(places) >= max_matches:
                    break
                places.setdefault(end, length)
        return [Occurrence(length, self._tokens_from(end, depth)) for end, length in places.items()]

    def continue_path(self, path: list[int], depth: int) -> list[int]:
        """What followed the newest place that reads like the end of the text with `path` behind it; nothing where none does."""
        self._index_tokens()
        tail = (*self.tokens[-self.max_length :], *path)[-self.max_length :]
        for start in range(len(tail)):
            if ends := self.ngram_ends.get(tail[start:]):
                return self._tokens_from(ends[-1], depth)
        return []

    def _tokens_from(self, end: int, depth: int) -> list[int]:
        """The tokens from a place on, round and round where the text is too short."""
        following = self.tokens[end : end + depth]
        return following if len(following) == depth else (following * depth)[:depth]

    def _index_tokens(self) -> None:
        for end in range(self.num_indexed, len(self.tokens)):
            for size in range(1, min(self.max_length, end) + 1):
                self.ngram_ends[tuple(self.tokens[end - size : end])].append(end)
        self.num_indexed = len(self.tokens)


class GrowingTexts:
    """The texts of a batch, roots included, which are followed from round to round."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.rows: list[IndexedText] = []

    def append_committed(self, context: Context) -> list[list[int]]:
        """Add the tokens since the last draft, and return these; all tokens, where a decoding begins."""
        if context.begins:
            self.rows = [IndexedText([], self.max_length) for _ in context.counts]
        known = [len(row.tokens) for row in self.rows]
        first = min(known)
        ends = (context.lengths + 1 - first).tolist()
        news = [tokens[start - first : end] for tokens, start, end in zip(context.tokens[:, first:].tolist(), known, ends)]
        for row, tokens in zip(self.rows, news):
            row.tokens += tokens
        return news

    def reset_texts(self) -> None:
        """Read the texts from their beginning again."""
        self.rows = [IndexedText([], self.max_length) for _ in self.rows]


def build_trie(occurrences: list[Occurrence], growth: float = 2.0, fading: float = 0.97) -> Trie:
    """Continuations by how much of the text they match and how often, those that come first a little ahead.

    Which growth hardly matters (2, 4 and 8: 1.77 tokens a forward each, tiny, trees of 16 nodes).
    """
    trie = Trie()
    for rank, occurrence in enumerate(occurrences):
        trie.add_continuation(occurrence.tokens, growth**occurrence.length * fading**rank)
    return trie


class SourceEstimates(NamedTuple):
    """What sources say of tokens, [S], before it is known how far to trust them."""

    classes: np.ndarray  # how they are told apart when their truth is counted: an index into KINDS
    estimates: np.ndarray  # the sources' own, of the chance that they come true

    @classmethod
    def from_counts(cls, source: np.ndarray | int, length: np.ndarray, share: np.ndarray, count: np.ndarray) -> SourceEstimates:
        """By source, tokens that match up to here (0 for a drafter), share of what the source has here, and places that say
        so."""
        shares = np.where(share > 0.97, 0, 1 + np.minimum(7, (-1.5 * np.log2(np.maximum(share, 1e-3))).astype(np.int64)))
        lengths, counts = LENGTH_CLASSES[np.minimum(length, len(LENGTH_CLASSES) - 1)], np.minimum(count, CLASS_SHAPE[3] - 1)
        kinds = ((source * CLASS_SHAPE[1] + lengths) * CLASS_SHAPE[2] + shares) * CLASS_SHAPE[3] + counts
        return cls(kinds, 0.02 + 0.9 * share * np.where(length > 0, length / (length + 1), 1.0))


class AcceptanceEstimator:
    """How likely a token is where a source says it, learnt while decoding: the share of such sayings that came true, which
    starts as the source's own estimate, worth `prior` of them. Where sources agree the surest counts."""

    def __init__(self, prior: float = 4.0) -> None:
        self.prior = prior
        self.hits, self.trials = np.zeros(CLASS_SHAPE, dtype=np.int64), np.zeros(CLASS_SHAPE, dtype=np.int64)

    def __call__(self, sayings: SourceEstimates) -> np.ndarray:
        hits, trials = self.hits.take(sayings.classes), self.trials.take(sayings.classes)
        return np.minimum(1.0, (hits + self.prior * sayings.estimates) / (trials + self.prior))

    def update_counts(self, proposal: Proposal, followed: list[int]) -> None:
        """Judge what was proposed against the tokens that followed, as far as it went along with them."""
        if not followed or not proposal.entries:
            return
        trie, nodes, (kinds, _) = proposal.trie, proposal.nodes, proposal.estimates
        parents = np.asarray(trie.parents)[nodes]
        node: int | None = 0
        for truth in followed:
            if node is None:
                break
            judged = np.flatnonzero(parents == node)
            node = trie.find_child(node, truth)
            np.add.at(self.trials.reshape(-1), kinds[judged], 1)
            np.add.at(self.hits.reshape(-1), kinds[judged[nodes[judged] == node]], 1)


class SortedTrie:
    """Sorted continuations [P, D] as a trie: a node is a stretch of rows that are alike so far. By depth, the root first."""

    def __init__(self, rows: np.ndarray) -> None:
        begins = np.ones((rows.shape[1] + 1, len(rows)), dtype=bool)  # [1 + D, P] where a node begins
        begins[0, 1:] = False
        begins[1:, 1:] = np.logical_or.accumulate(rows.T[:, 1:] != rows.T[:, :-1], axis=0)
        self.size = begins.size
        self.starts = np.flatnonzero(begins)
        self.depths, self.lows = np.divmod(self.starts, len(rows))
        self.highs = np.append(self.starts[1:], self.size) - self.depths * len(rows)  # rows low to high are alike
        self.tokens = rows[self.lows, self.depths - 1]
        self.parents = np.cumsum(begins)[self.starts - len(rows)] - 1  # of the root, anything, and its token

    def sum_rows(self, values: np.ndarray) -> np.ndarray:
        """[S, N] over the rows of every node, of values [S, P] that add up without rounding."""
        whole = np.zeros((len(values), values.shape[1] + 1), dtype=values.dtype)
        values.cumsum(axis=1, out=whole[:, 1:])
        found: np.ndarray = whole.take(self.highs, axis=1) - whole.take(self.lows, axis=1)
        return found

    def min_rows(self, values: np.ndarray) -> np.ndarray:
        """[S, N] over the rows of every node, of values [S, P]."""
        found: np.ndarray = np.minimum.reduceat(np.tile(values, self.size // values.shape[1]), self.starts, axis=1)
        return found


class Proposal:
    """What sources say may follow a text, merged."""

    def __init__(self) -> None:
        self.trie = Trie()
        self.entries: list[tuple[np.ndarray, SourceEstimates]] = []  # nodes, and what was said of each

    @classmethod
    def from_copies(cls, found: list[Copies], min_share: float) -> Proposal:
        """Each source's continuations, the sources in the order of SOURCES, but for paths that a share below `least` of its
        own takes; a copy has matched a token more with every token."""
        proposal = cls()
        lengths, tokens = (np.concatenate(parts) for parts in zip(*found))
        if not len(tokens):
            return proposal
        order = np.lexsort(tokens.T[::-1])
        rows = SortedTrie(tokens[order])
        own = np.repeat(np.arange(len(found)), [len(one.lengths) for one in found])[order] == np.arange(len(found))[:, None]
        weights, counts = (
            rows.sum_rows(np.where(own, 2.0 ** lengths[order], 0.0)),
            rows.sum_rows(own.astype(np.int64)),
        )  # [S, N]
        first = rows.min_rows(np.where(own, order, len(order)))
        large = (weights > 0) & (weights >= min_share * weights[:, :1]) & (rows.tokens != TEXT_END)
        large[:, 0] = False
        named = np.where(large, first, len(order)).min(axis=0)  # the first continuation with a node: the order of nodes
        named[0] = -1
        nodes = np.flatnonzero(named < len(order))
        nodes = nodes[np.lexsort((rows.depths[nodes], named[nodes]))]
        place = np.zeros(len(named), dtype=np.int64)
        place[nodes] = np.arange(len(nodes))
        proposal.trie = Trie.from_arrays(rows.tokens[nodes], place[rows.parents[nodes]], rows.depths[nodes])
        said = np.flatnonzero(large)
        source, node = np.divmod(said, len(named))
        above = rows.parents.take(node)
        share = weights.take(said) / weights.take(source * len(named) + above)
        matched = lengths.take(first.take(said)) + rows.depths.take(above)
        proposal.entries = [(place.take(node), SourceEstimates.from_counts(source, matched, share, counts.take(said)))]
        return proposal

    @property
    def nodes(self) -> np.ndarray:
        """[S] the node of every saying."""
        return np.concatenate([nodes for nodes, _ in self.entries])

    @property
    def estimates(self) -> SourceEstimates:
        return SourceEstimates(*(np.concatenate(parts) for parts in zip(*(sayings for _, sayings in self.entries))))

    def add_draft(self, tokens: list[int], parents: list[int], scores: list[float], valid: list[bool]) -> None:
        """Add a drafter's nodes, the root first, with the log of the chance of every path to them."""
        here = {0: 0}
        shares = []
        for node in range(1, len(tokens)):
            if valid[node]:
                here[node] = self.trie.ensure_child(here[parents[node]], tokens[node])
                shares.append(exp(min(0.0, scores[node] - scores[parents[node]])))
        once = np.ones(len(shares), dtype=np.int64)
        sayings = SourceEstimates.from_counts(SOURCES.index("drafter"), 0 * once, np.asarray(shares), once)
        self.entries.append((np.asarray(list(here.values())[1:], dtype=np.int64), sayings))

    def weigh_trie(self, chances: AcceptanceEstimator) -> Trie:
        """The trie, every node weighing the chance that it is kept."""
        surest = np.zeros(len(self.trie))
        if self.entries:
            np.maximum.at(surest, self.nodes, chances(self.estimates))
        weights, parents = self.trie.weights, self.trie.parents
        weights[0], self.trie.is_calibrated = 1.0, True
        for node, chance in enumerate(surest.tolist()[1:], 1):
            weights[node] = weights[parents[node]] * chance
        return self.trie


class CopySource:
    """The text's own copies and those of a store, proposed round after round, and how far each is to be trusted."""

    def __init__(self, store: Datastore | None, longest: int = 6, matches: int = 200, enough: int = 64) -> None:
        for key, value in (("longest", longest), ("matches", matches), ("enough", enough)):
            if value < 1:
                raise UserError(f"drafter.{key}={value}: use 1 or more")
        self.store, self.matches, self.enough = store, matches, enough
        self.texts = GrowingTexts(longest)
        self.estimator = AcceptanceEstimator()
        self.proposals: list[Proposal] = []

    def propose_copies(self, context: Context) -> list[Proposal]:
        """What may follow every text, after learning from what did follow the last time."""
        news, depth = self.texts.append_committed(context), context.builder.depth
        least = MIN_SHARE / context.builder.budget
        if not context.begins:
            for proposal, followed in zip(self.proposals, news):
                self.estimator.update_counts(proposal, followed)
        self.proposals = []
        for row, active in zip(self.texts.rows, context.active.tolist()):
            found = []
            if active:
                found = [Copies.from_occurrences(row.find_occurrences(depth, self.matches), depth)]
                if self.store is not None:
                    found.append(Copies(*self.store.find_continuations(row.tokens, depth, self.matches, self.enough)))
            self.proposals.append(Proposal.from_copies(found, least) if found else Proposal())
        return self.proposals
