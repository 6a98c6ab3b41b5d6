"""Rounds of the engine at any size and length, without trained weights, text or a prefix that was
read.

Shapes: B batch, N nodes, P path length, V vocabulary. Weights are random and a prefix is random
numbers in the caches, which cost as much as real ones. A script decides how much of a draft is
accepted (`ScriptedAcceptance`). So a real model's time a round is measured without the model; its
acceptance is measured elsewhere.
"""

import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner, round_up_length
from spectrain.decoding.fallback import COMPILE_BACKENDS, ExecutionMode, Fallback
from spectrain.decoding.generation import ROUND_PARTS, Generation
from spectrain.decoding.loop import Request
from spectrain.decoding.static_rounds import BatchState, RoundTimer
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities, Capture
from spectrain.drafters.context import Context
from spectrain.errors import describe_error
from spectrain.models.device import synchronize_device
from spectrain.models.target import Target
from spectrain.trees import Static, TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree

PROMPT_LENGTH = 8
"""Tokens of the prompt that is read before the prefix is filled with random numbers."""
SPARE_SLOTS = 192
"""Slots after the limit of a cache that several engines share: more than any of their rounds
needs.
"""
UNLIMITED_TOKENS = 1 << 30
"""Tokens that a row may emit."""


class ScriptedAcceptance(Greedy):
    """Accept as many nodes of the path of first children as a script says for the row's length. NOT
    lossless.

    It costs as much as `Greedy`: it computes every node's best token, and the last accepted node's
    is the bonus.
    """

    name = "scripted"
    lossless = False
    is_random = True  # so that it is given positions

    def __init__(self, slots: int, device: torch.device) -> None:
        # tokens of a round, by committed length
        self.emit_counts = torch.ones(slots, dtype=torch.int64, device=device)

    def set_script(self, start: int, counts: list[int]) -> None:
        """Let rounds from length `start` on emit these numbers of tokens in turn; later rounds
        emit one.
        """
        script = torch.ones(len(self.emit_counts), dtype=torch.int64)
        length = start
        for count in counts:
            # Every length of the round has its count, so that a shorter round stays within the
            # script.
            script[length : length + count] = count
            length += count
        self.emit_counts.copy_(script)

    def __call__(
        self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        index = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
        real = tree.valid & tree.can_emit
        siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & real[:, None]
        # [B, N], the first child of its parent
        first = real & ~(siblings & (index < index[:, None])).any(-1)
        accepted = (first[:, None] | ~tree.ancestors).all(-1) & (
            tree.depths < self.emit_counts[positions[:, :1] - 1]
        )
        levels = torch.arange(tree.max_path_nodes, device=index.device)[:, None]  # [P, 1]
        path = torch.where(accepted[:, None] & (tree.depths[:, None] <= levels), index, 0).amax(-1)
        return AcceptedPath(
            path,
            accepted.sum(1),
            self.choose_tokens(logits, sequence_ids, positions).gather(1, path[:, -1:])[:, 0],
        )


def split_evenly(tau: float, rounds: int) -> list[int]:
    """Return integers whose mean is `tau`, spread as evenly as possible."""
    return [int((i + 1) * tau) - int(i * tau) for i in range(rounds)]


def fixed_paths(nodes: int, depth: int) -> list[list[int]]:
    """Return the paths of a tree of `nodes` nodes, the root included: the first choices, then the
    second at each level, and so on."""
    depth = min(depth, nodes - 1)
    return [[0] * level + [choice] for choice in range(nodes) for level in range(depth)][
        : nodes - 1
    ]


class FixedTreeDrafter(Drafter):
    """Propose the builder's tree at almost no cost, so that a round measures its verification."""

    capabilities = Capabilities(capture=Capture())
    parents: Tensor
    choices: Tensor

    def __init__(self, builder: Static, device: torch.device) -> None:
        super().__init__()
        indices = {(): 0, **{path: index for index, path in enumerate(builder.paths, 1)}}
        parents = [-1, *(indices[path[:-1]] for path in builder.paths)]
        self.register_buffer("parents", torch.tensor(parents, device=device))
        self.register_buffer(
            "choices", torch.tensor([path[-1] for path in builder.paths], device=device)
        )

    def draft(self, context: Context) -> Draft:
        builder = context.builder

        def add_nodes(root: TokenTree) -> TokenTree:
            tokens = torch.cat([root.tokens, self.choices.expand(len(root.tokens), -1)], dim=1)
            tree = TokenTree.from_parents(tokens, self.parents.expand_as(tokens))
            return replace(tree, height=builder.depth, max_children=builder.budget)

        return Draft(add_mask_nodes=add_nodes)


def fixed_tree(nodes: int, depth: int) -> Static:
    return Static(paths=fixed_paths(nodes, depth))


class UncapturedRounds(CapturedRunner):
    """The same rounds without graphs, one launch at a time."""

    def _capture_graphs(self) -> None: ...


@dataclass
class BenchFixture:
    """A batch at a prefix, and what its engines share, above all the storage of the target's
    cache.
    """

    target: Target
    batch: int
    prefix: int
    max_emitted: int  # tokens that a run emits before it restarts at the prefix
    storage: Tensor | None = None

    @property
    def cache_slots(self) -> int:
        """The slots of the caches, as an engine chooses them for this prefix and these tokens."""
        return round_up_length(self.prefix + self.max_emitted + 1)

    def lend_storage(self, state: BatchState) -> None:
        """Give a state the shared storage, which holds random numbers."""
        cache, config, target = state.context.cache, self.target.config, self.target
        assert cache.max_length <= self.cache_slots + SPARE_SLOTS
        if self.storage is None:
            slots = self.cache_slots + SPARE_SLOTS
            shape = (
                target.num_layers,
                2,
                self.batch,
                slots,
                config.num_key_value_heads,
                config.head_dim,
            )
            self.storage = torch.empty(shape, dtype=target.dtype, device=target.device)
            for layer in self.storage:  # 32 bits cannot count the elements of all layers
                layer.normal_()
        cache.storage = self.storage


@dataclass(frozen=True)
class RoundSample:
    """The mean of some rounds."""

    seconds: float  # a round, by the host's clock
    parts: dict[str, float]  # seconds of draft, verify, accept, and of the rest
    tau: float  # tokens a round and row


class ScriptedRun:
    """A warm engine at a fixture, which can repeatedly decode from the prefix on."""

    def __init__(self, engine: CapturedRunner, fixture: BenchFixture) -> None:
        self.engine, self.fixture = engine, fixture
        self.state = engine.get_state(fixture.batch, fixture.cache_slots)
        fixture.lend_storage(self.state)
        prompts = [[1] * PROMPT_LENGTH] * fixture.batch
        limit = fixture.cache_slots - PROMPT_LENGTH - 1
        engine.start_batch(Request(prompts, limit, list(range(fixture.batch)), frozenset()))
        self.state.context.tokens.random_(engine.target.head.vocab_size)
        self.state.context.active.fill_(True)
        self._run_rounds()  # the drafter reads the prompt in its first round
        caches = [cache for cache in self._drafter_caches if cache.storage is not None]
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
        """Return to the prefix, with a script for the rounds to come."""
        context, prefix = self.state.context, self.fixture.prefix
        if isinstance(self.engine.rule, ScriptedAcceptance):
            self.engine.rule.set_script(
                prefix, split_evenly(tau, int(self.fixture.max_emitted / tau))
            )
        context.cache.lengths.fill_(prefix)
        for cache in self._drafter_caches:
            # the last commit is still unread
            cache.lengths.copy_(context.cache.lengths - context.num_new)
        context.active.fill_(True)
        context.tokens_left.fill_(UNLIMITED_TOKENS)
        if context.log is not None:
            context.log.next_lines.zero_()
        synchronize_device(self.engine.target.device)

    def _run_rounds(self, pauses: int = 1) -> Generation:
        """Run until the host has paused a number of times; return what the first row recorded."""
        record = Generation([0], batch_size=self.fixture.batch)
        for _ in range(pauses):
            for lines, seconds in self.engine.run_rounds(UNLIMITED_TOKENS):
                record.record_round(lines[0], seconds)
        return record

    def sample_rounds(self, tau: float = 1.0, pauses: int = 1) -> RoundSample:
        """Run some rounds from the prefix on, timed as decoding is."""
        self.reset(tau)
        start = time.perf_counter()
        record = self._run_rounds(pauses)
        rounds = len(record.round_lengths)
        seconds = (time.perf_counter() - start) / rounds
        parts = {
            part: sum(times[part] for times in record.round_seconds) / rounds
            for part in ROUND_PARTS[:-1]
        }
        return RoundSample(
            seconds,
            {**parts, "outside": seconds - sum(parts.values())},
            sum(record.round_lengths) / rounds,
        )

    def time_part(self, part: int, launches: int = 4) -> float:
        """Return the seconds of one part of a round, launched repeatedly without the others."""
        self.reset()
        device = self.engine.target.device
        timer = RoundTimer(device)
        if not self.state.graphs:  # without a graph of the part, it is timed inside rounds
            for _ in range(launches):
                self.engine.run_uncaptured_round(timer)
            synchronize_device(device)
            return sum(laps[ROUND_PARTS[part]] for laps in timer.read_seconds()) / launches
        timer()
        for _ in range(launches):
            self.state.graphs[part].replay()
        timer()
        synchronize_device(device)
        return timer.elapsed_seconds(*timer.events) / launches

    def find_synchronization(self) -> str | None:
        """Run one uncaptured round in which waiting for the device is an error; return the error
        or None. Needs a GPU.
        """
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
    """Return a run of the fastest engine that works here: compiled and captured, captured only, or
    neither.

    `notes` receives the reason for each mode that failed.
    """
    fallback = Fallback(fixture.target.device, reports_failures=False)
    try:
        return fallback.run(lambda mode: ScriptedRun(make(mode), fixture))
    finally:
        notes.update({f"not {mode}": cause for mode, cause in fallback.failures.items()})


def engine_maker(
    fixture: BenchFixture,
    rounds: int,
    drafter: Drafter | None = None,
    builder: TreeBuilder | None = None,
) -> EngineMaker:
    """Return a function that makes an engine of a mode: autoregressive, or with a drafter and
    scripted acceptance.
    """
    device = fixture.target.device

    def make_engine(mode: ExecutionMode) -> CapturedRunner:
        runner = UncapturedRounds if mode == "eager" else CapturedRunner
        rule = (
            Greedy()
            if drafter is None
            else ScriptedAcceptance(fixture.cache_slots + SPARE_SLOTS, device)
        )
        # Engines share the drafter's weights, but not its caches.
        return runner(fixture.target, rule, copy(drafter), builder, rounds, COMPILE_BACKENDS[mode])

    return make_engine
