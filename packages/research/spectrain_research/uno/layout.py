"""The layout of Uno: gated LoRA over random tokens as a plain PEFT directory, which SGLang loads
unchanged (--speculative-algorithm UNO)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from spectrain.errors import UserError
from spectrain.export.adapters import check_adapter
from spectrain.export.container import Finding
from spectrain.export.drafter_files import (
    METADATA_FILE,
    DrafterFiles,
    write_json,
    write_tensors,
)
from spectrain.export.layout import DrafterCheckpoint, ExpectedTensors, Layout, make_checkpoint
from spectrain.export.targets import TargetFiles
from spectrain.servers.commands import DrafterLaunch
from spectrain_research.shared.adapters import require_adapter

LINEAR_MODULES = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
ADAPTER_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(self_attn|mlp)\.(\w+_proj)\.lora_([AB])\.weight"
)
NUM_MASKS = 7
"""The default number of masks: a draft of 8 tokens, as the authors serve it."""


class UnoLayout(Layout):
    """adapter_config.json and adapter_model.safetensors, without mask vectors: SGLang puts random
    tokens into mask slots.

    Any LoRA adapter has these files; spectrain.json beside them says that it drafts.
    """

    title = "Uno, PEFT adapter"

    def matches_files(self, files: DrafterFiles) -> bool:
        is_plain = not files.config and not (files.directory / "masks.safetensors").exists()
        return is_plain and all(
            (files.directory / name).exists() for name in ("adapter_config.json", METADATA_FILE)
        )

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        """Return both factors of every linear that adapter_config.json names, in every layer up
        to the last adapted one.
        """
        adapter = files.read_sidecar("adapter_config.json")
        matches = [match for name in files.tensors if (match := ADAPTER_TENSOR.fullmatch(name))]
        shapes: dict[str, tuple[int | None, ...]] = {}
        # A name may hold any number; more layers than tensors are missing in any case.
        last = min(max((int(match[1]) for match in matches), default=0), len(matches))
        for layer in range(1 + last):
            for linear in adapter["target_modules"]:
                block = LINEAR_MODULES.get(linear, "?")
                prefix = f"base_model.model.model.layers.{layer}.{block}.{linear}"
                shapes[f"{prefix}.lora_A.weight"] = (adapter["r"], None)
                shapes[f"{prefix}.lora_B.weight"] = (None, adapter["r"])
        return ExpectedTensors(shapes)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        adapter = files.read_sidecar("adapter_config.json")
        yield from check_adapter(adapter, files.tensors)
        for name in sorted(set(map(str, adapter["target_modules"])) - set(LINEAR_MODULES)):
            yield Finding(
                "adapter-module",
                "error",
                f"adapter_config.json: target_modules names {name}",
                f"SGLang supports Uno's adapter on {', '.join(LINEAR_MODULES)}",
                "leave it out of training",
            )

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        layers = {
            int(match[1]) for name in files.tensors if (match := ADAPTER_TENSOR.fullmatch(name))
        }
        if layers != set(range(target.num_layers)):
            yield Finding(
                "adapter-layers",
                "error",
                f"it adapts {len(layers)} layers of the target's {target.num_layers}",
                "SGLang leaves the others unchanged, or stops",
                "lint with the target it is for",
            )
        name = (
            f"base_model.model.model.layers.0.self_attn.{next(iter(LINEAR_MODULES))}.lora_A.weight"
        )
        if name in files.tensors and files.tensors[name].shape[1] != target.config.hidden_size:
            yield Finding(
                "hidden-size",
                "error",
                f"its linears read {files.tensors[name].shape[1]} numbers, the target's "
                f"{target.config.hidden_size}",
                "the adapter does not fit",
                "lint with the target it is for",
            )

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        adapter = files.read_sidecar("adapter_config.json")
        shape = {"rank": adapter["r"], "alpha": adapter["lora_alpha"], "sampler": False}
        drafter = make_checkpoint(files, "uno", shape, dict(files.tensors))
        # Exports of earlier versions name the noise that this family is trained with.
        drafter.drafter.pop("noise", None)
        drafter.drafter = {"num_masks": NUM_MASKS, **drafter.drafter}
        drafter.description["adapter_config"] = adapter
        return drafter

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        adapter = require_adapter(drafter, "and Uno needs LoRA")
        rest = sorted(
            {name.split(".")[0] for name in drafter.tensors if not name.startswith("base_model.")}
        )
        if rest:
            raise UserError(
                f"format=uno: this drafter has {' and '.join(rest)}, which SGLang cannot load; "
                "train recipe=uno with drafter.sampler=false"
            )
        unknown = next(
            (
                n
                for n in drafter.tensors
                if not (m := ADAPTER_TENSOR.fullmatch(n)) or LINEAR_MODULES.get(m[3]) != m[2]
            ),
            None,
        )
        if unknown is not None:
            raise UserError(
                f"format=uno: {unknown} is not on any of {', '.join(LINEAR_MODULES)}, which "
                "SGLang adapts"
            )
        target_entry = {} if target is None else {"base_model_name_or_path": target.engine_path}
        write_json(directory / "adapter_config.json", {**adapter, **target_entry})
        write_tensors(directory / "adapter_model.safetensors", dict(drafter.tensors))

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"sglang": DrafterLaunch("UNO", path, drafter.drafter.get("num_masks", NUM_MASKS))}


UNO = UnoLayout()
