"""The verification kernels as an H100 or H200 would run them: compiled for sm_90 in their
default configurations.
"""

from itertools import product
from typing import Any

import pytest
import torch

from spectrain.kernels.sampling_cuts import (
    ARGMAX_TILES,
    CUT_TILES,
    EMPTY_BITS,
    MAX_CANDIDATES,
    PART_TILES,
    SAMPLE_TILES,
    WALK_TILES,
    VerifyTiles,
)
from tests.kernels import aot

pytest.importorskip("triton", reason="triton is not installed, so there is nothing to compile")

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float16: "*fp16"}
NUM_TOKENS = 128256  # of Llama 3
CUTS = ((True, True), (True, False), (False, True))  # top-k, top-p
MODULES = {
    "_reject_kernel": "tree_recursive",
    "_bonus_kernel": "tree_recursive",
    "parts_kernel": "sampling_cuts",
    "candidates_kernel": "sampling_cuts",
}
LONG = (
    "tokens_ptr",
    "parents_ptr",
    "rows_ptr",
    "positions_ptr",
    "path_ptr",
    "counts_ptr",
    "bonus_ptr",
)


def make_request(
    kernel: str, dtype: torch.dtype, config: VerifyTiles, constants: dict[str, Any]
) -> Any:
    """The request for what a launch would compile; a constant of None is an argument that is
    left out.
    """
    types = dict.fromkeys(LONG, "*i64") | {
        "logits_ptr": TYPES[dtype],
        "allowed_ptr": "*i1",
        "key": "i64",
    }
    types |= {"best_ptr": "*fp32", "best_token_ptr": "*i32", "temperature": "fp32", "top_p": "fp32"}
    types |= {
        "top_ptr": "*fp32",
        "mass_ptr": "*fp32",
        "candidate_counts_ptr": "*i32",
        "candidates_ptr": "*i64",
    }
    if constants.get("CUT"):
        types["best_token_ptr"] = "*fp32"
    types |= {
        "q_ptr": "*fp32",
        "draft_index_ptr": "*i32",
        "residual_ptr": "*fp32",
        "state_ptr": "*i32",
    }
    return aot.Request(
        f"spectrain.kernels.{MODULES.get(kernel, 'tree_verify')}",
        kernel,
        types,
        constants | {"BLOCK": config.block},
        config.num_warps,
        3,
        multiples=("vocabulary",),
    )


def make_choose_request(dtype: torch.dtype, noise: bool) -> Any:
    absent = {} if noise else dict.fromkeys(["rows_ptr", "positions_ptr"])
    return make_request(
        "_choose_kernel", dtype, SAMPLE_TILES if noise else ARGMAX_TILES, {"NOISE": noise, **absent}
    )


