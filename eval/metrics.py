"""The numbers of an evaluation, each defined once, and their types as summary.json holds them.

A round is one draft, one target forward and its acceptance. Acceptance length is the mean number of
tokens that a target forward emits, the bonus token included, pooled over rounds; the token of the
prefill belongs to no round, and a last round that EOS or the limit cut short is left out. Rows
decoded together share their batch's seconds: the share of each is the batch's over the number of
rows. A prompt is all turns of one id.
Shapes: P prompts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from spectrain.data.chat import token_kinds
from spectrain.data.chat_template import ChatTemplate, Kind
from spectrain.decoding.generation import ROUND_PARTS, Generation
from spectrain.eval.disparity import Disparity, compare_groups, name_questions
from spectrain.eval.intervals import Floats, Interval, interval, rounds_interval
from spectrain.eval.kinds import (
    ROUND_GROUPS,
    TEXT_POSITIONS,
    TURNS,
    GroupedRound,
    RoundNumbers,
    average_rounds,
    position_range,
    round_starts,
)

# Types


@dataclass(frozen=True)
class AcceptanceLength:
    """Tokens per forward pass of the target."""

    pooled: float
    ci95: Interval
    without_bonus: float
    per_prompt_mean: float
    # The same by other projects' definitions.
    by_convention: dict[str, float | None]


@dataclass(frozen=True)
class Rates:
    """Tokens per second without and with the drafter."""

    autoregressive: float
    drafted: float


@dataclass(frozen=True)
class TokensPerSecond(Rates):
    """Tokens per second of all rows together, and of a single row."""

    per_user: Rates


@dataclass(frozen=True)
class Speedup:
    """Drafted over autoregressive tokens per second."""

    ratio: float
    ci95: Interval
    # None where the parts of a round were not timed.
    predicted: float | None
    # Relative difference between the measured and the predicted ratio.
    unexplained: float | None


@dataclass(frozen=True)
class JudgedSpeedup(Speedup):
    """A speedup, the largest possible one, and whether it can be quoted."""

    at_most: float
    quotable: bool
    # Why it cannot be quoted; None where it can.
    reason: str | None


@dataclass(frozen=True)
class CategoryNumbers:
    """The numbers of one category of prompts."""

    acceptance_length: float
    speedup: float
    prompts: int
    # 95 % intervals of the two over prompts.
    ci95: Interval
    speedup_ci95: Interval


OPTIONAL = {"optional": True}  # marks a field that is absent from summary.json while it is None


@dataclass(kw_only=True)
class SystemNumbers:
    """What decoding measured of one system: the keys of its entry in summary.json, in their
    order.
    """

    acceptance_length: AcceptanceLength
    acceptance_by_depth: list[float]
    tokens_by_round: list[int]
    # Rounds that drafted at least one token, and all rounds.
    drafted_rounds: int
    rounds: int
    nodes_per_round: float
    drafting_nodes_per_round: float
    tokens_per_second: TokensPerSecond
    speedup: Speedup
    # Share of the drafted decoding time that each part of a round took.
    time_share: dict[str, float]
    by_category: dict[str, CategoryNumbers]
    # Rounds by the kind of their first token, and by its position in the answer and in the text;
    # what does not occur is left out.
    by_kind: dict[str, RoundNumbers]
    by_position: dict[str, RoundNumbers]
    by_text_position: dict[str, RoundNumbers]
    # Rounds by the turn of their conversation.
    by_turn: dict[str, RoundNumbers]
    # The worst category of prompts over the best; None with fewer than two categories.
    disparity: Disparity | None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of summary.json."""
        absent = {
            item.name
            for item in fields(self)
            if item.metadata.get("optional") and getattr(self, item.name) is None
        }
        return {name: value for name, value in asdict(self).items() if name not in absent}


@dataclass(kw_only=True)
class SystemSummary(SystemNumbers):
    """The numbers of one system, and how it decoded."""

    label: str
    # The tree's settings.
    tree: dict[str, Any]
    # "captured" or "eager".
    engine: str
    # Why the rounds were not captured although they were asked to be.
    eager_because: str | None = field(default=None, metadata=OPTIONAL)
    # Engines that failed on this machine, and why.
    not_run: dict[Any, str] | None = field(default=None, metadata=OPTIONAL)
    pruning: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    # How steady times were; of the drafter alone.
    noise: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    guard: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    # The times that a reader of the answers sees, without the drafter and with it, and the bound
    # that they are compared with.
    user_times: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    # Joules of a token without the drafter and with it, prefill included, where the device counts
    # them.
    joules_per_token: dict[str, float] | None = field(default=None, metadata=OPTIONAL)
    # Price of a million tokens without the drafter and with it, by eval.price_per_hour.
    price_per_million: dict[str, float | None] | None = field(default=None, metadata=OPTIONAL)
    # alpha, c, gamma, E[N] and V_SD of a chain, and the best gamma, by the surveys' model.
    throughput_model: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    # Whether outputs equal their reference; None where that was not checked.
    lossless: dict[str, Any] | None = None


