"""The feature store: captured states are read unchanged, damage is found by name, and what does
not fit is refused.
"""

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.config.build import build
from spectrain.config.choices import choice_files, conf_folders, list_constructors
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import RunError, UserError
from spectrain.features import store as module
from spectrain.features.base import BatchRequest, FeaturesRead, Source
from spectrain.features.batch import Batch, collate
from spectrain.features.capture import verify_store
from spectrain.features.live_source import LiveSource
from spectrain.features.store import FeatureStore, compute_checksum
from spectrain.features.store_contents import (
    StoreContents,
    hash_weights,
    quantize,
    select_final_positions,
)
from spectrain.features.stored_source import StoredSource
from spectrain.models.loading import load_tiny
from spectrain.models.lora import inject_lora
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer
from tests.targets import cut_tiny

LAYERS = (2, 5, "final")
LIKE = torch.empty(0)
CONTENTS = StoreContents("toy", "nowhere", "w", "t", LAYERS, 16, "float32", None)
DTYPES: list[Any] = ["float32", "bfloat16", "float16", "int8", "fp8"]


def make_examples(count: int = 6) -> list[Example]:
    """Sequences of unequal length; the first has two turns."""
    torch.manual_seed(3)
    rows = torch.randint(3, 2000, (count, 20)).tolist()
    documents = [
        Example(row[: 20 - n % 4], [i >= 7 for i in range(20 - n % 4)])
        for n, row in enumerate(rows)
    ]
    documents[0].mask[10:13] = [False] * 3
    return documents


def make_states(example: Example) -> Tensor:
    """Make features [T, L, D] of very different size by token and layer."""
    torch.manual_seed(int(example.content_hash[:6], 16))
    return torch.randn(len(example.tokens), 3, 16) * torch.logspace(
        -3, 3, len(example.tokens) * 3
    ).view(-1, 3, 1)


def fill_store(
    path: Path,
    contents: StoreContents = CONTENTS,
    rows: list[Example] | None = None,
    **options: Any,
) -> FeatureStore:
    store = FeatureStore(path, contents, repair=True, **options)
    for example in make_examples() if rows is None else rows:
        store.put_states(example, make_states(example), LAYERS)
    store.flush()
    return store


def read_example(store: FeatureStore, example: Example) -> Tensor:
    states = store.read_states(example, LAYERS, LIKE)
    assert states is not None
    return states


# Reading


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_states_are_read_unchanged(tmp_path: Path, dtype: Any) -> None:
    """Reading gives what storing returned: the exact states in float32, else within the type's
    rounding.
    """
    contents = replace(CONTENTS, dtype=dtype)
    store = FeatureStore(tmp_path, contents)
    returned = [
        store.put_states(example, make_states(example), LAYERS) for example in make_examples()
    ]
    unflushed = [read_example(store, example) for example in make_examples()]
    store.flush()
    reopened = FeatureStore(tmp_path)
    assert reopened.contents == contents and reopened.num_bytes >= sum(
        map(contents.num_bytes, make_examples())
    )
    for example, from_put, from_memory in zip(
        reversed(make_examples()), reversed(returned), reversed(unflushed)
    ):
        actual = read_example(reopened, example)
        assert torch.equal(actual, from_put) and torch.equal(actual, from_memory)
        exact = make_states(example)
        largest = make_states(example).abs().amax(-1, keepdim=True)
        bound = {
            "float32": torch.zeros_like(exact),
            "bfloat16": exact.abs() / 2**8,
            "float16": exact.abs() / 2**11 + 1e-7,
            "int8": (largest / 254).expand_as(exact),
            "fp8": exact.abs() / 2**4 + largest / 448 / 2**10,
        }[dtype]
        assert bool(((actual - exact).abs() <= bound * 1.0001).all())


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_rounding_has_no_bias(dtype: Any) -> None:
    """The mean error of many values is negligible, and zeros stay zeros."""
    torch.manual_seed(0)
    exact = torch.randn(4000, 128)
    stored, scale = quantize(exact, dtype)
    assert scale is not None
    error = stored.float() * scale[:, None] - exact
    assert error.mean().abs() < 1e-4 and error.abs().mean() > 1e-3
    stored, scale = quantize(torch.zeros(1, 8), dtype)
    assert scale is not None and bool((stored.float() * scale[:, None] == 0).all())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("reach", [0, 2])
