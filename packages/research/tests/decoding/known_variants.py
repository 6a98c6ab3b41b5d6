"""Ways to decode beyond the eager loop with one drafter, for the test of the known distribution.

`python -m packages.research.tests.decoding.known_variants` prints the tables of all cases, with
texts and p-values; the names of `groups` below print a part of them.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain as concatenate
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from torch import nn

from packages.research.tests.decoding.union_of_tables import UnionOfTables
from spectrain.data.datastore import Datastore, hash_vocabulary, write_store
from spectrain.decoding.acceptance import Match, OpenSampling, SamplingRule
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.generation import no_callback, run_to_end
from spectrain.decoding.loop import EagerRunner, decode, decode_steps, make_request
from spectrain.decoding.selective import plan_rounds
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.context import Context
from spectrain.drafters.hybrid import DrafterWithCopies
from spectrain.drafters.layers.copies import CopySource
from spectrain.drafters.layers.skippable import SkippableDrafter
from spectrain.drafters.ngram import Ngram
from spectrain.drafters.retrieval import Retrieval
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees import Auto, Eagle2, TreeBuilder
from spectrain.trees.base import RoundPlan, RoundResult
from spectrain.trees.measured_policy import MeasuredPolicy
from spectrain.trees.measurements import Calibration, Latency
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.cascade.drafter import Cascade
from spectrain_research.controllers.builders import Thompson
from spectrain_research.jacobi.drafter import Jacobi
from spectrain_research.router.arms import Arm, Hedge
from spectrain_research.router.drafter import NUM_TIMED_ROUNDS, DrafterRouter
from spectrain_research.transport.linear_program import TruncatedLinearProgram
from spectrain_research.transport.rules import ImportanceSampling, KSeq, SpecHub, Transport
from spectrain_research.traversal.rule import Traversal
from spectrain_research.union.drafter import UnionDrafter
from spectrain_research.union.rule import MultiStepSampling
from tests.decoding.known_target import (
    CASES,
    OTHER_Q,
    Batch,
    Case,
    Outputs,
    Q,
    Table,
    chain,
    decode_eagerly,
    describe_uniformity,
    outputs_of,
    print_table,
    static,
)
from tests.trees.test_every import FILES, make_builder

# Its tokens occur before, so that they are copied.
REPEATING = (1, 2, 0, 2, 0, 0, 1, 0)
SIZES = (1, 2, 4, 8)


# Drafters


class LeavesRoundsOut(Table):
    """Drafts in some rounds only; which ones depends on what earlier rounds accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.skippable = SkippableDrafter(Table())

    def draft(self, context: Context) -> Draft:
        if int(context.lengths.sum()) % 3 == 0:
            self.skippable.skip(context)
            return Draft()
        return self.skippable.draft(context)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return self.skippable.verify(context, tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        self.skippable.commit(context, accepted)


class TableWithCopies(UnionDrafter):
    """The union of a table's tree and copies, which have the q of their weights."""

    def __init__(self, target: Target) -> None:
        Drafter.__init__(self)
        self.inner = nn.ModuleList([Table(), Ngram(target)])
        self.layers = ()


@cache
def open_known_store(target: Target) -> Datastore:
    """Open a store whose texts are drawn by the drafter's table, so that its copies differ from
    the target's texts as its drafts do.
    """
    generator = torch.Generator().manual_seed(7)
    texts = []
    for _ in range(40):
        text = [0]
        for _ in range(30):
            text.append(int(torch.multinomial(Q[text[-1]], 1, generator=generator)))
        texts.append(text)
    with TemporaryDirectory() as folder:
        facts = {"tokenizer": hash_vocabulary(target.tokenizer)}
        write_store(Path(folder), texts, ["What?"], [], facts)
        return Datastore(folder, target.tokenizer)


def make_retrieval(target: Target) -> Drafter:
    """Make the drafter that copies from the text and from the store."""
    drafter = Retrieval(target)
    drafter.copying.store = open_known_store(target)
    return drafter


def make_table_with_retrieval(target: Target) -> Drafter:
    """Merge the table's tree with copies from the text and from the store."""
    return DrafterWithCopies(Table(), CopySource(open_known_store(target)))


class CascadeOfTables(Cascade):
    """A table for which another one guesses, and which hands over to it."""

    capabilities = Capabilities()

    def __init__(self, handover: int | None, qualify: float, helper: Drafter) -> None:
        Drafter.__init__(self)
        self.inner = Table()
        self.helper = helper
        self.ahead = 2
        self.handover = handover
        self.qualify = qualify
        self.divergence = None
        self.layers = ()


class RouterOfTables(DrafterRouter):
    """Two tables, of which one drafts a round, or both vote. Its clock counts its readings."""

    capabilities = Capabilities()

    def __init__(self, by: Literal["hedge", "bandit", "vote"]) -> None:
        Drafter.__init__(self)
        self.inner = nn.ModuleList([Table(), Table(OTHER_Q.log())])
        self.by = by
        self.score_every = 4
        self.layers = ()
        self.hedge = Hedge(2, 16)
        self.arms = [Arm(self.hedge.fade, NUM_TIMED_ROUNDS) for _ in self.inner]
        self.rng = np.random.default_rng(0)
        self.clock = partial(next, count(0.0))
        self.verify_seconds = deque(maxlen=NUM_TIMED_ROUNDS)
        self.picks = []
        self.scored_all = False
        self.verified = None


# Ways to decode


def decode_captured(batch: Batch) -> Outputs:
    """Decode rounds of fixed shapes, as a graph holds them."""
    runner = CapturedRunner(
        batch.target, batch.rule, batch.drafter, batch.builder, rounds_per_read=2
    )
    return outputs_of(
        runner.decode(batch.prompts, batch.length, batch.keys, ignore_eos=True), batch.length
    )


def decode_captured_in_bursts(batch: Batch) -> Outputs:
    """Decode rounds of fixed shapes with one runner, whose state serves a batch after another."""
    runner = CapturedRunner(
        batch.target, batch.rule, batch.drafter, batch.builder, rounds_per_read=1
    )
    outputs: list[tuple[int, ...]] = []
    for keys in torch.tensor(batch.keys).split(500):
        prompts = [batch.prompt] * len(keys)
        outputs += outputs_of(
            runner.decode(prompts, batch.length, keys.tolist(), ignore_eos=True), batch.length
        )
    return outputs


def decode_in_two_parts(batch: Batch) -> Outputs:
    """Decode two tokens, then resume with these as a part of the prompt and with the same keys."""
    parts = batch.drafter, batch.builder, batch.keys
    first = decode(batch.target, batch.prompts, batch.rule, 2, *parts, ignore_eos=True)
    prompts = [generation.prompt + generation.output for generation in first]
    second = decode(batch.target, prompts, batch.rule, batch.length - 2, *parts, ignore_eos=True)
    return [
        (*begin, *end)
        for begin, end in zip(outputs_of(first, 2), outputs_of(second, batch.length - 2))
    ]


def decode_selectively(batch: Batch) -> Outputs:
    """Let the tree builder leave rounds out that it expects no gain of."""
    assert batch.drafter is not None and batch.builder is not None
    request = make_request(batch.target, batch.prompts, batch.length, batch.keys, ignore_eos=True)
    runner = EagerRunner(batch.target, batch.rule, batch.drafter, batch.builder)
    plan_rounds(runner, request)
    return outputs_of(run_to_end(decode_steps(runner, request), no_callback), batch.length)


class TimedPolicy(MeasuredPolicy):
    """Takes the seconds of a round from a table, so that some rounds draft and others do not."""

    def record(self, plan: RoundPlan, round: RoundResult) -> None:
        size = int(round.tree.num_drafted.max())
        seconds = {
            "draft": 0.1 * (size > 1),
            "verify": 1 + 0.2 * (size - 1),
            "accept": 0.0,
            "other": 0.0,
        }
        super().record(plan, replace(round, seconds=seconds))


def timed_auto(seed: int) -> TreeBuilder:
    """Make an automatic builder with known costs."""
    times = {size: 1 + 0.2 * (size - 1) for size in SIZES}
    builder = Auto(depth=3, budget=8, top_k=2)
    builder.round_policy = TimedPolicy(3, 8, 2, memory=64, refit=False)
    builder.prepare(
        Calibration(latency=Latency({0: times}, {0: dict.fromkeys(SIZES, 0.1)}, 0.1, batch=100))
    )
    builder.round_policy.costs.timing_seconds = 1e9  # nothing is timed anew
    return builder


def thompson(seed: int) -> TreeBuilder:
    """Make a chain whose length is learned."""
    builder = Thompson(3, "sampled", seed=seed)
    builder.prepare(Calibration(latency=Latency({0: {1: 1.0, 4: 1.1}}, {0: {1: 0.1}}, 0.1)))
    return builder


def make_drawn_builder(file: Path, seed: int) -> TreeBuilder | None:
    """Make the builder of a file of conf/tree with children that are drawn, if it draws."""
    builder = make_builder(file, temperature=1.0)
    if builder is not None:
        builder.seed = seed
    return builder


def is_drawn_tree(file: Path) -> bool:
    """Whether the builder of a file draws children and is no chain."""
    builder = make_builder(file, temperature=1.0)
    return builder is not None and not builder.traits.is_chain


# Cases

RULES: list[tuple[str, type[SamplingRule], Callable[[int], TreeBuilder | None]]] = [
    ("chain, chain of 3", SpeculativeSampling, chain(3)),
    ("block, chain of 3", Block, chain(3)),
    ("recursive, sampled tree", RecursiveRejection, static("sampled")),
    ("recursive, tree without replacement", RecursiveRejection, static("without_replacement")),
    ("traversal, sampled tree", Traversal, static("sampled")),
    ("traversal, top and sampled", Traversal, static("top_and_sampled")),
    ("kseq, sampled tree", KSeq, static("sampled")),
    ("importance, sampled tree", ImportanceSampling, static("sampled")),
    ("programme, sampled tree", TruncatedLinearProgram, static("sampled")),
    ("transport, top and sampled", Transport, static("top_and_sampled")),
    ("spechub, top and sampled", SpecHub, static("top_and_sampled")),
    ("specinfer, union of two", MultiStepSampling, chain(2)),
    ("match, most likely tree", Match, lambda seed: Eagle2(3, 6, 2)),
    ("match, sampled tree", Match, static("sampled")),
]
CORE = RULES[:5]
# The union has drafters of its own.
WITH_ONE_DRAFTER = [entry for entry in RULES if entry[1] is not MultiStepSampling]


def make_drafter_of(name: str) -> Callable[[Target], Drafter]:
    return (
        (lambda target: UnionOfTables())
        if name.startswith("specinfer")
        else (lambda target: Table())
    )


SHAPED = [
    Case(f"{name}; {label}", rule, builder, make_drafter_of(name), settings)
    for label, settings in {
        "temperature 0.6": {"temperature": 0.6},
        "temperature 1.5, top-k 2": {"temperature": 1.5, "top_k": 2},
        "top-p 0.7": {"top_p": 0.7},
    }.items()
    for name, rule, builder in RULES
]
LONG = [
    Case(f"{name}; six tokens", rule, builder, make_drafter_of(name), length=6)
    for name, rule, builder in RULES
]
LEFT_OUT = [
    *(
        Case(
            f"{name}; rounds left out",
            rule,
            builder,
            lambda target: LeavesRoundsOut(),
            batch_size=100,
        )
        for name, rule, builder in WITH_ONE_DRAFTER
    ),
    Case(
        "match, auto; rounds left out", Match, timed_auto, decode=decode_selectively, batch_size=100
    ),
    Case("chain, chain of a learned length", SpeculativeSampling, thompson, batch_size=100),
    Case("block, chain of a learned length", Block, thompson, batch_size=100),
]
COPIES = [
    Case(
        "match, table and copies",
        Match,
        lambda seed: Eagle2(3, 6, 2),
        lambda target: DrafterWithCopies(Table(), CopySource(None)),
        prompt=REPEATING,
    ),
    Case("match, copies", Match, lambda seed: Eagle2(3, 6, 2), Ngram, prompt=REPEATING),
    Case(
        "specinfer, table and copies",
        MultiStepSampling,
        chain(2),
        TableWithCopies,
        prompt=REPEATING,
        batch_size=500,
    ),
]
RETRIEVED = [
    Case(
        f"match, {label}",
        Match,
        builder,
        make_drafter,
        prompt=REPEATING,
        decode=decode_selectively if builder is timed_auto else decode_eagerly,
        batch_size=500,
    )
    for label, builder, make_drafter in (
        ("copies from a store", lambda seed: Eagle2(3, 6, 2), make_retrieval),
        ("copies from a store, auto", timed_auto, make_retrieval),
        ("table and copies from a store", lambda seed: Eagle2(3, 6, 2), make_table_with_retrieval),
        ("table and copies from a store, auto", timed_auto, make_table_with_retrieval),
    )
]
AUTO = [
    Case(f"match, auto, batches of {size}", Match, timed_auto, batch_size=size)
    for size in (10, 500)
]
CASCADES = [
    Case(f"{name}; {label}", rule, builder, make_drafter, prompt=REPEATING, batch_size=500)
    for label, make_drafter in {
        "cascade, qualified": lambda target: CascadeOfTables(None, 0.3, Table(OTHER_Q.log())),
        "cascade that hands over": lambda target: CascadeOfTables(1, 1.0, Table(OTHER_Q.log())),
        "cascade with copies": lambda target: CascadeOfTables(None, 0.3, Ngram(target)),
    }.items()
    for name, rule, builder in (
        (*CORE, RULES[-2]) if label != "cascade, qualified" else WITH_ONE_DRAFTER
    )
]
CHOSEN = [
    Case(
        f"{name}; chosen by {by}",
        rule,
        builder,
        lambda target, by=by: RouterOfTables(by),
        batch_size=100,
    )
    for by in ("hedge", "bandit", "vote")
    for name, rule, builder in (RULES[:3] if by != "hedge" else WITH_ONE_DRAFTER)
]
WINDOWS = [
    Case(
        f"{rule.name}, Jacobi window of 3",
        rule,
        chain(3),
        lambda target: Jacobi(target, "speculative"),
        length=6,
    )
    for rule in (SpeculativeSampling, RecursiveRejection, Block, Traversal)
]
CAPTURED = [
    Case(f"{name}; fixed shapes", rule, builder, decode=decode_captured)
    for name, rule, builder in (
        *RULES[:1],
        *RULES[2:4],
        *RULES[-2:],
        ("recursive, no drafter", RecursiveRejection, lambda seed: None),
        ("sample, chain of 3", OpenSampling, chain(3)),
    )
    if "sampled tree" not in name or rule is not Match
]
CAPTURED += [
    Case(
        f"{name}; fixed shapes, {label}",
        rule,
        builder,
        settings=settings,
        length=6,
        decode=decode_captured_in_bursts,
    )
    for label, settings in {
        "six tokens": dict[str, float](),
        "six tokens of two likely ones": {"temperature": 1.5, "top_k": 2},
    }.items()
    for name, rule, builder in (RULES[0], RULES[2], RULES[-1])
]
RESUMED = [
    Case(f"{name}; resumed", rule, builder, make_drafter_of(name), decode=decode_in_two_parts)
    for name, rule, builder in RULES
]
TRAVERSED = [
    Case(f"traversal, tree={file.stem}", Traversal, partial(make_drawn_builder, file))
    for file in FILES
    if is_drawn_tree(file)
]
VARIANTS = [
    *SHAPED,
    *LONG,
    *LEFT_OUT,
    *COPIES,
    *RETRIEVED,
    *AUTO,
    *CASCADES,
    *CHOSEN,
    *WINDOWS,
    *CAPTURED,
    *RESUMED,
    *TRAVERSED,
]
# Rounds of these do not depend on the number of texts.
INVARIANT = [*SHAPED, *COPIES, *RETRIEVED[::2], *CASCADES, *WINDOWS, *CAPTURED, *RESUMED]
SMALL_BATCHES = [
    replace(case, name=f"{case.name}, batches of {size}", batch_size=size)
    for case in (
        next(case for case in CASES if case.name == "block, chain of 3"),
        next(case for case in CAPTURED if case.name == "recursive, sampled tree; fixed shapes"),
        next(case for case in LEFT_OUT if case.decode is decode_selectively),
        RETRIEVED[-1],
    )
    for size in (1, 3)
]

# The columns of the grid in docs/random-draws.md, which `list_grid` fills.
MODES = {
    "shaped": SHAPED,
    "six tokens": LONG,
    "left out": LEFT_OUT,
    "copies": COPIES + RETRIEVED,
    "`auto`": AUTO,
    "cascades": CASCADES,
    "chosen": CHOSEN,
    "Jacobi": WINDOWS,
    "fixed shapes": CAPTURED,
    "resumed": RESUMED,
}


def list_grid(trees: Sequence[Case]) -> list[str]:
    """Return the rows of the grid: by rule, its cases with a plain drafter and of each mode."""
    groups = {"trees": [*trees, *TRAVERSED], **MODES}
    counts = {
        mode: Counter(re.split("[,;]", case.name)[0] for case in cases)
        for mode, cases in groups.items()
    }
    rules = dict.fromkeys(re.split("[,;]", case.name)[0] for case in trees)
    rows = [["rule", *groups], ["---"] * (1 + len(groups))]
    rows += [[f"`{rule}`", *(str(counts[mode][rule] or "-") for mode in groups)] for rule in rules]
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    torch.set_num_threads(1)
    groups = {
        "base": CASES,
        "variants": VARIANTS,
        "captured": CAPTURED,
        "auto": AUTO,
        "retrieved": RETRIEVED,
        "cascades": CASCADES,
        "chosen": CHOSEN,
        "small": SMALL_BATCHES,
        "long": LONG,
        "left": LEFT_OUT,
        "resumed": RESUMED,
        "traversed": TRAVERSED,
    }
    names = sys.argv[1:] or ["base", "variants"]
    chosen = list(concatenate.from_iterable(groups[name] for name in names))
    print(describe_uniformity(print_table(chosen, 10_000, (1, 2, 3))))
