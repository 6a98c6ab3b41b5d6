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
from spectrain.decoding.captured import CapturedRunner
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
from .identity import FAMILIES, identity_row, target_loaders
from .measure import sample_shuffled, summarize_times
from .models import ModelGeometry, build_meta_target, random_drafter, random_target
from .rounds import BenchFixture, FixedTreeDrafter, RoundSample, ScriptedRun, engine_maker, fixed_tree, prepare
from .speedup import AR, Roofline, RoundCosts, compute_gains, engine_goal_values, parts_us, verify_ratio
from .steps import Bench, Measurement, source_digest
from .training import training_row

ROUND_MODULES = decode, generation, context, base
"""The code of every round, whoever drafts."""

EnginePart = Literal["all", "counts", "identity", "single", "batched", "training"]


@dataclass(frozen=True)
class EngineSizes:
    """What is measured, and how often."""

    model: ModelGeometry = field(default_factory=ModelGeometry)
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

    def tree_builders(self) -> dict[str, TreeBuilder]:
        """What EAGLE-3 drafts, by the end of the row's name."""
        dynamic: dict[str, TreeBuilder] = {f"eagle2 N={budget}": Eagle2(self.depth, budget) for budget in self.budgets}
        return {f"chain N={self.chain + 1}": Chain(self.chain), **dynamic}

    def cell_shapes(self) -> list[tuple[int, int]]:
        return list(product(self.batches, self.prefixes))

    def priority_rows(self) -> list[str]:
        """The rows that are measured before others: every tree at the shortest prefix, at longer ones a chain and the dynamic
        tree that suits the batch, for every further one takes a compilation."""
        trees = list(self.tree_builders())
        found = []
        for batch, prefix in self.cell_shapes():
            some = trees if prefix == self.prefixes[0] else [trees[0], trees[-1] if batch == 1 else trees[1]]
            found += [f"engine/B={batch} prefix={prefix}/{tree}" for tree in some]
        return found


