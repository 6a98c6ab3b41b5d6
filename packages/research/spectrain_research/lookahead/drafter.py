"""Lookahead decoding (Fu et al., 2024): the target drafts for itself by Jacobi iteration. Needs no
training.

Shapes: B batch, W columns of the window, N tokens of an n-gram, M nodes to verify (root included),
V vocabulary.
"""

from __future__ import annotations

import torch

from spectrain.copying.trie import Trie
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities, DraftingCost
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.randomness import DRAFT, keyed_generator
from spectrain.trees.base import TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.shared.phrase_pool import PhrasePool


class LookaheadCost(DraftingCost):
    def extra_nodes(self, builder: TreeBuilder) -> int:
        return int(self.drafter.window_nodes)


class Lookahead(Drafter):
    """Lookahead decoding (Fu et al., 2024, section 3): one forward verifies n-grams and makes new
    ones.

    A round verifies the newest `guesses` n-grams of the pool that begin with the root's token,
    merged into a trie below the root, within the builder's depth and budget. The window of W
    columns and N - 1 levels is added to it, so the target runs up to budget + W (N - 1) nodes:
    level 0 is a chain below the root, and level j of a column is the child of its level j - 1. Each
    level is the target's prediction from the level before it, one round ago; the first ones are
    random tokens of the prompt. A column with its newest prediction is an n-gram for the pool. With
    `pool_from_prompt` the pool also has the n-grams of the prompt and of the answer.

    However many tokens a round emits, the window moves by one, as in the authors' program: columns
    that the text has passed continue as guesses about later text. Replacing them by columns of
    random tokens was tried on the tiny target (W 5, N 4, G 5, 10 prompts x 64 tokens, no prompt
    pool): 1.61 instead of 1.74 tokens per round. In the paper the root is column 0, whose n-gram
    begins in existing text; here all W columns lie ahead of it.
    """

    capabilities = Capabilities(is_copier=True, nestable=False, cost=LookaheadCost)

    def __init__(
        self,
        target: Target,
        # Number of columns of the window, which are guessed tokens in parallel.
        window: int = 5,
        # Number of tokens of an n-gram.
        ngram: int = 4,
        # Largest number of n-grams that a round verifies, and that the pool keeps per first token.
        guesses: int = 5,
        # Whether the pool also has the n-grams of the prompt and of the answer.
        pool_from_prompt: bool = True,
    ) -> None:
        super().__init__()
        for key, value, minimum in (
            ("window", window, 1),
            ("ngram", ngram, 2),
            ("guesses", guesses, 1),
        ):
            if value < minimum:
                raise UserError(f"drafter.{key}={value}: use {minimum} or more")
        self.window = window
        self.ngram = ngram
        self.max_guesses = guesses
        self.pool_from_prompt = pool_from_prompt
        self.window_nodes = window * (ngram - 1)
        self.sequences: list[LookaheadText] = []
        # [B, W] the target's most likely token after every column
        self.answers: list[list[int]] = []

    def draft(self, context: Context) -> Draft:
        if context.round == 0:
            lengths = (context.cache.lengths + 1).tolist()
            texts = [tokens[:length] for tokens, length in zip(context.tokens.tolist(), lengths)]
            self.sequences = [
                LookaheadText(self, row, text)
                for row, text in zip(context.sequence_ids.tolist(), texts)
            ]
        else:
            for sequence, tokens, count in zip(
                self.sequences, context.next_tokens.tolist(), context.num_new.tolist()
            ):
                sequence.append_tokens(tokens[:count])
        return Draft(
            continuations=[
                Trie.from_continuations(sequence.find_guesses()) for sequence in self.sequences
            ],
            add_mask_nodes=self._add_window,
        )

    def verify(self, context: Context, tree: TokenTree) -> Features:
        features = super().verify(context, tree)
        assert features.logits is not None
        # the last level is the last W nodes
        self.answers = features.logits[:, -self.window :].argmax(-1).tolist()
        return features

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        for sequence, answers, count in zip(self.sequences, self.answers, context.num_new.tolist()):
            if count:  # 0 in rows that are done
                sequence.step_window(answers)

    def _add_window(self, tree: TokenTree) -> TokenTree:
        """Append the window, level by level, to the guesses [B, M]: [B, M + W (N - 1)]."""
        batch, num_verified = tree.tokens.shape
        device = tree.tokens.device
        indices = torch.arange(self.window_nodes, device=device) + num_verified
        parents = torch.cat(
            [indices.new_zeros(1), indices[: self.window - 1], indices[: -self.window]]
        ).expand(batch, -1)
        window = [
            [column[level] for level in range(self.ngram - 1) for column in sequence.columns]
            for sequence in self.sequences
        ]
        tokens = torch.cat([tree.tokens, torch.tensor(window, device=device)], dim=1)
        ones = torch.ones_like(parents, dtype=torch.bool)
        valid = torch.cat([tree.valid, ones], dim=1)
        emitted = torch.cat([tree.can_emit, ~ones], dim=1)
        return TokenTree(tokens, torch.cat([tree.parents, parents], dim=1), valid, emitted)


class LookaheadText:
    """One row: its window as W columns of N - 1 tokens, and its pool of n-grams by their first
    token, newest last.
    """

    def __init__(self, options: Lookahead, key: int, text: list[int]) -> None:
        self.options = options
        self.pool = PhrasePool(options.ngram, options.max_guesses)
        self.root = text[-1]
        self.num_steps = 0  # Jacobi steps made
        shape = (options.window, options.ngram - 1)
        picks = torch.randint(len(text), shape, generator=keyed_generator(DRAFT, 0, key, len(text)))
        self.columns = [[text[pick] for pick in column] for column in picks.tolist()]
        self.append_tokens(text)

    def append_tokens(self, tokens: list[int]) -> None:
        """Read new tokens of the text, whose own n-grams may enter the pool."""
        if self.options.pool_from_prompt:
            self.pool.add_text(tokens)
        self.root = [self.root, *tokens][-1]

    def step_window(self, answers: list[int]) -> None:
        """Make one Jacobi step: a column and the target's answer after it are an n-gram; the
        column drops its first token.
        """
        self.num_steps += 1
        for index, answer in enumerate(answers):
            ngram = (*self.columns[index], answer)
            # before that, it holds tokens that were drawn at random
            if self.num_steps >= self.options.ngram:
                self.pool.add_phrase(ngram)
            self.columns[index] = list(ngram[1:])

    def find_guesses(self) -> list[list[int]]:
        """Return continuations of the root: the n-grams of the pool that begin with its token,
        the newest first.
        """
        return self.pool.find_continuations(self.root, self.options.max_guesses)
