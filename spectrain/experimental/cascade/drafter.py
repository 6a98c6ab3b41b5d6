"""A drafter that is drafted for, and one that goes on where it ends (CS Drafting, Chen et al., 2023).

Shapes: B batch, N nodes given, F new ones of them, G tokens guessed ahead, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from math import log
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spectrain.drafters.capabilities import Capabilities, DraftingCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.copy_rollout import as_rollout
from spectrain.drafters.layers.inner_drafters import DrafterWrapper, build_nestable, union_layers
from spectrain.errors import UserError
from spectrain.trees.base import MAX_NODES, Draft, Rollout, TreeBuilder, WrappedBuilder
from spectrain.trees.token_tree import AcceptedPath

if TYPE_CHECKING:
    from spectrain.models.target import Target


class CascadeCost(DraftingCost):
    drafter: Cascade

    def num_passes(self, depth: float) -> float:
        return self.drafter.inner.cost.num_passes(min(depth, self.drafter.handover or depth))

    def weights(self, target: Target) -> nn.Module:
        return self.drafter.inner.cost.weights(target)


class Cascade(DrafterWrapper):
    """The drafter `inner`, for which the cheaper drafter `helper` drafts, and which may hand over to it.

    Vertical (CS Drafting, section 3; Staged speculative decoding, Spector and Re, 2023): of a chain, `inner` runs a token
    together with the `ahead` tokens that `helper` guesses to follow it, and what it says after a guess counts where the chain
    goes along it. So it says what it would say alone, in fewer forwards: its q is the same, and every rule stays as
    lossless as it is for `inner` alone. A helper may be a cascade itself.

    Horizontal: tokens deeper than `handover` are the helper's alone, q too.

    Qualifier (PyramidSD, 2025): with `qualify` below 1, a guess x of the helper passes where inner's q(x) is at least
    `qualify` times its largest value, which then changes places with q(x). So the chain goes along blocks that inner finds
    good enough, and not its own choice. This q' is fixed before anything is drawn from it, so rules are still lossless to the
    target: what passes the qualifier, the target verifies by the rule that `acceptance` names.
    """

    saved = SavedFiles(inner=("inner", "helper"))
    _cost_type = CascadeCost

    def __init__(
        self,
        target: Target,
        inner: str | dict[str, Any] = "causal",  # a run folder or drafter directory, or a choice, alone or with settings
        helper: str | dict[str, Any] = "ngram",  # the same
        ahead: int = 4,  # tokens that the helper guesses for a forward of inner; 0: none, and inner may be of any family
        handover: int | None = None,  # the depth to which inner drafts, or less where it cannot; null: all of it
        qualify: float = 1.0,  # share of inner's largest probability that lets a guess pass; 1: its own choice alone
    ) -> None:
        super().__init__()
        for key, value, least in (("ahead", ahead, 0), ("handover", handover, 1)):
            if value is not None and value < least:
                raise UserError(f"drafter.{key}={value}: use {least} or more")
        if not 0 < qualify <= 1:
            raise UserError(f"drafter.qualify={qualify}: use more than 0 and at most 1")
        if not ahead and handover is None:
            raise UserError("drafter.ahead=0: the helper has nothing to do; give drafter.handover, or use 1 or more")
        self.inner, first = build_nestable(inner, "inner", target)
        self.helper, second = build_nestable(helper, "helper", target)
        self.saved = replace(self.saved, settings={"inner": first, "helper": second})
        if ahead and not self.inner.capabilities.scores_path_at_once:
            raise UserError(
                f"drafter.ahead={ahead}: {first['choice']} cannot run several tokens of a path in one step, so nothing can be "
                "drafted for it; use drafter.ahead=0 with drafter.handover, or drafter.inner=causal"
            )
        self.ahead, self.handover, self.qualify = ahead, handover, qualify
        self.layers = union_layers([self.inner, self.helper])
        inner_capabilities = self.inner.capabilities
        self.capabilities = Capabilities(
            target_training=inner_capabilities.target_training, scores_path_at_once=inner_capabilities.scores_path_at_once
        )

    def draft(self, context: Context) -> Draft:
        room = replace(context, builder=Roomier(context.builder, self.ahead))
        mine, theirs = (as_rollout(drafter.draft(room), context) for drafter in (self.inner, self.helper))
        return Draft(CascadeRollout(self, mine, theirs, context))

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        self.inner.commit(context, accepted)
        self.helper.commit(context, accepted)


class Roomier(WrappedBuilder):
    """Another builder, to a drafter inside: guesses are given to a rollout beside the nodes that the builder gives."""

    def __init__(self, builder: TreeBuilder, ahead: int) -> None:
        super().__init__(builder)
        self.max_drafted = (builder.max_drafted + 1) * (1 + ahead)


class Numbered:
    """A rollout, and its own number of every node that the builder gave, [B, N]: guesses are nodes of it too."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout, self.given = rollout, 1  # nodes given, the root one of them
        self.numbers = torch.zeros(0, dtype=torch.int64)

    def start(self) -> Tensor:
        said = self.rollout.start()
        self.numbers = torch.zeros(len(said), 1, dtype=torch.int64, device=said.device)
        return said

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B, F, V] after nodes that the builder gives."""
        said = self.rollout.extend(tokens, self.numbers.gather(1, parents))
        self.note(self.given, tokens.shape[1])
        self.given += tokens.shape[1]
        return said

    def beyond(self, token: Tensor) -> Tensor:
        """[B, 1, V] after a guess [B, 1] below the node given last."""
        said = self.rollout.extend(token, torch.full_like(token, self.given - 1))
        self.given += 1
        return said

    def follow(self, path: Tensor, parents: Tensor) -> Tensor:
        """[B, 1 + G, V] after a node that the builder gives, below `parents` [B, 1], and guesses behind it."""
        said = self.rollout.extend_path(path, self.numbers.gather(1, parents)[:, 0], self.given)
        self.note(self.given)
        self.given += path.shape[1]
        return said

    def note(self, first: int, count: int = 1) -> None:
        """The builder's next nodes have these numbers."""
        new = torch.arange(first, first + count, device=self.numbers.device).expand(len(self.numbers), -1)
        self.numbers = torch.cat([self.numbers, new], dim=1)


