"""`spectrain plan`: what a training run needs, before anything is loaded, and what to change if
that is too much.

Memory, disk and operations come from closed formulas, hours from steps that really ran on this
machine, or from a rate that is assumed and printed as such.
"""

import json
import math
import re
import shlex
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spectrain.config.spec import RunSpec
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, adapts_layers
from spectrain.errors import UserError
from spectrain.export.launches import find_engine_layout, make_launches
from spectrain.export.layout import DrafterCheckpoint
from spectrain.export.targets import TargetFiles
from spectrain.features.store_contents import TORCH_DTYPES, count_state_bytes
from spectrain.files import require_writable_file, write_text
from spectrain.models.architectures.quantized import BLOCK_QUANTIZATIONS
from spectrain.models.bundled import type_name
from spectrain.output.verbosity import result_output
from spectrain.provenance import collect_provenance
from spectrain.runs.drafters import build_target_without_weights
from spectrain.servers.advice import list_engine_advice
from spectrain.servers.commands import EngineLaunch, round_rates
from spectrain.servers.engines import ENGINES, simulate_acceptance
from spectrain.training.parallel.context import check_context

from .footprint import (
    DiskSizes,
    Models,
    bytes_of,
    count_parameters,
    largest_piece_bytes,
    lent_parameters,
    peak_memory,
)
from .hours import estimate_hours
from .needs import describe_needs
from .serving_memory import list_drafter_caches, plan_serving_memory
from .settings import PlanSettings
from .table import RESERVE, format_bytes, print_plan
from .weights import FORMATS, is_kept_quantized
from .workload import (
    Workload,
    cached_features,
    count_operations,
    has_validation,
    read_workload,
    reads_features,
    trained_batches,
)

SHARDING_SETTINGS = {
    "drafter": "trainer.sharding=fsdp2",
    "drafter and target": "trainer.sharding=fsdp2 target.sharding=fsdp2",
}
# Share of the draft tokens after accepted ones that is accepted, unless the user knows better.
ASSUMED_ACCEPTANCE = 0.7
# Tokens of a window of the loss that a plan for long texts suggests.
SUGGESTED_LOSS_TOKENS = 2048
HALVED_SETTINGS = ("ttt_steps", "num_heads", "vocab_size", "num_masks", "num_drafts")
"""Settings of a drafter whose halves take less memory."""


class Plan(PlanSettings):
    """Plan a training run for devices that need not be here."""

    def run(self, spec: RunSpec) -> dict[str, Any]:
        """Plan, print a table, and return what was planned."""
        if self.out is not None:
            require_writable_file(Path(self.out), "plan.out")
        summary = plan(spec, self)
        if self.out is not None:
            write_text(Path(self.out), json.dumps(summary, indent=2) + "\n")
        with result_output():
            print_plan(summary)
        return summary


def plan(spec: RunSpec, options: Plan) -> dict[str, Any]:
    """Return everything that is known of a run before it starts, as plain numbers."""
    target = build_target_without_weights(spec, str(options.torch_device))
    work = read_workload(spec, target, options.tokens, options.devices)
    models = Models.from_spec(spec, options.torch_device, work.num_steps, options.devices, target)
    check_context(
        models.trainer.context_parallel,
        models.drafter,
        spec.source.build(),
        models.target,
        options.devices,
    )
    memory = plan_memory(spec, options, models, work)
    operations = count_operations(spec, models, work)
    limit = options.limit()
    peak = sum(memory.values())
    sharded = sharded_memory(models, memory, options.devices)
    summary: dict[str, Any] = {
        "parameters": count_parameters(models),
        "training": describe_needs(models, work.batches[0]),
        "tokens": {
            "epoch": work.tokens, "padded": work.padded, "epochs": work.epochs,
            "counted": work.is_counted,
            "steps": work.num_steps, "batch_tokens": max(batch.tokens for batch in work.batches),
        },
        "memory": {
            "device": str(options.torch_device.type), "devices": options.devices,
            "peak_bytes": peak, "parts": memory,
            "sharded": sharded, "limit_bytes": limit, "assumed_sizes": 0,
        },
        "disk": plan_disk(models, work),
        "flops": {
            "target_per_token": operations.target_per_token,
            "step_per_token": operations.step_per_token,
            "run": operations.run,
        },
        "serving": plan_serving(options, models),
        "hours": estimate_hours(spec, options, models, work, operations),
        "notes": list_notes(spec, options, work, models),
        "simulation": plan_simulation(spec, models, options.acceptance_rates),
    }  # fmt: skip
    if limit is not None:
        summary["fits"] = peak <= limit * (1 - RESERVE)
        summary["changes"] = (
            [] if summary["fits"] else list_changes(spec, options, models, work, memory)
        )
    return {
        **summary,
        "setting": {**spec.to_nodes(), "plan": asdict(options)},
        "provenance": collect_provenance(),
    }


