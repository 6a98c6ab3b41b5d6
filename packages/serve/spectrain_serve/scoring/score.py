"""Score a running server: its tokens per forward, its times by concurrency, and what its drafter
gains there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spectrain.data.chat_template import ChatTemplate
from spectrain.errors import RunError
from spectrain.eval.columns import DRAFTER
from spectrain.eval.comparison import UNKNOWN_DTYPE
from spectrain.eval.identity import Identity, first_difference
from spectrain.eval.metrics import SystemSummary, Turn, measure_system
from spectrain.eval.noise import Noise, baseline_jitter, judge_speedup
from spectrain.eval.page import write_report
from spectrain.eval.report import print_table
from spectrain.eval.selection import PromptedEvaluation
from spectrain.eval.summary import (
    EvaluationSummary,
    sample_line,
    write_lines,
    write_prompts,
    write_rounds,
)
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.output.text import mask_secrets
from spectrain.servers.base import DraftCounters, ServedModel, Server

from .latency import LatencyLimits, measure_latency
from .notes import ServingTable
from .own_chain import OwnChain
from .requests import (
    LevelResult,
    Levels,
    LoadGenerator,
    RequestWriter,
    ServedRequest,
    write_requests,
)
from .rounds import count_rounds, find_counter_source, make_turns
from .template import TemplateCheck, check_template

DRAFTED = "with the drafter"
PLAIN = "without"
"""Names of the two servers of a score."""

ServerGroup = Mapping[str, AbstractContextManager[Server]]
"""Servers by name that run at the same time; entering one starts it, where it does not run yet."""


@dataclass
class ServedSubject:
    """What is scored: servers, and what is known about the drafter in them."""

    # One group after the other is measured.
    groups: Sequence[ServerGroup]
    # Renders the prompts; None leaves that to the server.
    target: Target | None
    # What the results depend on, besides the evaluation's own settings.
    setting: dict[str, Any]
    # Our own chain with the same drafter; None compares with none.
    own: OwnChain | None = None
    # How the engine was started; empty for a server that ran already.
    launched: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Measured:
    """What the servers answered."""

    levels: dict[str, Levels] = field(default_factory=dict)
    models: dict[str, ServedModel] = field(default_factory=dict)
    requests: list[ServedRequest] = field(default_factory=list)
    template: TemplateCheck | None = None
    # Name and address of the server with the drafter.
    engine: str = ""
    urls: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class ServerEvaluation(PromptedEvaluation):
    """Scores a running server with prompts of `eval`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limits = LatencyLimits.parse(self.slo)

    def score(self, subject: ServedSubject, folder: Path) -> dict[str, Any]:
        """Request all answers, write the results to `folder`, print the table, and return
        summary.json.
        """
        writer = RequestWriter(subject.target, self.max_new_tokens)
        measured = Measured()
        for group in subject.groups:
            with ExitStack() as stack:
                servers = {name: stack.enter_context(context) for name, context in group.items()}
                asyncio.run(self._measure_group(servers, writer, measured))
        self.skipped.update(writer.left_out)
        template = None if subject.target is None else subject.target.template
        turns, summaries = self._summarize_levels(measured, template)
        first = turns[DRAFTER]
        server = self._describe_server(measured, summaries, first)
        if self.check and subject.own is not None and server["counts"] != "none":
            server["own_chain"] = subject.own.compare(first, self.max_new_tokens)
        setting = self._describe_setting(subject, measured, summaries[DRAFTER])
        summary = EvaluationSummary(dict(summaries), {}, {"server": server}, setting).to_json()
        folder.mkdir(parents=True, exist_ok=True)
        write_lines(folder / "samples.jsonl", [sample_line(turn, template) for turn in first])
        write_rounds(folder / "rounds.parquet", turns)
        write_prompts(folder / "prompts.parquet", turns)
        write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        if self.report:
            write_report(folder / "report.html", [folder])
        print_table(summary, [ServingTable()])
        return summary

    async def _measure_group(
        self, servers: Mapping[str, Server], writer: RequestWriter, measured: Measured
    ) -> None:
        """Request the answers of servers that run at the same time, level by level."""
        for name, server in servers.items():
            measured.models[name] = await asyncio.to_thread(server.check_ready)
            measured.urls[name] = [mask_secrets(url) for url in server.settings.urls]
        async with AllOpen(servers):
            if DRAFTED in servers:
                measured.engine = servers[DRAFTED].name
                measured.requests = await write_requests(
                    servers[DRAFTED], self.chosen, writer, max(self.concurrency)
                )
            if not measured.requests:
                raise RunError(
                    "eval.prompts: the server can be given none of the prompts "
                    f"({dict(writer.left_out)})"
                )
            generator = LoadGenerator(servers, measured.requests, self.max_new_tokens)
            measured.levels |= await generator.run(self.concurrency)
            if DRAFTED in servers and writer.target is not None:
                measured.template = await check_template(
                    servers[DRAFTED], self.chosen, writer.target
                )

    def _summarize_levels(
        self, measured: Measured, template: ChatTemplate | None
    ) -> tuple[dict[str, list[Turn]], dict[str, ServedSummary]]:
        """Return the turns and the numbers of every level; the first one is the drafter's own
        entry.
        """
        turns: dict[str, list[Turn]] = {}
        summaries: dict[str, ServedSummary] = {}
        plain = measured.levels.get(PLAIN)
        for number, result in enumerate(measured.levels[DRAFTED]):
            name = DRAFTER if number == 0 else f"concurrency-{result.concurrency}"
            pair = result, None if plain is None else plain[number]
            turns[name] = make_turns(*pair)
            if not turns[name]:
                reason = next(iter(result.failures.values()), "no answer")
                raise RunError(
                    f"server: no request at concurrency {result.concurrency} was answered "
                    f"({reason})"
                )
            summaries[name] = self._summarize_level(turns[name], *pair, template)
        return turns, summaries

    def _summarize_level(
        self,
        turns: list[Turn],
        drafted: LevelResult,
        plain: LevelResult | None,
        template: ChatTemplate | None,
    ) -> ServedSummary:
        """Compute the numbers of one level; what cannot be known is None or empty."""
        source = find_counter_source(drafted)
        numbers = measure_system(turns, True, template)
        by_answer = ("by_kind", "by_position", "by_text_position", "by_category")
        numbers |= {"time_share": {}} | (
            {} if source == "requests" else {name: {} for name in by_answer}
        )
        unknown = ["acceptance_length"] if source == "none" else []
        if plain is None:
            unknown += [
                "speedup",
                "tokens_per_second.autoregressive",
                "tokens_per_second.per_user.autoregressive",
            ]
            unknown += [f"by_category.{name}.speedup" for name in numbers["by_category"]]
        else:
            jitter = baseline_jitter(turns) if drafted.concurrency == 1 else 0.0
            numbers["speedup"] = judge_speedup(numbers["speedup"], turns, Noise(jitter, None))
        depth = max((depth for turn in turns for depth in turn.drafted.depths), default=0)
        results = {"drafted": drafted} | ({} if plain is None else {"plain": plain})
        times = {
            name: asdict(measure_latency(result, self.limits)) for name, result in results.items()
        }
        return ServedSummary(
            **numbers,
            label=f"{drafted.concurrency} at once",
            tree={"name": "chain", "depth": depth},
            engine="server",
            serving={"concurrency": drafted.concurrency, **times},
            unknown=unknown,
            lossless=None
            if plain is None or not self.check
            else compare_outputs(turns, drafted, plain).summary(),
        )

    def _describe_server(
        self, measured: Measured, summaries: Mapping[str, ServedSummary], first: list[Turn]
    ) -> dict[str, Any]:
        """Return the entry `server` of summary.json: where counts come from, and what else is
        said about the server.
        """
        results = measured.levels[DRAFTED]
        source = find_counter_source(results[0])
        counted = count_rounds(first)
        totals = results[0].counters
        failed = {name: reason for result in results for name, reason in result.failures.items()}
        speedups = [
            {"concurrency": result.concurrency, **asdict(summary.speedup)}
            for result, summary in zip(results, summaries.values())
            if "speedup" not in summary.unknown
        ]
        return {
            "counts": source,
            "requests_counted": describe_counters(counted) if source == "requests" else None,
            "totals_counted": None if totals is None else describe_counters(totals),
            "speedups": speedups,
            "failed": failed,
            "template": None if measured.template is None else asdict(measured.template),
            "slo": self.slo,
        }

    def _describe_setting(
        self, subject: ServedSubject, measured: Measured, first: SystemSummary
    ) -> dict[str, Any]:
        """Return what the numbers depend on."""
        served = measured.models[DRAFTED]
        return {
            "target": served.name,
            "recipe": "drafter",
            "drafter": {"choice": "served"},
            "dtype": UNKNOWN_DTYPE,
            "drafter_dtype": UNKNOWN_DTYPE,
            **subject.setting,
            "device": f"{measured.engine} at {', '.join(measured.urls[DRAFTED])}",
            "prompts": len({request.id for request in measured.requests}),
            **self.describe_context(),
            "skipped": dict(self.skipped),
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.concurrency[0],
            "rule": "greedy",
            "tree": first.tree,
            "guard": False,
            "engine": "server",
            "server": {
                "name": measured.engine,
                "url": measured.urls[DRAFTED],
                "model": served.name,
                "weights": served.weights,
                "max_length": served.max_length,
                "concurrency": list(self.concurrency),
                "baseline_url": measured.urls.get(PLAIN),
                "prompts_as": "messages" if subject.target is None else "token ids",
                **subject.launched,
                # A started engine runs here.
                "machine": subject.setting.get("device") if subject.launched else None,
            },
        }


