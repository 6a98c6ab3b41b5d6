"""MTP layers in checkpoints are read in each layout, written into the target's files, and
drafted with by transformers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.mtp import Mtp
from spectrain.errors import UserError
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.layout import DrafterCheckpoint
from spectrain.export.layouts import detect_layout
from spectrain.export.mtp import MTP_SHARD, MTP_TARGET
from spectrain.export.targets import TargetFiles
from spectrain.features.batch import Batch
from spectrain.models.architectures.mtp import MTP_LAYOUTS, CheckpointReader, load_mtp_layer
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.checkpoint_files import INDEX_FILE
from spectrain.models.loading import load_hf, load_tokenizer
from spectrain.models.target import Target
from spectrain.runs.drafters import load_weights
from spectrain.training.checkpoints import collect_tensors
from spectrain.trees import Chain
from tests.decoding.rounds import Keeping
from tests.models.architectures import LAYERS, save_small

NEW_TOKENS = 12
PROMPT = [5, 17, 40, 8, 8, 61, 33]
# transformers drafts for them
SHIPPING = {"glm4_moe": "DeepSeek-V3", "deepseek_v3": "DeepSeek-V3", "mellum": "Qwen3-Next"}
# for which it drafts nothing, but has the layer
RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def save_target(name: str, folder: Path, shard_size: str | None = None) -> Path:
    """Save a small random target of an architecture; with a size, in shards."""
    save_small(name, folder)
    if shard_size is not None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size=shard_size)
    load_tokenizer(str(TINY_DIRECTORY), False, True).save_pretrained(folder)
    return folder


def make_drafter(target: Target, **options: Any) -> Mtp:
    """Make a drafter whose every parameter is random, norms included."""
    torch.manual_seed(1)
    drafter = Mtp(target, start="new", **options)
    for parameter in drafter.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = (
            1.5 * noise * parameter.shape[-1] ** -0.5
            if noise.dim() > 1
            else parameter.data + 0.2 * noise
        )
    return drafter.eval()


def make_checkpoint(drafter: Mtp) -> DrafterCheckpoint:
    """Return what `save_drafter` writes and a layout reads."""
    tensors = {drafter.names[name]: tensor for name, tensor in collect_tensors(drafter).items()}
    return DrafterCheckpoint("mtp", {"num_steps": 3, "start": "new"}, tensors)


def write_stitched(drafter: Mtp, source: Path, out: Path) -> Path:
    out.mkdir()
    MTP_TARGET.write(make_checkpoint(drafter), TargetFiles(str(source)), out)
    return out


def load_stitched(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load the stitched model in transformers, with nothing missing and nothing unexpected. For
    DeepSeek's layout transformers knows MTP layers by the layer number of the released models, 61
    or 92: here it is 4."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if SHIPPING.get(name) == "DeepSeek-V3":
        import transformers

        kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
        monkeypatch.setattr(
            kind, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}.*"]
        )
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and not report["mismatched_keys"]
    )
    return model.eval()


@pytest.mark.sweep(1, free=("name",))
@pytest.mark.parametrize("name", SHIPPING)
def test_transformers_drafts_what_is_drafted_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """generate(use_mtp=True) on the stitched copy has our drafts in every round, our tokens, and
    as many forwards.
    """
    source = save_target(name, tmp_path / "target")
    target = load_hf(str(source))
    drafter = make_drafter(target)
    model = load_stitched(name, write_stitched(drafter, source, tmp_path / "stitched"), monkeypatch)
    reference: list[int] = []
    plain = MTPCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = plain(self, input_ids, *args, **kwargs)
        reference.extend(candidates[0, input_ids.shape[1] :].tolist())
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
    forwards = []
    model.model.register_forward_hook(lambda *args: forwards.append(1))
    output = model.generate(
        torch.tensor([PROMPT]),
        use_mtp=True,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    recorder = Keeping(Chain(1))
    generation = decode(target, [PROMPT], Greedy(), NEW_TOKENS, drafter, recorder, ignore_eos=True)[
        0
    ]
    assert output[0, len(PROMPT) :].tolist() == generation.output
    drafted = [int(tree.tokens[0, 1]) for tree in recorder.trees]
    assert drafted[: len(reference)] == reference and len(reference) >= NEW_TOKENS // 2
    assert len(forwards) == 1 + len(generation.round_lengths)


@torch.no_grad()
@pytest.mark.parametrize("name", RECURRENT)
def test_logits_are_those_of_the_layer_in_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of transformers' MtpModel, loaded from the stitched copy, are those of our
    first draft step.
    """
    source = save_target(name, tmp_path / "target")
    target = load_hf(str(source))
    drafter = make_drafter(target)
    model = load_stitched(name, write_stitched(drafter, source, tmp_path / "stitched"), monkeypatch)
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    tokens = torch.randint(3, 90, (1, 14))
    final = model.model(tokens, use_cache=False).last_hidden_state
    positions = torch.arange(1, 14)[None]
    reference = MtpModel.from_pretrained(model)
    cache = MtpCache(config=model.config.get_mtp_config())
    _, expected, _ = reference(tokens[:, 1:], final[:, :-1], None, positions, cache)
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    states, _ = drafter.run_step(
        batch, target.features(tokens, ("final",)).at_layer("final"), 0, []
    )
    torch.testing.assert_close(target.head.logits(states[:, -2:-1]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.sweep(3, free=("name",))
@pytest.mark.parametrize("shard_size", [None, "20KB"])
@pytest.mark.parametrize("name", [*SHIPPING, *RECURRENT])
def test_what_is_stitched_in_is_what_the_target_ships(
    name: str, shard_size: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new layer is added and a shipped one replaced; both are read again bit by bit, and all
    else stays the same.
    """
    source = save_target(name, tmp_path / "target", shard_size)
    target = load_hf(str(source))
    first = make_drafter(target)
    second = make_drafter(target)
    for parameter in second.parameters():
        parameter.data += 0.5
    once = write_stitched(first, source, tmp_path / "once")
    twice = write_stitched(second, once, tmp_path / "twice")
    before = load_hf(str(source)).model.state_dict()
    for folder, drafter in ((once, first), (twice, second)):
        shipping = load_hf(str(folder))
        reloaded = Mtp(shipping)
        assert not reloaded.is_new_layer
        for key, tensor in collect_tensors(drafter).items():
            assert torch.equal(tensor, reloaded.state_dict()[key])
        after = shipping.model.state_dict()
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
        files = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        actual_files = {
            tensor: path.name for path in folder.glob("*.safetensors") for tensor in load_file(path)
        }
        assert actual_files == files and sum(file == MTP_SHARD for file in files.values()) == len(
            shipped_names(folder)
        )
        assert detect_layout(DrafterFiles.from_directory(folder)) is MTP_TARGET
        other = make_drafter(target)
        load_weights(other, folder, target)  # as drafter.init does
        assert all(
            torch.equal(tensor, other.state_dict()[key])
            for key, tensor in collect_tensors(drafter).items()
        )


def shipped_names(folder: Path) -> list[str]:
    checkpoint = CheckpointReader(folder)
    layout = checkpoint.mtp_layout
    assert layout is not None
    return checkpoint.layer_tensor_names(layout, checkpoint.layer_prefixes(layout)[0])


def test_mimo_reads_the_state_first(tmp_path: Path) -> None:
    """MiMo's projection takes [state, embedding]: its formula over its files equals our
    projection.
    """
    source = save_target("qwen3, no windows", tmp_path / "target")
    target = load_hf(str(source))
    drafter = make_drafter(target)
    mimo = next(layout for layout in MTP_LAYOUTS if layout.title == "MiMo")
    tensors = {
        mimo.prefix.format(index=0) + name: tensor
        for name, tensor in mimo.to_checkpoint(make_checkpoint(drafter).tensors, False).items()
    }
    hidden = torch.randn(2, 5, target.width)
    embedded = torch.randn(2, 5, target.width)

    def apply_norm(x: Tensor, name: str) -> Tensor:
        weight = tensors[f"model.mtp_layers.0.{name}.weight"]
        return weight * x * (x.square().mean(-1, keepdim=True) + target.config.rms_norm_eps).rsqrt()

    both = torch.cat(
        [apply_norm(hidden, "hidden_layernorm"), apply_norm(embedded, "token_layernorm")], dim=-1
    )
    expected = both @ tensors["model.mtp_layers.0.input_proj.weight"].T
    actual = drafter.fc(torch.cat([drafter.enorm(embedded), drafter.hnorm(hidden)], dim=-1))
    torch.testing.assert_close(actual, expected)
    assert {name for name in tensors if "layernorm" in name and "attn" not in name} >= {
        f"model.mtp_layers.0.{name}_layernorm.weight"
        for name in ("token", "hidden", "final", "input", "post_attention")
    }


def test_experts_are_fused_and_unfused(tmp_path: Path) -> None:
    """A checkpoint with every expert by itself and one with fused experts hold the same layer."""
    source = save_target("qwen3_next", tmp_path / "target")
    drafter = make_drafter(load_hf(str(source)))
    tensors = make_checkpoint(drafter).tensors
    layout = MTP_LAYOUTS[0]
    unfused, fused = (layout.to_checkpoint(tensors, by_expert) for by_expert in (True, False))
    assert sum("experts.3." in name for name in unfused) == 3 and not any(
        "experts.3." in name for name in fused
    )
    for form in (unfused, fused):
        internal = layout.to_internal(form)
        assert internal.keys() == tensors.keys() and all(
            torch.equal(tensor, tensors[name]) for name, tensor in internal.items()
        )


def test_a_target_without_a_reader_is_refused(tiny: Target, tmp_path: Path) -> None:
    """A Llama is refused, because no engine drafts with its MTP layers."""
    with pytest.raises(UserError, match="no engine drafts with MTP layers for llama"):
        write_stitched(make_drafter(tiny), TINY_DIRECTORY, tmp_path / "stitched")
    with pytest.raises(
        UserError, match="holds no MTP layer of a known layout; use drafter.start=new"
    ):
        load_mtp_layer(str(TINY_DIRECTORY))
