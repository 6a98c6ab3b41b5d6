"""The linter finds every seeded fault by its name, and nothing in sound files."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.cli import main as cli
from spectrain.config.spec import RunSpec
from spectrain.data.readers import EmbeddedReader
from spectrain.drafters.base import Drafter
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.medusa import Medusa
from spectrain.errors import UserError
from spectrain.export.container import Finding
from spectrain.export.converter import convert, read_drafter
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.file_checks import check_run_settings
from spectrain.export.layouts import detect_layout
from spectrain.export.linter import check_files, lint
from spectrain.export.measure import find_misinterpretation
from spectrain.export.native import NATIVE
from spectrain.export.targets import TargetFiles
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.runs.drafters import load_for_decoding, load_weights, save_drafter
from spectrain.training.trainer import Trainer

from . import foreign
from .test_converter import CASES, ours, settings_for

TINY = TargetFiles("tiny")
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


def find_faults(directory: Path, target: TargetFiles | None = TINY) -> dict[str, Finding]:
    """Return the findings of the files alone, without decoding, by name."""
    files = DrafterFiles.from_directory(directory)
    return {finding.name: finding for finding in check_files(files, detect_layout(files), target)}


def change_files(directory: Path, change: Change) -> Path:
    """Change the settings and tensors of a directory; return the directory."""
    file = next(directory.glob("*.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(file)
    change(config, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return directory


def rename_tensor(old: str, new: str) -> Change:
    return lambda config, tensors: tensors.update({new: tensors.pop(old)})


def scale_tensor(name: str, factor: float) -> Change:
    return lambda config, tensors: tensors.update({name: tensors[name] * factor})


def set_layer_keys(**changes: Any) -> Change:
    return lambda config, tensors: config["transformer_layer_config"].update(changes)


def make_d2t_absolute(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


SPECULATORS: dict[str, tuple[str, Change]] = {
    "no d2t": ("missing-d2t", lambda config, tensors: tensors.pop("d2t")),
    "absolute ids": ("d2t-absolute", make_d2t_absolute),
    "offsets out of range": ("d2t-range", lambda config, tensors: tensors["d2t"].add_(3000)),
    "an id twice": ("d2t-repeated", lambda config,
        tensors: tensors["d2t"][1:2].copy_(tensors["d2t"][:1] - 1)),
    "t2d of another run": ("t2d-mismatch", lambda config,
        tensors: tensors.update(t2d=tensors["t2d"].roll(1))),
    "offsets as floats": ("d2t-dtype", lambda config,
        tensors: tensors.update(d2t=tensors["d2t"].float())),
    "offsets nobody filled in": (
        "d2t-identity", lambda config,
        tensors: (tensors["d2t"].zero_(), tensors.update(t2d=torch.arange(2048) < 256))),
    "no fc": ("missing-fc", lambda config, tensors: tensors.pop("fc.weight")),
    "no head": ("missing-lm-head", lambda config, tensors: tensors.pop("lm_head.weight")),
    "no norm": ("missing-tensor", lambda config, tensors: tensors.pop("norm.weight")),
    "no embedding": ("missing-embed-tokens", lambda config,
        tensors: tensors.pop("embed_tokens.weight")),
    "zero embedding": ("all-zero", scale_tensor("embed_tokens.weight", 0.0)),
    "transposed head": (
        "transposed-tensor", lambda config,
        tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].T})),
    "rows cut off the head": (
        "head-rows", lambda config,
        tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][:200]})),
    "NaN": ("not-finite", lambda config, tensors: tensors["fc.weight"].fill_(float("nan"))),
    "8-bit floats without scales": ("type", lambda config,
        tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)})),
    "a name with a prefix": ("unknown-tensor",
        rename_tensor("layers.0.mlp.up_proj.weight", "draft.mlp.up_proj.weight")),
    "two types": ("mixed-dtype", lambda config,
        tensors: tensors.update({"fc.weight": tensors["fc.weight"].bfloat16()})),
    "double precision": ("dtype", lambda config,
        tensors: tensors.update({"fc.weight": tensors["fc.weight"].double()})),
    "the target's vocabulary": ("vocab-size", set_layer_keys(vocab_size=1024)),
    "another inner width": ("wrong-shape", set_layer_keys(intermediate_size=99)),
    "the flag unsaid": ("norm-flag-implicit", lambda config,
        tensors: config.pop("norm_before_residual")),
    "a norm without its flag": ("norm-flag", lambda config,
        tensors: tensors.update({"input_norm.weight": torch.ones(384)})),
    "two norms": ("norm-flags-exclusive", lambda config,
        tensors: config.update(norm_before_fc=True, fc_norm=True)),
    "another rope": ("rope",
        set_layer_keys(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})),
    "a shorter context": ("max-position", set_layer_keys(max_position_embeddings=128)),
    "layers beyond the target": (
        "layer-ids-range", lambda config,
        tensors: config.update(eagle_aux_hidden_state_layer_ids=[2, 4, 9])),
    "layers out of order": (
        "layer-ids-order", lambda config,
        tensors: config.update(eagle_aux_hidden_state_layer_ids=[5, 2, 4])),
    "layers unsaid": ("layer-ids-missing", lambda config,
        tensors: config.pop("eagle_aux_hidden_state_layer_ids")),
    "no verifier": ("speculators-config", lambda config,
        tensors: config["speculators_config"].pop("verifier")),
    "no layer": ("missing-key", lambda config, tensors: config.pop("transformer_layer_config")),
}  # fmt: skip


@pytest.mark.sweep(10, free=("case",))
@pytest.mark.parametrize("case", SPECULATORS)
def test_seeded_faults_of_the_speculators_layout(case: str, tiny: Target, tmp_path: Path) -> None:
    """Each fault is found by its name, and was not there before."""
    name, change = SPECULATORS[case]
    start = foreign.write_speculators(tmp_path / "start", tiny)
    assert not find_faults(start)
    assert name in find_faults(change_files(start, change))


FLAT: dict[str, tuple[str, Change]] = {
    "no d2t": ("missing-d2t", lambda config, tensors: tensors.pop("d2t")),
    "absolute ids": ("d2t-absolute", make_d2t_absolute),
    "vLLM's layer numbers": (
        "layer-ids-numbering",
        lambda config,
        tensors: config.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})),
    "another architecture": ("architecture", lambda config,
        tensors: config.update(architectures=["LlamaForCausalLM"])),
    "no norm at the end": ("norm-output-ambiguous", lambda config,
        tensors: config.update(norm_output=False)),
    "a default rope": ("rope", lambda config, tensors: config.update(rope_theta=500000.0)),
    "the wrong count": ("head-rows", lambda config, tensors: config.update(draft_vocab_size=512)),
    "half of the head norms": (
        "missing-tensor", lambda config,
        tensors: tensors.update({"midlayer.self_attn.q_norm.weight": torch.ones(32)})),
    "a layer too few": ("missing-tensor", lambda config,
        tensors: config.update(num_hidden_layers=2)),
    "an activation that the class has not": ("not-representable", lambda config,
        tensors: config.update(hidden_act="gelu")),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAT)
def test_seeded_faults_of_the_flat_layout(case: str, tiny: Target, tmp_path: Path) -> None:
    """Each fault is found by its name, and was not there before."""
    name, change = FLAT[case]
    start = foreign.write_specforge(tmp_path / "start", tiny)
    assert not find_faults(start)
    assert name in find_faults(change_files(start, change))


PEAGLE: dict[str, tuple[str, Change]] = {
    "no mask state": ("missing-tensor", lambda config, tensors: tensors.pop("mask_hidden")),
    "no mask token": ("mask-token", lambda config, tensors: config.pop("mask_token_id")),
    "a mask token beyond the vocabulary": ("mask-token", lambda config,
        tensors: config.update(mask_token_id=5000)),
    "EAGLE-3's name": ("unknown-tensor", lambda config,
        tensors: config.update(speculators_model_type="eagle3")),
    "a second layer's part missing": ("missing-tensor", lambda config,
        tensors: tensors.pop("layers.1.mlp.up_proj.weight")),
    "a layer that is not counted": ("unknown-tensor", set_layer_keys(num_hidden_layers=1)),
    "no embedding": ("missing-embed-tokens", lambda config,
        tensors: tensors.pop("embed_tokens.weight")),
    "head norms that are not there": ("missing-tensor", set_layer_keys(model_type="qwen3")),
    "windows that differ": (
        "not-representable",
        set_layer_keys(sliding_window=8, layer_types=["sliding_attention", "full_attention"])),
}  # fmt: skip


@pytest.mark.sweep(3, free=("case",))
@pytest.mark.parametrize("case", PEAGLE)
def test_seeded_faults_of_peagle(case: str, tiny: Target, tmp_path: Path) -> None:
    """Each fault is found by its name, and was not there before."""
    name, change = PEAGLE[case]
    convert(
        ours(tmp_path / "start", tiny, "peagle", vocab_size=256, num_layers=2),
        tmp_path / "out",
        "vllm",
        TINY,
    )
    assert not find_faults(tmp_path / "out")
    assert name in find_faults(change_files(tmp_path / "out", change))


def split_heads(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give every head its own output layer, over a part of the vocabulary."""
    config["original_lm_head"] = False
    shared = tensors.pop("lm_head.weight")
    tensors.update({f"lm_heads.{head}.weight": shared.clone() for head in range(3)})


