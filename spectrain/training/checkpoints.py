"""What a training run saves and restores: checkpoints, sums of metrics, random states, averaged
weights and the best weights.

Checkpoints are safetensors and JSON only, written to a scratch folder and renamed, so that a kill
loses nothing.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spectrain.drafters.base import Drafter
from spectrain.errors import UserError, describe_violation, first_line
from spectrain.files import atomic_write
from spectrain.models.checked_tensors import (
    CHECKSUM_KEY,
    DamagedFile,
    hash_settings,
    read_checksum,
    read_tensors,
    save_tensors,
)
from spectrain.models.target import Target
from spectrain.output.streams import print_warning

from .adapters import select_stage_groups
from .validation_history import HeldOutGain

TENSORS_KEY = "tensors"
"""Key of progress.json with the checksums of the files of tensors beside it."""
CHECKPOINT_NAME = re.compile("step-[0-9]{6,12}")
BEST_NAME = re.compile("best-[0-9]{6,12}")
UNFINISHED_NAME = re.compile(r"(step|best)-[0-9]{6,12}\.part")
DELETE_ADVICE = "delete the checkpoint to go on from the one before"
TYPE_FAULTS = (
    "holds fractions",
    "holds no real numbers",
    "holds no integers",
    "holds 8-bit floats without their scales",
)
"""What a stored tensor can be where other numbers are expected."""


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name.split("-")[1])


def latest_checkpoint(run: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    checkpoints = _list_checkpoints(run / "checkpoints")
    return checkpoints[-1] if checkpoints else None


def _list_checkpoints(folder: Path) -> list[Path]:
    """List complete checkpoints, oldest first."""
    return sorted(_list_folders(folder, CHECKPOINT_NAME), key=checkpoint_step)


def _list_folders(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """List the folders in a folder that have a name. Others, such as a copy that the user made, and
    links are not this run's.
    """
    return [
        path
        for path in folder.glob("*")
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]


def save_checkpoint(
    path: Path,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    progress: dict[str, Any],
    keep: int,
) -> None:
    """Write weights, optimiser state and `progress`, then drop all but the newest `keep`
    checkpoints.
    """
    with atomic_write(path, folder=True, remedy=resume_advice(path.parent.parent)) as scratch:
        parts = {"model.safetensors": weights, "optimizer.safetensors": optimizer}
        checksums = {file: save_tensors(part, scratch / file) for file, part in parts.items()}
        content = progress | {TENSORS_KEY: checksums}
        (scratch / "progress.json").write_text(
            json.dumps(content | {CHECKSUM_KEY: hash_settings(content)})
        )
    for old in _list_checkpoints(path.parent)[:-keep]:
        # renamed first: what is half deleted is no checkpoint
        shutil.rmtree(old.rename(old.with_name(old.name + ".part")))
    for rest in _list_folders(path.parent, UNFINISHED_NAME):
        shutil.rmtree(rest)  # of a save or a deletion that was killed


def resume_advice(run: Path) -> str:
    """Return the advice on how to continue a run that could not be saved."""
    return f"{'start anew' if latest_checkpoint(run) is None else 'go on'} with trainer.resume=auto"


class SavedProgress(BaseModel):
    """What progress.json of a checkpoint has to hold; a run adds more."""

    model_config = ConfigDict(extra="allow", strict=True)

    step: PositiveInt
    stage: NonNegativeInt
    stage_began: NonNegativeInt
    skipped: NonNegativeInt
    tokens: NonNegativeInt
    seconds: NonNegativeFloat
    num_steps: NonNegativeFloat
    batches_a_step: PositiveInt
    stream: dict[str, Any]
    optimizer: dict[str, float]
    spent: dict[str, Any]
    looks: dict[str, Any]
    tallies: list[dict[str, Any]]
    # Checkpoints of earlier versions have none.
    tensors: dict[str, str] = {}


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Read progress.json of a checkpoint; raise `DamagedFile` if it cannot be read.

    Where it can be read and is not what the training saved, somebody has changed it. What else was
    changed is not known, so that is a UserError, and no reason to go on silently from elsewhere.
    """
    path = checkpoint / "progress.json"
    try:
        progress: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        saved = SavedProgress.model_validate(progress)
    except ValidationError as error:
        raise UserError(
            f"{path}: it was changed: {describe_violation(error)}; {DELETE_ADVICE}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(
            f"{path}: it cannot be read ({first_line(error)}); {DELETE_ADVICE}"
        ) from error
    if saved.step != checkpoint_step(checkpoint) or not saved.tallies:
        raise UserError(
            f"{path}: it was changed: it is not of step {checkpoint_step(checkpoint)}; "
            f"{DELETE_ADVICE}"
        )
    # Checkpoints of earlier versions have no checksum.
    if progress.get(CHECKSUM_KEY, hash_settings(progress)) != hash_settings(progress):
        raise UserError(
            f"{path}: it was changed: it does not have the checksum that it was saved with; "
            f"{DELETE_ADVICE}"
        )
    return progress


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Load weights, optimizer state and progress of a checkpoint; raise a UserError if one is
    not what was saved.
    """
    progress = read_progress(path)
    parts = []
    for name in ("model.safetensors", "optimizer.safetensors"):
        parts.append(read_tensors(path / name, DELETE_ADVICE))
        saved = progress.get(TENSORS_KEY, {}).get(name)
        if saved is not None and read_checksum(path / name, DELETE_ADVICE) != saved:
            raise UserError(
                f"{path / name}: it was changed: it is not of this checkpoint; {DELETE_ADVICE}"
            )
    weights, optimizer = parts
    return weights, optimizer, progress


def set_aside_damaged(run: Path) -> None:
    """Rename the newest checkpoints of a run that are damaged, so that it goes on from the newest
    intact one; print each.

    Raise `DamagedFile` if there are checkpoints and none is intact. Only the process that holds the
    lock of the run may call this.
    """
    damages: list[DamagedFile] = []
    for checkpoint in reversed(_list_checkpoints(run / "checkpoints")):
        try:
            load_checkpoint(checkpoint)
            break
        except DamagedFile as error:
            damages.append(error)
    else:
        if damages:
            raise DamagedFile(
                f"{damages[0].args[0].partition('; ')[0]}, and no other checkpoint of {run} is "
                f"intact; delete {run / 'checkpoints'} and go on with trainer.resume=auto, which "
                "trains anew"
            )
        return
    for damage, damaged in zip(damages, reversed(_list_checkpoints(run / "checkpoints"))):
        aside = damaged.with_name(f"{damaged.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        damaged.rename(aside)
        problem = damage.args[0].partition("; ")[0]
        print_warning(f"{problem}; it is now {aside.name}, and the run goes on from {checkpoint}")


def collect_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Collect parameters and buffers by name, on the CPU; of tied ones, which share their
    memory, only the first.
    """
    return {
        name: tensor.detach().cpu().contiguous() for name, tensor in select_untied(module).items()
    }


