"""Drafted decoding draws from the target: chi-squared tests on the real decoding path. Shapes: V
vocabulary.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.decoding.acceptance import AcceptanceRule, Match, SamplingRule
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.acceptance.typical import TypicalAcceptance
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.dflash import DFlash, DFlashConfig
from spectrain.drafters.dflash2 import DFlash2, DFlash2Config
from spectrain.drafters.dspark import DSpark, DSparkConfig
from spectrain.drafters.lilicorr import LiLiCorr, LiLiCorrConfig
from spectrain.drafters.peagle import PEagle
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Static, TreeBuilder
from spectrain.trees.measurements import Calibration, Latency
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from tests.factories import add_noise
from tests.installed import load_cases

from .known_target import Table

FEW = 16  # tokens that a random drafter knows
# 81 outcomes: the first token, which the prefill yields, and three more
LENGTH = 4
TOP_K = 3
BATCH = 250
BATCHES = 6
PATHS = [[0], [1], [0, 0], [1, 0]]
SEED = 11

Path = tuple[int, ...]


@dataclass(frozen=True)
class Truth:
    """The exact joint distribution of the first tokens after a prompt, and a drafter that
    guesses it roughly.
    """

    prompt: list[int]
    joint: dict[Path, float]
    drafter: Drafter


@pytest.fixture(scope="module")
def truth(shallow: Target) -> Truth:
    """Every continuation of a prompt under the target's three likeliest tokens, by plain forward
    passes.
    """
    prompt: list[int] = shallow.tokenizer("The bees find the", add_special_tokens=False)[
        "input_ids"
    ]
    rule = RecursiveRejection(top_k=TOP_K)
    vocab = shallow.head.vocab_size
    joint: dict[Path, float] = {(): 1.0}
    guesses = torch.full((vocab, vocab), 0.0)
    for _ in range(LENGTH):
        paths = list(joint)
        logits = shallow.run(
            torch.tensor([[*prompt, *path] for path in paths]), ForwardPlan(logits=True)
        ).logits
        assert logits is not None
        p = rule.shape_logits(logits[:, -1]).double().softmax(-1)
        for path, weights in zip(paths, p):
            guesses[(*prompt, *path)[-1]] += weights.float()
        joint = {
            (*path, token): joint[path] * float(weights[token])
            for path, weights in zip(paths, p)
            for token in weights.nonzero()[:, 0].tolist()
        }
    assert len(joint) == TOP_K**LENGTH
    somewhere = guesses.sum(0)
    here = torch.where(guesses.sum(-1, keepdim=True) > 0, guesses, somewhere)
    # flatter than p, and leaning elsewhere
    skewed = (here / 2.0).clamp(max=1).sqrt() * (1.0 + torch.arange(vocab) % 3)
    q = 0.6 * skewed / skewed.sum(-1, keepdim=True) + 0.4 * somewhere / somewhere.sum()
    assert (q == 0).any() and not torch.isclose(q.sum(-1), torch.zeros(())).any()
    log_q = q.log().log_softmax(-1)
    return Truth(prompt, joint, Table(log_q))


def decode_many(
    shallow: Target,
    truth: Truth,
    rule: AcceptanceRule,
    builder: TreeBuilder | None,
    batches: int = BATCHES,
) -> list[Generation]:
    """The prompt continued once for each of many row keys."""
    generations = []
    for batch in range(batches):
        rows = list(range(batch * BATCH, (batch + 1) * BATCH))
        drafter = None if builder is None else truth.drafter
        generations += decode(
            shallow, [truth.prompt] * BATCH, rule, LENGTH, drafter, builder, rows, ignore_eos=True
        )
    return generations


def p_value(outputs: list[Path], joint: dict[Path, float]) -> float:
    """The chance of a fit this bad or worse, by Pearson's chi-squared test; rare outcomes are
    judged as one.
    """
    result = Counter(outputs)
    assert set(result) <= set(joint), "a token came up that the target cannot say"
    pairs = sorted((chance * len(outputs), result[path]) for path, chance in joint.items())
    rare = [pair for pair in pairs if pair[0] < 5]
    cells = [pair for pair in pairs if pair[0] >= 5] + [
        (sum(e for e, _ in rare), sum(o for _, o in rare))
    ]
    expected, observed = torch.tensor(
        [cell for cell in cells if cell[0] > 0], dtype=torch.float64
    ).T
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(
            torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2
        )
    )


def outputs_of(generations: list[Generation]) -> list[Path]:
    """Return the generated tokens."""
    assert all(len(generation.output) == LENGTH for generation in generations)
    return [tuple(generation.output) for generation in generations]


def make_rule(rule: type[SamplingRule]) -> Any:
    """The rule under test, at the target's three likeliest tokens."""
    return rule(top_k=TOP_K, seed=SEED)


