"""What is decoded side by side: a drafter with a tree and a rule, and how one decodes."""

from dataclasses import dataclass

from spectrain.acceptance import AcceptanceRule
from spectrain.decode import Generation, decode
from spectrain.drafters.base import Drafter
from spectrain.guard import Guard
from spectrain.pruning import Pruning
from spectrain.shapes import TreeBuilder
from spectrain.target import Target


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


def run(
    target: Target, system: System | None, rule: AcceptanceRule, prompts: list[list[int]], limit: int, rows: list[int]
) -> list[Generation]:
    """Decode prompts with a system, or autoregressively by `rule`; `rows` key their random draws."""
    if system is None:
        return decode(target, prompts, rule, limit, rows=rows)
    return decode(
        target, prompts, system.rule, limit, system.drafter, system.builder, rows, system.guard, pruning=system.pruning
    )


def describe(builder: TreeBuilder) -> str:
    """A builder in a few words."""
    drawn = "" if builder.children == "deterministic" else ", drawn"
    shape = f"chain of {builder.depth}" if builder.is_chain else f"{builder.name}, {builder.budget} nodes"
    return shape + drawn
