"""Attention over a cached tree rotates queries and keys in the launch that appends keys and values,
instead of the module: the same states, keys and values, and nothing of a rotation in the compiled
layer.
"""

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lab.benchmarks.models import random_target
from spectrain.models import attention as attention_module
from spectrain.models.compiled_layers import compile_layers
from spectrain.models.fast import fuse_text_layers, text_kernels
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree
from tests.kernels.test_fused_attention import OperationRecorder
from tests.models.test_training_products import TINY

CPU = torch.device("cpu")
PROMPTS, LENGTHS = torch.tensor([[5, 3, 1, 7, 9], [2, 8, 0, 0, 0]]), torch.tensor([5, 2])
TREE = TokenTree.from_parents(
    torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[-1, 0, 0], [-1, 0, 1]])
)


@pytest.fixture(autouse=True)
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed, so there are no kernels")
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")


def verify(
    target: Target, context: AbstractContextManager[Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Verify a tree behind two texts, in a context; return logits and the whole cache."""
    cache = target.new_cache(2, 24, 12)
    with torch.no_grad():
        target.prefill(PROMPTS, LENGTHS, cache, ())
        with context or nullcontext():
            logits = target.verify(TREE, cache).logits
    assert logits is not None and cache.storage is not None
    return logits, cache.storage


def test_attention_rotates_what_the_module_leaves() -> None:
    torch.manual_seed(2)
    target = random_target(TINY, CPU, torch.float32)
    expected = verify(target)
    fuse_text_layers(target.model)
    recorder = OperationRecorder()
    result = verify(target, recorder)
    assert recorder.count["spectrain::rotate_append"] == TINY.layers
    assert not recorder.count["spectrain::kv_append"]
    torch.testing.assert_close(result, expected)

    graphs = list[list[str]]()

    def keep_graph(graph: GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    compiled = verify(target, compile_layers(target.layers, cast(str, keep_graph)))
    torch.testing.assert_close(compiled, expected)
    # One graph for all layers: products and attention, and nothing of the halves of heads.
    (graph,) = graphs
    assert sum("attend_layer" in name for name in graph) == 1
    assert not [name for name in graph if "neg" in name or "cat" in name]


def test_a_cache_that_changes_keys_gets_rotated_ones() -> None:
    cache = TreeCache(1, 1, 8, "cpu", 4)
    assert text_kernels.can_rotate_late(cache, torch.float32)
    assert not text_kernels.can_rotate_late(cache, torch.float64)
    assert not text_kernels.can_rotate_late(cache, torch.bfloat16)
    cache.kv_transform = lambda layer, keys, values: (keys, values)
    assert not text_kernels.can_rotate_late(cache, torch.float32)


def make_attention(name: str, **changes: Any) -> nn.Module:
    """Make an attention module of transformers with two heads of 8."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kind = next(key for key in vars(module) if key.endswith("Attention"))
    prefix = kind.removesuffix("Attention")
    config = getattr(module, f"{prefix}Config")(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, **changes
    )
    config._attn_implementation = attention_module.ATTENTION_NAME
    attention: nn.Module = getattr(module, kind)(config, 0)
    return attention


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama", 8),
        ("qwen2", 8),
        ("qwen3", 8),
        ("gemma2", 8),
        # norms of heads after the rotation
        ("hunyuan_v1_dense", None),
    ],
)
def test_only_a_rotation_right_before_attention_is_left_to_it(name: str, size: int | None) -> None:
    assert text_kernels._find_late_size(make_attention(name)) == size
