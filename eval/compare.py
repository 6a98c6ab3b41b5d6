"""`spectrain compare`: which drafter for my model. Every recipe is trained on one target, data and budget and scored alike.

Target and data are loaded once, and one recipe follows the other in this process; a family that trains the target gets one of
its own. What is done is not done again: a comparison that was stopped goes on with trainer.resume=auto.
"""

import gc
import inspect
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spectrain.config.build import build, import_constructor
from spectrain.config.check import check_config
from spectrain.config.keys import TRAIN_KEYS
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter
from spectrain.errors import RunInterrupted, UserError, suggest_nearest
from spectrain.eval.comparison import Scored, join
from spectrain.eval.page import write_report
from spectrain.eval.report import print_comparison
from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain.runs.defaults import default_tree
from spectrain.runs.folder import evaluation_name, target_name
from spectrain.runs.score import evaluate
from spectrain.runs.tracking import tracked
from spectrain.runs.train import train
from spectrain.training.trainer import Trainer

OWN = ("recipes", "run", "compare", "tree", "runs")  # settings of the command that are not a training's
BATCHES = 2  # full ones, for the speed of several prompts at once


@dataclass
class Comparison:
    """How long each recipe trains, and what is scored beside them.

    The budget is `seconds` of training a recipe, by the clock, or, where given, `tokens`, as a number of steps. `training_free`
    are drafters that need none. `batch` prompts at once are decoded for throughput, none where it is null. `data_limit`
    conversations serve all recipes alike.
    """

    # Training time of each recipe in seconds; it has no effect where compare.tokens is given.
    seconds: float = 45.0
    # Training budget of each recipe in tokens; null trains for compare.seconds instead.
    tokens: int | None = None
    # Drafters that need no training and are scored next to the recipes.
    training_free: tuple[str, ...] = ("ngram", "retrieval", "lookahead", "layer_skip")
    # Number of prompts that are decoded together to measure throughput; null does not measure it.
    batch: int | None = 8
    # Number of conversations that every recipe trains on; null uses all of them.
    data_limit: int | None = None

    def __post_init__(self) -> None:
        for key, value in (("seconds", self.seconds), ("tokens", self.tokens), ("batch", self.batch)):
            if value is not None and not value > 0:
                raise UserError(f"compare.{key}={value}: use more than 0")

    @property
    def budget(self) -> str:
        return f"{self.seconds:g} seconds of training" if self.tokens is None else f"{self.tokens:,} tokens of training"


