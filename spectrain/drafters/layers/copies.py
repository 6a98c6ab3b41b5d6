"""Copied drafts: earlier occurrences of a text's last tokens, and the tokens that followed them
there.

Shapes: P occurrences, D tokens after each, S sources or estimates, N nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, NamedTuple

import numpy as np

from spectrain.data.datastore import Datastore
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.accelerator import accelerator
from spectrain.trees.trie import Trie

from .merged_copies import merge_continuations

# Smallest share of a copied node, as a multiple of 1 / budget: rarer nodes are seldom accepted, and
# hundreds of them cost 1 ms.
MIN_SHARE = 0.5
SOURCES = ("context", "store", "drafter")
# The class of a match by the number of its tokens; the last class holds all longer matches.
LENGTH_CLASSES = np.array([0, 1, 2, 3, 4, 4, 5, 5, 5, 6])
# Numbers of classes of an estimate, by source, match length, share of the occurrences, and their
# count up to 3.
CLASS_SHAPE = (len(SOURCES), 7, 9, 4)


@dataclass(frozen=True)
class Occurrence:
    """An earlier occurrence of the text's last tokens."""

    length: int  # number of matching tokens
    tokens: list[int]  # the tokens that followed


class Copies(NamedTuple):
    """The continuations of many occurrences."""

    lengths: np.ndarray  # [P] numbers of matching tokens
    tokens: np.ndarray  # [P, D], padded with TEXT_END

    @classmethod
    def from_occurrences(cls, occurrences: list[Occurrence], depth: int) -> Copies:
        """Collect continuations of `depth` tokens each."""
        tokens = np.asarray(
            [occurrence.tokens for occurrence in occurrences], dtype=np.int64
        ).reshape(-1, depth)
        return cls(
            np.asarray([occurrence.length for occurrence in occurrences], dtype=np.int64), tokens
        )


class IndexedText:
    """A growing text, and an index of its n-grams of up to `max_length` tokens that another
    token follows.
    """

    def __init__(self, tokens: list[int], max_length: int) -> None:
        self.tokens, self.max_length = tokens, max_length
        # n-gram -> positions of the next token
        self.ngram_ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        # No token follows the n-grams that end with the last token, so these are not indexed yet.
        self.num_indexed = 1

    def find_occurrences(
        self, depth: int, max_matches: int, min_length: int = 1, path: Sequence[int] = ()
    ) -> list[Occurrence]:
        """Find earlier occurrences of the last tokens of the text and a `path` after it, each
        position once.

        The longest match comes first, and of equally long ones the latest. A copy that reaches the
        end of the text continues with its own tokens, so that a text which repeats itself is copied
        on.
        """
        self._index_tokens()
        tokens = [*self.tokens[-self.max_length :], *path]
        match_lengths = dict[int, int]()
        for length in range(
            min(self.max_length, len(self.tokens) + len(path) - 1), min_length - 1, -1
        ):
            for end in reversed(self.ngram_ends.get(tuple(tokens[-length:]), ())):
                if len(match_lengths) >= max_matches:
                    break
                match_lengths.setdefault(end, length)
        return [
            Occurrence(length, self._tokens_from(end, depth))
            for end, length in match_lengths.items()
        ]

    def continue_path(self, path: list[int], depth: int) -> list[int]:
        """Return the tokens after the latest longest match of the text and `path`; none if there
        is no match.
        """
        self._index_tokens()
        tail = (*self.tokens[-self.max_length :], *path)[-self.max_length :]
        for start in range(len(tail)):
            if ends := self.ngram_ends.get(tail[start:]):
                return self._tokens_from(ends[-1], depth)
        return []

    def _tokens_from(self, end: int, depth: int) -> list[int]:
        """Return `depth` tokens from a position on, repeated if the text is too short."""
        following = self.tokens[end : end + depth]
        return following if len(following) == depth else (following * depth)[:depth]

    def _index_tokens(self) -> None:
        for end in range(self.num_indexed, len(self.tokens)):
            for size in range(1, min(self.max_length, end) + 1):
                self.ngram_ends[tuple(self.tokens[end - size : end])].append(end)
        self.num_indexed = len(self.tokens)