@dataclass(frozen=True)
class Ahead:
    """A guess that inner has run."""

    token: Tensor  # [B, 1]
    said: Tensor  # [B, 1, V] after it
    survival: Tensor | None  # [B, 1]
    numbers: tuple[int, int]  # of it, in inner and in the helper


class CascadeRollout(Rollout):
    """One round: inner's log q, which is ready where the helper has guessed the node; below `handover` the helper's."""

    def __init__(self, cascade: Cascade, inner: Rollout, helper: Rollout, context: Context) -> None:
        self.cascade, self.inner, self.helper = cascade, Numbered(inner), Numbered(helper)
        self.vocab_size, self.depth = context.target.head.vocab_size, torch.zeros_like(context.root)[:, None]  # [B, nodes]
        self.handover = cascade.handover  # the depth to which inner drafts, which is no more than it can
        if self.handover is not None and inner.depth_limit is not None:
            self.handover = min(self.handover, inner.depth_limit)
        self.reach = min(context.builder.depth, self.handover or context.builder.depth)  # of what inner is asked after
        self.ready: list[Ahead] = []  # guesses below the newest node
        both = self.handover is not None
        self.draft_ids, self.depth_limit = (None, helper.depth_limit) if both else (inner.draft_ids, inner.depth_limit)

    def start(self) -> Tensor:
        said, theirs = self.inner.start(), self.helper.start()
        self.accept_probs, self.stop_mask = self.inner.rollout.accept_probs, self.inner.rollout.stop_mask
        return self._told(self._qualified(said, theirs, self.helper.rollout.stop_mask), self.inner)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        is_newest = tokens.shape[1] == 1 and bool((parents == self.depth.shape[1] - 1).all())
        depth = self.depth.gather(1, parents) + 1
        self.depth = torch.cat([self.depth, depth], dim=1)
        deepest = int(depth.max())
        if is_newest and self.ready and deepest < self.reach and torch.equal(self.ready[0].token, tokens):
            return self._told(self._take(self.ready.pop(0)), self.inner)
        self.ready = []
        guesses = min(self.cascade.ahead, self.reach - 1 - deepest)
        if tokens.shape[1] == 1 and guesses > 0:
            return self._told(self._run_ahead(tokens, parents, guesses), self.inner)
        theirs = self._told(self.helper.extend(tokens, parents), self.helper)
        deep = depth >= (self.handover or MAX_NODES)
        if bool(deep.all()):
            self.inner.note(0, tokens.shape[1])
            self.accept_probs, self.stop_mask = self.helper.rollout.accept_probs, self.helper.rollout.stop_mask
            return theirs
        said = self._qualified(self.inner.extend(tokens, parents), theirs, self.helper.rollout.stop_mask)
        self.accept_probs = self.inner.rollout.accept_probs
        mine, yours = self.inner.rollout.stop_mask, self.helper.rollout.stop_mask
        nothing = torch.zeros_like(deep)
        self.stop_mask = torch.where(deep, nothing if yours is None else yours, nothing if mine is None else mine)
        return torch.where(deep[..., None], theirs, self._told(said, self.inner)) if self.handover else said

    def _take(self, guess: Ahead) -> Tensor:
        """What inner said of a guess that the builder has now given."""
        self.inner.note(guess.numbers[0])
        self.helper.note(guess.numbers[1])
        self.accept_probs, self.stop_mask = guess.survival, None
        return guess.said

    def _run_ahead(self, tokens: Tensor, parents: Tensor, most: int) -> Tensor:
        """[B, 1, V] after a node [B, 1], which inner runs together with what the helper guesses to follow it, at most `most`
        tokens and none where the helper knows nothing."""
        helper = self.helper
        path, theirs, silent = [tokens], [helper.extend(tokens, parents)], [helper.rollout.stop_mask]
        first = self.inner.given, helper.given - 1
        while len(path) <= most and not (silent[-1] is not None and bool(silent[-1].all())):
            path.append(helper.rollout.to_target_ids(theirs[-1].argmax(-1)))
            theirs.append(helper.beyond(path[-1]))
            silent.append(helper.rollout.stop_mask)
        closed = None if silent[0] is None else torch.cat([one for one in silent if one is not None], dim=1)
        said = self._qualified(self.inner.follow(torch.cat(path, dim=1), parents), torch.cat(theirs, dim=1), closed)
        survival = self.inner.rollout.accept_probs
        kept = [None] * len(path) if survival is None else list(survival.split(1, dim=1))
        nodes = list(zip(path, said.split(1, dim=1), kept, zip(count(first[0]), count(first[1]))))
        self.ready = [Ahead(*node) for node in nodes[1:]]
        self.accept_probs, self.stop_mask = kept[0], None
        return nodes[0][1]

    def _qualified(self, said: Tensor, theirs: Tensor, closed: Tensor | None) -> Tensor:
        """Inner's log q [B, F, V] with the helper's first choice in the place of its own, where that passes."""
        if self.cascade.qualify == 1:
            return said
        guess = self.helper.rollout.to_target_ids(theirs.argmax(-1, keepdim=True))
        known = guess < said.shape[-1]
        if (ids := self.inner.rollout.draft_ids) is not None:
            place = torch.searchsorted(ids, guess).clamp(max=len(ids) - 1)
            known, guess = ids[place] == guess, place
        guess = guess.clamp(max=said.shape[-1] - 1)
        best, mine = said.max(-1, keepdim=True), said.gather(-1, guess)
        passes = known & (mine >= best.values + log(self.cascade.qualify))
        if closed is not None:
            passes = passes & ~closed[..., None]
        swapped = said.scatter(-1, best.indices, mine).scatter(-1, guess, best.values)
        return torch.where(passes, swapped, said)

    def _told(self, said: Tensor, source: Numbered) -> Tensor:
        """Log q [B, F, V] of a drafter; over the target's ids where both speak."""
        ids = source.rollout.draft_ids
        if self.handover is None or (ids is None and said.shape[-1] == self.vocab_size):
            return said
        ids = torch.arange(said.shape[-1], device=said.device) if ids is None else ids
        return said.new_full((*said.shape[:-1], self.vocab_size), float("-inf")).index_copy(-1, ids, said)
