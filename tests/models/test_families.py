"""Every family on ten targets of unlike kinds: it decodes as `generate` does, or is refused in a
sentence.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spectrain.config.build import build
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.session import Session
from spectrain.errors import UserError
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.loading import load_hf, load_tokenizer
from spectrain.models.lora import merge_lora
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from tests.drafters.test_contract import FAMILIES, composed

from . import architectures

TARGETS = (
    "llama",
    "qwen3_moe",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "gemma4_text",
    "llama4_text",
    "qwen3_next",
    "lfm2",
    "qwen3_vl",
)
KEEP_STATES = ("qwen3_next", "lfm2")
# Families that draft with a model of some of the target's layers unless told otherwise.
WITH_CAUSAL = (
    "atspeed",
    "chosen_by_row",
    "graph",
    "other_device",
    "ouroboros",
    "prompt_variants",
    "training_wheels",
    "union",
)
REFUSED: dict[tuple[str, str], str] = {
    **{
        (target, family): "keep a state"
        for target in KEEP_STATES
        for family in (
            "early_exit",
            "layer_skip",
            "kangaroo",
            "adaptive_skip",
            "exits",
            "fine_tuned_streaming",
            "joint_exits",
            "jump",
        )
    },
    **{(target, "self"): "are recurrent" for target in KEEP_STATES},
    **{
        (target, family): "does not run token by token"
        for target in (*KEEP_STATES, "llama4_text")
        for family in (
            "gated_lora",
            "hidden_transfer",
            "speculative_streaming",
            "ppd",
            "uno",
        )
        if (target, family) != ("lfm2", "uno")  # which runs there
    },
    **{("gemma4_text", family): "cannot be cut" for family in ("causal", "pard", *WITH_CAUSAL)},
    **{
        (target, family): "keep a state|add its architecture|cannot be cut"
        for target in KEEP_STATES
        for family in ("causal", "pard", *WITH_CAUSAL)
    },
    **{
        ("qwen3_vl", family): "processor of images could not be loaded"
        for family in ("prompt_variants", "pruned_images", "vispec")
    },
    ("gemma4_text", "mtp"): "further modules",
    ("llama4_text", "self"): "within chunks",
}
# whose draft models are of another family
UNCUT = {target for target, family in REFUSED if family == "causal"}
EAGLE = {"choice": "eagle3", "vocab_size": 512}
UNCUT_SETTINGS: dict[str, dict[str, Any]] = {
    "cascade": {"inner": EAGLE, "ahead": 0, "handover": 2},
    "chosen": {"inner": ["ngram", EAGLE]},
}
WORDS = 2048  # of the tokenizer
NEW_TOKENS = 12
SMALL: dict[str, dict[str, Any]] = {
    "eagle3": {"vocab_size": 512},
    "hybrid": {"inner": EAGLE},
    "dflash": {"num_layers": 1, "block_size": 4},
    "dspark": {"num_layers": 1, "block_size": 4},
    "dflash2": {"num_layers": 1, "block_size": 4},
    "domino": {"num_layers": 1, "block_size": 4},
    "xpress": {"num_layers": 1, "block_size": 4},
    "lilicorr": {"num_layers": 1, "block_size": 4, "correction_width": 16, "factor_width": 8},
    "peagle": {"num_layers": 1},
    "medusa": {"num_heads": 2},
    "early_exit": {"exit_layer": 2},
    "layer_skip": {"skipped": [1]},
    "kangaroo": {"exit_layer": 2},
    "causal": {"num_layers": 2},
    "two_stage_head": {"rank": 16},
    "self": {"budget": 12, "observe": 4},
}


@pytest.fixture(scope="module", params=TARGETS)
def case(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Target, list[list[int]], list[list[int]]]]:
    """Yield a target, two prompts, and the outputs of `generate`."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(architectures.SMALL, "vocab_size", WORDS)
        patch.setitem(architectures.SMALL, "vocab_size_per_layer_input", WORDS)
        architectures.save_small(request.param, folder)
    load_tokenizer(str(TINY_DIRECTORY), False, True).save_pretrained(folder)
    target = load_hf(str(folder), request.param, device="cpu")
    torch.manual_seed(0)
    prompts = [torch.randint(3, WORDS, (length,)).tolist() * 2 for length in (9, 6)]
    with reference_model(target) as model:
        expected = [generate(model, prompt, NEW_TOKENS, target.stop_ids) for prompt in prompts]
    yield request.param, target, prompts, expected


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_every_kind_of_target(
    case: tuple[str, Target, list[list[int]], list[list[int]]], family: str
) -> None:
    """With random weights, a tree and a chain over two texts together give the outputs of
    `generate`.
    """
    name, target, prompts, expected = case

    def decode_outputs() -> list[list[list[int]]]:
        torch.manual_seed(0)
        settings = {
            **SMALL.get(family, {}),
            **(UNCUT_SETTINGS.get(family, {}) if name in UNCUT else {}),
        }
        drafter = build({**composed(f"drafter={family}").drafter, **settings}, target=target)
        counts = torch.ones(target.head.vocab_size, dtype=torch.int64)
        counts[0] = 0  # the tokenizer's padding, which is taken for a mask token
        drafter.prepare(target, counts)
        sessions = [
            Session(target, Greedy(), drafter.eval(), builder)
            for builder in (Eagle2(3, 8), Chain(3))
        ]
        return [
            [generation.output for generation in session.decode(prompts, NEW_TOKENS)]
            for session in sessions
        ]

    if (name, family) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[name, family]):
            decode_outputs()
    else:
        assert decode_outputs() == [expected, expected]
    merge_lora(target)  # no family finds the untrained adapters of another
