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
