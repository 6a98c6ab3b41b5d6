"""The verification kernels as an H100 or H200 would run them: compiled for sm_90 in their default configurations."""

from itertools import product
from typing import Any

import pytest
import torch

from spectrain.kernels.tree_verify import ARGMAX, CUT, DRAWN, EMPTY_BITS, WALK, VerifyTiles
from tests.kernels import aot

pytest.importorskip("triton", reason="triton is not installed, so there is nothing to compile")

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
NUM_TOKENS = 128256  # of Llama 3
CUTS = ((True, False), (False, True), (True, True))  # top-k, top-p
LONG = ("tokens_ptr", "parents_ptr", "rows_ptr", "positions_ptr", "path_ptr", "counts_ptr", "bonus_ptr")


def request(kernel: str, dtype: torch.dtype, config: VerifyTiles, constants: dict[str, Any]) -> Any:
    """The request for what a launch would compile; a constant of None is an argument that is left out."""
    types = dict.fromkeys(LONG, "*i64") | {"logits_ptr": TYPES[dtype], "allowed_ptr": "*i1", "key": "i64"}
    types |= {"best_ptr": "*fp32", "place_ptr": "*i32", "temperature": "fp32", "top_p": "fp32"}
    types |= {"q_ptr": "*fp32", "places_ptr": "*i32", "residual_ptr": "*fp32", "state_ptr": "*i32"}
    return aot.Request(
        "spectrain.kernels.tree_verify",
        kernel,
        types,
        constants | {"BLOCK": config.block},
        config.warps,
        3,
        multiples=("vocabulary",),
    )


def choosing(dtype: torch.dtype, noise: bool) -> Any:
    absent = {} if noise else dict.fromkeys(["rows_ptr", "positions_ptr"])
    return request("_choose_kernel", dtype, DRAWN if noise else ARGMAX, {"NOISE": noise, **absent})


def walking(dtype: torch.dtype, top_k: bool, top_p: bool, num_nodes: int = 64, num_tokens: int = NUM_TOKENS) -> Any:
    cut = top_k or top_p
    absent = ([] if top_k else ["top_k"]) + ([] if top_p else ["top_p"])
    block_s = 1 << (num_tokens // DRAWN.block).bit_length()
    constants = {"CUT": cut, "SHIFT": EMPTY_BITS[dtype], "BLOCK_N": num_nodes, "BLOCK_S": block_s, **dict.fromkeys(absent)}
    return request("_walk_kernel", dtype, CUT if cut else WALK, constants)


def assert_nothing_spills(requests: dict[Any, Any]) -> None:
    for (name, request), usage in zip(requests.items(), aot.compile_all(list(requests.values()))):
        print(name, usage)  # with pytest -s
        assert usage.stack == 0, (name, usage)
        reads = request.kernel != "_walk_kernel" or request.constants["CUT"]
        assert usage.wide > 0 or not reads, (name, usage)
        assert usage.shared <= aot.SHARED_MEMORY[90] // 4, (name, usage)


def test_choosing_fits_sm90() -> None:
    """The argmax of rows, with noise and without, spills nothing."""
    assert_nothing_spills({(dtype, noise): choosing(dtype, noise) for dtype, noise in product(TYPES, (False, True))})


def test_walking_fits_sm90() -> None:
    """Neither does a walk, whatever is cut, nor through the largest tree and vocabulary."""
    requests: dict[Any, Any] = {(dtype, cut): walking(dtype, *cut) for dtype in TYPES for cut in CUTS}
    requests |= {("none", size): walking(torch.bfloat16, False, False, size, 262144) for size in (32, 256)}
    requests |= {("both", size): walking(torch.bfloat16, True, True, size, 262144) for size in (32, 128, 256)}
    assert_nothing_spills(requests)


def rejecting(dtype: torch.dtype, without: bool = True, cut: bool = True, subset: bool = True, num_nodes: int = 64) -> Any:
    absent = ([] if cut else ["top_k", "top_p"]) + ([] if subset else ["places_ptr"])
    constants = {"WITHOUT": without, "SHIFT": EMPTY_BITS[dtype], "BLOCK_N": num_nodes, **dict.fromkeys(absent)}
    return request("_reject_kernel", dtype, CUT, constants)


def test_rejecting_fits_sm90() -> None:
    """Neither does recursive rejection, nor the draw that follows it."""
    both = (False, True)
    requests: dict[Any, Any] = {choice: rejecting(*choice) for choice in product((torch.bfloat16, torch.float32), both, both)}
    requests |= {"float16": rejecting(torch.float16), "one vocabulary": rejecting(torch.bfloat16, subset=False)}
    requests |= {size: rejecting(torch.bfloat16, num_nodes=size) for size in (32, 128, 256)}
    requests |= {dtype: request("_bonus_kernel", dtype, DRAWN, {"SHIFT": EMPTY_BITS[dtype]}) for dtype in TYPES}
    assert_nothing_spills(requests)
