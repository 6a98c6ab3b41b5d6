"""Score a running server: its tokens per forward, its times by concurrency, and what its drafter
gains there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spectrain.errors import RunError, UserError
from spectrain.eval.columns import DRAFTER
from spectrain.eval.identity import Identity, first_difference, logit_gap
from spectrain.eval.kinds import ROUND_GROUPS
from spectrain.eval.metrics import SystemSummary, Turn, measure_system
from spectrain.eval.noise import Noise, baseline_jitter, judge_speedup
from spectrain.eval.pipeline import (
    UNKNOWN_DTYPE,
    Answers,
    AnswerSource,
    Entries,
    SourceSetting,
    run_pipeline,
)
from spectrain.eval.selection import PromptedEvaluation
from spectrain.models.target import Target
from spectrain.output.text import mask_secrets

from ..servers.base import DraftCounters, ServedModel, Server
from .latency import LatencyLimits, measure_latency
from .load_settings import LoadSettings
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
class ServerEvaluation(LoadSettings, PromptedEvaluation):
    """Scores a running server with prompts of `eval`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.check == "distribution":
            raise UserError(
                "eval.check=distribution: it decodes with this engine; leave out server=.., or use "
                "eval.check=true"
            )
        self.limits = LatencyLimits.parse(self.slo)

    def score(self, subject: ServedSubject, folder: Path) -> dict[str, Any]:
        """Request all answers, write the results to `folder`, print the table, and return
        summary.json.
        """
        return run_pipeline(self, ServerAnswers(self, subject), folder)


