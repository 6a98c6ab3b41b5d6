"""What forwards of several rows take in an engine on this machine, and what acceptance a drafter
therefore needs there.

A round with k drafted tokens is one forward of k + 1 rows, t(k + 1) seconds. With m tokens per
round, decoding is m * t(1) / (t(k + 1) + d) times as fast as without a drafter, where the drafter
takes d seconds (Leviathan et al., 2023, theorem 3.8, with measured times). If each token after
accepted ones is accepted at the rate a, m = 1 + a + .. + a^k.

`spectrain bench engine` writes a measurement into spectrain's cache; plans, comparisons and model
cards read it from there.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from scipy.optimize import brentq

from spectrain.config.plain_files import read_json_object
from spectrain.errors import UserError
from spectrain.files import write_text
from spectrain.models.published import cache_directory
from spectrain.models.threads import format_threads
from spectrain.provenance import processor_name
from spectrain.servers.engines import ENGINES

FOLDER = "engine-times"
# Speedups for which the required acceptance is printed: break even, and a gain that is felt.
SPEEDUPS = (1.0, 1.3)


@dataclass(frozen=True)
class Spread:
    """A median of measured seconds, the quartiles around it, and how many were measured."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class RowTime:
    """The seconds of a forward of some rows after a text of some tokens."""

    length: int
    rows: int
    seconds: Spread


@dataclass(frozen=True)
class RoundTime:
    """The seconds of a round of a real drafter, its drafting included, after a text of some
    tokens.
    """

    length: int
    num_drafts: int
    seconds: Spread


