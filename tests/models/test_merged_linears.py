"""Linears of one input as one product: the same logits from the same memory, and apart again
wherever a weight gets its own.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.loop import decode
from spectrain.models.fast.merged_linears import is_merged, merge_linears
from spectrain.models.lora import inject_lora, merge_lora
from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree

SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Any] = {
    "llama": hf.LlamaConfig(**SIZE),
    "qwen2": hf.Qwen2Config(**SIZE),  # biases in queries, keys and values
    "qwen3": hf.Qwen3Config(**SIZE, head_dim=16),  # norms between product and rotation
    "gemma2": hf.Gemma2Config(**SIZE, head_dim=8),
}
NAMES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def make_target(name: str, tokenizer: Any, dtype: torch.dtype = torch.float32) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(CONFIGS[name]), attn_implementation="spectrain", dtype=dtype
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return Target(model, tokenizer, name, "")


@pytest.fixture
def llama(tiny: Target) -> Target:
    return make_target("llama", tiny.tokenizer)


@torch.inference_mode()
def compute_logits(target: Target) -> Tensor:
    """Return the logits after two padded prompts, and at the nodes of a tree after each."""
    torch.manual_seed(1)
    prompts = torch.randint(3, 64, (2, 9))
    lengths = torch.tensor([9, 6])
    cache = target.new_cache(2, 64)
    prefilled = target.prefill(prompts, lengths, cache, ("final",))
    tree = TokenTree.from_parents(
        torch.randint(3, 64, (2, 5)), torch.tensor([[-1, 0, 0, 1, 2]]).expand(2, -1)
    )
    verified = target.verify(tree, cache)
    assert prefilled.logits is not None and verified.logits is not None
    return torch.cat([prefilled.logits, verified.logits], dim=1)


def list_merged(target: Target) -> set[str]:
    """Return the names of the linears that share one product with their neighbours."""
    linears = {name: part for name, part in target.model.named_modules() if is_merged(part)}
    return {
        name.split(".")[-1] for name, part in linears.items() if part.merged_weights.are_adjacent()
    }  # type: ignore[union-attr]


def count_bytes(target: Target) -> int:
    """Count the bytes of the storages of all parameters."""
    storages = [parameter.untyped_storage() for parameter in target.model.parameters()]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.sweep(4, free=("dtype",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_merged_linears_change_neither_logits_nor_memory(
    name: str, dtype: torch.dtype, tiny: Target
) -> None:
    """Logits are the same to a few roundings, every weight is unchanged to the bit, and no byte
    more is held.
    """
    target = make_target(name, tiny.tokenizer, dtype)
    before = compute_logits(target)
    bytes_before = count_bytes(target)
    weights = {key: weight.clone() for key, weight in target.model.state_dict().items()}
    merge_linears(target.model)
    assert list_merged(target) == {*NAMES} and count_bytes(target) == bytes_before
    assert all(
        torch.equal(weight, weights[key]) for key, weight in target.model.state_dict().items()
    )
    assert before.std() > 0.1
    assert (compute_logits(target) - before).abs().max() <= before.abs().max() * {
        torch.float32: 2e-6,
        torch.bfloat16: 2e-2,
    }[dtype]


def test_merged_layers_compile_once_with_four_products(llama: Target) -> None:
    """Where they did seven times; one compilation still serves all layers, and its tokens are
    the loop's.
    """
    products: list[int] = []

    def count_products(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        products.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return graph.forward

    expected = decode(llama, [[5, 6, 7], [9, 10]], Greedy(), 6, ignore_eos=True)
    for num_products in (7, 4):
        torch._dynamo.reset()
        counters.clear()
        engine = CapturedRunner(llama, Greedy(), backend=aot_autograd(fw_compiler=count_products))  # type: ignore[arg-type]
        generations = engine.decode([[5, 6, 7], [9, 10]], 6, ignore_eos=True)
        assert [generation.output for generation in generations] == [
            generation.output for generation in expected
        ]
        assert (
            products == [num_products]
            and counters["stats"]["unique_graphs"] == 1
            and not counters["graph_break"]
        )
        products.clear()
        merge_linears(llama.model)


def move_target(target: Target) -> None:
    target.to("meta").to_empty(device="cpu")


def cast_target(target: Target) -> None:
    target.double()


def replace_weights(target: Target) -> None:
    for layer in target.layers:
        layer.self_attn.k_proj.weight = nn.Parameter(
            layer.self_attn.k_proj.weight + 1, requires_grad=False
        )
        layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight + 1


@pytest.mark.parametrize("change", [move_target, cast_target, replace_weights, copy.deepcopy])
def test_moving_a_weight_undoes_the_merge(
    llama: Target, change: Callable[[Target], Target | None]
) -> None:
    """Then every linear is multiplied by its own weight, and may be merged again."""
    merge_linears(llama.model)
    compute_logits(llama)
    target = change(llama) or llama
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
        for buffer in target.buffers():  # which moving may have left unwritten
            buffer.fill_(0.5)
    assert not list_merged(target)
    separate = compute_logits(target)
    for module in target.modules():
        vars(module).pop("forward", None)
    assert torch.equal(separate, compute_logits(target))
    merge_linears(target.model)
    assert (
        list_merged(target) == {*NAMES} and (compute_logits(target) - separate).abs().max() < 1e-5
    )


def test_writes_to_a_weight_change_the_merged_product(llama: Target) -> None:
    """Writes in place, as by an optimiser or a merged adapter, change the product; what learns has
    gradients of its own, the same ones."""
    twin = copy.deepcopy(llama)
    merge_linears(llama.model)
    for target in (llama, twin):
        target.model.requires_grad_(True)
        optimizer = torch.optim.SGD(target.parameters(), 0.1)
        output = target.model.model.layers[0].mlp(torch.ones(1, 3, 32, requires_grad=True))
        output.square().sum().backward()
        optimizer.step()
        target.requires_grad_(False)
    gradients = [[p.grad for p in target.parameters()] for target in (llama, twin)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients) if a is not None and b is not None)
    assert list_merged(llama) == {*NAMES} and llama.layers[0].mlp.up_proj.weight.grad is not None
    torch.testing.assert_close(compute_logits(llama), compute_logits(twin), rtol=1e-5, atol=1e-5)


def test_adapters_train_and_merge_on_merged_linears(llama: Target) -> None:
    """LoRA adds to the joined product, and is merged into it."""
    twin = copy.deepcopy(llama)
    merge_linears(llama.model)
    for target in (llama, twin):
        inject_lora(target, 2, 4.0)
        torch.manual_seed(2)
        for name, parameter in target.named_parameters():
            if ".lora_" in name:
                parameter.data.normal_(std=0.1)
    torch.testing.assert_close(compute_logits(llama), compute_logits(twin), rtol=1e-5, atol=1e-5)
    for target in (llama, twin):
        merge_lora(target)
    assert list_merged(llama) == {*NAMES}
    torch.testing.assert_close(compute_logits(llama), compute_logits(twin), rtol=1e-5, atol=1e-5)


def test_a_target_with_merged_linears_saves_and_loads(llama: Target, tmp_path: Any) -> None:
    """Saved files hold the same bytes, and a reloaded model the same weights."""
    llama.save(tmp_path / "apart")
    merge_linears(llama.model)
    llama.save(tmp_path / "joined")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("apart", "joined")]
    assert files[0] == files[1]


def make_trainable(target: Target) -> None:
    target.requires_grad_(True)


def tie_weights(target: Target) -> None:
    first, second = target.layers
    second.self_attn.k_proj.weight = first.self_attn.k_proj.weight
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


def flatten_weights(target: Target) -> None:
    """Put all parameters into one tensor, as some optimisers do."""
    parameters = list(target.parameters())
    for parameter, part in zip(
        parameters,
        torch.cat([p.flatten() for p in parameters]).split([p.numel() for p in parameters]),
    ):
        parameter.data = part.view_as(parameter)


def quantize_weights(target: Target) -> None:
    for layer in target.layers:
        for linear in (layer.self_attn.v_proj, layer.mlp.gate_proj):
            linear.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)


@pytest.mark.parametrize("change", [make_trainable, tie_weights, flatten_weights, quantize_weights])
def test_trainable_shared_and_flat_weights_are_not_merged(
    llama: Target, change: Callable[[Target], None]
) -> None:
    """Weights that learn, that several layers share, that lie in another's memory, and that are
    in few bits.
    """
    change(llama)
    addresses = [parameter.data_ptr() for parameter in llama.parameters()]
    merge_linears(llama.model)
    assert not list_merged(llama) and addresses == [
        parameter.data_ptr() for parameter in llama.parameters()
    ]


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()
