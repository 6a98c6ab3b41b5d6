"""The cache of the speculators project: its features are read, its layers identified, and what
does not fit is refused.
"""

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
from spectrain.features.base import BatchRequest, FeaturesRead, Source
from spectrain.features.live_source import LiveSource
from spectrain.features.speculators import SpeculatorsCache, find_hidden_states
from spectrain.features.stored_source import StoredSource
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.training.trainer import Trainer

AUX = (2, 4, 5)


def make_examples(count: int = 4) -> list[Example]:
    torch.manual_seed(3)
    rows = torch.randint(3, 2000, (count, 40)).tolist()
    return [
        Example(row[: 40 - 3 * n], [i >= 7 for i in range(40 - 3 * n)])
        for n, row in enumerate(rows)
    ]


def write_cache(
    folder: Path,
    target: Target,
    rows: list[Example],
    aux: tuple[int, ...] = AUX,
    last: int | str = 8,
    noise: float = 0.0,
) -> Path:
    """Write files as speculators does: the streams entering `aux`, then the last state,
    un-normed.
    """
    hidden_states = folder / "hidden_states"
    hidden_states.mkdir(parents=True, exist_ok=True)
    for number, example in enumerate(rows):
        tokens = torch.tensor(example.tokens)
        states = target.features(tokens[None], (*aux, last)).hidden[0]  # type: ignore[arg-type]
        states = (
            states
            + noise
            * states.norm(dim=-1, keepdim=True)
            * torch.randn_like(states)
            / states.shape[-1] ** 0.5
        )
        save_file(
            {"hidden_states": states.contiguous(), "token_ids": tokens},
            hidden_states / f"hs_{number}.safetensors",
        )
    return folder


def as_float8(folder: Path) -> None:
    """Rewrite the files as hs-connectors' FP8HiddenStatesConnector does: one scale per token,
    over all of its layers.
    """
    for file in folder.rglob("hs_*.safetensors"):
        tensors = load_file(file)
        states = tensors["hidden_states"].float()
        scales = (states.abs().amax((1, 2), keepdim=True) / 448).clamp(min=1e-12)
        save_file(
            tensors
            | {
                "hidden_states": (states / scales).to(torch.float8_e4m3fn),
                "hidden_states_scales": scales,
            },
            file,
        )


def name_layers(folder: Path, layers: tuple[int, ...] = (*AUX, 8)) -> None:
    """Name the layers in the metadata of the files."""
    for file in folder.rglob("hs_*.safetensors"):
        save_file(load_file(file), file, metadata={"layers": ",".join(map(str, layers))})


def make_drafter(tiny: Target, layers: tuple[int, ...] = AUX) -> Eagle3:
    return Eagle3(tiny, layers=list(layers))


def prepare_source(source: Source, drafter: Drafter, target: Target, rows: list[Example]) -> str:
    """Return the source's message before a training of this drafter."""
    message = source.prepare(
        target, FeaturesRead(drafter.stages[0].layers, drafter.stages[0].final_reach), rows
    )
    assert message is not None
    return message


def test_speculators_features_equal_the_targets(tiny: Target, tmp_path: Path) -> None:
    """In any order of files a batch has the features of source=live, with the last state through
    the final norm.
    """
    rows = make_examples()
    source = StoredSource(str(write_cache(tmp_path, tiny, rows[::-1])))
    message = prepare_source(source, make_drafter(tiny), tiny, rows)
    assert "layers 2, 4, 5, 8, final, 4 of 4 sequences" in message
    drafter = make_drafter(tiny)
    batch = source.make_batch(BatchRequest(rows, tiny, drafter.layers))
    live = LiveSource().make_batch(BatchRequest(rows, tiny, drafter.layers))
    assert (
        batch.features is not None
        and live.features is not None
        and batch.features.layers == live.features.layers
    )
    for row, example in enumerate(rows):
        length = len(example.tokens)
        torch.testing.assert_close(
            batch.features.hidden[row, :length],
            live.features.hidden[row, :length],
            rtol=1e-4,
            atol=1e-4,
        )
        assert not batch.features.hidden[row, length:].any()
    assert torch.equal(batch.tokens, live.tokens) and torch.equal(batch.loss_mask, live.loss_mask)


