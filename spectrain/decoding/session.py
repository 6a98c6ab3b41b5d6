"""A target with a drafter, a tree builder and a rule, ready to decode: what is scored, chatted with and regenerated with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.images import have_images
from spectrain.models.packed_linears import pack_linears
from spectrain.models.target import Target
from spectrain.trees.base import RootOnlyBuilder, TreeBuilder

from .acceptance import AcceptanceRule, Greedy
from .calibration import calibrate_builders, resolve_rule
from .captured import CapturedRunner, capture_blocker
from .fallback import COMPILE_BACKENDS, ExecutionMode, Fallback
from .generation import DecodingSteps, Generation, OnRound, no_callback, run_to_end
from .guard import Guard, GuardedBuilder, GuardedDrafter
from .loop import EagerRunner, decode, decode_steps, make_request
from .pruning import PrunedDrafter, Pruning

EngineChoice = Literal["auto", "captured", "eager"]
"""auto: captured where there is a GPU; captured: also without one, where it is slower and gives the same."""

PromptLoader = Callable[[], list[list[int]]]
"""Prompts that are not scored, read when they are asked for."""


class RunnerSource(Protocol):
    """Makes the runner of a session in place of the eager loop, for decoding that works in another way."""

    @property
    def setting(self) -> str:
        """The setting that asked for it, which messages name."""

    @property
    def capture_blocker(self) -> str:
        """The reason why its rounds are not captured."""

    def connect(self, session: Session) -> Callable[[], EagerRunner]:
        """Check the session's parts and return what makes a runner for each request."""


@dataclass(frozen=True)
class Session:
    """Decodes prompts; without a drafter, autoregressively. What is captured for a batch serves the next of its size."""

    target: Target
    rule: AcceptanceRule
    drafter: Drafter | None = None
    builder: TreeBuilder | None = None
    guard: Guard | None = None  # decode autoregressively while drafting does not pay
    pruning: Pruning | None = None  # drop branches that the target's first layers find unlikely
    engine: EngineChoice = "eager"
    runner_source: RunnerSource | None = None  # makes another runner than the eager loop
    fallback: Fallback | None = None  # shared with what this is compared with; otherwise one of its own

    @classmethod
    def from_drafter(
        cls,
        target: Target,
        drafter: Drafter,
        builder: TreeBuilder,
        rule: AcceptanceRule,
        prompts: PromptLoader,
        engine: EngineChoice = "auto",
    ) -> Session:
        """A session whose drafter is on the target's device, tuned and, where the builder needs that, calibrated."""
        check_compatibility(drafter, builder, rule)
        target.pack_weights()
        prepare_for_decoding(drafter, target)
        tune_drafter(drafter, target, prompts, builder.depth)
        rule, builder, _ = resolve_rule(target, drafter, builder, rule, prompts)
        if builder.requirements:
            calibrate_builders(target, drafter, [builder], rule, prompts())
        return cls(target, rule, drafter, builder, engine=engine)

    def decode(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        sequence_ids: list[int] | None = None,
        ignore_eos: bool = False,
        on_round: OnRound = no_callback,
    ) -> list[Generation]:
        """Continue every prompt; `sequence_ids` key each text's random draws."""
        return run_to_end(self.decode_steps(prompts, max_new_tokens, sequence_ids, ignore_eos), on_round)

    def decode_steps(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        sequence_ids: list[int] | None = None,
        ignore_eos: bool = False,
    ) -> DecodingSteps:
        """The same, pausing after the prompts and after every look of the host."""
        request = make_request(self.target, prompts, max_new_tokens, sequence_ids, ignore_eos)
        if self.eager_reason is not None or have_images(prompts):
            return decode_steps(self._make_eager_runner(max_new_tokens), request)

        def begin(way: ExecutionMode) -> DecodingSteps:
            if way == "eager":
                return decode_steps(self._make_eager_runner(max_new_tokens), request)
            engine = self._captured_runner(way)
            engine.ensure_captured(request)
            return engine.decode_steps(request)

        return self._shared_fallback.run(begin)

    def warm_up(self, prompts: list[list[int]], max_new_tokens: int, sequence_ids: list[int] | None = None) -> None:
        """Compile and capture what such a batch runs, where that is to come, so that decoding it can be timed."""
        if self.eager_reason is not None or have_images(prompts):
            return

        def warm(way: ExecutionMode) -> None:
            if way != "eager" and not self._captured_runner(way).is_ready(prompts, max_new_tokens):
                self._captured_runner(way).decode(prompts, max_new_tokens, sequence_ids, ignore_eos=True)

        self._shared_fallback.run(warm)

    @property
    def prefers_capture(self) -> bool:
        return self.engine == "captured" or (self.engine == "auto" and self.target.device.type == "cuda")

    @property
    def eager_reason(self) -> str | None:
        """Why rounds are run one by one; None where they are captured."""
        if self._capture_blocker is None and self._shared_fallback.mode == "eager":
            return f"captured, they failed: {self._shared_fallback.failures['captured']}"
        return self._capture_blocker

    @cached_property
    def _capture_blocker(self) -> str | None:
        if not self.prefers_capture:
            return "not asked for"
        if self.runner_source is not None:
            return self.runner_source.capture_blocker
        if self.guard is not None or self.pruning is not None:
            return f"eval.{'guard' if self.guard is not None else 'prune_layer'} decides on the host"
        return capture_blocker(self.target, self.rule, self.drafter, self.builder)

    @cached_property
    def _shared_fallback(self) -> Fallback:
        return self.fallback or make_fallback(self.target, self.engine)

    @cached_property
    def _captured_runners(self) -> dict[ExecutionMode, CapturedRunner]:
        return {}

    def _captured_runner(self, mode: ExecutionMode) -> CapturedRunner:
        """The engine of this way; one that failed is let go, with what it holds of the device."""
        if mode not in self._captured_runners:
            self._captured_runners.clear()
            self._captured_runners[mode] = CapturedRunner(
                self.target, self.rule, self.drafter, self.builder, backend=COMPILE_BACKENDS[mode]
            )
        return self._captured_runners[mode]

    @cached_property
    def _make_runner(self) -> Callable[[], EagerRunner]:
        assert self.runner_source is not None
        return self.runner_source.connect(self)

    def _make_eager_runner(self, max_new_tokens: int) -> EagerRunner:
        if self.runner_source is not None:
            if self.guard is not None or self.pruning is not None:
                setting = self.runner_source.setting
                raise UserError(f"{setting}: it goes with neither eval.guard nor eval.prune_layer; leave those out")
            return self._make_runner()
        runner = EagerRunner(self.target, self.rule, self.drafter, self.builder)
        if self.pruning is not None:
            self.pruning.check_settings(self.rule, self.target)
            runner.round_drafter = PrunedDrafter(runner.round_drafter, self.pruning)
        if self.guard is not None:
            guarded = GuardedDrafter(runner.round_drafter, self.guard)
            runner.round_drafter, runner.builder = guarded, GuardedBuilder(self.builder or RootOnlyBuilder(), guarded)
            runner.extra_slots = max_new_tokens  # a drafter that catches up writes as many slots as the text furthest behind
        return runner


