"""The command `spectrain data regenerate`: it chooses who writes the answers."""

from functools import partial
from pathlib import Path

from spectrain.config.build import GroupSpec
from spectrain.config.resolve import default_group
from spectrain.config.spec import RunSpec
from spectrain.data.readers import ConversationReader
from spectrain.data.shards import ShardSet
from spectrain.decoding.session import Session
from spectrain.errors import RunError, UserError
from spectrain.models.fingerprint import hash_target
from spectrain.models.target import Target
from spectrain.output.verbosity import print_json, result_output
from spectrain.runs.defaults import resolve_eval_spec
from spectrain.runs.drafters import build_drafter, load_weights
from spectrain.runs.folder import find_drafter_directory, find_trained_target

from .capture import check_captured, find_captured_stage, list_engine_settings, open_states
from .regenerate import Regeneration, report_faults
from .sampling import Sampling
from .writers import AnswerServer, AnswerWriter, EngineWriter, collect_prompts


def regenerate_command(
    spec: RunSpec,
    writer: GroupSpec,
    sampling: GroupSpec,
    regenerate: GroupSpec,
    out: str | None,
    check: bool,
    capture: bool = False,
) -> None:
    """Check an existing set, or write it with the target, the tree and the data of `spec`; with
    `capture`, write the features too."""
    if out is None:
        raise UserError("out: say where the conversations go, as in out=DIR")
    folder = Path(str(out)).expanduser()
    if check:
        faults = ShardSet(folder).find_faults()
        print_json({"out": str(folder), "faults": faults})
        with result_output():
            report_faults(ShardSet(folder), faults)
        if faults:
            named = ", ".join([*faults][:5]) + (
                f" and {len(faults) - 5} more" if len(faults) > 5 else ""
            )
            raise RunError(
                f"out={folder}: incomplete: {named}; run the command that made it, without "
                "check=true"
            )
        return
    settings = regenerate.build()
    reader = spec.data.build()
    sampler = sampling.build()
    reader.require_all("regeneration")
    reader.allows_unanswered = True
    reader.load_conversations()
    if capture:
        check_captured(spec)
        return regenerate_and_capture(spec, writer, settings, reader, sampler, folder)
    for key, value in (
        ("recipe", spec.recipe_name),
        ("drafter", spec.drafter),
        ("source", spec.source.settings),
    ):
        if value:
            raise UserError(
                f"{key}: it says which features are captured; add capture=true, or leave {key} out"
            )
    answers: AnswerWriter = (
        make_server_writer(spec, writer, sampler)
        if spec.server
        else make_engine_writer(writer, spec, sampler, settings, reader)
    )
    settings.run(folder, reader, sampler, answers)


def make_server_writer(spec: RunSpec, writer: GroupSpec, sampling: Sampling) -> AnswerWriter:
    """Return the writer that requests answers of a server; a UserError names a setting that the
    server has no use for.
    """
    for key in list_engine_settings(spec, writer):
        raise UserError(
            f"{key}: the server has its own model, which server.model names; leave {key} out"
        )
    server: AnswerServer = spec.server.build()
    return server.make_writer(sampling)


def make_engine_writer(
    writer: GroupSpec,
    requested: RunSpec,
    sampling: Sampling,
    settings: Regeneration,
    data: ConversationReader,
) -> EngineWriter:
    """Return our own engine with the target and, if a run is named, its drafter."""
    if requested.run is None and requested.tree.node:
        raise UserError(
            "tree: nothing is drafted without a drafter; give one, as in run=runs/NAME, or leave "
            "tree out"
        )
    if requested.run is None:
        target = load_target(requested.target or default_group("target"))
        plain: EngineWriter = writer.build(sampling=sampling, target=target)
        return plain
    nodes = {group.group: group.node or None for group in (requested.target, requested.tree)}
    spec, run = resolve_eval_spec({**nodes, "run": requested.run})
    target = load_target(spec.target)
    plain = writer.build(sampling=sampling, target=target)
    directory = find_drafter_directory(run)
    drafter = build_drafter(spec.drafter, target)
    builder = spec.tree.build()
    if drafter.capabilities.target_training or find_trained_target(run) is not None:
        raise UserError(
            f"run={run}: its drafter belongs to the target that was trained with it; regenerate "
            "without a drafter, by target=hf "
            f"target.model={find_trained_target(run) or run / 'target'}"
        )
    assert directory is not None, "it was read from there"
    load_weights(drafter, directory)
    rows = settings.make_calibration_rows(data)
    Session.from_drafter(
        target,
        drafter,
        builder,
        sampling.acceptance_rule,
        lambda: collect_prompts(plain.make_prompt, sampling, rows),
    )
    return writer.build(sampling=sampling, target=target, drafter=drafter, builder=builder)


def load_target(group: GroupSpec) -> Target:
    """Load the target, which this project's engine decodes with."""
    target: Target = group.build()
    target.require_layers("writing answers with this engine")
    # Packed weights lie in another order.
    target.weights_hash = hash_target(target)
    target.pack_weights()
    return target


def regenerate_and_capture(
    spec: RunSpec,
    writer: GroupSpec,
    settings: Regeneration,
    data: ConversationReader,
    sampling: Sampling,
    folder: Path,
) -> None:
    """Write a set of answers, and a store with the states that a training on it reads.

    Of our own engine, continuous batches give the states of what they decode; the target runs what
    they did not.
    """
    answers: AnswerWriter
    if spec.server:
        for key in list_engine_settings(spec, writer):
            if key != "target":
                raise UserError(f"{key}: the server writes the answers; leave {key} out")
        target: Target = spec.target.build()
        stage = find_captured_stage(spec, target)
        server: AnswerServer = spec.server.build()
        answers = server.make_capturing_writer(
            sampling,
            target,
            stage,
            partial(open_states, spec, target, stage, data, folder),
            settings.make_calibration_rows(data),
        )
    elif spec.run is not None:
        raise UserError(
            f"run={spec.run}: answers are captured without a drafter; leave run or capture=true out"
        )
    else:
        answers = engine = make_engine_writer(writer, spec, sampling, settings, data)
        stage = find_captured_stage(spec, engine.target)
        engine.states = open_states(spec, engine.target, stage, data, folder)
    assert answers.states is not None
    try:
        settings.run(folder, data, sampling, answers)
    finally:
        answers.states.store.flush()
    if not ShardSet(folder).find_faults():
        captured = answers.complete_store(folder)
        with result_output():
            print(captured, flush=True)
