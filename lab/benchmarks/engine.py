"""`python -m lab.benchmarks.engine`: what the decoding engine reaches at the size of Llama-3.1-8B,
with random weights.

Parts: counts (kernel launches a round, counted without a device); identity (the engine's answers
against the loop's, in float32); single and batched (autoregressive steps, verification and EAGLE-3
rounds at several prefixes, with one row and with several); training (a drafter's step without its
target). A script decides which tokens are accepted, so times are measured and tau is an assumption.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from statistics import median
from typing import Any, Literal

import torch

from lab.benchmarks import launches
from lab.benchmarks.launches import count_round
from spectrain.decoding import captured as engine
from spectrain.decoding import generation
from spectrain.decoding import loop as decode
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner
from spectrain.drafters import base, context, eagle3
from spectrain.drafters.base import Drafter
from spectrain.drafters.eagle3 import Eagle3
from spectrain.kernels import (
    kv_append,
    kv_commit,
    rotate_append,
    round_commit,
    sampling_cuts,
    token_commit,
    tree_attention,
    tree_recursive,
    tree_verify,
    tree_walks,
)
from spectrain.models import compiled_layers as compiled
from spectrain.models.fast import fuse_text_layers, merge_linears
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder

from . import identity, rounds, training
from .command import run_benchmark
from .identity import FAMILIES, identity_row, target_loaders
from .measure import sample_shuffled, summarize_times
from .models import MODELS, ModelGeometry, build_meta_target, random_drafter, random_target
from .rounds import (
    BenchFixture,
    FixedTreeDrafter,
    RoundSample,
    ScriptedRun,
    engine_maker,
    fixed_tree,
    prepare,
)
from .speedup import (
    AR,
    Roofline,
    RoundCosts,
    compute_gains,
    engine_goal_values,
    parts_us,
    verify_ratio,
)
from .steps import Bench, Measurement, source_digest
from .training import training_row

ROUND_MODULES = decode, generation, context, base
"""The modules whose code every round runs, whatever the drafter."""

ModelSize = Literal["8b", "1.5b", "135m"]
EnginePart = Literal["all", "counts", "identity", "single", "batched", "training"]


@dataclass(frozen=True)
class EngineSizes:
    """The shapes to measure, and the numbers of samples."""

    model: ModelGeometry = field(default_factory=ModelGeometry)
    copied_bytes: int = 2 << 30
    product_width: int = 8192
    batches: tuple[int, ...] = (1, 8)
    prefixes: tuple[int, ...] = (1024, 8192, 32768)
    nodes: tuple[int, ...] = (8, 16, 32, 64)  # of fixed trees
    budgets: tuple[int, ...] = (16, 32, 64)  # of dynamic trees
    depth: int = 5
    chain: int = 3
    taus: tuple[float, ...] = (2.0, 4.0)
    rounds: int = 2  # between two reads of the host
    repeats: int = 10  # samples of 16 rounds, which a pause ends
    new_tokens: int = 64  # of each answer that is compared
    conversations: tuple[int, int] = (4, 2048)  # of a training step: number, tokens each

    def tree_builders(self) -> dict[str, TreeBuilder]:
        """Return the builders of EAGLE-3's trees, by the end of the row's name."""
        dynamic: dict[str, TreeBuilder] = {
            f"eagle2 N={budget}": Eagle2(self.depth, budget) for budget in self.budgets
        }
        return {f"chain N={self.chain + 1}": Chain(self.chain), **dynamic}

    def cell_shapes(self) -> list[tuple[int, int]]:
        """Return every pair of batch and prefix."""
        return list(product(self.batches, self.prefixes))

    def priority_rows(self) -> list[str]:
        """Return the rows to measure first, since every further tree takes a compilation.

        At the shortest prefix these are all trees; at longer ones a chain and the dynamic tree that
        suits the batch.
        """
        trees = list(self.tree_builders())
        rows = []
        for batch, prefix in self.cell_shapes():
            selected = (
                trees
                if prefix == self.prefixes[0]
                else [trees[0], trees[-1] if batch == 1 else trees[1]]
            )
            rows += [f"engine/B={batch} prefix={prefix}/{tree}" for tree in selected]
        return rows


TOY = EngineSizes(
    ModelGeometry(2, 64, 128, 4, 2, 16, 300, 100, 4096), 1 << 16, 32, (1, 2), (20, 300), (4, 9),
    (6, 10), 3, 2, (2.0,), 2, 2, 6,
    (2, 16),
)  # fmt: skip
"""Sizes that run every line in seconds on any machine; the numbers mean nothing."""


@dataclass
class EngineBench(Bench):
    """Measure `part` and write each row into `out` as soon as it is measured."""

    # Part to measure: all, counts, identity, single, batched or training.
    part: EnginePart = "all"
    # JSON file of the results; rows that it holds are not measured again unless their code changed.
    out: str = "lab/results/engine.json"
    # Size of the target with random weights: 8b, 1.5b or 135m; goals are those of 8b.
    model: ModelSize = "8b"
    # Whether to run every line at a small size, on any machine; the numbers then mean nothing.
    toy: bool = False
    # Seconds after which no new row is begun; the slowest row may take two minutes more, most of it
    # compilation.
    seconds: float = 360
    # Directory of a further target whose answers are compared in part identity; null compares the
    # tiny target's only.
    target: str | None = None
    row_seconds = 240  # a first row compiles
    fixture: BenchFixture | None = field(default=None, init=False)  # where the prepared engines run
    scripted_runs: dict[str, ScriptedRun] = field(default_factory=dict, init=False)  # by row
    # why a row has no graph
    fallback_notes: dict[str, dict[str, str]] = field(default_factory=dict, init=False)

    @property
    def sizes(self) -> EngineSizes:
        return TOY if self.toy else EngineSizes(MODELS[self.model])

    def goal_values(self) -> dict[str, float]:
        has_goals = not self.toy and self.model == "8b"
        if not has_goals:
            return {}
        return engine_goal_values(self.results.rows, self.sizes.priority_rows())

    def plan_measurements(self) -> Iterator[Measurement]:
        yield from self.plan_ceilings()
        parts: dict[str, Callable[[], Iterator[Measurement]]] = {
            "counts": self.plan_counts,
            "identity": self.plan_identity,
            "single": partial(self.plan_rounds, single=True),
            "batched": partial(self.plan_rounds, single=False),
            "training": self.plan_training,
        }
        for name, plan in parts.items():
            if self.part in ("all", name):
                yield from plan()

    def plan_counts(self) -> Iterator[Measurement]:
        source = source_digest(launches, engine, *ROUND_MODULES, eagle3)
        last = f"N={self.sizes.nodes[-1]}"
        for name in (AR, last, *self.sizes.tree_builders()):
            yield Measurement(f"counts/{name}", source, partial(self.count_row, name))

    def count_row(self, name: str) -> dict[str, Any]:
        """Count the kernel launches of a greedy round before compilation, and the bytes that its
        operations move.
        """
        target = build_meta_target(self.sizes.model, torch.bfloat16)
        drafter = random_drafter(target, self.sizes.model, torch.bfloat16)
        # As `pack_weights` and `prepare_for_decoding` do on a GPU.
        merge_linears(target.model)
        fuse_text_layers(target.model)
        merge_linears(drafter, trainable=True)
        counts = count_round(CapturedRunner(target, Greedy(), *self.select_drafter(name, drafter)))
        return {
            "parts": counts,
            "launches": sum(part["launches"] for part in counts.values()),
            "not_run": {},
        }

    def select_drafter(
        self, name: str, drafter: Eagle3
    ) -> tuple[Drafter | None, TreeBuilder | None]:
        """Return the drafter and the builder of a row."""
        if name == AR:
            return None, None
        trees = self.sizes.tree_builders()
        if name in trees:
            return drafter, trees[name]
        tree = fixed_tree(int(name.removeprefix("N=")), self.sizes.depth)
        return FixedTreeDrafter(tree, drafter.draft_ids.device), tree

    def plan_identity(self) -> Iterator[Measurement]:
        source = source_digest(identity, engine, compiled, *ROUND_MODULES)
        for name, load in target_loaders(self.target, self.device).items():
            for family in FAMILIES:
                yield Measurement(
                    f"identity/{name}/{family}",
                    source,
                    partial(identity_row, load, family, self.sizes.new_tokens),
                )

    def plan_training(self) -> Iterator[Measurement]:
        conversations, length = self.sizes.conversations
        name = f"training/eagle3 B={conversations} T={length}"
        yield Measurement(
            name,
            source_digest(training, base, eagle3),
            partial(self.training_row, conversations, length),
        )

    def training_row(self, conversations: int, length: int) -> dict[str, Any]:
        rate = self.machine_rates()["flops_per_second"]
        repeats = max(3, self.sizes.repeats // 2)
        return training_row(
            self.sizes.model, conversations, length, repeats, rate, self.dtype, self.device
        )

    def plan_rounds(self, single: bool) -> Iterator[Measurement]:
        """Yield verification and, at the shortest prefix, rounds without graphs; then EAGLE-3,
        the priority rows first.
        """
        cells = [cell for cell in self.sizes.cell_shapes() if (cell[0] == 1) == single]
        for is_first in (True, False):
            for batch, prefix in cells:
                title = f"engine/B={batch} prefix={prefix}"
                if is_first:
                    yield self.plan_measurement(f"{title}/verify", batch, prefix, self.verify_row)
                if is_first and prefix == self.sizes.prefixes[0]:
                    yield self.plan_measurement(f"{title}/eager", batch, prefix, self.eager_row)
                for tree in self.sizes.tree_builders():
                    if (f"{title}/{tree}" in self.sizes.priority_rows()) == is_first:
                        yield self.plan_measurement(
                            f"{title}/{tree}", batch, prefix, partial(self.drafted_row, tree)
                        )

    def plan_measurement(self, name: str, batch: int, prefix: int, row: Any) -> Measurement:
        """Return the measurement of a row whose fixture has this batch and prefix."""
        kernels = (
            tree_attention,
            tree_verify,
            tree_recursive,
            tree_walks,
            sampling_cuts,
            kv_append,
            rotate_append,
            kv_commit,
            token_commit,
            round_commit,
        )
        code = engine, compiled, *ROUND_MODULES, eagle3, rounds, *kernels

        @torch.inference_mode()
        def measure() -> dict[str, Any]:
            self.move_fixture(batch, prefix)
            assert self.fixture is not None
            return {
                "batch": batch,
                "prefix": prefix,
                "bound": self.fixture.cache_slots,
                **row(self.fixture),
            }

        return Measurement(name, source_digest(*code), measure)

    @cached_property
    def target_and_drafter(self) -> tuple[Target, Eagle3]:
        torch.manual_seed(0)
        # Packed weights are renewed when the version of a tensor changes; a tensor that is made in
        # inference mode has none.
        with torch.inference_mode(False):
            target = random_target(self.sizes.model, self.device, self.dtype)
            # As every command does: on a GPU, q, k, v and gate, up are one product each.
            target.pack_weights()
            return target, random_drafter(target, self.sizes.model, self.dtype)

    @property
    def max_emitted(self) -> int:
        """The tokens that a sample up to a pause can emit, and a few more."""
        return (engine.READS_PER_PAUSE * self.sizes.rounds + 1) * (self.sizes.depth + 1)

    def move_fixture(self, batch: int, prefix: int) -> None:
        """Make the fixture, and drop the engines of another one first, because their caches fill
        the device.
        """
        if self.fixture is None or (self.fixture.batch, self.fixture.prefix) != (batch, prefix):
            self.scripted_runs.clear()
            self.fixture = None
            gc.collect()
            self.fixture = BenchFixture(self.target_and_drafter[0], batch, prefix, self.max_emitted)

    def scripted_run(self, name: str) -> ScriptedRun:
        """Return the warm engine of a row at the fixture."""
        assert self.fixture is not None
        if name not in self.scripted_runs:
            self.fallback_notes[name] = {}
            maker = engine_maker(
                self.fixture,
                self.sizes.rounds,
                *self.select_drafter(name, self.target_and_drafter[1]),
            )
            self.scripted_runs[name] = prepare(maker, self.fixture, self.fallback_notes[name])
        return self.scripted_runs[name]

    def common_fields(
        self, samples: dict[str, list[RoundSample]], names: list[str]
    ) -> dict[str, Any]:
        """Return the fields of every row: times a round in total and by part, tau, and tokens a
        second over all sequences.
        """
        assert self.fixture is not None
        notes_by_name = {
            name: self.fallback_notes[name] for name in names if self.fallback_notes[name]
        }
        return {
            "us": {
                name: summarize_times([sample.seconds for sample in timed])
                for name, timed in samples.items()
            },
            "parts_us": {name: parts_us(timed) for name, timed in samples.items()},
            "tau": {
                name: median(sample.tau for sample in timed) for name, timed in samples.items()
            },
            "tokens_per_second": {
                name: self.fixture.batch * median(sample.tau / sample.seconds for sample in timed)
                for name, timed in samples.items()
            },
            "not_run": {
                f"{name}, {part}": cause
                for name, notes in notes_by_name.items()
                for part, cause in notes.items()
            },
            "repeats": self.sizes.repeats,
            **self.count_waits(names),
        }

    def count_waits(self, names: list[str]) -> dict[str, Any]:
        """Count the rows whose rounds wait for the device, and return the first such wait; None
        without a GPU.
        """
        if self.device.type != "cuda":
            return {"host_synchronisations": None}
        errors = [
            error
            for error in (self.scripted_run(name).find_synchronization() for name in names)
            if error is not None
        ]
        return {
            "host_synchronisations": len(errors),
            **({"first_wait": errors[0]} if errors else {}),
        }

    def build_roofline(self) -> Roofline:
        return Roofline(self.sizes.model, **self.machine_rates())

    def verify_row(self, fixture: BenchFixture) -> dict[str, Any]:
        """Measure an autoregressive step and fixed trees; v(N) is the verification of N nodes
        over such a step, in pairs.
        """
        names = [AR, *(f"N={nodes}" for nodes in self.sizes.nodes)]
        samples = sample_shuffled(
            {name: self.scripted_run(name).sample_rounds for name in names}, self.sizes.repeats
        )
        row = self.common_fields(samples, names)
        floor = self.build_roofline().verify_seconds(fixture.batch, fixture.prefix, 1)
        row |= {"floor_us": floor * 1e6, "share_of_floor": floor * 1e6 / row["us"][AR]["median"]}
        row["v"] = {name: verify_ratio(samples[AR], samples[name]) for name in names[1:]}
        row["v_floor"] = {
            f"N={nodes}": self.build_roofline().verify_seconds(fixture.batch, fixture.prefix, nodes)
            / floor
            for nodes in self.sizes.nodes
        }
        return row

    def eager_row(self, fixture: BenchFixture) -> dict[str, Any]:
        """Measure the same rounds without compilation and graphs, to show what graphs gain."""
        names = [AR, f"N={self.sizes.nodes[-1]}"]
        works: dict[str, Callable[[], RoundSample]] = {
            name: self.scripted_run(name).sample_rounds for name in names
        }
        for name in names:
            maker = engine_maker(
                fixture, self.sizes.rounds, *self.select_drafter(name, self.target_and_drafter[1])
            )
            works[f"{name}, eager"] = ScriptedRun(maker("eager"), fixture).sample_rounds
        samples = sample_shuffled(works, max(2, self.sizes.repeats // 2))
        row = self.common_fields(samples, names)
        row["times_ours"] = {
            name: median(
                b.seconds / a.seconds for a, b in zip(samples[name], samples[f"{name}, eager"])
            )
            for name in names
        }
        return row

    def drafted_row(self, tree: str, fixture: BenchFixture) -> dict[str, Any]:
        """Measure EAGLE-3 rounds of scripted and full acceptance against autoregressive steps
        and the cost model.
        """
        autoregressive = self.scripted_run(AR)
        drafted = self.scripted_run(tree)
        builder = self.sizes.tree_builders()[tree]
        taus = {**{f"tau={tau:g}": tau for tau in self.sizes.taus}, "oracle": builder.depth + 1.0}
        works: dict[str, Any] = {
            AR: autoregressive.sample_rounds,
            **{name: partial(drafted.sample_rounds, tau) for name, tau in taus.items()},
        }
        parts_by_name = {
            name: partial(drafted.time_part, part)
            for part, name in enumerate(("draft", "verify", "accept"))
        }
        measured = sample_shuffled({**works, **parts_by_name}, self.sizes.repeats)
        samples = {name: measured[name] for name in works}
        row = self.common_fields(samples, [AR, tree])
        step, outside = (
            median(values)
            for values in zip(
                *[(sample.seconds, sample.parts["outside"]) for sample in samples[AR]]
            )
        )
        draft, verify, accept = (median(measured[name]) for name in parts_by_name)
        costs = RoundCosts(step, draft, verify, accept, outside, builder.depth)
        best = self.build_roofline().max_efficiency(
            fixture.batch, fixture.prefix, builder.budget, builder.depth
        )
        row |= {
            "tree": builder.report_settings(),
            "alone_us": {name: median(measured[name]) * 1e6 for name in parts_by_name},
        }
        return row | compute_gains(samples, costs, list(taus), best)


if __name__ == "__main__":
    run_benchmark(EngineBench)
