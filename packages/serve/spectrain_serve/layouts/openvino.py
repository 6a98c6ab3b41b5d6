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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.drafters.layers.eagle_layers import engine_layers
from spectrain.errors import UserError
from spectrain.export.container import Container, Finding, Rename
from spectrain.export.dflash import num_drafts
from spectrain.export.dflash_flat import FLAT_DFLASH
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.eagle3 import check_layer_count, unnamed_layers, variant_flags
from spectrain.export.flat import FLAT_EAGLE3, eagle3_config, read_layer_ids, without_embedding
from spectrain.export.fused import Export, FusedFiles, launch_with
from spectrain.export.huggingface import HuggingFaceLayout
from spectrain.export.layout import CHAIN_TOKENS, DrafterCheckpoint
from spectrain.export.targets import TargetFiles
from spectrain.servers.commands import DrafterLaunch

from ..engines.openvino_ir import IR_NAME, IrConverter

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


@dataclass(frozen=True)
class Ir(Container):
    """Settings and tensors as in other projects, and the IR made of them."""

    options: tuple[str, ...] = ()  # of optimum-intel
    converter: IrConverter = field(default_factory=IrConverter)
    needs_engine = True

    def holds(self, files: DrafterFiles) -> bool:
        return (files.directory / f"{IR_NAME}.xml").exists()

    def with_engine(self, python: str) -> Ir:
        return replace(self, converter=replace(self.converter, python=python))

    def with_dtype(self, dtype: str) -> Ir:
        return replace(self, converter=replace(self.converter, dtype=dtype))

    def write(
        self,
        directory: Path,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        to_file: Rename,
        target: TargetFiles | None,
    ) -> None:
        """Write the settings, apart from LAYERS_KEY, which only the IR holds, the tensors and the
        IR.
        """
        rest = {key: value for key, value in config.items() if key != LAYERS_KEY}
        super().write(directory, rest, tensors, to_file, target)
        self.add_ir(directory, config.get(LAYERS_KEY))

    def add_ir(self, directory: Path, layers: list[int] | None = None) -> None:
        """Add the IR of a drafter's files to their folder; `layers` are the ids of an EAGLE-3's
        fused layers.
        """
        add_ir(self.converter, directory, layers, self.options)


def write_target(
    target: TargetFiles, directory: Path, dtype: str | None, engine_python: str | None
) -> Path:
    """Write the IR of a target into a folder; return its file."""
    IrConverter(engine_python, dtype or "float32").convert(target.engine_path, directory)
    return directory / f"{IR_NAME}.xml"


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


def eagle3_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield the faults of EAGLE-3's files and of the fused layers that the IR names."""
    # Unlike vLLM, OpenVINO needs the map of a full vocabulary, too.
    findings = FLAT_EAGLE3.findings(source.files)
    yield from (finding for finding in findings if finding.name != "d2t-of-all")
    named = read_fused_layers(source.files.directory)
    ids = read_layer_ids(source.files.config)
    if named is None:
        yield layers_finding(
            f"{IR_NAME}.xml names no fused layers",
            "OpenVINO reads the target one layer too late",
        )
    elif ids is not None and named != [layer + source.layout.layer_id_offset for layer in ids]:
        yield layers_finding(
            f"{IR_NAME}.xml names other fused layers than config.json",
            "OpenVINO reads other layers than were trained on",
        )


def default_layer_findings(source: FusedFiles, target: TargetFiles) -> Iterator[Finding]:
    """Yield a fault where the IR does not name the default that config.json means."""
    named = read_fused_layers(source.files.directory)
    default = engine_layers(target.num_layers)
    if read_layer_ids(source.files.config) is None and named not in (None, default):
        yield layers_finding(
            f"{IR_NAME}.xml names the stream entering layers {named}, and config.json means "
            f"{default}",
            "OpenVINO reads other layers than were trained on",
        )


