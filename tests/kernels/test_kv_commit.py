"""Moving the accepted path: kernel = reference = a loop over layers, rows and steps, bit for
bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy
import pytest
import torch
from torch import Tensor

from spectrain.kernels import kv_commit as module
from spectrain.kernels.kv_commit import kv_commit, kv_commit_reference
from tests.kernels import aot

triton = pytest.importorskip(
    "triton", reason="triton is not installed, so there is no kernel to interpret"
)
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
OLD = VERSION < (3, 7) and tuple(int(part) for part in numpy.__version__.split(".")[:2]) >= (2, 4)
loops = pytest.mark.skipif(
    OLD, reason="the interpreter of triton before 3.7 cannot loop to a loaded bound with numpy 2.4"
)

Commit = Callable[..., None]


class Round(NamedTuple):
    """A verified batch: cache, lengths, path, counts, captured features, and where those of the
    path go.
    """

    storage: Tensor
    lengths: Tensor
    path: Tensor
    counts: Tensor
    hidden: Tensor | None
    path_features: Tensor | None

    def clone(self) -> "Round":
        return Round(*(x if x is None else x.clone() for x in self))


def make_path(num_nodes: int, num_steps: int, count: int) -> list[int]:
    """A path that begins at the root, padded with its last node."""
    others = (torch.randperm(num_nodes - 1)[: count - 1] + 1).sort().values.tolist()
    path = [0, *others][:count] or [0]
    return path + path[-1:] * (num_steps - len(path))


def make_round(
    num_nodes: int = 20,
    counts: tuple[int, ...] = (5, 1, 0),
    lengths: tuple[int, ...] = (3, 17, 40),
    shape: tuple[int, int] = (2, 8),
    dtype: torch.dtype = torch.float32,
    spare: int = 3,
    features: tuple[int, int] | None = (3, 8),
) -> Round:
    """Make random trees after ragged prefixes; every slot after a row's tree holds NaN."""
    batch = len(lengths)
    num_steps = max(1, *counts)
    num_slots = max(lengths) + num_nodes + spare
    storage = torch.randn(2, 2, batch, num_slots, *shape).to(dtype)
    for row, length in enumerate(lengths):
        storage[:, :, row, length + num_nodes :] = float("nan")
    path = torch.tensor([make_path(num_nodes, num_steps, count) for count in counts])
    hidden = None if features is None else torch.randn(batch, num_nodes, *features).to(dtype)
    path_features = (
        None
        if features is None
        else torch.full((batch, num_steps, *features), float("nan"), dtype=dtype)
    )
    return Round(storage, torch.tensor(lengths), path, torch.tensor(counts), hidden, path_features)


def commit_by_loop(case: Round) -> Round:
    """Return the round as a loop commits it, all else untouched."""
    after = case.clone()
    for row, (length, count) in enumerate(zip(case.lengths.tolist(), case.counts.tolist())):
        for step, node in enumerate(case.path[row].tolist()):
            if step < count:
                after.storage[:, :, row, length + step] = case.storage[:, :, row, length + node]
            if case.hidden is not None and after.path_features is not None:
                after.path_features[row, step] = case.hidden[row, node]
        after.lengths[row] = length + count
    return after


def assert_agrees(case: Round, commit: Commit = kv_commit) -> None:
    """Everything is as the loop leaves it, poison included."""
    after = commit_by_loop(case)
    assert not torch.equal(after.lengths, case.lengths)
    commit(*case)
    for result, expected in zip(case, after):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(params=["reference", pytest.param("triton", marks=loops)])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reference, and the kernel through triton's interpreter."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", request.param)
    return str(request.param)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "num_nodes, counts", [(2, (2, 1, 1)), (20, (5, 1, 0)), (64, (8, 9, 3)), (100, (17, 64, 1))]
)
def test_commit_equals_the_loop(
    num_nodes: int, counts: tuple[int, ...], dtype: torch.dtype, implementation: str
) -> None:
    """Cache, features and lengths for ragged rows, of few nodes and of more than are moved at
    once.
    """
    assert_agrees(make_round(num_nodes, counts, dtype=dtype))


@pytest.mark.parametrize("counts", [(100, 100), (1, 100), (40, 0)])
def test_any_share_of_a_chain_equals_the_loop(counts: tuple[int, ...], implementation: str) -> None:
    """A full chain of 100 nodes is accepted, where nothing moves but the lengths, or a long part
    of it.
    """
    assert_agrees(make_round(100, counts, lengths=(0, 31), features=None))


@pytest.mark.parametrize(
    "shape, features", [((1, 1), (1, 1)), ((3, 80), (1, 600)), ((1, 513), (4, 128))]
)
def test_any_width_equals_the_loop(
    shape: tuple[int, int], features: tuple[int, int], implementation: str
) -> None:
    """Rows of any width, narrower than a block of columns or a little wider."""
    assert_agrees(make_round(12, (3, 4), lengths=(5, 2), shape=shape, features=features))


