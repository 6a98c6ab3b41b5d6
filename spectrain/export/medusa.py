"""The layouts of Medusa by its authors (FasterDecoding) and vLLM. Sizes: H width of the target, V its vocabulary, K heads, L
blocks a head.

The authors' tensors are `{head}.{block}.linear.weight` and `.bias`, then the head's output layer as `{head}.{L}.weight`.
Version 2 lacks the latter: every head ends in the target's own output layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import UserError

from .layout import DrafterCheckpoint, DrafterFiles, ExpectedTensors, Finding, Layout, write_json, write_tensors
from .serving import serve_vllm
from .targets import TargetFiles

MEDUSA_CLASS = "spectrain.drafters.medusa.Medusa"


class OriginalMedusa(Layout):
    """The authors' layout."""

    title = "Medusa, original layout"

    def matches_files(self, files: DrafterFiles) -> bool:
        return "medusa_num_heads" in files.config

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        tensors = self._strip_prefix(files)
        heads, layers = int(files.config["medusa_num_heads"]), int(files.config.get("medusa_num_layers", 1))
        width = head_width(tensors)
        shapes: dict[str, tuple[int | None, ...]] = {}
        for head in range(heads):
            shapes |= {f"{head}.{layer}.linear.weight": (width, width) for layer in range(layers)}
            shapes |= {f"{head}.{layer}.linear.bias": (width,) for layer in range(layers)}
            if not self._shares_head(files):
                rows = tensors[f"0.{layers}.weight"].shape[0] if f"0.{layers}.weight" in tensors else None
                shapes[f"{head}.{layers}.weight"] = (rows, width)
        prefix = "medusa_heads." if any(name.startswith("medusa_heads.") for name in files.tensors) else ""
        return ExpectedTensors({prefix + name: shape for name, shape in shapes.items()})

    def _strip_prefix(self, files: DrafterFiles) -> dict[str, Tensor]:
        return {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in files.tensors.items()}

    def _shares_head(self, files: DrafterFiles) -> bool:
        return str(files.config.get("version", "1")) == "2"

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        tensors, config = self._strip_prefix(files), files.config
        heads, layers = int(config["medusa_num_heads"]), int(config.get("medusa_num_layers", 1))
        shared = None
        if self._shares_head(files):
            if target is None:
                raise UserError(
                    f"{files.directory}: 0.{layers}.weight is missing, because heads of version 2 end in the target's "
                    "output layer; give --target"
                )
            shared = target.load_head()
        native = {}
        for head in range(heads):
            for layer in range(layers):
                for kind in ("weight", "bias"):
                    native[f"heads.{head}.blocks.{layer}.linear.{kind}"] = tensors[f"{head}.{layer}.linear.{kind}"]
            head_weight = (
                tensors[f"{head}.{layers}.weight"]
                if shared is None
                else shared.to(native["heads.0.blocks.0.linear.weight"].dtype, copy=True)
            )
            native[f"heads.{head}.lm_head.weight"] = head_weight
        return medusa_checkpoint(files, native, heads, layers, None, config.get("base_model_name_or_path"))

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        config, tensors = files.config, self._strip_prefix(files)
        heads = {int(name.split(".")[0]) for name in tensors if name.split(".")[0].isdigit()}
        if heads and len(heads) != config["medusa_num_heads"]:
            yield Finding(
                "head-count", "error", f"medusa_num_heads={config['medusa_num_heads']} and there are {len(heads)} heads",
                "the original loader silently leaves missing heads at their initialization",
                f"write medusa_num_heads={len(heads)}, or add the heads",
            )  # fmt: skip

    def write(self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path) -> None:
        tensors, settings = drafter.tensors, drafter.drafter
        rows, vocab = len(tensors["d2t"]), len(tensors["t2d"])
        if rows != vocab:
            raise UserError(
                f"d2t: the heads draft {rows} of {vocab} tokens, and the original layout has no token map; use --to vllm, or "
                f"train with drafter.vocab_size={vocab}"
            )
        heads, layers = settings["num_heads"], settings["num_layers"]
        renamed = {}
        for head in range(heads):
            for layer in range(layers):
                for kind in ("weight", "bias"):
                    renamed[f"{head}.{layer}.linear.{kind}"] = tensors[f"heads.{head}.blocks.{layer}.linear.{kind}"]
            renamed[f"{head}.{layers}.weight"] = tensors[f"heads.{head}.lm_head.weight"]
        config = {
            "medusa_num_heads": heads,
            "medusa_num_layers": layers,
            "base_model_name_or_path": target.engine_path if target is not None else drafter.target,
        }
        write_json(directory / "config.json", config)
        write_tensors(directory / "medusa_lm_head.safetensors", renamed)


