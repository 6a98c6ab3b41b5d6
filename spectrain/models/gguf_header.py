"""The header of a GGUF file, checked before a library reads it.

Counts and lengths in a header are what somebody wrote; each is compared with the size of the file
before anything is looped over or allocated, so that a file of a few bytes cannot keep a process
busy or fill its memory.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

import gguf

from spectrain.errors import UserError

MAX_NAME_BYTES = 65_535
MAX_NESTED_ARRAYS = 4
MAX_DIMENSIONS = 8
VERSIONS = (2, 3)
ValueType = gguf.GGUFValueType
SCALAR_BYTES = {
    ValueType.UINT8: 1,
    ValueType.INT8: 1,
    ValueType.BOOL: 1,
    ValueType.UINT16: 2,
    ValueType.INT16: 2,
    ValueType.UINT32: 4,
    ValueType.INT32: 4,
    ValueType.FLOAT32: 4,
    ValueType.UINT64: 8,
    ValueType.INT64: 8,
    ValueType.FLOAT64: 8,
}
# A key has a length, a type and a value; a tensor a length, its number of dimensions, a type and an
# offset.
KEY_BYTES = 8 + 4 + 1
TENSOR_BYTES = 8 + 4 + 4 + 8


class MalformedHeader(ValueError):
    """A GGUF header that does not fit its file."""


def check_gguf_header(path: Path) -> None:
    """Raise a UserError if a file is no GGUF file, or if its header says more than the file can
    hold.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; give a GGUF file")
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            HeaderReader(content).read_header()
    except (MalformedHeader, OSError, ValueError) as error:
        raise UserError(
            f"{path}: it cannot be read as a GGUF file ({error}); copy the file again"
        ) from error


class HeaderReader:
    """Reads a header from the beginning, and never past the end of the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.position = 0

    @property
    def num_left(self) -> int:
        return len(self.content) - self.position

    def read_header(self) -> None:
        """Read keys and tensor infos; raise `MalformedHeader` at the first that cannot be."""
        if self.content[:4] != b"GGUF":
            raise MalformedHeader("it does not begin with GGUF")
        self.position = 4
        version = self.read_number("<I")
        if version not in VERSIONS:
            raise MalformedHeader(
                f"its version is {version}, and versions {' and '.join(map(str, VERSIONS))} are "
                "read"
            )
        num_tensors = self.read_number("<Q")
        num_keys = self.read_number("<Q")
        self.check_count(num_keys, KEY_BYTES, "keys")
        self.check_count(num_tensors, TENSOR_BYTES, "tensors")
        for _ in range(num_keys):
            self.read_text("the name of a key", MAX_NAME_BYTES)
            self.skip_value(self.read_type(), MAX_NESTED_ARRAYS)
        self.check_count(num_tensors, TENSOR_BYTES, "tensors")
        # The data begins behind the header; what aligns it is left out of account.
        end = max([self.read_tensor_end() for _ in range(num_tensors)], default=0)
        if end > self.num_left:
            raise MalformedHeader(
                f"its tensors take {end} bytes, and {self.num_left} are left of the file"
            )

    def read_number(self, form: str) -> int:
        """Read an integer in a form of the module struct."""
        size = struct.calcsize(form)
        self.check_count(size, 1, "bytes")
        number: int = struct.unpack_from(form, self.content, self.position)[0]
        self.position += size
        return number

    def check_count(self, count: int, size: int, what: str) -> None:
        """Raise `MalformedHeader` if `count` parts of at least `size` bytes do not fit what is
        left of the file.
        """
        if count * size > self.num_left:
            raise MalformedHeader(
                f"it says {count} {what}, and {self.num_left} bytes are left of the file"
            )

    def read_text(self, what: str, max_bytes: int | None = None) -> None:
        """Skip a text, which has its length before it."""
        size = self.read_number("<Q")
        if max_bytes is not None and size > max_bytes:
            raise MalformedHeader(f"{what} has {size} bytes")
        self.check_count(size, 1, "bytes of text")
        self.position += size

    def read_type(self) -> Any:
        """Read the type of a value."""
        number = self.read_number("<I")
        try:
            return ValueType(number)
        except ValueError as error:
            raise MalformedHeader(f"a value has the type {number}, which there is not") from error

    def skip_value(self, kind: Any, depth: int) -> None:
        """Skip a value; arrays may be nested `depth` times."""
        if kind in SCALAR_BYTES:
            self.skip_numbers(1, kind)
        elif kind == ValueType.STRING:
            self.read_text("a text")
        elif depth == 0:
            raise MalformedHeader("its arrays are nested too deeply")
        else:
            item_kind = self.read_type()
            count = self.read_number("<Q")
            if item_kind in SCALAR_BYTES:
                self.skip_numbers(count, item_kind)
                return
            # A text has its length, an array its type and its length.
            self.check_count(count, 8, "values")
            for _ in range(count):
                self.skip_value(item_kind, depth - 1)

    def skip_numbers(self, count: int, kind: Any) -> None:
        """Skip numbers of one type."""
        self.check_count(count, SCALAR_BYTES[kind], "numbers")
        self.position += count * SCALAR_BYTES[kind]

    def read_tensor_end(self) -> int:
        """Read the name, shape, type and place of a tensor; return where it ends in the data."""
        self.read_text("the name of a tensor", MAX_NAME_BYTES)
        num_dimensions = self.read_number("<I")
        if num_dimensions > MAX_DIMENSIONS:
            raise MalformedHeader(f"a tensor has {num_dimensions} dimensions")
        num_values = 1
        for _ in range(num_dimensions):
            num_values *= self.read_number("<Q")
        number = self.read_number("<I")
        offset = self.read_number("<Q")
        try:
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
        except (ValueError, KeyError) as error:
            raise MalformedHeader(f"a tensor has the type {number}, which there is not") from error
        return offset + num_values // block_size * block_bytes
