"""What may be wrong with a drafter's files: silent faults that cost acceptance, each by a stable name.

`check` reads files alone; with a target it compares them with the target's, and measure.py decodes a little.
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
NONZERO_TENSORS = ("fc.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight", "_proj.weight")


def lint(directory: Path, target: TargetFiles | None) -> list[Finding]:
    """Everything that is wrong with a drafter's directory, errors first."""
    files = DrafterFiles.from_directory(directory)
    layout = detect_layout(files)
    found = list(check_files(files, layout, target))
    sound = all(finding.level == "warning" and finding.name != "not-representable" for finding in found)
    if target is not None and sound:
        from .measure import find_misinterpretation

        found = [finding for finding in found if finding.name != "rope"]  # whether it was trained so is measured instead
        found += find_misinterpretation(layout.read(files, target), target)
    return sorted(found, key=lambda finding: finding.level)


def check_files(files: DrafterFiles, layout: Layout, target: TargetFiles | None) -> Iterator[Finding]:
    """What the files show by themselves, and beside those of a target."""
    found = list(check_data_only(files, layout))
    yield from found
    if found:
        return
    yield from check_values(files)
    try:
        yield from check_shapes(files, layout.expected_tensors(files), layout)
        yield from layout.findings(files)
        if (held := layout.as_fused(files)) is not None:
            said, tensors = held
            yield from check_vocabulary(int(said.layer_config["vocab_size"]), tensors)
            yield from check_fused(said, tensors)
            if target is not None:
                yield from check_against_target(said, target)
        elif {"d2t", "t2d"} <= files.tensors.keys():
            yield from check_vocabulary(len(files.tensors["t2d"]), files.tensors)
        if target is not None:
            yield from layout.findings_with_target(files, target)
            yield from check_tokenizer(files, target)
    except KeyError as error:
        yield Finding(
            "missing-key", "error", f"config.json does not say {error}", "engines stop or take a default that may be wrong",
            "write it as it was when the drafter was trained",
        )  # fmt: skip
    except UserError:
        raise
    except MALFORMED_ERRORS as error:
        yield Finding(
            "malformed", "error", f"config.json holds a value of the wrong kind ({first_line(error)})",
            "engines stop, or read something else", "write it as it was when the drafter was trained",
        )  # fmt: skip


def check_data_only(files: DrafterFiles, layout: Layout) -> Iterator[Finding]:
    """Whatever in the settings would run something, or names what there is not."""
    readers: list[Callable[[], Any]] = [partial(layout.check_data, files), files.read_metadata]
    readers += [partial(files.read_sidecar, name) for name in ("adapter_config.json", "gated_lora.json")]
    run = files.directory.parent / "config.yaml"
    if files.directory.name == "drafter" and run.exists():
        readers.append(lambda: parse_groups(read_yaml(run), run))
    for read in readers:
        try:
            read()
        except UserError as error:
            what, _, mend = str(error).partition("; ")
            yield Finding(NOT_DATA, "error", what, "a stranger's file must not say what is run on your machine", mend)