def assume_costs(builder: TreeBuilder) -> TreeBuilder:
    """A builder that knows what drafting costs here, which is little."""
    builder.prepare(Calibration(latency=Latency({0: {1: 1.0, 4: 1.1}}, {0: {1: 0.1}}, 0.1)))
    return builder


# Cases of installed packages.
CASES = load_cases(__name__)

PAIRS = [
    pytest.param(SpeculativeSampling, Chain(2, "sampled", seed=SEED), id="chain-chain"),
    pytest.param(Block, Chain(2, "sampled", seed=SEED), id="block-chain"),
    pytest.param(Block, Chain(3, "sampled", seed=SEED, stop=0.1), id="block-chain-that-stops"),
    pytest.param(
        RecursiveRejection,
        Static(paths=PATHS, children="without_replacement", seed=SEED),
        id="recursive-without",
    ),
    pytest.param(
        RecursiveRejection,
        Static(paths=PATHS, children="sampled", seed=SEED),
        id="recursive-sampled",
    ),
    pytest.param(
        RecursiveRejection,
        Static(paths=PATHS, children="without_replacement", temperature=0.001, seed=SEED),
        id="recursive-nearly-one-hot-q",
    ),
    pytest.param(Match, Eagle2(2, 4, 2), id="match-eagle2"),
    *CASES.get("PAIRS", ()),
]


@pytest.mark.sweep(1, free=("rule", "builder"))
@pytest.mark.parametrize("rule, builder", PAIRS)
def test_drafted_decoding_draws_from_the_target(
    shallow: Target, truth: Truth, rule: type[SamplingRule], builder: TreeBuilder
) -> None:
    """Sequences decoded with a rough drafter have the target's joint distribution; drafts were
    both accepted and rejected.
    """
    generations = decode_many(shallow, truth, make_rule(rule), builder)
    assert p_value(outputs_of(generations), truth.joint) > 1e-4
    accepted = Counter(count for generation in generations for count in generation.round_lengths)
    assert min(accepted[1], accepted[2]) > 200


@pytest.mark.sweep(1, free=("rule",))
@pytest.mark.parametrize(
    "rule",
    [
        SpeculativeSampling,
        Block,
        *CASES.get("test_autoregressive_decoding_draws_from_the_target", ()),
    ],
)
def test_autoregressive_decoding_draws_from_the_target(
    shallow: Target, truth: Truth, rule: type[SamplingRule]
) -> None:
    """Without a drafter, as the reference and guarded rounds decode, rules for drawn trees draw
    from the target too.
    """
    assert (
        p_value(outputs_of(decode_many(shallow, truth, make_rule(rule), None)), truth.joint) > 1e-4
    )


FAMILIES: dict[str, Callable[[Target], Drafter]] = {
    "dflash": lambda target: DFlash(
        target, DFlashConfig(block_size=4, num_layers=1, vocab_size=FEW)
    ),
    "dspark": lambda target: DSpark(
        target, DSparkConfig(block_size=3, num_layers=1, vocab_size=FEW, rank=8)
    ),
    "dspark that stops": lambda target: DSpark(
        target,
        DSparkConfig(
            block_size=3,
            num_layers=1,
            vocab_size=FEW,
            rank=8,
            markov_head="rnn",
            confidence_threshold=0.5,
        ),
    ),
    "dflash2": lambda target: DFlash2(
        target,
        DFlash2Config(
            block_size=4, num_layers=1, vocab_size=FEW, selector_rank=8, selector_top_k=6
        ),
    ),
    "lilicorr": lambda target: LiLiCorr(
        target,
        LiLiCorrConfig(
            block_size=4,
            num_layers=1,
            vocab_size=FEW,
            top_k=6,
            correction_width=16,
            correction_heads=2,
            factor_width=8,
        ),
    ),
    "peagle": lambda target: PEagle(
        target, num_drafts=3, num_layers=1, vocab_size=FEW, own_embedding=False
    ),
    **CASES.get("FAMILIES", {}),
}
"""Random drafters: their slots know nothing of each other, or a token's place in the draft and
the tokens before it matter.
"""
DRAWN = [
    pytest.param(SpeculativeSampling, Chain(3, "sampled", seed=SEED), id="chain"),
    pytest.param(Block, Chain(3, "sampled", 2.0, seed=SEED), id="block"),
    pytest.param(
        RecursiveRejection,
        Static(paths=PATHS, children="without_replacement", seed=SEED),
        id="recursive",
    ),
    *CASES.get("DRAWN", ()),
]


