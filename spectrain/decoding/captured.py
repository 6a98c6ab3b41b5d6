"""Captured rounds: rounds of fixed shape without a host synchronization, replayed as CUDA graphs
and read every few rounds.

Shapes: B batch, P tokens that a round may emit, K rounds between two reads by the host.
It runs the round of `loop.run_round`, part by part. Three graphs hold it (draft, verify, accept),
with an event between them, so that a round's time splits without a synchronisation. Autoregressive
decoding is the round whose tree is the root alone. On a CPU the same rounds run without graphs, as
in tests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter, Drafts, adapts_layers
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.compiled_layers import compile_function, compile_layers
from spectrain.models.device import available_bytes, capture_graph
from spectrain.models.target import Target
from spectrain.trees.base import RootOnlyBuilder, TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import TokenTree

from .acceptance import AcceptanceRule
from .generation import (
    ROUND_PARTS,
    DecodingSteps,
    Generation,
    OnRound,
    RoundRecord,
    no_callback,
    run_to_end,
)
from .loop import (
    NullDrafter,
    Request,
    RoundOutcome,
    check_context_length,
    decode_steps,
    make_context,
    make_request,
    required_layers,
    run_prompts,
    run_round,
    slots_per_round,
)
from .static_rounds import BatchState, LogCopy, RoundTimer, StaticContext

WARM_UP_ROUNDS = 2  # rounds of the final shapes before a capture, which load kernels
READS_PER_PAUSE = 8  # of a GPU, which waits for the host once in a pause
MAX_CACHED_STATES = 4  # batch sizes with caches and graphs in memory
# What a further batch size needs besides its cache, as a multiple of the cache.
SPARE_MEMORY = 1.25


def capture_blocker(
    target: Target, rule: AcceptanceRule, drafter: Drafter | None, builder: TreeBuilder | None
) -> str | None:
    """Return the reason why rounds cannot be captured in a graph, or None where they can."""
    reason = target.architecture.capture_blocker(target)
    if reason is not None:
        return reason
    if not rule.on_device:
        return f"acceptance={rule.name} decides on the host"
    if drafter is None or builder is None:
        return None
    name = type(drafter).__name__.lower()
    capture = drafter.capabilities.capture
    if capture is None:
        return f"drafter={name} reads values from the device while it drafts"
    if capture.needs_all_drafts and not builder.traits.verifies_all:
        return f"tree={builder.name} omits nodes that drafter={name} has run"
    if not builder.traits.is_fixed:
        return f"tree={builder.name} decides the draft length on the host"
    return None


class CompiledProposer:
    """Drafts and grows the tree in one compiled function; its draft hands over the finished
    tree.
    """

    def __init__(self, drafter: Drafter, builder: TreeBuilder, backend: str) -> None:
        self.drafter, self.builder = drafter, builder
        self.propose_tree = compile_function(_propose_tree, backend)
        self.verify, self.commit = drafter.verify, drafter.commit

    def draft(self, context: Context) -> Draft:
        tree = self.propose_tree(context, self.drafter, self.builder)
        return Draft(add_mask_nodes=lambda root: tree)


def _propose_tree(context: Context, drafter: Drafter, builder: TreeBuilder) -> TokenTree:
    return builder.grow(context, drafter.draft(context))


class CapturedRunner:
    """Runs batches with one drafter, tree builder and rule. A capture serves all batches of its
    size.

    The host reads every `rounds_per_read` rounds, or as soon as all texts may have reached their
    limit. A GPU runs the next rounds meanwhile, and pauses after every `READS_PER_PAUSE` reads. On
    a GPU, layers and a drafter that runs no model are compiled by a `backend` of
    torch.compile; None compiles nothing. Graphs hold the addresses of weights, which may be written
    to but not replaced, as a change of dtype or merged adapters would do.
    """

    def __init__(
        self,
        target: Target,
        rule: AcceptanceRule,
        drafter: Drafter | None = None,
        builder: TreeBuilder | None = None,
        rounds_per_read: int = 2,
        backend: str | None = "auto",
    ) -> None:
        reason = capture_blocker(target, rule, drafter, builder)
        if reason is not None:
            raise UserError(f"eval.engine=captured: {reason}; use eval.engine=eager")
        if rounds_per_read < 1:
            raise ValueError(f"rounds_per_read={rounds_per_read}: use 1 or more")
        self.target = target
        self.rule = rule
        self.drafter = drafter
        self.rounds_per_read = rounds_per_read
        self.builder = RootOnlyBuilder() if drafter is None or builder is None else builder
        self.round_drafter: Drafts = NullDrafter() if drafter is None else drafter
        if backend == "auto":
            backend = "inductor" if target.device.type == "cuda" else None
        self.backend = None if drafter is not None and adapts_layers(drafter) else backend
        self._drafter_models = (
            []
            if drafter is None
            else [model for model in drafter.modules() if isinstance(model, Target)]
        )
        capture = None if drafter is None else drafter.capabilities.capture
        # Of such a drafter only the model's layers are compiled.
        runs_model = capture is None or self._drafter_models or capture.needs_all_drafts
        self._compiled_drafter: Drafts = self.round_drafter
        if drafter is not None and self.backend is not None and not runs_model:
            self._compiled_drafter = CompiledProposer(drafter, self.builder, self.backend)
        self._state_names = () if capture is None else capture.state_names
        self.states: dict[tuple[int, int], BatchState] = {}
        self.checked_sizes: set[tuple[int, int]] = set()  # sizes of batches that have run once

    def decode(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        sequence_ids: list[int] | None = None,
        ignore_eos: bool = False,
        on_round: OnRound = no_callback,
    ) -> list[Generation]:
        """Continue every prompt, as `loop.decode` does; `on_round` is called after every read of
        the host.
        """
        return run_to_end(
            self.decode_steps(
                make_request(self.target, prompts, max_new_tokens, sequence_ids, ignore_eos)
            ),
            on_round,
        )

    def decode_steps(self, request: Request) -> DecodingSteps:
        """Continue the prompts of a request; yield the generations after prefill and after every
        read.
        """
        device = self.target.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._select_state(request)  # an error here leaves all state unchanged
            try:
                yield from decode_steps(self, request)
            finally:
                self.state.drafter_state = {
                    name: getattr(self.drafter, name) for name in self._state_names
                }

    def is_ready(self, prompts: list[list[int]], max_new_tokens: int) -> bool:
        """Tell whether such a batch needs no further compilation, capture or allocation."""
        state = self.states.get(self._state_key(prompts, max_new_tokens))
        return self.target.device.type != "cuda" or (state is not None and bool(state.graphs))

    def ensure_captured(self, request: Request) -> None:
        """Run a batch of a new size until it is compiled and captured, so that an error is raised
        before any token is emitted."""
        size = self._state_key(request.prompts, request.max_new_tokens)
        if size in self.checked_sizes or self.is_ready(request.prompts, request.max_new_tokens):
            return
        steps = self.decode_steps(request)
        for _ in steps:
            if self.is_ready(request.prompts, request.max_new_tokens):
                break
        steps.close()
        self.checked_sizes.add(size)

    # The contract of a runner, which `loop.decode_steps` uses

    def prefill(self, request: Request) -> list[int]:
        self.start_batch(request)
        return self.state.context.root.tolist()

    def start_batch(self, request: Request) -> None:
        """Run the prompts into the tensors of a batch of this size."""
        state = self._select_state(request)
        if state.context.log is not None:
            # an interrupted decoding leaves them at any line
            state.context.log.next_lines.zero_()
        state.context.cache.reset()
        run_prompts(state.context, self.drafter, self.rule, request)

    def _select_state(self, request: Request) -> BatchState:
        """Select the tensors of a batch of this size and restore the drafter's state."""
        check_context_length(self.target, request)
        self.state = self.get_state(*self._state_key(request.prompts, request.max_new_tokens))
        # another runner may have used the drafter in between
        for name, value in self.state.drafter_state.items():
            setattr(self.drafter, name, value)
        return self.state

    def run_rounds(self, tokens_left: int) -> list[tuple[list[RoundRecord], dict[str, float]]]:
        """Run rounds up to the next pause. Rounds that emitted tokens share the time that belongs
        to no part.
        """
        start = time.perf_counter()
        timer = RoundTimer(self.target.device)
        copies = [self._advance_rounds(timer, tokens_left)]
        # No round is under way where this returns: another runner's time would be that of both.
        while self.reads_late and len(copies) < READS_PER_PAUSE:
            # In every round an active text emits a token.
            tokens_left -= len(copies[-1].lines)
            if tokens_left <= 0:
                break
            copies.append(self._advance_rounds(timer, tokens_left))
            if not copies[-2].is_any_active:
                break
        records_by_round = [records for copy in copies for records in copy.read()]
        rounds = [
            (records, seconds)
            for records, seconds in zip(records_by_round, timer.read_seconds())
            if any(record.tokens for record in records)
        ]
        other_seconds = (
            time.perf_counter() - start - sum(sum(seconds.values()) for _, seconds in rounds)
        )
        for _, seconds in rounds:
            seconds[ROUND_PARTS[-1]] = other_seconds / len(rounds)
        return rounds

    @property
    def reads_late(self) -> bool:
        """Tell whether rounds run while the host reads those before them: replayed graphs do."""
        return bool(self.state.graphs)

    def _advance_rounds(self, timer: RoundTimer, tokens_left: int) -> LogCopy:
        """Start rounds up to the next read, and a copy of what they did; a text may emit at most
        `tokens_left` further tokens.
        """
        state = self.state
        is_first = state.context.log is None or (
            self.drafter is not None and state.context.round == 0
        )
        if is_first:  # it drafts from the prompt, so it has other shapes
            self.run_uncaptured_round(timer)
            return self._copy_log(1)
        if (
            self.target.device.type == "cuda"
            and not state.graphs
            and state.num_warm_rounds >= WARM_UP_ROUNDS
        ):
            self._capture_graphs()
        assert state.context.log is not None
        count = max(1, min(self.rounds_per_read, -(-tokens_left // state.context.log.width)))
        for _ in range(count):
            self._replay_graphs(timer) if state.graphs else self.run_uncaptured_round(timer)
        return self._copy_log(count)

    def _copy_log(self, rounds: int) -> LogCopy:
        context = self.state.context
        assert context.log is not None
        return context.log.start_copy(rounds, context.active)

    def run_uncaptured_round(self, timer: RoundTimer) -> None:
        """Run one round eagerly, without a graph."""
        reads_prompt = self.drafter is not None and self.state.context.round == 0
        timer()
        with self.use_compiled_layers():
            for _ in self.run_parts():
                timer()
        self.state.num_warm_rounds += not reads_prompt

    def _replay_graphs(self, timer: RoundTimer) -> None:
        timer()
        for graph in self.state.graphs:
            graph.replay()
            timer()

    def _capture_graphs(self) -> None:
        """Capture a round without running it, one graph per part; the graphs share one memory
        pool.
        """
        pool = torch.cuda.graph_pool_handle()
        graphs = []
        with self.use_compiled_layers():
            parts = self.run_parts()
            for _ in ROUND_PARTS[:-1]:
                graph = torch.cuda.CUDAGraph()
                with capture_graph(graph, pool):
                    next(parts)
                graphs.append(graph)
        self.state.graphs = graphs

    def run_parts(self) -> Iterator[None]:
        """Run one round part by part; the last part also logs the outcome and copies the
        drafter's state to static tensors.
        """
        state = self.state
        drafter = self.round_drafter if self._current_backend() is None else self._compiled_drafter
        for outcome in run_round(state.context, drafter, self.builder, self.rule):
            if outcome is not None:
                self._store_outcome(outcome)
            yield

    def _store_outcome(self, outcome: RoundOutcome) -> None:
        state = self.state
        for name in self._state_names:
            value = getattr(self.drafter, name)
            if isinstance(value, Tensor):
                if name not in state.static_tensors:
                    state.static_tensors[name] = torch.empty_like(value)
                setattr(self.drafter, name, state.static_tensors[name].copy_(value))

    def _current_backend(self) -> str | None:
        """Return the compiler backend; None in a drafter's first round, whose shapes depend on
        the prompt.
        """
        return self.backend if self.drafter is None or self.state.context.round > 0 else None

    def use_compiled_layers(self) -> AbstractContextManager[None]:
        """Run with compiled layers of the target and of the drafter's own model."""
        backend = self._current_backend()
        layers = [layer for model in (self.target, *self._drafter_models) for layer in model.layers]
        return nullcontext() if backend is None else compile_layers(layers, backend)

    def _state_key(self, prompts: list[list[int]], max_new_tokens: int) -> tuple[int, int]:
        return len(prompts), round_up_length(max(map(len, prompts)) + max_new_tokens + 1)

    def get_state(self, batch: int, bound: int) -> BatchState:
        """Return the state of a batch of texts of at most `bound` tokens; the latest few sizes
        stay in memory, as far as there is room.
        """
        if (batch, bound) in self.states:
            self.states[batch, bound] = self.states.pop((batch, bound))
            return self.states[batch, bound]
        slots = bound + slots_per_round(self.drafter, self.builder) + 3
        self._make_room(batch * slots)
        cache = self.target.new_cache(batch, slots, bound)
        layers = required_layers(self.drafter, self.rule)
        context = make_context(self.target, self.builder, cache, layers, len(self.target.stop_ids))
        if self.backend is not None:
            # one compilation serves every bound
            torch._dynamo.maybe_mark_dynamic(context.tokens, 1)
        self.states[batch, bound] = BatchState(
            StaticContext(
                **vars(context),
                keeps_features=self.drafter is not None,
                rounds_per_read=self.rounds_per_read,
            )
        )
        return self.states[batch, bound]

    def _make_room(self, num_slots: int) -> None:
        """Drop the oldest states until one more cache, of this many slots of all texts, has room.

        What a slot takes is known from the states that are there.
        """
        slot_bytes = max((state.slot_bytes for state in self.states.values()), default=0.0)
        needed = SPARE_MEMORY * num_slots * slot_bytes
        while self.states and (
            len(self.states) >= MAX_CACHED_STATES or available_bytes(self.target.device) < needed
        ):
            dropped = self.states.pop(next(iter(self.states)))
            if vars(self).get("state") is dropped:
                del self.state


def round_up_length(length: int) -> int:
    """Round a length up to the slots of a cache. The bound of a cache decides how keys are split,
    so one capture then serves many prompts.

    Up to 8,192 it is a power of two, at least 256; beyond, where slots are gigabytes, a multiple of
    an eighth of one, so that less than a fifth of the slots are spare.
    """
    power = max(256, 1 << (length - 1).bit_length())
    step = power if power <= 8192 else power // 8
    return -(-length // step) * step
