"""A target whose next-token table is known, and what compares decoded texts with it. Shapes: V vocabulary.

`python -m tests.decoding.known_target` prints the table of rules, texts and p-values of the lossless rules.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spectrain.decoding.acceptance import AcceptanceRule, Match, OpenSampling, SamplingRule
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.acceptance.sequential import VerifiedTree
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.experimental.dyspec.builder import DySpec
from spectrain.experimental.transport.linear_program import TruncatedLinearProgram
from spectrain.experimental.transport.rules import ImportanceSampling, KSeq, SpecHub, Transport
from spectrain.experimental.traversal.rule import Traversal
from spectrain.experimental.union.drafter import UnionDrafter
from spectrain.experimental.union.rule import MultiStepSampling
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Rollout, Static, TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import TokenTree

# The target's and the drafter's distribution after each token. Of some hundred random tables, these show best what happens
# where block verification uses a coin twice: after four tokens a distance of 0.066 from the target's distribution.
P = torch.tensor([[0.29, 0.34, 0.37], [0.45, 0.43, 0.12], [0.31, 0.28, 0.41]])
Q = torch.tensor([[0.05, 0.58, 0.37], [0.81, 0.05, 0.14], [0.87, 0.08, 0.05]])
LOG_Q = Q.log()
OTHER_Q = torch.tensor([[0.50, 0.10, 0.40], [0.20, 0.30, 0.50], [0.30, 0.60, 0.10]])
# The first token, which the prefill yields, and three more: 81 outcomes.
LENGTH = 4
PATHS = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]

Outputs = Sequence[tuple[int, ...]]


def make_known_target(p: Tensor = P) -> Target:
    """Make a Llama whose layers add nothing, so that its distribution after a token is that row of `p` [V, V]."""
    vocab_size, width = len(p), 8
    words = Tokenizer(WordLevel({str(number): number for number in range(vocab_size)}))
    words.pre_tokenizer = Whitespace()
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, width))
        model.lm_head.weight.zero_()
        # The final norm scales the one of an embedding to the root of the width.
        model.lm_head.weight[:, :vocab_size] = p.log().T / width**0.5
    return Target(model, PreTrainedTokenizerFast(tokenizer_object=words), "known", "")


class Table(Drafter):
    """Drafts from the last token alone, by a table [V, V]."""

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


class UnionOfTables(UnionDrafter):
    """The union of two tables' trees."""

    def __init__(self) -> None:
        Drafter.__init__(self)
        self.inner = nn.ModuleList([Table(), Table(OTHER_Q.log())])
        self.layers = ()


def speed_up(rule: type[SamplingRule]) -> type[SamplingRule]:
    """Return a rule that computes each distribution once, as a numpy array; small arrays are slow in torch."""
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
                return self.remember(name, inputs[name][b, node].tobytes(), lambda: compute(node).numpy())

            p, q = verified.p, verified.q
            object.__setattr__(verified, "p", lambda node: lookup("p", p, node))
            object.__setattr__(verified, "q", lambda node: lookup("q", q, node))
            return verified

        def _stay_chances(self, p: Any, q: Any, count: int) -> Any:
            key = p.tobytes() + q.tobytes() + bytes([count])
            return self.remember("stay", key, lambda: super(Quick, self)._stay_chances(p, q, count))

    return Quick


@dataclass(frozen=True)
class Case:
    """A rule with a tree that it takes."""

    name: str
    rule: type[SamplingRule]
    make_builder: Callable[[int], TreeBuilder | None]  # from a seed
    drafter: Callable[[], Drafter] = Table
    quick_texts: int = 3000

    def decode(self, target: Target, count: int, seed: int, batch_size: int = 2500, length: int = LENGTH) -> list[Generation]:
        """Continue a prompt of one token `count` times."""
        rule: AcceptanceRule = speed_up(self.rule)(seed=seed)
        generations = []
        for first in range(0, count, batch_size):
            keys = list(range(first, min(count, first + batch_size)))
            builder = self.make_builder(seed)
            drafter = None if builder is None else self.drafter()
            generations += decode(target, [[0]] * len(keys), rule, length, drafter, builder, keys, ignore_eos=True)
        return generations


def static(children: Any) -> Callable[[int], TreeBuilder]:
    return lambda seed: Static(paths=PATHS, children=children, seed=seed)


def chain(depth: int) -> Callable[[int], TreeBuilder]:
    return lambda seed: Chain(depth, "sampled", seed=seed)


