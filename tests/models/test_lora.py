"""LoRA on the target: starts as nothing, switches off bit by bit, merges into an ordinary model."""

from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.lora import disable_adapters, find_lora_layers, inject_lora, merge_lora
from spectrain.models.target import Target
from tests.models.architectures import save_small

LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])


def load_target(packed: bool = False) -> Target:
    """A target of the test's own."""
    loaded = load_tiny()
    if packed:
        loaded.pack_weights()
    return loaded


@torch.no_grad()
def fill_adapters(parameters: list[torch.nn.Parameter]) -> None:
    """Fill adapters so that they change the target's logits."""
    for parameter in parameters:
        parameter.normal_(std=0.05)


@torch.no_grad()
def compute_outputs(target: Target) -> Tensor:
    """Every layer's features and the logits of a fixed text, side by side."""
    tokens = (torch.arange(40).reshape(2, 20) * 13 + 5) % min(target.head.vocab_size, 1000)
    features = target.run(
        tokens, ForwardPlan(layers=(*range(target.num_layers + 1), "final"), logits=True)
    )
    assert features.logits is not None
    return torch.cat([features.hidden.flatten(2), features.logits], dim=-1)


@PACKED
def test_new_adapters_change_nothing(packed: bool) -> None:
    """Right after injection features and logits are those of the target; head, embedding and
    norms have no adapter.
    """
    adapted = load_target(packed)
    before = compute_outputs(adapted)
    added = inject_lora(adapted, rank=4, alpha=8.0)
    assert torch.equal(compute_outputs(adapted), before)
    names = [name for name, module in adapted.named_modules() if isinstance(module, LoraLayer)]
    assert (
        len(names) == len(LINEARS) * adapted.num_layers
        and {name.rsplit(".", 1)[1] for name in names} == LINEARS
    )
    assert len(added) == 2 * len(names) and {id(p) for p in added} == {
        id(p)
        for layer in find_lora_layers(adapted)
        for name, p in layer.named_parameters()
        if "lora_" in name
    }


@PACKED
def test_disabled_adapters_restore_the_original_bits(packed: bool) -> None:
    """With adapters off every feature and logit equals the unadapted target's; afterwards they
    are as before, errors or not.
    """
    adapted = load_target(packed)
    before = compute_outputs(adapted)
    added = inject_lora(adapted, rank=4, alpha=8.0)
    fill_adapters(added)
    on = compute_outputs(adapted)
    assert not torch.allclose(on, before, atol=1e-2)
    with disable_adapters(adapted):
        assert torch.equal(compute_outputs(adapted), before)
    assert torch.equal(compute_outputs(adapted), on)
    with pytest.raises(ZeroDivisionError), disable_adapters(adapted):
        raise ZeroDivisionError
    assert torch.equal(compute_outputs(adapted), on)


@pytest.mark.sweep(1)
@PACKED
@pytest.mark.parametrize("alpha", [2.0, 16.0])
def test_a_merged_target_equals_the_adapted_target(packed: bool, alpha: float) -> None:
    """Merging leaves no adapter and the original's parameters by name, and the logits are those
    with adapters on.
    """
    adapted = load_target(packed)
    names = [name for name, _ in adapted.named_parameters()]
    before = compute_outputs(adapted)
    fill_adapters(inject_lora(adapted, rank=4, alpha=alpha))
    on = compute_outputs(adapted)
    merge_lora(adapted)
    assert not any(isinstance(module, LoraLayer) for module in adapted.modules())
    assert [name for name, _ in adapted.named_parameters()] == names
    torch.testing.assert_close(compute_outputs(adapted), on, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(on, before, atol=1e-2)


def test_merged_target_is_saved_and_loads_as_an_ordinary_model(tmp_path: Path) -> None:
    """A saved merged target that load_hf reads has the same outputs."""
    adapted = load_target()
    fill_adapters(inject_lora(adapted, rank=4, alpha=8.0))
    merge_lora(adapted)
    adapted.save(tmp_path / "target")
    torch.testing.assert_close(
        compute_outputs(load_hf(str(tmp_path / "target"))),
        compute_outputs(adapted),
        rtol=1e-4,
        atol=1e-4,
    )


SHARED = {"shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mixtral", set()),
        ("llama4_text", SHARED),
        ("qwen3_next", SHARED | {"mlp.shared_expert_gate"}),
    ],
)
def test_experts_and_routers_have_no_adapters(
    tmp_path: Path, name: str, expected: set[str]
) -> None:
    """In a mixture of experts attention and shared experts are adapted, and merging gives the
    adapted outputs.
    """
    save_small(name, tmp_path)
    load_tiny().tokenizer.save_pretrained(tmp_path)
    adapted = load_hf(str(tmp_path), device="cpu")
    before = compute_outputs(adapted)
    fill_adapters(inject_lora(adapted, rank=4, alpha=8.0))
    on = compute_outputs(adapted)
    names = {
        ".".join(name.split(".")[-2:])
        for name, module in adapted.named_modules()
        if isinstance(module, LoraLayer)
    }
    merge_lora(adapted)
    of_attention = {
        name for name in names if name.startswith(("self_attn", "linear_attn", "attention"))
    }
    assert of_attention
    assert names - of_attention == expected
    # A recurrent layer carries the rounding of a merged weight on from token to token.
    torch.testing.assert_close(compute_outputs(adapted), on, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(on, before, atol=1e-2)