def make_walk_request(
    dtype: torch.dtype, top_k: bool, top_p: bool, num_nodes: int = 64, num_tokens: int = NUM_TOKENS
) -> Any:
    cut = top_k or top_p
    absent = (
        ([] if top_k else ["top_k"])
        + ([] if top_p else ["top_p"])
        + ([] if cut else ["candidate_counts_ptr", "candidates_ptr"])
    )
    block_s = 1 << (num_tokens // SAMPLE_TILES.block).bit_length()
    constants = {
        "CUT": cut,
        "SHIFT": EMPTY_BITS[dtype],
        "BLOCK_N": num_nodes,
        "BLOCK_S": block_s,
        "CANDIDATES": MAX_CANDIDATES,
    }
    constants |= dict.fromkeys(absent)
    return make_request("_walk_kernel", dtype, CUT_TILES if cut else WALK_TILES, constants)


def make_reject_request(
    dtype: torch.dtype,
    without: bool = True,
    cut: bool = True,
    subset: bool = True,
    num_nodes: int = 64,
) -> Any:
    result = ["top_k", "top_p", "top_ptr", "mass_ptr", "candidate_counts_ptr", "candidates_ptr"]
    absent = ([] if cut else result) + ([] if subset else ["draft_index_ptr"])
    constants = {
        "WITHOUT": without,
        "SHIFT": EMPTY_BITS[dtype],
        "BLOCK_N": num_nodes,
        **dict.fromkeys(absent),
    }
    constants |= {
        "BLOCK_S": 1 << (NUM_TOKENS // PART_TILES.block).bit_length(),
        "CANDIDATES": MAX_CANDIDATES,
    }
    return make_request("_reject_kernel", dtype, CUT_TILES, constants)


def assert_nothing_spills(request: Any) -> None:
    usage = aot.compile_for(request)
    print(usage)  # with pytest -s
    assert usage.stack == 0, usage
    reads = request.kernel != "_walk_kernel" or request.constants["CUT"]
    assert usage.wide > 0 or not reads, usage
    assert usage.shared <= aot.SHARED_MEMORY[90] // 4, usage


BOTH = (True, False)


@pytest.mark.sweep(1, free=("dtype",))
@pytest.mark.parametrize("noise", BOTH)
@pytest.mark.parametrize("dtype", TYPES)
def test_choose_kernel_fits_sm90(dtype: torch.dtype, noise: bool) -> None:
    """The argmax of rows, with noise and without, spills nothing."""
    assert_nothing_spills(make_choose_request(dtype, noise))


@pytest.mark.sweep(1, free=("dtype", "kernel"))
@pytest.mark.parametrize("kernel", ["parts_kernel", "candidates_kernel"])
@pytest.mark.parametrize("dtype", TYPES)
def test_candidate_kernels_fit_sm90(dtype: torch.dtype, kernel: str) -> None:
    """The two launches that find the candidates spill nothing."""
    constants = {"SHIFT": EMPTY_BITS[dtype], "BLOCK_S": 128, "CANDIDATES": MAX_CANDIDATES}
    assert_nothing_spills(
        make_request(kernel, dtype, PART_TILES, constants if kernel == "candidates_kernel" else {})
    )


@pytest.mark.sweep(1, free=("dtype", "cut"))
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_walk_kernel_fits_sm90(dtype: torch.dtype, cut: tuple[bool, bool]) -> None:
    """A walk spills nothing, whatever is cut."""
    assert_nothing_spills(make_walk_request(dtype, *cut))


@pytest.mark.sweep(1, free=("num_nodes", "cut"))
@pytest.mark.parametrize(
    "num_nodes, cut", [(256, False), (32, False), (32, True), (128, True), (256, True)]
)
def test_walk_kernel_of_large_trees_fits_sm90(num_nodes: int, cut: bool) -> None:
    """A walk through the largest tree and vocabulary spills nothing."""
    assert_nothing_spills(make_walk_request(torch.bfloat16, cut, cut, num_nodes, 262144))


@pytest.mark.sweep(1, free=("dtype", "without", "cut", "subset"))
@pytest.mark.parametrize(
    "dtype, without, cut, subset",
    [
        *product((torch.bfloat16, torch.float32), BOTH, BOTH, (True,)),
        (torch.float16, True, True, True),
        (torch.bfloat16, True, True, False),
    ],
)
def test_reject_kernel_fits_sm90(
    dtype: torch.dtype, without: bool, cut: bool, subset: bool
) -> None:
    """Recursive rejection spills nothing."""
    assert_nothing_spills(make_reject_request(dtype, without, cut, subset))


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [32, 128, 256])
def test_reject_kernel_of_any_tree_size_fits_sm90(num_nodes: int) -> None:
    """Recursive rejection spills nothing in small trees and the largest."""
    assert_nothing_spills(make_reject_request(torch.bfloat16, num_nodes=num_nodes))


@pytest.mark.sweep(1, free=("dtype",))
@pytest.mark.parametrize("dtype", TYPES)
def test_bonus_kernel_fits_sm90(dtype: torch.dtype) -> None:
    """The draw of the bonus token spills nothing."""
    assert_nothing_spills(
        make_request("_bonus_kernel", dtype, SAMPLE_TILES, {"SHIFT": EMPTY_BITS[dtype]})
    )
