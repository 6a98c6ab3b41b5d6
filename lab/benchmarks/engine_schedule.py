"""What a schedule of draft tokens gains over a fixed number in vLLM itself, under load.

    python -m lab.benchmarks.engine_schedule python=.venv-engines/bin/python [out=FILE]
    python -m lab.benchmarks.engine_schedule python=.. run=ngram
    python -m lab.benchmarks.engine_schedule python=.. run=runs/NAME ranges=[[1,1,3],[2,8,0]]

Three servers of one target run at the same time: without drafts, with always `num_tokens` draft
tokens, and with a schedule, as an export's card has it (`num_speculative_tokens_per_batch_size`).
At each number of requests at once, all of them answer the same prompts in turn, `repeats` times, in
another order each time, so that a disturbance of the machine meets all of them. A gain is a ratio
of tokens per second, with an interval over the repeats.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.table import Table

from lab.benchmarks.command import run_benchmark
from lab.benchmarks.schedules import NUM_TOKENS, RESULTS, read_table
from spectrain.errors import UserError
from spectrain.eval.intervals import interval
from spectrain.eval.prompts import read_prompts
from spectrain.export.converter import read_drafter, resolve_target
from spectrain.export.launches import find_engine_layout
from spectrain.export.targets import TargetFiles
from spectrain.files import write_text
from spectrain.models.loading import load_hf
from spectrain.output.console import make_console
from spectrain.provenance import collect_provenance
from spectrain.runs.folder import require_drafter_directory
from spectrain.servers.commands import LOOKUP, DrafterLaunch, EngineLaunch
from spectrain.servers.ports import find_free_port
from spectrain_serve.engines.launch import start_engine
from spectrain_serve.engines.serve import ServedDrafter, launch_target
from spectrain_serve.engines.starters import find_starter
from spectrain_serve.scoring.requests import (
    LevelResult,
    LoadGenerator,
    RequestWriter,
    ServedRequest,
)
from spectrain_serve.scoring.score import AllOpen
from spectrain_serve.servers.base import Server, add_counters
from spectrain_serve.servers.vllm import VllmServer, VllmSettings
from spectrain_serve.times.engine_schedules import SCHEDULE_KEY
from spectrain_serve.times.schedule import list_ranges, make_schedule

FIXED, SCHEDULED, NEVER = "fixed", "schedule", "without drafts"
# Rows of lab/results/axes.json, whose times make the schedules of these drafters.
MEASURED_ROWS = {"smollm2-eagle3": "shipped eagle3, chain of 3", LOOKUP: "n-gram, chain of 3"}
# vLLM's own n-grams, as long as those of drafter=ngram.
LOOKUP_OPTIONS = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
MAX_LENGTH = 1024
KV_CACHE = "VLLM_CPU_KVCACHE_SPACE"


class EngineSchedule:
    """Measures in vLLM what a schedule of draft tokens gains over a fixed number, by load."""

    def __init__(
        self,
        python: str,
        run: str = "smollm2-eagle3",
        ranges: tuple[Any, ...] | None = None,
        levels: tuple[int, ...] = (1, 2, 4, 8),
        prompts: int = 8,
        tokens: int = 32,
        repeats: int = 6,
        plain: bool = True,
        out: str | None = None,
    ) -> None:
        self.python = python
        self.run_name = run
        self.ranges = find_ranges(run) if ranges is None else [list(entry) for entry in ranges]
        self.levels = levels
        self.num_prompts = prompts
        self.tokens = tokens
        self.repeats = repeats
        # Whether a third server decodes without drafts.
        self.plain = plain
        self.out = out

    def run(self) -> None:
        # Three caches of keys and values are in memory at once.
        os.environ.setdefault(KV_CACHE, "1")
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory())) / "drafter"
            server = self.make_server()
            files, launch = make_launch(self.run_name, server, folder)
            requests = write_openings(files, self.num_prompts, self.tokens)
            servers = {
                name: stack.enter_context(start_engine(self.make_server(), each)).server
                for name, each in make_launches(launch, self.ranges).items()
                if self.plain or name != NEVER
            }
            results = asyncio.run(self.ask(servers, requests))
            version = find_starter(server).read_version()
        result = {
            "setting": {
                "run": self.run_name,
                "target": files.reference,
                "dtype": launch.dtype,
                "ranges": self.ranges,
                "num_tokens": NUM_TOKENS,
                "prompts": len(requests),
                "tokens": self.tokens,
                "repeats": self.repeats,
                "vllm": version,
            },
            "levels": [
                describe_level(level, {name: part[level] for name, part in results.items()})
                for level in self.levels
            ],
            "provenance": collect_provenance(),
        }
        if self.out is not None:
            write_text(Path(self.out), json.dumps(result, indent=1) + "\n")
        make_console().print(make_table(result))

    def make_server(self) -> VllmServer:
        arguments: list[str | int | float] = ["--max-num-seqs", max(self.levels)]
        return VllmServer(
            VllmSettings(
                python=self.python,
                port=find_free_port(),
                max_length=MAX_LENGTH,
                arguments=arguments,
            )
        )

    async def ask(
        self, servers: Mapping[str, Server], requests: Sequence[ServedRequest]
    ) -> dict[str, dict[int, list[LevelResult]]]:
        """Return the answers of every server by the number of requests at once, a result for each
        repeat.
        """
        for server in servers.values():
            await asyncio.to_thread(server.check_ready)
        async with AllOpen(servers):
            generator = LoadGenerator(servers, requests, self.tokens)
            flat = await generator.run([*self.levels] * self.repeats)
        return {
            name: {
                level: parts[index :: len(self.levels)] for index, level in enumerate(self.levels)
            }
            for name, parts in flat.items()
        }


def find_ranges(run: str) -> list[list[int]]:
    """Return the schedule by the times that `python -m lab.benchmarks.axes` measured."""
    if run not in MEASURED_ROWS:
        raise UserError(
            f"run={run}: give its schedule too, as in ranges=[[1,1,3],[2,8,0]], which the card of "
            "its export has"
        )
    measured = json.loads((RESULTS / "axes.json").read_text())["rows"]["smollm2"]
    table = read_table(measured[MEASURED_ROWS[run]]["batch"]["load"]["table"])
    return list_ranges(make_schedule(table, NUM_TOKENS))


def make_launch(run: str, server: Server, folder: Path) -> tuple[TargetFiles, EngineLaunch]:
    """Return the target, and how vLLM starts with the drafter, which is written into `folder`."""
    if run == LOOKUP:
        files = TargetFiles("smollm2")
        drafter = DrafterLaunch(LOOKUP, None, NUM_TOKENS, options=LOOKUP_OPTIONS)
        return files, replace(launch_target(files, server), drafter=drafter)
    directory = require_drafter_directory("run", run)
    checkpoint = read_drafter(directory, None)
    files = resolve_target(checkpoint)
    layout = find_engine_layout(checkpoint, files, server.name)
    if layout is None:
        raise UserError(
            f"run={run}: vLLM does not serve drafter={checkpoint.family}; see docs/serving.md"
        )
    served = ServedDrafter(run, directory, False, checkpoint, layout, files)
    served.write(folder)
    launch = served.make_launch(server, folder)
    assert launch.drafter is not None
    return files, replace(launch, drafter=replace(launch.drafter, num_tokens=NUM_TOKENS))


def make_launches(launch: EngineLaunch, ranges: list[list[int]]) -> dict[str, EngineLaunch]:
    """Return the launches of the servers that are compared."""
    assert launch.drafter is not None
    options = {**launch.drafter.options, SCHEDULE_KEY: ranges}
    return {
        FIXED: launch,
        SCHEDULED: replace(launch, drafter=replace(launch.drafter, options=options)),
        NEVER: replace(launch, drafter=None),
    }


def write_openings(files: TargetFiles, num_prompts: int, tokens: int) -> list[ServedRequest]:
    """Return the first turns of the held-out prompts as token ids."""
    target = load_hf(files.engine_path, parts="head")
    writer = RequestWriter(target, tokens)
    requests = [
        writer.write_request(prompt, []) for prompt in read_prompts(None, num_prompts).prompts
    ]
    return [request for request in requests if request is not None]


def count_tokens(result: LevelResult) -> int:
    return sum(answer.completion.num_tokens for answer in result.successes)


def describe_level(level: int, results: Mapping[str, list[LevelResult]]) -> dict[str, Any]:
    """Return what the servers did with so many requests at once."""
    entry: dict[str, Any] = {"requests_at_once": level, "servers": {}}
    for name, repeats in results.items():
        counters = add_counters(result.counters for result in repeats)
        entry["servers"][name] = {
            "tokens_per_second": round(
                sum(map(count_tokens, repeats)) / sum(result.seconds for result in repeats), 3
            ),
            "seconds": [round(result.seconds, 4) for result in repeats],
            "tokens": [count_tokens(result) for result in repeats],
            "failed": sum(len(result.failures) for result in repeats),
            "same": count_same(repeats, results[SCHEDULED]),
            "rounds": None if counters is None else counters.num_rounds,
            "drafted": None if counters is None else counters.num_drafted,
            "accepted": None if counters is None else counters.num_accepted,
        }
    entry["gains"] = {
        name: measure_gain(results[SCHEDULED], results[name])
        for name in results
        if name != SCHEDULED
    }
    return entry


def count_same(results: Sequence[LevelResult], reference: Sequence[LevelResult]) -> int:
    """Count the answers of all repeats whose tokens are those of another server."""
    return sum(
        left is not None
        and right is not None
        and left.completion.token_ids == right.completion.token_ids
        for own, other in zip(results, reference, strict=True)
        for left, right in zip(own.answers, other.answers, strict=True)
    )


def measure_gain(scheduled: Sequence[LevelResult], other: Sequence[LevelResult]) -> dict[str, Any]:
    """Return tokens per second with the schedule over those of another server, with its interval
    over repeats.
    """
    columns = np.array(
        [
            [count_tokens(own), own.seconds, count_tokens(base), base.seconds]
            for own, base in zip(scheduled, other, strict=True)
        ],
        dtype=np.float64,
    )
    own_tokens, own_seconds, tokens, seconds = columns.sum(0)
    ratio = own_tokens / own_seconds / (tokens / seconds)
    return {"ratio": round(float(ratio), 4), "ci95": interval(columns, (1, -1, -1, 1))}


def make_table(result: dict[str, Any]) -> Table:
    setting = result["setting"]
    table = Table(
        title=f"{setting['run']}, vLLM {setting['vllm']}, {setting['dtype']}, "
        f"{setting['prompts']} prompts of {setting['tokens']} tokens, {setting['repeats']} times; "
        f"schedule {setting['ranges']}"
    )
    for title in ("at once", "server", "tokens/s", "gain", "rounds", "drafted", "accepted", "same"):
        table.add_column(title, justify="left" if title == "server" else "right")
    for level in result["levels"]:
        for name, server in level["servers"].items():
            gain = level["gains"].get(name)
            counts = (server[key] for key in ("rounds", "drafted", "accepted"))
            table.add_row(
                str(level["requests_at_once"]),
                name,
                f"{server['tokens_per_second']:.1f}",
                "" if gain is None else format_gain(gain),
                *("" if count is None else str(count) for count in counts),
                f"{server['same']}/{setting['prompts'] * setting['repeats']}",
            )
    return table


def format_gain(gain: Mapping[str, Any]) -> str:
    ends = gain["ci95"]
    return f"{gain['ratio']:.2f}" + ("" if ends is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]")


if __name__ == "__main__":
    run_benchmark(EngineSchedule)
