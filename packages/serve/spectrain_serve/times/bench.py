"""`spectrain bench engine`: what forwards of several rows take in an engine itself.

The engine's own lookup drafts k tokens, copied from the text, which repeats itself; such a round is
one forward of k + 1 rows, and its drafting costs nearly nothing. Only rounds that really drafted k
tokens count. One row is decoding without a drafter.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from spectrain.config.spec import RunSpec
from spectrain.errors import RunError, UserError
from spectrain.export.card import measured_rates, read_scores
from spectrain.export.targets import TargetFiles
from spectrain.files import require_writable_file
from spectrain.output.verbosity import result_output
from spectrain.provenance import collect_provenance, processor_name
from spectrain.runs.folder import find_results_folder
from spectrain.servers.commands import LOOKUP, DrafterLaunch, EngineLaunch, is_decreasing

from ..engines.launch import start_engine
from ..engines.serve import (
    ServedDrafter,
    find_served_drafter,
    interrupt_on_signals,
    launch_target,
)
from ..engines.starters import find_starter
from ..servers.base import Completion, CompletionRequest, Server
from ..servers.settings import EngineSettings
from .row_times import (
    DrafterTimes,
    EngineTimes,
    RoundTime,
    RowTime,
    Spread,
    save_times,
)
from .table import print_times

PASSAGE = (
    "The harbour lies at the mouth of a long river. Every morning the boats leave before sunrise, "
    "and every evening they return with fish, salt and stories. "
)
ALL_ROWS = (1, 2, 3, 4, 8, 16)
FEW_ROWS = (1, 2, 4)
# Tokens of the target's own text that prompts repeat, and those that it writes first, to settle in
# a repetition.
PATTERN_TOKENS = 64
SETTLING_TOKENS = 96
# Fewest rounds of a kind whose times are given.
MIN_COUNT = 3
# Settings of a server that change its times, besides those that a measurement has of its own.
TIMED_SETTINGS = (
    "weights",
    "device",
    "slots",
    "arguments",
    "extra",
    "branching_factor",
    "tree_depth",
)
# Seconds by (length of the text, drafted tokens) of the rounds that drafted so many.
Samples = dict[tuple[int, int], list[float]]


@dataclass
class EngineBench:
    """How forwards are timed in an engine."""

    # Numbers of rows to time, 1 among them; null takes 1, 2, 3, 4, 8 and 16, or 1, 2 and 4 in an
    # engine that starts slowly.
    rows: list[int] | None = None
    # Tokens of the texts; a length beyond the engine's context is shortened to it.
    lengths: list[int] = field(default_factory=lambda: [64, 1024])
    # Number of times that the engine is started for each number of rows, in alternating order; null
    # takes 2, or 1 in an engine that starts slowly.
    passes: int | None = None
    # Number of answers for each number of rows and each length, in each pass.
    answers: int = 2
    # Number of rounds of an answer.
    rounds: int = 10
    # Share of rounds of the drafter's chain that accept all draft tokens up to each position, from
    # which its speedups are predicted; null takes those of the run's evaluation.
    acceptance_rates: list[float] | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and (
            1 not in self.rows or len(self.rows) < 2 or min(self.rows) < 1
        ):
            raise UserError(
                f"bench.rows={self.rows}: give 1 and larger numbers of rows, as in [1,2,4]"
            )
        if not self.lengths or min(self.lengths) < PATTERN_TOKENS:
            raise UserError(
                f"bench.lengths={self.lengths}: use lengths of {PATTERN_TOKENS} tokens or more"
            )
        if self.acceptance_rates is not None and not is_decreasing(self.acceptance_rates):
            raise UserError(
                f"bench.acceptance_rates={self.acceptance_rates}: use rates from 0 to 1, none "
                "above the one before it"
            )
        for key in ("passes", "answers", "rounds"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"bench.{key}={value}: use 1 or more")

    def complete(self, server: Server) -> EngineBench:
        """Return the settings with those filled in that depend on the engine."""
        is_quick = find_starter(server).starts_quickly
        rows = sorted({*(self.rows or (ALL_ROWS if is_quick else FEW_ROWS))})
        return replace(self, rows=rows, passes=self.passes or (2 if is_quick else 1))

    @property
    def draft_lengths(self) -> list[int]:
        """Return the numbers of drafted tokens: one less than the rows, without 0."""
        return [rows - 1 for rows in self.rows or () if rows > 1]


@dataclass(frozen=True)
class StartGroup:
    """A start of an engine, and the numbers of drafted tokens that are timed in it."""

    launch: EngineLaunch
    draft_lengths: tuple[int, ...]


def bench_engine(spec: RunSpec, bench: Any, out: str | None) -> EngineTimes:
    """Time an engine's forwards, print what a drafter needs there, and write the times into the
    cache and to `out`.
    """
    if out is not None:
        require_writable_file(Path(out), "out")
    server = make_server(spec)
    options: EngineBench = bench.build().complete(server)
    served = None if spec.run is None else find_served_drafter(spec, server.name)
    target = TargetFiles.from_settings(spec.target.node) if served is None else served.target
    launch = launch_target(target, server)
    drafter = None
    with TemporaryDirectory(prefix="spectrain-bench-") as scratch, interrupt_on_signals():
        if served is not None:
            drafter = launch_drafter(served, server, Path(scratch) / "drafter")
            launch = replace(drafter, drafter=None)
        passage: list[int] = target.tokenizer(PASSAGE, add_special_tokens=False)["input_ids"]
        samples, rounds = measure_engine(server, launch, drafter, options, passage)
    times = make_times(server, target, launch, samples)
    if drafter is not None:
        rates = options.acceptance_rates or read_rates(str(spec.run))
        times = replace(times, drafter=summarise_drafter(str(spec.run), rounds, rates))
    with result_output():
        print_times(times)
    for path in (save_times(times), *([] if out is None else [save_times(times, Path(out))])):
        print(f"written to {path}")
    return times


def make_server(spec: RunSpec) -> Server:
    """Return the server to measure; raise a UserError if spectrain cannot start it."""
    if not spec.server:
        raise UserError("server: say which engine to measure, as in server=llamacpp")
    server: Server = spec.server.build()
    if not server.capabilities.has_lookup:
        raise UserError(
            f"server={server.name}: its forwards cannot be timed; use llamacpp, openvino or vllm"
        )
    find_starter(server).check_installed()
    return server


def launch_drafter(served: ServedDrafter, server: Server, scratch: Path) -> EngineLaunch:
    """Return the launch with a run's drafter, which is exported into `scratch` unless its files
    have the layout.
    """
    folder = served.directory if served.is_exported else scratch
    if not served.is_exported:
        served.write(folder, getattr(server.settings, "python", None))
    return served.make_launch(server, folder)


# Measuring


def measure_engine(
    server: Server,
    launch: EngineLaunch,
    drafter: EngineLaunch | None,
    options: EngineBench,
    passage: Sequence[int],
) -> tuple[Samples, Samples]:
    """Return the seconds of the forwards of the target and, with a drafter, those of its rounds."""
    forwards = Samples()
    rounds = Samples()
    prompts = dict[int, list[int]]()
    groups = [(group, forwards) for group in list_groups(server, launch, options.draft_lengths)]
    if drafter is not None and drafter.drafter is not None:
        lengths = [
            length for length in options.draft_lengths if length <= drafter.drafter.num_tokens
        ]
        groups += [(group, rounds) for group in list_drafter_groups(server, drafter, lengths)]
    for number in range(options.passes or 1):
        for group, samples in groups if number % 2 == 0 else reversed(groups):
            with start_engine(server, group.launch) as engine:
                # Prompts are made once, by the target without a drafter, which is the first group.
                timer = EngineTimer(engine.server, options, prompts, passage)
                for key, seconds in asyncio.run(timer.time_group(group)).items():
                    samples.setdefault(key, []).extend(seconds)
    return forwards, rounds


def list_groups(
    server: Server, launch: EngineLaunch, draft_lengths: Sequence[int]
) -> list[StartGroup]:
    """Return the starts for forwards of the target: without a drafter, then with the lookup."""
    lookup = replace(launch, drafter=DrafterLaunch(LOOKUP, None, max(draft_lengths)))
    return [StartGroup(launch, (0,)), *list_drafter_groups(server, lookup, draft_lengths)]


def list_drafter_groups(
    server: Server, launch: EngineLaunch, draft_lengths: Sequence[int]
) -> list[StartGroup]:
    """Return the starts with a drafter: one for all draft lengths if requests choose them, or
    else one for each.
    """
    drafter = launch.drafter
    assert drafter is not None
    if find_starter(server).chooses_draft_length:
        return [StartGroup(launch, tuple(draft_lengths))]
    return [
        StartGroup(replace(launch, drafter=replace(drafter, num_tokens=count)), (count,))
        for count in draft_lengths
    ]


class EngineTimer:
    """Times the rounds of a running engine."""

    def __init__(
        self,
        server: Server,
        options: EngineBench,
        prompts: dict[int, list[int]],
        passage: Sequence[int],
    ) -> None:
        self.server = server
        self.options = options
        self.prompts = prompts
        self.passage = passage

    async def time_group(self, group: StartGroup) -> Samples:
        """Return the seconds of the rounds that drafted as many tokens as they should; draft
        lengths alternate.
        """
        samples: Samples = defaultdict(list)
        if not self.prompts:
            await self.make_prompts()
        for count in group.draft_lengths:
            # The first answer also fills the pool that llama.cpp's lookup copies from.
            await self.answer(max(self.prompts), count, 2 * self.options.rounds)
        for _ in range(self.options.answers):
            for length in self.prompts:
                for count in group.draft_lengths:
                    completion = await self.answer(length, count, self.options.rounds)
                    samples[length, count] += [
                        step.seconds for step in completion.timed_steps if step.drafted == count
                    ]
        return samples

    async def make_prompts(self) -> None:
        """Make texts that repeat what the target itself writes, so that a lookup finds the
        target's next tokens in them.
        """
        start = [*islice(cycle(self.passage), PATTERN_TOKENS)]
        server = self.make_client(0)
        async with server:
            context = server.check_ready().max_length
            written = (
                await server.complete(CompletionRequest(start, SETTLING_TOKENS))
            ).token_ids or []
        pattern = [*start, *written][-PATTERN_TOKENS:]
        longest = 2 * self.options.rounds * max(self.options.rows or [1]) + 2
        room = None if context is None else context - longest
        if room is not None and room < PATTERN_TOKENS:
            raise UserError(
                f"bench.rounds={self.options.rounds}: the engine's context has {context} tokens; "
                "use fewer rounds"
            )
        for length in sorted({min(length, room or length) for length in self.options.lengths}):
            repeated = pattern * (length // PATTERN_TOKENS + 1)
            self.prompts[length] = repeated[-length:]

    async def answer(self, length: int, num_drafts: int, num_rounds: int) -> Completion:
        server = self.make_client(num_drafts)
        async with server:
            server.check_ready()
            limit = num_rounds * (num_drafts + 1) + 1
            return await server.complete(
                CompletionRequest(self.prompts[length], limit, streams=True)
            )

    def make_client(self, num_drafts: int) -> Server:
        """Return a client whose requests draft so many tokens, where they may choose, and do not
        end early.
        """
        chosen = (
            {"num_assistant_tokens": num_drafts}
            if find_starter(self.server).chooses_draft_length and num_drafts
            else {}
        )
        extra = {**(self.server.settings.extra or {}), "ignore_eos": True, **chosen}
        return type(self.server)(replace(self.server.settings, extra=extra))


# Results


def make_times(
    server: Server, target: TargetFiles, launch: EngineLaunch, samples: Samples
) -> EngineTimes:
    """Return the measurement with all that it depends on; raise a RunError if one row or all
    others have no times.
    """
    settings = server.settings
    assert isinstance(settings, EngineSettings)
    forwards = tuple(
        RowTime(length, count + 1, spread) for (length, count), spread in summarise(samples).items()
    )
    timed = {
        length: {forward.rows for forward in forwards if forward.length == length}
        for length, _ in samples
    }
    if not any({1} < rows for rows in timed.values()):
        raise RunError(
            f"server={server.name}: it timed fewer than {MIN_COUNT} rounds without drafts or with "
            "drafts; give a larger bench.rounds, or take another version of the engine"
        )
    # vLLM has no setting for it.
    threads = vars(settings).get("threads", os.environ.get("OMP_NUM_THREADS"))
    return EngineTimes(
        server.name,
        find_starter(server).read_version(),
        target.short_name,
        settings.complete_launch(launch).dtype,
        None if threads is None else int(threads),
        processor_name(),
        {key: value for key, value in vars(settings).items() if key in TIMED_SETTINGS and value},
        forwards,
        provenance=collect_provenance(),
    )


def summarise(samples: Mapping[tuple[int, int], Sequence[float]]) -> dict[tuple[int, int], Spread]:
    """Return the median and the quartiles of the rounds of each kind; kinds with too few rounds
    are left out.
    """
    spreads = {}
    for key, seconds in sorted(samples.items()):
        if len(seconds) >= MIN_COUNT:
            low, middle, high = (
                round(float(value), 6) for value in np.percentile(seconds, [25, 50, 75])
            )
            spreads[key] = Spread(middle, low, high, len(seconds))
    return spreads


def read_rates(run: str) -> Sequence[float]:
    """Return the acceptance rates of the chain in a run's evaluation; [] if it was not scored."""
    measured = measured_rates(read_scores(find_results_folder(Path(run))))
    return [] if measured is None else measured[1]


def summarise_drafter(run: str, samples: Samples, rates: Sequence[float]) -> DrafterTimes:
    """Return the rounds of a drafter, with its acceptance rates if they are known."""
    rounds = tuple(
        RoundTime(length, count, spread) for (length, count), spread in summarise(samples).items()
    )
    return DrafterTimes(run, rounds, tuple(rates))
