"""Score a drafter by really decoding: the one evaluator of every family.

For every prompt the autoregressive run and the drafted runs follow each other, in an order that rotates, in one engine:
same kernels, same cache, same stop handling. The reference of the lossless check is computed apart from all of them.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from spectrain.bench.traffic import count_traffic
from spectrain.data.chat import tokenize_prompt
from spectrain.data.images import content_text
from spectrain.decoding.calibration import calibrate_builders, resolve_rule
from spectrain.decoding.guard import Guard
from spectrain.decoding.pruning import fit_early_heads
from spectrain.decoding.session import check_compatibility, prepare_for_decoding, tune_drafter
from spectrain.drafters.capabilities import find_datastore
from spectrain.errors import UserError
from spectrain.eval.baselines import OURS, OWN, TRANSFORMERS, Baselines, goes_by_clock
from spectrain.eval.drafts import record_drafts
from spectrain.eval.drift import rule_drift
from spectrain.eval.exits import judge_target
from spectrain.eval.identity import check_identity
from spectrain.eval.leaks import admit, refuse_answers
from spectrain.eval.memory import extra_memory
from spectrain.eval.metrics import Turn
from spectrain.eval.noise import Noise, judge, load_of, spread
from spectrain.eval.oracle import Oracle
from spectrain.eval.page import write_report
from spectrain.eval.parts import Part, Results
from spectrain.eval.prompts import read_prompts
from spectrain.eval.report import print_table
from spectrain.eval.settings import Learning, Scoring, Sweeping
from spectrain.eval.summary import (
    bounds,
    sample,
    saved_by_pruning,
    summarise,
    write_lines,
    write_prompts,
    write_rounds,
)
from spectrain.eval.systems import Decoder, System, describe
from spectrain.eval.tasks import Reference, check_execution, task_score
from spectrain.eval.turns import ORACLE, Interleaving
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import Auto
from spectrain.trees.measurements import Calibration, RuleForecast

ALIKE = ("shipped", "untrained", "static_drafter", "copies", "retrieval")  # whose trees are prepared as the drafter's own


@dataclass
class Evaluation(Sweeping, Learning, Scoring):
    """Decodes what its settings ask for, which stand in asked.py by what they are for; all are keys of `eval`."""

    def __post_init__(self) -> None:
        self.check_scoring()
        self.check_learning()
        self.check_sweeping()
        if self.online and self.sweep is not None:
            raise UserError(f"eval.sweep={self.sweep}: a drafter that learns while it decodes gives no rows to compare; do one")
        read = read_prompts(self.prompts, self.limit, self.categories)
        self.chosen, self.skipped = read.prompts, dict(read.skipped)
        if self.execute:
            check_execution(list(self._references.values()))

    def check_prompts(self, target: Target) -> None:
        """Leave out prompts that do not fit the target's context with their answer; stop where none does."""
        lengths = [len(tokenize_prompt(target.template, prompt.opening, target.vision)) for prompt in self.chosen]
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

    def parts(self) -> list[Part]:
        """What is decoded, checked and written beside the drafter."""
        ours = () if self.sweep is not None else tuple(name for name in self.baselines if name in OURS)
        theirs = tuple(name for name in self.baselines if name in TRANSFORMERS)
        baselines = Baselines((*ours, *theirs), self.assistant, self.exit_layer, self.store, self.chosen)
        return [*self.sweeping(), *self.extra_parts(), *self.learning(), baselines]

    def extra_parts(self) -> list[Part]:
        """Parts that a subclass adds, decoded in turn with the others."""
        return []

    def score(self, candidate: Candidate, folder: Path) -> dict[str, Any]:
        """Decode every prompt with every system, write what was found to `folder`, print the table."""
        parts = self.parts()
        asked = candidate.rule.name
        candidate, rules = self._ready(candidate, parts)
        systems, calibration = self._systems(candidate, parts)
        decoder = self._decoder(candidate.target, systems[0])
        oracle = Oracle(systems[0], decoder) if self.oracle else None
        decoding = Interleaving(decoder, systems, parts, oracle, self.max_new_tokens, self.batch_size)
        decoding.run(self.chosen)
        decoding.repeat(1 if self.online else self.repeats)
        results = self._results(candidate, decoding, folder)
        folder.mkdir(parents=True, exist_ok=True)
        summary = self._summary(results, decoding)
        measured = [oracle.forced.rule_forecast if oracle else None, calibration.rules if calibration else None]
        if known := next((one for one in (rules, *measured) if one is not None), None):
            summary["rules"] = known.summary()
        for part in parts:
            summary |= part.report(results)
        if self.report:
            summary |= self._judgements(results)
        summary["setting"] = {**self._setting(candidate, summary, decoding), "rule": asked}
        self._write(results, summary, calibration)
        print_table(summary)
        return summary

    def _ready(self, candidate: Candidate, parts: list[Part]) -> tuple[Candidate, RuleForecast | None]:
        """The candidate, checked, on the target's device and tuned, with a rule that leaves nothing open."""
        target, drafter, builder, rule = candidate.target, candidate.drafter, candidate.builder, candidate.rule
        check_compatibility(drafter, builder, rule)
        for part in parts:
            part.check(candidate)
            part.keep(candidate)
        if (store := find_datastore(drafter)) is not None:
            admit(store, self.chosen, candidate.setting)
        drafter.to(target.device, target.dtype).eval()
        target.pack_weights()
        tune_drafter(drafter, target, lambda: self._calibration_prompts(target), builder.depth)
        forecast = None
        if rule.is_unresolved and self.sweep is None and self.prune_layer is None:
            rule, builder, forecast = resolve_rule(target, drafter, builder, rule, lambda: self._calibration_prompts(target))
        elif rule.is_unresolved:  # trees of all kinds, and pruned ones, can be judged by this rule only
            rule = rule.matching_rule()
        candidate = replace(candidate, rule=rule, builder=builder)
        if self._measures(candidate):
            candidate = replace(candidate, builder=Auto(), default_builder=builder)
        return candidate, forecast

    def _measures(self, candidate: Candidate) -> bool:
        """Whether the tree that pays by this machine's times is scored first."""
        if not self.measured or self.sweep is not None or self.prune_layer is not None or self.online:
            return False
        able = goes_by_clock(candidate.target, candidate.drafter, candidate.builder)
        return able and not Decoder(candidate.target, candidate.rule.matching_rule(), self.engine).wants_capture

    def _systems(self, candidate: Candidate, parts: list[Part]) -> tuple[list[System], Calibration | None]:
        """What is decoded, the drafter with its tree first, all of it ready."""
        target, drafter, builder, rule = candidate.target, candidate.drafter, candidate.builder, candidate.rule
        first = System("drafter", f"drafter, {describe(builder)}", drafter, builder, rule, Guard() if self.guard else None)
        for part in parts:
            first = part.own(candidate, first)
        systems = [first, *(system for part in parts for system in part.systems(candidate, first))]
        for system in systems:
            prepare_for_decoding(system.drafter, target)
        prunings = [system.pruning for system in systems if system.pruning is not None]
        if prunings and self.prune_rank:
            rank = min(self.prune_rank, target.width // 2)
            fit_early_heads(target, prunings, self._calibration_prompts(target), rank)
        return systems, self._calibrate(target, systems)

    def _decoder(self, target: Target, first: System) -> Decoder:
        """The drafter and what it is compared with run in one engine: if it cannot be captured, nothing is."""
        free = first.rule.matching_rule()
        decoder = Decoder(target, free, self.engine)
        why = decoder.why_eager(first)
        if self.engine == "captured" and why is not None:
            raise UserError(f"eval.engine=captured: {why}; use eval.engine=eager")
        if why is None:
            return decoder
        if decoder.wants_capture:
            Console(stderr=True).print(f"decoded by the loop, and so is what it is compared with: {why}")
        return Decoder(target, free)

    def _results(self, candidate: Candidate, decoding: Interleaving, folder: Path) -> Results:
        """The numbers of every system."""
        decoder, turns, target = decoding.decoder, decoding.turns, candidate.target
        self._refuse_answers(decoding, target)
        noise = Noise(spread(turns["drafter"]), load_of(target.device), decoding.repeats)
        entries = {}
        for system in decoding.systems:
            mine = turns[system.name]
            entry = entries[system.name] = summarise(mine, system.builder.is_chain)
            entry["speedup"] = judge(entry["speedup"], mine, noise)
            entry["label"], entry["tree"] = system.label, system.builder.report_settings()
            why = decoder.why_eager(system)
            entry["engine"] = "captured" if why is None else "eager"
            if decoder.wants_capture and why is not None:
                entry["label"], entry["eager_because"] = f"{system.label} (eager)", why
            if decoder.fallback.failures:
                entry["not_run"] = dict(decoder.fallback.failures)
            if system.pruning is not None:
                entry["pruning"] = saved_by_pruning(mine, system.pruning, target)
        entries["drafter"]["noise"] = noise.summary()
        guard = decoding.systems[0].guard
        if guard is not None:
            entries["drafter"]["guard"] = guard.summarize_rounds()
        systems = list(decoding.systems)  # the check may decode more, so what a guard did is known before
        identity = check_identity(target, systems, turns, self.max_new_tokens) if self.check else {}
        for name, entry in entries.items():
            entry["lossless"] = identity[name].summary() if name in identity else None
        return Results(candidate, systems, turns, entries, folder)

    def _refuse_answers(self, decoding: Interleaving, target: Target) -> None:
        """Stop where a store holds an answer; of a run's own store, whoever copied from it is left out."""
        for system in list(decoding.systems):
            if (store := find_datastore(system.drafter)) is None:
                continue
            try:
                refuse_answers(store, decoding.turns["drafter"], target.tokenizer)
            except UserError as error:
                if self.store != OWN or system is decoding.systems[0]:
                    raise
                print(f"{system.label}: left out. {error}")
                decoding.systems.remove(system)

    def _summary(self, results: Results, decoding: Interleaving) -> dict[str, Any]:
        """The drafter's own numbers at the top, the other systems' under `compared`."""
        candidate, mine, oracle = results.candidate, results.turns["drafter"], decoding.oracle
        summary = dict(results.entries["drafter"])
        ceiling = []
        if oracle is not None and oracle.rolled_out:
            summary["forced"] = oracle.summary(summary)
            ceiling = results.turns[ORACLE]
        summary["bounds"] = bounds(candidate.target, candidate.drafter, mine, ceiling)
        if not candidate.rule.lossless or self.quality:
            summary |= self._quality(candidate, mine)
        summary["compared"] = {name: entry for name, entry in results.entries.items() if name != "drafter"}
        return summary

    def _quality(self, candidate: Candidate, mine: list[Turn]) -> dict[str, Any]:
        """What drafting did to the text, by the target's judgement and by the task's."""
        drift = rule_drift(candidate.target, mine, follows=not candidate.rule.matching_rule().is_random)
        task = task_score(candidate.target, self._references, mine, self.execute)
        return {"drift": drift} if task is None else {"drift": drift, "task": task}

    @property
    def _references(self) -> dict[str, Reference]:
        return {prompt.id: prompt.reference for prompt in self.chosen if prompt.reference is not None}

    def _judgements(self, results: Results) -> dict[str, Any]:
        """What drafting adds to memory and reads, what training did to the target, and how good early exits are."""
        one, mine = results.candidate, results.turns["drafter"]
        memory = extra_memory(one.target, one.drafter, one.builder, one.rule, mine[0].drafted.prompt)
        traffic = count_traffic(one.target, one.drafter, one.builder, one.rule, mine[0].drafted.prompt)
        read = {} if traffic is None else {"traffic": traffic}
        return {"memory": memory, **read, **judge_target(one, mine, self.max_new_tokens, results.folder)}

    def _setting(self, candidate: Candidate, summary: dict[str, Any], decoding: Interleaving) -> dict[str, Any]:
        """What the numbers depend on."""
        drafter = candidate.drafter
        return {
            **candidate.setting,
            "prompts": len(self.chosen),
            "skipped": {**self.skipped, **decoding.left_out},
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "rule": candidate.rule.name,
            "tree": summary["tree"],
            "guard": self.guard,
            "threads": torch.get_num_threads(),
            "engine": summary["engine"],
            "drafter": {**candidate.setting.get("drafter", {}), **drafter.saved.settings},
        }

    def _write(self, results: Results, summary: dict[str, Any], calibration: Calibration | None) -> None:
        """The files of an evaluation; summary.json comes after the rest and says that all is there."""
        folder, mine = results.folder, results.turns["drafter"]
        turns = {system.name: results.turns[system.name] for system in results.systems}
        write_lines(folder / "samples.jsonl", [sample(turn) for turn in mine])
        write_rounds(folder / "rounds.parquet", turns)
        write_prompts(folder / "prompts.parquet", turns)
        if calibration is not None:
            calibration.save(folder / "calibration.json")
        if self.report:
            texts = {prompt.id: content_text(prompt.turns[0]) for prompt in self.chosen}
            drafts = record_drafts(results.candidate.target, results.systems[0], mine, texts, self.max_new_tokens)
            write_lines(folder / "drafts.jsonl", drafts)
        write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        if self.report:
            write_report(folder / "report.html", [folder])

    def _calibrate(self, target: Target, systems: list[System]) -> Calibration | None:
        """Prepare every builder that needs it; what was measured for the drafter's own."""
        first, calibration = systems[0], None
        alike = [one.builder for one in systems if one.drafter is first.drafter or one.name in ALIKE]
        for children in dict.fromkeys(builder.children for builder in alike):  # hits depend on how they are chosen
            mine = [builder for builder in alike if builder.children == children]
            if any(builder.requirements for builder in mine):
                prompts = self._calibration_prompts(target)
                texts = [tokenize_prompt(target.template, prompt.opening, target.vision) for prompt in self.chosen]
                longest = max(map(len, texts)) + self.max_new_tokens
                found = calibrate_builders(target, first.drafter, mine, first.rule, prompts, max_text_tokens=longest)
                calibration = found if children == first.builder.children else calibration
        return calibration

    def _calibration_prompts(self, target: Target) -> list[list[int]]:
        """Openings of the embedded conversations, or of the prompts that eval.calibration names."""
        if self.calibration is not None:
            openings = [prompt.opening for prompt in read_prompts(self.calibration, self.calibration_limit).prompts]
        else:
            from spectrain.data.readers import EmbeddedReader

            openings = [
                conversation.messages[:1] for conversation in EmbeddedReader(limit=self.calibration_limit).load_conversations()
            ]
        tokens = [tokenize_prompt(target.template, opening, target.vision) for opening in openings]
        return [prompt for prompt in tokens if len(prompt) + 64 <= target.max_length] or tokens[:1]
