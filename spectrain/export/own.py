"""Our own layout: config.json names the class with its settings, model.safetensors holds what the class calls its tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.drafters.eagle3 import VARIANTS
from spectrain.drafters.peagle import NUM_DRAFTS
from spectrain.drafters.shared.block_drafter import default_layers
from spectrain.errors import UserError
from spectrain.provenance import versions
from spectrain.settings.build import build, settings_of
from spectrain.settings.check import check_node
from spectrain.settings.choices import choice, named
from spectrain.settings.saved import saved_drafter, saved_groups

from .block_families import FAMILIES
from .eagle3 import completed, shapes_of, whole_layer
from .fused_settings import Settings
from .layout import KEPT, MALFORMED, Expected, Files, Finding, Layout, Portable, write_json, write_tensors
from .peft import shape_of
from .targets import TargetFiles

SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")  # of an architecture, without a target


class Own(Layout):
    name = "spectrain"
    title = "spectrain's own layout"
    families = (
        "eagle3", "peagle", "medusa", "hydra", "kangaroo", "causal", "pard", "gated_lora", "early_exit", "dflash", "dspark",
        "dflash2", "mtp", "amphista", "ctc", "eagle1", "gumiho", "redrafter",
        "transformer_heads",
    )  # fmt: skip
    says_all = True

    def recognises(self, files: Files) -> bool:
        return "drafter" in files.config

    def check_data(self, files: Files) -> None:
        saved_drafter(files.config, files.directory / "config.json")

    def expected(self, files: Files) -> Expected:
        held = self.held(files)
        if held is None:
            return self._built(files) or Expected({name: (None,) * tensor.dim() for name, tensor in files.tensors.items()})
        said, vocab = held[0], held[0].layer["vocab_size"]
        return Expected(shapes_of(said, min(said.draft_vocab_size or vocab, vocab), vocab))

    def held(self, files: Files) -> tuple[Settings, dict[str, Tensor]] | None:
        drafter = self._drafter(files)
        if choice("drafter", drafter) != "eagle3" or drafter.get("head_rank"):
            return None
        target = self._target(files)
        width = files.tensors["fc.weight"].shape[0] if "fc.weight" in files.tensors else 0
        vocab = len(files.tensors["t2d"]) if "t2d" in files.tensors else 0
        if target is not None:
            width, vocab = target.config.hidden_size, target.vocab_size
        architecture = drafter["architecture"]
        layer = {**architecture, "hidden_size": width, "vocab_size": vocab, "num_hidden_layers": drafter["num_layers"]}
        variants = {key: bool(architecture.get(key, False)) for key in VARIANTS}
        return Settings(layer, drafter.get("layers"), variants, drafter.get("vocab_size", 32000)), dict(files.tensors)

    def _built(self, files: Files) -> Expected | None:
        """The tensors of the drafter that config.json describes, built without data; None where it cannot be built, which
        other findings tell, or where its target would have to be downloaded."""
        target = self._target(files)
        if target is None or not target.is_local:
            return None
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                drafter: Drafter = build(self._drafter(files), target=target.outline())
        except (UserError, *MALFORMED, KeyError):
            return None
        places = drafter.saved.layout(drafter)
        shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
        first = dict([*drafter.named_parameters(), *drafter.named_buffers()])  # of tied ones, the only one that is saved
        there = {name: places.get(name, ("", name))[1] for name in shapes}
        return Expected(
            {there[name]: shape for name, shape in shapes.items() if name in first},
            {there[name]: shape for name, shape in shapes.items() if name not in first},
        )

    def _target(self, files: Files) -> TargetFiles | None:
        settings = files.node("target")
        return TargetFiles.of(settings) if settings else None

    def _drafter(self, files: Files) -> dict[str, Any]:
        """The settings, with everything said that shapes the weights."""
        drafter: dict[str, Any] = copy.deepcopy(files.node("drafter") or {})
        shaped = SHAPED.get(choice("drafter", drafter))
        if shaped is not None:
            drafter |= shaped(drafter, files, self._target(files))
        if "d2t" in files.tensors:
            drafter["vocab_size"] = len(files.tensors["d2t"])
        return drafter

    def findings(self, files: Files) -> Iterator[Finding]:
        for group in ("drafter", "tree", "acceptance"):
            node = files.node(group)
            try:
                if node is not None:
                    check_node(group, node)
            except UserError as error:
                yield Finding(
                    "malformed", "error", f"config.json: {error}", "no command can use it",
                    "write it as it was when the drafter was trained",
                )  # fmt: skip

    def read(self, files: Files, target: TargetFiles | None) -> Portable:
        target_files = self._target(files)
        said = None if target_files is None else target_files.said
        places = (files.directory / "target", files.directory.parent / "target")
        trained = next((place for place in places if place.is_dir()), None)
        path = files.directory / "config.json"
        kept = saved_groups({k: files.config[k] for k in (*KEPT, "target") if files.config.get(k)}, path)
        if adapter := files.sidecar("adapter_config.json"):
            kept["adapter_config"] = adapter
        return Portable(self._drafter(files), dict(files.tensors), said, trained, kept)

    def write(self, drafter: Portable, target: TargetFiles | None, directory: Path) -> None:
        self._check(drafter)
        settings = drafter.description.get("target") if target is None else target.settings
        if settings is None and drafter.target is not None:
            settings = TargetFiles(drafter.target).settings
        description = {
            "drafter": drafter.drafter,
            "target": settings,
            **{key: drafter.description.get(key) for key in KEPT},
            "spectrain_version": versions().get("spectrain"),
        }
        adapters = {name: tensor for name, tensor in drafter.tensors.items() if name.startswith("base_model.")}
        rest = {name: tensor for name, tensor in drafter.tensors.items() if name not in adapters}
        if adapters:
            write_tensors(directory / "adapter_model.safetensors", adapters)
            write_json(directory / "adapter_config.json", drafter.description["adapter_config"])
        write_tensors(directory / "model.safetensors", rest)
        write_json(directory / "config.json", named(description))

    def _check(self, drafter: Portable) -> None:
        ids = drafter.tensors.get("d2t")
        if ids is not None and len(ids) > 1 and bool((ids[1:] < ids[:-1]).any()):
            raise UserError("d2t: its ids do not ascend, as drafter=eagle3 and drafter=medusa want; sort the rows of lm_head")


def shape_of_eagle3(drafter: dict[str, Any], files: Files, target: TargetFiles | None) -> dict[str, Any]:
    """What the description leaves to its weights, how many layers there are, and to the target: what these are, and which
    features it reads."""
    count = 1 + len({name.split(".")[1] for name in files.tensors if name.startswith("later.")})
    said = {"num_layers": count, **drafter}
    if drafter.get("layers") and set(SIZES) <= set(drafter.get("architecture") or {}):
        return said
    return completed(said, left_to(target, files))


def shape_of_eagle1(drafter: dict[str, Any], files: Files, target: TargetFiles | None) -> dict[str, Any]:
    """The layer, which a description may leave to the target, and whether fc has a bias."""
    asked = drafter.get("architecture")
    whole = asked if set(SIZES) <= set(asked or {}) else whole_layer(asked, left_to(target, files))
    return {"architecture": whole, "bias": "fc.bias" in files.tensors}


def shape_of_peagle(drafter: dict[str, Any], files: Files, target: TargetFiles | None) -> dict[str, Any]:
    """The same, with how many tokens it drafts and whether its weights hold an embedding."""
    own = {"num_drafts": NUM_DRAFTS, "own_embedding": "embed_tokens.weight" in files.tensors}
    return {**own, **shape_of_eagle3(drafter, files, target)}


def shape_of_block(drafter: dict[str, Any], files: Files, target: TargetFiles | None) -> dict[str, Any]:
    """Every setting that other layouts say too, the layer and the fused ones among them."""
    whole = settings_of(drafter)
    if not whole["layers"] or not whole["architecture"]:
        target = left_to(target, files)
        layers = whole["layers"] or default_layers(target.num_layers, whole["num_layers"])
        whole |= {"layers": sorted(set(layers)), "architecture": whole_layer(whole["architecture"], target)}
    return {key: whole[key] for key in (*BLOCK, *FAMILIES[choice("drafter", drafter)].keys)}


def left_to(target: TargetFiles | None, files: Files) -> TargetFiles:
    """The target that settings are left to."""
    if target is None:
        raise UserError(f"{files.directory / 'config.json'}: it names no target and leaves settings to it; write target")
    return target


def shape_of_medusa(drafter: dict[str, Any], files: Files, target: TargetFiles | None) -> dict[str, Any]:
    heads = {name.split(".")[1] for name in files.tensors if name.startswith("heads.")}
    blocks = {name.split(".")[3] for name in files.tensors if name.startswith("heads.0.blocks.")}
    return {"num_heads": len(heads), "num_layers": len(blocks)}


def shape_of_adapter(drafter: dict[str, Any], files: Files, target: TargetFiles | None) -> dict[str, Any]:
    adapter = files.sidecar("adapter_config.json")
    return shape_of(files.tensors, adapter or {"r": 0, "lora_alpha": drafter.get("alpha", 32.0)})


BLOCK = (
    "block_size", "num_layers", "layers", "sample_from_anchor", "causal", "window", "own_embedding", "architecture",
)  # fmt: skip
SHAPED = {
    "eagle1": shape_of_eagle1,
    "eagle3": shape_of_eagle3,
    "peagle": shape_of_peagle,
    "medusa": shape_of_medusa,
    "gated_lora": shape_of_adapter,
    **dict.fromkeys(FAMILIES, shape_of_block),
}
"""Family -> the settings that a description may leave unsaid and its weights or its target fix."""
