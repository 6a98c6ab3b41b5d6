"""`spectrain compare`: train every recipe on one target, data and budget, score all alike, and
recommend one.

Target and data are loaded once, and one recipe follows the other in this process; a family that
trains the target gets a target of its own. Finished steps are not repeated: a comparison that was
stopped continues with trainer.resume=auto.
"""

import gc
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from spectrain.config.build import GroupSpec
from spectrain.config.missing import explain_missing
from spectrain.config.plain_files import read_json_object
from spectrain.config.resolve import load_chosen
from spectrain.config.signatures import list_keys
from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter
from spectrain.errors import RunInterrupted, UserError, suggest_nearest
from spectrain.eval.columns import DRAFTER, tracked_comparison
from spectrain.eval.installed_baselines import list_installed_baselines
from spectrain.eval.page import write_report
from spectrain.eval.settings import refuse_unknown
from spectrain.files import open_in_place, write_text
from spectrain.models.target import Target
from spectrain.output.verbosity import result_output
from spectrain.runs.lock import LOCK_SECONDS, claim_folder, claim_new_folder
from spectrain.runs.score import evaluate
from spectrain.runs.server_scores import require_server_scores
from spectrain.runs.train import train_and_score
from spectrain.training.metrics import track_run
from spectrain.training.trainer import Trainer
from spectrain_studies.axes.points import AXIS_LABELS

from .recommendations import compare_runs
from .scored_runs import ScoredRun
from .table import print_comparison
from .targets import compare_targets, group_by_target

# settings of the command that no training has
COMMAND_KEYS = ("recipes", "run", "compare", "tree", "runs")
NUM_BATCHES = 2  # full batches that measure the speed of several prompts at once


@dataclass
class Comparison:
    """Settings of a comparison: the budget of each recipe, and what else is scored."""

    # Training time of each recipe in seconds; it has no effect where compare.tokens is given.
    seconds: float = 45.0
    # Training budget of each recipe in tokens; null trains for compare.seconds instead.
    tokens: int | None = None
    # Drafters that need no training and are scored next to the recipes; null takes ngram, retrieval
    # and those that installed packages name.
    training_free: tuple[str, ...] | None = None
    # Number of prompts that are decoded together to measure throughput; null does not measure it.
    batch: int | None = 8
    # Number of conversations that every recipe trains on; null uses all of them.
    data_limit: int | None = None
    # Names of the scores of one run to put side by side, as in [heldout,openvino-heldout], which
    # engines made; all takes every score of the run. Null compares drafters.
    scores: str | list[str] | None = None

    # Axes over which every drafter is swept as well: batch, context and temperature. Each takes a
    # few times as long as a score.
    sweeps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        refuse_unknown("sweeps", self.sweeps, tuple(AXIS_LABELS), group="compare")
        for key, value in (
            ("seconds", self.seconds),
            ("tokens", self.tokens),
            ("batch", self.batch),
        ):
            if value is not None and not value > 0:
                raise UserError(f"compare.{key}={value}: use more than 0")

    def list_untrained(self) -> tuple[str, ...]:
        """Return the drafters that need no training."""
        if self.training_free is not None:
            return self.training_free
        return (
            "ngram",
            "retrieval",
            *(drafter.name for drafter in list_installed_baselines() if drafter.is_compared),
        )

    @property
    def budget(self) -> str:
        """The budget of each recipe in words."""
        return (
            f"{self.seconds:g} seconds of training"
            if self.tokens is None
            else f"{self.tokens:,} tokens of training"
        )


def compare(
    spec: RunSpec, compare: GroupSpec, recipes: Any, runs: Sequence[str] | None
) -> dict[str, Any]:
    """Train and score the recipes, or read finished runs; write comparison.json and report.html,
    and print the table.
    """
    comparison: Comparison = compare.build()
    check_request(spec, comparison, runs)
    with ExitStack() as stack:
        folder = choose_folder(spec, bool(runs), stack)
        print_result: Callable[[dict[str, Any]], None] = print_comparison
        if comparison.scores is not None:
            assert runs is not None, "scores are those of a run"
            engines = require_server_scores("compare.scores")
            result = engines.compare_engines(Path(runs[0]), comparison.scores, folder)
            print_result = engines.print_engines
        elif runs:
            scored = read_runs(runs, spec.evaluation_name, batched_name(comparison))
            result = compare_scored(scored, folder)
        else:
            scored = Contest(spec, compare, comparison, folder).run(recipes)
            result = compare_scored(scored, folder, comparison.budget)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "comparison.json", json.dumps(result, indent=2) + "\n")
        write_report(folder / "report.html", [], result)
        settings = {**spec.to_nodes(), "compare": compare.node, "recipes": recipes, "runs": runs}
        with track_run(spec.tracker.build(), folder, settings, "compare") as tracker:
            tracker.log_comparison(result, tracked_comparison(result), folder)
        with result_output():
            print_result(result)
        print(f"written to {folder}")
    return result


