"""How long a run takes: by steps that really run here, by a rate that is given, or by one that is assumed."""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch
from spectrain.models.device import synchronize_device
from spectrain.models.target import Target
from spectrain.runs.init_drafter import init_drafter
from spectrain.training.trainer import Trainer

from .dry_run import DryRun, slots
from .workload import Workload, target_epochs

if TYPE_CHECKING:
    from .plan import Plan

CALIBRATION = 20  # steps
WARM = 4  # of these, which pack weights and fill caches, and do not count
SMALL = 300e6  # parameters up to which a target is small enough to calibrate on without a request


def hours(spec: RunSpec, options: "Plan", sizes: DryRun, work: Workload, flops: float) -> dict[str, Any]:
    """Hours of the run, and where they come from."""
    total = work.padded_in_all
    if options.tokens_per_second is not None:
        rate = options.tokens_per_second * options.devices
        return {"value": total / rate / 3600, "basis": f"plan.tokens_per_second={options.tokens_per_second:g} of a device"}
    if should_calibrate(spec, options, sizes):
        target, step = calibrate(spec)
        seconds = work.padded * (target * target_epochs(spec, sizes, work) + step * work.epochs) / options.devices
        basis = f"measured over {CALIBRATION} steps on this machine"
        return {
            "value": seconds / 3600,
            "basis": basis,
            "tokens_per_second": total / seconds,
            "seconds_per_token": [target, step],
        }
    rate = options.share * options.peak_tflops * 1e12 * options.devices
    basis = f"assumed: {options.share:.0%} of {options.peak_tflops:g} TFLOP/s, nothing was run"
    return {"value": flops / rate / 3600, "basis": basis, "tokens_per_second": total * rate / flops if flops else None}


def should_calibrate(spec: RunSpec, options: "Plan", sizes: DryRun) -> bool:
    """Whether steps may run here: options for, or small and at hand."""
    if options.calibrate is not None:
        if options.calibrate and (not options.is_here or not work_is_real(options)):
            raise UserError(
                "plan.calibrate=true: it runs steps on this machine; leave out plan.tokens and a plan.device not here"
            )
        return options.calibrate
    model = spec.target.get("model")
    local = model is None or any(Path(model).glob("*.safetensors"))
    return local and options.is_here and work_is_real(options) and sizes.target <= SMALL


def work_is_real(options: "Plan") -> bool:
    return options.tokens is None


def calibrate(spec: RunSpec) -> tuple[float, float]:
    """Seconds that a padded token takes in the target's features and in the rest of a step, from steps that really run."""
    trainer = Trainer.from_spec(spec).make_trial(CALIBRATION)
    target: Target = spec.target.build()
    dataset = spec.data.build().make_dataset(target.template, target.vision)
    drafter = init_drafter(spec, target, dataset)
    target.pack_weights()
    source = _Timed(spec.source.build(), target)
    ends: list[float] = []
    marks: list[tuple[float, float]] = []

    def on_step(step: int) -> None:
        synchronize_device(target.device)
        ends.append(time.perf_counter())
        marks.append((source.seconds, source.tokens))

    with tempfile.TemporaryDirectory() as folder:
        trainer.fit(drafter, target, dataset, source, Path(folder), on_step=on_step)
    seconds, tokens = marks[-1][0] - marks[WARM - 1][0], marks[-1][1] - marks[WARM - 1][1]
    return seconds / tokens, (ends[-1] - ends[WARM - 1] - seconds) / tokens


class _Timed(Source):
    """A source, and how long it took over how many tokens."""

    def __init__(self, source: Source, target: Target) -> None:
        self.source, self.device, self.uses_drafter = source, target.device, source.uses_drafter
        self.seconds = self.tokens = 0.0

    def make_batch(self, request: BatchRequest) -> Batch:
        began = time.perf_counter()
        batch = self.source.make_batch(request)
        synchronize_device(self.device)
        self.seconds += time.perf_counter() - began
        self.tokens += slots(request.examples, request.packed)
        return batch