MEDUSA: dict[str, tuple[str, Change]] = {
    "attention heads counted as heads": ("num-attention-heads", lambda config,
        tensors: config.update(num_attention_heads=4)),
    "biases dropped": ("medusa-bias", lambda config, tensors: config.pop("medusa_fc_bias")),
    "no map": ("missing-token-map", lambda config, tensors: tensors.pop("token_map")),
    "offsets in the map": (
        "token-map-offsets", lambda config,
        tensors: tensors.update(token_map=torch.zeros(256, dtype=torch.int64))),
    "ids out of range": ("token-map-range", lambda config,
        tensors: tensors["token_map"].add_(3000)),
    "a map that is ignored": ("truncated-vocab-size", lambda config,
        tensors: config.update(truncated_vocab_size=2048)),
    "heads of their own, cut": ("short-heads", lambda config,
        tensors: split_heads(config, tensors)),
    "names of the trainer": ("unknown-tensor",
        rename_tensor("lm_head.weight", "heads.0.lm_head.weight")),
    "a head too few": ("missing-tensor", lambda config, tensors: config.update(num_heads=4)),
}  # fmt: skip


@pytest.mark.parametrize("case", MEDUSA)
def test_seeded_faults_of_medusa(case: str, tiny: Target, tmp_path: Path) -> None:
    """Each fault is found by its name, and was not there before."""
    name, change = MEDUSA[case]
    start = foreign.write_medusa_vllm(tmp_path / "start", tiny)
    assert not find_faults(start)
    assert name in find_faults(change_files(start, change))


