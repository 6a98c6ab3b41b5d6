"""Sweeps over an axis: `eval.sweep=batch`, `context` and `temperature`, with the drafter's own tree
and for any drafter.

The texts of the evaluation are decoded again at every value, without a drafter and with it, round
by round in turn, so that other work on the machine slows both. Sweeps over lengths of context take
the evaluation's own times, by length.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from spectrain.decoding.acceptance import AcceptanceRule, Greedy, OpenSampling
from spectrain.decoding.calibration import calibrate_builders, resolve_rule
from spectrain.decoding.session import EngineChoice, PromptLoader
from spectrain.errors import UserError
from spectrain.eval import metrics
from spectrain.eval.context import parse_length
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.metrics import Turn
from spectrain.eval.systems import Decoder, System, describe_tree
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.runs.server_scores import simulate_load
from spectrain.trees import Chain
from spectrain_studies.axes.forward_times import find_expert_share, fit_forward_times
from spectrain_studies.axes.points import (
    Axis,
    AxisPoint,
    Batch,
    RoundTimes,
    find_crossover,
    measure_point,
    measure_rounds,
)
from spectrain_studies.axes.tables import axis_markdown, describe_axis, print_axis, render_axis

CONTEXT_LENGTHS = ("512", "1k", "2k", "4k", "8k")
"""Lengths of eval.sweep=context without eval.context, as far as the target's context goes."""
MIN_BATCHES = 4  # batches of each size, so that one slow moment of the machine counts little
WARM_UP_TOKENS = 8  # tokens of an answer before a batch is timed


@dataclass
class AxisSweep(EvalExtension):
    """What all sweeps over an axis share: `measure_points` differs."""

    over: Axis
    max_new_tokens: int
    bound_ms: float
    engine: EngineChoice = "eager"
    batch_size: int = 1
    load: dict[str, Any] | None = field(default=None, init=False)
    forward_times: dict[str, Any] | None = field(default=None, init=False)
    left_out: list[str] = field(default_factory=list, init=False)

    def prepare_systems(self, target: Target, systems: list[System], prompts: PromptLoader) -> None:
        self.calibration_prompts = prompts

    def measure_points(self, results: Results) -> Iterator[AxisPoint]:
        """Measure the values of the axis in their order."""
        raise NotImplementedError

    def report(self, results: Results) -> dict[str, Any]:
        """Return `axis`: the points, where drafting stops to pay, and the simulated load; write
        its table and its plot.
        """
        points = list[AxisPoint]()
        for point in self.measure_points(results):
            print(
                f"{self.over} {point.value:g}: {point.speedup:.2f} times as fast with the drafter",
                flush=True,
            )
            points.append(point)
        columns = zip(*((point.value, point.speedup, point.ci95) for point in points))
        axis = {
            "over": self.over,
            "system": results.systems[0].label,
            "points": [asdict(point) for point in points],
            "crossover": asdict(find_crossover(*map(list, columns))),
            "load": self.load,
            "left_out": self.left_out,
        }
        if self.forward_times is not None:
            axis["forward_times"] = self.forward_times
        write_axis(results.folder, axis)
        return {"axis": axis}

    def print_results(self, console: Console, summary: dict[str, Any]) -> None:
        print_axis(console, [summary["axis"]])
        for sentence in describe_axis(summary["axis"]):
            console.print(sentence, markup=False)

    def decode_pairs(
        self, decoder: Decoder, system: System, texts: Sequence[Turn], size: int
    ) -> list[Batch]:
        """Decode all texts in batches of `size`, without a drafter and with it."""
        rows_of_batches = choose_batches(len(texts), size)
        self.warm_up(decoder, system, texts, rows_of_batches[0])
        return [self.decode_pair(decoder, system, texts, rows) for rows in rows_of_batches]

    def warm_up(
        self, decoder: Decoder, system: System, texts: Sequence[Turn], rows: Sequence[int]
    ) -> None:
        """Decode the beginning of a batch, which is not timed."""
        limit = min(WARM_UP_TOKENS, self.max_new_tokens)
        decoder.decode_interleaved(
            system, [texts[row].drafted.prompt for row in rows], limit, [row + 1 for row in rows]
        )

    def decode_pair(
        self, decoder: Decoder, system: System, texts: Sequence[Turn], rows: Sequence[int]
    ) -> Batch:
        """Decode a batch of texts without a drafter and with it."""
        prompts = [texts[row].drafted.prompt for row in rows]
        keys = [row + 1 for row in rows]
        runs = decoder.decode_interleaved(system, prompts, self.max_new_tokens, keys)
        return [
            replace(texts[row], autoregressive=plain, drafted=drafted)
            for row, plain, drafted in zip(rows, *runs)
        ]


