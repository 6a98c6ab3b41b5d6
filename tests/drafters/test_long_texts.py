"""Drafters on long texts: positions up to the target's limit, and attention with a mask for some
positions at a time.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.drafters.layers.llama_layer import Rotary, llama_config
from spectrain.drafters.layers.unrolled_attention import unrolled_attention
from spectrain.models import attention
from spectrain.models.attention import attend_rows, causal_attention
from spectrain.models.cache_types import AttentionOptions

LIMIT = 4096
SCHEMES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0},
    "linear": {"rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024},
    "llama3": {
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_positions_are_those_of_the_target_up_to_its_limit(scheme: str) -> None:
    """Cosines and sines are the target's own, bit for bit, at the first positions and at the
    last one that it takes.
    """
    rope = {"rope_type": scheme, **SCHEMES[scheme]}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=50,
        max_position_embeddings=LIMIT,
        rope_parameters=rope,
    )
    target: Any = SimpleNamespace(config=config, head=SimpleNamespace(vocab_size=50))
    drafter_config = llama_config(target)
    limit = 1024 if scheme == "longrope" else LIMIT
    assert drafter_config.max_position_embeddings == limit
    positions = torch.cat([torch.arange(4), torch.arange(limit - 4, limit)])[None]
    for left, right in zip(
        Rotary(drafter_config)(torch.zeros(1), positions),
        LlamaRotaryEmbedding(config)(torch.zeros(1), positions),
    ):
        assert torch.equal(left, right)


def make_parts(steps: int, length: int = 29) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return queries of four heads, and the keys and values of two for every step."""
    torch.manual_seed(3)
    q = torch.randn(2, 4, length, 8, requires_grad=True)
    keys, values = (
        [torch.randn(2, 2, length, 8, requires_grad=True) for _ in range(steps)] for _ in range(2)
    )
    return q, keys, values


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize(
    "steps, window, softcap",
    [(1, 5, None), (1, None, 3.0), (4, 6, None), (4, 3, None), (3, 40, None)],
)
def test_masked_attention_by_rows_changes_nothing(
    steps: int,
    window: int | None,
    softcap: float | None,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs and gradients do not depend on the number of positions whose mask exists at one
    time.
    """

    def compute_outputs() -> list[Tensor]:
        q, keys, values = make_parts(steps)
        if steps == 1:
            output = causal_attention(
                q, keys[0], values[0], None, AttentionOptions(None, window, softcap, None)
            )
        else:
            output = unrolled_attention(
                q, keys, values, None, AttentionOptions(None, window, softcap, None)
            )
        (output * torch.linspace(-1, 1, 8)).sum().backward()
        return [output, *(part.grad for part in (q, *keys, *values) if part.grad is not None)]

    full = compute_outputs()
    monkeypatch.setattr(attention, "MASKED_ROWS", rows)
    for left, right in zip(full, compute_outputs(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 6])
def test_rows_of_a_window_attend_as_in_the_text(window: int | None) -> None:
    """The last positions alone, after the keys of the first step, have the outputs that they
    have among all positions.
    """
    q, keys, values = make_parts(3)
    options = AttentionOptions(window=window)
    first = 17
    expected = unrolled_attention(q, keys, values, None, options)[:, :, first:]
    later = [
        [part[:, :, first:] if step else part for step, part in enumerate(parts)]
        for parts in (keys, values)
    ]
    actual = attend_rows(q[:, :, first:], later[0], later[1], first, options)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
