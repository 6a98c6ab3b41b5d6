"""Drafting while the target verifies, in a second process.

Papers: PEARL (Liu et al., 2024, arXiv 2408.11850), AMUSD (McDanel, 2024, arXiv 2410.17375), SSD
(Kumar et al., 2026, arXiv 2603.03251). The process is for CPUs: a process that uses a GPU must not
fork, so streams.py drafts on a separate stream there. Two threads would not do, because compiled
layers hold process-wide state of the current forward.

The loop is unchanged. A wrapper around the drafter requests the next draft from a worker before the
target verifies the current one. While the target verifies d_1 .. d_k after a text, the worker
drafts as if all of them were accepted: the token that it expects next, and k more after it. If this
is what happens, the next draft is ready; otherwise it is requested again, and with `pre_verify` the
target takes an autoregressive step meanwhile, whose token the draft may begin with. With `outcomes`
the worker drafts after several likely results of the verification at once, instead of the likeliest
full acceptance; for all other results it drafts again. A draft depends on its text alone and the
rule's tokens do not depend on drafts, so the output is that of the ordinary loop, and without
`pre_verify` so is every round.
"""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from spectrain.copying.trie import Trie
from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.loop import EagerRunner, Request
from spectrain.decoding.session import RoundChange, Session
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.errors import RunError, UserError
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.shared.follower import STOP_DRAFTING, DraftRequest, Follower

from .streams import StreamWorker


@dataclass
class Overlap(RoundChange):
    """How drafting overlaps with verification, and counts of the rounds."""

    pre_verify: bool = False  # the target takes a step while a draft is made again (PEARL)
    uses_streams: bool = False  # one process and two streams, as on a GPU
    # likely results of a verification to draft after (SSD); 0: full acceptance alone
    num_outcomes: int = 0
    num_ready: int = 0  # rounds whose draft was ready after verification
    num_missed: int = 0  # all other rounds

    part = "runner"
    setting_name = "eval.overlap"
    capture_blocker = "receives drafts from another process"

    def connect(self, session: Session) -> Callable[[EagerRunner], EagerRunner]:
        """Start the worker that drafts ahead; each request gets a runner that uses it."""
        check_overlap(session.drafter, session.builder, session.rule, self.num_outcomes)
        drafter, builder = session.drafter, session.builder
        assert drafter is not None and builder is not None
        worker_class = (
            StreamWorker
            if self.uses_streams or session.target.device.type == "cuda"
            else ProcessWorker
        )
        worker = worker_class(drafter, session.target)
        return lambda runner: OverlappedRunner(session.target, session.rule, worker, builder, self)


def check_overlap(
    drafter: Drafter | None,
    builder: TreeBuilder | None,
    rule: AcceptanceRule,
    num_outcomes: int = 0,
) -> None:
    """Raise a UserError for drafters that cannot draft ahead, and for rules whose tokens depend
    on drafts.
    """
    if drafter is None or drafter.capabilities.rewind is None:
        raise UserError(
            "eval.overlap: this drafter reads what the target computes, so it cannot draft "
            "ahead of it; use drafter=causal, universal or ngram"
        )
    if num_outcomes and not drafter.capabilities.scores_path_at_once:
        raise UserError(
            "eval.overlap=outcomes: this drafter's probabilities do not predict the next "
            "token; use eval.overlap=post, or drafter=causal"
        )
    if (
        builder is None
        or not builder.traits.is_chain
        or not builder.traits.is_fixed
        or builder.children != "deterministic"
    ):
        raise UserError(
            "eval.overlap: it drafts chains of one length ahead; use tree=chain without tree.stop "
            "or tree.children"
        )
    if not rule.fixes_choice:
        raise UserError(
            f"acceptance={rule.name}: its tokens depend on the drafts; use greedy or match with "
            "eval.overlap"
        )


@torch.inference_mode()
def serve_drafts(
    connection: Connection, parent_end: Connection, drafter: Drafter, target: Target
) -> None:
    """Serve draft requests, always the newest, until the connection closes."""
    parent_end.close()
    torch.set_num_threads(1)  # a forked process lacks the parent's threads
    follower = Follower(drafter, target)
    with closing(connection), suppress(EOFError, OSError):
        request = connection.recv()
        while True:
            request = handle_request(request, follower, connection)


def handle_request(
    request: DraftRequest, follower: Follower, connection: Connection
) -> DraftRequest:
    """Handle a request and return the next one."""
    if request.max_length is not None:
        follower.start_text(request.max_length, request.num_tokens, request.num_outcomes)
    if request.num_tokens == STOP_DRAFTING or (not request.num_outcomes and connection.poll()):
        return connection.recv()
    if not request.num_outcomes:
        connection.send(
            (
                request.number,
                follower.draft(request.text, request.num_tokens, connection.poll),
                False,
            )
        )
        return connection.recv()
    drafted: list[int] | None = None if request.with_draft else []
    while True:
        number = request.number
        outcomes = follower.predict_outcomes(
            request,
            drafted,
            lambda tokens: connection.send((number, tokens, False)),  # noqa: B023
        )
        outcomes.extend_drafts(connection.poll)
        request = connection.recv()
        drafted = outcomes.finish_draft(request.text) if request.max_length is None else None
        outcomes.end_draft()
        if drafted is None:
            return request
        connection.send((request.number, drafted, True))


