"""`spectrain bench engine`: what the decoding engine reaches at the size of Llama-3.1-8B, with random weights.

Parts: counts (launches a round, found without a device), identity (the engine's answers against the loop's, in float32), single
and batched (autoregressive steps, verification and EAGLE-3 rounds at several prefixes; of one row, and of more), and training
(a drafter's step without its target). Which tokens are kept is scripted, so times are an engine's and tau is an assumption.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from statistics import median
from typing import Any, Literal

import torch

from spectrain.decoding import captured as engine
from spectrain.decoding import generation
from spectrain.decoding import loop as decode
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import Captured
from spectrain.drafters import base, context, eagle3
from spectrain.drafters.base import Drafter
from spectrain.drafters.eagle3 import Eagle3
from spectrain.kernels import kv_append, kv_commit, round_log, token_commit, tree_attention, tree_verify
from spectrain.models import compiled_layers as compiled
from spectrain.models.target import Target
from spectrain.planning import launches
from spectrain.planning.launches import count_round
from spectrain.trees import Chain, Eagle2, TreeBuilder

from . import identity, rounds, training
from .identity import FAMILIES, identity_row, targets
from .measure import shuffled, spread
from .models import Model, outline, random_drafter, random_target
from .rounds import Course, Given, Place, Sample, engine_maker, given_tree, set_out
from .speedup import AR, Parts, Roofline, gains, lines, parts_us, verify_ratio
from .steps import Bench, Step, digest
from .training import training_row

LOOP = decode, generation, context, base
"""The code of every round, whoever drafts."""

Part = Literal["all", "counts", "identity", "single", "batched", "training"]


@dataclass(frozen=True)
class EngineSizes:
    """What is measured, and how often."""

    model: Model = field(default_factory=Model)
    copied_bytes: int = 2 << 30
    product_width: int = 8192
    batches: tuple[int, ...] = (1, 8)
    prefixes: tuple[int, ...] = (1024, 8192, 32768)
    nodes: tuple[int, ...] = (8, 16, 32, 64)  # of given trees
    budgets: tuple[int, ...] = (16, 32, 64)  # of dynamic ones
    depth: int = 5
    chain: int = 3
    taus: tuple[float, ...] = (2.0, 4.0)
    rounds: int = 4  # between two looks of the host
    repeats: int = 20
    new_tokens: int = 64  # of an answer that is compared
    conversations: tuple[int, int] = (4, 2048)  # of a training step, and their length

    def trees(self) -> dict[str, TreeBuilder]:
        """What EAGLE-3 drafts, by the end of the row's name."""
        dynamic: dict[str, TreeBuilder] = {f"eagle2 N={budget}": Eagle2(self.depth, budget) for budget in self.budgets}
        return {f"chain N={self.chain + 1}": Chain(self.chain), **dynamic}

    def cells(self) -> list[tuple[int, int]]:
        return list(product(self.batches, self.prefixes))

    def first(self) -> list[str]:
        """The rows that are measured before others: every tree at the shortest prefix, at longer ones a chain and the dynamic
        tree that suits the batch, for every further one takes a compilation."""
        trees = list(self.trees())
        found = []
        for batch, prefix in self.cells():
            some = trees if prefix == self.prefixes[0] else [trees[0], trees[-1] if batch == 1 else trees[1]]
            found += [f"engine/B={batch} prefix={prefix}/{tree}" for tree in some]
        return found


TOY = EngineSizes(
    Model(2, 64, 128, 4, 2, 16, 300, 100, 4096),
    1 << 16,
    32,
    (1, 2),
    (20, 300),
    (4, 9),
    (6, 10),
    3,
    2,
    (2.0,),
    2,
    2,
    6,
    (2, 16),
)
"""Every line of it in seconds, on any machine; the numbers mean nothing."""


