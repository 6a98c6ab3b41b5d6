"""The cache of the speculators project: its features are read as they are, its layers found, and what does not fit refused."""

from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrain.data.chat import Example
from spectrain.data.tokens import PreparedReader
from spectrain.drafters.base import Drafter
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest, Source
from spectrain.features.live_source import LiveSource
from spectrain.features.speculators import SpeculatorsCache, find_hidden_states
from spectrain.features.stored_source import StoredSource
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer

AUX = (2, 4, 5)


def examples(count: int = 4) -> list[Example]:
    torch.manual_seed(3)
    rows = torch.randint(3, 2000, (count, 40)).tolist()
    return [Example(row[: 40 - 3 * n], [i >= 7 for i in range(40 - 3 * n)]) for n, row in enumerate(rows)]


def cached(
    folder: Path, target: Target, rows: list[Example], aux: tuple[int, ...] = AUX, last: int | str = 8, noise: float = 0.0
) -> Path:
    """Files as speculators writes them: the streams entering `aux`, then the last state, un-normed."""
    hidden_states = folder / "hidden_states"
    hidden_states.mkdir(parents=True, exist_ok=True)
    for number, example in enumerate(rows):
        tokens = torch.tensor(example.tokens)
        states = target.features(tokens[None], (*aux, last)).hidden[0]  # type: ignore[arg-type]
        states = states + noise * states.norm(dim=-1, keepdim=True) * torch.randn_like(states) / states.shape[-1] ** 0.5
        save_file({"hidden_states": states.contiguous(), "token_ids": tokens}, hidden_states / f"hs_{number}.safetensors")
    return folder


def as_float8(folder: Path) -> None:
    """Rewrite the files as hs-connectors' FP8HiddenStatesConnector does: one scale per token, over all of its layers."""
    for file in folder.rglob("hs_*.safetensors"):
        tensors = load_file(file)
        states = tensors["hidden_states"].float()
        scales = (states.abs().amax((1, 2), keepdim=True) / 448).clamp(min=1e-12)
        save_file(tensors | {"hidden_states": (states / scales).to(torch.float8_e4m3fn), "hidden_states_scales": scales}, file)


def name_layers(folder: Path, layers: tuple[int, ...] = (*AUX, 8)) -> None:
    """Name the layers in the metadata of the files."""
    for file in folder.rglob("hs_*.safetensors"):
        save_file(load_file(file), file, metadata={"layers": ",".join(map(str, layers))})


def drafter(tiny: Target, layers: tuple[int, ...] = AUX) -> Eagle3:
    return Eagle3(tiny, layers=list(layers))


def prepare(source: Source, made: Drafter, target: Target, rows: list[Example]) -> str:
    """What the source says before a training of this drafter."""
    told = source.prepare(target, made.stages[0].layers, made.stages[0].final_reach, rows)
    assert told is not None
    return told


def test_speculators_features_equal_the_targets(tiny: Target, tmp_path: Path) -> None:
    """Whatever order it holds them in, a batch has the features of source=live, the last state through the final norm."""
    rows = examples()
    source = StoredSource(str(cached(tmp_path, tiny, rows[::-1])))
    told = prepare(source, drafter(tiny), tiny, rows)
    assert "layers 2, 4, 5, 8, final, 4 of 4 sequences" in told
    made = drafter(tiny)
    found, live = (
        source.make_batch(BatchRequest(rows, tiny, made.layers)),
        LiveSource().make_batch(BatchRequest(rows, tiny, made.layers)),
    )
    assert found.features is not None and live.features is not None and found.features.layers == live.features.layers
    for row, example in enumerate(rows):
        length = len(example.tokens)
        torch.testing.assert_close(
            found.features.hidden[row, :length], live.features.hidden[row, :length], rtol=1e-4, atol=1e-4
        )
        assert not found.features.hidden[row, length:].any()
    assert torch.equal(found.tokens, live.tokens) and torch.equal(found.loss_mask, live.loss_mask)


