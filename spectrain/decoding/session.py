"""A target with a drafter, a tree builder and a rule, ready to decode: what is scored, chatted with and regenerated with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.images import have_images
from spectrain.models.prepacked import pack_linears
from spectrain.models.target import Target
from spectrain.trees.base import RootAlone, TreeBuilder

from .acceptance import AcceptanceRule, Greedy
from .calibration import calibrate, settle
from .captured import Captured, why_not
from .fallback import BACKENDS, Fallback, Way
from .generation import Generation, Steps, Watch, unwatched, watched
from .guard import Guard, GuardedBuilder, GuardedDrafter
from .loop import Eager, asked, decode, steps
from .overlap import Overlap, Overlapped, Worker, check_overlap
from .pruning import PrunedDrafter, Pruning
from .streams import Streamed

Choice = Literal["auto", "captured", "eager"]
"""auto: captured where there is a GPU; captured: also without one, where it is slower and gives the same."""

Prompts = Callable[[], list[list[int]]]
"""Prompts that are not scored, read when they are asked for."""


@dataclass(frozen=True)
class Session:
    """Decodes prompts; without a drafter, autoregressively. What is captured for a batch serves the next of its size."""

    target: Target
    rule: AcceptanceRule
    drafter: Drafter | None = None
    builder: TreeBuilder | None = None
    guard: Guard | None = None  # decode autoregressively while drafting does not pay
    pruning: Pruning | None = None  # drop branches that the target's first layers find unlikely
    engine: Choice = "eager"
    overlap: Overlap | None = None  # another process drafts while the target verifies
    fallback: Fallback | None = None  # shared with what this is compared with; otherwise one of its own

    @classmethod
    def prepare(
        cls,
        target: Target,
        drafter: Drafter,
        builder: TreeBuilder,
        rule: AcceptanceRule,
        prompts: Prompts,
        engine: Choice = "auto",
    ) -> Session:
        """A session whose drafter is on the target's device, tuned and, where the builder needs that, calibrated."""
        check(drafter, builder, rule)
        target.pack()
        ready(drafter, target)
        tune(drafter, target, prompts, builder.depth)
        rule, builder, _ = settle(target, drafter, builder, rule, prompts)
        if builder.needs:
            calibrate(target, drafter, [builder], rule, prompts())
        return cls(target, rule, drafter, builder, engine=engine)

    def decode(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        sequence_ids: list[int] | None = None,
        ignore_eos: bool = False,
        watch: Watch = unwatched,
    ) -> list[Generation]:
        """Continue every prompt; `sequence_ids` key each text's random draws."""
        return watched(self.steps(prompts, max_new_tokens, sequence_ids, ignore_eos), watch)

    def steps(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        sequence_ids: list[int] | None = None,
        ignore_eos: bool = False,
    ) -> Steps:
        """The same, pausing after the prompts and after every look of the host."""
        request = asked(self.target, prompts, max_new_tokens, sequence_ids, ignore_eos)
        if self.why_eager is not None or have_images(prompts):
            return steps(self._eager(max_new_tokens), request)

        def begin(way: Way) -> Steps:
            if way == "eager":
                return steps(self._eager(max_new_tokens), request)
            engine = self._captured(way)
            engine.prove(request)
            return engine.steps(request)

        return self._fallback.run(begin)

    def warm_up(self, prompts: list[list[int]], max_new_tokens: int, sequence_ids: list[int] | None = None) -> None:
        """Compile and capture what such a batch runs, where that is to come, so that decoding it can be timed."""
        if self.why_eager is not None or have_images(prompts):
            return

        def warm(way: Way) -> None:
            if way != "eager" and not self._captured(way).is_ready(prompts, max_new_tokens):
                self._captured(way).decode(prompts, max_new_tokens, sequence_ids, ignore_eos=True)

        self._fallback.run(warm)

    @property
    def wants_capture(self) -> bool:
        return self.engine == "captured" or (self.engine == "auto" and self.target.device.type == "cuda")

    @property
    def why_eager(self) -> str | None:
        """Why rounds are run one by one; None where they are captured."""
        if self._why_not is None and self._fallback.way == "eager":
            return f"captured, they failed: {self._fallback.failed['captured']}"
        return self._why_not

    @cached_property
    def _why_not(self) -> str | None:
        if not self.wants_capture:
            return "not asked for"
        if self.overlap is not None:
            return "eval.overlap asks another process for drafts"
        if self.guard is not None or self.pruning is not None:
            return f"eval.{'guard' if self.guard is not None else 'prune_layer'} decides on the host"
        return why_not(self.target, self.rule, self.drafter, self.builder)

    @cached_property
    def _fallback(self) -> Fallback:
        return self.fallback or fallback_of(self.target, self.engine)

    @cached_property
    def _engines(self) -> dict[Way, Captured]:
        return {}

    def _captured(self, way: Way) -> Captured:
        """The engine of this way; one that failed is let go, with what it holds of the device."""
        if way not in self._engines:
            self._engines.clear()
            self._engines[way] = Captured(self.target, self.rule, self.drafter, self.builder, backend=BACKENDS[way])
        return self._engines[way]

    @cached_property
    def _worker(self) -> Worker | Streamed:
        assert self.overlap is not None
        check_overlap(self.drafter, self.builder, self.rule, self.overlap.outcomes)
        assert self.drafter is not None
        aside = Streamed if self.overlap.streams or self.target.device.type == "cuda" else Worker
        return aside(self.drafter, self.target)

    def _eager(self, max_new_tokens: int) -> Eager:
        if self.overlap is not None:
            if self.guard is not None or self.pruning is not None:
                raise UserError("eval.overlap: it goes with neither eval.guard nor eval.prune_layer; leave those out")
            worker = self._worker
            assert self.builder is not None
            return Overlapped(self.target, self.rule, worker, self.builder, self.overlap)
        runner = Eager(self.target, self.rule, self.drafter, self.builder)
        if self.pruning is not None:
            self.pruning.check(self.rule, self.target)
            runner.plays = PrunedDrafter(runner.plays, self.pruning)
        if self.guard is not None:
            guarded = GuardedDrafter(runner.plays, self.guard)
            runner.plays, runner.builder = guarded, GuardedBuilder(self.builder or RootAlone(), guarded)
            runner.extra_slots = max_new_tokens  # a drafter that catches up writes as many slots as the text furthest behind
        return runner


