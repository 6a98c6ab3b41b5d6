"""Mask tokens: a packed forward gives every mask the state that a forward of its prefix and its
masks alone gives.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spectrain.drafters.layers import mask_blocks
from spectrain.drafters.layers.mask_blocks import (
    MaskBlocks,
    add_blocks,
    init_mask_vectors,
    replace_embeddings,
)
from spectrain.features.batch import Batch
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.reference_model import reference_model
from spectrain.models.target import Target

LENGTHS = (17, 11, 14)
MASKS = 4
Prefixes = list[list[tuple[int, int]]]


def make_ragged_batch(lengths: tuple[int, ...] = LENGTHS) -> Batch:
    """Rows of random tokens, padded on the right with 0; a random subset of the positions is the
    assistant's.
    """
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(3, 2000, (length,))
        mask[row, :length] = torch.rand(length) < 0.6
    return Batch(tokens, mask)


def random_prefixes(lengths: tuple[int, ...], seed: int, most: int = 5) -> Prefixes:
    """In every row up to `most` prefixes in random order, each with up to MASKS masks; some rows
    may have none.
    """
    source = random.Random(seed)
    return [
        [
            (source.randrange(length), source.randint(0, MASKS))
            for _ in range(source.randint(0, most))
        ]
        for length in lengths
    ]


def list_mask_columns(batch: Batch, row: list[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """(column, block, end of the prefix, number) of every mask of a row, in the order in which
    blocks were given.
    """
    row_masks = [
        (block, end, number) for block, (end, size) in enumerate(row) for number in range(size)
    ]
    return [(batch.tokens.shape[1] + n, *mask) for n, mask in enumerate(row_masks)]


CASES: dict[str, tuple[tuple[int, ...], Prefixes]] = {
    **{f"random {seed}": (LENGTHS, random_prefixes(LENGTHS, seed)) for seed in range(6)},
    "one row": ((9,), [[(0, 2), (8, 3), (4, 1)]]),
    "one block": ((9, 4), [[(5, 3)], []]),
    "the same prefix twice": ((8, 8), [[(3, 2), (3, 4)], [(7, 1)]]),
    "no blocks": ((6, 3), [[], []]),
}
CASE = pytest.mark.parametrize("case", list(CASES))


@CASE
def test_positions_numbers_and_labels_are_those_of_a_slow_construction(case: str) -> None:
    """Mask j behind the prefix that ends at i stands at position i + 1 + j, and its label is token
    i + 2 + j if that is supervised."""
    lengths, prefixes = CASES[case]
    batch = make_ragged_batch(lengths)
    count, width = batch.tokens.shape
    blocks = add_blocks(batch, prefixes)
    total = width + max(sum(size for _, size in row) for row in prefixes)
    for tensor in (
        blocks.tokens,
        blocks.positions,
        blocks.mask_index,
        blocks.supervised,
        blocks.labels,
    ):
        assert tensor.shape == (count, total)
    assert torch.equal(blocks.tokens[:, :width], batch.tokens)
    for row, row_prefixes in enumerate(prefixes):
        numbers = [-1] * total
        supervised = [False] * total
        for t in range(width):
            assert blocks.positions[row, t] == t
            assert t + 1 == width or blocks.labels[row, t] == batch.tokens[row, t + 1]
        for column, _, end, number in list_mask_columns(batch, row_prefixes):
            numbers[column] = number
            if end + 1 + number < width:
                assert blocks.positions[row, column] == end + 1 + number
            if end + 2 + number < width:
                supervised[column] = bool(batch.loss_mask[row, end + 2 + number])
                assert blocks.labels[row, column] == batch.tokens[row, end + 2 + number]
        assert blocks.mask_index[row].tolist() == numbers
        assert blocks.supervised[row].tolist() == supervised


@CASE
def test_visibility_is_that_of_a_slow_construction(case: str) -> None:
    """A token sees tokens up to itself; a mask sees its prefix and its block's masks up to
    itself; padding is never seen.
    """
    lengths, prefixes = CASES[case]
    batch = make_ragged_batch(lengths)
    width = batch.tokens.shape[1]
    visible = add_blocks(batch, prefixes).visible
    assert visible.any(-1).all(), "a place that sees nothing has no softmax"
    for row, row_prefixes in enumerate(prefixes):
        masks = list_mask_columns(batch, row_prefixes)
        real = [*range(width), *(column for column, *_ in masks)]
        expected = {(t, s) for t in range(width) for s in range(t + 1)}
        for column, block, end, number in masks:
            expected |= {(column, t) for t in range(end + 1)}
            expected |= {
                (column, other)
                for other, same, _, earlier in masks
                if same == block and earlier <= number
            }
        assert {(t, s) for t, s in visible[row].nonzero().tolist() if t in real} == expected
        for padding in set(range(visible.shape[1])) - set(real):
            assert visible[row, :, padding].nonzero()[:, 0].tolist() == [padding]


def packed_states(tiny: Target, blocks: MaskBlocks, vectors: Tensor) -> Tensor:
    """Final states [B, N, D] of the packed batch."""
    with replace_embeddings(tiny.head.embedding, vectors, blocks.mask_index):
        return tiny.run(
            blocks.tokens,
            ForwardPlan(layers=("final",), positions=blocks.positions, mask=blocks.visible),
        ).at_layer("final")


@torch.no_grad()
def reference_states(tiny: Target, prefix: list[int], vectors: Tensor) -> Tensor:
    """Return the final states [T + M, D] of transformers' model over a prefix and mask vectors
    [M, D] behind it.
    """
    with reference_model(tiny) as model:
        embedded = model.get_input_embeddings()(torch.tensor(prefix))
        states: Tensor = model.get_decoder()(
            inputs_embeds=torch.cat([embedded, vectors])[None]
        ).last_hidden_state
    return states[0]


@pytest.mark.parametrize("shared", [False, True])
@CASE
def test_a_packed_forward_is_all_forwards_alone(tiny: Target, case: str, shared: bool) -> None:
    """Every mask inside the sequence has the state that it has behind its prefix alone, and
    every token keeps its own state.
    """
    lengths, prefixes = CASES[case]
    batch = make_ragged_batch(lengths)
    vectors = torch.randn(1 if shared else MASKS, tiny.width)
    states = packed_states(tiny, add_blocks(batch, prefixes), vectors)
    width = batch.tokens.shape[1]
    each = vectors.expand(MASKS, -1)
    for row, (length, row_prefixes) in enumerate(zip(lengths, prefixes)):
        tokens = batch.tokens[row].tolist()
        torch.testing.assert_close(
            states[row, :length],
            reference_states(tiny, tokens[:length], each[:0]),
            atol=1e-4,
            rtol=1e-4,
        )
        expected = {}
        for block, (end, size) in enumerate(row_prefixes):
            expected[block] = reference_states(tiny, tokens[: end + 1], each[:size])
        for column, block, end, number in list_mask_columns(batch, row_prefixes):
            if end + 1 + number < width:
                torch.testing.assert_close(
                    states[row, column], expected[block][end + 1 + number], atol=1e-4, rtol=1e-4
                )


def test_a_mask_sees_what_is_before_it(tiny: Target) -> None:
    """Other tokens of the prefix and other masks before it change a mask's state; anything else
    leaves it bit by bit.
    """
    batch = make_ragged_batch((12, 12))
    prefixes = [[(4, 3), (6, 2)], [(2, 1)]]
    blocks = add_blocks(batch, prefixes)
    vectors = torch.randn(3, tiny.width)
    before = packed_states(tiny, blocks, vectors)[0]
    for position, changed in ((4, {12, 13, 14, 15, 16}), (6, {15, 16}), (7, set())):
        tokens = blocks.tokens.clone()
        tokens[0, position] = 777
        after = packed_states(tiny, replace(blocks, tokens=tokens), vectors)[0]
        assert {n for n in range(12, 17) if not torch.equal(before[n], after[n])} == changed
    other = vectors.clone()
    other[1] += 1
    after = packed_states(tiny, blocks, other)[0]
    assert {n for n in range(17) if not torch.equal(before[n], after[n])} == {13, 14, 16}


def test_padding_blocks_influence_nothing(tiny: Target) -> None:
    """Other tokens in a row's padding change no other position by a bit, and a row without
    padding has the same states.
    """
    batch = make_ragged_batch()
    prefixes = [[(3, 2)], [(1, 4), (6, 4)], []]
    blocks = add_blocks(batch, prefixes)
    vectors = torch.randn(MASKS, tiny.width)
    states = packed_states(tiny, blocks, vectors)
    width = batch.tokens.shape[1]
    real = [width + sum(size for _, size in row) for row in prefixes]
    tokens = blocks.tokens.clone()
    for row, end in enumerate(real):
        tokens[row, end:] = torch.randint(3, 2000, (tokens.shape[1] - end,))
    other = replace(blocks, tokens=tokens)
    changed = packed_states(tiny, other, vectors)
    for row, end in enumerate(real):
        assert torch.equal(states[row, :end], changed[row, :end])
        assert end == states.shape[1] or not torch.equal(states[row, end:], changed[row, end:])
        single = add_blocks(
            Batch(batch.tokens[row : row + 1], batch.loss_mask[row : row + 1]),
            prefixes[row : row + 1],
        )
        torch.testing.assert_close(
            packed_states(tiny, single, vectors)[0], states[row, :end], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("count", [1, 3])
def test_mask_embeddings_are_put_where_numbers_name_them(tiny: Target, count: int) -> None:
    """Within the context, mask j is embedded as vector j, or as the only one, and tokens as before;
    outside, nothing changes."""
    tokens = torch.randint(3, 2000, (2, 6))
    vectors = torch.randn(count, tiny.width, requires_grad=True)
    numbers = torch.tensor([[-1, 0, 2, -1, 1, -1], [2, -1, -1, -1, 0, 1]])
    plain = tiny.head.embed(tokens)
    with replace_embeddings(tiny.head.embedding, vectors, numbers):
        embedded = tiny.head.embed(tokens)
    for row, column in torch.cartesian_prod(torch.arange(2), torch.arange(6)).tolist():
        number = int(numbers[row, column])
        expected = plain[row, column] if number < 0 else vectors[min(number, count - 1)]
        assert torch.equal(embedded[row, column], expected)
    with (
        pytest.raises(ZeroDivisionError),
        replace_embeddings(tiny.head.embedding, vectors, numbers),
    ):
        raise ZeroDivisionError
    assert torch.equal(tiny.head.embed(tokens), plain)
    embedded.sum().backward()
    times = [
        sum(min(n, count - 1) == k for n in numbers.flatten().tolist() if n >= 0)
        for k in range(count)
    ]
    assert vectors.grad is not None and vectors.grad.tolist() == [
        [float(n)] * tiny.width for n in times
    ]


def test_masks_start_around_the_mean_embedding(tiny: Target) -> None:
    """The mean of the masks is the embeddings' mean, their deviation a tenth of the embeddings',
    and no two are alike.
    """
    weight = tiny.head.embedding.weight.detach()
    vectors = init_mask_vectors(tiny.head.embedding, 500)
    deviations = vectors - weight.mean(0)
    assert deviations.mean(0).abs().max() < 6 * 0.1 * weight.std() / 500**0.5
    assert deviations.std().item() == pytest.approx(0.1 * weight.std().item(), rel=0.02)
    assert len(vectors.unique(dim=0)) == 500


def test_starting_masks_looks_at_some_embeddings_at_a_time(
    tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embeddings are read in chunks, so that no tensor is as large as all of them, and the
    masks are the same.
    """
    rows = mask_blocks.EMBEDDING_CHUNK
    chunk_sizes = []
    torch.manual_seed(0)
    expected = init_mask_vectors(tiny.head.embedding, 3)
    monkeypatch.setattr(mask_blocks, "EMBEDDING_CHUNK", 300)
    handle = tiny.head.embedding.register_forward_hook(
        lambda module, args, output: chunk_sizes.append(len(output))
    )
    torch.manual_seed(0)
    in_chunks = init_mask_vectors(tiny.head.embedding, 3)
    handle.remove()
    torch.testing.assert_close(in_chunks, expected, rtol=1e-5, atol=1e-6)
    assert max(chunk_sizes) == 300 and sum(chunk_sizes) == len(tiny.head.embedding.weight) <= rows
