"""ReDrafter's layout, from which TensorRT-LLM's converter reads. Sizes: H width of the target, V
its vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.export.drafter_files import DrafterFiles, write_json, write_tensors
from spectrain.export.layout import (
    DrafterCheckpoint,
    ExpectedTensors,
    Layout,
    Shape,
    make_checkpoint,
)
from spectrain.export.targets import TargetFiles
from spectrain.export.vocabulary import add_maps


class TensorRtRedrafter(Layout):
    """ReDrafter's authors' layout, from which TensorRT-LLM converts: a linear cell, and blocks over
    [target state; cell state].

    Spectrain's blocks read [cell state; target state], and its cell's bias belongs to `rnn_w`
    instead of `rnn_u`.
    """

    title = "ReDrafter, TensorRT-LLM's layout"

    @property
    def covers(self) -> tuple[str, ...]:
        return ("vocab_size", "num_blocks", "head_rank", "cell")

    def matches_files(self, files: DrafterFiles) -> bool:
        return "num_draft_layers" in files.config and "exit_dim" in files.config

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        width = int(files.config["hidden_size"])
        count = int(files.config["num_draft_layers"])
        shapes: dict[str, Shape] = {
            "rnn_u.weight": (width, width),
            "rnn_u.bias": (width,),
            "rnn_w.weight": (width, width),
        }
        for number in range(count):
            shapes |= {
                f"lm_head.{number}.linear.weight": (2 * width, 2 * width),
                f"lm_head.{number}.linear.bias": (2 * width,),
            }
        return ExpectedTensors({**shapes, f"lm_head.{count}.weight": (None, 2 * width)})

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        config = files.config
        tensors = files.tensors
        count = int(config["num_draft_layers"])
        width = int(config["hidden_size"])
        if config["exit_dim"] != 2 * width:
            raise UserError(
                f"exit_dim={config['exit_dim']}: the blocks of drafter=redrafter are {2 * width} "
                "wide, twice the target's width"
            )
        if not config.get("rnn"):
            raise UserError(
                "rnn=false: drafter=redrafter has a recurrent cell, and these files sum "
                "embeddings instead"
            )
        native: dict[str, Tensor] = {
            "rnn_u.weight": tensors["rnn_u.weight"],
            "rnn_w.weight": tensors["rnn_w.weight"],
            "rnn_w.bias": tensors["rnn_u.bias"],
            "lm_head.weight": swap_halves(tensors[f"lm_head.{count}.weight"], 1),
        }
        for number in range(count):
            weight, bias = (
                tensors[f"lm_head.{number}.linear.{kind}"] for kind in ("weight", "bias")
            )
            native[f"blocks.{number}.linear.weight"] = swap_halves(weight, 0, 1)
            native[f"blocks.{number}.linear.bias"] = swap_halves(bias, 0)
        rows = len(native["lm_head.weight"])
        add_maps(native, rows, rows)
        settings = {"num_blocks": count, "vocab_size": rows, "cell": "linear"}
        return make_checkpoint(files, "redrafter", settings, native)

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        if drafter.drafter.get("cell") != "linear":
            raise UserError(
                "drafter.cell=silu: TensorRT-LLM's cell has no SiLU; train with drafter.cell=linear"
            )
        tensors = drafter.expand_heads().tensors
        rows = len(tensors["d2t"])
        vocab = len(tensors["t2d"])
        if rows < vocab:
            raise UserError(
                f"d2t: it drafts {rows} of {vocab} tokens, and TensorRT-LLM has no map; train "
                f"with drafter.vocab_size={vocab}"
            )
        width = len(tensors["rnn_w.bias"])
        count = sum(name.endswith("linear.bias") for name in tensors)
        renamed = {
            "rnn_u.weight": tensors["rnn_u.weight"],
            "rnn_u.bias": tensors["rnn_w.bias"],
            "rnn_w.weight": tensors["rnn_w.weight"],
            f"lm_head.{count}.weight": swap_halves(tensors["lm_head.weight"], 1),
        }
        for number in range(count):
            weight, bias = (
                tensors[f"blocks.{number}.linear.{kind}"] for kind in ("weight", "bias")
            )
            renamed[f"lm_head.{number}.linear.weight"] = swap_halves(weight, 0, 1)
            renamed[f"lm_head.{number}.linear.bias"] = swap_halves(bias, 0)
        config = {
            "hidden_size": width,
            "exit_dim": 2 * width,
            "num_draft_layers": count,
            "rnn": True,
        }
        write_json(directory / "config.json", config)
        write_tensors(directory / "model.safetensors", renamed)


TENSORRT_REDRAFTER = TensorRtRedrafter()


def swap_halves(tensor: Tensor, *dims: int) -> Tensor:
    """Exchange the two halves of a tensor along dimensions."""
    for dim in dims:
        tensor = torch.cat(tensor.chunk(2, dim=dim)[::-1], dim=dim)
    return tensor
