"""The states of answers while they are written, for a feature store that a training on these
answers reads. Shapes: T tokens, L layers, D width.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from spectrain.data.chat import Example
from spectrain.data.dataset import make_examples
from spectrain.data.messages import Conversation, parse_conversation
from spectrain.data.readers import ConversationReader, JsonlReader
from spectrain.errors import UserError
from spectrain.features.base import compute_alone
from spectrain.features.store import FeatureStore
from spectrain.models.features import Layer
from spectrain.models.target import Target
from spectrain.output.count_progress import CountProgress

from .chat_progress import ChatProgress


class AnswerStates:
    """States of the conversations that are being answered, and the store that holds those of
    finished ones, under the keys of a training on the answers.
    """

    def __init__(
        self,
        store: FeatureStore,
        # Layers whose states are stored.
        layers: tuple[Layer, ...],
        target: Target,
        data: ConversationReader,
        # Whether the loss reads the state of the last token, which no forward yields while the
        # answer is written.
        reads_tail: bool,
    ) -> None:
        self.store = store
        self.layers = layers
        self.target = target
        self.data = data
        self.reads_tail = reads_tail
        # States [T, L, D] by conversation; a later answer's replace those of the prefix that it
        # continues.
        self.captured: dict[int, list[tuple[list[int], Tensor]]] = {}
        self.num_stored = 0

    def add_states(self, conversation: int, tokens: list[int], states: Tensor) -> None:
        """Hold the states [T, L, D] of tokens [T], the first of a conversation's sequence."""
        earlier = self.captured.get(conversation, [])
        others = [entry for entry in earlier if entry[0] != tokens[: len(entry[0])]]
        self.captured[conversation] = [*others, (tokens, states.cpu())]

    def store_conversation(self, chat: ChatProgress) -> None:
        """Store the states of a finished conversation's training sequences, as far as they were
        captured.
        """
        row = {key: value for key, value in asdict(chat.finished_row).items() if value is not None}
        captured = self.captured.get(chat.pending.id, [])
        origin = f"conversation {chat.pending.id}"
        for example in self.make_examples(parse_conversation(row, origin)):
            states = None if self.reads_tail else find_states(example, captured)
            if states is not None and example not in self.store:
                self.store.put_states(example, states, self.layers)
                self.num_stored += 1

    def drop_states(self, conversation: int) -> None:
        """Forget the states of a conversation that is stored or has failed."""
        self.captured.pop(conversation, None)

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

    def make_set_examples(self, folder: Path) -> list[Example]:
        """Return the training sequences of a finished set of answers."""
        reader = JsonlReader(
            str(folder), max_length=self.data.max_length, train_on=self.data.train_on
        )
        return reader.make_dataset(self.data.apply_arguments(self.target.template)).examples

    def complete_store(self, folder: Path) -> str:
        """Let the target run the training sequences of a finished set that the store lacks; return
        a sentence with the counts.
        """
        distinct, missing = self.store.list_distinct(self.make_set_examples(folder))
        num_tokens = sum(len(example.tokens) for example in missing)
        progress = CountProgress("capturing", num_tokens, unit="tokens", enabled=True)
        try:
            with progress:
                for example in missing:
                    alone = compute_alone(example, self.target, self.layers)
                    self.store.put_states(example, alone, self.layers)
                    progress.advance(len(example.tokens))
        finally:
            self.store.flush()
        return (
            f"{self.store.path}: {len(distinct)} sequences; {self.num_stored} while their answers "
            f"were written, {len(missing)} by a forward of their own, of {num_tokens} tokens; "
            f"train with data=jsonl data.path={folder} source=store source.path={self.store.path}"
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
