"""A cascade: a cheaper drafter drafts for another one, and may continue where that one ends (CS
Drafting, Chen et al., 2023).

Shapes: B batch, N nodes of the builder, F new ones of them, G tokens guessed ahead, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.drafters.base import drafting_cost
from spectrain.drafters.capabilities import Capabilities, DraftingCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.inner_drafters import DrafterWrapper
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees.base import MAX_NODES
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import AcceptedPath
from spectrain_research.shared.copy_rollout import as_rollout
from spectrain_research.shared.divergence import jensen_shannon
from spectrain_research.shared.nesting import LargerBuilder, build_nestable, union_layers
from spectrain_research.shared.on_policy import find_on_policy


class CascadeCost(DraftingCost):
    drafter: Cascade

    def num_passes(self, depth: float) -> float:
        return drafting_cost(self.drafter.inner).num_passes(
            min(depth, self.drafter.handover or depth)
        )

    def weights(self, target: Target) -> nn.Module:
        return drafting_cost(self.drafter.inner).weights(target)


class Cascade(DrafterWrapper):
    """The drafter `inner`, for which the cheaper drafter `helper` drafts, and which may hand over
    to it.

    Vertical (CS Drafting, section 3; Staged speculative decoding, Spector and Re, 2023): `inner`
    runs a token together with the `ahead` tokens that `helper` guesses to follow it, and a level of
    a tree together with the `ahead` levels that `helper` guesses below it. Its results after
    guesses are used where the tree goes on with them. Its q is the same as alone, in fewer
    forwards, so every rule stays as lossless as for `inner` alone. A helper may be a cascade
    itself.

    Horizontal: tokens deeper than `handover`, and their q, are the helper's.

    Qualifier (PyramidSD, 2025): with `qualify` below 1, a guess x of the helper passes where
    inner's q(x) is at least `qualify` times its largest value; the two values are then exchanged.
    The chain follows guesses that inner finds good enough instead of its first choice. This q' is
    fixed before any token is drawn from it, so rules stay lossless.

    With `divergence` (its equation of the first stage) q' is the helper's whole q wherever the
    Jensen-Shannon divergence of the two is at most that; the second stage is acceptance=fuzzy,
    which is LOSSY.
    """

    saved = SavedFiles(inner=("inner", "helper"))

    def __init__(
        self,
        target: Target,
        # Drafter that the helper drafts for: a run folder, a drafter directory, or a choice, alone
        # or with settings.
        inner: str | dict[str, Any] = "causal",
        # Cheaper drafter that guesses for inner, given in the same way.
        helper: str | dict[str, Any] = "ngram",
        # Number of tokens that the helper guesses per forward of inner; 0 guesses none and allows
        # any family as inner.
        ahead: int = 4,
        # Depth to which inner drafts; deeper tokens are the helper's. Null lets inner draft all
        # depths.
        handover: int | None = None,
        # Share of inner's largest probability at which a guess of the helper passes; 1 accepts only
        # inner's own first choice.
        qualify: float = 1.0,
        # Largest Jensen-Shannon divergence of inner and helper, in nats, at which the helper's
        # distribution takes the place of inner's; null never uses it. Inner must draft from the
        # whole vocabulary.
        divergence: float | None = None,
    ) -> None:
        super().__init__()
        for key, value, minimum in (("ahead", ahead, 0), ("handover", handover, 1)):
            if value is not None and value < minimum:
                raise UserError(f"drafter.{key}={value}: use {minimum} or more")
        if not 0 < qualify <= 1:
            raise UserError(f"drafter.qualify={qualify}: use more than 0 and at most 1")
        if divergence is not None and not divergence >= 0:
            raise UserError(f"drafter.divergence={divergence}: use 0 nats or more")
        if divergence is not None and qualify != 1:
            raise UserError(
                f"drafter.qualify={qualify}: a guess passes by a ratio or by drafter.divergence; "
                "leave out one of them"
            )
        if not ahead and handover is None:
            raise UserError(
                "drafter.ahead=0: the helper would not run; give drafter.handover, or use 1 or more"
            )
        self.inner, inner_description = build_nestable(inner, "inner", target)
        self.helper, helper_description = build_nestable(helper, "helper", target)
        self.saved = replace(
            self.saved, settings={"inner": inner_description, "helper": helper_description}
        )
        if ahead and not self.inner.capabilities.scores_path_at_once:
            raise UserError(
                f"drafter.ahead={ahead}: {inner_description['choice']} cannot run several tokens "
                "of a path in one step, so guesses save nothing; use drafter.ahead=0 with "
                "drafter.handover, or drafter.inner=causal"
            )
        self.ahead, self.handover, self.qualify = ahead, handover, qualify
        self.divergence = divergence
        self.layers = union_layers([self.inner, self.helper])
        inner_capabilities = self.inner.capabilities
        self.capabilities = Capabilities(
            target_training=inner_capabilities.target_training,
            scores_path_at_once=inner_capabilities.scores_path_at_once,
            cost=CascadeCost,
        )

    def draft(self, context: Context) -> Draft:
        larger = replace(context, builder=LargerBuilder(context.builder, self.ahead))
        inner, helper = (
            as_rollout(drafter.draft(larger), context) for drafter in (self.inner, self.helper)
        )
        return Draft(CascadeRollout(self, inner, helper, context))

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        self.inner.commit(context, accepted)
        self.helper.commit(context, accepted)


find_on_policy.register(Cascade, lambda drafter: None)


class IndexedRollout:
    """A rollout with its own index of every node of the builder, [B, N]: guesses are nodes of
    the rollout too.
    """

    def __init__(self, rollout: Rollout) -> None:
        # nodes of the rollout, the root included
        self.rollout = rollout
        self.num_nodes = 1
        self.indices = torch.zeros(0, dtype=torch.int64)

    def start(self) -> Tensor:
        log_q = self.rollout.start()
        self.indices = torch.zeros(len(log_q), 1, dtype=torch.int64, device=log_q.device)
        return log_q

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return log q [B, F, V] after nodes of the builder."""
        log_q = self.rollout.extend(tokens, self.indices.gather(1, parents))
        self.record_indices(self.num_nodes, tokens.shape[1])
        self.num_nodes += tokens.shape[1]
        return log_q

    def extend_guesses(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return log q [B, F, V] after guesses below nodes of the rollout [B, F]."""
        log_q = self.rollout.extend(tokens, parents)
        self.num_nodes += tokens.shape[1]
        return log_q

    def extend_with_guesses(self, levels: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return log q [B, F, V] after nodes of the builder, the first of `levels`, and levels of
        guesses after them. Parents are nodes of the rollout."""
        log_q = self.rollout.extend_levels(levels)
        self.record_indices(self.num_nodes, levels[0][0].shape[1])
        self.num_nodes += sum(tokens.shape[1] for tokens, _ in levels)
        return log_q

    def record_indices(self, first: int, count: int) -> None:
        """Record the indices of the builder's next nodes, which follow each other."""
        new = torch.arange(first, first + count, device=self.indices.device).expand(
            len(self.indices), -1
        )
        self.indices = torch.cat([self.indices, new], dim=1)


@dataclass(frozen=True)
class GuessedLevel:
    """Guesses of one level that inner has run, with inner's results after them."""

    tokens: Tensor  # [B, F]
    parents: Tensor  # [B, F] nodes of inner
    log_q: Tensor  # [B, F, V]
    accept_probs: Tensor | None  # [B, F]
    first_indices: tuple[int, int]  # the node index of the first guess in inner and in the helper

    def find_nodes(self, tokens: Tensor, parents: Tensor) -> Tensor | None:
        """Return the guess [B, N] that each of these nodes is, by its token and its parent in
        inner, or None if some is not a guess."""
        same = (self.tokens[:, None] == tokens[..., None]) & (
            self.parents[:, None] == parents[..., None]
        )
        return same.long().argmax(-1) if bool(same.any(-1).all()) else None


class CascadeRollout(Rollout):
    """One round: inner's log q, already computed where the helper guessed the node, and the
    helper's below `handover`.
    """

    def __init__(self, cascade: Cascade, inner: Rollout, helper: Rollout, context: Context) -> None:
        self.cascade = cascade
        self.inner = IndexedRollout(inner)
        self.helper = IndexedRollout(helper)
        # [B, nodes]
        self.vocab_size = context.target.head.vocab_size
        self.depth = torch.zeros_like(context.root)[:, None]
        self.handover = cascade.handover  # the depth to which inner drafts
        if self.handover is not None and inner.depth_limit is not None:
            self.handover = min(self.handover, inner.depth_limit)
        self.inner_depth = min(context.builder.depth, self.handover or context.builder.depth)
        self.guesses: list[GuessedLevel] = []  # levels of guesses below the newest nodes
        # Of the newest nodes: the index of the first one, inner's log q [B, F, V] after them, and
        # the log q of their paths.
        self.newest: tuple[int, Tensor, Tensor] | None = None
        hands_over = self.handover is not None
        self.draft_ids, self.depth_limit = (
            (None, helper.depth_limit) if hands_over else (inner.draft_ids, inner.depth_limit)
        )

    def start(self) -> Tensor:
        log_q = self.inner.start()
        helper_log_q = self.helper.start()
        self.accept_probs, self.stop_mask = (
            self.inner.rollout.accept_probs,
            self.inner.rollout.stop_mask,
        )
        log_q = self._qualify(log_q, helper_log_q, self.helper.rollout.stop_mask)
        return self._finish(log_q, 0, torch.zeros(log_q.shape[:2], device=log_q.device))

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        depth = self.depth.gather(1, parents) + 1
        scores = self._path_scores(tokens, parents)
        first = self.depth.shape[1]
        self.depth = torch.cat([self.depth, depth], dim=1)
        deepest = int(depth.max())
        if self.guesses and deepest < self.inner_depth:
            guessed = self.guesses[0].find_nodes(tokens, self.inner.indices.gather(1, parents))
            if guessed is not None:
                return self._finish(self._use_guesses(self.guesses.pop(0), guessed), first, scores)
        self.guesses = []
        num_guesses = min(self.cascade.ahead, self.inner_depth - 1 - deepest)
        if num_guesses > 0:
            return self._finish(
                self._run_ahead(tokens, parents, scores, num_guesses), first, scores
            )
        self.newest = None
        helper_log_q = self._widen(self.helper.extend(tokens, parents), self.helper)
        is_handed_over = depth >= (self.handover or MAX_NODES)
        if bool(is_handed_over.all()):
            self.inner.record_indices(0, tokens.shape[1])
            self.accept_probs, self.stop_mask = (
                self.helper.rollout.accept_probs,
                self.helper.rollout.stop_mask,
            )
            return helper_log_q
        log_q = self._qualify(
            self.inner.extend(tokens, parents), helper_log_q, self.helper.rollout.stop_mask
        )
        self.accept_probs = self.inner.rollout.accept_probs
        inner_stop = self.inner.rollout.stop_mask
        helper_stop = self.helper.rollout.stop_mask
        no_stop = torch.zeros_like(is_handed_over)
        self.stop_mask = torch.where(
            is_handed_over,
            no_stop if helper_stop is None else helper_stop,
            no_stop if inner_stop is None else inner_stop,
        )
        return (
            torch.where(is_handed_over[..., None], helper_log_q, self._widen(log_q, self.inner))
            if self.handover
            else log_q
        )

    def _finish(self, log_q: Tensor, first: int, scores: Tensor) -> Tensor:
        """Remember inner's log q after the newest nodes, and return it."""
        self.newest = first, log_q, scores
        return self._widen(log_q, self.inner)

    def _path_scores(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the log q [B, F] of the paths to new nodes, as far as their parents are the
        newest nodes; else 0.
        """
        if self.newest is None or tokens.shape[1] == 1:
            return torch.zeros(tokens.shape, device=tokens.device)
        first, log_q, scores = self.newest
        local = (parents - first).clamp(min=0)
        ids = self.inner.rollout.draft_ids
        index = tokens if ids is None else torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
        after = log_q.gather(1, local[..., None].expand(-1, -1, log_q.shape[-1])).gather(
            -1, index[..., None]
        )[..., 0]
        return torch.where(parents >= first, scores.gather(1, local) + after, 0.0)

    def _use_guesses(self, level: GuessedLevel, guessed: Tensor) -> Tensor:
        """Return inner's log q [B, F, V] after guesses [B, F] of a level that have become nodes
        of the builder.
        """
        for source, first in zip((self.inner, self.helper), level.first_indices):
            source.indices = torch.cat([source.indices, first + guessed], dim=1)
        self.accept_probs = (
            None if level.accept_probs is None else level.accept_probs.gather(1, guessed)
        )
        self.stop_mask = None
        return level.log_q.gather(1, guessed[..., None].expand(-1, -1, level.log_q.shape[-1]))

    def _run_ahead(
        self, tokens: Tensor, parents: Tensor, scores: Tensor, max_levels: int
    ) -> Tensor:
        """Return log q [B, F, V] after nodes [B, F]; inner runs them together with levels of the
        helper's guesses after them.

        A level of guesses holds as many nodes as the builder's: those with the best paths by
        inner's `scores` [B, F] and the helper's log q, which a dynamic tree would go on with. There
        are at most `max_levels` levels, and none where the helper has no draft.
        """
        helper = self.helper
        width = tokens.shape[1]
        inner_nodes = self.inner.indices.gather(1, parents)
        helper_log_q = [helper.extend(tokens, parents)]
        stop_masks = [helper.rollout.stop_mask]
        levels = [(tokens, inner_nodes)]
        firsts = [(self.inner.num_nodes, helper.num_nodes - width)]
        while len(levels) <= max_levels and not (
            stop_masks[-1] is not None and bool(stop_masks[-1].all())
        ):
            # [B, F, K]
            best = helper_log_q[-1].topk(min(width, helper_log_q[-1].shape[-1]), dim=-1)
            scores, order = (scores[..., None] + best.values).flatten(1).topk(width, dim=1)
            guesses = helper.rollout.to_target_ids(best.indices.flatten(1).gather(1, order))
            local = order // best.indices.shape[-1]
            levels.append((guesses, firsts[-1][0] + local))
            helper_log_q.append(helper.extend_guesses(guesses, firsts[-1][1] + local))
            stop_masks.append(helper.rollout.stop_mask)
            firsts.append((firsts[-1][0] + width, helper.num_nodes - width))
        stop_mask = (
            None
            if stop_masks[0] is None
            else torch.cat([mask for mask in stop_masks if mask is not None], dim=1)
        )
        log_q = self._qualify(
            self.inner.extend_with_guesses(levels), torch.cat(helper_log_q, dim=1), stop_mask
        )
        accept_probs = self.inner.rollout.accept_probs
        no_estimates: list[Tensor | None] = [None] * len(levels)
        estimates = no_estimates if accept_probs is None else list(accept_probs.split(width, dim=1))
        parts = log_q.split(width, dim=1)
        self.guesses = [
            GuessedLevel(*level, part, estimate, first)
            for level, part, estimate, first in zip(
                levels[1:], parts[1:], estimates[1:], firsts[1:]
            )
        ]
        self.accept_probs = estimates[0]
        self.stop_mask = None
        return parts[0]

    def _qualify(self, log_q: Tensor, helper_log_q: Tensor, stop_mask: Tensor | None) -> Tensor:
        """Return inner's log q [B, F, V], with its largest value exchanged for the helper's
        first choice where that passes.
        """
        if self.cascade.divergence is not None:
            return self._trust_helper(log_q, helper_log_q, stop_mask, self.cascade.divergence)
        if self.cascade.qualify == 1:
            return log_q
        guess = self.helper.rollout.to_target_ids(helper_log_q.argmax(-1, keepdim=True))
        in_vocabulary = guess < log_q.shape[-1]
        if (ids := self.inner.rollout.draft_ids) is not None:
            index = torch.searchsorted(ids, guess).clamp(max=len(ids) - 1)
            in_vocabulary = ids[index] == guess
            guess = index
        guess = guess.clamp(max=log_q.shape[-1] - 1)
        best = log_q.max(-1, keepdim=True)
        guess_log_q = log_q.gather(-1, guess)
        passes = in_vocabulary & (guess_log_q >= best.values + log(self.cascade.qualify))
        if stop_mask is not None:
            passes = passes & ~stop_mask[..., None]
        exchanged = log_q.scatter(-1, best.indices, guess_log_q).scatter(-1, guess, best.values)
        return torch.where(passes, exchanged, log_q)

    def _trust_helper(
        self, log_q: Tensor, helper_log_q: Tensor, stop_mask: Tensor | None, divergence: float
    ) -> Tensor:
        """Return inner's log q [B, F, V], replaced by the helper's where the two hardly diverge.

        The helper's must be a distribution over inner's tokens; where it drafts nothing, it is
        not used.
        """
        if self.inner.rollout.draft_ids is not None:
            raise UserError(
                "drafter.divergence: drafter.inner drafts from a part of the vocabulary, so its "
                "distribution cannot be compared with the helper's; use drafter.inner=causal"
            )
        helper_log_q = self._spread(helper_log_q, self.helper)[..., : log_q.shape[-1]]
        is_close = jensen_shannon(log_q.exp(), helper_log_q.exp()) <= divergence
        is_close = is_close & ((helper_log_q.exp().sum(-1) - 1).abs() < 1e-3)
        if stop_mask is not None:
            is_close = is_close & ~stop_mask
        return torch.where(is_close[..., None], helper_log_q, log_q)

    def _widen(self, log_q: Tensor, source: IndexedRollout) -> Tensor:
        """Return a drafter's log q [B, F, V], over the target's ids where both drafters draft."""
        return log_q if self.handover is None else self._spread(log_q, source)

    def _spread(self, log_q: Tensor, source: IndexedRollout) -> Tensor:
        """Return a drafter's log q [B, F, V] over the target's ids."""
        ids = source.rollout.draft_ids
        if ids is None and log_q.shape[-1] == self.vocab_size:
            return log_q
        ids = torch.arange(log_q.shape[-1], device=log_q.device) if ids is None else ids
        return log_q.new_full((*log_q.shape[:-1], self.vocab_size), float("-inf")).index_copy(
            -1, ids, log_q
        )
