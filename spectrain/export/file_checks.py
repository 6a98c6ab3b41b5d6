"""The linter's checks of a drafter's files that every layout shares: data only, values, shapes,
quantization, and the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spectrain.config.check import check_node
from spectrain.config.command_only import find_command_only
from spectrain.config.plain_files import read_json, read_yaml
from spectrain.config.spec import GROUPS, RunSpec
from spectrain.errors import UserError
from spectrain.files import PICKLE_SUFFIXES
from spectrain.models.checked_tensors import has_finite_values
from spectrain.training.checkpoints import judge_type

from .compressed_tensors import FUSION_MODULE, name_scheme
from .container import Finding
from .drafter_files import DrafterFiles
from .engine_support import list_quantized_readers
from .layout import ExpectedTensors, Layout
from .targets import TargetFiles, read_tokenizer, tokenizer_hash

MISSING_TENSOR_FAULTS = {
    "d2t": "missing-d2t",
    "fc.weight": "missing-fc",
    "lm_head.weight": "missing-lm-head",
    "token_map": "missing-token-map",
}
MAX_UNKNOWN = 20
"""Unknown tensors that are named one by one."""
NOT_DATA = "not-data"
"""The fault of settings that are more than data."""
NOT_DATA_CONSEQUENCE = (
    "a file from elsewhere must not decide what runs on your machine, nor for how long"
)
NONZERO_TENSORS = (
    "fc.weight",
    "norm.weight",
    "embed_tokens.weight",
    "lm_head.weight",
    "_proj.weight",
)


def check_data_only(files: DrafterFiles, layout: Layout) -> Iterator[Finding]:
    """Yield a fault for every file whose settings would construct something, or name a choice
    that does not exist.
    """
    readers: list[Callable[[], Any]] = [partial(layout.check_data, files), files.read_metadata]
    readers += [
        partial(files.read_sidecar, name) for name in ("adapter_config.json", *layout.sidecars)
    ]
    run = files.directory.parent / "config.yaml"
    if files.directory.name == "drafter" and run.exists():
        readers.append(partial(check_run_settings, run))
    for read in readers:
        try:
            read()
        except UserError as error:
            problem, _, remedy = str(error).partition("; ")
            yield Finding(NOT_DATA, "error", problem, NOT_DATA_CONSEQUENCE, remedy)


def check_run_settings(path: Path) -> None:
    """Raise a UserError for a setting of a run's config.yaml that its constructor refuses."""
    spec = RunSpec.load(path)
    for group in (getattr(spec, name) for name in GROUPS):
        if group:
            try:
                check_node(group.group, group.node)
            except UserError as error:
                raise UserError(f"{path}: {error}") from error


def check_command_only(directory: Path) -> Iterator[Finding]:
    """Yield an error for every setting of a drafter's directory, and of its run folder, that
    only a command sets.
    """
    run = directory.parent if directory.name == "drafter" else directory
    for path in (directory / "config.json", directory / "spectrain.json", run / "config.yaml"):
        if not path.is_file():
            continue
        # Other checks report a file that cannot be read.
        with suppress(UserError):
            content = read_yaml(path) if path.suffix == ".yaml" else read_json(path)
            groups = (
                content.get("description")
                if path.name == "spectrain.json" and isinstance(content, dict)
                else content
            )
            for key, setting in find_command_only(groups):
                yield Finding(
                    "command-only",
                    "error",
                    f"{path.name}: {key} is set, which {setting.reason}",
                    "a file from elsewhere must not decide what runs on your machine",
                    f"delete {key} in {path.name}",
                )


def check_values(files: DrafterFiles, layout: Layout) -> Iterator[Finding]:
    """Yield the faults of the tensors' values and dtypes, whatever the tensors are."""
    names_by_dtype: dict[torch.dtype, str] = {}
    for name, tensor in files.tensors.items():
        if not tensor.is_floating_point():
            continue
        names_by_dtype.setdefault(tensor.dtype, name)
        # Weights with scales have been multiplied by them, and have another type.
        fault = judge_type(tensor.dtype, torch.float32)
        if fault is not None:
            yield type_finding(name, fault)
        if not has_finite_values(tensor):
            yield Finding(
                "not-finite",
                "error",
                f"{name} holds NaN or infinity",
                "every draft is then the same wrong token",
                "take an earlier checkpoint; training diverged, or the file was truncated",
            )
        elif name.endswith(NONZERO_TENSORS) and not tensor.any():
            yield Finding(
                "all-zero",
                "error",
                f"{name} is zero throughout",
                "a loader filled in a tensor that it did not find",
                "convert again from the original files",
            )
    if len(names_by_dtype) > 1 and not layout.container.mixes_dtypes:
        dtypes = ", ".join(
            f"{name} is {str(dtype).removeprefix('torch.')}"
            for dtype, name in names_by_dtype.items()
        )
        yield Finding(
            "mixed-dtype",
            "warning",
            f"weights are of several types: {dtypes}",
            "engines cast them to one, which rounds",
            "save all of them in the type that you serve in",
        )
    if torch.float64 in names_by_dtype:
        yield Finding(
            "dtype",
            "warning",
            f"{names_by_dtype[torch.float64]} is float64",
            "no engine computes in it",
            "save it as float32 or bfloat16",
        )
    pickled = sorted(
        path.name
        for path in files.directory.iterdir()
        # The .bin of an OpenVINO model holds plain numbers.
        if path.suffix in PICKLE_SUFFIXES
        and path.name not in layout.pickled_names
        and not path.with_suffix(".xml").exists()
    )
    if pickled:
        yield Finding(
            "pickled-file",
            "warning",
            f"the directory also holds {pickled[0]}",
            "some loaders prefer it to the safetensors, and it can run code",
            "delete it",
        )


