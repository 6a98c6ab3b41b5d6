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

from accelerate.utils import broadcast_object_list

from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.decoding.session import check_compatibility
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.features.base import FeaturesRead, Source
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
from spectrain.training.parallel.launch import disconnect_processes, wait_for_loading
from spectrain.training.run_files import check_run_files
from spectrain.training.trainer import Trainer

from .callbacks import Callback, CallbackTracker
from .drafters import save_drafter
from .init_drafter import apply_init_shape, init_drafter
from .lock import LOCK_SECONDS, claim_folder, claim_new_folder
from .resume import InputFacts, check_inputs, check_settings, collect_facts, delete_unfinished
from .score import RunScoring, build_decoding, load_scoring


@dataclass
class TrainingInputs:
    """Everything that a training run reads before it writes anything."""

    spec: RunSpec
    target: Target
    dataset: Dataset
    drafter: Drafter
    source: Source
    evaluation: Any
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
        run = claim_run(spec, accelerator, stack)
        if is_finished(run):
            score_finished(spec, run, accelerator.is_main_process)
        else:
            train(spec, run, trainer, accelerator, target, dataset, callbacks)
    disconnect_processes()
    return run


def train(
    spec: RunSpec,
    run: Path,
    trainer: Trainer,
    accelerator: Any,
    target: Target | None,
    dataset: Dataset | None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train the drafter in its run folder and score it. All input is read before anything is
    written.
    """
    is_main = accelerator.is_main_process
    tracker: Tracker | None = spec.tracker.build() if is_main else None
    inputs = load_inputs(spec, trainer, target, dataset)
    checkpoint = latest_checkpoint(run)
    if is_main:
        open_run(run, inputs.spec, inputs.facts, checkpoint)
        print_text("\n".join([f"{run}: {inputs.report_lines[0]}", *inputs.report_lines[1:]]))
    wait_for_loading(accelerator, run)
    step = 0 if checkpoint is None else checkpoint_step(checkpoint)
    with track_run(tracker, run, spec.to_nodes(), step=step) as run_tracker:
        steps = CallbackTracker(run_tracker, callbacks if is_main else ())
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
            run_tracker.log_drafter(run / "drafter")
        if inputs.evaluation is not None:
            score_trained(inputs, run, result.is_reusable, accelerator, run_tracker)


def load_inputs(
    spec: RunSpec, trainer: Trainer, target: Target | None, dataset: Dataset | None
) -> TrainingInputs:
    """Load data, target, prompts and drafter; any mistake in one of them raises an error here."""
    data = spec.data.build()
    if dataset is None:
        data.load_conversations()
    evaluation = spec.eval.build()
    decoding = None if evaluation is None else build_decoding(spec)
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
    if decoding is not None:
        check_compatibility(drafter.capabilities, *decoding)
    if not all(stage.layers for stage in drafter.stages):
        target.require_layers(f"drafter={spec.drafter.choice}, whose loss runs the target,")
    source = make_source(spec)
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
    facts = collect_facts(spec, target, weights, dataset, source)
    target.pack_weights()
    return TrainingInputs(spec, target, dataset, drafter, source, evaluation, facts, report_lines)


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


def make_source(spec: RunSpec) -> Source:
    """Return the source of a training, with the server that it needs."""
    source: Source = spec.source.build()
    if source.needs_server:
        if not spec.server:
            raise UserError(
                f"source={spec.source.choice}: name the server, as in server=vllm "
                "server.url=http://127.0.0.1:8000/v1"
            )
        source.use_server(spec.server.build())
    elif spec.server:
        raise UserError(
            f"server={spec.server.choice}: source={spec.source.choice} requests nothing of a "
            "server; use source=server, or leave server out"
        )
    return source


def claim_run(spec: RunSpec, accelerator: Any, stack: ExitStack) -> Path:
    """Return the run folder, the same on every process; the first process holds its lock until
    `stack` is closed.
    """
    if spec.run is None and spec.resume is not None:
        raise UserError(
            f"trainer.resume={spec.resume}: say which run to go on with, as in run=runs/NAME"
        )
    # The folder, or why there is none: all processes of a launch end alike.
    outcome: list[Path | UserError | None] = [None]
    if accelerator.is_main_process:
        try:
            outcome[0] = choose_folder(spec, stack)
        except UserError as error:
            outcome[0] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if isinstance(outcome[0], UserError):
        raise outcome[0]
    assert outcome[0] is not None
    return outcome[0]


def choose_folder(spec: RunSpec, stack: ExitStack) -> Path:
    """Choose and lock the run folder. A folder with a run in it is accepted only with
    trainer.resume.
    """
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


def check_is_new(run: Path) -> None:
    """Raise a UserError if a folder holds a run."""
    if (run / "config.yaml").exists():
        raise UserError(
            f"run={run}: the folder holds a run already; choose another, or go on with "
            "trainer.resume=auto"
        )


def open_run(run: Path, spec: RunSpec, facts: InputFacts, checkpoint: Path | None = None) -> None:
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


def score_trained(
    inputs: TrainingInputs,
    run: Path,
    is_reusable: bool,
    accelerator: Any,
    tracker: Tracker,
) -> None:
    """Score the trained drafter from memory or, if it was sharded, load it again."""
    spec, target = inputs.spec, inputs.target
    scoring: RunScoring | None = None
    if target.sharding == "none" and is_reusable:
        if accelerator.is_main_process:
            scoring = RunScoring(
                spec, run, target, inputs.drafter, inputs.evaluation, inputs.dataset
            )
    else:
        if target.sharding != "none":
            # Every process loads the saved drafter.
            accelerator.wait_for_everyone()
        trained = inputs.drafter.capabilities.target_training
        scoring = load_scoring(spec, run, None if trained else target)
    if scoring is not None:
        scoring.score(tracker)


def score_finished(spec: RunSpec, run: Path, is_main: bool) -> None:
    """Score the drafter of a finished run if it has no score yet; otherwise print where the
    results are.
    """
    if not spec.eval:
        print_text(f"{run} is finished: its drafter is in {run / 'drafter'}")
    elif (run / "eval" / spec.evaluation_name / "summary.json").exists():
        print_text(f"{run} is finished and scored: see {run / 'eval'}")
    else:
        tracker = spec.tracker.build() if is_main else None
        step = read_last_step(run / METRICS_NAME)
        with track_run(tracker, run, spec.to_nodes(), step=step) as run_tracker:
            scoring = load_scoring(spec, run)
            if scoring is not None:
                scoring.score(run_tracker)
