"""`spectrain plan`: what a training run needs, before anything is loaded, and what to change where that is too much.

Memory and FLOPs come from a dry run of the trainer's own steps without data; disk from the sizes of what is saved; hours
from steps that really ran here, or from a rate that is assumed and printed as such.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.features.store_contents import TORCH_DTYPES, count_state_bytes
from spectrain.provenance import collect_provenance
from spectrain.training.trainer import Trainer

from .dry_run import STEP, TARGET, DryRun, dry_run
from .hours import hours
from .table import RESERVE, print_plan
from .workload import Workload, cached_features, read_workload, total_flops

SPREAD = {"drafter": "trainer.sharding=fsdp2", "drafter and target": "trainer.sharding=fsdp2 target.sharding=fsdp2"}


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

    def run(self, spec: RunSpec) -> dict[str, Any]:
        """Plan, print a table or JSON, and give what was printed."""
        summary = plan(spec, self)
        text = json.dumps(summary, indent=2) + "\n"
        if self.out is not None:
            Path(self.out).parent.mkdir(parents=True, exist_ok=True)
            Path(self.out).write_text(text)
        if self.json:
            print(text, end="")
        else:
            print_plan(summary)
        return summary


def plan(spec: RunSpec, options: Plan) -> dict[str, Any]:
    """Everything that is known of a run before it starts, as plain numbers."""
    work = read_workload(spec, options)
    sizes = dry_run(spec, options.planned, work.dataset, work.batches, work.num_steps)
    cached = cached_features(spec, sizes, work)
    if options.planned.type == "cpu" and cached:
        sizes.memory["features kept for later epochs"] = int(cached)
    flops = total_flops(spec, sizes, work)
    limit = options.limit()
    sharded = sharded_memory(sizes, options)
    summary: dict[str, Any] = {
        "parameters": {"trained": sizes.trained, "drafter": sizes.drafter, "target": sizes.target},
        "tokens": {
            "epoch": work.tokens, "padded": work.padded, "epochs": work.epochs, "counted": work.counted,
            "steps": work.num_steps, "batch_tokens": work.batch_tokens,
        },
        "memory": {
            "device": str(options.planned.type), "devices": options.devices, "peak_bytes": sizes.peak, "parts": sizes.memory,
            "sharded": sharded, "limit_bytes": limit, "assumed_sizes": sizes.assumed,
        },
        "disk": disk(sizes, work),
        "flops": {"target_per_token": sizes.flops.get(TARGET, 0.0), "step_per_token": sizes.flops.get(STEP, 0.0), "run": flops},
        "hours": hours(spec, options, sizes, work, flops), "notes": notes(spec, options, sizes),
    }  # fmt: skip
    if limit is not None:
        room = limit * (1 - RESERVE)
        summary["fits"] = sizes.peak <= room
        summary["changes"] = [] if summary["fits"] else list_changes(spec, options, sizes, sharded)
    return {**summary, "setting": {**spec.to_nodes(), "plan": asdict(options)}, "provenance": collect_provenance()}


def notes(spec: RunSpec, options: Plan, sizes: DryRun) -> list[str]:
    """What the numbers leave out or take for granted."""
    summary = []
    if sizes.assumed:
        summary.append(f"{sizes.assumed} sizes hang on what the target says; the most was assumed")
    if spec.source.build().generates_text:
        summary.append("sequences that are written while training are not counted, in memory, arithmetic or assumed hours")
    if options.planned.type == "cuda":
        summary.append(
            "attention is taken to run in fused kernels, masked too, as on an H100; elsewhere it may store every score"
        )
    return summary


def disk(sizes: DryRun, work: Workload) -> dict[str, Any]:
    """Bytes that the run folder holds at its end, and that a feature store of this data takes."""
    stores = {dtype: count_state_bytes(work.tokens * len(sizes.features), sizes.width, dtype) for dtype in TORCH_DTYPES}
    return {
        "checkpoint_bytes": sizes.checkpoint_bytes, "checkpoints_kept": len(sizes.checkpoints),
        "drafter_bytes": sizes.drafter_bytes, "trained_target_bytes": sizes.trained_target_bytes,
        "run_bytes": sum(sizes.checkpoints) + sizes.drafter_bytes + sizes.trained_target_bytes,
        "store_bytes": stores if sizes.features else {},
    }  # fmt: skip


def sharded_memory(sizes: DryRun, options: Plan) -> dict[str, int]:
    """Peak bytes of one of `devices` where the drafter's states are spread over them, and where the target is too.

    Full sharding gathers a piece at a time: of the drafter, which is small, all of it, of the target its largest layer.
    """
    count, parts = options.devices, sizes.memory
    if count == 1:
        return {}
    states = sum(parts.get(part, 0) for part in ("drafter weights", "gradients", "optimiser state"))
    drafter = sizes.peak - states * (count - 1) // count + parts.get("drafter weights", 0)
    weights = parts.get("target weights", 0)
    return {"drafter": drafter, "drafter and target": drafter - weights * (count - 1) // count + 2 * sizes.layer_bytes}


def list_changes(spec: RunSpec, options: Plan, sizes: DryRun, sharded: dict[str, int]) -> list[dict[str, Any]]:
    """What would take less, each planned anew, best first."""
    summary: list[dict[str, Any]] = [
        {"change": f"{SPREAD[what]} on {options.devices} devices", "peak_bytes": size} for what, size in sharded.items()
    ]
    if sizes.features and not spec.source.build().stores_features:
        weights = sizes.memory.get("target weights", 0) + sizes.memory.get("packed copies of weights", 0)
        summary.append({"change": "source=store", "peak_bytes": sizes.peak - max(0, weights - sizes.lent_bytes)})
    for settings in cheaper_settings(spec, sizes):
        changed = spec
        for key, value in settings.items():
            group, _, name = key.partition(".")
            changed = changed.with_settings(group, **{name: value})
        work = read_workload(changed, options)
        peak = dry_run(changed, options.planned, work.dataset, work.batches[:64], work.num_steps).peak
        shown = {key: str(value).lower() if isinstance(value, bool) else value for key, value in settings.items()}
        summary.append({"change": " ".join(f"{key}={value}" for key, value in shown.items()), "peak_bytes": peak})
    for entry in summary:
        entry["saves_bytes"] = sizes.peak - entry["peak_bytes"]
        entry["fits"] = entry["peak_bytes"] <= (options.limit() or math.inf) * (1 - RESERVE)
    return sorted((entry for entry in summary if entry["saves_bytes"] > 0), key=lambda entry: entry["peak_bytes"])


def cheaper_settings(spec: RunSpec, sizes: DryRun) -> list[dict[str, Any]]:
    """Settings that cost less memory, as far as this run has them."""
    trainer = Trainer.from_spec(spec)
    summary: list[dict[str, Any]] = []
    if trainer.batch_tokens >= 512:
        halved = {"trainer.batch_tokens": trainer.batch_tokens // 2, "trainer.accumulate": trainer.accumulate * 2}
        longest = spec.data.build().max_length
        summary.append(
            {**halved, **({"data.max_length": trainer.batch_tokens // 2} if longest > trainer.batch_tokens // 2 else {})}
        )
    has = spec.drafter.with_defaults()
    for key in ("ttt_steps", "num_heads", "vocab_size", "num_masks", "num_drafts"):
        value = has.get(key)
        if isinstance(value, int) and value > 3:
            summary.append({f"drafter.{key}": value // 2})
    if has.get("adapt") == "full":
        summary.append({"drafter.adapt": "lora"})
    if not trainer.gradient_checkpointing and not sizes.adapts_layers:
        summary.append({"trainer.gradient_checkpointing": True})
    return summary
