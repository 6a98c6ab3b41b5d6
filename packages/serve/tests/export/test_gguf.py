"""GGUF: what is written is read back bit by bit, and by transformers; what llama.cpp cannot read
is refused by name.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spectrain.cli.export import export_command
from spectrain.errors import UserError
from spectrain.export.card import engine_commands
from spectrain.export.converter import convert, read_drafter
from spectrain.export.layouts import detect_layout, read_files
from spectrain.export.linter import check_files, lint
from spectrain.export.targets import TargetFiles
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain.servers.engines import ENGINES
from spectrain_serve.layouts.gguf_file import (
    TensorSource,
    open_gguf,
    read_keys,
    read_tensors,
    write_gguf,
)
from spectrain_serve.layouts.gguf_layout import (
    interleave_heads,
    rope_tensors,
    scaling_keys,
    separate_heads,
)
from spectrain_serve.layouts.gguf_model import complete_config, write_model, write_target
from spectrain_serve.layouts.gguf_tokenizer import find_pre_tokenizer, tokenizer_keys
from tests.export.test_converter import DFLASH, DFLASH2, DSPARK, ours
from tests.export.test_linter import eagle3_folder
from tests.models.test_pretrained import UP, Weights, lengthen, remove, saved

from .gguf_files import Change, change_gguf, change_rows, interleave, separate

__all__ = ["eagle3_folder", "saved"]  # fixtures
TINY = TargetFiles("tiny")
SELECTOR = {**DFLASH2, "selector_top_k": 8}
NORMS = {"norm_before_residual": True, "norm_before_fc": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE-3": ("eagle3", {"vocab_size": 256}),
    "EAGLE-3, full vocabulary, other layers and norms": (
        "eagle3",
        {"vocab_size": 2048, "layers": [0, 3, 8], "architecture": NORMS},
    ),
    "DFlash": ("dflash", DFLASH),
    "DFlash, cut vocabulary, causal": (
        "dflash",
        {"vocab_size": 256, "own_embedding": True, "causal": True, **DFLASH},
    ),
    "DFlash, in a window": ("dflash", {"window": 12, "layers": [1, 3, 8], **DFLASH}),
    "DFlash2": ("dflash2", SELECTOR),
    "DSpark": ("dspark", DSPARK),
    "DSpark, idle anchor, no confidence": (
        "dspark",
        {"sample_from_anchor": False, "confidence": False, **DSPARK},
    ),
    "GKD draft": ("causal", {"num_layers": 2}),
}


@pytest.mark.sweep(4, free=("case",))
@pytest.mark.parametrize("case", CASES)
def test_files_come_back_bit_by_bit(case: str, tiny: Target, tmp_path: Path) -> None:
    """A drafter written as GGUF has no fault, and returns with its settings and its bits."""
    family, options = CASES[case]
    start = ours(tmp_path / "start", tiny, family, **options)
    convert(start, tmp_path / "gguf", "gguf", TINY)
    assert not find_faults(tmp_path / "gguf")
    convert(tmp_path / "gguf", tmp_path / "back", "spectrain", TINY)
    before, after = (read_drafter(path, TINY) for path in (start, tmp_path / "back"))
    assert without_defaults(before.drafter) == without_defaults(after.drafter)
    assert before.tensors.keys() == after.tensors.keys()
    for name, tensor in before.tensors.items():
        assert after.tensors[name].dtype == tensor.dtype and torch.equal(
            after.tensors[name], tensor
        ), name


def without_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with a model's configuration complete, where files hold what differs from
    transformers' defaults.
    """
    architecture = settings.get("architecture", {})
    if "model_type" not in architecture:
        return settings
    left_out = {"dtype": None, "transformers_version": None, "pad_token_id": None}
    return {
        **settings,
        "architecture": AutoConfig.for_model(**{**architecture, **left_out}).to_dict(),
    }


def find_faults(directory: Path) -> set[str]:
    """Return the names of the faults that files show, compared with the tiny target."""
    files = read_files(directory)
    return {finding.name for finding in check_files(files, detect_layout(files), TINY)}


def rotate_halves(state: Tensor, angles: Tensor) -> Tensor:
    """Rotate dimension i with dimension i + d/2, as transformers does; state [heads, d], angles
    [d/2].
    """
    first, second = state.chunk(2, dim=-1)
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        dim=-1,
    )


