"""A session: a target with a drafter, a tree builder and a rule, ready to decode. Scoring, chat
and regeneration use it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch

from spectrain.data.image_processor import have_images
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities
from spectrain.errors import UserError
from spectrain.models.accelerator import accelerator
from spectrain.models.fast import merge_linears, pack_linears, unpack_linears
from spectrain.models.target import Target
from spectrain.models.threads import DECODING_TRIAL, ThreadTuner
from spectrain.trees.base import RoundPlan, TreeBuilder

from .acceptance import AcceptanceRule, Greedy
from .calibration import calibrate_builders, resolve_rule
from .captured import CapturedRunner, capture_blocker
from .fallback import COMPILE_BACKENDS, ExecutionMode, Fallback
from .generation import DecodingSteps, Generation, OnRound, no_callback, run_to_end
from .loop import EagerRunner, Request, decode, decode_steps, make_request, prefill_context
from .selective import plan_rounds, time_sizes

EngineChoice = Literal["auto", "captured", "eager"]
"""auto captures rounds on a GPU; captured does so also on a CPU, where it is slower and gives
the same; eager never does.
"""

TRIAL_TOKENS = 24  # tokens that a number of threads is chosen by
WARM_UP_TOKENS = 3  # tokens that are decoded before a new number of prompts
MAX_WARM_UPS = 4  # answers of a drafter that a number of threads is chosen by, at most

PromptLoader = Callable[[], list[list[int]]]
"""Loads prompts that are not scored, when they are needed."""


class RoundChange(ABC):
    """What a package changes about the rounds of a session, which then run in the eager loop."""

    # Whether a round drafts, the tree that it verifies, or what runs the rounds in place of the
    # eager loop; that stands alone.
    part: ClassVar[Literal["plan", "tree", "runner"]]
    # The setting that selects it, for messages.
    setting_name: ClassVar[str]
    # Why rounds are not captured, after the name of the setting.
    capture_blocker: ClassVar[str] = "decides on the host"

    @abstractmethod
    def connect(self, session: Session) -> Callable[[EagerRunner], EagerRunner]:
        """Check the parts of a session, and return what changes the runner of each request; raise a
        UserError where they do not fit.
        """

    def summarize(self, answers: Sequence[Generation], target: Target) -> dict[str, Any]:
        """Return what it did in these answers, for a report."""
        return {}


class Session:
    """Decodes prompts, without a drafter autoregressively. A capture serves all batches of its
    size.
    """

    def __init__(
        self,
        target: Target,
        rule: AcceptanceRule,
        drafter: Drafter | None = None,
        builder: TreeBuilder | None = None,
        engine: EngineChoice = "eager",
        changes: tuple[RoundChange, ...] = (),
        # Shared by sessions that are compared with each other; None makes one for this session.
        fallback: Fallback | None = None,
    ) -> None:
        self.target, self.rule, self.drafter, self.builder = target, rule, drafter, builder
        self.engine, self.changes = engine, changes
        self.fallback = fallback or make_fallback(target, engine)
        # The numbers of prompts and threads that `warm_up` has prepared.
        self._prepared_settings = set[tuple[int, int]]()
        self._captured_runners: dict[ExecutionMode, CapturedRunner] = {}

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
        """Make a session: move the drafter to the target's device, tune it, and calibrate the
        builder where it needs that.
        """
        check_compatibility(drafter.capabilities, builder, rule)
        target.pack_weights()
        prepare_for_decoding(drafter, target)
        choose_threads(target, prompts)
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
        """Continue every prompt. `sequence_ids` key the random draws of each text."""
        return run_to_end(
            self.decode_steps(prompts, max_new_tokens, sequence_ids, ignore_eos), on_round
        )

    def decode_steps(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        sequence_ids: list[int] | None = None,
        ignore_eos: bool = False,
    ) -> DecodingSteps:
        """Continue every prompt; yield the generations after prefill and after every host
        synchronization.
        """
        request = make_request(self.target, prompts, max_new_tokens, sequence_ids, ignore_eos)
        if self.eager_reason is not None or have_images(prompts):
            return decode_steps(self._make_eager_runner(request), request)

        def start_decoding(mode: ExecutionMode) -> DecodingSteps:
            if mode == "eager":
                return decode_steps(self._make_eager_runner(request), request)
            runner = self._captured_runner(mode)
            runner.ensure_captured(request)
            return runner.decode_steps(request)

        return self.fallback.run(start_decoding)

    def warm_up(
        self, prompts: list[list[int]], max_new_tokens: int, sequence_ids: list[int] | None = None
    ) -> None:
        """Compile, capture and time what such a batch needs, so that its decoding can be timed."""
        if have_images(prompts):
            return
        if self.eager_reason is not None:
            self._prepare_batch(prompts, max_new_tokens, sequence_ids)
            return

        def compile_and_capture(mode: ExecutionMode) -> None:
            if mode != "eager" and not self._captured_runner(mode).is_ready(
                prompts, max_new_tokens
            ):
                self._captured_runner(mode).decode(
                    prompts, max_new_tokens, sequence_ids, ignore_eos=True
                )

        self.fallback.run(compile_and_capture)

    @torch.inference_mode()
    def _prepare_batch(
        self, prompts: list[list[int]], max_new_tokens: int, sequence_ids: list[int] | None
    ) -> None:
        """Decode a few tokens of a new number of prompts, which loads the kernels of that, and time
        the verification of trees for it if the tree builder chooses by measured times."""
        if self.drafter is None or self.builder is None or self._has_own_runner:
            return
        if self.threads is not None:
            torch.set_num_threads(self.threads.chosen)
        setting = len(prompts), torch.get_num_threads()
        if setting in self._prepared_settings:
            return
        self._prepared_settings.add(setting)
        # These rounds say nothing about others. Only a builder that decides by its rounds is
        # copied: others may hold a drafter.
        policy = self.builder.round_policy
        builder = copy.deepcopy(self.builder) if policy.decides_to_draft else self.builder
        runner = EagerRunner(self.target, self.rule, self.drafter, builder)
        runner.follow_plan(RoundPlan(is_observed=False))
        limit = min(WARM_UP_TOKENS, max_new_tokens)
        request = make_request(self.target, prompts, limit, sequence_ids, ignore_eos=True)
        run_to_end(decode_steps(runner, request), no_callback)
        if policy.decides_to_draft:
            request = make_request(self.target, prompts, max_new_tokens)
            policy.refresh_times(
                prefill_context(self.target, self.rule, request, self.drafter, self.builder),
                time_sizes,
                is_new_batch=True,
            )

    @cached_property
    def threads(self) -> ThreadTuner | None:
        """What chooses the number of threads of this session's rounds; None where there is
        nothing to choose.
        """
        return accelerator().make_tuner(self.target.device, DECODING_TRIAL)

    def choose_threads(self, prompt: list[int], max_new_tokens: int) -> None:
        """Decode a prompt until a number of threads is chosen, so that scored rounds begin with
        it.
        """
        for _ in range(MAX_WARM_UPS):
            if (
                self.threads is None
                or self.threads.is_chosen
                or self.eager_reason is None
                or self._has_own_runner
            ):
                return
            self.decode([prompt], max_new_tokens, ignore_eos=True)

    @property
    def prefers_capture(self) -> bool:
        return self.engine == "captured" or (
            self.engine == "auto" and self.target.device.type == "cuda"
        )

    @property
    def eager_reason(self) -> str | None:
        """Return the reason why rounds run eagerly, or None where they are captured."""
        if self._capture_blocker is None and self.fallback.mode == "eager":
            return f"captured, they failed: {self.fallback.failures['captured']}"
        return self._capture_blocker

    @cached_property
    def _capture_blocker(self) -> str | None:
        if not self.prefers_capture:
            return "not requested"
        if self.changes:
            return f"{self.changes[0].setting_name} {self.changes[0].capture_blocker}"
        return capture_blocker(self.target, self.rule, self.drafter, self.builder)

    def _captured_runner(self, mode: ExecutionMode) -> CapturedRunner:
        """Return the captured runner of this mode; drop one that failed, with its memory on the
        device.
        """
        if mode not in self._captured_runners:
            self._captured_runners.clear()
            self._captured_runners[mode] = CapturedRunner(
                self.target, self.rule, self.drafter, self.builder, backend=COMPILE_BACKENDS[mode]
            )
        return self._captured_runners[mode]

    @property
    def _has_own_runner(self) -> bool:
        return any(change.part == "runner" for change in self.changes)

    @cached_property
    def _connected_changes(self) -> list[Callable[[EagerRunner], EagerRunner]]:
        """What changes the runner of each request."""
        if self._has_own_runner and len(self.changes) > 1:
            own = next(change.setting_name for change in self.changes if change.part == "runner")
            others = [name for change in self.changes if (name := change.setting_name) != own]
            raise UserError(
                f"{own}: it cannot be combined with {' or '.join(others)}; leave those out"
            )
        return [change.connect(self) for change in self.changes]

    def _make_eager_runner(self, request: Request) -> EagerRunner:
        runner = EagerRunner(self.target, self.rule, self.drafter, self.builder, self.threads)
        for change_runner in self._connected_changes:
            runner = change_runner(runner)
        if not self._has_own_runner and runner.policy.decides_to_draft:
            plan_rounds(runner, request)
        return runner


def make_fallback(target: Target, engine: EngineChoice) -> Fallback:
    """Make what decides how rounds run after a failure. Capture that the user requested by name
    has no eager fallback.
    """
    return Fallback(target.device, last_mode="captured" if engine == "captured" else "eager")


def check_compatibility(
    capabilities: Capabilities, builder: TreeBuilder, rule: AcceptanceRule
) -> None:
    """Raise a UserError where the rule is not valid for the trees of a drafter with these
    capabilities and this builder.
    """
    if capabilities.has_no_q and "deterministic" not in rule.children:
        raise UserError(
            f"acceptance={rule.name}: it weighs p against the q that a child was drawn from, and "
            "copied tokens have none, nor have matched texts; use acceptance=greedy or match"
        )
    if capabilities.has_no_q and not capabilities.is_copier and builder.children != "deterministic":
        raise UserError(
            f"tree.children={builder.children}: copied tokens are not drawn; use "
            "tree.children=deterministic"
        )
    if not capabilities.is_copier:  # otherwise nothing is drawn, whatever the builder is made for
        rule.check_children(builder.children, builder.traits.is_chain)


def choose_threads(target: Target, prompts: PromptLoader) -> None:
    """Set the number of threads that suits autoregressive steps, for calibrations that follow."""
    session = Session(target, Greedy(), engine="eager")
    if session.threads is not None:
        session.choose_threads(prompts()[0], TRIAL_TOKENS)


def prepare_for_decoding(drafter: Drafter, target: Target, low_precision: bool = True) -> Drafter:
    """Move the drafter to the target's device and dtype, set it to evaluation and pack its linear
    layers.

    On a CPU, large weights are packed into fewer bits, because the target checks all drafts.
    Without `low_precision` the drafter computes as it was loaded. On a GPU the linears that read
    the same input become one product.
    """
    drafter = drafter.to(target.device, target.dtype).eval()
    # Training packs in full precision.
    unpack_linears(drafter)
    if low_precision:
        pack_linears(drafter, low_precision=True)
    if target.device.type == "cuda":
        merge_linears(drafter, trainable=True)
    for part in drafter.modules():
        if isinstance(part, Drafter) and (prepare := part.capabilities.prepare_kernels) is not None:
            prepare(part)
    return drafter


def tune_drafter(drafter: Drafter, target: Target, prompts: PromptLoader, depth: int) -> None:
    """Let a drafter that has settings to search search them, for trees of this depth."""
    search = drafter.capabilities.search
    if search is None:
        return
    texts = []
    for prompt in prompts():
        limit = min(search.answer_tokens, target.max_length - len(prompt))
        texts.append((prompt, decode(target, [prompt], Greedy(), limit)[0].output))
    search.run(drafter, target, texts, depth)


def require_capture(session: Session, key: str) -> None:
    """Raise a UserError where the user requested capture by name and rounds cannot be captured."""
    if session.engine == "captured" and session.eager_reason is not None:
        raise UserError(f"{key}=captured: {session.eager_reason}; use {key}=eager")
