"""The hours of a run: from steps that run on this machine, from a given rate, or from an assumed
one.
"""

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.drafters.capabilities import FitSeconds
from spectrain.errors import UserError
from spectrain.export.targets import TargetFiles
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch
from spectrain.models.device import synchronize_device
from spectrain.models.target import Target
from spectrain.output.streams import wrap_words
from spectrain.runs.init_drafter import init_drafter
from spectrain_studies.machine.trial import make_trial, trial_folder

from .footprint import Models, count_parameters
from .settings import PlanSettings
from .workload import Operations, Workload, batch_shape, fitted_epochs, target_epochs

WARM_UP_STEPS = 4
"""Steps of a calibration that pack weights and fill caches, and are not timed."""
TIMED_STEPS = (4, 16)
"""The least and the largest number of steps that are timed after them."""
TIMED_SECONDS = 2.0
"""Seconds of timed steps after which the least number of them is enough."""
MAX_CALIBRATED = 300e6
"""Parameters of the target up to which a calibration needs no request."""


def estimate_hours(
    spec: RunSpec, options: PlanSettings, models: Models, work: Workload, operations: Operations
) -> dict[str, Any]:
    """Return the hours of the run, and what they are based on."""
    if options.tokens_per_second is not None:
        seconds = work.total_padded / (options.tokens_per_second * options.devices)
        return {
            "value": seconds / 3600,
            "basis": f"plan.tokens_per_second={options.tokens_per_second:g} of a device",
        }
    if should_calibrate(spec, options, models, work):
        times = time_steps(spec, work.dataset)
        epochs = target_epochs(spec, models, work)
        seconds = work.padded * (times.target * epochs + times.step * work.epochs) / options.devices
        if fitted := work.padded * fitted_epochs(spec, models, work):
            seconds += fitted * (times.target + times.fit.per_token) + times.fit.solving
        basis = f"measured over {times.count} steps on this machine"
        speed = {
            "tokens_per_second": work.total_padded / seconds,
            "seconds_per_token": [times.target, times.step],
        }
        return {"value": seconds / 3600, "basis": basis, **speed}
    seconds = operations.run / (options.flops_per_second * options.devices)
    speed = {
        "tokens_per_second": work.total_padded / seconds if seconds else None,
        # The default rate is that of a GPU.
        "is_of_other_device": options.torch_device.type == "cpu"
        and options.peak_tflops == PlanSettings.peak_tflops,
    }
    rate = f"{options.share:.0%} of {options.peak_tflops:g} TFLOP/s"
    return {
        "value": seconds / 3600,
        "basis": f"assumed: {rate}, nothing was run",
        **speed,
    }


def should_calibrate(spec: RunSpec, options: PlanSettings, models: Models, work: Workload) -> bool:
    """Return whether steps run on this machine: on request, or if the target is small and its
    weights are here.
    """
    can_run = options.is_here and work.is_counted
    if options.calibrate and not can_run:
        raise UserError(
            "plan.calibrate=true: it runs steps on this machine; leave out plan.tokens and a "
            "plan.device not here"
        )
    if not models.target.has_layers:
        if options.calibrate:
            models.target.require_layers("plan.calibrate=true")
        return False
    if options.calibrate is not None:
        return options.calibrate
    return (
        has_weights_here(spec) and can_run and count_parameters(models)["target"] <= MAX_CALIBRATED
    )


def has_weights_here(spec: RunSpec) -> bool:
    """Tell whether the target's weights can be loaded without a download, and without converting
    a GGUF file.
    """
    model = spec.target.settings.get("model")
    if model is None:
        return True
    converted = TargetFiles.from_settings(spec.target.node, with_weights=False).converted_directory
    return any((converted or Path(model).expanduser()).glob("*.safetensors"))


@dataclass(frozen=True)
class StepTimes:
    """The seconds that a training of this run takes on this machine."""

    # Of a padded token: in the target's features, and in the rest of a step.
    target: float
    step: float
    # Of a fit of initial weights, without the features that it reads.
    fit: FitSeconds
    # Number of steps that were timed.
    count: int


class _TimedEnough(Exception):
    """Ends a trial whose steps were timed for long enough."""


def time_steps(spec: RunSpec, dataset: Dataset) -> StepTimes:
    """Run a few steps of a training on this machine, and estimate its fit of initial weights,
    where the family has one.

    The fit itself is left out of the trial: it reads a large share of the data, and solves once.
    A `dataset` that was counted with another tokenizer, because the target has no chat template, is
    read again.
    """
    least, most = TIMED_STEPS
    trainer = make_trial(spec, WARM_UP_STEPS + most)
    line = (
        f"timing up to {most} steps on this machine for the hours; "
        "plan.calibrate=false leaves them out"
    )
    print(wrap_words(line, sys.stderr), file=sys.stderr, flush=True)
    target: Target = spec.target.build()
    if not target.template.exists:
        dataset = spec.data.build().make_dataset(target.template, target.vision)
    drafter = init_drafter(spec, target, dataset)
    target.pack_weights()
    drafter.to(target.device)
    fit = drafter.capabilities.initial_fit
    fit_seconds = FitSeconds(0.0, 0.0) if fit is None else fit.measure(drafter)
    drafter.capabilities = replace(drafter.capabilities, initial_fit=None)
    source = _TimedSource(spec.source.build(), target)
    ends: list[float] = []
    marks: list[tuple[float, float]] = []

    def on_step(step: int) -> None:
        synchronize_device(target.device)
        ends.append(time.perf_counter())
        marks.append((source.seconds, source.tokens))
        if step >= WARM_UP_STEPS + least and ends[-1] - ends[WARM_UP_STEPS - 1] >= TIMED_SECONDS:
            raise _TimedEnough

    with trial_folder("plan") as folder, suppress(_TimedEnough):
        trainer.fit(drafter, target, dataset, source, folder, on_step=on_step)
    seconds, tokens = (end - start for start, end in zip(marks[WARM_UP_STEPS - 1], marks[-1]))
    return StepTimes(
        seconds / tokens,
        (ends[-1] - ends[WARM_UP_STEPS - 1] - seconds) / tokens,
        fit_seconds,
        len(ends) - WARM_UP_STEPS,
    )


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