def fallback_of(target: Target, engine: Choice) -> Fallback:
    """What decides how rounds run where one way fails; capture that was asked for by name is not given up."""
    return Fallback(target.device, last="captured" if engine == "captured" else "eager")


def check(drafter: Drafter, builder: TreeBuilder, rule: AcceptanceRule) -> None:
    """Refuse a rule that would be wrong about such trees."""
    if drafter.abilities.undrawn and "deterministic" not in rule.children:
        raise UserError(
            f"acceptance={rule.name}: it weighs p against the q that a child was drawn from, and copied tokens have none, nor "
            "have matched texts; use acceptance=greedy or match"
        )
    if drafter.abilities.undrawn and not drafter.abilities.copies_text and builder.children != "deterministic":
        raise UserError(f"tree.children={builder.children}: copied tokens are not drawn; use tree.children=deterministic")
    if not drafter.abilities.copies_text:  # otherwise nothing is drawn, whatever the builder is made for
        rule.check(builder.children, builder.is_chain)


def ready(drafter: Drafter, target: Target) -> Drafter:
    """The drafter as it decodes: on the target's device, in its dtype, on the faster linears."""
    drafter = drafter.to(target.device, target.dtype).eval()
    pack_linears(drafter, rounded=True)  # its drafts are checked by the target, whatever they are
    return drafter


def tune(drafter: Drafter, target: Target, prompts: Prompts, depth: int) -> None:
    """Let a drafter search its settings for trees so deep, where it has any to search."""
    tuning = drafter.abilities.tuning
    if tuning is None or not tuning.is_open(drafter):
        return
    texts = []
    for prompt in prompts():
        limit = min(tuning.answer_tokens(drafter), target.max_length - len(prompt))
        texts.append((prompt, decode(target, [prompt], Greedy(), limit)[0].output))
    tuning.search(drafter, target, texts, depth)


def captured_or_refused(session: Session, key: str) -> None:
    """Refuse where capture was asked for by name and cannot be."""
    if session.engine == "captured" and session.why_eager is not None:
        raise UserError(f"{key}=captured: {session.why_eager}; use {key}=eager")
