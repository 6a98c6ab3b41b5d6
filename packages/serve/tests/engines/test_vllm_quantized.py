"""vLLM serves what we export with quantized weights: the same text as without a drafter, and the
acceptance of our own decoding with the rounded weights.

With int8 and fp8 vLLM also rounds the inputs of these products, which our score does not: that is
within the tolerance here. Its CPU kernel of 4-bit weights takes bfloat16 alone, so it is not run.
"""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("compressed_tensors")

from spectrain.cli.export import export_command
from spectrain.config.build import GroupSpec
from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.eval.prompts import read_prompts
from spectrain.export.converter import read_drafter
from spectrain.export.measure import load_drafter
from spectrain.export.targets import TargetFiles
from spectrain.models.loading import load_tiny
from spectrain.trees import Chain

from .clients import answer_offline, count_rounds
from .test_vllm import PROMPTS, TOKENS, PlainAnswers, assert_close, assert_same

RUN = Path(os.environ.get("SPECTRAIN_ENGINES_RUNS", "runs")) / "engines-tiny-eagle3"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    """The tiny target, held-out prompts, and vLLM's answers without a drafter."""
    target = load_tiny(dtype="float32")
    prompts = [
        tokenize_prompt(target.template, prompt.opening_conversation)
        for prompt in read_prompts(None, PROMPTS).prompts
    ]
    answers = answer_offline(
        Path(target.path),
        None,
        prompts,
        [TOKENS] * len(prompts),
        tmp_path_factory.mktemp("plain"),
    )
    return PlainAnswers(target, prompts, answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "settings"),
    [("int8", {}), ("int8", {"fc": True, "head": True}), ("fp8", {})],
    ids=["int8", "int8-all", "fp8"],
)
def test_vllm_accepts_as_we_do_with_rounded_weights(
    scheme: str, settings: dict[str, Any], plain: PlainAnswers, tmp_path: Path
) -> None:
    """Every answer is vLLM's own without a drafter, and at every position the accepted drafts are
    those of our chain with the weights that the folder stands for."""
    spec = GroupSpec("quantize", scheme, {"tolerance": 0.5, "prompts": 4, **settings})
    out = export_command(str(RUN), "vllm", str(tmp_path / "out"), quantize=spec)
    command = re.search(r"^vllm serve .*$", (out / "README.md").read_text(), re.MULTILINE)
    assert command is not None
    words = shlex.split(command[0])
    config: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    drafter = load_drafter(read_drafter(out, TargetFiles("tiny")), plain.target)
    chain = Chain(config["num_speculative_tokens"])
    generations = [
        decode(plain.target, [prompt], Greedy(), TOKENS, drafter, chain)[0]
        for prompt in plain.prompts
    ]
    limits = [1 + sum(generation.complete_round_lengths) for generation in generations]
    answers = answer_offline(Path(plain.target.path), config, plain.prompts, limits, tmp_path)
    assert_same(plain, answers.tokens, plain.plain.tokens)
    assert answers.counts is not None
    ours = count_rounds(generations)
    print(f"{scheme} {settings}: vLLM {answers.counts}, ours {ours}")
    assert_close(answers.counts, ours)
