"""State of a batch between rounds. Shapes: B batch, N nodes, P path length, S stop tokens, D
width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.kernels.token_commit import TextBatch, token_commit
from spectrain.models.features import Features, Layer
from spectrain.trees.token_tree import AcceptedPath, TokenTree

if TYPE_CHECKING:
    from spectrain.models.cache_types import KeyValueShape
    from spectrain.models.kv_cache import TreeCache
    from spectrain.models.partial_forward import PartialForward
    from spectrain.models.target import Target
    from spectrain.trees.base import TreeBuilder


@dataclass
class Context:
    """What a drafter may read when it drafts, and what a round changes."""

    target: Target
    builder: TreeBuilder  # sets how much may be drafted
    cache: TreeCache  # of the target, with every committed token
    tokens: Tensor  # [B, capacity] committed tokens, then the root
    sequence_ids: Tensor  # [B] keys of the texts' random draws
    layers: tuple[Layer, ...]  # layers whose features of committed tokens are recorded
    new_features: Features  # [B, P] target features at the positions committed since the last draft
    num_new: Tensor  # [B] number of valid positions among them
    active: Tensor  # [B] texts that are not done
    tokens_left: Tensor  # [B] number of tokens that a text may still emit
    stops: Tensor  # [S] tokens that end a text
    texts: Sequence[Sequence[int]] = ()  # prompts, for their images
    temperature: float = 1.0  # at which the acceptance rule reads the target's logits
    round: int = 0  # number of drafts made
    # new features of rounds without a draft
    deferred: list[tuple[Features, Tensor]] = field(default_factory=list)
    # this round's nodes that some of the target's layers have run
    partial: PartialForward | None = None

    @property
    def begins(self) -> bool:
        """Whether this is the first round of a decoding."""
        return self.round == 0 and not self.deferred

    @property
    def root(self) -> Tensor:
        """Most recent token of each text [B], which the target has chosen and not run."""
        return self.tokens.gather(1, self.cache.lengths[:, None])[:, 0]

    @property
    def lengths(self) -> Tensor:
        """Number of committed tokens of each text [B], without the root."""
        return self.cache.lengths

    @property
    def longest(self) -> int:
        """Largest length, or its bound."""
        return self.cache.longest

    @property
    def next_tokens(self) -> Tensor:
        """Tokens [B, P] that follow the positions of the new features."""
        steps = torch.arange(self.new_features.tokens.shape[1], device=self.tokens.device)
        start = self.cache.lengths - self.num_new
        return self.tokens.gather(
            1, (start[:, None] + 1 + steps).clamp(max=self.tokens.shape[1] - 1)
        )

    def last_state(self, states: Tensor) -> Tensor:
        """Return the state [B, 1, D] at each text's last new position, from states [B, P, D] at
        all of them.
        """
        return states.gather(
            1, (self.num_new - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[-1])
        )

    def positions(self, tree: TokenTree) -> Tensor:
        """Return the position [B, N] of every node in its text."""
        return self.cache.lengths[:, None] + tree.depths

    def drafting_cache(
        self,
        cached: TreeCache | None,
        num_layers: int,
        extra: int,
        shapes: Mapping[int, KeyValueShape] | None = None,
    ) -> TreeCache:
        """Return a drafter's cache: `cached` after the first round, and an empty one with `extra`
        more slots than the target's in the first round.

        A cache of fixed addresses is emptied and used again. `shapes` are of layers that differ, or
        whose values are not as wide as their keys.
        """
        if self.round and cached is not None:
            return cached
        return self.cache.for_drafter(cached, num_layers, extra, shapes)

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Features:
        """Run the prompts [B, T], padded on the right, into the empty cache. The logits [B, 1,
        V] are at their last tokens.
        """
        return self.target.prefill(tokens, lengths, self.cache, self.layers, self.texts)

    def verify(self, tree: TokenTree) -> Features:
        """Return the target's logits and features at every node, and reuse this round's partial
        forward if there is one.
        """
        if self.partial is not None:
            return self.partial.run_tree(tree)
        return self.target.verify(tree, self.cache, self.layers)

    def commit(
        self, tree: TokenTree, features: Features, accepted: AcceptedPath
    ) -> tuple[Tensor, Tensor]:
        """Commit the accepted path, and return the emitted tokens [B, P] and their number [B], 0
        for texts that are done.

        A text is done when it has emitted a stop token or its last token.
        """
        texts = TextBatch(
            self.tokens, self.cache.lengths, self.active, self.tokens_left, self.stops
        )
        emitted, num_emitted = token_commit(
            tree.tokens, accepted.path, accepted.counts, accepted.bonus, texts
        )
        self.commit_features(features, accepted.path, num_emitted)
        self.partial = None
        return emitted, num_emitted

    def commit_features(self, features: Features, path: Tensor, counts: Tensor) -> None:
        """Commit the first `counts` [B] nodes of `path` [B, P] to the cache, with their features
        for the next draft.
        """
        self.cache.commit(path, counts)
        self.new_features = features.gather(path)
        self.num_new = counts
        self.round += 1

    def defer(self, before: tuple[Features, Tensor]) -> None:
        """Undo the count of the last round as one with a draft: its features and `before` await
        the next draft.
        """
        self.deferred.append((self.new_features, self.num_new))
        self.new_features, self.num_new = before
        self.round -= 1

    def catch_up(self) -> None:
        """Append the features of rounds without a draft to the new features."""
        if self.deferred:
            parts = [(self.new_features, self.num_new), *self.deferred]
            self.new_features = Features.concat_prefixes(parts)
            self.num_new = torch.stack([counts for _, counts in parts]).sum(0)
            self.deferred = []