class GrowingTexts:
    """The texts of a batch with their roots, which grow from round to round."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.rows: list[IndexedText] = []

    def append_committed(self, context: Context) -> list[list[int]]:
        """Append the tokens committed since the last draft and return them; all tokens where a
        decoding begins.
        """
        if context.begins:
            self.rows = [IndexedText([], self.max_length) for _ in context.num_new]
        num_read = [len(row.tokens) for row in self.rows]
        num_shared = min(num_read)
        ends = (context.lengths + 1 - num_shared).tolist()
        new_tokens = [
            tokens[start - num_shared : end]
            for tokens, start, end in zip(context.tokens[:, num_shared:].tolist(), num_read, ends)
        ]
        for row, tokens in zip(self.rows, new_tokens):
            row.tokens += tokens
        return new_tokens

    def reset_texts(self) -> None:
        """Clear the texts, so that the next call reads them from their beginning."""
        self.rows = [IndexedText([], self.max_length) for _ in self.rows]


def build_trie(occurrences: list[Occurrence], growth: float = 2.0, fading: float = 0.97) -> Trie:
    """Build a trie of continuations, weighted by the lengths and the number of their matches,
    slightly more for the first ones.

    The growth hardly matters (2, 4 and 8: 1.77 tokens per forward each, tiny, trees of 16 nodes).
    """
    trie = Trie()
    for rank, occurrence in enumerate(occurrences):
        trie.add_continuation(occurrence.tokens, growth**occurrence.length * fading**rank)
    return trie


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
    def from_copies(cls, copies: list[Copies], min_share: float) -> Proposal:
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
        merged = merge_continuations(lengths, tokens, sources, len(copies), min_share)
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


class CopySource:
    """Proposes copies from the text itself and from a store in every round, with calibrated
    acceptance probabilities.
    """

    def __init__(
        self, store: Datastore | None, longest: int = 6, matches: int = 200, enough: int = 64
    ) -> None:
        for key, value in (("longest", longest), ("matches", matches), ("enough", enough)):
            if value < 1:
                raise UserError(f"drafter.{key}={value}: use 1 or more")
        accelerator().prepare_copying()
        self.store, self.matches, self.enough = store, matches, enough
        self.texts = GrowingTexts(longest)
        self.estimator = AcceptanceEstimator()
        self.proposals: list[Proposal] = []

    @classmethod
    def open(
        cls,
        store: str | None,
        tokenizer: Any,
        longest: int = 6,
        matches: int = 200,
        enough: int = 64,
    ) -> CopySource:
        """Open the store in a folder, which spectrain data index wrote, and copy from it too;
        null has none.
        """
        return cls(None if store is None else Datastore(store, tokenizer), longest, matches, enough)

    def propose_copies(self, context: Context) -> list[Proposal]:
        """Propose continuations of every text, after learning from the outcome of the last
        proposals.
        """
        new_tokens = self.texts.append_committed(context)
        depth = context.builder.depth
        min_share = MIN_SHARE / context.builder.budget
        if not context.begins:
            for proposal, next_tokens in zip(self.proposals, new_tokens):
                self.estimator.update_counts(proposal, next_tokens)
        self.proposals = []
        for row, active in zip(self.texts.rows, context.active.tolist()):
            copies = []
            if active:
                copies = [Copies.from_occurrences(row.find_occurrences(depth, self.matches), depth)]
                if self.store is not None:
                    copies.append(
                        Copies(
                            *self.store.find_continuations(
                                row.tokens, depth, self.matches, self.enough
                            )
                        )
                    )
            self.proposals.append(Proposal.from_copies(copies, min_share) if copies else Proposal())
        return self.proposals
