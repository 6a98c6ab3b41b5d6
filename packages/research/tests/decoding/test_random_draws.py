"""No random number serves two decisions: the draws of whole decodings, by key.
docs/random-draws.md has the proof.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from packages.research.tests.decoding.known_variants import CASCADES, LEFT_OUT, LONG, WINDOWS
from spectrain.decoding.acceptance import matching, sequential
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection
from spectrain.decoding.acceptance.sequential import SequentialRule
from spectrain.kernels import counter
from spectrain.randomness import SAMPLE
from spectrain.trees import growing
from spectrain_research.dyspec import builder as dyspec
from spectrain_research.union import drafter as union
from tests.decoding.known_target import CASES, Case

TOKENS = 12


@dataclass
class Draws:
    """The random numbers of decodings."""

    # How often each number was drawn for a draft, a coin or the token after a path: by its key and
    # its counter.
    numbers: Counter[tuple[int, int]] = field(default_factory=Counter)
    # The tokens of the target that each key was drawn for: text and position. They are drawn again
    # for every node before them.
    target_tokens: dict[int, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    # Seeds of generators.
    generators: Counter[int] = field(default_factory=Counter)

    def count_repeated(self) -> int:
        """Count the numbers that serve two decisions."""
        drawn_keys = {key for key, _ in self.numbers}
        return (
            sum(count > 1 for count in self.numbers.values())
            + sum(count > 1 for count in self.generators.values())
            + sum(
                len(tokens) > 1 or key in drawn_keys for key, tokens in self.target_tokens.items()
            )
        )


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Draws:
    """Record all draws of decodings."""
    found = Draws()

    def record_noise(key: Tensor, size: int) -> Tensor:
        found.numbers.update(
            (part, index) for part in key.flatten().tolist() for index in range(size)
        )
        return counter.gumbel_noise(key, size)

    def record_coin(key: int, number: int) -> float:
        found.numbers[key, number] += 1
        return counter.host_uniform(key, number)

    def record_target_tokens(key: int, sequence_ids: Tensor, positions: Tensor) -> None:
        for row, own_positions in zip(sequence_ids.tolist(), positions.tolist()):
            for position in own_positions:
                found.target_tokens[counter.fold_host(counter.fold_host(key, row), position)].add(
                    (row, position)
                )

    choose_tokens: Callable[..., Tensor] = matching.SamplingRule.choose_tokens
    tree_match: Callable[..., Any] = matching.tree_match
    keyed_generator: Callable[..., torch.Generator] = dyspec.keyed_generator

    def record_choice(
        rule: matching.SamplingRule, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> Tensor:
        record_target_tokens(counter.host_key(SAMPLE, rule.seed), sequence_ids, positions)
        return choose_tokens(rule, logits, sequence_ids, positions)

    def record_match(nodes: Any, logits: Tensor, spec: Any) -> Any:
        record_target_tokens(spec.key, spec.sequence_keys, spec.positions)
        return tree_match(nodes, logits, spec)

    def record_generator(*parts: int) -> torch.Generator:
        source = keyed_generator(*parts)
        found.generators[source.initial_seed()] += 1
        return source

    monkeypatch.setattr(growing, "gumbel_noise", record_noise)
    monkeypatch.setattr(sequential, "gumbel_noise", record_noise)
    monkeypatch.setattr(sequential, "host_uniform", record_coin)
    monkeypatch.setattr(matching.SamplingRule, "choose_tokens", record_choice)
    monkeypatch.setattr(matching, "tree_match", record_match)
    monkeypatch.setattr(dyspec, "keyed_generator", record_generator)
    # For all texts at once it computes coins that no text flips; node by node it decides the same.
    monkeypatch.setattr(RecursiveRejection, "__call__", SequentialRule.__call__)
    return found


def decode_alone(case: Case, count: int = 3) -> None:
    """Decode texts one by one: rounds of a batch also compute draws of texts that are done."""
    replace(case, length=TOKENS).sample(count, seed=0, batch_size=1)


# Of a single drafter's tree, specinfer decides as recursive does.
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name != "specinfer, chain of 3"],
    ids=lambda case: case.name,
)
def test_no_number_serves_two_decisions(case: Case, draws: Draws) -> None:
    decode_alone(case)
    assert draws.target_tokens and draws.count_repeated() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*LONG, *LEFT_OUT, *CASCADES, *WINDOWS], ids=lambda case: case.name
)
def test_no_number_serves_two_decisions_of_other_rounds(case: Case, draws: Draws) -> None:
    decode_alone(case)
    assert draws.target_tokens and draws.count_repeated() == 0


def find_case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_coins_keyed_by_position_alone_are_found(
    draws: Draws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Block, "revisits_positions", False)
    decode_alone(find_case("block, chain of 3"))
    assert draws.count_repeated() > 0


def test_equal_seeds_of_two_drafters_are_found(
    draws: Draws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(union, "SEED_STEP", 0)
    decode_alone(find_case("specinfer, union of two"))
    assert draws.count_repeated() > 0
