"""Weights that stay in the quantised blocks of a GGUF file: what reads them reads their values, and
decoding is that of the dequantised weights.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.decoding.session import prepare_for_decoding
from spectrain.drafters.causal import Causal
from spectrain.errors import UserError
from spectrain.kernels.dispatch import run_on_cpu
from spectrain.models.architectures.quantized import has_block_weights, refuse_training
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.fast import speed_up_linears
from spectrain.models.fingerprint import hash_target
from spectrain.models.gguf_header import StoredTensor
from spectrain.models.loading import build_meta_network, load_hf
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain_cpu.block_loading import MappedRows, choose_type
from spectrain_cpu.block_weights import BlockWeight
from tests.models.test_gguf_weights import cache, gguf_file

__all__ = ["cache", "gguf_file"]

Type = gguf.GGMLQuantizationType


class DenseStore:
    """Stands for the store of a package: float32 values."""

    def __init__(self, values: Tensor) -> None:
        self.content = values

    @property
    def shape(self) -> tuple[int, int]:
        return self.content.shape[0], self.content.shape[1]

    def store_rows(self, first: int, content: Tensor) -> None:
        raise NotImplementedError

    def values(self, rows: Tensor) -> Tensor:
        return self.content[rows]

    def all_values(self, dtype: torch.dtype) -> Tensor:
        return self.content.to(dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.content, bias)


@pytest.fixture
def values() -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def weight(values: Tensor) -> nn.Parameter:
    block_weight = BlockWeight(DenseStore(values), torch.float32)
    return nn.Parameter(block_weight, requires_grad=False)


READERS: dict[str, Any] = {
    "embedding": lambda w: F.embedding(torch.tensor([[3, 0], [11, 3]]), w),
    "rows": lambda w: w[torch.tensor([5, 1])],
    "marked rows": lambda w: w[torch.arange(12) % 3 == 0],
    "row": lambda w: w[-1],
    "first rows": lambda w: w[:7],
    "last rows": lambda w: w[-2:],
    "columns": lambda w: w[:, 2:4],
    "chosen rows": lambda w: w.index_select(0, torch.tensor([2])),
    "type": lambda w: w.double(),
    "transposed": lambda w: torch.ones(2, 12) @ w,
    "linear": lambda w: F.linear(torch.ones(3, 8), w),
    "joined": lambda w: torch.cat([w, w]),
    "split": lambda w: w.split(5)[1],
    "norm": lambda w: w.norm(),
}


@pytest.mark.parametrize("name", READERS)
def test_reading_a_weight_reads_its_values(name: str, weight: nn.Parameter, values: Tensor) -> None:
    assert isinstance(weight, BlockWeight)
    read = READERS[name](weight)
    assert type(read) is Tensor
    assert torch.equal(read, READERS[name](values))


def test_autocast_to_the_weights_own_type_multiplies_the_blocks(
    values: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense copy of an output layer takes seconds, and a training needs its products in every
    step."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        other = F.linear(x, BlockWeight(DenseStore(values), torch.float32))
        assert other.dtype == torch.bfloat16
        store = DenseStore(values.bfloat16())
        monkeypatch.setattr(store, "all_values", None)
        own = F.linear(x.bfloat16(), BlockWeight(store, torch.bfloat16))
    assert torch.equal(own, F.linear(x.bfloat16(), values.bfloat16()))


def test_a_weight_is_frozen(weight: nn.Parameter) -> None:
    assert deepcopy(weight) is weight
    with pytest.raises(RuntimeError, match="cannot be written to"):
        weight.zero_()
    x = torch.ones(2, 8, requires_grad=True)
    F.linear(x, weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 8))


needs_kernels = pytest.mark.skipif(
    run_on_cpu("block_bytes", 16, 32, 8) is None, reason="no package multiplies blocks here"
)


def load_both(gguf_file: Path, dtype: str) -> tuple[Target, Target]:
    """Load the file with weights in blocks, and with dense ones."""
    blocks = load_hf(str(gguf_file), dtype=dtype, quantization="gguf")
    dense = load_hf(str(gguf_file), dtype=dtype)
    for target in (blocks, dense):
        speed_up_linears(target.model)
    return blocks, dense


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_in_blocks_is_the_dequantised_target(gguf_file: Path, dtype: str) -> None:
    blocks, dense = load_both(gguf_file, dtype)
    assert has_block_weights(blocks.model) and not has_block_weights(dense.model)
    named = dict(dense.model.named_parameters())
    for name, weight in blocks.model.named_parameters():
        assert torch.equal(weight.to(weight.dtype, copy=True), named[name]), name
    assert hash_target(blocks) == hash_target(dense)
    tokens = torch.randint(0, blocks.head.vocab_size, (2, 40))
    tolerance = 1e-3 if dtype == "float32" else 0.1
    with torch.inference_mode():
        logits, expected = (target.model(tokens).logits for target in (blocks, dense))
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_are_those_of_generate(gguf_file: Path, dtype: str) -> None:
    """In float32 those of the dequantised weights, and in each type those of the same blocks."""
    blocks, dense = load_both(gguf_file, dtype)
    prompts = [[5, 9, 2, 7], [11, 3], [8] * 40]
    for prompt in prompts:
        text = decode(blocks, [prompt], Greedy(), 16, ignore_eos=True)[0].output
        with reference_model(blocks) as model:
            assert text == generate(model, prompt, 16, frozenset())
        if dtype == "float32":
            with reference_model(dense) as model:
                assert text == generate(model, prompt, 16, frozenset())


@needs_kernels
def test_an_embedding_that_is_only_looked_up_stays_in_the_file(gguf_file: Path) -> None:
    target = load_hf(str(gguf_file), quantization="gguf")
    weight: Any = target.head.embedding.weight
    assert isinstance(weight.store, MappedRows)
    states = torch.randn(2, weight.shape[1], dtype=weight.dtype)
    dense = weight.dense()
    assert torch.equal(F.linear(states, weight), F.linear(states, dense))
    assert torch.equal(weight.first_rows(7).dense(), dense[:7])
    with pytest.raises(RuntimeError, match="cannot be written to"):
        weight.store.store_rows(0, weight.content)


@needs_kernels
def test_texts_with_inputs_in_eight_bits_are_those_of_generate(gguf_file: Path) -> None:
    target = load_hf(str(gguf_file), quantization="gguf_int8", dtype="bfloat16")
    other = load_hf(str(gguf_file), quantization="gguf", dtype="bfloat16")
    for prompt in ([5, 9, 2, 7], [8] * 40):
        text = decode(target, [prompt], Greedy(), 16, ignore_eos=True)[0].output
        with reference_model(target) as model:
            assert text == generate(model, prompt, 16, frozenset())
    tokens = torch.randint(0, target.head.vocab_size, (2, 40))
    with torch.inference_mode():
        logits, expected = (model.model(tokens).logits for model in (target, other))
    assert not torch.equal(logits, expected)
    assert (logits - expected).abs().max() <= 0.1 * expected.abs().max()


@pytest.fixture
def drafting(gguf_file: Path) -> tuple[Target, Causal]:
    target = load_hf(str(gguf_file), quantization="gguf")
    return target, Causal(target, model=str(gguf_file))


@needs_kernels
@pytest.mark.parametrize("tree", [Chain(3), Eagle2(3, 8)], ids=["chain", "tree"])
def test_a_drafter_in_blocks_drafts_what_the_target_writes(
    drafting: tuple[Target, Causal], tree: TreeBuilder
) -> None:
    """The drafter has the target's weights and rounds its inputs more, so it is often right."""
    target, drafter = drafting
    assert has_block_weights(drafter.model)
    prepare_for_decoding(drafter, target)
    target.pack_weights()
    for prompt in ([5, 9, 2, 7], [11, 3], [8] * 40):
        plain = decode(target, [prompt], Greedy(), 16, ignore_eos=True)[0]
        drafted = decode(target, [prompt], Greedy(), 16, drafter, tree, ignore_eos=True)[0]
        assert drafted.output == plain.output
        assert len(drafted.node_counts) < 0.75 * len(plain.node_counts)