TOY = EngineSizes(
    ModelGeometry(2, 64, 128, 4, 2, 16, 300, 100, 4096),
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

    part: EnginePart = "all"
    out: str = "eval/results/engine.json"
    toy: bool = False
    seconds: float = 360  # the slowest row may take two minutes more, most of it compiling
    target: str | None = None  # the directory of a target whose answers are compared, beside the tiny one's
    row_seconds = 240  # a first row compiles
    fixture: BenchFixture | None = field(default=None, init=False)  # where the engines stand that are ready now
    scripted_runs: dict[str, ScriptedRun] = field(default_factory=dict, init=False)
    fallback_notes: dict[str, dict[str, str]] = field(
        default_factory=dict, init=False
    )  # why one of them is not compiled or captured

    @property
    def sizes(self) -> EngineSizes:
        return TOY if self.toy else EngineSizes()

    def goal_values(self) -> dict[str, float]:
        return {} if self.toy else engine_goal_values(self.results.rows, self.sizes.priority_rows())

    def plan_measurements(self) -> Iterator[Measurement]:
        yield from self.plan_ceilings()
        parts: dict[str, Callable[[], Iterator[Measurement]]] = {
            "counts": self.plan_counts, "identity": self.plan_identity, "single": partial(self.plan_rounds, single=True),
            "batched": partial(self.plan_rounds, single=False), "training": self.plan_training,
        }  # fmt: skip
        for name, steps in parts.items():
            if self.part in ("all", name):
                yield from steps()

    def plan_counts(self) -> Iterator[Measurement]:
        source = source_digest(launches, engine, *ROUND_MODULES, eagle3)
        last = f"N={self.sizes.nodes[-1]}"
        for name in (AR, last, *self.sizes.tree_builders()):
            yield Measurement(f"counts/{name}", source, partial(self.count_row, name))

    def count_row(self, name: str) -> dict[str, Any]:
        """Launches of a greedy round, before anything is compiled, and bytes that its operations make."""
        target = build_meta_target(self.sizes.model, torch.bfloat16)
        drafter = random_drafter(target, self.sizes.model, torch.bfloat16)
        found = count_round(CapturedRunner(target, Greedy(), *self.select_drafter(name, drafter)))
        return {"parts": found, "launches": sum(part["launches"] for part in found.values()), "not_run": {}}

    def select_drafter(self, name: str, drafter: Eagle3) -> tuple[Drafter | None, TreeBuilder | None]:
        """Who drafts, and what, in rows of this name."""
        if name == AR:
            return None, None
        trees = self.sizes.tree_builders()
        if name in trees:
            return drafter, trees[name]
        given = fixed_tree(int(name.removeprefix("N=")), self.sizes.depth)
        return FixedTreeDrafter(given, drafter.draft_ids.device), given

    def plan_identity(self) -> Iterator[Measurement]:
        source = source_digest(identity, engine, compiled, *ROUND_MODULES)
        for name, load in target_loaders(self.target, self.device).items():
            for family in FAMILIES:
                yield Measurement(
                    f"identity/{name}/{family}", source, partial(identity_row, load, family, self.sizes.new_tokens)
                )

    def plan_training(self) -> Iterator[Measurement]:
        conversations, length = self.sizes.conversations
        name = f"training/eagle3 B={conversations} T={length}"
        yield Measurement(name, source_digest(training, base, eagle3), partial(self.training_row, conversations, length))

    def training_row(self, conversations: int, length: int) -> dict[str, Any]:
        rate, repeats = self.machine_rates()["flops_per_second"], max(3, self.sizes.repeats // 2)
        return training_row(self.sizes.model, conversations, length, repeats, rate, self.dtype, self.device)

    def plan_rounds(self, single: bool) -> Iterator[Measurement]:
        """Verification and, at the shortest prefix, without graphs; then EAGLE-3, what comes first, then the rest."""
        cells = [cell for cell in self.sizes.cell_shapes() if (cell[0] == 1) == single]
        for part in (True, False):
            for batch, prefix in cells:
                title = f"engine/B={batch} prefix={prefix}"
                if part:
                    yield self.plan_measurement(f"{title}/verify", batch, prefix, self.verify_row)
                if part and prefix == self.sizes.prefixes[0]:
                    yield self.plan_measurement(f"{title}/eager", batch, prefix, self.eager_row)
                for tree in self.sizes.tree_builders():
                    if (f"{title}/{tree}" in self.sizes.priority_rows()) == part:
                        yield self.plan_measurement(f"{title}/{tree}", batch, prefix, partial(self.drafted_row, tree))

    def plan_measurement(self, name: str, batch: int, prefix: int, row: Any) -> Measurement:
        kernels = tree_attention, tree_verify, kv_append, kv_commit, token_commit, round_log
        code = engine, compiled, *ROUND_MODULES, eagle3, rounds, *kernels

        @torch.inference_mode()
        def measure() -> dict[str, Any]:
            self.move_fixture(batch, prefix)
            assert self.fixture is not None
            return {"batch": batch, "prefix": prefix, "bound": self.fixture.cache_slots, **row(self.fixture)}

        return Measurement(name, source_digest(*code), measure)

    @cached_property
    def target_and_drafter(self) -> tuple[Target, Eagle3]:
        torch.manual_seed(0)
        target = random_target(self.sizes.model, self.device, self.dtype)
        return target, random_drafter(target, self.sizes.model, self.dtype)

    @property
    def max_emitted(self) -> int:
        """Tokens that a sample of two looks can emit, and a few more."""
        return (2 * self.sizes.rounds + 1) * (self.sizes.depth + 1)

    def move_fixture(self, batch: int, prefix: int) -> None:
        """Make the place, and let go of engines that stand elsewhere, whose caches fill the device."""
        if self.fixture is None or (self.fixture.batch, self.fixture.prefix) != (batch, prefix):
            self.scripted_runs.clear()
            self.fixture = None
            gc.collect()
            self.fixture = BenchFixture(self.target_and_drafter[0], batch, prefix, self.max_emitted)

    def scripted_run(self, name: str) -> ScriptedRun:
        """The engine of this name at the place, warm."""
        assert self.fixture is not None
        if name not in self.scripted_runs:
            self.fallback_notes[name] = {}
            maker = engine_maker(self.fixture, self.sizes.rounds, *self.select_drafter(name, self.target_and_drafter[1]))
            self.scripted_runs[name] = prepare(maker, self.fixture, self.fallback_notes[name])
        return self.scripted_runs[name]

    def common_fields(self, samples: dict[str, list[RoundSample]], names: list[str]) -> dict[str, Any]:
        """What all of these rows say: times a round, whole and by part, tau and tokens a second, of all rows together."""
        assert self.fixture is not None
        found = {name: self.fallback_notes[name] for name in names if self.fallback_notes[name]}
        return {
            "us": {name: summarize_times([one.seconds for one in some]) for name, some in samples.items()},
            "parts_us": {name: parts_us(some) for name, some in samples.items()},
            "tau": {name: median(one.tau for one in some) for name, some in samples.items()},
            "tokens_per_second": {
                name: self.fixture.batch * median(one.tau / one.seconds for one in some) for name, some in samples.items()
            },
            "not_run": {f"{name}, {what}": why for name, notes in found.items() for what, why in notes.items()},
            "repeats": self.sizes.repeats, **self.count_waits(names),
        }  # fmt: skip

    def count_waits(self, names: list[str]) -> dict[str, Any]:
        """How often a round waits for the device: never, or at least once, and where first; unknown without a GPU."""
        if self.device.type != "cuda":
            return {"host_synchronisations": None}
        errors = [error for error in (self.scripted_run(name).find_synchronization() for name in names) if error is not None]
        return {"host_synchronisations": len(errors), **({"first_wait": errors[0]} if errors else {})}

    def build_roofline(self) -> Roofline:
        return Roofline(self.sizes.model, **self.machine_rates())

    def verify_row(self, place: BenchFixture) -> dict[str, Any]:
        """An autoregressive step and given trees; v(N), the verification of N nodes over such a step, in pairs."""
        names = [AR, *(f"N={nodes}" for nodes in self.sizes.nodes)]
        samples = sample_shuffled({name: self.scripted_run(name).sample_rounds for name in names}, self.sizes.repeats)
        row = self.common_fields(samples, names)
        least = self.build_roofline().verify_seconds(place.batch, place.prefix, 1)
        row |= {"floor_us": least * 1e6, "share_of_floor": least * 1e6 / row["us"][AR]["median"]}
        row["v"] = {name: verify_ratio(samples[AR], samples[name]) for name in names[1:]}
        row["v_floor"] = {f"N={nodes}": self.build_roofline().verify_seconds(place.batch, place.prefix, nodes) / least
                          for nodes in self.sizes.nodes}  # fmt: skip
        return row

    def eager_row(self, place: BenchFixture) -> dict[str, Any]:
        """The same rounds neither compiled nor captured: what graphs gain."""
        names = [AR, f"N={self.sizes.nodes[-1]}"]
        works: dict[str, Callable[[], RoundSample]] = {name: self.scripted_run(name).sample_rounds for name in names}
        for name in names:
            maker = engine_maker(place, self.sizes.rounds, *self.select_drafter(name, self.target_and_drafter[1]))
            works[f"{name}, eager"] = ScriptedRun(maker("eager"), place).sample_rounds
        samples = sample_shuffled(works, max(2, self.sizes.repeats // 4))
        row = self.common_fields(samples, names)
        row["times_ours"] = {
            name: median(b.seconds / a.seconds for a, b in zip(samples[name], samples[f"{name}, eager"])) for name in names
        }
        return row

    def drafted_row(self, tree: str, place: BenchFixture) -> dict[str, Any]:
        """EAGLE-3 rounds that keep so many tokens, or every draft, against autoregressive steps and the model of the parts."""
        one, other = self.scripted_run(AR), self.scripted_run(tree)
        builder = self.sizes.tree_builders()[tree]
        taus = {**{f"tau={tau:g}": tau for tau in self.sizes.taus}, "oracle": builder.depth + 1.0}
        works: dict[str, Any] = {
            AR: one.sample_rounds,
            **{name: partial(other.sample_rounds, tau) for name, tau in taus.items()},
        }
        alone = {name: partial(other.time_part, part) for part, name in enumerate(("draft", "verify", "accept"))}
        found = sample_shuffled({**works, **alone}, self.sizes.repeats)
        samples = {name: found[name] for name in works}
        row = self.common_fields(samples, [AR, tree])
        step, outside = (median(values) for values in zip(*[(one.seconds, one.parts["outside"]) for one in samples[AR]]))
        draft, verify, accept = (median(found[name]) for name in alone)
        parts = RoundCosts(step, draft, verify, accept, outside, builder.depth)
        best = self.build_roofline().max_efficiency(place.batch, place.prefix, builder.budget, builder.depth)
        row |= {"tree": builder.report_settings(), "alone_us": {name: median(found[name]) * 1e6 for name in alone}}
        return row | compute_gains(samples, parts, list(taus), best)
