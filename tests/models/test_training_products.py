"""What a training computes by kernels equals what the modules compute: products with merged
weights, a whole EAGLE-3 step, and the features of a target.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.benchmarks.models import ModelGeometry, random_drafter, random_target
from lab.benchmarks.training import random_batch
from spectrain.drafters.base import TrainingState
from spectrain.drafters.layers.llama_layer import Attention, Mlp
from spectrain.kernels import dispatch
from spectrain.models.fast import (
    fuse_text_layers,
    merge_for_training,
    multiply_output,
    multiply_parts,
    text_kernels,
    use_merged,
)
from spectrain.models.fast.training_products import StepWeight
from tests.kernels.test_fused_attention import OperationRecorder

TINY = ModelGeometry(3, 24, 40, 4, 2, 6, 60, 50, 64)
CPU = torch.device("cpu")


def make_blocks() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    target = random_target(TINY, CPU, torch.float32)
    drafter = random_drafter(target, TINY, torch.float32, 2)
    return drafter, drafter.mlp


def test_parts_of_a_product_equal_those_of_separate_ones() -> None:
    """Outputs and gradients, by weights that are used twice; a cast to another type is one too."""
    drafter, mlp = make_blocks()
    merged = merge_for_training(drafter)
    assert {type(module) for module in merged} == {Attention, Mlp, nn.Linear}
    x = torch.randn(2, 3, TINY.width, requires_grad=True)
    results = []
    for weight in (merged[mlp], None):
        total = x.new_zeros(())
        for scale in (1.0, 2.0):
            if weight is None:
                gate, up = (linear(x * scale) for linear in mlp.input_linears)
            else:
                gate, up = multiply_parts(x * scale, weight, mlp.input_linears)
            total = total + (F.silu(gate) * up).pow(2).sum()
        weights = [linear.weight for linear in mlp.input_linears]
        results.append((total, *torch.autograd.grad(total, (x, *weights))))
    torch.testing.assert_close(*results)
    half = merge_for_training(drafter.to(torch.bfloat16))[mlp].weight
    assert half.dtype == torch.bfloat16 and len(half) == 2 * TINY.inner


def test_gradients_side_by_side_are_joined_without_a_copy() -> None:
    _, mlp = make_blocks()
    x = torch.randn(3, TINY.width, requires_grad=True)
    product = torch.randn(3, 2 * TINY.inner)
    weight = torch.randn(2 * TINY.inner, TINY.width)
    names = []
    for grads in (product.chunk(2, dim=1), [part.clone() for part in product.chunk(2, dim=1)]):
        parts = multiply_parts(x, StepWeight(weight, True), mlp.input_linears)
        with OperationRecorder() as recorder:
            (grad,) = torch.autograd.grad(parts, x, grads)
        torch.testing.assert_close(grad, product @ weight)
        names.append("aten::cat" in recorder.names)
    assert names == [False, True]


@pytest.mark.parametrize("is_chained", [True, False])
def test_gradients_of_steps_add_up_in_their_products(is_chained: bool) -> None:
    """Steps whose product nothing reads add nothing, and only the last product makes a gradient of
    its own."""
    drafter, mlp = make_blocks()
    linear = mlp.down_proj
    merged = merge_for_training(drafter, is_chained)
    inputs = [torch.randn(2, 3, TINY.inner, requires_grad=True) for _ in range(4)]
    inputs[1] = inputs[1].detach()
    results = []
    for weights in (merged, {}):
        with use_merged(weights):
            outputs = [multiply_output(x, linear) for x in inputs]
        total = sum(output.pow(2).sum() for output in outputs[:3])
        read = [linear.weight, *(x for x in inputs[:3] if x.requires_grad)]
        with OperationRecorder() as recorder:
            results.append(torch.autograd.grad(total, read))
    torch.testing.assert_close(*results)
    assert recorder.count["aten::addmm_"] == 0
    with use_merged(merge_for_training(drafter, is_chained)):
        outputs = [multiply_output(x, linear) for x in inputs]
    with OperationRecorder() as recorder:
        torch.autograd.grad(sum(output.sum() for output in outputs), linear.weight)
    assert recorder.count["aten::addmm_"] == (3 if is_chained else 0)


def add_hook(linear: nn.Linear) -> None:
    linear.register_forward_hook(lambda *arguments: None)


def replace_forward(linear: nn.Linear) -> None:
    linear.forward = lambda x: x  # type: ignore[method-assign, assignment]


def cut_weight(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.detach()[:1])


def freeze(linear: nn.Linear) -> None:
    linear.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [add_hook, replace_forward, cut_weight, freeze])
def test_other_linears_are_not_merged(change: Callable[[nn.Linear], None]) -> None:
    """Linears with hooks, adapters, sharded or frozen weights multiply for themselves."""
    drafter, mlp = make_blocks()
    change(mlp.gate_proj)
    merged = merge_for_training(drafter)
    assert {type(module) for module in merged} == {Attention, nn.Linear} and mlp not in merged
    with use_merged({}):
        pass


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_layers": 2},
        {"architecture": {"norm_before_residual": True, "norm_output": True}},
        {"architecture": {"qk_norm": True}},
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_by_kernels_equals_that_of_modules(
    settings: dict[str, Any], recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients of EAGLE-3 with unrolled steps, in float32 by the interpreter, with and
    without gradient checkpointing."""
    pytest.importorskip("triton", reason="triton is not installed, so there are no kernels")
    from spectrain.drafters.eagle3 import Eagle3

    torch.manual_seed(1)
    target = random_target(TINY, CPU, torch.float32)
    drafter = Eagle3(target, 2, TINY.draft_vocab, **settings)
    for parameter in drafter.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    batch = random_batch(target, drafter, 1, 5)
    results = []
    for mode in ("reference", "triton"):
        monkeypatch.setenv("SPECTRAIN_KERNELS", mode)
        with OperationRecorder() as recorder:
            loss = drafter.loss(batch, target, TrainingState(recompute=recompute)).total
            trained = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
            grads = torch.autograd.grad(loss, [*trained.values()])
        launched = {name for name in recorder.names if name.startswith("spectrain::")}
        expected = {"norm", "norm_gradient", "gated_unit", "gated_gradient", "later_gradients"}
        assert {f"spectrain::{name}" for name in expected} <= launched or mode != "triton"
        assert not launched or mode == "triton"
        results.append((loss, dict(zip(trained, grads))))
    torch.testing.assert_close(*results, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_features_by_kernels_equal_those_of_modules(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused norms, gated blocks and rotations of a target run for features alone."""
    pytest.importorskip("triton", reason="triton is not installed, so there are no kernels")
    torch.manual_seed(2)
    target = random_target(TINY, CPU, dtype)
    tokens = torch.randint(0, TINY.vocab, (1, 5))
    expected = target.features(tokens, (1, "final")).hidden
    fuse_text_layers(target.model)
    fused = [module for module in target.model.modules() if "forward" in vars(module)]
    assert len(fused) == 4 * TINY.layers + 1
    assert torch.equal(target.features(tokens, (1, "final")).hidden, expected)
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    with OperationRecorder() as recorder:
        result = target.features(tokens, (1, "final")).hidden
    assert recorder.count["spectrain::gated_unit"] == TINY.layers
    assert recorder.count["spectrain::norm"] == 2 * TINY.layers + 1
    assert recorder.count["spectrain::rotate_heads"] == TINY.layers
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    with OperationRecorder() as recorder, torch.no_grad():
        target.model(tokens)
    assert not [name for name in recorder.names if name.startswith("spectrain::")]


class ShiftedRMSNorm(nn.Module):
    """A norm whose weight is added to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


class GatedRMSNorm(ShiftedRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return x if gate is None else x * gate


class GeluBlock(nn.Module):
    """A gated block with another activation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("kind", [ShiftedRMSNorm, GatedRMSNorm, GeluBlock])
def test_modules_that_compute_something_else_stay(kind: Callable[[], nn.Module]) -> None:
    module = kind()
    fuse_text_layers(module)
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("name", "is_fused"),
    [
        ("llama.modeling_llama.LlamaAttention", True),
        ("qwen3.modeling_qwen3.Qwen3Attention", True),
        ("gemma2.modeling_gemma2.Gemma2Attention", True),
        # neighbouring dimensions, halves of angles, no such function
        ("glm4.modeling_glm4.Glm4Attention", False),
        ("gpt_oss.modeling_gpt_oss.GptOssAttention", False),
        ("gpt2.modeling_gpt2.GPT2Attention", False),
    ],
)
def test_rotations_of_halves_are_fused(name: str, is_fused: bool) -> None:
    """An attention that rotates in another way keeps its own forward."""
    module, _, kind = name.rpartition(".")
    attention = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    forward = text_kernels._fuse_rotation(attention.forward, None)
    assert (forward is not None) == is_fused
    if forward is not None:
        assert inspect.signature(forward) == inspect.signature(attention.forward)


def test_compiled_code_and_float64_take_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed, so there are no kernels")
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    x = torch.zeros(1)
    assert dispatch.takes_gradients(x)
    assert not dispatch.takes_gradients(x.double())
    # The interpreter computes bfloat16 wrongly.
    assert not dispatch.takes_gradients(x.bfloat16())
    assert dispatch.takes_gradients(x.bfloat16().to("meta"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not dispatch.takes_gradients(x)
