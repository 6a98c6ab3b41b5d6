"""Decoding that never asks the device: rounds of one fixed shape, replayed as CUDA graphs, looked at every few rounds.

Shapes: B batch, P tokens that a round may emit, K rounds between two looks of the host.
It runs what `decode.decode` runs, in the same order, and gives the same tokens. Three graphs hold a round (draft, verify,
accept), with an event between them, so that a round's time splits without a synchronisation. Autoregressive decoding is the
round whose tree is the root alone. On a CPU the same rounds run without graphs, which is how tests see them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.compiled_layers import compiled_call, compiled_layers
from spectrain.models.features import Features
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain.trees.token_tree import TokenTree

from .acceptance import AcceptanceRule
from .loop import PARTS, Context, Generation, Watch, accept, check_room, emit, nodes_a_round, propose, read, timed, unwatched

NEVER = -1  # what no token equals
WARM_UP = 2  # rounds of the final shapes before a capture, in which kernels are loaded
KEPT = 4  # sizes of batches whose caches and graphs an engine keeps


def why_not(target: Target, rule: AcceptanceRule, drafter: Drafter | None, builder: TreeBuilder | None) -> str | None:
    """Why such rounds cannot be held in a graph; None where they can."""
    rope: Any = getattr(target.config, "rope_parameters", None) or {}
    if any(kind.get("rope_type") == "dynamic" for kind in (rope, *rope.values()) if isinstance(kind, dict)):
        return f"target {target.name} asks the device how long a text is, for its rotary embedding (rope_type=dynamic)"
    if not rule.on_device:
        return f"acceptance={rule.name} judges on the host"
    if drafter is not None and not drafter.is_captured:
        return f"drafter={type(drafter).__name__.lower()} asks the device while it drafts"
    if drafter is not None and builder is not None and drafter.settles_drafts and not builder.keeps_drafted:
        return f"tree={builder.name} leaves out nodes that drafter={type(drafter).__name__.lower()} has run"
    if builder is not None and not builder.is_fixed:
        return f"tree={builder.name} decides on the host how far to draft"
    return None


@dataclass
class HeldContext(Context):
    """A context whose tensors stay in their place from round to round, and from prompt to prompt."""

    held: tuple[Features, Tensor] | None = None  # where what was committed goes, [B, P], and how much of it is real

    def keep(self, seen: Features, path: Tensor, counts: Tensor, drafted: bool) -> None:
        if not drafted:  # nobody will read the features
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


@dataclass(frozen=True)
class Line:
    """What one round gave one row."""

    tokens: list[int]
    depth: int  # of the proposal
    nodes: int  # that the target ran, padding left out
    idle: int  # of these only draft


class Log:
    """The lines of up to K rounds, kept on the device until the host looks: tokens, how many of them count, other numbers."""

    def __init__(self, rounds: int, batch: int, width: int, device: torch.device) -> None:
        self.width = width
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.lines = torch.zeros(rounds, batch, width + 4, dtype=torch.int64, device=device)

    def write(self, tree: TokenTree, emitted: Tensor, counts: Tensor) -> None:
        depths = (tree.depths * (tree.valid & tree.emitted)).amax(1)
        numbers = torch.stack([counts, depths, tree.valid.sum(1), (tree.valid & ~tree.emitted).sum(1)], dim=1)
        self.lines.index_copy_(0, self.slot, torch.cat([emitted, numbers], dim=1)[None])
        self.slot.copy_((self.slot + 1) % len(self.lines))

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
        return [dict(zip(PARTS, (self._between(a, b) for a, b in zip(marks, marks[1:])))) for marks in rounds]

    def _between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1e3 if self.on_gpu else last - first


@dataclass
class State:
    """The tensors of a batch of one size, and the graphs that were captured over them."""

    context: HeldContext
    active: Tensor  # [B] not done yet
    left: Tensor  # [B] tokens still to emit
    stops: Tensor  # [S] stop tokens
    log: Log | None = None  # made when the first round tells how many tokens a round may emit
    carried: dict[str, Any] = field(default_factory=dict)  # what the drafter keeps between rounds, such as its cache
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the place of each tensor among them
    tree: TokenTree | None = None  # of the round that runs
    seen: Features | None = None
    warm: int = 0  # rounds run in the shapes that will be captured
    graphs: list[Any] = field(default_factory=list)  # a torch.cuda.CUDAGraph a part


class Engine:
    """Decodes batch after batch with one drafter, tree and rule; what is captured for a batch serves the next of its size.

    The host looks every `rounds` rounds, or as soon as all rows may have reached their limit. On a GPU, layers and a drafter
    that runs no model are compiled, by a `backend` of torch.compile; None is for none. Graphs hold the addresses of weights:
    these may be written to, but not replaced by others, as a change of dtype or merged adapters do.
    """

    def __init__(
        self,
        target: Target,
        rule: AcceptanceRule,
        drafter: Drafter | None = None,
        builder: TreeBuilder | None = None,
        rounds: int = 4,
        backend: str | None = "auto",
    ) -> None:
        reason = why_not(target, rule, drafter, builder)
        if reason is not None:
            raise UserError(f"eval.engine=captured: {reason}; use eval.engine=eager")
        if rounds < 1:
            raise ValueError(f"rounds={rounds}: use 1 or more")
        self.target, self.rule, self.drafter, self.builder, self.rounds = target, rule, drafter, builder, rounds
        self.layers = () if drafter is None else drafter.layers
        if backend == "auto":
            backend = "inductor" if target.device.type == "cuda" else None
        self.backend = None if drafter is not None and drafter.adapts_layers else backend
        self._models = [] if drafter is None else [model for model in drafter.modules() if isinstance(model, Target)]
        runs_model = drafter is None or self._models or drafter.settles_drafts  # whose layers are compiled, and nothing around
        self._propose = propose if runs_model or self.backend is None else compiled_call(propose, self.backend)
        self.states: dict[tuple[int, int], State] = {}

    @torch.inference_mode()
    def decode(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        rows: list[int] | None = None,
        ignore_eos: bool = False,
        watch: Watch = unwatched,
    ) -> list[Generation]:
        """Continue every prompt, as `decode.decode` does; `watch` sees what each look of the host brought."""
        device = self.target.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where events and graphs are made
            stop_ids: frozenset[int] = frozenset() if ignore_eos else self.target.stop_ids
            return self._decode(prompts, max_new_tokens, rows, stop_ids, watch)

    def is_ready(self, prompts: list[list[int]], max_new_tokens: int) -> bool:
        """Whether such a batch would begin with what it is decoded with: no compilation, capture or allocation is to come."""
        state = self.states.get(self._size(prompts, max_new_tokens))
        return self.target.device.type != "cuda" or (state is not None and bool(state.graphs))

    def _decode(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        rows: list[int] | None,
        stop_ids: frozenset[int],
        watch: Watch,
    ) -> list[Generation]:
        generations = [Generation(prompt, batch=len(prompts)) for prompt in prompts]
        began = time.perf_counter()
        state = self._begin(prompts, max_new_tokens, rows, stop_ids)
        for generation, token in zip(generations, state.context.root.tolist()):
            emit(generation, [token], stop_ids, max_new_tokens)
        state.active.copy_(torch.tensor([not generation.done for generation in generations]))
        prefilled = time.perf_counter() - began
        try:
            watch(generations)
            while not all(generation.done for generation in generations):
                self._advance(state, generations, stop_ids, max_new_tokens)
                watch(generations)
        finally:
            if self.drafter is not None:
                state.carried = {name: getattr(self.drafter, name) for name in self.drafter.carried}
        return timed(generations, prefilled)

    def _size(self, prompts: list[list[int]], max_new_tokens: int) -> tuple[int, int]:
        return len(prompts), bucket(max(map(len, prompts)) + max_new_tokens + 1)

    def _begin(self, prompts: list[list[int]], max_new_tokens: int, rows: list[int] | None, stop_ids: frozenset[int]) -> State:
        """The state of this size, with the prompts read into it."""
        check_room(self.target, max(map(len, prompts)), max_new_tokens)
        state = self._state(*self._size(prompts, max_new_tokens))
        context, cache = state.context, state.context.cache
        for name, value in state.carried.items():  # others may have decoded with the drafter in between
            setattr(self.drafter, name, value)
        if state.log is not None:
            state.log.slot.zero_()  # a decode that was interrupted has left it anywhere
        context.rows.copy_(torch.tensor(list(range(len(prompts))) if rows is None else rows))
        cache.empty()
        context.fresh, context.counts = read(self.target, prompts, self.rule, self.layers, context.rows, cache, context.tokens)
        context.round, context.shallow = 0, None
        state.left.fill_(max_new_tokens - 1)
        state.stops.copy_(torch.tensor(sorted(stop_ids) + [NEVER] * (len(state.stops) - len(stop_ids))))
        return state

    def _state(self, batch: int, bound: int) -> State:
        """Made once for a batch of so many rows of at most `bound` tokens; of several sizes the latest are kept."""
        if (batch, bound) in self.states:
            self.states[batch, bound] = self.states.pop((batch, bound))
        else:
            device, extra = self.target.device, nodes_a_round(self.builder) + 3
            if self.drafter is not None and self.builder is not None:
                extra += self.drafter.extra_nodes(self.builder)
            cache = TreeCache(self.target.num_layers, batch, bound + extra, device, bound)
            rows, counts, left = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(3))
            tokens = rows.new_zeros(batch, bound + extra)
            nothing = Features(tokens[:, :0], self.layers, torch.zeros(0, device=device))
            stops = rows.new_full((len(self.target.stop_ids),), NEVER)
            context = HeldContext(self.target, cache, tokens, rows, nothing, counts)
            self.states[batch, bound] = State(context, rows.bool(), left, stops)
            for size in list(self.states)[:-KEPT]:
                del self.states[size]
        return self.states[batch, bound]

    def _advance(self, state: State, generations: list[Generation], stop_ids: frozenset[int], max_new_tokens: int) -> None:
        """Run rounds up to the host's next look, and note what they gave."""
        began = time.perf_counter()
        marks = Marks(self.target.device)
        count = self._run(state, marks, max(max_new_tokens - len(one.output) for one in generations if not one.done))
        assert state.log is not None
        rounds = state.log.look(count)
        self._note(generations, rounds, marks.laps(), time.perf_counter() - began, stop_ids, max_new_tokens)

    def _run(self, state: State, marks: Marks, left: int) -> int:
        """Run rounds until the host must look: `left` tokens are the most that a row may still emit. How many rounds."""
        first = state.log is None or (self.drafter is not None and state.context.round == 0)
        if first:  # of other shapes: it drafts from the whole prompt
            self._round(state, marks)
            return 1
        if self.target.device.type == "cuda" and not state.graphs and state.warm >= WARM_UP:
            self._capture(state)
        assert state.log is not None
        count = max(1, min(self.rounds, -(-left // state.log.width)))
        for _ in range(count):
            self._replay(state, marks) if state.graphs else self._round(state, marks)
        return count

    def _round(self, state: State, marks: Marks) -> None:
        reads_prompt = self.drafter is not None and state.context.round == 0  # so it has other shapes
        marks()
        with self._compiling(state):
            for part in self._parts:
                part(state)
                marks()
        state.warm += not reads_prompt

    def _replay(self, state: State, marks: Marks) -> None:
        marks()
        for graph in state.graphs:
            graph.replay()
            marks()

    def _capture(self, state: State) -> None:
        """Record a round without running it, a graph a part; all of them share one pool of memory."""
        pool, graphs = torch.cuda.graph_pool_handle(), []
        with self._compiling(state):
            for part in self._parts:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    part(state)
                graphs.append(graph)
        state.graphs = graphs

    def _backend(self, state: State) -> str | None:
        """What compiles: nothing where a drafter reads a prompt, whose length is its own."""
        return self.backend if self.drafter is None or state.context.round > 0 else None

    def _compiling(self, state: State) -> AbstractContextManager[None]:
        """Compiled layers, of the drafter's own model too."""
        backend = self._backend(state)
        layers = [layer for model in (self.target, *self._models) for layer in model.layers]
        return nullcontext() if backend is None else compiled_layers(layers, backend)

    @property
    def _parts(self) -> tuple[Callable[[State], None], ...]:
        return self._draft, self._verify, self._accept

    def _draft(self, state: State) -> None:
        draft = propose if self._backend(state) is None else self._propose
        state.tree = draft(state.context, self.drafter, self.builder)

    def _verify(self, state: State) -> None:
        assert state.tree is not None
        if self.drafter is None:
            state.seen = self.target.verify(state.tree, state.context.cache)
        else:
            state.seen = self.drafter.verify(state.context, state.tree)

    def _accept(self, state: State) -> None:
        """Accept and commit; a row that has emitted a stop token or its last one goes on no further."""
        tree, seen = state.tree, state.seen
        assert tree is not None and seen is not None
        emitted, counts = accept(state.context, self.rule, self.drafter, tree, seen, state.active)
        for name in () if self.drafter is None else self.drafter.carried:
            value = getattr(self.drafter, name)
            if isinstance(value, Tensor):
                if name not in state.tensors:
                    state.tensors[name] = torch.empty_like(value)
                setattr(self.drafter, name, state.tensors[name].copy_(value))
        if state.log is None:
            state.log = Log(self.rounds, len(emitted), emitted.shape[1], emitted.device)
        state.log.write(tree, emitted, counts)
        real = torch.arange(emitted.shape[1], device=emitted.device) < counts[:, None]
        stopped = ((emitted[..., None] == state.stops).any(-1) & real).any(-1)
        state.left -= counts
        state.active &= ~stopped & (state.left > 0)

    def _note(
        self,
        generations: list[Generation],
        rounds: list[list[Line]],
        laps: list[dict[str, float]],
        seconds: float,
        stop_ids: frozenset[int],
        max_new_tokens: int,
    ) -> None:
        """Add what rounds emitted to those who were not done; the rounds that served one share the time that no part took."""
        used = []
        for lines, parts in zip(rounds, laps):
            going = [(one, line) for one, line in zip(generations, lines) if not one.done]
            for one, line in going:
                one.note(len(line.tokens), line.depth, line.nodes, line.idle, parts)
                one.cut = emit(one, line.tokens, stop_ids, max_new_tokens)
            used += [parts] if going else []
        outside = (seconds - sum(sum(parts.values()) for parts in used)) / len(used)
        for parts in used:
            parts[PARTS[-1]] = outside


def bucket(length: int) -> int:
    """The power of two, 256 at least, that a cache's bound is rounded up to: it decides how keys are split, so that one capture
    serves many prompts."""
    return max(256, 1 << (length - 1).bit_length())
