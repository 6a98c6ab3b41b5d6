"""What an engine is started for, and the command that starts it. An engine's own file turns one
into the other.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LOOKUP = "ngram"
"""Method of an engine's own drafter that copies what followed the last tokens earlier in the
text. It has no files.
"""


@dataclass(frozen=True)
class DrafterLaunch:
    """The drafter that an engine is started with, in the engine's own terms."""

    # The engine's name of the drafting method, as in eagle3.
    method: str
    # Folder of the drafter; None if the target contains it, or for LOOKUP.
    path: str | None
    # Tokens that a round drafts.
    num_tokens: int
    # Whether one forward drafts all tokens.
    is_parallel: bool = False
    # What else the engine has to be told about it, in its own terms.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineLaunch:
    """What an engine is started for."""

    # Folder or name of the target, the name that it is served by, and its weight type.
    target: str
    served_name: str | None = None
    dtype: str = "auto"
    drafter: DrafterLaunch | None = None
    # Layers whose states are captured, in ascending order; None starts no capture.
    capture_layers: tuple[int, ...] | None = None
    # Share of rounds that accept the draft tokens up to each position: acceptance is simulated.
    # None verifies drafts.
    acceptance_rates: tuple[float, ...] | None = None
    # Whether the weights of other drafters can be loaded into the running engine, where it needs
    # options for that.
    takes_drafters: bool = False


@dataclass(frozen=True)
class EngineCommand:
    """The command that starts an engine, and what it adds to the environment."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def format_shell(self) -> str:
        """Return the command as a line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *map(shlex.quote, self.arguments)])


@dataclass(frozen=True)
class Engine:
    """An engine and its own command for a launch."""

    title: str
    make_command: Callable[[EngineLaunch], EngineCommand]
    # Format in which the target has to be exported for it; None for an engine that reads
    # transformers' files.
    target_format: str | None = None
    # Whether it can accept drafts at random, at given rates.
    simulates: bool = False
    # The versions from whose code its rows of `spectrain.export.engine_support` were taken.
    read_versions: tuple[str, ...] = ()


def is_decreasing(rates: Sequence[float]) -> bool:
    """Tell whether these are rates from 0 to 1 of which none is above the one before it."""
    return bool(rates) and all(
        0 <= later <= earlier for earlier, later in zip([1.0, *rates], rates)
    )


def round_rates(rates: Sequence[float]) -> list[float]:
    """Return rates with three digits, none above the one before it, as engines require."""
    rounded: list[float] = []
    for rate in rates:
        rounded.append(round(min(max(rate, 0.0), *rounded[-1:], 1.0), 3))
    return rounded


def to_options(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as command-line options, as in {"--port": 8000}; those that are None are left
    out, and True stands for an option without a value."""
    words: list[str] = []
    for name, value in settings.items():
        if value is not None:
            words += [name] if value is True else [name, str(value)]
    return words
