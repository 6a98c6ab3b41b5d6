"""Layers on the blocks of a GGUF file in one call have the bits of layers one by one."""

from typing import Any

import pytest
import torch
import transformers as hf
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree
from spectrain_cpu import available, forwards
from spectrain_cpu.block_weights import BlockWeight

pytestmark = pytest.mark.skipif(
    not available.has_block_kernels(), reason="the kernels need Numba and AVX2"
)
if available.has_block_kernels():
    from spectrain_cpu.block_products import BlockPanels

SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
CONFIGS: dict[str, Any] = {
    "biases": hf.Qwen2Config(**SIZE),
    "norms of heads": hf.Qwen3Config(**SIZE, head_dim=64),
}
TYPES = {
    "v_proj": GGMLQuantizationType.Q6_K,
    "down_proj": GGMLQuantizationType.Q6_K,
    "up_proj": GGMLQuantizationType.Q5_0,
}
LAYERS = (0, 2, 3)
SCALE_BYTES = {
    GGMLQuantizationType.Q4_K: [1, 3],
    GGMLQuantizationType.Q5_0: [1],
    GGMLQuantizationType.Q6_K: [209],
}
"""The upper bytes of the float16 numbers of a block."""


def random_rows(kind: GGMLQuantizationType, outputs: int, width: int) -> Tensor:
    """Return random rows of a file [outputs, bytes] with small scales of both signs."""
    values, size = GGML_QUANT_SIZES[kind]
    content = torch.randint(0, 256, (outputs, width // values * size), dtype=torch.uint8)
    blocks = content.view(-1, size)
    for index in SCALE_BYTES[kind]:
        blocks[:, index] = (blocks[:, index] & 0x83) | 4
    return content


def quantize_linears(model: nn.Module, in_bytes: bool) -> None:
    """Replace the weights of the layers by small random ones in blocks, of several types."""
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear) or name == "lm_head":
            continue
        kind = TYPES.get(name.rsplit(".", 1)[-1], GGMLQuantizationType.Q4_K)
        outputs, width = linear.weight.shape
        panels = BlockPanels.allocate(outputs, width, kind, in_bytes)
        panels.store_rows(0, random_rows(kind, outputs, width))
        linear.weight = nn.Parameter(BlockWeight(panels, torch.bfloat16), requires_grad=False)


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = AutoModelForCausalLM.from_config(
        CONFIGS[request.param], attn_implementation="spectrain", dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return network


@torch.inference_mode()
def decode_trees(target: Target, layers: tuple[int, ...]) -> list[Tensor]:
    """Return logits and states of a token, a tree and a chain of more rows than a tile has."""
    torch.manual_seed(1)
    cache = target.new_cache(1, 64)
    target.prefill(torch.randint(3, 64, (1, 9)), torch.tensor([9]), cache, ())
    outputs = []
    for parents in ([-1], [-1, 0, 0, 1, 2], list(range(-1, 10))):
        tokens = torch.randint(3, 64, (1, len(parents)))
        tree = TokenTree.from_parents(tokens, torch.tensor([parents]))
        features = target.verify(tree, cache, layers)
        assert features.logits is not None
        outputs += [features.logits, *(features.at_layer(layer) for layer in layers)]
        cache.commit(torch.tensor([[0]]), torch.tensor([1]))
    return outputs


@pytest.mark.parametrize("layers", [(), LAYERS], ids=["no states", "states"])
@pytest.mark.parametrize("in_bytes", [False, True], ids=["16 bits", "8 bits"])
def test_layers_in_one_call_have_the_bits_of_single_layers(
    model: nn.Module,
    tiny: Target,
    in_bytes: bool,
    layers: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantize_linears(model, in_bytes)
    target = Target(model, tiny.tokenizer, "small", "")
    target.pack_weights()
    joined = decode_trees(target, layers)
    decoder = forwards._decoders[target.decoder]
    assert decoder.block_layers is not None
    monkeypatch.setattr(decoder, "block_layers", None)
    single = decode_trees(target, layers)
    assert all(torch.isfinite(part).all() for part in joined)
    assert all(map(torch.equal, joined, single))
