"""Grafted trees hold what the first layers find likely, in place of what they find unlikely, and never change the output."""

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
from spectrain.experimental.grafting.grafting import Grafting
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target
from spectrain.trees import Eagle2
from spectrain.trees.token_tree import TokenTree
from tests.targets import make_random_target
from tests.trees.tables import Path, paths

PROMPTS = [[5, 3, 9, 1, 14, 2, 5, 3], [7, 7, 2]]
LAYER, COUNT, LIMIT = 3, 2, 6
TREE = Eagle2(depth=3, budget=8, top_k=2)


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
        self.rounds.append(([row[: end + 1] for row, end in zip(context.tokens.tolist(), ends)], tree, grafted))
        return grafted


def expected_paths(target: Target, text: list[int], drafted: list[Path]) -> list[Path]:
    """The paths of a grafted tree, by a forward of the first layers over every path."""
    log_p = {}
    for path in drafted:
        plan = ForwardPlan(logits=True, span=LayerSpan(last=LAYER))
        logits = target.run(torch.tensor([[*text, *path]]), plan).logits
        assert logits is not None
        log_p[path] = logits[0, -1].log_softmax(-1)

    def score(path: Path) -> float:
        return sum(float(log_p[path[:at]][path[at]]) for at in range(len(path)))

    missing = [(*path, int(log_p[path].argmax())) for path in drafted]
    missing = sorted((path for path in missing if path not in drafted), key=score, reverse=True)[:COUNT]
    left = [*drafted, *missing]
    while len(left) > len(drafted):
        leaves = [path for path in left if path and not any(other[:-1] == path for other in left if other)]
        left.remove(min([path for path in leaves if path not in missing] or leaves, key=score))
    return left


@pytest.mark.parametrize("name, rule", [
    ("eagle3", Greedy()), ("eagle3", Match(temperature=0.8, seed=3)), ("ngram", Greedy()), ("early_exit", Greedy()),
], ids=["eagle3", "eagle3-match", "ngram", "early-exit"])  # fmt: skip
@torch.no_grad()
def test_grafts_are_those_of_plain_forwards(
    target: Target, drafters: dict[str, Drafter], name: str, rule: AcceptanceRule
) -> None:
    """Two texts at once: the same output, trees of the same size with the expected paths, and grafts that are accepted."""
    grafting = Recorded(LAYER, COUNT)
    grafting.rounds = []
    found = Session(target, rule, drafters[name], TREE, pruning=grafting).decode(PROMPTS, LIMIT, ignore_eos=True)
    assert [one.output for one in found] == [one.output for one in decode(target, PROMPTS, rule, LIMIT, ignore_eos=True)]
    changed = 0
    for texts, tree, grafted in grafting.rounds:
        grafted.check_structure()
        for row, text in enumerate(texts):
            before = paths(tree, row)
            assert sorted(paths(grafted, row)) == sorted(expected_paths(target, text, before))
            changed += sorted(before) != sorted(paths(grafted, row))
    counts = grafting.summarize_grafts()
    assert changed > 0 and counts["grafts_per_round"] > 0 and counts["accepted_per_round"] > 0


@torch.no_grad()
def test_grafting_accepts_more_at_equal_nodes(target: Target, drafters: dict[str, Drafter]) -> None:
    """The late exit of a random target says more than an untrained drafter."""
    plain, grafted = (
        Session(target, Greedy(), drafters["eagle3"], TREE, pruning=pruning).decode(PROMPTS, 30, ignore_eos=True)
        for pruning in (None, Grafting(LAYER, COUNT))
    )
    assert sum(len(one.round_lengths) for one in grafted) < sum(len(one.round_lengths) for one in plain)


def test_grafting_refuses_what_it_is_not_valid_for(target: Target, drafters: dict[str, Drafter]) -> None:
    for grafting, rule, message in (
        (Grafting(4, 1), Greedy(), "eval.graft_layer=4: random has 4 layers"),
        (Grafting(2, 1), RecursiveRejection(), "acceptance=recursive: .*acceptance=greedy or match"),
        (Grafting(2, 4), Greedy(), "eval.graft_nodes=4: .*room for 3"),
    ):
        with pytest.raises(UserError, match=message):
            Session(target, rule, drafters["ngram"], TREE, pruning=grafting).decode(PROMPTS, 4, ignore_eos=True)
    with pytest.raises(UserError, match="eval.graft_nodes=0"):
        Grafting(2, 0)
