"""Tokenised conversations and the order in which they are trained on."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..features import Batch, laid_out
from .chat import Example, tokenize
from .readers import Data


@dataclass(frozen=True)
class Dataset:
    """Examples to train on, and what was left out."""

    examples: list[Example]
    num_conversations: int
    num_cut: int  # examples cut to max_length
    num_dropped: int  # examples without a supervised token after the cut

    @classmethod
    def build(cls, data: Data, tokenizer: PreTrainedTokenizerBase) -> "Dataset":
        """Tokenise every conversation."""
        conversations = data.conversations()
        examples, cut, dropped = [], 0, 0
        for messages in conversations:
            for example in tokenize(tokenizer, messages):
                cut += len(example.tokens) > data.max_length
                example = Example(example.tokens[: data.max_length], example.mask[: data.max_length])
                if any(example.mask):
                    examples.append(example)
                else:
                    dropped += 1
        if not examples:
            raise UserError(f"data.max_length={data.max_length}: it cuts off every answer; raise it")
        return cls(examples, len(conversations), cut, dropped)

    @property
    def num_tokens(self) -> int:
        return sum(len(example.tokens) for example in self.examples)

    @property
    def num_supervised(self) -> int:
        return sum(sum(example.mask) for example in self.examples)

    @property
    def fingerprint(self) -> str:
        """A hash of every token and mask."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(repr((example.tokens, example.mask)).encode())
        return digest.hexdigest()[:16]

    def token_counts(self, vocab_size: int) -> Tensor:
        """[V] how often each token is the assistant's."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for example in self.examples:
            kept = torch.tensor(example.tokens)[torch.tensor(example.mask)]
            counts += torch.bincount(kept, minlength=vocab_size)
        return counts

    def __getitem__(self, indices: list[int]) -> list[Example]:
        """The examples of these numbers."""
        return [self.examples[index] for index in indices]

    def epoch(self, epoch: int, batch_tokens: int, seed: int) -> list[list[int]]:
        """The batches of one epoch: examples of like length together, at most `batch_tokens` with padding, shuffled."""
        random = Random(f"{seed}/{epoch}")
        order = list(range(len(self.examples)))
        random.shuffle(order)
        batches: list[list[int]] = []
        for start in range(0, len(order), 256):  # sorting within a window keeps padding low and the order random
            window = sorted(order[start : start + 256], key=lambda index: len(self.examples[index].tokens))
            batch: list[int] = []
            for index in window:
                if batch and (len(batch) + 1) * len(self.examples[index].tokens) > batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(index)
            batches.append(batch)
        random.shuffle(batches)
        return batches

    def stream(self, batch_tokens: int, seed: int, skip: int = 0) -> Iterator[list[Example]]:
        """Batches of one epoch after another without end, leaving out the first `skip` of them."""
        epoch = 0
        while True:
            for batch in self.epoch(epoch, batch_tokens, seed):
                if skip > 0:
                    skip -= 1
                else:
                    yield self[batch]
            epoch += 1


def collate(examples: list[Example], packed: bool = False) -> Batch:
    """Examples as one batch: a row each, padded on the right, or packed, one after another in one row."""
    tokens = laid_out([torch.tensor(example.tokens) for example in examples], packed)
    mask = laid_out([torch.tensor(example.mask) for example in examples], packed)
    return Batch(tokens, mask, lengths=tuple(len(example.tokens) for example in examples) if packed else None)
