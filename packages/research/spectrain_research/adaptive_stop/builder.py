"""Chains whose stop threshold follows the acceptance (Draft & Verify, Zhang et al., 2024; EdgeLLM,
Xu et al., 2024).

Shapes: B batch, V draft vocabulary.
"""

from __future__ import annotations

from typing import Literal

from spectrain.config.values import Positive, Share
from spectrain.errors import UserError
from spectrain.trees.base import Prefix, RoundResult
from spectrain.trees.chain import Chain
from spectrain.trees.token_tree import Children


class AdaptiveStopChain(Chain):
    """A chain that ends where the drafter's largest probability is below a threshold g, which moves
    after every round.

    With by=rate (Draft & Verify, section 3.4) the acceptance rate AR of a round's drafts, smoothed,
    is steered towards `target_rate`:

        AR <- b1 AR + (1 - b1) AR_round        g <- b2 g + (1 - b2) g', g' = g + step if AR <=
        target_rate else g - step

    With by=full (EdgeLLM's fallback) g is halved after a round that accepted all its drafts, and
    doubled after any other. A threshold depends on committed text and earlier draws alone, and is
    compared before a token is drawn, so sampled chains stay lossless. Every decoding begins with
    `stop`.
    """

    name = "adaptive"

    def __init__(
        self,
        # Draft tokens of a chain at most.
        depth: int = 8,
        # How tokens are chosen: deterministic takes the most likely one, sampled draws one.
        children: Children = "deterministic",
        # Temperature of the distribution that sampled children are drawn from.
        temperature: float = 1.0,
        # Seed of the random draws of children.
        seed: int = 0,
        # Threshold of the first round.
        stop: float = 0.4,
        # What moves the threshold: the smoothed acceptance rate (rate), or whether a round accepted
        # all drafts (full).
        by: Literal["rate", "full"] = "rate",
        # Acceptance rate of drafts that by=rate steers towards.
        target_rate: Share = 0.8,
        # Step of the threshold with by=rate.
        step: Positive = 0.05,
        # Weights of the past in the smoothed rate and in the smoothed threshold.
        memories: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        super().__init__(depth, children, temperature, seed, stop, "token")
        if not 0 < stop < 1:
            raise UserError(f"tree.stop={stop}: use more than 0 and less than 1")
        if len(memories) != 2 or not all(0 <= memory < 1 for memory in memories):
            raise UserError(
                f"tree.memories={list(memories)}: give two weights of 0 or more and less than 1"
            )
        self.by = by
        self.target_rate = target_rate
        self.step = step
        self.memories = memories
        self.first_stop = stop
        self.rate = target_rate

    def sampled_variant(self, temperature: float) -> AdaptiveStopChain:
        return AdaptiveStopChain(
            self.depth,
            "sampled",
            temperature,
            self.seed,
            self.first_stop,
            self.by,
            self.target_rate,
            self.step,
            self.memories,
        )

    def report_settings(self) -> dict[str, object]:
        return {**super().report_settings(), "by": self.by, "stop": self.first_stop}

    def begin_round(self, prefix: Prefix) -> None:
        super().begin_round(prefix)
        if prefix.begins:
            self.stop = self.first_stop
            self.rate = self.target_rate

    def observe(self, round: RoundResult) -> None:
        drafted = (round.tree.valid.sum(1) - 1)[round.counts > 0]
        accepted = (round.counts - 1)[round.counts > 0]
        if int(drafted.sum()):
            self.move_threshold(int(accepted.sum()), int(drafted.sum()))
        elif self.by == "full":
            # A threshold that forbids every draft would never be tried again.
            self.stop = max(self.stop / 2, 1e-3)
        else:
            self.stop = max(self.stop - self.step, 1e-3)

    def move_threshold(self, accepted: int, drafted: int) -> None:
        """Move the threshold after a round that accepted so many of its drafts."""
        if self.by == "full":
            moved = self.stop / 2 if accepted == drafted else self.stop * 2
        else:
            rate_memory, stop_memory = self.memories
            self.rate = rate_memory * self.rate + (1 - rate_memory) * accepted / drafted
            moved = self.stop + (self.step if self.rate <= self.target_rate else -self.step)
            moved = stop_memory * self.stop + (1 - stop_memory) * moved
        self.stop = min(max(moved, 1e-3), 0.95)