def check_request(spec: RunSpec, comparison: Comparison, runs: Sequence[str] | None) -> None:
    """Raise a UserError for settings and processes that a comparison does not take."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            "compare: it runs in one process; train with several by spectrain train, then compare "
            "the runs"
        )
    for key in ("max_steps", "max_minutes", "epochs"):
        if spec.trainer.find_layer(key) == "command":
            raise UserError(
                f"trainer.{key}: a comparison trains by compare.seconds or compare.tokens; use "
                "one of these"
            )
    for key, advice in (("max_minutes", "use eval.limit"), ("serve_in", "use spectrain eval")):
        if spec.eval.find_layer(key) == "command":
            raise UserError(
                f"eval.{key}: a comparison scores all drafters by this engine, on the same "
                f"prompts; {advice}"
            )
    if not spec.eval:
        raise UserError("eval=none: a comparison is made of scores; leave it out")
    if comparison.scores is not None and len(runs or ()) != 1:
        raise UserError(
            "compare.scores: it compares the scores of one run; name that run, as in spectrain "
            "compare runs/NAME"
        )


def compare_scored(
    runs: Sequence[ScoredRun], folder: Path, budget: str | None = None
) -> dict[str, Any]:
    """Return the content of comparison.json about scored runs of one target or of several."""
    if len(group_by_target(runs)) > 1:
        return compare_targets(runs, folder)
    return compare_runs(runs, folder, budget)


def choose_folder(spec: RunSpec, reads_runs: bool, stack: ExitStack) -> Path:
    """Return the comparison's folder, locked until `stack` is closed; one that holds a comparison
    is allowed only to continue it."""
    if spec.run is None:
        base = Path("runs") / ("compare" if reads_runs else f"compare-{spec.target_name}")
        return stack.enter_context(
            claim_new_folder(
                chain([base], (base.with_name(f"{base.name}-{number}") for number in count(1)))
            )
        )
    folder = Path(spec.run)
    if (folder / "comparison.json").exists() and not reads_runs and spec.resume is None:
        raise UserError(
            f"run={folder}: it holds a comparison already; choose another, or go on with "
            "trainer.resume=auto"
        )
    stack.enter_context(claim_folder(folder, LOCK_SECONDS if spec.resume is not None else 0.0))
    return folder


def read_runs(paths: Sequence[str], name: str, batched: str) -> list[ScoredRun]:
    """Read the evaluations of finished runs; the folder of a comparison stands for the runs in
    it.
    """
    runs: list[ScoredRun] = []
    for folder in map(Path, paths):
        inner = sorted(path.parents[2] for path in folder.glob(f"*/eval/{name}/summary.json"))
        for run in [folder] if (folder / "eval" / name).exists() or not inner else inner:
            runs.append(ScoredRun.read(run.name, run / "eval" / name, run / "eval" / batched))
    names = [run.name for run in runs]
    return [
        replace(run, name=str(run.folder.parents[1])) if names.count(run.name) > 1 else run
        for run in runs
    ]


def batched_name(comparison: Comparison) -> str:
    """Return the name of the evaluation with several prompts at once."""
    return f"batch{comparison.batch}"


@dataclass
class Contest:
    """Recipes and training-free drafters, one after the other on the same target and data."""

    spec: RunSpec
    # The settings of the comparison, as the command names them.
    requested: GroupSpec
    comparison: Comparison
    folder: Path

    def run(self, recipes: Any) -> list[ScoredRun]:
        """Train and score every drafter that is not finished yet."""
        names = select_recipes(recipes)
        untrained = self.comparison.list_untrained()
        if not names and not untrained:
            raise UserError(
                "recipes: there is nothing to compare; name a recipe, a run or a drafter in "
                "compare.training_free"
            )
        self.passed = [
            override
            for override in self.spec.overrides
            if override_key(override) not in COMMAND_KEYS
        ]
        specs = [self.compose_settings("recipe", name) for name in names]
        untrained_specs = [self.compose_settings("drafter", name) for name in untrained]
        if specs:
            # Training-free drafters are scored as the recipes are.
            untrained_specs = [replace(spec, eval=specs[0].eval) for spec in untrained_specs]
        self.target: Target = self.spec.target.build()
        self.target.require_layers("a comparison")
        self.write_settings()
        self.datasets: dict[str, Dataset] = {}
        start = time.perf_counter()
        rest = f"; without training {', '.join(untrained)}" if untrained else ""
        print(f"{self.folder}: {', '.join(names)}; {self.comparison.budget} each{rest}", flush=True)
        try:
            runs = [self.train_and_score(spec) for spec in specs]
        except RunInterrupted as stopped:
            message = f"stopped; go on with the same command, trainer.resume=auto run={self.folder}"
            raise stopped.interrupt_whole(message) from stopped
        runs += [self.score_untrained(spec) for spec in untrained_specs]
        print(f"all done in {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
        return runs

    def write_settings(self) -> None:
        """Write what all runs share; raise UserError if a comparison that continues would change
        it.
        """
        variable = ("trainer.resume", "tracker")
        passed = sorted(
            override.lstrip("+")
            for override in self.passed
            if not override_key(override, 2).startswith(variable)
        )
        compared = {
            key: value
            for key, value in self.requested.node.items()
            if key not in ("training_free", "batch", "sweeps")
        }
        text = json.dumps({"compare": compared, "settings": passed}, default=str, indent=2) + "\n"
        file = self.folder / "compare.json"
        if file.exists() and drop_path(read_json_object(file)) != drop_path(json.loads(text)):
            raise UserError(
                f"run={self.folder}: this comparison began with other settings, those in {file}; "
                "use them, or another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(file, text)

    def compose_settings(self, group: str, name: str) -> RunSpec:
        """Compose the settings of a run; tree and data are those of all runs."""
        tree = HydraConfig.get().runtime.choices["tree"]
        capabilities = load_chosen("drafter", f"{group}={name}").capabilities
        if capabilities.is_copier:
            # Copies cost nothing: a chain is best, or auto if the drafter knows how likely they
            # are.
            tree = "auto" if capabilities.has_no_q else "chain"
        shared = ["++eval.baselines=[own,auto,copies,chain,fixed]", "++eval.oracle=false"]
        config = compose(
            "train", overrides=[f"{group}={name}", f"tree={tree}", *shared, *self.passed]
        )
        OmegaConf.set_struct(config, False)
        builder = GroupSpec.from_node("tree", config.tree)
        # The command's own settings of the tree replace the recipe's, as far as this tree has them.
        own = {
            key: value
            for key, value in self.spec.tree.settings.items()
            if self.spec.tree.find_layer(key) == "command"
        }
        keys = {"_target_", *(key.name for key in list_keys(builder.path))}
        config.tree = {key: value for key, value in {**builder.node, **own}.items() if key in keys}
        config.run = str(self.folder / name)
        config.recipe_name = name
        spec = RunSpec.from_config(config, self.spec.overrides).with_default_tree()
        is_limited = self.comparison.data_limit is not None or "limit" in spec.data.settings
        if is_limited and spec.data.find_layer("limit") != "command":
            spec = spec.with_settings("data", limit=self.comparison.data_limit)
        return replace(spec, overrides=tuple(self.passed))

    def train_and_score(self, spec: RunSpec) -> ScoredRun:
        """Train one recipe for the budget and score it."""
        if not is_scored(spec):
            with log_to_file(Path(str(spec.run))):
                dataset = self.load_dataset(spec)
                resume = spec.resume or "auto"
                spec = spec.with_settings(
                    "trainer", **self.budget_settings(spec, dataset), resume=resume
                )
                train_and_score(spec, self.select_target(spec), dataset)
            free_memory()
        run = self.score_batch(spec)
        training = run.eval_setting["training"]
        print_progress(run, f"{training['tokens']:,} tokens in {training['seconds']:.0f} s")
        return run

    def score_untrained(self, spec: RunSpec) -> ScoredRun:
        """Score a drafter that needs no training."""
        if not is_scored(spec):
            with log_to_file(Path(str(spec.run))):
                evaluate(spec, Path(str(spec.run)), self.target)
        run = self.score_batch(spec)
        print_progress(run, "no training")
        return run

    def score_batch(self, spec: RunSpec) -> ScoredRun:
        """Score a run with several prompts at once and over the axes of compare.sweeps, if that is
        missing, and read the scores."""
        run = Path(str(spec.run))
        name = batched_name(self.comparison)
        quick = {"check": False, "oracle": False, "report": False}
        if (batch := self.comparison.batch) is not None:
            self.score_again(
                spec,
                name,
                {
                    "batch_size": batch,
                    "limit": NUM_BATCHES * batch,
                    "calibration_limit": 4,
                    **quick,
                },
            )
        for over in self.comparison.sweeps:
            self.score_again(spec, over, {"sweep": over, "baselines": [], **quick})
        return ScoredRun.read(run.name, run / "eval" / spec.evaluation_name, run / "eval" / name)

    def score_again(self, spec: RunSpec, name: str, settings: dict[str, Any]) -> None:
        """Score a scored run once more, with other settings of `eval` and under another name,
        unless that is done.
        """
        run = Path(str(spec.run))
        if (run / "eval" / name / "summary.json").exists():
            return
        first = read_json_object(run / "eval" / spec.evaluation_name / "summary.json")
        spec = spec.with_settings("eval", name=name, **settings)
        if "skipped" in first["setting"]["drafter"]:
            # Layers that the first score's search chose to skip.
            spec = spec.with_settings("drafter", skipped=first["setting"]["drafter"]["skipped"])
        with log_to_file(run):
            evaluate(spec, run, None if (run / "target").is_dir() else self.target)
        free_memory()

    def load_dataset(self, spec: RunSpec) -> Dataset:
        """Load the data of a configuration, tokenized once for all runs with the same settings."""
        key = json.dumps(spec.data.node, sort_keys=True)
        if key not in self.datasets:
            self.datasets[key] = spec.data.build().make_dataset(
                self.target.template, self.target.vision
            )
        return self.datasets[key]

    def select_target(self, spec: RunSpec) -> Target:
        """Return the shared target or, if the drafter's training changes the target, one of its
        own.
        """
        drafter: Drafter = spec.drafter.build(target=self.target)
        target: Target = (
            spec.target.build() if drafter.capabilities.target_training else self.target
        )
        return target

    def budget_settings(self, spec: RunSpec, dataset: Dataset) -> dict[str, Any]:
        """Return the budget in the trainer's settings: minutes by the clock, or the number of
        steps that use the tokens.
        """
        if self.comparison.tokens is None:
            return {"max_minutes": self.comparison.seconds / 60, "max_steps": None}
        trainer = Trainer.from_spec(spec)
        batch_tokens: float = trainer.batch_tokens
        if not dataset.is_sample:
            batch_tokens = dataset.num_tokens / dataset.num_batches(trainer.batch_settings)
        steps = round(self.comparison.tokens / (batch_tokens * trainer.accumulate))
        return {"max_minutes": None, "max_steps": max(1, steps)}


def drop_path(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in compare.json without the import path of `Comparison`, which moved."""
    compared = settings.get("compare")
    if isinstance(compared, dict):
        compared = {key: value for key, value in compared.items() if key != "_target_"}
    return {**settings, "compare": compared}


