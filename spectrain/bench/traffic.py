"""Bytes that decoding reads, a token: drafting as the drafter counts it, verification and plain steps from shapes alone.

On a machine whose memory is the limit, time is bytes: tokens a round say how much more a byte gives, whatever the machine.
"""

from collections.abc import Sequence
from typing import Any

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.models.traffic import BytesRead, key_bytes, weight_bytes
from spectrain.trees import TreeBuilder

NUM_DECODED_TOKENS = 64  # decoded to count


def verification_reads(target: Target, generation: Generation) -> BytesRead:
    """By the rounds of a text that was decoded alone; trees count as chains of as many nodes."""
    return forward_reads(target, len(generation.prompt), generation.round_lengths, generation.node_counts)


def autoregressive_reads(target: Target, generation: Generation) -> BytesRead:
    """By as many tokens, one a step."""
    count = sum(generation.round_lengths)
    return forward_reads(target, len(generation.prompt), [1] * count, [1] * count)


def forward_reads(target: Target, length: int, counts: Sequence[int], nodes: Sequence[int]) -> BytesRead:
    """By forwards over so many nodes, each of which makes a text of `length` tokens longer by its count."""
    keys = 0
    for count, size in zip(counts, nodes):
        keys += key_bytes(target, length, size)
        length += count
    return BytesRead(len(counts) * weight_bytes(target), keys)


def measure_traffic(target: Target, drafting: BytesRead, generations: Sequence[Generation]) -> dict[str, Any]:
    """Bytes a token of texts that were decoded one after another, by part, and all of a round over a plain step's."""
    tokens = sum(sum(one.round_lengths) for one in generations)
    verifying, plain = (
        sum((count(target, one) for one in generations), BytesRead()) for count in (verification_reads, autoregressive_reads)
    )
    parts = {"draft": drafting, "verify": verifying, "autoregressive": plain}
    found: dict[str, Any] = {
        name: {"weights": round(reads.weights / tokens), "keys": round(reads.keys / tokens)} for name, reads in parts.items()
    }
    return {**found, "ratio": round((drafting + verifying).total / plain.total, 4)}


def count_traffic(
    target: Target, drafter: Drafter, builder: TreeBuilder, rule: AcceptanceRule, prompt: list[int]
) -> dict[str, Any] | None:
    """The traffic of one answer to a prompt; None of a drafter that does not count."""
    if drafter.cost.read is None or not target.traits.attention_layers:
        return None
    length = min(NUM_DECODED_TOKENS, target.max_length - len(prompt))
    (generation,) = decode(target, [prompt], rule, length, drafter, builder, ignore_eos=True)
    if not generation.round_lengths:
        return None
    return {"prompt_tokens": len(prompt), **measure_traffic(target, drafter.cost.read(drafter), [generation])}