def plan_memory(spec: RunSpec, options: Plan, models: Models, work: Workload) -> dict[str, int]:
    """Return the bytes of each part at the worst moment; a CPU's memory holds the cached
    features too.
    """
    memory = peak_memory(models, trained_batches(spec, models, work), has_validation(models, work))
    cached = cached_features(spec, models, work)
    return memory | (
        {"features kept for later epochs": int(cached)} if models.is_cpu and cached else {}
    )


def plan_serving(options: Plan, models: Models) -> dict[str, int]:
    """Return what keys and values take while the target is served with the drafter, in the type
    of the target's weights.
    """
    memory = plan_serving_memory(
        models.target.config,
        list_drafter_caches(models.drafter),
        options.users,
        options.context,
        models.target.dtype.itemsize,
    )
    return asdict(memory)


def list_notes(spec: RunSpec, options: Plan, work: Workload, models: Models) -> list[str]:
    """Return what the numbers leave out or assume, and what drafting gains in a measured engine."""
    notes = []
    if work.is_counted and not models.target.template.exists:
        notes.append(
            "the target has no tokenizer with a chat template here; tokens are counted with that "
            "of target=tiny"
        )
    notes += list_weight_notes(models)
    notes += list_conversion_notes(spec, models)
    if (minutes := models.trainer.max_minutes) is not None and models.trainer.max_steps is None:
        notes.append(
            f"trainer.max_minutes={minutes:g} ends the run at that time; steps and hours are "
            "those of trainer.epochs"
        )
    if (size := models.trainer.context_parallel) > 1:
        repeated = (
            "" if reads_features(spec) else "; each of them runs the target over the complete text"
        )
        notes.append(
            f"{size} devices share a text, and memory is that of the one with most supervised "
            f"tokens{repeated}"
        )
    if spec.source.build().needs_server:
        notes.append(
            "the server's memory and arithmetic are not counted; hours hold if it captures states "
            "as fast as this trains"
        )
    if spec.source.build().generates_text:
        notes.append(
            "sequences that are written while training are not counted, in memory, arithmetic or "
            "assumed hours"
        )
    if options.torch_device.type == "cuda":
        notes.append(
            "attention is taken to run in fused kernels, masked too, as on an H100; elsewhere it "
            "may store every score"
        )
    for advice in list_engine_advice():
        notes += advice.advise_plan(spec, options.acceptance_rates)
    return notes


def list_weight_notes(models: Models) -> list[str]:
    """Return how quantized weights of a target were counted."""
    name = models.weight_format
    if name is None or not models.target.has_layers:
        return []
    if not is_kept_quantized(name, models.is_cpu):
        return [
            f"the target's weights are quantized ({name}) and are dequantized when they are loaded"
        ]
    if name in BLOCK_QUANTIZATIONS:
        return [
            "the target's weights are counted in the blocks of their file, and its others dense"
        ]
    if name not in FORMATS:
        return [
            f"the target's weights are quantized ({name}); they are counted as "
            f"{models.target.dtype} and take less"
        ]
    return [
        f"the target's weights are counted as they are stored ({name}), which takes kernels for "
        "this type"
    ]