def test_original_medusa_with_a_head_too_many(tiny: Target, tmp_path: Path) -> None:
    """A number of heads other than that of the tensors, which the original loader accepts, is
    found.
    """
    start = foreign.write_medusa(tmp_path / "start", tiny)
    assert not find_faults(start)
    assert "head-count" in find_faults(
        change_files(start, lambda config, tensors: config.update(medusa_num_heads=5))
    )


@pytest.mark.parametrize(
    ("is_trained", "expectation"),
    [
        (False, nullcontext()),
        (True, pytest.raises(UserError, match=r"embed_tokens\.weight is missing, and .* trained")),
    ],
)
def test_an_embedding_that_was_trained_has_no_substitute(
    is_trained: bool, expectation: Any, tiny: Target, tmp_path: Path
) -> None:
    """Where config.json says that the embedding was trained, the target's cannot replace it, and
    eval refuses the files as lint does.
    """
    folder = change_files(
        foreign.write_speculators(tmp_path, tiny),
        lambda config, tensors: (
            config.update(embed_requires_grad=is_trained),
            tensors.pop("embed_tokens.weight"),
        ),
    )
    assert "missing-embed-tokens" in find_faults(folder)
    with expectation:
        read_drafter(folder, TINY)


def test_an_output_layer_whose_rows_are_counted_is_required(tiny: Target, tmp_path: Path) -> None:
    """SGLang takes the target's output layer only where config.json has no draft_vocab_size."""
    folder = foreign.write_specforge(tmp_path, tiny, draft_vocab=2048)
    change_files(folder, lambda config, tensors: [tensors.pop(name) for name in ("d2t", "t2d")])
    assert not find_faults(folder)
    change_files(folder, lambda config, tensors: tensors.pop("lm_head.weight"))
    assert find_faults(folder).keys() == find_faults(folder, None).keys() == {"missing-lm-head"}
    with pytest.raises(UserError, match=r"lm_head\.weight is missing"):
        read_drafter(folder, TINY)
    change_files(folder, lambda config, tensors: config.pop("draft_vocab_size"))
    assert not find_faults(folder)
    assert torch.equal(
        read_drafter(folder, TINY).tensors["lm_head.weight"], tiny.head.output.weight
    )


