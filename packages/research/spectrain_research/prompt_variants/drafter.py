"""A language-only drafter that reads a prompt with images in several variants, and averages what it
drafts (IbED, TABED).

Shapes: B texts, R variants, F nodes, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.causal import Causal
from spectrain.drafters.context import Context
from spectrain.drafters.layers.losses import LossName
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import AcceptedPath
from spectrain_research.shared.on_policy import find_on_policy

Variant = Literal["kept", "dropped", "pooled"]
"""What a drafter reads of an image: all its tokens, none of them, or a few."""
VARIANTS: tuple[Variant, ...] = ("kept", "dropped", "pooled")
POOLED_TOKENS = 4
MEMORY = 0.9
"""Share of a variant's record that a round leaves of it."""


class PromptVariants(Causal):
    """A small language model that drafts for a target of text and images from variants of the
    prompt: with the placeholder tokens of images (kept), without them (dropped: a drafter that
    knows language alone) or with four of each image (pooled).

    The draft's distribution is the average of those of all variants, weighed alike or by how often
    the variant's likeliest token was right lately. Without images all variants are the same text.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        target: Target,
        # Variants of the prompt: kept, dropped and pooled, in any number; null takes all three.
        variants: list[str] | None = None,
        # How variants are weighed: alike (mean), or by how often each was right lately (recent).
        weights: Literal["mean", "recent"] = "mean",
        # Number of the target's layers to copy, evenly spaced with the first and the last; null
        # when model or architecture gives the drafter.
        num_layers: int | None = None,
        # Directory or hub name of a small causal model to start from; null when num_layers or
        # architecture gives the drafter.
        model: str | None = None,
        # Transformers configuration of a new, random model; null when num_layers or model gives the
        # drafter.
        architecture: dict[str, Any] | None = None,
        # Divergence between the target's and the drafter's next-token distributions.
        loss: LossName = "forward_kl",
    ) -> None:
        super().__init__(target, num_layers, model, architecture, loss)
        chosen = [*VARIANTS] if variants is None else variants
        if not chosen or any(name not in VARIANTS for name in chosen):
            raise UserError(f"drafter.variants={chosen}: use {', '.join(VARIANTS)}, one or more")
        self.variants = chosen
        self.weights = weights
        self.capabilities = replace(self.capabilities, scores_path_at_once=False, capture=None)
        self.placeholder_id = target.vision.placeholder_id if target.vision.has_vision else -1
        self.readers: list[Causal] = []
        self.prompts: list[list[list[int]]] = []  # [R][B] the variants of every prompt
        self.prompt_lengths: list[int] = []
        self.records: Tensor = torch.zeros(0)  # [R, B] how often each variant was right lately
        # [R, B] the likeliest token of each variant after the last root
        self.guesses: Tensor | None = None

    def change_prompt(self, prompt: Sequence[int], variant: str) -> list[int]:
        """Return a variant of a prompt."""
        limit = {"kept": len(prompt), "dropped": 0, "pooled": POOLED_TOKENS}[variant]
        changed = list[int]()
        run = 0
        for token in prompt:
            run = run + 1 if token == self.placeholder_id else 0
            if run <= limit:
                changed.append(token)
        return changed

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Run the new tokens of every variant, and draft after the root from all of them."""
        lengths = context.lengths.tolist()
        rows = [row[: length + 1] for row, length in zip(context.tokens.tolist(), lengths)]
        if context.begins:
            self._begin(context, rows)
        elif self.guesses is not None:
            self._record_round(rows, context)
        rollouts = []
        for reader, prompts in zip(self.readers, self.prompts):
            texts = [
                prompt + row[length:]
                for prompt, row, length in zip(prompts, rows, self.prompt_lengths)
            ]
            rollout = Causal.draft(reader, self._make_context(context, reader.cache, texts)).rollout
            assert rollout is not None
            rollouts.append(rollout)
        self.roots = [row[-1] for row in rows]
        self.last_lengths = lengths
        return Draft(MeanRollout(self, rollouts, self._variant_weights()))

    def _begin(self, context: Context, rows: list[list[int]]) -> None:
        """Make the variants of all prompts, each with a reader of its own that shares the model."""
        self.prompt_lengths = [len(row) - 1 for row in rows]
        self.prompts = [
            [self.change_prompt(row[:-1], variant) for row in rows] for variant in self.variants
        ]
        self.readers = [copy.copy(self) for _ in self.variants]
        for reader in self.readers:
            reader.cache = None
        self.records = torch.ones(len(self.variants), len(rows), device=context.tokens.device)
        self.guesses = None

    def _record_round(self, rows: list[list[int]], context: Context) -> None:
        """Judge every variant's likeliest token after the last root by the token that followed
        it.
        """
        assert self.guesses is not None
        following = torch.tensor(
            [
                row[length + 1] if len(row) > length + 1 else -1
                for row, length in zip(rows, self.last_lengths)
            ],
            device=self.guesses.device,
        )
        is_right = (self.guesses == following).float()
        self.records = torch.where(
            following >= 0, MEMORY * self.records + (1 - MEMORY) * is_right, self.records
        )

    def _variant_weights(self) -> Tensor:
        """Return the weight [R, B] of each variant."""
        records = torch.ones_like(self.records) if self.weights == "mean" else self.records + 0.05
        return records / records.sum(0)

    def _make_context(
        self, context: Context, cache: TreeCache | None, texts: list[list[int]]
    ) -> Context:
        """Return the context of one variant of the texts."""
        device = context.tokens.device
        size = context.tokens.shape[1]
        tokens = torch.tensor([text + [0] * (size - len(text)) for text in texts], device=device)
        lengths = torch.tensor([len(text) - 1 for text in texts], device=device)
        unread = lengths if cache is None else lengths - cache.lengths
        width = int(unread.max())
        features = Features(tokens[:, :width], (), torch.zeros(0, device=device))
        # A cache without layers says how long the texts are.
        view = TreeCache(0, len(texts), context.cache.max_length, device)
        view.lengths = lengths
        view.longest = int(lengths.max())
        return replace(
            context,
            tokens=tokens,
            cache=view,
            new_features=features,
            num_new=unread,
            round=0 if cache is None else 1,
            deferred=[],
        )

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        for reader in self.readers:
            assert reader.cache is not None
            # The root is run again, because the variant's text is not that of the context.
            reader.cache.roll_back(committed=1)

    def rewind(self, lengths: Tensor) -> None:
        raise UserError(
            "drafter=prompt_variants: another process cannot draft ahead with it; leave out "
            "eval.overlap"
        )


find_on_policy.register(PromptVariants, lambda drafter: None)


class MeanRollout(Rollout):
    """One round over several variants: a node's distribution is the weighed average of theirs."""

    def __init__(
        self, drafter: PromptVariants, rollouts: Sequence[Rollout], weights: Tensor
    ) -> None:
        self.drafter, self.rollouts = drafter, rollouts
        self.log_weights = weights.log()[..., None, None]  # [R, B, 1, 1]

    def start(self) -> Tensor:
        log_q = torch.stack([rollout.start() for rollout in self.rollouts])
        self.drafter.guesses = log_q[:, :, 0].argmax(-1)
        return (log_q + self.log_weights).logsumexp(0)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        log_q = torch.stack([rollout.extend(tokens, parents) for rollout in self.rollouts])
        return (log_q + self.log_weights).logsumexp(0)
