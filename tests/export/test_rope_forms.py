"""Rotary embeddings: every form that targets have is trained, decoded, exported and read as the
same numbers.
"""

import json
import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.drafters.base import Drafter, TrainingState
from spectrain.errors import UserError
from spectrain.export.converter import convert, read_drafter
from spectrain.export.layouts import detect_layout, read_files
from spectrain.export.linter import lint
from spectrain.export.measure import build_drafter
from spectrain.export.targets import TargetFiles
from spectrain.features.batch import Batch
from spectrain.models.load_errors import explain_load_error
from spectrain.models.rope import RopeError, depends_on_length, drafter_rope, fit_to_head, read_rope
from spectrain.models.target import Target
from spectrain.training.checkpoints import load_tensors
from tests.installed import select_formats

from .small_targets import make_target, save_random

ORIGINAL = 16
HEAD = 16
LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LISTS = {
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": ORIGINAL,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, every key": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "llama3": LLAMA3,
    "longrope": {**LISTS, "short_factor": [1.0, 1.5] * 4, "long_factor": [2.0] * 8},
    "proportional": {"partial_rotary_factor": 0.25, "factor": 2.0},
}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("llama", {"rope_type": name.split(",")[0], **keys})
        for name, keys in ROPES.items()
        if name != "proportional"
    },
    "mrope": ("llama", {"rope_type": "default", "mrope_section": [4, 2, 2]}),
    "partial default": ("glm", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    "partial linear": ("glm", {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}),
    "partial yarn": ("glm", {"rope_type": "yarn", **ROPES["yarn"], "partial_rotary_factor": 0.5}),
    "partial llama3": ("glm", {"rope_type": "llama3", **LLAMA3, "partial_rotary_factor": 0.5}),
    "partial longrope": ("phi3", {"rope_type": "longrope", **LISTS, "partial_rotary_factor": 0.25}),
    "by kind of layer": (
        "gemma3_text",
        {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {},
        },
    ),
}
BLOCKS = {"block_size": 4, "num_layers": 1}
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "eagle3": ({"vocab_size": 256}, ("sglang", "vllm", "gguf")),
    "eagle1": ({}, ("sglang", "vllm", "eagle")),
    "peagle": ({"vocab_size": 256, "num_layers": 1}, ("flat", "vllm")),
    "dflash": (BLOCKS, ("sglang", "vllm", "hf", "gguf")),
    "dspark": ({**BLOCKS, "rank": 4}, ("sglang", "vllm")),
}
NEEDS_ORIGINAL = {"phi3": {"original_max_position_embeddings": ORIGINAL}}
WITHOUT_GGUF = ("yarn, every key",)
"""Forms that GGUF has no keys for."""