def rotate_neighbours(state: Tensor, angles: Tensor) -> Tensor:
    """Rotate dimension 2 i with dimension 2 i + 1, as llama.cpp does for Llama."""
    first = state[..., 0::2]
    second = state[..., 1::2]
    pairs = [
        first * angles.cos() - second * angles.sin(),
        second * angles.cos() + first * angles.sin(),
    ]
    return torch.stack(pairs, dim=-1).flatten(-2)


def test_reordered_rows_give_the_same_scores() -> None:
    """Queries and keys of reordered rows, rotated as neighbours, have the products of the
    original ones, rotated by halves.
    """
    torch.manual_seed(0)
    weights = torch.randn(2, 3 * 8, 16, dtype=torch.float64)
    x = torch.randn(16, dtype=torch.float64)
    angles = torch.randn(4)
    halves = [rotate_halves((weight @ x).view(3, 8), angles) for weight in weights]
    pairs = [
        rotate_neighbours((interleave_heads(weight, 3) @ x).view(3, 8), angles)
        for weight in weights
    ]
    torch.testing.assert_close((pairs[0] * pairs[1]).sum(-1), (halves[0] * halves[1]).sum(-1))
    assert torch.equal(separate_heads(interleave_heads(weights[0], 3), 3), weights[0])
    assert torch.equal(interleave_heads(weights[0], 3), interleave(weights[0], 8))


def save_model(folder: Path, kind: str) -> Target:
    """A small random model of a type with the tiny target's tokenizer; queries, keys and values
    of Qwen2 have biases.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128 if kind == "qwen3" else 16,
        vocab_size=2048,
        tie_word_embeddings=kind == "qwen3",
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    TINY.tokenizer.save_pretrained(folder)
    return load_hf(str(folder), dtype="float32")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_our_targets(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target written as GGUF and read by transformers' own reader has the same logits, bit for
    bit.

    The tokenizer is compared for Llama alone: for others transformers makes that of the published
    models.
    """
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))
    target = save_model(tmp_path / "model", kind)
    file = write_target(TargetFiles(str(tmp_path / "model")), tmp_path, "float32")
    again = load_hf(str(file), dtype="float32")
    tokens = torch.randint(3, 2000, (1, 24))
    assert torch.equal(again.model(tokens).logits, target.model(tokens).logits)
    text = "Once upon a time, 12 bees flew  home.\n"
    assert kind != "llama" or again.tokenizer(text).input_ids == target.tokenizer(text).input_ids


@pytest.mark.parametrize(
    ("dtype", "error"), [("bfloat16", 2**-8), ("float16", 2**-11), ("q8_0", 0.02), ("q4_0", 0.15)]
)
def test_types_of_weights(dtype: str, error: float, tiny: Target, tmp_path: Path) -> None:
    """Matrices have the requested type and differ by its rounding; norms and ids keep theirs."""
    start = ours(tmp_path / "start", tiny, "eagle3", vocab_size=256)
    convert(start, tmp_path / "gguf", "gguf", TINY, dtype)
    types = {
        tensor.name: tensor.tensor_type.name
        for tensor in open_gguf(tmp_path / "gguf" / "drafter.gguf").tensors
    }
    assert types.pop("d2t") == "I64" and types.pop("output_norm.weight") == "F32"
    assert (
        {"bfloat16": "BF16", "float16": "F16"}.get(dtype, dtype.upper())
        == types["fc.weight"]
        == types["output.weight"]
    )
    before, after = (read_drafter(path, TINY).tensors for path in (start, tmp_path / "gguf"))
    for name in ("fc.weight", "self_attn.q_proj.weight"):
        difference = (before[name] - after[name].float()).norm() / before[name].norm()
        assert 0 < difference < error, name


