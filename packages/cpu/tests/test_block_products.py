"""Products with the quantised blocks of GGUF files against their dequantised weights in float32."""

from collections.abc import Iterator

import gguf
import numba
import pytest
import torch
from torch import Tensor

from spectrain.models.gguf_blocks import dequantize
from spectrain_cpu import available

pytestmark = pytest.mark.skipif(
    not available.has_block_kernels(), reason="the kernels need Numba and AVX2"
)
if available.has_block_kernels():
    from spectrain_cpu import block_rows, block_tiles, vectors
    from spectrain_cpu.block_formats import BLOCK, FORMATS, LINE
    from spectrain_cpu.block_products import BlockPanels, BlockProduct
    from spectrain_cpu.block_rows import RECORD_BYTES
else:
    FORMATS = {}

Type = gguf.GGMLQuantizationType
HALF_BYTES = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q8_0: [0],
    Type.Q4_K: [0, 2],
    Type.Q6_K: [208],
}
"""Where float16 numbers begin in a block."""
TYPES = list(HALF_BYTES)
ROWS = [1, 2, 3, 5, 8, 9, 16, 17, 33]
ROUNDING = 2.0**-15
"""Error of a rounded input, in units of the largest of its 32."""
SUMMING = 2.0**-20
"""Error of sums in float32, in units of the sum of the magnitudes."""


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_rows(tensor_type: Type, outputs: int, width: int, seed: int = 0) -> Tensor:
    """Return random bits [outputs, bytes] as rows of a file, whose scales are small numbers."""
    values, size = gguf.GGML_QUANT_SIZES[tensor_type]
    source = torch.Generator().manual_seed(seed)
    content = torch.randint(
        0, 256, (outputs, width // values * size), dtype=torch.uint8, generator=source
    )
    blocks = content.view(-1, size)
    for start in HALF_BYTES[tensor_type]:
        # Exponents from -8 on, and both signs.
        blocks[:, start + 1] = (blocks[:, start + 1] & 0x83) | 0x1C
    return content


def pack(content: Tensor, width: int, tensor_type: Type, in_bytes: bool = False) -> "BlockPanels":
    panels = BlockPanels.allocate(len(content), width, tensor_type, in_bytes)
    panels.store_rows(0, content)
    return panels


def make_weights(
    tensor_type: Type, outputs: int, width: int, in_bytes: bool = False
) -> tuple["BlockPanels", Tensor]:
    """Return panels, and their values as float64."""
    content = random_rows(tensor_type, outputs, width)
    values = dequantize(content.flatten(), tensor_type).view(outputs, width)
    return pack(content, width, tensor_type, in_bytes), values.double()


def largest_error(x: Tensor, values: Tensor) -> Tensor:
    """Return the bound of the error of every product: rounded inputs, and sums in float32."""
    largest = x.double().abs().unflatten(-1, (-1, BLOCK)).amax(-1).repeat_interleave(BLOCK, dim=-1)
    weights = values.abs().T
    return ROUNDING * largest @ weights + SUMMING * x.double().abs() @ weights


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda kind: kind.name)
def test_panels_hold_the_values_of_the_file(tensor_type: Type) -> None:
    content = random_rows(tensor_type, 48, 512)
    panels = pack(content, 512, tensor_type)
    values = dequantize(content.flatten(), tensor_type).view(48, 512)
    assert torch.equal(panels.all_values(torch.float32), values)
    rows = torch.tensor([47, 0, 16, 15, 0])
    assert torch.equal(panels.values(rows), values[rows])
    assert panels.values(rows[:0]).shape == (0, 512)
    stored = content.nbytes
    assert stored <= panels.content.nbytes <= 1.03 * stored
    # A vector that crosses lines is read twice.
    assert panels.content.data_ptr() % LINE == 0


@pytest.mark.parametrize("width", [256, 768])
@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda kind: kind.name)
def test_products_equal_the_dequantised_weights(tensor_type: Type, width: int) -> None:
    panels, values = make_weights(tensor_type, 80, width)
    source = torch.Generator().manual_seed(1)
    x = torch.randn(max(ROWS), width, generator=source)
    # Inputs of very different sizes, as models have.
    x[:, 40] *= 1000
    every = panels.product(x)
    assert ((every - x.double() @ values.T).abs() <= largest_error(x, values)).all()
    for rows in ROWS:
        assert torch.equal(panels.product(x[:rows]), every[:rows])


@pytest.mark.skipif(
    available.has_block_kernels() and not block_tiles.has_fused_words(),
    reason="rows of 8 bits need VNNI",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda kind: kind.name)
def test_rows_of_eight_bits_are_rounded_by_the_largest_of_32(
    tensor_type: Type, dtype: torch.dtype
) -> None:
    panels, values = make_weights(tensor_type, 80, 512, in_bytes=True)
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(1))
    x[:, 40] *= 100
    x[5] = 0
    x = x.to(dtype)
    blocks = x.double().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    rounded = (blocks / scales.clamp(min=1e-30)).round() * scales
    exact = rounded.flatten(-2) @ values.T
    every = panels.product(x)
    # A number near the middle between two integers may be rounded to either.
    middle = ((blocks / scales.clamp(min=1e-30)) % 1 - 0.5).abs() < 1e-4
    unsure = (middle * scales).flatten(-2) @ values.abs().T
    bound = unsure + SUMMING * 128 * (x.double().abs() @ values.abs().T)
    bound += 2.0**-8 * exact.abs() if dtype == torch.bfloat16 else 0
    assert ((every - exact).abs() <= bound).all()
    assert (every[5] == 0).all()
    for rows in (1, 2, 8):
        assert torch.equal(panels.product(x[:rows]), every[:rows])
    assert not torch.equal(make_weights(tensor_type, 80, 512)[0].product(x), every)