def describe_counters(counters: DraftCounters) -> dict[str, Any]:
    """Return counters as summary.json has them: without positions at which nothing was accepted."""
    accepted = [count for count in counters.accepted_by_position if count]
    return {
        "num_rounds": counters.num_rounds,
        "num_drafted": counters.num_drafted,
        "accepted_by_position": accepted,
    }


@dataclass(kw_only=True)
class ServedSummary(SystemSummary):
    """The numbers of one level of concurrency."""

    # The times of the answers, with the drafter and, if measured, without.
    serving: dict[str, Any]
    # Dotted keys of the entry that cannot be known, which are null in summary.json.
    unknown: list[str]

    def to_json(self) -> dict[str, Any]:
        entry = super().to_json()
        for key in entry.pop("unknown"):
            *path, last = key.split(".")
            inner = entry
            for part in path:
                inner = inner[part]
            inner[last] = None
        return entry


class AllOpen:
    """Opens and closes the connections of several servers."""

    def __init__(self, servers: Mapping[str, Server]) -> None:
        self.servers = servers

    async def __aenter__(self) -> None:
        for server in self.servers.values():
            await server.__aenter__()

    async def __aexit__(self, *raised: Any) -> None:
        for server in self.servers.values():
            await server.__aexit__(*raised)


def compare_outputs(turns: Sequence[Turn], drafted: LevelResult, plain: LevelResult) -> Identity:
    """Compare greedy answers with those of the server without a drafter, by tokens or, where
    there are none, by text.
    """
    identity = Identity("greedy", True, "the server without a drafter")
    pairs = [
        (left, right)
        for left, right in zip(drafted.answers, plain.answers)
        if left is not None and right is not None
    ]
    for turn, (left, right) in zip(turns, pairs, strict=True):
        identity.checked += 1
        if left.completion.token_ids is not None and right.completion.token_ids is not None:
            position = first_difference(left.completion.token_ids, right.completion.token_ids)
        else:
            position = None if left.completion.message == right.completion.message else 0
        if position is None:
            identity.identical += 1
        else:
            identity.differences.append(
                {"id": turn.id, "turn": turn.turn, "position": position, "gap": None}
            )
    return identity
