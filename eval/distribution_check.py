"""Whether sampled answers have the target's distribution, on this model, by real decoding: what
`eval.check=distribution` checks.

Each system continues a few prompts many times, by the loop that was scored. Its texts are compared
with the target's next-token tables where top-k or top-p leaves so few tokens that all texts can be
enumerated, and else with as many texts drawn without a drafter. No text shares random draws with
another. Four kinds of comparison are made:

- the text: the joint of its first tokens;
- each position: the token there;
- each round: its first token, given the text before it. A random number that two rounds share shows
  here first;
- what is reachable: whether texts have tokens that top-k or top-p leaves out.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spectrain.data.image_processor import have_images
from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.generation import Generation
from spectrain.eval.distribution import (
    POWER,
    DistributionTest,
    Outcome,
    Stratum,
    compare_strata,
    estimate_distance,
    test_reachable,
)
from spectrain.eval.systems import Decoder, System
from spectrain.models.reference_model import reference_model
from spectrain.models.target import Target

FALSE_ALARMS = 1e-3
"""Chance that a score whose systems are all lossless calls any of them different."""
NUM_PROMPTS = 4
NUM_TOKENS = 6
"""Tokens of a text: two rounds or more."""
MAX_CONTEXTS = 2000
"""Most beginnings of a text whose next-token tables are computed."""
CONTEXTS_AT_ONCE = 64
TEXTS_TOGETHER = 50
FIRST_KEY = 1 << 32
"""Key of the draws of the first text, beyond the keys of scored answers."""
END = -1
"""Stands for the token after the last one of a text that has ended."""

NextToken = dict[int, float]
OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class EnumeratedTexts:
    """All texts of a prompt with their probabilities."""

    # Beginning -> probabilities of the next token.
    tables: dict[Outcome, NextToken]
    # Text -> its probability.
    joint: dict[Outcome, float]

    def marginal(self, position: int) -> dict[Outcome, float]:
        """Return the probabilities of the token at a position, of all texts."""
        chances: dict[Outcome, float] = defaultdict(float)
        for text, chance in self.joint.items():
            chances[token_at(text, position)] += chance
        return dict(chances)


def token_at(text: Sequence[int], position: int) -> Outcome:
    """Return the token of a text at a position; `END` where it has ended before."""
    return (text[position] if position < len(text) else END,)


@dataclass(frozen=True)
class PromptTexts:
    """The texts that continue one prompt."""

    drafted: list[Generation]
    # Texts without a drafter; empty where all texts are enumerated.
    plain: list[Outcome]
    enumerated: EnumeratedTexts | None

    @property
    def texts(self) -> list[Outcome]:
        return [tuple(generation.output) for generation in self.drafted]

    def joint(self) -> Stratum:
        """Return the texts as outcomes."""
        chances = None if self.enumerated is None else self.enumerated.joint
        return Stratum(self.texts, chances, tuple(self.plain))

    def at_position(self, position: int) -> Stratum:
        """Return the tokens at a position as outcomes."""
        return Stratum(
            [token_at(text, position) for text in self.texts],
            None if self.enumerated is None else self.enumerated.marginal(position),
            [token_at(text, position) for text in self.plain],
        )

    def of_round(self, number: int) -> Iterator[Stratum]:
        """Yield the first tokens of the round of this number, from 1 on, by the text before them.

        Where a round begins depends on the text before it alone and on draws of its own, so its
        token has the target's distribution after that text.
        """
        drafted: dict[Outcome, list[Outcome]] = defaultdict(list)
        for generation in self.drafted:
            start = 1 + sum(generation.round_lengths[: number - 1])
            if number <= len(generation.round_lengths) and start < len(generation.output):
                before = tuple(generation.output[:start])
                drafted[before].append((generation.output[start],))
        if self.enumerated is not None:
            for before, tokens in drafted.items():
                table = self.enumerated.tables.get(before)
                if table is not None:
                    yield Stratum(tokens, {(token,): chance for token, chance in table.items()})
            return
        plain: dict[Outcome, list[Outcome]] = defaultdict(list)
        for text in self.plain:
            for start in range(1, len(text)):
                plain[text[:start]].append((text[start],))
        for before, tokens in drafted.items():
            yield Stratum(tokens, None, plain[before])


def enumerate_texts(
    target: Target, rule: AcceptanceRule, prompt: list[int], num_tokens: int
) -> EnumeratedTexts | None:
    """Compute the probabilities of all texts after a prompt, by `transformers`; None where there
    are too many, or where rounding decides which tokens are reachable, as in half precision.
    """
    if target.dtype != torch.float32 or have_images([prompt]):
        return None
    tables: dict[Outcome, NextToken] = {}
    joint: dict[Outcome, float] = {}
    open_texts: dict[Outcome, float] = {(): 1.0}
    num_contexts = 0
    with reference_model(target) as model, torch.inference_mode():
        for _ in range(num_tokens):
            num_contexts += len(open_texts)
            if num_contexts > MAX_CONTEXTS:
                return None
            rows = _next_tables(target, model, rule, prompt, list(open_texts))
            if rows is None:
                return None
            tables |= rows
            longer = {
                (*text, token): chance * share
                for text, chance in open_texts.items()
                for token, share in rows[text].items()
            }
            ended = {text for text in longer if text[-1] in target.stop_ids}
            joint |= {text: longer[text] for text in ended}
            open_texts = {text: chance for text, chance in longer.items() if text not in ended}
    return EnumeratedTexts(tables, joint | open_texts)


def _next_tables(
    target: Target, model: Any, rule: AcceptanceRule, prompt: list[int], texts: list[Outcome]
) -> dict[Outcome, NextToken] | None:
    """Compute the next-token tables after texts of one length; None where one is too long."""
    tables = {}
    for first in range(0, len(texts), CONTEXTS_AT_ONCE):
        part = texts[first : first + CONTEXTS_AT_ONCE]
        tokens = torch.tensor([[*prompt, *text] for text in part], device=target.device)
        chances = rule.target_distribution(model(tokens).logits[:, -1]).cpu()
        if int((chances > 0).sum(-1).max()) > MAX_CONTEXTS:
            return None
        for text, row in zip(part, chances):
            reachable = row.nonzero().flatten().tolist()
            tables[text] = dict(zip(reachable, row[reachable].tolist()))
    return tables


@dataclass(frozen=True)
class DistributionCheck:
    """Checks the distribution of the texts of several systems."""

    decoder: Decoder
    # Prompts to continue, shortest first.
    prompts: Sequence[list[int]]
    # Texts of each system, over all prompts.
    num_texts: int
    batch_size: int
    max_new_tokens: int = NUM_TOKENS
    on_progress: OnProgress = lambda text: None

    @property
    def num_tokens(self) -> int:
        return min(NUM_TOKENS, self.max_new_tokens)

    def run(self, systems: Sequence[System]) -> dict[str, dict[str, Any]]:
        """Return the entry `distribution` of each system's summary."""
        prompts = self.prompts[:NUM_PROMPTS]
        share = -(-self.num_texts // len(prompts))
        target = self.decoder.target
        references: list[tuple[list[Outcome], EnumeratedTexts | None]] = []
        for number, prompt in enumerate(prompts):
            self.on_progress("comparing the distribution of answers: the target's own")
            enumerated = enumerate_texts(target, self.decoder.rule, prompt, self.num_tokens)
            # Known texts need no second sample.
            texts = [] if enumerated else self._decode(None, prompt, number * share, share)
            references.append(([tuple(text.output) for text in texts], enumerated))
        results = {}
        for order, system in enumerate(systems, 1):
            self.on_progress(f"comparing the distribution of answers: {system.label}")
            first = order * share * len(prompts)
            results[system.name] = [
                PromptTexts(
                    self._decode(system, prompt, first + number * share, share), plain, enumerated
                )
                for number, (prompt, (plain, enumerated)) in enumerate(zip(prompts, references))
            ]
        comparisons = {name: list(compare_texts(texts)) for name, texts in results.items()}
        count = sum(map(len, comparisons.values()))
        level = FALSE_ALARMS / max(1, count)
        return {
            name: summarize(results[name], comparisons[name], level, self.num_tokens)
            for name in results
        }

    def _decode(
        self, system: System | None, prompt: list[int], first: int, count: int
    ) -> list[Generation]:
        """Continue a prompt `count` times."""
        session = self.decoder.session(system)
        generations: list[Generation] = []
        most = self._choose_batch_size(system)
        for start in range(0, count, most):
            size = min(most, count - start)
            keys = [FIRST_KEY + first + start + number for number in range(size)]
            if start == 0 or size < most:
                session.warm_up([prompt] * size, self.num_tokens, keys)
            generations += session.decode([prompt] * size, self.num_tokens, keys)
        return generations

    def _choose_batch_size(self, system: System | None) -> int:
        """Return how many texts are decoded together: as many as were scored where the number
        decides what is drafted, and else more, which is faster.
        """
        if system is not None:
            builder = system.builder
            if builder.traits.uses_latency or builder.round_policy.decides_to_draft:
                return self.batch_size
        return max(self.batch_size, TEXTS_TOGETHER)


def compare_texts(prompts: Sequence[PromptTexts]) -> Iterator[DistributionTest]:
    """Make all comparisons of one system."""
    joints = [texts.joint() for texts in prompts]
    length = max(len(text) for texts in prompts for text in texts.texts)
    rounds = max(len(generation.round_lengths) for texts in prompts for generation in texts.drafted)
    by_position = [[texts.at_position(position) for texts in prompts] for position in range(length)]
    by_round = [
        [stratum for texts in prompts for stratum in texts.of_round(number)]
        for number in range(1, rounds + 1)
    ]
    comparisons = [
        compare_strata("text", joints),
        *(compare_strata(f"position {n}", strata) for n, strata in enumerate(by_position, 1)),
        *(compare_strata(f"round {n}", strata) for n, strata in enumerate(by_round, 1)),
        test_reachable("reachable tokens", joints),
    ]
    yield from (comparison for comparison in comparisons if comparison is not None)


def summarize(
    prompts: Sequence[PromptTexts],
    comparisons: Sequence[DistributionTest],
    level: float,
    num_tokens: int,
) -> dict[str, Any]:
    """Return the entry of summary.json about one system."""
    distance = estimate_distance([texts.joint() for texts in prompts])
    generations = [generation for texts in prompts for generation in texts.drafted]
    depths = [depth for generation in generations for depth in generation.depths]
    drafted_rounds = sum(depth > 0 for depth in depths)
    # Texts in which nothing was drafted say nothing about a rule.
    can_tell = drafted_rounds > 0 and any(entry.freedom for entry in comparisons)
    different = [entry.name for entry in comparisons if entry.p_value < level]
    tests = [
        {
            "name": entry.name,
            "texts": entry.texts,
            "freedom": entry.freedom,
            "p_value": entry.p_value,
            "visible_distance": round(entry.visible_distance(level), 4) if entry.freedom else None,
        }
        for entry in comparisons
    ]
    return {
        "verdict": "different" if different else "same" if can_tell else "unknown",
        "different": different,
        "reference": "known next-token tables"
        if all(texts.enumerated for texts in prompts)
        else "plain sampling",
        "texts": len(generations),
        "prompts": len(prompts),
        "tokens": num_tokens,
        "rounds": len(depths),
        "drafted_rounds": drafted_rounds,
        "total_variation": round(max(0.0, distance.value), 4),
        "total_variation_ci95": [round(max(0.0, end), 4) for end in distance[1:]],
        "visible_distance": next(
            (test["visible_distance"] for test in tests if test["name"] == "text"), None
        ),
        "power": POWER,
        "false_alarms": FALSE_ALARMS,
        "level": level,
        "tests": tests,
    }