def make_untrained(family: str, shallow: Target, truth: Truth) -> Drafter:
    """Make a drafter with random weights over the tokens that the target is likeliest to emit
    after the prompt.
    """
    torch.manual_seed(SEED)
    drafter = FAMILIES[family](shallow)
    counts = torch.zeros(shallow.head.vocab_size)
    for path, chance in truth.joint.items():
        counts.index_add_(0, torch.tensor(path[1:]), torch.full((len(path) - 1,), chance))
    drafter.prepare(shallow, counts)
    matrices = {
        name: parameter for name, parameter in drafter.named_parameters() if parameter.dim() > 1
    }
    add_noise(
        matrix
        for name, matrix in matrices.items()
        if matrix.requires_grad and "lm_head" not in name
    )
    return drafter.eval()


def estimate_cost(family: str, rule: type[SamplingRule], builder: TreeBuilder) -> float:
    """Estimate the cost of a case by the nodes that are judged; the fewest are those of a chain
    whose first rejected draft ends it."""
    return builder.budget if rule is SpeculativeSampling else 4.0 * builder.budget


@pytest.mark.sweep(3, free=("family", "rule", "builder"), cost=estimate_cost)
@pytest.mark.parametrize("rule, builder", DRAWN)
@pytest.mark.parametrize("family", FAMILIES)
def test_parallel_drafts_keep_the_target_distribution(
    shallow: Target, truth: Truth, family: str, rule: type[SamplingRule], builder: TreeBuilder
) -> None:
    """Drafts of one pass, whether slots depend on each other or not, are drawn from the q that
    rules get, and judged to the target's joint distribution; drafts were both accepted and
    rejected."""
    rough = replace(truth, drafter=make_untrained(family, shallow, truth))
    generations = decode_many(shallow, rough, make_rule(rule), builder, batches=4)
    assert p_value(outputs_of(generations), truth.joint) > 1e-4
    accepted = Counter(count for generation in generations for count in generation.round_lengths)
    assert min(accepted[1], accepted[2]) > 120


class OtherTemperature(RecursiveRejection):
    """Weighs p against a q at another temperature than the one that the children were drawn at."""

    def __call__(
        self, tree: TokenTree, logits: Tensor, rows: Tensor, positions: Tensor
    ) -> AcceptedPath:
        assert tree.q is not None
        other = tree.q**0.3
        other = other / other.sum(-1, keepdim=True).clamp(min=1e-9)
        return super().__call__(replace(tree, q=other), logits, rows, positions)


WRONG = [
    pytest.param(OtherTemperature, Chain(2, "sampled", seed=SEED), id="another-q-chain"),
    pytest.param(
        OtherTemperature,
        Static(paths=PATHS, children="without_replacement", seed=SEED),
        id="another-q-tree",
    ),
    pytest.param(TypicalAcceptance, Eagle2(2, 4, 2), id="typical"),
]


def test_wrong_block_q_fails_the_test(shallow: Target, truth: Truth) -> None:
    """The same test rejects a block's drafts that are weighed by another q than they were drawn
    from.
    """
    rough = replace(truth, drafter=make_untrained("dflash", shallow, truth))
    result = decode_many(
        shallow, rough, make_rule(OtherTemperature), Chain(3, "sampled", seed=SEED), batches=3
    )
    assert p_value(outputs_of(result), truth.joint) < 1e-6


@pytest.mark.sweep(1, free=("rule", "builder"))
@pytest.mark.parametrize("rule, builder", WRONG)
def test_wrong_rule_fails_the_test(
    shallow: Target, truth: Truth, rule: type[SamplingRule], builder: TreeBuilder
) -> None:
    """The same test, on as many sequences, rejects a rule that is not lossless."""
    assert (
        p_value(outputs_of(decode_many(shallow, truth, make_rule(rule), builder)), truth.joint)
        < 1e-6
    )
