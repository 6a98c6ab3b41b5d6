"""The layouts of Medusa by its authors (FasterDecoding), vLLM and TensorRT-LLM. Sizes: H width of
the target, V its vocabulary, K heads, L blocks a head.

The authors' tensors are `{head}.{block}.linear.weight` and `.bias`, then the head's output layer as
`{head}.{L}.weight`. Version 2 lacks the latter: every head ends in the target's own output layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .container import Finding
from .drafter_files import DrafterFiles, write_json, write_tensors
from .layout import DrafterCheckpoint, ExpectedTensors, Layout, MissingTarget, make_checkpoint
from .targets import TargetFiles
from .vocabulary import add_maps, check_vocabulary, target_ids

MAX_COUNT = 64
"""Heads, and blocks of a head, that drafter=medusa has at most."""


def name_tensors(heads: int, layers: int, block_name: str, head_name: str) -> dict[str, str]:
    """Return the file's name of every tensor, by spectrain's name; raise ValueError for counts that
    no drafter has.

    `block_name` is the name of a tensor of a block, `head_name` that of a head's output layer.
    """
    for count in (heads, layers):
        if not 0 <= count <= MAX_COUNT:
            raise ValueError(f"{count} heads or blocks, and there are {MAX_COUNT} of each at most")
    names = {
        f"heads.{head}.blocks.{layer}.linear.{kind}": block_name.format(
            head=head, layer=layer, kind=kind
        )
        for head in range(heads)
        for layer in range(layers)
        for kind in ("weight", "bias")
    }
    return names | {
        f"heads.{head}.lm_head.weight": head_name.format(head=head, layers=layers)
        for head in range(heads)
    }


def original_names(heads: int, layers: int) -> dict[str, str]:
    """Return the authors' name of every tensor, by spectrain's name."""
    return name_tensors(heads, layers, "{head}.{layer}.linear.{kind}", "{head}.{layers}.weight")


def vllm_names(heads: int, layers: int) -> dict[str, str]:
    """Return vLLM's name of every tensor, by spectrain's name."""
    block_name = "blocks.{head}.layers.{layer}.{kind}"
    return name_tensors(heads, layers, block_name, "lm_heads.{head}.weight")


def make_medusa(
    files: DrafterFiles, tensors: dict[str, Tensor], vocab: int | None, target: str | None
) -> DrafterCheckpoint:
    """Return spectrain's drafter of these tensors; without d2t the heads draft every token."""
    rows = len(tensors["heads.0.lm_head.weight"])
    add_maps(tensors, rows, vocab or rows)
    heads, blocks = (
        {name.split(".")[index] for name in tensors if ".blocks." in name} for index in (1, 3)
    )
    settings = {"num_heads": len(heads), "num_layers": len(blocks), "vocab_size": rows}
    drafter = make_checkpoint(files, "medusa", settings, tensors)
    return drafter if target is None else replace(drafter, target=target)


@dataclass(eq=False)
class OriginalMedusa(Layout):
    """The authors' layout, and TensorRT-LLM's, whose config.json has another key for the number of
    heads and which unpickles a copy of the weights.
    """

    title: str = "Medusa, original layout"
    heads_key: str = "medusa_num_heads"
    pickled_names: tuple[str, ...] = ()

    def matches_files(self, files: DrafterFiles) -> bool:
        return self.heads_key in files.config

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        tensors = strip_prefix(files)
        rows = len(tensors.get(f"0.{num_layers(files)}.weight", ())) or None
        width = head_width(tensors)
        prefix = (
            "medusa_heads."
            if any(name.startswith("medusa_heads.") for name in files.tensors)
            else ""
        )
        names = original_names(int(files.config[self.heads_key]), num_layers(files))
        return ExpectedTensors(
            {
                prefix + name: medusa_shape(native, width, rows)
                for native, name in names.items()
                if not (shares_head(files) and native.endswith("lm_head.weight"))
            }
        )

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        tensors = strip_prefix(files)
        if shares_head(files):
            if target is None:
                raise MissingTarget(
                    f"{files.directory}: 0.{num_layers(files)}.weight is missing, because heads "
                    "of version 2 end in the target's output layer; give --target"
                )
            dtype = tensors["0.0.linear.weight"].dtype
            head = target.load_head()
            for number in range(int(files.config[self.heads_key])):
                tensors[f"{number}.{num_layers(files)}.weight"] = head.to(dtype, copy=True)
        names = original_names(int(files.config[self.heads_key]), num_layers(files))
        native = {ours: tensors[name] for ours, name in names.items()}
        return make_medusa(files, native, None, files.config.get("base_model_name_or_path"))

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        config = files.config
        tensors = strip_prefix(files)
        heads = {int(name.split(".")[0]) for name in tensors if name.split(".")[0].isdigit()}
        if heads and len(heads) != config[self.heads_key]:
            yield Finding(
                "head-count",
                "error",
                (f"medusa_num_heads={config[self.heads_key]} and there are {len(heads)} heads"),
                "the original loader silently leaves missing heads at their initialization",
                f"write medusa_num_heads={len(heads)}, or add the heads",
            )

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        tensors = drafter.tensors
        heads = drafter.drafter["num_heads"]
        layers = drafter.drafter["num_layers"]
        rows = len(tensors["d2t"])
        vocab = len(tensors["t2d"])
        if rows != vocab:
            raise UserError(
                f"d2t: the heads draft {rows} of {vocab} tokens, and the original layout has no "
                f"token map; use --to vllm, or train with drafter.vocab_size={vocab}"
            )
        config = {
            self.heads_key: heads,
            "medusa_num_layers": layers,
            "base_model_name_or_path": target.engine_path if target is not None else drafter.target,
        }
        write_json(directory / "config.json", config)
        renamed = {name: tensors[native] for native, name in original_names(heads, layers).items()}
        write_tensors(directory / "medusa_lm_head.safetensors", renamed)
        for name in self.pickled_names:
            torch.save(DrafterFiles.from_directory(directory).tensors, directory / name)


