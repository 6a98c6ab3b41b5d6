"""What is written about an evaluation: summary.json, samples.jsonl, rounds.parquet,
prompts.parquet.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spectrain.data.chat import token_kinds
from spectrain.data.chat_template import ChatTemplate
from spectrain.decoding.generation import ROUND_PARTS
from spectrain.drafters.base import Drafter, drafting_cost
from spectrain.eval import metrics
from spectrain.eval.columns import DRAFTER, choose_fastest, order_systems
from spectrain.eval.headline import describe_headline
from spectrain.eval.kinds import kind_runs
from spectrain.eval.metrics import SystemSummary, Turn
from spectrain.files import atomic_write, write_text
from spectrain.models.device import DeviceLimits, measure_limits, roofline_seconds
from spectrain.models.target import Target

PREDICTED_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of texts at once for which the speedup on another device is predicted."""


def make_summary(
    systems: Mapping[str, SystemSummary],
    limits: Mapping[str, Any],
    sections: Mapping[str, Any],
    setting: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of summary.json: the drafter's numbers and what limits the speedup at the
    top, the other systems' under `compared`, then what else was measured by its key, and what the
    numbers depend on.
    """
    entries = {name: systems[name].to_json() for name in order_systems([*systems])}
    content = {
        **entries.pop(DRAFTER),
        **limits,
        "compared": entries,
        **sections,
        "setting": setting,
    }
    # Name of the fastest system; "autoregressive" if no drafter is faster, null if no speedup may
    # be quoted.
    return {
        "recommended": choose_fastest(content),
        "headline": describe_headline(content),
        **content,
    }


def speedup_limits(
    target: Target, drafter: Drafter, turns: Sequence[Turn], oracle: Sequence[Turn]
) -> dict[str, Any]:
    """Compute the limits that the speedup compares with.

    engine_efficiency: speedup over tokens per forward.
    zero_cost_draft: the speedup if drafting took no time; None if nodes that only draft run within
    the verification, because drafting then has no time of its own.
    oracle: the measured speedup of a chain as deep as the tree whose drafts are all right, the
    ceiling of a better drafter.
    roofline: the speedup if a draft step, a step and a verification took the least time that this
    machine's memory and arithmetic allow.
    forwards_per_round: present if drafting runs the target too; tokens per forward count
    verifications alone.
    """
    length = metrics.pooled_acceptance(turns)
    rounds = sum(len(turn.drafted.round_seconds) for turn in turns)
    steps = sum(len(turn.autoregressive.round_seconds) for turn in turns)
    if not rounds or not steps:
        return {}
    step = (
        sum(sum(times.values()) for turn in turns for times in turn.autoregressive.round_seconds)
        / steps
    )
    verify = sum(times["verify"] for turn in turns for times in turn.drafted.round_seconds) / rounds
    batch = turns[0].drafted.batch_size
    limits = measure_limits(target.device, target.dtype)
    floor = roofline_seconds(target.model, batch, limits)
    roofline = roofline_speedup(target, drafter, turns, limits, batch)
    forwards = 1 + drafting_cost(drafter).num_target_forwards()
    return {
        **({"forwards_per_round": forwards} if forwards > 1 else {}),
        "engine_efficiency": round(metrics.speedup(turns) / length, 4),
        "zero_cost_draft": None
        if any(sum(turn.drafted.idle_counts) for turn in turns)
        else round(length * step / verify, 4),
        "oracle": round(metrics.speedup(oracle), 4) if oracle else None,
        "roofline": round(roofline, 4),
        "autoregressive_of_floor": round(floor / step, 4),
    }


def roofline_speedup(
    target: Target, drafter: Drafter, turns: Sequence[Turn], limits: DeviceLimits, batch: int
) -> float:
    """Return the speedup of these tokens per forward if every forward took its lower bound on a
    device, for `batch` texts.
    """
    rounds = sum(len(turn.drafted.round_lengths) for turn in turns)
    nodes = sum(sum(turn.drafted.node_counts) for turn in turns) / rounds
    depth = sum(sum(turn.drafted.depths) for turn in turns) / rounds
    drafting = drafting_cost(drafter).num_passes(depth) * roofline_seconds(
        drafting_cost(drafter).weights(target), batch, limits
    )
    verifying = roofline_seconds(target.model, batch * nodes, limits)
    step = roofline_seconds(target.model, batch, limits)
    return metrics.pooled_acceptance(turns) * step / (drafting + verifying)


def predict_device(
    target: Target, drafter: Drafter, turns: Sequence[Turn], device: Mapping[str, float]
) -> dict[str, Any]:
    """Predict the speedup on a device of this bandwidth (GB/s) and arithmetic (TFLOP/s), by number
    of texts at once.

    Every forward takes its lower bound there, so attention over a long context and the start of
    kernels are left out; tokens per forward and trees are those measured here. Nothing is predicted
    of answers without rounds.
    """
    if not any(turn.drafted.round_lengths for turn in turns):
        return {}
    limits = DeviceLimits(device["bandwidth"] * 1e9, device["tflops"] * 1e12)
    speedups = {
        size: round(roofline_speedup(target, drafter, turns, limits, size), 4)
        for size in PREDICTED_BATCHES
    }
    return {**device, "by_batch": speedups}


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
        "kinds": []
        if template is None
        else kind_runs(token_kinds(template, drafted.output, turn.first_kind)),
    }


def write_rounds(path: Path, turns: dict[str, list[Turn]]) -> None:
    """Write rounds.parquet: one row per round of every system. docs/runs.md explains the
    columns.
    """
    rows = []
    for system, all_turns in turns.items():
        for turn in all_turns:
            drafted = turn.drafted
            # Servers report no plans.
            plans = drafted.plans or [None] * len(drafted.depths)
            for number, (tokens, depth, nodes, plan, times) in enumerate(
                zip(
                    drafted.round_lengths,
                    drafted.depths,
                    drafted.node_counts,
                    plans,
                    drafted.round_seconds,
                )
            ):
                is_complete = number < len(drafted.complete_round_lengths)
                seconds = {f"{part}_seconds": times[part] for part in ROUND_PARTS}
                rows.append(
                    {
                        "system": system,
                        "id": turn.id,
                        "turn": turn.turn,
                        "category": turn.category,
                        "round": number,
                        "tokens": tokens,
                        "depth": depth,
                        "nodes": nodes,
                        "whole": is_complete,
                        "reason": None if plan is None else plan.reason,
                        "gain": None if plan is None else plan.gain,
                        "savings": None if plan is None else plan.savings,
                        **seconds,
                    }
                )
    write_table(path, rows)


def write_prompts(path: Path, turns: dict[str, list[Turn]]) -> None:
    """Write prompts.parquet: one row per prompt of every system, in the order of ids.

    A row has decoded tokens, without the prefill's, and seconds, drafted and autoregressive; tokens
    and number of complete rounds.
    """
    columns = (
        "tokens",
        "seconds",
        "autoregressive_tokens",
        "autoregressive_seconds",
        "whole_tokens",
        "whole_rounds",
    )
    rows = []
    for system, answers in turns.items():
        names = sorted({turn.id for turn in answers})
        values = np.concatenate(
            [metrics.speed_columns(answers), metrics.acceptance_columns(answers)], axis=1
        )
        rows += [
            {"system": system, "id": name, **dict(zip(columns, row))}
            for name, row in zip(names, values.tolist())
        ]
    write_table(path, rows)


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a Parquet file."""
    with atomic_write(path) as scratch:
        pq.write_table(pa.Table.from_pylist(rows), scratch)


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write a JSONL file."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
