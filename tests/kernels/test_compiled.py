"""The kernels as an H100 or H200 would run them: compiled for sm_90, without a GPU.

Nothing runs here; what the compiler says of registers, shared memory and tensor cores must be as
the configurations mean it.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from spectrain.kernels.row_kl import KERNEL_BLOCKS
from spectrain.kernels.tree_attention import (
    COMBINED_DIMS,
    COMBINED_ROWS,
    TILE_CONFIGS,
    choose_tiles,
)
from tests.kernels import aot

pytest.importorskip("triton", reason="triton is not installed, so there is nothing to compile")

MODULE = "spectrain.kernels.tree_attention"
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
ROWS = (64, 16, 256)  # for each of them another configuration
LAUNCHES: tuple[dict[str, bool], ...] = (
    {"split": False},
    {"split": True},
    {"split": False, "window": True},
    {"split": True, "window": True},
    {"split": True, "window": True, "softcap": True},
    {"split": True, "softcap": True},
)


def attention(
    dtype: torch.dtype,
    head_size: int,
    num_rows: int,
    split: bool = True,
    window: bool = False,
    softcap: bool = False,
    roomy: bool = True,
    group: int = 4,
) -> Any:
    """The request for what a launch with these tensors would compile."""
    config = choose_tiles(num_rows, head_size, dtype, roomy)
    pointer = f"*{TYPES[dtype]}"
    positions = "*i64"
    types = dict.fromkeys(["q_ptr", "k_ptr", "v_ptr", "out_ptr"], pointer) | {
        "scale": "fp32",
        "softcap": "fp32",
    }
    types |= dict.fromkeys(
        ["words_ptr", "lengths_ptr", "query_positions_ptr", "key_positions_ptr"], positions
    )
    types |= {"logs_ptr": "*fp32", "out_ptr": "*fp32" if split else pointer}
    block_d = max(16, 1 << (head_size - 1).bit_length())
    constants: dict[str, Any] = {"GROUP": group, "HEAD_SIZE": head_size, "VALUE_SIZE": head_size}
    constants |= {"BLOCK_D": block_d, "BLOCK_V": block_d}
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_P": config.block_p}
    absent = [] if split else ["logs_ptr"]
    absent += [] if window else ["window", "query_positions_ptr", "key_positions_ptr"]
    absent += [] if softcap else ["softcap"]
    constants |= dict.fromkeys(absent)
    return aot.Request(
        MODULE, "_split_kernel", types, constants, config.num_warps, config.num_stages
    )


def make_combine_request(head_size: int, splits: int) -> Any:
    types = {"parts_ptr": "*fp32", "logs_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = {
        "HEAD_SIZE": head_size,
        "BLOCK_D": min(head_size, COMBINED_DIMS),
        "BLOCK_S": splits,
        "BLOCK_M": COMBINED_ROWS,
    }
    return aot.Request(MODULE, "_combine_kernel", types, constants, 4, 3)


def assert_fits(request: Any) -> None:
    """Nothing spills, shared memory suffices, loads are asynchronous, and half precision uses
    tensor cores.

    In float32 the assembler keeps below 80 or 128 registers, for more warps at once, and spills a
    few words for it.
    """
    usage = aot.compile_for(request)
    print(usage)  # with pytest -s
    exact = request.types.get("q_ptr") == "*fp32"
    assert usage.stack <= (64 if exact else 0), usage
    assert usage.shared <= aot.SHARED_MEMORY[90], usage
    if request.kernel == "_split_kernel":
        assert usage.copies > 0, usage
        half = not exact
        tall = request.constants["BLOCK_M"] >= 64
        assert (usage.wgmma > 0) == (half and tall) and (usage.mma > 0) == (half and not tall), (
            usage
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("group", [4, 7])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("dtype", TYPES)
def test_default_configurations_fit_sm90(
    dtype: torch.dtype, head_size: int, num_rows: int, group: int
) -> None:
    """Every configuration of the common head sizes fits, in bfloat16 and in float32."""
    assert_fits(attention(dtype, head_size, num_rows, group=group))


@pytest.mark.sweep(1, free=("head_size",))
@pytest.mark.parametrize("splits", [2, 32, 64])
@pytest.mark.parametrize("head_size", TILE_CONFIGS)
def test_combine_kernel_fits_sm90(head_size: int, splits: int) -> None:
    """The kernel that averages splits fits too, and reads all of them without a loop."""
    request = make_combine_request(head_size, splits)
    assert_fits(request)
    assert not aot.compile_for(request).loops


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 256, 512])
def test_every_configuration_fits_sm90(head_size: int, num_rows: int, dtype: torch.dtype) -> None:
    """Every other launch fits too: odd head sizes, windows, softcaps, one split or several."""
    for options in LAUNCHES:
        assert_fits(attention(dtype, head_size, num_rows, **options))


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("group", [7, 10])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_group_sizes_other_than_powers_of_two_fit_sm90(
    head_size: int, num_rows: int, group: int
) -> None:
    """Nothing spills where finding a row's node takes a division (Qwen2 has seven query heads a
    key-value head).
    """
    for options in LAUNCHES:
        assert_fits(attention(torch.bfloat16, head_size, num_rows, group=group, **options))


@pytest.mark.sweep(1, free=("raw", "log_z", "kernel"))
@pytest.mark.parametrize(
    "kernel, raw, log_z",
    [
        ("_row_kl_kernel", False, False),
        ("_row_kl_kernel", True, False),
        ("_row_kl_kernel", True, True),
        ("_row_best_kernel", 0, 0),
    ],
)
def test_row_kernels_fit_sm90(kernel: str, raw: bool, log_z: bool) -> None:
    """The row kernels of the fused loss fit, over a full vocabulary; the target's products are
    read as they are.
    """
    types = {
        "product_ptr": "*bf16",
        "log_p_ptr": "*bf16" if raw else "*fp32",
        "row_weight_ptr": "*fp32",
        "loss_ptr": "*fp32",
    }
    types |= dict.fromkeys(("best_ptr", "labels_ptr", "target_rows_ptr"), "*i64") | dict.fromkeys(
        ("log_z_ptr", "target_log_z_ptr"), "*fp32"
    )
    types |= dict.fromkeys(("scale", "softcap", "target_scale", "target_softcap"), "fp32")
    block, warps = KERNEL_BLOCKS[-1][1:]
    constants: dict[str, Any] = {"VOCAB": 128256, "BLOCK": block, "SOFTCAPPED": False}
    if kernel == "_row_kl_kernel":
        constants |= {
            "HAS_TOKENS": False,
            "TARGET_SOFTCAPPED": False,
            "HAS_PRODUCTS": raw,
            "WITH_GRAD": True,
        }
        absent = ["tokens_ptr", *([] if log_z else ["target_log_z_ptr"])]
        # Only products are read by chosen rows.
        constants |= dict.fromkeys([*absent, *([] if raw else ["target_rows_ptr"])])
    usage = aot.compile_for(
        aot.Request("spectrain.kernels.row_kl", kernel, types, constants, warps, 3)
    )
    print(usage)  # with pytest -s
    assert usage.stack == 0 and usage.registers <= 128 and usage.wide > 0, usage


@pytest.mark.slow
def test_narrow_values_fit_sm90() -> None:
    """Keys of 192 with values of 128 fit, as DeepSeek's latent attention expands them."""
    for num_rows in ROWS:
        request = attention(torch.bfloat16, 192, num_rows)
        assert_fits(
            replace(request, constants=request.constants | {"VALUE_SIZE": 128, "BLOCK_V": 128})
        )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [89, 120])
def test_every_configuration_fits_a_consumer_gpu(architecture: int) -> None:
    """The largest launch of every configuration has the shared memory it needs on GeForce cards
    too.
    """
    for choice in product(TYPES, TILE_CONFIGS, ROWS):
        usage = aot.compile_for(
            replace(attention(*choice, window=True, roomy=False), architecture=architecture)
        )
        assert usage.shared <= aot.SHARED_MEMORY[architecture], (choice, usage)
        assert (usage.mma > 0) == (choice[0] != torch.float32), (choice, usage)
