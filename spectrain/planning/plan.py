"""`spectrain plan`: what a training run needs, before anything is loaded, and what to change where that is too much.

Memory and FLOPs come from a dry run of the trainer's own steps without data; disk from the sizes of what is saved; hours
from steps that really ran here, or from a rate that is assumed and printed as such.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.data.readers import Hub, Jsonl
from spectrain.data.stream import Stream
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch
from spectrain.features.store import STORED, bytes_of
from spectrain.models.device import wait
from spectrain.models.loading import load_tokenizer, untrained_network
from spectrain.models.target import Target
from spectrain.provenance import provenance
from spectrain.runs.fresh import fresh_drafter
from spectrain.settings.build import build, settings_of
from spectrain.training.trainer import Trainer

from .dry_run import STEP, TARGET, DryRun, dry_run, slots
from .memory_tracker import MemoryTracker

SPREAD = {"drafter": "trainer.sharding=fsdp2", "drafter and target": "trainer.sharding=fsdp2 target.sharding=fsdp2"}
RESERVE = 0.08  # of a device, for what is no tensor: its context, workspaces, holes between blocks
CALIBRATION = 20  # steps
WARM = 4  # of these, which pack weights and fill caches, and do not count
QUICK_BYTES = 256e6  # of a file whose tokens are counted rather than asked for
WIDTH = 120  # of the table, however narrow the terminal says it is
SMALL = 300e6  # parameters up to which a target is small enough to calibrate on without being asked


@dataclass
class Plan:
    """Plan for `devices` of `device_gb` (10^9 bytes) each. `device` auto is what this machine has.

    `tokens` is the data's size where it is not read: then batches are full, and every token is supervised. Hours come from
    `tokens_per_second` of one device, from 20 steps run here (`calibrate`; by default where target and device are here and
    small), or from `share` of `peak_tflops`, an assumption: by default 40 % of an H100's for bfloat16.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices: int = 1
    device_gb: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    calibrate: bool | None = None
    peak_tflops: float = 989.0
    share: float = 0.4
    json: bool = False
    out: str | None = None

    def __post_init__(self) -> None:
        for key in ("devices", "device_gb", "tokens", "tokens_per_second", "peak_tflops", "share"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise UserError(f"plan.{key}={value}: use a number above 0")

    @property
    def planned(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def is_here(self) -> bool:
        return self.planned.type == "cpu" or torch.cuda.is_available()

    def limit(self) -> float | None:
        """Bytes of a device; of this machine's where nothing is said; None where the device is elsewhere."""
        if self.device_gb is not None:
            return self.device_gb * 1e9
        if not self.is_here:
            return None
        if self.planned.type == "cuda":
            return float(torch.cuda.get_device_properties(0).total_memory)
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def run(self, config: DictConfig) -> dict[str, Any]:
        """Plan, print a table or JSON, and give what was printed."""
        found = plan(config, self)
        text = json.dumps(found, indent=2) + "\n"
        if self.out is not None:
            Path(self.out).parent.mkdir(parents=True, exist_ok=True)
            Path(self.out).write_text(text)
        if self.json:
            print(text, end="")
        else:
            show(found)
        return found


@dataclass
class Work:
    """What a run goes over."""

    dataset: Dataset
    batches: list[list[Example]]  # of an epoch
    num_steps: int
    epochs: float
    padded: float  # tokens of an epoch, padding included
    tokens: float  # without it
    counted: bool  # or said by plan.tokens
    batch_tokens: int  # of the largest batch, padding included

    @property
    def padded_in_all(self) -> float:
        return self.padded * self.epochs


def plan(config: DictConfig, asked: Plan) -> dict[str, Any]:
    """Everything that is known of a run before it starts, as plain numbers."""
    work = survey(config, asked)
    seen = dry_run(config, asked.planned, work.dataset, work.batches, work.num_steps)
    kept = kept_features(config, seen, work)
    if asked.planned.type == "cpu" and kept:
        seen.memory["features kept for later epochs"] = int(kept)
    flops = total_flops(config, seen, work)
    limit = asked.limit()
    sharded = sharded_memory(seen, asked)
    found: dict[str, Any] = {
        "parameters": {"trained": seen.trained, "drafter": seen.drafter, "target": seen.target},
        "tokens": {
            "epoch": work.tokens, "padded": work.padded, "epochs": work.epochs, "counted": work.counted,
            "steps": work.num_steps, "batch_tokens": work.batch_tokens,
        },
        "memory": {
            "device": str(asked.planned.type), "devices": asked.devices, "peak_bytes": seen.peak, "parts": seen.memory,
            "sharded": sharded, "limit_bytes": limit, "assumed_sizes": seen.assumed,
        },
        "disk": disk(seen, work),
        "flops": {"target_per_token": seen.flops.get(TARGET, 0.0), "step_per_token": seen.flops.get(STEP, 0.0), "run": flops},
        "hours": hours(config, asked, seen, work, flops), "notes": notes(config, asked, seen),
    }  # fmt: skip
    if limit is not None:
        room = limit * (1 - RESERVE)
        found["fits"] = seen.peak <= room
        found["changes"] = [] if found["fits"] else changes(config, asked, seen, sharded)
    return {**found, "setting": OmegaConf.to_container(config), "provenance": provenance()}


def notes(config: DictConfig, asked: Plan, seen: DryRun) -> list[str]:
    """What the numbers leave out or take for granted."""
    found = []
    if seen.assumed:
        found.append(f"{seen.assumed} sizes hang on what the target says; the most was assumed")
    if build(config.source).writes_text:
        found.append("sequences that are written while training are not counted, in memory, arithmetic or assumed hours")
    if asked.planned.type == "cuda":
        found.append(
            "attention is taken to run in fused kernels, masked too, as on an H100; elsewhere it may store every score"
        )
    return found


def survey(config: DictConfig, asked: Plan) -> Work:
    """The batches of a run: the data's own where it is quick to read, else full ones."""
    trainer: Trainer = build(config.trainer)
    data = build(config.data)
    if asked.tokens is None:
        large = isinstance(data, Jsonl) and data.path.is_file() and data.path.stat().st_size > QUICK_BYTES
        if isinstance(data, (Hub, Stream)) or large:
            raise UserError("plan.tokens: this data is not read for a plan; say how many tokens it has, as in plan.tokens=4e8")
        dataset = data.dataset(tokenizer(config))
    else:
        length = min(data.max_length, trainer.batch_tokens)
        count = max(1, trainer.batch_tokens // length)
        example = Example([1] * length, [False] + [True] * (length - 1))
        dataset = Dataset([example] * count, count, 0, 0)
    batches = [dataset[indices] for indices in dataset.epoch(0, trainer.batching)]
    sizes = [slots(batch, trainer.packing) for batch in batches]
    once, largest = float(sum(sizes)), max(sizes)
    tokens = float(dataset.num_tokens if asked.tokens is None else asked.tokens)
    all_padded = once if asked.tokens is None else tokens
    per_step = trainer.accumulate * asked.devices * once / len(batches)
    num_steps = trainer.max_steps or max(1, math.ceil(trainer.epochs * all_padded / per_step))
    return Work(
        dataset, batches, num_steps, num_steps * per_step / all_padded, all_padded, tokens, asked.tokens is None, largest
    )


def tokenizer(config: DictConfig) -> Any:
    """The target's, without its weights."""
    if config.target["_target_"].endswith("load_hf"):
        return load_tokenizer(config.target.model, bool(config.target.get("trust_remote_code", False)), required=True)
    with MemoryTracker(torch.device("cpu")):
        target: Target = build(config.target, network=untrained_network, device="cpu")
    return target.tokenizer


def kept_features(config: DictConfig, seen: DryRun, work: Work) -> float:
    """Bytes of features that the live source keeps in the host's memory."""
    keep = build(config.source).keep_bytes
    whole = work.tokens * len(seen.features) * seen.width * seen.dtype.itemsize
    return float(min(keep, whole)) if work.epochs > 0 and seen.features else 0.0


def target_epochs(config: DictConfig, seen: DryRun, work: Work) -> float:
    """How often the target runs over the data: of what is kept once only, where all of a batch is."""
    whole = work.tokens * len(seen.features) * seen.width * seen.dtype.itemsize
    kept = kept_features(config, seen, work) / whole if whole else 0.0
    rows = (work.dataset.examples and len(work.dataset.examples) / len(work.batches)) or 1.0
    return min(1.0, work.epochs) + max(0.0, work.epochs - 1) * (1 - kept**rows)


def total_flops(config: DictConfig, seen: DryRun, work: Work) -> float:
    times = 0.0 if is_stored(config) else target_epochs(config, seen, work)
    return work.padded * (seen.flops.get(TARGET, 0.0) * times + seen.flops.get(STEP, 0.0) * work.epochs)


def is_stored(config: DictConfig) -> bool:
    return bool(build(config.source).stores_features)


def disk(seen: DryRun, work: Work) -> dict[str, Any]:
    """Bytes that the run folder holds at its end, and that a feature store of this data takes."""
    stores = {dtype: bytes_of(work.tokens * len(seen.features), seen.width, dtype) for dtype in STORED}
    return {
        "checkpoint_bytes": seen.checkpoint_bytes, "checkpoints_kept": len(seen.checkpoints),
        "drafter_bytes": seen.drafter_bytes, "trained_target_bytes": seen.trained_target_bytes,
        "run_bytes": sum(seen.checkpoints) + seen.drafter_bytes + seen.trained_target_bytes,
        "store_bytes": stores if seen.features else {},
    }  # fmt: skip


def sharded_memory(seen: DryRun, asked: Plan) -> dict[str, int]:
    """Peak bytes of one of `devices` where the drafter's states are spread over them, and where the target is too.

    Full sharding gathers a piece at a time: of the drafter, which is small, all of it, of the target its largest layer.
    """
    count, parts = asked.devices, seen.memory
    if count == 1:
        return {}
    states = sum(parts.get(part, 0) for part in ("drafter weights", "gradients", "optimiser state"))
    drafter = seen.peak - states * (count - 1) // count + parts.get("drafter weights", 0)
    weights = parts.get("target weights", 0)
    return {"drafter": drafter, "drafter and target": drafter - weights * (count - 1) // count + 2 * seen.layer_bytes}


def hours(config: DictConfig, asked: Plan, seen: DryRun, work: Work, flops: float) -> dict[str, Any]:
    """Hours of the run, and where they come from."""
    whole = work.padded_in_all
    if asked.tokens_per_second is not None:
        rate = asked.tokens_per_second * asked.devices
        return {"value": whole / rate / 3600, "basis": f"plan.tokens_per_second={asked.tokens_per_second:g} of a device"}
    if should_calibrate(config, asked, seen):
        target, step = calibrate(config)
        seconds = work.padded * (target * target_epochs(config, seen, work) + step * work.epochs) / asked.devices
        basis = f"measured over {CALIBRATION} steps on this machine"
        return {
            "value": seconds / 3600,
            "basis": basis,
            "tokens_per_second": whole / seconds,
            "seconds_per_token": [target, step],
        }
    rate = asked.share * asked.peak_tflops * 1e12 * asked.devices
    basis = f"assumed: {asked.share:.0%} of {asked.peak_tflops:g} TFLOP/s, nothing was run"
    return {"value": flops / rate / 3600, "basis": basis, "tokens_per_second": whole * rate / flops if flops else None}


def should_calibrate(config: DictConfig, asked: Plan, seen: DryRun) -> bool:
    """Whether steps may run here: asked for, or small and at hand."""
    if asked.calibrate is not None:
        if asked.calibrate and (not asked.is_here or not work_is_real(asked)):
            raise UserError(
                "plan.calibrate=true: it runs steps on this machine; leave out plan.tokens and a plan.device not here"
            )
        return asked.calibrate
    local = not config.target["_target_"].endswith("load_hf") or any(Path(config.target.model).glob("*.safetensors"))
    return local and asked.is_here and work_is_real(asked) and seen.target <= SMALL


def work_is_real(asked: Plan) -> bool:
    return asked.tokens is None


def calibrate(config: DictConfig) -> tuple[float, float]:
    """Seconds that a padded token takes in the target's features and in the rest of a step, from steps that really run."""
    trainer: Trainer = replace(build(config.trainer), max_steps=CALIBRATION, save_every=None, resume=None)
    target: Target = build(config.target)
    dataset = build(config.data).dataset(target.tokenizer)
    drafter = fresh_drafter(config, target, dataset)
    target.pack()
    source = _Timed(build(config.source), target)
    ends: list[float] = []
    marks: list[tuple[float, float]] = []

    def on_step(step: int) -> None:
        wait(target.device)
        ends.append(time.perf_counter())
        marks.append((source.seconds, source.tokens))

    with tempfile.TemporaryDirectory() as folder:
        trainer.fit(drafter, target, dataset, source, Path(folder), on_step=on_step)
    seconds, tokens = marks[-1][0] - marks[WARM - 1][0], marks[-1][1] - marks[WARM - 1][1]
    return seconds / tokens, (ends[-1] - ends[WARM - 1] - seconds) / tokens


class _Timed(Source):
    """A source, and how long it took over how many tokens."""

    def __init__(self, source: Source, target: Target) -> None:
        self.source, self.device = source, target.device
        self.seconds = self.tokens = 0.0

    def batch(self, request: BatchRequest) -> Batch:
        began = time.perf_counter()
        batch = self.source.batch(request)
        wait(self.device)
        self.seconds += time.perf_counter() - began
        self.tokens += slots(request.examples, request.packed)
        return batch


def changes(config: DictConfig, asked: Plan, seen: DryRun, sharded: dict[str, int]) -> list[dict[str, Any]]:
    """What would take less, each planned anew, best first."""
    found: list[dict[str, Any]] = [
        {"change": f"{SPREAD[what]} on {asked.devices} devices", "peak_bytes": size} for what, size in sharded.items()
    ]
    if seen.features and not is_stored(config):
        weights = seen.memory.get("target weights", 0) + seen.memory.get("packed copies of weights", 0)
        found.append({"change": "source=store", "peak_bytes": seen.peak - max(0, weights - seen.lent_bytes)})
    for settings in alternatives(config):
        changed = deepcopy(config)
        for key, value in settings.items():
            OmegaConf.update(changed, key, value)
        work = survey(changed, asked)
        peak = dry_run(changed, asked.planned, work.dataset, work.batches[:64], work.num_steps).peak
        asked_for = {key: str(value).lower() if isinstance(value, bool) else value for key, value in settings.items()}
        found.append({"change": " ".join(f"{key}={value}" for key, value in asked_for.items()), "peak_bytes": peak})
    for entry in found:
        entry["saves_bytes"] = seen.peak - entry["peak_bytes"]
        entry["fits"] = entry["peak_bytes"] <= (asked.limit() or math.inf) * (1 - RESERVE)
    return sorted((entry for entry in found if entry["saves_bytes"] > 0), key=lambda entry: entry["peak_bytes"])


def alternatives(config: DictConfig) -> list[dict[str, Any]]:
    """Settings that cost less memory, as far as this run has them."""
    trainer: Trainer = build(config.trainer)
    found: list[dict[str, Any]] = []
    if trainer.batch_tokens >= 512:
        halved = {"trainer.batch_tokens": trainer.batch_tokens // 2, "trainer.accumulate": trainer.accumulate * 2}
        longest = build(config.data).max_length
        found.append(
            {**halved, **({"data.max_length": trainer.batch_tokens // 2} if longest > trainer.batch_tokens // 2 else {})}
        )
    has = settings_of(config.drafter)
    for key in ("ttt_steps", "num_heads", "vocab_size", "num_masks", "num_drafts"):
        value = has.get(key)
        if isinstance(value, int) and value > 3:
            found.append({f"drafter.{key}": value // 2})
    if has.get("adapt") == "full":
        found.append({"drafter.adapt": "lora"})
    if not trainer.gradient_checkpointing and not str(config.drafter["_target_"]).endswith(".GatedLora"):
        found.append({"trainer.gradient_checkpointing": True})
    return found


def show(found: dict[str, Any]) -> None:
    """The plan as tables."""
    console = Console(soft_wrap=True)
    console.width = max(console.width, WIDTH)
    tokens, memory, disk_, flops, hours_ = (found[key] for key in ("tokens", "memory", "disk", "flops", "hours"))
    table = Table(title="spectrain plan", show_header=False)
    sizes = {name: amount(number) for name, number in found["parameters"].items()}
    table.add_row("parameters", f"{sizes['trained']} trained; drafter {sizes['drafter']}, target {sizes['target']}")
    how = "counted" if tokens["counted"] else "plan.tokens"
    table.add_row(
        "tokens", f"{amount(tokens['epoch'])} an epoch ({how}), {tokens['epochs']:.3g} epochs, {tokens['steps']} steps"
    )
    table.add_section()
    table.add_row(f"memory a {memory['device']} device", f"{gigabytes(memory['peak_bytes'])} in tensors at the worst moment")
    for part, size in sorted(memory["parts"].items(), key=lambda item: -item[1]):
        if size >= 0.001 * memory["peak_bytes"]:
            table.add_row(f"  {part}", gigabytes(size))
    for what, size in memory["sharded"].items():
        table.add_row(f"  {what} sharded over {memory['devices']}", gigabytes(size))
    table.add_section()
    run = f"{gigabytes(disk_['run_bytes'])}: {disk_['checkpoints_kept']} checkpoints of {gigabytes(disk_['checkpoint_bytes'])}"
    run += f", drafter {gigabytes(disk_['drafter_bytes'])}"
    run += f", target {gigabytes(disk_['trained_target_bytes'])}" if disk_["trained_target_bytes"] else ""
    table.add_row("disk, the run", run)
    if disk_["store_bytes"]:
        stored = ", ".join(f"{dtype} {gigabytes(size)}" for dtype, size in disk_["store_bytes"].items())
        table.add_row("disk, a feature store", stored)
    table.add_section()
    each = f"{flops['target_per_token'] / 1e9:.3g} GFLOP a token in the target, {flops['step_per_token'] / 1e9:.3g} in the step"
    table.add_row("arithmetic", f"{flops['run']:.3g} FLOP; {each}")
    table.add_row("hours", f"{hours_['value']:.3g} ({hours_['basis']})")
    console.print(table)
    for note in found["notes"]:
        console.print(note, highlight=False)
    if memory["limit_bytes"] is None:
        console.print("plan.device_gb=80 says whether it fits, and what to change if not", highlight=False)
        return
    room = f"{gigabytes(memory['limit_bytes'])}, of which {RESERVE:.0%} stay for what is no tensor"
    console.print(f"it {'fits' if found['fits'] else 'does not fit'} in {room}", highlight=False)
    if found["changes"]:
        table = Table("change", "memory", "saves", "fits")
        for entry in found["changes"]:
            fits = "yes" if entry["fits"] else "no"
            table.add_row(entry["change"], gigabytes(entry["peak_bytes"]), gigabytes(entry["saves_bytes"]), fits)
        console.print(table)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e7 else f"{size / 1e6:.3g} MB"


def amount(number: float) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:g}"
