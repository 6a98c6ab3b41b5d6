"""Launches, bytes and questions to the device in a round of the engine, against committed numbers.

A changed number is no fault but a fact to look at; SPECTRAIN_COUNT=1 pytest tests/test_launches.py
writes all of them anew.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lab.benchmarks.launches import LaunchCounter, count_parts, count_round
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.captured import CapturedRunner
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle1 import Eagle1
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.medusa import Medusa
from spectrain.drafters.mtp import Mtp
from spectrain.drafters.pard import Pard
from spectrain.drafters.peagle import PEagle
from spectrain.models.fast import fuse_text_layers, merge_linears
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain.trees.fixed import Static
from spectrain.trees.growing import GrowingTree
from spectrain.trees.rollout import Rollout
from tests.installed import load_cases
from tests.targets import cut_tiny

COMMITTED = Path(__file__).parent / "round_counts.json"
PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
# Cases of installed packages.
CASES = load_cases(__name__)

ROUNDS: dict[str, tuple[AcceptanceRule, Callable[[Target], Drafter] | None, TreeBuilder | None]] = {
    "autoregressive": (Greedy(), None, None),
    "autoregressive, sampled": (Match(0.8, top_p=0.9), None, None),
    "eagle3, chain of 3": (Greedy(), lambda target: Eagle3(target, vocab_size=512), Chain(3)),
    "eagle3, eagle2 of 16": (
        Greedy(),
        lambda target: Eagle3(target, vocab_size=512),
        Eagle2(5, 16, 4),
    ),
    "eagle3, drawn": (
        RecursiveRejection(),
        lambda target: Eagle3(target, vocab_size=512),
        Static(paths=PATHS, children="sampled"),
    ),
    "medusa, static": (
        Greedy(),
        lambda target: Medusa(target, num_heads=3, vocab_size=512),
        Static(paths=PATHS),
    ),
    "eagle1, eagle2 of 16": (Greedy(), lambda target: Eagle1(target), Eagle2(5, 16, 4)),
    "causal, chain of 3": (Greedy(), lambda target: Causal(target, num_layers=2), Chain(3)),
    "early exit, chain of 3": (Greedy(), lambda target: EarlyExit(target, exit_layer=2), Chain(3)),
    "peagle, chain of 3": (
        Greedy(),
        lambda target: PEagle(target, num_drafts=4, num_layers=2, vocab_size=512),
        Chain(3),
    ),
    "mtp, chain of 3": (Greedy(), lambda target: Mtp(target), Chain(3)),
    "pard, chain of 3": (
        Greedy(),
        lambda target: Pard(target, num_drafts=4, num_layers=2),
        Chain(3),
    ),
    **CASES.get("ROUNDS", {}),
}


def make_engine(name: str) -> CapturedRunner:
    """Return the engine of a round, on tensors without data."""
    rule, drafter, builder = ROUNDS[name]
    target = cut_tiny(3)
    model = None if drafter is None else drafter(target).eval().to("meta")
    target.to("meta")
    # As `pack_weights` and `prepare_for_decoding` do on a GPU.
    merge_linears(target.model)
    fuse_text_layers(target.model)
    if model is not None:
        merge_linears(model, trainable=True)
    return CapturedRunner(target, rule, model, builder)


@pytest.mark.sweep(3, free=("batch", "name"))
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_launches_and_makes_what_is_committed(name: str, batch: int) -> None:
    """A round has the committed counts, and waits for nothing: tensors without data have no
    values to wait for.
    """
    counts = count_round(make_engine(name), batch)
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    if os.environ.get("SPECTRAIN_COUNT") == "1":
        committed[f"{name}, batch {batch}"] = counts
        COMMITTED.write_text(json.dumps(dict(sorted(committed.items())), indent=1) + "\n")
    assert counts == committed[f"{name}, batch {batch}"]


def test_launches_do_not_depend_on_the_batch() -> None:
    """A batch of 8 launches what one row does, and at most a few copies of views that are
    contiguous in one row alone.
    """
    committed = json.loads(COMMITTED.read_text())
    for name in ROUNDS:
        single, eight = (
            {part: n["launches"] for part, n in committed[f"{name}, batch {b}"].items()}
            for b in (1, 8)
        )
        assert all(single[part] <= eight[part] <= single[part] + 4 for part in single)


class LogitsRollout(Rollout):
    """A rollout whose drafter has computed these logits [B, F, V]."""

    gives_logits = False

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.draft_ids = torch.zeros(logits.shape[-1], dtype=torch.int64, device=logits.device)

    def request_logits(self) -> bool:
        self.gives_logits = True
        return True

    def start(self) -> Tensor:
        return self.logits if self.gives_logits else self.logits.float().log_softmax(-1)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.start()


@pytest.mark.parametrize("width", [1, 4])
def test_the_end_of_a_level_takes_two_launches(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The children of a level are two launches; without the kernels it is torch's top-k, which
    takes more than a dozen where a row is long and counts as one here, and seven others."""
    counts = []
    for mode in ("triton", "reference"):
        monkeypatch.setenv("SPECTRAIN_KERNELS", mode)
        root = torch.zeros(1, dtype=torch.int64, device="meta")
        logits = torch.zeros(1, 1, 32000, dtype=torch.bfloat16, device="meta")
        tree = GrowingTree(Chain(3), SimpleNamespace(root=root), LogitsRollout(logits))  # type: ignore[arg-type]
        with LaunchCounter() as counter:
            # A rollout that normalises does so as part of the level.
            tree.outputs = tree.rollout.start()
            tree.add_children(width)
        counts.append(counter.launches.total())
    by_kernels, by_torch = counts
    assert by_kernels == 2 and by_torch >= 8


