"""Decoding in turn: for every prompt the autoregressive run and the drafted runs follow each
other, in a rotating order.
"""

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from spectrain.data.chat_template import Kind
from spectrain.decoding.generation import Generation
from spectrain.eval.columns import AUTOREGRESSIVE
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.kinds import opening_kind
from spectrain.eval.metrics import Turn
from spectrain.eval.noise import find_disturbed, is_unsteady, median_pairs
from spectrain.eval.oracle import Oracle
from spectrain.eval.prompts import Prompt, TurnAnswer
from spectrain.eval.systems import Decoder, System
from spectrain.eval.time_limit import MIN_PROMPTS, ScoreProgress, TimeLimit, is_decided
from spectrain.models.energy import find_energy_reader
from spectrain.output.console import make_console
from spectrain.output.progress_line import format_duration
from spectrain.output.verbosity import is_quiet
from spectrain.training.metrics import Pace

ORACLE = "oracle"

PATIENCE = 300  # seconds that decoding everything again may take
# Prompts that are decoded together where only their tokens per forward count. With SmolLM2-135M and
# a chain on two busy cores, 20 prompts took 53 s one by one, 34 s by fours, 26 s by tens and 57 s
# at once.
COUNTED_TOGETHER = 10
# Share of all pairs that may be decoded again: on a machine that is always disturbed, more prompts
# say more than the same ones again.
REPEATED_SHARE = 0.25

Runs = dict[str, list[Generation]]


@dataclass(frozen=True)
class TurnRequest:
    """One turn of a prompt, which every system answers."""

    prompt: Prompt
    turn: int
    tokens: list[int]
    # Keys its random draws.
    sequence_id: int
    # The kind of the answer's first token.
    first_kind: Kind = "content"


