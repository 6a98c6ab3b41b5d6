"""Layers in few calls compute what transformers' own do, and step aside where something else is
to run.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import AutoModelForCausalLM

from spectrain.models.accelerator import Accelerator, accelerator
from spectrain.models.attention import layer_attention
from spectrain.models.fast import unpack_linears
from spectrain.models.fast.batch_invariance import packable_dtypes
from spectrain.models.forward_plan import ForwardPlan, LayerSpan, Sublayer
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree
from spectrain_cpu.available import has_cpu_kernels
from spectrain_cpu.forwards import find_compiled, fuse_layers
from spectrain_cpu.packed_product import PackedProduct
from spectrain_cpu.prompts import runs_texts_alone
from spectrain_cpu.rows import norm_lanes

SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCALED = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, Any] = {
    "llama": hf.LlamaConfig(**SIZE),
    "llama with biases": hf.LlamaConfig(
        **SIZE, attention_bias=True, mlp_bias=True, head_dim=16, rope_parameters=SCALED
    ),
    "qwen2": hf.Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": hf.Qwen3Config(**SIZE, head_dim=16),
    "qwen3 in bfloat16": hf.Qwen3Config(
        **{**SIZE, "intermediate_size": 64}, head_dim=16, dtype="bfloat16"
    ),
    "qwen2 in bfloat16": hf.Qwen2Config(
        **{**SIZE, "hidden_size": 64, "intermediate_size": 1056}, dtype="bfloat16"
    ),
}

# whose decoder is compiled on a CPU
COMPILED = ("llama with biases", "qwen3", "qwen3 in bfloat16", "qwen2 in bfloat16")

pytestmark = pytest.mark.skipif(not packable_dtypes(), reason="torch has no oneDNN here")


@pytest.fixture(scope="module", params=CONFIGS)
def target(request: pytest.FixtureRequest, tiny: Target) -> Target:
    """A target with random weights, norms and biases among them, on packed linears."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[request.param])
    if config.dtype == torch.bfloat16 and torch.bfloat16 not in packable_dtypes():
        pytest.skip("oneDNN does not multiply bfloat16 here")
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="spectrain", dtype=config.dtype
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    target = Target(model, tiny.tokenizer, request.param, "")
    target.pack_weights()
    return target


@torch.inference_mode()
def prompt_and_tree(target: Target) -> list[Tensor]:
    """Run two padded prompts and a tree after each; return states of every layer, and logits."""
    prompts = torch.randint(3, 64, (2, 9))
    lengths = torch.tensor([9, 6])
    cache = target.new_cache(2, 64)
    layers = (0, 1, 3, "final")
    prefilled = target.prefill(prompts, lengths, cache, layers)
    tree = TokenTree.from_parents(
        torch.randint(3, 64, (2, 5)), torch.tensor([[-1, 0, 0, 1, 2]]).expand(2, -1)
    )
    verified = target.verify(tree, cache, layers)
    assert prefilled.logits is not None and verified.logits is not None
    return [prefilled.hidden, prefilled.logits, verified.hidden, verified.logits]


@torch.inference_mode()
def single_trees(target: Target) -> list[Tensor]:
    """Run a token and two levels of a tree after one prompt; return states of every layer, and
    logits.
    """
    cache = target.new_cache(1, 64)
    outputs = []
    target.prefill(torch.randint(3, 64, (1, 9)), torch.tensor([9]), cache, ())
    for parents in ([-1], [-1, 0, 0, 1, 2], list(range(-1, 20))):
        tree = TokenTree.from_parents(
            torch.randint(3, 64, (1, len(parents))), torch.tensor([parents])
        )
        outputs.append(target.verify(tree, cache, (0, 1, 3, "final")))
        cache.commit(torch.tensor([[0]]), torch.tensor([1]))
    return [
        part
        for features in outputs
        for part in (features.hidden, features.logits)
        if part is not None
    ]


@torch.inference_mode()
def packed_texts(target: Target) -> list[Tensor]:
    """The features of three texts in one row."""
    return [target.features(torch.randint(3, 64, (1, 20)), (2, "final"), (7, 4, 9)).hidden]


@torch.inference_mode()
def halves_skipped(target: Target) -> list[Tensor]:
    """A layer without its attention, another without its feed-forward, a third that does not
    run.
    """
    skipped = (Sublayer(0, "attention"), Sublayer(1, "mlp"), 2)
    return [
        target.run(
            torch.randint(3, 64, (2, 8)),
            ForwardPlan(layers=("final",), span=LayerSpan(skipped=skipped)),
        ).hidden
    ]


