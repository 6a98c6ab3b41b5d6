"""Answers from a server together with the states of their tokens, in one request for each
answer. Shapes: T tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.config.build import GroupSpec
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import make_examples
from spectrain.data.messages import Conversation, parse_conversation
from spectrain.data.readers import ConversationReader, JsonlReader
from spectrain.data.shards import FailedRow, PendingRow, Row
from spectrain.errors import RunError, UserError
from spectrain.features.base import FeaturesRead
from spectrain.features.server_capture import StoreFiller, record_failures
from spectrain.features.server_states import (
    CapturedStates,
    OtherModelError,
    StateRequester,
    StatesError,
)
from spectrain.features.store import FeatureStore
from spectrain.features.stored_source import StoredSource
from spectrain.models.target import Target
from spectrain.servers.base import CompletionRequest
from spectrain.servers.errors import ServerError

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

    def __init__(
        self,
        sampling: Sampling,
        requester: StateRequester,
        store: FeatureStore,
        data: ConversationReader,
        reads_tail: bool,
    ) -> None:
        super().__init__(sampling, requester.server)
        self.requester = requester
        self.store = store
        self.data = data
        self.target = requester.target
        # Whether the loss reads states after the last one that a request returns.
        self.reads_tail = reads_tail
        # States [T, L, D] by conversation; a later answer's replace those of the prefix that it
        # continues.
        self.captured: dict[int, list[tuple[list[int], Tensor]]] = {}
        self.num_stored = 0

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
            self.captured.pop(pending.id, None)

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
        self._add_states(chat.pending.id, captured.tokens, states)
        answer = parse_generation(self.target, captured.generated, prompt, conversation.tools)
        return replace(answer, finish_reason=reason)

    def _add_states(self, conversation: int, tokens: list[int], states: Tensor) -> None:
        earlier = self.captured.get(conversation, [])
        kept = [entry for entry in earlier if entry[0] != tokens[: len(entry[0])]]
        self.captured[conversation] = [*kept, (tokens, states.cpu())]

    async def finish_conversation(self, chat: ChatProgress) -> None:
        """Store the states of the conversation's training sequences, as far as the requests have
        returned them.
        """
        row = {key: value for key, value in asdict(chat.finished_row).items() if value is not None}
        captured = self.captured.get(chat.pending.id, [])
        for example in self.make_examples(
            parse_conversation(row, f"conversation {chat.pending.id}")
        ):
            states = None if self.reads_tail else find_states(example, captured)
            if states is not None and example not in self.store:
                self.store.put_states(example, states, self.requester.layers)
                self.num_stored += 1

    def make_examples(self, conversation: Conversation) -> list[Example]:
        """Return the training sequences of a conversation; none of one that training would
        refuse.
        """
        try:
            template = self.data.apply_arguments(self.target.template)
            return make_examples(
                template, conversation, self.data.max_length, None, self.data.train_on
            )[0]
        except UserError:
            return []

    def complete_store(self, folder: Path) -> str:
        """Capture the training sequences of a finished set that the store lacks, each by one
        request for its prompt; return a sentence with the counts."""
        reader = JsonlReader(
            str(folder), max_length=self.data.max_length, train_on=self.data.train_on
        )
        examples = reader.make_dataset(self.data.apply_arguments(self.target.template)).examples
        distinct, missing = self.store.list_distinct(examples)
        filler = StoreFiller(self.requester, self.store, shows_progress=True)
        filler.fill_store(missing)
        record_failures(filler.failed, examples, self.store)
        if filler.failed:
            raise RunError(
                f"{self.store.path}: {len(filler.failed)} sequences are missing; run the same "
                "command again"
            )
        return (
            f"{self.store.path}: {len(distinct)} sequences; {self.num_stored} by the requests of "
            f"their answers, {len(missing)} by requests of their own, of {filler.num_tokens} "
            f"tokens; {self.requester.num_repeated} requested again; train with data=jsonl "
            f"data.path={folder} source=store source.path={self.store.path}"
        )


def find_states(example: Example, captured: list[tuple[list[int], Tensor]]) -> Tensor | None:
    """Return the captured states of an example's tokens; None unless they reach to the last
    token that precedes loss.
    """
    for tokens, states in captured:
        count = min(len(tokens), len(example.tokens))
        if tokens[:count] == example.tokens[:count] and not any(example.mask[count + 1 :]):
            return states[:count]
    return None


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
    """Return the writer of answers and states, after a check of the server, with an open store."""
    if not spec.server:
        raise UserError(
            "capture=true: name the server, as in server=vllm server.url=http://127.0.0.1:8000/v1"
        )
    for key, group in (("target", spec.target), ("recipe", spec.drafter)):
        if not group:
            raise UserError(
                f"capture=true: say {key}=NAME, which decides on the layers that are captured"
            )
    for key in list_engine_settings(spec, writer):
        if key != "target":
            raise UserError(f"{key}: the server writes the answers; leave {key} out")
    target: Target = spec.target.build()
    stage = spec.drafter.build(target=target).stages[0]
    requester = StateRequester(spec.server.build(), target, stage.layers)
    rows = settings.make_calibration_rows(data)
    prompts = collect_prompts(partial(render_prompt, target.template), sampling, rows, count=4)
    source: StoredSource = GroupSpec(
        "source", "store", {"path": str(folder / "features"), **spec.source.settings}
    ).build()
    source.engine = requester.connect(
        [Example(prompt, [False] * len(prompt)) for prompt in prompts]
    )
    source.prepare(target, FeaturesRead(stage.layers, stage.final_reach), None)
    store = source.own_store
    if store is None:
        raise UserError(
            f"source.path={source.path}: this cache is another project's; choose another folder"
        )
    reads_tail = stage.final_reach is None
    capturing = CapturingWriter(sampling, requester, store, data, reads_tail=reads_tail)
    capturing.check_sampling(prompts)
    return capturing
