"""Run folders, and the two things that are done in them: train a drafter, score a drafter."""

import json
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.settings.build import build, constructor
from spectrain.settings.choices import choice, named
from spectrain.settings.saved import read_json, read_object, read_yaml, saved_groups
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.export.converter import read_drafter
from spectrain.export.layout import PICKLED, Portable
from spectrain.export.targets import TargetFiles
from spectrain.files import AGAIN, write_text, written
from spectrain.provenance import processor, provenance, versions
from spectrain.trees import TreeBuilder
from spectrain.features.base import Source
from spectrain.models.target import Target
from spectrain.training.checkpoints import latest_checkpoint, load_tensors, step_of, tensors_of
from spectrain.training.job import Trained
from spectrain.training.metrics import Tracker, last_step
from .tracking import tracked

RESUME = "go on with trainer.resume=auto"


def train(config: DictConfig, asked: list[str], target: Target | None = None, dataset: Dataset | None = None) -> Path:
    """Train the drafter that `config` names and, unless eval=none, score it. Nothing is written before all input is read.

    `asked` are the settings that the command gave itself, as opposed to those of a recipe. `target` and `dataset` are what
    `config` says, where they are loaded already.
    """
    take_shape(config, asked)
    trainer = build(config.trainer)
    accelerator = trainer.accelerator()
    run = choose_folder(config, accelerator)
    finished = (run / "drafter" / "config.json").exists()
    if finished and not (config.get("eval") and "_target_" in config.eval):
        print(f"{run} is finished: its drafter is in {run / 'drafter'}")
        return run
    if finished and (run / "eval" / evaluation_name(config) / "summary.json").exists():
        print(f"{run} is finished and scored: see {run / 'eval'}")
        return run
    tracker: Tracker | None = build(config.get("tracker")) if accelerator.is_main_process else None
    settings: Any = OmegaConf.to_container(config)
    if finished:
        with tracked(tracker, run, settings, step=last_step(run / "metrics.jsonl")) as tracker:
            evaluate(config, run, tracker=tracker)
        return run
    data = build(config.data)
    if dataset is None:
        data.conversations()
    evaluation = build(config.get("eval"))
    target = target or build(config.target)
    assert target is not None
    if evaluation is not None:
        evaluation.check_prompts(target)
    dataset = dataset or data.dataset(target.tokenizer)
    trainer.num_steps(dataset)  # a stream must be told
    drafter = fresh_drafter(config, target, dataset)
    source: Source = build(config.source)
    examples = None if dataset.is_sample else dataset.examples
    told = source.prepare(target, drafter.stages[0].layers, drafter.stages[0].final_reach, examples)
    if accelerator.is_main_process:
        open_run(run, config, dataset, target)
        print(
            f"{run}: {dataset.summary()}"
            + (f", {data.num_left_out} unusable conversations left out" if data.num_left_out else ""),
            flush=True,
        )
        if told is not None:
            print(told, flush=True)
    accelerator.wait_for_everyone()
    target.pack()
    checkpoint = latest_checkpoint(run)
    with tracked(tracker, run, settings, step=0 if checkpoint is None else step_of(checkpoint)) as tracker:
        try:
            trained = trainer.fit(drafter, target, dataset, source, run, tracker)
        finally:
            source.flush()
        if accelerator.is_main_process:
            if drafter.abilities.target_training:
                with written(run / "target", folder=True, mend=RESUME) as scratch:
                    target.save(scratch)
                target.name = f"{target.name}, trained"
            save_drafter(run / "drafter", drafter, config, trained, RESUME)
            tracker.drafter(run / "drafter")
        if evaluation is None:
            return run
        if target.sharding != "none":
            accelerator.wait_for_everyone()  # for the drafter, which each of them loads
        if trained.in_place and target.sharding == "none" and accelerator.is_main_process:
            score(config, run, target, drafter, evaluation, build(config.tree), build(config.acceptance), dataset, tracker)
        elif not trained.in_place or target.sharding != "none":  # what was sharded is loaded anew
            evaluate(config, run, None if drafter.abilities.target_training else target, tracker)
    return run


