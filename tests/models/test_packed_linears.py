"""Packed linears compute what plain ones do, before and after the weights change, and leave
gradients alone.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.decoding.session import prepare_for_decoding
from spectrain.drafters.causal import Causal
from spectrain.models.fast import packed_linears as prepacked
from spectrain.models.fast.batch_invariance import (
    enforce_batch_invariance,
    has_batch_invariance,
    has_bfloat16,
    packable_dtypes,
)
from spectrain.models.fast.packed_linears import (
    FeatureLinear,
    has_int8,
    is_packed,
    pack_int8,
    pack_linears,
    unpack_linears,
)
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.trees import Chain

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN"
)


def pack_linear(linear: nn.Linear) -> nn.Linear:
    """Return the same module, on packed weights."""
    pack_linears(linear)
    return linear


def expected_output(linear: nn.Linear, input: Tensor) -> Tensor:
    """Return the output that the linear must have, computed in float64."""
    bias = None if linear.bias is None else linear.bias.double()
    return F.linear(input.double(), linear.weight.double(), bias).to(input.dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.sweep(8)
@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (7,), (1, 1), (2, 5), (3, 1, 4), (128,)])
@pytest.mark.parametrize(("width_in", "width_out"), [(1, 1), (16, 48), (96, 33), (577, 129)])
def test_packed_equals_plain(
    width_in: int, width_out: int, shape: tuple[int, ...], bias: bool
) -> None:
    """Outputs are equal over one row or many, any number of leading dimensions, even and odd
    widths.
    """
    linear = pack_linear(nn.Linear(width_in, width_out, bias=bias))
    assert is_packed(linear)
    input = torch.randn(*shape, width_in)
    with torch.no_grad():
        for _ in range(2):  # the first call reorders the weight, the second one reuses it
            assert_close(linear(input), expected_output(linear, input))


@needs_onednn
def test_packed_takes_strided_inputs() -> None:
    """A transposed or sliced input gives what its contiguous copy gives."""
    linear = pack_linear(nn.Linear(8, 6))
    input = torch.randn(8, 4, 10)
    with torch.no_grad():
        for view in (input.transpose(0, 2), input[:, :, :8], input[:, 1:3, 1:9]):
            assert_close(linear(view), expected_output(linear, view))


def add_to_weight(linear: nn.Linear) -> None:
    linear.weight.add_(1.0)


def fill_a_row(linear: nn.Linear) -> None:
    linear.weight[3] = 2.0


def load_weight(linear: nn.Linear) -> None:
    linear.load_state_dict({name: tensor + 1 for name, tensor in linear.state_dict().items()})


def replace_weight(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(torch.randn_like(linear.weight))


def merge_adapter(linear: nn.Linear) -> None:
    # PEFT merges an adapter so; autograd's version counter does not see it
    linear.weight.data += 1.0
    pack_linears(linear)


def step_optimizer(linear: nn.Linear) -> None:
    optimiser = torch.optim.AdamW(linear.parameters(), lr=0.5)
    with torch.enable_grad():
        linear(torch.ones(2, 8)).square().sum().backward()
    optimiser.step()


@needs_onednn
@pytest.mark.parametrize(
    "change",
    [add_to_weight, fill_a_row, load_weight, replace_weight, merge_adapter, step_optimizer],
)
def test_packed_follows_a_weight_change(change: Callable[[nn.Linear], None]) -> None:
    """After the weight was written in place, loaded, replaced, merged and packed again, or
    trained, the copy is new.
    """
    linear = pack_linear(nn.Linear(8, 6))
    input = torch.randn(5, 8)
    with torch.no_grad():
        before = linear(input)
        change(linear)
        after = linear(input)
    assert (after - before).abs().max() > 0.1
    assert_close(after, expected_output(linear, input))


@needs_onednn
def test_packed_follows_a_weight_at_the_same_address() -> None:
    """A new weight that lies where the old one lay is a new weight: freed memory is handed out
    again.
    """
    linear = pack_linear(nn.Linear(8, 6))
    input = torch.randn(5, 8)
    memory = torch.randn(6, 8)
    with torch.no_grad():
        linear.weight = nn.Parameter(torch.from_numpy(memory.numpy()))
        linear(input)
        memory.fill_(2.0)
        linear.weight = nn.Parameter(torch.from_numpy(memory.numpy()))
        assert_close(linear(input), expected_output(linear, input))


@pytest.mark.sweep(10)
@needs_onednn
@pytest.mark.parametrize(
    "trained", [{"input"}, {"weight"}, {"bias"}, {"input", "weight"}, {"input", "weight", "bias"}]
)
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_gives_the_gradients_of_a_plain_linear(
    trained: set[str], shape: tuple[int, ...], bias: bool
) -> None:
    """Whichever of input, weight and bias want a gradient get it, also where a packed copy
    exists already.
    """
    linear = pack_linear(nn.Linear(8, 6, bias=bias))
    input = torch.randn(shape)
    with torch.no_grad():
        linear(input)
    input.requires_grad_("input" in trained)
    for name, parameter in linear.named_parameters():
        parameter.requires_grad_(name in trained)
    leaves = [leaf for leaf in (input, *linear.parameters()) if leaf.requires_grad]
    if not leaves:
        assert not linear(input).requires_grad
        return
    actual = torch.autograd.grad(linear(input).square().sum(), leaves)
    expected = torch.autograd.grad(
        F.linear(input, linear.weight, linear.bias).square().sum(), leaves
    )
    for gradient, reference in zip(actual, expected):
        assert_close(gradient, reference)


@needs_onednn
def test_strided_inputs_and_gradients_change_nothing() -> None:
    """A transposed input, and an output that is read transposed, give the gradients of their
    contiguous copies.
    """
    linear = pack_linear(nn.Linear(8, 6))
    input = torch.randn(8, 4, 10, requires_grad=True)
    leaves = [input, *linear.parameters()]
    factor = torch.randn(6, 4, 10)
    actual = torch.autograd.grad(
        (linear(input.transpose(0, 2)).transpose(0, 2) * factor).sum(), leaves
    )
    expected = torch.autograd.grad(
        (torch.einsum("itb,oi->otb", input, linear.weight) * factor).sum(), leaves[:2]
    )
    for gradient, reference in zip(actual, (*expected, factor.sum((1, 2)))):
        assert_close(gradient, reference)


@needs_onednn
def test_packing_leaves_other_dtypes_plain() -> None:
    """A linear that is not float32 computes as before."""
    linear = pack_linear(nn.Linear(8, 6).double())
    input = torch.randn(5, 8, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(linear(input), F.linear(input, linear.weight, linear.bias))


@needs_onednn
def test_unpack_undoes_pack() -> None:
    """Packing twice is packing once, unpacking ends it, and neither touches the state."""
    module = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    pack_linears(module)
    forward = module[0].forward
    pack_linears(module)
    assert module[0].forward is forward and [is_packed(child) for child in module] == [
        True,
        False,
        True,
    ]
    assert module.state_dict().keys() == state.keys()
    unpack_linears(module)
    assert not any(is_packed(child) for child in module)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name])


@needs_onednn
def test_a_packed_target_equals_an_unpacked_target() -> None:
    """The tiny target's logits and features are the same within 1e-4 on packed linears."""
    target = load_tiny(device="cpu")
    tokens = torch.randint(0, target.head.vocab_size, (2, 12))
    layers = (0, 1, target.num_layers)
    before = target.run(tokens, ForwardPlan(layers=layers, logits=True))
    target.pack_weights()
    after = target.run(tokens, ForwardPlan(layers=layers, logits=True))
    assert before.logits is not None and after.logits is not None
    assert is_packed(target.head.output)
    assert_close(after.logits, before.logits)
    assert_close(after.hidden, before.hidden)


