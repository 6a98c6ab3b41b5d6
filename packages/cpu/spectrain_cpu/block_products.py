"""Products of rows with quantised weights of GGUF files on a CPU, compiled by Numba: the integers
are multiplied as they lie in memory, and never written in a wider type.

`block_rows` rounds the rows, and `block_tiles` multiplies them. The products of a block are added
as integers, in any order the same, and then scaled by the block's scale in float32; what the minima
add is the sum of the inputs times the minimum. So a result depends neither on the other rows nor on
the number of threads, and differs from that of float32 weights by the rounding of the rows.

Shapes: N rows, K input width, O output width, B blocks of 32 inputs. `block_formats` says how
weights lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import gguf
import torch
from numba import carray, types
from torch import Tensor

from .available import has_block_kernels
from .block_formats import BLOCK, COLUMNS, FORMATS, BlockFormat, unpack_panels
from .block_packing import pack_panels
from .block_rows import BYTE_RECORD_BYTES, MAX_TILE_ROWS, RECORD_BYTES, round_rows, tile_rows
from .block_tiles import has_fused_words, make_multiply
from .huge_pages import LINE, allocate_lines
from .linear import divide_panels
from .team import MAX_MEMBERS, current_team, job_numbers, run_job
from .vectors import (
    WIDE,
    VectorBuilder,
    compile_cached,
    compile_inline,
    compile_part,
    intrinsic,
    to_floats,
    to_halves,
    to_longs,
)

# Bytes that several rows fetch ahead, into the second-level cache: rows fill the first. With 2 KB
# two rows read at half of the speed (EPYC, a busy machine).
FETCH_AHEAD = 6 * 1024
SUMS_BYTES = 4 * MAX_TILE_ROWS * COLUMNS  # of a thread

# numbers of a segment: its part function, its panels, their number and bytes, its first output
SEGMENT_SIZE = 5


def make_store(is_half: bool) -> Any:
    """Return the function that stores 16 sums, plus the biases at an address that is not 0, as
    numbers of a model: bfloat16 with `is_half`, else float32.
    """

    def store_numbers(context: Any, sums: Any, biases: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vectors = VectorBuilder(builder)
            sums, biases, out = args

            def store(numbers: Any) -> None:
                vectors.store(vectors.narrow(numbers) if is_half else numbers, out, 2)

            totals = vectors.load(sums)
            with builder.if_else(builder.icmp_unsigned("!=", biases, WIDE(0))) as (then, other):
                with then:
                    store(builder.fadd(totals, vectors.load_widened(biases, is_half)))
                with other:
                    store(totals)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    # Numba tells functions apart by their names alone.
    store_numbers.__name__ = "store_halves" if is_half else "store_floats"
    return intrinsic(store_numbers)


store_halves = make_store(True)
store_floats = make_store(False)


@compile_inline
def store_sums(
    scratch: int, biases: int, out: int, is_half: bool, first: int, stride: int, rows: int
) -> None:
    """Store sums [rows, 16], with the biases of these outputs where there are any, from the output
    `first` on."""
    size = 2 if is_half else 4
    added = biases + size * first if biases != 0 else 0
    for row in range(rows):
        sums = scratch + LINE * row
        address = out + size * (row * stride + first)
        if is_half:
            store_halves(sums, added, address)
        else:
            store_floats(sums, added, address)


# numbers of the job, after the function of a part
RECORDS = 1
PANELS = 2
NUM_PANELS = 3
PANEL_BYTES = 4
FIRST_OUTPUT = 5
BIASES = 6
OUT = 7
IS_HALF = 8
ROWS = 9
BLOCKS = 10
NUM_OUTPUTS = 11
SCRATCH = 12
STEP = 13
RECORD = 14  # its bytes


@compile_inline
def multiply_part(multiply: Any, team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of the job by the function of their type."""
    job = job_numbers(team)
    rows = job[ROWS]
    blocks = job[BLOCKS]
    panel_bytes = job[PANEL_BYTES]
    stride = job[NUM_OUTPUTS]
    is_half = job[IS_HALF] != 0
    scratch = job[SCRATCH] + member * SUMS_BYTES
    most = tile_rows(rows)
    number_size = 2 if is_half else 4
    for index in range(part * job[STEP], min((part + 1) * job[STEP], job[NUM_PANELS])):
        panel = job[PANELS] + index * panel_bytes
        for row in range(0, rows, most):
            count = min(most, rows - row)
            records = job[RECORDS] + row * blocks * job[RECORD]
            # The others find in the cache what the first tile fetched.
            ahead = FETCH_AHEAD if row == 0 else 0
            multiply(count, records, panel, blocks, scratch, ahead)
            store_sums(
                scratch,
                job[BIASES],
                job[OUT] + number_size * row * stride,
                is_half,
                job[FIRST_OUTPUT] + index * COLUMNS,
                stride,
                count,
            )


