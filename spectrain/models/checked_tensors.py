"""Files of tensors that carry a checksum, so that a damaged one is never taken for what was saved.

The checksum is the SHA-256 of names, types, shapes and bytes of all tensors, in the metadata of the
safetensors file. It stays in the file when that is copied or renamed; a file that another tool has
written has none, and is not checked. Hashing takes a second for a gigabyte or two, where the
processor has instructions for it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spectrain.errors import UserError, first_line

CHECKSUM_KEY = "sha256"
MAX_DRAFTER_TENSORS = 1 << 15
"""Tensors of one file of a drafter; the largest targets have 90,000 in all of their files, and a
few hundred in each.
"""


class DamagedFile(UserError):
    """A file does not hold what was saved in it."""


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of named tensors on the CPU, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        digest.update(content)
    return digest.hexdigest()


def hash_settings(settings: Mapping[str, Any]) -> str:
    """Return the checksum of settings by name, beside which JSON files hold it."""
    content = {key: value for key, value in settings.items() if key != CHECKSUM_KEY}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Write tensors and their checksum to a safetensors file; return the checksum.

    The checksum is the only entry of the metadata, because safetensors writes several in any order,
    and equal tensors are to give equal files.
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    checksum = hash_tensors(contiguous)
    save_file(contiguous, path, metadata={CHECKSUM_KEY: checksum})
    return checksum


@contextmanager
def open_tensors(path: Path, remedy: str = "copy the file again") -> Iterator[Any]:
    """Open a safetensors file to read single tensors; raise `DamagedFile` if it is no file or
    cannot be read.

    A checksum is not compared, because that takes all tensors.
    """
    try:
        # A pipe would never end.
        if not path.is_file():
            raise DamagedFile(f"{path}: there is no such file; {remedy}")
        with safe_open(path, framework="pt") as file:
            check_header(path, len(file.keys()), remedy)
            yield file
    except (OSError, SafetensorError) as error:
        raise DamagedFile(f"{path}: it cannot be read ({first_line(error)}); {remedy}") from error


def check_header(path: Path, num_names: int, remedy: str) -> None:
    """Raise `DamagedFile` where the header of a safetensors file with `num_names` different names
    holds one of them twice.

    safetensors takes the last entry, and another reader may take the first, with another shape or
    type for the same bytes.
    """
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    # Each entry has this key once, and a header without escapes cannot hide it.
    if header.count(b'"data_offsets"') == num_names and b"\\" not in header:
        return
    repeated: list[str] = []

    def find_repeated(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(entries)
        if len(content) < len(entries):
            counts = Counter(name for name, _ in entries)
            repeated.extend(name for name, count in counts.items() if count > 1)
        return content

    json.loads(header, object_pairs_hook=find_repeated)
    if repeated:
        raise DamagedFile(f"{path}: its header holds {repeated[0]} twice; {remedy}")


def has_finite_values(tensor: Tensor) -> bool:
    """Return whether no value is NaN or infinite; torch itself asks no numbers of one byte."""
    return bool((tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all())


def read_checksum(path: Path, remedy: str) -> str | None:
    """Return the checksum that a safetensors file carries; None where it carries none."""
    with open_tensors(path, remedy) as file:
        return (file.metadata() or {}).get(CHECKSUM_KEY)


def read_tensors(path: Path, remedy: str, limit: int | None = None) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file; raise `DamagedFile` if it cannot be read, is not what
    was saved, or holds more tensors than `limit`."""
    with open_tensors(path, remedy) as file:
        metadata = file.metadata() or {}
        names = list(file.keys())
        if limit is not None and len(names) > limit:
            raise DamagedFile(
                f"{path}: it holds {', '.join(names[:3])} and {len(names) - 3} more tensors, and "
                f"no such file has more than {limit}; {remedy}"
            )
        tensors = {name: file.get_tensor(name) for name in names}
    saved = metadata.get(CHECKSUM_KEY)
    if saved is not None and saved != hash_tensors(tensors):
        raise DamagedFile(
            f"{path}: it is damaged: its tensors do not have the checksum that they were saved "
            f"with; {remedy}"
        )
    return tensors
