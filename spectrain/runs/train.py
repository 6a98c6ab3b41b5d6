"""Training of the drafter that a configuration names, in its run folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter
from spectrain.features.base import Source
from spectrain.files import atomic_write
from spectrain.models.target import Target
from spectrain.training.checkpoints import checkpoint_step, latest_checkpoint, resume_advice
from spectrain.training.metrics import Tracker, read_last_step
from spectrain.training.state import TrainingResult
from spectrain.training.trainer import Trainer

from .defaults import default_tree
from .drafter_files import save_drafter
from .folder import choose_folder, open_run
from .init_drafter import apply_init_shape, init_drafter
from .score import evaluate, score
from .tracking import track_run


@dataclass
class TrainingInputs:
    """Everything that a training run reads before it writes anything."""

    trainer: Trainer
    target: Target
    dataset: Dataset
    drafter: Drafter
    source: Source
    evaluation: Any
    # Lines that describe the data and the source.
    report_lines: list[str]


def train(spec: RunSpec, target: Target | None = None, dataset: Dataset | None = None) -> Path:
    """Train the drafter that `spec` names and, unless eval=none, score it. All input is read before anything is written.

    `target` and `dataset` may be passed if they are loaded already.
    """
    spec = default_tree(apply_init_shape(spec))
    trainer = Trainer.from_spec(spec)
    accelerator = trainer.make_accelerator()
    run = choose_folder(spec, accelerator)
    finished = (run / "drafter" / "config.json").exists()
    if finished and is_finished(spec, run):
        return run
    tracker: Tracker | None = spec.tracker.build() if accelerator.is_main_process else None
    settings = spec.to_nodes()
    if finished:
        with track_run(tracker, run, settings, step=read_last_step(run / "metrics.jsonl")) as tracker:
            evaluate(spec, run, tracker=tracker)
        return run
    work = load_inputs(spec, trainer, target, dataset)
    if accelerator.is_main_process:
        open_run(run, spec, work.dataset, work.target)
        print(f"{run}: {work.report_lines[0]}", *work.report_lines[1:], sep="\n", flush=True)
    accelerator.wait_for_everyone()
    work.target.pack_weights()
    checkpoint = latest_checkpoint(run)
    with track_run(tracker, run, settings, step=0 if checkpoint is None else checkpoint_step(checkpoint)) as tracker:
        try:
            trained = trainer.fit(work.drafter, work.target, work.dataset, work.source, run, tracker)
        finally:
            work.source.flush()
        if accelerator.is_main_process:
            save_trained(work, spec, run, trained)
            tracker.log_drafter(run / "drafter")
        if work.evaluation is not None:
            score_trained(work, spec, run, trained, tracker, accelerator)
    return run


def is_finished(spec: RunSpec, run: Path) -> bool:
    """Tell whether a trained run is also scored or has no evaluation; if so, print where its results are."""
    if not spec.eval:
        print(f"{run} is finished: its drafter is in {run / 'drafter'}")
        return True
    if (run / "eval" / spec.evaluation_name / "summary.json").exists():
        print(f"{run} is finished and scored: see {run / 'eval'}")
        return True
    return False


def load_inputs(spec: RunSpec, trainer: Trainer, target: Target | None, dataset: Dataset | None) -> TrainingInputs:
    """Load data, target, prompts and drafter; any mistake in one of them raises an error here."""
    data = spec.data.build()
    if dataset is None:
        data.load_conversations()
    evaluation = spec.eval.build()
    target = target or spec.target.build()
    assert target is not None
    if evaluation is not None:
        evaluation.check_prompts(target)
    dataset = dataset or data.make_dataset(target.template, target.vision)
    # A stream needs trainer.max_steps.
    trainer.num_steps(dataset)
    drafter = init_drafter(spec, target, dataset)
    source: Source = spec.source.build()
    source.begin(drafter)
    examples = None if dataset.is_sample else dataset.examples
    report = source.prepare(target, drafter.stages[0].layers, drafter.stages[0].final_reach, examples)
    report_lines = [dataset.summary_line() + data.describe_omissions(), *dataset.unread_lines(), *filter(None, [report])]
    return TrainingInputs(trainer, target, dataset, drafter, source, evaluation, report_lines)


def save_trained(inputs: TrainingInputs, spec: RunSpec, run: Path, result: TrainingResult) -> None:
    """Save the drafter, and before it the target if it was trained too."""
    if inputs.drafter.capabilities.target_training:
        with atomic_write(run / "target", folder=True, remedy=resume_advice(run)) as scratch:
            inputs.target.save(scratch)
        inputs.target.name = f"{inputs.target.name}, trained"
    save_drafter(run / "drafter", inputs.drafter, spec, result, resume_advice(run), inputs.target.template)


def score_trained(
    inputs: TrainingInputs, spec: RunSpec, run: Path, result: TrainingResult, tracker: Tracker, accelerator: Any
) -> None:
    """Score the trained drafter from memory or, if it was sharded, load it again."""
    is_unsharded = inputs.target.sharding == "none"
    if not is_unsharded:
        # Every process loads the saved drafter.
        accelerator.wait_for_everyone()
    if result.is_reusable and is_unsharded and accelerator.is_main_process:
        score(spec, run, inputs.target, inputs.drafter, inputs.evaluation, inputs.dataset, tracker)
    elif not result.is_reusable or not is_unsharded:
        evaluate(spec, run, None if inputs.drafter.capabilities.target_training else inputs.target, tracker)