def test_rows_that_are_no_multiple_of_a_block_are_float16(tmp_path: Path) -> None:
    """A matrix of 40 columns cannot be cut into blocks of 32; one of three dimensions stays
    float32.
    """
    shapes = {"a": (2, 64), "b": (2, 40), "c": (2, 2, 32)}
    sources = {name: TensorSource.from_tensor(torch.ones(shape)) for name, shape in shapes.items()}
    write_gguf(tmp_path / "x.gguf", "llama", {}, sources, "q8_0")
    reader = open_gguf(tmp_path / "x.gguf")
    assert [tensor.tensor_type.name for tensor in reader.tensors] == ["Q8_0", "F16", "F32"]
    assert {name: tuple(tensor.shape) for name, tensor in read_tensors(reader).items()} == shapes


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "two layers": ("eagle3", {"num_layers": 2}, "drafter.num_layers=1"),
    "a window": ("eagle3", {"window": 8}, "drafter.window=null"),
    "two fused layers": ("eagle3", {"layers": [2, 5]}, "exactly three layers"),
    "norms of the fused layers": ("eagle3", {"architecture": {"fc_norm": True}}, "fc_norm=false"),
    "normed feedback": ("eagle3", {"architecture": {"norm_output": True}}, "norm_output=false"),
    "head norms": ("eagle3", {"architecture": {"qk_norm": True}}, "qk_norm=false"),
    "a gated Markov head": ("dspark", {"markov_head": "gated", **DSPARK}, "markov_head=vanilla"),
    "shifted blocks": (
        "dflash",
        {"sample_from_anchor": True, **DFLASH},
        "sample_from_anchor=false",
    ),
    "many candidates": ("dflash2", DFLASH2, "needs a width of 272"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_cannot_read_is_refused(case: str, tiny: Target, tmp_path: Path) -> None:
    """Each refusal names what to train instead, and nothing is written."""
    family, options, remedy = REFUSED[case]
    options = {"vocab_size": 256, **options} if family == "eagle3" else options
    start = ours(tmp_path / "start", tiny, family, **options)
    with pytest.raises(UserError, match=remedy):
        convert(start, tmp_path / "out", "gguf", TINY)
    assert not (tmp_path / "out").exists()


def test_other_refusals(tiny: Target, tmp_path: Path) -> None:
    """A missing target, a type that does not exist, and a type for another format are refused by
    name.
    """
    start = ours(tmp_path / "start", tiny, "eagle3", vocab_size=256)
    with pytest.raises(UserError, match="--target: the file holds its tokenizer"):
        convert(start, tmp_path / "out", "gguf", None) if read_drafter(
            start
        ).target is None else refuse_without_target(start)
    with pytest.raises(UserError, match="dtype=q3: .*q8_0"):
        convert(start, tmp_path / "out", "gguf", TINY, "q3")
    with pytest.raises(UserError, match="dtype=q8_0: .*format=gguf"):
        convert(start, tmp_path / "out", "vllm", TINY, "q8_0")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "drafter.gguf").write_bytes(b"GGUF, cut off")
    with pytest.raises(UserError, match="it cannot be read"):
        lint(tmp_path / "bad", None)


def refuse_without_target(start: Path) -> None:
    from spectrain.export.layouts import select_layout

    select_layout("eagle3", "gguf").write(read_drafter(start, TINY), None, start)


FAULTS: dict[str, tuple[str, Change]] = {
    "offsets for ids": ("d2t-offsets", lambda keys,
        tensors: tensors["d2t"].sub_(torch.arange(256))),
    "SGLang's layer numbers": ("layer-ids-numbering", lambda keys,
        tensors: keys.update({"eagle3.target_layers": [1, 3, 4]})),
    "two layers": ("layer-ids-count", lambda keys,
        tensors: keys.update({"eagle3.target_layers": [2, 4]})),
    "no layers": ("missing-key", lambda keys, tensors: keys.pop("eagle3.target_layers")),
    "a layer too far": ("layer-ids-range", lambda keys,
        tensors: keys.update({"eagle3.target_layers": [2, 4, 9]})),
    "no norm": ("missing-tensor", lambda keys, tensors: tensors.pop("output_norm.weight")),
    "no fc": ("missing-fc", lambda keys, tensors: tensors.pop("fc.weight")),
    "another tokenizer": (
        "tokenizer", lambda keys,
        tensors: keys.update({"tokenizer.ggml.tokens": keys["tokenizer.ggml.tokens"][::-1]})),
    "another rotary embedding": ("rope", lambda keys,
        tensors: keys.update({"eagle3.rope.freq_base": 50.0})),
    "scaled frequencies without their settings": (
        "not-representable", lambda keys,
        tensors: tensors.update({"rope_freqs.weight": torch.ones(16)})),
}  # fmt: skip


@pytest.mark.sweep(3, free=("case",))
@pytest.mark.parametrize("case", FAULTS)
def test_seeded_faults(case: str, tiny: Target, tmp_path: Path) -> None:
    """Each fault of a file is found by its name."""
    name, change = FAULTS[case]
    convert(
        ours(tmp_path / "start", tiny, "eagle3", vocab_size=256), tmp_path / "out", "gguf", TINY
    )
    assert name in find_faults(change_gguf(tmp_path / "out", change))


