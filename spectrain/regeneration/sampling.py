"""How answers are sampled, by any writer."""

from dataclasses import dataclass
from typing import Any

from spectrain.config.values import Count, PositiveShare
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.errors import UserError


@dataclass(eq=False)
class Sampling:
    """How answers are sampled, by any writer."""

    # Sampling temperature; 0 decodes greedily.
    temperature: float = 0.7
    # Nucleus sampling: sample from the most likely tokens whose probabilities sum to this
    # value; 1 uses all tokens.
    top_p: PositiveShare = 1.0
    # Sample from this many most likely tokens; 0 uses the whole vocabulary.
    top_k: int = 0
    # Maximum length of an answer, in tokens.
    max_new_tokens: Count = 512
    # Seed of the random draws; the same seed gives the same answers.
    seed: int = 0
    # Keep answers that max_new_tokens cuts, marked as cut; false leaves their conversations
    # out.
    keep_cut: bool = True

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(
                f"sampling.temperature={self.temperature}: use 0, which is greedy, or more"
            )
        if self.top_k < 0:
            raise UserError(
                f"sampling.top_k={self.top_k}: use 1 or more, or 0 for the whole vocabulary"
            )

    @property
    def acceptance_rule(self) -> AcceptanceRule:
        """The acceptance rule that samples this way in our own engine."""
        return (
            Match(self.temperature, self.top_k, self.top_p, self.seed)
            if self.temperature
            else Greedy()
        )

    def recorded_settings(self) -> dict[str, Any]:
        return {f"sampling.{key}": value for key, value in vars(self).items()}