def evaluate(config: DictConfig, run: Path, target: Target | None = None, tracker: Tracker | None = None) -> dict[str, Any]:
    """Score the drafter of a run folder or of a drafter directory; without a run's own `tracker`, as a tracked run of its own.

    Of several processes the main one does it alone; where the target is spread over them, all do the same and it writes.
    """
    state = PartialState(cpu=not torch.cuda.is_available())
    sharded = config.target.get("sharding", "none") != "none"
    if not state.is_main_process and not sharded:
        return {}  # it waits for nobody: scoring may take longer than processes wait for each other
    evaluation = build(config.eval)
    own = build(config.get("tracker")) if tracker is None and state.is_main_process else None
    target = target or load_target(config, run)
    if sharded and (evaluation.guard or config.tree["_target_"].endswith((".Auto", ".Cast"))):
        raise UserError(
            f"target.sharding={target.sharding}: processes must draft the same trees, so no tree or guard can go by the clock; "
            "use tree=eagle2 and no eval.guard"
        )
    evaluation.check_prompts(target)
    dataset = None
    if "untrained" in evaluation.baselines and config.get("data") and "_target_" in config.data:
        dataset = build(config.data).dataset(target.tokenizer)
    drafter = load_drafter(config, run, target)
    rule, builder = build(config.acceptance), build(config.tree)
    if state.is_main_process:
        settings: Any = OmegaConf.to_container(config)
        with nullcontext(tracker) if tracker is not None else tracked(own, run, settings, "eval") as tracker:
            return score(config, run, target, drafter, evaluation, builder, rule, dataset, tracker)
    with TemporaryDirectory() as scratch, redirect_stdout(StringIO()):
        return score(config, run, target, drafter, evaluation, builder, rule, dataset, Tracker(), Path(scratch))


def load_target(config: DictConfig, run: Path) -> Target:
    """The target of a run folder or of a drafter directory: the one trained with the drafter, else what `config` names."""
    saved_target = trained_target(run)
    if saved_target is None:
        return build(config.target)
    kept = {key: value for key, value in config.target.items() if key in ("dtype", "device", "trust_remote_code")}
    target: Target = build({**kept, "_target_": "spectrain.models.loading.load_hf", "model": str(saved_target)})
    facts = saved_target.parent / "provenance.json"
    known = read_object(facts).get("target_name") if facts.exists() else None
    target.name = f"{known or target_name(config)}, trained"
    return target


def load_drafter(config: DictConfig, run: Path, target: Target) -> Drafter:
    """The drafter that `config` describes, with the weights of a run folder or of a drafter directory where it is one."""
    drafter: Drafter = build(config.drafter, target=target)
    directory = drafter_directory(run)
    if directory is not None:
        load_weights(drafter, directory, target)
        if drafter.abilities.target_training and trained_target(run) is None:
            raise UserError(
                f"run={run}: the drafter belongs to the target that was trained with it; keep its folder target beside it"
            )
    return drafter


