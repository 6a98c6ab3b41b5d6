"""The header of a GGUF file: its keys, and where its tensors are.

Counts and lengths in a header are what somebody wrote; each is compared with the size of the file
before anything is looped over or allocated, so that a file of a few bytes cannot keep a process
busy or fill its memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf

from spectrain.errors import UserError

MAX_NAME_BYTES = 65_535
MAX_NESTED_ARRAYS = 4
MAX_DIMENSIONS = 8
VERSIONS = (2, 3)
ValueType = gguf.GGUFValueType
SCALAR_FORMS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.BOOL: "?",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
"""The form of a number in the module struct."""
RATE_TYPES = (ValueType.FLOAT32, ValueType.FLOAT64)
SIZE_TYPES = tuple(kind for kind in SCALAR_FORMS if kind not in (*RATE_TYPES, ValueType.BOOL))
# A key has a length, a type and a value; a tensor a length, its number of dimensions, a type and an
# offset.
KEY_BYTES = 8 + 4 + 1
TENSOR_BYTES = 8 + 4 + 4 + 8


# What the data of the tensors is aligned to in a file that does not say it.
ALIGNMENT = 32

TOKENS_KEY = "tokenizer.ggml.tokens"
# Which values a key has, by how it ends. transformers takes the only number of a list for a number,
# and true for 1; llama.cpp refuses both.
SIZE_KEYS = (
    ".context_length",
    ".embedding_length",
    ".block_count",
    ".vocab_size",
    ".attention.key_length",
    ".attention.value_length",
    ".attention.sliding_window",
    ".rope.dimension_count",
    ".rope.scaling.original_context_length",
    ".expert_count",
    ".expert_used_count",
    ".expert_feed_forward_length",
    ".nextn_predict_layers",
    "_token_id",
    "general.alignment",
)
RATE_KEYS = (
    ".rope.freq_base",
    ".rope.scaling.factor",
    ".attention.layer_norm_epsilon",
    ".attention.layer_norm_rms_epsilon",
)
TEXT_KEYS = (
    "general.architecture",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.chat_template",
)
# One number for all layers, or a list with one for each.
LAYER_KEYS = (".attention.head_count", ".attention.head_count_kv", ".feed_forward_length")
# Settings that layers have one each of are shorter, vocabularies longer.
MAX_SETTING_VALUES = 4096


class MalformedHeader(ValueError):
    """A GGUF header that does not fit its file."""


@dataclass
class HeaderField:
    """A key of a header, in the form of the fields of `gguf.GGUFReader`."""

    # The type of the value; of an array, that of its items too.
    types: list[Any] = field(default_factory=list)
    # The values: the bytes of a text, or a number in a tuple of its own.
    parts: list[Any] = field(default_factory=list)

    @property
    def data(self) -> range:
        """The indices of the parts that are values, which here are all."""
        return range(len(self.parts))

    @property
    def is_text_array(self) -> bool:
        """Whether the value is an array of texts."""
        return self.types[0] == ValueType.ARRAY and self.types[-1] == ValueType.STRING

    @property
    def value(self) -> Any:
        """The value as Python has it: a number, a text, or a list of either."""
        values = [str(part, "utf-8") if isinstance(part, bytes) else part[0] for part in self.parts]
        return values if self.types[0] == ValueType.ARRAY else values[0]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a GGUF file. Its shape is in the order of torch; its values are stored in blocks
    of a quantised type, or as they are.
    """

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    start: int  # from the beginning of the file
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The keys and the tensors of a GGUF file."""

    path: Path
    fields: dict[str, HeaderField]
    tensors: list[StoredTensor]

    def read_text(self, key: str) -> str:
        """Return the text of a key; raise KeyError where there is none."""
        return str(self.fields[key].parts[0], "utf-8")

    def read_metadata(
        self, string_arrays: Collection[str] = ()
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the values of the keys, and the names of the tensors. An array of texts is their
        number, unless its key is among `string_arrays`.
        """
        values = {
            key: len(entry.parts)
            if entry.is_text_array and key not in string_arrays
            else entry.value
            for key, entry in self.fields.items()
        }
        return values, tuple(tensor.name for tensor in self.tensors)

    def without_vocabulary(self) -> GgufHeader:
        """Return the header with empty texts for tokens and without the other long arrays, none of
        which a configuration reads.
        """
        fields = {
            key: replace(entry, parts=[b""] * len(entry.parts) if key == TOKENS_KEY else [])
            if len(entry.parts) > MAX_SETTING_VALUES
            else entry
            for key, entry in self.fields.items()
        }
        return replace(self, fields=fields)


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of a GGUF file; raise a UserError if a file is no GGUF file, or if its
    header says more than the file can hold.

    The newest one is kept: a vocabulary of 150,000 tokens takes some tenths of a second.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; give a GGUF file")
    status = path.stat()
    return _read_header(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _read_header(path: Path, size: int, changed: int) -> GgufHeader:
    """Read the header of a file that has this size and was changed at this time."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            reader = HeaderReader(content)
            reader.read_header()
            return GgufHeader(path, reader.fields, reader.tensors)
    except (MalformedHeader, OSError, ValueError) as error:
        raise UserError(
            f"{path}: it cannot be read as a GGUF file ({error}); copy the file again"
        ) from error


def count_values(path: Path) -> int:
    """Return the number of values of all tensors of a GGUF file."""
    return sum(math.prod(tensor.shape) for tensor in read_gguf_header(path).tensors)


@contextmanager
def lend_header(header: GgufHeader) -> Iterator[None]:
    """Let transformers take the keys of a file from its header. It reads them itself several times
    otherwise, which for a vocabulary of 150,000 tokens takes seconds each time.
    """
    # Tokenizers have a reader of their own; configurations need no vocabulary.
    lent = header.without_vocabulary()
    with ExitStack() as stack:
        stack.enter_context(_lend_function(gguf, "GGUFReader", header.path, lambda *_: lent))
        for name in ("", ".reader"):
            reader = import_module(f"transformers.integrations.gguf{name}")
            stack.enter_context(
                _lend_function(reader, "read_gguf_metadata", header.path, header.read_metadata)
            )
        yield


@contextmanager
def _lend_function(
    module: Any, name: str, file: Path, function: Callable[..., Any]
) -> Iterator[None]:
    """Call a function in place of a module's own for one file, whose path is the first argument
    of the module's.
    """
    own = getattr(module, name)

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        is_lent = Path(path).resolve() == file.resolve()
        return function(*args, **kwargs) if is_lent else own(path, *args, **kwargs)

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, own)


def check_tensors(tensors: list[StoredTensor], alignment: int) -> None:
    """Raise `MalformedHeader` for tensors without a name or values, for two of one name, and where
    the data of one does not begin where that of the one before it ends, as llama.cpp demands;
    `start` is relative to the data.
    """
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise MalformedHeader("two of its tensors have one name")
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if not tensor.name or not tensor.shape or math.prod(tensor.shape) == 0:
            raise MalformedHeader(f"the tensor {tensor.name!r} holds nothing")
        if tensor.start != end:
            raise MalformedHeader(
                f"the tensor {tensor.name} begins at byte {tensor.start} of the data, and the one "
                f"before it ends at {end}"
            )
        end = -(-(tensor.start + tensor.num_bytes) // alignment) * alignment


def check_value_types(fields: dict[str, HeaderField]) -> None:
    """Raise `MalformedHeader` for a key whose value is of another type than all files have, such as
    a list of one number for a number.
    """
    kinds = (
        (SIZE_KEYS, SIZE_TYPES, "a whole number"),
        (RATE_KEYS, RATE_TYPES, "a number with a fraction"),
        (TEXT_KEYS, (ValueType.STRING,), "a text"),
    )
    for name, entry in fields.items():
        for endings, types, what in kinds:
            if name.endswith(endings) and entry.types[0] not in types:
                raise MalformedHeader(f"its {name} is not {what}")
        if name.endswith(LAYER_KEYS):
            check_layer_value(name, entry, fields)


def check_layer_value(name: str, entry: HeaderField, fields: dict[str, HeaderField]) -> None:
    """Raise `MalformedHeader` for a value that is neither a whole number nor a list of one for each
    layer.
    """
    if entry.types[-1] not in SIZE_TYPES:
        raise MalformedHeader(f"its {name} is not a whole number")
    architecture = name.partition(".")[0]
    layers = fields.get(f"{architecture}.block_count")
    if entry.types[0] == ValueType.ARRAY and (
        layers is None or len(entry.types) > 2 or len(entry.parts) != layers.value
    ):
        raise MalformedHeader(f"its {name} is a list of another length than that of its layers")


class HeaderReader:
    """Reads a header from the beginning, and never past the end of the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.position = 0
        self.fields: dict[str, HeaderField] = {}
        self.tensors: list[StoredTensor] = []

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
            name = str(self.read_text("the name of a key", MAX_NAME_BYTES), "utf-8")
            if name in self.fields:
                raise MalformedHeader(f"the key {name} is given twice")
            self.fields[name] = entry = HeaderField()
            self.read_value(self.read_type(), MAX_NESTED_ARRAYS, entry)
        check_value_types(self.fields)
        self.check_count(num_tensors, TENSOR_BYTES, "tensors")
        tensors = [self.read_tensor() for _ in range(num_tensors)]
        alignment = self.read_alignment()
        check_tensors(tensors, alignment)
        data_start = -(-self.position // alignment) * alignment
        end = max([tensor.start + tensor.num_bytes for tensor in tensors], default=0)
        num_left = max(0, len(self.content) - data_start)
        if end > num_left:
            raise MalformedHeader(
                f"its tensors take {end} bytes, and {num_left} are left of the file"
            )
        self.tensors = [replace(tensor, start=data_start + tensor.start) for tensor in tensors]

    def read_alignment(self) -> int:
        """Return the number of bytes to which the data is aligned."""
        entry = self.fields.get("general.alignment")
        alignment = ALIGNMENT if entry is None or not entry.parts else entry.parts[0][0]
        if not isinstance(alignment, int) or not 0 < alignment <= len(self.content):
            raise MalformedHeader(f"its general.alignment is {alignment}")
        return alignment

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

    def read_text(self, what: str, max_bytes: int | None = None) -> bytes:
        """Read a text, which has its length before it."""
        size = self.read_number("<Q")
        if max_bytes is not None and size > max_bytes:
            raise MalformedHeader(f"{what} has {size} bytes")
        self.check_count(size, 1, "bytes of text")
        text = self.content[self.position : self.position + size]
        self.position += size
        return text

    def read_type(self) -> Any:
        """Read the type of a value."""
        number = self.read_number("<I")
        try:
            return ValueType(number)
        except ValueError as error:
            raise MalformedHeader(f"a value has the type {number}, which there is not") from error

    def read_value(self, kind: Any, depth: int, entry: HeaderField) -> None:
        """Read a value into a field; arrays may be nested `depth` times, and the items of inner
        ones are one list.
        """
        entry.types.append(kind)
        if kind in SCALAR_FORMS:
            self.read_numbers(1, kind, entry)
        elif kind == ValueType.STRING:
            entry.parts.append(self.read_text("a text"))
        elif depth == 0:
            raise MalformedHeader("its arrays are nested too deeply")
        else:
            item_kind = self.read_type()
            count = self.read_number("<Q")
            if item_kind in SCALAR_FORMS:
                entry.types.append(item_kind)
                self.read_numbers(count, item_kind, entry)
                return
            # A text has its length, an array its type and its length.
            self.check_count(count, 8, "values")
            if item_kind == ValueType.STRING:
                entry.types.append(item_kind)
                entry.parts += [self.read_text("a text") for _ in range(count)]
                return
            for _ in range(count):
                self.read_value(item_kind, depth - 1, entry)

    def read_numbers(self, count: int, kind: Any, entry: HeaderField) -> None:
        """Read numbers of one type into a field."""
        form = SCALAR_FORMS[kind]
        size = struct.calcsize(form)
        self.check_count(count, size, "numbers")
        content = self.content[self.position : self.position + count * size]
        entry.parts += struct.iter_unpack(f"<{form}", content)
        self.position += count * size

    def read_tensor(self) -> StoredTensor:
        """Read the name, shape and type of a tensor, and its place, which is relative to the
        data.
        """
        name = str(self.read_text("the name of a tensor", MAX_NAME_BYTES), "utf-8")
        num_dimensions = self.read_number("<I")
        if num_dimensions > MAX_DIMENSIONS:
            raise MalformedHeader(f"a tensor has {num_dimensions} dimensions")
        # The fastest dimension is stored first.
        shape = tuple([self.read_number("<Q") for _ in range(num_dimensions)][::-1])
        number = self.read_number("<I")
        offset = self.read_number("<Q")
        try:
            tensor_type = gguf.GGMLQuantizationType(number)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
        except (ValueError, KeyError) as error:
            raise MalformedHeader(f"a tensor has the type {number}, which there is not") from error
        if shape and shape[-1] % block_size:
            raise MalformedHeader(
                f"the tensor {name} has rows of {shape[-1]} values, and its type has blocks of "
                f"{block_size}"
            )
        num_bytes = math.prod(shape) // block_size * block_bytes
        return StoredTensor(name, shape, tensor_type, offset, num_bytes)