def list_conversion_notes(spec: RunSpec, models: Models) -> list[str]:
    """Return how large the converted weights of a GGUF file are, where no command has written
    them yet.
    """
    files = TargetFiles.from_settings(spec.target.node, with_weights=False)
    converted = find_conversion(spec, files)
    if converted is None:
        return []
    dtype = files.weight_dtype
    size = dtype.itemsize * count_parameters(models)["target"]
    return [
        f"the first command that loads {files.gguf_file} writes its weights in "
        f"{type_name(dtype)}, {format_bytes(size)}, to {converted}"
    ]


def find_conversion(spec: RunSpec, files: TargetFiles) -> Path | None:
    """Return the folder to which the first command that loads a target writes its weights; None
    where they are written, or are read as they are.
    """
    converted = files.converted_directory
    keeps_blocks = spec.target.settings.get("quantization") in BLOCK_QUANTIZATIONS
    if converted is None or keeps_blocks or (converted / "config.json").exists():
        return None
    return converted


def describe_launches(spec: RunSpec, drafter: Drafter) -> dict[str, EngineLaunch]:
    """Return, by engine, its launch with a recipe's drafter, which exists without weights; its
    folder stands as DRAFTER.
    """
    target = TargetFiles.from_settings(spec.target.node, with_weights=False)
    settings = {**spec.drafter.with_defaults(), **drafter.saved.settings}
    checkpoint = DrafterCheckpoint(str(spec.drafter.choice), settings, dict(drafter.state_dict()))
    layouts = {name: find_engine_layout(checkpoint, target, name) for name in ENGINES}
    return {
        name: make_launches(checkpoint, layout, target, "DRAFTER")[name]
        for name, layout in layouts.items()
        if layout is not None
    }


def plan_simulation(
    spec: RunSpec, models: Models, rates: list[float] | None
) -> dict[str, Any] | None:
    """Return the commands that show what an acceptance is worth before there is a drafter; None
    if no engine serves it.
    """
    launches = {
        name: launch
        for name, launch in describe_launches(spec, models.drafter).items()
        if ENGINES[name].simulates
    }
    if not launches:
        return None
    count = max(
        launch.drafter.num_tokens for launch in launches.values() if launch.drafter is not None
    )
    chosen = round_rates(
        rates or [ASSUMED_ACCEPTANCE**position for position in range(1, count + 1)]
    )
    simulated = simulate_acceptance(launches, chosen).items()
    commands = {
        ENGINES[name].title: ENGINES[name].make_command(launch).format_shell()
        for name, launch in simulated
    }
    words = [word.lstrip("+") for word in spec.overrides]
    words = [
        "spectrain",
        "serve",
        *(word for word in words if re.match(r"(recipe|target|drafter)[.=]", word)),
    ]
    if "vllm" in launches:
        commands["spectrain"] = shlex.join(
            [*words, "server=vllm", f"server.acceptance_rates={chosen}".replace(" ", "")]
        )
    return {"rates": chosen, "assumed": rates is None, "commands": commands}


def plan_disk(models: Models, work: Workload) -> dict[str, Any]:
    """Return the bytes that the run folder has at its end, and those of a feature store of this
    data.
    """
    sizes = DiskSizes.from_models(models)
    num_states = work.tokens * len(models.features)
    stores = {
        dtype: count_state_bytes(num_states, models.target.width, dtype) for dtype in TORCH_DTYPES
    }
    return {
        "checkpoint_bytes": sizes.checkpoint,
        "checkpoints_kept": len(sizes.checkpoints),
        "drafter_bytes": sizes.drafter,
        "trained_target_bytes": sizes.target,
        "run_bytes": sum(sizes.checkpoints) + sizes.drafter + sizes.target,
        "store_bytes": stores if models.features else {},
    }


