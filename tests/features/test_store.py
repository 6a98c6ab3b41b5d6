"""The feature store: what is read is what was captured, what is damaged is found by name, what would not fit is refused."""

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
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import RunError, UserError
from spectrain.features import store as module
from spectrain.features.base import BatchRequest, Source
from spectrain.features.batch import Batch, collate
from spectrain.features.live_source import LiveSource
from spectrain.features.store import FeatureStore, compute_checksum
from spectrain.features.store_contents import StoreContents, hash_weights, quantize, select_final_positions
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


def examples(count: int = 6) -> list[Example]:
    """Sequences of unequal length; the first has two turns."""
    torch.manual_seed(3)
    rows = torch.randint(3, 2000, (count, 20)).tolist()
    made = [Example(row[: 20 - n % 4], [i >= 7 for i in range(20 - n % 4)]) for n, row in enumerate(rows)]
    made[0].mask[10:13] = [False] * 3
    return made


def states(example: Example) -> Tensor:
    """[T, L, D] some features, of very unlike size by token and layer."""
    torch.manual_seed(int(example.content_hash[:6], 16))
    return torch.randn(len(example.tokens), 3, 16) * torch.logspace(-3, 3, len(example.tokens) * 3).view(-1, 3, 1)


def filled(path: Path, contents: StoreContents = CONTENTS, rows: list[Example] | None = None, **options: Any) -> FeatureStore:
    store = FeatureStore(path, contents, repair=True, **options)
    for example in examples() if rows is None else rows:
        store.put_states(example, states(example), LAYERS)
    store.flush()
    return store


def read(store: FeatureStore, example: Example) -> Tensor:
    found = store.read_states(example, LAYERS, LIKE)
    assert found is not None
    return found


# What is read


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_states_are_read_unchanged(tmp_path: Path, dtype: Any) -> None:
    """Reading gives what taking gave: exactly the states in float32, else within the type's rounding, token by token."""
    contents = replace(CONTENTS, dtype=dtype)
    store = FeatureStore(tmp_path, contents)
    taken = [store.put_states(example, states(example), LAYERS) for example in examples()]
    waiting = [read(store, example) for example in examples()]
    store.flush()
    again = FeatureStore(tmp_path)
    assert again.contents == contents and again.num_bytes >= sum(map(contents.num_bytes, examples()))
    for example, one, two in zip(reversed(examples()), reversed(taken), reversed(waiting)):
        found = read(again, example)
        assert torch.equal(found, one) and torch.equal(found, two)
        exact, largest = states(example), states(example).abs().amax(-1, keepdim=True)
        bound = {
            "float32": torch.zeros_like(exact), "bfloat16": exact.abs() / 2**8, "float16": exact.abs() / 2**11 + 1e-7,
            "int8": (largest / 254).expand_as(exact), "fp8": exact.abs() / 2**4 + largest / 448 / 2**10,
        }[dtype]  # fmt: skip
        assert bool(((found - exact).abs() <= bound * 1.0001).all())


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_rounding_has_no_bias(dtype: Any) -> None:
    """The mean error of many values is nothing beside their mean size, and zeros stay zeros."""
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
    """With a reach, "final" is there where the next token carries loss and so far before, and NaN everywhere else."""
    full, thrifty = replace(CONTENTS, dtype=dtype), replace(CONTENTS, dtype=dtype, final_reach=reach)
    whole, some = filled(tmp_path / "whole", full), filled(tmp_path / "some", thrifty)
    for example in examples():
        there = torch.zeros(len(example.tokens), dtype=torch.bool)
        for place in range(len(there)):
            there[place] = any(example.mask[place + 1 : place + 2 + reach])
        assert there.nonzero()[:, 0].tolist() == select_final_positions(example.mask, reach).tolist()
        assert 0 < int(there.sum()) < len(there)
        one, two = read(whole, example), read(some, example)
        assert torch.equal(one[:, :2], two[:, :2]) and torch.equal(one[there], two[there])
        assert bool(two[~there, 2].isnan().all())
        other = Example(example.tokens, [True] * len(example.tokens))
        assert other in whole and other not in some  # what carries loss decides what is stored
        assert thrifty.num_bytes(example) < full.num_bytes(example)


