"""Drafting while the target verifies, in a second process (PEARL, Liu et al., 2024, arXiv 2408.11850; AMUSD, McDanel, 2024,
arXiv 2410.17375). On a CPU: no process is forked from one that uses a GPU, and two threads cannot run forwards at once, for
which forward a compiled layer belongs to is known by the process alone.

The loop stays what it is; what is wrapped around its drafter asks a worker for the next draft before it lets the target verify
this one. While the target judges d_1 .. d_k behind a text, the worker drafts on as if all of them were kept: first the token
that it expects then, and k more behind it. If they are kept and that token follows, the next draft is there; else it is asked
for anew, and with `pre_verify` the target takes a step of its own meanwhile, which the draft may then begin with. A draft
follows from its text alone and the rule's tokens do not depend on drafts, so the output is the plain loop's, and without
`pre_verify` so is every round.
"""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.errors import RunError, UserError
from spectrain.models.features import Features
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.base import Draft, Rollout, TreeBuilder
from spectrain.trees.chain import Chain
from spectrain.trees.token_tree import Accepted, TokenTree
from spectrain.trees.trie import Trie

from .acceptance import AcceptanceRule
from .loop import Eager, Request, empty_context

REST = 0  # how many tokens to draft where nothing is wanted any more


@dataclass
class Overlap:
    """How drafting overlaps with verification, and what came of it."""

    pre_verify: bool = False  # where a draft must be made anew, the target takes a step meanwhile (PEARL)
    ready: int = 0  # rounds whose draft had been made while the target worked
    missed: int = 0  # the others


def check_overlap(drafter: Drafter | None, builder: TreeBuilder | None, rule: AcceptanceRule) -> None:
    """Refuse what cannot draft ahead, and rules whose tokens would depend on it."""
    if drafter is None or drafter.abilities.ahead is None:
        raise UserError("eval.overlap: this drafter reads what the target computes, so it cannot draft ahead of it; use "
                        "drafter=causal, universal or ngram")  # fmt: skip
    if builder is None or not builder.is_chain or not builder.is_fixed or builder.children != "deterministic":
        raise UserError("eval.overlap: it drafts chains of one length ahead; use tree=chain without tree.stop or tree.children")
    if not rule.fixes_choice:
        raise UserError(f"acceptance={rule.name}: what it keeps depends on what was drafted; use greedy or match to overlap")


class Follower:
    """A drafter that follows a text by itself, and goes back where the text does."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.drafter, self.target = drafter, target
        self.text: list[int] = []
        self.held = 0  # tokens of it that the drafter has read, the root left out

    def begin(self, room: int, count: int) -> None:
        """A new text of at most `room` tokens is to come."""
        self.text, self.held = [], 0
        cache = TreeCache(0, 1, room, self.target.device)
        self.context = empty_context(self.target, Chain(count), cache, (), 0)
        self.context.active.fill_(True)
        self.context.left.fill_(room)

    def draft(self, text: list[int], count: int, is_superseded: Callable[[], bool]) -> list[int]:
        """The `count` tokens that it expects after a text; what was drafted so far where something else is wanted by now."""
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
        context.builder = Chain(count)
        draft = self.drafter.draft(context)
        self.text, self.held = text, len(text) - 1
        if draft.rollout is not None:
            draft = replace(draft, rollout=_Interruptible(draft.rollout, is_superseded))
        try:
            tree = context.builder.grow(context, draft)
        except Superseded:
            return []
        finally:
            one = torch.ones(1, dtype=torch.int64, device=context.tokens.device)
            self.drafter.commit(context, Accepted(0 * one[:, None], one, one))
            context.round += 1
        found: list[int] = tree.tokens[0, 1:][(tree.valid & tree.emitted)[0, 1:]].tolist()
        return found


class Superseded(Exception):
    """Something else is wanted than what is being drafted."""


class _Interruptible(Rollout):
    """Another rollout, which ends between two levels where it is superseded."""

    def __init__(self, inner: Rollout, is_superseded: Callable[[], bool]) -> None:
        self.inner, self.is_superseded = inner, is_superseded
        self.draft_ids, self.depth_limit = inner.draft_ids, inner.depth_limit

    def start(self) -> Tensor:
        return self.inner.start()

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        if self.is_superseded():
            raise Superseded
        return self.inner.extend(tokens, parents)


@torch.inference_mode()
def serve(wire: Connection, others_end: Connection, drafter: Drafter, target: Target) -> None:
    """Draft what is asked for, always the newest request, until nobody is there to ask."""
    others_end.close()
    torch.set_num_threads(1)  # the parent's threads are not there
    follower = Follower(drafter, target)
    with closing(wire), suppress(EOFError, OSError):
        while True:
            number, begins, text, count = wire.recv()
            if begins is not None:
                follower.begin(begins, count)
            if count != REST and not wire.poll():
                wire.send((number, follower.draft(text, count, wire.poll)))


class Worker:
    """Who drafts: a process forked from this one, which has its weights."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.wire, theirs = multiprocessing.Pipe()
        self.number = 0
        start = multiprocessing.get_context("fork").Process
        start(target=serve, args=(theirs, self.wire, drafter, target), daemon=True).start()
        theirs.close()
        weakref.finalize(self, self.wire.close)

    def ask(self, text: list[int], count: int, begins: int | None = None) -> None:
        """Want so many tokens after a text, and no other any more; a text that begins has room for `begins` tokens."""
        self.number += 1
        try:
            self.wire.send((self.number, begins, text, count))
        except OSError as error:
            raise RunError("eval.overlap: the process that drafts has ended") from error

    def answer(self) -> list[int]:
        """The tokens that were asked for last, as soon as they are there."""
        try:
            while True:
                number, tokens = self.wire.recv()
                if number == self.number:
                    return list(tokens)
        except (EOFError, OSError) as error:
            raise RunError("eval.overlap: the process that drafts has ended") from error


