"""A target whose layers run in several processes, with several runs of one text in flight
(PipeInfer, arXiv 2407.11798).

Every process has the layers of one stage and a cache of its own; pipes carry hidden states from
stage to stage. The main process drafts, sends runs and judges them in order. A run says where it
begins, and each stage cuts its cache there, so a cancelled run needs no message of its own: a
number that all processes share tells stages which runs to drop.
Shapes: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import multiprocessing
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.generation import RoundRecord
from spectrain.decoding.loop import EagerRunner, Request
from spectrain.decoding.session import RoundChange, Session
from spectrain.drafters.base import Drafter
from spectrain.errors import RunError, UserError
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain_research.shared.follower import Follower

DraftTokens = Callable[[list[int], int], list[int]]  # (text, number of tokens) -> drafted tokens


@dataclass(frozen=True)
class StageRun:
    """A piece of a draft on its way through the stages."""

    number: int
    start: int  # position of its first token
    tokens: list[int]
    max_length: int | None = None  # largest length of a new text; None continues the earlier one
    # [1, N, D] after the last stage, or logits [1, N, V]; None where a stage dropped the run
    states: Tensor | None = None
    seconds: tuple[float, ...] = ()  # that every stage took


@dataclass
class Pipeline(RoundChange):
    """How a target is cut into stages, and counts of the runs."""

    num_stages: int = 2
    in_flight: int = 3
    delay: float = 0.0  # seconds that every stage waits in a run, to stand for slower stages
    cancels_early: bool = True
    num_runs: int = 0
    num_dropped: int = 0  # runs that a stage dropped
    draft_tokens: DraftTokens | None = field(default=None, repr=False)  # in place of the drafter's
    # of every judged run
    stage_seconds: list[tuple[float, ...]] = field(default_factory=list, repr=False)
    draft_seconds: list[float] = field(default_factory=list, repr=False)  # of every drafted run

    part = "runner"
    setting_name = "eval.pipeline"
    capture_blocker = "runs layers in other processes"

    def connect(self, session: Session) -> Callable[[EagerRunner], EagerRunner]:
        """Start the processes of the stages; all requests use them one after another."""
        assert session.builder is not None
        check_pipeline(session.drafter, session.builder, session.rule, session.target, self)
        processes = StageProcesses(session.target, self)
        draft_tokens, builder = self.draft_tokens, session.builder
        follower = None if session.drafter is None else Follower(session.drafter, session.target)
        return lambda runner: PipelinedRunner(
            (session.target, session.rule, builder), processes, self, follower or draft_tokens
        )


def check_pipeline(
    drafter: Drafter | None,
    builder: TreeBuilder,
    rule: AcceptanceRule,
    target: Target,
    pipeline: Pipeline,
) -> None:
    """Raise a UserError for drafters, trees, rules and targets that a pipeline cannot run."""
    is_rewindable = drafter is not None and drafter.capabilities.rewind is not None
    if pipeline.draft_tokens is None and not is_rewindable:
        raise UserError(
            "eval.pipeline: this drafter reads what the target computes, so it cannot draft "
            "ahead of it; use drafter=causal, universal or ngram"
        )
    if (
        not builder.traits.is_chain
        or not builder.traits.is_fixed
        or builder.children != "deterministic"
    ):
        raise UserError(
            "eval.pipeline: runs are chains of one length; use tree=chain without tree.stop or "
            "tree.children"
        )
    if not rule.fixes_choice:
        raise UserError(
            f"acceptance={rule.name}: its tokens depend on the drafts; use greedy or match with "
            "eval.pipeline"
        )
    if target.device.type != "cpu":
        raise UserError(
            f"eval.pipeline: its processes are for a CPU, and the target is on {target.device}; "
            "use target.device=cpu"
        )
    if not 1 <= pipeline.num_stages <= target.num_layers:
        raise UserError(
            f"eval.stages={pipeline.num_stages}: {target.name} has {target.num_layers} layers; "
            "use as many or fewer"
        )


@torch.inference_mode()
def serve_stage(
    ends: tuple[Connection, Connection],
    others: list[Connection],
    target: Target,
    span: tuple[int, int],
    control: tuple[Any, float],
) -> None:
    """Run the layers `span` of every run that arrives, until the connection closes; drop runs
    below the shared number.
    """
    receiver, sender = ends
    for other in others:
        other.close()
    # A forked process lacks the parent's threads.
    torch.set_num_threads(1)
    first_valid, delay = control
    cache = None
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            run: StageRun = receiver.recv()
            if run.max_length is not None:
                cache = target.new_cache(1, run.max_length)
            if run.number < first_valid.value or (span[0] and run.states is None):
                sender.send(replace(run, states=None))
                continue
            assert cache is not None
            begin = time.perf_counter()
            cache.crop(torch.tensor([run.start]))
            states = run_layers(target, cache, run, span)
            time.sleep(delay)
            sender.send(
                replace(run, states=states, seconds=(*run.seconds, time.perf_counter() - begin))
            )


def run_layers(target: Target, cache: Any, run: StageRun, span: tuple[int, int]) -> Tensor:
    """Run some layers over the tokens of a run and return what enters the next stage, or the
    logits after the last one.
    """
    first, last = span
    is_last = last == target.num_layers
    tokens = torch.tensor([run.tokens])
    positions = run.start + torch.arange(len(run.tokens))[None]
    layers = LayerSpan(
        first=first, last=None if is_last else last, hidden=run.states if first else None
    )
    plan = ForwardPlan(
        () if is_last else (last,), is_last, positions=positions, cache=cache, span=layers
    )
    features = target.run(tokens, plan)
    cache.commit(None, torch.tensor([len(run.tokens)]))
    states = features.logits if is_last else features.at_layer(last)
    assert states is not None
    return states.clone()


class StageProcesses:
    """The processes of the stages, forked from this one with its weights, and the pipes between
    them.
    """

    def __init__(self, target: Target, pipeline: Pipeline) -> None:
        count = pipeline.num_stages
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(count + 1)]
        bounds = [round(number * target.num_layers / count) for number in range(count + 1)]
        self.first_valid = context.Value("l", 0)
        self.cancels_early = pipeline.cancels_early
        every = [end for pipe in pipes for end in pipe]
        self.processes = []
        for number in range(count):
            ends = pipes[number][0], pipes[number + 1][1]
            others = [end for end in every if end not in ends]
            span = (bounds[number], bounds[number + 1])
            arguments = ends, others, target, span, (self.first_valid, pipeline.delay)
            self.processes.append(context.Process(target=serve_stage, args=arguments, daemon=True))
            self.processes[-1].start()
        self.sender = pipes[0][1]
        self.receiver = pipes[-1][0]
        for end in every:
            if end not in (self.sender, self.receiver):
                end.close()
        weakref.finalize(self, self.sender.close)
        self.next_number = 1

    def send_run(self, start: int, tokens: list[int], max_length: int | None = None) -> StageRun:
        """Send a run to the first stage."""
        run = StageRun(self.next_number, start, tokens, max_length)
        self.next_number += 1
        try:
            self.sender.send(run)
        except OSError as error:
            raise RunError("eval.pipeline: a process of a stage has ended") from error
        return run

    def receive_run(self, number: int) -> tuple[StageRun, int]:
        """Wait for a run and return it with its logits, and how many dropped runs arrived before
        it.
        """
        dropped = 0
        try:
            while True:
                run: StageRun = self.receiver.recv()
                if run.number == number:
                    return run, dropped
                dropped += run.states is None
        except (EOFError, OSError) as error:
            raise RunError("eval.pipeline: a process of a stage has ended") from error

    def cancel_runs(self) -> None:
        """Make every run that was sent so far invalid."""
        if self.cancels_early:
            self.first_valid.value = self.next_number


class PipelinedRunner(EagerRunner):
    """Decodes one text by stages in other processes. A round is a run: drafts, sent ahead, and
    the judgement of the oldest.
    """

    def __init__(
        self,
        parts: tuple[Target, AcceptanceRule, TreeBuilder],
        processes: StageProcesses,
        pipeline: Pipeline,
        drafts: Follower | DraftTokens | None,
    ) -> None:
        super().__init__(*parts[:2])
        self.builder = parts[2]
        self.processes = processes
        self.pipeline = pipeline
        self.drafts = drafts
        self.text: list[int] = []  # emitted tokens, the newest last
        self.stream: list[int] = []  # drafts in flight after it
        self.runs: deque[StageRun] = deque()

    def prefill(self, request: Request) -> list[int]:
        if len(request.prompts) != 1:
            raise UserError(
                f"eval.pipeline: {len(request.prompts)} texts at once; use eval.batch_size=1"
            )
        (prompt,), depth = request.prompts, self.builder.depth
        room = (self.pipeline.in_flight + 2) * (depth + 2)
        self.processes.cancel_runs()
        self.sequence_ids = torch.tensor(request.sequence_ids)
        if isinstance(self.drafts, Follower):
            self.drafts.start_text(len(prompt) + request.max_new_tokens + 2 * room, depth)
        run = self.processes.send_run(
            0, list(prompt), len(prompt) + request.max_new_tokens + 2 * room
        )
        run, _ = self.processes.receive_run(run.number)
        self.text = [*prompt, self._choose_tokens(run)[-1]]
        self.stream = []
        self.runs.clear()
        return self.text[-1:]

    def run_rounds(self, tokens_left: int) -> list[tuple[list[RoundRecord], dict[str, float]]]:
        begin = time.perf_counter()
        while len(self.runs) < self.pipeline.in_flight and self._send_draft():
            pass
        drafted = time.perf_counter()
        run = self.runs.popleft()
        run, dropped = self.processes.receive_run(run.number)
        self.pipeline.num_dropped += dropped
        self.pipeline.stage_seconds.append(run.seconds)
        received = time.perf_counter()
        emitted = self._judge_run(self._choose_tokens(run))
        seconds = {
            "draft": drafted - begin,
            "verify": received - drafted,
            "accept": time.perf_counter() - received,
            "other": 0.0,
        }
        record = RoundRecord(emitted, self.builder.depth, len(run.tokens), 0)
        return [([record], seconds)]

    def _choose_tokens(self, run: StageRun) -> list[int]:
        """Return the target's token after every token of a run."""
        assert run.states is not None
        positions = run.start + 1 + torch.arange(len(run.tokens))[None]
        tokens: list[int] = self.rule.choose_tokens(run.states, self.sequence_ids, positions)[
            0
        ].tolist()
        return tokens

    def _send_draft(self) -> bool:
        """Draft after all that is in flight and send it; return whether anything was sent."""
        ahead = [*self.text, *self.stream]
        depth = self.builder.depth
        begin = time.perf_counter()
        if isinstance(self.drafts, Follower):
            drafts = self.drafts.draft(ahead, depth, lambda: False)
        else:
            drafts = self.drafts(ahead, depth) if self.drafts is not None else []
        self.pipeline.draft_seconds.append(time.perf_counter() - begin)
        if self.runs and not drafts:
            return False
        is_fresh = not self.runs and not self.stream
        tokens, start = ([ahead[-1], *drafts], len(ahead) - 1) if is_fresh else (drafts, len(ahead))
        self.runs.append(self.processes.send_run(start, tokens))
        self.stream += drafts
        self.pipeline.num_runs += 1
        return bool(drafts)

    def _judge_run(self, chosen: list[int]) -> list[int]:
        """Emit the tokens that a run chose; cancel later runs after the first wrong draft."""
        emitted = []
        for token in chosen:
            emitted.append(token)
            self.text.append(token)
            if not self.stream or self.stream.pop(0) != token:
                self.processes.cancel_runs()
                self.runs.clear()
                self.stream.clear()
                break
        return emitted
