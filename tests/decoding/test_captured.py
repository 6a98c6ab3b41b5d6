"""The engine without host synchronization gives what the loop gives."""

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectrain.decoding import captured
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.captured import (
    MAX_CACHED_STATES,
    SPARE_MEMORY,
    CapturedRunner,
    round_up_length,
)
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import Request, RoundOutcome, decode
from spectrain.decoding.static_rounds import RoundTimer
from spectrain.decoding.teacher_forcing import PresetChainBuilder, TeacherForcedBuilder
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.dflash import DFlash, DFlashConfig
from spectrain.drafters.dflash2 import DFlash2, DFlash2Config
from spectrain.drafters.dspark import DSpark, DSparkConfig
from spectrain.drafters.eagle1 import Eagle1
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.medusa import Medusa
from spectrain.drafters.mtp import Mtp
from spectrain.drafters.ngram import Ngram
from spectrain.drafters.pard import Pard
from spectrain.drafters.peagle import PEagle
from spectrain.errors import UserError
from spectrain.kernels.dispatch import run_on_cpu
from spectrain.models.accelerator import Accelerator, accelerator
from spectrain.models.compiled_layers import compile_layers
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain.trees.fixed import Static
from tests.installed import load_cases
from tests.targets import cut_tiny

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [9, 10], [100, 3, 44, 8]]


# Cases of installed packages.
CASES = load_cases(__name__)

DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "eagle3": lambda target: Eagle3(target, vocab_size=512),
    "eagle3 window": lambda target: Eagle3(
        target, vocab_size=512, num_layers=2, window=4, architecture={"qk_norm": True}
    ),
    "medusa": lambda target: Medusa(target, num_heads=3, vocab_size=512),
    "eagle1": lambda target: Eagle1(target),
    "causal": lambda target: Causal(target, num_layers=2),
    "early_exit": lambda target: EarlyExit(target, exit_layer=2),
    "peagle": lambda target: PEagle(target, num_drafts=4, num_layers=2, vocab_size=512, window=6),
    "mtp": lambda target: Mtp(target),
    "pard": lambda target: Pard(target, num_drafts=4, num_layers=2),
    "pard2": lambda target: Pard(target, num_drafts=4, num_layers=2, layers=[1, 2]),
    "dflash": lambda target: DFlash(
        target, DFlashConfig(block_size=4, num_layers=2, vocab_size=512)
    ),
    "dflash causal": lambda target: DFlash(
        target, DFlashConfig(block_size=4, num_layers=1, causal=True, window=6)
    ),
    "dspark": lambda target: DSpark(
        target, DSparkConfig(block_size=3, num_layers=1, rank=8, markov_head="rnn")
    ),
    "dflash2": lambda target: DFlash2(
        target, DFlash2Config(block_size=4, num_layers=1, selector_rank=8)
    ),
    **CASES.get("DRAFTERS", {}),
}
BUILDERS: dict[str, Callable[[], TreeBuilder]] = {
    "chain": lambda: Chain(3),
    "eagle2": lambda: Eagle2(3, 10, 3),
    "static": lambda: Static(paths=[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
    **CASES.get("BUILDERS", {}),
}


def list_facts(generations: list[Generation]) -> list[tuple[object, ...]]:
    """All that does not depend on the clock."""
    return [
        (
            g.prompt,
            g.output,
            g.round_lengths,
            g.depths,
            g.node_counts,
            g.idle_counts,
            g.is_cut,
            g.is_done,
            g.batch_size,
        )
        for g in generations
    ]


def assert_same_rounds(
    target: Target,
    rule: AcceptanceRule,
    drafter: Drafter | None,
    builder: TreeBuilder | None,
    rounds: int = 4,
) -> CapturedRunner:
    """Check batches of several sizes and lengths, decoded one after another by one engine."""
    engine = CapturedRunner(target, rule, drafter, builder, rounds)
    for count, limit, ignore_eos in ((3, 7, True), (1, 8, False), (3, 5, False), (2, 2, True)):
        rows = list(range(3, 3 + count))
        expected = decode(
            target, PROMPTS[:count], rule, limit, drafter, builder, rows, ignore_eos=ignore_eos
        )
        assert list_facts(engine.decode(PROMPTS[:count], limit, rows, ignore_eos)) == list_facts(
            expected
        )
    return engine


# What these have run stays in the cache.
KEEPING = tuple(name for name in ("early_exit", "layer_skip", "kangaroo") if name in DRAFTERS)
# Trees that omit nodes that were run.
LEAVING = tuple(name for name in ("eagle2", "entropy") if name in BUILDERS)


@pytest.mark.sweep(10)
@pytest.mark.parametrize(
    ("drafter", "builder"),
    [pair for pair in product(DRAFTERS, BUILDERS) if pair not in product(KEEPING, LEAVING)],
)
def test_every_family_and_tree_equals_the_loop(shallow: Target, drafter: str, builder: str) -> None:
    """Tokens, accepted lengths, depths and sizes of every round equal those of the eager loop."""
    built = DRAFTERS[drafter](shallow).eval()
    engine = assert_same_rounds(shallow, Greedy(), built, BUILDERS[builder]())
    assert max(max(generation.round_lengths) for generation in engine.decode(PROMPTS, 24)) > (
        drafter in ("causal", "pard", "early_exit", "layer_skip")
    )


@pytest.mark.parametrize("builder", LEAVING)
@pytest.mark.parametrize("drafter", KEEPING)
def test_tree_that_omits_run_nodes_is_refused(shallow: Target, drafter: str, builder: str) -> None:
    """The error names the tree and the drafter."""
    with pytest.raises(UserError, match=f"tree={builder} omits nodes that drafter=[a-z]* has run"):
        CapturedRunner(shallow, Greedy(), DRAFTERS[drafter](shallow).eval(), BUILDERS[builder]())


@pytest.mark.sweep(3, free=("rule", "builder"))
@pytest.mark.parametrize(
    ("rule", "builder"),
    [
        (Match(0.8, seed=3), Eagle2(3, 10, 3)),
        (Match(1.3, top_k=40, top_p=0.9), Chain(3, "sampled", seed=5)),
        (
            RecursiveRejection(0.9, top_p=0.95, seed=2),
            Static(paths=[[0], [1], [0, 0], [1, 0]], children="without_replacement"),
        ),
        (
            RecursiveRejection(),
            Static(paths=[[0], [1], [0, 0], [1, 0]], children="sampled", temperature=0.7),
        ),
        (SpeculativeSampling(seed=9), Chain(3, "sampled")),
    ],
    ids=[
        "match-eagle2",
        "match-drawn",
        "without-replacement",
        "with-replacement",
        "speculative-sampling",
    ],
)
@pytest.mark.parametrize("drafter", ["eagle3", "causal", *CASES.get("drafters_with_state", ())])
def test_drawn_tokens_equal_those_of_the_loop(
    shallow: Target, drafter: str, rule: AcceptanceRule, builder: TreeBuilder
) -> None:
    """Random numbers come from counters of sequence and position, so both draw the same trees
    and tokens.
    """
    assert_same_rounds(shallow, rule, DRAFTERS[drafter](shallow).eval(), builder)


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_rounds_that_can_be_captured_are_counted(shallow: Target, drafter: str | None) -> None:
    """All rounds count but the one in which a drafter reads the prompt: a capture waits for two."""
    built = None if drafter is None else DRAFTERS[drafter](shallow).eval()
    engine = CapturedRunner(
        shallow, Greedy(), built, None if built is None else Chain(2), rounds_per_read=1
    )
    (done,) = engine.decode(PROMPTS[:1], 12, ignore_eos=True)
    (state,) = engine.states.values()
    assert state.num_warm_rounds == len(done.round_lengths) - (built is not None)


class RoundTrace(TorchDispatchMode):
    """Records what a graph would hold of a round: its operations, numbers of the host among their
    arguments, and the storages of tensors that the round did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[object, ...]] = []
        self.created: set[int] = set()
        self.references: list[object] = []  # so that no storage is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.steps.append((func.name(), *map(self.describe_leaf, tree_leaves((args, kwargs)))))
        storages = {
            storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        self.created |= {
            storage_of(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)
        } - storages
        self.references.append((args, kwargs, out))
        return out

    def describe_leaf(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor) or leaf.device.type == "cpu":
            return leaf if not isinstance(leaf, Tensor) else leaf.item()  # a graph holds its value
        where = "made" if storage_of(leaf) in self.created else storage_of(leaf)
        return where, leaf.storage_offset(), tuple(leaf.shape), leaf.stride(), leaf.dtype


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.sweep(4, free=("drafter", "builder"))
@pytest.mark.parametrize(
    ("drafter", "builder"),
    [
        (None, "chain"),
        *(
            pair
            for pair in product(DRAFTERS, ("chain", "eagle2"))
            if pair not in product(KEEPING, LEAVING)
        ),
    ],
)
def test_every_round_runs_the_captured_operations(drafter: str | None, builder: str) -> None:
    """Later rounds, and those of other prompts, do what a graph holds of an earlier one: the same
    operations on the same numbers of the host and on tensors in the same storages. Tensors without
    data show it, by the kernels that a GPU runs."""
    target = cut_tiny(3)
    built = None if drafter is None else DRAFTERS[drafter](target).eval().to("meta")
    target.to("meta")
    engine = CapturedRunner(
        target, Match(0.8, top_k=5), built, None if built is None else BUILDERS[builder]()
    )
    traces = []
    with torch.inference_mode():
        for prompts, rounds in (([[0] * 7, [0] * 4], 2), ([[0] * 5, [0] * 9], 1)):
            engine.start_batch(Request(prompts, 30, [rounds, 8], frozenset({rounds})))
            engine.run_uncaptured_round(RoundTimer(target.device))  # reads the prompts
            for _ in range(rounds):
                with RoundTrace() as trace:
                    list(engine.run_parts())
                traces.append(trace)
            engine.state.drafter_state = {
                name: getattr(built, name) for name in engine._state_names
            }
    first, *others = traces
    assert all(trace.steps == first.steps for trace in others)
    storages = {
        argument[0] for step in first.steps for argument in step[1:] if isinstance(argument, tuple)
    }
    log = engine.state.context.log
    assert log is not None
    assert {storage_of(log.lines), storage_of(engine.state.context.tokens)} <= storages


@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_autoregressive_decoding_equals_the_loop(shallow: Target, rounds: int) -> None:
    """The output does not depend on how seldom the host reads it."""
    assert_same_rounds(shallow, Greedy(), None, None, rounds)


@pytest.mark.parametrize("drafter", [None, "eagle3"])
def test_rounds_that_run_while_the_host_reads_change_nothing(
    shallow: Target, drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where graphs are replayed: a pause comes after many reads, no round runs once
    all texts may have reached their limit, and after a stop token the rounds of two reads at most.
    """
    built = None if drafter is None else DRAFTERS[drafter](shallow).eval()
    builder = None if built is None else Chain(2)
    monkeypatch.setattr(CapturedRunner, "reads_late", True)
    assert_same_rounds(shallow, Greedy(), built, builder, 2)
    assert_same_rounds(shallow, Greedy(), built, builder, 3)
    launched = []
    run = CapturedRunner.run_uncaptured_round

    def count_round(engine: CapturedRunner, timer: RoundTimer) -> None:
        launched.append(1)
        run(engine, timer)

    monkeypatch.setattr(CapturedRunner, "run_uncaptured_round", count_round)
    engine = CapturedRunner(shallow, Greedy(), built, builder)
    pauses: list[int] = []
    (done,) = engine.decode(
        PROMPTS[:1], 24, ignore_eos=True, on_round=lambda texts: pauses.append(len(launched))
    )
    assert len(launched) == len(done.round_lengths) or built is not None
    # After prefill, and after rounds; the first round of a drafter reads the prompt.
    assert len(pauses) <= 4 and max(b - a for a, b in zip(pauses, pauses[1:])) > 8
    stop = done.output[9]
    monkeypatch.setattr(Target, "stop_ids", frozenset({stop}))
    launched.clear()
    (stopped,) = engine.decode(PROMPTS[:1], 24)
    (expected,) = decode(shallow, PROMPTS[:1], Greedy(), 24, built, builder)
    assert list_facts([stopped]) == list_facts([expected]) and stopped.output[-1] == stop
    unread = len(launched) - len(stopped.round_lengths)
    assert 0 <= unread < 2 * engine.rounds_per_read


@pytest.mark.sweep(1, free=("backend", "drafter", "builder", "models"))
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("drafter", "builder", "models"),
    [
        (None, None, 1),
        ("eagle3", "eagle2", 1),
        ("eagle3 window", "eagle2", 1),
        ("mtp", "eagle2", 1),
        ("peagle", "chain", 1),
        ("medusa", "static", 1),
        ("hydra++", "chain", 1),
        ("causal", "chain", 3),
        ("early_exit", "chain", 2),
        *CASES.get("chains", ()),
    ],
)
def test_compiled_rounds_equal_the_loop(
    drafter: str | None, builder: str | None, models: int, backend: str
) -> None:
    """All layers of a model that run the same shape share one compilation, and nothing that is
    compiled is cut in two.
    """
    assert_compiled_rounds(drafter, builder, models, backend)


@pytest.mark.parametrize("builder", ["eagle2", "chain"])
def test_compiled_rounds_without_kernels_of_a_cpu_equal_the_loop(
    builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU grows trees by code that the kernels of a CPU replace; it is not cut in two either."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "reference")
    assert_compiled_rounds("eagle3 window", builder, 1, "eager")


def assert_compiled_rounds(
    drafter: str | None, builder: str | None, models: int, backend: str
) -> None:
    torch._dynamo.reset()
    counters.clear()
    target = cut_tiny(3)
    built = None if drafter is None else DRAFTERS[drafter](target).eval()
    shape = None if builder is None else BUILDERS[builder]()
    expected = decode(target, PROMPTS[:2], Greedy(), 9, built, shape)
    engine = CapturedRunner(target, Greedy(), built, shape, backend=backend)
    for _ in range(2):
        assert list_facts(engine.decode(PROMPTS[:2], 9)) == list_facts(expected)
    assert not counters["graph_break"]
    capture = None if built is None else built.capabilities.capture
    at_once = capture is not None and not engine._drafter_models and not capture.needs_all_drafts
    assert counters["stats"]["unique_graphs"] == models + at_once
    if drafter == "eagle3":  # caches of another bound run by the same code
        longer = [list(range(5, 265))] * 2
        assert list_facts(engine.decode(longer, 4)) == list_facts(
            decode(target, longer, Greedy(), 4, built, shape)
        )
        assert len(engine.states) == 2
        assert counters["stats"]["unique_graphs"] == models + at_once


def test_compiled_code_may_ask_for_what_packages_bring() -> None:
    """Neither the accelerator nor a kernel of a CPU cuts compiled code in two."""
    torch._dynamo.reset()

    def increment(x: Tensor) -> Tensor:
        is_default = isinstance(accelerator(), Accelerator)
        return x + 1 if is_default and run_on_cpu("any operation", x) is None else x

    accelerator()
    compiled = torch.compile(increment, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))


def test_drafter_state_survives_use_by_another_runner(shallow: Target) -> None:
    """Two engines and the loop share a drafter, in turn: each gives what it gives alone."""
    drafter = Eagle3(shallow, vocab_size=512).eval()
    builders = (Chain(2), Eagle2(3, 10, 3))
    engines = [CapturedRunner(shallow, Greedy(), drafter, builder) for builder in builders]
    addresses: list[object] = []
    for _ in range(2):
        for engine, builder in zip(engines, builders):
            expected = decode(shallow, PROMPTS, Greedy(), 8, drafter, builder)
            assert list_facts(engine.decode(PROMPTS, 8)) == list_facts(expected)
            (state,) = engine.states.values()
            addresses.append(state.drafter_state["cache"].storage.data_ptr())
    assert addresses == addresses[:2] * 2 and addresses[0] != addresses[1]


def test_uncompiled_layers_do_not_shift_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only some layers of a forward are compiled, as beyond the limit of shapes, every one
    attends with its own keys.
    """
    torch._dynamo.reset()
    target = cut_tiny(3)
    expected = decode(target, PROMPTS[:1], Greedy(), 5)
    forwards = [layer.forward for layer in target.layers]
    with compile_layers(target.layers, "eager"):
        for layer, forward in list(zip(target.layers, forwards))[::2]:
            layer.forward = forward
        result = decode(target, PROMPTS[:1], Greedy(), 5)
    assert list_facts(result) == list_facts(expected)


@pytest.mark.parametrize("drafter", [None, "eagle3", *CASES.get("drafters_with_state", ())])
def test_interrupted_decoding_leaves_no_state(
    shallow: Target, drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of rounds that the host has not looked at, the next decode gives
    what it would have given.
    """
    built = None if drafter is None else DRAFTERS[drafter](shallow).eval()
    builder = None if built is None else Chain(3)
    expected = decode(shallow, PROMPTS, Greedy(), 12, built, builder)
    engine = CapturedRunner(shallow, Greedy(), built, builder)
    rounds = [0]
    play = captured.run_round

    def stop_early(*arguments: Any) -> Iterator[RoundOutcome | None]:
        rounds[0] += 1
        parts = play(*arguments)
        yield next(parts)
        if rounds[0] == 4:
            raise KeyboardInterrupt
        yield from parts

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(captured, "run_round", stop_early)
        engine.decode(PROMPTS, 12)
    if built is not None:
        # takes the drafter's attributes for itself
        decode(shallow, PROMPTS, Greedy(), 4, built, builder)
    for _ in range(2):
        assert list_facts(engine.decode(PROMPTS, 12)) == list_facts(expected)


def test_refused_prompt_leaves_no_state(shallow: Target) -> None:
    """One that leaves no room is refused with the loop's words, first or later, and what another
    decode did with the drafter meanwhile is not taken for the engine's own."""
    drafter = Eagle3(shallow, vocab_size=512).eval()
    engine = CapturedRunner(shallow, Greedy(), drafter, Chain(2))
    longest = [[5] * (shallow.max_length - 5)]
    with pytest.raises(UserError, match=f"prompt of {shallow.max_length - 5} tokens"):
        engine.decode(longest, 6)
    expected = engine.decode(PROMPTS, 8)
    (state,) = engine.states.values()
    cache = state.drafter_state["cache"]
    decode(shallow, PROMPTS, Greedy(), 4, drafter, Chain(2))
    with pytest.raises(UserError, match=f"prompt of {shallow.max_length - 5} tokens"):
        engine.decode(longest, 6)
    assert state.drafter_state["cache"] is cache and list_facts(
        engine.decode(PROMPTS, 8)
    ) == list_facts(expected)


def test_a_drafter_keeps_its_settings(shallow: Target) -> None:
    """Between decodes an engine gives a drafter its caches back and nothing else."""
    drafter = Eagle3(shallow, vocab_size=64)
    engine = CapturedRunner(shallow, Greedy(), drafter, Chain(2))
    engine.decode(PROMPTS[:1], 6)
    drafter.step_decay = 0.5
    drafter.training = True
    engine.decode(PROMPTS[:1], 6)
    assert drafter.step_decay == 0.5 and drafter.training
    copied = copy.deepcopy(drafter)
    assert (
        copied.cache is not None
        and copied.cache.cache_id != drafter.cache.cache_id
        and copied.cache.storage is None
    )


@pytest.mark.sweep(1, free=("drafter", "backend"))
@pytest.mark.parametrize(
    "drafter", ["eagle3", "causal", "early_exit", *CASES.get("chain_drafters", ())]
)
@pytest.mark.parametrize("backend", [None, "eager"])
def test_preset_chain_is_accepted_completely(drafter: str, backend: str | None) -> None:
    """With every draft right a round emits as deep as the drafter reaches and one more, batch
    after batch.
    """
    torch._dynamo.reset()
    target = cut_tiny(3)
    built = DRAFTERS[drafter](target).eval()
    builder = Chain(3)
    forced = TeacherForcedBuilder({}, builder, Greedy())
    engine = CapturedRunner(target, Greedy(), built, PresetChainBuilder(forced), backend=backend)
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS):
        plain = decode(target, prompts, Greedy(), 14, ignore_eos=True)
        forced.sequences = dict(
            enumerate(generation.prompt + generation.output for generation in plain)
        )
        result = engine.decode(prompts, 9, ignore_eos=True)
        assert [generation.output for generation in result] == [
            generation.output[:9] for generation in plain
        ]
        assert all(generation.round_lengths == [4] * 2 for generation in result)