@pytest.mark.parametrize(
    ("case", "reorder"), [("EAGLE-3", separate), ("DFlash", interleave), ("GKD draft", separate)]
)
def test_the_order_of_heads_is_an_interpretation(
    case: str, reorder: Callable[[Tensor, int], Tensor], tiny: Target, tmp_path: Path
) -> None:
    """A file with queries and keys in the wrong order is read wrongly, and the linter's other
    reading is the right one.
    """
    family, options = CASES[case]
    start = ours(tmp_path / "start", tiny, family, **options)
    convert(start, tmp_path / "out", "gguf", TINY)
    change_gguf(tmp_path / "out", lambda keys, tensors: change_rows(tensors, reorder, 32))
    files = read_files(tmp_path / "out")
    layout = detect_layout(files)
    right = read_drafter(start, TINY).tensors
    wrong = layout.read(files, TINY)
    (other,) = layout.interpretations(wrong)
    name = next(name for name in right if name.endswith("q_proj.weight"))
    assert not torch.equal(wrong.tensors[name], right[name])
    assert other.finding_name == "heads-permuted" and torch.equal(
        other.drafter.tensors[name], right[name]
    )


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_3_frequencies() -> None:
    """The file's divisors turn plain frequencies into transformers' own for Llama 3."""
    config = LlamaConfig(hidden_size=1024, num_attention_heads=8, rope_parameters=LLAMA3)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    torch.testing.assert_close(
        plain / rope_tensors(config.to_dict())["rope_freqs.weight"], expected
    )


def test_scaled_rotary_embeddings_come_back(tiny: Target, tmp_path: Path) -> None:
    """A drafter of a target with scaled positions keeps their settings; a kind that llama.cpp
    lacks is refused by name.
    """
    start = ours(
        tmp_path / "start", tiny, "eagle3", vocab_size=256, architecture={"rope_parameters": LLAMA3}
    )
    convert(start, tmp_path / "out", "gguf", TINY)
    assert read_drafter(tmp_path / "out", TINY).drafter["architecture"]["rope_parameters"] == LLAMA3
    assert (
        scaling_keys("llama", {"rope_type": "linear", "factor": 4}, 2048)[
            "llama.rope.scaling.factor"
        ]
        == 4.0
    )
    yarn = scaling_keys("llama", {"rope_type": "yarn", "factor": 4}, 2048)
    assert yarn["llama.rope.scaling.original_context_length"] == 2048
    with pytest.raises(UserError, match="longrope"):
        scaling_keys("llama", {"rope_type": "longrope", "factor": 4}, 2048)