class VllmMedusa(Layout):
    """vLLM's layout: `blocks.{head}.layers.{block}` and `lm_heads.{head}`, or a single `lm_head` for all heads.

    vLLM (0.32) supports a draft vocabulary, with ids in `token_map`, only for the single head; separate heads need all V rows.
    Spectrain's heads are filled up with the mean of their rows. Its logit is the mean of the others and so never the largest:
    vLLM drafts what spectrain drafts. `d2t`, which vLLM ignores, holds which rows were trained.
    """

    title = "Medusa, vLLM layout"

    def matches_files(self, files: DrafterFiles) -> bool:
        return files.config.get("model_type") == "medusa" or "MedusaModel" in (files.config.get("architectures") or [])

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        config = files.config
        width, heads, layers = config["hidden_size"], config["num_heads"], config["num_hidden_layers"]
        rows = map_rows = config.get("truncated_vocab_size") or config["vocab_size"]
        if "d2t" in files.tensors:
            rows = config["vocab_size"]
        shapes: dict[str, tuple[int | None, ...]] = {}
        for head in range(heads):
            shapes |= {f"blocks.{head}.layers.{layer}.weight": (width, width) for layer in range(layers)}
            if config.get("medusa_fc_bias"):
                shapes |= {f"blocks.{head}.layers.{layer}.bias": (width,) for layer in range(layers)}
            if not config.get("original_lm_head"):
                shapes[f"lm_heads.{head}.weight"] = (rows, width)
        if config.get("original_lm_head"):
            shapes["lm_heads.0.weight" if "lm_heads.0.weight" in files.tensors else "lm_head.weight"] = (rows, width)
        if map_rows < config["vocab_size"]:
            shapes["token_map"] = (map_rows,)
        originals = any(re.match(r"(medusa_heads\.)?\d+\.\d+\.", name) for name in files.tensors)
        return (
            ExpectedTensors(shapes, {"d2t": (None,)})
            if not originals
            else OriginalMedusa().expected_tensors(as_original(files))
        )

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        if any(re.match(r"(medusa_heads\.)?\d+\.\d+\.", name) for name in files.tensors):
            return OriginalMedusa().read(as_original(files), target)
        config, tensors = files.config, {n.removeprefix("medusa_heads."): t for n, t in files.tensors.items()}
        if config.get("logit_scale", 1.0) != 1.0:
            raise UserError(f"{files.directory}: logit_scale={config['logit_scale']}: heads of drafter=medusa have no scale")
        heads, layers, width = config["num_heads"], config["num_hidden_layers"], config["hidden_size"]
        shared = tensors.get("lm_head.weight", tensors.get("lm_heads.0.weight")) if config.get("original_lm_head") else None
        native = {}
        for head in range(heads):
            for layer in range(layers):
                weight = tensors[f"blocks.{head}.layers.{layer}.weight"]
                native[f"heads.{head}.blocks.{layer}.linear.weight"] = weight
                bias = tensors.get(f"blocks.{head}.layers.{layer}.bias")
                native[f"heads.{head}.blocks.{layer}.linear.bias"] = weight.new_zeros(width) if bias is None else bias
            head_weight = tensors[f"lm_heads.{head}.weight"] if shared is None else shared.clone()
            native[f"heads.{head}.lm_head.weight"] = (
                head_weight if "d2t" not in tensors else head_weight[target_ids(tensors["d2t"])]
            )
        if "d2t" in tensors:
            native["d2t"] = tensors["d2t"]
        elif "token_map" in tensors:
            ids = tensors["token_map"].to(torch.int64)
            native["d2t"] = ids - torch.arange(len(ids))
        return medusa_checkpoint(files, native, heads, layers, int(config["vocab_size"]), None)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        config, tensors = files.config, files.tensors
        for key in config:
            remapped = re.search(r"num.*(heads|layers)", key) and key not in ("num_heads", "num_hidden_layers")
            if remapped:
                yield Finding(
                    "num-attention-heads" if "attention" in key else "count-key", "error", f"config.json holds {key}",
                    "vLLM reads every key with num and heads or layers as the number of Medusa heads or blocks",
                    f"delete {key}",
                )  # fmt: skip
        if any(name.endswith(".bias") for name in tensors) and not config.get("medusa_fc_bias"):
            yield Finding(
                "medusa-bias", "error", "medusa_fc_bias is not true and the blocks have biases",
                "vLLM silently drops them", 'write "medusa_fc_bias": true',
            )  # fmt: skip
        rows = config.get("truncated_vocab_size") or config.get("vocab_size")
        if not config.get("original_lm_head") and rows != config.get("vocab_size"):
            yield Finding(
                "short-heads", "error", f"truncated_vocab_size={rows} is below vocab_size and every head has an output layer",
                "vLLM allocates vocab_size rows for such heads and stops while it loads them",
                "fill them up: spectrain convert DIR OUT --to vllm", is_repairable=True,
            )  # fmt: skip
        ids = tensors.get("token_map")
        if ids is not None and (ids.is_floating_point() or bool((ids < 0).any() or (ids >= config["vocab_size"]).any())):
            yield Finding(
                "token-map-range", "error", "token_map holds ids outside the vocabulary", "vLLM fails while it decodes",
                "write the target's id of every row of lm_heads",
            )  # fmt: skip
        elif ids is not None and len(ids.unique()) < len(ids):
            yield Finding(
                "token-map-offsets", "error",
                "token_map holds the same id twice; perhaps it holds offsets, as EAGLE-3's maps do",
                "drafts are other tokens than intended", "write the target's id of every row of lm_heads",
            )  # fmt: skip
        if ids is not None and rows == config.get("vocab_size"):
            yield Finding(
                "truncated-vocab-size", "error", "the files hold token_map, but truncated_vocab_size is not below vocab_size",
                "vLLM ignores the map", f'write "truncated_vocab_size": {len(ids)}',
            )  # fmt: skip

    def write(self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path) -> None:
        tensors, settings = drafter.tensors, drafter.drafter
        rows, vocab = len(tensors["d2t"]), len(tensors["t2d"])
        heads, layers = settings["num_heads"], settings["num_layers"]
        renamed = {}
        for head in range(heads):
            for layer in range(layers):
                for kind in ("weight", "bias"):
                    renamed[f"blocks.{head}.layers.{layer}.{kind}"] = tensors[f"heads.{head}.blocks.{layer}.linear.{kind}"]
            renamed[f"lm_heads.{head}.weight"] = fill_rows(tensors[f"heads.{head}.lm_head.weight"], tensors["d2t"], vocab)
        if rows < vocab:
            renamed["d2t"] = tensors["d2t"]
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": head_width(renamed),
            "vocab_size": vocab,
            "truncated_vocab_size": vocab,
            "num_heads": heads,
            "num_hidden_layers": layers,
            "medusa_fc_bias": True,
            "original_lm_head": False,
            "logit_scale": 1.0,
            "torch_dtype": drafter.dtype,
        }
        write_json(directory / "config.json", config)
        write_tensors(directory / "model.safetensors", renamed)

    def serve_commands(self, drafter: DrafterCheckpoint, files: TargetFiles, target: str, drafter_path: str) -> dict[str, str]:
        heads = drafter.drafter["num_heads"]
        return {"vLLM": serve_vllm(target, {"method": "medusa", "model": drafter_path, "num_speculative_tokens": heads})}