@pytest.mark.parametrize("type_name", ["int8", "uint32", "bool", "complex64", "float8_e5m2"])
def test_weights_that_are_no_real_numbers(type_name: str, tiny: Target, tmp_path: Path) -> None:
    """A drafter in our own layout, whose target its config.json names, is refused as in loading."""

    def change_type(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"] = tensors["fc.weight"].to(getattr(torch, type_name))

    start = convert(ours(tmp_path / "start", tiny, "eagle3"), tmp_path / "out", "spectrain", TINY)
    assert not find_faults(start)
    assert "type" in find_faults(change_files(start, change_type))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight: weight.fill_(torch.nan), "fc.weight holds NaN or infinity"),
        (lambda weight: weight.to(torch.float8_e4m3fn), "holds 8-bit floats without their scales"),
    ],
)
def test_weights_that_lint_refuses_are_not_loaded(
    change: Callable[[Tensor], Tensor], message: str, tiny: Target, tmp_path: Path
) -> None:
    """A damaged file is a mistake of the user's, not a failure of the command."""
    start = convert(ours(tmp_path / "start", tiny, "eagle3"), tmp_path / "out", "spectrain", TINY)
    drafter = load_for_decoding(start, tiny)
    change_files(
        start,
        lambda config, tensors: tensors.update({"fc.weight": change(tensors["fc.weight"])}),
    )
    with pytest.raises(UserError, match=f"model.safetensors: .*{message}"):
        load_weights(drafter, start, tiny)


@pytest.mark.parametrize("type_name", ["int8", "float8_e4m3fn"])
def test_an_embedding_without_its_scales_is_not_borrowed(type_name: str, tmp_path: Path) -> None:
    """An export would write such numbers as if they were the weights."""
    folder = tmp_path / "target"
    shutil.copytree(TINY.directory, folder)
    change_files(
        folder,
        lambda config, tensors: tensors.update(
            {name: tensor.to(getattr(torch, type_name)) for name, tensor in tensors.items()}
        ),
    )
    with pytest.raises(UserError, match=r"embed_tokens\.weight holds .*, and drafters borrow it"):
        TargetFiles(str(folder)).load_embedding()


def test_complete_models(tiny: Target, tmp_path: Path) -> None:
    """A draft model with another tokenizer, and a mask token outside of the vocabulary, are
    found.
    """
    start = ours(tmp_path / "start", tiny, "pard", num_layers=2)
    convert(start, tmp_path / "out", "hf", TINY)
    assert not find_faults(tmp_path / "out")
    change_files(tmp_path / "out", lambda config, tensors: config.update(pard_token=5000))
    template = tmp_path / "out" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert {"pard-token", "tokenizer"} <= find_faults(tmp_path / "out").keys()


