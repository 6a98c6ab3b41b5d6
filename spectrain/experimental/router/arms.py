"""What is known of drafters that are chosen from. Shapes: B batch, D depth, P tokens of a round, F nodes, V vocabulary.

An arm reads what was committed while it rested before it drafts; it is judged along the tokens that a round emitted, as far as
it is right itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spectrain.drafters.context import Context
from spectrain.drafters.layers.copy_rollout import as_rollout
from spectrain.models.device import synchronize_device
from spectrain.models.features import Features, Layer
from spectrain.trees.base import Rollout

if TYPE_CHECKING:
    from spectrain.drafters.base import Drafter

PRIOR_RATE = 0.5  # the rate of a drafter that nothing is known of


class Stopwatch:
    """Seconds between its begins and ends; on a GPU each ends with a synchronisation."""

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self.clock, self.device, self.seconds, self.start_time = clock, device, 0.0, 0.0

    def __enter__(self) -> None:
        self.start_time = self.clock()

    def __exit__(self, *raised: Any) -> None:
        synchronize_device(self.device)
        self.seconds += self.clock() - self.start_time


class TimedRollout(Rollout):
    """A rollout whose time is taken, and whose first choices are noted by the paths that they follow."""

    def __init__(self, rollout: Rollout, stopwatch: Stopwatch) -> None:
        self.rollout, self.stopwatch = rollout, stopwatch
        self.draft_ids, self.depth_limit = rollout.draft_ids, rollout.depth_limit
        self.child_numbers: dict[tuple[int, int, int], int] = {}  # row, number of a node, token -> number of its child
        self.recorded_log_q: list[Tensor] = []  # [B, V] after every node, in the order in which they were given

    def start(self) -> Tensor:
        if not self.recorded_log_q:
            with self.stopwatch:
                self._record_log_q(self.rollout.start())
        return self.recorded_log_q[0][:, None]

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._record_nodes(tokens, parents)
        with self.stopwatch:
            return self._record_log_q(self.rollout.extend(tokens, parents))

    def extend_path(self, tokens: Tensor, parents: Tensor, given: int) -> Tensor:
        steps = torch.arange(given - 1, given - 1 + tokens.shape[1], device=tokens.device).expand_as(tokens)
        self._record_nodes(tokens, torch.cat([parents[:, None], steps[:, 1:]], dim=1))
        with self.stopwatch:
            return self._record_log_q(self.rollout.extend_path(tokens, parents, given))

    def teacher_force(self, tokens: Tensor) -> None:
        """Go along these tokens [B, P] from the root, untimed, where nothing was given yet; start has been asked."""
        if len(self.recorded_log_q) == 1 and tokens.shape[1]:
            self._record_nodes(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
            self._record_log_q(self.rollout.extend_path(tokens, torch.zeros_like(tokens[:, 0]), 1))

    def log_q_along(self, row: int, tokens: list[int]) -> list[Tensor]:
        """Log q [V] after the row's text and after each of these tokens, as far as it was asked."""
        found, number = [self.recorded_log_q[0][row]], 0
        for token in tokens:
            if (row, number, token) not in self.child_numbers:
                break
            number = self.child_numbers[row, number, token]
            found.append(self.recorded_log_q[number][row])
        return found

    def _record_nodes(self, tokens: Tensor, parents: Tensor) -> None:
        first = len(self.recorded_log_q)
        for row, (new, above) in enumerate(zip(tokens.tolist(), parents.tolist())):
            for place, (token, parent) in enumerate(zip(new, above)):
                self.child_numbers.setdefault((row, parent, token), first + place)

    def _record_log_q(self, log_q: Tensor) -> Tensor:
        self.recorded_log_q += log_q.unbind(1)
        self.accept_probs, self.stop_mask = self.rollout.accept_probs, self.rollout.stop_mask
        return log_q


