"""`data store` and `data verify`: a data set is stored, a stopped capture resumes, and damaged
shards are captured again.
"""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from safetensors.torch import save_file

from spectrain.config.spec import RunSpec
from spectrain.data.readers import EmbeddedReader
from spectrain.errors import RunError, UserError
from spectrain.features.base import BatchRequest
from spectrain.features.capture import capture_features, verify_store
from spectrain.features.store import FeatureStore
from spectrain.features.stored_source import StoredSource
from spectrain.models.checked_tensors import CHECKSUM_KEY
from spectrain.models.target import Target
from spectrain.runs.train import train_and_score
from spectrain.training.trainer import Trainer

SETTINGS = (
    "recipe=eagle3",
    "target=tiny",
    "data.limit=12",
    "data.held_out=0",
    "+data.max_length=128",
    "drafter.start=target",
    "+drafter.ttt_steps=2",
    "eval=none",
)


def composed(*overrides: str) -> RunSpec:
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose(
            "train", overrides=[override.replace("+", "++", 1) for override in overrides]
        )
    return RunSpec.from_config(config)


def store_features(path: Path, *more: str) -> None:
    capture_features(composed(*SETTINGS, "source=store", f"source.path={path}", *more))


def verify_folder(path: Path, drop: bool = False) -> None:
    verify_store(str(path), drop)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def damage_shards(path: Path) -> list[str]:
    """Delete one shard, cut one and change a byte of another; return their names."""
    files = sorted(path.glob("*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    data = bytearray(files[2].read_bytes())
    data[len(data) // 2] ^= 4
    files[2].write_bytes(data)
    return [file.name for file in files[:3]]


def test_a_training_reads_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss curve from a store equals the live one bit for bit, and the target's forward is
    not run again.
    """
    store_features(tmp_path / "store")
    settings = (*SETTINGS, "trainer.epochs=1", "+trainer.log_every=1")
    train_and_score(composed(*settings, f"run={tmp_path / 'live'}"))
    monkeypatch.setattr(Target, "features", lambda *args: pytest.fail("the target was run"))
    train_and_score(
        composed(
            *settings,
            "source=store",
            f"source.path={tmp_path / 'store'}",
            f"run={tmp_path / 'read'}",
        )
    )
    assert (
        losses(tmp_path / "live") == losses(tmp_path / "read")
        and len(losses(tmp_path / "read")) > 2
    )


def test_a_training_needs_no_layers(tmp_path: Path) -> None:
    """From a complete store, a target without layers has the losses of the complete one, bit for
    bit. A store of another target, one that lacks a sequence, and an older one are refused before
    anything is written."""
    store = tmp_path / "store"
    run = tmp_path / "head"
    store_features(store)
    live = (*SETTINGS, "trainer.epochs=1", "+trainer.log_every=1")
    settings = (*live, "source=store", f"source.path={store}")
    train_and_score(composed(*settings, f"run={tmp_path / 'all'}"))
    train_and_score(composed(*settings, f"run={run}", "+target.parts=head"))
    assert losses(run) == losses(tmp_path / "all") and len(losses(run)) > 2

    def read_refusal(*more: str) -> str:
        with pytest.raises(UserError) as refused:
            train_and_score(composed(*more, f"run={tmp_path / 'refused'}", "+target.parts=head"))
        assert not (tmp_path / "refused").exists()
        return str(refused.value)

    assert "lacks 1 of 13 sequences, whose capture needs the layers" in read_refusal(
        *settings, "data.limit=13"
    )
    assert "source=live needs the layers" in read_refusal(*live)
    manifest = json.loads((store / "manifest.json").read_text())
    # A manifest without a checksum is read, as those of earlier versions are.
    del manifest[CHECKSUM_KEY]
    (store / "manifest.json").write_text(json.dumps(manifest | {"head": "0"}))
    assert "whose weights are not those of tiny" in read_refusal(*settings)
    del manifest["head"]
    (store / "manifest.json").write_text(json.dumps(manifest))
    assert "only target.parts=all reads it" in read_refusal(*settings)
    train_and_score(composed(*settings, f"run={tmp_path / 'old'}"))
    assert losses(tmp_path / "old") == losses(run)


def test_a_stopped_capture_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A capture stopped after a batch keeps that batch; the next computes the others only, and
    one more computes nothing.
    """
    batch_sizes: list[int] = []
    batch = StoredSource.make_batch

    def count_batch(self: StoredSource, request: BatchRequest) -> Any:
        if len(batch_sizes) == 1:
            batch_sizes.append(0)
            raise KeyboardInterrupt
        batch_sizes.append(len(request.examples))
        return batch(self, request)

    monkeypatch.setattr(StoredSource, "make_batch", count_batch)
    with pytest.raises(KeyboardInterrupt):
        store_features(tmp_path)
    num_stored = len(FeatureStore(tmp_path).shard_names)
    assert 0 < num_stored == sum(batch_sizes) < 12
    store_features(tmp_path)
    assert sum(batch_sizes) == 12 and len(FeatureStore(tmp_path).shard_names) == 12
    store_features(tmp_path)
    assert sum(batch_sizes) == 12
    stdout = capsys.readouterr().out
    assert (
        "0 are stored" in stdout
        and f"{num_stored} are stored" in stdout
        and "12 are stored" in stdout
    )
    verify_folder(tmp_path)
    assert "12 sequences, layers 2, 4, 5, final in float32" in capsys.readouterr().out


def test_many_processes_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process captures its own batches, and together these are all."""
    for rank in range(2):
        process = SimpleNamespace(
            process_index=rank,
            num_processes=2,
            is_main_process=not rank,
            wait_for_everyone=lambda: None,
        )
        monkeypatch.setattr(Trainer, "make_accelerator", lambda self, process=process: process)
        with pytest.raises(RunError, match="sequences are still missing"):
            # stands for one folder in which both start before either has written
            store_features(tmp_path / str(rank))
    halves = [FeatureStore(tmp_path / str(rank)).shard_names for rank in range(2)]
    assert not set(halves[0]) & set(halves[1]) and len(halves[0] | halves[1]) == 12


def test_damaged_shards_are_named_and_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`data verify` names a deleted, a cut and a changed shard, and with drop=true the next
    `data store` mends them all.
    """
    store_features(
        tmp_path, "+source.shard_mb=0.2", "+source.dtype=int8", "+source.supervised_only=true"
    )
    names = damage_shards(tmp_path)
    with pytest.raises(RunError, match="3 files are missing or damaged") as error:
        verify_folder(tmp_path)
    assert all(name in str(error.value) for name in names)
    with pytest.raises(RunError, match="run spectrain data store again"):
        verify_folder(tmp_path, drop=True)
    missing = 12 - len(FeatureStore(tmp_path).shard_names)
    assert missing >= 3
    capsys.readouterr()
    store_features(tmp_path)
    assert f"{12 - missing} are stored" in capsys.readouterr().out
    verify_folder(tmp_path)
    assert len(FeatureStore(tmp_path).shard_names) == 12


def test_unstorable_data_is_refused(tmp_path: Path, tiny: Target) -> None:
    """Another source, a family without features, another project's folder, and verifying without
    a folder are refused.
    """
    with pytest.raises(UserError, match="name the feature store"):
        verify_store(None, False)
    with pytest.raises(UserError, match="set source=store"):
        capture_features(composed(*SETTINGS))
    with pytest.raises(UserError, match="reads no features"):
        capture_features(
            composed(
                "recipe=layerskip",
                "target=tiny",
                "data.limit=2",
                "source=store",
                f"source.path={tmp_path}",
            )
        )
    example = EmbeddedReader(limit=1, max_length=128).make_dataset(tiny.template).examples[0]
    tokens = torch.tensor(example.tokens)
    states = tiny.features(tokens[None], (2, 4, 5, 8)).hidden[0].contiguous()
    (tmp_path / "hidden_states").mkdir()
    save_file(
        {"hidden_states": states, "token_ids": tokens},
        tmp_path / "hidden_states" / "hs_0.safetensors",
    )
    with pytest.raises(UserError, match="another project's"):
        store_features(tmp_path)


@pytest.mark.slow
def test_two_thousand_conversations(tmp_path: Path) -> None:
    """Of all embedded conversations, shards deleted, cut and changed at random are found by name
    and captured again.
    """
    settings = (
        "recipe=eagle3",
        "target=tiny",
        "data.limit=null",
        "+trainer.batch_tokens=4096",
        "source=store",
        f"source.path={tmp_path}",
        "+source.dtype=int8",
        "+source.shard_mb=4",
    )
    capture_features(composed(*settings))
    store = FeatureStore(tmp_path)
    sequences = len(store.shard_names)
    assert sequences > 2000
    dataset = (
        composed(*settings).data.build().make_dataset(composed(*settings).target.build().template)
    )
    sample = dataset.examples[::8]
    before = [store.read_states(example, store.layers, torch.empty(0)) for example in sample]
    files = sorted(tmp_path.glob("*.safetensors"))
    draw = random.Random(0)
    damaged = draw.sample(files, 6)
    for number, file in enumerate(damaged):
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        if number % 3 == 0:
            file.unlink()
        else:
            file.write_bytes(data if number % 3 == 1 else data[: draw.randrange(len(data))])
    with pytest.raises(RunError, match="6 files") as error:
        verify_folder(tmp_path, drop=True)
    assert all((file.name in str(error.value)) == (file in damaged) for file in files)
    capture_features(composed(*settings))
    verify_folder(tmp_path)
    store = FeatureStore(tmp_path)
    assert len(store.shard_names) == sequences
    for example, expected in zip(sample, before):
        actual = store.read_states(example, store.layers, torch.empty(0))
        assert actual is not None and expected is not None
        # captured in other batches, so up to rounding
        assert ((actual - expected).norm() / expected.norm()) < 0.02
