"""A copy of the target's own checkpoint with its MTP layers replaced, or with one added: what engines load as the target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.errors import UserError
from spectrain.files import PICKLED
from spectrain.models.mtp_files import FUSED, INDEX, LAYOUTS, READERS, Checkpoint, MtpLayout, layout_of, mtp_kinds

from .huggingface import generate
from .layout import Expected, Files, Layout, Portable, need, write_json
from .serving import serve_sglang_mtp, serve_vllm
from .targets import TargetFiles

MTP = "spectrain.drafters.mtp.Mtp"
SHARD = "model-mtp.safetensors"
LEFT = ("README.md", ".gitattributes", INDEX, "config.json")  # of the target's files, those that are not copied


class Stitched(Layout):
    """The target's files with the trained layer in the place of every MTP layer; new tensors lie in a shard of their own."""

    name = "mtp"
    title = "target with MTP layers"
    families = ("mtp",)
    holds_target = True

    def recognises(self, files: Files) -> bool:
        named = any(
            name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in files.config.get("architectures") or []
        )
        return named and layout_of(files.tensors) is not None

    def expected(self, files: Files) -> Expected:
        return Expected({name: tuple(tensor.shape) for name, tensor in files.tensors.items()})

    def read(self, files: Files, target: TargetFiles | None) -> Portable:
        kept = files.kept()
        checkpoint = Checkpoint(files.directory)
        layout = layout_of(files.tensors)
        assert layout is not None
        prefix = checkpoint.prefixes(layout)[0]
        tensors = {name.removeprefix(prefix): files.tensors[name] for name in checkpoint.of_layer(layout, prefix)}
        drafter: dict[str, Any] = {"_target_": MTP, **kept.drafter, "start": "new"}
        said = kept.said or str(files.directory)
        return Portable(drafter, layout.ours(tensors), said, description=kept.description)

    def write(self, drafter: Portable, target: TargetFiles | None, directory: Path) -> None:
        target = need(target, "its checkpoint is what the layer is stitched into")
        source = Checkpoint(target.directory)
        kind = str(target.whole_config.model_type)
        layout = source.layout or next((one for one in LAYOUTS if READERS.get(kind) == one.title), None)
        if layout is None:
            raise UserError(
                f"format=mtp: no engine drafts with MTP layers for {kind} models, and {target.said} ships none; use "
                "recipe=eagle3"
            )
        found = stitched(drafter.tensors, source, layout, target)
        for path in sorted(source.directory.iterdir()):
            if path.is_file() and path.name not in LEFT and path.suffix not in (".safetensors", ".gguf", *PICKLED):
                shutil.copy2(path, directory / path.name)
        files = copied_without(source, {*found}, directory)
        save_file({name: found[name].contiguous() for name in sorted(found)}, directory / SHARD, metadata={"format": "pt"})
        write_index(directory, files | dict.fromkeys(found, SHARD))
        config = json.loads((source.directory / "config.json").read_text())
        write_json(directory / "config.json", config if source.layout else with_layer(config))

    def serve(self, drafter: Portable, files: TargetFiles, target: str, place: str) -> dict[str, str]:
        steps = int(drafter.drafter.get("num_steps", 3))
        return {
            "vLLM": serve_vllm(place, {"method": "mtp", "num_speculative_tokens": steps}),
            "SGLang": serve_sglang_mtp(place, steps),
            "transformers": generate(place, "use_mtp=True"),
        }


def stitched(tensors: dict[str, Tensor], source: Checkpoint, layout: MtpLayout, target: TargetFiles) -> dict[str, Tensor]:
    """The trained layer's tensors by the names and in the types that the checkpoint has, or would have, for each MTP layer."""
    prefixes = source.prefixes(layout) or [layout.prefix.format(layer=target.num_layers, index=0)]
    beside = [name for name in source.files if name.startswith(prefixes[0])] or [*source.files]
    theirs = layout.theirs(tensors, by_expert=not any(name.endswith(FUSED) for name in beside))
    found = {prefix + name: tensor for prefix in prefixes for name, tensor in theirs.items()}
    if source.layout is not None:
        lacking = sorted({*source.of_layer(layout, prefixes[0])} ^ {prefixes[0] + name for name in theirs})
        if lacking:
            raise UserError(
                f"format=mtp: {target.said} and the drafter differ in {lacking[0]}; it was trained for another target"
            )
    return {name: tensor.to(kind_of(name, source)) for name, tensor in found.items()}


def kind_of(name: str, source: Checkpoint) -> torch.dtype:
    """In which type the checkpoint holds a tensor, or would: that of one called alike, or of the attention's output."""
    if name in source.files:
        return source.tensor(name).dtype
    alike = [".".join(name.split(".")[-2:]), "o_proj.weight", "norm.weight"]
    found = next(known for ending in alike for known in source.files if known.endswith(f".{ending}"))
    return source.tensor(found).dtype


def copied_without(source: Checkpoint, replaced: set[str], directory: Path) -> dict[str, str]:
    """Copy the checkpoint's shards, those that hold what is replaced without it; which file each tensor is in."""
    kept: dict[str, str] = {}
    shards = sorted({*source.files.values()})
    for number, shard in enumerate(shards, 1):
        names = [name for name, file in source.files.items() if file == shard and name not in replaced]
        out = shard if len(shards) > 1 else f"model-{number:05d}-of-00002.safetensors"
        out = f"target-{out}" if out == SHARD else out
        if not names:
            continue
        if any(name in replaced for name, file in source.files.items() if file == shard):
            tensors = load_file(source.directory / shard)
            save_file({name: tensors[name] for name in names}, directory / out, metadata={"format": "pt"})
        else:
            shutil.copy2(source.directory / shard, directory / out)
        kept |= dict.fromkeys(names, out)
    return kept


def write_index(directory: Path, files: dict[str, str]) -> None:
    """Which file every tensor is in, as transformers and engines read it."""
    size = 0
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                part = file.get_slice(name)
                size += torch.Size(part.get_shape()).numel() * SIZES[part.get_dtype()]
    write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))})


SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1,
         "BOOL": 1}  # fmt: skip


def with_layer(config: dict[str, Any]) -> dict[str, Any]:
    """The target's configuration, which says that there is one MTP layer, by the names that engines and transformers know, and
    of what kind it is where layers are of several."""
    text = config.get("text_config", config)
    text |= {"num_nextn_predict_layers": 1, **mtp_kinds(text)}
    if str(text.get("model_type")).startswith("qwen3_5"):
        text["mtp_num_hidden_layers"] = 1
    return config
