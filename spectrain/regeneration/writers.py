"""Writers of regenerated answers: the target in this process, which decodes batches, and the
contract of servers that write them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from spectrain.config.values import Count
from spectrain.data.answers import parse_answer
from spectrain.data.chat import require_template, tokenize_prompt
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.images import content_text
from spectrain.data.messages import Conversation
from spectrain.data.shards import FailedRow, PendingRow, Row, Shard
from spectrain.decoding.generation import Generation
from spectrain.decoding.session import EngineChoice, Session, require_capture
from spectrain.drafters.base import Drafter, Stage
from spectrain.errors import UserError
from spectrain.models.accelerator import accelerator
from spectrain.models.target import Target
from spectrain.trees import TreeBuilder

from .answer_states import AnswerStates
from .chat_progress import AnswerError, ChatProgress, GeneratedAnswer
from .sampling import Sampling

OutcomeCallback = Callable[[Shard, Row | FailedRow], None]


class AnswerWriter(ABC):
    """Answers the conversations of shards."""

    # Takes the states of answers while they are written; None captures none.
    states: AnswerStates | None = None

    @abstractmethod
    def recorded_settings(self) -> dict[str, Any]:
        """Return the settings that determine the answers, by their command-line names."""

    def check_ready(self) -> None:
        """Raise an error, before anything is on disk, if no answer can be written."""

    @abstractmethod
    def write_answers(self, shards: Iterable[Shard], on_outcome: OutcomeCallback) -> None:
        """Take shards one by one, when there is capacity, and pass on each conversation once it
        is answered or has failed.
        """

    def complete_store(self, folder: Path) -> str:
        """Capture what a finished set lacks of its states; return a sentence with the counts."""
        assert self.states is not None, "nothing is captured"
        return self.states.complete_store(folder)


class AnswerServer(ABC):
    """A running engine that writes answers. An installed package has the engines."""

    @abstractmethod
    def make_writer(self, sampling: Sampling) -> AnswerWriter:
        """Return the writer that requests answers."""

    @abstractmethod
    def make_capturing_writer(
        self,
        sampling: Sampling,
        target: Target,
        stage: Stage,
        open_states: Callable[[str], AnswerStates],
        # Conversations on which the server is checked first.
        rows: list[PendingRow],
    ) -> AnswerWriter:
        """Return the writer that also captures the states that a stage reads, after a check of the
        server; `open_states` opens the store, with the server's name.
        """


class EngineWriter(AnswerWriter):
    """Our own decoding: in batches of conversations of similar length, or by continuous batching
    where an installed package runs texts of different lengths without padding.

    Every draw depends on the seed, the conversation and the position, and the bits of a pooled text
    on no other text. The batches of a shard are the same in every attempt. So an answer depends on
    nothing else. A drafter changes the speed of the answers, not their content.
    """

    def __init__(
        self,
        sampling: Sampling,
        target: Target,
        drafter: Drafter | None = None,
        builder: TreeBuilder | None = None,
        # Maximum number of tokens in a decoding batch, padding and answers included.
        batch_tokens: Count = 16384,
        # Decoding engine: captured replays rounds as CUDA graphs, eager runs a loop, auto captures
        # on a GPU.
        engine: EngineChoice = "auto",
    ) -> None:
        require_template(target.template)
        self.sampling, self.target, self.batch_tokens = sampling, target, batch_tokens
        self.session = Session(target, sampling.acceptance_rule, drafter, builder, engine=engine)
        require_capture(self.session, "writer.engine")

    def recorded_settings(self) -> dict[str, Any]:
        dtype = str(self.target.dtype).removeprefix("torch.")
        return {
            "writer": "engine",
            "target": self.target.name,
            "target.model": self.target.path,
            "target.dtype": dtype,
            "target.quantization": self.target.quantization,
            "target.weights": self.target.weights_hash,
            "target.chat_template": self.target.template.facts(),
        }

    def write_answers(self, shards: Iterable[Shard], on_outcome: OutcomeCallback) -> None:
        if not accelerator().write_answers(self, shards, on_outcome):
            self._write_batches(shards, on_outcome)

    def _write_batches(self, shards: Iterable[Shard], on_outcome: OutcomeCallback) -> None:
        for shard in shards:
            usable: list[tuple[int, PendingRow]] = []
            for pending in shard.pending:
                try:
                    usable.append((self._bound_length(pending), pending))
                except AnswerError as error:
                    on_outcome(shard, error.to_failed_row(pending))
            for batch in self._make_batches(usable):
                if any(pending.id not in shard.rows for pending in batch):
                    for outcome in self.answer_batch(batch):
                        if outcome.id not in shard.rows:
                            on_outcome(shard, outcome)

    def make_prompt(self, conversation: Conversation) -> list[int]:
        """Return the tokens up to the next answer; raise an AnswerError if there are none, or the
        context has no room for the answer.
        """
        tokens = render_prompt(self.target.template, conversation)
        room = self.target.max_length - self.sampling.max_new_tokens
        if len(tokens) > room:
            raise AnswerError(
                "too_long",
                f"a prompt of {len(tokens)} tokens leaves no room for an answer of "
                f"{self.sampling.max_new_tokens} in the {self.target.max_length} of "
                f"{self.target.name}",
            )
        return tokens

    def _bound_length(self, pending: PendingRow) -> int:
        """Return an upper bound on the conversation's tokens, without the template's tokens of
        later turns.
        """
        first = len(
            self.make_prompt(ChatProgress(pending, self.sampling).next_prompt() or Conversation([]))
        )
        answers = [
            at for at, message in enumerate(pending.messages) if message["role"] == "assistant"
        ]
        questions = [
            content_text(message["content"])
            for message in pending.messages[answers[0] :]
            if message["role"] != "assistant"
        ]
        later: Any = (
            self.target.tokenizer(questions, add_special_tokens=False)["input_ids"]
            if questions
            else []
        )
        return first + sum(map(len, later)) + len(answers) * self.sampling.max_new_tokens

    def _make_batches(self, usable: list[tuple[int, PendingRow]]) -> Iterator[list[PendingRow]]:
        """Batch conversations of similar length; batch sizes are powers of two if rounds are
        captured per batch size.
        """
        waiting = sorted(usable, key=lambda entry: (entry[0], entry[1].id))
        while waiting:
            count = 1
            while count < len(waiting) and (count + 1) * waiting[count][0] <= self.batch_tokens:
                count += 1
            if self.session.eager_reason is None:
                count = 1 << (count.bit_length() - 1)
            yield [pending for _, pending in waiting[:count]]
            waiting = waiting[count:]

    def answer_batch(self, batch: list[PendingRow]) -> Iterator[Row | FailedRow]:
        """Answer a batch; if that fails, answer its halves, so that one conversation does not
        fail others.
        """
        try:
            yield from list(
                self._answer_turns([ChatProgress(pending, self.sampling) for pending in batch])
            )
            return
        except Exception as error:  # whatever a model, a tokenizer or a full device can raise
            problem = (
                f"{type(error).__name__}: {' '.join(str(error).split()) or type(error).__name__}"
            )
        if len(batch) == 1:
            yield AnswerError("failed", problem).to_failed_row(batch[0])
            return
        # Outside `except`, which would keep the memory of the failed batch on the device.
        half = len(batch) // 2
        yield from self.answer_batch(batch[:half])
        yield from self.answer_batch(batch[half:])

    def _answer_turns(self, chats: list[ChatProgress]) -> Iterator[Row | FailedRow]:
        """Answer every chat turn by turn; the chats that still need an answer form one batch."""
        while chats:
            ready: list[tuple[ChatProgress, list[int]]] = []
            for chat in chats:
                try:
                    conversation = chat.next_prompt()
                    if conversation is None:
                        yield chat.finished_row
                    else:
                        ready.append((chat, self.make_prompt(conversation)))
                except AnswerError as error:
                    yield error.to_failed_row(chat.pending)
            chats = []
            for (chat, prompt), generation in zip(
                ready, self._decode_prompts(ready) if ready else []
            ):
                try:
                    chat.add_answer(self.read_answer(chat, prompt, generation))
                    chats.append(chat)
                except AnswerError as error:
                    yield error.to_failed_row(chat.pending)

    def read_answer(
        self, chat: ChatProgress, prompt: list[int], generation: Generation
    ) -> GeneratedAnswer:
        return parse_generation(
            self.target, generation.output, prompt, chat.pending.conversation.tools
        )

    def _decode_prompts(
        self, chats_with_prompts: list[tuple[ChatProgress, list[int]]]
    ) -> list[Generation]:
        prompts = [tokens for _, tokens in chats_with_prompts]
        keys = [chat.pending.key for chat, _ in chats_with_prompts]
        return self.session.decode(prompts, self.sampling.max_new_tokens, keys)


def render_prompt(template: ChatTemplate, conversation: Conversation) -> list[int]:
    """Return the tokens up to the next answer; raise an AnswerError where the template has no form
    for the conversation.
    """
    try:
        return tokenize_prompt(template, conversation)
    except UserError as error:
        raise AnswerError("failed", str(error)) from error


def parse_generation(
    target: Target, output: list[int], prompt: list[int], tools: list[dict[str, Any]] | None
) -> GeneratedAnswer:
    """Return the answer with its token ids, of which the last is the stop token where the model
    wrote one.
    """
    tokenizer = target.tokenizer
    stopped = output[-1] in target.stop_ids
    text = output[:-1] if stopped else output
    written = tokenizer.decode(text, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    message = parse_answer(
        target.template, str(written), str(tokenizer.decode(prompt[-64:])), tools
    )
    if message.keys() == {"role", "content"}:
        message["content"] = tokenizer.decode(
            text, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    return GeneratedAnswer(message, "stop" if stopped else "length", len(output), output)


def collect_prompts(
    make_prompt: Callable[[Conversation], list[int]],
    sampling: Sampling,
    rows: list[PendingRow],
    count: int = 8,
) -> list[list[int]]:
    """Return the first prompts that can be answered, for what is calibrated or checked on prompts;
    raise a UserError if there is none."""
    prompts: list[list[int]] = []
    reasons: list[str] = []
    for pending in rows:
        try:
            prompts.append(
                make_prompt(ChatProgress(pending, sampling).next_prompt() or Conversation([]))
            )
        except AnswerError as error:
            reasons.append(str(error))
        if len(prompts) == count:
            break
    if not prompts:
        raise UserError(
            f"data: none of its first {len(rows)} conversations can be answered ({reasons[0]}); "
            "use others"
        )
    return prompts
