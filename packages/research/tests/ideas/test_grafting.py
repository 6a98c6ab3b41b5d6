"""Grafted trees hold what the first layers find likely, in place of what they find unlikely, and
never change the output.
"""

import pytest
import torch

from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target
from spectrain.trees import Auto, Eagle2
from spectrain.trees.measurements import Calibration, Latency
from spectrain.trees.token_tree import TokenTree
from spectrain_research.grafting.grafting import Grafting
from tests.targets import make_random_target
from tests.trees.tables import Path, check_structure, paths

PROMPTS = [[5, 3, 9, 1, 14, 2, 5, 3], [7, 7, 2]]
LAYER = 3
COUNT = 2
LIMIT = 6
TREE = Eagle2(depth=4, budget=8, top_k=2)


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target of four layers and 16 tokens."""
    return make_random_target(16, num_layers=4, sharpness=4.0)


@pytest.fixture(scope="module")
def drafters(target: Target) -> dict[str, Drafter]:
    """An untrained drafter that reads features, copies, and a drafter that runs layers itself."""
    torch.manual_seed(0)
    eagle3 = Eagle3(target, vocab_size=16, layers=[1, 2, 3])
    eagle3.prepare(target, torch.ones(16))
    return {"eagle3": eagle3.eval(), "ngram": Ngram(target), "early_exit": EarlyExit(target, 1)}


class Recorded(Grafting):
    """Records every text with its tree before and after."""

    rounds: list[tuple[list[list[int]], TokenTree, TokenTree]]

    def __call__(self, context: Context, tree: TokenTree) -> TokenTree:
        grafted = super().__call__(context, tree)
        ends = context.cache.lengths.tolist()
        self.rounds.append(
            ([row[: end + 1] for row, end in zip(context.tokens.tolist(), ends)], tree, grafted)
        )
        return grafted


def expected_paths(target: Target, text: list[int], drafted: list[Path], steps: int) -> list[Path]:
    """The paths of a grafted tree, by a forward of the first layers over every path."""
    log_p: dict[Path, torch.Tensor] = {}

    def next_log_p(path: Path) -> torch.Tensor:
        if path not in log_p:
            logits = target.run(
                torch.tensor([[*text, *path]]), ForwardPlan(logits=True, span=LayerSpan(last=LAYER))
            ).logits
            assert logits is not None
            log_p[path] = logits[0, -1].log_softmax(-1)
        return log_p[path]

    def score_path(path: Path) -> float:
        return sum(float(next_log_p(path[:at])[path[at]]) for at in range(len(path)))

    left = list(drafted)
    for _ in range(steps):
        missing = [(*path, int(next_log_p(path).argmax())) for path in left]
        left += sorted(
            (path for path in missing if path not in left), key=score_path, reverse=True
        )[:COUNT]
    grafts = left[len(drafted) :]
    while len(left) > len(drafted):
        leaves = [
            path for path in left if path and not any(other[:-1] == path for other in left if other)
        ]
        left.remove(min([path for path in leaves if path not in grafts] or leaves, key=score_path))
    return left


@pytest.mark.parametrize(
    "name, rule, steps",
    [
        ("eagle3", Greedy(), 1),
        ("eagle3", Match(temperature=0.8, seed=3), 1),
        ("ngram", Greedy(), 1),
        ("early_exit", Greedy(), 1),
        ("eagle3", Greedy(), 2),
    ],
    ids=["eagle3", "eagle3-match", "ngram", "early-exit", "sequences"],
)
@torch.no_grad()
def test_grafts_are_those_of_plain_forwards(
    target: Target, drafters: dict[str, Drafter], name: str, rule: AcceptanceRule, steps: int
) -> None:
    """Two texts at once: the same output, trees of the same size with the expected paths, and
    grafts that are accepted.
    """
    grafting = Recorded(LAYER, COUNT, steps)
    grafting.rounds = []
    generations = Session(target, rule, drafters[name], TREE, changes=(grafting,)).decode(
        PROMPTS, LIMIT, ignore_eos=True
    )
    assert [generation.output for generation in generations] == [
        generation.output for generation in decode(target, PROMPTS, rule, LIMIT, ignore_eos=True)
    ]
    changed = 0
    for texts, tree, grafted in grafting.rounds:
        check_structure(grafted)
        for row, text in enumerate(texts):
            before = paths(tree, row)
            assert sorted(paths(grafted, row)) == sorted(
                expected_paths(target, text, before, steps)
            )
            changed += sorted(before) != sorted(paths(grafted, row))
    counts = grafting.summarize_grafts()
    assert changed > 0 and counts["grafts_per_round"] > 0 and counts["accepted_per_round"] > 0


@torch.no_grad()
def test_trees_of_measured_size_are_grafted(target: Target, drafters: dict[str, Drafter]) -> None:
    """With a builder that decides before each round whether to draft, drafted trees are grafted
    and the output is the same.
    """
    builder = Auto(4, 10, 3)
    times = {size: 1e-3 + 1e-6 * size for size in (1, 2, 10)}
    builder.prepare(Calibration(latency=Latency({0: times}, {0: dict.fromkeys(times, 1e-9)}, 1e-9)))
    # The times above are not this machine's: the choice of plain steps would be one by chance, and
    # so would new timing.
    builder.round_policy.refresh_times = lambda *_: None  # type: ignore[method-assign]
    builder.round_policy.costs.choice.should_draft = lambda *_: (
        builder.round_policy.num_rounds % 4 > 0
    )  # type: ignore[method-assign]
    grafting = Recorded(LAYER, COUNT, 1)
    grafting.rounds = []
    generations = Session(
        target, Greedy(), drafters["early_exit"], builder, changes=(grafting,)
    ).decode(PROMPTS[:1], LIMIT)
    assert [generation.output for generation in generations] == [
        generation.output for generation in decode(target, PROMPTS[:1], Greedy(), LIMIT)
    ]
    assert grafting.num_grafted > 0 and builder.round_policy.num_plain > 0


@torch.no_grad()
def test_grafting_accepts_more_at_equal_nodes(target: Target, drafters: dict[str, Drafter]) -> None:
    """The late exit of a random target predicts more than an untrained drafter."""
    plain, grafted = (
        Session(target, Greedy(), drafters["eagle3"], Eagle2(3, 8, 2), changes=changes).decode(
            PROMPTS, 30, ignore_eos=True
        )
        for changes in ((), (Grafting(LAYER, COUNT),))
    )
    assert sum(len(generation.round_lengths) for generation in grafted) < sum(
        len(generation.round_lengths) for generation in plain
    )


def test_grafting_refuses_what_it_is_not_valid_for(
    target: Target, drafters: dict[str, Drafter]
) -> None:
    for grafting, rule, message in (
        (Grafting(4, 1), Greedy(), "eval.graft_layer=4: random has 4 layers"),
        (
            Grafting(2, 1),
            RecursiveRejection(),
            "acceptance=recursive: .*acceptance=greedy or match",
        ),
        (Grafting(2, 5), Greedy(), "eval.graft_nodes=5: .*room for 4"),
    ):
        with pytest.raises(UserError, match=message):
            Session(target, rule, drafters["ngram"], TREE, changes=(grafting,)).decode(
                PROMPTS, 4, ignore_eos=True
            )
    with pytest.raises(UserError, match="eval.graft_nodes=0"):
        Grafting(2, 0)
