"""Dynamic trees whose depth a small policy decides, fitted offline (RADAR, Ma et al., 2025).

Shapes: B batch, D depth, E episodes, F state features, K frontier nodes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from torch import Tensor

from spectrain.config.plain_files import read_json_object
from spectrain.errors import UserError
from spectrain.files import write_text
from spectrain.trees.base import Prefix, RoundResult, check_settings
from spectrain.trees.dynamic import best_of_level
from spectrain.trees.growing import GrowingTree
from spectrain.trees.rollout import Rollout
from spectrain.trees.token_tree import TokenTree
from spectrain_research.shared.latency_aware import LatencyAwareBuilder
from spectrain_research.shared.learning_builder import LearnsFromTrees

from .builders import Episode, ridge_regression

# The least log q of a path that a state holds.
MIN_SCORE = -20.0


class TreePolicy(LearnsFromTrees, LatencyAwareBuilder):
    """EAGLE-2's tree, which ends at the level where another draft call would not pay (RADAR's
    Markov decision process).

    Before each level but the first the state holds the log q of the `top_k` best paths, and the sum
    of their probabilities. Going on earns a token if the path that is accepted reaches the next
    level, and costs the tokens that the best policy so far decodes in a draft step. Rounds of a
    rehearsal are drafted to their full depth; since the tree cut at a level accepts as far as that
    level, one verification shows what every decision would have earned. The advantage of going on
    is fitted backwards from the last level by ridge regression on the state. With `policy` the fit
    is saved, so that later runs need neither rehearsal nor latencies.
    """

    name = "radar"
    requirements: tuple[str, ...] = ("latency", "rehearsal")
    min_episodes = 96

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 5,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 16,
        # Nodes of a level that are expanded, and children of each of them.
        top_k: int = 4,
        # File of the fitted policy, such as runs/NAME/drafter/policy.json: read if it exists, else
        # written after the fit; null fits in every run.
        policy: str | None = None,
    ) -> None:
        self.depth, self.budget, self.top_k = depth, budget, top_k
        check_settings(self, depth=(depth, 1), budget=(budget, 2), top_k=(top_k, 1))
        self.max_drafted = (depth - 1) * top_k
        self.policy_path = None if policy is None else Path(policy)
        # by level from the second on, the weights [F] of the advantage of drafting it
        self.weights: list[np.ndarray] = []
        self.states: list[np.ndarray] = []  # states of this round by level, [B, F] each
        self.episodes: list[Episode] = []
        self.depths: list[int] = []  # levels of every round
        if self.policy_path is not None and self.policy_path.exists():
            self._load_policy(self.policy_path)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        tree = GrowingTree(self, prefix, rollout)
        depth = rollout.limit_depth(self.depth)
        self.states = []
        self.text_length = prefix.longest
        for level in range(depth):
            scores = tree.add_children(self.top_k)
            best = best_of_level(scores, self.top_k)
            if level + 1 == depth:
                break
            self.states.append(self.compute_state(scores.gather(1, best)))
            if not self.should_continue(level):
                break
            tree.extend_frontier(best)
        self.depths.append(tree.num_levels)
        return tree.select_best(self.budget)

    def compute_state(self, scores: Tensor) -> np.ndarray:
        """Compute the state [B, F] from the log q of the best paths [B, K] of the newest level."""
        paths = scores.clamp(min=MIN_SCORE).double().cpu().numpy()
        padded = np.full((len(paths), self.top_k), MIN_SCORE)
        padded[:, : paths.shape[1]] = paths
        state: np.ndarray = np.concatenate(
            [np.ones((len(paths), 1)), padded, np.exp(padded).sum(1, keepdims=True)], axis=1
        )
        return state

    def should_continue(self, level: int) -> bool:
        """Tell whether the next level is drafted: where the texts gain by it on average, or
        while the policy is not fitted.
        """
        if not self.weights:
            return True
        return (
            level < len(self.weights)
            and float((self.states[level] @ self.weights[level]).mean()) > 0
        )

    def observe(self, round: RoundResult) -> None:
        if self.weights or len(self.states) < self.depth - 1:
            return
        for row, count in enumerate(round.counts.tolist()):
            if count:
                self.episodes.append(
                    Episode(np.stack([state[row] for state in self.states]), count - 1)
                )
        if len(self.episodes) >= self.min_episodes:
            self.fit_policy()

    def fit_policy(self) -> None:
        """Fit the decisions for the speed that they reach; a few iterations converge
        (Dinkelbach).
        """
        states = np.stack([episode.states for episode in self.episodes])  # [E, D - 1, F]
        accepted = np.array([episode.num_accepted for episode in self.episodes])
        # [E, D - 1] whether the next level is accepted
        gains = accepted[:, None] > np.arange(1, self.depth)
        start, costs = self.estimate_seconds()
        first = (accepted > 0).mean() + 1
        speed = max(
            (first + gains.mean(0)[:level].sum()) / (start + costs[:level].sum())
            for level in range(self.depth)
        )
        for _ in range(4):
            self.weights, drafted = fit_stopping(states, gains, speed * costs)
            tokens = first + (gains * drafted).sum(1).mean()
            speed = tokens / (start + (drafted * costs).sum(1).mean())
        if self.policy_path is not None:
            description = {
                "depth": self.depth,
                "top_k": self.top_k,
                "weights": [part.tolist() for part in self.weights],
            }
            write_text(self.policy_path, json.dumps(description, indent=1) + "\n")

    def estimate_seconds(self) -> tuple[float, np.ndarray]:
        """Estimate the seconds of a round with one level, and what each further level adds [D -
        1].
        """
        latency = self.require_latency()
        length = self.text_length
        nodes = [
            min(self.budget, 1 + self.top_k + level * self.top_k**2) for level in range(self.depth)
        ]
        verify = [
            latency.estimate_verify(count, length) + latency.estimate_levels(level)
            for level, count in enumerate(nodes)
        ]
        steps = latency.estimate_step(self.top_k, length)
        return latency.start_seconds + verify[0], np.diff(verify) + steps

    def _load_policy(self, path: Path) -> None:
        description = read_json_object(path)
        depth = description.get("depth")
        top_k = description.get("top_k")
        if (depth, top_k) != (self.depth, self.top_k):
            raise UserError(
                f"tree.policy={path}: it was fitted with tree.depth={depth} and "
                f"tree.top_k={top_k}; use these, or another file"
            )
        try:
            self.weights = [np.asarray(part, dtype=np.float64) for part in description["weights"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: it holds no weights of a policy; delete it, and the next run fits one "
                "anew"
            ) from error
        shapes = [(self.top_k + 2,)] * (self.depth - 1)
        if [part.shape for part in self.weights] != shapes:
            raise UserError(
                f"{path}: its weights are not {self.depth - 1} lists of {self.top_k + 2} numbers; "
                "delete it, and the next run fits one anew"
            )
        if not all(np.isfinite(part).all() for part in self.weights):
            raise UserError(
                f"{path}: its weights are no finite numbers; delete it, and the next run fits one "
                "anew"
            )
        self.requirements = ()

    def report_settings(self) -> dict[str, object]:
        mean = round(sum(self.depths) / len(self.depths), 2) if self.depths else None
        return {**super().report_settings(), "top_k": self.top_k, "mean_depth": mean}


def fit_stopping(
    states: np.ndarray, gains: np.ndarray, costs: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """Fit when to go on, backwards from the last level: states [E, D, F], the tokens that each
    level gains [E, D] and the tokens that it costs [D]. Return the weights of the advantage by
    level, and which levels are drafted [E, D]."""
    weights: list[np.ndarray] = []
    drafted = np.zeros(gains.shape, dtype=bool)
    reward = np.zeros(len(states))
    for level in range(states.shape[1] - 1, -1, -1):
        advantage = gains[:, level] - costs[level] + reward
        weights.insert(0, ridge_regression(states[:, level], advantage))
        drafted[:, level] = states[:, level] @ weights[0] > 0
        reward = np.where(drafted[:, level], advantage, 0.0)
    return weights, np.logical_and.accumulate(drafted, axis=1)
