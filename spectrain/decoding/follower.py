"""A drafter that follows a text by itself, apart from the loop: what it drafts behind a text, and behind the texts that a
verification of its draft is likely to leave. Shapes: V draft vocabulary, D drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.models.features import Features
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.base import Draft, Rollout
from spectrain.trees.chain import Chain
from spectrain.trees.token_tree import Accepted

from .loop import empty_context

REST = 0  # how many tokens to draft where nothing is wanted any more
Asked = Callable[[], bool]  # whether something else is wanted by now


@dataclass(frozen=True)
class Wish:
    """What is wanted of a follower."""

    number: int
    text: list[int]  # behind which tokens are wanted
    count: int  # of them, or REST
    begins: int | None = None  # of a new text, the tokens that it may have
    outcomes: int = 0  # of this draft's verification, which are to be foreseen
    drafted: bool = True  # whether a draft is wanted; else the outcomes of going on from the text alone


class Superseded(Exception):
    """Something else is wanted than what is being drafted."""


class Heard(Rollout):
    """Another rollout of one text, whose log q are kept; it ends between two levels where it is superseded."""

    def __init__(self, inner: Rollout, is_superseded: Asked) -> None:
        self.inner, self.is_superseded = inner, is_superseded
        self.draft_ids, self.depth_limit = inner.draft_ids, inner.depth_limit
        self.said: list[Tensor] = []  # [V] after every node, in the order in which they were given

    def start(self) -> Tensor:
        return self._heard(self.inner.start())

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        if self.is_superseded():
            raise Superseded
        return self._heard(self.inner.extend(tokens, parents))

    def follow(self, tokens: Tensor, parents: Tensor, given: int) -> Tensor:
        return self._heard(self.inner.follow(tokens, parents, given))

    def _heard(self, log_q: Tensor) -> Tensor:
        self.said += log_q[0].unbind(0)
        return log_q


class Follower:
    """A drafter behind a text, which goes back where the text does."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.drafter, self.target = drafter, target
        self.text: list[int] = []
        self.held = 0  # tokens of it that the drafter has read, the root left out

    def begin(self, room: int, count: int, outcomes: int = 0) -> None:
        """A new text of at most `room` tokens is to come, with drafts of `count` tokens behind it and behind so many likely
        outcomes of each one's verification."""
        self.text, self.held, self.outcomes = [], 0, outcomes
        cache = TreeCache(0, 1, room, self.target.device)
        self.context = empty_context(self.target, self._chain(count), cache, (), 0)
        self.context.active.fill_(True)
        self.context.left.fill_(room)

    def draft(self, text: list[int], count: int, is_superseded: Asked) -> list[int]:
        """The `count` tokens that it expects after a text; what was drafted so far where something else is wanted by now."""
        draft = self._read(text, count, is_superseded)
        try:
            return self._grown(draft)
        except Superseded:
            return []
        finally:
            self._end()

    def foreseen(self, wish: Wish, drafted: list[int] | None, tell: Callable[[list[int]], None]) -> Foreseen:
        """The likely outcomes of verifying what is `drafted` behind a text; where it is not given it is drafted first, and
        told. The caller ends it, before anything else is asked for."""
        heard = self._read(wish.text, wish.count, lambda: False).rollout
        assert isinstance(heard, Heard)
        if drafted is None:
            drafted = self._grown(Draft(heard))
            tell(drafted)
        else:
            heard.start()
        if len(heard.said) <= len(drafted):
            rest = torch.tensor([drafted[len(heard.said) - 1 :]], device=self.context.tokens.device)
            heard.follow(rest, torch.full_like(rest[:, 0], len(heard.said) - 1), len(heard.said))
        kept, tokens = likely_outcomes(torch.stack(heard.said[: len(drafted) + 1]), self.outcomes).unbind(1)
        ends = torch.stack([kept, heard.to_target(tokens)], dim=1).tolist()  # the host waits once, not for every outcome
        outcomes = [LikelyText([*wish.text, *drafted[:kept], token], token, kept) for kept, token in ends]
        return Foreseen(heard, wish.count, outcomes, self._end)

    def _chain(self, count: int) -> Chain:
        """What grows a draft, with room for those behind the outcomes of its verification."""
        chain = Chain(count)
        chain.drafted += 1 + self.outcomes * count
        return chain

    def _read(self, text: list[int], count: int, is_superseded: Asked) -> Draft:
        """Let the drafter read what is new of a text."""
        context, ahead = self.context, self.drafter.abilities.ahead
        assert ahead is not None
        common = next((n for n, pair in enumerate(zip(self.text, text)) if pair[0] != pair[1]), min(len(self.text), len(text)))
        if common < len(self.text):
            self.held = min(self.held, common, len(text) - 1)
            ahead(self.drafter, torch.tensor([self.held], device=context.tokens.device))
        context.tokens[0, : len(text)] = torch.tensor(text, device=context.tokens.device)
        context.cache.lengths.fill_(len(text) - 1)
        context.cache.longest = len(text) - 1
        news = context.tokens[:, self.held : len(text) - 1]
        context.fresh = Features(news, (), news.new_zeros(*news.shape, 0, 1))
        context.counts = torch.tensor([news.shape[1]], device=context.tokens.device)
        context.builder = self._chain(count)
        draft = self.drafter.draft(context)
        self.text, self.held = text, len(text) - 1
        return draft if draft.rollout is None else replace(draft, rollout=Heard(draft.rollout, is_superseded))

    def _grown(self, draft: Draft) -> list[int]:
        tree = self.context.builder.grow(self.context, draft)
        found: list[int] = tree.tokens[0, 1:][(tree.valid & tree.emitted)[0, 1:]].tolist()
        return found

    def _end(self) -> None:
        """Forget what was drafted."""
        one = torch.ones(1, dtype=torch.int64, device=self.context.tokens.device)
        self.drafter.commit(self.context, Accepted(0 * one[:, None], one, one))
        self.context.round += 1


