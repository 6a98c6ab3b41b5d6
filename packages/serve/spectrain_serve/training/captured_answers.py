"""Answers of a server together with the states of their tokens, in one request for each answer.
Shapes: T tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.data.messages import Conversation
from spectrain.data.shards import FailedRow, PendingRow, Row
from spectrain.errors import RunError, UserError
from spectrain.regeneration.answer_states import AnswerStates
from spectrain.regeneration.chat_progress import AnswerError, ChatProgress, GeneratedAnswer
from spectrain.regeneration.sampling import Sampling
from spectrain.regeneration.writers import parse_generation, render_prompt

from ..servers.base import CompletionRequest
from ..servers.errors import ServerError
from .server_capture import StoreFiller, record_failures
from .server_states import CapturedStates, OtherModelError, StateRequester, StatesError
from .server_writer import ServerWriter

PROBE_TOKENS = 24
"""Longest of the answers that are written before the first conversation, to compare them with
their states.
"""


class CapturingWriter(ServerWriter):
    """Answers of a server whose states fill a feature store under the keys of a training on the
    answers.

    Prompts are token ids of the target's chat template, so that a training reads the same tokens. A
    request returns the states of the prompt and of the answer but its last token, which no loss
    reads, because it precedes no token of the answer.
    """

    states: AnswerStates

    def __init__(self, sampling: Sampling, requester: StateRequester, states: AnswerStates) -> None:
        super().__init__(sampling, requester.server)
        self.requester = requester
        self.states = states
        self.target = states.target

    def recorded_settings(self) -> dict[str, Any]:
        return super().recorded_settings() | {
            "target": self.target.name,
            "target.model": self.target.path,
        }

    def check_sampling(self, prompts: list[list[int]]) -> None:
        """Raise a UserError if the server's answers do not follow from its states; call this
        before anything is written.
        """

        async def answer_prompts() -> None:
            async with self.server:
                for prompt in prompts:
                    sampling = self.sampling
                    request = CompletionRequest(
                        prompt,
                        PROBE_TOKENS,
                        sampling.temperature,
                        sampling.top_p,
                        sampling.top_k,
                        0,
                        captures_states=True,
                    )
                    await self.requester.repeat(partial(self._request_states, request))

        try:
            asyncio.run(answer_prompts())
        except OtherModelError as error:
            raise UserError(
                f"sampling.temperature={self.sampling.temperature}: {error}, so the server "
                "samples wrongly while it captures; use sampling.temperature=0, or regenerate "
                "without capture=true and store the features of the answers"
            ) from error
        except (StatesError, ServerError) as error:
            raise UserError(
                f"server.url: a first answer and its states cannot be captured: {error}"
            ) from error

    async def _request_states(
        self, request: CompletionRequest
    ) -> tuple[CapturedStates, Tensor, str]:
        """Return an answer with its states, checked, those that a training reads, and why the
        answer ended.
        """
        completion = await self.server.complete(request)
        assert not isinstance(request.prompt, Conversation)
        tokens = [*request.prompt, *(completion.token_ids or [])[:-1]]
        captured = self.requester.check_completion(completion, tokens, request.temperature)
        return captured, self.requester.read_layers(captured), completion.finish_reason

    async def _answer_conversation(self, pending: PendingRow) -> Row | FailedRow:
        try:
            return await super()._answer_conversation(pending)
        finally:
            self.states.drop_states(pending.id)

    async def request_answer(
        self, chat: ChatProgress, conversation: Conversation
    ) -> GeneratedAnswer:
        prompt = render_prompt(self.target.template, conversation)
        request = replace(self.make_request(chat, prompt), captures_states=True)
        try:
            captured, states, reason = await self.requester.repeat(
                partial(self._request_states, request)
            )
        except StatesError as error:
            raise AnswerError("failed", str(error)) from error
        self.states.add_states(chat.pending.id, captured.tokens, states)
        answer = parse_generation(self.target, captured.generated, prompt, conversation.tools)
        return replace(answer, finish_reason=reason)

    async def finish_conversation(self, chat: ChatProgress) -> None:
        """Store the states of the conversation's training sequences, as far as the requests have
        returned them.
        """
        self.states.store_conversation(chat)

    def complete_store(self, folder: Path) -> str:
        """Capture the training sequences of a finished set that the store lacks, each by one
        request for its prompt; return a sentence with the counts."""
        store = self.states.store
        examples = self.states.make_set_examples(folder)
        distinct, missing = store.list_distinct(examples)
        filler = StoreFiller(self.requester, store, shows_progress=True)
        filler.fill_store(missing)
        record_failures(filler.failed, examples, store)
        if filler.failed:
            raise RunError(
                f"{store.path}: {len(filler.failed)} sequences are missing; run the same "
                "command again"
            )
        return (
            f"{store.path}: {len(distinct)} sequences; {self.states.num_stored} by the requests of "
            f"their answers, {len(missing)} by requests of their own, of {filler.num_tokens} "
            f"tokens; {self.requester.num_repeated} requested again; train with data=jsonl "
            f"data.path={folder} source=store source.path={store.path}"
        )