def compare(config: DictConfig, asked: Sequence[str]) -> dict[str, Any]:
    """Train and score what is named, or read finished runs; write comparison.json and report.html, print the table."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("compare: it runs in one process; train with several by spectrain train, then compare the runs")
    comparison: Comparison = build(config.compare)
    for key in ("max_steps", "max_minutes", "epochs"):
        if any(key_of(override, 2) == f"trainer.{key}" for override in asked):
            raise UserError(f"trainer.{key}: a comparison trains by compare.seconds or compare.tokens; use one of these")
    if not (config.get("eval") and "_target_" in config.eval):
        raise UserError("eval=none: a comparison is made of scores; leave it out")
    folder = choose_folder(config)
    if config.runs:
        found = read_runs([Path(run) for run in config.runs], evaluation_name(config), comparison)
        budget = None
    else:
        found = Contest(config, comparison, folder, asked).run()
        budget = comparison.budget
    folder.mkdir(parents=True, exist_ok=True)
    result = join(found, folder, budget)
    write_text(folder / "comparison.json", json.dumps(result, indent=2) + "\n")
    write_report(folder / "report.html", [one.folder for one in found], result)
    settings: Any = OmegaConf.to_container(config)
    with tracked(build(config.tracker), folder, settings, "compare") as tracker:
        tracker.log_comparison(result, folder)
    print_comparison(result)
    print(f"written to {folder}")
    return result


def choose_folder(config: DictConfig) -> Path:
    """Where the comparison goes; a folder that holds one is taken only to go on with it."""
    if config.run is None:
        base = Path("runs") / (f"compare-{target_name(config)}" if not config.runs else "compare")
        taken = [base, *(base.with_name(f"{base.name}-{number}") for number in range(1, 10_000))]
        return next(place for place in taken if not place.exists())
    folder = Path(config.run)
    if (folder / "comparison.json").exists() and not config.runs and config.trainer.get("resume") != "auto":
        raise UserError(f"run={folder}: it holds a comparison already; choose another, or go on with trainer.resume=auto")
    return folder


def read_runs(runs: Sequence[Path], name: str, comparison: Comparison) -> list[Scored]:
    """The evaluations of finished runs; a folder of comparisons stands for the runs in it."""
    found: list[Scored] = []
    for run in runs:
        inner = sorted(path.parents[2] for path in run.glob(f"*/eval/{name}/summary.json"))
        for place in [run] if (run / "eval" / name).exists() or not inner else inner:
            found.append(Scored.read(place.name, place / "eval" / name, place / "eval" / batched_name(comparison)))
    names = [one.name for one in found]
    return [replace(one, name=str(one.folder.parents[1])) if names.count(one.name) > 1 else one for one in found]


def batched_name(comparison: Comparison) -> str:
    return f"batch{comparison.batch}"


@dataclass
class Contest:
    """Recipes and training-free drafters, one after the other on the same target and data."""

    config: DictConfig
    comparison: Comparison
    folder: Path
    asked: Sequence[str]

    def run(self) -> list[Scored]:
        """Train and score every one that is not done yet."""
        names = recipes(self.config.recipes)
        if not names and not self.comparison.training_free:
            raise UserError("recipes: there is nothing to compare; name a recipe, a run or a drafter in compare.training_free")
        self.passed = [override for override in self.asked if key_of(override) not in OWN]
        settings = [self.settings("recipe", name) for name in names]
        free = [self.settings("drafter", name) for name in self.comparison.training_free]
        for setting in free if settings else ():
            setting.eval = settings[0].eval  # scored as the recipes are
        self.begin()
        self.target: Target = build(self.config.target)
        self.datasets: dict[str, Dataset] = {}
        began = time.perf_counter()
        beside = f"; beside them {', '.join(self.comparison.training_free)}" if free else ""
        print(f"{self.folder}: {', '.join(names)}; {self.comparison.budget} each{beside}", flush=True)
        try:
            found = [self.trained(name, setting) for name, setting in zip(names, settings)]
        except RunInterrupted as stopped:
            message = f"stopped; go on with the same command, trainer.resume=auto run={self.folder}"
            raise RunInterrupted(message, stopped.status) from stopped
        found += [self.scored(name, setting) for name, setting in zip(self.comparison.training_free, free)]
        print(f"all done in {(time.perf_counter() - began) / 60:.1f} minutes", flush=True)
        return found

    def begin(self) -> None:
        """Keep what all have in common; a comparison that goes on must not change it half-way."""
        ours = ("trainer.resume", "tracker")
        passed = sorted(one.lstrip("+") for one in self.passed if not key_of(one, 2).startswith(ours))
        compared = {key: value for key, value in self.config.compare.items() if key not in ("training_free", "batch")}
        now = json.dumps({"compare": compared, "settings": passed}, default=str, indent=2) + "\n"
        file = self.folder / "compare.json"
        if file.exists() and file.read_text() != now:
            raise UserError(
                f"run={self.folder}: this comparison began with other settings, those in {file}; use them, or another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(file, now)

    def settings(self, group: str, name: str) -> DictConfig:
        """The whole configuration of one, its tree and data those of all."""
        tree = HydraConfig.get().runtime.choices["tree"]
        able = import_constructor(compose("train", overrides=[f"{group}={name}"]).drafter).capabilities
        if able.is_copier:  # what is copied at no cost is best as long as it is sure, or where it knows how sure it is
            tree = "auto" if able.has_no_q else "chain"
        alike = ["++eval.baselines=[own,auto,copies,chain]", "++eval.oracle=false"]
        config = compose("train", overrides=[f"{group}={name}", f"tree={tree}", *alike, *self.passed])
        OmegaConf.set_struct(config, False)
        takes = inspect.signature(import_constructor(config.tree)).parameters
        config.tree = {key: value for key, value in config.tree.items() if key == "_target_" or key in takes}
        for key, value in self.config.tree.items():  # the command's own, over the recipe's
            if key in takes and any(key_of(override, 2) == f"tree.{key}" for override in self.asked):
                config.tree[key] = value
        if "limit" in config.data and not any(key_of(override, 2) == "data.limit" for override in self.asked):
            config.data.limit = self.comparison.data_limit
        config.run = str(self.folder / name)
        config.recipe_name = name
        default_tree(config, self.asked)
        checked: DictConfig = check_config(config, TRAIN_KEYS)
        return checked

    def trained(self, name: str, config: DictConfig) -> Scored:
        """Train one recipe for the budget and score it."""
        run = Path(config.run)
        if not (run / "eval" / evaluation_name(config) / "summary.json").exists():
            with said(run):
                dataset = self.dataset(config)
                config.trainer.update(self.allotted(config, dataset) | {"resume": "auto"})
                train(config, list(self.passed), self.target_for(config), dataset)
            clean_up()
        self.batched(config)
        found = self.read(config)
        training = found.setting["training"]
        told(found, f"{training['tokens']:,} tokens in {training['seconds']:.0f} s")
        return found

    def scored(self, name: str, config: DictConfig) -> Scored:
        """Score a drafter that needs no training."""
        run = Path(config.run)
        if not (run / "eval" / evaluation_name(config) / "summary.json").exists():
            with said(run):
                evaluate(config, run, self.target)
        self.batched(config)
        found = self.read(config)
        told(found, "no training")
        return found

    def batched(self, config: DictConfig) -> None:
        """Score it once more with several prompts at once."""
        run, name = Path(config.run), batched_name(self.comparison)
        if self.comparison.batch is None or (run / "eval" / name / "summary.json").exists():
            return
        first = json.loads((run / "eval" / evaluation_name(config) / "summary.json").read_text())
        speed = {"name": name, "batch_size": self.comparison.batch, "limit": BATCHES * self.comparison.batch,
                 "calibration_limit": 4, "check": False, "oracle": False, "report": False}  # fmt: skip
        more = OmegaConf.merge(config, {"eval": speed})
        assert isinstance(more, DictConfig)
        if "skipped" in first["setting"]["drafter"]:
            more.drafter.skipped = first["setting"]["drafter"]["skipped"]  # what a search has found
        with said(run):
            evaluate(more, run, None if (run / "target").is_dir() else self.target)
        clean_up()

    def read(self, config: DictConfig) -> Scored:
        run = Path(config.run)
        return Scored.read(run.name, run / "eval" / evaluation_name(config), run / "eval" / batched_name(self.comparison))

    def dataset(self, config: DictConfig) -> Dataset:
        """The data of a configuration, tokenised once for all that say the same."""
        key = json.dumps(OmegaConf.to_container(config.data), sort_keys=True)
        if key not in self.datasets:
            self.datasets[key] = build(config.data).make_dataset(self.target.template, self.target.vision)
        return self.datasets[key]

    def target_for(self, config: DictConfig) -> Target:
        """The target of all or, for a drafter whose training changes it, one of its own."""
        drafter: Drafter = build(config.drafter, target=self.target)
        return build(config.target) if drafter.capabilities.target_training else self.target

    def allotted(self, config: DictConfig, dataset: Dataset) -> dict[str, Any]:
        """The budget in the trainer's settings: minutes by the clock, or the steps that the tokens are worth."""
        if self.comparison.tokens is None:
            return {"max_minutes": self.comparison.seconds / 60, "max_steps": None}
        trainer = Trainer.from_config(config)
        share: float = trainer.batch_tokens
        if not dataset.is_sample:
            share = dataset.num_tokens / dataset.num_batches(trainer.batch_settings)
        return {"max_minutes": None, "max_steps": max(1, round(self.comparison.tokens / (share * trainer.accumulate)))}


