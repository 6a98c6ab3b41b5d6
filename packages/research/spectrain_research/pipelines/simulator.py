"""Simulated decoding of one text by a pipeline of stages, with several runs in flight; and of texts
that share a drafter.

A run is a piece of a text's draft that the stages of the target verify one after another. All times
are seconds. Nothing here
decodes: what it returns is a simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any


@dataclass(frozen=True)
class PipelineSetup:
    """The stages of a target, the drafter before them, and how drafts fill them."""

    # Seconds of a run in each stage; a run costs the same whatever its number of tokens, as weights
    # dominate.
    stage_seconds: tuple[float, ...]
    # Seconds of drafting a token.
    draft_seconds: float
    # Draft tokens of a run.
    depth: int
    # Largest number of runs in flight.
    in_flight: int = 1
    # Whether stages drop runs that were cancelled before they began them (PipeInfer's early
    # cancellation).
    cancels_early: bool = True
    # Stage whose output drafts the next token, instead of a drafter: a run begins when the one
    # before it leaves this stage.
    exit_stage: int | None = None
    # Seconds from the drafter to the first stage and back from the last one.
    round_trip: float = 0.0


@dataclass(eq=False)
class SimulatedRun:
    """The tokens of a run, and when each stage begins and ends it."""

    size: int
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


class PipelineSimulator:
    """A discrete-event simulation of one text; the runner of `processes.py` does the same with real
    stages.

    The main process drafts while fewer than `in_flight` runs are on their way, then waits for the
    oldest one and judges it. A wrong draft cancels all later runs. `is_right` says of a position in
    the text whether the draft of its token is right.
    """

    def __init__(self, setup: PipelineSetup, is_right: Callable[[int], bool]) -> None:
        self.setup, self.is_right = setup, is_right
        self.now = 0.0
        self.free = [0.0] * len(setup.stage_seconds)  # when every stage has ended its last run
        self.sent: deque[SimulatedRun] = deque()  # runs that may still occupy stages
        self.num_runs = self.num_cancelled = 0

    def simulate_text(self, num_tokens: int) -> float:
        """Return the seconds until so many tokens are emitted after the first."""
        # tokens emitted; drafts in flight after them
        position = 0
        drafted = 0
        runs: deque[SimulatedRun] = deque()
        # the next run begins with the newest token, whose successor no run predicts
        is_fresh = True
        while position < num_tokens:
            while len(runs) < self.setup.in_flight:
                runs.append(self.send_run(runs[-1] if runs else None, is_fresh))
                drafted = drafted + self.setup.depth
                is_fresh = False
            run = runs.popleft()
            self.now = max(self.now, run.ends[-1] + self.setup.round_trip / 2)
            position, drafted, is_whole = self.judge_run(run, position, drafted)
            if not is_whole:
                self.cancel_runs(runs)
                drafted = 0
                is_fresh = True
            elif not runs:
                # The last prediction of the run is the newest token, and nothing was drafted after
                # it.
                drafted = 0
                is_fresh = True
                position += 1
        return self.now

    def send_run(self, before: SimulatedRun | None, is_fresh: bool) -> SimulatedRun:
        """Draft a run and give it to the first stage."""
        setup = self.setup
        if setup.exit_stage is None:
            self.now += setup.depth * setup.draft_seconds
        elif before is not None:
            self.now = max(self.now, before.ends[setup.exit_stage])
        run = SimulatedRun(setup.depth + is_fresh)
        at = self.now + setup.round_trip / 2
        for stage, seconds in enumerate(setup.stage_seconds):
            run.begins.append(max(at, self.free[stage]))
            at = self.free[stage] = run.begins[-1] + seconds
            run.ends.append(at)
        self.sent.append(run)
        self.num_runs += 1
        return run

    def judge_run(self, run: SimulatedRun, position: int, drafted: int) -> tuple[int, int, bool]:
        """Return the position after the run, the drafts that stay in flight, and whether none of
        its checks failed.
        """
        checks = min(run.size, drafted)  # a prediction without a draft after it is checked by none
        for _ in range(checks):
            right = self.is_right(position)
            position = position + 1
            drafted = drafted - 1
            if not right:
                return position, 0, False
        return position, drafted, True

    def cancel_runs(self, runs: deque[SimulatedRun]) -> None:
        """Cancel the runs in flight; what a stage has begun it ends."""
        self.num_cancelled += len(runs)
        if self.setup.cancels_early:
            arrival = self.now + self.setup.round_trip / 2
            for stage in range(len(self.free)):
                begun = [
                    run.ends[stage]
                    for run in self.sent
                    if run not in runs or run.begins[stage] < arrival
                ]
                self.free[stage] = max(begun, default=0.0)
        runs.clear()
        self.sent = deque(run for run in self.sent if run.ends[-1] > self.now)


def simulate_shared_drafter(
    num_texts: int, draft: float, verify: float, tokens_per_round: float, num_rounds: int = 2000
) -> float:
    """Return the tokens per second of texts that share one drafter and one target, each served
    first come, first served (SEED).

    While the target verifies one text the drafter drafts for another one. Every text alternates
    between the two.
    """
    ready = [0.0] * num_texts  # when each text may be drafted for
    drafter_free = target_free = 0.0
    for _ in range(num_rounds):
        text = min(range(num_texts), key=lambda number: ready[number])
        drafter_free = max(drafter_free, ready[text]) + draft
        target_free = max(target_free, drafter_free) + verify
        ready[text] = target_free
    return num_rounds * tokens_per_round / target_free


def simulate_remote_drafter(
    in_flight: int,
    depth: int,
    times: dict[str, float],
    accept_rate: float,
    round_trip: float,
    num_tokens: int = 4000,
) -> dict[str, float]:
    """Return the simulated speedups of a drafter at the user's side over plain decoding on the
    server, which sends its tokens as it makes them (DSD, SLED).

    "remote" waits for every answer, "remote_ahead" drafts on while up to `in_flight` runs are on
    their way. "break_even" is the round-trip time in seconds up to which "remote" gains, by its
    expected tokens in a round: E[N] verify - depth draft - verify, at least 0.
    """
    random = Random(0)
    rights = [random.random() < accept_rate for _ in range(num_tokens + depth + 1)]
    stages = (times["verify"],)
    numbers = {}
    for name, count in {"remote": 1, "remote_ahead": in_flight}.items():
        setup = PipelineSetup(stages, times["draft"], depth, count, round_trip=round_trip)
        seconds = PipelineSimulator(setup, rights.__getitem__).simulate_text(num_tokens)
        numbers[name] = round(num_tokens * times["verify"] / seconds, 4)
    tokens = sum(accept_rate**k for k in range(depth + 1))
    gained = (tokens - 1) * times["verify"] - depth * times["draft"]
    return {**numbers, "break_even": round(max(0.0, gained), 6)}


def simulate_systems(
    stages: int,
    in_flight: int,
    depth: int,
    times: dict[str, float],
    accept_rate: float,
    num_tokens: int = 4000,
) -> dict[str, Any]:
    """Return the simulated speedups of pipelined systems over plain decoding with the same
    pipeline.

    `times` are the measured seconds of one process: "draft" a token, "verify" a run. Stages share
    the verification equally. Drafts are right at random with the rate `accept_rate`.
    """
    stage = times["verify"] / stages
    draft = times["draft"]
    setups = {
        "one_run": PipelineSetup((stage,) * stages, draft, depth),
        "pipeinfer": PipelineSetup((stage,) * stages, draft, depth, in_flight),
        "pipeinfer_without_cancellation": PipelineSetup(
            (stage,) * stages, draft, depth, in_flight, cancels_early=False
        ),
        "pipedec": PipelineSetup((stage,) * stages, draft, 1, stages),
        "speed_or_ppd": PipelineSetup((stage,) * stages, 0.0, 1, stages, exit_stage=0),
    }
    speedups = {}
    for name, setup in setups.items():
        random = Random(0)
        rights = [random.random() < accept_rate for _ in range(num_tokens + depth + 1)]
        simulator = PipelineSimulator(setup, rights.__getitem__)
        speedups[name] = round(
            num_tokens * times["verify"] / simulator.simulate_text(num_tokens), 4
        )
    tokens = sum(accept_rate**k for k in range(depth + 1))
    alone = simulate_shared_drafter(1, depth * draft, times["verify"], tokens)
    speedups["seed_throughput"] = round(
        simulate_shared_drafter(in_flight, depth * draft, times["verify"], tokens) / alone, 4
    )
    return {
        "stages": stages,
        "in_flight": in_flight,
        "depth": depth,
        "accept_rate": round(accept_rate, 4),
        **speedups,
    }
