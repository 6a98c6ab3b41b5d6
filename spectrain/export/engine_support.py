"""Which versions of which programs read which layout: one table. The documentation, the model card,
the help, what an export prints and the refusal to start an engine of another version come from it.

A row was taken from the program's own code: of an engine that looks up a drafter's class by its
name, the row has the names, and a test compares them with the engine where it is installed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from spectrain.servers.engines import ENGINES

from .layouts import FAMILY_TITLES, LAYOUTS, find_row
from .table import EngineSupport, list_packages

if TYPE_CHECKING:
    from .layout import Layout

PROGRAMS = {
    **{name: engine.title for name, engine in ENGINES.items()},
    "transformers": "transformers",
    "tensorrt": "TensorRT-LLM",
    "speculators": "the speculators library",
    "eagle": "SafeAILab's code",
    "fasterdecoding": "FasterDecoding's code",
    "peft": "peft",
    **{name: title for package in list_packages() for name, title in package.programs.items()},
}
"""Program that reads layouts -> its name in texts. Engines stand first."""
READ_VERSIONS = {
    **{name: engine.read_versions for name, engine in ENGINES.items() if engine.read_versions},
    "transformers": ("5.23",),
    "speculators": ("0.9",),
}
"""Program -> the versions from whose code its rows were taken. Nothing is known of others."""
ALL_SCHEMES = ("int8", "w4a16", "fp8")
CORE_SUPPORT = (
    EngineSupport(
        "vllm",
        "speculators.SPECULATORS_EAGLE3",
        ("Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"),
        quantized=(*ALL_SCHEMES, "fc"),
    ),
    EngineSupport("speculators", "speculators.SPECULATORS_EAGLE3"),
    EngineSupport(
        "vllm",
        "peagle.SPECULATORS_PEAGLE",
        ("PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM"),
        quantized=(*ALL_SCHEMES, "fc"),
    ),
    EngineSupport("speculators", "peagle.SPECULATORS_PEAGLE"),
    EngineSupport(
        "vllm",
        "peagle.FLAT_PEAGLE",
        ("LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"),
        quantized=(*ALL_SCHEMES, "fc"),
    ),
    EngineSupport("vllm", "dflash_speculators.SPECULATORS_DFLASH", ("DFlashDraftModel",)),
    EngineSupport("speculators", "dflash_speculators.SPECULATORS_DFLASH"),
    EngineSupport(
        "vllm", "dflash_speculators.SPECULATORS_DFLASH2", ("DFlash2DraftModel",), note="on a GPU"
    ),
    EngineSupport("speculators", "dflash_speculators.SPECULATORS_DFLASH2"),
    EngineSupport(
        "vllm",
        "dflash_speculators.SPECULATORS_DSPARK",
        ("Qwen3DSparkModel",),
        note="on a GPU, vanilla Markov head",
    ),
    EngineSupport("speculators", "dflash_speculators.SPECULATORS_DSPARK"),
    EngineSupport("vllm", "medusa.VLLM_MEDUSA", ("MedusaModel",), until="0.32"),
    EngineSupport(
        "vllm", "eagle1.VLLM_EAGLE1", ("EagleLlamaForCausalLM",), note="fc without a bias"
    ),
    EngineSupport("sglang", "eagle1.SGLANG_EAGLE1", ("LlamaForCausalLMEagle",)),
    EngineSupport("eagle", "eagle1.ORIGINAL_EAGLE1"),
    EngineSupport(
        "vllm",
        "latent_eagle3.LATENT_EAGLE3",
        ("Eagle3DeepseekV2ForCausalLM",),
        note="targets of DeepSeek's kind; not run here",
    ),
    EngineSupport("sglang", "flat.FLAT_EAGLE3", ("LlamaForCausalLMEagle3",), quantized=ALL_SCHEMES),
    EngineSupport(
        "vllm",
        "flat.FLAT_EAGLE3",
        ("LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"),
        note="default layers",
        quantized=(*ALL_SCHEMES, "fc"),
    ),
    EngineSupport("tensorrt", "flat.FLAT_EAGLE3"),
    EngineSupport("sglang", "dflash_flat.FLAT_DFLASH", ("DFlashDraftModel",)),
    EngineSupport("vllm", "dflash_flat.FLAT_DFLASH", ("DFlashDraftModel",)),
    EngineSupport("sglang", "dflash_flat.FLAT_DFLASH2", ("DFlash2DraftModel",)),
    EngineSupport("vllm", "dflash_flat.FLAT_DFLASH2", ("DFlash2DraftModel",), note="on a GPU"),
    EngineSupport("sglang", "dflash_flat.FLAT_LILICORR", ("LiLiCorrDraftModel",)),
    EngineSupport("vllm", "dflash_flat.FLAT_LILICORR", ("LiLiCorrDraftModel",), note="on a GPU"),
    EngineSupport("sglang", "dflash_flat.FLAT_DSPARK", ("Qwen3DSparkModel",)),
    EngineSupport(
        "vllm",
        "dflash_flat.FLAT_DSPARK",
        ("Qwen3DSparkModel",),
        note="on a GPU, vanilla Markov head",
    ),
    EngineSupport(
        "transformers", "dflash_flat.TRANSFORMERS_DFLASH", ("MuseGlimmerAssistantModel",)
    ),
    EngineSupport("fasterdecoding", "medusa.ORIGINAL_MEDUSA"),
    EngineSupport("tensorrt", "medusa.TENSORRT_MEDUSA"),
    EngineSupport("vllm", "huggingface.HUGGINGFACE", note="not LayerSkip", quantized=ALL_SCHEMES),
    EngineSupport(
        "sglang",
        "huggingface.HUGGINGFACE",
        note="not LayerSkip, not PARD",
        quantized=ALL_SCHEMES,
    ),
    EngineSupport(
        "transformers", "huggingface.HUGGINGFACE", note="not PARD", quantized=ALL_SCHEMES
    ),
    EngineSupport("vllm", "mtp.MTP_TARGET"),
    EngineSupport("sglang", "mtp.MTP_TARGET"),
    EngineSupport("transformers", "mtp.MTP_TARGET"),
)


@cache
def list_support() -> tuple[EngineSupport, ...]:
    """Return all rows, those of installed packages last."""
    return (*CORE_SUPPORT, *(row for package in list_packages() for row in package.support))


def list_readers(layout: Layout) -> list[EngineSupport]:
    """Return the rows of the programs that read a layout."""
    path = find_row(layout).path
    return [support for support in list_support() if support.layout == path]


def name_program(support: EngineSupport) -> str:
    """Return the program of a row with the versions that read the layout, as in "vLLM up to
    0.32"."""
    return f"{PROGRAMS[support.program]} {describe_versions(support)}".rstrip()


