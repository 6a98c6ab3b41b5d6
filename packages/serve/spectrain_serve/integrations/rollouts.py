"""The rollouts that a drafter learns from: token ids of recent ones, and apart from them those of
held-out prompts, which only the proof reads.

States of the target are not kept: they would be those of an earlier policy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

from spectrain.data.chat import Example

HELD_OUT_IN = 4
"""One prompt of so many is held out of training."""


@dataclass(frozen=True)
class RolloutBatch:
    """What one generation wrote: its training step, and its counts."""

    step: int
    # The number of the drafter that drafted: 0 for the first one; None without.
    drafter: int | None
    num_rollouts: int
    # Tokens of the answers that rounds emitted, and the forwards of the target that took.
    num_tokens: int
    num_forwards: int
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        """Return how many tokens a forward of the target emitted."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0


@dataclass
class RolloutStore:
    """Recent rollouts. A prompt is held out of training by its hash, so always or never."""

    capacity: int
    held_out_capacity: int
    num_new: int = 0
    recent: deque[Example] = field(init=False)
    # The newest rollout of each held-out prompt, the newest prompt last.
    held_out: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recent = deque(maxlen=self.capacity)

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Add the token ids of a rollout."""
        if not prompt or len(answer) < 2:
            return
        digest = hash_prompt(prompt)
        if int(digest, 16) % HELD_OUT_IN == 0:
            self.held_out.pop(digest, None)
            self.held_out[digest] = prompt
            if len(self.held_out) > self.held_out_capacity:
                del self.held_out[next(iter(self.held_out))]
            return
        self.recent.append(Example(prompt + answer, [False] * len(prompt) + [True] * len(answer)))
        self.num_new += 1

    @property
    def held_out_prompts(self) -> list[list[int]]:
        """Return the prompts that the proof decodes."""
        return [*self.held_out.values()]


def hash_prompt(prompt: list[int]) -> str:
    """Return a hash of the token ids of a prompt."""
    return blake2b(repr(prompt).encode(), digest_size=8).hexdigest()
