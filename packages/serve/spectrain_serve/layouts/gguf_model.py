"""The GGUF layout of complete models, Llama, Qwen2 and Qwen3: distilled drafters (--spec-type
draft-simple), and targets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spectrain.errors import UserError, first_line
from spectrain.export.container import Finding
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.fused_config import HEAD
from spectrain.export.huggingface import MODEL_PREFIX, STOP_HEAD_PREFIX
from spectrain.export.layout import (
    CHAIN_TOKENS,
    DrafterCheckpoint,
    ExpectedTensors,
    Interpretation,
    Layout,
    Shape,
    make_checkpoint,
    require_target,
)
from spectrain.export.targets import BUNDLED_TARGETS, TargetFiles
from spectrain.files import make_folder_once
from spectrain.models.checked_tensors import has_finite_values, open_tensors
from spectrain.models.checkpoint_files import list_weight_files
from spectrain.models.published import cache_directory
from spectrain.servers.commands import DrafterLaunch

from ..engines.llamacpp_command import DRAFTER_FILE, TARGET_FILE
from .gguf_file import TensorSource, write_gguf
from .gguf_layout import (
    ROPE_FACTORS,
    Gguf,
    convert_heads,
    find_foreign_rope,
    layer_config,
    rope_tensors,
    size_keys,
    unpermuted_interpretation,
)
from .gguf_tokenizer import tokenizer_keys

MODEL_ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""Model type, in transformers and in GGUF -> the name of its tensors' table in the package gguf."""
INTERLEAVED_TYPES = ("llama",)
"""Model types whose queries and keys llama.cpp rotates in pairs of neighbours."""
UNSUPPORTED_KEYS = {
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
}
"""Key of a configuration -> the only value of it that llama.cpp's classes have."""


class GgufModel(Layout):
    """A complete model with the target's tokenizer, which drafts one token per forward."""

    title = "draft model, GGUF"
    container: Gguf = Gguf(None)  # its architecture is that of the model

    def matches_files(self, files: DrafterFiles) -> bool:
        return files.config.get("general.architecture") in MODEL_ARCHITECTURES

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        config = model_config(files)
        shapes = list_shapes(config)
        names = map_names(config, shapes)
        optional = {names[HEAD]: shapes.pop(HEAD)} if config["tie_word_embeddings"] else {}
        return ExpectedTensors(
            {names[name]: shape for name, shape in shapes.items()}, optional, (ROPE_FACTORS,)
        )

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        problem = find_foreign_rope(files)
        if problem is not None:
            yield Finding(
                "not-representable",
                "warning",
                problem,
                "spectrain cannot score or fine-tune it",
                "nothing, to serve it",
            )

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        if (problem := find_foreign_rope(files)) is not None:
            raise UserError(f"{files.directory}: {problem}")
        config = model_config(files)
        own_names = {name: ours for ours, name in map_names(config, list_shapes(config)).items()}
        tensors = {
            own_names[name]: tensor for name, tensor in files.tensors.items() if name in own_names
        }
        if config["model_type"] in INTERLEAVED_TYPES:
            tensors = convert_heads(tensors, config, to_file=False)
        settings = {"architecture": config, "num_layers": None, "model": None}
        prefixed = {MODEL_PREFIX + name: tensor for name, tensor in tensors.items()}
        return make_checkpoint(files, "causal", settings, prefixed)

    def interpretations(self, drafter: DrafterCheckpoint) -> Iterator[Interpretation]:
        if drafter.drafter["architecture"]["model_type"] in INTERLEAVED_TYPES:
            yield unpermuted_interpretation(
                drafter, "llama.cpp rotates neighbours: write their rows in pairs"
            )

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        target = require_target(target, "its tokenizer is also the drafter's")
        if any(name.startswith(STOP_HEAD_PREFIX) for name in drafter.tensors):
            print(
                "drafter.stop_head: left out, because llama.cpp lets no drafter decide when to stop"
            )
        tensors = {
            name.removeprefix(MODEL_PREFIX): TensorSource.from_tensor(tensor.detach().cpu())
            for name, tensor in drafter.tensors.items()
            if not name.startswith(STOP_HEAD_PREFIX)
        }
        config = complete_config(drafter.drafter["architecture"])
        keys = {"general.name": f"draft model for {target.name}"} | tokenizer_keys(target)
        write_model(directory / DRAFTER_FILE, config, tensors, keys, self.container.dtype)

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"llamacpp": DrafterLaunch("draft-simple", path, CHAIN_TOKENS)}


GGUF_MODEL = GgufModel()


def write_target(
    target: TargetFiles, directory: Path, dtype: str | None, engine_python: str | None = None
) -> Path:
    """Write a target's own weights as `TARGET_FILE`, one tensor after the other; return the
    path. No engine writes it, so `engine_python` has no effect.
    """
    container = GGUF_MODEL.container if dtype is None else GGUF_MODEL.container.with_dtype(dtype)
    config = complete_config(target.config.to_dict())
    keys = {"general.name": target.name} | tokenizer_keys(target)
    write_model(
        directory / TARGET_FILE, config, list_weights(target.directory), keys, container.dtype
    )
    return directory / TARGET_FILE


def has_own_file(target: TargetFiles, requested: str | None) -> bool:
    """Tell whether llama.cpp is given the target's own GGUF file, as it is."""
    return (
        target.gguf_file is not None
        and target.reference not in BUNDLED_TARGETS
        and requested is None
    )


