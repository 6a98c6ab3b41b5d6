"""A drafter that follows a text outside the loop: it drafts after a text, and after the likely
outcomes of verifying a draft.

Shapes: V draft vocabulary, D drafted tokens, F outcomes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectrain.decoding.loop import make_context
from spectrain.drafters.base import Drafter
from spectrain.models.features import Features
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.chain import Chain
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import AcceptedPath

STOP_DRAFTING = 0  # the number of tokens in a request that only ends drafting
SupersededCheck = Callable[[], bool]  # tells whether a newer request has arrived


@dataclass(frozen=True)
class DraftRequest:
    """A request for draft tokens."""

    number: int
    text: list[int]  # the text to draft after
    num_tokens: int  # tokens to draft, or STOP_DRAFTING
    max_length: int | None = None  # largest length of a new text; None continues the earlier one
    num_outcomes: int = 0  # likely outcomes of this draft's verification to draft after
    with_draft: bool = True  # False: only the outcomes of the text without a draft


class SupersededError(Exception):
    """A newer request has replaced the one that is being drafted."""


class RecordingRollout(Rollout):
    """Wraps a rollout of one text and records its log q; raises SupersededError between two
    levels of an old request.
    """

    def __init__(self, inner: Rollout, is_superseded: SupersededCheck) -> None:
        self.inner, self.is_superseded = inner, is_superseded
        self.draft_ids, self.depth_limit = inner.draft_ids, inner.depth_limit
        self.log_probs: list[Tensor] = []  # [V] after every node, in their order

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
        self.num_read = 0  # tokens of the text that the drafter has read, without the root

    def start_text(self, max_length: int, num_tokens: int, num_outcomes: int = 0) -> None:
        """Prepare for a text of at most `max_length` tokens, with drafts of `num_tokens` tokens
        after it and its outcomes.
        """
        self.text = []
        self.num_read = 0
        self.num_outcomes = num_outcomes
        cache = TreeCache(0, 1, max_length, self.target.device)
        self.context = make_context(self.target, self._make_builder(num_tokens), cache, (), 0)
        self.context.active.fill_(True)
        self.context.tokens_left.fill_(max_length)

    def draft(self, text: list[int], num_tokens: int, is_superseded: SupersededCheck) -> list[int]:
        """Draft `num_tokens` tokens after a text; return none where a newer request arrives."""
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
        """Return the likely outcomes of verifying `draft` after a text.

        Without a draft, make one first and `send` it. The caller must call `end_draft` before any
        other request.
        """
        rollout = self._read_text(request.text, request.num_tokens, lambda: False).rollout
        assert isinstance(rollout, RecordingRollout)
        if draft is None:
            draft = self._draft_tokens(Draft(rollout))
            send(draft)
        else:
            rollout.start()
        if len(rollout.log_probs) <= len(draft):
            remaining = torch.tensor(
                [draft[len(rollout.log_probs) - 1 :]], device=self.context.tokens.device
            )
            rollout.extend_path(
                remaining,
                torch.full_like(remaining[:, 0], len(rollout.log_probs) - 1),
                len(rollout.log_probs),
            )
        num_accepted, tokens = select_outcomes(
            torch.stack(rollout.log_probs[: len(draft) + 1]), self.num_outcomes
        ).unbind(1)
        # one host synchronization
        ends = torch.stack([num_accepted, rollout.to_target_ids(tokens)], dim=1).tolist()
        outcomes = [
            LikelyOutcome([*request.text, *draft[:num_accepted], token], token, num_accepted)
            for num_accepted, token in ends
        ]
        return LikelyOutcomes(rollout, request.num_tokens, outcomes, self._end_draft)

    def _make_builder(self, num_tokens: int) -> Chain:
        """Return the builder of a draft, with room for drafts after its outcomes."""
        chain = Chain(num_tokens)
        chain.max_drafted += 1 + self.num_outcomes * num_tokens
        return chain

    def _read_text(self, text: list[int], num_tokens: int, is_superseded: SupersededCheck) -> Draft:
        """Let the drafter read the new part of a text."""
        context = self.context
        rewind = self.drafter.capabilities.rewind
        assert rewind is not None
        common = next(
            (n for n, pair in enumerate(zip(self.text, text)) if pair[0] != pair[1]),
            min(len(self.text), len(text)),
        )
        if common < len(self.text):
            self.num_read = min(self.num_read, common, len(text) - 1)
            rewind(self.drafter, torch.tensor([self.num_read], device=context.tokens.device))
        context.tokens[0, : len(text)] = torch.tensor(text, device=context.tokens.device)
        context.cache.lengths.fill_(len(text) - 1)
        context.cache.longest = len(text) - 1
        new_tokens = context.tokens[:, self.num_read : len(text) - 1]
        context.new_features = Features(
            new_tokens, (), new_tokens.new_zeros(*new_tokens.shape, 0, 1)
        )
        context.num_new = torch.tensor([new_tokens.shape[1]], device=context.tokens.device)
        context.builder = self._make_builder(num_tokens)
        draft = self.drafter.draft(context)
        self.text = text
        self.num_read = len(text) - 1
        return (
            draft
            if draft.rollout is None
            else replace(draft, rollout=RecordingRollout(draft.rollout, is_superseded))
        )

    def _draft_tokens(self, draft: Draft) -> list[int]:
        tree = self.context.builder.grow(self.context, draft)
        tokens: list[int] = tree.tokens[0, 1:][(tree.valid & tree.can_emit)[0, 1:]].tolist()
        return tokens

    def _end_draft(self) -> None:
        """Drop the drafted tokens from the drafter's state."""
        count = torch.ones(1, dtype=torch.int64, device=self.context.tokens.device)
        self.drafter.commit(self.context, AcceptedPath(0 * count[:, None], count, count))
        self.context.round += 1


