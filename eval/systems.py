"""The systems that an evaluation compares, and how each decodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.generation import Generation, OnRound, interleave, no_callback
from spectrain.decoding.session import (
    EngineChoice,
    RoundChange,
    Session,
    make_fallback,
)
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.models.threads import personal_variable
from spectrain.output.verbosity import shows_notes
from spectrain.trees import TreeBuilder


@dataclass(frozen=True)
class System:
    """A drafter with a tree and a rule: one row of the table."""

    name: str
    label: str
    drafter: Drafter
    builder: TreeBuilder
    rule: AcceptanceRule
    # What packages change about its rounds.
    changes: tuple[RoundChange, ...] = ()
    # A row of the table, with times; without them, only its tokens per forward count.
    is_timed: bool = True

    def find_change(self, part: str) -> RoundChange | None:
        """Return what changes a part of its rounds, as "plan", "tree" or "runner"; None where they
        are the eager loop's.
        """
        return next((change for change in self.changes if change.part == part), None)


class Decoder:
    """Decodes with systems, each in a session of its own that is reused, or autoregressively
    (system None).
    """

    def __init__(
        self, target: Target, rule: AcceptanceRule, choice: EngineChoice = "eager"
    ) -> None:
        # The rule is that of autoregressive decoding.
        self.target, self.rule, self.choice = target, rule, choice
        # By the names of the system and its builder; both are "" for autoregressive decoding.
        self.sessions: dict[tuple[str, str], Session] = {}
        # All systems share one fallback, so that all are compiled and captured alike, or none is.
        self.fallback = make_fallback(target, choice)

    def __call__(
        self,
        system: System | None,
        prompts: list[list[int]],
        limit: int,
        sequence_ids: list[int],
        watch: OnRound = no_callback,
    ) -> list[Generation]:
        """Decode prompts with a system, or autoregressively; `sequence_ids` key their random
        draws.
        """
        session = self.session(system)
        session.warm_up(prompts, limit, sequence_ids)
        return session.decode(prompts, limit, sequence_ids, on_round=watch)

    def decode_interleaved(
        self, system: System, prompts: list[list[int]], limit: int, sequence_ids: list[int]
    ) -> tuple[list[Generation], list[Generation]]:
        """Decode autoregressively and with a system, alternating round by round.

        They run one after the other if a worker would go on drafting during the other's rounds.
        """
        if system.find_change("runner") is not None:
            return self(None, prompts, limit, sequence_ids), self(
                system, prompts, limit, sequence_ids
            )
        sessions = self.session(None), self.session(system)
        for session in sessions:
            session.warm_up(prompts, limit, sequence_ids)
        plain, drafted = interleave(
            [session.decode_steps(prompts, limit, sequence_ids) for session in sessions]
        )
        return plain, drafted

    def choose_threads(self, systems: Sequence[System], prompt: list[int], limit: int) -> None:
        """Choose the number of threads of autoregressive steps and of each system's rounds, and
        print it in one line with --notes.
        """
        sessions = {
            "plain": self.session(None),
            **{system.name: self.session(system) for system in systems},
        }
        for session in sessions.values():
            session.choose_threads(prompt, limit)
        if not shows_notes():
            return
        choices = [
            f"{name} {session.threads.describe()}"
            for name, session in sessions.items()
            if session.threads is not None
        ]
        if choices:
            print(f"threads of a step, by measured times: {'; '.join(choices)}")
        elif (
            shows_notes()
            and self.target.device.type == "cpu"
            and (variable := personal_variable()) is not None
        ):
            print(f"threads: {torch.get_num_threads()}, as {variable} says")

    def thread_choices(self) -> dict[str, Any]:
        """Return the number of threads of autoregressive steps and of each system's rounds, with
        the measured times.
        """
        sessions = {name or "plain": session for (name, _), session in self.sessions.items()}
        return {
            name: session.threads.summary()
            for name, session in sessions.items()
            if session.threads is not None
        }

    def session(self, system: System | None) -> Session:
        """Return the session of a system."""
        key = ("", "") if system is None else (system.name, system.builder.name)
        if key not in self.sessions:
            self.sessions[key] = self._open_session(system)
        return self.sessions[key]

    def _open_session(self, system: System | None) -> Session:
        if system is None:
            return Session(self.target, self.rule, engine=self.choice, fallback=self.fallback)
        return Session(
            self.target,
            system.rule,
            system.drafter,
            system.builder,
            engine=self.choice,
            changes=system.changes,
            fallback=self.fallback,
        )

    @property
    def prefers_capture(self) -> bool:
        """Whether rounds are captured if nothing prevents it."""
        return self.session(None).prefers_capture

    def why_eager(self, system: System | None) -> str | None:
        """Return the reason why a system's rounds run one by one; None if they are captured."""
        return self.session(system).eager_reason


def describe_tree(builder: TreeBuilder) -> str:
    """Describe a builder in a few words."""
    sampled = "" if builder.children == "deterministic" else ", drawn"
    if builder.traits.is_chain:
        chain = (
            f"{builder.name}, chain of up to {builder.depth}"
            if builder.traits.uses_latency
            else f"chain of {builder.depth}"
        )
        return chain + sampled
    most = "up to " if builder.traits.uses_latency else ""
    return f"{builder.name}, {most}{builder.budget} nodes{sampled}"
