"""Drafting while the target verifies, in a second process (PEARL, Liu et al., 2024, arXiv 2408.11850; AMUSD, McDanel, 2024,
arXiv 2410.17375; SSD, Kumar et al., 2026, arXiv 2603.03251). On a CPU: no process is forked from one that uses a GPU, where
streams.py drafts on a stream of its own instead, and two threads cannot run forwards at once, for which forward a compiled
layer belongs to is known by the process alone.

The loop stays what it is; what is wrapped around its drafter asks a worker for the next draft before it lets the target verify
this one. While the target judges d_1 .. d_k behind a text, the worker drafts on as if all of them were kept: first the token
that it expects then, and k more behind it. If they are kept and that token follows, the next draft is there; else it is asked
for anew, and with `pre_verify` the target takes a step of its own meanwhile, which the draft may then begin with. With
`outcomes` the worker drafts behind several texts at once that the verification may leave, all kept or not, the likeliest by
its own chances, instead of the likeliest of all kept alone; what it has not foreseen it drafts anew. A draft follows from
its text alone and the rule's tokens do not depend on drafts, so the output is the plain loop's, and without `pre_verify` so
is every round.
"""

from __future__ import annotations

import multiprocessing
import weakref
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.errors import RunError, UserError
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees.base import Draft, TreeBuilder
from spectrain.trees.token_tree import Accepted, TokenTree
from spectrain.trees.trie import Trie

from .acceptance import AcceptanceRule
from .follower import REST, Follower, Wish
from .loop import Eager, Request
from .streams import Streamed


@dataclass
class Overlap:
    """How drafting overlaps with verification, and what came of it."""

    pre_verify: bool = False  # where a draft must be made anew, the target takes a step meanwhile (PEARL)
    streams: bool = False  # in one process, on two streams, as on a GPU
    outcomes: int = 0  # of a verification, behind which drafts are made meanwhile (SSD); 0: the one that keeps all, as expected
    ready: int = 0  # rounds whose draft had been made while the target worked
    missed: int = 0  # the others


def check_overlap(drafter: Drafter | None, builder: TreeBuilder | None, rule: AcceptanceRule, outcomes: int = 0) -> None:
    """Refuse what cannot draft ahead, and rules whose tokens would depend on it."""
    if drafter is None or drafter.abilities.ahead is None:
        raise UserError("eval.overlap: this drafter reads what the target computes, so it cannot draft ahead of it; use "
                        "drafter=causal, universal or ngram")  # fmt: skip
    if outcomes and not drafter.abilities.follows_at_once:
        raise UserError("eval.overlap=outcomes: this drafter's own chances do not say what follows; use eval.overlap=post, or "
                        "drafter=causal")  # fmt: skip
    if builder is None or not builder.is_chain or not builder.is_fixed or builder.children != "deterministic":
        raise UserError("eval.overlap: it drafts chains of one length ahead; use tree=chain without tree.stop or tree.children")
    if not rule.fixes_choice:
        raise UserError(f"acceptance={rule.name}: what it keeps depends on what was drafted; use greedy or match to overlap")


@torch.inference_mode()
def serve(wire: Connection, others_end: Connection, drafter: Drafter, target: Target) -> None:
    """Draft what is asked for, always the newest wish, until nobody is there to ask."""
    others_end.close()
    torch.set_num_threads(1)  # the parent's threads are not there
    follower = Follower(drafter, target)
    with closing(wire), suppress(EOFError, OSError):
        wish = wire.recv()
        while True:
            wish = fulfilled(wish, follower, wire)


def fulfilled(wish: Wish, follower: Follower, wire: Connection) -> Wish:
    """Do what is wanted; the next wish."""
    if wish.begins is not None:
        follower.begin(wish.begins, wish.count, wish.outcomes)
    if wish.count == REST or (not wish.outcomes and wire.poll()):
        return wire.recv()
    if not wish.outcomes:
        wire.send((wish.number, follower.draft(wish.text, wish.count, wire.poll), False))
        return wire.recv()
    drafted: list[int] | None = None if wish.drafted else []
    while True:
        number = wish.number
        foreseen = follower.foreseen(wish, drafted, lambda tokens: wire.send((number, tokens, False)))  # noqa: B023
        foreseen.grow(wire.poll)
        wish = wire.recv()
        drafted = foreseen.draft(wish.text) if wish.begins is None else None
        foreseen.end()
        if drafted is None:
            return wish
        wire.send((wish.number, drafted, True))


