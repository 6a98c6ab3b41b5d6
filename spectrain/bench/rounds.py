"""Rounds of the engine at any size and length, without weights, text or a prefix that was read.

Shapes: B batch, N nodes, P path length, V vocabulary.
Weights are random and a prefix is random numbers in the caches, which cost what real ones cost. How much of a draft is kept
follows a script (`Scripted`). So a real model's time a round is measured with no model; what it accepts is for others to say.
"""

import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import BatchState, CapturedRunner, RoundTimer, round_up_length
from spectrain.decoding.fallback import COMPILE_BACKENDS, ExecutionMode, Fallback
from spectrain.decoding.generation import ROUND_PARTS, Generation
from spectrain.decoding.loop import Request
from spectrain.drafters.abilities import Abilities, Capture
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.errors import describe_error
from spectrain.models.device import synchronize_device
from spectrain.models.target import Target
from spectrain.trees import Static, TreeBuilder
from spectrain.trees.base import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree

PROMPT_LENGTH = 8  # tokens of the prompt that is read before the prefix is made up
SPARE_SLOTS = 192  # slots behind the bound of a cache that several engines share: more than any of their rounds needs
UNLIMITED_TOKENS = 1 << 30  # tokens that a row may emit


class ScriptedAcceptance(Greedy):
    """Keeps, of the path of first children, as many nodes as its script says for the row's length. NOT lossless.

    It costs what `Greedy` costs: every node's best token is found, the last kept one's is the bonus.
    """

    name = "scripted"
    lossless = False

    def __init__(self, slots: int, device: torch.device) -> None:
        self.emit_counts = torch.ones(slots, dtype=torch.int64, device=device)  # tokens that a round emits, by committed length

    def set_script(self, start: int, counts: list[int]) -> None:
        """Let rounds that begin at length `start` emit so many tokens each, one after another; later ones emit one."""
        wanted, length = torch.ones(len(self.emit_counts), dtype=torch.int64), start
        for count in counts:
            wanted[length : length + count] = count  # so that a round which finds fewer does not lead out of the script
            length += count
        self.emit_counts.copy_(wanted)

    def __call__(self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> AcceptedPath:
        index = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
        real = tree.valid & tree.can_emit
        siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & real[:, None]
        first = real & ~(siblings & (index < index[:, None])).any(-1)  # [B, N] no child of its parent comes before it
        kept = (first[:, None] | ~tree.ancestors).all(-1) & (tree.depths < self.emit_counts[positions[:, :1] - 1])
        levels = torch.arange(tree.max_path_nodes, device=index.device)[:, None]  # [P, 1]
        path = torch.where(kept[:, None] & (tree.depths[:, None] <= levels), index, 0).amax(-1)
        return AcceptedPath(
            path, kept.sum(1), self.choose_tokens(logits, sequence_ids, positions).gather(1, path[:, -1:])[:, 0]
        )


def split_evenly(tau: float, rounds: int) -> list[int]:
    """Whole numbers whose mean is `tau`, as evenly as they can be."""
    return [int((i + 1) * tau) - int(i * tau) for i in range(rounds)]


def fixed_paths(nodes: int, depth: int) -> list[list[int]]:
    """A tree of so many nodes, the root included: the first choices, then the second beside each of them, and so on."""
    depth = min(depth, nodes - 1)
    return [[0] * level + [choice] for choice in range(nodes) for level in range(depth)][: nodes - 1]


class FixedTreeDrafter(Drafter):
    """Proposes the tree of its builder, for next to nothing, so that what remains is what verifying it costs."""

    abilities = Abilities(capture=Capture())
    parents: Tensor
    choices: Tensor

    def __init__(self, builder: Static, device: torch.device) -> None:
        super().__init__()
        places = {(): 0, **{path: place for place, path in enumerate(builder.paths, 1)}}
        parents = [-1, *(places[path[:-1]] for path in builder.paths)]
        self.register_buffer("parents", torch.tensor(parents, device=device))
        self.register_buffer("choices", torch.tensor([path[-1] for path in builder.paths], device=device))

    def draft(self, context: Context) -> Draft:
        builder = context.builder

        def complete(root: TokenTree) -> TokenTree:
            tokens = torch.cat([root.tokens, self.choices.expand(len(root.tokens), -1)], dim=1)
            tree = TokenTree.from_parents(tokens, self.parents.expand_as(tokens))
            return replace(tree, height=builder.depth, max_children=builder.budget)

        return Draft(add_mask_nodes=complete)


def fixed_tree(nodes: int, depth: int) -> Static:
    return Static(paths=fixed_paths(nodes, depth))


class UncapturedRounds(CapturedRunner):
    """The same rounds, launched one by one."""

    def _capture_graphs(self) -> None: ...


@dataclass
class BenchFixture:
    """A batch at a prefix: what engines that are measured there share, the largest of which is the target's cache."""

    target: Target
    batch: int
    prefix: int
    max_emitted: int  # tokens that are emitted before everything starts again at the prefix
    storage: Tensor | None = None

    @property
    def cache_slots(self) -> int:
        """Of the caches, as an engine chooses it for this prefix and these tokens."""
        return round_up_length(self.prefix + self.max_emitted + 1)

    def lend_storage(self, state: BatchState) -> None:
        """Give a state the shared storage, which holds random numbers."""
        cache, config, target = state.context.cache, self.target.config, self.target
        assert cache.max_length <= self.cache_slots + SPARE_SLOTS
        if self.storage is None:
            shape = (
                target.num_layers,
                2,
                self.batch,
                self.cache_slots + SPARE_SLOTS,
                config.num_key_value_heads,
                config.head_dim,
            )
            self.storage = torch.empty(shape, dtype=target.dtype, device=target.device)
            for layer in self.storage:  # all of it has more elements than 32 bits can count
                layer.normal_()
        cache.storage = self.storage


@dataclass(frozen=True)
class RoundSample:
    """The mean of some rounds."""

    seconds: float  # a round, by the host's clock
    parts: dict[str, float]  # seconds of draft, verify and accept, and of what is outside them
    tau: float  # tokens a round and row


class ScriptedRun:
    """An engine that stands at a place, warm, and goes from its prefix as often as it is asked."""

    def __init__(self, engine: CapturedRunner, fixture: BenchFixture) -> None:
        self.engine, self.fixture = engine, fixture
        self.state = engine.get_state(fixture.batch, fixture.cache_slots)
        fixture.lend_storage(self.state)
        engine.start_batch(
            Request(
                [[1] * PROMPT_LENGTH] * fixture.batch,
                fixture.cache_slots - PROMPT_LENGTH - 1,
                list(range(fixture.batch)),
                frozenset(),
            )
        )
        self.state.context.tokens.random_(engine.target.head.vocab_size)
        self.state.context.active.fill_(True)
        self._run_rounds()  # at a drafter's first round, which reads the prompt
        caches = [held for held in self._drafter_caches if held.storage is not None]
        for cache in caches:
            cache.storage.normal_()
        for _ in range(2):  # one to load kernels and compile, one to capture
            self.reset()
            self._run_rounds()

    @property
    def _drafter_caches(self) -> list[Any]:
        cache = getattr(self.engine.drafter, "cache", None)
        return [] if cache is None else [cache]

    def reset(self, tau: float = 1.0) -> None:
        """Stand at the prefix again, with a script for the rounds to come."""
        context, prefix = self.state.context, self.fixture.prefix
        if isinstance(self.engine.rule, ScriptedAcceptance):
            self.engine.rule.set_script(prefix, split_evenly(tau, int(self.fixture.max_emitted / tau)))
        context.cache.lengths.fill_(prefix)
        for cache in self._drafter_caches:
            cache.lengths.copy_(context.cache.lengths - context.counts)  # what was committed last is still to be read
        context.active.fill_(True)
        context.left.fill_(UNLIMITED_TOKENS)
        if self.state.log is not None:
            self.state.log.next_slot.zero_()
        synchronize_device(self.engine.target.device)

    def _run_rounds(self, looks: int = 1) -> Generation:
        """Go on for some looks of the host; what the first row saw."""
        seen = Generation([0], batch_size=self.fixture.batch)
        for _ in range(looks):
            for lines, seconds in self.engine.run_rounds(UNLIMITED_TOKENS):
                seen.record_round(lines[0], seconds)
        return seen

    def sample_rounds(self, tau: float = 1.0, looks: int = 2) -> RoundSample:
        """Some rounds from the prefix on, timed as decoding is."""
        self.reset(tau)
        began = time.perf_counter()
        seen = self._run_rounds(looks)
        rounds = len(seen.round_lengths)
        seconds = (time.perf_counter() - began) / rounds
        parts = {part: sum(times[part] for times in seen.round_seconds) / rounds for part in ROUND_PARTS[:-1]}
        return RoundSample(seconds, {**parts, "outside": seconds - sum(parts.values())}, sum(seen.round_lengths) / rounds)

    def time_part(self, part: int, launches: int = 4) -> float:
        """Seconds of one part of a round, again and again, apart from the others."""
        self.reset()
        device = self.engine.target.device
        marks = RoundTimer(device)
        if not self.state.graphs:  # nothing holds a part alone: it is timed inside of rounds
            for _ in range(launches):
                self.engine.run_uncaptured_round(marks)
            synchronize_device(device)
            return sum(laps[ROUND_PARTS[part]] for laps in marks.read_seconds()) / launches
        marks()
        for _ in range(launches):
            self.state.graphs[part].replay()
        marks()
        synchronize_device(device)
        return marks.elapsed_seconds(*marks.events) / launches

    def find_synchronization(self) -> str | None:
        """Run one round, not a replay, in which waiting for the device is an error: the error, or None. Only a GPU can tell."""
        self.reset()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.engine.run_uncaptured_round(RoundTimer(self.engine.target.device))
        except Exception as error:
            return describe_error(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for cache in [self.state.context.cache, *self._drafter_caches]:
                cache.roll_back()
        return None


EngineMaker = Callable[[ExecutionMode], CapturedRunner]


def prepare(make: EngineMaker, fixture: BenchFixture, notes: dict[str, str]) -> ScriptedRun:
    """A course of the best engine that runs here: compiled and captured, captured only, or neither, with the reason noted."""
    fallback = Fallback(fixture.target.device, reports_failures=False)
    try:
        return fallback.run(lambda way: ScriptedRun(make(way), fixture))
    finally:
        notes.update({f"not {way}": why for way, why in fallback.failures.items()})


def engine_maker(
    fixture: BenchFixture, rounds: int, drafter: Drafter | None = None, builder: TreeBuilder | None = None
) -> EngineMaker:
    """What makes an engine at a place: autoregressive, or with a drafter whose drafts are kept by script."""
    device = fixture.target.device

    def make(way: ExecutionMode) -> CapturedRunner:
        kind = UncapturedRounds if way == "eager" else CapturedRunner
        rule = Greedy() if drafter is None else ScriptedAcceptance(fixture.cache_slots + SPARE_SLOTS, device)
        return kind(
            fixture.target, rule, copy(drafter), builder, rounds, COMPILE_BACKENDS[way]
        )  # weights are shared, caches are not

    return make