def check_quantization(files: DrafterFiles, layout: Layout) -> Iterator[Finding]:
    """Yield a fault where no engine reads a layout with weights that are quantized so."""
    if files.quantization is None:
        return
    scheme = name_scheme(files.quantization)
    with_fc = f"{FUSION_MODULE}.weight" in files.quantized
    if not files.quantized:
        yield Finding(
            "quantized-nothing",
            "error",
            f"config.json says that weights are quantized ({scheme}), and none has scales",
            "engines look for scales and stop",
            "delete quantization_config, or copy the files again",
        )
    elif not list_quantized_readers(layout, scheme, with_fc):
        part = ", the layer fc included," if with_fc else ""
        yield Finding(
            "quantized",
            "error",
            f"its weights are quantized ({scheme}){part} and no engine reads this layout so",
            "engines stop, or take the numbers for weights",
            "export it again without quantize, or without quantize.fc",
        )


def check_shapes(files: DrafterFiles, expected: ExpectedTensors) -> Iterator[Finding]:
    """Yield tensors that are missing, that no engine reads, or whose shape or type contradicts
    config.json.
    """
    for name, shape in {**expected.required, **expected.optional}.items():
        tensor = files.tensors.get(name)
        if tensor is None:
            if name in expected.required:
                yield Finding(
                    MISSING_TENSOR_FAULTS.get(name, "missing-tensor"),
                    "error",
                    f"{name} is missing",
                    explain_missing(name),
                    "convert again from the original files",
                )
        elif len(tensor.shape) != len(shape) or any(
            size not in (None, actual) for size, actual in zip(shape, tensor.shape)
        ):
            yield shape_finding(name, tuple(tensor.shape), shape)
    for name, expected_type in expected.types.items():
        tensor = files.tensors.get(name)
        fault = None if tensor is None else judge_type(tensor.dtype, expected_type)
        if fault is not None:
            yield type_finding(name, fault)
    names = {*expected.required, *expected.optional}
    unknown = [
        name
        for name in files.tensors
        if name not in names and not name.endswith(expected.ignored or ("\0",))
    ]
    for number, name in enumerate(unknown[:MAX_UNKNOWN], 1):
        more = f", nor {len(unknown) - number} more" if number == MAX_UNKNOWN < len(unknown) else ""
        yield Finding(
            "unknown-tensor",
            "error",
            f"no reader of this layout uses {name}{more}",
            "SGLang and the Medusa loaders silently drop it, vLLM may stop",
            "rename it to what the layout says, or delete it",
        )


def type_finding(name: str, fault: str) -> Finding:
    """Return the finding of a tensor that holds numbers of another kind than the trained one."""
    return Finding(
        "type",
        "error",
        f"{name} {fault}",
        "it is not the tensor that was trained",
        "copy the files again",
    )


def explain_missing(name: str) -> str:
    if name == "d2t":
        return "engines then use the drafter's ids as the target's, and almost every draft is wrong"
    if name == "token_map":
        return "vLLM then uses the first ids of the vocabulary, and almost every draft is wrong"
    return "vLLM leaves it uninitialized, and drafts are noise"


def shape_finding(name: str, actual: tuple[int, ...], expected: tuple[int | None, ...]) -> Finding:
    """Return the fault of a tensor whose shape contradicts config.json."""
    problem = f"{name} is {list(actual)} and config.json implies {list(expected)}"
    if actual == tuple(reversed(expected)) and len(actual) == 2:
        return Finding(
            "transposed-tensor",
            "error",
            f"{problem}: transposed",
            "engines stop, or read it wrongly",
            "save its transpose",
        )
    if name.endswith(("lm_head.weight", "d2t")) or ".lm_heads." in f".{name}":
        return Finding(
            "head-rows",
            "error",
            problem,
            "rows no longer match their tokens",
            "write draft_vocab_size as it was trained",
        )
    if name in ("t2d", "embed_tokens.weight"):
        return Finding(
            "vocab-size",
            "error",
            problem,
            "vocab_size is the target's, draft_vocab_size the drafter's; engines allocate by them",
            "write the target's vocab_size",
        )
    return Finding(
        "wrong-shape",
        "error",
        problem,
        "engines stop, or read it wrongly",
        "write the sizes as they were trained",
    )


def check_tokenizer(files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
    """Yield a fault where the drafter was made for another tokenizer or chat template."""
    expected_hash: Any = files.read_metadata().tokenizer_hash
    if expected_hash is not None and expected_hash != target.template_hash():
        yield Finding(
            "tokenizer",
            "error",
            "it was made for a target with another tokenizer or chat template",
            "ids mean other tokens, or conversations differ from those it was trained on",
            "lint with the target it is for",
        )
    if (files.directory / "tokenizer.json").exists():
        tokenizer = read_tokenizer(files.directory, str(files.directory))
        if tokenizer_hash(tokenizer) != target.template_hash():
            yield Finding(
                "tokenizer",
                "error",
                "its tokenizer or chat template is not the target's",
                "engines compare ids, so drafts are other tokens",
                "copy the target's tokenizer files, if the ids are the same",
            )