def select_untied(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name where they lie; of tied ones, only the first. On the
    device "meta", where nothing has memory, those are tied that are one object."""
    tensors: dict[str, Tensor] = {}
    storages: set[tuple[int, torch.Size]] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        key = (id(tensor) if tensor.is_meta else tensor.data_ptr(), tensor.shape)
        if key not in storages or not tensor.numel():
            storages.add(key)
            tensors[name] = tensor
    return tensors


def load_tensors(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Undo `collect_tensors`; a missing, unknown or misshapen tensor is a RuntimeError with its
    name.
    """
    state = module.state_dict()
    loaded = {state[name].data_ptr() for name in weights if name in state}
    tied = {
        name: tensor
        for name, tensor in state.items()
        if name not in weights and tensor.data_ptr() in loaded
    }
    module.load_state_dict({**tied, **weights})


def judge_type(stored: torch.dtype, expected: torch.dtype) -> str | None:
    """Return which of TYPE_FAULTS the type of a stored tensor has in place of the expected type;
    None where its numbers fit.
    """
    fractions, no_reals, no_integers, no_scales = TYPE_FAULTS
    if stored.is_floating_point > expected.is_floating_point:
        return fractions
    if stored.is_floating_point < expected.is_floating_point:
        return no_reals
    if stored.is_floating_point and stored.itemsize == 1 < expected.itemsize:
        return no_scales
    holds_integers = not stored.is_complex and stored != torch.bool
    expects_integers = not expected.is_floating_point and expected != torch.bool
    return no_integers if expects_integers and not holds_integers else None


def find_mismatches(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield tensors that do not match between a drafter and its files: the first of each kind,
    and its fault.
    """
    expected = select_untied(module)
    state = module.state_dict()
    kinds = {
        "has another shape": [
            name for name in weights if name in state and weights[name].shape != state[name].shape
        ],
        **{
            fault: [
                name
                for name in weights
                if name in state and judge_type(weights[name].dtype, state[name].dtype) == fault
            ]
            for fault in TYPE_FAULTS
        },
        "is missing": [name for name in expected if name not in weights],
        "is unknown": [name for name in weights if name not in state],
    }
    for what, names in kinds.items():
        for name in names[:1]:
            shapes = [list(of[name].shape) for of in (weights, state) if name in of]
            differ = len(shapes) > 1 and shapes[0] != shapes[1]
            message = f"{name} {what}" + (
                f", {shapes[0]} in place of {shapes[1]}" if differ else ""
            )
            yield name, message + (f", and {len(names) - 1} more" if len(names) > 1 else "")


def gather_tensor(tensor: Any) -> Tensor:
    """Return a tensor on the CPU, gathered if it is sharded. Every process must call this."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().contiguous()


def flatten_optimizer(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Optimiser state as tensors and numbers, named by a parameter's place in the groups: unlike
    the names of `torch.distributed.checkpoint.state_dict`, which are those of one module, places
    reach into a target that is trained too."""
    tensors = {}
    numbers = {}
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = gather_tensor(value)
            else:
                numbers[f"{index}.{key}"] = value
    return tensors, numbers


def unflatten_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: dict[str, float]
) -> None:
    """Undo `flatten_optimizer` on an optimiser with the same parameters."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **numbers}.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


@dataclass(frozen=True)
class TrainingResult:
    """The totals of a training run, over all resumed parts, and the state of its drafter."""

    num_steps: int
    # Tokens of all processes, without padding.
    num_tokens: int
    # Seconds of steps, until the end of the last one.
    seconds: float
    # Parameters that were trained in any stage.
    num_parameters: int
    # The drafter of the main process holds all of its weights.
    is_reusable: bool
    # The step whose weights are the result.
    result_step: int
    # Length of the longest text in the data, in tokens.
    max_text_length: int
    # What the training added on held-out data; None where that was not measured.
    gain: HeldOutGain | None = None


@dataclass
class Tally:
    """The sums of a logging interval on one process."""

    loss: float = 0.0
    steps: int = 0
    tokens: int = 0
    supervised: int = 0
    seconds: float = 0.0
    times: dict[str, float] = field(default_factory=dict)  # seconds of steps by what they went to
    terms: dict[str, float] = field(default_factory=dict)  # each named loss
    hits: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)

    def add_tally(self, other: "Tally") -> None:
        """Add another tally."""
        for name in ("loss", "steps", "tokens", "supervised", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for own, added in ((self.terms, other.terms), (self.times, other.times)):
            own.update({name: own.get(name, 0.0) + value for name, value in added.items()})
        self.hits = [own + more for own, more in zip_longest(self.hits, other.hits, fillvalue=0.0)]
        self.counts = [
            own + more for own, more in zip_longest(self.counts, other.counts, fillvalue=0.0)
        ]

    def without_counts(self) -> "Tally":
        """Return the names and depths of this tally with sums of zero."""
        zeros = [0.0] * len(self.hits)
        return Tally(terms=dict.fromkeys(self.terms, 0.0), hits=zeros, counts=zeros)

    @classmethod
    def from_saved(cls, saved: list[dict[str, Any]], rank: int, count: int) -> "Tally":
        """Restore the tally of this process. With another number of processes, rank 0 takes all
        sums.
        """
        names = {entry.name for entry in fields(cls)}
        tallies = [
            cls(**{name: value for name, value in sums.items() if name in names}) for sums in saved
        ]
        if len(tallies) == count:
            return tallies[rank]
        total = cls()
        for tally in tallies:
            total.add_tally(tally)
        if rank:
            total = total.without_counts()
        total.steps = tallies[0].steps
        total.supervised = tallies[0].supervised
        total.seconds = tallies[0].seconds
        total.times = tallies[min(rank, len(tallies) - 1)].times
        return total

    def scale_sums(self, factor: float) -> "Tally":
        """Return the tally with its sums over batches multiplied, as where more processes than
        before see the same data.
        """
        if factor == 1:
            return self
        terms = {name: factor * term for name, term in self.terms.items()}
        hits, counts = ([factor * value for value in values] for values in (self.hits, self.counts))
        loss = factor * self.loss
        tokens = round(factor * self.tokens)
        return replace(self, loss=loss, tokens=tokens, terms=terms, hits=hits, counts=counts)


def get_random_state() -> dict[str, Tensor]:
    """Return the states of torch's random generators."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def set_random_state(saved: dict[str, Tensor], rank: int) -> None:
    """Undo `get_random_state`, from "rng.DEVICE.RANK"; a process that was not there before keeps
    what its seed gave it.
    """
    if f"rng.cpu.{rank}" in saved:
        torch.set_rng_state(saved[f"rng.cpu.{rank}"])
    if f"rng.cuda.{rank}" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved[f"rng.cuda.{rank}"])


def load_trained_weights(drafter: Drafter, target: Target, weights: dict[str, Tensor]) -> None:
    load_tensors(
        drafter,
        {k.removeprefix("drafter."): v for k, v in weights.items() if k.startswith("drafter.")},
    )
    trained = {k.removeprefix("target."): v for k, v in weights.items() if k.startswith("target.")}
    parameters = dict(target.named_parameters())
    with torch.no_grad():
        for name, value in trained.items():
            parameters[name].copy_(value)


def select_trained_groups(drafter: Drafter, target: Target, stage: int) -> list[dict[str, Any]]:
    """Return the parameter groups of a stage, each with its `lr_scale`; freeze all other
    parameters of drafter and target.
    """
    groups = [
        {"lr_scale": 1.0, **group} for group in select_stage_groups(drafter, drafter.stages[stage])
    ]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    for parameter in [*drafter.parameters(), *target.parameters()]:
        parameter.requires_grad_(id(parameter) in trained)
    return groups


def best_weights_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"best-{step:06d}"


def _save_weights(run: Path, folder: Path, weights: dict[str, Tensor]) -> None:
    """Save weights in a new folder of a run, which is there as a whole or not at all."""
    with atomic_write(folder, folder=True, remedy=resume_advice(run)) as scratch:
        save_tensors(weights, scratch / "model.safetensors")


def save_best(run: Path, step: int, weights: dict[str, Tensor]) -> None:
    """Save the weights of the best validation in the folder of the checkpoints."""
    _save_weights(run, best_weights_path(run, step), weights)


def load_best(run: Path, step: int) -> dict[str, Tensor]:
    """Load the weights of the best validation; raise `DamagedFile` if they are not what was
    saved.
    """
    remedy = "go on with trainer.keep_best=false in another run folder, or train anew"
    return read_tensors(best_weights_path(run, step) / "model.safetensors", remedy)


def delete_best_except(run: Path, steps: set[int]) -> None:
    """Delete the weights of all other validations: surpassed ones, and those of steps that a
    kill has undone.
    """
    paths = {best_weights_path(run, step) for step in steps}
    for path in _list_folders(run / "checkpoints", BEST_NAME):
        if path not in paths:
            shutil.rmtree(path)


def start_weights_path(run: Path) -> Path:
    """Return the path of the weights that a training with fitted initial weights began with."""
    return run / "start" / "model.safetensors"


def save_start(run: Path, drafter: Drafter) -> None:
    """Save the weights of a drafter before the first step, for a score to compare with."""
    delete_start(run)
    _save_weights(run, start_weights_path(run).parent, collect_tensors(drafter))


def load_start(run: Path, drafter: Drafter) -> None:
    """Load the weights that a training began with into its drafter; raise `DamagedFile` if they
    are not what was saved.
    """
    path = start_weights_path(run)
    remedy = f"delete {path.parent}, and the score leaves the start out"
    weights = read_tensors(path, remedy)
    for _, fault in find_mismatches(drafter, weights):
        raise DamagedFile(f"{path}: it is of another drafter: {fault}; {remedy}")
    load_tensors(drafter, weights)


def delete_start(run: Path) -> None:
    """Delete the weights that a training began with, if they were saved."""
    shutil.rmtree(start_weights_path(run).parent, ignore_errors=True)


class WeightAverages:
    """Exponential moving averages (Polyak) of every trained parameter, by name, in float32.

    After step n the newest weight counts 1 - min(decay, (1 + n) / (10 + n)), so that the start is
    soon forgotten.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def update_averages(self, parameters: dict[str, nn.Parameter], step: int) -> None:
        """Add the weights after a step. The average of a newly trained parameter starts at its
        value.
        """
        newest = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, parameter in parameters.items():
            if name in self.averages:
                self.averages[name].lerp_(parameter.float(), newest)
            elif parameter.requires_grad:
                self.averages[name] = parameter.detach().float().clone()

    def load(self, averages: dict[str, Tensor], device: torch.device) -> None:
        """Load the averages of a checkpoint."""
        self.averages = {name: value.to(device) for name, value in averages.items()}

    @torch.no_grad()
    def copy_to(self, parameters: dict[str, nn.Parameter]) -> None:
        """Copy the averages to the parameters."""
        for name, value in self.averages.items():
            parameters[name].copy_(value)

    @contextmanager
    def swap_weights(self, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
        """Replace the weights by their averages, and restore them bit by bit at the end."""
        own = {name: parameters[name].detach().clone() for name in self.averages}
        self.copy_to(parameters)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in own.items():
                    parameters[name].copy_(value)
