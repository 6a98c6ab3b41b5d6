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

from spectrain.models.device import wait
from spectrain.models.features import Features, Layer
from spectrain.trees.base import Rollout

from ..context import Context
from .copy_rollout import as_rollout

if TYPE_CHECKING:
    from ..base import Drafter

GUESS = 0.5  # the rate of a drafter that nothing is known of


class Stopwatch:
    """Seconds between its begins and ends; on a GPU each ends with a synchronisation."""

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self.clock, self.device, self.seconds, self.began = clock, device, 0.0, 0.0

    def __enter__(self) -> None:
        self.began = self.clock()

    def __exit__(self, *raised: Any) -> None:
        wait(self.device)
        self.seconds += self.clock() - self.began


class Noted(Rollout):
    """A rollout whose time is taken, and whose first choices are noted by the paths that they follow."""

    def __init__(self, rollout: Rollout, watch: Stopwatch) -> None:
        self.rollout, self.watch = rollout, watch
        self.draft_ids, self.depth_limit = rollout.draft_ids, rollout.depth_limit
        self.numbers: dict[tuple[int, int, int], int] = {}  # row, number of a node, token -> number of its child
        self.said: list[Tensor] = []  # [B, V] after every node, in the order in which they were given

    def start(self) -> Tensor:
        if not self.said:
            with self.watch:
                self._heard(self.rollout.start())
        return self.said[0][:, None]

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._note(tokens, parents)
        with self.watch:
            return self._heard(self.rollout.extend(tokens, parents))

    def follow(self, tokens: Tensor, parents: Tensor, given: int) -> Tensor:
        steps = torch.arange(given - 1, given - 1 + tokens.shape[1], device=tokens.device).expand_as(tokens)
        self._note(tokens, torch.cat([parents[:, None], steps[:, 1:]], dim=1))
        with self.watch:
            return self._heard(self.rollout.follow(tokens, parents, given))

    def lead(self, tokens: Tensor) -> None:
        """Go along these tokens [B, P] from the root, untimed, where nothing was given yet; start has been asked."""
        if len(self.said) == 1 and tokens.shape[1]:
            self._note(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
            self._heard(self.rollout.follow(tokens, torch.zeros_like(tokens[:, 0]), 1))

    def after(self, row: int, tokens: list[int]) -> list[Tensor]:
        """Log q [V] after the row's text and after each of these tokens, as far as it was asked."""
        found, number = [self.said[0][row]], 0
        for token in tokens:
            if (row, number, token) not in self.numbers:
                break
            number = self.numbers[row, number, token]
            found.append(self.said[number][row])
        return found

    def _note(self, tokens: Tensor, parents: Tensor) -> None:
        first = len(self.said)
        for row, (new, above) in enumerate(zip(tokens.tolist(), parents.tolist())):
            for place, (token, parent) in enumerate(zip(new, above)):
                self.numbers.setdefault((row, parent, token), first + place)

    def _heard(self, log_q: Tensor) -> Tensor:
        self.said += log_q.unbind(1)
        self.survival, self.closed = self.rollout.survival, self.rollout.closed
        return log_q


class Arm:
    """One drafter: what it has still to read, how often it was right at each depth, and how long its drafts take."""

    def __init__(self, fade: float, timed: int) -> None:
        self.fade, self.seconds = fade, deque[float](maxlen=timed)
        self.unread: list[tuple[Features, Tensor]] = []
        self.round = 0  # drafts that it made in this decoding
        self.right, self.wrong = np.zeros(0), np.zeros(0)  # [D] fading, where it was right at the depths above
        self.asked: Noted | None = None  # its draft in this round
        self.limit: int | None = None  # how deep it can draft; None for any depth

    @property
    def behind(self) -> int:
        """Tokens that it has not read, of the row with most."""
        return sum(features.tokens.shape[1] for features, _ in self.unread)

    def read(self, context: Context) -> None:
        """What was committed since the last round is there to be read."""
        if context.begins:
            self.unread, self.round = [], 0
        self.unread.append((context.fresh, context.counts))

    def ask(self, drafter: Drafter, context: Context, watch: Stopwatch) -> None:
        """Have it catch up and draft."""
        with watch:
            fresh, counts = self.unread[0]
            if len(self.unread) > 1:
                fresh, counts = Features.joined(self.unread), torch.stack([counts for _, counts in self.unread]).sum(0)
            view = replace(context, fresh=_of_layers(fresh, drafter.layers), counts=counts, round=self.round, waiting=[])
            rollout = as_rollout(drafter.draft(view), view)
        self.unread, self.round = [], self.round + 1
        self.asked, self.limit = Noted(rollout, watch), rollout.depth_limit
        self.asked.start()

    def learn(self, context: Context, path: Tensor, logits: Tensor | None) -> None:
        """Judge it along the tokens that every row has emitted; by sum_v min(p, q) where `logits` [B, N, V] of the tree are
        given, of which `path` [B, P] was kept, else by its first choice."""
        assert self.asked is not None
        depth = self._reach(context.builder.depth)
        self._widen(context.builder.depth)
        emitted = context.following
        self.asked.lead(emitted[:, : min(depth, emitted.shape[1]) - 1])
        self.right, self.wrong = self.right * self.fade, self.wrong * self.fade
        for row, (tokens, count) in enumerate(zip(emitted.tolist(), context.counts.tolist())):
            said = self.asked.after(row, tokens[: max(count - 1, 0)])[: min(depth, count)]
            for place, (log_q, token) in enumerate(zip(said, tokens)):
                first = int(self.asked.rollout.to_target(log_q.argmax()))
                theirs = None if logits is None else logits[row, path[row, place]]
                chance = float(first == token) if theirs is None else self._overlap(context, log_q, theirs)
                self.right[place] += chance
                self.wrong[place] += 1 - chance
                if first != token and logits is None:
                    break

    def _overlap(self, context: Context, log_q: Tensor, logits: Tensor) -> float:
        """sum_v min(p, q), either at the temperature at which it is read and drawn."""
        assert self.asked is not None
        p, ids = (logits / context.temperature).softmax(-1), self.asked.rollout.draft_ids
        p = p[: len(log_q)] if ids is None else p[ids]
        return float(torch.minimum(p, (log_q / context.builder.temperature).softmax(-1)).sum())

    def rates(self, depth: int) -> np.ndarray:
        """[D] how often each depth is kept where those above are; where little is known, as often as the one above, and never
        where it cannot draft."""
        self._widen(depth)
        found, before = np.zeros(depth), GUESS
        for place in range(self._reach(depth)):
            before = found[place] = (self.right[place] + before) / (self.right[place] + self.wrong[place] + 1)
        return found

    def drawn(self, source: np.random.Generator, depth: int) -> np.ndarray:
        """[D] the same, drawn from what is believed."""
        self._widen(depth)
        return source.beta(self.right[:depth] + 1, self.wrong[:depth] + 1) * (np.arange(depth) < self._reach(depth))

    def _reach(self, depth: int) -> int:
        """How deep it drafts where trees are so deep."""
        return depth if self.limit is None else min(depth, self.limit)

    def _widen(self, depth: int) -> None:
        if len(self.right) < depth:
            more = np.zeros(depth - len(self.right))
            self.right, self.wrong = np.append(self.right, more), np.append(self.wrong, more)


class Hedge:
    """Exponential weights (Freund and Schapire, 1997) over the gains of the last `memory` rounds: who is best may change."""

    def __init__(self, count: int, memory: int, rate: float = 4.0) -> None:
        self.gains, self.memory, self.rate = np.zeros(count), memory, rate

    def learn(self, speeds: np.ndarray) -> None:
        """The gain of each in a round is the speed that it is known for by now, as a share of the fastest one's."""
        self.gains = self.memory * speeds / speeds.max()

    @property
    def weights(self) -> np.ndarray:
        found: np.ndarray = np.exp(self.rate * (self.gains - self.gains.max()))
        return found / found.sum()


def _of_layers(features: Features, layers: tuple[Layer, ...]) -> Features:
    """The features of these layers alone."""
    if features.layers == layers:
        return features
    states = [features.at(layer) for layer in layers]
    hidden = torch.stack(states, dim=2) if states else features.hidden[:, :, :0]
    return Features(features.tokens, layers, hidden, features.logits)