def recipes(named: Any) -> list[str]:
    """The recipes to compare: those named, or every file in recipes/; each must train something to draft with."""
    known = sorted(GlobalHydra.instance().config_loader().get_group_options("recipe"))

    def drafts(name: str) -> bool:
        return not import_constructor(compose("train", overrides=[f"recipe={name}"]).drafter).capabilities.is_acceptance_probe

    if named == "all":
        return [name for name in known if drafts(name)]
    chosen = list(named) if OmegaConf.is_config(named) else str(named).split(",")
    for name in chosen:
        if name not in known:
            raise UserError(f"recipes={name}: there is no such recipe; {suggest_nearest(str(name), known)}")
        if not drafts(str(name)):
            raise UserError(
                f"recipes={name}: what it trains drafts nothing, so its row would be that of copied text; train it alone and "
                f"score any drafter with it, as in acceptance={name} acceptance.path=RUN"
            )
    return [str(name) for name in dict.fromkeys(chosen)]


def key_of(override: str, depth: int = 1) -> str:
    """The first parts of the key that an override sets."""
    key = re.split(r"[=@]", override.lstrip("+~"), maxsplit=1)[0]
    return ".".join(key.split(".")[:depth])


@contextmanager
def said(run: Path) -> Iterator[None]:
    """What would be printed goes to the run's log.txt: the comparison prints a line a drafter."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / "log.txt").open("a") as log, redirect_stdout(log):
        yield


def told(found: Scored, training: str) -> None:
    length, speed = found.summary["acceptance_length"], found.summary["speedup"]
    chain = found.summary["compared"].get("chain")
    beside = "" if chain is None else f", {chain['acceptance_length']['pooled']:.2f} as a chain"
    print(
        f"{found.name}: {training}; {length['pooled']:.2f} tokens a forward{beside}, speedup {speed['ratio']:.2f}", flush=True
    )


def clean_up() -> None:
    """Give back what the last drafter held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