class ProcessWorker:
    """A worker that drafts in a process forked from this one, with its weights."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.connection, worker_end = multiprocessing.Pipe()
        self.request_number = 0
        start = multiprocessing.get_context("fork").Process
        start(
            target=serve_drafts, args=(worker_end, self.connection, drafter, target), daemon=True
        ).start()
        worker_end.close()
        weakref.finalize(self, self.connection.close)

    def request_draft(
        self,
        text: list[int],
        num_tokens: int,
        max_length: int | None = None,
        num_outcomes: int = 0,
        with_draft: bool = True,
    ) -> None:
        """Request tokens after a text, in place of any earlier request. A new text has room for
        `max_length` tokens.
        """
        self.request_number += 1
        try:
            self.connection.send(
                DraftRequest(
                    self.request_number, text, num_tokens, max_length, num_outcomes, with_draft
                )
            )
        except OSError as error:
            raise RunError("eval.overlap: the process that drafts has ended") from error

    def receive_draft(self) -> tuple[list[int], bool]:
        """Wait for the tokens of the last request; return them, and whether they were drafted
        ahead.
        """
        try:
            while True:
                number, tokens, was_ready = self.connection.recv()
                if number == self.request_number:
                    return list(tokens), was_ready
        except (EOFError, OSError) as error:
            raise RunError("eval.overlap: the process that drafts has ended") from error

    def run_pending(self) -> None:
        """Do nothing: the process runs by itself."""


class AheadDrafter:
    """Takes the drafter's part in the loop for one text, and requests drafts ahead from a
    worker.
    """

    def __init__(self, worker: ProcessWorker | StreamWorker, depth: int, overlap: Overlap) -> None:
        self.worker, self.depth, self.overlap = worker, depth, overlap
        self.pending_text: list[int] | None = None  # the text after which tokens were requested
        self.text: list[int] = []

    def start_text(self, request: Request) -> None:
        """Let the worker run the prompt while the target does."""
        (prompt,) = request.prompts
        max_length = len(prompt) + request.max_new_tokens + 3 * (self.depth + 2)
        self.worker.request_draft(prompt, self.depth + 1, max_length)
        self.pending_text = prompt

    def draft(self, context: Context) -> Draft:
        self.text = context.tokens[0, : int(context.lengths[0]) + 1].tolist()
        if self.pending_text == self.text[:-1]:
            tokens, _ = self.worker.receive_draft()
            self.pending_text = None
            if tokens[:1] == self.text[-1:]:
                self.overlap.num_ready += 1
                return _make_draft(tokens[1:])
        self.overlap.num_missed += 1
        if self.overlap.pre_verify:
            self.worker.request_draft(self.text, self.depth + 1)
            self.pending_text = self.text
            return Draft()
        self.worker.request_draft(self.text, self.depth)
        return _make_draft(self.worker.receive_draft()[0])

    def verify(self, context: Context, tree: TokenTree) -> Features:
        if self.pending_text is None:
            ahead = [*self.text, *tree.tokens[0, 1:].tolist()]
            self.worker.request_draft(ahead, self.depth + 1)
            self.pending_text = ahead
        features = context.verify(tree)
        self.worker.run_pending()
        return features

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        if not bool(context.active.any()):
            self.worker.request_draft([], STOP_DRAFTING)
            self.pending_text = None


class OutcomeDrafter(AheadDrafter):
    """Does the same with a worker that drafts for likely outcomes: the worker receives the
    outcome and returns its draft.
    """

    def start_text(self, request: Request) -> None:
        (prompt,) = request.prompts
        max_length = len(prompt) + request.max_new_tokens + 3 * (self.depth + 2)
        self.worker.request_draft(
            prompt, self.depth, max_length, self.overlap.num_outcomes, with_draft=False
        )

    def draft(self, context: Context) -> Draft:
        text = context.tokens[0, : int(context.lengths[0]) + 1].tolist()
        self.worker.request_draft(text, self.depth, num_outcomes=self.overlap.num_outcomes)
        tokens, was_ready = self.worker.receive_draft()
        self.overlap.num_ready += was_ready
        self.overlap.num_missed += not was_ready
        return _make_draft(tokens)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        features = context.verify(tree)
        self.worker.run_pending()
        return features


def _make_draft(tokens: list[int]) -> Draft:
    return Draft(continuations=[Trie.from_continuations([tokens])])


class OverlappedRunner(EagerRunner):
    """Runs rounds of one text at a time; the drafter has a separate process or stream."""

    def __init__(
        self,
        target: Target,
        rule: AcceptanceRule,
        worker: ProcessWorker | StreamWorker,
        builder: TreeBuilder,
        overlap: Overlap,
    ) -> None:
        super().__init__(target, rule)
        self.builder = builder
        ahead = OutcomeDrafter if overlap.num_outcomes else AheadDrafter
        self.round_drafter = self.ahead_drafter = ahead(worker, builder.depth, overlap)

    def prefill(self, request: Request) -> list[int]:
        if len(request.prompts) != 1:
            raise UserError(
                f"eval.overlap: {len(request.prompts)} texts at once; use eval.batch_size=1"
            )
        self.ahead_drafter.start_text(request)
        return super().prefill(request)
