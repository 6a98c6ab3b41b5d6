"""Training and scoring of the drafter that a configuration names, in its run folder."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.session import check_compatibility
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.features.base import FeatureServer, FeaturesRead, Source
from spectrain.files import atomic_write, write_text
from spectrain.models.fingerprint import hash_target
from spectrain.models.target import Target
from spectrain.output.streams import print_text
from spectrain.provenance import collect_provenance
from spectrain.training.adapters import describe_adapters
from spectrain.training.checkpoints import (
    TrainingResult,
    checkpoint_step,
    latest_checkpoint,
    resume_advice,
    set_aside_damaged,
)
from spectrain.training.metrics import METRICS_NAME, Tracker, read_last_step, track_run
from spectrain.training.parallel.launch import (
    decide_once,
    disconnect_processes,
    wait_for_loading,
)
from spectrain.training.run_files import check_run_files
from spectrain.training.trainer import Trainer
from spectrain.trees.base import TreeBuilder

from .callbacks import Callback, CallbackTracker
from .drafters import save_drafter
from .init_drafter import apply_init_shape, init_drafter
from .lock import LOCK_SECONDS, claim_folder, claim_new_folder
from .resume import InputFacts, check_inputs, check_settings, collect_facts, delete_unfinished
from .score import RunScoring, load_scoring


@dataclass
class TrainingInputs:
    """Everything that a training run reads before it writes anything."""

    spec: RunSpec
    target: Target
    dataset: Dataset
    drafter: Drafter
    source: Source
    # What scores the drafter, or None, and how it decodes then.
    evaluation: Any
    decoding: tuple[TreeBuilder, AcceptanceRule]
    # What the training reads and no setting says.
    facts: InputFacts
    # Lines that describe the data and the source.
    report_lines: list[str]


def train_and_score(
    spec: RunSpec,
    target: Target | None = None,
    dataset: Dataset | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Train the drafter that `spec` names, score it unless eval=none, and return the run folder.

    `target` and `dataset` may be passed if they are loaded already. `callbacks` hear of the
    training.
    """
    spec = apply_init_shape(spec).with_default_tree()
    trainer = Trainer.from_spec(spec)
    accelerator = trainer.make_accelerator()
    with ExitStack() as stack:
        # The first process holds the lock of the folder until the stack is closed.
        run = decide_once(accelerator, lambda: choose_folder(spec, stack))
        if (result := describe_result(spec, run)) is not None:
            print_text(result)
        else:
            tracker = spec.tracker.build() if accelerator.is_main_process else None
            # A run without a score may have its drafter.
            inputs = None if is_finished(run) else load_inputs(spec, trainer, target, dataset)
            if inputs is None:
                step = read_last_step(run / METRICS_NAME)
            else:
                step = open_run(inputs, run, accelerator)
            with track_run(tracker, run, spec.to_nodes(), step=step) as run_tracker:
                if inputs is None:
                    scoring = load_scoring(spec, run)
                else:
                    scoring = train(inputs, run, trainer, accelerator, run_tracker, callbacks)
                if scoring is not None:
                    scoring.score(run_tracker)
    disconnect_processes()
    return run


def train(
    inputs: TrainingInputs,
    run: Path,
    trainer: Trainer,
    accelerator: Accelerator,
    tracker: Tracker,
    callbacks: Sequence[Callback] = (),
) -> RunScoring | None:
    """Train the drafter in its run folder and return what scores it; None without an evaluation,
    and on a process that scores nothing.
    """
    is_main = accelerator.is_main_process
    steps = CallbackTracker(tracker, callbacks if is_main else ())
    try:
        result = trainer.fit(
            inputs.drafter,
            inputs.target,
            inputs.dataset,
            inputs.source,
            run,
            steps,
            steps.record_step,
        )
    finally:
        message = inputs.source.close()
        if message is not None and is_main:
            print_text(message)
    if is_main:
        if result.gain is not None:
            print_text(f"{run}: {result.gain.describe()}")
        save_trained(inputs, run, result)
        tracker.log_drafter(run / "drafter")
    if inputs.evaluation is None:
        return None
    return make_scoring(inputs, run, result.is_reusable, accelerator)