@needs_kernels
def test_a_drafter_drafts_no_tokens_beyond_its_vocabulary(drafting: tuple[Target, Causal]) -> None:
    target, every = drafting
    few = Causal(target, model=every.model_name, vocab_size=100)
    for drafter in (every, few):
        prepare_for_decoding(drafter, target)
    states = torch.randn(1, 2, every.model.width, dtype=target.dtype)
    with torch.inference_mode():
        cut = few.log_q(states)
        full = every.log_q(states)[..., :100].log_softmax(-1)
    assert cut.shape == (1, 2, 100)
    assert torch.allclose(cut, full, atol=1e-5)
    prompt = [5, 9, 2, 7]
    plain = decode(target, [prompt], Greedy(), 16, ignore_eos=True)[0]
    drafted = decode(target, [prompt], Greedy(), 16, few, Chain(3), ignore_eos=True)[0]
    assert drafted.output == plain.output


@needs_kernels
def test_training_makes_a_drafter_dense(drafting: tuple[Target, Causal]) -> None:
    target, drafter = drafting
    values = {name: weight.float() for name, weight in drafter.model.named_parameters()}
    drafter.prepare(target, torch.zeros(target.head.vocab_size))
    assert not has_block_weights(drafter.model)
    for name, weight in drafter.model.named_parameters():
        assert weight.requires_grad and weight.dtype == torch.float32
        assert torch.allclose(weight, values[name], rtol=2**-8), name


