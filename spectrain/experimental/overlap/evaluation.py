"""What drafting while the target verifies would gain, by the times of rounds that did not, and what it gained."""

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
from spectrain.experimental.overlap.runner import Overlap, check_overlap
from spectrain.runs.candidate import Candidate

ROUNDS = 5_000  # that are made up


@dataclass(frozen=True)
class Timetable:
    """Mean seconds of a round's parts, and how much of its chains was kept."""

    depth: int  # of the chains
    kept: tuple[int, ...]  # tokens emitted in each whole round, the bonus included
    draft: float
    verify: float
    rest: float
    step: float  # of the target alone

    @classmethod
    def of_turns(cls, turns: Sequence[Turn]) -> Timetable:
        """Of what was decoded here."""
        plain = [seconds for turn in turns for seconds in turn.autoregressive.round_seconds]
        drafted = [seconds for turn in turns for seconds in turn.drafted.round_seconds]
        means = {part: sum(times[part] for times in drafted) / max(len(drafted), 1) for part in ("draft", "verify")}
        total = sum(sum(times.values()) for times in drafted) / max(len(drafted), 1)
        step = sum(sum(times.values()) for times in plain) / max(len(plain), 1)
        depth = max((depth for turn in turns for depth in turn.drafted.depths), default=0)
        kept = tuple(count for turn in turns for count in turn.drafted.complete_round_lengths)
        return cls(depth, kept, means["draft"], means["verify"], total - sum(means.values()), step)

    @classmethod
    def of_files(cls, folder: Path, system: str = "drafter") -> Timetable:
        """Of an evaluation's folder: its rounds.parquet, and the autoregressive times of its prompts.parquet."""
        rounds = [row for row in pq.read_table(folder / "rounds.parquet").to_pylist() if row["system"] == system]
        prompts = [row for row in pq.read_table(folder / "prompts.parquet").to_pylist() if row["system"] == system]
        draft, verify = (sum(row[f"{part}_seconds"] for row in rounds) / len(rounds) for part in ("draft", "verify"))
        rest = sum(row["accept_seconds"] + row["other_seconds"] for row in rounds) / len(rounds)
        step = sum(row["autoregressive_seconds"] for row in prompts) / sum(row["autoregressive_tokens"] for row in prompts)
        kept = tuple(row["tokens"] for row in rounds if row["whole"])
        return cls(max(row["depth"] for row in rounds), kept, draft, verify, rest, step)

    @property
    def rate(self) -> float:
        """The share of the drafts that were judged which were kept."""
        kept = sum(count - 1 for count in self.kept)
        return kept / max(1, kept + sum(count <= self.depth for count in self.kept))

    def seconds(self, overlap: Overlap | None) -> float:
        """Seconds a token, where the next draft is made while the target works, on a device of its own, or only after it.
        Drafts are kept at the mean rate whatever their depth, in rounds that are made up, by a seed that is always the same. A
        draft that is ready was made from where the one before it ended, a token longer. Where outcomes were foreseen, drafts
        are ready as often as they were, and those behind all of them take as long as one."""
        longer = self.draft * (self.depth + 1) / max(1, self.depth)
        draw, ready = Random(0), False
        foreseen = overlap is not None and overlap.num_outcomes > 0
        hits = (
            self.rate if overlap is None or not foreseen else overlap.num_ready / max(1, overlap.num_ready + overlap.num_missed)
        )
        seconds, tokens = 0.0, 0
        for _ in range(ROUNDS):
            if not ready and overlap is not None and overlap.pre_verify:
                seconds += max(self.step, longer)
                tokens, ready = tokens + 1, draw.random() < self.rate
                continue
            seconds += self.verify + self.rest + (0.0 if ready else self.draft)
            kept = 0
            while kept < self.depth and draw.random() < self.rate:
                kept += 1
            ready = overlap is not None and (foreseen or kept == self.depth) and draw.random() < hits
            seconds += max(0.0, longer - self.verify) if ready else 0.0
            tokens += kept + 1
        return seconds / tokens

    def summary(self, overlap: Overlap | None = None) -> dict[str, Any]:
        """Its times, and how much faster overlap would make it; with `overlap`, one that was tried, that one too."""
        one_by_one = self.seconds(None)
        tried = (
            {} if overlap is None or not overlap.num_outcomes else {"outcomes": round(one_by_one / self.seconds(overlap), 4)}
        )
        return {
            "draft_seconds": round(self.draft, 6),
            "verify_seconds": round(self.verify, 6),
            "step_seconds": round(self.step, 6),
            "kept_rate": round(self.rate, 4),
            "post_verify": round(one_by_one / self.seconds(Overlap()), 4),
            "pre_and_post_verify": round(one_by_one / self.seconds(Overlap(pre_verify=True)), 4),
            **tried,
        }


@dataclass
class Overlapping(EvalExtension):
    """The same drafter, drafting ahead in a process of its own, beside itself."""

    pre_verify: bool
    outcomes: int = 0

    def __post_init__(self) -> None:
        self.overlap = Overlap(self.pre_verify, num_outcomes=self.outcomes)

    def check(self, candidate: Candidate) -> None:
        rule = candidate.rule.matching_rule() if candidate.rule.is_unresolved else candidate.rule
        check_overlap(candidate.drafter, candidate.builder, rule, self.outcomes)
        threads, cores = torch.get_num_threads(), os.cpu_count() or 1
        if candidate.target.device.type == "cpu" and threads >= cores > 1:
            print(f"eval.overlap: {threads} threads on {cores} cores leave none to the process that drafts; "
                  f"OMP_NUM_THREADS={cores - 1} leaves it one")  # fmt: skip

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        label = f"the same, drafted ahead, {describe_tree(candidate.builder)}"
        return [replace(first, name="overlap", label=label, runner_source=self.overlap)]

    def report(self, results: Results) -> dict[str, Any]:
        turns = results.turns
        found = Timetable.of_turns(turns["drafter"]).summary(self.overlap)
        gained = speedup(turns["overlap"]) / speedup(turns["drafter"])
        counts = {"drafts_ready": self.overlap.num_ready, "drafts_missed": self.overlap.num_missed}
        if self.outcomes:
            counts["outcomes"] = self.outcomes
        beside = f", {found['outcomes']:.2f}x with {self.outcomes} outcomes foreseen" if self.outcomes else ""
        print(f"overlap: {gained:.2f}x of the same drafter in one process; by its rounds' times, on two idle devices, "
              f"{found['post_verify']:.2f}x by drafting while verifying, {found['pre_and_post_verify']:.2f}x with steps of the "
              f"target meanwhile{beside}; {self.overlap.num_ready} drafts were ready, {self.overlap.num_missed} "
              f"were not")  # fmt: skip
        return {"overlap": {"simulated": found, "measured": round(gained, 4), **counts}}