def likely_outcomes(said: Tensor, count: int) -> Tensor:
    """The likeliest outcomes of verifying a chain, [F, 2], the likeliest first: how many of its D tokens are kept, and the
    draft id of the token after them.

    The chain follows the likeliest tokens of log q `said` [D + 1, V]. Were the target's tokens drawn from q, the outcome
    (k, x) would have the chance prod over i < k of max q_i, times q_k(x); x is not the drafted token, but where k is D.
    """
    best = said.max(-1)
    path = torch.cat([best.values.new_zeros(1), best.values[:-1].cumsum(0)])
    chances = path[:, None] + said
    chances[:-1].scatter_(1, best.indices[:-1, None], float("-inf"))
    found = chances.flatten().topk(min(count, chances.numel() - len(said) + 1)).indices
    return torch.stack([found // said.shape[1], found % said.shape[1]], dim=1)


@dataclass
class LikelyText:
    """A text that a verification may leave, and what is drafted behind it."""

    text: list[int]
    newest: int  # the token to give to the rollout
    parent: int  # the number of the node that it hangs below
    drafted: tuple[int, ...] = ()


class Foreseen:
    """Likely outcomes of a verification, behind all of which the drafter drafts at once, level by level (SSD's cache)."""

    def __init__(self, heard: Heard, count: int, outcomes: list[LikelyText], end: Callable[[], None]) -> None:
        self.heard, self.count, self.end = heard, count, end
        self.outcomes = self.growing = outcomes
        self.levels = 0  # tokens behind each outcome that grows

    def grow(self, is_superseded: Asked) -> None:
        """Draft behind the outcomes, as long as nothing else is wanted."""
        while self.growing and self.levels < self.count and not is_superseded():
            device, given = self.heard.said[0].device, len(self.heard.said)
            tokens = torch.tensor([[one.newest for one in self.growing]], device=device)
            parents = torch.tensor([[one.parent for one in self.growing]], device=device)
            best = self.heard.to_target(self.heard.extend(tokens, parents).argmax(-1))[0].tolist()
            for place, (one, token) in enumerate(zip(self.growing, best)):
                one.newest, one.parent, one.drafted = token, given + place, (*one.drafted, token)
            self.levels += 1

    def draft(self, text: list[int]) -> list[int] | None:
        """What is drafted behind a text, finished if it is not; None where that outcome was not foreseen."""
        found = next((one for one in self.outcomes if one.text == text), None)
        if found is None:
            return None
        self.growing = [found]
        self.grow(lambda: False)
        return list(found.drafted)
