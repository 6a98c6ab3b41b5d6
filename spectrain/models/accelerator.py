"""What an installed package does in place of the core, for speed: it computes what a target's or a
drafter's modules compute, and chooses numbers of threads.

The core asks an `Accelerator` for it, whose defaults leave the work to torch. A package brings its
own by an entry point in the group spectrain.accelerator. Single operations are asked for in
`kernels.dispatch`. Shapes: B batch, N nodes, D width, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spectrain.config.installed import load_entry_points

from .forward_override import Forward
from .threads import ThreadTuner


class DrafterSteps(Protocol):
    """Steps of drafting that a package computes in place of an EAGLE drafter's modules."""

    def run(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: Any, visible: Tensor | None
    ) -> Tensor:
        """Compute `EagleDrafter.run`: [B, N, D]."""

    def log_q(self, hidden: Tensor) -> Tensor:
        """Compute `EagleDrafter.log_q`: [B, N, V]."""

    def start_rollout(self, cache: Any, root: Tensor, capacity: int) -> Any | None:
        """Return a rollout from the root's state [1, 1, D], with room for `capacity` nodes below
        it; None where the drafter's own is to run.
        """

    def warm_up(self) -> None:
        """Run what is compiled once, so that no step that is timed compiles it."""


class Accelerator:
    """Computes what the core computes, where a package can do it faster."""

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Load or compile what serves models of this type, so that no step that is timed does."""

    def prepare_copying(self) -> None:
        """Load or compile what serves drafts that are copied from texts."""

    def reads_keys(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether attention over a cache reads keys of this type as they are, and sums
        without rounding in it.
        """
        return False

    def forwards(
        self,
        decoder: nn.Module,
        layers: nn.ModuleList,
        attend: Any,
        tokens: Tensor | None,
        arguments: dict[str, Any],
    ) -> Iterable[tuple[nn.Module, Forward]]:
        """Return modules of a decoder with forwards to run in their place, for tokens [B, N] with
        these arguments of the attention function `attend`. Without `tokens` not all layers run, or
        on other inputs.
        """
        return ()

    def runs_texts_alone(self, target: Any) -> bool:
        """Return whether texts of different lengths run without padding, each with the bits that it
        has alone.
        """
        return False

    def prefill_each(
        self, target: Any, tokens: Tensor, lengths: Tensor, cache: Any, layers: tuple[Any, ...]
    ) -> Any | None:
        """Compute `Target.prefill` of several prompts with the bits that each has alone; None where
        the target's own is to run.
        """
        return None

    def write_answers(
        self, writer: Any, shards: Iterable[Any], on_outcome: Callable[[Any, Any], None]
    ) -> bool:
        """Do what `EngineWriter.write_answers` does for a writer of regenerated answers; return
        whether this was done.
        """
        return False

    def make_tuner(self, device: torch.device, trial_steps: int) -> ThreadTuner | None:
        """Make what chooses the number of threads of one kind of step, each number by the times of
        so many steps; None where torch's own number stays.
        """
        return None

    def drafter_steps(self, drafter: Any) -> DrafterSteps | None:
        """Return the steps of an EAGLE drafter as it is now; None where its own modules run."""
        return None


_accelerators: list[Accelerator] = []
"""What `accelerator` has found. torch.compile reads through functools.cache, into the list of
installed packages, which it cannot compile.
"""


def accelerator() -> Accelerator:
    """Return the accelerator of the first installed package that has one, or the default."""
    if not _accelerators:
        _accelerators.extend(make() for make in load_entry_points("accelerator"))
        _accelerators.append(Accelerator())
    return _accelerators[0]
