"""What a pipeline of several stages would gain: simulated from the times of ordinary rounds, and
decoded by real processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.metrics import Turn, speedup
from spectrain.eval.systems import System, describe_tree
from spectrain.runs.candidate import Candidate

from .processes import Pipeline, check_pipeline
from .simulator import simulate_remote_drafter, simulate_systems

LABELS = {
    "one_run": "one run in flight",
    "pipeinfer": "several runs in flight (PipeInfer)",
    "pipeinfer_without_cancellation": "the same without early cancellation",
    "pipedec": "a run for each stage, of one token (PipeDec)",
    "speed_or_ppd": "drafts from the first stage (SPEED, PPD)",
}


@dataclass
class Pipelining(EvalExtension):
    """Simulates pipelined systems from measured rounds; with `in_processes`, stages in processes
    also decode.
    """

    stages: int
    in_flight: int
    in_processes: bool = False
    # Seconds between a drafter at the user's side and the server, there and back; 0 simulates none.
    round_trip: float = 0.0

    def __post_init__(self) -> None:
        self.pipeline = Pipeline(self.stages, self.in_flight)

    def check(self, candidate: Candidate) -> None:
        if self.in_processes:
            rule = (
                candidate.rule.matching_rule() if candidate.rule.is_unresolved else candidate.rule
            )
            check_pipeline(
                candidate.drafter, candidate.builder, rule, candidate.target, self.pipeline
            )

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        if not self.in_processes:
            return []
        label = f"{self.stages} stages, {describe_tree(candidate.builder)}"
        return [
            replace(first, name="pipeline", label=label, changes=(*first.changes, self.pipeline))
        ]

    def report(self, results: Results) -> dict[str, Any]:
        turns = results.turns
        depth, times, rate = measure_rounds(turns["drafter"])
        simulated = simulate_systems(self.stages, self.in_flight, depth, times, rate)
        print(
            f"pipeline, simulated and not run: {self.stages} equal stages on devices of their "
            "own, plain decoding = 1"
        )
        for name, label in LABELS.items():
            print(f"  {simulated[name]:.2f}x {label}")
        print(
            f"  {simulated['seed_throughput']:.2f}x the throughput of {self.in_flight} texts that "
            "share a drafter (SEED)"
        )
        result: dict[str, Any] = {"simulated": simulated}
        if self.round_trip:
            remote = simulate_remote_drafter(self.in_flight, depth, times, rate, self.round_trip)
            result["remote"] = {"round_trip": self.round_trip, **remote}
            print(
                f"  {remote['remote']:.2f}x drafts from {1000 * self.round_trip:g} ms away, "
                f"{remote['remote_ahead']:.2f}x with {self.in_flight} runs on their way (DSD, "
                f"SLED); waiting for each answer gains up to {1000 * remote['break_even']:.1f} ms"
            )
        if self.in_processes:
            result["measured"] = round(speedup(turns["pipeline"]), 4)
            result["runs"], result["dropped"] = self.pipeline.num_runs, self.pipeline.num_dropped
            result["stage_seconds"] = [
                round(median(column), 6) for column in zip(*self.pipeline.stage_seconds)
            ]
            result["draft_seconds"] = round(median(self.pipeline.draft_seconds), 6)
            print(
                f"  {result['measured']:.2f}x measured with {self.stages} processes on this machine"
            )
        return {"pipeline": result}


def measure_rounds(turns: list[Turn]) -> tuple[int, dict[str, float], float]:
    """Return the depth of rounds, the mean seconds of drafting a token and of verifying, and the
    rate of right drafts.
    """
    depth = max(1, max((depth for turn in turns for depth in turn.drafted.depths), default=1))
    rounds = [times for turn in turns for times in turn.drafted.round_seconds]
    counts = [count for turn in turns for count in turn.drafted.complete_round_lengths]
    times = {
        part: sum(each[part] for each in rounds) / max(1, len(rounds))
        for part in ("draft", "verify")
    }
    accepted = sum(count - 1 for count in counts)
    rate = accepted / max(1, accepted + sum(count <= depth for count in counts))
    return depth, {"draft": times["draft"] / depth, "verify": times["verify"]}, rate