def test_a_speculators_folder_trains_a_drafter(tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens and masks are taken as they are, and every one has its features, so that the target is not run."""
    rows = examples()
    cached(tmp_path, tiny, rows)
    columns = [{"input_ids": e.tokens, "loss_mask": list(map(int, e.mask)), "seq_len": len(e.tokens)} for e in rows]
    datasets.Dataset.from_list(columns).with_format("torch").save_to_disk(tmp_path)
    dataset = PreparedReader(str(tmp_path)).make_dataset(tiny.template)
    assert dataset.examples == rows
    source, made = StoredSource(str(tmp_path), capture=False), drafter(tiny)
    prepare(source, made, tiny, dataset.examples)
    made.prepare(tiny, dataset.token_counts(tiny.head.vocab_size))
    monkeypatch.setattr(tiny, "features", lambda *args: pytest.fail("the target was run"))
    Trainer(lr=1e-3, epochs=1, batch_tokens=90, log_every=1).fit(made, tiny, dataset, source, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"loss"') == 2


def test_data_without_cached_sequences_is_refused(tmp_path: Path) -> None:
    """A folder that is none, and rows whose mask has another length."""
    with pytest.raises(UserError, match="the folder holds no data file"):
        PreparedReader(str(tmp_path)).load_conversations()
    datasets.Dataset.from_list([{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="row 1: it has 3 input_ids and 2 loss_mask"):
        PreparedReader(str(tmp_path / "saved")).load_conversations()


def test_layers_are_identified_through_noise(tiny: Target, tmp_path: Path) -> None:
    """A hundredth of noise, as bfloat16 makes, does not mislead; order and number of the layers are free."""
    for aux in ((1, 2, 3), (0, 6, 7, 8), (5,)):
        cache = SpeculatorsCache(cached(tmp_path / str(aux), tiny, examples(1), aux, noise=0.01) / "hidden_states", tiny)
        assert cache.stored_layers == (*aux, 8) and cache.layers[-1] == "final"


def test_float8_states_are_read(tiny: Target, tmp_path: Path) -> None:
    """Their layers are identified, and the states are the target's to the rounding of three bits."""
    rows, layers = examples(1), (*AUX, "final")
    as_float8(cached(tmp_path, tiny, rows))
    cache = SpeculatorsCache(tmp_path, tiny)
    assert cache.stored_layers == (*AUX, 8)
    states, exact = cache.read_states(rows[0], layers, tiny), tiny.features(torch.tensor([rows[0].tokens]), layers).hidden[0]
    assert states is not None and states.dtype == tiny.dtype
    assert ((states - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.05
    tensors = load_file(tmp_path / "hidden_states" / "hs_0.safetensors")
    del tensors["hidden_states_scales"]
    save_file(tensors, tmp_path / "hidden_states" / "hs_0.safetensors")
    with pytest.raises(UserError, match="hs_0.*float8 and hidden_states_scales is missing"):
        SpeculatorsCache(tmp_path, tiny)


def test_layers_that_files_name_need_no_forward(tiny: Target, tmp_path: Path) -> None:
    """A target without layers reads such files, as the whole target does; it refuses files that name none."""
    rows, layers, head = examples(), (*AUX, "final"), load_tiny("float32", parts="head")
    cached(tmp_path, tiny, rows)
    read = SpeculatorsCache(tmp_path, tiny).read_states(rows[1], layers, tiny)
    with pytest.raises(UserError, match="whose files do not name their layers, needs the layers of tiny"):
        SpeculatorsCache(tmp_path, head)
    name_layers(tmp_path)
    cache = SpeculatorsCache(tmp_path, head)
    named = cache.read_states(rows[1], layers, head)
    assert read is not None and named is not None and torch.equal(named, read)
    assert "of 4 sequences, whose last states predict" in prepare(StoredSource(str(tmp_path)), drafter(head), head, rows)
    with pytest.raises(UserError, match="lacks 1 of 5 sequences, whose capture needs the layers of tiny"):
        prepare(StoredSource(str(tmp_path)), drafter(head), head, [*rows, Example([5, 6, 7], [False, True, True])])


def test_names_of_other_layers_are_refused(tiny: Target, tmp_path: Path) -> None:
    """So are names that are too few, too large, or not the same in all files; without the last layer there is no final."""
    cached(tmp_path, tiny, examples())
    for layers, reason in (((2, 4), "names 2 layers, and it holds 4"), ((2, 4, 5, 9), "9, and tiny has 8")):
        name_layers(tmp_path, layers)
        with pytest.raises(UserError, match=reason):
            SpeculatorsCache(tmp_path, tiny)
    name_layers(tmp_path, (1, 2, 4, 5))
    assert SpeculatorsCache(tmp_path, tiny).layers == (1, 2, 4, 5)
    file = tmp_path / "hidden_states" / "hs_3.safetensors"
    save_file(load_file(file), file)
    with pytest.raises(UserError, match="hs_3.*other layers than the files before it"):
        SpeculatorsCache(tmp_path, tiny)


def test_other_layers_are_refused(tiny: Target, tmp_path: Path) -> None:
    """A drafter that reads another layer hears which there are."""
    source = StoredSource(str(cached(tmp_path, tiny, examples())))
    with pytest.raises(UserError, match="holds layers 2, 4, 5, 8, final, and the drafter also reads 3, 6"):
        prepare(source, drafter(tiny, (3, 5, 6)), tiny, examples())


def test_a_normed_last_state_is_refused(tiny: Target, tmp_path: Path) -> None:
    """So is one of any layer but the last: transformers' own list of hidden states ends in a normed one."""
    for last in ("final", 6):
        with pytest.raises(UserError, match="un-normed"):
            SpeculatorsCache(cached(tmp_path / str(last), tiny, examples(1), last=last) / "hidden_states", tiny)
    with pytest.raises(UserError, match="is not that of tiny"):
        SpeculatorsCache(cached(tmp_path / "noise", tiny, examples(1), noise=1.0) / "hidden_states", tiny)


def test_missing_sequences_run_live(tiny: Target, tmp_path: Path) -> None:
    """It is said before, the features are the target's, and nothing is added to the folder; none at all is refused."""
    rows = examples()
    folder = cached(tmp_path, tiny, rows[:2])
    (folder / "hidden_states" / "hs_9.safetensors").write_bytes(b"cut")
    before = sorted(folder.rglob("*"))
    source, made = StoredSource(str(folder)), drafter(tiny)
    told = prepare(source, made, tiny, rows)
    assert "2 of 4 sequences" in told and "hs_9.safetensors cannot be read" in told and "runs for the other 2" in told
    found, live = (
        source.make_batch(BatchRequest(rows, tiny, made.layers)),
        LiveSource().make_batch(BatchRequest(rows, tiny, made.layers)),
    )
    assert found.features is not None and live.features is not None
    length = len(rows[3].tokens)
    torch.testing.assert_close(found.features.hidden[3, :length], live.features.hidden[3, :length], rtol=1e-4, atol=1e-4)
    source.flush()
    assert sorted(folder.rglob("*")) == before
    with pytest.raises(UserError, match="2 of 4 sequences are not in it"):
        prepare(StoredSource(str(folder), capture=False), made, tiny, rows)
    with pytest.raises(UserError, match="it holds none of the 2 sequences"):
        prepare(StoredSource(str(folder)), made, tiny, rows[2:])


def test_files_of_another_shape_are_refused(tiny: Target, tmp_path: Path) -> None:
    """A width that is not the target's, or fewer layers than the other files hold, names the file."""
    folder = cached(tmp_path, tiny, examples()) / "hidden_states"
    for shape, reason in (
        ((5, 4, 7), "expected"),
        ((6, 4, 128), "expected"),
        ((5, 3, 128), "other layers than the files before it"),
    ):
        wrong = {"hidden_states": torch.zeros(shape), "token_ids": torch.arange(5)}
        save_file(wrong, folder / "hs_7.safetensors")
        with pytest.raises(UserError, match=f"hs_7.*{reason}"):
            SpeculatorsCache(folder, tiny)
    assert find_hidden_states(tmp_path) == find_hidden_states(folder) == folder
    assert find_hidden_states(tmp_path.parent / "nowhere") is None
