"""Who writes answers anew: the target in this process, decoding in batches. `server.py` asks a server for the same."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from spectrain.data.chat import Message, tokenize_prompt
from spectrain.data.shards import FailedRow, FailureKind, PendingRow, Row, Shard
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.generation import Generation
from spectrain.decoding.session import EngineChoice, Session, require_capture
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import TreeBuilder

OutcomeCallback = Callable[[Shard, Row | FailedRow], None]


class Sampling:
    """How answers are drawn, by whoever writes them. Temperature 0 is greedy; top_k=0 is the whole vocabulary.

    An answer that `max_new_tokens` cuts is kept, marked as such, or with keep_cut=false its conversation is left out.
    """

    def __init__(
        self,
        temperature: float = 0.7,
        top_p: float = 1.0,
        top_k: int = 0,
        max_new_tokens: int = 512,
        seed: int = 0,
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
        """The rule that draws so in our own engine."""
        return Match(self.temperature, self.top_k, self.top_p, self.seed) if self.temperature else Greedy()

    def recorded_settings(self) -> dict[str, Any]:
        return {f"sampling.{key}": value for key, value in vars(self).items()}


class AnswerError(Exception):
    """A conversation that is given up, with the reason."""

    def __init__(self, kind: FailureKind, error: str) -> None:
        super().__init__(error)
        self.kind = kind

    def to_failed_row(self, pending: PendingRow) -> FailedRow:
        return FailedRow(pending.id, pending.messages, self.kind, str(self))


class ChatProgress:
    """A conversation while it is answered turn by turn, each answer given what was answered before."""

    def __init__(self, pending: PendingRow, sampling: Sampling) -> None:
        self.pending, self.sampling = pending, sampling
        self.messages: list[Message] = []
        self.finish_reasons: list[str] = []
        self.answer_lengths: list[int] = []

    def next_messages(self) -> list[Message] | None:
        """The messages before the next answer; None once all are given."""
        for message in self.pending.messages[len(self.messages) :]:
            if message["role"] == "assistant":
                return self.messages
            self.messages.append(message)
        return None

    def add_answer(self, text: str, finish_reason: str, num_tokens: int) -> None:
        """Take the next answer; an Unanswered where it was cut and cut ones are not wanted."""
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

    needs_target: bool  # it is given the loaded target

    @abstractmethod
    def recorded_settings(self) -> dict[str, Any]:
        """What its answers depend on, by the names that the command line has for it."""

    def check_ready(self) -> None:
        """Stop, before anything is on the disk, where nothing could be written."""

    @abstractmethod
    def write_answers(self, shards: Iterable[Shard], on_outcome: OutcomeCallback) -> None:
        """Take shards one by one, as soon as there is room for more, and hand over each conversation once it is written or
        lost."""


class EngineWriter(AnswerWriter):
    """Our own decoding. Conversations of like length go together, at most `batch_tokens` with padding and answers.

    Every draw is keyed by seed, conversation and position, and the batches of a shard are the same in every attempt at it, so
    an answer depends on nothing else. A drafter changes how fast answers come, and not which.
    """

    needs_target = True

    def __init__(
        self,
        sampling: Sampling,
        target: Target,
        drafter: Drafter | None = None,
        builder: TreeBuilder | None = None,
        batch_tokens: int = 16384,
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
        """The tokens of a conversation up to where the target goes on; Unanswered where the context has no room for that."""
        tokens = tokenize_prompt(self.target.tokenizer, messages)
        room = self.target.max_length - self.sampling.max_new_tokens
        if len(tokens) > room:
            raise AnswerError(
                "too_long",
                f"a prompt of {len(tokens)} tokens leaves no room for an answer of {self.sampling.max_new_tokens} in the "
                f"{self.target.max_length} of {self.target.name}",
            )
        return tokens

    def _bound_length(self, pending: PendingRow) -> int:
        """The most tokens that a conversation can come to, the words that the template adds to later turns left out."""
        first = len(self.make_prompt(ChatProgress(pending, self.sampling).next_messages() or []))
        answers = [at for at, message in enumerate(pending.messages) if message["role"] == "assistant"]
        asked = [message["content"] for message in pending.messages[answers[0] :] if message["role"] != "assistant"]
        later: Any = self.target.tokenizer(asked, add_special_tokens=False)["input_ids"] if asked else []
        return first + sum(map(len, later)) + len(answers) * self.sampling.max_new_tokens

    def _make_batches(self, usable: list[tuple[int, PendingRow]]) -> Iterator[list[PendingRow]]:
        """Conversations of like length together; by powers of two where rounds are captured for each size of a batch."""
        waiting = sorted(usable, key=lambda one: (one[0], one[1].id))
        while waiting:
            count = 1
            while count < len(waiting) and (count + 1) * waiting[count][0] <= self.batch_tokens:
                count += 1
            if self.session.eager_reason is None:
                count = 1 << (count.bit_length() - 1)
            yield [wanted for _, wanted in waiting[:count]]
            waiting = waiting[count:]

    def _answer_batch(self, batch: list[PendingRow]) -> Iterator[Row | FailedRow]:
        """Answer a batch; where that goes wrong, its halves, so that one conversation takes no other with it."""
        try:
            yield from list(self._answer_turns([ChatProgress(wanted, self.sampling) for wanted in batch]))
            return
        except Exception as error:  # whatever a model, a tokenizer or a full device can raise
            said = f"{type(error).__name__}: {' '.join(str(error).split()) or type(error).__name__}"
        if len(batch) == 1:
            yield AnswerError("failed", said).to_failed_row(batch[0])
            return
        half = len(batch) // 2  # outside of `except`, which would keep all that the failed batch had on the device
        yield from self._answer_batch(batch[:half])
        yield from self._answer_batch(batch[half:])

    def _answer_turns(self, chats: list[ChatProgress]) -> Iterator[Row | FailedRow]:
        """Every chat, turn by turn, all that still want an answer in one batch."""
        while chats:
            asked: list[tuple[ChatProgress, list[int]]] = []
            for chat in chats:
                try:
                    messages = chat.next_messages()
                    if messages is None:
                        yield chat.finished_row
                    else:
                        asked.append((chat, self.make_prompt(messages)))
                except AnswerError as given_up:
                    yield given_up.to_failed_row(chat.pending)
            chats = []
            for (chat, _), generation in zip(asked, self._decode_prompts(asked) if asked else []):
                try:
                    chat.add_answer(*self._parse_generation(generation))
                    chats.append(chat)
                except AnswerError as given_up:
                    yield given_up.to_failed_row(chat.pending)

    def _decode_prompts(self, chats_with_prompts: list[tuple[ChatProgress, list[int]]]) -> list[Generation]:
        prompts, keys = [tokens for _, tokens in chats_with_prompts], [chat.pending.key for chat, _ in chats_with_prompts]
        return self.session.decode(prompts, self.sampling.max_new_tokens, keys)

    def _parse_generation(self, generation: Generation) -> tuple[str, str, int]:
        """The answer as text, why it ended, and its tokens, the one that ended it included."""
        output = generation.output
        stopped = output[-1] in self.target.stop_ids
        text = self.target.tokenizer.decode(
            output[:-1] if stopped else output, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text, "stop" if stopped else "length", len(output)


def collect_prompts(writer: EngineWriter, conversations: list[PendingRow], count: int = 8) -> list[list[int]]:
    """The first prompts that fit, for trees and drafters that are prepared on some."""
    found: list[list[int]] = []
    for wanted in conversations:
        with suppress(AnswerError, UserError):
            found.append(writer.make_prompt(ChatProgress(wanted, writer.sampling).next_messages() or []))
        if len(found) == count:
            break
    return found