# What a draft step of one EAGLE-3 layer launches after the first one. Matrix products are a
# library's, so nothing before one can go into it: with five of them, this is the floor where no
# kernel multiplies itself.
STEP = {
    "aten::mm": 5,  # q, k, v; the attention's output; gate and up; down; the output layer
    "spectrain::node_input": 1,  # embedding, norms, positions, and what a node sees
    "spectrain::rotate_append": 1,
    "spectrain::tree_attention": 2,
    "spectrain::add_norm": 1,
    "spectrain::gated_unit": 1,
    "spectrain::store_states": 1,  # the residual sum and the output's norm
    "spectrain::append_children": 2,
    "spectrain::select_frontier": 1,
}
ACCEPT = {
    "spectrain::tree_match": 2,  # the target's choices by parts of rows, and the walk
    "spectrain::round_commit": 1,  # tokens, lengths, log, and what the next draft reads
    "spectrain::kv_commit": 1,
}
MOST_LAUNCHES = 20


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(
    ("short", "long"),
    [(Chain(2), Chain(3)), (Eagle2(4, 16, 4), Eagle2(5, 16, 4)), (Eagle2(4, 60), Eagle2(5, 60))],
)
def test_a_draft_step_and_acceptance_take_twenty_launches(
    short: TreeBuilder, long: TreeBuilder, batch: int
) -> None:
    """A draft one step longer takes the launches of a step more, which are those of the list; with
    the acceptance they are at most twenty."""
    drafts = []
    for builder in (short, long):
        target = cut_tiny(2)
        drafter = Eagle3(target, vocab_size=512).eval().to("meta")
        merge_linears(drafter, trainable=True)
        target.to("meta")
        parts = count_parts(CapturedRunner(target, Greedy(), drafter, builder), batch)
        drafts.append(parts["draft"].launches)
        # A batch of more than one copies a view or two that is contiguous in one row alone.
        assert parts["accept"].launches == ACCEPT
    assert drafts[1] - drafts[0] == STEP
    assert sum(STEP.values()) + sum(ACCEPT.values()) <= MOST_LAUNCHES


@pytest.mark.parametrize(
    "read_value", [Tensor.item, Tensor.tolist, bool, lambda x: x.nonzero(), lambda x: x[x > 0]]
)
def test_asking_the_device_fails(read_value: Callable[[torch.Tensor], object]) -> None:
    """The proof can fail: whatever waits for a value of such a tensor raises."""
    with LaunchCounter(), pytest.raises((RuntimeError, NotImplementedError)):
        read_value(
            torch.zeros((), device="meta")
            if read_value in (Tensor.item, bool)
            else torch.zeros(3, device="meta")
        )


def test_a_tensor_from_the_host_fails() -> None:
    """Nor may a round copy from the host, which a graph would repeat with stale memory."""
    with LaunchCounter(), pytest.raises(AssertionError, match="has a tensor on the host"):
        torch.tensor([1, 2, 3])


def test_rounded_logits_are_not_widened() -> None:
    """A target in half precision gives its logits as they are; were they scaled, a round would take
    a launch to widen them and one to scale them, and twice their bytes in float32."""
    counts = []
    for scale in (1.0, 0.5):
        engine = make_engine("eagle3, chain of 3")
        engine.target.model.to(torch.bfloat16)
        assert engine.drafter is not None
        engine.drafter.to(torch.bfloat16)
        engine.target.config.logit_scale = scale
        counts.append(count_round(engine)["verify"])
    plain, scaled = counts
    assert scaled["launches"] == plain["launches"] + 2
    # of a root and three drafted nodes
    assert scaled["bytes"] == plain["bytes"] + 2 * 4 * 4 * engine.target.head.vocab_size


def test_views_are_no_launches() -> None:
    """A product, a sum and a write in place are launches; views and empty tensors are none."""
    x = torch.zeros(4, 4, device="meta")
    with LaunchCounter() as work:
        (x.t()[:1] @ x).view(2, 2).sum()
        x.add_(1)
        torch.empty(5, device="meta")
    assert work.launches == {"aten::mm": 1, "aten::sum": 1, "aten::add_": 1}
