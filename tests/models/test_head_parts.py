"""Targets without their layers: what is read of a checkpoint, from where, and what such a target
refuses.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.models import checkpoint_files, loading
from spectrain.models.bundled import TINY_DIRECTORY, load_tiny_tokenizer
from spectrain.models.checkpoint_files import INDEX_FILE, CheckpointFiles
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.target import Target
from tests.models.architectures import save_small
from tests.models.checkpoints import save_fp8, save_unquantized

HEAD_TENSORS = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


@contextmanager
def record_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the tensors that are read while the context is open."""
    names: list[str] = []
    read_tensor = CheckpointFiles.read_tensor

    def record_read(files: CheckpointFiles, name: str) -> Any:
        names.append(name)
        return read_tensor(files, name)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFiles, "read_tensor", record_read)
        yield names


def check_equal(head: Target, full: Target) -> None:
    """Check that embedding, output layer and final norm compute the same, and that the shapes of
    the layers are equal.
    """
    tokens = torch.arange(20)[None]
    states = torch.randn(1, 5, full.width, dtype=full.dtype)
    assert torch.equal(head.head.embed(tokens), full.head.embed(tokens))
    assert torch.equal(head.head.logits(states), full.head.logits(states))
    assert torch.equal(head.apply_final_norm(states), full.apply_final_norm(states))
    assert (head.num_layers, head.width, head.dtype, head.stop_ids) == (
        full.num_layers,
        full.width,
        full.dtype,
        full.stop_ids,
    )
    assert all(parameter.is_meta for layer in head.layers for parameter in layer.parameters())


def save_sharded(folder: Path) -> Path:
    """A checkpoint of untied weights in shards of one tensor or a few."""
    save_unquantized(folder / "whole")
    target = load_hf(str(folder / "whole"))
    target.model.save_pretrained(folder / "shards", max_shard_size="200KB")
    target.tokenizer.save_pretrained(folder / "shards")
    return folder / "shards"


def test_the_tiny_target_without_layers() -> None:
    check_equal(load_tiny(parts="head"), load_tiny())


def test_only_the_heads_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_sharded(tmp_path)
    with record_reads(monkeypatch) as names:
        head = load_hf(str(folder), parts="head", dtype="float32")
    assert sorted(names) == HEAD_TENSORS
    check_equal(head, load_hf(str(folder), dtype="float32"))


def test_files_of_the_layers_may_be_absent(tmp_path: Path) -> None:
    folder = save_sharded(tmp_path)
    full = load_hf(str(folder), dtype="float32")
    files = CheckpointFiles(folder).tensor_files
    for file in {*files.values()} - {files[name] for name in HEAD_TENSORS}:
        (folder / file).unlink()
    check_equal(load_hf(str(folder), parts="head", dtype="float32"), full)


def test_layers_may_be_quantized(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    check_equal(load_hf(str(tmp_path), parts="head"), load_hf(str(tmp_path)))


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neox", "olmo", "gemma4_text", "bailing_hybrid", "qwen2_5_vl", "gemma3"]
)
def test_names_and_kinds_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Tied and other output layers, norms without weights, renamed tensors, models of text and
    images.
    """
    save_small(name, tmp_path)
    monkeypatch.setattr(loading, "load_tokenizer", lambda *args, **kwargs: load_tiny_tokenizer())
    monkeypatch.setattr(loading, "check_exact", lambda target: None)
    check_equal(load_hf(str(tmp_path), parts="head"), load_hf(str(tmp_path)))


def test_only_the_files_that_hold_the_head_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_sharded(tmp_path)
    cache = tmp_path / "cache" / "commit"
    downloads = []
    cache.mkdir(parents=True)

    def copy_file(repository: str, file: str, revision: str | None = None) -> str:
        downloads.append((repository, file, revision))
        if not (folder / file).exists():
            raise EntryNotFoundError(file)
        return str(shutil.copy(folder / file, cache))

    monkeypatch.setattr(checkpoint_files, "hf_hub_download", copy_file)
    files = CheckpointFiles.open_model("org/name", "v2")
    tensors = {name: files.read_tensor(name) for name in HEAD_TENSORS}
    files = CheckpointFiles(folder)
    assert all(torch.equal(tensor, files.read_tensor(name)) for name, tensor in tensors.items())
    assert downloads[0] == ("org/name", INDEX_FILE, "v2")
    assert sorted({file for _, file, _ in downloads[1:]}) == sorted(
        {files.tensor_files[name] for name in HEAD_TENSORS}
    )
    assert {revision for _, _, revision in downloads[1:]} == {"commit"}
    assert len({*files.tensor_files.values()}) > len(downloads[1:])


def test_a_hub_model_in_a_single_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_file(repository: str, file: str, revision: str | None = None) -> str:
        if not (TINY_DIRECTORY / file).exists():
            raise EntryNotFoundError(file)
        return str(TINY_DIRECTORY / file)

    monkeypatch.setattr(checkpoint_files, "hf_hub_download", copy_file)
    assert "model.norm.weight" in CheckpointFiles.open_model("org/name").tensor_files
    assert huggingface_hub.hf_hub_download is not copy_file


def test_what_needs_layers_is_refused() -> None:
    head = load_tiny(parts="head")
    with pytest.raises(UserError, match=r"target.parts=head: .* needs the layers of tiny"):
        decode(head, [[1, 2, 3]], Greedy(), 4)
    with pytest.raises(
        UserError, match="chat needs the layers of tiny, which are not loaded; use target.parts=all"
    ):
        head.require_layers("chat")
    load_tiny().require_layers("chat")


def test_settings_of_the_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="target.sharding=fsdp2: target.parts=head"):
        load_tiny(parts="head", sharding="fsdp2")
    with pytest.raises(UserError, match="target.quantization=8bit: target.parts=head"):
        load_hf(str(TINY_DIRECTORY), parts="head", quantization="8bit")


def test_a_checkpoint_without_the_tensors_is_refused(tmp_path: Path) -> None:
    folder = save_sharded(tmp_path)
    index = json.loads((folder / INDEX_FILE).read_text())
    shard = folder / index["weight_map"].pop("model.norm.weight")
    (folder / INDEX_FILE).write_text(json.dumps(index))
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    with pytest.raises(UserError, match="has no tensor model.norm.weight"):
        load_hf(str(folder), parts="head")
