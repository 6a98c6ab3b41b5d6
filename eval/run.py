"""Score a drafter by really decoding: the one evaluator of every family.

For every prompt the autoregressive run and the drafted runs follow each other, in an order that rotates, in one engine:
same kernels, same cache, same stop handling. The reference of the lossless check is computed apart from all of them.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import track

from spectrain.acceptance import AcceptanceRule, Greedy, Match
from spectrain.calibration import Calibration, Forced, calibrate
from spectrain.data.chat import render
from spectrain.decode import Generation, decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.lookahead import Lookahead
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.baselines import (
    NEAR_TIE,
    TRANSFORMERS,
    Identity,
    first_difference,
    generate,
    logit_gap,
    plain_model,
    run_transformers,
)
from spectrain.eval.drift import rule_drift, target_drift
from spectrain.eval.metrics import Turn
from spectrain.eval.online import Online, curve, plot
from spectrain.eval.prompts import Prompt, read_prompts
from spectrain.eval.report import print_table
from spectrain.eval.summary import bounds, on_known_text, sample, summarise, write_rounds, write_whole
from spectrain.guard import Guard
from spectrain.packing import pack_linears
from spectrain.replay import Recorder
from spectrain.shapes import Auto, Cast, Chain, DySpec, Eagle2, Entropy, OptTree, Sequoia, Static, TreeBuilder
from spectrain.target import Target

OURS = ("chain", "untrained", "ngram", "lookahead")
SWEPT: dict[str, Callable[[int, int], TreeBuilder]] = {
    "chain": lambda depth, budget: Chain(depth),
    "static": Static,
    "sequoia": Sequoia,
    "eagle2": Eagle2,
    "opt": OptTree,
    "dyspec": lambda depth, budget: DySpec(depth, budget, children="deterministic"),
    "entropy": Entropy,
    "cast": Cast,
    "auto": Auto,
}


@dataclass(frozen=True)
class System:
    """A drafter with a tree and a rule: one row of the table."""

    name: str
    label: str
    drafter: Drafter
    builder: TreeBuilder
    rule: AcceptanceRule
    guard: Guard | None = None


@dataclass(frozen=True)
class Job:
    """One turn that is decoded by everything: its prompt, and the row key of its random draws."""

    prompt: Prompt
    turn: int
    tokens: list[int]
    row: int


@dataclass
class Evaluation:
    """Which prompts, how long, and what else is decoded beside the drafter."""

    name: str = "heldout"  # the folder that the result goes to
    prompts: str | None = None  # a file or a known benchmark; without it the held-out prompts that ship
    categories: list[str] | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    batch_size: int = 1
    baselines: tuple[str, ...] = ("chain", "untrained", "ngram")  # of OURS, in this engine, and TRANSFORMERS, in its own
    check: bool = True  # compare every output with its reference
    oracle: bool = True  # decode once more with every draft right
    guard: bool = False  # decode autoregressively while drafting does not pay
    online: bool = False  # the drafter goes on learning from what the target corrects, beside a copy that does not
    online_lr: float = 1e-4
    online_every: int = 8
    online_learn: Literal["corrections", "answers", "split"] = "corrections"
    sweep: Literal["tree"] | None = None  # tree: tree builders, all or those in `trees`, at `budgets`
    trees: tuple[str, ...] | None = None
    budgets: tuple[int, ...] = (8, 16, 32, 64)
    calibration: str | None = None  # prompts that trees are searched and timed on; else openings of the embedded data
    calibration_limit: int = 8
    assistant: str | None = None  # a model's directory, for the baseline of that name
    exit_layer: int | None = None  # for the baseline early_exit

    def __post_init__(self) -> None:
        for key, least in (("limit", 1), ("max_new_tokens", 2), ("batch_size", 1), ("calibration_limit", 1), ("exit_layer", 1),
                           ("online_every", 1)):  # fmt: skip
            if (value := getattr(self, key)) is not None and value < least:
                raise UserError(f"eval.{key}={value}: use {least} or more")
        if not self.online_lr > 0:
            raise UserError(f"eval.online_lr={self.online_lr}: use more than 0")
        if self.online and self.sweep is not None:
            raise UserError(f"eval.sweep={self.sweep}: a drafter that learns while it decodes gives no rows to compare; do one")
        if any(budget < 2 for budget in self.budgets):
            raise UserError(f"eval.budgets={list(self.budgets)}: a tree has 2 nodes or more, the root included")
        for key, given, known in (("trees", self.trees or (), SWEPT), ("baselines", self.baselines, (*OURS, *TRANSFORMERS))):
            if unknown := sorted(set(given) - set(known)):
                raise UserError(f"eval.{key}: {unknown[0]!r} is unknown; choose from {', '.join(known)}")
        if "assistant" in self.baselines and self.assistant is None:
            raise UserError("eval.baselines: assistant needs a model, as in eval.assistant=DIR")
        if "early_exit" in self.baselines and self.exit_layer is None:
            raise UserError("eval.baselines: early_exit needs eval.exit_layer=N")
        read = read_prompts(self.prompts, self.limit, self.categories)
        self.chosen, self.skipped = read.prompts, dict(read.skipped)

    def check_prompts(self, target: Target) -> None:
        """Leave out prompts that do not fit the target's context with their answer; stop where none does."""
        lengths = [len(prompt_tokens(target, prompt.opening)) for prompt in self.chosen]
        room = target.max_length - self.max_new_tokens
        fitting = [prompt for prompt, length in zip(self.chosen, lengths) if length <= room]
        if not fitting:
            raise UserError(
                f"eval.prompts: the shortest prompt has {min(lengths)} tokens and, with "
                f"eval.max_new_tokens={self.max_new_tokens}, none fits the context of {target.name} ({target.max_length} "
                "tokens); shorten one of them"
            )
        if len(fitting) < len(self.chosen):
            self.skipped["too long"] = len(self.chosen) - len(fitting)
            self.chosen = fitting

    def systems(
        self,
        target: Target,
        drafter: Drafter,
        builder: TreeBuilder,
        rule: AcceptanceRule,
        untrained: Callable[[], Drafter] | None,
    ) -> list[System]:
        """The drafter with its tree first, then what it is shown beside."""
        guard = Guard() if self.guard else None
        systems = [System("drafter", f"drafter, {describe(builder)}", drafter, builder, rule, guard)]
        chain = Chain(min(3, builder.depth), builder.children, builder.temperature, builder.seed)
        plain = rule.matched()  # a drafter that copies text draws nothing, so p / q has no meaning for it
        if self.sweep == "tree":
            for other in sweep_builders(builder.depth, self.budgets, self.trees or tuple(SWEPT)):
                rule.check(other.children, other.is_chain)
                systems.append(System(f"{other.name}-{other.budget}", describe(other), drafter, other, rule))
            return systems
        if self.online:
            still = copy.deepcopy(drafter)
            systems.append(System("static_drafter", "the same, not learning", still, copy.deepcopy(builder), rule))
        if "chain" in self.baselines and not builder.is_chain and not isinstance(drafter, (Ngram, Lookahead)):
            systems.append(System("chain", "the same, chain", drafter, chain, rule))
        if "untrained" in self.baselines and untrained is not None:
            fresh = untrained().to(target.device, target.dtype).eval()
            systems.append(System("untrained", "untrained", fresh, copy.deepcopy(builder), rule))
        if "ngram" in self.baselines and not isinstance(drafter, Ngram):
            systems.append(System("ngram", "n-gram lookup", Ngram(target), Chain(chain.depth), plain))
        if "lookahead" in self.baselines and not isinstance(drafter, Lookahead):
            systems.append(System("lookahead", "lookahead", Lookahead(target), Eagle2(builder.depth, builder.budget), plain))
        return systems

    def score(
        self,
        target: Target,
        drafter: Drafter,
        builder: TreeBuilder,
        rule: AcceptanceRule,
        folder: Path,
        setting: dict[str, Any],
        untrained: Callable[[], Drafter] | None = None,
        original: Callable[[], Target] | None = None,
        save_online: Callable[[Drafter], None] | None = None,
    ) -> dict[str, Any]:
        """Decode every prompt with every system, write what was found to `folder`, print the table.

        `original` loads the target as it was before training, where the drafter's training changed it. `save_online` keeps a
        drafter that has learnt.
        """
        if drafter.has_weights:  # otherwise it copies text, whatever the builder is made for
            rule.check(builder.children, builder.is_chain)
        if self.online and self.online_learn == "split" and not builder.is_chain:
            raise UserError("eval.online_learn=split: it replays chains, and this tree branches; use tree=chain")
        drafter = drafter.to(target.device, target.dtype).eval()
        systems = self.systems(target, drafter, builder, rule, untrained)
        target.pack()
        for system in systems:
            pack_linears(system.drafter)
        calibration = self._calibrate(target, systems)
        online = self._learner(target, drafter, save_online) if self.online else None
        if online is not None:
            systems[0] = replace(systems[0], builder=Recorder(builder))
        forced = Forced({}, builder, rule) if self.oracle else None
        turns = self._decode_all(target, systems, forced, online)
        summary = self._summary(target, systems, turns, forced)
        folder.mkdir(parents=True, exist_ok=True)
        if online is not None:
            curves = {name: curve(turns[name], self.online_every) for name in ("drafter", "static_drafter")}
            summary["online"] = {**online.summary(), "curves": curves}
            plot(folder / "online.svg", curves, self.online_every)
        if original is not None:
            summary["target_drift"] = target_drift(original(), target, turns["drafter"], self.max_new_tokens)
        summary["setting"] = {**setting, **self._setting(rule, summary["tree"])}
        write_whole(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        write_whole(folder / "samples.jsonl", "".join(json.dumps(sample(turn)) + "\n" for turn in turns["drafter"]))
        write_rounds(folder / "rounds.parquet", turns)
        if calibration is not None:
            calibration.save(folder / "calibration.json")
        print_table(summary)
        return summary

    def _summary(
        self, target: Target, systems: list[System], turns: dict[str, list[Turn]], forced: Forced | None
    ) -> dict[str, Any]:
        """Everything that was measured; the drafter's own numbers at the top, the other systems' under `compared`."""
        oracle = turns.pop("oracle", [])
        first, mine = systems[0], turns["drafter"]
        found = {}
        for system in systems:
            entry = summarise(turns[system.name], system.builder.is_chain)
            entry["label"], entry["tree"] = system.label, system.builder.settings()
            found[system.name] = entry
        guard = None if first.guard is None else first.guard.summary()
        identity = self._identity(target, systems, turns) if self.check else {}  # it may decode more: after what was measured
        for name, entry in found.items():
            entry["lossless"] = identity[name].summary() if name in identity else None
        summary = found.pop("drafter")
        rolled_out = forced is not None and any(forced.counts)
        if forced is not None and rolled_out:
            summary["forced"] = on_known_text(forced, summary)
        summary["bounds"] = bounds(target, first.drafter, mine, oracle if rolled_out else [])
        if guard is not None:
            summary["guard"] = guard
        if not first.rule.lossless:
            summary["drift"] = rule_drift(target, mine)
        summary["compared"] = found
        if theirs := [name for name in self.baselines if name in TRANSFORMERS]:
            summary["transformers"] = run_transformers(target, mine, theirs, self.assistant, self.exit_layer)
        return summary

    def _setting(self, rule: AcceptanceRule, tree: dict[str, object]) -> dict[str, Any]:
        """What the numbers depend on, besides what the caller knows."""
        return {
            "prompts": len(self.chosen),
            "skipped": self.skipped,
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "rule": rule.name,
            "tree": tree,
            "guard": self.guard,
            "threads": torch.get_num_threads(),
        }

    def _learner(self, target: Target, drafter: Drafter, save: Callable[[Drafter], None] | None) -> Online:
        if not drafter.has_weights or drafter.trains_target:
            raise UserError("eval.online: this drafter has no weights of its own to learn with; use one that was trained")
        return Online(drafter, target, self.online_lr, self.online_every, self.online_learn, save or (lambda learnt: None))

    def _calibrate(self, target: Target, systems: list[System]) -> Calibration | None:
        """Prepare every builder that needs it; what was measured for the drafter's own."""
        first, calibration = systems[0], None
        for children in dict.fromkeys(system.builder.children for system in systems):  # hits depend on how they are chosen
            mine = [one.builder for one in systems if one.drafter is first.drafter and one.builder.children == children]
            if any(builder.needs for builder in mine):
                found = calibrate(target, first.drafter, mine, first.rule, self._calibration_prompts(target))
                calibration = found if children == first.builder.children else calibration
        for system in systems:  # the same shapes for a drafter that is compared with this one
            if calibration is not None and system.name in ("untrained", "static_drafter"):
                system.builder.prepare(calibration)
        return calibration

    def _calibration_prompts(self, target: Target) -> list[list[int]]:
        """Openings of the embedded conversations, or of the prompts that eval.calibration names."""
        if self.calibration is not None:
            openings = [prompt.opening for prompt in read_prompts(self.calibration, self.calibration_limit).prompts]
        else:
            from spectrain.data.readers import Embedded

            openings = [messages[:1] for messages in Embedded(limit=self.calibration_limit).conversations()]
        tokens = [prompt_tokens(target, opening) for opening in openings]
        return [prompt for prompt in tokens if len(prompt) + 64 <= target.max_length] or tokens[:1]

    def _decode_all(
        self, target: Target, systems: list[System], forced: Forced | None, online: Online | None
    ) -> dict[str, list[Turn]]:
        """Every prompt's turns, each decoded autoregressively and by every system, interleaved; with `forced`, once more
        with every draft right."""
        turns: dict[str, list[Turn]] = {system.name: [] for system in systems}
        contenders: list[System | None] = [None, *systems]
        free = systems[0].rule.matched()
        opening = prompt_tokens(target, self.chosen[0].opening)
        for system in contenders:  # warm up, outside every timer
            run(target, system, free, [opening], min(8, self.max_new_tokens), [0])
        if isinstance(systems[0].builder, Recorder):
            systems[0].builder.rounds = []
        row = number = 0
        starts = range(0, len(self.chosen), self.batch_size)
        console = Console(stderr=True)
        for first in track(starts, "prompts", console=console, disable=not console.is_terminal, transient=True):
            chats = [(prompt, list(prompt.before)) for prompt in self.chosen[first : first + self.batch_size]]
            index = 0
            while chats:
                jobs = []
                for prompt, messages in chats:
                    messages.append({"role": "user", "content": prompt.turns[index]})
                    jobs.append(Job(prompt, index, prompt_tokens(target, messages), row := row + 1))
                runs: dict[str, list[Generation]] = {}
                batch, rows = [job.tokens for job in jobs], [job.row for job in jobs]
                for offset in range(len(contenders)):
                    system = contenders[(offset + number) % len(contenders)]
                    name = "autoregressive" if system is None else system.name
                    runs[name] = run(target, system, free, batch, self.max_new_tokens, rows)
                if forced is not None:
                    answers = zip(rows, runs["autoregressive"])
                    forced.sequences = {key: answer.prompt + answer.output for key, answer in answers}
                    oracle = System("oracle", "every draft right", systems[0].drafter, forced, free)
                    runs["oracle"] = run(target, oracle, free, batch, self.max_new_tokens, rows)
                    forced = forced if any(forced.counts) else None  # the drafter drafts by itself: nothing can be forced on it
                for name in runs.keys() - {"autoregressive"}:
                    for job, plain, drafted in zip(jobs, runs["autoregressive"], runs[name]):
                        turn = Turn(job.prompt.id, job.turn, job.prompt.category, plain, drafted)
                        turns.setdefault(name, []).append(turn)
                if online is not None and isinstance(systems[0].builder, Recorder):
                    online.see(runs["drafter"], systems[0].builder)
                index, number = index + 1, number + 1
                chats = self._going_on(target, chats, runs["autoregressive"], index)
        return turns

    def _going_on(
        self, target: Target, chats: list[tuple[Prompt, list[dict[str, str]]]], answers: list[Generation], index: int
    ) -> list[tuple[Prompt, list[dict[str, str]]]]:
        """The chats that have another turn, with the target's own answer added; one that has grown too long ends here."""
        left = []
        for (prompt, messages), answer in zip(chats, answers):
            text = str(target.tokenizer.decode([token for token in answer.output if token not in target.stop_ids]))
            messages.append({"role": "assistant", "content": text})
            if index >= len(prompt.turns):
                continue
            following = [*messages, {"role": "user", "content": prompt.turns[index]}]
            if len(prompt_tokens(target, following)) + self.max_new_tokens > target.max_length:
                self.skipped["turn too long"] = self.skipped.get("turn too long", 0) + len(prompt.turns) - index
                continue
            left.append((prompt, messages))
        return left

    def _identity(self, target: Target, systems: list[System], turns: dict[str, list[Turn]]) -> dict[str, Identity]:
        """Compare every output with its reference: `generate` for greedy decoding, our autoregressive run for sampling.

        A rule that weighs p against q is the target's in distribution, not token by token: nothing is compared.
        """
        found = {}
        greedy = [system for system in systems if isinstance(system.rule, Greedy)]
        references: list[list[int]] = []
        if greedy:
            with plain_model(target) as model:
                for turn in turns[greedy[0].name]:
                    references.append(generate(model, turn.autoregressive.prompt, self.max_new_tokens, target.stop_ids))
        for system in systems:
            if system in greedy:
                identity = Identity(system.rule.name, True, "transformers generate")
            elif isinstance(system.rule, Match):
                identity = Identity(system.rule.name, True, "autoregressive, same random draws")
                references = [turn.autoregressive.output for turn in turns[system.name]]
            else:
                reference = "the target's distribution, by proof" if system.rule.lossless else "none: the rule is lossy"
                found[system.name] = Identity(system.rule.name, system.rule.lossless, reference)
                continue
            found[system.name] = identity
            for row, (turn, wanted) in enumerate(zip(turns[system.name], references), 1):
                self._compare(target, system, identity, turn, wanted, row)
        return found

    def _compare(self, target: Target, system: System, found: Identity, turn: Turn, wanted: list[int], row: int) -> None:
        """Count a turn as identical; where two logits are nearly equal, go on from the reference's token."""
        found.checked += 1
        output = list(turn.drafted.output)
        while (position := first_difference(output, wanted)) is not None:
            where = {"id": turn.id, "turn": turn.turn, "position": position}
            prefix = wanted[:position]
            tied = isinstance(system.rule, Greedy)  # a sampled token is decided by noise as well: equal logits excuse nothing
            gap = logit_gap(target, turn.drafted.prompt + prefix) if tied else None
            if gap is None or gap >= NEAR_TIE or position >= len(wanted):
                found.differences.append({**where, "gap": gap})
                return
            found.near_ties.append({**where, "gap": gap})
            prefix = wanted[: position + 1]
            left = self.max_new_tokens - len(prefix)
            if left < 1 or prefix[-1] in target.stop_ids:
                output = prefix
                continue
            context = turn.drafted.prompt + prefix
            output = prefix + run(target, system, system.rule, [context], left, [row])[0].output
        found.identical += 1


def run(
    target: Target, system: System | None, rule: AcceptanceRule, prompts: list[list[int]], limit: int, rows: list[int]
) -> list[Generation]:
    """Decode prompts with a system, or autoregressively by `rule`; `rows` key their random draws."""
    if system is None:
        return decode(target, prompts, rule, limit, rows=rows)
    return decode(target, prompts, system.rule, limit, system.drafter, system.builder, rows, system.guard)


def prompt_tokens(target: Target, messages: list[dict[str, str]]) -> list[int]:
    """The token ids after which the assistant goes on."""
    text = render(target.tokenizer, messages, prompt=True)
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def describe(builder: TreeBuilder) -> str:
    """A builder in a few words."""
    drawn = "" if builder.children == "deterministic" else ", drawn"
    shape = f"chain of {builder.depth}" if builder.is_chain else f"{builder.name}, {builder.budget} nodes"
    return shape + drawn


def sweep_builders(depth: int, budgets: tuple[int, ...], names: tuple[str, ...]) -> list[TreeBuilder]:
    """The named kinds of tree at every budget, `depth` deep; a chain has one size."""
    builders: list[TreeBuilder] = [Chain(depth)] if "chain" in names else []
    return builders + [SWEPT[name](depth, budget) for budget in budgets for name in names if name != "chain"]