def test_a_speculators_folder_trains_a_drafter(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and masks are those of the folder, and every sequence has its features, so the
    target is not run.
    """
    rows = make_examples()
    write_cache(tmp_path, tiny, rows)
    columns = [
        {"input_ids": e.tokens, "loss_mask": list(map(int, e.mask)), "seq_len": len(e.tokens)}
        for e in rows
    ]
    datasets.Dataset.from_list(columns).with_format("torch").save_to_disk(tmp_path)
    dataset = PreparedReader(str(tmp_path)).make_dataset(tiny.template)
    assert dataset.examples == rows
    source = StoredSource(str(tmp_path), capture=False)
    drafter = make_drafter(tiny)
    prepare_source(source, drafter, tiny, dataset.examples)
    drafter.prepare(tiny, dataset.token_counts(tiny.head.vocab_size))
    monkeypatch.setattr(tiny, "features", lambda *args: pytest.fail("the target was run"))
    Trainer(lr=1e-3, epochs=1, batch_tokens=90, log_every=1).fit(
        drafter, tiny, dataset, source, tmp_path / "run"
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"loss"') == 2


def test_data_without_cached_sequences_is_refused(tmp_path: Path) -> None:
    """A folder without data, and rows whose mask has another length, are refused."""
    with pytest.raises(UserError, match="the folder holds no data file"):
        PreparedReader(str(tmp_path)).load_conversations()
    datasets.Dataset.from_list([{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}]).save_to_disk(
        tmp_path / "saved"
    )
    with pytest.raises(UserError, match="row 1: it has 3 input_ids and 2 loss_mask"):
        PreparedReader(str(tmp_path / "saved")).load_conversations()


def test_layers_are_identified_through_noise(tiny: Target, tmp_path: Path) -> None:
    """Layers are identified with 1 % of noise, like that of bfloat16, in any order and number."""
    for aux in ((1, 2, 3), (0, 6, 7, 8), (5,)):
        cache = SpeculatorsCache(
            write_cache(tmp_path / str(aux), tiny, make_examples(1), aux, noise=0.01)
            / "hidden_states",
            tiny,
        )
        assert cache.stored_layers == (*aux, 8) and cache.layers[-1] == "final"


def test_float8_states_are_read(tiny: Target, tmp_path: Path) -> None:
    """Layers are identified, and the states are the target's within the rounding of three bits."""
    rows = make_examples(1)
    layers = (*AUX, "final")
    as_float8(write_cache(tmp_path, tiny, rows))
    cache = SpeculatorsCache(tmp_path, tiny)
    assert cache.stored_layers == (*AUX, 8)
    states = cache.read_states(rows[0], layers, tiny)
    exact = tiny.features(torch.tensor([rows[0].tokens]), layers).hidden[0]
    assert states is not None and states.dtype == tiny.dtype
    assert ((states - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.05
    tensors = load_file(tmp_path / "hidden_states" / "hs_0.safetensors")
    del tensors["hidden_states_scales"]
    save_file(tensors, tmp_path / "hidden_states" / "hs_0.safetensors")
    with pytest.raises(UserError, match="hs_0.*float8 and hidden_states_scales is missing"):
        SpeculatorsCache(tmp_path, tiny)


def test_layers_that_files_name_need_no_forward(tiny: Target, tmp_path: Path) -> None:
    """A target without layers reads files that name their layers as the complete target does,
    and refuses others.
    """
    rows = make_examples()
    layers = (*AUX, "final")
    head = load_tiny("float32", parts="head")
    write_cache(tmp_path, tiny, rows)
    read = SpeculatorsCache(tmp_path, tiny).read_states(rows[1], layers, tiny)
    with pytest.raises(
        UserError, match="whose files do not name their layers, needs the layers of tiny"
    ):
        SpeculatorsCache(tmp_path, head)
    name_layers(tmp_path)
    cache = SpeculatorsCache(tmp_path, head)
    named = cache.read_states(rows[1], layers, head)
    assert read is not None and named is not None and torch.equal(named, read)
    assert "of 4 sequences, whose last states predict" in prepare_source(
        StoredSource(str(tmp_path)), make_drafter(head), head, rows
    )
    with pytest.raises(
        UserError, match="lacks 1 of 5 sequences, whose capture needs the layers of tiny"
    ):
        prepare_source(
            StoredSource(str(tmp_path)),
            make_drafter(head),
            head,
            [*rows, Example([5, 6, 7], [False, True, True])],
        )


def test_names_of_other_layers_are_refused(tiny: Target, tmp_path: Path) -> None:
    """Too few names, too large ones, and names that differ between files are refused; without the
    last layer there is no final."""
    write_cache(tmp_path, tiny, make_examples())
    for layers, reason in (
        ((2, 4), "names 2 layers, and it holds 4"),
        ((2, 4, 5, 9), "9, and tiny has 8"),
    ):
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
    """If the drafter reads another layer, the message names the layers of the cache."""
    source = StoredSource(str(write_cache(tmp_path, tiny, make_examples())))
    with pytest.raises(
        UserError, match="holds layers 2, 4, 5, 8, final, and the drafter also reads 3, 6"
    ):
        prepare_source(source, make_drafter(tiny, (3, 5, 6)), tiny, make_examples())


def test_a_normed_last_state_is_refused(tiny: Target, tmp_path: Path) -> None:
    """A normed last state, as in transformers' list of hidden states, and one of an earlier
    layer are refused.
    """
    for last in ("final", 6):
        with pytest.raises(UserError, match="un-normed"):
            SpeculatorsCache(
                write_cache(tmp_path / str(last), tiny, make_examples(1), last=last)
                / "hidden_states",
                tiny,
            )
    with pytest.raises(UserError, match="is not that of tiny"):
        SpeculatorsCache(
            write_cache(tmp_path / "noise", tiny, make_examples(1), noise=1.0) / "hidden_states",
            tiny,
        )


def test_missing_sequences_run_live(tiny: Target, tmp_path: Path) -> None:
    """Missing sequences are announced and get the target's features, and the folder stays
    unchanged; a folder with none is refused."""
    rows = make_examples()
    folder = write_cache(tmp_path, tiny, rows[:2])
    (folder / "hidden_states" / "hs_9.safetensors").write_bytes(b"cut")
    before = sorted(folder.rglob("*"))
    source = StoredSource(str(folder))
    drafter = make_drafter(tiny)
    message = prepare_source(source, drafter, tiny, rows)
    assert (
        "2 of 4 sequences" in message
        and "hs_9.safetensors cannot be read" in message
        and "runs for the other 2" in message
    )
    batch = source.make_batch(BatchRequest(rows, tiny, drafter.layers))
    live = LiveSource().make_batch(BatchRequest(rows, tiny, drafter.layers))
    assert batch.features is not None and live.features is not None
    length = len(rows[3].tokens)
    torch.testing.assert_close(
        batch.features.hidden[3, :length], live.features.hidden[3, :length], rtol=1e-4, atol=1e-4
    )
    source.flush()
    assert sorted(folder.rglob("*")) == before
    with pytest.raises(UserError, match="2 of 4 sequences are not in it"):
        prepare_source(StoredSource(str(folder), capture=False), drafter, tiny, rows)
    with pytest.raises(UserError, match="it holds none of the 2 sequences"):
        prepare_source(StoredSource(str(folder)), drafter, tiny, rows[2:])


def test_files_of_another_shape_are_refused(tiny: Target, tmp_path: Path) -> None:
    """A width other than the target's, or fewer layers than in other files, is refused with the
    file's name.
    """
    folder = write_cache(tmp_path, tiny, make_examples()) / "hidden_states"
    for shape, reason in (
        ((5, 4, 7), "expected"),
        ((6, 4, 128), "expected"),
        ((5, 3, 128), "other layers than the files before it"),
    ):
        wrong = {"hidden_states": torch.zeros(shape), "token_ids": torch.arange(5)}
        save_file(wrong, folder / "hs_7.safetensors")
        with pytest.raises(UserError, match=f"hs_7.*{reason}"):
            SpeculatorsCache(folder, tiny)
    states = torch.zeros(5, 4, 128)
    tokens = torch.arange(5)
    float8 = states.to(torch.float8_e4m3fn)
    for wrong, reason in (
        ({"hidden_states": states, "token_ids": tokens.float()}, "no list of whole numbers"),
        ({"hidden_states": states, "token_ids": tokens[None]}, "no list of whole numbers"),
        ({"hidden_states": states.to(torch.int8), "token_ids": tokens}, "type I8 are read"),
        (
            {"hidden_states": states.to(torch.float8_e5m2), "token_ids": tokens},
            "type F8_E5M2 are read",
        ),
        (
            {
                "hidden_states": float8,
                "token_ids": tokens,
                "hidden_states_scales": torch.ones(5),
            },
            r"hidden_states_scales is \[5\]; expected \[5, 1, 1\]",
        ),
    ):
        save_file(wrong, folder / "hs_7.safetensors")
        with pytest.raises(UserError, match=f"hs_7.*{reason}"):
            SpeculatorsCache(folder, tiny)
    assert find_hidden_states(tmp_path) == find_hidden_states(folder) == folder
    assert find_hidden_states(tmp_path.parent / "nowhere") is None


def test_states_that_are_no_numbers_are_refused(tiny: Target, tmp_path: Path) -> None:
    """Training would leave out the steps of this sequence."""
    rows = make_examples()
    folder = write_cache(tmp_path, tiny, rows) / "hidden_states"
    tensors = load_file(folder / "hs_3.safetensors")
    tensors["hidden_states"][4, 1, 2] = torch.nan
    save_file(tensors, folder / "hs_3.safetensors")
    cache = SpeculatorsCache(folder, tiny)
    assert cache.read_states(rows[2], AUX, tiny) is not None
    with pytest.raises(UserError, match=r"hs_3\.safetensors: its states hold NaN or infinity"):
        cache.read_states(rows[3], AUX, tiny)
