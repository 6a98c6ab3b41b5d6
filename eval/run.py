"""Score a drafter by really decoding: the one evaluator of every family.

For every prompt the autoregressive run and the drafted runs follow each other, in an order that rotates, in one engine:
same kernels, same cache, same stop handling. The reference of the lossless check is computed apart from all of them.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console
from rich.progress import track

from spectrain.data.chat import render
from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.calibration import Forced, Known, calibrate
from spectrain.decoding.generation import Generation
from spectrain.decoding.guard import Guard
from spectrain.decoding.pruning import Pruning
from spectrain.decoding.replay import Recorder
from spectrain.decoding.session import Choice, tune
from spectrain.drafters.base import Drafter, has_weights
from spectrain.drafters.lookahead import Lookahead
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.baselines import TRANSFORMERS, run_transformers
from spectrain.eval.drafts import record_drafts
from spectrain.eval.drift import own_answers, rule_drift, target_drift
from spectrain.eval.exits import exit_quality, plot_exits
from spectrain.eval.identity import check_identity
from spectrain.eval.memory import extra_memory
from spectrain.eval.metrics import Turn
from spectrain.eval.online import Online, curve, plot
from spectrain.eval.page import write_report
from spectrain.eval.prompts import Prompt, read_prompts
from spectrain.eval.report import print_table
from spectrain.eval.summary import (
    bounds,
    on_known_text,
    sample,
    saved_by_pruning,
    summarise,
    write_prompts,
    write_rounds,
)
from spectrain.eval.sweep import SWEPT, Grid, exit_systems, prune_systems, tree_systems
from spectrain.eval.systems import Decoder, System, describe
from spectrain.files import write_text
from spectrain.models.prepacked import pack_linears
from spectrain.models.target import Target
from spectrain.settings.values import FolderName
from spectrain.trees import Auto, Chain, Eagle2, TreeBuilder
from spectrain.trees.measurements import Calibration

OURS = ("chain", "untrained", "ngram", "lookahead")


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

    name: FolderName = "heldout"  # the folder that the result goes to
    prompts: str | None = None  # a file or a known benchmark; without it the held-out prompts that ship
    categories: list[str] | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    batch_size: int = 1
    baselines: tuple[str, ...] = ("chain", "untrained", "ngram")  # of OURS, in this engine, and TRANSFORMERS, in its own
    check: bool = True  # compare every output with its reference
    oracle: bool = True  # decode once more with every draft right
    report: bool = (
        True  # report.html, the drafts that it shows, what drafting adds to memory, and what training did to the target
    )
    engine: Choice = "auto"  # captured: rounds replayed as CUDA graphs, by default where there is a GPU; eager: a loop
    guard: bool = False  # decode autoregressively while drafting does not pay
    online: bool = False  # the drafter goes on learning from what the target corrects, beside a copy that does not
    online_lr: float = 1e-4
    online_every: int = 8
    online_learn: Literal["corrections", "answers", "split"] = "corrections"
    prune_layer: int | None = None  # drop branches that the target's first layers find unlikely: not among their
    prune_top: int = 8  # likeliest tokens
    sweep: Literal["tree", "exit", "prune"] | None = None  # many settings of one drafter side by side
    trees: tuple[str, ...] | None = None  # sweep=tree: tree builders, all or these,
    budgets: tuple[int, ...] = (8, 16, 32, 64)  # at these sizes
    exits: tuple[int, ...] | None = None  # sweep=exit, sweep=prune: after so many layers, by default up to seven places,
    depths: tuple[int, ...] = (2, 4, 6)  # sweep=exit: chains so long
    tops: tuple[int, ...] = (1, 2, 4, 8, 16)  # sweep=prune: by so many likeliest tokens
    calibration: str | None = None  # prompts that trees are searched and timed on; else openings of the embedded data
    calibration_limit: int = 8
    assistant: str | None = None  # a model's directory, for the baseline of that name
    exit_layer: int | None = None  # for the baseline early_exit

    def __post_init__(self) -> None:
        for key, least in (("limit", 1), ("max_new_tokens", 2), ("batch_size", 1), ("calibration_limit", 1), ("exit_layer", 1),
                           ("online_every", 1), ("prune_layer", 1), ("prune_top", 1)):  # fmt: skip
            if (value := getattr(self, key)) is not None and value < least:
                raise UserError(f"eval.{key}={value}: use {least} or more")
        if not self.online_lr > 0:
            raise UserError(f"eval.online_lr={self.online_lr}: use more than 0")
        if self.online and self.sweep is not None:
            raise UserError(f"eval.sweep={self.sweep}: a drafter that learns while it decodes gives no rows to compare; do one")
        if self.prune_layer is not None and self.sweep is not None:
            raise UserError(f"eval.sweep={self.sweep}: it needs no eval.prune_layer; use eval.sweep=prune with eval.exits")
        if self.engine not in get_args(Choice):
            raise UserError(f"eval.engine={self.engine}: choose from {', '.join(get_args(Choice))}")
        if any(budget < 2 for budget in self.budgets):
            raise UserError(f"eval.budgets={list(self.budgets)}: a tree has 2 nodes or more, the root included")
        for key in ("exits", "depths", "tops"):
            numbers = getattr(self, key)
            if numbers is not None and (not numbers or any(number < 1 for number in numbers)):
                raise UserError(f"eval.{key}={list(numbers)}: give numbers from 1 on")
        for key, given, known in (("trees", self.trees or (), SWEPT), ("baselines", self.baselines, (*OURS, *TRANSFORMERS))):
            if unknown := sorted(set(given) - set(known)):
                raise UserError(f"eval.{key}: {unknown[0]!r} is unknown; choose from {', '.join(known)}")
        if "assistant" in self.baselines and self.assistant is None:
            raise UserError("eval.baselines: assistant needs a model, as in eval.assistant=DIR")
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
        pruning = None if self.prune_layer is None else Pruning(self.prune_layer, self.prune_top)
        if pruning is not None:
            pruning.check(rule, target)
        if (pruning is not None or self.sweep == "prune") and isinstance(builder, Auto):
            raise UserError(
                "tree=auto: it learns from the trees that are verified, and pruned ones mislead it; use another tree"
            )
        systems = [System("drafter", f"drafter, {describe(builder)}", drafter, builder, rule, guard, pruning)]
        self.grid: Grid | None = None
        chain = Chain(min(3, builder.depth), builder.children, builder.temperature, builder.seed)
        plain = rule.matched()  # a drafter that copies text draws nothing, so p / q has no meaning for it
        if self.sweep == "tree":
            return systems + tree_systems(drafter, builder, rule, self.budgets, self.trees or tuple(SWEPT))
        if self.sweep == "exit":
            self.grid, others = exit_systems(target, drafter, builder, rule, self.exits, self.depths)
            return systems + others
        if self.sweep == "prune":
            self.grid, others = prune_systems(target, drafter, builder, rule, self.exits, self.tops)
            return systems + others
        if pruning is not None:
            systems.append(System("unpruned", "the same, not pruned", drafter, builder, rule))
        if self.online:
            still = copy.deepcopy(drafter)
            systems.append(System("static_drafter", "the same, not learning", still, copy.deepcopy(builder), rule))
        if "chain" in self.baselines and not builder.is_chain and not drafter.abilities.copies_text:
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
        if not drafter.abilities.copies_text:  # otherwise nothing is drawn, whatever the builder is made for
            rule.check(builder.children, builder.is_chain)
        if self.online and self.online_learn == "split" and not builder.is_chain:
            raise UserError("eval.online_learn=split: it replays chains, and this tree branches; use tree=chain")
        if "early_exit" in self.baselines and self.exit_layer is None and drafter.abilities.exits is None:
            raise UserError("eval.baselines: early_exit needs eval.exit_layer=N")
        drafter = drafter.to(target.device, target.dtype).eval()
        target.pack()
        tune(drafter, target, lambda: self._calibration_prompts(target), builder.depth)
        systems = self.systems(target, drafter, builder, rule, untrained)
        for system in systems:
            pack_linears(system.drafter)
        calibration = self._calibrate(target, systems)
        online = self._learner(target, drafter, save_online) if self.online else None
        if online is not None:
            systems[0] = replace(systems[0], builder=Recorder(builder))
        forced = Forced({}, builder, rule) if self.oracle else None
        decoder = self._decoder(target, systems[0])
        turns = self._decode_all(decoder, systems, forced, online)
        summary = self._summary(target, systems, turns, forced, decoder)
        folder.mkdir(parents=True, exist_ok=True)
        if online is not None:
            curves = {name: curve(turns[name], self.online_every) for name in ("drafter", "static_drafter")}
            summary["online"] = {**online.summary(), "curves": curves}
            plot(folder / "online.svg", curves, self.online_every)
        if self.report:
            summary["memory"] = extra_memory(target, drafter, builder, rule, turns["drafter"][0].drafted.prompt)
            self._judge_target(target, drafter, turns["drafter"], None if original is None else original(), folder, summary)
        summary["setting"] = {**setting, **self._setting(rule, summary["tree"]), "engine": summary["engine"]}
        summary["setting"]["drafter"] = {**setting.get("drafter", {}), **drafter.saved.settings(drafter)}
        write_text(folder / "samples.jsonl", "".join(json.dumps(sample(turn)) + "\n" for turn in turns["drafter"]))
        write_rounds(folder / "rounds.parquet", turns)
        write_prompts(folder / "prompts.parquet", turns)
        if calibration is not None:
            calibration.save(folder / "calibration.json")
        if self.report:
            texts = {prompt.id: prompt.turns[0] for prompt in self.chosen}
            drafts = record_drafts(target, systems[0], turns["drafter"], texts, self.max_new_tokens)
            write_text(folder / "drafts.jsonl", "".join(json.dumps(line) + "\n" for line in drafts))
        write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")  # after the rest: it says that all is there
        if self.report:
            write_report(folder / "report.html", [folder])
        print_table(summary)
        return summary

    def _decoder(self, target: Target, first: System) -> Decoder:
        """The drafter and what it is compared with run in one engine: if it cannot be captured, nothing is."""
        free = first.rule.matched()
        decoder = Decoder(target, free, self.engine)
        why = decoder.why_eager(first)
        if self.engine == "captured" and why is not None:
            raise UserError(f"eval.engine=captured: {why}; use eval.engine=eager")
        if why is None:
            return decoder
        if decoder.wants_capture:
            Console(stderr=True).print(f"decoded by the loop, and so is what it is compared with: {why}")
        return Decoder(target, free)

    def _summary(
        self,
        target: Target,
        systems: list[System],
        turns: dict[str, list[Turn]],
        forced: Forced | None,
        decoder: Decoder,
    ) -> dict[str, Any]:
        """Everything that was measured; the drafter's own numbers at the top, the other systems' under `compared`."""
        oracle = turns.pop("oracle", [])
        first, mine = systems[0], turns["drafter"]
        found = {}
        for system in systems:
            entry = summarise(turns[system.name], system.builder.is_chain)
            entry["label"], entry["tree"] = system.label, system.builder.settings()
            why = decoder.why_eager(system)
            entry["engine"] = "captured" if why is None else "eager"
            if decoder.wants_capture and why is not None:
                entry["label"], entry["eager_because"] = f"{system.label} (eager)", why
            if system.pruning is not None:
                entry["pruning"] = saved_by_pruning(turns[system.name], system.pruning, target)
            found[system.name] = entry
        guard = None if first.guard is None else first.guard.summary()
        identity = check_identity(target, systems, turns, self.max_new_tokens) if self.check else {}  # it may decode more
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
        if self.grid is not None:
            summary["sweep"] = self.grid.summary(found)
        if theirs := [name for name in self.baselines if name in TRANSFORMERS]:
            summary["transformers"] = run_transformers(
                target, mine, theirs, self.assistant, self.exit_layer or getattr(first.drafter, "exit_layer", None)
            )
        return summary

    def _judge_target(
        self,
        target: Target,
        drafter: Drafter,
        turns: list[Turn],
        original: Target | None,
        folder: Path,
        summary: dict[str, Any],
    ) -> None:
        """What training did to the target, and how good early exits are; both on the untrained target's own answers."""
        texts = [(turn.autoregressive.prompt, turn.autoregressive.output) for turn in turns]
        if original is not None:
            texts = own_answers(original, [prompt for prompt, _ in texts], self.max_new_tokens)
            summary["target_drift"] = target_drift(original, target, texts, self.max_new_tokens)
        if drafter.abilities.exits is not None:
            models = {"target": target} if original is None else {"original": original, "trained": target}
            summary["exits"] = {name: exit_quality(model, texts) for name, model in models.items()}
            plot_exits(folder / "exits.svg", summary["exits"])

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
        if not has_weights(drafter) or drafter.abilities.target_training:
            raise UserError("eval.online: this drafter has no weights of its own to learn with; use one that was trained")
        if self.online_learn == "split" and not drafter.abilities.on_policy.learns_replays:
            raise UserError(
                "eval.online_learn=split: this family does not learn from replayed drafts; use corrections or answers"
            )
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
        self, decoder: Decoder, systems: list[System], forced: Forced | None, online: Online | None
    ) -> dict[str, list[Turn]]:
        """Every prompt's turns, each decoded autoregressively and by every system, interleaved; with `forced`, once more
        with every draft right."""
        turns: dict[str, list[Turn]] = {system.name: [] for system in systems}
        contenders: list[System | None] = [None, *systems]
        target = decoder.target
        known = Known(forced) if forced is not None and decoder.why_eager(systems[0]) is None else None
        opening = prompt_tokens(target, self.chosen[0].opening)
        for system in contenders:  # warm up, outside every timer
            decoder(system, [opening], min(8, self.max_new_tokens), [0])
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
                    runs[name] = decoder(system, batch, self.max_new_tokens, rows)
                if forced is not None:
                    answers = zip(rows, runs["autoregressive"])
                    forced.sequences = {key: answer.prompt + answer.output for key, answer in answers}
                    oracle = System("oracle", "every draft right", systems[0].drafter, forced, decoder.rule)
                    runs["oracle"] = decoder(oracle, batch, self.max_new_tokens, rows)
                    if known is not None:  # the loop has taken notes; the time is that of the engine
                        runs["oracle"] = decoder(replace(oracle, builder=known), batch, self.max_new_tokens, rows)
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


def prompt_tokens(target: Target, messages: list[dict[str, str]]) -> list[int]:
    """The token ids after which the assistant goes on."""
    text = render(target.tokenizer, messages, prompt=True)
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])
