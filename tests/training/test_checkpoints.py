"""Tensors by name: tied ones are saved once and are restored, and what does not fit is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spectrain.training.checkpoints import (
    checkpoint_path,
    collect_tensors,
    delete_best_except,
    latest_checkpoint,
    load_tensors,
    save_checkpoint,
)


class Tied(nn.Module):
    """An embedding whose output layer shares its weights, another layer of the same shape, and
    two empty buffers.
    """

    first: Tensor
    second: Tensor

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.other = nn.Linear(4, 6)
        self.output = nn.Linear(4, 6, bias=False)
        if tied:
            self.output.weight = self.embed.weight
        self.register_buffer("first", torch.zeros(0))
        self.register_buffer("second", torch.zeros(0))


NAMES = {"embed.weight", "other.weight", "other.bias", "first", "second"}


def test_tied_tensors_are_saved_once(tmp_path: Path) -> None:
    """Only the first of tied tensors is saved, and the reloaded module is equal and still tied."""
    saved = Tied()
    loaded = Tied()
    assert collect_tensors(saved).keys() == NAMES
    assert collect_tensors(Tied(tied=False)).keys() == NAMES | {"output.weight"}
    save_file(collect_tensors(saved), tmp_path / "file.safetensors")
    load_tensors(loaded, load_file(tmp_path / "file.safetensors"))
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in saved.state_dict().items()
    )
    with torch.no_grad():
        loaded.embed.weight.fill_(2.0)
    assert (loaded.output.weight == 2).all()


def test_either_name_of_a_tied_tensor_is_enough() -> None:
    """A file that holds the tied tensor under its second name loads as well."""
    saved = Tied()
    loaded = Tied()
    weights = collect_tensors(saved)
    weights["output.weight"] = weights.pop("embed.weight")
    load_tensors(loaded, weights)
    assert torch.equal(saved.embed.weight, loaded.embed.weight)


def test_tensors_that_only_share_memory_are_all_saved() -> None:
    """Two views of one storage with different shapes are two tensors."""
    module = nn.Module()
    full = torch.arange(6.0)
    module.register_buffer("full", full)
    module.register_buffer("part", full[:3])
    assert collect_tensors(module).keys() == {"full", "part"}


def test_tensors_are_contiguous_copies_of_their_values() -> None:
    """A transposed weight is saved by its values, contiguous and without a gradient."""
    module = nn.Linear(3, 5)
    module.weight = nn.Parameter(torch.randn(3, 5).t())
    weight = collect_tensors(module)["weight"]
    assert (
        weight.is_contiguous() and not weight.requires_grad and torch.equal(weight, module.weight)
    )


@pytest.mark.parametrize("name", ["other.bias", "embed.weight"])
def test_a_missing_tensor_is_named(name: str) -> None:
    """Nothing tied to it was loaded, so a missing tensor is an error."""
    weights = collect_tensors(Tied())
    del weights[name]
    with pytest.raises(RuntimeError, match=name):
        load_tensors(Tied(), weights)


def test_a_tensor_tied_when_saved_is_missing_where_it_is_not_tied() -> None:
    """Weights of a tied module do not fill an untied one."""
    with pytest.raises(RuntimeError, match=r"output\.weight"):
        load_tensors(Tied(tied=False), collect_tensors(Tied()))


def test_unknown_and_misshapen_tensors_are_named() -> None:
    """A name that the module lacks and a shape that differs are errors with the name."""
    with pytest.raises(RuntimeError, match=r"extra\.weight"):
        load_tensors(Tied(), {**collect_tensors(Tied()), "extra.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"embed\.weight"):
        load_tensors(Tied(), {**collect_tensors(Tied()), "embed.weight": torch.zeros(6, 3)})


def test_what_is_no_checkpoint_is_neither_taken_for_one_nor_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    others = ["step-000009-v2", "step-x9", "best-of-2", "step-000008.backup.part"]
    for name in others:
        (folder / name).mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    links = ["step-000007", "best-000007", "step-000006.part"]
    for name in links:
        (folder / name).symlink_to(outside)
    (folder / "step-000099").write_text("a file")
    assert latest_checkpoint(tmp_path / "run") is None
    for step in (1, 2):
        save_checkpoint(checkpoint_path(tmp_path / "run", step), {}, {}, {}, keep=1)
    delete_best_except(tmp_path / "run", set())
    newest = checkpoint_path(tmp_path / "run", 2)
    assert latest_checkpoint(tmp_path / "run") == newest
    remaining = sorted([*others, *links, "step-000099", newest.name])
    assert sorted(path.name for path in folder.iterdir()) == remaining and outside.is_dir()