def as_original(files: DrafterFiles) -> DrafterFiles:
    """Return the files of vLLM's config.json with tensors under their authors' names, which vLLM reads as well."""
    config = {"medusa_num_heads": files.config["num_heads"], "medusa_num_layers": files.config["num_hidden_layers"]}
    return DrafterFiles(files.directory, config, files.tensors)


def target_ids(d2t: Tensor) -> Tensor:
    """Return the target's id of every draft token."""
    return d2t + torch.arange(len(d2t))


def fill_rows(head: Tensor, d2t: Tensor, vocab: int) -> Tensor:
    """Return an output layer of all V rows that drafts the same tokens: the other rows hold the mean of the rows."""
    if len(head) == vocab:
        return head
    full = head.float().mean(0).to(head.dtype).repeat(vocab, 1)
    full[target_ids(d2t)] = head
    return full


def head_width(tensors: dict[str, Tensor]) -> int:
    """Return H, from any of the blocks."""
    return next((tensor.shape[-1] for name, tensor in tensors.items() if name.endswith("weight") and tensor.dim() == 2), 0)


def medusa_checkpoint(
    files: DrafterFiles, tensors: dict[str, Tensor], heads: int, layers: int, vocab: int | None, target: str | None
) -> DrafterCheckpoint:
    """Return spectrain's drafter of these tensors; without d2t the heads draft every token."""
    rows = tensors["heads.0.lm_head.weight"].shape[0]
    vocab = vocab or rows
    tensors.setdefault("d2t", torch.zeros(rows, dtype=torch.int64))
    ids = target_ids(tensors["d2t"])
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    metadata = files.read_metadata()
    drafter: dict[str, Any] = {"_target_": MEDUSA_CLASS, **metadata.drafter}
    drafter |= {"num_heads": heads, "num_layers": layers, "vocab_size": rows}
    reference = metadata.target if target is None else target
    return DrafterCheckpoint(drafter, tensors, reference, description=metadata.description)