@dataclass(frozen=True)
class Turn:
    """One prompt's turn, decoded autoregressively and by a drafter."""

    id: str
    turn: int
    category: str
    autoregressive: Generation
    drafted: Generation
    # The kind of the answer's first token.
    first_kind: Kind = "content"


def measure_system(
    turns: Sequence[Turn],
    is_chain: bool,
    template: ChatTemplate | None = None,
    shares_times: bool = False,
) -> dict[str, Any]:
    """Compute the fields of `SystemNumbers`, by name. Without a chat template every token is
    content.

    shares_times: prompts were decoded in batches; speedups then have no interval, because a batch's
    rows share its time.
    """
    drafted = [turn.drafted for turn in turns]
    plain = [turn.autoregressive for turn in turns]
    rounds = max(1, sum(len(generation.node_counts) for generation in drafted))
    pooled = pooled_acceptance(turns)
    categories = {
        category: [turn for turn in turns if turn.category == category]
        for category in sorted({turn.category for turn in turns})
    }
    return {
        "acceptance_length": AcceptanceLength(
            round(pooled, 4),
            acceptance_interval(turns),
            round(pooled - 1, 4),
            round(per_prompt_acceptance(turns), 4),
            tau_by_convention(turns, is_chain),
        ),
        "acceptance_by_depth": acceptance_by_depth(turns),
        "tokens_by_round": count_round_lengths(turns),
        "drafted_rounds": count_drafted_rounds(turns)[0],
        "rounds": sum(len(generation.node_counts) for generation in drafted),
        "nodes_per_round": round(
            sum(sum(generation.node_counts) for generation in drafted) / rounds, 2
        ),
        "drafting_nodes_per_round": round(
            sum(sum(generation.idle_counts) for generation in drafted) / rounds, 2
        ),
        "tokens_per_second": TokensPerSecond(
            round(tokens_per_second(plain), 3),
            round(tokens_per_second(drafted), 3),
            Rates(
                round(per_user_tokens_per_second(plain), 3),
                round(per_user_tokens_per_second(drafted), 3),
            ),
        ),
        "speedup": measure_speedup(turns, shares_times),
        "time_share": time_share(turns),
        "by_category": {
            category: measure_category(part, shares_times) for category, part in categories.items()
        },
        **group_rounds(turns, template),
        "disparity": compare_groups(
            {category: acceptance_columns(part) for category, part in categories.items()},
            {
                category: name_questions(sorted({turn.id for turn in part}), category)
                for category, part in categories.items()
            },
        ),
    }


def price_tokens(rates: Rates, price_per_hour: float | None) -> dict[str, float | None] | None:
    """Return the price of a million tokens at these rates without and with the drafter; None
    without a price of an hour.
    """
    if price_per_hour is None:
        return None
    seconds = {"autoregressive": rates.autoregressive, "drafted": rates.drafted}
    return {
        name: round(price_per_hour / 3600 * 1e6 / rate, 6) if rate else None
        for name, rate in seconds.items()
    }


def measure_category(turns: Sequence[Turn], shares_times: bool = False) -> CategoryNumbers:
    """Measure one category of prompts."""
    ends = acceptance_interval(turns), None if shares_times else speedup_interval(turns)
    return CategoryNumbers(
        round(pooled_acceptance(turns), 4),
        round(speedup(turns), 4),
        len({turn.id for turn in turns}),
        *ends,
    )


def measure_speedup(turns: Sequence[Turn], shares_times: bool = False) -> Speedup:
    """Measure the speedup with its interval and what predicts it."""
    ratio = speedup(turns)
    predicted = predicted_speedup(turns)
    ends = None if shares_times else speedup_interval(turns)
    unexplained = round(ratio / predicted - 1, 4) if predicted else None
    return Speedup(
        round(ratio, 4), ends, None if predicted is None else round(predicted, 4), unexplained
    )


def pooled_acceptance(turns: Sequence[Turn]) -> float:
    """Compute tokens per target forward over all rounds."""
    rounds = [count for turn in turns for count in turn.drafted.complete_round_lengths]
    return float(np.mean(rounds)) if rounds else 1.0


def per_prompt_acceptance(turns: Sequence[Turn]) -> float:
    """Average each prompt's tokens per target forward over prompts; a prompt without a complete
    round has none.
    """
    return _mean_of_ratios(acceptance_columns(turns))