class DraftsAhead:
    """What the loop asks for drafts of one text, in place of the drafter."""

    def __init__(self, worker: Worker, depth: int, overlap: Overlap) -> None:
        self.worker, self.depth, self.overlap = worker, depth, overlap
        self.asked: list[int] | None = None  # the text behind which tokens were asked for
        self.text: list[int] = []

    def begin(self, request: Request) -> None:
        """Let the worker read the prompt while the target does."""
        (prompt,) = request.prompts
        room = len(prompt) + request.max_new_tokens + 3 * (self.depth + 2)
        self.worker.ask(prompt, self.depth + 1, room)
        self.asked = prompt

    def draft(self, context: Context) -> Draft:
        self.text = context.tokens[0, : int(context.lengths[0]) + 1].tolist()
        if self.asked == self.text[:-1]:
            found = self.worker.answer()
            self.asked = None
            if found[:1] == self.text[-1:]:
                self.overlap.ready += 1
                return _continuing(found[1:])
        self.overlap.missed += 1
        if self.overlap.pre_verify:
            self.worker.ask(self.text, self.depth + 1)
            self.asked = self.text
            return Draft()
        self.worker.ask(self.text, self.depth)
        return _continuing(self.worker.answer())

    def verify(self, context: Context, tree: TokenTree) -> Features:
        if self.asked is None:
            ahead = [*self.text, *tree.tokens[0, 1:].tolist()]
            self.worker.ask(ahead, self.depth + 1)
            self.asked = ahead
        return context.verify(tree)

    def commit(self, context: Context, accepted: Accepted) -> None:
        if not bool(context.active.any()):
            self.worker.ask([], REST)
            self.asked = None


def _continuing(tokens: list[int]) -> Draft:
    return Draft(continuations=[Trie.of([tokens])])


class Overlapped(Eager):
    """Runs one round after another of one text at a time; what drafts has a process of its own."""

    def __init__(self, target: Target, rule: AcceptanceRule, worker: Worker, builder: TreeBuilder, overlap: Overlap) -> None:
        super().__init__(target, rule)
        self.builder = builder
        self.plays = self.ahead = DraftsAhead(worker, builder.depth, overlap)

    def begin(self, request: Request) -> list[int]:
        if len(request.prompts) != 1:
            raise UserError(f"eval.overlap: {len(request.prompts)} texts at once; use eval.batch_size=1")
        self.ahead.begin(request)
        return super().begin(request)
