"""The hours of a run: from steps that run on this machine, from a given rate, or from an assumed one."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch
from spectrain.models.device import synchronize_device
from spectrain.models.target import Target
from spectrain.runs.drafters import init_drafter
from spectrain.training.trainer import Trainer

from .footprint import Models, count_parameters
from .workload import Operations, Workload, batch_shape, target_epochs

CALIBRATION_STEPS, WARM_UP_STEPS = 20, 4
"""Steps that run for a calibration, and those of them that pack weights and fill caches, and are not timed."""
MAX_CALIBRATED = 300e6
"""Parameters of the target up to which a calibration needs no request."""


@dataclass(frozen=True)
class Rate:
    """What the hours of a plan are computed from."""

    devices: int
    tokens_per_second: float | None
    # True runs steps, False does not, and None runs them if the target is small and on this machine.
    calibrate: bool | None
    flops_per_second: float
    assumption: str
    is_here: bool


def estimate_hours(spec: RunSpec, rate: Rate, models: Models, work: Workload, operations: Operations) -> dict[str, Any]:
    """Return the hours of the run, and what they are based on."""
    if rate.tokens_per_second is not None:
        seconds = work.total_padded / (rate.tokens_per_second * rate.devices)
        return {"value": seconds / 3600, "basis": f"plan.tokens_per_second={rate.tokens_per_second:g} of a device"}
    if should_calibrate(spec, rate, models, work):
        target, step = time_steps(spec)
        seconds = work.padded * (target * target_epochs(spec, models, work) + step * work.epochs) / rate.devices
        basis = f"measured over {CALIBRATION_STEPS} steps on this machine"
        speed = {"tokens_per_second": work.total_padded / seconds, "seconds_per_token": [target, step]}
        return {"value": seconds / 3600, "basis": basis, **speed}
    seconds = operations.run / (rate.flops_per_second * rate.devices)
    speed = {"tokens_per_second": work.total_padded / seconds if seconds else None}
    return {"value": seconds / 3600, "basis": f"assumed: {rate.assumption}, nothing was run", **speed}


def should_calibrate(spec: RunSpec, rate: Rate, models: Models, work: Workload) -> bool:
    """Return whether steps run on this machine: on request, or if the target is small and its weights are here."""
    can_run = rate.is_here and work.is_counted
    if rate.calibrate and not can_run:
        raise UserError("plan.calibrate=true: it runs steps on this machine; leave out plan.tokens and a plan.device not here")
    if not models.target.has_layers:
        if rate.calibrate:
            models.target.require_layers("plan.calibrate=true")
        return False
    if rate.calibrate is not None:
        return rate.calibrate
    model = spec.target.get("model")
    has_weights = model is None or any(Path(model).glob("*.safetensors"))
    return has_weights and can_run and count_parameters(models)["target"] <= MAX_CALIBRATED


def time_steps(spec: RunSpec) -> tuple[float, float]:
    """Run steps; return the seconds that a padded token takes in the target's features and in the rest of a step."""
    trainer = Trainer.from_spec(spec).make_trial(CALIBRATION_STEPS)
    target: Target = spec.target.build()
    dataset = spec.data.build().make_dataset(target.template, target.vision)
    drafter = init_drafter(spec, target, dataset)
    target.pack_weights()
    source = _TimedSource(spec.source.build(), target)
    ends: list[float] = []
    marks: list[tuple[float, float]] = []

    def on_step(step: int) -> None:
        synchronize_device(target.device)
        ends.append(time.perf_counter())
        marks.append((source.seconds, source.tokens))

    with tempfile.TemporaryDirectory() as folder:
        trainer.fit(drafter, target, dataset, source, Path(folder), on_step=on_step)
    seconds, tokens = (end - start for start, end in zip(marks[WARM_UP_STEPS - 1], marks[-1]))
    return seconds / tokens, (ends[-1] - ends[WARM_UP_STEPS - 1] - seconds) / tokens


class _TimedSource(Source):
    """A source that adds up its seconds and its tokens, padding included."""

    def __init__(self, source: Source, target: Target) -> None:
        self.source, self.device, self.uses_drafter = source, target.device, source.uses_drafter
        self.seconds = self.tokens = 0.0

    def make_batch(self, request: BatchRequest) -> Batch:
        start = time.perf_counter()
        batch = self.source.make_batch(request)
        synchronize_device(self.device)
        self.seconds += time.perf_counter() - start
        self.tokens += batch_shape(request.examples, request.packed).tokens
        return batch
