"""The layout of transformers for complete models: distilled drafters, PARD, and targets trained
to exit early (LayerSkip).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spectrain.errors import UserError
from spectrain.models.load_errors import explain_load_error
from spectrain.servers.commands import DrafterLaunch

from .container import Finding
from .drafter_files import DrafterFiles, write_json, write_tensors
from .layout import (
    CHAIN_TOKENS,
    DrafterCheckpoint,
    ExpectedTensors,
    Layout,
    make_checkpoint,
    require_target,
)
from .targets import TargetFiles

MODEL_PREFIX = "model.model."  # of the inner model's tensors in a drafter
STOP_HEAD_PREFIX = "stop_head."


class HuggingFaceLayout(Layout):
    """A directory for AutoModelForCausalLM; `spd_type` and `pard_token` name the embedding row
    of PARD's mask.
    """

    title = "transformers"

    def matches_files(self, files: DrafterFiles) -> bool:
        return any(name.endswith("ForCausalLM") for name in files.config.get("architectures") or [])

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(files.directory, trust_remote_code=False)
            with init_empty_weights():
                state = AutoModelForCausalLM.from_config(
                    config, trust_remote_code=False
                ).state_dict()
        except Exception as error:  # unknown settings may raise anything
            raise UserError(
                f"{files.directory / 'config.json'}: transformers cannot build this model "
                f"({explain_load_error(files.directory, error)}); copy the file again"
            ) from error
        optional = {"lm_head.weight"} if config.get_text_config().tie_word_embeddings else set()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        return ExpectedTensors(
            {name: shape for name, shape in shapes.items() if name not in optional},
            {name: shape for name, shape in shapes.items() if name in optional},
        )

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        token = files.config.get("pard_token")
        rows = files.config.get("vocab_size", 0)
        if files.config.get("spd_type") == "pard" and not (
            isinstance(token, int) and 0 <= token < rows
        ):
            yield Finding(
                "pard-token",
                "error",
                f"pard_token={token} is outside the embedding, which has {rows} rows",
                "engines put that token into every slot to draft",
                "write the id of the mask token",
            )

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        metadata = files.read_metadata()
        if metadata.early_exits is not None:
            raise UserError(
                f"{files.directory}: this is a target that exits early, not a drafter; use it as "
                f"target=hf target.model={files.directory} drafter=early_exit"
            )
        architecture = {
            key: value
            for key, value in files.config.items()
            if key not in ("spd_type", "pard_token")
        }
        tensors = {MODEL_PREFIX + name: tensor for name, tensor in files.tensors.items()}
        settings = {"architecture": architecture, "num_layers": None, "model": None}
        family = "causal"
        if files.config.get("spd_type") == "pard":
            family = "pard"
            name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
            token = files.config["pard_token"]
            tensors["mask"] = tensors[name][token : token + 1].clone()
            row = metadata.mask_row
            if row is not None:  # the row that the mask replaced
                tensors[name] = tensors[name].clone()
                tensors[name][token] = torch.tensor(row, dtype=tensors[name].dtype)
        return make_checkpoint(files, family, settings, tensors)

    def write(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None, directory: Path
    ) -> None:
        if drafter.is_target:
            self._write_target(drafter, directory)
            return
        if "features.weight" in drafter.tensors:
            raise UserError(
                f"drafter.layers={drafter.drafter.get('layers')}: no engine passes target "
                "features to PARD; score it with spectrain eval, or train it with "
                "drafter.layers=null"
            )
        target = require_target(target, "its tokenizer is also the drafter's")
        if any(name.startswith(STOP_HEAD_PREFIX) for name in drafter.tensors):
            print(
                "drafter.stop_head: left out, because no engine lets a drafter decide when to stop"
            )
        architecture = dict(drafter.drafter["architecture"])
        kind = architecture.setdefault("model_type", "llama")
        architecture.setdefault("architectures", [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]])
        exported = {
            name: tensor
            for name, tensor in drafter.tensors.items()
            if not name.startswith(STOP_HEAD_PREFIX)
        }
        tensors = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in exported.items()}
        architecture["dtype"] = drafter.dtype
        if "mask" in drafter.tensors:
            mask = tensors.pop("mask")
            token = find_mask_token(target, architecture["vocab_size"])
            name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
            row = tensors[name][token].tolist()
            tensors[name] = tensors[name].clone()
            tensors[name][token] = mask[0]
            architecture |= {"spd_type": "pard", "pard_token": token}
            drafter.description["mask_row"] = row
        write_json(directory / "config.json", architecture)
        write_tensors(directory / "model.safetensors", tensors)
        target.tokenizer.save_pretrained(directory)

    def _write_target(self, drafter: DrafterCheckpoint, directory: Path) -> None:
        trained = drafter.trained_target
        if trained is None:
            raise UserError(
                "format=hf: this target was not trained to exit early, so there is nothing to "
                "export; transformers decodes any model with generate(.., assistant_early_exit=E)"
            )
        shutil.copytree(trained, directory, dirs_exist_ok=True)

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        if drafter.is_target:
            return {}
        if "mask" in drafter.tensors:
            count = drafter.drafter.get("num_drafts", 8)
            return {"vllm": DrafterLaunch("draft_model", path, count, is_parallel=True)}
        return {
            "vllm": DrafterLaunch("draft_model", path, CHAIN_TOKENS),
            "sglang": DrafterLaunch("STANDALONE", path, CHAIN_TOKENS),
        }

    def python_snippets(self, drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
        if drafter.is_target:
            exit_layer = drafter.drafter["exit_layer"]
            return {"transformers": generate_snippet(path, f"assistant_early_exit={exit_layer}")}
        if "mask" in drafter.tensors:
            return {}
        return {
            "transformers": generate_snippet(
                target, f'assistant_model=AutoModelForCausalLM.from_pretrained("{path}")'
            )
        }


HUGGINGFACE = HuggingFaceLayout()


def generate_snippet(
    model: str, option: str, classes: str = "AutoModelForCausalLM, AutoTokenizer"
) -> str:
    """Return the lines of Python that decode with transformers."""
    return (
        f"from transformers import {classes}\n"
        f'tokenizer, model = AutoTokenizer.from_pretrained("{model}"), '
        f'AutoModelForCausalLM.from_pretrained("{model}")\n'
        'inputs = tokenizer("..", return_tensors="pt")\n'
        f"model.generate(**inputs, do_sample=False, {option})"
    )


def find_mask_token(target: TargetFiles, rows: int) -> int:
    """Return a token that no text holds: an unused embedding row, an unused special token, or
    the padding token.
    """
    tokenizer = target.tokenizer
    if rows > len(tokenizer):
        return len(tokenizer)
    template = tokenizer.chat_template or ""
    spare = {
        token.content: number
        for number, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special
        and token.content not in template
        and token.content not in (tokenizer.bos_token, tokenizer.eos_token)
    }
    last = [
        spare.pop(token) for token in (tokenizer.pad_token, tokenizer.unk_token) if token in spare
    ]
    candidates = [*spare.values(), *last]
    if not candidates:
        raise UserError(
            f"pard_token: {target.reference} has no unused token for the mask, and engines need "
            "the target's vocabulary; use drafter=causal, or a target whose embedding has rows "
            "without a token"
        )
    return candidates[0]
