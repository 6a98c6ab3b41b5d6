"""What speculative decoding can gain, from the times of its parts and from the machine's limits.

With an autoregressive step as the unit of time, c a draft step, v the verification of N nodes and h all else of a round,
gamma draft steps that emit tau tokens are S = tau / (c gamma + v + h) times as fast. At the roofline, parts take as long as
moving their weights and keys, or as their products, whichever is longer, and h is nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from .models import ModelGeometry
from .rounds import RoundSample

AR = "autoregressive"
BYTES_PER_VALUE = 2  # a weight's, or a key's entry, in bfloat16
ENGINE_TITLE = "engine, 8B geometry, B=1 prefix=1024"
RowsByName = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of each part of a round, measured apart, and of an autoregressive step."""

    autoregressive: float
    draft: float
    verify: float
    accept: float
    outside: float  # what the host adds to a round, as measured around autoregressive ones
    steps: int  # gamma

    @property
    def c(self) -> float:
        return self.draft / self.steps / self.autoregressive

    @property
    def v(self) -> float:
        return self.verify / self.autoregressive

    @property
    def h(self) -> float:
        return (self.accept + self.outside) / self.autoregressive

    def predict_speedup(self, tau: float) -> float:
        return tau / (self.c * self.steps + self.v + self.h)


@dataclass(frozen=True)
class Roofline:
    """The least seconds for a model's work on a machine."""

    model: ModelGeometry
    bytes_per_second: float
    flops_per_second: float

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of a layer."""
        m = self.model
        return 2 * m.width * (m.heads + m.kv_heads) * m.head_size + 3 * m.width * m.inner

    @property
    def drafter_layer_parameters(self) -> int:
        """The same of an EAGLE-3 layer, whose queries, keys and values read twice the width."""
        return self.layer_parameters + self.model.width * (self.model.heads + 2 * self.model.kv_heads) * self.model.head_size

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return 2 * BYTES_PER_VALUE * self.model.kv_heads * self.model.head_size

    def verify_seconds(self, batch: int, prefix: int, nodes: int) -> float:
        """A forward of the target over so many nodes a row; of one node, an autoregressive step."""
        m = self.model
        weights = m.layers * self.layer_parameters + m.vocab * m.width
        moved = BYTES_PER_VALUE * weights + batch * (prefix + nodes) * self.slot_bytes * m.layers
        attention = 4 * (prefix + nodes) * m.heads * m.head_size * m.layers
        return max(moved / self.bytes_per_second, batch * nodes * (2 * weights + attention) / self.flops_per_second)

    def draft_seconds(self, batch: int, prefix: int, steps: int) -> float:
        """The steps of an EAGLE-3 drafter, of which the first reads three layers of the target."""
        m = self.model
        weights = 3 * m.width**2 + steps * (self.drafter_layer_parameters + m.draft_vocab * m.width)
        return (BYTES_PER_VALUE * weights + steps * batch * prefix * self.slot_bytes) / self.bytes_per_second

    def max_efficiency(self, batch: int, prefix: int, nodes: int, steps: int) -> float:
        """Speedup over tau that nothing can beat."""
        round_ = self.draft_seconds(batch, prefix, steps) + self.verify_seconds(batch, prefix, nodes)
        return self.verify_seconds(batch, prefix, 1) / round_


def compute_gains(samples: dict[str, list[RoundSample]], parts: RoundCosts, names: list[str], best: float) -> dict[str, Any]:
    """Speedups, measured in pairs and by the model of the parts; eta = S / tau, and its share of the roofline's."""
    row: dict[str, Any] = {"c": parts.c, "v": parts.v, "h": parts.h, "gamma": parts.steps, "eta_roofline": best}
    row["speedup"] = {}
    for name in names:
        pairs = zip(samples[AR], samples[name])
        measured = median(b.tau * a.seconds / b.seconds for a, b in pairs)
        row["speedup"][name] = {"measured": measured, "model": parts.predict_speedup(median(one.tau for one in samples[name]))}
    row["eta"] = {name: row["speedup"][name]["measured"] / median(one.tau for one in samples[name]) for name in names}
    row["share_of_roofline"] = {name: eta / best for name, eta in row["eta"].items()}
    return row


def parts_us(samples: list[RoundSample]) -> dict[str, float]:
    """The median of each part of a round, in microseconds."""
    return {part: median(one.parts[part] for one in samples) * 1e6 for part in samples[0].parts}


def verify_ratio(steps: list[RoundSample], trees: list[RoundSample]) -> float:
    """Verification over an autoregressive step, the median of pairs."""
    return median(tree.parts["verify"] / step.seconds for step, tree in zip(steps, trees))


def engine_goal_values(rows: RowsByName, required: Iterable[str]) -> dict[str, float]:
    """What the rows say about the engine's goals, by the goals' names. Those over all of the rows `wanted` need them all."""
    measured = {name: row for name, row in rows.items() if "failed" not in row}
    found: dict[str, float] = {}
    verify = measured.get("engine/B=1 prefix=1024/verify")
    if verify is not None:
        found[f"{ENGINE_TITLE}: autoregressive decoding, share of the bandwidth floor"] = verify["share_of_floor"]
        found[f"{ENGINE_TITLE}: autoregressive decoding"] = verify["tokens_per_second"]["autoregressive"]
        if "N=64" in verify["v"]:
            found[f"{ENGINE_TITLE}: verifying 64 nodes over one autoregressive step"] = verify["v"]["N=64"]
    names = list(required)
    drafted = [row for name, row in measured.items() if "speedup" in row]
    if names and set(names) <= set(measured):
        away = [abs(pair["measured"] / pair["model"] - 1) for row in drafted for pair in row["speedup"].values()]
        shares = [share for row in drafted for share in row["share_of_roofline"].values()]
        found["engine: measured speedup away from the model of its parts"] = max(away)
        found["engine: speedup over acceptance length, as a share of the roofline's"] = min(shares)
        waits = [row["host_synchronisations"] for row in measured.values() if "host_synchronisations" in row]
        if None not in waits:
            found["engine: host synchronisations a round"] = max(waits)
    answers = [row["differing"] for name, row in measured.items() if name.startswith("identity/")]
    if answers:
        found["engine, float32: answers that differ from the eager loop's"] = sum(answers)
    return found | training_goal_values(measured)


def training_goal_values(measured: RowsByName) -> dict[str, float]:
    """Of the drafter's training step."""
    row = next((row for name, row in measured.items() if name.startswith("training/")), None)
    if row is None:
        return {}
    title = "training, EAGLE-3 at 8B geometry, loss and gradients"
    found = {
        f"{title}: share of the measured product rate": row["share_of_product_rate"],
        f"{title}: tokens a second": row["tokens_per_second"]["drafter"],
        f"{title}: time over unfused": row["time_ratio"],
    }
    return found if row["memory_ratio"] is None else {**found, f"{title}: peak memory over unfused": row["memory_ratio"]}
