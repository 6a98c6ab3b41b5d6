"""Settings of adapters that are not plain LoRA's, or contradict the tensors: refused by lint and
by eval.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from spectrain.errors import UserError
from spectrain.export.converter import convert
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from spectrain.runs.drafters import load_for_decoding
from tests.export.test_absurd_configs import lint_errors
from tests.export.test_converter import ours

ADAPTERS: dict[str, tuple[str, str, Any, str]] = {
    "modules in a list": (
        "adapter_config",
        "target_modules",
        [[10**9]],
        "target_modules is [[1000000000]], and the factors are",
    ),
    "a module that is not adapted": (
        "adapter_config",
        "target_modules",
        ["x"],
        "target_modules is ['x'], and the factors are for down_proj",
    ),
    "transposed": (
        "adapter_config",
        "fan_in_fan_out",
        -1,
        "fan_in_fan_out is -1, and plain LoRA has False",
    ),
    "another rank": ("adapter_config", "r", 3, "r is 3, and the factors have rank 2"),
    "an endless update": (
        "adapter_config",
        "lora_alpha",
        1e300,
        "lora_alpha is 1e+300, and it is a number above 0",
    ),
    "another layer": (
        "adapter_config",
        "layers_to_transform",
        [-1],
        "layers_to_transform is [-1], and the factors are for [0",
    ),
    "DoRA": ("adapter_config", "use_dora", True, "use_dora is True, and plain LoRA has False"),
    "no masks": ("gated_lora", "num_masks", None, "num_masks is None, and the other files imply 2"),
    "a width": (
        "gated_lora",
        "width",
        "float99",
        "width is float99, and the other files imply 128",
    ),
    "a sampler": (
        "gated_lora",
        "sampler",
        float("inf"),
        "sampler is inf, and the other files imply True",
    ),
    "a rank": ("gated_lora", "rank", 7, "rank is 7, and the other files imply 2"),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny: Target) -> dict[str, Path]:
    """Return a gated LoRA drafter in our own and in peft's layout."""
    folder = tmp_path_factory.mktemp("adapters")
    own = ours(folder / "own", tiny, "gated_lora", num_masks=2, rank=2)
    return {"own": own, "peft": convert(own, folder / "peft", "peft", TargetFiles("tiny"))}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_another_kind_are_refused(
    adapters: dict[str, Path], tiny: Target, tmp_path: Path, name: str
) -> None:
    """Lint and eval name the file, the key and what is right; eval of our own layout reads
    adapter_config.json too.
    """
    stem, key, value, problem = ADAPTERS[name]
    for layout in ("peft",) if stem == "gated_lora" else ("peft", "own"):
        folder = tmp_path / layout
        shutil.copytree(adapters[layout], folder)
        path = folder / f"{stem}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        assert any(f"{stem}.json: {problem}" in error for error in lint_errors(folder)), (
            lint_errors(folder)
        )
        with pytest.raises(UserError) as refused:
            load_for_decoding(folder, tiny)
        assert f"{stem}.json: {problem}" in str(refused.value)