multiply_q4_0 = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_0])
multiply_q4_1 = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_1])
multiply_q5_0 = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q5_0])
multiply_q8_0 = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q8_0])
multiply_q4_k = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_K])
multiply_q6_k = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q6_K])
multiply_q4_0_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_0], "bytes")
multiply_q4_1_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_1], "bytes")
multiply_q5_0_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q5_0], "bytes")
multiply_q8_0_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q8_0], "bytes")
multiply_q4_k_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_K], "bytes")
multiply_q6_k_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q6_K], "bytes")


@compile_part
def part_q4_0(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_0."""
    multiply_part(multiply_q4_0, team, part, member)


@compile_part
def part_q4_1(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_1."""
    multiply_part(multiply_q4_1, team, part, member)


@compile_part
def part_q5_0(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q5_0."""
    multiply_part(multiply_q5_0, team, part, member)


@compile_part
def part_q8_0(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q8_0."""
    multiply_part(multiply_q8_0, team, part, member)


@compile_part
def part_q4_k(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_K."""
    multiply_part(multiply_q4_k, team, part, member)


@compile_part
def part_q6_k(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q6_K."""
    multiply_part(multiply_q6_k, team, part, member)


@compile_part
def part_q4_0_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_0 by rows in 8 bits."""
    multiply_part(multiply_q4_0_bytes, team, part, member)


@compile_part
def part_q4_1_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_1 by rows in 8 bits."""
    multiply_part(multiply_q4_1_bytes, team, part, member)


@compile_part
def part_q5_0_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q5_0 by rows in 8 bits."""
    multiply_part(multiply_q5_0_bytes, team, part, member)


@compile_part
def part_q8_0_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q8_0 by rows in 8 bits."""
    multiply_part(multiply_q8_0_bytes, team, part, member)


@compile_part
def part_q4_k_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_K by rows in 8 bits."""
    multiply_part(multiply_q4_k_bytes, team, part, member)


@compile_part
def part_q6_k_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q6_K by rows in 8 bits."""
    multiply_part(multiply_q6_k_bytes, team, part, member)


PART_FUNCTIONS: dict[Any, Callable[[], Any]] = {
    gguf.GGMLQuantizationType.Q4_0: part_q4_0,
    gguf.GGMLQuantizationType.Q4_1: part_q4_1,
    gguf.GGMLQuantizationType.Q5_0: part_q5_0,
    gguf.GGMLQuantizationType.Q8_0: part_q8_0,
    gguf.GGMLQuantizationType.Q4_K: part_q4_k,
    gguf.GGMLQuantizationType.Q6_K: part_q6_k,
}
"""Compiles, at the first call, the function of a part of a job in a type."""
BYTE_PART_FUNCTIONS: dict[Any, Callable[[], Any]] = {
    gguf.GGMLQuantizationType.Q4_0: part_q4_0_bytes,
    gguf.GGMLQuantizationType.Q4_1: part_q4_1_bytes,
    gguf.GGMLQuantizationType.Q5_0: part_q5_0_bytes,
    gguf.GGMLQuantizationType.Q8_0: part_q8_0_bytes,
    gguf.GGMLQuantizationType.Q4_K: part_q4_k_bytes,
    gguf.GGMLQuantizationType.Q6_K: part_q6_k_bytes,
}
"""The same for rows in 8 bits."""


@compile_cached
def multiply_segments(
    segments: int,
    num_segments: int,
    x: int,
    record_bytes: int,
    records: int,
    biases: int,
    out: int,
    is_half: bool,
    rows: int,
    width: int,
    num_outputs: int,
    scratch: int,
    team: int,
    members: int,
) -> None:
    """Store x [N, K] times the weights of all segments plus the biases [O], whose address may be 0,
    [N, O].

    A segment [5] is the function of a part, the address of panels, their number and bytes, and the
    output of the first one. `records` holds the rounded rows [N, B], whose blocks have so many
    bytes, `scratch` the sums of every thread. So many threads of the team share the panels.
    """
    if is_half:
        round_rows(to_halves(x), rows, width, record_bytes, records)
    else:
        round_rows(to_floats(x), rows, width, record_bytes, records)
    job = job_numbers(team)
    for index in range(num_segments):
        segment = carray(to_longs(segments + 8 * SEGMENT_SIZE * index), (SEGMENT_SIZE,))
        count = segment[2]
        # Panels of other products have twice as many outputs.
        sharing, step = divide_panels((count + 1) // 2, members)
        step = 2 * step
        job[0] = segment[0]
        job[RECORDS] = records
        job[PANELS] = segment[1]
        job[NUM_PANELS] = count
        job[PANEL_BYTES] = segment[3]
        job[FIRST_OUTPUT] = segment[4]
        job[BIASES] = biases
        job[OUT] = out
        job[IS_HALF] = 1 if is_half else 0
        job[ROWS] = rows
        job[BLOCKS] = width // BLOCK
        job[NUM_OUTPUTS] = num_outputs
        job[SCRATCH] = scratch
        job[STEP] = step
        job[RECORD] = record_bytes
        run_job(team, sharing, (count + step - 1) // step)


class BlockPanels:
    """Quantised weights [O, K] of a GGUF file in panels of 16 outputs. Rows that are multiplied by
    them are rounded to 16 bits, or with `in_bytes` to 8 where the processor multiplies these.
    """

    def __init__(
        self, panels: Tensor, width: int, block_format: BlockFormat, in_bytes: bool
    ) -> None:
        self.panels = panels
        self.width = width
        self.block_format = block_format
        self.in_bytes = in_bytes and has_fused_words()

    @staticmethod
    def allocate(outputs: int, width: int, tensor_type: Any, in_bytes: bool = False) -> BlockPanels:
        """Return panels of weights [O, K] without values."""
        block_format = FORMATS[tensor_type]
        count = outputs // COLUMNS
        panels = allocate_lines(count * block_format.panel_bytes(width)).view(count, -1)
        return BlockPanels(panels, width, block_format, in_bytes)

    def store_rows(self, first: int, content: Tensor) -> None:
        """Store rows as they lie in a file, bytes [n, size], from the output `first` on; both are
        multiples of 16.
        """
        panels = self.panels[first // COLUMNS : (first + len(content)) // COLUMNS]
        pack_panels(content, self.block_format, panels)

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input width."""
        return len(self.panels) * COLUMNS, self.width

    @property
    def content(self) -> Tensor:
        """The bytes of the panels."""
        return self.panels

    def first_rows(self, count: int) -> BlockPanels:
        """Return the first outputs, `count` up to a multiple of 16, in the same memory."""
        panels = self.panels[: -(-count // COLUMNS)]
        return BlockPanels(panels, self.width, self.block_format, self.in_bytes)

    @cached_property
    def own_product(self) -> BlockProduct:
        """The product with these weights alone."""
        return BlockProduct([self])

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [.., K] times the weights plus the bias, [.., O]."""
        return self.own_product.product(x, bias)

    def values(self, rows: Tensor) -> Tensor:
        """Return the float32 values of some outputs [n] of the weights, [n, K]."""
        if not len(rows):
            return torch.empty(0, self.width)
        numbers = rows // COLUMNS
        kept, places = numbers.unique(return_inverse=True)
        values = unpack_panels(self.panels[kept], self.width, self.block_format)
        return values[places * COLUMNS + rows % COLUMNS]

    def all_values(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the weights in a type, [O, K]."""
        outputs, width = self.shape
        values = torch.empty(outputs, width, dtype=dtype)
        step = max(1, (1 << 20) // (COLUMNS * width))
        for first in range(0, len(self.panels), step):
            part = self.panels[first : first + step]
            rows = slice(first * COLUMNS, first * COLUMNS + len(part) * COLUMNS)
            values[rows] = unpack_panels(part, width, self.block_format).to(dtype)
        return values


class BlockProduct:
    """The product of rows with quantised weights, or with several below each other, all of
    which round rows to the same number of bits.
    """

    serve_many_rows = True

    @property
    def is_enabled(self) -> bool:
        """Whether kernels are switched on."""
        return has_block_kernels()

    def __init__(self, weights: list[BlockPanels]) -> None:
        self.weights = weights
        self.width = weights[0].width
        in_bytes = weights[0].in_bytes
        self.record_bytes = BYTE_RECORD_BYTES if in_bytes else RECORD_BYTES
        functions = BYTE_PART_FUNCTIONS if in_bytes else PART_FUNCTIONS
        numbers = []
        first = 0
        for weight in weights:
            function = functions[weight.block_format.tensor_type]().address
            panels = weight.panels
            numbers.append([function, panels.data_ptr(), len(panels), panels.stride(0), first])
            first += weight.shape[0]
        self.num_outputs = first
        self.segments = torch.tensor(numbers, dtype=torch.int64)
        # Asking a tensor takes time at every call.
        self.segments_address = self.segments.data_ptr()
        self.num_segments = len(numbers)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [.., K] times the weights plus the bias, [.., O], in the type of x, which is
        bfloat16 or float32.
        """
        x = x if x.is_contiguous() else x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.num_outputs))
        rows = x.numel() // self.width
        if not out.numel():
            return out
        # A call holds Python's lock, so no other one uses the team and this memory at the same
        # time.
        team = current_team()
        records = record_memory(rows * self.width // BLOCK * self.record_bytes)
        multiply_segments(
            self.segments_address,
            self.num_segments,
            x.data_ptr(),
            self.record_bytes,
            records.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.dtype == torch.bfloat16,
            rows,
            self.width,
            self.num_outputs,
            working_sums().data_ptr(),
            team.address,
            team.grow(torch.get_num_threads()),
        )
        return out


_records: list[Tensor] = []


def record_memory(num_bytes: int) -> Tensor:
    """Return memory for the rounded rows of a product, which the next product overwrites."""
    if not _records or _records[0].nbytes < num_bytes:
        _records[:] = [torch.empty(num_bytes, dtype=torch.uint8)]
    return _records[0]


@cache
def working_sums() -> Tensor:
    """Return the working memory of all products, for every thread of a team."""
    return torch.empty(MAX_MEMBERS, MAX_TILE_ROWS, COLUMNS)