def test_rows_of_eight_bits_that_are_not_finite() -> None:
    panels, _ = make_weights(Type.Q4_K, 16, 256, in_bytes=True)
    x = torch.ones(4, 256)
    x[1, 3] = torch.inf
    x[2, 255] = torch.nan
    product = panels.product(x)
    assert product[1:3].isnan().all()
    assert product[[0, 3]].isfinite().all()


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda kind: kind.name)
def test_first_rows_share_the_memory(tensor_type: Type) -> None:
    panels, _ = make_weights(tensor_type, 80, 256)
    first = panels.first_rows(40)
    assert first.shape == (48, 256)
    assert first.content.data_ptr() == panels.content.data_ptr()
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first.product(x), panels.product(x)[:, :48])


@pytest.mark.parametrize("width", [32, 96, 160])
@pytest.mark.parametrize(
    "tensor_type", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0], ids=lambda kind: kind.name
)
def test_widths_are_multiples_of_a_block_alone(tensor_type: Type, width: int) -> None:
    panels, values = make_weights(tensor_type, 16, width)
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    product = panels.product(x)
    assert ((product - x.double() @ values.T).abs() <= largest_error(x, values)).all()


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda kind: kind.name)
def test_inputs_of_bfloat16_are_exact(tensor_type: Type) -> None:
    """Inputs of bfloat16 between 1/64 and 1 of the largest are not rounded."""
    panels, values = make_weights(tensor_type, 16, 512)
    source = torch.Generator().manual_seed(1)
    exponents = torch.randint(-6, 0, (4, 512), generator=source)
    signs = torch.randint(0, 2, (4, 512), generator=source) * 2 - 1
    x = (signs * (1 + torch.rand(4, 512, generator=source)) * 2.0**exponents).bfloat16()
    exact = x.double() @ values.T
    error = (panels.product(x.float()) - exact).abs()
    assert (error <= SUMMING * x.double().abs() @ values.abs().T).all()
    # The result of bfloat16 inputs is the same, rounded once.
    assert torch.equal(panels.product(x), panels.product(x.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_several_types_below_each_other(dtype: torch.dtype) -> None:
    parts = [make_weights(kind, 16 * (number + 1), 256)[0] for number, kind in enumerate(TYPES)]
    product = BlockProduct(parts)
    source = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 256, generator=source).to(dtype)
    bias = torch.randn(product.num_outputs, generator=source).to(dtype)
    alone = [part.product(x.float()) for part in parts]
    expected = torch.cat(alone, dim=-1) + bias.float()
    assert torch.equal(product.product(x, bias), expected.to(dtype))
    transposed = x.transpose(0, 1)
    assert torch.equal(product.product(transposed, bias), expected.transpose(0, 1).to(dtype))


def test_threads_change_no_bit() -> None:
    panels, _ = make_weights(Type.Q4_K, 4096, 256)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    products = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        products.append(panels.product(x))
    assert all(torch.equal(product, products[0]) for product in products)


def test_no_rows() -> None:
    panels, _ = make_weights(Type.Q4_K, 16, 256)
    assert panels.product(torch.empty(0, 256)).shape == (0, 16)


def test_zeros_and_numbers_that_are_not_finite() -> None:
    panels, values = make_weights(Type.Q4_K, 16, 256)
    x = torch.ones(6, 256)
    x[1, 3] = torch.inf
    x[2, 255] = torch.nan
    x[3] = 0
    x[4] = 1e-38
    x[5] = 1e30
    product = panels.product(x)
    # A sum with infinity is NaN, because weights of both signs are multiplied by it.
    assert product[1:3].isnan().all()
    assert (product[3] == 0).all()
    finite = x[[0, 4, 5]]
    error = (product[[0, 4, 5]] - finite.double() @ values.T).abs()
    # Numbers below 2^-95 are rounded to zero.
    assert (error <= largest_error(finite, values) + 2.0**-95 * values.abs().sum(-1)).all()


@pytest.mark.parametrize("products", ["fused", "wide", "narrow"])
def test_instructions_of_every_processor_have_the_same_bits(products: str) -> None:
    is_supported = {
        "fused": block_tiles.has_fused_words(),
        "wide": block_tiles.has_wide_words(),
        "narrow": True,
    }
    if not is_supported[products]:
        pytest.skip("this processor lacks the instructions")
    panels, _ = make_weights(Type.Q5_0, 16, 64)
    multiply = block_tiles.make_multiply(panels.block_format, products, 1)
    round_rows = block_rows.round_rows
    to_floats = vectors.to_floats

    @numba.njit
    def run(x: int, records: int, panel: int, out: int) -> None:
        round_rows(to_floats(x), 1, 64, RECORD_BYTES, records)
        multiply(1, records, panel, 2, out, 0)

    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    records = torch.empty(2 * RECORD_BYTES, dtype=torch.uint8)
    out = torch.empty(1, 16)
    run(x.data_ptr(), records.data_ptr(), panels.content.data_ptr(), out.data_ptr())
    assert torch.equal(out, panels.product(x))
