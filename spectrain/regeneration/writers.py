"""Writers of regenerated answers: the target in this process, which decodes batches. `server.py` requests answers of a
server."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from spectrain.data.chat import tokenize_prompt
from spectrain.data.shards import FailedRow, FailureKind, PendingRow, Row, Shard
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.generation import Generation
from spectrain.decoding.session import EngineChoice, Session, require_capture
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.chat_template import Message
from spectrain.models.target import Target
from spectrain.trees import TreeBuilder

OutcomeCallback = Callable[[Shard, Row | FailedRow], None]


class Sampling:
    """How answers are sampled, by any writer."""

    def __init__(
        self,
        # Sampling temperature; 0 decodes greedily.
        temperature: float = 0.7,
        # Nucleus sampling: sample from the most likely tokens whose probabilities sum to this value; 1 uses all tokens.
        top_p: float = 1.0,
        # Sample from this many most likely tokens; 0 uses the whole vocabulary.
        top_k: int = 0,
        # Maximum length of an answer, in tokens.
        max_new_tokens: int = 512,
        # Seed of the random draws; the same seed gives the same answers.
        seed: int = 0,
        # Keep answers that max_new_tokens cuts, marked as cut; false leaves their conversations out.
        keep_cut: bool = True,
    ) -> None:
        if not temperature >= 0:
            raise UserError(f"sampling.temperature={temperature}: use 0, which is greedy, or more")
        if not 0 < top_p <= 1:
            raise UserError(f"sampling.top_p={top_p}: use more than 0 and at most 1")
        if top_k < 0:
            raise UserError(f"sampling.top_k={top_k}: use 1 or more, or 0 for the whole vocabulary")
        if max_new_tokens < 1:
            raise UserError(f"sampling.max_new_tokens={max_new_tokens}: use 1 or more")
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        self.max_new_tokens, self.seed, self.keep_cut = max_new_tokens, seed, keep_cut

    @property
    def acceptance_rule(self) -> AcceptanceRule:
        """The acceptance rule that samples this way in our own engine."""
        return Match(self.temperature, self.top_k, self.top_p, self.seed) if self.temperature else Greedy()

    def recorded_settings(self) -> dict[str, Any]:
        return {f"sampling.{key}": value for key, value in vars(self).items()}


class AnswerError(Exception):
    """A conversation that could not be answered, with the reason."""

    def __init__(self, kind: FailureKind, error: str) -> None:
        super().__init__(error)
        self.kind = kind

    def to_failed_row(self, pending: PendingRow) -> FailedRow:
        return FailedRow(pending.id, pending.messages, self.kind, str(self))


class ChatProgress:
    """A conversation in progress, answered turn by turn; each answer depends on the answers before it."""

    def __init__(self, pending: PendingRow, sampling: Sampling) -> None:
        self.pending, self.sampling = pending, sampling
        self.messages: list[Message] = []
        self.finish_reasons: list[str] = []
        self.answer_lengths: list[int] = []

    def next_messages(self) -> list[Message] | None:
        """Return the messages before the next answer; None if all answers are given."""
        for message in self.pending.messages[len(self.messages) :]:
            if message["role"] == "assistant":
                return self.messages
            self.messages.append(message)
        return None

    def add_answer(self, text: str, finish_reason: str, num_tokens: int) -> None:
        """Add the next answer; raise an AnswerError if it was cut and cut answers are not kept."""
        if finish_reason == "length" and not self.sampling.keep_cut:
            raise AnswerError("cut", f"answer {len(self.answer_lengths) + 1} was cut at {self.sampling.max_new_tokens} tokens")
        self.messages.append({"role": "assistant", "content": text})
        self.finish_reasons.append(finish_reason)
        self.answer_lengths.append(num_tokens)

    @property
    def finished_row(self) -> Row:
        return Row(self.pending.id, self.messages, self.finish_reasons, self.answer_lengths)


class AnswerWriter(ABC):
    """Answers the conversations of shards."""

    # Whether the constructor takes the loaded target.
    needs_target: bool

    @abstractmethod
    def recorded_settings(self) -> dict[str, Any]:
        """Return the settings that determine the answers, by their command-line names."""

    def check_ready(self) -> None:
        """Raise an error, before anything is on disk, if no answer can be written."""

    @abstractmethod
    def write_answers(self, shards: Iterable[Shard], on_outcome: OutcomeCallback) -> None:
        """Take shards one by one, when there is capacity, and pass on each conversation once it is answered or has failed."""


class EngineWriter(AnswerWriter):
    """Our own decoding, in batches of conversations of similar length.

    Every draw depends on the seed, the conversation and the position, and the batches of a shard are the same in every
    attempt, so an answer depends on nothing else. A drafter changes the speed of the answers, not their content.
    """

    needs_target = True

    def __init__(
        self,
        sampling: Sampling,
        target: Target,
        drafter: Drafter | None = None,
        builder: TreeBuilder | None = None,
        # Maximum number of tokens in a decoding batch, padding and answers included.
        batch_tokens: int = 16384,
        # Decoding engine: captured replays rounds as CUDA graphs, eager runs a loop, auto captures on a GPU.
        engine: EngineChoice = "auto",
    ) -> None:
        if batch_tokens < 1:
            raise UserError(f"writer.batch_tokens={batch_tokens}: use 1 or more")
        if not target.tokenizer.chat_template:
            raise UserError(
                "target: its tokenizer has no chat template; use an instruction-tuned model or add one to the tokenizer"
            )
        self.sampling, self.target, self.batch_tokens = sampling, target, batch_tokens
        self.session = Session(target, sampling.acceptance_rule, drafter, builder, engine=engine)
        require_capture(self.session, "writer.engine")

    def recorded_settings(self) -> dict[str, Any]:
        dtype = str(self.target.dtype).removeprefix("torch.")
        return {"writer": "engine", "target": self.target.name, "target.model": self.target.path, "target.dtype": dtype}

    def write_answers(self, shards: Iterable[Shard], on_outcome: OutcomeCallback) -> None:
        for shard in shards:
            usable: list[tuple[int, PendingRow]] = []
            for wanted in shard.pending:
                try:
                    usable.append((self._bound_length(wanted), wanted))
                except (AnswerError, UserError) as error:
                    given_up = error if isinstance(error, AnswerError) else AnswerError("failed", str(error))
                    on_outcome(shard, given_up.to_failed_row(wanted))
            for batch in self._make_batches(usable):
                if any(wanted.id not in shard.rows for wanted in batch):
                    for outcome in self._answer_batch(batch):
                        if outcome.id not in shard.rows:
                            on_outcome(shard, outcome)

    def make_prompt(self, messages: list[Message]) -> list[int]:
        """Return the tokens up to the next answer; raise an AnswerError if the context has no room for the answer."""
        tokens = tokenize_prompt(self.target.template, messages)
        room = self.target.max_length - self.sampling.max_new_tokens
        if len(tokens) > room:
            raise AnswerError(
                "too_long",
                f"a prompt of {len(tokens)} tokens leaves no room for an answer of {self.sampling.max_new_tokens} in the "
                f"{self.target.max_length} of {self.target.name}",
            )
        return tokens

    def _bound_length(self, pending: PendingRow) -> int:
        """Return an upper bound on the conversation's tokens, without the template's tokens of later turns."""
        first = len(self.make_prompt(ChatProgress(pending, self.sampling).next_messages() or []))
        answers = [at for at, message in enumerate(pending.messages) if message["role"] == "assistant"]
        questions = [message["content"] for message in pending.messages[answers[0] :] if message["role"] != "assistant"]
        later: Any = self.target.tokenizer(questions, add_special_tokens=False)["input_ids"] if questions else []
        return first + sum(map(len, later)) + len(answers) * self.sampling.max_new_tokens

    def _make_batches(self, usable: list[tuple[int, PendingRow]]) -> Iterator[list[PendingRow]]:
        """Batch conversations of similar length; batch sizes are powers of two if rounds are captured per batch size."""
        waiting = sorted(usable, key=lambda entry: (entry[0], entry[1].id))
        while waiting:
            count = 1
            while count < len(waiting) and (count + 1) * waiting[count][0] <= self.batch_tokens:
                count += 1
            if self.session.eager_reason is None:
                count = 1 << (count.bit_length() - 1)
            yield [wanted for _, wanted in waiting[:count]]
            waiting = waiting[count:]

    def _answer_batch(self, batch: list[PendingRow]) -> Iterator[Row | FailedRow]:
        """Answer a batch; if that fails, answer its halves, so that one conversation does not fail others."""
        try:
            yield from list(self._answer_turns([ChatProgress(wanted, self.sampling) for wanted in batch]))
            return
        except Exception as error:  # whatever a model, a tokenizer or a full device can raise
            problem = f"{type(error).__name__}: {' '.join(str(error).split()) or type(error).__name__}"
        if len(batch) == 1:
            yield AnswerError("failed", problem).to_failed_row(batch[0])
            return
        # Outside `except`, which would keep the memory of the failed batch on the device.
        half = len(batch) // 2
        yield from self._answer_batch(batch[:half])
        yield from self._answer_batch(batch[half:])

    def _answer_turns(self, chats: list[ChatProgress]) -> Iterator[Row | FailedRow]:
        """Answer every chat turn by turn; the chats that still need an answer form one batch."""
        while chats:
            ready: list[tuple[ChatProgress, list[int]]] = []
            for chat in chats:
                try:
                    messages = chat.next_messages()
                    if messages is None:
                        yield chat.finished_row
                    else:
                        ready.append((chat, self.make_prompt(messages)))
                except AnswerError as given_up:
                    yield given_up.to_failed_row(chat.pending)
            chats = []
            for (chat, _), generation in zip(ready, self._decode_prompts(ready) if ready else []):
                try:
                    chat.add_answer(*self._parse_generation(generation))
                    chats.append(chat)
                except AnswerError as given_up:
                    yield given_up.to_failed_row(chat.pending)

    def _decode_prompts(self, chats_with_prompts: list[tuple[ChatProgress, list[int]]]) -> list[Generation]:
        prompts, keys = [tokens for _, tokens in chats_with_prompts], [chat.pending.key for chat, _ in chats_with_prompts]
        return self.session.decode(prompts, self.sampling.max_new_tokens, keys)

    def _parse_generation(self, generation: Generation) -> tuple[str, str, int]:
        """Return the answer's text, its finish reason and its number of tokens, the stop token included."""
        output = generation.output
        stopped = output[-1] in self.target.stop_ids
        text = self.target.tokenizer.decode(
            output[:-1] if stopped else output, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text, "stop" if stopped else "length", len(output)


def collect_prompts(writer: EngineWriter, conversations: list[PendingRow], count: int = 8) -> list[list[int]]:
    """Return the first prompts that fit the context, for trees and drafters that are calibrated on prompts."""
    prompts: list[list[int]] = []
    for wanted in conversations:
        with suppress(AnswerError, UserError):
            prompts.append(writer.make_prompt(ChatProgress(wanted, writer.sampling).next_messages() or []))
        if len(prompts) == count:
            break
    return prompts