def count_drafted_rounds(turns: Sequence[Turn]) -> tuple[int, int]:
    """Count the rounds that drafted at least one token, and all rounds."""
    counts = [count for turn in turns for count in turn.drafted.depths]
    return sum(count > 0 for count in counts), len(counts)


def count_undrafted_rounds(turns: Sequence[Turn]) -> dict[str, int]:
    """Count the rounds that drafted no token, by the reason of their plan; "nothing proposed" is a
    round whose drafter ran and proposed nothing.
    """
    return dict(
        Counter(
            plan.reason if plan is not None and not plan.runs_drafter else "nothing proposed"
            for turn in turns
            for depth, plan in zip(turn.drafted.depths, turn.drafted.plans)
            if depth == 0
        )
    )


def count_round_lengths(turns: Sequence[Turn]) -> list[int]:
    """Count complete rounds by length: entry k counts those that emitted k + 1 tokens, k drafted
    ones and the bonus.
    """
    rounds = [count for turn in turns for count in turn.drafted.complete_round_lengths]
    return [int(number) for number in np.bincount(rounds)[1:]] if rounds else []


def acceptance_by_depth(turns: Sequence[Turn]) -> list[float]:
    """Compute, for each k, the share of rounds that accept token k, among those that accepted k
    - 1 and drafted k.
    """
    accepted, tried = count_judged_tokens(turns)
    return [round(hits / count, 4) for hits, count in zip(accepted, tried)]


def count_judged_tokens(turns: Sequence[Turn]) -> tuple[list[int], list[int]]:
    """Count by depth, over complete rounds, the draft tokens that were accepted, and those whose
    predecessors were.
    """
    accepted: list[int] = []
    tried: list[int] = []
    for turn in turns:
        generation = turn.drafted
        for count, depth in list(zip(generation.round_lengths, generation.depths))[
            : len(generation.complete_round_lengths)
        ]:
            for level in range(1, min(depth, count) + 1):
                while len(tried) < level:
                    tried.append(0)
                    accepted.append(0)
                tried[level - 1] += 1
                accepted[level - 1] += count > level
    return accepted, tried


def group_rounds(
    turns: Sequence[Turn], template: ChatTemplate | None = None
) -> dict[str, dict[str, RoundNumbers]]:
    """Average complete rounds by what their first token is, as `ROUND_GROUPS` names it: its kind,
    its position in the answer and in the text, and the turn of the conversation.

    Without the prompt's tokens, as from some servers, a position in the text is not known and its
    round is left out there.
    """
    rounds: dict[str, list[GroupedRound]] = {key: [] for key in ROUND_GROUPS}
    for turn in turns:
        drafted = turn.drafted
        kinds: Sequence[Kind] = (
            ["content"] * len(drafted.output)
            if template is None
            else token_kinds(template, drafted.output, turn.first_kind)
        )
        for start, length in round_starts(drafted):
            groups = {
                "by_kind": kinds[start],
                "by_position": position_range(start),
                "by_turn": position_range(turn.turn, TURNS),
            }
            if drafted.prompt:
                position = len(drafted.prompt) + start
                groups["by_text_position"] = position_range(position, TEXT_POSITIONS)
            for key, group in groups.items():
                rounds[key].append(GroupedRound(group, turn.id, length))
    return {key: average_rounds(names, rounds[key]) for key, names in ROUND_GROUPS.items()}


def tau_by_convention(turns: Sequence[Turn], chain: bool) -> dict[str, float | None]:
    """Compute other projects' definitions; unlike ours, all count every round, the cut last one
    untrimmed.

    spec_bench: tokens per round, bonus in, pooled; ours (pooled) where no round is cut.
    eagle, medusa: the same number, there called tau (new tokens per target forward) and
    acceleration rate.
    hass: the mean over prompts of accepted + 1; our per-prompt mean where no round is cut.
    gpt_fast: spec_bench's without the bonus, thus 1 less.
    layerskip: drafted tokens accepted over tokens drafted, of a `chain` only: of a tree at most one
    per depth can be accepted.
    """
    tokens = sum(sum(turn.drafted.round_lengths) for turn in turns)
    rounds = sum(len(turn.drafted.round_lengths) for turn in turns)
    drafted = sum(sum(turn.drafted.depths) for turn in turns)
    per_round = round(tokens / rounds, 4) if rounds else 1.0
    every_round = _per_prompt(
        turns, lambda turn: (sum(turn.drafted.round_lengths), len(turn.drafted.round_lengths))
    )
    return {
        "spec_bench": per_round,
        "eagle": per_round,
        "medusa": per_round,
        "hass": round(_mean_of_ratios(every_round), 4),
        "gpt_fast": round(per_round - 1, 4),
        "layerskip": round((tokens - rounds) / drafted, 4) if chain and drafted else None,
    }