class VllmMedusa(Layout):
    """vLLM's layout: `blocks.{head}.layers.{block}` and `lm_heads.{head}`, or a single `lm_head`
    for all heads.

    vLLM (0.32) supports a draft vocabulary, with ids in `token_map`, only for the single head;
    separate heads need all V rows. Spectrain's heads are filled up with the mean of their rows. Its
    logit is the mean of the others and so never the largest: vLLM drafts what spectrain drafts.
    `d2t`, which vLLM ignores, holds which rows were trained.
    """

    title = "Medusa, vLLM layout"

    def matches_files(self, files: DrafterFiles) -> bool:
        return files.config.get("model_type") == "medusa" or "MedusaModel" in (
            files.config.get("architectures") or []
        )

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        config = files.config
        if has_original_names(files):
            return ORIGINAL_MEDUSA.expected_tensors(as_original(files))
        rows = map_rows = config.get("truncated_vocab_size") or config["vocab_size"]
        if "d2t" in files.tensors:
            rows = config["vocab_size"]
        names = vllm_names(config["num_heads"], config["num_hidden_layers"])
        shapes = {
            name: medusa_shape(native, config["hidden_size"], rows)
            for native, name in names.items()
        }
        if not config.get("medusa_fc_bias"):
            shapes = {name: shape for name, shape in shapes.items() if not name.endswith(".bias")}
        if config.get("original_lm_head"):
            shapes = {
                name: shape for name, shape in shapes.items() if not name.startswith("lm_heads.")
            }
            shared = (
                "lm_heads.0.weight" if "lm_heads.0.weight" in files.tensors else "lm_head.weight"
            )
            shapes[shared] = (rows, config["hidden_size"])
        if map_rows < config["vocab_size"]:
            shapes["token_map"] = (map_rows,)
        return ExpectedTensors(shapes, {"d2t": (None,)})

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        if has_original_names(files):
            return ORIGINAL_MEDUSA.read(as_original(files), target)
        config = files.config
        tensors = {n.removeprefix("medusa_heads."): t for n, t in files.tensors.items()}
        if config.get("logit_scale", 1.0) != 1.0:
            raise UserError(
                f"{files.directory}: logit_scale={config['logit_scale']}: heads of drafter=medusa "
                "have no scale"
            )
        shared = (
            tensors.get("lm_head.weight", tensors.get("lm_heads.0.weight"))
            if config.get("original_lm_head")
            else None
        )
        native: dict[str, Tensor] = {}
        for ours, name in vllm_names(config["num_heads"], config["num_hidden_layers"]).items():
            if ours.endswith("lm_head.weight"):
                head = tensors[name] if shared is None else shared.clone()
                native[ours] = head[target_ids(tensors["d2t"])] if "d2t" in tensors else head
            elif name.endswith(".bias") and name not in tensors:
                native[ours] = native[ours.replace(".bias", ".weight")].new_zeros(
                    config["hidden_size"]
                )
            else:
                native[ours] = tensors[name]
        if "d2t" in tensors:
            native["d2t"] = tensors["d2t"]
        elif "token_map" in tensors:
            ids = tensors["token_map"].to(torch.int64)
            native["d2t"] = ids - torch.arange(len(ids))
        return make_medusa(files, native, int(config["vocab_size"]), None)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        config, tensors = files.config, files.tensors
        for key in config:
            remapped = re.search(r"num.*(heads|layers)", key) and key not in (
                "num_heads",
                "num_hidden_layers",
            )
            if remapped:
                yield Finding(
                    "num-attention-heads" if "attention" in key else "count-key",
                    "error",
                    f"config.json holds {key}",
                    "vLLM reads every key with num and heads or layers as the number of Medusa "
                    "heads or blocks",
                    f"delete {key}",
                )
        if any(name.endswith(".bias") for name in tensors) and not config.get("medusa_fc_bias"):
            yield Finding(
                "medusa-bias",
                "error",
                "medusa_fc_bias is not true and the blocks have biases",
                "vLLM silently drops them",
                'write "medusa_fc_bias": true',
            )
        rows = config.get("truncated_vocab_size") or config.get("vocab_size")
        if not config.get("original_lm_head") and rows != config.get("vocab_size"):
            yield Finding(
                "short-heads",
                "error",
                (
                    f"truncated_vocab_size={rows} is below vocab_size and every head has an "
                    "output layer"
                ),
                "vLLM allocates vocab_size rows for such heads and stops while it loads them",
                "fill them up: spectrain convert DIR OUT --to vllm",
                is_repairable=True,
            )
        if "d2t" in tensors:
            yield from check_vocabulary(int(config["vocab_size"]), {"d2t": tensors["d2t"]})
        ids = tensors.get("token_map")
        if ids is not None and (
            ids.is_floating_point() or bool((ids < 0).any() or (ids >= config["vocab_size"]).any())
        ):
            yield Finding(
                "token-map-range",
                "error",
                "token_map holds ids outside the vocabulary",
                "vLLM fails while it decodes",
                "write the target's id of every row of lm_heads",
            )
        elif ids is not None and len(ids.unique()) < len(ids):
            yield Finding(
                "token-map-offsets",
                "error",
                "token_map holds the same id twice; perhaps it holds offsets, as EAGLE-3's maps do",
                "drafts are other tokens than intended",
                "write the target's id of every row of lm_heads",
            )
        if ids is not None and rows == config.get("vocab_size"):
            yield Finding(
                "truncated-vocab-size",
                "error",
                ("the files hold token_map, but truncated_vocab_size is not below vocab_size"),
                "vLLM ignores the map",
                f'write "truncated_vocab_size": {len(ids)}',
            )

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        tensors = drafter.tensors
        heads = drafter.drafter["num_heads"]
        layers = drafter.drafter["num_layers"]
        vocab = len(tensors["t2d"])
        names = vllm_names(heads, layers)
        renamed = {
            name: fill_rows(tensors[native], tensors["d2t"], vocab)
            if native.endswith("lm_head.weight")
            else tensors[native]
            for native, name in names.items()
        }
        if len(tensors["d2t"]) < vocab:
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

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"vllm": DrafterLaunch("medusa", path, drafter.drafter["num_heads"])}