def score(
    config: DictConfig,
    run: Path,
    target: Target,
    drafter: Drafter,
    evaluation: Any,
    builder: TreeBuilder,
    rule: AcceptanceRule,
    dataset: Dataset | None,
    tracker: Tracker,
    place: Path | None = None,
) -> dict[str, Any]:
    """Run an evaluation and write its results below the run folder, or `place`."""
    trained = trained_target(run)
    setting = {
        "target": target.name,
        "target_path": str(trained.resolve()) if drafter.abilities.target_training and trained is not None else target.path,
        "recipe": recipe_name(config),
        **{group: named(plain(config))[group] for group in ("drafter", "acceptance")},
        "trained": drafter_directory(run) is not None,
        "training": training_of(run),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else processor(),
        **provenance(),
    }
    trainable = dataset is not None and drafter.has_weights and not drafter.abilities.target_training
    began: Any = OmegaConf.create(run_settings(run)) if (run / "config.yaml").exists() else config
    trainable = trainable and (began is not config or not drafter.settings())  # the description no longer says how it began
    untrained = (lambda: fresh_drafter(began, target, dataset)) if dataset is not None and trainable else None
    original = (lambda: build(config.target)) if drafter.abilities.target_training and trained is not None else None
    folder = (place or run) / "eval" / evaluation.name
    keep_earlier(folder)

    def save_online(learnt: Drafter) -> None:
        save_drafter(folder / "drafter", learnt, config)

    summary: dict[str, Any] = evaluation.score(
        target, drafter, builder, rule, folder, setting, untrained, original, save_online
    )
    print(f"written to {folder}")
    tracker.scored(summary, folder)
    return summary


def training_of(run: Path) -> dict[str, Any] | None:
    """What the training of a run's drafter took: steps, tokens, seconds, parameters that learnt."""
    directory = drafter_directory(run)
    if directory is None or not is_ours(directory):
        return None
    found: dict[str, Any] | None = read_object(directory / "config.json").get("training")
    return found


def trained_target(run: Path) -> Path | None:
    """The target that was trained with a drafter: in its run folder, or beside its directory."""
    return next((place for place in (run / "target", run.parent / "target") if place.is_dir()), None)


def keep_earlier(folder: Path) -> None:
    """Move an earlier score of the same name aside, to NAME.1, NAME.2 and so on: the newest has the plain name."""
    if not (folder / "summary.json").exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)


def fresh_drafter(config: DictConfig, target: Target, dataset: Dataset) -> Drafter:
    """A drafter as training starts from it: prepared on the data, or with drafter.init the weights of another one."""
    torch.manual_seed(config.trainer.get("seed", 0))
    drafter: Drafter = build(config.drafter, target=target)
    if config.drafter.get("init") and not drafter.has_weights:
        raise UserError(
            f"drafter.init={config.drafter.init}: this family has no weights beside the target's; go on from a trained target, "
            "as in target=hf target.model=RUN/target"
        )
    if target.sharding != "none" and (drafter.abilities.target_training or (drafter.adapts_layers and target.sharding == "tensor")):
        raise UserError(
            f"target.sharding={target.sharding}: this family changes what the target's layers compute, so each process needs "
            "them whole; leave it out, or use trainer.sharding=zero3 where the target trains"
        )
    drafter.prepare(target, dataset.token_counts(target.head.vocab_size))
    if config.drafter.get("init"):
        load_weights(drafter, initial_directory(config), target)
    return drafter


def initial_directory(config: DictConfig) -> Path:
    """The drafter directory that drafter.init names."""
    directory = drafter_directory(Path(config.drafter.init))
    if directory is None:
        raise UserError(
            f"drafter.init={config.drafter.init}: there is no drafter in it; give a run folder or a drafter directory"
        )
    return directory


def take_shape(config: DictConfig, asked: list[str]) -> None:
    """With drafter.init, settings that its weights fix come from there; `asked` are the command's own settings."""
    if not config.drafter.get("init"):
        return
    directory = initial_directory(config)
    saved = saved_description(directory, config.target)["drafter"]
    if saved["_target_"] != config.drafter["_target_"]:
        family = choice("drafter", saved)
        raise UserError(f"drafter.init={directory}: it holds drafter={family}; choose the recipe of that family")
    for key in constructor(saved).shape:
        given = any(override.lstrip("+").startswith(f"drafter.{key}=") for override in asked)
        if given and config.drafter.get(key) != saved.get(key):
            raise UserError(
                f"drafter.{key}={config.drafter.get(key)}: the drafter in {directory} has {saved.get(key)}; leave it out"
            )
        if key in saved:
            config.drafter[key] = saved[key]
        else:
            config.drafter.pop(key, None)


