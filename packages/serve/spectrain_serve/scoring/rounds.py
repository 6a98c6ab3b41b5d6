"""A server's answers in the terms of every other evaluation: turns of generations, with their
rounds and seconds.

Where the answers count their rounds, these are the rounds of an answer, in order, and a last one
that the limit cut is left out, as everywhere. Where only the server's totals are known, all rounds
count, the cut ones untrimmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from spectrain.decoding.generation import ROUND_PARTS, Generation
from spectrain.eval.metrics import Turn

from ..servers.base import Completion, DraftCounters, DraftedRounds
from .requests import LevelResult, ServedAnswer

# Of an answer without a drafter: every step emits one token.
NO_ROUNDS = DraftedRounds((), ())
CounterSource = Literal["requests", "totals", "none"]
"""Where the counts of a score come from: each answer, the server's totals before and after, or
nowhere.
"""


def seconds_per_token(completion: Completion) -> float | None:
    """Return the mean seconds of an answer's later tokens, by the engine's clock if there is
    one; None for a single token.
    """
    times = completion.times
    if times.engine_per_token is not None:
        return times.engine_per_token
    if not times.arrivals:
        return times.total / completion.num_tokens if completion.num_tokens > 1 else None
    (first, count), (last, _) = times.arrivals[0], times.arrivals[-1]
    later = completion.num_tokens - count
    return (last - first) / later if later > 0 else None


def find_counter_source(result: LevelResult) -> CounterSource:
    """Tell where the rounds of a level are known from."""
    if any(answer.completion.rounds is not None for answer in result.successes):
        return "requests"
    return "none" if result.counters is None else "totals"


def to_generation(
    answer: ServedAnswer, concurrency: int, rounds: DraftedRounds | None
) -> Generation:
    """Return an answer as a generation. A server does not time the parts of a round: all seconds
    are under `other`, and every round has the answer's mean."""
    completion = answer.completion
    prompt = (
        answer.request.prompt
        if isinstance(answer.request.prompt, list)
        else completion.prompt_ids or []
    )
    # Without token ids, only their number is known.
    output = (
        list(completion.token_ids)
        if completion.token_ids is not None
        else [-1] * completion.num_tokens
    )
    seconds = (seconds_per_token(completion) or 0.0) * max(0, len(output) - 1)
    accepted, drafted = ((), ()) if rounds is None else (rounds.accepted, rounds.drafted)
    # A step without a draft emits one token and is in no count.
    num_plain = len(output) - 1 - sum(accepted) - len(accepted)
    lengths = [*(count + 1 for count in accepted), *([1] * num_plain if rounds is not None else ())]
    depths = [*drafted, *[0] * (len(lengths) - len(drafted))]
    num_times = max(1, len(lengths))
    return Generation(
        list(prompt),
        output,
        round_lengths=lengths,
        depths=depths,
        node_counts=[depth + 1 for depth in depths],
        idle_counts=[0] * len(lengths),
        pruned_counts=[0] * len(lengths),
        judged_counts=[0] * len(lengths),
        round_seconds=[{**dict.fromkeys(ROUND_PARTS, 0.0), "other": seconds / num_times}]
        * num_times,
        is_cut=num_plain < 0,
        is_done=True,
        seconds={
            "prefill": completion.times.first_token,
            **dict.fromkeys(ROUND_PARTS, 0.0),
            "other": seconds,
        },
        batch_size=concurrency,
    )


def expand_counters(counters: DraftCounters) -> DraftedRounds:
    """Return rounds, in no order, that would be counted so."""
    reached = [counters.num_rounds, *counters.accepted_by_position]
    exact = [count - following for count, following in zip(reached, [*reached[1:], 0])]
    accepted = [length for length, count in enumerate(exact) for _ in range(count)]
    share, more = divmod(counters.num_drafted, max(1, counters.num_rounds))
    # Rounds that accepted most drafted most.
    drafted = [share] * (counters.num_rounds - more) + [share + 1] * more
    return DraftedRounds(tuple(accepted), tuple(drafted))


def make_turns(drafted: LevelResult, plain: LevelResult | None) -> list[Turn]:
    """Pair the answers of a level with those of the server without a drafter. A request that failed
    on either is left out.

    Without that server, the other half of a pair is an answer of one token. If only totals are
    known for all requests together, the first answer holds all rounds.
    """
    source = find_counter_source(drafted)
    turns = list[Turn]()
    for index, answer in enumerate(drafted.answers):
        other = None if plain is None else plain.answers[index]
        if answer is None or (plain is not None and other is None):
            continue
        generation = to_generation(
            answer, drafted.concurrency, find_rounds(drafted, answer, source, is_first=not turns)
        )
        if source == "totals":
            # The cut round is not known, so that none is left out.
            generation.is_cut = False
        request = answer.request
        base = (
            Generation(generation.prompt, [0])
            if other is None
            else to_generation(other, drafted.concurrency, NO_ROUNDS)
        )
        turns.append(
            Turn(request.id, request.turn, request.category, base, generation, request.first_kind)
        )
    return turns


def find_rounds(
    result: LevelResult, answer: ServedAnswer, source: CounterSource, is_first: bool
) -> DraftedRounds | None:
    """Return the rounds of an answer as far as they are known."""
    if source == "requests":
        return answer.completion.rounds
    if source == "none" or result.counters is None:
        return None
    if any(other.counters is not None for other in result.successes):
        return None if answer.counters is None else expand_counters(answer.counters)
    return expand_counters(result.counters) if is_first else None


def count_rounds(turns: Sequence[Turn]) -> DraftCounters:
    """Count all rounds as servers do, the cut ones untrimmed; steps without a draft are not
    counted.
    """
    rounds = [
        pair
        for turn in turns
        for pair in zip(turn.drafted.round_lengths, turn.drafted.depths)
        if pair[1]
    ]
    deepest = max((depth for _, depth in rounds), default=0)
    accepted = tuple(
        sum(length > position for length, _ in rounds) for position in range(1, deepest + 1)
    )
    return DraftCounters(len(rounds), sum(depth for _, depth in rounds), accepted)