def make_tokenizer(*steps: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE with these steps before the merges."""
    vocab = {character: i for i, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab | {"<s>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps)) if len(steps) > 1 else steps[0]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_kinds_of_tokenizers_by_their_steps() -> None:
    """GPT-2, SmolLM, Llama 3 and Qwen split texts differently; others have no name here."""
    byte_level = pre_tokenizers.ByteLevel

    def make_split(digits: str) -> Any:
        return pre_tokenizers.Split(Regex(SPLIT.replace("DIGITS", digits)), "isolated")

    steps = {
        "gpt-2": [byte_level(add_prefix_space=False)],
        "smollm": [
            pre_tokenizers.Digits(individual_digits=True),
            byte_level(add_prefix_space=False),
        ],
        "llama-bpe": [make_split("{1,3}"), byte_level(add_prefix_space=False, use_regex=False)],
        "qwen2": [make_split(""), byte_level(add_prefix_space=False, use_regex=False)],
        None: [pre_tokenizers.Whitespace()],
    }
    for name, parts in steps.items():
        backend = json.loads(make_tokenizer(*parts).backend_tokenizer.to_str())
        assert find_pre_tokenizer(backend) == name
    assert find_pre_tokenizer({"model": {"type": "Unigram"}}) is None


def test_keys_of_a_tokenizer() -> None:
    """Rows without a token are unused ones, special tokens are control tokens, and the target's
    own file is copied.
    """
    keys = tokenizer_keys(TINY)
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.token_type"]) == 2048
    assert (
        keys["tokenizer.ggml.tokens"][2] == "<|im_end|>"
        and keys["tokenizer.ggml.eos_token_id"] == 2
    )
    assert keys["tokenizer.ggml.token_type"][:4] == [int(gguf.TokenType.CONTROL)] * 3 + [
        int(gguf.TokenType.NORMAL)
    ]
    assert (
        keys["tokenizer.ggml.add_bos_token"] is False
        and keys["tokenizer.chat_template"] == TINY.tokenizer.chat_template
    )


def test_the_tokenizer_of_a_targets_own_file_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that is a GGUF file gives its own keys, as its maker wrote them."""
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))
    save_model(tmp_path / "model", "llama")
    file = write_target(TargetFiles(str(tmp_path / "model")), tmp_path, None)
    change_gguf(tmp_path, lambda keys, tensors: keys.update({"tokenizer.ggml.pre": "smollm"}))
    target = TargetFiles(str(file))
    written = read_keys(open_gguf(file), with_vocabulary=True)
    assert tokenizer_keys(target) == {
        key: value for key, value in written.items() if key.startswith("tokenizer.")
    }
    assert target.vocab_size == 2048 and target.num_layers == 2


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    """A model type, a setting or a tensor that llama.cpp's classes lack is named."""
    with pytest.raises(UserError, match="model_type=gpt2"):
        complete_config({"model_type": "gpt2"})
    with pytest.raises(UserError, match="mlp_bias=True"):
        complete_config({"model_type": "llama", "mlp_bias": True})
    config = complete_config(
        {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    )
    source = TensorSource.from_tensor(torch.ones(2, 2))
    with pytest.raises(UserError, match=r"extra\.weight"):
        write_model(tmp_path / "x.gguf", config, {"extra.weight": replace(source)}, {}, None)


def test_model_cards_say_how_llama_cpp_serves(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is exported first, unless it is a GGUF file itself."""
    start = ours(tmp_path / "start", tiny, "dflash", **DFLASH)
    out = export_command(str(start), "gguf", str(tmp_path / "out"))
    drafting = f"-md {out}/drafter.gguf --spec-type draft-dflash --spec-draft-n-max 4"
    card = (out / "README.md").read_text()
    assert (
        "spectrain export target=tiny format=gguf out=target-gguf\nllama-server -m "
        f"target-gguf/target.gguf {drafting}" in card
    )
    files = TargetFiles("big.gguf")
    launch = EngineLaunch("converted", drafter=DrafterLaunch("draft-simple", "d", 3))
    expected = (
        "llama-server -m big.gguf -md d/drafter.gguf --spec-type draft-simple --spec-draft-n-max 3"
    )
    assert engine_commands(ENGINES["llamacpp"], launch, files) == expected


MEASURED_GGUF: dict[str, tuple[str, Change]] = {
    "queries and keys in transformers' order": (
        "heads-permuted",
        lambda keys, tensors: change_rows(tensors, separate, 32),
    ),
    "layers one lower": (
        "layer-ids-off-by-one",
        lambda keys, tensors: keys.update({"eagle3.target_layers": [1, 3, 4]}),
    ),
    "the other residual": (
        "norm-before-residual-swapped",
        lambda keys, tensors: keys.update({"eagle3.norm_before_residual": True}),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MEASURED_GGUF)
def test_measured_faults(case: str, eagle3_folder: Path, tmp_path: Path) -> None:
    """Faults that llama.cpp reads without an error are found by name, and sound files have no
    finding.
    """
    name, change = MEASURED_GGUF[case]
    convert(eagle3_folder, tmp_path / "out", "gguf", TINY)
    assert not lint(tmp_path / "out", TINY)
    assert name in {finding.name for finding in lint(change_gguf(tmp_path / "out", change), TINY)}


UNFIT_WEIGHTS: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "a missing one": (remove(UP), f"^{UP}: it is not among the weights"),
    "another shape": (
        lengthen(UP),
        rf"^{UP} has the shape \[129, 64\], and \[128, 64\] by the model's config.json",
    ),
    "integers": (
        lambda weights: weights.update({UP: weights[UP].to(torch.int8)}),
        rf"model.safetensors: {UP} holds no real numbers \(int8\)",
    ),
    "NaN": (
        lambda weights: weights[UP].fill_(torch.nan),
        f"model.safetensors: {UP} holds NaN or infinity",
    ),
}


@pytest.mark.parametrize("case", UNFIT_WEIGHTS)
def test_a_weight_of_a_target_that_is_unfit_is_named(
    case: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    change, sentence = UNFIT_WEIGHTS[case]
    folder = saved(tmp_path / "small", change)
    with pytest.raises(UserError, match=sentence):
        write_target(TargetFiles(str(folder)), tmp_path, None)
