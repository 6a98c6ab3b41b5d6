"""Bandit arms: statistics of the drafters that a router chooses from.

An arm catches up with the committed tokens before it drafts. Its drafts are scored along the tokens
that a round emitted, as far as they agree with them. Shapes: B batch, D depth, P tokens of a round,
F nodes, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.models.device import synchronize_device
from spectrain.models.features import Features, Layer
from spectrain.trees.rollout import Rollout
from spectrain_research.shared.copy_rollout import as_rollout
from spectrain_research.shared.nested_rollout import NestedRollout

PRIOR_RATE = 0.5  # the acceptance rate of a drafter without observations


class Stopwatch:
    """Sums the seconds spent inside its context. On a GPU, every exit synchronises the device."""

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self.clock = clock
        self.device = device
        self.seconds = 0.0
        self.start_time = 0.0

    def __enter__(self) -> None:
        self.start_time = self.clock()

    def __exit__(self, *raised: Any) -> None:
        synchronize_device(self.device)
        self.seconds += self.clock() - self.start_time


class TimedRollout(NestedRollout):
    """A rollout that is timed, and that records log q after every node."""

    def __init__(self, rollout: Rollout, stopwatch: Stopwatch) -> None:
        super().__init__(rollout)
        self.stopwatch = stopwatch
        self.child_numbers: dict[tuple[int, int, int], int] = {}  # (row, node, token) -> child node
        self.recorded_log_q: list[Tensor] = []  # [B, V] after every node, in their order

    def start(self) -> Tensor:
        if not self.recorded_log_q:
            with self.stopwatch:
                self._record_log_q(super().start())
        return self.recorded_log_q[0][:, None]

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._record_nodes(tokens, parents)
        with self.stopwatch:
            return self._record_log_q(super().extend(tokens, parents))

    def extend_path(self, tokens: Tensor, parents: Tensor, num_given: int) -> Tensor:
        steps = torch.arange(
            num_given - 1, num_given - 1 + tokens.shape[1], device=tokens.device
        ).expand_as(tokens)
        self._record_nodes(tokens, torch.cat([parents[:, None], steps[:, 1:]], dim=1))
        with self.stopwatch:
            return self._record_log_q(super().extend_path(tokens, parents, num_given))

    def teacher_force(self, tokens: Tensor) -> None:
        """Extend a rollout that only started by the path of tokens [B, P] from the root, without
        timing it.
        """
        if len(self.recorded_log_q) == 1 and tokens.shape[1]:
            self._record_nodes(
                tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            )
            self._record_log_q(super().extend_path(tokens, torch.zeros_like(tokens[:, 0]), 1))

    def log_q_along(self, row: int, tokens: list[int]) -> list[Tensor]:
        """Return the recorded log q [V] after the row's text and after each of these tokens, as
        far as there are any.
        """
        log_q = [self.recorded_log_q[0][row]]
        node = 0
        for token in tokens:
            if (row, node, token) not in self.child_numbers:
                break
            node = self.child_numbers[row, node, token]
            log_q.append(self.recorded_log_q[node][row])
        return log_q

    def _record_nodes(self, tokens: Tensor, parents: Tensor) -> None:
        first = len(self.recorded_log_q)
        for row, (row_tokens, row_parents) in enumerate(zip(tokens.tolist(), parents.tolist())):
            for offset, (token, parent) in enumerate(zip(row_tokens, row_parents)):
                self.child_numbers.setdefault((row, parent, token), first + offset)

    def _record_log_q(self, log_q: Tensor) -> Tensor:
        self.recorded_log_q += log_q.unbind(1)
        return log_q


class Arm:
    """One drafter: the features that it has not read yet, its acceptance counts per depth, and
    the times of its drafts.
    """

    def __init__(self, decay: float, max_timings: int) -> None:
        self.decay = decay
        self.seconds = deque[float](maxlen=max_timings)
        self.pending_features: list[tuple[Features, Tensor]] = []
        self.num_drafts = 0  # in this decoding
        # [D] decaying counts of accepted and rejected drafts whose ancestors were accepted.
        self.hits = np.zeros(0)
        self.misses = np.zeros(0)
        self.recording: TimedRollout | None = None  # the draft of this round
        self.depth_limit: int | None = None  # None for any depth

    @property
    def num_unread(self) -> int:
        """Number of tokens that the drafter has not read, of the row with most."""
        return sum(features.tokens.shape[1] for features, _ in self.pending_features)

    def queue_features(self, context: Context) -> None:
        """Add the features that were committed since the last round."""
        if context.begins:
            self.pending_features = []
            self.num_drafts = 0
        self.pending_features.append((context.new_features, context.num_new))

    def make_draft(self, drafter: Drafter, context: Context, stopwatch: Stopwatch) -> None:
        """Let the drafter read the queued features, and draft."""
        with stopwatch:
            features, num_new = self.pending_features[0]
            if len(self.pending_features) > 1:
                features = Features.concat_prefixes(self.pending_features)
                num_new = torch.stack([counts for _, counts in self.pending_features]).sum(0)
            features = select_layers(features, drafter.layers)
            view = replace(
                context, new_features=features, num_new=num_new, round=self.num_drafts, deferred=[]
            )
            rollout = as_rollout(drafter.draft(view), view)
        self.pending_features = []
        self.num_drafts = self.num_drafts + 1
        self.recording = TimedRollout(rollout, stopwatch)
        self.depth_limit = rollout.depth_limit
        self.recording.start()

    def score_draft(self, context: Context, path: Tensor, logits: Tensor | None) -> None:
        """Score the draft along the tokens that every row emitted.

        With the target's logits [B, N, V] of the tree, whose nodes `path` [B, P] were accepted, a
        hit counts sum_v min(p, q). Without them it counts 1 if the most likely token of q was
        emitted.
        """
        assert self.recording is not None
        num_depths = self._max_depth(context.builder.depth)
        self._grow_counts(context.builder.depth)
        emitted = context.next_tokens
        self.recording.teacher_force(emitted[:, : min(num_depths, emitted.shape[1]) - 1])
        self.hits = self.hits * self.decay
        self.misses = self.misses * self.decay
        for row, (tokens, count) in enumerate(zip(emitted.tolist(), context.num_new.tolist())):
            predictions = self.recording.log_q_along(row, tokens[: max(count - 1, 0)])[
                : min(num_depths, count)
            ]
            for depth_index, (log_q, token) in enumerate(zip(predictions, tokens)):
                top_token = int(self.recording.inner.to_target_ids(log_q.argmax()))
                target_logits = None if logits is None else logits[row, path[row, depth_index]]
                hit = (
                    float(top_token == token)
                    if target_logits is None
                    else self._acceptance_probability(context, log_q, target_logits)
                )
                self.hits[depth_index] += hit
                self.misses[depth_index] += 1 - hit
                if top_token != token and logits is None:
                    break

    def _acceptance_probability(self, context: Context, log_q: Tensor, logits: Tensor) -> float:
        """Return sum_v min(p, q), with p at the rule's temperature and q at the builder's."""
        assert self.recording is not None
        p = (logits / context.temperature).softmax(-1)
        ids = self.recording.inner.draft_ids
        p = p[: len(log_q)] if ids is None else p[ids]
        return float(torch.minimum(p, (log_q / context.builder.temperature).softmax(-1)).sum())

    def acceptance_rates(self, depth: int) -> np.ndarray:
        """Return the acceptance rate [D] of each depth whose ancestors were accepted.

        With few observations it is close to the rate of the depth above. It is 0 where the drafter
        cannot draft.
        """
        self._grow_counts(depth)
        rates = np.zeros(depth)
        previous = PRIOR_RATE
        for index in range(self._max_depth(depth)):
            previous = rates[index] = (self.hits[index] + previous) / (
                self.hits[index] + self.misses[index] + 1
            )
        return rates

    def sample_rates(self, source: np.random.Generator, depth: int) -> np.ndarray:
        """Draw acceptance rates [D] from their Beta posteriors."""
        self._grow_counts(depth)
        return source.beta(self.hits[:depth] + 1, self.misses[:depth] + 1) * (
            np.arange(depth) < self._max_depth(depth)
        )

    def _max_depth(self, depth: int) -> int:
        """Return how deep the drafter drafts in trees of this depth."""
        return depth if self.depth_limit is None else min(depth, self.depth_limit)

    def _grow_counts(self, depth: int) -> None:
        if len(self.hits) < depth:
            more = np.zeros(depth - len(self.hits))
            self.hits, self.misses = np.append(self.hits, more), np.append(self.misses, more)


class Hedge:
    """Exponential weights over gains that accumulate (Freund and Schapire, 1997), the rule behind
    Not-a-Bandit (2025).

    A round adds to the gain G of each arm its speed as a share of the fastest arm's, g from 0 to 1,
    and the past fades: G <- fade G + g with fade = 1 - 1 / memory. The rate is sqrt(8 ln K / n),
    where n <- fade n + 1 counts the rounds in the same way and tends to `memory`. So the faded
    gains fall short of those of the best arm by at most sqrt(memory ln K / 2), whatever the speeds
    are. Without fading, the loss over T rounds is at most 2 sqrt(T ln K / 2) + sqrt(ln K / 8)
    (Cesa-Bianchi and Lugosi, 2006, theorem 2.3): the share that is lost tends to 0, also where two
    speeds differ little for ever.
    """

    def __init__(self, count: int, memory: int | None) -> None:
        self.gains = np.zeros(count)
        self.num_rounds = 0.0
        self.fade = 1.0 if memory is None else 1 - 1 / memory

    def add_gains(self, speeds: np.ndarray) -> None:
        """Add a round in which the arms would have reached these speeds [arms]."""
        self.gains = self.fade * self.gains + speeds / speeds.max()
        self.num_rounds = self.fade * self.num_rounds + 1

    @property
    def rate(self) -> float:
        """The learning rate of the next round."""
        return float(np.sqrt(8 * np.log(len(self.gains)) / (self.fade * self.num_rounds + 1)))

    @property
    def weights(self) -> np.ndarray:
        """The probability [arms] of each arm in the next round."""
        gains = self.fade * self.gains
        scores: np.ndarray = np.exp(self.rate * (gains - gains.max()))
        return scores / scores.sum()


def select_layers(features: Features, layers: tuple[Layer, ...]) -> Features:
    """Select the features of these layers."""
    if features.layers == layers:
        return features
    states = [features.at_layer(layer) for layer in layers]
    hidden = torch.stack(states, dim=2) if states else features.hidden[:, :, :0]
    return Features(features.tokens, layers, hidden, features.logits)