def load_inputs(
    spec: RunSpec, trainer: Trainer, target: Target | None, dataset: Dataset | None
) -> TrainingInputs:
    """Load data, target, prompts and drafter; any mistake in one of them raises an error here."""
    # Tree and rule are saved with the drafter, so a mistake in them is not reported afterwards.
    data, evaluation, tree, rule, source, server = spec.build(
        "data", "eval", "tree", "acceptance", "source", "server"
    )
    connect_source(spec, source, server)
    if dataset is None:
        data.load_conversations()
    target = target or spec.target.build()
    assert target is not None
    # Some drafters change the target's layers.
    weights = hash_target(target)
    if evaluation is not None:
        evaluation.check_prompts(target)
    dataset = dataset or data.make_dataset(target.template, target.vision)
    # A stream needs trainer.max_steps.
    trainer.num_steps(dataset)
    drafter = init_drafter(spec, target, dataset)
    if evaluation is not None:
        check_compatibility(drafter.capabilities, tree, rule)
    if not all(stage.layers for stage in drafter.stages):
        target.require_layers(f"drafter={spec.drafter.choice}, whose loss runs the target,")
    source.begin(drafter)
    examples = None if dataset.is_sample else dataset.examples
    stage = drafter.stages[0]
    reads = FeaturesRead(stage.layers, stage.final_reach)
    report = source.prepare(target, reads, examples)
    adapted = describe_adapters(drafter) if spec.adapter else None
    report_lines = [
        dataset.summary_line() + data.describe_omissions(),
        *data.limit_lines(),
        *dataset.source_lines,
        *dataset.unread_lines(drafter.capabilities.row_keys),
        *filter(None, [report, adapted]),
        *explain_no_validation(dataset, data.held_out, target),
    ]
    facts = collect_facts(target, weights, dataset, drafter, source)
    target.pack_weights()
    return TrainingInputs(
        spec, target, dataset, drafter, source, evaluation, (tree, rule), facts, report_lines
    )


def explain_no_validation(dataset: Dataset, share: Any, target: Target) -> Iterator[str]:
    """Say why nothing is validated, where a share of the data is to be held out."""
    if share and not dataset.held_out:
        yield (
            f"data.held_out={share} holds out none of these conversations, so nothing is "
            "validated; name a larger share, as in data.held_out=0.1"
        )
    if dataset.held_out and not target.has_layers:
        yield (
            "validation on held-out conversations is left out: it decodes with the target "
            "(target.parts=head)"
        )


def connect_source(spec: RunSpec, source: Source, server: FeatureServer | None) -> None:
    """Give the source of a training the server that it needs; a UserError says that there is none,
    or one that it does not need.
    """
    if source.needs_server:
        if server is None:
            raise UserError(
                f"source={spec.source.choice}: name the server, as in server=vllm "
                "server.url=http://127.0.0.1:8000/v1"
            )
        source.use_server(server)
    elif server is not None:
        raise UserError(
            f"server={spec.server.choice}: source={spec.source.choice} requests nothing of a "
            "server; use source=server, or leave server out"
        )


def choose_folder(spec: RunSpec, stack: ExitStack) -> Path:
    """Choose the run folder and lock it until `stack` is closed. A folder with a run in it is
    accepted only with trainer.resume.
    """
    if spec.run is None and spec.resume is not None:
        raise UserError(
            f"trainer.resume={spec.resume}: say which run to go on with, as in run=runs/NAME"
        )
    if spec.run is None:
        base = Path("runs") / f"{spec.name}-{spec.target_name}"
        names = chain([base], (base.with_name(f"{base.name}-{number}") for number in count(2)))
        return stack.enter_context(claim_new_folder(names))
    run = Path(spec.run)
    if spec.resume is None:
        # A folder that is refused stays as it is.
        check_is_new(run)
        stack.enter_context(claim_folder(run, 0.0))
        # Another launch may have begun a run before this one had the lock.
        check_is_new(run)
    elif not is_finished(run) or os.access(run, os.W_OK):
        # A finished run may lie where nothing can be written.
        stack.enter_context(claim_folder(run, LOCK_SECONDS))
    if not is_finished(run):
        set_aside_damaged(run)
    checkpoint = None if is_finished(run) else latest_checkpoint(run)
    if checkpoint is not None and not (run / "config.yaml").exists():
        raise UserError(
            f"{run / 'config.yaml'}: it is missing, so nobody knows the settings with which "
            f"{checkpoint.name} was trained; copy it back, or choose another folder"
        )
    if checkpoint is not None or (is_finished(run) and (run / "config.yaml").exists()):
        check_settings(run, spec)
    if checkpoint is not None:
        check_run_files(run, checkpoint)
    return run


