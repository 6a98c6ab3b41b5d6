"""The linter of drafter files: it finds silent faults that cost acceptance, each under a stable name.

`check_files` reads files only, the drafter's and with a target the target's. `lint` with a target also decodes (measure.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.config.saved import parse_groups, read_yaml
from spectrain.errors import UserError, first_line
from spectrain.files import PICKLE_SUFFIXES

from .fused_settings import FusedConfig, read_rope
from .layout import MALFORMED_ERRORS, DrafterFiles, ExpectedTensors, Finding, Layout
from .layouts import detect_layout
from .targets import TargetFiles, tokenizer_hash

MISSING_TENSOR_FAULTS = {
    "d2t": "missing-d2t",
    "fc.weight": "missing-fc",
    "lm_head.weight": "missing-lm-head",
    "token_map": "missing-token-map",
}
NOT_DATA = "not-data"
"""The fault of settings that are more than data."""
NONZERO_TENSORS = ("fc.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight", "_proj.weight")


def lint(directory: Path, target: TargetFiles | None) -> list[Finding]:
    """Return every fault of a drafter's directory, errors first."""
    files = DrafterFiles.from_directory(directory)
    layout = detect_layout(files)
    findings = list(check_files(files, layout, target))
    is_sound = all(finding.level == "warning" and finding.name != "not-representable" for finding in findings)
    if target is not None and is_sound:
        from .measure import find_misinterpretation

        # The measurement shows whether the drafter was trained with another rotary embedding.
        findings = [finding for finding in findings if finding.name != "rope"]
        findings += find_misinterpretation(layout.read(files, target), target)
    return sorted(findings, key=lambda finding: finding.level)


def check_files(files: DrafterFiles, layout: Layout, target: TargetFiles | None) -> Iterator[Finding]:
    """Yield the faults that the files show, and with a target those that a comparison with its files shows."""
    directives = list(check_data_only(files, layout))
    yield from directives
    if directives:
        return
    yield from check_values(files)
    try:
        yield from check_shapes(files, layout.expected_tensors(files))
        yield from layout.findings(files)
        if (fused := layout.as_fused(files)) is not None:
            config, tensors = fused
            yield from check_vocabulary(int(config.layer_config["vocab_size"]), tensors)
            yield from check_fused(config, tensors)
            if target is not None:
                yield from check_against_target(config, target)
        elif {"d2t", "t2d"} <= files.tensors.keys():
            yield from check_vocabulary(len(files.tensors["t2d"]), files.tensors)
        if target is not None:
            yield from layout.findings_with_target(files, target)
            yield from check_tokenizer(files, target)
    except KeyError as error:
        yield Finding(
            "missing-key", "error", f"config.json lacks {error}", "engines stop or use a default that may be wrong",
            "write it as it was when the drafter was trained",
        )  # fmt: skip
    except UserError:
        raise
    except MALFORMED_ERRORS as error:
        yield Finding(
            "malformed", "error", f"config.json holds a value of a wrong type ({first_line(error)})",
            "engines stop, or read something else", "write it as it was when the drafter was trained",
        )  # fmt: skip


def check_data_only(files: DrafterFiles, layout: Layout) -> Iterator[Finding]:
    """Yield a fault for every file whose settings would construct something, or name a choice that does not exist."""
    readers: list[Callable[[], Any]] = [partial(layout.check_data, files), files.read_metadata]
    readers += [partial(files.read_sidecar, name) for name in ("adapter_config.json", "gated_lora.json")]
    run = files.directory.parent / "config.yaml"
    if files.directory.name == "drafter" and run.exists():
        readers.append(lambda: parse_groups(read_yaml(run), run))
    for read in readers:
        try:
            read()
        except UserError as error:
            problem, _, remedy = str(error).partition("; ")
            yield Finding(NOT_DATA, "error", problem, "a file from elsewhere must not decide what runs on your machine", remedy)


