"""Rounds without a host-device synchronisation: of one fixed shape, replayed as CUDA graphs, looked at every few rounds.

Shapes: B batch, P tokens that a round may emit, K rounds between two looks of the host.
It runs the round of `loop.play`, part by part. Three graphs hold it (draft, verify, accept), with an event between them, so
that a round's time splits without a synchronisation. Autoregressive decoding is the round whose tree is the root alone. On a
CPU the same rounds run without graphs, which is how tests see them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter, Drafts
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.kernels.round_log import round_log
from spectrain.models.compiled_layers import compiled_call, compiled_layers
from spectrain.models.device import recording
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees.base import Draft, RootAlone, TreeBuilder
from spectrain.trees.token_tree import TokenTree

from .acceptance import AcceptanceRule
from .generation import PARTS, Generation, Line, Steps, Watch, unwatched, watched
from .loop import NoDraft, Outcome, Request, asked, check_room, empty_context, layers_read, play, read, slots_a_round, steps

WARM_UP = 2  # rounds of the final shapes before a capture, in which kernels are loaded
KEPT = 4  # sizes of batches whose caches and graphs are kept


def why_not(target: Target, rule: AcceptanceRule, drafter: Drafter | None, builder: TreeBuilder | None) -> str | None:
    """Why such rounds cannot be held in a graph; None where they can."""
    rope: Any = getattr(target.config, "rope_parameters", None) or {}
    if any(kind.get("rope_type") == "dynamic" for kind in (rope, *rope.values()) if isinstance(kind, dict)):
        return f"target {target.name} asks the device how long a text is, for its rotary embedding (rope_type=dynamic)"
    if target.attending.reaches is not None:
        return f"target {target.name} has layers that see unlike far, known by their numbers, which compiled code does not see"
    if target.attending.recurrent:
        return f"target {target.name} has layers that keep a state, which is computed level by level of a tree"
    if target.attending.own is not None:
        return f"target {target.name} has layers that attend by themselves, by masks that are made anew in every round"
    if not rule.on_device:
        return f"acceptance={rule.name} judges on the host"
    if drafter is None or builder is None:
        return None
    name, capture = type(drafter).__name__.lower(), drafter.abilities.capture
    if capture is None:
        return f"drafter={name} asks the device while it drafts"
    if capture.keeps_drafts and not builder.keeps_drafted:
        return f"tree={builder.name} leaves out nodes that drafter={name} has run"
    if not builder.is_fixed:
        return f"tree={builder.name} decides on the host how far to draft"
    return None


@dataclass
class HeldContext(Context):
    """A context whose tensors stay in their place from round to round, and from prompt to prompt."""

    is_read: bool = True  # by a drafter
    held: tuple[Features, Tensor] | None = None  # where what was committed goes, [B, P], and how much of it is real

    def keep(self, seen: Features, path: Tensor, counts: Tensor) -> None:
        if not self.is_read:  # nobody will read the features
            self.cache.commit(path, counts)
            return
        if self.held is None:
            hidden = seen.hidden.new_zeros(*path.shape, *seen.hidden.shape[2:])
            self.held = Features(torch.zeros_like(path), seen.layers, hidden), torch.zeros_like(counts)
        fresh, held_counts = self.held
        reads = fresh.hidden.numel() > 0
        self.cache.commit(path, counts, seen.hidden if reads else None, fresh.hidden if reads else None)
        fresh.tokens.copy_(seen.tokens.gather(1, path))
        held_counts.copy_(counts)
        self.fresh, self.counts = self.held
        self.round = 1  # all that is asked of it is whether it is 0, and compiled code would be made anew for every number


class Log:
    """The lines of up to K rounds, kept on the device until the host looks: tokens, how many of them count, other numbers."""

    def __init__(self, rounds: int, emitted: Tensor) -> None:
        batch, self.width = emitted.shape
        self.slot = torch.zeros(1, dtype=torch.int64, device=emitted.device)
        self.lines = torch.zeros(rounds, batch, self.width + 4, dtype=torch.int64, device=emitted.device)

    def write(self, outcome: Outcome) -> None:
        tree = outcome.tree
        assert tree.pruned is None, "what prunes asks the device"
        round_log(self.lines, self.slot, outcome.emitted, outcome.counts, tree.depths, tree.valid, tree.emitted)
        self.slot += 1

    def look(self, rounds: int) -> list[list[Line]]:
        """The rounds since the last look, a line a row: the one place where the host waits for the device."""
        found = self.lines[:rounds].tolist()
        self.slot.zero_()
        return [[Line(line[: line[self.width]], *line[self.width + 1 :]) for line in lines] for lines in found]


class Marks:
    """When the parts of rounds began and ended: events of a GPU, or the time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.made: list[Any] = []

    def __call__(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.made.append(event)
        else:
            self.made.append(time.perf_counter())

    def laps(self) -> list[dict[str, float]]:
        """Seconds of every round by part, once the device has done them."""
        rounds = [self.made[first : first + len(PARTS)] for first in range(0, len(self.made), len(PARTS))]
        return [dict(zip(PARTS, (self.between(a, b) for a, b in zip(marks, marks[1:])))) for marks in rounds]

    def between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1e3 if self.on_gpu else last - first


@dataclass
class State:
    """The tensors of a batch of one size, and the graphs that were captured over them."""

    context: HeldContext
    log: Log | None = None  # made when the first round tells how many tokens a round may emit
    carried: dict[str, Any] = field(default_factory=dict)  # what the drafter keeps between rounds, such as its cache
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the place of each tensor among them
    warm: int = 0  # rounds run in the shapes that will be captured
    graphs: list[Any] = field(default_factory=list)  # a torch.cuda.CUDAGraph a part


class ProposedAtOnce:
    """Drafter and builder as one compiled function: it drafts and grows, and what it has grown is handed on."""

    def __init__(self, drafter: Drafter, builder: TreeBuilder, backend: str) -> None:
        self.drafter, self.builder = drafter, builder
        self.propose = compiled_call(_propose, backend)
        self.verify, self.commit = drafter.verify, drafter.commit

    def draft(self, context: Context) -> Draft:
        tree = self.propose(context, self.drafter, self.builder)
        return Draft(complete=lambda root: tree)


def _propose(context: Context, drafter: Drafter, builder: TreeBuilder) -> TokenTree:
    return builder.grow(context, drafter.draft(context))


class Captured:
    """Runs batch after batch with one drafter, tree and rule; what is captured for a batch serves the next of its size.

    The host looks every `every` rounds, or as soon as all texts may have reached their limit. On a GPU, layers and a drafter
    that runs no model are compiled, by a `backend` of torch.compile; None is for none. Graphs hold the addresses of weights:
    these may be written to, but not replaced by others, as a change of dtype or merged adapters do.
    """

    def __init__(
        self,
        target: Target,
        rule: AcceptanceRule,
        drafter: Drafter | None = None,
        builder: TreeBuilder | None = None,
        every: int = 4,
        backend: str | None = "auto",
    ) -> None:
        reason = why_not(target, rule, drafter, builder)
        if reason is not None:
            raise UserError(f"eval.engine=captured: {reason}; use eval.engine=eager")
        if every < 1:
            raise ValueError(f"every={every}: use 1 or more")
        self.target, self.rule, self.drafter, self.every = target, rule, drafter, every
        self.builder = RootAlone() if drafter is None or builder is None else builder
        self.plays: Drafts = NoDraft() if drafter is None else drafter
        if backend == "auto":
            backend = "inductor" if target.device.type == "cuda" else None
        self.backend = None if drafter is not None and drafter.abilities.adapts_layers else backend
        self._models = [] if drafter is None else [model for model in drafter.modules() if isinstance(model, Target)]
        capture = None if drafter is None else drafter.abilities.capture
        runs_model = capture is None or self._models or capture.keeps_drafts  # whose layers are compiled, and nothing around
        self._compiled: Drafts = self.plays
        if drafter is not None and self.backend is not None and not runs_model:
            self._compiled = ProposedAtOnce(drafter, self.builder, self.backend)
        self._carried = () if capture is None else capture.carried
        self.states: dict[tuple[int, int], State] = {}
        self.proved: set[tuple[int, int]] = set()  # sizes of batches that have run once

    def decode(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        sequence_ids: list[int] | None = None,
        ignore_eos: bool = False,
        watch: Watch = unwatched,
    ) -> list[Generation]:
        """Continue every prompt, as `loop.decode` does; `watch` sees what each look of the host brought."""
        return watched(self.steps(asked(self.target, prompts, max_new_tokens, sequence_ids, ignore_eos)), watch)

    def steps(self, request: Request) -> Steps:
        """Continue what is asked for; it pauses after the prompts and after every look."""
        device = self.target.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where events and graphs are made
            self._take(request)  # what is refused changes nothing
            try:
                yield from steps(self, request)
            finally:
                self.state.carried = {name: getattr(self.drafter, name) for name in self._carried}

    def is_ready(self, prompts: list[list[int]], max_new_tokens: int) -> bool:
        """Whether such a batch would begin with what it is decoded with: no compilation, capture or allocation is to come."""
        state = self.states.get(self._size(prompts, max_new_tokens))
        return self.target.device.type != "cuda" or (state is not None and bool(state.graphs))

    def prove(self, request: Request) -> None:
        """Run a batch of a size that has not run here until it is compiled and captured: an error comes before anything is
        emitted."""
        size = self._size(request.prompts, request.max_new_tokens)
        if size in self.proved or self.is_ready(request.prompts, request.max_new_tokens):
            return
        going = self.steps(request)
        for _ in going:
            if self.is_ready(request.prompts, request.max_new_tokens):
                break
        going.close()
        self.proved.add(size)

    # What `loop.steps` asks of a runner

    def begin(self, request: Request) -> list[int]:
        self.start(request)
        return self.state.context.root.tolist()

    def start(self, request: Request) -> None:
        """Read the prompts into the tensors of a batch of this size."""
        state = self._take(request)
        if state.log is not None:
            state.log.slot.zero_()  # a decode that was interrupted has left it anywhere
        state.context.cache.empty()
        read(state.context, self.drafter, self.rule, request)

    def _take(self, request: Request) -> State:
        """The tensors of a batch of this size, and what the drafter keeps beside them."""
        check_room(self.target, request)
        self.state = self.sized(*self._size(request.prompts, request.max_new_tokens))
        for name, value in self.state.carried.items():  # others may have decoded with the drafter in between
            setattr(self.drafter, name, value)
        return self.state

    def rounds(self, left: int) -> list[tuple[list[Line], dict[str, float]]]:
        """Rounds up to the host's next look; those that served somebody share the time that no part took."""
        began = time.perf_counter()
        marks = Marks(self.target.device)
        count = self._advance(marks, left)
        assert self.state.log is not None
        lines = self.state.log.look(count)
        found = [(line, laps) for line, laps in zip(lines, marks.laps()) if any(one.tokens for one in line)]
        outside = time.perf_counter() - began - sum(sum(laps.values()) for _, laps in found)
        for _, laps in found:
            laps[PARTS[-1]] = outside / len(found)
        return found

    def _advance(self, marks: Marks, left: int) -> int:
        """Run rounds until the host must look: `left` tokens are the most that a text may still emit. How many rounds."""
        state = self.state
        first = state.log is None or (self.drafter is not None and state.context.round == 0)
        if first:  # of other shapes: it drafts from the whole prompt
            self.play_round(marks)
            return 1
        if self.target.device.type == "cuda" and not state.graphs and state.warm >= WARM_UP:
            self._capture()
        assert state.log is not None
        count = max(1, min(self.every, -(-left // state.log.width)))
        for _ in range(count):
            self._replay(marks) if state.graphs else self.play_round(marks)
        return count

    def play_round(self, marks: Marks) -> None:
        """Run one round, not a replay."""
        reads_prompt = self.drafter is not None and self.state.context.round == 0  # so it has other shapes
        marks()
        with self.compiling():
            for _ in self.parts():
                marks()
        self.state.warm += not reads_prompt

    def _replay(self, marks: Marks) -> None:
        marks()
        for graph in self.state.graphs:
            graph.replay()
            marks()

    def _capture(self) -> None:
        """Record a round without running it, a graph a part; all of them share one pool of memory."""
        pool, graphs = torch.cuda.graph_pool_handle(), []
        with self.compiling():
            parts = self.parts()
            for _ in PARTS[:-1]:
                graph = torch.cuda.CUDAGraph()
                with recording(graph, pool):
                    next(parts)
                graphs.append(graph)
        self.state.graphs = graphs

    def parts(self) -> Iterator[None]:
        """One round, part by part; the last also notes what it gave, and keeps what the drafter carries in its place."""
        state = self.state
        plays = self.plays if self._backend() is None else self._compiled
        for outcome in play(state.context, plays, self.builder, self.rule):
            if outcome is not None:
                self._keep(outcome)
            yield

    def _keep(self, outcome: Outcome) -> None:
        state = self.state
        for name in self._carried:
            value = getattr(self.drafter, name)
            if isinstance(value, Tensor):
                if name not in state.tensors:
                    state.tensors[name] = torch.empty_like(value)
                setattr(self.drafter, name, state.tensors[name].copy_(value))
        if state.log is None:
            state.log = Log(self.every, outcome.emitted)
        state.log.write(outcome)

    def _backend(self) -> str | None:
        """What compiles: nothing where a drafter reads a prompt, whose length is its own."""
        return self.backend if self.drafter is None or self.state.context.round > 0 else None

    def compiling(self) -> AbstractContextManager[None]:
        """Compiled layers, of the drafter's own model too."""
        backend = self._backend()
        layers = [layer for model in (self.target, *self._models) for layer in model.layers]
        return nullcontext() if backend is None else compiled_layers(layers, backend)

    def _size(self, prompts: list[list[int]], max_new_tokens: int) -> tuple[int, int]:
        return len(prompts), bucket(max(map(len, prompts)) + max_new_tokens + 1)

    def sized(self, batch: int, bound: int) -> State:
        """Made once for a batch of so many texts of at most `bound` tokens; of several sizes the latest are kept."""
        if (batch, bound) in self.states:
            self.states[batch, bound] = self.states.pop((batch, bound))
            return self.states[batch, bound]
        slots = bound + slots_a_round(self.drafter, self.builder) + 3
        cache = self.target.new_cache(batch, slots, bound)
        layers = layers_read(self.drafter, self.rule)
        plain = empty_context(self.target, self.builder, cache, layers, len(self.target.stop_ids))
        if self.backend is not None:
            torch._dynamo.maybe_mark_dynamic(plain.tokens, 1)  # one compilation serves every bound
        self.states[batch, bound] = State(HeldContext(**vars(plain), is_read=self.drafter is not None))
        for size in list(self.states)[:-KEPT]:
            del self.states[size]
        return self.states[batch, bound]


def bucket(length: int) -> int:
    """The power of two, 256 at least, that a cache's bound is rounded up to: it decides how keys are split, so that one capture
    serves many prompts."""
    return max(256, 1 << (length - 1).bit_length())