def check_values(files: DrafterFiles) -> Iterator[Finding]:
    """Values and types of the tensors, whatever they are."""
    kinds: dict[torch.dtype, str] = {}
    for name, tensor in files.tensors.items():
        if not tensor.is_floating_point():
            continue
        kinds.setdefault(tensor.dtype, name)
        if not tensor.isfinite().all():
            yield Finding(
                "not-finite", "error", f"{name} holds NaN or infinity", "every draft is then the same wrong token",
                "take an earlier checkpoint; training diverged, or the file was cut",
            )  # fmt: skip
        elif name.endswith(NONZERO_TENSORS) and not tensor.any():
            yield Finding(
                "all-zero", "error", f"{name} is zero throughout", "a loader filled in what it did not find",
                "convert again from the original files",
            )  # fmt: skip
    if len(kinds) > 1:
        said = ", ".join(f"{name} is {str(kind).removeprefix('torch.')}" for kind, name in kinds.items())
        yield Finding(
            "mixed-dtype", "warning", f"weights are of several types: {said}", "engines cast them to one, which rounds",
            "save all of them in the type that you serve in",
        )  # fmt: skip
    if torch.float64 in kinds:
        yield Finding(
            "dtype",
            "warning",
            f"{kinds[torch.float64]} is float64",
            "no engine computes in it",
            "save it as float32 or bfloat16",
        )
    pickled = sorted(path.name for path in files.directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        yield Finding(
            "pickled-file", "warning", f"{pickled[0]} lies beside the safetensors",
            "some loaders prefer it, and it can run code", "delete it",
        )  # fmt: skip


def check_shapes(files: DrafterFiles, expected: ExpectedTensors, layout: Layout) -> Iterator[Finding]:
    """Names that are missing, that no engine reads, or that have another shape than config.json says."""
    for name, shape in {**expected.required, **expected.optional}.items():
        tensor = files.tensors.get(name)
        if tensor is None:
            if name in expected.required:
                yield Finding(
                    MISSING_TENSOR_FAULTS.get(name, "missing-tensor"), "error", f"{name} is missing", explain_missing(name),
                    "convert again from the original files",
                )  # fmt: skip
        elif len(tensor.shape) != len(shape) or any(want not in (None, got) for want, got in zip(shape, tensor.shape)):
            yield shape_finding(name, tuple(tensor.shape), shape)
    known = {*expected.required, *expected.optional}
    for name in files.tensors:
        if name not in known and not name.endswith(expected.ignored or ("\0",)):
            yield Finding(
                "unknown-tensor", "error", f"no reader of this layout knows {name}",
                "SGLang and the Medusa loaders drop it without a word, vLLM may stop",
                "rename it to what the layout says, or delete it",
            )  # fmt: skip


def explain_missing(name: str) -> str:
    if name == "d2t":
        return "engines then take the drafter's ids for the target's, and hardly a draft is right"
    if name == "token_map":
        return "vLLM then takes the first ids of the vocabulary, and hardly a draft is right"
    return "vLLM leaves it as it happens to be in memory, and drafts are noise"


def shape_finding(name: str, found: tuple[int, ...], wanted: tuple[int | None, ...]) -> Finding:
    said = f"{name} is {list(found)} where config.json says {[size for size in wanted]}"
    if found == tuple(reversed(wanted)) and len(found) == 2:
        return Finding(
            "transposed-tensor", "error", f"{said}: transposed", "engines stop, or read it wrongly", "save its transpose"
        )
    if name.endswith(("lm_head.weight", "d2t")) or ".lm_heads." in f".{name}":
        return Finding(
            "head-rows",
            "error",
            said,
            "rows and their tokens no longer go together",
            "write draft_vocab_size as it was trained",
        )
    if name in ("t2d", "embed_tokens.weight"):
        return Finding(
            "vocab-size", "error", said, "vocab_size is the target's, draft_vocab_size the drafter's; engines size by them",
            "write the target's vocab_size",
        )  # fmt: skip
    return Finding("wrong-shape", "error", said, "engines stop, or read it wrongly", "write the sizes as they were trained")


def check_vocabulary(vocab: int, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """d2t, which holds offsets, and t2d."""
    offsets, marked = tensors.get("d2t"), tensors.get("t2d")
    if offsets is None:
        return
    if offsets.is_floating_point():
        yield Finding("d2t-dtype", "error", f"d2t is {offsets.dtype}", "ids are rounded", "save it as int64")
        return
    ids = offsets.long() + torch.arange(len(offsets))
    marks = None if marked is None else marked.bool()
    absolute = marks is not None and bool(((offsets >= 0) & (offsets < len(marks))).all()) and bool(marks[offsets.long()].all())
    absolute = absolute and len(offsets.unique()) == len(offsets)
    if absolute and marks is not None and not is_marked(ids, marks):
        yield Finding(
            "d2t-absolute", "error", "d2t holds ids of the target where offsets belong",
            "engines add the draft id to it, so every draft is another token", "subtract 0, 1, 2 and so on from it",
        )  # fmt: skip
        return
    if bool(((ids < 0) | (ids >= vocab)).any()):
        yield Finding(
            "d2t-range", "error", f"d2t leads outside of the target's {vocab} tokens",
            "engines fail while they decode, or read other memory", "write target id - draft id, in draft order",
        )  # fmt: skip
        return
    if len(ids.unique()) < len(ids):
        yield Finding(
            "d2t-repeated", "error", "d2t leads two draft ids to one token",
            "one of them is wrong: offsets and ids mixed up, or rows lost", "write target id - draft id, in draft order",
        )  # fmt: skip
        return
    if marks is not None and not is_marked(ids, marks):
        yield Finding(
            "t2d-mismatch", "error", "t2d marks other tokens than d2t leads to",
            "trainers leave out the wrong tokens; one of the two is from another run", "make t2d from d2t: spectrain convert",
        )  # fmt: skip
    elif len(ids) < vocab and not offsets.any():
        yield Finding(
            "d2t-identity", "warning", f"the draft vocabulary is the first {len(ids)} ids of the target",
            "seldom what was trained: a default that nobody filled in", "take d2t from the training run",
        )  # fmt: skip


def is_marked(ids: Tensor, marks: Tensor) -> bool:
    """Whether t2d is True at these ids and nowhere else."""
    inside = bool(((ids >= 0) & (ids < len(marks))).all())
    return inside and int(marks.sum()) == len(ids) and bool(marks[ids].all())


def check_fused(said: FusedConfig, tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """The layers that fc reads, and norms that flags ask for."""
    layers = said.layers
    if layers is not None and any(not isinstance(layer, int) for layer in layers):
        yield Finding("layer-ids-range", "error", f"layer ids are {layers}", "engines want integers", "write integers")
    elif layers is not None and layers != sorted(set(layers)):
        yield Finding(
            "layer-ids-order", "error", f"layer ids {layers} do not ascend",
            "vLLM sorts them, so fc reads its inputs in another order than it was trained on",
            "sort them, and the columns of fc.weight with them",
        )  # fmt: skip
    for flag, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if (name in tensors) != bool(said.architecture.get(flag)):
            yield Finding(
                "norm-flag", "error",
                f"{flag}={bool(said.architecture.get(flag))} and {name} is {'there' if name in tensors else 'missing'}",
                "the norm is left out, or one that was never trained is used", f"write {flag} as it was trained",
            )  # fmt: skip


def check_against_target(said: FusedConfig, target: TargetFiles) -> Iterator[Finding]:
    """The settings beside the target's."""
    config, vocab = target.config, target.vocab_size
    if said.layer_config["vocab_size"] != vocab:
        yield Finding(
            "vocab-size", "error", f"vocab_size is {said.layer_config['vocab_size']} and the target's {vocab}",
            "engines size d2t's ids and the embedding by it", "write the target's, or lint with the target it is for",
        )  # fmt: skip
    if said.width != config.hidden_size:
        yield Finding(
            "hidden-size", "error", f"hidden_size is {said.width} and the target's {config.hidden_size}",
            "the target's states do not fit", "lint with the target it is for",
        )  # fmt: skip
    layers = said.layers or []
    if any(isinstance(layer, int) and not 0 <= layer <= target.num_layers for layer in layers):
        yield Finding(
            "layer-ids-range", "error", f"layers {layers} are not all among the target's 0 to {target.num_layers}",
            "engines stop, or never fill the features", "write the layers that it was trained on",
        )  # fmt: skip
    mine, theirs = said.architecture["rope_parameters"], read_rope(config.to_dict())
    differing = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
    if differing:
        shown = ", ".join(f"{key} {mine.get(key)} against {theirs.get(key)}" for key in differing[:3])
        yield Finding(
            "rope", "warning", f"the rotary embedding is not the target's: {shown}",
            "right only if it was trained so; often it is a default that nobody filled in",
            "write the target's rope_parameters",
        )  # fmt: skip
    longest = said.layer_config.get("max_position_embeddings")
    if longest is not None and longest < config.max_position_embeddings:
        yield Finding(
            "max-position", "warning", f"max_position_embeddings is {longest}, the target's {config.max_position_embeddings}",
            "some engines cut the served context to it", "write the target's",
        )  # fmt: skip


def check_tokenizer(files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
    """Whether the drafter was made for this tokenizer and chat template."""
    made_for: Any = files.read_metadata().tokenizer_hash
    if made_for is not None and made_for != target.template_hash():
        yield Finding(
            "tokenizer", "error", "it was made for a target with another tokenizer or chat template",
            "ids mean other tokens, or conversations look unlike those it was trained on", "lint with the target it is for",
        )  # fmt: skip
    if (files.directory / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        try:
            mine = AutoTokenizer.from_pretrained(files.directory, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{files.directory}: its tokenizer cannot be read ({str(error).splitlines()[0]})") from error
        if tokenizer_hash(mine) != target.template_hash():
            yield Finding(
                "tokenizer", "error", "its tokenizer or chat template is not the target's",
                "engines compare ids, so drafts are other tokens", "copy the target's tokenizer files, if the ids are the same",
            )  # fmt: skip
