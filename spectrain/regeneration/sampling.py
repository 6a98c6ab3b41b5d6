"""How answers are sampled, by any writer."""

from typing import Any

from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.errors import UserError


class Sampling:
    """How answers are sampled, by any writer."""

    def __init__(
        self,
        # Sampling temperature; 0 decodes greedily.
        temperature: float = 0.7,
        # Nucleus sampling: sample from the most likely tokens whose probabilities sum to this
        # value; 1 uses all tokens.
        top_p: float = 1.0,
        # Sample from this many most likely tokens; 0 uses the whole vocabulary.
        top_k: int = 0,
        # Maximum length of an answer, in tokens.
        max_new_tokens: int = 512,
        # Seed of the random draws; the same seed gives the same answers.
        seed: int = 0,
        # Keep answers that max_new_tokens cuts, marked as cut; false leaves their conversations
        # out.
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
        return (
            Match(self.temperature, self.top_k, self.top_p, self.seed)
            if self.temperature
            else Greedy()
        )

    def recorded_settings(self) -> dict[str, Any]:
        return {f"sampling.{key}": value for key, value in vars(self).items()}