CASES = [
    Case("chain, chain of 3", SpeculativeSampling, chain(3), quick_texts=20_000),
    Case("block, chain of 3", Block, chain(3), quick_texts=6000),
    Case("block, chain that stops", Block, lambda seed: Chain(3, "sampled", seed=seed, stop=0.55)),
    Case("recursive, chain of 3", RecursiveRejection, chain(3), quick_texts=20_000),
    Case("recursive, sampled tree", RecursiveRejection, static("sampled"), quick_texts=20_000),
    Case("recursive, tree without replacement", RecursiveRejection, static("without_replacement"), quick_texts=20_000),
    Case("recursive, dyspec", RecursiveRejection, lambda seed: DySpec(3, 5, seed=seed)),
    Case("traversal, chain of 3", Traversal, chain(3)),
    Case("traversal, sampled tree", Traversal, static("sampled")),
    Case("traversal, tree without replacement", Traversal, static("without_replacement")),
    Case("traversal, top and sampled", Traversal, static("top_and_sampled")),
    Case("traversal, dyspec", Traversal, lambda seed: DySpec(3, 6, seed=seed)),
    Case("kseq, sampled tree", KSeq, static("sampled")),
    Case("importance, sampled tree", ImportanceSampling, static("sampled")),
    Case("programme, sampled tree", TruncatedLinearProgram, static("sampled")),
    Case("transport, top and sampled", Transport, static("top_and_sampled")),
    Case("spechub, top and sampled", SpecHub, static("top_and_sampled")),
    Case("specinfer, chain of 3", MultiStepSampling, chain(3), quick_texts=20_000),
    Case("specinfer, union of two", MultiStepSampling, chain(2), UnionOfTables),
    Case("match, most likely tree", Match, lambda seed: Eagle2(3, 6, 2), quick_texts=20_000),
    Case("match, sampled tree", Match, static("sampled"), quick_texts=20_000),
    Case("sample, chain of 3", OpenSampling, chain(3), quick_texts=20_000),
    Case("match, no drafter", Match, lambda seed: None, quick_texts=20_000),
    Case("recursive, no drafter", RecursiveRejection, lambda seed: None, quick_texts=20_000),
    Case("block, no drafter", Block, lambda seed: None),
]


@cache
def exact_joint(length: int = LENGTH) -> dict[tuple[int, ...], float]:
    """Return the probability of every text of `length` tokens after the prompt."""
    joint = {}
    for path in itertools.product(range(len(P)), repeat=length):
        joint[path] = float(np.prod([float(P[before, token]) for before, token in zip((0, *path), path)]))
    return joint


@dataclass(frozen=True)
class Fit:
    """How texts fit the exact distribution."""

    p_value: float  # of Pearson's chi-squared test
    distance: float  # total variation of the frequencies from the distribution
    visible: float  # a distance that the test finds with a chance of 99 %, whatever its form


def test_fit(outputs: Outputs, length: int = LENGTH, level: float = 1e-4) -> Fit:
    """Compare texts with the exact distribution; `level` is the p-value below which a test fails."""
    joint, counts = exact_joint(length), Counter(outputs)
    expected = torch.tensor([chance * len(outputs) for chance in joint.values()], dtype=torch.float64)
    observed = torch.tensor([counts[path] for path in joint], dtype=torch.float64)
    assert observed.sum() == len(outputs), "a text is no outcome"
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(joint) - 1
    return Fit(
        upper_tail(statistic, freedom),
        float((observed - expected).abs().sum()) / 2 / len(outputs),
        visible_distance(len(outputs), freedom, level),
    )


test_fit.__test__ = False  # type: ignore[attr-defined]


def upper_tail(statistic: Tensor, freedom: int) -> float:
    """Return the chance of a larger chi-squared statistic."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))


def visible_distance(count: int, freedom: int, level: float) -> float:
    """Return the total variation distance d at which the test of `count` texts fails with a chance of 99 %.

    The statistic's noncentrality is at least 4 d^2 `count`, by the inequality of Cauchy and Schwarz; its distribution is
    approximated by the normal one.
    """
    critical = next(
        x for x in range(freedom, 10 * freedom + 200) if upper_tail(torch.tensor(float(x)).double(), freedom) < level
    )
    shift = next(x for x in range(10_000) if freedom + x - 2.33 * (2 * freedom + 4 * x) ** 0.5 > critical)
    return float((shift / 4 / count) ** 0.5)


def outputs_of(generations: Sequence[Generation], length: int = LENGTH) -> Outputs:
    """Return the generated tokens."""
    assert all(len(generation.output) == length for generation in generations)
    return [tuple(generation.output) for generation in generations]


def print_table(count: int, seeds: Sequence[int], cases: Sequence[Case] = CASES) -> None:
    """Print a row of every case: texts and, by seed, p-values and the distance."""
    target = make_known_target()
    print("| rule and tree | texts of a seed | p by seed | distance, all seeds | visible |\n|---|---|---|---|---|")
    for case in cases:
        samples = [outputs_of(case.decode(target, count, seed)) for seed in seeds]
        values = " ".join(f"{test_fit(sample).p_value:.2g}" for sample in samples)
        fit = test_fit([text for sample in samples for text in sample])
        print(f"| {case.name} | {count} | {values} | {fit.distance:.4f} | {fit.visible:.4f} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print_table(10_000, (0, 1, 2))