class Worker:
    """Who drafts: a process forked from this one, which has its weights."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.wire, theirs = multiprocessing.Pipe()
        self.number = 0
        start = multiprocessing.get_context("fork").Process
        start(target=serve, args=(theirs, self.wire, drafter, target), daemon=True).start()
        theirs.close()
        weakref.finalize(self, self.wire.close)

    def ask(self, text: list[int], count: int, begins: int | None = None, outcomes: int = 0, drafted: bool = True) -> None:
        """Want so many tokens after a text, and no other any more; a text that begins has room for `begins` tokens."""
        self.number += 1
        try:
            self.wire.send(Wish(self.number, text, count, begins, outcomes, drafted))
        except OSError as error:
            raise RunError("eval.overlap: the process that drafts has ended") from error

    def answer(self) -> tuple[list[int], bool]:
        """The tokens that were asked for last, as soon as they are there, and whether they had been foreseen."""
        try:
            while True:
                number, tokens, foreseen = self.wire.recv()
                if number == self.number:
                    return list(tokens), foreseen
        except (EOFError, OSError) as error:
            raise RunError("eval.overlap: the process that drafts has ended") from error

    def work(self) -> None:
        """It works by itself."""


class DraftsAhead:
    """What the loop asks for drafts of one text, in place of the drafter."""

    def __init__(self, worker: Worker | Streamed, depth: int, overlap: Overlap) -> None:
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
            found, _ = self.worker.answer()
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
        return _continuing(self.worker.answer()[0])

    def verify(self, context: Context, tree: TokenTree) -> Features:
        if self.asked is None:
            ahead = [*self.text, *tree.tokens[0, 1:].tolist()]
            self.worker.ask(ahead, self.depth + 1)
            self.asked = ahead
        seen = context.verify(tree)
        self.worker.work()
        return seen

    def commit(self, context: Context, accepted: Accepted) -> None:
        if not bool(context.active.any()):
            self.worker.ask([], REST)
            self.asked = None


class DraftsForOutcomes(DraftsAhead):
    """The same where the worker foresees outcomes: it is told which one came, and has its draft or makes it."""

    def begin(self, request: Request) -> None:
        (prompt,) = request.prompts
        room = len(prompt) + request.max_new_tokens + 3 * (self.depth + 2)
        self.worker.ask(prompt, self.depth, room, self.overlap.outcomes, drafted=False)

    def draft(self, context: Context) -> Draft:
        text = context.tokens[0, : int(context.lengths[0]) + 1].tolist()
        self.worker.ask(text, self.depth, outcomes=self.overlap.outcomes)
        found, foreseen = self.worker.answer()
        self.overlap.ready += foreseen
        self.overlap.missed += not foreseen
        return _continuing(found)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        seen = context.verify(tree)
        self.worker.work()
        return seen


def _continuing(tokens: list[int]) -> Draft:
    return Draft(continuations=[Trie.of([tokens])])


class Overlapped(Eager):
    """Runs one round after another of one text at a time; what drafts has a process, or a stream, of its own."""

    def __init__(
        self, target: Target, rule: AcceptanceRule, worker: Worker | Streamed, builder: TreeBuilder, overlap: Overlap
    ) -> None:
        super().__init__(target, rule)
        self.builder = builder
        ahead = DraftsForOutcomes if overlap.outcomes else DraftsAhead
        self.plays = self.ahead = ahead(worker, builder.depth, overlap)

    def begin(self, request: Request) -> list[int]:
        if len(request.prompts) != 1:
            raise UserError(f"eval.overlap: {len(request.prompts)} texts at once; use eval.batch_size=1")
        self.ahead.begin(request)
        return super().begin(request)
