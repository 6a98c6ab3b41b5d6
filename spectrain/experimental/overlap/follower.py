"""A drafter that follows a text by itself, apart from the loop: what it drafts behind a text, and behind the texts that a
verification of its draft is likely to leave. Shapes: V draft vocabulary, D drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectrain.decoding.loop import make_context
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import RewindableDrafter
from spectrain.models.features import Features
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.base import Draft, Rollout
from spectrain.trees.chain import Chain
from spectrain.trees.token_tree import AcceptedPath

STOP_DRAFTING = 0  # how many tokens to draft where nothing is wanted any more
SupersededCheck = Callable[[], bool]  # whether something else is wanted by now


@dataclass(frozen=True)
class DraftRequest:
    """A request for draft tokens."""

    number: int
    text: list[int]  # behind which tokens are wanted
    num_tokens: int  # of them, or REST
    max_length: int | None = None  # of a new text, the tokens that it may have
    num_outcomes: int = 0  # of this draft's verification, which are to be foreseen
    with_draft: bool = True  # whether a draft is wanted; else the outcomes of going on from the text alone


class SupersededError(Exception):
    """A newer request has replaced the one that is being drafted."""


class RecordingRollout(Rollout):
    """Wraps a rollout of one text and records its log q. It stops between two levels where its request is superseded."""

    def __init__(self, inner: Rollout, is_superseded: SupersededCheck) -> None:
        self.inner, self.is_superseded = inner, is_superseded
        self.draft_ids, self.depth_limit = inner.draft_ids, inner.depth_limit
        self.log_probs: list[Tensor] = []  # [V] after every node, in the order in which they were given

    def start(self) -> Tensor:
        return self._record_log_probs(self.inner.start())

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        if self.is_superseded():
            raise SupersededError
        return self._record_log_probs(self.inner.extend(tokens, parents))

    def extend_path(self, tokens: Tensor, parents: Tensor, given: int) -> Tensor:
        return self._record_log_probs(self.inner.extend_path(tokens, parents, given))

    def _record_log_probs(self, log_q: Tensor) -> Tensor:
        self.log_probs += log_q[0].unbind(0)
        return log_q


class Follower:
    """Runs a drafter after a text, and rolls it back where the text changes."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.drafter, self.target = drafter, target
        self.text: list[int] = []
        self.num_read = 0  # tokens of it that the drafter has read, the root left out

    def start_text(self, max_length: int, num_tokens: int, num_outcomes: int = 0) -> None:
        """A new text of at most `room` tokens is to come, with drafts of `count` tokens behind it and behind so many likely
        outcomes of each one's verification."""
        self.text, self.num_read, self.num_outcomes = [], 0, num_outcomes
        cache = TreeCache(0, 1, max_length, self.target.device)
        self.context = make_context(self.target, self._make_builder(num_tokens), cache, (), 0)
        self.context.active.fill_(True)
        self.context.left.fill_(max_length)

    def draft(self, text: list[int], num_tokens: int, is_superseded: SupersededCheck) -> list[int]:
        """The `count` tokens that it expects after a text; what was drafted so far where something else is wanted by now."""
        draft = self._read_text(text, num_tokens, is_superseded)
        try:
            return self._draft_tokens(draft)
        except SupersededError:
            return []
        finally:
            self._end_draft()

    def predict_outcomes(
        self, request: DraftRequest, draft: list[int] | None, send: Callable[[list[int]], None]
    ) -> LikelyOutcomes:
        """The likely outcomes of verifying what is `drafted` behind a text; where it is not given it is drafted first, and
        told. The caller ends it, before anything else is asked for."""
        heard = self._read_text(request.text, request.num_tokens, lambda: False).rollout
        assert isinstance(heard, RecordingRollout)
        if draft is None:
            draft = self._draft_tokens(Draft(heard))
            send(draft)
        else:
            heard.start()
        if len(heard.log_probs) <= len(draft):
            rest = torch.tensor([draft[len(heard.log_probs) - 1 :]], device=self.context.tokens.device)
            heard.extend_path(rest, torch.full_like(rest[:, 0], len(heard.log_probs) - 1), len(heard.log_probs))
        kept, tokens = select_outcomes(torch.stack(heard.log_probs[: len(draft) + 1]), self.num_outcomes).unbind(1)
        ends = torch.stack([kept, heard.to_target_ids(tokens)], dim=1).tolist()  # the host waits once, not for every outcome
        outcomes = [LikelyOutcome([*request.text, *draft[:kept], token], token, kept) for kept, token in ends]
        return LikelyOutcomes(heard, request.num_tokens, outcomes, self._end_draft)

    def _make_builder(self, num_tokens: int) -> Chain:
        """What grows a draft, with room for those behind the outcomes of its verification."""
        chain = Chain(num_tokens)
        chain.max_drafted += 1 + self.num_outcomes * num_tokens
        return chain

    def _read_text(self, text: list[int], num_tokens: int, is_superseded: SupersededCheck) -> Draft:
        """Let the drafter read the new part of a text."""
        context = self.context
        assert isinstance(self.drafter, RewindableDrafter)
        common = next((n for n, pair in enumerate(zip(self.text, text)) if pair[0] != pair[1]), min(len(self.text), len(text)))
        if common < len(self.text):
            self.num_read = min(self.num_read, common, len(text) - 1)
            self.drafter.rewind(torch.tensor([self.num_read], device=context.tokens.device))
        context.tokens[0, : len(text)] = torch.tensor(text, device=context.tokens.device)
        context.cache.lengths.fill_(len(text) - 1)
        context.cache.longest = len(text) - 1
        news = context.tokens[:, self.num_read : len(text) - 1]
        context.fresh = Features(news, (), news.new_zeros(*news.shape, 0, 1))
        context.counts = torch.tensor([news.shape[1]], device=context.tokens.device)
        context.builder = self._make_builder(num_tokens)
        draft = self.drafter.draft(context)
        self.text, self.num_read = text, len(text) - 1
        return draft if draft.rollout is None else replace(draft, rollout=RecordingRollout(draft.rollout, is_superseded))

    def _draft_tokens(self, draft: Draft) -> list[int]:
        tree = self.context.builder.grow(self.context, draft)
        found: list[int] = tree.tokens[0, 1:][(tree.valid & tree.can_emit)[0, 1:]].tolist()
        return found

    def _end_draft(self) -> None:
        """Drop what was drafted."""
        one = torch.ones(1, dtype=torch.int64, device=self.context.tokens.device)
        self.drafter.commit(self.context, AcceptedPath(0 * one[:, None], one, one))
        self.context.round += 1