class Block(nn.Module):
    """Linears that read the same input, as an attention block has them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(16, out, bias=bias) for out in (24, 8, 8)
        )

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([self.q_proj(input), self.k_proj(input), self.v_proj(input)], dim=-1)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
def test_linears_of_the_same_input_share_a_product(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three linears, one product; after a weight or the input was written to, what plain ones
    give; a copy packs its own.
    """
    monkeypatch.setattr(prepacked, "SMALL_WEIGHTS", 0)
    block = Block(bias)
    input = torch.randn(2, 3, 16)
    expected = []
    with torch.no_grad():

        def plain_outputs():
            return torch.cat(
                [F.linear(input, linear.weight, linear.bias) for linear in block.children()], dim=-1
            )

        expected.append(plain_outputs())
        pack_linears(block)
        calls: list[int] = []
        product = prepacked.onednn_linear
        monkeypatch.setattr(
            prepacked, "onednn_linear", lambda *arguments: (calls.append(1), product(*arguments))[1]
        )
        assert_close(block(input), expected[0])
        assert len(calls) == 1
        input.mul_(2)
        assert_close(block(input), plain_outputs())
        block.k_proj.weight.add_(1)
        assert_close(block(input), plain_outputs())
        twin = copy.deepcopy(block)
        twin.q_proj.weight.zero_()
        assert_close(block(input), plain_outputs())