def is_finished(run: Path) -> bool:
    """Tell whether a run folder holds a trained drafter."""
    return (run / "drafter" / "config.json").exists()


def describe_result(spec: RunSpec, run: Path) -> str | None:
    """Say where the results of a run are to which nothing is to be added; None for any other."""
    if not is_finished(run):
        return None
    if not spec.eval:
        return f"{run} is finished: its drafter is in {run / 'drafter'}"
    if (run / "eval" / spec.evaluation_name / "summary.json").exists():
        return f"{run} is finished and scored: see {run / 'eval'}"
    return None


def check_is_new(run: Path) -> None:
    """Raise a UserError if a folder holds a run."""
    if (run / "config.yaml").exists():
        raise UserError(
            f"run={run}: the folder holds a run already; choose another, or go on with "
            "trainer.resume=auto"
        )


def open_run(inputs: TrainingInputs, run: Path, accelerator: Accelerator) -> int:
    """Write what describes a run before it trains, as soon as all processes have loaded its
    inputs; return the step that it goes on from.
    """
    checkpoint = latest_checkpoint(run)
    if accelerator.is_main_process:
        write_settings(run, inputs.spec, inputs.facts, checkpoint)
        print_text("\n".join([f"{run}: {inputs.report_lines[0]}", *inputs.report_lines[1:]]))
    wait_for_loading(accelerator, run)
    return 0 if checkpoint is None else checkpoint_step(checkpoint)


def write_settings(
    run: Path, spec: RunSpec, facts: InputFacts, checkpoint: Path | None = None
) -> None:
    """Write the configuration and the provenance of a run that begins; one with a checkpoint keeps
    its own.

    A run that was killed before its first checkpoint begins anew, with the settings of this launch.
    """
    made = not run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
        if (run / "config.yaml").exists():
            if checkpoint is not None:
                check_inputs(run, facts, checkpoint, spec.resume == "changed")
                return
            # What cannot be read is not replaced.
            RunSpec.load(run / "config.yaml")
            delete_unfinished(run)
        provenance = {**facts.to_provenance(), **collect_provenance()}
        write_text(run / "provenance.json", json.dumps(provenance, indent=2) + "\n")
        write_text(run / "config.yaml", spec.to_yaml())
    except OSError as error:
        raise UserError(
            f"run={run}: the folder cannot be written ({error.strerror}); choose another"
        ) from error
    finally:
        if not (run / "config.yaml").exists():
            # A full disk leaves an incomplete folder.
            (run / "provenance.json").unlink(missing_ok=True)
            if made:
                shutil.rmtree(run, ignore_errors=True)


def save_trained(inputs: TrainingInputs, run: Path, result: TrainingResult) -> None:
    """Save the drafter, and before it the target if it was trained too."""
    if inputs.drafter.capabilities.target_training:
        with atomic_write(run / "target", folder=True, remedy=resume_advice(run)) as scratch:
            inputs.target.save(scratch)
        inputs.target.name = f"{inputs.target.name}, trained"
    save_drafter(
        run / "drafter",
        inputs.drafter,
        inputs.spec,
        result,
        resume_advice(run),
        inputs.target.template,
    )


def make_scoring(
    inputs: TrainingInputs, run: Path, is_reusable: bool, accelerator: Accelerator
) -> RunScoring | None:
    """Return what scores the trained drafter from memory or, if it was sharded, loaded again; None
    on a process that scores nothing.
    """
    spec, target = inputs.spec, inputs.target
    if target.sharding == "none" and is_reusable:
        if not accelerator.is_main_process:
            return None
        return RunScoring(
            spec, run, target, inputs.drafter, inputs.evaluation, inputs.decoding, inputs.dataset
        )
    if target.sharding != "none":
        # Every process loads the saved drafter.
        accelerator.wait_for_everyone()
    trained = inputs.drafter.capabilities.target_training
    return load_scoring(spec, run, None if trained else target)
