"""Linears of a few rows on a CPU with AVX-512, compiled by Numba: of bfloat16 where the processor
multiplies that, or float32.

oneDNN reads the weights and then multiplies; here the next weights are fetched while a row after
the other is multiplied, so up to 14 rows cost little more than one. More rows are multiplied in
passes over a panel, each of which fetches its part of the next panel: fetching all of it in the
first pass leaves memory idle in the others (16 rows of SmolLM2 in bfloat16: 12.2 ms instead of
10.0). Shapes: N rows, K input width, O output width, W words of 32 bits, each a float32 or a pair
of bfloat16.

Weights are stored in panels [O / 32, W, 2, 16] words: for a word of the inputs, the weights of 32
outputs. Products are added in float32 in the order of the inputs, and the sums of chunks of inputs
afterwards. With the chunks of oneDNN a result in bfloat16 has its bits, which the caller checks
(`find_chunk`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numba import carray, types
from torch import Tensor

from spectrain.kernels.onednn import onednn_linear

from .available import has_panel_kernels
from .huge_pages import LINE
from .team import MAX_MEMBERS, current_team, job_numbers, run_job
from .vectors import (
    WIDE,
    WORD,
    WORDS,
    VectorBuilder,
    advance,
    compile_cached,
    compile_inline,
    compile_part,
    emit_cases,
    emit_fetch,
    intrinsic,
    narrow,
    to_floats,
    to_halves,
    widen,
)

COLUMNS = 32  # outputs of a panel
MAX_TILE_ROWS = 14  # whose sums fit in the registers, two vectors each
# bytes that a single pass fetches ahead: 6 KB is too late for 12 rows, 36 KB too early for 8
FETCH_AHEAD = 12 * 1024
SUMS_BYTES = 4 * MAX_TILE_ROWS * COLUMNS  # of one thread
# of a thread: it takes a microsecond to multiply one, and some tenths of it to give it away
LEAST_PANELS = 4
PARTS_PER_MEMBER = 12
MAX_PANEL_BYTES = 1 << 31
"""Bytes that panels of a process may take beside reordered weights: they are copies, and larger
models have little memory to spare.
"""
CHUNKS = (512, 1024)
"""Inputs whose products oneDNN may add before it adds the sums."""
PROBED_OUTPUTS = 256
PROBED_COUNTS = (2, 3, 5, 8, 13, 17, 32)
"""Numbers of rows for which panels must have the bits of oneDNN."""


@intrinsic
def multiply_rows(
    context: Any,
    like: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    panel: Any,
    words: Any,
    sums: Any,
    adds: Any,
    fetched: Any,
    fetch_step: Any,
) -> Any:
    """Multiply 1 to 14 rows with a chunk of a panel, by code of their own for each number of rows.

    Arguments: a pointer to numbers of the model's type, the number of rows, their address and the
    bytes between them, the address of the panel's chunk, its number of words, the address of
    float32 sums [rows, 32], whether the products are added to these sums or replace them, the
    address from which two lines are fetched with the first word, and the bytes by which it grows
    with every word.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, num_rows, *operands = args
        is_half = like.dtype == types.uint16
        emit_cases(
            builder,
            num_rows,
            MAX_TILE_ROWS,
            lambda number: _emit_tile(builder, number, is_half, *operands),
        )
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 6, types.boolean, types.int64, types.int64), generate