def test_only_supervised_final_states_are_stored(tmp_path: Path, reach: int, dtype: Any) -> None:
    """With a reach, "final" is stored where one of the next reach + 1 tokens carries loss, and
    NaN elsewhere.
    """
    full = replace(CONTENTS, dtype=dtype)
    thrifty = replace(CONTENTS, dtype=dtype, final_reach=reach)
    full_store = fill_store(tmp_path / "whole", full)
    thrifty_store = fill_store(tmp_path / "some", thrifty)
    for example in make_examples():
        is_stored = torch.zeros(len(example.tokens), dtype=torch.bool)
        for position in range(len(is_stored)):
            is_stored[position] = any(example.mask[position + 1 : position + 2 + reach])
        assert (
            is_stored.nonzero()[:, 0].tolist()
            == select_final_positions(example.mask, reach).tolist()
        )
        assert 0 < int(is_stored.sum()) < len(is_stored)
        full_states = read_example(full_store, example)
        thrifty_states = read_example(thrifty_store, example)
        assert torch.equal(full_states[:, :2], thrifty_states[:, :2]) and torch.equal(
            full_states[is_stored], thrifty_states[is_stored]
        )
        assert bool(thrifty_states[~is_stored, 2].isnan().all())
        other = Example(example.tokens, [True] * len(example.tokens))
        # the loss mask decides what is stored
        assert other in full_store and other not in thrifty_store
        assert thrifty.num_bytes(example) < full.num_bytes(example)