@dataclass(frozen=True)
class DrafterTimes:
    """The rounds of a drafter in the engine."""

    run: str
    rounds: tuple[RoundTime, ...]
    # Share of its chain's rounds that accept all draft tokens up to each position; () if it was not
    # scored.
    acceptance_rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class EngineTimes:
    """A measurement, and all that it depends on."""

    # The engine's name in conf/server, and its version.
    engine: str
    version: str | None
    # The target's name, and the weight type in which the engine computed.
    target: str
    dtype: str
    # Threads of the engine; None leaves their number to it.
    threads: int | None
    # Processor of this machine.
    processor: str
    # Settings of the server that were given.
    settings: dict[str, Any]
    forwards: tuple[RowTime, ...]
    drafter: DrafterTimes | None = None
    # Commit, versions, command and date.
    provenance: dict[str, Any] | None = None

    @property
    def lengths(self) -> list[int]:
        """Return the lengths of the texts after which forwards of one row were timed, in
        ascending order.
        """
        return sorted(forward.length for forward in self.forwards if forward.rows == 1)

    def ratios(self, length: int) -> dict[int, float]:
        """Return, by the number of drafted tokens, the time of a round over that of a forward of
        one row.
        """
        medians = {
            forward.rows: forward.seconds.median
            for forward in self.forwards
            if forward.length == length
        }
        return {
            rows - 1: seconds / medians[1] for rows, seconds in sorted(medians.items()) if rows > 1
        }

    def round_ratios(self, length: int) -> dict[int, float]:
        """Return the same for the rounds of the drafter, its own time included; {} without one."""
        rounds = () if self.drafter is None else self.drafter.rounds
        one = next(
            forward.seconds.median
            for forward in self.forwards
            if (forward.length, forward.rows) == (length, 1)
        )
        return {
            each.num_drafts: each.seconds.median / one for each in rounds if each.length == length
        }

    def own_ratios(self, run: str) -> dict[int, float] | None:
        """Return the ratios of a run's own rounds after the shortest text; None if it is not the
        measured drafter.
        """
        is_measured = self.drafter is not None and self.drafter.run == run
        return self.round_ratios(self.lengths[0]) or None if is_measured else None

    @property
    def key(self) -> str:
        """Return what a newer measurement of the same replaces."""
        facts = (
            self.engine,
            self.version,
            self.target,
            self.dtype,
            self.threads,
            self.processor,
            sorted(self.settings.items()),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

    def describe_setting(self) -> str:
        """Return the engine's title and version, type and threads, as a sentence names them."""
        version = "" if self.version is None else f" {self.version.split(' ')[0]}"
        return (
            f"{ENGINES[self.engine].title}{version} ({self.dtype}, "
            f"{format_threads(self.threads)}, {self.processor})"
        )


CONTENT = TypeAdapter(EngineTimes)


# Equations


def required_rate(num_tokens: float, num_drafts: int) -> float | None:
    """Return the acceptance rate per drafted token with which rounds of `num_drafts` give so
    many tokens; None if none does.
    """
    if num_tokens > num_drafts + 1:
        return None
    return (
        0.0
        if num_tokens <= 1
        else float(brentq(lambda rate: expected_tokens(rate, num_drafts) - num_tokens, 0.0, 1.0))
    )


def expected_tokens(rate: float, num_drafts: int) -> float:
    """Return the tokens of a round, the bonus token included, if each token after accepted ones
    is accepted at this rate.
    """
    return sum(rate**position for position in range(num_drafts + 1))


def predict_speedups(ratios: dict[int, float], rates: Sequence[float]) -> dict[int, float]:
    """Return the speedup by the number of drafted tokens, from the share of rounds that accept
    all up to each position.
    """
    return {
        num_drafts: (1 + sum(rates[:num_drafts])) / ratio
        for num_drafts, ratio in ratios.items()
        if num_drafts <= len(rates)
    }


# Files


def save_times(times: EngineTimes, path: Path | None = None) -> Path:
    """Write a measurement to a file, or else into the cache; return the path."""
    folder = cache_directory() / FOLDER
    path = path or folder / f"{times.engine}-{Path(times.target).name}-{times.key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, CONTENT.dump_json(times, indent=1).decode() + "\n")
    return path


def load_times(path: Path) -> EngineTimes | None:
    """Read a measurement; if the file holds none, as one that another version of spectrain
    wrote, say so and return None.
    """
    try:
        return CONTENT.validate_python(read_json_object(path))
    except (UserError, ValidationError):
        print(
            f"{path}: it holds no measurement that this version reads, so it is left out; measure "
            "again with spectrain bench engine",
            file=sys.stderr,
        )
        return None


def find_times(target: str, engine: str | None = None, **facts: Any) -> list[EngineTimes]:
    """Return the measurements of a target in the cache that were made on this processor, for one
    engine or for all of them.

    Facts that are not None, such as the type or the number of threads, must agree.
    """
    paths = sorted(
        (cache_directory() / FOLDER).glob(f"{engine or '*'}-*.json"),
        key=lambda path: path.stat().st_mtime,
    )
    required = {
        name: value for name, value in {**facts, "engine": engine}.items() if value is not None
    }
    required |= {"target": target, "processor": processor_name()}
    return [
        times
        for times in map(load_times, paths)
        if times is not None and required.items() <= asdict(times).items()
    ]


# Sentences


def advise_engine(
    times: EngineTimes,
    rates: Sequence[float] | None = None,
    ratios: dict[int, float] | None = None,
    acceptance: str = "the measured acceptance of this drafter's chain",
) -> str:
    """Return a sentence or two on what drafting can gain in an engine.

    With acceptance rates, whose origin `acceptance` names, it says what these are worth there.
    `ratios` are those of the drafter's own rounds; without them its own time is not counted.
    """
    length = times.lengths[0]
    text = describe_requirements(times.describe_setting(), times.ratios(length))
    if not rates:
        return text
    speedups = predict_speedups(ratios or times.ratios(length), rates)
    if not speedups:
        return text
    best, speedup = max(speedups.items(), key=lambda item: item[1])
    how = (
        "is predicted to reach"
        if ratios
        else "reaches, without the time of the drafter's own forwards, at most"
    )
    return (
        f"{text} With {acceptance}, decoding {how} {speedup:.2f}x, with {best} drafted per round."
    )


def describe_requirements(engine: str, ratios: dict[int, float]) -> str:
    """Say which acceptance breaks even in an engine, and which gains 1.3x, at the best number of
    drafted tokens.
    """
    even, gain = (easiest_length(ratios, speedup) for speedup in SPEEDUPS)
    if even is None:
        return f"In {engine} no drafter pays for this target on this machine."
    text = (
        f"In {engine} a drafter breaks even from {even[1]:.0%} accepted per drafted token "
        f"({even[0]} drafted per round)"
    )
    if gain is None:
        return f"{text}, and none reaches {SPEEDUPS[1]:g}x."
    return (
        f"{text}, and reaches {SPEEDUPS[1]:g}x from {gain[1]:.0%} ({gain[0]} drafted), its "
        "own time not counted."
    )


def easiest_length(ratios: dict[int, float], speedup: float) -> tuple[int, float] | None:
    """Return the number of drafted tokens that needs the lowest acceptance rate for a speedup, and
    that rate; None if all are out of reach."""
    rates = {
        num_drafts: required_rate(speedup * ratio, num_drafts)
        for num_drafts, ratio in ratios.items()
    }
    reachable = [(rate, num_drafts) for num_drafts, rate in rates.items() if rate is not None]
    return None if not reachable else min(reachable)[::-1]


def advise_target(
    target: str, rates: Sequence[float] | None, run: str, engines: Iterable[str]
) -> list[str]:
    """Return the sentences of the measurements of a target in these engines on this processor;
    [] if there are none.
    """
    measured = [times for engine in engines for times in find_times(target, engine)]
    return [advise_engine(times, rates, times.own_ratios(run)) for times in measured]
