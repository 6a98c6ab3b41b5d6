"""What an online update learns from each place of a draft (DVI, Bhansali and Heck, 2025, arXiv
2510.05421).

Every drafted token up to the first rejected one has a reward r: 1 if it was accepted, 0 if not.
With the target's distribution p and the drafter's q, the loss of a place with the draft d is

    lambda_kl KL(p || q) - lambda_pg (r + r - b) log q(d)

The first r masks a cross-entropy, which learns accepted tokens only. r - b is the advantage of a
policy gradient, b being the running mean of earlier rewards. lambda_kl falls from 1 while lambda_pg
rises from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch

from spectrain.decoding.generation import Generation
from spectrain.features.batch import Batch, pad_or_pack
from spectrain_research.shared.draft_replay import DraftWindow, collate_windows, iterate_drafts

# Updates after which the weights stay, and the smallest weight of the divergence.
RAMP_UPDATES = 16
MIN_KL_WEIGHT = 0.2
# How much of the running mean of rewards stays with each new one.
REWARD_MEMORY = 0.99


@dataclass
class DviSignals:
    """The weights of DVI's terms, which change with the number of updates, and the running mean
    of rewards.
    """

    num_updates: int = 0
    mean_reward: float = 0.5

    @property
    def policy_weight(self) -> float:
        return min(1.0, self.num_updates / RAMP_UPDATES)

    @property
    def kl_weight(self) -> float:
        return 1.0 - self.policy_weight + MIN_KL_WEIGHT * self.policy_weight

    def select_windows(
        self,
        generation: Generation,
        rounds: list[tuple[list[int], int]],
        limit: int,
        random: Random,
    ) -> list[DraftWindow]:
        """Return up to `limit` drafts of one decoding, each up to its first rejected token, with
        the rewards as advantages.
        """
        windows = []
        for drafted in iterate_drafts(generation, rounds):
            tokens = drafted.draft[: drafted.num_accepted + 1]
            rewards = [float(number < drafted.num_accepted) for number in range(len(tokens))]
            start = len(drafted.text)
            windows.append(
                DraftWindow(
                    drafted.make_example(tokens, draft_only=True), [0.0] * start + rewards, start
                )
            )
        return random.sample(windows, min(limit, len(windows)))

    def collate(self, windows: list[DraftWindow]) -> Batch:
        """Return a batch whose weights and advantages are those of the terms, by the mean of
        rewards before these windows.
        """
        weighed = []
        baseline = self.mean_reward
        for window in windows:
            rewards = window.advantage[window.start :]
            gains = [self.policy_weight * (2 * reward - baseline) for reward in rewards]
            weighed.append(replace(window, advantage=[0.0] * window.start + gains))
            for reward in rewards:
                self.mean_reward = REWARD_MEMORY * self.mean_reward + (1 - REWARD_MEMORY) * reward
        batch = collate_windows(weighed)
        weights = [torch.full((len(window.example.tokens),), self.kl_weight) for window in windows]
        return replace(batch, weight=pad_or_pack(weights, packed=False))
