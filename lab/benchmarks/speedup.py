"""What speculative decoding can gain, from the times of its parts and from the machine's limits.

With an autoregressive step as the unit of time, c a draft step, v the verification of N nodes and h
the rest of a round, gamma draft steps that emit tau tokens are S = tau / (c gamma + v + h) times as
fast. At the roofline, a part takes as long as moving its weights and keys or as computing its
products, whichever is longer, and h is 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from .models import ModelGeometry
from .rounds import RoundSample

AR = "autoregressive"
BYTES_PER_VALUE = 2
"""Bytes of a weight or of a cache entry, in bfloat16."""
ENGINE_TITLE = "engine, 8B geometry, B=1 prefix=1024"
RowsByName = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of each part of a round, measured separately, and of an autoregressive step."""

    autoregressive: float
    draft: float
    verify: float
    accept: float
    outside: float  # the host's share, as measured in autoregressive rounds
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
        """The number of matrix parameters of a layer."""
        m = self.model
        return 2 * m.width * (m.heads + m.kv_heads) * m.head_size + 3 * m.width * m.inner

    @property
    def drafter_layer_parameters(self) -> int:
        """The same for an EAGLE-3 layer, whose queries, keys and values read twice the width."""
        return (
            self.layer_parameters
            + self.model.width * (self.model.heads + 2 * self.model.kv_heads) * self.model.head_size
        )

    @property
    def slot_bytes(self) -> int:
        """The bytes of a token's keys and values in one layer."""
        return 2 * BYTES_PER_VALUE * self.model.kv_heads * self.model.head_size

    def verify_seconds(self, batch: int, prefix: int, nodes: int) -> float:
        """Return the seconds of a target forward over `nodes` nodes a row; one node is an
        autoregressive step.
        """
        m = self.model
        weights = m.layers * self.layer_parameters + m.vocab * m.width
        moved = BYTES_PER_VALUE * weights + batch * (prefix + nodes) * self.slot_bytes * m.layers
        attention = 4 * (prefix + nodes) * m.heads * m.head_size * m.layers
        return max(
            moved / self.bytes_per_second,
            batch * nodes * (2 * weights + attention) / self.flops_per_second,
        )

    def draft_seconds(self, batch: int, prefix: int, steps: int) -> float:
        """Return the seconds of an EAGLE-3 drafter's steps; the first reads three layers of the
        target.
        """
        m = self.model
        weights = 3 * m.width**2 + steps * (self.drafter_layer_parameters + m.draft_vocab * m.width)
        return (
            BYTES_PER_VALUE * weights + steps * batch * prefix * self.slot_bytes
        ) / self.bytes_per_second

    def max_efficiency(self, batch: int, prefix: int, nodes: int, steps: int) -> float:
        """Return the upper limit of speedup over tau."""
        round_seconds = self.draft_seconds(batch, prefix, steps) + self.verify_seconds(
            batch, prefix, nodes
        )
        return self.verify_seconds(batch, prefix, 1) / round_seconds


def compute_gains(
    samples: dict[str, list[RoundSample]], parts: RoundCosts, names: list[str], best: float
) -> dict[str, Any]:
    """Return speedups, measured in pairs and by the cost model; eta = S / tau, and its share of
    the roofline's.
    """
    row: dict[str, Any] = {
        "c": parts.c,
        "v": parts.v,
        "h": parts.h,
        "gamma": parts.steps,
        "eta_roofline": best,
    }
    row["speedup"] = {}
    for name in names:
        pairs = zip(samples[AR], samples[name])
        measured = median(b.tau * a.seconds / b.seconds for a, b in pairs)
        row["speedup"][name] = {
            "measured": measured,
            "model": parts.predict_speedup(median(sample.tau for sample in samples[name])),
        }
    row["eta"] = {
        name: row["speedup"][name]["measured"] / median(sample.tau for sample in samples[name])
        for name in names
    }
    row["share_of_roofline"] = {name: eta / best for name, eta in row["eta"].items()}
    return row


def parts_us(samples: list[RoundSample]) -> dict[str, float]:
    """Return the median of each part of a round in microseconds."""
    return {
        part: median(sample.parts[part] for sample in samples) * 1e6 for part in samples[0].parts
    }


def verify_ratio(steps: list[RoundSample], trees: list[RoundSample]) -> float:
    """Return verification over an autoregressive step, as the median of pairs."""
    return median(tree.parts["verify"] / step.seconds for step, tree in zip(steps, trees))


def engine_goal_values(rows: RowsByName, required: Iterable[str]) -> dict[str, float]:
    """Return what the rows show about the engine's goals, by name. Goals over all `required`
    rows need all of them.
    """
    measured = {name: row for name, row in rows.items() if "failed" not in row}
    values: dict[str, float] = {}
    verify = measured.get("engine/B=1 prefix=1024/verify")
    if verify is not None:
        values[f"{ENGINE_TITLE}: autoregressive decoding, share of the bandwidth floor"] = verify[
            "share_of_floor"
        ]
        values[f"{ENGINE_TITLE}: autoregressive decoding"] = verify["tokens_per_second"][
            "autoregressive"
        ]
        if "N=64" in verify["v"]:
            values[f"{ENGINE_TITLE}: verifying 64 nodes over one autoregressive step"] = verify[
                "v"
            ]["N=64"]
    names = list(required)
    drafted = [row for name, row in measured.items() if "speedup" in row]
    if names and set(names) <= set(measured):
        deviations = [
            abs(pair["measured"] / pair["model"] - 1)
            for row in drafted
            for pair in row["speedup"].values()
        ]
        shares = [share for row in drafted for share in row["share_of_roofline"].values()]
        values["engine: measured speedup away from the model of its parts"] = max(deviations)
        values["engine: speedup over acceptance length, as a share of the roofline's"] = min(shares)
        waits = [
            row["host_synchronisations"]
            for row in measured.values()
            if "host_synchronisations" in row
        ]
        if None not in waits:
            values["engine: host synchronisations a round"] = max(waits)
    answers = [row["differing"] for name, row in measured.items() if name.startswith("identity/")]
    if answers:
        values["engine, float32: answers that differ from the eager loop's"] = sum(answers)
    return values | training_goal_values(measured)


def training_goal_values(measured: RowsByName) -> dict[str, float]:
    """Return what the rows show about the goals of the drafter's training step."""
    row = next((row for name, row in measured.items() if name.startswith("training/")), None)
    if row is None:
        return {}
    title = "training, EAGLE-3 at 8B geometry, loss and gradients"
    values = {
        f"{title}: share of the measured product rate": row["share_of_product_rate"],
        f"{title}: tokens a second": row["tokens_per_second"]["drafter"],
        f"{title}: time over unfused": row["time_ratio"],
    }
    return (
        values
        if row["memory_ratio"] is None
        else {**values, f"{title}: peak memory over unfused": row["memory_ratio"]}
    )