def check_values(files: DrafterFiles) -> Iterator[Finding]:
    """Yield the faults of the tensors' values and dtypes, whatever the tensors are."""
    names_by_dtype: dict[torch.dtype, str] = {}
    for name, tensor in files.tensors.items():
        if not tensor.is_floating_point():
            continue
        names_by_dtype.setdefault(tensor.dtype, name)
        if not tensor.isfinite().all():
            yield Finding(
                "not-finite", "error", f"{name} holds NaN or infinity", "every draft is then the same wrong token",
                "take an earlier checkpoint; training diverged, or the file was truncated",
            )  # fmt: skip
        elif name.endswith(NONZERO_TENSORS) and not tensor.any():
            yield Finding(
                "all-zero", "error", f"{name} is zero throughout", "a loader filled in a tensor that it did not find",
                "convert again from the original files",
            )  # fmt: skip
    if len(names_by_dtype) > 1:
        dtypes = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in names_by_dtype.items())
        yield Finding(
            "mixed-dtype", "warning", f"weights are of several types: {dtypes}", "engines cast them to one, which rounds",
            "save all of them in the type that you serve in",
        )  # fmt: skip
    if torch.float64 in names_by_dtype:
        yield Finding(
            "dtype",
            "warning",
            f"{names_by_dtype[torch.float64]} is float64",
            "no engine computes in it",
            "save it as float32 or bfloat16",
        )
    pickled = sorted(path.name for path in files.directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        yield Finding(
            "pickled-file", "warning", f"the directory also holds {pickled[0]}",
            "some loaders prefer it to the safetensors, and it can run code", "delete it",
        )  # fmt: skip


def check_shapes(files: DrafterFiles, expected: ExpectedTensors) -> Iterator[Finding]:
    """Yield tensors that are missing, that no engine reads, or whose shape contradicts config.json."""
    for name, shape in {**expected.required, **expected.optional}.items():
        tensor = files.tensors.get(name)
        if tensor is None:
            if name in expected.required:
                yield Finding(
                    MISSING_TENSOR_FAULTS.get(name, "missing-tensor"), "error", f"{name} is missing", explain_missing(name),
                    "convert again from the original files",
                )  # fmt: skip
        elif len(tensor.shape) != len(shape) or any(size not in (None, actual) for size, actual in zip(shape, tensor.shape)):
            yield shape_finding(name, tuple(tensor.shape), shape)
    names = {*expected.required, *expected.optional}
    for name in files.tensors:
        if name not in names and not name.endswith(expected.ignored or ("\0",)):
            yield Finding(
                "unknown-tensor", "error", f"no reader of this layout uses {name}",
                "SGLang and the Medusa loaders silently drop it, vLLM may stop",
                "rename it to what the layout says, or delete it",
            )  # fmt: skip


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
            "transposed-tensor", "error", f"{problem}: transposed", "engines stop, or read it wrongly", "save its transpose"
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
            "vocab-size", "error", problem,
            "vocab_size is the target's, draft_vocab_size the drafter's; engines allocate by them",
            "write the target's vocab_size",
        )  # fmt: skip
    return Finding("wrong-shape", "error", problem, "engines stop, or read it wrongly", "write the sizes as they were trained")