class ServerAnswers(AnswerSource):
    """Running servers, which answer with the drafter and, if there is such a one, without it."""

    views = (ServingTable(),)

    def __init__(self, evaluation: ServerEvaluation, subject: ServedSubject) -> None:
        self.evaluation = evaluation
        self.subject = subject
        self.measured = Measured()
        self.template = None if subject.target is None else subject.target.template

    def answer(self) -> Answers:
        measured = self.measured
        writer = RequestWriter(self.subject.target, self.evaluation.max_new_tokens)
        for group in self.subject.groups:
            with ExitStack() as stack:
                servers = {name: stack.enter_context(context) for name, context in group.items()}
                asyncio.run(self._measure_group(servers, writer))
        turns = {name: make_turns(*pair) for name, pair in self._list_levels().items()}
        for name, (drafted, _) in self._list_levels().items():
            if not turns[name]:
                reason = next(iter(drafted.failures.values()), "no answer")
                raise RunError(
                    f"server: no request at concurrency {drafted.concurrency} was answered "
                    f"({reason})"
                )
        num_prompts = len({request.id for request in measured.requests})
        return Answers(turns, num_prompts, writer.left_out)

    def _list_levels(self) -> dict[str, tuple[LevelResult, LevelResult | None]]:
        """Return row -> the answers of a level with the drafter and, if measured, without; the
        first level is the drafter's own row.
        """
        drafted = self.measured.levels[DRAFTED]
        plain: Sequence[LevelResult | None]
        plain = self.measured.levels.get(PLAIN) or [None] * len(drafted)
        names = [DRAFTER, *(f"concurrency-{result.concurrency}" for result in drafted[1:])]
        return dict(zip(names, zip(drafted, plain)))

    async def _measure_group(self, servers: Mapping[str, Server], writer: RequestWriter) -> None:
        """Request the answers of servers that run at the same time, level by level."""
        evaluation, measured = self.evaluation, self.measured
        for name, server in servers.items():
            measured.models[name] = await asyncio.to_thread(server.check_ready)
            measured.urls[name] = [mask_secrets(url) for url in server.settings.urls]
        async with AllOpen(servers):
            if DRAFTED in servers:
                measured.engine = servers[DRAFTED].name
                measured.requests = await write_requests(
                    servers[DRAFTED], evaluation.chosen, writer, max(evaluation.concurrency)
                )
            if not measured.requests:
                raise RunError(
                    "eval.prompts: the server can be given none of the prompts "
                    f"({dict(writer.left_out)})"
                )
            generator = LoadGenerator(servers, measured.requests, evaluation.max_new_tokens)
            measured.levels |= await generator.run(evaluation.concurrency)
            if DRAFTED in servers and writer.target is not None:
                measured.template = await check_template(
                    servers[DRAFTED], evaluation.chosen, writer.target
                )

    def summarize(self, answers: Answers) -> dict[str, ServedSummary]:
        return {
            name: self._summarize_level(answers.turns[name], *pair)
            for name, pair in self._list_levels().items()
        }

    def _summarize_level(
        self,
        turns: list[Turn],
        drafted: LevelResult,
        plain: LevelResult | None,
    ) -> ServedSummary:
        """Compute the numbers of one level; what cannot be known is None or empty."""
        source = find_counter_source(drafted)
        numbers = measure_system(turns, True, self.template)
        by_answer = (*ROUND_GROUPS, "by_category")
        numbers |= {"time_share": {}} | (
            {} if source == "requests" else {**{name: {} for name in by_answer}, "disparity": None}
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
            name: asdict(measure_latency(result, self.evaluation.limits))
            for name, result in results.items()
        }
        return ServedSummary(
            **numbers,
            label=f"{drafted.concurrency} at once",
            tree={"name": "chain", "depth": depth},
            engine="server",
            serving={"concurrency": drafted.concurrency, **times},
            unknown=unknown,
            lossless=None
            if plain is None or not self.evaluation.check
            else compare_outputs(turns, drafted, plain, self._find_reference()).summary(),
        )

    def _find_reference(self) -> Target | None:
        """Return our own target, if it rounds as the servers' does."""
        own = self.subject.own
        return own.target if own is not None and own.server_dtype == own.dtype else None

    def measure_more(self, answers: Answers, summaries: Mapping[str, SystemSummary]) -> Entries:
        first = answers.turns[DRAFTER]
        server = self._describe_server(summaries, first)
        own = self.subject.own
        if self.evaluation.check and own is not None and server["counts"] != "none":
            server["own_chain"] = own.compare(first, self.evaluation.max_new_tokens)
        return Entries(sections={"server": server})

    def _describe_server(
        self, summaries: Mapping[str, SystemSummary], first: list[Turn]
    ) -> dict[str, Any]:
        """Return the entry `server` of summary.json: where counts come from, and what else is
        said about the server.
        """
        measured = self.measured
        results = measured.levels[DRAFTED]
        source = find_counter_source(results[0])
        counted = count_rounds(first)
        totals = results[0].counters
        failed = {name: reason for result in results for name, reason in result.failures.items()}
        speedups = [
            {"concurrency": result.concurrency, **asdict(summary.speedup)}
            for result, summary in zip(results, summaries.values())
            if isinstance(summary, ServedSummary) and "speedup" not in summary.unknown
        ]
        return {
            "counts": source,
            "requests_counted": describe_counters(counted) if source == "requests" else None,
            "totals_counted": None if totals is None else describe_counters(totals),
            "speedups": speedups,
            "failed": failed,
            "template": None if measured.template is None else asdict(measured.template),
            "slo": self.evaluation.slo,
        }

    def describe(self, summary: SystemSummary) -> SourceSetting:
        measured, subject, evaluation = self.measured, self.subject, self.evaluation
        served = measured.models[DRAFTED]
        described = {
            "target": served.name,
            "recipe": "drafter",
            "drafter": {"choice": "served"},
            "dtype": UNKNOWN_DTYPE,
            "drafter_dtype": UNKNOWN_DTYPE,
            **subject.setting,
            "device": f"{measured.engine} at {', '.join(measured.urls[DRAFTED])}",
        }
        server = {
            "name": measured.engine,
            "url": measured.urls[DRAFTED],
            "model": served.name,
            "weights": served.weights,
            "max_length": served.max_length,
            "concurrency": list(evaluation.concurrency),
            "baseline_url": measured.urls.get(PLAIN),
            "prompts_as": "messages" if subject.target is None else "token ids",
            **subject.launched,
            # A started engine runs here.
            "machine": subject.setting.get("device") if subject.launched else None,
        }
        return SourceSetting(
            described,
            evaluation.concurrency[0],
            "greedy",
            False,
            {"engine": "server", "server": server},
        )


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


def compare_outputs(
    turns: Sequence[Turn],
    drafted: LevelResult,
    plain: LevelResult,
    target: Target | None = None,
) -> Identity:
    """Compare greedy answers with those of the server without a drafter, by tokens or, where
    there are none, by text.

    With `target`, our own model of the servers' type, an answer may part from its reference where
    the target's two best logits are a near tie. It does not count as identical then, because the
    server did not answer what follows from the reference's token, nor as a difference.
    """
    identity = Identity("greedy", True, "the server without a drafter")
    pairs = [
        (left, right)
        for left, right in zip(drafted.answers, plain.answers)
        if left is not None and right is not None
    ]
    for turn, (left, right) in zip(turns, pairs, strict=True):
        identity.checked += 1
        reference = right.completion.token_ids
        if left.completion.token_ids is not None and reference is not None:
            position = first_difference(left.completion.token_ids, reference)
        else:
            position = None if left.completion.message == right.completion.message else 0
        if position is None:
            identity.identical += 1
            continue
        has_token = reference is not None and position < len(reference)
        gap = None
        if target is not None and reference is not None and has_token:
            gap = logit_gap(target, turn.drafted.prompt + reference[:position])
        identity.record_difference(turn, position, gap, has_token)
    return identity
