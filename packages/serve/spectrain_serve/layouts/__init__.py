"""The layouts of llama.cpp and OpenVINO, which read no files of other projects, and their own
commands. The core finds them by the entry points `spectrain.export` and `spectrain.engines`.

The table names layouts as text, so that listing the formats imports none.
"""

from spectrain.export.table import (
    EngineSupport,
    LayoutPackage,
    TableRow,
    TargetFormat,
    WeightlessExport,
)
from spectrain.servers.commands import Engine

from ..engines.llamacpp_command import serve_llamacpp
from ..engines.openvino_command import serve_openvino

FOLDER = "spectrain_serve.layouts"
# Their files are recognized by their own suffix or beside the files of others, so they come first.
FIRST = "speculators.SPECULATORS_EAGLE3"
ENGINES = {
    "llamacpp": Engine("llama.cpp", serve_llamacpp, target_format="gguf"),
    "openvino": Engine("OpenVINO", serve_openvino, read_versions=("2026.4",)),
}


def gguf_row(name: str, family: str) -> TableRow:
    """Return the row of a layout in a GGUF file."""
    return TableRow(f"{FOLDER}.{name}", ("gguf",), (family,), ".gguf", before=FIRST)


def openvino_row(name: str, family: str) -> TableRow:
    """Return the row of a layout with OpenVINO's intermediate representation."""
    return TableRow(f"{FOLDER}.openvino.{name}", ("openvino",), (family,), before=FIRST)


EXPORT = LayoutPackage(
    rows=(
        gguf_row("gguf_eagle3.GGUF_EAGLE3", "eagle3"),
        gguf_row("gguf_dflash.GGUF_DFLASH2", "dflash2"),
        gguf_row("gguf_dflash.GGUF_DSPARK", "dspark"),
        gguf_row("gguf_dflash.GGUF_DFLASH", "dflash"),
        gguf_row("gguf_model.GGUF_MODEL", "causal"),
        openvino_row("OPENVINO_DFLASH", "dflash"),
        openvino_row("OPENVINO_EAGLE3", "eagle3"),
        openvino_row("OPENVINO_MODEL", "causal"),
    ),
    support=(
        EngineSupport("llamacpp", f"{FOLDER}.gguf_eagle3.GGUF_EAGLE3"),
        EngineSupport("llamacpp", f"{FOLDER}.gguf_dflash.GGUF_DFLASH"),
        EngineSupport("llamacpp", f"{FOLDER}.gguf_dflash.GGUF_DFLASH2"),
        EngineSupport("llamacpp", f"{FOLDER}.gguf_dflash.GGUF_DSPARK", note="vanilla Markov head"),
        EngineSupport("llamacpp", f"{FOLDER}.gguf_model.GGUF_MODEL"),
        EngineSupport("openvino", f"{FOLDER}.openvino.OPENVINO_EAGLE3"),
        EngineSupport("openvino", f"{FOLDER}.openvino.OPENVINO_DFLASH"),
        EngineSupport("openvino", f"{FOLDER}.openvino.OPENVINO_MODEL"),
    ),
    target_formats={
        "gguf": TargetFormat("GGUF", f"{FOLDER}.gguf_model.write_target"),
        "openvino": TargetFormat("OpenVINO", f"{FOLDER}.openvino.write_target"),
    },
    weightless=(
        WeightlessExport(
            ("ngram", "retrieval"), "vllm", "vLLM", "spectrain_serve.copying.export.write_copying"
        ),
    ),
)
