"""What a round emits: kernel = reference = a loop over texts, and the kernel compiles for sm_90."""

import pytest
import torch
from torch import Tensor

from spectrain.kernels import token_commit as module
from spectrain.kernels.token_commit import TextBatch, token_commit, token_commit_reference
from tests.kernels import aot

pytest.importorskip("triton", reason="triton is not installed, so there is no kernel to interpret")

Case = tuple[Tensor, Tensor, Tensor, Tensor, TextBatch]


def round_of(counts: list[int], num_nodes: int, num_stops: int) -> Case:
    """A verified batch: texts that are done, that have one token left, and that have many; few
    tokens, so that some end.
    """
    batch = len(counts)
    steps = max(counts)
    nodes = torch.randint(0, 7, (batch, num_nodes))
    path = torch.stack([torch.randperm(num_nodes)[:steps].sort().values for _ in counts])
    left = torch.tensor([(1, 50, 3)[row % 3] for row in range(batch)])
    active = torch.tensor([row % 4 != 1 for row in range(batch)])
    texts = TextBatch(
        torch.full((batch, 40), 9),
        torch.randint(0, 20, (batch,)),
        active,
        left,
        torch.arange(num_stops),
    )
    return nodes, path, torch.tensor(counts), torch.randint(0, 7, (batch,)), texts


def copy_case(case: Case) -> Case:
    *trees, texts = case
    return *(x.clone() for x in trees), TextBatch(*(x.clone() for x in texts))  # type: ignore[return-value]


def commit_by_loop(
    nodes: Tensor, path: Tensor, counts: Tensor, bonus: Tensor, texts: TextBatch
) -> tuple[Tensor, Tensor]:
    emitted = torch.empty_like(path)
    accepted = torch.zeros_like(counts)
    for row, count in enumerate(counts.tolist()):
        later = [*path[row, 1:].tolist(), int(path[row, -1])]
        tokens = [int(nodes[row, node]) for node in later]
        tokens[count - 1] = int(bonus[row])
        emitted[row] = torch.tensor(tokens)
        if not texts.active[row]:
            continue
        accepted[row], start = count, int(texts.lengths[row]) + 1
        texts.tokens[row, start : start + count] = torch.tensor(tokens[:count])
        texts.tokens_left[row] -= count
        texts.active[row] = texts.tokens_left[row] > 0 and not {*tokens[:count]} & {
            *texts.stop_ids.tolist()
        }
    return emitted, accepted


@pytest.mark.sweep(3, free=("num_stops",))
@pytest.mark.parametrize("num_stops", [0, 1, 3])
@pytest.mark.parametrize(
    ("counts", "num_nodes"), [([1], 1), ([1, 4, 2, 3, 1, 4, 4], 9), ([17, 3, 1, 16], 64)]
)
def test_kernel_equals_reference_and_loop(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], num_nodes: int, num_stops: int
) -> None:
    """Emitted tokens, texts, their remaining lengths and whether they go on are equal."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    torch.manual_seed(len(counts) + num_stops)
    case = round_of(counts, num_nodes, num_stops)
    ended = 0
    result = []
    for commit in (token_commit, token_commit_reference, commit_by_loop):
        copy = copy_case(case)
        result.append((*commit(*copy), *copy[-1]))
        ended = int((case[-1].active & ~copy[-1].active).sum())
    for other in result[1:]:
        assert all(
            torch.equal(item, another) for item, another in zip(result[0], other, strict=True)
        )
    assert not torch.equal(result[0][2], case[-1].tokens) and (ended > 0 or len(counts) == 1)


def test_operator_passes_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's schema says what it changes, and its fake stands in for it."""
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    *trees, texts = round_of([1, 3], 5, 2)
    torch.library.opcheck(module._launch_emit, (*trees, *texts))


@pytest.mark.sweep(1, free=("num_steps",))
@pytest.mark.parametrize("num_steps", [1, 8, 256])
def test_kernel_compiles_for_sm_90(num_steps: int) -> None:
    """No stack and no shared memory, with one stop token or eight."""
    long = (
        "nodes_ptr",
        "path_ptr",
        "counts_ptr",
        "bonus_ptr",
        "tokens_ptr",
        "lengths_ptr",
        "left_ptr",
        "stops_ptr",
        "emitted_ptr",
        "emitted_counts_ptr",
    )
    types = dict.fromkeys(long, "*i64") | {"active_ptr": "*i1"}
    for num_stops in (1, 8):
        constants = {"BLOCK_P": num_steps, "BLOCK_S": num_stops}
        usage = aot.compile_for(
            aot.Request("spectrain.kernels.token_commit", "_emit_kernel", types, constants, 1, 3)
        )
        assert usage.stack == 0 and usage.registers <= 255, usage
