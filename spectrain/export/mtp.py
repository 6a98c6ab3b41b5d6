"""The layout of MTP: a copy of the target's own checkpoint with its MTP layers replaced or added,
which engines load as the target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.errors import UserError
from spectrain.files import PICKLE_SUFFIXES
from spectrain.models.architectures.mtp import (
    ENGINE_LAYOUTS,
    FUSED_EXPERTS,
    MTP_LAYOUTS,
    CheckpointReader,
    MtpLayout,
    find_layout,
    mtp_layer_types,
)
from spectrain.models.checkpoint_files import INDEX_FILE
from spectrain.servers.commands import DrafterLaunch

from .drafter_files import DrafterFiles, write_json
from .huggingface import generate_snippet
from .layout import DrafterCheckpoint, ExpectedTensors, Layout, make_checkpoint, require_target
from .targets import TargetFiles

MTP_SHARD = "model-mtp.safetensors"
SKIPPED_FILES = ("README.md", ".gitattributes", INDEX_FILE, "config.json")
"""Files of the target that are not copied."""


class MtpTargetLayout(Layout):
    """The target's files with the trained layer in place of every MTP layer; the new tensors are
    in a separate shard.
    """

    title = "target with MTP layers"
    holds_target = True

    def matches_files(self, files: DrafterFiles) -> bool:
        has_architecture = any(
            name.endswith(("ForCausalLM", "ForConditionalGeneration"))
            for name in files.config.get("architectures") or []
        )
        return has_architecture and find_layout(files.tensors) is not None

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        return ExpectedTensors(
            {name: tuple(tensor.shape) for name, tensor in files.tensors.items()}
        )

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        checkpoint = CheckpointReader(files.directory)
        layout = find_layout(files.tensors)
        assert layout is not None
        prefix = checkpoint.layer_prefixes(layout)[0]
        tensors = {
            name.removeprefix(prefix): files.tensors[name]
            for name in checkpoint.layer_tensor_names(layout, prefix)
        }
        reference = files.read_metadata().target or str(files.directory)
        native = layout.to_internal(tensors)
        return make_checkpoint(files, "mtp", {"start": "new"}, native, reference)

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        target = require_target(target, "the layer is written into a copy of its checkpoint")
        source = CheckpointReader(target.directory)
        model_type = str(target.full_config.model_type)
        layout = source.mtp_layout or next(
            (
                candidate
                for candidate in MTP_LAYOUTS
                if ENGINE_LAYOUTS.get(model_type) == candidate.title
            ),
            None,
        )
        if layout is None:
            raise UserError(
                f"format=mtp: no engine drafts with MTP layers for {model_type} models, and "
                f"{target.reference} ships none; use recipe=eagle3"
            )
        stitched = stitch_layer(drafter.tensors, source, layout, target)
        for path in sorted(source.directory.iterdir()):
            if (
                path.is_file()
                and path.name not in SKIPPED_FILES
                and path.suffix not in (".safetensors", ".gguf", *PICKLE_SUFFIXES)
            ):
                shutil.copy2(path, directory / path.name)
        files = copy_without(source, {*stitched}, directory)
        save_file(
            {name: stitched[name].contiguous() for name in sorted(stitched)},
            directory / MTP_SHARD,
            metadata={"format": "pt"},
        )
        write_index(directory, files | dict.fromkeys(stitched, MTP_SHARD))
        config = json.loads((source.directory / "config.json").read_text())
        write_json(
            directory / "config.json", config if source.mtp_layout else add_mtp_layer(config)
        )

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        steps = int(drafter.drafter.get("num_steps", 3))
        return {
            "vllm": DrafterLaunch("mtp", None, steps),
            "sglang": DrafterLaunch("NEXTN", None, steps),
        }

    def python_snippets(self, drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
        return {"transformers": generate_snippet(path, "use_mtp=True")}


MTP_TARGET = MtpTargetLayout()


def stitch_layer(
    tensors: dict[str, Tensor], source: CheckpointReader, layout: MtpLayout, target: TargetFiles
) -> dict[str, Tensor]:
    """Return the trained layer's tensors for each MTP layer, named and typed as in the
    checkpoint.
    """
    prefixes = source.layer_prefixes(layout) or [
        layout.prefix.format(layer=target.num_layers, index=0)
    ]
    neighbours = [name for name in source.tensor_files if name.startswith(prefixes[0])] or [
        *source.tensor_files
    ]
    renamed = layout.to_checkpoint(
        tensors, by_expert=not any(name.endswith(FUSED_EXPERTS) for name in neighbours)
    )
    stitched = {prefix + name: tensor for prefix in prefixes for name, tensor in renamed.items()}
    if source.mtp_layout is not None:
        differing = sorted(
            {*source.layer_tensor_names(layout, prefixes[0])}
            ^ {prefixes[0] + name for name in renamed}
        )
        if differing:
            raise UserError(
                f"format=mtp: {target.reference} and the drafter differ in {differing[0]}; it was "
                "trained for another target"
            )
    return {name: tensor.to(tensor_dtype(name, source)) for name, tensor in stitched.items()}


def tensor_dtype(name: str, source: CheckpointReader) -> torch.dtype:
    """Return the dtype of a tensor in the checkpoint; if absent, that of a namesake or of the
    attention's output.
    """
    if name in source.tensor_files:
        return source.read_tensor(name).dtype
    endings = [".".join(name.split(".")[-2:]), "o_proj.weight", "norm.weight"]
    namesake = next(
        other for ending in endings for other in source.tensor_files if other.endswith(f".{ending}")
    )
    return source.read_tensor(namesake).dtype


def copy_without(source: CheckpointReader, replaced: set[str], directory: Path) -> dict[str, str]:
    """Copy the checkpoint's shards without the replaced tensors; return the file of each tensor."""
    files_by_name: dict[str, str] = {}
    shards = sorted({*source.tensor_files.values()})
    for number, shard in enumerate(shards, 1):
        names = [
            name
            for name, file in source.tensor_files.items()
            if file == shard and name not in replaced
        ]
        out = shard if len(shards) > 1 else f"model-{number:05d}-of-00002.safetensors"
        out = f"target-{out}" if out == MTP_SHARD else out
        if not names:
            continue
        if any(name in replaced for name, file in source.tensor_files.items() if file == shard):
            tensors = load_file(source.directory / shard)
            save_file(
                {name: tensors[name] for name in names}, directory / out, metadata={"format": "pt"}
            )
        else:
            shutil.copy2(source.directory / shard, directory / out)
        files_by_name |= dict.fromkeys(names, out)
    return files_by_name


def write_index(directory: Path, files: dict[str, str]) -> None:
    """Write the index of the file that each tensor is in, which transformers and engines read."""
    size = 0
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            # A file is the length of its header in 8 bytes, the header, and the tensors without
            # gaps.
            size += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    write_json(
        directory / INDEX_FILE,
        {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))},
    )


def add_mtp_layer(config: dict[str, Any]) -> dict[str, Any]:
    """Return the target's configuration with one MTP layer, under the keys of engines and
    transformers, and its kind if layers have kinds."""
    text = config.get("text_config", config)
    text |= {"num_nextn_predict_layers": 1, **mtp_layer_types(text)}
    if str(text.get("model_type")).startswith("qwen3_5"):
        text["mtp_num_hidden_layers"] = 1
    return config
