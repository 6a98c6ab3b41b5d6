"""OpenVINO's layouts: the flat layout (EAGLE-3, DFlash) or that of transformers (a draft model)
and, in the same folder, the model as OpenVINO's intermediate representation (IR):
`openvino_model.xml` and `openvino_model.bin`.

The IR is written by optimum-intel, which needs an environment of its own (`make openvino`).
OpenVINO GenAI reads the IR only; spectrain reads the other files, so that the folder can be linted,
scored and converted.

The runtime information of an EAGLE-3 IR names the layers after which the target's stream is read,
which are spectrain's layer ids less one. Without it OpenVINO reads one layer later than every
trainer of EAGLE-3 does.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spectrain.drafters.layers.eagle_layers import engine_layers
from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch
from spectrain.servers.openvino_ir import IR_NAME, IrConverter

from .dflash import num_drafts
from .dflash_flat import FlatDFlash
from .eagle3 import check_layer_count, unnamed_layers, variant_flags
from .flat import FlatEagle3
from .huggingface import HuggingFaceLayout
from .layout import CHAIN_TOKENS, DrafterCheckpoint, DrafterFiles, Finding
from .targets import TargetFiles

if TYPE_CHECKING:
    from typing_extensions import Self

LAYERS_KEY = "hidden_layers_list"
# For drafters that read the target's states. optimum-intel's own classes of them are loaded as if
# they came with the files, and the tokenizer is the target's.
HEAD_OPTIONS = ("--trust-remote-code", "--disable-convert-tokenizer")


def add_ir(
    converter: IrConverter, directory: Path, layers: list[int] | None, options: tuple[str, ...] = ()
) -> None:
    """Add the IR of a drafter's files to their folder; `layers` are the ids of an EAGLE-3's
    fused layers.
    """
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        # optimum-intel also copies what else is in the folder, so it gets one with these files
        # only.
        source = Path(scratch) / "source"
        out = Path(scratch) / "ir"
        source.mkdir()
        for path in directory.iterdir():
            if path.is_file():
                (source / path.name).symlink_to(path.absolute())
        converter.convert(source, out, options)
        # The model and, of a draft model, its tokenizer.
        for path in out.glob("openvino_*"):
            shutil.move(path, directory / path.name)
    if layers is not None:
        write_fused_layers(directory, layers)


def has_ir(files: DrafterFiles) -> bool:
    """Tell whether a drafter's folder holds an IR."""
    return (files.directory / f"{IR_NAME}.xml").exists()


def write_fused_layers(directory: Path, layers: list[int]) -> None:
    """Write the fused layers, given by spectrain's ids, into the runtime information of an IR."""
    path = directory / f"{IR_NAME}.xml"
    text = path.read_text(encoding="utf-8")
    end = text.rindex("</rt_info>")
    entry = f'\t<{LAYERS_KEY} value="{" ".join(str(layer - 1) for layer in layers)}" />\n\t'
    path.write_text(text[:end] + entry + text[end:], encoding="utf-8")


def read_fused_layers(directory: Path) -> list[int] | None:
    """Return spectrain's ids of the layers that an IR's runtime information names; None if it
    names none.
    """
    text = (directory / f"{IR_NAME}.xml").read_text(encoding="utf-8")
    entry = re.search(rf'<{LAYERS_KEY} value="([-\d\s,]+)"', text[text.rfind("<rt_info>") :])
    return (
        None if entry is None else [int(word) + 1 for word in re.split(r"[\s,]+", entry[1].strip())]
    )


class IrLayout:
    """What OpenVINO's layouts share: how their IR is converted."""

    converter = IrConverter()
    needs_engine = True

    def with_engine(self, python: str) -> Self:
        return self._with_converter(replace(self.converter, python=python))

    def with_dtype(self, dtype: str) -> Self:
        return self._with_converter(replace(self.converter, dtype=dtype))

    def _with_converter(self, converter: IrConverter) -> Self:
        layout = copy(self)
        layout.converter = converter
        return layout


def layers_finding(problem: str, consequence: str) -> Finding:
    return Finding(
        "openvino-layers",
        "error",
        problem,
        consequence,
        "write it again: spectrain convert DIR OUT --to openvino",
        is_repairable=True,
    )


def generate_lines(
    target: str, drafter_path: str, setting: str, has_prefix_caching: bool = True
) -> str:
    """Return the commands that convert a target, and the lines of Python that decode with
    OpenVINO GenAI.
    """
    lines = ["import openvino_genai as genai"]
    option = ""
    if not has_prefix_caching:
        lines += ["scheduler = genai.SchedulerConfig()", "scheduler.enable_prefix_caching = False"]
        option = ", scheduler_config=scheduler"
    lines += [
        f'drafter = genai.draft_model("{drafter_path}", "CPU")',
        f'pipeline = genai.LLMPipeline("TARGET_IR", "CPU", draft_model=drafter{option})',
        "config = pipeline.get_generation_config()",
        f"config.max_new_tokens, config.{setting.replace(' = ', ' = 256, ', 1)}",
        'print(pipeline.generate("..", config))',
    ]
    convert = (
        f"# once: spectrain export target=hf target.model={target} format=openvino out=TARGET_IR"
    )
    return "\n".join([convert, *lines])


