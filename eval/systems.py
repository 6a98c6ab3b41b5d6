"""What is decoded side by side: a drafter with a tree and a rule, and how one decodes."""

from dataclasses import dataclass

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.generation import Generation, OnRound, interleave, no_callback
from spectrain.decoding.guard import Guard
from spectrain.decoding.pruning import Pruning
from spectrain.decoding.session import EngineChoice, RunnerSource, Session, make_fallback
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
    runner_source: RunnerSource | None = None  # decodes by another runner than the eager loop


class Decoder:
    """Decodes with systems, each in a session of its own that is kept, or autoregressively."""

    def __init__(self, target: Target, rule: AcceptanceRule, choice: EngineChoice = "eager") -> None:
        self.target, self.rule, self.choice = target, rule, choice  # the rule of autoregressive decoding
        self.sessions: dict[str, Session] = {}
        self.fallback = make_fallback(target, choice)  # one for all: what is compared is compiled and captured alike, or not

    def __call__(
        self, system: System | None, prompts: list[list[int]], limit: int, sequence_ids: list[int], watch: OnRound = no_callback
    ) -> list[Generation]:
        """Decode prompts with a system, or autoregressively; `sequence_ids` key their random draws."""
        session = self.session(system)
        session.warm_up(prompts, limit, sequence_ids)
        return session.decode(prompts, limit, sequence_ids, on_round=watch)

    def in_turn(
        self, system: System, prompts: list[list[int]], limit: int, sequence_ids: list[int]
    ) -> tuple[list[Generation], list[Generation]]:
        """Decode autoregressively and with a system, round by round in turn; one after the other where a worker would draft on
        while it is the other's turn."""
        if system.runner_source is not None:
            return self(None, prompts, limit, sequence_ids), self(system, prompts, limit, sequence_ids)
        sessions = self.session(None), self.session(system)
        for session in sessions:
            session.warm_up(prompts, limit, sequence_ids)
        plain, drafted = interleave([session.decode_steps(prompts, limit, sequence_ids) for session in sessions])
        return plain, drafted

    def session(self, system: System | None) -> Session:
        """How a system is decoded."""
        if system is None:
            parts = Session(self.target, self.rule, engine=self.choice, fallback=self.fallback)
        else:
            how = system.rule, system.drafter, system.builder, system.guard, system.pruning
            parts = Session(self.target, *how, engine=self.choice, runner_source=system.runner_source, fallback=self.fallback)
        return self.sessions.setdefault("" if system is None else f"{system.name} {system.builder.name}", parts)

    @property
    def wants_capture(self) -> bool:
        return self.session(None).prefers_capture

    def why_eager(self, system: System | None) -> str | None:
        """Why a system's rounds are run one by one; None where they are captured."""
        return self.session(system).eager_reason


def describe(builder: TreeBuilder) -> str:
    """A builder in a few words."""
    drawn = "" if builder.children == "deterministic" else ", drawn"
    most = "up to " if builder.uses_latency else ""
    chain = f"{builder.name}, chain of up to {builder.depth}" if builder.uses_latency else f"chain of {builder.depth}"
    shape = chain if builder.is_chain else f"{builder.name}, {most}{builder.budget} nodes"
    return shape + drawn