@contextmanager
def skip_old_garbage() -> Iterator[None]:
    """Leave objects that exist now out of garbage collection. A full collection visits all loaded
    libraries, which takes half a second; that would count as time of whichever run it falls into.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Interleaving:
    """Decodes prompts with all systems; `turns` holds each system's answers, paired with the
    autoregressive ones.
    """

    def __init__(
        self,
        decoder: Decoder,
        systems: Sequence[System],
        extensions: Sequence[EvalExtension],
        oracle: Oracle | None,
        max_new_tokens: int,
        batch_size: int,
        limit: TimeLimit | None = None,
        progress: ScoreProgress | None = None,
    ) -> None:
        self.decoder, self.extensions, self.oracle = decoder, extensions, oracle
        self.systems = [system for system in systems if system.is_timed]
        # Decoded once: after the others or, with a limit of time, before them and many at once.
        self.untimed = [system for system in systems if not system.is_timed]
        self.max_new_tokens, self.batch_size, self.limit = max_new_tokens, batch_size, limit
        # A drafter that changes while it decodes decodes once, in the order of the prompts.
        self.changes_drafter = any(extension.changes_drafter for extension in extensions)
        self.counts_apart = limit is not None and not self.changes_drafter
        self.progress = progress or ScoreProgress(limit)
        self.turns: dict[str, list[Turn]] = {system.name: [] for system in systems}
        self.batches: list[list[TurnRequest]] = []
        self.left_out = Counter[str]()
        self.console = make_console(stderr=True)
        self.pace = Pace(0)
        # Joules and tokens of the autoregressive run and of every system, where the device counts
        # energy.
        self.read_energy = find_energy_reader(decoder.target.device)
        self.joules = defaultdict[str, float](float)
        self.num_tokens = Counter[str]()
        # How often all is decoded; how many prompts were decoded, and how many seconds the first
        # time took.
        self.repeats = 1
        self.num_prompts = 0
        self.seconds = 0.0
        # Prompts whose tokens per forward were counted apart; whether the test of the speed ended
        # the timing; the pairs that were decoded again, as system and turn.
        self.num_counted = 0
        self.is_decided = False
        self.repeated = set[tuple[str, int]]()

    @skip_old_garbage()
    def run(self, prompts: Sequence[Prompt]) -> None:
        """Decode all turns of all prompts or, with a limit of time, of as many as fit into it."""
        target = self.decoder.target
        opening = prompts[0].tokenize_for(target)
        if self.counts_apart and self.untimed:
            self._count(prompts)
        # Warm up outside every timer.
        others = [] if self.counts_apart else self.untimed
        for system in (None, *self.systems, *others):
            self.decoder(system, [opening], min(8, self.max_new_tokens), [0])
        self.decoder.choose_threads(self.systems, opening, self.max_new_tokens)
        for extension in self.extensions:
            extension.begin()
        self.pace = Pace(len(prompts))
        self.progress.begin("timing prompt", len(prompts))
        for first in range(0, len(prompts), self.batch_size):
            start = time.perf_counter()
            self._decode_conversations(prompts[first : first + self.batch_size])
            self.seconds += time.perf_counter() - start
            done = self.num_prompts = min(first + self.batch_size, len(prompts))
            self.progress.show(done)
            self._repeat_disturbed()
            if self._is_out_of_time() or self._is_speed_decided():
                break
            if done < len(prompts):
                self._print_progress(
                    f"scored {done} of {len(prompts)} prompts  {self.pace.time_left(done)}"
                )

    def _count(self, prompts: Sequence[Prompt]) -> None:
        """Count the tokens per forward of all prompts, many at once: no other work on the machine
        changes a count. All systems answer the same prompts.
        """
        self.progress.begin("counting prompt", len(prompts))
        numbers = count()
        for first in range(0, len(prompts), COUNTED_TOGETHER):
            chats = [
                (prompt, list[TurnAnswer]()) for prompt in prompts[first : first + COUNTED_TOGETHER]
            ]
            self.num_counted = first + len(chats)
            while chats:
                # No two texts share random draws, those of later turns included.
                batch = [self._make_request(*chat, next(numbers)) for chat in chats]
                runs = self._decode_untimed(batch)
                # No count reads the pair's other run.
                runs[AUTOREGRESSIVE] = runs[self.untimed[0].name]
                for name, turns in pair_runs(batch, runs).items():
                    self.turns[name] += turns
                chats = self._continue_chats(chats, runs[AUTOREGRESSIVE])
            self.progress.show(self.num_counted)
            if self.limit is not None and not self.limit.allows_counting():
                break

    def _decode_untimed(self, batch: Sequence[TurnRequest]) -> Runs:
        """Decode a batch with the systems that are not timed."""
        tokens, keys = batch_inputs(batch)
        return {
            system.name: self.decoder(system, tokens, self.max_new_tokens, keys)
            for system in self.untimed
        }

    def _is_out_of_time(self) -> bool:
        """Tell whether no time is left for another batch."""
        if self.limit is None or self.num_prompts < MIN_PROMPTS:
            return False
        prompt_seconds = self.seconds / self.num_prompts
        after_next = (
            self._seconds_left(self.num_prompts + self.batch_size)
            - self.batch_size * prompt_seconds
        )
        return after_next < 0

    def _is_speed_decided(self) -> bool:
        """Tell whether enough prompts are timed: with a limit of time, whether the scored drafter
        is faster or slower than decoding without it, in each of its trees.
        """
        own = [system for system in self.systems if system.drafter is self.systems[0].drafter]
        self.is_decided = self.limit is not None and all(
            is_decided(self.turns[system.name]) for system in own
        )
        return self.is_decided

    def _repeat_disturbed(self) -> None:
        """With a limit of time, decode pairs again that something else on the machine disturbed, as
        their times show; rounds of the two alternate.
        """
        if self.limit is None or self.limit.repeats < 2 or self.changes_drafter:
            return
        if self.batch_size > 1 or self.num_prompts < MIN_PROMPTS:
            return
        requests = [request for batch in self.batches for request in batch]
        for system in self.systems:
            turns = self.turns[system.name]
            for number in find_disturbed(turns):
                pair = (system.name, number)
                seconds = sum(
                    run.decode_seconds
                    for run in (turns[number].autoregressive, turns[number].drafted)
                )
                is_enough = len(self.repeated) >= REPEATED_SHARE * len(turns) * len(self.systems)
                if pair in self.repeated or is_enough:
                    continue
                if seconds > self._seconds_left(self.num_prompts):
                    continue
                self.repeated.add(pair)
                [turns[number]] = self._decode_pairs(system, [requests[number]])

    def _decode_pairs(self, system: System, batch: Sequence[TurnRequest]) -> list[Turn]:
        """Decode a batch without and with a system, round by round."""
        tokens, keys = batch_inputs(batch)
        plain, drafted = self.decoder.decode_interleaved(system, tokens, self.max_new_tokens, keys)
        return pair_runs(batch, {AUTOREGRESSIVE: plain, system.name: drafted})[system.name]

    def _seconds_left(self, num_prompts: int) -> float:
        """Return the seconds left for decoding so many prompts; infinity without a limit."""
        if self.limit is None:
            return float("inf")
        num_untimed = 0 if self.counts_apart else len(self.untimed)
        num_runs = 1 + len(self.systems) + num_untimed + (self.oracle is not None)
        return self.limit.seconds_left(
            num_prompts, self.seconds / max(1, self.num_prompts) / num_runs
        )

    def _repeat_seconds(self, times: int) -> float:
        """Estimate the seconds that decoding every pair again takes; each system has an
        autoregressive run of its own.
        """
        return (
            (times - 1)
            * self.seconds
            * 2
            * len(self.systems)
            / (1 + len(self.systems) + len(self.untimed))
        )

    def _print_progress(self, line: str) -> None:
        """Print a line now and then if there is no terminal for a progress bar."""
        if not is_quiet() and not self.progress.line.is_live and self.pace.is_due():
            self.console.print(line, highlight=False)

    def _decode_conversations(self, prompts: Sequence[Prompt]) -> None:
        """Decode a batch of prompts turn by turn; a later turn follows the target's own answers."""
        chats = [(prompt, list[TurnAnswer]()) for prompt in prompts]
        index = 0
        while chats:
            first = sum(map(len, self.batches)) + 1
            batch = [
                self._make_request(*chat, sequence_id)
                for sequence_id, chat in enumerate(chats, first)
            ]
            self.batches.append(batch)
            runs = self._decode(batch, len(self.batches) - 1)
            if self.oracle is not None and self.oracle.is_open:
                texts, keys = batch_inputs(batch)
                runs[ORACLE] = self.oracle.decode(
                    texts, self.max_new_tokens, keys, runs[AUTOREGRESSIVE]
                )
            for name, turns in pair_runs(batch, runs).items():
                self.turns.setdefault(name, []).extend(turns)
            for extension in self.extensions:
                extension.on_answers(runs[self.systems[0].name])
            index += 1
            chats = self._continue_chats(chats, runs[AUTOREGRESSIVE])
            if chats:
                self._print_progress(f"scored {index} turns of a prompt")

    def _make_request(
        self, prompt: Prompt, answers: list[TurnAnswer], sequence_id: int
    ) -> TurnRequest:
        """Return the turn of a prompt that follows these answers."""
        target = self.decoder.target
        kind = opening_kind(target.template, prompt.conversation_for(target, answers))
        return TurnRequest(
            prompt, len(answers), prompt.tokenize_for(target, answers), sequence_id, kind
        )

    def _decode(self, batch: Sequence[TurnRequest], number: int) -> Runs:
        """Decode a batch with every system; the first one rotates from batch to batch."""
        contenders: list[System | None] = [None, *self.systems]
        tokens, keys = batch_inputs(batch)
        runs = {}
        for offset in range(len(contenders)):
            system = contenders[(offset + number) % len(contenders)]
            name = AUTOREGRESSIVE if system is None else system.name
            start = 0.0
            if self.read_energy:
                # The tokens of a warm-up are not counted.
                self.decoder.session(system).warm_up(tokens, self.max_new_tokens, keys)
                start = self.read_energy()
            runs[name] = self.decoder(system, tokens, self.max_new_tokens, keys)
            if self.read_energy:
                self.joules[name] += self.read_energy() - start
                self.num_tokens[name] += sum(len(run.output) for run in runs[name])
        return runs if self.counts_apart else runs | self._decode_untimed(batch)

    def joules_per_token(self, name: str) -> dict[str, float] | None:
        """Return the joules of a token without and with a system, prefill included; None where
        the device counts none.
        """
        if self.read_energy is None:
            return None
        pair = {"autoregressive": AUTOREGRESSIVE, "drafted": name}
        return {
            key: round(self.joules[run] / max(1, self.num_tokens[run]), 6)
            for key, run in pair.items()
        }

    @skip_old_garbage()
    def repeat(self, times: int) -> None:
        """Decode every autoregressive and drafted pair again, `times` - 1 times, if the first times
        are unsteady.

        Rounds of the two alternate, and the pair whose ratio is the median counts. Nothing is
        repeated if that would take minutes.
        """
        names = [system.name for system in self.systems]
        if self.limit is not None:
            # Disturbed pairs were decoded again one by one.
            return
        if times < 2 or not is_unsteady([self.turns[name] for name in names]):
            return
        seconds = self._repeat_seconds(times)
        duration = format_duration(seconds)
        if seconds > PATIENCE:
            self.console.print(
                f"times are unsteady; decoding every pair again would take {duration} more, so it "
                "is not done"
            )
            return
        self.console.print(
            "times are unsteady: every pair is decoded again, round by round, which takes "
            f"{duration} more"
        )
        repeats: dict[str, list[list[Turn]]] = {name: [] for name in names}
        num_pairs = (times - 1) * len(self.batches) * len(self.systems)
        done = 0
        self.pace = Pace(num_pairs)
        self.progress.begin("timing again, pair", num_pairs)
        for _ in range(1, times):
            turns: dict[str, list[Turn]] = {name: [] for name in names}
            for batch in self.batches:
                for system in self.systems:
                    turns[system.name] += self._decode_pairs(system, batch)
                    done += 1
                    self.progress.show(done)
                self._print_progress(
                    f"timed {done} of {num_pairs} pairs again  {self.pace.time_left(done)}"
                )
            for name in names:
                repeats[name].append(turns[name])
        self.turns |= {name: median_pairs(all_turns) for name, all_turns in repeats.items()}
        self.repeats = times

    def _continue_chats(
        self, chats: list[tuple[Prompt, list[TurnAnswer]]], generations: list[Generation]
    ) -> list[tuple[Prompt, list[TurnAnswer]]]:
        """Return the chats that have another turn, with the target's own answer added; a chat
        that is too long ends.
        """
        target = self.decoder.target
        remaining = []
        for (prompt, answers), generation in zip(chats, generations):
            answers = [*answers, TurnAnswer.from_tokens(target, generation.output)]
            if len(answers) >= prompt.num_answers:
                continue
            if len(prompt.tokenize_for(target, answers)) + self.max_new_tokens > target.max_length:
                self.left_out["turn too long"] += prompt.num_answers - len(answers)
                continue
            remaining.append((prompt, answers))
        return remaining


def batch_inputs(batch: Sequence[TurnRequest]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens and the keys of random draws of a batch."""
    return [request.tokens for request in batch], [request.sequence_id for request in batch]


def pair_runs(batch: Sequence[TurnRequest], runs: Runs) -> dict[str, list[Turn]]:
    """Pair every drafted run of a batch with the autoregressive one, by the system's name."""
    return {
        name: [
            Turn(
                request.prompt.id,
                request.turn,
                request.prompt.category,
                plain,
                drafted,
                request.first_kind,
            )
            for request, plain, drafted in zip(batch, runs[AUTOREGRESSIVE], run)
        ]
        for name, run in runs.items()
        if name != AUTOREGRESSIVE
    }
