"""transformers decodes with our DFlash: the target's own text, in as many target forwards as we
take.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.export.converter import convert, read_drafter
from spectrain.export.measure import load_drafter
from spectrain.export.targets import TargetFiles
from spectrain.models.target import Target
from spectrain.trees import Chain
from tests.drafters.blocks import block_states

from .test_converter import DFLASH, ours

TINY = TargetFiles("tiny")
PROMPTS = [[5, 9, 200, 31, 7], [11, 300, 42, 8, 77, 5, 1200]]
LIMIT = 24


def test_generate_drafts_as_we_do(tiny: Target, tmp_path: Path) -> None:
    """`generate(.., speculation_type="dflash")` with an export has our output, our rounds and
    our states.
    """
    start = ours(tmp_path / "start", tiny, "dflash", **DFLASH)
    convert(start, tmp_path / "out", "hf", TINY)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny.path, dtype="float32").eval()
    assistant, info = AutoModel.from_pretrained(
        tmp_path / "out", dtype="float32", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    drafter: Any = load_drafter(read_drafter(start, TINY), tiny)
    calls: list[int] = []
    model.register_forward_hook(lambda module, args, output: calls.append(1))
    states: list[Tensor] = []
    assistant.register_forward_hook(
        lambda module, args, output: states.append(output.last_hidden_state[0])
    )
    for prompt in PROMPTS:
        options: dict[str, Any] = {
            "do_sample": False,
            "max_new_tokens": LIMIT,
            "eos_token_id": -1,
            "pad_token_id": 0,
        }
        tokens = torch.tensor([prompt])
        plain = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[
            0, len(prompt) :
        ].tolist()
        calls.clear()
        states.clear()
        generated = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            assistant_model=assistant,
            speculation_type="dflash",
            **options,
        )[0, len(prompt) :].tolist()
        ours_generation = decode(
            tiny, [prompt], Greedy(), LIMIT, drafter, Chain(4), ignore_eos=True
        )[0]
        assert generated == plain == ours_generation.output
        assert len(calls) == 1 + len(ours_generation.round_lengths)
        torch.testing.assert_close(
            states[0][1:],
            block_states(drafter, tiny, [*prompt, generated[0]]),
            rtol=1e-4,
            atol=1e-4,
        )
