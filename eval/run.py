"""Score a drafter by really decoding: the one evaluator of every family.

For every prompt the autoregressive run and the drafted runs follow each other, in an order that
rotates, in one engine: same kernels, same cache, same stop handling. The reference of the lossless
check is computed apart from all of them.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spectrain.data.chat import tokenize_question
from spectrain.decoding.calibration import calibrate_builders, resolve_rule
from spectrain.decoding.session import (
    check_compatibility,
    choose_threads,
    prepare_for_decoding,
    tune_drafter,
)
from spectrain.drafters.base import find_datastore
from spectrain.errors import UserError
from spectrain.eval.baselines import OWN_STORE, Baselines
from spectrain.eval.columns import DRAFTER, tracked_systems
from spectrain.eval.drafts import record_drafts
from spectrain.eval.drift import rule_drift
from spectrain.eval.exits import judge_target
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.fixed_trees import make_chain
from spectrain.eval.identity import check_identity
from spectrain.eval.leaks import check_no_leak, refuse_answers
from spectrain.eval.memory import extra_memory
from spectrain.eval.metrics import SystemSummary, measure_system, price_tokens
from spectrain.eval.noise import Noise, baseline_jitter, judge_speedup, machine_load
from spectrain.eval.oracle import Oracle
from spectrain.eval.page import read_lines, write_report
from spectrain.eval.prompts import read_prompts, take_turns
from spectrain.eval.report import print_answer, print_table
from spectrain.eval.selection import PromptedEvaluation
from spectrain.eval.settings import DecodingSettings, StatisticsSettings, SystemSettings
from spectrain.eval.summary import (
    EvaluationSummary,
    predict_device,
    sample_line,
    speedup_limits,
    write_lines,
    write_prompts,
    write_rounds,
)
from spectrain.eval.systems import Decoder, System, describe_tree
from spectrain.eval.tasks import Reference, check_execution, task_score
from spectrain.eval.time_limit import ScoreProgress, TimeLimit
from spectrain.eval.turns import ORACLE, Interleaving
from spectrain.eval.user_times import compare_user_times
from spectrain.files import write_text
from spectrain.models.fast import lowest_precision
from spectrain.models.target import Target
from spectrain.output.console import make_console
from spectrain.output.verbosity import result_output
from spectrain.runs.candidate import Candidate
from spectrain.trees.measurements import Calibration, RuleForecast

# Systems whose trees are calibrated together with the drafter's own.
CALIBRATED = (
    "shipped",
    "untrained",
    "shipped-tree",
    "start-tree",
    "untrained-tree",
    "static_drafter",
    "copies",
    "retrieval",
)
MIN_ROOM = 64  # tokens that a calibration prompt leaves free in the context


@dataclass
class Evaluation(StatisticsSettings, DecodingSettings, SystemSettings, PromptedEvaluation):
    """Scores drafters as the settings say. A subclass adds settings and extensions."""

    def __post_init__(self) -> None:
        SystemSettings.__post_init__(self)
        DecodingSettings.__post_init__(self)
        StatisticsSettings.__post_init__(self)
        PromptedEvaluation.__post_init__(self)
        for key, is_given in (
            ("concurrency", self.concurrency != (1,)),
            ("slo", self.slo is not None),
        ):
            if is_given:
                raise UserError(
                    f"eval.{key}: it is about a running server; add server=vllm server.url=.., or "
                    "leave it out"
                )
        if self.execute:
            check_execution(list(self._references.values()))

    @property
    def uses_clock(self) -> bool:
        """Whether what is drafted depends on measured times, beyond the tree."""
        return False

    @property
    def varies_trees(self) -> bool:
        """Whether trees of several kinds are decoded, so that the rule must be valid for all of
        them.
        """
        return False

    def check_prompts(self, target: Target) -> None:
        target.require_layers("scoring with this engine (eval=none leaves it out of a training)")
        if self.drafter_dtype not in ("auto", dtype := str(target.dtype).removeprefix("torch.")):
            raise UserError(
                f"eval.drafter_dtype={self.drafter_dtype}: a drafter computes in the target's "
                f"type; use eval.drafter_dtype={dtype}, or add target.dtype={self.drafter_dtype}"
            )
        super().check_prompts(target)

    def extensions(self) -> list[EvalExtension]:
        """Return what is decoded, checked and written in addition to the drafter."""
        return [*self.extra_extensions(), self._baselines()]

    def _baselines(self) -> Baselines:
        return Baselines(
            self.baseline_names(),
            self.assistant,
            self.exit_layer,
            self.store,
            self.chosen,
            counts_apart=self.max_minutes is not None,
        )

    def baseline_names(self) -> list[str]:
        """Return the systems of `eval.baselines` to decode."""
        return [*self.baselines]

    def extra_extensions(self) -> list[EvalExtension]:
        """Return the extensions that a subclass adds."""
        return []

    def score(self, candidate: Candidate, folder: Path) -> dict[str, Any]:
        """Decode every prompt with every system, write the results to `folder`, print the table,
        and return summary.json.
        """
        extensions = self.extensions()
        limit = self._make_limit()
        progress = ScoreProgress(limit)
        with progress.line:
            summary = self._score(candidate, extensions, folder, limit, progress)
        with result_output():
            print_table(summary, extensions)
            if self.show_answer and self.report:
                print_answer(read_lines(folder / "drafts.jsonl"))
        return summary

    def _score(
        self,
        candidate: Candidate,
        extensions: list[EvalExtension],
        folder: Path,
        limit: TimeLimit | None,
        progress: ScoreProgress,
    ) -> dict[str, Any]:
        """Decode, measure and write; return summary.json."""
        progress.begin("preparing the drafters")
        changes_drafter = any(extension.changes_drafter for extension in extensions)
        requested_rule = candidate.rule.name
        candidate, rule_forecast = self._prepare(candidate, extensions)
        if self.puts_chain_first(candidate) and not changes_drafter:
            candidate = replace(
                candidate, builder=make_chain(candidate.builder), default_builder=candidate.builder
            )
        systems, calibration = self._make_systems(candidate, extensions)
        decoder = self._make_decoder(candidate.target, systems[0])
        oracle = Oracle(systems[0], decoder) if self.oracle else None
        decoding = Interleaving(
            decoder,
            systems,
            extensions,
            oracle,
            self.max_new_tokens,
            self.batch_size,
            limit,
            progress,
        )
        decoding.run(self.chosen)
        if limit is not None:
            self._leave_out(decoding, limit)
        decoding.repeat(1 if changes_drafter else self.repeats)
        progress.begin("comparing outputs with the target's")
        results = self._measure(candidate, decoding, folder)
        folder.mkdir(parents=True, exist_ok=True)
        sections: dict[str, Any] = {}
        forecasts = (
            rule_forecast,
            oracle.forced.rule_forecast if oracle else None,
            calibration.rules if calibration else None,
        )
        if forecast := next((forecast for forecast in forecasts if forecast is not None), None):
            sections["rules"] = forecast.summary()
        limits = self._measure_limits(results, oracle)
        for extension in extensions:
            sections |= extension.report(results)
        progress.begin("writing the report")
        if self.report:
            sections |= self._measure_costs(results)
        setting = {**self._describe_setting(results, decoding), "rule": requested_rule}
        summary = EvaluationSummary(results.summaries, limits, sections, setting).to_json()
        self._write(results, summary, calibration)
        return summary

    def _make_limit(self) -> TimeLimit | None:
        """Start the clock of a score with a limit of time, and let the categories of its prompts
        take turns.
        """
        if self.max_minutes is None:
            return None
        self.chosen = take_turns(self.chosen)
        return TimeLimit(self.max_minutes, self.check, self.report, self.repeats)

    def _leave_out(self, decoding: Interleaving, limit: TimeLimit) -> None:
        """Leave out the prompts that were not timed, and say why."""
        num_timed = decoding.num_prompts
        if num_timed < len(self.chosen):
            reason = (
                "prompts not timed, because the sequential test had decided"
                if decoding.is_decided
                else f"prompts not timed, for which eval.max_minutes={limit.minutes:g} left no time"
            )
            self.skipped[reason] = len(self.chosen) - num_timed
            self.chosen = self.chosen[:num_timed]

    def tabulate(self, summary: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a row of values for each system of a summary, for trackers."""
        return tracked_systems(summary)

    def _prepare(
        self, candidate: Candidate, extensions: list[EvalExtension]
    ) -> tuple[Candidate, RuleForecast | None]:
        """Check the candidate, move it to the target's device, tune it, and choose a rule if it
        is left open.
        """
        target = candidate.target
        drafter = candidate.drafter
        builder = candidate.builder
        rule = candidate.rule
        check_compatibility(drafter.capabilities, builder, rule)
        for extension in extensions:
            extension.check(candidate)
            extension.snapshot(candidate)
        if (store := find_datastore(drafter)) is not None:
            check_no_leak(store, self.chosen, candidate.setting)
        drafter.to(target.device, target.dtype).eval()
        target.pack_weights()
        choose_threads(target, lambda: self._calibration_prompts(target))
        tune_drafter(drafter, target, lambda: self._calibration_prompts(target), builder.depth)
        forecast = None
        if rule.is_unresolved and not self.varies_trees:
            rule, builder, forecast = resolve_rule(
                target, drafter, builder, rule, lambda: self._calibration_prompts(target)
            )
        elif rule.is_unresolved:
            # This rule is valid for trees of every kind.
            rule = rule.matching_rule()
        return replace(candidate, rule=rule, builder=builder), forecast

    def puts_chain_first(self, candidate: Candidate) -> bool:
        """Tell whether the numbers at the top are those of a chain of 3, in place of the drafter's
        own tree.

        They are if no tree was requested, or one that may draft nothing: its tokens per forward
        would not be the drafter's.
        """
        own = candidate.builder
        if self.varies_trees or (own.traits.is_chain and own.depth == 3 and own.traits.is_fixed):
            return False
        return self.measured or own.round_policy.decides_to_draft

    def _make_systems(
        self, candidate: Candidate, extensions: list[EvalExtension]
    ) -> tuple[list[System], Calibration | None]:
        """Return the systems to decode, the drafter with its tree first, all of them prepared."""
        target, drafter, builder = candidate.target, candidate.drafter, candidate.builder
        first = System(
            DRAFTER, f"drafter, {describe_tree(builder)}", drafter, builder, candidate.rule
        )
        for extension in extensions:
            first = extension.adapt_system(candidate, first)
        systems = [
            first,
            *(system for extension in extensions for system in extension.systems(candidate, first)),
        ]
        for system in systems:
            prepare_for_decoding(system.drafter, target, low_precision=self.drafter_dtype == "auto")
        for extension in extensions:
            extension.prepare_systems(target, systems, lambda: self._calibration_prompts(target))
        return systems, self._calibrate(target, systems)

    def _make_decoder(self, target: Target, first: System) -> Decoder:
        """Return one engine for the drafter and what it is compared with: if it cannot be
        captured, nothing is.
        """
        rule = first.rule.matching_rule()
        decoder = Decoder(target, rule, self.engine)
        reason = decoder.why_eager(first)
        if self.engine == "captured" and reason is not None:
            raise UserError(f"eval.engine=captured: {reason}; use eval.engine=eager")
        if reason is None:
            return decoder
        if decoder.prefers_capture:
            make_console(stderr=True).print(
                f"The drafter and all baselines run in the eager loop: {reason}."
            )
        return Decoder(target, rule)

    def _measure(self, candidate: Candidate, decoding: Interleaving, folder: Path) -> Results:
        """Compute the numbers of every system."""
        decoder, turns, target = decoding.decoder, decoding.turns, candidate.target
        self._refuse_answers(decoding, target)
        noise = Noise(
            baseline_jitter(turns[DRAFTER]),
            machine_load(target.device),
            decoding.repeats,
            len(decoding.repeated),
        )
        summaries = {}
        for system in decoding.systems:
            answers = turns[system.name]
            reason = decoder.why_eager(system)
            is_eager = decoder.prefers_capture and reason is not None
            numbers = measure_system(
                answers, system.builder.traits.is_chain, target.template, self.batch_size > 1
            )
            numbers["speedup"] = judge_speedup(numbers["speedup"], answers, noise)
            summaries[system.name] = SystemSummary(
                **numbers,
                label=f"{system.label} (eager)" if is_eager else system.label,
                tree=system.builder.report_settings(),
                engine="captured" if reason is None else "eager",
                eager_because=reason if is_eager else None,
                not_run={**decoder.fallback.failures} or None,
                user_times={
                    "bound_ms": self.bound_ms,
                    **compare_user_times(answers, self.bound_ms),
                },
                joules_per_token=decoding.joules_per_token(system.name),
                price_per_million=price_tokens(numbers["tokens_per_second"], self.price_per_hour),
                pruning=None
                if system.pruning is None
                else system.pruning.measure_savings([turn.drafted for turn in answers], target),
            )
        summaries[DRAFTER].noise = noise.summary()
        guard = decoding.systems[0].guard
        if guard is not None:
            # The check below may decode more rounds.
            summaries[DRAFTER].guard = guard.summarize_rounds()
        systems = list(decoding.systems)
        identity = check_identity(target, systems, turns, self.max_new_tokens) if self.check else {}
        for name, checked in identity.items():
            summaries[name].lossless = checked.summary()
        return Results(candidate, systems, turns, summaries, folder)

    def _refuse_answers(self, decoding: Interleaving, target: Target) -> None:
        """Refuse a store that holds an answer; leave out systems that copied from the run's own
        such store.
        """
        for system in list(decoding.systems):
            if (store := find_datastore(system.drafter)) is None:
                continue
            try:
                refuse_answers(store, decoding.turns[DRAFTER], target.tokenizer)
            except UserError as error:
                if self.store != OWN_STORE or system is decoding.systems[0]:
                    raise
                print(f"{system.label}: left out. {error}")
                decoding.systems.remove(system)

    def _measure_limits(self, results: Results, oracle: Oracle | None) -> dict[str, Any]:
        """Measure what limits the speedup, and what drafting changed in the text."""
        candidate = results.candidate
        answers = results.turns[DRAFTER]
        limits: dict[str, Any] = {}
        has_forced = oracle is not None and oracle.rolled_out
        if oracle is not None and has_forced:
            limits["forced"] = oracle.summary(results.summaries[DRAFTER])
        ceiling = results.turns[ORACLE] if has_forced else []
        limits["bounds"] = speedup_limits(candidate.target, candidate.drafter, answers, ceiling)
        if self.other_device is not None:
            limits["other_device"] = predict_device(
                candidate.target, candidate.drafter, answers, self.other_device
            )
        if not candidate.rule.lossless or self.quality:
            # Compare answers token by token if the rule should not change them.
            is_deterministic = not candidate.rule.matching_rule().is_random
            limits["drift"] = rule_drift(candidate.target, answers, follows=is_deterministic)
            task = task_score(candidate.target, self._references, answers, self.execute)
            limits |= {} if task is None else {"task": task}
        return limits

    @property
    def _references(self) -> dict[str, Reference]:
        return {
            prompt.id: prompt.reference for prompt in self.chosen if prompt.reference is not None
        }

    def _measure_costs(self, results: Results) -> dict[str, Any]:
        """Measure memory, what training did to the target, and the quality of early exits."""
        candidate = results.candidate
        answers = results.turns[DRAFTER]
        decoding = (
            candidate.target,
            candidate.drafter,
            candidate.builder,
            candidate.rule,
            answers[0].drafted.prompt,
        )
        return {"memory": extra_memory(*decoding)} | judge_target(
            candidate, answers, self.max_new_tokens, results.folder
        )

    def _describe_setting(self, results: Results, decoding: Interleaving) -> dict[str, Any]:
        """Return what the numbers depend on."""
        candidate = results.candidate
        drafter = results.candidate.drafter
        summary = results.summaries[DRAFTER]
        choices = decoding.decoder.thread_choices()
        return {
            **candidate.setting,
            "prompts": len(self.chosen),
            **self.describe_context(),
            "skipped": {**self.skipped, **decoding.left_out},
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "rule": candidate.rule.name,
            "tree": summary.tree,
            "guard": results.systems[0].guard is not None,
            "threads": choices["plain"]["threads"] if choices else torch.get_num_threads(),
            "thread_choices": choices or None,
            "engine": summary.engine,
            "drafter_dtype": lowest_precision(drafter),
            "drafter": {**candidate.setting.get("drafter", {}), **drafter.saved.settings},
        }

    def _write(
        self, results: Results, summary: dict[str, Any], calibration: Calibration | None
    ) -> None:
        """Write the files of an evaluation; summary.json comes after the others and says that
        all are there.
        """
        folder = results.folder
        answers = results.turns[DRAFTER]
        turns = {system.name: results.turns[system.name] for system in results.systems}
        write_lines(
            folder / "samples.jsonl",
            [sample_line(turn, results.candidate.target.template) for turn in answers],
        )
        write_rounds(folder / "rounds.parquet", turns)
        write_prompts(folder / "prompts.parquet", turns)
        if calibration is not None:
            calibration.save(folder / "calibration.json")
        if self.report:
            texts = {prompt.id: prompt.questions[0] for prompt in self.chosen}
            drafts = record_drafts(
                results.candidate.target, results.systems[0], answers, texts, self.max_new_tokens
            )
            write_lines(folder / "drafts.jsonl", drafts)
        write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        if self.report:
            write_report(folder / "report.html", [folder])

    def _calibrate(self, target: Target, systems: list[System]) -> Calibration | None:
        """Prepare every builder that needs it; return what was measured for the drafter's own."""
        first = systems[0]
        calibration = None
        builders = [
            system.builder
            for system in systems
            if system.drafter is first.drafter or system.name in CALIBRATED
        ]
        # Hit rates depend on how children are chosen.
        for children in dict.fromkeys(builder.children for builder in builders):
            group = [builder for builder in builders if builder.children == children]
            if any(builder.requirements for builder in group):
                prompts = self._calibration_prompts(target)
                longest = (
                    max(len(prompt.tokenize_for(target)) for prompt in self.chosen)
                    + self.max_new_tokens
                )
                measured = calibrate_builders(
                    target, first.drafter, group, first.rule, prompts, max_text_tokens=longest
                )
                calibration = measured if children == first.builder.children else calibration
        return calibration

    def _calibration_prompts(self, target: Target) -> list[list[int]]:
        """Return openings of the embedded conversations, or of the prompts that eval.calibration
        names.
        """
        if self.calibration is not None:
            prompts = read_prompts(self.calibration, self.calibration_limit).prompts
            tokens = [prompt.tokenize_for(target) for prompt in prompts]
        else:
            from spectrain.data.readers import EmbeddedReader

            conversations = EmbeddedReader(limit=self.calibration_limit).load_conversations()
            tokens = [
                tokenize_question(target.template, conversation) for conversation in conversations
            ]
        return [
            prompt for prompt in tokens if len(prompt) + MIN_ROOM <= target.max_length
        ] or tokens[:1]
