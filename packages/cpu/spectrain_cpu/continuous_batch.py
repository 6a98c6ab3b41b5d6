"""Continuous batching: a prompt joins the batch as soon as it has room for it, and a text leaves it
with its last token.

It serves decoding without a drafter, where kernels run texts of different lengths without padding
and a text has the bits that it has alone (`prompts.runs_texts_alone`). Prompts run one by one, as
they do alone. Shapes: B texts, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.generation import Generation
from spectrain.models.features import Features, Layer
from spectrain.models.target import Target
from spectrain.models.threads import ThreadTuner
from spectrain.trees.token_tree import TokenTree

from .pooled_cache import PooledCache, fill_slots
from .prompts import extend_text

STEP_WORK = 9
"""Texts whose rows cost as much as the weights that every step reads (SmolLM2-135M)."""


@dataclass(frozen=True)
class TextPrefix:
    """The tokens of a finished text with their keys and values: a longer prompt that begins with
    them runs only its rest.
    """

    tokens: list[int]
    keys_values: Tensor  # [layers, 2, T, heads, head size]
    states: list[Tensor]  # [.., L, D] of these tokens, in parts; none without captured layers

    def count_shared(self, prompt: list[int]) -> int:
        """Return the number of tokens that a prompt begins with, its last token excluded."""
        pairs = zip(self.tokens, prompt[:-1])
        return next(
            (at for at, (token, other) in enumerate(pairs) if token != other),
            min(len(self.tokens), len(prompt) - 1),
        )


@dataclass
class RunningText:
    """A text in the batch."""

    sequence_id: int  # key of its random draws
    generation: Generation
    # States [.., L, D] of `run_tokens`, in parts; none without captured layers.
    states: list[Tensor]
    # What a later prompt can begin with, once the text is done.
    prefix: TextPrefix | None = None

    @property
    def run_tokens(self) -> list[int]:
        """The tokens that have run: all but the last."""
        return (self.generation.prompt + self.generation.output)[:-1]


class ContinuousBatch:
    """Texts that are decoded together, each until its limit or a stop token."""

    def __init__(
        self,
        target: Target,
        rule: AcceptanceRule,
        max_new_tokens: int,
        # Number of tokens for which there is room, answers included.
        num_slots: int,
        # Chooses the number of threads of a step; null leaves it as it is.
        threads: ThreadTuner | None = None,
        # Layers whose states the texts hold.
        layers: tuple[Layer, ...] = (),
    ) -> None:
        assert rule.fixes_choice and not rule.layers, "a token is chosen by the logits alone"
        self.target = target
        self.rule = rule
        self.limit = max_new_tokens
        self.threads = threads
        self.layers = layers
        self.cache = PooledCache(target.num_layers, num_slots, target.device)
        self.texts: list[RunningText] = []

    def fits_alone(self, prompt: list[int]) -> bool:
        """Return whether an empty batch has room for this prompt and its answer."""
        return len(prompt) + self.limit <= self.cache.max_length

    def has_room(self, prompt: list[int]) -> bool:
        """Return whether there is room for this prompt and its answer."""
        return self.cache.find_segment(len(prompt) + self.limit) is not None

    @torch.inference_mode()
    def add(
        self, prompt: list[int], sequence_id: int, prefix: TextPrefix | None = None
    ) -> RunningText:
        """Run a prompt, or what follows the given prefix of it, and emit its first token. Unless it
        is done by that, its text joins the batch, which has room for it."""
        cache = self.target.new_cache(1, len(prompt))
        lengths = torch.tensor([len(prompt)])
        num_shared = 0 if prefix is None else prefix.count_shared(prompt)
        states = []
        if prefix is not None and num_shared:
            fill_slots(cache, prefix.keys_values[:, :, :num_shared])
            if self.layers:
                states.append(torch.cat(prefix.states)[:num_shared])
            rest = torch.tensor([prompt[num_shared:]])
            features = extend_text(self.target, rest, cache, self.layers)
        else:
            features = self.target.prefill(torch.tensor([prompt]), lengths, cache, self.layers)
        if self.layers:
            states.append(self._read_states(features)[0])
        assert features.logits is not None
        token = int(
            self.rule.choose_tokens(features.logits, torch.tensor([sequence_id]), lengths[:, None])
        )
        text = RunningText(sequence_id, Generation(prompt), states)
        text.generation.emit_tokens([token], self.target.stop_ids, self.limit)
        if not text.generation.is_done:
            segment = self.cache.find_segment(len(prompt) + self.limit)
            assert segment is not None, "has_room says so"
            self.cache.add_text(segment, cache)
            self.texts.append(text)
        # Layers refer to the cache, so it would keep its memory until the next collection of
        # garbage.
        cache.storage = None
        return text

    def step(self) -> None:
        """Emit one token of every text; those that are done leave the batch."""
        if self.threads is not None:
            self.threads.set_threads()
        start = time.perf_counter()
        stop_ids = self.target.stop_ids
        for text, token in zip(self.texts, self._choose_next()):
            text.generation.emit_tokens([token], stop_ids, self.limit)
        if self.threads is not None:
            self.threads.record_step(time.perf_counter() - start, STEP_WORK + len(self.texts))
        running = [number for number, text in enumerate(self.texts) if not text.generation.is_done]
        if len(running) < len(self.texts):
            for number, text in enumerate(self.texts):
                if text.generation.is_done:
                    text.prefix = self._copy_prefix(number)
            self._keep(running)

    def clear(self) -> None:
        """Remove every text."""
        self.cache.roll_back()
        self._keep([])

    @torch.inference_mode()
    def _choose_next(self) -> list[int]:
        """Run the newest token of every text, and return the tokens that follow."""
        roots = torch.tensor([[text.generation.output[-1]] for text in self.texts])
        ids = torch.tensor([text.sequence_id for text in self.texts])
        features = self.target.verify(TokenTree.from_chain(roots), self.cache, self.layers)
        assert features.logits is not None
        if self.layers:
            for text, states in zip(self.texts, self._read_states(features)):
                text.states.append(states)
        tokens = self.rule.choose_tokens(features.logits, ids, self.cache.lengths[:, None] + 1)
        self.cache.commit(None, torch.ones_like(ids))
        chosen: list[int] = tokens[:, 0].tolist()
        return chosen

    @torch.inference_mode()
    def _copy_prefix(self, number: int) -> TextPrefix:
        """Return what a later prompt can begin with of a text."""
        text = self.texts[number]
        return TextPrefix(text.run_tokens, self.cache.copy_text(number), text.states)

    def _read_states(self, features: Features) -> Tensor:
        """Return a copy of the states [B, T, L, D] of the captured layers."""
        return torch.stack([features.at_layer(layer) for layer in self.layers], dim=2)

    def _keep(self, kept: list[int]) -> None:
        self.texts = [self.texts[number] for number in kept]
        with torch.inference_mode():
            self.cache.keep_texts(kept)
