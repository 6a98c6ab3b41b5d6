"""Copying drafts inside vLLM: the class that `method: custom_class` constructs.

An export (export.py) writes this file and the folder `spectrain/copying` as the package
`spectrain_copying`, with settings.json and, where there is one, the store beside it. So this file
imports numpy and that folder alone. vLLM gives the tokens of every text and nothing of the target,
which is what drafters that only copy need.
Shapes: R rows of vLLM's batch, L positions of the longest text that it admits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from spectrain.copying.estimates import MIN_SHARE, AcceptanceEstimator, Proposal
from spectrain.copying.occurrences import Copies, IndexedText, build_trie
from spectrain.copying.suffixes import SuffixIndex

SETTINGS_FILE = "settings.json"
STORE_FOLDER = "store"


class TextState:
    """A text of the batch as far as it was read, and what was proposed for its end."""

    def __init__(self, longest: int) -> None:
        self.index = IndexedText([], longest)
        self.proposal = Proposal()

    def continues(self, tokens: np.ndarray) -> bool:
        """Tell whether these tokens begin with the text."""
        read = self.index.tokens
        return len(read) < len(tokens) and bool(np.array_equal(tokens[: len(read)], read))


class CopyingDrafter:
    """Proposes the chain that spectrain's own decoding drafts, from the same code."""

    def __init__(self, vllm_config: Any, folder: Path | None = None) -> None:
        folder = Path(__file__).parent if folder is None else folder
        settings = json.loads((folder / SETTINGS_FILE).read_text())
        self.depth = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_length = int(vllm_config.model_config.max_model_len)
        self.longest = int(settings["longest"])
        self.matches = int(settings["matches"])
        # Of n-grams: the shortest match; null merges weighted copies instead.
        self.shortest: int | None = settings["shortest"]
        self.enough = int(settings["enough"])
        self.store = load_store(folder / STORE_FOLDER)
        self.estimator = AcceptanceEstimator()
        self.texts: dict[int, TextState] = {}

    def load_model(self, target: Any) -> None:
        """Do nothing: there are no weights. vLLM's build for CPUs calls it."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens: np.ndarray,
        token_ids: np.ndarray,
        **unused: Any,
    ) -> list[list[int]]:
        """Return up to `depth` draft tokens for every row of the batch.

        sampled_token_ids: the tokens of each row in this step; none while its prompt is read.
        num_tokens: tokens of each text [R], the sampled ones included.
        token_ids: the texts [R, L].
        """
        earlier = self.texts
        self.texts = {}
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens[row])
            tokens = token_ids[row, :length]
            state = take_state(earlier, row, tokens)
            if not sampled or length >= self.max_length:
                if state is not None:
                    self.texts[row] = state
                drafts.append([])
                continue
            self.texts[row] = state = state or TextState(self.longest)
            drafts.append(self.propose_row(state, tokens.tolist()))
        return drafts

    def propose_row(self, state: TextState, tokens: list[int]) -> list[int]:
        """Read the new tokens of a text, learn from them, and return its chain."""
        new_tokens = tokens[len(state.index.tokens) :]
        is_first = not state.index.tokens
        state.index.tokens += new_tokens
        if self.shortest is not None:
            trie = build_trie(state.index.find_occurrences(self.depth, self.matches, self.shortest))
        else:
            if not is_first:
                self.estimator.update_counts(state.proposal, new_tokens)
            state.proposal = self.merge_copies(state.index)
            trie = state.proposal.weigh_trie(self.estimator)
        return [trie.tokens[node] for node in trie.heaviest_path(self.depth)[1:]]

    def merge_copies(self, index: IndexedText) -> Proposal:
        """Merge the copies from a text and from the store."""
        occurrences = index.find_occurrences(self.depth, self.matches)
        copies = [Copies.from_occurrences(occurrences, self.depth)]
        if self.store is not None:
            continuations = self.store.find_continuations(
                index.tokens, self.depth, self.matches, self.enough
            )
            copies.append(Copies(*continuations))
        # The chain's nodes and the root.
        return Proposal.from_copies(copies, MIN_SHARE / (self.depth + 1))


def take_state(states: dict[int, TextState], row: int, tokens: np.ndarray) -> TextState | None:
    """Remove and return the state of the text that these tokens continue, None for a new text.

    Rows of the batch move, so the text is recognized by its tokens; equal texts have equal states.
    """
    for key in (row, *(key for key in states if key != row)):
        if key in states and states[key].continues(tokens):
            return states.pop(key)
    return None


def load_store(folder: Path) -> SuffixIndex | None:
    """Return the stored texts of a folder, memory-mapped; None where there is no such folder."""
    if not folder.is_dir():
        return None
    arrays = [
        np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        for name in ("tokens", "suffixes")
    ]
    # Slicing a plain array, which stays memory-mapped, takes a tenth of the time.
    return SuffixIndex(*(np.asarray(array) for array in arrays))