@pytest.mark.parametrize("compute", [prompt_and_tree, single_trees, packed_texts, halves_skipped])
def test_fused_layers_equal_transformers_layers(
    target: Target, compute: Callable[[Target], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers' own forwards give the same to the last bit; in float32 compiled kernels have
    sums of their own.
    """
    torch.manual_seed(1)
    fused = compute(target)
    monkeypatch.setattr(type(accelerator()), "forwards", Accelerator.forwards)
    torch.manual_seed(1)
    tolerance = 1e-5 if target.name in COMPILED and target.dtype == torch.float32 else 0.0
    for actual, expected in zip(fused, compute(target), strict=True):
        assert actual.isfinite().all() and actual.std() > 0.1
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
        )


def test_nodes_have_the_bits_of_single_tokens(target: Target) -> None:
    """Where kernels compute the layers, in either type."""
    if target.name not in COMPILED or not has_cpu_kernels(target.dtype, target.device):
        pytest.skip("nothing is compiled here")
    torch.manual_seed(0)
    prompt = torch.randint(3, 64, (1, 9))
    tokens = torch.randint(3, 64, (1, 17))
    with torch.inference_mode():
        cache = target.new_cache(1, 64)
        target.prefill(prompt, torch.tensor([9]), cache, ())
        logits = target.verify(TokenTree.from_chain(tokens), cache).logits
        cache.roll_back()
        for node in range(tokens.shape[1]):
            alone = target.verify(TokenTree.from_chain(tokens[:, node : node + 1]), cache).logits
            cache.commit(torch.tensor([[0]]), torch.tensor([1]))
            assert (
                logits is not None
                and alone is not None
                and torch.equal(alone[0, 0], logits[0, node])
            )


def test_compiled_decoder_is_made_anew_after_changes(target: Target) -> None:
    """Written weights, hooks, overrides and unpacked linears end a compiled forward; only layers
    that are all compiled have one."""

    def find_forward() -> object:
        return find_compiled(target.decoder, target.layers, layer_attention)

    first = find_forward()
    has_kernels = has_cpu_kernels(target.dtype, target.device) and norm_lanes() is not None
    layer: Any = target.layers[0]
    linears = layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj
    # On some processors a single row of some widths has other bits than several.
    is_paired = any(PackedProduct.is_paired(linear.weight) for linear in linears)
    assert (first is not None) == (target.name in COMPILED and has_kernels and not is_paired)
    if first is None:
        return
    assert find_forward() is first
    linear = target.layers[1].mlp.down_proj
    with torch.no_grad():
        linear.weight.add_(0)
    second = find_forward()
    assert second is not first and find_forward() is second
    hook = linear.register_forward_hook(lambda *_: None)
    assert find_forward() is None
    hook.remove()
    unpack_linears(target.model)
    assert find_forward() is None
    target.pack_weights()
    assert find_forward() is not None


def test_layers_with_hooks_or_overrides_are_not_fused(target: Target) -> None:
    """A layer runs by itself where a hook listens inside, where it or a part of it is
    overridden, and when unpacked.
    """
    every = list(target.layers)
    assert [layer for layer, _ in fuse_layers(every, layer_attention)] == every
    first = every[0]
    hook = first.self_attn.o_proj.register_forward_hook(lambda *_: None)
    assert [layer for layer, _ in fuse_layers(every, layer_attention)] == every[1:]
    hook.remove()
    for module in (first, first.self_attn, first.mlp):
        module.forward = module.forward
        assert [layer for layer, _ in fuse_layers(every, layer_attention)] == every[1:]
        del module.forward
    assert [layer for layer, _ in fuse_layers(every, layer_attention)] == every
    unpack_linears(first.mlp)
    assert [layer for layer, _ in fuse_layers(every, layer_attention)] == every[1:]
    target.pack_weights()
    assert [layer for layer, _ in fuse_layers(every, layer_attention)] == every


def test_layers_of_other_classes_are_not_fused(tiny: Target) -> None:
    """Layers of unlisted classes are not fused, however alike they look."""
    model = AutoModelForCausalLM.from_config(
        hf.GemmaConfig(**SIZE, head_dim=8), attn_implementation="spectrain"
    ).eval()
    target = Target(model, tiny.tokenizer, "gemma", "")
    target.pack_weights()
    assert (
        not list(fuse_layers(target.layers, layer_attention))
        and len(list(fuse_layers(tiny.layers, layer_attention))) == tiny.num_layers
    )


def test_prompts_of_a_batch_have_the_bits_of_each_alone() -> None:
    """Their logits, their features and what the cache holds, so that a later row does not depend
    on its batch.
    """
    target = load_tiny("bfloat16")
    lengths = [20, 57, 3]
    target.pack_weights()
    if not runs_texts_alone(target):
        pytest.skip("no kernels run the layers here")
    prompts = torch.randint(3, 400, (3, 57), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        cache = target.new_cache(3, 70)
        features = target.prefill(prompts, torch.tensor(lengths), cache, (1,))
        for row, length in enumerate(lengths):
            alone = target.new_cache(1, 70)
            expected = target.prefill(
                prompts[row : row + 1, :length], torch.tensor([length]), alone, (1,)
            )
            assert torch.equal(expected.logits[0], features.logits[row])
            assert torch.equal(expected.hidden[0], features.hidden[row, :length])
            assert alone.storage is not None and cache.storage is not None
            assert torch.equal(alone.storage[:, :, 0, :length], cache.storage[:, :, row, :length])
    assert cache.lengths.tolist() == lengths and cache.uncommitted == 0
