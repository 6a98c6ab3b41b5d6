"""Copied drafts: earlier occurrences of a text's last tokens, and the tokens that followed them
there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spectrain.copying.estimates import MIN_SHARE, AcceptanceEstimator, Proposal
from spectrain.copying.merging import MergedCopies, merge_continuations_reference
from spectrain.copying.occurrences import Copies, IndexedText
from spectrain.data.datastore import Datastore
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.kernels.dispatch import run_on_cpu
from spectrain.models.accelerator import accelerator


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


def merge_continuations(
    lengths: np.ndarray, tokens: np.ndarray, sources: np.ndarray, num_sources: int, min_share: float
) -> MergedCopies:
    """Compute `merge_continuations_reference`, by a kernel where one serves."""
    merged = run_on_cpu("merge_continuations", lengths, tokens, sources, num_sources, min_share)
    if merged is not None:
        return MergedCopies(*merged)
    return merge_continuations_reference(lengths, tokens, sources, num_sources, min_share)


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
            self.proposals.append(
                Proposal.from_copies(copies, min_share, merge_continuations)
                if copies
                else Proposal()
            )
        return self.proposals
