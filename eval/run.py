"""Score a drafter by really decoding: the one evaluator of every family.

For every prompt the autoregressive run and the drafted runs follow each other, in an order that
rotates, in one engine: same kernels, same cache, same stop handling. The reference of the lossless
check is computed apart from all of them.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spectrain.data.chat import tokenize_question
from spectrain.data.readers import EmbeddedReader
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
from spectrain.eval.columns import DRAFTER
from spectrain.eval.distribution_check import DistributionCheck
from spectrain.eval.draft_model import score_draft_model
from spectrain.eval.drafts import record_drafts
from spectrain.eval.drift import rule_drift
from spectrain.eval.exits import judge_target
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.fixed_trees import make_chain
from spectrain.eval.identity import check_identity
from spectrain.eval.leaks import check_no_leak, refuse_answers
from spectrain.eval.memory import extra_memory
from spectrain.eval.metrics import (
    SystemSummary,
    Turn,
    count_undrafted_rounds,
    measure_system,
    price_tokens,
)
from spectrain.eval.noise import Noise, baseline_jitter, judge_speedup, machine_load
from spectrain.eval.oracle import Oracle
from spectrain.eval.page import read_lines
from spectrain.eval.parts import EvalPart
from spectrain.eval.pipeline import (
    Answers,
    AnswerSource,
    Entries,
    SourceSetting,
    run_pipeline,
)
from spectrain.eval.prompts import Prompt, read_prompts, take_turns
from spectrain.eval.report import print_answer
from spectrain.eval.selection import EngineEvaluation
from spectrain.eval.summary import (
    predict_device,
    speedup_limits,
    write_lines,
)
from spectrain.eval.systems import Decoder, System, describe_tree
from spectrain.eval.tasks import Reference, check_execution, task_score
from spectrain.eval.throughput_model import fit_throughput_model
from spectrain.eval.time_limit import ScoreProgress, TimeLimit
from spectrain.eval.turns import ORACLE, Interleaving
from spectrain.eval.user_times import compare_user_times
from spectrain.models.fast import lowest_precision
from spectrain.models.target import Target
from spectrain.output.console import make_console
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
class Evaluation(EngineEvaluation):
    """Scores drafters as the settings say. A subclass adds settings and extensions."""

    # Settings and extensions of installed packages.
    parts: Sequence[EvalPart] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.execute:
            check_execution([*collect_references(self.chosen).values()])

    @property
    def varies_trees(self) -> bool:
        """Whether trees of several kinds are decoded, so that the rule must be valid for all of
        them.
        """
        return any(part.varies_trees for part in self.parts)

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
        baselines = Baselines(
            self.baselines,
            self.assistant,
            self.exit_layer,
            self.store,
            self.chosen,
            counts_apart=self.max_minutes is not None,
        )
        return [*(added for part in self.parts for added in part.extensions(self)), baselines]

    def score(self, candidate: Candidate, folder: Path) -> dict[str, Any]:
        """Decode every prompt with every system, write the results to `folder`, print the table,
        and return summary.json.
        """
        return run_pipeline(self, EngineAnswers(self, candidate, folder), folder)


def collect_references(prompts: Sequence[Prompt]) -> dict[str, Reference]:
    """Return what the answer to each prompt that has a reference must satisfy, by its id."""
    return {prompt.id: prompt.reference for prompt in prompts if prompt.reference is not None}


def puts_chain_first(evaluation: Evaluation, candidate: Candidate) -> bool:
    """Tell whether the numbers at the top are those of a chain of 3, in place of the drafter's own
    tree.

    They are if no tree was requested, or one that may draft nothing: its tokens per forward would
    not be the drafter's.
    """
    own = candidate.builder
    if evaluation.varies_trees or (own.traits.is_chain and own.depth == 3 and own.traits.is_fixed):
        return False
    return evaluation.measured or own.round_policy.decides_to_draft


def load_calibration_prompts(evaluation: Evaluation, target: Target) -> list[list[int]]:
    """Return openings of the embedded conversations, or of the prompts that eval.calibration
    names.
    """
    limit = evaluation.calibration_limit
    if evaluation.calibration is not None:
        prompts = read_prompts(evaluation.calibration, limit).prompts
        tokens = [prompt.tokenize_for(target) for prompt in prompts]
    else:
        conversations = EmbeddedReader(limit=limit).load_conversations()
        tokens = [
            tokenize_question(target.template, conversation) for conversation in conversations
        ]
    fitting = [prompt for prompt in tokens if len(prompt) + MIN_ROOM <= target.max_length]
    return fitting or tokens[:1]


class EngineAnswers(AnswerSource):
    """Our own engine, which decodes with a candidate and with what it is compared with."""

    def __init__(self, evaluation: Evaluation, candidate: Candidate, folder: Path) -> None:
        self.evaluation = evaluation
        self.candidate = candidate
        self.folder = folder
        self.template = candidate.target.template
        self.views = evaluation.extensions()
        self.limit = self._make_limit()
        self.shown_progress = ScoreProgress(self.limit)
        self.requested_rule = candidate.rule.name
        self.rule_forecast: RuleForecast | None = None
        self.calibration: Calibration | None = None

    def answer(self) -> Answers:
        evaluation = self.evaluation
        self.shown_progress.begin("preparing the drafters")
        changes_drafter = any(extension.changes_drafter for extension in self.views)
        self.prepare()
        candidate = self.candidate
        if puts_chain_first(evaluation, candidate) and not changes_drafter:
            candidate = self.candidate = replace(
                candidate, builder=make_chain(candidate.builder), default_builder=candidate.builder
            )
        systems = self.make_systems()
        decoder = self._make_decoder(candidate.target, systems[0])
        self.oracle = Oracle(systems[0], decoder) if evaluation.oracle else None
        decoding = self.decoding = Interleaving(
            decoder,
            systems,
            self.views,
            self.oracle,
            evaluation.max_new_tokens,
            evaluation.batch_size,
            self.limit,
            self.shown_progress,
        )
        decoding.run(evaluation.chosen)
        if self.limit is not None:
            self._leave_out(self.limit)
        decoding.repeat(1 if changes_drafter else evaluation.repeats)
        self._refuse_answers()
        turns = {system.name: decoding.turns[system.name] for system in decoding.systems}
        return Answers(turns, len(evaluation.chosen), decoding.left_out)

    def _make_limit(self) -> TimeLimit | None:
        """Start the clock of a score with a limit of time, and let the categories of its prompts
        take turns.
        """
        evaluation = self.evaluation
        if evaluation.max_minutes is None:
            return None
        evaluation.chosen = take_turns(evaluation.chosen)
        return TimeLimit(
            evaluation.max_minutes, bool(evaluation.check), evaluation.report, evaluation.repeats
        )

    def _leave_out(self, limit: TimeLimit) -> None:
        """Leave out the prompts that were not timed, and say why."""
        evaluation = self.evaluation
        num_timed = self.decoding.num_prompts
        if num_timed < len(evaluation.chosen):
            reason = (
                "prompts not timed, because the sequential test had decided"
                if self.decoding.is_decided
                else f"prompts not timed, for which eval.max_minutes={limit.minutes:g} left no time"
            )
            evaluation.skipped[reason] = len(evaluation.chosen) - num_timed
            evaluation.chosen = evaluation.chosen[:num_timed]

    def _load_prompts(self) -> list[list[int]]:
        return load_calibration_prompts(self.evaluation, self.candidate.target)

    def prepare(self) -> None:
        """Check the candidate, move it to the target's device, tune it, and choose a rule if it
        is left open.
        """
        candidate = self.candidate
        target = candidate.target
        drafter = candidate.drafter
        builder = candidate.builder
        rule = candidate.rule
        check_compatibility(drafter.capabilities, builder, rule)
        for extension in self.views:
            extension.check(candidate)
            extension.snapshot(candidate)
        if (store := find_datastore(drafter)) is not None:
            check_no_leak(store, self.evaluation.chosen, candidate.setting)
        drafter.to(target.device, target.dtype).eval()
        target.pack_weights()
        choose_threads(target, self._load_prompts)
        tune_drafter(drafter, target, self._load_prompts, builder.depth)
        if rule.is_unresolved and not self.evaluation.varies_trees:
            rule, builder, self.rule_forecast = resolve_rule(
                target, drafter, builder, rule, self._load_prompts
            )
        elif rule.is_unresolved:
            # This rule is valid for trees of every kind.
            rule = rule.matching_rule()
        self.candidate = replace(candidate, rule=rule, builder=builder)

    def make_systems(self) -> list[System]:
        """Return the systems to decode, the drafter with its tree first, all of them prepared."""
        candidate = self.candidate
        target, drafter, builder = candidate.target, candidate.drafter, candidate.builder
        first = System(
            DRAFTER, f"drafter, {describe_tree(builder)}", drafter, builder, candidate.rule
        )
        for extension in self.views:
            first = extension.adapt_system(candidate, first)
        systems = [
            first,
            *(system for extension in self.views for system in extension.systems(candidate, first)),
        ]
        is_packed = self.evaluation.drafter_dtype == "auto"
        for system in systems:
            prepare_for_decoding(system.drafter, target, low_precision=is_packed)
        for extension in self.views:
            extension.prepare_systems(target, systems, self._load_prompts)
        self.calibration = self._calibrate(target, systems)
        return systems

    def _make_decoder(self, target: Target, first: System) -> Decoder:
        """Return one engine for the drafter and what it is compared with: if it cannot be
        captured, nothing is.
        """
        rule = first.rule.matching_rule()
        decoder = Decoder(target, rule, self.evaluation.engine)
        reason = decoder.why_eager(first)
        if self.evaluation.engine == "captured" and reason is not None:
            raise UserError(f"eval.engine=captured: {reason}; use eval.engine=eager")
        if reason is None:
            return decoder
        if decoder.prefers_capture:
            make_console(stderr=True).print(
                f"The drafter and all baselines run in the eager loop: {reason}."
            )
        return Decoder(target, rule)

    def summarize(self, answers: Answers) -> Mapping[str, SystemSummary]:
        decoding = self.decoding
        target = self.candidate.target
        noise = Noise(
            baseline_jitter(answers.turns[DRAFTER]),
            machine_load(target.device),
            decoding.repeats,
            len(decoding.repeated),
        )
        summaries = {
            system.name: self._summarize_system(system, answers.turns[system.name], noise)
            for system in decoding.systems
        }
        summaries[DRAFTER].noise = noise.summary()
        guard = decoding.systems[0].find_change("plan")
        if guard is not None:
            # The check below may decode more rounds.
            drafted = [turn.drafted for turn in answers.turns[DRAFTER]]
            summaries[DRAFTER].guard = guard.summarize(drafted, target)
        if self.evaluation.check:
            identity = check_identity(
                target,
                [*decoding.systems],
                decoding.turns,
                self.evaluation.max_new_tokens,
                self.shown_progress,
            )
            for name, distribution in self._check_distribution().items():
                identity[name].distribution = distribution
            for name, checked in identity.items():
                summaries[name].lossless = checked.summary()
        return summaries

    def _check_distribution(self) -> dict[str, dict[str, Any]]:
        """Compare the distribution of sampled answers with the target's, for every system that
        draws; nothing unless eval.check=distribution.
        """
        evaluation = self.evaluation
        target = self.candidate.target
        sampled = [system for system in self.decoding.systems if system.rule.is_random]
        if evaluation.check != "distribution" or not sampled:
            return {}
        prompts = sorted((prompt.tokenize_for(target) for prompt in evaluation.chosen), key=len)
        return DistributionCheck(
            self.decoding.decoder,
            prompts,
            evaluation.check_texts,
            evaluation.batch_size,
            evaluation.max_new_tokens,
            self.shown_progress.begin,
        ).run(sampled)

    def _summarize_system(self, system: System, turns: list[Turn], noise: Noise) -> SystemSummary:
        """Compute the numbers of a system."""
        evaluation = self.evaluation
        decoder = self.decoding.decoder
        target = self.candidate.target
        reason = decoder.why_eager(system)
        is_eager = decoder.prefers_capture and reason is not None
        numbers = measure_system(
            turns, system.builder.traits.is_chain, target.template, evaluation.batch_size > 1
        )
        numbers["speedup"] = judge_speedup(numbers["speedup"], turns, noise)
        price = price_tokens(numbers["tokens_per_second"], evaluation.price_per_hour)
        model = fit_throughput_model(turns) if system.builder.traits.is_chain else None
        tree = system.builder.report_settings()
        if tree.get("undrafted_share") is not None:
            # The builder has counted the rounds of the warm-up too.
            share = 1 - numbers["drafted_rounds"] / max(1, numbers["rounds"])
            tree["undrafted_share"] = round(share, 4)
            tree["undrafted_because"] = count_undrafted_rounds(turns)
        return SystemSummary(
            **numbers,
            label=f"{system.label} (eager)" if is_eager else system.label,
            tree=tree,
            engine="captured" if reason is None else "eager",
            eager_because=reason if is_eager else None,
            not_run={**decoder.fallback.failures} or None,
            user_times={
                "bound_ms": evaluation.bound_ms,
                **compare_user_times(turns, evaluation.bound_ms),
            },
            joules_per_token=self.decoding.joules_per_token(system.name),
            price_per_million=price,
            throughput_model=None if model is None else asdict(model),
            pruning=None
            if (change := system.find_change("tree")) is None
            else change.summarize([turn.drafted for turn in turns], target),
        )

    def measure_more(self, answers: Answers, summaries: Mapping[str, SystemSummary]) -> Entries:
        systems = list(self.decoding.systems)
        results = Results(
            self.candidate, systems, self.decoding.turns, dict(summaries), self.folder
        )
        entries = Entries()
        oracle = self.oracle
        forecasts = (
            self.rule_forecast,
            oracle.forced.rule_forecast if oracle else None,
            self.calibration.rules if self.calibration else None,
        )
        if forecast := next((forecast for forecast in forecasts if forecast is not None), None):
            entries.sections["rules"] = forecast.summary()
        entries.limits = self._measure_limits(results)
        for extension in self.views:
            entries.sections |= extension.report(results)
        self.shown_progress.begin("writing the report")
        if self.evaluation.report:
            entries.sections |= self._measure_costs(results)
        return entries

    def _refuse_answers(self) -> None:
        """Refuse a store that holds an answer; leave out systems that copied from the run's own
        such store.
        """
        decoding = self.decoding
        tokenizer = self.candidate.target.tokenizer
        for system in list(decoding.systems):
            if (store := find_datastore(system.drafter)) is None:
                continue
            try:
                refuse_answers(store, decoding.turns[DRAFTER], tokenizer)
            except UserError as error:
                if self.evaluation.store != OWN_STORE or system is decoding.systems[0]:
                    raise
                print(f"{system.label}: left out. {error}")
                decoding.systems.remove(system)

    def _measure_limits(self, results: Results) -> dict[str, Any]:
        """Measure what limits the speedup, and what drafting changed in the text."""
        evaluation, oracle = self.evaluation, self.oracle
        candidate = results.candidate
        answers = results.turns[DRAFTER]
        references = collect_references(evaluation.chosen)
        limits: dict[str, Any] = {}
        has_forced = oracle is not None and oracle.rolled_out
        if oracle is not None and has_forced:
            limits["forced"] = oracle.summary(results.summaries[DRAFTER])
        ceiling = results.turns[ORACLE] if has_forced else []
        limits["bounds"] = speedup_limits(candidate.target, candidate.drafter, answers, ceiling)
        if evaluation.other_device is not None:
            limits["other_device"] = predict_device(
                candidate.target, candidate.drafter, answers, evaluation.other_device
            )
        if draft_model := score_draft_model(
            candidate.drafter,
            candidate.target,
            answers,
            references,
            evaluation.max_new_tokens,
            evaluation.execute,
        ):
            limits["draft_model"] = draft_model
        if not candidate.rule.lossless or evaluation.quality:
            # Compare answers token by token if the rule should not change them.
            is_deterministic = not candidate.rule.matching_rule().is_random
            limits["drift"] = rule_drift(candidate.target, answers, follows=is_deterministic)
            task = task_score(candidate.target, references, answers, evaluation.execute)
            limits |= {} if task is None else {"task": task}
        return limits

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
            candidate, answers, self.evaluation.max_new_tokens, results.folder
        )

    def describe(self, summary: SystemSummary) -> SourceSetting:
        candidate = self.candidate
        drafter = candidate.drafter
        choices = self.decoding.decoder.thread_choices()
        engine = {
            "threads": choices["plain"]["threads"] if choices else torch.get_num_threads(),
            "thread_choices": choices or None,
            "engine": summary.engine,
            "drafter_dtype": lowest_precision(drafter),
            "drafter": {**candidate.setting.get("drafter", {}), **drafter.saved.settings},
        }
        has_guard = self.decoding.systems[0].find_change("plan") is not None
        return SourceSetting(
            candidate.setting, self.evaluation.batch_size, self.requested_rule, has_guard, engine
        )

    def show_progress(self) -> AbstractContextManager[Any]:
        return self.shown_progress.line

    def print_more(self, folder: Path) -> None:
        if self.evaluation.show_answer and self.evaluation.report:
            print_answer(read_lines(folder / "drafts.jsonl"))

    def write_more(self, answers: Answers, folder: Path) -> None:
        evaluation = self.evaluation
        if self.calibration is not None:
            self.calibration.save(folder / "calibration.json")
        if evaluation.report:
            texts = {prompt.id: prompt.questions[0] for prompt in evaluation.chosen}
            drafts = record_drafts(
                self.candidate.target,
                self.decoding.systems[0],
                answers.turns[DRAFTER],
                texts,
                evaluation.max_new_tokens,
            )
            write_lines(folder / "drafts.jsonl", drafts)

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
                prompts = self._load_prompts()
                evaluation = self.evaluation
                longest = (
                    max(len(prompt.tokenize_for(target)) for prompt in evaluation.chosen)
                    + evaluation.max_new_tokens
                )
                measured = calibrate_builders(
                    target, first.drafter, group, first.rule, prompts, max_text_tokens=longest
                )
                calibration = measured if children == first.builder.children else calibration
        return calibration