@needs_onednn
def test_bfloat16_is_packed_where_the_processor_multiplies_it() -> None:
    """The output is float64's within the rounding of bfloat16."""
    linear = pack_linear(nn.Linear(64, 48).to(torch.bfloat16))
    input = torch.randn(5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        output = linear(input)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(
        output.double(), expected_output(linear, input).double(), atol=2e-2, rtol=2e-2
    )


@pytest.mark.skipif(not has_int8(), reason="this processor does not multiply integers of 8 bits")
def test_int8_weights_are_rounded_to_half_a_step() -> None:
    """A product of integers is that of the rounded weights and inputs; what reads features is
    rounded to no integers.
    """
    weight = torch.randn(40, 64)
    input = torch.randn(5, 64)
    steps = weight.abs().amax(1, keepdim=True) / 127
    wide = input.max() - input.min()
    low = input.min()
    inputs = low.div(wide / 255).round().neg().clamp(0, 255)
    rounded = ((input / (wide / 255)).round() + inputs).clamp(0, 255).sub(inputs) * (wide / 255)
    product = torch.ops.quantized.linear_dynamic(input, pack_int8(weight))
    torch.testing.assert_close(
        product, rounded @ ((weight / steps).round() * steps).T, atol=0.05, rtol=1e-3
    )
    for kind, exact in ((nn.Linear, False), (FeatureLinear, True)):
        linear = kind(600, 500)
        pack_linears(linear, low_precision=True)
        input = torch.randn(3, 600)
        with torch.no_grad():
            output = linear(input)
            again = copy.deepcopy(linear)(input)
        assert torch.equal(output, again) and (linear.forward.weights.packed_int8 is None) is exact


@pytest.mark.skipif(not has_bfloat16(), reason="this processor does not multiply bfloat16")
def test_large_weights_of_a_drafter_are_rounded() -> None:
    """They are within bfloat16's rounding, bias included; small ones, gradients and what was
    packed before are exact.
    """
    large = nn.Linear(600, 500)
    small = nn.Linear(20, 30)
    for linear, tolerance in ((large, 2e-2), (small, 1e-6)):
        input = torch.randn(3, linear.in_features)
        expected = F.linear(input, linear.weight, linear.bias).detach()
        pack_linears(linear, low_precision=True)
        with torch.no_grad():
            torch.testing.assert_close(linear(input), expected, rtol=tolerance, atol=tolerance)
            assert torch.equal(linear(input), expected) is (linear is small)
        # learns, in float32
        torch.testing.assert_close(linear(input), expected, rtol=1e-5, atol=1e-5)
    exact = pack_linear(nn.Linear(600, 500))
    pack_linears(exact, low_precision=True)
    with torch.no_grad():
        input = torch.randn(3, 600)
        torch.testing.assert_close(
            exact(input), F.linear(input, exact.weight, exact.bias), rtol=1e-5, atol=1e-5
        )


def test_a_target_is_never_rounded(shallow: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that decodes is, where the processor multiplies bfloat16; the target's answer is
    its own, bit by bit.
    """
    monkeypatch.setattr(prepacked, "SMALL_WEIGHTS", 0)
    prompt = [[5, 6, 7, 8]]
    target = copy.deepcopy(shallow)
    target.pack_weights()
    plain = decode(target, prompt, Greedy(), 24, ignore_eos=True)
    drafter = prepare_for_decoding(Causal(target, num_layers=2), target)
    drafted = decode(target, prompt, Greedy(), 24, drafter, Chain(3), ignore_eos=True)
    assert drafted[0].output == plain[0].output and max(drafted[0].round_lengths) > 1

    def forwards(module):
        return [
            vars(layer)["forward"] for layer in module.modules() if isinstance(layer, nn.Linear)
        ]

    assert not any(forward.weights.low_precision for forward in forwards(target)) and all(
        forward.weights.low_precision for forward in forwards(drafter)
    )


@needs_onednn
def test_autocast_sets_the_type_of_products() -> None:
    """Output and gradients are float32's within bfloat16's rounding, and gradients come in the
    weights' own type.
    """
    if torch.bfloat16 not in packable_dtypes():
        pytest.skip("oneDNN does not multiply bfloat16 here")
    linear = pack_linear(nn.Linear(64, 48))
    input = torch.randn(5, 64, requires_grad=True)
    judge = torch.randn(5, 48)
    operands = (input, linear.weight, linear.bias)
    expected = torch.autograd.grad((F.linear(*operands) * judge).sum(), operands)
    with torch.autocast("cpu", torch.bfloat16):
        output = linear(input)
        actual = torch.autograd.grad((output * judge).sum(), operands)
    assert output.dtype == torch.bfloat16
    for gradient, reference in zip(actual, expected, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, reference, atol=0.1, rtol=2e-2)


@pytest.mark.skipif(not has_batch_invariance(), reason="rows of bfloat16 are not alike here")
def test_bits_of_a_row_do_not_depend_on_other_rows() -> None:
    """One to forty rows have the same bits, with weights as wide as a layer's of a small and of
    a large model.
    """
    for width in (96, 576, 4864):
        linear = pack_linear(nn.Linear(width, 640).to(torch.bfloat16))
        input = torch.randn(2, 20, width).bfloat16()
        with torch.no_grad(), enforce_batch_invariance():
            alone = torch.cat([linear(row[None]) for row in input.flatten(0, 1)])
            assert torch.equal(linear(input).flatten(0, 1), alone)
            assert all(torch.equal(linear(input[0, :rows]), alone[:rows]) for rows in range(1, 21))
