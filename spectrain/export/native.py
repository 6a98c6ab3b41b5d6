"""Spectrain's own layout: config.json names the class with its settings, model.safetensors holds
the class's tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from spectrain.config.build import GroupSpec, save_groups
from spectrain.config.check import check_node
from spectrain.config.saved import parse_description, parse_groups
from spectrain.drafters.base import Drafter
from spectrain.drafters.layers.block_drafter import default_layers
from spectrain.drafters.layers.llama_layer import LAYER_KEYS
from spectrain.drafters.peagle import NUM_DRAFTS
from spectrain.errors import UserError, first_line
from spectrain.provenance import package_versions
from spectrain.servers.commands import DrafterLaunch

from .adapters import check_adapter
from .container import Finding
from .dflash import BLOCK_SETTINGS, FAMILIES, BlockFamily
from .drafter_files import DrafterFiles, write_json, write_tensors
from .eagle3 import complete_layer, complete_settings
from .fused_config import build_meta_drafter
from .layout import (
    CHAIN_TOKENS,
    DESCRIPTION_KEYS,
    MALFORMED_ERRORS,
    DrafterCheckpoint,
    ExpectedTensors,
    Layout,
    MissingTarget,
    RefusedSettings,
)
from .table import list_packages
from .targets import BUNDLED_TARGETS, TargetFiles
from .vocabulary import check_vocabulary

ARCHITECTURE_SIZES = {*LAYER_KEYS} - {"max_position_embeddings"}
"""Keys of an `architecture` that needs no target."""
PYTHON_TITLE = "spectrain in Python"
"""Heading of the lines of Python that decode with a drafter of this layout."""


class NativeLayout(Layout):
    """The layout of a run's drafter directory."""

    title = "spectrain's own layout"
    covers_all = True
    builds_drafter = True

    def matches_files(self, files: DrafterFiles) -> bool:
        return "drafter" in files.config

    def check_data(self, files: DrafterFiles) -> None:
        parse_description(files.config, files.directory / "config.json")

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        """Return the tensors of the drafter that config.json describes, built on the device "meta".

        Where its target would have to be downloaded, or is not named, any tensor will do. Raise
        RefusedSettings where the drafter cannot be built.
        """
        try:
            drafter = self._build_drafter(files)
        except MissingTarget:
            drafter = None
        except (UserError, *MALFORMED_ERRORS) as error:
            raise RefusedSettings(first_line(error)) from error
        if drafter is None:
            return ExpectedTensors(
                {name: (None,) * tensor.dim() for name, tensor in files.tensors.items()}
            )
        state = drafter.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        file_names = {name: drafter.saved.layout.get(name, ("", name))[1] for name in shapes}
        # Of tied tensors, named_parameters lists the first, and only that one is saved.
        required = dict([*drafter.named_parameters(), *drafter.named_buffers()])
        return ExpectedTensors(
            {file_names[name]: shape for name, shape in shapes.items() if name in required},
            {file_names[name]: shape for name, shape in shapes.items() if name not in required},
            types={file_names[name]: tensor.dtype for name, tensor in state.items()},
        )

    def _build_drafter(self, files: DrafterFiles) -> Drafter | None:
        """Build the drafter that config.json describes on the device "meta"; None where its
        target is not at hand.
        """
        target = self._target_files(files)
        spec = files.read_group("drafter")
        check_node("drafter", spec.node)
        if target is None or not target.is_local:
            return None
        # The settings as eval takes them: what weights or target determine in a conversion is not
        # filled in here.
        return build_meta_drafter(spec, target.build_meta_target())

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"spectrain": DrafterLaunch("chain", path, CHAIN_TOKENS)}

    def python_snippets(self, drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
        spec = GroupSpec.from_node("target", drafter.description.get("target"))
        name = spec.choice if spec.choice in BUNDLED_TARGETS else target
        lines = [
            "import spectrain",
            "",
            f'target = spectrain.Target.from_pretrained("{name}")',
            f'drafter = spectrain.Drafter.from_pretrained("{path}", target)',
            'spectrain.generate(target, drafter, ["What is a bee?"])',
        ]
        return {PYTHON_TITLE: "\n".join(lines)}

    def _target_files(self, files: DrafterFiles) -> TargetFiles | None:
        spec = files.read_group("target")
        return TargetFiles.from_settings(spec.node, may_download=False) if spec else None

    def _resolve_settings(self, files: DrafterFiles) -> GroupSpec:
        """Return the drafter with all settings filled in that shape its weights."""
        spec = files.read_group("drafter")
        read_shape = find_shape_reader(str(spec.choice))
        if read_shape is not None:
            spec = spec.with_settings(**read_shape(spec, files, self._target_files(files)))
        if "d2t" in files.tensors:
            spec = spec.with_settings(vocab_size=len(files.tensors["d2t"]))
        return spec

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        if {"d2t", "t2d"} <= files.tensors.keys():
            yield from check_vocabulary(len(files.tensors["t2d"]), files.tensors)
        if adapter := files.read_sidecar("adapter_config.json"):
            yield from check_adapter(adapter, files.tensors)

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        target_files = self._target_files(files)
        reference = None if target_files is None else target_files.reference
        candidates = (files.directory / "target", files.directory.parent / "target")
        trained_target = next((path for path in candidates if path.is_dir()), None)
        config_path = files.directory / "config.json"
        description = parse_groups(
            {k: files.config[k] for k in (*DESCRIPTION_KEYS, "target") if files.config.get(k)},
            config_path,
        )
        if adapter := files.read_sidecar("adapter_config.json"):
            description["adapter_config"] = adapter
        spec = self._resolve_settings(files)
        return DrafterCheckpoint(
            str(spec.choice),
            copy.deepcopy(dict(spec.settings)),
            dict(files.tensors),
            reference,
            trained_target,
            description,
        )

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        self._check_id_order(drafter)
        settings = drafter.description.get("target") if target is None else target.settings
        if settings is None and drafter.target is not None:
            settings = TargetFiles(drafter.target).settings
        description = {
            "drafter": drafter.spec.node,
            "target": settings,
            **{key: drafter.description.get(key) for key in DESCRIPTION_KEYS},
            "spectrain_version": package_versions().get("spectrain"),
        }
        adapters = {
            name: tensor
            for name, tensor in drafter.tensors.items()
            if name.startswith("base_model.")
        }
        rest = {name: tensor for name, tensor in drafter.tensors.items() if name not in adapters}
        if adapters:
            write_tensors(directory / "adapter_model.safetensors", adapters)
            write_json(directory / "adapter_config.json", drafter.description["adapter_config"])
        write_tensors(directory / "model.safetensors", rest)
        write_json(directory / "config.json", save_groups(description))

    def _check_id_order(self, drafter: DrafterCheckpoint) -> None:
        ids = drafter.tensors.get("d2t")
        if ids is not None and len(ids) > 1 and bool((ids[1:] < ids[:-1]).any()):
            raise UserError(
                "d2t: its ids do not ascend, as drafter=eagle3 and drafter=medusa require; sort "
                "the rows of lm_head"
            )


def shape_of_eagle3(
    spec: GroupSpec, files: DrafterFiles, target: TargetFiles | None
) -> dict[str, Any]:
    """Fill in the number of layers from the weights, and the layer and the fused features from
    the target.
    """
    count = 1 + len({name.split(".")[1] for name in files.tensors if name.startswith("later.")})
    settings = {"num_layers": count, **spec.settings}
    if spec.settings.get("layers") and ARCHITECTURE_SIZES.issubset(
        spec.settings.get("architecture") or {}
    ):
        return settings
    return complete_settings(settings, require_named_target(target, files))


def shape_of_eagle1(
    spec: GroupSpec, files: DrafterFiles, target: TargetFiles | None
) -> dict[str, Any]:
    """Return the layer, from the target where the settings lack it, and whether fc has a bias."""
    architecture = spec.settings.get("architecture")
    if not ARCHITECTURE_SIZES.issubset(architecture or {}):
        architecture = complete_layer(architecture, require_named_target(target, files))
    return {"architecture": architecture, "bias": "fc.bias" in files.tensors}


def shape_of_peagle(
    spec: GroupSpec, files: DrafterFiles, target: TargetFiles | None
) -> dict[str, Any]:
    """Fill in what EAGLE-3 has, the number of drafts, and whether the weights hold an embedding."""
    peagle_settings = {
        "num_drafts": NUM_DRAFTS,
        "own_embedding": "embed_tokens.weight" in files.tensors,
    }
    return {**peagle_settings, **shape_of_eagle3(spec, files, target)}


def shape_of_block(
    spec: GroupSpec,
    files: DrafterFiles,
    target: TargetFiles | None,
    family: BlockFamily | None = None,
) -> dict[str, Any]:
    """Return every setting that other layouts hold, too, with the layer and the fused features
    filled in.
    """
    settings = spec.with_defaults()
    if not settings["layers"] or not settings["architecture"]:
        target = require_named_target(target, files)
        layers = settings["layers"] or default_layers(target.num_layers, settings["num_layers"])
        settings |= {
            "layers": sorted(set(layers)),
            "architecture": complete_layer(settings["architecture"], target),
        }
    family = family or FAMILIES[str(spec.choice)]
    keys = (*BLOCK_SETTINGS, *family.config_keys)
    return {key: settings[key] for key in keys if key not in ("vocab_size", "mask_token_id")}


def require_named_target(target: TargetFiles | None, files: DrafterFiles) -> TargetFiles:
    """Return the target that settings depend on, or raise UserError where config.json names
    none.
    """
    if target is None:
        raise MissingTarget(
            f"{files.directory / 'config.json'}: it names no target, and settings depend on it; "
            "write target"
        )
    return target


def shape_of_medusa(
    spec: GroupSpec, files: DrafterFiles, target: TargetFiles | None
) -> dict[str, Any]:
    heads = {name.split(".")[1] for name in files.tensors if name.startswith("heads.")}
    blocks = {name.split(".")[3] for name in files.tensors if name.startswith("heads.0.blocks.")}
    return {"num_heads": len(heads), "num_layers": len(blocks)}


NATIVE = NativeLayout()
SHAPE_READERS = {
    "eagle1": shape_of_eagle1,
    "eagle3": shape_of_eagle3,
    "peagle": shape_of_peagle,
    "medusa": shape_of_medusa,
    **dict.fromkeys(FAMILIES, shape_of_block),
}
"""Family -> the settings that a description may omit because weights or target determine them."""


def find_shape_reader(family: str) -> Callable[..., dict[str, Any]] | None:
    """Return the function that completes a family's description, from this table or an installed
    package; None if there is none."""
    paths = (package.shape_readers.get(family) for package in list_packages())
    path = next((path for path in paths if path is not None), None)
    if path is None:
        return SHAPE_READERS.get(family)
    reader: Callable[..., dict[str, Any]] = resolve_name(path)
    return reader
