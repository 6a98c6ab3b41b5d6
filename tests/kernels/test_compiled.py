"""The kernels as an H100 or H200 would run them: compiled for sm_90, without a GPU.

Nothing runs here; what the compiler says of registers, shared memory and tensor cores must be as the configurations mean it.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from spectrain.kernels.tree_attention import COMBINED_ROWS, CONFIGS, choose_config
from tests.kernels import aot

pytest.importorskip("triton", reason="triton is not installed, so there is nothing to compile")

MODULE = "spectrain.kernels.tree_attention"
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
ROWS = (16, 64, 256)  # for each of them another configuration


def attention(
    dtype: torch.dtype, head_size: int, num_rows: int, split: bool = True, window: bool = False, softcap: bool = False
) -> Any:
    """The request for what a launch with these tensors would compile."""
    config = choose_config(num_rows, head_size, dtype)
    pointer, positions = f"*{TYPES[dtype]}", "*i64"
    types = dict.fromkeys(["q_ptr", "k_ptr", "v_ptr", "out_ptr"], pointer) | {"scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(["words_ptr", "lengths_ptr", "query_positions_ptr", "key_positions_ptr"], positions)
    types |= {"logs_ptr": "*fp32", "out_ptr": "*fp32" if split else pointer}
    constants: dict[str, Any] = {"GROUP": 4, "HEAD_SIZE": head_size, "BLOCK_D": max(16, 1 << (head_size - 1).bit_length())}
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    absent = [] if split else ["logs_ptr"]
    absent += [] if window else ["window", "query_positions_ptr", "key_positions_ptr"]
    absent += [] if softcap else ["softcap"]
    constants |= dict.fromkeys(absent)
    return aot.Request(MODULE, "_split_kernel", types, constants, config.warps, config.stages)


def combining(head_size: int) -> Any:
    types = {"parts_ptr": "*fp32", "logs_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = {"HEAD_SIZE": head_size, "BLOCK_D": head_size, "BLOCK_M": COMBINED_ROWS}
    return aot.Request(MODULE, "_combine_kernel", types, constants, 4, 3)


def assert_fits(requests: dict[str, Any]) -> None:
    """Nothing spills, shared memory suffices, loads are asynchronous, and half precision uses tensor cores.

    In float32 the assembler keeps below 80 or 128 registers, for more warps at once, and spills a few words for it.
    """
    for (name, request), usage in zip(requests.items(), aot.compile_all(list(requests.values()))):
        print(name, usage)  # with pytest -s
        exact = request.types.get("q_ptr") == "*fp32"
        assert usage.stack <= (64 if exact else 0), (name, usage)
        assert usage.shared <= aot.SHARED_MEMORY[90], (name, usage)
        if request.kernel == "_split_kernel":
            assert usage.copies > 0, (name, usage)
            half, tall = not exact, request.constants["BLOCK_M"] >= 64
            assert (usage.wgmma > 0) == (half and tall) and (usage.mma > 0) == (half and not tall), (name, usage)


def test_default_configurations_fit_sm90() -> None:
    """Every configuration of the common head sizes fits, in bfloat16 and in float32."""
    requests = {
        f"{TYPES[dtype]}, head size {head_size}, {num_rows} rows": attention(dtype, head_size, num_rows)
        for dtype, head_size, num_rows in product((torch.bfloat16, torch.float32), (64, 128), ROWS)
    }
    requests |= {f"combine, head size {head_size}": combining(head_size) for head_size in (64, 128)}
    assert_fits(requests)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 256])
def test_every_configuration_fits_sm90(head_size: int, dtype: torch.dtype) -> None:
    """So does every other launch: odd head sizes, windows, softcaps, one split or several."""
    requests = {
        f"{TYPES[dtype]}, head size {head_size}, {num_rows} rows, {options}": attention(dtype, head_size, num_rows, **options)
        for num_rows in ROWS
        for options in (
            {"split": False},
            {"split": True},
            {"split": False, "window": True},
            {"split": True, "window": True},
            {"split": True, "window": True, "softcap": True},
            {"split": True, "softcap": True},
        )
    }
    if head_size in CONFIGS:
        requests["combine"] = combining(head_size)
    assert_fits(requests)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [89, 120])
def test_every_configuration_fits_a_consumer_gpu(architecture: int) -> None:
    """The largest launch of every configuration has the shared memory it needs on GeForce cards too."""
    requests = {
        (dtype, head_size, num_rows): replace(attention(dtype, head_size, num_rows, window=True), architecture=architecture)
        for dtype, head_size, num_rows in product(TYPES, CONFIGS, ROWS)
    }
    for name, usage in zip(requests, aot.compile_all(list(requests.values()))):
        assert usage.shared <= aot.SHARED_MEMORY[architecture], (name, usage)
        assert (usage.mma > 0) == (name[0] != torch.float32), (name, usage)
