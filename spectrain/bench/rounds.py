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
from spectrain.decoding.captured import Captured, Marks, State, bucket
from spectrain.decoding.fallback import BACKENDS, Fallback, Way
from spectrain.decoding.generation import PARTS, Generation
from spectrain.decoding.loop import Request
from spectrain.drafters.abilities import Abilities, Capture
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.errors import reason
from spectrain.models.device import wait
from spectrain.models.target import Target
from spectrain.trees import Static, TreeBuilder
from spectrain.trees.base import Draft
from spectrain.trees.token_tree import Accepted, TokenTree

SHORT = 8  # tokens of the prompt that is read before the prefix is made up
SPARE = 192  # slots behind the bound of a cache that several engines share: more than any of their rounds needs
ENDLESS = 1 << 30  # tokens that a row may emit


class Scripted(Greedy):
    """Keeps, of the path of first children, as many nodes as its script says for the row's length. NOT lossless.

    It costs what `Greedy` costs: every node's best token is found, the last kept one's is the bonus.
    """

    name = "scripted"
    lossless = False

    def __init__(self, slots: int, device: torch.device) -> None:
        self.wanted = torch.ones(slots, dtype=torch.int64, device=device)  # tokens that a round emits, by committed length

    def script(self, start: int, counts: list[int]) -> None:
        """Let rounds that begin at length `start` emit so many tokens each, one after another; later ones emit one."""
        wanted, length = torch.ones(len(self.wanted), dtype=torch.int64), start
        for count in counts:
            wanted[length : length + count] = count  # so that a round which finds fewer does not lead out of the script
            length += count
        self.wanted.copy_(wanted)

    def __call__(self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> Accepted:
        index = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
        real = tree.valid & tree.emitted
        siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & real[:, None]
        first = real & ~(siblings & (index < index[:, None])).any(-1)  # [B, N] no child of its parent comes before it
        kept = (first[:, None] | ~tree.ancestors).all(-1) & (tree.depths < self.wanted[positions[:, :1] - 1])
        levels = torch.arange(tree.longest_path, device=index.device)[:, None]  # [P, 1]
        path = torch.where(kept[:, None] & (tree.depths[:, None] <= levels), index, 0).amax(-1)
        return Accepted(path, kept.sum(1), self.choose(logits, sequence_ids, positions).gather(1, path[:, -1:])[:, 0])


def evenly(tau: float, rounds: int) -> list[int]:
    """Whole numbers whose mean is `tau`, as evenly as they can be."""
    return [int((i + 1) * tau) - int(i * tau) for i in range(rounds)]


def given_paths(nodes: int, depth: int) -> list[list[int]]:
    """A tree of so many nodes, the root included: the first choices, then the second beside each of them, and so on."""
    depth = min(depth, nodes - 1)
    return [[0] * level + [choice] for choice in range(nodes) for level in range(depth)][: nodes - 1]


class Given(Drafter):
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
            tree = TokenTree.of(tokens, self.parents.expand_as(tokens))
            return replace(tree, height=builder.depth, most_children=builder.budget)

        return Draft(complete=complete)


def given_tree(nodes: int, depth: int) -> Static:
    return Static(paths=given_paths(nodes, depth))


class Ungraphed(Captured):
    """The same rounds, launched one by one."""

    def _capture(self) -> None: ...


@dataclass
class Place:
    """A batch at a prefix: what engines that are measured there share, the largest of which is the target's cache."""

    target: Target
    batch: int
    prefix: int
    room: int  # tokens that are emitted before everything starts again at the prefix
    storage: Tensor | None = None

    @property
    def bound(self) -> int:
        """Of the caches, as an engine chooses it for this prefix and these tokens."""
        return bucket(self.prefix + self.room + 1)

    def lend(self, state: State) -> None:
        """Give a state the shared storage, which holds random numbers."""
        cache, config, target = state.context.cache, self.target.config, self.target
        assert cache.max_length <= self.bound + SPARE
        if self.storage is None:
            shape = (target.num_layers, 2, self.batch, self.bound + SPARE, config.num_key_value_heads, config.head_dim)
            self.storage = torch.empty(shape, dtype=target.dtype, device=target.device)
            for layer in self.storage:  # all of it has more elements than 32 bits can count
                layer.normal_()
        cache.storage = self.storage


@dataclass(frozen=True)
class Sample:
    """The mean of some rounds."""

    seconds: float  # a round, by the host's clock
    parts: dict[str, float]  # seconds of draft, verify and accept, and of what is outside them
    tau: float  # tokens a round and row


class Course:
    """An engine that stands at a place, warm, and goes from its prefix as often as it is asked."""

    def __init__(self, engine: Captured, place: Place) -> None:
        self.engine, self.place = engine, place
        self.state = engine.sized(place.batch, place.bound)
        place.lend(self.state)
        engine.start(Request([[1] * SHORT] * place.batch, place.bound - SHORT - 1, list(range(place.batch)), frozenset()))
        self.state.context.tokens.random_(engine.target.head.vocab_size)
        self.state.context.active.fill_(True)
        self._look()  # at a drafter's first round, which reads the prompt
        caches = [held for held in self._drafter_caches if held.storage is not None]
        for cache in caches:
            cache.storage.normal_()
        for _ in range(2):  # one to load kernels and compile, one to capture
            self.reset()
            self._look()

    @property
    def _drafter_caches(self) -> list[Any]:
        cache = getattr(self.engine.drafter, "cache", None)
        return [] if cache is None else [cache]

    def reset(self, tau: float = 1.0) -> None:
        """Stand at the prefix again, with a script for the rounds to come."""
        context, prefix = self.state.context, self.place.prefix
        if isinstance(self.engine.rule, Scripted):
            self.engine.rule.script(prefix, evenly(tau, int(self.place.room / tau)))
        context.cache.lengths.fill_(prefix)
        for cache in self._drafter_caches:
            cache.lengths.copy_(context.cache.lengths - context.counts)  # what was committed last is still to be read
        context.active.fill_(True)
        context.left.fill_(ENDLESS)
        if self.state.log is not None:
            self.state.log.slot.zero_()
        wait(self.engine.target.device)

    def _look(self, looks: int = 1) -> Generation:
        """Go on for some looks of the host; what the first row saw."""
        seen = Generation([0], batch=self.place.batch)
        for _ in range(looks):
            for lines, seconds in self.engine.rounds(ENDLESS):
                seen.note(lines[0], seconds)
        return seen

    def sample(self, tau: float = 1.0, looks: int = 2) -> Sample:
        """Some rounds from the prefix on, timed as decoding is."""
        self.reset(tau)
        began = time.perf_counter()
        seen = self._look(looks)
        rounds = len(seen.accepted)
        seconds = (time.perf_counter() - began) / rounds
        parts = {part: sum(times[part] for times in seen.times) / rounds for part in PARTS[:-1]}
        return Sample(seconds, {**parts, "outside": seconds - sum(parts.values())}, sum(seen.accepted) / rounds)

    def alone(self, part: int, launches: int = 4) -> float:
        """Seconds of one part of a round, again and again, apart from the others."""
        self.reset()
        device = self.engine.target.device
        marks = Marks(device)
        if not self.state.graphs:  # nothing holds a part alone: it is timed inside of rounds
            for _ in range(launches):
                self.engine.play_round(marks)
            wait(device)
            return sum(laps[PARTS[part]] for laps in marks.laps()) / launches
        marks()
        for _ in range(launches):
            self.state.graphs[part].replay()
        marks()
        wait(device)
        return marks.between(*marks.made) / launches

    def synchronisations(self) -> str | None:
        """Run one round, not a replay, in which waiting for the device is an error: the error, or None. Only a GPU can tell."""
        self.reset()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.engine.play_round(Marks(self.engine.target.device))
        except Exception as error:
            return reason(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for cache in [self.state.context.cache, *self._drafter_caches]:
                cache.forget()
        return None


Make = Callable[[Way], Captured]


def set_out(make: Make, place: Place, notes: dict[str, str]) -> Course:
    """A course of the best engine that runs here: compiled and captured, captured only, or neither, with the reason noted."""
    fallback = Fallback(place.target.device, says=False)
    try:
        return fallback.run(lambda way: Course(make(way), place))
    finally:
        notes.update({f"not {way}": why for way, why in fallback.failed.items()})


def engine_maker(place: Place, rounds: int, drafter: Drafter | None = None, builder: TreeBuilder | None = None) -> Make:
    """What makes an engine at a place: autoregressive, or with a drafter whose drafts are kept by script."""
    device = place.target.device

    def make(way: Way) -> Captured:
        kind = Ungraphed if way == "eager" else Captured
        rule = Greedy() if drafter is None else Scripted(place.bound + SPARE, device)
        return kind(place.target, rule, copy(drafter), builder, rounds, BACKENDS[way])  # weights are shared, caches are not

    return make
