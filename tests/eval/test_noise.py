"""A speedup that is impossible, or that was measured on a busy machine, is not to be quoted."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import ROUND_PARTS, DecodingSteps, Generation, interleave
from spectrain.decoding.session import EngineChoice
from spectrain.drafters.causal import Causal
from spectrain.eval.columns import format_speedup
from spectrain.eval.intervals import Interval
from spectrain.eval.metrics import Speedup, Turn, speedup
from spectrain.eval.noise import (
    Noise,
    baseline_jitter,
    is_possible,
    is_unsteady,
    judge_speedup,
    largest_speedup,
    machine_load,
    median_pairs,
)
from spectrain.eval.notes import describe_doubts
from spectrain.eval.systems import Decoder, System
from spectrain.eval.time_limit import ScoreProgress
from spectrain.eval.turns import Interleaving
from spectrain.models.target import Target
from spectrain.trees import Chain

QUIET = Noise(0.02, 0.5)
LIMIT = 12


def make_generation(rounds: list[int], seconds: float) -> Generation:
    """Rounds that emit so many tokens each, all of them in this time."""
    times = [dict.fromkeys(ROUND_PARTS, seconds / len(rounds) / 4) for _ in rounds]
    total = {part: sum(times_of_round[part] for times_of_round in times) for part in ROUND_PARTS}
    return Generation(
        [1],
        list(range(1 + sum(rounds))),
        rounds,
        [3] * len(rounds),
        [4] * len(rounds),
        round_seconds=times,
        is_done=True,
        seconds={"prefill": 9.0, **total},
    )


def make_turn(name: str, plain: float, drafted: float, rounds: list[int]) -> Turn:
    """An answer that took so many seconds without a drafter, and with one in these rounds."""
    return Turn(
        name, 0, "all", make_generation([1] * sum(rounds), plain), make_generation(rounds, drafted)
    )


def judge_ratio(ratio: float, ends: Interval, turns: list[Turn], noise: Noise) -> dict[str, Any]:
    """Return a judged speedup as summary.json holds it."""
    return asdict(judge_speedup(Speedup(ratio, ends, ratio, None), turns, noise))


def test_a_speedup_above_the_tokens_a_forward_cannot_be() -> None:
    """1.66 at 1.43 tokens per forward is no number to quote, in words and in the JSON; with a
    quiet baseline it is one.
    """
    rounds = [2, 1, 1, 2, 1, 2, 1]  # 10 tokens in 7 rounds
    slowed = [make_turn(str(n), 10 * 0.0166, 0.1, rounds) for n in range(8)]
    assert speedup(slowed) == pytest.approx(1.66) and largest_speedup(slowed) == pytest.approx(
        10 / 7
    )
    judgement = judge_ratio(1.66, [1.6, 1.7], slowed, QUIET)
    assert (
        judgement["quotable"] is False
        and "exceeds the tokens per forward (1.43)" in judgement["reason"]
        and judgement["at_most"] == 1.4286
    )
    assert format_speedup(judgement) == "?" and not is_possible(judgement)
    quiet = [make_turn(str(n), 10 * 0.0121, 0.1, rounds) for n in range(8)]
    judgement = judge_ratio(1.21, [1.2, 1.3], quiet, QUIET)
    assert (
        judgement["quotable"] is True
        and judgement["reason"] is None
        and format_speedup(judgement, "x") == "1.21x"
    )


def test_earlier_results_are_read_as_they_are() -> None:
    """A summary without this judgement is shown with its number."""
    assert is_possible({"ratio": 9.0}) and format_speedup({"ratio": 9.0}) == "9.00"


def test_the_spread_of_the_baselines_steps() -> None:
    """Steps of one time have no spread, however long answers are; times that differ by e are 0.5
    apart from their mean.
    """
    same = [
        make_turn(str(n), 0.1 * sum(rounds), 1.0, rounds)
        for n, rounds in enumerate(([1, 2], [3, 3, 1], [2]))
    ]
    assert baseline_jitter(same) == pytest.approx(0) and baseline_jitter(same[:1]) == 0
    apart = [make_turn("a", 2.0, 1.0, [1, 1]), make_turn("b", 2.0 * 2.718281828, 1.0, [1, 1])]
    assert baseline_jitter(apart) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("noise", "reasons"),
    [
        (QUIET, []),
        (Noise(0.4, 0.5), ["40%"]),
        (Noise(0.1, 3.0), ["3.0 processes"]),
        (Noise(0.5, 2.0), ["50%", "2.0 processes"]),
        (Noise(0.2, None), []),
    ],
)
def test_a_busy_machine_is_reported(noise: Noise, reasons: list[str]) -> None:
    """Unsteady steps and a load above the cores are reasons; a number stands with a mark, and
    the reason below it.
    """
    assert len(noise.reasons) == len(reasons) and all(
        part in reason for part, reason in zip(reasons, noise.reasons)
    )
    judgement = judge_ratio(1.2, None, [make_turn("a", 1.2, 1.0, [2, 1])], noise)
    assert judgement["quotable"] is not bool(reasons) and format_speedup(judgement) == (
        "1.20?" if reasons else "1.20"
    )
    summary: dict[str, Any] = {
        "label": "drafter",
        "speedup": judgement,
        "noise": noise.summary(),
        "compared": {},
    }
    sentences = list(describe_doubts(summary))
    assert len(sentences) == bool(reasons) and all(part in sentences[0] for part in reasons)


def test_the_load_counts_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes on the cores decide little about an accelerator's times; one process is
    the evaluation's own.
    """
    monkeypatch.setattr("os.getloadavg", lambda: (9.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert machine_load(torch.device("cpu")) == 2.0 and machine_load(torch.device("cuda")) is None


def test_median_pairs_stay_pairs() -> None:
    """Of three runs of each turn the one with the median ratio counts, both its times together."""
    fast = [2, 1]
    slow = [1, 1, 1]
    runs = [
        [make_turn("a", 3.0, 1.0, fast), make_turn("b", 1.0, 1.0, slow)],
        # something slowed the baseline
        [make_turn("a", 9.0, 1.0, fast), make_turn("b", 5.0, 1.0, slow)],
        [make_turn("a", 3.2, 1.1, fast), make_turn("b", 1.2, 1.0, slow)],
    ]
    assert median_pairs(runs) == [runs[0][0], runs[2][1]]


@pytest.mark.parametrize("repeats", [2, 4])
def test_the_median_of_an_even_number_is_unbiased(repeats: int) -> None:
    """Of an even number of pairs the lower and the upper middle one are taken in turn."""
    runs = [
        [make_turn(name, 1.0 + number, 1.0, [2, 1]) for name in "abcd"] for number in range(repeats)
    ]
    ratios = [turn.autoregressive.decode_seconds for turn in median_pairs(runs)]
    assert ratios == pytest.approx([repeats / 2, repeats / 2 + 1] * 2)


class Scripted:
    """Stands for a decoder whose autoregressive runs are slowed now and then, as by another
    process; in turn, both are.
    """

    def __init__(self, slow: set[int]) -> None:
        self.slow = slow
        self.calls = 0
        self.target = SimpleNamespace(device=torch.device("cpu"))

    def __call__(
        self, system: Any, prompts: Any, limit: int, sequence_ids: list[int]
    ) -> list[Generation]:
        self.calls += system is None
        if system is None:
            return [make_generation([1] * 6, 6.0 * (4.0 if self.calls in self.slow else 1.0))]
        return [make_generation([2, 2, 2], 5.0)]

    def decode_interleaved(
        self, system: Any, prompts: Any, limit: int, sequence_ids: Any
    ) -> tuple[list[Generation], list[Generation]]:
        self.calls += 1
        slower = 1.1 if self.calls in self.slow else 1.0
        return [make_generation([1] * 6, 6.0 * slower)], [make_generation([2, 2, 2], 5.0 * slower)]


def decode_interleaved_turns(decoder: Scripted, count: int) -> Interleaving:
    """Eight turns, or so many, decoded once by a stand-in."""
    decoding = Interleaving(
        decoder, [SimpleNamespace(name="drafter", is_timed=True)], [], None, 8, 1
    )  # type: ignore[arg-type, list-item]
    for number in range(count):
        turn: Any = SimpleNamespace(
            prompt=SimpleNamespace(id=str(number), category="all"),
            turn=0,
            tokens=[1],
            sequence_id=1,
            first_kind="content",
        )
        decoding.batches.append([turn])
        runs = decoding._decode([turn], number)
        decoding.turns["drafter"].append(
            Turn(str(number), 0, "all", runs["autoregressive"][0], runs["drafter"][0])
        )
    return decoding


class RecordedProgress(ScoreProgress):
    """Keeps what a score shows of its progress."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    def show(self, done: int) -> None:
        self.shown.append(f"{self.text} {done} of {self.total}")


@pytest.mark.parametrize("times", [2, 4])
def test_unsteady_times_are_measured_again(times: int) -> None:
    """Where two of eight baselines were slowed, every pair is decoded again in turn, and that is
    free of it; steady times are measured once, and so are few turns and what must not be repeated.
    """
    decoding = decode_interleaved_turns(Scripted({3, 5, 10, 12}), 8)
    assert speedup(decoding.turns["drafter"]) == pytest.approx(1.2 * 14 / 8)
    assert is_unsteady([decoding.turns["drafter"]])
    decoding.repeat(1)
    assert decoding.repeats == 1
    decoding.progress = RecordedProgress()
    decoding.repeat(times)
    pairs = 8 * (times - 1)
    assert decoding.progress.shown == [
        f"timing again, pair {done} of {pairs}" for done in range(pairs + 1)
    ]
    assert decoding.repeats == times and speedup(decoding.turns["drafter"]) == pytest.approx(1.2)
    assert len(decoding.turns["drafter"]) == 8 and baseline_jitter(decoding.turns["drafter"]) < 0.05
    steady = decode_interleaved_turns(Scripted(set()), 8)
    few = decode_interleaved_turns(Scripted({1}), 4)
    for interleaving in (steady, few):
        interleaving.repeat(times)
        assert interleaving.repeats == 1


class Metered(Scripted):
    """Stands for a decoder of a device that counts energy: 2 joules for an answer, and 50 for
    each system's first warm-up.
    """

    def __init__(self) -> None:
        super().__init__(set())
        self.joules = 0.0
        self.warm = set[str]()

    def session(self, system: Any) -> Any:
        return SimpleNamespace(
            warm_up=lambda *request: self.warm_up("" if system is None else system.name)
        )

    def warm_up(self, name: str) -> None:
        self.joules += 0.0 if name in self.warm else 50.0
        self.warm.add(name)

    def __call__(
        self, system: Any, prompts: Any, limit: int, sequence_ids: list[int]
    ) -> list[Generation]:
        self.session(system).warm_up()
        self.joules += 2.0
        return super().__call__(system, prompts, limit, sequence_ids)


def test_energy_leaves_the_warm_up_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling and capturing for a batch is no part of its answers, whose tokens the joules are
    divided by.
    """
    decoder = Metered()
    monkeypatch.setattr(
        "spectrain.eval.turns.find_energy_reader", lambda device: lambda: decoder.joules
    )
    decoding = decode_interleaved_turns(decoder, 3)
    assert decoding.joules_per_token("drafter") == {
        "autoregressive": round(2 / 7, 6),
        "drafted": round(2 / 7, 6),
    }


def read_rounds(generation: Generation) -> tuple[list[int], list[int], list[int]]:
    return generation.output, generation.round_lengths, generation.depths


@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_pairs_in_turn_are_the_runs_alone(shallow: Target, engine: EngineChoice) -> None:
    """Round by round in turn, an autoregressive run and a drafted one give the tokens and rounds
    that they give alone.
    """
    drafter = Causal(shallow, num_layers=2).eval()
    system = System("drafter", "", drafter, Chain(3), Greedy())
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    keys = [0, 1]
    decoder = Decoder(shallow, Greedy(), engine)
    alone = [decoder(generation, prompts, LIMIT, keys) for generation in (None, system)]
    together = decoder.decode_interleaved(system, prompts, LIMIT, keys)
    for run, other in zip(alone, together):
        assert [read_rounds(generation) for generation in run] == [
            read_rounds(generation) for generation in other
        ]
        assert all(
            len(generation.round_seconds) == len(generation.round_lengths)
            and generation.seconds["verify"] > 0
            for generation in other
        )


def test_what_has_emitted_least_goes_on() -> None:
    """Two decodings in turn, of one token a round and of up to three: their lengths never differ
    by more than a round gives.
    """
    lengths = []

    def decode_rounds(rounds: list[int]) -> DecodingSteps:
        generation = Generation([1])
        generations = [generation]
        lengths.append(generations)
        yield generations
        for tokens in rounds:
            generation.output += [0] * tokens
            assert abs(len(lengths[0][0].output) - len(lengths[-1][0].output)) <= 3
            yield generations

    runs = interleave([decode_rounds([1] * 9), decode_rounds([3, 2, 3, 1])])
    assert [len(run[0].output) for run in runs] == [9, 9]


class Spell:
    """A machine whose time passes four times as slowly from one tick to another, a slow spell."""

    def __init__(self, first: int, last: int) -> None:
        self.ticks = 0
        self.first = first
        self.last = last

    def round(self, seconds: float) -> float:
        self.ticks += 1
        return seconds * (4.0 if self.first <= self.ticks < self.last else 1.0)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_a_slow_spell_slows_both(first: int) -> None:
    """40 rounds of a second beside 20 of 1.5 that give twice as much, a speedup of 1.33: run one
    after the other, a slow spell of 20 rounds makes 0.33 to 3.3 of it; in turn, it stays within a
    tenth."""

    def decode_rounds(machine: Spell, tokens: int, seconds: float) -> DecodingSteps:
        generation = Generation([1])
        yield [generation]
        for _ in range(40 // tokens):
            generation.output += [0] * tokens
            generation.round_seconds.append({"verify": machine.round(seconds)})
            yield [generation]

    machine = Spell(first, first + 20)
    plain, drafted = interleave([decode_rounds(machine, 1, 1.0), decode_rounds(machine, 2, 1.5)])
    ratio = plain[0].finish_seconds / drafted[0].finish_seconds
    assert ratio == pytest.approx(40 / 30, rel=0.1)
    machine = Spell(first, first + 20)
    (plain,), (drafted,) = (
        interleave([decode_rounds(machine, 1, 1.0)]),
        interleave([decode_rounds(machine, 2, 1.5)]),
    )
    alone = plain[0].finish_seconds / drafted[0].finish_seconds
    assert abs(alone - 40 / 30) > abs(ratio - 40 / 30)
