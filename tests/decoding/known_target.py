"""A target whose next-token table is known, and what compares decoded texts with it. Shapes: V
vocabulary.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from zlib import crc32

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spectrain.decoding.acceptance import AcceptanceRule, Match, OpenSampling, SamplingRule
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.acceptance.sequential import VerifiedTree
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities, Capture
from spectrain.drafters.context import Context
from spectrain.models.attention import ATTENTION_NAME
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Rollout, Static, TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import TokenTree
from tests.installed import load_cases

# The target's and the drafter's distribution after each token. Of some hundred random tables, these
# show best what happens where block verification uses a coin twice: after four tokens a distance of
# 0.066 from the target's distribution.
P = torch.tensor([[0.29, 0.34, 0.37], [0.45, 0.43, 0.12], [0.31, 0.28, 0.41]])
Q = torch.tensor([[0.05, 0.58, 0.37], [0.81, 0.05, 0.14], [0.87, 0.08, 0.05]])
LOG_Q = Q.log()
OTHER_Q = torch.tensor([[0.50, 0.10, 0.40], [0.20, 0.30, 0.50], [0.30, 0.60, 0.10]])
# The first token, which the prefill yields, and three more: 81 outcomes.
LENGTH = 4
PATHS = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]

Outputs = Sequence[tuple[int, ...]]


@cache
def make_known_target(dtype: torch.dtype = torch.float32) -> Target:
    """Make a Llama whose layers add nothing, so that its distribution after a token is that row of
    `P`.

    In bfloat16, its logits are the logarithms as rounded, and it is so wide that kernels run it.
    """
    vocab_size = len(P)
    width = 8 if dtype == torch.float32 else 64
    words = Tokenizer(WordLevel({str(number): number for number in range(vocab_size)}))
    words.pre_tokenizer = Whitespace()
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    # As loaded targets have it, so that rounds can be captured and texts pooled.
    model.set_attn_implementation(ATTENTION_NAME)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, width))
        model.lm_head.weight.zero_()
        # The final norm scales the one of an embedding to the root of the width.
        model.lm_head.weight[:, :vocab_size] = P.log().T / width**0.5
    target = Target(model, PreTrainedTokenizerFast(tokenizer_object=words), "known", "")
    target.pack_weights()
    return target


class Table(Drafter):
    """Drafts from the last token alone, by a table [V, V]."""

    capabilities = Capabilities(capture=Capture(), scores_path_at_once=True)

    def __init__(self, log_q: Tensor = LOG_Q) -> None:
        super().__init__()
        self.log_q = log_q

    def draft(self, context: Context) -> Draft:
        return Draft(Lookup(self.log_q, context.root))


class Lookup(Rollout):
    """Looks log q up by token."""

    def __init__(self, log_q: Tensor, root: Tensor) -> None:
        self.log_q, self.root = log_q, root

    def start(self) -> Tensor:
        return self.log_q[self.root[:, None]]

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.log_q[tokens]


def speed_up(rule: type[SamplingRule]) -> type[SamplingRule]:
    """Return a rule that computes each distribution once, as a numpy array; small arrays are
    slow in torch.
    """
    if not hasattr(rule, "_make_verified_tree"):
        return rule

    class Quick(rule):  # type: ignore[misc, valid-type]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.arrays: dict[tuple[str, bytes], Any] = {}

        def remember(self, name: str, key: bytes, compute: Callable[[], Any]) -> Any:
            if (name, key) not in self.arrays:
                self.arrays[name, key] = compute()
            return self.arrays[name, key]

        def _make_verified_tree(self, tree: TokenTree, logits: Tensor, b: int) -> VerifiedTree:
            verified = super()._make_verified_tree(tree, logits, b)
            inputs = {"p": logits.numpy(), **({} if tree.q is None else {"q": tree.q.numpy()})}

            def lookup(name: str, compute: Callable[[int], Tensor], node: int) -> Any:
                return self.remember(
                    name, inputs[name][b, node].tobytes(), lambda: compute(node).numpy()
                )

            p, q = verified.p, verified.q
            object.__setattr__(verified, "p", lambda node: lookup("p", p, node))
            object.__setattr__(verified, "q", lambda node: lookup("q", q, node))
            if (draws := getattr(verified, "draws", None)) is not None:
                as_arrays = cache(
                    lambda node: [(child, drawn_from.numpy()) for child, drawn_from in draws(node)]
                )
                object.__setattr__(verified, "draws", as_arrays)
            return verified

        def _stay_chances(self, p: Any, q: Any, count: int) -> Any:
            key = p.tobytes() + q.tobytes() + bytes([count])
            return self.remember("stay", key, lambda: super(Quick, self)._stay_chances(p, q, count))

    return Quick


@dataclass(frozen=True)
class Batch:
    """Copies of one prompt to continue, each with random draws of its own."""

    target: Target
    prompt: list[int]
    rule: AcceptanceRule
    length: int  # tokens to emit
    keys: list[int]  # keys of the random draws
    drafter: Drafter | None
    builder: TreeBuilder | None

    @property
    def prompts(self) -> list[list[int]]:
        return [self.prompt] * len(self.keys)


def decode_eagerly(batch: Batch) -> Outputs:
    """Decode in the eager loop."""
    generations = decode(
        batch.target,
        batch.prompts,
        batch.rule,
        batch.length,
        batch.drafter,
        batch.builder,
        batch.keys,
        ignore_eos=True,
    )
    return outputs_of(generations, batch.length)


@dataclass(frozen=True)
class Case:
    """A rule with a tree that it takes."""

    name: str
    rule: type[SamplingRule]
    make_builder: Callable[[int], TreeBuilder | None]  # from a seed
    make_drafter: Callable[[Target], Drafter] = lambda target: Table()
    settings: Mapping[str, float] = field(default_factory=dict)  # of the target's distribution
    prompt: Sequence[int] = (0,)  # ends with token 0
    length: int = LENGTH
    decode: Callable[[Batch], Outputs] = decode_eagerly
    batch_size: int = 2500
    dtype: torch.dtype = torch.float32

    def sample(self, count: int, seed: int, batch_size: int | None = None) -> Outputs:
        """Continue the prompt `count` times. Cases share no draws, so that their p-values are
        independent.
        """
        seed += 1000 * (crc32(self.name.encode()) % 100_000)
        target = make_known_target(self.dtype)
        rule = speed_up(self.rule)(seed=seed, **self.settings)
        size = batch_size or self.batch_size
        outputs: list[tuple[int, ...]] = []
        for first in range(0, count, size):
            keys = list(range(first, min(count, first + size)))
            builder = self.make_builder(seed)
            drafter = None if builder is None else self.make_drafter(target)
            outputs += self.decode(
                Batch(target, list(self.prompt), rule, self.length, keys, drafter, builder)
            )
        return outputs

    def test(self, outputs: Outputs) -> Fit:
        """Compare texts with the exact distribution."""
        return test_fit(outputs, exact_joint(self.length, self.dtype, **self.settings))

    def test_positions(self, outputs: Outputs) -> list[Fit]:
        """Compare the tokens at each position with their exact distribution. These tests have few
        outcomes, so they find smaller distances than the test of whole texts.
        """
        joint = exact_joint(self.length, self.dtype, **self.settings)
        fits = []
        for position in range(self.length):
            chances = Counter[tuple[int, ...]]()
            for path, chance in joint.items():
                chances[path[position : position + 1]] += chance  # type: ignore[assignment]
            fits.append(test_fit([text[position : position + 1] for text in outputs], chances))
        return fits


def static(children: Any) -> Callable[[int], TreeBuilder]:
    return lambda seed: Static(paths=PATHS, children=children, seed=seed)


def chain(depth: int) -> Callable[[int], TreeBuilder]:
    return lambda seed: Chain(depth, "sampled", seed=seed)


CASES = [
    Case("chain, chain of 3", SpeculativeSampling, chain(3)),
    Case("block, chain of 3", Block, chain(3)),
    Case("block, chain that stops", Block, lambda seed: Chain(3, "sampled", seed=seed, stop=0.55)),
    Case("recursive, chain of 3", RecursiveRejection, chain(3)),
    Case("recursive, sampled tree", RecursiveRejection, static("sampled")),
    Case("recursive, tree without replacement", RecursiveRejection, static("without_replacement")),
    Case("match, most likely tree", Match, lambda seed: Eagle2(3, 6, 2)),
    Case("match, sampled tree", Match, static("sampled")),
    Case("sample, chain of 3", OpenSampling, chain(3)),
    Case("match, no drafter", Match, lambda seed: None),
    Case("recursive, no drafter", RecursiveRejection, lambda seed: None),
    Case("block, no drafter", Block, lambda seed: None),
    *load_cases(__name__).get("CASES", ()),
]


def shape_row(
    row: Sequence[float], temperature: float = 1.0, top_k: float = 0, top_p: float = 1.0
) -> list[float]:
    """Return a distribution after temperature, top-k and top-p."""
    weights = [chance ** (1 / temperature) for chance in row]
    order = sorted(range(len(row)), key=lambda token: -weights[token])[: int(top_k) or len(row)]
    total = sum(weights[token] for token in order)
    nucleus = list[int]()
    while sum(weights[token] for token in nucleus) < top_p * total and len(nucleus) < len(order):
        nucleus.append(order[len(nucleus)])
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(row))]


@cache
def exact_joint(
    length: int = LENGTH, dtype: torch.dtype = torch.float32, **settings: float
) -> dict[tuple[int, ...], float]:
    """Return the probability of every text of `length` tokens after token 0."""
    rows = [shape_row(row, **settings) for row in P.log().to(dtype).double().softmax(-1).tolist()]
    joint = {}
    for path in itertools.product(range(len(P)), repeat=length):
        joint[path] = float(
            np.prod([rows[before][token] for before, token in zip((0, *path), path)])
        )
    return joint


@dataclass(frozen=True)
class Fit:
    """How texts fit the exact distribution."""

    p_value: float  # of Pearson's chi-squared test
    distance: float  # total variation of the frequencies from the distribution
    visible: float  # a distance that the test finds with a chance of 99 %, whatever its form


def test_fit(outputs: Outputs, joint: Mapping[tuple[int, ...], float], level: float = 1e-4) -> Fit:
    """Compare texts with their exact distribution; `level` is the p-value below which a test fails.

    Outcomes that are expected fewer than 5 times count as one.
    """
    counts = Counter(outputs)
    total = len(outputs)
    assert all(joint.get(path, 0) > 0 for path in counts), "a text is no outcome"
    cells = [(chance * total, counts[path]) for path, chance in joint.items() if chance > 0]
    rare = [cell for cell in cells if cell[0] < 5]
    common = [cell for cell in cells if cell[0] >= 5]
    if rare:
        common.append((sum(cell[0] for cell in rare), sum(cell[1] for cell in rare)))
    expected, observed = torch.tensor(common, dtype=torch.float64).T
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(common) - 1
    return Fit(
        upper_tail(statistic, freedom),
        float((observed - expected).abs().sum()) / 2 / total,
        visible_distance(total, freedom, level),
    )


test_fit.__test__ = False  # type: ignore[attr-defined]


def upper_tail(statistic: Tensor, freedom: int) -> float:
    """Return the chance of a larger chi-squared statistic."""
    return float(
        torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2)
    )


def visible_distance(count: int, freedom: int, level: float) -> float:
    """Return the total variation distance d at which the test of `count` texts fails with a chance
    of 99 %.

    The statistic's noncentrality is at least 4 d^2 `count`, by the inequality of Cauchy and
    Schwarz; its distribution is approximated by the normal one.
    """
    critical = next(
        x
        for x in range(freedom, 10 * freedom + 200)
        if upper_tail(torch.tensor(float(x)).double(), freedom) < level
    )
    shift = next(
        x for x in range(10_000) if freedom + x - 2.33 * (2 * freedom + 4 * x) ** 0.5 > critical
    )
    return float((shift / 4 / count) ** 0.5)


def outputs_of(generations: Sequence[Generation], length: int = LENGTH) -> Outputs:
    """Return the generated tokens."""
    assert all(len(generation.output) == length for generation in generations)
    return [tuple(generation.output) for generation in generations]


def print_table(cases: Sequence[Case], count: int, seeds: Sequence[int]) -> list[float]:
    """Print a row of every case: texts and, by seed, p-values and the distance. Return all
    p-values.
    """
    values = list[float]()
    print(
        "| rule and tree | texts of a seed | p by seed | distance, all seeds | visible "
        "|\n|---|---|---|---|---|"
    )
    for case in cases:
        samples = [case.sample(count, seed) for seed in seeds]
        own = [case.test(sample).p_value for sample in samples]
        fit = case.test([text for sample in samples for text in sample])
        listed = " ".join(f"{value:.2g}" for value in own)
        print(
            f"| {case.name} | {count} | {listed} | {fit.distance:.4f} | {fit.visible:.4f} |",
            flush=True,
        )
        values += own
    return values


def describe_uniformity(values: Sequence[float]) -> str:
    """Describe how far p-values are from uniform ones, by the smallest and by the
    Kolmogorov-Smirnov distance.

    The distance exceeds 1.63 divided by the root of their number with a chance of 1 %, if they are
    independent.
    """
    ordered = sorted(values)
    count = len(values)
    distance = max(
        max(value - rank / count, (rank + 1) / count - value) for rank, value in enumerate(ordered)
    )
    return (
        f"{count} p-values: smallest {ordered[0]:.2g}, expected about {1 / count:.2g}; distance "
        f"from uniform {distance:.3f}, at the level of 1 % {1.63 / count**0.5:.3f}"
    )