def test_full_cache_equals_the_loop(implementation: str) -> None:
    """Where the path is padded past the last slot, nothing is read or written there."""
    case = make_round(6, (1, 6, 2), lengths=(9, 3, 9), spare=0)
    path = torch.nn.functional.pad(case.path, (0, 4), value=5)
    path_features = torch.full((3, 10, 3, 8), float("nan"))
    assert_agrees(case._replace(path=path, path_features=path_features))


def test_any_strides_equal_the_loop(implementation: str) -> None:
    """Every second row and all but the first layer of a larger cache; features with gaps between
    nodes, and transposed.
    """
    case = make_round()
    full = torch.randn(3, 2, 6, *case.storage.shape[3:])
    storage = full[1:, :, ::2]
    storage.copy_(case.storage)
    rest = full[0].clone(), full[1:, :, 1::2].clone()
    assert case.hidden is not None and case.path_features is not None
    spaced = torch.stack([case.hidden, case.hidden], 2)[:, :, 0]
    path_features = torch.stack([case.path_features, case.path_features], 2)[:, :, 0]
    assert_agrees(
        case._replace(
            storage=storage,
            hidden=spaced,
            path_features=path_features,
            lengths=torch.stack([case.lengths] * 2, 1)[:, 0],
        )
    )
    assert torch.equal(full[0], rest[0]) and torch.equal(full[1:, :, 1::2], rest[1])
    case = make_round()
    assert case.hidden is not None
    assert_agrees(case._replace(hidden=case.hidden.transpose(2, 3).contiguous().transpose(2, 3)))


def test_features_may_have_another_dtype(implementation: str) -> None:
    """A cache in half precision goes with features in full precision."""
    case = make_round(dtype=torch.float16)
    assert case.hidden is not None and case.path_features is not None
    assert_agrees(
        case._replace(hidden=case.hidden.float() / 3, path_features=case.path_features.float())
    )


def test_commits_follow_each_other(implementation: str) -> None:
    """The lengths that one commit leaves are those of the next, whose nodes come after them."""
    first = make_round(features=None, spare=30)
    assert_agrees(first)
    again = make_round(features=None)
    first.storage.nan_to_num_()
    assert_agrees(first._replace(path=again.path, counts=torch.tensor([3, 2, 1])))


@loops
def test_operator_passes_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's schema says what it changes, and its fake stands in for it."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    for features in ((3, 8), None):
        torch.library.opcheck(
            module._launch_commit, tuple(make_round(6, (2, 1), (0, 3), features=features))
        )


@loops
def test_compiled_call_equals_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile takes the call into one full graph, and still it changes its arguments in
    place.
    """
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    assert_agrees(make_round(), torch.compile(kv_commit, fullgraph=True, backend="aot_eager"))


def test_only_the_requested_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is the reference unless SPECTRAIN_KERNELS=triton asks for the kernel."""
    ran: list[str] = []
    monkeypatch.setattr(module, "_launch_commit", lambda *arguments: ran.append("kernel"))
    monkeypatch.setattr(module, "kv_commit_reference", lambda *arguments: ran.append("reference"))
    for setting in (None, "reference", "triton"):
        monkeypatch.setenv("SPECTRAIN_KERNELS", setting) if setting else monkeypatch.delenv(
            "SPECTRAIN_KERNELS", raising=False
        )
        kv_commit(*make_round())
    assert ran == ["reference", "reference", "kernel"]


def test_reference_does_not_synchronize() -> None:
    """It runs on tensors without data, on which no value can be read back."""
    kv_commit_reference(*(x if x is None else x.to("meta") for x in make_round()))


@pytest.mark.sweep(1, free=("dtype", "features"))
@pytest.mark.parametrize("features", [12288, 0])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_kernel_fits_sm90(dtype: str, features: int) -> None:
    """Compiled for an H100 or H200, at any dtype, with features or without, nothing spills and
    no shared memory is taken.
    """
    types = {"storage_ptr": dtype, "hidden_ptr": dtype, "fresh_ptr": dtype}
    types |= dict.fromkeys(["lengths_ptr", "path_ptr", "counts_ptr"], "*i64")
    constants = {
        "WIDTH": 1024,
        "FEATURES": features,
        "COLUMNS": module.COLUMNS_PER_PROGRAM,
        "NODES": module.NODES_PER_STEP,
    }
    constants |= {} if features else dict.fromkeys(["hidden_ptr", "fresh_ptr"])
    usage = aot.compile_for(
        aot.Request("spectrain.kernels.kv_commit", "_commit_kernel", types, constants, 4, 3)
    )
    print(usage)  # with pytest -s
    assert usage.stack == 0 and usage.shared <= 1024 and usage.registers <= 128, usage