@pytest.mark.sweep(8, free=("case", "form"))
@pytest.mark.parametrize(
    ("case", "form"), [(case, form) for case in CASES for form in CASES[case][1]]
)
def test_clean_exports_have_no_finding(case: str, form: str, tiny: Target, tmp_path: Path) -> None:
    """The linter finds nothing in what a layout writes, with and without the target; it warns of
    what vLLM does not read in its own layout."""
    start = CASES[case][0](tmp_path / "start", tiny)
    assert not find_faults(start)
    convert(start, tmp_path / form, form, TINY)
    expected = UNREAD_BY_VLLM.get(case, {}).get(form, set())
    assert (
        find_faults(tmp_path / form).keys() == find_faults(tmp_path / form, None).keys() == expected
    )


UNREAD_BY_VLLM: dict[str, dict[str, set[str]]] = {
    "peagle, other settings": {"vllm": {"fc-norm-dropped"}},
    "dspark, gated, in a window": {"vllm": {"markov-head"}, "sglang": {"markov-head"}},
    "dspark, a cell": {"vllm": {"markov-head"}, "sglang": {"markov-head"}},
}


# Faults that only a measurement shows


def train_drafter(
    directory: Path, tiny: Target, drafter: Drafter, name: str, steps: int, **options: Any
) -> Path:
    """Train a drafter briefly and save it as training does."""
    dataset = EmbeddedReader(limit=steps).make_dataset(tiny.template)
    drafter.prepare(tiny, dataset.token_counts(tiny.head.vocab_size))
    Trainer(lr=3e-3, max_steps=steps, batch_tokens=1024).fit(
        drafter, tiny, dataset, LiveSource(), directory / "fit"
    )
    save_drafter(directory / "drafter", drafter, RunSpec.from_nodes(settings_for(name, **options)))
    return directory / "drafter"


