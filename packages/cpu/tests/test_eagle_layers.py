"""EAGLE's layer in few calls, and by compiled kernels, gives what its modules give."""

import copy
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.decoding.session import prepare_for_decoding
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.state_rollout import StateRollout
from spectrain.models.fast import pack_linears, packed_linears
from spectrain.models.fast.packed_linears import has_int8
from spectrain.models.kv_cache import TreeCache
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain_cpu import eagle_steps, fused_eagle
from spectrain_cpu.available import has_block_kernels, has_drafting_kernels
from spectrain_cpu.block_weights import BlockWeight
from spectrain_cpu.eagle_steps import MAX_READ, find_compiled
from tests.models.checkpoints import save_gguf_file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_calls_give_what_the_modules_give(tiny: Target, dtype: torch.dtype) -> None:
    """States and log q of a prompt, of accepted tokens, and of a level of a tree are equal to
    the rounding of the type.
    """
    torch.manual_seed(0)
    modules = Eagle3(tiny, vocab_size=256).to(dtype).eval()
    packed = copy.deepcopy(modules)
    pack_linears(packed)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    level = torch.tensor([[[True, False, True, False], [True, False, False, True]]])
    results = []
    with torch.inference_mode():
        for drafter in (modules, packed):
            source = torch.Generator().manual_seed(1)
            cache = TreeCache(1, 1, 64, "cpu")
            states = []
            for count, visible in ((20, None), (3, None), (2, None), (2, level)):
                tokens = torch.randint(3, 256, (1, count), generator=source)
                hidden = torch.randn(1, count, tiny.width, generator=source).to(dtype)
                states.append(drafter.run(tokens, hidden, cache.next_slots(count), cache, visible))
                if count > 2:
                    cache.commit(None, torch.tensor([count]))
            results.append([*states, drafter.log_q(states[-1])])
        assert fused_eagle.uses_fused_cpu(packed) and not fused_eagle.uses_fused_cpu(modules)
    for left, right in zip(*results):
        torch.testing.assert_close(left.float(), right.float(), atol=tolerance * 4, rtol=tolerance)


@pytest.mark.skipif(
    not (has_int8() and has_drafting_kernels()), reason="no compiled kernels for 8-bit weights here"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_drafting_gives_what_few_calls_give(
    tiny: Target, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of the text, and log q of the levels of a tree, are equal to a few steps of 8-bit
    inputs, which round otherwise where a number differs by its last bit. Changed weights are
    compiled anew."""
    monkeypatch.setattr(packed_linears, "SMALL_WEIGHTS", 0)
    torch.manual_seed(0)
    drafter = Eagle3(tiny, vocab_size=256).eval()
    drafter.head = copy.copy(drafter.head)
    drafter.head.embedding = nn.Embedding(tiny.head.vocab_size, tiny.width)
    drafter.head.embedding.to(dtype)
    drafter.to(dtype)
    pack_linears(drafter, low_precision=True)
    levels = [([7, 9, 7], [0, 0, 0]), ([5, 6, 5, 8], [1, 3, 3, 0]), ([4], [6])]

    def draft() -> list[Tensor]:
        source = torch.Generator().manual_seed(1)
        cache = TreeCache(1, 1, 64, "cpu")
        compiled = find_compiled(drafter)
        results = []
        for count in (MAX_READ // 2, 3, 1):
            tokens = torch.randint(3, 256, (1, count), generator=source)
            hidden = torch.randn(1, count, tiny.width, generator=source).to(dtype)
            results.append(drafter.run(tokens, hidden, cache.next_slots(count), cache, None))
            cache.commit(None, torch.tensor([count]))
        root = results[-1][:, -1:]
        rollout = (
            StateRollout(drafter, cache, root)
            if compiled is None
            else compiled.start_rollout(cache, root, 8, tokens)
        )
        results.append(rollout.start())
        return results + [
            rollout.extend(torch.tensor([tokens]), torch.tensor([parents]))
            for tokens, parents in levels
        ]

    with torch.inference_mode():
        first = find_compiled(drafter)
        assert first is not None and find_compiled(drafter) is first
        compiled = draft()
        with monkeypatch.context() as patch:
            patch.setattr(eagle_steps, "find_compiled", lambda _: None)
            patch.setitem(draft.__globals__, "find_compiled", lambda _: None)
            few_calls = draft()
        for actual, expected in zip(compiled, few_calls, strict=True):
            torch.testing.assert_close(actual, expected, atol=0.1, rtol=0)
            assert (actual - expected).abs().median() < 0.01 < expected.std()
    with torch.no_grad():
        drafter.mlp.down_proj.weight.add_(1)
        assert find_compiled(drafter) is not first
    assert find_compiled(drafter) is None


@pytest.mark.skipif(
    not (has_int8() and has_drafting_kernels() and has_block_kernels()),
    reason="no compiled kernels for 8-bit weights and blocks here",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_drafting_over_an_embedding_in_blocks(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels look up the rows of an embedding that stays in the blocks of a GGUF file: texts are
    those of the target, and in float32 the same drafts are accepted as over a dense one."""
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_linears, "SMALL_WEIGHTS", 0)
    path = str(save_gguf_file(tmp_path)[0])
    prompts = [[5, 9, 2, 7], [11, 3, 11, 3]]
    rounds: dict[str | None, list[list[int]]] = {}
    embedded = []
    quantizations: tuple[Literal["gguf"] | None, ...] = ("gguf", None)
    for quantization in quantizations:
        target = load_hf(path, dtype=dtype, quantization=quantization)
        assert isinstance(target.head.embedding.weight, BlockWeight) == (quantization == "gguf")
        torch.manual_seed(0)
        drafter = Eagle3(target, vocab_size=64, layers=[1])
        drafter.prepare(target, torch.ones(target.head.vocab_size))
        drafter = prepare_for_decoding(drafter.eval(), target)
        with torch.inference_mode():
            assert find_compiled(drafter) is not None
            embedded.append(drafter.embed_inputs(torch.tensor(prompts)))
        rounds[quantization] = []
        for builder in (Chain(3), Eagle2(3, 8)):
            for prompt in prompts:
                (plain,) = decode(target, [prompt], Greedy(), 12)
                (drafted,) = decode(target, [prompt], Greedy(), 12, drafter, builder)
                assert drafted.output == plain.output
                rounds[quantization].append(drafted.round_lengths)
    assert torch.equal(*embedded)
    if dtype == "float32":
        assert rounds["gguf"] == rounds[None]