def check_eagle3(export: Export) -> None:
    """Raise UserError for fused layers that are not known, and for what OpenVINO's EAGLE-3 lacks:
    its class has three fused layers and no norm flags.
    """
    if export.settings.get("layers") is None:
        if export.target is None:
            raise UserError(
                "--target: the default of the fused layers depends on the target; say which "
                "one it is"
            )
        unnamed_layers(export.target)
    for flag, is_set in variant_flags(export.drafter).items():
        if is_set and flag != "own_embedding":
            raise UserError(
                f"drafter.architecture.{flag}=true: OpenVINO's EAGLE-3 has no such norm and "
                f"ignores the flag; train with drafter.architecture.{flag}=false"
            )
    check_layer_count(export.drafter, export.target, "OpenVINO's EAGLE-3", lowest=1)


def eagle3_ir_config(export: Export) -> dict[str, Any]:
    layers = export.settings.get("layers")
    if layers is None:
        layers = unnamed_layers(export.known_target)
    return eagle3_config(export) | {LAYERS_KEY: layers}


def eagle3_snippets(drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
    tree = "tree_depth, config.branching_factor, config.num_assistant_tokens = 2, 2, 4"
    chain = f"num_assistant_tokens = {CHAIN_TOKENS}"
    return {
        "OpenVINO GenAI, a chain": generate_lines(target, path, chain),
        "OpenVINO GenAI, a tree": generate_lines(target, path, tree),
    }


# OpenVINO GenAI decodes it in chains and trees.
OPENVINO_EAGLE3 = replace(
    FLAT_EAGLE3,
    title="EAGLE-3, OpenVINO",
    engine="OpenVINO",
    container=Ir(HEAD_OPTIONS),
    make_config=eagle3_ir_config,
    # optimum-intel leaves a missing d2t uninitialized, and every draft is another token
    select_tensors=without_embedding,
    file_checks=(eagle3_findings,),
    target_checks=(*FLAT_EAGLE3.target_checks, default_layer_findings),
    write_checks=(check_eagle3, *FLAT_EAGLE3.write_checks),
    launches=launch_with({"openvino": "eagle3"}),
    snippets=eagle3_snippets,
)


def check_directions(export: Export) -> None:
    """Raise UserError for a window and for causal blocks."""
    for key, value, default in (("window", None, "null"), ("causal", False, "false")):
        if export.settings[key] != value:
            raise UserError(
                f"drafter.{key}: OpenVINO's DFlash attends to the block in both directions, "
                f"without a window; use --to vllm, or train with drafter.{key}={default}"
            )


def dflash_snippets(drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
    setting = f"num_assistant_tokens = {num_drafts(drafter)}"
    return {"OpenVINO GenAI": generate_lines(target, path, setting, has_prefix_caching=False)}


# Attention in both directions, the target's embedding and output layer.
OPENVINO_DFLASH = replace(
    FLAT_DFLASH,
    title="DFlash, OpenVINO",
    engine="OpenVINO",
    container=Ir(HEAD_OPTIONS),
    write_checks=(check_directions, *FLAT_DFLASH.write_checks),
    launches=launch_with({"openvino": "dflash"}, num_drafts),
    snippets=dflash_snippets,
)


class OpenVinoModel(HuggingFaceLayout):
    """A distilled draft model for OpenVINO GenAI."""

    title = "transformers, OpenVINO"
    container: Ir = Ir()

    def matches_files(self, files: DrafterFiles) -> bool:
        return self.container.holds(files) and super().matches_files(files)

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        super().write(drafter, target, directory)
        self.container.add_ir(directory)

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"openvino": DrafterLaunch("draft_model", path, CHAIN_TOKENS)}

    def python_snippets(self, drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
        return {
            "OpenVINO GenAI": generate_lines(target, path, f"num_assistant_tokens = {CHAIN_TOKENS}")
        }


OPENVINO_MODEL = OpenVinoModel()