class OpenVinoEagle3(IrLayout, FlatEagle3):
    """EAGLE-3 for OpenVINO GenAI, which decodes it in chains and trees. Its class has three
    fused layers and no norm flags.
    """

    title = "EAGLE-3, OpenVINO"
    engine = "OpenVINO"
    # optimum-intel leaves a missing d2t uninitialized, and every draft is another token
    keeps_full_maps = True

    def matches_files(self, files: DrafterFiles) -> bool:
        return has_ir(files) and super().matches_files(files)

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        # Unlike vLLM, OpenVINO needs the map of a full vocabulary, too.
        yield from (finding for finding in super().findings(files) if finding.name != "d2t-of-all")
        named = read_fused_layers(files.directory)
        ids = self._layer_ids(files.config)
        if named is None:
            yield layers_finding(
                f"{IR_NAME}.xml names no fused layers",
                "OpenVINO reads the target one layer too late",
            )
        elif ids is not None and named != [layer + self.layer_id_offset for layer in ids]:
            yield layers_finding(
                f"{IR_NAME}.xml names other fused layers than config.json",
                "OpenVINO reads other layers than were trained on",
            )

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        yield from super().findings_with_target(files, target)
        named = read_fused_layers(files.directory)
        default = engine_layers(target.num_layers)
        if self._layer_ids(files.config) is None and named not in (None, default):
            yield layers_finding(
                f"{IR_NAME}.xml names the stream entering layers {named}, and config.json means "
                f"{default}",
                "OpenVINO reads other layers than were trained on",
            )

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        for flag, is_set in variant_flags(drafter).items():
            if is_set and flag != "own_embedding":
                raise UserError(
                    f"drafter.architecture.{flag}=true: OpenVINO's EAGLE-3 has no such norm and "
                    f"ignores the flag; train with drafter.architecture.{flag}=false"
                )
        check_layer_count(drafter, target, "OpenVINO's EAGLE-3", lowest=1)
        super().check_writable(drafter, target)

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        layers = drafter.drafter.get("layers")
        if layers is None:
            if target is None:
                raise UserError(
                    "--target: the default of the fused layers depends on the target; say which "
                    "one it is"
                )
            layers = unnamed_layers(target)
        super().write(drafter, target, directory)
        add_ir(self.converter, directory, layers, HEAD_OPTIONS)

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"openvino": DrafterLaunch("eagle3", path, CHAIN_TOKENS)}

    def python_snippets(self, drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
        tree = "tree_depth, config.branching_factor, config.num_assistant_tokens = 2, 2, 4"
        return {
            "OpenVINO GenAI, a chain": generate_lines(
                target, path, f"num_assistant_tokens = {CHAIN_TOKENS}"
            ),
            "OpenVINO GenAI, a tree": generate_lines(target, path, tree),
        }


class OpenVinoDFlash(IrLayout, FlatDFlash):
    """DFlash for OpenVINO GenAI: attention in both directions, the target's embedding and output
    layer.
    """

    title = "DFlash, OpenVINO"
    engine = "OpenVINO"

    def matches_files(self, files: DrafterFiles) -> bool:
        return has_ir(files) and super().matches_files(files)

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        for key, value, default in (("window", None, "null"), ("causal", False, "false")):
            if drafter.drafter[key] != value:
                raise UserError(
                    f"drafter.{key}: OpenVINO's DFlash attends to the block in both directions, "
                    f"without a window; use --to vllm, or train with drafter.{key}={default}"
                )
        super().check_writable(drafter, target)

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        super().write(drafter, target, directory)
        add_ir(self.converter, directory, None, HEAD_OPTIONS)

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"openvino": DrafterLaunch("dflash", path, num_drafts(drafter))}

    def python_snippets(self, drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
        lines = generate_lines(
            target, path, f"num_assistant_tokens = {num_drafts(drafter)}", has_prefix_caching=False
        )
        return {"OpenVINO GenAI": lines}


class OpenVinoModel(IrLayout, HuggingFaceLayout):
    """A distilled draft model for OpenVINO GenAI."""

    title = "transformers, OpenVINO"

    def matches_files(self, files: DrafterFiles) -> bool:
        return has_ir(files) and super().matches_files(files)

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        super().write(drafter, target, directory)
        add_ir(self.converter, directory, None)

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"openvino": DrafterLaunch("draft_model", path, CHAIN_TOKENS)}

    def python_snippets(self, drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
        return {
            "OpenVINO GenAI": generate_lines(target, path, f"num_assistant_tokens = {CHAIN_TOKENS}")
        }
