"""The tree attention kernels, interpreted, equal the reference in float64; choices and wrappers
around them.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.drafters.eagle3 import Eagle3
from spectrain.features.batch import Batch
from spectrain.kernels import kv_append, kv_commit, tree_verify
from spectrain.kernels import tree_attention as module
from spectrain.kernels.tree_attention import (
    TILE_CONFIGS,
    Visibility,
    choose_splits,
    choose_tiles,
    tree_attention,
    tree_attention_reference,
)
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from tests.sampling import pairwise
from tests.targets import cut_tiny

triton = pytest.importorskip(
    "triton", reason="triton is not installed, so there are no kernels to interpret"
)
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(
    VERSION < (3, 7) and tuple(int(part) for part in numpy.__version__.split(".")[:2]) >= (2, 4),
    reason="the interpreter of triton before 3.7 cannot loop to a bound in a tensor with numpy 2.4",
)

AXES: dict[str, tuple[Any, ...]] = {
    "num_new": (1, 2, 5, 16, 63, 64, 65, 100, 256),
    "prefix": (0, 1, 63, 64, 128, 300),
    "splits": (1, 3, 8),
    "group": (1, 2, 4, 8),
    "head_size": (32, 64, 96, 128),
    "earlier": (0, 3, 70),  # nodes appended before the new ones
    "ragged": (False, True),
    "window": (None, 1, 7, 90),
    "softcap": (None, 2.0),
    "shape": ("chain", "star", "random", "padded"),
    "dtype": (torch.float32, torch.float16),
}


class Case(NamedTuple):
    """One choice on each axis."""

    num_new: int = 5
    prefix: int = 65
    splits: int = 1
    group: int = 2
    head_size: int = 32
    earlier: int = 0
    ragged: bool = False
    window: int | None = None
    softcap: float | None = None
    shape: str = "random"
    dtype: torch.dtype = torch.float32


def name_of(case: Case) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in case)


def parents_of(shape: str, batch: int, num_nodes: int) -> Tensor:
    index = torch.arange(num_nodes)
    parents = {
        "chain": (index - 1).expand(batch, -1),
        "star": torch.zeros(batch, num_nodes, dtype=torch.int64),
        "random": (torch.rand(batch, num_nodes) * index).long(),
        "padded": torch.where(
            index < num_nodes * 2 // 3, (torch.rand(batch, num_nodes) * index).long(), 0
        ),
    }[shape].clone()
    parents[:, 0] = -1
    return parents


def inputs_of(
    case: Case, poison: float = float("nan")
) -> tuple[tuple[Tensor, Tensor, Tensor, Visibility], Tensor, Tensor]:
    """Queries, keys, values and visibility as a target hands them over, and the same keys and
    values without poison.

    Keys and values are views of one cache, whose slots behind each row's own nodes hold `poison`.
    """
    kv_heads = 1 if case.num_new > 65 else 2
    lengths = [case.prefix, case.prefix // 2, 0] if case.ragged else [case.prefix]
    num_nodes = case.earlier + case.num_new
    longest = max(lengths)
    rows = torch.tensor(lengths)
    parents = parents_of(case.shape, len(rows), num_nodes)
    tree = TokenTree.from_parents(torch.zeros_like(parents), parents)
    positions = rows[:, None] + tree.depths
    new = slice(case.earlier, None)
    visibility = Visibility(rows, longest, tree.ancestors[:, new], positions[:, new], positions)
    query = (
        (torch.randn(len(rows), case.num_new, kv_heads * case.group, case.head_size) * 2)
        .to(case.dtype)
        .transpose(1, 2)
    )
    clean = torch.randn(2, len(rows), longest + num_nodes + 7, kv_heads, case.head_size).to(
        case.dtype
    )
    cache = clean.clone()
    for row, length in enumerate(lengths):
        cache[:, row, length + num_nodes :] = poison
    keys, values = (half[:, : longest + num_nodes].transpose(1, 2) for half in cache)
    return (query, keys, values, visibility), *(
        half[:, : longest + num_nodes].transpose(1, 2) for half in clean
    )


def assert_agrees(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' answer from a poisoned cache is the reference's in float64 from a clean one."""
    inputs, keys, values = inputs_of(case)
    monkeypatch.setattr(module, "choose_splits", lambda *sizes: case.splits)
    actual = tree_attention(
        *inputs, scale=case.head_size**-0.5, window=case.window, softcap=case.softcap
    )
    wide = (inputs[0].double(), keys.double(), values.double(), inputs[3])
    expected = tree_attention_reference(
        *wide, scale=case.head_size**-0.5, window=case.window, softcap=case.softcap
    )
    tolerance = 5e-6 if case.dtype == torch.float32 else 2e-3
    assert actual.dtype == case.dtype
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.fixture
def use_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels, through triton's interpreter."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    yield


