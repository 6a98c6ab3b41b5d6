"""Cases of the ideas for tests/conf/test_conf.py."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import spectrain
from packages.research.tests.ideas.encoder_models import save_model

TINY = Path(spectrain.__file__).parent / "data" / "tiny"


def list_required_settings(folder: Path) -> dict[tuple[str, str], list[str]]:
    """Return the settings that a choice requires, with files of this folder."""
    (folder / "judge").mkdir()
    save_file(
        {"probe.weight": torch.zeros(1, 4), "probe.bias": torch.zeros(1)},
        folder / "judge" / "model.safetensors",
    )
    return {
        ("target", "encoder_decoder"): [f"target.model={save_model('t5', folder / 't5')}"],
        ("target", "codes"): [f"target.model={TINY}", "++target.codes=null"],
        ("acceptance", "nearby"): [f"acceptance.codebook={TINY}"],
        ("acceptance", "near"): [f"acceptance.codebook={TINY}"],
        ("acceptance", "judge"): [f"acceptance.path={folder / 'judge'}"],
    }


CASES: dict[str, Any] = {
    "required_settings": [list_required_settings],
    "test_own_data_is_read_whole": ["judge"],
}