@dataclass
class EngineBench(Bench):
    """Measure `part` and write each row into `out` as it comes; nothing new is begun after `seconds`."""

    part: Part = "all"
    out: str = "eval/results/engine.json"
    toy: bool = False
    seconds: float = 360  # the slowest row may take two minutes more, most of it compiling
    target: str | None = None  # the directory of a target whose answers are compared, beside the tiny one's
    row_seconds = 240  # a first row compiles
    place: Place | None = field(default=None, init=False)  # where the engines stand that are ready now
    courses: dict[str, Course] = field(default_factory=dict, init=False)
    notes: dict[str, dict[str, str]] = field(default_factory=dict, init=False)  # why one of them is not compiled or captured

    @property
    def sizes(self) -> EngineSizes:
        return TOY if self.toy else EngineSizes()

    def lines(self) -> dict[str, float]:
        return {} if self.toy else lines(self.results.rows, self.sizes.first())

    def steps(self) -> Iterator[Step]:
        yield from self.ceilings()
        parts: dict[str, Callable[[], Iterator[Step]]] = {
            "counts": self.counts, "identity": self.identity, "single": partial(self.rounds, single=True),
            "batched": partial(self.rounds, single=False), "training": self.training,
        }  # fmt: skip
        for name, steps in parts.items():
            if self.part in ("all", name):
                yield from steps()

    def counts(self) -> Iterator[Step]:
        source = digest(launches, engine, *LOOP, eagle3)
        last = f"N={self.sizes.nodes[-1]}"
        for name in (AR, last, *self.sizes.trees()):
            yield Step(f"counts/{name}", source, partial(self.count_row, name))

    def count_row(self, name: str) -> dict[str, Any]:
        """Launches of a greedy round, before anything is compiled, and bytes that its operations make."""
        target = outline(self.sizes.model, torch.bfloat16)
        drafter = random_drafter(target, self.sizes.model, torch.bfloat16)
        found = count_round(Captured(target, Greedy(), *self.drafting(name, drafter)))
        return {"parts": found, "launches": sum(part["launches"] for part in found.values()), "not_run": {}}

    def drafting(self, name: str, drafter: Eagle3) -> tuple[Drafter | None, TreeBuilder | None]:
        """Who drafts, and what, in rows of this name."""
        if name == AR:
            return None, None
        trees = self.sizes.trees()
        if name in trees:
            return drafter, trees[name]
        given = given_tree(int(name.removeprefix("N=")), self.sizes.depth)
        return Given(given, drafter.draft_ids.device), given

    def identity(self) -> Iterator[Step]:
        source = digest(identity, engine, compiled, *LOOP)
        for name, load in targets(self.target, self.device).items():
            for family in FAMILIES:
                yield Step(f"identity/{name}/{family}", source, partial(identity_row, load, family, self.sizes.new_tokens))

    def training(self) -> Iterator[Step]:
        conversations, length = self.sizes.conversations
        name = f"training/eagle3 B={conversations} T={length}"
        yield Step(name, digest(training, base, eagle3), partial(self.training_row, conversations, length))

    def training_row(self, conversations: int, length: int) -> dict[str, Any]:
        rate, repeats = self.rates()["flops_per_second"], max(3, self.sizes.repeats // 2)
        return training_row(self.sizes.model, conversations, length, repeats, rate, self.dtype, self.device)

    def rounds(self, single: bool) -> Iterator[Step]:
        """Verification and, at the shortest prefix, without graphs; then EAGLE-3, what comes first, then the rest."""
        cells = [cell for cell in self.sizes.cells() if (cell[0] == 1) == single]
        for part in (True, False):
            for batch, prefix in cells:
                title = f"engine/B={batch} prefix={prefix}"
                if part:
                    yield self.step(f"{title}/verify", batch, prefix, self.verify_row)
                if part and prefix == self.sizes.prefixes[0]:
                    yield self.step(f"{title}/eager", batch, prefix, self.eager_row)
                for tree in self.sizes.trees():
                    if (f"{title}/{tree}" in self.sizes.first()) == part:
                        yield self.step(f"{title}/{tree}", batch, prefix, partial(self.drafted_row, tree))

    def step(self, name: str, batch: int, prefix: int, row: Any) -> Step:
        kernels = tree_attention, tree_verify, kv_append, kv_commit, token_commit, round_log
        code = engine, compiled, *LOOP, eagle3, rounds, *kernels

        @torch.inference_mode()
        def measure() -> dict[str, Any]:
            self.stand(batch, prefix)
            assert self.place is not None
            return {"batch": batch, "prefix": prefix, "bound": self.place.bound, **row(self.place)}

        return Step(name, digest(*code), measure)

    @cached_property
    def models(self) -> tuple[Target, Eagle3]:
        torch.manual_seed(0)
        target = random_target(self.sizes.model, self.device, self.dtype)
        return target, random_drafter(target, self.sizes.model, self.dtype)

    @property
    def room(self) -> int:
        """Tokens that a sample of two looks can emit, and a few more."""
        return (2 * self.sizes.rounds + 1) * (self.sizes.depth + 1)

    def stand(self, batch: int, prefix: int) -> None:
        """Make the place, and let go of engines that stand elsewhere, whose caches fill the device."""
        if self.place is None or (self.place.batch, self.place.prefix) != (batch, prefix):
            self.courses.clear()
            self.place = None
            gc.collect()
            self.place = Place(self.models[0], batch, prefix, self.room)

    def course(self, name: str) -> Course:
        """The engine of this name at the place, warm."""
        assert self.place is not None
        if name not in self.courses:
            self.notes[name] = {}
            maker = engine_maker(self.place, self.sizes.rounds, *self.drafting(name, self.models[1]))
            self.courses[name] = set_out(maker, self.place, self.notes[name])
        return self.courses[name]

    def common(self, samples: dict[str, list[Sample]], names: list[str]) -> dict[str, Any]:
        """What all of these rows say: times a round, whole and by part, tau and tokens a second, of all rows together."""
        assert self.place is not None
        found = {name: self.notes[name] for name in names if self.notes[name]}
        return {
            "us": {name: spread([one.seconds for one in some]) for name, some in samples.items()},
            "parts_us": {name: parts_us(some) for name, some in samples.items()},
            "tau": {name: median(one.tau for one in some) for name, some in samples.items()},
            "tokens_per_second": {
                name: self.place.batch * median(one.tau / one.seconds for one in some) for name, some in samples.items()
            },
            "not_run": {f"{name}, {what}": why for name, notes in found.items() for what, why in notes.items()},
            "repeats": self.sizes.repeats, **self.waits(names),
        }  # fmt: skip

    def waits(self, names: list[str]) -> dict[str, Any]:
        """How often a round waits for the device: never, or at least once, and where first; unknown without a GPU."""
        if self.device.type != "cuda":
            return {"host_synchronisations": None}
        errors = [error for error in (self.course(name).synchronisations() for name in names) if error is not None]
        return {"host_synchronisations": len(errors), **({"first_wait": errors[0]} if errors else {})}

    def roofline(self) -> Roofline:
        return Roofline(self.sizes.model, **self.rates())

    def verify_row(self, place: Place) -> dict[str, Any]:
        """An autoregressive step and given trees; v(N), the verification of N nodes over such a step, in pairs."""
        names = [AR, *(f"N={nodes}" for nodes in self.sizes.nodes)]
        samples = shuffled({name: self.course(name).sample for name in names}, self.sizes.repeats)
        row = self.common(samples, names)
        least = self.roofline().verify(place.batch, place.prefix, 1)
        row |= {"floor_us": least * 1e6, "share_of_floor": least * 1e6 / row["us"][AR]["median"]}
        row["v"] = {name: verify_ratio(samples[AR], samples[name]) for name in names[1:]}
        row["v_floor"] = {f"N={nodes}": self.roofline().verify(place.batch, place.prefix, nodes) / least
                          for nodes in self.sizes.nodes}  # fmt: skip
        return row

    def eager_row(self, place: Place) -> dict[str, Any]:
        """The same rounds neither compiled nor captured: what graphs gain."""
        names = [AR, f"N={self.sizes.nodes[-1]}"]
        works: dict[str, Callable[[], Sample]] = {name: self.course(name).sample for name in names}
        for name in names:
            maker = engine_maker(place, self.sizes.rounds, *self.drafting(name, self.models[1]))
            works[f"{name}, eager"] = Course(maker("eager"), place).sample
        samples = shuffled(works, max(2, self.sizes.repeats // 4))
        row = self.common(samples, names)
        row["times_ours"] = {
            name: median(b.seconds / a.seconds for a, b in zip(samples[name], samples[f"{name}, eager"])) for name in names
        }
        return row

    def drafted_row(self, tree: str, place: Place) -> dict[str, Any]:
        """EAGLE-3 rounds that keep so many tokens, or every draft, against autoregressive steps and the model of the parts."""
        one, other = self.course(AR), self.course(tree)
        builder = self.sizes.trees()[tree]
        taus = {**{f"tau={tau:g}": tau for tau in self.sizes.taus}, "oracle": builder.depth + 1.0}
        works: dict[str, Any] = {AR: one.sample, **{name: partial(other.sample, tau) for name, tau in taus.items()}}
        alone = {name: partial(other.alone, part) for part, name in enumerate(("draft", "verify", "accept"))}
        found = shuffled({**works, **alone}, self.sizes.repeats)
        samples = {name: found[name] for name in works}
        row = self.common(samples, [AR, tree])
        step, outside = (median(values) for values in zip(*[(one.seconds, one.parts["outside"]) for one in samples[AR]]))
        draft, verify, accept = (median(found[name]) for name in alone)
        parts = Parts(step, draft, verify, accept, outside, builder.depth)
        best = self.roofline().efficiency(place.batch, place.prefix, builder.budget, builder.depth)
        row |= {"tree": builder.settings(), "alone_us": {name: median(found[name]) * 1e6 for name in alone}}
        return row | gains(samples, parts, list(taus), best)