def find_target_file(target: TargetFiles, dtype: str, requested: str | None) -> Path:
    """Return a target as a GGUF file: its own where no type is requested, or else one that is
    written once into the cache.

    `dtype` is the type of the target in this project, which applies without a requested one.
    """
    if has_own_file(target, requested):
        assert target.gguf_file is not None
        return target.gguf_file
    chosen = requested or dtype
    files = list_weight_files(target.directory)
    state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(json.dumps([state, chosen]).encode()).hexdigest()[:16]
    folder = cache_directory() / f"target-gguf-{digest}"
    make_folder_once(folder, TARGET_FILE, lambda scratch: write_target(target, scratch, chosen))
    return folder / TARGET_FILE


def list_weights(directory: Path) -> dict[str, TensorSource]:
    """Return the weights of a directory in transformers format by name, to be loaded one by one."""
    sources = {}
    for path in list_weight_files(directory):
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                part = file.get_slice(name)
                dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(
                    part.get_dtype(), torch.float32
                )
                sources[name] = TensorSource(
                    tuple(part.get_shape()), dtype, partial(load_weight, path, name)
                )
    return sources


def load_weight(path: Path, name: str) -> Tensor:
    with open_tensors(path) as file:
        tensor: Tensor = file.get_tensor(name)
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(
            f"{path}: {name} holds no real numbers ({kind}); use a checkpoint that is not quantized"
        )
    if not has_finite_values(tensor):
        raise UserError(f"{path}: {name} holds NaN or infinity; copy the file again")
    return tensor


def complete_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a model's configuration with all its settings; raise UserError for a model that
    llama.cpp's classes are not.
    """
    kind = config.get("model_type", "llama")
    if kind not in MODEL_ARCHITECTURES:
        raise UserError(
            f"model_type={kind}: format=gguf writes {', '.join(MODEL_ARCHITECTURES)}; use "
            "llama.cpp's own converter"
        )
    complete: dict[str, Any] = AutoConfig.for_model(**{**config, "model_type": kind}).to_dict()
    for key, value in UNSUPPORTED_KEYS.items():
        if complete.get(key, value) not in (value, None):
            raise UserError(
                f"{key}={complete[key]}: llama.cpp's {kind} has {key}={value}; use a model with "
                "that"
            )
    return complete


def write_model(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, TensorSource],
    keys: dict[str, Any],
    dtype: str | None,
) -> None:
    """Write a complete model with its tensors under transformers' names."""
    shapes = list_shapes(config)
    names = map_names(config, shapes)
    kind = config["model_type"]
    unknown = sorted(tensors.keys() - names.keys())
    if unknown:
        raise UserError(
            f"{unknown[0]}: llama.cpp's {kind} has no such tensor; use a model without it"
        )
    absent = sorted(
        names.keys() - tensors.keys() - ({HEAD} if config["tie_word_embeddings"] else set())
    )
    if absent:
        more = f" ({len(absent) - 1} more are missing too)" if absent[1:] else ""
        raise UserError(
            f"{absent[0]}: it is not among the weights of the model{more}; save the model again "
            "with all its weights"
        )
    for name, source in sorted(tensors.items()):
        if source.shape != shapes[name]:
            raise UserError(
                f"{name} has the shape {[*source.shape]}, and {[*shapes[name]]} by the model's "
                "config.json; save the model again with all its weights"
            )
    if config["tie_word_embeddings"]:
        tensors = {name: source for name, source in tensors.items() if name != HEAD}
    sources = {
        names[name]: convert_source(name, tensors[name], config)
        for name in sorted(tensors, key=names.__getitem__)
    }
    sources |= {
        name: TensorSource.from_tensor(tensor) for name, tensor in rope_tensors(config).items()
    }
    write_gguf(path, kind, keys | size_keys(kind, config), sources, dtype)


def convert_source(name: str, source: TensorSource, config: dict[str, Any]) -> TensorSource:
    """Return a tensor with queries and keys in the order in which llama.cpp rotates this model."""
    if config["model_type"] not in INTERLEAVED_TYPES:
        return source

    def load() -> Tensor:
        return convert_heads({name: source.load()}, config, to_file=True)[name]

    return TensorSource(source.shape, source.dtype, load)


def list_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Return the shape of every tensor of a model, by transformers' name."""
    tensors = build_meta_model(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def map_names(config: dict[str, Any], own_names: Iterable[str]) -> dict[str, str]:
    """Return transformers' name of every tensor of a model -> the name in a GGUF file."""
    architecture = gguf.MODEL_ARCH[MODEL_ARCHITECTURES[config["model_type"]]]
    find_name: Callable[..., str | None] = gguf.get_tensor_name_map(
        architecture, config["num_hidden_layers"]
    ).get_name
    names = {name: find_name(name, try_suffixes=(".weight", ".bias")) for name in own_names}
    return {name: other for name, other in names.items() if other is not None}


def build_meta_model(config: dict[str, Any]) -> Any:
    """Return the model of a configuration on the device "meta"."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config), trust_remote_code=False
            )
    except Exception as error:  # unknown settings may raise anything
        raise UserError(
            f"transformers cannot build the model of these sizes ({first_line(error)}); copy the "
            "file again"
        ) from error


def model_config(files: DrafterFiles) -> dict[str, Any]:
    """Return the transformers configuration of a model's file."""
    kind = files.config["general.architecture"]
    has_bias = "blk.0.attn_q.bias" in files.tensors
    ids = {
        f"{name}_token_id": files.config.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos")
    }
    return {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]],
        "model_type": kind,
        **layer_config(files.config),
        "tie_word_embeddings": "output.weight" not in files.tensors,
        **({"attention_bias": has_bias} if kind != "qwen2" else {}),
        **ids,
    }
