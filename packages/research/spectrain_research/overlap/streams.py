"""Overlapped drafting on one GPU: in the same process, on a separate CUDA stream.

A forward of the target is launched and returns before it has run. The follower then drafts on its
stream, and waits for this stream alone when it reads its tokens. The two share no tensor that
either writes: the follower reads the text, which is on the host, and the weights. On a CPU the same
steps run one after the other, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain_research.shared.follower import STOP_DRAFTING, DraftRequest, Follower, LikelyOutcomes


class StreamWorker:
    """A worker that drafts on a separate stream, with the interface of `ProcessWorker`."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.follower = Follower(drafter, target)
        self.stream: torch.cuda.Stream | None = None
        if target.device.type == "cuda":
            self.stream = torch.cuda.Stream(target.device)
            self.stream.wait_stream(torch.cuda.current_stream(target.device))  # for the weights
        self.request_number = 0
        self.request: DraftRequest | None = None  # not fulfilled yet
        self.result: tuple[list[int], bool] = ([], False)
        self.likely_outcomes: LikelyOutcomes | None = None

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
        self.request = DraftRequest(
            self.request_number, text, num_tokens, max_length, num_outcomes, with_draft
        )
        with self._use_stream():
            if max_length is not None or num_tokens == STOP_DRAFTING:
                self._drop_outcomes()
            if max_length is not None:
                self.follower.start_text(max_length, num_tokens, num_outcomes)

    def receive_draft(self) -> tuple[list[int], bool]:
        """Return the tokens of the last request, and whether they were drafted ahead."""
        with self._use_stream():
            self._run_request()
        return self.result

    def run_pending(self) -> None:
        """Draft what is requested while the target's forward runs, then after outcomes until it
        has finished.
        """
        with self._use_stream() as is_verified:
            self._run_request()
            if self.likely_outcomes is not None:
                self.likely_outcomes.extend_drafts(is_verified)

    @contextmanager
    def _use_stream(self) -> Iterator[Callable[[], bool]]:
        """Use the separate stream; yield a check whether all work launched on the other stream
        so far has finished.
        """
        if self.stream is None:
            yield lambda: False
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield event.query

    def _run_request(self) -> None:
        request = self.request
        self.request = None
        if request is None or request.num_tokens == STOP_DRAFTING:
            return
        if not request.num_outcomes:
            self.result = (
                self.follower.draft(request.text, request.num_tokens, lambda: False),
                False,
            )
            return
        drafted: list[int] | None = None if request.with_draft else []
        if self.likely_outcomes is not None and request.with_draft:
            drafted = self.likely_outcomes.finish_draft(request.text)
        self._drop_outcomes()
        self.result = drafted or [], drafted is not None
        self.likely_outcomes = self.follower.predict_outcomes(request, drafted, self._set_result)

    def _set_result(self, tokens: list[int]) -> None:
        self.result = tokens, False

    def _drop_outcomes(self) -> None:
        if self.likely_outcomes is not None:
            self.likely_outcomes.end_draft()
            self.likely_outcomes = None
