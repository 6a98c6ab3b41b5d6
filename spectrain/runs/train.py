"""Training the drafter that a configuration names, in its run folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter
from spectrain.features.base import Source
from spectrain.files import written
from spectrain.models.target import Target
from spectrain.settings.build import build
from spectrain.training.checkpoints import latest_checkpoint, resuming, step_of
from spectrain.training.job import Trained
from spectrain.training.metrics import Tracker, last_step
from spectrain.training.trainer import Trainer

from .defaults import measure_unless_asked
from .drafter_files import save_drafter
from .folder import choose_folder, evaluation_name, open_run
from .fresh import fresh_drafter, take_shape
from .score import evaluate, score
from .tracking import tracked


@dataclass
class TrainingInput:
    """Everything that a training reads before it writes anything."""

    trainer: Trainer
    target: Target
    dataset: Dataset
    drafter: Drafter
    source: Source
    evaluation: Any
    told: list[str]  # of the data and the source


def train(config: DictConfig, asked: list[str], target: Target | None = None, dataset: Dataset | None = None) -> Path:
    """Train the drafter that `config` names and, unless eval=none, score it. Nothing is written before all input is read.

    `asked` are the settings that the command gave itself, as opposed to those of a recipe. `target` and `dataset` are what
    `config` says, where they are loaded already.
    """
    take_shape(config, asked)
    measure_unless_asked(config, asked)
    trainer = Trainer.of(config)
    accelerator = trainer.accelerator()
    run = choose_folder(config, accelerator)
    finished = (run / "drafter" / "config.json").exists()
    if finished and is_done(config, run):
        return run
    tracker: Tracker | None = build(config.get("tracker")) if accelerator.is_main_process else None
    settings: Any = OmegaConf.to_container(config)
    if finished:
        with tracked(tracker, run, settings, step=last_step(run / "metrics.jsonl")) as tracker:
            evaluate(config, run, tracker=tracker)
        return run
    work = read_all(config, trainer, target, dataset)
    if accelerator.is_main_process:
        open_run(run, config, work.dataset, work.target)
        print(f"{run}: {work.told[0]}", *work.told[1:], sep="\n", flush=True)
    accelerator.wait_for_everyone()
    work.target.pack()
    checkpoint = latest_checkpoint(run)
    with tracked(tracker, run, settings, step=0 if checkpoint is None else step_of(checkpoint)) as tracker:
        try:
            trained = trainer.fit(work.drafter, work.target, work.dataset, work.source, run, tracker)
        finally:
            work.source.flush()
        if accelerator.is_main_process:
            save(work, config, run, trained)
            tracker.drafter(run / "drafter")
        if work.evaluation is not None:
            score_trained(work, config, run, trained, tracker, accelerator)
    return run


def is_done(config: DictConfig, run: Path) -> bool:
    """Whether a run whose drafter is there is also scored, or is not to be; it then says so."""
    if not (config.get("eval") and "_target_" in config.eval):
        print(f"{run} is finished: its drafter is in {run / 'drafter'}")
        return True
    if (run / "eval" / evaluation_name(config) / "summary.json").exists():
        print(f"{run} is finished and scored: see {run / 'eval'}")
        return True
    return False


def read_all(config: DictConfig, trainer: Trainer, target: Target | None, dataset: Dataset | None) -> TrainingInput:
    """Data, target, prompts and drafter; whatever is wrong with one of them is told here."""
    data = build(config.data)
    if dataset is None:
        data.conversations()
    evaluation = build(config.get("eval"))
    target = target or build(config.target)
    assert target is not None
    if evaluation is not None:
        evaluation.check_prompts(target)
    dataset = dataset or data.dataset(target.tokenizer, target.sight)
    trainer.num_steps(dataset)  # a stream must be told how long
    drafter = fresh_drafter(config, target, dataset)
    source: Source = build(config.source)
    source.begin(drafter)
    examples = None if dataset.is_sample else dataset.examples
    told = source.prepare(target, drafter.stages[0].layers, drafter.stages[0].final_reach, examples)
    left_out = f", {data.num_left_out} unusable conversations left out" if data.num_left_out else ""
    return TrainingInput(
        trainer, target, dataset, drafter, source, evaluation, [dataset.summary() + left_out, *filter(None, [told])]
    )


def save(work: TrainingInput, config: DictConfig, run: Path, trained: Trained) -> None:
    """The drafter, after the target where that was trained too."""
    if work.drafter.abilities.target_training:
        with written(run / "target", folder=True, mend=resuming(run)) as scratch:
            work.target.save(scratch)
        work.target.name = f"{work.target.name}, trained"
    save_drafter(run / "drafter", work.drafter, config, trained, resuming(run))


def score_trained(
    work: TrainingInput, config: DictConfig, run: Path, trained: Trained, tracker: Tracker, accelerator: Any
) -> None:
    """Score what was trained as it is in memory, or, where it was sharded, loaded anew."""
    whole = work.target.sharding == "none"
    if not whole:
        accelerator.wait_for_everyone()  # for the drafter, which each of them loads
    if trained.in_place and whole and accelerator.is_main_process:
        score(config, run, work.target, work.drafter, work.evaluation, work.dataset, tracker)
    elif not trained.in_place or not whole:
        evaluate(config, run, None if work.drafter.abilities.target_training else work.target, tracker)