def is_scored(spec: RunSpec) -> bool:
    """Tell whether the run of a configuration holds its evaluation."""
    return (Path(str(spec.run)) / "eval" / spec.evaluation_name / "summary.json").exists()


def select_recipes(names: Any) -> list[str]:
    """Return the recipes to compare: the named ones, or every recipe that trains a drafter."""
    choices = sorted(GlobalHydra.instance().config_loader().get_group_options("recipe"))

    def trains_drafter(name: str) -> bool:
        drafter = load_chosen("drafter", f"recipe={name}")
        return not drafter.capabilities.is_acceptance_probe

    if names == "all":
        return [name for name in choices if trains_drafter(name)]
    selected = [str(name) for name in names] if isinstance(names, list) else str(names).split(",")
    for name in selected:
        if name not in choices and (missing := explain_missing("recipe", name)) is not None:
            raise UserError(missing)
        if name not in choices:
            raise UserError(
                f"recipes={name}: there is no such recipe; {suggest_nearest(name, choices)}"
            )
        if not trains_drafter(name):
            raise UserError(
                f"recipes={name}: what it trains drafts nothing, so its row would be that of "
                "copied text; train it alone and score any drafter with it, as in "
                f"acceptance={name} acceptance.path=RUN"
            )
    return list(dict.fromkeys(selected))


def override_key(override: str, depth: int = 1) -> str:
    """Return the first `depth` parts of the key that an override sets."""
    key = re.split(r"[=@]", override.lstrip("+~"), maxsplit=1)[0]
    return ".".join(key.split(".")[:depth])


@contextmanager
def log_to_file(run: Path) -> Iterator[None]:
    """Redirect stdout to the run's log.txt: the comparison itself prints one line per drafter."""
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "log.txt", "a", opener=open_in_place) as log, redirect_stdout(log):
        yield


def print_progress(run: ScoredRun, training: str) -> None:
    """Print one line about a scored run."""
    length = run.summary["acceptance_length"]["pooled"]
    systems = run.systems()
    best = max(
        (entry for entry in systems.values() if entry["speedup"]),
        key=lambda entry: float(entry["speedup"]["ratio"]),
    )
    text = f"{length:.2f} tokens per forward with {systems[DRAFTER]['label']}"
    print(
        f"{run.name}: {training}; {text}; speedup {best['speedup']['ratio']:.2f} with "
        f"{best['label']}",
        flush=True,
    )


def free_memory() -> None:
    """Release the memory of the previous drafter."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
