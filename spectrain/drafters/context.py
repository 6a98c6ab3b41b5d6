"""What a round goes on from: the committed texts of a batch. Shapes: B batch, N nodes, P path length, S stop tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectrain.kernels.token_commit import TextBatch, token_commit
from spectrain.models.features import Features, Layer
from spectrain.models.kv_cache import KeyValueShape, TreeCache
from spectrain.models.partial_forward import PartialForward
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain.trees.token_tree import AcceptedPath, TokenTree


@dataclass
class Context:
    """What a drafter may look at when it drafts, and what a round changes."""

    target: Target
    builder: TreeBuilder  # how much may be drafted
    cache: TreeCache  # the target's, holding every committed token
    tokens: Tensor  # [B, capacity] committed tokens and, behind them, the root
    sequence_ids: Tensor  # [B] the key of each text's random draws
    layers: tuple[Layer, ...]  # features that are kept of what is committed
    fresh: Features  # the target's features at the positions committed since the last draft, [B, P]
    counts: Tensor  # [B] how many of these positions are real
    active: Tensor  # [B] texts that are not done
    left: Tensor  # [B] tokens that they may still emit
    stops: Tensor  # [S] tokens that end a text
    texts: Sequence[Sequence[int]] = ()  # the prompts, for their images
    temperature: float = 1.0  # at which the rule that judges reads the target's logits
    round: int = 0  # drafts made so far
    waiting: list[tuple[Features, Tensor]] = field(default_factory=list)  # `fresh` and `counts` of rounds without a draft
    partial: PartialForward | None = None  # this round's nodes that a part of the target has run already

    @property
    def begins(self) -> bool:
        """Whether this is the first round of a decoding."""
        return self.round == 0 and not self.waiting

    @property
    def root(self) -> Tensor:
        """The newest token of each text [B], chosen and not yet run."""
        return self.tokens.gather(1, self.cache.lengths[:, None])[:, 0]

    @property
    def lengths(self) -> Tensor:
        """Committed tokens of each text [B], the root left out."""
        return self.cache.lengths

    @property
    def longest(self) -> int:
        """The largest of them, or its bound."""
        return self.cache.longest

    @property
    def following(self) -> Tensor:
        """The token after each fresh position, [B, P]."""
        steps = torch.arange(self.fresh.tokens.shape[1], device=self.tokens.device)
        start = self.cache.lengths - self.counts
        return self.tokens.gather(1, (start[:, None] + 1 + steps).clamp(max=self.tokens.shape[1] - 1))

    def newest(self, states: Tensor) -> Tensor:
        """[B, 1, D] of states [B, P, D] at the fresh positions, that of each text's last one."""
        return states.gather(1, (self.counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[-1]))

    def positions(self, tree: TokenTree) -> Tensor:
        """[B, N] the place of every node in its text."""
        return self.cache.lengths[:, None] + tree.depths

    def drafting_cache(
        self, cached: TreeCache | None, num_layers: int, extra: int, shapes: Mapping[int, KeyValueShape] | None = None
    ) -> TreeCache:
        """A drafter's cache: what it kept of the last round, and in the first one an empty cache, `extra` slots longer than the
        target's; the old one, emptied, where its place must not change. `shapes` are of layers that are unlike each other, or
        whose values are not as wide as their keys."""
        if self.round and cached is not None:
            return cached
        batch, length = len(self.counts), self.cache.max_length + extra
        bound = None if self.cache.bound is None else self.cache.bound + 1
        if cached is not None and bound is not None:
            sizes = len(cached.layers), len(cached.lengths), cached.max_length, cached.bound
            if sizes == (num_layers, batch, length, bound):
                cached.reset()
                return cached
        return TreeCache(num_layers, batch, length, self.tokens.device, bound, shapes)

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Features:
        """Run the prompts [B, T], padded on the right, into the empty cache; logits [B, 1, V] follow each."""
        return self.target.prefill(tokens, lengths, self.cache, self.layers, self.texts)

    def verify(self, tree: TokenTree) -> Features:
        """The target's logits and features at every node, from where a partial forward left them if there was one."""
        if self.partial is not None:
            return self.partial.run_tree(tree)
        return self.target.verify(tree, self.cache, self.layers)

    def commit(self, tree: TokenTree, features: Features, accepted: AcceptedPath) -> tuple[Tensor, Tensor]:
        """Keep the accepted path and its tokens: what each text emits [B, P], and how many of these, [B], none where it is
        done. A text that has emitted a stop token or its last one goes on no further."""
        texts = TextBatch(self.tokens, self.cache.lengths, self.active, self.left, self.stops)
        emitted, counts = token_commit(tree.tokens, accepted.path, accepted.counts, accepted.bonus, texts)
        self.keep(features, accepted.path, counts)
        self.partial = None
        return emitted, counts

    def keep(self, features: Features, path: Tensor, counts: Tensor) -> None:
        """Commit to the cache, and hold the features of what was committed for the next draft."""
        self.cache.commit(path, counts)
        self.fresh, self.counts = features.gather(path), counts
        self.round += 1

    def postpone(self, before: tuple[Features, Tensor]) -> None:
        """Undo that the last round counts as one with a draft: what it committed waits beside `before` for the next draft."""
        self.waiting.append((self.fresh, self.counts))
        self.fresh, self.counts = before
        self.round -= 1

    def catch_up(self) -> None:
        """Add what rounds without a draft committed to what the drafter will read."""
        if self.waiting:
            parts = [(self.fresh, self.counts), *self.waiting]
            self.fresh, self.counts = Features.concat_prefixes(parts), sum(counts for _, counts in parts)  # type: ignore[assignment]
            self.waiting = []