def test_layers_can_be_read_in_another_order(tmp_path: Path) -> None:
    """A drafter that reads fewer layers, in another order, reads the same store."""
    store = fill_store(tmp_path)
    for example in make_examples():
        actual = store.read_states(example, ("final", 2), LIKE.double())
        assert actual is not None and torch.equal(actual, make_states(example)[:, [2, 0]].double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reach", [None, 1])
def test_bytes_are_counted_exactly(dtype: Any, reach: int | None) -> None:
    """The announced bytes are those of the tensors."""
    contents = replace(CONTENTS, dtype=dtype, final_reach=reach)
    for example in make_examples():
        tensors = contents.encode_states(example, make_states(example))
        assert sum(tensor.nbytes for tensor in tensors.values()) == contents.num_bytes(example)


def test_several_processes_write_the_same_store(tmp_path: Path) -> None:
    """Stores that are open at once write to one folder and read each other's states; shards have
    a bounded size.
    """
    rows = make_examples(24)
    writers = [FeatureStore(tmp_path, CONTENTS, shard_bytes=1e4) for _ in range(3)]
    for number, example in enumerate(rows):
        writers[number % 3].put_states(example, make_states(example), LAYERS)
    for writer in writers:
        writer.flush()
    time.sleep(0.02)
    FeatureStore(tmp_path, CONTENTS).flush()  # nothing waits, so nothing is written
    for store in (*writers, FeatureStore(tmp_path)):
        assert all(
            example in store and torch.equal(read_example(store, example), make_states(example))
            for example in rows
        )
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 3 and max(sizes) < 1e4 + 2 * 20 * 3 * 16 * 4 + 2000
    assert not list(tmp_path.glob("*.part"))
    # all files have the same permissions
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


def test_two_processes_may_begin_the_same_folder(tmp_path: Path) -> None:
    """A store opened in an empty folder does not mix other features with what another process
    has begun to store.
    """
    other = FeatureStore(tmp_path, replace(CONTENTS, dtype="int8"))
    same = FeatureStore(tmp_path, CONTENTS)
    fill_store(tmp_path, rows=make_examples()[:3])
    for store in (other, same):
        store.put_states(make_examples()[4], make_states(make_examples()[4]), LAYERS)
    same.flush()
    with pytest.raises(UserError, match="another process has begun to store other features"):
        other.flush()
    assert len(FeatureStore(tmp_path).shard_names) == 4


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_announced_budget_holds(tmp_path: Path, dtype: Any) -> None:
    """Files are no larger than tensors and the reserved headers; a budget one byte smaller is
    refused.
    """
    contents = replace(CONTENTS, dtype=dtype, final_reach=1)
    store = fill_store(tmp_path / "store", contents)
    tensors = sum(map(contents.num_bytes, make_examples()))
    files = sum(file.stat().st_size for file in (tmp_path / "store").glob("features-*"))
    assert tensors < files < tensors + module.HEADER_BYTES * len(make_examples())
    assert store.num_bytes < files
    with pytest.raises(UserError, match="is full"):
        fill_store(tmp_path / "tight", contents, max_bytes=tensors - 1)
    assert not (tmp_path / "tight").exists()


# Damage


def flip_byte(file: Path) -> None:
    """Change a byte in the middle of the data."""
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


HARM: dict[str, Callable[[Path], None]] = {
    "is missing": lambda file: file.unlink(),
    "bytes instead of": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "checksum differs": flip_byte,
    "cannot be read": lambda file: file.write_bytes(b"\xff" * file.stat().st_size),
    "index cannot be read": lambda file: file.with_suffix(".json").write_text("{"),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_shard_is_named_and_captured_again(
    tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name and fault are printed, only its sequences are missing, and capturing these
    repairs the store.
    """
    stores = [fill_store(tmp_path, rows=[example]) for example in make_examples()]
    (damaged,) = (
        stores[2].shards.values()
        if len(stores[2].shards) == 1
        else [stores[2].shards[stores[2].shard_names[make_examples()[2].content_hash]]]
    )
    HARM[harm](tmp_path / f"{damaged.name}.safetensors")
    store = FeatureStore(tmp_path, CONTENTS, repair=True)
    rows = [store.read_states(example, LAYERS, LIKE) for example in make_examples()]
    stdout = capsys.readouterr().out
    assert damaged.name in stdout and harm in stdout and stdout.count("features-") == 1
    assert [row is None for row in rows] == [number == 2 for number in range(6)]
    fill_store(tmp_path, rows=[make_examples()[2]])
    mended = FeatureStore(tmp_path)
    mended.verify_shards()
    assert not mended.damaged_files and all(
        torch.equal(read_example(mended, example), make_states(example))
        for example in make_examples()
    )
    assert not (tmp_path / f"{damaged.name}.safetensors").exists()


@pytest.mark.parametrize("harm", ["is missing", "checksum differs"])
def test_reading_deletes_no_files(
    tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store without repair=true names what is damaged, and its files stay."""
    fill_store(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    HARM[harm](file)
    before = sorted(tmp_path.iterdir())
    store = FeatureStore(tmp_path)
    store.verify_shards()
    assert store.damaged_files == [file.name] and file.name in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before and not store.shard_names


def test_verify_detects_damage_that_reading_misses(tmp_path: Path) -> None:
    """The SHA-256 covers the header, too."""
    fill_store(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"format":"pt"', b'"format":"xx"'))
    store = FeatureStore(tmp_path)
    assert all(
        torch.equal(read_example(store, example), make_states(example))
        for example in make_examples()
    )
    store.verify_shards()
    assert store.damaged_files == [file.name]


def test_verify_names_a_shard_without_an_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its sequences cannot be read, so the store is not intact; nor is a store without shards."""
    fill_store(tmp_path)
    (index,) = tmp_path.glob("features-*.json")
    index.unlink()
    with pytest.raises(RunError, match=rf"1 files are missing or damaged \({index.stem}"):
        verify_store(str(tmp_path), drop=False)
    assert f"its index {index.name} is missing" in capsys.readouterr().out
    with pytest.raises(RunError, match="they were deleted"):
        verify_store(str(tmp_path), drop=True)
    with pytest.raises(RunError, match="this store has no shards"):
        verify_store(str(tmp_path), drop=False)


def test_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """A half-written file and a shard without an index are not read, and are removed once they
    are old.
    """
    fill_store(tmp_path)
    part = tmp_path / "features-1.safetensors.ab.part"
    orphan = tmp_path / "features-2.safetensors"
    for file in (part, orphan):
        file.write_bytes(b"x")
    assert (
        len(FeatureStore(tmp_path, repair=True).shards) == 1 and part.exists() and orphan.exists()
    )
    for file in tmp_path.iterdir():
        os.utime(file, (1e9, 1e9))
    store = FeatureStore(tmp_path, repair=True)
    assert (
        not part.exists()
        and not orphan.exists()
        and torch.equal(read_example(store, make_examples()[0]), make_states(make_examples()[0]))
    )


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one sentence, stored states stay, and waiting ones can still be written."""
    fill_store(tmp_path, rows=make_examples()[:3])
    store = FeatureStore(tmp_path)
    store.put_states(make_examples()[3], make_states(make_examples()[3]), LAYERS)

    def fail_to_save(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(UserError, match="disk is full"):
        patched.setattr(module, "save_file", fail_to_save)
        store.flush()
    assert len(list(tmp_path.iterdir())) == 3
    store.flush()
    assert all(example in FeatureStore(tmp_path) for example in make_examples()[:4])


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    """A folder that cannot be written and features that are not finite in the type are errors;
    nothing is stored.
    """
    (tmp_path / "file").write_text("")
    store = FeatureStore(tmp_path / "file" / "store", replace(CONTENTS, dtype="float16"))
    with pytest.raises(RunError, match="not finite in float16"):
        store.put_states(make_examples()[0], make_states(make_examples()[0]) * 1e5, LAYERS)
    store.flush()
    store.put_states(make_examples()[0], make_states(make_examples()[0]), LAYERS)
    with pytest.raises(UserError, match="cannot be written"):
        store.flush()
    for dtype in ("float32", "int8", "fp8"):
        wrong = make_states(make_examples()[0])
        wrong[3, 1, 2] = torch.nan
        with pytest.raises(RunError, match="not finite"):
            FeatureStore(tmp_path / dtype, replace(CONTENTS, dtype=dtype)).put_states(
                make_examples()[0], wrong, LAYERS
            )  # type: ignore[arg-type]


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    """A manifest that cannot be read and a folder without one are refused."""
    fill_store(tmp_path)
    manifest = tmp_path / "manifest.json"
    facts = json.loads(manifest.read_text())
    for wrong in ({**facts, "format": 2}, {**facts, "dtype": "int2"}, {**facts, "more": 1}):
        manifest.write_text(json.dumps(wrong))
        with pytest.raises(UserError, match="this manifest cannot be read"):
            FeatureStore(tmp_path)
    with pytest.raises(UserError, match="no feature store"):
        FeatureStore(tmp_path / "elsewhere")


@pytest.mark.parametrize("has_checksum", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {"width": "16"},
        {"width": 0},
        {"layers": "abc"},
        {"layers": [2.5]},
        {"final_reach": -1},
        {"final_reach": "2"},
        {"dtype": ["float32"]},
        {"head": 3},
    ],
)
def test_a_manifest_of_wrong_values_is_refused(
    change: dict[str, Any], has_checksum: bool, tmp_path: Path
) -> None:
    """Manifests of earlier versions have no checksum, and their values are checked, too."""
    fill_store(tmp_path)
    manifest = tmp_path / "manifest.json"
    facts = json.loads(manifest.read_text()) | change
    if not has_checksum:
        del facts["sha256"]
    manifest.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"manifest\.json: this manifest cannot be read"):
        FeatureStore(tmp_path)


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    """Layers in another order would be taken for each other."""
    fill_store(tmp_path)
    manifest = tmp_path / "manifest.json"
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "layers": [5, 2, "final"]}))
    with pytest.raises(UserError, match="the checksum that it was saved with"):
        FeatureStore(tmp_path)
    del facts["sha256"]
    manifest.write_text(json.dumps(facts))
    assert FeatureStore(tmp_path).contents == CONTENTS


@pytest.mark.parametrize("change", [{"dtype": "F16"}, {"shape": [16, 3]}, {"shape": [48]}])
def test_a_shard_whose_header_lies_is_dropped(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bytes are those that were stored, so their checksum is right; as other numbers, or in
    another order, they would be read in silence."""
    example = make_examples()[0]
    fill_store(tmp_path, replace(CONTENTS, dtype="bfloat16"), [example])
    (file,) = tmp_path.glob("features-*.safetensors")
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    (entry,) = (entry for name, entry in header.items() if name.endswith("/hidden"))
    if "shape" in change:
        change = {"shape": [len(example.tokens), *change["shape"]]}
    text = json.dumps({**header, **{name: {**entry, **change} for name in header if "/" in name}})
    file.write_bytes(data[:8] + text.replace(" ", "").encode().ljust(size) + data[8 + size :])
    store = FeatureStore(tmp_path)
    assert store.read_states(example, LAYERS, LIKE) is None
    assert "its tensors have other types or sizes" in capsys.readouterr().out
    assert store.damaged_files == [file.name]


def test_a_reach_beyond_the_text_takes_no_longer() -> None:
    mask = [False, False, True, False]
    assert select_final_positions(mask, 10**12).tolist() == [0, 1]


def test_checksums_depend_on_every_byte() -> None:
    """A checksum depends on each tensor's bytes and name; empty tensors are allowed."""
    tensors = {
        "a": torch.arange(6.0),
        "b": torch.zeros(2, 3, dtype=torch.int8),
        "c": torch.zeros(0, 4),
    }
    assert compute_checksum(tensors) == compute_checksum(dict(reversed(tensors.items())))
    tensors["a"][5] = 5.5
    changed = compute_checksum(tensors)
    tensors["b"][1, 2] = 1
    assert (
        len({compute_checksum(tensors), changed, compute_checksum({"a": torch.arange(6.0)})}) == 3
    )


# Target


def test_the_weight_hash_depends_on_the_weights_alone(tiny: Target) -> None:
    """Another type with the same values and fresh adapters keep the hash; one changed matrix
    does not.
    """
    expected = hash_weights(tiny.model)
    other = load_tiny()
    inject_lora(other, 4, 4.0)
    assert hash_weights(other.model) == expected
    for parameter in other.parameters():
        parameter.data = parameter.data.double()
    assert hash_weights(other.model) == expected
    with torch.no_grad():
        other.layers[3].mlp.down_proj.base_layer.weight.mul_(1.01)  # type: ignore[union-attr, operator]
    assert hash_weights(other.model) != expected


# Training


def make_dataset(count: int = 12) -> Dataset:
    return Dataset(make_examples(count), count, 0, 0)


def make_drafter(shallow: Target, **options: Any) -> Eagle3:
    torch.manual_seed(0)
    drafter = Eagle3(shallow, ttt_steps=2, **options)
    drafter.prepare(shallow, torch.arange(shallow.head.vocab_size))
    return drafter


def read_features(drafter: Drafter) -> FeaturesRead:
    """Return what the loss of a drafter's first stage reads."""
    return FeaturesRead(drafter.stages[0].layers, drafter.stages[0].final_reach)


def prepare_source(source: Source, drafter: Drafter, target: Target, rows: list[Example]) -> str:
    """Return the source's message before a training of this drafter."""
    message = source.prepare(target, read_features(drafter), rows)
    assert message is not None
    return message


def train_losses(
    shallow: Target, source: Source, run: Path, on_step: Any = None, is_prepared: bool = True
) -> list[float]:
    """Train two epochs and a half with a checkpoint every third step; return the losses."""
    trainer = Trainer(lr=1e-3, epochs=2.5, batch_tokens=60, log_every=1, save_every=3)
    drafter = make_drafter(shallow)
    if is_prepared:
        source.prepare(shallow, read_features(drafter), make_dataset().examples)
    try:
        trainer.fit(drafter, shallow, make_dataset(), source, run, on_step=on_step)
    finally:
        source.flush()
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert min(losses) > 0
    return losses


def forbid_target(shallow: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test fail if the target is run from here on."""
    monkeypatch.setattr(shallow, "features", lambda *args: pytest.fail("the target was run"))


FAMILIES: list[dict[str, Any]] = [
    {"_target_": "spectrain.drafters.eagle3.Eagle3"},
    {"_target_": "spectrain.drafters.eagle3.Eagle3", "loss": "cross_entropy", "layers": [3]},
    {"_target_": "spectrain.drafters.medusa.Medusa"},
    {"_target_": "spectrain.drafters.medusa.Medusa", "loss": "forward_kl", "num_heads": 4},
    {"_target_": "spectrain.drafters.medusa.Medusa", "adapt": "lora", "num_heads": 2},
    {"_target_": "spectrain_research.hydra.drafter.Hydra"},
    {"_target_": "spectrain_research.hydra.drafter.Hydra", "prefix_attention": True},
    {"_target_": "spectrain_research.amphista.drafter.Amphista", "num_heads": 3},
    {"_target_": "spectrain_research.ctc.drafter.Ctc", "num_drafts": 3, "num_slots": 5},
    {"_target_": "spectrain_research.gumiho.drafter.Gumiho", "num_parallel": 2, "num_layers": 1},
    {"_target_": "spectrain_research.transformer_heads.drafter.TransformerHeads", "num_heads": 2},
    {"_target_": "spectrain.drafters.eagle1.Eagle1", "num_steps": 3, "top_k_weight": 1.0},
    {"_target_": "spectrain_research.redrafter.drafter.Redrafter", "num_steps": 3},
    {"_target_": "spectrain_research.kangaroo.drafter.Kangaroo"},
    {"_target_": "spectrain.drafters.causal.Causal", "num_layers": 2},
    {"_target_": "spectrain_research.training_wheels.drafter.TrainingWheels", "num_layers": 2},
    {"_target_": "spectrain_research.atspeed.drafter.AtSpeed", "num_layers": 2},
    {"_target_": "spectrain.drafters.pard.Pard", "num_layers": 2, "num_drafts": 3},
    {"_target_": "spectrain.drafters.peagle.PEagle", "num_layers": 2, "num_drafts": 3},
    {"_target_": "spectrain.drafters.mtp.Mtp", "num_steps": 2},
    {"_target_": "spectrain_research.lossy_rules.judge_drafter.DraftJudge", "window": 2},
    {"_target_": "spectrain.drafters.dflash.DFlash", "num_layers": 2, "block_size": 4},
    {
        "_target_": "spectrain.drafters.dflash.DFlash",
        "num_layers": 1,
        "loss": "forward_kl",
        "sample_from_anchor": True,
    },
    {"_target_": "spectrain.drafters.dspark.DSpark", "num_layers": 1, "rank": 16},
    {
        "_target_": "spectrain.drafters.dflash2.DFlash2",
        "num_layers": 1,
        "block_size": 4,
        "selector_rank": 16,
    },
    {"_target_": "spectrain.drafters.lilicorr.LiLiCorr", "num_layers": 1, "block_size": 4},
    {"_target_": "spectrain_research.domino.drafter.Domino", "num_layers": 1, "block_size": 4},
    {"_target_": "spectrain_research.xpress.drafter.XPress", "num_layers": 1, "block_size": 4},
    {"_target_": "spectrain_research.vispec.drafter.ViSpec", "num_steps": 2},
    {"_target_": "spectrain_research.cerberus.drafter.Cerberus", "num_heads": 2},
    {
        "_target_": "spectrain_research.mixture.drafter.MixtureOfAttentions",
        "num_steps": 2,
        "layers": [1, 3],
    },
    {"_target_": "spectrain_research.falcon.drafter.Falcon"},
    {"_target_": "spectrain_research.devices.gating.Dovetail"},
    {
        "_target_": "spectrain_research.specdec.drafter.SpecDec",
        "num_encoder_layers": 1,
        "num_drafts": 3,
    },
    {"_target_": "spectrain_research.prompt_variants.drafter.PromptVariants", "num_layers": 1},
    {"_target_": "spectrain_research.image_pruning.drafter.PrunedImages", "ttt_steps": 2},
    {"_target_": "spectrain_research.supernet.drafter.Supernet", "num_layers": 2, "ttt_steps": 2},
    {"_target_": "spectrain_research.jump.drafter.Jump", "num_steps": 2},
    {
        "_target_": "spectrain_research.layer_mixture.drafter.DFlare",
        "num_layers": 1,
        "block_size": 4,
    },
    {"_target_": "spectrain_research.layer_mixture.drafter.DFly", "num_layers": 1, "rank": 16},
    {"_target_": "spectrain_research.two_stage_head.drafter.TwoStageHead", "ttt_steps": 2},
    {"_target_": "spectrain_research.expected_length.drafter.ExpectedLength", "ttt_steps": 2},
    {"_target_": "spectrain_research.sinks.drafter.Sinks", "ttt_steps": 2, "window": 4},
    {"_target_": "spectrain_research.no_positions.drafter.NoPositions", "ttt_steps": 2},
]
# Those of a package that is not installed are left out.
FAMILIES = [
    family for family in FAMILIES if family["_target_"] in list_constructors("drafter").values()
]


def compute_gradients(drafter: Drafter, batch: Batch, target: Target) -> list[Tensor]:
    """Return loss, hits, counts and the gradients of everything that is trained, at a fixed
    seed.
    """
    drafter.zero_grad()
    torch.manual_seed(1)
    losses = drafter.loss(batch, target, TrainingState())
    losses.total.backward()
    gradients = [
        p.grad for group in drafter.stages[0].groups for p in group["params"] if p.grad is not None
    ]
    return [losses.total.detach(), losses.hits, losses.counts, *gradients]


@pytest.mark.sweep(8, free=("packed", "supervised_only", "family"))
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("supervised_only", [True, False])
@pytest.mark.parametrize(
    "family", FAMILIES, ids=lambda family: "-".join(str(v).split(".")[-1] for v in family.values())
)
def test_every_family_has_the_same_loss_from_a_store(
    tmp_path: Path,
    family: dict[str, Any],
    supervised_only: bool,
    packed: bool,
    request: pytest.FixtureRequest,
) -> None:
    """Loss and gradients from a float32 store, read back from disk, are those of source=live,
    bit for bit.
    """
    adapts = "adapt" in family
    target = cut_tiny(3) if adapts else request.getfixturevalue("shallow")
    torch.manual_seed(0)
    drafter: Drafter = build(family, target=target)
    drafter.prepare(target, torch.arange(target.head.vocab_size))
    source = StoredSource(str(tmp_path), supervised_only=supervised_only)
    if supervised_only and drafter.stages[0].final_reach is None:
        with pytest.raises(UserError, match="reads every position"):
            prepare_source(source, drafter, target, make_examples())
        return
    layers = drafter.stages[0].layers
    prepare_source(source, drafter, target, make_examples())
    live = compute_gradients(
        drafter,
        LiveSource(keep_gb=1.0).make_batch(
            BatchRequest(make_examples(), target, layers, packed=packed)
        ),
        target,
    )
    source.make_batch(BatchRequest(make_examples(), target, layers, packed=packed))
    source.flush()
    again = StoredSource(str(tmp_path), capture=False)
    prepare_source(again, drafter, target, make_examples())
    batch = again.make_batch(BatchRequest(make_examples(), target, layers, packed=packed))
    assert (
        batch.features is not None and bool(batch.features.hidden.isnan().any()) == supervised_only
    )
    stored = compute_gradients(drafter, batch, target)
    assert len(live) == len(stored) > 3 and all(torch.equal(a, b) for a, b in zip(live, stored))
    assert bool(torch.isfinite(live[0])) and float(live[0]) > 0


def test_the_comparison_covers_every_family_with_features() -> None:
    """The list above has every choice of drafter whose loss reads features."""
    compared = {str(family["_target_"]).rsplit(".", 1)[1] for family in FAMILIES}
    defined = {
        file.read_text().split("_target_: ")[1].split()[0].rsplit(".", 1)[1]
        for file in choice_files("drafter", conf_folders()).values()
    }
    excluded = {
        "EarlyExit",
        "GatedLora",
        "Jacobi",
        "LayerSkipping",
        "Lookahead",
        "Ngram",
        "Retrieval",
        "SelfDraft",
        "Universal",
    }
    excluded |= {"KalmanActions"}
    excluded |= {"HiddenTransfer", "Owl", "PromptTokens", "Space", "SpeculativeStreaming", "Uno"}
    excluded |= {"FineTunedStreaming", "JointExits"}  # they train the target
    excluded |= {"Hybrid"}  # its loss is that of the drafter inside
    excluded |= {
        "AdaptiveSkipping",
        "Bigrams",
        "Blockwise",
        "GraphDrafting",
        "OtherDevice",
        "Ouroboros",
        "ReSpec",
        "Trigrams",
    }
    # the first has no loss, and the second that of the drafter inside
    excluded |= {"Exits", "Howl"}
    # as is a cascade's and Graft's; a choice is not trained
    excluded |= {"Cascade", "Graft", "DrafterRouter", "RowRouter", "UnionDrafter"}
    excluded |= {"smollm2_eagle3", "load_coder_drafter"}  # trained already
    # Those of a package that is not installed are not defined.
    assert defined == compared | (excluded & defined)


@pytest.mark.parametrize("count", [2, 6])
def test_captured_states_do_not_depend_on_the_batch(
    shallow: Target, tmp_path: Path, count: int
) -> None:
    """On a CPU a text has the states that it has alone, in a live source's cache as in a store.

    Products of 40 rows, those of two texts, round differently from products of 20.
    """
    layers: tuple[Any, ...] = (1, "final")
    examples = make_examples(count)
    sources: list[Source] = [
        LiveSource(keep_gb=1.0),
        StoredSource(str(tmp_path / "together")),
        StoredSource(str(tmp_path / "apart")),
    ]
    for source in sources:
        source.prepare(shallow, FeaturesRead(layers), examples)
    for example in examples:
        sources[2].make_batch(BatchRequest([example], shallow, layers))
    live, *stored = (
        source.make_batch(BatchRequest(examples, shallow, layers)).features for source in sources
    )
    assert live is not None
    assert all(
        features is not None and torch.equal(features.hidden, live.hidden) for features in stored
    )


@pytest.mark.slow
def test_loss_curves_from_a_store_equal_live_ones(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured at first use, read from disk, or with supervised positions only: the losses of
    source=live, bit for bit.
    """
    live = train_losses(shallow, LiveSource(keep_gb=1.0), tmp_path / "live")
    assert live == train_losses(shallow, StoredSource(str(tmp_path / "store")), tmp_path / "first")
    assert live == train_losses(
        shallow,
        StoredSource(str(tmp_path / "thrifty"), supervised_only=True, shard_mb=0.02),
        tmp_path / "thrift",
    )
    assert len(list((tmp_path / "thrifty").glob("*.safetensors"))) > 4
    forbid_target(shallow, monkeypatch)
    assert live == train_losses(
        shallow, StoredSource(str(tmp_path / "store"), capture=False), tmp_path / "second"
    )
    assert live == train_losses(
        shallow, StoredSource(str(tmp_path / "thrifty")), tmp_path / "third"
    )


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_capturing_while_training_equals_reading(
    shallow: Target, tmp_path: Path, dtype: Any
) -> None:
    """A run that captures already trains on rounded features, so it equals the next run."""
    first = train_losses(shallow, StoredSource(str(tmp_path / "store"), dtype), tmp_path / "first")
    assert first == train_losses(
        shallow, StoredSource(str(tmp_path / "store")), tmp_path / "second"
    )
    assert first != train_losses(shallow, LiveSource(), tmp_path / "live")


@pytest.mark.sweep(1, free=("step",))
@pytest.mark.parametrize("step", [2, 4, 7])
def test_a_killed_run_resumes_to_the_same_losses(
    shallow: Target, tmp_path: Path, step: int
) -> None:
    """Killed while capturing and resumed with what is on disk, a run has the losses of an
    uninterrupted one.
    """
    uninterrupted = train_losses(shallow, StoredSource(str(tmp_path / "store")), tmp_path / "whole")

    class Killed(Exception):
        """Stands for a kill: nothing that waits is written."""

    def kill_at_step(at: int) -> None:
        if at == step:
            source.store = None
            raise Killed

    source = StoredSource(str(tmp_path / "other"))
    with pytest.raises(Killed):
        train_losses(shallow, source, tmp_path / "cut", on_step=kill_at_step)
    assert uninterrupted == train_losses(
        shallow, StoredSource(str(tmp_path / "other")), tmp_path / "cut"
    )


def test_a_damaged_shard_is_captured_again_while_training(
    shallow: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A deleted and a corrupted shard are named, and the losses stay the same."""
    first = train_losses(
        shallow, StoredSource(str(tmp_path / "store"), shard_mb=0.02), tmp_path / "first"
    )
    files = sorted((tmp_path / "store").glob("*.safetensors"))
    files[0].unlink()
    flip_byte(files[1])
    again = train_losses(shallow, StoredSource(str(tmp_path / "store")), tmp_path / "second")
    stdout = capsys.readouterr().out
    assert files[0].name in stdout and files[1].name in stdout and files[2].name not in stdout
    assert again == pytest.approx(first, rel=1e-5)  # captured in other batches, so up to rounding
    store = FeatureStore(tmp_path / "store")
    store.verify_shards()
    assert not store.damaged_files and all(example in store for example in make_examples(12))


def test_the_budget_is_reported_before_writing(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, bytes per token and gigabytes are printed; if budget or disk are too small,
    nothing is written.
    """
    path = tmp_path / "store"
    rows = make_examples(12)
    tokens = sum(len(example.tokens) for example in rows)
    message = prepare_source(
        StoredSource(str(path)), make_drafter(shallow), shallow, [*rows, rows[0]]
    )
    assert (
        f"12 sequences, {tokens} tokens of {4 * shallow.width * 4} bytes" in message
        and "0 are stored" in message
    )
    with pytest.raises(
        UserError, match=r"source.max_gb=0.0003: the store needs .* source.dtype=int8"
    ):
        prepare_source(StoredSource(str(path), max_gb=0.0003), make_drafter(shallow), shallow, rows)
    prepare_source(
        StoredSource(str(path), "int8", max_gb=0.0003), make_drafter(shallow), shallow, rows
    )
    with (
        pytest.raises(UserError, match="are free; choose another disk"),
        monkeypatch.context() as patched,
    ):
        patched.setattr(
            "shutil.disk_usage",
            lambda where: os.statvfs_result([0] * 10) and type("", (), {"free": 1000}),
        )
        prepare_source(StoredSource(str(path)), make_drafter(shallow), shallow, rows)
    with pytest.raises(UserError, match="12 of 12 sequences are not in it"):
        prepare_source(StoredSource(str(path), capture=False), make_drafter(shallow), shallow, rows)
    assert not path.exists()
    tight = StoredSource(str(path), max_gb=1e-4)
    with pytest.raises(UserError, match="is full"):  # also without a check before
        train_losses(shallow, tight, tmp_path / "run", is_prepared=False)
    assert not path.exists()


def test_another_target_template_or_drafter_is_refused(tiny: Target, tmp_path: Path) -> None:
    """Each mismatch is refused with its reason; a store that holds more than is needed is read."""
    path = str(tmp_path / "store")
    rows = make_examples()
    full = StoredSource(path, "bfloat16")
    full.make_batch(BatchRequest(rows, tiny, make_drafter(tiny).layers))
    full.flush()

    def assert_refused(
        reason: str, drafter: Drafter, target: Target = tiny, folder: str = path, **options: Any
    ) -> None:
        with pytest.raises(UserError, match=reason):
            prepare_source(StoredSource(folder, **options), drafter, target, rows)

    assert_refused("holds bfloat16, not int8", make_drafter(tiny), dtype="int8")
    assert_refused(
        "holds layers 2, 4, 5, final, and the drafter also reads 3, 6",
        make_drafter(tiny, layers=[3, 5, 6]),
    )
    other = load_tiny()
    with torch.no_grad():
        other.layers[0].mlp.down_proj.weight.mul_(1.01)  # type: ignore[union-attr, operator]
    assert_refused("weights are not those of tiny", make_drafter(tiny), other)
    other = load_tiny()
    other.tokenizer.chat_template += " "
    assert_refused("another chat template", make_drafter(tiny), other)
    assert "6 are stored" in prepare_source(
        StoredSource(path, supervised_only=True), make_drafter(tiny, layers=[5]), tiny, rows
    )
    some = StoredSource(str(tmp_path / "some"), supervised_only=True)
    prepare_source(some, make_drafter(tiny), tiny, rows)
    some.make_batch(BatchRequest(rows, tiny, make_drafter(tiny).layers))
    some.flush()
    medusa: Drafter = build({"_target_": "spectrain.drafters.medusa.Medusa"}, target=tiny)
    assert_refused("only at supervised positions", medusa, folder=str(tmp_path / "some"))
    assert_refused(
        "only at supervised positions",
        make_drafter(tiny),
        folder=str(tmp_path / "some"),
        supervised_only=False,
    )
    with pytest.raises(UserError, match="reads no features"):
        prepare_source(
            StoredSource(path),
            build({"_target_": "spectrain.drafters.early_exit.EarlyExit"}, target=load_tiny()),
            tiny,
            rows,
        )


def test_missing_sequences_may_stop_the_training(shallow: Target, tmp_path: Path) -> None:
    """With capture=false missing sequences are an error, and the target is not run."""
    layers = make_drafter(shallow).layers
    source = StoredSource(str(tmp_path))
    source.make_batch(BatchRequest(make_examples()[:3], shallow, layers))
    source.flush()
    with pytest.raises(RunError, match="3 sequences of a batch are not in it"):
        StoredSource(str(tmp_path), capture=False).make_batch(
            BatchRequest(make_examples(), shallow, layers)
        )
    plain = StoredSource(str(tmp_path), capture=False).make_batch(
        BatchRequest(make_examples(), shallow, ())
    )
    assert plain.features is None and torch.equal(plain.tokens, collate(make_examples()).tokens)


def test_no_clock_lets_a_store_delete_what_another_process_writes(tmp_path: Path) -> None:
    """A clock that is set forward makes every file old."""
    fill_store(tmp_path)
    writer = FeatureStore(tmp_path)
    part = tmp_path / "features-1.safetensors.ab.part"
    with writer._mark_writing():
        part.write_bytes(b"x")
        os.utime(part, (1e9, 1e9))
        FeatureStore(tmp_path, repair=True)
        assert part.exists()
    FeatureStore(tmp_path, repair=True)
    assert not part.exists()