def test_layers_can_be_read_in_another_order(tmp_path: Path) -> None:
    """A drafter that reads fewer layers reads the same store."""
    store = filled(tmp_path)
    for example in examples():
        found = store.read_states(example, ("final", 2), LIKE.double())
        assert found is not None and torch.equal(found, states(example)[:, [2, 0]].double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reach", [None, 1])
def test_bytes_are_counted_exactly(dtype: Any, reach: int | None) -> None:
    """What is announced is what the tensors take."""
    contents = replace(CONTENTS, dtype=dtype, final_reach=reach)
    for example in examples():
        tensors = contents.encode_states(example, states(example))
        assert sum(tensor.nbytes for tensor in tensors.values()) == contents.num_bytes(example)


def test_several_processes_write_one_store(tmp_path: Path) -> None:
    """Stores that are open at the same time write to one folder and see what the others wrote; shards have a bounded size."""
    rows = examples(24)
    writers = [FeatureStore(tmp_path, CONTENTS, shard_bytes=1e4) for _ in range(3)]
    for number, example in enumerate(rows):
        writers[number % 3].put_states(example, states(example), LAYERS)
    for writer in writers:
        writer.flush()
    time.sleep(0.02)
    FeatureStore(tmp_path, CONTENTS).flush()  # nothing waits, nothing is written
    for store in (*writers, FeatureStore(tmp_path)):
        assert all(example in store and torch.equal(read(store, example), states(example)) for example in rows)
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 3 and max(sizes) < 1e4 + 2 * 20 * 3 * 16 * 4 + 2000
    assert not list(tmp_path.glob("*.part"))
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1  # whoever may read one may read all


def test_two_processes_may_begin_one_folder(tmp_path: Path) -> None:
    """Opened while the folder was empty, a store of other features does not mix with what another process has begun."""
    other = FeatureStore(tmp_path, replace(CONTENTS, dtype="int8"))
    same = FeatureStore(tmp_path, CONTENTS)
    filled(tmp_path, rows=examples()[:3])
    for store in (other, same):
        store.put_states(examples()[4], states(examples()[4]), LAYERS)
    same.flush()
    with pytest.raises(UserError, match="another process has begun to store other features"):
        other.flush()
    assert len(FeatureStore(tmp_path).shard_names) == 4


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_announced_budget_holds(tmp_path: Path, dtype: Any) -> None:
    """Files are no larger than tensors and the place that is reckoned with; one byte less is refused."""
    contents = replace(CONTENTS, dtype=dtype, final_reach=1)
    store = filled(tmp_path / "store", contents)
    tensors = sum(map(contents.num_bytes, examples()))
    files = sum(file.stat().st_size for file in (tmp_path / "store").glob("features-*"))
    assert tensors < files < tensors + module.HEADER_BYTES * len(examples())
    assert store.num_bytes < files
    with pytest.raises(UserError, match="is full"):
        filled(tmp_path / "tight", contents, max_bytes=tensors - 1)
    assert not (tmp_path / "tight").exists()


# What is damaged


def flip(file: Path) -> None:
    """Change a byte in the middle of the data."""
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


HARM: dict[str, Callable[[Path], None]] = {
    "is missing": lambda file: file.unlink(),
    "bytes instead of": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "checksum differs": flip,
    "cannot be read": lambda file: file.write_bytes(b"\xff" * file.stat().st_size),
    "index cannot be read": lambda file: file.with_suffix(".json").write_text("{"),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_shard_is_named_and_captured_again(tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name and what is wrong are printed, its sequences and no others are missing, and capturing these mends the store."""
    whole = [filled(tmp_path, rows=[example]) for example in examples()]
    (hurt,) = (
        whole[2].shards.values()
        if len(whole[2].shards) == 1
        else [whole[2].shards[whole[2].shard_names[examples()[2].content_hash]]]
    )
    HARM[harm](tmp_path / f"{hurt.name}.safetensors")
    store = FeatureStore(tmp_path, CONTENTS, repair=True)
    found = [store.read_states(example, LAYERS, LIKE) for example in examples()]
    told = capsys.readouterr().out
    assert hurt.name in told and harm in told and told.count("features-") == 1
    assert [row is None for row in found] == [number == 2 for number in range(6)]
    filled(tmp_path, rows=[examples()[2]])
    again = FeatureStore(tmp_path)
    again.verify_shards()
    assert not again.damaged_files and all(torch.equal(read(again, example), states(example)) for example in examples())
    assert not (tmp_path / f"{hurt.name}.safetensors").exists()


@pytest.mark.parametrize("harm", ["is missing", "checksum differs"])
def test_reading_deletes_no_files(tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A store that may not be mended still names what is damaged, and its files stay."""
    filled(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    HARM[harm](file)
    before = sorted(tmp_path.iterdir())
    store = FeatureStore(tmp_path)
    store.verify_shards()
    assert store.damaged_files == [file.name] and file.name in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before and not store.shard_names


def test_verify_detects_damage_that_reading_misses(tmp_path: Path) -> None:
    """The SHA-256 covers the header too."""
    filled(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"format":"pt"', b'"format":"xx"'))
    store = FeatureStore(tmp_path)
    assert all(torch.equal(read(store, example), states(example)) for example in examples())
    store.verify_shards()
    assert store.damaged_files == [file.name]


def test_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """A half-written file, and a shard without an index, are not read; they go once they are old, and no others do."""
    filled(tmp_path)
    part, orphan = tmp_path / "features-1.safetensors.ab.part", tmp_path / "features-2.safetensors"
    for file in (part, orphan):
        file.write_bytes(b"x")
    assert len(FeatureStore(tmp_path, repair=True).shards) == 1 and part.exists() and orphan.exists()
    for file in tmp_path.iterdir():
        os.utime(file, (1e9, 1e9))
    store = FeatureStore(tmp_path, repair=True)
    assert not part.exists() and not orphan.exists() and torch.equal(read(store, examples()[0]), states(examples()[0]))


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one sentence, what is stored stays, and what waited is still there to be written."""
    filled(tmp_path, rows=examples()[:3])
    store = FeatureStore(tmp_path)
    store.put_states(examples()[3], states(examples()[3]), LAYERS)

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(UserError, match="disk is full"):
        patched.setattr(module, "save_file", full)
        store.flush()
    assert len(list(tmp_path.iterdir())) == 3
    store.flush()
    assert all(example in FeatureStore(tmp_path) for example in examples()[:4])


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    """So are features that no type holds; neither is stored."""
    (tmp_path / "file").write_text("")
    store = FeatureStore(tmp_path / "file" / "store", replace(CONTENTS, dtype="float16"))
    with pytest.raises(RunError, match="not finite in float16"):
        store.put_states(examples()[0], states(examples()[0]) * 1e5, LAYERS)
    store.flush()
    store.put_states(examples()[0], states(examples()[0]), LAYERS)
    with pytest.raises(UserError, match="cannot be written"):
        store.flush()
    for dtype in ("float32", "int8", "fp8"):
        wrong = states(examples()[0])
        wrong[3, 1, 2] = torch.nan
        with pytest.raises(RunError, match="not finite"):
            FeatureStore(tmp_path / dtype, replace(CONTENTS, dtype=dtype)).put_states(examples()[0], wrong, LAYERS)  # type: ignore[arg-type]


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    """So is a folder without one."""
    filled(tmp_path)
    manifest = tmp_path / "manifest.json"
    facts = json.loads(manifest.read_text())
    for wrong in ({**facts, "format": 2}, {**facts, "dtype": "int2"}, {**facts, "more": 1}):
        manifest.write_text(json.dumps(wrong))
        with pytest.raises(UserError, match="this manifest cannot be read"):
            FeatureStore(tmp_path)
    with pytest.raises(UserError, match="no feature store"):
        FeatureStore(tmp_path / "elsewhere")


def test_checksums_depend_on_every_byte() -> None:
    """Of each tensor, empty ones allowed, and on which tensor it is."""
    tensors = {"a": torch.arange(6.0), "b": torch.zeros(2, 3, dtype=torch.int8), "c": torch.zeros(0, 4)}
    assert compute_checksum(tensors) == compute_checksum(dict(reversed(tensors.items())))
    tensors["a"][5] = 5.5
    changed = compute_checksum(tensors)
    tensors["b"][1, 2] = 1
    assert len({compute_checksum(tensors), changed, compute_checksum({"a": torch.arange(6.0)})}) == 3


# Which target


def test_the_weight_hash_depends_on_the_weights_alone(tiny: Target) -> None:
    """Another type that holds the values and fresh adapters keep it; one changed matrix does not."""
    whole = hash_weights(tiny.model)
    other = load_tiny()
    inject_lora(other, 4, 4.0)
    assert hash_weights(other.model) == whole
    for parameter in other.parameters():
        parameter.data = parameter.data.double()
    assert hash_weights(other.model) == whole
    with torch.no_grad():
        other.layers[3].mlp.down_proj.base_layer.weight.mul_(1.01)  # type: ignore[union-attr, operator]
    assert hash_weights(other.model) != whole


# As a source of training


def dataset(count: int = 12) -> Dataset:
    return Dataset(examples(count), count, 0, 0)


def drafter(shallow: Target, **options: Any) -> Eagle3:
    torch.manual_seed(0)
    made = Eagle3(shallow, ttt_steps=2, **options)
    made.prepare(shallow, torch.arange(shallow.head.vocab_size))
    return made


def prepare(source: Source, made: Drafter, target: Target, rows: list[Example]) -> str:
    """What the source says before a training of this drafter."""
    told = source.prepare(target, made.stages[0].layers, made.stages[0].final_reach, rows)
    assert told is not None
    return told


def trained(shallow: Target, source: Source, run: Path, on_step: Any = None, asked: bool = True) -> list[float]:
    """Losses of two epochs and a half, a checkpoint every third step."""
    trainer, made = Trainer(lr=1e-3, epochs=2.5, batch_tokens=60, log_every=1, save_every=3), drafter(shallow)
    if asked:
        source.prepare(shallow, made.stages[0].layers, made.stages[0].final_reach, dataset().examples)
    try:
        trainer.fit(made, shallow, dataset(), source, run, on_step=on_step)
    finally:
        source.flush()
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert min(losses) > 0
    return losses


def silent(shallow: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target must not be run from here on."""
    monkeypatch.setattr(shallow, "features", lambda *args: pytest.fail("the target was run"))


FAMILIES: list[dict[str, Any]] = [
    {"_target_": "spectrain.drafters.eagle3.Eagle3"},
    {"_target_": "spectrain.drafters.eagle3.Eagle3", "loss": "cross_entropy", "layers": [3]},
    {"_target_": "spectrain.drafters.medusa.Medusa"},
    {"_target_": "spectrain.drafters.medusa.Medusa", "loss": "forward_kl", "num_heads": 4},
    {"_target_": "spectrain.drafters.medusa.Medusa", "adapt": "lora", "num_heads": 2},
    {"_target_": "spectrain.experimental.hydra.drafter.Hydra"},
    {"_target_": "spectrain.experimental.hydra.drafter.Hydra", "prefix_attention": True},
    {"_target_": "spectrain.experimental.amphista.drafter.Amphista", "num_heads": 3},
    {"_target_": "spectrain.experimental.ctc.drafter.Ctc", "num_drafts": 3, "num_slots": 5},
    {"_target_": "spectrain.experimental.gumiho.drafter.Gumiho", "num_parallel": 2, "num_layers": 1},
    {"_target_": "spectrain.experimental.transformer_heads.drafter.TransformerHeads", "num_heads": 2},
    {"_target_": "spectrain.drafters.eagle1.Eagle1", "num_steps": 3, "top_k_weight": 1.0},
    {"_target_": "spectrain.experimental.redrafter.drafter.Redrafter", "num_steps": 3},
    {"_target_": "spectrain.experimental.kangaroo.drafter.Kangaroo"},
    {"_target_": "spectrain.drafters.causal.Causal", "num_layers": 2},
    {"_target_": "spectrain.experimental.atspeed.drafter.AtSpeed", "num_layers": 2},
    {"_target_": "spectrain.drafters.pard.Pard", "num_layers": 2, "num_drafts": 3},
    {"_target_": "spectrain.drafters.peagle.PEagle", "num_layers": 2, "num_drafts": 3},
    {"_target_": "spectrain.drafters.mtp.Mtp", "num_steps": 2},
    {"_target_": "spectrain.experimental.lossy_rules.judge_drafter.DraftJudge", "window": 2},
    {"_target_": "spectrain.drafters.dflash.DFlash", "num_layers": 2, "block_size": 4},
    {"_target_": "spectrain.drafters.dflash.DFlash", "num_layers": 1, "loss": "forward_kl", "sample_from_anchor": True},
    {"_target_": "spectrain.drafters.dspark.DSpark", "num_layers": 1, "rank": 16},
    {"_target_": "spectrain.drafters.dflash2.DFlash2", "num_layers": 1, "block_size": 4, "selector_rank": 16},
    {"_target_": "spectrain.drafters.lilicorr.LiLiCorr", "num_layers": 1, "block_size": 4},
    {"_target_": "spectrain.experimental.domino.drafter.Domino", "num_layers": 1, "block_size": 4},
    {"_target_": "spectrain.experimental.xpress.drafter.XPress", "num_layers": 1, "block_size": 4},
    {"_target_": "spectrain.experimental.vispec.drafter.ViSpec", "num_steps": 2},
    {"_target_": "spectrain.experimental.cerberus.drafter.Cerberus", "num_heads": 2},
    {"_target_": "spectrain.experimental.mixture.drafter.MixtureOfAttentions", "num_steps": 2, "layers": [1, 3]},
    {"_target_": "spectrain.experimental.falcon.drafter.Falcon"},
    {"_target_": "spectrain.experimental.devices.gating.Dovetail"},
    {"_target_": "spectrain.experimental.specdec.drafter.SpecDec", "num_encoder_layers": 1, "num_drafts": 3},
    {"_target_": "spectrain.experimental.prompt_variants.drafter.PromptVariants", "num_layers": 1},
    {"_target_": "spectrain.experimental.image_pruning.drafter.PrunedImages", "ttt_steps": 2},
    {"_target_": "spectrain.experimental.supernet.drafter.Supernet", "num_layers": 2, "ttt_steps": 2},
]


def gradients(made: Drafter, batch: Batch, target: Target) -> list[Tensor]:
    """The loss and the gradients of everything that learns, at a fixed seed."""
    made.zero_grad()
    torch.manual_seed(1)
    losses = made.loss(batch, target, TrainingState())
    losses.total.backward()
    found = [p.grad for group in made.stages[0].groups for p in group["params"] if p.grad is not None]
    return [losses.total.detach(), losses.hits, losses.counts, *found]


@pytest.mark.sweep(8, free=("packed", "supervised_only", "family"))
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("supervised_only", [True, False])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: "-".join(str(v).split(".")[-1] for v in family.values()))
def test_every_family_has_the_same_loss_from_a_store(
    tmp_path: Path, family: dict[str, Any], supervised_only: bool, packed: bool, request: pytest.FixtureRequest
) -> None:
    """Loss and gradients from a float32 store, read back from disk, are those of source=live, bit for bit."""
    adapts = "adapt" in family
    target = cut_tiny(3) if adapts else request.getfixturevalue("shallow")
    torch.manual_seed(0)
    made: Drafter = build(family, target=target)
    made.prepare(target, torch.arange(target.head.vocab_size))
    source = StoredSource(str(tmp_path), supervised_only=supervised_only)
    if supervised_only and made.stages[0].final_reach is None:
        with pytest.raises(UserError, match="reads every position"):
            prepare(source, made, target, examples())
        return
    layers = made.stages[0].layers
    prepare(source, made, target, examples())
    live = gradients(made, LiveSource().make_batch(BatchRequest(examples(), target, layers, packed=packed)), target)
    source.make_batch(BatchRequest(examples(), target, layers, packed=packed))
    source.flush()
    again = StoredSource(str(tmp_path), capture=False)
    prepare(again, made, target, examples())
    batch = again.make_batch(BatchRequest(examples(), target, layers, packed=packed))
    assert batch.features is not None and bool(batch.features.hidden.isnan().any()) == supervised_only
    stored = gradients(made, batch, target)
    assert len(live) == len(stored) > 3 and all(torch.equal(a, b) for a, b in zip(live, stored))
    assert bool(torch.isfinite(live[0])) and float(live[0]) > 0


def test_the_comparison_covers_every_family_with_features() -> None:
    """The list above knows every choice of drafter whose loss reads features."""
    known = {str(family["_target_"]).rsplit(".", 1)[1] for family in FAMILIES}
    choices = Path(module.__file__).parents[1] / "conf" / "drafter"
    named = {file.read_text().split("_target_: ")[1].split()[0].rsplit(".", 1)[1] for file in choices.glob("*.yaml")}
    without = {"EarlyExit", "GatedLora", "Jacobi", "LayerSkipping", "Lookahead", "Ngram", "Retrieval", "SelfDraft", "Universal"}
    without |= {"KalmanActions"}
    without |= {"HiddenTransfer", "Owl", "PromptTokens", "Space", "SpeculativeStreaming", "Uno"} & named
    without |= {"Hybrid"}  # its loss is that of the drafter inside
    without |= {"AdaptiveSkipping", "Bigrams", "Blockwise", "GraphDrafting", "OtherDevice", "Ouroboros", "ReSpec", "Trigrams"}
    without |= {"Exits", "Howl"}  # the first has no loss, and the second that of the drafter inside
    without |= {"Cascade", "DrafterRouter", "RowRouter", "UnionDrafter"}  # as is a cascade's; a choice is not trained
    without |= {"smollm2_eagle3"}  # trained already
    assert named == known | without


@pytest.mark.slow
def test_loss_curves_from_a_store_equal_live_ones(shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured at first use, read from disk, with supervised positions only: the same losses, bit for bit, as source=live."""
    live = trained(shallow, LiveSource(keep_gb=1.0), tmp_path / "live")
    assert live == trained(shallow, StoredSource(str(tmp_path / "store")), tmp_path / "first")
    assert live == trained(
        shallow, StoredSource(str(tmp_path / "thrifty"), supervised_only=True, shard_mb=0.02), tmp_path / "thrift"
    )
    assert len(list((tmp_path / "thrifty").glob("*.safetensors"))) > 4
    silent(shallow, monkeypatch)
    assert live == trained(shallow, StoredSource(str(tmp_path / "store"), capture=False), tmp_path / "second")
    assert live == trained(shallow, StoredSource(str(tmp_path / "thrifty")), tmp_path / "third")


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_capturing_while_training_equals_reading(shallow: Target, tmp_path: Path, dtype: Any) -> None:
    """A run that captures sees the rounded features already, so that it equals the next."""
    first = trained(shallow, StoredSource(str(tmp_path / "store"), dtype), tmp_path / "first")
    assert first == trained(shallow, StoredSource(str(tmp_path / "store")), tmp_path / "second")
    assert first != trained(shallow, LiveSource(), tmp_path / "live")


@pytest.mark.sweep(1, free=("step",))
@pytest.mark.parametrize("step", [2, 4, 7])
def test_a_killed_run_resumes_to_the_same_losses(shallow: Target, tmp_path: Path, step: int) -> None:
    """Killed while it captures and resumed with what was on disk by then, a run has the losses of one that was not killed."""
    whole = trained(shallow, StoredSource(str(tmp_path / "store")), tmp_path / "whole")

    class Killed(Exception):
        """Stands for a kill: nothing that waits is written."""

    def kill(at: int) -> None:
        if at == step:
            source.store = None
            raise Killed

    source = StoredSource(str(tmp_path / "other"))
    with pytest.raises(Killed):
        trained(shallow, source, tmp_path / "cut", on_step=kill)
    assert whole == trained(shallow, StoredSource(str(tmp_path / "other")), tmp_path / "cut")


def test_a_damaged_shard_is_captured_again_while_training(
    shallow: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One shard deleted and one corrupted: both are named, and the losses are what they were."""
    first = trained(shallow, StoredSource(str(tmp_path / "store"), shard_mb=0.02), tmp_path / "first")
    files = sorted((tmp_path / "store").glob("*.safetensors"))
    files[0].unlink()
    flip(files[1])
    again = trained(shallow, StoredSource(str(tmp_path / "store")), tmp_path / "second")
    told = capsys.readouterr().out
    assert files[0].name in told and files[1].name in told and files[2].name not in told
    assert again == pytest.approx(first, rel=1e-5)  # captured in the company of the damaged ones only, so to rounding
    store = FeatureStore(tmp_path / "store")
    store.verify_shards()
    assert not store.damaged_files and all(example in store for example in examples(12))


def test_the_budget_is_reported_before_writing(shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, bytes a token and gigabytes; too much for the budget or the disk stops, with nothing written."""
    path, rows = tmp_path / "store", examples(12)
    tokens = sum(len(example.tokens) for example in rows)
    told = prepare(StoredSource(str(path)), drafter(shallow), shallow, [*rows, rows[0]])
    assert f"12 sequences, {tokens} tokens of {4 * shallow.width * 4} bytes" in told and "0 are stored" in told
    with pytest.raises(UserError, match=r"source.max_gb=0.0003: the store needs .* source.dtype=int8"):
        prepare(StoredSource(str(path), max_gb=0.0003), drafter(shallow), shallow, rows)
    prepare(StoredSource(str(path), "int8", max_gb=0.0003), drafter(shallow), shallow, rows)
    with pytest.raises(UserError, match="are free; choose another disk"), monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda where: os.statvfs_result([0] * 10) and type("", (), {"free": 1000}))
        prepare(StoredSource(str(path)), drafter(shallow), shallow, rows)
    with pytest.raises(UserError, match="12 of 12 sequences are not in it"):
        prepare(StoredSource(str(path), capture=False), drafter(shallow), shallow, rows)
    assert not path.exists()
    tight = StoredSource(str(path), max_gb=1e-4)
    with pytest.raises(UserError, match="is full"):  # also where nobody asked before
        trained(shallow, tight, tmp_path / "run", asked=False)
    assert not path.exists()


def test_another_target_template_or_drafter_is_refused(tiny: Target, tmp_path: Path) -> None:
    """Each with its reason; a store that holds more than is asked for is read."""
    path, rows = str(tmp_path / "store"), examples()
    full = StoredSource(path, "bfloat16")
    full.make_batch(BatchRequest(rows, tiny, drafter(tiny).layers))
    full.flush()

    def refused(reason: str, made: Drafter, target: Target = tiny, where: str = path, **options: Any) -> None:
        with pytest.raises(UserError, match=reason):
            prepare(StoredSource(where, **options), made, target, rows)

    refused("holds bfloat16, not int8", drafter(tiny), dtype="int8")
    refused("holds layers 2, 4, 5, final, and the drafter also reads 3, 6", drafter(tiny, layers=[3, 5, 6]))
    other = load_tiny()
    with torch.no_grad():
        other.layers[0].mlp.down_proj.weight.mul_(1.01)  # type: ignore[union-attr, operator]
    refused("weights are not those of tiny", drafter(tiny), other)
    other = load_tiny()
    other.tokenizer.chat_template += " "
    refused("another chat template", drafter(tiny), other)
    assert "6 are stored" in prepare(StoredSource(path, supervised_only=True), drafter(tiny, layers=[5]), tiny, rows)
    some = StoredSource(str(tmp_path / "some"), supervised_only=True)
    prepare(some, drafter(tiny), tiny, rows)
    some.make_batch(BatchRequest(rows, tiny, drafter(tiny).layers))
    some.flush()
    medusa: Drafter = build({"_target_": "spectrain.drafters.medusa.Medusa"}, target=tiny)
    refused("only at supervised positions", medusa, where=str(tmp_path / "some"))
    refused("only at supervised positions", drafter(tiny), where=str(tmp_path / "some"), supervised_only=False)
    with pytest.raises(UserError, match="reads no features"):
        prepare(
            StoredSource(path),
            build({"_target_": "spectrain.experimental.gated_lora.drafter.GatedLora"}, target=load_tiny()),
            tiny,
            rows,
        )


def test_missing_sequences_may_stop_the_training(shallow: Target, tmp_path: Path) -> None:
    """With capture=false the target is not run."""
    layers = drafter(shallow).layers
    source = StoredSource(str(tmp_path))
    source.make_batch(BatchRequest(examples()[:3], shallow, layers))
    source.flush()
    with pytest.raises(RunError, match="3 sequences of a batch are not in it"):
        StoredSource(str(tmp_path), capture=False).make_batch(BatchRequest(examples(), shallow, layers))
    plain = StoredSource(str(tmp_path), capture=False).make_batch(BatchRequest(examples(), shallow, ()))
    assert plain.features is None and torch.equal(plain.tokens, collate(examples()).tokens)
