"""A target as files: its configuration, embedding and tokenizer, read without loading the model."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from spectrain.config.build import GroupSpec
from spectrain.errors import UserError, first_line
from spectrain.models.attention import ATTENTION_NAME, attn_implementation_for
from spectrain.models.bundled import (
    SMOLLM2_NAME,
    convert_gguf,
    convert_smollm2,
    converted_directory,
    find_smollm2,
)
from spectrain.models.checked_tensors import open_tensors
from spectrain.models.checkpoint_files import list_weight_files
from spectrain.models.load_errors import explain_load_error, explain_load_failure
from spectrain.models.loading import resolve_device, resolve_dtype
from spectrain.models.model_sizes import check_model_directory, check_shape
from spectrain.models.published import MODELS, cache_directory, locate_model
from spectrain.models.rope import RopeError, drafter_rope
from spectrain.models.sharding import select_auto_class
from spectrain.models.target import Target
from spectrain.models.tokenizer_files import check_tokenizer_file
from spectrain.training.checkpoints import judge_type

BUNDLED_TARGETS = ("tiny", "smollm2")
"""Choices of `target` whose name is all that loading needs."""


class TargetFiles:
    """The files of a target: `tiny`, `smollm2`, a directory in transformers format, a .gguf file
    or a name on the hub.
    """

    def __init__(
        self, reference: str, with_weights: bool = True, may_download: bool = True
    ) -> None:
        self.reference = reference
        # Whether the directory needs the weights of a GGUF file, which the first use converts.
        self.with_weights = with_weights
        # What a drafter's own files name is read from this machine alone.
        self.may_download = may_download
        # Its group in a configuration, in which a path is an absolute one.
        self.spec = GroupSpec("target", reference)
        if reference not in BUNDLED_TARGETS:
            path = Path(reference).expanduser()
            is_path = reference not in MODELS and path.exists()
            model = str(path.resolve()) if is_path else reference
            self.spec = GroupSpec("target", "hf", {"model": model})

    @staticmethod
    def from_settings(
        settings: dict[str, Any], with_weights: bool = True, may_download: bool = True
    ) -> TargetFiles:
        """Return the files of a configuration's group `target`; a plan needs no weights, and those
        of a file of settings may not be downloaded."""
        spec = GroupSpec.from_node("target", settings)
        bundled = spec.choice if spec.choice in BUNDLED_TARGETS else None
        reference = spec.settings.get("path") or bundled or spec.settings.get("model")
        if not isinstance(reference, str) or not reference:
            raise UserError(
                f"target.model={reference}: it does not name a target; give a model directory or "
                "a name on the hub"
            )
        files = TargetFiles(reference, with_weights, may_download)
        model = {"model": files.spec.settings.get("model")} if "model" in spec.settings else {}
        files.spec = spec.with_settings(**model)
        return files

    @property
    def settings(self) -> dict[str, Any]:
        """Its group in a configuration, as a node to construct."""
        return self.spec.node

    @cached_property
    def directory(self) -> Path:
        """The directory of the files; the first use of a hub name downloads them."""
        if self.reference == "tiny":
            return Path(__file__).parent.parent / "data" / "tiny"
        if self.reference == "smollm2":
            return convert_smollm2(self.with_weights)
        gguf = self.gguf_file
        if gguf is not None:
            return convert_gguf(gguf, self.weight_dtype if self.with_weights else None)
        path = Path(self.reference).expanduser()
        if path.is_dir():
            return path.resolve()
        if path.is_absolute() or self.reference.startswith("."):
            raise UserError(
                f"target {self.reference}: there is no such directory; give a model directory or "
                "a name on the hub"
            )
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )

        try:
            patterns = ["*.json", "*.safetensors", "*.jinja", "*.model"]
            local = not self.may_download
            return Path(
                snapshot_download(self.reference, allow_patterns=patterns, local_files_only=local)
            )
        except LocalEntryNotFoundError as error:
            raise UserError(self._explain_absence()) from error
        except (HfHubHTTPError, RepositoryNotFoundError, ValueError, OSError) as error:
            raise UserError(
                f"target {self.reference}: it cannot be found ({first_line(error)}); give a model "
                "directory"
            ) from error

    def _explain_absence(self) -> str:
        """Return the sentence for a target on the hub that is not on this machine."""
        if self.may_download:
            return (
                f"target {self.reference}: it cannot be found on the hub or on this machine; "
                "give a model directory"
            )
        return (
            f"target {self.reference}: a file names it, and what a file names is not downloaded; "
            f"name it in the command, as in target=hf target.model={self.reference}"
        )

    @property
    def gguf_file(self) -> Path | None:
        """The GGUF file from which the target was made; None for a target that was not."""
        if self.reference == "smollm2":
            return find_smollm2()
        path = Path(locate_model(self.reference, "target.model")).expanduser()
        return path.resolve() if path.suffix == ".gguf" else None

    @property
    def weight_dtype(self) -> torch.dtype:
        """The type in which the weights of a GGUF file are converted: that of the target."""
        gguf = self.gguf_file
        assert gguf is not None
        config = AutoConfig.from_pretrained(convert_gguf(gguf, None))
        device = resolve_device(str(self.settings.get("device") or "auto"))
        return resolve_dtype(device, config, str(self.settings.get("dtype") or "auto"))

    @property
    def converted_directory(self) -> Path | None:
        """The directory to which a GGUF file is converted, which may not be written yet; None
        for a target that needs none.
        """
        gguf = self.gguf_file
        if self.reference == "smollm2":
            return cache_directory() / SMOLLM2_NAME
        return None if gguf is None else converted_directory(gguf, self.weight_dtype)

    @property
    def name(self) -> str:
        """The name on a model card; the default target's weights differ from the hub's."""
        return "smollm2-135m-q4_1" if self.reference == "smollm2" else self.reference

    @property
    def short_name(self) -> str:
        """The name in reports: of a folder or a file, the last part of its path."""
        return Path(self.name).name if Path(self.name).expanduser().exists() else self.name

    @property
    def engine_path(self) -> str:
        """The name or path by which an engine loads it."""
        is_name = self.settings.get("model") == self.reference and self.gguf_file is None
        if is_name:
            return self.reference
        return str(
            self.directory if self.with_weights else self.converted_directory or self.directory
        )

    @cached_property
    def full_config(self) -> Any:
        """The configuration of the whole model; of a model on the hub, no weights are downloaded
        for it.
        """
        is_on_hub = (
            not self.is_local
            and not Path(self.reference).is_absolute()
            and not self.reference.startswith(".")
        )
        if not is_on_hub:
            check_model_directory(self.directory)
        try:
            config = AutoConfig.from_pretrained(
                self.reference if is_on_hub else self.directory,
                trust_remote_code=False,
                local_files_only=not self.may_download,
            )
            check_shape(config.get_text_config(), self.directory / "config.json")
            return config
        except UserError:
            raise
        except Exception as error:  # a foreign config.json may raise anything
            if is_on_hub and not self.may_download:
                raise UserError(self._explain_absence()) from error
            reason = explain_load_error(self.directory, error)
            raise UserError(
                f"target {self.reference}: its config.json cannot be read ({reason}); give a "
                "model directory"
            ) from error

    @property
    def config(self) -> Any:
        """The configuration of the language model, which may be a part of the model."""
        return self.full_config.get_text_config()

    def drafter_rope(self, head_dim: int) -> dict[str, Any]:
        """Return the rotary embedding of a drafter's layers with heads of this size."""
        try:
            return drafter_rope(self.config.to_dict(), head_dim)
        except RopeError as error:
            raise UserError(
                f"target {self.reference}: its config.json cannot be read ({error}); give another "
                "target"
            ) from error

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return read_tokenizer(self.directory, f"target {self.reference}")

    @property
    def is_local(self) -> bool:
        """Whether reading its configuration needs no download."""
        return (
            self.reference in BUNDLED_TARGETS
            or self.reference in MODELS
            or Path(self.reference).expanduser().exists()
        )

    def build_meta_target(self) -> Target:
        """Return the target on the device "meta", without data, for its shapes."""
        config = self.full_config
        # Settings that are read may still build no model.
        with explain_load_failure(self.reference, "target"):
            return make_meta_target(config, self.tokenizer, self.reference, str(self.directory))

    @property
    def special_token_ids(self) -> dict[str, Any]:
        """The ids of special tokens, as configurations hold them."""
        return {
            key: getattr(self.config, key, None)
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        }

    def load_embedding(self) -> Tensor:
        """Return the embedding [V, D]."""
        return self._load_tensor(
            ("embed_tokens.weight", "wte.weight", "word_embeddings.weight"), "embedding"
        )

    def load_head(self) -> Tensor:
        """Return the output layer [V, D], which may be the embedding."""
        if self.full_config.tie_word_embeddings:
            return self.load_embedding()
        return self._load_tensor(("lm_head.weight", "embed_out.weight"), "output layer")

    @property
    def vocab_size(self) -> int:
        """The number of rows of the output layer."""
        return int(self.config.vocab_size)

    def _load_tensor(self, endings: tuple[str, ...], what: str) -> Tensor:
        for path in list_weight_files(self.directory):
            with open_tensors(path) as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    if name.endswith(endings) and not name.startswith("vision"):
                        return self._require_real(name, file.get_tensor(name))
        raise UserError(
            f"target {self.reference}: its {what} is not among its safetensors; save the model "
            "with save_pretrained"
        )

    def _require_real(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor; raise UserError where its numbers are none without their scales."""
        fault = judge_type(tensor.dtype, torch.float32)
        if fault is not None:
            raise UserError(
                f"target {self.reference}: {name} {fault}, and drafters borrow it; use one "
                "that has it in float32, bfloat16 or float16"
            )
        return tensor

    def template_hash(self) -> str:
        """Return a hash of tokens and chat template, equal for targets that use the same ids and
        text.
        """
        return tokenizer_hash(self.tokenizer)


def make_meta_target(config: Any, tokenizer: Any = None, name: str = "", path: str = "") -> Target:
    """Return the target of a configuration on the device "meta", without data, for its shapes."""
    attention = attn_implementation_for(config, ATTENTION_NAME)
    with torch.device("meta"):
        model = select_auto_class(config).from_config(
            config, attn_implementation=attention, trust_remote_code=False
        )
    return Target(model, tokenizer, name, path)


def read_tokenizer(directory: Path, name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a directory; a UserError, which begins with `name`, says why its
    files cannot be read.
    """
    check_tokenizer_file(directory / "tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    # The settings of foreign files may raise anything.
    except Exception as error:
        raise UserError(
            f"{name}: its tokenizer cannot be read ({first_line(error)}); copy its files again"
        ) from error


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of every token with its id, the special tokens and the chat template."""
    content = [
        sorted(tokenizer.get_vocab().items()),
        sorted(map(str, tokenizer.all_special_tokens)),
        tokenizer.chat_template,
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
