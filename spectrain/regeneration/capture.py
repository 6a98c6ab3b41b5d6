"""Answers together with the states of their tokens: those of a server in one request for each
answer, those of our engine while it decodes. Shapes: T tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.messages import Conversation
from spectrain.data.readers import ConversationReader
from spectrain.data.shards import FailedRow, PendingRow, Row
from spectrain.drafters.base import Stage
from spectrain.errors import RunError, UserError
from spectrain.features.base import FeaturesRead
from spectrain.features.server_capture import StoreFiller, record_failures
from spectrain.features.server_states import (
    CapturedStates,
    OtherModelError,
    StateRequester,
    StatesError,
)
from spectrain.features.stored_source import StoredSource
from spectrain.models.target import Target
from spectrain.servers.base import CompletionRequest
from spectrain.servers.errors import ServerError

from .answer_states import AnswerStates
from .chat_progress import AnswerError, ChatProgress, GeneratedAnswer
from .regenerate import Regeneration
from .sampling import Sampling
from .server import ServerWriter
from .writers import collect_prompts, parse_generation, render_prompt

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


def list_engine_settings(spec: RunSpec, writer: GroupSpec) -> list[str]:
    """Return the keys that the command sets and that only this project's own engine reads."""
    is_set = {
        "target": spec.target.layer == "command",
        "run": spec.run is not None,
        "tree": spec.tree.layer == "command",
        "writer": writer.layer == "command",
    }
    return [key for key, value in is_set.items() if value]


def make_capturing_writer(
    spec: RunSpec,
    writer: GroupSpec,
    settings: Regeneration,
    sampling: Sampling,
    data: ConversationReader,
    folder: Path,
) -> CapturingWriter:
    """Return the writer of a server's answers and their states, after a check of the server, with
    an open store.
    """
    for key in list_engine_settings(spec, writer):
        if key != "target":
            raise UserError(f"{key}: the server writes the answers; leave {key} out")
    target: Target = spec.target.build()
    stage = find_captured_stage(spec, target)
    requester = StateRequester(spec.server.build(), target, stage.layers)
    rows = settings.make_calibration_rows(data)
    prompts = collect_prompts(partial(render_prompt, target.template), sampling, rows, count=4)
    engine = requester.connect([Example(prompt, [False] * len(prompt)) for prompt in prompts])
    states = open_states(spec, target, stage, data, folder, engine)
    capturing = CapturingWriter(sampling, requester, states)
    capturing.check_sampling(prompts)
    return capturing


def check_captured(spec: RunSpec) -> None:
    """Raise a UserError unless the command says for which target and drafter states are
    captured.
    """
    for key, group in (("target", spec.target), ("recipe", spec.drafter)):
        if not group:
            raise UserError(
                f"capture=true: say {key}=NAME, which decides on the layers that are captured"
            )


def find_captured_stage(spec: RunSpec, target: Target) -> Stage:
    """Return the stage of the recipe's drafter whose features are captured."""
    stage: Stage = spec.drafter.build(target=target).stages[0]
    return stage


def open_states(
    spec: RunSpec,
    target: Target,
    stage: Stage,
    data: ConversationReader,
    folder: Path,
    # The server that fills the store, as its manifest names it; None where the target runs here.
    engine: str | None = None,
) -> AnswerStates:
    """Return the states of the answers in a folder, with an open store."""
    source: StoredSource = GroupSpec(
        "source", "store", {"path": str(folder / "features"), **spec.source.settings}
    ).build()
    source.engine = engine
    source.prepare(target, FeaturesRead(stage.layers, stage.final_reach), None)
    store = source.own_store
    if store is None:
        raise UserError(
            f"source.path={source.path}: this cache is another project's; choose another folder"
        )
    reads_tail = stage.final_reach is None
    return AnswerStates(store, stage.layers, target, data, reads_tail=reads_tail)