@cache
def target_of(form: str, folder: Path) -> Target:
    """Return the target of a form, saved in its own folder."""
    kind, rope = FORMS[form]
    groups = rope.values() if "full_attention" in rope else [rope]
    for group in groups:
        group.setdefault("rope_theta", 5000.0)
        group.setdefault("rope_type", "default")
    return make_target(
        folder / form.replace(" ", "-"), kind, rope_parameters=rope, **NEEDS_ORIGINAL.get(kind, {})
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


def measure_loss(module: Drafter, target: Target) -> torch.Tensor:
    """Return a drafter's loss over a text, beyond the original length where the target goes
    there.
    """
    length = min(target.max_length, 40)
    tokens = (torch.arange(length)[None] * 37) % 2000 + 10
    stage = module.stages[0]
    batch = Batch(
        tokens, torch.ones_like(tokens, dtype=torch.bool), target.features(tokens, stage.layers)
    )
    with torch.no_grad():
        return module.loss(batch, target, TrainingState()).total


CASES = [
    (form, family, layout)
    for form, (family, (_, layouts)) in product(FORMS, FAMILIES.items())
    for layout in select_formats(*layouts)
]


@pytest.mark.sweep(5, free=("form", "family", "layout"))
@pytest.mark.parametrize("form, family, layout", CASES)
def test_what_is_trained_is_what_is_exported(
    form: str, family: str, layout: str, folder: Path, tmp_path: Path
) -> None:
    """A drafter that is exported and read again has the angles and the loss that it had in
    training, bit for bit.
    """
    target = target_of(form, folder)
    trained = save_random(tmp_path / "run", target, family, **FAMILIES[family][0])
    files = TargetFiles(target.path)
    if layout == "gguf" and form in WITHOUT_GGUF:
        with pytest.raises(UserError, match="cannot be written as GGUF"):
            convert(tmp_path / "run", tmp_path / "out", layout, files)
        return
    convert(tmp_path / "run", tmp_path / "out", layout, files)
    checkpoint = read_drafter(tmp_path / "out", files)
    module = build_drafter(checkpoint, target)
    load_tensors(module, checkpoint.tensors)
    settings = {
        key: getattr(trained, key) for key in ("num_steps", "ttt_steps") if key in vars(trained)
    }
    vars(module).update(settings)
    positions = torch.arange(64)[None]
    for left, right in zip(
        trained.rotary(torch.zeros(1), positions), module.rotary(torch.zeros(1), positions)
    ):
        assert torch.equal(left, right) and left.shape[-1] == HEAD
    torch.testing.assert_close(
        measure_loss(module.eval(), target), measure_loss(trained, target), rtol=1e-5, atol=1e-6
    )
    assert "rope" not in {finding.name for finding in lint_files(tmp_path / "out", files)}


def lint_files(directory: Path, target: TargetFiles) -> list[Any]:
    """Return the findings of a directory's files, without decoding."""
    from spectrain.export.linter import check_files

    files = read_files(directory)
    return list(check_files(files, detect_layout(files), target))


def test_exported_files_hold_no_key_that_engines_interpret_differently(
    folder: Path, tmp_path: Path
) -> None:
    """A partial factor and the sections of mrope are in no exported config.json."""
    for form in ("mrope", "partial default", "partial longrope"):
        target = target_of(form, folder)
        save_random(tmp_path / form / "run", target, "eagle3", vocab_size=256)
        convert(
            tmp_path / form / "run", tmp_path / form / "out", "sglang", TargetFiles(target.path)
        )
        text = (tmp_path / form / "out" / "config.json").read_text()
        assert not re.search("partial_rotary|mrope", text)
        if form != "partial longrope":
            assert json.loads(text)["rope_scaling"] is None


@pytest.mark.parametrize("form", ROPES)
def test_a_form_is_that_of_transformers(form: str) -> None:
    """For whole heads, the angles below the length of training are the target's own, in either
    schema.
    """
    rope = {"rope_type": form.split(",")[0], "rope_theta": 5000.0, **ROPES[form]}
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=HEAD,
        max_position_embeddings=ORIGINAL,
        rope_parameters=dict(rope),
    )
    own = read_rope(config.to_dict())
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    old = {
        "rope_theta": 5000.0,
        "rope_scaling": {"type": scaling.pop("rope_type"), **scaling},
        "max_position_embeddings": 16,
    }
    assert read_rope(old) == own
    if form == "proportional":
        # Gemma's form is in no engine's Llama; its factor is kept.
        assert drafter_rope(config.to_dict(), HEAD) == {
            "rope_type": "linear",
            "rope_theta": 5000.0,
            "factor": 2.0,
        }
        return
    config.rope_parameters = drafter_rope(config.to_dict(), HEAD)
    plain = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=HEAD,
        max_position_embeddings=ORIGINAL,
        rope_parameters=rope,
    )
    positions = torch.arange(ORIGINAL)[None]
    for left, right in zip(
        LlamaRotaryEmbedding(config)(torch.zeros(1), positions),
        LlamaRotaryEmbedding(plain)(torch.zeros(1), positions),
    ):
        assert torch.equal(left, right)


def test_factors_follow_their_frequencies() -> None:
    """The factors of a part of a head are interpolated for a whole one; both lists are the short
    one, and ones need no form.
    """
    rope = drafter_rope(
        {"rope_parameters": {"rope_type": "longrope", "partial_rotary_factor": 0.25, **LISTS}}, HEAD
    )
    assert (
        rope["short_factor"] == rope["long_factor"] == [1.0, 1.125, 1.25, 1.375, 1.5, 1.5, 1.5, 1.5]
    )
    assert not depends_on_length(rope) and rope["attention_factor"] == 1.0
    plain = {"rope_type": "longrope", **LISTS, "short_factor": [1.0, 1.0]}
    assert drafter_rope({"rope_parameters": plain}, HEAD) == {
        "rope_type": "default",
        "rope_theta": 10000.0,
    }


