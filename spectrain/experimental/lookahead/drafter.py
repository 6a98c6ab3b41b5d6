"""Lookahead decoding (Fu et al., 2024): the target drafts for itself by Jacobi iteration. Needs no training.

Shapes: B batch, W columns of the window, N tokens of an n-gram, M nodes to verify (root included), V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities, DraftingCost
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.randomness import DRAFT, keyed_generator
from spectrain.trees.base import Draft, TreeBuilder
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain.trees.trie import Trie

if TYPE_CHECKING:
    from spectrain.models.target import Target


class LookaheadCost(DraftingCost):
    def extra_nodes(self, builder: TreeBuilder) -> int:
        return int(self.drafter.window_nodes)


class Lookahead(Drafter):
    """Lookahead decoding (Fu et al., 2024, section 3): one forward verifies known n-grams and makes new ones.

    Verified are the newest `guesses` n-grams of the pool that begin with the root's token, merged into a trie below the
    root, within the builder's depth and budget. The window of W columns and N - 1 levels comes on top, so that the target
    runs up to budget + W (N - 1) nodes: level 0 is a chain below the root, and level j of a column is the child of its
    level j - 1. Each level is the target's answer to the one before it, a round ago; the first ones are random tokens of
    the prompt. A column with its newest answer is an n-gram for the pool. With `pool_from_prompt` those of the prompt and
    of the answer are there too.

    However many tokens a round emits, the window moves on by one, as in the authors' program: the columns that the text
    has overtaken go on as guesses about what follows. Dropping them for columns of random tokens was tried on the tiny
    target (W 5, N 4, G 5, 10 prompts x 64 tokens, no prompt pool): 1.61 instead of 1.74 tokens a round. The paper counts
    the root as column 0, whose n-gram begins in text that is already there; here all W columns lie ahead of it.
    """

    capabilities = Capabilities(is_copier=True, nestable=False)
    _cost_type = LookaheadCost

    def __init__(
        self, target: Target, window: int = 5, ngram: int = 4, guesses: int = 5, pool_from_prompt: bool = True
    ) -> None:
        super().__init__()
        for key, value, least in (("window", window, 1), ("ngram", ngram, 2), ("guesses", guesses, 1)):
            if value < least:
                raise UserError(f"drafter.{key}={value}: use {least} or more")
        self.window, self.ngram, self.guesses, self.pool_from_prompt = window, ngram, guesses, pool_from_prompt
        self.window_nodes = window * (ngram - 1)
        self.sequences: list[Sequence] = []
        self.answers: list[list[int]] = []  # [B, W] the target's most likely token after every column

    def draft(self, context: Context) -> Draft:
        if context.round == 0:
            lengths = (context.cache.lengths + 1).tolist()
            texts = [tokens[:length] for tokens, length in zip(context.tokens.tolist(), lengths)]
            self.sequences = [Sequence(self, row, text) for row, text in zip(context.sequence_ids.tolist(), texts)]
        else:
            for sequence, tokens, count in zip(self.sequences, context.following.tolist(), context.counts.tolist()):
                sequence.follow(tokens[:count])
        return Draft(
            continuations=[Trie.from_continuations(sequence.guesses()) for sequence in self.sequences],
            add_mask_nodes=self._with_window,
        )

    def verify(self, context: Context, tree: TokenTree) -> Features:
        seen = super().verify(context, tree)
        assert seen.logits is not None
        self.answers = seen.logits[:, -self.window :].argmax(-1).tolist()  # the last level is the last W nodes
        return seen

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        for sequence, answers, count in zip(self.sequences, self.answers, context.counts.tolist()):
            if count:  # 0 in rows that are done
                sequence.iterate(answers)

    def _with_window(self, tree: TokenTree) -> TokenTree:
        """The guesses [B, M], and behind them the window, level by level: [B, M + W (N - 1)]."""
        batch, num_verified = tree.tokens.shape
        device = tree.tokens.device
        places = torch.arange(self.window_nodes, device=device) + num_verified
        above = torch.cat([places.new_zeros(1), places[: self.window - 1], places[: -self.window]]).expand(batch, -1)
        window = [[column[level] for level in range(self.ngram - 1) for column in one.columns] for one in self.sequences]
        tokens = torch.cat([tree.tokens, torch.tensor(window, device=device)], dim=1)
        every = torch.ones_like(above, dtype=torch.bool)
        valid, emitted = torch.cat([tree.valid, every], dim=1), torch.cat([tree.can_emit, ~every], dim=1)
        return TokenTree(tokens, torch.cat([tree.parents, above], dim=1), valid, emitted)


class Sequence:
    """One row: its window as W columns of N - 1 tokens, and its pool of n-grams by their first token, newest last."""

    def __init__(self, options: Lookahead, key: int, text: list[int]) -> None:
        self.options = options
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.tail: list[int] = []  # the newest N - 1 tokens of the text, the root last
        self.num_steps = 0  # Jacobi steps made
        shape = (options.window, options.ngram - 1)
        picks = torch.randint(len(text), shape, generator=keyed_generator(DRAFT, 0, key, len(text)))
        self.columns = [[text[pick] for pick in column] for column in picks.tolist()]
        self.follow(text)

    def follow(self, tokens: list[int]) -> None:
        """Read new tokens of the text, whose own n-grams may enter the pool."""
        size, text = self.options.ngram, self.tail + tokens
        if self.options.pool_from_prompt:
            for end in range(size, len(text) + 1):
                self._add(tuple(text[end - size : end]))
        self.tail = text[-(size - 1) :]

    def iterate(self, answers: list[int]) -> None:
        """One Jacobi step: each column, with the target's answer behind it, is an n-gram, and drops its oldest token."""
        self.num_steps += 1
        for index, answer in enumerate(answers):
            ngram = (*self.columns[index], answer)
            if self.num_steps >= self.options.ngram:  # before that, it holds tokens that were drawn at random
                self._add(ngram)
            self.columns[index] = list(ngram[1:])

    def guesses(self) -> list[list[int]]:
        """What may follow the root, by the n-grams of the pool that begin with its token, the newest first."""
        return [list(ngram[1:]) for ngram in reversed(self.pool.get(self.tail[-1], []))]

    def _add(self, ngram: tuple[int, ...]) -> None:
        """Remember an n-gram as the newest of those with its first token, of which the newest `guesses` are kept."""
        known = self.pool.setdefault(ngram[0], [])
        if ngram in known:
            known.remove(ngram)
        known.append(ngram)
        del known[: -self.options.guesses]