@needs_kernels
def test_a_drafter_keeps_blocks_where_the_target_does(
    drafting: tuple[Target, Causal], tmp_path: Path
) -> None:
    target, drafter = drafting
    dense = load_hf(str(drafter.model_name))
    assert not has_block_weights(Causal(dense, model=drafter.model_name).model)
    assert has_block_weights(Causal(dense, model=drafter.model_name, quantization="gguf").model)
    assert not has_block_weights(
        Causal(target, model=drafter.model_name, quantization="none").model
    )
    with pytest.raises(UserError, match="drafter.quantization=gguf: drafter.model names no .gguf"):
        Causal(target, num_layers=1, quantization="gguf")


@needs_kernels
def test_a_drafter_is_rounded_to_four_bits(drafting: tuple[Target, Causal]) -> None:
    target, drafter = drafting
    rounded = Causal(target, model=drafter.model_name, quantization="q4_0")
    for name, weight in drafter.model.named_parameters():
        four_bits = rounded.model.get_parameter(name)
        if not isinstance(weight, BlockWeight) or isinstance(weight.store, MappedRows):
            assert torch.equal(four_bits, weight), name
            continue
        values = weight.store.all_values(torch.float32)
        blocks = gguf.quantize(values.numpy(), Type.Q4_0)
        assert isinstance(four_bits, BlockWeight)
        assert torch.equal(
            four_bits.store.all_values(torch.float32),
            torch.from_numpy(gguf.dequantize(blocks, Type.Q4_0)),
        )
    with pytest.raises(UserError, match="drafter.quantization=q4_0: drafter.model names no .gguf"):
        Causal(target, num_layers=1, quantization="q4_0")


@pytest.mark.parametrize(
    ("stored", "width", "expected"),
    [
        (Type.Q8_0, 64, Type.Q4_0),
        (Type.Q6_K, 256, Type.Q4_0),
        (Type.Q4_K, 256, Type.Q4_K),
        (Type.Q4_0, 64, Type.Q4_0),
        (Type.F16, 40, Type.F16),
    ],
    ids=str,
)
def test_only_larger_blocks_are_rounded(stored: Any, width: int, expected: Any) -> None:
    tensor = StoredTensor("blk.0.ffn_up.weight", (16, width), stored, 0, 0)
    assert choose_type(tensor, Type.Q4_0) == expected
    assert choose_type(tensor, None) == stored


@needs_kernels
def test_nothing_is_written_to_the_cache_but_settings(gguf_file: Path, cache: Path) -> None:
    load_hf(str(gguf_file), quantization="gguf")
    assert not list(cache.rglob("*.safetensors"))


@needs_kernels
def test_a_model_without_weights_knows_the_bytes_of_the_blocks(gguf_file: Path) -> None:
    planned = load_hf(str(gguf_file), network=build_meta_network, quantization="gguf")
    loaded = load_hf(str(gguf_file), quantization="gguf")
    sizes = {
        name: getattr(weight, "block_bytes", None)
        for name, weight in planned.model.named_parameters()
    }
    for name, weight in loaded.model.named_parameters():
        assert sizes[name] == (weight.nbytes if isinstance(weight, BlockWeight) else None), name


@needs_kernels
def test_what_needs_dense_weights_says_so(gguf_file: Path) -> None:
    target = load_hf(str(gguf_file), quantization="gguf")
    with pytest.raises(UserError, match="cannot be trained; leave out target.quantization"):
        refuse_training("small", target.model, "lora")


def test_blocks_come_from_a_gguf_file() -> None:
    with pytest.raises(UserError, match="is no .gguf file; leave it out"):
        load_hf(str(TINY_DIRECTORY), quantization="gguf")


def test_without_kernels_nothing_is_loaded(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECTRAIN_KERNELS", "reference")
    with pytest.raises(UserError, match="no installed package multiplies the blocks"):
        load_hf(str(gguf_file), quantization="gguf")
