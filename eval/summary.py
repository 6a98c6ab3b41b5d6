"""What is written about an evaluation: summary.json, samples.jsonl, rounds.parquet, prompts.parquet."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spectrain.data.chat import token_kinds
from spectrain.decoding.generation import ROUND_PARTS
from spectrain.drafters.base import Drafter
from spectrain.eval import metrics
from spectrain.eval.columns import DRAFTER, order_systems
from spectrain.eval.kinds import kind_runs
from spectrain.eval.metrics import SystemSummary, Turn
from spectrain.files import atomic_write, write_text
from spectrain.models.chat_template import ChatTemplate
from spectrain.models.device import roofline_seconds
from spectrain.models.target import Target


@dataclass
class EvaluationSummary:
    """summary.json: the drafter's numbers at the top, the other systems' under `compared`, then what else was measured."""

    # Name of the system to decode with.
    recommended: str
    systems: dict[str, SystemSummary]
    # The drafter on the target's own text, and what limits the speedup: entries of the top level.
    limits: dict[str, Any]
    # What else was measured, by the key of summary.json.
    sections: dict[str, Any]
    # What the numbers depend on.
    setting: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        entries = {name: self.systems[name].to_json() for name in order_systems([*self.systems])}
        return {
            "recommended": self.recommended,
            **entries.pop(DRAFTER),
            **self.limits,
            "compared": entries,
            **self.sections,
            "setting": self.setting,
        }


def speedup_limits(target: Target, drafter: Drafter, turns: Sequence[Turn], oracle: Sequence[Turn]) -> dict[str, Any]:
    """Compute the limits that the speedup compares with.

    engine_efficiency: speedup over tokens per forward.
    zero_cost_draft: the speedup if drafting took no time; None if nodes that only draft run within the verification, because
    drafting then has no time of its own.
    oracle: the measured speedup of a chain as deep as the tree whose drafts are all right, the ceiling of a better drafter.
    roofline: the speedup if a draft step, a step and a verification took the least time that this machine's memory and
    arithmetic allow; None for a mixture of experts, which reads only some of its weights.
    forwards_per_round: present if drafting runs the target too; tokens per forward count verifications alone.
    """
    length = metrics.pooled_acceptance(turns)
    rounds = sum(len(turn.drafted.round_seconds) for turn in turns)
    steps = sum(len(turn.autoregressive.round_seconds) for turn in turns)
    if not rounds or not steps:
        return {}
    step = sum(sum(times.values()) for turn in turns for times in turn.autoregressive.round_seconds) / steps
    verify = sum(times["verify"] for turn in turns for times in turn.drafted.round_seconds) / rounds
    batch = turns[0].drafted.batch_size
    nodes = sum(sum(turn.drafted.node_counts) for turn in turns) / rounds
    depth = sum(sum(turn.drafted.depths) for turn in turns) / rounds
    sparse = bool(getattr(target.config, "num_experts", None) or getattr(target.config, "num_local_experts", None))
    floor = roofline_seconds(target.model, batch, target.device, target.dtype)
    read = drafter.cost.weights(target)
    drafting = drafter.cost.num_passes(depth) * roofline_seconds(read, batch, target.device, target.dtype)
    verifying = roofline_seconds(target.model, batch * nodes, target.device, target.dtype)
    forwards = 1 + drafter.cost.num_target_forwards()
    return {
        **({"forwards_per_round": forwards} if forwards > 1 else {}),
        "engine_efficiency": round(metrics.speedup(turns) / length, 4),
        "zero_cost_draft": None if any(sum(turn.drafted.idle_counts) for turn in turns) else round(length * step / verify, 4),
        "oracle": round(metrics.speedup(oracle), 4) if oracle else None,
        "roofline": None if sparse else round(length * floor / (drafting + verifying), 4),
        "autoregressive_of_floor": None if sparse else round(floor / step, 4),
    }


def sample_line(turn: Turn, template: ChatTemplate | None) -> dict[str, Any]:
    """Return a line of samples.jsonl; without a chat template it has no kinds of tokens."""
    drafted = turn.drafted
    return {
        "id": turn.id,
        "turn": turn.turn,
        "category": turn.category,
        "prompt_tokens": drafted.prompt,
        "output_tokens": drafted.output,
        "rounds": len(drafted.round_lengths),
        "accepted": drafted.round_lengths,
        "kinds": [] if template is None else kind_runs(token_kinds(template, drafted.output, turn.first_kind)),
    }


def write_rounds(path: Path, turns: dict[str, list[Turn]]) -> None:
    """Write rounds.parquet: one row per round of every system."""
    rows = []
    for system, all_turns in turns.items():
        for turn in all_turns:
            drafted = turn.drafted
            for number, (tokens, depth, nodes, times) in enumerate(
                zip(drafted.round_lengths, drafted.depths, drafted.node_counts, drafted.round_seconds)
            ):
                is_complete = number < len(drafted.complete_round_lengths)
                seconds = {f"{part}_seconds": times[part] for part in ROUND_PARTS}
                rows.append({"system": system, "id": turn.id, "turn": turn.turn, "category": turn.category, "round": number,
                             "tokens": tokens, "depth": depth, "nodes": nodes, "whole": is_complete, **seconds})  # fmt: skip
    write_table(path, rows)


def write_prompts(path: Path, turns: dict[str, list[Turn]]) -> None:
    """Write prompts.parquet: one row per prompt of every system, in the order of ids.

    A row has decoded tokens, without the prefill's, and seconds, drafted and autoregressive; tokens and number of complete
    rounds.
    """
    columns = ("tokens", "seconds", "autoregressive_tokens", "autoregressive_seconds", "whole_tokens", "whole_rounds")
    rows = []
    for system, answers in turns.items():
        names = sorted({turn.id for turn in answers})
        values = np.concatenate([metrics.speed_columns(answers), metrics.acceptance_columns(answers)], axis=1)
        rows += [{"system": system, "id": name, **dict(zip(columns, row))} for name, row in zip(names, values.tolist())]
    write_table(path, rows)


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a Parquet file."""
    with atomic_write(path) as scratch:
        pq.write_table(pa.Table.from_pylist(rows), scratch)


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write a JSONL file."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
