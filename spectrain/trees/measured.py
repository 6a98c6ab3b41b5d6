"""Trees that trade expected tokens against measured costs on this machine. Shapes: B batch, F
frontier nodes.
"""

from __future__ import annotations

import numpy as np
import torch

from spectrain.copying.trie import Trie

from .base import Prefix, TreeBuilder, TreeTraits, check_settings
from .growing import GrowingTree
from .measured_policy import MeasuredPolicy
from .measurements import Calibration
from .rollout import Rollout
from .token_tree import TokenTree


class Auto(TreeBuilder):
    """The depth and size that maximise predicted speed: expected tokens over the time to draft and
    verify them.

    Expected tokens are the drafter's path probabilities, corrected at each depth by observed
    acceptance. Verification times are those of the calibration, which ran all sizes in turn.
    Drafting times are running means, scaled by how much faster or slower the round's own
    verification was than calibrated. With `refit` verification times follow the rounds too
    (`VerifyFit`). Trees that early pruning shortens count as what they were before in times, and as
    what is left in acceptance.

    The policy of this tree decides whether a round drafts, and learns from it (`MeasuredPolicy`).
    """

    name = "auto"
    requirements: tuple[str, ...] = ("latency",)
    traits = TreeTraits(uses_latency=True)
    round_policy: MeasuredPolicy

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 8,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 64,
        # Nodes of a level that are expanded, and children of each of them.
        top_k: int = 8,
        # Rounds over which running means of acceptance and times are taken.
        memory: int = 64,
        # Whether verification times are fitted anew to the rounds by least squares (ProPD).
        refit: bool = False,
    ) -> None:
        self.depth = depth
        self.budget = budget
        self.top_k = top_k
        self.memory = memory
        self.refit = refit
        check_settings(
            self, depth=(depth, 1), budget=(budget, 2), top_k=(top_k, 1), memory=(memory, 1)
        )
        self.max_drafted = (depth - 1) * top_k
        self.round_policy = MeasuredPolicy(depth, budget, top_k, memory, refit)

    def prepare(self, calibration: Calibration) -> None:
        self.round_policy.prepare(calibration)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        policy = self.round_policy
        costs = policy.start_tree(prefix)
        latency = costs.latency
        tree = GrowingTree(self, prefix, rollout)
        num_texts = len(prefix.root)
        rows = np.arange(num_texts)[:, None]
        log_trust = policy.acceptance.log_trust()
        verify = np.asarray(policy.verify_seconds(policy.text_length))
        # Of all nodes so far: scores [B, N] and depths [N], and the largest acceptance
        # probabilities [B, budget], descending.
        scores = [np.zeros((num_texts, 1), np.float32)]
        depths = [0]
        chances = np.ones((num_texts, 1))
        depth = rollout.limit_depth(self.depth)
        curves = list[np.ndarray]()
        for level in range(depth):
            # Numpy: torch takes several times as long for as few numbers.
            new = tree.add_children(self.top_k).cpu().numpy()
            scores.append(new)
            depths += [level + 1] * new.shape[1]
            new_chances = np.exp(new + log_trust[level])
            chances = -np.sort(-np.concatenate([chances, new_chances], axis=1), axis=1)[
                :, : self.budget
            ]
            tokens = chances.mean(0).cumsum()  # the root alone emits one
            curves.append(tokens)
            spent = costs.estimate_drafting(level + 1) + latency.estimate_levels(level + 1)
            speed = tokens / (spent + verify[: len(tokens)])
            num_fastest = int(speed.argmax()) + 1
            top_speed = float(speed.max())
            if level + 1 == depth:
                break
            best = np.argsort(-new, axis=1, kind="stable")[:, : self.top_k]
            mass = float(new_chances[rows, best].sum(1).mean())
            if (
                mass * policy.acceptance.next_chance(level + 1)
                < (costs.step_seconds.value + latency.level_seconds) * top_speed
            ):
                break  # another level costs more time than its expected tokens save
            # A child is at most as likely as its parent, so a node that is not worth its own
            # verification is not expanded.
            size = min(num_fastest, len(verify) - 1)
            worth = top_speed * max(0.0, verify[size] - verify[size - 1])
            num_kept = max(1, int((new_chances[rows, best] >= worth).sum(1).max()))
            tree.extend_frontier(torch.from_numpy(best[:, :num_kept].copy()).to(prefix.root.device))
        size = max(2, num_fastest)
        every = np.concatenate(scores, axis=1)
        selected = np.argsort(-every, axis=1, kind="stable")[:, :size]
        expected_by_depth = np.zeros((num_texts, self.depth + 1))
        np.add.at(
            expected_by_depth,
            (rows, np.asarray(depths)[selected]),
            np.exp(every[rows, selected]),
        )
        policy.record_tree(level + 1, expected_by_depth, curves)
        # Scores fall along a path and ties go to the shallower node, so every selected node has its
        # parent.
        return tree.select_nodes(torch.from_numpy(np.sort(selected, axis=1)).to(prefix.root.device))

    def copy_budget(self, prefix: Prefix, tries: list[Trie]) -> int:
        return self.round_policy.choose_copies(prefix, tries)

    def report_settings(self) -> dict[str, object]:
        return {**super().report_settings(), **self.round_policy.report_rounds()}
