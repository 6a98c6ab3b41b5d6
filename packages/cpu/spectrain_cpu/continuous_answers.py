"""Answers of our engine by continuous batching: a conversation takes the place of one whose
answer is finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from spectrain.data.image_processor import have_images
from spectrain.data.shards import FailedRow, Row, Shard
from spectrain.errors import UserError
from spectrain.regeneration.chat_progress import AnswerError, ChatProgress
from spectrain.regeneration.writers import EngineWriter, OutcomeCallback

from .continuous_batch import ContinuousBatch, RunningText, TextPrefix
from .prompts import runs_texts_alone


def write_continuously(
    writer: EngineWriter, shards: Iterable[Shard], on_outcome: OutcomeCallback
) -> bool:
    """Answer the conversations of a writer by continuous batching; return False where its target
    cannot: with a drafter, with captured rounds, or where a text depends on the others.
    """
    session = writer.session
    if session.drafter is not None or session.eager_reason is None:
        return False
    if not runs_texts_alone(writer.target):
        return False
    batch = ContinuousBatch(
        writer.target,
        session.rule,
        writer.sampling.max_new_tokens,
        writer.batch_tokens,
        session.threads,
        () if writer.states is None else writer.states.layers,
    )
    ContinuousAnswers(batch, writer, on_outcome).write_answers(shards)
    return True


@dataclass(frozen=True)
class PendingAnswer:
    """An answer to generate."""

    shard: Shard
    chat: ChatProgress
    prompt: list[int]
    # The conversation so far, of which the prompt is a continuation.
    prefix: TextPrefix | None = None


class ContinuousAnswers:
    """Answers the conversations of shards, turn by turn, in the order in which they come."""

    def __init__(
        self,
        batch: ContinuousBatch,
        # Makes prompts and reads answers; it also answers a conversation by itself that the batch
        # cannot take or that failed in it.
        writer: EngineWriter,
        # Receives each conversation once it is answered or has failed.
        on_outcome: OutcomeCallback,
    ) -> None:
        self.batch = batch
        self.writer = writer
        self.on_outcome = on_outcome
        self.waiting: deque[PendingAnswer] = deque()
        self.running: list[tuple[RunningText, PendingAnswer]] = []

    def write_answers(self, shards: Iterable[Shard]) -> None:
        """Take shards one by one, when there is room in the batch, and answer their
        conversations.
        """
        conversations = self._iterate_conversations(shards)
        while True:
            while self._wait_for_next(conversations) and self._start(self.waiting[0]):
                self.waiting.popleft()
            if not self.running:
                if not self.waiting:
                    return
                continue
            self._step()

    def _iterate_conversations(
        self, shards: Iterable[Shard]
    ) -> Iterator[tuple[Shard, ChatProgress]]:
        for shard in shards:
            for pending in shard.unanswered_rows:
                yield shard, ChatProgress(pending, self.writer.sampling)

    def _wait_for_next(self, conversations: Iterator[tuple[Shard, ChatProgress]]) -> bool:
        """Have an answer wait where any is left; return whether one waits."""
        while not self.waiting:
            following = next(conversations, None)
            if following is None:
                return False
            self._advance(*following)
        return True

    def _advance(self, shard: Shard, chat: ChatProgress, prefix: TextPrefix | None = None) -> None:
        """Let the next answer of a conversation wait, or pass the conversation on where it has
        no further one.
        """
        outcome: Row | FailedRow | None = None
        try:
            conversation = chat.next_prompt()
            if conversation is None:
                if self.writer.states is not None:
                    self.writer.states.store_conversation(chat)
                outcome = chat.finished_row
            else:
                self.waiting.append(
                    PendingAnswer(shard, chat, self.writer.make_prompt(conversation), prefix)
                )
        except AnswerError as error:
            outcome = error.to_failed_row(chat.pending)
        except UserError as error:
            outcome = AnswerError("failed", str(error)).to_failed_row(chat.pending)
        if outcome is not None:
            self._report(shard, outcome)

    def _report(self, shard: Shard, outcome: Row | FailedRow) -> None:
        if self.writer.states is not None:
            self.writer.states.drop_states(outcome.id)
        self.on_outcome(shard, outcome)

    def _start(self, answer: PendingAnswer) -> bool:
        """Start an answer, or answer its conversation alone where it never fits; return False
        where it has to wait.
        """
        if not self.batch.fits_alone(answer.prompt) or have_images([answer.prompt]):
            self._answer_alone(answer)
            return True
        if not self.batch.has_room(answer.prompt):
            return False
        try:
            text = self.batch.add(answer.prompt, answer.chat.pending.key, answer.prefix)
        except Exception:  # whatever a model or a full memory can raise
            text = None
        if text is None:
            self._answer_alone(answer)
        elif text.generation.is_done:
            self._finish(answer, text)
        else:
            # The text has a copy of the prefix.
            self.running.append((text, replace(answer, prefix=None)))
        return True

    def _step(self) -> None:
        """Decode one token of every running answer, and go on with the conversations whose
        answers are done.
        """
        try:
            has_failed = False
            self.batch.step()
        except Exception:  # whatever a model or a full memory can raise
            has_failed = True
        running = self.running
        self.running = []
        if has_failed:
            self.batch.clear()
            for _, answer in running:
                self._answer_alone(answer)
            return
        self.running = [(text, answer) for text, answer in running if not text.generation.is_done]
        for text, answer in running:
            if text.generation.is_done:
                self._finish(answer, text)

    def _finish(self, answer: PendingAnswer, text: RunningText) -> None:
        chat = answer.chat
        try:
            chat.add_answer(self.writer.read_answer(chat, answer.prompt, text.generation))
        except AnswerError as error:
            self._report(answer.shard, error.to_failed_row(chat.pending))
        except Exception:  # whatever a tokenizer can raise
            self._answer_alone(answer)
        else:
            if self.writer.states is not None:
                states = torch.cat(text.states)
                self.writer.states.add_states(chat.pending.id, text.run_tokens, states)
            self._advance(answer.shard, chat, text.prefix)

    def _answer_alone(self, answer: PendingAnswer) -> None:
        for outcome in self.writer.answer_batch([answer.chat.pending]):
            self._report(answer.shard, outcome)