def select_outcomes(log_q: Tensor, count: int) -> Tensor:
    """Return the likeliest outcomes of verifying a chain, [F, 2]: the number of accepted tokens,
    and the draft id after them.

    The chain has the likeliest tokens of log q [D + 1, V]. If the target's tokens were drawn from
    q, the outcome (k, x) would have probability prod over i < k of max q_i, times q_k(x); x differs
    from the drafted token unless k is D.
    """
    best = log_q.max(-1)
    path = torch.cat([best.values.new_zeros(1), best.values[:-1].cumsum(0)])
    chances = path[:, None] + log_q
    chances[:-1].scatter_(1, best.indices[:-1, None], float("-inf"))
    indices = chances.flatten().topk(min(count, chances.numel() - len(log_q) + 1)).indices
    return torch.stack([indices // log_q.shape[1], indices % log_q.shape[1]], dim=1)


@dataclass
class LikelyOutcome:
    """A text that a verification may result in, and the tokens drafted after it."""

    text: list[int]
    last_token: int  # the next token to run
    parent: int  # the index of its parent node
    draft: tuple[int, ...] = ()


class LikelyOutcomes:
    """Likely outcomes of a verification; the drafter drafts after all of them at once, level by
    level (SSD's cache).
    """

    def __init__(
        self,
        rollout: RecordingRollout,
        num_tokens: int,
        outcomes: list[LikelyOutcome],
        end_draft: Callable[[], None],
    ) -> None:
        self.rollout, self.num_tokens, self.end_draft = rollout, num_tokens, end_draft
        self.outcomes = self.open_outcomes = outcomes
        self.num_levels = 0  # tokens drafted after each open outcome

    def extend_drafts(self, is_superseded: SupersededCheck) -> None:
        """Extend the drafts after the outcomes, until a newer request arrives."""
        while self.open_outcomes and self.num_levels < self.num_tokens and not is_superseded():
            device = self.rollout.log_probs[0].device
            num_nodes = len(self.rollout.log_probs)
            tokens = torch.tensor(
                [[outcome.last_token for outcome in self.open_outcomes]], device=device
            )
            parents = torch.tensor(
                [[outcome.parent for outcome in self.open_outcomes]], device=device
            )
            best = self.rollout.to_target_ids(self.rollout.extend(tokens, parents).argmax(-1))[
                0
            ].tolist()
            for index, (outcome, token) in enumerate(zip(self.open_outcomes, best)):
                outcome.last_token = token
                outcome.parent = num_nodes + index
                outcome.draft = (*outcome.draft, token)
            self.num_levels += 1

    def finish_draft(self, text: list[int]) -> list[int] | None:
        """Finish and return the draft after a text; None where this outcome was not predicted."""
        outcome = next((candidate for candidate in self.outcomes if candidate.text == text), None)
        if outcome is None:
            return None
        self.open_outcomes = [outcome]
        self.extend_drafts(lambda: False)
        return list(outcome.draft)