def add_products(
    vectors: VectorBuilder,
    multiply_add: Callable[[Any, Any, Any], Any],
    operands: tuple[Any, Any, Any],
    index: Any,
    totals: list[Any],
) -> list[Any]:
    """Add the products of word number `index` of every row with two vectors of weights to two
    totals per row.

    Operands: the address of the rows and the bytes between them, and the address of the panel. The
    word stands in all lanes.
    """
    x, x_stride, panel = operands
    start = vectors.offset(panel, index, 2 * LINE)
    first = vectors.offset(x, index, 4)
    after = []
    weights = [vectors.load(vectors.offset(start, WIDE(half), LINE), WORDS) for half in range(2)]
    for row in range(len(totals) // 2):
        word = vectors.load_repeated(vectors.offset(first, x_stride, row), WORD)
        after += [multiply_add(word, weights[half], totals[2 * row + half]) for half in range(2)]
    return after


def _emit_tile(
    builder: Any,
    num_rows: int,
    is_half: bool,
    x: Any,
    x_stride: Any,
    panel: Any,
    words: Any,
    sums: Any,
    adds: Any,
    fetched: Any,
    fetch_step: Any,
) -> None:
    vectors = VectorBuilder(builder)
    multiply_add = vectors.multiply_pairs if is_half else vectors.multiply_words

    def add_word(index: Any, totals: list[Any]) -> list[Any]:
        lines = builder.add(fetched, builder.mul(index, fetch_step))
        for half in range(2):
            emit_fetch(builder, builder.add(lines, WIDE(LINE * half)), 3)
        return add_products(vectors, multiply_add, (x, x_stride, panel), index, totals)

    # The sums of this chunk, after those of the chunks before it.
    for number, total in enumerate(
        vectors.loop(words, [vectors.constant(0.0)] * (2 * num_rows), add_word)
    ):
        address = builder.add(sums, WIDE(LINE * number))
        vectors.store(
            builder.select(adds, builder.fadd(vectors.load(address), total), total), address
        )


@compile_inline
def _store_rows(
    sums: Any, biases: Any, has_biases: bool, out: Any, out_stride: int, rows: int
) -> None:
    """Store sums [rows, 32], with the biases [32] where there are any."""
    for r in range(rows):
        values = carray(advance(sums, r * COLUMNS), (COLUMNS,))
        result = carray(advance(out, r * out_stride), (COLUMNS,))
        if has_biases:
            added = carray(biases, (COLUMNS,))
            for i in range(COLUMNS):
                result[i] = narrow(values[i] + widen(added[i]), result[i])
        else:
            for i in range(COLUMNS):
                result[i] = narrow(values[i], result[i])


@compile_inline
def _multiply_panels(
    x: int,
    panels: int,
    biases: Any,
    has_biases: bool,
    out: Any,
    rows: int,
    words: int,
    num_outputs: int,
    chunk: int,
    scratch: int,
    first_panel: int,
    end_panel: int,
) -> None:
    passes = (rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    most = (rows + passes - 1) // passes
    # Of two passes or more, each of the first two fetches one half of the next panel.
    fetch_step = 2 * LINE if passes == 1 else LINE
    ahead = FETCH_AHEAD if passes == 1 else 4 * COLUMNS * words
    for first in range(first_panel * COLUMNS, end_panel * COLUMNS, COLUMNS):
        fetched = panels + 4 * first * words + ahead
        for row in range(0, rows, most):
            count = min(most, rows - row)
            for begin in range(0, words, chunk):
                length = min(chunk, words - begin)
                panel = panels + 4 * (first * words + COLUMNS * begin)
                start = x + 4 * (row * words + begin)
                multiply_rows(
                    out,
                    count,
                    start,
                    4 * words,
                    panel,
                    length,
                    scratch,
                    begin > 0,
                    fetched,
                    fetch_step,
                )
                fetched += fetch_step * length
            result = advance(out, row * num_outputs + first)
            _store_rows(
                to_floats(scratch), advance(biases, first), has_biases, result, num_outputs, count
            )


@compile_inline
def _multiply_part(job: Any, biases: Any, out: Any, part: int, member: int) -> None:
    x = job[1]
    panels = job[2]
    has_biases = job[3] != 0
    rows = job[5]
    words = job[6]
    num_outputs = job[7]
    chunk = job[8]
    scratch = job[9] + member * SUMS_BYTES
    end = min((part + 1) * job[10], num_outputs // COLUMNS)
    _multiply_panels(
        x,
        panels,
        biases,
        has_biases,
        out,
        rows,
        words,
        num_outputs,
        chunk,
        scratch,
        part * job[10],
        end,
    )


@compile_part
def multiply_part_half(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of the job in bfloat16, as so many-th thread of the team."""
    job = job_numbers(team)
    _multiply_part(job, to_halves(job[3]), to_halves(job[4]), part, member)


@compile_part
def multiply_part_float(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of the job in float32."""
    job = job_numbers(team)
    _multiply_part(job, to_floats(job[3]), to_floats(job[4]), part, member)


@compile_inline
def divide_panels(count: int, members: int) -> Any:
    """Return how many of the threads multiply, and the panels of a part of the job."""
    members = max(1, min(members, count // LEAST_PANELS))
    return members, max(1, count // (members * PARTS_PER_MEMBER)) if members > 1 else count


@compile_cached
def multiply_panels(
    function: int,
    x: int,
    panels: int,
    biases: int,
    out: int,
    rows: int,
    words: int,
    num_outputs: int,
    chunk: int,
    scratch: int,
    team: int,
    members: int,
) -> None:
    """Store x [N, W] times the weights in `panels`, [N, O], plus the biases [O], whose address may
    be 0, by the function of a part.

    `chunk` counts words; `scratch` holds [members, 14, 32] float32. So many threads of the team
    share the panels, in parts of some that follow each other.
    """
    count = num_outputs // COLUMNS
    members, step = divide_panels(count, members)
    job = job_numbers(team)
    job[0], job[1], job[2], job[3], job[4], job[5] = function, x, panels, biases, out, rows
    job[6], job[7], job[8], job[9], job[10] = words, num_outputs, chunk, scratch, step
    run_job(team, members, (count + step - 1) // step)


class WeightPanels:
    """The weights [O, K] of a linear in panels, for products whose rows depend neither on each
    other nor on the number of threads. Those in bfloat16 are added in chunks of the inputs."""

    stored_bytes = 0  # of all panels that are kept beside reordered weights

    def __init__(self, weight: Tensor, chunk: int | None = None) -> None:
        is_half, (outputs, width) = weight.dtype == torch.bfloat16, weight.shape
        self.function = (multiply_part_half if is_half else multiply_part_float)().address
        per_word = 2 if is_half else 1
        self.shape = weight.shape
        self.dtype = weight.dtype
        self.words = width // per_word
        self.chunk = (chunk or width) // per_word
        blocks = weight.view(outputs // COLUMNS, 2, COLUMNS // 2, self.words, per_word)
        self.panels = blocks.permute(0, 3, 1, 2, 4).contiguous()
        self.sums = working_sums()
        if not self.serve_many_rows:
            WeightPanels.stored_bytes += self.panels.nbytes
            weakref.finalize(self, _release_panels, self.panels.nbytes)

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Return whether weights can be stored in panels, and there is still room for them."""
        has_room = (
            serve_many_rows(weight.dtype)
            or WeightPanels.stored_bytes + weight.nbytes <= MAX_PANEL_BYTES
        )
        step = 2 if weight.dtype == torch.bfloat16 else 1
        return has_room and weight.shape[0] % COLUMNS == weight.shape[1] % step == 0

    @property
    def is_enabled(self) -> bool:
        """Whether kernels are switched on."""
        return has_panel_kernels(self.dtype)

    @property
    def serve_many_rows(self) -> bool:
        """Whether no reordered weights are kept beside them."""
        return serve_many_rows(self.dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [.., N, K] times the weights plus the bias, [.., N, O]."""
        x = x if x.is_contiguous() else x.contiguous()
        outputs, width = self.shape
        out = x.new_empty((*x.shape[:-1], outputs))
        offset = 0 if bias is None else bias.data_ptr()
        # A call holds Python's lock, so no other one uses the team and this memory at the same
        # time.
        team = current_team()
        multiply_panels(
            self.function,
            x.data_ptr(),
            self.panels.data_ptr(),
            offset,
            out.data_ptr(),
            x.numel() // width,
            self.words,
            outputs,
            self.chunk,
            self.sums.data_ptr(),
            team.address,
            team.grow(torch.get_num_threads()),
        )
        return out


@cache
def working_sums() -> Tensor:
    """Return the working memory of all products, for every thread of a team."""
    return torch.empty(MAX_MEMBERS, MAX_TILE_ROWS, COLUMNS)


def _release_panels(num_bytes: int) -> None:
    WeightPanels.stored_bytes -= num_bytes


def serve_many_rows(dtype: torch.dtype) -> bool:
    """Return whether panels of a type multiply many rows as fast as oneDNN, which in bfloat16 is so
    where the processor has no tiles (EPYC, one thread, 512 rows of 1536 by 17,920: 428 ms and 442).
    """
    return dtype == torch.bfloat16 and not torch.cpu._is_amx_tile_supported()


@cache
def find_chunk(outputs: int, width: int) -> int | None:
    """Return the chunk of inputs by which panels of a weight [O, K] have the bits of oneDNN for
    several rows, or None; tried on sums that cancel, so that only rounding errors remain."""
    source = torch.Generator().manual_seed(0)
    order = torch.randperm(width, generator=source)
    signs = torch.ones(2, width // 2)
    signs[1] = -1
    weight, rows = (
        torch.randn(count, width // 2, generator=source).repeat(1, 2)
        for count in (PROBED_OUTPUTS, max(PROBED_COUNTS))
    )
    weight = weight[:, order].bfloat16().repeat(-(-outputs // len(weight)), 1)[:outputs]
    rows = (rows * signs.flatten())[:, order].bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    # The outputs repeat, and each is computed alone.
    weight = weight[: min(outputs, PROBED_OUTPUTS)]
    for chunk in CHUNKS:
        panels = WeightPanels(weight, chunk)
        if all(
            torch.equal(
                panels.product(rows[:count]), onednn_linear(rows[:count], packed)[:, : len(weight)]
            )
            for count in PROBED_COUNTS
        ):
            return chunk
    return None


def prepare_panels() -> None:
    """Load the kernel of bfloat16, or compile it where this machine has not."""
    if has_panel_kernels(torch.bfloat16):
        find_chunk(COLUMNS, 2)
