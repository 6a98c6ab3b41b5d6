"""What is written about an evaluation: summary.json, samples.jsonl, rounds.parquet, prompts.parquet."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spectrain.decoding.generation import ROUND_PARTS
from spectrain.decoding.pruning import Pruning
from spectrain.drafters.base import Drafter
from spectrain.eval import metrics
from spectrain.eval.metrics import Turn
from spectrain.files import atomic_write, write_text
from spectrain.models.device import roofline_seconds
from spectrain.models.target import Target


def summarise(turns: Sequence[Turn], is_chain: bool) -> dict[str, Any]:
    """The numbers of one system, under the names of summary.json."""
    pooled = metrics.pooled_acceptance(turns)
    ratio, predicted = metrics.speedup(turns), metrics.predicted_speedup(turns)
    plain, drafted = [turn.autoregressive for turn in turns], [turn.drafted for turn in turns]
    by_category = {}
    for category in sorted({turn.category for turn in turns}):
        part = [turn for turn in turns if turn.category == category]
        by_category[category] = {
            "acceptance_length": round(metrics.pooled_acceptance(part), 4),
            "speedup": round(metrics.speedup(part), 4),
        }
    rounds = sum(len(generation.node_counts) for generation in drafted)
    return {
        "acceptance_length": {
            "pooled": round(pooled, 4),
            "ci95": metrics.acceptance_interval(turns),
            "without_bonus": round(pooled - 1, 4),
            "per_prompt_mean": round(metrics.per_prompt_acceptance(turns), 4),
            "by_convention": metrics.tau_by_convention(turns, is_chain),
        },
        "acceptance_by_depth": metrics.acceptance_by_depth(turns),
        "tokens_by_round": metrics.histogram(turns),
        "nodes_per_round": round(sum(sum(generation.node_counts) for generation in drafted) / max(rounds, 1), 2),
        "drafting_nodes_per_round": round(sum(sum(generation.idle_counts) for generation in drafted) / max(rounds, 1), 2),
        "tokens_per_second": {
            "autoregressive": round(metrics.tokens_per_second(plain), 3),
            "drafted": round(metrics.tokens_per_second(drafted), 3),
            "per_user": {
                "autoregressive": round(metrics.per_user_tokens_per_second(plain), 3),
                "drafted": round(metrics.per_user_tokens_per_second(drafted), 3),
            },
        },
        "speedup": {
            "ratio": round(ratio, 4),
            "ci95": metrics.speedup_interval(turns),
            "predicted": round(predicted, 4),
            "unexplained": round(ratio / predicted - 1, 4) if predicted else None,
        },
        "time_share": metrics.time_share(turns),
        "by_category": by_category,
    }


def saved_by_pruning(turns: Sequence[Turn], pruning: Pruning, target: Target) -> dict[str, Any]:
    """What early pruning spared of verification: the share of node-layers, a node run through one layer, and of the whole
    work in multiply-adds, which counts the head of every node, and against it the early exit's head."""
    left = sum(sum(turn.drafted.pruned_counts) for turn in turns)
    every = left + sum(sum(turn.drafted.node_counts) for turn in turns)
    judged = sum(sum(turn.drafted.judged_counts) for turn in turns)
    count, head = target.num_layers, target.head.output.weight.numel()
    layer = sum(parameter.numel() for parameter in target.layers.parameters()) / count
    spared = left * ((count - pruning.layer) * layer + head) - judged * pruning.count_multiply_adds(target)
    return {
        **pruning.report_settings(),
        "nodes_pruned": round(left / max(every, 1), 4),
        "node_layers_saved": round(left * (count - pruning.layer) / max(every * count, 1), 4),
        "work_saved": round(spared / max(every * (count * layer + head), 1), 4),
    }


def bounds(target: Target, drafter: Drafter, turns: Sequence[Turn], oracle: Sequence[Turn]) -> dict[str, Any]:
    """What the speedup is to be read against.

    engine_efficiency: speedup over tokens per forward. zero_cost_draft: the speedup if drafting took no time. oracle: the
    measured speedup of a chain as deep as the tree of which every draft is right, the ceiling of a better drafter. Where nodes
    that only draft run with the verification, drafting has no time of its own, so zero_cost_draft is not given. roofline:
    the speedup if a draft step, a step and a verification took what this machine's memory and arithmetic allow at least; not
    given for a mixture of experts, which reads only some of its weights. forwards_per_round, where drafting is one of the
    target's own: tokens per forward count verifications alone.
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


def sample(turn: Turn) -> dict[str, Any]:
    """One line of samples.jsonl."""
    drafted = turn.drafted
    return {
        "id": turn.id,
        "turn": turn.turn,
        "category": turn.category,
        "prompt_tokens": drafted.prompt,
        "output_tokens": drafted.output,
        "rounds": len(drafted.round_lengths),
        "accepted": drafted.round_lengths,
    }


def write_rounds(path: Path, turns: dict[str, list[Turn]]) -> None:
    """rounds.parquet: one row a round of every system."""
    rows = []
    for system, all_turns in turns.items():
        for turn in all_turns:
            found = turn.drafted
            for number, (tokens, depth, nodes, times) in enumerate(
                zip(found.round_lengths, found.depths, found.node_counts, found.round_seconds)
            ):  # fmt: skip
                whole = number < len(found.complete_round_lengths)
                seconds = {f"{part}_seconds": times[part] for part in ROUND_PARTS}
                rows.append({"system": system, "id": turn.id, "turn": turn.turn, "category": turn.category, "round": number,
                             "tokens": tokens, "depth": depth, "nodes": nodes, "whole": whole, **seconds})  # fmt: skip
    write_table(path, rows)


def write_prompts(path: Path, turns: dict[str, list[Turn]]) -> None:
    """prompts.parquet: one row a prompt of every system, in the order of ids: decoded tokens, without a prefill's, and seconds,
    drafted and autoregressive; tokens and number of whole rounds."""
    columns = ("tokens", "seconds", "autoregressive_tokens", "autoregressive_seconds", "whole_tokens", "whole_rounds")
    rows = []
    for system, found in turns.items():
        names = sorted({turn.id for turn in found})
        values = np.concatenate([metrics.speed_columns(found), metrics.acceptance_columns(found)], axis=1)
        rows += [{"system": system, "id": name, **dict(zip(columns, row))} for name, row in zip(names, values.tolist())]
    write_table(path, rows)


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    with atomic_write(path) as scratch:
        pq.write_table(pa.Table.from_pylist(rows), scratch)


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """A JSONL file."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
