"""Compiled kernels for drafting on a CPU compute products of 8 bits as plain operations do."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.models.fast.packed_linears import has_int8, pack_int8
from spectrain_cpu.available import has_drafting_kernels
from spectrain_cpu.eagle import EagleKernels, EagleShape
from spectrain_cpu.int8 import ByteWeights

WIDTH = 64
VOCAB = 96
EPS = 1e-5

pytestmark = pytest.mark.skipif(
    not (has_drafting_kernels() and has_int8()), reason="no products of 8 bits here"
)


def multiply_rounded(x: Tensor, weight: Tensor) -> Tensor:
    """The product of x [N, K] and weights [O, K], both rounded to 8 bits: rows by one scale and
    zero point, outputs by their largest weight."""
    scales = weight.abs().amax(1) / 127
    low = x.min().clamp(max=0)
    high = x.max().clamp(min=0)
    scale = (high - low) / 255
    zero = (-low / scale).round()
    rounded = ((x / scale).round() + zero).clamp(0, 255) - zero
    return (
        rounded.double() @ (weight / scales[:, None]).round().double().t() * scale * scales
    ).float()


def make_kernels(vocab: int) -> tuple[EagleKernels, Tensor, Tensor]:
    """Make kernels with random weights; return them with the weights of the output layer and of
    its norm.
    """
    shapes = {
        "qkv": (128, 128),
        "output": (WIDTH, 64),
        "gate_up": (128, WIDTH),
        "down": (WIDTH, 64),
        "head": (vocab, WIDTH),
    }
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    norms = {name: torch.rand(WIDTH) + 0.5 for name in ("input", "hidden", "later", "final")}
    linears = {name: ByteWeights(pack_int8(weight)) for name, weight in weights.items()}
    kernels = EagleKernels(torch.zeros(4, WIDTH), norms, linears, EagleShape(2, 1, 32, EPS))
    kernels.use_angles(*torch.zeros(2, 1, 1, 32))
    return kernels, weights["head"], norms["final"]


@pytest.mark.parametrize("num_rows", [1, 5, 12, 13, 30])
def test_scores_are_products_of_numbers_of_8_bits(num_rows: int) -> None:
    """Log-probabilities of the normed states of one node or of several, which are multiplied in
    one pass or in more.
    """
    torch.manual_seed(num_rows)
    kernels, head, norm = make_kernels(VOCAB)
    states = torch.randn(1, num_rows, WIDTH)
    logits = multiply_rounded(F.rms_norm(states[0], (WIDTH,), norm, EPS), head)
    assert logits.std() > 1
    torch.testing.assert_close(
        kernels.score_states(states)[0], logits.log_softmax(-1), rtol=1e-5, atol=1e-5
    )


def test_scores_do_not_depend_on_the_number_of_threads() -> None:
    """Threads that share the panels of a product give the bits of one alone, also where their
    parts differ in size.
    """
    torch.manual_seed(0)
    kernels = make_kernels(32 * 51)[0]
    states = torch.randn(1, 5, WIDTH)
    before = torch.get_num_threads()
    try:
        scores = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            scores.append(kernels.score_states(states))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])