def tokens_per_second(generations: Sequence[Generation]) -> float:
    """Divide the decoded tokens of all rows, up to EOS or the limit and without the prefill's,
    by the decoding time.
    """
    seconds = sum(_decode_share(generation) for generation in generations)
    return sum(_num_decoded(generation) for generation in generations) / seconds if seconds else 0.0


def per_user_tokens_per_second(generations: Sequence[Generation]) -> float:
    """Average over rows a row's own decoded tokens over the undivided time until its last round
    ended.
    """
    rates = [
        _num_decoded(generation) / generation.finish_seconds
        for generation in generations
        if generation.finish_seconds
    ]
    return float(np.mean(rates)) if rates else 0.0


def speedup(turns: Sequence[Turn]) -> float:
    """Divide drafted by autoregressive tokens/s of the same engine on the same prompts."""
    base = tokens_per_second([turn.autoregressive for turn in turns])
    return tokens_per_second([turn.drafted for turn in turns]) / base if base else 0.0


def predicted_speedup(turns: Sequence[Turn]) -> float | None:
    """Multiply acceptance length by a row's share of an autoregressive step over that of a round's
    draft, verify and accept.

    A round runs the target as a step does, and drafts besides. Where it was timed to take less,
    the times differ by noise, and the prediction is the acceptance length. None where the parts of
    a round were not timed, as by a server.
    """
    step = measure_step(turns)
    rounds = sum(len(turn.drafted.round_lengths) for turn in turns)
    if step is None or not rounds:
        return 0.0
    parts = ("draft", "verify", "accept")
    cycle = sum(sum_shares(turns, part) for part in parts) / rounds
    return pooled_acceptance(turns) * min(1.0, step / cycle) if cycle else None


def measure_step(turns: Sequence[Turn]) -> float | None:
    """Return a row's seconds of an autoregressive step; None without one."""
    steps = sum(len(turn.autoregressive.round_lengths) for turn in turns)
    return sum(_decode_share(turn.autoregressive) for turn in turns) / steps if steps else None


def sum_shares(turns: Sequence[Turn], part: str) -> float:
    """Sum a row's seconds in a part of the drafted rounds."""
    return sum(turn.drafted.seconds[part] / turn.drafted.batch_size for turn in turns)


def time_share(turns: Sequence[Turn]) -> dict[str, float]:
    """Compute the share of the drafted decoding time that each part of a round took."""
    seconds = {part: sum_shares(turns, part) for part in ROUND_PARTS}
    total = sum(seconds.values()) or 1.0
    return {part: round(value / total, 4) for part, value in seconds.items()}


def acceptance_interval(turns: Sequence[Turn]) -> Interval:
    """Return the 95 % confidence interval of `pooled_acceptance`, over draws of prompts."""
    return rounds_interval(acceptance_columns(turns))


def speedup_interval(turns: Sequence[Turn]) -> Interval:
    """Return the 95 % confidence interval of `speedup`, over draws of prompts."""
    return interval(speed_columns(turns), (1, -1, -1, 1))


def speed_columns(turns: Sequence[Turn]) -> Floats:
    """Sum each prompt's decoded tokens and seconds, drafted, then autoregressive [P, 4]."""

    def row(turn: Turn) -> tuple[float, ...]:
        pair = (turn.drafted, turn.autoregressive)
        return tuple(
            value
            for generation in pair
            for value in (_num_decoded(generation), _decode_share(generation))
        )

    return _per_prompt(turns, row)


def _per_prompt(turns: Sequence[Turn], row: Callable[[Turn], tuple[float, ...]]) -> Floats:
    """Sum each prompt's rows [P, C], in the order of ids: turns of one prompt are not
    independent.
    """
    rows: dict[str, list[tuple[float, ...]]] = {}
    for turn in turns:
        rows.setdefault(turn.id, []).append(row(turn))
    return np.array([np.sum(rows[name], axis=0) for name in sorted(rows)], dtype=np.float64)


def acceptance_columns(turns: Sequence[Turn]) -> Floats:
    """Sum tokens and number of each prompt's complete rounds [P, 2]."""
    return _per_prompt(
        turns,
        lambda turn: (
            sum(turn.drafted.complete_round_lengths),
            len(turn.drafted.complete_round_lengths),
        ),
    )


def _mean_of_ratios(columns: Floats) -> float:
    """Average tokens per round over the prompts that have a round."""
    columns = columns[columns[:, 1] > 0] if len(columns) else columns
    return float(np.mean(columns[:, 0] / columns[:, 1])) if len(columns) else 1.0


def _num_decoded(generation: Generation) -> int:
    """Count the tokens of the answer, without the prefill's."""
    return len(generation.output) - 1


def _decode_share(generation: Generation) -> float:
    """Return one row's share of its batch's decoding time, without the prefill."""
    return generation.decode_seconds / generation.batch_size
