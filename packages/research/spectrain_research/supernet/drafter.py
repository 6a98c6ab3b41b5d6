"""A supernet of EAGLE-3 drafters (DREAM-S): a training step trains one subnet, and a search picks
the fastest to decode with.

Shapes: B batch, T tokens, L fused layers, D target width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spectrain.config.values import LayerCount, Seed, Steps, VocabularySize
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Losses, TrainingState
from spectrain.drafters.capabilities import SettingsSearch, Text
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.eagle_layers import EagleAttentionFn
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.trees import Chain


class Subnet(NamedTuple):
    """A part of the supernet: its number of decoder layers, and the fused layers of the target
    that it reads.
    """

    depth: int
    fused: tuple[int, ...]  # indices among the fused layers


@dataclass(frozen=True)
class Trial:
    """What a subnet did on the prompts of the search."""

    subnet: Subnet
    tokens_per_round: float
    round_seconds: float

    @property
    def speed(self) -> float:
        return self.tokens_per_round / self.round_seconds


class Supernet(Eagle3):
    """EAGLE-3 of up to `num_layers` decoder layers. A training step runs a subnet: its first layers
    alone, with some of the target's fused layers; the largest one every second step.

    Before decoding, all subnets draft for the target's own answers to prompts that are not scored.
    The one with the most tokens per second is kept: mean tokens of a round over its median seconds.
    """

    answer_tokens = 24

    def __init__(
        self,
        target: Target,
        # Largest number of decoder layers of a subnet.
        num_layers: LayerCount = 3,
        # Number of draft steps that are unrolled in training (training-time test).
        ttt_steps: Steps = 7,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Layers of the target that subnets may fuse; null uses the family's default layers.
        layers: list[int] | None = None,
        # Number of decoder layers of the subnet that decodes; null searches it, and the fused
        # layers.
        depth: int | None = None,
        # Seed of the subnets of training steps.
        seed: Seed = 0,
        # Configuration keys and variants of the layers that differ from the target's; null copies
        # the target's.
        architecture: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            target, ttt_steps, vocab_size, layers, num_layers, architecture=architecture
        )
        self.seed = seed
        if depth is None:
            search = SettingsSearch(self.answer_tokens, type(self).search)
            self.capabilities = replace(self.capabilities, search=search)
        every = tuple(range(len(self.fused_layers)))
        self.largest = Subnet(num_layers, every)
        self.subnet = (
            self.largest if depth is None else Subnet(max(1, min(depth, num_layers)), every)
        )
        self.trials: list[Trial] = []

    @property
    def subnets(self) -> list[Subnet]:
        """Every depth with all fused layers, with the last two and with the last one."""
        count = len(self.fused_layers)
        parts = dict.fromkeys(
            tuple(range(first, count)) for first in (0, max(0, count - 2), count - 1)
        )
        return [Subnet(depth, part) for depth in range(1, self.num_layers + 1) for part in parts]

    def project_fused(self, fused: Tensor) -> Tensor:
        """Project concatenated states [B, T, L * D] to [B, T, D]; those of layers outside the
        subnet are zero.
        """
        if len(self.subnet.fused) == len(self.fused_layers):
            return super().project_fused(fused)
        is_read = torch.zeros(len(self.fused_layers), device=fused.device, dtype=fused.dtype)
        is_read[[*self.subnet.fused]] = 1
        return super().project_fused(
            fused * is_read.repeat_interleave(fused.shape[-1] // len(is_read))
        )

    def run_later_layers(self, hidden: Tensor, attend: EagleAttentionFn) -> Tensor:
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        for number, layer in enumerate(self.later[: self.subnet.depth - 1], 1):
            hidden = layer(hidden, number, attend)
        return self.norm(hidden) if self.norm_output else hidden

    # Training

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return the loss of this step's subnet; parameters outside of it take part with zeros."""
        chosen = self.subnet
        self.subnet = self.sample_subnet(state.step)
        try:
            losses = super().loss(batch, target, state)
        finally:
            self.subnet = chosen
        unused = 0.0 * sum(weight.sum() for weight in self.parameters() if weight.requires_grad)
        name = next(iter(losses.terms))
        return Losses(
            {**losses.terms, name: losses.terms[name] + unused}, losses.hits, losses.counts
        )

    def sample_subnet(self, step: int) -> Subnet:
        """Return the subnet of a training step."""
        if step % 2 == 0:
            return self.largest
        source = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return self.subnets[int(torch.randint(len(self.subnets), (1,), generator=source))]

    # Decoding

    def search(self, target: Target, texts: list[Text], depth: int) -> None:
        """Decode the prompts with every subnet, and keep the fastest."""
        self.trials = []
        for subnet in self.subnets:
            self.subnet = subnet
            prompts = [prompt for prompt, _ in texts]
            decoded = [
                decode(target, [prompt], Greedy(), self.answer_tokens, self, Chain(depth))[0]
                for prompt in prompts
            ]
            self.trials.append(summarize_trial(subnet, decoded))
        self.subnet = max(self.trials, key=lambda trial: trial.speed).subnet
        self.capabilities = replace(self.capabilities, search=None)


def summarize_trial(subnet: Subnet, decoded: Sequence[Generation]) -> Trial:
    """Return the mean tokens and the median seconds of a round."""
    lengths = [length for text in decoded for length in text.round_lengths]
    seconds = [sum(parts.values()) for text in decoded for parts in text.round_seconds]
    return Trial(
        subnet, sum(lengths) / max(1, len(lengths)), max(1e-9, median(seconds)) if seconds else 1.0
    )