def select_outcomes(log_q: Tensor, count: int) -> Tensor:
    """The likeliest outcomes of verifying a chain, [F, 2], the likeliest first: how many of its D tokens are kept, and the
    draft id of the token after them.

    The chain follows the likeliest tokens of log q `said` [D + 1, V]. Were the target's tokens drawn from q, the outcome
    (k, x) would have the chance prod over i < k of max q_i, times q_k(x); x is not the drafted token, but where k is D.
    """
    best = log_q.max(-1)
    path = torch.cat([best.values.new_zeros(1), best.values[:-1].cumsum(0)])
    chances = path[:, None] + log_q
    chances[:-1].scatter_(1, best.indices[:-1, None], float("-inf"))
    found = chances.flatten().topk(min(count, chances.numel() - len(log_q) + 1)).indices
    return torch.stack([found // log_q.shape[1], found % log_q.shape[1]], dim=1)


@dataclass
class LikelyOutcome:
    """A text that a verification may result in, and the tokens drafted after it."""

    text: list[int]
    last_token: int  # the token to give to the rollout
    parent: int  # the number of the node that it hangs below
    draft: tuple[int, ...] = ()


class LikelyOutcomes:
    """Likely outcomes of a verification, behind all of which the drafter drafts at once, level by level (SSD's cache)."""

    def __init__(
        self, rollout: RecordingRollout, num_tokens: int, outcomes: list[LikelyOutcome], end_draft: Callable[[], None]
    ) -> None:
        self.rollout, self.num_tokens, self.end_draft = rollout, num_tokens, end_draft
        self.outcomes = self.open_outcomes = outcomes
        self.num_levels = 0  # tokens behind each outcome that grows

    def extend_drafts(self, is_superseded: SupersededCheck) -> None:
        """Extend the drafts after the outcomes, until a newer request arrives."""
        while self.open_outcomes and self.num_levels < self.num_tokens and not is_superseded():
            device, given = self.rollout.log_probs[0].device, len(self.rollout.log_probs)
            tokens = torch.tensor([[one.last_token for one in self.open_outcomes]], device=device)
            parents = torch.tensor([[one.parent for one in self.open_outcomes]], device=device)
            best = self.rollout.to_target_ids(self.rollout.extend(tokens, parents).argmax(-1))[0].tolist()
            for place, (one, token) in enumerate(zip(self.open_outcomes, best)):
                one.last_token, one.parent, one.draft = token, given + place, (*one.draft, token)
            self.num_levels += 1

    def finish_draft(self, text: list[int]) -> list[int] | None:
        """What is drafted behind a text, finished if it is not; None where that outcome was not foreseen."""
        found = next((one for one in self.outcomes if one.text == text), None)
        if found is None:
            return None
        self.open_outcomes = [found]
        self.extend_drafts(lambda: False)
        return list(found.draft)
