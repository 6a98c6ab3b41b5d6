"""vLLM serves what we export with quantized weights: the same text as without a drafter, and the
acceptance of our own decoding with the rounded weights.

With int8 and fp8 vLLM also rounds the inputs of these products, which our score does not: that is
within the tolerance here. Its kernel of 4-bit weights for CPUs refuses float32, so w4a16 is served
in bfloat16, beside the same weights written as ordinary ones.
"""

import json
import operator
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
from spectrain.export.converter import convert, read_drafter
from spectrain.export.measure import load_drafter
from spectrain.export.targets import TargetFiles
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.trees import Chain

from .clients import Answers, answer_offline, count_rounds
from .test_vllm import PROMPTS, TOKENS, PlainAnswers, assert_close, assert_same

RUN = Path(os.environ.get("SPECTRAIN_ENGINES_RUNS", "runs")) / "engines-tiny-eagle3"


@pytest.fixture(scope="module")
def target() -> Target:
    return load_tiny(dtype="float32")


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    """Held-out prompts as token ids."""
    return [
        tokenize_prompt(target.template, prompt.opening_conversation)
        for prompt in read_prompts(None, PROMPTS).prompts
    ]


@pytest.fixture(scope="module")
def plain(
    target: Target, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> PlainAnswers:
    """The tiny target, the prompts, and vLLM's answers without a drafter."""
    answers = answer_offline(
        Path(target.path),
        None,
        prompts,
        [TOKENS] * len(prompts),
        tmp_path_factory.mktemp("plain"),
    )
    return PlainAnswers(target, prompts, answers)


def export_rounded(spec: GroupSpec, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Export the drafter; return its folder and the speculative_config of its card."""
    out = export_command(str(RUN), "vllm", str(folder / "out"), quantize=spec)
    command = re.search(r"^vllm serve .*$", (out / "README.md").read_text(), re.MULTILINE)
    assert command is not None
    words = shlex.split(command[0])
    config: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return out, config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "settings"),
    [("int8", {}), ("int8", {"fc": True, "head": True}), ("fp8", {})],
    ids=["int8", "int8-all", "fp8"],
)
def test_vllm_accepts_as_we_do_with_rounded_weights(
    scheme: str, settings: dict[str, Any], plain: PlainAnswers, tmp_path: Path
) -> None:
    """Every answer is vLLM's own without a drafter, and it accepts what our chain accepts with the
    weights that the folder stands for.

    vLLM rounds the inputs of these products, too, so that single drafts differ, in both directions.
    Tokens per forward agree within 2 %, and the rates of single positions, of which the last
    accepts 100 drafts, within 10 %.
    """
    spec = GroupSpec("quantize", scheme, {"tolerance": 0.5, "prompts": 4, **settings})
    out, config = export_rounded(spec, tmp_path)
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
    assert_close(answers.counts, ours, tolerance=0.1)
    lengths = [1 + counts.num_accepted / counts.num_rounds for counts in (answers.counts, ours)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.02)


@pytest.mark.slow
def test_vllm_drafts_by_4_bit_weights_as_by_the_same_weights_in_bfloat16(
    target: Target, prompts: list[list[int]], tmp_path: Path
) -> None:
    """With 4-bit weights vLLM accepts at every position what it accepts with a folder that holds
    the rounded weights as ordinary ones; in float32 it refuses them."""
    spec = GroupSpec("quantize", "w4a16", {"tolerance": 0.5, "prompts": 4})
    packed, config = export_rounded(spec, tmp_path)
    ordinary = convert(packed, tmp_path / "ordinary", "vllm", TargetFiles("tiny"))

    def answer(folder: Path, dtype: str) -> Answers:
        return answer_offline(
            Path(target.path),
            config | {"model": str(folder)},
            prompts,
            [TOKENS] * len(prompts),
            tmp_path,
            dtype=dtype,
        )

    by_packed, by_ordinary = (answer(folder, "bfloat16") for folder in (packed, ordinary))
    same = sum(map(operator.eq, by_packed.tokens, by_ordinary.tokens))
    print(f"w4a16: {by_packed.counts}, as ordinary weights {by_ordinary.counts}, {same} same")
    assert by_packed.counts is not None and by_ordinary.counts is not None
    assert_close(by_packed.counts, by_ordinary.counts)
    with pytest.raises(AssertionError, match="cpu_gemm_wna16.* not implemented for"):
        answer(packed, "float32")
