"""The command `spectrain export` with the layouts of ideas."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spectrain.models.target import Target
from tests.cli.test_export import export_run, make_run


def test_peft_reads_the_exported_adapter(tiny: Target, tmp_path: Path) -> None:
    """peft loads the adapter into the target; masks and sampler lie beside it, where peft does
    not look.
    """
    from peft import PeftModel

    out = export_run(
        make_run(tmp_path / "run", tiny, "gated_lora", num_masks=2, rank=4),
        "peft",
        tmp_path / "out",
    )
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny.path), out)
    written = load_file(out / "adapter_model.safetensors")
    loaded = dict(model.named_parameters())
    for name, tensor in written.items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], tensor)
    assert json.loads((out / "gated_lora.json").read_text())["num_masks"] == 2


def test_engines_choose_among_all_tokens(tiny: Target, tmp_path: Path) -> None:
    """SGLang's Domino and vLLM's XPress draft from a part of the vocabulary unless told
    otherwise; what we prove is the choice among all tokens.
    """
    sizes = {"num_layers": 1, "block_size": 4, "rank": 8}
    domino = make_run(tmp_path / "domino", tiny, "domino", gru_width=16, **sizes)
    config = json.loads((export_run(domino, "sglang", tmp_path / "a") / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"]["projector_type"] == "domino"
    card = (tmp_path / "a" / "README.md").read_text()
    assert "--speculative-domino-candidate-pool-size 0" in card
    xpress = make_run(tmp_path / "xpress", tiny, "xpress", sample_from_anchor=False, **sizes)
    config = json.loads((export_run(xpress, "vllm", tmp_path / "b") / "config.json").read_text())
    assert (config["architectures"], config["xpress_topc"]) == (["Qwen3XPressModel"], 0)
    assert "vLLM from 0.33:" in (tmp_path / "b" / "README.md").read_text()