WRONG: dict[str, tuple[Any, str]] = {
    "a typing error": ({"rope_type": "yaarn", "factor": 4.0}, "rope_type=yaarn: there is no such"),
    "an old name": ({"type": "su"}, "rope_type=su: there is no such"),
    "a list of types": ({"rope_type": ["yarn"]}, "there is no such"),
    "a text": ("linear", "it is no group of settings"),
    "yarn without factor": ({"rope_type": "yarn"}, "yarn: factor is missing"),
    "linear without factor": ({"type": "linear"}, "linear: factor is missing"),
    "dynamic without factor": ({"type": "dynamic"}, "dynamic: factor is missing"),
    "longrope without factors": ({"type": "longrope"}, "short_factor is missing"),
    "llama3 without bounds": ({"rope_type": "llama3", "factor": 4.0}, "low_freq_factor is missing"),
    "bounds that cross": (
        {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5},
        "must be above low_freq_factor",
    ),
    "a number as text": ({"rope_type": "linear", "factor": "4"}, "factor='4' must be a number"),
    "a base of one": ({"rope_type": "default", "rope_theta": 1}, "rope_theta=1 must be"),
    "a base that is no base": (
        {"rope_type": "default", "rope_theta": 1e308},
        "rope_theta=1e+308 must be",
    ),
    "a factor without end": ({"rope_type": "linear", "factor": 10**30}, "no larger than 1e"),
    "a factor below 1": ({"rope_type": "linear", "factor": 0.5}, "must be a number of 1 or more"),
    "true for one": (
        {"rope_type": "yarn", "factor": 4.0, "beta_slow": True},
        "beta_slow=True must be a number",
    ),
    "one for true": (
        {"rope_type": "yarn", "factor": 4.0, "truncate": 1},
        "truncate=1 must be true or false",
    ),
    "true for a whole head": (
        {"rope_type": "default", "partial_rotary_factor": True},
        "partial_rotary_factor=True must be a number",
    ),
    "no name of a form": ({"rope_type": False}, "rope_type=False: there is no such"),
    "an empty list": ([], "it is no group of settings"),
    "false": (False, "it is no group of settings"),
    "a base below zero": ({"rope_type": "default", "rope_theta": -1}, "rope_theta=-1 must be"),
    "a part larger than the whole": (
        {"rope_type": "default", "partial_rotary_factor": 7},
        "partial_rotary_factor=7 must be 1 or less",
    ),
    "ranges that cross": (
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32},
        "beta_fast=1 must be above beta_slow=32",
    ),
    "lists of two lengths": (
        {"rope_type": "longrope", **LISTS, "long_factor": [1.0]},
        "2 numbers and long_factor 1",
    ),
    "lists of a part of a head": ({"rope_type": "longrope", **LISTS}, "a head of 16 needs 8"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_cannot_be_read_is_refused(fault: str) -> None:
    rope, message = WRONG[fault]
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(RopeError, match=re.escape(message)):
            fit_to_head(read_rope({key: rope, "max_position_embeddings": 64}), HEAD)


def test_files_with_such_a_form_are_refused_everywhere(folder: Path, tmp_path: Path) -> None:
    """lint reports an error, and reading raises UserError; mrope is read as the default, and a
    partial factor is reported.
    """
    target = target_of("default", folder)
    files = TargetFiles(target.path)
    save_random(tmp_path / "run", target, "eagle3", vocab_size=256)
    for layout in ("sglang", "vllm"):
        path = convert(tmp_path / "run", tmp_path / layout, layout, files) / "config.json"
        content = json.loads(path.read_text())
        group = content if layout == "sglang" else content["transformer_layer_config"]
        group.pop("rope_parameters", None)
        group["rope_scaling"] = {"rope_type": "yaarn", "factor": 4.0}
        path.write_text(json.dumps(content))
        (finding,) = lint(path.parent, None)
        assert (finding.name, finding.level) == ("rope-unreadable", "error")
        with pytest.raises(
            UserError,
            match="rope_type=yaarn: there is no such rotary embedding; the nearest is yarn",
        ):
            read_drafter(path.parent, files)
        group["rope_scaling"], group["rope_theta"] = (
            {"type": "mrope", "mrope_section": [4, 2, 2]},
            5000.0,
        )
        group["partial_rotary_factor"] = 0.5
        path.write_text(json.dumps(content))
        assert [finding.name for finding in lint_files(path.parent, files)] == ["partial-rotary"]
        rope = read_drafter(path.parent, files).drafter["architecture"]["rope_parameters"]
        assert rope == {"rope_type": "default", "rope_theta": 5000.0}


def test_a_target_with_such_a_form_is_refused(folder: Path, tmp_path: Path) -> None:
    """Loading and reading the configuration name the file's fault; a drafter's own setting is
    named as such.
    """
    from spectrain.models.loading import load_hf

    target = target_of("default", folder)
    for rope, message in (
        ({"rope_type": "yaarn"}, "rope_type=yaarn"),
        ({"rope_type": "yarn"}, "yarn: factor is missing"),
    ):
        path = tmp_path / rope["rope_type"]
        make_target(path)
        content = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**content, "rope_parameters": rope}))
        with pytest.raises(UserError, match=message):
            load_hf(str(path))
        with pytest.raises(UserError, match=message):
            TargetFiles(str(path)).drafter_rope(HEAD)
    with pytest.raises(UserError, match="drafter.architecture.rope_parameters: rope_type=yaarn"):
        save_random(
            tmp_path / "run",
            target,
            "eagle3",
            architecture={"rope_parameters": {"rope_type": "yaarn"}},
        )


def test_sizes_without_a_rotary_embedding_keep_the_targets(folder: Path, tmp_path: Path) -> None:
    """An `architecture` with every size of a layer still has the target's rotary embedding in
    the exported files.
    """
    target = target_of("linear", folder)
    sizes = {
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    save_random(tmp_path / "run", target, "eagle3", vocab_size=256, architecture=sizes)
    convert(tmp_path / "run", tmp_path / "out", "sglang", TargetFiles(target.path))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_theta"] == 5000.0 and written["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }


def test_a_form_that_a_class_lacks_is_named(tmp_path: Path) -> None:
    """transformers looks the form up in a table and raises its name alone."""
    reason = explain_load_error(tmp_path, KeyError("mrope"))
    assert reason == "the model's class has no rotary embedding of rope_type=mrope"
