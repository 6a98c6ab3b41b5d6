"""Decoding in turn: for every prompt the autoregressive run and the drafted ones follow each other, in a rotating order."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.generation import Generation
from spectrain.eval.metrics import Turn
from spectrain.eval.noise import is_unsteady, median_pairs
from spectrain.eval.oracle import Oracle
from spectrain.eval.parts import Part
from spectrain.eval.prompts import Prompt
from spectrain.eval.systems import Decoder, System
from spectrain.models.chat_template import Message
from spectrain.training.progress import Pace, format_duration

AUTOREGRESSIVE, ORACLE = "autoregressive", "oracle"

PATIENCE = 300  # seconds that decoding everything again may take

Runs = dict[str, list[Generation]]


@dataclass(frozen=True)
class Asked:
    """One turn that everything answers."""

    prompt: Prompt
    turn: int
    tokens: list[int]
    sequence_id: int  # keys its random draws


class Interleaving:
    """Decodes prompts with all systems; `turns` holds what each gave, beside the autoregressive run."""

    def __init__(
        self,
        decoder: Decoder,
        systems: Sequence[System],
        parts: Sequence[Part],
        oracle: Oracle | None,
        max_new_tokens: int,
        batch_size: int,
    ) -> None:
        self.decoder, self.systems, self.parts, self.oracle = decoder, list(systems), parts, oracle
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.turns: dict[str, list[Turn]] = {system.name: [] for system in systems}
        self.batches: list[list[Asked]] = []
        self.left_out = Counter[str]()
        self.console, self.pace = Console(stderr=True), Pace(0)
        self.repeats, self.seconds = 1, 0.0  # times that all is decoded, and how long the first took

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Decode all turns of all prompts."""
        target = self.decoder.target
        opening = tokenize_prompt(target.template, prompts[0].opening, target.vision)
        for system in (None, *self.systems):  # warm up, outside every timer
            self.decoder(system, [opening], min(8, self.max_new_tokens), [0])
        for part in self.parts:
            part.begin()
        starts = range(0, len(prompts), self.batch_size)
        console, self.pace = self.console, Pace(len(prompts))
        for first in track(starts, "prompts", console=console, disable=not console.is_terminal, transient=True):
            began = time.perf_counter()
            self._converse(prompts[first : first + self.batch_size])
            self.seconds += time.perf_counter() - began
            done = min(first + self.batch_size, len(prompts))
            if not console.is_terminal and done < len(prompts) and self.pace.is_due():
                console.print(f"scored {done} of {len(prompts)} prompts  {self.pace.time_left(done)}", highlight=False)

    def _converse(self, prompts: Sequence[Prompt]) -> None:
        """Decode a batch of prompts turn by turn; a later turn follows the target's own answers."""
        chats, target = [(prompt, list(prompt.before)) for prompt in prompts], self.decoder.target
        index = 0
        while chats:
            batch: list[Asked] = []
            for prompt, messages in chats:
                messages.append({"role": "user", "content": prompt.turns[index]})
                tokens = tokenize_prompt(target.template, messages, target.vision)
                batch.append(Asked(prompt, index, tokens, sum(map(len, self.batches)) + len(batch) + 1))
            self.batches.append(batch)
            runs = self._decode(batch, len(self.batches) - 1)
            if self.oracle is not None and self.oracle.is_open:
                texts, keys = [one.tokens for one in batch], [one.sequence_id for one in batch]
                runs[ORACLE] = self.oracle.decode(texts, self.max_new_tokens, keys, runs[AUTOREGRESSIVE])
            for name, turns in paired(batch, runs).items():
                self.turns.setdefault(name, []).extend(turns)
            for part in self.parts:
                part.see(runs[self.systems[0].name])
            index += 1
            chats = self._going_on(chats, runs[AUTOREGRESSIVE], index)
            if chats and not self.console.is_terminal and self.pace.is_due():  # a prompt may have hundreds of turns
                self.console.print(f"scored {index} turns of a prompt", highlight=False)

    def _decode(self, batch: Sequence[Asked], number: int) -> Runs:
        """A batch by everything, the first contender another one from batch to batch."""
        contenders: list[System | None] = [None, *self.systems]
        tokens, keys = [one.tokens for one in batch], [one.sequence_id for one in batch]
        runs = {}
        for offset in range(len(contenders)):
            system = contenders[(offset + number) % len(contenders)]
            name = AUTOREGRESSIVE if system is None else system.name
            runs[name] = self.decoder(system, tokens, self.max_new_tokens, keys)
        return runs

    def repeat(self, times: int) -> None:
        """Where the times of the first run cannot be relied on, decode every autoregressive and drafted pair again, `times` - 1
        times, round by round in turn; of these the one whose ratio is the median counts. Not where it would take minutes."""
        names = [system.name for system in self.systems]
        if times < 2 or not is_unsteady([self.turns[name] for name in names]):
            return
        more = (times - 1) * self.seconds * 2 * len(names) / (1 + len(names))  # each with an autoregressive run of its own
        if more > PATIENCE:
            self.console.print(
                f"times are unsteady; to decode every pair again would take {format_duration(more)} more: not done"
            )
            return
        self.console.print(
            f"times are unsteady: every pair is decoded again, round by round, which takes {format_duration(more)} more"
        )
        found: dict[str, list[list[Turn]]] = {name: [] for name in names}
        for _ in range(1, times):
            turns: dict[str, list[Turn]] = {name: [] for name in names}
            for batch in self.batches:
                tokens, keys = [one.tokens for one in batch], [one.sequence_id for one in batch]
                for system in self.systems:
                    plain, drafted = self.decoder.in_turn(system, tokens, self.max_new_tokens, keys)
                    turns[system.name] += paired(batch, {AUTOREGRESSIVE: plain, system.name: drafted})[system.name]
            for name in names:
                found[name].append(turns[name])
        self.turns |= {name: median_pairs(all_turns) for name, all_turns in found.items()}
        self.repeats = times

    def _going_on(
        self, chats: list[tuple[Prompt, list[Message]]], answers: list[Generation], index: int
    ) -> list[tuple[Prompt, list[Message]]]:
        """The chats that have another turn, with the target's own answer added; one that has grown too long ends here."""
        target, left = self.decoder.target, []
        for (prompt, messages), answer in zip(chats, answers):
            text = str(target.tokenizer.decode([token for token in answer.output if token not in target.stop_ids]))
            messages.append({"role": "assistant", "content": text})
            if index >= len(prompt.turns):
                continue
            following = [*messages, {"role": "user", "content": prompt.turns[index]}]
            if len(tokenize_prompt(target.template, following, target.vision)) + self.max_new_tokens > target.max_length:
                self.left_out["turn too long"] += len(prompt.turns) - index
                continue
            left.append((prompt, messages))
        return left


def paired(batch: Sequence[Asked], runs: Runs) -> dict[str, list[Turn]]:
    """Every drafted run of a batch beside the autoregressive one, by the system's name."""
    return {
        name: [
            Turn(one.prompt.id, one.turn, one.prompt.category, plain, drafted)
            for one, plain, drafted in zip(batch, runs[AUTOREGRESSIVE], found)
        ]
        for name, found in runs.items()
        if name != AUTOREGRESSIVE
    }
