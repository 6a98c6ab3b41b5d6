"""The layout of DFlash for transformers, whose class for it is `muse_glimmer_assistant`; its layers are DFlash's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from spectrain.errors import UserError

from .block_settings import NAME_PREFIXES, qwen3_layer
from .dflash import DFlashLayout
from .dflash_flat import FlatDFlash
from .huggingface import generate_snippet
from .layout import DrafterCheckpoint, DrafterFiles, Finding, write_json, write_tensors
from .targets import TargetFiles

MODEL_TYPE = "muse_glimmer_assistant"


class TransformersDFlash(FlatDFlash):
    """The transformers layout of DFlash: all keys at the top level of config.json, under that class's tensor names.

    A block attends in both directions, and embedding and output layer are always the target's.
    """

    title = "DFlash, transformers"
    architecture = "MuseGlimmerAssistantModel"
    name_prefixes: ClassVar[dict[str, str]] = {
        **NAME_PREFIXES,
        "fc.": "encoder.fc.",
        "hidden_norm.": "encoder.output_norm_enc.",
    }

    def matches_files(self, files: DrafterFiles) -> bool:
        return files.config.get("model_type") == MODEL_TYPE

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from DFlashLayout.findings(self, files)

    def write(self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path) -> None:
        self.check_flat_writable(drafter, target)
        settings = drafter.drafter
        if settings["window"] is not None:
            raise UserError(
                f"drafter.window={settings['window']}: transformers applies a window to both sides of a slot; use --to vllm, "
                "or train with drafter.window=null"
            )
        tensors = {
            name: tensor for name, tensor in drafter.tensors.items() if name not in ("d2t", "t2d", "embed_tokens.weight")
        }
        layer = {key: value for key, value in qwen3_layer(drafter).items() if "sliding" not in key}
        config = {
            **layer,
            "model_type": MODEL_TYPE,
            "architectures": [self.architecture],
            "block_size": settings["block_size"],
            **self.mask_and_layers(drafter),
            "dtype": drafter.dtype,
        }
        if target is not None:
            config |= {key: getattr(target.config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(directory / "config.json", config)
        write_tensors(directory / "model.safetensors", self.layout_tensors(tensors))

    def serve_commands(self, drafter: DrafterCheckpoint, files: TargetFiles, target: str, drafter_path: str) -> dict[str, str]:
        assistant = f'assistant_model=AutoModel.from_pretrained("{drafter_path}"), speculation_type="dflash"'
        return {"transformers": generate_snippet(target, assistant, "AutoModel, AutoModelForCausalLM, AutoTokenizer")}
