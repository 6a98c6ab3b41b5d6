"""The engine that never asks the device gives what the loop gives."""

from collections.abc import Callable

import pytest

from spectrain.acceptance import AcceptanceRule, Greedy
from spectrain.decode import Generation, decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.hydra import Hydra
from spectrain.drafters.medusa import Medusa
from spectrain.drafters.pard import Pard
from spectrain.engine import Engine
from spectrain.shapes import Chain, Eagle2, TreeBuilder
from spectrain.shapes.dynamic import Entropy
from spectrain.shapes.fixed import Static
from spectrain.target import Target

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [9, 10], [100, 3, 44, 8]]
DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "eagle3": lambda target: Eagle3(target, vocab_size=512),
    "medusa": lambda target: Medusa(target, num_heads=3, vocab_size=512),
    "hydra": lambda target: Hydra(target, num_heads=3, vocab_size=512),
    "hydra++": lambda target: Hydra(target, num_heads=3, vocab_size=512, prefix_attention=True),
    "causal": lambda target: Causal(target, num_layers=6),
    "pard": lambda target: Pard(target, num_drafts=4, num_layers=6),
}
BUILDERS: dict[str, Callable[[], TreeBuilder]] = {
    "chain": lambda: Chain(3),
    "eagle2": lambda: Eagle2(3, 10, 3),
    "entropy": lambda: Entropy(3, 8, 3),
    "static": lambda: Static(paths=[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
}


def facts(generations: list[Generation]) -> list[tuple[object, ...]]:
    """All that does not depend on the clock."""
    return [(g.prompt, g.output, g.accepted, g.depths, g.nodes, g.idle, g.cut, g.done, g.batch) for g in generations]


def same(target: Target, rule: AcceptanceRule, drafter: Drafter | None, builder: TreeBuilder | None, rounds: int = 4) -> Engine:
    """Check batches of several sizes and lengths, decoded one after another by one engine."""
    engine = Engine(target, rule, drafter, builder, rounds)
    for prompts, limit in ((PROMPTS, 24), (PROMPTS[:1], 40), (PROMPTS[:2], 7), (PROMPTS, 23), (PROMPTS[:1], 2)):
        rows = list(range(3, 3 + len(prompts)))
        for ignore_eos in (False, True):
            expected = decode(target, prompts, rule, limit, drafter, builder, rows, ignore_eos=ignore_eos)
            assert facts(engine.decode(prompts, limit, rows, ignore_eos)) == facts(expected)
    return engine


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_family_and_tree_equals_the_loop(tiny: Target, drafter: str, builder: str) -> None:
    """Tokens, accepted lengths, depths and sizes of every round equal those of the loop that asks the device."""
    made = DRAFTERS[drafter](tiny).eval()
    engine = same(tiny, Greedy(), made, BUILDERS[builder]())
    assert max(max(one.accepted) for one in engine.decode(PROMPTS, 24)) > (1 if drafter in ("causal", "pard") else 0)


@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_autoregressive_decoding_equals_the_loop(tiny: Target, rounds: int) -> None:
    """However seldom the host looks."""
    same(tiny, Greedy(), None, None, rounds)