def check_vocabulary(vocab: int, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Yield the faults of d2t, which holds offsets from draft ids to target ids, and of t2d."""
    offsets, flags = tensors.get("d2t"), tensors.get("t2d")
    if offsets is None:
        return
    if offsets.is_floating_point():
        yield Finding("d2t-dtype", "error", f"d2t is {offsets.dtype}", "ids are rounded", "save it as int64")
        return
    ids = offsets.long() + torch.arange(len(offsets))
    marks = None if flags is None else flags.bool()
    is_absolute = (
        marks is not None and bool(((offsets >= 0) & (offsets < len(marks))).all()) and bool(marks[offsets.long()].all())
    )
    is_absolute = is_absolute and len(offsets.unique()) == len(offsets)
    if is_absolute and marks is not None and not is_marked(ids, marks):
        yield Finding(
            "d2t-absolute", "error", "d2t holds ids of the target where offsets belong",
            "engines add the draft id to it, so every draft is another token", "subtract 0, 1, 2 and so on from it",
        )  # fmt: skip
        return
    if bool(((ids < 0) | (ids >= vocab)).any()):
        yield Finding(
            "d2t-range", "error", f"d2t points outside the target's {vocab} tokens",
            "engines fail while they decode, or read other memory", "write target id - draft id, in draft order",
        )  # fmt: skip
        return
    if len(ids.unique()) < len(ids):
        yield Finding(
            "d2t-repeated", "error", "d2t maps two draft ids to the same token",
            "either offsets and ids were confused, or rows were lost", "write target id - draft id, in draft order",
        )  # fmt: skip
        return
    if marks is not None and not is_marked(ids, marks):
        yield Finding(
            "t2d-mismatch", "error", "t2d marks other tokens than d2t maps to",
            "trainers ignore the wrong tokens; either d2t or t2d is from another run", "make t2d from d2t: spectrain convert",
        )  # fmt: skip
    elif len(ids) < vocab and not offsets.any():
        yield Finding(
            "d2t-identity", "warning", f"the draft vocabulary is the first {len(ids)} ids of the target",
            "this is usually a default that was never replaced, not what was trained", "take d2t from the training run",
        )  # fmt: skip


def is_marked(ids: Tensor, marks: Tensor) -> bool:
    """Tell whether t2d is True at exactly these ids."""
    in_range = bool(((ids >= 0) & (ids < len(marks))).all())
    return in_range and int(marks.sum()) == len(ids) and bool(marks[ids].all())


def check_fused(config: FusedConfig, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Yield the faults of the fused layers' ids and of norms whose flags and tensors disagree."""
    layers = config.layers
    if layers is not None and any(not isinstance(layer, int) for layer in layers):
        yield Finding("layer-ids-range", "error", f"layer ids are {layers}", "engines need integers", "write integers")
    elif layers is not None and layers != sorted(set(layers)):
        yield Finding(
            "layer-ids-order", "error", f"layer ids {layers} do not ascend",
            "vLLM sorts them, so fc reads its inputs in another order than it was trained on",
            "sort them, and the columns of fc.weight with them",
        )  # fmt: skip
    for flag, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if (name in tensors) != bool(config.architecture.get(flag)):
            yield Finding(
                "norm-flag", "error",
                f"{flag}={bool(config.architecture.get(flag))} and {name} is {'present' if name in tensors else 'missing'}",
                "either the norm is skipped, or an untrained one is used", f"write {flag} as it was trained",
            )  # fmt: skip


def check_against_target(config: FusedConfig, target: TargetFiles) -> Iterator[Finding]:
    """Yield the settings that contradict the target's."""
    target_config, vocab = target.config, target.vocab_size
    if config.layer_config["vocab_size"] != vocab:
        yield Finding(
            "vocab-size", "error", f"vocab_size is {config.layer_config['vocab_size']} and the target's {vocab}",
            "engines allocate d2t and the embedding by it", "write the target's, or lint with the target it is for",
        )  # fmt: skip
    if config.width != target_config.hidden_size:
        yield Finding(
            "hidden-size", "error", f"hidden_size is {config.width} and the target's {target_config.hidden_size}",
            "the target's states do not fit", "lint with the target it is for",
        )  # fmt: skip
    layers = config.layers or []
    if any(isinstance(layer, int) and not 0 <= layer <= target.num_layers for layer in layers):
        yield Finding(
            "layer-ids-range", "error", f"layers {layers} are not all in the target's range 0 to {target.num_layers}",
            "engines stop, or never fill the features", "write the layers that it was trained on",
        )  # fmt: skip
    rope, target_rope = config.architecture["rope_parameters"], read_rope(target_config.to_dict())
    differing = sorted(key for key in {*rope, *target_rope} if rope.get(key) != target_rope.get(key))
    if differing:
        shown = ", ".join(f"{key} {rope.get(key)} against {target_rope.get(key)}" for key in differing[:3])
        yield Finding(
            "rope", "warning", f"the rotary embedding is not the target's: {shown}",
            "correct only if it was trained so; often it is a default that was never replaced",
            "write the target's rope_parameters",
        )  # fmt: skip
    max_positions = config.layer_config.get("max_position_embeddings")
    if max_positions is not None and max_positions < target_config.max_position_embeddings:
        yield Finding(
            "max-position", "warning",
            f"max_position_embeddings is {max_positions}, the target's {target_config.max_position_embeddings}",
            "some engines limit the served context to it", "write the target's",
        )  # fmt: skip


def check_tokenizer(files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
    """Yield a fault where the drafter was made for another tokenizer or chat template."""
    expected_hash: Any = files.read_metadata().tokenizer_hash
    if expected_hash is not None and expected_hash != target.template_hash():
        yield Finding(
            "tokenizer", "error", "it was made for a target with another tokenizer or chat template",
            "ids mean other tokens, or conversations differ from those it was trained on", "lint with the target it is for",
        )  # fmt: skip
    if (files.directory / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(files.directory, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{files.directory}: its tokenizer cannot be read ({str(error).splitlines()[0]})") from error
        if tokenizer_hash(tokenizer) != target.template_hash():
            yield Finding(
                "tokenizer", "error", "its tokenizer or chat template is not the target's",
                "engines compare ids, so drafts are other tokens", "copy the target's tokenizer files, if the ids are the same",
            )  # fmt: skip