def make_fallback(target: Target, engine: EngineChoice) -> Fallback:
    """What decides how rounds run where one way fails; capture that was asked for by name is not given up."""
    return Fallback(target.device, last_mode="captured" if engine == "captured" else "eager")


def check_compatibility(drafter: Drafter, builder: TreeBuilder, rule: AcceptanceRule) -> None:
    """Refuse a rule that would be wrong about such trees."""
    if drafter.abilities.undrawn and "deterministic" not in rule.children:
        raise UserError(
            f"acceptance={rule.name}: it weighs p against the q that a child was drawn from, and copied tokens have none, nor "
            "have matched texts; use acceptance=greedy or match"
        )
    if drafter.abilities.undrawn and not drafter.abilities.copies_text and builder.children != "deterministic":
        raise UserError(f"tree.children={builder.children}: copied tokens are not drawn; use tree.children=deterministic")
    if not drafter.abilities.copies_text:  # otherwise nothing is drawn, whatever the builder is made for
        rule.check_children(builder.children, builder.is_chain)


def prepare_for_decoding(drafter: Drafter, target: Target) -> Drafter:
    """The drafter as it decodes: on the target's device, in its dtype, on the faster linears."""
    drafter = drafter.to(target.device, target.dtype).eval()
    pack_linears(drafter, low_precision=True)  # its drafts are checked by the target, whatever they are
    return drafter


def tune_drafter(drafter: Drafter, target: Target, prompts: PromptLoader, depth: int) -> None:
    """Let a drafter search its settings for trees so deep, where it has any to search."""
    tuning = drafter.abilities.tuning
    if tuning is None or not tuning.is_open(drafter):
        return
    texts = []
    for prompt in prompts():
        limit = min(tuning.answer_tokens(drafter), target.max_length - len(prompt))
        texts.append((prompt, decode(target, [prompt], Greedy(), limit)[0].output))
    tuning.search(drafter, target, texts, depth)


def require_capture(session: Session, key: str) -> None:
    """Refuse where capture was asked for by name and cannot be."""
    if session.engine == "captured" and session.eager_reason is not None:
        raise UserError(f"{key}=captured: {session.eager_reason}; use {key}=eager")