def choose_folder(config: DictConfig, accelerator: Any) -> Path:
    """The run folder, the same on every process. A folder that holds a run is taken only with trainer.resume=auto."""
    resume = config.trainer.get("resume") == "auto"
    if config.run is None and resume:
        raise UserError("trainer.resume=auto: say which run to go on with, as in run=runs/NAME")
    if config.run is not None:
        run = Path(config.run)
        taken = [(run / "config.yaml").exists()]
        if accelerator.num_processes > 1:
            broadcast_object_list(taken)  # the first process may write it before another looks
        if not resume and taken[0]:
            raise UserError(f"run={run}: the folder holds a run already; choose another, or go on with trainer.resume=auto")
        if run.exists() and not run.is_dir():
            raise UserError(f"run={run}: this is a file; choose a folder")
        return run
    base = Path("runs") / f"{recipe_name(config)}-{target_name(config)}"
    chosen = [base]
    number = 1
    while chosen[0].exists():
        number += 1
        chosen = [base.with_name(f"{base.name}-{number}")]
    return broadcast_object_list(chosen)[0] if accelerator.num_processes > 1 else chosen[0]


def open_run(run: Path, config: DictConfig, dataset: Dataset, target: Target) -> None:
    """Create the folder with its configuration and provenance; a resumed run keeps its own."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        if (run / "config.yaml").exists():
            resumable(run, config)
            return
        facts = {
            "data": dataset.facts(),
            "target": target.path,
            "target_name": target.name,
            **provenance(),
        }
        write_text(run / "provenance.json", json.dumps(facts, indent=2) + "\n")
        write_text(run / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(named(plain(config)))))
    except OSError as error:
        raise UserError(f"run={run}: the folder cannot be written ({error.strerror}); choose another") from error


FREE = {
    "trainer": ("resume", "save_every", "log_every", "keep_checkpoints", "patience", "max_skipped", "gradient_checkpointing",
                "sharding", "accumulate"),
    "target": ("device", "sharding", "trust_remote_code"),
}  # fmt: skip
"""Settings that a resumed run may change, for they change nothing that is learnt; a step goes on taking as many batches."""


def resumable(run: Path, config: DictConfig) -> None:
    """Refuse to go on with other settings than a run began with."""
    before, now = named(run_settings(run)), named(plain(config))
    if latest_checkpoint(run) is None:
        return
    for group in ("target", "drafter", "data", "trainer"):
        free = FREE.get(group, ())
        old = {k: v for k, v in (before.get(group) or {}).items() if k not in free}
        new = {k: v for k, v in (now.get(group) or {}).items() if k not in free}
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                name = group if key == "choice" else f"{group}.{key}"
                raise UserError(
                    f"{name}={new.get(key)}: the run in {run} began with {old.get(key)}; use that, or another run folder"
                )


def save_drafter(
    directory: Path, drafter: Drafter, config: DictConfig, trained: Trained | None = None, mend: str = AGAIN
) -> None:
    """Write config.json and model.safetensors: all that is needed to load the drafter again, and what its training took."""
    kept = named(plain(config))
    description = {key: kept.get(key) for key in ("drafter", "target", "tree", "acceptance")}
    description["drafter"] = {**description["drafter"], **drafter.settings()}
    description |= {"recipe": recipe_name(config), "spectrain_version": versions().get("spectrain")}
    if trained is not None:
        description["training"] = {"steps": trained.steps, "tokens": trained.tokens, "seconds": round(trained.seconds, 2),
                                   "parameters": trained.parameters}  # fmt: skip
    files: dict[str, dict[str, torch.Tensor]] = {"model.safetensors": {}}
    layout = drafter.layout()
    for name, tensor in tensors_of(drafter).items():
        file, there = layout.get(name, ("model.safetensors", name))
        files.setdefault(file, {})[there] = tensor
    with written(directory, folder=True, mend=mend) as scratch:
        for file, tensors in files.items():
            save_file(tensors, scratch / file, metadata={"format": "pt"})
        for file, text in drafter.sidecars().items():
            (scratch / file).write_text(text)
        (scratch / "config.json").write_text(json.dumps(description, indent=2) + "\n")


def load_weights(drafter: Drafter, directory: Path, target: Target | None = None) -> None:
    """Load what `save_drafter` or another project wrote; a missing, unknown or misshapen tensor stops with its name."""
    names = {place: name for name, place in drafter.layout().items()}
    path = directory / "model.safetensors"
    weights: dict[str, torch.Tensor] = {}
    home = {name: file for name, (file, _) in drafter.layout().items()}
    try:
        if is_ours(directory):
            for file in dict.fromkeys(["model.safetensors", *(file for file, _ in names)]):
                path = directory / file
                found = {names.get((file, there), there): tensor for there, tensor in load_file(path).items()}
                weights, home = weights | found, home | dict.fromkeys(found, file)
        else:
            there = {name: ours for (_, name), ours in names.items()}
            foreign = read_drafter(directory, None if target is None else TargetFiles(target.path)).tensors
            weights = {there.get(name, name): tensor for name, tensor in foreign.items()}
        load_tensors(drafter, weights)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: the drafter's weights cannot be read ({error})") from error
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        named = [file for name, file in home.items() if f'"{name}"' in detail or f" {name}:" in detail]
        path = directory / (named[0] if named else "model.safetensors")
        raise UserError(f"{path}: it does not fit the drafter in config.json ({detail})") from error


def is_ours(directory: Path) -> bool:
    """Whether `save_drafter` wrote a directory; otherwise it is another project's, or an export."""
    if not (directory / "config.json").exists():  # peft has no such file
        return False
    config = read_json(directory / "config.json")
    return not isinstance(config, dict) or "drafter" in config


