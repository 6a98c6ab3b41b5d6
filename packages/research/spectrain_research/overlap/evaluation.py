"""The gain of drafting while the target verifies: simulated from the times of ordinary rounds,
and measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import torch

from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.metrics import Turn, speedup
from spectrain.eval.systems import System, describe_tree
from spectrain.runs.candidate import Candidate
from spectrain_research.overlap.runner import Overlap, check_overlap

SIMULATED_ROUNDS = 5_000


@dataclass(frozen=True)
class Timetable:
    """Mean seconds of a round's parts, and the tokens that rounds emitted."""

    depth: int  # draft tokens of a chain
    emitted_counts: tuple[int, ...]  # tokens emitted in each complete round, the bonus included
    draft: float
    verify: float
    rest: float
    step: float  # seconds of an autoregressive step

    @classmethod
    def from_turns(cls, turns: Sequence[Turn]) -> Timetable:
        """Make a timetable of decoded turns."""
        step_times = [seconds for turn in turns for seconds in turn.autoregressive.round_seconds]
        round_times = [seconds for turn in turns for seconds in turn.drafted.round_seconds]
        means = {
            part: sum(times[part] for times in round_times) / max(len(round_times), 1)
            for part in ("draft", "verify")
        }
        total = sum(sum(times.values()) for times in round_times) / max(len(round_times), 1)
        step = sum(sum(times.values()) for times in step_times) / max(len(step_times), 1)
        depth = max((depth for turn in turns for depth in turn.drafted.depths), default=0)
        counts = tuple(count for turn in turns for count in turn.drafted.complete_round_lengths)
        return cls(
            depth, counts, means["draft"], means["verify"], total - sum(means.values()), step
        )

    @classmethod
    def from_files(cls, folder: Path, system: str = "drafter") -> Timetable:
        """Make a timetable of an evaluation's folder, from rounds.parquet and the autoregressive
        times of prompts.parquet.
        """
        rounds = [
            row
            for row in pq.read_table(folder / "rounds.parquet").to_pylist()
            if row["system"] == system
        ]
        prompts = [
            row
            for row in pq.read_table(folder / "prompts.parquet").to_pylist()
            if row["system"] == system
        ]
        draft, verify = (
            sum(row[f"{part}_seconds"] for row in rounds) / len(rounds)
            for part in ("draft", "verify")
        )
        rest = sum(row["accept_seconds"] + row["other_seconds"] for row in rounds) / len(rounds)
        step = sum(row["autoregressive_seconds"] for row in prompts) / sum(
            row["autoregressive_tokens"] for row in prompts
        )
        counts = tuple(row["tokens"] for row in rounds if row["whole"])
        return cls(max(row["depth"] for row in rounds), counts, draft, verify, rest, step)

    @property
    def accept_rate(self) -> float:
        """The share of judged drafts that were accepted."""
        num_accepted = sum(count - 1 for count in self.emitted_counts)
        return num_accepted / max(
            1, num_accepted + sum(count <= self.depth for count in self.emitted_counts)
        )

    def seconds_per_token(self, overlap: Overlap | None) -> float:
        """Simulate the seconds per token with drafting on a separate device while the target works;
        None: one after the other.

        Drafts are accepted at the mean rate at every depth, in simulated rounds with a fixed seed.
        A draft made ahead starts after the draft before it and is one token longer. With predicted
        outcomes, drafts are ready as often as in the measured run, and drafting for all outcomes
        takes as long as for one.
        """
        longer_draft = self.draft * (self.depth + 1) / max(1, self.depth)
        random = Random(0)
        is_ready = False
        predicts_outcomes = overlap is not None and overlap.num_outcomes > 0
        ready_rate = (
            self.accept_rate
            if overlap is None or not predicts_outcomes
            else overlap.num_ready / max(1, overlap.num_ready + overlap.num_missed)
        )
        seconds = 0.0
        tokens = 0
        for _ in range(SIMULATED_ROUNDS):
            if not is_ready and overlap is not None and overlap.pre_verify:
                seconds += max(self.step, longer_draft)
                tokens = tokens + 1
                is_ready = random.random() < self.accept_rate
                continue
            seconds += self.verify + self.rest + (0.0 if is_ready else self.draft)
            num_accepted = 0
            while num_accepted < self.depth and random.random() < self.accept_rate:
                num_accepted += 1
            is_ready = (
                overlap is not None
                and (predicts_outcomes or num_accepted == self.depth)
                and random.random() < ready_rate
            )
            seconds += max(0.0, longer_draft - self.verify) if is_ready else 0.0
            tokens += num_accepted + 1
        return seconds / tokens

    def summarize(self, overlap: Overlap | None = None) -> dict[str, Any]:
        """Return the times and the simulated speedups of overlap, with that of a measured
        `overlap` of outcomes too.
        """
        baseline = self.seconds_per_token(None)
        measured = (
            {}
            if overlap is None or not overlap.num_outcomes
            else {"outcomes": round(baseline / self.seconds_per_token(overlap), 4)}
        )
        return {
            "draft_seconds": round(self.draft, 6),
            "verify_seconds": round(self.verify, 6),
            "step_seconds": round(self.step, 6),
            "kept_rate": round(self.accept_rate, 4),
            "post_verify": round(baseline / self.seconds_per_token(Overlap()), 4),
            "pre_and_post_verify": round(
                baseline / self.seconds_per_token(Overlap(pre_verify=True)), 4
            ),
            **measured,
        }


@dataclass
class Overlapping(EvalExtension):
    """Compares the drafter with itself drafting ahead in a separate process."""

    pre_verify: bool
    outcomes: int = 0

    def __post_init__(self) -> None:
        self.overlap = Overlap(self.pre_verify, num_outcomes=self.outcomes)

    def check(self, candidate: Candidate) -> None:
        rule = candidate.rule.matching_rule() if candidate.rule.is_unresolved else candidate.rule
        check_overlap(candidate.drafter, candidate.builder, rule, self.outcomes)
        threads = torch.get_num_threads()
        cores = os.cpu_count() or 1
        if candidate.target.device.type == "cpu" and threads >= cores > 1:
            print(
                f"eval.overlap: {threads} threads on {cores} cores leave no core for the "
                f"process that drafts; set OMP_NUM_THREADS={cores - 1}"
            )

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        label = f"the same, drafted ahead, {describe_tree(candidate.builder)}"
        return [replace(first, name="overlap", label=label, changes=(*first.changes, self.overlap))]

    def report(self, results: Results) -> dict[str, Any]:
        turns = results.turns
        simulated = Timetable.from_turns(turns["drafter"]).summarize(self.overlap)
        gain = speedup(turns["overlap"]) / speedup(turns["drafter"])
        counts = {"drafts_ready": self.overlap.num_ready, "drafts_missed": self.overlap.num_missed}
        if self.outcomes:
            counts["outcomes"] = self.outcomes
        outcomes_text = (
            f", {simulated['outcomes']:.2f}x with {self.outcomes} predicted outcomes"
            if self.outcomes
            else ""
        )
        print(
            f"overlap: {gain:.2f}x the speed of the same drafter in one process; simulated on "
            f"two idle devices: {simulated['post_verify']:.2f}x by drafting during "
            f"verification, {simulated['pre_and_post_verify']:.2f}x with target steps during "
            f"drafting{outcomes_text}; {self.overlap.num_ready} drafts were ready, "
            f"{self.overlap.num_missed} were not"
        )
        return {"overlap": {"simulated": simulated, "measured": round(gain, 4), **counts}}