def choose_batches(num_texts: int, size: int) -> list[list[int]]:
    """Return the texts of every batch, by number: all texts in turn, in at least `MIN_BATCHES`
    batches of more than one.
    """
    count = max(-(-num_texts // size), 1 if size == 1 else MIN_BATCHES)
    order = [*islice(cycle(range(num_texts)), count * size)]
    return [order[first : first + size] for first in range(0, len(order), size)]


def write_axis(folder: Path, axis: dict[str, Any]) -> None:
    """Write the table and the plot of an axis."""
    write_text(folder / "axis.md", axis_markdown([axis]) + "\n")
    write_text(folder / "axis.svg", str(render_axis([axis], "axis")) + "\n")


@dataclass
class BatchSweep(AxisSweep):
    """Decodes the texts in batches of several sizes. An installed package simulates a server under
    load with their times.
    """

    sizes: Sequence[int] = (1, 2, 4, 8, 16, 32)

    def measure_points(self, results: Results) -> Iterator[AxisPoint]:
        timed = self.measure_sizes(results, results.turns[results.systems[0].name])
        yield from (point for point, _ in timed.values())
        builder = results.systems[0].builder
        # Engines draft chains, and their schedule is of a drafter that always drafts.
        is_fixed_chain = isinstance(builder, Chain) and not builder.decides_length
        num_tokens = builder.depth if is_fixed_chain else None
        self.load = simulate_load(list_times(timed), self.bound_ms, num_tokens)
        share = find_expert_share(results.candidate.target)
        rounds = {size: measure_rounds(batches) for size, (_, batches) in timed.items()}
        self.forward_times = summarize_forward_times(rounds, share)

    def measure_sizes(
        self, results: Results, texts: Sequence[Turn]
    ) -> dict[int, tuple[AxisPoint, list[Batch]]]:
        """Measure texts in batches of every size that they allow."""
        first = results.systems[0]
        sizes = sorted({size for size in self.sizes if size <= len(texts)}) or [1]
        if missing := sorted({*self.sizes} - {*sizes}):
            listed = ", ".join(map(str, missing))
            sentence = f"Batches of {listed} need as many prompts; {len(texts)} turns were scored."
            self.left_out += [] if sentence in self.left_out else [sentence]
        systems = {
            size: replace(
                first, name=f"{first.name}-batch-{size}", builder=copy.deepcopy(first.builder)
            )
            for size in sizes
        }
        timed: dict[int, tuple[AxisPoint, list[Batch]]] = {}
        for size, batches in self.decode_sizes(results.candidate.target, systems, texts).items():
            answers = islice(
                cycle([text.autoregressive.output for text in texts]), sum(map(len, batches))
            )
            labels = describe_tree(systems[size].builder), first.rule.name
            outputs = [*answers] if first.rule.fixes_choice else None
            timed[size] = measure_point(size, batches, *labels, self.bound_ms, outputs), batches
        return timed

    def decode_sizes(
        self, target: Target, systems: dict[int, System], texts: Sequence[Turn]
    ) -> dict[int, list[Batch]]:
        """Decode all texts in batches of every size. Batches of all sizes alternate, so that a slow
        minute of the machine slows every size."""
        decoders = {
            size: Decoder(target, system.rule.matching_rule(), self.engine)
            for size, system in systems.items()
        }
        jobs: list[tuple[float, int, list[int]]] = []
        for size, system in systems.items():
            batches = choose_batches(len(texts), size)
            self.warm_up(decoders[size], system, texts, batches[0])
            jobs += [
                ((number + 0.5) / len(batches), size, rows) for number, rows in enumerate(batches)
            ]
        decoded: dict[int, list[Batch]] = {size: [] for size in systems}
        for _, size, rows in sorted(jobs):
            decoded[size].append(self.decode_pair(decoders[size], systems[size], texts, rows))
        return decoded


def list_times(timed: dict[int, tuple[AxisPoint, list[Batch]]]) -> dict[str, Any]:
    """Return what a simulation of load needs: by size of a batch the seconds of a step and of a
    drafted round, those of its drafting, and the probabilities of a round to emit 1, 2, .. tokens;
    the seconds of a prompt, the tokens of answers, and the rounds of each text by their tokens,
    these of the smallest size.
    """
    lengths = {}
    for size, (_, batches) in timed.items():
        counts = metrics.count_round_lengths([turn for batch in batches for turn in batch]) or [1]
        lengths[size] = [count / sum(counts) for count in counts]
    turns = [turn for batch in timed[min(timed)][1] for turn in batch]
    smallest = [turn.autoregressive for turn in turns]
    prefill = [run.seconds["prefill"] / run.batch_size for run in smallest]
    return {
        "step_seconds": {size: point.step_seconds for size, (point, _) in timed.items()},
        "round_seconds": {size: point.round_seconds for size, (point, _) in timed.items()},
        "draft_seconds": {
            size: round(measure_rounds(batches).draft, 7) for size, (_, batches) in timed.items()
        },
        "round_lengths": lengths,
        "prefill_seconds": float(np.mean(prefill)),
        "answer_tokens": [len(run.output) for run in smallest],
        "text_rounds": [metrics.count_round_lengths([turn]) for turn in turns],
    }


def summarize_forward_times(times: dict[int, RoundTimes], share: float) -> dict[str, Any] | None:
    """Fit the target's forward over its rows to the steps and rounds of all sizes of a batch, by
    the share of the experts that a row chooses; None for too few sizes.
    """
    measured = [
        pair
        for size, each in times.items()
        for pair in ((size, each.step_forward), (size * each.nodes, each.round_forward))
    ]
    rows, seconds = zip(*measured)
    model = fit_forward_times(rows, seconds, share)
    if model is None:
        return None
    nodes = float(np.mean([each.nodes for each in times.values()]))
    best = model.find_best_batch(nodes, max(times))
    return {
        **asdict(model),
        "nodes": round(nodes, 4),
        "best_batch": best,
        "largest": max(times),
        "efficiency": round(model.estimate_efficiency(best, nodes), 4),
    }


@dataclass
class TemperatureSweep(AxisSweep):
    """Decodes the texts at several temperatures, by a lossless rule and a tree that are chosen
    for each.
    """

    temperatures: Sequence[float] = (0.0, 0.3, 0.6, 1.0)

    def check(self, candidate: Candidate) -> None:
        rule = candidate.rule
        if not isinstance(rule, Greedy) and rule.sampling_settings is None:
            raise UserError(
                f"eval.sweep=temperature: acceptance={rule.name} has no temperature; use greedy, "
                "which is replaced by sample above 0, or a rule that samples"
            )

    def measure_points(self, results: Results) -> Iterator[AxisPoint]:
        first = results.systems[0]
        candidate = results.candidate
        for temperature in sorted({*self.temperatures}):
            rule, builder = self.choose_rule(candidate, first, temperature)
            name = f"{first.name}-temperature-{temperature:g}"
            system = replace(first, name=name, rule=rule, builder=builder)
            decoder = Decoder(candidate.target, rule.matching_rule(), self.engine)
            batches = self.decode_pairs(decoder, system, results.turns[first.name], self.batch_size)
            plain = [turn.autoregressive.output for batch in batches for turn in batch]
            labels = describe_tree(builder), rule.name
            yield measure_point(
                temperature, batches, *labels, self.bound_ms, plain if rule.fixes_choice else None
            )

    def choose_rule(
        self, candidate: Candidate, first: System, temperature: float
    ) -> tuple[AcceptanceRule, Any]:
        """Return the rule of a temperature and a tree for it, prepared like the drafter's own."""
        target = candidate.target
        builder = copy.deepcopy(first.builder)
        if temperature == 0:
            return Greedy(), builder
        rule: AcceptanceRule = OpenSampling(temperature)
        if first.rule.sampling_settings is not None:
            rule = copy.copy(first.rule)
            rule.temperature = temperature  # type: ignore[attr-defined]
        rule, chosen, _ = resolve_rule(
            target, first.drafter, builder, rule, self.calibration_prompts
        )
        rule.check_children(chosen.children, chosen.traits.is_chain)
        if chosen is not builder and chosen.requirements:
            calibrate_builders(target, first.drafter, [chosen], rule, self.calibration_prompts())
        return rule, chosen


@dataclass
class ContextSweep(AxisSweep):
    """Groups the evaluation's own turns by the length of their prompts."""

    def check(self, candidate: Candidate) -> None:
        if self.batch_size > 1:
            raise UserError(
                "eval.sweep=context: prompts are decoded alone; leave out "
                f"eval.batch_size={self.batch_size}, or use eval.sweep=batch eval.context=[4k]"
            )

    def measure_points(self, results: Results) -> Iterator[AxisPoint]:
        first = results.systems[0]
        groups = group_by_length(results.turns[first.name])
        for length in groups:
            outputs = (
                [turn.autoregressive.output for turn in groups[length]]
                if first.rule.fixes_choice
                else None
            )
            labels = describe_tree(first.builder), first.rule.name
            yield measure_point(
                length, [[turn] for turn in groups[length]], *labels, self.bound_ms, outputs
            )


def group_by_length(turns: Sequence[Turn]) -> dict[int, list[Turn]]:
    """Return turns by the length that eval.context extended their prompts to, shortest first."""
    groups: dict[int, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(parse_length(turn.category), []).append(turn)
    return dict(sorted(groups.items()))