def describe_versions(support: EngineSupport) -> str:
    """Return the versions that read the layout, as in "up to 0.32"; "" where all that were read
    do.
    """
    if support.since and support.until:
        return f"{support.since} to {support.until}"
    if support.since:
        return f"from {support.since}"
    return f"up to {support.until}" if support.until else ""


def describe_readers(layout: Layout) -> str:
    """Return the programs that read a layout as part of a sentence, with their versions."""
    return ", ".join(
        name_program(support) + (f" ({support.note})" if support.note else "")
        for support in list_readers(layout)
    )


def describe_format(format_name: str) -> str:
    """Return the programs that read a format, as in "vLLM (Medusa up to 0.32)"; "" where there is
    none. No layout is imported.
    """
    rows = {row.path: row for row in LAYOUTS if format_name in row.formats}
    exceptions: dict[str, list[str]] = {}
    for support in list_support():
        if support.layout in rows:
            bounded = exceptions.setdefault(PROGRAMS[support.program], [])
            if support.since or support.until:
                families = rows[support.layout].families
                titles = ", ".join(FAMILY_TITLES.get(family, family) for family in families)
                bounded.append(f"{titles} {describe_versions(support)}")
    return ", ".join(
        title + (f" ({', '.join(bounded)})" if bounded else "")
        for title, bounded in exceptions.items()
    )


def list_quantized_readers(layout: Layout, scheme: str, with_fc: bool = False) -> list[str]:
    """Return the titles of the programs that read a layout with weights of a choice of
    `quantize`, in their order."""
    needed = {scheme, "fc"} if with_fc else {scheme}
    return [
        PROGRAMS[support.program]
        for support in list_readers(layout)
        if needed <= {*support.quantized}
    ]


def name_engine(layout: Layout, engine: str) -> str:
    """Return an engine's title, with the versions that read the layout where not all do."""
    names = [name_program(support) for support in list_readers(layout) if support.program == engine]
    return names[0] if names else ENGINES[engine].title