class Arm:
    """One drafter: what it has still to read, how often it was right at each depth, and how long its drafts take."""

    def __init__(self, decay: float, max_timings: int) -> None:
        self.decay, self.seconds = decay, deque[float](maxlen=max_timings)
        self.pending_features: list[tuple[Features, Tensor]] = []
        self.num_drafts = 0  # drafts that it made in this decoding
        self.hits, self.misses = np.zeros(0), np.zeros(0)  # [D] fading, where it was right at the depths above
        self.recording: TimedRollout | None = None  # its draft in this round
        self.depth_limit: int | None = None  # how deep it can draft; None for any depth

    @property
    def num_unread(self) -> int:
        """Tokens that it has not read, of the row with most."""
        return sum(features.tokens.shape[1] for features, _ in self.pending_features)

    def queue_features(self, context: Context) -> None:
        """What was committed since the last round is there to be read."""
        if context.begins:
            self.pending_features, self.num_drafts = [], 0
        self.pending_features.append((context.fresh, context.counts))

    def make_draft(self, drafter: Drafter, context: Context, stopwatch: Stopwatch) -> None:
        """Have it catch up and draft."""
        with stopwatch:
            fresh, counts = self.pending_features[0]
            if len(self.pending_features) > 1:
                fresh, counts = (
                    Features.concat_prefixes(self.pending_features),
                    torch.stack([counts for _, counts in self.pending_features]).sum(0),
                )
            view = replace(
                context, fresh=_select_layers(fresh, drafter.layers), counts=counts, round=self.num_drafts, waiting=[]
            )
            rollout = as_rollout(drafter.draft(view), view)
        self.pending_features, self.num_drafts = [], self.num_drafts + 1
        self.recording, self.depth_limit = TimedRollout(rollout, stopwatch), rollout.depth_limit
        self.recording.start()

    def score_draft(self, context: Context, path: Tensor, logits: Tensor | None) -> None:
        """Judge it along the tokens that every row has emitted; by sum_v min(p, q) where `logits` [B, N, V] of the tree are
        given, of which `path` [B, P] was kept, else by its first choice."""
        assert self.recording is not None
        depth = self._max_depth(context.builder.depth)
        self._grow_counts(context.builder.depth)
        emitted = context.following
        self.recording.teacher_force(emitted[:, : min(depth, emitted.shape[1]) - 1])
        self.hits, self.misses = self.hits * self.decay, self.misses * self.decay
        for row, (tokens, count) in enumerate(zip(emitted.tolist(), context.counts.tolist())):
            said = self.recording.log_q_along(row, tokens[: max(count - 1, 0)])[: min(depth, count)]
            for place, (log_q, token) in enumerate(zip(said, tokens)):
                first = int(self.recording.rollout.to_target_ids(log_q.argmax()))
                theirs = None if logits is None else logits[row, path[row, place]]
                chance = float(first == token) if theirs is None else self._acceptance_probability(context, log_q, theirs)
                self.hits[place] += chance
                self.misses[place] += 1 - chance
                if first != token and logits is None:
                    break

    def _acceptance_probability(self, context: Context, log_q: Tensor, logits: Tensor) -> float:
        """sum_v min(p, q), either at the temperature at which it is read and drawn."""
        assert self.recording is not None
        p, ids = (logits / context.temperature).softmax(-1), self.recording.rollout.draft_ids
        p = p[: len(log_q)] if ids is None else p[ids]
        return float(torch.minimum(p, (log_q / context.builder.temperature).softmax(-1)).sum())

    def acceptance_rates(self, depth: int) -> np.ndarray:
        """[D] how often each depth is kept where those above are; where little is known, as often as the one above, and never
        where it cannot draft."""
        self._grow_counts(depth)
        found, before = np.zeros(depth), PRIOR_RATE
        for place in range(self._max_depth(depth)):
            before = found[place] = (self.hits[place] + before) / (self.hits[place] + self.misses[place] + 1)
        return found

    def sample_rates(self, source: np.random.Generator, depth: int) -> np.ndarray:
        """[D] the same, drawn from what is believed."""
        self._grow_counts(depth)
        return source.beta(self.hits[:depth] + 1, self.misses[:depth] + 1) * (np.arange(depth) < self._max_depth(depth))

    def _max_depth(self, depth: int) -> int:
        """How deep it drafts where trees are so deep."""
        return depth if self.depth_limit is None else min(depth, self.depth_limit)

    def _grow_counts(self, depth: int) -> None:
        if len(self.hits) < depth:
            more = np.zeros(depth - len(self.hits))
            self.hits, self.misses = np.append(self.hits, more), np.append(self.misses, more)


class Hedge:
    """Exponential weights (Freund and Schapire, 1997) over the gains of the last `memory` rounds: who is best may change."""

    def __init__(self, count: int, memory: int, rate: float = 4.0) -> None:
        self.gains, self.memory, self.rate = np.zeros(count), memory, rate

    def update_gains(self, speeds: np.ndarray) -> None:
        """The gain of each in a round is the speed that it is known for by now, as a share of the fastest one's."""
        self.gains = self.memory * speeds / speeds.max()

    @property
    def weights(self) -> np.ndarray:
        found: np.ndarray = np.exp(self.rate * (self.gains - self.gains.max()))
        return found / found.sum()


def _select_layers(features: Features, layers: tuple[Layer, ...]) -> Features:
    """The features of these layers alone."""
    if features.layers == layers:
        return features
    states = [features.at_layer(layer) for layer in layers]
    hidden = torch.stack(states, dim=2) if states else features.hidden[:, :, :0]
    return Features(features.tokens, layers, hidden, features.logits)