def saved_description(directory: Path, target: Any) -> dict[str, Any]:
    """What config.json says of a drafter and its surroundings; another project's is translated, with the `target` asked for."""
    settings: Any = plain(target) if target else None
    if is_ours(directory):
        path = directory / "config.json"
        found = saved_groups(read_json(path), path)
        for group in ("drafter", "target", "tree", "acceptance"):
            node, optional = found.get(group), group != "drafter"
            if not (isinstance(node, dict) and "_target_" in node) and not (optional and node is None):
                raise UserError(f"{path}: this is not a drafter's description: it names no {group}; copy the file again")
        return found
    foreign: Portable = read_drafter(directory, TargetFiles.of(settings) if settings else None)
    if settings is None and foreign.target is not None:
        settings = TargetFiles(foreign.target).settings
        foreign = read_drafter(directory, TargetFiles(foreign.target))
    if settings is None:
        raise UserError(f"target: the files in {directory} do not say which target they are for; say it, as in target=tiny")
    return {"drafter": foreign.drafter, "target": settings, **foreign.description}


def drafter_directory(run: Path) -> Path | None:
    """The drafter of a run folder, or the folder itself where it is a drafter directory, ours or another project's."""
    for directory in (run / "drafter", run):
        if not any((directory / name).exists() for name in ("config.json", "adapter_config.json")):
            continue
        if any(path.suffix in (".safetensors", *PICKLED) for path in directory.iterdir()):
            return directory
    return None


def run_settings(run: Path) -> dict[str, Any]:
    """What config.yaml of a run folder holds, the groups as nodes to construct."""
    path = run / "config.yaml"
    return saved_groups(read_yaml(path), path)


def plain(config: Any) -> Any:
    """Settings as plain containers."""
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def recipe_name(config: DictConfig) -> str:
    """The recipe that the command named, else the drafter's choice."""
    return str(config.get("recipe_name") or choice("drafter", config.drafter))


def target_name(config: DictConfig) -> str:
    name = choice("target", config.target)
    return Path(str(config.target.get("model", name))).name if name == "hf" else name


def evaluation_name(config: DictConfig) -> str:
    return str(config.eval.get("name", "heldout"))
