"""Chains whose length is decided while decoding. Shapes: B batch, D depth, E episodes, F state
features.

The decision to go on is made before the next token is drawn, from finished rounds and from the
drafter's distributions in this one. Tokens that were drawn are always verified, so sampled chains
stay lossless; the proof is in tests/decoding/test_lossless.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from spectrain.trees.base import Prefix, RoundResult, check_settings
from spectrain.trees.chain import Chain
from spectrain.trees.growing import GrowingTree
from spectrain.trees.token_tree import Children
from spectrain_research.shared.latency_aware import LatencyAwareBuilder
from spectrain_research.shared.learning_builder import LearnsFromTrees


class AdaptiveChain(LearnsFromTrees, LatencyAwareBuilder, Chain):
    """A chain of up to `depth` tokens whose length follows measured costs. It rehearses on
    prompts that are not scored.
    """

    requirements = ("latency", "rehearsal")
    traits = replace(Chain.traits, uses_latency=True)

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
        # Rows of finished rounds that the builder remembers.
        memory: int = 512,
    ) -> None:
        super().__init__(depth, children, temperature, seed)
        check_settings(self, memory=(memory, 1))
        self.memory = memory  # rows
        self.decides_length = True
        self.traits = replace(self.traits, is_fixed=False)
        self.chain_lengths: list[int] = []  # longest chain of every round

    def estimate_seconds(self, length: int) -> tuple[float, np.ndarray, np.ndarray]:
        """Estimate seconds for a context of this length.

        Returns the time of a round without draft tokens, the verification time that each token adds
        [D], and the drafting time of each token [D]. The first token costs nothing: the drafter has
        run the root before anything is decided.
        """
        latency = self.require_latency()
        verify = np.array(
            [
                latency.estimate_verify(nodes, length) + latency.estimate_levels(nodes - 1)
                for nodes in range(1, self.depth + 2)
            ]
        )
        steps = np.array([0.0, *[latency.estimate_step(1, length)] * (self.depth - 1)])
        return latency.start_seconds + float(verify[0]), np.diff(verify), steps

    def observe(self, round: RoundResult) -> None:
        num_drafted = (round.tree.valid & round.tree.can_emit).sum(1) - 1
        self.chain_lengths.append(int(num_drafted.max()))
        for row, (length, count) in enumerate(zip(num_drafted.tolist(), round.counts.tolist())):
            if count:
                self.learn_row(row, length, count - 1)

    @abstractmethod
    def learn_row(self, row: int, drafted: int, num_accepted: int) -> None:
        """Learn from a row of `drafted` draft tokens, of which `num_accepted` were accepted."""

    def report_settings(self) -> dict[str, object]:
        mean = (
            round(sum(self.chain_lengths) / len(self.chain_lengths), 2)
            if self.chain_lengths
            else None
        )
        return {**super().report_settings(), "memory": self.memory, "mean_length": mean}


class Thompson(AdaptiveChain):
    """The length that maximises tokens per second for sampled acceptance probabilities (Thompson,
    1933).

    The acceptance of token d + 1 after d accepted tokens has a Beta posterior over counts of the
    last `memory` rows, with exponential fading. For a sample theta, a chain of L has 1 + sum_{l <=
    L} prod_{d <= l} theta_d expected tokens in the time measured for L. Lengths with few trials
    have wide posteriors, so they are explored.
    """

    name = "thompson"

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
        # Rows of finished rounds that the builder remembers.
        memory: int = 512,
    ) -> None:
        super().__init__(depth, children, temperature, seed, memory)
        # faded counts of rows, by depth
        self.accepted_counts = np.zeros(depth)
        self.rejected_counts = np.zeros(depth)
        self.rng = np.random.default_rng(seed)
        self.round_length = depth  # draft tokens of this round

    def sampled_variant(self, temperature: float) -> Thompson:
        return Thompson(self.depth, "sampled", temperature, self.seed, self.memory)

    def begin_round(self, prefix: Prefix) -> None:
        super().begin_round(prefix)
        self.round_length = self.choose_length(
            self.rng.beta(self.accepted_counts + 1, self.rejected_counts + 1), prefix.longest
        )

    def choose_length(self, chances: np.ndarray, length: int) -> int:
        """Choose the fastest number of tokens, at least 1, for these acceptance rates [D]."""
        start, verify, steps = self.estimate_seconds(length)
        return (
            int(((1 + chances.cumprod().cumsum()) / (start + (verify + steps).cumsum())).argmax())
            + 1
        )

    def should_draw(self, draft: GrowingTree, level: int) -> Tensor:
        return torch.full_like(self.confidence, level < self.round_length, dtype=torch.bool)

    def should_run(self, draft: GrowingTree, level: int) -> Tensor:
        return self.should_draw(draft, level + 1)

    def learn_row(self, row: int, drafted: int, num_accepted: int) -> None:
        fade = 1 - 1 / self.memory
        self.accepted_counts = self.accepted_counts * fade
        self.rejected_counts = self.rejected_counts * fade
        self.accepted_counts[:num_accepted] += 1
        if num_accepted < drafted:
            self.rejected_counts[num_accepted] += 1


@dataclass(frozen=True)
class Episode:
    """A row that was drafted to its full depth."""

    states: np.ndarray  # [D, F] state before each token was drawn
    num_accepted: int  # accepted tokens


class Policy(AdaptiveChain):
    """A chain whose length a small policy decides, learnt by reward (RADAR, Ma et al., 2025: a
    Markov decision process).

    The state holds the largest probability of the drafter's distribution, its margin over the
    second, the entropy, the path's probability, and the drafter's own acceptance estimate where it
    has one. Before each token the policy decides whether to draw it, which costs a verified node,
    and after it whether the drafter runs it, which costs a draft step. An accepted token earns 1; a
    second costs the tokens that the best policy so far decodes in it.

    Chains that were drafted to their full depth show what every decision would have earned, so the
    advantage of continuing is fitted backwards from the last token, by ridge regression on the
    state, as fitted Q iteration does from a batch of episodes. Such chains are all of the
    rehearsal's first `trials` rows, or `memory` where that is less, and every `explore`-th round
    afterwards.
    """

    name = "policy"
    min_episodes = 96  # episodes before the first fit
    refit_interval = 32  # new episodes between two fits

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
        # Fully drafted rows that the policy is fitted to at most.
        memory: int = 512,
        # Every so many rounds a chain is drafted to its full depth, to learn from it.
        explore: int = 64,
    ) -> None:
        super().__init__(depth, children, temperature, seed, memory)
        check_settings(self, explore=(explore, 1))
        self.explore = explore
        self.num_rounds = 0
        self.text_length = 0
        self.episodes: deque[Episode] = deque(maxlen=memory)
        self.num_new_episodes = 0  # episodes since the last fit
        # by level, the weights [F] of the advantage of drawing a token ...
        self.draw_weights: list[np.ndarray] = []
        self.run_weights: list[np.ndarray] = []  # ... and of running it
        self.is_full = True  # whether this round is drafted to its full depth
        self.states: list[np.ndarray] = []  # states of this round by level, [B, F] each

    def sampled_variant(self, temperature: float) -> Policy:
        return Policy(self.depth, "sampled", temperature, self.seed, self.memory, self.explore)

    def begin_round(self, prefix: Prefix) -> None:
        super().begin_round(prefix)
        self.is_full = not self.draw_weights or self.num_rounds % self.explore == 0
        self.num_rounds = self.num_rounds + 1
        self.states = []
        self.text_length = prefix.longest

    def should_draw(self, draft: GrowingTree, level: int) -> Tensor:
        self.states.append(self.compute_state(draft))
        return self.decide_rows(self.draw_weights, level)

    def should_run(self, draft: GrowingTree, level: int) -> Tensor:
        return self.decide_rows(self.run_weights, level)

    def decide_rows(self, weights: list[np.ndarray], level: int) -> Tensor:
        """Mark the rows [B] where the advantage of continuing is positive; False beyond the
        fitted levels.
        """
        if self.is_full or level >= len(weights):
            return torch.full_like(self.confidence, self.is_full, dtype=torch.bool)
        return torch.from_numpy(self.states[level] @ weights[level] > 0).to(self.confidence.device)

    def compute_state(self, draft: GrowingTree) -> np.ndarray:
        """Compute the state [B, F] after the newest token."""
        log_q = (draft.log_q[:, 0] / self.temperature).log_softmax(-1)
        first, second = log_q.topk(2, dim=-1).values.clamp(min=-20).unbind(-1)
        entropy = -(log_q.exp() * log_q.clamp(min=-1e4)).sum(-1)
        numbers = [
            torch.ones_like(first),
            first.exp(),
            first,
            first - second,
            entropy,
            draft.scores[:, -1].clamp(min=-20),
        ]
        if draft.rollout.accept_probs is not None:
            numbers.append(draft.rollout.accept_probs[:, 0])
        return torch.stack(numbers, dim=-1).double().cpu().numpy()

    def learn_row(self, row: int, drafted: int, num_accepted: int) -> None:
        # A drafter that copies text shows no states in a round.
        if not self.is_full or not self.states:
            return
        self.episodes.append(Episode(np.stack([state[row] for state in self.states]), num_accepted))
        self.num_new_episodes += 1
        if len(self.episodes) >= min(self.min_episodes, self.memory) and (
            not self.draw_weights or self.num_new_episodes >= self.refit_interval
        ):
            self.fit_policy()

    def fit_policy(self) -> None:
        """Fit both decisions at every level for the speed that they reach; a few iterations
        converge (Dinkelbach).
        """
        self.num_new_episodes, depth = 0, min(len(episode.states) for episode in self.episodes)
        states = np.stack([episode.states[:depth] for episode in self.episodes])  # [E, D, F]
        # [E, D]
        is_accepted = np.array([episode.num_accepted for episode in self.episodes])[
            :, None
        ] > np.arange(depth)
        start, verify, steps = self.estimate_seconds(self.text_length)
        fixed = (1 + is_accepted.mean(0).cumsum()) / (start + (verify + steps)[:depth].cumsum())
        speed = float(fixed.max())
        for _ in range(4):
            drafts, runs = self.fit_decisions(
                states, is_accepted - speed * verify[:depth], speed * steps[:depth]
            )
            tokens = 1 + (is_accepted * drafts).sum(1).mean()
            speed = tokens / (
                start
                + (drafts * verify[:depth]).sum(1).mean()
                + (runs[:, :-1] * steps[1:depth]).sum(1).mean()
            )

    def fit_decisions(
        self, states: np.ndarray, gains: np.ndarray, steps: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fit the decisions to states [E, D, F], where a token gains [E, D] and a draft step costs
        [D].

        Returns which tokens of every episode are then drawn [E, D], and which are run [E, D].
        """
        episodes, depth, _ = states.shape
        draws = np.zeros((episodes, depth), dtype=bool)
        runs = np.zeros((episodes, depth), dtype=bool)
        self.draw_weights = []
        self.run_weights = []
        deeper_reward = np.zeros(episodes)  # reward of the deeper levels under their decisions
        for level in range(depth - 1, -1, -1):
            if level + 1 < depth:
                continue_gain = deeper_reward - steps[level + 1]
                self.run_weights.insert(0, ridge_regression(states[:, level], continue_gain))
                runs[:, level] = states[:, level] @ self.run_weights[0] > 0
                deeper_reward = np.where(runs[:, level], continue_gain, 0.0)
            else:
                self.run_weights.insert(0, np.zeros(states.shape[-1]))
            draw_gain = gains[:, level] + deeper_reward
            self.draw_weights.insert(0, ridge_regression(states[:, level], draw_gain))
            draws[:, level] = states[:, level] @ self.draw_weights[0] > 0
            deeper_reward = np.where(draws[:, level], draw_gain, 0.0)
        drafted = np.ones(episodes, dtype=bool)
        for level in range(depth):
            draws[:, level] &= drafted
            runs[:, level] &= draws[:, level]
            drafted = runs[:, level]
        return draws, runs


def ridge_regression(x: np.ndarray, y: np.ndarray, strength: float = 1e-2) -> np.ndarray:
    """Return the weights [F] of the ridge regression of y [E] on x [E, F]."""
    scale = (x * x).mean(0)
    weights: np.ndarray = np.linalg.solve(
        x.T @ x + strength * len(x) * np.diag(scale + 1e-9), x.T @ y
    )
    return weights
