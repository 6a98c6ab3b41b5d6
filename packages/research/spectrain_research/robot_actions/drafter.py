"""Drafts of robot actions by Kalman filters, one per joint, over the actions of the text (KERV)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from spectrain.config.values import Count, Positive
from spectrain.copying.trie import Trie
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft


@dataclass
class JointFilter:
    """A Kalman filter of one joint: position and speed in bins, with a random acceleration, and
    noisy measured positions.
    """

    acceleration: float
    noise: float
    position: float = 0.0
    speed: float = 0.0
    # The covariance of position and speed: its diagonal, and the number beside it.
    var_position: float = 1e4
    var_speed: float = 1e2
    covariance: float = 0.0

    def predict(self) -> None:
        """Move one step in time: F = [[1, 1], [0, 1]], and the acceleration's part of the
        covariance.
        """
        self.position += self.speed
        self.var_position += 2 * self.covariance + self.var_speed + self.acceleration**2 / 4
        self.covariance += self.var_speed + self.acceleration**2 / 2
        self.var_speed += self.acceleration**2

    def update(self, measured: float) -> None:
        """Take in a measured position."""
        total = self.var_position + self.noise**2
        gain = self.var_position / total
        speed_gain = self.covariance / total
        error = measured - self.position
        self.position += gain * error
        self.speed += speed_gain * error
        self.var_speed -= speed_gain * self.covariance
        self.covariance *= 1 - gain
        self.var_position *= 1 - gain

    def forecast(self, steps: int) -> list[tuple[float, float]]:
        """Return mean and standard deviation of the positions measured in the next steps."""
        copied = JointFilter(**vars(self))
        results = []
        for _ in range(steps):
            copied.predict()
            results.append((copied.position, math.sqrt(copied.var_position + self.noise**2)))
        return results


class KalmanActions(Drafter):
    """Forecasts each joint's next bins from the actions in the text. In trees the bins beside a
    forecast are drafted too, by their chance under the forecast's normal distribution.

    Actions are tokens `codes`N> in the order of the joints, in prompt and answer; other tokens are
    skipped.
    """

    capabilities = Capabilities(is_copier=True)

    def __init__(
        self,
        target: Target,
        # Number of joints, whose bins follow each other in every action.
        joints: Count = 7,
        # Beginning of the text of every bin's token, before its number.
        codes: str = "<c",
        # Standard deviation of a joint's acceleration between two actions, in bins.
        acceleration: Positive = 2.0,
        # Standard deviation of the noise of a bin.
        noise: Positive = 0.7,
        # Number of bins on each side of a forecast that trees may draft too.
        spread: Count = 2,
    ) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, rewind=type(self).rewind)
        self.joints = joints
        self.acceleration = acceleration
        self.noise = noise
        self.spread = spread
        form = re.compile(re.escape(codes) + r"(\d+)\D*")
        matches = {
            token: form.fullmatch(text) for text, token in target.tokenizer.get_vocab().items()
        }
        self.bins = {token: int(match[1]) for token, match in matches.items() if match}
        self.tokens = {bin: token for token, bin in self.bins.items()}
        if not self.tokens and codes != "<c":
            raise UserError(
                f"drafter.codes={codes}: the tokenizer has no token that begins so; name the "
                "bins' beginning"
            )
        self.filters: list[list[JointFilter]] = []
        # by text: tokens that were read, and actions' bins among them
        self.counts: list[tuple[int, int]] = []

    def draft(self, context: Context) -> Draft:
        """Read the new tokens of every text and forecast what follows."""
        texts = [
            row[: length + 1]
            for row, length in zip(context.tokens.tolist(), context.lengths.tolist())
        ]
        if context.begins or len(self.filters) != len(texts):
            self.filters = [
                [JointFilter(self.acceleration, self.noise) for _ in range(self.joints)]
                for _ in texts
            ]
            self.counts = [(0, 0) for _ in texts]
        for row, text in enumerate(texts):
            self._read_tokens(row, text)
        return Draft(
            continuations=[self.make_trie(row, context.builder.depth) for row in range(len(texts))]
        )

    def _read_tokens(self, row: int, text: Sequence[int]) -> None:
        """Update the filters of a text by its new tokens."""
        start, count = self.counts[row]
        for token in text[start:]:
            if token in self.bins:
                joint = self.filters[row][count % self.joints]
                joint.predict()
                joint.update(self.bins[token])
                count += 1
        self.counts[row] = (len(text), count)

    def make_trie(self, row: int, depth: int) -> Trie:
        """Return the forecast of the next `depth` tokens as a path, with the bins beside each as
        further children.
        """
        trie = Trie()
        path = list[int]()
        chance = 1.0
        count = self.counts[row][1]
        if count < self.joints or not self.tokens:
            return trie
        horizon = 1 + (depth - 1) // self.joints
        forecasts = [joint.forecast(horizon) for joint in self.filters[row]]
        for step in range(depth):
            mean, deviation = forecasts[(count + step) % self.joints][step // self.joints]
            center = min(max(self.tokens), max(min(self.tokens), round(mean)))
            options = range(center - self.spread, center + self.spread + 1)
            chances = {
                bin: bin_chance(bin, mean, deviation) for bin in options if bin in self.tokens
            }
            for bin, own_chance in chances.items():
                if bin != center:
                    trie.add_continuation([*path, self.tokens[bin]], chance * own_chance)
            path.append(self.tokens[center])
            chance *= chances[center]
            trie.add_continuation(path, chance)
        return trie

    def rewind(self, lengths: Tensor) -> None:
        """Forget the texts; the next round reads them anew."""
        self.filters = []


def bin_chance(bin: int, mean: float, deviation: float) -> float:
    """Return the chance of a bin, one wide, under a normal distribution."""
    scale = deviation * math.sqrt(2)
    return (math.erf((bin + 0.5 - mean) / scale) - math.erf((bin - 0.5 - mean) / scale)) / 2
