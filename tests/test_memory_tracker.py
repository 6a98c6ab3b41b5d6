"""Fake tensors: shapes, memory and FLOPs of a computation that is not done equal those of the
same one done.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from spectrain.models.attention import causal_attention
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.fast import pack_linears
from tests.memory_tracker import FORMULAS, MemoryTracker, enable_autocast

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class Block(nn.Module):
    """Attention with grouped heads over a sequence, and an output layer at some of its
    positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.q = nn.Linear(64, 64)
        self.k = nn.Linear(64, 32)
        self.norm = nn.RMSNorm(64)
        self.head = nn.Linear(64, 50)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        q, k = (project(x).unflatten(-1, (-1, 16)).transpose(1, 2) for project in (self.q, self.k))
        mask = torch.ones(
            tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device
        ).tril()
        attended = F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)
        return self.head(attended.transpose(1, 2).flatten(2)[chosen]).log_softmax(-1)


def train_step() -> Tensor:
    """Run a training step; return log-probabilities with a row for each chosen position."""
    model = Block()
    tokens = torch.arange(3 * 40).view(3, 40) % 50
    optimizer = torch.optim.AdamW(model.parameters())
    log_probs = model(tokens, tokens > 20)
    log_probs.logsumexp(-1).sum().backward()
    optimizer.step()
    return log_probs


def measure_peak(work: Callable[[], object]) -> int:
    """Return the peak bytes by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        now += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, now)
    return most


def test_a_fake_tensor_has_the_shape_memory_and_flops_of_the_real_thing() -> None:
    """The same rows are selected; bytes agree with the allocator within what kernels need
    inside, FLOPs exactly.
    """
    with MemoryTracker(CPU) as tracker:
        fake = train_step()
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        real = train_step()
    assert fake.shape == real.shape
    assert sum(tracker.flops.values()) == counter.get_total_flops() > 0
    del real
    assert sum(tracker.peak().values()) == pytest.approx(measure_peak(train_step), rel=0.05)


def test_all_is_given_back() -> None:
    """When no tensor is left, no memory is held."""
    with MemoryTracker(CPU) as tracker:
        train_step()
    assert (
        sum(
            tracker.sizes[event] if event >= 0 else -tracker.sizes[~event]
            for event in tracker.events
        )
        == 0
    )


def test_a_gpu_is_planned_where_there_is_none() -> None:
    """Tensors say that they are on it, autocast casts, a mask is stored in half precision, and
    memory comes in blocks.
    """
    with MemoryTracker(GPU) as tracker, enable_autocast(torch.bfloat16):
        x = torch.empty(1, 4, 8, 16, device=GPU)
        assert (
            x.device == GPU
            and x.is_cuda
            and F.linear(x, torch.empty(3, 16)).dtype == torch.bfloat16
        )
        mask = torch.ones(8, 8, dtype=torch.bool, device=x.device).tril()
        assert (
            F.scaled_dot_product_attention(
                x, x[:, :2], x[:, :2], attn_mask=mask, enable_gqa=True
            ).dtype
            == torch.bfloat16
        )
    assert all(size % 512 == 0 for size in tracker.sizes)


def test_values_are_followed_until_unknown_ones_are_written() -> None:
    """Counts and masks of known tokens are real; a tensor is unknown after a write of unknown
    values, and so are its views.
    """
    with MemoryTracker(CPU) as tracker:
        tokens = torch.tensor([3, 0, 5, 0])
        weight = torch.empty(4)
        assert (
            int((tokens > 0).sum()) == 2
            and weight[tokens > 0].shape == (2,)
            and not tracker.assumed
        )
        assert tokens.nonzero()[:, 0].tolist() == [0, 2]
        view = tokens[:2]
        tokens[2:] = weight[:2].long()
        assert len(view.nonzero()) == 2 and tracker.assumed == 1, "the most is assumed"
        with pytest.raises(RuntimeError, match="only a real run has"):
            view.tolist()


def test_shared_storages_count_once() -> None:
    """Views, copies of a module's tied weights and data moved into a parameter count once."""
    with MemoryTracker(CPU) as tracker:
        weight = nn.Parameter(torch.empty(100, 10))
        views = [weight[:5], weight.t(), weight.detach()]
        held = sum(tracker.peak().values())
        weight.data = weight.data.to(torch.float64)
        assert weight.dtype == torch.float64 and weight.shape == (100, 10)
        del views
    assert held == 4000 and sum(tracker.peak().values()) == 12000


def test_packed_copies_of_weights_are_held() -> None:
    """Linears of fake weights are packed as real ones are."""
    with MemoryTracker(CPU) as tracker:
        linear = nn.Linear(600, 500, bias=False)
        pack_linears(linear)
        with torch.no_grad():
            linear(torch.zeros(2, 600))
    assert tracker.peak()["packed copies of weights"] == 4 * 600 * 500


@pytest.mark.parametrize("window", [None, 5])
def test_packed_documents_count_as_each_of_them(window: int | None) -> None:
    """FLOPs of one launch over all, forward and backward, are those of a launch for each; what
    follows a window is counted masked or not, as ever."""
    flops = []
    for documents in (((7, 30, 2),), ((7,), (30,), (2,))):
        with MemoryTracker(torch.device("cuda", 0)) as tracker:
            for lengths in documents:
                q, k, v = (
                    torch.empty(
                        1,
                        heads,
                        sum(lengths),
                        16,
                        device="cuda",
                        dtype=torch.bfloat16,
                        requires_grad=True,
                    )
                    for heads in (4, 2, 2)
                )
                causal_attention(q, k, v, lengths, AttentionOptions(window=window)).sum().backward()
        flops.append(tracker.flops["other"])
    assert flops[0] == flops[1] == 4 * 16 * 4 * (7**2 + 30**2 + 2**2) * 7 // 2


def test_sums_of_products_in_another_type_count_as_others() -> None:
    """What is added to float32 at once is as many FLOPs as in one type; torch's own formula
    stumbles over the type.
    """
    flops = []
    for dtype in (torch.float32, torch.bfloat16):
        with MemoryTracker(torch.device("cuda", 0)) as tracker:
            total = torch.zeros(4, 6, device="cuda")
            left = torch.empty(4, 5, device="cuda", dtype=dtype)
            right = torch.empty(5, 6, device="cuda", dtype=dtype)
            if dtype == torch.float32:
                torch.addmm(total, left, right, out=total)
            else:
                torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        flops.append(tracker.flops["other"])
    assert flops == [2 * 4 * 5 * 6] * 2
