"""The numbers of one system, typed as summary.json holds them; metrics.py defines how each is
computed.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from spectrain.eval.intervals import Interval
from spectrain.eval.kinds import RoundNumbers


@dataclass(frozen=True)
class AcceptanceLength:
    """Tokens per forward pass of the target."""

    pooled: float
    ci95: Interval
    without_bonus: float
    per_prompt_mean: float
    # The same by other projects' definitions.
    by_convention: dict[str, float | None]


@dataclass(frozen=True)
class Rates:
    """Tokens per second without and with the drafter."""

    autoregressive: float
    drafted: float


@dataclass(frozen=True)
class TokensPerSecond(Rates):
    """Tokens per second of all rows together, and of a single row."""

    per_user: Rates


@dataclass(frozen=True)
class Speedup:
    """Drafted over autoregressive tokens per second."""

    ratio: float
    ci95: Interval
    # None where the parts of a round were not timed.
    predicted: float | None
    # Relative difference between the measured and the predicted ratio.
    unexplained: float | None


@dataclass(frozen=True)
class JudgedSpeedup(Speedup):
    """A speedup, the largest possible one, and whether it can be quoted."""

    at_most: float
    quotable: bool
    # Why it cannot be quoted; None where it can.
    reason: str | None


@dataclass(frozen=True)
class CategoryNumbers:
    """The numbers of one category of prompts."""

    acceptance_length: float
    speedup: float
    prompts: int
    # 95 % intervals of the two over prompts.
    ci95: Interval
    speedup_ci95: Interval


OPTIONAL = {"optional": True}  # marks a field that is absent from summary.json while it is None


@dataclass(kw_only=True)
class SystemNumbers:
    """What decoding measured of one system: the keys of its entry in summary.json, in their
    order.
    """

    acceptance_length: AcceptanceLength
    acceptance_by_depth: list[float]
    tokens_by_round: list[int]
    # Rounds that drafted at least one token, and all rounds.
    drafted_rounds: int
    rounds: int
    nodes_per_round: float
    drafting_nodes_per_round: float
    tokens_per_second: TokensPerSecond
    speedup: Speedup
    # Share of the drafted decoding time that each part of a round took.
    time_share: dict[str, float]
    by_category: dict[str, CategoryNumbers]
    # Rounds by the kind of their first token, and by its position in the answer and in the text;
    # what does not occur is left out.
    by_kind: dict[str, RoundNumbers]
    by_position: dict[str, RoundNumbers]
    by_text_position: dict[str, RoundNumbers]

    def to_json(self) -> dict[str, Any]:
        """Return the entry of summary.json."""
        absent = {
            item.name
            for item in fields(self)
            if item.metadata.get("optional") and getattr(self, item.name) is None
        }
        return {name: value for name, value in asdict(self).items() if name not in absent}


@dataclass(kw_only=True)
class SystemSummary(SystemNumbers):
    """The numbers of one system, and how it decoded."""

    label: str
    # The tree's settings.
    tree: dict[str, Any]
    # "captured" or "eager".
    engine: str
    # Why the rounds were not captured although they were asked to be.
    eager_because: str | None = field(default=None, metadata=OPTIONAL)
    # Engines that failed on this machine, and why.
    not_run: dict[Any, str] | None = field(default=None, metadata=OPTIONAL)
    pruning: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    # How steady times were; of the drafter alone.
    noise: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    guard: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    # The times that a reader of the answers sees, without the drafter and with it, and the bound
    # that they are compared with.
    user_times: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    # Joules of a token without the drafter and with it, prefill included, where the device counts
    # them.
    joules_per_token: dict[str, float] | None = field(default=None, metadata=OPTIONAL)
    # Price of a million tokens without the drafter and with it, by eval.price_per_hour.
    price_per_million: dict[str, float | None] | None = field(default=None, metadata=OPTIONAL)
    # Whether outputs equal their reference; None where that was not checked.
    lossless: dict[str, Any] | None = None