@pytest.fixture(scope="module")
def medusa_folder(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    options = {"vocab_size": 512, "loss": "forward_kl", "num_heads": 2}
    drafter = Medusa(tiny, **options)  # type: ignore[arg-type]
    return train_drafter(tmp_path_factory.mktemp("medusa"), tiny, drafter, "medusa", 20, **options)


@pytest.fixture(scope="module")
def eagle3_folder(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    options = {"vocab_size": 1024, "ttt_steps": 3}
    return train_drafter(
        tmp_path_factory.mktemp("eagle3"), tiny, Eagle3(tiny, **options), "eagle3", 300, **options
    )


def transpose_tensors(ending: str) -> Change:
    return lambda config, tensors: tensors.update(
        {n: t.T for n, t in tensors.items() if n.endswith(ending) and t.dim() == 2}
    )


def exchange_heads(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Exchange the two heads."""
    for name in [
        name
        for name in tensors
        if (".0." in name and name.startswith("lm_heads.0")) or name.startswith("blocks.0")
    ]:
        other_name = name.replace("s.0.", "s.1.", 1)
        tensors[name], tensors[other_name] = tensors[other_name], tensors[name]


def permute_rows(tensors: dict[str, Tensor]) -> None:
    """Permute the trained rows of every head."""
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    for name in [name for name in tensors if name.startswith("lm_heads")]:
        tensors[name][ids] = tensors[name][ids].roll(7, dims=0)


MEASURED_MEDUSA: dict[str, tuple[str, Change]] = {
    "blocks transposed": ("transposed-tensor", transpose_tensors("layers.0.weight")),
    "heads exchanged": ("heads-shifted", exchange_heads),
    "rows of the head permuted": ("head-order", lambda config, tensors: permute_rows(tensors)),
}


@pytest.mark.slow
def test_measured_faults_of_medusa(
    medusa_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transposed square tensors and permuted heads and rows are found by decoding; sound files
    have no finding.
    """
    monkeypatch.setattr("spectrain.export.measure.NUM_PROMPTS", 2)
    monkeypatch.setattr("spectrain.export.measure.NUM_TOKENS", 16)
    assert not lint(medusa_folder, TINY)
    for case, (name, change) in MEASURED_MEDUSA.items():
        convert(medusa_folder, tmp_path / case, "vllm", TINY)
        assert name in {
            finding.name for finding in lint(change_files(tmp_path / case, change), TINY)
        }, case


MEASURED_EAGLE3: dict[str, tuple[str, Change]] = {
    "layers one lower": (
        "layer-ids-off-by-one", lambda config,
        tensors: config.update(eagle_aux_hidden_state_layer_ids=[1, 3, 4])),
    "the other residual": (
        "norm-before-residual-swapped", lambda config,
        tensors: config.update(norm_before_residual=True)),
    "normed feedback": ("norm-output-swapped", lambda config,
        tensors: config.update(norm_output=True)),
    "o_proj transposed": ("transposed-tensor", transpose_tensors("o_proj.weight")),
    "another rope": ("rope",
        set_layer_keys(rope_parameters={"rope_type": "default", "rope_theta": 50.0})),
    "state before embedding": (
        "halves-swapped",
        lambda config, tensors: tensors.update(
            {name: tensor.roll(128, dims=1) for name,
                tensor in tensors.items() if tensor.shape[1:] == (256,)})),
    "rows of the head permuted": (
        "head-order", lambda config,
        tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].roll(7, dims=0)})),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", MEASURED_EAGLE3)
def test_measured_faults_of_eagle3(
    case: str, eagle3_folder: Path, tiny: Target, tmp_path: Path
) -> None:
    """Faults that no shape shows are found by name as errors, and sound files have no finding."""
    name, change = MEASURED_EAGLE3[case]
    convert(eagle3_folder, tmp_path / "out", "vllm", TINY)
    assert not lint(tmp_path / "out", TINY)
    after = {
        finding.name: finding for finding in lint(change_files(tmp_path / "out", change), TINY)
    }
    assert after[name].level == "error"


@pytest.mark.parametrize(
    "group, choice, key, value",
    [
        ("trainer", "default", "lr", "fast"),
        ("trainer", "default", "speed", 1),
        ("data", "embedded", "limit", "many"),
    ],
)
def test_settings_of_a_run_are_checked_as_a_command_checks_them(
    group: str, choice: str, key: str, value: Any, tmp_path: Path
) -> None:
    """What `spectrain eval` refuses of config.yaml is a fault of the folder."""
    path = tmp_path / "config.yaml"
    path.write_text(f"{group}:\n  choice: {choice}\n  {key}: {value}\n")
    with pytest.raises(UserError, match=f"config.yaml: {group}.{key}"):
        check_run_settings(path)


def test_an_error_ends_with_status_1(
    tiny: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`lint` prints fault, reason and remedy, and exits 1 on an error, 0 on a warning, 2 without
    a drafter.
    """
    start = foreign.write_speculators(tmp_path / "start", tiny)

    def read_status(directory: Path) -> int:
        monkeypatch.setattr("sys.argv", ["spectrain", "lint", str(directory)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
            raise SystemExit(0)
        return int(exit_info.value.code or 0)

    assert read_status(start) == 0
    change_files(start, lambda config, tensors: config.pop("eagle_aux_hidden_state_layer_ids"))
    assert read_status(start) == 0 and "warning layer-ids-missing" in capsys.readouterr().out
    change_files(start, lambda config, tensors: tensors.pop("d2t"))
    assert read_status(start) == 1
    output = capsys.readouterr()
    assert (
        "error missing-d2t" in output.out
        and "why:" in output.out
        and "mend:" in output.out
        and "1 error," in output.err
    )
    assert read_status(tmp_path) == 2


def test_nothing_is_measured_for_other_families(tiny: Target, tmp_path: Path) -> None:
    """A draft model has no other interpretation, so the linter does not decode."""
    from spectrain.export.converter import read_drafter

    drafter = read_drafter(ours(tmp_path / "start", tiny, "causal", num_layers=2))
    assert find_misinterpretation(drafter, TINY, NATIVE) == []