@pytest.fixture
def large_blocks(use_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half-precision blocks for float32 too: the interpreter takes as long for a small block
    as for a large one.
    """
    choose = module.choose_tiles
    monkeypatch.setattr(
        module, "choose_tiles", lambda rows, size, dtype, roomy: choose(rows, size, torch.float16)
    )
    monkeypatch.setattr(module, "COMBINED_ROWS", 64)


def estimate_work(case: Case) -> float:
    """Estimate how long the interpreter takes: blocks of keys for every block of rows, and what
    each program does besides.
    """
    batch = 3 if case.ragged else 1
    kv_heads = 1 if case.num_new > 65 else 2
    blocks = (case.prefix + case.earlier + case.num_new) / 64 + 3 * case.splits
    return batch * kv_heads * (1 + case.num_new * case.group // 128) * blocks


@pytest.mark.sweep(10, cost=estimate_work)
@pytest.mark.parametrize(
    "case", [Case(*choices) for choices in pairwise(*AXES.values())], ids=name_of
)
def test_kernel_equals_reference(
    case: Case, large_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel = reference where every two choices meet: sizes, trees, windows, softcaps, splits,
    ragged rows, dtypes.
    """
    assert_agrees(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("splits", AXES["splits"])
@pytest.mark.parametrize("prefix", AXES["prefix"])
@pytest.mark.parametrize("num_new", AXES["num_new"])
def test_kernel_equals_reference_everywhere(
    num_new: int, prefix: int, splits: int, large_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel = reference for every two of a number of nodes, a prefix and a number of splits, so at
    every edge of blocks; other choices drawn."""
    draw = random.Random(repr((num_new, prefix, splits)))
    assert_agrees(
        Case(num_new, prefix, splits, *(draw.choice(values) for values in list(AXES.values())[3:])),
        monkeypatch,
    )


@pytest.mark.sweep(1, free=("num_new", "group", "window"))
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("num_new, group", [(1, 1), (4, 4), (5, 7)])
def test_float32_blocks_equal_the_reference(
    num_new: int,
    group: int,
    window: int | None,
    use_interpreter: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks that float32 runs in by default agree too, with heads in groups of any size."""
    assert_agrees(
        Case(num_new, splits=3, group=group, head_size=48, earlier=13, ragged=True, window=window),
        monkeypatch,
    )


@pytest.mark.parametrize("head_size", [16, 80, 256, 512])
def test_other_head_sizes_equal_the_reference(
    head_size: int, large_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head sizes that are padded to a power of two, and the largest ones."""
    assert_agrees(Case(30, splits=3, head_size=head_size, dtype=torch.float16), monkeypatch)


@pytest.mark.parametrize("num_new", [127, 128, 129])
def test_nodes_at_the_edges_of_two_words_equal_the_reference(
    num_new: int, large_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node less than two words of 64 bits, exactly two, and one more; behind nothing."""
    assert_agrees(Case(num_new, prefix=0, shape="random", dtype=torch.float16), monkeypatch)


def test_keys_may_be_more_than_32_bits_apart(large_blocks: None) -> None:
    """The cache of a large batch of long texts has more than 2^31 elements; of this memory only
    what is used is touched."""
    (query, _, _, visibility), *_ = inputs_of(Case(prefix=6, ragged=True, dtype=torch.float16))
    rows = slice(0, 2)
    names = ("lengths", "tree", "query_positions", "key_positions")
    visibility = replace(visibility, **{name: getattr(visibility, name)[rows] for name in names})
    slots = visibility.longest + query.shape[2]
    apart = 1 << 31
    # half of it is where 32 bits would lead to
    memory = torch.empty(2 * apart + slots * 64, dtype=torch.float16)
    cache = memory.as_strided((2, 2, slots, 32), (apart, 32, 64, 1), apart)
    cache.copy_(torch.randn(cache.shape))
    actual = tree_attention(query[rows], cache, cache, visibility, 0.2)
    expected = tree_attention_reference(
        query[rows].double(), cache.double(), cache.double(), visibility, 0.2
    )
    torch.testing.assert_close(actual.double(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("sizes", [(48, 32), (32, 80)])
@pytest.mark.parametrize("splits", [1, 3])
def test_values_of_another_size_equal_the_reference(
    splits: int, sizes: tuple[int, int], large_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrower values than keys, as latent attention has them, and wider ones."""
    (query, _, _, visibility), keys, values = inputs_of(
        Case(9, prefix=140, head_size=80, ragged=True)
    )
    inputs = query[..., : sizes[0]], keys[..., : sizes[0]], values[..., : sizes[1]]
    monkeypatch.setattr(module, "choose_splits", lambda *sizes: splits)
    expected = tree_attention_reference(*(x.double() for x in inputs), visibility, 0.2)
    actual = tree_attention(*inputs, visibility, 0.2)
    assert actual.shape == (*query.shape[:3], sizes[1])
    torch.testing.assert_close(actual.double(), expected, atol=5e-6, rtol=5e-6)


def test_negative_scale_uses_the_reference(large_blocks: None) -> None:
    """The kernels scale the largest score, which a negative scale would make the smallest."""
    (query, _, _, visibility), keys, values = inputs_of(Case())
    expected = tree_attention_reference(query, keys, values, visibility, -0.2)
    assert torch.equal(tree_attention(query, keys, values, visibility, -0.2), expected)


@pytest.mark.parametrize("splits", [1, 3])
def test_slots_before_the_window_are_not_read(
    splits: int, large_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in every block of keys that lies before the first node's window changes nothing."""
    case = Case(9, prefix=300, head_size=32, window=50, shape="chain")
    (query, keys, values, visibility), clean_keys, clean_values = inputs_of(case)
    block = choose_tiles(18, 32, torch.float16).block_n
    edge = (int(visibility.query_positions.min()) - 50 + 1) // block * block
    assert edge > block
    keys[:, :, :edge] = values[:, :, :edge] = float("nan")
    monkeypatch.setattr(module, "choose_splits", lambda *sizes: splits)
    actual = tree_attention(query, keys, values, visibility, 0.2, window=50)
    expected = tree_attention_reference(query, clean_keys, clean_values, visibility, 0.2, window=50)
    torch.testing.assert_close(actual, expected, atol=5e-6, rtol=5e-6)


@pytest.mark.filterwarnings("ignore:overflow")  # of exp2, and meant: 2 / (1 + inf) = 0
def test_saturated_softcap_equals_the_reference(large_blocks: None) -> None:
    """Scores far beyond the softcap count as the softcap, of either sign."""
    (query, _, _, visibility), keys, values = inputs_of(Case())
    expected = tree_attention_reference(
        query.double(), keys.double(), values.double(), visibility, 20.0, softcap=1.5
    )
    actual = tree_attention(query, keys, values, visibility, 20.0, softcap=1.5)
    torch.testing.assert_close(actual.double(), expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_equal_the_reference(
    splits: int, large_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What falls to a sink is taken from all splits together."""
    (query, _, _, visibility), keys, values = inputs_of(Case(ragged=True))
    sinks = torch.linspace(-4, 4, query.shape[1])
    monkeypatch.setattr(module, "choose_splits", lambda *sizes: splits)
    expected = tree_attention_reference(
        query.double(), keys.double(), values.double(), visibility, 0.2, sinks=sinks.double()
    )
    actual = tree_attention(query, keys, values, visibility, 0.2, sinks=sinks)
    torch.testing.assert_close(actual.double(), expected, atol=5e-6, rtol=5e-6)


def test_any_strides_equal_contiguous_ones(large_blocks: None) -> None:
    """Queries, keys and values in any layout, even with head dimensions apart, give what
    contiguous ones give.
    """
    (query, _, _, visibility), keys, values = inputs_of(Case(ragged=True))
    full = tree_attention(
        query.contiguous(), keys.contiguous(), values.contiguous(), visibility, 0.2
    )
    apart = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (query, keys, values)]
    spaced = [torch.stack([x, x], dim=2)[:, :, 0] for x in (query, keys, values)]
    assert torch.equal(tree_attention(*apart, visibility, 0.2), full)
    assert torch.equal(tree_attention(*spaced, visibility, 0.2), full)


@pytest.mark.parametrize("splits", [1, 3])
def test_row_in_a_batch_equals_the_row_alone(
    splits: int, large_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same number of splits, a row's output is bit for bit the same whatever other rows
    there are.
    """
    (query, _, _, visibility), keys, values = inputs_of(Case(prefix=130, ragged=True))
    monkeypatch.setattr(module, "choose_splits", lambda *sizes: splits)
    together = tree_attention(query, keys, values, visibility, 0.2)
    for row, length in enumerate(visibility.lengths.tolist()):
        item = slice(row, row + 1)
        end = length + visibility.tree.shape[2]
        alone = Visibility(
            visibility.lengths[item],
            length,
            visibility.tree[item],
            visibility.query_positions[item],
            None,
        )
        output = tree_attention(query[item], keys[item, :, :end], values[item, :, :end], alone, 0.2)
        assert torch.equal(output, together[item])


def test_number_of_splits_minimises_the_time() -> None:
    """It is one for short prefixes or many programs, at most 64, 64 keys each where there are
    several and as many as rows or 256."""
    for rows, groups, keys in product(
        (1, 4, 64, 256), (1, 8, 40, 132, 1000), (1, 63, 64, 127, 512, 1024, 5000, 131072)
    ):
        config = choose_tiles(rows, 128, torch.float16)
        splits = choose_splits(config, rows, groups, keys)
        assert 1 <= splits <= 64 and (splits == 1 or keys >= splits * min(max(rows, 64), 256))
        assert splits == 1 or keys >= 128
        assert splits == 1 or groups < 1000 or -(-rows // config.block_m) * groups % 132


@pytest.mark.parametrize("batch", range(1, 13))
@pytest.mark.parametrize("nodes", [1, 16, 64])
def test_splits_fill_the_last_wave(nodes: int, batch: int) -> None:
    """After a long prefix nine programs of ten slots run in every wave, whatever the batch; after
    1,024 tokens one node has a program for all but a few multiprocessors."""
    rows = 4 * nodes  # four query heads to each of eight key-value heads
    config = choose_tiles(rows, 128, torch.float16)
    programs = (
        choose_splits(config, rows, 8 * batch, 8192 + nodes)
        * batch
        * 8
        * -(-rows // config.block_m)
    )
    assert programs / (132 * -(-programs // 132)) > 0.9
    assert choose_splits(choose_tiles(4, 128, torch.float16), 4, 8, 1025) * 8 == 128


def test_blocks_of_nodes_lie_within_a_word() -> None:
    """Every configured block of masked keys divides 64 and what is read without a mask, and holds
    the 16 that a product needs."""
    tables = [
        *TILE_CONFIGS.values(),
        *module.HOPPER_TILE_CONFIGS.values(),
        module.FLOAT32_TILE_CONFIGS,
    ]
    for config in [config for table in tables for config in table]:
        assert 64 % config.block_n == 0 and config.block_p % config.block_n == 0
        assert config.block_n >= 16 and config.block_m >= 16


@pytest.mark.parametrize("num_nodes", [1, 7, 63, 64, 65, 200])
def test_packed_words_equal_the_mask(num_nodes: int) -> None:
    """For a full tree they are its packed ancestor mask; bit j of word w says whether node 64 w
    + j is visible; built once.
    """
    tree = TokenTree.from_parents(
        torch.zeros(2, num_nodes, dtype=torch.int64), parents_of("random", 2, num_nodes)
    )
    visibility = Visibility(torch.tensor([3, 4]), 4, tree.ancestors, tree.depths, None)
    words = visibility.packed_words()
    assert (
        torch.equal(words, module.pack_words(tree.ancestors))
        and words.is_contiguous()
        and visibility.packed_words() is words
    )
    part = torch.rand(2, 5, num_nodes) < 0.5
    words = Visibility(torch.tensor([3, 4]), 4, part, tree.depths, None).packed_words()
    assert words.shape == (2, 5, (num_nodes + 63) // 64)
    bits = (words[..., None] >> torch.arange(64)) & 1
    assert (
        torch.equal(bits.flatten(2)[..., :num_nodes].bool(), part)
        and not bits.flatten(2)[..., num_nodes:].any()
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 30])
def test_operator_passes_opcheck(
    splits: int, window: int | None, large_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's schema holds, it changes no input, and its fake gives the shape and strides
    of what it gives.
    """
    (query, _, _, visibility), keys, values = inputs_of(Case(splits=splits))
    positions = visibility.query_positions, visibility.key_positions
    num_nodes = visibility.tree.shape[2]
    monkeypatch.setattr(module, "choose_splits", lambda *sizes: splits)
    arguments = (
        query,
        keys,
        values,
        visibility.packed_words(),
        visibility.lengths,
        *positions,
        num_nodes,
        65,
        0.2,
        window,
        None,
        None,
    )
    torch.library.opcheck(module._launch_attention, arguments)


def test_compiled_call_equals_eager(large_blocks: None) -> None:
    """torch.compile takes a function with the call in it as one full graph, which gives the
    same.
    """
    (query, _, _, visibility), keys, values = inputs_of(Case())
    visibility.packed_words()

    def attend(query: Tensor) -> Tensor:
        return tree_attention(query * 2, keys, values, visibility, 0.2) + 1

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query), attend(query))


@pytest.mark.parametrize(
    "environment, dtype, needs_grad, kernel",
    [
        (None, torch.float32, False, False),
        ("reference", torch.float32, False, False),
        ("triton", torch.float32, False, True),
        ("triton", torch.float16, False, True),
        ("triton", torch.bfloat16, False, False),  # the interpreter would be wrong
        ("triton", torch.float64, False, False),
        ("triton", torch.float32, True, False),  # the kernels have no backward pass
    ],
)
def test_environment_selects_the_path(
    environment: str | None,
    dtype: torch.dtype,
    needs_grad: bool,
    kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU the reference runs, and the kernels where SPECTRAIN_KERNELS=triton asks for them
    and they can.
    """
    monkeypatch.delenv("SPECTRAIN_KERNELS", raising=False)
    if environment is not None:
        monkeypatch.setenv("SPECTRAIN_KERNELS", environment)
    (query, _, _, visibility), keys, values = inputs_of(Case(dtype=dtype))
    query.requires_grad_(needs_grad)
    launched: list[Tensor] = []
    attend = module._launch_attention
    monkeypatch.setattr(
        module,
        "_launch_attention",
        lambda *arguments: launched.append(attend(*arguments)) or launched[0],
    )
    output = tree_attention(query, keys, values, visibility, 0.2)
    assert bool(launched) == kernel and output.requires_grad == needs_grad
    if not kernel:
        assert torch.equal(output, tree_attention_reference(query, keys, values, visibility, 0.2))


def test_without_triton_the_reference_runs() -> None:
    """Where triton cannot be imported, all modules of kernels can, and attention computes."""
    code = """
import sys
sys.modules["triton"] = None
import importlib, pathlib
import torch
import spectrain
folder = pathlib.Path(spectrain.__file__).parent / "kernels"
for file in folder.glob("*.py"):
    importlib.import_module(f"spectrain.kernels.{file.stem}")
from spectrain.kernels.tree_attention import Visibility, tree_attention, tree_attention_reference
mask = torch.ones(1, 2, 2, dtype=torch.bool).tril()
seen = Visibility(torch.tensor([3]), 3, mask, torch.tensor([[3, 4]]), None)
q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
assert torch.equal(tree_attention(q, k, v, seen, 0.3), tree_attention_reference(q, k, v, seen, 0.3))
"""
    environment = {**os.environ, "SPECTRAIN_KERNELS": "triton", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


class Forked(Drafter):
    """Proposes the two tokens that come next in given texts, each with a wrong sibling."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__()
        self.texts = texts
        self.layers = ()

    def loss(self, batch: Batch, target: Target, state: Any) -> Any:
        raise NotImplementedError

    def draft(self, context: Context) -> Draft:
        rows = []
        for text, length in zip(self.texts, context.cache.lengths.tolist()):
            root, first, second = (text[length : length + 3] + [5, 5])[:3]
            rows.append([root, first ^ 1, first, second ^ 1, second])
        tree = TokenTree.from_parents(
            torch.tensor(rows), torch.tensor([[-1, 0, 0, 2, 2]]).expand(len(rows), -1)
        )
        return Draft(add_mask_nodes=lambda root: tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None: ...


@pytest.fixture
def two_layers() -> Target:
    """The tiny target's first two layers: the interpreter takes its time for each."""
    return cut_tiny(2)


def test_decoding_through_the_kernels_equals_the_references(
    two_layers: Target, use_interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ragged batch decoded greedily, by the loop with little trees and by the engine, gives the
    same tokens, with the same ones accepted; every kernel of a round has run."""
    texts = ("The bees find the hive. The", "What is it?")
    target = two_layers
    prompts = [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    eagle3 = Eagle3(target, vocab_size=256).eval()
    monkeypatch.setenv("SPECTRAIN_KERNELS", "reference")
    plain = [result.output for result in decode(target, prompts, Greedy(), 6, ignore_eos=True)]
    forked = Forked([prompt + output for prompt, output in zip(prompts, plain)])
    runs: list[Callable[[], list[Generation]]] = [
        lambda: decode(target, prompts, Greedy(), 5, forked, Chain(4), ignore_eos=True),
        lambda: CapturedRunner(target, Greedy(), eagle3, Eagle2(2, 5, 2)).decode(
            prompts, 3, ignore_eos=True
        ),
    ]
    expected = [run() for run in runs]
    ran: Counter[str] = Counter()

    def count_launch(name: str, launch: Callable[..., Any], *arguments: Any) -> Any:
        ran[name] += 1
        return launch(*arguments)

    for name, index in (
        ("_launch_attention", module),
        ("_launch_append", kv_append),
        ("_launch_commit", kv_commit),
        ("_launch_match", tree_verify),
    ):
        monkeypatch.setattr(index, name, partial(count_launch, name, getattr(index, name)))
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    for run, generations in zip(runs, expected):
        result = run()
        assert [each.output for each in result] == [each.output for each in generations]
        assert [each.round_lengths for each in result] == [
            each.round_lengths for each in generations
        ]
    assert expected[0][0].output == plain[0][:5] and set(ran) == {
        "_launch_attention",
        "_launch_append",
        "_launch_commit",
        "_launch_match",
    }