ORIGINAL_MEDUSA = OriginalMedusa()
TENSORRT_MEDUSA = OriginalMedusa(
    "Medusa, TensorRT-LLM's layout", "num_medusa_heads", ("medusa_lm_head.pt",)
)
VLLM_MEDUSA = VllmMedusa()


def strip_prefix(files: DrafterFiles) -> dict[str, Tensor]:
    """Return the authors' tensors without the prefix that some files have."""
    return {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in files.tensors.items()}


def num_layers(files: DrafterFiles) -> int:
    """Return the number of blocks a head in the authors' config.json."""
    return int(files.config.get("medusa_num_layers", 1))


def shares_head(files: DrafterFiles) -> bool:
    """Tell whether the heads of the authors' files end in the target's own output layer."""
    return str(files.config.get("version", "1")) == "2"


def has_original_names(files: DrafterFiles) -> bool:
    """Tell whether the tensors have their authors' names, which vLLM reads as well."""
    return any(re.match(r"(medusa_heads\.)?\d+\.\d+\.", name) for name in files.tensors)


def as_original(files: DrafterFiles) -> DrafterFiles:
    """Return the files with vLLM's config.json translated into the authors'."""
    config = {
        "medusa_num_heads": files.config["num_heads"],
        "medusa_num_layers": files.config["num_hidden_layers"],
    }
    return replace(files, config=config)


def medusa_shape(name: str, width: int, rows: int | None) -> tuple[int | None, ...]:
    """Return the shape of a tensor, by spectrain's name."""
    if name.endswith(".bias"):
        return (width,)
    return (rows if name.endswith("lm_head.weight") else width, width)


def fill_rows(head: Tensor, d2t: Tensor, vocab: int) -> Tensor:
    """Return an output layer of all V rows that drafts the same tokens: the other rows hold the
    mean of the rows.
    """
    if len(head) == vocab:
        return head
    full = head.float().mean(0).to(head.dtype).repeat(vocab, 1)
    full[target_ids(d2t)] = head
    return full


def head_width(tensors: dict[str, Tensor]) -> int:
    """Return H, from any of the blocks."""
    return next(
        (
            tensor.shape[-1]
            for name, tensor in tensors.items()
            if name.endswith("weight") and tensor.dim() == 2
        ),
        0,
    )
