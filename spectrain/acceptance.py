"""Acceptance rules: which path of a verified tree is kept, and which token follows it.

Shapes: B batch, N nodes, P path length, V vocabulary. A rule says in `lossless` whether its output is the target's.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UserError
from .tree import TokenTree


@dataclass(frozen=True)
class Accepted:
    """One round's result: `counts[b]` nodes of `path[b]` are kept, the root first, and `bonus[b]` follows them."""

    path: Tensor  # [B, P] node indices, ascending, padded with the last one
    counts: Tensor  # [B] nodes kept, the root included: so many tokens were emitted, the bonus included
    bonus: Tensor  # [B] the next root

    def emitted(self, tree: TokenTree) -> Tensor:
        """[B, P] the tokens of the round: the kept nodes after the root, then the bonus, then padding."""
        following = torch.cat([self.path[:, 1:], self.path[:, -1:]], dim=1)
        tokens = tree.tokens.gather(1, following)
        return tokens.scatter(1, (self.counts - 1)[:, None], self.bonus[:, None])


def walk(tree: TokenTree, choice: Tensor) -> Accepted:
    """Follow `choice` [B, N], the token that the target wants after each node, from the root as deep as the tree goes.

    A node is kept where it and all of its ancestors carry the token that their parent's choice names; at most one path
    can, for siblings differ.
    """
    wanted = choice.gather(1, tree.parents.clamp(min=0))
    match = (tree.tokens == wanted) & tree.valid & tree.emitted
    match[:, 0] = True
    kept = (match[:, None] | ~tree.ancestors).all(-1)
    counts = kept.long().mul(tree.depths + 1).amax(-1)
    last = kept.long().mul(tree.depths + 1).argmax(-1)
    on_path = tree.ancestors.gather(1, last[:, None, None].expand(-1, 1, tree.tokens.shape[1]))[:, 0]
    index = torch.arange(tree.tokens.shape[1], device=choice.device)
    order = torch.where(on_path, index, index + len(index)).argsort(-1)[:, : int(counts.max())]
    path = torch.where(torch.arange(order.shape[1], device=choice.device) < counts[:, None], order, last[:, None])
    return Accepted(path, counts, choice.gather(1, last[:, None])[:, 0])


class AcceptanceRule(ABC):
    """What every rule does: judge a tree by the target's logits."""

    lossless: bool
    name: str

    @abstractmethod
    def choose(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The target's token [B, N] after nodes at `positions` [B, N] of the sequences `rows` [B]."""

    def __call__(self, tree: TokenTree, logits: Tensor, rows: Tensor, positions: Tensor) -> Accepted:
        """Judge a tree by `logits` [B, N, V]."""
        return walk(tree, self.choose(logits, rows, positions))


class Greedy(AcceptanceRule):
    """Keep what equals the target's most likely token; the output is the target's greedy output."""

    lossless = True
    name = "greedy"

    def choose(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return logits.argmax(-1)


class Match(AcceptanceRule):
    """Sample-and-match: draw the target's token at every node, keep the path that agrees with the draws.

    Lossless for any tree that was built without looking at these draws, and the safe rule for top-k, re-ranked and
    pruned trees. Each draw is keyed by seed, sequence and position, so a run repeats exactly, and drafted decoding emits
    the very tokens that autoregressive decoding draws with the same seed.
    """

    lossless = True
    name = "match"

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> None:
        if temperature <= 0:
            raise UserError(f"acceptance.temperature={temperature}: use more than 0, or acceptance=greedy")
        if not 0 < top_p <= 1:
            raise UserError(f"acceptance.top_p={top_p}: use more than 0 and at most 1")
        self.temperature, self.top_k, self.top_p, self.seed = temperature, top_k, top_p, seed

    def choose(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        scores = shape_logits(logits, self.temperature, self.top_k, self.top_p)
        noise = torch.empty_like(scores)
        for b, row in enumerate(rows.tolist()):
            by_position: dict[int, Tensor] = {}
            for n, position in enumerate(positions[b].tolist()):
                if position not in by_position:
                    by_position[position] = gumbel(scores.shape[-1], self.seed, row, position)
                noise[b, n] = by_position[position]
        return (scores + noise).argmax(-1)


def shape_logits(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Logits after temperature, top-k and top-p, with -inf where a token is cut. The same for every use of p."""
    scores = logits.float() / temperature
    if top_k > 0:
        kth = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if top_p < 1:
        ordered, index = scores.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        scores = scores.masked_fill((before >= top_p).gather(-1, index.argsort(-1)), float("-inf"))
    return scores


def gumbel(size: int, seed: int, row: int, position: int) -> Tensor:
    """Standard Gumbel noise [size] that depends on nothing but its three keys."""
    key = (seed * 0x9E3779B97F4A7C15 + row * 0xBF58476D1CE4E5B9 + position * 0x94D049BB133111EB) % (1 << 63)
    generator = torch.Generator().manual_seed(key)
    return -torch.empty(size).exponential_(generator=generator).log()