def test_oldest_batch_states_are_dropped(shallow: Target) -> None:
    """Of many sizes of batches the latest states stay."""
    engine = CapturedRunner(shallow, Greedy())
    for batch in (1, 2, 1, 3, 4, 5):
        engine.decode([[5, 6]] * batch, 3)
    assert [batch for batch, _ in engine.states] == [1, 3, 4, 5][-MAX_CACHED_STATES:]


def test_states_are_dropped_where_memory_is_short(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new size of batch drops the oldest states, the one in use too, before its own cache is
    made, until its cache has room; answers are the same.
    """
    engine = CapturedRunner(shallow, Greedy())
    rows = [[5, 6], [7, 8], [9, 10]]
    answers = [engine.decode(rows[:batch], 3) for batch in (1, 2)]
    slot_bytes = engine.state.slot_bytes
    storage = engine.state.context.cache.storage
    assert storage is not None
    lengths = engine.state.context.cache.lengths
    assert slot_bytes * len(lengths) * engine.state.context.cache.max_length == storage.nbytes
    # A dropped state leaves its bytes; two texts have room for one more, three for none.
    caches = {id(state.context.cache) for state in engine.states.values()}
    largest = engine.state.context.cache.max_length

    def count_free(device: torch.device) -> float:
        kept = sum(len(state.context.cache.lengths) for state in engine.states.values())
        return SPARE_MEMORY * slot_bytes * largest * (4.5 - kept)

    monkeypatch.setattr(captured, "available_bytes", count_free)
    engine.decode(rows, 3)
    assert [batch for batch, _ in engine.states] == [3]
    assert id(engine.state.context.cache) not in caches
    assert engine.decode(rows[:1], 3)[0].output == answers[0][0].output
    assert [batch for batch, _ in engine.states] == [3, 1]


@pytest.mark.parametrize(
    ("rule", "drafter", "builder", "words"),
    [
        (Block(), None, None, "acceptance=block decides on the host"),
        (Greedy(), Ngram, Chain(2), "drafter=ngram reads values from the device"),
        (Greedy(), Eagle3, Chain(3, stop=0.5), "tree=chain decides the draft length on the host"),
        *CASES.get("test_rounds_that_cannot_be_captured_are_refused", ()),
    ],
)
def test_rounds_that_cannot_be_captured_are_refused(
    shallow: Target,
    rule: AcceptanceRule,
    drafter: Callable[[Target], Drafter] | None,
    builder: TreeBuilder | None,
    words: str,
) -> None:
    """The error gives the reason, and what to do."""
    with pytest.raises(UserError, match=f"eval.engine=captured: {words}.*use eval.engine=eager"):
        CapturedRunner(shallow, rule, None if drafter is None else drafter(shallow), builder)


def test_target_with_dynamic_rope_is_refused() -> None:
    """A dynamic rotary embedding looks at the longest position in every forward."""
    target = cut_tiny(3)
    target.config.rope_parameters = {
        **target.config.rope_parameters,
        "rope_type": "dynamic",
        "factor": 2.0,
    }
    with pytest.raises(
        UserError,
        match=(
            "eval.engine=captured: target tiny reads text lengths from the device.*use "
            "eval.engine=eager"
        ),
    ):
        CapturedRunner(target, Greedy())


def test_round_parts_sum_to_the_total_time(shallow: Target) -> None:
    """Parts are those of the loop, none is negative, and a row that is done earlier has fewer of
    them.
    """
    item, other = CapturedRunner(shallow, Greedy()).decode([[5, 6, 7], [8, 9]], 9, ignore_eos=True)
    assert item.seconds.keys() == {"prefill", "draft", "verify", "accept", "other"}
    assert all(value >= 0 for value in item.seconds.values())
    assert len(item.round_seconds) == len(other.round_seconds) == 8
    assert item.decode_seconds == pytest.approx(item.finish_seconds)


def test_long_caches_have_few_spare_slots() -> None:
    """Short bounds are powers of two, which many prompts share; of long ones less than a fifth is
    spare, and a bound stays what it is.
    """
    assert [round_up_length(length) for length in (1, 257, 8192)] == [256, 512, 8192]
    assert round_up_length(32_768 + 54) == 40_960
    for length in range(8193, 200_000, 61):
        slots = round_up_length(length)
        assert length <= slots and slots - length < slots / 5
        assert round_up_length(slots) == slots