def sharded_memory(models: Models, memory: dict[str, int], devices: int) -> dict[str, int]:
    """Return the peak bytes of one of several devices if they share the drafter's states, and if
    they share the target too.

    Full sharding gathers one piece at a time: the complete drafter, which is small, and of the
    target its largest layer.
    """
    if devices == 1:
        return {}
    states = sum(
        memory.get(part, 0) for part in ("drafter weights", "gradients", "optimiser state")
    )
    total = sum(memory.values()) - memory.get("gradient buckets", 0)
    drafter = total - states * (devices - 1) // devices + memory.get("drafter weights", 0)
    # Processes cannot share quantized weights.
    if models.weight_format is not None:
        return {"drafter": drafter}
    weights = memory.get("target weights", 0) * (devices - 1) // devices
    return {
        "drafter": drafter,
        "drafter and target": drafter - weights + 2 * largest_piece_bytes(models),
    }


def list_changes(
    spec: RunSpec, options: Plan, models: Models, work: Workload, memory: dict[str, int]
) -> list[dict[str, Any]]:
    """Return the changes that take less memory, each planned itself, the best one first."""
    peak = sum(memory.values())
    sharded = sharded_memory(models, memory, options.devices)
    peaks = {
        f"{SHARDING_SETTINGS[what]} on {options.devices} devices": size
        for what, size in sharded.items()
    }
    if models.features and models.target.has_layers:
        weights = memory.get("target weights", 0) + memory.get("packed copies of weights", 0)
        change = "target.parts=head" if reads_features(spec) else "source=store target.parts=head"
        peaks[change] = peak - max(0, weights - bytes_of(lent_parameters(models.target)))
    for settings in cheaper_settings(spec, models, options.devices):
        changed = spec
        for key, value in settings.items():
            group, _, name = key.partition(".")
            changed = changed.with_settings(group, **{name: value})
        # A family may refuse it beside the other settings of the run.
        with suppress(UserError):
            dataset = work.dataset if changed.data == spec.data else None
            peaks[" ".join(map(format_setting, settings.items()))] = peak_of_change(
                changed, options, models, dataset
            )
    room = (options.limit() or math.inf) * (1 - RESERVE)
    changes = [
        {"change": change, "peak_bytes": size, "saves_bytes": peak - size, "fits": size <= room}
        for change, size in peaks.items()
        if size < peak
    ]
    return sorted(changes, key=lambda change: change["peak_bytes"])


def peak_of_change(changed: RunSpec, options: Plan, models: Models, dataset: Dataset | None) -> int:
    """Return the peak bytes of a run with changed settings; a `dataset` that did not change is
    not read again.
    """
    work = read_workload(changed, models.target, options.tokens, options.devices, dataset)
    target = None if models.changes_target else models.target
    other = Models.from_spec(changed, options.torch_device, work.num_steps, options.devices, target)
    return sum(plan_memory(changed, options, other, work).values())


def format_setting(setting: tuple[str, Any]) -> str:
    key, value = setting
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def cheaper_settings(spec: RunSpec, models: Models, num_devices: int) -> list[dict[str, Any]]:
    """Return settings of this run on this number of devices that take less memory."""
    trainer = models.trainer
    settings = spec.drafter.with_defaults()
    choices: list[dict[str, Any]] = []
    if trainer.batch_tokens >= 512:
        half = trainer.batch_tokens // 2
        shorter = {"data.max_length": half} if spec.data.build().max_length > half else {}
        choices.append(
            {"trainer.batch_tokens": half, "trainer.accumulate": trainer.accumulate * 2, **shorter}
        )
    for key in HALVED_SETTINGS:
        value = settings.get(key)
        if isinstance(value, int) and value > 3:
            choices.append({f"drafter.{key}": value // 2})
    if settings.get("adapt") == "full":
        choices.append({"drafter.adapt": "lora"})
    if trainer.loss_tokens is None and spec.data.build().max_length >= 2 * SUGGESTED_LOSS_TOKENS:
        choices.append({"trainer.loss_tokens": SUGGESTED_LOSS_TOKENS})
    if (
        num_devices > trainer.context_parallel == 1
        and models.drafter.capabilities.context_parallel is not None
    ):
        choices.append({"trainer.context_parallel": num_devices})
    if not trainer.gradient_checkpointing and not adapts_layers(models.drafter):
        choices.append({"trainer.gradient_checkpointing": True})
    return choices
