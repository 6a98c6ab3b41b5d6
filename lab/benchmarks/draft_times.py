"""CPU milliseconds of a draft, by recipe: from the features of the last accepted tokens to a
complete tree, verification not counted. One thread.

    python -m lab.benchmarks.draft_times

The drafters have the sizes of their recipes on a CPU and are not trained, which the time of a draft
does not depend on. CPU time is that of the thread, so other processes of the machine disturb it
little; the median over rounds is recorded. The output layer over the whole vocabulary stands beside
the one of two stages, because that is what the two stages replace.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from hydra import compose, initialize_config_module

from spectrain.config.build import register_resolvers
from spectrain.config.spec import RunSpec, read_run
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.decoding.session import prepare_for_decoding
from spectrain.drafters.base import Drafter
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.runs.drafters import build_drafter
from spectrain.trees import Chain, Eagle2, TreeBuilder

from .command import run_benchmark

DRAFTERS = {
    "eagle3": "recipe=eagle3",
    "eagle3, whole vocabulary": "recipe=eagle3 drafter.vocab_size=1000000",
    "two_stage_head": "recipe=two_stage_head",
    "no_positions": "recipe=no_positions",
    "sinks": "recipe=sinks ++drafter.window=128",
    "jump": "recipe=jump",
    "dflash": "recipe=dflash",
    "dflare": "recipe=dflare",
    "dspark": "recipe=dspark",
    "dfly": "recipe=dfly",
}
WARM_UP = 3
"""Rounds that are not recorded."""


@dataclass
class DraftTimes:
    """Time the drafts of every recipe for each target, and write them to a JSON file."""

    # Choices of the target.
    targets: tuple[str, ...] = ("tiny", "smollm2")
    # Tokens of the text before the first draft.
    length: int = 256
    # Rounds that are recorded.
    rounds: int = 10
    # JSON file of the results.
    out: str = "lab/results/draft-times.json"

    def run(self) -> None:
        register_resolvers()
        torch.set_num_threads(1)
        rows = []
        for name in self.targets:
            target = compose_run(f"target={name}", "recipe=eagle3").target.build()
            target.pack_weights()
            for label, words in DRAFTERS.items():
                spec = compose_run(f"target={name}", *words.split())
                row = {"target": name, "drafter": label, **self.time_drafter(spec, target)}
                print(row, flush=True)
                rows.append(row)
        setting = {"length": self.length, "rounds": self.rounds, **collect_provenance()}
        results = {"setting": setting, "rows": rows}
        write_text(Path(self.out), json.dumps(results, indent=1) + "\n")

    def time_drafter(self, spec: RunSpec, target: Target) -> dict[str, Any]:
        """Return the CPU milliseconds of a draft of a chain of 3 and of a tree of 16 nodes."""
        torch.manual_seed(0)
        drafter = build_drafter(spec.drafter, target)
        counts = torch.ones(target.head.vocab_size)
        counts[getattr(drafter, "mask_token_id", 0)] = 0
        drafter.prepare(target, counts)
        prepare_for_decoding(drafter, target)
        trees: dict[str, TreeBuilder] = {"chain": Chain(3), "tree": Eagle2(4, 16, 4)}
        return {
            name: round(1000 * self.time_rounds(drafter, builder, target), 3)
            for name, builder in trees.items()
        }

    def time_rounds(self, drafter: Drafter, builder: TreeBuilder, target: Target) -> float:
        """Return the median CPU seconds of drafting and growing the tree, over the rounds."""
        prompt = [100 + n % 1000 for n in range(self.length)]
        seconds: list[float] = []
        drafts = record_times(drafter.draft, seconds)
        grows = record_times(builder.grow, seconds)
        with patch.object(drafter, "draft", drafts), patch.object(builder, "grow", grows):
            num_tokens = 5 * (WARM_UP + self.rounds)
            decode(target, [prompt], Greedy(), num_tokens, drafter, builder, ignore_eos=True)
        rounds = [sum(pair) for pair in zip(seconds[::2], seconds[1::2], strict=True)]
        return median(rounds[WARM_UP : WARM_UP + self.rounds])


def record_times(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a function that also records the CPU seconds of its calls."""

    def call(*arguments: Any) -> Any:
        began = time.thread_time()
        result = function(*arguments)
        seconds.append(time.thread_time() - began)
        return result

    return call


def compose_run(*words: str) -> RunSpec:
    """Return the settings of a training with these words."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        return read_run(compose("train", overrides=[*words]))[0]


if __name__ == "__main__":
    run_benchmark(DraftTimes)
