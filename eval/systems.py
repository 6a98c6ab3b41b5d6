"""What is decoded side by side: a drafter with a tree and a rule, and how one decodes."""

from dataclasses import dataclass
from typing import Literal

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.captured import Engine, why_not
from spectrain.decoding.guard import Guard
from spectrain.decoding.loop import Generation, Watch, decode, unwatched
from spectrain.decoding.pruning import Pruning
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.trees import TreeBuilder


@dataclass(frozen=True)
class System:
    """A drafter with a tree and a rule: one row of the table."""

    name: str
    label: str
    drafter: Drafter
    builder: TreeBuilder
    rule: AcceptanceRule
    guard: Guard | None = None
    pruning: Pruning | None = None


Choice = Literal["auto", "captured", "eager"]
"""auto: captured where there is a GPU; captured: also without one, where it is slower and gives the same."""


class Decoder:
    """How systems decode: by the engine, which asks the device nothing, where it is wanted and can be; else by the loop."""

    def __init__(self, target: Target, rule: AcceptanceRule, choice: Choice = "eager") -> None:
        self.target, self.rule = target, rule  # the rule of autoregressive decoding
        self.wanted = choice == "captured" or (choice == "auto" and target.device.type == "cuda")
        self.engines: dict[str, Engine] = {}

    def __call__(
        self, system: System | None, prompts: list[list[int]], limit: int, rows: list[int], watch: Watch = unwatched
    ) -> list[Generation]:
        """Decode prompts with a system, or autoregressively; `rows` key their random draws."""
        if self.why_eager(system) is None:
            name = "" if system is None else system.name
            if name not in self.engines:
                parts = (self.rule,) if system is None else (system.rule, system.drafter, system.builder)
                self.engines[name] = Engine(self.target, *parts)
            engine = self.engines[name]
            if not engine.is_ready(prompts, limit):  # compile and capture outside of what is measured
                engine.decode(prompts, limit, rows, ignore_eos=True)
            return engine.decode(prompts, limit, rows, watch=watch)
        if system is None:
            return decode(self.target, prompts, self.rule, limit, rows=rows, watch=watch)
        how = (system.rule, limit, system.drafter, system.builder, rows, system.guard)
        return decode(self.target, prompts, *how, pruning=system.pruning, watch=watch)

    def why_eager(self, system: System | None) -> str | None:
        """Why a system is decoded by the loop; None where it is not."""
        if not self.wanted:
            return "not asked for"
        if system is None:
            return why_not(self.target, self.rule, None, None)
        if system.guard is not None or system.pruning is not None:
            return f"eval.{'guard' if system.guard is not None else 'prune_layer'} decides on the host"
        return why_not(self.target, system.rule, system.drafter, system.builder)


def describe(builder: TreeBuilder) -> str:
    """A builder in a few words."""
    drawn = "" if builder.children == "deterministic" else ", drawn"
    shape = f"chain of {builder.depth}" if builder.is_chain else f"{builder.name}, {builder.budget} nodes"
    return shape + drawn
