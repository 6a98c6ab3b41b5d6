"""The layouts that TensorRT-LLM's converters read: Medusa's and ReDrafter's. It reads EAGLE-3 in the flat layout.

Sizes: H width of the target, V its vocabulary, L residual blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import UserError

from .layout import DrafterCheckpoint, DrafterFiles, ExpectedTensors, Finding, Layout, Shape, write_json, write_tensors
from .medusa import OriginalMedusa
from .targets import TargetFiles
from .vocabulary import add_maps

REDRAFTER_CLASS = "spectrain.experimental.redrafter.drafter.Redrafter"
MEDUSA_KEYS = {"num_medusa_heads": "medusa_num_heads"}
"""Keys of TensorRT-LLM's config.json -> the authors'."""


class TensorRtMedusa(OriginalMedusa):
    """The authors' tensors, also as `medusa_lm_head.pt`, which TensorRT-LLM unpickles, and its key for the number of heads.

    Reading takes the safetensors file that is written beside it.
    """

    title = "Medusa, TensorRT-LLM's layout"
    pickled_names = ("medusa_lm_head.pt",)

    def matches_files(self, files: DrafterFiles) -> bool:
        return "num_medusa_heads" in files.config and not super().matches_files(files)

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        return super().expected_tensors(rename_keys(files))

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        return super().read(rename_keys(files), target)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(rename_keys(files))

    def write(self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path) -> None:
        super().write(drafter, target, directory)
        files = DrafterFiles.from_directory(directory)
        names = {other: name for name, other in MEDUSA_KEYS.items()}
        write_json(directory / "config.json", {names.get(key, key): value for key, value in files.config.items()})
        torch.save(files.tensors, directory / self.pickled_names[0])


def rename_keys(files: DrafterFiles) -> DrafterFiles:
    """Return the files with TensorRT-LLM's keys translated into the authors'."""
    return replace(files, config={MEDUSA_KEYS.get(key, key): value for key, value in files.config.items()})


class TensorRtRedrafter(Layout):
    """ReDrafter's authors' layout, from which TensorRT-LLM converts: a linear cell, and blocks over [target state; cell state].

    Spectrain's blocks read [cell state; target state], and its cell's bias belongs to `rnn_w` instead of `rnn_u`.
    """

    title = "ReDrafter, TensorRT-LLM's layout"

    @property
    def covers(self) -> tuple[str, ...]:
        return ("vocab_size", "num_blocks", "head_rank", "cell")

    def matches_files(self, files: DrafterFiles) -> bool:
        return "num_draft_layers" in files.config and "exit_dim" in files.config

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        width, count = int(files.config["hidden_size"]), int(files.config["num_draft_layers"])
        shapes: dict[str, Shape] = {"rnn_u.weight": (width, width), "rnn_u.bias": (width,), "rnn_w.weight": (width, width)}
        for number in range(count):
            shapes |= {f"lm_head.{number}.linear.weight": (2 * width, 2 * width), f"lm_head.{number}.linear.bias": (2 * width,)}
        return ExpectedTensors({**shapes, f"lm_head.{count}.weight": (None, 2 * width)})

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        config, tensors, metadata = files.config, files.tensors, files.read_metadata()
        count, width = int(config["num_draft_layers"]), int(config["hidden_size"])
        if config["exit_dim"] != 2 * width:
            raise UserError(
                f"exit_dim={config['exit_dim']}: the blocks of drafter=redrafter are {2 * width} wide, twice the target's width"
            )
        if not config.get("rnn"):
            raise UserError("rnn=false: drafter=redrafter has a recurrent cell, and these files sum embeddings instead")
        native: dict[str, Tensor] = {
            "rnn_u.weight": tensors["rnn_u.weight"],
            "rnn_w.weight": tensors["rnn_w.weight"],
            "rnn_w.bias": tensors["rnn_u.bias"],
            "lm_head.weight": swap_halves(tensors[f"lm_head.{count}.weight"], 1),
        }
        for number in range(count):
            weight, bias = (tensors[f"lm_head.{number}.linear.{kind}"] for kind in ("weight", "bias"))
            native[f"blocks.{number}.linear.weight"] = swap_halves(weight, 0, 1)
            native[f"blocks.{number}.linear.bias"] = swap_halves(bias, 0)
        rows = len(native["lm_head.weight"])
        add_maps(native, rows, rows)
        settings = {"num_blocks": count, "vocab_size": rows, "cell": "linear"}
        drafter: dict[str, Any] = {"_target_": REDRAFTER_CLASS, **metadata.drafter, **settings}
        return DrafterCheckpoint(drafter, native, metadata.target, description=metadata.description)

    def write(self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path) -> None:
        if drafter.drafter.get("cell") != "linear":
            raise UserError("drafter.cell=silu: TensorRT-LLM's cell has no SiLU; train with drafter.cell=linear")
        tensors = drafter.expand_heads().tensors
        rows, vocab = len(tensors["d2t"]), len(tensors["t2d"])
        if rows < vocab:
            raise UserError(
                f"d2t: it drafts {rows} of {vocab} tokens, and TensorRT-LLM has no map; train with drafter.vocab_size={vocab}"
            )
        width, count = len(tensors["rnn_w.bias"]), sum(name.endswith("linear.bias") for name in tensors)
        renamed = {
            "rnn_u.weight": tensors["rnn_u.weight"],
            "rnn_u.bias": tensors["rnn_w.bias"],
            "rnn_w.weight": tensors["rnn_w.weight"],
            f"lm_head.{count}.weight": swap_halves(tensors["lm_head.weight"], 1),
        }
        for number in range(count):
            weight, bias = (tensors[f"blocks.{number}.linear.{kind}"] for kind in ("weight", "bias"))
            renamed[f"lm_head.{number}.linear.weight"] = swap_halves(weight, 0, 1)
            renamed[f"lm_head.{number}.linear.bias"] = swap_halves(bias, 0)
        config = {"hidden_size": width, "exit_dim": 2 * width, "num_draft_layers": count, "rnn": True}
        write_json(directory / "config.json", config)
        write_tensors(directory / "model.safetensors", renamed)


def swap_halves(tensor: Tensor, *dims: int) -> Tensor:
    """Exchange the two halves of a tensor along dimensions."""
    for dim in dims:
        tensor = torch.cat(tensor.chunk(2, dim=dim)[::-1], dim=dim)
    return tensor
