"""Bytes that decoding reads, per token: drafting as the drafter counts it, verification and plain
steps from shapes.

Where memory bandwidth is the limit, time is bytes: tokens a round show how much more a byte yields,
on any machine.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter, drafting_cost
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.notes import EXTENSION_NOTES
from spectrain.models.target import Target
from spectrain.trees import TreeBuilder

from .bytes_read import BytesRead, key_bytes, weight_bytes
from .drafter import SelfDraftCost

NUM_DECODED_TOKENS = 64
"""Tokens that are decoded for the count."""


def verification_reads(target: Target, generation: Generation) -> BytesRead:
    """Return the bytes that the rounds of a text read, decoded in a batch of one; trees count as
    chains of as many nodes.
    """
    return forward_reads(
        target, len(generation.prompt), generation.round_lengths, generation.node_counts
    )


def autoregressive_reads(target: Target, generation: Generation) -> BytesRead:
    """Return the bytes that as many tokens read, one a step."""
    count = sum(generation.round_lengths)
    return forward_reads(target, len(generation.prompt), [1] * count, [1] * count)


def forward_reads(
    target: Target, length: int, counts: Sequence[int], nodes: Sequence[int]
) -> BytesRead:
    """Return the bytes of forwards over `nodes` nodes each, which lengthen a text of `length`
    tokens by `counts`.
    """
    keys = 0
    for count, size in zip(counts, nodes):
        keys += key_bytes(target, length, size)
        length += count
    return BytesRead(len(counts) * weight_bytes(target), keys)


def measure_traffic(
    target: Target, drafting: BytesRead, generations: Sequence[Generation]
) -> dict[str, Any]:
    """Return the bytes a token of texts decoded one after another, by part, and the ratio of a
    round's to a plain step's.
    """
    tokens = sum(sum(generation.round_lengths) for generation in generations)
    verifying, autoregressive = (
        sum((count(target, generation) for generation in generations), BytesRead())
        for count in (verification_reads, autoregressive_reads)
    )
    parts = {"draft": drafting, "verify": verifying, "autoregressive": autoregressive}
    bytes_by_part: dict[str, Any] = {
        name: {"weights": round(reads.weights / tokens), "keys": round(reads.keys / tokens)}
        for name, reads in parts.items()
    }
    return {**bytes_by_part, "ratio": round((drafting + verifying).total / autoregressive.total, 4)}


def count_traffic(
    target: Target, drafter: Drafter, builder: TreeBuilder, rule: AcceptanceRule, prompt: list[int]
) -> dict[str, Any] | None:
    """Return the traffic of one answer to a prompt, or None for a drafter that does not count
    its reads.
    """
    cost = drafting_cost(drafter)
    if not isinstance(cost, SelfDraftCost) or not target.architecture.attention_layers:
        return None
    length = min(NUM_DECODED_TOKENS, target.max_length - len(prompt))
    (generation,) = decode(target, [prompt], rule, length, drafter, builder, ignore_eos=True)
    if not generation.round_lengths:
        return None
    return {
        "prompt_tokens": len(prompt),
        **measure_traffic(target, cost.bytes_read(), [generation]),
    }


class Traffic(EvalExtension):
    """Adds the entry `traffic` to summary.json, for drafters that count what they read."""

    def report(self, results: Results) -> dict[str, Any]:
        candidate = results.candidate
        first = results.systems[0]
        prompt = results.turns[first.name][0].drafted.prompt
        traffic = count_traffic(
            candidate.target, candidate.drafter, candidate.builder, candidate.rule, prompt
        )
        return {} if traffic is None else {"traffic": traffic}


def describe_traffic(traffic: dict[str, Any]) -> Iterator[str]:
    """Say how many bytes decoding reads per token."""
    parts = ", ".join(
        f"{name} {sum(traffic[name].values()) / 1e6:.2f}"
        for name in ("draft", "verify", "autoregressive")
    )
    yield (
        f"Megabytes read per token after {traffic['prompt_tokens']} tokens: {parts}. A round "
        f"reads {traffic['ratio']:.2f} times what autoregressive decoding reads."
    )


EXTENSION_NOTES["traffic"] = describe_traffic
